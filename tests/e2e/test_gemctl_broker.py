"""The real daemon, its real engine and a real broker together; what is told, and what is not."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from broker import Broker, client
from daemon import ROOT, Daemon, answer_of, settled, wait_for
from gemrun.format import spec

PROMPT = "abc"
SIGNATURE_AT = spec.SIGNATURE_OFFSET + 40  # a byte of the signature itself


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path) as made:
        yield made


def started(broker: Broker, mqtt: dict[str, Any], **tables: dict[str, Any]) -> Daemon:
    """A daemon that is to be this broker's m1."""
    password = broker.password_file("m1")
    password.chmod(0o600)
    table = {"host": "127.0.0.1", "port": broker.port, "site": "plant", "device": "m1"}
    table = {**table, "username": "m1", "password_file": str(password), **mqtt}
    return Daemon(mqtt=table, **tables)


def connected(daemon: Daemon) -> None:
    wait_for(lambda: daemon.call("daemon.info")["mqtt"]["connected"])


@pytest.fixture
def daemon(broker: Broker) -> Iterator[Daemon]:
    with started(broker, {}) as made:
        connected(made)
        yield made


def ask(broker: Broker, verb: str, **params: Any) -> dict[str, Any]:
    """A command and its reply with MQTT 3.1.1, as a PLC would."""

    async def body() -> dict[str, Any]:
        async with client(broker, v5=False) as plc:
            return dict(await plc.call(verb, uuid.uuid4().hex, **params))

    return asyncio.run(body())


def test_a_plc_asks_switches_and_replaces(
    broker: Broker, daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    one, two = (answer_of(path, PROMPT) for path in versions)
    fields = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0.0, "ignore_stop_ids": True}
    daemon.replace(versions[0], name="pilot")
    assert ask(broker, "generate", **fields)["result"]["text"] == one
    text = daemon.gemctl("model", "stage", versions[1], "--name", "pilot")
    digest = next(word for word in text.split() if len(word) == 64)
    settled(daemon)
    reply = ask(broker, "model.replace", name="pilot", digest=digest)
    assert reply["result"]["digest"] == digest
    assert ask(broker, "generate", **fields)["result"]["text"] == two
    assert ask(broker, "stats")["result"]["model"] == "pilot"
    assert ask(broker, "model.switch", name="nobody")["error"]["code"] == "not_found"


@dataclass
class Vendor:
    """Two versions that a key has signed, and the folder that trusts it."""

    keys: Path
    signed: tuple[Path, Path]

    def forget(self) -> None:
        """The key is trusted no longer."""
        (self.keys / "vendor.pub").unlink()


