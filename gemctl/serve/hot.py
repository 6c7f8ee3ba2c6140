"""The throttle's last step: the memory of models is freed, with throttle.allow_unload.

Once each time that the step is reached, for what is loaded then: what somebody loads or enables
afterwards stays, as slowly as heat allows. A model comes back when somebody enables it.
"""

from __future__ import annotations

import asyncio

from gemctl.errors import ApiError
from gemctl.serve.models import Models


class Unloading:
    """Of one daemon. `tick` never waits: a request in flight may take models.drain_s to end, and
    the sensors are read meanwhile."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._left: set[str] | None = None  # names still to be freed; None: not on the last step
        self._tasks: set[asyncio.Task[None]] = set()

    def tick(self, reached: bool) -> None:
        """The throttle is on its last step, or is not."""
        if not reached:
            self._left = None
            return
        if self._left is None:
            self._left = {name for name in self._models.models if self._is_loaded(name)}
        for name in sorted(self._left):
            if not self._is_loaded(name):
                self._left.discard(name)
            elif not self._models.models[name].busy:  # else at a later tick
                self._left.discard(name)
                task = asyncio.create_task(self._free(name))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _is_loaded(self, name: str) -> bool:
        """Whether it holds memory that may be freed: a pinned model's may not."""
        model, wanted = self._models.models.get(name), self._models.state.models.get(name)
        if model is None or model.current is None or (wanted is not None and wanted.pinned):
            return False
        return model.current.loaded

    async def _free(self, name: str) -> None:
        self._models.hub.publish("throttle.unload", model=name)
        try:
            await self._models.disable(name)
        except ApiError as error:  # a full disk keeps nobody hot
            if error.code == "busy" and self._left is not None:  # a job was quicker
                self._left.add(name)

    async def close(self) -> None:
        """End what is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
