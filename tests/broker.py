"""A real mosquitto on a free port, a client for tests, and a stand-in for the daemon.

The stand-in (FakeService) answers the daemon's methods from memory: what is under test here is the
bridge and the broker; the daemon itself has its own tests.

    with Broker(tmp_path) as broker:          plain listener with passwords and an ACL
        config = broker.config("m1")          what gemctld would have in its [mqtt] table
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiomqtt
import pytest
from aiomqtt.client import ProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from gemctl.config import MqttConfig
from gemctl.errors import ApiError
from gemctl.events import EventHub
from gemctl.mqtt.bridge import Backoff, Bridge
from gemctl.service import Caller, Emit

SITE = "plant"
# Devices are users: each may write its own topics and read its own commands, and nothing else.
ACL = f"""\
pattern write gemctl/v1/{SITE}/%u/#
pattern read gemctl/v1/{SITE}/%u/cmd/#
pattern read gemctl/v1/{SITE}/group/+/cmd/#
pattern write gemctl/v1/{SITE}/reply/#
pattern write homeassistant/device/#
pattern read sensors/#

user plc
topic readwrite gemctl/v1/{SITE}/#
topic readwrite sensors/#
topic read homeassistant/#

user fleet
topic readwrite gemctl/v1/{SITE}/#

user viewer
topic read gemctl/v1/{SITE}/#
"""
DEVICES = ("m1", "m2", "m3")


def secret(user: str) -> str:
    return f"{user}-password"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def program() -> str:
    found = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
    if found is None:
        pytest.fail("mosquitto: not installed; apt-get install mosquitto", pytrace=False)
    return found


class Broker:
    """mosquitto in a folder of its own; retained messages and sessions outlast a clean stop."""

    def __init__(self, folder: Path, acl: str = ACL, tls: bool = False, more: str = "") -> None:
        self.folder = folder / "broker"
        self.folder.mkdir()
        self.port, self.tls_port = free_port(), free_port() if tls else 0
        self.certificates = Certificates(folder / "pem") if tls else None
        self._process: subprocess.Popen[bytes] | None = None
        self._write(acl, more)

    def _write(self, acl: str, more: str) -> None:
        passwords = self.folder / "passwords"
        passwords.touch(0o600)
        for user in (*DEVICES, "plc", "fleet", "viewer"):
            command = ["mosquitto_passwd", "-b", str(passwords), user, secret(user)]
            subprocess.run(command, check=True, capture_output=True)
        (self.folder / "acl").write_text(acl, encoding="utf-8")
        lines = [
            f"user {pwd.getpwuid(os.getuid()).pw_name}",
            "per_listener_settings false",
            "allow_anonymous false",
            f"password_file {passwords}",
            f"acl_file {self.folder / 'acl'}",
            f"persistence true\npersistence_location {self.folder}/",
            "log_dest none",
            "max_queued_messages 20000",
            "set_tcp_nodelay true",
            f"listener {self.port} 127.0.0.1",
        ]
        if self.certificates is not None:
            pem = self.certificates
            lines += [
                f"listener {self.tls_port} 127.0.0.1",
                f"cafile {pem.ca}\ncertfile {pem.server}\nkeyfile {pem.server_key}",
                "require_certificate true",
            ]
        lines.append(more)
        (self.folder / "mosquitto.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def start(self) -> None:
        """Start, and wait until it listens."""
        command = [program(), "-c", str(self.folder / "mosquitto.conf")]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "mosquitto ended at its start"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            time.sleep(0.02)
        raise AssertionError("mosquitto does not listen")

    def stop(self, how: int = signal.SIGTERM) -> None:
        """End it: SIGTERM in good order, SIGKILL as a power failure would."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(10)
            self._process = None

    def rss_kib(self) -> int:
        """Its memory now."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        return int(status.split("VmRSS:")[1].split()[0])

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def password_file(self, user: str) -> Path:
        path = self.folder / f"{user}.password"
        path.write_text(secret(user) + "\n", encoding="utf-8")
        return path

    def config(self, device: str, user: str = "", **more: Any) -> MqttConfig:
        """The [mqtt] table of a device; its user has its name unless another one is given."""
        user = user or device
        fields = {
            "host": "127.0.0.1",
            "port": self.port,
            "site": SITE,
            "device": device,
            "username": user,
            "password_file": self.password_file(user),
        }
        return MqttConfig.model_validate({**fields, **more})


class Certificates:
    """An authority, a server's and a client's certificate, and a client that nobody knows."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.ca, self.server, self.server_key = self._issue("ca", "server")
        _, self.client, self.client_key = self._issue("ca", "client")
        self.other_ca, self.other, self.other_key = self._issue("other-ca", "other")

    def _issue(self, authority: str, name: str) -> tuple[Path, Path, Path]:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        paths = [self._folder / f"{part}.pem" for part in (authority, name, f"{name}-key")]
        if not paths[0].exists():
            key = ec.generate_private_key(ec.SECP256R1())
            self._save(paths[0], _certificate(authority, key, authority, key, True))
            self._authority_key = key
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(name, key, authority, self._authority_key, False)
        self._save(paths[1], certificate)
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        paths[2].write_bytes(private)
        return paths[0], paths[1], paths[2]

    def _save(self, path: Path, certificate: Any) -> None:
        from cryptography.hazmat.primitives import serialization

        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _certificate(name: str, key: Any, issuer: str, issuer_key: Any, authority: bool) -> Any:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.timezone.utc)
    places = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(places), critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256())


