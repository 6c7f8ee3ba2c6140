"""The reference's unpacking against byte positions written out one at a time, and its products
against exact arithmetic."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference import floatmath as fm
from reference import formats as fmt
from reference import make_image
from reference import records as rec

MIXED = ((fmt.Q4H, 3), (fmt.Q8, 1), (fmt.Q4H, 9), (fmt.Q8, 2))
BODY = {
    "q4h": ((fmt.Q4H, 0),),
    "q4raw-f16": ((fmt.Q4RAW_F16, 0),),
    "q4raw-bf16": ((fmt.Q4RAW_BF16, 0),),
    "q8": ((fmt.Q8, 0),),
    "f32": ((fmt.F32_PANELS, 0),),
    "f16": ((fmt.F16_PANELS, 0),),
    "mixed": MIXED,
}
ROWS, COLS = 40, 460  # 15 groups, the last with 12 inputs; the last panel with 8 rows


def image_of(tensor: make_image.Tensor) -> tuple[Any, Any, bytes]:
    tens, segm, data = make_image.place([tensor], 0)
    return tens[0], segm, data


def tensor_of(kinds: make_image.Formats, parts: int = 1) -> make_image.Tensor:
    shape = make_image.Shape((make_image.Layer(),))
    return make_image.Maker(shape, 3).matrix(rec.ROLE_DOWN, 0, ROWS, COLS, kinds, parts)


def code(data: bytes, plane: int, row: int, column: int) -> int:
    """Nibble of a row and an input of a group whose code lines start at byte `plane`."""
    i, k = column % 16 // 4, column % 4
    byte = data[plane + 64 * i + 4 * row + k]
    return byte >> 4 if column >= 16 else byte & 15


def weight(data: bytes, kinds: make_image.Formats, row: int, column: int) -> Fraction:
    """One weight as the panel of its row says it, by FORMAT.md 4.2."""
    groups = 15
    at = 64
    group = column // 32
    first = 0
    for kind, count in ((k, c or groups) for k, c in kinds):
        for start in range(first, first + count, 8):
            n = min(8, first + count - start)
            wide = 512 if kind == fmt.Q8 else 256
            if start <= group < start + n:
                g = group - start
                high = code(data, at + wide * g, row, column % 32)
                meta = at + wide * n
                if kind == fmt.Q8:
                    low = code(data, at + wide * g + 256, row, column % 32)
                    step = Fraction(data[meta + 16 * g + row]) * (16 * high + low - 128)
                elif kind == fmt.Q4H:
                    zero = data[meta + 16 * n + 16 * g + row]
                    step = Fraction(data[meta + 16 * g + row]) * (16 * high - zero)
                else:
                    where = meta + 32 * g + 2 * row
                    raw = data[where : where + 2]
                    wider = b"\0\0" + raw
                    half = kind == fmt.Q4RAW_F16
                    scale = struct.unpack("<e", raw) if half else struct.unpack("<f", wider)
                    step = Fraction(scale[0]) * (16 * high - 128)
                return Fraction(struct.unpack_from("<f", data, 4 * row)[0]) * step
            at += fmt.superblock_size(kind, n)
        first += count
    raise AssertionError(column)


def dense(matrix: fmt.Matrix) -> list[list[Fraction]]:
    """[R][columns] exact weights of an unpacked matrix."""
    if matrix.values is not None:
        return [[Fraction(float(v)) for v in row] for row in matrix.values]
    assert matrix.supers is not None
    out = []
    for r, super_scale in enumerate(matrix.supers):
        row = []
        for g in matrix.groups:
            scale = Fraction(float(super_scale))
            scale *= Fraction(float(g.scale[r])) if g.scale is not None else 1
            row += [scale * (int(c) - int(g.offset[r])) for c in g.codes[r]]
        out.append(row)
    return out


@pytest.mark.parametrize("name", sorted(BODY))
def test_unpacked_weights_are_those_of_the_bytes(name: str) -> None:
    kinds = BODY[name]
    tensor, segments, data = image_of(tensor_of(kinds))
    matrix = fmt.unpack(tensor, segments, data)
    weights = dense(matrix)
    panel = int(tensor["size"]) // 3
    for row in (0, 5, 15, 16, 31, 39):
        part = data[panel * (row // 16) : panel * (row // 16 + 1)]
        for column in (0, 3, 4, 15, 16, 19, 31, 32, 97, 255, 256, 300, 415, 447, COLS - 1):
            if name in ("f32", "f16"):
                letter, size = ("f", 4) if name == "f32" else ("e", 2)
                where = size * (16 * column + row % 16)
                want = Fraction(struct.unpack_from("<" + letter, part, where)[0])
            else:
                want = weight(part, kinds, row % 16, column)
            assert weights[row][column] == want, (row, column)


def test_two_planes_of_an_embedding_lie_in_two_regions() -> None:
    tensor, segments, data = image_of(tensor_of(((fmt.Q8_ROWS, 0),)))
    matrix = fmt.unpack(tensor, segments, data)
    weights = dense(matrix)
    groups = 15
    for row, column in ((0, 0), (17, 20), (39, COLS - 1)):
        panel = row // 16
        at = panel * (64 + 256 * groups)
        scale = Fraction(struct.unpack_from("<f", data, at + 4 * (row % 16))[0])
        group = column // 32
        high = code(data, at + 64 + 256 * group, row % 16, column % 32)
        second = int(tensor["second_offset"]) + 256 * (panel * groups + group)
        low = code(data, second, row % 16, column % 32)
        assert weights[row][column] == scale * (16 * high + low - 128)
    embedded = matrix.embed([17], np.float32(1))
    assert embedded[0, 20] == np.float32(float(weights[17][20]))


@pytest.mark.parametrize("name", sorted(BODY))
def test_product_is_close_to_exact_arithmetic(name: str) -> None:
    """Not bit for bit: the exact sum has no order. A wrong layout would be far off."""
    tensor, segments, data = image_of(tensor_of(BODY[name], parts=2))
    matrix = fmt.unpack(tensor, segments, data)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, COLS)).astype(np.float32)
    y = matrix.product(fmt.Activations(x))
    assert y.shape == (2, 2, ROWS)
    if matrix.values is None:
        codes, sa, _ = fmt.Activations(x).quantised()
        inputs = (codes * sa[..., None].astype(np.float64)).reshape(2, -1)
    else:
        inputs = x.astype(np.float64)
    weights = np.array([[float(v) for v in row] for row in dense(matrix)])
    full = inputs[:, : weights.shape[1]] @ weights.T  # panels gate, up, gate, ..
    want = full.reshape(2, -1, 2, 16).swapaxes(1, 2).reshape(2, 2, -1)[:, :, :ROWS]
    assert np.abs(y - want).max() <= 2e-5 * np.abs(want).max()


def test_padding_of_rows_and_inputs_is_zero() -> None:
    tensor, segments, data = image_of(tensor_of(BODY["mixed"]))
    matrix = fmt.unpack(tensor, segments, data)
    assert matrix.supers is not None
    assert not matrix.supers[ROWS:].any()
    assert not matrix.groups[-1].codes[:, COLS % 32 :].any()
    zero = fmt.Activations(np.zeros((1, COLS), np.float32))
    assert not matrix.product(zero).any()


def test_records_have_the_sizes_of_gembin_h(root: Path) -> None:
    text = (root / "csrc" / "gembin.h").read_text()
    for name, (dtype, size) in rec.SIZES.items():
        assert dtype.itemsize == size
        assert f"_Static_assert(sizeof({name}) == {size}" in text


def test_made_up_artifact_reads_back() -> None:
    layers = (make_image.Layer(q_slabs=(1, 3), bias=True, qk_norm=True, sandwich=True),)
    image = rec.Image(make_image.make(make_image.Shape(layers, tied=False), 1))
    assert int(image.header["file_size"]) == len(image.data)
    assert [int(t["role"]) for t in image.tensors] == [
        1, 10, 11, 11, 12, 13, 15, 16, 17, 18, 19, 14, 20, 21, 25, 26, 22, 3, 2,
    ]  # fmt: skip
    assert int(image.sections["WHOT"]["offset"]) % 65536 == 0
    assert fm.bits(image.rope(0)[0, 0]).tolist() == [0x3F800000] * 16
