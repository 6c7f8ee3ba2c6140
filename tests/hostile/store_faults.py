"""Cuts an operation of the store or the state file off at every system call, or lets each one fail.

    python store_faults.py FOLDER trace  OPERATION      its calls, one a line, as strace shows them
    python store_faults.py FOLDER faults OPERATION      SIGKILL before each call in turn, and then
                                                        each call in turn gives each error

Between two calls that only look nothing changes, so one kill is enough for both, and one error for
each; with GEM_SOAK=1 all are tried, and errors that stay from then on.

This process prepares a folder once. For each case it copies that, forks a child which waits, lets
strace attach to it with the fault that is wanted, and lets it go: so a case takes milliseconds,
and nothing but the operation is disturbed. Then another child opens what is left, checks every
rule, and does the operation again. One JSON object on stdout: what was tried, what was wrong.
"""

from __future__ import annotations

import contextlib
import ctypes  # here, as each child would load it again
import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gemctl.errors import ApiError
from gemctl.store import copying, state
from gemctl.store.state import Load, State, StateFile
from gemctl.store.store import Store

SOAK = bool(os.environ.get("GEM_SOAK"))
ERRORS = ("ENOSPC", "EIO", "EROFS", "EINTR")
# Calls that only look: one error is enough for them, but in a soak.
LOOKING = frozenset(
    {
        *("fstat", "newfstatat", "statx", "stat", "lstat", "fstatfs", "statfs", "readlinkat"),
        *("readlink", "getdents64", "lseek", "fcntl", "flock", "pread64", "preadv", "preadv2"),
        *("read", "faccessat", "faccessat2", "access"),
    }
)
# Not of the file system, or different from run to run. An error of `close` would keep it open.
OTHER = re.compile(
    r"brk|mmap|munmap|mremap|madvise|mprotect|futex|rt_\w+|getppid|getrandom|exit\w*"
)
FINE, ANOTHER, REFUSED, LEAK, FAULT = 0, 2, 10, 98, 99  # exit codes of the child; 10 + code
CODES = ("no_space", "failed", "refused", "not_found", "conflict", "cancelled", "bad_request")
KNOWN = re.compile(r"[0-9a-f]{64}\.gembin|current|previous|marks\.json")

ctypes.CDLL(None)
copying.PIECE = 4096  # so that a small file takes several steps


@dataclass(frozen=True)
class Operation:
    """`act` gives an exit code below 10; `check` raises AssertionError, given the child's code or
    -9; `after` does so when the operation was done again."""

    prepare: Callable[[Path], None]
    act: Callable[[Path], int]
    check: Callable[[Path, int], None]
    after: Callable[[Path], None]


# ---- the store ----
def content(seed: int) -> bytes:
    return hashlib.shake_128(b"%d" % seed).digest(9000 + seed)


def digest(seed: int) -> str:
    return hashlib.sha256(content(seed)).hexdigest()


def source_of(seed: int) -> int:
    """A file without a name, which children inherit: no case needs more than its folder."""
    source = os.memfd_create(f"candidate {seed}")
    os.write(source, content(seed))
    return source


SOURCES = {seed: source_of(seed) for seed in range(1, 5)}


def stage(box: Store, name: str, seed: int) -> int:
    fresh = box.stage(name, SOURCES[seed], size_most=1 << 20).fresh
    return FINE if fresh else ANOTHER


def two_good(root: Path) -> None:
    """m: 1 and 2 are good, 2 is current, 3 is staged."""
    with Store(root) as box:
        for seed in (1, 2, 3):
            stage(box, "m", seed)
        for seed in (1, 2):
            box.mark_good("m", digest(seed))


def damaged(root: Path) -> None:
    two_good(root)
    path = root / "models" / "m" / f"{digest(2)}.gembin"
    path.chmod(0o644)
    path.write_bytes(content(2)[:-1] + b"x")


def littered(root: Path) -> None:
    two_good(root)
    folder = root / "models" / "m"
    (folder / f"{copying.PARTIAL}0123").write_bytes(b"half")
    (folder / ".current.new").symlink_to("x")
    (root / "models" / "empty").mkdir()


def with_store(body: Callable[[Store], int | None]) -> Callable[[Path], int]:
    def act(root: Path) -> int:
        with Store(root) as box:
            return body(box) or FINE

    return act


