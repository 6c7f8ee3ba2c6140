"""The AGV example under faults: every order gets one decision and one frame, in time and safe.

What time decides is tested on a loop whose clock stands still and jumps (VirtualLoop): no test here
depends on how fast this machine is. Where the daemon and the broker are real, decisions and frames
are counted, and the times are printed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import selectors
import signal
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "agv"))

from agv_node import Broker as Place  # noqa: E402
from agv_node import Node  # noqa: E402
from ask import Ask, AskError, Daemon  # noqa: E402
from can_bus import CanBus, Frame, open_receiver, pack, unpack  # noqa: E402
from decide import (  # noqa: E402
    CALM_S,
    CHARGE,
    DEADLINE_S,
    MODEL_S,
    SLOW,
    SLOW_CM_S,
    STOP,
    STOP_CM,
    WHYS,
    Decider,
    Decision,
    contradiction,
    judge,
    rule,
)
from order import SPEED_MOST, Command, Order  # noqa: E402
from prompt import prompt  # noqa: E402

from broker import Broker, client, secret, until  # noqa: E402
from daemon import Daemon as Gemctld  # noqa: E402
from daemon import wait_for  # noqa: E402

ACL = """\
user plc
topic readwrite agv/#

user m1
topic read agv/m1/order
topic write agv/m1/decision
"""
FEW = 2  # orders that find the daemon in one state
DRIVE = '{"action":"drive","speed_cm_s":120}'


class _Jumping(selectors.DefaultSelector):
    """Never sleeps: where nothing is ready, the clock jumps to the next timer."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "the loop would sleep for ever"
            self.now += max(timeout, 0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock is what its timers say."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def late(self, seconds: float) -> None:
        """The loop was held up, by whatever."""
        self._jumping.now += seconds


def virtually(body: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    """Run it to its end on a virtual loop."""
    loop = VirtualLoop()
    loop.set_exception_handler(lambda loop, context: pytest.fail(str(context)))
    try:
        loop.run_until_complete(body(loop))
        loop.run_until_complete(asyncio.sleep(30))  # what is open must have ended by then
    finally:
        loop.close()


def order(number: int = 1, **fields: Any) -> bytes:
    """An order's payload; nothing is near, the battery is good."""
    whole = {"id": f"o-{number}", "goal": "fetch crate 2", "battery_percent": 80}
    return json.dumps({**whole, "obstacle_cm": None, **fields}).encode()


def says(answer: str, after_s: float = 0.1) -> Ask:
    """A model that always says the same."""

    async def ask(text: str, schema: Mapping[str, Any], left_s: float) -> str:
        await asyncio.sleep(after_s)
        return answer

    return ask


async def silent(text: str, schema: Mapping[str, Any], left_s: float) -> str:
    """A model that never answers."""
    await asyncio.get_running_loop().create_future()
    return ""


async def deaf(text: str, schema: Mapping[str, Any], left_s: float) -> str:
    """One that does not even listen when it is cancelled."""
    while asyncio.get_running_loop().time() < 20:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1)
    return DRIVE


def checked(decisions: list[Decision], orders: int) -> None:
    """One decision each, numbered, labelled, in time."""
    assert [d.number for d in decisions] == list(range(1, orders + 1))
    for decision in decisions:
        assert decision.why in WHYS
        assert (decision.source == "model") == (decision.why == "answered")
        assert 0 <= decision.ms <= DEADLINE_S * 1e3


# ---- the decision alone ----


@pytest.mark.parametrize("ask", [silent, deaf])
def test_no_answer_is_decided_by_rule_in_time(ask: Ask) -> None:
    async def body(loop: VirtualLoop) -> None:
        out: list[Decision] = []
        decider = Decider(ask, out.append)
        for number in range(3):
            decider.take(order(number, battery_percent=(80, 5, 80)[number]))
            await asyncio.sleep(1)
        checked(out, 3)
        assert [d.why for d in out] == ["timeout"] * 3
        assert [d.command for d in out] == [SLOW, CHARGE, SLOW]
        assert all(d.ms == pytest.approx(MODEL_S * 1e3) for d in out)

    virtually(body)


def test_answers_count_until_their_time_is_over() -> None:
    async def body(loop: VirtualLoop) -> None:
        for tenth in range(80):
            out: list[Decision] = []
            after_s = tenth / 100
            decider = Decider(says(DRIVE, after_s), out.append)
            decider.take(order())
            await asyncio.sleep(2)
            checked(out, 1)
            assert (out[0].source == "model") == (after_s < MODEL_S)

    virtually(body)


@pytest.mark.parametrize("held_up_s", [0.01, 0.2, 3.0])
def test_a_loop_that_was_held_up_takes_no_late_answer(held_up_s: float) -> None:
    async def body(loop: VirtualLoop) -> None:
        out: list[Decision] = []

        async def ask(text: str, schema: Mapping[str, Any], left_s: float) -> str:
            await asyncio.sleep(MODEL_S - 0.05)
            loop.late(held_up_s)
            return DRIVE

        Decider(ask, out.append).take(order())
        await asyncio.sleep(5)
        assert len(out) == 1
        late = MODEL_S - 0.05 + held_up_s > DEADLINE_S
        assert out[0].why == ("timeout" if late else "answered")

    virtually(body)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (AskError("unreachable", "no daemon"), "unreachable"),
        (AskError("refused", "no model"), "refused"),
        (AskError("timeout", "no turn"), "timeout"),
        (ValueError("x"), "fault"),
        (RecursionError(), "fault"),
        (MemoryError(), "fault"),
        (asyncio.CancelledError(), "fault"),
    ],
)
def test_whatever_a_question_raises_the_rule_decides(error: BaseException, why: str) -> None:
    async def body(loop: VirtualLoop) -> None:
        out: list[Decision] = []

        async def ask(text: str, schema: Mapping[str, Any], left_s: float) -> str:
            raise error

        Decider(ask, out.append).take(order())
        await asyncio.sleep(1)
        checked(out, 1)
        assert (out[0].why, out[0].command) == (why, SLOW)

    virtually(body)


