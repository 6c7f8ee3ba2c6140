"""The command's side of the socket: one connection, one request, its events and its result.

Synchronous and light: the command starts, asks and ends within a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

DEFAULT_SOCKET = "/run/gemctl/gemctl.sock"
LINE_MOST = 1 << 22


class Refused(Exception):
    """The daemon's error, or that there is none. `code` as in errors.py, or "unreachable"."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def socket_path(given: str | None) -> str:
    """Where the daemon listens: the option, $GEMCTL_SOCKET, or the usual place."""
    return given or os.environ.get("GEMCTL_SOCKET") or DEFAULT_SOCKET


class Client:
    """One connection to the daemon. A context manager."""

    def __init__(self, path: str, timeout_s: float | None = None) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(timeout_s)
        try:
            self._sock.connect(path)
        except OSError as error:
            self._sock.close()
            if isinstance(error, PermissionError):
                reason = f"{path}: you may not; join the group gemctl, or ask its administrator"
                raise Refused("forbidden", reason) from None
            reason = f"{path}: {error.strerror or error}; start gemctld, or name its --socket"
            raise Refused("unreachable", reason) from None
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
        line = json.dumps({"v": 1, "id": "1", "method": method, "params": params or {}})
        try:
            with contextlib.suppress(BrokenPipeError):  # it may have refused us, and said why
                self._send(line.encode("utf-8", "replace") + b"\n", fd)
            while True:
                reply = json.loads(self._line())
                if "event" in reply:
                    if on_event is not None:
                        on_event(reply["event"])
                elif "error" in reply:
                    raise Refused(reply["error"]["code"], reply["error"]["message"])
                else:
                    result: dict[str, Any] = reply["result"]
                    return result
        except TimeoutError:
            raise Refused("timeout", f"{method}: no answer in time; try again") from None
        except OSError as error:
            what = f"connection: {error.strerror or error}"
            reason = f"{what}; gemctld has ended; start it, and ask again"
            raise Refused("unreachable", reason) from None

    def _send(self, data: bytes, fd: int | None) -> None:
        if fd is None:
            self._sock.sendall(data)
            return
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))]
        sent = self._sock.sendmsg([data], rights)
        self._sock.sendall(data[sent:])

    def _line(self) -> bytes:
        while b"\n" not in self._buffer:
            more = self._sock.recv(1 << 16)
            if not more or len(self._buffer) > LINE_MOST:
                raise ConnectionError(None, "the daemon closed it")
            self._buffer += more
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
