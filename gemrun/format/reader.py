"""Read a `.gembin` file: the checks of csrc/FORMAT.md section 3, in their order, with their codes.

Written from that text, not from the C reader; a test gives both the same damaged files. Nothing is
copied but header and tables: weights stay in the mapped file. Work is linear in the file's size
and nothing is allocated by a number that has not been checked against a limit or the bytes there.

    read_artifact(path) -> Artifact      FormatError(code, sentence) for anything that is wrong
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gemrun.format import manifest as manifest_
from gemrun.format import pins, records, sizes, spec, tokens, writer
from gemrun.format.codes import Code, FormatError
from gemrun.format.files import open_regular
from gemrun.format.spec import (
    Cold,
    Conf,
    Header,
    KvUnit,
    Ladder,
    Layer,
    Plan,
    Record,
    Rope,
    Section,
    Segment,
    Signature,
    Tensor,
    TestVector,
    Thermal,
)

Verify = Literal["full", "fast", "structure"]
COPY = "copy the file again from where it was made"
REBUILD = "compile the artifact again"


@dataclass(frozen=True)
class Records:
    """What the sections that the engine reads hold."""

    conf: Conf
    layers: tuple[Layer, ...]
    units: tuple[KvUnit, ...]  # empty: every KV head keeps all of its layer's window
    tensors: tuple[Tensor, ...]
    segments: tuple[Segment, ...]
    plans: tuple[Plan, ...]
    ropes: tuple[Rope, ...]
    thermal: Thermal
    ladder: Ladder | None  # an artifact from before it had one: the usual one
    tests: tuple[TestVector, ...]
    tokenizer: tokens.Tokenizer
    template: tokens.Template | None
    pin: pins.Pin | None


@dataclass(frozen=True)
class Artifact(Records):
    """A checked artifact. `image` maps the file; `close()` or a with block unmaps it."""

    header: Header
    signature: Signature
    sections: Mapping[str, Section]  # in file order
    manifest: Mapping[str, Any]
    hdf: Mapping[str, Any]
    image: memoryview

    def section(self, name: str) -> memoryview:
        """The bytes of a section, not copied. KeyError if there is none."""
        entry = self.sections[name]
        return self.image[entry.offset : entry.offset + entry.size]

    def tensor_data(self, tensor: Tensor) -> memoryview:
        """The bytes of a tensor's data, not copied."""
        return self.image[tensor.offset : tensor.offset + tensor.size]

    def tensor_second(self, tensor: Tensor) -> memoryview:
        """The bytes of a tensor's low plane, not copied; empty where there is none."""
        return self.image[tensor.second_offset : tensor.second_offset + tensor.second_size]

    def segments_of(self, tensor: Tensor) -> Sequence[Segment]:
        """The segments of one tensor."""
        return sizes.segments_of(tensor, self.segments)

    def units_of(self, layer: int) -> Sequence[KvUnit]:
        """The units of one layer, by KV head; none where all keep everything."""
        return sizes.units_of(self.layers[layer], self.units)

    @property
    def cold(self) -> tuple[Cold, ...]:
        """The records of COLD, as they are: no reader has checked them (gemcheck does)."""
        if "COLD" not in self.sections:
            return ()
        data, least = self.section("COLD"), spec.size_of(Cold)
        step = max(self.sections["COLD"].record_size, least)
        return tuple(Cold.unpack(data, at) for at in range(0, len(data) - least + 1, step))

    def close(self) -> None:
        """Give the mapping back; views of it must be gone."""
        self.image.release()

    def __enter__(self) -> Artifact:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def read_artifact(
    source: str | bytes | os.PathLike[str] | memoryview,
    verify: Verify = "full",
    *,
    image: bool = False,
) -> Artifact:
    """Check a file, or with `image` the bytes of one, and return its records.

    verify: "full" everything; "fast" without the checksums of WHOT; "structure" what the engine
    checks, with the CRC of WHOT (rows 1 to 19 of the table).
    """
    if image:
        if not isinstance(source, bytes | bytearray | memoryview):
            raise TypeError("an image must be bytes")
        return _read(memoryview(source).cast("B"), verify)
    if isinstance(source, memoryview):
        raise TypeError("a memoryview needs image=True")
    return _read(_map(source), verify)