CRATE = Order(id="a", goal="fetch crate 2", battery_percent=80, obstacle_cm=None)


@pytest.mark.parametrize(
    ("answer", "seen", "why", "command"),
    [
        (f" {DRIVE}\n", {}, "answered", Command(action="drive", speed_cm_s=120)),
        ('{"action":"slow","speed_cm_s":30}', {}, "answered", SLOW),
        ('{"action":"charge","speed_cm_s":9}', {"battery_percent": 3}, "answered", None),
        ('{"action":"stop","speed_cm_s":0}', {"battery_percent": 3}, "answered", STOP),
        ("", {}, "no_json", SLOW),
        ("Drive on!", {}, "no_json", SLOW),
        (DRIVE[:-1], {}, "no_json", SLOW),
        (DRIVE + DRIVE, {}, "no_json", SLOW),
        (f"Sure: {DRIVE}", {}, "no_json", SLOW),
        ("[" * 500, {}, "no_json", SLOW),
        (DRIVE + " " * 600, {}, "no_json", SLOW),
        ("\ud800", {}, "no_json", SLOW),
        ("[]", {}, "schema", SLOW),
        ("null", {"battery_percent": 3}, "schema", CHARGE),
        ('{"action":"drive"}', {}, "schema", SLOW),
        ('{"action":"fly","speed_cm_s":20}', {}, "schema", SLOW),
        ('{"action":"drive","speed_cm_s":"20"}', {}, "schema", SLOW),
        ('{"action":"drive","speed_cm_s":20.5}', {}, "schema", SLOW),
        ('{"action":"drive","speed_cm_s":true}', {}, "schema", SLOW),
        ('{"action":"drive","speed_cm_s":-1}', {}, "schema", SLOW),
        ('{"action":"drive","speed_cm_s":151}', {}, "schema", SLOW),
        ('{"action":"drive","speed_cm_s":1e999}', {}, "schema", SLOW),
        ('{"action":"drive","speed_cm_s":NaN}', {}, "schema", SLOW),
        ('{"action":"drive","speed_cm_s":20,"horn":1}', {}, "schema", SLOW),
        ('{"action":"stop","speed_cm_s":20}', {}, "unsafe", SLOW),
        ('{"action":"drive","speed_cm_s":0}', {}, "unsafe", SLOW),
        ('{"action":"slow","speed_cm_s":31}', {}, "unsafe", SLOW),
        (DRIVE, {"obstacle_cm": STOP_CM - 1}, "unsafe", STOP),
        ('{"action":"slow","speed_cm_s":1}', {"obstacle_cm": 0}, "unsafe", STOP),
        ('{"action":"charge","speed_cm_s":1}', {"obstacle_cm": 99}, "unsafe", STOP),
        (DRIVE, {"obstacle_cm": 250}, "unsafe", SLOW),
        ('{"action":"charge","speed_cm_s":31}', {"obstacle_cm": 250}, "unsafe", SLOW),
        (DRIVE, {"battery_percent": 14}, "unsafe", CHARGE),
        ('{"action":"slow","speed_cm_s":20}', {"battery_percent": 14}, "unsafe", CHARGE),
    ],
)
def test_an_answer_that_does_not_hold_is_replaced(
    answer: str, seen: dict[str, int], why: str, command: Command | None
) -> None:
    found, source, reason, _ = judge(CRATE.model_copy(update=seen), answer)
    assert reason == why
    assert (source == "model") == (why == "answered")
    if command is not None:
        assert found == command


