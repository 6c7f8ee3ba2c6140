"""The throttle: readings in, one decision a tick. A pure function with its state in and out.

    state = start(settings)
    state, decision = tick(state, inputs, actuators, settings)      10 times a second, or slower

Three parts, in this order:

    sensors    every sensor is checked and smoothed by itself; the hottest counts. A sensor that is
               stale or tells nonsense brings the conservative mode, whatever the mode is.
    ladder     how much may be done: a rung more while it is too hot, or will be, and the present
               rung has no more to give; a rung less after it has cooled by the hysteresis.
    duty       within the rung: a PI controller holds the temperature just below the threshold. Its
               feed-forward is the power that the machine can sustain over the power it takes.

The ladder's order: pace and use fewer threads, cap the clock, move to the slow cores, shed load,
pause, unload. Rungs that the machine cannot do are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from gemctl.core import predict
from gemctl.core.silicon import Curve, Silicon

Mode = Literal["performance", "balanced", "aggressive", "conservative", "silent", "off"]

MARGIN_C = 5.0  # a threshold that somebody chose stays so far below the kernel's passive trip
DEFAULT_MARGIN_C = 10.0  # and one that nobody chose, so far
HYSTERESIS_LEAST_C = 3.0
ENGAGE_S = 3.0  # after any change of the rung, before one more
RELEASE_S = 15.0  # and before one less
RELAPSE_S = 120.0  # a rung up so soon after one down: the next one down waits twice as long
RELEASE_MOST_S = 600.0
RELIEF_S = 300.0  # a rung down that lasted so long: the next one waits half as long
SPENT_S = 5.0  # a duty at its least does not show in the line before that
PAUSE_REST_S = 120.0  # a pause waits no longer, however often it came back
PAUSE_LEAST_S = 60.0  # in a pause, before it may end without having cooled by the hysteresis
FAULT_LEAST_S = 15.0  # the fail-safe lasts at least so long

BELOW_C = 1.5  # the duty controller aims so far below the threshold
URGENT_C = 1.0  # so far above it the ladder goes on although its rung has more to give
DUTY_LEAST = 0.05
DUTY_DOWN = 0.2  # per second
DUTY_UP = 0.05
NARROW_C = 8.0  # so far below the threshold the duty begins to grow more slowly
UP_LEAST = 0.3  # of DUTY_UP, at the threshold
TICK_MOST_S = 5.0  # a longer gap between ticks counts as this
LEAD_S = 10.0  # the duty controller looks so far ahead: the line through 20 s is 10 s old
LAG_S = 15.0  # closed loop: time in which the duty controller makes good most of an error
DEGREES_PER_DUTY = 25.0  # at rest, when neither power nor resistance is known
GAIN = 0.2  # duty per degree; what is known of the machine changes it at most by a factor of two
NEAR_C = 0.5  # so near to its aim the duty controller is slower: what it sees there is noise
NEAR_SHARE = 0.25  # of its gain
FILTER_S = 10.0  # of power and duty, for the feed-forward
IDLE_S = 10.0  # without work: the chip has cooled down to its heat sink
LOAD_RISE_C = 12.0  # of the chip over its heat sink in the first seconds of a full load, at most

STALE_S = 5.0
PLAUSIBLE_C = (-40.0, 150.0)
JUMP_C = 20.0  # within JUMP_S
JUMP_S = 1.0
SAMPLES_MOST = 15  # kept of a sensor, besides the newest
SAME_S = 0.01  # readings so close in time are one sample, read twice
GOOD_AGAIN = 3  # samples in order before a faulty sensor is believed


# What goes in.


@dataclass(frozen=True)
class Reading:
    """One sensor's last value. A zone that is switched off reads None."""

    name: str
    celsius: float | None
    age_s: float = 0.0
    external: bool = False


@dataclass(frozen=True)
class Inputs:
    """What is known at a tick. `now_s` comes from a clock that never goes back."""

    now_s: float
    readings: Sequence[Reading]  # every selected sensor, also those without a value
    power_w: float | None = None  # of the whole machine
    ambient_c: float | None = None
    step_time_trend: float | None = None  # growth of the time per token: 0.1 = 10 % longer
    busy: bool | None = None  # is there work; None = not known