def _map(path: str | bytes | os.PathLike[str]) -> memoryview:
    label = writer.show(os.fsdecode(path))
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:
                return memoryview(b"")
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        with contextlib.suppress(OSError):  # a hint; what is read here is soon read by an engine
            mapped.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(mapped)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FormatError(Code.OPEN, f"{label}: {reason}", "check the path") from error


def _read(image: memoryview, verify: Verify) -> Artifact:
    header = _header(image, len(image))
    signature = _signature(image)
    table = _table(image, header)
    sections = _sections(image, header, table)
    for name, entry in sections.items():
        if name != "WHOT":
            _crc(image, name, entry, Code.SECTION_CRC)
    found = _records(image, sections, header.required_features)
    _ram(header, sections, found)
    if verify != "fast":
        _crc(image, "WHOT", sections["WHOT"], Code.WEIGHTS_CRC)
    manifest: Mapping[str, Any] = {}
    hdf: Mapping[str, Any] = {}
    if verify != "structure":
        _sha256(image, sections, skip=() if verify == "full" else ("WHOT",))
        _root(header, table)
        hdf = _hdf(image, header, sections["HDFJ"])
        manifest = manifest_.decode(_part(image, sections["MANI"]))
        manifest_.check(
            manifest, found.conf, found.layers, found.tensors, found.segments, found.units
        )
        if found.ladder is not None:
            records.check_ladder(found.ladder)
        manifest_.check_pin(manifest, None if found.pin is None else len(found.pin.ids))
    return Artifact(
        header=header,
        signature=signature,
        sections=sections,
        manifest=manifest,
        hdf=hdf,
        image=image,
        **vars(found),
    )


def check_front(front: bytes, size: int) -> Header:
    """Rows 1 to 16 but the gaps, of a file of `size` bytes of which only the beginning is at hand:
    header, signature block and section table. FormatError for anything that is wrong there."""
    image = memoryview(front)
    header = _header(image, size)
    _signature(image)
    entries, _ = _placed(header, _table(image, header), size)
    _by_name(entries, header)
    return header


# ---- rows 1 to 10: header and signature block ----
def _header(image: memoryview, size: int) -> Header:
    start = bytes(image[:8])
    if start != spec.MAGIC[: len(start)]:
        raise FormatError(Code.MAGIC, "header: not a .gembin file", "name a file made by gemmake")
    if size < 512 or len(image) < 512:
        raise FormatError(Code.SIZE, f"file: {size} bytes, a header needs 512", COPY)
    header = Header.unpack(bytes(image[: spec.HEADER_SIZE]))
    if header.byte_order != spec.BYTE_ORDER:
        raise FormatError(Code.BYTE_ORDER, f"header: byte order {header.byte_order:#010x}", COPY)
    if header.major != spec.MAJOR:
        raise FormatError(
            Code.VERSION,
            f"header: format {header.major}.{header.minor}, this tool reads {spec.MAJOR}.x",
            "use the release that made it, or compile again with this one",
        )
    found = zlib.crc32(bytes(image[:252]))
    if found != header.header_crc32:
        wanted = header.header_crc32
        raise FormatError(Code.HEADER_CRC, f"header: CRC {found:#x}, stored {wanted:#x}", COPY)
    _header_fields(header, size)
    return header


