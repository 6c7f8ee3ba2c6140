"""How far long work is and what time is left: a line that renews itself, or lines in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

QUIET_S = 2.0  # progress is shown for what takes longer
EVERY_S = {True: 0.5, False: 10.0}  # how often, by whether it is a terminal


class Progress:
    """Time left of the current phase, in plain text on a stream; None: nobody to tell.

    What cannot be shown is left out: it stops no work.
    """

    def __init__(
        self, stream: TextIO | None, clock: Callable[[], float] = time.monotonic, tool: str = ""
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._head = f"{tool}: " if tool else ""
        self._terminal = stream is not None and stream.isatty()
        self._phase = ""
        self._start = self._last = clock()
        self._shown = self._start
        self._width = 0

    def begin(self, phase: str) -> None:
        """A phase begins now. Without this it began at the last update."""
        self._phase, self._start = phase, self._clock()
        self._last = self._start

    def update(self, phase: str, done: int, total: int, text: str = "") -> None:
        """`done` of `total` equal units of a phase; `text` stands for "PHASE: DONE of TOTAL"."""
        now = self._clock()
        if phase != self._phase:
            self._phase, self._start = phase, self._last
        self._last = now
        elapsed = now - self._start
        left = elapsed / max(done, 1) * (total - done)
        due = now - self._shown >= EVERY_S[self._terminal]
        if done >= total or elapsed + left < QUIET_S or not due:
            return
        self._shown = now
        text = f"{self._head}{text or f'{phase}: {done} of {total}'}, about {span(left)} left"
        if self._terminal:
            self._write(f"\r{text:<{self._width}}")
            self._width = max(self._width, len(text))
        else:
            self._write(f"{text}\n")

    def clear(self) -> None:
        """Take the line off the terminal, so that another can stand there."""
        if self._terminal and self._width:
            self._write(f"\r{' ' * self._width}\r")
            self._width = 0

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._stream = None


def span(seconds: float) -> str:
    """A time for people: seconds below two minutes, minutes above."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
