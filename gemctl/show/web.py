"""Status page and figures over HTTP: read only, on loopback or a Unix socket, never anywhere else.

    await serve("127.0.0.1:9464", service, history, hub, metrics, stop)

    GET /                the page: one file, no other sources
    GET /stats.json      as `gemctl stats --json`
    GET /history.json    ?seconds=3600&step_s=10, see history.py
    GET /events.json     ?after=NUMBER, the newest EVENTS of them
    GET /metrics         for Prometheus

A request is a line and headers, 8 KiB in all and 5 s long at most; each answer ends its connection.
A `Host` that is not this machine's loopback is refused: a page of another site, whose name was
pointed here, reads nothing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import re
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from gemctl.config import parse_listen
from gemctl.errors import ApiError
from gemctl.events import EventHub
from gemctl.service import Service
from gemctl.show.history import COARSE_S, LONGEST_S, History
from gemctl.show.metrics import CONTENT_TYPE, Metrics

MAX_HEAD = 8192
MAX_CONNECTIONS = 32
TIMEOUT_S = 5.0
EVENTS = 200
REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
PAGE = Path(__file__).with_name("page.html")
REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]{0,2047}) HTTP/1\.([01])")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([\t -~\x80-\xff]*)")


@dataclass(frozen=True)
class Answer:
    """What one request gets."""

    status: int
    body: bytes
    kind: str = TEXT
    policy: str = "default-src 'none'; frame-ancestors 'none'"

    def head(self) -> bytes:
        """Status line and headers."""
        lines = [
            f"HTTP/1.1 {self.status} {REASONS[self.status]}",
            f"Content-Type: {self.kind}",
            f"Content-Length: {len(self.body)}",
            f"Content-Security-Policy: {self.policy}",
            "X-Content-Type-Options: nosniff",
            "Referrer-Policy: no-referrer",
            "Cross-Origin-Resource-Policy: same-origin",
            "Cache-Control: no-store",
            "Connection: close",
        ]
        if self.status == 405:
            lines.append("Allow: GET")
        return "\r\n".join([*lines, "", ""]).encode("ascii")


class _Failed(Exception):
    """The request is answered with this instead."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.answer = Answer(status, f"{sentence}\n".encode())


def loopback_host(value: str) -> bool:
    """Is a Host header's value this machine by one of its loopback names? The port may differ:
    a tunnel has its own."""
    match = re.fullmatch(r"(localhost|\[::1\]|127(?:\.\d{1,3}){3})(?::\d{1,5})?", value.lower())
    return match is not None


