"""Commands over MQTT without a broker: reading, refusing, duplicates, what waits, how it retries.

The daemon is a stand-in here (broker.FakeService): its methods are tested elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from broker import FakeService
from gemctl.config import MqttConfig
from gemctl.errors import ApiError, Code
from gemctl.events import EventHub
from gemctl.mqtt.bridge import Backoff, device_name
from gemctl.mqtt.commands import (
    LOCAL,
    METHODS,
    MOST_BYTES,
    READ,
    WRITE,
    Answer,
    Arrived,
    Command,
    Refusal,
    Topics,
    read,
    strict_object,
)
from gemctl.mqtt.discovery import announcement, document
from gemctl.mqtt.dispatch import RUNNING, RUNNING_SLOW, Dispatcher, encode
from gemctl.mqtt.loss import LossGuard
from gemctl.mqtt.outbox import Item, Outbox
from gemctl.mqtt.replies import Replies
from gemctl.service import Caller, Emit
from gemctl.strict import DEPTH

ROOT = Path(__file__).resolve().parents[2]
TOPICS = Topics("plant", "m1", ("line4",))
BASE = "gemctl/v1/plant/m1"
NOW = 1_800_000_000.0


def sent(verb: str, body: Mapping[str, Any] | bytes, **more: Any) -> Arrived:
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Arrived(f"{BASE}/cmd/{verb}", payload, **more)


def refusal(arrived: Arrived) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read(TOPICS, arrived, NOW)
    return caught.value


# Reading


@pytest.mark.parametrize("verb", ["model.switch", "model/switch"])
@pytest.mark.parametrize("place", [BASE, "gemctl/v1/plant/group/line4"])
def test_a_verb_names_a_method(verb: str, place: str) -> None:
    body = b'{"id": "17", "params": {"name": "a"}}'
    command = read(TOPICS, Arrived(f"{place}/cmd/{verb}", body), NOW)
    assert (command.method, command.params) == ("model.switch", {"name": "a"})
    assert command.answer == Answer(f"{BASE}/reply/17", "17")


def test_methods_are_those_of_the_daemon() -> None:
    """Whoever adds a method to the daemon decides here what it is over MQTT."""
    from gemctl import api

    assert {name: name in WRITE for name in METHODS} == {
        name: method.write for name, method in api.METHODS.items() if name not in LOCAL
    }
    assert not READ & WRITE
    assert LOCAL == {"model.stage"} == api.METHODS.keys() - METHODS
    error = refusal(sent("model.stage", {"id": 1, "params": {"name": "a"}}))
    assert (error.code, error.reason) == ("not_found", "unknown")
    assert "no file travels over MQTT" in error.message
    for method in METHODS:
        assert read(TOPICS, sent(method, {"id": 1}), NOW).method == method


def test_the_document_says_what_is_so() -> None:
    """Its commands are commands, its replies are where they would be, its methods are all."""
    text = (ROOT / "gemctl" / "MQTT.md").read_text(encoding="utf-8")
    examples = re.findall(r"^(gemctl/v1/\S+) +(\{.*\})$", text, re.M)
    answers: set[str] = set()
    for topic, payload in examples:
        if "/cmd/" in topic:
            answers.add(read(TOPICS, Arrived(topic, payload.encode()), NOW - 10).answer.topic)
        else:
            assert topic in answers
            assert strict_object(payload.encode())["device"] == "m1"
    assert len(answers) == 4
    reads, writes = re.findall(r"^\| (`stats` .*) \| (`model.load` .*) \|$", text, re.M)[0]
    assert set(reads.replace("`", "").split()) == READ
    assert set(writes.replace("`", "").split()) == WRITE


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (b"", "JSON"),
        (b"[]", "not an object"),
        (b"{", "JSON"),
        (b'{"id":"1","id":"2"}', "twice"),
        (b'{"id":"1","params":{"a":1,"a":1}}', "twice"),
        (b'{"id":"1","params":{"a":NaN}}', "NaN"),
        (b'{"id":"1","params":{"a":-Infinity}}', "Infinity"),
        (b'{"id":"1","params":{"a":1e999}}', "too large"),
        (b'{"id":"1","params":{"a":' + b"9" * 21 + b"}}", "digits"),
        (b'{"id":"1","params":{"a":' + b"[" * 20 + b"]" * 20 + b"}}", "deeper"),
        (b'{"id":"1","params":{"a":"\\ud800"}}', "UTF-8"),
        (b'{"id":"1","params":{"a":"\xff"}}', "UTF-8"),
        (b'\xef\xbb\xbf{"id":"1"}', "BOM"),
        (b'{"id":"1","more":1}', "more"),
        (b'{"id":"1","v":2}', "v"),
        (b'{"id":true}', "id"),
        (b'{"id":1.5}', "id"),
        (b'{"id":""}', "id"),
        (b'{"id":"a b"}', "id"),
        (b'{"id":"../x"}', "id"),
        (b'{"id":"_"}', "id"),
        (b'{"id":"' + b"a" * 65 + b'"}', "id"),
        (b'{"id":-1}', "id"),
        (b'{"id":"1","params":[]}', "params"),
        (b'{"id":"1","stream":1}', "stream"),
        (b'{"id":"1","expires_at":"soon"}', "expires_at"),
        (b'{"id":"1","expires_at":true}', "expires_at"),
        (b'{"id":"1","reply_to":7}', "reply_to"),
    ],
)
def test_payloads_are_strict(payload: bytes, what: str) -> None:
    error = refusal(sent("stats", payload))
    assert (error.code, error.reason) == ("bad_request", "garbage")
    assert what in error.message
    assert ";" in error.message


def test_payloads_are_bounded() -> None:
    text = "a" * (MOST_BYTES - 40)
    assert strict_object(json.dumps({"a": text}).encode())["a"] == text
    error = refusal(sent("stats", b'{"id":"' + b"a" * MOST_BYTES + b'"}'))
    assert (error.reason, error.code) == ("oversize", "bad_request")
    deepest = b'{"a":' * DEPTH + b"1" + b"}" * DEPTH
    assert strict_object(deepest)
    with pytest.raises(Refusal, match="deeper"):
        strict_object(b'{"a":' + deepest + b"}")
    assert strict_object(b'{"a":"[[[[[[[[[[[[[[[[[[[[[[\\"[[["}')


@pytest.mark.parametrize(
    "payload",
    [
        b'"' + b'\\"' * 32000,  # quotes that never close
        b'"' + b'\\"' * 32000 + b"\\",
        b"[" * MOST_BYTES,
        b'{"a":' * 13000,
        b'{"":' * 10 + b"9" * 60000,
        b"[]" * (MOST_BYTES // 2),
        b"[" + b"1," * 32000,
        b'"' * MOST_BYTES,
        b"\\" * MOST_BYTES,
    ],
)
def test_no_payload_takes_long(payload: bytes) -> None:
    """Linear: 64 KiB take milliseconds. The bound is a thousand times that, for slow machines."""
    before = time.process_time()
    with pytest.raises(Refusal):
        strict_object(payload)
    assert time.process_time() - before < 5


@given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_a_command_or_a_refusal(payload: bytes) -> None:
    answer: Answer | None
    try:
        answer = read(TOPICS, sent("model/switch", payload), NOW).answer
    except Refusal as error:
        answer = error.answer
    assert answer is not None
    assert TOPICS.may_answer(answer.topic)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**18), 10**18)
        | st.text()
        | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
@settings(max_examples=100, deadline=None)
def test_what_json_says_is_what_is_read(value: Any) -> None:
    """A plain value comes through as it was, unless it is too deep or not UTF-8."""
    try:
        assert strict_object(json.dumps({"a": value}).encode()) == {"a": value}
    except Refusal as error:
        if "deeper" not in error.message and "UTF-8" not in error.message:
            raise


# Where replies go


@pytest.mark.parametrize(
    ("topic", "allowed"),
    [
        (f"{BASE}/reply/x", True),
        (f"{BASE}/reply/x/y", True),
        ("gemctl/v1/plant/reply/server7", True),
        ("scada/answers/x", True),  # below the configured prefix
        (f"{BASE}/reply/", False),
        (f"{BASE}/reply", False),
        (f"{BASE}/cmd/model.unload", False),
        (f"{BASE}/status", False),
        (f"{BASE}/state", False),
        (f"{BASE}/event", False),
        ("gemctl/v1/plant/m2/cmd/model.unload", False),
        ("gemctl/v1/plant/m2/reply/x", False),
        ("gemctl/v1/plant/group/line4/cmd/stats", False),
        ("gemctl/v1/other/reply/x", False),
        ("gemctl/v1/plant/reply/+", False),
        ("gemctl/v1/plant/reply/#", False),
        ("gemctl/v1/plant/reply//x", False),
        ("gemctl/v1/plant/reply/x\0", False),
        ("gemctl/v1/plant/reply/" + "x" * 300, False),
        ("$SYS/x", False),
        ("scada/answers", False),
        ("/x", False),
        ("", False),
    ],
)
def test_replies_go_only_to_places_for_replies(topic: str, allowed: bool) -> None:
    topics = Topics("plant", "m1", ("line4",), "scada/answers/")
    assert topics.may_answer(topic) is allowed
    if topic:
        for arrived in (
            sent("stats", {"id": "1", "reply_to": topic}),
            sent("stats", {"id": "1"}, response_topic=topic),
        ):
            if allowed:
                assert read(topics, arrived, NOW).answer.topic == topic
            else:
                with pytest.raises(Refusal) as caught:
                    read(topics, arrived, NOW)
                assert caught.value.code == "forbidden"
                assert caught.value.answer == Answer(f"{BASE}/reply/1", "1")


def test_the_response_topic_comes_before_reply_to() -> None:
    body = {"id": 7, "reply_to": "gemctl/v1/plant/reply/b"}
    arrived = sent("stats", body, response_topic="gemctl/v1/plant/reply/a", correlation=b"\x01")
    answer = read(TOPICS, arrived, NOW).answer
    assert answer == Answer("gemctl/v1/plant/reply/a", 7, b"\x01")
    assert read(TOPICS, sent("stats", body), NOW).answer.topic == "gemctl/v1/plant/reply/b"


def test_a_command_that_changes_something_has_an_id() -> None:
    assert refusal(sent("model.unload", {})).reason == "no_id"
    assert read(TOPICS, sent("model.unload", {}, correlation=b"\0\xff"), NOW).key == "c00ff"
    assert read(TOPICS, sent("stats", {}), NOW).answer == Answer(f"{BASE}/reply/_")
    assert refusal(sent("stats", {}, correlation=b"x" * 257)).reason == "garbage"


def test_expiry() -> None:
    assert refusal(sent("stats", {"id": "1", "expires_at": NOW})).code == "timeout"
    assert refusal(sent("stats", {"id": "1"}, expiry_s=0)).reason == "expired"
    assert read(TOPICS, sent("stats", {"id": "1", "expires_at": NOW + 0.5}, expiry_s=3), NOW)


@pytest.mark.parametrize("verb", ["", "x", "Model.switch", "model..switch", "stats/", "a" * 500])
def test_unknown_verbs(verb: str) -> None:
    error = refusal(sent(verb, {"id": "1"}))
    assert (error.code, error.reason) == ("not_found", "unknown")
    assert len(error.message) < 100


@pytest.mark.parametrize("name", ["group", "reply"])
def test_levels_of_the_site_are_no_devices(name: str) -> None:
    with pytest.raises(ValidationError, match="another name"):
        MqttConfig(device=name)


def test_the_host_names_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "orin.nano/7 + #")
    assert device_name(MqttConfig()) == "orin-nano-7----"


# Carrying out


class Bench:
    """A dispatcher with its own clock, and what it would publish."""

    def __init__(self, write: bool = True, **replies: int) -> None:
        self.now = 0.0
        self.hub = EventHub(clock=lambda: NOW)
        self.service = FakeService(self.hub)
        self.outbox = Outbox()
        self.replies = Replies(600, lambda: self.now, **replies)
        self.dispatcher = Dispatcher(
            *(TOPICS, self.service, self.hub, self.outbox, write, self.replies),
            clock=lambda: NOW + self.now,
            monotonic=lambda: self.now,
        )

    async def ask(self, verb: str, body: Mapping[str, Any] | bytes, **more: Any) -> list[Any]:
        """Send one command, let it end, and return the replies."""
        self.dispatcher.receive(sent(verb, body, **more))
        for _ in range(8):
            await asyncio.sleep(0)
        return self.published()

    def published(self) -> list[Any]:
        found = []
        while taken := self.outbox.take():
            found.append({"topic": taken[1].topic, **json.loads(taken[1].payload)})
            self.outbox.landed(taken[0])
        return found

    def reasons(self) -> list[str]:
        return [e.fields["reason"] for e in self.hub.recent() if e.kind == "mqtt.refused"]


def test_a_quick_command_is_answered_once() -> None:
    async def body() -> None:
        bench = Bench()
        [reply] = await bench.ask("throttle.set", {"id": "1", "params": {"temp_c": 75}})
        assert reply["topic"] == f"{BASE}/reply/1"
        assert (reply["v"], reply["id"], reply["device"]) == (1, "1", "m1")
        assert reply["result"]["params"] == {"temp_c": 75}
        _, _, caller = bench.service.calls[0]
        assert (caller.source, caller.may_write, caller.name) == ("mqtt", True, "1 (mqtt)")

    asyncio.run(body())


def test_a_long_command_is_accepted_and_then_answered() -> None:
    async def body() -> None:
        bench = Bench()
        first, last = await bench.ask("model.switch", {"id": 2, "params": {"name": "a"}})
        assert first["accepted"] is True
        assert last["result"]["method"] == "model.switch"
        assert first["id"] == last["id"] == 2

    asyncio.run(body())


def test_generate_answers_in_one_reply_or_in_pieces_too() -> None:
    async def body() -> None:
        bench = Bench()
        [reply] = await bench.ask("generate", {"id": "1", "params": {"prompt": "go"}})
        assert reply["result"] == {"text": "turn left."}
        replies = await bench.ask("generate", {"id": "2", "stream": True, "params": {"prompt": ""}})
        assert [r["event"]["text"] for r in replies[:-1]] == ["turn", " left", "."]
        assert replies[-1]["result"]["text"] == "turn left."

    asyncio.run(body())


def test_retained_commands_are_dropped_counted_and_told() -> None:
    async def body() -> None:
        bench = Bench()
        for number in range(5):
            assert not await bench.ask("model.switch", {"id": number}, retain=True)
        assert not await bench.ask("model.switch", b"")
        assert bench.service.calls == []
        assert bench.dispatcher.counts["retained"] == 5
        assert bench.reasons() == ["retained"]  # at most one a second
        bench.now = 1.5
        await bench.ask("model.switch", {"id": 9}, retain=True)
        assert bench.hub.recent()[-1].fields == {"reason": "retained", "count": 6}

    asyncio.run(body())


def test_a_duplicate_is_answered_and_not_done_again() -> None:
    async def body() -> None:
        bench = Bench()
        command = {"id": "9", "params": {"name": "a"}}
        first = await bench.ask("model.rollback", command)
        for number in range(10):
            answer = f"gemctl/v1/plant/reply/{number}"
            [again] = await bench.ask("model.rollback", command, response_topic=answer)
            assert again["topic"] == answer
            assert again["result"] == first[-1]["result"]
        assert bench.service.asked("model.rollback") == 1
        bench.now = 599
        await bench.ask("model.rollback", command)
        assert bench.service.asked("model.rollback") == 1
        bench.now = 601
        await bench.ask("model.rollback", command)
        assert bench.service.asked("model.rollback") == 2

    asyncio.run(body())


def test_a_duplicate_of_a_running_command_waits_for_its_end() -> None:
    async def body() -> None:
        bench = Bench()
        bench.service.gate = asyncio.Event()
        for number in range(20):
            answer = f"gemctl/v1/plant/reply/{number % 6}"
            replies = await bench.ask("generate", {"id": "1"}, response_topic=answer)
            assert replies == []
        bench.service.gate.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(bench.published()) == 4  # places that are told
        assert bench.service.asked("generate") == 1

    asyncio.run(body())


def test_an_id_with_other_content_is_no_duplicate() -> None:
    async def body() -> None:
        bench = Bench()
        await bench.ask("model.switch", {"id": "1", "params": {"name": "a"}})
        [reply] = await bench.ask("model.switch", {"id": "1", "params": {"name": "b"}})
        assert reply["error"]["code"] == "conflict"
        assert bench.service.asked("model.switch") == 1

    asyncio.run(body())


def test_reading_is_never_answered_from_the_past() -> None:
    async def body() -> None:
        bench = Bench()
        for _ in range(3):
            await bench.ask("stats", {"id": "same"})
        assert bench.service.asked("stats") == 3

    asyncio.run(body())


def test_what_can_be_tried_again_is_not_remembered() -> None:
    async def body() -> None:
        bench = Bench()
        plain = bench.service.call

        async def busy(*args: Any) -> dict[str, Any]:
            raise ApiError("busy", "smollm: 64 requests wait; try later")

        bench.service.call = busy  # type: ignore[method-assign]
        [reply] = await bench.ask("generate", {"id": "1"})
        assert reply["error"]["retryable"] is True
        bench.service.call = plain  # type: ignore[method-assign]
        [reply] = await bench.ask("generate", {"id": "1"})
        assert "result" in reply

    asyncio.run(body())


@pytest.mark.parametrize(
    ("code", "word"),
    [("not_found", "rejected"), ("bad_request", "rejected"), ("conflict", "rejected"),
     ("cancelled", "rejected"), ("failed", "failed"), ("no_memory", "failed"),
     ("refused", "failed"), ("timeout", "failed")],
)  # fmt: skip
def test_what_became_of_a_command_is_counted(code: Code, word: str) -> None:
    """What the caller did wrong is no failure of the device."""

    async def body() -> None:
        bench = Bench()
        await bench.ask("stats", {"id": "1"})

        async def wrong(*args: Any) -> dict[str, Any]:
            raise ApiError(code, "x: no; try later")

        bench.service.call = wrong  # type: ignore[method-assign]
        await bench.ask("stats", {"id": "2"})
        counts = bench.dispatcher.counts
        assert {key: counts[key] for key in ("done", "rejected", "failed")} == {
            "done": 1, "rejected": 0, "failed": 0, word: 1,
        }  # fmt: skip

    asyncio.run(body())


def test_memory_of_replies_is_bounded_and_nothing_is_done_twice() -> None:
    async def body() -> None:
        bench = Bench(count=100, most_bytes=5000)
        for number in range(150):
            await bench.ask("throttle.set", {"id": number, "params": {"temp_c": 70}})
        assert len(bench.replies) == 100
        assert bench.replies.size <= 5000
        [reply] = await bench.ask("throttle.set", {"id": 60, "params": {"temp_c": 70}})
        assert reply["error"]["code"] == "conflict"
        assert "no longer kept" in reply["error"]["message"]
        assert bench.service.asked("throttle.set") == 150
        bench.now = 700
        await bench.ask("throttle.set", {"id": 500, "params": {}})
        assert len(bench.replies) == 1

    asyncio.run(body())


def test_without_write_only_reading_is_done() -> None:
    async def body() -> None:
        bench = Bench(write=False)
        for method in sorted(WRITE):
            [reply] = await bench.ask(method, {"id": "1"})
            assert reply["error"]["code"] == "forbidden"
        assert bench.service.calls == []
        for number, method in enumerate(sorted(READ)):
            [reply] = await bench.ask(method, {"id": f"r{number}"})
            assert reply.get("error", {}).get("code") != "forbidden"
        assert not any(caller.may_write for _, _, caller in bench.service.calls)

    asyncio.run(body())


def test_slow_commands_leave_room_for_quick_ones() -> None:
    async def body() -> None:
        bench = Bench()
        bench.service.gate = asyncio.Event()
        for number in range(RUNNING + 10):
            await bench.ask("generate", {"id": f"g{number}"})
        assert bench.service.asked("generate") == RUNNING_SLOW
        assert bench.dispatcher.counts["busy"] == RUNNING + 10 - RUNNING_SLOW
        [reply] = await bench.ask("throttle.set", {"id": "t"})
        assert "result" in reply
        replies = await bench.ask("cancel", {"id": "c", "params": {"id": "g3"}})
        assert [reply["id"] for reply in replies] == ["c", "g3"]
        assert replies[0]["result"] == {"cancelled": "g3"}
        assert replies[1]["error"]["code"] == "cancelled"
        await bench.dispatcher.close()
        rest = bench.published()
        assert len(rest) == RUNNING_SLOW - 1
        assert {reply["error"]["code"] for reply in rest} == {"cancelled"}

    asyncio.run(body())


def test_cancel_before_the_first_step_is_answered_too() -> None:
    async def body() -> None:
        bench = Bench()
        bench.dispatcher.receive(sent("generate", {"id": "g"}))
        bench.dispatcher.receive(sent("cancel", {"id": "c", "params": {"id": "g"}}))
        for _ in range(5):
            await asyncio.sleep(0)
        replies = {r["id"]: r for r in bench.published()}
        assert replies["g"]["error"]["code"] == "cancelled"
        assert replies["c"]["result"] == {"cancelled": "g"}
        assert bench.service.calls == []
        [reply] = await bench.ask("cancel", {"id": "d", "params": {"id": "gone"}})
        assert reply["result"]["method"] == "cancel"  # it may be known to the daemon

    asyncio.run(body())


def test_faults_tell_nothing_of_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeService):
        async def call(
            self, method: str, params: Mapping[str, Any], caller: Caller, emit: Emit | None = None
        ) -> dict[str, Any]:
            raise KeyError(params["prompt"])

    async def body() -> None:
        bench = Bench()
        bench.dispatcher._service = Broken(bench.hub)
        [reply] = await bench.ask("generate", {"id": "1", "params": {"prompt": "SECRET"}})
        assert reply["error"]["code"] == "internal"
        assert "SECRET" not in json.dumps(reply)
        assert "SECRET" not in str([event.as_dict() for event in bench.hub.recent()])

    with caplog.at_level(logging.DEBUG):
        asyncio.run(body())
    assert "KeyError" in caplog.text
    assert "SECRET" not in caplog.text


def test_no_text_of_a_prompt_in_events_or_logs(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        bench = Bench()
        for text in ("SECRET", "SECRET\ud800"):
            await bench.ask("generate", {"id": "1", "params": {"prompt": text}})
        await bench.ask("generate", {"id": "2", "SECRET": 1})
        await bench.ask("SECRET", {"id": "3"})
        assert "SECRET" not in str([event.as_dict() for event in bench.hub.recent()])

    with caplog.at_level(logging.DEBUG):
        asyncio.run(body())
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    ("result", "code"),
    [
        ({"x": "y" * MOST_BYTES}, "failed"),
        ({"x": float("nan")}, "internal"),
        ({"x": {1}}, "internal"),
    ],
)
def test_results_that_cannot_be_sent(result: dict[str, Any], code: str) -> None:
    async def body() -> None:
        bench = Bench()

        async def call(*args: Any) -> dict[str, Any]:
            return result

        bench.service.call = call  # type: ignore[method-assign]
        [reply] = await bench.ask("stats.history", {"id": "1"})
        assert reply["error"]["code"] == code

    asyncio.run(body())


def test_events_can_be_asked_for_afterwards() -> None:
    async def body() -> None:
        bench = Bench()
        for number in range(900):
            bench.hub.publish("slot.state", model="m" * 60, number=number)
        [reply] = await bench.ask("events.follow", {"id": "1", "params": {"after": 100}})
        events = reply["result"]["events"]
        assert events[0]["seq"] == 101
        assert reply["result"]["more"] is True
        [reply] = await bench.ask("events.follow", {"id": "2", "params": {"after": 899}})
        assert [event["seq"] for event in reply["result"]["events"]] == [900]
        assert reply["result"]["more"] is False
        for params in ({"after": "x"}, {"after": True}, {"more": 1}):
            [reply] = await bench.ask("events.follow", {"id": "3", "params": params})
            assert reply["error"]["code"] == "bad_request"

    asyncio.run(body())


# What waits


def item(number: int, size: int = 1, queue: str = "event", **more: Any) -> Item:
    return Item(f"t{number}", bytes([number % 256]) * size, queue=queue, **more)


def taken(outbox: Outbox) -> list[str]:
    found = []
    while one := outbox.take():
        found.append(one[1].topic)
        outbox.landed(one[0])
    return found


def test_the_oldest_events_are_lost_and_counted() -> None:
    outbox = Outbox(events=10, most_bytes=1000)
    for number in range(25):
        outbox.put(item(number))
    assert outbox.queues["event"].lost == 15
    assert taken(outbox) == [f"t{number}" for number in range(15, 25)]
    for number in range(5):
        outbox.put(item(number, 400))
    assert taken(outbox) == ["t3", "t4"]
    assert not outbox.put(item(1, MOST_BYTES + 1))
    assert outbox.refused_size == 1
    assert outbox.empty


def test_what_was_under_way_goes_out_again_first() -> None:
    outbox = Outbox()
    outbox.put(item(0, queue="", retain=True))
    outbox.put(item(1, queue="", qos=0))
    for number in range(2, 6):
        outbox.put(item(number))
    flying = [outbox.take() for _ in range(5)]
    assert flying[2] is not None
    outbox.landed(flying[2][0])  # t2
    outbox.put_back()
    assert taken(outbox) == ["t0", "t3", "t4", "t5"]  # figures are not sent late


def test_a_newer_value_replaces_an_older_one() -> None:
    outbox = Outbox()
    for payload in (b"old", b"new"):
        outbox.put(Item("state", payload, retain=True, queue=""))
    first = outbox.take()
    assert first is not None
    assert first[1].payload == b"new"
    outbox.put(Item("state", b"newest", retain=True, queue=""))
    outbox.put_back()
    second = outbox.take()
    assert second is not None
    assert second[1].payload == b"newest"
    assert outbox.take() is None


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_delays_double_up_to_a_minute(chance: float) -> None:
    backoff = Backoff(chance=lambda: chance)
    delays = [backoff.next() for _ in range(200)]
    tops = [min(2.0**n, 60.0) for n in range(1, 201)]
    assert delays == [1 + (top - 1) * chance for top in tops]
    assert all(1 <= delay <= 60 for delay in delays)
    backoff.reset()
    assert backoff.next() <= 2


# Home Assistant, and the loss of the broker


def test_discovery_names_what_stats_and_state_hold() -> None:
    value = document(TOPICS, 16)
    stats = FakeService(EventHub()).stats()
    for sensor in value["cmps"].values():
        path = sensor["value_template"].removeprefix("{{ value_json.").removesuffix(" }}")
        inner: Any = stats
        for key in path.split("."):
            inner = inner[key]
        assert inner is not None
        assert sensor["unique_id"].startswith("gemctl-plant-m1-")
    assert len({sensor["unique_id"] for sensor in value["cmps"].values()}) == 4
    wanted, unwanted = announcement(TOPICS, True, 16), announcement(TOPICS, False, 16)
    assert wanted.topic == unwanted.topic == "homeassistant/device/gemctl-plant-m1/config"
    assert wanted.retain
    assert unwanted.retain
    assert json.loads(wanted.payload) == value
    assert unwanted.payload == b""


async def _lose(mode: str, meanwhile: Callable[[FakeService], None]) -> list[tuple[str, Any]]:
    service = FakeService(EventHub(), mode=mode)
    up, down = asyncio.Event(), asyncio.Event()
    down.set()
    task = asyncio.create_task(LossGuard(service, up, down, grace_s=0.0).run())
    for _ in range(50):
        await asyncio.sleep(0.001)
    meanwhile(service)
    down.clear()
    up.set()
    for _ in range(20):
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return [(name, params.get("mode")) for name, params, _ in service.calls if "set" in name]


def test_conservative_while_the_broker_is_lost() -> None:
    asked = asyncio.run(_lose("balanced", lambda service: None))
    assert asked == [("throttle.set", "conservative"), ("throttle.set", "balanced")]


def test_a_mode_chosen_meanwhile_stays() -> None:
    def choose(service: FakeService) -> None:
        service.mode = "silent"

    assert asyncio.run(_lose("balanced", choose)) == [("throttle.set", "conservative")]
    assert asyncio.run(_lose("conservative", lambda service: None)) == []


def test_encode_is_plain_json() -> None:
    assert encode({"a": "ü", "b": None}) == '{"a":"ü","b":null}'.encode()
    for bad in ({"a": float("nan")}, {"a": {1}}, {"a": "\ud800"}):
        with pytest.raises((TypeError, ValueError)):
            encode(bad)


def test_a_command_without_an_id_that_reads_is_not_remembered() -> None:
    command = read(TOPICS, sent("stats", {}), NOW)
    assert isinstance(command, Command)
    assert command.key == ""
