"""Values and keys of 4 bits: which KV heads of an int8 cache may have them, found by measurement.

    what 4 bits change in every head's output, over calibration windows -> heads, the cheapest first
    -> as many as pass the gates, against the cache in which all have 8 bits

Both are measured with the engine on the finished weights; heads that are judged hold the very bits
that they will hold on the board. Where values and keys may have 4 bits, their steps stand in one
order and pass the gates together; where none pass, values alone are tried, then keys. With a sparse
cache heads keep what its template says, and the gates are for all of it: values and keys have what
the template left. Where no head passes, the artifact is the ordinary one, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from gemmake.emit import Host
from gemmake.figures import mib
from gemmake.kvmask.budgets import Budget
from gemmake.kvmask.choose import Template, Unit
from gemmake.kvmask.gates import Judge, Passage
from gemmake.kvmask.losses import EVERY, F64, grams
from gemmake.kvmask.quality import Quality, holds, words
from gemmake.kvmask.stage import DIGITS, quality_of, texts_of
from gemmake.kvmask.template import Point, rounds, search
from gemmake.kvmask.window import LEAST as LEAST_CONTEXT
from gemmake.progress import Reporter
from gemmake.state import State
from gemrun.context import Config, GemRunContext
from gemrun.format import assemble, sizes, spec
from gemrun.hooks import NarrowProbe

SHARE = 10  # one window in so many is measured: rounding has no rare cases that need more
LEAST = 8  # windows


@dataclass(frozen=True)
class Part:
    """Values, or keys, of KV heads."""

    name: str
    flag: spec.UnitFlag  # of a unit where it has 4 bits
    count: str  # key of the manifest's entry: heads with 4 bits
    figure: int  # of a NarrowProbe's

    @property
    def option(self) -> str:
        """As the user has asked for it."""
        return f"--kv-{self.name} int4"


VALUES = Part("values", spec.UnitFlag.VALUE4, "value4", 1)
KEYS = Part("keys", spec.UnitFlag.KEY4, "key4", 2)
PARTS = (VALUES, KEYS)


@dataclass(frozen=True)
class Narrowed(Template):
    """A template in which values or keys of some heads have 4 bits: flags [layers][kv heads]."""

    flags: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Step:
    """Values or keys of a head go from 8 bits to 4."""

    part: Part
    unit: Unit
    saved: int  # bytes
    cost: float  # share of what the layer's attention adds that it changes, squared


@dataclass(frozen=True)
class Measured:
    """Sums over the looked-at tokens."""

    added: F64  # [layers] squares of what heads add to the residual stream
    changed: Mapping[Part, F64]  # [layers, kv heads] squares of what 4 bits change in it
    windows: int
    tokens: int

    def shares(self) -> dict[Part, F64]:
        """[layers, kv heads]: changed, as a share of what the layer's attention adds."""
        added = np.where(self.added > 0, self.added, 1.0)
        return {part: changed / added[:, None] for part, changed in self.changed.items()}


class NarrowJudge(Judge):
    """Judges templates with 4 bits, too."""

    def _records(self, template: Template) -> list[tuple[int, ...]]:
        records = super()._records(template)
        if not isinstance(template, Narrowed):
            return records
        flags = [flag for row in template.flags for flag in row]
        return [(*record, flag) for record, flag in zip(records, flags, strict=True)]


def decide(state: State, image: Path, host: Host, reporter: Reporter) -> State:
    """The state with the bits of every KV head's values and keys. `image` is the artifact of it in
    which all heads keep everything in 8 bits."""
    if state.options.context < LEAST_CONTEXT or not steps_of(state, no_shares(state)):
        told = told_of(state, {part: nothing(state, part) for part in parts_of(state)})
        return replace(told, notes=(*state.notes, _why_nothing(state)))
    windows, held_out = texts_of(state, image)
    with host.clock.timed("kv values"):
        found = measure(state, image, host, some_of(windows), reporter)
        best, taken, curve = choose(state, image, host, found, held_out, reporter)
    flags = [flag for row in narrowed(state, taken).flags for flag in row]
    told = told_of(
        state, {part: entry(state, part, found, taken, best, curve) for part in parts_of(state)}
    )
    value4, key4 = (tuple(bool(flag & part.flag) for flag in flags) for part in PARTS)
    return replace(told, value4=value4 if any(value4) else (), key4=key4 if any(key4) else ())


