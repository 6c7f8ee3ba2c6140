"""Who is at the other end of a Unix socket, as the kernel knows it. Only the standard library."""

from __future__ import annotations

import errno
import socket
import struct

SO_PEERGROUPS = 59  # of Linux 4.13; Python does not name it
GETSOCKOPT_MOST = 1024  # bytes that Python asks for at most
GROUPS_MOST = 65536  # of a process


def peer_of(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process at the other end. OSError."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid


def groups_of(sock: socket.socket) -> set[int] | None:
    """Its supplementary groups as they were when it connected; None where the kernel does not tell
    them (before Linux 4.13)."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, GETSOCKOPT_MOST)
    except OSError as error:
        return _many_groups_of(sock) if error.errno == errno.ERANGE else None
    return set(struct.unpack(f"{len(raw) // 4}I", raw))


def _many_groups_of(sock: socket.socket) -> set[int] | None:
    """The same for more groups than Python's own call takes."""
    import ctypes

    found = (ctypes.c_uint32 * GROUPS_MOST)()
    size = ctypes.c_uint32(ctypes.sizeof(found))
    call = ctypes.CDLL(None, use_errno=True).getsockopt
    where = (sock.fileno(), socket.SOL_SOCKET, SO_PEERGROUPS)
    if call(*where, found, ctypes.byref(size)) != 0:
        return None
    return set(found[: size.value // 4])
