"""The head in two planes gives the tokens and the logits of the full head."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from gemrun import GemRunContext
from gemrun.errors import CallError
from reference import engine

PROMPT = "The controller reports the temperature of the motor"
REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 3},
    {"temperature": 1.2, "top_k": 64, "min_p": 0.02, "seed": 4},
    {"temperature": 0.0, "repetition_penalty": 1.4, "banned": [5, 17], "bias": {33: 2.5}},
    {"temperature": 0.8, "top_k": 0, "seed": 5},  # the full head, whatever is asked for
)


def answers(path: Path, count: int, requests: Any = REQUESTS, **config: Any) -> list[list[int]]:
    with GemRunContext(path, **config) as context:
        made = []
        for request in requests:
            tokens = context.infer(PROMPT, count, ignore_stop_ids=True, **request)
            made.append(list(tokens))
        return made


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tokens_are_equal(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], family: str
) -> None:
    options = ("--quantization", "int4", "--kv-cache-size", "128")
    path = artifact_cache(tiny_checkpoint(family), *options)
    want = answers(path, 24, head="full")
    kernels = engine.kernels()
    for kernel, threads in [*((name, 2) for name in kernels), (kernels[-1], 1), (kernels[-1], 3)]:
        got = answers(path, 24, head="two-plane", kernel=kernel, threads=threads)
        assert got == want, (kernel, threads)
    assert answers(path, 24) == want


def test_tokens_of_a_real_model_are_equal(
    smollm2_gguf: Path, artifact_cache: Callable[..., Path]
) -> None:
    path = artifact_cache(smollm2_gguf, "--effort", "fast", "--kv-cache-size", "256")
    requests = REQUESTS[:2]
    want = answers(path, 150, requests, head="full")
    assert answers(path, 150, requests, head="two-plane") == want
    assert answers(path, 150, requests) == want
    with GemRunContext(path, head="two-plane") as context:
        stats = context.infer(PROMPT, 20, temperature=0.0).stats
        assert 1 <= stats.head_candidates <= stats.head_candidates_max < 49152


def test_logits_after_it_are_all_there(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    path = artifact_cache(tiny_checkpoint("gemma3"), "--kv-cache-size", "128")
    seen = []
    for head in ("full", "two-plane"):
        with GemRunContext(path, head=head) as context:
            context.infer(PROMPT, 5, temperature=0.0)
            sampled = context.sample(temperature=1.0, top_k=0, seed=9)
            seen.append((context.logits(), context.embedding(), sampled))
            context.infer(PROMPT, 5, temperature=0.0)
            assert context.logits() == seen[-1][0]
            assert context.run_tests() > 0
    assert seen[0] == seen[1]


def test_two_planes_are_the_default_of_greedy_runs(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    path = artifact_cache(tiny_checkpoint("gemma3"), "--kv-cache-size", "128")
    sampled: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "seed": 3}
    screened = {}
    for head in ("full", "two-plane", None):
        with GemRunContext(path, **({"head": head} if head else {})) as context:
            greedy = context.infer(PROMPT, 5, temperature=0.0).stats
            drawn = context.infer(PROMPT, 5, **sampled).stats
            screened[head] = (greedy.head_candidates_max > 0, drawn.head_candidates_max > 0)
    assert screened == {"full": (False, False), "two-plane": (True, True), None: (True, False)}


def test_options(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], gemrun_cli: Path
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), "--kv-cache-size", "128")
    with pytest.raises(CallError, match="head: 'half' is out of range; use 'full' or 'two-plane'"):
        GemRunContext(path, head="half")
    command = [gemrun_cli, path, "--prompt", "a", "--max-tokens", "4", "--json"]
    shown = {}
    for head in ("full", "two-plane"):
        done = subprocess.run([*command, "--head", head], capture_output=True, text=True)
        shown[head] = json.loads(done.stdout)
    assert shown["full"]["tokens"] == shown["two-plane"]["tokens"]
    assert shown["full"]["head_candidates_max"] == 0 < shown["two-plane"]["head_candidates_max"]
    done = subprocess.run([*command, "--head", "half"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "gemrun: --head: half is unknown; use full or two-plane" in done.stderr
