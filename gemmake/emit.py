"""From checkpoint rows to the weight stream: read, quantise and pack, block after block.

Rows come in blocks of at most 16 MB of float32, so that the memory of a compile does not grow with
the checkpoint. Three stages overlap: one reads, one searches, one packs and hands out bytes. Blocks
keep their order and rows are independent, so the bytes do not depend on how the stages meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from gemmake.errors import CheckpointError
from gemmake.model import FloatRows, TensorRef
from gemmake.passes import quant
from gemmake.passes.layout import StreamTensor
from gemmake.stages import Clock, ahead
from gemrun.format import spec

BLOCK_BYTES = 16 << 20  # of float32 rows
LARGEST_HALF = 65504.0
BASELINE = 1  # GM_BASELINE of csrc/gm_helper.h

FeedbackOf = Callable[[StreamTensor], "quant.Feedback | None"]
Found = quant.Q4hRows | quant.Q4rawRows | quant.Q8Rows


@dataclass
class Tally:
    """Quantisation figures of one tensor, for the manifest. Sums are float64, rows ascending."""

    error: float = 0.0  # sum of (weight - stored)^2
    power: float = 0.0  # sum of weight^2
    groups: int = 0
    zero_groups: int = 0

    def report(self) -> dict[str, float]:
        """Relative squared error and group counts."""
        relative = self.error / self.power if self.power else 0.0
        return {
            "groups": float(self.groups),
            "relative_squared_error": relative,
            "zero_groups": float(self.zero_groups),
        }

    def count(self, values: FloatRows, rows: Found) -> None:
        """Add the rows of a block."""
        error, power = quant.error_sums(values, quant.dequantise(rows))
        for value in error:
            self.error += float(value)
        for value in power:
            self.power += float(value)
        scales = rows.supers if isinstance(rows, quant.Q8Rows) else rows.scales
        self.groups += int(scales.size)
        self.zero_groups += int(np.count_nonzero(scales == 0))


@dataclass(frozen=True)
class Host:
    """How the compiling machine works; none of it changes a byte."""

    threads: int
    baseline: bool = False  # no instruction sets above the build's own
    clock: Clock = field(default_factory=Clock)

    @property
    def flags(self) -> int:
        """Flags of the helper's calls."""
        return BASELINE if self.baseline else 0


@dataclass(frozen=True)
class Chunk:
    """Bytes of a tensor, in order; `weights` of the checkpoint are settled with them."""

    tensor: StreamTensor
    data: bytes
    weights: int


