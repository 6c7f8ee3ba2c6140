"""The connection to the broker: make it, keep it, use it, and make it again.

run = follow events + figures + [guard] + connections
connection = open -> subscribe, announce -> send what waits, until lost or stopped
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from gemctl import waiting
from gemctl.config import MqttConfig
from gemctl.errors import ApiError
from gemctl.events import Event, EventHub
from gemctl.mqtt.client import Link, LinkError, Will
from gemctl.mqtt.commands import RESERVED, Arrived, Topics
from gemctl.mqtt.discovery import announcement
from gemctl.mqtt.dispatch import Dispatcher, encode
from gemctl.mqtt.loss import GRACE_S, LossGuard
from gemctl.mqtt.outbox import Item, Outbox
from gemctl.mqtt.replies import Replies
from gemctl.service import Service

SENDERS = 8  # messages under way at once
STABLE_S = 30.0  # a connection that lasted so long ends the growth of the delays
GOODBYE_S = 2.0
SILENCES = 3  # some brokers hang up instead of saying that they do not speak MQTT 5
TAP_BYTES = 1024
OFFLINE = b'{"state":"offline"}'
STATEFUL = ("slot.", "throttle.", "replace.", "probation.", "worker.", "sensor.")

_LOG = logging.getLogger("gemctl.mqtt")

Tap = Callable[[bytes], None]


def device_name(config: MqttConfig) -> str:
    """The configured name, else the host's, as far as a topic may hold it. Raises ApiError."""
    name = config.device or re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:64] or "device"
    if name in RESERVED:
        reason = f"mqtt.device: '{name}' is a level of its own in the topics; choose another name"
        raise ApiError("bad_request", reason)
    return name


class Backoff:
    """Seconds to wait before the next attempt: doubling from `first` to `most`, by chance less."""

    def __init__(
        self, first: float = 1.0, most: float = 60.0, chance: Callable[[], float] = random.random
    ) -> None:
        self._first, self._most, self._chance = first, most, chance
        self._tries = 0

    def reset(self) -> None:
        """The next one is short again."""
        self._tries = 0

    def next(self) -> float:
        """At least `first`, at most `most`."""
        self._tries = min(self._tries + 1, 30)
        top = min(self._first * 2.0**self._tries, self._most)
        return self._first + (top - self._first) * self._chance()


