"""What the compile itself takes of its host: peak memory and CPU time."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path


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
