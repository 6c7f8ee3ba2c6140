"""Arena planning: the planner against the naive oracle and the verifier."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmake.passes import memplan
from gemmake.passes.memplan import Buffer

OPS = 9


@st.composite
def buffer_lists(draw: st.DrawFn) -> list[Buffer]:
    count = draw(st.integers(0, 16))
    buffers = []
    for kind in range(count):
        first = draw(st.integers(0, OPS - 1))
        last = draw(st.integers(first, OPS - 1))
        size = draw(st.integers(0, 1 << 20))
        buffers.append(Buffer(kind, f"b{kind}", size, first, last))
    return buffers


@given(buffer_lists())
def test_plans_are_valid_and_never_larger_than_the_naive_one(buffers: list[Buffer]) -> None:
    planned, naive = memplan.plan(buffers), memplan.naive(buffers)
    memplan.verify(planned)
    memplan.verify(naive)
    assert memplan.arena_size(planned) <= memplan.arena_size(naive)
    assert [replace(b, offset=0) for b in planned] == buffers


@given(buffer_lists())
def test_plan_holds_what_lives_at_any_step(buffers: list[Buffer]) -> None:
    peak = max(
        (sum(b.size for b in buffers if b.first_op <= op <= b.last_op) for op in range(OPS)),
        default=0,
    )
    assert memplan.arena_size(memplan.plan(buffers)) >= peak


@given(buffer_lists(), st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_input_order(buffers: list[Buffer], random: object) -> None:
    shuffled = list(buffers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    offsets = {b.kind: b.offset for b in memplan.plan(shuffled)}
    assert offsets == {b.kind: b.offset for b in memplan.plan(buffers)}


def test_disjoint_lives_share_bytes() -> None:
    planned = memplan.plan([Buffer(0, "a", 640, 0, 1), Buffer(1, "b", 640, 2, 3)])
    assert memplan.arena_size(planned) == 640


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (Buffer(1, "b", 64, 1, 2, 0), "a and b overlap"),
        (Buffer(1, "b", 64, 0, 0, 32), "not on 64"),
    ],
)
def test_verifier_names_the_fault(second: Buffer, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        memplan.verify([Buffer(0, "a", 64, 0, 1, 0), second])
