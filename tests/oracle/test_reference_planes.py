"""The head in two planes: the engine's candidates are those of the NumPy rule, its tokens those of
the full head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gemrun import GemRunContext
from reference import engine, formats, planes, sampler
from reference.records import Image

PROMPTS = ("hello there", "The motor", "a")
MARGIN = 6.0  # GR_MARGIN


@pytest.mark.parametrize("family", ["gemma3", "llama3", "qwen3"])
def test_candidates_are_those_of_the_rule(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], family: str
) -> None:
    options = ("--quantization", "int4", "--kv-cache-size", "128")
    path = artifact_cache(tiny_checkpoint(family), *options)
    image = Image.load(path)
    head = image.tensors[int(image.conf["tens_head"])]
    matrix = formats.unpack(head, image.segments, image.data)
    usable = np.ones(matrix.rows, bool)
    usable[list(sampler.unused_rows(image))] = False
    for kernel in engine.kernels():
        with GemRunContext(path, head="two-plane", kernel=kernel, threads=2) as context:
            for text in PROMPTS:
                context.reset_kv_cache()
                context.prefill(context.tokenize(text, bos=True))
                hidden = np.array(context.embedding(), np.float32)
                full = np.array(context.logits(), np.float32)
                for keep in (1, 5, 40):
                    want = planes.screen(matrix, hidden, keep, MARGIN, usable)
                    settings = {"temperature": 0.0} if keep == 1 else {"top_k": keep}
                    stats = context.infer(text, max_tokens=1, **settings).stats
                    assert stats.head_candidates == want.candidates, (kernel, text, keep)
                    kth = np.sort(full[usable])[::-1][keep - 1]
                    assert want.computed[usable & (full >= kth)].all(), (kernel, text, keep)
