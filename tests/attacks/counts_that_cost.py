"""Counts that make a reader allocate, loop or recurse (O3; CVE-2024-23605 and its kin)."""

from __future__ import annotations

from collections.abc import Iterator

from attacks.attacklib import (
    Attempt,
    Code,
    edited,
    entry_edited,
    find,
    header_edited,
    report,
    reseal,
    section,
)


def manifest(good: bytes, raw: bytes) -> bytes:
    """The image with the manifest's first bytes replaced."""
    image = bytearray(good)
    at, size = section(good, "MANI")
    image[at : at + size] = raw.ljust(size, b"\xc0")[:size]
    return bytes(reseal(image))


def attack(good: bytes) -> Iterator[Attempt]:
    """Sections, layers, tensors, tokens, tests, msgpack."""
    for count in (0, 65, 2**32 - 1):
        image = header_edited(good, 24, "I", count)
        yield Attempt(f"{count} sections", image, Code.HEADER)
    image = entry_edited(good, "TENS", 32, "I", 1)
    yield Attempt("records of one byte", image, Code.TABLE)
    size = section(good, "TENS")[1]
    changed = bytearray(good)
    at = find(good, "TENS")
    changed[at + 32 : at + 36] = (1).to_bytes(4, "little")
    changed[at + 40 : at + 48] = size.to_bytes(8, "little")
    yield Attempt(f"{size} tensors of one byte", bytes(reseal(changed, sections=False)), Code.TENS)
    yield Attempt("2^32 - 1 layers", edited(good, "CONF", 0, "I", 2**32 - 1), Code.CONF)
    for at, what in ((24, "merges"), (28, "characters"), (36, "trie nodes"), (40, "stop ids")):
        for count in (2**24, 2**32 - 1, 2**20):
            image = edited(good, "TOKN", at, "I", count)
            yield Attempt(f"{count} {what}", image, Code.TOKN)
    yield Attempt("2^31 template items", edited(good, "TMPL", 4, "I", 2**31), Code.TMPL)
    yield Attempt("a prompt of 2^32 - 1", edited(good, "TEST", 0, "I", 2**32 - 1), Code.TEST)
    for raw, what in (
        (b"\xdf\xff\xff\xff\xff", "a map of 2^32 - 1 pairs"),
        (b"\x81\xa1x\xdb\xff\xff\xff\xff", "a text of 2^32 - 1 bytes"),
        (b"\x81\xa1x" + b"\x91" * 5000, "lists nested 1900 deep"),
        (b"\x81\xa1x\xc9\xff\xff\xff\xff\x01", "an extension of 2^32 - 1 bytes"),
    ):
        yield Attempt(f"manifest: {what}", manifest(good, raw), Code.MANIFEST)


if __name__ == "__main__":
    report(attack)