def _header_fields(header: Header, size: int) -> None:
    fixed = {
        "header_size": spec.HEADER_SIZE,
        "entry_size": spec.ENTRY_SIZE,
        "align": spec.ALIGN,
        "table_offset": spec.TABLE_OFFSET,
        "reserved": bytes(24),
    }
    for name, wanted in fixed.items():
        if getattr(header, name) != wanted:
            raise FormatError(Code.HEADER, f"header: {name} is not {wanted!r}", REBUILD)
    if not 1 <= header.section_count <= spec.MAX_SECTIONS:
        raise FormatError(Code.HEADER, f"header: {header.section_count} sections", REBUILD)
    if not records.is_text(header.target):
        raise FormatError(Code.HEADER, "header: target is not NUL-padded", REBUILD)
    if header.file_size != size:
        wanted = header.file_size
        raise FormatError(Code.SIZE, f"file: {size} bytes, its header says {wanted}", COPY)
    unknown = header.required_features & ~spec.REQ_KNOWN
    if unknown:
        raise FormatError(
            Code.FEATURE,
            f"header: needs unknown features {unknown:#x}",
            "use the release that made it",
        )
    if header.engine_abi_min > spec.ENGINE_ABI:
        raise FormatError(
            Code.ABI,
            f"header: needs engine ABI {header.engine_abi_min}, this is {spec.ENGINE_ABI}",
            "update the engine",
        )


def _signature(image: memoryview) -> Signature:
    at = spec.SIGNATURE_OFFSET
    block = Signature.unpack(bytes(image[at : at + 256]))
    bad = block.alg > 1 or any(block.pad) or any(block.reserved)
    if block.alg == 0 and (any(block.key_id) or any(block.signature)):
        bad = True
    if bad:
        what = f"signature block: algorithm {block.alg} or a reserved byte that is set"
        raise FormatError(Code.SIGNATURE, what, "sign the artifact again")
    return block


# ---- rows 11 to 16: section table ----
def _table(image: memoryview, header: Header) -> bytes:
    end = spec.TABLE_OFFSET + spec.ENTRY_SIZE * header.section_count
    if end > len(image):
        raise FormatError(Code.SIZE, f"section table: ends at {end} of {len(image)}", REBUILD)
    table = bytes(image[spec.TABLE_OFFSET : end])
    if zlib.crc32(table) != header.table_crc32:
        raise FormatError(Code.TABLE_CRC, "section table: CRC differs", COPY)
    return table


def _sections(image: memoryview, header: Header, table: bytes) -> dict[str, Section]:
    """The sections by name, in file order: entries, gaps and presence checked."""
    entries, gaps = _placed(header, table, len(image))
    for start, stop in gaps:
        if any(image[start:stop]):
            raise FormatError(Code.GAP, f"file: bytes {start}..{stop} are not all zero", REBUILD)
    return _by_name(entries, header)


def _by_name(entries: Sequence[Section], header: Header) -> dict[str, Section]:
    units = spec.Feature.KV_MASK | spec.KV_4BIT
    return _present(entries, bool(header.required_features & units))


def _placed(header: Header, table: bytes, size: int) -> tuple[list[Section], list[tuple[int, int]]]:
    """The entries, checked, in a file of `size` bytes; and the gaps between them (start, stop)."""
    entries = [Section.unpack(table, at) for at in range(0, len(table), spec.ENTRY_SIZE)]
    end = spec.TABLE_OFFSET + len(table)
    seen: set[int] = set()
    gaps: list[tuple[int, int]] = []
    for entry in entries:
        name = entry.type.to_bytes(4, "little")
        align = spec.WEIGHT_ALIGN if name == b"WHOT" else spec.ALIGN
        problem = _entry_problem(entry, name)
        if entry.type in seen:
            problem = "is there twice"
        elif entry.offset != sizes.pad(end, align):
            problem = f"starts at {entry.offset}, not at {sizes.pad(end, align)}"
        elif entry.offset + entry.size > size:
            problem = f"ends at {entry.offset + entry.size}, the file at {size}"
        if problem:
            raise FormatError(Code.TABLE, f"section {name!r:.20}: {problem}", REBUILD)
        seen.add(entry.type)
        gaps.append((end, entry.offset))
        end = entry.offset + entry.size
    if sizes.pad(end, spec.ALIGN) != header.file_size:
        raise FormatError(Code.TABLE, f"section table: sections end at {end}", REBUILD)
    return entries, [*gaps, (end, header.file_size)]


