"""kill -9 of the daemon and of its workers at random moments, and what is left after many swaps.

    python benchmarks/kills.py A.gembin B.gembin [--kills 500] [--swaps 1000] [--seed 1]

While replacements, switches, disables and requests go on, something is killed: after each kill the
daemon (started again where it was hit) must answer with one version's text and its state must be
valid. At the end nothing may be left: processes, descriptors, memory, files in the store.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from daemon import Daemon, answer_of, wait_for  # noqa: E402
from gemctl.client import Refused  # noqa: E402
from gemctl.store.state import PREVIOUS, STATE, unpack  # noqa: E402

PROMPT = "abc"
BACK_S = 60.0


def figures(daemon: Daemon) -> tuple[int, int, int]:
    """(descriptors, resident bytes, workers) of the daemon."""
    fds = len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))
    return fds, daemon.call("daemon.info")["rss_bytes"], len(daemon.workers())


class Disturber:
    """Replaces, switches, disables and enables without end; refusals are part of life."""

    def __init__(self, daemon: Daemon, paths: list[Path], seed: int) -> None:
        self._daemon, self._paths, self._rng = daemon, paths, random.Random(seed)
        self._stop = threading.Event()
        self.done = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(Refused, OSError, ValueError):
                self._one()
                self.done += 1
            time.sleep(0.01)

    def _one(self) -> None:
        what = self._rng.randrange(7)
        if what < 3:
            self._daemon.replace(self._rng.choice(self._paths), name="pilot")
        elif what == 3:
            self._daemon.call("model.disable", name="pilot")
            self._daemon.call("model.enable", name="pilot")
        elif what == 4:
            self._daemon.call("model.clear", name="pilot")  # killed thrice on probation
        elif what == 5:
            self._daemon.call("throttle.set", mode=self._rng.choice(["balanced", "silent"]))
        else:
            self._daemon.call("model.unload", name="pilot")
            self._daemon.call("model.switch", name="pilot")

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def serves(daemon: Daemon, wanted: set[str]) -> bool:
    """True where it answers with a version's own text; helps a disabled or faulted model back."""
    try:
        return daemon.ask(PROMPT, model="pilot", deadline_ms=5000)["text"] in wanted
    except (Refused, OSError):
        for method in ("model.clear", "model.enable", "model.load"):
            with contextlib.suppress(Refused, OSError):
                daemon.call(method, name="pilot")
        return False


def check_state(folder: Path) -> None:
    """One of the two files is there, and whichever is there is whole."""
    found = [path for path in (folder / STATE, folder / PREVIOUS) if path.exists()]
    assert found
    for path in found:
        unpack(path.read_bytes())


def explain(daemon: Daemon) -> None:
    """What the daemon says of itself, for the one who looks for the reason."""
    print(daemon.call("model.status", name="pilot"))
    for event in daemon.events()[-40:]:
        print(event)


def killing(paths: list[Path], kills: int, seed: int) -> int:
    """Random kills; 1 where something was not as it must be."""
    rng = random.Random(seed)
    wanted = {answer_of(path, PROMPT) for path in paths}
    hits = {"daemon": 0, "worker": 0}
    back: list[float] = []
    tables = {"probation_s": 0.3, "probation_requests": 2}
    with Daemon(models=tables, worker={"crashes": 100, "backoff_s": 0.02}) as daemon:
        daemon.replace(paths[0], name="pilot")
        wait_for(lambda: not daemon.call("model.status", name="pilot")["on_probation"], BACK_S)
        disturber = Disturber(daemon, paths, seed)
        try:
            for number in range(kills):
                time.sleep(rng.random() * 0.3)
                workers = daemon.workers()
                if workers and rng.random() < 0.5:
                    hits["worker"] += 1
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rng.choice(workers), signal.SIGKILL)
                else:
                    hits["daemon"] += 1
                    daemon.stop(signal.SIGKILL)
                    check_state(daemon.folder / "state")
                    daemon.start()
                began = time.monotonic()
                try:
                    wait_for(lambda: serves(daemon, wanted), BACK_S)
                except AssertionError:
                    explain(daemon)
                    raise
                back.append(time.monotonic() - began)
                if number % 50 == 49:
                    print(f"{number + 1} kills, {disturber.done} changes", flush=True)
        finally:
            disturber.stop()
        wait_for(lambda: serves(daemon, wanted), BACK_S)
        wait_for(lambda: len(daemon.workers()) == 1, BACK_S)
        log = daemon.log.read_text(encoding="utf-8")
    print(f"{kills} kills (seed {seed}): {hits}; back after {sorted(back)[len(back) // 2]:.2f} s, "
          f"at most {max(back):.2f} s; tracebacks {log.count('Traceback')}")  # fmt: skip
    if "Traceback" in log:
        print(log[log.index("Traceback") :][:3000])
    return int("Traceback" in log)


def swapping(paths: list[Path], swaps: int) -> int:
    """Many swaps of one daemon; 1 where something grew."""
    tables = {"probation_s": 0.05, "probation_requests": 1}
    with Daemon(models=tables) as daemon:
        daemon.replace(paths[0], name="pilot")
        first = None
        for number in range(swaps):
            wait_for(lambda: not daemon.call("model.status", name="pilot")["on_probation"], BACK_S)
            if number == swaps // 10:
                first = figures(daemon)
            daemon.replace(paths[(number + 1) % 2], name="pilot")
        wait_for(lambda: not daemon.call("model.status", name="pilot")["on_probation"], BACK_S)
        wait_for(lambda: len(daemon.workers()) == 1, BACK_S)
        last = figures(daemon)
        files = len(list((daemon.folder / "state").rglob("*.gembin")))
        written = daemon.call("daemon.info")["state_bytes_written"]
    print(f"{swaps} swaps: (descriptors, resident, workers) {first} after a tenth, {last} at the "
          f"end; {files} files in the store, {written} bytes of state written")  # fmt: skip
    assert first is not None
    return int(last[0] > first[0] or last[1] > first[1] * 1.1 + 1e6 or files > 2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("artifacts", type=Path, nargs=2)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--swaps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    bad = killing(given.artifacts, given.kills, given.seed) if given.kills else 0
    return bad | (swapping(given.artifacts, given.swaps) if given.swaps else 0)


if __name__ == "__main__":
    sys.exit(main())
