"""config.json of Hugging Face, old and 5.x dialect, to `ArchConfig`.

Policy for fields: every field is either read, or must have a given value, or is known to change
nothing (`_HARMLESS`). Any other field whose value is not null, false or empty is refused by name:
a field that gemmake does not know may well change the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gemmake.errors import CheckpointError
from gemmake.load.families import FAMILIES, ArchConfig, Family, LayerShape
from gemmake.load.source import display, name_list, unfit
from gemmake.model import RopeSpec

MAX_LAYERS = 256  # as the artifact format
MAX_WINDOW = 1 << 20  # tokens, as the artifact format
MAX_SIZE = 1 << 24  # hidden, ffn, heads * head_dim, vocabulary rows

# model_type -> family. gemma3 is the multimodal wrapper with its text part in text_config.
MODEL_TYPES = {
    "gemma": "gemma1",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
# Sizes that transformers fills in for a family when the config leaves them out.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma1": {"head_dim": 256, "rms_norm_eps": 1e-6},
    "gemma2": {
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
    },
    "gemma3": {
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 131072,
    },
    "llama": {"rms_norm_eps": 1e-6},
    "qwen2": {"rms_norm_eps": 1e-6},
    "qwen3": {"rms_norm_eps": 1e-6, "head_dim": 128},
}
_THETA = {"gemma3": 1_000_000.0}  # of full layers; 10000 for every other family
_LOCAL_THETA = 10_000.0
_PATTERN = {"gemma2": 2, "gemma3": 6}  # the last of this many layers is full

# Fields that are read (sizes are checked where they are used).
_READ = {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "model_type",
    "architectures",
    "per_layer_config",
    "layer_types",
    "hidden_act",
    "hidden_activation",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "_name_or_path",
    "name_or_path",
}
_READ_BY_FAMILY = {
    "gemma2": {
        "query_pre_attn_scalar",
        "sliding_window",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    },
    "gemma3": {
        "query_pre_attn_scalar",
        "sliding_window",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "rope_local_base_freq",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    },
    # Only used by transformers when use_sliding_window is true, which is refused.
    "qwen2": {"sliding_window", "max_window_layers"},
    "qwen3": {"sliding_window", "max_window_layers"},
}
# Fields that must have one of these values (null is always allowed).
_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bidirectional_attention": (False,),
    "use_sliding_window": (False,),
    "use_mrope": (False,),
    "partial_rotary_factor": (1, 1.0),
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "quantization_config": (),
}
# Fields that change nothing in the result of an inference on one device.
_HARMLESS = {
    "attention_dropout",
    "auto_map",
    "bad_words_ids",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "finetuning_task",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "is_decoder",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "license",
    "max_length",
    "mm_tokens_per_image",
    "output_attentions",
    "output_hidden_states",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "use_return_dict",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
}
# Fields of the multimodal wrapper around a text config.
_WRAPPER = {
    "text_config",
    "vision_config",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "image_token_id",
    "boi_token_id",
    "eoi_token_id",
}
_ROPE_KEYS = {
    "default": {"rope_theta"},
    "linear": {"rope_theta", "factor"},
    "llama3": {
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}
# Ranges of what real models use, with room; beyond them tables lose their meaning.
_ROPE_RANGES = {
    "rope_theta": (1.5, 1e12),
    "factor": (1.0, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
}
_MAX_EPS = 1.0
_ACTIVATIONS = {"gelu": ("gelu", "gelu_pytorch_tanh"), "silu": ("silu", "swish")}


@dataclass(frozen=True)
class _Fields:
    """The text config with the checks that every reader of a field needs."""

    values: Mapping[str, Any]
    family: Family
    file: str

    def get(self, name: str) -> Any:
        """The value, or the family's default where the field is absent."""
        if name in self.values:
            return self.values[name]
        return _DEFAULTS[self.family.name].get(name)

    def fail(self, name: str, what: str) -> CheckpointError:
        return unfit(f"{self.file}: field {display(name)} {what}")

    def size(self, name: str, limit: int = MAX_SIZE, default: int | None = None) -> int:
        """A positive integer of at most `limit`."""
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.fail(name, "is missing")
        return check_size(value, limit, f"{self.file}: field {name}")

    def positive(self, name: str) -> float:
        """A positive finite number."""
        value = self.get(name)
        if value is None:
            raise self.fail(name, "is missing")
        return check_positive(value, f"{self.file}: field {name}")

    def cap(self, name: str) -> float | None:
        """A soft-cap: absent is not 0, and 0, negative values and NaN are refused."""
        value = self.get(name)
        return None if value is None else check_positive(value, f"{self.file}: field {name}")


