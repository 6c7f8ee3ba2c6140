"""Decisions on memory, order of requests and rollout: numbers in, one decision out.

admit, plan_replace    may a model be loaded; beside the one that serves, or in its place
order, admit_request   which request is next; can a new one meet its deadline
threshold_note         why the throttle's threshold is not the one that was asked for
decide_rollout         next stage of a staged rollout, or halt
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from gemctl.core import throttle

MIB = 1 << 20
RAM_FRACTION = 0.65


# Memory.


@dataclass(frozen=True)
class Memory:
    """The machine's memory, in bytes, as the kernel says it now."""

    total: int  # MemTotal
    available: int  # MemAvailable
    reserve: int = 256 * MIB  # left to everything else
    fraction: float = RAM_FRACTION  # of the total, for all models together
    most: int = 0  # the operator's limit for all models together; 0 = none

    @property
    def ceiling(self) -> int:
        """What all models together may take."""
        share = int(self.total * self.fraction)
        return min(share, self.most) if self.most else share


@dataclass(frozen=True)
class Held:
    """A model that is loaded, or wants to be."""

    name: str
    size: int  # what its artifact declares, in bytes
    mapped: int = 0  # of that, weights mapped from a file and not locked: "available" to the kernel
    pinned: bool = False  # nobody may unload it


@dataclass(frozen=True)
class Admission:
    """Whether a model may be loaded now. `short` is what lacks, in bytes."""

    fits: bool
    budget: int  # what was left for it, in bytes
    short: int
    sentence: str


def budget(memory: Memory, loaded: Sequence[Held] = ()) -> int:
    """Bytes left for one more model: min(65 % of the total, available less a reserve).

    What is loaded counts against the first by its size. The second already lacks it, but for the
    mapped weights: the kernel would give their pages away, and the model would read them again.
    """
    share = memory.ceiling - sum(model.size for model in loaded)
    free = memory.available - memory.reserve - sum(model.mapped for model in loaded)
    return max(0, min(share, free))


def admit(memory: Memory, loaded: Sequence[Held], wanted: Held) -> Admission:
    """May `wanted` be loaded beside what is loaded."""
    left = budget(memory, loaded)
    short = max(0, wanted.size - left)
    if not short:
        sentence = f"{wanted.name}: needs {_mib(wanted.size)} of {_left(left)} that are left"
        return Admission(True, left, 0, sentence)
    others = ", ".join(_loaded(model) for model in loaded) or "none"
    sentence = (
        f"{wanted.name}: needs {_mib(wanted.size)}, {_left(left)} are left of "
        f"{_left(memory.ceiling)} for all models ({_left(memory.available)} available, "
        f"{_mib(memory.reserve)} kept in reserve; loaded: {others}); "
        f"{_remedy(memory, loaded, wanted)}"
    )
    return Admission(False, left, short, sentence)


def _loaded(model: Held) -> str:
    return f"{model.name} {_mib(model.size)}{' pinned' if model.pinned else ''}"


def _remedy(memory: Memory, loaded: Sequence[Held], wanted: Held) -> str:
    """The smallest model to unload, where one is enough, and a pinned one only where none of the
    others is; else what else helps."""
    for model in sorted(loaded, key=lambda held: (held.pinned, held.size, held.name)):
        if wanted.size <= budget(_without(memory, model), _rest(loaded, model)):
            return unloading(model.name, model.pinned)
    smaller = "compile it with a smaller --kv-cache-size"
    if loaded and all(model.pinned for model in loaded):
        smaller = (
            f"all models are pinned: gemctl model pin NAME --off and unload some, or {smaller}"
        )
    elif loaded:
        smaller = f"unload other models, or {smaller}"
    return smaller


def unloading(name: str, pinned: bool) -> str:
    """What to type so that a model is unloaded, which a pinned one is not as it is."""
    first = f"gemctl model pin {name} --off, then " if pinned else ""
    return f"{first}gemctl model unload {name}"


def _without(memory: Memory, model: Held) -> Memory:
    """The memory after a model was unloaded."""
    available = min(memory.total, memory.available + model.size - model.mapped)
    return Memory(memory.total, available, memory.reserve, memory.fraction, memory.most)


def _rest(loaded: Sequence[Held], gone: Held) -> list[Held]:
    return [model for model in loaded if model.name != gone.name]