class Bridge:
    """One device on one broker. `taps`: topics of other devices, such as sensors, to listen to."""

    def __init__(
        self,
        config: MqttConfig,
        service: Service,
        hub: EventHub,
        *,
        taps: Mapping[str, Tap] | None = None,
        reply_prefix: str = "",
        backoff: Backoff | None = None,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._service, self._hub, self._clock = config, service, hub, clock
        self._taps, self._grace_s = dict(taps or {}), grace_s
        self._heard: set[str] = set()  # of their topics, those that the broker knows of
        self._retapped = asyncio.Event()
        self.topics = Topics(config.site, device_name(config), config.groups, reply_prefix)
        self._outbox = Outbox()
        replies = Replies(config.reply_cache_s, time.monotonic)
        self._dispatcher = Dispatcher(
            self.topics, service, hub, self._outbox, config.write, replies, clock
        )
        self._backoff = backoff or Backoff()
        self._up, self._down = asyncio.Event(), asyncio.Event()
        self._down.set()
        self._protocol = "3.1.1" if config.protocol == "3.1.1" else "5"
        self._clean = False  # throw the broker's session away at the next connection
        self._silences = 0  # attempts with MQTT 5 that were not answered, in a row
        self._reason = "not tried yet"
        self._state: dict[str, Any] | None = None
        self._seq = 0
        self._gaps = 0  # events that the hub dropped before we saw them
        self._told_lost = 0
        self._connections = 0

    def listen(self, taps: Mapping[str, Tap]) -> None:
        """Listen to these topics of others from now on, and to none that was named before."""
        self._taps = dict(taps)
        self._retapped.set()

    def info(self) -> dict[str, Any]:
        """For `daemon.info`, doctor and metrics; `reason` is empty while connected."""
        return {
            "connected": self._up.is_set(),
            "broker": f"{self._config.host}:{self._config.port}",
            "protocol": self._protocol,
            "reason": self._reason,
            "connections": self._connections,
            "lost_events": self._lost_events(),
            "lost_replies": self._outbox.queues["reply"].lost,
            "commands": dict(self._dispatcher.counts),
        }

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Losing the broker, or never finding it, is no error."""
        with self._hub.follow() as stream:
            jobs: list[Coroutine[Any, Any, None]] = [self._follow(stream), self._figures()]
            if self._config.on_loss == "conservative":
                guard = LossGuard(self._service, self._up, self._down, self._grace_s)
                jobs.append(guard.run())
            tasks = [asyncio.create_task(job) for job in jobs]
            try:
                await self._connect(stop)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._dispatcher.close()

    # What is published

    async def _follow(self, stream: Any) -> None:
        async for event in stream:
            self._take(event)

    def _take(self, event: Event) -> None:
        if self._seq and event.seq > self._seq + 1:
            self._gaps += event.seq - self._seq - 1
        self._seq = event.seq
        try:
            payload = encode(event.as_dict())
        except (TypeError, ValueError):
            payload = encode({"seq": event.seq, "ts": round(event.ts, 3), "kind": event.kind})
        if not self._outbox.put(Item(self.topics.own("event"), payload, queue="event")):
            self._gaps += 1
        if event.kind.startswith(STATEFUL):
            self._refresh()

    def _lost_events(self) -> int:
        return self._gaps + self._outbox.queues["event"].lost

    async def _figures(self) -> None:
        while True:
            await asyncio.sleep(self._config.stats_s)
            if self._up.is_set():
                self._publish_stats()
                self._refresh()

    def _stats(self) -> dict[str, Any]:
        """The daemon's figures; empty where it has none to give just now."""
        with contextlib.suppress(Exception):
            return self._service.stats()
        return {}

    def _publish_stats(self) -> None:
        with contextlib.suppress(TypeError, ValueError):
            payload = encode(self._stats())
            self._outbox.put(Item(self.topics.own("stats"), payload, qos=0, queue=""))

    def _refresh(self) -> None:
        """Publish what the device is doing, if that is news; figures that move are not in it."""
        stats = self._stats()
        throttle = stats.get("throttle") or {}
        state = {
            "v": 1,
            **{key: stats.get(key) for key in ("state", "model", "digest")},
            "throttle": {key: throttle.get(key) for key in ("mode", "level")},
            "groups": list(self.topics.groups),  # `status` does not name them after its last will
        }
        if state != self._state and self._up.is_set():
            self._state = state
            with contextlib.suppress(TypeError, ValueError):
                self._retain("state", {**state, "ts": round(self._clock(), 3)})

    def _retain(self, name: str, value: dict[str, Any]) -> None:
        self._outbox.put(Item(self.topics.own(name), encode(value), retain=True, queue=""))

    # The connection

    async def _connect(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            error = await self._attempt(stop)
            if error is None:
                return
            self._explain(error)
            self._choose(error)
            self._clean = self._clean or error.damaged
            if not error.unsupported or self._config.protocol != "auto":
                await waiting.ended(stop, self._backoff.next())

    def _choose(self, error: LinkError) -> None:
        """The next attempt's protocol, where it is ours to choose: 5, unless that is not spoken."""
        if self._config.protocol != "auto":
            return
        self._silences = self._silences + 1 if error.silent and self._protocol == "5" else 0
        fall_back = error.unsupported or self._silences >= SILENCES
        self._protocol = "3.1.1" if fall_back else "5"

    def _explain(self, error: LinkError) -> None:
        """One event when the connection goes, and one for every new reason after it."""
        advice = "; check mqtt.username and password_file" if error.denied else ""
        reason = f"{error}{advice}"
        self._down.set()
        if self._up.is_set() or reason != self._reason:
            self._hub.publish("mqtt.lost", reason=reason)
        self._up.clear()
        self._reason = reason

    async def _attempt(self, stop: asyncio.Event) -> LinkError | None:
        """One connection from its beginning to its end; None where `stop` ended it."""
        started: float | None = None
        link: Link | None = None
        try:
            link = self._link()
            if not await self._open(link, stop):
                return None
            started = time.monotonic()
            return await self._session(link, stop)
        except ApiError as error:
            return LinkError(error.message)
        except LinkError as error:
            return error
        except Exception as error:  # whatever it is, the daemon goes on, and so do we
            _LOG.error("gemctld: mqtt: %s; report it as a bug", type(error).__name__)
            return LinkError(f"a fault of the bridge: {type(error).__name__}")
        finally:
            if started is not None:
                self._outbox.put_back()
                if link is not None:
                    link.drop()
                if time.monotonic() - started >= STABLE_S:
                    self._backoff.reset()

    def _link(self) -> Link:
        name = f"gemctl-{self.topics.site}-{self.topics.device}"
        will = Will(self.topics.own("status"), OFFLINE)
        return Link(self._config, self._protocol, name, self._receive, will, self._clean)

    async def _open(self, link: Link, stop: asyncio.Event) -> bool:
        """False where `stop` came first: a thread then finishes the attempt, and it is dropped."""
        opening = asyncio.ensure_future(link.open())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not opening.done():
                opening.add_done_callback(lambda done: done.cancelled() or done.exception())
                opening.add_done_callback(lambda done: link.drop())
        if not opening.done():
            return False
        await opening
        return True

    def _receive(self, arrived: Arrived) -> None:
        tap = self._taps.get(arrived.topic)
        if tap is None:
            self._dispatcher.receive(arrived)
        elif not arrived.retain and len(arrived.payload) <= TAP_BYTES:
            with contextlib.suppress(Exception):
                tap(arrived.payload)

    async def _session(self, link: Link, stop: asyncio.Event) -> LinkError | None:
        await self._announce(link)
        lost = asyncio.ensure_future(link.lost())
        senders = [asyncio.ensure_future(self._send(link)) for _ in range(SENDERS)]
        senders.append(asyncio.ensure_future(self._tap(link)))
        stopping = asyncio.ensure_future(stop.wait())
        everything: list[asyncio.Future[Any]] = [lost, stopping, *senders]
        try:
            done, _ = await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
            if lost in done:
                return lost.result()
            for sender in senders:
                if sender in done:
                    return sender.result()
            await self._goodbye(link)
            return None
        finally:
            for task in everything:
                task.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    async def _announce(self, link: Link) -> None:
        self._heard |= set(self._taps)
        for topic in (*self.topics.commands(), *self._taps):
            await self._subscribe(link, topic)
        self._reason, self._clean, self._state = "", False, None
        self._down.clear()
        self._up.set()
        self._connections += 1
        about = {"site": self.topics.site, "device": self.topics.device}
        groups = list(self.topics.groups)
        since = round(self._clock(), 3)
        online = {"state": "online", "v": 1, **about, "groups": groups, "since": since}
        self._retain("status", {**online, "protocol": self._protocol})
        expire_s = int(self._config.stats_s * 3) + 1
        self._outbox.put(announcement(self.topics, self._config.home_assistant, expire_s))
        lost = self._lost_events()
        news = {"protocol": self._protocol, "lost_events": lost - self._told_lost}
        self._told_lost = lost
        self._hub.publish("mqtt.connected", **news)
        self._publish_stats()
        self._refresh()

    async def _subscribe(self, link: Link, topic: str) -> None:
        if not await link.listen(topic):
            self._dispatcher.note("subscription")

    async def _tap(self, link: Link) -> LinkError:
        """Subscribe to what is to be heard besides, and leave the rest, until that fails."""
        while True:
            await self._retapped.wait()
            self._retapped.clear()
            wanted = set(self._taps)
            try:
                for topic in wanted - self._heard:
                    self._heard.add(topic)
                    await self._subscribe(link, topic)
                for topic in self._heard - wanted:
                    await link.leave(topic)
                    self._heard.discard(topic)
            except LinkError as error:
                self._retapped.set()  # the next connection goes on
                return error

    async def _send(self, link: Link) -> LinkError:
        """Publish what waits, one after the other, until that fails."""
        while True:
            await self._outbox.wait()
            taken = self._outbox.take()
            if taken is None:
                continue
            try:
                await link.send(taken[1])
            except LinkError as error:
                return error
            except Exception as error:  # this message cannot be sent, now or later
                _LOG.error("gemctld: mqtt: a message: %s; report it", type(error).__name__)
            self._outbox.landed(taken[0])

    async def _goodbye(self, link: Link) -> None:
        """Let the last replies out, say that we are gone, and go."""
        await self._dispatcher.close()
        deadline = time.monotonic() + GOODBYE_S
        while not self._outbox.empty and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        with contextlib.suppress(LinkError, TimeoutError):
            last = Item(self.topics.own("status"), OFFLINE, retain=True, queue="")
            await waiting.within(GOODBYE_S, link.send(last))
            await waiting.within(GOODBYE_S, link.close())
        self._up.clear()
