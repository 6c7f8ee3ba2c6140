"""The command's side of the socket, against a daemon of a few lines."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemctl import client
from gemctl.client import Client, Refused

Reply = Callable[[dict[str, Any]], list[dict[str, Any]]]


def serve(path: Path, reply: Reply) -> threading.Thread:
    """Answers one connection's requests until it is closed."""
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen()

    def run() -> None:
        peer, _ = sock.accept()
        with sock, peer, peer.makefile("rwb") as lines:
            for line in lines:
                for answer in reply(json.loads(line)):
                    lines.write(json.dumps(answer).encode() + b"\n")
                lines.flush()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LOOK_S", 0.1)
    monkeypatch.setattr(client, "SILENT_S", 2.0)


def test_work_takes_as_long_as_the_daemon_is_well(tmp_path: Path, quick: None) -> None:
    """The result comes after the fifth look; parts and looks mix."""
    looks = []

    def reply(request: dict[str, Any]) -> list[dict[str, Any]]:
        if request["method"] == "model.replace":
            return [{"v": 1, "id": "1", "event": {"job": "j"}}]
        assert (request["method"], request["id"]) == ("daemon.info", "look")
        looks.append(request)
        well = {"v": 1, "id": "look", "result": {"pid": 1}}
        if len(looks) == 2:
            return [{"v": 1, "id": "look", "error": {"code": "busy", "message": "8 requests run"}}]
        if len(looks) < 5:
            return [well]
        return [
            well,
            {"v": 1, "id": "1", "event": {"n": 2}},
            {"v": 1, "id": "1", "result": {"a": 1}},
        ]

    thread = serve(tmp_path / "s", reply)
    events: list[dict[str, Any]] = []
    with Client(str(tmp_path / "s")) as made:
        assert made.call("model.replace", None, events.append) == {"a": 1}
    thread.join()
    assert events == [{"job": "j"}, {"n": 2}]
    assert len(looks) == 5


def test_one_that_does_not_answer_a_look_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LOOK_S", 0.1)
    monkeypatch.setattr(client, "SILENT_S", 0.3)
    thread = serve(tmp_path / "s", lambda request: [])
    began = time.monotonic()
    with Client(str(tmp_path / "s")) as made, pytest.raises(Refused) as told:
        made.call("model.load")
    thread.join()
    assert told.value.code == "timeout"
    assert "gemctld does not answer" in str(told.value)
    assert time.monotonic() - began >= 0.4


def test_a_question_has_its_time_and_no_look(tmp_path: Path) -> None:
    asked: list[str] = []

    def reply(request: dict[str, Any]) -> list[dict[str, Any]]:
        asked.append(request["method"])
        return []

    thread = serve(tmp_path / "s", reply)
    with Client(str(tmp_path / "s"), 0.3) as made, pytest.raises(Refused, match="stats: no answer"):
        made.call("stats")
    thread.join()
    assert asked == ["stats"]
