"""From checkpoint rows to the weight stream: quantise and pack tensor after tensor.

Rows come in blocks of at most 32 MB, so that the memory of a compile does not grow with the
checkpoint. Error feedback, where it is asked for, is handed in per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from gemmake.errors import CheckpointError
from gemmake.model import FloatRows, TensorRef
from gemmake.passes import quant
from gemmake.passes.layout import StreamTensor
from gemrun.format import spec

BLOCK_BYTES = 32 << 20  # of float32 rows


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


@dataclass(frozen=True)
class Emission:
    """What it takes to emit a tensor: error feedback (None: search alone) and threads."""

    feedback: quant.Feedback | None
    threads: int


def emit_tensor(
    tensor: StreamTensor, emission: Emission, tally: Tally, advance: Callable[[int], None]
) -> Iterator[bytes]:
    """The bytes of one tensor in order, the gap before a second region included.

    `advance` is told the weights that are done. Raises CheckpointError.
    """
    match tensor.format:
        case spec.Format.VECTOR:
            yield _vector(tensor)
        case spec.Format.Q8_ROWS:
            yield from _table(tensor, emission, tally, advance)
        case spec.Format.F32 | spec.Format.F16:
            yield from _floats(tensor, advance)
        case _:
            yield from _body(tensor, emission, tally, advance)


def _vector(tensor: StreamTensor) -> bytes:
    values = _rows(tensor.sources[0], 0, 1)
    return values.astype("<f4").tobytes().ljust(tensor.record.size, b"\0")


def _rows(source: TensorRef, first: int, count: int) -> FloatRows:
    """Rows of a checkpoint tensor; NaN and infinity stop the compile with their place."""
    values = source.read(first, count)
    bad = ~np.isfinite(values)
    if bad.any():
        row, col = np.argwhere(bad)[0]
        raise CheckpointError(
            f"{source.name}: value at [{first + row}, {col}] is {values[row, col]}; "
            "repair the checkpoint"
        )
    return values


def _blocks(source: TensorRef) -> Iterator[tuple[int, int]]:
    """(first row, rows) of blocks that end on panels."""
    step = max(spec.PANEL, BLOCK_BYTES // (4 * source.cols) // spec.PANEL * spec.PANEL)
    for first in range(0, source.rows, step):
        yield first, min(step, source.rows - first)


def _floats(tensor: StreamTensor, advance: Callable[[int], None]) -> Iterator[bytes]:
    kind = quant.Format(tensor.format)
    for first, count in _blocks(tensor.sources[0]):
        parts = [_rows(source, first, count) for source in tensor.sources]
        yield quant.pack_float(parts[0], kind, *parts[1:]).tobytes()
        advance(sum(p.size for p in parts))


def _table(
    tensor: StreamTensor, emission: Emission, tally: Tally, advance: Callable[[int], None]
) -> Iterator[bytes]:
    source = tensor.sources[0]
    lows = []
    for first, count in _blocks(source):
        values = _rows(source, first, count)
        rows = quant.search_q8_rows(values, threads=emission.threads)
        high, low = quant.pack_q8_rows(rows)
        _count(tally, values, rows)
        lows.append(low.tobytes())
        yield high.tobytes()
        advance(values.size)
    record = tensor.record
    yield bytes(record.second_offset - record.offset - record.size)
    yield from lows


def _body(
    tensor: StreamTensor, emission: Emission, tally: Tally, advance: Callable[[int], None]
) -> Iterator[bytes]:
    for first, count in _blocks(tensor.sources[0]):
        parts = []
        for source in tensor.sources:
            values = _rows(source, first, count)
            rows = quantised(values, tensor.format, emission)
            _count(tally, values, rows)
            parts.append(rows)
            advance(values.size)
        yield _packed(parts)


BodyRows = quant.Q4hRows | quant.Q4rawRows


def quantised(values: FloatRows, format_: spec.Format, emission: Emission) -> BodyRows:
    """Rows in a body format, with error feedback where it is given."""
    threads = emission.threads
    if format_ in (spec.Format.Q4RAW_F16, spec.Format.Q4RAW_BF16):
        return quant.search_q4raw(values, fmt=quant.Format(format_), threads=threads)
    segments = quant.whole(values.shape[1], quant.Format(format_))
    if emission.feedback is None or format_ is spec.Format.Q8:
        return quant.search_rows(values, segments=segments, threads=threads)
    return quant.gptq_rows(values, emission.feedback, segments, threads=threads)


def _packed(parts: list[BodyRows]) -> bytes:
    first = parts[0]
    if isinstance(first, quant.Q4rawRows):
        other = parts[1] if len(parts) > 1 else None
        assert other is None or isinstance(other, quant.Q4rawRows)
        return quant.pack_q4raw(first, other).tobytes()
    if len(parts) == 1:
        return quant.pack_rows(first).tobytes()
    assert isinstance(parts[1], quant.Q4hRows)
    return quant.pack_gate_up(first, parts[1]).tobytes()


def _count(tally: Tally, values: FloatRows, rows: BodyRows | quant.Q8Rows) -> None:
    error, power = quant.error_sums(values, quant.dequantise(rows))
    for value in error:
        tally.error += float(value)
    for value in power:
        tally.power += float(value)
    if isinstance(rows, quant.Q4hRows):
        tally.groups += int(rows.scales.size)
        tally.zero_groups += int((rows.scales == 0).sum())