def gemmake(*words: str | Path) -> None:
    command = [sys.executable, "-m", "gemmake.cli", *map(str, words)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


@pytest.fixture
def vendor(versions: tuple[Path, Path], tmp_path: Path) -> Vendor:
    gemmake("keygen", "--output", tmp_path / "vendor")
    signed = (tmp_path / "one.gembin", tmp_path / "two.gembin")
    for source, target in zip(versions, signed, strict=True):
        gemmake("sign", source, "--key", tmp_path / "vendor.key", "--output", target)
    keys = tmp_path / "keys"
    keys.mkdir()
    shutil.copy(tmp_path / "vendor.pub", keys)
    return Vendor(keys, signed)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def staged(daemon: Daemon, path: Path) -> str:
    daemon.gemctl("model", "stage", path, "--name", "pilot")
    return digest_of(path)


def test_only_signed_versions_serve_by_a_command(
    broker: Broker, vendor: Vendor, versions: tuple[Path, Path]
) -> None:
    """What is not signed is refused over MQTT and taken on the device, as its store allows."""
    models = {"keys_dir": str(vendor.keys), "signature": "preferred"}
    with started(broker, {"require_signed": True}, models=models) as daemon:
        connected(daemon)
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        plain, good = staged(daemon, versions[1]), staged(daemon, vendor.signed[1])
        refused = ask(broker, "model.replace", name="pilot", digest=plain)["error"]
        assert refused["code"] == "refused"
        for part in (f"pilot {plain[:12]}: signature: none", "require_signed is on", "own gemctl"):
            assert part in refused["message"]
        assert ask(broker, "stats")["result"]["digest"] == digest_of(versions[0])
        assert daemon.call("daemon.info")["mqtt"]["commands"]["signature"] == 1
        assert daemon.events("mqtt.refused")[-1]["reason"] == "signature"

        reply = ask(broker, "model.replace", name="pilot", digest=good[:12])
        assert reply["result"]["digest"] == good
        settled(daemon)
        # every other way to let a version serve: the one before is not signed
        assert "signature: none" in ask(broker, "model.rollback", name="pilot")["error"]["message"]
        assert "result" in ask(broker, "model.disable", name="pilot")
        assert "result" in ask(broker, "model.enable", name="pilot")
        assert "result" in ask(broker, "model.unload", name="pilot")
        assert "result" in ask(broker, "model.switch", name="pilot")
        daemon.gemctl("model", "rollback", "pilot")  # on the device it may
        settled(daemon)
        assert daemon.call("stats")["digest"] == digest_of(versions[0])
        for verb in ("model.switch", "model.load", "model.enable"):
            assert ask(broker, verb, name="pilot")["error"]["code"] == "refused", verb
        daemon.replace(versions[1], name="pilot")
        settled(daemon)
        assert daemon.call("stats")["digest"] == plain
        assert ask(broker, "model.rollback", name="nobody")["error"]["code"] == "not_found"
        missing = ask(broker, "model.replace", name="pilot", digest="0" * 12)["error"]
        assert missing["code"] == "not_found"

        # a key that is trusted no longer counts at once, also for what was verified before
        assert staged(daemon, vendor.signed[1]) == good
        vendor.forget()
        again = ask(broker, "model.replace", name="pilot", digest=good)["error"]
        assert again["code"] == "refused"
        assert "put its .pub file there to trust it" in again["message"]
        keys = next(c for c in daemon.call("doctor")["checks"] if c["name"] == "keys")
        assert keys["level"] == "warn"
        assert "no .pub file" in keys["text"]


def test_a_signature_that_does_not_hold(
    broker: Broker, vendor: Vendor, versions: tuple[Path, Path], tmp_path: Path
) -> None:
    """With a store that checks nothing, the broker's commands are still held to signatures."""
    models = {"keys_dir": str(vendor.keys), "signature": "off"}
    data = bytearray(vendor.signed[1].read_bytes())
    data[SIGNATURE_AT] ^= 1
    changed = tmp_path / "changed.gembin"
    changed.write_bytes(data)
    with started(broker, {"require_signed": True}, models=models) as daemon:
        connected(daemon)
        daemon.replace(vendor.signed[0], name="pilot")
        settled(daemon)
        bad = staged(daemon, changed)
        refused = ask(broker, "model.replace", name="pilot", digest=bad)["error"]
        assert refused["code"] == "refused"
        assert "signature: invalid" in refused["message"]
        assert daemon.call("stats")["digest"] == digest_of(vendor.signed[0])


def test_a_broker_that_dies_changes_nothing(
    broker: Broker, daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    daemon.replace(versions[0], name="pilot")
    one = answer_of(versions[0], PROMPT)
    broker.stop(signal.SIGKILL)
    for _ in range(20):
        assert daemon.ask(PROMPT)["text"] == one
    wait_for(lambda: not daemon.call("daemon.info")["mqtt"]["connected"])
    assert daemon.ask(PROMPT)["text"] == one
    broker.start()
    wait_for(lambda: daemon.call("daemon.info")["mqtt"]["connected"])
    assert ask(broker, "stats")["result"]["state"] == "serving"


def test_prompts_stay_out_of_log_events_and_bundle(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    secret_word = "xylophone-4711"
    daemon.replace(versions[0], name="pilot")
    answer = daemon.ask(f"say {secret_word}")["text"]
    told = json.dumps(daemon.call("bundle")) + daemon.log.read_text(encoding="utf-8")
    told += json.dumps(daemon.events())
    assert secret_word not in told
    assert answer not in told
    daemon.config.write_text(
        daemon.config.read_text(encoding="utf-8").replace(
            "[daemon]\n", "[daemon]\nlog_prompts = true\n"
        ),
        encoding="utf-8",
    )
    daemon.stop()
    daemon.start()
    wait_for(lambda: daemon.call("model.status", name="pilot")["state"] == "serving")
    daemon.ask(f"say {secret_word}")
    assert secret_word in json.dumps(daemon.events("request.text"))


def test_hooks_are_told_what_became_of_a_version(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    note = tmp_path / "note"
    script = tmp_path / "hook"
    script.write_text(
        f'#!/bin/sh\necho "$1 $GEMCTL_MODEL $GEMCTL_OUTCOME" >> {note}\n', encoding="utf-8"
    )
    script.chmod(0o755)
    table = {"probation_good": [str(script), "mark-good"], "probation_bad": ["/nowhere/at/all"]}
    with Daemon(hooks=table) as daemon:
        daemon.replace(versions[0], name="pilot")
        wait_for(lambda: daemon.events("hook"))
        assert note.read_text(encoding="utf-8") == "mark-good pilot good\n"
        assert daemon.events("hook")[0]["code"] == 0


def test_a_second_daemon_is_refused(daemon: Daemon) -> None:
    """By its socket, and by its state folder where only that is the same."""
    other = daemon.folder / "other.toml"
    for text, what in (
        (daemon.config.read_text(encoding="utf-8"), "another gemctld"),
        (daemon.config.read_text(encoding="utf-8").replace('/s"', '/s2"'), "works here"),
    ):
        other.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "gemctl.daemon", "--config", str(other)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode != 0
        assert what in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    assert daemon.call("stats")["v"] == 1


def test_a_sensor_s_topic_that_is_named_later_is_heard(broker: Broker, daemon: Daemon) -> None:
    """Over the broker's death and the daemon's, until another one is named."""

    def measured(topic: str, celsius: float) -> float | None:
        async def publish() -> None:
            async with client(broker) as sensor:
                await sensor.client.publish(topic, f"{celsius}")

        asyncio.run(publish())
        found: float | None = daemon.call("throttle.get")["temp_c"]
        return found

    def heard(topic: str, celsius: float) -> None:
        wait_for(lambda: measured(topic, celsius) == celsius)

    assert measured("sensors/hall", 41.5) is None
    daemon.call("throttle.set", external=["mqtt:sensors/hall"])
    heard("sensors/hall", 41.5)
    broker.stop(signal.SIGKILL)
    wait_for(lambda: not daemon.call("daemon.info")["mqtt"]["connected"])
    broker.start()
    connected(daemon)
    heard("sensors/hall", 42.5)
    daemon.stop()
    daemon.start()
    connected(daemon)
    heard("sensors/hall", 43.5)
    daemon.call("throttle.set", external=["mqtt:sensors/yard"])
    heard("sensors/yard", 44.5)
    assert measured("sensors/hall", 45.5) != 45.5
    refused = daemon.call("daemon.info")["mqtt"]["commands"].get("rejected", 0)
    daemon.call("throttle.set", external=[])
    wait_for(lambda: measured("sensors/yard", 46.5) is None)
    assert daemon.call("daemon.info")["mqtt"]["commands"].get("rejected", 0) == refused
