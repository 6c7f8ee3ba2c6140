"""Safetensors files: an own header parser that trusts nothing, then rows read by position.

Accepted: header length at most the file size minus 8 and at most 100 MB; begin <= end <= data size;
span equal to the product of the shape times the item size; ranges without overlap and without hole.
The data may start at any address: real files exist whose data is not aligned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gemmake.errors import CheckpointError
from gemmake.load.source import (
    LIMIT,
    RawTensor,
    SourceFile,
    checked_mul,
    checked_product,
    damaged,
    display,
    item_size,
    parse_json,
    plain_tensor,
)

MAX_HEADER = 100_000_000  # bytes
_PREFIX = 8  # bytes of the header length
# Types of the format that gemmake does not read. F64 would have to be rounded.
_OTHER_SIZES = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "C64": 8,
    "I32": 4,
    "U32": 4,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """The tensors of one file by name. CheckpointError names the rule that the file breaks."""
    source = SourceFile(path)
    header, data_start = _header(source)
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, RawTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            _check_metadata(source.name, entry)
            continue
        dtype, shape, begin, end = _entry(source.name, name, entry, source.size - data_start)
        spans.append((begin, end, name))
        if item_size(dtype) is None:
            tensors[name] = _unreadable(source.name, name, shape, dtype)
        else:
            tensors[name] = plain_tensor(source, name, shape, dtype, data_start + begin)
    _check_cover(source.name, spans, source.size - data_start)
    return tensors


def _header(source: SourceFile) -> tuple[dict[str, Any], int]:
    """The parsed header and the offset of the data."""
    if source.size < _PREFIX:
        raise damaged(f"{source.name}: has {source.size} bytes, too short for a safetensors file")
    length = int.from_bytes(source.read(0, _PREFIX).tobytes(), "little")
    if length > source.size - _PREFIX:
        raise CheckpointError(
            f"{source.name}: the header claims {length} bytes, {source.size - _PREFIX} bytes "
            "follow; copy the file again"
        )
    if length > MAX_HEADER:
        raise damaged(f"{source.name}: a header of {length} bytes is above {MAX_HEADER}")
    header = parse_json(source.read(_PREFIX, length).tobytes(), f"{source.name} header")
    return header, _PREFIX + length


def _check_metadata(file: str, entry: Any) -> None:
    if not isinstance(entry, dict) or not all(isinstance(v, str) for v in entry.values()):
        raise damaged(f"{file}: __metadata__ must map strings to strings")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LIMIT


def _entry(file: str, name: str, entry: Any, data_size: int) -> tuple[str, list[int], int, int]:
    """One header entry as (dtype, shape, begin, end), every field checked."""
    where = f"{file}: tensor {display(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise damaged(f"{where}: needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    size = item_size(dtype) if isinstance(dtype, str) else None
    size = size or (_OTHER_SIZES.get(dtype) if isinstance(dtype, str) else None)
    if size is None:
        raise damaged(f"{where}: unknown type {display(str(dtype))}")
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape) or len(shape) > 8:
        raise damaged(f"{where}: the shape is not a list of sizes")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_is_size(n) for n in offsets)
        or not offsets[0] <= offsets[1]
    ):
        raise damaged(f"{where}: data_offsets is not a pair begin <= end")
    begin, end = offsets
    if end > data_size:
        raise CheckpointError(
            f"{where}: ends at byte {end} of the data, the file has {data_size} bytes of data; "
            "copy the file again"
        )
    wanted = checked_mul(checked_product(shape, where), size, where)
    if end - begin != wanted:
        raise damaged(
            f"{where}: spans {end - begin} bytes, shape {shape} of {dtype} takes {wanted} bytes"
        )
    return dtype, shape, begin, end


def _check_cover(file: str, spans: list[tuple[int, int, str]], data_size: int) -> None:
    """The ranges cover the data exactly: no overlap, no hole, nothing after the last one."""
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            what = "overlaps the tensor before it" if begin < position else "leaves a hole before"
            raise damaged(
                f"{file}: tensor {display(name)}: begins at {begin}, {position} was expected: "
                f"it {what}"
            )
        position = end
    if position != data_size:
        raise damaged(f"{file}: {data_size - position} bytes after the last tensor belong to none")


def _unreadable(file: str, name: str, shape: list[int], dtype: str) -> RawTensor:
    """A tensor of a type that is refused when, and only when, it is needed."""

    def rows_of(first: int, count: int) -> Any:
        del first, count
        raise CheckpointError(
            f"{file}: tensor {display(name)} has type {dtype}; convert it to F32, F16 or BF16"
        )

    return RawTensor(name, tuple(shape), dtype, file, rows_of)
