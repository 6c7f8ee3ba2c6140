"""What csrc/FORMAT.md section 4.2 demands of the bytes inside tensors, a few panels at a time.

The engine does not look at these: a wrong byte here gives wrong logits, never a wild read. So they
are gemcheck's to find: scales out of bounds, zero groups with codes, padding that is not zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemrun.format import reader, sizes, spec
from gemrun.format.reader import Artifact
from gemrun.format.spec import Format, Segment, Tensor

Bytes = npt.NDArray[np.uint8]
BLOCK = 32 << 20  # bytes of panels looked at together
SMALLEST_SUPER = np.float32(2.0**-40)


@dataclass(frozen=True)
class Problem:
    """A tensor that breaks a bound."""

    tensor: str
    text: str


def problems(artifact: Artifact) -> Iterator[Problem]:
    """Every tensor's first problem."""
    for name, tensor in reader.iter_names(artifact):
        text = next(_tensor(artifact, tensor), None)
        if text is not None:
            yield Problem(name, text)


def _tensor(artifact: Artifact, tensor: Tensor) -> Iterator[str]:
    own = list(artifact.segments_of(tensor))
    data = np.frombuffer(artifact.tensor_data(tensor), np.uint8)
    fmt = own[0].format
    if fmt == Format.VECTOR:
        yield from _vector(data, tensor.cols)
        return
    panels = data.reshape(-1, sizes.panel_size(tensor.cols, own))
    real = real_rows(tensor)
    if fmt == Format.Q8_ROWS:
        yield from _rows_table(artifact, tensor, panels, real)
        return
    step = max(1, BLOCK // panels.shape[1])
    for first in range(0, len(panels), step):
        part, rows = panels[first : first + step], real[first : first + step]
        if fmt in sizes.FLOAT_FORMATS:
            yield from _floats(part, tensor.cols, fmt, rows)
        else:
            yield from _body(part, tensor.cols, own, rows)


def real_rows(tensor: Tensor) -> npt.NDArray[np.bool_]:
    """[panels, 16]: which rows of each panel are not padding; parts alternate."""
    rows = np.arange(tensor.rows_padded).reshape(-1, spec.PANEL) < tensor.rows
    return np.repeat(rows, tensor.parts, axis=0)


def _vector(data: Bytes, cols: int) -> Iterator[str]:
    values = data[: 4 * cols].view("<f4")
    if not np.isfinite(values).all():
        yield "has a value that is not finite"
    if data[4 * cols :].any():
        yield "has padding that is not zero"


def _floats(panels: Bytes, cols: int, fmt: int, real: npt.NDArray[np.bool_]) -> Iterator[str]:
    kind, width = ("<f4", 4) if fmt == Format.F32 else ("<f2", 2)
    used = cols * spec.PANEL * width
    values = panels[:, :used].view(kind).reshape(len(panels), cols, spec.PANEL)
    if not np.isfinite(values).all():
        yield "has a value that is not finite"
    if panels[:, used:].any():
        yield "has padding that is not zero"
    for index in np.flatnonzero(~real.all(axis=1)):
        if values[index][:, ~real[index]].any():
            yield "has a padded row that is not zero"


def _supers(panels: Bytes, real: npt.NDArray[np.bool_]) -> Iterator[str]:
    supers = np.ascontiguousarray(panels[:, : spec.LINE]).view("<f4")
    if not np.isfinite(supers).all():
        yield "has a super-scale that is not finite"
        return
    size = np.abs(supers)
    if ((size != 0) & (size < SMALLEST_SUPER)).any():
        yield "has a super-scale below 2^-40 that is not 0"
    if supers[~real].any():
        yield "has a padded row whose super-scale is not 0"


def code_mask(inputs: int) -> Bytes:
    """[4 lines, 16 rows, 4]: nibbles of one group that lie beyond its first `inputs` inputs."""
    low = 4 * np.arange(4)[:, None] + np.arange(4)  # input of a byte's low nibble: [line, byte]
    mask = np.where(low < inputs, 0, 0x0F) | np.where(low + 16 < inputs, 0, 0xF0)
    return np.broadcast_to(mask[:, None, :], (4, spec.PANEL, 4)).astype(np.uint8)


def _codes(groups: Bytes, cols: int, first: int, real: npt.NDArray[np.bool_]) -> Iterator[str]:
    """Padding of code planes [panels, groups, planes * 256]; `first` is the number of groups[0]."""
    lines = groups.reshape(*groups.shape[:2], -1, 4, spec.PANEL, 4)
    for index in np.flatnonzero(~real.all(axis=1)):
        if lines[index][:, :, :, ~real[index]].any():
            yield "has codes in a padded row"
    last = cols // spec.GROUP - first
    here = cols % spec.GROUP != 0 and 0 <= last < groups.shape[1]
    if here and (lines[:, last] & code_mask(cols % spec.GROUP)).any():
        yield "has codes beyond its last input"


def _body(
    panels: Bytes, cols: int, own: list[Segment], real: npt.NDArray[np.bool_]
) -> Iterator[str]:
    yield from _supers(panels, real)
    at, group = spec.LINE, 0
    for segment in own:
        left = segment.group_count
        while left:
            count = min(left, spec.SUPERBLOCK)
            size = sizes.superblock_size(segment.format, count)
            block = panels[:, at : at + size]
            yield from _superblock(block, segment.format, count, real, cols, group)
            at, group, left = at + size, group + count, left - count


def _superblock(
    block: Bytes,
    fmt: int,
    count: int,
    real: npt.NDArray[np.bool_],
    cols: int,
    group: int,
) -> Iterator[str]:
    width = 512 if fmt == Format.Q8 else 256
    codes = block[:, : width * count].reshape(len(block), count, width)
    meta = block[:, width * count :]
    yield from _codes(codes, cols, group, real)
    if fmt in (Format.Q4RAW_F16, Format.Q4RAW_BF16):
        used = 32 * count
        words = np.ascontiguousarray(meta[:, :used]).view("<u2")
        top = 0x7C00 if fmt == Format.Q4RAW_F16 else 0x7F80
        if ((words & top) == top).any():
            yield "has a group scale that is not finite"
    else:
        scales = meta[:, : 16 * count].reshape(len(block), count, spec.PANEL)
        used = 16 * count
        if fmt == Format.Q4H:
            used = 32 * count
            zeros = meta[:, 16 * count : used].reshape(scales.shape)
            yield from _zero_groups(codes, scales, zeros)
        else:
            yield from _zero_groups(codes, scales, None)
    if meta[:, used:].any():
        yield "has superblock padding that is not zero"


def _zero_groups(codes: Bytes, scales: Bytes, zeros: Bytes | None) -> Iterator[str]:
    """A scale of 0 marks an all-zero group: no codes, no zero point (q8: all codes 128)."""
    panel, group, row = np.nonzero(scales == 0)
    if len(panel) == 0:
        return
    if zeros is not None and zeros[panel, group, row].any():
        yield "has an all-zero group with a zero point"
    lines = codes.reshape(*codes.shape[:2], -1, 4, spec.PANEL, 4)
    step = BLOCK // codes.shape[2]
    for at in range(0, len(panel), step):
        part = slice(at, at + step)
        found = lines[panel[part], group[part], :, :, row[part]]  # [n, planes, 4 lines, 4]
        if zeros is not None:
            bad = bool(found.any())
        else:  # high nibbles 8 and low ones 0, or padding
            bad = bool((~np.isin(found[:, 0], (0x00, 0x08, 0x80, 0x88))).any() or found[:, 1].any())
        if bad:
            yield "has an all-zero group with codes"


def _rows_table(
    artifact: Artifact, tensor: Tensor, panels: Bytes, real: npt.NDArray[np.bool_]
) -> Iterator[str]:
    second = np.frombuffer(artifact.tensor_second(tensor), np.uint8).reshape(len(panels), -1)
    step = max(1, BLOCK // panels.shape[1])
    for first in range(0, len(panels), step):
        rows = real[first : first + step]
        high, low = panels[first : first + step], second[first : first + step]
        yield from _supers(high, rows)
        for plane in (high[:, spec.LINE :], low):
            groups = plane.reshape(len(plane), -1, 256)
            yield from _codes(groups, tensor.cols, 0, rows)
