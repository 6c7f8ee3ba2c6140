"""The reference's functions: accuracy against 40 digits, rounding rules, shapes of results."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest

from reference import floatmath as fm


def exp40(x: Decimal) -> Decimal:
    return x.exp()


def tanh40(x: Decimal) -> Decimal:
    t = (-2 * abs(x)).exp()
    return ((1 - t) / (1 + t)).copy_sign(x)


def sigmoid40(x: Decimal) -> Decimal:
    return 1 / (1 + (-x).exp())


def gelu40(x: Decimal) -> Decimal:
    u = Decimal("0.79788456080286535587989211986876") * (x + Decimal("0.044715") * x**3)
    return x / 2 * (1 + tanh40(u))


def ulps(got: fm.F32, x: fm.F32, true: Callable[[Decimal], Decimal]) -> float:
    """Largest error in units of the last place of the true value."""
    worst = Decimal(0)
    with localcontext() as context:
        context.prec = 40
        for value, argument in zip(got, x, strict=True):
            exact = true(Decimal(float(argument)))
            unit = Decimal(float(np.spacing(np.float32(abs(float(exact))))))
            worst = max(worst, abs(Decimal(float(value)) - exact) / unit)
    return float(worst)


def sample(low: float, high: float, count: int = 3000) -> fm.F32:
    """Uniform arguments and small ones of both signs that lie inside."""
    rng = np.random.default_rng(5)
    wide = rng.uniform(low, high, count)
    near = rng.choice([-1, 1], count) * 2.0 ** rng.uniform(-20, 0, count)
    return np.concatenate([wide, near[(near > low) & (near < high)]]).astype(np.float32)


@pytest.mark.parametrize(
    ("function", "true", "low", "high", "bound"),
    [
        (fm.expf, exp40, -87.0, 88.0, 1.0),
        (fm.tanhf, tanh40, -12.0, 12.0, 1.75),
        (fm.sigmoid, sigmoid40, -80.0, 88.0, 2.75),
    ],
)
def test_function_stays_within_its_stated_bound(
    function: Callable[[fm.F32], fm.F32],
    true: Callable[[Decimal], Decimal],
    low: float,
    high: float,
    bound: float,
) -> None:
    x = sample(low, high)
    assert ulps(function(x), x, true) <= bound


def test_gelu_stays_within_its_stated_bound() -> None:
    x = sample(-10.0, 10.0)
    got = fm.gelu_tanh(x)
    with localcontext() as context:
        context.prec = 40
        true = [gelu40(Decimal(float(v))) for v in x]
        for value, argument, exact in zip(got, x, true, strict=True):
            assert abs(Decimal(float(value)) - exact) <= Decimal("2e-7") * abs(
                Decimal(float(argument))
            )


def test_exp_at_its_ends() -> None:
    below = np.nextafter(np.float32(-87), np.float32(-100))
    x = np.array([below, -1000, -np.inf, 88, 89, np.inf, 0, np.nan], np.float32)
    y = fm.expf(x)
    assert y[:3].tolist() == [0, 0, 0]
    assert not np.signbit(y[:3]).any()
    assert y[3] == y[4] == y[5]
    assert np.isfinite(y[3])
    assert y[6] == 1
    assert np.isnan(y[7])
    assert fm.expf(np.float32(-87)) > 0


def test_activation_codes_are_symmetric_and_reach_127() -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((200, 32)).astype(np.float32)
    codes, scale = fm.quantise_activations(x)
    assert np.abs(codes).max(axis=-1).tolist() == [127] * 200
    assert np.abs(codes * scale[:, None] - x).max() <= np.abs(x).max() / 127 * 0.5001


def test_activation_group_below_the_limit_is_zero() -> None:
    x = np.zeros((3, 32), np.float32)
    x[0, 3] = np.nextafter(np.float32(2.0**-50), np.float32(0))
    x[1, 3] = -(2.0**-50)
    codes, scale = fm.quantise_activations(x)
    assert scale[0] == scale[2] == 0
    assert not codes[0].any()
    assert codes[1, 3] == -127


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_value_that_is_not_finite_is_refused(value: float) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, 7] = value
    with pytest.raises(fm.NonFinite):
        fm.quantise_activations(x)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_kv_scale_is_a_bfloat16_that_is_not_below_the_wanted_one(group: int) -> None:
    rng = np.random.default_rng(group)
    x = rng.standard_normal((50, 128)).astype(np.float32)
    codes, scale = fm.quantise_kv(x, group)
    wanted = np.abs(x.reshape(50, -1, group)).max(axis=-1) / np.float32(127)
    assert not (fm.bits(scale) & 0xFFFF).any()
    assert (scale >= wanted).all()
    assert (scale < wanted * np.float32(1 + 2.0**-7)).all()
    assert np.abs(codes).max() <= 127


def test_softmax_sums_by_absolute_position() -> None:
    rng = np.random.default_rng(8)
    scores = rng.standard_normal((1, 1, 40)).astype(np.float32)
    visible = np.zeros((1, 40), bool)
    visible[0, 5:37] = True
    e, total = fm.softmax_parts(scores, visible)
    lanes = np.zeros(16, np.float32)
    for j in range(5, 37):
        lanes[j % 16] += e[0, 0, j]
    assert total[0, 0] == fm.tree16(lanes)
    assert not e[0, 0, :5].any()
