"""Modbus TCP in front of gemctld, for PLCs without MQTT.

python bridge.py --gemctl /run/gemctl/gemctl.sock --models agv-commands text [--write]

Registers (README.md) are filled from memory, once a second from the daemon: a read never waits for
it. A write waits for the daemon's answer, and fails as the device where there is none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

VERSION = 1
FIGURES = (
    8  # registers 0..7, read only: version, stale, age, temperature, rate, level, state, model
)
MODE, MODEL = 8, 9  # registers that may be written
COUNT = 10
UNKNOWN, UNKNOWN_SIGNED = 0xFFFF, 0x8000
MODES = ("performance", "balanced", "aggressive", "conservative", "silent", "off")  # 1..6
STATES = (
    *("empty", "staging", "verifying", "loading", "warming"),
    *("standby", "serving", "draining", "disabled", "faulted"),
)  # 0..9

POLL_S, STALE_S = 1.0, 3.0
READ_S, WRITE_S = 2.0, 5.0  # the daemon may take so long
IDLE_S = 60.0  # a connection without a request
FRAME_S = 15.0  # from a request's first byte to its answer's last
CONNECTIONS_MOST = 16
MODELS_MOST = 64
READ_MOST, WRITE_MOST = 125, 123  # registers of a request, as the standard has it
HEAD = struct.Struct(">HHHB")  # transaction, protocol, bytes that follow, unit

FUNCTION, ADDRESS, VALUE, DEVICE, BUSY = 1, 2, 3, 4, 6  # exception codes


class ModbusError(Exception):
    """A request that gets an exception reply."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exception {code}")
        self.code = code


class DaemonError(Exception):
    """The daemon is away, or refuses."""


