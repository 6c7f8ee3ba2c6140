"""The Modbus bridge as a PLC sees it: PDUs by hand, a real daemon with two models behind it.

What time decides (stale figures, half requests, a daemon that hangs) is tested with an injected
clock, or with limits made short, against a bridge in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "modbus"
sys.path.insert(0, str(EXAMPLE))

import bridge as modbus  # noqa: E402
from bridge import MODES, STATES, Bridge  # noqa: E402

from daemon import Daemon, wait_for  # noqa: E402
from gemctl import config  # noqa: E402
from gemctl.core import slots  # noqa: E402

TINY = ("--quantization", "int4", "--kv-cache-size", "192", "--effort", "fast")
MODELS = ("small", "large", "nobody")  # the daemon does not know the last one
STALE, TEMPERATURE, RATE, LEVEL, STATE, ACTIVE, MODE, MODEL = 1, 3, 4, 5, 6, 7, 8, 9


class Plc:
    """One connection. Raw requests; replies are read whole."""

    def __init__(self, port: int, room: int = 1 << 16) -> None:
        self._sock = socket.socket()
        self._sock.settimeout(20)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        self._sock.connect(("127.0.0.1", port))
        self._count = 0

    def __enter__(self) -> Plc:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def bytes(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._sock.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def reply(self) -> tuple[int, int, bytes]:
        """(transaction, unit, PDU)."""
        transaction, protocol, length, unit = struct.unpack(">HHHB", self.bytes(7))
        assert protocol == 0
        assert 2 <= length <= 254
        return transaction, unit, self.bytes(length - 1)

    def ask(self, pdu: bytes) -> bytes:
        """The reply's PDU; transaction and unit must come back."""
        self._count = (self._count + 257) & 0xFFFF
        unit = self._count & 0xFF
        self.send(struct.pack(">HHHB", self._count, 0, len(pdu) + 1, unit) + pdu)
        transaction, same, reply = self.reply()
        assert (transaction, same) == (self._count, unit)
        return reply

    def read(self, address: int = 0, count: int = 10, function: int = 3) -> list[int]:
        reply = self.ask(struct.pack(">BHH", function, address, count))
        assert reply[0] == function, f"exception {reply[1]}"
        assert reply[1] == 2 * count == len(reply) - 2
        return list(struct.unpack(f">{count}H", reply[2:]))

    def write(self, address: int, *values: int) -> int:
        """0, or the exception code. One value with function 6, several with 16."""
        count = len(values)
        words = struct.pack(f">{count}H", *values)
        pdu = struct.pack(">BHHB", 16, address, count, 2 * count) + words
        if count == 1:
            pdu = struct.pack(">BH", 6, address) + words
        reply = self.ask(pdu)
        if reply[0] & 0x80:
            assert reply[0] == pdu[0] | 0x80
            assert len(reply) == 2
            return reply[1]
        assert reply == pdu[:5]
        return 0

    def closed(self) -> bool:
        """The other end closes, and sends nothing more."""
        try:
            return self._sock.recv(1) == b""
        except ConnectionError:
            return True


class Process:
    """bridge.py as a process."""

    def __init__(self, daemon: Daemon, *words: str) -> None:
        command = [sys.executable, str(EXAMPLE / "bridge.py"), "--port", "0"]
        command += ["--gemctl", str(daemon.socket), "--models", *MODELS, *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Process:
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.port = int(self.line.split(":")[2].split(",")[0])
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> str:
        """SIGTERM; what it had to complain about."""
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=20)
        assert self.process.returncode == 0
        return errors


