"""What both front ends refuse in the same words: ids, versions, halves of characters; and that a
refusal has the id of the command wherever that can be read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from broker import FakeService
from gemctl import server
from gemctl.events import EventHub
from gemctl.mqtt.commands import Answer, Arrived, Refusal, Topics, read
from gemctl.mqtt.dispatch import Dispatcher
from gemctl.mqtt.outbox import Outbox
from gemctl.mqtt.replies import Replies

TOPICS = Topics("plant", "m1")
BASE = "gemctl/v1/plant/m1"
NOW = 1_800_000_000.0
CONTROLS = ["\\u0000", "a\\nb", "\\r", "\\u007f", "\\u0085", "\\u2028"]


def refused(payload: bytes, method: str = "generate", **more: Any) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read(TOPICS, Arrived(f"{BASE}/cmd/{method}", payload, **more), NOW)
    return caught.value


def misread(line: bytes) -> server.Misread:
    with pytest.raises(server.Misread) as caught:
        server.parse_line(line)
    return caught.value


@pytest.mark.parametrize("half", ["\\ud800", "a\\udfffb", "\\ud83d\\u0041", "\\udc00\\ud800"])
def test_half_a_character(half: str) -> None:
    """UTF-8 it is; the sentence says what is wrong, and the id comes back."""
    error = refused(f'{{"id":"g-5","params":{{"prompt":"{half}"}}}}'.encode())
    assert error.message == (
        "payload: half of a surrogate pair in an escape; send whole characters in UTF-8"
    )
    assert error.answer == Answer(f"{BASE}/reply/g-5", "g-5")
    line = f'{{"id":"7","method":"generate","params":{{"prompt":"{half}"}}}}'.encode()
    wrong = misread(line)
    assert wrong.number == "7"
    assert wrong.message == error.message.replace("payload", "request")
    whole = b'{"id":"7","method":"generate","params":{"prompt":"\\ud83d\\ude00"}}'
    assert server.parse_line(whole)["params"]["prompt"] == "\N{GRINNING FACE}"


def test_half_a_character_elsewhere() -> None:
    """In a name, an id, a place for replies: what can be said back is."""
    error = refused(b'{"id":"1","params":{"\\ud800":1}}')
    assert "half of a surrogate pair" in error.message
    assert error.answer == Answer(f"{BASE}/reply/1", "1")
    error = refused(b'{"id":"\\ud800"}')
    assert error.answer == Answer(f"{BASE}/reply/_", None)
    error = refused(b'{"id":"1","reply_to":"gemctl/v1/plant/reply/\\ud800"}')
    assert error.answer == Answer(f"{BASE}/reply/1", "1")
    error = refused(b"\xff", "stats")
    assert error.message == "payload: not UTF-8; send UTF-8 text"


@pytest.mark.parametrize(
    "more",
    [b'"v":2', b'"v":true', b'"v":1.0', b'"v":"1"', b'"x":1', b'"params":[]', b'"stream":1',
     b'"expires_at":"soon"', b'"reply_to":7'],
)  # fmt: skip
def test_a_refusal_over_mqtt_has_its_id(more: bytes) -> None:
    for ident in ("17", "b-1"):
        said = f"{json.dumps(ident)}".encode()
        error = refused(b'{"id":' + said + b"," + more + b"}")
        assert error.answer == Answer(f"{BASE}/reply/{ident}", ident)
    error = refused(b'{"id":17,' + more + b"}", correlation=b"\x01")
    assert error.answer == Answer(f"{BASE}/reply/17", 17, b"\x01")
    for wrong in (b"true", b'"a b"', b'"../x"', b"-1", b"[1]", b'"_"'):
        error = refused(b'{"id":' + wrong + b"," + more + b"}")
        assert error.answer == Answer(f"{BASE}/reply/_", None)
    place = b'"reply_to":"gemctl/v1/plant/reply/a",'
    if b"reply_to" not in more:
        error = refused(b"{" + place + b'"id":1,' + more + b"}")
        assert error.answer == Answer("gemctl/v1/plant/reply/a", 1)
        error = refused(b"{" + place.replace(b"reply/a", b"m2/cmd") + b'"id":1,' + more + b"}")
        assert error.answer == Answer(f"{BASE}/reply/1", 1)


@pytest.mark.parametrize("version", ["true", "1.0", '"1"', "2", "null", "[1]"])
def test_the_version_is_a_whole_number(version: str) -> None:
    wrong = misread(f'{{"v":{version},"id":"7","method":"stats"}}'.encode())
    assert wrong.number == "7"
    assert wrong.message == f"request: version {version}; this daemon speaks 1"
    assert "v: " in refused(f'{{"v":{version},"id":"7"}}'.encode()).message
    assert server.parse_line(b'{"v":1,"id":"7","method":"stats"}')["v"] == 1


@pytest.mark.parametrize("number", CONTROLS)
def test_an_id_is_one_line(number: str) -> None:
    wrong = misread(f'{{"id":"{number}","method":"stats"}}'.encode())
    assert (wrong.number, wrong.code) == ("", "bad_request")
    assert "'id' is no text of 1 to 64 printable characters; set it" in wrong.message
    assert refused(f'{{"id":"{number}"}}'.encode()).answer == Answer(f"{BASE}/reply/_", None)


def test_an_empty_payload_is_answered_where_somebody_waits() -> None:
    """It removes a retained command; with a response topic it is a command that is none."""
    hub, outbox = EventHub(clock=lambda: NOW), Outbox()
    replies = Replies(600, lambda: 0.0)
    dispatcher = Dispatcher(TOPICS, FakeService(hub), hub, outbox, True, replies)
    topic = f"{BASE}/cmd/stats"
    dispatcher.receive(Arrived(topic, b""))
    assert outbox.empty
    assert dispatcher.counts["empty"] == 1
    dispatcher.receive(Arrived(topic, b"", response_topic="gemctl/v1/plant/reply/a"))
    taken = outbox.take()
    assert taken is not None
    assert taken[1].topic == "gemctl/v1/plant/reply/a"
    error = json.loads(taken[1].payload)["error"]
    assert (error["code"], error["message"][:9]) == ("bad_request", "payload: ")
    assert dispatcher.counts["garbage"] == 1
