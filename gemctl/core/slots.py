"""A slot: one version of a model on its way through one worker process, as a table.

`TABLE[state][event]` is the next state, or a Refusal that says what to do instead; every pair has
an entry. The daemon asks `step` first and acts afterwards, so nothing happens that the table does
not allow. A model has one slot for the version that serves, and a second one beside it while a
candidate is tried or while the version before it is kept for a rollback:

    load      load, verified, loaded, warmed, activate
    switch    other slot: activate; this slot: deactivate (stays warm), or drain, drained
    replace   candidate: stage, staged, verified, loaded, warmed, activate; the one before it:
              drain, then `retain` (memory for both: it waits in standby through the probation),
              or `drained`; at the end of a good probation the retained one gets `unload`
    rollback  the one before: activate, out of standby or even while it drains; candidate: fail
              (its answers cannot be trusted) or drain, drained
    disable   drain, disable; enable: loaded, warmed, activate follow
    crash     the slot is loading again; the daemon waits Crashes.next_delay and sends `restart`;
              after too many crashes it sends `give_up`, and the slot stays faulted until
              `clear`, or `stage` of another file
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

State = Literal[
    "empty",  # no process, no memory
    "staging",  # the file is being copied into the store
    "verifying",  # structure, checksums, signature, board, memory
    "loading",  # the worker starts, or waits to be started again after a crash
    "warming",  # pages are touched, the warm-up prompt and the stored test vectors run
    "standby",  # ready, gets no requests; earlier ones may still end
    "serving",  # gets the requests
    "draining",  # gets no requests, those in flight end
    "disabled",  # no process, by the operator's wish, also after a reboot
    "faulted",  # crashed too often, or gave wrong answers
]
Event = Literal[
    "stage",  # copy a file into the store
    "staged",  # the file is in the store
    "load",  # start a version that is in the store
    "verified",  # all checks passed
    "loaded",  # the worker has the file mapped and planned
    "warmed",  # warm-up and test vectors passed
    "activate",  # requests go here from now on
    "deactivate",  # requests go elsewhere, the slot stays warm
    "drain",  # requests go elsewhere, the slot is to be given up
    "retain",  # drained, kept warm for a rollback
    "drained",  # nothing in flight, the worker has ended
    "unload",  # give up now, nothing of it is in flight
    "disable",  # the operator switches the model off
    "enable",  # and on again
    "fail",  # a step failed, or the answers are wrong
    "crash",  # the worker ended by itself, or was killed because it hung
    "restart",  # the delay after a crash has passed: the worker is started again
    "give_up",  # too many crashes within the window
    "clear",  # the operator has seen the fault
]
STATES: tuple[State, ...] = get_args(State)
EVENTS: tuple[Event, ...] = get_args(Event)

# States that have a worker process, or will have one without anybody asking again.
WITH_WORKER: frozenset[State] = frozenset({"loading", "warming", "standby", "serving", "draining"})


class Refusal(NamedTuple):
    """Why a pair of state and event leads nowhere."""

    sentence: str


class TransitionError(Exception):
    """An event that the slot's state does not allow. Text: `<what is wrong>; <what to do>`."""

    def __init__(self, state: State, event: Event, sentence: str) -> None:
        super().__init__(sentence)
        self.state = state
        self.event = event


_BEFORE: tuple[State, ...] = ("staging", "verifying", "loading", "warming")
_UP: tuple[State, ...] = ("warming", "standby", "serving")

# event -> state -> next state. What is not named here is refused.
_ALLOWED: Mapping[Event, Mapping[State, State]] = {
    "stage": {"empty": "staging", "faulted": "staging"},
    "staged": {"staging": "verifying"},
    "load": {"empty": "verifying"},
    "verified": {"verifying": "loading"},
    "loaded": {"loading": "warming"},
    "warmed": {"warming": "standby"},
    "activate": {"standby": "serving", "draining": "serving"},
    "deactivate": {"serving": "standby"},
    "drain": {"serving": "draining", "standby": "draining"},
    "retain": {"draining": "standby"},
    "drained": {"draining": "empty"},
    "unload": {**dict.fromkeys(_BEFORE, "empty"), "standby": "empty"},
    "disable": {
        "empty": "disabled",
        **dict.fromkeys(_BEFORE, "disabled"),
        "standby": "disabled",
        "draining": "disabled",
    },
    "enable": {"disabled": "loading"},
    # What never served is dropped; what gave wrong answers must be looked at.
    "fail": {
        **dict.fromkeys(_BEFORE, "empty"),
        "standby": "faulted",
        "serving": "faulted",
        "draining": "empty",
    },
    "crash": {"loading": "loading", **dict.fromkeys(_UP, "loading"), "draining": "empty"},
    "restart": {"loading": "loading"},
    "give_up": {"loading": "faulted"},
    "clear": {"faulted": "empty"},
}

