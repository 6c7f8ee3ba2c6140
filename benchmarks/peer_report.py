"""What the side-by-side benchmark knows of its tools' output, and the text made of the figures.

Nothing here runs or measures anything. A record is plain JSON, so that it can be kept and rendered
again:

    {"machine": {...}, "asked": [line, ..], "notes": [line, ..], "models": {name: {
        "title": text, "engines": {engine: {"bytes": n, "label": text}},
        "samples": {engine: {figure: [value, ..]}}, "depths": {engine: {depth: [value, ..]}}}}}

Figures: "decode 1" and "prefill 2" (tokens/s at a thread count), "read 1" (GB/s over that engine's
bytes), "open", "first" (ms), "peak" (KiB).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Samples = Mapping[str, Sequence[float]]
Record = Mapping[str, Any]
NONE = "-"
TIMES = {"open": "open, ms", "first": "open to first token of a prompt of 12, ms"}


# ---- parsing ----
def parse_bench(text: str) -> list[tuple[str, int, list[float]]]:
    """(what, depth, tokens per second of each run) of llama-bench's JSON; `what` is a figure."""
    found = []
    for row in json.loads(text):
        kind = "prefill" if int(row["n_prompt"]) else "decode"
        rates = [float(rate) for rate in row.get("samples_ts") or [row["avg_ts"]]]
        found.append((f"{kind} {_threads(row['n_threads'])}", int(row.get("n_depth", 0)), rates))
    return found


def _threads(value: Any) -> int:
    """The thread count; ik_llama.cpp may give one for decode and one for prefill."""
    return int(value[0] if isinstance(value, list) else str(value).split(",")[0])


def parse_stream(text: str) -> float:
    """GB/s of the better of the two loops."""
    row = json.loads(text)
    return max(float(row["plain"]), float(row["prefetch"]))


def last_json(text: str) -> Any:
    """The JSON value in the last line: libraries may print lines of their own before it."""
    return json.loads(text.strip().splitlines()[-1])


# ---- figures ----
def median(samples: Samples, figure: str) -> float | None:
    """The median of a figure; None without samples."""
    values = samples.get(figure)
    return statistics.median(values) if values else None


def spread(samples: Samples, figure: str) -> float | None:
    """Half the range over the median: how far single repeats lie from it."""
    values, middle = samples.get(figure), median(samples, figure)
    if not values or not middle:
        return None
    return (max(values) - min(values)) / 2 / middle


def share(samples: Samples, size: int, threads: int) -> float | None:
    """Bytes per second of decoding over the read bandwidth at that size."""
    rate, read = median(samples, f"decode {threads}"), median(samples, f"read {threads}")
    return rate * size * 1e-9 / read if rate and read else None


def number(value: float | None) -> str:
    """Three digits or all of a larger number; a dash for none."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ratio(mine: float | None, other: float | None) -> str:
    """mine / other with two digits behind the point."""
    return NONE if not mine or not other else f"{mine / other:.2f}"


def percent(value: float | None) -> str:
    """A share in percent."""
    return NONE if value is None else f"{100 * value:.0f} %"


# ---- text ----
def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def render(record: Record) -> str:
    """The whole text of RESULTS-peers.md."""
    machine = record["machine"]
    lines = ["# Side by side with other engines", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += [f"- {note}" for note in record.get("notes", ())]
    lines += ["", "What each tool was asked:", "", *(f"- {line}" for line in record["asked"])]
    for model in record["models"].values():
        lines += ["", f"## {model['title']}", "", *_figures(model)]
        if not all(engine["own"] for engine in model["engines"].values()):
            lines += ["", *_ratios(model)]
        if model.get("depths"):
            lines += ["", *_depths(model["depths"])]
    return "\n".join(lines) + "\n"


def thread_counts(model: Record) -> list[int]:
    """Thread counts that were measured, ascending."""
    figures = {figure for samples in model["samples"].values() for figure in samples}
    return sorted({int(f.split()[1]) for f in figures if f.startswith("decode ")})


def _threads_text(count: int) -> str:
    return f"{count} thread" + ("s" if count > 1 else "")


def _figures(model: Record) -> list[str]:
    engines, samples = model["engines"], model["samples"]
    rows = [["weights a token touches, MB"]]
    rows[0] += [number(engine["bytes"] / 1e6) for engine in engines.values()]
    rows.append(["kernel", *(engine.get("kernel", NONE) for engine in engines.values())])
    for count in thread_counts(model):
        where = _threads_text(count)
        for title, figure in (
            (f"reading that many bytes, {where}, GB/s", f"read {count}"),
            (f"decode of 128, {where}, tokens/s", f"decode {count}"),
        ):
            rows.append([title, *(_with_spread(samples.get(name, {}), figure) for name in engines)])
        shares = (share(samples.get(n, {}), e["bytes"], count) for n, e in engines.items())
        rows.append([f"of the read bandwidth, {where}", *map(percent, shares)])
    for count in thread_counts(model):
        title, figure = f"prefill of 512, {_threads_text(count)}, tokens/s", f"prefill {count}"
        rows.append([title, *(_with_spread(samples.get(name, {}), figure) for name in engines)])
    for figure, title in TIMES.items():
        rows.append([title, *(number(median(samples.get(n, {}), figure)) for n in engines)])
    peaks = (median(samples.get(name, {}), "peak") for name in engines)
    rows.append(["peak memory, MiB", *(number(p / 1024 if p else None) for p in peaks)])
    return table(["", *(engine["label"] for engine in engines.values())], rows)


def _with_spread(samples: Samples, figure: str) -> str:
    value, around = median(samples, figure), spread(samples, figure)
    if value is None:
        return NONE
    several = len(samples[figure]) > 1 and around is not None
    return number(value) + (f" ± {percent(around)}" if several else "")


def _ratios(model: Record) -> list[str]:
    """Every engine of ours over every peer; below 1 is better for times and memory."""
    engines, samples = model["engines"], model["samples"]
    own = [name for name, engine in engines.items() if engine["own"]]
    peers = [name for name in engines if name not in own]
    counts = thread_counts(model)
    figures = [f"{kind} {count}" for kind in ("decode", "prefill") for count in counts]
    rows = []
    for mine in own:
        for other in peers:
            values = [
                ratio(median(samples.get(mine, {}), f), median(samples.get(other, {}), f))
                for f in (*figures, *TIMES, "peak")
            ]
            rows.append([f"{engines[mine]['label']} / {engines[other]['label']}", *values])
    titles = [f"{f.split()[0]}, {_threads_text(int(f.split()[1]))}" for f in figures]
    return table(["ratio", *titles, "open", "first token", "peak memory"], rows)


def _depths(depths: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    wanted = sorted({int(depth) for values in depths.values() for depth in values})
    rows = []
    for engine, values in depths.items():
        rates = {int(depth): statistics.median(found) for depth, found in values.items()}
        base = rates.get(0)
        cells = [
            f"{number(rates[d])} ({percent(rates[d] / base if base else None)})"
            if d in rates
            else NONE
            for d in wanted
        ]
        rows.append([engine, *cells])
    head = ["decode behind so many tokens, tokens/s", *(f"{depth:,}" for depth in wanted)]
    return table(head, rows)
