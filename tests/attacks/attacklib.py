"""What the attack scripts share: a good artifact, edits that are sealed again, and a report."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fuzz.mutate import find, reseal, section_range
from gemrun.format.codes import Code, FormatError
from gemrun.format.reader import read_artifact

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Attempt:
    """One hostile file and the code that it has to be refused with."""

    what: str
    image: bytes
    code: Code


Attack = Callable[[bytes], Iterator[Attempt]]


def good() -> bytes:
    """An artifact that both readers accept."""
    return (TESTS / "golden/v1.0/tiny-int4.gembin").read_bytes()


def section(image: bytes | bytearray, name: str) -> tuple[int, int]:
    """(offset, size) of a section."""
    place = section_range(image, find(image, name))
    assert place is not None
    return place


def edited(image: bytes, name: str, at: int, kind: str, *values: int | float) -> bytes:
    """The image with fields of a section overwritten and every checksum right."""
    changed = bytearray(image)
    struct.pack_into("<" + kind, changed, section(image, name)[0] + at, *values)
    return bytes(reseal(changed))


def entry_edited(image: bytes, name: str, at: int, kind: str, *values: int) -> bytes:
    """The image with fields of a table entry overwritten, table and header sealed."""
    changed = bytearray(image)
    struct.pack_into("<" + kind, changed, find(image, name) + at, *values)
    return bytes(reseal(changed, sections=False))


def header_edited(image: bytes, at: int, kind: str, *values: int) -> bytes:
    """The image with header fields overwritten and sealed."""
    changed = bytearray(image)
    struct.pack_into("<" + kind, changed, at, *values)
    return bytes(reseal(changed, sections=False))


def outcome(image: bytes) -> Code:
    """What the Python reader says."""
    try:
        read_artifact(image, image=True)
    except FormatError as error:
        return error.code
    return Code.OK


def report(attack: Attack) -> None:
    """Run an attack script on its own: one line per attempt, exit code 1 if one got through."""
    bad = 0
    for attempt in attack(good()):
        code = outcome(attempt.image)
        bad += code != attempt.code
        mark = "refused" if code == attempt.code else "NOT AS WANTED"
        print(f"{mark:14}{code.name:14}{attempt.what}")
    sys.exit(bool(bad))
