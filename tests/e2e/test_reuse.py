"""A prompt of which the cache holds a part gives the answer that it gives from an empty cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from gemrun import GemRunContext
from gemrun.errors import CallError
from gemrun.format.reader import read_artifact
from gemrun.format.units import with_units

REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 20, "seed": 3},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "speculate": 4},
)


def prompts(seed: int) -> list[str]:
    """Texts that begin alike: longer, shorter, the same, another one in between."""
    rng = random.Random(seed)
    text = "".join(rng.choice("abcdefgh ") for _ in range(220))
    return [
        text[:90], text[:140], text[:140], text[:60] + "zz" + text[:40], text[:61], text[:200],
        "other", text[:33], text[:32], text[:31], text[:1], text[:220],
    ]  # fmt: skip


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: next(reversed(r)))
def test_answers_are_those_of_an_empty_cache(
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    family: str,
    request_: dict[str, Any],
) -> None:
    path = artifact_cache(tiny_checkpoint(family), "--kv-cache-size", "320")
    used = 0
    with (
        GemRunContext(path, ignore_memory=True) as fresh,
        GemRunContext(path, ignore_memory=True, prefill_batch_size=7) as kept,
    ):
        for text in prompts(7):
            wanted = fresh.infer(text, 24, ignore_stop_ids=True, **request_)
            found = kept.infer(text, 24, ignore_stop_ids=True, reuse=True, **request_)
            assert list(found) == list(wanted), text
            if "repetition_penalty" not in request_:  # which changes them in place
                assert kept.logits() == fresh.logits()
            assert found.stats.reused < found.stats.prompt_tokens == wanted.stats.prompt_tokens
            assert wanted.stats.reused == 0
            used += found.stats.reused
    assert used > 0


def test_what_is_reused(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    """Of a cache without rings everything that is equal but for the last token."""
    path = artifact_cache(tiny_checkpoint("llama3"), "--kv-cache-size", "320")
    with GemRunContext(path, ignore_memory=True) as context:
        ids = len(context.tokenize("abc def gh", bos=True))
        answer = context.infer("abc def gh", 40, temperature=0.0, reuse=True)
        assert answer.stats.reused == 0
        assert context.infer("abc def gh", 4, temperature=0.0, reuse=True).stats.reused == ids - 1
        assert context.infer("abc def gh", 4, temperature=0.0).stats.reused == 0
        context.reset_kv_cache()
        assert context.infer("abc def gh", 4, temperature=0.0, reuse=True).stats.reused == 0
        with pytest.raises(CallError, match="reuse"):
            context.infer("abc", 4, reuse=2)  # type: ignore[arg-type]


def test_a_ring_that_has_gone_on_is_not_gone_back_in(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    path = artifact_cache(tiny_checkpoint("gemma3"), "--kv-cache-size", "320")
    window = 0
    reused = []
    with GemRunContext(path, ignore_memory=True) as context:
        for more in (1, 20, 40, 150):
            context.reset_kv_cache()
            context.infer("abcdefgh" * 8, more, temperature=0.0, ignore_stop_ids=True)
            again = context.infer("abcdefgh" * 8, 2, temperature=0.0, reuse=True)
            reused.append(again.stats.reused > 0)
            window = max(window, more)
    assert reused[0]
    assert not reused[-1]


@pytest.mark.parametrize("keep", [None, (1, 1), (2, 1)], ids=["dense", "1+1", "2+1"])
@pytest.mark.parametrize("family", ["gemma3", "llama3"])
def test_prompts_that_go_back_further_each_time(
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    tmp_path: Path,
    family: str,
    keep: tuple[int, int] | None,
) -> None:
    """How far a ring has gone on is not forgotten by a step back, nor by a draft that was wrong."""
    path = artifact_cache(tiny_checkpoint(family), "--kv-cache-size", "320", "--effort", "fast")
    if keep is not None:
        with read_artifact(path) as artifact:
            heads = [la.window for la in artifact.layers for _ in range(la.kv_heads)]
        keeps = [(0, 0) if window else keep for window in heads]
        path = Path(with_units(path, tmp_path / "a.gembin", keeps).path)
    rng, reused = random.Random(1), 0
    with (
        GemRunContext(path, ignore_memory=True) as fresh,
        GemRunContext(path, ignore_memory=True) as kept,
    ):
        for _ in range(25):
            text = "".join(rng.choice("abcdefgh ") for _ in range(300))
            kept.reset_kv_cache()
            for cut in sorted((rng.randrange(40, 300) for _ in range(4)), reverse=True):
                draft = rng.choice((0, 6))
                wanted, found = (
                    context.infer(
                        text[:cut] + "zq", 3,
                        temperature=0.0, ignore_stop_ids=True, speculate=draft, reuse=reuse,
                    )
                    for context, reuse in ((fresh, False), (kept, True))
                )  # fmt: skip
                assert list(found) == list(wanted)
                assert kept.logits() == fresh.logits()
                reused += found.stats.reused
    assert reused > 0


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_snapshot_reaches_back_behind_long_answers(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], family: str
) -> None:
    """A preamble is computed once, whatever windows have forgotten of it since."""
    path = artifact_cache(tiny_checkpoint(family), "--kv-cache-size", "320")
    preamble = "You move a crane in hall seven and say what it does. "
    with (
        GemRunContext(path, ignore_memory=True) as fresh,
        GemRunContext(path, ignore_memory=True) as kept,
    ):
        ids = kept.tokenize(preamble, bos=True)[:-2]  # the last may join what follows
        kept.prefill(ids)
        place = kept.snapshot()
        assert place.tokens == len(ids)
        for end in ("Lift.", "Go to dock 4.", "Wait for the next truck, then stop.", "Lift."):
            assert kept.go_back(place) == len(ids)
            wanted = fresh.infer(preamble + end, 90, ignore_stop_ids=True, temperature=0.0)
            found = kept.infer(
                preamble + end, 90, ignore_stop_ids=True, temperature=0.0, reuse=True
            )
            assert list(found) == list(wanted)
            assert kept.logits() == fresh.logits()
            assert found.stats.reused >= len(ids)
        kept.reset_kv_cache()
        with pytest.raises(CallError, match="take another one"):
            kept.go_back(place)
        with pytest.raises(CallError, match="what snapshot"):
            kept.go_back(b"")  # type: ignore[arg-type]
