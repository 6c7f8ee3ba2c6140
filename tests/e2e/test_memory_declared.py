"""Resident memory of the engine's mappings against the artifact's header, after a full context.

Real processes, real page tables: benchmarks/memory.py, as one runs it by hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemrun import GemRunContext
from gemrun.format.reader import read_artifact
from gemrun.memory import TOLERANCE_PER_MAPPING, declared, measure

ROOT = Path(__file__).resolve().parents[2]
PAGE = 4096
CASES = {
    "gemma3-int4-int8": ("gemma3", "--quantization", "int4", "--kv-cache-size", "256"),
    "smollm2-int8-dense": ("smollm2", "--quantization", "int8", "--kv-cache-type", "dense"),
    "qwen3-none-int8": ("qwen3", "--quantization", "none", "--kv-cache-size", "128"),
    "gemma3-pinned": ("gemma3", "--kv-cache-size", "256", "--pin-prompt", "abcdefgh" * 15),
}
Artifact = Callable[[str], Path]


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]) -> Artifact:
    def make(case: str) -> Path:
        family, *options = CASES[case]
        size = () if "--kv-cache-size" in options else ("--kv-cache-size", "256")
        return artifact_cache(tiny_checkpoint(family), *options, *size, "--effort", "fast")

    return make


def benchmark(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks" / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("case", CASES)
def test_full_context_at_1_2_and_8_threads(artifact: Artifact, case: str) -> None:
    done = benchmark("memory.py", artifact(case), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    values: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [value["threads"] for value in values] == [1, 2, 8]
    for value in values:
        assert value["problem"] is None
        most = value["declared"] + TOLERANCE_PER_MAPPING * value["mappings"]
        assert 0.99 * value["declared"] <= value["resident"] <= most
        assert value["mappings"] == 4 + value["threads"] - 1
        # What is mapped equals the declaration; the file's last page is whole in memory.
        assert 0 <= value["declared"] - value["mapped"] < PAGE
        # The kernel's own sum agrees where it counts nothing else.
        assert value["smaps_rss"] in (None, value["resident"])


def test_the_text_names_every_region(artifact: Artifact) -> None:
    done = benchmark("memory.py", artifact("gemma3-int4-int8"), "--threads", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    first = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    for name in ("weights+tables", "arena", "kv", "engine", "stacks", "total", "as"):
        assert name in first, done.stdout


def test_the_declaration_for_the_planned_threads_is_the_headers(artifact: Artifact) -> None:
    path = artifact("gemma3-int4-int8")
    with read_artifact(path) as content:
        header, planned = content.header, content.conf.threads
    assert sum(declared(path, planned).values()) == header.ram_total


def test_nothing_is_left_behind(artifact: Artifact) -> None:
    """A closed context has given every mapping back."""
    path = artifact("gemma3-int4-int8")
    with GemRunContext(path, threads=2) as context:
        regions = context.regions()
        assert measure(context, path).problem is None
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert str(path) not in maps
    assert len({region.address for region in regions}) == len(regions) == 5


def test_a_page_that_is_missing_is_seen(artifact: Artifact) -> None:
    """The kernel takes pages away on request; the measurement must tell."""
    import ctypes

    path = artifact("smollm2-int8-dense")
    libc = ctypes.CDLL(None, use_errno=True)
    with GemRunContext(path, threads=1) as context:
        kv = next(region for region in context.regions() if region.name == "kv")
        size = kv.size // PAGE * PAGE
        assert libc.madvise(ctypes.c_void_p(kv.address), ctypes.c_size_t(size), 4) == 0  # DONTNEED
        found = measure(context, path)
    part = next(part for part in found.parts if part.name == "kv")
    assert part.resident == part.declared - size
    assert found.problem is not None
    assert "below the declaration" in found.problem


def test_open_time_prints_medians(artifact: Artifact) -> None:
    done = benchmark("open_time.py", artifact("smollm2-int8-dense"), "--runs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("open to ready", "open to first token", "first token above prefill"):
        assert name in done.stdout
