"""A rollout at work: start devices, listen to what becomes of them, stop where it goes wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gemctl import waiting
from gemctl.fleet import survey
from gemctl.fleet.link import FleetLink
from gemctl.fleet.plan import (
    UNREADY,
    Outcome,
    Progress,
    RolloutOptions,
    RolloutResult,
    Row,
    chosen,
    decide,
    order,
    stage_of,
    time_left,
)
from gemctl.fleet.survey import Device

REASON_MOST = 300  # characters of a device's own words


@dataclass
class Rollout:
    """One run. `order` is of the devices that take part; `devices` holds the others too."""

    options: RolloutOptions
    link: FleetLink
    progress: Callable[[Progress], None]
    devices: dict[str, Device] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> RolloutResult:
        """Ask everybody, then start, wait and look, until it is done or halts."""
        self.link.listener = self._heard
        self.devices = await survey.look(self.link, self.options)
        refusal = self._take_part()
        if refusal:
            return self._result("refused", refusal)
        for name in self.order:
            device = self.devices[name]
            if device.outcome != "pending":
                self._tell(name, device)
        return await self._carry_out()

    def _take_part(self) -> str:
        """Who is concerned, in order; why it must not begin, or nothing."""
        percents = self.options.percents
        every = order(list(self.devices), self.options.digest)
        missing = survey.unready(self.devices, chosen(every, percents))
        if self.options.skip_unready:
            missing = survey.unready(self.devices, every)
            every = [name for name in every if self.devices[name].outcome not in UNREADY]
        self.order = every
        if missing and not self.options.skip_unready:
            count = sum(map(len, missing.values()))
            of = f"{count} of {len(chosen(every, percents))} devices are not ready"
            stage = "gemctl model stage on each" if "not_staged" in missing else "see to them"
            remedy = f"{stage}, or leave them out with --skip-unready"
            return f"rollout not begun: {of} ({survey.sentence(missing)}); {remedy}"
        if missing:
            self._say("left out", f"left out: {survey.sentence(missing)}")
        return "" if every else "rollout not begun: no device is ready; see their reasons"

    async def _carry_out(self) -> RolloutResult:
        options, said = self.options, ""
        while True:
            self.news.clear()
            self._silence()
            outcomes: dict[str, Outcome] = {d: self.devices[d].outcome for d in self.order}
            step = decide(self.order, outcomes, options.percents, options.max_bad, options.parallel)
            if step.sentence != said:
                said = step.sentence
                self._say(step.action, said)
            if step.action == "halt" or step.action == "done":
                return self._result(step.action, step.sentence)
            for device in step.devices:
                self._start(device, step.stage)
            if not step.devices:
                await self._wait()

    async def _wait(self) -> None:
        """For news, the loss of the broker, or the next device that has been silent too long."""
        heard = [d.heard for d in self.devices.values() if d.outcome == "running"]
        left = min(heard, default=time.monotonic()) + self.options.timeout_s - time.monotonic()
        await waiting.ended(self.news, max(0.01, left))
        self.link.check()

    # ---- what is told ----

    def _result(self, action: Literal["done", "halt", "refused"], sentence: str) -> RolloutResult:
        others = sorted(self.devices.keys() - set(self.order))
        rows = [self._row(place, name) for place, name in enumerate(self.order)]
        return RolloutResult(action, sentence, (*rows, *(self._row(None, n) for n in others)))

    def _row(self, place: int | None, name: str) -> Row:
        device, stage = self.devices[name], None
        if place is not None:
            planned = stage_of(place, len(self.order), self.options.percents)
            stage = planned if device.stage is None else device.stage
        return Row(name, stage, device.outcome, device.reason, round(device.took, 3))

    def _say(self, outcome: str, text: str, name: str = "") -> None:
        wanted = chosen(self.order, self.options.percents)
        open_ = ("pending", "running")
        done = sum(self.devices[name].outcome not in open_ for name in wanted)
        self.progress(Progress(name, outcome, text, done, len(wanted), self._left()))

    def _tell(self, name: str, device: Device) -> None:
        self._say(device.outcome, device.reason, name)

    def _left(self) -> float | None:
        """Seconds to the end, as far as can be told."""
        now, percents = time.monotonic(), self.options.percents
        pending: dict[float | None, int] = {}
        for place, name in enumerate(chosen(self.order, percents)):
            if self.devices[name].outcome == "pending":
                stage = stage_of(place, len(self.order), percents)
                pending[stage] = pending.get(stage, 0) + 1
        every = [self.devices[name] for name in self.order]
        took = [d.took for d in every if d.outcome == "good" and d.fresh]
        running = [now - d.started for d in every if d.outcome == "running"]
        return time_left(took, running, list(pending.values()), self.options.parallel)

    # ---- devices ----

    def _start(self, name: str, stage: float | None) -> None:
        device = self.devices[name]
        device.started = device.heard = time.monotonic()
        device.outcome, device.stage, device.fresh = "running", stage, True
        params: dict[str, Any] = {"name": self.options.name}
        if self.options.method == "model.replace":
            params["digest"] = self.options.digest
            params["serial"] = self.options.serial
            params["allow_layout_change"] = self.options.allow_layout_change
        self._say("running", "started", name)
        self.link.send(name, self.options.method, params, lambda reply: self._reply(name, reply))

    def _reply(self, name: str, reply: Mapping[str, Any]) -> None:
        """`accepted`, the result, or an error; lost messages show as silence."""
        device = self.devices[name]
        device.heard = time.monotonic()
        if reply.get("error"):
            self._end(name, device, "refused", str(reply["error"].get("message", "no reason")))
        result = reply.get("result") or {}
        if result and self.options.method == "model.switch":
            self._end(name, device, "good", "switched")
        elif result.get("already"):  # somebody else did it meanwhile
            self._end(name, device, "good", "has it already")
        self.news.set()

    def _heard(self, name: str, event: Mapping[str, Any]) -> None:
        """An event of a device; also of one that counts as good: it may still roll back."""
        device = self.devices.get(name)
        if not name:
            self.news.set()
        if device is None or event.get("model") != self.options.name:
            return
        device.heard = time.monotonic()
        kind = str(event.get("kind"))
        digest = str(event.get("digest") or self.options.digest)
        taken = device.outcome in ("running", "good", "rolled_back", "lost")
        ours = digest.startswith(self.options.digest) and taken
        if ours and kind == "probation.good" and device.outcome == "running":
            self._end(name, device, "good", "probation passed")
        elif ours and kind in ("probation.bad", "probation.failed"):
            self._end(name, device, "rolled_back", str(event.get("text") or "it gave no reason"))
        self.news.set()

    def _silence(self) -> None:
        """Who has not been heard of for too long is lost."""
        now = time.monotonic()
        for name, device in self.devices.items():
            if device.outcome == "running" and now - device.heard >= self.options.timeout_s:
                self._end(name, device, "lost", f"silent for {self.options.timeout_s:g} s")

    def _end(self, name: str, device: Device, outcome: Outcome, reason: str) -> None:
        device.outcome, device.reason = outcome, reason[:REASON_MOST]
        device.took = time.monotonic() - device.started
        self._tell(name, device)
