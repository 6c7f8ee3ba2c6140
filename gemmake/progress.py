"""Progress of a command: a bar with time left on a terminal, lines now and then in a log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich import progress as rich
from rich.console import Console

from gemrun.plain import plain
from gemrun.progress import Progress


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

    def __init__(self, progress: rich.Progress, verbose: bool) -> None:
        self._progress = progress
        self._verbose = verbose
        self._task: rich.TaskID | None = None

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
        """Print the line when --verbose was given; above the bar where both are one terminal."""
        if self._verbose and sys.stdout is not None and sys.stdout.isatty():
            line = f"INFO: {plain(sentence)}"
            self._progress.console.print(line, markup=False, highlight=False)
        elif self._verbose:
            print(f"INFO: {plain(sentence)}", flush=True)


class Log:
    """The same for a stderr that is no terminal: a line now and then, with the time left."""

    def __init__(self, progress: Progress, verbose: bool) -> None:
        self._progress = progress
        self._verbose = verbose
        self._phase = self._shown = ""
        self._done = self._total = 0

    def start(self, phase: str, total: int) -> None:
        """The clock of the next phase starts."""
        self._phase = self._shown = phase
        self._done, self._total = 0, max(total, 1)
        self._progress.begin(phase)

    def advance(self, amount: int = 1) -> None:
        """Write a line if one is due."""
        self._done += amount
        text = f"{self._shown}: {100 * self._done // self._total} %"
        self._progress.update(self._phase, self._done, self._total, text)

    def rename(self, phase: str) -> None:
        """Change the text; the clock goes on."""
        self._shown = phase

    def info(self, sentence: str) -> None:
        """Print the line when --verbose was given."""
        if self._verbose:
            print(f"INFO: {plain(sentence)}", flush=True)


@contextmanager
def shown(tool: str, verbose: bool = False) -> Iterator[Reporter]:
    """A reporter for the length of a command: a bar that vanishes at the end, or lines of a log."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield Log(Progress(sys.stderr, tool=tool), verbose)
        return
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TextColumn("{task.percentage:>3.0f} %"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(
        *columns,
        console=Console(stderr=True, soft_wrap=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        yield Terminal(progress, verbose)
