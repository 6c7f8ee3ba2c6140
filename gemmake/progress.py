"""Progress on the terminal: a bar with time left, quiet when nobody watches."""

from __future__ import annotations

import sys
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

    def rename(self, phase: str) -> None:
        """The current phase goes on under another name; its units and time left stay."""

    def info(self, sentence: str) -> None:
        """One line for --verbose."""


class Silent:
    """A reporter that keeps quiet: library use and tests."""

    def start(self, phase: str, total: int) -> None:
        """Nothing to show."""

    def advance(self, amount: int = 1) -> None:
        """Nothing to show."""

    def rename(self, phase: str) -> None:
        """Nothing to show."""

    def info(self, sentence: str) -> None:
        """Nothing to show."""


class Terminal:
    """A bar on stderr with the phase, the share done and the time left; INFO lines on stdout."""

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

    def rename(self, phase: str) -> None:
        """Change the text beside the bar."""
        if self._task is not None:
            self._progress.update(self._task, description=phase)

    def info(self, sentence: str) -> None:
        """Print the line when --verbose was given."""
        if self._verbose:
            self._line(f"INFO: {sentence}")

    def _line(self, text: str) -> None:
        """Print to stdout; above the bar where both are the same terminal."""
        console = self._progress.console
        if console.is_terminal and sys.stdout.isatty():
            console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)


@contextmanager
def terminal(verbose: bool) -> Iterator[Terminal]:
    """A Terminal for the length of a compile; the bar vanishes at the end.

    Without a terminal on stderr there is no bar.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, soft_wrap=True)
    with Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    ) as progress:
        yield Terminal(progress, verbose)