@dataclass(frozen=True)
class ReplacePlan:
    """How a candidate comes in: beside the old one, in its place, or not at all."""

    strategy: Literal["overlap", "serial", "refuse"]
    sentence: str
    gap_s: float = 0.0  # expected time without an answer


def plan_replace(
    memory: Memory,
    loaded: Sequence[Held],
    old: Held | None,
    candidate: Held,
    read_mbps: float = 800.0,
    warm_s: float = 0.5,
) -> ReplacePlan:
    """Overlap where both fit, else serial with its expected gap, else refuse.

    `read_mbps` (decimal MB/s) is the rate at which the candidate's weights come in, `warm_s` the
    time of its warm-up. Whether the caller accepts `serial` is not decided here.
    """
    beside = admit(memory, loaded, candidate)
    if beside.fits or old is None:
        strategy: Literal["overlap", "refuse"] = "overlap" if beside.fits else "refuse"
        return ReplacePlan(strategy, beside.sentence)
    alone = admit(_without(memory, old), _rest(loaded, old), candidate)
    if not alone.fits:
        return ReplacePlan("refuse", alone.sentence)
    gap = candidate.size / (read_mbps * 1e6) + warm_s
    sentence = (
        f"{candidate.name}: needs {_mib(candidate.size)}, {_left(beside.budget)} are left beside "
        f"{old.name} ({_mib(old.size)}) and {_left(alone.budget)} without it; a serial replacement "
        f"answers nothing for about {gap:.1f} s"
    )
    return ReplacePlan("serial", sentence, gap)


def _mib(size: int) -> str:
    return f"{math.ceil(size / MIB)} MiB"


def _left(size: int) -> str:
    return f"{size // MIB} MiB"


# Requests.

STARVED_S = 10.0


@dataclass(frozen=True)
class Waiting:
    """A request in the queue. Classes: 0 goes first; `deadline_s` is a point in time."""

    id: str
    arrival_s: float
    model_class: int = 1
    request_class: int = 1
    deadline_s: float | None = None


def order(
    queue: Sequence[Waiting], now_s: float, starved_s: float = STARVED_S
) -> tuple[Waiting, ...]:
    """The queue in the order in which it is to be served.

    By class of the model, class of the request, earliest deadline, arrival. What has waited for
    `starved_s` goes before all of that, oldest first: after that time only such requests are served
    before a request that had arrived before it, so nothing waits for ever behind a higher class.
    """

    def key(request: Waiting) -> tuple[float, ...]:
        if now_s - request.arrival_s >= starved_s:
            return (0.0, request.arrival_s)
        deadline = math.inf if request.deadline_s is None else request.deadline_s
        classes = (float(request.model_class), float(request.request_class))
        return (1.0, *classes, deadline, request.arrival_s)

    return tuple(sorted(queue, key=key))


def expired(queue: Sequence[Waiting], now_s: float) -> tuple[Waiting, ...]:
    """Requests whose deadline has passed: they are answered with an error, not served."""
    return tuple(r for r in queue if r.deadline_s is not None and r.deadline_s <= now_s)


def low_priority(request: Waiting, least_class: int = 1) -> bool:
    """True for what is turned away while the throttle sheds load."""
    return max(request.model_class, request.request_class) > least_class


def admit_request(
    request: Waiting,
    now_s: float,
    work_ahead_s: float,
    first_token_s: float,
    tokens: int,
    tokens_per_s: float,
) -> str | None:
    """None where the request can be done in time, else why not. Estimates come from the caller.

    `work_ahead_s` is what goes before it (see `order`). Unknown speed (0) admits.
    """
    if request.deadline_s is None or tokens_per_s <= 0.0:
        return None
    left = request.deadline_s - now_s
    wanted = work_ahead_s + first_token_s + max(0, tokens - 1) / tokens_per_s
    if wanted <= left:
        return None
    return (
        f"request {request.id}: needs about {wanted * 1000:.0f} ms ({work_ahead_s * 1000:.0f} ms "
        f"behind others), its deadline is in {max(0.0, left) * 1000:.0f} ms; ask for fewer tokens "
        "or allow more time"
    )


# Threshold.