ORDERS = st.builds(
    Order,
    id=st.just("a"),
    goal=st.just("fetch crate 2"),
    battery_percent=st.integers(0, 100),
    obstacle_cm=st.none() | st.integers(0, 400) | st.integers(0, 99_999),
)
COMMANDS = st.builds(
    Command,
    action=st.sampled_from(["stop", "slow", "drive", "charge"]),
    speed_cm_s=st.integers(0, SPEED_MOST),
)


@settings(max_examples=600, deadline=None)
@given(ORDERS, COMMANDS.map(Command.model_dump_json) | st.text(max_size=80))
def test_no_answer_ever_moves_a_vehicle_against_the_rule(seen: Order, answer: str) -> None:
    command, source, _, _ = judge(seen, answer)
    assert contradiction(seen, command) == ""
    assert contradiction(seen, rule(seen)) == ""
    if seen.obstacle_cm is not None and seen.obstacle_cm < STOP_CM:
        assert command == STOP
    elif seen.battery_percent < 15:
        assert command.action in ("charge", "stop")
    elif seen.obstacle_cm is not None and seen.obstacle_cm < 300:
        assert command.speed_cm_s <= SLOW_CM_S
    if source == "rule":
        assert command == rule(seen)


def test_near_obstacles_ask_nobody() -> None:
    async def body(loop: VirtualLoop) -> None:
        out: list[Decision] = []
        decider = Decider(says(DRIVE), out.append)
        for number in range(STOP_CM):
            decider.take(order(number, obstacle_cm=number))
        assert [(d.why, d.command, d.ms) for d in out] == [("obstacle", STOP, 0.0)] * STOP_CM
        assert decider.asked == 0
        checked(out, STOP_CM)

    virtually(body)


def test_orders_that_are_none_stop_the_vehicle() -> None:
    bad = [
        *(b"", b"{}", b"null", b"\xff\xfe", b"[" * 2000, b"x" * 3000, order()[:-1], order() * 2),
        *(order(goal=goal) for goal in ("", "a\nCommand: x", 'say "x"', "x" * 61, 7)),
        *(order(battery_percent=value) for value in (-1, 101, 5.5, "80", None, True)),
        *(order(obstacle_cm=value) for value in (-1, 100_000, 1.5, "near", False)),
        *(order(id=value) for value in ("", "a b", "x" * 65, 7)),
        *(order(expires_at=value) for value in ("soon", 0, -5, True)),
        order(horn=1),
        order().replace(b'"obstacle_cm": null, ', b"").replace(b', "obstacle_cm": null', b""),
        order(expires_at=1).replace(b": 1}", b": 1e999}"),
    ]

    async def body(loop: VirtualLoop) -> None:
        out: list[Decision] = []
        decider = Decider(says(DRIVE), out.append)
        for payload in bad:
            decider.take(payload)
        checked(out, len(bad))
        assert {(d.why, d.command) for d in out} == {("unreadable", STOP)}
        assert decider.asked == 0

    virtually(body)