def staging(name: str, seed: int, *, named: bool = False, plain: bool = False) -> Any:
    def body(box: Store) -> int:
        box.named_partials = named
        if plain and hasattr(os, "copy_file_range"):
            del os.copy_file_range  # of this process, whose business it is from now on
        return stage(box, name, seed)

    return with_store(body)


def removing(box: Store) -> None:
    try:
        box.remove("m", digest(1))
    except ApiError as error:
        if error.code != "not_found":  # it had been removed when the first try was cut off
            raise


def sound(root: Path, current: set[int | None], damaged: frozenset[int] = frozenset()) -> None:
    """Nothing half under a digest's name; the current version of m is one of these and whole."""
    with Store(root) as box:
        for name in box.names():
            for version in box.versions(name).present:
                path = box.path(name, version.digest)
                data = path.read_bytes()
                whole = hashlib.sha256(data).hexdigest() == version.digest
                assert whole or version.digest in map(digest, damaged), f"half: {path}"
                assert not whole or path.stat().st_mode & 0o777 == 0o444, path
        if (root / "models" / "m").is_dir():
            found = box.versions("m")
            assert not found.warning, found.warning
            assert found.current in {s if s is None else digest(s) for s in current}, found
            if found.current and not damaged:
                box.verify("m", found.current)
                assert (root / "models" / "m" / "current").is_file(), "the link leads nowhere"


def store_check(current: set[int | None], damaged: frozenset[int] = frozenset()) -> Any:
    return lambda root, _code: sound(root, current, damaged)


def store_after(current: int | None, present: set[int], name: str = "m") -> Callable[[Path], None]:
    """The operation has had its effect, and a collection leaves nothing else."""

    def after(root: Path) -> None:
        sound(root, {current})
        with Store(root) as box:
            box.collect(in_use={(name, digest(seed)) for seed in range(10)})
            there = {version.digest for version in box.versions(name).present}
            assert there == {digest(seed) for seed in present}, there
        for folder in (root / "models").iterdir():
            for path in folder.iterdir():
                assert KNOWN.fullmatch(path.name), f"left: {path}"

    return after


# ---- the state ----
BEFORE = state.with_model(State(active="m"), "m", digest="a" * 64)
NEXT = state.with_throttle(BEFORE, temp_c=70.0)
TRIAL = state.begin_trial(BEFORE, "m", "b" * 64)
TRIED = state.boot(TRIAL).state


def saved(value: State) -> Callable[[Path], None]:
    def prepare(root: Path) -> None:
        file = StateFile(root)
        file.save(value)
        file.close()

    return prepare


def spoiled(root: Path) -> None:
    saved(BEFORE)(root)
    (root / state.STATE).rename(root / state.PREVIOUS)
    (root / state.STATE).write_bytes(b"{no json")


def saving(value: State) -> Callable[[Path], int]:
    def act(root: Path) -> int:
        file = StateFile(root)
        try:
            file.load()
            file.save(value, urgent=True)
        finally:
            with contextlib.suppress(ApiError):
                file.close()
        return FINE

    return act


def booting(root: Path) -> int:
    file = StateFile(root)
    try:
        plan = file.boot()
    finally:
        with contextlib.suppress(ApiError):
            file.close()
    return FINE if Load("m", "b" * 64, trial=True) in plan.loads else ANOTHER


def state_of(root: Path) -> State:
    file = StateFile(root)
    try:
        found = file.load()
    finally:
        file.close()
    left = {path.name for path in root.iterdir()}
    assert left <= {state.STATE, state.PREVIOUS, state.DAMAGED, f".{state.STATE}.new"}, left
    assert not found.warnings, found.warnings
    return found.state


def state_check(*allowed: State, warned: bool = False) -> Callable[[Path, int], None]:
    def check(root: Path, _code: int) -> None:
        if warned:  # a first look puts the damaged file aside, if that was not done
            StateFile(root).load()
        found = state_of(root)
        assert found in allowed, found

    return check


def boot_check(root: Path, code: int) -> None:
    """Whoever got the trial to load had written its try off before."""
    found = state_of(root)
    assert found in (TRIAL, TRIED), found
    assert code != FINE or found == TRIED, found


def state_after(*allowed: State) -> Callable[[Path], None]:
    def after(root: Path) -> None:
        assert state_of(root) in allowed
        assert not (root / f".{state.STATE}.new").exists()

    return after


