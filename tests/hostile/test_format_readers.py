"""Damaged artifacts: both readers refuse, with the same code; every class of damage is counted.

The damage is raw (checksums must notice) or re-sealed (the rules themselves must notice). The
Python reader runs the checks that it shares with the engine, the CRC of the weights included.
"""

from __future__ import annotations

import collections
import random
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest

from fuzz.mutate import entries, find, mutations, reseal, section_range
from gemrun.format import spec
from gemrun.format.codes import Code, FormatError
from gemrun.format.reader import read_artifact
from golden import make, refused
from hostile.format_engine import EngineReader

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
NAMES = [kind.name for kind in make.KINDS]
PYTHON_ONLY = {Code.SHA256, Code.ROOT, Code.MANIFEST}


@pytest.fixture(scope="module")
def engine() -> EngineReader:
    return EngineReader()


def image_of(name: str) -> bytes:
    return (GOLDEN / "v1.0" / f"{name}.gembin").read_bytes()


def python_status(image: bytes, full: bool = False) -> int:
    try:
        read_artifact(image, "full" if full else "structure", image=True)
    except FormatError as error:
        return int(error.code)
    return 0


class Tally:
    """Runs cases through both readers, demands agreement, and counts codes."""

    def __init__(self, engine: EngineReader, title: str) -> None:
        self.engine, self.title = engine, title
        self.codes: collections.Counter[str] = collections.Counter()

    def case(self, image: bytes, what: object, wanted: set[int] | None = None) -> int:
        """One image; `wanted` are the codes that are right for it."""
        ours, theirs = python_status(image), self.engine.status(image)
        assert ours == theirs, f"{what}: Python {Code(ours).name}, engine {theirs}"
        if wanted is not None:
            assert ours in wanted, f"{what}: {Code(ours).name}"
        self.codes[Code(ours).name] += 1
        return ours

    def report(self) -> None:
        """Print how many cases there were."""
        listed = ", ".join(f"{name} {count}" for name, count in sorted(self.codes.items()))
        print(f"\n{self.title}: {sum(self.codes.values())} cases: {listed}")


@pytest.mark.parametrize("name", NAMES)
def test_golden_artifacts_are_accepted(engine: EngineReader, name: str) -> None:
    image = image_of(name)
    assert python_status(image, full=True) == 0
    assert engine.status(image) == 0


def test_golden_refusals_keep_their_codes(engine: EngineReader) -> None:
    files = sorted((GOLDEN / "refused").glob("*.gembin"))
    assert len(files) == sum(len(d) for d in refused.DEFECTS.values())
    for path in files:
        code = Code[path.name.split("-")[0]]
        image = path.read_bytes()
        assert python_status(image, full=True) == code, path.name
        wanted = 0 if code in PYTHON_ONLY else code
        assert engine.status(image) == wanted, path.name
    print(f"\ngolden refusals: {len(files)} files")


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_refused(engine: EngineReader, name: str) -> None:
    image = image_of(name)
    tally = Tally(engine, f"truncations of {name}")
    lengths = {n + d for n in range(0, len(image) + 1, 256) for d in (-1, 0, 1)} | set(range(16))
    for length in sorted(n for n in lengths if 0 <= n < len(image)):
        tally.case(image[:length], f"cut at {length}", {Code.SIZE})
    for extra in (1, 255, 256, 65536):
        tally.case(image + bytes(extra), f"{extra} bytes more", {Code.SIZE})
    tally.report()


def test_a_truncated_file_that_claims_its_length_is_refused(engine: EngineReader) -> None:
    image = image_of("tiny-int4")
    tally = Tally(engine, "re-sealed truncations")
    wanted = {Code.SIZE, Code.TABLE}
    for length in range(512, len(image), 256):
        cut = bytearray(image[:length])
        struct.pack_into("<Q", cut, 32, length)
        tally.case(bytes(reseal(cut, sections=False)), f"cut at {length}", wanted)
    tally.report()


