"""Values of 4 bits: which KV heads of an int8 cache may have them, found by measurement.

    what 4 bits change in every head's output, over calibration windows -> heads, the cheapest first
    -> as many as pass the gates, against the cache in which all values have 8 bits

Both are measured with the engine on the finished weights; heads that are judged hold the very bits
that they will hold on the board. With a sparse cache heads keep what its template says, and the
gates are for both together: values have what the template left. Where no head passes, the artifact
is the ordinary one, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from gemmake.emit import Host
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
from gemrun.hooks import ValueProbe

SHARE = 10  # one window in so many is measured: rounding has no rare cases that need more
LEAST = 8  # windows
MB = 1_000_000


@dataclass(frozen=True)
class Narrowed(Template):
    """A template in which the values of some heads have 4 bits: [layers][kv heads]."""

    value4: tuple[tuple[bool, ...], ...] = ()


@dataclass(frozen=True)
class Step:
    """The values of a head go from 8 bits to 4."""

    unit: Unit
    saved: int  # bytes
    cost: float  # share of what the layer's attention adds that it changes, squared


@dataclass(frozen=True)
class Measured:
    """Sums over the looked-at tokens."""

    added: F64  # [layers] squares of what heads add to the residual stream
    changed: F64  # [layers, kv heads] squares of what 4 bits change in it
    windows: int
    tokens: int

    def shares(self) -> F64:
        """[layers, kv heads]: changed, as a share of what the layer's attention adds."""
        added = np.where(self.added > 0, self.added, 1.0)
        shares: F64 = self.changed / added[:, None]
        return shares


class ValueJudge(Judge):
    """Judges templates with values of 4 bits, too."""

    def _records(self, template: Template) -> list[tuple[int, ...]]:
        records = super()._records(template)
        if not isinstance(template, Narrowed):
            return records
        flags = [int(narrow) for row in template.value4 for narrow in row]
        return [(*record, flag) for record, flag in zip(records, flags, strict=True)]


def decide(state: State, image: Path, host: Host, reporter: Reporter) -> State:
    """The state with the bits of every KV head's values. `image` is the artifact of it in which all
    heads keep everything in 8 bits."""
    if state.options.context < LEAST_CONTEXT or not steps_of(state, no_shares(state)):
        return replace(state, kv_values=nothing(state), notes=(*state.notes, _why_nothing(state)))
    windows, held_out = texts_of(state, image)
    with host.clock.timed("kv values"):
        found = measure(state, image, host, some_of(windows), reporter)
        steps = steps_of(state, found.shares())
        judged = judge(state, image, host, steps, held_out, reporter)
    passed = [p for p in judged if holds(state.options.kv_gate, p.quality)]
    none = Point(0, 0.0, Quality(0.0, 1.0, 0.0, 0))
    best = max(passed, key=lambda p: p.steps, default=none)
    value4 = narrowed(state, steps[: best.steps]).value4
    return replace(
        state,
        value4=tuple(narrow for row in value4 for narrow in row) if best.steps else (),
        kv_values=entry(state, found, best, [none, *judged]),
    )


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
    reporter.start("measuring values of 4 bits", sum(map(len, windows)))
    config = _config(host)
    minutes = state.options.kv_minutes
    until = None if minutes is None else time.monotonic() + 60 * minutes
    layers = state.layers
    gram = np.ascontiguousarray(grams(state.model))
    added, changed = np.zeros(len(layers)), np.zeros((len(layers), max(_kv_heads(state))))
    done = tokens = 0
    with (
        GemRunContext(image, **config) as context,
        ValueProbe(context, gram, EVERY) as probe,
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
                changed[index, : layer.kv_heads] += mine[:, 1].reshape(layer.kv_heads, -1).sum(1)
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
def steps_of(state: State, shares: F64) -> list[Step]:
    """A step for every head that may hold values of 4 bits, the cheapest a saved byte first."""
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
            found.append(Step((index, head), blocks * each, float(shares[index, head])))
    return sorted(found, key=lambda step: (step.cost / step.saved, step.unit))


def no_shares(state: State) -> F64:
    """Shares before anything is measured."""
    return np.zeros((len(state.layers), max(_kv_heads(state))))


def narrowed(state: State, steps: Sequence[Step]) -> Narrowed:
    """What the heads keep, after these steps."""
    units = {step.unit for step in steps}
    keeps = iter(state.keeps or [assemble.EVERYTHING] * sum(_kv_heads(state)))
    rows = [tuple(Budget(*next(keeps)) for _ in range(heads)) for heads in _kv_heads(state)]
    value4 = [
        tuple((index, head) in units for head in range(heads))
        for index, heads in enumerate(_kv_heads(state))
    ]
    return Narrowed(tuple(rows), tuple(value4))


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
    reporter.start("judging values of 4 bits", tokens * rounds(len(steps)))
    threads = min(host.threads, spec.MAX_THREADS)
    blocks = [layer.kv_blocks for layer in state.layers]

    def look(count: int) -> Point:
        some = steps[:count]
        quality = judging.judge(narrowed(state, some), held_out, 0, reporter.advance)
        return Point(count, sum(step.saved for step in some) / total, quality)

    with ValueJudge(image, threads, host.baseline, blocks) as judging:
        return search(len(steps), look, state.options.kv_gate)


# ---- what is written about it ----
def entry(state: State, found: Measured, best: Point, curve: Sequence[Point]) -> dict[str, Any]:
    """The manifest's kv_values. `wide`: heads whose values keep 8 bits."""
    shares = found.shares()
    steps = steps_of(state, shares)
    narrow = {step.unit for step in steps[: best.steps]}
    units = [(i, head) for i, heads in enumerate(_kv_heads(state)) for head in range(heads)]
    return {
        "units": len(units),
        "value4": best.steps,
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
            for row, heads in zip(shares.tolist(), _kv_heads(state), strict=True)
        ],
    }


