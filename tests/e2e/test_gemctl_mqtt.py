"""The bridge against a real mosquitto with passwords and an ACL, under MQTT 5 and 3.1.1.

The daemon is a stand-in (broker.FakeService), the bridge, the client library and the broker are
the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker import SITE, Broker, Client, FakeService, Running, client, running, until
from gemctl import mqtt
from gemctl.errors import ApiError
from gemctl.events import EventHub
from gemctl.mqtt.commands import LONG, METHODS, READ

ROOT = Path(__file__).resolve().parents[2]
PROTOCOLS = ["5", "3.1.1"]
BASE = f"gemctl/v1/{SITE}/m1"
INBOX = f"gemctl/v1/{SITE}/reply/plc"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One for all tests that do not restart it."""
    with Broker(tmp_path_factory.mktemp("mqtt"), tls=True) as made:
        yield made


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Broker]:
    """One to be restarted."""
    with Broker(tmp_path) as made:
        yield made


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_method(broker: Broker, protocol: str) -> None:
    async def body() -> None:
        v5 = protocol == "5"
        config = broker.config("m1", protocol=protocol)
        async with running(config) as device, client(broker, v5=v5) as plc:
            for number, method in enumerate(sorted(METHODS)):
                verb = method if number % 2 else method.replace(".", "/")
                reply = await plc.call(verb, f"{protocol}-{number}", name="smollm")
                assert "result" in reply or method == "events.follow"
                assert (reply["v"], reply["device"]) == (1, "m1")
            accepted = sum("accepted" in s.json for s in plc.seen if "/reply/" in s.topic)
            assert accepted == len(LONG)
            asked = {method for method, _, _ in device.service.calls}
            assert asked == METHODS - {"events.follow"}
            assert all(caller.source == "mqtt" for _, _, caller in device.service.calls)
            print(f"MQTT {protocol}: {len(METHODS)} methods called and answered")

    asyncio.run(body())


def test_response_topic_and_correlation_data(broker: Broker) -> None:
    async def body() -> None:
        async with running(broker.config("m1")) as device, client(broker) as plc:
            for number in range(50):
                mark = bytes([number, 0, 255])
                verb = ("throttle.get", "generate", "model.switch")[number % 3]
                place = {"ResponseTopic": INBOX, "CorrelationData": mark}
                await plc.send(verb, {"params": {"number": number}}, **place)
            for number in range(50):
                mark = bytes([number, 0, 255])
                seen = await plc.wait(lambda s, m=mark: s.correlation == m and "result" in s.json)
                assert seen.topic == INBOX
                assert seen.json["device"] == "m1"
            assert device.bridge.info()["commands"]["done"] == 50
            # with both, the id names the command and the Response Topic the place
            await plc.send("stats", {"id": "both"}, ResponseTopic=INBOX, CorrelationData=b"\x07")
            seen = await plc.wait(lambda s: s.correlation == b"\x07" and "result" in s.json)
            assert (seen.topic, seen.json["id"]) == (INBOX, "both")

    asyncio.run(body())


def test_group_commands_are_answered_by_every_device(broker: Broker) -> None:
    async def body() -> None:
        first = running(broker.config("m1", groups=["line4"]))
        second = running(broker.config("m2", groups=["line4", "night"], protocol="3.1.1"))
        async with first, second, client(broker) as plc:
            request = {"id": "g", "reply_to": INBOX}
            await plc.send("stats", request, to="group/line4")
            for device in ("m1", "m2"):
                assert await plc.at("/reply/plc", device=device, id="g")
            await plc.send("stats", {"id": "n"}, to="group/night")
            assert (await plc.at("/reply/n"))["device"] == "m2"

    asyncio.run(body())


