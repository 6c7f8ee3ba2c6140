"""Damaged artifacts: both readers refuse, with the same code; every class of damage is counted.

The damage is raw (checksums must notice) or re-sealed (the rules themselves must notice). The
Python reader runs the checks that it shares with the engine, the CRC of the weights included.
"""

from __future__ import annotations

import collections
import random
import struct
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz.mutate import entries, find, mutations, reseal, section_range
from gemrun.format import assemble, pins, spec, writer
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
    assert len(files) == sum(len(d) for codes in refused.BASES.values() for d in codes.values())
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


@pytest.mark.parametrize("name", ["tiny-int4", "tiny-kvmask", "tiny-value4", "tiny-key4"])
@pytest.mark.parametrize("section", RECORDS)
def test_every_record_field_at_its_extremes(engine: EngineReader, section: str, name: str) -> None:
    """Counts and sizes that wrap, zero divisors, huge offsets: every word of two records."""
    image = image_of(name)
    tally = Tally(engine, f"fields of {section} of {name} at their extremes")
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


# ---- KVMK ----
MASKED = "tiny-kvmask"
BIT = int(spec.Feature.KV_MASK)


def with_section(image: bytes, name: str, **fields: int) -> bytes:
    """The image with fields of a table entry changed and everything sealed."""
    raw, at = bytearray(image), find(image, name)
    where = {"type": (0, "I"), "size": (16, "Q"), "mem_size": (24, "Q"), "record_size": (32, "I"),
             "record_count": (40, "Q")}  # fmt: skip
    for field, value in fields.items():
        struct.pack_into("<" + where[field][1], raw, at + where[field][0], value)
    return bytes(reseal(raw))


def with_features(image: bytes, change: int) -> bytes:
    """The image with other feature bits, sealed."""
    raw = bytearray(image)
    struct.pack_into("<Q", raw, 48, struct.unpack_from("<Q", raw, 48)[0] ^ change)
    return bytes(reseal(raw, sections=False))


