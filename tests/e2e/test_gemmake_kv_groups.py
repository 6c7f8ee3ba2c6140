"""Groups of the int8 KV cache: small where a layer's keys need it, by measurement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import compiling
from gemmake.options import Effort, KvType, Quantization

BIAS = "model.layers.0.self_attn.k_proj.bias"


@pytest.fixture(scope="module")
def biased(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, and a key bias in layer 0 with a few large components."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = tmp_path_factory.mktemp("biased") / "model"
    compiling.resized(tiny_checkpoint("qwen2"), folder, **sizes)
    tensors = load_file(folder / "model.safetensors")
    bias = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    bias[:4] *= 20
    tensors[BIAS] = bias * np.float32(30 / np.linalg.norm(bias))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_layer_with_outlying_keys_gets_small_groups(biased: Path, tmp_path: Path) -> None:
    result = compiling.compiled(biased, tmp_path / "x.gembin")
    groups = [layer.kv_group for layer in result.state.layers]
    assert groups[0] == 32
    assert set(groups[1:]) == {64}
    assert compiling.problems(tmp_path / "x.gembin") == []


def test_the_int8_cache_stays_close_to_the_float_one(biased: Path, tmp_path: Path) -> None:
    found = {}
    for kv in KvType:
        path = tmp_path / f"{kv.value}.gembin"
        compiling.compiled(biased, path, kv_type=kv, quantization=Quantization.NONE)
        found[kv] = compiling.logits(path)
    assert compiling.relative_error(found[KvType.INT8], found[KvType.DENSE]) < 0.05


def test_without_calibration_the_usual_groups_are_taken(biased: Path, tmp_path: Path) -> None:
    result = compiling.compiled(biased, tmp_path / "x.gembin", effort=Effort.FAST)
    assert {layer.kv_group for layer in result.state.layers} == {32}
    assert not result.state.inputs[-1].name.startswith("calibration")