def nothing(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)


OPERATIONS = {
    "open": Operation(
        nothing,
        with_store(lambda _box: None),
        store_check({None}),
        lambda root: sound(root, {None}),
    ),
    "stage-first": Operation(nothing, staging("m", 4), store_check({None}), store_after(None, {4})),
    "stage-next": Operation(
        two_good, staging("m", 4), store_check({2}), store_after(2, {1, 2, 3, 4})
    ),
    "stage-again": Operation(
        two_good, staging("m", 3), store_check({2}), store_after(2, {1, 2, 3})
    ),
    "stage-mend": Operation(
        damaged,
        staging("m", 2),
        store_check({1, 2}, frozenset({2})),
        store_after(2, {1, 2, 3}),
    ),
    "stage-named": Operation(
        two_good, staging("m", 4, named=True), store_check({2}), store_after(2, {1, 2, 3, 4})
    ),
    "stage-plain": Operation(
        two_good, staging("m", 4, plain=True), store_check({2}), store_after(2, {1, 2, 3, 4})
    ),
    "mark-good": Operation(
        two_good,
        with_store(lambda box: box.mark_good("m", digest(3))),
        store_check({2, 3}),
        store_after(3, {1, 2, 3}),
    ),
    "mark-bad": Operation(
        two_good,
        with_store(lambda box: box.mark_bad("m", digest(2), "it hangs")),
        store_check({2, 1}),
        store_after(1, {1, 2, 3}),
    ),
    "collect": Operation(
        littered,
        with_store(lambda box: box.collect(keep=1) and None),
        store_check({2}),
        store_after(2, {2}),
    ),
    "remove": Operation(two_good, with_store(removing), store_check({2}), store_after(2, {2, 3})),
    "state-first": Operation(nothing, saving(NEXT), state_check(State(), NEXT), state_after(NEXT)),
    "state-next": Operation(
        saved(BEFORE), saving(NEXT), state_check(BEFORE, NEXT), state_after(NEXT)
    ),
    "state-spoiled": Operation(
        spoiled, saving(NEXT), state_check(BEFORE, NEXT, warned=True), state_after(NEXT)
    ),
    "state-boot": Operation(
        saved(TRIAL), booting, boot_check, state_after(TRIED, state.boot(TRIED).state)
    ),
}


# ---- cases ----
class CannotTrace(Exception):
    """The system does not let a process be traced. Text: what strace says."""


def in_child(body: Callable[[], int]) -> int:
    """Process id of a child that ends with what the body gives; FAULT on any exception."""
    child = os.fork()
    if child:
        return child
    code = FAULT
    try:
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def open_count() -> int:
    count = 0
    for descriptor in range(64):
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_GETFD)
            count += 1
    return count


def guarded(operation: Operation, root: Path) -> int:
    """The operation between two marks, its errors and descriptors looked at."""
    before = open_count()
    os.getppid()
    try:
        code = operation.act(root)
    except ApiError as error:
        code = REFUSED + CODES.index(error.code)
    os.getppid()
    return code if open_count() == before else LEAK