def test_status_state_stats_and_events(broker: Broker) -> None:
    async def body() -> None:
        config = broker.config("m1", groups=["line4"], stats_s=0.05)
        async with client(broker) as plc:
            async with running(config) as device, late_client(broker, device) as late:
                status = await late.at("m1/status", state="online")
                assert (status["groups"], status["protocol"]) == (["line4"], "5")
                state = await late.at("m1/state", model="smollm")
                assert "temp_c" not in state
                retained = {s.topic.rsplit("/", 1)[1] for s in late.seen if s.retain}
                assert {"status", "state"} <= retained
                assert retained <= {"status", "state", "config"}
                await until(lambda: sum("/stats" in s.topic for s in late.seen) > 5)
                stats = next(s.json for s in late.seen if s.topic.endswith("/stats"))
                first = ["ttft_ms", "throughput_tps", "kv_cache_used", "temp_c", "v", "ts"]
                assert list(stats)[:6] == first
                for number in range(100):
                    device.hub.publish("slot.state", model="smollm", number=number)
                await late.at("m1/event", number=99)
                numbers = [s.json["seq"] for s in late.seen if s.topic.endswith("/event")]
                assert numbers == sorted(numbers)
                states = [s for s in late.seen if s.topic == f"{BASE}/state"]
                assert len(states) == 1  # nothing changed
                device.service.digest = "b" * 64
                await late.at("m1/state", digest="b" * 64)
            await plc.at("m1/status", state="offline")
            assert (await plc.wait(lambda s: s.topic == f"{BASE}/status")).json

    asyncio.run(body())


@asynccontextmanager
async def late_client(broker: Broker, device: Running) -> AsyncIterator[Client]:
    """One that comes after the device has told its state."""
    await until(lambda: device.bridge._outbox.empty)
    async with client(broker, "viewer") as made:
        yield made


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_retained_commands_never_fire(broker: Broker, protocol: str) -> None:
    async def body() -> None:
        config = broker.config("m2", groups=["night"], protocol=protocol)
        topics = [("model.unload", "m2"), ("model/switch", "m2"), ("model.disable", "group/night")]
        async with client(broker, v5=protocol == "5") as plc:
            for number, (verb, to) in enumerate(topics):
                await plc.send(verb, {"id": f"r{number}"}, to, retain=True)
            for connection in range(3):
                async with running(config) as device:
                    await until(lambda d=device: d.bridge.info()["commands"].get("retained") == 3)
                    await plc.call("stats", f"c{connection}", to="m2")
                    assert [name for name, _, _ in device.service.calls] == ["stats"]
                    if connection == 2 and protocol == "5":  # to a device that is there, too
                        await plc.send("model.clear", {"id": "x"}, "m2", retain=True)
                        await until(lambda d=device: d.bridge.info()["commands"]["retained"] == 4)
                        await plc.send("model.clear", b"", "m2", retain=True)
            await plc.at("m2/event", kind="mqtt.refused", reason="retained")
            for verb, to in topics:
                await plc.send(verb, b"", to, retain=True)

    asyncio.run(body())


def test_duplicates_are_done_once(broker: Broker) -> None:
    async def body() -> None:
        async with running(broker.config("m1")) as device, client(broker) as plc:
            for _ in range(5):
                for number in range(20):
                    await plc.send("model.rollback", {"id": number, "params": {"n": number}})
            await until(lambda: sum("result" in s.json for s in replies(plc.seen)) == 100)
            assert device.service.asked("model.rollback") == 20
            assert device.bridge.info()["commands"]["duplicate"] == 80

    asyncio.run(body())


def replies(seen: list[Any]) -> list[Any]:
    return [one for one in seen if "/reply/" in one.topic]


def test_expired_commands_are_not_done(broker: Broker) -> None:
    """Sent while the device is away: the broker keeps them, for an hour at most."""

    async def body() -> None:
        async with client(broker) as plc:
            async with running(broker.config("m3")):
                pass
            await plc.send("model.load", {"id": "a"}, "m3", MessageExpiryInterval=1)
            await plc.send("model.load", {"id": "b", "expires_at": time.time() + 1}, "m3")
            await plc.send("model.load", {"id": "c"}, "m3", MessageExpiryInterval=60)
            await plc.send("model.load", {"id": "d", "expires_at": time.time() + 60}, "m3")
            await asyncio.sleep(2.1)
            async with running(broker.config("m3")) as device:
                assert "result" in await plc.final("reply/c")
                assert "result" in await plc.final("reply/d")
                assert (await plc.final("reply/b"))["error"]["code"] == "timeout"
                assert device.service.asked("model.load") == 2

    asyncio.run(body())


