"""Shapes and counts whose product wraps to something small (O1; CVE-2026-33298 and its kin).

A reader that multiplies in 32 or 64 bits without checks would take a huge tensor for a small one.
"""

from __future__ import annotations

from collections.abc import Iterator

from attacks.attacklib import Attempt, Code, edited, entry_edited, report, section


def attack(good: bytes) -> Iterator[Attempt]:
    """Every product that the format knows."""
    for rows, cols in ((2**32 - 16, 32), (2**31, 2**31), (2**16, 2**16), (0, 32), (32, 0)):
        image = edited(good, "TENS", 96 + 16, "II", rows, cols)
        yield Attempt(f"tensor of {rows} x {cols}", image, Code.TENS)
    yield Attempt("2^32 - 1 parts", edited(good, "TENS", 96 + 40, "I", 2**32 - 1), Code.TENS)
    size = section(good, "TENS")[1]
    count = (2**64 + size) // 96 + 1
    image = entry_edited(good, "TENS", 40, "Q", count)
    yield Attempt("record_size * record_count wraps", image, Code.TABLE)
    for field, value in (("heads", 2**31), ("ffn", 2**32 - 1), ("window", 2**32 - 31)):
        at = {"heads": 8, "ffn": 20, "window": 28}[field]
        image = edited(good, "LAYR", at, "I", value)
        yield Attempt(f"layer with {field} {value}", image, Code.LAYR)
    yield Attempt("context of 2^32 - 1", edited(good, "CONF", 16, "I", 2**32 - 1), Code.CONF)
    image = edited(good, "SEGM", 16 + 8, "I", 2**32 - 1)
    yield Attempt("segment of 2^32 - 1 groups", image, Code.SEGM)


if __name__ == "__main__":
    report(attack)
