"""Programs that link the engine and let the daemon see and steer it (gemrun_control.h).

Their requests are their own. The daemon reads their figures, sets their pace, and disables, enables
or replaces their model; it never ends their process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemctl import waiting
from gemctl.config import ModelsConfig
from gemctl.errors import ApiError
from gemctl.events import EventHub
from gemctl.serve import artifact, candidate
from gemctl.serve.channel import Channel, error_of
from gemctl.serve.jobs import Job
from gemctl.serve.slot import Pace
from gemctl.store.copying import Pace as CopyPace
from gemctl.store.store import Staged, Store

if TYPE_CHECKING:
    from gemctl.api import ReplaceParams

ANSWER_S = 60.0  # a replacement opens, tests and warms before it answers
STATS_S = 1.0


class Attached:
    """One program. `figures` is its newest `stats` event."""

    def __init__(
        self, name: str, pid: int, store: Store, config: ModelsConfig, root: Path, hub: EventHub
    ) -> None:
        self.name = name
        self.pid = pid
        self.facts: dict[str, Any] = {}
        self.figures: dict[str, Any] = {}
        self.channel = Channel(name)
        self.task: asyncio.Task[None] | None = None
        self._store = store
        self._config = config
        self._root = root
        self._hub = hub

    async def run(self, pace: Pace) -> None:
        """Follow its figures until it is gone. The channel is open."""
        ready = await waiting.within(ANSWER_S, self.channel.ready)
        if ready["event"] == "error":
            raise error_of(ready)
        self.facts = ready
        self._hub.publish("program.attached", model=self.name, pid=self.pid)
        self.pace(pace)
        while not self.channel.closed.is_set():
            with contextlib.suppress(ApiError):
                self.figures = await self.channel.request("stats", ANSWER_S)
            await waiting.ended(self.channel.closed, STATS_S)
        self._hub.publish("program.gone", model=self.name, pid=self.pid)

    def brief(self) -> dict[str, Any]:
        """A line of `model.list`."""
        enabled = self.figures.get("enabled", self.facts.get("enabled", False))
        return {
            "name": self.name,
            "active": False,
            "attached": True,
            "pid": self.pid,
            "state": "serving" if enabled else "disabled" if self.facts else "loading",
            "digest": None,
            "pinned": False,
            "priority": 1,
            "memory_bytes": self._memory() if enabled else 0,
            "versions": 0,
            "figures": {k: v for k, v in self.figures.items() if k not in ("event", "id")},
        }

    def _memory(self) -> int:
        """Bytes of its model: of the newest one, which its figures know a second later."""
        return int(self.figures.get("ram_total") or self.facts.get("ram_total", 0))

    def pace(self, pace: Pace) -> None:
        """Set its pace without waiting: a program that hangs must not hold the throttle."""
        with contextlib.suppress(ApiError):  # one that is gone needs none
            self.channel.send("pace", **vars(pace))

    async def disable(self) -> dict[str, Any]:
        """Free its model's memory after its last request."""
        await self.channel.request("disable", ANSWER_S)
        self.figures["enabled"] = False
        return {"model": self.name, "attached": True}

    async def enable(self, prompt: str | None) -> dict[str, Any]:
        """Open its model again."""
        more: dict[str, Any] = {} if prompt is None else {"warmup_prompt": prompt}
        await self.channel.request("enable", ANSWER_S, **more)
        self.figures["enabled"] = True
        return {"model": self.name, "attached": True}

    async def replace(self, p: ReplaceParams, job: Job) -> dict[str, Any]:
        """Stage and verify a job's file here, then let the program open it from the store."""
        staged = await self._stage(job)
        path = self._store.path(self.name, staged.digest)
        try:
            job.begin("verify")
            await artifact.inspect(self.name, path, self._config, self._root)
            job.settle()  # the program does the rest, whoever listens
        except BaseException:
            await asyncio.to_thread(self._drop, staged)
            raise
        job.begin("hand over")
        try:
            answer = await self._hand_over(path, staged.digest, p)
        except ApiError as error:
            if error.code == "refused":  # the file's fault, not the program's or the layout's
                await asyncio.to_thread(
                    self._store.mark_bad, self.name, staged.digest, error.message[:200]
                )
            if error.code not in ("timeout", "failed"):  # then nobody knows what it has open
                await asyncio.to_thread(self._drop, staged)
            raise
        await asyncio.to_thread(self._store.mark_good, self.name, staged.digest)
        times = {key: value for key, value in answer.items() if key not in ("event", "id")}
        self._hub.publish("replace.done", model=self.name, digest=staged.digest, **times)
        return {"strategy": "attached", "digest": staged.digest, "phases_ms": times}

    async def _stage(self, job: Job) -> Staged:
        """Into the store, as far as it is an artifact. Raises ApiError."""
        made: list[Staged] = []
        most = self._config.size_most_bytes
        pace = CopyPace(cancelled=job.stop.is_set, progress=job.progress)

        def copy() -> None:
            candidate.check(self.name, job.descriptor, most)
            made.append(self._store.stage(self.name, job.descriptor, size_most=most, pace=pace))

        job.begin("stage")
        try:
            await waiting.in_thread(copy)
        except BaseException:
            for staged in made:
                await asyncio.to_thread(self._drop, staged)
            raise
        return made[0]

    def _drop(self, staged: Staged) -> None:
        """Nobody needs a file that was refused; what was in the store before stays."""
        self._store.release(self.name, staged.digest)
        if staged.fresh:
            with contextlib.suppress(ApiError):
                self._store.remove(self.name, staged.digest)

    def _named(self, error: ApiError, path: Path) -> str:
        """The program's sentence, in the words of who asked here."""
        if error.code == "layout":
            what = f"{self.name}: another context or KV type than the version that serves"
            return f"{what}; compile it alike, or give --allow-layout-change"
        return re.sub(rf"/proc/self/fd/\d+|{re.escape(str(path))}", self.name, error.message)

    async def _hand_over(self, path: Path, digest: str, p: ReplaceParams) -> dict[str, Any]:
        """The version as an open file, because its user need not be able to read the store; the
        path is for programs of before that."""
        file = self._store.open(self.name, digest)
        try:
            return await self.channel.request(
                "replace",
                ANSWER_S,
                file,
                path=str(path),
                warmup_prompt=p.warmup_prompt or self._config.warmup_prompt,
                allow_layout_change=int(p.allow_layout_change),
            )
        except ApiError as error:
            raise ApiError(error.code, self._named(error, path)) from None
        finally:
            os.close(file)
