"""Arena planning by liveness: buffers that never live together share bytes.

The plan is the last pass that changes the layout. A naive planner, which shares nothing, is kept
as its oracle, and a verifier checks every plan whoever made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

ALIGN = 64  # bytes; every buffer starts on a cache line


@dataclass(frozen=True)
class Buffer:
    """An arena buffer: live from `first_op` to `last_op`, both included. Sizes in bytes."""

    kind: int
    name: str
    size: int
    first_op: int
    last_op: int
    offset: int = 0

    @property
    def end(self) -> int:
        """First byte after the buffer."""
        return self.offset + self.size

    def lives_with(self, other: Buffer) -> bool:
        """Whether both are live in some step."""
        return self.first_op <= other.last_op and other.first_op <= self.last_op


def plan(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """Give every buffer an offset, largest first, each in the lowest gap that is free long enough.

    Deterministic: ties in size go to the lower kind. Greedy placement can lose to no sharing at
    all in rare cases; the smaller arena is taken. Returned in the order of the input.
    """
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda b: (-b.size, b.kind)):
        placed.append(replace(buffer, offset=_lowest_gap(buffer, placed)))
    by_kind = {b.kind: b for b in placed}
    planned = tuple(by_kind[b.kind] for b in buffers)
    return min(planned, naive(buffers), key=arena_size)


def naive(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
    """The oracle: one buffer after the other, nothing shared."""
    offset = 0
    by_kind = {}
    for buffer in sorted(buffers, key=lambda b: b.kind):
        by_kind[buffer.kind] = replace(buffer, offset=offset)
        offset = _aligned(offset + buffer.size)
    return tuple(by_kind[b.kind] for b in buffers)


def verify(buffers: Sequence[Buffer]) -> None:
    """Check that no two buffers that live together share a byte. Raises ValueError."""
    for buffer in buffers:
        if buffer.offset % ALIGN:
            raise ValueError(f"buffer {buffer.name} at {buffer.offset}: not on {ALIGN} bytes")
    for one, other in combinations(buffers, 2):
        apart = one.end <= other.offset or other.end <= one.offset
        if one.lives_with(other) and not apart:
            raise ValueError(f"buffers {one.name} and {other.name} overlap while both live")


def arena_size(buffers: Sequence[Buffer]) -> int:
    """Bytes from the start of the arena to the end of its last buffer."""
    return max((b.end for b in buffers), default=0)


def _lowest_gap(buffer: Buffer, placed: Sequence[Buffer]) -> int:
    busy = sorted((b.offset, b.end) for b in placed if b.lives_with(buffer))
    offset = 0
    for start, end in busy:
        if offset + buffer.size <= start:
            break
        offset = max(offset, _aligned(end))
    return offset


def _aligned(value: int) -> int:
    return -(-value // ALIGN) * ALIGN
