"""What the throttle makes of simulated heat: the table of benchmarks/RESULTS-daemon.md.

    python benchmarks/thermal.py [--part overshoot|hours|saved|days] [--seeds N]

The plant is tests/plant.py, the boards and their air tests/heat.py, which the tests use as well; it
needs no board, no daemon and no clock, and prints the same on every machine. About five minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import heat  # noqa: E402
from plant import Controller, Throttle  # noqa: E402

Row = list[str]
HOURS_C = (25.0, 35.0, 45.0, 50.0)
WIDTHS_S = (60.0, 10.0, 1.0)
CONTROLLERS: dict[str, Callable[[], Controller]] = {
    "gemctl": partial(Throttle, heat.POLICY),
    "without prediction": partial(Throttle, heat.BLIND),
    "half duty, half threads from the threshold": heat.BangBang,
}


def table(head: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def over(job: tuple[str, str, str, str, int]) -> float:
    """Degrees above the threshold at the most."""
    board, name, ambient, known, seed = job
    found = heat.peak(heat.BOARDS[board], CONTROLLERS[name](), ambient, known, seed)
    return float(found - heat.SET_C)


def overshoot(pool: ProcessPoolExecutor, seeds: int) -> str:
    """The worst of all seeds, and of what is known of power and air."""
    rows = []
    for ambient in heat.AMBIENTS:
        row = [ambient]
        for name in CONTROLLERS:
            jobs = [
                (board, name, ambient, known, seed)
                for board in heat.BOARDS
                for known in heat.KNOWN
                for seed in range(1, seeds + 1)
            ]
            row.append(f"{max(pool.map(over, jobs)):+.1f}")
        rows.append(row)
    return table(["air, C", *CONTROLLERS], rows)


def steady(job: tuple[str, float, bool]) -> Row:
    board, ambient_c, known = job
    trace = heat.hour(heat.BOARDS[board], Throttle(heat.POLICY), ambient_c, known)
    deviations = (f"{100 * heat.variation(trace, width):.1f}" for width in WIDTHS_S)
    farthest = (f"{100 * heat.farthest(trace, width):.0f}" for width in WIDTHS_S)
    return [
        f"{board}, {ambient_c:g} C, power and air {'known' if known else 'not known'}",
        f"{heat.settled_s(trace):.0f}",
        *deviations,
        " / ".join(farthest),
        f"{trace.peak_c() - heat.SET_C:+.1f}",
        f"{trace.level_changes()} / {trace.level_changes(1200.0)}",
    ]


def hours(pool: ProcessPoolExecutor) -> str:
    head = ["board, air", "settled after, s", *(f"{width:g} s, %" for width in WIDTHS_S)]
    head += ["farthest of 60 / 10 / 1 s, %", "most above 75 C", "changes of level, after minute 20"]
    jobs = [(b, c, known) for b in heat.BOARDS for c in HOURS_C for known in (True, False)]
    return table(head, list(pool.map(steady, jobs)))


def saved() -> str:
    """Of the conservative mode against none, on a machine that is cool."""
    uncapped = replace(heat.ORIN, freq_min_khz=None, freq_max_khz=None)
    conservative = replace(heat.COOL, mode="conservative")
    half = replace(heat.COOL, mode="balanced", duty_most=0.5)
    cases = {
        "conservative, the clock can be capped": (heat.ORIN, conservative),
        "conservative, it cannot": (uncapped, conservative),
        "duty of 0.5 alone": (uncapped, half),
    }
    rows = []
    for name, (board, policy) in cases.items():
        power, first, rate = heat.compare(board, policy)
        rows.append([name, f"-{100 * power:.1f}", f"+{100 * first:.1f}", f"-{100 * rate:.1f}"])
    return table(["", "power, %", "time to the first token, %", "tokens a second, %"], rows)


def days(pool: ProcessPoolExecutor) -> str:
    head = ["board", "most above 75 C", "changes of level", "in the worst hour"]
    head += ["paused, min", "longest avoidable pause, min"]
    found = zip(heat.DAYS, pool.map(heat.day, heat.DAYS.values()), strict=True)
    return table(head, [_day(name, one) for name, one in found])


def _day(name: str, found: heat.Day) -> Row:
    return [
        name,
        f"{found.trace.peak_c() - heat.SET_C:+.1f}",
        f"{found.changes}",
        f"{found.worst_hour}",
        f"{found.paused_s / 60:.0f}",
        f"{found.avoidable_s / 60:.1f}",
    ]


def parts(pool: ProcessPoolExecutor, seeds: int) -> dict[str, tuple[str, Callable[[], str]]]:
    """What each table is of, and how it is made."""
    return {
        "saved": ("What is saved, and what it costs:", saved),
        "days": (
            "A day of full load, air of 20 to 45 C, the fan fails at noon:",
            partial(days, pool),
        ),
        "hours": (
            "Deviation of the power over an hour of full load, from where it has settled:",
            partial(hours, pool),
        ),
        "overshoot": (
            f"Degrees above the threshold of 75 C, worst of three boards, seeds: {seeds}:",
            partial(overshoot, pool, seeds),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["saved", "days", "hours", "overshoot"])
    parser.add_argument("--seeds", type=int, default=1, help="noise of the sensor, so many times")
    options = parser.parse_args()
    with ProcessPoolExecutor(2) as pool:
        for name, (title, made) in parts(pool, options.seeds).items():
            if options.part in (None, name):
                print(f"{title}\n\n{made()}\n", flush=True)


if __name__ == "__main__":
    main()