@dataclass(frozen=True)
class _Block:
    """Rows first.. of a tensor's sources, and what the search has made of them."""

    tensor: StreamTensor
    first: int
    parts: tuple[FloatRows, ...]
    found: tuple[Found, ...] = ()

    @property
    def weights(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def last(self) -> bool:
        """Whether the tensor ends with this block."""
        return self.first + len(self.parts[0]) == self.tensor.sources[0].rows


def emit(
    tensors: Iterable[StreamTensor], feedback: FeedbackOf, host: Host, tallies: Mapping[str, Tally]
) -> Generator[Chunk, None, None]:
    """The bytes of the tensors in order. `tallies` holds one per label of a quantised tensor.

    Raises CheckpointError for values that cannot be stored, naming tensor and rows.
    """
    blocks = ahead(_read(tensors, host))
    found = ahead(_search(blocks, feedback, host))
    with contextlib.closing(found):
        yield from _pack(found, host, tallies)


# ---- first stage ----
def _read(tensors: Iterable[StreamTensor], host: Host) -> Generator[_Block, None, None]:
    for tensor in tensors:
        for first, count in _spans(tensor.sources[0]):
            with host.clock.timed("read"):
                parts = tuple(source.read(first, count) for source in tensor.sources)
            yield _Block(tensor, first, parts)


def _spans(source: TensorRef) -> Iterator[tuple[int, int]]:
    """(first row, rows) of blocks that end on panels."""
    step = max(spec.PANEL, BLOCK_BYTES // (4 * source.cols) // spec.PANEL * spec.PANEL)
    for first in range(0, source.rows, step):
        yield first, min(step, source.rows - first)


# ---- second stage ----
def _search(
    blocks: Generator[_Block, None, None], feedback: FeedbackOf, host: Host
) -> Generator[_Block, None, None]:
    with contextlib.closing(blocks):
        for block in blocks:
            with host.clock.timed("search"), _named(block):
                found = _quantised(block, feedback(block.tensor), host)
            yield _Block(block.tensor, block.first, block.parts, found)


@contextlib.contextmanager
def _named(block: _Block) -> Iterator[None]:
    """Name tensor and place where the helper refuses a value."""
    label = block.tensor.label
    try:
        yield
    except quant.NonFiniteWeight as error:
        raise CheckpointError(
            f"{label}: value at [{block.first + error.row}, {error.col}] is not finite; "
            "repair or replace the checkpoint"
        ) from error
    except quant.HelperError as error:
        last = block.first + len(block.parts[0]) - 1
        raise CheckpointError(
            f"{label}: rows {block.first} to {last}: {error}; "
            "repair the checkpoint or store these weights with another --quantization"
        ) from error


def _quantised(block: _Block, feedback: quant.Feedback | None, host: Host) -> tuple[Found, ...]:
    return tuple(
        quantised(part, block.tensor.format, feedback, host)
        for part in block.parts
        if block.tensor.format not in (spec.Format.VECTOR, spec.Format.F32, spec.Format.F16)
    )


def quantised(
    values: FloatRows, fmt: spec.Format, feedback: quant.Feedback | None, host: Host
) -> Found:
    """Rows in a quantised format, with error feedback where it is given."""
    threads, flags = host.threads, host.flags
    if fmt is spec.Format.Q8_ROWS:
        return quant.search_q8_rows(values, threads=threads, flags=flags)
    if fmt in (spec.Format.Q4RAW_F16, spec.Format.Q4RAW_BF16):
        _check_range(values, fmt)
        return quant.search_q4raw(values, fmt=fmt, threads=threads)
    segments = quant.whole(values.shape[1], fmt)
    if feedback is None or fmt is spec.Format.Q8:
        return quant.search_rows(values, segments=segments, threads=threads, flags=flags)
    return quant.gptq_rows(values, feedback, segments, threads=threads, flags=flags)


def _check_range(values: FloatRows, fmt: spec.Format) -> None:
    """Refuse weights that no scale of the format reaches, instead of clipping them."""
    most = LARGEST_HALF * 8 if fmt is spec.Format.Q4RAW_F16 else np.finfo(np.float32).max
    if np.abs(values).max() > most:
        raise quant.HelperError(
            f"a weight of {np.abs(values).max():g} is beyond the format's scale"
        )


# ---- third stage ----
def _pack(
    blocks: Iterator[_Block], host: Host, tallies: Mapping[str, Tally]
) -> Generator[Chunk, None, None]:
    low: list[bytes] = []  # second region of a table, written after the first
    for block in blocks:
        tensor = block.tensor
        with host.clock.timed("pack"), _named(block):
            for part, found in zip(block.parts, block.found, strict=False):
                tallies[tensor.label].count(part, found)
            data = _packed(block, low)
        yield Chunk(tensor, data, block.weights)
        if low and block.last:
            record = tensor.record
            yield Chunk(tensor, bytes(record.second_offset - record.offset - record.size), 0)
            for data in low:
                yield Chunk(tensor, data, 0)
            low.clear()


def _packed(block: _Block, low: list[bytes]) -> bytes:
    tensor, parts = block.tensor, block.parts
    if tensor.format is spec.Format.VECTOR:
        _check_finite(tensor.label, parts[0])
        return parts[0].astype("<f4").tobytes().ljust(tensor.record.size, b"\0")
    if not block.found:
        return quant.pack_float(parts[0], tensor.format, *parts[1:]).tobytes()
    first, *others = block.found
    if isinstance(first, quant.Q8Rows):
        high, second = quant.pack_q8_rows(first)
        low.append(second.tobytes())
        return high.tobytes()
    if isinstance(first, quant.Q4rawRows):
        raw = [rows for rows in others if isinstance(rows, quant.Q4rawRows)]
        return quant.pack_q4raw(first, *raw).tobytes()
    if not others:
        return quant.pack_rows(first).tobytes()
    (second_rows,) = others
    assert isinstance(second_rows, quant.Q4hRows)
    return quant.pack_gate_up(first, second_rows).tobytes()


def _check_finite(label: str, vector: FloatRows) -> None:
    bad = np.flatnonzero(~np.isfinite(vector))
    if bad.size:
        raise CheckpointError(
            f"{label}: value at [{bad[0]}] is not finite; repair or replace the checkpoint"
        )
