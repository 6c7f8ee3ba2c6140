"""A procedure in phases: what each took, told to who asked and to everybody."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from gemctl.errors import ApiError
from gemctl.serve.jobs import Job
from gemctl.store.copying import Pace as CopyPace

if TYPE_CHECKING:
    from gemctl.serve.models import Models

Tell = Callable[[dict[str, Any]], Awaitable[None]]


class Procedure:
    """What every procedure of a model has. Times are of the models' clock, `phases` in ms."""

    models: Models
    tell: Tell
    job: Job
    started: float
    phases: dict[str, float]
    fresh: bool  # the version came into the store with it
    _since: float

    @property
    def name(self) -> str:
        """Of the model."""
        raise NotImplementedError

    def begin(self, step: str = "") -> None:
        """The clock of the first phase starts."""
        self.started = self._since = self.models.clock()
        self.job.begin(step)

    async def announce(self) -> None:
        """Tell who asked by which name it can be ended."""
        await self._tell({"phase": "begin", "ms": 0.0, "job": self.job.number})

    async def phase(self, name: str, then: str = "", **more: Any) -> None:
        """A phase has ended: note its time and tell. `then` follows."""
        now = self.models.clock()
        ms, self._since = (now - self._since) * 1e3, now
        self.job.begin(then)
        await self.note(name, ms, **more)

    async def note(self, name: str, ms: float, **more: Any) -> None:
        """What a phase took."""
        ms = self.phases[name] = round(ms, 3)
        self.models.hub.publish("replace.phase", model=self.name, phase=name, ms=ms, **more)
        await self._tell({"phase": name, "ms": ms, **more})

    async def _tell(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(ApiError):  # the caller may be gone: then the job is told to end
            await self.tell(event)

    def total_ms(self) -> float:
        """Since it began."""
        return round((self.models.clock() - self.started) * 1e3, 3)

    def halted(self) -> bool:
        """For what works in a thread: it is to end."""
        return self.job.stop.is_set() or self.models.stopping.is_set()

    def pace(self) -> CopyPace:
        """Of reading a candidate."""
        return CopyPace(cancelled=self.halted, progress=self.job.progress)
