"""The throttle of a real daemon: a fake sysfs tree gets hot, real workers slow down.

The tree stands in for a board: nothing reacts to what the daemon does, the test sets every value.
"""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sysfs
from daemon import OPTIONS, Daemon, answer_of, settled, wait_for
from gemctl.client import Refused

PROMPT = "abc"


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]) -> Path:
    return artifact_cache(tiny_checkpoint("qwen3", seed=0), *OPTIONS)


@pytest.fixture
def board(tmp_path: Path) -> sysfs.Sysfs:
    """An Orin Nano that is cool, with this machine's memory."""
    tree = sysfs.orin_nano(tmp_path / "board")
    shutil.copy("/proc/meminfo", tree.root / "proc/meminfo")
    for kind in ("tj-thermal", "cpu-thermal", "gpu-thermal"):
        tree.heat(kind, 40.0)
    return tree


@pytest.fixture
def daemon(board: sysfs.Sysfs, artifact: Path) -> Iterator[Daemon]:
    with Daemon(sensors={"sysfs_root": str(board.root)}) as made:
        made.replace(artifact, name="pilot")
        settled(made)
        yield made


class Cabinet:
    """A sensor that writes its value to a file twenty times a second."""

    def __init__(self, path: Path, celsius: float) -> None:
        self.celsius = celsius
        self.source = f"file:{path}:0.001"
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._write()

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(f"{self.celsius * 1000:.0f}\n", encoding="utf-8")
        fresh.rename(self._path)

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            self._write()

    def __enter__(self) -> Cabinet:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def throttle(daemon: Daemon) -> dict[str, Any]:
    return daemon.call("throttle.get")


def test_heat_slows_the_workers_and_cooling_lets_them_go(
    daemon: Daemon, board: sysfs.Sysfs, artifact: Path
) -> None:
    assert throttle(daemon)["level"] == 0
    assert throttle(daemon)["faults"] == []
    assert "°" not in daemon.gemctl("throttle", "--temp", "70")
    assert throttle(daemon)["threshold_c"] == 70.0
    for celsius in (50, 60, 68, 75):  # no jump that no silicon makes
        board.heat("tj-thermal", celsius)
        wait_for(lambda celsius=celsius: throttle(daemon)["temp_c"] == celsius)
    hot = wait_for(lambda: (t := throttle(daemon))["level"] >= 1 and t)
    wait_for(lambda: throttle(daemon)["duty"] < 1)
    assert daemon.call("stats")["temp_c"] == 75.0
    assert daemon.ask(PROMPT)["text"] == answer_of(artifact, PROMPT)  # slower, and the same
    assert daemon.events("throttle.level")[0]["level"] >= 1
    for celsius in (65, 50, 40):
        board.heat("tj-thermal", celsius)
        wait_for(lambda celsius=celsius: throttle(daemon)["temp_c"] == celsius)
    wait_for(lambda: throttle(daemon)["level"] < hot["level"] or throttle(daemon)["duty"] > 0.9, 60)


CURVE = """
hdf_version = "1.0"
id = "generic-curve"
board = "generic-curve"
[target]
arch = "x86_64"
[[cpu.cluster]]
id = "c0"
cores = [0, 1, 2, 3]
opp_mhz = [600, 1000, 1510.4]
opp_volts = [0.6, 0.7, 1.0]
"""


def test_the_volts_of_the_boards_description_are_used_and_told(
    daemon: Daemon,
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
) -> None:
    assert throttle(daemon)["volts"] == "assumed"
    described = tmp_path / "curve.toml"
    described.write_text(CURVE, encoding="utf-8")
    made = artifact_cache(tiny_checkpoint("qwen3", seed=0), *OPTIONS, "--target", str(described))
    daemon.replace(made, name="pilot")
    settled(daemon)
    found = wait_for(lambda: (t := throttle(daemon))["volts"] == "description" and t)
    assert found["cap_power"] is None  # there is no gemctl-powerd, so there is no cap


