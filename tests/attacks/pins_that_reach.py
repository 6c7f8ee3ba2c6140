"""A pinned prompt (PINP) that is longer than its section or the cache, or shorter than its ids."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from attacks.attacklib import TESTS, Attempt, Code, edited, find, report, reseal, section

HEAD, TOKENS, ROWS = 64, 100, 264  # of the golden file; its context has 160 tokens


def attack(good: bytes) -> Iterator[Attempt]:
    """Every way to have bytes beside the section put into the cache, or beside the cache."""
    pinned = (TESTS / "golden/v1.0/tiny-pinned.gembin").read_bytes()
    for tokens in (0, 1, 31, 32, 96, 97, 99, 113, 128, 129, 159, 160, 161, 2**20, 2**31, 2**32 - 1):
        image = edited(pinned, "PINP", 0, "I", tokens)
        yield Attempt(f"{tokens} tokens in the place of {TOKENS}", image, Code.PINP)
    for at in range(4, HEAD, 4):
        image = edited(pinned, "PINP", at, "I", 1)
        yield Attempt(f"reserved byte {at}", image, Code.PINP)
    for index in (0, 50, TOKENS - 1):
        for token in (ROWS, 2**31, 2**32 - 1):
            image = edited(pinned, "PINP", HEAD + 4 * index, "I", token)
            yield Attempt(f"id {token} at {index}", image, Code.PINP)
    for at in range(HEAD + 4 * TOKENS, HEAD + 448):
        image = edited(pinned, "PINP", at, "B", 1)
        yield Attempt(f"byte {at}, between ids and blocks", image, Code.PINP)
    yield from _sizes(pinned)
    for records in ((64, 1), (4, 100)):
        changed = bytearray(pinned)
        struct.pack_into("<I", changed, find(pinned, "PINP") + 32, records[0])
        struct.pack_into("<Q", changed, find(pinned, "PINP") + 40, records[1])
        image = bytes(reseal(changed, sections=False))
        yield Attempt(f"an array of {records[1]} x {records[0]} bytes", image, Code.TABLE)


def _sizes(pinned: bytes) -> Iterator[Attempt]:
    """Sections that end elsewhere, zeros behind them."""
    place, size = section(pinned, "PINP")
    for left in (0, 1, 63, 64, 65, 512, size - 1152, size - 255, size - 64, size - 1, size + 1):
        changed = bytearray(pinned)
        struct.pack_into("<QQ", changed, find(pinned, "PINP") + 16, left, left)
        changed[place + left : place + size] = bytes(max(0, size - left))
        stays = _padded(left) == _padded(size)  # else the next section would have to move
        image, code = bytes(reseal(changed)), Code.PINP if stays else Code.TABLE
        yield Attempt(f"{left} of {size} bytes", image, code)


def _padded(size: int) -> int:
    return (size + 255) // 256 * 256


if __name__ == "__main__":
    report(attack)
