"""gemcheck over artifacts that gemmake compiled, with the engine's replay."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz.mutate import find, reseal, section_range
from gemrun.format import memmap, sizes
from gemrun.format.reader import read_artifact
from gemrun.format.spec import Buffer

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def gemcheck(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gemmake.check.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("family", ["gemma3", "llama3", "qwen2"])
@pytest.mark.parametrize("quantization", ["int4", "int8", "none"])
def test_compiled_artifacts_pass(
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    family: str,
    quantization: str,
) -> None:
    options = ("--quantization", quantization, "--kv-cache-size", "128")
    path = artifact_cache(tiny_checkpoint(family), *options, "--effort", "fast")
    done = gemcheck("--run", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Memory layout consistent with target HDF" in done.stdout
    assert "replayed, same answer" in done.stdout
    with read_artifact(path) as artifact:
        listing = Path(f"{path}.memmap").read_text()
        assert listing == memmap.render(artifact)
        wanted = sizes.buffer_sizes(
            artifact.conf, artifact.layers, artifact.tensors, artifact.segments
        )
        wanted[Buffer.HIDDEN] = sizes.rows_size(artifact.conf)
        assert [p.size for p in artifact.plans] == list(wanted.values())


def test_only_a_chosen_threshold_is_warned_of(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    model = tiny_checkpoint("llama3")
    common = ("--target", "jetson-orin-nano", "--quantization", "int8", "--effort", "fast")
    common += ("--kv-cache-size", "128")
    own = gemcheck(artifact_cache(model, *common))
    assert own.returncode == 0, own.stdout + own.stderr
    policy = "80\u00b0C (policy of the target; continuous limit 70\u00b0C)\n"
    assert f"\u2713 Temperature threshold {policy}" in own.stdout
    assert "recommend" not in own.stdout
    assert "\u2713 Throttle mode balanced: 8 rungs from 80\u00b0C" in own.stdout
    chosen = gemcheck("--verbose", artifact_cache(model, *common, "--temperature-threshold", "75"))
    assert chosen.returncode == 0, chosen.stdout + chosen.stderr
    assert (
        "\u26a0 Temperature threshold 75\u00b0C exceeds device spec for continuous load "
        "(max 70\u00b0C) \u2014 recommend --throttle-mode aggressive\n"
    ) in chosen.stdout
    assert "with --throttle-mode aggressive" in chosen.stdout


def test_inspect_takes_the_names_of_the_checkpoint(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    options = ("--quantization", "int8", "--kv-cache-size", "128", "--effort", "fast")
    path = artifact_cache(tiny_checkpoint("llama3"), *options)
    for part in ("gate", "up"):
        name = f"model.layers.0.mlp.{part}_proj.weight"
        done = gemcheck("inspect", path, "--tensor", name)
        assert done.returncode == 0, done.stderr
        assert name in done.stdout
        assert "gate_up" in done.stdout


@pytest.mark.parametrize(
    "name", ["tiny-int4", "tiny-f16", "tiny-q4raw", "tiny-kvmask", "tiny-pinned", "tiny-key4"]
)
def test_golden_vectors_give_the_same_answer(name: str) -> None:
    done = gemcheck("--run", GOLDEN / "v1.0" / f"{name}.gembin")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 replayed, same answer" in done.stdout


def test_a_changed_weight_changes_the_answer(tmp_path: Path) -> None:
    """Sealed again, so that only the replay can notice."""
    raw = bytearray((GOLDEN / "v1.0/tiny-int4.gembin").read_bytes())
    place = section_range(raw, find(raw, "WHOT"))
    assert place is not None
    raw[place[0] + 256 + 64] ^= 0x77
    (tmp_path / "a.gembin").write_bytes(reseal(raw))
    assert gemcheck(tmp_path / "a.gembin").returncode == 0
    done = gemcheck("--run", "--json", tmp_path / "a.gembin")
    assert done.returncode == 1
    finding = json.loads(done.stdout)["findings"][-1]
    assert (finding["rule"], finding["severity"]) == ("test-vectors", "error")


def test_compiles_differ_only_in_what_was_asked(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    model = tiny_checkpoint("llama3")
    common = ("--quantization", "int8", "--effort", "fast")
    short = artifact_cache(model, *common, "--kv-cache-size", "128")
    long = artifact_cache(model, *common, "--kv-cache-size", "256")
    done = gemcheck("--diff", short, long)
    assert done.returncode == 1
    assert "constants: context: 128 | 256" in done.stdout
    assert "tensors: 0 of" in done.stdout
    assert "KV layout" in done.stdout
    assert gemcheck("--diff", short, short).stdout == "same content\n"