def _entry_problem(entry: Section, name: bytes) -> str:
    if entry.name != name + bytes(12):
        return "has a name that is not its type"
    if entry.flags & ~15:
        return f"has unknown flags {entry.flags:#x}"
    if any(entry.reserved0) or any(entry.reserved1):
        return "has a reserved byte that is set"
    cold = name == b"WHOT" and entry.flags & spec.SectionFlag.COLD
    if entry.mem_size > entry.size or (entry.mem_size != entry.size and not cold):
        return f"has {entry.size} bytes in the file and {entry.mem_size} in memory"
    records_end = entry.record_size * entry.record_count
    if records_end != entry.size if entry.record_size else entry.record_count != 0:
        return f"has {entry.record_count} records of {entry.record_size} in {entry.size} bytes"
    return ""


def _present(entries: Sequence[Section], masked: bool) -> dict[str, Section]:
    """By name. `masked`: the header says that KV heads keep a part."""
    known = {spec.fourcc(name): name for name in spec.SECTIONS}
    out = {known.get(e.type, f"?{e.type:08x}"): e for e in entries}
    mask = spec.MASK_SECTION
    for name in spec.SECTIONS:
        wanted = masked if name == mask else name not in spec.OPTIONAL_SECTIONS
        if wanted and name not in out:
            raise FormatError(Code.MISSING, f"section {name}: is missing", REBUILD)
    if mask in out and not masked:
        what = f"section {mask}: is there without its feature bit"
        raise FormatError(Code.MISSING, what, REBUILD)
    for entry in entries:
        strange = known.get(entry.type, "COLD") == "COLD"  # the engine's core does not know that
        if strange and entry.flags & spec.SectionFlag.REQUIRED:
            what = f"section {entry.name[:4]!r}: is required and unknown here"
            raise FormatError(Code.MISSING, what, "use the release that made it")
    return out


def _part(image: memoryview, entry: Section) -> memoryview:
    return image[entry.offset : entry.offset + entry.size]


def _crc(image: memoryview, name: str, entry: Section, code: Code) -> None:
    found = zlib.crc32(_part(image, entry))
    if found != entry.crc32:
        what = f"section {name}: CRC {found:#x}, stored {entry.crc32:#x}"
        raise FormatError(code, what, COPY)


# ---- row 17: records ----
R = TypeVar("R", bound=Record)


def _array(
    image: memoryview, sections: Mapping[str, Section], record: type[R], name: str, most: int
) -> tuple[R, ...]:
    entry, known = sections[name], spec.size_of(record)
    code = Code[name]
    if entry.record_size < known:
        what = f"section {name}: records of {entry.record_size} bytes, {known} are needed"
        raise FormatError(code, what, REBUILD)
    if not 1 <= entry.record_count <= most:
        what = f"section {name}: {entry.record_count} records, 1 to {most} are allowed"
        raise FormatError(code, what, REBUILD)
    data = _part(image, entry)
    return tuple(record.unpack(data, at) for at in range(0, entry.size, entry.record_size))


def _records(image: memoryview, sections: Mapping[str, Section], features: int) -> Records:
    conf = _array(image, sections, Conf, "CONF", 1)[0]
    records.check_conf(conf)
    layers = _array(image, sections, Layer, "LAYR", spec.MAX_LAYERS)
    records.check_layer_count(conf, layers)
    units: tuple[KvUnit, ...] = ()
    if spec.MASK_SECTION in sections:
        units = _array(image, sections, KvUnit, spec.MASK_SECTION, spec.MAX_UNITS)
    records.check_layers(conf, layers, units, features)
    segments = _array(image, sections, Segment, "SEGM", spec.MAX_SEGMENTS)
    records.check_segments(segments)
    tensors = _array(image, sections, Tensor, "TENS", spec.MAX_TENSORS)
    whot = sections["WHOT"]
    gaps = records.check_tensors(conf, layers, segments, tensors, whot)
    for start, stop in gaps:
        if any(image[start:stop]):
            what = f"section WHOT: bytes {start}..{stop} between tensors are not all zero"
            raise FormatError(Code.TENS, what, REBUILD)
    plans = _array(image, sections, Plan, "PLAN", spec.MAX_PLAN)
    records.check_plans(conf, layers, segments, tensors, plans)
    ropes = records.read_ropes(conf, layers, _part(image, sections["ROPE"]))
    thermal = _array(image, sections, Thermal, "THRM", 1)[0]
    records.check_thermal(thermal)
    ladder = _ladder(image, sections)
    tests = _array(image, sections, TestVector, "TEST", spec.MAX_TESTS)
    records.check_tests(conf, tests)
    tokenizer = tokens.read_tokn(_part(image, sections["TOKN"]), conf.vocab_rows)
    template = None
    if "TMPL" in sections:
        template = tokens.read_tmpl(_part(image, sections["TMPL"]), conf.vocab_rows)
    pin = None
    if pins.NAME in sections:
        pin = pins.read(conf, layers, units, _part(image, sections[pins.NAME]))
    return Records(
        conf,
        layers,
        units,
        tensors,
        segments,
        plans,
        ropes,
        thermal,
        ladder,
        tests,
        tokenizer,
        template,
        pin,
    )