# Fields whose change breaks no rule that both readers know.
FREE = {
    "minor",
    "optional_features",
    "ram_budget",
    "isa",
    "isa_features",
    "hdf_sha256",
    "root_sha256",
    "header_crc32",  # re-sealed
    "table_crc32",  # re-sealed
    "engine_abi_min",  # a smaller one is fine
    "required_features",  # known bits may be set without need
    "target",  # another name is another board, not damage
}


def header_fields() -> Iterable[tuple[str, int, int]]:
    """(name, offset, size) of every header field."""
    at = 0
    for name, code, _ in spec.layout(spec.Header):
        size = struct.calcsize("<" + code)
        yield name, at, size
        at += size


def test_every_header_field_flipped(engine: EngineReader) -> None:
    image = image_of("tiny-int4")
    tally = Tally(engine, "header bytes flipped")
    early = {"magic": Code.MAGIC, "byte_order": Code.BYTE_ORDER, "major": Code.VERSION}
    for name, first, size in header_fields():
        for at in range(first, first + size):
            for value in (0x01, 0x80, 0xFF):
                raw = bytearray(image)
                raw[at] ^= value
                wanted = {early.get(name, Code.HEADER_CRC)}
                tally.case(bytes(raw), f"{name} byte {at - first} raw", wanted)
                sealed = bytes(reseal(raw, sections=False))
                code = tally.case(sealed, f"{name} byte {at - first} re-sealed")
                assert code or name in FREE, f"{name}: accepted"
    tally.report()


def test_every_signature_byte_flipped(engine: EngineReader) -> None:
    image = image_of("tiny-int4")
    tally = Tally(engine, "signature bytes flipped")
    for at in range(256, 512):
        raw = bytearray(image)
        raw[at] ^= 1
        wanted = {0} if at == 256 else {Code.SIGNATURE}  # algorithm 1 may have any signature
        tally.case(bytes(raw), f"byte {at}", wanted)
    tally.report()


def test_every_table_byte_flipped(engine: EngineReader) -> None:
    image = image_of("tiny-int4")
    tally = Tally(engine, "table bytes flipped")
    wanted = {Code.TABLE, Code.MISSING, Code.SECTION_CRC, Code.WEIGHTS_CRC, 0}
    for entry in entries(image):
        for at in range(entry, entry + spec.ENTRY_SIZE):
            raw = bytearray(image)
            raw[at] ^= 1 << at % 8
            tally.case(bytes(raw), f"byte {at} raw", {Code.TABLE_CRC})
            tally.case(bytes(reseal(raw, sections=False)), f"byte {at} re-sealed", wanted)
    tally.report()


@pytest.mark.parametrize("name", NAMES)
def test_every_section_damaged(engine: EngineReader, name: str) -> None:
    image, rng = image_of(name), random.Random(7)
    tally = Tally(engine, f"sections of {name} damaged")
    for section in spec.SECTIONS:
        try:
            place = section_range(image, find(image, section))
        except KeyError:
            continue
        assert place is not None
        offset, size = place
        for _ in range(80):
            raw = bytearray(image)
            at = offset + rng.randrange(size)
            raw[at] ^= 1 << rng.randrange(8)
            noticed = {Code.SECTION_CRC}
            if section == "WHOT":  # a gap between tensors is looked at before the checksum
                noticed = {Code.WEIGHTS_CRC, Code.TENS}
            tally.case(bytes(raw), f"{section}+{at - offset} raw", noticed)
            sealed = bytes(reseal(raw))
            wanted = {0} if section in ("HDFJ", "MANI") else None
            tally.case(sealed, f"{section}+{at - offset} re-sealed", wanted)
    tally.report()


RECORDS = {"CONF": spec.Conf, "LAYR": spec.Layer, "TENS": spec.Tensor, "SEGM": spec.Segment,
           "PLAN": spec.Plan, "THRM": spec.Thermal}  # fmt: skip
