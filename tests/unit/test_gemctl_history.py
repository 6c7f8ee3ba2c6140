"""The last hour in memory: rings, gaps, queries, percentiles, size."""

from __future__ import annotations

import math
import random
import tracemalloc
from pathlib import Path

import pytest

from gemctl.show.history import (
    COARSE_COUNT,
    DRAWN,
    FINE_COUNT,
    MAX_SERIES,
    TTFT_KEPT,
    History,
    Window,
    _Ring,
)


def test_seconds_of_ten_minutes() -> None:
    history = History()
    for second in range(1000):
        history.add(5000.0 + second, {"temp_c": float(second)})
    answer = history.query(600, 1)
    assert (answer["seconds"], answer["step_s"]) == (600, 1)
    assert answer["t"] == list(range(-599, 1))
    assert answer["series"]["temp_c"] == [float(second) for second in range(400, 1000)]


def test_tens_of_an_hour_are_means() -> None:
    history = History()
    for second in range(8000):
        history.add(float(second), {"temp_c": float(second)})
    answer = history.query(3600, 10)
    assert answer["t"] == list(range(-3590, 1, 10))
    assert answer["series"]["temp_c"] == [float(ten * 10 + 4.5) for ten in range(440, 800)]


@pytest.mark.parametrize(
    ("seconds", "step_s", "expected"),
    [
        (600, 1, (600, 1, 600)), (600, 7, (600, 7, 86)), (601, 1, (601, 10, 61)),
        (3600, 1, (3600, 10, 360)), (3600, 25, (3600, 30, 120)), (99999, 60, (3600, 60, 60)),
        (0, 0, (1, 1, 1)), (-5, -5, (1, 1, 1)), (60, 3600, (60, 60, 1)), (60, 10, (60, 10, 6)),
    ],
)  # fmt: skip
def test_queries_are_clamped(seconds: int, step_s: int, expected: tuple[int, int, int]) -> None:
    history = History()
    for second in range(4000):
        history.add(float(second), {"temp_c": 50.0})
    answer = history.query(seconds, step_s)
    values = answer["series"]["temp_c"]
    assert (answer["seconds"], answer["step_s"], len(values)) == expected
    assert len(answer["t"]) == len(values)
    assert set(values) == {50.0}


def test_a_flood_of_questions_is_computed_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in reads of a ring's slots, whatever the questions are."""
    history, reads = History(), 0
    get = _Ring.get

    def counted(ring: _Ring, slot: int) -> float:
        nonlocal reads
        reads += 1
        return get(ring, slot)

    for second in range(4000):
        history.add(float(second), {name: float(second) for name in DRAWN})
    monkeypatch.setattr(_Ring, "get", counted)
    chance = random.Random(3)
    for _ in range(500):
        history.query(chance.randint(1, 3600), chance.randint(1, 600))
    whole = len(DRAWN) * (FINE_COUNT + COARSE_COUNT)
    assert 0 < reads <= whole
    first = history.query(3600, 10)
    assert history.query(3600, 10)["series"] is first["series"]
    history.add(4000.0, dict.fromkeys(DRAWN, 0.0))
    assert history.query(3600, 10)["series"] != first["series"]
    assert reads <= 2 * whole


def test_first_tokens_are_each_models_own() -> None:
    history = History()
    history.ttft(1.0, 50.0, "lm")
    assert history.ttft_percentiles(1.0, "lm") == (50.0, 50.0)
    assert history.ttft_percentiles(1.0, "other") == (None, None)


def test_steps_are_means_of_what_is_known() -> None:
    history = History()
    for second, value in enumerate([1.0, None, 3.0, None, None, None, 7.0, 8.0, math.nan]):
        history.add(float(second), {"x": value})
    assert history.query(9, 3)["series"]["x"] == [2.0, None, 7.5]


def test_unknown_values_and_late_series() -> None:
    history = History()
    history.add(0.0, {"a": 1.0})
    history.add(1.0, {"a": None, "b": math.inf})
    history.add(2.0, {"b": 5.0})
    assert history.query(3, 1)["series"] == {"a": [1.0, None, None], "b": [None, None, 5.0]}
    assert History().query(3, 1) == {"seconds": 3, "step_s": 1, "t": [-2, -1, 0], "series": {}}


def test_gaps_are_gaps_but_one_missed_second_is_none() -> None:
    history = History()
    for second in (0, 1, 3, 4, 7):
        history.add(float(second), {"x": float(second)})
    assert history.query(8, 1)["series"]["x"] == [0.0, 1.0, 1.0, 3.0, 4.0, None, None, 7.0]


def test_a_timer_that_is_not_exact_leaves_no_holes() -> None:
    history, noise = History(), random.Random(1)
    for second in range(600):
        history.add(1000.0 + second * 1.002 + noise.uniform(-0.3, 0.3), {"x": 1.0})
    assert None not in history.query(590, 1)["series"]["x"]


