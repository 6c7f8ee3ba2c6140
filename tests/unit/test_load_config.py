"""config.json: dialects, defaults, and fields that are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from gemmake.errors import CheckpointError
from gemmake.load.config import parse_config
from gemmake.load.families import expected_tensors
from gemmake.model import RopeSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
# The fields of a real SmolLM2 file that say nothing about the result.
SMOLLM2 = {
    **LLAMA,
    "is_llama_config": True,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "pretraining_tp": 1,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "initializer_range": 0.041666666666666664,
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "rms_norm_eps": 1e-6,
    "vocab_size": 262144,
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "cache_implementation": "hybrid",
}
GEMMA2: dict[str, Any] = {
    "model_type": "gemma2",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256000,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
}
QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "sliding_window": 32768,
    "max_window_layers": 21,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def test_real_smollm2_fields() -> None:
    config = parse_config(SMOLLM2)
    layer = config.layers[0]
    assert (layer.heads, layer.kv_heads, layer.head_dim, layer.ffn) == (9, 3, 64, 1536)
    assert layer.rope == RopeSpec(theta=100000.0, dims=64)
    assert config.tied is True


def test_qwen2_window_fields_without_effect() -> None:
    config = parse_config(QWEN2)
    assert {layer.window for layer in config.layers} == {0}
    names = {w.name for w in expected_tensors(config)}
    assert "layers.0.self_attn.q_proj.bias" in names
    assert "layers.0.self_attn.o_proj.bias" not in names


def test_gemma3_old_dialect_implies_pattern_and_local_base() -> None:
    """Every sixth layer is full; scaling belongs to the full layers only."""
    config = parse_config({**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert [layer.window for layer in config.layers] == [512] * 5 + [0, 512]
    assert config.layers[0].rope == RopeSpec(theta=10000.0, dims=256)
    assert config.layers[5].rope == RopeSpec(1000000.0, 256, "linear", 8.0)


def test_gemma3_both_dialects_agree() -> None:
    old = {**GEMMA3, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0}
    old["sliding_window_pattern"] = 6
    new = {
        **GEMMA3,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        "_sliding_window_pattern": 6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
    assert parse_config(old).layers == parse_config(new).layers


def test_gemma3_nested_text_config_with_defaults() -> None:
    """The text part of Gemma 3 4B leaves out what the class knows."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "eos_token_id": [1, 106],
    }
    config = parse_config(raw)
    layer = config.layers[0]
    assert (layer.heads, layer.kv_heads, layer.head_dim) == (8, 4, 256)
    assert (config.multimodal, config.tied, config.context) == (True, True, 131072)
    assert sum(layer.window == 0 for layer in config.layers) == 5
    assert config.layers[5].rope.factor == 8.0


def test_gemma2_defaults() -> None:
    config = parse_config(GEMMA2)
    assert [layer.window for layer in config.layers] == [4096, 0, 4096, 0]
    assert (config.attn_softcap, config.final_softcap) == (50.0, 30.0)
    assert config.layers[0].score_scale == 256**-0.5


def test_absent_cap_is_not_zero() -> None:
    config = parse_config({**GEMMA2, "attn_logit_softcapping": None})
    assert config.attn_softcap is None
    assert config.final_softcap == 30.0