def _ladder(image: memoryview, sections: Mapping[str, Section]) -> Ladder | None:
    """Not checked: an engine that is told no temperature does not look at it."""
    at, need = spec.size_of(Thermal), spec.size_of(Thermal) + spec.size_of(Ladder)
    entry = sections["THRM"]
    return Ladder.unpack(_part(image, entry), at) if entry.record_size >= need else None


# ---- rows 18 to the end ----
def _ram(header: Header, sections: Mapping[str, Section], found: Records) -> None:
    totals = sizes.totals(
        found.conf,
        found.layers,
        len(found.tensors),
        len(found.segments),
        found.plans,
        header.file_size,
        sections["WHOT"].size,
        found.units,
        sections["WHOT"].mem_size,
    )
    wanted = {
        "ram_weights": totals.weights,
        "ram_arena": totals.arena,
        "ram_kv": totals.kv,
        "ram_tables": totals.tables,
        "ram_engine": totals.engine,
        "ram_stacks": totals.stacks,
        "ram_total": totals.total,
        "kv_layout_id": sizes.kv_layout_id(found.conf, found.layers, found.units),
    }
    for name, value in wanted.items():
        if getattr(header, name) != value:
            what = f"header: {name} is {getattr(header, name)}, the records say {value}"
            raise FormatError(Code.RAM, what, REBUILD)


def _sha256(image: memoryview, sections: Mapping[str, Section], skip: Sequence[str]) -> None:
    for name, entry in sections.items():
        if name not in skip and hashlib.sha256(_part(image, entry)).digest() != entry.sha256:
            raise FormatError(Code.SHA256, f"section {name}: SHA-256 differs", COPY)


def _root(header: Header, table: bytes) -> None:
    if writer.root_of(header, table) != header.root_sha256:
        raise FormatError(Code.ROOT, "header: root digest differs", COPY)


def canonical_json(value: Any) -> bytes:
    """The one byte form of HDFJ: sorted keys, no blanks, UTF-8, no NaN."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def _hdf(image: memoryview, header: Header, entry: Section) -> dict[str, Any]:
    if entry.size > spec.MAX_MANIFEST:
        raise FormatError(Code.MANIFEST, f"section HDFJ: {entry.size} bytes", REBUILD)
    raw = bytes(_part(image, entry))
    try:
        value = json.loads(raw.decode("utf-8"))
        again = canonical_json(value)
    except (ValueError, RecursionError) as error:
        raise FormatError(Code.MANIFEST, f"section HDFJ: not JSON: {error}", REBUILD) from error
    if not isinstance(value, dict) or again != raw:
        raise FormatError(Code.MANIFEST, "section HDFJ: not in canonical form", REBUILD)
    bound = {k: v for k, v in value.items() if k != "policy"}
    if hashlib.sha256(canonical_json(bound)).digest() != header.hdf_sha256:
        raise FormatError(Code.MANIFEST, "section HDFJ: its hash is not hdf_sha256", REBUILD)
    return value


def iter_names(artifact: Artifact) -> Iterator[tuple[str, Tensor]]:
    """Tensors with the names that the manifest gives them."""
    for entry, tensor in zip(artifact.manifest["tensors"], artifact.tensors, strict=True):
        yield entry["name"], tensor
