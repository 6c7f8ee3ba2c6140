"""The Unix socket: JSON lines in, JSON lines out, descriptors beside them (PROTOCOL.md).

Who asks is what the kernel says (SO_PEERCRED), never what the line says. Every limit is here: bytes
of a line, requests at once, connections, the time a peer may take to finish a line or to read an
answer. A peer that breaks one loses its own connection and nothing else happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import json
import os
import pwd
import select
import socket
import stat
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemctl import strict, waiting
from gemctl.config import DaemonConfig
from gemctl.errors import ApiError, of_system
from gemctl.peers import groups_of, peer_of
from gemctl.serve.jobs import stopped
from gemctl.service import Caller, Service
from gemctl.wording import remedy

LINE_MOST = 1 << 18  # bytes of a request
FDS_MOST = 1
REQUESTS_MOST = 8  # at once, of one connection
LINE_S = 10.0  # from a line's first byte to its end
GONE_LOOK_S = 0.1
SEND_S = 10.0  # a peer that does not read for so long is gone
VERSION = 1
KEYS = ("v", "id", "method", "params")  # of a request
KEPT_FREE = 4  # connections that are kept for root and the daemon's own user
GOODBYE_S = 2.0  # at the end: for the last replies, of which each peer has to take its own
READY_S = 0.5  # and of that for requests that end by themselves


@dataclass(frozen=True)
class Doors:
    """For programs that attach: `check` raises ApiError for a name, `attach` takes one over."""

    check: Callable[[str], None]
    attach: Callable[[str, int, socket.socket], Awaitable[None]]


def _no_json(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos + 1}"
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {error.start + 1}"
    return str(error)


def parse_line(line: bytes) -> dict[str, Any]:
    """A request as the protocol has it. Raises ApiError("bad_request")."""
    try:
        request = strict.loads(line)
    except ValueError as error:
        what = f"request: no JSON: {_no_json(error)}; send one object a line"
        raise ApiError("bad_request", what) from None
    if not isinstance(request, dict):
        raise ApiError("bad_request", "request: no object; see PROTOCOL.md")
    for key in request:
        if key not in KEYS:
            sentence = f"request: {key[:64]!a} is unknown; {remedy(key, KEYS)}"
            raise Misread(sentence, request)
    said = request.get("v", VERSION)
    if type(said) is not int or said != VERSION:  # true is 1 to Python
        what = f"request: version {json.dumps(said)[:20]}"
        raise Misread(f"{what}; this daemon speaks {VERSION}", request)
    if not _is_id(request.get("id")):
        raise Misread("request: 'id' is no text of 1 to 64 printable characters; set it", request)
    if not isinstance(request.get("method"), str):
        raise Misread("request: 'method' is no text; name one of PROTOCOL.md", request)
    if not isinstance(request.get("params", {}), dict):
        raise Misread("request: 'params' is no object; leave it out, or give one", request)
    if strict.has_half_pair(request, line):
        raise Misread(f"request: {strict.HALF_PAIR}", request)
    return request


class Misread(ApiError):
    """A request that is no good one. `number`: its id, or "" where that is none either."""

    def __init__(self, message: str, request: dict[str, Any]) -> None:
        super().__init__("bad_request", message)
        self.number = str(request["id"]) if _is_id(request.get("id")) else ""


def _is_id(number: object) -> bool:
    """A text that can be sent back as it came, and stand in a line of a log: no half of a surrogate
    pair, no control character."""
    if not isinstance(number, str) or not 0 < len(number) <= 64:
        return False
    if strict.CONTROL.search(number):
        return False
    return not any("\ud800" <= character <= "\udfff" for character in number)


def _group(name: str) -> int | None:
    with contextlib.suppress(KeyError):
        return grp.getgrnam(name).gr_gid
    return None


def permissions(
    uid: int, gid: int, config: DaemonConfig, groups: set[int] | None = None
) -> tuple[bool, bool]:
    """(may read, may write) of a user by the groups that its process is in; by the user database
    where the kernel does not know them."""
    if uid in (0, os.geteuid()):
        return True, True
    found = _groups_of_user(uid, gid) if groups is None else {gid, *groups}
    write = _group(config.write_group) in found
    return write or _group(config.read_group) in found, write


def _groups_of_user(uid: int, gid: int) -> set[int]:
    try:
        return set(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    except KeyError:  # a user of a container, without a name here
        return {gid}


def _receive(connection: socket.socket, limit: int) -> tuple[bytes, list[int]]:
    """Bytes and descriptors, close-on-exec. Raises BlockingIOError while there are none."""
    fds = array("i")
    room = socket.CMSG_SPACE(4 * fds.itemsize)  # more than is allowed, to see and close them
    data, extra, _, _ = connection.recvmsg(limit, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return data, list(fds)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


class Connection:
    """One peer."""

    def __init__(self, sock: socket.socket, service: Service, caller: Caller, doors: Doors):
        self._sock = sock
        self._service = service
        self._caller = caller
        self._doors = doors
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._sending = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writes: set[asyncio.Future[bool]] = set()
        self._leaving = False
        self.handed_over = False

    async def run(self) -> None:
        """Serve until the peer is gone."""
        try:
            while (line := await self._line()) is not None:
                fds, self._fds = self._fds, []
                if not await self._take(line, fds):
                    return
            await self._finish()
        finally:
            _close_all(self._fds)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._writes and self._leaving:
                await asyncio.wait(self._writes, timeout=GOODBYE_S)
            for writing in self._writes:
                writing.cancel()
            if not self.handed_over:
                self._sock.close()

    async def leave(self) -> None:
        """The daemon ends: requests end by themselves, or are answered by `cancelled`."""
        self._leaving = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=READY_S)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._writes:
            await asyncio.wait(self._writes)

    async def _finish(self) -> None:
        """A peer that only stopped writing still gets its answers; one that is gone gets none."""
        look = select.poll()
        look.register(self._sock, 0)
        while self._tasks and not look.poll(0):
            await asyncio.wait(self._tasks, timeout=GONE_LOOK_S)

    async def _line(self) -> bytes | None:
        """The next line without its end; None: the peer is gone, or broke a limit."""
        started = None
        while True:
            end = self._buffer.find(b"\n")
            over = self._over(end if end >= 0 else len(self._buffer))
            if over:
                await self._error("", ApiError("bad_request", f"request: {over}"))
                return None
            if end >= 0:
                break
            started = started or (self._loop.time() if self._buffer else None)
            wait = None if started is None else started + LINE_S - self._loop.time()
            try:
                data, fds = await waiting.within(wait, self._some())
            except (TimeoutError, OSError):
                return None
            self._fds += fds
            if not data:
                return None
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _over(self, size: int) -> str:
        """Which limit a line of so many bytes breaks, or the descriptors beside it."""
        if len(self._fds) > FDS_MOST:
            return f"more than {FDS_MOST} descriptor; send one"
        return f"over {LINE_MOST} bytes; shorten it" if size > LINE_MOST else ""

    async def _some(self) -> tuple[bytes, list[int]]:
        while True:
            try:
                return _receive(self._sock, 1 << 16)
            except (BlockingIOError, InterruptedError):
                await self._readable()

    async def _readable(self) -> None:
        ready = self._loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        self._loop.add_reader(self._sock, wake)
        try:
            await ready
        finally:
            self._loop.remove_reader(self._sock)

    async def _take(self, line: bytes, fds: list[int]) -> bool:
        """Start a request. False: this connection has ended."""
        try:
            request = parse_line(line)
        except ApiError as error:
            _close_all(fds)
            return await self._error(error.number if isinstance(error, Misread) else "", error)
        if request["method"] == "attach":
            _close_all(fds)
            return await self._hand_over(request)
        if self._leaving:
            _close_all(fds)
            return await self._error(request["id"], stopped())
        if len(self._tasks) >= REQUESTS_MOST:
            _close_all(fds)
            busy = ApiError("busy", f"connection: {REQUESTS_MOST} requests run; wait for one")
            return await self._error(request["id"], busy)
        task = asyncio.create_task(self._serve(request, fds))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _hand_over(self, request: dict[str, Any]) -> bool:
        """The peer is an engine: from here it speaks frames."""
        number = request["id"]
        if not self._caller.may_write:
            refusal = ApiError("forbidden", f"attach: {self._caller.name} may not; join the group")
            return await self._error(number, refusal)
        if self._tasks or self._buffer:
            early = ApiError("conflict", "attach: requests run here; use a connection of its own")
            return await self._error(number, early)
        name = request.get("params", {}).get("name")
        pid = peer_of(self._sock)[0]
        if not isinstance(name, str):
            return await self._error(number, ApiError("bad_request", "attach: no name; give one"))
        try:
            self._doors.check(name)
        except ApiError as error:
            return await self._error(number, error)
        if not await self._send({"v": VERSION, "id": number, "result": {}}):
            return False
        self.handed_over = True
        await self._doors.attach(name, pid, self._sock)
        return False

    async def _serve(self, request: dict[str, Any], fds: list[int]) -> None:
        number = request["id"]

        async def emit(event: dict[str, Any]) -> None:
            if not await self._send({"v": VERSION, "id": number, "event": event}):
                raise ApiError("cancelled", "the caller is gone; ask again")

        caller = Caller(self._caller.name, self._caller.may_write, "unix", tuple(fds))
        answered = False
        try:
            params = request.get("params", {})
            result = await self._service.call(request["method"], params, caller, emit)
            answered = True
            await self._send({"v": VERSION, "id": number, "result": result})
        except ApiError as error:
            await self._error(number, error)
        except asyncio.CancelledError:
            if answered or not self._leaving:
                raise
            await self._error(number, stopped())
        finally:
            _close_all(fds)

    async def _error(self, number: str, error: ApiError) -> bool:
        return await self._send({"v": VERSION, "id": number, "error": error.as_dict()})

    async def _send(self, message: dict[str, Any]) -> bool:
        """False: the peer is gone, or does not read. A line that has begun is ended, whatever
        becomes of its request meanwhile: the next one would not be understood."""
        line = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        if not self._writes:  # mostly there is room, and nothing has to wait
            try:
                line = line[self._sock.send(line) :]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:  # seen by who reads, too
                self._give_up()
                return False
            if not line:
                return True
        writing = asyncio.ensure_future(self._write(line))
        self._writes.add(writing)
        writing.add_done_callback(self._writes.discard)
        return await asyncio.shield(writing)

    async def _write(self, line: bytes) -> bool:
        try:
            async with self._sending:
                await waiting.within(SEND_S, self._loop.sock_sendall(self._sock, line))
        except (TimeoutError, OSError):
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def _is_served(path: Path) -> bool:
    probe = socket.socket(socket.AF_UNIX)
    try:
        probe.settimeout(1)
        probe.connect(str(path))
    except OSError:
        return False
    finally:
        probe.close()
    return True


def listen(config: DaemonConfig) -> socket.socket:
    """The listening socket, 0660 for the read group. Raises ApiError: in use, or no such folder."""
    path = config.socket
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            if _is_served(path):
                raise ApiError("conflict", f"{path}: another gemctld listens here; stop it")
            path.unlink()
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        mask = os.umask(0o117)
        try:
            sock.bind(str(path))
        finally:
            os.umask(mask)
        group = _group(config.read_group)
        if group is not None and os.geteuid() == 0:
            os.chown(path, -1, group)
        sock.listen(128)
        sock.setblocking(False)
    except OSError as error:
        reason = f"{path}: {error.strerror or error}; set daemon.socket to a place that is ours"
        raise ApiError("bad_request", reason) from None
    return sock


class Server:
    """Accepts until it is closed."""

    def __init__(
        self, sock: socket.socket, config: DaemonConfig, service: Service, doors: Doors
    ) -> None:
        self._sock = sock
        self._config = config
        self._service = service
        self._doors = doors
        self._tasks: dict[asyncio.Task[None], int] = {}  # each with its peer's user
        self._connections: dict[asyncio.Task[None], Connection] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._short = False  # the last connection could not be taken
        self.on_short: Callable[[ApiError], None] = lambda _error: None  # once each time
        self._left = asyncio.Event()  # the last replies are out

    async def run(self) -> None:
        """Accept connections until `turn_away`, serve them until `goodbye`, or until cancelled."""
        self._accepting = asyncio.create_task(self._accept())
        try:
            await asyncio.wait({self._accepting})
            if not self._accepting.cancelled():
                self._accepting.result()  # a fault: nothing else ends it
            await self._left.wait()
        finally:
            self._accepting.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # no descriptor is left: those that end give one back
                if not self._short:
                    self.on_short(of_system("a connection was not taken", error))
                self._short = True
                await asyncio.sleep(0.1)
                continue
            self._short = False
            self._welcome(peer)

    def turn_away(self) -> None:
        """The daemon ends: who comes now waits for the next one, where systemd listens for it."""
        if self._accepting is not None:
            self._accepting.cancel()

    async def goodbye(self) -> None:
        """Let every request have its last reply, for GOODBYE_S at most, and end."""
        leaving = [connection.leave() for connection in self._connections.values()]
        with contextlib.suppress(TimeoutError):
            await waiting.within(GOODBYE_S, asyncio.gather(*leaving, return_exceptions=True))
        self._left.set()

    def _welcome(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        try:
            _, uid, gid = peer_of(peer)
        except OSError:
            peer.close()
            return
        read, write = permissions(uid, gid, self._config, groups_of(peer))
        refusal = self._refusal(uid, read)
        if refusal is not None:
            reply = {"v": VERSION, "id": "", "error": refusal.as_dict()}
            with contextlib.suppress(OSError):
                peer.send(json.dumps(reply).encode() + b"\n")
            peer.close()
            return
        caller = Caller(f"uid {uid} (unix)", write, "unix")
        connection = Connection(peer, self._service, caller, self._doors)
        task = asyncio.create_task(connection.run())
        self._tasks[task] = uid
        self._connections[task] = connection
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._connections.pop(task, None)

    def _refusal(self, uid: int, read: bool) -> ApiError | None:
        """Why a peer is turned away. No user can keep all others out, least of all root."""
        if not read:
            what = f"uid {uid} may not; join the group {self._config.read_group}"
            return ApiError("forbidden", what)
        most, taken = self._config.connections, list(self._tasks.values())
        privileged = (0, os.geteuid())
        if uid not in privileged:
            others = sum(user not in privileged for user in taken)
            if taken.count(uid) >= max(1, most // 2):
                what = f"{taken.count(uid)} connections of uid {uid} are open; close some"
                return ApiError("busy", what)
            if others >= max(1, most - KEPT_FREE):
                return ApiError("busy", f"{others} connections are open; try again later")
        if len(taken) >= most:
            return ApiError("busy", f"{len(taken)} connections are open; try again later")
        return None
