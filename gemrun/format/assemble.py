"""From records to header and parts: places the sections and fills in every derived figure.

The compiler decides records and buffers; what follows from them (offsets, features, memory
figures, kv_layout_id) is computed here once, so that no caller can get it wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gemrun.format import cold, sizes, spec, writer
from gemrun.format import records as rules
from gemrun.format.spec import (
    Cold,
    Conf,
    Header,
    KvUnit,
    Ladder,
    Layer,
    Plan,
    Rope,
    Segment,
    Tensor,
    Thermal,
)
from gemrun.format.writer import Part


@dataclass(frozen=True)
class Records:
    """Everything of an artifact but the weights' bytes."""

    conf: Conf
    layers: Sequence[Layer]
    tensors: Sequence[Tensor]  # offsets from the start of WHOT
    segments: Sequence[Segment]
    plans: Sequence[Plan]
    rope: bytes  # rope_section()
    tokn: bytes
    tmpl: bytes | None
    thermal: Thermal
    tests: bytes  # writer.blank_tests(n) where the engine fills them in later
    hdf: bytes  # canonical JSON
    hdf_sha256: bytes
    manifest: bytes | int  # bytes, or the size to reserve
    weights_size: int  # bytes of WHOT
    target: str
    isa: int = 0
    isa_features: int = 0
    ram_budget: int = 0  # bytes, 0 = not stated
    ladder: Ladder | None = None  # behind `thermal` in its record
    units: Sequence[KvUnit] = ()  # place_units(); empty: no KVMK
    pin: bytes = b""  # pins.section(), or pins.blank(); empty: no PINP
    cold: Sequence[Cold] = ()  # weights that do not stay in memory; empty: no COLD


@dataclass(frozen=True)
class Assembled:
    """What ArtifactWriter takes, and the memory figures."""

    header: Header
    parts: tuple[Part, ...]
    totals: sizes.Totals
    file_size: int
    weights_offset: int


def rope_section(tables: Sequence[tuple[int, int, bytes]]) -> bytes:
    """ROPE from (pairs, positions, table bytes)."""
    at = spec.size_of(Rope) * len(tables)
    heads, body = b"", b""
    for pairs, positions, table in tables:
        if len(table) != 8 * pairs * positions:
            raise ValueError(f"rope table of {len(table)} bytes for {pairs} x {positions}")
        start = sizes.pad(at, spec.LINE)
        heads += Rope(pairs=pairs, positions=positions, offset=start).pack()
        body += bytes(start - at) + table
        at = start + len(table)
    return heads + body


def place_tensors(
    tensors: Sequence[Tensor], segments: Sequence[Segment]
) -> tuple[tuple[Tensor, ...], int]:
    """Offsets and sizes of tensors in this order from the start of WHOT, and the size of WHOT."""
    at, end, out = 0, 0, []
    for tensor in tensors:
        size, second = sizes.tensor_size(tensor, sizes.segments_of(tensor, segments))
        end = at + size
        low = sizes.pad(end, spec.ALIGN) if second else 0
        placed = replace(tensor, offset=at, size=size, second_offset=low, second_size=second)
        out.append(placed)
        end = low + second if second else end
        at = sizes.pad(end, spec.ALIGN)
    return tuple(out), end


Keep = tuple[int, int]  # (sink, recent) of a KV head, in blocks of 32 tokens; (0, 0): everything
EVERYTHING: Keep = (0, 0)


