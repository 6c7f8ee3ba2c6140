"""Loaded tiny checkpoints of all families against transformers' own loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import load_files
import tiny
from gemmake.load import load_checkpoint
from gemmake.model import NORM_ROLES, Act, Block, Model, Role

FAMILY_NAMES = {
    "gemma1": "gemma1",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_rope8": "gemma3",
    "llama3": "llama",
    "smollm2": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}


def assert_equals_reference(model: Model, reference: Any) -> None:
    """Every tensor equals transformers' parameter bit for bit, and none is left over."""
    parameters = dict(reference.named_parameters())
    sandwich = model.spec.layers[0].block is Block.SANDWICH
    for (layer, role), ref in model.tensors.items():
        wanted = (
            parameters.pop(load_files.attribute(role, layer, sandwich=sandwich)).detach().numpy()
        )
        got = ref.read(0, ref.rows)
        assert got.dtype == np.float32
        assert got.shape == (ref.rows, ref.cols)
        assert np.array_equal(got, wanted.reshape(got.shape)), ref.name
    if model.spec.tied:
        parameters.pop("lm_head.weight", None)
    assert not parameters


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_values_equal_transformers(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(family)
    assert_equals_reference(load_checkpoint(folder), tiny.reference(folder))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["gemma3", "llama3"])
