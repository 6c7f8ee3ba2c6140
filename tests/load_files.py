"""Checkpoint files for the loader tests: edited copies, GGUF forms of tiny checkpoints, raw bytes.

The GGUF writer here follows the conversion rules on its own (norms of Gemma + 1, permuted q and k
of Llama, rope_freqs), so that it checks the loader and does not share its code.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gemmake.model import MODEL_LAYER, Role

State = dict[str, Any]
Array = npt.NDArray[np.float32]


def copy(folder: Path, target: Path) -> Path:
    """A writable copy of a checkpoint folder."""
    shutil.copytree(folder, target)
    return target


def edit_json(path: Path, *, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """Change fields of a JSON file in place."""
    value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    value.update(changes)
    for name in drop:
        value.pop(name, None)
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    return path


def state(folder: Path) -> State:
    """The tensors of a tiny checkpoint, as torch tensors by name."""
    from safetensors.torch import load_file

    loaded: State = load_file(folder / "model.safetensors")
    return loaded


def edit_state(folder: Path, change: Callable[[State], State | None]) -> Path:
    """Rewrite model.safetensors after `change`, which edits the state or returns a new one."""
    from safetensors.torch import save_file

    tensors = state(folder)
    tensors = change(tensors) or tensors
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def safetensors_bytes(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file with any header and any claimed header length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


_SCALAR = {0: "<B", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def gguf_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def gguf_value(kind: int, value: Any) -> bytes:
    """A metadata value with its type; an array is ("array", element kind, list)."""
    body = gguf_string(value) if kind == 8 else struct.pack(_SCALAR[kind], value)
    return struct.pack("<I", kind) + body


def gguf_array(element: int, values: list[Any], *, count: int | None = None) -> bytes:
    """An array value; `count` overrides the stored length."""
    body = b"".join(
        gguf_string(v) if element == 8 else struct.pack(_SCALAR[element], v) for v in values
    )
    length = len(values) if count is None else count
    return struct.pack("<IIQ", 9, element, length) + body


def gguf_bytes(
    keys: Mapping[str, bytes] | list[tuple[str, bytes]],
    tensors: list[tuple[str, tuple[int, ...], int, int]] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
    alignment: int = 32,
    magic: bytes = b"GGUF",
) -> bytes:
    """A GGUF file from raw parts. `tensors`: (name, dimensions fastest first, type, offset)."""
    pairs = list(keys.items()) if isinstance(keys, Mapping) else keys
    infos = tensors or []
    out = magic + struct.pack(
        "<IQQ",
        version,
        len(infos) if tensor_count is None else tensor_count,
        len(pairs) if key_count is None else key_count,
    )
    for key, value in pairs:
        out += gguf_string(key) + value
    for name, shape, kind, offset in infos:
        out += gguf_string(name) + struct.pack("<I", len(shape))
        out += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)
    return out + bytes(-len(out) % alignment) + data


_ARCH = {"gemma": "gemma", "gemma2": "gemma2", "gemma3_text": "gemma3"}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}


def to_gguf(folder: Path, target: Path, qtype: str = "F32") -> Path:
    """Write a tiny checkpoint as GGUF, matrices in `qtype` (F32, F16, BF16, Q4_0 .. Q8_0)."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    arch = _ARCH.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(target, arch)
    _gguf_config(writer, arch, config)
    _gguf_tokenizer(writer, folder, config)
    kind = gguf.GGMLQuantizationType[qtype]
    for name, tensor in state(folder).items():
        value = tensor.float().numpy()
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            value = value + np.float32(1.0)
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            value = permute(value, config[key])
        if value.ndim == 1 or qtype == "F32":
            writer.add_tensor(gguf_name(name, arch), value)
        else:
            blocks = gguf.quants.quantize(value, kind)
            writer.add_tensor(gguf_name(name, arch), blocks, raw_dtype=kind)
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, config["head_dim"]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def gguf_name(name: str, arch: str) -> str:
    short = name.removeprefix("model.")
    if short.startswith("layers."):
        _, index, rest = short.split(".", 2)
        if rest == "post_attention_layernorm.weight":
            plain = arch in ("gemma", "llama", "qwen2", "qwen3")
            return f"blk.{index}." + ("ffn_norm.weight" if plain else "post_attention_norm.weight")
        return f"blk.{index}.{_LAYER[rest]}"
    table = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
    return table.get(short, "output.weight")


