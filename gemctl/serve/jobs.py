"""What somebody asked for and takes its time: a staging, a replacement, a load.

A job goes on as long as who asked listens. Who goes away, or says `cancel`, ends it, up to the
point of no return (`settle`): from there on it runs to its end, whoever listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gemctl.errors import ApiError

ENDS = "gemctld stops"
GONE = "who asked for it is gone"
R = TypeVar("R")


def stopped() -> ApiError:
    """What a request is told that the daemon's end cuts short."""
    return ApiError("cancelled", f"{ENDS}; send the request again when it runs")


@dataclass(eq=False)
class Job:
    """One of a model. `what`: "staging"; `descriptor`: the candidate's file, closed at the end."""

    model: str
    what: str
    settled: bool = False  # past the point of no return
    descriptor: int = -1
    clock: Callable[[], float] = time.monotonic
    number: str = field(default_factory=lambda: secrets.token_hex(8))
    step: str = ""  # what is done now
    stop: threading.Event = field(default_factory=threading.Event)  # for what works in a thread
    task: asyncio.Task[Any] | None = None
    _why: str = ""  # it ends early
    _bytes: tuple[int, int] = (0, 0)  # done, in all; of the step

    def __post_init__(self) -> None:
        self.since = self.clock()

    def begin(self, step: str) -> None:
        """The next step begins."""
        self.step, self._bytes = step, (0, 0)

    def progress(self, done: int, total: int) -> None:
        """So many bytes of the step are done; called from a thread."""
        self._bytes = (done, total)

    def settle(self) -> None:
        """From here on only the daemon's end cuts it short."""
        if self._why:
            raise asyncio.CancelledError
        self.settled = True

    def cancel(self, why: str = "") -> bool:
        """End it, where that is still possible. It cleans up behind itself; `task` ends then."""
        if self.settled:
            return False
        self.cut(why)
        return True

    def cut(self, why: str = "") -> None:
        """End it wherever it is. Only once: a second time would disturb the cleaning up."""
        if not self.stop.is_set() and self.task is not None:
            self._why = why or "as somebody asked"
            self.stop.set()
            self.task.cancel()

    async def carry_out(self, work: Coroutine[Any, Any, R]) -> R:
        """The work's result. Raises ApiError("cancelled") where it was ended early."""
        try:
            return await work
        except asyncio.CancelledError:
            raise self.refusal() from None

    def refusal(self) -> ApiError:
        """What is told of a job that was ended early."""
        why = f", {self._why}" if self._why else ""
        what = f"{self.model}: the {self.what} was cancelled{why}"
        return ApiError("cancelled", f"{what}; start it again")

    def too_late(self) -> ApiError:
        """What is told where it cannot be ended any more."""
        what = f"{self.model}: the {self.what} is past the point where it can be cancelled"
        remedy = f"wait for its end, see gemctl model status {self.model}"
        return ApiError("conflict", f"{what}; {remedy}")

    def close(self) -> None:
        """Give the candidate's file back."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
            self.descriptor = -1

    def as_dict(self) -> dict[str, Any]:
        """As `model.status` shows it."""
        done, total = self._bytes
        return {
            "id": self.number,
            "what": self.what,
            "step": self.step,
            "seconds": round(self.clock() - self.since, 1),
            "bytes_done": done,
            "bytes": total,
            "can_cancel": not self.settled and not self.stop.is_set(),
        }


def reason_of(error: BaseException) -> str:
    """Why something failed, for an event."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    if isinstance(error, ApiError):
        return error.message
    return str(error) or type(error).__name__
