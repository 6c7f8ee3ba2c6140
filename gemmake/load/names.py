"""Tensor names: what a file calls a tensor, and what it is called here.

Canonical names are those of architectures.md section 7 without a prefix: `embed_tokens.weight`,
`layers.N.*`, `norm.weight`, `lm_head.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from gemmake.errors import CheckpointError
from gemmake.load.source import name_list

HEAD = "lm_head.weight"

# Prefixes of the text model, tried in this order.
_PREFIXES = ("language_model.model.", "model.language_model.", "model.", "")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
# Tensors that carry no weight of the text model.
_ALWAYS_DROPPED = re.compile(r"rotary_emb\.inv_freq$")
_VISION = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")

_GGUF_GLOBAL = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": HEAD,
}
_GGUF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_GGUF_PRE_NORMS = {"ffn_norm.weight": "post_attention_layernorm.weight"}
_GGUF_SANDWICH_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_GGUF_BLOCK = re.compile(r"^blk\.(0|[1-9][0-9]{0,5})\.(.+)$")


def canonical_hf(
    names: Collection[str], *, multimodal: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """(canonical name -> name in the file, names that are dropped).

    A name that is no part of the text model keeps its own name, so that it shows up as extra.
    CheckpointError when two names mean the same tensor.
    """
    prefix = _prefix(names)
    mapped: dict[str, str] = {}
    dropped = []
    for name in sorted(names):
        if _ALWAYS_DROPPED.search(name) or (multimodal and _VISION.match(name)):
            dropped.append(name)
            continue
        short = HEAD if name in _HEADS else name
        if prefix and name.startswith(prefix):
            short = name[len(prefix) :]
        if short in mapped:
            raise CheckpointError(
                f"{name_list([name, mapped[short]])}: two tensors for the same place; "
                "the checkpoint is damaged"
            )
        mapped[short] = name
    return mapped, tuple(dropped)


def _prefix(names: Collection[str]) -> str:
    """The prefix of the text model: the first one under which the final norm is found."""
    for prefix in _PREFIXES:
        if prefix + "norm.weight" in names:
            return prefix
    for prefix in _PREFIXES:  # the final norm itself may be what is missing
        if any(name.startswith(prefix + "layers.") for name in names):
            return prefix
    return "model."


def canonical_gguf(names: Iterable[str], *, sandwich: bool) -> dict[str, str]:
    """canonical name -> name in the GGUF file. Unknown names keep their own name."""
    layer = {**_GGUF_LAYER, **(_GGUF_SANDWICH_NORMS if sandwich else _GGUF_PRE_NORMS)}
    mapped = {}
    for name in names:
        match = _GGUF_BLOCK.match(name)
        if match and match[2] in layer:
            mapped[f"layers.{match[1]}.{layer[match[2]]}"] = name
        else:
            mapped[_GGUF_GLOBAL.get(name, name)] = name
    return mapped