@dataclass(frozen=True)
class Actuators:
    """What the machine can do. Clocks in kHz; None = the clock cannot be capped."""

    threads: int
    saturation_threads: int = 0  # more make decoding no faster; 0 = not known
    freq_min_khz: int | None = None
    freq_max_khz: int | None = None
    clusters: tuple[str, ...] = ()  # fastest first; fewer than two: nowhere to move to
    curve: Curve = ()  # volts of the fastest cluster; () = as assumed

    @property
    def can_cap(self) -> bool:
        """True where the clock can be capped."""
        return self.freq_max_khz is not None and self.freq_max_khz > 0

    @property
    def silicon(self) -> Silicon:
        """What a cap does, where the clock can be capped."""
        lowest, highest = (self.freq_min_khz or 0) / 1e3, (self.freq_max_khz or 0) / 1e3
        return Silicon(highest, lowest, curve=self.curve)


@dataclass(frozen=True)
class Settings:
    """The policy in force: configuration, artifact, board and the operator's last word."""

    mode: Mode = "balanced"
    temp_c: float | None = None  # threshold that somebody chose
    hysteresis_c: float = 5.0
    horizon_s: float = predict.HORIZON_S  # 0 switches prediction off
    hw_passive_c: float | None = None  # lowest passive trip of the kernel
    continuous_c: float | None = None  # the board's limit for continuous load
    rtheta_c_per_w: float | None = None  # both from `calibrate thermal`
    tau_s: float | None = None
    duty_most: float = 1.0  # the operator's limit
    allow_unload: bool = False
    shed_tokens: int = 64  # most new tokens of a request while load is shed


@dataclass(frozen=True)
class Profile:
    """What a mode means. `cap` and `duty` are most that is allowed while nothing is hot."""

    duty: float = 1.0
    half_threads: bool = False
    cap: float = 1.0
    prefill_cap: float = 1.0  # of the clock while a prefill runs
    lower_c: float = 0.0  # the threshold is so much lower
    rungs: int = 1  # at a time, upwards
    ahead: float = 1.0  # times the horizon


# A prefill at 0.88 of the clock takes at most 1 / 0.88 = 1.14 times as long, even where all of it
# is computing; at 0.7 of the clock, 1.43 times; at a duty of 0.5, twice as long.
PROFILES: Mapping[Mode, Profile] = MappingProxyType(
    {
        "performance": Profile(ahead=0.0),
        "balanced": Profile(),
        "aggressive": Profile(rungs=2, ahead=2.0),
        "conservative": Profile(duty=0.5, half_threads=True, cap=0.7, prefill_cap=0.88),
        "silent": Profile(duty=0.7, half_threads=True, cap=0.6, prefill_cap=0.75, lower_c=10.0),
        "off": Profile(ahead=0.0),
    }
)
FAIL_SAFE = PROFILES["conservative"]


@dataclass(frozen=True)
class Rung:
    """A step of the ladder. What a rung takes away, the rungs above it take away as well."""

    name: str
    duty_least: float
    threads: Literal["all", "saturation", "half"] = "all"
    cap: float = 1.0
    slow: bool = False  # on the slow cores
    shed: bool = False
    paused: bool = False
    unload: bool = False


# The most power of a rung is not below the least of the one before it, as far as it goes: else
# there would be temperatures that no rung holds, and the ladder would swing between two.
LADDER: tuple[Rung, ...] = (
    Rung("free", 1.0),
    Rung("pace", 0.5),
    Rung("saturation", 0.5, "saturation"),
    Rung("half", 0.5, "half"),
    Rung("cap", 0.5, "half", 0.85),
    Rung("cap more", 0.5, "half", 0.7),
    Rung("slow cores", 0.5, "half", 0.7, True),
    Rung("shed", 0.2, "half", 0.7, True, True),
    Rung("pause", 0.2, "half", 0.7, True, True, True),
    Rung("unload", 0.2, "half", 0.7, True, True, True, True),
)
PAUSE = 8  # number of the rung


