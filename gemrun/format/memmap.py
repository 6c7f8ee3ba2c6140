"""The `.memmap` listing beside an artifact: where everything lies, the declared total first.

Text for people and scripts: five lines with the total and what it is made of, then one row per
section, tensor, buffer and ring, columns separated by at least two blanks. Made from the artifact
alone, so the same artifact gives the same text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from gemrun.format import cold, reader, sizes, spec, writer
from gemrun.format.reader import Artifact
from gemrun.format.spec import Buffer, KvUnit, Op, Role, Tensor

SUFFIX = ".memmap"
BEGIN = "total footprint  "  # by which a listing is known
COLUMNS = ("what", "name", "offset", "size", "align", "owner", "first use", "last use")
Row = tuple[str, ...]

# Steps that read a tensor, first and last.
USES: dict[Role, tuple[Op, Op]] = {
    Role.EMBED: (Op.EMBED, Op.EMBED),
    Role.HEAD: (Op.HEAD, Op.HEAD),
    Role.FINAL_NORM: (Op.HEAD, Op.HEAD),
    Role.O: (Op.O, Op.O),
    Role.POST_ATTN_NORM: (Op.O, Op.O),
    Role.FFN_NORM: (Op.GATE_UP, Op.GATE_UP),
    Role.GATE_UP: (Op.GATE_UP, Op.GATE_UP),
    Role.DOWN: (Op.DOWN, Op.DOWN),
    Role.POST_FFN_NORM: (Op.DOWN, Op.DOWN),
}


def render(artifact: Artifact) -> str:
    """The listing of a checked artifact."""
    lines = [*_head(artifact), ""]
    rows = [COLUMNS, *_sections(artifact), *_tensors(artifact), *_buffers(artifact)]
    lines += _table([*rows, *_rings(artifact)])
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def beside(source: Path, final: Path) -> Iterator[Path]:
    """Write the listing of the artifact at `source` under a passing name; it becomes that of
    `final`, whose path is yielded, once the block has succeeded.

    Raises FormatError for a damaged artifact, WriteError when the listing cannot be written.
    """
    target = Path(f"{final}{SUFFIX}")
    with reader.read_artifact(source, verify="fast") as artifact:
        text = render(artifact)
    try:
        with writer.whole(target) as passing:
            passing.write_text(text, encoding="utf-8")
            yield target
    except OSError as error:
        if isinstance(error, writer.WriteError):
            raise
        raise writer.WriteError(
            f"{writer.show(str(target))}: {error.strerror or error} while writing "
            f"{len(text)} bytes; check the disk and its free space"
        ) from error


def _head(artifact: Artifact) -> list[str]:
    h, conf = artifact.header, artifact.conf
    threads = f"{conf.threads} thread{'s' if conf.threads != 1 else ''}"
    size = artifact.sections["WHOT"].size
    of = f" at once of {size}" if artifact.cold else ""
    return [
        f"{BEGIN}{h.ram_total} bytes ({megabytes(h.ram_total)}) for {threads} "
        f"and {conf.context} positions: the sum of the lines below",
        f"file mapping     {h.ram_weights} bytes of weights{of} and {h.ram_tables} bytes of tables",
        f"arena            {h.ram_arena} bytes",
        f"KV cache         {h.ram_kv} bytes",
        f"engine           {h.ram_engine} bytes, and {h.ram_stacks} bytes of thread stacks",
    ]


def megabytes(size: int) -> str:
    """Bytes as decimal megabytes, rounded up to a whole number."""
    return f"{-(-size // 1_000_000)} MB"


def _sections(artifact: Artifact) -> Iterator[Row]:
    for name, entry in artifact.sections.items():
        align = spec.WEIGHT_ALIGN if name == "WHOT" else spec.ALIGN
        last = "run" if name in ("WHOT", "TOKN", "TMPL", "ROPE", "PINP") else "open"
        python = name in ("HDFJ", "MANI")
        owner = "tools" if python else "engine"
        place = (f"{entry.offset:#x}", str(entry.size), str(align))
        yield ("section", name, *place, owner, "open", "check" if python else last)


def _tensors(artifact: Artifact) -> Iterator[Row]:
    away = _away(artifact)
    for index, (name, tensor) in enumerate(reader.iter_names(artifact)):
        first, last = _use(artifact, tensor)
        owner = "model" if tensor.layer < 0 else f"layer {tensor.layer}"
        owner += f" {Role(tensor.role).name.lower()}"
        place = (f"{tensor.offset:#x}", str(tensor.size), str(spec.ALIGN))
        yield ("tensor", name, *place, owner + away.get((index, 0), ""), first, last)
        if tensor.second_size:
            place = (f"{tensor.second_offset:#x}", str(tensor.second_size), str(spec.ALIGN))
            yield ("plane", name, *place, owner + away.get((index, 1), ""), first, last)


def _away(artifact: Artifact) -> dict[tuple[int, int], str]:
    """How planes are read that do not stay in memory, by tensor and plane."""
    told = {spec.ColdBy.STREAM: ", streamed", spec.ColdBy.ROWS: ", by rows"}
    if cold.problem(artifact.cold, artifact.tensors):
        return {}
    return {(r.tensor, r.plane): told[spec.ColdBy(r.by)] for r in artifact.cold}


def _use(artifact: Artifact, tensor: Tensor) -> tuple[str, str]:
    role = Role(tensor.role)
    first, last = USES.get(role, (Op.QKV, Op.QKV))
    if role == Role.HEAD and artifact.conf.flags & spec.ConfFlag.TIED:
        first = Op.EMBED
    return first.name, last.name


def _buffers(artifact: Artifact) -> Iterator[Row]:
    for plan in artifact.plans:
        place = (f"{plan.offset:#x}", str(plan.size), str(spec.LINE))
        ops = (Op(plan.first_op).name, Op(plan.last_op).name)
        yield ("buffer", Buffer(plan.kind).name, *place, "arena", *ops)


def _rings(artifact: Artifact) -> Iterator[Row]:
    for index, layer in enumerate(artifact.layers):
        place = (f"{layer.kv_offset:#x}", str(layer.kv_size), str(spec.LINE))
        yield ("ring", f"kv {index}", *place, f"layer {index}", Op.ATTN.name, Op.ATTN.name)
        yield from _units(artifact, index)


def _units(artifact: Artifact, index: int) -> Iterator[Row]:
    """The rings of a layer's KV heads, where some head of the model keeps a part."""
    layer = artifact.layers[index]
    kv_type, at = artifact.conf.kv_type, layer.kv_offset
    for head, unit in enumerate(artifact.units_of(index)):
        size = unit.blocks * sizes.unit_block_size(kv_type, layer, unit)
        place = (f"{at:#x}", str(size), str(spec.LINE))
        owner = f"layer {index} head {head} keeps {kept(unit)}"
        at += size
        yield ("unit", f"kv {index}.{head}", *place, owner, Op.ATTN.name, Op.ATTN.name)


def kept(unit: KvUnit) -> str:
    """What a KV head keeps, in tokens."""
    names = ("", ", values of 4 bits", ", keys of 4 bits", ", keys and values of 4 bits")
    narrow = names[unit.flags]
    if not unit.partial:
        return f"all{narrow}"
    return f"{unit.sink * spec.KV_BLOCK}+{unit.recent * spec.KV_BLOCK} tokens{narrow}"


def _table(rows: Iterable[Row]) -> list[str]:
    listed = list(rows)
    widths = [max(len(row[i]) for row in listed) for i in range(len(COLUMNS))]
    numbers = {2, 3, 4}
    return [
        "  ".join(
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in listed
    ]
