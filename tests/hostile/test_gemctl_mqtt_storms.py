"""Storms and garbage from the broker: the bridge stays up, small, and goes on sending figures.

The bridge runs in a process of its own, with a stand-in for the daemon (broker.FakeService) whose
`daemon.info` tells the bridge's counts; its memory is read from /proc.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiomqtt
import pytest

from broker import SITE, Broker, Client, client, running, secret, until
from gemctl.mqtt.commands import METHODS

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = f"gemctl/v1/{SITE}/m1/cmd"
GROWTH_KIB = 16 * 1024  # of the process, in a storm
PROTOCOLS = ["5", "3.1.1"]

CHILD = """
import asyncio, signal, sys
from broker import Backoff, FakeService
from gemctl.config import MqttConfig
from gemctl.events import EventHub
from gemctl.mqtt import make_bridge


class Service(FakeService):
    async def call(self, method, params, caller, emit=None):
        if method == "daemon.info":
            return made.info()
        self.calls.clear()
        return await super().call(method, params, caller, emit)


async def body():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await made.run(stop)

hub = EventHub()
service = Service(hub)
config = MqttConfig.model_validate_json(sys.argv[1])
made = make_bridge(config, service, hub, backoff=Backoff(0.05, 0.2))
asyncio.run(body())
"""


class Child:
    """The process with the bridge."""

    def __init__(self, process: subprocess.Popen[bytes], plc: Client) -> None:
        self._process, self._plc = process, plc
        self._calls = 0

    def rss_kib(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        return int(status.split("VmRSS:")[1].split()[0])

    async def info(self) -> Any:
        """The bridge's own figures; asked again where a storm swallowed the question."""
        for _ in range(80):
            self._calls += 1
            ident = f"info{self._calls}"
            await self._plc.send("daemon.info", {"id": ident})
            with contextlib.suppress(AssertionError):
                reply = await self._plc.final(f"reply/{ident}", 0.5)
                if "result" in reply:
                    return reply["result"]
        raise AssertionError("the bridge does not answer any more")

    def figures(self) -> int:
        """Messages on the stats topic so far."""
        return sum(seen.topic.endswith("m1/stats") for seen in self._plc.seen)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("storms")) as made:
        yield made


@asynccontextmanager
async def storm(broker: Broker, protocol: str) -> AsyncIterator[tuple[Child, Client]]:
    """A child with the bridge, and a client; afterwards both must be as they should."""
    config = broker.config("m1", protocol=protocol, stats_s=0.1)
    own = f"gemctl/v1/{SITE}/m1"
    async with client(broker, topic=f"{own}/reply/#") as plc:
        for name in ("stats", "event", "status"):
            await plc.client.subscribe(f"{own}/{name}", 1)
        places = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        command = [sys.executable, "-c", CHILD, config.model_dump_json()]
        process = subprocess.Popen(command, env=places)
        try:
            await plc.at("m1/status", state="online")
            child = Child(process, plc)
            await child.info()
            before, told = child.rss_kib(), child.figures()
            yield child, plc
            info = await child.info()
            grown = child.rss_kib() - before
            figures = child.figures() - told
            print(f"MQTT {protocol}: {info['commands']}")
            print(f"memory {before} + {grown} KiB, {figures} figures meanwhile")
            assert grown < GROWTH_KIB
            await until(lambda: child.figures() >= told + 5)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 10) == 0
        finally:
            process.kill()
            process.wait()