# What comes out.


@dataclass(frozen=True)
class Decision:
    """What is to be done until the next tick. `level` is the number of the rung in LADDER."""

    level: int
    duty: float  # busy / (busy + idle) of decoding, 0 < duty <= 1
    threads: int
    cluster: str | None  # None = wherever the threads are by default
    freq_cap_fraction: float | None  # of freq_max_khz; None = no cap
    prefill_duty: float  # the same three for a prefill: never stricter, and milder only where the
    prefill_threads: int  # mode, not heat, slows the machine. The threads are all of them then;
    prefill_cap_fraction: float | None  # duty and clock are spared where the clock can be capped.
    max_new_tokens: int | None
    reject_low_priority: bool
    paused: bool
    unload: bool
    reason: str
    threshold_c: float | None
    temp_c: float | None
    predicted_c: float | None
    conservative_by_fault: bool
    sensor_faults: tuple[tuple[str, str], ...]  # (sensor, what is wrong)


# What is remembered.


@dataclass(frozen=True)
class Track:
    """One sensor: its last samples, and how long it has been telling nonsense."""

    name: str
    samples: tuple[tuple[float, float], ...] = ()  # (time, value) of a second, at least the last 3
    good: int = GOOD_AGAIN  # samples in order since the last one that was not
    fault: str = ""


@dataclass(frozen=True)
class View:
    """A temperature and what becomes of it."""

    temp_c: float
    slope: float
    predicted_c: float
    lead_c: float  # a few seconds ahead, for the duty controller


@dataclass(frozen=True)
class State:
    """Of the controller. Made by `start`; belongs to one machine and one clock."""

    level: int = 0
    duty: float = 1.0
    integral: float | None = None  # of the duty controller; None = not at work
    begin: float | None = None  # duty from which it begins, the next time; None = from the full one
    spent_s: float | None = None  # since when the duty has been at the rung's least
    last_s: float | None = None
    changed_s: float = -math.inf  # when the rung changed
    released_s: float | None = None  # when it last went down; None = it has gone up since
    rest_s: float = RELEASE_S  # before it may go down again
    fault_s: float = -math.inf  # when a sensor was last at fault
    power_w: float | None = None  # both filtered alike
    duty_mean: float = 1.0
    idle_s: float | None = -math.inf  # since when there has been no work; None = there is some
    tracks: tuple[Track, ...] = ()
    predictor: predict.Predictor = field(default_factory=predict.new_predictor)
    outside: predict.Trend = field(default_factory=predict.Trend)  # hottest, external ones included


def start(settings: Settings) -> State:
    """The state before the first tick."""
    known = predict.new_predictor(settings.rtheta_c_per_w, settings.tau_s)
    return State(duty=_duty_most(settings, False), duty_mean=1.0, predictor=known)


def threshold(settings: Settings) -> float | None:
    """Temperature from which the throttle works; None = no limit is known, or the mode is off.

    `performance` leaves all to the kernel up to its passive trip. The other modes stay below it.
    """
    passive = settings.hw_passive_c
    if settings.mode == "off":
        return None
    if settings.mode == "performance":
        return passive
    margin = DEFAULT_MARGIN_C if settings.temp_c is None else MARGIN_C
    limits = [settings.temp_c, None if passive is None else passive - margin]
    if settings.mode == "aggressive":
        limits.append(settings.continuous_c)
    known = [limit for limit in limits if limit is not None]
    return min(known) - PROFILES[settings.mode].lower_c if known else None


