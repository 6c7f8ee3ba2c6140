"""Many devices on one broker: who is there, and a new version stage by stage.

A rollout asks every reachable device what it runs, orders them by a hash of name and digest, and
sends `model.replace` (or `model.switch`) to the first few per cent. A device is good when its
probation says so, bad when it rolls back or refuses. Too many bad ones, or ones that fall silent,
halt the rollout: nothing more is started. Run it again to go on: devices that have the version
count as good. The version itself reaches the devices by other means, before.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gemctl import waiting
from gemctl.config import MqttConfig
from gemctl.core.policy import Counts, decide_rollout
from gemctl.errors import ApiError

if TYPE_CHECKING:
    from gemctl.fleet.link import FleetLink

DISCOVER_S = 5.0
PARALLEL = 20  # devices at it at once: their events have to fit into the broker's queue
# pending: not started; running: started; lost: silent for too long; offline and absent (it has no
# such model) are no part of the rollout
Outcome = Literal["pending", "running", "good", "bad", "lost", "offline", "absent"]


@dataclass(frozen=True)
class DeviceStatus:
    """What the retained topics say of a device. Null where it did not tell."""

    device: str
    online: bool
    groups: tuple[str, ...] = ()
    model: str | None = None
    digest: str | None = None
    state: str | None = None
    throttle_mode: str | None = None
    throttle_level: int | None = None


@dataclass(frozen=True)
class RolloutOptions:
    """`percents` ascend, of the devices that can be reached; the last one is where it ends.

    More than `max_bad` bad devices halt it, and so do devices of which nothing is heard for
    `timeout_s` seconds (one in fifty may). `digest` may be its first 8 characters or more.
    """

    broker: MqttConfig
    name: str
    digest: str
    percents: tuple[float, ...] = (5.0, 50.0, 100.0)
    group: str = ""
    max_bad: int = 0
    timeout_s: float = 600.0
    parallel: int = PARALLEL
    method: Literal["model.replace", "model.switch"] = "model.replace"
    serial: bool = False
    allow_layout_change: bool = False
    discover_s: float = DISCOVER_S


@dataclass(frozen=True)
class Row:
    """A device of the table at the end. `detail` says why, `seconds` how long it took."""

    device: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Progress:
    """Something happened: a device's new row, or (device "") the rollout's own sentence."""

    device: str
    outcome: str
    detail: str


@dataclass(frozen=True)
class RolloutResult:
    """How it ended; rows in the order in which devices are chosen, the others after them."""

    action: Literal["done", "halt"]
    sentence: str
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What to do now, and with which devices."""

    action: Literal["start", "wait", "halt", "done"]
    devices: tuple[str, ...]
    sentence: str


def order(devices: Sequence[str], digest: str) -> list[str]:
    """Devices as they are chosen: by chance, but by the same one in every run."""

    def key(name: str) -> bytes:
        return hashlib.sha256(f"{name}\n{digest}".encode()).digest()

    return sorted(devices, key=key)


def decide(
    devices: Sequence[str],
    outcomes: Mapping[str, Outcome],
    percents: Sequence[float],
    max_bad: int = 0,
    parallel: int = PARALLEL,
) -> Decision:
    """The next step of a rollout over `devices`, in the order in which they are chosen.

    Devices without an outcome are pending. Raises ValueError for percentages that do not ascend
    within 0..100.
    """
    decide_rollout(percents, Counts(0))  # only to check the percentages
    last = percents[-1]
    wanted = devices[: math.ceil(len(devices) * last / 100.0)]
    if not wanted:
        return Decision("done", (), "rollout done: no device is concerned")
    found = [outcomes.get(device, "pending") for device in devices]
    pending = found[: len(wanted)].count("pending")
    ended = {word: found.count(word) for word in ("good", "bad", "lost", "running")}
    # Devices outside `wanted` that have the version are not counted: they take nobody's place.
    good = ended["good"] - found[len(wanted) :].count("good")
    started = good + ended["bad"] + ended["lost"] + ended["running"]
    total = pending + started
    counts = Counts(total, started, good, ended["bad"], ended["lost"])
    step = decide_rollout([p * 100.0 / last for p in percents[:-1]] + [100.0], counts, max_bad)
    shown = f"{percents[min(step.stage, len(percents) - 1)]:g} %"
    if step.action != "start":
        says = f"{shown}: {ended['running']} on probation" if step.action == "wait" else ""
        return Decision(step.action, (), says or step.sentence)
    room = max(0, min(step.devices, parallel - ended["running"]))
    chosen = [d for d in wanted if outcomes.get(d, "pending") == "pending"][:room]
    if not chosen:
        return Decision("wait", (), f"{shown}: {ended['running']} under way")
    return Decision("start", tuple(chosen), f"{shown}: {len(chosen)} of {total} devices started")


