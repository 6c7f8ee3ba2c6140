"""Speculation by prompt lookup: the same ids, text, logits and cache as without, in fewer steps."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import tiny
from gemrun import GemRunContext
from gemrun.errors import CallError
from gemrun.format.reader import read_artifact
from gemrun.format.units import with_units
from reference import engine

LOG = "pump 3 on; valve 4 shut; pump 3 on; valve 4 shut; pump 3 on; valve"
REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.2, "top_k": 4, "seed": 1},
    {"temperature": 1.5, "top_k": 64, "seed": 2},  # drafts are hardly ever right
    {"temperature": 0.0, "repetition_penalty": 1.3, "banned": [5, 17], "bias": {33: 2.5}},
    {"temperature": 0.7, "top_k": 0, "min_p": 0.01, "seed": 3},
)


def runs(path: Path, count: int, speculate: int, **config: Any) -> list[tuple[Any, ...]]:
    """What a caller can see of every request, one after the other in one context."""
    seen = []
    with GemRunContext(path, **config) as context:
        for request in REQUESTS:
            made = context.infer(LOG, count, ignore_stop_ids=True, speculate=speculate, **request)
            changed = "banned" in request  # then there are no logits to compare
            logits = None if changed else context.logits()
            position = context.stats().kv_used
            further = [context.decode(made[-1]), context.sample(temperature=0.0)]
            seen.append((tuple(made), made.text, made.finish_reason, logits, position, further))
    return seen


def drafts(path: Path, count: int, speculate: int, prompt: str = LOG, **request: Any) -> Any:
    with GemRunContext(path) as context:
        made = context.infer(prompt, count, ignore_stop_ids=True, speculate=speculate, **request)
        return made.stats


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_answers_are_equal(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], family: str
) -> None:
    """Windows of 8 tokens wrap around many times on the way; all kernels, 1 to 3 threads."""
    path = artifact_cache(
        tiny_checkpoint(family), "--quantization", "int4", "--kv-cache-size", "192"
    )
    want = runs(path, 90, 0)
    kernels = engine.kernels()
    for speculate, kernel, threads in [
        *((6, name, 2) for name in kernels),
        *((most, kernels[-1], 1) for most in (1, 2, 3, 5)),
        (6, kernels[-1], 3),
    ]:
        got = runs(path, 90, speculate, kernel=kernel, threads=threads)
        assert got == want, (speculate, kernel, threads)
    assert runs(path, 90, 6, head="two-plane") == want
    assert drafts(path, 90, 6, temperature=0.0).drafted > 0


@pytest.mark.parametrize(
    "options",
    [("--kv-cache-type", "dense"), ("--kv-cache-type", "int8"), ("--quantization", "none")],
    ids=lambda options: options[1],
)
def test_every_kind_of_cache(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], options: Any
) -> None:
    path = artifact_cache(tiny_checkpoint("gemma3"), *options, "--kv-cache-size", "192")
    assert runs(path, 90, 6) == runs(path, 90, 0)


def masked(path: Path, target: Path) -> Path:
    """The artifact with heads that keep 64, 96 or all tokens by turns, where no window is."""
    with read_artifact(path) as artifact:
        parts, keeps = cycle(((1, 1), (1, 2), (0, 0), (2, 1))), []
        for layer in artifact.layers:
            keeps += [(0, 0) if layer.window else next(parts) for _ in range(layer.kv_heads)]
    with_units(path, target, keeps)
    return target


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama3", ("--quantization", "int4")),
        ("gemma3", ("--quantization", "int4")),  # beside windows of 8 tokens
        ("gemma2", ("--kv-cache-type", "dense", "--quantization", "int8")),
        ("qwen3", ("--quantization", "none")),
    ],
)
def test_heads_that_keep_a_part(
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    tmp_path: Path,
    family: str,
    options: tuple[str, ...],
) -> None:
    """Rings of 64 positions wrap on the way; drafts cross the ends of their blocks."""
    dense = artifact_cache(
        tiny_checkpoint(family), *options, "--kv-cache-size", "256", "--effort", "fast"
    )
    path = masked(dense, tmp_path / "a.gembin")
    want = runs(path, 160, 0)
    assert want != runs(dense, 160, 0)  # something is hidden
    for speculate, kernel, threads in (
        *((6, name, 2) for name in engine.kernels()),
        *((most, engine.kernels()[-1], 1) for most in (1, 2, 3, 5)),
    ):
        got = runs(path, 160, speculate, kernel=kernel, threads=threads)
        assert got == want, (speculate, kernel, threads)
    assert drafts(path, 160, 6, temperature=0.0).drafted > 0
    for size in (97, 128, 129, 200):  # to the end of a shorter context
        seen = []
        for speculate in (0, 6):
            with GemRunContext(path, kv_cache_size=size) as context:
                made = context.infer(
                    LOG, 250, temperature=0.0, ignore_stop_ids=True, speculate=speculate
                )
                seen.append((tuple(made), made.finish_reason, context.stats().kv_used))
        assert seen[0] == seen[1]
        assert seen[0][1:] == ("context_full", size)


@pytest.mark.parametrize("size", [33, 40, 63, 64, 65, 96])
def test_to_the_end_of_the_context(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], size: int
) -> None:
    """A draft never goes beyond the last position; the run ends where it ends without."""
    path = artifact_cache(tiny_checkpoint("gemma3"), "--kv-cache-size", "96")
    seen = []
    for speculate in (0, 6):
        with GemRunContext(path, kv_cache_size=size) as context:
            made = context.infer(
                "a b a b a b", 200, temperature=0.0, ignore_stop_ids=True, speculate=speculate
            )
            seen.append((tuple(made), made.finish_reason, context.stats().kv_used))
    assert seen[0] == seen[1]
    assert seen[0][1:] == ("context_full", size)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_short_steps(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], batch: int
) -> None:
    """A step is never longer than the prompt's steps may be."""
    path = artifact_cache(tiny_checkpoint("llama3"), "--kv-cache-size", "128")
    want = runs(path, 60, 0)
    assert runs(path, 60, 6, prefill_batch_size=batch) == want


