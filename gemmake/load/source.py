"""What every loader stands on: checked arithmetic, bounded JSON, files read by position.

Files are read with pread, not mapped: a file that shrinks while it is read gives an error here
instead of a bus error, and no page of it ever counts towards the resident size. Values are read in
pieces of at most 4 Mi so that the temporary arrays of a conversion stay small.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gemmake.errors import CheckpointError
from gemmake.files import FILE, read_small, standing
from gemmake.model import FloatRows, InputFile
from gemrun.format.files import open_regular

LIMIT = 2**63 - 1  # no count, size or offset of a file may pass this
PIECE_VALUES = 4 * 1024 * 1024  # values converted at a time
_HASH_BLOCK = 1024 * 1024  # bytes
_SHOWN_NAMES = 8

Bytes = npt.NDArray[np.uint8]


def damaged(what: str) -> CheckpointError:
    """The error for a file that breaks its own format."""
    return CheckpointError(f"{what}; the file is damaged or cut short, copy it again")


def _unreadable(name: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{name}: cannot be read ({error.strerror}); check the file and its permissions"
    )


def unfit(what: str) -> CheckpointError:
    """The error for a config that makes no sense or asks for what is not supported."""
    return CheckpointError(f"{what}; correct the config or use another checkpoint")


def checked_mul(a: int, b: int, what: str) -> int:
    """a * b for sizes that came from a file; CheckpointError beyond 2**63 - 1 or below 0."""
    if a < 0 or b < 0 or a * b > LIMIT:
        raise CheckpointError(f"{what}: {a} times {b} is beyond 2^63; the file is damaged")
    return a * b


def checked_add(a: int, b: int, what: str) -> int:
    """a + b for sizes that came from a file; CheckpointError beyond 2**63 - 1 or below 0."""
    if a < 0 or b < 0 or a + b > LIMIT:
        raise CheckpointError(f"{what}: {a} plus {b} is beyond 2^63; the file is damaged")
    return a + b


def checked_product(values: Iterable[int], what: str) -> int:
    """The product of dimensions that came from a file."""
    total = 1
    for value in values:
        total = checked_mul(total, value, what)
    return total


def display(name: str, limit: int = 120) -> str:
    """A name from a file, fit for a message: control characters escaped, length bounded."""
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in name[:limit])
    return text + (".." if len(name) > limit else "")


def name_list(names: Iterable[str]) -> str:
    """Names for a message, the first few in full."""
    ordered = sorted(names)
    shown = ", ".join(display(name) for name in ordered[:_SHOWN_NAMES])
    more = len(ordered) - _SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def base_name(path: Path) -> str:
    """The file name as text, also where it is not valid UTF-8."""
    return os.fsencode(path.name).decode("utf-8", "replace")


def there_is(path: Path) -> bool:
    """Whether a file stands there; False where nothing does. CheckpointError for all else, which
    must not be passed over as if it was missing."""
    try:
        found = standing(path)
    except OSError as error:
        raise _unreadable(base_name(path), error) from error
    if found not in ("", FILE):
        raise CheckpointError(
            f"{display(base_name(path))}: is {found}, not a file; put the file in its place"
        )
    return found == FILE


def hash_file(path: Path) -> InputFile:
    """Name, size and SHA-256 of a file, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    size = 0
    try:
        with path.open("rb") as file:
            while block := file.read(_HASH_BLOCK):
                digest.update(block)
                size += len(block)
    except OSError as error:
        raise _unreadable(base_name(path), error) from error
    return InputFile(base_name(path), size, digest.hexdigest())