def threshold_note(settings: throttle.Settings) -> str:
    """Why the threshold in force is not the one that was asked for; empty where it is."""
    asked, in_force, mode = settings.temp_c, throttle.threshold(settings), settings.mode
    if asked is None or asked == in_force:
        return ""
    if mode in ("off", "performance"):
        what = "watches nothing" if mode == "off" else "leaves it to the kernel's own limit"
        return f"{asked:g} C is kept, but the mode {mode} {what}"
    why = []
    passive, margin = settings.hw_passive_c, throttle.MARGIN_C
    limits = [] if passive is None else [(passive - margin, f"{margin:g} C below the kernel's own")]
    if mode == "aggressive" and settings.continuous_c is not None:
        limits.append((settings.continuous_c, "the board's for continuous load"))
    least, words = min(limits, default=(asked, ""))
    if least < asked:
        why.append(f"the limit here is {least:g} C, {words}")
    if throttle.PROFILES[mode].lower_c:
        why.append(f"the mode {mode} takes {throttle.PROFILES[mode].lower_c:g} C off")
    return f"{asked:g} C was asked for, but {' and '.join(why)}"


# Rollout.


@dataclass(frozen=True)
class Counts:
    """Devices of a rollout: each that was started is good, bad, refused, lost or still at it."""

    total: int
    started: int = 0
    good: int = 0  # probation passed
    bad: int = 0  # rolled back
    lost: int = 0  # not heard of for longer than the rollout waits
    refused: int = 0  # did not take it


@dataclass(frozen=True)
class Rollout:
    """What to do next. `devices` is how many more to start."""

    action: Literal["start", "wait", "halt", "done"]
    devices: int
    stage: int  # index of the percentage that is being worked on
    sentence: str


def decide_rollout(
    percents: Sequence[float], counts: Counts, bad_most: int = 0, lost_percent: float = 2.0
) -> Rollout:
    """Next step of a staged rollout; halts by itself.

    A stage is over when all of its devices are good, or lost within `lost_percent` of those
    started. More than `bad_most` rollbacks and refusals, or more losses, halt: nothing is started
    any more, and what was started ends by its own probation. The last stage is everything, named or
    not. Raises
    ValueError for percentages that do not ascend within 0..100, and counts that do not add up.
    """
    _check_rollout(percents, counts)
    stages = [*percents, 100.0] if percents[-1] < 100.0 else list(percents)
    targets = [math.ceil(counts.total * percent / 100.0) for percent in stages]
    stage = next((i for i, n in enumerate(targets) if counts.started < n), len(targets) - 1)
    lost_most = counts.started * lost_percent / 100.0
    if counts.bad + counts.refused > bad_most:
        says = f"{_bad_words(counts)}, {bad_most} allowed"
        return Rollout("halt", 0, stage, f"rollout halted: {says}; look at their reasons")
    if counts.lost > lost_most:
        says = f"{counts.lost} of {counts.started} devices fell silent, {lost_percent:g} % allowed"
        return Rollout("halt", 0, stage, f"rollout halted: {says}; look for them")
    open_now = counts.started - counts.good - counts.bad - counts.refused - counts.lost
    if counts.started >= counts.total and not open_now:
        return Rollout("done", 0, stage, f"rollout done: {counts.good} of {counts.total} good")
    # Devices of an earlier, unfinished start of the same stage are made up for before any wait.
    reached = max((n for n in targets if n <= counts.started), default=0)
    if open_now and counts.started == reached:
        says = f"{open_now} of {counts.started} devices still on probation"
        return Rollout("wait", 0, max(0, stage - 1) if counts.started else 0, says)
    more = targets[stage] - counts.started
    says = f"stage {stages[stage]:g} %: start {more} of {counts.total} devices"
    return Rollout("start", more, stage, says)


def _bad_words(counts: Counts) -> str:
    devices = f"of {counts.started} devices"
    rolled_back = f"{counts.bad} {devices} rolled back" if counts.bad else ""
    refused = f"{counts.refused} {devices} refused the version" if counts.refused else ""
    return " and ".join(filter(None, (rolled_back, refused)))


def _check_rollout(percents: Sequence[float], counts: Counts) -> None:
    ascending = all(a < b for a, b in pairwise(percents))
    if not percents or not ascending or percents[0] <= 0.0 or percents[-1] > 100.0:
        raise ValueError("rollout: percentages must ascend within 0..100; for example 5 50 100")
    ends = (counts.good, counts.bad, counts.refused, counts.lost)
    if min(ends) < 0 or not sum(ends) <= counts.started <= counts.total:
        raise ValueError(f"rollout: {counts} does not add up; count every device once")
