"""Figures of the machine that decide what may be loaded."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from gemctl.core.policy import Memory

KIB = 1024
PIECE = 4 << 20  # bytes that are asked for at once
POPULATE_READ = 22  # of Linux 5.14; Python does not name it
LOOK_S = 0.02  # between two looks whether somebody waits for a first token


def memory(root: Path, most: int) -> Memory:
    """Total and available memory in bytes; of a control group where that is less."""
    fields = {}
    for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
        key, _, rest = line.partition(":")
        fields[key] = int(rest.split()[0]) * KIB
    total, available = fields["MemTotal"], fields.get("MemAvailable", fields["MemFree"])
    return Memory(total=total, available=available, most=most)


def prefault(
    path: Path, mbps: float, busy: Callable[[], bool], stopping: Callable[[], bool]
) -> int:
    """Bring a file into the page cache at `mbps` (decimal MB/s) at most; its size in bytes.

    Waits while `busy`: nobody's first token is to wait for the disk behind it. Ends early where the
    daemon stops.
    """
    with path.open("rb", buffering=0) as stream:
        size = os.fstat(stream.fileno()).st_size
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    with mapped:
        with contextlib.suppress(OSError):  # a hint, as the engine gives it
            mapped.madvise(mmap.MADV_HUGEPAGE)
        started, slept = time.monotonic(), 0.0
        for at in range(0, size, PIECE):
            waited = time.monotonic()
            while busy() and not stopping():
                time.sleep(LOOK_S)
            if stopping():
                break
            slept += time.monotonic() - waited
            _bring(mapped, at, min(PIECE, size - at))
            due = started + slept + (at + PIECE) / (mbps * 1e6)
            while (left := due - time.monotonic()) > 0 and not stopping():
                time.sleep(min(left, LOOK_S))
    return size


def _bring(mapped: mmap.mmap, at: int, count: int) -> None:
    """Into the page cache; at once where the system can, else it is begun."""
    try:
        mapped.madvise(POPULATE_READ, at, count)
    except OSError:
        mapped.madvise(mmap.MADV_WILLNEED, at, count)
