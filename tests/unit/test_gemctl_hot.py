"""The throttle's last step against changes of a model that are under way."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gemctl.errors import ApiError
from gemctl.serve.hot import Unloading


class Models:
    """What `Unloading` uses of the daemon's models."""

    def __init__(self, error: ApiError | None) -> None:
        self.error = error
        self.freed: list[str] = []
        self.models = {"pilot": SimpleNamespace(current=SimpleNamespace(loaded=True), busy="")}
        self.state = SimpleNamespace(models={})
        self.hub = SimpleNamespace(publish=lambda *a, **k: None)

    async def disable(self, name: str) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.freed.append(name)
        self.models[name].current.loaded = False


def freed(error: ApiError | None, busy: str = "") -> list[list[str]]:
    """What was freed after each of three ticks on the last step."""

    async def work() -> list[list[str]]:
        models: Any = Models(error)
        unloading = Unloading(models)
        models.models["pilot"].busy = busy
        seen = []
        for _ in range(3):
            unloading.tick(True)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            seen.append(list(models.freed))
            models.models["pilot"].busy = ""
        await unloading.close()
        return seen

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("error", "busy", "seen"),
    [
        (None, "", [["pilot"]] * 3),
        (None, "a load", [[], ["pilot"], ["pilot"]]),
        (ApiError("busy", "a job was quicker; wait"), "", [[], ["pilot"], ["pilot"]]),
        (ApiError("internal", "the disk is full; free some"), "", [[]] * 3),
    ],
)
def test_what_is_busy_is_freed_later(
    error: ApiError | None, busy: str, seen: list[list[str]]
) -> None:
    assert freed(error, busy) == seen


def test_a_step_that_was_left_frees_nothing() -> None:
    async def work() -> list[str]:
        models: Any = Models(ApiError("busy", "a job was quicker; wait"))
        unloading = Unloading(models)
        unloading.tick(True)
        unloading.tick(False)
        await asyncio.sleep(0)
        await unloading.close()
        unloading.tick(False)
        return list(models.freed)

    assert asyncio.run(work()) == []
