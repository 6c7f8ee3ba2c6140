"""A simulated board for tests of the throttle: heat, sensor, power, its own clock, seeded noise.

    plant = Plant(Board(), seed=1)
    trace = run(plant, controller, ambient, seconds=3600, tick_s=0.5)

Two stages: the die (fast) over the heat sink (slow) over the ambient air. The die gets all of the
power; the sensor shows its temperature 1.5 s late, with noise, in steps of its resolution. A fan
that fails doubles the heat sink's resistance to the air.

Power in watts: static + dynamic * duty * threads / all threads * f * V(f)^2 * cluster, where f and
V are relative to the highest clock. No leakage that grows with temperature, no memory traffic that
differs between models: what the tests claim, they claim of this board.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from gemctl.core.throttle import Actuators, Decision, Inputs, Reading, Settings, start, tick

STEP_S = 0.25  # of the integration; the die's time constant is 3 s


@dataclass(frozen=True)
class Board:
    """Figures near those of an Orin Nano at 25 W: 84 C at rest under full load at 25 C."""

    static_w: float = 7.0
    dynamic_w: float = 17.5
    threads: int = 6
    saturation_threads: int = 4
    freq_min_khz: int | None = 420_000
    freq_max_khz: int | None = 1_510_000
    clusters: tuple[str, ...] = ()
    slow_factor: float = 0.4  # dynamic power of the slow cores
    volts_least: float = 0.6  # at the lowest clock
    die_c_per_w: float = 0.5
    die_tau_s: float = 3.0
    sink_c_per_w: float = 1.9
    sink_tau_s: float = 110.0
    delay_s: float = 1.5
    noise_c: float = 0.3
    resolution_c: float = 0.1
    power_noise: float = 0.02  # of the power

    @property
    def rtheta_c_per_w(self) -> float:
        """Resistance at rest, die to air."""
        return self.die_c_per_w + self.sink_c_per_w

    @property
    def tau_s(self) -> float:
        """The slow time constant: both stages' heat capacity over the sink's resistance."""
        return self.sink_tau_s + self.sink_c_per_w * self.die_tau_s / self.die_c_per_w

    def actuators(self) -> Actuators:
        """What the controller is told."""
        return Actuators(
            self.threads, self.saturation_threads, self.freq_min_khz, self.freq_max_khz,
            self.clusters,
        )  # fmt: skip

    def power_w(self, decision: Decision, busy: float = 1.0) -> float:
        """Power while this is in force; `busy` is the share of time in which there is work."""
        if decision.paused:
            return self.static_w
        cap = 1.0 if decision.freq_cap_fraction is None else decision.freq_cap_fraction
        work = busy * decision.duty * decision.threads / self.threads
        cluster = 1.0 if decision.cluster is None else self.slow_factor
        return self.static_w + self.dynamic_w * work * cap * self.volts(cap) ** 2 * cluster

    def volts(self, cap: float) -> float:
        """Voltage relative to that at the highest clock: a line down to the lowest one."""
        lowest = (self.freq_min_khz or 0) / (self.freq_max_khz or 1)
        return self.volts_least + (1.0 - self.volts_least) * (cap - lowest) / (1.0 - lowest)


@dataclass
class Plant:
    """The board's state. Starts at rest without load."""

    board: Board
    ambient_c: float = 25.0
    seed: int = 1
    now_s: float = 0.0
    fan: bool = True

    def __post_init__(self) -> None:
        self.power_w = self.board.static_w
        self.sink_c = self.ambient_c + self.power_w * self.board.sink_c_per_w
        self.die_c = self.sink_c + self.power_w * self.board.die_c_per_w
        self._random = random.Random(self.seed)
        self._past: deque[tuple[float, float]] = deque([(self.now_s, self.die_c)])

    def advance(self, seconds: float, power_w: float, ambient_c: float) -> None:
        """Lets time pass at this power and ambient temperature."""
        board, left = self.board, seconds
        self.power_w, self.ambient_c = power_w, ambient_c
        resistance = board.sink_c_per_w * (1.0 if self.fan else 2.0)
        heat_capacity = board.sink_tau_s / board.sink_c_per_w  # J/K; the fan does not change it
        while left > 1e-9:
            step = min(STEP_S, left)
            flow = (self.die_c - self.sink_c) / board.die_c_per_w
            lost = (self.sink_c - ambient_c) / resistance
            self.die_c += step * (power_w - flow) * board.die_c_per_w / board.die_tau_s
            self.sink_c += step * (flow - lost) / heat_capacity
            self.now_s += step
            self._past.append((self.now_s, self.die_c))
            left -= step
        while len(self._past) > 1 and self._past[1][0] <= self.now_s - board.delay_s:
            self._past.popleft()

    def sensor_c(self) -> float:
        """What the sensor says now."""
        noisy = self._past[0][1] + self._random.gauss(0.0, self.board.noise_c)
        return round(noisy / self.board.resolution_c) * self.board.resolution_c

    def meter_w(self) -> float:
        """What the power meter says now."""
        return self.power_w * (1.0 + self._random.gauss(0.0, self.board.power_noise))


