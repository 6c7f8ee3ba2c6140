"""The store of artifacts: named by their content, never changed, whole or not there.

    <state>/models/<name>/<sha256>.gembin     a version, mode 0444
    <state>/models/<name>/current, previous   links to the good versions
    <state>/models/<name>/marks.json          what was found good, newest first, and what bad

    with Store(state) as store:
        staged = store.stage("pilot", fd, size_most=limit)     copied, hashed, synced, then named
        store.mark_good("pilot", staged.digest)                 after its probation
        store.collect(in_use={(name, digest of its worker)}, keep=2)

Every call may be cut off anywhere, by a kill or a power loss: the next Store reads what is there
and gives the old or the new state. `current` is what its link says, if that version is there and
not bad; else the previous good one. All calls block: the daemon makes them in threads. One process
at a time writes a store. Failures are ApiError: no_space (disk full or read-only), refused (the
candidate), failed (the disk), not_found, conflict, bad_request, cancelled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gemctl.errors import ApiError
from gemctl.store import durable
from gemctl.store.copying import (
    PARTIAL,
    Copy,
    Incoming,
    Pace,
    check_unchanged,
    digest_of,
    source_of,
)
from gemctl.store.durable import explained

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
DIGEST = re.compile(r"[0-9a-f]{64}")
SUFFIX = ".gembin"
CURRENT, PREVIOUS, MARKS = "current", "previous", "marks.json"
MARKS_BYTES = 64 << 10  # at most, of marks.json
GOOD_MOST, BAD_MOST = 16, 64  # digests remembered
REASON_MOST = 200  # characters


def check_name(name: str) -> str:
    """The name of a model, or ApiError("bad_request")."""
    if not NAME.fullmatch(name) or ".." in name:
        raise ApiError(
            "bad_request",
            f"model {name[:80]!r}: not a name; use 1 to 64 of a-z 0-9 . _ -, "
            "a letter or digit first, no '..'",
        )
    return name


def check_digest(digest: str) -> str:
    """A SHA-256 in 64 small hexadecimal digits, or ApiError("bad_request")."""
    if not DIGEST.fullmatch(digest):
        raise ApiError(
            "bad_request", f"digest {digest[:80]!r}: not a SHA-256; give 64 hexadecimal digits"
        )
    return digest


# ---- what is told ----
@dataclass(frozen=True)
class Version:
    """A file of the store."""

    digest: str
    size: int  # bytes


@dataclass(frozen=True)
class Versions:
    """What the store has of a model. `good` is newest first; `bad` holds (digest, reason)."""

    name: str
    current: str | None
    previous: str | None
    good: tuple[str, ...]
    bad: tuple[tuple[str, str], ...]
    present: tuple[Version, ...]
    warning: str = ""


@dataclass(frozen=True)
class Staged:
    """A version that is safe on the disk. `fresh`: it was not there before."""

    name: str
    digest: str
    size: int  # bytes
    fresh: bool
    method: str  # "reflink", "kernel copy" or "copy"


@dataclass(frozen=True)
class Collected:
    """What a collection removed."""

    versions: tuple[tuple[str, str], ...] = ()  # (name, digest)
    others: int = 0  # partial files, passing names, empty folders
    size: int = 0  # bytes of the versions


@dataclass(frozen=True)
class _Marks:
    """What was found out about versions, whether or not they are still there."""

    good: tuple[str, ...] = ()  # newest first
    bad: tuple[tuple[str, str], ...] = ()  # oldest first

    def is_bad(self, digest: str) -> bool:
        return any(digest == known for known, _ in self.bad)

    def as_good(self, digest: str) -> _Marks:
        rest = tuple(d for d in self.good if d != digest)
        bad = tuple(pair for pair in self.bad if pair[0] != digest)
        return _Marks((digest, *rest)[:GOOD_MOST], bad)

    def as_bad(self, digest: str, reason: str) -> _Marks:
        rest = tuple(pair for pair in self.bad if pair[0] != digest)
        good = tuple(d for d in self.good if d != digest)
        return _Marks(good, (*rest, (digest, reason[:REASON_MOST]))[-BAD_MOST:])

    def as_unknown(self, digest: str) -> _Marks:
        return _Marks(self.good, tuple(pair for pair in self.bad if pair[0] != digest))

    def pack(self) -> bytes:
        table = {"schema": 1, "good": self.good, "bad": self.bad}
        return json.dumps(table, indent=1).encode("ascii") + b"\n"


def _marks_of(data: bytes) -> _Marks:
    """Marks of a file's bytes. ValueError."""
    try:
        table = json.loads(data)
        if set(table) != {"schema", "good", "bad"} or table["schema"] != 1:
            raise ValueError("unknown schema")
        marks = _Marks(tuple(table["good"]), tuple((d, r) for d, r in table["bad"]))
        known = [*marks.good, *(digest for digest, _ in marks.bad)]
        if not all(isinstance(digest, str) and DIGEST.fullmatch(digest) for digest in known):
            raise ValueError("a digest is none")
        if not all(isinstance(reason, str) for _, reason in marks.bad):
            raise ValueError("a reason is no text")
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return marks


