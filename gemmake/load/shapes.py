"""Models without weights: planned from a config alone, or from a published shape by its name.

The shapes stand for the classes of 1, 2 and 4 billion weights (benchmarks/model_classes.md). Sizes
are those of the published configs; a test holds the number of weights against the published one.
A config has no tokenizer, so that its tables are a stand-in of their usual size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemmake.errors import CheckpointError
from gemmake.load.config import parse_config
from gemmake.load.families import ArchConfig, Wanted, expected_tensors, model_spec
from gemmake.load.folder import CONFIG_LIMIT
from gemmake.load.generation import clean_name
from gemmake.load.names import HEAD
from gemmake.load.source import base_name, read_json
from gemmake.model import (
    MODEL_LAYER,
    FloatRows,
    Generation,
    Model,
    Role,
    TensorRef,
    TokenizerSource,
)

#: Bytes of a tokenizer's tables for a row of the vocabulary, at most: Gemma 3 and Llama 3 have 31,
#: SmolLM2 and Qwen 3 have 21.
TOKENIZER_ROW = 31

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """A published model's sizes. `weights` is their published number."""

    config: Config
    weights: int


def _gemma(version: str, **sizes: Any) -> Config:
    kinds = {"1": "gemma", "2": "gemma2", "3": "gemma3_text"}
    return {"model_type": kinds[version], "head_dim": 256, **sizes}


_LLAMA3 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}
_QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}

SHAPES: Mapping[str, Shape] = {
    "gemma-3-1b": Shape(
        _gemma(
            "3",
            num_hidden_layers=26,
            hidden_size=1152,
            intermediate_size=6912,
            num_attention_heads=4,
            num_key_value_heads=1,
            vocab_size=262144,
            max_position_embeddings=32768,
            sliding_window=512,
        ),
        999_885_952,
    ),
    "llama-3.2-1b": Shape(
        {
            **_LLAMA3,
            "num_hidden_layers": 16,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
        1_235_814_400,
    ),
    "qwen3-1.7b": Shape(
        {
            **_QWEN3,
            "num_hidden_layers": 28,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 16,
        },
        1_720_574_976,
    ),
    "gemma-2-2b": Shape(
        _gemma(
            "2",
            num_hidden_layers=26,
            hidden_size=2304,
            intermediate_size=9216,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=256000,
            max_position_embeddings=8192,
            sliding_window=4096,
        ),
        2_614_341_888,
    ),
    "gemma-3-4b": Shape(
        _gemma(
            "3",
            num_hidden_layers=34,
            hidden_size=2560,
            intermediate_size=10240,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=262208,
            max_position_embeddings=131072,
            sliding_window=1024,
            rope_scaling={"rope_type": "linear", "factor": 8.0},
        ),
        3_880_263_168,
    ),
    "qwen3-4b": Shape(
        {
            **_QWEN3,
            "num_hidden_layers": 36,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
        },
        4_022_468_096,
    ),
}

#: The classes of billions of weights, and the shapes that stand for them.
CLASSES: Mapping[str, tuple[str, ...]] = {
    "1B": ("gemma-3-1b", "llama-3.2-1b"),
    "2B": ("qwen3-1.7b", "gemma-2-2b"),
    "4B": ("gemma-3-4b", "qwen3-4b"),
}


def shape_model(name: str) -> Model:
    """The model of a published shape."""
    return _model(parse_config(SHAPES[name].config, name), name)


def config_model(path: Path) -> Model:
    """The model of a config.json. CheckpointError for one that is not supported."""
    file = base_name(path)
    raw = read_json(path, CONFIG_LIMIT)
    given = str(raw.get("_name_or_path") or path.absolute().parent.name)
    name = clean_name(given.rstrip("/").rpartition("/")[2])
    return _model(parse_config(raw, file), name or file)


def _model(config: ArchConfig, name: str) -> Model:
    if config.vocab is None:
        raise CheckpointError(f"{name}: the config has no vocab_size; add it, or name a checkpoint")
    tied = config.tied is not False
    wanted = list(expected_tensors(config))
    if not tied:
        wanted.append(Wanted(MODEL_LAYER, Role.HEAD, HEAD, (0, config.hidden)))
    tensors = {(w.layer, w.role): _ref(w, config.vocab, name) for w in wanted}
    spec = model_spec(config, config.vocab, tied, Generation(()), name)
    note = (
        f"tables of the tokenizer are taken to have {TOKENIZER_ROW} bytes a row of the vocabulary"
    )
    return Model(spec, tensors, TokenizerSource({}), notes=(*config.notes, note))


def _ref(wanted: Wanted, vocab: int, name: str) -> TensorRef:
    def read(_first: int, _count: int) -> FloatRows:
        raise CheckpointError(f"{name}: has no weights; name a checkpoint to compile")

    rows = 1 if len(wanted.shape) == 1 else wanted.shape[0] or vocab
    return TensorRef(wanted.role, wanted.layer, wanted.name, rows, wanted.shape[-1], "F32", read)


def stand_in(model: Model) -> bytes:
    """Tables of a tokenizer that is not there."""
    return bytes(TOKENIZER_ROW * model.spec.vocab_rows)