def traced(operation: Operation, root: Path, log: Path, *words: str) -> int:
    """Do the operation in a child under strace; its exit code, or minus its signal."""
    (wait, go), (begun, begin) = os.pipe(), os.pipe()

    def body() -> int:
        os.close(go)
        os.write(begin, b"x")  # what is counted begins behind this
        select.select([wait], [], [])
        return guarded(operation, root)

    child = in_child(body)
    os.close(wait)
    os.close(begin)
    os.read(begun, 1)
    os.close(begun)
    command = ["strace", "-p", str(child), "-o", str(log), *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        line = strace.stderr.readline()
        os.close(go)
        _, status = os.waitpid(child, 0)
    if "attached" not in line:
        raise CannotTrace(line.strip())
    return os.waitstatus_to_exitcode(status)


def calls_of(log: Path) -> tuple[list[str], list[tuple[str, int]]]:
    """The lines between the marks, and for each (call, its number among those of its name since
    strace was attached)."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    marks = [i for i, line in enumerate(lines) if line.startswith("getppid(")]
    counts: dict[str, int] = {}
    shown: list[str] = []
    found: list[tuple[str, int]] = []
    for number, line in enumerate(lines):
        name = line.partition("(")[0]
        counts[name] = counts.get(name, 0) + 1
        if marks[0] < number < marks[1] and not OTHER.fullmatch(name):
            shown.append(line)
            found.append((name, counts[name]))
    return shown, found


class Campaign:
    """All faults of one kind in one operation."""

    def __init__(self, work: Path, name: str) -> None:
        self.operation = OPERATIONS[name]
        self.base, self.root = work / "base", work / "case"
        self.log = work / "strace.log"
        self.tried: dict[str, int] = {"kill": 0, "errors": 0}
        self.wrong: list[str] = []
        self.outcomes: dict[str, int] = {}
        work.mkdir(parents=True, exist_ok=True)
        for folder in (self.base, self.root):
            shutil.rmtree(folder, ignore_errors=True)
        self.operation.prepare(self.base)
        warm = self.fresh()
        self.operation.act(warm)  # modules that it loads are there from now on

    def fresh(self) -> Path:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.base, self.root, symlinks=True)
        return self.root

    def undisturbed(self) -> tuple[list[str], list[tuple[str, int]]]:
        code = traced(self.operation, self.fresh(), self.log)
        assert code in (FINE, ANOTHER), f"undisturbed it ends with {code}"
        return calls_of(self.log)

    def case(self, label: str, fits: Callable[[int], bool], *words: str) -> None:
        """One fault; then the rules, the operation again, and the rules of its success."""
        code = traced(self.operation, self.fresh(), self.log, *words)
        name = CODES[code - REFUSED] if 0 <= code - REFUSED < len(CODES) else str(code)
        self.outcomes[name] = self.outcomes.get(name, 0) + 1
        problem = self.examine(code)
        if problem:
            self.wrong.append(f"{label}: ended with {name}; then {problem}")
        elif not fits(code):
            self.wrong.append(f"{label}: ended with {name}")

    def examine(self, code: int) -> str:
        read, write = os.pipe()

        def body() -> int:
            try:
                self.operation.check(self.root, code)
                assert guarded(self.operation, self.root) in (FINE, ANOTHER), "again: it fails"
                self.operation.after(self.root)
            except BaseException as error:
                os.write(write, f"{type(error).__name__} {error}"[:2000].encode())
            return FINE

        child = in_child(body)
        os.close(write)
        with os.fdopen(read, "rb") as stream:
            problem = stream.read().decode()
        os.waitpid(child, 0)
        return problem

    def kill(self, calls: list[tuple[str, int]]) -> None:
        before = ""
        for name, number in calls:
            looked, before = before in LOOKING, name
            if looked and not SOAK:
                continue  # nothing has changed since the call before
            words = ("-e", f"trace={name}", "-e", f"inject={name}:signal=SIGKILL:when={number}")
            self.tried["kill"] += 1
            self.case(f"kill before {name} {number}", lambda code: code == -9, *words)

    def errors(self, calls: list[tuple[str, int]]) -> None:
        for name, number, error, more in cases(calls):
            fault = f"{name}:error={error}:when={number}{more}"
            full = error in ("ENOSPC", "EROFS")
            allowed = {FINE, ANOTHER, REFUSED + CODES.index("no_space" if full else "failed")}
            words = ("-e", f"trace={name}", "-e", f"inject={fault}")
            self.tried["errors"] += 1
            self.case(fault, lambda code, allowed=allowed: code in allowed, *words)
            if "(INJECTED)" not in self.log.read_text(errors="replace"):
                self.wrong.append(f"{fault}: was not reached")


def cases(calls: list[tuple[str, int]]) -> Iterator[tuple[str, int, str, str]]:
    """(call, number, error, "+" where it stays from then on)."""
    for name, number in calls:
        if name in ("close", "fcntl"):
            continue
        errors = ("EIO",) if name in LOOKING and not SOAK else ERRORS
        for error in errors:
            yield name, number, error, ""
            if SOAK and error != "EINTR":
                yield name, number, error, "+"


def main() -> None:
    work, kind, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    try:
        campaign = Campaign(work, name)
        lines, calls = campaign.undisturbed()
        if kind == "trace":
            print(json.dumps({"calls": lines}))
            return
        campaign.kill(calls)
        campaign.errors(calls)
    except CannotTrace as error:
        print(json.dumps({"skip": str(error)}))
        return
    told = {"tried": campaign.tried, "outcomes": campaign.outcomes, "wrong": campaign.wrong}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
