"""Orders from MQTT, commands to the vehicle over CAN; a model decides in between, or the rule.

python agv_node.py --name agv7 --host broker --can can0 --gemctl /run/gemctl/gemctl.sock

agv/NAME/order     in: order.Order as JSON, QoS 1, not retained
agv/NAME/decision  out: what was decided, by whom, why, and after how many ms; QoS 0
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import aiomqtt
from ask import Ask, Daemon
from can_bus import STALE_S, CanBus, NoBusError, pack
from decide import Decider, Decision
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

PACKET_MOST = 4096  # bytes; the broker drops what is longer
REPORTS_MOST = 2048  # that wait for the broker; beyond it the oldest is lost
PAUSE_S, PAUSE_MOST_S = 0.2, 10.0  # before the next attempt to connect
KEEPALIVE_S = 10


@dataclass(frozen=True)
class Broker:
    """Where the orders come from."""

    host: str
    port: int = 1883
    username: str | None = None
    password: str | None = None
    ca_file: Path | None = None  # with it: TLS


def _inbox(take: Callable[[aiomqtt.Message], None]) -> type[asyncio.Queue[aiomqtt.Message]]:
    """A queue that holds nothing: a message is taken where it arrives, not when it is its turn."""

    class Inbox(asyncio.Queue[aiomqtt.Message]):
        def put_nowait(self, item: aiomqtt.Message) -> None:
            take(item)

    return Inbox


class Node:
    """One vehicle."""

    def __init__(self, name: str, broker: Broker, bus: CanBus, ask: Ask) -> None:
        self.name = name
        self.bus = bus
        self.decider = Decider(ask, self._out)
        self.connected = asyncio.Event()
        self._broker = broker
        self._reports: deque[Decision] = deque(maxlen=REPORTS_MOST)
        self._news = asyncio.Event()

    def _take(self, message: aiomqtt.Message) -> None:
        payload = message.payload
        self.decider.take(payload if isinstance(payload, bytes) else b"", message.retain)

    def _out(self, decision: Decision) -> None:
        self.bus.send(pack(decision))
        self._reports.append(decision)
        self._news.set()

    def report(self, decision: Decision) -> str:
        """What operators are told."""
        fields = asdict(decision) | {"command": decision.command.model_dump()}
        return json.dumps({**fields, "ms": round(decision.ms, 2), "frames_lost": self.bus.lost})

    async def run(self) -> None:
        """Until cancelled. Losing the broker stops nothing that has arrived."""
        pause_s, said = PAUSE_S, ""
        try:
            while True:
                try:
                    async with self._client() as client:
                        await client.subscribe(f"agv/{self.name}/order", 1)
                        print(f"agv: takes orders at agv/{self.name}/order", flush=True)
                        pause_s, said = PAUSE_S, ""
                        self.connected.set()
                        await self._serve(client)
                except (aiomqtt.MqttError, OSError) as error:
                    if said != str(error):
                        said = str(error)
                        print(f"agv: {self._broker.host}: {said}; tries again", flush=True)
                self.connected.clear()
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, PAUSE_MOST_S)
        finally:
            self.decider.close()
            self.bus.close()

    def _client(self) -> aiomqtt.Client:
        broker = self._broker
        limits = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        limits.MaximumPacketSize = PACKET_MOST
        tls = None
        if broker.ca_file is not None:
            tls = ssl.create_default_context(cafile=str(broker.ca_file))
        return aiomqtt.Client(
            broker.host,
            broker.port,
            username=broker.username,
            password=broker.password,
            protocol=aiomqtt.ProtocolVersion.V5,
            clean_start=True,
            keepalive=KEEPALIVE_S,
            properties=limits,
            tls_context=tls,
            queue_type=_inbox(self._take),
            socket_options=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
        )

    async def _serve(self, client: aiomqtt.Client) -> None:
        telling = asyncio.create_task(self._tell(client))
        try:
            async for message in client.messages:  # ends with the connection; see _inbox
                self._take(message)
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _tell(self, client: aiomqtt.Client) -> None:
        while True:
            self._news.clear()
            while self._reports:
                report = self.report(self._reports.popleft())
                try:
                    await client.publish(f"agv/{self.name}/decision", report, 0)
                except aiomqtt.MqttError:
                    await asyncio.sleep(1)
            await self._news.wait()


async def _run(arguments: argparse.Namespace) -> None:
    password = None
    if arguments.password_file is not None:
        password = arguments.password_file.read_text(encoding="utf-8").strip()
    user, authority = arguments.username, arguments.ca_file
    broker = Broker(arguments.host, arguments.port, user, password, authority)
    bus = CanBus(arguments.can, arguments.stand_in, arguments.stale_s)
    print(f"agv: sends to {bus.name}", flush=True)
    node = Node(arguments.name, broker, bus, Daemon(arguments.gemctl, arguments.model).ask)
    task = asyncio.create_task(node.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await asyncio.gather(task, return_exceptions=True)
    counts = node.decider
    print(
        f"agv: {counts.arrived} orders, {counts.duplicates} of them twice, {counts.decided} "
        f"decisions; {bus.sent} frames sent, {bus.lost} lost",
        flush=True,
    )
    if not task.cancelled():
        task.result()


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="MQTT orders to CAN commands")
    parser.add_argument("--name", required=True, help="of the vehicle, as in its topics")
    parser.add_argument("--host", default="127.0.0.1", help="of the broker (127.0.0.1)")
    parser.add_argument("--port", type=int, default=1883)
    parser.add_argument("--username")
    parser.add_argument("--password-file", type=Path)
    parser.add_argument("--ca-file", type=Path, help="of the broker's authority; means TLS")
    parser.add_argument("--can", help="interface, as can0")
    parser.add_argument("--stand-in", type=Path, help="path, where there is no CAN")
    parser.add_argument(
        "--stale-s", type=float, default=STALE_S, help=f"a frame waits so long ({STALE_S:g} s)"
    )
    parser.add_argument("--gemctl", type=Path, default=Path("/run/gemctl/gemctl.sock"))
    parser.add_argument("--model", help="its name in gemctld (the active one)")
    try:
        asyncio.run(_run(parser.parse_args()))
    except (NoBusError, OSError) as error:
        sys.exit(f"agv: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
