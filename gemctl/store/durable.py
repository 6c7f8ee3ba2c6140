"""Files that survive a power loss: whole or not there; and what the system says, as a sentence.

    write_file(folder, name, data)   new content: written, synced, renamed, folder synced
    write_link(folder, name, target) the same for a link
    read_small(folder, name, most)   a regular file's bytes, never more than `most`
    read_plain(path, most)           the same for a path, through links
    open_beneath(folder, place)      a regular file below a folder, through no link
    explained(path, wanted)          OSError as ApiError: full, read-only, or failed

Folders are descriptors, so that nothing here follows a path twice. Nothing calls fsync again after
it has failed: what it did not write then is lost, and only a new file may have the name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from gemctl.errors import OUT_OF, ApiError, of_system

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
NEW = ".new"  # ends the passing name of a file that write_file makes
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY

OPENAT2 = 437  # everywhere but on Alpha
RESOLVE = 0x08 | 0x04 | 0x02  # BENEATH, NO_SYMLINKS, NO_MAGICLINKS
# Before Linux 5.6, or where a sandbox does not know the call.
NO_OPENAT2 = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL, errno.EAGAIN, errno.E2BIG})


# ---- errors ----
@contextlib.contextmanager
def explained(path: Path, wanted: int = 0) -> Iterator[None]:
    """OSError inside becomes ApiError; `wanted` bytes were to be written below `path`."""
    try:
        yield
    except OSError as error:
        raise told(error, path, wanted) from error


def told(error: OSError, path: Path, wanted: int = 0) -> ApiError:
    """What an error of the system means to the caller."""
    reason = error.strerror or str(error)
    if error.errno == errno.EROFS:
        remedy = "mount it writable"
        return ApiError("no_space", f"{path}: {reason}: {wanted} bytes wanted; {remedy}")
    if error.errno in FULL:
        free = free_bytes(path)
        left = "an unknown number" if free is None else free
        return ApiError(
            "no_space",
            f"{path}: {reason}: {wanted} bytes wanted, {left} free; free room on its disk",
        )
    if error.errno in OUT_OF:
        return of_system(str(path), error)
    return ApiError("failed", f"{path}: {reason}; check the disk and the permissions")


def free_bytes(path: Path | int) -> int | None:
    """Bytes that an unprivileged process may still write where `path` lies, or would lie."""
    while True:
        try:
            found = os.statvfs(path)
        except FileNotFoundError:
            if isinstance(path, int) or path == path.parent:
                return None
            path = path.parent
        except OSError:
            return None
        else:
            return found.f_bavail * found.f_frsize


# ---- reading ----
def open_beneath(folder: int, place: str) -> int:
    """A read-only descriptor of the regular file at `place`, "a/b" below the descriptor `folder`.

    No part of the place may be a link or lead out of the folder. The caller closes it. OSError.
    """
    descriptor = _openat2(folder, place)
    if descriptor is None:
        descriptor = _walk(folder, place)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file")
    return descriptor


def _openat2(folder: int, place: str) -> int | None:
    """By the kernel's own check; None where it has none."""
    import ctypes

    if platform.machine().startswith("alpha"):
        return None
    how = struct.pack("=QQQ", READ, 0, RESOLVE)  # flags, mode, resolve
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    number, size = ctypes.c_long(OPENAT2), ctypes.c_size_t(len(how))
    while True:
        found = int(call(number, ctypes.c_int(folder), os.fsencode(place), how, size))
        if found >= 0:
            return found
        code = ctypes.get_errno()
        if code in NO_OPENAT2:
            return None
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _walk(folder: int, place: str) -> int:
    """Part by part, none of which may be a link."""
    *folders, name = place.split("/")
    if not all(part not in ("", ".", "..") for part in (*folders, name)):
        raise OSError(errno.EXDEV, "leads out of its folder")
    at = folder
    try:
        for part in folders:
            below = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=at)
            if at != folder:
                os.close(at)
            at = below
        return os.open(name, READ, dir_fd=at)
    finally:
        if at != folder:
            os.close(at)


def read_small(folder: int, name: str, most: int) -> bytes | None:
    """The whole of a file; None where there is none. OSError where it cannot be read now;
    ValueError where it never can: it is no regular file, or has more than `most` bytes."""
    try:
        descriptor = os.open(name, READ, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("is a link") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("is not a regular file")
        data = b""
        while piece := os.read(descriptor, most + 1 - len(data)):
            data += piece
            if len(data) > most:
                raise ValueError(f"more than {most} bytes")
        return data
    finally:
        os.close(descriptor)


def read_plain(path: Path, most: int) -> bytes:
    """At most `most` bytes of the regular file that a path leads to. Never waits, as for the writer
    of a pipe. OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if stat.S_ISDIR(mode := os.fstat(descriptor).st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is no regular file")
        data = b""
        while piece := os.read(descriptor, most - len(data)):
            data += piece
        return data
    finally:
        os.close(descriptor)


def listing(folder: int) -> list[str]:
    """Names in a folder, in order. OSError.

    By a descriptor of its own: others share their position with whoever else reads them.
    """
    own = os.open(".", FOLDER, dir_fd=folder)
    try:
        with os.scandir(own) as entries:
            return sorted(entry.name for entry in entries)
    finally:
        os.close(own)


# ---- writing ----
def make_folder(path: Path) -> int:
    """A descriptor of a folder; made, with those above it, where it is missing. OSError."""
    try:
        return os.open(path, FOLDER)
    except FileNotFoundError:
        above = make_folder(path.parent)
    try:
        return enter(above, path.name)
    finally:
        os.close(above)


def enter(folder: int, name: str) -> int:
    """A descriptor of the folder `name` in another, made where it is missing; no link. OSError.

    The outer folder is synced in any case: one who made the inner one may have ended before that.
    """
    flags = FOLDER | os.O_NOFOLLOW
    try:
        below = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=folder)
        below = os.open(name, flags, dir_fd=folder)
    try:
        os.fsync(folder)
    except OSError:
        os.close(below)
        raise
    return below


def write_file(folder: int, name: str, data: bytes, keep: str = "") -> None:
    """Give `name` this content: the old or the new one is there after a power loss, never less.

    With `keep` the old content stays under that name. OSError; then the old content is in place.
    After a power loss between two renames that both were to happen it is under `keep` alone; the
    new file beside it says so, also where a disk let only the first of them happen.
    """
    new = f".{name}{NEW}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(new, flags, 0o644, dir_fd=folder)
    with removed_on_error(folder, new):
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if keep:
            with contextlib.suppress(FileNotFoundError):
                os.rename(name, keep, src_dir_fd=folder, dst_dir_fd=folder)
    try:
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        if not keep or _put_back(folder, keep, name):
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=folder)
        raise
    os.fsync(folder)


def _put_back(folder: int, keep: str, name: str) -> bool:
    """Whether the old content has its name again."""
    try:
        os.rename(keep, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        return False
    return True


def write_link(folder: int, name: str, target: str) -> None:
    """Let the link `name` lead to `target`, at once. The caller syncs the folder. OSError."""
    new = f".{name}{NEW}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new, dir_fd=folder)
    os.symlink(target, new, dir_fd=folder)
    with removed_on_error(folder, new):
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)


@contextlib.contextmanager
def removed_on_error(folder: int, name: str) -> Iterator[None]:
    """Where what follows ends in an OSError, the file goes again."""
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Append everything. OSError."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(descriptor, view) :]
