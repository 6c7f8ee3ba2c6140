"""Memory of the engine's own mappings: what the artifact declares against what is resident.

Resident pages are counted in /proc/self/pagemap, because the kernel joins neighbouring mappings
into one entry of /proc/self/smaps; the entries' own figure (Rss) is kept beside it and must agree
wherever they hold nothing but the engine's regions. All sizes in bytes.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gemrun.context import GemRunContext, Region
from gemrun.format.sizes import STACK
from gemrun.format.spec import HEADER_SIZE, Header

TOLERANCE_PER_MAPPING = 64 << 10
LEAST_SHARE = 0.99
PRESENT, SWAPPED = 63, 62  # bits of a pagemap word
_PROC = Path("/proc/self")
_ENTRY = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) [-rwxsp]{4} ", re.M)
_FIELD = re.compile(r"^(Rss|Swap|AnonHugePages|FilePmdMapped):\s+(\d+) kB$", re.M)


@dataclass(frozen=True)
class Entry:
    """One entry of smaps."""

    start: int
    end: int
    rss: int
    swap: int
    huge: int = 0  # of rss: in huge pages, anonymous or of a file


@dataclass(frozen=True)
class Part:
    """Regions of one name: how many, what the header declares, what is resident."""

    name: str
    mappings: int
    declared: int
    resident: int
    swapped: int


@dataclass(frozen=True)
class Footprint:
    """Declared and resident memory of a context."""

    threads: int
    parts: tuple[Part, ...]
    smaps_rss: int | None  # of the entries that hold the regions; None: they hold more than those
    process_rss: int  # of the whole process, Python and libc included
    huge: int = 0  # in huge pages, of the entries that hold the regions
    passing: bool = False  # some weights only pass through memory: less may be there

    @property
    def declared(self) -> int:
        """What the header declares for this thread count."""
        return sum(part.declared for part in self.parts)

    @property
    def resident(self) -> int:
        """Resident bytes of the engine's mappings."""
        return sum(part.resident for part in self.parts)

    @property
    def swapped(self) -> int:
        """Bytes of them that were paged out."""
        return sum(part.swapped for part in self.parts)

    @property
    def mappings(self) -> int:
        """How many mappings there are."""
        return sum(part.mappings for part in self.parts)

    @property
    def problem(self) -> str | None:
        """What breaks the promise: above the declaration, or more than 1 % below it."""
        most = self.declared + TOLERANCE_PER_MAPPING * self.mappings
        if self.resident > most:
            return f"{self.resident - self.declared} bytes above the declaration"
        if self.resident < LEAST_SHARE * self.declared and not self.passing:
            swap = f", {self.swapped} bytes paged out" if self.swapped else ""
            return f"{self.declared - self.resident} bytes below the declaration{swap}"
        return None


def declared(path: str | os.PathLike[str], threads: int) -> dict[str, int]:
    """What the header of an artifact declares, by the names of the engine's regions."""
    header = _header(path)
    return {
        "weights+tables": header.ram_weights + header.ram_tables,
        "arena": header.ram_arena,
        "kv": header.ram_kv,
        "engine": header.ram_engine,
        "stacks": (threads - 1) * STACK,
    }


def _header(path: str | os.PathLike[str]) -> Header:
    with Path(path).open("rb") as stream:
        return Header.unpack(stream.read(HEADER_SIZE))


def measure(context: GemRunContext, path: str | os.PathLike[str]) -> Footprint:
    """Compare a context with the header of the artifact at `path`. OSError where the system does
    not tell (no /proc)."""
    threads = context.stats().threads
    regions = context.regions()
    wanted = declared(path, threads)
    entries = parse_smaps((_PROC / "smaps").read_text(encoding="utf-8"))
    names = [*wanted, *sorted({r.name for r in regions} - wanted.keys())]
    parts = [_part(name, [r for r in regions if r.name == name], wanted) for name in names]
    header = _header(path)
    return Footprint(
        threads=threads,
        parts=tuple(part for part in parts if part.declared or part.mappings),
        smaps_rss=joint_rss(entries, regions),
        process_rss=sum(entry.rss for entry in entries),
        huge=sum(entry.huge for entry in _holding(entries, regions)),
        passing=header.ram_weights + header.ram_tables < header.file_size,
    )


def parse_smaps(text: str) -> list[Entry]:
    """The entries of a smaps listing."""
    starts = list(_ENTRY.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    entries = []
    for match, end in zip(starts, ends, strict=True):
        fields = {name: int(kb) << 10 for name, kb in _FIELD.findall(text[match.end() : end])}
        start, stop = int(match[1], 16), int(match[2], 16)
        huge = fields.get("AnonHugePages", 0) + fields.get("FilePmdMapped", 0)
        entries.append(Entry(start, stop, fields.get("Rss", 0), fields.get("Swap", 0), huge))
    return entries


def joint_rss(entries: Sequence[Entry], regions: Sequence[Region]) -> int | None:
    """Rss of the entries that the regions lie in; None where those hold other memory too."""
    hit = _holding(entries, regions)
    covered = sum(end - start for start, end in map(_pages, regions))
    return sum(e.rss for e in hit) if covered == sum(e.end - e.start for e in hit) else None


def _holding(entries: Sequence[Entry], regions: Sequence[Region]) -> list[Entry]:
    """The entries that regions lie in."""
    spans = [_pages(region) for region in regions]
    return [e for e in entries if any(e.start < end and start < e.end for start, end in spans)]


def _part(name: str, regions: Sequence[Region], wanted: dict[str, int]) -> Part:
    counts = [_count(region) for region in regions]
    resident, swapped = (sum(count[i] for count in counts) for i in (0, 1))
    return Part(name, len(regions), wanted.get(name, 0), resident, swapped)


def _pages(region: Region) -> tuple[int, int]:
    """First and last address of the pages that a region lies in."""
    page = os.sysconf("SC_PAGE_SIZE")
    end = region.address + region.size
    return region.address // page * page, -(-end // page) * page


def _count(region: Region) -> tuple[int, int]:
    """Resident and paged-out bytes of a region."""
    page = os.sysconf("SC_PAGE_SIZE")
    start, end = _pages(region)
    words = array("Q")
    with (_PROC / "pagemap").open("rb", buffering=0) as stream:
        stream.seek(start // page * words.itemsize)
        words.frombytes(_read(stream.fileno(), (end - start) // page * words.itemsize))
    present = sum(word >> PRESENT & 1 for word in words)
    swapped = sum(word >> SWAPPED & 1 for word in words)
    return present * page, swapped * page


def _read(descriptor: int, size: int) -> bytes:
    """Exactly `size` bytes: one read may give fewer."""
    parts, left = [], size
    while left > 0:
        part = os.read(descriptor, left)
        if not part:
            raise OSError("/proc/self/pagemap: ends early")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
