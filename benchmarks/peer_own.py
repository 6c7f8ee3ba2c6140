"""One measurement of our engine in a process of its own; prints one JSON object.

    python benchmarks/peer_own.py MODEL.gembin [--set KEY=VALUE ..] rates|depths [...]

rates   per thread count: prefill of 512 ids in an empty cache, then 128 greedy tokens behind the
        first one (the engine's own figure), each after one run that nobody times
depths  3 times 32 greedy tokens behind so many ids, which a prefill brought into the cache
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemrun import GemRunContext
from gemrun.context import Config

PREFILL, DECODE, SHORT, STEPS, RUNS = 512, 128, 12, 32, 3
CONTEXT = PREFILL + DECODE
Settings = dict[str, Any]  # of a context


def prompt_ids(count: int) -> list[int]:
    """Ids that every engine gets: in every vocabulary of the comparison, none twice in a row."""
    return [5 + i * 7919 % 30011 for i in range(count)]


def config_of(settings: Sequence[str]) -> Settings:
    """Keywords of a context from KEY=VALUE texts. ValueError for one that there is not."""
    config: Settings = {}
    for text in settings:
        key, _, value = text.partition("=")
        if key not in Config.__annotations__:
            raise ValueError(f"--set {text}: no such setting")
        config[key] = int(value) if value.isdigit() else value
    return config


def opened(path: Path, config: Settings, threads: int, size: int) -> GemRunContext:
    """A context with so many threads and tokens of room."""
    settings: Settings = {**config, "threads": threads, "kv_cache_size": size}
    return GemRunContext(path, **settings)


def greedy(context: GemRunContext, steps: int) -> None:
    """So many tokens behind what is in the cache."""
    for _ in range(steps):
        context.decode(context.sample(temperature=0.0))


def _prefill(context: GemRunContext, count: int) -> float:
    """Seconds of one prefill of an empty cache."""
    context.reset_kv_cache()
    start = time.monotonic_ns()
    context.prefill(prompt_ids(count))
    return (time.monotonic_ns() - start) * 1e-9


def rates(path: Path, config: Settings, threads: Sequence[int]) -> dict[str, Any]:
    """Tokens per second by thread count."""
    found: dict[str, Any] = {}
    for count in threads:
        with opened(path, config, count, CONTEXT) as it:
            _prefill(it, PREFILL)
            prefill = PREFILL / _prefill(it, PREFILL)
            it.infer("The", 4, temperature=0.0, ignore_stop_ids=True)
            made = it.infer("The", DECODE + 1, temperature=0.0, ignore_stop_ids=True).stats
            if made.generated_tokens != DECODE + 1:
                raise RuntimeError(f"{made.generated_tokens} tokens instead of {DECODE + 1}")
            found[str(count)] = {"prefill": prefill, "decode": made.decode_tps}
            found["kernel"] = it.info.kernel
    return found


def depths(
    path: Path, config: Settings, threads: int, wanted: Sequence[int], steps: int
) -> dict[str, Any]:
    """Decode speed by tokens in the cache, tokens per second, RUNS times."""
    found: dict[str, Any] = {}
    size = max(wanted) + RUNS * steps + 1
    with opened(path, config, threads, size) as it:
        for depth in wanted:
            it.reset_kv_cache()
            it.prefill(prompt_ids(max(depth, 1)))
            rates_here = []
            for _ in range(RUNS):
                start = time.monotonic_ns()
                greedy(it, steps)
                rates_here.append(steps * 1e9 / (time.monotonic_ns() - start))
            found[str(depth)] = rates_here
    return found


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="one measurement of our engine")
    parser.add_argument("model", type=Path)
    parser.add_argument("what", choices=("rates", "depths"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--depths", default="0,1024,4096,8192")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    try:
        config = config_of(given.set)
    except ValueError as error:
        sys.exit(f"peer_own: {error}")
    threads = [int(text) for text in given.threads.split(",")]
    if given.what == "rates":
        value = rates(given.model, config, threads)
    else:
        wanted = [int(text) for text in given.depths.split(",")]
        value = depths(given.model, config, threads[0], wanted, given.steps)
    print(json.dumps(value))
    return 0


if __name__ == "__main__":
    sys.exit(main())
