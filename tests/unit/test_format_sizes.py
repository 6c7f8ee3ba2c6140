"""The size formulas: hand-computed values, and properties over many shapes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gemrun.format import assemble, sizes
from gemrun.format.spec import (
    Buffer,
    Conf,
    Format,
    KvType,
    KvUnit,
    Layer,
    Op,
    Role,
    Segment,
    Tensor,
)
from golden import make


def segment(fmt: Format, groups: int, first: int = 0) -> Segment:
    return Segment(format=fmt, first_group=first, group_count=groups)


def test_superblocks_are_those_of_the_layout() -> None:
    assert sizes.superblock_size(Format.Q4H, 8) == 2304  # 2048 + 128 + 128
    assert sizes.superblock_size(Format.Q4H, 2) == 576  # 512 + 32 + 32
    assert sizes.superblock_size(Format.Q4H, 1) == 320  # 288 padded
    assert sizes.superblock_size(Format.Q4RAW_BF16, 8) == 2304
    assert sizes.superblock_size(Format.Q8, 8) == 4224  # 4096 + 128
    assert sizes.superblock_size(Format.Q8, 1) == 576  # 528 padded
    with pytest.raises(ValueError, match="no superblocks"):
        sizes.superblock_size(Format.F32, 1)


def test_a_width_of_576_takes_4_6_bits() -> None:
    panel = sizes.panel_size(576, [segment(Format.Q4H, 18)])
    assert panel == 64 + 2304 * 2 + 576
    assert 8 * panel / (16 * 576) == pytest.approx(4.56, abs=0.01)


def test_a_change_of_format_ends_a_superblock() -> None:
    mixed = [segment(Format.Q4H, 3), segment(Format.Q8, 1, 3), segment(Format.Q4H, 4, 4)]
    assert sizes.panel_size(256, mixed) == 64 + 896 + 576 + 1152


def test_tensors_of_every_format() -> None:
    rows = Tensor(role=Role.Q, rows=40, cols=96, rows_padded=48, cols_padded=96)
    assert sizes.tensor_size(rows, [segment(Format.F32, 3)]) == (3 * 96 * 64, 0)
    assert sizes.tensor_size(rows, [segment(Format.F16, 3)]) == (3 * 96 * 32, 0)
    assert sizes.tensor_size(rows, [segment(Format.Q8_ROWS, 3)]) == (3 * (64 + 768), 3 * 768)
    both = replace(rows, role=Role.GATE_UP, parts=2)
    assert sizes.tensor_size(both, [segment(Format.F32, 3)])[0] == 6 * 96 * 64
    norm = Tensor(role=Role.FINAL_NORM, rows=1, cols=33, rows_padded=1, cols_padded=33)
    assert sizes.tensor_size(norm, [segment(Format.VECTOR, 2)]) == (192, 0)


def test_float_panels_hold_exactly_their_inputs() -> None:
    assert sizes.panel_size(5, [segment(Format.F16, 1)]) == 192  # 160 padded
    assert sizes.panel_size(5, [segment(Format.F32, 1)]) == 320


@pytest.mark.parametrize(
    ("context", "window", "blocks"),
    [(1024, 0, 32), (1024, 512, 17), (512, 512, 16), (33, 0, 2), (64, 33, 2), (1000, 1, 2)],
)
def test_ring_blocks(context: int, window: int, blocks: int) -> None:
    assert sizes.kv_blocks(context, window) == blocks


def test_ring_block_sizes() -> None:
    assert sizes.kv_block_size(KvType.INT8, 64, 64) == 2 * 32 * 66
    assert sizes.kv_block_size(KvType.INT8, 256, 32) == 2 * 32 * (256 + 16)
    assert sizes.kv_block_size(KvType.F32, 64, 0) == 2 * 32 * 256
    assert sizes.kv_block_size(KvType.F16, 6, 0) == 768


def test_the_layout_id_sees_everything_that_moves_a_token() -> None:
    conf = Conf(kv_type=2, context=64, layer_count=1)
    layer = Layer(kv_heads=1, head_dim=16, kv_group=16, kv_blocks=2, window=0)
    base = sizes.kv_layout_id(conf, [layer])
    others = [
        sizes.kv_layout_id(replace(conf, context=65), [layer]),
        sizes.kv_layout_id(replace(conf, kv_type=1), [layer]),
        *(
            sizes.kv_layout_id(conf, [replace(layer, **{name: 8})])
            for name in ("kv_heads", "head_dim", "kv_group", "kv_blocks", "window")
        ),
    ]
    assert base not in others
    assert len(set(others)) == len(others)
    assert base == sizes.kv_layout_id(conf, [replace(layer, heads=7, ffn=9)])


def test_rings_of_units() -> None:
    layer = Layer(kv_heads=3, head_dim=64, kv_group=64, kv_blocks=32, unit_first=2)
    block = 2 * 32 * 66
    assert [sizes.unit_blocks(layer, *keep) for keep in ((0, 0), (1, 7), (2, 28))] == [32, 9, 31]
    own = ((1, 7, 9, 0), (0, 0, 32, 9), (1, 3, 5, 41))
    units = [KvUnit()] * 2 + [*(KvUnit(s, r, blocks=b, first=f) for s, r, b, f in own)]
    assert sizes.units_of(layer, units) == units[2:]
    assert sizes.units_of(layer, ()) == ()
    assert sizes.kv_layer_blocks(layer, units) == 46
    assert sizes.kv_layer_blocks(layer) == 96
    assert sizes.kv_layer_size(KvType.INT8, layer, units) == 46 * block
    conf = Conf(kv_type=int(KvType.INT8))
    assert sizes.rings_size(conf, [layer, layer]) == 2 * 96 * block
    assert sizes.kv_size(conf, [layer, layer], units) == sizes.pad(2 * 46 * block, 4096)


def test_the_layout_id_sees_the_units() -> None:
    conf = Conf(kv_type=2, context=64, layer_count=1)
    layer = Layer(kv_heads=2, head_dim=16, kv_group=16, kv_blocks=8)
    ids = {
        sizes.kv_layout_id(conf, [layer], [KvUnit(*a), KvUnit(*b)])
        for a in ((0, 0), (1, 2), (2, 1))
        for b in ((0, 0), (1, 2), (2, 1))
    }
    assert len(ids | {sizes.kv_layout_id(conf, [layer])}) == 10


def test_the_engine_keeps_a_copy_of_the_units() -> None:
    assert sizes.engine_size(1, 1, 1, 1, 256) == sizes.engine_size(1, 1, 1, 1) + 4096


def test_activations_come_in_the_forms_that_are_read() -> None:
    assert sizes.act_size(16, 100, True, False) == 16 * 128 + 2 * 256
    assert sizes.act_size(16, 100, False, True) == 6400
    assert sizes.act_size(16, 100, True, True) == 16 * 128 + 512 + 6400
    assert sizes.act_size(16, 100, False, False) == 0


def test_buffers_of_a_tiny_model() -> None:
    records = make.build(make.INT4).records
    got = sizes.buffer_sizes(records.conf, records.layers, records.tensors, records.segments)
    assert got[Buffer.X] == 16 * 32 * 4
    assert got[Buffer.XN] == 16 * 32 + 64 + 64
    assert got[Buffer.Q] == 16 * 32 + 16 * 2 * 4
    assert got[Buffer.KV] == 2 * 16 * 16 + 2 * 64
    assert got[Buffer.SCORES] == 8 * 64 * 4
    assert got[Buffer.LOGITS] == 4 * 288
    assert got[Buffer.SEEN] == 64
    assert got[Buffer.PROMPT] == 320
    assert got[Buffer.TOK] == 32 * (16 * 64 + 4096) + 65536
    assert all(size % 64 == 0 for size in got.values())


def test_logits_and_hidden_state_survive_tokenising() -> None:
    for kind in (Buffer.LOGITS, Buffer.HIDDEN):
        assert sizes.LIFETIMES[kind] == (Op.TOK, Op.SAMPLE)


def test_totals_add_up() -> None:
    done = assemble.assemble(make.build(make.INT4).records)
    t, h = done.totals, done.header
    assert t.total == t.weights + t.arena + t.kv + t.tables + t.engine + t.stacks == h.ram_total
    assert t.weights + t.tables == sizes.pad(done.file_size, 4096)
    assert t.stacks == 262144  # two threads
    assert t.engine % 4096 == 0


def test_placed_tensors_ascend_without_wide_gaps() -> None:
    rng = random.Random(5)
    for _ in range(20):
        tensors, segments = [], []
        for _ in range(rng.randrange(1, 9)):
            rows, cols = rng.randrange(1, 200), rng.randrange(1, 200)
            fmt = rng.choice(list(Format))
            vector = fmt == Format.VECTOR
            segments.append(segment(fmt, sizes.groups_of(cols)))
            tensors.append(
                Tensor(
                    rows=1 if vector else rows,
                    cols=cols,
                    rows_padded=sizes.pad(rows, 16),
                    seg_first=len(segments) - 1,
                    seg_count=1,
                )
            )
        placed, end = assemble.place_tensors(tensors, segments)
        at = 0
        for tensor in placed:
            assert tensor.offset == sizes.pad(at, 256)
            at = tensor.offset + tensor.size
            if tensor.second_size:
                assert tensor.second_offset == sizes.pad(at, 256)
                at = tensor.second_offset + tensor.second_size
        assert at == end


def test_features_follow_from_the_records() -> None:
    conf = Conf(kv_type=int(KvType.INT8))
    assert sizes.features_of(conf, [segment(Format.Q4H, 1), segment(Format.VECTOR, 1)]) == 0b100011
    conf = replace(conf, kv_type=int(KvType.F16))
    assert sizes.features_of(conf, [segment(Format.F16, 1)]) == 0b1010001
    assert sizes.features_of(conf, [segment(Format.F16, 1)], [KvUnit()]) == 0b11010001