@pytest.fixture(scope="module")
def daemon(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> Iterator[Daemon]:
    with Daemon() as made:
        for seed, name in enumerate(MODELS[:2]):
            made.replace(artifact_cache(tiny_checkpoint("qwen3", seed=seed), *TINY), name=name)
        made.ask("abc", model="small")
        yield made


@pytest.fixture(scope="module")
def served(daemon: Daemon) -> Iterator[Process]:
    """With figures that count for an hour: a slow machine must not decide a test."""
    with Process(daemon, "--write", "--stale-s", "3600") as made:
        yield made
        assert made.end() == ""


def served_one(port: int) -> Plc | None:
    """A connection that is served, or None where there are too many."""
    made = Plc(port)
    with contextlib.suppress(EOFError, ConnectionError):
        made.read()
        return made
    made.__exit__()
    return None


@pytest.fixture
def plc(served: Process) -> Iterator[Plc]:
    with wait_for(lambda: served_one(served.port)) as made:  # those before are just going
        yield made


def fresh(plc: Plc, register: int, value: int) -> list[int]:
    """All registers, once the poll has brought this value."""
    return wait_for(lambda: (all_ := plc.read())[register] == value and all_)


# ---- with the daemon ----


def test_words_are_the_daemons() -> None:
    assert slots.STATES == STATES
    assert get_args(config.Mode) == MODES


def test_registers_are_the_daemons_figures(daemon: Daemon, plc: Plc) -> None:
    assert plc.write(MODEL, 1) == 0
    daemon.ask("abc")
    stats = daemon.call("stats")
    rate = min(round(stats["throughput_tps"] * 10), 0xFFFE)
    found = fresh(plc, RATE, rate)
    assert found[:3] == [1, 0, found[2]]
    assert found[2] <= 3
    assert found[TEMPERATURE] == 0x8000  # this machine has no sensor
    assert found[LEVEL] == stats["throttle"]["level"]
    assert STATES[found[STATE]] == stats["state"] == "serving"
    assert MODELS[found[ACTIVE] - 1] == stats["model"] == "small"
    assert MODES[found[MODE] - 1] == stats["throttle"]["mode"]
    steady = [place for place in range(10) if place != 2]  # all but the age
    for address in range(10):
        for count in range(1, 11 - address):
            part = plc.read(address, count)
            same = [place for place in steady if address <= place < address + count]
            assert [part[place - address] for place in same] == [found[place] for place in same]
    assert [plc.read(0, 8, 4)[place] for place in steady if place < 8] == [
        found[place] for place in steady if place < 8
    ]


def test_writes_reach_the_daemon(daemon: Daemon, plc: Plc) -> None:
    for number, mode in enumerate(MODES, 1):
        assert plc.write(MODE, number) == 0
        assert plc.read()[MODE] == number
        assert daemon.call("throttle.get")["mode"] == mode
    for mode, model in ((2, 2), (4, 1), (2, 2), (2, 1)):
        assert plc.write(MODE, mode, model) == 0
        assert plc.read()[ACTIVE : MODEL + 1] == [model, mode, model]
        stats = daemon.call("stats")
        assert (stats["model"], stats["throttle"]["mode"]) == (MODELS[model - 1], MODES[mode - 1])
    assert plc.write(MODEL, 3) == 4  # the daemon has no such model
    assert plc.write(MODEL, 2) == 0
    daemon.call("throttle.set", mode="silent")
    daemon.call("model.switch", name="small")
    fresh(plc, MODE, MODES.index("silent") + 1)
    assert plc.read()[MODEL] == 1
    assert plc.write(MODE, 2) == 0


def word(function: int, *words: int, more: bytes = b"") -> bytes:
    return struct.pack(f">B{len(words)}H", function, *words) + more


@pytest.mark.parametrize(
    ("pdu", "code"),
    [
        (word(3, 0, 0), 3),
        (word(3, 0, 126), 3),
        (word(4, 0, 0xFFFF), 3),
        (word(3, 0), 3),
        (word(3, 0, 1, more=b"\0"), 3),
        (word(4), 3),
        (word(3, 10, 1), 2),
        (word(3, 9, 2), 2),
        (word(3, 0xFFFF, 125), 2),
        (word(4, 8, 1), 2),
        (word(4, 0, 9), 2),
        (word(6, 0, 1), 2),
        (word(6, 7, 1), 2),
        (word(6, 10, 1), 2),
        (word(6, 0xFFFF, 1), 2),
        (word(6, MODE, 0), 3),
        (word(6, MODE, 7), 3),
        (word(6, MODE, 0xFFFF), 3),
        (word(6, MODEL, 0), 3),
        (word(6, MODEL, 4), 3),
        (word(6, MODE), 3),
        (word(6, MODE, 1, 1), 3),
        (word(6), 3),
        (word(16, MODE, 0, more=b"\0"), 3),
        (word(16, MODE, 1, more=b"\2\0"), 3),
        (word(16, MODE, 1, more=b"\2\0\2\0"), 3),
        (word(16, MODE, 1, more=b"\4\0\2"), 3),
        (word(16, MODE, 124, more=b"\xf8" + b"\0\2" * 123), 3),
        (word(16, MODE, 2, more=b"\4\0\2\0\0"), 3),
        (word(16, MODE, 2, more=b"\4\0\3\0\x09"), 3),
        (word(16, MODE, 3, more=b"\6\0\2\0\1\0\1"), 2),
        (word(16, 7, 2, more=b"\4\0\1\0\2"), 2),
        (word(16, MODE), 3),
        (word(16), 3),
    ],
    ids=lambda value: value.hex() if isinstance(value, bytes) else str(value),
)
def test_what_is_wrong_is_refused_and_changes_nothing(
    daemon: Daemon, plc: Plc, pdu: bytes, code: int
) -> None:
    before = daemon.call("throttle.get")["mode"], daemon.call("stats")["model"]
    assert plc.ask(pdu) == bytes([pdu[0] | 0x80, code])
    assert (daemon.call("throttle.get")["mode"], daemon.call("stats")["model"]) == before
    assert plc.read()[0] == 1


def test_every_other_function_is_illegal(plc: Plc) -> None:
    for function in set(range(256)) - {3, 4, 6, 16}:
        for more in (b"", b"\0\0\0\1", b"\0" * 250):
            assert plc.ask(bytes([function]) + more) == bytes([function | 0x80, 1])


def test_without_write_nothing_is_written(daemon: Daemon) -> None:
    before = daemon.call("throttle.get")["mode"]
    with Process(daemon) as made, Plc(made.port) as plc:
        assert made.line.endswith("reads\n")
        assert [plc.write(MODE, 1), plc.write(MODE, 1, 1)] == [1, 1]
        assert plc.read()[0] == 1
        assert len(plc.read(0, 8, 4)) == 8
        assert daemon.call("throttle.get")["mode"] == before
        assert made.end() == ""  # with a connection open


# ---- what is no Modbus ----


def head(length: int, protocol: int = 0) -> bytes:
    return struct.pack(">HHHB", 7, protocol, length, 1)


@pytest.mark.parametrize(
    "data",
    [head(6, 1), head(6, 0xFFFF), head(0), head(1), head(255), head(0xFFFF), b"GET / HTTP/1.1\r\n"],
    ids=bytes.hex,
)
def test_a_broken_frame_ends_its_connection(served: Process, plc: Plc, data: bytes) -> None:
    assert plc.read()[0] == 1
    plc.send(data + word(3, 0, 1))
    assert plc.closed()
    with Plc(served.port) as other:
        assert other.read()[0] == 1


def test_requests_in_pieces_and_in_heaps(served: Process, plc: Plc) -> None:
    request = head(6) + word(3, 0, 2)
    for byte in request:
        plc.send(bytes([byte]))
        time.sleep(0.002)
    assert plc.reply()[2][:4] == b"\3\4\0\1"
    many = [struct.pack(">HHHB", n, 0, 6, n & 0xFF) + word(3, n % 12, 1) for n in range(500)]
    plc.send(b"".join(many) + request[:9])
    for number in range(500):
        transaction, unit, pdu = plc.reply()
        assert (transaction, unit) == (number, number & 0xFF)
        assert pdu[0] == (3 if number % 12 < 10 else 0x83)
    plc.send(request[9:])
    assert plc.reply()[0] == 7
    for cut in range(len(request)):  # half a request, and gone
        with Plc(served.port) as other:
            other.send(request[:cut])
    assert plc.read()[0] == 1


def test_garbage_harms_nobody(served: Process, plc: Plc) -> None:
    chance = random.Random(5)
    replies = 0
    for number in range(300):
        with Plc(served.port) as other, contextlib.suppress(ConnectionError):
            pdu = chance.randbytes(chance.randrange(1, 254))
            framed = head(len(pdu) + 1) + pdu
            other.send(framed if number % 2 else chance.randbytes(chance.randrange(400)))
            if number % 2:
                reply = other.reply()[2]
                assert reply[0] & 0x7F == pdu[0] & 0x7F
                replies += 1
    assert replies == 150
    assert plc.read()[0] == 1


def test_connections_are_bounded(served: Process) -> None:
    def one() -> Plc | None:
        return served_one(served.port)

    with contextlib.ExitStack() as stack:
        most = modbus.CONNECTIONS_MOST
        open_: list[Plc] = [stack.enter_context(wait_for(one)) for _ in range(most)]
        for _ in range(50):
            assert one() is None
        assert all(plc.read()[0] == 1 for plc in open_)
        open_[3].__exit__()
        open_[3] = stack.enter_context(wait_for(one))
        assert all(plc.read()[0] == 1 for plc in open_)
    for _ in range(200):
        with Plc(served.port):
            pass
    with wait_for(one) as plc:
        assert plc.read()[0] == 1


# ---- the daemon away ----


def test_a_killed_daemon_and_its_return(daemon: Daemon) -> None:
    with Process(daemon, "--write") as made, Plc(made.port) as plc:
        fresh(plc, STALE, 0)
        daemon.stop(signal.SIGKILL)
        assert plc.write(MODE, 2) == 4
        assert plc.write(MODE, 2, 1) == 4
        assert plc.read()[0] == 1  # reads are answered all the time
        found = fresh(plc, STALE, 1)
        assert found[2] >= 3
        assert found[3:] == [0x8000, 0xFFFF, 0xFFFF, 0xFFFF, 0, 0, 0]
        daemon.start()
        fresh(plc, STALE, 0)
        wait_for(lambda: daemon.call("stats")["state"] == "serving")
        assert plc.write(MODE, 2) == 0


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def in_process(
    folder: Path, talk: Talk | None, **options: Any
) -> AsyncIterator[tuple[Bridge, int]]:
    """A bridge in this process, with a stand-in for the daemon, and its port."""
    place = folder / "s"
    made = Bridge(place, MODELS, True, **options)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert talk is not None
        with contextlib.suppress(OSError):
            await talk(reader, writer)
        writer.close()

    behind = await asyncio.start_unix_server(serve, place) if talk is not None else None
    server = await asyncio.start_server(made.accept, "127.0.0.1", 0, limit=1024)
    try:
        yield made, server.sockets[0].getsockname()[1]
    finally:
        server.close()
        if behind is not None:
            behind.close()
        place.unlink(missing_ok=True)


def always(text: bytes) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(text + b"\n")
        await writer.drain()

    return talk


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def told(**stats: Any) -> Talk:
    whole = {"temp_c": 51.26, "throughput_tps": 12.5, "model": "large", "state": "serving"}
    throttle = {"mode": "balanced", "level": 2}
    result = {**whole, "throttle": throttle, **stats}
    return always(json.dumps({"v": 1, "id": "1", "result": result}).encode())


def test_figures_grow_stale_by_the_clock(tmp_path: Path) -> None:
    now = 100.0

    async def body() -> None:
        nonlocal now
        async with in_process(tmp_path, told(), clock=lambda: now) as (made, _):
            assert made.registers()[:3] == [1, 1, 0xFFFF]  # never read
            await made.poll()
            assert made.registers() == [1, 0, 0, 513, 125, 2, 6, 2, 2, 2]
            now += 3.0
            assert made.registers()[:4] == [1, 0, 3, 513]
            now += 0.1
            assert made.registers() == [1, 1, 3, 0x8000, 0xFFFF, 0xFFFF, 0xFFFF, 0, 0, 0]
            now += 1e6
            assert made.registers()[2] == 0xFFFE
            await made.poll()
            assert made.registers()[:3] == [1, 0, 0]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("stats", "register", "value"),
    [
        ({"temp_c": -12.34}, TEMPERATURE, 0x10000 - 123),
        ({"temp_c": 0}, TEMPERATURE, 0),
        ({"temp_c": 1e9}, TEMPERATURE, 32767),
        ({"temp_c": -1e9}, TEMPERATURE, 0x8001),
        ({"temp_c": float("nan")}, TEMPERATURE, 0x8000),
        ({"temp_c": float("inf")}, TEMPERATURE, 32767),
        ({"temp_c": None}, TEMPERATURE, 0x8000),
        ({"temp_c": "hot"}, TEMPERATURE, 0x8000),
        ({"temp_c": True}, TEMPERATURE, 0x8000),
        ({"throughput_tps": 10**300}, RATE, 0xFFFE),
        ({"throughput_tps": -5}, RATE, 0),
        ({"state": "asleep"}, STATE, 0xFFFF),
        ({"state": ["serving"]}, STATE, 0xFFFF),
        ({"model": "someone"}, ACTIVE, 0),
        ({"model": None}, MODEL, 0),
        ({"throttle": {}}, LEVEL, 0xFFFF),
        ({"throttle": {"level": -1}}, LEVEL, 0xFFFF),
        ({"throttle": {"mode": 7}}, MODE, 0),
        ({"throttle": 7}, STALE, 1),
    ],
)
def test_strange_figures(tmp_path: Path, stats: dict[str, Any], register: int, value: int) -> None:
    async def body() -> None:
        async with in_process(tmp_path, told(**stats)) as (made, _):
            await made.poll()
            assert made.registers()[register] == value

    asyncio.run(body())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
