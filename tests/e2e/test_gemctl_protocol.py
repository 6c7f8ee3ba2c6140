"""The examples of gemctl/PROTOCOL.md, sent to a real daemon as they stand: the same replies, but
for what a model says, digests, numbers of requests and times."""

from __future__ import annotations

import array
import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import frames
from candidates import digest_of, inflated
from daemon import ROOT, Daemon, settled

PAGE = (ROOT / "gemctl" / "PROTOCOL.md").read_text(encoding="utf-8")
LARGE = 2 << 30  # bytes of a copy that is cancelled
OTHER = {"ms", "request", "job", "token", "text", "digest"}  # keys whose value is another each time
MORE = re.compile(r", \.\.}")  # there are more keys than the page shows


class Example:
    """A block of the page: lines that are sent, and the replies that it shows, in order."""

    def __init__(self, block: str) -> None:
        self.sent: list[tuple[dict[str, Any], bool]] = []  # with a descriptor beside it
        self.shown: list[tuple[dict[str, Any], bool]] = []  # there are more keys
        for line in block.splitlines():
            text = line[3:]
            value, end = json.JSONDecoder().raw_decode(MORE.sub("}", text))
            if line.startswith("-> "):
                self.sent.append((value, "descriptor" in MORE.sub("}", text)[end:]))
            else:
                self.shown.append((value, bool(MORE.search(text))))


def examples() -> list[Example]:
    blocks = re.findall(r"^```\n(.*?)^```", PAGE, re.M | re.S)
    return [Example(block) for block in blocks if block.startswith("-> ")]


@pytest.fixture(scope="module")
def daemon(versions: tuple[Path, Path]) -> Iterator[Daemon]:
    """The page's two models: agv-commands, and text, which is active."""
    with Daemon() as made:
        for name, path in zip(("agv-commands", "text"), versions, strict=True):
            made.replace(path, name=name)
            settled(made, name)
        made.call("model.switch", name="text")
        yield made


class Line:
    """A connection."""

    def __init__(self, daemon: Daemon) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(daemon.socket))
        self.stream = self.sock.makefile("rb")

    def send(self, request: dict[str, Any], descriptor: int | None = None) -> None:
        data = json.dumps(request).encode() + b"\n"
        files = array.array("i", [] if descriptor is None else [descriptor])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)] if files else []
        self.sock.sendmsg([data], rights)

    def read(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.stream.readline())
        return found


def alike(shown: Any, found: Any, more: bool, key: str = "") -> None:
    """The same keys and values; of those of OTHER the same kind of value."""
    if isinstance(shown, dict):
        assert set(shown) <= set(found) if more else set(shown) == set(found), found
        for name, value in shown.items():
            alike(value, found[name], more, name)
    elif key in OTHER:
        assert type(found) is type(shown), (key, found)
    elif key == "message":  # it may be cut short on the page
        assert found.startswith(shown.removesuffix("..")), found
    else:
        assert found == shown, key


def test_requests_and_their_replies(daemon: Daemon) -> None:
    example = examples()[0]
    line, shown = Line(daemon), example.shown
    for request, _ in example.sent:
        line.send(request)
        expected = [one for one in shown if one[0]["id"] == request["id"]]
        kinds = [sorted(one[0]["event"]) for one in expected if "event" in one[0]]
        seen: list[dict[str, Any]] = []
        while "event" in (reply := line.read()):
            seen.append(reply)
        tokens = [one for one in expected if "token" in one[0].get("event", {})]
        assert [sorted(one["event"]) for one in seen][:1] == kinds[:1]
        for one in seen[1:]:  # as many tokens as the model gives
            alike(tokens[0][0], one, False)
        alike(expected[-1][0], reply, expected[-1][1])
    assert not expected[0][0].get("event")
    assert len(example.sent) == 3


