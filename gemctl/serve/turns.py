"""Whose turn it is: the requests that wait for a model, in the order of core/policy.py.

A turn belongs to one engine from its begin to its end; what waits belongs to none, and goes to
whichever engine serves when its turn comes. So nothing is lost over a flip, a crash or a serial
replacement: it waits on, as long as its deadline allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from gemctl import waiting
from gemctl.core import policy
from gemctl.errors import ApiError


class Engine:
    """What takes turns: one at a time. `idle` is set while it has none."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def busy(self) -> bool:
        """A turn is taken."""
        return not self.idle.is_set()


@dataclass
class _Waiting:
    request: policy.Waiting
    turn: asyncio.Future[Engine]


class Turns:
    """The queue of one model. `serve` names the engine that takes the next turns, or None."""

    def __init__(self, name: str, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.most = most
        self.paused = False
        self.least_class: int | None = None  # classes above it are turned away; None: none is
        self._clock = clock
        self._engine: Engine | None = None
        self._queue: list[_Waiting] = []
        self._closed: ApiError | None = None  # nobody gets a turn any more

    def __len__(self) -> int:
        return len(self._queue)

    def serve(self, engine: Engine | None) -> None:
        """From now on turns go to this engine; those that were taken stay where they are."""
        self._engine = engine
        self.pump()

    def pause(self, paused: bool) -> None:
        """While paused nobody gets a turn."""
        self.paused = paused
        self.pump()

    def pump(self) -> None:
        """Hand out the next turn, if there is an engine for it."""
        engine = self._engine
        if engine is None or engine.busy or self.paused:
            return
        self._queue = [one for one in self._queue if not one.turn.done()]
        if self._queue:
            order = policy.order([one.request for one in self._queue], self._clock())
            first = next(one for one in self._queue if one.request is order[0])
            self._queue.remove(first)
            engine.idle.clear()
            first.turn.set_result(engine)

    def fail(self, error: ApiError) -> None:
        """Turn everyone away who waits."""
        queue, self._queue = self._queue, []
        for one in queue:
            if not one.turn.done():
                one.turn.set_exception(error)

    def close(self, error: ApiError) -> None:
        """Turn everyone away, also who comes later."""
        self._closed = error
        self.fail(error)

    def _refuse(self, request: policy.Waiting) -> None:
        if self._closed is not None:
            raise self._closed
        if self.paused:
            raise ApiError("busy", f"{self.name}: paused, too hot; see gemctl throttle")
        if self.least_class is not None and policy.low_priority(request, self.least_class):
            raise ApiError("busy", f"{self.name}: too hot for this priority; try again later")
        if len(self._queue) >= self.most:
            raise ApiError("busy", f"{self.name}: {self.most} requests wait already; try later")

    async def _take(self, request: policy.Waiting) -> Engine:
        turn: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()
        one = _Waiting(request, turn)
        self._queue.append(one)
        self.pump()
        left = None if request.deadline_s is None else request.deadline_s - self._clock()
        try:
            return await waiting.within(left, asyncio.shield(turn))
        except BaseException as error:
            self._give_up(one)
            if isinstance(error, TimeoutError):
                late = ApiError("timeout", f"{self.name}: no turn before its deadline; try again")
                raise late from None
            raise

    def _give_up(self, one: _Waiting) -> None:
        """A turn that came while its request gave up goes to the next one."""
        if one in self._queue:
            self._queue.remove(one)
        if not one.turn.done():
            one.turn.cancel()
        elif not one.turn.cancelled() and one.turn.exception() is None:
            self._leave(one.turn.result())

    def _leave(self, engine: Engine) -> None:
        engine.idle.set()
        self.pump()

    @contextlib.asynccontextmanager
    async def turn(self, request: policy.Waiting) -> AsyncIterator[Engine]:
        """Wait for a turn and hold it. Raises ApiError: busy, timeout, or what `fail` was given."""
        self._refuse(request)
        engine = await self._take(request)
        try:
            yield engine
        finally:
            self._leave(engine)