def tick(
    state: State, inputs: Inputs, actuators: Actuators, settings: Settings
) -> tuple[State, Decision]:
    """The next state, and what to do until the next tick."""
    now = inputs.now_s
    seconds = 0.0 if state.last_s is None else min(TICK_MOST_S, max(0.0, now - state.last_s))
    state = replace(
        state, tracks=_follow(state.tracks, inputs), idle_s=_idle_since(state, inputs), last_s=now
    )
    faults = _faults(state.tracks, inputs.readings)
    if settings.mode == "off":
        state = replace(state, level=0, duty=1.0, integral=None, fault_s=-math.inf)
        state, view = _look(state, inputs, settings, seconds)  # people look, nothing acts on it
        return state, _decide(state, actuators, settings, view, False, faults, "off")
    state, view = _look(state, inputs, settings, seconds)
    if faults:
        state = replace(state, fault_s=now)
    by_fault = now - state.fault_s < FAULT_LEAST_S
    limit = threshold(settings)
    rungs = _rungs(actuators, settings)
    if limit is None:
        state, why = replace(state, level=0), "no threshold known"
    elif view is None:
        level, why = _blind(state, now, rungs)
        state = _to(state, level, now, actuators)
    else:
        state, level, why = _climb(state, view, limit, rungs, settings, now, bool(faults))
        state = _to(state, level, now, actuators)
    state = _pace(state, view, limit, settings, seconds, by_fault)
    if _idle(state) and state.duty < _duty_most(settings, by_fault) and state.level < PAUSE:
        why = f"{why}; idle, the next load begins at {100 * state.duty:.0f} %"
    return state, _decide(state, actuators, settings, view, by_fault, faults, why)


# Sensors.


def _follow(tracks: tuple[Track, ...], inputs: Inputs) -> tuple[Track, ...]:
    """Every listed sensor's track with its newest sample; sensors not listed are forgotten."""
    if [track.name for track in tracks] != [reading.name for reading in inputs.readings]:
        known = {track.name: track for track in tracks}
        tracks = tuple(known.get(r.name, Track(r.name)) for r in inputs.readings)
    pairs = zip(tracks, inputs.readings, strict=True)
    return tuple(_sample(track, reading, inputs.now_s) for track, reading in pairs)


def _sample(track: Track, reading: Reading, now_s: float) -> Track:
    value, when = reading.celsius, now_s - reading.age_s
    if value is None:
        return replace(track, samples=(), fault="")
    if not reading.age_s <= STALE_S:
        return replace(track, fault=f"last value is {reading.age_s:.0f} s old", good=0)
    if not PLAUSIBLE_C[0] <= value <= PLAUSIBLE_C[1]:
        return replace(track, samples=(), fault=f"{value:g} C is implausible", good=0)
    if track.samples and when < track.samples[-1][0] + SAME_S:
        return track  # the same sample again
    jumped = _jump(track.samples, when, value)
    good = 0 if jumped else min(GOOD_AGAIN, track.good + 1)
    fault = jumped or ("" if good == GOOD_AGAIN else track.fault)
    recent = tuple(s for s in track.samples if when - s[0] <= JUMP_S)
    kept = recent if len(recent) >= 2 else track.samples[-2:]
    return Track(track.name, (*kept[-SAMPLES_MOST:], (when, value)), good, fault)


def _jump(samples: Sequence[tuple[float, float]], when: float, value: float) -> str:
    """What is wrong where the value moved by more than JUMP_C within a second; else nothing."""
    for before_s, before in (*(s for s in samples if when - s[0] <= JUMP_S), *samples[-1:]):
        if abs(value - before) > JUMP_C * max(1.0, (when - before_s) / JUMP_S):
            return f"jumped from {before:.1f} to {value:.1f} C"
    return ""


def _faults(tracks: Sequence[Track], readings: Sequence[Reading]) -> tuple[tuple[str, str], ...]:
    """Sensors that cannot be believed. A zone without a value is none, while another has one."""
    pairs = list(zip(tracks, readings, strict=True))
    found = [(track.name, track.fault) for track, _ in pairs if track.fault]
    inside = any(track.samples or track.fault for track, r in pairs if not r.external)
    found += [(r.name, "gives no value") for t, r in pairs if r.external and r.celsius is None]
    if not inside:
        names = [r.name for r in readings if not r.external]
        found += [(name, "gives no value") for name in names] or [("chip", "no sensor is known")]
    return tuple(found)


