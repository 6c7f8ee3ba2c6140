"""What an attached program tells is not trusted: a real daemon, and a program that is played here,
because a real one neither lies nor fails at will."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from candidates import digest_of
from daemon import Daemon, wait_for
from gemctl.client import Refused
from played import READY, STATS, Played


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
        assert text == "its answers failed, and the program did not go back: line-3: no file"


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
        told = [check["text"] for check in daemon.call("doctor")["checks"]]
        assert "line-3: does not answer; continue or end its process " + str(os.getpid()) in told
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
    refused_while_away(daemon)
    daemon.stop()
    daemon.start()
    refused_while_away(daemon)
    with Played(daemon):
        attached(daemon)
        daemon.replace(versions[0], name="line-3")
        assert status(daemon)["attached"]
    wait_for(lambda: daemon.events("program.gone"))
    refused_while_away(daemon)
    daemon.call("model.remove", name="line-3")
    assert daemon.call("model.list")["models"] == []
    daemon.replace(versions[0], name="line-3")
    assert daemon.ask("abc", model="line-3")["generated_tokens"] == 8


def refused_while_away(daemon: Daemon) -> None:
    """Whatever would make a model of its name, or means one."""
    for method, more in (
        *(("model.load", {}), ("model.enable", {}), ("model.switch", {}), ("model.rollback", {})),
        *(("model.pin", {"pinned": True}), ("model.priority", {"priority": 3}), ("stats", {})),
        *(("model.disable", {}), ("model.unload", {})),
    ):
        with pytest.raises(Refused, match="line-3: is the name of a program") as caught:
            daemon.call(method, name="line-3", **more)
        assert caught.value.code == "conflict"
    with pytest.raises(Refused, match="line-3: is the name of a program"):
        daemon.ask("abc", model="line-3")
    (row,) = daemon.call("model.list")["models"]
    assert (row["name"], row["state"]) == ("line-3", "not attached")
    assert status(daemon)["state"] == "not attached"


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
