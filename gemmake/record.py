"""A calibration record: the Hessians of every layer in one file, a named and hashed input.

    gemmake .. --save-statistics FILE     make them with torch, keep them in FILE, and use them
    gemmake .. --statistics FILE          use them again: same record, same bytes

By default Hessians come from the engine, in a fixed order, and are dropped layer by layer. torch is
faster but differs between machines in the last bits; from the record on, the bytes are the same
everywhere (NUMERICS C1). The hidden states of a record are those of the float model: unlike the
engine's they do not see the layers that were already quantised.

File: 8 bytes "gemstat1", u32 size of the header, header (msgpack), then for each layer and step in
order the lower triangle of sum x^T x, row after row, little-endian float32. Header:
    checkpoint  [sha256, ..] of the checkpoint's files, ascending
    text        sha256 of the calibration text
    tokens      tokens that were summed
    layers      [{step: columns}, ..]
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgpack  # type: ignore[import-untyped]
import numpy as np

from gemmake.calibration import STEP_OF_ROLE
from gemmake.emit import Chunk, Host
from gemmake.errors import CheckpointError, OutputError, UsageError
from gemmake.hdf import show
from gemmake.model import InputFile
from gemmake.passes import quant
from gemmake.passes.layout import StreamTensor
from gemmake.state import State
from gemrun.format import spec
from gemrun.format.files import open_regular
from gemrun.format.writer import whole

MAGIC = b"gemstat1"
MAX_HEADER = 1 << 20  # bytes
BLOCK = 1 << 20  # bytes read at a time
STEPS = (spec.Op.QKV, spec.Op.O, spec.Op.GATE_UP, spec.Op.DOWN)

Hessians = Mapping[spec.Op, quant.F64]


@dataclass(frozen=True)
class Header:
    """What a record was made from, and what is in it."""

    checkpoint: tuple[str, ...]
    text: str
    tokens: int
    layers: tuple[Mapping[int, int], ...]  # step -> columns

    def pack(self) -> bytes:
        """The file's beginning."""
        fields = {
            "checkpoint": list(self.checkpoint),
            "layers": [{str(k): v for k, v in sorted(layer.items())} for layer in self.layers],
            "text": self.text,
            "tokens": self.tokens,
        }
        body: bytes = msgpack.packb(fields)
        return MAGIC + len(body).to_bytes(4, "little") + body

    def size(self, layer: int) -> int:
        """Bytes of a layer's triangles."""
        return sum(4 * (cols * (cols + 1) // 2) for cols in self.layers[layer].values())


def checkpoint_of(state: State) -> tuple[str, ...]:
    """What ties a record to a checkpoint."""
    return tuple(sorted(file.sha256 for file in state.model.inputs))


def columns_of(state: State) -> tuple[dict[int, int], ...]:
    """Columns of each step's products, layer by layer."""
    layers: list[dict[int, int]] = [{} for _ in state.layers]
    for tensor in state.stream.tensors:
        step = STEP_OF_ROLE.get(tensor.record.role)
        if step is not None:
            layers[tensor.record.layer][int(step)] = tensor.record.cols
    return tuple(layers)


# ---- writing ----
def write(
    path: Path, header: Header, layers: Iterator[Hessians], advance: Callable[[], None]
) -> InputFile:
    """Write a record, whole or not at all. Raises OutputError."""
    digest, size = hashlib.sha256(), 0
    try:
        with whole(path) as partial, partial.open("wb") as file:
            for piece in _pieces(header, layers, advance):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OutputError(
            f"--save-statistics {show(path)}: {error.strerror} while writing {size} bytes; "
            "check the folder and its free space"
        ) from error
    return InputFile(show(path.name), size, digest.hexdigest())


def _pieces(
    header: Header, layers: Iterator[Hessians], advance: Callable[[], None]
) -> Iterator[bytes]:
    yield header.pack()
    for hessians in layers:
        for step in sorted(hessians):
            square = hessians[step]
            for row in range(len(square)):
                yield square[row, : row + 1].astype("<f4").tobytes()
        advance()


# ---- reading ----
class Record:
    """An open record that serves as calibrator: error feedback layer by layer."""

    units = 0  # work of calibrating, beside the search

    def __init__(self, path: Path, state: State, host: Host) -> None:
        self._label = f"--statistics {show(path.name)}"
        self._host = host
        self._layer = -1
        self._feedback: dict[int, quant.Feedback] = {}
        try:
            self._file: BinaryIO = os.fdopen(open_regular(path), "rb")
        except OSError as error:
            raise UsageError(f"{self._label}: {error.strerror}; name a record") from error
        try:
            self._header = self._read_header()
            self._check(state)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def prepare(self, layer: int) -> None:
        """Read a layer's Hessians and factorise them. Layers come in order."""
        with self._host.clock.timed("calibrate"):
            self._layer = layer
            self._feedback = {}
            for step, cols in sorted(self._header.layers[layer].items()):
                hessian = self._triangle(cols)
                self._feedback[step] = quant.gptq_prepare(
                    hessian, threads=self._host.threads, flags=self._host.flags
                )

    def feedback(self, tensor: StreamTensor) -> quant.Feedback | None:
        """Error feedback for a tensor of the layer; None where it is not a matrix of it."""
        step = STEP_OF_ROLE.get(tensor.record.role)
        if tensor.record.layer != self._layer or step is None:
            return None
        return self._feedback[step]

    def keep(self, chunk: Chunk) -> None:
        """A record does not follow the stored weights."""

    def _triangle(self, cols: int) -> quant.F64:
        out = quant.new_hessian(cols)
        for row in range(cols):
            values = np.frombuffer(self._take(4 * (row + 1)), "<f4")
            if not np.isfinite(values).all():
                raise self._damaged("holds NaN or infinity")
            out[row, : row + 1] = values
        return out

    def _take(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) != count:
            raise self._damaged("ends early")
        return data

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._label}: {what}; make it again with --save-statistics")

    def _read_header(self) -> Header:
        if self._take(len(MAGIC)) != MAGIC:
            raise self._damaged("is no record of statistics")
        size = int.from_bytes(self._take(4), "little")
        if size > MAX_HEADER:
            raise self._damaged(f"has a header of {size} bytes")
        try:
            fields: dict[str, Any] = msgpack.unpackb(self._take(size))
            layers = tuple({int(k): int(v) for k, v in la.items()} for la in fields["layers"])
            header = Header(
                tuple(map(str, fields["checkpoint"])),
                str(fields["text"]),
                int(fields["tokens"]),
                layers,
            )
        except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise self._damaged("has an unreadable header") from error
        return header

    def _check(self, state: State) -> None:
        """Refuse a record of another checkpoint, and one of the wrong size."""
        if self._header.checkpoint != checkpoint_of(state):
            raise self._damaged("was made from another checkpoint")
        if self._header.layers != columns_of(state):
            raise self._damaged("has layers of other sizes")
        at = self._file.tell()
        wanted = at + sum(self._header.size(layer) for layer in range(len(state.layers)))
        found = os.fstat(self._file.fileno()).st_size
        if found != wanted:
            raise self._damaged(f"has {found} bytes, {wanted} are wanted")


def identity(path: Path) -> InputFile:
    """A record's name, size and hash. Raises UsageError."""
    digest, size = hashlib.sha256(), 0
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
                size += len(block)
    except OSError as error:
        name = show(path.name)
        raise UsageError(f"--statistics {name}: {error.strerror}; name a record") from error
    return InputFile(show(path.name), size, digest.hexdigest())


def header_for(state: State, tokens: int, text: InputFile) -> Header:
    """The header of a record that is to be made."""
    layers: Sequence[Mapping[int, int]] = columns_of(state)
    return Header(checkpoint_of(state), text.sha256, tokens, tuple(layers))
