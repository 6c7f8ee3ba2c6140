"""The last hour in memory: one value a second for ten minutes, one in ten seconds for an hour.

    history.add(now, {"temp_c": 61.2, "throughput_tps": None})    about once a second
    history.query(seconds=3600, step_s=10)                        for `stats --history` and the page
    history.ttft(now, 120.0, "lm")                                a model's time to a first token
    history.ttft_percentiles(now, "lm")                           (p50, p95) of five minutes

Times are seconds of a clock that never goes back; answers count back from the last one. The rings
are fixed arrays: 8 KiB a series, at most MAX_SERIES of them, whatever happens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

FINE_S, FINE_COUNT = 1, 600
COARSE_S, COARSE_COUNT = 10, 366  # an hour, and the part of ten seconds that runs
LONGEST_S = 3600
MAX_SERIES = 64
TTFT_WINDOW_S = 300.0
TTFT_KEPT = 4096
ANSWERS_KEPT = 16  # to different questions within a second
UNKNOWN = math.nan

# What the status page draws. `throttle_level` is a number, `duty` a share of 1.
DRAWN = ("temp_c", "predicted_c", "threshold_c", "throughput_tps", "throttle_level", "duty")


class _Ring:
    """Means of a series over slots of `step_s` seconds; slots without a value hold NaN."""

    def __init__(self, step_s: int, count: int) -> None:
        self.step_s, self.count = step_s, count
        self._sums = array("d", [UNKNOWN]) * count
        self._numbers = array("H", [0]) * count
        self._kept: tuple[int, list[float]] | None = None  # what `values` was asked for last

    def values(self, last: int) -> list[float]:
        """All slots up to the last one; computed once a change, however often it is asked for."""
        if self._kept is None or self._kept[0] != last:
            self._kept = last, [self.get(slot) for slot in range(last - self.count + 1, last + 1)]
        return self._kept[1]

    def clear(self, slot: int) -> None:
        self._kept = None
        self._sums[slot % self.count] = UNKNOWN
        self._numbers[slot % self.count] = 0

    def put(self, slot: int, value: float) -> None:
        self._kept = None
        place = slot % self.count
        if self._numbers[place] == 0:
            self._sums[place], self._numbers[place] = value, 1
        elif self._numbers[place] < 65535:
            self._sums[place] += value
            self._numbers[place] += 1

    def get(self, slot: int) -> float:
        place = slot % self.count
        number = self._numbers[place]
        return self._sums[place] / number if number else UNKNOWN


class _Series:
    """One name: both rings."""

    def __init__(self) -> None:
        self.fine = _Ring(FINE_S, FINE_COUNT)
        self.coarse = _Ring(COARSE_S, COARSE_COUNT)

    def rings(self) -> tuple[_Ring, _Ring]:
        return self.fine, self.coarse


class History:
    """Series by name. A name beyond MAX_SERIES is ignored."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}
        self._second: int | None = None  # of the last `add`
        self._ttft: dict[str, Window] = {}
        self._answers: dict[tuple[bool, int, int], dict[str, list[float | None]]] = {}

    def add(self, now: float, values: Mapping[str, float | None]) -> None:
        """Values of this second; None and what is no finite number count as unknown."""
        second = math.floor(now + 0.5)  # a timer that is a little early or late hits its second
        if self._second is not None and second < self._second:
            return
        self._forward(second)
        self._answers.clear()
        for name, value in values.items():
            series = self._series.get(name)
            if series is None:
                if len(self._series) >= MAX_SERIES:
                    continue
                series = self._series[name] = _Series()
            if value is not None and math.isfinite(value):
                series.fine.put(second, value)
                series.coarse.put(second // COARSE_S, value)

    def _forward(self, second: int) -> None:
        """Empty the slots that begin. One second that was missed repeats the one before."""
        before, self._second = self._second, second
        if before is None or second == before:
            return
        for series in self._series.values():
            missed = series.fine.get(before) if second == before + 2 else UNKNOWN
            for ring in series.rings():
                last, new = before // ring.step_s, second // ring.step_s
                for slot in range(max(last + 1, new - ring.count + 1), new + 1):
                    ring.clear(slot)
            if not math.isnan(missed):
                series.fine.put(before + 1, missed)

    def query(self, seconds: int = LONGEST_S, step_s: int = COARSE_S) -> dict[str, Any]:
        """Means over steps, the oldest first: {"seconds", "step_s", "t", "series"}.

        `t` are seconds before the last `add`, as negative numbers, at the end of each step. Clamped
        to 1..3600 s; beyond ten minutes a step is at least ten seconds and a multiple of it.
        """
        seconds = max(1, min(LONGEST_S, int(seconds)))
        step_s = max(1, min(seconds, int(step_s)))
        coarse = seconds > FINE_COUNT or step_s >= COARSE_S
        unit = COARSE_S if coarse else FINE_S
        width = -(-step_s // unit)  # slots in a step
        steps = -(-seconds // (width * unit))
        times = [-(steps - 1 - i) * width * unit for i in range(steps)]
        series = self._means(coarse, steps, width)
        return {"seconds": seconds, "step_s": width * unit, "t": times, "series": series}

    def _means(self, coarse: bool, steps: int, width: int) -> dict[str, list[float | None]]:
        """Of every series, kept until the next `add`: a flood of one question is answered once."""
        key = coarse, steps, width
        if key not in self._answers:
            unit = COARSE_S if coarse else FINE_S
            last = None if self._second is None else self._second // unit
            if len(self._answers) >= ANSWERS_KEPT:
                self._answers.clear()
            self._answers[key] = {
                name: _means(both.coarse if coarse else both.fine, last, steps, width)
                for name, both in self._series.items()
            }
        return self._answers[key]

    def ttft(self, now: float, ms: float, model: str = "") -> None:
        """A model's first token came after so many milliseconds."""
        if model not in self._ttft and len(self._ttft) >= MAX_SERIES:
            return
        self._ttft.setdefault(model, Window(TTFT_WINDOW_S, TTFT_KEPT)).add(now, ms)

    def ttft_percentiles(self, now: float, model: str = "") -> tuple[float | None, float | None]:
        """(p50, p95) of a model in milliseconds over the last five minutes; None without a
        request."""
        window = self._ttft.get(model)
        if window is None:
            return None, None
        return window.percentile(now, 50), window.percentile(now, 95)


def _means(ring: _Ring, last: int | None, steps: int, width: int) -> list[float | None]:
    """One mean a step, of what is known in it."""
    if last is None:
        return [None] * steps
    first = last - steps * width + 1
    oldest = last - ring.count + 1
    values = ring.values(last)
    means: list[float | None] = []
    for step in range(steps):
        start, end = max(first + step * width - oldest, 0), first + (step + 1) * width - oldest
        known = [value for value in values[start : max(start, end)] if not math.isnan(value)]
        means.append(round(math.fsum(known) / len(known), 3) if known else None)
    return means


class Window:
    """The values of the last `seconds`, at most `kept` of them (the newest)."""

    def __init__(self, seconds: float, kept: int) -> None:
        self._seconds, self._kept = seconds, kept
        self._times = array("d", [0.0]) * kept
        self._values = array("d", [0.0]) * kept
        self._count = 0  # ever added

    def add(self, now: float, value: float) -> None:
        """A value; what is no finite number is ignored."""
        if math.isfinite(value):
            place = self._count % self._kept
            self._times[place], self._values[place] = now, value
            self._count += 1

    def percentile(self, now: float, percent: float) -> float | None:
        """Nearest rank: the least value that `percent` of all are not above; None without any."""
        filled = min(self._count, self._kept)
        recent = sorted(
            self._values[i] for i in range(filled) if now - self._times[i] <= self._seconds
        )
        if not recent:
            return None
        rank = math.ceil(percent / 100 * len(recent))
        return recent[max(0, min(len(recent), rank) - 1)]
