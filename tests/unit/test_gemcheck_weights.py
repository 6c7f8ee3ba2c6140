"""Bounds of the bytes inside tensors: each rule broken once, in every format that has it."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fuzz.mutate import reseal
from gemmake.check import weights
from gemrun.format import sizes
from gemrun.format.reader import Artifact, read_artifact
from gemrun.format.spec import Format, Role, Tensor
from golden import make
from reference import make_image


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("golden")
    out = {}
    for kind in make.KINDS:
        make.write(make.build(kind), folder / "a.gembin")
        out[kind.name] = (folder / "a.gembin").read_bytes()
    return out


def find(artifact: Artifact, role: Role, layer: int = 0) -> Tensor:
    where = -1 if role in (Role.HEAD, Role.FINAL_NORM, Role.EMBED) else layer
    return next(t for t in artifact.tensors if t.role == role and t.layer == where)


def broken(image: bytes, at: int, raw: bytes) -> list[str]:
    """What is found when bytes are overwritten."""
    changed = bytearray(image)
    changed[at : at + len(raw)] = raw
    return found(bytes(reseal(changed)))


def found(image: bytes) -> list[str]:
    with read_artifact(image, image=True) as artifact:
        return [f"{p.tensor} {p.text}" for p in weights.problems(artifact)]


def place(image: bytes, role: Role) -> int:
    with read_artifact(image, image=True) as artifact:
        return find(artifact, role).offset


F32_NAN = struct.pack("<f", float("nan"))
TINY = struct.pack("<f", 2.0**-41)


def test_good_files_have_no_problem(images: dict[str, bytes]) -> None:
    for image in images.values():
        assert found(image) == []


@pytest.mark.parametrize(("raw", "text"), [(F32_NAN, "not finite"), (TINY, "below 2^-40")])
@pytest.mark.parametrize("role", [Role.Q, Role.GATE_UP, Role.DOWN, Role.HEAD])
def test_super_scales(images: dict[str, bytes], role: Role, raw: bytes, text: str) -> None:
    image = images["tiny-int4"]
    problems = broken(image, place(image, role) + 8, raw)
    assert len(problems) == 1
    assert role.name.lower() in problems[0]
    assert text in problems[0]
    assert broken(image, place(image, role) + 8, struct.pack("<f", -(2.0**-40))) == []
    assert broken(image, place(image, role) + 8, bytes(4)) == []


def test_norms_and_biases(images: dict[str, bytes]) -> None:
    image = images["tiny-f16"]
    for role in (Role.ATTN_NORM, Role.K_BIAS, Role.FINAL_NORM):
        assert "not finite" in broken(image, place(image, role), F32_NAN)[0]


def test_float_matrices(images: dict[str, bytes]) -> None:
    image = images["tiny-f16"]
    for at in (0, 500):
        problems = broken(image, place(image, Role.GATE_UP) + 2 * at, b"\x00\x7c")
        assert "not finite" in problems[0]


def test_sixteen_bit_scales(images: dict[str, bytes]) -> None:
    image = images["tiny-q4raw"]
    at = place(image, Role.Q) + 64 + 256
    assert "group scale" in broken(image, at + 6, b"\x80\x7f")[0]
    assert "padding" in broken(image, at + 32, b"\x01")[0]


def test_zero_groups(images: dict[str, bytes]) -> None:
    image = images["tiny-int4"]
    panel = place(image, Role.Q)
    scale = panel + 64 + 256 + 3  # row 3 of the first group
    assert "zero group" in broken(image, scale, b"\0")[0]
    clean = bytearray(image)
    clean[scale] = 0
    clean[scale + 16] = 0  # its zero point
    for line in range(4):
        at = panel + 64 + 64 * line + 4 * 3
        clean[at : at + 4] = bytes(4)
    assert found(bytes(reseal(clean))) == []
    clean[scale + 16] = 9
    assert "zero point" in found(bytes(reseal(clean)))[0]


def test_zero_groups_of_q8_hold_the_middle_code(images: dict[str, bytes]) -> None:
    image = images["tiny-int4"]
    block = place(image, Role.DOWN) + 64 + 320  # after the q4h superblock of one group
    scale = block + 512 + 5
    assert "zero group" in broken(image, scale, b"\0")[0]
    clean = bytearray(image)
    clean[scale] = 0
    for line in range(4):
        at = block + 64 * line + 4 * 5
        clean[at : at + 4] = b"\x88" * 4  # high nibbles 8: code 128
        clean[at + 256 : at + 260] = bytes(4)
    assert found(bytes(reseal(clean))) == []


def test_padded_rows(images: dict[str, bytes]) -> None:
    image = images["tiny-int4"]
    with read_artifact(image, image=True) as artifact:
        head = find(artifact, Role.HEAD)
        size = sizes.panel_size(head.cols, artifact.segments_of(head))
    last = head.offset + (head.rows_padded // 16 - 1) * size
    row = head.rows % 16
    assert "super-scale is not 0" in broken(image, last + 4 * row, struct.pack("<f", 1.0))[0]
    assert "padded row" in broken(image, last + 64 + 4 * row, b"\x10")[0]
    low = head.second_offset + (head.rows_padded // 16 - 1) * 256
    assert "padded row" in broken(image, low + 4 * row + 64, b"\x01")[0]
    assert broken(image, last + 64 + 4 * (row - 1), b"\x10") == []


SHAPE = make_image.Shape(
    layers=(make_image.Layer(heads=2, kv_heads=1, head_dim=20, ffn=70),), hidden=44, vocab=100
)


def test_the_mask_of_padded_inputs() -> None:
    mask = weights.code_mask(5)
    bad = {(int(i), int(k)) for i, k in np.argwhere(mask[:, 0, :] & 15)}
    assert bad == {(i, k) for i in range(4) for k in range(4) if 4 * i + k >= 5}
    assert (mask[:, 0] >> 4 == 15).all()
    assert not weights.code_mask(32).any()
    assert (weights.code_mask(17)[0, 0] == [0, 0xF0, 0xF0, 0xF0]).all()


def test_it_is_fast_enough_for_large_tensors() -> None:
    """256 MB of q4h panels in blocks: the work is a few passes over memory, whatever the time."""
    golden = make.build(make.INT4)
    tensor = replace(golden.records.tensors[1], rows=16384, rows_padded=16384, cols=1024)
    count = tensor.rows_padded // 16
    own = [replace(golden.records.segments[1], group_count=32)]
    panel = np.zeros(sizes.panel_size(1024, own), np.uint8)
    panel[:64] = np.full(16, 0.5, "<f4").view(np.uint8)
    for at in range(64, len(panel), 2304):
        panel[at + 2048 : at + 2176] = 7
    data = np.broadcast_to(panel, (count, len(panel)))
    real = weights.real_rows(tensor)
    for first in range(0, count, 64):
        part = np.ascontiguousarray(data[first : first + 64])
        assert list(weights._body(part, 1024, own, real[first : first + 64])) == []


def test_formats_are_all_looked_at(tmp_path: Path) -> None:
    """Images that another writer made: every format, widths that are no multiple of 32."""
    for fmt in (Format.Q4H, Format.Q4RAW_F16, Format.Q4RAW_BF16, Format.Q8, Format.F32, Format.F16):
        layer = replace(SHAPE.layers[0], default=((int(fmt), 0),), kv_group=20)
        image = make_image.make(replace(SHAPE, layers=(layer,)), int(fmt))
        (tmp_path / "x").write_bytes(image)
        with read_artifact(tmp_path / "x", verify="structure") as artifact:
            data = np.frombuffer(artifact.image, np.uint8)
            assert len(data) == len(image)
            texts = [t for tensor in artifact.tensors for t in weights._tensor(artifact, tensor)]
        assert [t for t in texts if "all-zero group" not in t] == []