def test_a_sensor_that_lies_or_is_gone_makes_it_conservative(
    daemon: Daemon, board: sysfs.Sysfs
) -> None:
    daemon.call("throttle.set", temp_c=70.0)
    assert throttle(daemon)["duty"] == 1.0
    for kind in ("tj-thermal", "cpu-thermal", "gpu-thermal"):
        board.heat(kind, 200.0)
    wait_for(lambda: throttle(daemon)["faults"])
    wait_for(lambda: throttle(daemon)["duty"] <= 0.5)
    assert daemon.events("sensor.fault")
    for kind in ("tj-thermal", "cpu-thermal", "gpu-thermal"):
        board.heat(kind, 40.0)
    wait_for(lambda: not throttle(daemon)["faults"], 30)
    assert daemon.events("sensor.ok")


def test_an_external_sensor_only_makes_it_stricter(
    daemon: Daemon, board: sysfs.Sysfs, tmp_path: Path
) -> None:
    with Cabinet(tmp_path / "cabinet", 41.0) as cabinet:
        daemon.gemctl("throttle", "--temp", "70", "--external-temp-sensor", cabinet.source)
        assert throttle(daemon)["external"] == [cabinet.source]
        for celsius in (50, 60, 68, 76):
            cabinet.celsius = celsius
            wait_for(lambda celsius=celsius: throttle(daemon)["temp_c"] == celsius)
        wait_for(lambda: throttle(daemon)["level"] >= 1)
        for celsius in (50, 60, 68, 75):  # now the silicon is hot, and then the cabinet cools
            board.heat("tj-thermal", celsius)
            wait_for(lambda: daemon.call("stats"))
        for celsius in (60, 45, 30):
            cabinet.celsius = celsius
            wait_for(lambda: daemon.call("stats"))
        wait_for(lambda: throttle(daemon)["temp_c"] == 75.0)
        assert throttle(daemon)["level"] >= 1
        daemon.gemctl("throttle", "--reset")
        assert throttle(daemon)["external"] == []


def test_doctor_tells_of_a_sensor_that_is_written_too_seldom(
    daemon: Daemon, board: sysfs.Sysfs, tmp_path: Path
) -> None:
    path = tmp_path / "cabinet"

    def check() -> dict[str, Any]:
        checks = daemon.call("doctor")["checks"]
        return next(one for one in checks if one["name"] == f"sensor file:{path}")

    path.write_text("41\n", encoding="utf-8")
    daemon.gemctl("throttle", "--external-temp-sensor", f"file:{path}")
    assert wait_for(lambda: (c := check()) and c["level"] == "ok" and c)["text"] == "41.0 C"
    wait_for(lambda: throttle(daemon)["faults"])  # it is old
    path.write_text("42\n", encoding="utf-8")
    wait_for(lambda: throttle(daemon)["temp_c"] == 42.0)
    found = check()  # fresh again, and still too seldom
    assert found["level"] == "warn"
    assert (
        "s without a new value, and after 5 s it counts as none; let it be written"
        in (found["text"])
    )
    path.unlink()
    assert "ENOENT" in wait_for(lambda: (c := check()) and "ENOENT" in c["text"] and c)["text"]


def test_modes_and_limits_for_a_while(daemon: Daemon) -> None:
    daemon.gemctl("throttle", "--mode", "conservative")
    wait_for(lambda: throttle(daemon)["duty"] == 0.5)
    daemon.gemctl("throttle", "--mode", "performance", "--for", "3s")
    assert throttle(daemon)["mode"] == "performance"
    assert throttle(daemon)["until"]
    wait_for(lambda: throttle(daemon)["mode"] == "conservative")
    assert throttle(daemon)["until"] is None
    daemon.gemctl("throttle", "--reset")
    assert throttle(daemon)["mode"] == "balanced"
    daemon.gemctl("throttle", "--duty", "0.25")
    assert throttle(daemon)["duty"] == 0.25


