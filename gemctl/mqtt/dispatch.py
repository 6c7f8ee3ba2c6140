"""From a command that arrives to its reply: refuse, answer again, or carry out.

Called from the event loop by whoever holds the connection; knows no broker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from gemctl.errors import BY_CALLER, ApiError
from gemctl.events import EventHub
from gemctl.mqtt.commands import (
    LONG,
    MOST_BYTES,
    SLOW,
    WRITE,
    Answer,
    Arrived,
    Command,
    Refusal,
    Topics,
    read,
)
from gemctl.mqtt.outbox import Item, Outbox
from gemctl.mqtt.replies import Entry, Replies
from gemctl.service import Caller, Emit, Service

RUNNING = 32  # commands at once
RUNNING_SLOW = 24  # of these, ones that take long
ANSWERS = 4  # places that one command may be answered at
NOTE_S = 1.0  # between two events of the same reason

_LOG = logging.getLogger("gemctl.mqtt")


def encode(value: dict[str, Any]) -> bytes:
    """JSON without spaces. Raises ValueError or TypeError where it has no plain JSON form."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8")


def _error(code: Any, message: str) -> dict[str, Any]:
    return {"error": ApiError(code, message).as_dict()}


def _became(body: dict[str, Any]) -> str:
    """What became of a command that was carried out, in the word that counts it."""
    if "error" not in body:
        return "done"
    return "rejected" if body["error"]["code"] in BY_CALLER else "failed"


def _cancelled(command: Command) -> dict[str, Any]:
    return _error("cancelled", f"{command.method}: cancelled; send it again if it is wanted")


