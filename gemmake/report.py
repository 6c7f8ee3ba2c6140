"""What a compile tells the user: the log of --verbose, and the closing lines."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from gemmake import predictions
from gemmake.figures import mib
from gemmake.hdf import Hdf, show
from gemmake.kvmask import values
from gemmake.kvmask.report import kv_lines, mask_lines
from gemmake.passes import layout, place
from gemmake.pinning import lines_of as pin_lines
from gemmake.planning import offload_lines
from gemmake.state import State
from gemrun.format import spec

if TYPE_CHECKING:
    from gemmake.emit import Tally
    from gemmake.passes.budget import Memory
    from gemmake.pipeline import CompileResult

MB = 1_000_000  # of the last line alone, whose words are fixed
LEAST_SECONDS = 0.05  # shorter phases are not listed


def log_lines(state: State) -> Iterator[str]:
    """Lines of --verbose before the weights: placement, sparsity, notes."""
    yield from place.placement_lines(
        state.model.spec,
        state.placements,
        place.accelerators(state.hdf),
        state.hdf.board,
        layout.weight_bytes(state.stream, len(state.layers)),
    )
    if not state.options.sparse:
        yield from mask_lines(state)
    if groups := {layer.kv_group for layer in state.layers if layer.kv_group}:
        how = "measured" if state.kv_groups else "usual"
        counts = [
            f"{g} in {sum(la.kv_group == g for la in state.layers)} layers" for g in sorted(groups)
        ]
        yield f"KV cache in int8, {how} groups of {', '.join(counts)}"
    offered = place.accelerators(state.hdf)
    yield from place.op_lines(state.model.spec, state.placements, offered)
    yield from predictions.log_lines(state)


def render_result(result: CompileResult) -> str:
    """The closing lines of gemmake: what was done, memory table, figures, the next command."""
    memory = result.memory
    lines = list(_formats(result.state, result.tallies))
    lines.append("memory of a run:")
    lines += [f"  {name:<14}{mib(size):>14}" for name, size in memory.rows()]
    lines.append(f"  {'total':<14}{mib(memory.total):>14}, {memory.total} bytes")
    lines += group_lines(result.state.hdf, memory)
    lines += offload_lines(result.state)
    lines += [*kv_lines(result.state), *values.kv_lines(result.state), *pin_lines(result.state)]
    lines += predictions.report_lines(result.state)
    lines += [f"note: {note}" for note in result.state.notes]
    lines.append(f"time: {_phases(result.phases)}")
    lines.append(
        f"{show(result.path.name)}: {mib(result.size)} in {result.seconds:.1f} s "
        f"({result.cpu_seconds:.1f} s of CPU), peak memory of the compile "
        f"{mib(result.peak_rss, 0)}, root {result.root_sha256[:16]}"
    )
    lines.append(
        "SUCCESS: Deterministic memory layout verified. "
        f"Total footprint: {math.ceil(memory.total / MB)}MB"
    )
    lines.append(f"Next: gemcheck {shlex.quote(show(result.path))}")
    return "\n".join(lines)


def group_lines(hdf: Hdf, memory: Memory) -> Iterator[str]:
    """What a control group has to allow; of firmware what lies where."""
    if hdf.bare:
        yield (
            f"firmware: {memory.ram} bytes of RAM, and the artifact's {memory.flash} bytes of flash"
        )
        return
    yield f"  {'the process':<14}{mib(memory.process):>14}, beside the total: program, libraries"
    yield (
        f"limit for a control group: {memory.group_limit} bytes (memory.max; MemoryMax= of a unit)"
    )


def _formats(state: State, tallies: Mapping[str, Tally]) -> Iterator[str]:
    """How many tensors are stored in which format, and what it cost."""
    for fmt in spec.Format:
        found = [t for t in state.stream.tensors if t.format is fmt]
        if not found:
            continue
        counts = [tallies[t.label] for t in found]
        power = sum(c.power for c in counts)
        size = sum(t.record.size + t.record.second_size for t in found)
        line = f"weights: {len(found)} tensors in {fmt.name.lower()}, {mib(size)}"
        if power:
            zero = sum(c.zero_groups for c in counts)
            error = sum(c.error for c in counts) / power
            line += f", relative squared error {error:.2e}, {zero} groups of zeros"
        yield line


def _phases(seconds: Mapping[str, float]) -> str:
    listed = [f"{name} {spent:.1f} s" for name, spent in seconds.items() if spent >= LEAST_SECONDS]
    return ", ".join(listed) + " (read, search, pack and write overlap)"
