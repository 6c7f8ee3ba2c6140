"""What an artifact holds, as tables: header, sections, constants, layers, tensors."""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from enum import IntEnum
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from gemmake.check.rules import reason
from gemmake.errors import ArtifactError, UsageError
from gemrun.format import memmap, reader, sizes, spec
from gemrun.format.codes import FormatError
from gemrun.format.pins import Pin
from gemrun.format.reader import Artifact, read_artifact
from gemrun.format.spec import Act, Block, Format, KvType, LayerFlag, Record, Role, Tensor
from gemrun.format.writer import show

PIPE_WIDTH = 160  # columns where nobody says how wide the terminal is


def open_artifact(path: str) -> Artifact:
    """A fully checked artifact, weights too. ArtifactError says which file is wrong, and how."""
    try:
        return read_artifact(path)
    except FormatError as error:
        raise ArtifactError(f"{show(path)}: {reason(path, error)}") from error


def print_artifact(path: str, name: str | None) -> int:
    """Print an artifact's tables, or those of one tensor. Returns the exit code."""
    width = None if sys.stdout is not None and sys.stdout.isatty() else PIPE_WIDTH
    with open_artifact(path) as artifact:
        view = overview(artifact) if name is None else tensor_view(artifact, name, path)
        Console(width=width, markup=False).print(view)
    return 0


def overview(artifact: Artifact) -> Group:
    """Everything but single values."""
    parts: list[RenderableType] = [
        _record("Header", artifact.header),
        _record("Constants", artifact.conf),
        _sections(artifact),
        _layers(artifact),
        *([_units(artifact)] if artifact.units else []),
        _tensors(artifact),
        _tests(artifact),
        *([_pin(artifact.pin)] if artifact.pin else []),
    ]
    return Group(*parts)


def _record(title: str, record: Record) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for field in fields(record):  # type: ignore[arg-type]  # every record is a dataclass
        if not field.name.startswith("reserved"):
            table.add_row(field.name, _value(field.name, getattr(record, field.name)))
    return table


HEX = ("crc32", "features", "kv_layout_id", "byte_order")
TEXT = ("target", "family", "name")
ENUMS: dict[str, type[IntEnum]] = {"kv_type": KvType, "role": Role}


def _value(name: str, value: Any) -> str:
    if isinstance(value, bytes):
        return spec.field_text(value) if name in TEXT else value.hex()
    if any(name.endswith(suffix) for suffix in HEX):
        return f"{value:#x}"
    if name in ENUMS:
        return ENUMS[name](value).name.lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        number = column in ("offset", "size", "records", "rows", "cols")
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _sections(artifact: Artifact) -> Table:
    table = _table("Sections", "type", "offset", "size", "records", "flags", "sha256")
    for name, entry in artifact.sections.items():
        bits = [flag.name or "" for flag in spec.SectionFlag if entry.flags & flag]
        flags = " ".join(bits).lower()
        records = f"{entry.record_count} x {entry.record_size}" if entry.record_size else ""
        sha = entry.sha256.hex()[:16]
        table.add_row(name, f"{entry.offset:#x}", str(entry.size), records, flags, sha)
    return table


def _layers(artifact: Artifact) -> Table:
    names = ("layer", "heads", "kv", "head dim", "ffn", "window", "rope", "block", "act", "flags")
    table = _table("Layers", *names, "kv group", "kv bytes")
    for index, la in enumerate(artifact.layers):
        bits = [flag.name or "" for flag in LayerFlag if la.flags & flag]
        numbers = (index, la.heads, la.kv_heads, la.head_dim, la.ffn, la.window or "all", la.rope)
        words = (Block(la.block).name.lower(), Act(la.act).name.lower(), " ".join(bits).lower())
        table.add_row(*(str(n) for n in numbers), *words, str(la.kv_group), str(la.kv_size))
    return table


