"""Asking the model: one function, `ask(prompt, schema, left_s) -> str`.

Whatever decodes within a schema later takes this function's place, or fills in `schema` below;
nothing else changes, because every answer is checked again where it arrives (decide.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal

from prompt import ANSWER_TOKENS, STOP

Ask = Callable[[str, Mapping[str, Any], float], Coroutine[Any, Any, str]]

LINES_MOST = 8  # of a reply that is not streamed: the request's number, then the result


class AskError(Exception):
    """No answer. Text: what the daemon, or the way to it, said."""

    def __init__(self, why: Literal["unreachable", "refused", "timeout"], text: str) -> None:
        super().__init__(text)
        self.why = why


class Daemon:
    """gemctld at the other end of its Unix socket (gemctl/PROTOCOL.md)."""

    def __init__(self, socket: Path, model: str | None = None) -> None:
        self._socket = socket
        self._model = model

    async def ask(self, prompt: str, schema: Mapping[str, Any], left_s: float) -> str:
        """The model's text, within `left_s` seconds. Raises AskError.

        A connection of its own each time: closing it is what cancels the request in the daemon.
        """
        del schema  # `generate` has no such parameter yet
        params: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0.0,
            "stop": [STOP],
            "speculate": 6,  # an answer repeats most of an example: the same text, sooner
            "stream": False,
            "priority": "high",
            "deadline_ms": max(1, int(left_s * 1e3)),
        }
        if self._model is not None:
            params["model"] = self._model
        request = {"v": 1, "id": "1", "method": "generate", "params": params}
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError as error:
            reason = f"{self._socket}: {error.strerror or error}; is gemctld running?"
            raise AskError("unreachable", reason) from None
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            return await _text(reader)
        except OSError as error:
            raise AskError("unreachable", f"{self._socket}: {error.strerror or error}") from None
        finally:
            writer.transport.abort()  # at once, whatever the other end does


async def _text(reader: asyncio.StreamReader) -> str:
    """The result's text. Raises AskError."""
    for _ in range(LINES_MOST):
        try:
            line = await reader.readline()
            reply = json.loads(line) if line else None
        except (ValueError, RecursionError):  # too long, or no JSON
            raise AskError("refused", "the daemon's reply is no JSON line") from None
        if reply is None:
            raise AskError("unreachable", "the daemon closed the connection")
        if not isinstance(reply, dict):
            break
        if "error" in reply:
            raise _refusal(reply["error"])
        result = reply.get("result")
        if isinstance(result, dict) and isinstance(result.get("text"), str):
            return str(result["text"])
        if "event" not in reply:
            break
    raise AskError("refused", "the daemon's reply is none of PROTOCOL.md")


def _refusal(error: object) -> AskError:
    said = error if isinstance(error, dict) else {}
    code, message = str(said.get("code", "unknown")), str(said.get("message", ""))[:160]
    return AskError("timeout" if code == "timeout" else "refused", f"{code}: {message}")
