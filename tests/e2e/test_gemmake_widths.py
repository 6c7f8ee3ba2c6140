"""Sizes that are no multiples of the group of 32 or the panel of 16, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compiling
import tiny
from gemmake.options import Effort, Int4Format, KvType, Quantization
from reference import interp
from reference.floatmath import bits
from reference.records import Image

TOLERANCE = 2e-4  # of the largest logit
ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
THREE_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1}
SIZES: dict[str, dict[str, Any]] = {
    "hidden48": {"hidden_size": 48, "head_dim": 24, "intermediate_size": 80},
    "hidden36": {"hidden_size": 36, "head_dim": 12, "intermediate_size": 50},
    "hidden31": {"hidden_size": 31, "head_dim": 20, "intermediate_size": 33, **ONE_HEAD},
    "wide": {"hidden_size": 33, "head_dim": 96, "intermediate_size": 17, **THREE_HEADS},
}


def odd(folder: Path, target: Path, family: str, size: str) -> Path:
    """Qwen2 has no head_dim of its own: hidden / heads; its hidden size follows."""
    changes = dict(SIZES[size])
    if family == "qwen2":
        changes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        changes["hidden_size"] = 2 * changes.pop("head_dim")
    return compiling.resized(folder, target, **changes)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", ["llama3", "gemma3", "qwen2"])
def test_odd_widths_agree_with_transformers(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str, size: str
) -> None:
    import torch

    folder = odd(tiny_checkpoint(family), tmp_path / "model", family, size)
    path = tmp_path / "none.gembin"
    compiling.compiled(folder, path, quantization=Quantization.NONE, kv_type=KvType.DENSE)
    assert compiling.problems(path) == []
    with torch.inference_mode():
        want = tiny.reference(folder)(torch.tensor([compiling.IDS])).logits[0].float().numpy()
    got = compiling.logits(path)
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "options",
    [
        {"effort": Effort.FULL},
        {"int4_format": Int4Format.Q4RAW},
        {"quantization": Quantization.INT8},
    ],
    ids=["q4h", "q4raw", "int8"],
)
def test_odd_widths_quantise_and_equal_the_interpreter(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, size: str, options: dict[str, Any]
) -> None:
    folder = odd(tiny_checkpoint("llama3"), tmp_path / "model", "llama3", size)
    path = tmp_path / "odd.gembin"
    compiling.compiled(folder, path, **options)
    assert compiling.problems(path) == []
    ids = compiling.IDS[:40]
    want = interp.Interpreter(Image.load(path)).logits(ids)
    assert (bits(compiling.logits(path, ids)) == bits(want)).all()
