"""Progress on the terminal: a bar with time left, quiet when nobody watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Reporter(Protocol):
    """Where passes tell how far they are. `amount` counts work units of the named phase."""

    def start(self, phase: str, total: int) -> None:
        """A phase of `total` units begins."""

    def advance(self, amount: int = 1) -> None:
        """`amount` units of the current phase are done."""

    def info(self, sentence: str) -> None:
        """One line for --verbose."""


class Silent:
    """A reporter that keeps quiet: library use and tests."""

    def start(self, phase: str, total: int) -> None:
        """Nothing to show."""

    def advance(self, amount: int = 1) -> None:
        """Nothing to show."""

    def info(self, sentence: str) -> None:
        """Nothing to show."""


class Terminal:
    """A bar on stderr with the phase, the share done and the time left."""

    def __init__(self, progress: Progress, verbose: bool) -> None:
        self._progress = progress
        self._verbose = verbose
        self._task: TaskID | None = None

    def start(self, phase: str, total: int) -> None:
        """Replace the bar by one for the next phase."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(phase, total=max(total, 1))

    def advance(self, amount: int = 1) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.advance(self._task, amount)

    def info(self, sentence: str) -> None:
        """Print the line above the bar when --verbose was given."""
        if self._verbose:
            self._progress.console.print(f"INFO: {sentence}", markup=False, highlight=False)


@contextmanager
def terminal(verbose: bool) -> Iterator[Terminal]:
    """A Terminal for the length of a compile; the bar vanishes at the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, soft_wrap=True)
    with Progress(*columns, console=console, transient=True) as progress:
        yield Terminal(progress, verbose)