def test_a_threshold_above_the_board_s_is_told(daemon: Daemon, board: sysfs.Sysfs) -> None:
    """The answer has the value that was asked for, the one in force, and why."""
    found = daemon.call("throttle.set", temp_c=140.0)
    passive = min(
        int(path.read_text(encoding="ascii")) / 1000
        for path in board.find("tj-thermal").glob("trip_point_*_temp")
        if path.with_name(path.name.replace("_temp", "_type")).read_text().strip() == "passive"
    )
    assert (found["asked_c"], found["threshold_c"]) == (140.0, passive - 5.0)
    assert "140 C was asked for" in found["threshold_note"]
    assert f"{passive - 5:g} C" in found["threshold_note"]
    assert f"{passive - 5:g} C" in daemon.gemctl("throttle")
    found = daemon.call("throttle.set", temp_c=70.0)
    assert (found["asked_c"], found["threshold_c"], found["threshold_note"]) == (70.0, 70.0, "")


def test_a_while_outlasts_a_restart(daemon: Daemon) -> None:
    """Two minutes and more do; the next change ends it, and so does its time."""
    daemon.gemctl("throttle", "--mode", "conservative")
    asked = daemon.call("throttle.set", mode="silent", temp_c=66.0, for_s=600)
    daemon.stop(signal.SIGKILL)
    daemon.start()
    found = throttle(daemon)
    assert (found["mode"], daemon.call("throttle.get")["asked_c"]) == ("silent", 66.0)
    assert abs(found["until"] - asked["until"]) < 1.0

    daemon.call("throttle.set", mode="performance", for_s=60)  # not written down
    daemon.stop()
    daemon.start()
    assert (throttle(daemon)["mode"], throttle(daemon)["until"]) == ("conservative", None)

    daemon.call("throttle.set", mode="silent", for_s=600)
    daemon.stop()
    path = daemon.folder / "state" / "state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    state["brief"]["until"] -= 601
    del state["crc32"]
    path.write_text(json.dumps(state), encoding="utf-8")
    daemon.start()
    assert (throttle(daemon)["mode"], throttle(daemon)["until"]) == ("conservative", None)

    daemon.call("throttle.set", mode="silent", for_s=600)
    daemon.call("throttle.set", duty=0.5)
    daemon.stop()
    daemon.start()
    assert (throttle(daemon)["mode"], throttle(daemon)["duty"]) == ("conservative", 0.5)


def test_tests_of_a_candidate_keep_the_pace(
    versions: tuple[Path, Path], board: sysfs.Sysfs
) -> None:
    """They sleep between their steps, and what they sleep is no reason to give up on them."""
    worker = {"start_timeout_s": 5.0}
    with Daemon(sensors={"sysfs_root": str(board.root)}, worker=worker) as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        free = daemon.events("replace.phase")[-2]
        daemon.call("throttle.set", duty=0.02)
        report = daemon.replace(versions[1], name="pilot")
        paced = next(
            event
            for event in reversed(daemon.events("replace.phase"))
            if event["phase"] == "warmup"
        )
        assert free["phase"] == "warmup"
        print(f"tests: {free['test_ms']:.0f} ms, at a duty of 0.02 {paced['test_ms']:.0f} ms")
        assert paced["tests"] == free["tests"] > 0
        assert paced["test_ms"] > 5 * free["test_ms"]
        assert daemon.call("stats")["digest"] == report["digest"]


def test_a_device_that_is_paused_still_loads_enables_and_replaces(
    versions: tuple[Path, Path], board: sysfs.Sysfs
) -> None:
    """Requests are turned away; what an operator asks for is done at the pace that heat leaves."""
    with Daemon(sensors={"sysfs_root": str(board.root)}, throttle={"temp_c": 60.0}) as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        for celsius in (50, 56, 62, 68):  # as a chip would: a jump counts as a fault
            board.heat("tj-thermal", celsius)
            wait_for(lambda c=celsius: throttle(daemon)["temp_c"] == c)
        wait_for(lambda: throttle(daemon)["paused"] and throttle(daemon)["duty"] <= 0.2)
        with pytest.raises(Refused) as refused:
            daemon.ask(PROMPT)
        assert refused.value.code == "busy"
        assert "too hot" in str(refused.value)
        daemon.call("model.unload", name="pilot")
        daemon.call("model.load", name="pilot")
        daemon.call("model.disable", name="pilot")
        daemon.call("model.enable", name="pilot", warmup_prompt="ab " * 60)
        lines = daemon.gemctl("model", "replace", versions[1], "--name", "pilot")
        assert "the throttle allows 20 % of the time: tests and warm-up take longer" in lines
        assert daemon.call("model.status", name="pilot")["state"] == "serving"
        assert throttle(daemon)["paused"]


