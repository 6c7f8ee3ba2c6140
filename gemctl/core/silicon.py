"""What a cap of the clock does to power and speed: dynamic power goes with V^2 f.

The volts come from the board's description where it has them (`cpu.cluster.opp_mhz`, `opp_volts`);
else they fall in a line from 1 at the highest clock to `volts_least` (relative) at the lowest: 0.6
at a quarter of the clock is usual for the mobile chips of the boards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Curve = tuple[tuple[float, float], ...]  # (MHz, volts), ascending; () = not known


@dataclass(frozen=True)
class Silicon:
    """Cores that share a clock. `static_share` is the part of the full power that does not depend
    on the clock: leakage, memory, carrier board."""

    max_mhz: float
    min_mhz: float = 0.0
    static_share: float = 0.3
    volts_least: float = 0.6
    curve: Curve = ()

    def volts(self, cap: float) -> float:
        """Voltage relative to the one at the highest clock; `cap` is the share of the clock."""
        if self.curve:
            return self._step(cap)[1] / self._step(1.0)[1]
        lowest = min(0.99, self.min_mhz / self.max_mhz) if self.min_mhz else 0.25
        above = (min(1.0, max(cap, lowest)) - lowest) / (1.0 - lowest)
        return self.volts_least + (1.0 - self.volts_least) * above

    def dynamic_factor(self, cap: float) -> float:
        """Dynamic power at this cap, relative to the one without."""
        clock = self._step(cap)[0] / self._step(1.0)[0] if self.curve else min(1.0, cap)
        return clock * self.volts(cap) ** 2

    def _step(self, cap: float) -> tuple[float, float]:
        """The operating point under a cap: the highest that it allows, as the kernel takes it."""
        most = min(1.0, cap) * self.max_mhz + 0.5
        return next((step for step in reversed(self.curve) if step[0] <= most), self.curve[0])

    def power_factor(self, cap: float, duty: float = 1.0, threads_share: float = 1.0) -> float:
        """All of the power, relative to full load. `duty` and `threads_share` in 0..1."""
        busy = self.dynamic_factor(cap) * duty * threads_share
        return self.static_share + (1.0 - self.static_share) * busy

    def speed_factor(self, cap: float, compute_share: float = 1.0) -> float:
        """Speed relative to no cap, where `compute_share` of the time scales with the clock.

        The rest waits for memory. Decoding with all threads has little of the first, prefill of
        many tokens little of the second.
        """
        return 1.0 / (1.0 - compute_share + compute_share / min(1.0, cap))


def curve_of(hdf: Any, cores: Collection[int]) -> Curve:
    """The curve in a stored description of the cluster that has one of `cores`; () where it has
    none. A description is somebody's file: what makes no sense is none."""
    cpu = hdf.get("cpu") if isinstance(hdf, Mapping) else None
    listed = _list(cpu.get("cluster")) if isinstance(cpu, Mapping) else []
    clusters = [one for one in listed if isinstance(one, Mapping)]
    numbered = [{core for core in _list(one.get("cores")) if _number(core)} for one in clusters]
    own = [one for one, has in zip(clusters, numbered, strict=True) if has & set(cores)]
    if own:
        return _curve(own[0])
    return _curve(clusters[0]) if len(clusters) == 1 and not numbered[0] else ()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _curve(cluster: Mapping[str, Any]) -> Curve:
    clocks, volts = _list(cluster.get("opp_mhz")), _list(cluster.get("opp_volts"))
    if len(clocks) != len(volts) or len(clocks) < 2:
        return ()
    if not all(_number(value) and value > 0 for value in (*clocks, *volts)):
        return ()
    pairs = tuple((float(mhz), float(volt)) for mhz, volt in zip(clocks, volts, strict=True))
    return pairs if all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(pairs)) else ()
