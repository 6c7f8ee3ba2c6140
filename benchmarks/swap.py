"""Replacement under load, and what switching costs, through a real daemon with real models.

    python benchmarks/swap.py A.gembin B.gembin [--requests 10000] [--clients 4]
    python benchmarks/swap.py --switch SMALL.gembin LARGE.gembin

The first: clients ask on while the two versions of one model are exchanged again and again. Every
answer must be one version's, whole; flips, the longest gap between two tokens of one answer beside
it without replacements, and the requests' fates are printed. The second: time from the command to
the other model's first token, resident or not, and of an enable; page cache warm, and cold.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from daemon import Daemon, answer_of, wait_for  # noqa: E402

PROMPT = "Once upon a time"


def percentile(values: list[float], percent: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class Clients:
    """Threads that ask until so many requests are done."""

    def __init__(self, daemon: Daemon, count: int, requests: int, tokens: int) -> None:
        self.left = requests
        self.answers: dict[str, int] = {}
        self.faults: list[str] = []
        self.gaps: list[float] = []  # ms, the longest of each answer
        self._daemon, self._tokens = daemon, tokens
        self._lock = threading.Lock()
        self.threads = [threading.Thread(target=self._run) for _ in range(count)]

    def _take(self) -> bool:
        with self._lock:
            self.left -= 1
            return self.left >= 0

    def _run(self) -> None:
        fields = {"prompt": PROMPT, "max_tokens": self._tokens, "temperature": 0.0}
        with self._daemon.client() as client:
            while self._take():
                times: list[float] = []
                try:
                    found = client.call(
                        "generate",
                        {**fields, "ignore_stop_ids": True},
                        lambda event, times=times: times.append(time.monotonic()),
                    )
                except Exception as error:
                    self.faults.append(str(error))
                    continue
                gaps = [b - a for a, b in itertools.pairwise(times[1:])]
                with self._lock:
                    text = found["text"]
                    self.answers[text] = self.answers.get(text, 0) + 1
                    self.gaps.append(max(gaps, default=0.0) * 1e3)


def under_load(paths: list[Path], requests: int, clients: int, tokens: int) -> int:
    """Print a table; 1 where an answer was lost or mixed."""
    wanted = {answer_of(path, PROMPT, tokens) for path in paths}
    tables = {"probation_s": 0.5, "probation_requests": 3, "prefault_mbps": 4000.0}
    with Daemon(models=tables) as daemon:
        daemon.replace(paths[0], name="model")
        quiet = Clients(daemon, clients, requests // 10, tokens)
        for thread in quiet.threads:
            thread.start()
        for thread in quiet.threads:
            thread.join()
        busy = Clients(daemon, clients, requests, tokens)
        for thread in busy.threads:
            thread.start()
        flips: list[float] = []
        while busy.left > 0:
            wait_for(lambda: not daemon.call("model.status", name="model")["on_probation"], 60)
            report = daemon.replace(paths[(len(flips) + 1) % 2], name="model")
            flips.append(report["flip_ms"])
        for thread in busy.threads:
            thread.join()
        failed = daemon.call("stats")["requests"]["failed"]
        rss = daemon.call("daemon.info")["rss_bytes"]
    lost = requests - sum(busy.answers.values())
    mixed = sum(count for text, count in busy.answers.items() if text not in wanted)
    print(f"requests {requests}, clients {clients}, tokens {tokens}, replacements {len(flips)}")
    print(f"lost {lost}, mixed {mixed}, failed {failed}; {busy.faults[:3]}")
    print(f"flip ms: median {statistics.median(flips):.2f}, p99 {percentile(flips, 99):.2f}, "
          f"most {max(flips):.2f}")  # fmt: skip
    for name, run in (("without replacements", quiet), ("with", busy)):
        print(f"longest gap between tokens, {name}: median {statistics.median(run.gaps):.1f} ms, "
              f"p99 {percentile(run.gaps, 99):.1f} ms, most {max(run.gaps):.1f} ms")  # fmt: skip
    print(f"daemon resident: {rss / 1e6:.1f} MB")
    return int(lost > 0 or mixed > 0)


def drop_cache(paths: list[Path]) -> None:
    """Put files out of the page cache."""
    for path in paths:
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_token_ms(daemon: Daemon, method: str, params: dict[str, Any]) -> tuple[float, float]:
    """(the command's time, to the first token of the model that answers then), in ms."""
    began = time.monotonic()
    daemon.call(method, **params)
    done = time.monotonic()
    first: list[float] = []

    def hear(event: dict[str, Any]) -> None:
        if "text" in event and not first:
            first.append(time.monotonic())

    with daemon.client() as client:
        client.call("generate", {"prompt": PROMPT, "max_tokens": 2, "temperature": 0.0}, hear)
    return (done - began) * 1e3, (first[0] - began) * 1e3


def switching(paths: list[Path], repeats: int) -> int:
    """Print medians of switches and enables."""
    names = ["small", "large"]
    with Daemon(models={"prefault_mbps": 4000.0, "warmup_prompt": ""}) as daemon:
        for name, path in zip(names, paths, strict=True):
            daemon.replace(path, name=name)
            wait_for(
                lambda name=name: not daemon.call("model.status", name=name)["on_probation"], 60
            )
        stored = sorted((daemon.folder / "state").rglob("*.gembin"))
        for what in ("resident", "not resident", "not resident, cold"):
            times: dict[str, list[float]] = {name: [] for name in names}
            for number in range(repeats * 2):
                name, other = names[number % 2], names[1 - number % 2]
                if what != "resident":
                    daemon.call("model.switch", name=other)
                    daemon.call("model.unload", name=name)
                    if "cold" in what:
                        drop_cache(stored)
                times[name].append(first_token_ms(daemon, "model.switch", {"name": name})[1])
            for name in names:
                print(f"switch to {name}, {what}: first token after "
                      f"{statistics.median(times[name]):.0f} ms")  # fmt: skip
        for name in names:
            daemon.call("model.switch", name=name)
            took = []
            for _ in range(repeats):
                pid = daemon.call("model.status", name=name)["worker"]["pid"]
                before = resident(pid)
                daemon.call("model.disable", name=name)
                gone = not Path(f"/proc/{pid}").exists()
                found = daemon.call("model.enable", name=name, warmup_prompt="Hi")
                took.append(found["ms"])
            print(f"disable {name}: {before / 1e6:.0f} MB resident, process gone: {gone}; "
                  f"enable with a warm-up prompt: {statistics.median(took):.0f} ms")  # fmt: skip
    return 0


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifacts", type=Path, nargs=2)
    parser.add_argument("--switch", action="store_true")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(subprocess.run(["uname", "-srm"], capture_output=True, text=True).stdout.strip())
    if given.switch:
        return switching(given.artifacts, given.repeats)
    return under_load(given.artifacts, given.requests, given.clients, given.tokens)


if __name__ == "__main__":
    sys.exit(main())
