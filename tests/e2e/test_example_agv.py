"""The AGV example as it is used: broker, daemon, engine, node and vehicle, each a process.

The vehicle is the test: it reads the bus. A random model says nothing useful, SmolLM2 may. What it
says is not asserted, only that every order has one decision, safe and labelled, and one frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "agv"
sys.path.insert(0, str(EXAMPLE))

from can_bus import Frame, open_receiver, pack, unpack  # noqa: E402
from decide import DEADLINE_S, STOP, WHYS, Decision, contradiction, rule  # noqa: E402
from order import Command, Order  # noqa: E402

from broker import Broker, client, until  # noqa: E402
from daemon import Daemon, wait_for  # noqa: E402

ACL = """\
user plc
topic readwrite agv/#

user m1
topic read agv/m1/order
topic write agv/m1/decision
"""
TINY = ("--quantization", "int4", "--kv-cache-size", "1024", "--effort", "fast")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("agv"), acl=ACL) as made:
        yield made


@pytest.fixture(scope="module")
def gemctld(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> Iterator[Daemon]:
    """With the random model `tiny`."""
    with Daemon() as made:
        made.replace(artifact_cache(tiny_checkpoint("qwen3"), *TINY), name="tiny")
        yield made


def vcan(folder: Path) -> tuple[list[str], Any]:
    """The node's words for its bus: vcan0 where it is up and nobody tests on it, and its lock."""
    lock = (folder / "vcan0.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket(socket.AF_CAN, socket.SOCK_RAW, socket.CAN_RAW) as probe:
            probe.bind(("vcan0",))
        return ["--can", "vcan0"], lock
    except OSError:
        return [], lock


class Node:
    """agv_node.py as a process, and the vehicle's end of its bus."""

    def __init__(self, gemctld: Daemon, broker: Broker, bus: list[str], *words: str) -> None:
        place = gemctld.folder / "can"
        self._sock, self.bus = open_receiver(bus[1] if bus else None, place)
        self.raw: list[bytes] = []
        command = [sys.executable, str(EXAMPLE / "agv_node.py"), "--name", "m1"]
        command += ["--port", str(broker.port), "--username", "m1"]
        command += ["--stale-s", "3600"]  # a slow machine must not decide a test
        command += ["--password-file", str(broker.password_file("m1"))]
        command += ["--gemctl", str(gemctld.socket), *(bus or ["--stand-in", str(place)]), *words]
        self.log = gemctld.folder / "agv.log"
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def __enter__(self) -> Node:
        wait_for(lambda: "takes orders" in self.text() or self.process.poll() is not None)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._sock.close()
        print(self.text())

    def end(self) -> str:
        """SIGTERM; its last line."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(20) == 0, self.text()
        return self.text().splitlines()[-1]

    def read(self) -> int:
        """Take what is on the bus; how many frames there have been."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.raw.append(self._sock.recv(64))
        return len(self.raw)

    def frames(self) -> list[Frame]:
        found = [unpack(raw) for raw in self.raw]
        assert None not in found
        return [frame for frame in found if frame is not None]


def order(number: int, **fields: Any) -> bytes:
    whole = {"id": f"o-{number}", "goal": f"bring box {number} to dock 4", "battery_percent": 80}
    return json.dumps({**whole, "obstacle_cm": None, **fields}).encode()


async def drive(
    node: Node,
    broker: Broker,
    payloads: list[bytes],
    one_by_one: bool = False,
    before: int = 0,
) -> list[dict[str, Any]]:
    """Send orders; the reports of their decisions. `before`: frames that there are already."""
    async with client(broker, topic="agv/m1/decision") as plc:

        async def decided(count: int) -> None:
            await until(lambda: node.read() >= before + count and len(plc.seen) >= count, 60)

        for number, payload in enumerate(payloads, 1):
            await plc.client.publish("agv/m1/order", payload, 1)
            if one_by_one:
                await decided(number)
        await decided(len(payloads))
        await asyncio.sleep(0.3)
        assert (node.read(), len(plc.seen)) == (before + len(payloads), len(payloads))
        return [seen.json for seen in plc.seen]


def checked(reports: list[dict[str, Any]], frames: list[Frame], seen: dict[str, Order]) -> None:
    """Numbered, labelled, safe, and the same on the bus."""
    first = reports[0]["number"]
    assert [report["number"] for report in reports] == list(range(first, first + len(reports)))
    for report, frame in zip(reports, frames, strict=True):
        command = Command.model_validate(report["command"])
        assert report["why"] in WHYS
        assert (report["source"] == "model") == (report["why"] == "answered")
        assert (frame.action, frame.speed_cm_s) == (command.action, command.speed_cm_s)
        assert (frame.source, frame.why) == (report["source"], report["why"])
        assert frame.counter == report["number"] & 0xFF
        assert report["frames_lost"] == 0
        known = seen.get(report["order"])
        if known is None:
            assert command == STOP
        else:
            assert contradiction(known, command) == ""
            assert report["source"] == "model" or command == rule(known)


def figures(what: str, reports: list[dict[str, Any]]) -> None:
    """Times as measured: printed, never a verdict on a machine that others use as well."""
    times = sorted(report["ms"] for report in reports)
    late = sum(ms > DEADLINE_S * 1e3 for ms in times)
    whys = dict(Counter(report["why"] for report in reports))
    middle = times[len(times) // 2]
    print(f"{what}: p50 {middle:.1f} ms, most {times[-1]:.1f} ms, {late} late; {whys}")


async def publish(broker: Broker, payloads: list[bytes], retain: bool = False) -> None:
    async with client(broker, topic="") as plc:
        for payload in payloads:
            await plc.client.publish("agv/m1/order", payload, 1, retain)


def test_orders_become_frames(gemctld: Daemon, broker: Broker, tmp_path_factory: Any) -> None:
    """Good, near, low, late, broken, repeated and kept orders, with a model that talks garbage."""
    bus, lock = vcan(tmp_path_factory.getbasetemp().parent)
    states: list[dict[str, Any]] = [
        {},
        {"obstacle_cm": 60},
        {"battery_percent": 4},
        {"obstacle_cm": 220},
        {"expires_at": 5},
        {"expires_at": 4e9},
    ]
    good = [order(number, **states[number % 6]) for number in range(24)]
    broken = [b"", b"{", b'{"id":"x"}', b"\xff" * 2000, b"[" * 2000, order(99, goal="a\nb")]
    asyncio.run(publish(broker, [order(500)], retain=True))
    with lock, Node(gemctld, broker, bus, "--model", "tiny") as node:
        wait_for(node.read)
        assert [(frame.why, frame.action) for frame in node.frames()] == [("retained", "stop")]
        reports = asyncio.run(drive(node, broker, [*good, *broken], one_by_one=True, before=1))
        read = [Order.model_validate_json(payload) for payload in good]
        seen = {one.id: one for one in read if one.expires_at != 5}
        checked(reports, node.frames()[1:], seen)
        figures("a random model", reports)
        assert {report["source"] for report in reports} == {"rule"}
        whys = Counter(report["why"] for report in reports)
        assert (whys["obstacle"], whys["expired"], whys["unreadable"]) == (4, 4, 6)
        asyncio.run(publish(broker, good[:14]))
        reports = asyncio.run(drive(node, broker, [order(24)], before=31))
        checked(reports, node.frames()[31:], {"o-24": Order.model_validate_json(order(24))})
        wanted = "46 orders, 14 of them twice, 32 decisions; 32 frames sent, 0 lost"
        assert wanted in node.end()
    asyncio.run(publish(broker, [b""], retain=True))
    assert ("STAND-IN" in node.text()) == (not bus)
    print(f"the bus was {node.bus}")


def test_the_storm_of_a_thousand(gemctld: Daemon, broker: Broker) -> None:
    payloads = [order(n, obstacle_cm=(None, 50)[n % 2]) for n in range(1000)]
    with Node(gemctld, broker, [], "--model", "tiny") as node:
        reports = asyncio.run(drive(node, broker, payloads))
        read = [Order.model_validate_json(payload) for payload in payloads]
        checked(reports, node.frames(), {one.id: one for one in read})
        assert [report["order"] for report in reports] == [one.id for one in read]
        figures("1000 orders at once", reports)
        assert "1000 decisions; 1000 frames sent, 0 lost" in node.end()


@pytest.mark.slow
def test_smollm2_commands(
    smollm2_gguf: Path,
    artifact_cache: Callable[..., Path],
    broker: Broker,
) -> None:
    """A real model: whatever it says, every command is valid, safe and labelled."""
    artifact = artifact_cache(smollm2_gguf, "--effort", "fast", "--kv-cache-size", "256")
    goals = ("fetch crate 2", "bring box 12 to dock 1", "go to aisle 3 and wait", "return")
    states = [(None, 80), (250, 70), (None, 9), (60, 50), (1200, 100), (100, 15)]
    payloads = [
        order(n, goal=goals[n % 4], obstacle_cm=states[n % 6][0], battery_percent=states[n % 6][1])
        for n in range(24)
    ]
    with Daemon(throttle={"mode": "off"}) as gemctld:  # it has no sensors
        gemctld.replace(artifact, name="smollm2")
        with Node(gemctld, broker, [], "--model", "smollm2") as node:
            reports = asyncio.run(drive(node, broker, payloads, one_by_one=True))
            read = [Order.model_validate_json(payload) for payload in payloads]
            checked(reports, node.frames(), {one.id: one for one in read})
            figures("SmolLM2", reports)
            for report in reports:
                command, by = report["command"], report["source"]
                print(f"  {report['order']}: {command} by {by}: {report['why']} {report['detail']}")
            assert "24 decisions; 24 frames sent, 0 lost" in node.end()


def test_an_open_order_is_decided_at_the_end(gemctld: Daemon, broker: Broker) -> None:
    """SIGTERM while the daemon hangs: the order that waits still gets its frame."""
    with Node(gemctld, broker, [], "--model", "tiny") as node:
        os.kill(gemctld.pid, signal.SIGSTOP)
        try:
            asyncio.run(publish(broker, [order(1)]))
            time.sleep(0.1)
            last = node.end()
        finally:
            os.kill(gemctld.pid, signal.SIGCONT)
        found = re.search(r"agv: (\d) orders, 0 of them twice, (\d) decisions; (\d) frames", last)
        assert found is not None
        assert found[1] == found[2] == found[3] == str(node.read())
        assert {frame.why for frame in node.frames()} <= {"ended", "timeout"}


def test_the_front_page_is_right() -> None:
    """What a vehicle's programmer reads: the reasons in the order of their numbers."""
    text = (EXAMPLE / "README.md").read_text(encoding="utf-8")
    listed = text.split("`why`: ")[1].split("meanings")[0]
    assert tuple(re.findall(r"`(\w+)`", listed)) == WHYS


def test_no_bus_is_said() -> None:
    """Without an interface and a stand-in, or with an interface that is not there, it ends."""
    for words in ([], ["--can", "nosuchcan0"]):
        command = [sys.executable, str(EXAMPLE / "agv_node.py"), "--name", "m1", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 1
        assert re.fullmatch(r"agv: (CAN|nosuchcan0): [^;]+; [^;]+\n", done.stderr)


def test_the_vehicle_prints_what_it_reads(tmp_path: Path) -> None:
    """examples/agv/vehicle.py as a process of its own."""
    place = tmp_path / "can"
    command = [sys.executable, str(EXAMPLE / "vehicle.py"), "--stand-in", str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as vehicle:
        assert vehicle.stdout is not None
        try:
            assert "STAND-IN" in vehicle.stdout.readline()
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"x" * 16, str(place))
                told = Decision(258, "a", STOP, "rule", "obstacle", "", 1.0)
                sender.sendto(pack(told), str(place))
            assert "ignored" in vehicle.stdout.readline()
            wanted = "2 stop     0 cm/s, valid for 2 s  by rule: obstacle"
            assert vehicle.stdout.readline().strip() == wanted
        finally:
            vehicle.kill()
