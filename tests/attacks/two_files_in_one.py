"""Bytes that no section covers, and bytes that two cover: room for a second file format, for
smuggled data, and for readers that see different things in one file.
"""

from __future__ import annotations

from collections.abc import Iterator

from attacks.attacklib import (
    Attempt,
    Code,
    edited,
    entry_edited,
    header_edited,
    report,
    reseal,
    section,
)


def attack(good: bytes) -> Iterator[Attempt]:
    """Gaps, tails, overlaps, reserved bytes."""
    whot = section(good, "WHOT")[0]
    gap = bytearray(good)
    gap[whot - 4 : whot] = b"PK\3\4"
    yield Attempt("an archive before the weights", bytes(gap), Code.GAP)
    yield Attempt("an archive after the end", good + b"PK\3\4" * 64, Code.SIZE)
    longer = header_edited(good + b"PK\3\4" * 64, 32, "Q", len(good) + 256)
    yield Attempt("the same, with file_size raised", longer, Code.TABLE)
    conf = section(good, "CONF")[0]
    image = entry_edited(good, "LAYR", 8, "Q", conf)
    yield Attempt("two sections on the same bytes", image, Code.TABLE)
    image = entry_edited(good, "THRM", 16, "QQ", 4096, 4096)
    yield Attempt("a section that reaches into the next", image, Code.TABLE)
    between = bytearray(good)
    tens = section(good, "TENS")[0] + 96 * 0
    first = int.from_bytes(good[tens + 48 : tens + 56], "little")
    between[first + 128] = 1  # the first tensor has 128 bytes, the next starts at 256
    yield Attempt("data between two tensors", bytes(reseal(between)), Code.TENS)
    for name, at in (("CONF", 200), ("LAYR", 90), ("TENS", 85), ("PLAN", 40), ("THRM", 20)):
        code = Code[name]
        yield Attempt(f"data in reserved bytes of {name}", edited(good, name, at, "B", 1), code)
    yield Attempt("data in reserved bytes of TEST", edited(good, "TEST", 1900, "B", 1), Code.TEST)
    yield Attempt("data behind a name", edited(good, "CONF", 96 + 8, "B", 65), Code.CONF)


if __name__ == "__main__":
    report(attack)