@dataclass(frozen=True)
class Seen:
    """A message that a test client received."""

    topic: str
    payload: bytes
    retain: bool
    correlation: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.payload)


class Client:
    """What a PLC or a server does: publish, and look at what comes. MQTT 5 or 3.1.1."""

    def __init__(self, client: aiomqtt.Client, v5: bool) -> None:
        self.client, self.v5 = client, v5
        self.seen: list[Seen] = []
        self._news = asyncio.Event()

    async def read(self) -> None:
        with contextlib.suppress(aiomqtt.MqttError):
            async for message in self.client.messages:
                extra = getattr(message.properties, "CorrelationData", b"")
                seen = Seen(str(message.topic), bytes(message.payload), message.retain, extra)
                self.seen.append(seen)
                self._news.set()

    async def wait(self, wanted: Callable[[Seen], bool], seconds: float = 60) -> Seen:
        """The first message, already here or still to come, that is wanted."""
        deadline = time.monotonic() + seconds
        looked = 0
        while True:
            self._news.clear()
            for seen in self.seen[looked:]:
                if wanted(seen):
                    return seen
            looked = len(self.seen)
            left = deadline - time.monotonic()
            assert left > 0, f"not seen in {seconds} s; the last were {self.seen[-5:]}"
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), left)

    async def at(self, end: str, seconds: float = 60, **fields: Any) -> Any:
        """JSON of the first message on a topic that ends so and holds these fields."""

        def wanted(seen: Seen) -> bool:
            if not seen.topic.endswith(end) or not seen.payload:
                return False
            value = seen.json
            return all(key in value and value[key] == fields[key] for key in fields)

        return (await self.wait(wanted, seconds)).json

    async def send(
        self,
        verb: str,
        body: Mapping[str, Any] | bytes,
        to: str = "m1",
        *,
        qos: int = 1,
        retain: bool = False,
        **properties: Any,
    ) -> None:
        """Publish a command; properties are MQTT 5's, such as ResponseTopic."""
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        extra = None
        if properties:
            extra = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
            for name, value in properties.items():
                setattr(extra, name, value)
        topic = f"gemctl/v1/{SITE}/{to}/cmd/{verb}"
        await self.client.publish(topic, payload, qos, retain, extra)

    async def call(self, verb: str, ident: str, to: str = "m1", **params: Any) -> Any:
        """Send a command, and return its final reply from reply/ID."""
        await self.send(verb, {"id": ident, "params": params}, to)
        return await self.final(f"{to}/reply/{ident}")

    async def final(self, end: str, seconds: float = 60) -> Any:
        """The reply with a result or an error on a topic that ends so."""

        def wanted(seen: Seen) -> bool:
            return seen.topic.endswith(end) and bool({"result", "error"} & seen.json.keys())

        return (await self.wait(wanted, seconds)).json


