"""Stages that run ahead: order, errors, early ends; seconds by name."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmake.stages import Clock, ahead


def numbers(count: int, seen: list[int] | None = None) -> Generator[int, None, None]:
    try:
        for i in range(count):
            if seen is not None:
                seen.append(i)
            yield i
    finally:
        if seen is not None:
            seen.append(-1)


@given(st.integers(0, 40), st.integers(1, 4))
def test_items_keep_their_order_through_any_number_of_stages(count: int, stages: int) -> None:
    source = numbers(count)
    for _ in range(stages):
        source = ahead(source)
    assert list(source) == list(range(count))


def test_an_error_comes_out_after_the_items_before_it() -> None:
    def broken() -> Generator[int, None, None]:
        yield 1
        raise ValueError("broken")

    source = ahead(ahead(broken()))
    assert next(source) == 1
    with pytest.raises(ValueError, match="broken"):
        next(source)


def test_closing_early_ends_threads_and_closes_the_source() -> None:
    before = threading.active_count()
    seen: list[int] = []
    source = ahead(ahead(numbers(1000, seen)))
    assert next(source) == 0
    source.close()
    assert seen[-1] == -1  # its finally has run
    assert len(seen) < 20  # at most a few items ahead
    assert threading.active_count() == before


def test_at_most_two_items_are_made_ahead() -> None:
    seen: list[int] = []
    source = ahead(numbers(100, seen))
    for i in range(50):
        assert next(source) == i
        assert len(seen) <= i + 4
    source.close()


def test_a_clock_adds_up() -> None:
    clock = Clock()
    for _ in range(3):
        with clock.timed("a"):
            pass
    with pytest.raises(KeyError), clock.timed("b"):
        raise KeyError
    assert set(clock.seconds) == {"a", "b"}
    assert all(value >= 0 for value in clock.seconds.values())
