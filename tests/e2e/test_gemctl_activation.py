"""A daemon that is started with its socket, as systemd's gemctl.socket does; no systemd is needed.

The test holds the listening socket, as systemd would; a small parent puts it at descriptor 3, sets
LISTEN_PID and LISTEN_FDS, and becomes gemctld.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon import START_S, Daemon, answer_of, settled, wait_for
from gemctl.client import Client

PROMPT = "abc"
# argv: descriptor of the socket, what LISTEN_FDS says, LISTEN_PID or "" for the right one, gemctld.
PARENT = """\
import os, sys
fd, count, pid, *command = sys.argv[1:]
os.dup2(int(fd), 3)
os.environ |= {"LISTEN_PID": pid or str(os.getpid()), "LISTEN_FDS": count}
os.environ["LISTEN_FDNAMES"] = "gemctl.socket"
os.execv(command[0], command)
"""


def bound(path: Path) -> socket.socket:
    """A socket as the unit asks for."""
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    path.chmod(0o660)
    sock.listen(128)
    return sock


class Activated(Daemon):
    """Started by its socket, which stays when it ends."""

    def __init__(self, **tables: dict[str, Any]) -> None:
        super().__init__(**tables)
        self.held = bound(self.socket)

    def command(self, count: str = "1", pid: str = "", fd: int | None = None) -> list[str]:
        number = self.held.fileno() if fd is None else fd
        gemctld = [sys.executable, "-m", "gemctl.daemon", "--config", str(self.config)]
        return [sys.executable, "-c", PARENT, str(number), count, pid, *gemctld]

    def spawn(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=log,
                env=self.environment(),
                pass_fds=(self.held.fileno(),),
            )

    def start(self) -> Activated:
        self.spawn()
        wait_for(self.answers, START_S)
        return self

    def refused(self, *, count: str = "1", fd: int | None = None) -> tuple[int, str]:
        """Exit code and last words of a daemon that cannot use what it is given."""
        passed = self.held.fileno() if fd is None else fd
        done = subprocess.run(
            self.command(count, fd=fd),
            env=self.environment(),
            pass_fds=(passed,),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stderr


@pytest.fixture
def daemon() -> Iterator[Activated]:
    with Activated() as made:
        yield made
        made.held.close()


def variables(pid: int) -> set[str]:
    raw = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    return {entry.partition("=")[0] for entry in raw.split("\0")}


def test_a_restart_is_not_seen(daemon: Activated, versions: tuple[Path, Path]) -> None:
    """A command that comes while no daemon is there is answered by the next one."""
    assert daemon.call("daemon.info")["socket"] == str(daemon.socket)
    assert "given by systemd" in daemon.log.read_text(encoding="utf-8")
    daemon.replace(versions[0], name="pilot")
    settled(daemon)
    one = answer_of(versions[0], PROMPT)
    assert daemon.ask(PROMPT)["text"] == one
    inode = daemon.socket.stat().st_ino
    for number in (signal.SIGTERM, signal.SIGKILL):
        daemon.stop(number)
        assert stat.S_ISSOCK(daemon.socket.stat().st_mode), "the socket is not ours to remove"
        answers: list[dict[str, Any]] = []
        client = Client(str(daemon.socket), 60)  # nobody is there, and it waits

        def ask(client: Client = client, answers: list[dict[str, Any]] = answers) -> None:
            answers.append(client.call("daemon.info"))

        waits = threading.Thread(target=ask)
        waits.start()
        daemon.spawn()
        waits.join(60)
        assert [answer["pid"] for answer in answers] == [daemon.pid]
    assert daemon.socket.stat().st_ino == inode
    wait_for(lambda: daemon.call("model.status", name="pilot")["state"] == "serving")
    assert daemon.ask(PROMPT)["text"] == one


def test_commands_during_many_restarts(daemon: Activated) -> None:
    """Whoever asks all the time is never told that there is no daemon."""
    ended = threading.Event()
    seen: list[int] = []
    lost: list[str] = []

    def ask_on() -> None:
        while not ended.is_set():
            done = subprocess.run(
                [sys.executable, "-m", "gemctl.cli", "info", "--json"],
                env=daemon.environment(),
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            if done.returncode == 0:
                seen.append(json.loads(done.stdout)["pid"])
            elif "no daemon" in done.stderr:
                lost.append(done.stderr)

    asking = threading.Thread(target=ask_on)
    asking.start()
    pids = [daemon.pid]
    for _ in range(3):
        wait_for(lambda: seen and seen[-1] == pids[-1])
        assert daemon.stop() == 0
        daemon.spawn()
        pids.append(daemon.pid)
    wait_for(lambda: seen[-1] == pids[-1])
    ended.set()
    asking.join(120)
    assert list(dict.fromkeys(seen)) == pids
    assert lost == []
    print(f"{len(seen)} commands over 3 restarts")


def test_workers_get_nothing_of_it(daemon: Activated, versions: tuple[Path, Path]) -> None:
    daemon.replace(versions[0], name="pilot")
    inode = os.fstat(daemon.held.fileno()).st_ino
    for pid in daemon.workers():
        assert not any(name.startswith("LISTEN_") for name in variables(pid))
        links = []
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(str(entry.readlink()))
        assert f"socket:[{inode}]" not in links


def test_another_process_s_socket_is_not_ours() -> None:
    """LISTEN_PID names somebody else: an inherited environment. It listens by itself."""
    daemon = Activated()
    daemon.held.close()
    daemon.socket.unlink()
    null = os.open(os.devnull, os.O_RDONLY)
    with daemon.log.open("ab") as log:
        daemon.process = subprocess.Popen(
            daemon.command(pid="1", fd=null),
            stdout=log,
            stderr=log,
            env=daemon.environment(),
            pass_fds=(null,),
        )
    os.close(null)
    with contextlib.ExitStack() as stack:
        stack.push(lambda *error: Daemon.__exit__(daemon, *error))
        wait_for(daemon.answers, START_S)
        assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
        assert daemon.stop() == 0
        assert not daemon.socket.exists()


def test_what_is_no_socket_of_ours_is_one_sentence() -> None:
    daemon = Activated()
    read, write = os.pipe()
    tcp = socket.create_server(("127.0.0.1", 0))
    quiet = socket.socket(socket.AF_UNIX)
    try:
        for count, fd, words in (
            ("2", None, "2 sockets were handed over, and one is wanted"),
            ("1", read, "descriptor 3 is no socket"),
            ("1", tcp.fileno(), "not a Unix stream socket that listens"),
            ("1", quiet.fileno(), "not a Unix stream socket that listens"),
        ):
            code, said = daemon.refused(count=count, fd=fd)
            assert code == 2, said
            assert words in said
            assert said.count("\n") == 1, said
    finally:
        for end in (read, write):
            os.close(end)
        for sock in (tcp, quiet, daemon.held):
            sock.close()
        Daemon.__exit__(daemon, None, None, None)