def test_power_and_figures_of_the_board(daemon: Daemon) -> None:
    wait_for(lambda: daemon.call("stats")["power_w"])
    daemon.ask(PROMPT)
    found = json.loads(daemon.gemctl("stats", "--json"))
    assert found["power_w"] > 0
    assert "VDD_IN" in json.dumps(daemon.call("bundle")) or found["power_w"]
    wait_for(lambda: daemon.call("stats.history", seconds=60, step_s=1)["series"]["temp_c"][-1])
    assert "temp_c" in daemon.gemctl("stats", "--history", "--step", "1")
    assert daemon.call("daemon.info")["rss_bytes"] < 60e6
    assert "sensor tj-thermal" in daemon.gemctl("doctor")


def test_a_zone_that_was_taken_away_is_not_well(
    daemon: Daemon, board: sysfs.Sysfs, tmp_path: Path
) -> None:
    path = tmp_path / "cabinet"
    with Cabinet(path, 30.0) as cabinet:
        daemon.gemctl("throttle", "--external-temp-sensor", cabinet.source)
        wait_for(lambda: throttle(daemon)["temp_c"] == 40.0)
        shutil.rmtree(board.root / "sys/class/thermal")
        wait_for(lambda: "soc" in dict(throttle(daemon)["faults"]), 40)  # it looked for zones again
        assert not daemon.events("sensor.ok")
        assert "sensor soc" in daemon.gemctl("doctor")


def test_a_sensor_that_cannot_be_is_refused_and_one_that_may_come_is_told(
    daemon: Daemon, board: sysfs.Sysfs, tmp_path: Path
) -> None:
    """No chip comes while it waits; a file is written by somebody who may start later."""
    board.put("sys/class/hwmon/hwmon7/name", "lm75\n")
    board.put("sys/class/hwmon/hwmon7/temp1_input", "41000\n")
    board.put("sys/bus/iio/devices/iio:device0/name", "tmp006\n")
    board.put("sys/bus/iio/devices/iio:device0/in_temp_ambient_raw", "41000\n")
    for source, known in (
        ("hwmon:lm57/temp1", "hwmon:lm75/temp1"),
        ("hwmon:lm75/temp2", "hwmon:lm75/temp1"),
        ("iio:tmp7/temp", "iio:tmp006/in_temp_ambient"),
    ):
        text = daemon.gemctl("stats", "--external-temp-sensor", source, code=2)
        assert f"external sensor '{source}': this machine has no such sensor; there are: " in text
        assert known in text
        assert throttle(daemon)["external"] == []
    for source in ("hwmon:lm75/temp1", "iio:tmp006/temp_ambient"):
        assert "external sensor" not in daemon.gemctl("stats", "--external-temp-sensor", source)
        assert throttle(daemon)["external"] == [source]
    path = tmp_path / "later"
    text = daemon.gemctl("stats", "--external-temp-sensor", f"file:{path}:0.001")
    note = f"file:{path}:0.001: ENOENT: No such file or directory; the throttle is careful until"
    assert f"gemctl: external sensor {note}" in text
    found = json.loads(daemon.gemctl("throttle", "--json"))
    assert [one.startswith(note) for one in found["external_notes"]] == [True]
    wait_for(lambda: throttle(daemon)["duty"] <= 0.5)
    with Cabinet(path, 41.0):
        wait_for(lambda: not throttle(daemon)["external_notes"])
