"""The reference's fmaf and reductions against exact integer arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from reference import floatmath as fm

LARGEST = Fraction(2**24 - 1) * 2**104


def nearest_float32(value: Fraction) -> float:
    """Round to nearest even by integers alone."""
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length() - 24
    while size >= Fraction(2) ** (exponent + 24):
        exponent += 1
    exponent = max(exponent, -149)
    scaled = size / Fraction(2) ** exponent
    whole, rest = divmod(scaled.numerator, scaled.denominator)
    twice = 2 * rest
    if twice > scaled.denominator or (twice == scaled.denominator and whole & 1):
        whole += 1
    rounded = whole * Fraction(2) ** exponent
    result = float("inf") if rounded > LARGEST else float(rounded)
    return -result if value < 0 else result


def exact(x: np.float32, y: np.float32, z: np.float32) -> float:
    return nearest_float32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))


def check(x: fm.F32, y: fm.F32, z: fm.F32) -> None:
    got = fm.fmaf(x, y, z)
    want = np.array([exact(*t) for t in zip(x, y, z, strict=True)], np.float32)
    wrong = np.flatnonzero(got != want)  # zeros compare equal whatever their sign
    assert wrong.size == 0, [(x[i], y[i], z[i], got[i], want[i]) for i in wrong[:5]]


def random_floats(rng: np.random.Generator, count: int, low: int, high: int) -> fm.F32:
    """Random significands and signs, exponents in low..high."""
    significand = rng.integers(2**23, 2**24, count).astype(np.float64) * 2.0**-23
    sign = rng.choice([-1.0, 1.0], count)
    return (sign * significand * 2.0 ** rng.integers(low, high + 1, count)).astype(np.float32)


def test_fmaf_of_near_magnitudes_equals_exact_arithmetic() -> None:
    rng = np.random.default_rng(1)
    for spread in (1, 12, 30):
        x, y, z = (random_floats(rng, 6000, -spread, spread) for _ in range(3))
        check(x, y, z)


def test_fmaf_with_cancellation_equals_exact_arithmetic() -> None:
    rng = np.random.default_rng(2)
    x, y = random_floats(rng, 6000, -3, 3), random_floats(rng, 6000, -3, 3)
    check(x, y, -(x * y))


def near_ties(rng: np.random.Generator, count: int) -> tuple[fm.F32, fm.F32, fm.F32]:
    """x * y a hair below half an ulp of z, on either side: rounding to double makes a tie of it."""
    z = random_floats(rng, count, 0, 0)
    a = rng.integers(1, 2**8, count)
    sign = rng.choice([-1.0, 1.0], count)
    x = (sign * 2.0**-24 * (1 + a * 2.0**-23)).astype(np.float32)
    y = (1 - a * 2.0**-23).astype(np.float32)
    return x, y, z


def test_fmaf_near_ties_equals_exact_arithmetic() -> None:
    rng = np.random.default_rng(3)
    x, y, z = near_ties(rng, 6000)
    check(x, y, z)
    naive = (x.astype(np.float64) * y + z).astype(np.float32)
    assert np.count_nonzero(naive != fm.fmaf(x, y, z)) > 1000, "the cases are not hard ones"


@pytest.mark.parametrize("shift", [-140, -126, -100, 90])
def test_fmaf_at_the_ends_of_the_range_equals_exact_arithmetic(shift: int) -> None:
    rng = np.random.default_rng(4)
    with np.errstate(over="ignore", under="ignore"):
        x, y, z = near_ties(rng, 2000)
        scale = np.float32(2.0**shift)
        check(x * scale, y, z * scale)
        x = random_floats(rng, 2000, -80, -60)
        y = random_floats(rng, 2000, -80, -60)
        check(x, y, random_floats(rng, 2000, -126, -120) * np.float32(2.0**-20))


def test_fmaf_of_exact_ties_goes_to_even() -> None:
    z = np.arange(2**23, 2**23 + 512, dtype=np.float32)
    half = np.full(512, 0.5, np.float32)
    check(half, np.ones(512, np.float32), z)
    check(half, -np.ones(512, np.float32), z)


def test_fmaf_overflows_to_infinity_and_keeps_signs_of_zero() -> None:
    big = np.float32(3e38)
    assert fm.fmaf(big, np.float32(2), big) == np.inf
    assert fm.fmaf(big, np.float32(2), -big) == big
    assert not np.signbit(fm.fmaf(np.float32(1), np.float32(-1), np.float32(1)))
    assert np.signbit(fm.fmaf(np.float32(-0.0), np.float32(1), np.float32(-0.0)))


@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 67])
def test_dot16_uses_sixteen_lanes_and_one_tree(size: int) -> None:
    rng = np.random.default_rng(size)
    x = rng.standard_normal(size).astype(np.float32)
    y = rng.standard_normal(size).astype(np.float32)
    lanes = [np.float32(0)] * 16
    for i in range(size):
        lanes[i % 16] = np.float32(exact(x[i], y[i], lanes[i % 16]))
    for width in (8, 4, 2, 1):
        lanes = [lanes[i] + lanes[i + width] for i in range(width)]
    assert fm.dot16(x, y) == lanes[0]
