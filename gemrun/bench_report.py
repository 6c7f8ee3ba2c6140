"""What gembench shows: lines while it runs, the figures at the end, or one JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from gemrun.bench import Depth, Iteration, Report, percentile, summary
from gemrun.context import Info, Stats
from gemrun.memory import Footprint
from gemrun.progress import Progress

HUGE = 2 << 20  # bytes of a huge page: a smaller file has none


class Lines:
    """A listener that prints what happens; without `out` it only shows progress."""

    def __init__(self, out: Callable[[str], None] | None, progress: Progress) -> None:
        self._out = out
        self._progress = progress

    def _say(self, line: str) -> None:
        self._progress.clear()
        if self._out is not None:
            self._out(line)

    def opened(self, cpu: str, info: Info, stats: Stats) -> None:
        """Machine, model, and the whole memory plan."""
        self._say(f"machine: {cpu}; kernel {info.kernel}, {stats.threads} threads")
        self._say(
            f"model: {info.name} ({info.family}) for {info.target}; context {stats.kv_size} of "
            f"{info.context} tokens, KV {info.kv_type}"
        )
        self._say(
            f"memory plan: {_mb(stats.ram_total)}: weights {_mb(stats.ram_weights)}, tables "
            f"{_mb(stats.ram_tables)}, KV {_mb(stats.ram_kv)}, arena {_mb(stats.ram_arena)}, "
            f"engine {_mb(stats.ram_engine)}, stacks {_mb(stats.ram_stacks)}"
        )

    def warmed_up(self, count: int) -> None:
        """The warm-up is over."""
        self._say(f"Warmup completed ({count} iterations)")

    def starting(self, count: int) -> None:
        """The iterations begin."""
        self._say(f"Running {count} iterations...")

    def iteration(self, number: int, result: Iteration) -> None:
        """One line of an iteration."""
        self._say(
            f"Iteration {number}: TTFT={result.ttft_ms:.0f}ms, "
            f"Throughput={result.throughput_tps:.1f} tps"
        )

    def progress(self, phase: str, done: int, total: int) -> None:
        """Show the time left."""
        self._progress.update(phase, done, total)

    def report(self, report: Report) -> None:
        """The figures behind the iterations."""
        for line in render(report):
            self._say(line)


def render(report: Report) -> list[str]:
    """The figures of a report, a line each."""
    ttft, ttft_spread = summary(report, lambda i: i.ttft_ms)
    speed, speed_spread = summary(report, lambda i: i.throughput_tps)
    prefill, prefill_spread = summary(report, lambda i: i.prefill_tps)
    last, steps = report.iterations[-1], report.steps_ms
    return [
        f"Average TTFT: {ttft:.1f}ms ± {ttft_spread:.1f}ms",
        f"Average Throughput: {speed:.1f} tps ± {speed_spread:.1f} tps",
        f"prefill: {last.prompt_tokens} tokens, {prefill:.1f} tps ± {prefill_spread:.1f} tps",
        f"decode: {last.generated_tokens} tokens, per token median {percentile(steps, 0.5):.2f} ms,"
        f" p99 {percentile(steps, 0.99):.2f} ms, max {max(steps):.2f} ms ({len(steps)} measured)",
        *_head_lines(report.stats),
        *_draft_lines(report.stats),
        *(_depth_line(depth) for depth in report.depths),
        f"open: {report.open_ms:.1f} ms",
        *_memory_lines(report.footprint),
        _power_line(report),
    ]


def _head_lines(stats: Stats) -> list[str]:
    if stats.head_candidates_max == 0:
        return []
    return [
        f"head: two planes, {stats.head_candidates:.1f} candidates a token, at most "
        f"{stats.head_candidates_max:.0f}"
    ]


def _draft_lines(stats: Stats) -> list[str]:
    if stats.drafted == 0:
        return []
    return [
        f"speculation: {stats.accepted} of {stats.drafted} guessed tokens were right in the last "
        "iteration"
    ]


def _depth_line(depth: Depth) -> str:
    if depth.decode_tps is None:
        return f"depth {depth.depth}: not measured; {depth.note}"
    fill = f", filled at {depth.fill_tps:.1f} tps" if depth.fill_tps is not None else ""
    return f"depth {depth.depth}: {depth.decode_tps:.1f} tps{fill}"


def _memory_lines(footprint: Footprint | None) -> list[str]:
    if footprint is None:
        return ["memory: not measured (the system tells no resident pages)"]
    share = 100 * footprint.resident / footprint.declared
    lines = [
        f"memory: {_mb(footprint.resident)} resident of {_mb(footprint.declared)} declared for "
        f"{footprint.threads} threads ({share:.2f} %, {footprint.resident - footprint.declared:+d} "
        f"bytes, {footprint.mappings} mappings)",
        *(
            f"  {part.name}: {_mb(part.resident)} of {_mb(part.declared)}"
            for part in footprint.parts
        ),
        f"  in huge pages: {_mb(footprint.huge)}{_small_pages(footprint)}",
        f"  not the engine's, in this process: {_mb(footprint.process_rss - footprint.resident)}",
    ]
    return lines + ([f"memory: WARNING: {footprint.problem}"] if footprint.problem else [])


def _small_pages(footprint: Footprint) -> str:
    weights = next((p.declared for p in footprint.parts if p.name == "weights+tables"), 0)
    if weights < HUGE or footprint.huge >= weights / 2:
        return ""
    return " (decode is faster from huge pages: see gemrun/README.md)"


def _power_line(report: Report) -> str:
    energy = report.energy
    if energy is None:
        return f"power: not measured ({report.power_reason})"
    return (
        f"power: {energy.joules / energy.seconds:.2f} W, {energy.joules / energy.tokens:.3f} J a "
        f"token (RAPL, whole packages, prompts included)"
    )


def as_json(report: Report) -> str:
    """The same as one JSON object; it begins as `gemctl stats --json` does."""
    ttft, ttft_spread = summary(report, lambda i: i.ttft_ms)
    speed, speed_spread = summary(report, lambda i: i.throughput_tps)
    prefill, prefill_spread = summary(report, lambda i: i.prefill_tps)
    last, steps = report.iterations[-1], report.steps_ms
    value: dict[str, Any] = {
        "ttft_ms": ttft,
        "throughput_tps": speed,
        "kv_cache_used": last.prompt_tokens + last.generated_tokens - 1,
        "kv_cache_size": report.stats.kv_size,
        "ttft_ms_deviation": ttft_spread,
        "throughput_tps_deviation": speed_spread,
        "prefill_tps": prefill,
        "prefill_tps_deviation": prefill_spread,
        "decode_ms_median": percentile(steps, 0.5),
        "decode_ms_p99": percentile(steps, 0.99),
        "decode_ms_max": max(steps),
        "open_ms": report.open_ms,
        "head_candidates": report.stats.head_candidates,
        "head_candidates_max": report.stats.head_candidates_max,
        "drafted": report.stats.drafted,
        "accepted": report.stats.accepted,
        "iterations": [asdict(item) for item in report.iterations],
        "depths": [asdict(depth) for depth in report.depths],
        "memory": _memory_json(report.footprint),
        "energy": None if report.energy is None else asdict(report.energy),
        "energy_reason": report.power_reason,
        "text": report.text,
        "cpu": report.cpu,
        "cores": report.cores,
        "threads": report.stats.threads,
        "model": asdict(report.info),
    }
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _memory_json(footprint: Footprint | None) -> dict[str, Any] | None:
    if footprint is None:
        return None
    return {
        "declared": footprint.declared,
        "resident": footprint.resident,
        "problem": footprint.problem,
        **asdict(footprint),
    }


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