def unhashed(path: Path) -> InputFile:
    """Name and size of a file; zeros in place of its hash."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _unreadable(base_name(path), error) from error
    return InputFile(base_name(path), size, "0" * 64)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = [key for key, count in counts.items() if count > 1]
        raise ValueError(f"the key {name_list(twice)} occurs twice")
    return result


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object; CheckpointError when it is not one, has a repeated key or is nested too deep.

    Infinity written as {"__float__": "Infinity"} is turned into the number.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_pairs)
    except RecursionError as error:
        raise CheckpointError(f"{where}: nested too deep; the file is damaged") from error
    except ValueError as error:
        raise damaged(f"{where}: is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise damaged(f"{where}: holds no JSON object at its top level")
    return value


def _pairs(pairs: list[tuple[str, Any]]) -> Any:
    if len(pairs) == 1 and pairs[0][0] == "__float__":
        return float(pairs[0][1])
    return _unique(pairs)


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """Parse a JSON file of at most `limit` bytes."""
    return parse_json(read_bytes(path, limit), base_name(path))


def read_bytes(path: Path, limit: int) -> bytes:
    """The whole of a small file; CheckpointError when it is larger than `limit` bytes."""
    try:
        data = read_small(path, limit)
    except OSError as error:
        raise _unreadable(base_name(path), error) from error
    if data is None:
        raise damaged(f"{base_name(path)}: is larger than {limit} bytes")
    return data


class SourceFile:
    """An open file that is read by position. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self.name = base_name(path)
        try:
            self._file = os.fdopen(open_regular(path), "rb", buffering=0)
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise _unreadable(self.name, error) from error

    def read(self, offset: int, count: int) -> Bytes:
        """`count` bytes from `offset`; CheckpointError when the file ends before."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise CheckpointError(
                f"{self.name}: {count} bytes wanted at {offset}, the file has {self.size} bytes; "
                "copy the checkpoint again"
            )
        data = np.empty(count, np.uint8)
        view = data.data
        done = 0
        while done < count:
            try:
                got = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            except OSError as error:
                raise _unreadable(self.name, error) from error
            if got <= 0:
                raise damaged(f"{self.name}: became shorter while it was read")
            done += got
        return data

    def close(self) -> None:
        """Close the file; later reads fail."""
        self._file.close()


@dataclass(frozen=True)
class RawTensor:
    """A tensor as it lies in a file, before anybody knows what it is for.

    `rows_of(first, count)` gives raw rows as float32 [count, cols], unchecked; a tensor of one
    dimension is one row. Row-major, the last dimension runs fastest.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # F32, F16, BF16, Q4_1, ..
    file: str  # base name, for messages
    rows_of: Callable[[int, int], FloatRows] = field(repr=False, compare=False)

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    def read(self, first: int, count: int) -> FloatRows:
        """Rows first .. first + count as float32, in pieces; NaN and infinity are errors."""
        if first < 0 or count < 0 or first + count > self.rows:
            raise damaged(
                f"{self.name}: rows {first} to {first + count} wanted, it has {self.rows}"
            )
        step = max(1, PIECE_VALUES // max(1, self.cols))
        if count <= step:
            block = self.rows_of(first, count)
            self._check_finite(block, first)
            return block
        out = np.empty((count, self.cols), np.float32)
        for start in range(0, count, step):
            size = min(step, count - start)
            piece = self.rows_of(first + start, size)
            self._check_finite(piece, first + start)
            out[start : start + size] = piece
        return out

    def _check_finite(self, block: FloatRows, first: int) -> None:
        good = np.isfinite(block)
        if good.all():
            return
        row, col = (int(i) for i in np.argwhere(~good)[0])
        index = f"[{first + row}, {col}]" if len(self.shape) == 2 else f"[{col}]"
        raise CheckpointError(
            f"{self.name}: the weight at {index} is {block[row, col]}; "
            "NaN and infinity cannot be compiled, repair or download the checkpoint again"
        )


_ITEM_SIZE = {"F32": 4, "F16": 2, "BF16": 2}


def item_size(dtype: str) -> int | None:
    """Bytes of one value of a plain float type, None for any other type."""
    return _ITEM_SIZE.get(dtype)


def plain_to_float(data: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    """Little-endian F32, F16 or BF16 values as float32; every value is exact."""
    if dtype == "F32":
        return data.view("<f4").astype(np.float32, copy=False)
    if dtype == "F16":
        return data.view("<f2").astype(np.float32)
    wide = data.view("<u2").astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def plain_tensor(
    source: SourceFile, name: str, shape: Sequence[int], dtype: str, offset: int
) -> RawTensor:
    """A row-major F32, F16 or BF16 tensor at byte `offset` of a file."""
    cols = shape[-1] if shape else 1
    row_bytes = cols * _ITEM_SIZE[dtype]

    def rows_of(first: int, count: int) -> FloatRows:
        data = source.read(offset + first * row_bytes, count * row_bytes)
        return plain_to_float(data, dtype).reshape(count, cols)

    return RawTensor(name, tuple(shape), dtype, source.name, rows_of)
