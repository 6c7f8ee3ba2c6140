"""Ways in which the daemon was once broken: each is one test, with what is right."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sysfs
from candidates import digest_of
from daemon import Daemon, answer_of, settled, wait_for
from gemctl.client import Refused

PROMPT = "abc"


@pytest.fixture
def daemon(versions: tuple[Path, Path]) -> Iterator[Daemon]:
    """The first version is good."""
    with Daemon() as made:
        made.replace(versions[0], name="pilot")
        settled(made)
        yield made


def refused(daemon: Daemon, method: str, **params: Any) -> str:
    with pytest.raises(Refused) as error:
        daemon.call(method, **params)
    return error.value.code


def test_what_was_refused_cannot_be_loaded_by_its_digest(versions: tuple[Path, Path]) -> None:
    digest = hashlib.sha256(versions[0].read_bytes()).hexdigest()
    with Daemon(models={"signature": "required"}) as daemon:
        with pytest.raises(Refused):
            daemon.replace(versions[0], name="pilot")
        assert refused(daemon, "model.load", name="pilot", digest=digest) == "not_found"
        assert refused(daemon, "model.replace", name="pilot", digest=digest) == "not_found"
        assert not daemon.workers()


def test_a_version_that_was_rolled_back_is_refused_by_file_and_by_digest(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    digest = daemon.replace(versions[1], name="pilot")["digest"]
    daemon.call("model.rollback", name="pilot")
    with pytest.raises(Refused):
        daemon.replace(versions[1], name="pilot")
    assert refused(daemon, "model.replace", name="pilot", digest=digest) in ("refused", "not_found")
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)
    daemon.call("model.clear", name="pilot")
    daemon.replace(versions[1], name="pilot")
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[1], PROMPT)


def test_a_flip_over_a_crashed_version_is_not_taken_back(versions: tuple[Path, Path]) -> None:
    with Daemon(worker={"backoff_s": 2.0}) as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        os.kill(daemon.workers()[0], signal.SIGKILL)
        wait_for(lambda: daemon.call("model.status", name="pilot")["state"] == "loading")
        daemon.replace(versions[1], name="pilot")
        settled(daemon)
        time.sleep(2.5)  # the old one's restart would have come by now
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[1], PROMPT)
        assert len(daemon.workers()) == 1


def test_a_caller_that_leaves_ends_a_replacement_or_comes_too_late(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    """Before the flip the old version serves on, behind it the new one stays."""
    answers = [answer_of(path, PROMPT) for path in versions]
    for turn in range(1, 4):
        before = daemon.call("model.status", name="pilot")["digest"]
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(daemon.socket))
            fd = os.open(versions[turn % 2], os.O_RDONLY)
            line = {"id": "1", "method": "model.replace", "params": {"name": "pilot"}}
            socket.send_fds(sock, [json.dumps(line).encode() + b"\n"], [fd])
            os.close(fd)
            time.sleep(0.05 * turn)
        wait_for(lambda: daemon.call("model.status", name="pilot")["job"] is None)
        status = settled(daemon)
        assert (status["digest"], status["bad"]) == (status["current"], [])
        serves = [digest_of(path) for path in versions].index(status["digest"])
        assert status["digest"] == before or serves == turn % 2
        assert daemon.ask(PROMPT)["text"] == answers[serves]
        wait_for(lambda: len(daemon.workers()) == 1)
    state = json.loads((daemon.folder / "state/state.json").read_text(encoding="utf-8"))
    assert state["trial"] is None


def test_a_rollback_lasts_over_a_restart(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    daemon.replace(versions[1], name="pilot")
    settled(daemon)
    daemon.call("model.rollback", name="pilot")
    daemon.stop()
    daemon.start()
    wait_for(lambda: daemon.call("model.status", name="pilot")["state"] == "serving")
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


def test_two_models_on_probation_keep_their_own_versions(versions: tuple[Path, Path]) -> None:
    with Daemon() as daemon:
        for name in ("a", "b"):
            daemon.replace(versions[0], name=name)
        for name in ("a", "b"):
            settled(daemon, name)
        for name in ("a", "b"):
            daemon.replace(versions[1], name=name)
        for name in ("a", "b"):
            settled(daemon, name)
        daemon.stop()
        daemon.start()
        wait_for(lambda: len(daemon.workers()) == 2)
        for name in ("a", "b"):
            wait_for(lambda n=name: daemon.call("model.status", name=n)["state"] == "serving")
            assert daemon.ask(PROMPT, model=name)["text"] == answer_of(versions[1], PROMPT)


def test_names_that_fail_leave_no_trace_in_the_list(daemon: Daemon) -> None:
    assert refused(daemon, "model.replace", name="zz", digest="12345678") == "not_found"
    for name in ("zz", "a..b"):
        with pytest.raises(Refused):
            daemon.replace(Path("/etc/hostname"), name=name)
    assert [model["name"] for model in daemon.call("model.list")["models"]] == ["pilot"]


def test_no_worker_is_left_by_a_rollback_or_an_enable_in_a_bad_moment(
    versions: tuple[Path, Path],
) -> None:
    with Daemon(worker={"backoff_s": 1.0}, models={"probation_s": 60.0}) as daemon:
        daemon.replace(versions[0], name="pilot")
        os.kill(daemon.workers()[0], signal.SIGKILL)
        wait_for(lambda: daemon.call("model.status", name="pilot")["state"] != "serving")
        assert refused(daemon, "model.enable", name="pilot") == "busy"  # it ends by itself
        wait_for(lambda: not daemon.call("model.status", name="pilot")["busy"])
        daemon.call("model.disable", name="pilot")
        wait_for(lambda: not daemon.workers())


def test_a_disabled_model_answers_at_once(daemon: Daemon) -> None:
    daemon.call("model.disable", name="pilot")
    assert refused(daemon, "generate", model="pilot", prompt="x") == "conflict"


def test_the_first_version_cannot_be_rolled_back(versions: tuple[Path, Path]) -> None:
    with Daemon(models={"probation_s": 60.0}) as daemon:
        daemon.replace(versions[0], name="pilot")
        assert refused(daemon, "model.rollback", name="pilot") == "not_found"
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


def test_a_deadline_ends_the_run_itself(daemon: Daemon) -> None:
    daemon.call("throttle.set", duty=0.001)
    found = daemon.ask(PROMPT, 150, deadline_ms=700)
    assert found["finish"] == "deadline"
    assert found["generated_tokens"] < 150


def test_half_a_connection_still_gets_its_answer(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(daemon.socket))
        line = {"id": "1", "method": "generate", "params": {"prompt": PROMPT, "max_tokens": 50}}
        sock.sendall(json.dumps(line).encode() + b"\n")
        sock.shutdown(socket.SHUT_WR)
        data = b""
        while more := sock.recv(65536):
            data += more
    assert b'"result"' in data


def test_a_hung_worker_holds_up_nobody_else(daemon: Daemon) -> None:
    pid = daemon.workers()[0]
    os.kill(pid, signal.SIGSTOP)
    done = threading.Event()
    threading.Thread(target=lambda: (daemon.call("throttle.set", duty=0.5), done.set())).start()
    assert done.wait(10)  # a worker may hang for 20 s before it is killed
    os.kill(pid, signal.SIGCONT)


def test_heat_and_a_disk_that_takes_nothing(versions: tuple[Path, Path], tmp_path: Path) -> None:
    """The throttle goes on, down and up again, whatever the state file does."""
    board = sysfs.orin_nano(tmp_path / "board")
    shutil.copy("/proc/meminfo", board.root / "proc/meminfo")
    zone = "tj-thermal"
    for kind in (zone, "cpu-thermal", "gpu-thermal"):
        board.heat(kind, 40.0)
    tables = {"sysfs_root": str(board.root)}
    with Daemon(sensors=tables, throttle={"temp_c": 60.0}) as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        state = daemon.folder / "state/state.json"
        state.unlink()
        state.mkdir()  # nothing can be written there
        for celsius in (50, 58, 66, 74):
            board.heat(zone, celsius)
            wait_for(lambda c=celsius: daemon.call("throttle.get")["temp_c"] == c)
        wait_for(lambda: daemon.call("throttle.get")["level"] >= 1)
        with pytest.raises(Refused):
            daemon.call("model.pin", name="pilot")
        assert not daemon.call("model.status", name="pilot")["pinned"]
        for celsius in (60, 45):
            board.heat(zone, celsius)
            wait_for(lambda c=celsius: daemon.call("throttle.get")["temp_c"] == c)
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)
        state.rmdir()