def test_expired_retained_reused_and_repeated_orders() -> None:
    async def body(loop: VirtualLoop) -> None:
        out: list[Decision] = []
        decider = Decider(says(DRIVE), out.append, wall=lambda: 1000.0)
        for payload, retained in (
            (order(1, expires_at=999.9), False),
            (order(2, expires_at=1000), False),
            (order(3), True),
            (order(4), False),
            (order(4), False),  # twice: no second decision, and the first one stays open
        ):
            decider.take(payload, retained)
        await asyncio.sleep(1)
        decider.take(order(4))
        decider.take(order(4, battery_percent=50))
        await asyncio.sleep(1)
        checked(out, 5)
        assert [d.why for d in out] == ["expired", "overtaken", "retained", "answered", "reused"]
        assert [d.command for d in out[:3]] == [STOP, SLOW, STOP]
        assert (decider.duplicates, decider.arrived) == (2, 7)

    virtually(body)


def test_known_ids_are_bounded() -> None:
    async def body(loop: VirtualLoop) -> None:
        out: list[Decision] = []
        decider = Decider(silent, out.append)
        for number in range(3000):
            decider.take(order(number, obstacle_cm=5))
        decider.take(order(2999, obstacle_cm=5))
        assert decider.duplicates == 1
        assert len(decider._known) <= 1024
        checked(out, 3000)

    virtually(body)


def test_an_end_decides_what_is_open() -> None:
    async def body(loop: VirtualLoop) -> None:
        out: list[Decision] = []
        decider = Decider(silent, out.append)
        decider.take(order())
        await asyncio.sleep(0.1)
        decider.close()
        decider.close()
        checked(out, 1)
        assert out[0].why == "ended"

    virtually(body)


def test_a_storm_asks_almost_nobody() -> None:
    async def body(loop: VirtualLoop) -> None:
        out: list[Decision] = []
        decider = Decider(says(DRIVE), out.append)
        for number in range(1000):
            decider.take(order(number))
            await asyncio.sleep(0.001)
        await asyncio.sleep(1)
        checked(out, 1000)
        assert decider.asked == 2  # the first one, and the last one when it is calm
        assert Counter(d.why for d in out) == {"overtaken": 999, "answered": 1}
        assert [d.order for d in out] == [f"o-{number}" for number in range(1000)]
        assert out[0].ms == pytest.approx(1.0)

    virtually(body)


def test_random_orders_answers_and_faults() -> None:
    """400 mixtures: one decision an order, in the order of arrival, in time, safe, labelled."""
    whys: Counter[str] = Counter()
    total = 0

    def one(seed: int) -> int:
        chance = random.Random(seed)
        answers = [DRIVE, '{"action":"slow","speed_cm_s":20}', "{}", "no", '{"action":"stop"']

        async def ask(text: str, schema: Mapping[str, Any], left_s: float) -> str:
            await asyncio.sleep(chance.choice([0, 0.05, 0.2, 0.43, 0.44, 0.45, 2.0]))
            if chance.random() < 0.2:
                raise chance.choice([AskError("unreachable", "x"), OSError(), KeyError("x")])
            return chance.choice(answers)

        payloads: list[bytes] = []
        for number in range(chance.randrange(5, 40)):
            if payloads and chance.random() < 0.1:
                payloads.append(chance.choice(payloads))
                continue
            payloads.append(
                order(
                    number,
                    obstacle_cm=chance.choice([None, 5, 99, 100, 299, 300, 5000]),
                    battery_percent=chance.choice([0, 14, 15, 100]),
                )
            )
        distinct = list(dict.fromkeys(payloads))

        async def body(loop: VirtualLoop) -> None:
            out: list[Decision] = []
            decider = Decider(ask, out.append)
            for payload in payloads:
                decider.take(payload)
                await asyncio.sleep(chance.choice([0, 0, CALM_S, 0.1, 0.3, 0.6]))
            await asyncio.sleep(5)
            checked(out, len(distinct))
            assert decider.duplicates == len(payloads) - len(distinct)
            for payload, decision in zip(distinct, out, strict=True):
                seen = Order.model_validate_json(payload)
                assert decision.order == seen.id
                assert contradiction(seen, decision.command) == ""
                assert decision.source == "model" or decision.command == rule(seen)
                whys[decision.why] += 1

        virtually(body)
        return len(distinct)

    for seed in range(400):
        total += one(seed)
    print(f"{total} orders: {dict(whys)}")
    wanted = {"answered", "obstacle", "overtaken", "timeout", "unreachable", "no_json", "schema"}
    assert wanted <= set(whys)


