"""What an ELF file of any machine says of itself: sizes of sections, versions it asks for.

Enough to state the engine's size on a target and to prove the oldest glibc that it runs with,
without the binutils of that target.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CODE = (".text", ".rodata", ".data.rel.ro", ".eh_frame")  # what counts as the engine's size
NAMES_ALIKE = (".rodata.", ".text.")
GNU_NEED = 0x6FFFFFFE  # section type of needed versions


@dataclass(frozen=True)
class Section:
    """A section header, and where its text lies."""

    name: str
    kind: int
    offset: int
    size: int
    link: int
    info: int


def sections(data: bytes) -> list[Section]:
    """Of a little-endian file of 32 or 64 bits. Raises ValueError for anything else."""
    if data[:4] != b"\x7fELF" or data[5:6] != b"\x01":
        raise ValueError("not a little-endian ELF file")
    wide = data[4] == 2
    start, size, count, names = _table(data, wide)
    rows = [_row(data, start + i * size, wide) for i in range(count)]
    base = rows[names][2] if count else 0
    return [
        Section(_string(data, base + name), kind, offset, length, link, info)
        for name, kind, offset, length, link, info in rows
    ]


def _table(data: bytes, wide: bool) -> tuple[int, int, int, int]:
    start: int = struct.unpack_from("<Q" if wide else "<I", data, 40 if wide else 32)[0]
    size, count, names = struct.unpack_from("<HHH", data, 58 if wide else 46)
    return start, size, count, names


def _row(data: bytes, at: int, wide: bool) -> tuple[int, int, int, int, int, int]:
    form = "<IIQQQQII" if wide else "<IIIIIIII"
    name, kind, _flags, _address, offset, size, link, info = struct.unpack_from(form, data, at)
    return name, kind, offset, size, link, info


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode("ascii", "replace")


def code_bytes(path: Path) -> int:
    """Code and read-only data, as the size of the engine is counted."""
    return sum(
        s.size
        for s in sections(path.read_bytes())
        if s.name in CODE or s.name.startswith(NAMES_ALIKE)
    )


def needed_versions(path: Path) -> set[str]:
    """Names of the symbol versions that a program or library needs, such as GLIBC_2.17."""
    data = path.read_bytes()
    every = sections(data)
    return {
        version
        for s in every
        if s.kind == GNU_NEED
        for version in _needs(data, s, every[s.link].offset)
    }


def _needs(data: bytes, section: Section, names: int) -> Iterator[str]:
    at = section.offset
    for _ in range(section.info):
        _, count, _, first, following = struct.unpack_from("<HHIII", data, at)
        inner = at + first
        for _ in range(count):
            _, _, _, name, step = struct.unpack_from("<IHHII", data, inner)
            yield _string(data, names + name)
            inner += step
        at += following
