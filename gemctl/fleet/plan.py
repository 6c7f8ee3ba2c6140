"""What a rollout is told, what it tells, and its next step: numbers and names, no broker."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gemctl.config import MqttConfig
from gemctl.core.policy import Counts, decide_rollout

DISCOVER_S = 5.0
PARALLEL = 20  # devices at it at once: their events have to fit into the broker's queue
# Why a device cannot take part: it is not there, or has no such model; the version is not in its
# store, or was found bad there; it answered something else. Each is an outcome as well.
UNREADY = ("offline", "absent", "not_staged", "bad_version", "unready")
# pending: not started; running: started; lost: silent for too long
Outcome = Literal[
    "pending", "running", "good", "rolled_back", "refused", "lost",
    "offline", "absent", "not_staged", "bad_version", "unready",
]  # fmt: skip


@dataclass(frozen=True)
class RolloutOptions:
    """`percents` ascend, of the devices that are ready; the last one is where it ends.

    More than `max_bad` devices that roll back or refuse halt it, and so do devices of which nothing
    is heard for `timeout_s` seconds (one in fifty may). `digest` may be its first 8 characters or
    more. `skip_unready`: devices that are not ready are left out instead of keeping it from
    beginning.
    """

    broker: MqttConfig
    name: str
    digest: str
    percents: tuple[float, ...] = (5.0, 50.0, 100.0)
    group: str = ""
    max_bad: int = 0
    timeout_s: float = 600.0
    parallel: int = PARALLEL
    method: Literal["model.replace", "model.switch"] = "model.replace"
    serial: bool = False
    allow_layout_change: bool = False
    skip_unready: bool = False
    discover_s: float = DISCOVER_S


@dataclass(frozen=True)
class Row:
    """A device of the table at the end. `stage`: the percentage it was, or would be, started in;
    `reason`: why it ended so, in its own words where it has some; `seconds`: how long it took."""

    device: str
    stage: float | None
    outcome: Outcome
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Progress:
    """Something happened: a device's news, or (device "") the rollout's own sentence.

    `done` of `total` devices have ended; `left_s` is an estimate, where there is one.
    """

    device: str
    outcome: str
    text: str
    done: int = 0
    total: int = 0
    left_s: float | None = None


@dataclass(frozen=True)
class RolloutResult:
    """How it ended; rows in the order in which devices are chosen, those left out after them.

    `refused`: it did not begin, because devices are not ready.
    """

    action: Literal["done", "halt", "refused"]
    sentence: str
    rows: tuple[Row, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Devices by outcome."""
        return dict(Counter(row.outcome for row in self.rows))


@dataclass(frozen=True)
class Decision:
    """What to do now, with which devices, in which stage."""

    action: Literal["start", "wait", "halt", "done"]
    devices: tuple[str, ...]
    sentence: str
    stage: float | None = None


def order(devices: Sequence[str], digest: str) -> list[str]:
    """Devices as they are chosen: by chance, but by the same one in every run."""

    def key(name: str) -> bytes:
        return hashlib.sha256(f"{name}\n{digest}".encode()).digest()

    return sorted(devices, key=key)


def chosen(devices: Sequence[str], percents: Sequence[float]) -> Sequence[str]:
    """Those up to the last percentage, rounded up."""
    return devices[: math.ceil(len(devices) * percents[-1] / 100.0)]


def stage_of(place: int, total: int, percents: Sequence[float]) -> float | None:
    """The percentage that reaches the device at a place, from 0; None where none does."""
    return next((p for p in percents if place < math.ceil(total * p / 100.0)), None)


def decide(
    devices: Sequence[str],
    outcomes: Mapping[str, Outcome],
    percents: Sequence[float],
    max_bad: int = 0,
    parallel: int = PARALLEL,
) -> Decision:
    """The next step of a rollout over `devices`, in the order in which they are chosen.

    Devices without an outcome are pending. Raises ValueError for percentages that do not ascend
    within 0..100.
    """
    decide_rollout(percents, Counts(0))  # only to check the percentages
    last = percents[-1]
    wanted = chosen(devices, percents)
    if not wanted:
        return Decision("done", (), "rollout done: no device is concerned")
    found = [outcomes.get(device, "pending") for device in devices]
    pending = found[: len(wanted)].count("pending")
    ends = Counter(found)
    # Devices outside `wanted` that have the version are not counted: they take nobody's place.
    good = ends["good"] - found[len(wanted) :].count("good")
    bad, refused, lost, running = (
        ends[word] for word in ("rolled_back", "refused", "lost", "running")
    )
    started = good + bad + refused + lost + running
    total = pending + started
    counts = Counts(total, started, good, bad, lost, refused)
    step = decide_rollout([p * 100.0 / last for p in percents[:-1]] + [100.0], counts, max_bad)
    stage = percents[min(step.stage, len(percents) - 1)]
    if step.action != "start":
        says = f"{stage:g} %: {running} on probation" if step.action == "wait" else ""
        return Decision(step.action, (), says or step.sentence, stage)
    room = max(0, min(step.devices, parallel - running))
    next_ones = [d for d in wanted if outcomes.get(d, "pending") == "pending"][:room]
    if not next_ones:
        return Decision("wait", (), f"{stage:g} %: {running} under way", stage)
    says = f"{stage:g} %: {len(next_ones)} of {total} devices started"
    return Decision("start", tuple(next_ones), says, stage)


def time_left(
    took: Sequence[float], running: Sequence[float], stages: Sequence[int], parallel: int
) -> float | None:
    """Seconds to the end, where the rest takes as long as those that are good (`took`, seconds).

    `running`: how long those under way have been at it; `stages`: how many each stage has still to
    start. Stages wait for each other. None before the first one is good.
    """
    if not took:
        return None
    mean = sum(took) / len(took)
    under_way = max((max(0.0, mean - seconds) for seconds in running), default=0.0)
    return under_way + mean * sum(math.ceil(count / parallel) for count in stages)
