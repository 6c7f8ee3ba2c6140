"""Frames to and from an engine: a worker of ours, or a program that attached itself.

A frame is four bytes of length, little-endian, and one JSON object (PROTOCOL.md). Every request
has an id of its own; what comes back with it belongs to it. The channel closes at the first frame
that is none: an engine that writes garbage is not to be trusted with the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

from gemctl import waiting
from gemctl.errors import ApiError, Code

FRAME_MOST = 1 << 18  # bytes, both ways
SEND_LOOK_S = 0.01  # between two looks whether a frame with a descriptor can go
CANCEL_S = 30.0  # for the step that runs; the heartbeat ends an engine that hangs
ENDS = frozenset({"done", "error"})  # events that end a stream

# gemrun_status of a failed request -> what the caller is told
_CODES: dict[int, Code] = {
    -2: "busy",
    -3: "bad_request",
    -4: "bad_request",
    -5: "bad_request",
    -7: "layout",
    -11: "bad_request",
    -12: "conflict",
    -70: "no_memory",
    -71: "no_memory",
    -80: "refused",
    -90: "failed",
}


def code_of(status: int) -> Code:
    """The word for a negative gemrun_status."""
    if status in _CODES:
        return _CODES[status]
    if status > -20:
        return "bad_request"
    return "refused" if status > -80 else "failed"


def error_of(event: dict[str, Any]) -> ApiError:
    """The error that an `error` event tells of."""
    return ApiError(code_of(int(event["code"])), str(event["text"]))


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


class Channel:
    """One connection. `closed` is set once it cannot be used any more."""

    def __init__(self, name: str, gone: str = "its engine ended; send the request again") -> None:
        """`gone`: what is told of a request that has no peer, or loses it."""
        self.name, self._gone = name, gone
        self.closed = asyncio.Event()
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._queues: dict[int, asyncio.Queue[dict[str, Any] | None]] = {}
        self._next = 1
        self._writer: asyncio.StreamWriter | None = None
        self._sock: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._draining: asyncio.Task[None] | None = None  # of a request that was left early
        self.on_event: Callable[[dict[str, Any]], None] | None = None  # without an id: pong

    async def open(self, connected: socket.socket) -> None:
        """Take over a connected socket and begin to read."""
        self._sock = connected
        reader, self._writer = await asyncio.open_connection(sock=connected)
        self._task = asyncio.create_task(self._read(reader))

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take over a stream that is open already."""
        self._writer = writer
        self._task = asyncio.create_task(self._read(reader))

    async def close(self) -> None:
        """Close the connection; requests in flight fail."""
        if self._writer is not None:
            self._writer.close()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                if not 0 < size <= FRAME_MOST:
                    break
                event = json.loads(await reader.readexactly(size), parse_constant=_refuse)
                self._dispatch(event)
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            pass  # whatever it was, the connection is of no more use
        finally:
            self._end()

    def _dispatch(self, event: dict[str, Any]) -> None:
        kind, number = event["event"], event.get("id")
        if kind == "ready" or (kind == "error" and number == 0):
            if not self.ready.done():
                self.ready.set_result(event)
        elif number in self._queues:
            self._queues[number].put_nowait(event)
        elif self.on_event is not None:
            self.on_event(event)

    def _end(self) -> None:
        self.closed.set()
        if self._writer is not None:
            self._writer.close()
        if not self.ready.done():
            self.ready.cancel()
        for queue in self._queues.values():
            queue.put_nowait(None)

    def _frame(self, op: str, fields: dict[str, Any]) -> bytes:
        body = json.dumps({"op": op, **fields}, ensure_ascii=False).encode("utf-8")
        if len(body) > FRAME_MOST:
            raise ApiError(
                "bad_request", f"request: {len(body)} bytes; send at most {FRAME_MOST} bytes"
            )
        return len(body).to_bytes(4, "little") + body

    def _open_writer(self) -> asyncio.StreamWriter:
        if self.closed.is_set() or self._writer is None:
            raise ApiError("failed", f"{self.name}: {self._gone}")
        return self._writer

    def send(self, op: str, **fields: Any) -> None:
        """Send a frame; never waits. Raises ApiError("bad_request") for one that is too large."""
        frame = self._frame(op, fields)
        self._open_writer().write(frame)

    async def _send_file(self, descriptor: int, op: str, **fields: Any) -> None:
        """Send a frame with a descriptor beside it, once what was written before it is out."""
        frame, sent = self._frame(op, fields), 0
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
        while not sent:
            waits = self._open_writer().transport.get_write_buffer_size()
            try:
                sent = self._sock.sendmsg([frame], rights) if self._sock and not waits else 0
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                self._end()  # the next look tells it
            if not sent:
                await asyncio.sleep(SEND_LOOK_S)
        self._open_writer().write(frame[sent:])

    async def stream(
        self, op: str, descriptor: int | None = None, **fields: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Events of a request up to the one that ends it; an error event raises ApiError.

        Left early, the request is cancelled. `descriptor` goes with it; it stays the caller's.
        """
        if op == "generate" and self._draining is not None:
            await asyncio.shield(self._draining)
        number = self._next
        self._next += 1
        queue = self._queues[number] = asyncio.Queue()
        ended = False
        try:
            if descriptor is None:
                self.send(op, id=number, **fields)
            else:
                await self._send_file(descriptor, op, id=number, **fields)
            while not ended:
                event = await queue.get()
                if event is None:
                    ended = True
                    raise ApiError("failed", f"{self.name}: {self._gone}")
                ended = event["event"] in ENDS or op != "generate"
                if event["event"] == "error":
                    raise error_of(event)
                yield event
        finally:
            if op == "generate" and not ended and not self.closed.is_set():
                await self._cancel(number, queue)
            else:
                self._queues.pop(number, None)

    async def _cancel(self, number: int, queue: asyncio.Queue[dict[str, Any] | None]) -> None:
        """End a request, and wait until the engine is free. Whoever gives up waiting leaves the
        rest to the next request, which begins only then."""
        with contextlib.suppress(ApiError):
            self.send("cancel", id=number)
        self._draining = asyncio.create_task(self._drain(number, queue))
        await asyncio.shield(self._draining)

    async def _drain(self, number: int, queue: asyncio.Queue[dict[str, Any] | None]) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                while (event := await waiting.within(CANCEL_S, queue.get())) is not None:
                    if event["event"] in ENDS:
                        return
        finally:
            self._queues.pop(number, None)

    async def request(
        self, op: str, timeout_s: float, descriptor: int | None = None, **fields: Any
    ) -> dict[str, Any]:
        """The one event that answers a request. Raises ApiError, "timeout" among them."""

        async def first() -> dict[str, Any]:
            events = self.stream(op, descriptor, **fields)
            try:
                async for event in events:
                    return event
            finally:
                await events.aclose()  # type: ignore[attr-defined]
            raise ApiError("failed", f"{self.name}: no answer to {op}; try again")

        try:
            return await waiting.within(timeout_s, first())
        except TimeoutError:
            reason = f"{self.name}: no answer to {op} within {timeout_s:g} s; try again"
            raise ApiError("timeout", reason) from None
