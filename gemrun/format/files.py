"""Opening files from outside: regular files only, and no open that waits for a pipe's other end."""

from __future__ import annotations

import errno
import os
import stat

PathLike = str | bytes | os.PathLike[str] | os.PathLike[bytes]


def open_regular(path: PathLike) -> int:
    """A read-only descriptor of a regular file, owned by the caller. OSError for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, "is a folder")
    raise OSError(errno.EINVAL, "is not a regular file")


def uncache(fd: int) -> None:
    """Let a file that is on the disk leave the page cache, where writing it made small pages.

    Who maps it next asks for huge ones, and the engine decodes faster from those; they come only
    where a file is read in, not to pages that are there.
    """
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