def test_where_replies_may_go(broker: Broker) -> None:
    async def body() -> None:
        places = [
            f"gemctl/v1/{SITE}/m2/cmd/model.unload",
            f"{BASE}/cmd/model.unload",
            f"{BASE}/status",
            "homeassistant/device/x/config",
        ]
        async with running(broker.config("m1")) as device, client(broker) as plc:
            for number, place in enumerate(places):
                await plc.send("model.load", {"id": f"a{number}", "reply_to": place})
                await plc.send("model.load", {"id": f"b{number}"}, ResponseTopic=place)
                for kind in "ab":
                    reply = await plc.final(f"m1/reply/{kind}{number}")
                    assert reply["error"]["code"] == "forbidden"
            assert device.service.calls == []

    asyncio.run(body())


def test_write_can_be_off(broker: Broker) -> None:
    async def body() -> None:
        async with running(broker.config("m1", write=False)) as device, client(broker) as plc:
            for number, method in enumerate(sorted(METHODS - READ)):
                reply = await plc.call(method, f"w{number}")
                assert reply["error"]["code"] == "forbidden"
            assert "result" in await plc.call("stats", "r")
            assert device.service.asked("stats") == len(device.service.calls) == 1

    asyncio.run(body())


# Rights


def test_what_the_broker_denies_hurts_nobody(broker: Broker) -> None:
    """m1 with m2's password: it may publish nothing of its own and hear no command."""

    async def body() -> None:
        async with client(broker) as plc, client(broker, "viewer") as viewer:
            config = broker.config("m1", user="m2", stats_s=0.02)
            async with running(config) as wrong:
                for number in range(200):
                    wrong.hub.publish("slot.state", number=number)
                await asyncio.sleep(0.5)
                assert wrong.up()
                assert wrong.bridge.info()["connections"] == 1
                assert not any(s.topic.startswith(BASE) and not s.retain for s in plc.seen)
            async with running(broker.config("m1")) as device:
                await viewer.send("model.unload", {"id": "1"})
                await plc.call("stats", "2")
                assert device.service.asked("model.unload") == 0

    asyncio.run(body())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_wrong_password_is_tried_again(broker: Broker, protocol: str) -> None:
    async def body() -> None:
        config = broker.config("m1", protocol=protocol)
        assert config.password_file is not None
        config.password_file.write_text("wrong\n")
        async with running(config, wait=False) as device:
            await until(lambda: "password_file" in device.bridge.info()["reason"])
            await asyncio.sleep(0.6)  # several attempts
            told = [e.fields["reason"] for e in device.hub.recent() if e.kind == "mqtt.lost"]
            assert len(told) == 1
            assert not device.up()
            broker.password_file("m1")
            await device.connected()
            assert device.bridge.info()["reason"] == ""
            config.password_file.unlink()
        async with running(config, wait=False) as device:
            await until(lambda: "No such file" in device.bridge.info()["reason"])

    asyncio.run(body())


def test_tls_with_certificates_on_both_sides(broker: Broker) -> None:
    pem = broker.certificates
    assert pem is not None
    wrong = [
        {"ca_file": pem.ca},  # the broker wants a certificate
        {"ca_file": pem.ca, "cert_file": pem.other, "key_file": pem.other_key},
        {"ca_file": pem.other_ca, "cert_file": pem.client, "key_file": pem.client_key},
        {"tls": True, "cert_file": pem.client, "key_file": pem.client_key},  # unknown authority
        {"ca_file": pem.ca, "cert_file": pem.client, "key_file": pem.other_key},
        {"ca_file": pem.server_key},
    ]

    async def body() -> None:
        good = {"ca_file": pem.ca, "cert_file": pem.client, "key_file": pem.client_key}
        for protocol in PROTOCOLS:
            config = broker.config("m1", port=broker.tls_port, protocol=protocol, **good)
            async with running(config), client(broker) as plc:
                assert "result" in await plc.call("stats", f"tls{protocol}")
        for files in wrong:
            config = broker.config("m1", port=broker.tls_port, **files)
            async with running(config, wait=False) as device:
                await until(lambda d=device: d.bridge.info()["reason"] != "not tried yet")
                assert not device.up()
                assert device.bridge.info()["reason"]
        print(f"TLS: 2 protocols connect, {len(wrong)} wrong sets of files do not")

    asyncio.run(body())