def test_half_precision_converts_exactly(family: str, dtype: str, tmp_path: Path) -> None:
    folder = tiny.build(family, tmp_path / "m", dtype=dtype)
    model = load_checkpoint(folder)
    assert {r.dtype for r in model.tensors.values()} == {"F16" if dtype == "float16" else "BF16"}
    assert_equals_reference(model, tiny.reference(folder))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_spec_equals_transformers(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint(family)
    spec = load_checkpoint(folder).spec
    reference = tiny.reference(folder)
    config = reference.config
    assert spec.family == FAMILY_NAMES[family]
    assert (spec.hidden, spec.vocab_rows) == (tiny.HIDDEN, tiny.VOCAB)
    assert spec.trained_context == config.max_position_embeddings
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.tied
    assert spec.final_softcap == getattr(config, "final_logit_softcapping", None)
    gemma = family.startswith("gemma")
    assert spec.embed_scale == (8.0 if gemma else 1.0)
    for layer, module in zip(spec.layers, reference.model.layers, strict=True):
        attention = module.self_attn
        assert layer.head_dim == attention.head_dim
        assert layer.heads == config.num_attention_heads
        assert layer.kv_heads == config.num_key_value_heads
        assert layer.ffn == config.intermediate_size
        assert layer.score_scale == pytest.approx(attention.scaling, rel=1e-15)
        assert layer.window == (getattr(attention, "sliding_window", None) or 0)
        assert layer.qk_norm == hasattr(attention, "q_norm")
        assert layer.qkv_bias == (attention.q_proj.bias is not None)
        assert layer.act is (Act.GELU_TANH if gemma else Act.SILU)
        assert layer.attn_softcap == (5.0 if family == "gemma2" else None)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_rope_equals_transformers(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Frequencies computed from RopeSpec equal the buffers of transformers' rotary modules."""
    folder = tiny_checkpoint(family)
    spec = load_checkpoint(folder).spec
    rotary = tiny.reference(folder).model.rotary_emb
    for layer in spec.layers:
        rope = spec.ropes[layer.rope]
        assert rope.dims == layer.head_dim
        name = "inv_freq"
        if family.startswith("gemma3"):
            name = ("sliding" if layer.window else "full") + "_attention_inv_freq"
        wanted = getattr(rotary, name).numpy()
        got = rope.theta ** (-np.arange(0, rope.dims, 2) / rope.dims)
        if rope.kind == "linear":
            got = got / rope.factor
        if rope.kind == "llama3":
            parameters = {
                "original_max_position_embeddings": rope.original_context,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
                "factor": rope.factor,
                "rope_theta": rope.theta,
            }
            got = got / load_files.llama3_divisors(parameters, rope.dims)
        assert np.allclose(got, wanted, rtol=2e-6, atol=0)


def test_norm_offsets(tiny_checkpoint: Callable[..., Path]) -> None:
    """Gemma folders hold w of 1 + w; the others hold the weight itself."""
    for family in tiny.FAMILIES:
        for (_, role), ref in load_checkpoint(tiny_checkpoint(family)).tensors.items():
            plus_one = family.startswith("gemma") and role in NORM_ROLES
            assert ref.norm_offset == (1.0 if plus_one else 0.0)


@pytest.mark.parametrize("family", ["gemma2", "qwen2"])
def test_rows_stream_in_any_blocks(family: str, tiny_checkpoint: Callable[..., Path]) -> None:
    """Reading is pure: any split gives the bits of the whole, any number of times."""
    model = load_checkpoint(tiny_checkpoint(family))
    for ref in model.tensors.values():
        whole = ref.read(0, ref.rows)
        for step in (1, 7, 50):
            parts = [
                ref.read(first, min(step, ref.rows - first)) for first in range(0, ref.rows, step)
            ]
            assert np.array_equal(np.concatenate(parts), whole)
        assert ref.read(0, 0).shape == (0, ref.cols)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_shards_and_pt_equal_the_single_file(
    family: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family)
    single = load_checkpoint(folder)
    forms = [
        load_checkpoint(tiny.to_shards(folder, tmp_path / "shards")),
        load_checkpoint(tiny.to_pt(folder, tmp_path / "pt" / "model.pt")),
        load_checkpoint(folder / "model.safetensors"),
    ]
    for other in forms:
        assert other.spec == single.spec
        assert other.tensors.keys() == single.tensors.keys()
        for key, ref in single.tensors.items():
            assert np.array_equal(other.tensors[key].read(0, ref.rows), ref.read(0, ref.rows))


def test_inputs_are_hashed_and_sorted(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    import hashlib

    folder = tiny.to_shards(tiny_checkpoint("gemma1"), tmp_path / "m")
    inputs = load_checkpoint(folder).inputs
    assert [i.name for i in inputs] == sorted(p.name for p in folder.iterdir())
    for entry in inputs:
        data = (folder / entry.name).read_bytes()
        assert (entry.size, entry.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_the_folder_does_not_show(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A copy elsewhere, under another name, gives an equal spec and equal inputs."""
    folder = tiny_checkpoint("llama3")
    here = load_checkpoint(folder)
    there = load_checkpoint(load_files.copy(folder, tmp_path / "模型 other"))
    assert (here.spec, here.inputs, here.notes) == (there.spec, there.inputs, there.notes)
    assert here.spec.name == "llama-205K"


def test_a_name_in_the_config_is_used(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = load_files.copy(tiny_checkpoint("llama3"), tmp_path / "m")
    load_files.edit_json(folder / "config.json", _name_or_path="acme/Plant Model (v2)/")
    assert load_checkpoint(folder).spec.name == "Plant-Model-v2"


def test_config_option_replaces_the_one_beside(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = load_files.copy(tiny_checkpoint("gemma3"), tmp_path / "m")
    other = tmp_path / "other.json"
    (folder / "config.json").rename(other)
    load_files.edit_json(other, sliding_window=5)
    model = load_checkpoint(folder, other)
    assert model.spec.layers[0].window == 5
    assert "other.json" in [i.name for i in model.inputs]


def test_multimodal_wrapper_gives_the_text_model(tmp_path: Path) -> None:
    """Gemma 3 with a vision tower, names as transformers 5 saves them and as older files have
    them: nested text_config, prefixes, vision tensors dropped and said so."""
    import torch
    import transformers

    plain = tiny.build("gemma3", tmp_path / "plain")
    text = transformers.AutoConfig.from_pretrained(plain)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        wrapper = transformers.Gemma3ForConditionalGeneration(config)
    folder = load_files.copy(plain, tmp_path / "wrapper")
    wrapper.save_pretrained(folder)
    saved = set(load_files.state(folder))
    assert any("vision_tower" in name for name in saved)
    model = load_checkpoint(folder)
    assert any("not part of the text model" in note for note in model.notes)
    wanted = wrapper.model.language_model.state_dict()
    assert np.array_equal(
        model.tensors[0, Role.Q].read(0, 128), wanted["layers.0.self_attn.q_proj.weight"].numpy()
    )
    other_form = {
        "language_model.model.": "model.language_model.",
        "model.language_model.": "language_model.model.",
    }
    old, new = next((a, b) for a, b in other_form.items() if any(n.startswith(a) for n in saved))
    load_files.edit_state(
        folder,
        lambda s: {
            (new + n.removeprefix(old) if n.startswith(old) else n.removeprefix("model.")): t
            for n, t in s.items()
        },
    )
    again = load_checkpoint(folder)
    assert again.spec == model.spec
    for key, ref in model.tensors.items():
        assert np.array_equal(again.tensors[key].read(0, ref.rows), ref.read(0, ref.rows))


def test_names_without_prefix_load(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A save of the bare model has no `model.`; old files carry inv_freq buffers."""
    folder = load_files.copy(tiny_checkpoint("llama3"), tmp_path / "m")
    import torch

    def change(s: load_files.State) -> load_files.State:
        bare = {n.removeprefix("model."): t for n, t in s.items()}
        return {**bare, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}

    load_files.edit_state(folder, change)
    model = load_checkpoint(folder)
    assert len(model.tensors) == 38
    assert any("inv_freq" in note for note in model.notes)


def test_layers_of_different_shapes(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Hidden 48, 4 heads, layers alternate 2/1 kv heads of 16/32: sizes come per layer and are
    held against the tensors (O13). Without the per-layer fields the shapes do not fit."""
    from safetensors.numpy import save_file

    from gemmake.errors import CheckpointError
    from gemmake.load.config import parse_config
    from gemmake.load.families import expected_tensors

    folder = load_files.copy(tiny_checkpoint("llama3"), tmp_path / "m")
    odd = {"num_key_value_heads": 1, "head_dim": 32}
    config = load_files.edit_json(
        folder / "config.json",
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        per_layer_config={"1": odd, "3": odd},
    )
    rng = np.random.default_rng(2)
    wanted = {
        "model." + w.name: rng.normal(size=[n or 512 for n in w.shape]).astype(np.float32)
        for w in expected_tensors(parse_config(json.loads(config.read_text())))
    }
    save_file(wanted, folder / "model.safetensors")
    model = load_checkpoint(folder)
    assert [(x.heads, x.kv_heads, x.head_dim) for x in model.spec.layers] == [
        (4, 2, 16),
        (4, 1, 32),
    ] * 2
    assert [model.spec.ropes[x.rope].dims for x in model.spec.layers] == [16, 32] * 2
    for ref in model.tensors.values():
        assert np.array_equal(
            ref.read(0, ref.rows).reshape(wanted[ref.name].shape), wanted[ref.name]
        )
    load_files.edit_json(config, per_layer_config=None)
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.self_attn\.q_proj\.weight is \[128, 48\]"
    ):
        load_checkpoint(folder)