def test_each_second_keeps_its_own_value() -> None:
    history, noise = History(), random.Random(2)
    for second in range(300):
        history.add(1000.0 + second + noise.uniform(-0.3, 0.3), {"x": float(second)})
    assert history.query(300, 1)["series"]["x"] == [float(second) for second in range(300)]


def test_the_oldest_step_has_only_what_is_left() -> None:
    """86 steps of 7 s are two seconds more than the ring holds."""
    history = History()
    for second in range(1000):
        history.add(float(second), {"x": float(second)})
    assert history.query(600, 7)["series"]["x"][:2] == [402.0, 408.0]


def test_two_values_of_a_second_are_their_mean() -> None:
    history = History()
    for value in (1.0, 2.0, 6.0):
        history.add(10.1, {"x": value})
    assert history.query(1, 1)["series"]["x"] == [3.0]


def test_a_long_silence_empties_the_rings() -> None:
    history = History()
    for second in range(700):
        history.add(float(second), {"x": 1.0})
    history.add(100_000.0, {"x": 2.0})
    for seconds, step_s in ((600, 1), (3600, 10)):
        values = history.query(seconds, step_s)["series"]["x"]
        assert values[-1] == 2.0
        assert values[:-1] == [None] * (len(values) - 1)


def test_time_that_goes_back_is_ignored() -> None:
    history = History()
    history.add(100.0, {"x": 1.0})
    history.add(50.0, {"x": 9.0})
    assert history.query(60, 1)["series"]["x"] == [None] * 59 + [1.0]


def test_against_a_plain_list() -> None:
    """Random gaps and values: the rings say what a list of everything says."""
    noise = random.Random(7)
    history, every, second = History(), {}, 0
    for _ in range(3000):
        second += noise.choice([1, 1, 1, 1, 3, 5, 40])
        every[second] = noise.uniform(0, 100)
        history.add(float(second), {"x": every[second]})
    fine = [every.get(s) for s in range(second - 599, second + 1)]
    assert history.query(600, 1)["series"]["x"] == [
        None if value is None else pytest.approx(value, abs=1e-3) for value in fine
    ]
    for place, mean in enumerate(reversed(history.query(3600, 10)["series"]["x"])):
        ten = second // 10 - place
        known = [every[s] for s in range(ten * 10, ten * 10 + 10) if s in every]
        expected = sum(known) / len(known) if known else None
        assert mean == (None if expected is None else pytest.approx(expected, abs=1e-3))


def test_size_is_fixed() -> None:
    """Less than 2 MB with every series that there may be, and not more later."""
    tracemalloc.start()
    history = History()
    for second in range(700):
        history.add(float(second), {f"s{n}": float(n) for n in range(80)})
        history.ttft(float(second), 100.0)
    first, _ = tracemalloc.get_traced_memory()
    for second in range(700, 1400):
        history.add(float(second), {f"s{n}": float(n) for n in range(80)})
    second_size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(history.query(60, 10)["series"]) == MAX_SERIES
    assert first < 2_000_000
    assert abs(second_size - first) < 50_000


def test_the_page_draws_these_series(root: Path) -> None:
    page = (root / "gemctl" / "show" / "page.html").read_text("utf-8")
    assert all(page.count(f'["{name}", ') == 1 for name in DRAWN)


# Percentiles


def test_percentiles_of_five_minutes() -> None:
    history = History()
    assert history.ttft_percentiles(0.0) == (None, None)
    for n in range(1, 101):
        history.ttft(float(n), float(n))
    assert history.ttft_percentiles(100.0) == (50.0, 95.0)
    assert history.ttft_percentiles(350.0) == (75.0, 98.0)  # 50..100 are left
    assert history.ttft_percentiles(400.0) == (100.0, 100.0)
    assert history.ttft_percentiles(400.1) == (None, None)


def test_one_value_is_every_percentile() -> None:
    window = Window(10.0, 4)
    window.add(0.0, 7.0)
    assert [window.percentile(0.0, p) for p in (0, 1, 50, 100)] == [7.0] * 4


def test_the_newest_are_kept() -> None:
    window = Window(1000.0, 8)
    for n in range(20):
        window.add(float(n), float(n))
    window.add(20.0, math.nan)
    assert window.percentile(20.0, 0) == 12.0
    assert window.percentile(20.0, 100) == 19.0


def test_against_sorting() -> None:
    noise = random.Random(3)
    window, every = Window(300.0, TTFT_KEPT), []
    for n in range(2000):
        value = noise.expovariate(0.01)
        every.append((n / 2, value))
        window.add(n / 2, value)
    recent = sorted(value for at, value in every if 1000.0 - at <= 300.0)
    for percent in (50, 95):
        assert (
            window.percentile(1000.0, percent) == recent[math.ceil(len(recent) * percent / 100) - 1]
        )
