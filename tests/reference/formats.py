"""Layout r16k4 (NUMERICS L1-L6): panels of 16 rows to matrices, and the products W1-W4.

A quantised matrix is kept as integers per group of 32 inputs, because a product is exact integers
per group, then one fmaf per group, groups ascending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reference import floatmath as fm
from reference.floatmath import F32, I32

F32_PANELS, F16_PANELS, Q4H, Q4RAW_F16, Q4RAW_BF16, Q8, Q8_ROWS, VECTOR = 1, 2, 3, 4, 5, 6, 7, 8
PANEL, GROUP, SUPERBLOCK, LINE = 16, 32, 8, 64
LINES_OF_GROUP = 4  # lines of 64 bytes that hold a group's codes: 16 rows x 32 nibbles

Bytes = npt.NDArray[np.uint8]


def pad(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True)
class Activations:
    """Inputs of a product: float32 [T, n], quantised on first use (A1)."""

    values: F32

    def quantised(self) -> tuple[I32, F32, I32]:
        """codes [T, groups, 32], scale [T, groups], sum of codes [T, groups]."""
        tokens, inputs = self.values.shape
        padded = np.zeros((tokens, pad(inputs, GROUP)), np.float32)
        padded[:, :inputs] = self.values
        codes, scale = fm.quantise_activations(padded.reshape(tokens, -1, GROUP))
        return codes, scale, codes.sum(axis=-1, dtype=np.int32)


@dataclass(frozen=True)
class Group:
    """32 inputs of all rows: `dot` codes are exact integers, D = dot - offset * asum."""

    codes: I32  # [R, 32], in units of the sixteenth step (q4: 16 * code; q8: the code itself)
    offset: I32  # [R]
    scale: F32 | None  # [R]: scale8 or the group's own scale; None: one scale per row


@dataclass(frozen=True)
class Matrix:
    """A tensor's data in panel order: R = 16 * panels rows, padding included."""

    rows: int  # real rows, per part
    parts: int
    supers: F32 | None  # [R], None for float matrices
    groups: tuple[Group, ...]
    values: F32 | None  # [R, cols] of float matrices

    def product(self, x: Activations) -> F32:
        """[T, parts, rows]: y = W x for every token."""
        full = self._float_product(x) if self.values is not None else self._group_product(x)
        tokens = full.shape[0]
        panels = full.reshape(tokens, -1, self.parts, PANEL).swapaxes(1, 2)
        y: F32 = panels.reshape(tokens, self.parts, -1)[:, :, : self.rows]
        return y

    def _float_product(self, x: Activations) -> F32:
        """W4: inputs ascending, one accumulator per row."""
        assert self.values is not None
        acc = np.zeros((x.values.shape[0], self.values.shape[0]), np.float32)
        for i in range(self.values.shape[1]):
            acc = fm.fmaf(self.values[None, :, i], x.values[:, i, None], acc)
        return acc

    def _group_product(self, x: Activations) -> F32:
        """W1-W3: acc = fmaf((float)D * scale, sa, acc), groups ascending; y = super * acc."""
        assert self.supers is not None
        codes, sa, asum = x.quantised()
        acc = np.zeros((codes.shape[0], self.supers.shape[0]), np.float32)
        for g, group in enumerate(self.groups):
            dot = codes[:, g] @ group.codes.T
            exact = dot - group.offset[None, :] * asum[:, g, None]
            part = exact.astype(np.float32)
            if group.scale is not None:
                part = part * group.scale[None, :]
            acc = fm.fmaf(part, sa[:, g, None], acc)
        return self.supers[None, :] * acc

    def embed(self, ids: Sequence[int], scale: np.float32) -> F32:
        """Rows of an embedding table, scaled (L6): [T, cols padded or not]."""
        index = np.asarray(ids, np.int64)
        if self.values is not None:
            return self.values[index] * scale
        assert self.supers is not None
        centred = [g.codes[index] - g.offset[index, None] for g in self.groups]
        code = np.concatenate(centred, axis=1).astype(np.float32)
        return (self.supers[index, None] * code) * scale


def _nibbles(lines: Bytes) -> I32:
    """Code lines [panels, 4, 64] of one group -> [panels, 16 rows, 32 inputs] (L3)."""
    panels = lines.shape[0]
    quads = lines.reshape(panels, LINES_OF_GROUP, PANEL, 4)  # line i, row, byte of the quad
    low, high = quads & 15, quads >> 4
    both = np.concatenate([low, high], axis=1)  # quads 0..7
    codes: I32 = both.transpose(0, 2, 1, 3).reshape(panels, PANEL, GROUP).astype(np.int32)
    return codes


def _plane(panels: Bytes, offset: int) -> I32:
    return _nibbles(panels[:, offset : offset + 256].reshape(-1, LINES_OF_GROUP, LINE))


