"""`gemctl fleet` as an operator types it: three real daemons, a real broker, real versions."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from broker import DEVICES, SITE, Broker
from daemon import Daemon, settled, wait_for

PROBATION = {"probation_s": 3.0, "probation_requests": 1000}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path) as made:
        yield made


def device(broker: Broker, name: str, **mqtt: Any) -> Daemon:
    password = broker.password_file(name)
    password.chmod(0o600)
    table = {"host": "127.0.0.1", "port": broker.port, "site": SITE, "device": name,
             "username": name, "password_file": str(password), "groups": ["line4"]}  # fmt: skip
    return Daemon(mqtt={**table, **mqtt}, models=PROBATION)


@pytest.fixture
def fleet(broker: Broker, versions: tuple[Path, Path]) -> Iterator[dict[str, Daemon]]:
    """Three devices that serve the first version; the third takes only signed ones by MQTT."""
    with ExitStack() as stack:
        made = {
            name: stack.enter_context(device(broker, name, require_signed=name == "m3"))
            for name in DEVICES
        }
        for daemon in made.values():
            daemon.replace(versions[0], name="pilot")
        for daemon in made.values():
            settled(daemon)
            wait_for(lambda daemon=daemon: daemon.call("daemon.info")["mqtt"]["connected"])
        yield made


class Operator:
    """Runs `gemctl fleet`; the last run's code, output and what it said on stderr."""

    def __init__(self, broker: Broker) -> None:
        password = broker.password_file("fleet")
        self.options = ["--port", str(broker.port), "--username", "fleet"]
        self.options += ["--password-file", str(password)]
        self.environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        self.environment["GEMCTL_SOCKET"] = "/nowhere"  # it asks no daemon of its own

    def command(self, *words: str, site: str = SITE) -> list[str]:
        gemctl = [sys.executable, "-m", "gemctl.cli"]
        return [*gemctl, "fleet", words[0], *self.options, "--site", site, *words[1:]]

    def run(self, *words: str, code: int, site: str = SITE) -> tuple[str, str]:
        done = subprocess.run(
            self.command(*words, site=site),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout, done.stderr


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_rollout_from_not_ready_to_its_end(
    broker: Broker, fleet: dict[str, Daemon], versions: tuple[Path, Path]
) -> None:
    operator, new = Operator(broker), digest_of(versions[1])
    rollout = ["rollout", "--name", "pilot", "--digest", new, "--percent", "100"]
    listed = json.loads(operator.run("status", "--json", code=0)[0])["devices"]
    assert [row["device"] for row in listed] == list(DEVICES)

    # nobody has it; then two have, and the third is named
    shown, _ = operator.run(*rollout, code=10)
    assert "3 of 3 devices are not ready" in shown
    assert "version not staged:\n  m1" in shown
    for name in ("m1", "m3"):
        fleet[name].gemctl("model", "stage", versions[1], "--name", "pilot")
    found = json.loads(operator.run(*rollout, "--json", code=10)[0])
    assert (found["action"], found["counts"]) == ("refused", {"pending": 2, "not_staged": 1})
    assert next(r for r in found["rows"] if r["device"] == "m2")["outcome"] == "not_staged"

    # the third takes only what is signed: it refuses, with its own reason, and nobody rolls back
    wide = [*rollout, "--skip-unready", "--max-bad", "1"]
    found = json.loads(operator.run(*wide, "--json", code=0)[0])
    rows = {row["device"]: row for row in found["rows"]}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "m1": "good", "m2": "not_staged", "m3": "refused",
    }  # fmt: skip
    assert "signature: none" in rows["m3"]["reason"]
    assert (rows["m1"]["stage"], rows["m2"]["stage"]) == (100.0, None)
    assert fleet["m1"].call("stats")["digest"] == new
    assert fleet["m3"].call("stats")["digest"] == digest_of(versions[0])
    _, said = operator.run(*rollout, "--skip-unready", code=8)
    assert "left out: version not staged: m2" in said
    assert "refused" in said
    assert "rolled back" not in said

    # a device that rolls back says why
    fleet["m2"].gemctl("model", "stage", versions[1], "--name", "pilot")
    process = subprocess.Popen(
        operator.command(*wide), env=operator.environment, stdout=subprocess.PIPE, text=True
    )
    status = wait_for(
        lambda: (s := fleet["m2"].call("model.status", name="pilot"))["on_probation"] and s
    )
    os.kill(status["worker"]["pid"], signal.SIGKILL)
    shown = process.communicate(timeout=120)[0]
    assert process.returncode == 8
    line = next(line for line in shown.splitlines() if line.startswith("m2"))
    assert "rolled back" in line
    assert line.endswith("its worker ended")
    said = "1 of 3 devices rolled back and 1 of 3 devices refused the version, 1 allowed"
    assert said in shown

    # from then on it is known there as bad
    found = json.loads(operator.run(*rollout, "--json", code=10)[0])
    bad = next(row for row in found["rows"] if row["device"] == "m2")
    assert (bad["outcome"], bad["reason"]) == ("bad_version", "its worker ended")
    fleet["m2"].stop()
    shown, _ = operator.run(*rollout, code=10)
    assert "offline:\n  m2" in shown
    shown, _ = operator.run(*rollout, "--group", "line4", code=10)
    assert "offline:\n  m2" in shown, "its group is known from what it told before"


def test_names_that_nobody_has(broker: Broker, fleet: dict[str, Daemon]) -> None:
    """Code 6, and a sentence that says which there are."""
    operator = Operator(broker)
    rollout = ["rollout", "--digest", "0" * 64, "--percent", "100", "--name"]
    _, said = operator.run(*rollout, "pilto", code=6)
    assert "model pilto: no device has it; there are: pilot" in said
    _, said = operator.run(*rollout, "pilot", "--group", "line5", code=6)
    assert "group line5: no device is in it; the groups of site plant are: line4" in said
    _, said = operator.run(*rollout, "pilot", code=6, site="plnt")
    assert "site plnt: no device is there, there are: plant" in said
    assert said.count("\n") == 1
    _, said = operator.run("status", "--group", "line5", code=6)
    assert "group line5" in said
