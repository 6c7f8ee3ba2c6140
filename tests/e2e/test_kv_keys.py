"""gemmake --kv-keys int4, alone and beside values, as a user types it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from e2e.test_kv_values import ALL, BASE, NONE, gemcheck, gemmake
from gemrun import GemRunContext
from gemrun.format import sizes
from gemrun.format.reader import Artifact, read_artifact
from gemrun.format.units import key4_of, value4_of

OPTIONS = (*BASE, "--kv-keys", "int4", "--prefill-sample-ratio", "0.01")
BOTH = (*OPTIONS, "--kv-values", "int4")
#: Gates that a model of random weights passes with all keys, which lose little, and some values.
PART = "kl=0.0003,top1=0.9,perplexity=1"

Compiled = Callable[..., Path]
Checkpoint = Callable[..., Path]


def keys_of(path: Path) -> dict[str, Any]:
    with read_artifact(path) as artifact:
        keys: dict[str, Any] = artifact.manifest["kv_keys"]
        return keys


def codes(artifact: Artifact) -> int:
    """Bytes of all keys, or values, in 8 bits."""
    return sum(la.kv_heads * la.kv_blocks * 32 * la.head_dim for la in artifact.layers)


def rings(artifact: Artifact) -> int:
    return sizes.rings_size(artifact.conf, artifact.layers, artifact.units)


def test_all_heads_save_half_of_all_keys(
    tiny_checkpoint: Checkpoint, artifact_cache: Compiled
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), *OPTIONS, "--kv-gate", ALL)
    keys = keys_of(path)
    assert keys["key4"] == keys["units"]
    assert keys["wide"] == []
    with (
        read_artifact(path) as artifact,
        read_artifact(artifact_cache(tiny_checkpoint("llama3"), *BASE)) as before,
    ):
        assert all(key4_of(artifact))
        assert not any(value4_of(artifact))
        assert "kv_values" not in artifact.manifest
        assert artifact.manifest["options"]["kv_keys"] == "int4"
        assert rings(before) - rings(artifact) == codes(before) // 2
        assert artifact.header.ram_kv == sizes.pad(rings(artifact), 4096)
    with GemRunContext(path, ignore_memory=True) as context:
        assert context.run_tests() > 0


def test_keys_and_values_pass_the_gates_together(
    tiny_checkpoint: Checkpoint, artifact_cache: Compiled
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), *BOTH, "--kv-gate", ALL)
    with (
        read_artifact(path) as artifact,
        read_artifact(artifact_cache(tiny_checkpoint("llama3"), *BASE)) as before,
    ):
        assert all(key4_of(artifact))
        assert all(value4_of(artifact))
        assert rings(before) - rings(artifact) == codes(before)
        steps = [point[0] for point in artifact.manifest["kv_keys"]["curve"]]
        assert steps[-1] == 2 * len(artifact.units)
    with GemRunContext(path, ignore_memory=True) as context:
        assert context.run_tests() > 0


def test_what_passes_the_gates_is_what_is_written(
    tiny_checkpoint: Checkpoint, artifact_cache: Compiled
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), *BOTH, "--kv-gate", PART)
    with read_artifact(path) as artifact:
        keys, values = (artifact.manifest[name] for name in ("kv_keys", "kv_values"))
        assert 0 < values["value4"] < values["units"]
        assert keys["key4"] > 0
        assert keys["quality"] == values["quality"]
        assert keys["quality"]["kl"] <= 0.0003
        costs = {True: [], False: []}  # type: dict[bool, list[float]]
        units = iter(artifact.units)
        for index, layer in enumerate(artifact.layers):
            for head in range(layer.kv_heads):
                unit = next(units)
                assert unit.key4 == ([index, head] not in keys["wide"])
                assert unit.value4 == ([index, head] not in values["wide"])
                costs[unit.key4].append(keys["changed"][index][head])
                costs[unit.value4].append(values["changed"][index][head])
        # What loses least, of both, has 4 bits.
        assert max(costs[True]) <= min(costs[False])
        assert sum(key4_of(artifact)) == keys["key4"]
        assert sum(value4_of(artifact)) == values["value4"]
    log = path.with_suffix(".log").read_text(encoding="utf-8")
    assert (
        f"values of 4 bits in {values['value4']} of {values['units']} KV heads, "
        f"keys of 4 bits in {keys['key4']} of {keys['units']} KV heads"
    ) in log
    assert f"values that keep 8 bits: layer {values['wide'][0][0]}: " in log
    text = gemcheck(path, "--verbose")
    assert f"values of {values['value4']} have 4 bits; keys of {keys['key4']} have 4 bits" in text
    answers = []
    for config in ({"threads": 1}, {"threads": 3}, {"threads": 2, "prefill_batch_size": 7}):
        with GemRunContext(path, ignore_memory=True, **config) as context:
            said = context.infer("The shuttle in aisle 7 " * 9, 60, temperature=0.0)
            answers.append(list(said))
    assert answers[0] == answers[1] == answers[2]


def test_gates_that_nothing_passes_leave_the_ordinary_cache(
    tiny_checkpoint: Checkpoint, artifact_cache: Compiled
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), *BOTH, "--kv-gate", NONE)
    log = path.with_suffix(".log").read_text(encoding="utf-8")
    for name in ("keys", "values"):
        assert f"{name} of 4 bits: no head passes the gates; all {name} keep 8 bits" in log
    with (
        read_artifact(path) as artifact,
        read_artifact(artifact_cache(tiny_checkpoint("llama3"), *BASE)) as before,
    ):
        assert artifact.manifest["kv_keys"]["key4"] == 0
        assert not artifact.units
        assert artifact.header.required_features == before.header.required_features
        assert bytes(artifact.section("TEST")) == bytes(before.section("TEST"))


def test_a_pinned_prompt_beside_keys_of_4_bits(
    tiny_checkpoint: Checkpoint, artifact_cache: Compiled
) -> None:
    """The stored keys are those that a prefill makes."""
    pin = ("--pin-prompt", "You are a robot. Answer with one word. ")
    path = artifact_cache(tiny_checkpoint("llama3"), *BOTH, "--kv-gate", ALL, *pin)
    text = gemcheck(path, "--run")
    assert "same answer" in text
    assert "pinned prompt" in text.lower()


def test_keys_with_a_large_bias_keep_8_bits(
    tiny_checkpoint: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bias of norm 600 in one layer: its heads come last, and no gate lets them through."""
    folder = shutil.copytree(tiny_checkpoint("qwen2"), tmp_path / "biased")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("layers.0.self_attn.k_proj.bias"))
    bias = np.random.default_rng(1).standard_normal(tensors[name].shape)
    tensors[name] = (600 * bias / np.linalg.norm(bias)).astype(tensors[name].dtype)
    save_file(tensors, file, {"format": "pt"})
    done = gemmake(folder, tmp_path / "a.gembin", *OPTIONS, "--kv-gate", "kl=0.005,top1=0.9")
    assert done.returncode == 0, done.stderr
    keys = keys_of(tmp_path / "a.gembin")
    biased, others = keys["changed"][0], [c for row in keys["changed"][1:] for c in row]
    assert min(biased) > max(others)
    assert all([0, head] in keys["wide"] for head in range(len(biased)))
    assert 0 < keys["key4"] < keys["units"]
    assert (
        f"keys that keep 8 bits: layer 0: {' '.join(map(str, range(len(biased))))}" in done.stdout
    )


def test_with_error_feedback(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The images that calibrate have a cache of floats, which has nothing of 4 bits."""
    narrow = ("--kv-values", "int4", "--kv-keys", "int4", "--kv-gate", ALL)
    options = ("--kv-cache-size", "512", "--prefill-sample-ratio", "0.001", *narrow)
    path = tmp_path / "a.gembin"
    done = gemmake(tiny_checkpoint("llama3"), path, *options)
    assert done.returncode == 0, done.stderr
    with read_artifact(path) as artifact:
        assert artifact.manifest["options"]["effort"] == "full"
        assert all(key4_of(artifact))
        assert all(value4_of(artifact))


def test_what_cannot_be(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    done = gemmake(
        tiny_checkpoint("llama3"), tmp_path / "a", "--kv-cache-type", "dense", "--kv-keys", "int4"
    )
    assert done.returncode == 2
    assert "--kv-keys int4: the cache of --kv-cache-type dense has no keys in int8" in done.stderr
    done = gemmake(
        tiny_checkpoint("llama3"), tmp_path / "b", "--kv-keys", "int4", "--kv-values", "int4",
        "--kv-cache-size", "128", "--effort", "fast",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--kv-values int4 --kv-keys int4: a context of 128 tokens holds no text" in done.stdout
