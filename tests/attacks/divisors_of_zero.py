"""Zeros and odd numbers where the engine divides or takes a remainder (O2)."""

from __future__ import annotations

from collections.abc import Iterator

from attacks.attacklib import Attempt, Code, edited, header_edited, report


def attack(good: bytes) -> Iterator[Attempt]:
    """Alignment is a constant; every divisor is checked before it divides."""
    for align in (0, 1, 3, 24, 128, 2**31):
        image = header_edited(good, 28, "I", align)
        yield Attempt(f"alignment {align}", image, Code.HEADER)
    for at, name in ((8, "heads"), (12, "kv_heads"), (16, "head_dim"), (52, "kv_group")):
        for value in (0,) if name == "heads" else (0, 3, 7):
            image = edited(good, "LAYR", at, "I", value)
            yield Attempt(f"{name} {value}", image, Code.LAYR)
    for at, name in ((4, "hidden"), (8, "vocab_rows"), (16, "context"), (24, "chunk")):
        yield Attempt(f"{name} 0", edited(good, "CONF", at, "I", 0), Code.CONF)
    yield Attempt("threads 0", edited(good, "CONF", 28, "I", 0), Code.CONF)
    yield Attempt("a segment of no groups", edited(good, "SEGM", 8, "I", 0), Code.SEGM)
    yield Attempt("a table of no pairs", edited(good, "ROPE", 0, "I", 0), Code.ROPE)


if __name__ == "__main__":
    report(attack)