class Controller(Protocol):
    """Anything that answers a tick."""

    def __call__(self, inputs: Inputs, actuators: Actuators) -> Decision: ...


class Throttle:
    """The controller under test, with its state."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = start(settings)

    def __call__(self, inputs: Inputs, actuators: Actuators) -> Decision:
        self.state, decision = tick(self.state, inputs, actuators, self.settings)
        return decision


@dataclass
class Trace:
    """One row a tick; temperatures are the die's own, not the sensor's."""

    time_s: list[float] = field(default_factory=list)
    die_c: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def peak_c(self, after_s: float = 0.0) -> float:
        """Highest temperature of the die."""
        pairs = zip(self.time_s, self.die_c, strict=True)
        return max(temp for time, temp in pairs if time >= after_s)

    def mean_w(self, after_s: float = 0.0) -> float:
        """Mean power."""
        pairs = zip(self.time_s, self.power_w, strict=True)
        powers = [power for time, power in pairs if time >= after_s]
        return sum(powers) / len(powers)

    def means_w(self, width_s: float, after_s: float = 0.0) -> list[float]:
        """Means of the power over whole steps of `width_s`; a tick's power holds for all of it."""
        ticks = max(1, round(width_s / (self.time_s[1] - self.time_s[0])))
        pairs = zip(self.time_s, self.power_w, strict=True)
        powers = [power for time, power in pairs if time > after_s]
        whole = range(0, len(powers) - ticks + 1, ticks)
        return [sum(powers[i : i + ticks]) / ticks for i in whole]

    def level_changes(self, after_s: float = 0.0) -> int:
        """How often the level changed."""
        levels = [
            d.level for time, d in zip(self.time_s, self.decisions, strict=True) if time >= after_s
        ]
        return sum(a != b for a, b in pairwise(levels))


Readings = Callable[[Plant], Sequence[Reading]]


def plain(plant: Plant) -> list[Reading]:
    """The board's only zone."""
    return [Reading("tj-thermal", plant.sensor_c())]


def run(
    plant: Plant,
    controller: Controller,
    ambient: Callable[[float], float],
    seconds: float,
    tick_s: float = 0.5,
    *,
    readings: Readings = plain,
    power_known: bool = True,
    ambient_known: bool = True,
    busy: Callable[[float], float] = lambda _: 1.0,
    each: Callable[[Plant], None] = lambda _: None,
) -> Trace:
    """Drives the controller for so long. `each` is called before every tick."""
    trace, actuators = Trace(), plant.board.actuators()
    for _ in range(round(seconds / tick_s)):
        each(plant)
        around = ambient(plant.now_s)
        inputs = Inputs(
            plant.now_s,
            readings(plant),
            plant.meter_w() if power_known else None,
            around if ambient_known else None,
            busy=busy(plant.now_s) > 0.0,
        )
        decision = controller(inputs, actuators)
        power = plant.board.power_w(decision, busy(plant.now_s))
        plant.advance(tick_s, power, around)
        trace.time_s.append(plant.now_s)
        trace.die_c.append(plant.die_c)
        trace.power_w.append(power)
        trace.decisions.append(decision)
    return trace
