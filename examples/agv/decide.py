"""From an order to one decision in time: by the model where its answer holds, else by rule.

Every order gets exactly one decision, in the order of arrival, within DEADLINE_S of its arrival on
the event loop's clock, whatever the model or the daemon does:

- where the rule says stop, it stops at once and nobody is asked;
- an answer that is late, no command, or against the rule is replaced by the rule;
- an order that comes while one is open decides the open one by rule first. So at most one question
  is open, a storm asks none, and no old command follows a newer one.

Deciding is plain callbacks: nothing here waits for the question's task to end.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from ask import Ask, AskError
from order import COMMAND_SCHEMA, Command, Order, UnreadableError, read_command, read_order
from prompt import prompt

DEADLINE_S = 0.5  # from an order's arrival to its decision
MODEL_S = 0.44  # the model's part of it; the rest is for the check and a late wake-up
CALM_S = 0.02  # a question waits until no order has come for so long
KNOWN_MOST = 1024  # ids that are remembered, for duplicates

STOP_CM, SLOW_CM = 100, 300  # an obstacle nearer than that
LOW_PERCENT = 15  # battery
SLOW_CM_S = 30

Source = Literal["model", "rule"]
Why = Literal[
    "answered",  # the model's command holds
    "obstacle",  # nearer than STOP_CM: nobody was asked
    "overtaken",  # the next order came before the answer
    "timeout",  # no answer in time
    "unreachable",  # no daemon
    "refused",  # the daemon refused the question
    "no_json",  # the answer is no JSON
    "schema",  # .. no command
    "unsafe",  # .. against the rule
    "unreadable",  # the order itself is none
    "expired",  # .. came too late
    "retained",  # .. is one that the broker kept from an earlier time
    "reused",  # .. has the id of another one
    "ended",  # this program ends
    "fault",  # this program has a fault
]
WHYS: tuple[Why, ...] = get_args(Why)

STOP = Command(action="stop", speed_cm_s=0)
SLOW = Command(action="slow", speed_cm_s=SLOW_CM_S)
CHARGE = Command(action="charge", speed_cm_s=SLOW_CM_S)


@dataclass(frozen=True)
class Decision:
    """What the vehicle is told, where that comes from, and why."""

    number: int  # counts decisions from 1
    order: str  # its id; empty: unreadable
    command: Command
    source: Source
    why: Why
    detail: str
    ms: float  # since the order's arrival


def rule(order: Order) -> Command:
    """Without any model: obstacle near -> stop, battery low -> charge, else slow."""
    if order.obstacle_cm is not None and order.obstacle_cm < STOP_CM:
        return STOP
    return CHARGE if order.battery_percent < LOW_PERCENT else SLOW


def contradiction(order: Order, command: Command) -> str:
    """Why a command must not be carried out; empty: it may."""
    if (command.action == "stop") != (command.speed_cm_s == 0):
        return f"{command.action} at {command.speed_cm_s} cm/s"
    if command.action == "stop":
        return ""
    obstacle = order.obstacle_cm
    if obstacle is not None and obstacle < STOP_CM:
        return f"{command.action} with an obstacle at {obstacle} cm, nearer than {STOP_CM}"
    if command.action != "charge" and order.battery_percent < LOW_PERCENT:
        return f"{command.action} with {order.battery_percent} % of battery"
    near = obstacle is not None and obstacle < SLOW_CM
    if near and command.action == "drive":
        return f"drive with an obstacle at {obstacle} cm, nearer than {SLOW_CM}"
    if (near or command.action == "slow") and command.speed_cm_s > SLOW_CM_S:
        return f"{command.action} at {command.speed_cm_s} cm/s, faster than {SLOW_CM_S}"
    return ""


def judge(order: Order, answer: str) -> tuple[Command, Source, Why, str]:
    """The model's command where it holds, else the rule's: (command, source, why, detail)."""
    try:
        command = read_command(answer)
    except UnreadableError as error:
        return rule(order), "rule", error.why, str(error)
    against = contradiction(order, command)
    if against:
        return rule(order), "rule", "unsafe", against
    return command, "model", "answered", ""


@dataclass
class _Open:
    """An order without a decision yet."""

    order: Order
    arrived_s: float
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    task: asyncio.Task[str] | None = None


class Decider:
    """Takes orders, hands out decisions. Made and used on a running event loop."""

    def __init__(
        self,
        ask: Ask,
        out: Callable[[Decision], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`out` must not raise or wait; `wall` is the clock of `expires_at`."""
        self._ask = ask
        self._out = out
        self._wall = wall
        self._loop = asyncio.get_running_loop()
        self._open: _Open | None = None
        self._last_s = -CALM_S  # when the newest order came
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._tasks: set[asyncio.Task[str]] = set()
        self.arrived = self.duplicates = self.decided = self.asked = 0

    def take(self, payload: bytes, retained: bool = False) -> None:
        """An order has arrived. Its decision comes out now, or within DEADLINE_S."""
        arrived_s = self._loop.time()
        self.arrived += 1
        try:
            order = read_order(payload)
        except UnreadableError as error:
            self._stop("", arrived_s, "unreadable", str(error))
            return
        mark = hashlib.sha256(payload).digest()
        known = self._known.get(order.id)
        if known == mark:  # QoS 1 may deliver twice
            self.duplicates += 1
            return
        self._remember(order.id, mark)
        if known is not None:
            self._stop(order.id, arrived_s, "reused", "another order had this id")
        elif retained:
            self._stop(order.id, arrived_s, "retained", "the broker kept it; send it unretained")
        elif order.expires_at is not None and self._wall() > order.expires_at:
            late = self._wall() - order.expires_at
            self._stop(order.id, arrived_s, "expired", f"{late:.1f} s too late")
        elif rule(order) == STOP:
            near = f"{order.obstacle_cm} cm, nearer than {STOP_CM}"
            self._stop(order.id, arrived_s, "obstacle", near)
        else:
            self._overtake(order.id)
            self._begin(_Open(order, arrived_s))
        self._last_s = arrived_s

    def close(self) -> None:
        """Decide what is open by rule, and drop the question."""
        if self._open is not None:
            self._by_rule(self._open, "ended", "this program ends")

    def _remember(self, ident: str, mark: bytes) -> None:
        self._known[ident] = mark
        if len(self._known) > KNOWN_MOST:
            self._known.popitem(last=False)

    def _stop(self, ident: str, arrived_s: float, why: Why, detail: str) -> None:
        self._overtake(ident or "an unreadable one")
        self._hand_out(ident, arrived_s, STOP, "rule", why, detail)

    def _overtake(self, ident: str) -> None:
        if self._open is not None:
            self._by_rule(self._open, "overtaken", f"by {ident}")

    def _begin(self, opened: _Open) -> None:
        self._open = opened
        late = f"no answer within {MODEL_S * 1e3:.0f} ms"
        end_s = opened.arrived_s + MODEL_S
        opened.timers.append(self._loop.call_at(end_s, self._by_rule, opened, "timeout", late))
        calm_s = self._last_s + CALM_S
        if opened.arrived_s >= calm_s:
            self._start(opened)
        else:
            opened.timers.append(self._loop.call_at(calm_s, self._start, opened))

    def _start(self, opened: _Open) -> None:
        self.asked += 1
        left_s = opened.arrived_s + MODEL_S - self._loop.time()
        question = self._ask(prompt(opened.order), COMMAND_SCHEMA, left_s)
        opened.task = self._loop.create_task(question)
        self._tasks.add(opened.task)  # the loop itself holds tasks weakly
        opened.task.add_done_callback(lambda task: self._answered(opened, task))

    def _answered(self, opened: _Open, task: asyncio.Task[str]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if opened is not self._open:
            return
        if task.cancelled():
            self._by_rule(opened, "fault", "the question was cancelled")
        elif isinstance(error, AskError):
            self._by_rule(opened, error.why, str(error))
        elif error is not None:
            self._by_rule(opened, "fault", type(error).__name__)
        elif self._loop.time() > opened.arrived_s + DEADLINE_S:
            self._by_rule(opened, "timeout", "an answer after the deadline")
        else:
            self._settle(opened, *judge(opened.order, task.result()))

    def _by_rule(self, opened: _Open, why: Why, detail: str) -> None:
        self._settle(opened, rule(opened.order), "rule", why, detail)

    def _settle(
        self, opened: _Open, command: Command, source: Source, why: Why, detail: str
    ) -> None:
        self._open = None
        for timer in opened.timers:
            timer.cancel()
        if opened.task is not None:
            opened.task.cancel()  # and not waited for: it may not listen
        self._hand_out(opened.order.id, opened.arrived_s, command, source, why, detail)

    def _hand_out(
        self,
        ident: str,
        arrived_s: float,
        command: Command,
        source: Source,
        why: Why,
        detail: str,
    ) -> None:
        self.decided += 1
        ms = (self._loop.time() - arrived_s) * 1e3
        self._out(Decision(self.decided, ident, command, source, why, detail[:200], ms))
