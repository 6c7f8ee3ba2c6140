"""Weights that do not stay in memory: speed and peak in a control group, against the prediction.

    python benchmarks/offload.py MODEL.gembin .. [--limit MIB] [--tokens 16] [--runs 3]

Every run is a fresh `gemrun` in a group with that limit, page cache included (--limit 0: what
gemmake calls the limit for a control group), after the artifact was dropped from the page cache.
The prediction is made of the records and of what storage gives here: the artifact read once past
the page cache. It takes rights to make control groups. Tokens are compared with those of a run
without limit.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))

import groups  # noqa: E402
from gemrun import machine  # noqa: E402
from gemrun.format import cold, sizes  # noqa: E402
from gemrun.format.reader import read_artifact  # noqa: E402

MIB = 1 << 20
PIECE = 4 * MIB  # bytes of a read past the page cache
PROMPT = "The controller reports the temperature of the motor every second, because "


@dataclass(frozen=True)
class Facts:
    """What an artifact says."""

    total: int
    weights: int
    held: int
    tables: int
    streamed: int


def facts_of(path: Path) -> Facts:
    """From header and records."""
    with read_artifact(path, verify="fast") as artifact:
        return Facts(
            artifact.header.ram_total,
            artifact.sections["WHOT"].size,
            artifact.sections["WHOT"].mem_size,
            artifact.header.ram_tables,
            cold.streamed(artifact.cold, artifact.tensors),
        )


def storage_rate(path: Path) -> float:
    """Bytes per second of reading the file forwards, past the page cache."""
    size = path.stat().st_size // sizes.PAGE * sizes.PAGE
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    room = mmap.mmap(-1, PIECE)
    try:
        started, at = time.monotonic(), 0
        while at < size:
            got = os.preadv(fd, [memoryview(room)[: min(PIECE, size - at)]], at)
            if got <= 0:
                break
            at += got
        return at / (time.monotonic() - started)
    finally:
        os.close(fd)


def command_of(path: Path, tokens: int, threads: int, ignore: bool) -> list[str]:
    """A greedy run that makes all of its tokens."""
    more = ["--ignore-memory"] if ignore else []
    return [
        *("gemrun", str(path), "--prompt", PROMPT, "--max-tokens", str(tokens)),
        *("--temperature", "0", "--ignore-eos", "--threads", str(threads), "--json", *more),
    ]


def run(command: list[str], group: groups.MemoryGroup | None) -> dict[str, Any]:
    """The figures of a run."""
    enter = group.enter if group else None
    before = reads()
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=enter)
    if done.returncode:
        sys.exit(f"offload: {' '.join(command[:2])}: {done.stderr.strip()}")
    value: dict[str, Any] = json.loads(done.stdout)
    value["read"] = reads() - before
    return value


def reads() -> int:
    """Bytes that all block devices have read since boot."""
    total = 0
    for stat in Path("/sys/block").glob("*/stat"):
        total += 512 * int(stat.read_text(encoding="ascii").split()[2])
    return total


def measure(path: Path, given: argparse.Namespace, threads: int) -> str:
    """A row of the table."""
    facts = facts_of(path)
    limit = given.limit * MIB or sizes.group_limit(facts.total)
    rate = statistics.median(storage_rate(path) for _ in range(given.runs))
    plain = run(command_of(path, given.tokens, threads, True), None)
    speeds, firsts, peaks, read = [], [], [], []
    for _ in range(given.runs):
        groups.drop(path)
        with groups.memory_group(limit) as group:
            if group is None:
                sys.exit("offload: no control group can be made; run it as root")
            value = run(command_of(path, given.tokens, threads, False), group)
            peaks.append(group.peak)
        if value["tokens"] != plain["tokens"]:
            sys.exit(f"offload: {path.name}: other tokens than without limit; report it")
        speeds.append(value["throughput_tps"])
        firsts.append(value["ttft_ms"])
        passes = value["read"] - facts.held - facts.tables  # the prompt is one, too
        read.append(max(0, passes) / given.tokens)
    predicted = min(rate / facts.streamed if facts.streamed else 1e9, plain["throughput_tps"])
    speed = statistics.median(speeds)
    return (
        f"| {path.stem} | {threads} | {limit / 1e6:.0f} | {facts.total / 1e6:.1f} | "
        f"{max(peaks) / 1e6:.1f} | {facts.held / 1e6:.1f} of {facts.weights / 1e6:.1f} | "
        f"{facts.streamed / 1e6:.1f} | {statistics.median(read) / 1e6:.1f} | {rate / 1e6:.0f} | "
        f"{predicted:.2f} | {speed:.2f} | {speed / predicted:.2f} | "
        f"{plain['throughput_tps']:.2f} | {statistics.median(firsts):.0f} |"
    )


HEAD = (
    "| artifact | threads | limit | declared total | peak of the group | weights in memory | "
    "streamed a token | read a token | storage, MB/s | predicted tok/s | measured | ratio | "
    "without limit, cached | first token, ms |"
)


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="weights that do not stay in memory")
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--limit", type=int, default=256, help="MiB of the group (256)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a run (16)")
    parser.add_argument("--runs", type=int, default=3, help="runs of which the median is told (3)")
    parser.add_argument("--threads", default="2", help="thread counts (2)")
    given = parser.parse_args()
    print(f"{machine.cpu_name()}; sizes in MB, medians of {given.runs} runs\n\n{HEAD}")
    print("|" + "---|" * (HEAD.count("|") - 1))
    for path in given.models:
        for threads in map(int, given.threads.split(",")):
            print(measure(path, given, threads), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
