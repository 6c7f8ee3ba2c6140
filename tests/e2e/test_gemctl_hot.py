"""The throttle's last step on a real daemon, with a fake board: memory is freed once, requests and
sensors go on, and what an operator enables there stays."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sysfs
from daemon import Daemon, answer_of, settled, wait_for
from gemctl.client import Refused

PROMPT = "abc"
KINDS = ("tj-thermal", "cpu-thermal", "gpu-thermal")


@pytest.fixture
def board(tmp_path: Path) -> sysfs.Sysfs:
    """An Orin Nano that is cool, with this machine's memory."""
    tree = sysfs.orin_nano(tmp_path / "board")
    shutil.copy("/proc/meminfo", tree.root / "proc/meminfo")
    for kind in KINDS:
        tree.heat(kind, 40.0)
    return tree


@pytest.fixture
def daemon(board: sysfs.Sysfs, versions: tuple[Path, Path]) -> Iterator[Daemon]:
    tables: dict[str, dict[str, Any]] = {
        "sensors": {"sysfs_root": str(board.root)},
        "throttle": {"temp_c": 60.0, "allow_unload": True},
        "models": {"drain_s": 5.0},
    }
    with Daemon(**tables) as made:
        for name, path in zip(("pilot", "spare"), versions, strict=True):
            made.replace(path, name=name)
            settled(made, name)
        yield made


def state(daemon: Daemon, name: str = "pilot") -> str:
    return str(daemon.call("model.status", name=name)["state"])


def heat(daemon: Daemon, board: sysfs.Sysfs, *steps: float) -> None:
    """As a chip would: a jump counts as a fault."""
    for celsius in steps:
        board.heat("tj-thermal", celsius)
        wait_for(lambda c=celsius: daemon.call("throttle.get")["temp_c"] == c)


def on_last_step(daemon: Daemon) -> bool:
    return bool(daemon.call("throttle.get")["rung"] == "unload")


def test_models_are_unloaded_once_and_enabled_by_hand(
    daemon: Daemon, board: sysfs.Sysfs, versions: tuple[Path, Path]
) -> None:
    daemon.call("model.pin", name="spare", pinned=True)
    heat(daemon, board, 50, 56, 62, 68)
    wait_for(lambda: on_last_step(daemon))
    wait_for(lambda: state(daemon) == "disabled")
    assert state(daemon, "spare") == "serving"  # nobody unloads what is pinned
    assert [event["model"] for event in daemon.events("throttle.unload")] == ["pilot"]
    with pytest.raises(Refused, match="pilot: is disabled; gemctl model enable pilot"):
        daemon.ask(PROMPT)

    daemon.gemctl("model", "enable", "pilot")
    time.sleep(2.0)  # several ticks
    assert on_last_step(daemon)
    assert state(daemon) == "serving"
    assert len(daemon.events("throttle.unload")) == 1

    heat(daemon, board, 60, 50, 40)
    wait_for(lambda: not on_last_step(daemon), 120)
    wait_for(lambda: not daemon.call("throttle.get")["paused"], 120)
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)
    heat(daemon, board, 50, 56, 62, 68)  # the next time it is reached
    wait_for(lambda: on_last_step(daemon), 120)
    wait_for(lambda: state(daemon) == "disabled")


def test_sensors_are_read_while_a_request_ends(daemon: Daemon, board: sysfs.Sysfs) -> None:
    """An answer that is under way has drain_s; the throttle does not wait for it, and whoever
    waited behind it is told at once."""
    daemon.call("throttle.set", duty=0.02)
    said: list[str] = []

    def ask() -> None:
        try:
            said.append(daemon.ask(PROMPT, 150)["finish"])
        except Refused as error:
            said.append(str(error))

    askers = [threading.Thread(target=ask) for _ in range(2)]
    for asker in askers:
        asker.start()
    wait_for(lambda: daemon.call("stats")["requests"]["queued"] == 1)
    heat(daemon, board, 50, 56, 62, 68)
    wait_for(lambda: daemon.events("throttle.unload"))
    for celsius in (69.0, 70.0, 69.0, 68.0):  # seen while it drains
        began = time.monotonic()
        heat(daemon, board, celsius)
        assert time.monotonic() - began < 4.0
    for asker in askers:
        asker.join(60)
    assert len(said) == 2
    wait_for(lambda: state(daemon) == "disabled")


def test_the_threshold_of_an_unloaded_model_holds(
    board: sysfs.Sysfs, versions: tuple[Path, Path]
) -> None:
    """It came from the artifact, or from the configuration: freeing the memory changes neither."""
    with Daemon(sensors={"sysfs_root": str(board.root)}) as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        before = wait_for(lambda: daemon.call("throttle.get")["threshold_c"])
        daemon.call("model.disable", name="pilot")
        wait_for(lambda: daemon.call("stats")["state"] == "disabled")
        assert daemon.call("throttle.get")["threshold_c"] == before