# Losing things

CHILD = """
import asyncio, sys
from gemctl.config import MqttConfig
from gemctl.events import EventHub
from gemctl import mqtt
from broker import FakeService
hub = EventHub()
config = MqttConfig.model_validate_json(sys.argv[1])
asyncio.run(mqtt.run(config, FakeService(hub), hub, asyncio.Event()))
"""


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_last_will_of_a_killed_daemon(broker: Broker, protocol: str) -> None:
    async def body() -> None:
        config = broker.config("m1", protocol=protocol).model_dump_json()
        async with client(broker) as plc:
            command = [sys.executable, "-c", CHILD, config]
            places = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
            child = subprocess.Popen(command, env=places)
            try:
                await plc.wait(lambda s: not s.retain and b"online" in s.payload)
            finally:
                child.kill()
                child.wait()
            will = await plc.wait(lambda s: not s.retain and s.payload == b'{"state":"offline"}')
            assert will.topic == f"{BASE}/status"
        async with client(broker, topic=f"{BASE}/status") as late:
            assert (await late.wait(lambda s: s.retain)).json == {"state": "offline"}

    asyncio.run(body())


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_broker_restarts(own: Broker, protocol: str, how: int) -> None:
    """Events wait meanwhile, a request that runs goes on, and its reply is sent afterwards."""

    async def body() -> None:
        device_config = own.config("m1", protocol=protocol)
        async with running(device_config) as device:
            for turn in range(1, 4):
                device.service.gate = asyncio.Event()
                async with client(own) as plc:
                    await plc.send("generate", {"id": f"g{turn}"})
                    await until(lambda t=turn: device.service.asked("generate") == t)
                await asyncio.to_thread(own.stop, how)
                await until(lambda: not device.up(0))
                for number in range(20):
                    device.hub.publish("slot.state", turn=turn, number=number)
                device.service.gate.set()
                await asyncio.to_thread(own.start)
                async with client(own) as plc:
                    await device.connected(turn + 1)
                    await plc.at("m1/status", state="online")
                    assert "result" in await plc.call("stats", f"s{turn}")
            kinds = [event.kind for event in device.hub.recent()]
            assert kinds.count("mqtt.lost") >= 3  # one more for each new reason
            info = device.bridge.info()
            assert (info["lost_events"], info["lost_replies"]) == (0, 0)

    asyncio.run(body())


def test_events_and_replies_wait_for_the_broker(own: Broker) -> None:
    """Whoever listens when the device is back hears all that was kept, in order."""

    async def body() -> None:
        front = Front(own.port)
        async with front as port, running(own.config("m1", port=port, protocol="5")) as device:
            device.service.gate = asyncio.Event()
            async with client(own) as plc:
                await plc.send("generate", {"id": "late"})
                await until(lambda: device.service.asked("generate") == 1)
            front.shut = True
            own.stop(signal.SIGKILL)
            await until(lambda: not device.up(0))
            device.service.gate.set()
            for number in range(1500):  # the queue holds 1000
                device.hub.publish("slot.state", number=number)
                if number % 100 == 0:
                    await asyncio.sleep(0)
            await asyncio.to_thread(own.start)
            async with client(own) as plc:
                front.shut = False
                await device.connected(2)
                connected = await plc.at("m1/event", kind="mqtt.connected")
                assert "result" in await plc.final("reply/late")
                numbers = [s.json["number"] for s in plc.seen if b'"number"' in s.payload]
                assert numbers == list(range(1500 - len(numbers), 1500))
                assert 950 <= len(numbers) <= 1000
                # what the outage and its end told took a few places
                assert 1499 - len(numbers) <= connected["lost_events"] <= 1510 - len(numbers)
                print(f"1500 events in an outage: {len(numbers)} kept, the others counted as lost")

    asyncio.run(body())


