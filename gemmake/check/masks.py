"""What the KV heads of an artifact keep, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from gemrun.format import sizes
from gemrun.format.reader import Artifact
from gemrun.format.spec import KvUnit, UnitFlag


def partial(artifact: Artifact) -> int:
    """KV heads that keep a part."""
    return sum(unit.partial for unit in artifact.units)


def value4(artifact: Artifact) -> int:
    """KV heads with values of 4 bits."""
    return sum(unit.value4 for unit in artifact.units)


def key4(artifact: Artifact) -> int:
    """KV heads with keys of 4 bits."""
    return sum(unit.key4 for unit in artifact.units)


def wide(artifact: Artifact, flag: UnitFlag) -> str:
    """The heads whose values, or keys, keep 8 bits, by layer: "0: 1 2; 5: 0"."""
    rows = []
    for index in range(len(artifact.layers)):
        heads = [str(h) for h, unit in enumerate(artifact.units_of(index)) if not unit.flags & flag]
        rows += [f"{index}: {' '.join(heads)}"] if heads else []
    return "; ".join(rows)


def table(artifact: Artifact) -> Iterator[str]:
    """A heading and a line per layer: blocks of its rings, and what its heads keep, in blocks."""
    if not artifact.units:
        return
    narrow = "; k4: keys of 4 bits" if key4(artifact) else ""
    narrow += "; v4: values of 4 bits" if value4(artifact) else ""
    yield f"layer  blocks kept      share  heads: sink + recent blocks of 32 tokens, or all{narrow}"
    for index, layer in enumerate(artifact.layers):
        kept = sizes.kv_layer_blocks(layer, artifact.units)
        every = sizes.kv_layer_blocks(layer)
        window = f", in a window of {layer.window} tokens" if layer.window else ""
        counts = f"{kept} of {every}"
        heads = heads_text(artifact.units_of(index))
        yield f"{index:>5}  {counts:<15} {kept / every:>6.1%}  {heads}{window}"


def heads_text(units: Sequence[KvUnit]) -> str:
    """What heads keep, in order; equal neighbours are counted."""
    runs = [(text, len(list(run))) for text, run in groupby(map(_unit, units))]
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in runs)


def _unit(unit: KvUnit) -> str:
    kept = f"{unit.sink}+{unit.recent}" if unit.partial else "all"
    kept += " k4" if unit.key4 else ""
    return f"{kept} v4" if unit.value4 else kept