@asynccontextmanager
async def client(
    broker: Broker, user: str = "plc", v5: bool = True, topic: str = f"gemctl/v1/{SITE}/#"
) -> AsyncIterator[Client]:
    """A connected client that has subscribed."""
    inner = aiomqtt.Client(
        "127.0.0.1",
        broker.port,
        username=user,
        password=secret(user),
        protocol=ProtocolVersion.V5 if v5 else ProtocolVersion.V311,
        max_inflight_messages=1000,
        socket_options=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
    )
    inner.pending_calls_threshold = 100000
    async with inner:
        made = Client(inner, v5)
        reading = asyncio.create_task(made.read())
        try:
            if topic:
                await inner.subscribe(topic, 1)
            yield made
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


@dataclass
class FakeService:
    """Answers the daemon's methods from memory; `calls` is all that was asked."""

    hub: EventHub
    model: str = "smollm"
    digest: str = "a" * 64
    mode: str = "balanced"
    present: tuple[str, ...] = ("a" * 64, "b" * 64)  # versions in its store
    bad: tuple[tuple[str, str], ...] = ()  # of these, found bad: digest, reason
    calls: list[tuple[str, dict[str, Any], Caller]] = field(default_factory=list)
    gate: asyncio.Event | None = None  # generate waits for it

    async def call(
        self, method: str, params: Mapping[str, Any], caller: Caller, emit: Emit | None = None
    ) -> dict[str, Any]:
        self.calls.append((method, dict(params), caller))
        if method == "generate":
            return await self._generate(emit)
        if method == "model.status" and params.get("name") != self.model:
            raise ApiError("not_found", f"{params.get('name')}: no such model; see model.list")
        if method in ("model.switch", "model.replace"):
            self.digest = params.get("digest", self.digest)
            self.hub.publish("slot.state", model=self.model, to="serving", cause=method)
        if method == "throttle.set":
            self.mode = params.get("mode", self.mode)
            self.hub.publish("throttle.level", level=0, duty=1.0, reason="command")
        if method == "throttle.get":
            return {"mode": self.mode, "level": 0}
        if method == "model.status":
            return self._status()
        if method == "model.list":
            return {"models": [{"name": self.model, "state": "serving"}]}
        return {"method": method, "params": dict(params)}

    def _status(self) -> dict[str, Any]:
        return {
            "name": self.model,
            "digest": self.digest,
            "state": "serving",
            "present": [{"digest": digest, "bytes": 1} for digest in self.present],
            "bad": [{"digest": digest, "reason": why} for digest, why in self.bad],
        }

    async def _generate(self, emit: Emit | None) -> dict[str, Any]:
        if self.gate is not None:
            await self.gate.wait()
        for piece in ("turn", " left", "."):
            if emit is not None:
                await emit({"text": piece})
        return {"text": "turn left."}

    def stats(self) -> dict[str, Any]:
        figures = (12.5, 33.1, 17, 51.0)
        names = ("ttft_ms", "throughput_tps", "kv_cache_used", "temp_c")
        about = {"v": 1, "ts": time.time(), "model": self.model, "digest": self.digest}
        throttle = {"mode": self.mode, "level": 0, "duty": 1.0}
        first = dict(zip(names, figures, strict=True))
        return {**first, **about, "state": "serving", "throttle": throttle}

    def asked(self, method: str) -> int:
        """How often a method was called."""
        return sum(name == method for name, _, _ in self.calls)


@dataclass
class Running:
    """A bridge at work, with its stand-in and its hub."""

    bridge: Bridge
    service: FakeService
    hub: EventHub
    stop: asyncio.Event
    task: asyncio.Task[None]

    async def connected(self, connections: int = 1, seconds: float = 15) -> None:
        await until(lambda: self.up(connections), seconds)

    def up(self, connections: int = 1) -> bool:
        if self.task.done():
            self.task.result()
            raise AssertionError("the bridge has ended")
        info = self.bridge.info()
        return bool(info["connected"]) and info["connections"] >= connections


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until it holds; the condition must come true by itself."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def running(config: MqttConfig, wait: bool = True, **options: Any) -> AsyncIterator[Running]:
    """The bridge under test; it tries again after 50 to 200 ms where nothing else is said."""
    hub = EventHub()
    service = FakeService(hub)
    options.setdefault("backoff", Backoff(0.05, 0.2))
    bridge = Bridge(config, service, hub, **options)
    stop = asyncio.Event()
    task = asyncio.create_task(bridge.run(stop))
    made = Running(bridge, service, hub, stop, task)
    try:
        if wait:
            await made.connected()
        yield made
    finally:
        stop.set()
        await asyncio.wait_for(task, 15)