@dataclass
class _Held:
    """What this process is busy with: models being staged, versions staged but not judged, and
    those found bad where that could not be written down."""

    names: list[str] = field(default_factory=list)
    versions: set[tuple[str, str]] = field(default_factory=set)
    bad: dict[tuple[str, str], str] = field(default_factory=dict)  # that the disk has not taken yet


# ---- the store ----
class Store:
    """The artifacts below a state folder. `close()` or a with block gives its descriptor back."""

    named_partials = False  # True: never a file without a name

    def __init__(self, root: Path) -> None:
        """Open the store below `root`, making its folder if it is missing. ApiError."""
        self.root = root / "models"
        self._lock = threading.RLock()
        self._held = _Held()
        with explained(self.root):
            self._models = durable.make_folder(self.root)

    def close(self) -> None:
        """Give the descriptor back. May be called again."""
        if self._models >= 0:
            os.close(self._models)
            self._models = -1

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- reading ----
    def names(self) -> tuple[str, ...]:
        """Models of which there is a version or a mark, in order."""
        with explained(self.root):
            found = [n for n in durable.listing(self._models) if NAME.fullmatch(n)]
        return tuple(name for name in found if ".." not in name and self._has(name))

    def _has(self, name: str) -> bool:
        try:
            found = self.versions(name)
        except ApiError:
            return False
        return bool(found.present or found.good or found.bad)

    def versions(self, name: str) -> Versions:
        """What there is of a model. ApiError: not_found, failed."""
        with self._folder(name) as folder, explained(self.root / name):
            return self._found(folder, name)

    def path(self, name: str, digest: str) -> Path:
        """Where a version lies. ApiError: not_found."""
        os.close(self.open(name, digest))
        return self.root / name / (digest + SUFFIX)

    def open(self, name: str, digest: str) -> int:
        """A read-only descriptor of a version, which the caller closes. ApiError: not_found."""
        file = check_digest(digest) + SUFFIX
        try:
            return durable.open_beneath(self._models, f"{check_name(name)}/{file}")
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                raise _missing(name, digest) from None
            raise durable.told(error, self.root / name / file) from error

    def verify(self, name: str, digest: str, pace: Pace | None = None) -> int:
        """Hash a version again; its size in bytes. ApiError: refused where it is damaged."""
        descriptor = self.open(name, digest)
        try:
            with explained(self.root / name / (digest + SUFFIX)):
                size = os.fstat(descriptor).st_size
                found = digest_of(descriptor, size, pace or Pace())
        finally:
            os.close(descriptor)
        if found != digest:
            raise ApiError(
                "refused",
                f"version {digest[:12]} of {name}: damaged, its bytes give {found[:12]}; "
                "stage the artifact again and check the disk",
            )
        return size

    # ---- staging ----
    def stage(
        self, name: str, descriptor: int, *, size_most: int, pace: Pace | None = None
    ) -> Staged:
        """Copy an open file into the store; its own offset does not matter and stays.

        When this returns the version is on the disk under its digest. `collect` spares it until
        mark_good, mark_bad, remove or release has judged it. ApiError: refused (no regular file,
        empty, above `size_most` bytes, changed meanwhile, marked bad before), no_space, failed,
        cancelled; then nothing has changed.
        """
        before = source_of(descriptor, size_most)
        size = before.st_size
        with self._busy(name), explained(self.root / name, size):
            folder = self._made(name)
            try:
                with Incoming(folder, self.named_partials) as incoming:
                    copy = Copy(incoming.fd, descriptor, size)
                    digest = copy.run(pace or Pace())
                    check_unchanged(descriptor, before)
                    self._refuse_bad(folder, name, digest)
                    incoming.seal()
                    fresh = self._settle(folder, incoming, Staged(name, digest, size, True, ""))
            finally:
                os.close(folder)
        return Staged(name, digest, size, fresh, copy.method)

    def _made(self, name: str) -> int:
        above = os.open("..", durable.FOLDER, dir_fd=self._models)
        try:
            os.fsync(above)  # it may have been made by one who ended before that
        finally:
            os.close(above)
        return durable.enter(self._models, name)

    def _settle(self, folder: int, incoming: Incoming, staged: Staged) -> bool:
        """Name the file, unless the same is there; a damaged one of that name gives way."""
        file = staged.digest + SUFFIX
        sound = _is_sound(folder, file, staged.digest, staged.size)
        with self._lock:
            fresh = not (sound and _is_there(folder, file))  # it may have been collected since
            if fresh:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=folder)
                incoming.place(file)
            placed = durable.removed_on_error(folder, file) if fresh else contextlib.nullcontext()
            with placed:
                os.fsync(folder)
            self._held.versions.add((staged.name, staged.digest))
        return fresh

    def hold(self, name: str, digest: str) -> None:
        """Let `collect` spare a version that was staged before a restart."""
        with self._lock:
            self._held.versions.add((name, digest))

    def release(self, name: str, digest: str) -> None:
        """Let `collect` have a staged version that nobody will judge. Never fails."""
        with self._lock:
            self._held.versions.discard((name, digest))

    def _bad_here(self, name: str) -> dict[str, str]:
        """Versions that the disk does not know to be bad yet, and why they are."""
        held = list(self._held.bad.items())
        return {digest: why for (owner, digest), why in held if owner == name}

    def _found(self, folder: int, name: str) -> Versions:
        """What the folder has, without what this process knows to be bad."""
        found = _versions(folder, name)
        bad = self._bad_here(name)
        if not bad:
            return found
        good = tuple(digest for digest in found.good if digest not in bad)
        first, second = (*good, None, None)[:2]
        known = (*found.bad, *((d, why) for d, why in bad.items() if d not in dict(found.bad)))
        return dataclasses.replace(found, current=first, previous=second, good=good, bad=known)

    def _refuse_bad(self, folder: int, name: str, digest: str) -> None:
        bad = self._bad_here(name)
        with contextlib.suppress(ValueError):  # `versions` tells it
            bad |= dict(_read_marks(folder).bad)
        if digest in bad:
            why = f" ({bad[digest]})" if bad[digest] else ""
            raise ApiError(
                "refused",
                f"version {digest[:12]} of {name}: was found bad before{why}; "
                f"use another artifact, or gemctl model clear {name}",
            )

    @contextlib.contextmanager
    def _busy(self, name: str) -> Iterator[None]:
        check_name(name)
        with self._lock:
            self._held.names.append(name)
        try:
            yield
        finally:
            with self._lock:
                self._held.names.remove(name)

    # ---- judging ----
    def mark_good(self, name: str, digest: str) -> None:
        """Make a version the current one; the one that was becomes the previous.

        Also the way back: marking the previous one good exchanges the two. ApiError: not_found.
        """
        with self._change(name, digest) as (folder, found):
            if digest not in {version.digest for version in found.present}:
                raise _missing(name, digest)
            _change_marks(folder, found, lambda marks: marks.as_good(digest))
            if found.current not in (digest, None):
                durable.write_link(folder, PREVIOUS, f"{found.current}{SUFFIX}")
            if _link_of(folder, CURRENT) != digest:
                durable.write_link(folder, CURRENT, digest + SUFFIX)
            os.fsync(folder)
            self._held.versions.discard((name, digest))

    def mark_bad(self, name: str, digest: str, reason: str = "") -> None:
        """Remember that a version must not be used: `stage` refuses it from now on.

        Where it is the current one, the previous good one takes its place, if there is one. The
        file stays until `collect`. The digest need not be there. ApiError: where the disk takes
        nothing it counts as bad all the same, as long as this process lives.
        """
        plain = reason.encode("ascii", "replace").decode()
        with self._lock:
            self._held.bad[name, digest] = plain
        with self._change(name, digest) as (folder, before):
            _change_marks(folder, before, lambda marks: marks.as_bad(digest, plain))
            found = self._found(folder, name)  # as it is without the bad one
            _relink(folder, CURRENT, found.current)
            _relink(folder, PREVIOUS, found.previous)
            os.fsync(folder)
            self._held.versions.discard((name, digest))
            self._held.bad.pop((name, digest), None)

    def forgive(self, name: str, digest: str) -> None:
        """Forget that a version was bad, so that it may be staged again. ApiError."""
        with self._change(name, digest) as (folder, found):
            _change_marks(folder, found, lambda marks: marks.as_unknown(digest))
            self._held.bad.pop((name, digest), None)

    # ---- removing ----
    def forget(self, name: str) -> None:
        """Delete a model with all that is known of it, also which versions were bad.

        The caller knows that nobody uses it. Cut off in between, the rest is a model with fewer
        versions. ApiError: not_found, failed.
        """
        with self._lock, self._folder(name) as folder, explained(self.root / name):
            for version in _present(folder):
                _delete(folder, version.digest)
                self._held.versions.discard((name, version.digest))
            for key in [key for key in self._held.bad if key[0] == name]:
                del self._held.bad[key]
            for file in (CURRENT, PREVIOUS, MARKS):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=folder)
            _sweep(folder)
            os.fsync(folder)
            if name not in self._held.names and not durable.listing(folder):
                os.rmdir(name, dir_fd=self._models)

    def remove(
        self, name: str, digest: str, in_use: Collection[tuple[str, str]] = (), how: str = ""
    ) -> None:
        """Delete a version. ApiError: conflict where it is in use (`how` to end that) or current;
        not_found."""
        with self._change(name, digest) as (folder, found):
            if (name, digest) in in_use:
                what = f"is in use; {how or f'gemctl model unload {name}'} first"
                raise ApiError("conflict", f"version {digest[:12]} of {name}: {what}")
            if digest == found.current:
                what = f"is the current one; replace it first, or gemctl model remove {name}"
                raise ApiError("conflict", f"version {digest[:12]} of {name}: {what}")
            if digest not in {version.digest for version in found.present}:
                raise _missing(name, digest)
            _delete(folder, digest)
            os.fsync(folder)
            self._held.versions.discard((name, digest))

    def collect(self, in_use: Collection[tuple[str, str]] = (), keep: int = 2) -> Collected:
        """Delete what nobody needs: partial files, and versions except the last `keep` good ones,
        those in use, and those that this process staged and that are not judged. Where it cannot
        be read which ones were good, all stay. ApiError.
        """
        total = Collected()
        with self._lock, explained(self.root):
            for name in durable.listing(self._models):
                if NAME.fullmatch(name) and ".." not in name:
                    ours = {digest for owner, digest in in_use if owner == name}
                    total = self._collect(name, ours, keep, total)
        return total

    def _collect(
        self, name: str, in_use: Collection[str], keep: int, total: Collected
    ) -> Collected:
        try:
            folder = os.open(name, durable.FOLDER | os.O_NOFOLLOW, dir_fd=self._models)
        except NotADirectoryError:
            return total
        try:
            found = _versions(folder, name)  # a good one stays until the disk has its mark
            kept = {*found.good[:keep], *in_use}
            kept |= {digest for owner, digest in self._held.versions if owner == name}
            gone = [v for v in found.present if v.digest not in kept and not found.warning]
            for version in gone:
                _delete(folder, version.digest)
            others = _sweep(folder)
            if gone or others:
                os.fsync(folder)
            wanted = name in self._held.names or self._bad_here(name)
            if not wanted and not durable.listing(folder):
                os.rmdir(name, dir_fd=self._models)
                others += 1
        finally:
            os.close(folder)
        return Collected(
            (*total.versions, *((name, v.digest) for v in gone)),
            total.others + others,
            total.size + sum(v.size for v in gone),
        )

    # ---- inside ----
    @contextlib.contextmanager
    def _folder(self, name: str) -> Iterator[int]:
        flags = durable.FOLDER | os.O_NOFOLLOW
        try:
            folder = os.open(check_name(name), flags, dir_fd=self._models)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                what = f"{name}: no such model; see gemctl model list"
                raise ApiError("not_found", what) from None
            raise durable.told(error, self.root / name) from error
        try:
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _change(self, name: str, digest: str) -> Iterator[tuple[int, Versions]]:
        check_digest(digest)
        with self._lock, self._folder(name) as folder, explained(self.root / name, MARKS_BYTES):
            yield folder, self._found(folder, name)


