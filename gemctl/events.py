"""Events: numbered, kept in a ring in memory, handed to whoever follows.

A follower that is too slow loses the oldest events, never the daemon's time: it finds a gap in the
numbers. Nothing is written to flash.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

KEPT = 1000
WAITING = 256  # events that a follower may lag behind


@dataclass(frozen=True)
class Event:
    """`kind` is a dotted word, `fields` are plain JSON values without prompts or answers."""

    seq: int  # from 1, no gaps where they are made
    ts: float  # seconds since 1970
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As it is sent."""
        return {"seq": self.seq, "ts": round(self.ts, 3), "kind": self.kind, **self.fields}


class EventHub:
    """Publishes to followers of one event loop. Not for threads."""

    def __init__(self, clock: Callable[[], float] = time.time, kept: int = KEPT) -> None:
        self._clock = clock
        self._kept: deque[Event] = deque(maxlen=kept)
        self._queues: set[asyncio.Queue[Event | None]] = set()  # None: there is no more
        self._closed = False
        self._seq = 0

    def publish(self, kind: str, **fields: Any) -> Event:
        """Make an event; never waits."""
        self._seq += 1
        event = Event(self._seq, self._clock(), kind, fields)
        self._kept.append(event)
        if not self._closed:
            self._hand_out(event)
        return event

    def _hand_out(self, event: Event | None) -> None:
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)

    def close(self) -> None:
        """Followers end once they have what came so far; there are no others later."""
        self._closed = True
        self._hand_out(None)

    @property
    def last(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._seq

    def recent(self, after: int = 0) -> list[Event]:
        """Events still kept whose number is above `after`."""
        return [event for event in self._kept if event.seq > after]

    @contextmanager
    def follow(self) -> Iterator[AsyncIterator[Event]]:
        """An iterator over events from now on, until the hub is closed."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue(WAITING)
        if self._closed:
            queue.put_nowait(None)
        self._queues.add(queue)
        try:
            yield _drain(queue)
        finally:
            self._queues.discard(queue)


async def _drain(queue: asyncio.Queue[Event | None]) -> AsyncIterator[Event]:
    while (event := await queue.get()) is not None:
        yield event
