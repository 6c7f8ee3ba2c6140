"""A program that attaches to a real daemon and is played: a real one does not fail at will."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import frames
from daemon import Daemon

Reply = Callable[[dict[str, Any]], dict[str, Any]]
READY: dict[str, Any] = {
    "event": "ready", "name": "m", "family": "qwen3", "target": "generic-x86-64", "pid": 1,
    "kernel": "scalar", "version": "0.1.0", "context": 64, "kv_size": 64, "kv_type": 1,
    "has_chat": False, "threads": 1, "ram_total": 4096, "ram_kv": 64, "locked_bytes": 0,
    "unlocked_bytes": 0, "enabled": True, "open_ms": 1.0,
}  # fmt: skip
STATS: dict[str, Any] = {
    "event": "stats", "enabled": True, "name": "m", "digest": "", "way_back": False, "faults": 0,
    "ram_total": 4096, "active": 0, "waiting": 0, "duty": 1.0, "threads": 0, "requests": 0,
    "failed": 0, "tokens": 0, "replaced": 0, "steps": 0,
}  # fmt: skip
TIMES = {"event": "replaced", "tests": 1, "open_ms": 1, "test_ms": 1, "warmup_ms": 1, "flip_ms": 1}


class Played:
    """A program that attaches and answers by `replies`, of each op; `stats` may be changed, but
    those of its first answer are given here."""

    def __init__(self, daemon: Daemon, ready: dict[str, Any] | None = None, **stats: Any) -> None:
        self.stats = STATS | stats
        self.asked: list[dict[str, Any]] = []
        self.replies: dict[str, Reply] = {
            "stats": lambda _: self.stats,
            "pace": lambda _: {"event": "pace"},
            "replace": self.take,
            "rollback": self.go_back,
        }
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(daemon.socket))
        hello = {"v": 1, "id": "1", "method": "attach", "params": {"name": "line-3"}}
        self._socket.sendall(json.dumps(hello).encode() + b"\n")
        with self._socket.makefile("rb", buffering=0) as stream:
            assert b'"result"' in stream.readline()
        self._send(READY if ready is None else ready)
        self._thread = threading.Thread(target=self._converse, daemon=True)
        self._thread.start()

    def take(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Serve another version."""
        self.stats = {**self.stats, "digest": asked["digest"], "way_back": True}
        return TIMES

    def go_back(self, _asked: dict[str, Any]) -> dict[str, Any]:
        self.stats = {**self.stats, "digest": "", "way_back": False}
        return TIMES

    def _send(self, event: dict[str, Any]) -> None:
        self._socket.sendall(frames.pack(event))

    def _converse(self) -> None:
        ended = contextlib.suppress(OSError, ValueError, EOFError)
        with ended, self._socket.makefile("rb") as stream:
            while True:
                asked = frames.read(stream)
                self.asked.append(asked)
                self._send({**self.replies[asked["op"]](asked), "id": asked.get("id", 0)})

    def count(self, op: str) -> int:
        return sum(asked["op"] == op for asked in self.asked)

    def __enter__(self) -> Played:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()