def _missing(name: str, digest: str) -> ApiError:
    return ApiError(
        "not_found", f"version {digest[:12]} of {name}: not in the store; stage the artifact"
    )


# ---- a model's folder ----
def _versions(folder: int, name: str) -> Versions:
    present = tuple(_present(folder))
    there = {version.digest for version in present}
    marks, warning = _marks(folder)
    links = [_link_of(folder, CURRENT), _link_of(folder, PREVIOUS)]
    usable = [d for d in (*links, *marks.good) if d in there and not marks.is_bad(d)]
    ordered = list(dict.fromkeys(usable))
    current = ordered[0] if ordered else None
    previous = ordered[1] if len(ordered) > 1 else None
    return Versions(name, current, previous, tuple(ordered), marks.bad, present, warning)


def _present(folder: int) -> Iterator[Version]:
    for file in durable.listing(folder):
        digest = file.removesuffix(SUFFIX)
        if file.endswith(SUFFIX) and DIGEST.fullmatch(digest):
            with contextlib.suppress(FileNotFoundError):  # collected since
                found = os.stat(file, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    yield Version(digest, found.st_size)


def _link_of(folder: int, name: str) -> str | None:
    """The digest that a link names."""
    try:
        digest = os.readlink(name, dir_fd=folder).removesuffix(SUFFIX)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINVAL):  # none, or something else of that name
            return None
        raise
    return digest if DIGEST.fullmatch(digest) else None


