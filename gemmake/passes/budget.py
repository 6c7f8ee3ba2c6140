"""budget: what the compiled model takes, against what the target grants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmake.errors import BudgetError

MIB = 1 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes that a run of the artifact takes (DESIGN 2.4)."""

    weights: int
    tables: int
    arena: int
    kv: int
    engine: int
    stacks: int

    @property
    def total(self) -> int:
        """Their sum: the peak of a run."""
        return self.weights + self.tables + self.arena + self.kv + self.engine + self.stacks

    def rows(self) -> tuple[tuple[str, int], ...]:
        """What takes what, in the order of the table."""
        return (
            ("weights", self.weights),
            ("tables", self.tables),
            ("arena", self.arena),
            ("KV cache", self.kv),
            ("engine", self.engine),
            ("thread stacks", self.stacks),
        )


@dataclass(frozen=True)
class Remedy:
    """An option that would lower the total, and the total it would lead to (bytes)."""

    option: str
    total: int


def check_budget(memory: Memory, granted: int, target: str, remedies: Sequence[Remedy]) -> None:
    """Refuse a total above what the target grants (bytes).

    Raises BudgetError with the table and the options that would fit.
    """
    if memory.total <= granted:
        return
    fitting = [r for r in remedies if r.total <= granted]
    lines = [
        f"{target}: needs {_mib(memory.total)} but the target grants {_mib(granted)}; "
        + ("use " + fitting[0].option if fitting else "no option makes it fit, use a smaller model")
    ]
    lines += [f"  {name:<14}{_mib(size):>12}" for name, size in memory.rows()]
    lines += [f"  {'total':<14}{_mib(memory.total):>12}"]
    lines += [f"  {_mib(r.total)} with {r.option}: fits" for r in fitting]
    raise BudgetError("\n".join(lines))


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"
