"""The longest token gap of a replacement, by a clock that the test sets."""

from __future__ import annotations

import asyncio

import pytest

from gemctl.serve.gaps import Gaps


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def at(self, seconds: float) -> None:
        self.now = 100.0 + seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_nobody_asks(clock: Clock) -> None:
    gaps = Gaps(clock)
    gaps.watch()
    clock.at(5)
    assert gaps.end() is None


def test_the_longest_of_an_answer_and_no_pause_between_two(clock: Clock) -> None:
    gaps = Gaps(clock)
    gaps.watch()
    with gaps.request() as token:
        for second in (0.1, 0.2, 0.7, 0.9):
            clock.at(second)
            token()
    clock.at(60)  # nobody asks
    with gaps.request() as token:
        clock.at(60.3)
        token()
    assert gaps.end() == pytest.approx(0.5)


def test_waiting_over_a_flip_counts_from_the_last_token(clock: Clock) -> None:
    gaps = Gaps(clock)
    gaps.watch()
    with gaps.request() as second:
        with gaps.request() as first:
            clock.at(1.0)
            first()
        clock.at(3.0)
        second()
        clock.at(3.1)
        second()
    assert gaps.end() == pytest.approx(2.0)


def test_one_that_stands_still_while_another_goes_on(clock: Clock) -> None:
    gaps = Gaps(clock)
    gaps.watch()
    with gaps.request() as old, gaps.request() as new:
        old()
        for tenth in range(1, 50):
            clock.at(tenth / 10)
            new()
        old()
    assert gaps.end() == pytest.approx(4.9)


def test_what_was_before_does_not_count_and_what_has_not_ended_does(clock: Clock) -> None:
    gaps = Gaps(clock)
    with gaps.request() as token:
        clock.at(10)
        gaps.watch()
        clock.at(11)
        token()
        clock.at(14)
        assert gaps.end() == pytest.approx(3.0)
        clock.at(99)
        token()
    gaps.watch()
    assert gaps.end() is None


def test_settling_waits_for_a_token_and_for_nothing_else() -> None:
    async def run() -> tuple[float | None, float]:
        gaps, loop = Gaps(), asyncio.get_running_loop()
        gaps.watch()
        await gaps.settle(1e6)  # nobody asks
        with gaps.request() as token:
            await gaps.settle(0.01)  # none comes
            loop.call_later(0.05, token)
            await gaps.settle(1e6)
            found = gaps.end()
        gaps.watch()
        asking = gaps.request()
        asking.__enter__()
        loop.call_later(0.01, lambda: asking.__exit__(None, None, None))  # he goes away
        await gaps.settle(1e6)
        return found, 0.05

    found, least = asyncio.run(run())
    assert found is not None
    assert found >= least
