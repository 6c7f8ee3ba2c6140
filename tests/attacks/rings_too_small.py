"""KV heads whose ring is smaller than what they see, or lies where another head's is (KVMK)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from attacks.attacklib import TESTS, Attempt, Code, edited, find, header_edited, report, reseal
from gemrun.format.spec import Feature

UNIT = 16  # bytes of a record; the third keeps 1 + 1 of 5 blocks
SIZE, UNIT_FIRST, LAYER = 64, 88, 128  # of LAYR


def attack(good: bytes) -> Iterator[Attempt]:
    """Every way to have keys written beside a ring, or read from another one."""
    masked = (TESTS / "golden/v1.0/tiny-kvmask.gembin").read_bytes()
    third, fourth = 2 * UNIT, 3 * UNIT
    for sink, recent in ((1, 0), (0, 1), (1, 2**32 - 3), (2**31, 2**31 - 2), (5, 5), (1, 3)):
        image = edited(masked, "KVMK", third, "II", sink, recent)
        yield Attempt(f"sink {sink}, recent {recent}, in 3 blocks", image, Code.KVMK)
    for sink, recent in ((2**32 - 1, 1), (2**31, 2**31), (2, 2**32 - 2)):
        blocks = (sink + recent + 1) % 2**32
        image = edited(masked, "KVMK", third, "III", sink, recent, blocks)
        yield Attempt(f"sink {sink}, recent {recent}: the sum wraps", image, Code.KVMK)
    for blocks in (0, 1, 2, 4, 5, 2**32 - 1):
        image = edited(masked, "KVMK", third + 8, "I", blocks)
        yield Attempt(f"{blocks} blocks for what takes 3", image, Code.KVMK)
    for first in (0, 2, 4, 2**26, 2**32 - 3):
        image = edited(masked, "KVMK", fourth + 12, "I", first)
        yield Attempt(f"a ring at block {first}, behind one of 3", image, Code.KVMK)
    image = edited(masked, "KVMK", 0, "IIII", 1, 1, 3, 0)
    yield Attempt("a part of a window", image, Code.KVMK)
    for value in (0, 1, 3, 4, 2**32 - 1):
        image = edited(masked, "LAYR", LAYER + UNIT_FIRST, "I", value)
        yield Attempt(f"units from {value} on, not 2", image, Code.LAYR)
    image = edited(masked, "LAYR", LAYER + SIZE, "Q", 4608)
    yield Attempt("rings of a layer that end too early", image, Code.LAYR)
    yield from _counts(masked)
    yield from _values(masked)
    yield from _keys()
    dense = struct.unpack_from("<Q", good, 48)[0]
    image = header_edited(good, 48, "Q", dense | Feature.KV_MASK)
    yield Attempt("the feature bit without units", image, Code.MISSING)
    features = struct.unpack_from("<Q", masked, 48)[0]
    image = header_edited(masked, 48, "Q", features & ~Feature.KV_MASK)
    yield Attempt("units without the feature bit", image, Code.MISSING)


def _values(masked: bytes) -> Iterator[Attempt]:
    """Blocks that are taken for smaller than they are."""
    mixed = (TESTS / "golden/v1.0/tiny-value4.gembin").read_bytes()
    for number in range(4):
        image = edited(masked, "KVMK", UNIT * number + 6, "H", 1)
        yield Attempt(f"unit {number}: 4 bits without the feature bit", image, Code.KVMK)
        for flags in (2, 0x8000, 0xFFFF):
            image = edited(mixed, "KVMK", UNIT * number + 6, "H", flags)
            yield Attempt(f"unit {number}: flags {flags:#x}", image, Code.KVMK)
    for first in (0, 1, 3, 35, 37, 2**26, 2**32 - 1):
        image = edited(mixed, "KVMK", 3 * UNIT + 12, "I", first)
        yield Attempt(f"a ring at line {first}, behind one of 36 lines", image, Code.KVMK)
    image = edited(mixed, "KVMK", 3 * UNIT + 6, "H", 1)
    yield Attempt("a layer's last ring, smaller than the layer says", image, Code.LAYR)
    features = struct.unpack_from("<Q", mixed, 48)[0]
    image = header_edited(mixed, 48, "Q", features & ~Feature.KV_VALUE4)
    yield Attempt("values of 4 bits without the feature bit", image, Code.KVMK)


def _keys() -> Iterator[Attempt]:
    """The same where keys have 4 bits: units hold none, keys, both, values."""
    mixed = (TESTS / "golden/v1.0/tiny-key4.gembin").read_bytes()
    features = struct.unpack_from("<Q", mixed, 48)[0]
    for bit in (Feature.KV_KEY4, Feature.KV_VALUE4):
        image = header_edited(mixed, 48, "Q", features & ~bit)
        yield Attempt(f"4 bits without the bit {bit:#x}", image, Code.KVMK)
    for number in range(4):
        for flags in (4, 8, 0x8000, 0xFFFF):
            image = edited(mixed, "KVMK", UNIT * number + 6, "H", flags)
            yield Attempt(f"unit {number}: flags {flags:#x} beside keys", image, Code.KVMK)
    image = edited(mixed, "KVMK", 3 * UNIT + 6, "H", 3)
    yield Attempt("a last ring with keys of 4 bits, too", image, Code.LAYR)
    image = edited(mixed, "KVMK", 2 * UNIT + 6, "H", 2)
    yield Attempt("a ring that reaches into the next one", image, Code.KVMK)


def _counts(masked: bytes) -> Iterator[Attempt]:
    """Fewer and more records than heads, and records of another size."""
    for count in (1, 2, 3, 5, 16):
        changed = bytearray(masked)
        entry, size = find(masked, "KVMK"), UNIT * count
        struct.pack_into("<QQ", changed, entry + 16, size, size)
        struct.pack_into("<Q", changed, entry + 40, count)
        where = struct.unpack_from("<Q", changed, entry + 8)[0]
        changed[where + size : where + 4 * UNIT] = bytes(max(0, 4 * UNIT - size))
        yield Attempt(f"{count} units for 4 KV heads", bytes(reseal(changed)), Code.KVMK)
    changed = bytearray(masked)
    struct.pack_into("<I", changed, find(masked, "KVMK") + 32, 1)
    struct.pack_into("<Q", changed, find(masked, "KVMK") + 40, 64)
    yield Attempt("64 units of one byte", bytes(reseal(changed, sections=False)), Code.KVMK)


if __name__ == "__main__":
    report(attack)
