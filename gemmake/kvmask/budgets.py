"""What a KV head may keep: a sink and the recent blocks, in a few sizes."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 32  # tokens of a block of the cache
SINK = 1  # blocks from the start that every partial head keeps
SIZES = (4, 8, 16, 32, 64, 128)  # blocks, the sink among them; the last two save in long contexts


@dataclass(frozen=True)
class Budget:
    """What a KV head keeps, in blocks: from the start, and up to a query's own."""

    sink: int
    recent: int

    @property
    def tokens(self) -> int:
        """Tokens that are seen at most."""
        return (self.sink + self.recent) * BLOCK


FULL = Budget(0, 0)  # everything


def budgets_for(context: int) -> tuple[Budget, ...]:
    """The budgets that save something in a context, the smallest first."""
    return tuple(
        Budget(SINK, size - SINK) for size in SIZES if size + 1 <= -(-context // BLOCK) - 1
    )
