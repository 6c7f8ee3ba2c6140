"""Weights that do not stay in memory: what the records say, what is in memory at once, policy."""

from __future__ import annotations

import pytest

from gemmake.options import Offload
from gemmake.passes import offload
from gemmake.passes.layout import Stream, StreamTensor
from gemmake.passes.offload import Cost, lines
from gemrun.format import cold, spec
from gemrun.format.spec import Cold, ColdBy, Conf, Role, Tensor

MIB = 1 << 20
PAGE = 4096


def matrix(role: Role, layer: int, offset: int, size: int) -> Tensor:
    return Tensor(role=int(role), layer=layer, rows_padded=16, offset=offset, size=size)


#: Two layers; those of the second do not begin on pages.
BLOCKS = (
    matrix(Role.GATE_UP, 0, 0, 2 * PAGE),
    matrix(Role.DOWN, 0, 2 * PAGE, PAGE),
    matrix(Role.GATE_UP, 1, 3 * PAGE + 256, 2 * PAGE),
    matrix(Role.DOWN, 1, 5 * PAGE + 256, PAGE),
)
STREAMED = tuple(Cold(tensor=i) for i in range(4))
CONF = Conf(layer_count=2, threads=2)


def test_whole_pages_are_given_back_and_a_layers_blocks_stay() -> None:
    assert [p.pages for p in cold.planes(STREAMED, BLOCKS)] == [2 * PAGE, PAGE, PAGE, 0]
    size = 6 * PAGE + 256
    assert cold.streamed(STREAMED, BLOCKS) == 6 * PAGE
    # 2 + 1 + 1 pages go, 2 + 1 pages of a layer, or of DOWN and the next GATE_UP, are there.
    assert cold.resident(CONF, BLOCKS, STREAMED, size) == size - 4 * PAGE + 3 * PAGE
    # One layer alone: nothing is gained by streaming it.
    assert cold.resident(Conf(layer_count=1), BLOCKS[:2], STREAMED[:2], 3 * PAGE) == 3 * PAGE
    assert cold.resident(CONF, BLOCKS, (), size) == size


def test_attention_counts_in_the_steps_that_it_meets() -> None:
    tensors = (
        matrix(Role.Q, 0, 0, PAGE),
        matrix(Role.O, 0, PAGE, 5 * PAGE),
        matrix(Role.GATE_UP, 0, 6 * PAGE, 2 * PAGE),
        matrix(Role.DOWN, 0, 8 * PAGE, PAGE),
        matrix(Role.Q, 1, 9 * PAGE, 30 * PAGE),
    )
    records = tuple(Cold(tensor=i) for i in range(5))
    # Of 39 pages DOWN of layer 0 and Q of layer 1 are there together; O, GATE_UP, DOWN are 8.
    assert cold.resident(CONF, tensors, records, 39 * PAGE) == 31 * PAGE


def test_rows_count_what_is_mapped_around_them_and_a_head_two_slices_a_thread() -> None:
    def table(role: Role) -> Tensor:
        return Tensor(
            role=int(role), layer=-1, rows_padded=262144,
            offset=0, size=72 * MIB, second_offset=72 * MIB, second_size=64 * MIB,
        )  # fmt: skip

    low = (Cold(tensor=0, plane=1, by=int(ColdBy.ROWS)),)
    # 16 rows are 4 KiB of this plane, and a slice of 128 times 32 rows is 1 MiB.
    one, two = (Conf(threads=threads, chunk=16) for threads in (1, 2))
    row, stays = 65536 + 4096, 72 * MIB
    assert cold.resident(one, (table(Role.HEAD),), low, 136 * MIB) == stays + 144 * row + 2 * MIB
    assert cold.resident(two, (table(Role.HEAD),), low, 136 * MIB) == stays + 144 * row + 4 * MIB
    assert cold.resident(two, (table(Role.EMBED),), low, 136 * MIB) == stays + 16 * row
    many = Conf(threads=1, chunk=1024)
    assert cold.resident(many, (table(Role.EMBED),), low, 136 * MIB) == 136 * MIB
    assert cold.streamed(low, (table(Role.HEAD),)) == 0


