"""systemd's notification socket: a datagram of lines. Without $NOTIFY_SOCKET nothing is sent."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(*lines: str) -> None:
    """Send lines such as "READY=1"; never fails."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place:
        return
    address = "\0" + place[1:] if place.startswith("@") else place
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto("\n".join(lines).encode(), address)


def watchdog_s() -> float | None:
    """Half of the time within which systemd wants to hear from us; None: it does not ask."""
    micro = os.environ.get("WATCHDOG_USEC", "")
    mine = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(micro) / 2e6 if micro.isdigit() and mine else None
