"""gemmake --kv-values int4, as a user types it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemrun import GemRunContext
from gemrun.format import sizes
from gemrun.format.reader import read_artifact
from gemrun.format.units import keeps_of, value4_of

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 512
BASE = ("--kv-cache-size", str(CONTEXT), "--effort", "fast")
#: Ten of a hundred windows.
OPTIONS = (*BASE, "--kv-values", "int4", "--prefill-sample-ratio", "0.01")
#: Gates that a model of random weights passes in part, and with all heads.
PART, ALL = "kl=0.0003,top1=0.9,perplexity=1", "kl=10,top1=0,perplexity=10"
NONE = "kl=0,top1=1,perplexity=0"


def gemmake(model: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gemmake.cli", "--model", str(model), *options]
    command += ["--target", "generic-x86-64", "--output", str(output), "--verbose"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def gemcheck(path: Path, *options: str) -> str:
    command = [sys.executable, "-m", "gemmake.check.cli", str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def values_of(path: Path) -> dict[str, Any]:
    with read_artifact(path) as artifact:
        values: dict[str, Any] = artifact.manifest["kv_values"]
        return values


Compiled = Callable[..., Path]


def test_all_heads_save_half_of_all_values(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Compiled
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), *OPTIONS, "--kv-gate", ALL)
    plain = artifact_cache(tiny_checkpoint("llama3"), *BASE)
    values = values_of(path)
    assert values["value4"] == values["units"]
    assert values["wide"] == []
    with read_artifact(path) as artifact, read_artifact(plain) as before:
        assert all(value4_of(artifact))
        halves = sum(
            layer.kv_heads * layer.kv_blocks * 32 * layer.head_dim // 2 for layer in artifact.layers
        )
        rings = [sum(la.kv_size for la in a.layers) for a in (before, artifact)]
        assert rings[0] - rings[1] == halves
        assert halves / rings[0] == pytest.approx(values["saved"], abs=1e-5)
    with GemRunContext(path, ignore_memory=True) as context:
        assert context.run_tests() > 0


def test_what_passes_the_gates_is_what_is_written(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Compiled
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), *OPTIONS, "--kv-gate", PART)
    values = values_of(path)
    assert 0 < values["value4"] < values["units"]
    assert len(values["wide"]) == values["units"] - values["value4"]
    assert values["quality"]["kl"] <= 0.0003
    assert values["quality"]["top1"] >= 0.9
    assert values["quality"]["tokens"] > 1000
    counts = [point[0] for point in values["curve"]]
    assert counts == sorted(set(counts))
    with read_artifact(path) as artifact:
        at = 0
        for index, layer in enumerate(artifact.layers):
            for head in range(layer.kv_heads):
                assert artifact.units[at].value4 == ([index, head] not in values["wide"])
                at += 1
        assert sum(value4_of(artifact)) == values["value4"]
        # The heads that lose least are those that hold 4 bits.
        changed = [share for row in values["changed"] for share in row]
        narrow = [c for c, v in zip(changed, value4_of(artifact), strict=True) if v]
        wide = [c for c, v in zip(changed, value4_of(artifact), strict=True) if not v]
        assert max(narrow) <= min(wide)
    log = path.with_suffix(".log").read_text(encoding="utf-8")
    assert f"values of 4 bits in {values['value4']} of {values['units']} KV heads" in log
    assert "values that keep 8 bits: layer " in log
    text = gemcheck(path)
    assert f"values of {values['value4']} have 4 bits" in text
    assert "v4" in gemcheck(path, "--verbose")


def test_gates_that_nothing_passes_leave_the_ordinary_cache(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Compiled
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), *OPTIONS, "--kv-gate", NONE)
    plain = artifact_cache(tiny_checkpoint("llama3"), *BASE)
    assert "no head passes the gates; all values keep 8 bits" in path.with_suffix(".log").read_text(
        encoding="utf-8"
    )
    assert values_of(path)["value4"] == 0
    with read_artifact(path) as artifact, read_artifact(plain) as before:
        assert not artifact.units
        assert artifact.header.required_features == before.header.required_features
        assert bytes(artifact.section("LAYR")) == bytes(before.section("LAYR"))
        assert bytes(artifact.section("TEST")) == bytes(before.section("TEST"))


def test_beside_a_sparse_cache(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Compiled
) -> None:
    sparse = ("--kv-cache-type", "dynamic-sparse", "--kv-gate", "kl=0.02,top1=0.5")
    path = artifact_cache(tiny_checkpoint("llama3"), *OPTIONS, *sparse)
    alone = (*BASE, "--prefill-sample-ratio", "0.01", *sparse)
    with read_artifact(path) as artifact:
        with read_artifact(artifact_cache(tiny_checkpoint("llama3"), *alone)) as other:
            assert keeps_of(artifact) == keeps_of(other)
        values = artifact.manifest["kv_values"]
        assert sum(value4_of(artifact)) == values["value4"]
        assert values["value4"] == 0 or values["quality"]["kl"] <= 0.02
        total = sum(
            unit.blocks * sizes.unit_block_size(artifact.conf.kv_type, layer, unit)
            for index, layer in enumerate(artifact.layers)
            for unit in artifact.units_of(index)
        )
        assert total == sum(layer.kv_size for layer in artifact.layers)
    text = "The shuttle in aisle 7 lost its reference. " * 9
    answers = []
    for config in ({"threads": 1}, {"threads": 3}, {"threads": 2, "prefill_batch_size": 7}):
        with GemRunContext(path, ignore_memory=True, **config) as context:
            answers.append(list(context.infer(text, 60, temperature=0.0, ignore_stop_ids=True)))
    assert answers[0] == answers[1] == answers[2]


def test_windows_of_the_model_are_measured_too(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Compiled
) -> None:
    path = artifact_cache(tiny_checkpoint("gemma3"), *OPTIONS, "--kv-gate", ALL)
    values = values_of(path)
    assert values["value4"] == values["units"]
    assert all(share > 0 for row in values["changed"] for share in row)
    with read_artifact(path) as artifact:
        assert any(layer.window for layer in artifact.layers)


def test_bytes_do_not_depend_on_workers(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Compiled, tmp_path: Path
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), *OPTIONS, "--kv-gate", PART)
    done = gemmake(
        tiny_checkpoint("llama3"), tmp_path / "a.gembin", *OPTIONS, "--kv-gate", PART,
        "--workers", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.gembin").read_bytes() == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gembin", "a.gembin.memmap"]


def test_what_cannot_be(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    done = gemmake(
        tiny_checkpoint("llama3"), tmp_path / "a", "--kv-cache-type", "dense",
        "--kv-values", "int4",
    )  # fmt: skip
    assert done.returncode == 2
    assert "--kv-values int4: the cache of --kv-cache-type dense has no values in int8" in (
        done.stderr
    )
    done = gemmake(
        tiny_checkpoint("llama3"), tmp_path / "b", "--kv-values", "int4", "--kv-cache-size", "128",
        "--effort", "fast",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "a context of 128 tokens holds no text to measure on" in done.stdout
    with read_artifact(tmp_path / "b") as artifact:
        assert not artifact.units
