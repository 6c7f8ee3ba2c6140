"""What a command over MQTT is: its topics, and the strict reading of its payload.

No broker, no clock of its own: times are handed in.

    gemctl/v1/<site>/<device>/cmd/<method>            {"id": "17", "params": {..}, ..}
    gemctl/v1/<site>/group/<group>/cmd/<method>       the same, for every device of the group

MQTT.md says what a client sees.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
)

from gemctl import strict, wording
from gemctl.errors import ApiError, Code

ROOT = "gemctl/v1"
MOST_BYTES = 64 * 1024  # of a payload, in both directions
TOPIC_CHARS = 256  # of a reply topic
CORRELATION_BYTES = 256
RESERVED = ("group", "reply")  # no device may be called so: these are levels of the site
UNREAD = "_"  # reply topic of a command whose id could not be read; no id looks like it

READ = frozenset(
    {
        *("stats", "stats.history", "events.follow", "model.list", "model.status"),
        *("throttle.get", "daemon.info", "doctor"),
    }
)
WRITE = frozenset(
    {
        *("model.load", "model.unload", "model.pin", "model.priority", "model.rollback"),
        *("model.clear", "model.disable", "model.enable", "model.switch", "model.replace"),
        *("model.remove", "throttle.set", "generate", "kv.auto_reset", "config.reload", "bundle"),
        *("calibrate.thermal", "cancel"),
    }
)
METHODS = READ | WRITE
LOCAL = frozenset({"model.stage"})  # takes a file, and none travels here
# Seconds to minutes: answered by `accepted` at once, and by the result later.
LONG = frozenset(
    {
        *("model.load", "model.replace", "model.switch", "model.rollback", "model.enable"),
        *("bundle", "calibrate.thermal"),
    }
)
SLOW = LONG | {"generate"}  # these leave room for the quick ones

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}\Z")
_LEVELS = re.compile(r"[^+#\x00-\x1f\x7f/$][^+#\x00-\x1f\x7f/]*(/[^+#\x00-\x1f\x7f/]+)*\Z")


@dataclass(frozen=True)
class Arrived:
    """A message, whatever the protocol. `expiry_s`: what is left of MQTT 5's message expiry."""

    topic: str
    payload: bytes
    retain: bool = False
    response_topic: str = ""
    correlation: bytes = b""
    expiry_s: int | None = None


@dataclass(frozen=True)
class Answer:
    """Where replies go, and what they echo. `ident` is null where the id could not be read."""

    topic: str
    ident: str | int | None = None
    correlation: bytes = b""


class Refusal(ApiError):
    """A command that is not carried out: `reason` is a word for counters and events."""

    def __init__(self, code: Code, message: str, reason: str) -> None:
        super().__init__(code, message)
        self.reason = reason
        self.answer: Answer | None = None
        self.said: dict[str, Any] = {}  # the payload's object, where that much could be read


@dataclass(frozen=True)
class Command:
    """A command that is well formed. `key` tells it from others, `content` from other uses of it.

    `key` is empty where the sender named none, which only a method that reads may do.
    """

    method: str
    params: dict[str, Any]
    answer: Answer
    key: str
    content: bytes
    stream: bool = False


@dataclass(frozen=True)
class Topics:
    """The topics of one device. `reply_prefix` ("" or "a/b/") is one more place for replies."""

    site: str
    device: str
    groups: tuple[str, ...] = ()
    reply_prefix: str = ""

    @property
    def base(self) -> str:
        """Where all of the device's own topics lie, without a slash at its end."""
        return f"{ROOT}/{self.site}/{self.device}"

    def own(self, name: str) -> str:
        """One of status, state, stats, event, or reply/ID."""
        return f"{self.base}/{name}"

    def commands(self) -> list[str]:
        """Filters to subscribe to."""
        places = [self.base, *(f"{ROOT}/{self.site}/group/{group}" for group in self.groups)]
        return [f"{place}/cmd/#" for place in places]

    def method(self, topic: str) -> str | None:
        """The method that a topic asks for, or None where it is no command topic of ours."""
        for prefix in self.commands():
            if topic.startswith(prefix[:-1]):
                return topic[len(prefix) - 1 :].replace("/", ".")
        return None

    def may_answer(self, topic: str) -> bool:
        """Is this a place for replies: never a topic that a device or a server obeys."""
        places = [f"{self.base}/reply/", f"{ROOT}/{self.site}/reply/"]
        if self.reply_prefix:
            places.append(self.reply_prefix)
        if len(topic) > TOPIC_CHARS or not _LEVELS.match(topic):
            return False
        return any(topic.startswith(place) for place in places)


def _text_or_whole(value: Any) -> Any:
    if value is not None and type(value) not in (str, int):
        raise ValueError("is neither a text nor a whole number; give one of them")
    return value


def _whole(value: Any) -> Any:
    if type(value) is not int:  # true is 1 to Python
        raise ValueError("is no whole number; use 1")
    return value


