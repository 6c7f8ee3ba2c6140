"""The table of KV caches and the short commands: what they compute, without a run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemmake.kvmask.quality import Quality, holds
from gemmake.options import KvGate

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def modules() -> Any:
    """benchmarks/kv_table.py and benchmarks/commands.py."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("kv_table"), importlib.import_module("commands")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("seed", range(20))
def test_the_tightest_gate_lets_it_through_and_no_tighter_one(modules: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    answers = int(rng.integers(1, 500))
    dense = int(rng.integers(0, answers + 1))
    right = int(rng.integers(0, dense + 1))
    kl, top1, rise = rng.random() * 0.1, rng.random(), rng.random() * 0.02 - 0.005
    found = Quality(kl, top1, rise, 1000, answers, right, dense)
    text = modules[0].tightest(found)
    gate = modules[0].gate_of(text)
    assert holds(gate, found)
    steps = {"kl": 1e-4, "top1": -1e-3, "perplexity": 1e-4, "recall": 1e-3}
    for name, step in steps.items():
        tighter = {**gate.__dict__, name: getattr(gate, name) - 1.001 * step}
        if name in ("kl", "top1") or getattr(gate, name) > 0:
            assert not holds(KvGate(**tighter), found), name


def test_gates_are_those_of_the_command(modules: Any) -> None:
    assert modules[0].gate_of("default") == KvGate()
    assert modules[0].gate_of("top1=0.95,kl=0.01") == KvGate(top1=0.95, kl=0.01)
    with pytest.raises(SystemExit, match="is no gate; use default, or kl="):
        modules[0].gate_of("speed=3")


def test_quality_from_sums(modules: Any) -> None:
    sums = np.array([2.0, 95.0, 200.0, 200.0 + 100 * np.log(1.01), 18.0, 20.0])
    found = modules[0].quality(sums, 100, 30)
    assert found == Quality(0.02, 0.95, pytest.approx(0.01), 100, 30, 18, 20)


def test_commands_are_all_different(modules: Any) -> None:
    found = modules[1].commands(50)
    assert len(set(found)) == 50


def test_what_must_not_be_is_named(modules: Any) -> None:
    _, commands = modules
    good = commands.Run((commands.Answer(9.0, 30, 0, (1, 2), 4096),) * 2, 0.1)
    other = commands.Run((commands.Answer(9.0, 30, 20, (1, 3), 4096),) * 2, 0.1)
    grown = commands.Run(
        tuple(commands.Answer(9.0, 30, 20, (1, 2), size) for size in (4096, 8192)), 0.1
    )
    runs = {"empty cache": good, "reuse": other, "kept in a session": grown}
    assert commands.wrong({"empty cache": good}) == []
    assert commands.wrong(runs) == ["reuse: other answers", "kept in a session: +4096 bytes"]
    assert grown.hit_rate == pytest.approx(2 / 3)
