"""What differs between two artifacts: header, constants, options, sections, layers, tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from gemmake.check.inspect import formats, open_artifact
from gemrun.format import reader, spec
from gemrun.format.manifest import OPTIONAL
from gemrun.format.memmap import kept
from gemrun.format.reader import Artifact
from gemrun.format.spec import KvUnit, Record, Tensor

DERIVED = frozenset({"root_sha256", "header_crc32", "table_crc32"})  # differ with anything else
MOST_ONE_SIDED = 8  # lines of a list of what only one file has


def print_difference(first: str, second: str, echo: Callable[[str], None]) -> int:
    """Print how two files differ. Returns the exit code: 0 for the same content, else 1.

    Both files are checked in full first, since their digests stand for their content below.
    """
    with open_artifact(first) as a, open_artifact(second) as b:
        found = list(differences(a, b))
        for line in found:
            echo(line)
        echo(kv_line(a, b) if found else "same content")
    return 1 if found else 0


def differences(a: Artifact, b: Artifact) -> Iterator[str]:
    """One line per difference; nothing for equal artifacts. Both must have been read in full.

    The root covers all but the signature block, so that is compared by itself.
    """
    yield from _records("signature", a.signature, b.signature)
    if a.header.root_sha256 == b.header.root_sha256:
        return
    yield from _records("header", a.header, b.header)
    yield from _records("constants", a.conf, b.conf)
    yield from _records("thermal", a.thermal, b.thermal)
    blank = spec.Ladder()
    yield from _records("ladder", a.ladder or blank, b.ladder or blank)
    for part in ("options", "tools", "licence", *OPTIONAL):
        yield from _values(part, a.manifest.get(part), b.manifest.get(part))
    yield from _inputs(a, b)
    one, two = a.manifest["notes"], b.manifest["notes"]
    yield from _one_sided("notes:", [n for n in one if n not in two], "first")
    yield from _one_sided("notes:", [n for n in two if n not in one], "second")
    yield from _sections(a, b)
    if len(a.layers) == len(b.layers):
        for index, (one, two) in enumerate(zip(a.layers, b.layers, strict=True)):
            yield from _records(f"layer {index}", one, two)
            yield from _heads(index, a.units_of(index), b.units_of(index))
    yield from _tensors(a, b)


def _records(what: str, a: Record, b: Record) -> Iterator[str]:
    for field in fields(a):  # type: ignore[arg-type]  # every record is a dataclass
        one, two = getattr(a, field.name), getattr(b, field.name)
        if one != two and field.name not in DERIVED:
            yield f"{what}: {field.name}: {_show(one)} | {_show(two)}"


def _heads(layer: int, a: Sequence[KvUnit], b: Sequence[KvUnit]) -> Iterator[str]:
    """What KV heads keep, where at least one file says so head by head."""
    for head in range(max(len(a), len(b))):
        one, two = (kept(u[head]) if head < len(u) else "all" for u in (a, b))
        if one != two:
            yield f"layer {layer}: KV head {head} keeps: {one} | {two}"


def _values(what: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                yield f"{what}: {key}: {_show(a.get(key))} | {_show(b.get(key))}"
    elif a != b:
        yield f"{what}: {_show(a)} | {_show(b)}"


def _one_sided(what: str, names: Sequence[str], side: str) -> Iterator[str]:
    """One line for each of the first few that only one file has, then how many more there are."""
    for name in names[:MOST_ONE_SIDED]:
        yield f"{what} {name}: only in the {side}"
    if len(names) > MOST_ONE_SIDED:
        yield f"{what} ... and {len(names) - MOST_ONE_SIDED} more only in the {side}"


def _inputs(a: Artifact, b: Artifact) -> Iterator[str]:
    """Files that the compiles read, by name."""
    first = {str(i.get("name")): i for i in a.manifest["inputs"]}
    second = {str(i.get("name")): i for i in b.manifest["inputs"]}
    for name in (n for n in first if n in second):
        yield from _values(f"input {name}", first[name], second[name])
    yield from _one_sided("input", [n for n in first if n not in second], "first")
    yield from _one_sided("input", [n for n in second if n not in first], "second")


def _show(value: Any) -> str:
    if isinstance(value, bytes):
        text = value.rstrip(b"\0").decode("utf-8", "replace")
        value = text if text and text.isprintable() and "\ufffd" not in text else value.hex()
    return "none" if value is None else f"{value!s:.200}"


def _sections(a: Artifact, b: Artifact) -> Iterator[str]:
    for name in [*a.sections, *(n for n in b.sections if n not in a.sections)]:
        one, two = a.sections.get(name), b.sections.get(name)
        if one is None or two is None:
            yield f"section {name}: only in the {'second' if one is None else 'first'}"
        elif one.sha256 != two.sha256:
            sizes = (
                f"{one.size} | {two.size} bytes" if one.size != two.size else f"{one.size} bytes"
            )
            yield f"section {name}: content differs ({sizes})"
        elif one.flags != two.flags:
            yield f"section {name}: flags {one.flags:#x} | {two.flags:#x}"


def _tensors(a: Artifact, b: Artifact) -> Iterator[str]:
    first = {(t.role, t.layer, t.slab_first): (n, t) for n, t in reader.iter_names(a)}
    second = {(t.role, t.layer, t.slab_first): (n, t) for n, t in reader.iter_names(b)}
    changed = 0
    for key in (k for k in first if k in second):
        line = _tensor(a, b, first[key][1], second[key][1])
        if line:
            changed += 1
            yield f"tensor {first[key][0]}: {line}"
    only_a = [name for key, (name, _) in first.items() if key not in second]
    only_b = [name for key, (name, _) in second.items() if key not in first]
    yield from _one_sided("tensor", only_a, "first")
    yield from _one_sided("tensor", only_b, "second")
    total = f"tensors: {changed} of {len({*first, *second})} differ"
    if only_a or only_b:
        total += f", {len(only_a)} only in the first, {len(only_b)} only in the second"
    yield total


def _tensor(a: Artifact, b: Artifact, one: Tensor, two: Tensor) -> str:
    """How two tensors of one role differ, "" if they do not."""
    if formats(a, one) != formats(b, two):
        return f"format {formats(a, one)} | {formats(b, two)}"
    if (one.rows, one.cols) != (two.rows, two.cols):
        return f"shape {one.rows}x{one.cols} | {two.rows}x{two.cols}"
    count = _unequal(a.tensor_data(one), b.tensor_data(two))
    count += _unequal(a.tensor_second(one), b.tensor_second(two))
    size = one.size + one.second_size
    return f"{count} of {size} bytes differ" if count else ""


def _unequal(a: memoryview, b: memoryview) -> int:
    if len(a) != len(b):
        return max(len(a), len(b))
    step, count = 16 << 20, 0
    one, two = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
    for at in range(0, len(one), step):
        count += int(np.count_nonzero(one[at : at + step] != two[at : at + step]))
    return count


def same_layout(a: Artifact, b: Artifact) -> bool:
    """Whether a running session's KV cache fits both (hot replace)."""
    return a.header.kv_layout_id == b.header.kv_layout_id


def kv_line(a: Artifact, b: Artifact) -> str:
    """A last line about hot replace."""
    word = "same" if same_layout(a, b) else "different"
    names = f"{spec.field_text(a.conf.name)} and {spec.field_text(b.conf.name)}"
    return f"KV layout of {names}: {word}"