def test_llama3_rope_in_both_dialects() -> None:
    rope = {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    wanted = RopeSpec(500000.0, 64, "llama3", 32.0, 1.0, 4.0, 8192)
    old = {**LLAMA, "rope_theta": 500000.0, "rope_scaling": rope}
    new = {**LLAMA, "rope_parameters": {**rope, "rope_theta": 500000.0}}
    assert parse_config(old).layers[0].rope == wanted
    assert parse_config(new).layers[0].rope == wanted


def test_layers_may_differ() -> None:
    """Hidden 48, 4 heads of 16: heads * head_dim is not hidden; layers alternate (O13)."""
    raw = {
        **LLAMA,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "per_layer_config": {
            "1": {"num_key_value_heads": 1, "head_dim": 32},
            "3": {"num_key_value_heads": 1, "head_dim": 32},
        },
    }
    config = parse_config(raw)
    assert [(x.kv_heads, x.head_dim) for x in config.layers] == [(2, 16), (1, 32)] * 2
    assert [x.rope.dims for x in config.layers] == [16, 32] * 2
    shapes = {w.name: w.shape for w in expected_tensors(config)}
    assert shapes["layers.0.self_attn.q_proj.weight"] == (64, 48)
    assert shapes["layers.1.self_attn.q_proj.weight"] == (128, 48)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (32, 48)
    assert shapes["layers.1.self_attn.o_proj.weight"] == (48, 128)


def test_gemma3_attention_cap_is_noted_not_applied() -> None:
    config = parse_config({**GEMMA3, "attn_logit_softcapping": 50.0})
    assert config.attn_softcap is None
    assert any("never applies" in note for note in config.notes)


def test_infinity_map_is_a_number() -> None:
    from gemmake.load.source import parse_json

    assert parse_json(b'{"a": {"__float__": "Infinity"}}', "x")["a"] == float("inf")


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias"),
    (LLAMA, {"attention_bias": True}, "attention_bias"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
    (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
    (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    (LLAMA, {"rope_scaling": {"rope_type": "linear"}}, "factor"),
    (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    (LLAMA, {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 1]}}, "mrope_section"),
    (LLAMA, {"rope_scaling": "linear"}, "rope_scaling"),
    (LLAMA, {"rope_theta": -1.0}, "rope_theta"),
    (LLAMA, {"rope_interleaved": True}, "rope_interleaved"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA, {"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    (LLAMA, {"num_local_experts": 8}, "num_local_experts"),
    (LLAMA, {"num_experts": 8}, "num_experts"),
    (LLAMA, {"embedding_multiplier": 12.0}, "embedding_multiplier"),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder"),
    (LLAMA, {"num_attention_heads": 7}, "num_key_value_heads"),
    (LLAMA, {"num_attention_heads": 18, "num_key_value_heads": 4}, "num_key_value_heads"),
    (LLAMA, {"hidden_size": 0}, "hidden_size"),
    (LLAMA, {"hidden_size": True}, "hidden_size"),
    (LLAMA, {"hidden_size": 2**40}, "hidden_size"),
    (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    (LLAMA, {"head_dim": 33}, "head_dim"),
    (LLAMA, {"rms_norm_eps": 0.0}, "rms_norm_eps"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    (LLAMA, {"max_position_embeddings": None}, "max_position_embeddings"),
    (LLAMA, {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    (LLAMA, {"text_config": {"hidden_size": 4}}, "text_config"),
    (LLAMA, {"per_layer_config": {"9": {"head_dim": 16}}}, "per_layer_config"),
    (LLAMA, {"per_layer_config": {"0": {"rms_norm_eps": 1.0}}}, "rms_norm_eps"),
    (LLAMA, {"model_type": "mistral"}, "mistral"),
    (LLAMA, {"model_type": None}, "model_type"),
    (QWEN2, {"use_sliding_window": True}, "use_sliding_window"),
    (QWEN2, {"use_mrope": True}, "use_mrope"),
    (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation"),
    (GEMMA3, {"sliding_window": None}, "sliding_window"),
    (GEMMA3, {"layer_types": ["full_attention"]}, "layer_types"),
    (GEMMA3, {"layer_types": ["linear_attention"] * 7}, "linear_attention"),
    (GEMMA3, {"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters"),
    (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    (GEMMA3, {"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
    (GEMMA2, {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
    (GEMMA2, {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
    (GEMMA2, {"attn_logit_softcapping": float("nan")}, "attn_logit_softcapping"),
    (GEMMA2, {"final_logit_softcapping": float("inf")}, "final_logit_softcapping"),
]


@pytest.mark.parametrize(("base", "change", "word"), REFUSED)
def test_refused_by_name(base: dict[str, Any], change: dict[str, Any], word: str) -> None:
    """51 configs that would change the result, or make no sense; the message names the field."""
    with pytest.raises(CheckpointError, match=word) as caught:
        parse_config({**base, **change})
    assert str(caught.value).startswith("config.json: ")


def test_refused_count() -> None:
    assert len(REFUSED) == 51


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_unknown_field_that_says_nothing_is_ignored(value: object) -> None:
    assert parse_config({**LLAMA, "some_new_switch": value}) == parse_config(LLAMA)
