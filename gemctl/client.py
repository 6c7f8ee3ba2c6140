"""The command's side of the socket: one connection, one request, its events and its result.

Synchronous and light: the command starts, asks and ends within a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket

from gemctl.codes import RETRYABLE

TYPE_CHECKING = False  # typing itself would take a tenth of the command's time
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

DEFAULT_SOCKET = "/run/gemctl/gemctl.sock"
LINE_MOST = 1 << 22
CANCEL_S = 30.0
CONNECT_S = 10.0
LOOK_S = 5.0  # without a word: it is asked whether the daemon is well
SILENT_S = 5.0  # without an answer to that
LOOK = "look"  # the id of that question
SILENT = "gemctld does not answer; see its log (journalctl -u gemctld), and restart it"
ENDED = "gemctld has ended; start it, and ask again"
_PARTS = ("event", "error", "result")


class Refused(Exception):
    """The daemon's error, or that there is none. `code` as in errors.py, or "unreachable"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def as_dict(self) -> dict[str, Any]:
        """As the protocol has it."""
        return {"code": self.code, "message": str(self), "retryable": self.code in RETRYABLE}


def socket_path(given: str | None) -> str:
    """Where the daemon listens: the option, $GEMCTL_SOCKET, or the usual place."""
    return given or os.environ.get("GEMCTL_SOCKET") or DEFAULT_SOCKET


class Answer(dict):  # type: ignore[type-arg]  # a dict with arguments costs typing's time
    """An object of the daemon's, which is of another version where something is not in it."""

    def __missing__(self, key: str) -> None:
        what = f"connection: {key[:64]} is not in the answer, gemctld is of another version"
        raise Refused("internal", f"{what} than gemctl; restart it, see gemctl --version")


class Client:
    """One connection to the daemon. A context manager. Without a time for the answer it may take as
    long as it needs; a daemon that hangs meanwhile is noticed within LOOK_S + SILENT_S."""

    def __init__(self, path: str, timeout_s: float | None = None) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._timeout_s = timeout_s
        self._sock.settimeout(CONNECT_S)
        try:
            self._sock.connect(path)
        except OSError as error:
            self._sock.close()
            raise _no_daemon(path, error) from None
        self._buffer = b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def call(
        self,
        method: str,
        params: dict[str, Any] | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        fd: int | None = None,
    ) -> dict[str, Any]:
        """The result of a method; its events go to `on_event`. Raises Refused."""
        try:
            with contextlib.suppress(BrokenPipeError):  # it may have refused us, and said why
                self._send(_line_of("1", method, params), fd)
            while "event" in (reply := self._reply()):
                if on_event is not None:
                    on_event(reply["event"])
        except TimeoutError:
            raise Refused("timeout", f"{method}: no answer in time: {SILENT}") from None
        except OSError as error:
            what = f"connection: {error.strerror or error}"
            raise Refused("unreachable", f"{what}; {ENDED}") from None
        if "error" in reply:
            raise Refused(reply["error"]["code"], reply["error"]["message"])
        result: dict[str, Any] = reply["result"]
        return result

    def cancel(self, job: str) -> Refused:
        """End a job that `call` began and was interrupted in: how that went."""
        self._timeout_s = CANCEL_S
        try:
            self._send(_line_of("2", "cancel", {"id": job}), None)
            while True:
                reply = self._reply()
                if reply.get("id") == "1" and "error" in reply:
                    return Refused(reply["error"]["code"], reply["error"]["message"])
                if reply.get("id") == "1" and "result" in reply:
                    return Refused("cancelled", "stopped by SIGINT too late: it was done already")
                if "error" in reply:
                    return Refused("cancelled", reply["error"]["message"])
        except (OSError, Refused):
            return Refused("cancelled", "stopped by SIGINT; see gemctl model list")

    def _send(self, data: bytes, fd: int | None) -> None:
        if fd is None:
            self._sock.sendall(data)
            return
        import struct

        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
        sent = self._sock.sendmsg([data], rights)
        self._sock.sendall(data[sent:])

    def _reply(self) -> dict[str, Any]:
        """The next line as an object. Raises Refused where no gemctld wrote it."""
        with contextlib.suppress(ValueError, TypeError):
            while True:
                reply = json.loads(self._line(), object_hook=Answer)
                known: dict[str, Any] = {key: reply[key] for key in _PARTS if key in reply}
                if not (known and all(_is_part(key, value) for key, value in known.items())):
                    break
                if reply.get("id") != LOOK:
                    return {**known, "id": reply.get("id")}
        raise Refused("internal", "connection: no gemctld answers there; name its --socket")

    def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            more = self._some()
            if not more or len(self._buffer) > LINE_MOST:
                raise ConnectionError(None, "the daemon closed it")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _some(self) -> bytes:
        """What comes next. Raises TimeoutError."""
        self._sock.settimeout(LOOK_S if self._timeout_s is None else self._timeout_s)
        try:
            return self._sock.recv(1 << 16)
        except TimeoutError:
            if self._timeout_s is not None:
                raise
        self._sock.settimeout(SILENT_S)
        with contextlib.suppress(BrokenPipeError):  # its last words may still be there
            self._send(_line_of(LOOK, "daemon.info", None), None)
        return self._sock.recv(1 << 16)


def _is_part(key: str, value: object) -> bool:
    """Whether a part of a reply is what the protocol has."""
    if not isinstance(value, dict):
        return False
    words = (value.get("code"), value.get("message"))
    return key != "error" or all(isinstance(word, str) for word in words)


def _line_of(number: str, method: str, params: dict[str, Any] | None) -> bytes:
    """A request."""
    line = json.dumps({"v": 1, "id": number, "method": method, "params": params or {}})
    return line.encode("utf-8", "replace") + b"\n"


def _group_of(path: str) -> str:
    """The group that may connect, by name; "" where that is nobody's or cannot be seen."""
    import grp

    try:
        number = os.stat(path).st_gid  # noqa: PTH116  (pathlib would take longer than the rest)
        return grp.getgrgid(number).gr_name if number else ""
    except (OSError, KeyError):
        return ""


def _no_daemon(path: str, error: OSError) -> Refused:
    """Why a connection could not be made, and what helps."""
    if isinstance(error, PermissionError):
        group = _group_of(path)
        more = f", or join the group {group} and log in again" if group else ""
        return Refused("forbidden", f"{path}: you may not; use sudo{more}")
    if isinstance(error, (TimeoutError, BlockingIOError)):  # too many wait before us
        return Refused("timeout", f"{path}: gemctld takes no connection; see its log")
    reason = f"{path}: no daemon ({error.strerror or error}); start gemctld, or name its --socket"
    return Refused("unreachable", reason)
