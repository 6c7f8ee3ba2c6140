"""Compiled tiny checkpoints of every family: engine against interpreter, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tiny
from reference import engine, interp
from reference.floatmath import F32, bits
from reference.records import Image

LENGTH = 75
IDS = [int(i) for i in np.random.default_rng(31).integers(3, 480, LENGTH)]
EVERYWHERE = (("none", "dense"), ("int4", "int8"), ("int8", "int8"))
ELSEWHERE = (("none", "int8"), ("int4", "dense"), ("int8", "dense"))
CASES = [(f, *c) for f in tiny.FAMILIES for c in EVERYWHERE]
CASES += [(f, *c) for f in ("gemma2", "qwen3") for c in ELSEWHERE]
RUNS = ((1, 128), (2, 7), (3, 32), (8, 1))  # threads, tokens of a prefill step


def compiled(cache: Callable[..., Path], folder: Path, weights: str, kv: str) -> Path:
    options = ("--quantization", weights, "--kv-cache-type", kv, "--kv-cache-size", "128")
    return cache(folder, *options)


@pytest.mark.parametrize(("family", "weights", "kv"), CASES)
def test_compiled_checkpoint_gives_the_interpreters_logits(
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    family: str,
    weights: str,
    kv: str,
) -> None:
    path = compiled(artifact_cache, tiny_checkpoint(family), weights, kv)
    want: F32 = interp.Interpreter(Image.load(path)).logits(IDS)
    for kernel in engine.kernels():
        for threads, chunk in RUNS:
            config = {"kernel": kernel, "threads": threads, "prefill_batch_size": chunk}
            with engine.opened(path, **config) as e:
                got = e.evaluate(IDS)
            wrong = np.argwhere(bits(got) != bits(want))
            assert wrong.size == 0, (config, len(wrong), wrong[0].tolist())


@pytest.mark.parametrize("family", ["gemma3", "llama3"])
def test_stored_vectors_are_those_of_the_interpreter(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], family: str
) -> None:
    path = compiled(artifact_cache, tiny_checkpoint(family), "int4", "int8")
    image = Image.load(path)
    reader = interp.Interpreter(image)
    for record in image.tests:
        prompt = record["prompt"][: int(record["prompt_count"])].tolist()
        steps = record["steps"][: int(record["step_count"])].tolist()
        assert interp.vector_digest(reader, prompt, steps) == int(record["digest"])
