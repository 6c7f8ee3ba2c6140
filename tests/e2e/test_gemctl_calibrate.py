"""gemctl calibrate thermal: a real daemon and its worker, on a board whose heat follows them.

The plant (tests/plant.py) takes the share of the time in which the worker really runs or wants to,
and writes what its sensor and its rail say into a fake tree of /sys, on the real clock. The test
and the plant are both five times as short as on a board: 12 s of rest and 60 s of work, a time
constant of 29 s.
"""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sysfs
from daemon import Daemon
from plant import Board, Plant

BOARD = Board(
    static_w=4.0, dynamic_w=10.0, threads=1, die_c_per_w=0.2, die_tau_s=1.0, sink_c_per_w=1.8,
    sink_tau_s=20.0, noise_c=0.1,
)  # fmt: skip
AIR_C = 25.0
SHORT = (
    "from gemctl.board import throttling\n"
    "throttling.REST_S, throttling.LOAD_S = 12.0, 60.0\n"
    "from gemctl import daemon\n"
    "daemon.main()\n"
)
ZONES = ("tj-thermal", "cpu-thermal", "gpu-thermal")


def _runnable(pid: int) -> bool:
    """Whether a thread runs, or waits for a core that somebody else has: a board of its own would
    give it one, however busy this machine is."""
    every = Path(f"/proc/{pid}/task").glob("*/stat")
    return any(one.read_text("utf-8").rpartition(")")[2].split()[0] == "R" for one in every)


class Heat:
    """Lets the plant follow the workers: fifty looks and four steps a second."""

    def __init__(self, tree: sysfs.Sysfs, daemon: Daemon) -> None:
        self.plant = Plant(BOARD, AIR_C)
        self._tree, self._daemon = tree, daemon
        self._rail = tree.root / "sys/class/hwmon/hwmon1/curr1_input"
        self._zones = [tree.find(kind) / "temp" for kind in ZONES]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.shares: list[float] = []

    def _write(self) -> None:
        celsius, milliamperes = self.plant.sensor_c(), self.plant.power_w / 5.0 * 1e3
        for path, value in [(zone, celsius * 1e3) for zone in self._zones] + [
            (self._rail, milliamperes)
        ]:
            fresh = path.with_suffix(".new")
            fresh.write_text(f"{value:.0f}\n", encoding="utf-8")
            fresh.rename(path)  # nobody reads half of it

    def _run(self) -> None:
        workers, before_s = self._daemon.workers(), time.monotonic()
        looks: list[bool] = []
        while not self._stop.wait(0.02):
            looks.append(any(_runnable(pid) for pid in workers))
            seconds = time.monotonic() - before_s
            if seconds >= 0.25:
                share = sum(looks) / len(looks)
                self.shares.append(share)
                self.plant.advance(seconds, BOARD.static_w + BOARD.dynamic_w * share, AIR_C)
                self._write()
                looks, before_s = [], before_s + seconds

    def __enter__(self) -> Heat:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def tree(tmp_path: Path) -> sysfs.Sysfs:
    made = sysfs.orin_nano(tmp_path / "board")
    shutil.copy("/proc/meminfo", made.root / "proc/meminfo")
    return made


@pytest.fixture
def daemon(
    tree: sysfs.Sysfs, smollm2_gguf: Path, artifact_cache: Callable[..., Path]
) -> Iterator[Daemon]:
    # Its token takes milliseconds: what the daemon does between two requests is no rest.
    artifact = artifact_cache(smollm2_gguf, "--effort", "fast", "--kv-cache-size", "256")
    made = Daemon(sensors={"sysfs_root": str(tree.root)}, worker={"threads": 1})
    made.program = ("-c", SHORT)
    with made:
        made.replace(artifact, name="pilot")
        yield made


@pytest.mark.slow
def test_the_step_test_finds_the_plant(daemon: Daemon, tree: sysfs.Sysfs) -> None:
    with Heat(tree, daemon) as heat:
        time.sleep(1.0)
        text = daemon.gemctl("calibrate", "thermal")
    found = re.search(r"rtheta_c_per_w = (\S+)\ntau_s = (\S+)\n", text)
    assert found is not None, text
    rtheta, tau_s = float(found[1]), float(found[2])
    loaded = sorted(heat.shares)[len(heat.shares) // 2]
    print(
        f"{rtheta:.2f} C/W of {BOARD.rtheta_c_per_w:.2f}, {tau_s:.0f} s of {BOARD.tau_s:.0f}; "
        f"the worker wanted a core {100 * loaded:.0f} % of the time, "
        f"{heat.plant.die_c:.1f} C at the end"
    )
    assert rtheta == pytest.approx(BOARD.rtheta_c_per_w, rel=0.15)
    assert tau_s == pytest.approx(BOARD.tau_s, rel=0.25)
    assert "put both below [throttle] in the configuration" in text
    assert daemon.call("throttle.get")["faults"] == []
