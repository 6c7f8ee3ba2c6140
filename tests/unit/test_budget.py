"""The budget of a board, and that of the caller's own."""

from __future__ import annotations

import pytest

from gemmake.errors import TargetError
from gemmake.hdf import load_hdf, with_policy

MIB = 1 << 20


@pytest.mark.parametrize(
    ("reserve", "fraction", "mib"),
    [(None, None, 145), (100, None, 124), (0, 0.9, 201), (None, 1.0, 160)],
)
def test_the_budget_of_the_caller(reserve: int | None, fraction: float | None, mib: int) -> None:
    hdf = load_hdf("meter-256mb")
    changed = with_policy(hdf, reserve, fraction)
    assert changed.budget_bytes() == mib * MIB
    assert changed.sha256() == hdf.sha256()  # the policy is no part of the board
    assert (changed == hdf) == (reserve is None and fraction is None)


def test_without_memory_there_is_no_budget_to_change() -> None:
    hdf = load_hdf("generic-x86-64")
    assert with_policy(hdf, None, None) is hdf
    with pytest.raises(TargetError, match="does not state its memory"):
        with_policy(hdf, 64, None)