EXTREMES = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


@pytest.mark.parametrize("section", RECORDS)
def test_every_record_field_at_its_extremes(engine: EngineReader, section: str) -> None:
    """Counts and sizes that wrap, zero divisors, huge offsets: every word of two records."""
    image = image_of("tiny-int4")
    tally = Tally(engine, f"fields of {section} at their extremes")
    place = section_range(image, find(image, section))
    assert place is not None
    size = spec.size_of(RECORDS[section])
    for record in range(min(2, place[1] // size)):
        for at in range(0, size, 4):
            for value in EXTREMES:
                raw = bytearray(image)
                struct.pack_into("<I", raw, place[0] + record * size + at, value)
                tally.case(bytes(reseal(raw)), f"{section}[{record}]+{at} = {value:#x}")
    tally.report()


def test_a_section_with_a_right_crc_and_a_stale_digest() -> None:
    """What CRC-32 is not made for: SHA-256 notices."""
    image = image_of("tiny-int4")
    for section in ("ROPE", "HDFJ", "MANI", "WHOT"):
        place = section_range(image, find(image, section))
        assert place is not None
        raw = bytearray(image)
        raw[place[0] + place[1] // 2] ^= 1
        digest = bytes(raw[find(raw, section) + 64 : find(raw, section) + 96])
        reseal(raw)
        raw[find(raw, section) + 64 : find(raw, section) + 96] = digest
        code = python_status(bytes(reseal(raw, sections=False)), full=True)
        assert code == Code.SHA256, section


@pytest.mark.parametrize("name", NAMES)
def test_random_damage_re_sealed(engine: EngineReader, name: str) -> None:
    tally = Tally(engine, f"random damage of {name}")
    for index, image in enumerate(mutations(image_of(name), 600, random.Random(name))):
        tally.case(image, f"mutation {index}")
    tally.report()


def test_no_byte_outside_the_signature_can_change_unnoticed() -> None:
    image, rng = image_of("tiny-q4raw"), random.Random(3)
    for _ in range(600):
        at = rng.randrange(len(image) - 256)
        at += 256 if at >= 256 else 0
        raw = bytearray(image)
        raw[at] ^= 1 << rng.randrange(8)
        assert python_status(bytes(raw), full=True) != 0, at


def test_grown_records_of_a_newer_minor_are_read(engine: EngineReader) -> None:
    """Rule 4.4: records may grow at their end; readers step by record_size."""
    image = bytearray(image_of("tiny-int4"))
    entry = find(image, "THRM")
    place = section_range(image, entry)
    assert place is not None
    struct.pack_into("<H", image, 14, 7)  # minor
    struct.pack_into("<QQ", image, entry + 16, 96, 96)  # size, mem_size: 32 bytes more
    struct.pack_into("<I", image, entry + 32, 96)  # record_size
    image[place[0] + 64 : place[0] + 96] = b"\x07" * 32  # was a gap of zeros
    image = reseal(image)
    assert engine.status(bytes(image)) == 0
    assert python_status(bytes(image), full=True) == 0
    struct.pack_into("<QQ", image, entry + 16, 32, 32)
    struct.pack_into("<I", image, entry + 32, 32)
    image[place[0] + 32 : place[0] + 96] = bytes(64)
    image = reseal(image)
    assert engine.status(bytes(image)) == Code.THRM == python_status(bytes(image))


def test_unknown_optional_sections_are_skipped(engine: EngineReader) -> None:
    image = bytearray(image_of("tiny-int4"))
    entry = find(image, "TMPL")
    image[entry : entry + 4] = image[entry + 96 : entry + 100] = b"WHAT"
    sealed = bytes(reseal(image))
    assert engine.status(sealed) == 0
    assert python_status(sealed, full=True) == 0
    place = section_range(image, entry)
    assert place is not None
    image[place[0]] ^= 1
    assert engine.status(bytes(image)) == Code.SECTION_CRC == python_status(bytes(image))
