"""The engine as two files, gemrun.c and gemrun.h, for build systems that want no more.

csrc/gemrun_one.c lists the files; here its includes are written out. A header comes where it is
first needed, and again where a condition of the preprocessor may have left that place out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from gemmake import __version__
from gemmake.errors import OutputError, UsageError
from gemmake.hdf import show
from gemrun.format.writer import whole

BEGINS = "/* gemrun.c: the engine of gemrun "
PUBLIC = "gemrun.h"  # stays a file of its own
INCLUDE = re.compile(r'#\s*include\s+"([^"]+)"')
OPEN = re.compile(r"#\s*if(?:n?def)?\b")
OTHER = re.compile(r"#\s*(?:else|elif)\b")
CLOSE = re.compile(r"#\s*endif\b")
GUARD = re.compile(r"^#ifndef (\w+)\n#define \1$", re.M)
Say = Callable[[str], None]
Place = tuple[int, ...]  # the branches that a line stands in, outermost first


class _Writer:
    def __init__(self, csrc: Path) -> None:
        self.csrc = csrc
        self.stack: list[int] = []
        self.branches = 0  # counted, so that no two are alike
        self.placed: dict[str, list[Place]] = {}

    def _seen(self, name: str) -> bool:
        """Whether a header stands before this line, under no more conditions than it does."""
        here = tuple(self.stack)
        return any(here[: len(place)] == place for place in self.placed.get(name, ()))

    def _branch(self) -> int:
        self.branches += 1
        return self.branches

    def file(self, name: str) -> Iterator[str]:
        """Lines of a file, its includes written out."""
        text = (self.csrc / name).read_text(encoding="utf-8")
        guard = GUARD.search(text) if name.endswith(".h") else None
        guarded = f"#ifndef {guard[1]}" if guard else None
        counted: list[bool] = []  # of the conditions open in this file; a guard is not
        yield f"/* ---- {name} ---- */"
        for line in text.splitlines():
            found = INCLUDE.match(line)
            if found:
                yield from self._include(found[1])
                continue
            if OPEN.match(line):
                counted.append(line != guarded)
                self.stack += [self._branch()] if counted[-1] else []
            elif OTHER.match(line) and counted[-1]:
                self.stack[-1] = self._branch()
            elif CLOSE.match(line) and counted.pop():
                self.stack.pop()
            yield line

    def _include(self, name: str) -> Iterator[str]:
        if name.endswith(".h"):
            if self._seen(name):
                return
            self.placed.setdefault(name, []).append(tuple(self.stack))
        if name == PUBLIC:
            yield f'#include "{PUBLIC}"'
        else:
            yield from self.file(name)


def text_of(csrc: Path) -> str:
    """gemrun.c: the whole engine."""
    head = (
        f"{BEGINS}{__version__} as one file, written by\n"
        " * `gemmake engine --single-file`; change its sources, not this. Licence: Apache-2.0.\n"
        " *\n"
        " *     cc -std=c11 -O2 -ffp-contract=off -c gemrun.c\n"
        " */\n"
    )
    return head + "\n".join(_Writer(csrc).file("gemrun_one.c")) + "\n"


def write(source: Path, output: Path, say: Say = lambda _: None) -> list[str]:
    """Write gemrun.c and the headers for it; returns their names. UsageError where another's files
    have these names."""
    check_folder(output)
    csrc, copied = source / "csrc", [PUBLIC, "gemrun.hpp", "gemrun_bare.h"]
    paths = [output / name for name in ("gemrun.c", *copied)]
    if any(path.exists() or path.is_symlink() for path in paths) and not _made(paths[0]):
        raise foreign(output)
    contents = [text_of(csrc).encode(), *((csrc / name).read_bytes() for name in copied)]
    with into(output, say), contextlib.ExitStack() as together:
        for path, content in zip(paths, contents, strict=True):
            together.enter_context(whole(path)).write_bytes(content)
    return [str(path) for path in paths]


@contextlib.contextmanager
def into(output: Path, say: Say = lambda _: None) -> Iterator[None]:
    """A folder that things are built in, by one command at a time: a second one says that it waits.
    What fails leaves no folder that was not there. OutputError."""
    there = output.exists()
    try:
        with _alone(output, say):
            yield
    except OSError as error:
        if not there:
            with contextlib.suppress(OSError):  # it holds what was built before
                output.rmdir()
        raise OutputError(
            f"{show(output)}: {error.strerror}; free some space, or choose another --output"
        ) from error


@contextlib.contextmanager
def _alone(output: Path, say: Say) -> Iterator[None]:
    """The folder, made and locked until the end of the process or of this. The lock is the
    folder's own, so that nothing is left in it."""
    descriptor = _opened(output)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{show(output)}: another gemmake engine builds into it; waiting for its end")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        output.mkdir(parents=True, exist_ok=True)  # who had it may have taken it away
        yield
    finally:
        os.close(descriptor)


def _opened(output: Path) -> int:
    output.mkdir(parents=True, exist_ok=True)
    return os.open(output, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _made(path: Path) -> bool:
    """Whether a file is one that was made here, by this version or another."""
    if not path.is_file() or path.is_symlink():
        return False
    with path.open("rb") as file:
        return file.read(len(BEGINS)) == BEGINS.encode()


def check_folder(output: Path) -> None:
    """Refuse an output that no folder can be made of: it, or what it is to lie in, is something
    else (a file, a pipe). UsageError."""
    there = next((path for path in (output, *output.parents) if path.exists()), None)
    if there is not None and not there.is_dir():
        raise UsageError(f"{there}: is not a folder; choose another --output")


def foreign(folder: Path) -> UsageError:
    """The error for a folder of somebody else's."""
    return UsageError(
        f"{folder}: holds something that gemmake did not build; choose another --output"
    )