def _units(artifact: Artifact) -> Table:
    table = _table("KV heads", "layer", "head", "sink", "recent", "blocks", "first", "keeps")
    for index in range(len(artifact.layers)):
        for head, unit in enumerate(artifact.units_of(index)):
            numbers = (index, head, unit.sink, unit.recent, unit.blocks, unit.first)
            table.add_row(*(str(n) for n in numbers), memmap.kept(unit))
    return table


def formats(artifact: Artifact, tensor: Tensor) -> str:
    """Formats of a tensor's segments, with their groups where there are several."""
    own = artifact.segments_of(tensor)
    if len(own) == 1:
        return Format(own[0].format).name.lower()
    return "+".join(f"{Format(s.format).name.lower()}:{s.group_count}" for s in own)


def _tensors(artifact: Artifact) -> Table:
    table = _table("Tensors", "name", "layer", "role", "format", "rows", "cols", "offset", "size")
    for name, t in reader.iter_names(artifact):
        layer = str(t.layer) if t.layer >= 0 else ""
        rows = f"{t.parts} x {t.rows}" if t.parts > 1 else str(t.rows)
        role = Role(t.role).name.lower()
        place = (f"{t.offset:#x}", str(t.size + t.second_size))
        table.add_row(name, layer, role, formats(artifact, t), rows, str(t.cols), *place)
    return table


def _tests(artifact: Artifact) -> Table:
    table = _table("Test vectors", "prompt", "steps", "digest")
    for test in artifact.tests:
        table.add_row(str(test.prompt_count), str(test.step_count), f"{test.digest:016x}")
    return table


def _pin(pin: Pin) -> Table:
    table = _table("Pinned prompt", "tokens", "ids")
    table.add_row(str(len(pin.ids)), " ".join(map(str, pin.ids)))
    return table


def tensor_view(artifact: Artifact, wanted: str, path: str) -> Group:
    """One tensor: its record, formats and what the compile reported. UsageError if none.

    `wanted` is a whole name, or one of the checkpoint's names that a fused tensor joins with "+".
    A checkpoint's tensor that was split into several is shown with all its parts.
    """
    listed = list(enumerate(reader.iter_names(artifact)))
    own = [entry for entry in listed if entry[1][0] == wanted]
    own = own or [entry for entry in listed if wanted in entry[1][0].split("+")]
    if not own:
        close = close_names(wanted, [name for _, (name, _) in listed])
        names = f" (close: {', '.join(close)})" if close else ""
        remedy = f"gemcheck inspect {shlex.quote(show(path))} lists them"
        raise UsageError(f"tensor {wanted}: not in this artifact{names}; {remedy}")
    tables = []
    for index, (name, tensor) in own:
        table = _record(f"Tensor {index}", tensor)
        for row in (("name", name), *_details(artifact, tensor, index)):
            table.add_row(*row)
        tables.append(table)
    return Group(*tables)


def close_names(wanted: str, names: Sequence[str], most: int = 3) -> list[str]:
    """Whole names that look like `wanted` or hold it, the closest first."""
    parts = {part: None for name in names for part in name.split("+")}
    alike = difflib.get_close_matches(wanted, parts, most)
    holding = [part for part in parts if wanted and wanted.lower() in part.lower()]
    return list(dict.fromkeys([*alike, *holding]))[:most]


def _details(artifact: Artifact, tensor: Tensor, index: int) -> Iterator[tuple[str, str]]:
    yield "format", formats(artifact, tensor)
    elements = tensor.parts * tensor.rows * tensor.cols
    yield "bits per weight", f"{8 * (tensor.size + tensor.second_size) / elements:.3f}"
    if artifact.segments_of(tensor)[0].format != Format.VECTOR:
        yield "panel bytes", str(sizes.panel_size(tensor.cols, artifact.segments_of(tensor)))
    for key, value in artifact.manifest["tensors"][index].get("report", {}).items():
        yield key, f"{value:g}"
