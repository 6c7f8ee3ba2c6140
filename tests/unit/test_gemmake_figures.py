"""Figures for people: sizes in MiB, bounds never too good."""

from __future__ import annotations

import pytest

from gemmake.figures import at_least, at_most, figure, mib


@pytest.mark.parametrize(
    ("value", "near", "least", "most"),
    [
        (0.0042, "0.0042", "0.0042", "0.0042"),
        (0.00421, "0.0042", "0.0042", "0.0043"),
        (0.304, "0.30", "0.30", "0.31"),
        (0.999, "1.0", "0.99", "1.0"),
        (1.04, "1.0", "1.0", "1.1"),
        (9.97, "10", "9.9", "10"),
        (10.4, "10", "10", "11"),
        (29.999999999999996, "30", "30", "30"),  # of 0.3 * 100, no less
        (30.000000000000004, "30", "30", "30"),
        (1234.6, "1,235", "1,234", "1,235"),
        (0.0, "0.00", "0.00", "0.00"),
    ],
)
def test_bounds_are_rounded_away_from_a_promise(
    value: float, near: str, least: str, most: str
) -> None:
    assert (figure(value), at_least(value), at_most(value)) == (near, least, most)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.00 MiB"), (1 << 20, "1.00 MiB"), ((1 << 20) + 6000, "1.01 MiB")],
)
def test_sizes_are_binary(size: int, text: str) -> None:
    assert mib(size) == text
    assert mib(5 << 20, 1) == "5.0 MiB"