def test_a_run_stops_inside_a_step(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    """By count, by a stop string, by the callback: at any token of a step."""
    path = artifact_cache(tiny_checkpoint("llama3"), "--kv-cache-size", "128")
    with GemRunContext(path) as context:
        whole = context.infer(LOG, 60, temperature=0.0, ignore_stop_ids=True)
        for count in range(1, 40):
            made = context.infer(LOG, count, temperature=0.0, ignore_stop_ids=True, speculate=6)
            assert list(made) == list(whole)[:count]
            assert context.stats().kv_used == made.stats.prompt_tokens + count - 1
        for end in range(4, 40, 3):
            stop = whole.text[end : end + 3]
            plain, ahead = (
                context.infer(
                    LOG, 60, temperature=0.0, ignore_stop_ids=True, stop=stop, speculate=n
                )
                for n in (0, 6)
            )
            assert (ahead.text, list(ahead), ahead.finish_reason) == (
                plain.text, list(plain), plain.finish_reason,
            )  # fmt: skip
        pieces = []
        with context.stream(LOG, 60, temperature=0.0, speculate=6) as stream:
            for piece in stream:
                pieces.append(piece)
                if len(pieces) == 7:
                    break
        assert whole.text.startswith("".join(pieces))


def test_a_real_model_takes_fewer_steps(
    smollm2_gguf: Path, artifact_cache: Callable[..., Path]
) -> None:
    path = artifact_cache(smollm2_gguf, "--effort", "fast", "--kv-cache-size", "256")
    with GemRunContext(path) as context:
        plain, ahead = (
            context.infer(
                "Open valve 4, then wait. " * 6,
                100,
                temperature=0.0,
                ignore_stop_ids=True,
                speculate=n,
            )
            for n in (0, 6)
        )
    assert list(plain) == list(ahead)
    assert plain.text == ahead.text
    assert (plain.stats.drafted, plain.stats.accepted) == (0, 0)
    assert ahead.stats.accepted > 60  # of 100 tokens
    assert ahead.stats.accepted <= ahead.stats.drafted


def test_it_rests_where_drafts_are_wrong(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    """Hot sampling from few letters: there is always a draft, and it is nearly always wrong."""
    path = artifact_cache(tiny_checkpoint("llama3"), "--kv-cache-size", "512")
    request = {"temperature": 100.0, "top_k": 12, "seed": 4}
    stats = drafts(path, 400, 6, prompt="ab" * 40, **request)
    assert stats.accepted * 2 < stats.drafted < 200


def test_options(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], gemrun_cli: Path
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), "--kv-cache-size", "128")
    wrong = "speculate: 7 is out of range; use 0 to 6"
    with GemRunContext(path) as context, pytest.raises(CallError, match=wrong):
        context.infer("a", 4, speculate=7)
    command = [gemrun_cli, path, "--prompt", LOG, "--max-tokens", "60", "--temperature", "0"]
    shown = {}
    for most in ("0", "6"):
        done = subprocess.run(
            [*command, "--ignore-eos", "--speculate", most, "--json"],
            capture_output=True,
            text=True,
        )
        shown[most] = json.loads(done.stdout)
    assert shown["0"]["tokens"] == shown["6"]["tokens"]
    assert shown["0"]["drafted"] == 0 < shown["6"]["drafted"]
    done = subprocess.run(
        [*command, "--ignore-eos", "--speculate", "6"], capture_output=True, text=True
    )
    assert "guessed tokens were right" in done.stderr
    done = subprocess.run([*command, "--speculate", "7"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--speculate" in done.stderr
