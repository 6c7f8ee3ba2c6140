"""Simulated heat: boards, air, and what the throttle makes of them, on the plant of plant.py.

Used by the tests (tests/unit/test_gemctl_thermal_sim.py) and by benchmarks/thermal.py, so that what
is printed is what is tested. Temperatures are those of the die itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from gemctl.core.throttle import PAUSE, Actuators, Decision, Inputs, Reading, Settings
from plant import Board, Controller, Plant, Throttle, Trace, run

SET_C = 75.0
POLICY = Settings(temp_c=SET_C, hw_passive_c=95.0, continuous_c=70.0)
BLIND = replace(POLICY, horizon_s=0.0)  # the same controller without prediction

ORIN = Board()
PLATE = Board(die_c_per_w=0.6, die_tau_s=4.0, sink_c_per_w=1.8, sink_tau_s=50.0)  # light, fanless
PI = Board(  # nothing but pacing: no cap of the clock, a small heat sink
    static_w=2.5, dynamic_w=6.0, threads=4, saturation_threads=3, freq_min_khz=None,
    freq_max_khz=None, die_c_per_w=2.0, sink_c_per_w=5.0, sink_tau_s=120.0,
)  # fmt: skip
BOARDS = {"orin": ORIN, "plate": PLATE, "pi": PI}


class BangBang:
    """What people write first: half duty and half threads from the threshold, all below it."""

    def __init__(self) -> None:
        self.free = Throttle(replace(POLICY, mode="off"))
        self.hot = False

    def __call__(self, inputs: Inputs, actuators: Actuators) -> Decision:
        decision = self.free(inputs, actuators)
        celsius = inputs.readings[0].celsius or 0.0
        self.hot = celsius >= SET_C or (self.hot and celsius > SET_C - 5.0)
        half = max(1, actuators.threads // 2)
        return replace(decision, duty=0.5, threads=half) if self.hot else decision


def step(low: float, high: float, at_s: float = 900.0) -> Callable[[float], float]:
    return lambda time: low if time < at_s else high


def ramp(low: float, high: float, over_s: float, at_s: float = 900.0) -> Callable[[float], float]:
    return lambda time: low + (high - low) * min(1.0, max(0.0, (time - at_s) / over_s))


# Out of a cold store, into the sun, a cabinet that warms up; and a start in the heat.
AMBIENTS = {
    "step 15-40": step(15.0, 40.0),
    "step 20-40": step(20.0, 40.0),
    "step 10-45": step(10.0, 45.0),
    "ramp 10-45 in 1 min": ramp(10.0, 45.0, 60.0),
    "ramp 10-45 in 5 min": ramp(10.0, 45.0, 300.0),
    "start at 45": step(45.0, 45.0),
}
KNOWN = {"power and ambient": (True, True), "ambient": (False, True), "neither": (False, False)}


def peak(board: Board, controller: Controller, ambient: str, known: str, seed: int) -> float:
    power, air = KNOWN[known]
    around = AMBIENTS[ambient]
    trace = run(
        Plant(board, around(0.0), seed), controller, around, 1500.0,
        power_known=power, ambient_known=air,
    )  # fmt: skip
    return trace.peak_c()


# Steadiness.

SETTLED = 0.05  # of the mean: how far off a minute's mean may be


def settled_s(trace: Trace) -> float:
    """From when on every minute's mean is within 5 % of that of the last twenty minutes."""
    rest = trace.mean_w(trace.time_s[-1] - 1200.0)
    minutes = trace.means_w(60.0)
    far = [i for i, watts in enumerate(minutes) if abs(watts - rest) > SETTLED * rest]
    return 60.0 * (far[-1] + 1) if far else 0.0


def variation(trace: Trace, width_s: float = 60.0, after_s: float | None = None) -> float:
    """Standard deviation over mean of the power's means over `width_s`, once it has settled."""
    means = trace.means_w(width_s, settled_s(trace) if after_s is None else after_s)
    return statistics.pstdev(means) / statistics.mean(means)


def farthest(trace: Trace, width_s: float) -> float:
    """How far the farthest of those means is from the mean of all, as a share of it."""
    means = trace.means_w(width_s, settled_s(trace))
    mean = statistics.mean(means)
    return max(abs(watts / mean - 1.0) for watts in means)


def hour(board: Board, controller: Controller, ambient_c: float, known: bool = True) -> Trace:
    return run(
        Plant(board, ambient_c, seed=3), controller, lambda _: ambient_c, 3600.0,
        power_known=known, ambient_known=known,
    )  # fmt: skip


# What a mode saves and costs.