def test_damaged_orders_are_decided_once() -> None:
    chance = random.Random(3)
    good = order(expires_at=2e9)

    def damaged() -> bytes:
        data = bytearray(good)
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(data))
            data[place : place + chance.randrange(2)] = chance.randbytes(chance.randrange(3))
        return bytes(data)

    async def body(loop: VirtualLoop) -> None:
        out: list[Decision] = []
        decider = Decider(silent, out.append, wall=lambda: 1e9)
        for _ in range(3000):
            decider.take(damaged())
        decider.close()
        checked(out, 3000 - decider.duplicates)
        counts = Counter(d.why for d in out)
        print(f"3000 damaged orders: {dict(counts)}, {decider.duplicates} doubles")
        assert counts["unreadable"] > 1000
        assert all(d.command == STOP for d in out if d.why == "unreadable")

    virtually(body)


def test_the_prompt_holds_one_state() -> None:
    text = prompt(Order.model_validate_json(order(goal="(a): b; c/d, e. f", obstacle_cm=250)))
    wanted = "\n(a): b; c/d, e. f, obstacle at 250 cm, battery 80 % ->"
    assert text.endswith(wanted)
    assert len(text) < 700


# ---- the frame and the bus ----


def decided(number: int, command: Command = SLOW, why: Any = "timeout") -> Decision:
    source: Any = "model" if why == "answered" else "rule"
    return Decision(number, f"o-{number}", command, source, why, "", 1.0)