async def flood(plc: Client, count: int, make: Callable[[int], tuple[str, bytes]]) -> None:
    """Publish as fast as the broker takes it, a few hundred at once."""
    for start in range(0, count, 200):
        sends: list[Awaitable[None]] = []
        for number in range(start, min(start + 200, count)):
            verb, payload = make(number)
            topic = f"{COMMANDS}/{verb}"
            sends.append(plc.client.publish(topic, payload, number % 3))
        await asyncio.gather(*sends)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_thousands_of_commands(broker: Broker, protocol: str) -> None:
    count = 5000
    methods = sorted(METHODS - {"cancel"})

    def make(number: int) -> tuple[str, bytes]:
        return methods[number % len(methods)], json.dumps({"id": f"s{number}"}).encode()

    async def body() -> None:
        async with storm(broker, protocol) as (child, plc):
            await flood(plc, count, make)
            info = await child.info()
            commands = info["commands"]
            answered = sum(commands.get(word, 0) for word in ("done", "rejected", "failed", "busy"))
            assert commands["arrived"] >= count * 2 // 3  # QoS 0 may be lost in a storm
            assert answered >= commands["arrived"] * 0.9
            assert info["connections"] == 1
            print(f"MQTT {protocol}: {count} commands sent, {commands['arrived']} arrived")

    asyncio.run(body())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_thousands_of_garbage_payloads(broker: Broker, protocol: str) -> None:
    chance = random.Random(7)
    good = json.dumps({"id": "1", "params": {"name": "a", "x": [1, {"y": "\\u00e9"}]}}).encode()
    shapes: list[Callable[[], bytes]] = [
        lambda: chance.randbytes(chance.randrange(2000)),
        lambda: bytes(chance.choice(b'{}[]",:\\0e-.tfn') for _ in range(chance.randrange(400))),
        lambda: good[: chance.randrange(len(good))],
        lambda: mutated(good, chance),
        lambda: b"[" * chance.randrange(60000),
        lambda: b'"' + b'\\"' * chance.randrange(30000),
        lambda: b'{"id":' + b"9" * chance.randrange(30000) + b"}",
        lambda: json.dumps({"id": "\ud800", "params": {"p": "\udfff"}}).encode(),
    ]
    verbs = ["stats", "", "x" * 30000, "ünïcode", "a/b/c/d/e/f", "model.switch", "$SYS", " "]

    def make(number: int) -> tuple[str, bytes]:
        return verbs[number % len(verbs)], shapes[(number // 8) % len(shapes)]()

    async def body() -> None:
        async with storm(broker, protocol) as (child, plc):
            await flood(plc, 2000, make)
            info = await child.info()
            assert info["commands"]["garbage"] > 800
            assert info["connections"] == 1

    asyncio.run(body())


def mutated(data: bytes, chance: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        found[chance.randrange(len(found))] = chance.randrange(256)
    return bytes(found)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_huge_payloads(broker: Broker, protocol: str) -> None:
    """Up to 64 KiB is read, a little more is answered, much more never gets in."""

    async def body() -> None:
        async with storm(broker, protocol) as (child, plc):
            await plc.send("stats", b"x" * (64 * 1024 + 1))
            assert (await plc.final("reply/_"))["error"]["code"] == "bad_request"
            sizes = [131072, 1 << 20, 32 << 20]
            for size in sizes:
                await plc.send("stats", b"x" * size, qos=1)
                await child.info()
            info = await child.info()
            # 3.1.1 has no word for the limit: there a connection ends before the packet is read
            assert info["connections"] == (1 if protocol == "5" else 1 + len(sizes))
            print(f"MQTT {protocol}: {len(sizes)} payloads of up to 32 MiB")

    asyncio.run(body())


def test_packets_that_the_library_cannot_read(broker: Broker) -> None:
    """The broker lets U+FEFF pass in properties, paho does not: it would come again for ever."""

    async def body() -> None:
        async with storm(broker, "5") as (child, plc):
            for number in range(5):
                await plc.send("stats", {"id": f"p{number}"}, UserProperty=("a", "\ufeff"))
                await asyncio.sleep(0.3)
                await child.info()
            await plc.send("stats", {"id": "f"}, ResponseTopic=f"gemctl/v1/{SITE}/reply/\ufeff")
            await asyncio.sleep(0.3)
            pairs = [("k" * 20, "v" * 20)] * 1000
            info = await child.info()
            await plc.send("stats", {"id": "many"}, UserProperty=pairs)
            assert "result" in await plc.final("reply/many")
            assert 2 <= info["connections"] <= 30
            print(f"6 unreadable packets: {info['connections'] - 1} connections lost, all back")

    asyncio.run(body())


def packet(kind: int, body: bytes) -> bytes:
    """A control packet, its length as MQTT writes it."""
    length, left = b"", len(body)
    while True:
        left, low = divmod(left, 128)
        length += bytes([low | (0x80 if left else 0)])
        if not left:
            return bytes([kind]) + length + body


def text(value: bytes) -> bytes:
    return struct.pack(">H", len(value)) + value


def test_topics_that_are_not_utf_8(broker: Broker) -> None:
    """mosquitto throws out who sends them; the bridge hears nothing of it."""

    def attack(topic: bytes) -> None:
        with socket.create_connection(("127.0.0.1", broker.port)) as raw:
            raw.settimeout(5)
            flags = b"\x04\xc2\x00\x3c"
            body = (
                text(b"MQTT") + flags + text(b"raw") + text(b"plc") + text(secret("plc").encode())
            )
            raw.sendall(packet(0x10, body))
            assert raw.recv(4) == b"\x20\x02\x00\x00"
            raw.sendall(packet(0x30, text(topic) + b'{"id":"1"}'))
            with contextlib.suppress(OSError):
                raw.recv(1)

    async def body() -> None:
        async with storm(broker, "5") as (child, _):
            names = [
                b"\xff",
                b"\xc0\x80",
                b"\xed\xa0\x80",
                b"\0",
                b"a\x01b",
                b"\xf8\x88\x80\x80\x80",
            ]
            for name in names:
                await asyncio.to_thread(attack, f"{COMMANDS}/".encode() + name)
            assert (await child.info())["connections"] == 1
            print(f"{len(names)} topics that are not UTF-8")

    asyncio.run(body())


class Forger:
    """A front for mosquitto that puts bytes of its own into what the bridge receives."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None
        self.connections = 0

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    def forge(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer = writer
        self.connections += 1
        ways = [self._pump(reader, inner_writer), self._pump(inner_reader, writer)]
        await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_broker_that_sends_nonsense(broker: Broker, protocol: str) -> None:
    chance = random.Random(11)
    extra = b"\0" if protocol == "5" else b""
    forged = [
        packet(0x30, text(f"{COMMANDS}/".encode() + b"\xff") + extra + b"{}"),  # no UTF-8
        packet(0x32, text(b"\xff\xfe") + b"\0\x01" + extra),
        packet(0x30, text(f"{COMMANDS}/#".encode()) + extra + b"{}"),
        packet(0x30, text(b"") + extra + b"{}"),
        packet(0x30, b"\xff\xff"),
        packet(0x36, text(b"x") + b"\0\x01" + extra),  # QoS 3
        b"\x30\xff\xff\xff\xff\xff",
        b"\x30\xff\xff\xff\x7f",  # 256 MiB to come
        b"\x00\x00",
        b"\xf0\x00",
        packet(0x40, b""),
        packet(0x40, b"\x12\x34"),
        packet(0x90, b"\x12\x34\x00"),
        packet(0x90, b""),
        packet(0x20, b"\x00\x00"),
        packet(0xE0, b"\x8e"),
        packet(0xB0, b"\0\x01"),
        packet(0x62, b"\0\x01"),
        packet(0xD0, b"zzz"),
    ]
    forged += [chance.randbytes(chance.randrange(1, 60)) for _ in range(15)]

    async def body() -> None:
        forger = Forger(broker.port)
        async with forger as port, client(broker) as plc:
            config = broker.config("m1", port=port, protocol=protocol)
            async with running(config) as device:
                for number, data in enumerate(forged):
                    await until(device.up, 20)
                    forger.forge(data)
                    if not await answers(plc, f"a{number}", 4):
                        forger.forge(b"\xff" * 140_000)  # the end of what was only begun
                        assert await answers(plc, f"b{number}", 300), data
                assert not device.task.done()
                print(f"MQTT {protocol}: {len(forged)} forgeries, {forger.connections} connections")

    async def answers(plc: Client, name: str, turns: int) -> bool:
        """It is well again as soon as a question is answered."""
        plc.seen.clear()
        for turn in range(turns):
            await plc.send("throttle.get", {"id": f"{name}-{turn}"})
            with contextlib.suppress(AssertionError):
                await plc.wait(lambda s: f"reply/{name}-" in s.topic, 0.1)
                return True
        return False

    asyncio.run(body())


@pytest.mark.parametrize("away", [False, True])
def test_a_flood_of_retained_commands(tmp_path: Path, away: bool) -> None:
    """None is carried out. A device that was there before and is `away` has each of them twice: its
    session kept what was published meanwhile, and its new subscription finds them as well."""
    topics = [f"{COMMANDS}/model.switch/{number}" for number in range(400)]
    topics.append(f"{COMMANDS}/model.unload")
    wanted = len(topics) * (2 if away else 1)

    async def body(broker: Broker) -> None:
        async with client(broker, topic="") as plc:
            if away:
                async with running(broker.config("m1")) as device:
                    await until(device.up)
            for topic in topics:
                await plc.client.publish(topic, b'{"id":"1"}', 1, retain=True)
            async with running(broker.config("m1")) as device:
                counts = device.bridge.info
                await until(lambda: counts()["commands"].get("retained", 0) >= wanted)
                assert counts()["commands"]["retained"] == wanted
                assert device.service.calls == []
                assert len(device.hub.recent()) < 20
            print(f"{wanted} retained commands dropped")

    with Broker(tmp_path) as own:  # no session of another test's device
        asyncio.run(body(own))


def test_somebody_takes_the_name_again_and_again(broker: Broker) -> None:
    """Nothing is left of a connection: no descriptor, no task."""

    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), len(asyncio.all_tasks())

    async def body() -> None:
        async with running(broker.config("m1")) as device:
            name = f"gemctl-{SITE}-m1"
            counts = []
            for turn in range(10):
                other = aiomqtt.Client(
                    *("127.0.0.1", broker.port),
                    username="m1", password=secret("m1"), identifier=name,
                )  # fmt: skip
                with contextlib.suppress(aiomqtt.MqttError):
                    async with other:
                        await until(lambda: not device.up(0))
                del other
                await device.connected(turn + 2)
                await until(lambda: device.bridge._outbox.empty)
                counts.append(held())
            assert counts[-1][0] <= counts[2][0] + 2
            assert counts[-1][1] <= counts[2][1] + 4
            print(
                f"10 connections lost; descriptors and tasks then and now: {counts[2]} {counts[-1]}"
            )
            async with client(broker) as plc:
                assert "result" in await plc.call("stats", "after")

    asyncio.run(body())


def test_a_flood_of_events_and_of_pieces(broker: Broker) -> None:
    """From the inside: the hub and the streams may be faster than any broker."""

    async def body() -> None:
        async with running(broker.config("m1", stats_s=0.05)) as device, client(broker) as plc:
            count = 60
            for number in range(count):
                await plc.send("generate", {"id": f"g{number}", "stream": True})
            for number in range(20000):
                device.hub.publish("slot.state", number=number)
                if number % 50 == 0:
                    await asyncio.sleep(0)
            await until(lambda: device.bridge._outbox.empty, 20)
            await plc.at("m1/event", number=19999)
            info = device.bridge.info()
            told = sum(b'"number"' in seen.payload for seen in plc.seen)
            assert info["connections"] == 1
            assert told + info["lost_events"] >= 20000
            print(f"20000 events: {told} sent, {info['lost_events']} lost and counted")

    asyncio.run(body())
