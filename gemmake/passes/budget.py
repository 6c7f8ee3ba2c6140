"""budget: what the compiled model takes, against what the target grants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmake.errors import BudgetError
from gemmake.figures import mib
from gemrun.format import sizes


@dataclass(frozen=True)
class Memory:
    """Bytes that a run of the artifact takes (DESIGN 2.4)."""

    weights: int  # of them those that stay in memory, and the room that the others pass through
    tables: int
    arena: int
    kv: int
    engine: int
    stacks: int
    in_flash: bool = False  # firmware: weights and tables are used where they lie

    @property
    def flash(self) -> int:
        """What stays in flash."""
        return self.weights + self.tables if self.in_flash else 0

    @property
    def ram(self) -> int:
        """What a budget of memory has to hold."""
        return self.total - self.flash

    @property
    def total(self) -> int:
        """Their sum: the peak of a run."""
        return self.weights + self.tables + self.arena + self.kv + self.engine + self.stacks

    @property
    def process(self) -> int:
        """What the process itself takes beside the total, where a system runs it."""
        return sizes.process_size(self.total)

    @property
    def group_limit(self) -> int:
        """The limit of a control group that the artifact opens in."""
        return sizes.group_limit(self.total)

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
    """Options that would make it fit, the total that they would lead to (bytes), the whole
    command with them, the context that it has (tokens), whether layers are then read from
    storage for every token, and what the target then grants, where the options change that."""

    option: str
    total: int
    command: str = ""
    context: int = 0
    streams: bool = False
    grants: int = 0

    def over(self, granted: int) -> int:
        """Bytes above what is granted; 0 and less: it fits."""
        return self.total - (self.grants or granted)


def check_budget(
    memory: Memory, granted: int, target: str, remedies: Sequence[Remedy], own: str = ""
) -> None:
    """Refuse RAM above what the target grants (bytes). `own`: the options by which the caller
    chose what that is.

    Raises BudgetError with the table of what takes what, what every option would lead to, and the
    command of the first that fits.
    """
    if memory.ram <= granted:
        return
    fitting = [r for r in remedies if r.over(granted) <= 0]
    chosen = f" with {own}" if own else ""
    lines = [
        f"{target}: needs {mib(memory.ram, 1)} but the target grants {mib(granted, 1)}{chosen}; "
        + ("use " + fitting[0].option if fitting else "no option makes it fit, use a smaller model")
    ]
    rows = memory.rows()[2:] if memory.in_flash else memory.rows()
    lines += [_row(name, size, memory.ram) for name, size in rows]
    lines += [_row("total", memory.ram, memory.ram)]
    lines += [_proposal(r, granted) for r in sorted(remedies, key=lambda r: r.over(granted) > 0)]
    lines += [f"  {fitting[0].command}"] if fitting and fitting[0].command else []
    raise BudgetError("\n".join(lines))


def _row(name: str, size: int, total: int) -> str:
    return f"  {name:<14}{mib(size, 1):>12}{size / total:>6.0%}"


def _proposal(remedy: Remedy, granted: int) -> str:
    over = remedy.over(granted)
    verdict = "fits" if over <= 0 else f"{mib(over, 1)} too much"
    return f"  {mib(remedy.total, 1)} with {remedy.option}: {verdict}"