@dataclass(frozen=True)
class Work:
    """A request on the free machine: seconds, and the shares of them that scale with the clock.

    The rest of the time waits for memory. A model of 1 B parameters at 4.5 bits on six A78AE at
    1510 MHz: 64 tokens of prompt are 64 G multiplications at about 80 G/s, 0.8 s, nearly all
    computing (0.9); a token needs 0.56 GB of about 25 GB/s, 80 ms with its cache, mostly memory
    (0.35 computing). A cap lengthens the computing share by 1 / cap, fewer threads alike, a duty
    all of it by 1 / duty.
    """

    prefill_s: float = 0.8
    prefill_computing: float = 0.9
    token_s: float = 0.08
    token_computing: float = 0.35
    tokens: int = 64


def lengthened(seconds: float, computing: float, cap: float | None, threads: float) -> float:
    return seconds * (1.0 - computing + computing / ((cap or 1.0) * threads))


def serve(board: Board, policy: Settings, work: Work) -> tuple[float, float, float]:
    """(mean W, time to the first token in s, tokens/s) of one request after the other, ten minutes.

    The plant's own power model decides: static + dynamic * duty * threads * f * V^2.
    """
    plant, controller = Plant(board, 25.0), Throttle(policy)
    energy, firsts, tokens = 0.0, [], 0
    decision = controller(Inputs(0.0, [Reading("tj", plant.sensor_c())]), board.actuators())
    while plant.now_s < 600.0:
        prefill = replace(
            decision, duty=decision.prefill_duty, threads=decision.prefill_threads,
            freq_cap_fraction=decision.prefill_cap_fraction,
        )  # fmt: skip
        phases = (
            (prefill, work.prefill_s, work.prefill_computing),
            (decision, work.token_s * work.tokens, work.token_computing),
        )
        for index, (now, seconds, computing) in enumerate(phases):
            share = now.threads / board.threads
            busy_s = lengthened(seconds, computing, now.freq_cap_fraction, share)
            wall_s = busy_s / now.duty
            power = board.power_w(now)
            plant.advance(wall_s, power, 25.0)
            energy += power * wall_s
            if index == 0:
                firsts.append(wall_s)
        tokens += work.tokens
        readings = [Reading("tj", plant.sensor_c())]
        decision = controller(Inputs(plant.now_s, readings, power, 25.0), board.actuators())
    seconds = plant.now_s
    return energy / seconds, statistics.mean(firsts[-20:]), tokens / seconds


# Cool enough that only the mode acts: the full load rests at 84 C in air of 25 C.
COOL = replace(POLICY, temp_c=90.0)
FREE = replace(COOL, mode="performance")


def compare(board: Board, policy: Settings, work: Work = Work()) -> tuple[float, float, float]:
    """(power saved, longer first token, throughput lost), each as a share."""
    watts, first, rate = serve(board, FREE, work)
    less, later, slower = serve(board, policy, work)
    return 1.0 - less / watts, later / first - 1.0, 1.0 - slower / rate if rate else 0.0


# A day.

TICK_S = 3.0
NOON_S = 43200.0


def summer(time_s: float) -> float:
    """20 C at three in the night, 45 C at three in the afternoon."""
    return 32.5 - 12.5 * math.cos(2.0 * math.pi * (time_s / 3600.0 - 3.0) / 24.0)


@dataclass(frozen=True)
class Day:
    """What a day of full load in `summer` came to; the fan fails at noon."""

    trace: Trace
    changes: int  # of the level
    worst_hour: int  # changes
    paused_s: float
    avoidable_s: float  # the longest pause while the idle board would rest below 72 C


DAYS = {
    "rests above the threshold even when idle": ORIN,
    "holds without a pause": replace(ORIN, static_w=4.0),
    "nothing but pacing": PI,
}


def day(board: Board, seed: int = 1) -> Day:
    """Full load around the clock, ticks of 3 s."""

    def fan(plant: Plant) -> None:
        plant.fan = plant.now_s < NOON_S

    plant = Plant(board, summer(0.0), seed)
    trace = run(plant, Throttle(POLICY), summer, 86400.0, TICK_S, each=fan)
    levels = [d.level for d in trace.decisions]
    changed = [a != b for a, b in pairwise(levels)]
    per_hour = round(3600.0 / TICK_S)
    return Day(
        trace,
        sum(changed),
        max(sum(changed[i : i + per_hour]) for i in range(0, len(changed), 60)),
        TICK_S * sum(level >= PAUSE for level in levels),
        _avoidable_s(board, trace),
    )


def _avoidable_s(board: Board, trace: Trace) -> float:
    longest, since = 0.0, None
    for time, decision in zip(trace.time_s, trace.decisions, strict=True):
        resistance = board.die_c_per_w + board.sink_c_per_w * (1.0 if time < NOON_S else 2.0)
        idle_c = summer(time) + board.static_w * resistance
        if decision.level < PAUSE or idle_c > SET_C - 3.0:
            since = None
            continue
        since = time if since is None else since
        longest = max(longest, time - since)
    return longest
