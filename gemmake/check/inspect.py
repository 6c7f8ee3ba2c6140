"""What an artifact holds, as tables: header, sections, constants, layers, tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from gemmake.errors import ArtifactError
from gemrun.format import reader, sizes, spec
from gemrun.format.codes import FormatError
from gemrun.format.reader import Artifact, read_artifact
from gemrun.format.spec import Act, Block, Format, KvType, LayerFlag, Record, Role, Tensor
from gemrun.format.writer import show

PIPE_WIDTH = 160  # columns where nobody says how wide the terminal is


def open_artifact(path: str) -> Artifact:
    """A checked artifact, weights' checksums apart. ArtifactError says which file is wrong."""
    try:
        return read_artifact(path, verify="fast")
    except FormatError as error:
        raise ArtifactError(f"{show(path)}: {error}") from error


def print_artifact(path: str, name: str | None) -> int:
    """Print an artifact's tables, or those of one tensor. Returns the exit code."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    with open_artifact(path) as artifact:
        view = overview(artifact) if name is None else tensor_view(artifact, name)
        Console(width=width, markup=False).print(view)
    return 0


def overview(artifact: Artifact) -> Group:
    """Everything but single values."""
    parts: list[RenderableType] = [
        _record("Header", artifact.header),
        _record("Constants", artifact.conf),
        _sections(artifact),
        _layers(artifact),
        _tensors(artifact),
        _tests(artifact),
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


def _value(name: str, value: Any) -> str:
    if isinstance(value, bytes):
        return spec.field_text(value) if name in TEXT else value.hex()
    if any(name.endswith(suffix) for suffix in HEX):
        return f"{value:#x}"
    if name == "kv_type":
        return f"{value} {KvType(value).name.lower()}"
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


def tensor_view(artifact: Artifact, wanted: str) -> Table:
    """One tensor: its record, formats and what the compile reported. ArtifactError if none."""
    for index, (name, tensor) in enumerate(reader.iter_names(artifact)):
        if name == wanted:
            table = _record(f"Tensor {index}: {name}", tensor)
            for row in _details(artifact, tensor, index):
                table.add_row(*row)
            return table
    known = ", ".join(name for name, _ in reader.iter_names(artifact))
    raise ArtifactError(f"tensor {wanted}: not in this artifact; it has {known:.300}")


def _details(artifact: Artifact, tensor: Tensor, index: int) -> Iterator[tuple[str, str]]:
    yield "role", Role(tensor.role).name.lower()
    yield "format", formats(artifact, tensor)
    elements = tensor.parts * tensor.rows * tensor.cols
    yield "bits per weight", f"{8 * (tensor.size + tensor.second_size) / elements:.3f}"
    if artifact.segments_of(tensor)[0].format != Format.VECTOR:
        yield "panel bytes", str(sizes.panel_size(tensor.cols, artifact.segments_of(tensor)))
    for key, value in artifact.manifest["tensors"][index].get("report", {}).items():
        yield key, f"{value:g}"