@pytest.mark.parametrize(
    ("records", "word"),
    [
        ((Cold(tensor=4),), "out of range"),
        ((Cold(tensor=0, plane=2),), "out of range"),
        ((Cold(tensor=0, by=2),), "out of range"),
        ((Cold(tensor=0, reserved=1),), "out of range"),
        ((Cold(tensor=1), Cold(tensor=0)), "not behind"),
        ((Cold(tensor=1), Cold(tensor=1)), "not behind"),
        ((Cold(tensor=0, by=1),), "only embedding and head"),
        ((Cold(tensor=0, plane=1),), "only matrices"),
    ],
)
def test_records_that_break_a_rule(records: tuple[Cold, ...], word: str) -> None:
    assert word in cold.problem(records, BLOCKS)


def test_records_that_break_none() -> None:
    assert cold.problem(STREAMED, BLOCKS) == ""
    assert cold.problem((), BLOCKS) == ""


def test_a_norm_is_never_streamed() -> None:
    assert "only matrices" in cold.problem((Cold(),), (matrix(Role.ATTN_NORM, 0, 0, 64),))


def test_what_it_costs_is_told() -> None:
    found = Cost(size=300 * 10**6, held=200 * 10**6, rows=50 * 10**6, low=40 * 10**6,
                 streamed=75 * 10**6, head=15 * 10**6)  # fmt: skip
    first, second, third = lines(found, ("emmc", 150.0), 32)
    assert "190.7 MiB of 286.1 MiB of weights are in memory at once" in first
    assert "71.5 MiB are read from storage for every token" in first
    assert "emmc at 150 MB/s allows 2 tokens per second, and for prompts 80" in second
    assert "more than the best 64, reads 38.1 MiB" in third
    assert "does not describe its storage" in lines(found, None, 32)[1]
    assert found.tokens_per_second(150.0) == 2.0
    assert {"COLD"} <= spec.OPTIONAL_SECTIONS


# ---- a level that saves next to nothing ----
def head(rows: int, cols: int) -> Stream:
    """The weights of a model that is but a head in two planes, which is the embedding too."""
    size = rows * cols // 2
    record = Tensor(
        role=int(Role.HEAD), layer=-1, rows_padded=rows, offset=0, size=size,
        second_offset=size, second_size=size,
    )  # fmt: skip
    return Stream((StreamTensor(record, spec.Format.Q8_ROWS, ()),), (), 2 * size)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (49152, "all weights stay in memory, as rows saves nothing: 13.5 MiB could be read by "
         "rows, but 26.1 MiB of room are kept for rows of a prefill step of 128 and of the head, "
         "with 4 threads; --offload ffn saves more"),
        (98304, "rows saves 0.9 MiB of 54.0 MiB of weights: 27.0 MiB could be read by rows, but "
         "26.1 MiB of room"),
        (262144, ""),
    ],
)  # fmt: skip
def test_a_level_that_saves_next_to_nothing_says_how_much_and_why(rows: int, told: str) -> None:
    stream, conf = head(rows, 576), Conf(layer_count=1, threads=4, chunk=128)
    found = offload.records(conf, stream, offload.extent_of(Offload.ROWS, 0))
    said = offload.little(conf, stream, found, Offload.ROWS)
    assert len(said) == bool(told)
    assert all(line.startswith(f"offload: {told}") for line in said)


def test_streaming_one_layer_says_that_it_saves_nothing() -> None:
    tensors = tuple(StreamTensor(record, spec.Format.Q4H, ()) for record in BLOCKS[:2])
    stream, conf = Stream(tensors, (), 3 * PAGE), Conf(layer_count=1)
    found = offload.records(conf, stream, offload.extent_of(Offload.FFN, 1))
    (said,) = offload.little(conf, stream, found, Offload.FFN)
    assert said == (
        "offload: all weights stay in memory, as ffn saves nothing: what is read from storage "
        "needs as much room on its way"
    )
