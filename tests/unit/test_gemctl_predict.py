"""Prediction: the line, the fitted model, their weights, and the step test."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemctl.core import predict
from gemctl.core.predict import (
    Predictor,
    Trend,
    fit_step_response,
    line_ahead,
    line_slope,
    new_predictor,
)
from plant import Board, Plant


def trend(samples: list[tuple[float, float]]) -> Trend:
    line = Trend()
    for time, value in samples:
        line = line.add(time, value)
    return line


# The line.


@settings(deadline=None)
@given(st.floats(-2.0, 2.0), st.floats(-40.0, 120.0), st.floats(0.0, 1e6))
def test_slope_of_a_straight_line(slope: float, level: float, start: float) -> None:
    line = trend([(start + t / 10, level + slope * t / 10) for t in range(300)])
    assert line.slope == pytest.approx(slope, abs=1e-5)


def test_slope_needs_eight_seconds() -> None:
    assert trend([(t / 10, 50.0) for t in range(80)]).slope is None
    assert trend([(t / 10, 50.0) for t in range(100)]).slope == pytest.approx(0.0)
    assert line_slope([(0.0, 1.0), (10.0, 2.0), (20.0, 3.0)]) is None


def test_slope_forgets_after_twenty_seconds() -> None:
    bend = [(t / 2, 50.0 + max(0.0, t / 2 - 60.0)) for t in range(170)]
    assert trend(bend).slope == pytest.approx(1.0)


def test_slope_of_noise_is_small() -> None:
    """0.3 C of noise at 2 Hz: the 30 s prediction then wavers by 0.0081 * 25.5 = 0.2 C."""
    noise = random.Random(3)
    line, slopes = Trend(), []
    for t in range(4000):
        line = line.add(t / 2, 60.0 + noise.gauss(0.0, 0.3))
        slopes.append(line.slope or 0.0)
    deviation = math.sqrt(sum(s * s for s in slopes) / len(slopes))
    assert deviation < 0.01


def test_a_clock_that_goes_back_or_stands_still_starts_anew_or_waits() -> None:
    line = trend([(100.0 + t / 2, float(t)) for t in range(60)])
    assert line.add(5.0, 1.0).slope is None
    still = trend([(1.0, 50.0)] * 1000)
    assert (still.slope, still.count) == (None, 1000)


def test_a_long_gap_leaves_nothing_of_before() -> None:
    line = trend([(t / 2, 40.0 + t) for t in range(60)])
    after = line.add(5000.0, 20.0).add(5001.0, 20.0)
    assert after.slope is None
    assert all(time >= 5000.0 for time, _ in after.bins)


def test_the_formula_of_the_plan() -> None:
    assert line_ahead(70.0, 0.1, 90.0, 30.0) == pytest.approx(
        70 + 0.1 * 90 * (1 - math.exp(-1 / 3))
    )
    assert line_ahead(70.0, 0.1, 90.0, 1e9) == pytest.approx(79.0)


def test_time_per_token_only_ever_adds() -> None:
    assert predict.trend_c(None) == predict.trend_c(-0.5) == predict.trend_c(math.nan) == 0.0
    assert predict.trend_c(0.05) == pytest.approx(1.0)
    assert predict.trend_c(5.0) == predict.TREND_MOST_C
    seen = new_predictor().observe(0.0, 60.0)
    assert seen.ahead(60.0, 30.0, 0.05) == pytest.approx(seen.ahead(60.0, 30.0) + 1.0)


def test_a_fast_fall_ends_at_the_lowest_that_was_read() -> None:
    """A request ends: 90 C become 45 C in ten seconds. The line alone goes on to below freezing."""
    seen = new_predictor()
    for t in range(120):
        seen = seen.observe(t / 2, 44.0 if t < 40 else 90.0 - max(0.0, (t - 100) * 2.25))
    temp = 90.0 - 19 * 2.25
    assert seen.line_ahead(temp, 30.0) < 0.0
    assert seen.ahead(temp) == 44.0


def test_nothing_cools_down_below_the_air() -> None:
    """Air that is known is the floor, and where it itself grows cooler, what it comes to."""

    def falling(ambient: Callable[[float], float]) -> Predictor:
        seen = new_predictor()
        for t in range(240):
            temp = 90.0 - max(0.0, (t - 220) * 2.25)
            seen = seen.observe(t / 2, temp, ambient_c=ambient(t / 2))
        return seen

    assert falling(lambda _: 25.0).ahead(47.0) == 25.0
    assert falling(lambda time: 25.0 - 0.02 * time).ahead(47.0) == pytest.approx(22.0, abs=0.2)
    assert falling(lambda _: 60.0).ahead(47.0) == 47.0  # a wrong one makes nothing warmer


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(-40, 150), st.none() | st.floats(-40, 60)), min_size=2,
             max_size=60),
    st.none() | st.floats(5, 300),
)  # fmt: skip
def test_no_prediction_is_below_what_was_read_and_the_air(
    rows: list[tuple[float, float | None]], tau_s: float | None
) -> None:
    seen = new_predictor(tau_s=tau_s)
    for index, (temp, ambient) in enumerate(rows):
        seen = seen.observe(index / 2, temp, ambient_c=ambient)
    air = [ambient for _, ambient in rows if ambient is not None]
    last = rows[-1][0]
    if not air:
        assert seen.ahead(last) >= min(temp for temp, _ in rows)
    elif seen.ambient_line.slope is None:
        assert seen.ahead(last) >= min(last, air[-1])


# Ambient.


def test_a_step_of_the_ambient_temperature_is_seen_before_the_sensor_moves() -> None:
    seen = new_predictor(tau_s=90.0)
    for t in range(120):
        seen = seen.observe(t / 2, 60.0, ambient_c=20.0)
    assert seen.ahead(60.0) == pytest.approx(60.0)
    seen = seen.observe(60.0, 60.0, ambient_c=40.0)
    assert seen.ahead(60.0) == pytest.approx(60 + 20 * (1 - math.exp(-1 / 3)), abs=0.3)
    assert seen.slope == pytest.approx(20 / 90, rel=0.02)


def test_what_the_ambient_temperature_did_is_not_counted_twice() -> None:
    """The chip follows the ambient step exactly as modelled: the prediction stays right."""
    seen = new_predictor(tau_s=90.0)
    for t in range(800):
        time = t / 2
        ambient = 20.0 if time < 100.0 else 40.0
        temp = 60.0 if time < 100.0 else 80.0 - 20.0 * math.exp(-(time - 100.0) / 90.0)
        seen = seen.observe(time, temp, ambient_c=ambient)
        if time > 240.0:  # the ambient trend itself looks back two minutes
            true = 80.0 - 20.0 * math.exp(-(time + 30.0 - 100.0) / 90.0)
            assert seen.ahead(temp) == pytest.approx(true, abs=0.1)


def test_an_ambient_ramp_goes_on() -> None:
    seen = new_predictor(tau_s=90.0)
    for t in range(2400):
        ambient = 20.0 + 0.01 * t / 2
        seen = seen.observe(t / 2, 40.0 + ambient, ambient_c=ambient)
    assert seen.ahead(72.0) == pytest.approx(72.0 + 0.3, abs=0.1)


def test_ambient_that_comes_late_or_goes_is_no_jump() -> None:
    seen = new_predictor()
    for t in range(100):
        seen = seen.observe(t / 2, 60.0)
    for t in range(100, 200):
        seen = seen.observe(t / 2, 60.0, ambient_c=30.0)
        assert seen.ahead(60.0) == pytest.approx(60.0, abs=1e-6)
    for t in range(200, 300):
        seen = seen.observe(t / 2, 60.0)
        assert seen.ahead(60.0) == pytest.approx(60.0, abs=1e-6)


# The model.


def drive(
    plant: Plant, seconds: float, powers: list[float], known: bool = True
) -> predict.Predictor:
    """A predictor after the plant has run through `powers`, five minutes each, in turn."""
    seen = new_predictor()
    for index in range(round(seconds * 2)):
        power = powers[int(index / 600) % len(powers)]
        plant.advance(0.5, power, 35.0)
        ambient = 35.0 if known else None
        seen = seen.observe(plant.now_s, plant.sensor_c(), plant.meter_w(), ambient)
    return seen


@pytest.mark.parametrize("known", [True, False])
def test_the_fit_finds_the_plant(known: bool) -> None:
    """Within 5 % of the true 2.4 C/W and 10 % of the slow 121 s, from noisy readings."""
    seen = drive(Plant(Board(), 35.0), 3600.0, [8.0, 24.0, 15.0], known)
    assert seen.fit.offset_c == pytest.approx(0.0 if known else 10.0, abs=3.0)
    assert seen.fit.rtheta == pytest.approx(Board().rtheta_c_per_w, rel=0.05)
    assert seen.fit.tau_s == pytest.approx(Board().tau_s, rel=0.1)
    assert 0.0 < seen.confidence <= 1.0


def test_the_model_sees_a_change_of_power_before_the_line_does() -> None:
    """Both predict 30 s ahead, from 3 s to 20 s after a step of 16 W; errors in C, squared."""
    plant = Plant(Board(), 35.0)
    seen = drive(plant, 3000.0, [8.0, 24.0])
    assert seen.confidence > 0.5
    made, truth = [], []
    for index in range(100):
        plant.advance(0.5, 24.0, 35.0)
        seen = seen.observe(plant.now_s, plant.sensor_c(), plant.meter_w(), 35.0)
        truth.append(plant.die_c)
        if 6 <= index < 40:
            temp = plant.sensor_c()
            made.append((index + 60, seen.ahead(temp), seen.line_ahead(temp, 30.0)))
    both = sum((mixed - truth[index]) ** 2 for index, mixed, _ in made)
    line = sum((alone - truth[index]) ** 2 for index, _, alone in made)
    assert both < 0.5 * line


def test_without_power_the_line_is_all_there_is() -> None:
    seen = new_predictor()
    for t in range(2000):
        seen = seen.observe(t / 2, 40.0 + t * 0.01)
    assert (seen.confidence, seen.rtheta) == (0.0, None)
    assert seen.ahead(60.0) == seen.line_ahead(60.0, 30.0)


def test_power_that_goes_away_takes_the_model_with_it() -> None:
    seen = drive(Plant(Board()), 3000.0, [8.0, 24.0])
    assert seen.confidence > 0.0
    assert seen.observe(3000.5, 60.0, None, 25.0).confidence == 0.0


def test_a_failed_fan_is_learnt() -> None:
    plant = Plant(Board())
    seen = new_predictor()
    for index in range(14400):
        plant.fan = plant.now_s < 3600.0
        power = [8.0, 16.0][int(plant.now_s / 400) % 2]
        plant.advance(0.5, power, 25.0)
        seen = seen.observe(plant.now_s, plant.sensor_c(), plant.meter_w(), 25.0)
        if index == 7199:
            assert seen.fit.rtheta == pytest.approx(2.4, rel=0.25)
    assert seen.fit.rtheta == pytest.approx(4.3, rel=0.25)


def test_calibration_is_taken_until_something_better_is_known() -> None:
    seen = new_predictor(rtheta=3.1, tau_s=70.0)
    assert (seen.rtheta, seen.tau_s) == (3.1, 70.0)
    assert seen.fit.rtheta == pytest.approx(3.1)
    assert seen.fit.tau_s == pytest.approx(70.0)


wild = st.one_of(st.floats(-40.0, 150.0), st.floats(-1e6, 1e6))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0.05, 8.0), st.floats(-40.0, 150.0), st.none() | st.floats(0.0, 1e4)),
        max_size=80,
    )
)
def test_whatever_comes_the_fit_stays_sane(rows: list[tuple[float, float, float | None]]) -> None:
    seen, now = new_predictor(), 0.0
    for seconds, temp, power in rows:
        now += seconds
        seen = seen.observe(now, temp, power, 25.0)
        assert predict.TAU_RANGE[0] * 0.999 <= seen.fit.tau_s <= predict.TAU_RANGE[1] * 1.001
        assert predict.RTHETA_RANGE[0] * 0.999 <= seen.fit.rtheta
        assert seen.fit.rtheta <= predict.RTHETA_RANGE[1] * 1.001
        assert abs(seen.fit.offset_c) <= predict.OFFSET_MOST_C * 1.001
        assert 0.0 <= seen.confidence <= 1.0
        assert math.isfinite(seen.ahead(temp))


# The step test.


def step_test(board: Board, seed: int = 1) -> list[tuple[float, float, float]]:
    """Six minutes: one at rest, five under full load."""
    plant, samples = Plant(board, seed=seed), []
    for index in range(720):
        power = board.static_w + (board.dynamic_w if index >= 120 else 0.0)
        plant.advance(0.5, power, 25.0)
        samples.append((plant.now_s, plant.sensor_c(), plant.meter_w()))
    return samples


@pytest.mark.parametrize("sink_tau_s", [60.0, 110.0, 160.0])
@pytest.mark.parametrize("sink_c_per_w", [1.0, 1.9, 4.0])
def test_step_response(sink_c_per_w: float, sink_tau_s: float) -> None:
    """Within 3 % and 8 % of the board's resistance and slow time constant, from noisy samples."""
    board = Board(sink_c_per_w=sink_c_per_w, sink_tau_s=sink_tau_s)
    found = fit_step_response(step_test(board))
    assert found.rtheta_c_per_w == pytest.approx(board.rtheta_c_per_w, rel=0.03)
    assert found.tau_s == pytest.approx(board.tau_s, rel=0.08)


def test_step_response_of_the_model_itself_is_exact() -> None:
    samples, delayed = [], 5.0
    for second in range(360):
        power = 5.0 if second < 60 else 15.0
        delayed += (power - delayed) * (1.0 - math.exp(-1.0 / 80.0))
        samples.append((float(second), 20.0 + 3.0 * delayed, power))
    found = fit_step_response(samples)
    assert found == pytest.approx((3.0, 80.0), rel=1e-3)


def test_step_response_that_tells_nothing_is_refused() -> None:
    flat = [(float(t), 50.0, 5.0 + (t > 60) * 5.0) for t in range(360)]
    with pytest.raises(ValueError, match="raised the temperature by"):
        fit_step_response(flat)
    with pytest.raises(ValueError, match="less than 20 samples or 60 s"):
        fit_step_response(flat[:30])
    with pytest.raises(ValueError, match=r"less than 0\.5 W"):
        fit_step_response([(t, temp, 5.0) for t, temp, _ in flat])
    with pytest.raises(ValueError, match="do not ascend"):
        fit_step_response(flat[::-1] + flat)