# Why a state takes none of the other events, and what helps.
_STATE_SAYS: Mapping[State, str] = {
    "empty": "nothing is loaded; load or stage a version first",
    "staging": "a file is being copied; wait for it, or unload to stop it",
    "verifying": "the file is being checked; wait for it, or unload to stop it",
    "loading": "the worker is starting; wait for it, or unload to stop it",
    "warming": "the model is warming up; wait for it, or unload to stop it",
    "standby": "the model waits in standby; activate it, or drain or unload it",
    "serving": "the model serves; drain or deactivate it first",
    "draining": "requests in flight are ending; wait for them, or activate the model again",
    "disabled": "the model is disabled; enable it first",
    "faulted": "the model is faulted; clear it, or give it another file",
}

# Pairs whose general sentence would mislead.
_SPECIAL: Mapping[tuple[State, Event], str] = {
    ("serving", "activate"): "the model serves already; nothing to do",
    ("standby", "deactivate"): "the model is in standby already; nothing to do",
    ("draining", "drain"): "the model drains already; wait for it",
    ("disabled", "disable"): "the model is disabled already; nothing to do",
    ("disabled", "unload"): "the model is disabled and holds no memory; nothing to do",
    ("empty", "unload"): "nothing is loaded; nothing to do",
    ("empty", "drain"): "nothing is loaded; nothing to do",
    ("empty", "clear"): "the model has no fault; nothing to do",
    ("empty", "enable"): "the model is not disabled; load it",
    ("serving", "enable"): "the model is not disabled and serves already; nothing to do",
    ("serving", "load"): "the model is loaded and serves already; nothing to do",
    ("standby", "load"): "the model is loaded already; activate it",
}


def _entry(state: State, event: Event) -> State | Refusal:
    following = _ALLOWED[event].get(state)
    if following is not None:
        return following
    return Refusal(_SPECIAL.get((state, event)) or f"{event} refused: {_STATE_SAYS[state]}")


TABLE: Mapping[State, Mapping[Event, State | Refusal]] = MappingProxyType(
    {state: MappingProxyType({event: _entry(state, event) for event in EVENTS}) for state in STATES}
)


def step(state: State, event: Event) -> State:
    """The state after an event. Raises TransitionError where the table refuses."""
    entry = TABLE[state][event]
    if isinstance(entry, Refusal):
        raise TransitionError(state, event, entry.sentence)
    return entry


def allowed(state: State) -> tuple[Event, ...]:
    """Events that a state takes, in the order of EVENTS."""
    return tuple(event for event in EVENTS if not isinstance(TABLE[state][event], Refusal))


def table_text() -> str:
    """The table for people: a row an event, a column a state, `-` where it refuses."""
    rows: list[list[str]] = [["", *STATES]]
    for event in EVENTS:
        entries = [TABLE[state][event] for state in STATES]
        rows.append([event, *("-" if isinstance(e, Refusal) else e for e in entries)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(STATES) + 1)]
    lines = (
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


@dataclass(frozen=True)
class Crashes:
    """Crashes of one slot's worker. `times_s` come from a clock that never goes back."""

    times_s: tuple[float, ...] = ()  # ascending, none older than the window at the last crash
    most: int = 3  # this many within the window: give up
    window_s: float = 300.0
    first_s: float = 0.2  # before the first restart; doubles with every crash in the window
    most_s: float = 30.0  # the longest delay

    def add(self, now_s: float) -> Crashes:
        """The record with one more crash."""
        return replace(self, times_s=(*self._within(now_s), now_s))

    def next_delay(self, now_s: float) -> float:
        """Seconds to wait before the restart, counted from the last crash; 0 without a crash."""
        count = len(self._within(now_s))
        if count == 0:
            return 0.0
        # 2 ** 60 times any delay is above every limit; larger powers only cost time.
        return min(self.most_s, self.first_s * 2.0 ** min(count - 1, 60))

    def is_faulted(self, now_s: float) -> bool:
        """True where the worker crashed `most` times or more within the window."""
        return len(self._within(now_s)) >= self.most

    def cleared(self) -> Crashes:
        """The record without crashes: after `clear`, or for another file."""
        return replace(self, times_s=())

    def _within(self, now_s: float) -> tuple[float, ...]:
        return tuple(time for time in self.times_s if now_s - time < self.window_s)