class _Envelope(BaseModel):
    """The payload's object."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    v: Annotated[Literal[1], BeforeValidator(_whole)] = 1
    id: Annotated[str | int | None, BeforeValidator(_text_or_whole)] = None
    params: dict[str, Any] = {}
    reply_to: StrictStr = ""
    expires_at: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    stream: StrictBool = False


def strict_object(payload: bytes) -> dict[str, Any]:
    """The JSON object of a payload. Raises Refusal: over 64 KiB, what strict.loads refuses, no
    object, half a surrogate pair."""
    if len(payload) > MOST_BYTES:
        what = f"payload: {len(payload)} bytes, at most {MOST_BYTES}; shorten it"
        raise Refusal("bad_request", what, "oversize")
    try:
        value = strict.loads(payload)
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except UnicodeError:
        raise Refusal("bad_request", "payload: not UTF-8; send UTF-8 text", "garbage") from None
    except ValueError as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        sentence = f"payload: no strict JSON object: {what}; see MQTT.md"
        raise Refusal("bad_request", sentence, "garbage") from None
    if strict.has_half_pair(value, payload):
        raise _garbage(strict.HALF_PAIR, value)
    return value


def _garbage(what: str, said: dict[str, Any]) -> Refusal:
    """The refusal of an object that could be read, and says what it must not."""
    refusal = Refusal("bad_request", f"payload: {what}", "garbage")
    refusal.said = said
    return refusal


def _envelope(payload: bytes) -> _Envelope:
    said = strict_object(payload)
    try:
        return _Envelope.model_validate(said)
    except ValidationError as error:
        raise _garbage(wording.first(error, _Envelope), said) from None


def _key(envelope: _Envelope, arrived: Arrived) -> str:
    """The key for duplicates: the id, else MQTT 5's correlation data, else empty."""
    if envelope.id is not None:
        name = str(envelope.id)
        if not _ID.match(name):
            sentence = "id: not 1 to 64 of A-Z a-z 0-9 . _ : - beginning with a letter or digit"
            raise Refusal("bad_request", f"{sentence}; see MQTT.md", "garbage")
        return f"i{name}"
    return f"c{arrived.correlation.hex()}" if arrived.correlation else ""


def _check(method: str, key: str, arrived: Arrived, expires_at: float | None, now: float) -> None:
    """Raises Refusal where a command that can be read cannot be carried out."""
    if method in LOCAL:
        sentence = f"cmd/{method}: no file travels over MQTT; use the device's own gemctl"
        raise Refusal("not_found", sentence, "unknown")
    if method not in METHODS:
        shown = method if re.fullmatch(r"[a-z0-9._]{1,32}", method) else "..."
        raise Refusal("not_found", f"cmd/{shown}: no such method; MQTT.md lists them", "unknown")
    if len(arrived.correlation) > CORRELATION_BYTES:
        sentence = f"correlation data: more than {CORRELATION_BYTES} bytes; shorten it"
        raise Refusal("bad_request", sentence, "garbage")
    if not key and method in WRITE:
        sentence = f"{method}: has no id; send one, so that a duplicate is not done twice"
        raise Refusal("bad_request", sentence, "no_id")
    if arrived.expiry_s == 0 or (expires_at is not None and expires_at <= now):
        raise Refusal("timeout", f"{method}: it came after its expiry; send it again", "expired")


def _answer(topics: Topics, arrived: Arrived, ident: Any, reply_to: str, unread: Answer) -> Answer:
    """The best place that may be answered at: the one asked for, else reply/ID."""
    topic = unread.topic
    if not topics.may_answer(arrived.response_topic):
        if not arrived.response_topic and topics.may_answer(reply_to):
            topic = reply_to
        elif ident is not None:
            topic = topics.own(f"reply/{ident}")
    return replace(unread, topic=topic, ident=ident)


def _answer_to(topics: Topics, arrived: Arrived, said: dict[str, Any], unread: Answer) -> Answer:
    """Who is to be told of an object that is no good one: its id and place, as far as they are."""
    ident, reply_to = said.get("id"), said.get("reply_to")
    if type(ident) not in (str, int) or not _ID.match(str(ident)):
        ident = None
    if not isinstance(reply_to, str) or not reply_to.isprintable():
        reply_to = ""
    return _answer(topics, arrived, ident, reply_to, unread)


def read(topics: Topics, arrived: Arrived, now: float) -> Command:
    """The command of a message that came at `now` (seconds since 1970).

    Raises Refusal, whose `answer` says who is to be told.
    """
    correlation = arrived.correlation if len(arrived.correlation) <= CORRELATION_BYTES else b""
    answer = Answer(topics.own(f"reply/{UNREAD}"), None, correlation)
    if topics.may_answer(arrived.response_topic):
        answer = replace(answer, topic=arrived.response_topic)
    try:
        envelope = _envelope(arrived.payload)
        key = _key(envelope, arrived)
        answer = _answer(topics, arrived, envelope.id, envelope.reply_to, answer)
        wanted = arrived.response_topic or envelope.reply_to
        if wanted and answer.topic != wanted:
            places = f"{topics.own('reply/')} or {ROOT}/{topics.site}/reply/"
            sentence = f"reply topic: no place for replies; name one below {places}"
            raise Refusal("forbidden", sentence, "reply_topic")
        method = topics.method(arrived.topic) or ""
        _check(method, key, arrived, envelope.expires_at, now)
    except Refusal as refusal:
        if refusal.said:
            answer = _answer_to(topics, arrived, refusal.said, answer)
        refusal.answer = answer
        raise
    content = json.dumps([method, envelope.params, envelope.stream], sort_keys=True)
    digest = hashlib.sha256(content.encode()).digest()[:16]
    return Command(method, envelope.params, answer, key, digest, envelope.stream)
