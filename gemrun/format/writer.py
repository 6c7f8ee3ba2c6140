"""Write a `.gembin`: sections at fixed places, checksums while writing, whole or not at all.

    parts = assemble(...)                          # assemble.py; every size is known before a byte
    with ArtifactWriter(path, header, parts) as w: # checks space, opens <name>.partial
        w.write_weights(chunk)                     # as often as it takes, in order
        w.seal()                                   # from here the .partial is a whole artifact
        w.fill("TEST", payload)                    # made by the engine over w.partial
        written = w.finish()                       # seal, fsync, rename
Leaving the block without `finish`, by an error or Ctrl-C, removes the .partial. Nothing of time,
host, user or path reaches the bytes.

    WriteError                  OSError: the file could not be written; says path and bytes
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from gemrun.format import spec
from gemrun.format.files import uncache
from gemrun.format.sizes import pad
from gemrun.format.spec import Header, Section, SectionFlag
from gemrun.plain import one_line

ROOT_TAG = b"gembin root 1"
PARTIAL = ".partial"
PathLike = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class WriteError(OSError):
    """The artifact could not be written. `str()` is `<path>: <what is wrong>; <what to do>`."""


@dataclass(frozen=True)
class Part:
    """A section to be written. `data` None: reserved, filled or streamed later."""

    type: str
    size: int  # bytes
    data: bytes | Iterable[bytes] | None = None
    record_size: int = 0
    record_count: int = 0
    held: int | None = None  # of its bytes those in memory at once; None: all


@dataclass(frozen=True)
class Written:
    """A finished artifact."""

    path: str
    size: int  # bytes
    root_sha256: bytes


def section_part(name: str, data: bytes) -> Part:
    """A section from its bytes; arrays get their record size and count."""
    record = spec.ARRAYS.get(name)
    if record is None:
        return Part(name, len(data), data)
    size = spec.size_of(record)
    return Part(name, len(data), data, size, len(data) // size)


def reserved_part(name: str, size: int) -> Part:
    """A section whose bytes come later."""
    return replace(section_part(name, bytes(size)), data=None)


def place(sizes: Sequence[tuple[str, int]]) -> tuple[tuple[int, ...], int]:
    """Offsets of sections (type, size) in this order, and the size of the file."""
    at = spec.TABLE_OFFSET + spec.ENTRY_SIZE * len(sizes)
    offsets = []
    for name, size in sizes:
        at = pad(at, spec.WEIGHT_ALIGN if name == "WHOT" else spec.ALIGN)
        offsets.append(at)
        at += size
    return tuple(offsets), pad(at, spec.ALIGN)


def entry_of(part: Part, offset: int) -> Section:
    """A table entry without checksums."""
    flags = 0 if part.type in spec.OPTIONAL_SECTIONS else SectionFlag.REQUIRED
    if part.type == "WHOT":
        flags |= SectionFlag.HOT
    if part.held is not None:
        flags |= SectionFlag.COLD
    return Section(
        type=spec.fourcc(part.type),
        flags=int(flags),
        offset=offset,
        size=part.size,
        mem_size=part.size if part.held is None else part.held,
        record_size=part.record_size,
        record_count=part.record_count,
        name=part.type.encode("ascii").ljust(16, b"\0"),
    )


def root_of(header: Header, table: bytes) -> bytes:
    """root_sha256 of a header (its own checksums are not looked at) and the packed table."""
    bare = replace(header, root_sha256=bytes(32), header_crc32=0)
    return hashlib.sha256(ROOT_TAG + bare.pack() + table).digest()


def seal_header(header: Header, table: bytes) -> Header:
    """The header with table CRC, root and its own CRC set."""
    sealed = replace(header, table_crc32=zlib.crc32(table), header_crc32=0)
    sealed = replace(sealed, root_sha256=root_of(sealed, table))
    return replace(sealed, header_crc32=zlib.crc32(sealed.pack()[:252]))


class _Stream:
    """A section being written in order: where the next chunk goes and the checksums so far."""

    def __init__(self, offset: int, size: int) -> None:
        self.at, self.end = offset, offset + size
        self.crc = 0
        self.sha = hashlib.sha256()

    def take(self, chunk: bytes | memoryview) -> int:
        """Count a chunk in; returns where it goes."""
        at = self.at
        self.at += len(chunk)
        self.crc = zlib.crc32(chunk, self.crc)
        self.sha.update(chunk)
        return at


class ArtifactWriter:
    """Writes one artifact. `header` brings features, RAM figures, target and HDF hash."""

    def __init__(self, path: PathLike, header: Header, parts: Sequence[Part]) -> None:
        self.path = os.path.realpath(os.fsdecode(path))
        self.partial = self.path + PARTIAL
        offsets, self.size = place([(p.type, p.size) for p in parts])
        self._parts = {p.type: p for p in parts}
        self._entries = {p.type: entry_of(p, at) for p, at in zip(parts, offsets, strict=True)}
        self._streams = {name: _Stream(e.offset, e.size) for name, e in self._entries.items()}
        self._header = replace(header, section_count=len(parts), file_size=self.size)
        self._fd = -1
        self._done = False

    def __enter__(self) -> ArtifactWriter:
        try:
            self._open()
            for part in self._parts.values():
                if part.data is not None:
                    chunks = [part.data] if isinstance(part.data, bytes) else part.data
                    for chunk in chunks:
                        self.write(part.type, chunk)
        except BaseException:
            self._drop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._done:
            self._drop()

    # ---- what a compile calls ----
    def write(self, name: str, chunk: bytes | memoryview) -> None:
        """Append bytes to a section. WriteError on any short write; ValueError beyond its size."""
        stream = self._streams[name]
        view = memoryview(chunk).cast("B")
        if stream.at + len(view) > stream.end:
            raise ValueError(f"section {name}: more than {self._parts[name].size} bytes")
        self._write_at(stream.take(view), view)

    def write_weights(self, chunk: bytes | memoryview) -> None:
        """Append bytes to WHOT."""
        self.write("WHOT", chunk)

    def fill(self, name: str, payload: bytes) -> None:
        """Give a section its bytes, all of them; replaces what it held."""
        entry = self._entries[name]
        if len(payload) != entry.size:
            raise ValueError(f"section {name}: {len(payload)} bytes for {entry.size} reserved")
        self._streams[name] = _Stream(entry.offset, entry.size)
        self.write(name, payload)

    def sha256_of(self, name: str) -> bytes:
        """The digest of what a section holds so far."""
        return self._streams[name].sha.digest()

    def seal(self) -> None:
        """Write table, root and header: the .partial is a whole artifact. May be called again."""
        for name, stream in self._streams.items():
            if stream.at != stream.end:
                missing = stream.end - stream.at
                raise ValueError(f"section {name}: {missing} bytes were never written")
        table = b"".join(
            replace(e, crc32=self._streams[n].crc, sha256=self._streams[n].sha.digest()).pack()
            for n, e in self._entries.items()
        )
        self._header = seal_header(self._header, table)
        self._write_at(0, self._header.pack())
        self._write_at(spec.TABLE_OFFSET, table)

    def finish(self, before_renaming: Callable[[], None] = lambda: None) -> Written:
        """Seal, flush to the disk and move to the final name."""
        self.seal()
        with _explained(self.path, self.size):
            os.fsync(self._fd)
            uncache(self._fd)
            before_renaming()
            Path(self.partial).replace(self.path)
            self._done = True
            os.close(self._fd)
            self._fd = -1
            folder = os.open(Path(self.path).parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return Written(self.path, self.size, self._header.root_sha256)

    # ---- the file ----
    def _open(self) -> None:
        target, folder = Path(self.path), Path(self.path).parent
        with _explained(self.path, self.size):
            if target.exists() and not target.is_file():
                raise WriteError(f"{show(self.path)}: is not a regular file; name another output")
            if not folder.is_dir():
                raise WriteError(f"{show(str(folder))}: no such folder; create it first")
            free = shutil.disk_usage(folder).free
            if free < self.size:
                raise WriteError(
                    f"{show(str(folder))}: the artifact takes {self.size} bytes, {free} are free; "
                    "free some space or name an output on another disk"
                )
            with _signals_later():  # between the file's birth and our knowing of it
                self._fd = self._claim()
            os.ftruncate(self._fd, 0)
            write_all(self._fd, 0, spec.MAGIC)  # by which the next compile knows it as ours
            os.posix_fallocate(self._fd, 0, self.size)

    def _claim(self) -> int:
        """The .partial, new or left by a compile that is gone, for this one alone."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.partial, flags, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.pread(fd, len(spec.MAGIC), 0) not in (b"", spec.MAGIC):
                raise WriteError(
                    f"{show(self.partial)}: exists and is no unfinished artifact; move it away, "
                    "or name another output"
                )
        except BlockingIOError:
            os.close(fd)
            raise WriteError(
                f"{show(self.partial)}: another compile is writing it; wait or name another output"
            ) from None
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _drop(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                Path(self.partial).unlink()
            os.close(self._fd)
            self._fd = -1

    def _write_at(self, at: int, data: bytes | memoryview) -> None:
        with _explained(self.partial, self.size):
            write_all(self._fd, at, data)


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """SIGINT and SIGTERM come behind the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A passing name to write to; when the block succeeds the file gets its own, else it goes."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_all(fd: int, at: int, data: bytes | memoryview) -> None:
    """pwrite until everything is written."""
    view = memoryview(data).cast("B")
    while len(view):
        count = os.pwrite(fd, view, at)
        if count <= 0:
            raise OSError("the system wrote nothing")
        at += count
        view = view[count:]


def write_artifact(path: PathLike, header: Header, parts: Sequence[Part]) -> Written:
    """Write an artifact whose sections all bring their data."""
    with ArtifactWriter(path, header, parts) as writer:
        return writer.finish()


def fill_tests(path: PathLike, payload: bytes) -> bytes:
    """Replace the TEST section of a sealed file in place, same size; returns the new root."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        header = Header.unpack(os.pread(fd, spec.HEADER_SIZE, 0))
        count = header.section_count
        table = os.pread(fd, spec.ENTRY_SIZE * count, spec.TABLE_OFFSET)
        entries = [Section.unpack(table, spec.ENTRY_SIZE * i) for i in range(count)]
        index = [e.type for e in entries].index(spec.fourcc("TEST"))
        entry = entries[index]
        if len(payload) != entry.size:
            raise ValueError(f"section TEST: {len(payload)} bytes for {entry.size} reserved")
        digest = hashlib.sha256(payload).digest()
        entries[index] = replace(entry, crc32=zlib.crc32(payload), sha256=digest)
        table = b"".join(e.pack() for e in entries)
        sealed = seal_header(header, table)
        with _explained(os.fsdecode(path), header.file_size):
            write_all(fd, entry.offset, payload)
            write_all(fd, spec.TABLE_OFFSET, table)
            write_all(fd, 0, sealed.pack())
            os.fsync(fd)
            uncache(fd)
        return sealed.root_sha256
    finally:
        os.close(fd)


def blank_tests(count: int) -> bytes:
    """Valid TEST records to reserve room with, until the engine has made the real ones."""
    record = struct.pack("<IIQ", 1, 1, 0).ljust(spec.size_of(spec.TestVector), b"\0")
    return record * count


def show(path: str) -> str:
    """A path for a message; bytes that are not UTF-8 and control characters are escaped."""
    return one_line(os.fsencode(path).decode("utf-8", "backslashreplace"))


@contextlib.contextmanager
def _explained(path: str, size: int) -> Iterator[None]:
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(
            f"{show(path)}: {error.strerror or error} while writing {size} bytes; "
            "check the disk and its free space"
        ) from error
