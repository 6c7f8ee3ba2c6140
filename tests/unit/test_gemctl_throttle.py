"""The throttle, rule by rule: thresholds, sensors, ladder, duty, modes; and what always holds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemctl.core import throttle
from gemctl.core.throttle import (
    LADDER,
    PAUSE,
    PROFILES,
    Actuators,
    Decision,
    Inputs,
    Mode,
    Reading,
    Settings,
    start,
    threshold,
    tick,
)

ORIN = Actuators(threads=6, saturation_threads=4, freq_min_khz=420_000, freq_max_khz=1_510_000)
RK3588 = replace(ORIN, threads=8, saturation_threads=6, clusters=("big", "little"))
PLAIN = Actuators(threads=4)
AT_75 = Settings(temp_c=75.0)
MODES: tuple[Mode, ...] = ("performance", "balanced", "aggressive", "conservative", "silent")


class Drive:
    """A controller with a clock of its own; every call is a tick."""

    def __init__(
        self, policy: Settings = AT_75, actuators: Actuators = ORIN, tick_s: float = 0.5
    ) -> None:
        self.policy, self.actuators, self.tick_s = policy, actuators, tick_s
        self.state, self.now_s = start(policy), 1000.0
        self.seen: list[Decision] = []

    def __call__(self, *readings: Reading, **known: Any) -> Decision:
        self.now_s += self.tick_s
        inputs = Inputs(self.now_s, readings, **known)
        self.state, decision = tick(self.state, inputs, self.actuators, self.policy)
        self.seen.append(decision)
        return decision

    def hold(self, celsius: float, seconds: float) -> Decision:
        """The only zone says this for so long."""
        for _ in range(round(seconds / self.tick_s)):
            decision = self(soc(celsius))
        return decision

    def levels(self) -> list[int]:
        """Levels in the order in which they came."""
        found: list[int] = []
        for decision in self.seen:
            if not found or found[-1] != decision.level:
                found.append(decision.level)
        return found


def soc(celsius: float | None, age_s: float = 0.0, name: str = "tj-thermal") -> Reading:
    return Reading(name, celsius, age_s)


def outside(celsius: float | None, age_s: float = 0.0) -> Reading:
    return Reading("case", celsius, age_s, external=True)


# Thresholds.


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (Settings(temp_c=75.0), 75.0),
        (Settings(temp_c=75.0, hw_passive_c=95.0), 75.0),
        (Settings(temp_c=94.0, hw_passive_c=95.0), 90.0),
        (Settings(hw_passive_c=95.0), 85.0),
        (Settings(), None),
        (Settings(mode="performance", temp_c=75.0, hw_passive_c=95.0), 95.0),
        (Settings(mode="performance", temp_c=75.0), None),
        (Settings(mode="aggressive", temp_c=75.0, continuous_c=70.0), 70.0),
        (Settings(mode="aggressive", temp_c=65.0, continuous_c=70.0), 65.0),
        (Settings(mode="balanced", temp_c=75.0, continuous_c=70.0), 75.0),
        (Settings(mode="silent", temp_c=75.0), 65.0),
        (Settings(mode="off", temp_c=75.0), None),
    ],
)
def test_threshold(policy: Settings, wanted: float | None) -> None:
    assert threshold(policy) == wanted
    assert Drive(policy)(soc(40.0)).threshold_c == wanted


# Ladder.


def test_cool_is_free() -> None:
    decision = Drive().hold(50.0, 60.0)
    assert (decision.level, decision.duty, decision.threads) == (0, 1.0, 6)
    assert decision.freq_cap_fraction is decision.cluster is decision.max_new_tokens is None
    flags = (decision.paused, decision.unload, decision.reject_low_priority)
    assert flags == (False, False, False)
    assert (decision.temp_c, decision.threshold_c) == (50.0, 75.0)
    assert decision.reason == "balanced, free: cool"


def test_the_threshold_itself_engages() -> None:
    drive = Drive(replace(AT_75, horizon_s=0.0))
    assert drive.hold(74.9, 60.0).level == 0
    assert drive.hold(75.0, 2.0).level == 1


@pytest.mark.parametrize(
    ("actuators", "wanted"),
    [
        (RK3588, [1, 2, 3, 4, 5, 6, 7, 8]),
        (ORIN, [1, 2, 3, 4, 5, 7, 8]),
        (PLAIN, [1, 3, 7, 8]),
        (Actuators(threads=1), [1, 7, 8]),
    ],
)
def test_the_ladder_in_its_order_without_what_the_machine_lacks(
    actuators: Actuators, wanted: list[int]
) -> None:
    drive = Drive(actuators=actuators)
    drive.hold(90.0, 60.0)
    assert drive.levels() == wanted
    names = [LADDER[level].name for level in wanted]
    order = ["pace", "saturation", "half", "cap", "cap more", "slow cores", "shed", "pause"]
    assert names == [name for name in order if name in names]


def test_what_every_rung_does() -> None:
    drive = Drive(actuators=RK3588)
    drive(soc(72.0))
    drive.hold(90.0, 60.0)
    rows = {d.level: d for d in drive.seen}
    assert [rows[n].threads for n in range(9)] == [8, 8, 6, 4, 4, 4, 4, 4, 4]
    caps = [None, None, None, None, 0.85, 0.7, 0.7, 0.7, 0.7]
    assert [rows[n].freq_cap_fraction for n in range(9)] == caps
    assert [rows[n].cluster for n in range(9)] == [None] * 6 + ["little"] * 3
    assert [rows[n].max_new_tokens for n in range(9)] == [None] * 7 + [64, 64]
    assert [rows[n].reject_low_priority for n in range(9)] == [False] * 7 + [True] * 2
    assert [rows[n].paused for n in range(9)] == [False] * 8 + [True]
    assert not any(d.unload for d in drive.seen)


def test_a_cap_is_never_below_the_lowest_clock() -> None:
    drive = Drive(actuators=replace(ORIN, freq_min_khz=1_200_000))
    drive.hold(90.0, 60.0)
    caps = [d.freq_cap_fraction for d in drive.seen if d.freq_cap_fraction is not None]
    assert min(caps) == pytest.approx(1_200_000 / 1_510_000)


def test_unload_is_the_last_rung_where_it_is_allowed() -> None:
    drive = Drive(replace(AT_75, allow_unload=True))
    assert drive.hold(90.0, 60.0).unload
    assert drive.hold(60.0, 16.0).level == PAUSE


def test_one_rung_in_three_seconds_up_and_in_fifteen_down() -> None:
    drive = Drive()
    drive(soc(73.0))
    drive.hold(90.0, 60.0)
    drive.hold(71.0, 1.0)
    drive.hold(55.0, 400.0)
    changes = changes_of(drive)
    assert [after for _, _, after in changes] == [1, 2, 3, 4, 5, 7, 8, 7, 5, 4, 3, 2, 1, 0]
    times = [time for time, _, _ in changes]
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps[:6] == [3.0] * 6
    assert min(gaps[6:]) >= 15.0


def changes_of(drive: Drive) -> list[tuple[float, int, int]]:
    """(time, level before, level after)."""
    rows = list(enumerate(drive.seen))
    return [
        (index * drive.tick_s, before.level, after.level)
        for (_, before), (index, after) in pairwise(rows)
        if before.level != after.level
    ]


def test_between_release_and_threshold_nothing_changes() -> None:
    drive = Drive()
    drive.hold(75.0, 2.0)
    level = drive.seen[-1].level
    drive.hold(70.2, 600.0)
    assert {d.level for d in drive.seen[-1000:]} == {level}


def test_release_at_the_hysteresis_which_is_three_degrees_at_least() -> None:
    for hysteresis, stays, leaves in [(5.0, 70.5, 70.0), (0.5, 72.5, 72.0), (10.0, 66.0, 65.0)]:
        drive = Drive(replace(AT_75, hysteresis_c=hysteresis))
        drive.hold(75.5, 2.0)
        assert drive.hold(stays, 120.0).level == 1
        assert drive.hold(leaves, 120.0).level == 0


def test_a_rung_is_added_only_when_the_present_one_is_used_up() -> None:
    """At the threshold the duty falls first; the next rung comes when it is at its least."""
    drive = Drive()
    decision = drive.hold(75.2, 120.0)
    before = [d for d in drive.seen if d.level == 1]
    assert min(d.duty for d in before) <= 0.51
    assert decision.level > 1


def test_prediction_engages_ahead() -> None:
    drive = Drive()
    for index in range(400):
        decision = drive(soc(60.0 + 0.1 * index * 0.5))
        if decision.level:
            break
    assert decision.level == 1
    assert 69.0 < decision.temp_c < 75.0
    assert decision.predicted_c > 75.0
    assert "predicted" in decision.reason


def test_without_prediction_only_the_threshold_counts() -> None:
    drive = Drive(replace(AT_75, horizon_s=0.0))
    for index in range(300):
        decision = drive(soc(60.0 + 0.1 * index * 0.5))
        assert decision.level == 0 or decision.temp_c >= 75.0
        assert decision.predicted_c == decision.temp_c


def test_nobody_is_paused_for_a_prediction() -> None:
    drive, celsius = Drive(), 60.0
    while celsius < 74.9:
        celsius += 0.02
        assert drive(soc(celsius)).level < PAUSE


def test_falling_temperature_above_the_prediction_does_not_engage() -> None:
    drive = Drive()
    for index in range(100):
        assert drive(soc(74.8 - 0.01 * index)).level == 0


def test_longer_steps_engage_earlier() -> None:
    def ticks(trend: float) -> int:
        drive = Drive()
        for index in range(800):
            if drive(soc(60.0 + 0.05 * index * 0.5), step_time_trend=trend).level:
                return index
        raise AssertionError("never engaged")

    assert ticks(0.1) < ticks(0.0) == ticks(-0.5)


def test_a_pause_ends_where_the_air_itself_is_warm() -> None:
    """Air at 72 C: a pause can never cool to 70 C. It ends after a minute below the threshold."""
    drive = Drive()
    drive.hold(90.0, 60.0)
    assert drive.seen[-1].paused
    drive.hold(72.0, 130.0)
    assert drive.seen[-1].level == PAUSE - 1


def test_a_pause_lasts_while_it_is_too_hot() -> None:
    drive = Drive()
    assert drive.hold(80.0, 1200.0).paused


def test_shedding_ends_when_the_rung_below_does_the_same() -> None:
    drive = Drive()
    drive.hold(90.0, 16.0)
    assert drive.seen[-1].level == 7
    assert drive.hold(72.5, 300.0).level < 7


def test_who_relapses_waits_longer() -> None:
    drive = Drive(replace(AT_75, horizon_s=0.0))
    waits = []
    for _ in range(8):
        drive.hold(75.5, 4.0 if waits else 1.5)
        started = drive.now_s
        while drive.hold(60.0, 0.5).level:
            pass
        waits.append(drive.now_s - started)
    assert waits == sorted(waits)
    assert waits[0] < 20.0
    assert 500.0 < waits[-1] <= throttle.RELEASE_MOST_S


# Duty.


def test_duty_holds_below_the_threshold_and_moves_slowly() -> None:
    drive = Drive()
    drive.hold(75.0, 2.0)
    for before, after in pairwise(drive.seen):
        assert after.duty - before.duty >= -throttle.DUTY_DOWN * 0.5 - 1e-12
    decision = drive.hold(72.0, 300.0)
    assert decision.duty == 1.0


def test_near_its_aim_the_duty_moves_less() -> None:
    """Half of an error moves it by a third of what the whole one does."""

    def moved(celsius: float) -> float:
        drive = Drive(replace(AT_75, horizon_s=0.0))
        drive.hold(76.0, 4.0)
        before = drive.hold(73.5, 400.0)
        return before.duty - drive.hold(celsius, 1.0).duty

    assert 0.0 < moved(73.8) < 0.4 * moved(74.1)


@pytest.mark.parametrize(("celsius", "per_s"), [(60.0, 0.05), (71.0, 0.025), (74.9, 0.015)])
def test_the_nearer_to_the_threshold_the_slower_the_duty_grows(
    celsius: float, per_s: float
) -> None:
    policy = replace(AT_75, mode="conservative")
    drive = Drive(policy)
    drive.hold(celsius, 30.0)
    drive.policy = replace(AT_75, horizon_s=0.0)
    before = drive.seen[-1].duty
    grown = drive.hold(celsius, 2.0).duty - before
    assert grown == pytest.approx(2.0 * per_s, rel=0.01)


def idle(drive: Drive, celsius: float, seconds: float) -> Decision:
    for _ in range(round(seconds / drive.tick_s)):
        decision = drive(soc(celsius), busy=False)
    return decision


@pytest.mark.parametrize(("celsius", "duty"), [(55.0, 1.0), (64.5, 0.75), (69.0, 0.5), (74.0, 0.5)])
def test_a_load_begins_slowly_where_there_is_no_room_for_all_of_it(
    celsius: float, duty: float
) -> None:
    """Of a hot board that has nothing to do: (75 - 1.5 - T) / 12 of the time, half at least."""
    drive = Drive()
    decision = idle(drive, celsius, 60.0)
    assert (decision.level, decision.duty) == (0, pytest.approx(duty))
    assert (f"begins at {100 * duty:.0f} %" in decision.reason) == (duty < 1.0)
    before = drive(soc(celsius), busy=True).duty
    assert drive(soc(celsius), busy=True).duty - before <= throttle.DUTY_UP * 0.5 + 1e-12


def test_a_pause_between_two_requests_is_no_rest() -> None:
    drive = Drive()
    for _ in range(100):
        drive(soc(72.0), busy=True)
    assert idle(drive, 72.0, 9.0).duty == 1.0
    drive(soc(72.0), busy=True)
    assert idle(drive, 72.0, 9.0).duty == 1.0
    assert idle(drive, 72.0, 2.0).duty == 0.5


def test_who_does_not_know_whether_there_is_work_is_not_slowed() -> None:
    assert Drive().hold(72.0, 60.0).duty == 1.0


def test_the_first_load_after_a_start_begins_slowly_too() -> None:
    assert Drive()(soc(69.0), busy=True).duty == 0.5


def test_feed_forward_takes_the_sustainable_power() -> None:
    """2.5 C/W, air at 40 C: (75 - 1.5 - 40) / 2.5 = 13.4 W of 20 W: a duty of 0.67."""
    drive = Drive(replace(AT_75, rtheta_c_per_w=2.5, tau_s=100.0))
    for _ in range(400):
        decision = drive(soc(73.5), power_w=20.0, ambient_c=40.0)
    for index in range(84):
        celsius = 75.1 if index < 4 else 73.5
        decision = drive(soc(celsius), power_w=20.0 * decision.duty, ambient_c=40.0)
    assert decision.duty == pytest.approx(0.67, abs=0.1)


def test_the_operators_limit_of_the_duty() -> None:
    decision = Drive(replace(AT_75, duty_most=0.4)).hold(50.0, 60.0)
    assert (decision.level, decision.duty, decision.prefill_duty) == (0, 0.4, 0.4)
    assert Drive(replace(AT_75, duty_most=0.0)).hold(50.0, 60.0).duty == throttle.DUTY_LEAST


# Modes.


def test_conservative() -> None:
    decision = Drive(replace(AT_75, mode="conservative")).hold(50.0, 60.0)
    assert (decision.level, decision.duty, decision.threads) == (0, 0.5, 3)
    assert decision.freq_cap_fraction == 0.7
    assert (decision.prefill_duty, decision.prefill_threads) == (1.0, 6)
    assert decision.prefill_cap_fraction == 0.88


def test_conservative_without_a_cap_paces_the_prefill_too() -> None:
    decision = Drive(replace(AT_75, mode="conservative"), PLAIN).hold(50.0, 60.0)
    assert (decision.duty, decision.threads, decision.freq_cap_fraction) == (0.5, 2, None)
    assert (decision.prefill_duty, decision.prefill_threads) == (0.5, 4)


def test_a_prefill_is_not_spared_when_it_is_hot() -> None:
    decision = Drive(replace(AT_75, mode="conservative")).hold(75.5, 10.0)
    assert decision.level >= 1
    assert decision.prefill_duty == decision.duty
    assert decision.prefill_threads == decision.threads
    assert decision.prefill_cap_fraction == decision.freq_cap_fraction


def test_aggressive_takes_two_rungs_and_looks_twice_as_far() -> None:
    drive = Drive(replace(AT_75, mode="aggressive", continuous_c=70.0))
    drive.hold(90.0, 30.0)
    assert drive.levels() == [2, 4, 7, 8]
    ramp = [60.0 + 0.05 * index * 0.5 for index in range(800)]
    first = {}
    for mode in ("balanced", "aggressive"):
        drive = Drive(replace(AT_75, mode=mode))
        first[mode] = next(i for i, celsius in enumerate(ramp) if drive(soc(celsius)).level)
    assert first["aggressive"] < first["balanced"]


def test_performance_leaves_it_to_the_kernel_up_to_its_trip() -> None:
    drive = Drive(Settings(mode="performance", temp_c=75.0, hw_passive_c=95.0))
    drive.hold(94.0, 60.0)
    assert drive.levels() == [0]
    assert drive.hold(95.0, 4.0).level >= 1


def test_silent_is_cooler_and_slower_than_balanced() -> None:
    decision = Drive(replace(AT_75, mode="silent")).hold(50.0, 60.0)
    assert (decision.duty, decision.threads, decision.freq_cap_fraction) == (0.7, 3, 0.6)
    assert decision.threshold_c == 65.0


def test_off_does_nothing_but_look_at_the_sensors() -> None:
    drive = Drive(replace(AT_75, mode="off"))
    decision = drive(soc(200.0))
    assert (decision.level, decision.duty, decision.conservative_by_fault) == (0, 1.0, False)
    assert decision.sensor_faults == (("tj-thermal", "200 C is implausible"),)
    assert decision.temp_c is None
    for _ in range(3):
        decision = drive(soc(99.0))
    assert (decision.level, decision.duty, decision.temp_c) == (0, 1.0, 99.0)


def test_a_new_mode_takes_over_without_a_jump() -> None:
    drive = Drive()
    drive.hold(50.0, 60.0)
    drive.policy = replace(AT_75, mode="conservative")
    first = drive(soc(50.0))
    assert (first.threads, first.freq_cap_fraction, first.duty) == (3, 0.7, 0.9)
    assert drive.hold(50.0, 5.0).duty == 0.5


# Sensors.


def failing(decision: Decision) -> None:
    assert decision.conservative_by_fault
    assert decision.duty <= 1.0
    assert decision.threads == 3
    assert decision.freq_cap_fraction == 0.7
    assert decision.prefill_cap_fraction == 0.7
    assert decision.prefill_threads == 3
    assert decision.sensor_faults
    assert "sensor fault" in decision.reason


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (soc(50.0, age_s=5.1), "last value is 5 s old"),
        (soc(50.0, age_s=math.inf), "last value is inf s old"),
        (soc(-41.0), "-41 C is implausible"),
        (soc(151.0), "151 C is implausible"),
        (soc(math.nan), "nan C is implausible"),
        (soc(71.0), r"jumped from 50\.0 to 71\.0 C"),
        (soc(29.0), r"jumped from 50\.0 to 29\.0 C"),
        (soc(None), "gives no value"),
    ],
)
def test_a_bad_sensor_brings_the_conservative_mode(mode: Mode, bad: Reading, words: str) -> None:
    drive = Drive(Settings(mode=mode, temp_c=75.0, hw_passive_c=95.0))
    drive.hold(50.0, 60.0)
    decision = drive(bad)
    assert decision.conservative_by_fault
    assert decision.threads == 3
    assert decision.freq_cap_fraction <= 0.7
    (name, fault), = decision.sensor_faults  # fmt: skip
    assert name == "tj-thermal"
    assert re.fullmatch(words, fault)


def test_a_fault_lowers_the_duty_by_the_slew_limit_and_holds_it() -> None:
    drive = Drive()
    drive.hold(50.0, 60.0)
    for _ in range(20):
        decision = drive(soc(None))
    failing(decision)
    assert decision.duty == 0.5
    assert decision.temp_c is decision.predicted_c is None


def test_no_sensor_at_all() -> None:
    decision = Drive()()
    assert decision.sensor_faults == (("chip", "no sensor is known"),)
    assert decision.conservative_by_fault


def test_an_old_value_that_is_still_fresh_is_used() -> None:
    drive = Drive()
    for age in (0.0, 0.5, 1.0, 1.5, 4.9):
        assert not drive(soc(50.0, age_s=age)).conservative_by_fault


def test_a_sensor_is_believed_again_after_three_good_samples_and_fifteen_seconds() -> None:
    drive = Drive()
    drive.hold(50.0, 60.0)
    drive(soc(160.0))
    seen = [drive(soc(50.0)).conservative_by_fault for _ in range(40)]
    assert seen.count(True) == pytest.approx(15.0 / 0.5 + 2, abs=1)
    assert not seen[-1]
    assert drive.hold(50.0, 20.0).duty == 1.0


def test_median_of_three_ignores_one_odd_sample() -> None:
    drive = Drive()
    drive.hold(65.0, 60.0)
    for celsius in (65.0, 80.0, 65.0):
        decision = drive(soc(celsius))
        assert (decision.temp_c, decision.level) == (65.0, 0)


def test_a_fast_sensor_may_not_jump_in_small_steps() -> None:
    drive = Drive(tick_s=0.1)
    drive.hold(50.0, 5.0)
    faults = [drive(soc(50.0 + 3.0 * step)).sensor_faults for step in range(1, 10)]
    assert not faults[5]
    assert faults[6]


def test_a_slow_sensor_may_change_by_twenty_degrees_a_second() -> None:
    drive = Drive(tick_s=3.0)
    drive.hold(30.0, 30.0)
    assert not drive(soc(75.0)).sensor_faults
    assert drive(soc(10.0)).sensor_faults


def test_the_hottest_zone_counts() -> None:
    drive = Drive()
    for _ in range(5):
        decision = drive(soc(50.0, name="cpu"), soc(61.0, name="gpu"), soc(None, name="cv0"))
    assert decision.temp_c == 61.0
    assert not decision.conservative_by_fault


def test_a_zone_that_is_switched_off_is_no_fault_while_another_tells() -> None:
    drive = Drive()
    assert not drive(soc(50.0, name="cpu"), soc(None, name="gpu")).sensor_faults
    both = drive(soc(None, name="cpu"), soc(None, name="gpu"))
    assert both.sensor_faults == (("cpu", "gives no value"), ("gpu", "gives no value"))


def test_a_bad_zone_does_not_hide_a_hot_one() -> None:
    drive = Drive()
    for _ in range(10):
        decision = drive(soc(500.0, name="cpu"), soc(80.0, name="gpu"))
    assert decision.conservative_by_fault
    assert decision.level >= 2
    assert decision.temp_c == 80.0


def test_zones_may_come_go_and_change_their_order() -> None:
    drive = Drive()
    for _ in range(5):
        drive(soc(40.0, name="a"), soc(70.0, name="b"))
    assert not drive(soc(70.0, name="b"), soc(40.0, name="a")).sensor_faults
    assert not drive(soc(40.0, name="a")).sensor_faults
    assert not drive(soc(71.0, name="c"), soc(40.0, name="a")).sensor_faults


def test_a_fault_does_not_end_the_throttling() -> None:
    drive = Drive()
    drive.hold(90.0, 14.0)
    level = drive.seen[-1].level
    assert level >= 4
    for _ in range(100):
        decision = drive(soc(None))
    assert decision.level == level


def test_a_pause_without_any_sensor_ends_after_a_minute() -> None:
    drive = Drive()
    drive.hold(90.0, 60.0)
    assert drive.seen[-1].paused
    paused = [drive(soc(None)).paused for _ in range(300)]
    assert paused.index(False) == pytest.approx(60.0 / 0.5, abs=100)
    assert not paused[-1]
    assert drive.seen[-1].level == PAUSE - 1


# External sensors.


def test_an_external_sensor_engages_by_itself() -> None:
    drive = Drive()
    for celsius in (62.0, 62.0, 62.0, 76.0, 76.0, 76.0):
        decision = drive(soc(50.0), outside(celsius))
    assert decision.level >= 1
    assert decision.temp_c == 76.0


def test_a_cool_external_sensor_changes_nothing() -> None:
    alone, both = Drive(), Drive()
    for index in range(600):
        celsius = 60.0 + 18.0 * math.sin(index / 40.0)
        first, second = alone(soc(celsius)), both(soc(celsius), outside(20.0))
        assert first == second


def test_an_external_sensor_never_stands_in_for_the_chips() -> None:
    decision = Drive()(soc(None), outside(40.0))
    assert decision.conservative_by_fault
    assert decision.temp_c is None


@pytest.mark.parametrize("bad", [outside(None), outside(40.0, 6.0), outside(300.0)])
def test_a_bad_external_sensor_is_conservative_and_the_chips_still_counts(bad: Reading) -> None:
    drive = Drive()
    drive(soc(50.0), outside(40.0))
    for _ in range(10):
        decision = drive(soc(80.0) if len(drive.seen) > 4 else soc(65.0), bad)
    assert decision.conservative_by_fault
    assert decision.level >= 1


def test_two_hundred_milliseconds_from_an_external_reading_to_a_lower_duty() -> None:
    """At 10 Hz the second of two hot samples passes the median of three: 100 ms."""
    drive = Drive(tick_s=0.1)
    for _ in range(200):
        drive(soc(60.0), outside(70.0))
    before = drive.seen[-1]
    assert (before.level, before.duty) == (0, 1.0)
    hot = [drive(soc(60.0), outside(82.0)) for _ in range(2)]
    assert hot[1].level == 1
    assert hot[1].duty < 1.0


# What always holds.

temperatures = st.none() | st.floats(-300.0, 300.0) | st.floats(20.0, 100.0)
smooth = st.lists(st.floats(-6.0, 6.0), min_size=1, max_size=200)
policies = st.builds(
    Settings,
    mode=st.sampled_from(MODES),
    temp_c=st.floats(40.0, 90.0),
    hysteresis_c=st.floats(3.0, 10.0),
    horizon_s=st.sampled_from([0.0, 5.0, 30.0, 120.0]),
    hw_passive_c=st.none() | st.floats(60.0, 100.0),
    continuous_c=st.none() | st.floats(40.0, 80.0),
    rtheta_c_per_w=st.none() | st.floats(0.5, 10.0),
    tau_s=st.none() | st.floats(10.0, 600.0),
    duty_most=st.floats(0.0, 1.0),
    allow_unload=st.booleans(),
)
machines = st.sampled_from([ORIN, RK3588, PLAIN, Actuators(threads=1)])


def walk(steps: Sequence[float], odd: Sequence[float | None]) -> list[float | None]:
    """A random walk from 60 C, with odd values strewn in."""
    celsius, found = 60.0, []
    for index, step in enumerate(steps):
        celsius = min(120.0, max(0.0, celsius + step))
        strange = odd[index % len(odd)] if odd and index % 17 == 16 else celsius
        found.append(strange)
    return found


def check(drive: Drive, before: Decision | None, seconds: float) -> None:
    after = drive.seen[-1]
    assert 0.0 < after.duty <= 1.0
    assert after.duty <= after.prefill_duty <= 1.0
    assert 1 <= after.threads <= after.prefill_threads <= drive.actuators.threads
    assert after.freq_cap_fraction is None or 0.0 < after.freq_cap_fraction <= 1.0
    assert after.level in range(len(LADDER))
    assert after.paused == (after.level >= PAUSE)
    assert after.unload == (after.level > PAUSE)
    assert after.threshold_c == threshold(drive.policy)
    if after.conservative_by_fault:
        assert after.threads <= max(1, drive.actuators.threads // 2)
    if before is not None:
        moved = after.duty - before.duty
        assert -throttle.DUTY_DOWN * seconds - 1e-9 <= moved <= throttle.DUTY_UP * seconds + 1e-9


@settings(deadline=None, max_examples=60)
@given(
    policies, machines, smooth, st.lists(temperatures, max_size=6), st.sampled_from([0.1, 0.5, 2])
)
def test_duty_and_levels_keep_their_limits(
    policy: Settings,
    machine: Actuators,
    steps: list[float],
    odd: list[float | None],
    tick_s: float,
) -> None:
    drive, changed_s = Drive(policy, machine, tick_s), -math.inf
    rungs = throttle._rungs(machine, policy)
    for index, celsius in enumerate(walk(steps, odd)):
        before = drive.seen[-1] if drive.seen else None
        after = drive(soc(celsius), power_w=10.0 + index % 7, ambient_c=20.0 + index % 30)
        check(drive, before, tick_s)
        if before is not None and after.level != before.level:
            rested = drive.now_s - changed_s
            jump = rungs.index(after.level) - rungs.index(before.level)
            assert -1 <= jump <= PROFILES[policy.mode].rungs
            assert rested >= (throttle.ENGAGE_S if jump > 0 else throttle.RELEASE_S) - 1e-9
            changed_s = drive.now_s


@settings(deadline=None, max_examples=60)
@given(policies, machines, smooth, smooth, temperatures, st.lists(temperatures, max_size=3))
def test_from_any_state_an_external_sensor_is_only_stricter(
    policy: Settings,
    machine: Actuators,
    steps: list[float],
    others: list[float],
    last: float | None,
    odd: list[float | None],
) -> None:
    """The same state, the same reading of the chip: with the external sensor no milder."""
    drive = Drive(policy, machine)
    inside, beside = walk(steps, []), walk(others, odd)
    for index, celsius in enumerate(inside):
        drive(soc(celsius), outside(beside[index % len(beside)]), power_w=15.0)
    now = drive.now_s + 0.5
    chip, case = soc(inside[-1]), outside(last)
    alone = tick(drive.state, Inputs(now, [chip], 15.0), machine, policy)[1]
    both = tick(drive.state, Inputs(now, [chip, case], 15.0), machine, policy)[1]
    assert both.level >= alone.level
    assert both.threads <= alone.threads
    assert (both.freq_cap_fraction or 1.0) <= (alone.freq_cap_fraction or 1.0)
    assert both.reject_low_priority >= alone.reject_low_priority
    assert both.paused >= alone.paused
    if both.level == alone.level:
        assert both.duty <= alone.duty + 1e-9
        assert both.prefill_duty <= alone.prefill_duty + 1e-9


@settings(deadline=None, max_examples=15)
@given(policies, machines, smooth)
def test_a_cool_machine_is_free_again(
    policy: Settings, machine: Actuators, steps: list[float]
) -> None:
    drive = Drive(policy, machine, 5.0)
    for celsius in walk(steps, [500.0, None]):
        drive(soc(celsius))
    decision = drive.hold(10.0, 6000.0)
    assert (decision.level, decision.conservative_by_fault) == (0, False)
    assert decision.duty == pytest.approx(throttle._duty_most(policy, False))


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), max_size=40), policies)
def test_a_clock_that_misbehaves_breaks_nothing(times: list[float], policy: Settings) -> None:
    state = start(policy)
    for now in times:
        state, decision = tick(state, Inputs(now, [soc(60.0)], 10.0, 25.0), ORIN, policy)
        assert 0.0 < decision.duty <= 1.0


def test_decisions_and_states_are_values() -> None:
    first, second = Drive(), Drive()
    for celsius in (50.0, 76.0, 77.0, 70.0):
        assert first(soc(celsius)) == second(soc(celsius))
    assert first.state == second.state
    with pytest.raises(AttributeError):
        first.seen[0].level = 3  # type: ignore[misc]
