"""Damages artifacts and re-seals them, so that fuzzing does not stop at a checksum.

    cd tests; python -m fuzz.mutate SEED_FILE FOLDER COUNT [RANDOM_SEED]

writes COUNT damaged files; as a module it gives `reseal` and `mutations` to the hostile tests.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

HEADER, TABLE, ENTRY = 256, 512, 128
INTERESTING = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 255, 256, 257, 4096, 65535, 65536, 2**20)
EDGES = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


def entries(image: bytes | bytearray) -> list[int]:
    """Offsets of the table entries that lie inside the image."""
    count = min(struct.unpack_from("<I", image, 24)[0], 64)
    return [TABLE + ENTRY * i for i in range(count) if TABLE + ENTRY * (i + 1) <= len(image)]


def section_range(image: bytes | bytearray, entry: int) -> tuple[int, int] | None:
    """(offset, size) of a section, None where it is not inside the image."""
    offset, size = struct.unpack_from("<QQ", image, entry + 8)
    return (offset, size) if offset + size <= len(image) else None


def find(image: bytes | bytearray, name: str) -> int:
    """Offset of the entry of a section type."""
    for entry in entries(image):
        if bytes(image[entry : entry + 4]) == name.encode("ascii"):
            return entry
    raise KeyError(name)


def reseal(image: bytearray, sections: bool = True, table: bool = True) -> bytearray:
    """Recompute what the damage invalidated: section checksums, table CRC, root, header CRC."""
    if len(image) < TABLE:
        return image
    if sections:
        for entry in entries(image):
            place = section_range(image, entry)
            if place is not None:
                data = image[place[0] : place[0] + place[1]]
                struct.pack_into("<I", image, entry + 36, zlib.crc32(data))
                image[entry + 64 : entry + 96] = hashlib.sha256(data).digest()
    if table:
        listed = entries(image)
        body = bytes(image[TABLE : TABLE + ENTRY * len(listed)])
        struct.pack_into("<I", image, 248, zlib.crc32(body))
        bare = bytearray(image[:HEADER])
        bare[152:184] = bytes(32)
        bare[252:256] = bytes(4)
        image[152:184] = hashlib.sha256(b"gembin root 1" + bare + body).digest()
    struct.pack_into("<I", image, 252, zlib.crc32(image[:252]))
    return image


def mutate(image: bytearray, rng: random.Random) -> bytearray:
    """One to four small changes, most of them in header, table and records, then re-sealed."""
    for _ in range(1 + rng.getrandbits(2)):
        _change(image, rng)
    if rng.random() < 0.9:
        reseal(image)
    return image


def _change(image: bytearray, rng: random.Random) -> None:
    kind = rng.randrange(6)
    if kind == 0:
        at = rng.randrange(min(len(image), HEADER))
    elif kind == 1:
        at = rng.randrange(TABLE, min(len(image), TABLE + ENTRY * 13))
    else:
        place = section_range(image, rng.choice(entries(image) or [TABLE]))
        if place is None or place[1] == 0:
            return
        at = place[0] + min(rng.randrange(place[1]), rng.randrange(place[1]))
    _write(image, at, rng)


def _write(image: bytearray, at: int, rng: random.Random) -> None:
    how = rng.randrange(5)
    if how == 0:
        image[at] ^= 1 << rng.randrange(8)
    elif how == 1:
        image[at] = rng.randrange(256)
    elif how in (2, 3):
        width = rng.choice((2, 4, 8))
        at -= at % width
        value = rng.choice(INTERESTING + EDGES) % (1 << 8 * width)
        image[at : at + width] = value.to_bytes(width, "little")[: len(image) - at]
    else:
        size = min(len(image) - at, 1 + rng.randrange(16))
        image[at : at + size] = rng.randbytes(size)


def mutations(seed: bytes, count: int, rng: random.Random) -> Iterator[bytes]:
    """`count` damaged copies of an artifact; some are cut or grown as well."""
    for _ in range(count):
        image = mutate(bytearray(seed), rng)
        if rng.random() < 0.05:
            del image[rng.randrange(len(image)) :]
            struct.pack_into("<Q", image, 32, len(image)) if len(image) >= 40 else None
            reseal(image)
        yield bytes(image)


def main() -> None:
    """Write a corpus."""
    seed = Path(sys.argv[1]).read_bytes()
    folder, count = Path(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(int(sys.argv[4]) if len(sys.argv) > 4 else 0)
    folder.mkdir(parents=True, exist_ok=True)
    for index, image in enumerate(mutations(seed, count, rng)):
        (folder / f"{index:06}.gembin").write_bytes(image)
    print(f"{count} files in {folder}")


if __name__ == "__main__":
    main()
