"""Opening the files that a compile reads: regular files only, small ones up to a limit."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path) -> int:
    """A descriptor of a regular file. OSError for anything else; a pipe never blocks the open."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, "is a folder")
    raise OSError(errno.EINVAL, "is not a regular file")


def read_small(path: Path, limit: int) -> bytes | None:
    """The whole of a regular file; None when it is larger than `limit` bytes. OSError."""
    with os.fdopen(open_regular(path), "rb") as stream:
        data = stream.read(limit + 1)
    return data if len(data) <= limit else None