def test_frames_carry_decisions_and_no_damage() -> None:
    damaged = 0
    for number, why in enumerate(WHYS, 250):
        for command in (STOP, SLOW, CHARGE, Command(action="drive", speed_cm_s=SPEED_MOST)):
            raw = pack(decided(number, command, why))
            source: Any = "model" if why == "answered" else "rule"
            wanted = Frame(command.action, command.speed_cm_s, source, why, number & 0xFF, 2.0)
            assert unpack(raw) == wanted
    for bit in range(8 * 16):
        for other in range(bit, 8 * 16):  # one bit, or two
            data = bytearray(raw)
            data[bit // 8] ^= 1 << bit % 8
            if other != bit:
                data[other // 8] ^= 1 << other % 8
            found = unpack(bytes(data))
            damaged += found is None
            assert found in (None, wanted)  # as it was where the bits are padding
    print(f"{damaged} damaged frames, none taken for another command")
    for wrong in (b"", raw[:-1], raw + b"\0", bytes(16), b"\xff" * 16):
        assert unpack(wrong) is None


class Vehicle:
    """The stand-in's other end, on the test's loop."""

    def __init__(self, place: Path) -> None:
        self._sock, self.name = open_receiver(None, place)
        self.raw: list[bytes] = []

    def listen(self) -> Vehicle:
        asyncio.get_running_loop().add_reader(self._sock, self._read)
        return self

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self.raw.append(self._sock.recv(64))

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()

    @property
    def frames(self) -> list[Frame]:
        found = [unpack(raw) for raw in self.raw]
        assert None not in found
        return [frame for frame in found if frame is not None]


def test_the_stand_in_is_named(tmp_path: Path) -> None:
    async def body(loop: VirtualLoop) -> None:
        bus = CanBus(None, tmp_path / "can")
        assert "STAND-IN for CAN" in bus.name
        bus.close()

    virtually(body)


def test_a_full_bus_loses_nothing_and_keeps_the_order(tmp_path: Path) -> None:
    async def body(loop: VirtualLoop) -> None:
        vehicle = Vehicle(tmp_path / "can")  # not listening yet: the kernel holds a few frames
        bus = CanBus(None, tmp_path / "can")
        for number in range(2000):
            bus.send(pack(decided(number)))
        assert bus.sent < 2000
        vehicle.listen()
        await asyncio.sleep(1)
        assert (bus.sent, bus.lost) == (2000, 0)
        assert [frame.counter for frame in vehicle.frames] == [n & 0xFF for n in range(2000)]
        bus.close()
        vehicle.close()

    virtually(body)


def test_nobody_at_the_other_end_and_back_again(tmp_path: Path) -> None:
    async def body(loop: VirtualLoop) -> None:
        bus = CanBus(None, tmp_path / "can")
        bus.send(pack(decided(0)))
        assert (bus.sent, bus.lost) == (0, 1)
        for turn in range(1, 4):
            vehicle = Vehicle(tmp_path / "can").listen()
            bus.send(pack(decided(turn)))
            await asyncio.sleep(0.01)
            assert [frame.counter for frame in vehicle.frames] == [turn]
            vehicle.close()
            bus.send(pack(decided(99)))
            assert bus.lost == 1 + turn
        bus.close()

    virtually(body)


def test_a_stuck_bus_sends_no_old_command(tmp_path: Path) -> None:
    async def body(loop: VirtualLoop) -> None:
        vehicle = Vehicle(tmp_path / "can")
        bus = CanBus(None, tmp_path / "can")
        for number in range(9000):
            bus.send(pack(decided(number)))
        held = bus.sent
        assert len(bus._waiting) <= 4096
        await asyncio.sleep(5)  # more than a frame is valid for
        vehicle.listen()
        bus.send(pack(decided(7)))
        await asyncio.sleep(1)
        assert len(vehicle.frames) == held + 1
        assert vehicle.frames[-1].counter == 7
        assert bus.sent + bus.lost == 9001
        bus.close()
        vehicle.close()

    virtually(body)


# ---- what stands in the daemon's place ----

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def writes(*lines: bytes, more: bytes = b"") -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(line + b"\n" for line in lines) + more)
        await reader.read()

    return talk


async def _closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()


async def _trickles(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for byte in b'{"v":1,"id":"1","result":{"text":"' + b"x" * 1000:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.01)


async def _floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while True:
            writer.write(b'{"event":{"text":"x"}}\n' * 1000)
            await writer.drain()


def told(code: str) -> bytes:
    return json.dumps({"error": {"code": code, "message": "no", "retryable": True}}).encode()


@pytest.mark.parametrize(
    ("talk", "why"),
    [
        (writes(json.dumps({"result": {"text": DRIVE}}).encode()), "answered"),
        (writes(b'{"event":{}}', json.dumps({"result": {"text": "no"}}).encode()), "no_json"),
        (writes(), "timeout"),
        (_closes, "unreachable"),
        (_trickles, "timeout"),
        (_floods, "refused"),
        (writes(b"garbage"), "refused"),
        (writes(b"\xff\x00"), "refused"),
        (writes(b"[]"), "refused"),
        (writes(b"7"), "refused"),
        (writes(b"{}"), "refused"),
        (writes(b""), "refused"),
        (writes(b'{"result":7}'), "refused"),
        (writes(b'{"result":{"text":7}}'), "refused"),
        (writes(b'{"error":7}'), "refused"),
        (writes(b"[" * 60000), "refused"),
        (writes(b"9" * 60000), "refused"),
        (writes(b"x" * 1_000_000), "refused"),
        (writes(more=b"x" * 1_000_000), "refused"),
        (writes(b'{"result":{"text":"\\ud800"}}'), "no_json"),
        (writes(told("timeout")), "timeout"),
        (writes(told("busy")), "refused"),
        (writes(told("internal")), "refused"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_daemon_that_talks_nonsense(tmp_path: Path, talk: Talk, why: str) -> None:
    async def body(loop: VirtualLoop) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                await talk(reader, writer)
            writer.close()

        server = await asyncio.start_unix_server(serve, tmp_path / "s")
        out: list[Decision] = []
        decider = Decider(Daemon(tmp_path / "s").ask, out.append)
        decider.take(order())
        await asyncio.sleep(1)
        checked(out, 1)
        assert out[0].why == why
        server.close()

    virtually(body)


def test_no_daemon_at_all(tmp_path: Path) -> None:
    async def body(loop: VirtualLoop) -> None:
        out: list[Decision] = []
        for place in (tmp_path / "nothing", tmp_path, tmp_path / ("x" * 200)):
            Decider(Daemon(place).ask, out.append).take(order())
            await asyncio.sleep(1)
        assert [d.why for d in out] == ["unreachable"] * 3

    virtually(body)


# ---- the real daemon, engine and broker ----


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]) -> Path:
    """A random model: its answers are garbage."""
    options = ("--quantization", "int4", "--kv-cache-size", "1024", "--effort", "fast")
    return artifact_cache(tiny_checkpoint("qwen3"), *options)


@pytest.fixture(scope="module")
def gemctld(artifact: Path) -> Iterator[Gemctld]:
    """One for all tests: each brings back what it took away."""
    with Gemctld() as made:
        made.replace(artifact, name="pilot")
        yield made


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("agv"), acl=ACL) as made:
        yield made


class Line:
    """A node at work, the vehicle behind it, and a dispatcher's connection that comes back."""

    def __init__(self, node: Node, vehicle: Vehicle, broker: Broker) -> None:
        self.node, self.vehicle, self._broker = node, vehicle, broker
        self.out: list[Decision] = []

    async def send(self, *payloads: bytes, qos: int = 1) -> None:
        """Publish, with a connection of its own."""
        await asyncio.wait_for(self.node.connected.wait(), 30)
        async with client(self._broker, topic="") as plc:
            for start in range(0, len(payloads), 100):
                sends = [
                    plc.client.publish("agv/m1/order", payload, qos)
                    for payload in payloads[start : start + 100]
                ]
                await asyncio.gather(*sends)

    async def decided(self, count: int) -> list[Decision]:
        """Wait for so many decisions in all; each has its frame, and none has two."""
        await until(lambda: len(self.out) >= count and len(self.vehicle.raw) >= count, 60)
        await asyncio.sleep(0.05)
        bus, decider = self.node.bus, self.node.decider
        assert [d.number for d in self.out] == list(range(1, count + 1))
        assert (bus.sent, bus.lost, len(self.vehicle.raw)) == (count, 0, count)
        assert decider.arrived - decider.duplicates == count
        for decision, frame in zip(self.out, self.vehicle.frames, strict=True):
            assert (frame.counter, frame.why) == (decision.number & 0xFF, decision.why)
            assert (frame.action, frame.source) == (decision.command.action, decision.source)
        return self.out

    def figures(self, what: str) -> None:
        times = sorted(d.ms for d in self.out)
        whys = dict(Counter(d.why for d in self.out))
        middle, most = times[len(times) // 2], times[-1]
        print(f"{what}: {len(times)} orders, p50 {middle:.2f} ms, most {most:.2f} ms; {whys}")


@asynccontextmanager
async def line(gemctld: Gemctld, broker: Broker) -> AsyncIterator[Line]:
    place = gemctld.folder / "can"
    vehicle = Vehicle(place).listen()
    bus = CanBus(None, place, stale_s=3600)  # a slow machine must not decide this test
    there = Place("127.0.0.1", broker.port, "m1", secret("m1"))
    node = Node("m1", there, bus, Daemon(gemctld.socket, "pilot").ask)
    made = Line(node, vehicle, broker)
    inner = node.decider._out

    def out(decision: Decision) -> None:
        made.out.append(decision)
        inner(decision)

    node.decider._out = out
    task = asyncio.create_task(node.run())
    try:
        await asyncio.wait_for(node.connected.wait(), 30)
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        vehicle.close()


def test_garbage_answers_and_a_storm(gemctld: Gemctld, broker: Broker) -> None:
    async def body() -> None:
        async with line(gemctld, broker) as agv:
            for number in range(10):  # one by one: the model is asked
                await agv.send(order(number))
                await agv.decided(number + 1)
            agv.figures("one by one")
            assert {d.source for d in agv.out} == {"rule"}
            asked = agv.node.decider.asked
            assert asked == 10
            storm = [order(n, obstacle_cm=(None, 50, 200)[n % 3]) for n in range(10, 1010)]
            await agv.send(*storm)
            await agv.decided(1010)
            agv.figures("storm of 1000")
            assert [d.order for d in agv.out] == [f"o-{number}" for number in range(1010)]
            near = [d for d in agv.out[10:] if int(d.order[2:]) % 3 == 1]
            assert {(d.why, d.command) for d in near} == {("obstacle", STOP)}
            print(f"{agv.node.decider.asked - asked} questions in the storm")
            await agv.send(*storm[-50:], *(order(n) for n in range(1010, 1020)))
            await agv.decided(1020)
            assert agv.node.decider.duplicates == 50
            await agv.send(b"garbage", order(1020, expires_at=5), order(5, battery_percent=1))
            await agv.decided(1023)
            assert [d.why for d in agv.out[-3:]] == ["unreadable", "expired", "reused"]
            await agv.send(b"x" * 100_000, order(1021), qos=0)  # too long: the broker drops it
            await agv.decided(1024)

    asyncio.run(body())


def test_the_daemon_dies_and_comes_back(gemctld: Gemctld, broker: Broker) -> None:
    async def body() -> None:
        async with line(gemctld, broker) as agv:
            for number in range(60):
                if number == 15:
                    gemctld.stop(signal.SIGKILL)
                if number == 40:
                    await asyncio.to_thread(gemctld.start)
                await agv.send(order(number))
                if number % 3 == 0:  # the others overtake each other
                    await agv.decided(number + 1)
            await agv.decided(60)
            agv.figures("daemon killed and restarted")
            assert "unreachable" in {d.why for d in agv.out}
            wait_for(lambda: gemctld.call("model.status", name="pilot")["state"] == "serving")
            await agv.send(order(60))
            assert (await agv.decided(61))[-1].why in ("no_json", "schema", "unsafe", "timeout")

    asyncio.run(body())


def test_models_disabled_throttled_hung(gemctld: Gemctld, broker: Broker) -> None:
    async def body() -> None:
        async with line(gemctld, broker) as agv:
            sent = 0

            async def few(what: str) -> None:
                nonlocal sent
                for _ in range(FEW):
                    await agv.send(order(sent))
                    sent += 1
                    await agv.decided(sent)
                print(f"{what}: {[(d.why, round(d.ms, 1)) for d in agv.out[-FEW:]]}")

            await few("as it is")
            for params in ({"duty": 0.02}, {"mode": "conservative"}, {"reset": True}):
                await asyncio.to_thread(gemctld.call, "throttle.set", **params)
                await few(f"throttle {params}")
            pids = gemctld.workers()
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            await few("worker stopped")
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            await few("worker killed")
            await asyncio.to_thread(gemctld.call, "model.disable", name="pilot")
            await few("model disabled")
            await asyncio.to_thread(gemctld.call, "model.enable", name="pilot")
            await few("model enabled")
            os.kill(gemctld.pid, signal.SIGSTOP)
            await few("daemon stopped")
            assert {d.why for d in agv.out[-FEW:]} <= {"timeout", "refused"}
            os.kill(gemctld.pid, signal.SIGCONT)
            await few("daemon goes on")
            assert {d.source for d in agv.out} == {"rule"}

    asyncio.run(body())


def test_the_broker_dies_and_comes_back(gemctld: Gemctld, broker: Broker) -> None:
    """An order that has arrived is decided; what the broker lost is nobody's order."""

    async def body() -> None:
        async with line(gemctld, broker) as agv:
            await agv.send(order(0))
            await agv.decided(1)
            count = 1
            for turn in range(3):
                os.kill(gemctld.pid, signal.SIGSTOP)  # so that an order is open
                await agv.send(order(10 + turn))
                await until(lambda count=count: agv.node.decider.arrived > count)
                broker.stop(signal.SIGKILL)
                await until(lambda: not agv.node.connected.is_set(), 30)
                os.kill(gemctld.pid, signal.SIGCONT)
                count += 1
                await agv.decided(count)
                broker.start()
                await agv.send(*(order(100 * (turn + 1) + n) for n in range(20)), qos=turn % 2)
                await until(lambda count=count: agv.node.decider.decided > count)
                await asyncio.sleep(0.3)
                count = agv.node.decider.decided
                await agv.decided(count)
            agv.figures("broker killed three times")

    asyncio.run(body())


def test_lost_orders_leave_no_trace(gemctld: Gemctld, broker: Broker) -> None:
    """Someone between broker and node drops every third order: the others get theirs."""

    async def body() -> None:
        async with line(gemctld, broker) as agv:
            inner, seen = agv.node.decider.take, 0

            def take(payload: bytes, retained: bool = False) -> None:
                nonlocal seen
                seen += 1
                if seen % 3:
                    inner(payload, retained)

            agv.node.decider.take = take  # type: ignore[method-assign]
            await agv.send(*(order(number) for number in range(30)))
            await until(lambda: seen == 30)
            out = await agv.decided(20)
            assert [int(d.order[2:]) for d in out] == [n for n in range(30) if (n + 1) % 3]

    asyncio.run(body())


def test_nobody_needs_can_for_this() -> None:
    """A kernel with CAN but without the interface says so; it is no stand-in then."""
    try:
        socket.socket(socket.AF_CAN, socket.SOCK_RAW, socket.CAN_RAW).close()
    except OSError:
        print("this kernel has no CAN")
        return
    from can_bus import NoBusError

    async def body() -> None:
        with pytest.raises(NoBusError, match="nosuchcan"):
            CanBus("nosuchcan", Path("unused"))

    asyncio.run(body())
