"""The manifest: canonical bytes, bounded reading, and agreement with the records."""

from __future__ import annotations

import math
import struct
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemrun.format import manifest, spec
from gemrun.format.codes import Code, FormatError
from gemrun.format.reader import read_artifact
from golden import make

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_round_trip(value: dict[str, Any]) -> None:
    try:
        raw = manifest.encode(value)
    except ValueError:
        return  # nested too deep
    assert manifest.decode(raw) == value
    shuffled = dict(reversed(list(value.items())))
    assert manifest.encode(shuffled) == raw


@given(st.binary(max_size=60))
def test_random_bytes_are_refused_or_canonical(raw: bytes) -> None:
    try:
        value = manifest.decode(raw)
    except FormatError:
        return
    assert manifest.encode(value) == raw


def test_keys_are_sorted_by_their_bytes() -> None:
    raw = manifest.encode({"b": 1, "a": 2, "\u00e4": 3, "Z": 4})
    assert list(manifest.decode(raw)) == ["Z", "a", "b", "\u00e4"]


def test_floats_have_a_fixed_size() -> None:
    sizes = {len(manifest.encode({"x": v})) for v in (0.0, 1.0, math.pi, -1e300, math.inf)}
    assert sizes == {12}
    raw = manifest.encode({"x": 0.1})
    assert raw.endswith(struct.pack(">d", 0.1))


def test_enums_and_tuples_become_plain() -> None:
    class Colour(IntEnum):
        RED = 3

    assert manifest.decode(manifest.encode({"c": Colour.RED, "t": (1, 2)})) == {"c": 3, "t": [1, 2]}


