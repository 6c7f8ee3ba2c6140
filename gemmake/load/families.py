"""The dense families: what a config comes down to, and the model that follows from it.

Every loader reduces its config to an `ArchConfig`. From there on nothing depends on the file form:
`layer_specs` makes the records, `expected_tensors` the full list of tensors with their shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gemmake.model import (
    MODEL_LAYER,
    Act,
    Block,
    Generation,
    LayerSpec,
    ModelSpec,
    Role,
    RopeSpec,
)


@dataclass(frozen=True)
class Family:
    """What is fixed for a family (architectures.md, section 3)."""

    name: str
    block: Block = Block.PRE
    act: Act = Act.SILU
    scaled_embedding: bool = False  # embedding times sqrt(hidden)
    stored_minus_one: bool = False  # Hugging Face files hold w of an effective weight 1 + w
    qk_norm: bool = False
    qkv_bias: bool = False
    tied: bool | None = None  # what an absent tie_word_embeddings means; None: see the tensors


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "gemma1", act=Act.GELU_TANH, scaled_embedding=True, stored_minus_one=True, tied=True
        ),
        Family(
            "gemma2",
            block=Block.SANDWICH,
            act=Act.GELU_TANH,
            scaled_embedding=True,
            stored_minus_one=True,
            tied=True,
        ),
        Family(
            "gemma3",
            block=Block.SANDWICH,
            act=Act.GELU_TANH,
            scaled_embedding=True,
            stored_minus_one=True,
            qk_norm=True,
            tied=True,
        ),
        Family("llama"),
        Family("qwen2", qkv_bias=True),
        Family("qwen3", qk_norm=True),
    )
}


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer, which may differ from layer to layer."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    window: int  # 0 = all
    rope: RopeSpec
    score_scale: float


@dataclass(frozen=True)
class ArchConfig:
    """A config in one form, whatever dialect it was written in. All sizes are checked, > 0."""

    family: Family
    hidden: int
    context: int
    norm_eps: float
    layers: tuple[LayerShape, ...]
    vocab: int | None = None  # rows the config claims; the embedding itself decides
    tied: bool | None = None  # None: not said
    attn_softcap: float | None = None
    final_softcap: float | None = None
    multimodal: bool = False  # tensors of a vision tower are expected and dropped
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """A tensor that the architecture has: its place, canonical name and shape.

    `shape` is (rows, cols) or (cols,); rows of 0 stand for the vocabulary, which the file decides.
    """

    layer: int
    role: Role
    name: str
    shape: tuple[int, ...]
    is_norm: bool = False


def layer_specs(config: ArchConfig) -> tuple[tuple[LayerSpec, ...], tuple[RopeSpec, ...]]:
    """The layer records and the distinct rotary tables, in the order of their first use."""
    ropes: list[RopeSpec] = []
    layers = []
    for shape in config.layers:
        if shape.rope not in ropes:
            ropes.append(shape.rope)
        layers.append(
            LayerSpec(
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                ffn=shape.ffn,
                rope=ropes.index(shape.rope),
                window=shape.window,
                block=config.family.block,
                act=config.family.act,
                score_scale=shape.score_scale,
                attn_softcap=config.attn_softcap,
                qk_norm=config.family.qk_norm,
                qkv_bias=config.family.qkv_bias,
            )
        )
    return tuple(layers), tuple(ropes)


def model_spec(
    config: ArchConfig,
    vocab_rows: int,
    tied: bool,
    turns: Generation,
    name: str,
    licence: str = "",
) -> ModelSpec:
    """Sizes and constants of the model of a config."""
    layers, ropes = layer_specs(config)
    scale = float(np.float32(np.sqrt(config.hidden))) if config.family.scaled_embedding else 1.0
    return ModelSpec(
        family=config.family.name,
        name=name,
        hidden=config.hidden,
        vocab_rows=vocab_rows,
        trained_context=config.context,
        norm_eps=config.norm_eps,
        embed_scale=scale,
        tied=tied,
        layers=layers,
        ropes=ropes,
        generation=turns,
        final_softcap=config.final_softcap,
        licence=licence,
    )


def expected_tensors(config: ArchConfig) -> Iterator[Wanted]:
    """Every tensor of the architecture except the head, in execution order."""
    hidden = config.hidden
    yield Wanted(MODEL_LAYER, Role.EMBED, "embed_tokens.weight", (0, hidden))
    for index, shape in enumerate(config.layers):
        yield from _attention(config, index, shape)
        yield from _feed_forward(config, index, shape)
    yield Wanted(MODEL_LAYER, Role.FINAL_NORM, "norm.weight", (hidden,), is_norm=True)


def _attention(config: ArchConfig, index: int, shape: LayerShape) -> Iterator[Wanted]:
    prefix = f"layers.{index}."
    hidden, hd = config.hidden, shape.head_dim
    q_rows, kv_rows = shape.heads * hd, shape.kv_heads * hd
    yield Wanted(index, Role.ATTN_NORM, prefix + "input_layernorm.weight", (hidden,), is_norm=True)
    attn = prefix + "self_attn."
    for role, letter, rows in (
        (Role.Q, "q", q_rows),
        (Role.K, "k", kv_rows),
        (Role.V, "v", kv_rows),
    ):
        yield Wanted(index, role, f"{attn}{letter}_proj.weight", (rows, hidden))
    yield Wanted(index, Role.O, attn + "o_proj.weight", (hidden, q_rows))
    if config.family.qkv_bias:
        yield Wanted(index, Role.Q_BIAS, attn + "q_proj.bias", (q_rows,))
        yield Wanted(index, Role.K_BIAS, attn + "k_proj.bias", (kv_rows,))
        yield Wanted(index, Role.V_BIAS, attn + "v_proj.bias", (kv_rows,))
    if config.family.qk_norm:
        yield Wanted(index, Role.Q_NORM, attn + "q_norm.weight", (hd,), is_norm=True)
        yield Wanted(index, Role.K_NORM, attn + "k_norm.weight", (hd,), is_norm=True)


def _feed_forward(config: ArchConfig, index: int, shape: LayerShape) -> Iterator[Wanted]:
    """Norms and matrices after attention. One name, two places: `post_attention_layernorm` is the
    norm before the feed-forward in the pre block, and on the attention's output in the sandwich."""
    prefix = f"layers.{index}."
    hidden, ffn = config.hidden, shape.ffn
    norms: tuple[tuple[Role, str], ...]
    if config.family.block is Block.SANDWICH:
        norms = (
            (Role.POST_ATTN_NORM, "post_attention_layernorm"),
            (Role.FFN_NORM, "pre_feedforward_layernorm"),
            (Role.POST_FFN_NORM, "post_feedforward_layernorm"),
        )
    else:
        norms = ((Role.FFN_NORM, "post_attention_layernorm"),)
    for role, name in norms:
        yield Wanted(index, role, f"{prefix}{name}.weight", (hidden,), is_norm=True)
    yield Wanted(index, Role.GATE, prefix + "mlp.gate_proj.weight", (ffn, hidden))
    yield Wanted(index, Role.UP, prefix + "mlp.up_proj.weight", (ffn, hidden))
    yield Wanted(index, Role.DOWN, prefix + "mlp.down_proj.weight", (hidden, ffn))
