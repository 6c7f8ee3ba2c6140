"""Control groups with a memory limit, version 1 or 2, for tests and benchmarks; none where the
system does not let us make any."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_COUNT = itertools.count()


@dataclass(frozen=True)
class MemoryGroup:
    """A group of our own."""

    path: Path
    second: bool  # version 2

    def limit(self, size: int) -> None:
        """Bytes that its processes may take, page cache included."""
        name = "memory.max" if self.second else "memory.limit_in_bytes"
        (self.path / name).write_text(str(size), encoding="ascii")

    @property
    def peak(self) -> int:
        """The most that it has held, in bytes, page cache included."""
        name = "memory.peak" if self.second else "memory.max_usage_in_bytes"
        return int((self.path / name).read_text(encoding="ascii"))

    @property
    def killed(self) -> int:
        """How many of its processes the system ended for want of memory."""
        name = "memory.events" if self.second else "memory.oom_control"
        words = (self.path / name).read_text(encoding="ascii").split()
        pairs = dict(zip(words[::2], words[1::2], strict=False))
        return int(pairs.get("oom_kill", 0))

    def enter(self) -> None:
        """Called in a new process, before it becomes the program."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")

    def run(self, command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        """Run a command in the group, to its end."""
        return subprocess.run(
            command, capture_output=True, text=True, check=False, preexec_fn=self.enter
        )


def drop(path: Path) -> None:
    """The file leaves the page cache, so that who reads it next is charged for it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


@contextlib.contextmanager
def memory_group(size: int | None = None) -> Iterator[MemoryGroup | None]:
    """A group, limited to `size` bytes; None where none can be made."""
    group = _made()
    try:
        if group and size is not None:
            group.limit(size)
        yield group
    finally:
        if group:
            _remove(group.path)


def _made() -> MemoryGroup | None:
    name = f"gembin-{os.getpid()}-{next(_COUNT)}"
    for folder, second in ((ROOT / "memory", False), (ROOT, True), (ROOT / "unified", True)):
        kind = "cgroup.subtree_control" if second else "memory.limit_in_bytes"
        with contextlib.suppress(OSError):
            text = (folder / kind).read_text(encoding="ascii")
            if second and "memory" not in text.split():
                (folder / kind).write_text("+memory", encoding="ascii")
            (folder / name).mkdir()
            return MemoryGroup(folder / name, second)
    return None


def _remove(path: Path) -> None:
    """Its processes have ended; the system may need a moment to see that."""
    for _ in range(50):
        try:
            path.rmdir()
            return
        except OSError:
            time.sleep(0.1)
