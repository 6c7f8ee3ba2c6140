"""Values and keys of 4 bits: order of the heads, what is judged, what is told. Pure parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gemmake.emit import Host
from gemmake.errors import UsageError
from gemmake.kvmask import values
from gemmake.kvmask.budgets import FULL, Budget
from gemmake.kvmask.gates import Quality
from gemmake.kvmask.template import Point
from gemmake.kvmask.values import KEYS, VALUES
from gemmake.options import CompileOptions, KvKeys, KvType, KvValues
from gemmake.progress import Silent
from gemmake.state import State
from golden import make

SHARES = {VALUES: np.array([[0.3, 0.1], [0.2, 0.4]])}
BOTH = SHARES | {KEYS: np.array([[9.0, 0.15], [0.45, 7.0]])}


def state_of(**changed: Any) -> State:
    """What the pure parts look at: the layers of a golden model, the second without a window."""
    records = make.build(make.MASKED).records
    fields = {
        "conf": records.conf, "layers": tuple(records.layers), "keeps": (),
        "value4": (), "key4": (), "kv_values": None, "kv_keys": None,
        "options": CompileOptions(Path("m"), "t", Path("o"), kv_values=KvValues.INT4),
    }  # fmt: skip
    return cast("State", SimpleNamespace(**(fields | changed)))


def test_heads_change_in_the_order_of_cost_a_saved_byte() -> None:
    """The first layer keeps 2 blocks, the second 5; a block saves 32 * 16 / 2 bytes."""
    steps = values.steps_of(state_of(), SHARES)
    assert [step.saved for step in steps] == [5 * 256, 2 * 256, 5 * 256, 2 * 256]
    assert [step.unit for step in steps] == [(1, 0), (0, 1), (1, 1), (0, 0)]
    sparse = state_of(keeps=((0, 0), (0, 0), (1, 1), (0, 0)))
    assert [step.saved for step in values.steps_of(sparse, SHARES) if step.unit == (1, 0)] == [768]


def test_a_head_of_an_odd_width_keeps_8_bits() -> None:
    layers = [replace(layer, head_dim=18, kv_group=18) for layer in state_of().layers]
    assert values.steps_of(state_of(layers=tuple(layers)), SHARES) == []


def test_what_is_judged_is_what_heads_keep() -> None:
    steps = values.steps_of(state_of(), SHARES)
    found = values.narrowed(state_of(keeps=((0, 0), (0, 0), (1, 1), (0, 0))), steps[:2])
    assert found.units == ((FULL, FULL), (Budget(1, 1), FULL))
    assert found.flags == ((0, 1), (1, 0))


def test_steps_of_values_and_keys_stand_in_one_order() -> None:
    steps = values.steps_of(state_of(), BOTH)
    assert [(step.part, step.unit) for step in steps] == [
        (VALUES, (1, 0)), (VALUES, (0, 1)), (KEYS, (0, 1)), (VALUES, (1, 1)), (KEYS, (1, 0)),
        (VALUES, (0, 0)), (KEYS, (1, 1)), (KEYS, (0, 0)),
    ]  # fmt: skip
    assert {step.saved for step in steps} == {5 * 256, 2 * 256}
    assert values.narrowed(state_of(), steps[:5]).flags == ((0, 3), (3, 1))
    assert values.parts_of(state_of()) == [VALUES]
    options = replace(state_of().options, kv_keys=KvKeys.INT4)
    assert values.parts_of(state_of(options=options)) == [VALUES, KEYS]


def test_some_windows_of_every_kind_are_measured() -> None:
    assert len(values.some_of([[1]] * 1000)) == 100
    assert len(values.some_of([[1]] * 24)) == 8
    assert len(values.some_of([[1]] * 3)) == 3


def test_heads_that_keep_8_bits_are_listed() -> None:
    measured = values.Measured(np.ones(2), SHARES, 10, 5000)
    point = Point(2, 0.25, Quality(0.001, 0.99, 0.002, 900))
    taken = values.steps_of(state_of(), SHARES)[:2]
    entry = values.entry(state_of(), VALUES, measured, taken, point, [point])
    assert entry["wide"] == [[0, 0], [1, 1]]
    assert (entry["units"], entry["value4"]) == (4, 2)
    assert entry["changed"] == [[0.3, 0.1], [0.2, 0.4]]
    assert values.wide_text([[0, 0], [1, 1], [1, 2]]) == "layer 0: 0; layer 1: 1 2"
    told = values.kv_lines(state_of(kv_values=entry, value4=(False, True, True, False)))
    assert "values of 4 bits in 2 of 4 KV heads" in told[0]
    assert told[1] == "  values that keep 8 bits: layer 0: 0; layer 1: 1"
    refused = entry | {"value4": 0, "wide": []}
    assert values.kv_lines(state_of(kv_values=refused)) == [
        "KV cache, values of 4 bits: no head passes the gates; all values keep 8 bits"
    ]
    assert values.kv_lines(state_of(kv_values=None)) == []


def test_heads_whose_keys_keep_8_bits_are_listed() -> None:
    measured = values.Measured(np.ones(2), BOTH, 10, 5000)
    point = Point(4, 0.25, Quality(0.001, 0.99, 0.002, 900))
    taken = values.steps_of(state_of(), BOTH)[:4]
    entries = [
        values.entry(state_of(), part, measured, taken, point, [point]) for part in (VALUES, KEYS)
    ]
    assert [entries[0]["value4"], entries[1]["key4"]] == [3, 1]
    assert [entry["wide"] for entry in entries] == [[[0, 0]], [[0, 0], [1, 0], [1, 1]]]
    assert "key4" not in entries[0]
    assert entries[1]["changed"] == [[9.0, 0.15], [0.45, 7.0]]
    state = state_of(
        kv_values=entries[0], kv_keys=entries[1], value4=(False, True, True, True),
        key4=(False, True, False, False),
    )  # fmt: skip
    told = values.kv_lines(state)
    assert told[0].startswith(
        "KV cache, values of 4 bits in 3 of 4 KV heads, keys of 4 bits in 1 of 4 KV heads: "
        "0.01 MiB,"
    )
    assert told[1:] == [
        "  values that keep 8 bits: layer 0: 0",
        "  keys that keep 8 bits: layer 0: 0; layer 1: 0 1",
    ]
    assert next(values.log_lines(state)).startswith("Values and keys of 4 bits measured on 10")
    none = entries[1] | {"key4": 0, "wide": []}
    assert values.kv_lines(state_of(kv_values=entries[0], kv_keys=none, value4=(True,) * 4))[0] == (
        "KV cache, keys of 4 bits: no head passes the gates; all keys keep 8 bits"
    )


@pytest.mark.parametrize(
    ("passing", "taken"), [({VALUES, KEYS}, 3), ({VALUES}, 2), ({KEYS}, 2), (set(), 0)]
)
def test_values_or_keys_alone_may_pass_where_both_do_not(
    monkeypatch: pytest.MonkeyPatch, passing: set[values.Part], taken: int
) -> None:
    """Only the order of steps of `passing` passes the gates."""
    looked = []

    def judge(state: State, image: Path, host: Host, steps: list[values.Step], *_: Any) -> Any:
        looked.append({step.part for step in steps})
        assert steps == sorted(steps, key=lambda step: step.cost / step.saved)
        kl = 0.0 if looked[-1] == passing else 1.0
        count = 3 if len(steps) == 8 else 2
        return [Point(count, 0.1 * len(looked), Quality(kl, 1.0, 0.0, 900))]

    monkeypatch.setattr(values, "judge", judge)
    options = replace(state_of().options, kv_keys=KvKeys.INT4)
    measured = values.Measured(np.ones(2), BOTH, 10, 5000)
    best, steps, curve = values.choose(
        state_of(options=options), Path("i"), Host(1, False), measured, [], Silent()
    )
    assert len(steps) == best.steps == taken
    assert {step.part for step in steps} <= passing
    orders = [{VALUES, KEYS}, {VALUES}, {KEYS}]
    assert looked == orders[: orders.index(passing) + 1 if passing else 3]
    # Without any that passes, the curve is that of all steps.
    assert [p.saved for p in curve] == [0.0, 0.1 * len(looked) if passing else 0.1]


def test_a_part_alone_is_judged_once() -> None:
    assert len(values.orders_of(values.steps_of(state_of(), SHARES))) == 1


def test_a_float_cache_has_no_values_of_4_bits() -> None:
    with pytest.raises(UsageError, match="--kv-values int4"):
        CompileOptions(Path("m"), "t", Path("o"), kv_type=KvType.DENSE, kv_values=KvValues.INT4)
    with pytest.raises(UsageError, match=r"--kv-keys int4: .* no keys in int8"):
        CompileOptions(Path("m"), "t", Path("o"), kv_type=KvType.DENSE, kv_keys=KvKeys.INT4)


def test_the_option_is_recorded_only_where_it_is_used() -> None:
    plain = CompileOptions(Path("m"), "t", Path("o"))
    assert "kv_values" not in plain.recorded()
    assert replace(plain, kv_values=KvValues.INT4).recorded()["kv_values"] == "int4"
    keys = replace(plain, kv_keys=KvKeys.INT4).recorded()
    assert keys["kv_keys"] == "int4"
    assert "kv_gate" in keys
    assert "kv_values" not in keys