def place_kv(conf: Conf, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Ring blocks, sizes and offsets of the layers, whose heads all keep everything."""
    return place_units(conf, layers, ())[0]


def place_units(
    conf: Conf,
    layers: Sequence[Layer],
    keeps: Sequence[Keep],
    value4: Sequence[bool] = (),
    key4: Sequence[bool] = (),
) -> tuple[tuple[Layer, ...], tuple[KvUnit, ...]]:
    """Layers with their rings, and the records of KVMK, none where every head keeps everything in 8
    bits.

    `keeps`: of every KV head, in order of layers, then heads; empty: everything. `value4`,
    `key4`: whether its values, its keys have 4 bits; empty: none. ValueError for another number of
    them, FormatError for what FORMAT.md 2.4 refuses.
    """
    count = sum(layer.kv_heads for layer in layers)
    for given in (keeps, value4, key4):
        if given and len(given) != count:
            raise ValueError(f"{len(given)} units for {count} KV heads")
    features = int(spec.Feature.KV_VALUE4) if any(value4) else 0
    features |= int(spec.Feature.KV_KEY4) if any(key4) else 0
    masked = features or any(tuple(keep) != EVERYTHING for keep in keeps)
    keeps, none = keeps or [EVERYTHING] * count, [False] * count
    flags = [
        int(spec.UnitFlag.VALUE4) * values | int(spec.UnitFlag.KEY4) * keys
        for values, keys in zip(value4 or none, key4 or none, strict=True)
    ]
    at, out, units = 0, [], list[KvUnit]()
    for index, layer in enumerate(layers):
        blocks = sizes.kv_blocks(conf.context, layer.window)
        layer = replace(layer, kv_source=index, kv_blocks=blocks, kv_offset=at)
        layer = replace(layer, unit_first=len(units))
        if masked:
            own = slice(len(units), len(units) + layer.kv_heads)
            units += _units_of(conf, layer, keeps[own], flags[own], bool(features))
            rules.check_units(conf, index, layer, units, features)
        layer = replace(layer, kv_size=sizes.kv_layer_size(conf.kv_type, layer, units))
        at += layer.kv_size
        out.append(layer)
    return tuple(out), tuple(units)


def _units_of(
    conf: Conf, layer: Layer, keeps: Sequence[Keep], flags: Sequence[int], lines: bool
) -> list[KvUnit]:
    """A layer's units, one behind the other."""
    first, out = 0, []
    step = sizes.unit_step(conf.kv_type, layer, lines)
    for (sink, recent), flag in zip(keeps, flags, strict=True):
        blocks = sizes.unit_blocks(layer, sink, recent)
        out.append(KvUnit(sink=sink, recent=recent, flags=flag, blocks=blocks, first=first))
        first += blocks * sizes.unit_block_size(conf.kv_type, layer, out[-1]) // step
    return out


def _thermal_part(thermal: Thermal, ladder: Ladder | None) -> Part:
    """THRM: one record, longer where it has a ladder."""
    data = thermal.pack() + (ladder.pack() if ladder else b"")
    return Part("THRM", len(data), data, len(data), 1)


def assemble(records: Records) -> Assembled:
    """Place the sections, move the tensors to file offsets, and compute the header."""
    conf, layers, segments = records.conf, records.layers, records.segments
    units, manifest = records.units, records.manifest
    held = cold.resident(conf, records.tensors, records.cold, records.weights_size)
    plain: list[Part] = [
        writer.section_part("CONF", conf.pack()),
        writer.section_part("LAYR", b"".join(la.pack() for la in layers)),
        *([writer.section_part("KVMK", b"".join(u.pack() for u in units))] if units else []),
        writer.reserved_part("TENS", spec.size_of(Tensor) * len(records.tensors)),
        writer.section_part("SEGM", b"".join(s.pack() for s in segments)),
        writer.section_part("PLAN", b"".join(p.pack() for p in records.plans)),
        writer.section_part("TOKN", records.tokn),
        *([] if records.tmpl is None else [writer.section_part("TMPL", records.tmpl)]),
        writer.section_part("ROPE", records.rope),
        _thermal_part(records.thermal, records.ladder),
        writer.section_part("TEST", records.tests),
        *([writer.section_part("PINP", records.pin)] if records.pin else []),
        *([writer.section_part("COLD", _packed(records.cold))] if records.cold else []),
        writer.section_part("HDFJ", records.hdf),
        Part("MANI", manifest)
        if isinstance(manifest, int)
        else writer.section_part("MANI", manifest),
        Part("WHOT", records.weights_size, held=held if records.cold else None),
    ]
    offsets, file_size = writer.place([(p.type, p.size) for p in plain])
    start = offsets[-1]
    tens = b"".join(moved(t, start).pack() for t in records.tensors)
    parts = tuple(writer.section_part("TENS", tens) if p.type == "TENS" else p for p in plain)
    totals = sizes.totals(
        conf,
        layers,
        len(records.tensors),
        len(segments),
        records.plans,
        file_size,
        records.weights_size,
        units,
        held,
    )
    header = Header(
        required_features=sizes.features_of(conf, segments, units),
        ram_weights=totals.weights,
        ram_arena=totals.arena,
        ram_kv=totals.kv,
        ram_total=totals.total,
        ram_budget=records.ram_budget,
        isa=records.isa,
        isa_features=records.isa_features,
        kv_layout_id=sizes.kv_layout_id(conf, layers, units),
        hdf_sha256=records.hdf_sha256,
        target=spec.text_field(records.target, 16),
        ram_tables=totals.tables,
        ram_engine=totals.engine,
        ram_stacks=totals.stacks,
        engine_abi_min=sizes.abi_of(conf, records.plans, bool(records.cold)),
    )
    return Assembled(header, parts, totals, file_size, start)


def _packed(records: Sequence[Cold]) -> bytes:
    return b"".join(record.pack() for record in records)


def moved(tensor: Tensor, start: int) -> Tensor:
    """A tensor whose offsets count from another place, `start` bytes on."""
    second = tensor.second_offset + start if tensor.second_size else 0
    return replace(tensor, offset=tensor.offset + start, second_offset=second)
