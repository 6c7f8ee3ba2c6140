"""Units: what is derived from (sink, recent), what is refused, and an artifact written again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz.mutate import find, reseal, section_range
from gemrun.format import assemble, manifest, sizes, spec, units, writer
from gemrun.format.assemble import EVERYTHING, Keep, place_units
from gemrun.format.codes import Code, FormatError
from gemrun.format.reader import read_artifact
from gemrun.format.spec import KvUnit
from gemrun.format.writer import WriteError
from golden import make

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "v1.0"
MASKED, DENSE = GOLDEN / "tiny-kvmask.gembin", GOLDEN / "tiny-int4.gembin"
KEEPS = ((0, 0), (0, 0), (1, 1), (0, 0))


def vectors_of(path: Path) -> bytes:
    with read_artifact(path) as artifact:
        return bytes(artifact.section("TEST"))


# ---- units of a model ----
def test_blocks_places_and_sizes_follow() -> None:
    records = make.build(make.MASKED).records
    layers, found = place_units(records.conf, records.layers, ((0, 0), (0, 0), (2, 1), (1, 2)))
    wanted = ((0, 0, 2, 0), (0, 0, 2, 2), (2, 1, 4, 0), (1, 2, 4, 4))
    assert found == tuple(KvUnit(s, r, blocks=b, first=f) for s, r, b, f in wanted)
    assert [layer.unit_first for layer in layers] == [0, 2]
    block = sizes.kv_block_size(records.conf.kv_type, 16, 16)
    assert [layer.kv_size for layer in layers] == [4 * block, 8 * block]
    assert [layer.kv_offset for layer in layers] == [0, 4 * block]


def test_places_count_lines_where_values_have_4_bits() -> None:
    records = make.build(make.MASKED).records
    conf, keeps = records.conf, ((0, 0), (0, 0), (1, 1), (0, 0))
    wide = sizes.kv_block_size(conf.kv_type, 16, 16)
    narrow = sizes.kv_block_size(conf.kv_type, 16, 16, value4=True)
    assert (wide, narrow) == (32 * (32 + 4), 32 * (24 + 4))
    layers, found = place_units(conf, records.layers, keeps, (True, False, False, True))
    assert [unit.flags for unit in found] == [1, 0, 0, 1]
    assert [unit.first for unit in found] == [0, 2 * narrow // 64, 0, 3 * wide // 64]
    assert [layer.kv_size for layer in layers] == [2 * narrow + 2 * wide, 3 * wide + 5 * narrow]
    assert sizes.kv_size(conf, layers, found) == sizes.pad(sum(la.kv_size for la in layers), 4096)
    features = sizes.features_of(conf, records.segments, found)
    assert features & spec.Feature.KV_VALUE4
    assert features & spec.Feature.KV_MASK
    plain = place_units(conf, records.layers, keeps, [False] * 4)
    assert plain == place_units(conf, records.layers, keeps)
    assert sizes.kv_layout_id(conf, *plain) != sizes.kv_layout_id(conf, layers, found)


def test_places_where_values_and_keys_have_4_bits() -> None:
    records = make.build(make.MASKED).records
    conf, keeps = records.conf, ((0, 0), (0, 0), (1, 1), (0, 0))
    value4, key4 = (False, False, True, True), (False, True, True, False)
    wide, narrow, least = (32 * (codes + 4) for codes in (32, 24, 16))
    assert sizes.kv_block_size(conf.kv_type, 16, 16, key4=True) == narrow
    assert sizes.kv_block_size(conf.kv_type, 16, 16, value4=True, key4=True) == least
    layers, found = place_units(conf, records.layers, keeps, value4, key4)
    assert [unit.flags for unit in found] == [0, 2, 3, 1]
    assert [(unit.value4, unit.key4) for unit in found] == list(zip(value4, key4, strict=True))
    assert [unit.first for unit in found] == [0, 2 * wide // 64, 0, 3 * least // 64]
    assert [layer.kv_size for layer in layers] == [2 * wide + 2 * narrow, 3 * least + 5 * narrow]
    features = sizes.features_of(conf, records.segments, found)
    assert features & spec.KV_4BIT == spec.KV_4BIT
    alone = place_units(conf, records.layers, (), (), key4)[1]
    features = sizes.features_of(conf, records.segments, alone)
    assert features & spec.KV_4BIT == spec.Feature.KV_KEY4


def test_all_heads_may_keep_everything_in_4_bits() -> None:
    records = make.build(make.MASKED).records
    layers, found = place_units(records.conf, records.layers, (), [True] * 4)
    assert [(unit.sink, unit.recent, unit.value4) for unit in found] == [(0, 0, True)] * 4
    assert [layer.unit_first for layer in layers] == [0, 2]


@pytest.mark.parametrize(("kv_type", "head_dim"), [(spec.KvType.F16, 16), (spec.KvType.INT8, 18)])
def test_values_of_4_bits_need_an_int8_cache_and_whole_lines(kv_type: int, head_dim: int) -> None:
    records = make.build(make.MASKED).records
    conf = replace(records.conf, kv_type=int(kv_type))
    group = head_dim if kv_type == spec.KvType.INT8 else 0
    layers = [replace(layer, head_dim=head_dim, kv_group=group) for layer in records.layers]
    with pytest.raises(FormatError, match="flags is 1"):
        place_units(conf, layers, (), [False, False, False, True])
    with pytest.raises(FormatError, match="flags is 2"):
        place_units(conf, layers, (), (), [False, False, False, True])


@pytest.mark.parametrize("keeps", [(), [EVERYTHING] * 4])
def test_heads_that_all_keep_everything_have_no_units(keeps: Sequence[Keep]) -> None:
    records = make.build(make.MASKED).records
    layers, found = place_units(records.conf, records.layers, keeps)
    assert found == ()
    assert layers == assemble.place_kv(records.conf, records.layers)
    assert [layer.unit_first for layer in layers] == [0, 0]


@pytest.mark.parametrize(
    ("keep", "says"),
    [
        ((0, 1), "sink is 0"),
        ((1, 0), "sink of a head that keeps all is 1"),
        ((1, 3), "sink + recent + 1 is 5, 3 to 4"),  # of 5 blocks: it would save nothing
        ((6, 1), "sink is 6"),
        ((1, 6), "recent is 6"),
        ((-1, 1), "sink is -1"),
        ((1, -1), "recent is -1"),
    ],
)
def test_what_the_format_refuses(keep: Keep, says: str) -> None:
    records = make.build(make.MASKED).records
    with pytest.raises(FormatError, match=re.escape(says)) as caught:
        place_units(records.conf, records.layers, ((0, 0), (0, 0), (1, 1), keep))
    assert caught.value.code == Code.KVMK
    assert str(caught.value).startswith("layer 1, KV head 1: ")


def test_a_layer_with_a_window_keeps_all_of_it() -> None:
    records = make.build(make.MASKED).records
    with pytest.raises(FormatError, match="layer 0, KV head 1: window of a head that keeps a part"):
        place_units(records.conf, records.layers, ((0, 0), (1, 1), (0, 0), (0, 0)))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_every_kv_head_has_a_unit(count: int) -> None:
    records = make.build(make.MASKED).records
    with pytest.raises(ValueError, match=f"{count} units for 4 KV heads"):
        place_units(records.conf, records.layers, [(0, 0)] * count)


# ---- an artifact again ----
def test_values_there_and_back(tmp_path: Path) -> None:
    narrow = GOLDEN / "tiny-value4.gembin"
    units.with_units(narrow, tmp_path / "a", KEEPS, fill=lambda _: vectors_of(narrow))
    with read_artifact(tmp_path / "a") as artifact:
        assert not any(units.value4_of(artifact))
        assert units.keeps_of(artifact) == KEEPS
        wide = sum(layer.kv_size for layer in artifact.layers)
    units.with_units(
        tmp_path / "a", tmp_path / "b", KEEPS, value4=make.VALUE4.value4,
        kv_values={"units": 4, "value4": 2}, fill=lambda _: vectors_of(narrow),
    )  # fmt: skip
    with read_artifact(tmp_path / "b") as artifact:
        assert units.value4_of(artifact) == make.VALUE4.value4
        assert artifact.manifest["kv_values"] == {"units": 4, "value4": 2}
        assert sum(layer.kv_size for layer in artifact.layers) == wide - (2 + 3) * 32 * 8
    units.with_units(
        tmp_path / "b", tmp_path / "c", KEEPS, value4=make.VALUE4.value4,
        fill=lambda _: vectors_of(narrow),
    )  # fmt: skip
    assert (tmp_path / "c").read_bytes() == narrow.read_bytes()
    wrong = {"units": 4, "value4": 3}
    units.with_units(tmp_path / "b", tmp_path / "d", KEEPS, kv_values=wrong)
    with pytest.raises(FormatError, match=r"kv_values\.value4 is 3, the records say 0"):
        read_artifact(tmp_path / "d")


def test_keys_there_and_back(tmp_path: Path) -> None:
    narrow, vectors = GOLDEN / "tiny-key4.gembin", vectors_of(GOLDEN / "tiny-key4.gembin")
    bits = {"value4": make.KEY4.value4, "key4": make.KEY4.key4}
    units.with_units(narrow, tmp_path / "a", KEEPS, fill=lambda _: vectors)
    units.with_units(
        tmp_path / "a", tmp_path / "b", KEEPS, **bits, kv_keys={"units": 4, "key4": 2},
        fill=lambda _: vectors,
    )  # fmt: skip
    with read_artifact(tmp_path / "b") as artifact:
        assert units.key4_of(artifact) == make.KEY4.key4
        assert units.value4_of(artifact) == make.KEY4.value4
        assert artifact.manifest["kv_keys"] == {"units": 4, "key4": 2}
    units.with_units(tmp_path / "b", tmp_path / "c", KEEPS, **bits, fill=lambda _: vectors)
    assert (tmp_path / "c").read_bytes() == narrow.read_bytes()
    units.with_units(tmp_path / "b", tmp_path / "d", KEEPS, kv_keys={"units": 4, "key4": 3})
    with pytest.raises(FormatError, match=r"kv_keys\.key4 is 3, the records say 0"):
        read_artifact(tmp_path / "d")


def test_the_same_units_give_the_same_file(tmp_path: Path) -> None:
    done = units.with_units(MASKED, tmp_path / "a", KEEPS, fill=lambda _: vectors_of(MASKED))
    assert (tmp_path / "a").read_bytes() == MASKED.read_bytes()
    assert done.size == MASKED.stat().st_size


@pytest.mark.parametrize("keeps", [(), [EVERYTHING] * 2])
def test_full_units_give_the_dense_file(tmp_path: Path, keeps: Sequence[Keep]) -> None:
    units.with_units(DENSE, tmp_path / "a", keeps, fill=lambda _: vectors_of(DENSE))
    assert (tmp_path / "a").read_bytes() == DENSE.read_bytes()


def test_there_and_back(tmp_path: Path) -> None:
    """The dense file of a masked one does not depend on the way to it."""
    dense = make.build(replace(make.MASKED, keeps=()), vectors_of(MASKED))
    make.write(dense, tmp_path / "dense")
    fill = lambda _: vectors_of(MASKED)  # noqa: E731
    units.with_units(MASKED, tmp_path / "a", [EVERYTHING] * 4, fill=fill)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "dense").read_bytes()
    units.with_units(tmp_path / "dense", tmp_path / "b", KEEPS, fill=fill)
    assert (tmp_path / "b").read_bytes() == MASKED.read_bytes()


def test_tests_are_blank_until_they_are_filled_in(tmp_path: Path) -> None:
    units.with_units(MASKED, tmp_path / "a", KEEPS)
    with read_artifact(tmp_path / "a") as artifact:
        assert [(t.prompt_count, t.digest) for t in artifact.tests] == [(1, 0), (1, 0)]
        assert units.keeps_of(artifact) == KEEPS
    writer.fill_tests(tmp_path / "a", make.run_tests(tmp_path / "a", make.MASKED.prompt))
    assert (tmp_path / "a").read_bytes() == MASKED.read_bytes()


def test_the_engine_fills_them_in_before_the_file_has_its_name(tmp_path: Path) -> None:
    def fill(partial: Path) -> bytes:
        assert not (tmp_path / "a").exists()
        return make.run_tests(partial, make.MASKED.prompt)

    units.with_units(MASKED, tmp_path / "a", ((0, 0), (0, 0), (1, 2), (1, 1)), fill=fill)
    from gemrun import GemRunContext

    with GemRunContext(tmp_path / "a", ignore_memory=True) as engine:
        assert engine.run_tests() == 2
    assert vectors_of(tmp_path / "a") != vectors_of(MASKED)


def test_a_file_may_replace_its_source(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(MASKED.read_bytes())
    units.with_units(path, path, [EVERYTHING] * 4)
    with read_artifact(path) as artifact:
        assert artifact.units == ()
        assert "KVMK" not in artifact.sections
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_pieces_may_be_smaller_than_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert units.PIECE % (2 << 20) == 0
    monkeypatch.setattr(units, "PIECE", 4096)
    units.with_units(MASKED, tmp_path / "a", KEEPS, fill=lambda _: vectors_of(MASKED))
    assert (tmp_path / "a").read_bytes() == MASKED.read_bytes()


def test_the_manifest_says_how_it_was_decided(tmp_path: Path) -> None:
    mask = {"covered": 0.5, "units": 4, "partial": 1}
    units.with_units(MASKED, tmp_path / "a", KEEPS, kv_mask=mask, notes=["one", "two"])
    with read_artifact(tmp_path / "a") as artifact:
        assert artifact.manifest["kv_mask"] == mask
        assert artifact.manifest["notes"] == ["one", "two"]
    units.with_units(tmp_path / "a", tmp_path / "b", [])  # it says nothing about other units
    with read_artifact(tmp_path / "b") as artifact:
        assert manifest.KV_MASK not in artifact.manifest
        assert artifact.manifest["notes"] == ["one", "two"]


def test_a_signature_does_not_survive(tmp_path: Path) -> None:
    raw = bytearray(MASKED.read_bytes())
    raw[256] = 1
    (tmp_path / "signed").write_bytes(raw)
    units.with_units(tmp_path / "signed", tmp_path / "a", KEEPS)
    with read_artifact(tmp_path / "a") as artifact:
        assert artifact.signature == spec.Signature()


@pytest.mark.parametrize("where", ["LAYR", "WHOT"])
def test_a_damaged_source_gets_no_new_checksums(tmp_path: Path, where: str) -> None:
    raw = bytearray(MASKED.read_bytes())
    place = section_range(raw, find(raw, where))
    assert place is not None
    raw[place[0] + 100] ^= 1
    (tmp_path / "bad").write_bytes(raw)
    with pytest.raises(FormatError):
        units.with_units(tmp_path / "bad", tmp_path / "a", KEEPS)
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def test_what_a_newer_release_wrote_is_not_dropped(tmp_path: Path) -> None:
    raw = bytearray(DENSE.read_bytes())
    entry = find(raw, "TMPL")
    raw[entry : entry + 4] = raw[entry + 96 : entry + 100] = b"WHAT"
    (tmp_path / "section").write_bytes(reseal(raw))
    raw = bytearray(DENSE.read_bytes())
    raw[14] = 1
    (tmp_path / "minor").write_bytes(reseal(raw))
    for name in ("section", "minor"):
        with pytest.raises(FormatError, match="newer than this tool") as caught:
            units.with_units(tmp_path / name, tmp_path / "a", [])
        assert caught.value.code == Code.VERSION
    assert not (tmp_path / "a").exists()


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fill(partial: Path) -> bytes:
        raise RuntimeError(partial.name)

    with pytest.raises(RuntimeError, match=r"a\.partial"):
        units.with_units(MASKED, tmp_path / "a", KEEPS, fill=fill)
    with pytest.raises(FormatError):
        units.with_units(MASKED, tmp_path / "a", ((0, 0), (0, 0), (1, 4), (0, 0)))
    with pytest.raises(ValueError, match="units for 4 KV heads"):
        units.with_units(MASKED, tmp_path / "a", [(0, 0)])
    with pytest.raises(WriteError, match="no such folder"):
        units.with_units(MASKED, tmp_path / "none" / "a", KEEPS)
    assert list(tmp_path.iterdir()) == []
