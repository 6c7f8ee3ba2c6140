"""Commands that run or were answered over MQTT: a duplicate is told, never done twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gemctl.mqtt.commands import Answer, Command


@dataclass
class Entry:
    """A command that runs or was answered; `payload` is its final reply."""

    content: bytes
    at: float
    running: bool = True
    answers: list[Answer] = field(default_factory=list)
    body: dict[str, Any] | None = None
    size: int = 0


class Replies:
    """What was answered in the last `keep_s` seconds, by key.

    At most `count` commands are remembered, and their replies up to `most_bytes`. A command whose
    reply had to go is still known, so that it is not done again.
    """

    def __init__(
        self,
        keep_s: float,
        clock: Callable[[], float],
        count: int = 2048,
        most_bytes: int = 1 << 20,
    ) -> None:
        self._keep_s, self._clock = keep_s, clock
        self._count, self._most_bytes = count, most_bytes
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: str) -> Entry | None:
        """What is known of a key."""
        self._expire()
        return self._entries.get(key)

    def begin(self, command: Command) -> Entry:
        """Remember a command that starts now."""
        entry = Entry(command.content, self._clock(), answers=[command.answer])
        self._entries[command.key] = entry
        return entry

    def finish(self, key: str, entry: Entry, body: dict[str, Any], size: int) -> None:
        """Keep its reply (`size` bytes as sent) from now on."""
        entry.running, entry.body, entry.size, entry.at = False, body, size, self._clock()
        if self._entries.get(key) is entry:
            self._entries.move_to_end(key)
            self.size += size
            self._shrink()

    def forget(self, key: str, entry: Entry) -> None:
        """Its end may be another one next time: let it be tried again."""
        if self._entries.get(key) is entry:
            self._remove(key)

    def _remove(self, key: str) -> None:
        self.size -= self._entries.pop(key).size

    def _expire(self) -> None:
        """Finished ones stand in the order of their ends; running ones among them stay."""
        before = self._clock() - self._keep_s
        old = []
        for key, entry in self._entries.items():
            if not entry.running:
                if entry.at > before:
                    break
                old.append(key)
        for key in old:
            self._remove(key)

    def _shrink(self) -> None:
        spare = len(self._entries) - self._count
        if spare > 0:
            idle = [key for key, entry in self._entries.items() if not entry.running]
            for key in idle[:spare]:
                self._remove(key)
        for entry in self._entries.values():
            if self.size <= self._most_bytes:
                return
            self.size -= entry.size
            entry.body, entry.size = None, 0
