"""Copying a candidate into the store: the best way the file system has, hashed where it arrived.

    Pace(rate, cancelled, progress)      what a long piece of work asks between two steps
    source_of(fd, size_most)             refuse what is no artifact before a byte is read
    Incoming(folder)                     a new file that nobody sees until `place`
    Copy(target, source, size).run(pace) blocks shared, or copied by the kernel, or read and written

Memory stays at one step (1 MiB) whatever the size. Errors of the source are the candidate's, all
others OSError of the store's disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from gemctl.errors import ApiError
from gemctl.store import durable
from gemrun.format.files import uncache

PIECE = 1 << 20  # bytes of a step: copied, hashed, told
SYNC_EVERY = 64 << 20  # bytes: no flood of unwritten pages in front of everybody else's
PARTIAL = ".partial."  # begins the passing name of a candidate where files need one
FICLONE = getattr(fcntl, "FICLONE", 0x40049409)
FINAL = durable.FULL | {errno.EROFS}  # errors for which there is no other way to try


class Pace:
    """What a long piece of work asks between two steps: go on, wait, or stop; and whom to tell.

    rate: bytes a second, 0 for all there is. cancelled: True ends the work with
    ApiError("cancelled"). progress: called with (bytes done, bytes in all).
    """

    def __init__(
        self,
        rate: float = 0.0,
        *,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._cancelled, self._progress = cancelled, progress
        self._clock, self._sleep = clock, sleep
        self._started, self._done, self._total = clock(), 0, 0

    def start(self, total: int) -> None:
        """Work of `total` bytes begins."""
        self._started, self._done, self._total = self._clock(), 0, total
        self.advance(0)

    @property
    def step(self) -> int:
        """Bytes of the next step: at most what the rate lets through in a tenth of a second."""
        return max(4096, min(PIECE, int(self._rate / 10))) if self._rate else PIECE

    def advance(self, count: int) -> None:
        """`count` more bytes are done. Waits until they may be; raises ApiError("cancelled")."""
        self._done += count
        while True:
            if self._cancelled():
                raise ApiError("cancelled", "store: stopped on request; start it again")
            due = self._started + self._done / self._rate if self._rate else 0.0
            left = due - self._clock()
            if left <= 0:
                break
            self._sleep(min(left, 0.1))
        self._progress(self._done, self._total)


def digest_of(descriptor: int, size: int, pace: Pace) -> str:
    """SHA-256 of the first `size` bytes. OSError, also where the file is shorter."""
    pace.start(size)
    return hash_range(descriptor, 0, size, pace).hexdigest()


def hash_range(descriptor: int, at: int, size: int, pace: Pace) -> hashlib._Hash:
    """SHA-256 of a part, of work that has begun. OSError, also where the file is shorter."""
    hasher, end = hashlib.sha256(), at + size
    buffer = bytearray(min(PIECE, size))
    while at < end:
        count = min(pace.step, end - at)
        hash_piece(hasher, descriptor, at, count, buffer)
        at += count
        pace.advance(count)
    return hasher


def hash_piece(
    hasher: hashlib._Hash, descriptor: int, at: int, count: int, buffer: bytearray
) -> None:
    """Hash `count` bytes, which fit into the buffer. OSError, also where the file is shorter."""
    end = at + count
    while at < end:
        view = memoryview(buffer)[: end - at]
        found = os.preadv(descriptor, [view], at)
        if found <= 0:
            raise OSError(errno.EIO, f"ends after {at} bytes")
        hasher.update(view[:found])
        at += found


# ---- copying a candidate ----
def source_of(descriptor: int, size_most: int) -> os.stat_result:
    """What is to be copied, if that is a readable regular file within the limit."""
    try:
        found = os.fstat(descriptor)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    except OSError as error:
        raise durable.told(error, Path("candidate")) from error
    if not stat.S_ISREG(found.st_mode):
        raise ApiError("refused", "candidate: is not a regular file; name an artifact")
    if flags & os.O_PATH or flags & os.O_ACCMODE == os.O_WRONLY:
        raise ApiError("bad_request", "candidate: is not open for reading; open it for that")
    if found.st_size == 0:
        raise ApiError("refused", "candidate: is empty; copy it again from where it was made")
    if found.st_size > size_most:
        raise ApiError(
            "refused",
            f"candidate: {found.st_size} bytes, the store takes {size_most}; "
            "raise models.size_most_bytes or compile a smaller one",
        )
    return found


def check_unchanged(descriptor: int, before: os.stat_result) -> None:
    after = os.fstat(descriptor)
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise _changed()


def _changed() -> ApiError:
    return ApiError(
        "refused", "candidate: changed while it was copied; try again when it is finished"
    )


def _clone(target: int, source: int, size: int) -> bool:
    """Share the source's blocks, where the file system can."""
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError as error:
        if error.errno in FINAL:
            raise
        return False
    if os.fstat(target).st_size != size:
        raise _changed()
    return True


