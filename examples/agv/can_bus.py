"""The CAN side: one classic frame of 8 bytes for each decision.

    identifier 0x120 (11 bits)
    byte 0     high nibble: version 1; low nibble: source, 0 rule, 1 model
    byte 1     action: 0 stop, 1 slow, 2 drive, 3 charge
    byte 2..3  speed in cm/s, little-endian
    byte 4     why: number in decide.WHYS
    byte 5     counter: the decision's number, modulo 256; a gap shows a lost frame
    byte 6     valid for so many tenths of a second; without a newer frame the vehicle then stops
    byte 7     CRC-8 SAE J1850 of the identifier (2 bytes, little-endian) and bytes 0..6

SocketCAN where the kernel has it. Elsewhere a STAND-IN: the same 16 bytes of `struct can_frame` as
datagrams of a Unix socket. That is no CAN bus: no arbitration, no acknowledgement.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from decide import WHYS, Decision, Source, Why
from order import Action

CAN_ID = 0x120
VERSION = 1
VALID_TENTHS = 20
FRAME = struct.Struct("=IB3x8s")  # struct can_frame: identifier, length, data
DATA = struct.Struct("<BBHBBB")  # bytes 0..6
ACTIONS: tuple[Action, ...] = get_args(Action)
SOURCES: tuple[Source, ...] = ("rule", "model")

QUEUE_MOST = 4096  # frames that wait for the bus; beyond it the oldest is lost
STALE_S = VALID_TENTHS / 10  # a frame that has waited for so long is lost
RETRY_S = 0.001  # a full transmit queue does not say when it has room


class NoBusError(Exception):
    """No bus to open. Text: `<object>: <what is wrong>; <what to do>`."""


@dataclass(frozen=True)
class Frame:
    """A frame's contents."""

    action: Action
    speed_cm_s: int
    source: Source
    why: Why
    counter: int
    valid_s: float


def crc8(data: bytes) -> int:
    """CRC-8 SAE J1850: polynomial 0x1D, start and final XOR 0xFF."""
    crc = 0xFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc << 1) ^ 0x1D if crc & 0x80 else crc << 1
            crc &= 0xFF
    return crc ^ 0xFF


def _check(data: bytes) -> int:
    return crc8(CAN_ID.to_bytes(2, "little") + data)


def pack(decision: Decision) -> bytes:
    """The 16 bytes of `struct can_frame` for a decision."""
    command = decision.command
    data = DATA.pack(
        VERSION << 4 | SOURCES.index(decision.source),
        ACTIONS.index(command.action),
        command.speed_cm_s,
        WHYS.index(decision.why),
        decision.number & 0xFF,
        VALID_TENTHS,
    )
    return FRAME.pack(CAN_ID, 8, data + bytes([_check(data)]))


def unpack(raw: bytes) -> Frame | None:
    """What a vehicle reads; None: not ours, or damaged, and then nothing of it may be used."""
    if len(raw) != FRAME.size:
        return None
    ident, length, data = FRAME.unpack(raw)
    if ident != CAN_ID or length != 8 or data[7] != _check(data[:7]):
        return None
    head, action, speed, why, counter, valid = DATA.unpack(data[:7])
    known = action < len(ACTIONS) and why < len(WHYS) and head & 0xF < len(SOURCES)
    if head >> 4 != VERSION or not known:
        return None
    return Frame(ACTIONS[action], speed, SOURCES[head & 0xF], WHYS[why], counter, valid / 10)


def _open_can(interface: str) -> socket.socket | None:
    """A raw CAN socket; None: this kernel has no CAN. Raises NoBusError for the interface."""
    try:
        sock = socket.socket(socket.AF_CAN, socket.SOCK_RAW, socket.CAN_RAW)
    except (AttributeError, OSError) as error:
        known = (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)
        if isinstance(error, OSError) and error.errno not in known:
            raise NoBusError(f"CAN: {error.strerror}; run with the right to open it") from None
        return None
    try:
        sock.bind((interface,))
    except OSError as error:
        sock.close()
        remedy = "set it up with ip link, or name another one"
        raise NoBusError(f"{interface}: {error.strerror}; {remedy}") from None
    sock.setblocking(False)
    return sock


def _open(interface: str | None, stand_in: Path | None) -> tuple[socket.socket, Path | None, str]:
    """(socket, where datagrams of the stand-in go, what it really is). Raises NoBusError."""
    if interface is not None:
        sock = _open_can(interface)
        if sock is not None:
            return sock, None, f"SocketCAN {interface}"
        if stand_in is None:
            reason = f"{interface}: this kernel has no CAN; load can_raw, or name a stand-in"
            raise NoBusError(reason)
    if stand_in is None:
        raise NoBusError("CAN: no interface is named; name one, or a stand-in")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.setblocking(False)
    why = "no interface was named" if interface is None else "this kernel has no CAN"
    return sock, stand_in, f"a STAND-IN for CAN, datagrams to {stand_in} ({why})"


class CanBus:
    """The sending end. `name` says what it really is."""

    def __init__(
        self, interface: str | None, stand_in: Path | None, stale_s: float = STALE_S
    ) -> None:
        """`stand_in` serves where the kernel has no CAN, or no interface. Raises NoBusError."""
        self._sock, place, self.name = _open(interface, stand_in)
        self._to = None if place is None else str(place)
        if place is None:  # nothing is read here
            self._sock.setsockopt(socket.SOL_CAN_RAW, socket.CAN_RAW_FILTER, b"")
        self._stale_s = stale_s
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.sent = self.lost = 0

    def send(self, frame: bytes) -> None:
        """Queue a frame: in the order of the calls. Never waits, never raises."""
        if len(self._waiting) >= QUEUE_MOST:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append((self._loop.time(), frame))
        if self._timer is None:
            self._flush()

    def close(self) -> None:
        """Send what can be sent at once, and close."""
        if self._timer is not None:
            self._timer.cancel()
        self._flush()
        if self._timer is not None:
            self._timer.cancel()
        self.lost += len(self._waiting)
        self._waiting.clear()
        self._sock.close()

    def _flush(self) -> None:
        self._timer = None
        while self._waiting:
            queued_s, frame = self._waiting[0]
            if self._loop.time() - queued_s > self._stale_s:
                self.lost += 1
            elif not self._put(frame):
                self._timer = self._loop.call_later(RETRY_S, self._flush)
                return
            self._waiting.popleft()

    def _put(self, frame: bytes) -> bool:
        """False: there is no room now."""
        try:
            if self._to is None:
                self._sock.send(frame)
            else:
                self._sock.sendto(frame, self._to)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOBUFS):
                return False
            self.lost += 1  # the bus is down, or nobody is there
            return True
        self.sent += 1
        return True


def open_receiver(interface: str | None, stand_in: Path | None) -> tuple[socket.socket, str]:
    """The vehicle's end: a socket that does not block, and what it is. Raises NoBusError."""
    sock, place, name = _open(interface, stand_in)
    if place is None:
        mask = socket.CAN_SFF_MASK | socket.CAN_EFF_FLAG | socket.CAN_RTR_FLAG
        sock.setsockopt(socket.SOL_CAN_RAW, socket.CAN_RAW_FILTER, struct.pack("=II", CAN_ID, mask))
    else:
        place.unlink(missing_ok=True)
        sock.bind(str(place))
    return sock, name
