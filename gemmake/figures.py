"""Figures for people: one rule for sizes, one for bounds.

Every size that gemmake prints is in MiB, as boards, budgets and `--reserve` count; only the last
line of a compile, and the first of its listing, say the total in whole decimal MB, rounded up. What
is counted per second stays decimal, as data sheets have it: MB/s, GB/s.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal

MIB = 1 << 20
SURE = ".12g"  # digits of a float that are no noise of its arithmetic


def mib(size: int, digits: int = 2) -> str:
    """12.34 MiB."""
    return f"{size / MIB:.{digits}f} MiB"


def figure(value: float) -> str:
    """Two or three digits that count, to the nearest."""
    return _figure(value, ROUND_HALF_EVEN)


def at_least(value: float) -> str:
    """The same, rounded down: what is promised is not less."""
    return _figure(value, ROUND_FLOOR)


def at_most(value: float) -> str:
    """The same, rounded up: what is a limit is not more."""
    return _figure(value, ROUND_CEILING)


def _figure(value: float, way: str) -> str:
    exact = Decimal(format(value, SURE))
    rounded = exact.quantize(_last(exact), rounding=way)
    return f"{rounded.quantize(_last(rounded), rounding=way):,f}"


def _last(value: Decimal) -> Decimal:
    """The last digit that is shown: ones from 10 on, tenths from 1, hundredths from a tenth, then
    two digits that count."""
    place = value.adjusted() if value else -1
    return Decimal(1).scaleb(min(0, max(place - 1, -12)))
