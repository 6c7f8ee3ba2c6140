"""Memory that may not be locked, for tests: a limit, and a process that has to keep to it."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path


def limited(kib: int) -> Callable[[], None]:
    """What a new process has to call so that it may lock no more."""

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (kib * 1024, kib * 1024))

    return lower


def locks_without_limit() -> bool:
    """Whether this process may lock all that it wants, whatever the limit (CAP_IPC_LOCK)."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", text, re.M)
    return found is not None and bool(int(found[1], 16) >> 14 & 1)


def unprivileged(*words: str | Path) -> list[str]:
    """A command without the right to lock more than the limit."""
    if not locks_without_limit():
        return [str(word) for word in words]
    return ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", *map(str, words)]
