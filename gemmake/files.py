"""What stands at a path, and reading the small files of a compile whole, up to a limit."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from gemrun.format.files import open_regular

__all__ = ["FILE", "FOLDER", "open_regular", "read_small", "standing"]

FILE, FOLDER = "a file", "a folder"
KINDS = {
    stat.S_IFREG: FILE,
    stat.S_IFDIR: FOLDER,
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def standing(path: Path) -> str:
    """What stands at a path, links followed, in words for a message; "" for nothing at all. OSError
    where that cannot be told."""
    try:
        mode = path.stat().st_mode
    except ValueError:  # a name that no system has
        return ""
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "a link that leads to itself"
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return "a link that leads to nothing" if path.is_symlink() else ""
    return KINDS.get(stat.S_IFMT(mode), "no file")


def read_small(path: Path, limit: int) -> bytes | None:
    """The whole of a regular file; None when it is larger than `limit` bytes. OSError."""
    with os.fdopen(open_regular(path), "rb") as stream:
        data = stream.read(limit + 1)
    return data if len(data) <= limit else None
