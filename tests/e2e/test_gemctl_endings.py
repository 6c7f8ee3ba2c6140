"""How things end: the daemon with requests in flight, an answer at its deadline, and every command
of gemctl by Ctrl-C, by a daemon that goes away, and by a reader that does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from daemon import ROOT, Daemon, answer_of, settled, wait_for

PROMPT = "abc"
SLOW = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0.0, "ignore_stop_ids": True}
SENTENCE = "gemctl: stopped by SIGINT; start it again\n"


@pytest.fixture(scope="module")
def daemon(versions: tuple[Path, Path]) -> Iterator[Daemon]:
    with Daemon(models={"probation_s": 0.3}) as made:
        made.replace(versions[0], name="pilot")
        settled(made)
        yield made


# ---- the daemon's end ----


class Peer:
    """A connection, and every line that came on it."""

    def __init__(self, daemon: Daemon) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(daemon.socket))
        self.data = b""

    def ask(self, number: str, method: str, fd: int | None = None, **params: Any) -> None:
        line = json.dumps({"id": number, "method": method, "params": params}).encode() + b"\n"
        socket.send_fds(self.sock, [line], [] if fd is None else [fd])

    def lines(self) -> list[dict[str, Any]]:
        """What came until the other end was closed."""
        with contextlib.suppress(ConnectionResetError):
            while more := self.sock.recv(1 << 16):
                self.data += more
        self.sock.close()
        assert self.data.endswith(b"\n")
        return [json.loads(line) for line in self.data.splitlines()]


def ends(lines: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Of each id: `result` or the error's word, once each."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if "event" not in line:
            word = "result" if "result" in line else line["error"]["code"]
            found.setdefault(line["id"], []).append(word)
    return found


def test_every_request_has_its_last_reply(versions: tuple[Path, Path]) -> None:
    with Daemon(models={"prefault_mbps": 0.05, "probation_s": 0.3}) as daemon:
        text = daemon.config.read_text(encoding="utf-8")
        daemon.config.write_text(text.replace("prefault_mbps = 0.05\n", ""), encoding="utf-8")
        daemon.call("config.reload")
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        daemon.config.write_text(text, encoding="utf-8")
        daemon.call("config.reload")
        daemon.call("throttle.set", duty=0.001)
        asks, follows, changes, silent = (Peer(daemon) for _ in range(4))
        asks.ask("runs", "generate", **SLOW)
        wait_for(lambda: daemon.call("stats")["requests"]["active"])
        asks.ask("waits", "generate", **SLOW)
        wait_for(lambda: daemon.call("stats")["requests"]["queued"])
        follows.ask("all", "events.follow")
        follows.ask("new", "events.follow", after=10_000)
        with versions[1].open("rb") as stream:
            changes.ask("change", "model.replace", stream.fileno(), name="pilot")
        wait_for(lambda: daemon.events("replace.phase")[-1]["phase"] == "verify")
        silent.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for number in range(8):
            silent.ask(str(number), "bundle")
        began = time.monotonic()
        assert daemon.stop() == 0
        took = time.monotonic() - began
        assert ends(asks.lines()) == {"runs": ["cancelled"], "waits": ["cancelled"]}
        lines = changes.lines()
        assert ends(lines) == {"change": ["cancelled"]}
        assert "gemctld stops" in lines[-1]["error"]["message"]
        heard = follows.lines()
        assert ends(heard) == {"all": ["result"], "new": ["result"]}
        last = {line["id"]: line["result"]["last"] for line in heard if "result" in line}
        mine = [line for line in heard if "event" in line and line["id"] == "all"]
        numbers = [line["event"]["seq"] for line in mine]
        assert numbers == list(range(1, last["all"] + 1))
        assert last["new"] == last["all"]
        silent.sock.close()
        assert took < 8, took
        assert "ended\n" in daemon.log.read_text(encoding="utf-8")


def test_who_follows_is_told_that_the_daemon_has_ended(versions: tuple[Path, Path]) -> None:
    with Daemon() as daemon:
        command = typed(daemon, "events", "--follow", "--json")
        assert command.stdout is not None
        daemon.call("throttle.set", mode="silent")
        assert json.loads(command.stdout.readline())["seq"] == 1
        daemon.stop()
        assert command.stderr is not None
        out, err = command.stdout.read(), command.stderr.read()  # also what readline has buffered
        assert command.wait(60) == 3
        assert [json.loads(line) for line in out.splitlines()]
        assert json.loads(err)["error"]["message"].startswith("connection: gemctld has ended")


def test_the_newest_number_is_the_last(daemon: Daemon) -> None:
    seen: list[dict[str, Any]] = []
    with daemon.client() as client:
        found = client.call("events.follow", {"follow": False}, seen.append)
        assert found["last"] == seen[-1]["seq"]
        again = client.call("events.follow", {"follow": False, "after": found["last"]})
        assert again["last"] >= found["last"]


# ---- an answer that is cut off ----


def test_an_answer_cut_at_its_deadline_is_no_success(daemon: Daemon) -> None:
    line = ["generate", PROMPT, "--raw", "--temperature", "0", "--ignore-eos", "--max-tokens"]
    daemon.call("throttle.set", duty=0.01)
    try:
        people = finished(daemon, *line, "150", "--deadline-ms", "700")
        programs = finished(daemon, *line, "150", "--deadline-ms", "700", "--json")
    finally:
        daemon.call("throttle.set", duty=1.0)
    assert people.returncode == programs.returncode == 9
    assert people.stdout.strip()
    assert people.stderr.startswith("gemctl: generate: the answer was cut off at its deadline, aft")
    assert people.stderr.endswith("; give more --deadline-ms, or fewer --max-tokens\n")
    answer = json.loads(programs.stdout)
    assert answer["finish"] == "deadline"
    assert 0 < answer["generated_tokens"] < 150
    error = json.loads(programs.stderr)["error"]
    assert (error["code"], error["retryable"]) == ("timeout", True)


def test_an_answer_that_fills_the_context_says_so(daemon: Daemon) -> None:
    line = ["generate", PROMPT, "--raw", "--temperature", "0", "--ignore-eos"]
    done = finished(daemon, *line, "--max-tokens", "400")
    assert done.returncode == 0
    assert done.stderr.startswith("gemctl: generate: the context is full after ")
    for more in (("--max-tokens", "4"), ("--max-tokens", "400", "--on-full", "slide")):
        assert finished(daemon, *line, *more).stderr == ""


# ---- every command ----

COMMANDS: dict[str, list[str]] = {
    line: line.split()
    for line in (
        "stats", "stats --history", "info", "throttle", "throttle --temp 75", "model list",
        "model status", "model status pilot", "model load pilot", "model unload pilot",
        "model switch pilot", "switch-model pilot", "model enable", "model disable", "model pin x",
        "model priority x 1", "model clear x", "model remove x", "model rollback", "model cancel",
        "model stage FILE --name x", "model replace FILE --name x", "model --replace FILE",
        "model replace --digest abcdef12", "generate x", "generate x --reuse", "calibrate thermal",
        "doctor", "bundle --output OUT", "config reload", "events", "top --once",
        "--auto-reset-kv-cache",
    )
}  # fmt: skip
FOLLOWING = {line: line.split() for line in ("events --follow", "top")}


def typed(daemon: Daemon | Path, *words: str | Path, **more: Any) -> subprocess.Popen[str]:
    """A line, to a daemon or to a place where something listens."""
    place = daemon if isinstance(daemon, Path) else daemon.socket
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "-m", "gemctl.cli", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GEMCTL_SOCKET": str(place)},
        text=True, **{**streams, **more},
    )  # fmt: skip


def finished(daemon: Daemon | Path, *words: str | Path, **more: Any) -> Any:
    command = typed(daemon, *words, **more)
    out, err = command.communicate(timeout=120)
    return subprocess.CompletedProcess(words, command.returncode, out, err)


class Mute:
    """Listens; takes requests and says nothing, or closes the connection (`behind` the request,
    in the middle of an answer)."""

    def __init__(self, folder: Path, answer: bytes | None = None) -> None:
        self.place = folder / "s"
        self.place.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.place))
        self.listener.listen(16)
        self.asked = threading.Event()
        self._answer = answer
        self._peers: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self.listener.accept()
                peer.recv(1 << 16)
                if self._answer is None:
                    self._peers.append(peer)
                else:
                    with contextlib.suppress(OSError):
                        peer.sendall(self._answer)
                    peer.close()
                self.asked.set()

    def __enter__(self) -> Mute:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for peer in (*self._peers, self.listener):
            peer.close()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


def placed(words: list[str], folder: Path) -> list[str]:
    """With files that are there."""
    (folder / "file").write_bytes(b"\x8bGEM\r\n\x1a\n")
    names = {"FILE": str(folder / "file"), "OUT": str(folder / "out")}
    return [names.get(word, word) for word in words]


@pytest.mark.parametrize("as_json", [False, True], ids=["people", "programs"])
@pytest.mark.parametrize("line", COMMANDS)
def test_ctrl_c(line: str, as_json: bool, folder: Path) -> None:
    with Mute(folder) as mute:
        words = placed(COMMANDS[line], folder)
        command = typed(mute.place, *words, *(["--json"] if as_json else []))
        assert mute.asked.wait(60)
        command.send_signal(signal.SIGINT)
        out, err = command.communicate(timeout=60)
        assert (command.returncode, out) == (130, "")
        if as_json:
            assert json.loads(err) == {
                "error": {
                    "code": "cancelled", "message": SENTENCE[8:].rstrip(), "retryable": True,
                }
            }  # fmt: skip
        else:
            assert err == SENTENCE


@pytest.mark.parametrize("line", FOLLOWING)
def test_ctrl_c_is_the_usual_end_of_following(line: str, daemon: Daemon) -> None:
    command = typed(daemon, *FOLLOWING[line])
    assert command.stdout is not None
    assert command.stdout.readline()
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (0, "")


def test_ctrl_c_while_a_prompt_is_typed(folder: Path) -> None:
    command = typed(folder / "s", "generate", "-", stdin=subprocess.PIPE)
    time.sleep(1.5)
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (130, SENTENCE)


@pytest.mark.parametrize("delay_ms", [20, 60, 100, 140, 180, 240])
def test_ctrl_c_at_any_moment_of_a_start(delay_ms: int, folder: Path) -> None:
    """Whatever is imported then: no traceback of ours. Before Python knows the signal it just
    ends by it."""
    with Mute(folder) as mute:
        command = typed(mute.place, "stats", "--history")
        time.sleep(delay_ms / 1e3)
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
        assert command.returncode in (130, -signal.SIGINT, 1), err
        if "gemctl/cli.py" in err:
            assert "Traceback" not in err


@pytest.mark.parametrize("answer", [b"", b'{"v":1,"id":"1","res'], ids=["at once", "half way"])
@pytest.mark.parametrize("line", [*COMMANDS, *FOLLOWING])
def test_a_daemon_that_goes_away(line: str, answer: bytes, folder: Path) -> None:
    words = {**COMMANDS, **FOLLOWING}[line]
    with Mute(folder, answer) as mute:
        done = finished(mute.place, *placed(words, folder))
        assert done.returncode == 3, done.stderr
        assert done.stderr.startswith("gemctl: connection: ")
        assert done.stderr.endswith("; gemctld has ended; start it, and ask again\n")
        assert done.stderr.count("\n") == 1


OTHERS = {
    "no object": b'{"v":1,"id":"1","result":5}',
    "an empty result": b'{"v":1,"id":"1","result":{}}',
    "an empty error": b'{"v":1,"id":"1","error":{}}',
    "half of it": b'{"v":1,"id":"1","result":{"throttle":{},"requests":{},"models":[{}],'
    b'"mqtt":{},"version":"9","ttft_p50_ms":1}}',
}


@pytest.mark.parametrize("answer", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("line", ["stats", "info", "model list", "model status", "throttle",
                                  "doctor", "model pin x", "generate x"])  # fmt: skip
def test_a_daemon_of_another_version(line: str, answer: bytes, folder: Path) -> None:
    """What is not in its answer is told, with the documented code."""
    with Mute(folder, answer + b"\n") as mute:
        done = finished(mute.place, *line.split())
    assert done.returncode == 8, done.stdout + done.stderr
    assert done.stderr.startswith("gemctl: connection: ")
    assert done.stderr.count("\n") == 1


READING = ("stats", "stats --history", "info", "throttle", "model list", "model status", "doctor",
           "events", "top --once", "model pin pilot --off", "generate x", "config schema",
           "completion bash", "--help", "model --help")  # fmt: skip


@pytest.mark.parametrize("line", READING)
def test_a_reader_that_is_gone(line: str, daemon: Daemon) -> None:
    """The documented code, whatever the command has done, and no sentence."""
    read, write = os.pipe()
    os.close(read)
    done = finished(daemon, *line.split(), stdout=write)
    os.close(write)
    assert done.returncode == 8, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("words", ["events --follow", "events", "doctor", "stats"])
def test_head_takes_the_first_line(words: str, daemon: Daemon, versions: tuple[Path, Path]) -> None:
    line = f"set -o pipefail; {sys.executable} -m gemctl.cli {words} | head -1"
    command = subprocess.Popen(
        ["bash", "-c", line],
        env=daemon.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while command.poll() is None and time.monotonic() < until:
        daemon.call("throttle.set", duty=1.0)  # who follows notices at the next event
        time.sleep(0.05)
    out, err = command.communicate(timeout=60)
    assert out.count("\n") == 1
    assert err == ""
    assert command.returncode in (0, 8)
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_a_stderr_that_takes_nothing(daemon: Daemon, where: str, tmp_path: Path) -> None:
    """It changes no exit code, and no error lands among the answers."""
    none = tmp_path / "none"
    for words, code in (
        ("stats", 0), ("model switch nobody", 6), ("xyzzy", 2), (f"--socket {none} stats", 3),
        (f"--socket {none} model switch a", 3), ("stats --json --nonsense", 2),
        ("model rollback", 6),
    ):  # fmt: skip
        done = subprocess.run(
            ["sh", "-c", f"{sys.executable} -m gemctl.cli {words} {where}"],
            env=daemon.environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == code, words
        assert bool(done.stdout) == (code == 0), words


def test_streams_that_were_never_open(daemon: Daemon) -> None:
    for words, code in (("top --once", 0), ("generate -", 2), ("stats", 0)):
        done = subprocess.run(
            ["sh", "-c", f"{sys.executable} -m gemctl.cli {words} <&-"],
            env=daemon.environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr


def test_a_bundle_on_a_full_disk_is_no_mistake_in_the_line(daemon: Daemon) -> None:
    done = finished(daemon, "bundle", "--output", "/dev/full")
    assert done.returncode == 8
    assert "/dev/full: No space left on device; free room on its disk" in done.stderr


def test_a_daemon_that_hangs_is_noticed(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    """Also by what may take long while it is well."""
    lines = [
        ("stats",), ("generate", "x"), ("events", "--follow"), ("top", "--once"),
        ("calibrate", "thermal"), ("switch-model", "pilot"), ("model", "load", "pilot"),
        ("model", "--replace", str(versions[1])), ("model", "--disable"), ("model", "--enable"),
        ("model", "rollback"), ("model", "unload", "pilot"),
    ]  # fmt: skip
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with ThreadPoolExecutor(len(lines)) as pool:
            ends = list(pool.map(lambda words: finished(daemon, *words), lines))
        assert time.monotonic() - began < 40
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    for words, done in zip(lines, ends, strict=True):
        assert done.returncode == 9, (words, done.stderr)
        assert "gemctld does not answer; see its log" in done.stderr, words
