"""The longest time in which somebody wanted a token of a model and got none, while it is replaced.

    gaps.watch()                    a replacement begins
    with gaps.request() as token:   somebody asks; token() for each token that he gets
    await gaps.settle(2.0)          let the gap over the flip end
    gaps.end()                      seconds, None where nobody asked

A gap ends at a token. It begins at the model's token before, or where somebody asked when nobody
else did: so waiting over a flip counts, reading a prompt too, and a pause in which nobody asks does
not. Between two tokens of one answer it counts also where another answer got some meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from gemctl import waiting


class Gaps:
    """Of one model. Times are seconds of `clock`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asking = 0
        self._since = 0.0  # the newest token, or where somebody asked
        self._began: float | None = None  # since when it is watched
        self._longest: float | None = None
        self._next = asyncio.Event()  # a token has come, or nobody asks any more

    def watch(self) -> None:
        """Begin anew."""
        self._began, self._longest = self._clock(), None

    @contextlib.contextmanager
    def request(self) -> Iterator[Callable[[], None]]:
        """Somebody asks; what is given has to be called at every token that he gets."""
        last: float | None = None

        def token() -> None:
            nonlocal last
            now = self._clock()
            self._note(self._since if last is None else last, now)
            self._since = last = now
            self._next.set()

        if not self._asking:
            self._since = self._clock()
        self._asking += 1
        try:
            yield token
        finally:
            self._asking -= 1
            if not self._asking:
                self._next.set()

    def _note(self, before: float, now: float) -> None:
        if self._began is not None:
            self._longest = max(self._longest or 0.0, now - max(before, self._began))

    async def settle(self, most_s: float) -> None:
        """Where somebody asks, wait for the next token, so long at most."""
        if self._asking:
            self._next.clear()
            await waiting.ended(self._next, most_s)

    def end(self) -> float | None:
        """The longest gap since `watch`, one that has not ended yet counted so far."""
        if self._asking:
            self._note(self._since, self._clock())
        self._began = None
        return self._longest
