"""Changes that are hidden from a checksum: CRC-32 is for accidents, so a forged one has to meet
SHA-256, and a forged section digest has to meet the root, which a signature covers.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from attacks.attacklib import Attempt, Code, find, header_edited, report, reseal, section


def crc_forged(good: bytes, name: str) -> bytes:
    """A section with other bytes and the same CRC-32: a multiple of the polynomial is added."""
    image = bytearray(good)
    at, size = section(good, name)
    middle = at + size // 2
    mask = 0x1DB710641 << 7  # 33 bits of the reflected polynomial, at any bit position
    for i, byte in enumerate(mask.to_bytes(6, "little")):
        image[middle + i] ^= byte
    assert zlib.crc32(image[at : at + size]) == zlib.crc32(good[at : at + size])
    return bytes(image)


def attack(good: bytes) -> Iterator[Attempt]:
    """From the outside in."""
    for name in ("WHOT", "ROPE"):
        image = crc_forged(good, name)
        yield Attempt(f"{name}: other bytes, same CRC-32", image, Code.SHA256)
    image = bytearray(crc_forged(good, "WHOT"))
    at = find(good, "WHOT")
    fresh = bytearray(reseal(bytearray(image)))
    image[at + 64 : at + 96] = fresh[at + 64 : at + 96]
    table = bytes(image[512 : 512 + 128 * struct.unpack_from("<I", image, 24)[0]])
    struct.pack_into("<I", image, 248, zlib.crc32(table))
    struct.pack_into("<I", image, 252, zlib.crc32(image[:252]))
    yield Attempt("the same, digest forged, old root kept", bytes(image), Code.ROOT)
    other = header_edited(good, 184, "4s", b"else")  # type: ignore[arg-type]
    kept = bytearray(other)
    kept[152:184] = good[152:184]
    struct.pack_into("<I", kept, 252, zlib.crc32(kept[:252]))
    yield Attempt("another target name, old root kept", bytes(kept), Code.ROOT)


if __name__ == "__main__":
    report(attack)
