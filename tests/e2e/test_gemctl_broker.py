"""The real daemon, its real engine and a real broker together; what is told, and what is not."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import Broker, client, secret
from daemon import ROOT, Daemon, answer_of, settled, wait_for

PROMPT = "abc"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path) as made:
        yield made


@pytest.fixture
def daemon(broker: Broker, tmp_path: Path) -> Iterator[Daemon]:
    password = tmp_path / "password"
    password.write_text(secret("m1"), encoding="utf-8")
    password.chmod(0o600)
    table = {"host": "127.0.0.1", "port": broker.port, "site": "plant", "device": "m1"}
    with Daemon(mqtt={**table, "username": "m1", "password_file": str(password)}) as made:
        wait_for(lambda: made.call("daemon.info")["mqtt"]["connected"])
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
