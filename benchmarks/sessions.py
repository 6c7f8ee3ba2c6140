"""Save, restore and fork of a session against computing its tokens again.

    python benchmarks/sessions.py X.gembin [--tokens 1000] [--runs 9] [--threads N] [--folder DIR]

One process, page cache warm; every round does all of it once, each round beginning with another
one, so that what else runs falls on all alike. Times are of the monotonic clock around a call,
`save` with its two fsyncs to DIR (the system's folder for temporary files). Every figure stands
beside its share of the prefill of the same round; quote those. The logits behind each way are
compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gemrun import GemRunContext, machine

TEXT = "The controller reports the temperature of the motor every second, because "


def timed(call: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    before = time.monotonic_ns()
    call()
    return (time.monotonic_ns() - before) * 1e-6


def measure(
    model: Path, threads: int | None, tokens: int, runs: int, folder: Path
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Times in ms by what was done, and sizes in bytes."""
    config = {"threads": threads} if threads else {}
    file, empty = folder / "full.session", folder / "empty.session"
    with GemRunContext(model, **config) as ctx, ctx.session() as other:
        ids = ctx.tokenize(TEXT, bos=True)
        prompt = [ids[i % len(ids)] for i in range(tokens)]
        ctx.save(empty)
        ctx.prefill(prompt)
        wanted = ctx.logits()

        def prefill() -> None:
            other.prefill(prompt)

        def restore() -> None:
            other.restore(file)

        ways = {
            "prefill": prefill,
            "save": lambda: ctx.save(file),
            "restore": restore,
            "fork": lambda: other.fork_from(ctx),
            "session()": lambda: ctx.session().close(),
        }
        ctx.save(file)
        times: dict[str, list[float]] = {name: [] for name in ways}
        order = list(ways)
        for _ in range(runs + 1):  # the first one warms up
            for name in order:
                other.reset_kv_cache()
                times[name].append(timed(ways[name]))
                if name in ("prefill", "restore", "fork") and other.logits() != wanted:
                    sys.exit(f"sessions: {model}: {name} gave other logits")
            order = [*order[1:], order[0]]
        sizes = {
            "file": file.stat().st_size,
            "empty": empty.stat().st_size,
            "session": ctx.session_memory(),
            "weights": ctx.stats().ram_weights,
        }
    return {name: values[1:] for name, values in times.items()}, sizes


def report(times: dict[str, list[float]], sizes: dict[str, int], tokens: int) -> list[str]:
    """Lines: medians with half their range, and shares of the prefill of the same round."""
    lines = [f"  {'':10}{'ms':>10}{'+-':>8}   share of prefill"]
    for name, values in times.items():
        shares = [a / b for a, b in zip(values, times["prefill"], strict=True)]
        middle, half = statistics.median(values), (max(values) - min(values)) / 2
        share = statistics.median(shares)
        lines.append(
            f"  {name:10}{middle:10.2f}{half:8.2f}   {share:8.4f} ({min(shares):.4f} to "
            f"{max(shares):.4f})"
        )
    lines.append(
        f"  file {sizes['file']} bytes, {(sizes['file'] - sizes['empty']) / tokens:.0f} a token; "
        f"a session {sizes['session']} bytes beside {sizes['weights']} of weights"
    )
    return lines


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="save, restore, fork against prefill")
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--folder", type=Path, help="where sessions are saved")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        times, sizes = measure(
            arguments.model, arguments.threads, arguments.tokens, arguments.runs, Path(folder)
        )
    print(
        f"{arguments.model.name} on {machine.cpu_name()}, {arguments.tokens} tokens, rounds:",
        end="",
    )
    print(f" {arguments.runs}")
    print("\n".join(report(times, sizes, arguments.tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
