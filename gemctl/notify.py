"""What systemd gives and wants: the socket of gemctl.socket, and datagrams on how we are.

Neither is needed: without $LISTEN_FDS the daemon listens by itself, without $NOTIFY_SOCKET nothing
is sent.
"""

from __future__ import annotations

import contextlib
import os
import socket

from gemctl.errors import ApiError

FIRST_FD = 3  # by sd_listen_fds(3)


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


def given_socket() -> socket.socket | None:
    """The listening socket that we were started with; None where we have to make it ourselves.

    Raises ApiError for what cannot be it. The variables go: they are no business of our workers'.
    """
    found = {name: os.environ.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES")}
    if found["PID"] != str(os.getpid()) or not found["FDS"]:
        return None
    if found["FDS"] != "1":
        what = f"LISTEN_FDS: {found['FDS']} sockets were handed over, and one is wanted"
        raise ApiError("bad_request", f"{what}; give gemctl.socket one ListenStream=")
    try:
        sock = socket.socket(fileno=FIRST_FD)
        kind = (sock.family, sock.type, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError as error:
        what = f"LISTEN_FDS: descriptor {FIRST_FD} is no socket ({error.strerror})"
        raise ApiError("bad_request", f"{what}; start gemctld without LISTEN_FDS") from None
    if kind != (socket.AF_UNIX, socket.SOCK_STREAM, 1):
        what = "LISTEN_FDS: not a Unix stream socket that listens"
        raise ApiError("bad_request", f"{what}; give gemctl.socket a ListenStream= with a path")
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock
