"""gemctl-powerd as a real process on a real socket; only /sys is a fake tree, so that a cap is a
number in a file and no clock changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sysfs
from gemctl.board import powerd, powerd_client
from gemctl.board.powerd_client import PowerdClient
from gemctl.errors import ApiError

PATIENCE_S = 20.0
CPU0 = "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq"
CPU4 = "sys/devices/system/cpu/cpufreq/policy4/scaling_max_freq"
GPU = "sys/devices/platform/17000000.gpu/devfreq_dev/max_freq"
TOP, LOW = "1510400", "1200000"
ORIGINALS = {CPU0: TOP, CPU4: "1400000", GPU: "612000000"}


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that has to happen."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


class Powerd:
    """The helper's process and the tree that it works on."""

    def __init__(self, tmp_path: Path) -> None:
        self.tree = sysfs.orin_nano(tmp_path / "tree")
        for place, value in ORIGINALS.items():
            self.tree.put(place, value)
        self.folder = tmp_path / "run"
        self.folder.mkdir()
        self.socket = self.folder / "powerd.sock"
        self.log = tmp_path / "log"
        self.options = ["--group", str(os.getgid()), "--user", str(os.getuid())]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        command = [sys.executable, "-m", "gemctl.board.powerd", "--socket", str(self.socket)]
        command += ["--sysfs-root", str(self.tree.root), *(options or self.options)]
        before = self.said().count("ready: ")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        process = self.process
        until(
            lambda: self.said().count("ready: ") > before or process.poll() is not None, "no start"
        )

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def limits(self) -> dict[str, str]:
        return {place: self.tree.get(place) for place in ORIGINALS}

    def restored(self) -> None:
        """Wait until every limit is as it was, and nothing is left to mend."""
        until(lambda: self.limits() == ORIGINALS, f"limits stay at {self.limits()}\n{self.said()}")
        until(lambda: not (self.folder / "saved.json").exists(), "saved.json stays")


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[Powerd]:
    made = Powerd(tmp_path)
    yield made
    made.end()


class Link:
    """A client of raw lines."""

    def __init__(self, path: Path) -> None:
        self.link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.link.settimeout(PATIENCE_S)
        self.link.connect(str(path))
        self.stream = self.link.makefile("rb")
        self.number = 0

    def send(self, raw: bytes) -> None:
        self.link.sendall(raw)

    def reply(self) -> dict[str, Any]:
        line = self.stream.readline()
        assert line, "the connection has ended"
        value: dict[str, Any] = json.loads(line)
        return value

    def ask(self, verb: str, **fields: object) -> dict[str, Any]:
        self.number += 1
        self.send(json.dumps({"id": self.number, "verb": verb, **fields}).encode() + b"\n")
        reply = self.reply()
        assert reply["id"] == self.number
        return reply

    def drain(self) -> None:
        """Read up to the end of the connection, which has to come."""
        with contextlib.suppress(ConnectionResetError):
            self.stream.read()

    def close(self) -> None:
        self.stream.close()
        self.link.close()


@pytest.fixture
def link(helper: Powerd) -> Iterator[Link]:
    """A connection to a running helper."""
    helper.start()
    made = Link(helper.socket)
    yield made
    made.close()


def test_caps_and_restore(helper: Powerd, link: Link) -> None:
    reply = link.ask("cap_cpu", khz=1200000)
    assert reply["result"] == {"caps": {"cpu:policy0": 1200000, "cpu:policy4": 1200000}}
    assert helper.limits() == {CPU0: LOW, CPU4: LOW, GPU: "612000000"}
    saved = json.loads((helper.folder / "saved.json").read_text())
    assert saved == {"limits": {"cpu:policy0": 1510400, "cpu:policy4": 1400000}}
    assert link.ask("cap_gpu", hz=408000000)["ok"]
    assert link.ask("cap_cpu", khz=1000000, policy=4)["ok"]
    assert helper.limits() == {CPU0: LOW, CPU4: "1000000", GPU: "408000000"}
    assert link.ask("restore")["result"] == {"caps": {}}
    helper.restored()
    lines = [line for line in helper.said().splitlines() if line.startswith("audit: ")]
    assert len(lines) == 7
    assert all(f"uid {os.getuid()} pid {os.getpid()}" in line for line in lines)


def test_a_cap_never_raises_a_clock(helper: Powerd, link: Link) -> None:
    """policy4 was at 1.4 GHz, below its hardware's most."""
    assert link.ask("cap_cpu", khz=1510400)["ok"]
    assert helper.limits() == ORIGINALS
    assert link.ask("cap_cpu", khz=1450000)["ok"]
    assert helper.limits() == {**ORIGINALS, CPU0: "1450000"}


def test_unlike_clusters_are_capped_within_their_own_ranges(helper: Powerd, link: Link) -> None:
    folder = "sys/devices/system/cpu/cpufreq/policy4"
    helper.tree.put(f"{folder}/cpuinfo_max_freq", 1100000)
    helper.tree.put(f"{folder}/cpuinfo_min_freq", 600000)
    helper.tree.put(CPU4, 1100000)
    assert link.ask("cap_cpu", khz=1300000)["ok"]
    assert helper.limits() == {**ORIGINALS, CPU0: "1300000", CPU4: "1100000"}
    assert link.ask("cap_cpu", khz=500000)["ok"]
    assert helper.limits() == {**ORIGINALS, CPU0: "500000", CPU4: "600000"}
    error = link.ask("cap_cpu", khz=1300000, policy=4)["error"]
    assert error == "cpu:policy4: 1300000 kHz is out of range; send 600000 to 1100000"
    assert "send 115200 to 1510400" in link.ask("cap_cpu", khz=1600000)["error"]
    link.ask("restore")
    assert helper.limits() == {**ORIGINALS, CPU4: "1100000"}


def test_status(helper: Powerd, link: Link) -> None:
    link.ask("cap_cpu", khz=1200000, policy=0)
    result = link.ask("status")["result"]
    assert result["caps"] == {"cpu:policy0": 1200000}
    assert result["clocks"]["cpu:policy0"] == {
        "low": 115200, "high": 1510400, "unit": "kHz", "limit": 1200000, "original": 1510400,
    }  # fmt: skip
    assert result["clocks"]["gpu"]["original"] is None
    assert result["modes"] == {"0": "15W", "1": "7W"}
    assert result["lease_s"] == 30.0
    assert result["unrestored"] == []


def test_the_end_of_the_connection_ends_its_caps(helper: Powerd, link: Link) -> None:
    link.ask("cap_cpu", khz=1200000)
    link.ask("cap_gpu", hz=306000000)
    link.close()
    helper.restored()


def test_a_client_that_is_killed_leaves_nothing(helper: Powerd) -> None:
    helper.start()
    code = (
        "import json, socket, sys, time\n"
        "link = socket.socket(socket.AF_UNIX); link.connect(sys.argv[1])\n"
        "link.sendall(json.dumps({'verb': 'cap_cpu', 'khz': 500000}).encode() + b'\\n')\n"
        "link.recv(1000); print('capped', flush=True); time.sleep(600)\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", code, str(helper.socket)], stdout=subprocess.PIPE
    )
    assert client.stdout is not None
    assert client.stdout.readline() == b"capped\n"
    assert helper.limits()[CPU0] == "500000"
    client.kill()
    client.wait(PATIENCE_S)
    client.stdout.close()
    helper.restored()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_it_with_everything_restored(number: int, helper: Powerd, link: Link) -> None:
    link.ask("cap_cpu", khz=1200000)
    assert helper.stop(number) == 0
    helper.restored()
    assert not helper.socket.exists()
    link.drain()


def test_a_kill_in_mid_cap_is_mended_by_the_next_start(helper: Powerd, link: Link) -> None:
    link.ask("cap_cpu", khz=1200000)
    link.ask("cap_gpu", hz=306000000)
    assert helper.stop(signal.SIGKILL) == -signal.SIGKILL
    assert helper.limits() == {CPU0: LOW, CPU4: LOW, GPU: "306000000"}
    helper.start()
    helper.restored()
    assert helper.said().count("restored to") == 3
    again = Link(helper.socket)
    assert again.ask("cap_cpu", khz=800000, policy=0)["ok"]
    again.close()
    helper.restored()


def test_kills_at_random_moments(helper: Powerd) -> None:
    """While caps come and go: the next start always finds the way back."""
    seed = random.Random(4)
    for _ in range(12):
        helper.start()
        assert helper.limits() == ORIGINALS
        link = Link(helper.socket)
        for _ in range(seed.randrange(1, 8)):
            khz = seed.randrange(115200, 1510401)
            link.send(json.dumps({"verb": "cap_cpu", "khz": khz}).encode() + b"\n")
            link.send(b'{"verb":"cap_gpu","hz":408000000}\n{"verb":"restore"}\n')
        time.sleep(seed.random() * 0.02)
        helper.stop(signal.SIGKILL)
        link.close()
    helper.start()
    helper.restored()


def test_two_clients_the_lower_cap_counts(helper: Powerd, link: Link) -> None:
    other = Link(helper.socket)
    link.ask("cap_cpu", khz=1000000)
    other.ask("cap_cpu", khz=1200000)
    assert helper.limits()[CPU0] == "1000000"
    link.ask("restore")
    assert helper.limits()[CPU0] == LOW
    link.ask("cap_cpu", khz=1300000)
    assert helper.limits()[CPU4] == LOW
    other.close()
    until(lambda: helper.limits()[CPU0] == "1300000", "the other client's cap stays")
    link.ask("restore")
    helper.restored()


def test_a_second_helper_is_refused(helper: Powerd, link: Link) -> None:
    link.ask("cap_cpu", khz=1200000)
    second = subprocess.run(
        [sys.executable, "-m", "gemctl.board.powerd", "--socket", str(helper.socket),
         "--sysfs-root", str(helper.tree.root), *helper.options],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert second.returncode == 1
    assert "another gemctl-powerd runs; stop it first" in second.stderr
    assert helper.limits()[CPU0] == LOW
    assert link.ask("status")["ok"]


# Who may ask


@pytest.fixture
def reachable(helper: Powerd) -> Iterator[Path]:
    """The socket's folder where every user gets to; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as name:
        helper.folder = Path(name)
        helper.folder.chmod(0o755)
        helper.socket = helper.folder / "powerd.sock"
        yield helper.folder
        helper.end()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(
    ("uid", "gid", "groups", "allowed"),
    [
        (65534, 65534, [], False),
        (65534, 12345, [], True),
        (65534, 65534, [12345], True),
        (23456, 65534, [], True),
        (23457, 65534, [1, 2, 3], False),
    ],
)
def test_peers(
    uid: int, gid: int, groups: list[int], allowed: bool, helper: Powerd, reachable: Path
) -> None:
    """By the kernel's word on user and groups; the socket's mode is opened to test that alone."""
    helper.start("--group", "12345", "--user", "23456")
    assert helper.socket.stat().st_mode & 0o777 == 0o660
    assert helper.socket.stat().st_gid == 12345
    helper.socket.chmod(0o666)
    code = (
        "import json, os, socket, sys\n"
        "uid, gid, groups = int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])\n"
        "os.setgroups(groups); os.setgid(gid); os.setuid(uid)\n"
        "link = socket.socket(socket.AF_UNIX); link.connect(sys.argv[1])\n"
        'link.sendall(b\'{"id":1,"verb":"cap_cpu","khz":1200000}\\n\')\n'
        "print(link.makefile().readline())\n"
    )
    arguments = [str(helper.socket), str(uid), str(gid), json.dumps(groups)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    reply = json.loads(done.stdout)
    assert reply["ok"] is allowed
    if not allowed:
        assert reply["error"] == "caller: not in the group; add it, or use --user"
        assert helper.limits() == ORIGINALS
        assert f"audit: uid {uid} " in helper.said()
    helper.restored()


# What is refused


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"verb": "cap_cpu", "khz": 115199}, "out of range; send 115200 to 1510400"),
    ({"verb": "cap_cpu", "khz": 1510401}, "out of range; send 115200 to 1510400"),
    ({"verb": "cap_cpu", "khz": 0}, "out of range"),
    ({"verb": "cap_cpu", "khz": -1}, "khz is no whole number"),
    ({"verb": "cap_cpu", "khz": 1e6}, "khz is no whole number"),
    ({"verb": "cap_cpu", "khz": True}, "khz is no whole number"),
    ({"verb": "cap_cpu", "khz": "1200000"}, "khz is no whole number"),
    ({"verb": "cap_cpu", "khz": 10**15}, "khz is no whole number"),
    ({"verb": "cap_cpu"}, "khz is missing"),
    ({"verb": "cap_cpu", "khz": 1200000, "policy": 1}, "cpu:policy1: there is none"),
    ({"verb": "cap_cpu", "khz": 1200000, "policy": "../x"}, "policy is no whole number"),
    ({"verb": "cap_cpu", "khz": 1200000, "path": "/etc/x"}, "unknown field"),
    ({"verb": "cap_gpu", "hz": 1}, "out of range; send 306000000 to 624750000"),
    ({"verb": "nvpmodel", "mode": 7}, "mode 7 is unknown; there are: 0 (15W), 1 (7W)"),
    ({"verb": "status", "x": 1}, "unknown field; it takes none"),
    ({"verb": "write", "path": "/etc/passwd"}, "verb: unknown"),
    ({"verb": ["cap_cpu"]}, "verb: unknown"),
    ({"verb": None}, "verb: unknown"),
    ({}, "verb: unknown"),
]


def test_requests_out_of_bounds(helper: Powerd) -> None:
    helper.start()
    for request, error in REFUSED:
        link = Link(helper.socket)
        link.send(json.dumps({"id": "a", **request}).encode() + b"\n")
        reply = link.reply()
        link.close()
        assert (reply["id"], reply["ok"]) == ("a", False)
        assert error in reply["error"], request
        assert "; " in reply["error"]
    assert helper.limits() == ORIGINALS
    assert not (helper.folder / "saved.json").exists()


def test_garbage_lines(helper: Powerd, link: Link) -> None:
    lines = [
        b"", b"garbage", b"\xff\xfe\0", b"[]", b"1", b'"x"', b"null", b"{", b"[" * 4000,
        b'{"id":{},"verb":"status"}', b'{"id":true,"verb":"status"}', b'{"id":1.5}',
        b'{"id":"' + b"x" * 100 + b'","verb":"status"}', b'{"id":' + b"9" * 3000 + b"}",
    ]  # fmt: skip
    link.ask("cap_cpu", khz=1200000)
    for line in lines:
        link.send(line + b"\n")
        reply = link.reply()
        assert reply["ok"] is False, line
        assert reply["error"]
    until(lambda: link.ask("status")["ok"], "it still answers")
    assert helper.limits()[CPU0] == LOW
    link.close()
    helper.restored()


def test_a_line_without_an_end(helper: Powerd, link: Link) -> None:
    link.ask("cap_cpu", khz=1200000)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(50):
            link.send(b"x" * 1000)
    helper.restored()
    assert Link(helper.socket).ask("status")["ok"]


def test_a_line_in_pieces(helper: Powerd, link: Link) -> None:
    for byte in b'{"id":7,"verb":"cap_cpu","khz":1200000}\n':
        link.send(bytes([byte]))
    assert link.reply()["ok"]
    assert helper.limits()[CPU0] == LOW


def test_a_flood_is_refused_and_then_cut_off(helper: Powerd, link: Link) -> None:
    """Also where the replies are read."""
    errors: list[str] = []
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while len(errors) < 10000:
            link.send(b'{"verb":"restore"}\n' * 50)
            lines = [link.stream.readline() for _ in range(50)]
            errors += [json.loads(line).get("error", "") for line in lines if line]
            if not lines[-1]:
                break
    assert "" in errors
    assert set(errors) == {"", "request: more than 10 a second; wait"}
    assert len(errors) < 10000, "it goes on for ever"
    again = Link(helper.socket)
    assert again.ask("status")["ok"]
    again.close()


def test_a_client_that_never_reads_is_cut_off(helper: Powerd) -> None:
    helper.start()
    deaf = Link(helper.socket)
    deaf.ask("cap_cpu", khz=1200000)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(20000):
            deaf.send(b'{"verb":"x"}\n')
    helper.restored()


def test_at_most_four_connections(helper: Powerd, link: Link) -> None:
    more = [Link(helper.socket) for _ in range(3)]
    assert all(one.ask("status")["ok"] for one in more)
    fifth = Link(helper.socket)
    assert fifth.reply()["error"] == "connections: 4 are open; close one"
    fifth.drain()
    more[0].close()
    until(lambda: _status(helper.socket), "room again")


def _status(path: Path) -> bool:
    made = Link(path)
    try:
        return bool(made.ask("status")["ok"])
    except (AssertionError, OSError):
        return False
    finally:
        made.close()


def test_pinned_clocks_are_refused(helper: Powerd, link: Link) -> None:
    helper.tree.put(CPU0.replace("max", "min"), TOP)
    reply = link.ask("cap_cpu", khz=1200000)
    assert reply["error"] == (
        "cpu:policy0: its lower limit is 1510400 kHz; lower that first (jetson_clocks --restore)"
    )
    assert helper.limits() == ORIGINALS


def test_nothing_to_cap(helper: Powerd, link: Link) -> None:
    helper.tree.remove("sys/devices/system/cpu/cpufreq")
    helper.tree.remove("sys/devices/platform")
    helper.tree.remove("etc/nvpmodel.conf")
    for verb, fields in (("cap_cpu", {"khz": 1}), ("cap_gpu", {"hz": 1})):
        assert "this machine has none" in link.ask(verb, **fields)["error"]
    assert link.ask("nvpmodel", mode=0)["error"].endswith("there are: none")
    assert link.ask("status")["result"]["clocks"] == {}


def test_a_half_failed_cap_is_taken_back(helper: Powerd, link: Link) -> None:
    """policy4's file turns into a folder: its write fails after policy0's has worked."""
    link.ask("status")
    helper.tree.remove(CPU4)
    helper.tree.put(f"{CPU4}/x", 1)
    reply = link.ask("cap_cpu", khz=1200000)
    assert reply["ok"] is False
    assert helper.tree.get(CPU0) == TOP


def test_nvpmodel_runs_the_board_s_program(helper: Powerd, link: Link) -> None:
    program = helper.tree.put("usr/sbin/nvpmodel", "")
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$@" > "{helper.tree.root}/asked"\n'
        f'echo 1000000 > "{helper.tree.root}/{CPU0}"\n'
        '[ "$2" = 1 ] || exit 3\n'
    )
    program.chmod(0o755)
    link.ask("cap_cpu", khz=1200000)
    reply = link.ask("nvpmodel", mode=1)
    assert reply["result"] == {"mode": 1, "name": "7W"}
    assert helper.tree.get("asked") == "-m 1"
    # The mode's own limits are what a later cap comes back to.
    assert link.ask("status")["result"]["caps"] == {}
    link.ask("cap_cpu", khz=800000, policy=0)
    link.ask("restore")
    assert helper.limits() == {**ORIGINALS, CPU0: "1000000"}
    assert link.ask("nvpmodel", mode=0)["error"].startswith("nvpmodel: exit code 3")
    link.close()
    assert helper.limits()[CPU0] == "1000000"  # a mode is an operator's choice: it stays


# With a clock of the test's own, in this process


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Inside:
    """A Helper without its socket."""

    def __init__(self, tmp_path: Path) -> None:
        self.tree = sysfs.orin_nano(tmp_path / "tree")
        for place, value in ORIGINALS.items():
            self.tree.put(place, value)
        self.saved = tmp_path / "saved.json"
        self.clock = Clock()
        self.helper = powerd.Helper(self.tree.root, self.saved, self.clock)
        self.ends: list[socket.socket] = []

    def client(self, number: int = 5) -> powerd.Client:
        mine, other = socket.socketpair()
        self.ends += [mine, other]
        made = powerd.Client(mine, f"client {number}", self.clock())
        self.helper.clients[number] = made
        return made

    def ask(self, client: powerd.Client, **request: object) -> dict[str, Any]:
        return self.helper.answer(client, json.dumps(request).encode())

    def limits(self) -> dict[str, str]:
        return {place: self.tree.get(place) for place in ORIGINALS}


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Inside]:
    made = Inside(tmp_path)
    yield made
    for end in made.ends:
        end.close()


def test_a_silent_client_loses_its_caps_after_30_s(inside: Inside) -> None:
    client = inside.client()
    inside.ask(client, verb="cap_cpu", khz=1200000)
    inside.clock.now = 29.9
    assert inside.helper.tick() <= 1.0
    assert inside.limits()[CPU0] == LOW
    inside.ask(client, verb="status")
    inside.clock.now = 59.8
    inside.helper.tick()
    assert inside.limits()[CPU0] == LOW
    inside.helper.answer(client, b"garbage")  # renews nothing
    inside.clock.now = 59.9
    inside.helper.tick()
    assert inside.limits() == ORIGINALS
    assert inside.ask(client, verb="cap_cpu", khz=1000000)["ok"]
    assert inside.limits()[CPU0] == "1000000"


def test_the_rate(inside: Inside) -> None:
    client = inside.client()
    answers = [inside.ask(client, id=n, verb="status") for n in range(25)]
    assert [answer["ok"] for answer in answers] == [True] * 20 + [False] * 5
    assert answers[24]["id"] == 24
    inside.helper.refill(0.5)
    assert [inside.ask(client, verb="status")["ok"] for _ in range(6)] == [True] * 5 + [False]


def test_while_the_kernel_throttles_an_earlier_limit_counts(inside: Inside) -> None:
    """Its file then shows the kernel's cap; restoring that would keep it for good."""
    inside.tree.cooling(0, "cpufreq-cpu0", 3)
    inside.tree.put(CPU0, 900000)
    client = inside.client()
    inside.ask(client, verb="cap_cpu", khz=800000)
    inside.ask(client, verb="restore")
    assert inside.limits() == ORIGINALS
    inside.tree.put(CPU0, 900000)
    inside.ask(client, verb="cap_cpu", khz=800000)
    inside.ask(client, verb="restore")
    assert inside.limits() == ORIGINALS


def test_what_somebody_else_sets_stays(inside: Inside, capfd: pytest.CaptureFixture[str]) -> None:
    client = inside.client()
    inside.ask(client, verb="cap_cpu", khz=1200000)
    inside.tree.put(CPU0, 1036800)  # nvpmodel, by hand
    inside.ask(client, verb="restore")
    assert inside.limits() == {**ORIGINALS, CPU0: "1036800"}
    assert "cpu:policy0 left at 1036800 kHz: somebody else has set it" in capfd.readouterr().err
    inside.ask(client, verb="cap_cpu", khz=1000000)
    inside.ask(client, verb="restore")
    assert inside.limits()[CPU0] == "1036800"


def test_a_cluster_that_is_off_is_restored_when_it_returns(inside: Inside) -> None:
    client = inside.client()
    inside.ask(client, verb="cap_cpu", khz=1200000)
    folder = inside.tree.root / "sys/devices/system/cpu/cpufreq"
    (folder / "policy4").rename(folder / "away")
    inside.ask(client, verb="restore")
    assert inside.tree.get(CPU0) == TOP
    assert json.loads(inside.saved.read_text()) == {"limits": {"cpu:policy4": 1400000}}
    assert inside.ask(client, verb="status")["result"]["unrestored"] == ["cpu:policy4"]
    (folder / "away").rename(folder / "policy4")
    inside.clock.now = 10.0
    inside.helper.tick()
    assert inside.limits() == ORIGINALS
    assert not inside.saved.exists()


def test_without_a_place_to_remember_nothing_is_capped(tmp_path: Path) -> None:
    inside = Inside(tmp_path)
    inside.helper.caps._saved_path = tmp_path / "missing" / "saved.json"
    reply = inside.ask(inside.client(), verb="cap_cpu", khz=1200000)
    assert "without it nothing is capped" in reply["error"]
    assert inside.limits() == ORIGINALS


@pytest.mark.parametrize(
    "text",
    ["", "x", "[]", "{}", '{"limits":3}', '{"limits":{"../../x":5}}', '{"limits":{"gpu":"x"}}',
     '{"limits":{"gpu":-1}}', '{"limits":{"cpu:policy0":true}}', "[" * 5000],
)  # fmt: skip
def test_a_damaged_memory_is_no_command(text: str, tmp_path: Path) -> None:
    tree = sysfs.orin_nano(tmp_path / "tree")
    saved = tmp_path / "saved.json"
    saved.write_text(text)
    helper = powerd.Helper(tree.root, saved)
    assert helper.caps.saved == {}
    assert tree.get(CPU0) == TOP


# The daemon's side


def test_client_caps_and_restores(helper: Powerd) -> None:
    async def run() -> None:
        client = PowerdClient(helper.socket)
        assert await client.cap_cpu(1200000) == {
            "caps": {"cpu:policy0": 1200000, "cpu:policy4": 1200000}
        }
        assert client.present
        assert await client.cap_gpu(408000000) is not None
        status = await client.status()
        assert status is not None
        assert status["caps"]["gpu"] == 408000000
        with pytest.raises(ApiError, match="gemctl-powerd: cpu: 5 kHz is out of range"):
            await client.cap_cpu(5)
        assert await client.restore() == {"caps": {}}
        await client.cap_cpu(1000000)
        await client.close()

    helper.start()
    asyncio.run(run())
    helper.restored()


def test_client_without_a_helper(tmp_path: Path) -> None:
    async def run() -> None:
        clock = Clock()
        client = PowerdClient(tmp_path / "none.sock", clock)
        assert await client.cap_cpu(1200000) is None
        assert not client.present
        assert await client.status() is None
        assert await client.restore() is None
        await client.close()

    asyncio.run(run())


def test_client_asks_again_after_a_restart(helper: Powerd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(powerd_client, "RENEW_S", 0.05)
    monkeypatch.setattr(powerd_client, "ABSENT_S", 0.0)

    async def run() -> None:
        client = PowerdClient(helper.socket)
        await client.cap_cpu(1200000)
        await client.cap_cpu(1000000, policy=4)
        await asyncio.to_thread(helper.stop, signal.SIGKILL)
        await asyncio.to_thread(helper.start)
        await asyncio.to_thread(
            until, lambda: helper.limits()[CPU4] == "1000000", "the caps do not return"
        )
        assert helper.limits()[CPU0] == LOW
        await client.close()

    helper.start()
    asyncio.run(run())
    helper.restored()


def test_client_of_a_helper_that_is_silent_or_strange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(powerd_client, "TIMEOUT_S", 0.2)
    replies = [b"", b"garbage\n", b"[]\n", b'{"id":99,"ok":true}\n', b"x" * 300000, b"\n"]

    async def run() -> None:
        async def strange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.write(replies.pop(0))
            with contextlib.suppress(OSError):
                await writer.drain()
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(strange, str(tmp_path / "s"))
        client = PowerdClient(tmp_path / "s")
        while replies:
            assert await client.status() is None
            assert not client.present
        await client.close()
        server.close()

    asyncio.run(run())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_client_that_is_not_allowed_is_told(helper: Powerd, reachable: Path) -> None:
    """The daemon runs as a user outside the group: a sentence, not silence."""
    helper.start("--group", "12345", "--user", "23456")
    helper.socket.chmod(0o666)
    code = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from gemctl.board.powerd_client import PowerdClient\n"
        "from gemctl.errors import ApiError\n"
        "async def run():\n"
        "    client = PowerdClient(Path(sys.argv[1]))\n"
        "    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "    try: print(await client.cap_cpu(1200000))\n"
        "    except ApiError as error: print(error)\n"
        "    await client.close()\n"
        "asyncio.run(run())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(helper.socket)],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert done.stdout == "gemctl-powerd: caller: not in the group; add it, or use --user\n"


# What it is made of


def test_it_imports_little_and_stays_small(helper: Powerd, link: Link) -> None:
    link.ask("cap_cpu", khz=1200000)
    assert helper.process is not None
    status = Path(f"/proc/{helper.process.pid}/status").read_text()
    resident = next(int(row.split()[1]) for row in status.splitlines() if row.startswith("VmRSS"))
    assert resident < 24 * 1024, f"{resident} KiB"
    code = "import sys, gemctl.board.powerd; print(*sorted(m for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = set(done.stdout.split())
    ours = {name for name in names if name.startswith("gemctl")}
    assert ours == {"gemctl", "gemctl.board", "gemctl.board.powerd", "gemctl.peers"}
    assert not names & {"pydantic", "click", "asyncio", "numpy", "msgpack", "ssl"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--group", "no-such-group-here"], "no-such-group-here: no such group or user"),
        (["--user", "no-such-user-here", "--group", "0"], "no-such-user-here: no such group"),
    ],
)
def test_a_start_that_fails_says_why(options: list[str], text: str, helper: Powerd) -> None:
    helper.start(*options)
    assert helper.process is not None
    assert helper.process.wait(PATIENCE_S) == 1
    assert text in helper.said()
    assert "Traceback" not in helper.said()


def test_a_folder_that_is_missing(helper: Powerd) -> None:
    helper.folder.rmdir()
    helper.start()
    assert helper.process is not None
    assert helper.process.wait(PATIENCE_S) == 1
    assert "make the folder, owned by root" in helper.said()
