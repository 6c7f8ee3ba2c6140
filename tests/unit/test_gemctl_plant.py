"""The simulated board: its physics against closed forms, its sensor, its seed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gemctl.core.throttle import Actuators, Decision, Inputs, Settings
from plant import Board, Plant, Throttle, run

QUIET = Board(noise_c=0.0, power_noise=0.0, resolution_c=0.001)


def free(board: Board = QUIET) -> Decision:
    """A decision that allows everything."""
    return Throttle(Settings(mode="off"))(Inputs(0.0, ()), board.actuators())


def test_temperature_at_rest() -> None:
    plant = Plant(QUIET, ambient_c=25.0)
    plant.advance(4000.0, 24.5, 25.0)
    assert plant.die_c == pytest.approx(25.0 + 24.5 * 2.4, abs=0.01)


def test_a_failed_fan_doubles_the_sinks_resistance() -> None:
    plant = Plant(QUIET, ambient_c=25.0)
    plant.fan = False
    plant.advance(8000.0, 10.0, 25.0)
    assert plant.die_c == pytest.approx(25.0 + 10.0 * (0.5 + 3.8), abs=0.01)


def test_time_constants() -> None:
    """After 121 s, 63 % of the slow rise; the die's own 0.5 C/W within seconds."""
    plant = Plant(QUIET, ambient_c=25.0)
    before = plant.die_c
    plant.advance(15.0, 24.5, 25.0)
    sink_rise = plant.sink_c - (25.0 + 7.0 * 1.9)
    assert plant.die_c - before - sink_rise == pytest.approx(17.5 * 0.5, rel=0.12)
    plant.advance(QUIET.tau_s - 15.0, 24.5, 25.0)
    assert (plant.die_c - before) / (17.5 * 2.4) == pytest.approx(1 - math.exp(-1) * 0.8, abs=0.04)


def test_steps_of_any_length_give_the_same() -> None:
    one, many = Plant(QUIET), Plant(QUIET)
    one.advance(100.0, 20.0, 30.0)
    for _ in range(200):
        many.advance(0.5, 20.0, 30.0)
    assert one.die_c == pytest.approx(many.die_c, abs=1e-9)
    assert one.now_s == pytest.approx(many.now_s)


def test_sensor_is_late() -> None:
    plant = Plant(QUIET, ambient_c=25.0)
    seen = []
    for _ in range(40):
        plant.advance(0.25, 24.5, 25.0)
        seen.append((plant.die_c, plant.sensor_c()))
    for index in range(6, 40):
        assert seen[index][1] == pytest.approx(seen[index - 6][0], abs=0.002)


def test_noise_is_seeded() -> None:
    def readings(seed: int) -> list[float]:
        plant = Plant(Board(), seed=seed)
        return [plant.sensor_c() for _ in range(200)]

    assert readings(1) == readings(1)
    assert readings(1) != readings(2)
    mean = sum(readings(1)) / 200
    deviation = math.sqrt(sum((value - mean) ** 2 for value in readings(1)) / 200)
    assert deviation == pytest.approx(0.3, rel=0.15)


def test_power_of_decisions() -> None:
    board, everything = QUIET, free()
    assert board.power_w(everything) == pytest.approx(24.5)
    assert board.power_w(everything, busy=0.0) == pytest.approx(7.0)
    assert board.power_w(replace(everything, duty=0.5)) == pytest.approx(7.0 + 8.75)
    assert board.power_w(replace(everything, threads=3)) == pytest.approx(7.0 + 8.75)
    assert board.power_w(replace(everything, paused=True)) == 7.0
    capped = board.power_w(replace(everything, freq_cap_fraction=0.7))
    assert capped == pytest.approx(7.0 + 17.5 * 0.7 * board.volts(0.7) ** 2)
    assert board.volts(1.0) == pytest.approx(1.0)
    assert board.volts(420 / 1510) == pytest.approx(0.6)
    slow = replace(board, clusters=("big", "little"))
    assert slow.power_w(replace(everything, cluster="little")) == pytest.approx(7.0 + 7.0)


def test_a_run_is_repeatable() -> None:
    def once() -> list[float]:
        trace = run(Plant(Board(), seed=5), Throttle(Settings(temp_c=60.0)), lambda _: 25.0, 200.0)
        return trace.die_c

    assert once() == once()


def test_a_trace_counts() -> None:
    trace = run(Plant(Board()), Throttle(Settings(temp_c=60.0)), lambda _: 25.0, 300.0)
    assert len(trace.time_s) == len(trace.decisions) == 600
    assert trace.peak_c() == max(trace.die_c)
    assert len(trace.means_w(60.0)) == 5
    assert trace.means_w(0.5) == trace.power_w
    assert trace.means_w(1.0, 299.0) == [pytest.approx(sum(trace.power_w[-2:]) / 2)]
    assert trace.level_changes() >= 1
    assert isinstance(Board().actuators(), Actuators)
