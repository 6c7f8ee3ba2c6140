"""A memory plan in which two live buffers share bytes: activations overwrite each other, logits
change with the prompt's length, or a write ends outside of the arena.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from attacks.attacklib import Attempt, Code, edited, report, section


def attack(good: bytes) -> Iterator[Attempt]:
    """Overlaps, forged lifetimes, sizes and order."""
    at = section(good, "PLAN")[0]
    offsets = [struct.unpack_from("<Q", good, at + 48 * i + 16)[0] for i in range(15)]
    pairs = ((1, 0, "XN on X"), (9, 8, "candidates on logits"), (14, 13, "hidden on scratch"))
    for one, other, what in pairs:
        image = edited(good, "PLAN", 48 * one + 16, "Q", offsets[other])
        yield Attempt(what, image, Code.PLAN)
    image = edited(good, "PLAN", 48 * 8 + 4, "II", 7, 8)
    yield Attempt("logits said to die between two calls", image, Code.PLAN)
    image = edited(good, "PLAN", 48 * 1 + 4, "II", 7, 1)
    yield Attempt("a lifetime that ends before it starts", image, Code.PLAN)
    image = edited(good, "PLAN", 24, "Q", 64)
    yield Attempt("a buffer too small for its rows", image, Code.PLAN)
    image = edited(good, "PLAN", 24, "Q", 2**20)
    yield Attempt("a buffer larger than its rows", image, Code.PLAN)
    image = edited(good, "PLAN", 0, "I", 2)
    yield Attempt("a kind twice", image, Code.PLAN)
    image = edited(good, "PLAN", 16, "Q", 32)
    yield Attempt("a buffer off its cache line", image, Code.PLAN)


if __name__ == "__main__":
    report(attack)
