"""How much of the processor others used while something was measured.

The system counts what all processes used and what the hypervisor gave to other machines; what this
process and its ended children used is taken off. A figure from a busy machine is no result.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path

QUIET_CORES = 0.1  # others use at most so much of the machine where figures count
STAT = Path("/proc/stat")


def busy_and_stolen(text: str, ticks: int) -> tuple[float, float]:
    """Seconds, of all cores together, from the text of /proc/stat."""
    user, nice, system, _, _, irq, softirq, steal = map(int, text.split("\n")[0].split()[1:9])
    return (user + nice + system + irq + softirq) / ticks, steal / ticks


def _now() -> tuple[float, float]:
    return busy_and_stolen(STAT.read_text(encoding="ascii"), os.sysconf("SC_CLK_TCK"))


def _mine() -> float:
    """Processor seconds of this process and of its children that ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@dataclass(frozen=True)
class OtherWork:
    """Watches from the moment it is made."""

    clock: float = field(default_factory=time.monotonic)
    counted: tuple[float, float] = field(default_factory=_now)
    mine: float = field(default_factory=_mine)

    def cores(self) -> float:
        """Cores that others used so far, on average."""
        used = _now()[0] - self.counted[0] - (_mine() - self.mine)
        return max(used, 0.0) / max(time.monotonic() - self.clock, 1e-9)

    def stolen(self) -> float:
        """Cores that the hypervisor gave to other machines, on average."""
        taken = _now()[1] - self.counted[1]
        return max(taken, 0.0) / max(time.monotonic() - self.clock, 1e-9)

    def text(self) -> str:
        """Both in words; says where figures taken meanwhile do not count."""
        others, stolen = self.cores(), self.stolen()
        told = f"others used {others:.2f} cores, the hypervisor took {stolen:.2f}"
        if others + stolen > QUIET_CORES:
            return f"**busy: {told}; these figures are a trial, no result**"
        return told
