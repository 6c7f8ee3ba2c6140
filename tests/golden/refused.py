"""The golden files that must be refused: one defect each, everything else sealed and right."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from fuzz.mutate import entries, find, reseal, section_range

Defect = Callable[[bytearray], bytearray | None]


def put(image: bytearray, at: int, kind: str, value: float | bytes) -> None:
    """Overwrite a field."""
    struct.pack_into("<" + kind, image, at, value)


def section(image: bytearray, name: str) -> int:
    """File offset of a section."""
    place = section_range(image, find(image, name))
    assert place is not None
    return place[0]


def record(name: str, at: int, kind: str, value: float) -> Defect:
    """A field of a section's first bytes, everything re-sealed."""

    def damage(image: bytearray) -> bytearray:
        put(image, section(image, name) + at, kind, value)
        return reseal(image)

    return damage


def header(at: int, kind: str, value: int, sealed: bool = True) -> Defect:
    """A header field; sealed or not."""

    def damage(image: bytearray) -> bytearray:
        put(image, at, kind, value)
        return reseal(image, sections=False) if sealed else image

    return damage


def entry(name: str, at: int, kind: str, value: int) -> Defect:
    """A field of a table entry, with table and header CRC right."""

    def damage(image: bytearray) -> bytearray:
        put(image, find(image, name) + at, kind, value)
        return reseal(image, sections=False)

    return damage


def cut(image: bytearray) -> bytearray:
    """The last 256 bytes are gone."""
    return image[:-256]


def gap(image: bytearray) -> bytearray:
    """A byte before WHOT is set."""
    image[section(image, "WHOT") - 1] = 1
    return image


def without(name: str) -> Defect:
    """A required section is called something else."""

    def damage(image: bytearray) -> bytearray:
        at = find(image, name)
        image[at : at + 4] = b"XXXX"
        put(image, at + 4, "I", 0)
        image[at + 96 : at + 100] = b"XXXX"
        return reseal(image, sections=False)

    return damage


def unknown_required(image: bytearray) -> bytearray:
    """The optional section becomes an unknown one that is required."""
    without("TMPL")(image)
    put(image, entries(image)[6] + 4, "I", 1)
    return reseal(image, sections=False)


def shortened(image: bytearray) -> bytearray:
    """KVMK has one record less, and zeros behind it."""
    at, where = find(image, "KVMK"), section(image, "KVMK")
    put(image, at + 16, "Q", 48)
    put(image, at + 24, "Q", 48)
    put(image, at + 40, "Q", 3)
    image[where + 48 : where + 64] = bytes(16)
    return reseal(image)


def raw(name: str, at: int = 0) -> Defect:
    """A byte of a section flips, no checksum follows."""

    def damage(image: bytearray) -> bytearray:
        image[section(image, name) + at] ^= 0x40
        return image

    return damage


def sha_only(image: bytearray) -> bytearray:
    """A stored SHA-256 is wrong, the rest sealed."""
    image[find(image, "HDFJ") + 64] ^= 1
    return reseal(image, sections=False)


def root_only(image: bytearray) -> bytearray:
    """The root is wrong, the header CRC right."""
    image[152] ^= 1
    return reseal(image, sections=False, table=False)


def signature(image: bytearray) -> bytearray:
    """An unsigned file with a byte in its signature."""
    image[256 + 16] = 1
    return image


# Code -> what -> defect. Codes above are found before the ones below.
DEFECTS: dict[str, dict[str, Defect]] = {
    "MAGIC": {"text-mode": lambda image: bytearray(image.replace(b"\r\n", b"\n"))},
    "BYTE_ORDER": {"swapped": header(8, "I", 0x04030201)},
    "VERSION": {"major-2": header(12, "H", 2)},
    "HEADER_CRC": {"flipped": header(88, "Q", 1, sealed=False)},
    "HEADER": {
        "align-64": header(28, "I", 64),
        "sections-65": header(24, "I", 65),
        "reserved": header(230, "B", 1),
    },
    "SIZE": {"cut": cut, "longer": lambda image: image + bytes(256)},
    "FEATURE": {"bit-40": header(48, "Q", 1 << 40)},
    "ABI": {"abi-4": header(112, "I", 4)},
    "SIGNATURE": {"unsigned-with-bytes": signature},
    "TABLE_CRC": {"flipped": lambda image: image[:512] + bytes([image[512] ^ 1]) + image[513:]},
    "TABLE": {
        "offset-wraps": entry("CONF", 8, "Q", 2**64 - 256),
        "size-huge": entry("MANI", 16, "Q", 2**63),
        "mem-size": entry("LAYR", 24, "Q", 1),
        "repeated": entry("SEGM", 0, "4s", b"TENS"),  # type: ignore[arg-type]
    },
    "GAP": {"before-weights": gap},
    "MISSING": {"no-thermal": without("THRM"), "unknown-required": unknown_required},
    "SECTION_CRC": {"layer": raw("LAYR", 8)},
    "CONF": {"context-2-20-plus-1": record("CONF", 16, "I", 2**20 + 1)},
    "LAYR": {"heads-0": record("LAYR", 8, "I", 0), "kv-offset": record("LAYR", 56, "Q", 64)},
    "SEGM": {"format-9": record("SEGM", 0, "I", 9)},
    "TENS": {
        "rows-wrap": record("TENS", 96 + 16, "I", 2**32 - 16),
        "offset-outside": record("TENS", 96 + 48, "Q", 2**63),
        "vector-in-panels": record("SEGM", 0, "I", 3),
    },
    "PLAN": {"overlap": record("PLAN", 48 + 16, "Q", 0), "size": record("PLAN", 24, "Q", 64)},
    "ROPE": {"pairs": record("ROPE", 0, "I", 9)},
    "TOKN": {"vocabulary": record("TOKN", 8, "I", 300)},
    "TMPL": {"slot": record("TMPL", 12 + 36, "I", 1)},
    "THRM": {"nan": record("THRM", 0, "I", 0x7FC00000)},
    "TEST": {"prompt-401": record("TEST", 0, "I", 401)},
    "RAM": {"total": header(88, "Q", 4096), "layout": header(116, "I", 7)},
    "WEIGHTS_CRC": {"bit": raw("WHOT", 4096)},
    "SHA256": {"hdf": sha_only},
    "ROOT": {"flipped": root_only},
    "MANIFEST": {"hdf-hash": header(120, "Q", 7), "map": record("MANI", 0, "B", 0x8A)},
}