def check_size(value: Any, limit: int, where: str) -> int:
    """A positive integer of at most `limit`, or a CheckpointError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
        raise unfit(
            f"{where} is {display(repr(value))}, a whole number from 1 to {limit} is expected"
        )
    return value


def check_positive(value: Any, where: str) -> float:
    """A positive finite number, or a CheckpointError."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value <= 0:
        raise unfit(f"{where} is {display(repr(value))}, a positive finite number is expected")
    return float(value)


def _norm_eps(fields: _Fields) -> float:
    value = fields.positive("rms_norm_eps")
    if value > _MAX_EPS:
        raise fields.fail("rms_norm_eps", f"is {value:g}, at most {_MAX_EPS:g} makes sense")
    return value


def parse_config(raw: Mapping[str, Any], file: str = "config.json") -> ArchConfig:
    """`raw`: the parsed config.json. CheckpointError names the field that is not supported."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise CheckpointError(
            f"{file}: model_type {display(repr(model_type))} is not supported; supported: {known}"
        )
    family = FAMILIES[MODEL_TYPES[model_type]]
    text, multimodal = _text_part(raw, file)
    _check_fields(text, family, file)
    fields = _Fields(text, family, file)
    _check_activation(fields)
    notes = []
    if family.name == "gemma3" and fields.get("attn_logit_softcapping") is not None:
        notes.append("attn_logit_softcapping is set in config.json; Gemma 3 never applies it")
    return ArchConfig(
        family=family,
        hidden=fields.size("hidden_size"),
        context=fields.size("max_position_embeddings", limit=1 << 30),
        norm_eps=_norm_eps(fields),
        layers=_layer_shapes(fields),
        vocab=fields.size("vocab_size") if fields.get("vocab_size") is not None else None,
        tied=_tied(raw, text, family, file),
        attn_softcap=fields.cap("attn_logit_softcapping") if family.name == "gemma2" else None,
        final_softcap=fields.cap("final_logit_softcapping"),
        multimodal=multimodal,
        notes=tuple(notes),
    )


def _text_part(raw: Mapping[str, Any], file: str) -> tuple[Mapping[str, Any], bool]:
    """The text config, nested or not, and whether the file is a multimodal wrapper."""
    if raw.get("text_config") is None:
        return raw, False
    text = raw["text_config"]
    if raw["model_type"] != "gemma3" or not isinstance(text, dict):
        raise unfit(f"{file}: field text_config is not supported for this model_type")
    if text.get("model_type", "gemma3_text") not in ("gemma3_text", "gemma3"):
        raise unfit(
            f"{file}: text_config.model_type {display(repr(text['model_type']))} is not supported"
        )
    outer = {k: v for k, v in raw.items() if k not in _WRAPPER}
    _check_fields(outer, FAMILIES["gemma3"], file)
    return text, True


def _check_fields(text: Mapping[str, Any], family: Family, file: str) -> None:
    """Refuse by name what is known to be unsupported and what is not known at all."""
    for name, allowed in _MUST_BE.items():
        value = text.get(name)
        if value is None or any(value == good and value is not True for good in allowed):
            continue
        raise CheckpointError(
            f"{file}: field {name} = {display(repr(value), 60)} is not supported by gemmake"
            + (f"; only {allowed[0]!r} is" if allowed else "")
        )
    architectures = text.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if not str(name).endswith(("ForCausalLM", "ForConditionalGeneration", "Model")):
            raise CheckpointError(
                f"{file}: field architectures names {display(str(name))}; "
                "only causal language models can be compiled"
            )
    known = _READ | _READ_BY_FAMILY.get(family.name, set()) | _HARMLESS | set(_MUST_BE)
    unknown = [k for k, v in text.items() if k not in known and not _says_nothing(v)]
    if unknown:
        raise CheckpointError(
            f"{file}: field {name_list(unknown)} is not known for {family.name} and may change "
            "the result; remove it from a copy of the config (--config) if it does not"
        )


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _check_activation(fields: _Fields) -> None:
    gelu = fields.family.name.startswith("gemma")
    name = "hidden_activation" if fields.get("hidden_activation") is not None else "hidden_act"
    value = fields.get(name)
    allowed: tuple[str, ...] = _ACTIVATIONS["gelu" if gelu else "silu"]
    if gelu and name == "hidden_activation":
        allowed = ("gelu_pytorch_tanh",)  # here "gelu" would mean the exact form
    if value is not None and value not in allowed:
        raise fields.fail(name, f"= {display(repr(value))} is not supported; {allowed[0]} is")


def _tied(
    raw: Mapping[str, Any], text: Mapping[str, Any], family: Family, file: str
) -> bool | None:
    """tie_word_embeddings, or what its absence means."""
    for source in (raw, text):
        value = source.get("tie_word_embeddings")
        if value is not None:
            if not isinstance(value, bool):
                raise unfit(f"{file}: field tie_word_embeddings is not true or false")
            return value
    return family.tied


def _layer_shapes(fields: _Fields) -> tuple[LayerShape, ...]:
    count = fields.size("num_hidden_layers", limit=MAX_LAYERS)
    full = _full_layers(fields, count)
    overrides = _per_layer(fields, count)
    shapes = []
    for index in range(count):
        layer = _Fields({**fields.values, **overrides.get(index, {})}, fields.family, fields.file)
        shapes.append(_layer_shape(layer, index, full=full[index]))
    return tuple(shapes)


def _layer_shape(fields: _Fields, index: int, *, full: bool) -> LayerShape:
    heads = fields.size("num_attention_heads", limit=4096)
    kv_heads = fields.size("num_key_value_heads", limit=4096, default=heads)
    if heads % kv_heads:
        raise fields.fail(
            "num_key_value_heads", f"= {kv_heads} does not divide {heads} heads (layer {index})"
        )
    head_dim = _head_dim(fields, heads)
    sandwich = fields.family.name in ("gemma2", "gemma3")
    scale_of = fields.positive("query_pre_attn_scalar") if sandwich else float(head_dim)
    return LayerShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=fields.size("intermediate_size"),
        window=0 if full else fields.size("sliding_window", limit=MAX_WINDOW),
        rope=_rope(fields, head_dim, full=full),
        score_scale=scale_of**-0.5,
    )


def _head_dim(fields: _Fields, heads: int) -> int:
    if fields.get("head_dim") is not None:
        head_dim = fields.size("head_dim", limit=4096)
    else:
        hidden = fields.size("hidden_size")
        if hidden % heads:
            raise fields.fail("head_dim", f"is missing and {heads} heads do not divide {hidden}")
        head_dim = hidden // heads
    if head_dim % 2:
        raise fields.fail("head_dim", f"= {head_dim} is odd; rotary pairs need an even number")
    return head_dim


def _full_layers(fields: _Fields, count: int) -> list[bool]:
    """Which layers see all keys."""
    name = fields.family.name
    types = fields.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != count:
            raise fields.fail("layer_types", f"is not a list of {count} entries")
        allowed = (
            ("full_attention", "sliding_attention") if name in _PATTERN else ("full_attention",)
        )
        bad = [t for t in types if t not in allowed]
        if bad:
            raise fields.fail("layer_types", f"holds {display(repr(bad[0]))}, not supported")
        return [t == "full_attention" for t in types]
    if name not in _PATTERN:
        return [True] * count
    pattern = _PATTERN[name]
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        if fields.values.get(key) is not None:
            pattern = fields.size(key, limit=MAX_LAYERS)
            break
    return [(i + 1) % pattern == 0 for i in range(count)]


def _per_layer(fields: _Fields, count: int) -> dict[int, Mapping[str, Any]]:
    """`per_layer_config`: sizes that differ from layer to layer, by layer index."""
    raw = fields.get("per_layer_config")
    if raw is None:
        return {}
    allowed = {"num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"}
    result: dict[int, Mapping[str, Any]] = {}
    if not isinstance(raw, dict):
        raise fields.fail("per_layer_config", "is not a map of layers")
    for key, value in raw.items():
        if not str(key).isdecimal() or int(key) >= count or not isinstance(value, dict):
            raise fields.fail("per_layer_config", f"has no layer {display(str(key))}")
        if set(value) - allowed:
            raise fields.fail(
                "per_layer_config", f"sets {name_list(set(value) - allowed)}, not supported"
            )
        result[int(key)] = value
    return result


def _rope(fields: _Fields, dims: int, *, full: bool) -> RopeSpec:
    """The rotary table of a layer, from the old fields or from rope_parameters."""
    scaling, parameters = fields.get("rope_scaling"), fields.get("rope_parameters")
    for name, value in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        if value is not None and not isinstance(value, dict):
            raise fields.fail(name, "is not a map")
    if fields.family.name == "gemma3":
        return _gemma3_rope(fields, scaling, parameters, dims, full=full)
    chosen = dict(scaling or parameters or {})
    if chosen.get("rope_theta") is None:
        chosen["rope_theta"] = fields.get("rope_theta") or 10_000.0
    return parse_rope(chosen, dims, f"{fields.file}: rope_parameters")


def _gemma3_rope(
    fields: _Fields, scaling: Any, parameters: Any, dims: int, *, full: bool
) -> RopeSpec:
    """Two tables: full layers with scaling, sliding ones with their own base and none."""
    kind = "full_attention" if full else "sliding_attention"
    if parameters is not None and set(parameters) - {"full_attention", "sliding_attention"}:
        raise fields.fail("rope_parameters", "must be given per layer type for Gemma 3")
    own = (parameters or {}).get(kind)
    if own is not None and not isinstance(own, dict):
        raise fields.fail("rope_parameters", f"{kind} is not a map")
    chosen = dict(own or {})
    if full:
        chosen.update(scaling or {})
        theta, default = fields.get("rope_theta"), _THETA["gemma3"]
    else:
        theta, default = fields.get("rope_local_base_freq"), _LOCAL_THETA
    if chosen.get("rope_theta") is None:
        chosen["rope_theta"] = theta or default
    return parse_rope(chosen, dims, f"{fields.file}: rope_parameters")


def parse_rope(raw: Mapping[str, Any], dims: int, where: str) -> RopeSpec:
    """One rotary description. Kinds other than default, linear and llama3 are refused by name."""
    kind = raw.get("rope_type", raw.get("type")) or "default"
    if kind not in _ROPE_KEYS:
        raise CheckpointError(
            f"{where}: rope_type {display(repr(kind))} is not supported; "
            "default, linear and llama3 are"
        )
    given = {k: v for k, v in raw.items() if k not in ("rope_type", "type") and v is not None}
    if given.get("partial_rotary_factor") == 1.0:
        del given["partial_rotary_factor"]
    unknown = set(given) - _ROPE_KEYS[kind]
    missing = _ROPE_KEYS[kind] - set(given)
    if unknown:
        raise unfit(f"{where}: {name_list(unknown)} is not supported with {kind}")
    if missing:
        raise unfit(f"{where}: {name_list(missing)} is missing for {kind}")
    number = {k: check_positive(v, f"{where}.{k}") for k, v in given.items()}
    for key, value in number.items():
        low, high = _ROPE_RANGES.get(key, (0.0, math.inf))
        if not low <= value <= high:
            raise unfit(f"{where}: {key} {value:g} is outside {low:g} to {high:g}")
    if kind == "default":
        return RopeSpec(theta=number["rope_theta"], dims=dims)
    if kind == "linear":
        return RopeSpec(theta=number["rope_theta"], dims=dims, kind=kind, factor=number["factor"])
    if number["low_freq_factor"] >= number["high_freq_factor"]:
        raise unfit(f"{where}: low_freq_factor must be below high_freq_factor")
    return RopeSpec(
        theta=number["rope_theta"],
        dims=dims,
        kind=kind,
        factor=number["factor"],
        low_freq_factor=number["low_freq_factor"],
        high_freq_factor=number["high_freq_factor"],
        original_context=check_size(
            int(number["original_max_position_embeddings"]), 1 << 30, f"{where}.original_max.."
        ),
    )