KEYS = ("temp_c", "throughput_tps", "model", "state")
FIGURES = st.fixed_dictionaries(dict.fromkeys(KEYS, VALUES))


@settings(max_examples=300, deadline=None)
@given(FIGURES, st.dictionaries(st.sampled_from(["mode", "level"]), VALUES))
def test_whatever_is_told_registers_are_registers(figures: Any, throttle: Any) -> None:
    made = Bridge(Path("unused"), MODELS, True, clock=lambda: 5.0)
    made._figures, made._read_s = {**figures, "throttle": throttle}, 5.0
    found = made.registers()
    assert len(found) == 10
    struct.pack(">10H", *found)


@pytest.mark.parametrize(
    "talk",
    [
        None,
        hangs,
        always(b""),
        always(b"garbage"),
        always(b"\xff"),
        always(b"[]"),
        always(b"7"),
        always(b'{"error":{"code":"internal"}}'),
        always(b"[" * 50_000),
        always(b"x" * 2_000_000),
    ],
)
def test_a_daemon_that_talks_nonsense(
    tmp_path: Path, talk: Talk | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modbus, "READ_S", 0.1)
    monkeypatch.setattr(modbus, "WRITE_S", 0.1)

    async def body() -> None:
        async with in_process(tmp_path, talk) as (made, port):
            await made.poll()
            assert made.registers()[STALE] == 1
            assert await asyncio.to_thread(refusals, port) == [4, 4, 4]

    asyncio.run(body())


