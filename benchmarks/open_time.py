"""Time to open an artifact whose file is in the page cache, and from there to the first token.

    python benchmarks/open_time.py MODEL.gembin [--runs 9] [--prompt TEXT] [--threads N]

Every run is a fresh process; one before them warms the page cache. Times are of the monotonic
clock inside the process, so that starting Python and importing the module do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gemrun import GemRunContext, machine

FIGURES = {
    "open": "open to ready",
    "first": "open to first token",
    "ttft": "call to first token",
    "prefill": "of which prefill",
}


def child(path: Path, prompt: str, threads: int | None) -> dict[str, Any]:
    """One run in this process, times in ms."""
    before = time.monotonic_ns()
    context = GemRunContext(path, **({"threads": threads} if threads else {}))
    ready = time.monotonic_ns()
    stats = context.infer(prompt, max_tokens=1, temperature=0.0, ignore_stop_ids=True).stats
    done = time.monotonic_ns()
    context.close()
    return {
        "open": (ready - before) * 1e-6,
        "first": (done - before) * 1e-6,
        "ttft": stats.ttft_ms,
        "prefill": stats.prompt_tokens / stats.prefill_tps * 1e3,
        "tokens": stats.prompt_tokens,
        "threads": stats.threads,
    }


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="open to ready, and to the first token")
    parser.add_argument("model", type=Path)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--prompt", default="What is the capital of France?")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments.model, arguments.prompt, arguments.threads)))
        return 0
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    runs = []
    for _ in range(arguments.runs + 1):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"open_time: {arguments.model}: a run failed; see above")
        runs.append(json.loads(done.stdout))
    last, runs = runs[-1], runs[1:]
    size, tokens = arguments.model.stat().st_size / 1e6, last["tokens"]
    print(
        f"{arguments.model.name} ({size:.1f} MB) on {machine.cpu_name()}, {last['threads']} threads"
    )
    print(f"prompt of {tokens} tokens, {len(runs)} runs, ms")
    for key, name in FIGURES.items():
        values = [run[key] for run in runs]
        middle = statistics.median(values)
        print(f"  {name:22} median {middle:9.2f}  min {min(values):9.2f}  max {max(values):9.2f}")
    share = statistics.median(run["ttft"] / run["prefill"] - 1 for run in runs)
    print(f"  first token above prefill: {100 * share:.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
