"""What waits to be published, bounded in count and bytes, with or without a broker.

Retained topics and figures hold their newest value; replies and events queue, and when their room
is used up the oldest go. Nothing here ever makes a caller wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from gemctl.mqtt.commands import MOST_BYTES


@dataclass(frozen=True)
class Item:
    """A message to publish."""

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = False
    correlation: bytes = b""
    queue: str = "reply"  # where it goes back to after a lost connection; "" for nowhere


class Queue:
    """Items in order; the oldest are lost beyond `count` or `most_bytes`."""

    def __init__(self, count: int, most_bytes: int) -> None:
        self._count, self._most_bytes = count, most_bytes
        self._items: deque[Item] = deque()
        self.size = 0
        self.lost = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> None:
        """Behind the others."""
        self._items.append(item)
        self.size += len(item.payload)
        self._shrink()

    def put_back(self, items: list[Item]) -> None:
        """Before the others, in their old order."""
        self._items.extendleft(reversed(items))
        self.size += sum(len(item.payload) for item in items)
        self._shrink()

    def get(self) -> Item | None:
        """The oldest, or None."""
        if not self._items:
            return None
        item = self._items.popleft()
        self.size -= len(item.payload)
        return item

    def _shrink(self) -> None:
        while len(self._items) > self._count or self.size > self._most_bytes:
            self.size -= len(self._items.popleft().payload)
            self.lost += 1


class Outbox:
    """All queues of one bridge. `refused_size` counts messages over 64 KiB, which are not sent."""

    def __init__(self, events: int = 1000, replies: int = 512, most_bytes: int = 1 << 20) -> None:
        self.queues = {"reply": Queue(replies, most_bytes), "event": Queue(events, most_bytes)}
        self._latest: dict[str, Item] = {}
        self._flying: dict[int, Item] = {}
        self._number = 0
        self._ready = asyncio.Event()
        self.refused_size = 0

    def put(self, item: Item) -> bool:
        """Let an item wait; False if it is too long to be sent at all."""
        if len(item.payload) > MOST_BYTES:
            self.refused_size += 1
            return False
        if item.queue:
            self.queues[item.queue].put(item)
        else:
            self._latest[item.topic] = item
        self._ready.set()
        return True

    def take(self) -> tuple[int, Item] | None:
        """The next one: retained and figures first, then replies, then events.

        It is under way until `landed` or `put_back` says otherwise.
        """
        item = self._next()
        if item is None:
            self._ready.clear()
            return None
        self._number += 1
        self._flying[self._number] = item
        return self._number, item

    def _next(self) -> Item | None:
        if self._latest:
            return self._latest.pop(next(iter(self._latest)))
        return self.queues["reply"].get() or self.queues["event"].get()

    def landed(self, number: int) -> None:
        """The broker has it."""
        self._flying.pop(number, None)

    def put_back(self) -> None:
        """The connection went: what was under way waits again; figures and what is older do not."""
        flying, self._flying = self._flying, {}
        for name, queue in self.queues.items():
            queue.put_back([item for item in flying.values() if item.queue == name])
        for item in flying.values():
            if item.retain:
                self._latest.setdefault(item.topic, item)
        self._ready.set()

    async def wait(self) -> None:
        """Until there may be something to take."""
        await self._ready.wait()

    @property
    def empty(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not (self._latest or self._flying or any(map(len, self.queues.values())))
