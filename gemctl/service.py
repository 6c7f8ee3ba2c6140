"""What the daemon offers, whoever asks: socket, MQTT, status page. One call, one result.

A front end makes a Caller from what it knows of its peer, and hands method and params on as they
came: names, types and ranges are checked behind it (api.py), so that every front end refuses alike.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Emit = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Caller:
    """Who asks. `fds` came with the request and belong to the front end, which closes them."""

    name: str  # for the audit line: "uid 1000 (unix)", "plc7 (mqtt)"
    may_write: bool
    source: Literal["unix", "mqtt", "http", "internal"] = "internal"
    fds: tuple[int, ...] = ()


class Service(Protocol):
    """The daemon's methods."""

    async def call(
        self,
        method: str,
        params: Mapping[str, Any],
        caller: Caller,
        emit: Emit | None = None,
    ) -> dict[str, Any]:
        """Result of a method; a stream's parts go to `emit` first. Raises ApiError."""
        ...

    def stats(self) -> dict[str, Any]:
        """The object of `gemctl stats --json`, keys in their fixed order."""
        ...