async def call(socket: Path, method: str, params: Mapping[str, Any], most_s: float) -> Any:
    """The result of a daemon's method (gemctl/PROTOCOL.md). Raises DaemonError."""
    try:
        reader, writer = await asyncio.open_unix_connection(socket, limit=1 << 20)
    except OSError as error:
        raise DaemonError(f"{socket}: {error.strerror or error}") from None
    timer = asyncio.get_running_loop().call_later(most_s, writer.transport.abort)
    try:
        request = {"v": 1, "id": "1", "method": method, "params": dict(params)}
        writer.write(json.dumps(request).encode() + b"\n")
        reply = json.loads(await reader.readline())
        return reply["result"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DaemonError(f"{method}: {type(error).__name__}") from None
    finally:
        timer.cancel()
        writer.transport.abort()


def number_of(words: Sequence[str], word: object, first: int, otherwise: int) -> int:
    """A word's register value."""
    return words.index(word) + first if word in words else otherwise


def tenths(value: object, least: int, most: int, unknown: int) -> int:
    """A figure in tenths as a register, cut to its range; two's complement below zero."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        return unknown
    return min(max(round(min(max(value, -1e6), 1e6) * 10), least), most) & 0xFFFF


class Bridge:
    """Registers, and what a write to them does. `clock` in seconds."""

    def __init__(
        self,
        socket: Path,
        models: Sequence[str],
        may_write: bool,
        stale_s: float = STALE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.socket = socket
        self.models = tuple(models)
        self.may_write = may_write
        self._stale_s = stale_s
        self._writable = {
            MODE: ("throttle.set", "mode", MODES),
            MODEL: ("model.switch", "name", self.models),
        }
        self._clock = clock
        self._figures: Mapping[str, Any] = {}
        self._read_s: float | None = None
        self._writing = False
        self._connections: set[asyncio.Task[None]] = set()

    # ---- the daemon ----

    async def poll(self) -> None:
        """Read the figures once; without a daemon the old ones grow stale."""
        with contextlib.suppress(DaemonError):
            stats = await call(self.socket, "stats", {}, READ_S)
            if isinstance(stats, dict) and isinstance(stats.get("throttle"), dict):
                self._figures, self._read_s = stats, self._clock()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    def registers(self) -> list[int]:
        """All of them, now. Stale figures are unknown: nobody acts on an old temperature."""
        age_s = None if self._read_s is None else self._clock() - self._read_s
        stale = age_s is None or age_s > self._stale_s
        figures = {} if stale else self._figures
        throttle = figures.get("throttle", {})
        level = throttle.get("level")
        model = number_of(self.models, figures.get("model"), 1, 0)
        return [
            VERSION,
            int(stale),
            UNKNOWN if age_s is None else min(int(age_s), UNKNOWN - 1),
            tenths(figures.get("temp_c"), -32767, 32767, UNKNOWN_SIGNED),
            tenths(figures.get("throughput_tps"), 0, UNKNOWN - 1, UNKNOWN),
            level if isinstance(level, int) and 0 <= level < UNKNOWN else UNKNOWN,
            number_of(STATES, figures.get("state"), 0, UNKNOWN),
            model,
            number_of(MODES, throttle.get("mode"), 1, 0),
            model,
        ]

    async def _write(self, address: int, values: Sequence[int]) -> None:
        """Check all values, then have them done in the order of their registers."""
        if not (address >= FIGURES and address + len(values) <= COUNT):
            raise ModbusError(ADDRESS)
        calls: list[tuple[str, dict[str, str]]] = []
        for register, value in enumerate(values, address):
            method, key, words = self._writable[register]
            if not 1 <= value <= len(words):
                raise ModbusError(VALUE)
            calls.append((method, {key: words[value - 1]}))
        if self._writing:
            raise ModbusError(BUSY)
        self._writing = True
        try:
            for method, params in calls:
                await call(self.socket, method, params, WRITE_S)
            await self.poll()
        except DaemonError:
            raise ModbusError(DEVICE) from None
        finally:
            self._writing = False

    # ---- Modbus ----

    async def answer(self, request: bytes) -> bytes:
        """The reply to a request; both begin with the function code."""
        function = request[0]
        try:
            if function in (3, 4):
                return self._read(request)
            if function in (6, 16) and self.may_write:
                return await self._change(request)
            raise ModbusError(FUNCTION)
        except ModbusError as error:
            return bytes([function | 0x80, error.code])

    def _read(self, request: bytes) -> bytes:
        if len(request) != 5:
            raise ModbusError(VALUE)
        function, address, count = struct.unpack(">BHH", request)
        if not 1 <= count <= READ_MOST:
            raise ModbusError(VALUE)
        if address + count > (COUNT if function == 3 else FIGURES):
            raise ModbusError(ADDRESS)
        values = self.registers()[address : address + count]
        return struct.pack(f">BB{count}H", function, 2 * count, *values)

    async def _change(self, request: bytes) -> bytes:
        if len(request) < 5:
            raise ModbusError(VALUE)
        function, address, word = struct.unpack(">BHH", request[:5])
        if function == 6:
            if len(request) != 5:
                raise ModbusError(VALUE)
            await self._write(address, [word])
            return request
        if not 1 <= word <= WRITE_MOST or len(request) != 6 + 2 * word or request[5] != 2 * word:
            raise ModbusError(VALUE)
        await self._write(address, struct.unpack(f">{word}H", request[6:]))
        return request[:5]

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A peer has come; one too many is sent away."""
        if len(self._connections) >= CONNECTIONS_MOST:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the peer is gone, idle, or breaks the frame."""
        writer.transport.set_write_buffer_limits(high=0)  # drain: until all has been sent
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its reply. False: that was no Modbus."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(IDLE_S, writer.transport.abort)
        try:
            first = await reader.readexactly(1)
            timer.cancel()
            timer = loop.call_later(FRAME_S, writer.transport.abort)
            head = first + await reader.readexactly(HEAD.size - 1)
            transaction, protocol, length, unit = HEAD.unpack(head)
            if protocol != 0 or not 2 <= length <= 254:
                return False
            reply = await self.answer(await reader.readexactly(length - 1))
            writer.write(HEAD.pack(transaction, 0, len(reply) + 1, unit) + reply)
            await writer.drain()
            return True
        finally:
            timer.cancel()


async def _run(arguments: argparse.Namespace) -> None:
    bridge = Bridge(arguments.gemctl, arguments.models, arguments.write, arguments.stale_s)
    await bridge.poll()
    server = await asyncio.start_server(bridge.accept, arguments.host, arguments.port, limit=1024)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    polling = asyncio.create_task(bridge.run())
    host, port = server.sockets[0].getsockname()[:2]
    may = "reads and writes" if bridge.may_write else "reads"
    print(f"modbus: listens on {host}:{port}, {may}", flush=True)
    await stop.wait()
    polling.cancel()
    server.close()


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="Modbus TCP in front of gemctld")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=1502, help="0: any (1502)")
    parser.add_argument("--gemctl", type=Path, default=Path("/run/gemctl/gemctl.sock"))
    parser.add_argument("--models", nargs="+", required=True, help="number 1, number 2, ..")
    parser.add_argument(
        "--stale-s", type=float, default=STALE_S, help=f"figures count so long ({STALE_S:g} s)"
    )
    parser.add_argument("--write", action="store_true", help="accept writes from anybody")
    arguments = parser.parse_args()
    if len(arguments.models) > MODELS_MOST:
        parser.error(f"--models: {len(arguments.models)} names; at most {MODELS_MOST}")
    try:
        asyncio.run(_run(arguments))
    except OSError as error:
        sys.exit(f"modbus: {error.strerror or error}; name another --host or --port")
    return 0


if __name__ == "__main__":
    sys.exit(main())
