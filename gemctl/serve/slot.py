"""What a model is made of: its versions that are loaded, each in a slot, its queue, its figures."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemctl.core import policy, slots
from gemctl.errors import ApiError
from gemctl.events import EventHub
from gemctl.serve import artifact
from gemctl.serve.gaps import Gaps
from gemctl.serve.turns import Engine, Turns
from gemctl.serve.worker import Worker


@dataclass(frozen=True)
class Pace:
    """What the throttle allows every worker."""

    duty: float = 1.0
    threads: int = 0
    prefill_duty: float = 1.0
    prefill_threads: int = 0


HALTED = Pace(duty=0.0, prefill_duty=0.0)


class Slot(Engine):
    """One version of a model on its way through one worker process."""

    def __init__(self, name: str, digest: str, path: Path, hub: EventHub, crashes: slots.Crashes):
        super().__init__()
        self.name = name
        self.digest = digest
        self.path = path
        self.state: slots.State = "empty"
        self.worker: Worker | None = None
        self.declared: artifact.Declared | None = None
        self.thermal = artifact.Thermal()
        self.crashes = crashes
        self.prefilling = False  # a prompt is read: its first token is not here yet
        self.failures = 0  # of requests, since it serves
        self.answers = 0
        self.told: Pace | None = None  # the pace that its worker keeps
        self.yielded_s: float | None = None  # since when it waits for a more urgent model
        self.watch: asyncio.Task[None] | None = None
        self._hub = hub

    def move(self, event: slots.Event, cause: str) -> None:
        """Follow the table. Raises ApiError("conflict") where it refuses."""
        before = self.state
        try:
            self.state = slots.step(before, event)
        except slots.TransitionError as error:
            raise ApiError("conflict", f"{self.name}: {error}") from None
        self._hub.publish(
            "slot.state",
            **{"model": self.name, "digest": self.digest[:12], "from": before, "to": self.state},
            cause=cause,
        )

    @property
    def loaded(self) -> bool:
        """Whether it holds memory."""
        return self.worker is not None

    @property
    def held(self) -> policy.Held:
        """What it takes, for admission."""
        assert self.declared is not None
        return policy.Held(self.name, self.declared.ram_total, self.declared.ram_weights)


# States in which nobody loads a model by himself -> how it is told, and the command that helps.
_UNAVAILABLE: dict[slots.State, tuple[str, str]] = {
    "disabled": ("is disabled", "gemctl model enable {name}"),
    "faulted": ("is faulted", "gemctl model clear {name}, then gemctl model load {name}"),
    "empty": ("is not loaded", "gemctl model load {name}"),
}
UNAVAILABLE = frozenset(_UNAVAILABLE)


def unavailable(name: str, state: slots.State) -> ApiError:
    """The refusal of what a model's state does not allow now."""
    if state not in _UNAVAILABLE:
        return ApiError("busy", f"{name}: is {state}; wait for its end")
    what, remedy = _UNAVAILABLE[state]
    return ApiError("conflict", f"{name}: {what}; {remedy.format(name=name)}")


OTHER_LAYOUT = "another context, KV type or shape than the version that serves"


def other_layout(name: str) -> ApiError:
    """The refusal of a version of another layout, by the daemon or by an attached program."""
    remedy = "compile it alike, or give --allow-layout-change"
    return ApiError("layout", f"{name}: {OTHER_LAYOUT}; {remedy}")


def found_bad(name: str, digest: str) -> ApiError:
    """The refusal of a version that failed before."""
    return ApiError(
        "refused", f"{name}: {digest[:12]} was found bad before; gemctl model clear {name}"
    )


@dataclass
class Figures:
    """Of a model's requests."""

    done: int = 0
    failed: int = 0
    tokens: int = 0
    last: dict[str, Any] = field(default_factory=dict)  # the newest `done` event
    step_ms: float | None = None  # per token, smoothed


@dataclass
class Model:
    """A name, its slots and its queue."""

    name: str
    turns: Turns
    current: Slot | None = None
    candidate: Slot | None = None
    kept: Slot | None = None
    figures: Figures = field(default_factory=Figures)
    swap: dict[str, Any] = field(default_factory=dict)  # of the newest replacement
    gaps: Gaps = field(default_factory=Gaps)
    busy: str = ""  # the procedure that changes it now
    passed: set[str] = field(default_factory=set)  # versions that served since the daemon's start
    priority: int = 1
    probation: asyncio.Task[None] | None = None
    not_kept: str = ""  # why a version that has passed its probation is not the good one yet

    @property
    def state(self) -> slots.State:
        """Of the slot that people mean."""
        slot = self.current or self.candidate
        return slot.state if slot is not None else "empty"

    def slots(self) -> list[Slot]:
        """All that there are."""
        return [s for s in (self.current, self.candidate, self.kept) if s is not None]
