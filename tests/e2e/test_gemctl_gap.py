"""The figures of a swap: the flip, the whole, and how long somebody who asked got no token."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daemon import Daemon, settled, wait_for
from gemctl.serve.artifact import declared

STALL_S = 0.5
FIELDS = {"prompt": "abc", "temperature": 0.0, "ignore_stop_ids": True}


@contextmanager
def asking(daemon: Daemon, tokens: int = 8) -> Iterator[list[float]]:
    """Somebody who asks again and again; the times at which he got tokens."""
    times: list[float] = []
    stop = threading.Event()

    def run() -> None:
        with daemon.client() as client:
            while not stop.is_set():
                client.call(
                    "generate",
                    {**FIELDS, "max_tokens": tokens},
                    lambda event: times.append(time.monotonic()) if "token" in event else None,
                )

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(lambda: times)
        yield times
    finally:
        stop.set()
        thread.join(60)


def told(daemon: Daemon, report: dict[str, Any]) -> float | None:
    """The gap, which every place tells alike."""
    gap: float | None = report["max_token_gap_ms"]
    assert daemon.events("replace.done")[-1]["max_token_gap_ms"] == gap
    assert daemon.call("model.status", name="pilot")["swap"]["max_token_gap_ms"] == gap
    assert daemon.call("stats")["swap"]["max_token_gap_ms"] == gap
    return gap


def stalled(daemon: Daemon, worker: int, version: Path) -> str:
    """What gemctl prints of a replacement during which the old worker stands still for a while."""
    os.kill(worker, signal.SIGSTOP)
    before = len(daemon.events("replace.phase"))
    with ThreadPoolExecutor(1) as pool:
        printed = pool.submit(daemon.gemctl, "model", "replace", version)
        wait_for(lambda: len(daemon.events("replace.phase")) > before)
        time.sleep(STALL_S)
        os.kill(worker, signal.SIGCONT)
        return printed.result(120)


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def test_a_replacement_tells_its_longest_gap(versions: tuple[Path, Path]) -> None:
    """Nobody asks: none. Somebody asks: it is within the replacement's own time. A worker that
    stands still: at least so long."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = {"metrics": {"listen": f"127.0.0.1:{port}"}, "worker": {"hang_s": 60.0}}
    with Daemon(**more) as daemon:
        assert told(daemon, daemon.replace(versions[0], name="pilot")) is None
        settled(daemon)
        with asking(daemon) as times:
            began, count = time.monotonic(), len(times)
            report = daemon.replace(versions[1], name="pilot")
            wait_for(lambda: len(times) > count)
            gap = told(daemon, report)
            assert gap is not None
            assert 0 < gap <= (time.monotonic() - began) * 1e3
            (worker,) = wait_for(lambda: len(found := daemon.workers()) == 1 and found)
            settled(daemon)
            shown = stalled(daemon, worker, versions[0])
        found = re.search(r", ([\d.]+) ms without a token at most", shown)
        assert found is not None, shown
        assert float(found[1]) >= STALL_S * 1e3
        assert 'gemctl_swap_max_token_gap_seconds_count{model="pilot"} 2.0' in metrics(port)


def test_who_waits_while_nothing_serves_is_counted(versions: tuple[Path, Path]) -> None:
    """A serial replacement ends the old one first: the gap is no shorter than what it then does."""
    size = declared(versions[0]).ram_total
    models = {"memory_most_bytes": size + size // 2, "probation_s": 0.2}
    with Daemon(models=models) as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        with asking(daemon):
            report = daemon.replace(versions[1], name="pilot", serial=True)
        phases = report["phases_ms"]
        gap = told(daemon, report)
        assert report["strategy"] == "serial"
        assert gap is not None
        assert gap >= sum(phases[name] for name in ("prefault", "load", "warmup"))
