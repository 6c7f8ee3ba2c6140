"""The stored hardware description is exchanged, to lift a memory budget or move an artifact to
another board. The header holds its hash, so only the policy can be edited, and gemcheck compares
the budget even then.
"""

from __future__ import annotations

from collections.abc import Iterator

from attacks.attacklib import Attempt, Code, report, reseal, section


def replaced(good: bytes, old: bytes, new: bytes) -> bytes:
    """HDFJ with some text exchanged for text of the same length, sealed again."""
    assert len(old) == len(new)
    at, size = section(good, "HDFJ")
    text = good[at : at + size]
    assert old in text
    image = bytearray(good)
    image[at : at + size] = text.replace(old, new)
    return bytes(reseal(image))


def attack(good: bytes) -> Iterator[Attempt]:
    """Hash and form."""
    swaps = ((b'"generic-x86-64"', b'"generic-aarch64'), (b'"x86_64"', b'"arm_64"'))
    image = replaced(good, swaps[1][0], swaps[1][1])
    yield Attempt("another architecture", image, Code.MANIFEST)
    image = replaced(good, b'"line_bytes":64', b'"line_bytes":32')
    yield Attempt("another cache line", image, Code.MANIFEST)
    yield Attempt("broken JSON", replaced(good, swaps[0][0], swaps[0][1]), Code.MANIFEST)
    image = replaced(good, b'"reserve_mib":256', b'"reserve_mib":1e9')
    yield Attempt("a policy that is not in canonical form", image, Code.MANIFEST)


if __name__ == "__main__":
    report(attack)