# The same for an artifact with KVMK, whose third unit keeps 1 + 1 of 5 blocks.
MASK_DEFECTS: dict[str, dict[str, Defect]] = {
    "MISSING": {
        "kvmk": without("KVMK"),
        "kvmk-bit": header(48, "Q", 0x2B),
    },
    "LAYR": {"unit-first": record("LAYR", 128 + 88, "I", 1)},
    "KVMK": {
        "recent": record("KVMK", 32 + 4, "I", 3),
        "recent-wraps": record("KVMK", 32 + 4, "I", 2**32 - 1),
        "sink-0": record("KVMK", 32, "I", 0),
        "window": record("KVMK", 4, "I", 1),
        "full-with-sink": record("KVMK", 48, "I", 1),
        "blocks": record("KVMK", 32 + 8, "I", 2),
        "first": record("KVMK", 48 + 12, "I", 2),
        "three-units": shortened,
    },
}
# The same for an artifact with PINP: 100 ids of 264 rows in a context of 160.
PIN_DEFECTS: dict[str, dict[str, Defect]] = {
    "PINP": {
        "tokens-0": record("PINP", 0, "I", 0),
        "tokens-context": record("PINP", 0, "I", 160),
        "tokens-wrap": record("PINP", 0, "I", 2**32 - 1),
        "one-less": record("PINP", 0, "I", 99),
        "a-block-more": record("PINP", 0, "I", 129),
        "reserved": record("PINP", 60, "I", 1),
        "id": record("PINP", 64 + 4 * 99, "I", 264),
        "behind-ids": record("PINP", 64 + 4 * 100, "I", 1),
    },
    "MANIFEST": {"one-id-more": record("PINP", 0, "I", 101), "no-pin": without("PINP")},
}
# The same where the second and the third unit have values of 4 bits.
VALUE4_DEFECTS: dict[str, dict[str, Defect]] = {
    "KVMK": {
        "value4-bit": header(48, "Q", 0xAB),
        "value4-flag": record("KVMK", 32 + 6, "H", 2),
        "value4-first": record("KVMK", 48 + 12, "I", 3),
    },
    "LAYR": {"value4-size": record("KVMK", 48 + 6, "H", 1)},
}
# The same with keys of 4 bits in the second and the third unit, values in the third and the fourth.
KEY4_DEFECTS: dict[str, dict[str, Defect]] = {
    "KVMK": {
        "key4-bit": header(48, "Q", 0x1AB),
        "key4-value-bit": header(48, "Q", 0x2AB),
        "key4-flag": record("KVMK", 32 + 6, "H", 4),
        "key4-first": record("KVMK", 48 + 12, "I", 20),
    },
    "LAYR": {"key4-size": record("KVMK", 48 + 6, "H", 3)},
    "FEATURE": {"key4-next-bit": header(48, "Q", 0x7AB)},
}
#: Golden artifact -> what is done to it.
BASES = {
    "tiny-int4": DEFECTS,
    "tiny-kvmask": MASK_DEFECTS,
    "tiny-pinned": PIN_DEFECTS,
    "tiny-value4": VALUE4_DEFECTS,
    "tiny-key4": KEY4_DEFECTS,
}


def damaged(good: Path) -> dict[str, bytes]:
    """File name -> bytes of every golden file that must be refused, from the folder of the good."""
    out = {}
    for base, codes in BASES.items():
        whole = (good / f"{base}.gembin").read_bytes()
        for code, defects in codes.items():
            for what, damage in defects.items():
                image = damage(bytearray(whole))
                assert image is not None
                out[f"{code}-{what}.gembin"] = bytes(image)
    return out


def write_refused(good: Path, folder: Path) -> None:
    """Write them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in damaged(good).items():
        (folder / name).write_bytes(image)
