"""What the machine says of itself: its processor's name, and an energy counter where one is."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_CPU_KEYS = ("model name", "Hardware", "Model", "cpu model", "uarch")  # by architecture


def cpu_name(root: Path = Path("/")) -> str:
    """The processor's name, or the board's, or at least the architecture."""
    text = _read(root / "proc/cpuinfo")
    for key in _CPU_KEYS:
        found = re.search(rf"^{key}\s*:\s*(\S.*?)\s*$", text, re.M)
        if found:
            return found[1]
    board = _read(root / "proc/device-tree/model").strip("\0\n ")
    return board or platform.machine() or "unknown processor"


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class _Domain:
    """A RAPL package domain: its counter's file and where the counter wraps, in microjoules."""

    counter: Path
    wrap: int


class EnergyMeter:
    """Energy of all processor packages by RAPL.

    `reason` says why there is none. The counters wrap about once an hour at full load, so a
    measurement of longer than that has to be read in between.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._domains, self.reason = _domains(root / "sys/class/powercap")

    def read(self) -> list[int]:
        """The counters now, in microjoules; empty without a sensor."""
        return [int(domain.counter.read_text(encoding="ascii")) for domain in self._domains]

    def joules(self, before: Sequence[int], after: Sequence[int]) -> float | None:
        """Energy between two readings; None without a sensor."""
        if not self._domains:
            return None
        pairs = zip(self._domains, before, after, strict=True)
        return sum((new - old) % domain.wrap for domain, old, new in pairs) * 1e-6


def _domains(folder: Path) -> tuple[list[_Domain], str]:
    """Package domains that can be read, or the reason why there are none."""
    found: list[_Domain] = []
    for zone in sorted(folder.glob("intel-rapl:*")):
        if not _read(zone / "name").startswith("package"):
            continue  # cores and memory of a package are counted in it
        try:
            int((zone / "energy_uj").read_text(encoding="ascii"))
            wrap = int((zone / "max_energy_range_uj").read_text(encoding="ascii")) + 1
        except PermissionError:
            return [], "sensor not readable by this user"
        except (OSError, ValueError):
            continue
        found.append(_Domain(zone / "energy_uj", wrap))
    return found, "" if found else "no sensor"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