def test_every_field_of_every_unit(engine: EngineReader) -> None:
    """Small values too, as a wrong ring is near the right one; two fields at a time."""
    image = image_of(MASKED)
    tally = Tally(engine, "fields of KVMK")
    place = section_range(image, find(image, "KVMK"))
    assert place is not None
    words = range(place[0], place[0] + place[1], 4)
    values = (*range(8), *EXTREMES[2:], 0xFFFFFFFE, 0x80000001)
    wanted = {0, Code.KVMK, Code.LAYR, Code.RAM}  # ring sizes and totals come behind the units
    for at in words:
        for value in values:
            raw = bytearray(image)
            struct.pack_into("<I", raw, at, value)
            changed = raw != image
            code = tally.case(bytes(reseal(raw)), f"KVMK+{at - place[0]} = {value:#x}", wanted)
            assert bool(code) == changed, f"KVMK+{at - place[0]} = {value:#x}"
    for number in range(place[1] // 16):
        for sink in range(6):
            for recent in range(6):
                raw = bytearray(image)
                ring = sink + recent + 1 if recent else 5
                struct.pack_into("<III", raw, place[0] + 16 * number, sink, recent, ring)
                tally.case(bytes(reseal(raw)), f"unit {number}: {sink} {recent}", wanted)
    tally.report()


def test_every_field_of_every_unit_with_values_of_4_bits(engine: EngineReader) -> None:
    image = image_of("tiny-value4")
    tally = Tally(engine, "fields of KVMK with values of 4 bits")
    place = section_range(image, find(image, "KVMK"))
    assert place is not None
    wanted = {0, Code.KVMK, Code.LAYR, Code.RAM}
    halves = (0, 1, 2, 3, 0x7FFF, 0x8000, 0xFFFF)
    for at in range(place[0], place[0] + place[1], 2):
        for value in halves:
            raw = bytearray(image)
            struct.pack_into("<H", raw, at, value)
            changed = raw != image
            code = tally.case(bytes(reseal(raw)), f"KVMK+{at - place[0]} = {value:#x}", wanted)
            assert bool(code) == changed, f"KVMK+{at - place[0]} = {value:#x}"
    for flags in range(16):  # every mix of flags; the rings of the file's own mix fit
        raw = bytearray(image)
        for number in range(4):
            struct.pack_into("<H", raw, place[0] + 16 * number + 6, flags >> number & 1)
        code = tally.case(bytes(reseal(raw)), f"flags {flags:#x}", wanted)
        assert bool(code) == (raw != image)
    tally.report()


def test_values_of_4_bits_are_there_only_with_their_bit(engine: EngineReader) -> None:
    bit = int(spec.Feature.KV_VALUE4)
    tally = Tally(engine, "values of 4 bits and their bit")
    tally.case(with_features(image_of("tiny-value4"), bit), "without the bit", {Code.KVMK})
    tally.case(with_features(image_of("tiny-value4"), BIT), "the bit alone", {0})
    tally.case(with_features(image_of(MASKED), bit), "rings in blocks", {Code.KVMK})
    for other in ("tiny-int4", "tiny-f16", "tiny-q4raw"):
        tally.case(with_features(image_of(other), bit), f"{other}: no KVMK", {Code.MISSING})
    tally.report()


def test_every_mix_of_values_and_keys_of_4_bits(engine: EngineReader) -> None:
    """The rings of the file's own mix fit; a flag without its feature bit is none."""
    image = image_of("tiny-key4")
    tally = Tally(engine, "flags of units")
    place = section_range(image, find(image, "KVMK"))
    assert place is not None
    wanted = {0, Code.KVMK, Code.LAYR, Code.RAM}
    for flags in range(256):
        raw = bytearray(image)
        for number in range(4):
            struct.pack_into("<H", raw, place[0] + 16 * number + 6, flags >> 2 * number & 3)
        code = tally.case(bytes(reseal(raw)), f"flags {flags:#x}", wanted)
        assert bool(code) == (raw != image)
    tally.report()


def test_keys_of_4_bits_are_there_only_with_their_bit(engine: EngineReader) -> None:
    key4, value4 = int(spec.Feature.KV_KEY4), int(spec.Feature.KV_VALUE4)
    tally = Tally(engine, "keys of 4 bits and their bit")
    image = image_of("tiny-key4")
    tally.case(with_features(image, key4), "values alone", {Code.KVMK})
    tally.case(with_features(image, value4), "keys alone", {Code.KVMK})
    tally.case(with_features(image, key4 | value4), "rings in lines", {Code.KVMK})
    tally.case(with_features(image, BIT), "the bits alone", {0})
    tally.case(with_features(image_of("tiny-value4"), key4), "a bit more", {0})
    tally.case(with_features(image_of(MASKED), key4), "rings in blocks", {Code.KVMK})
    for other in ("tiny-int4", "tiny-f16", "tiny-q4raw"):
        tally.case(with_features(image_of(other), key4), f"{other}: no KVMK", {Code.MISSING})
    tally.report()


def test_units_come_in_order_and_in_full_number(engine: EngineReader) -> None:
    image = image_of(MASKED)
    tally = Tally(engine, "order and number of units")
    place = section_range(image, find(image, "KVMK"))
    assert place is not None
    units = [image[at : at + 16] for at in range(place[0], place[0] + place[1], 16)]
    for one in range(len(units)):
        for other in range(one):
            moved = list(units)
            moved[one], moved[other] = units[other], units[one]
            raw = bytearray(image)
            raw[place[0] : place[0] + place[1]] = b"".join(moved)
            same = moved == units
            tally.case(bytes(reseal(raw)), f"{one} and {other}", {0} if same else {Code.KVMK})
    for count in (1, 2, 3, 5, 8):  # the gap behind has room for more, of zeros
        size = {"size": 16 * count, "mem_size": 16 * count, "record_count": count}
        raw = bytearray(with_section(image, "KVMK", **size))
        end = place[0] + place[1]
        if count < 4:
            raw[place[0] + 16 * count : end] = bytes(end - place[0] - 16 * count)
        tally.case(bytes(reseal(raw)), f"{count} units", {Code.KVMK})
    for count in (2**32, 2**60, 2**64 - 1):
        tally.case(with_section(image, "KVMK", record_count=count), f"{count}", {Code.TABLE})
    for size, count in ((0, 0), (1, 64), (8, 8), (32, 2), (64, 1)):
        wrong = with_section(image, "KVMK", record_size=size, record_count=count)
        tally.case(wrong, f"{count} records of {size}", None if size == 0 else {Code.KVMK})
    tally.report()


def test_a_section_of_no_units(engine: EngineReader, tmp_path: Path) -> None:
    golden = make.build(make.MASKED)
    done = assemble.assemble(golden.records)
    others = {
        "KVMK": writer.section_part("KVMK", b""),
        "WHOT": replace(done.parts[-1], data=golden.chunks),
    }
    parts = [others.get(part.type, part) for part in done.parts]
    writer.write_artifact(tmp_path / "a", done.header, parts)
    Tally(engine, "no units").case((tmp_path / "a").read_bytes(), "no units", {Code.KVMK})


def test_kvmk_is_there_exactly_with_its_bit(engine: EngineReader) -> None:
    image = image_of(MASKED)
    tally = Tally(engine, "KVMK and its bit")
    tally.case(with_features(image, BIT), "KVMK without its bit", {Code.MISSING})
    for other in ("tiny-int4", "tiny-f16", "tiny-q4raw"):
        without = with_features(image_of(other), BIT)
        tally.case(without, f"{other}: the bit without KVMK", {Code.MISSING})
    raw = bytearray(image)
    at = find(image, "KVMK")
    raw[at : at + 4] = raw[at + 96 : at + 100] = b"WHAT"
    tally.case(bytes(reseal(raw)), "a required section that nobody knows", {Code.MISSING})
    struct.pack_into("<I", raw, at + 4, 0)
    tally.case(bytes(reseal(raw)), "an optional one, with the bit", {Code.MISSING})
    dense = with_features(bytes(raw), BIT)
    tally.case(dense, "an optional one, without the bit", {Code.LAYR})  # unit_first is not 0
    unflagged = bytearray(image)
    struct.pack_into("<I", unflagged, at + 4, 0)
    tally.case(bytes(reseal(unflagged)), "not flagged as required", {0})
    tally.report()


def test_unit_first_follows_from_the_layers(engine: EngineReader) -> None:
    tally = Tally(engine, "unit_first")
    size, at = spec.size_of(spec.Layer), 88
    for name, right in ((MASKED, (0, 2)), ("tiny-int4", (0, 0))):
        image = image_of(name)
        place = section_range(image, find(image, "LAYR"))
        assert place is not None
        for layer in range(2):
            for value in (*range(5), *EXTREMES[2:]):
                raw = bytearray(image)
                struct.pack_into("<I", raw, place[0] + layer * size + at, value)
                wanted = 0 if value == right[layer] else Code.LAYR
                tally.case(bytes(reseal(raw)), f"{name}, layer {layer}: {value:#x}", {wanted})
    tally.report()


# ---- PINP ----
PINNED, PIN_TOKENS = "tiny-pinned", 100


def test_every_word_of_a_pinned_prompt(engine: EngineReader) -> None:
    """Its head and ids; small counts too, as a wrong one is near the right one."""
    image = image_of(PINNED)
    tally = Tally(engine, "words of PINP")
    place = section_range(image, find(image, "PINP"))
    assert place is not None
    rows = make.VOCAB
    for at in range(0, 64 + 448, 4):
        for value in (*range(3), *range(96, 132), rows - 1, rows, *EXTREMES[2:]):
            raw = bytearray(image)
            struct.pack_into("<I", raw, place[0] + at, value)
            if at == 0:  # one more id of zero leaves every size as it is
                good = value in range(PIN_TOKENS, 113)
            elif 64 <= at < 64 + 4 * PIN_TOKENS:
                good = value < rows
            else:
                good = value == 0
            wanted = {0} if good else {Code.PINP}
            tally.case(bytes(reseal(raw)), f"PINP+{at} = {value:#x}", wanted)
    tally.report()


def test_a_pinned_prompt_and_another_ring_do_not_fit(engine: EngineReader) -> None:
    """Its size follows from what the records say about rings, whatever else is right."""
    tally = Tally(engine, "PINP and the rings")
    golden = make.build(make.PINNED)
    for tokens in (1, 31, 32, 33, 64, 65, 100, 159, 160):
        pin = pins.blank(golden.records.conf, golden.records.layers, (), [1] * tokens)
        for keeps in ((), ((0, 0), (0, 0), (1, 1), (0, 0))):
            layers, units = assemble.place_units(golden.records.conf, golden.records.layers, keeps)
            told = {"layers": layers, "units": units, "pin": pin}
            done = assemble.assemble(replace(golden.records, **told))
            parts = [replace(p, data=golden.chunks) if p.type == "WHOT" else p for p in done.parts]
            same = len(pin) == pins.size(golden.records.conf, layers, units, tokens)
            image = written(done.header, parts)
            good = same and tokens < golden.records.conf.context
            tally.case(image, f"{tokens} tokens, {keeps}", {0} if good else {Code.PINP})
    tally.report()


def written(header: spec.Header, parts: Sequence[writer.Part]) -> bytes:
    """The bytes of an artifact."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        writer.write_artifact(path, header, parts)
        return path.read_bytes()


def test_the_first_broken_rule_is_reported(engine: EngineReader) -> None:
    """Layer by layer: a layer's fields, its units, the size of its rings."""
    image = image_of(MASKED)
    layers, units = (section_range(image, find(image, name)) for name in ("LAYR", "KVMK"))
    assert layers is not None
    assert units is not None
    size = spec.size_of(spec.Layer)
    heads, kv_size = layers[0] + 8, layers[0] + 64
    cases = {
        "unit of layer 0, fields of layer 1": ((units[0] + 8, heads + size), Code.KVMK),
        "unit of layer 1, fields of layer 1": ((units[0] + 40, heads + size), Code.LAYR),
        "unit of layer 1, ring of layer 1": ((units[0] + 40, kv_size + size), Code.KVMK),
        "unit of layer 1, ring of layer 0": ((units[0] + 40, kv_size), Code.LAYR),
        "unit of layer 1, context": ((units[0] + 40, 0x900 + 16), None),
    }
    tally = Tally(engine, "two rules broken")
    for what, (places, code) in cases.items():
        raw = bytearray(image)
        for at in places:
            struct.pack_into("<I", raw, at, 0x12345)
        tally.case(bytes(reseal(raw)), what, None if code is None else {code})
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
