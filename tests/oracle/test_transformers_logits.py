"""Engine without quantisation against transformers in float32, for every tiny family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from reference import engine, sampler
from reference.floatmath import F32
from reference.records import Image

LENGTH = 70  # eight windows and more
TOLERANCE = 2e-4  # of the largest logit
OPTIONS = ("--quantization", "none", "--kv-cache-type", "dense", "--kv-cache-size", "128")
PROMPT, STEPS = 12, 24


def ids_for(family: str) -> list[int]:
    rng = np.random.default_rng(len(family))
    return [int(i) for i in rng.integers(3, 480, LENGTH)]


def reference_logits(model: Any, ids: Sequence[int]) -> F32:
    import torch

    with torch.inference_mode():
        logits: F32 = model(torch.tensor([list(ids)])).logits[0].float().numpy()
    return logits


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_float_logits_agree_with_transformers(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], family: str
) -> None:
    folder = tiny_checkpoint(family)
    ids = ids_for(family)
    want = reference_logits(tiny.reference(folder), ids)
    with engine.opened(artifact_cache(folder, *OPTIONS)) as e:
        got = e.evaluate(ids)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_ids_equal_those_of_transformers(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], family: str
) -> None:
    folder = tiny_checkpoint(family)
    path = artifact_cache(folder, *OPTIONS)
    unused = sorted(sampler.unused_rows(Image.load(path)))
    model = tiny.reference(folder)
    ids = ids_for(family)[:PROMPT]
    for _ in range(STEPS):
        last = reference_logits(model, ids)[-1].copy()
        last[unused] = -np.inf  # rows without a token; transformers would give them out
        ids.append(int(last.argmax()))
    with engine.opened(path, threads=2) as e:
        assert e.greedy(ids[:PROMPT], STEPS) == ids[PROMPT:]