class Copy:
    """Copies a file of `size` bytes into an empty one, by the best way there is, and hashes what
    arrived there."""

    def __init__(self, target: int, source: int, size: int) -> None:
        self._target, self._source, self._size = target, source, size
        self.method = "kernel copy" if hasattr(os, "copy_file_range") else "copy"

    def run(self, pace: Pace) -> str:
        """Copy; the SHA-256 in hexadecimal. OSError of the store's disk; ApiError."""
        if _clone(self._target, self._source, self._size):
            self.method = "reflink"
            return digest_of(self._target, self._size, pace)
        free = durable.free_bytes(self._target)
        if free is not None and free < self._size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        hasher, at, synced = hashlib.sha256(), 0, 0
        buffer = bytearray(min(PIECE, self._size))
        pace.start(self._size)
        while at < self._size:
            count = self._piece(at, min(pace.step, self._size - at), buffer)
            hash_piece(hasher, self._target, at, count, buffer)
            at += count
            if at - synced >= SYNC_EVERY:
                os.fdatasync(self._target)
                synced = at
            pace.advance(count)
        return hasher.hexdigest()

    def _piece(self, at: int, count: int, buffer: bytearray) -> int:
        if self.method == "kernel copy":
            try:
                copied = os.copy_file_range(self._source, self._target, count, at, at)
            except OSError as error:
                if error.errno in FINAL:
                    raise
                copied = 0  # reading and writing will tell whose fault it was
            if copied:
                return copied
            self.method = "copy"
        view = memoryview(buffer)[:count]
        try:
            found = os.preadv(self._source, [view], at)
        except OSError as error:
            raise durable.told(error, Path("candidate")) from error
        if found <= 0:
            raise _changed()
        done = 0
        while done < found:
            done += os.pwrite(self._target, view[done:found], at + done)
        return found


class Incoming:
    """A new file in a folder that nobody sees: without a name, or with a passing one."""

    def __init__(self, folder: int, named: bool = False) -> None:
        self._folder = folder
        self._name = ""
        self.fd = -1 if named else self._nameless()
        if self.fd < 0:
            self._name = PARTIAL + os.urandom(8).hex()
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self.fd = os.open(self._name, flags, 0o400, dir_fd=folder)
            with contextlib.suppress(OSError):  # by which `collect` knows that it is being written
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _nameless(self) -> int:
        if not os.access("/proc/self/fd", os.X_OK):  # through which it gets its name
            return -1
        try:
            flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
            return os.open(".", flags, 0o400, dir_fd=self._folder)
        except OSError as error:
            if error.errno in FINAL:
                raise
            return -1

    def seal(self) -> None:
        """Read-only for everybody, on the disk, and out of the page cache (see uncache)."""
        os.fchmod(self.fd, 0o444)
        os.fsync(self.fd)
        uncache(self.fd)

    def place(self, name: str) -> None:
        """Give the file its name, which is free."""
        if self._name:
            os.rename(self._name, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            self._name = ""
            return
        place = f"/proc/self/fd/{self.fd}"
        os.link(place, name, dst_dir_fd=self._folder, follow_symlinks=True)

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *unused: object) -> None:
        if self._name:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._folder)
        os.close(self.fd)