def parts_of(state: State) -> list[Part]:
    """What may have 4 bits."""
    return [part for part in PARTS if part.name in state.options.narrow]


def told_of(state: State, entries: Mapping[Part, Mapping[str, Any]]) -> State:
    """The state with the manifest's entries."""
    return replace(state, kv_values=entries.get(VALUES), kv_keys=entries.get(KEYS))


def some_of(windows: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """The windows that are measured: evenly taken, so that every kind is among them."""
    return windows[:: max(1, min(SHARE, len(windows) // LEAST))]


# ---- measuring ----
def measure(
    state: State,
    image: Path,
    host: Host,
    windows: Sequence[Sequence[int]],
    reporter: Reporter,
) -> Measured:
    """What 4 bits would change, over as many windows as there is time for."""
    parts = parts_of(state)
    reporter.start(f"measuring {names(parts)} of 4 bits", sum(map(len, windows)))
    config = _config(host)
    minutes = state.options.kv_minutes
    until = None if minutes is None else time.monotonic() + 60 * minutes
    layers = state.layers
    gram = np.ascontiguousarray(grams(state.model))
    added, changed = np.zeros(len(layers)), {part: _zeros(state) for part in parts}
    flags = sum(int(part.flag) for part in parts)
    done = tokens = 0
    with (
        GemRunContext(image, **config) as context,
        NarrowProbe(context, gram, EVERY, flags) as probe,
    ):
        for ids in windows:
            if until is not None and done and time.monotonic() > until:
                break
            context.reset_kv_cache()
            context.prefill(list(ids))
            figures = probe.figures()[: len(ids) // EVERY].astype(np.float64).sum(0)
            for index, layer in enumerate(layers):
                mine = figures[index, : layer.heads]
                added[index] += mine[:, 0].sum()
                for part, sums in changed.items():
                    by_head = mine[:, part.figure].reshape(layer.kv_heads, -1)
                    sums[index, : layer.kv_heads] += by_head.sum(1)
            done, tokens = done + 1, tokens + len(ids)
            reporter.advance(len(ids))
    return Measured(added, changed, done, tokens)


def _config(host: Host) -> Config:
    config: Config = {
        "threads": min(host.threads, spec.MAX_THREADS),
        "ignore_memory": True,
        "allow_foreign_board": True,
    }
    if host.baseline:
        config["kernel"] = "scalar"
    return config


def _kv_heads(state: State) -> list[int]:
    return [layer.kv_heads for layer in state.layers]


# ---- choosing ----
def steps_of(state: State, shares: Mapping[Part, F64]) -> list[Step]:
    """A step for all that may have 4 bits of every head, the cheapest a saved byte first."""
    layers, units = assemble.place_units(state.conf, state.layers, state.keeps)
    found = []
    for index, layer in enumerate(layers):
        if layer.head_dim % 16:
            continue
        own = sizes.units_of(layer, units)
        kv_type, dim, group = state.conf.kv_type, layer.head_dim, layer.kv_group
        each = sizes.kv_block_size(kv_type, dim, group) - sizes.kv_block_size(
            kv_type, dim, group, value4=True
        )
        for head in range(layer.kv_heads):
            blocks = own[head].blocks if own else layer.kv_blocks
            found += [
                Step(part, (index, head), blocks * each, float(cost[index, head]))
                for part, cost in shares.items()
            ]
    return sorted(found, key=lambda step: (step.cost / step.saved, step.unit, step.part.name))


def orders_of(steps: Sequence[Step]) -> list[list[Step]]:
    """What is judged, until something passes: all steps in one order, then those of values, then
    those of keys. Steps that are cheap where they are taken, of an early layer say, can cost more
    at the end than the gates allow, and stand before others that pass."""
    parts = [part for part in PARTS if any(step.part is part for step in steps)]
    alone = [[step for step in steps if step.part is part] for part in parts]
    return [list(steps), *(alone if len(alone) > 1 else [])]


def no_shares(state: State) -> dict[Part, F64]:
    """Shares before anything is measured."""
    return {part: _zeros(state) for part in parts_of(state)}


def _zeros(state: State) -> F64:
    return np.zeros((len(state.layers), max(_kv_heads(state))))


def narrowed(state: State, steps: Sequence[Step]) -> Narrowed:
    """What the heads keep, after these steps."""
    narrow = {(step.part, step.unit) for step in steps}
    keeps = iter(state.keeps or [assemble.EVERYTHING] * sum(_kv_heads(state)))
    rows = [tuple(Budget(*next(keeps)) for _ in range(heads)) for heads in _kv_heads(state)]
    flags = [
        tuple(
            sum(int(part.flag) for part in PARTS if (part, (index, head)) in narrow)
            for head in range(heads)
        )
        for index, heads in enumerate(_kv_heads(state))
    ]
    return Narrowed(tuple(rows), tuple(flags))


def choose(
    state: State,
    image: Path,
    host: Host,
    found: Measured,
    held_out: Sequence[Passage],
    reporter: Reporter,
) -> tuple[Point, Sequence[Step], list[Point]]:
    """The most steps that pass the gates; these steps; and all points that were looked at in their
    order, in the first where none pass."""
    none = Point(0, 0.0, Quality(0.0, 1.0, 0.0, 0))
    first: list[Point] = []
    for steps in orders_of(steps_of(state, found.shares())):
        judged = judge(state, image, host, steps, held_out, reporter)
        first = first or judged
        passed = [p for p in judged if holds(state.options.kv_gate, p.quality)]
        if passed:
            best = max(passed, key=lambda p: p.steps)
            return best, steps[: best.steps], [none, *judged]
    return none, (), [none, *first]


def judge(
    state: State,
    image: Path,
    host: Host,
    steps: Sequence[Step],
    held_out: Sequence[Passage],
    reporter: Reporter,
) -> list[Point]:
    """The templates that the search for the most steps has looked at."""
    if not held_out:
        return []
    layers, _ = assemble.place_units(state.conf, state.layers, state.keeps)
    total = sum(layer.kv_size for layer in layers)
    tokens = sum(len(text.ids) for text in held_out)
    parts = [part for part in PARTS if any(step.part is part for step in steps)]
    reporter.start(f"judging {names(parts)} of 4 bits", tokens * rounds(len(steps)))
    threads = min(host.threads, spec.MAX_THREADS)
    blocks = [layer.kv_blocks for layer in state.layers]

    def look(count: int) -> Point:
        some = steps[:count]
        quality = judging.judge(narrowed(state, some), held_out, 0, reporter.advance)
        return Point(count, sum(step.saved for step in some) / total, quality)

    with NarrowJudge(image, threads, host.baseline, blocks) as judging:
        return search(len(steps), look, state.options.kv_gate)


# ---- what is written about it ----
def names(parts: Sequence[Part]) -> str:
    """As text: "values", "keys", "values and keys"."""
    return " and ".join(part.name for part in parts)


def entry(
    state: State,
    part: Part,
    found: Measured,
    taken: Sequence[Step],
    best: Point,
    curve: Sequence[Point],
) -> dict[str, Any]:
    """The manifest's kv_values or kv_keys. `wide`: heads in which these keep 8 bits; what is saved,
    quality and curve are of values and keys together."""
    shares = found.shares()
    narrow = {step.unit for step in taken if step.part is part}
    units = [(i, head) for i, heads in enumerate(_kv_heads(state)) for head in range(heads)]
    return {
        "units": len(units),
        part.count: len(narrow),
        "wide": [list(unit) for unit in units if unit not in narrow],
        "windows": found.windows,
        "tokens": found.tokens,
        "gate": asdict(state.options.kv_gate),
        "saved": round(best.saved, DIGITS),
        "quality": quality_of(best),
        "curve": [
            [p.steps, round(p.saved, DIGITS), *quality_of(p).values()]
            for p in sorted(curve, key=lambda p: p.steps)
        ],
        "changed": [
            [float(f"{share:.3g}") for share in row[:heads]]
            for row, heads in zip(shares[part].tolist(), _kv_heads(state), strict=True)
        ],
    }


def nothing(state: State, part: Part) -> dict[str, Any]:
    """kv_values or kv_keys where nothing was measured: all keep 8 bits."""
    return {"units": sum(_kv_heads(state)), part.count: 0}


def _why_nothing(state: State) -> str:
    parts = parts_of(state)
    options, kept = " ".join(part.option for part in parts), f"all {names(parts)} keep 8 bits"
    if state.options.context < LEAST_CONTEXT:
        return (
            f"{options}: a context of {state.options.context} tokens holds no text to "
            f"measure on, it begins at {LEAST_CONTEXT}; {kept}"
        )
    return f"{options}: needs heads of a multiple of 16 values; {kept}"


def wide_text(wide: Sequence[Sequence[int]]) -> str:
    """Heads by layer: "layer 0: 1 2; layer 7: 0"."""
    rows = groupby(wide, key=lambda unit: unit[0])
    return "; ".join(f"layer {i}: {' '.join(str(h) for _, h in units)}" for i, units in rows)


def log_lines(state: State) -> Iterator[str]:
    """Lines of --verbose, once it is decided."""
    entries = entries_of(state)
    first = next(iter(entries.values()), {})
    if "windows" not in first:
        return
    yield (
        f"{names(list(entries)).capitalize()} of 4 bits measured on {first['windows']} windows, "
        f"{first['tokens']} tokens; judged on {first['quality']['tokens']} held-out tokens"
    )
    for steps, saved, *figures in first["curve"]:
        said, what = words(Quality(*figures)), "heads" if len(entries) == 1 else "steps"
        yield f"  {steps:>5} {what}: {saved:6.1%} of the cache's bytes saved, {said}"


def entries_of(state: State) -> dict[Part, Mapping[str, Any]]:
    """What the manifest says, of the parts that were asked for."""
    found = {VALUES: state.kv_values, KEYS: state.kv_keys}
    return {part: entry for part, entry in found.items() if entry is not None}


def kv_lines(state: State) -> list[str]:
    """The closing lines: what 4 bits save and cost, and which heads keep 8 bits."""
    entries, lines = entries_of(state), []
    narrow = {part: told for part, told in entries.items() if told[part.count]}
    for part, told in entries.items():
        why = "no head passes the gates" if "windows" in told else "nothing was measured"
        if part not in narrow:
            lines += [f"KV cache, {part.name} of 4 bits: {why}; all {part.name} keep 8 bits"]
    if not narrow:
        return lines
    placed = (
        assemble.place_units(state.conf, state.layers, state.keeps, *flags)
        for flags in ((), (state.value4, state.key4))
    )
    before, after = (sum(layer.kv_size for layer in layers) for layers, _ in placed)
    where = ", ".join(
        f"{part.name} of 4 bits in {told[part.count]} of {told['units']} KV heads"
        for part, told in narrow.items()
    )
    quality = next(iter(narrow.values()))["quality"]
    lines += [
        f"KV cache, {where}: {mib(after)}, {after / before - 1:+.1%}; on held-out text, "
        f"against the same weights with all of it in 8 bits: {words(Quality(**quality))}"
    ]
    lines += [
        f"  {part.name} that keep 8 bits: {wide_text(told['wide'])}"
        for part, told in narrow.items()
        if told["wide"]
    ]
    return lines