def refusals(port: int) -> list[int]:
    with Plc(port) as plc:
        return [plc.write(MODE, 1), plc.write(MODEL, 1), plc.write(MODE, 2, 2)]


def test_one_write_at_a_time(tmp_path: Path) -> None:
    async def body() -> None:
        goes_on, asked = asyncio.Event(), asyncio.Event()

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.set()
            await goes_on.wait()
            await told()(reader, writer)

        async with in_process(tmp_path, talk) as (_, port):
            with Plc(port) as one, Plc(port) as two:
                first = asyncio.create_task(asyncio.to_thread(one.write, MODE, 1))
                await asked.wait()
                assert await asyncio.to_thread(two.write, MODE, 2) == 6
                assert (await asyncio.to_thread(two.read))[0] == 1  # reads go on
                goes_on.set()
                assert await first == 0
                assert await asyncio.to_thread(two.write, MODE, 2) == 0

    asyncio.run(body())


def test_slow_and_silent_peers_lose_their_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modbus, "IDLE_S", 0.3)
    monkeypatch.setattr(modbus, "FRAME_S", 0.3)

    async def body() -> None:
        async with in_process(tmp_path, told()) as (_, port):
            for begin in (b"", head(6), head(6)[:3], head(6) + b"\3\0"):
                with Plc(port) as plc:
                    plc.send(begin)
                    assert await asyncio.to_thread(plc.closed)
            with Plc(port, room=2048) as plc:  # asks and asks, and never reads
                sock = plc._sock
                sock.setblocking(False)
                many = (head(6) + word(3, 0, 10)) * 1000
                with contextlib.suppress(ConnectionError):
                    while True:
                        await asyncio.sleep(0.005)
                        if select.select([], [sock], [], 0)[1]:
                            sock.send(many)
            monkeypatch.undo()
            with Plc(port) as plc:
                assert (await asyncio.to_thread(plc.read))[0] == 1

    asyncio.run(body())
