"""What an attached program tells is not trusted: a real daemon, and a program that is played here,
because a real one neither lies nor fails at will."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from candidates import digest_of
from daemon import Daemon, wait_for
from gemctl.client import Refused

Reply = Callable[[dict[str, Any]], dict[str, Any]]
READY: dict[str, Any] = {
    "event": "ready", "name": "m", "family": "qwen3", "target": "generic-x86-64", "pid": 1,
    "kernel": "scalar", "version": "0.1.0", "context": 64, "kv_size": 64, "kv_type": 1,
    "has_chat": False, "threads": 1, "ram_total": 4096, "ram_kv": 64, "locked_bytes": 0,
    "unlocked_bytes": 0, "enabled": True, "open_ms": 1.0,
}  # fmt: skip
STATS: dict[str, Any] = {
    "event": "stats", "enabled": True, "name": "m", "digest": "", "way_back": False, "faults": 0,
    "ram_total": 4096, "active": 0, "waiting": 0, "duty": 1.0, "threads": 0, "requests": 0,
    "failed": 0, "tokens": 0, "replaced": 0, "steps": 0,
}  # fmt: skip
TIMES = {"event": "replaced", "tests": 1, "open_ms": 1, "test_ms": 1, "warmup_ms": 1, "flip_ms": 1}


class Played:
    """A program that attaches and answers by `replies`, of each op; `stats` may be changed, but
    those of its first answer are given here."""

    def __init__(self, daemon: Daemon, ready: dict[str, Any] | None = None, **stats: Any) -> None:
        self.stats = STATS | stats
        self.asked: list[dict[str, Any]] = []
        self.replies: dict[str, Reply] = {
            "stats": lambda _: self.stats,
            "pace": lambda _: {"event": "pace"},
            "replace": self.take,
            "rollback": self.go_back,
        }
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(daemon.socket))
        hello = {"v": 1, "id": "1", "method": "attach", "params": {"name": "line-3"}}
        self._socket.sendall(json.dumps(hello).encode() + b"\n")
        with self._socket.makefile("rb", buffering=0) as stream:
            assert b'"result"' in stream.readline()
        self._send(READY if ready is None else ready)
        self._thread = threading.Thread(target=self._converse, daemon=True)
        self._thread.start()

    def take(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Serve another version."""
        self.stats = {**self.stats, "digest": asked["digest"], "way_back": True}
        return TIMES

    def go_back(self, _asked: dict[str, Any]) -> dict[str, Any]:
        self.stats = {**self.stats, "digest": "", "way_back": False}
        return TIMES

    def _send(self, event: dict[str, Any]) -> None:
        body = json.dumps(event).encode()
        self._socket.sendall(len(body).to_bytes(4, "little") + body)

    def _converse(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as stream:
            while head := stream.read(4):
                asked = json.loads(stream.read(int.from_bytes(head, "little")))
                self.asked.append(asked)
                self._send({**self.replies[asked["op"]](asked), "id": asked.get("id", 0)})

    def count(self, op: str) -> int:
        return sum(asked["op"] == op for asked in self.asked)

    def __enter__(self) -> Played:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """Probations end by answers, of which there are none here, or by a fault."""
    with Daemon(models={"probation_s": 600.0, "probation_requests": 5}) as made:
        yield made


def status(daemon: Daemon) -> dict[str, Any]:
    return daemon.call("model.status", name="line-3")


def attached(daemon: Daemon) -> None:
    wait_for(lambda: daemon.events("program.attached"))


def judged(daemon: Daemon, kind: str) -> dict[str, Any]:
    """The event that ended a probation."""
    found = wait_for(lambda: daemon.events(kind))
    assert len(found) == 1
    event: dict[str, Any] = found[0]
    return event


def test_a_fault_takes_the_version_back(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    """Of the program's requests only those count that failed by no mistake of a caller."""
    digest = digest_of(versions[1])
    with Played(daemon) as program:
        attached(daemon)
        daemon.replace(versions[1], name="line-3")
        assert status(daemon)["digest"] == digest
        program.stats = {**program.stats, "requests": 3, "failed": 3}  # callers' mistakes
        wait_for(lambda: status(daemon)["probation_left_requests"] == 2)
        assert status(daemon)["on_probation"]
        program.stats = {**program.stats, "requests": 4, "failed": 4, "faults": 1}
        assert judged(daemon, "probation.bad")["text"] == "its answers failed"
        assert (program.count("rollback"), program.count("replace")) == (1, 1)
        found = wait_for(lambda: (s := status(daemon)) and not s["on_probation"] and s)
        assert (found["digest"], found["current"], found["present"]) == (None, None, [])
        assert [bad["digest"] for bad in found["bad"]] == [digest]
        with pytest.raises(Refused) as caught:
            daemon.replace(versions[1], name="line-3")
        assert caught.value.code == "refused"


def test_it_passes_by_answers(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    with Played(daemon) as program:
        attached(daemon)
        daemon.replace(versions[1], name="line-3")
        program.stats = {**program.stats, "requests": 5}
        assert judged(daemon, "probation.good")["digest"] == digest_of(versions[1])
        assert status(daemon)["current"] == digest_of(versions[1])
        # the version before is handed over where the program has another one than the newest
        daemon.replace(versions[0], name="line-3")
        program.stats = {**program.stats, "requests": 10}
        wait_for(lambda: len(daemon.events("probation.good")) == 2)
        wait_for(lambda: not status(daemon)["on_probation"])
        found = daemon.call("model.rollback", name="line-3")
        assert (found["digest"], program.count("rollback")) == (digest_of(versions[1]), 0)
        found = status(daemon)
        assert (found["current"], found["previous"]) == tuple(
            digest_of(path) for path in reversed(versions)
        )


def test_one_that_cannot_go_back_gets_the_good_version(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    """A program that was linked before there was a rollback, or whose file is gone."""
    good = digest_of(versions[0])
    with Played(daemon) as program:
        attached(daemon)
        daemon.replace(versions[0], name="line-3")
        program.stats = {**program.stats, "requests": 5}
        judged(daemon, "probation.good")
        wait_for(lambda: not status(daemon)["on_probation"])
        program.replies["rollback"] = lambda _: {"event": "error", "code": -1, "text": "unknown"}
        daemon.replace(versions[1], name="line-3")
        program.stats = {**program.stats, "faults": 1}
        judged(daemon, "probation.bad")
        wait_for(lambda: status(daemon)["digest"] == good)
        program.replies["replace"] = program.replies["rollback"]


def test_one_that_goes_back_nowhere_is_told(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    with Played(daemon) as program:
        attached(daemon)
        program.replies["rollback"] = lambda _: {"event": "error", "code": -20, "text": "no file"}
        daemon.replace(versions[1], name="line-3")
        program.stats = {**program.stats, "faults": 1}
        text = judged(daemon, "probation.bad")["text"]
        assert text == "its answers failed, and the program did not go back: no file"


def test_a_program_that_ends_on_probation(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    """Nobody knows whether the version is good: it may be tried again."""
    with Played(daemon):
        attached(daemon)
        daemon.replace(versions[1], name="line-3")
    assert "hand the version over again" in judged(daemon, "probation.failed")["text"]
    wait_for(lambda: daemon.events("program.gone"))
    with Played(daemon) as again:
        wait_for(lambda: len(daemon.events("program.attached")) == 2)
        digest = digest_of(versions[1])
        daemon.call("model.replace", name="line-3", digest=digest)
        assert status(daemon)["on_probation"]
        again.stats = {**again.stats, "requests": 5}
        assert judged(daemon, "probation.good")["digest"] == digest


def test_a_bad_version_that_comes_back_is_taken_back(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    """The daemon died after it had marked it and before the program went back."""
    digest = digest_of(versions[1])
    with Played(daemon):
        attached(daemon)
        daemon.replace(versions[1], name="line-3")
        daemon.call("model.rollback", name="line-3")
    wait_for(lambda: daemon.events("program.gone"))
    with Played(daemon, digest=digest, way_back=True) as again:
        wait_for(lambda: again.count("rollback") == 1)
        wait_for(lambda: len(daemon.events("probation.bad")) == 2)


def test_a_program_that_hangs_holds_nobody_up(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    """Neither the throttle nor the daemon's own models wait for it."""
    with Played(daemon) as program:
        attached(daemon)
        held = threading.Event()

        def late(_asked: dict[str, Any]) -> dict[str, Any]:
            held.wait(60)
            return STATS

        program.replies["stats"] = late
        daemon.replace(versions[0], name="own")
        assert daemon.ask("abc")["generated_tokens"] == 8
        daemon.call("throttle.set", duty=0.5)
        wait_for(lambda: status(daemon)["state"] == "not answering")
        assert daemon.call("stats", name="line-3")["model"] == "line-3"
        held.set()


def test_a_program_that_hangs_does_not_pass(versions: tuple[Path, Path]) -> None:
    """Time in which nobody knows how it does is none of its probation."""
    with (
        Daemon(models={"probation_s": 8.0, "probation_requests": 5}) as daemon,
        Played(daemon) as program,
    ):
        attached(daemon)
        daemon.replace(versions[1], name="line-3")
        held = threading.Event()
        known = dict(program.stats)

        def late(_asked: dict[str, Any]) -> dict[str, Any]:
            held.wait(60)
            return known

        program.replies["stats"] = late
        wait_for(lambda: status(daemon)["state"] == "not answering")
        left = status(daemon)["probation_left_s"]
        assert left > 0
        time.sleep(2.0)
        assert status(daemon)["probation_left_s"] >= left - 0.5
        held.set()
        program.replies["stats"] = lambda _: known
        assert judged(daemon, "probation.good")["model"] == "line-3"


def test_the_name_of_a_program_that_is_away_is_its_own(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    """A replacement while it is started again makes no model that takes its place."""
    with Played(daemon):
        attached(daemon)
    wait_for(lambda: daemon.events("program.gone"))
    with pytest.raises(Refused, match="not attached now; start it and try again") as caught:
        daemon.replace(versions[0], name="line-3")
    assert caught.value.code == "conflict"
    assert daemon.call("model.list")["models"] == []
    with Played(daemon):
        wait_for(lambda: len(daemon.events("program.attached")) == 2)
        daemon.replace(versions[0], name="line-3")
        assert status(daemon)["attached"]


NONSENSE: tuple[Any, ...] = (None, "many", -1, 1 << 60, 1e308, [], {}, True, 0.5)


@pytest.mark.parametrize("value", NONSENSE, ids=repr)
def test_nonsense_counts_as_nothing(daemon: Daemon, value: Any) -> None:
    """Every figure of every event, and each of them missing."""
    with Played(daemon, {**dict.fromkeys(READY, value), "event": "ready"}) as program:
        attached(daemon)
        program.stats = {**dict.fromkeys(STATS, value), "event": "stats"}
        program.stats |= dict.fromkeys(("ttft_ms", "decode_tps", "kv_used", "kv_size"), value)
        seen = program.count("stats")
        wait_for(lambda: program.count("stats") >= seen + 2)
        for method, params in (
            *(("model.status", {"name": "line-3"}), ("stats", {"name": "line-3"})),
            *(("model.list", {}), ("stats", {}), ("doctor", {}), ("bundle", {})),
        ):
            assert daemon.call(method, **params)
        daemon.gemctl("model", "status", "line-3")
        daemon.gemctl("model", "list")
        daemon.gemctl("stats", "line-3")
        assert not daemon.events("program.gone")
    wait_for(lambda: daemon.events("program.gone"))
    assert daemon.call("daemon.info")["attached"] == []
    with Played(daemon, {"event": "ready"}) as program:
        wait_for(lambda: len(daemon.events("program.attached")) == 2)
        program.stats = {"event": "stats"}
        wait_for(lambda: program.count("stats") > 1)
        daemon.gemctl("model", "status", "line-3")
