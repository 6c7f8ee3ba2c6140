"""What the compile itself takes of its host, peak memory and CPU time, and what it may take."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from gemmake.figures import mib
from gemrun import console

LITTLE = 1 << 30  # bytes; models of 270 million weights take two thirds of it
V2, V1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
CACHES = ("file", "cache")  # of memory.stat: what gives way, in version 2 and 1


def peak_rss() -> int:
    """Largest resident size of this process so far, in bytes.

    From VmHWM, which starts anew with a program; ru_maxrss is inherited from the parent.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total


def group_note(root: Path = Path("/")) -> str:
    """A sentence where a control group leaves this process little; empty where none does. What goes
    beyond such a limit is ended by the system without a word."""
    left = min(_left(root), default=LITTLE)
    if left >= LITTLE:
        return ""
    return (
        f"the control group leaves {mib(left, 0)}, and the system ends a compile that takes more; "
        "raise its limit (memory.max), or use --workers 1 and --effort fast"
    )


def warn(tool: str) -> None:
    """Say it, if there is something to say."""
    if note := group_note():
        console.say(f"{tool}: warning: {note}")


def _left(root: Path) -> Iterator[int]:
    """Bytes that each control group of this process, and each above it, leaves."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = PurePosixPath(group.strip("/"))
        for folder in (base / own, *(base / above for above in own.parents)):
            for limit, used in (V2, V1):
                most, taken = _text(folder / limit), _text(folder / used)
                if most.isdecimal():
                    yield max(0, int(most) - max(0, _number(taken) - _cached(folder)))


def _cached(folder: Path) -> int:
    rows = (line.split() for line in _text(folder / "memory.stat").splitlines())
    return sum(_number(row[1]) for row in rows if len(row) == 2 and row[0] in CACHES)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