@pytest.mark.parametrize("value", [{"x": {1: 2}}, {"x": {2}}, {"x": object()}, {"x": 1j}])
def test_what_it_cannot_hold(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="manifest"):
        manifest.encode(value)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_depth_is_bounded_both_ways() -> None:
    manifest.decode(manifest.encode({"x": nested(manifest.MAX_DEPTH - 1)}))
    with pytest.raises(ValueError, match="deep"):
        manifest.encode({"x": nested(manifest.MAX_DEPTH)})
    with pytest.raises(FormatError, match="deep"):
        manifest.decode(msgpack.packb({"x": nested(manifest.MAX_DEPTH)}))
    with pytest.raises(FormatError, match="deep"):
        manifest.decode(b"\x81\xa1x" + b"\x91" * 1_000_000)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80\x80",  # two values
        b"\x81\xa1x",  # ends early
        b"\xdf\xff\xff\xff\xff",  # four thousand million pairs
        b"\xdd\xff\xff\xff\xff",
        b"\x81\xa1x\xc6\xff\xff\xff\xff",  # bytes beyond the end
        b"\x81\xa1x\xd4\x01\x00",  # extension
        b"\x81\xa1x\xc1",  # never used
        b"\x81\xa1x\xcc\x01",  # longer than needed
        b"\x81\xa1x\xca\x00\x00\x00\x00",  # binary32
        b"\x82\xa1b\x01\xa1a\x01",  # not sorted
        b"\x82\xa1a\x01\xa1a\x01",  # twice
        b"\x81\x01\x01",  # a number as key
        b"\x81\xa1\xff\x01",  # not UTF-8
        b"\x90",  # no map
        msgpack.packb({"x": "y" * 100})[:-1],
    ],
)
def test_bytes_that_are_refused(raw: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        manifest.decode(raw)
    assert caught.value.code == Code.MANIFEST


def test_too_large_is_refused_before_it_is_read() -> None:
    with pytest.raises(FormatError, match="above"):
        manifest.decode(bytes(spec.MAX_MANIFEST + 1))


@pytest.fixture
def artifact(tmp_path: Path) -> Any:
    make.write(make.build(make.INT4), tmp_path / "a.gembin")
    return read_artifact(tmp_path / "a.gembin")


def test_it_must_agree_with_the_records(artifact: Any) -> None:
    records = (artifact.conf, artifact.layers, artifact.tensors, artifact.segments)
    manifest.check(artifact.manifest, *records)

    def refused(change: dict[str, Any], where: str) -> None:
        with pytest.raises(FormatError, match=where) as caught:
            manifest.check({**artifact.manifest, **change}, *records)
        assert caught.value.code == Code.MANIFEST

    listed = artifact.manifest["tensors"]
    refused({"format": "gembin manifest 2"}, "keys")
    refused({"extra": 1}, "keys")
    refused({"kv": {**artifact.manifest["kv"], "layout_id": 1}}, "kv is")
    refused({"model": {**artifact.manifest["model"], "hidden": 33}}, "model is")
    refused({"tensors": listed[:-1]}, "tensors is")
    refused({"tensors": 7}, "tensors is")
    for field, value in (("role", "k"), ("layer", 1), ("format", []), ("shape", [1, 1])):
        refused({"tensors": [listed[0], {**listed[1], field: value}, *listed[2:]]}, rf"1\].{field}")
    refused({"tensors": [{**listed[0], "name": 5}, *listed[1:]]}, r"0\]\.name")


def test_what_no_record_repeats_has_its_types(artifact: Any) -> None:
    """Readers use these without looking again."""
    records = (artifact.conf, artifact.layers, artifact.tensors, artifact.segments)
    listed = artifact.manifest["tensors"]
    for key, value in (
        ("options", []),
        ("options", None),
        ("tools", "gemmake 1"),
        ("licence", b"MIT"),
        ("inputs", {}),
        ("inputs", ["a"]),
        ("notes", "a"),
        ("notes", [1]),
        ("tensors", [{**listed[0], "report": None}, *listed[1:]]),
        ("tensors", [{**listed[0], "report": {"mse": "low"}}, *listed[1:]]),
        ("tensors", [{k: v for k, v in listed[0].items() if k != "report"}, *listed[1:]]),
    ):
        with pytest.raises(FormatError, match=rf"manifest: {key}.* not ") as caught:
            manifest.check({**artifact.manifest, key: value}, *records)
        assert caught.value.code == Code.MANIFEST


def test_reports_do_not_change_the_size(artifact: Any) -> None:
    one = manifest.tensor_entry("x", artifact.tensors[1], artifact.segments, {"mse": 0.0})
    two = manifest.tensor_entry("x", artifact.tensors[1], artifact.segments, {"mse": 1.234e-5})
    assert len(manifest.encode(one)) == len(manifest.encode(two))
    assert one["format"] == [["q4h", 1]]


def test_kv_mask_may_be_left_out_and_has_to_fit_the_records() -> None:
    """Its figures stand in what gemcheck prints."""
    base = make.build(make.MASKED).records
    told = manifest.decode(base.manifest)  # type: ignore[arg-type]
    parts = (base.conf, base.layers, base.tensors, base.segments, base.units)
    manifest.check(told, *parts)
    good = {"covered": 0.75, "units": 4, "partial": 1, "curve": [[1, 0.5]]}
    manifest.check(manifest.decode(manifest.encode({**told, "kv_mask": good})), *parts)
    for wrong in (
        [],
        {},
        {**good, "covered": 1},
        {**good, "covered": 1.01},
        {**good, "covered": -0.01},
        {**good, "covered": math.nan},
        {**good, "units": 3},
        {**good, "partial": 2},
        {k: v for k, v in good.items() if k != "partial"},
    ):
        with pytest.raises(FormatError, match=r"^manifest: kv_mask") as caught:
            manifest.check({**told, "kv_mask": wrong}, *parts)
        assert caught.value.code == Code.MANIFEST
    with pytest.raises(FormatError, match="manifest: kv is"):  # the layout knows the units
        manifest.check(told, *parts[:-1])
    with pytest.raises(FormatError, match="manifest: keys"):
        manifest.check({**told, "kv_masks": good}, *parts)
