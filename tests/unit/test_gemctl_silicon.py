"""What a cap of the clock does: the assumed line of volts, and a board's own curve."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemctl.core.silicon import Silicon, curve_of
from gemctl.core.throttle import Actuators, Inputs, Reading, Settings, start, tick
from gemctl.serve import artifact
from gemmake.hdf import list_targets, load_hdf

GOLDEN = Path(__file__).resolve().parent.parent / "golden/v1.0"

A78 = Silicon(max_mhz=1510.0, min_mhz=420.0)


def test_voltage_and_power_of_a_cap() -> None:
    assert A78.volts(1.0) == pytest.approx(1.0)
    assert A78.volts(420.0 / 1510.0) == A78.volts(0.0) == pytest.approx(0.6)
    assert A78.dynamic_factor(0.7) == pytest.approx(0.7 * 0.8338**2, rel=1e-3)
    assert A78.power_factor(1.0) == pytest.approx(1.0)
    assert A78.power_factor(1.0, duty=0.5) == pytest.approx(0.65)
    assert A78.power_factor(0.7, duty=0.5, threads_share=0.5) == pytest.approx(0.385, abs=1e-3)


def test_speed_of_a_cap() -> None:
    assert A78.speed_factor(0.7, 1.0) == pytest.approx(0.7)
    assert A78.speed_factor(0.7, 0.0) == pytest.approx(1.0)
    assert 1.0 / A78.speed_factor(0.7, 0.35) == pytest.approx(1.15)


@settings(deadline=None)
@given(st.floats(0.05, 1.0), st.floats(0.05, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_lower_cap_is_never_faster_nor_hotter(a: float, b: float, duty: float, c: float) -> None:
    low, high = min(a, b), max(a, b)
    assert A78.power_factor(low, duty) <= A78.power_factor(high, duty) + 1e-12
    assert A78.speed_factor(low, c) <= A78.speed_factor(high, c) + 1e-12
    assert 0.3 <= A78.power_factor(low, duty) <= 1.0


def test_silicon_without_a_lowest_clock() -> None:
    assert Silicon(2000.0).volts(0.25) == pytest.approx(0.6)


# A board's own curve.

BIG = ((1200.0, 0.675), (1608.0, 0.7625), (2016.0, 0.925), (2400.0, 1.0))
RK3588 = Silicon(2400.0, 408.0, curve=BIG)


def test_a_cap_is_the_highest_point_that_it_allows() -> None:
    """0.7 of 2400 MHz allow 1680: the kernel takes 1608, at 0.7625 V."""
    assert RK3588.volts(1.0) == 1.0
    assert RK3588.volts(0.7) == pytest.approx(0.7625)
    assert RK3588.dynamic_factor(0.7) == pytest.approx(0.67 * 0.7625**2)
    assert RK3588.dynamic_factor(0.1) == pytest.approx(0.5 * 0.675**2)  # there is none below
    assert Silicon(2016.0, curve=BIG).volts(0.8) == pytest.approx(0.7625 / 0.925)  # a slower bin


def test_only_the_ratios_of_the_volts_count() -> None:
    relative = replace(RK3588, curve=tuple((mhz, volts / 2) for mhz, volts in BIG))
    assert relative.dynamic_factor(0.7) == pytest.approx(RK3588.dynamic_factor(0.7))


@settings(deadline=None)
@given(st.floats(0.05, 1.0), st.floats(0.05, 1.0))
def test_by_a_curve_a_lower_cap_is_never_hotter(a: float, b: float) -> None:
    assert RK3588.dynamic_factor(min(a, b)) <= RK3588.dynamic_factor(max(a, b))


def test_the_throttle_goes_on_from_the_same_power_by_the_boards_own_curve() -> None:
    """A rung down the duty begins where the power stays the same, which the volts decide."""

    def begin(curve: tuple[tuple[float, float], ...]) -> float:
        actuators = Actuators(8, 6, 408_000, 2_400_000, curve=curve)
        policy = Settings(temp_c=75.0, horizon_s=0.0)
        before = replace(start(policy), level=5, duty=1.0, last_s=1000.0)
        state, decision = tick(before, Inputs(1000.0, [Reading("tj", 70.0)]), actuators, policy)
        assert (before.level, decision.level) == (5, 4)
        assert state.integral is not None
        return state.integral

    steep = ((1200.0, 0.4), (1680.0, 0.5), (2040.0, 0.9), (2400.0, 1.0))
    assert begin(steep) < begin(()) - 0.2


CORES = [4, 5]


def described(**cluster: Any) -> dict[str, Any]:
    little = {"id": "c0", "cores": [0, 1], "opp_mhz": [400, 1800], "opp_volts": [0.7, 0.9]}
    return {"cpu": {"cluster": [little, {"id": "c1", "cores": CORES, **cluster}]}}


def test_the_curve_of_the_fast_cores_is_taken() -> None:
    own = {"opp_mhz": [1200, 2400], "opp_volts": [0.675, 1.0]}
    assert curve_of(described(**own), CORES) == ((1200.0, 0.675), (2400.0, 1.0))
    assert curve_of(described(), CORES) == ()
    assert curve_of(described(**own), [9]) == ()
    one = {"cpu": {"cluster": [{"id": "c0", **own}]}}  # cores not known, one cluster
    assert curve_of(one, [0]) == ((1200.0, 0.675), (2400.0, 1.0))


@pytest.mark.parametrize(
    "hdf",
    [
        None, 7, [], {}, {"cpu": 1}, {"cpu": {"cluster": 1}}, {"cpu": {"cluster": [1, None]}},
        described(opp_mhz=[1200], opp_volts=[1.0]),
        described(opp_mhz=[1200, 2400], opp_volts=[1.0]),
        described(opp_mhz=[2400, 1200], opp_volts=[0.7, 1.0]),
        described(opp_mhz=[1200, 2400], opp_volts=[1.0, 0.7]),
        described(opp_mhz=[1200, 2400], opp_volts=[0, 1.0]),
        described(opp_mhz=[1200, 2400], opp_volts=["0.7", 1.0]),
        described(opp_mhz=[True, 2400], opp_volts=[0.7, 1.0]),
        described(opp_mhz="12", opp_volts="12"),
        described(cores=[[1], {}], opp_mhz=[1200, 2400], opp_volts=[0.7, 1.0]),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_no_curve(hdf: Any) -> None:
    assert curve_of(hdf, CORES) == ()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.gembin")), ids=lambda path: path.stem)
def test_an_artifact_of_before_has_none(path: Path) -> None:
    assert curve_of(artifact.board(path)[1], [0]) == ()


def test_the_shipped_curves_say_more_than_the_assumption() -> None:
    known = [board for name in list_targets() for board in [load_hdf(name)]]
    curves = [(b, c) for b in known for c in b.cpu.cluster if c.opp_mhz is not None]
    assert len(curves) >= 9
    for board, cluster in curves:
        for field in ("opp_mhz", "opp_volts"):
            source = board.origin(f"cpu.cluster[{cluster.id}].{field}")
            assert source is not None
            assert source.verified
            assert source.kind == "device-tree"
