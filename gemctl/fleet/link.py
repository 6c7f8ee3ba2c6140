"""The fleet's side of the broker: hears what devices tell, and asks them one by one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from gemctl import waiting
from gemctl.config import MqttConfig
from gemctl.errors import ApiError
from gemctl.mqtt.client import Link, LinkError
from gemctl.mqtt.commands import ROOT, Arrived, Refusal, strict_object
from gemctl.mqtt.dispatch import encode
from gemctl.mqtt.outbox import Item

ASKED = 50  # questions under way at once
Handler = Callable[[Mapping[str, Any]], None]


def _nothing(device: str, event: Mapping[str, Any]) -> None:
    """Nobody listens yet."""


class FleetLink:
    """A connection. `statuses` and `states`: the retained topics by device, kept up to date.

    `listener` gets every event with its device's name, and an empty name when the broker is lost.
    """

    def __init__(self, broker: MqttConfig, client: str) -> None:
        self._broker, self._client = broker, client
        self.site = broker.site
        self._site = f"{ROOT}/{broker.site}"
        self._sites: set[str] = set()
        self._inbox = f"{self._site}/reply/{client}"
        self._handlers: dict[str, Handler] = {}
        self._sends: set[asyncio.Task[None]] = set()
        self._number = 0
        self._room = asyncio.Semaphore(ASKED)
        self._marked = asyncio.Event()
        self._error: LinkError | None = None
        self._link: Link | None = None
        self._watch: asyncio.Task[None] | None = None
        self.statuses: dict[str, dict[str, Any]] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.listener: Callable[[str, Mapping[str, Any]], None] = _nothing

    async def open(self) -> None:
        """Connect, with MQTT 3.1.1 where the broker speaks nothing newer. Raises ApiError."""
        protocol = "3.1.1" if self._broker.protocol == "3.1.1" else "5"
        try:
            await self._open(protocol)
        except LinkError as error:
            old = error.unsupported or error.silent
            if not old or self._broker.protocol != "auto":
                raise self._unusable(error) from None
            try:
                await self._open("3.1.1")
            except LinkError as again:
                raise self._unusable(again) from None
        self._watch = asyncio.create_task(self._until_lost())

    async def _open(self, protocol: str) -> None:
        link = Link(self._broker, protocol, self._client, self._receive, clean=True, session_s=0)
        await link.open()
        self._link = link

    def _unusable(self, error: LinkError) -> ApiError:
        place = f"{self._broker.host}:{self._broker.port}"
        advice = "; check --username and --password-file" if error.denied else ""
        what = f"broker {place}: {error}{advice}"
        return ApiError("failed", f"{what}; see that it runs and lets you in")

    async def _until_lost(self) -> None:
        assert self._link is not None
        self._error = await self._link.lost()
        self.listener("", {})

    def check(self) -> None:
        """Raises ApiError once the connection is gone."""
        if self._error is not None:
            sentence = f"broker: {self._error}; run it again: what is done is not done twice"
            raise ApiError("failed", sentence)

    async def close(self) -> None:
        """Go; nothing stays behind on the broker."""
        tasks = [*self._sends, *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._link is not None:
            await self._link.close()

    async def discover(self, seconds: float) -> None:
        """Fill `statuses` and `states`: over when our own message comes back behind theirs."""
        assert self._link is not None
        try:
            for topic, qos in ((self._inbox, 1), (f"{self._site}/+/event", 1)):
                await self._link.listen(topic, qos)
            for name in ("status", "state"):  # QoS 0: no broker's queue is too short for them
                await self._link.listen(f"{self._site}/+/{name}", 0)
            await self._mark(seconds)
        except LinkError as error:
            raise self._unusable(error) from None

    async def _mark(self, seconds: float) -> None:
        """Until our own message is back, behind what was there before it."""
        assert self._link is not None
        self._marked.clear()
        await self._link.send(Item(self._inbox, b'{"id":"mark"}'))
        await waiting.ended(self._marked, seconds)

    async def sites(self, seconds: float = 2.0) -> set[str]:
        """Sites with a device, as far as the broker lets this user see them."""
        assert self._link is not None
        with contextlib.suppress(LinkError):  # a broker may refuse, or end the connection
            await self._link.listen(f"{ROOT}/+/+/status", 0)
            await self._mark(seconds)
        return set(self._sites)

    def send(self, device: str, method: str, params: Mapping[str, Any], handler: Handler) -> None:
        """Send a command; every reply to it goes to the handler."""
        self._number += 1
        ident = f"{self._client}-{self._number}"
        self._handlers[ident] = handler
        body = {"id": ident, "params": dict(params), "reply_to": self._inbox}
        item = Item(f"{self._site}/{device}/cmd/{method}", encode(body))
        task = asyncio.create_task(self._send(item))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(self, item: Item) -> None:
        assert self._link is not None
        async with self._room:
            with contextlib.suppress(LinkError):  # whoever waits sees the connection's end
                await self._link.send(item)

    async def ask(
        self, device: str, method: str, params: Mapping[str, Any], seconds: float
    ) -> Mapping[str, Any] | None:
        """The final reply, or None after so many seconds."""
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()

        def take(reply: Mapping[str, Any]) -> None:
            if not answer.done() and ("result" in reply or "error" in reply):
                answer.set_result(reply)

        self.send(device, method, params, take)
        try:
            return await waiting.within(seconds, answer)
        except TimeoutError:
            self.check()
            return None

    def _receive(self, arrived: Arrived) -> None:
        try:
            value = strict_object(arrived.payload) if arrived.payload else {}
        except Refusal:
            return
        if arrived.topic == self._inbox:
            self._replied(value)
            return
        if not arrived.topic.startswith(f"{self._site}/"):
            if arrived.payload:
                self._sites.add(arrived.topic.removeprefix(f"{ROOT}/").partition("/")[0])
            return
        device, _, name = arrived.topic.removeprefix(f"{self._site}/").partition("/")
        if name == "event" and not arrived.retain:
            self.listener(device, value)
        elif name in ("status", "state"):
            table = self.statuses if name == "status" else self.states
            table[device] = value
            if not arrived.payload:  # somebody removed a device for good
                del table[device]

    def _replied(self, value: dict[str, Any]) -> None:
        if value.get("id") == "mark":
            self._marked.set()
            return
        handler = self._handlers.get(str(value.get("id")))
        if handler is not None:
            handler(value)
