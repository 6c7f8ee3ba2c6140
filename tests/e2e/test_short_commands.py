"""Fifty short commands behind a preamble: memory stays, the preamble is not computed again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemrun import GemRunContext
from gemrun.format.reader import read_artifact
from gemrun.format.units import with_units

ROOT = Path(__file__).resolve().parents[2]
COUNT, PREAMBLE, MADE = 50, 280, 4


@pytest.fixture(scope="module")
def commands() -> Any:
    """benchmarks/commands.py."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("commands")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def path(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    tmp_path: Path,
) -> Path:
    """A model without windows, one with windows, and one whose heads keep a part."""
    family, sparse = request.param
    found = artifact_cache(tiny_checkpoint(family), "--kv-cache-size", "512", "--effort", "fast")
    if not sparse:
        return found
    with read_artifact(found) as artifact:
        keeps = [(1, 3)] * sum(layer.kv_heads for layer in artifact.layers)
    return Path(with_units(found, tmp_path / "sparse.gembin", keeps).path)


@pytest.mark.parametrize(
    "path",
    [("llama3", False), ("gemma3", False), ("llama3", True)],
    ids=["dense", "windows", "sparse"],
    indirect=True,
)
def test_memory_is_constant_and_the_preamble_is_kept(path: Path, commands: Any) -> None:
    with GemRunContext(path, threads=2, ignore_memory=True) as context:
        runs = commands.three_ways(context, path, PREAMBLE, COUNT, MADE)
        held = len(context.tokenize(commands.preamble(context, PREAMBLE), bos=True))
    assert commands.wrong(runs) == []
    for run in runs.values():
        assert len(run.answers) == COUNT
        assert len({answer.resident for answer in run.answers}) == 1
    assert runs["empty cache"].hit_rate == 0
    for answer in runs["kept in a session"].answers:
        assert held - 2 <= answer.reused < answer.prompt
    reused = [answer.reused for answer in runs["reuse"].answers]
    assert reused[0] == 0
    if path.name != "sparse.gembin" and "gemma3" not in str(path):
        assert min(reused[1:]) >= held - 2
