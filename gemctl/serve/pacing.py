"""At what pace each worker runs: the throttle's, or none while a more urgent model answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from gemctl.errors import ApiError
from gemctl.serve.slot import HALTED, Model, Pace, Slot

CONFIRM_S = 0.5  # a worker confirms a pace within so long, or is not waited for
YIELD_S, YIELD_LOOK_S = 10.0, 0.05  # a less urgent model waits so long; between two looks


class Pacing:
    """Of all models. `pace` is what the throttle allows; `tell_all` makes a new one known."""

    def __init__(self, models: Mapping[str, Model], clock: Callable[[], float]) -> None:
        self.pace = Pace()
        self._models = models
        self._clock = clock
        self._yielding: asyncio.Task[None] | None = None
        self._asks: set[asyncio.Task[None]] = set()

    def _of(self, model: Model, slot: Slot) -> Pace:
        """The throttle's pace; none at all while a request of a more urgent model runs.

        After YIELD_S such a request goes on beside it: nothing waits for ever.
        """
        urgent = any(
            other.priority < model.priority and any(s.busy for s in other.slots())
            for other in self._models.values()
        )
        waited = self._clock() - slot.yielded_s if slot.yielded_s is not None else 0.0
        if not (urgent and slot.busy and waited < YIELD_S):
            slot.yielded_s = None if not urgent else slot.yielded_s
            return self.pace
        slot.yielded_s = self._clock() if slot.yielded_s is None else slot.yielded_s
        return HALTED

    async def tell_all(self) -> None:
        """Send its pace to every worker whose pace has changed.

        One that does not answer is its heartbeat's business.
        """
        pairs = [(m, s) for m in self._models.values() for s in m.slots()]
        asks = {asyncio.create_task(self._tell(model, slot)) for model, slot in pairs}
        if asks:
            self._asks |= asks
            _, late = await asyncio.wait(asks, timeout=CONFIRM_S)
            for task in late:  # its heartbeat will tell; nobody else waits for it
                task.add_done_callback(self._asks.discard)
            self._asks -= asks - late

    async def _tell(self, model: Model, slot: Slot) -> None:
        worker, pace = slot.worker, self._of(model, slot)
        if worker is None or not worker.alive or slot.told == pace:
            return
        slot.told = pace
        try:
            await worker.pace(**vars(pace))
        except ApiError:
            slot.told = None

    def turns_changed(self) -> None:
        """A request begins or has ended: less urgent models wait, or go on."""
        several = len({model.priority for model in self._models.values()}) > 1
        if several and (self._yielding is None or self._yielding.done()):
            self._yielding = asyncio.create_task(self._yield())

    async def _yield(self) -> None:
        await self.tell_all()
        while any(slot.yielded_s is not None for m in self._models.values() for slot in m.slots()):
            await asyncio.sleep(YIELD_LOOK_S)
            await self.tell_all()