def test_a_broker_that_falls_silent(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stays, nothing comes: what is not confirmed in time is sent again."""
    monkeypatch.setattr("gemctl.mqtt.client.TIMEOUT_S", 0.3)

    async def body() -> None:
        front = Front(broker.port)
        async with front as port, running(broker.config("m1", port=port)) as device:
            front.frozen = True
            device.hub.publish("slot.state", number=1)
            await until(lambda: not device.up(0))
            front.frozen = False
            await device.connected(2)
            async with client(broker) as plc:
                assert "result" in await plc.call("stats", "thawed")
            await until(lambda: device.bridge._outbox.empty)

    asyncio.run(body())


def test_slower_while_the_broker_is_lost(own: Broker) -> None:
    async def body() -> None:
        config = own.config("m1", on_loss="conservative")
        async with running(config, grace_s=0.05) as device:
            own.stop(signal.SIGKILL)
            await until(lambda: device.service.mode == "conservative")
            await asyncio.to_thread(own.start)
            await until(lambda: device.service.mode == "balanced")
            sets = [p for name, p, _ in device.service.calls if name == "throttle.set"]
            assert sets[0]["for_s"] > 0  # ends by itself, should the daemon end meanwhile

    asyncio.run(body())


# Protocols


class Front:
    """Stands before mosquitto. `old`: speaks only 3.1.1, and says so, or just hangs up, on MQTT 5.

    `deny`: refuses every subscription, which mosquitto's own ACL file never does.
    """

    def __init__(self, port: int, old: str = "", deny: bool = False) -> None:
        self._port, self._old, self._deny = port, old, deny
        self.refused = 0
        self.shut = False  # hangs up on everybody
        self.frozen = False  # takes everything, and lets nothing through

    async def __aenter__(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await reader.read(4096)
        if self.shut:
            writer.close()
            return
        if self._old and first[first.index(b"MQTT") + 4] == 5:
            self.refused += 1
            if self._old == "polite":
                writer.write(b"\x20\x02\x00\x01")
            writer.close()
            return
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        inner_writer.write(first)
        ways = [self._pump(reader, inner_writer), self._pump(inner_reader, writer, self._deny)]
        await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deny: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                refused = deny and data[0] == 0x90  # SUBACK
                if not self.frozen:
                    writer.write(data[:-1] + b"\x80" if refused else data)
        writer.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_subscription_is_refused(broker: Broker, protocol: str) -> None:
    async def body() -> None:
        async with Front(broker.port, deny=True) as port, client(broker) as plc:
            config = broker.config("m1", port=port, protocol=protocol)
            async with running(config) as device:
                assert device.bridge.info()["commands"]["subscription"] == 1
                await plc.at("m1/event", kind="mqtt.refused", reason="subscription")
                await plc.at("m1/status", protocol=protocol)

    asyncio.run(body())


@pytest.mark.parametrize("polite", [True, False])
def test_a_broker_without_mqtt_5(broker: Broker, polite: bool) -> None:
    async def body() -> None:
        old = Front(broker.port, old="polite" if polite else "rude")
        async with old as port:
            async with running(broker.config("m1", port=port)) as device, client(broker) as plc:
                assert device.bridge.info()["protocol"] == "3.1.1"
                assert "result" in await plc.call("stats", "old")
                assert old.refused == (1 if polite else 3)
            async with running(broker.config("m1", port=port, protocol="5"), wait=False) as device:
                await until(lambda: old.refused > 5)
                assert not device.up()

    asyncio.run(body())


def test_stopping_is_quick_whatever_the_broker_does() -> None:
    async def body() -> None:
        held = []

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            held.append(writer)

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for config in ({"host": "127.0.0.1", "port": port}, {"host": "127.0.0.1", "port": 1}):
            hub, stop = EventHub(), asyncio.Event()
            made = mqtt.MqttConfig.model_validate({**config, "device": "m1"})
            task = asyncio.create_task(mqtt.run(made, FakeService(hub), hub, stop))
            await asyncio.sleep(0.2)
            stop.set()
            before = time.monotonic()
            await asyncio.wait_for(task, 5)
            assert time.monotonic() - before < 3
        server.close()

    asyncio.run(body())


# Beside the commands


def test_home_assistant_is_told_and_forgotten(broker: Broker) -> None:
    async def retained() -> list[Any]:
        """What lies on the discovery topics; a message of ours comes after all of it."""
        async with client(broker, topic="homeassistant/#") as plc:
            await plc.client.subscribe(INBOX, 1)
            await plc.client.publish(INBOX, b"{}", 1)
            await plc.wait(lambda s: s.topic == INBOX)
            return [seen for seen in plc.seen if seen.topic != INBOX]

    async def body() -> None:
        for wanted in (True, False):
            async with running(broker.config("m1", home_assistant=wanted)) as device:
                await until(lambda d=device: d.bridge._outbox.empty)
            found = await retained()
            assert len(found) == wanted
            if wanted:
                assert found[0].topic == "homeassistant/device/gemctl-plant-m1/config"
                assert len(found[0].json["cmps"]) == 4

    asyncio.run(body())


def test_a_fault_of_the_bridge_is_a_connection_lost(broker: Broker) -> None:
    """The daemon's other parts must not end with it."""

    async def body() -> None:
        async with running(broker.config("m1"), wait=False) as device:
            plain = device.bridge._announce
            faults = 3

            async def broken(link: Any) -> None:
                nonlocal faults
                faults -= 1
                if faults >= 0:
                    raise ValueError("SECRET")
                await plain(link)

            device.bridge._announce = broken  # type: ignore[method-assign]
            await device.connected()
            assert "SECRET" not in str([event.as_dict() for event in device.hub.recent()])
            assert any("ValueError" in str(event.fields) for event in device.hub.recent())

    asyncio.run(body())


def test_taps_hear_sensors_of_others(broker: Broker) -> None:
    async def body() -> None:
        heard: list[bytes] = []

        def tap(payload: bytes) -> None:
            heard.append(payload)
            raise ValueError("a sensor's reader that fails breaks nothing")

        async with client(broker) as plc:
            await plc.client.publish("sensors/cabinet", b"99", 1, retain=True)
            taps = {"sensors/cabinet": tap}
            async with running(broker.config("m1"), taps=taps) as device:
                await plc.client.publish("sensors/cabinet", b"41.5", 1)
                await plc.client.publish("sensors/cabinet", b"x" * 2000, 1)
                await plc.client.publish("sensors/cabinet", b"42.5", 1)
                await until(lambda: len(heard) == 2)
                assert device.up()
            await plc.client.publish("sensors/cabinet", b"", 1, retain=True)
        assert heard == [b"41.5", b"42.5"]

    asyncio.run(body())


def test_without_the_extra_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gemctl.mqtt.bridge", "gemctl.mqtt.client"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "aiomqtt", None)

    async def body() -> None:
        hub, stop = EventHub(), asyncio.Event()
        config = mqtt.MqttConfig(host="localhost")
        with pytest.raises(ApiError, match=r"aiomqtt is not installed; install gembin-toolchain"):
            await mqtt.run(config, FakeService(hub), hub, stop)
        await mqtt.run(mqtt.MqttConfig(), FakeService(hub), hub, stop)

    asyncio.run(body())


def test_no_prompt_reaches_a_topic_but_its_own_reply(broker: Broker) -> None:
    async def body() -> None:
        async with running(broker.config("m1")), client(broker, "viewer") as viewer:
            async with client(broker, topic="") as plc:
                await plc.send("generate", {"id": "1", "params": {"prompt": "SECRET"}})
                await viewer.final("reply/1")
            await viewer.client.unsubscribe(f"gemctl/v1/{SITE}/#")
            others = [s for s in viewer.seen if "/cmd/" not in s.topic]
            assert not any(b"SECRET" in s.payload for s in others)
            told = [s for s in others if b"turn" in s.payload]
            assert [s.topic for s in told] == [f"{BASE}/reply/1"]
            assert json.loads(told[0].payload)["result"]["text"] == "turn left."

    asyncio.run(body())
