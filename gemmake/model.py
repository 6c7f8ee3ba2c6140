"""The checkpoint as gemmake sees it: a frozen description plus tensors that stream.

A `Model` is what the loaders make and the passes transform. It holds no weights: a `TensorRef`
names where a tensor's rows come from and yields them as float32 blocks, so that a compile never
holds more than a few blocks of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

FloatRows = npt.NDArray[np.float32]


class Role(IntEnum):
    """What a tensor is for. Values are those of the TENS record and never change."""

    EMBED = 1  # [vocab rows, hidden]
    HEAD = 2  # [vocab rows, hidden]
    FINAL_NORM = 3  # [hidden]
    ATTN_NORM = 10  # [hidden], before attention
    Q = 11  # [heads * head_dim, hidden]
    K = 12  # [kv heads * head_dim, hidden]
    V = 13  # [kv heads * head_dim, hidden]
    O = 14  # noqa: E741  [hidden, heads * head_dim]; the field's own name
    Q_BIAS = 15  # [heads * head_dim]
    K_BIAS = 16  # [kv heads * head_dim]
    V_BIAS = 17  # [kv heads * head_dim]
    Q_NORM = 18  # [head_dim]
    K_NORM = 19  # [head_dim]
    POST_ATTN_NORM = 20  # [hidden], on the attention output (sandwich block only)
    FFN_NORM = 21  # [hidden], before the feed-forward
    POST_FFN_NORM = 22  # [hidden], on the feed-forward output (sandwich block only)
    GATE = 23  # [ffn, hidden]; checkpoint only, merged into GATE_UP by the pack pass
    UP = 24  # [ffn, hidden]; checkpoint only
    GATE_UP = 25  # artifact only: panels of gate and up alternate
    DOWN = 26  # [hidden, ffn]


NORM_ROLES = frozenset(
    {
        Role.FINAL_NORM,
        Role.ATTN_NORM,
        Role.Q_NORM,
        Role.K_NORM,
        Role.POST_ATTN_NORM,
        Role.FFN_NORM,
        Role.POST_FFN_NORM,
    }
)
MODEL_LAYER = -1  # the layer of tensors that belong to no layer


class Block(IntEnum):
    """Where the norms of a layer sit (architectures.md, section 3)."""

    PRE = 0
    SANDWICH = 1


class Act(IntEnum):
    """Activation of the gated feed-forward."""

    GELU_TANH = 0
    SILU = 1


@dataclass(frozen=True)
class RopeSpec:
    """One rotary table. `kind`: default, linear (factor) or llama3 (factor, low, high, original).

    Every pair (i, i + dims / 2) rotates; `dims` is the head dimension here.
    """

    theta: float
    dims: int
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0


@dataclass(frozen=True)
class LayerSpec:
    """One dense transformer layer: attention and gated feed-forward."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    rope: int  # index into ModelSpec.ropes
    window: int  # visible keys, itself included; 0 = all
    block: Block
    act: Act
    score_scale: float
    attn_softcap: float | None = None  # absent is not 0
    qk_norm: bool = False
    qkv_bias: bool = False


@dataclass(frozen=True)
class Generation:
    """Sampling defaults and end-of-turn ids, the union of every config that names one."""

    stop_ids: tuple[int, ...]  # ascending, without repeats
    bos_id: int | None = None
    pad_id: int | None = None
    add_bos: bool = False  # raw prompts start with bos
    temperature: float = 0.3
    top_k: int = 64
    top_p: float = 0.85


@dataclass(frozen=True)
class TokenizerSource:
    """The checkpoint's own tokenizer, in the form of a parsed `tokenizer.json`.

    A GGUF vocabulary is turned into the same form by the loader, so that one compiler serves both.
    """

    tokenizer_json: Mapping[str, Any]
    config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json, may be empty
    chat_template: str | None = None  # Jinja text, never executed outside the sandbox


@dataclass(frozen=True)
class TensorRef:
    """A checkpoint tensor. `read(first, count)` gives rows as float32 [count, cols].

    Vectors are one row. Reading is pure: the same rows give the same bits every time. Values are
    as the checkpoint means them for a plain kernel except `norm_offset`, which is still to be added
    (1.0 for norms stored as w with an effective weight of 1 + w, else 0.0).
    """

    role: Role
    layer: int  # MODEL_LAYER for embed, head and final norm
    name: str  # the name in the checkpoint, for messages
    rows: int
    cols: int
    dtype: str  # storage type in the checkpoint: F32, F16, BF16, Q4_1, ..
    read: Callable[[int, int], FloatRows] = field(repr=False, compare=False)
    norm_offset: float = 0.0


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and constants of a model."""

    family: str  # gemma1 gemma2 gemma3 llama qwen2 qwen3
    name: str  # a short name without path parts, e.g. "SmolLM2-135M-Instruct"
    hidden: int
    vocab_rows: int  # rows of the embedding
    trained_context: int
    norm_eps: float
    embed_scale: float  # 1.0, or float32(sqrt(hidden)) for Gemma
    tied: bool  # the head is the embedding
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    generation: Generation
    final_softcap: float | None = None
    licence: str = ""


@dataclass(frozen=True)
class InputFile:
    """A named, hashed input of the compile."""

    name: str  # base name
    size: int  # bytes
    sha256: str  # hex


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint: sizes, tensors that stream, tokenizer and provenance."""

    spec: ModelSpec
    tensors: Mapping[tuple[int, Role], TensorRef]  # key: (layer, role)
    tokenizer: TokenizerSource
    inputs: tuple[InputFile, ...] = ()
    notes: tuple[str, ...] = ()  # sentences for the user: dropped tensors, ties that differ, ..
