"""What the throttle does to a real worker: processor time against duty, and how fast it answers.

    python benchmarks/duty.py MODEL.gembin [--seconds 20] [--long 600]

For each duty a client asks without end; the worker's processor time per wall time is compared with
that at duty 1 (its share has to follow the duty). Then an external sensor jumps over the threshold,
again and again: time from its file's change to a worker that has confirmed another pace.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import sysfs  # noqa: E402
from daemon import Daemon, wait_for  # noqa: E402

PROMPT = "Once upon a time there was a robot that"
DUTIES = (1.0, 0.75, 0.5, 0.25, 0.1)


def processor_s(pid: int) -> float:
    """Processor time of a process, in seconds, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class Load:
    """Asks without end until it is closed."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._daemon.ask(PROMPT, 32)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def share(daemon: Daemon, duty: float, seconds: float) -> float:
    """Processor seconds of the worker per second at a duty, under load."""
    daemon.call("throttle.set", duty=duty)
    pid = daemon.workers()[0]
    load = Load(daemon)
    time.sleep(1.0)
    before, began = processor_s(pid), time.monotonic()
    time.sleep(seconds)
    used = (processor_s(pid) - before) / (time.monotonic() - began)
    load.close()
    return used


def follow(daemon: Daemon, seconds: float, long_s: float) -> None:
    """Print the table of duties."""
    print("| duty | processor s a second | of duty 1 | difference |")
    print("|---|---|---|---|")
    full = share(daemon, 1.0, seconds)
    for duty in DUTIES:
        used = full if duty == 1.0 else share(daemon, duty, seconds)
        print(f"| {duty:g} | {used:.3f} | {used / full:.4f} | {used / full - duty:+.4f} |")
    if long_s > 0:
        used = share(daemon, 0.5, long_s)
        print(f"duty 0.5 over {long_s:g} s: {used / full:.4f} ({used / full - 0.5:+.4f})")


def latency(artifact: Path, repeats: int) -> None:
    """Print how long it takes from a hot reading to a changed pace."""
    folder = Path(tempfile.mkdtemp(prefix="duty-"))
    board = sysfs.orin_nano(folder / "board")
    shutil.copy("/proc/meminfo", board.root / "proc/meminfo")
    board.heat("tj-thermal", 40.0)
    sensor = folder / "sensor"
    value = [69.0]

    def write() -> None:
        fresh = sensor.with_suffix(".new")
        fresh.write_text(f"{value[0]}\n", encoding="utf-8")
        fresh.rename(sensor)

    write()
    tables = {"sysfs_root": str(board.root), "external": [f"file:{sensor}"]}
    times: list[float] = []
    with Daemon(sensors=tables, throttle={"temp_c": 70.0}) as daemon:
        daemon.replace(artifact, name="model")
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(0.05):
                write()

        writer = threading.Thread(target=run)
        writer.start()
        for _ in range(repeats):
            value[0] = 45.0
            wait_for(lambda: daemon.call("throttle.get")["duty"] == 1.0, 120)
            time.sleep(0.5)
            value[0] = 50.0
            time.sleep(0.6)
            before = daemon.call("throttle.get")["duty"]
            assert before == 1.0, f"slowed down to {before} before it is hot"
            value[0] = 80.0
            began = time.monotonic()
            wait_for(lambda: daemon.call("throttle.get")["duty"] < 1.0)
            times.append((time.monotonic() - began) * 1e3)
        stop.set()
        writer.join()
    shutil.rmtree(folder, ignore_errors=True)
    print(f"from a hot reading to a confirmed pace, {repeats} times: median "
          f"{statistics.median(times):.0f} ms, most {max(times):.0f} ms")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--long", type=float, default=600.0)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(f"{os.cpu_count()} processors; {given.artifact.name}")
    with Daemon(worker={"threads": 1}) as daemon:
        daemon.replace(given.artifact, name="model")
        wait_for(lambda: not daemon.call("model.status", name="model")["on_probation"], 60)
        follow(daemon, given.seconds, given.long)
    latency(given.artifact, given.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
