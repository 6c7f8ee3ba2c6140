"""Declared against resident memory of an artifact, after a run that fills its whole context.

    python benchmarks/memory.py MODEL.gembin [--threads 1,2,8]

Every thread count gets a fresh process. The engine's own mappings must hold at most what the
header declares plus 64 KiB a mapping, and, where no weights pass through, at least 99 % of it. Exit
1 if they do not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gemrun import GemRunContext, machine, memory

TEXT = "The controller reports the temperature of the motor every second, because "
GENERATED = 32  # the last tokens are generated, those before them are prefilled


def fill(context: GemRunContext) -> None:
    """Run until the context is full."""
    size = context.stats().kv_size
    ids = context.tokenize(TEXT, bos=True)
    prompt = max(size - GENERATED, 1)
    context.prefill([ids[i % len(ids)] for i in range(prompt)])
    for _ in range(size - prompt):
        context.decode(context.sample())
    used = context.stats().kv_used
    if used != size:
        raise RuntimeError(f"{used} of {size} tokens are in the cache")


def child(path: Path, threads: int) -> dict[str, Any]:
    """Measure in this process."""
    with GemRunContext(path) as context:
        size = context.info.context
    with GemRunContext(path, threads=threads, kv_cache_size=size) as context:
        opened = memory.measure(context, path)
        fill(context)
        full = memory.measure(context, path)
        mapped = sum(region.size for region in context.regions())
    return {
        **asdict(full),
        "declared": full.declared,
        "resident": full.resident,
        "resident_at_open": opened.resident,
        "mapped": mapped,
        "mappings": full.mappings,
        "problem": full.problem,
        "context": size,
    }


def measure(path: Path, threads: int) -> dict[str, Any]:
    """Measure in a fresh process."""
    command = [sys.executable, __file__, str(path), "--child", str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"memory: {path}: the run with {threads} threads failed; see above")
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def table(value: dict[str, Any]) -> list[str]:
    """Lines of one measurement, sizes in bytes."""
    rows = [(p["name"], p["mappings"], p["declared"], p["resident"]) for p in value["parts"]]
    rows.append(("total", value["mappings"], value["declared"], value["resident"]))
    lines = [f"{value['threads']} threads, {value['context']} tokens in the cache"]
    lines.append(f"  {'':16}{'mappings':>9}{'declared':>14}{'resident':>14}{'difference':>12}")
    for name, mappings, declared, resident in rows:
        difference = resident - declared
        lines.append(f"  {name:16}{mappings:>9}{declared:>14}{resident:>14}{difference:>+12}")
    rss = value["smaps_rss"]
    lines.append(f"  smaps, same mappings: {'joined with others' if rss is None else rss}")
    lines.append(f"  resident when opened: {value['resident_at_open']}")
    lines.append(f"  not the engine's, in this process: {value['process_rss'] - value['resident']}")
    lines.append(f"  {'WRONG: ' + value['problem'] if value['problem'] else 'as declared'}")
    return lines


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="declared against resident memory")
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", default="1,2,8", help="thread counts (1,2,8)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(child(arguments.model, arguments.child)))
        return 0
    if not arguments.json:
        print(f"{arguments.model.name} on {machine.cpu_name()}, sizes in bytes")
    wrong = False
    for threads in map(int, arguments.threads.split(",")):
        value = measure(arguments.model, threads)
        print(json.dumps(value) if arguments.json else "\n".join(table(value)), flush=True)
        wrong = wrong or value["problem"] is not None
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
