"""Groups of the int8 KV cache, chosen layer by layer by measured error (NUMERICS K1).

A layer runs over one window of the calibration text with float weights: once with a float cache,
once for each group that its heads allow. The largest group is taken whose cache changes what the
layer adds to the residual stream by less than LIMIT (a share of its squared size); where none does,
the one that changes it least.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from gemmake import images
from gemmake.calibration import CHUNK, begin, in_float
from gemmake.emit import Host
from gemmake.engine import Engine
from gemmake.model import FloatRows
from gemmake.options import CompileOptions, KvType
from gemmake.passes import layout, quant
from gemmake.progress import Reporter
from gemmake.state import State
from gemrun.format import spec

LIMIT = 1e-4  # hundred times below what 4-bit weights do to a layer's output


def choose(state: State, host: Host, reporter: Reporter) -> tuple[int, ...]:
    """The group of every layer. Needs the calibration text and the tokenizer's tables."""
    reporter.start("choosing groups of the KV cache", len(state.model.spec.layers))
    with tempfile.TemporaryDirectory(prefix="gemmake-") as name, host.clock.timed("kv groups"):
        folder = Path(name)
        hidden, window = begin(state, host, folder)
        x = hidden[:window].copy()
        chosen = []
        for layer in range(len(state.model.spec.layers)):
            after, errors = _measure(state, host, folder, layer, x)
            chosen.append(pick(errors))
            x = after
            reporter.advance()
    return tuple(chosen)


def pick(errors: Mapping[int, float]) -> int:
    """The largest group below LIMIT, else the one with the least error (ties: the largest)."""
    below = [group for group, error in errors.items() if error < LIMIT]
    return max(below) if below else min(errors, key=lambda group: (errors[group], -group))


def _measure(
    state: State, host: Host, folder: Path, layer: int, x: FloatRows
) -> tuple[FloatRows, dict[int, float]]:
    """The layer's output with a float cache, and the relative squared error of each group."""
    exact = in_float(state, len(x))
    int8 = replace(exact, kv_type=KvType.INT8)
    wanted = _run(state, host, folder, layer, exact, x, 0)
    groups = layout.kv_candidates(state.model.spec.layers[layer])
    if len(groups) == 1:
        return wanted, {groups[0]: 0.0}
    added = _squares(wanted, x)
    errors = {}
    for group in groups:
        found = _run(state, host, folder, layer, int8, x, group)
        errors[group] = _squares(found, wanted) / added if added > 0 else 0.0
    return wanted, errors


def _squares(a: FloatRows, b: FloatRows) -> float:
    """Sum of (a - b)^2 in float64, in a fixed order."""
    error, _ = quant.error_sums(a, b)
    total = 0.0
    for value in error:
        total += float(value)
    return total


def _run(
    state: State,
    host: Host,
    folder: Path,
    layer: int,
    options: CompileOptions,
    x: FloatRows,
    group: int,
) -> FloatRows:
    """The layer's output for hidden states x, which stay as they are."""
    small = images.one_layer(state, layer, options, group)
    out = np.array(x)
    threads = min(host.threads, spec.MAX_THREADS)
    with (
        images.written(small, folder, host) as path,
        Engine(path, threads, host.baseline) as engine,
    ):
        engine.run_hidden(out, CHUNK, None)
    return out
