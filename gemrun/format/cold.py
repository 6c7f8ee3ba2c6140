"""COLD: weights that do not stay in memory, and what of WHOT stays (FORMAT.md 2.13 and 4.6).

planes(records, tensors)                 what the records name: Plane
resident(conf, tensors, records, size)   mem_size of WHOT
room(plane, conf)                        of it what a plane of embedding or head takes
streamed(records, tensors)               bytes that every token reads from storage
problem(records, tensors)                what breaks a rule, or ""
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gemrun.format import sizes, spec
from gemrun.format.spec import Cold, ColdBy, Conf, Op, Role, Tensor

NAME = "COLD"
SLICE = 128  # units of 32 rows of the head that a thread reads ahead
ROWS = 128  # of a head that are computed one by one, beside those that a slice is read for
AROUND = 65536  # bytes that a system maps around a page, where they are in its page cache
STEPS = {
    Role.Q: Op.QKV,
    Role.K: Op.QKV,
    Role.V: Op.QKV,
    Role.O: Op.O,
    Role.GATE_UP: Op.GATE_UP,
    Role.DOWN: Op.DOWN,
}


@dataclass(frozen=True)
class Plane:
    """A plane that does not stay in memory: where it lies (as its tensor's offsets count)."""

    tensor: Tensor
    second: bool
    by: ColdBy
    offset: int
    size: int

    @property
    def panel(self) -> int:
        """Bytes of 16 rows."""
        return self.size // (self.tensor.rows_padded // spec.PANEL)

    @property
    def pages(self) -> int:
        """Bytes of the whole pages inside it: what can be given back."""
        end = (self.offset + self.size) // sizes.PAGE * sizes.PAGE
        return max(0, end - sizes.pad(self.offset, sizes.PAGE))


def planes(records: Sequence[Cold], tensors: Sequence[Tensor]) -> Iterator[Plane]:
    """The planes that the records name."""
    for record in records:
        t, second = tensors[record.tensor], record.plane == 1
        place = (t.second_offset, t.second_size) if second else (t.offset, t.size)
        yield Plane(t, second, ColdBy(record.by), *place)


def problem(records: Sequence[Cold], tensors: Sequence[Tensor]) -> str:
    """What is wrong with the records, or nothing."""
    before = -1
    for i, record in enumerate(records):
        if record.tensor >= len(tensors) or record.plane > 1 or record.by > 1 or record.reserved:
            return f"record {i} is out of range"
        if 2 * record.tensor + record.plane <= before:
            return f"record {i} is not behind the one before"
        before = 2 * record.tensor + record.plane
        t = tensors[record.tensor]
        table = t.role in (Role.EMBED, Role.HEAD)
        if record.by == ColdBy.ROWS and not (table and (record.plane == 0 or t.second_size)):
            return f"record {i}: only embedding and head are read by rows"
        stream = t.role in STEPS or t.role == Role.HEAD
        if record.by == ColdBy.STREAM and (record.plane or not stream):
            return f"record {i}: only matrices are streamed"
    return ""


def resident(conf: Conf, tensors: Sequence[Tensor], records: Sequence[Cold], size: int) -> int:
    """What of `size` bytes of weights is in memory at once, at most."""
    found = list(planes(records, tensors))
    away = sum(plane.pages for plane in found)
    held = sum(min(plane.pages, room(plane, conf)) for plane in found)
    return min(size, size - away + held + _window(found, conf.layer_count))


def room(plane: Plane, conf: Conf) -> int:
    """Bytes of a plane of embedding or head that are in memory at once: rows that are read, and
    slices; a small plane has fewer."""
    return _rows(plane, conf) + _slices(plane, conf)


def streamed(records: Sequence[Cold], tensors: Sequence[Tensor]) -> int:
    """Bytes that are read from storage for every token."""
    return sum(p.size for p in planes(records, tensors) if p.by is ColdBy.STREAM)


def _window(found: Sequence[Plane], layers: int) -> int:
    """Streamed matrices of layers that are there at once: those of the steps from O to DOWN, or
    DOWN and what is fetched for the layer behind it."""
    of: defaultdict[tuple[int, Op], int] = defaultdict(int)
    for plane in found:
        if plane.by is ColdBy.STREAM and plane.tensor.layer >= 0:
            of[plane.tensor.layer, STEPS[Role(plane.tensor.role)]] += plane.size
    most = 0
    for layer in range(layers):
        behind = (layer + 1) % layers
        inside = of[layer, Op.O] + of[layer, Op.GATE_UP] + of[layer, Op.DOWN]
        across = of[layer, Op.DOWN] + of[behind, Op.QKV] + of[behind, Op.GATE_UP]
        most = max(most, inside, across)
    return most


def _rows(plane: Plane, conf: Conf) -> int:
    """Of a plane that is read by rows: those of a chunk, and of a head the best by score."""
    if plane.by is not ColdBy.ROWS:
        return 0
    rows = conf.chunk + (ROWS if plane.tensor.role == Role.HEAD else 0)
    return rows * (AROUND + plane.panel)


def _slices(plane: Plane, conf: Conf) -> int:
    """Two slices of every cold plane of the head for each thread."""
    head = plane.tensor.role == Role.HEAD
    return 2 * SLICE * 2 * plane.panel * conf.threads if head else 0