def nothing(state: State) -> dict[str, Any]:
    """kv_values where nothing was measured: all values keep 8 bits."""
    return {"units": sum(_kv_heads(state)), "value4": 0}


def _why_nothing(state: State) -> str:
    if state.options.context < LEAST_CONTEXT:
        return (
            f"--kv-values int4: a context of {state.options.context} tokens holds no text to "
            f"measure on, it begins at {LEAST_CONTEXT}; all values keep 8 bits"
        )
    return "--kv-values int4: needs heads of a multiple of 16 values; all values keep 8 bits"


def wide_text(wide: Sequence[Sequence[int]]) -> str:
    """Heads by layer: "layer 0: 1 2; layer 7: 0"."""
    rows = groupby(wide, key=lambda unit: unit[0])
    return "; ".join(f"layer {i}: {' '.join(str(h) for _, h in units)}" for i, units in rows)


def log_lines(state: State) -> Iterator[str]:
    """Lines of --verbose, once it is decided."""
    values = state.kv_values
    if values is None or "windows" not in values:
        return
    yield (
        f"Values of 4 bits measured on {values['windows']} windows, {values['tokens']} tokens; "
        f"judged on {values['quality']['tokens']} held-out tokens"
    )
    for steps, saved, *figures in values["curve"]:
        said = words(Quality(*figures))
        yield f"  {steps:>5} heads: {saved:6.1%} of the cache's bytes saved, {said}"


def kv_lines(state: State) -> list[str]:
    """The closing lines: what values of 4 bits save and cost, and which heads keep 8 bits."""
    values = state.kv_values
    if values is None:
        return []
    if not values["value4"]:
        why = "no head passes the gates" if "windows" in values else "nothing was measured"
        return [f"KV cache, values of 4 bits: {why}; all values keep 8 bits"]
    wide, _ = assemble.place_units(state.conf, state.layers, state.keeps)
    narrow, _ = assemble.place_units(state.conf, state.layers, state.keeps, state.value4)
    before, after = (sum(layer.kv_size for layer in layers) for layers in (wide, narrow))
    lines = [
        f"KV cache, values of 4 bits in {values['value4']} of {values['units']} KV heads: "
        f"{after / MB:.2f} MB, {after / before - 1:+.1%}; on held-out text, against the same "
        f"weights with all of it in 8 bits: {words(Quality(**values['quality']))}"
    ]
    if values["wide"]:
        lines.append(f"  values that keep 8 bits: {wide_text(values['wide'])}")
    return lines
