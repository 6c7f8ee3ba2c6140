"""A daemon that runs out of descriptors stays up, says so, and goes on once there are some."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon import Daemon, answer_of, settled, wait_for
from gemctl.client import Refused

PROMPT = "abc"
WORD = "LimitNOFILE"


def opened(daemon: Daemon) -> list[int]:
    return [int(entry.name) for entry in Path(f"/proc/{daemon.pid}/fd").iterdir()]


def refusal(daemon: Daemon, version: Path) -> Refused | None:
    """Why a replacement was refused; None where it was not."""
    try:
        daemon.replace(version, name="pilot")
    except Refused as error:
        return error
    return None


@contextlib.contextmanager
def short(daemon: Daemon, spare: int) -> Iterator[None]:
    """As `ulimit -n`, but for a daemon that runs: so many descriptors are left to it."""
    before = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    limit = max(opened(daemon)) + 1 + spare
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, before)


def test_without_descriptors_a_replacement_is_refused_by_its_word(
    versions: tuple[Path, Path],
) -> None:
    """What serves goes on, the sentence names the limit, and the same line succeeds later."""
    with Daemon() as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        for spare in (2, 4):
            with short(daemon, spare):
                error = refusal(daemon, versions[1])
            assert error is not None
            assert error.code == "busy", error
            assert WORD in str(error), error
            assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)
            assert daemon.call("model.status", name="pilot")["bad"] == []
        daemon.replace(versions[1], name="pilot")
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[1], PROMPT)


def test_connections_that_take_all_descriptors(versions: tuple[Path, Path]) -> None:
    """Somebody who is connected is served, who comes then waits or is turned away, and once they
    are gone everything is as before: the same process, no descriptor lost."""
    with Daemon() as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        pid, before = daemon.pid, len(opened(daemon))
        with daemon.client() as early, contextlib.ExitStack() as stack:
            early.call("stats", {})
            stack.enter_context(short(daemon, 6))
            for _ in range(30):
                late = stack.enter_context(socket.socket(socket.AF_UNIX))
                late.settimeout(0.2)
                with contextlib.suppress(OSError):
                    late.connect(str(daemon.socket))
            wait_for(lambda: WORD in daemon.log.read_text(encoding="utf-8"))
            assert early.call("stats", {})["model"] == "pilot"
            text = early.call("generate", {"prompt": PROMPT, "max_tokens": 8, "temperature": 0.0,
                                           "ignore_stop_ids": True})["text"]  # fmt: skip
            assert text == answer_of(versions[0], PROMPT)
            with pytest.raises(Refused, match=WORD):  # it needs one to look at the machine
                early.call("doctor", {})
        wait_for(lambda: daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT))
        wait_for(lambda: len(opened(daemon)) <= before)
        with short(daemon, 8):
            checks = {check["name"]: check["text"] for check in daemon.call("doctor")["checks"]}
        assert WORD in checks["descriptors"]
        daemon.replace(versions[1], name="pilot")
        assert daemon.pid == pid
        assert daemon.answers()


@pytest.mark.parametrize("limit", [24, 32, 64])
def test_a_start_with_few_descriptors(limit: int, versions: tuple[Path, Path]) -> None:
    """It says what is missing, or works."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    daemon = Daemon()
    daemon.prefix = ("prlimit", f"--nofile={limit}:{hard[1]}")
    with daemon:
        error = refusal(daemon, versions[0])
        assert error is None or WORD in str(error), error
        assert daemon.answers()
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, hard)
        daemon.replace(versions[0], name="pilot")
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)