def permute(value: Array, heads: int) -> Array:
    """Llama's rows as GGUF stores them."""
    rows = value.shape[0]
    shaped = value.reshape(heads, 2, rows // heads // 2, *value.shape[1:])
    return np.ascontiguousarray(shaped.swapaxes(1, 2).reshape(value.shape))


def llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> Array:
    """rope_freqs.weight: by how much each rotary frequency is divided."""
    result = []
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for i in range(0, head_dim, 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wave < original / high:
            result.append(1.0)
        elif wave > original / low:
            result.append(rope["factor"])
        else:
            smooth = (original / wave - low) / (high - low)
            result.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(result, np.float32)


def _gguf_config(writer: Any, arch: str, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_name("Tiny " + arch)
    writer.add_license("apache-2.0")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        import gguf

        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if arch in ("gemma2", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _gguf_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    side = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    added = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    tokens = {i: t for t, i in tokenizer["model"]["vocab"].items()} | added
    ordered = [tokens.get(i, f"[PAD{i}]") for i in range(config["vocab_size"])]
    score_style = tokenizer["model"]["byte_fallback"]
    kinds = []
    for i, token in enumerate(ordered):
        is_byte = score_style and len(token) == 6 and token.startswith("<0x")
        kinds.append(3 if i in added else 5 if i not in tokens else 6 if is_byte else 1)
    writer.add_tokenizer_model("llama" if score_style else "gpt2")
    writer.add_token_list(ordered)
    writer.add_token_types(kinds)
    if score_style:
        writer.add_tokenizer_pre("default")
        writer.add_token_scores([float(-i) for i in range(len(ordered))])
        writer.add_add_space_prefix(False)
    else:
        pre = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2"}[config["model_type"]]
        digits = tokenizer["pre_tokenizer"]["pretokenizers"][0]["type"] == "Digits"
        writer.add_tokenizer_pre("smollm" if digits else pre)
        writer.add_token_merges(
            [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
        )
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos if isinstance(eos, int) else eos[-1])
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])
    template = folder / "chat_template.jinja"
    text = template.read_text(encoding="utf-8") if template.exists() else side["chat_template"]
    writer.add_chat_template(text)
    if "add_bos_token" in side:
        writer.add_add_bos_token(side["add_bos_token"])


LAYER_ATTRIBUTES = {
    Role.ATTN_NORM: "input_layernorm.weight",
    Role.Q: "self_attn.q_proj.weight",
    Role.K: "self_attn.k_proj.weight",
    Role.V: "self_attn.v_proj.weight",
    Role.O: "self_attn.o_proj.weight",
    Role.Q_BIAS: "self_attn.q_proj.bias",
    Role.K_BIAS: "self_attn.k_proj.bias",
    Role.V_BIAS: "self_attn.v_proj.bias",
    Role.Q_NORM: "self_attn.q_norm.weight",
    Role.K_NORM: "self_attn.k_norm.weight",
    Role.GATE: "mlp.gate_proj.weight",
    Role.UP: "mlp.up_proj.weight",
    Role.DOWN: "mlp.down_proj.weight",
}


def attribute(role: Role, layer: int, *, sandwich: bool) -> str:
    """The parameter of the transformers model that has this role."""
    if layer == MODEL_LAYER:
        return {
            Role.EMBED: "model.embed_tokens.weight",
            Role.HEAD: "lm_head.weight",
            Role.FINAL_NORM: "model.norm.weight",
        }[role]
    norms = {Role.FFN_NORM: "post_attention_layernorm.weight"}
    if sandwich:
        norms = {
            Role.POST_ATTN_NORM: "post_attention_layernorm.weight",
            Role.FFN_NORM: "pre_feedforward_layernorm.weight",
            Role.POST_FFN_NORM: "post_feedforward_layernorm.weight",
        }
    return f"model.layers.{layer}." + {**LAYER_ATTRIBUTES, **norms}[role]