def _half(raw: Bytes, bfloat: bool) -> F32:
    """Two-byte scales [.., 32 bytes] -> float32 [.., 16]."""
    words = np.ascontiguousarray(raw).view("<u2")
    if bfloat:
        return (words.astype(np.uint32) << 16).view(np.float32)
    return words.view("<f2").astype(np.float32)


def _flat(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[panels, 16, ...] -> [R, ...]"""
    return np.ascontiguousarray(values).reshape(-1, *values.shape[2:])


def superblock_size(fmt: int, groups: int) -> int:
    per_group = {Q4H: 256 + 16 + 16, Q4RAW_F16: 256 + 32, Q4RAW_BF16: 256 + 32, Q8: 512 + 16}
    return pad(per_group[fmt] * groups, LINE)


def _superblock(fmt: int, panels: Bytes, at: int, count: int) -> list[Group]:
    """The groups of one superblock that starts at byte `at` of every panel."""
    width = 512 if fmt == Q8 else 256
    meta = at + width * count
    groups = []
    for g in range(count):
        high = _plane(panels, at + width * g)
        if fmt == Q8:
            low = _plane(panels, at + width * g + 256)
            scale = panels[:, meta + 16 * g : meta + 16 * g + 16].astype(np.float32)
            codes, offset = 16 * high + low, np.full(scale.shape, 128, np.int32)
        elif fmt == Q4H:
            scale = panels[:, meta + 16 * g : meta + 16 * g + 16].astype(np.float32)
            zero = meta + 16 * count + 16 * g
            codes, offset = 16 * high, panels[:, zero : zero + 16].astype(np.int32)
        else:
            scale = _half(panels[:, meta + 32 * g : meta + 32 * g + 32], fmt == Q4RAW_BF16)
            codes, offset = 16 * high, np.full(scale.shape, 128, np.int32)
        groups.append(Group(_flat(codes), _flat(offset), _flat(scale)))
    return groups


def _quantised(segments: Sequence[tuple[int, int]], panels: Bytes) -> tuple[F32, list[Group]]:
    """`segments`: (format, groups) in order. A change of format ends a superblock (W6)."""
    supers = _flat(np.ascontiguousarray(panels[:, :LINE]).view("<f4"))
    groups: list[Group] = []
    at = LINE
    for fmt, total in segments:
        for first in range(0, total, SUPERBLOCK):
            count = min(SUPERBLOCK, total - first)
            groups += _superblock(fmt, panels, at, count)
            at += superblock_size(fmt, count)
    assert at == panels.shape[1], (at, panels.shape)
    return supers, groups


def _q8_rows(high: Bytes, low: Bytes, groups: int) -> tuple[F32, list[Group]]:
    """Two regions (W2, embedding and head): supers and high planes, then the low planes."""
    supers = _flat(np.ascontiguousarray(high[:, :LINE]).view("<f4"))
    out = []
    for g in range(groups):
        codes = 16 * _plane(high, LINE + 256 * g) + _plane(low, 256 * g)
        offset = np.full(codes.shape[:2], 128, np.int32)
        out.append(Group(_flat(codes), _flat(offset), None))
    return supers, out


def unpack(tensor: Any, segments: Any, data: bytes) -> Matrix:
    """A TENS record (not a vector) and the whole file's bytes -> its matrix."""
    rows, cols, parts = int(tensor["rows"]), int(tensor["cols"]), int(tensor["parts"])
    first = int(tensor["seg_first"])
    own = segments[first : first + int(tensor["seg_count"])]
    panels = parts * int(tensor["rows_padded"]) // PANEL
    raw = np.frombuffer(data, np.uint8, int(tensor["size"]), int(tensor["offset"]))
    raw = raw.reshape(panels, -1)
    fmt = int(own[0]["format"])
    if fmt in (F32_PANELS, F16_PANELS):
        kind, width = ("<f4", 4) if fmt == F32_PANELS else ("<f2", 2)
        values = np.ascontiguousarray(raw[:, : cols * PANEL * width]).view(kind)
        matrix = _flat(values.reshape(panels, cols, PANEL).swapaxes(1, 2)).astype(np.float32)
        return Matrix(rows, parts, None, (), matrix)
    if fmt == Q8_ROWS:
        low = np.frombuffer(
            data, np.uint8, int(tensor["second_size"]), int(tensor["second_offset"])
        )
        supers, groups = _q8_rows(raw, low.reshape(panels, -1), int(own[0]["group_count"]))
    else:
        pairs = [(int(s["format"]), int(s["group_count"])) for s in own]
        supers, groups = _quantised(pairs, raw)
    return Matrix(rows, parts, supers, tuple(groups), None)


def vector(tensor: Any, data: bytes) -> F32:
    """A VECTOR record: [cols] float32."""
    return np.frombuffer(data, "<f4", int(tensor["cols"]), int(tensor["offset"]))