def _fault(error: Exception) -> dict[str, Any]:
    """Reply and log line for a fault of ours. The message may hold a prompt: it goes nowhere."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" at {last[0].name}:{last[0].lineno}" if last else ""
    _LOG.error("gemctld: mqtt: %s%s; report it as a bug", type(error).__name__, where)
    return _error("internal", "gemctld: a fault of its own; see its log")


class Dispatcher:
    """Carries out what arrives. `counts`: what came in and what became of it, by word."""

    def __init__(
        self,
        topics: Topics,
        service: Service,
        hub: EventHub,
        outbox: Outbox,
        write: bool,
        replies: Replies,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._topics, self._service, self._hub, self._outbox = topics, service, hub, outbox
        self._write, self._replies = write, replies
        self._clock, self._monotonic = clock, monotonic
        self._tasks: dict[asyncio.Task[None], Command] = {}
        self._noted: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def receive(self, arrived: Arrived) -> None:
        """Take a message from a command topic. Never waits, never raises."""
        try:
            self._receive(arrived)
        except Exception as error:
            _fault(error)

    def _receive(self, arrived: Arrived) -> None:
        if not arrived.payload and not arrived.response_topic:  # a retained command is removed
            self.counts["empty"] += 1
            return
        self.counts["arrived"] += 1
        if arrived.retain:
            self.note("retained")
            return
        try:
            command = read(self._topics, arrived, self._clock())
            if command.method in WRITE and not self._write:
                sentence = f"{command.method}: mqtt.write is off; use the device's own gemctl"
                raise Refusal("forbidden", sentence, "forbidden")
            entry = self._replies.find(command.key) if command.method in WRITE else None
            if entry is not None:
                self._again(command, entry)
            else:
                self._admit(command)
        except Refusal as refusal:
            self.note(refusal.reason)
            answer = refusal.answer or command.answer
            self._reply(answer, {"error": refusal.as_dict()})

    def note(self, reason: str) -> None:
        """Count a refusal; at most one event a second tells of each reason."""
        self.counts[reason] += 1
        now = self._monotonic()
        if now - self._noted.get(reason, float("-inf")) >= NOTE_S:
            self._noted[reason] = now
            self._hub.publish("mqtt.refused", reason=reason, count=self.counts[reason])

    def _again(self, command: Command, entry: Entry) -> None:
        """The id is known: tell what became of it."""
        if entry.content != command.content:
            sentence = f"{command.method}: its id belongs to another command; choose a new id"
            raise Refusal("conflict", sentence, "id_reused")
        self.counts["duplicate"] += 1
        if entry.running:
            if command.answer not in entry.answers and len(entry.answers) < ANSWERS:
                entry.answers.append(command.answer)
            if command.method in LONG:
                self._reply(command.answer, {"accepted": True})
        elif entry.body is None:
            sentence = f"{command.method}: done before, its reply is no longer kept; ask for stats"
            raise Refusal("conflict", sentence, "reply_gone")
        else:
            self._reply(command.answer, entry.body)

    def _admit(self, command: Command) -> None:
        if command.method == "events.follow":
            self._reply(command.answer, self._events(command.params))
            return
        if command.method == "cancel" and (body := self._cancel(command)):
            self._finish(command, self._replies.begin(command), body)
            return
        slow = sum(running.method in SLOW for running in self._tasks.values())
        if len(self._tasks) >= RUNNING or (command.method in SLOW and slow >= RUNNING_SLOW):
            sentence = f"{command.method}: {len(self._tasks)} commands run already; try later"
            raise Refusal("busy", sentence, "busy")
        entry = self._replies.begin(command) if command.method in WRITE else None
        if command.method in LONG:
            self._reply(command.answer, {"accepted": True})
        task = asyncio.get_running_loop().create_task(self._run(command, entry))
        self._tasks[task] = command
        task.add_done_callback(lambda done: self._ended(done, command, entry))

    def _ended(self, task: asyncio.Task[None], command: Command, entry: Entry | None) -> None:
        del self._tasks[task]
        if task.cancelled():  # before its first step, so that it could say nothing
            self._finish(command, entry, _cancelled(command))

    def _cancel(self, command: Command) -> dict[str, Any] | None:
        """End one of the commands that came this way; None where it is none of them."""
        wanted = command.params.get("id")
        for task, running in self._tasks.items():
            if running.answer.ident is not None and running.answer.ident == wanted:
                task.cancel()
                return {"result": {"cancelled": wanted}}
        return None

    def _events(self, params: dict[str, Any]) -> dict[str, Any]:
        """Events that are still kept, as far as they fit into one reply; no stream over MQTT."""
        after = params.get("after", 0)
        if (
            not isinstance(after, int)
            or isinstance(after, bool)
            or params.keys() - {"after", "follow"}
        ):
            return _error(
                "bad_request", "events.follow: wants `after`, an event's seq; see MQTT.md"
            )
        kept: list[dict[str, Any]] = []
        room = MOST_BYTES - 1024
        recent = self._hub.recent(after)
        for event in recent:
            room -= len(encode(event.as_dict())) + 1
            if room < 0:
                break
            kept.append(event.as_dict())
        return {"result": {"events": kept, "more": len(kept) < len(recent)}}

    async def _run(self, command: Command, entry: Entry | None) -> None:
        body: dict[str, Any]
        try:
            caller = Caller(f"{command.answer.ident} (mqtt)", self._write, "mqtt")
            emit = self._emitter(command) if command.stream else None
            result = await self._service.call(command.method, command.params, caller, emit)
            body = {"result": result}
        except ApiError as error:
            if isinstance(error, Refusal):
                self.note(error.reason)
            body = {"error": error.as_dict()}
        except asyncio.CancelledError:
            body = _cancelled(command)
        except Exception as error:
            body = _fault(error)
        self._finish(command, entry, body)

    def _emitter(self, command: Command) -> Emit:
        """Sends the parts of a stream on. They never wait for the broker: the oldest are lost."""

        async def emit(part: dict[str, Any]) -> None:
            self._reply(command.answer, {"event": part})

        return emit

    def _finish(self, command: Command, entry: Entry | None, body: dict[str, Any]) -> None:
        self.counts[_became(body)] += 1
        if entry is None:
            self._reply(command.answer, body)
            return
        sent, size = body, 0
        for answer in entry.answers:
            sent, size = self._reply(answer, body)
        if sent.get("error", {}).get("retryable"):
            self._replies.forget(command.key, entry)
        else:
            self._replies.finish(command.key, entry, sent, size)

    def _reply(self, answer: Answer, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Queue a reply; returns what was sent in fact, and its bytes."""
        head = {"v": 1, "id": answer.ident, "device": self._topics.device}
        try:
            payload = encode({**head, **body})
        except (TypeError, ValueError) as error:
            body = _fault(error)
            payload = encode({**head, **body})
        if len(payload) > MOST_BYTES:
            sentence = f"reply: {len(payload)} bytes, MQTT carries {MOST_BYTES}; ask for less"
            body = _error("failed", f"{sentence}, or on the device")
            payload = encode({**head, **body})
        self.counts["replies"] += 1
        self._outbox.put(Item(answer.topic, payload, correlation=answer.correlation))
        return body, len(payload)

    async def close(self) -> None:
        """Cancel what still runs, and wait for its last words."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