@asynccontextmanager
async def _connected(broker: MqttConfig) -> AsyncIterator[FleetLink]:
    try:
        from gemctl.fleet.link import FleetLink
    except ImportError as error:
        if (error.name or "").split(".")[0] not in ("aiomqtt", "paho"):
            raise
        reason = "fleet: aiomqtt is not installed; install gembin-toolchain[mqtt]"
        raise ApiError("failed", reason) from None
    link = FleetLink(broker, f"fleet-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        await link.open()
        yield link
    finally:
        await link.close()


def _status_of(device: str, status: Mapping[str, Any], state: Mapping[str, Any]) -> DeviceStatus:
    throttle = state.get("throttle") or {}
    return DeviceStatus(
        device=device,
        online=status.get("state") == "online",
        groups=tuple(status.get("groups") or ()),
        model=state.get("model"),
        digest=state.get("digest"),
        state=state.get("state"),
        throttle_mode=throttle.get("mode"),
        throttle_level=throttle.get("level"),
    )


async def status(
    broker: MqttConfig, group: str = "", discover_s: float = DISCOVER_S
) -> list[DeviceStatus]:
    """Devices of a site, or of one of its groups, by name. Raises ApiError without a broker.

    A device that is offline tells no groups, so it is in the list of the site only.
    """
    async with _connected(broker) as link:
        await link.discover(discover_s)
        found = [
            _status_of(device, about, link.states.get(device, {}))
            for device, about in sorted(link.statuses.items())
        ]
    return [one for one in found if not group or group in one.groups]


async def rollout(
    options: RolloutOptions, progress: Callable[[Progress], None] = lambda news: None
) -> RolloutResult:
    """Carry it out. Raises ApiError where the broker cannot be used, or is lost on the way."""
    try:
        decide([], {}, options.percents)
    except ValueError as error:
        raise ApiError("bad_request", str(error)) from None
    async with _connected(options.broker) as link:
        await link.discover(options.discover_s)
        return await _Rollout(options, link, progress).run()


@dataclass
class _Device:
    """One device under way."""

    outcome: Outcome = "pending"
    detail: str = ""
    started: float = 0.0
    heard: float = 0.0
    took: float = 0.0


@dataclass
class _Rollout:
    options: RolloutOptions
    link: FleetLink
    progress: Callable[[Progress], None]
    devices: dict[str, _Device] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> RolloutResult:
        """Survey, then start, wait and look, until it is done or halts."""
        self.link.listener = self._heard
        await self._survey()
        said = ""
        while True:
            self.news.clear()
            self._silence()
            outcomes: dict[str, Outcome] = {d: self.devices[d].outcome for d in self.order}
            options = self.options
            step = decide(self.order, outcomes, options.percents, options.max_bad, options.parallel)
            if step.sentence != said:
                said = step.sentence
                self.progress(Progress("", step.action, said))
            if step.action in ("halt", "done"):
                action: Literal["halt", "done"] = "done" if step.action == "done" else "halt"
                return RolloutResult(action, step.sentence, tuple(self._rows()))
            for device in step.devices:
                self._start(device)
            if not step.devices:
                await self._wait()

    async def _wait(self) -> None:
        """For news, the loss of the broker, or the next device that has been silent too long."""
        heard = [d.heard for d in self.devices.values() if d.outcome == "running"]
        left = min(heard, default=time.monotonic()) + self.options.timeout_s - time.monotonic()
        await waiting.ended(self.news, max(0.01, left))
        self.link.check()

    def _rows(self) -> list[Row]:
        others = sorted(self.devices.keys() - set(self.order))
        return [
            Row(name, d.outcome, d.detail, round(d.took, 3))
            for name in (*self.order, *others)
            for d in (self.devices[name],)
        ]

    async def _survey(self) -> None:
        """Who takes part, and who has the version already."""
        online = []
        for name, about in self.link.statuses.items():
            here = about.get("state") == "online"
            groups = about.get("groups") or ()
            if here and self.options.group and self.options.group not in groups:
                continue
            if here:
                online.append(name)
            elif not self.options.group:
                self.devices[name] = _Device("offline", "its status says so")
        wait_s = min(self.options.timeout_s, self.options.discover_s)
        asked = [self._look(name, wait_s) for name in online]
        await asyncio.gather(*asked)
        here = [name for name in online if self.devices[name].outcome not in ("offline", "absent")]
        self.order = order(here, self.options.digest)

    async def _look(self, name: str, wait_s: float) -> None:
        reply = await self.link.ask(name, "model.status", {"name": self.options.name}, wait_s)
        if reply is None:
            self.devices[name] = _Device("offline", f"no answer in {wait_s:g} s")
            return
        if reply.get("error"):
            self.devices[name] = _Device("absent", str(reply["error"].get("message", "")))
            return
        found = reply.get("result") or {}
        device = self.devices[name] = _Device(heard=time.monotonic(), started=time.monotonic())
        if str(found.get("digest") or "").startswith(self.options.digest):
            trial = bool(found.get("on_probation"))
            self._end(name, device, "running" if trial else "good", "has it already")

    def _start(self, name: str) -> None:
        device = self.devices[name]
        device.started = device.heard = time.monotonic()
        device.outcome = "running"
        params: dict[str, Any] = {"name": self.options.name}
        if self.options.method == "model.replace":
            params["digest"] = self.options.digest
            params["serial"] = self.options.serial
            params["allow_layout_change"] = self.options.allow_layout_change
        self.progress(Progress(name, "running", "started"))
        self.link.send(name, self.options.method, params, lambda reply: self._reply(name, reply))

    def _reply(self, name: str, reply: Mapping[str, Any]) -> None:
        """`accepted`, the result, or an error; lost messages show as silence."""
        device = self.devices[name]
        device.heard = time.monotonic()
        if reply.get("error"):
            self._end(name, device, "bad", str(reply["error"].get("message", "refused")))
        elif "result" in reply and self.options.method == "model.switch":
            self._end(name, device, "good", "switched")
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
        ours = digest.startswith(self.options.digest) and device.outcome != "pending"
        if ours and kind == "probation.good" and device.outcome == "running":
            self._end(name, device, "good", "probation passed")
        elif ours and kind in ("probation.bad", "probation.failed"):
            self._end(name, device, "bad", str(event.get("text") or "rolled back"))
        self.news.set()

    def _silence(self) -> None:
        """Who has not been heard of for too long is lost."""
        now = time.monotonic()
        for name, device in self.devices.items():
            if device.outcome == "running" and now - device.heard >= self.options.timeout_s:
                self._end(name, device, "lost", f"silent for {self.options.timeout_s:g} s")

    def _end(self, name: str, device: _Device, outcome: Outcome, detail: str) -> None:
        device.outcome, device.detail = outcome, detail[:200]
        device.took = time.monotonic() - device.started
        self.progress(Progress(name, outcome, device.detail))