def content_policy(page: bytes) -> str:
    """Allows the page's own script and style, by their hashes, and nothing else."""

    def hashes(tag: bytes) -> str:
        parts = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), page, re.S)
        digests = [base64.b64encode(hashlib.sha256(part).digest()).decode() for part in parts]
        return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"

    return (
        f"default-src 'none'; script-src {hashes(b'script')}; style-src {hashes(b'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def parse_head(head: bytes) -> tuple[str, dict[str, int]]:
    """(path, query) of a request's head. Raises _Failed."""
    first, *rest = head.rstrip(b"\r\n").replace(b"\r\n", b"\n").split(b"\n")
    line = REQUEST_LINE.fullmatch(first)
    if not line:
        raise _Failed(400, "request: not HTTP/1.1; use a browser or curl")
    if line[1] != b"GET":
        raise _Failed(405, "request: only GET; use gemctl for changes")
    hosts = []
    for text in rest:
        header = HEADER.fullmatch(text)
        if not header:
            raise _Failed(400, "request: a header that is none; use a browser or curl")
        name, value = header[1].lower(), header[2].strip()
        if name == b"host":
            hosts.append(value.decode("latin-1"))
        if name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
            raise _Failed(400, "request: it has a body; send none")
    if len(hosts) != 1 or not loopback_host(hosts[0]):
        raise _Failed(403, "request: its Host is not this machine; use localhost or 127.0.0.1")
    return _target(line[2].decode("ascii"))


def _target(target: str) -> tuple[str, dict[str, int]]:
    parts = urlsplit(target)
    query: dict[str, int] = {}
    try:
        for name, value in parse_qsl(parts.query, keep_blank_values=True, max_num_fields=8):
            if not re.fullmatch(r"\d{1,15}", value, re.ASCII):
                raise _Failed(400, f"request: {name[:32]!a} is no whole number; send one")
            query[name] = int(value)
    except ValueError:
        raise _Failed(400, "request: too many parts; send fewer") from None
    return parts.path, query


class StatusServer:
    """Answers from what it is given, and calls nothing that changes anything."""

    def __init__(self, service: Service, history: History, hub: EventHub, metrics: Metrics) -> None:
        self._service, self._history = service, history
        self._hub, self._metrics = hub, metrics
        self._page = PAGE.read_bytes()
        self._policy = content_policy(self._page)
        self._open = 0
        self._server: asyncio.AbstractServer | None = None
        self._path: Path | None = None
        self._routes: dict[str, Callable[[dict[str, int]], Answer]] = {
            "/": self._get_page,
            "/stats.json": self._get_stats,
            "/history.json": self._get_history,
            "/events.json": self._get_events,
            "/metrics": self._get_metrics,
        }

    async def start(self, listen: str) -> None:
        """Listen. Raises ApiError: "bad_request" for a place that is not allowed, "failed"."""
        place = parse_listen(listen)
        try:
            if isinstance(place, Path):
                self._server = await self._start_unix(place)
            else:
                self._server = await asyncio.start_server(self._serve, *place, limit=MAX_HEAD)
        except OSError as error:
            text = f"metrics.listen '{listen}': {error.strerror or error}; choose another place"
            raise ApiError("failed", text) from None

    async def _start_unix(self, path: Path) -> asyncio.AbstractServer:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise OSError(0, "something else is there")
            path.unlink()
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o117)  # the daemon's group may read
            try:
                link.bind(str(path))
            finally:
                os.umask(before)
            self._path = path
            return await asyncio.start_unix_server(self._serve, sock=link, limit=MAX_HEAD)
        except OSError:
            link.close()
            raise

    @property
    def port(self) -> int:
        """The TCP port; 0 for a Unix socket."""
        sockets = getattr(self._server, "sockets", ())
        name = sockets[0].getsockname() if sockets else ""
        return int(name[1]) if isinstance(name, tuple) else 0

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open > MAX_CONNECTIONS:
                busy = Answer(503, f"connections: {MAX_CONNECTIONS} are open; try again\n".encode())
                writer.write(busy.head() + busy.body)
                return
            answer = await self._answer(reader)
            writer.write(answer.head() + answer.body)
            await asyncio.wait_for(writer.drain(), TIMEOUT_S)
            await asyncio.wait_for(self._finish(reader, writer), TIMEOUT_S)
        except (OSError, asyncio.TimeoutError):
            writer.transport.abort()
        finally:
            self._open -= 1
            writer.close()

    async def _finish(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """End our side and take what still comes, so that the answer is not lost to a reset."""
        if writer.can_write_eof():
            writer.write_eof()
        for _ in range(64):
            if not await reader.read(MAX_HEAD):
                return

    async def _answer(self, reader: asyncio.StreamReader) -> Answer:
        try:
            path, query = parse_head(await _head(reader))
            route = self._routes.get(path)
            if route is None:
                raise _Failed(404, f"request: no such page; there are: {', '.join(self._routes)}")
            return route(query)
        except _Failed as error:
            return error.answer
        except ApiError as error:
            return Answer(500, f"{error.message}\n".encode())
        except (ValueError, TypeError, KeyError):  # figures that are no JSON: a fault of the daemon
            return Answer(500, b"figures: they cannot be shown; see the daemon's log\n")

    def _get_page(self, query: dict[str, int]) -> Answer:
        return Answer(200, self._page, "text/html; charset=utf-8", self._policy)

    def _get_stats(self, query: dict[str, int]) -> Answer:
        return _json(self._service.stats())

    def _get_history(self, query: dict[str, int]) -> Answer:
        seconds, step_s = query.get("seconds", LONGEST_S), query.get("step_s", COARSE_S)
        return _json(self._history.query(seconds, step_s))

    def _get_events(self, query: dict[str, int]) -> Answer:
        every = self._hub.recent()
        last = every[-1].seq if every else 0  # below what the caller has seen: a new start
        recent = [event.as_dict() for event in every if event.seq > query.get("after", 0)]
        return _json({"last": last, "events": recent[-EVENTS:]})

    def _get_metrics(self, query: dict[str, int]) -> Answer:
        text = self._metrics.text()
        if text is None:
            raise _Failed(503, "metrics: off; install gembin-toolchain[metrics] and restart")
        return Answer(200, text, CONTENT_TYPE)


async def _head(reader: asyncio.StreamReader) -> bytes:
    """A request up to its empty line. Raises _Failed; OSError where the caller has gone."""
    try:
        return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
    except asyncio.TimeoutError:
        raise _Failed(408, f"request: not whole after {TIMEOUT_S:g} s; send it at once") from None
    except asyncio.LimitOverrunError:
        raise _Failed(431, f"request: more than {MAX_HEAD} bytes; send less") from None
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            raise ConnectionResetError from None
        raise _Failed(400, "request: cut off; send it whole") from None


def _json(value: dict[str, Any]) -> Answer:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Answer(200, text.encode("ascii"), JSON)


async def serve(
    listen: str,
    service: Service,
    history: History,
    hub: EventHub,
    metrics: Metrics,
    stop: asyncio.Event,
) -> None:
    """Serve until `stop` is set. Raises ApiError if the place is not allowed or taken."""
    server = StatusServer(service, history, hub, metrics)
    await server.start(listen)
    try:
        await stop.wait()
    finally:
        await server.close()