def _relink(folder: int, name: str, digest: str | None) -> None:
    if _link_of(folder, name) == digest:
        return
    if digest is not None:
        durable.write_link(folder, name, digest + SUFFIX)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _read_marks(folder: int) -> _Marks:
    """What is known. ValueError where the file is damaged; OSError."""
    data = durable.read_small(folder, MARKS, MARKS_BYTES)
    return _Marks() if data is None else _marks_of(data)


def _marks(folder: int) -> tuple[_Marks, str]:
    """What is known, and a warning where it could not be read."""
    try:
        return _read_marks(folder), ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return _Marks(), (
            f"{MARKS}: {reason}; good versions are known by the links alone, bad ones are forgotten"
        )


def _change_marks(folder: int, found: Versions, change: Callable[[_Marks], _Marks]) -> None:
    """Write the marks if they change, or were damaged: then by what the links say. OSError."""
    try:
        before = _read_marks(folder)
    except ValueError:
        durable.write_file(folder, MARKS, change(_Marks(found.good)).pack())
        return
    after = change(before)
    if after != before:
        durable.write_file(folder, MARKS, after.pack())


def _is_there(folder: int, file: str) -> bool:
    try:
        os.stat(file, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_sound(folder: int, file: str, digest: str, size: int) -> bool:
    """Whether a version is there and its bytes are those of its name."""
    try:
        descriptor = os.open(file, durable.READ, dir_fd=folder)
    except FileNotFoundError:
        return False
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != size:
            return False
        return digest_of(descriptor, size, Pace()) == digest
    finally:
        os.close(descriptor)


def _delete(folder: int, digest: str) -> None:
    """A version and the links that lead to it."""
    for link in (CURRENT, PREVIOUS):
        if _link_of(folder, link) == digest:
            os.unlink(link, dir_fd=folder)
    os.unlink(digest + SUFFIX, dir_fd=folder)


def _sweep(folder: int) -> int:
    """Remove passing names that a process left behind; how many."""
    count = 0
    for file in durable.listing(folder):
        passing = file.startswith(".") and file.endswith(durable.NEW)
        if passing or (file.startswith(PARTIAL) and not _is_written(folder, file)):
            os.unlink(file, dir_fd=folder)
            count += 1
    return count


def _is_written(folder: int, file: str) -> bool:
    """Whether a process holds the lock of a partial file."""
    descriptor = os.open(file, durable.READ, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
