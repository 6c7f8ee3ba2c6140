"""thermal: the throttle temperature that the artifact carries, and the ladder above it.

The ladder says what an engine does by itself when it is told the temperature: rungs, each with a
share of the time, of the threads and of the chunk. Its threshold comes from the operator and the
kernel's trips; the power of the board (TDP) says how far the first rung has to go, where the
thermal resistance was measured.
"""

from __future__ import annotations

from gemmake.errors import UsageError
from gemmake.hdf import Hdf
from gemrun.format import spec
from gemrun.format.spec import Mode, Rung

MARGIN_C = 5.0  # a chosen threshold stays so far below the kernel's passive trip
LEAST_HYSTERESIS_C = 3.0
SILENT_C = 10.0  # below the threshold
AMBIENT_C = 25.0  # where the power that can be sustained is computed
ENGAGE_MS, RELEASE_MS, STALE_MS = 3_000, 15_000, 5_000

WHOLE = (1000, 1000, 1000)  # thousandths of time, threads, chunk
#: What holds while nothing is hot.
FIRST = {
    Mode.CONSERVATIVE: (500, 500, 500),
    Mode.SILENT: (700, 500, 500),
}
#: Above it. Fewer threads come after less time: they save less where memory is the limit.
STEPS = (
    (800, 1000, 1000),
    (650, 1000, 1000),
    (500, 1000, 500),
    (500, 500, 500),
    (350, 500, 500),
    (200, 500, 250),
    (80, 500, 250),
)
FAULT = (500, 500)  # time and threads while the sensor cannot be believed, at most


def policy(hdf: Hdf, threshold: float | None) -> spec.Thermal:
    """THRM from `--temperature-threshold` (°C), or the target's own policy without it."""
    chosen = threshold if threshold is not None else hdf.throttle_c
    return spec.Thermal(
        threshold_c=chosen or 0.0,
        hysteresis_c=hdf.policy.hysteresis_c,
        device_max_c=hdf.policy.target_temp_c or 0.0,
    )


def check(hdf: Hdf, threshold: float | None) -> None:
    """Refuse a threshold that the kernel's passive trip comes before: it would never be reached.
    Raises UsageError."""
    passive = hdf.passive_c
    if threshold is not None and passive is not None and threshold >= passive:
        raise UsageError(
            f"--temperature-threshold {threshold:g}: the kernel of {hdf.id} throttles at "
            f"{passive:g} \u00b0C by itself; use {passive - MARGIN_C:g} \u00b0C or less"
        )


def ladder(hdf: Hdf, threshold: float | None, mode: Mode) -> spec.Ladder:
    """The ladder of a mode; one that is never gone up where no limit is known."""
    engage = limit(hdf, threshold, mode)
    below = max(LEAST_HYSTERESIS_C, hdf.policy.hysteresis_c)
    rungs = _rungs(FIRST.get(mode, WHOLE), _first_step(sustained(hdf, engage)))
    steps = [Rung(duty=d, threads=t, chunk=c) for d, t, c in rungs]
    steps += [Rung()] * (spec.MAX_RUNGS - len(steps))
    return spec.Ladder(
        mode=mode,
        rung_count=len(rungs),
        engage_c=engage or 0.0,
        release_c=max(1.0, engage - below) if engage else 0.0,
        rise=2 if mode is Mode.AGGRESSIVE else 1,
        fault=next(i for i, r in enumerate(rungs) if r[0] <= FAULT[0] and r[1] <= FAULT[1]),
        engage_ms=ENGAGE_MS,
        release_ms=RELEASE_MS,
        stale_ms=STALE_MS,
        rungs=b"".join(step.pack() for step in steps),
    )


def notes(found: spec.Ladder, threshold: float | None) -> tuple[str, ...]:
    """A sentence where the ladder begins below the threshold that was asked for."""
    if threshold is None or not 0 < found.engage_c < threshold:
        return ()
    return (
        f"--temperature-threshold {threshold:g}: the ladder of {Mode(found.mode).name.lower()} "
        f"begins at {found.engage_c:g} \u00b0C already",
    )


def limit(hdf: Hdf, threshold: float | None, mode: Mode) -> float | None:
    """Temperature from which the ladder is gone up; None: no limit is known.

    `performance` leaves all to the kernel up to its passive trip; the others stay below it.
    """
    passive = hdf.passive_c
    if mode is Mode.PERFORMANCE:
        return passive
    limits = [hdf.throttle_c]
    if threshold is not None:
        limits = [threshold, None if passive is None else passive - MARGIN_C]
    if mode is Mode.AGGRESSIVE:
        limits.append(hdf.policy.target_temp_c)
    known = [value for value in limits if value is not None]
    return min(known) - (SILENT_C if mode is Mode.SILENT else 0.0) if known else None


def sustained(hdf: Hdf, engage: float | None) -> float | None:
    """Share of the default mode's power (TDP) that keeps the board at `engage`: (T - ambient) /
    (Rtheta * TDP). None where one of them is not known."""
    mode, thermal = hdf.default_mode, hdf.thermal
    resistance = thermal.rtheta_c_per_w if thermal else None
    if engage is None or resistance is None or mode is None or mode.tdp_w is None:
        return None
    return (engage - AMBIENT_C) / (resistance * mode.tdp_w)


def _first_step(share: float | None) -> int:
    """Duty of the first step: what can be sustained, as far as that is a step at all."""
    if share is None:
        return STEPS[0][0]
    return round(1000 * min(0.95, max(0.1, share)))


def _rungs(first: tuple[int, int, int], duty: int) -> list[tuple[int, int, int]]:
    """The first rung and the steps above it that take more away."""
    rungs = [first]
    for step in ((duty, *STEPS[0][1:]), *STEPS[1:]):
        time, threads, chunk = (min(a, b) for a, b in zip(step, rungs[-1], strict=True))
        if (time, threads, chunk) != rungs[-1]:
            rungs.append((time, threads, chunk))
    return rungs
