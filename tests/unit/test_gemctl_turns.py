"""Turns of a model's engine: order, deadlines, flips, pauses, and requests that give up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from gemctl.core.policy import Waiting
from gemctl.errors import ApiError
from gemctl.serve.turns import Engine, Turns


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def waiting(number: int, priority: int = 1, deadline_s: float | None = None) -> Waiting:
    return Waiting(str(number), 100.0 + number / 1e3, request_class=priority, deadline_s=deadline_s)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


async def hold(turns: Turns, request: Waiting, seen: list[str], go: asyncio.Event) -> None:
    async with turns.turn(request):
        seen.append(request.id)
        await go.wait()


def test_order_is_class_then_deadline_then_arrival() -> None:
    async def body() -> None:
        turns, seen, go = Turns("m", 9, Clock()), list[str](), asyncio.Event()
        requests = [waiting(1), waiting(2, 2), waiting(3), waiting(4, 0), waiting(5, 1, 1e6)]
        tasks = [asyncio.create_task(hold(turns, r, seen, go)) for r in requests]
        await asyncio.sleep(0)
        go.set()
        turns.serve(Engine())
        await asyncio.gather(*tasks)
        assert seen == ["4", "5", "1", "3", "2"]

    run(body())


def test_one_turn_at_a_time_and_the_queue_has_an_end() -> None:
    async def body() -> None:
        turns, seen, go = Turns("m", 2, Clock()), list[str](), asyncio.Event()
        engine = Engine()
        turns.serve(engine)
        tasks = [asyncio.create_task(hold(turns, waiting(n), seen, go)) for n in range(3)]
        await asyncio.sleep(0.01)
        assert (seen, engine.busy, len(turns)) == (["0"], True, 2)
        with pytest.raises(ApiError, match="2 requests wait already"):
            async with turns.turn(waiting(9)):
                pass
        go.set()
        await asyncio.gather(*tasks)
        assert (seen, engine.busy) == (["0", "1", "2"], False)

    run(body())


def test_a_flip_leaves_who_runs_and_takes_who_waits() -> None:
    async def body() -> None:
        turns, go = Turns("m", 9, Clock()), asyncio.Event()
        old, new = Engine(), Engine()
        served: list[Engine] = []

        async def ask(number: int) -> None:
            async with turns.turn(waiting(number)) as engine:
                served.append(engine)
                await go.wait()

        turns.serve(old)
        tasks = [asyncio.create_task(ask(number)) for number in range(3)]
        await asyncio.sleep(0.01)
        turns.serve(new)
        await asyncio.sleep(0.01)
        assert served == [old, new]
        go.set()
        await asyncio.gather(*tasks)
        assert served == [old, new, new]
        assert old.idle.is_set()

    run(body())


def test_deadline_cancel_and_failure_leave_nothing_behind() -> None:
    async def body() -> None:
        clock = Clock()
        turns, seen, go = Turns("m", 9, clock), list[str](), asyncio.Event()
        engine = Engine()
        turns.serve(engine)
        first = asyncio.create_task(hold(turns, waiting(1), seen, go))
        await asyncio.sleep(0)
        late = asyncio.create_task(hold(turns, waiting(2, 1, clock.now + 0.01), seen, go))
        gone = asyncio.create_task(hold(turns, waiting(3), seen, go))
        failed = asyncio.create_task(hold(turns, waiting(4), seen, go))
        with pytest.raises(ApiError, match="deadline"):
            await late
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert len(turns) == 1
        turns.fail(ApiError("failed", "m: over"))
        with pytest.raises(ApiError, match="over"):
            await failed
        go.set()
        await first
        assert (len(turns), engine.busy, seen) == (0, False, ["1"])

    run(body())


def test_a_turn_that_comes_too_late_goes_on_to_the_next() -> None:
    """Cancelled in the very step in which its turn came."""

    async def body() -> None:
        turns, seen, go = Turns("m", 9, Clock()), list[str](), asyncio.Event()
        go.set()
        engine = Engine()
        gone = asyncio.create_task(hold(turns, waiting(1), seen, go))
        next_ = asyncio.create_task(hold(turns, waiting(2), seen, go))
        await asyncio.sleep(0.01)
        turns.serve(engine)  # the first one has its turn, and has not run yet
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await next_
        assert (seen, engine.busy) == (["2"], False)

    run(body())


def test_a_pause_holds_everyone_and_heat_turns_the_low_away() -> None:
    async def body() -> None:
        turns, seen, go = Turns("m", 9, Clock()), list[str](), asyncio.Event()
        go.set()
        task = asyncio.create_task(hold(turns, waiting(1), seen, go))
        await asyncio.sleep(0.01)
        turns.pause(True)
        turns.serve(Engine())
        await asyncio.sleep(0.01)
        assert not seen
        with pytest.raises(ApiError, match="paused"):
            await hold(turns, waiting(4), seen, go)
        turns.pause(False)
        await task
        turns.least_class = 1
        with pytest.raises(ApiError, match="too hot"):
            await hold(turns, waiting(2, 2), seen, go)
        await hold(turns, waiting(3, 1), seen, go)
        assert seen == ["1", "3"]

    run(body())