def test_a_job_and_its_cancel(daemon: Daemon, versions: tuple[Path, Path], tmp_path: Path) -> None:
    example = examples()[1]
    inflated(versions[1], tmp_path / "large", LARGE)
    line, descriptor = Line(daemon), os.open(tmp_path / "large", os.O_RDONLY)
    (first, beside), (second, alone) = example.sent
    assert (beside, alone) == (True, False)
    line.send(first, descriptor)
    os.close(descriptor)
    begun = line.read()
    alike(example.shown[0][0], begun, False)
    line.send({**second, "params": {"id": begun["event"]["job"]}})
    found = {reply["id"]: reply for reply in (line.read(), line.read())}
    for shown, more in example.shown[1:]:
        alike(shown, found[shown["id"]], more)
    assert found["2"]["result"]["request"] == begun["event"]["job"]


# ---- the engine's channel ----

FRAME = re.compile(r"`(\{[^`]*\}|[a-z]+)`")
ENDS = {"replaced": {"tests", "open_ms", "test_ms", "warmup_ms", "flip_ms"}}  # named in words there


def rows() -> list[tuple[dict[str, Any], list[Any]]]:
    """What is sent, and the events that its answer shows: whole ones, or their names."""
    found = []
    for row in re.findall(r'^\| (`\{"op":.*) \|$', PAGE, re.M):
        sent, answer = (FRAME.findall(MORE.sub("}", cell)) for cell in row.split(" | "))
        ops = [json.loads(word) for word in sent if word.startswith("{")]
        shown = [json.loads(word) if word.startswith("{") else word for word in answer]
        found += (
            list(zip(ops, [[one] for one in shown], strict=True))
            if len(ops) > 1
            else [(ops[0], shown)]
        )
    return found


class Engine:
    """A worker as the daemon starts it."""

    def __init__(self, command: Path, artifact: Path) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(60)
        words = [str(command), str(artifact), "--serve", str(theirs.fileno())]
        self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()])
        theirs.close()
        self._stream = self._sock.makefile("rb")

    def send(self, frame: dict[str, Any]) -> None:
        self._sock.sendall(frames.pack(frame))

    def read(self) -> dict[str, Any]:
        return frames.read(self._stream)

    def close(self) -> int:
        """A worker whose daemon is gone ends."""
        self._stream.close()
        self._sock.close()
        return self._process.wait(60)


def answered(shown: Any, found: dict[str, Any]) -> None:
    """An event as the table shows it: its name, or keys of the same kinds among its keys."""
    if isinstance(shown, str):
        assert found["event"] == shown
        assert set(found) >= ENDS.get(shown, set())
        return
    assert set(shown) <= set(found), found
    assert all(type(found[key]) is type(value) for key, value in shown.items()), found
    assert found["event"] == shown["event"]


def test_frames_of_the_engine(gemrun_cli: Path, versions: tuple[Path, Path]) -> None:
    """The table's rows in order, each to a worker: the answers that stand beside them."""
    engine = Engine(gemrun_cli, versions[0])
    assert engine.read()["event"] == "ready"
    sent = []
    for frame, shown in rows():
        sent.append(frame["op"])
        if frame["op"] == "cancel":  # of an answer that is on its way
            engine.send({"op": "generate", "id": frame["id"], "prompt": "abc", "max_tokens": 60})
            assert engine.read()["event"] == "token"
        given = {"path": str(versions[1]), "digest": digest_of(versions[1]), "prompt": "abc"}
        engine.send({key: given.get(key, value) for key, value in frame.items()})
        events = [engine.read()]
        while events[-1]["event"] == "token":
            events.append(engine.read())
        assert all(event.get("id", frame.get("id")) == frame.get("id") for event in events)
        answered(shown[0], events[0] if frame["op"] == "generate" else events[-1])
        answered(shown[1] if frame["op"] == "generate" else shown[0], events[-1])
    assert sent == [
        *("generate", "cancel", "pace", "ping", "stats", "test", "reset", "disable", "enable"),
        *("replace", "rollback"),
    ]
    assert engine.close() == 0


def test_attaching() -> None:
    """The line in the text, from where frames are spoken."""
    (text,) = re.findall(r'^`(\{"v":1,.*"attach".*\})`', PAGE, re.M)
    with Daemon() as daemon:
        line = Line(daemon)
        line.send(json.loads(text))
        reply = line.read()
    assert (reply["id"], set(reply)) == ("1", {"v", "id", "result"})


def test_every_example_is_sent() -> None:
    assert len(examples()) == 2
    assert PAGE.count("-> {") == sum(len(one.sent) for one in examples())
