"""What to do with a slow core: share work by turns, halves, or leave it out. Simulated.

    python benchmarks/slow_core.py MODEL.gembin [--repeats 5]

The last core is slowed down by slow_core.c to 1, 3/4, 1/2 and 1/4 of its speed. Prints tokens per
second of decode (64 tokens behind a word) and of prefill (256 tokens), medians of alternating
repeats: fixed shares (balance=1), half of the work in pieces by turns (balance=2), and the fast
cores alone. Needs two cores and the right to set a real-time priority.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peer_own

from gemrun import GemRunContext, machine

HERE = Path(__file__).resolve().parent
SHARES = {"1": (0, 0), "3/4": (25, 75), "1/2": (50, 50), "1/4": (75, 25)}  # busy, idle, in us
PROMPT, STEPS = 256, 64


@contextlib.contextmanager
def slowed(tool: Path, core: int, busy: int, idle: int) -> Iterator[None]:
    """The core is slower meanwhile."""
    if busy == 0:
        yield
        return
    process = subprocess.Popen([tool, str(core), str(busy), str(idle)])
    try:
        time.sleep(0.2)
        if process.poll() is not None:
            sys.exit("slow_core: slow_core.c: it ended; run it with the right to set priorities")
        yield
    finally:
        process.kill()
        process.wait()


def rates(context: GemRunContext) -> tuple[float, float]:
    """Prefill and decode, tokens per second."""
    context.reset_kv_cache()
    start = time.perf_counter()
    context.prefill(peer_own.prompt_ids(PROMPT))
    filled = time.perf_counter()
    context.reset_kv_cache()
    context.prefill(peer_own.prompt_ids(1))
    begun = time.perf_counter()
    for token in peer_own.prompt_ids(STEPS):
        context.decode(token)
    return PROMPT / (filled - start), STEPS / (time.perf_counter() - begun)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("slow_core: this process may use one core only; allow it two or more")
    mask = sum(1 << core for core in cores)
    modes: dict[str, dict[str, Any]] = {
        "fixed shares": {"threads": len(cores), "thread_affinity": mask, "balance": 1},
        "by turns": {"threads": len(cores), "thread_affinity": mask, "balance": 2},
        "left out": {"threads": len(cores) - 1, "thread_affinity": mask ^ 1 << cores[-1]},
    }
    print(f"{machine.cpu_name()}, {len(cores)} cores; {Path(given.model).name}")
    print("| speed of the last core | " + " | ".join(f"{m}: prefill, decode" for m in modes) + " |")
    print("| --- " * (len(modes) + 1) + "|")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        tool = Path(folder) / "slow_core"
        subprocess.run(["cc", "-O2", HERE / "slow_core.c", "-o", tool], check=True)
        contexts = {
            m: stack.enter_context(GemRunContext(given.model, **s)) for m, s in modes.items()
        }
        for name, (busy, idle) in SHARES.items():
            with slowed(tool, cores[-1], busy, idle):
                found: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
                for _ in range(given.repeats):
                    for mode, context in contexts.items():
                        found[mode].append(rates(context))
            cells = [
                ", ".join(f"{statistics.median(column):.0f}" for column in zip(*pairs, strict=True))
                for pairs in found.values()
            ]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