def _hottest(tracks: Sequence[Track], readings: Sequence[Reading], outside: bool) -> float | None:
    """Highest of the good sensors' medians of three; external ones only where `outside`."""
    values = [
        _median(track.samples[-3:])
        for track, reading in zip(tracks, readings, strict=True)
        if track.samples and not track.fault and (outside or not reading.external)
    ]
    return max(values, default=None)


def _median(samples: Sequence[tuple[float, float]]) -> float:
    return sorted(value for _, value in samples)[len(samples) // 2]


def _look(
    state: State, inputs: Inputs, settings: Settings, seconds: float
) -> tuple[State, View | None]:
    """The temperature that counts and its prediction; None without a good sensor of the chip."""
    inside = _hottest(state.tracks, inputs.readings, False)
    hottest = _hottest(state.tracks, inputs.readings, True)
    state = _filter(state, inputs.power_w, seconds)
    if inside is None or hottest is None:
        return state, None
    seen = state.predictor.observe(inputs.now_s, inside, inputs.power_w, inputs.ambient_c)
    state = replace(state, predictor=seen)
    horizon = settings.horizon_s * PROFILES[settings.mode].ahead
    settled = inputs.now_s - state.changed_s > predict.SPAN_S
    trend = inputs.step_time_trend if settled else None  # a change of rung changes it as well
    view = _view(seen, inside, horizon, trend)
    if any(reading.external for reading in inputs.readings):
        outside = state.outside.add(inputs.now_s, hottest)
        state = replace(state, outside=outside)
        lowest = min(seen.lowest_c, hottest)
        alone = predict.Predictor(line=outside, tau_known=seen.tau_known, lowest_c=lowest)
        other = _view(alone, hottest, horizon, trend)
        view = View(*(max(a, b) for a, b in zip(_values(view), _values(other), strict=True)))
    return state, view


def _view(seen: predict.Predictor, temp_c: float, horizon_s: float, trend: float | None) -> View:
    if horizon_s <= 0.0:
        return View(temp_c, seen.slope, temp_c, temp_c)
    predicted = seen.ahead(temp_c, horizon_s, trend)
    return View(temp_c, seen.slope, predicted, seen.line_ahead(temp_c, LEAD_S))


def _values(view: View) -> tuple[float, float, float, float]:
    return view.temp_c, view.slope, view.predicted_c, view.lead_c


def _filter(state: State, power_w: float | None, seconds: float) -> State:
    """Power and the duty it was taken at, through the same filter."""
    if power_w is None or not math.isfinite(power_w) or power_w <= 0.0:
        return replace(state, power_w=None)
    if state.power_w is None:
        return replace(state, power_w=power_w, duty_mean=state.duty)
    share = 1.0 - math.exp(-seconds / FILTER_S)
    return replace(
        state,
        power_w=state.power_w + share * (power_w - state.power_w),
        duty_mean=state.duty_mean + share * (state.duty - state.duty_mean),
    )


# The ladder.


@lru_cache(maxsize=16)
def _rungs(actuators: Actuators, settings: Settings) -> tuple[int, ...]:
    """Numbers of the rungs that this machine has, ascending."""
    found = [
        number
        for number, rung in enumerate(LADDER)
        if (number < 2 or _differs(actuators, LADDER[number - 1], rung) or rung.shed)
        and (settings.allow_unload or not rung.unload)
    ]
    return tuple(found)


def _differs(actuators: Actuators, before: Rung, rung: Rung) -> bool:
    """Does this machine do less on `rung` than on the one before it."""
    fewer = _threads(actuators, rung.threads) < _threads(actuators, before.threads)
    slower = rung.cap < before.cap and actuators.can_cap
    moved = rung.slow and not before.slow and len(actuators.clusters) > 1
    return fewer or slower or moved


def _blind(state: State, now_s: float, rungs: Sequence[int]) -> tuple[int, str]:
    """The rung without a temperature: the same, but for a pause, which would never end."""
    if state.level >= PAUSE and now_s - state.changed_s >= PAUSE_LEAST_S:
        return _below(rungs, state.level), "no temperature; the pause has ended"
    return state.level, "no temperature"


def _climb(
    state: State,
    view: View,
    limit: float,
    rungs: Sequence[int],
    settings: Settings,
    now_s: float,
    faulty: bool,
) -> tuple[State, int, str]:
    """The next rung, and why. With a faulty sensor nothing is released but a pause."""
    spent = state.duty <= _duty_least(state.level, settings) + 0.01
    since = state.spent_s if state.spent_s is not None else now_s
    if spent != (state.spent_s is not None):
        state = replace(state, spent_s=since if spent else None)
    rested, level = now_s - state.changed_s, state.level
    why = f"{view.temp_c:.1f} C, threshold {limit:g} C"
    if view.temp_c >= limit:
        urgent = view.temp_c >= limit + URGENT_C
        if rested >= ENGAGE_S and (spent or urgent):
            level = _above(rungs, level, PROFILES[settings.mode].rungs)
        return state, level, why
    if view.predicted_c > limit and view.slope > 0.0:
        lasting = level == 0 or (spent and now_s - since >= SPENT_S)
        if rested >= ENGAGE_S and lasting:  # nobody is paused for what is only predicted
            level = max(level, min(PAUSE - 1, _above(rungs, level, PROFILES[settings.mode].rungs)))
        return state, level, f"{why}: {view.predicted_c:.1f} C predicted"
    if level == 0:
        return state, level, "cool"
    held = faulty and level < PAUSE
    rest = state.rest_s if level < PAUSE else min(state.rest_s, PAUSE_REST_S)
    if rested >= rest and not held and _cooled(state, view, limit, settings, rested):
        return state, _below(rungs, level), f"{why}: cooled"
    return state, level, why


def _cooled(state: State, view: View, limit: float, settings: Settings, rested: float) -> bool:
    """May the rung be left downwards."""
    low = limit - max(HYSTERESIS_LEAST_C, settings.hysteresis_c)
    pausing = state.level >= PAUSE
    if view.temp_c <= low and view.predicted_c <= low:
        return pausing or state.duty >= _duty_most(settings, False) - 0.01
    if LADDER[state.level].shed and not pausing:
        # The rung below does the same at this duty: requests come back, no watt is added.
        within = state.duty >= 0.65 * _duty_most(settings, False)
        return within and max(view.temp_c, view.predicted_c) <= limit
    # Where the surroundings are warmer than `low` a pause would last for ever.
    still = view.temp_c < limit - BELOW_C and view.slope <= 0.02
    return pausing and rested >= PAUSE_LEAST_S and still


def _above(rungs: Sequence[int], level: int, count: int) -> int:
    upper = [rung for rung in rungs if rung > level][:count]
    return upper[-1] if upper else level


def _below(rungs: Sequence[int], level: int) -> int:
    return max((rung for rung in rungs if rung < level), default=0)


def _to(state: State, level: int, now_s: float, actuators: Actuators) -> State:
    """The state on another rung. Who was let go too early waits longer the next time."""
    if level == state.level:
        return state
    moved = replace(state, level=level, changed_s=now_s, spent_s=None)
    if level < state.level:
        # The rung below can do more: the duty goes on from where the power stays the same.
        ratio = _strength(actuators, LADDER[state.level]) / _strength(actuators, LADDER[level])
        lasted = state.released_s is not None and now_s - state.released_s >= RELIEF_S
        rest = max(RELEASE_S, state.rest_s / 2.0) if lasted else state.rest_s
        return replace(moved, released_s=now_s, begin=state.duty * ratio, rest_s=rest)
    rest = state.rest_s
    if state.released_s is not None:
        relapse = now_s - state.released_s < RELAPSE_S
        rest = min(RELEASE_MOST_S, 2.0 * rest) if relapse else RELEASE_S
    return replace(moved, released_s=None, rest_s=rest)


def _strength(actuators: Actuators, rung: Rung) -> float:
    """Dynamic power of a rung at full duty, roughly, relative to the first one's."""
    cap = actuators.silicon.dynamic_factor(rung.cap) if actuators.can_cap else 1.0
    slow = 0.5 if rung.slow and len(actuators.clusters) > 1 else 1.0
    return _threads(actuators, rung.threads) / max(1, actuators.threads) * cap * slow


# The duty.


def _duty_most(settings: Settings, by_fault: bool) -> float:
    most = min(PROFILES[settings.mode].duty, settings.duty_most)
    return max(DUTY_LEAST, min(most, FAIL_SAFE.duty) if by_fault else most)


def _duty_least(level: int, settings: Settings) -> float:
    return max(DUTY_LEAST, LADDER[level].duty_least * _duty_most(settings, False))


def _pace(
    state: State,
    view: View | None,
    limit: float | None,
    settings: Settings,
    seconds: float,
    by_fault: bool,
) -> State:
    """The duty moves to what the controller wants, no faster than its slew limits."""
    most = _duty_most(settings, by_fault)
    least = min(most, _duty_least(state.level, settings))
    ahead = settings.horizon_s * PROFILES[settings.mode].ahead > 0.0 and state.level < PAUSE
    if view is not None and limit is not None and ahead and _idle(state):
        # No load is seen yet, and the next one heats the chip before a sensor can tell.
        pace = _duty_least(max(1, state.level), settings)
        first = min(most, max(pace, _first_duty(view, limit)))
        return replace(state, duty=min(first, state.duty + DUTY_UP * seconds), begin=None)
    if view is None or limit is None:
        wanted = min(state.duty, most) if limit is not None else most
    elif state.level == 0:
        state, wanted = replace(state, integral=None, begin=None), most
    elif state.level >= PAUSE:
        state, wanted = replace(state, integral=None), least
    else:
        state, wanted = _control(state, view, limit, settings, seconds, least, most)
    low, high = state.duty - DUTY_DOWN * seconds, state.duty + _up(view, limit) * seconds
    return replace(state, duty=min(1.0, max(DUTY_LEAST, min(high, max(low, wanted)))))


def _up(view: View | None, limit: float | None) -> float:
    """How fast the duty may grow, per second: what it adds shows in a sensor seconds later."""
    if view is None or limit is None:
        return DUTY_UP
    return DUTY_UP * min(1.0, max(UP_LEAST, (limit - view.temp_c) / NARROW_C))


def _idle_since(state: State, inputs: Inputs) -> float | None:
    """Since when there has been no work: for ever before the first tick; None = there is some, or
    nobody knows."""
    if inputs.busy is None:
        return None
    if inputs.busy:
        return state.idle_s if state.last_s is None else None
    return inputs.now_s if state.idle_s is None else state.idle_s


def _idle(state: State) -> bool:
    since, now = state.idle_s, state.last_s
    return since is not None and now is not None and now - since >= IDLE_S


def _first_duty(view: View, limit: float) -> float:
    """With which the next load begins: what it adds within seconds has to fit below the limit."""
    return (limit - BELOW_C - view.temp_c) / LOAD_RISE_C


def _calm(error: float) -> float:
    """The error as the duty controller takes it: within NEAR_C mostly the sensor's noise."""
    return error - (1.0 - NEAR_SHARE) * min(NEAR_C, max(-NEAR_C, error))


def _control(
    state: State,
    view: View,
    limit: float,
    settings: Settings,
    seconds: float,
    least: float,
    most: float,
) -> tuple[State, float]:
    """PI with feed-forward; the integral rests while the output is at its limit."""
    error = _calm(limit - BELOW_C - view.lead_c)
    degrees, tau = _plant(state)
    gain = min(2.0 * GAIN, max(0.5 * GAIN, tau / (degrees * LAG_S)))
    forward = _forward(state, limit, settings)
    base = 1.0 if forward is None else forward
    integral = state.integral if state.integral is not None else 0.0
    if state.begin is not None:
        integral, state = state.begin - base - gain * error, replace(state, begin=None)
    output = base + gain * error + integral
    inward = (output < most or error < 0.0) and (output > least or error > 0.0)
    if inward:
        integral = min(1.5, max(-1.5, integral + gain / tau * error * seconds))
    return replace(state, integral=integral), min(most, max(least, base + gain * error + integral))


def _plant(state: State) -> tuple[float, float]:
    """(degrees at rest per unit of duty, time constant), as far as known."""
    seen = state.predictor
    degrees = DEGREES_PER_DUTY
    if seen.rtheta is not None and state.power_w is not None:
        degrees = seen.rtheta * state.power_w / max(0.1, state.duty_mean)
    return min(100.0, max(5.0, degrees)), min(300.0, max(30.0, seen.tau_s))


def _forward(state: State, limit: float, settings: Settings) -> float | None:
    """Duty at which the power can be sustained: P_s / P at full duty; None = not known."""
    seen = state.predictor
    if state.power_w is None or seen.rtheta is None or seen.ambient_c is None:
        return None
    if settings.horizon_s * PROFILES[settings.mode].ahead <= 0.0:
        return None
    offset = seen.fit.offset_c if seen.confidence >= 0.5 else 0.0
    sustained = (limit - BELOW_C - seen.ambient_c - offset) / seen.rtheta
    full = state.power_w / max(0.1, state.duty_mean)
    return min(1.0, max(0.0, sustained / full))


# The decision.


def _threads(actuators: Actuators, which: Literal["all", "saturation", "half"]) -> int:
    everything = max(1, actuators.threads)
    if which == "all":
        return everything
    saturation = min(everything, actuators.saturation_threads or everything)
    return saturation if which == "saturation" else min(saturation, max(1, everything // 2))


def _cap(actuators: Actuators, fraction: float) -> float | None:
    """The cap as the machine can do it; None = none."""
    if not actuators.can_cap or fraction >= 1.0:
        return None
    lowest = (actuators.freq_min_khz or 0) / (actuators.freq_max_khz or 1)
    return min(1.0, max(fraction, lowest))


def _decide(
    state: State,
    actuators: Actuators,
    settings: Settings,
    view: View | None,
    by_fault: bool,
    faults: tuple[tuple[str, str], ...],
    why: str,
) -> Decision:
    profile, rung = PROFILES[settings.mode], LADDER[state.level]
    if by_fault:
        stricter = min(profile.cap, FAIL_SAFE.cap)
        profile = replace(profile, half_threads=True, cap=stricter, prefill_cap=stricter)
    half = profile.half_threads or rung.threads == "half"
    threads = _threads(actuators, "half" if half else rung.threads)
    cap = _cap(actuators, min(profile.cap, rung.cap))
    spared = state.level == 0 and profile.prefill_cap > profile.cap
    slow = rung.slow and len(actuators.clusters) > 1
    if by_fault:
        what = ", ".join(f"{name} {fault}" for name, fault in faults)
        what = (
            f"sensor fault: {what}"
            if faults
            else f"less than {FAULT_LEAST_S:g} s after a sensor fault"
        )
        why = f"{why}; {what}, so as careful as conservative"
    return Decision(
        level=state.level,
        duty=state.duty,
        threads=threads,
        cluster=actuators.clusters[-1] if slow else None,
        freq_cap_fraction=cap,
        prefill_duty=max(state.duty, settings.duty_most) if spared and cap else state.duty,
        prefill_threads=_threads(actuators, "all") if spared else threads,
        prefill_cap_fraction=_cap(actuators, profile.prefill_cap) if spared else cap,
        max_new_tokens=settings.shed_tokens if rung.shed else None,
        reject_low_priority=rung.shed,
        paused=rung.paused,
        unload=rung.unload,
        reason=f"{settings.mode}, {rung.name}: {why}" if settings.mode != "off" else "off",
        threshold_c=threshold(settings),
        temp_c=None if view is None else view.temp_c,
        predicted_c=None if view is None else view.predicted_c,
        conservative_by_fault=by_fault,
        sensor_faults=faults,
    )
