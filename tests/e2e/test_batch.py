"""Answers of a batch are those that each session gives alone, whoever runs beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tiny
from gemrun import Answer, Batch, GemRunContext
from gemrun.batch import Item, append, room
from gemrun.errors import BusyError, CallError, ContextFullError
from reference import engine

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 20, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "seed": 4, "repetition_penalty": 1.3},
)


def sessions(inside: ExitStack, path: Path, count: int, **config: Any) -> list[GemRunContext]:
    model = inside.enter_context(GemRunContext(path, ignore_memory=True, **config))
    others = [inside.enter_context(model.session(ignore_memory=True)) for _ in range(count - 1)]
    return [model, *others]


def prompt(rng: random.Random, most: int) -> str:
    return "".join(rng.choice("abcdefgh ") for _ in range(rng.randint(1, most)))


def alone(session: GemRunContext, ids: list[int], tokens: int, **sampling: Any) -> list[int]:
    """The same calls as a batch makes, for one."""
    session.reset_kv_cache()
    session.prefill(ids)
    made: list[int] = []
    while True:
        token = session.sample(**sampling)
        if token in session.info.stop_ids:
            return made
        made.append(token)
        if len(made) == tokens or session.stats().kv_used == session.stats().kv_size:
            return made
        session.decode(token)


def check(path: Path, count: int, seed: int, **config: Any) -> None:
    """A few requests a session, joining and leaving at different steps."""
    rng = random.Random(seed)
    with ExitStack() as inside:
        free = sessions(inside, path, count, **config)
        lone = inside.enter_context(free[0].session(ignore_memory=True, threads=1))
        batch, asked = Batch(), list[tuple[Answer, list[int], int, dict[str, Any]]]()
        while len(asked) < 3 * count or len(batch):
            while free and len(asked) < 3 * count and rng.random() < 0.5:
                session = free.pop()
                session.reset_kv_cache()
                ids = session.tokenize(prompt(rng, 90), bos=True)
                tokens, sampling = rng.randint(1, 30), rng.choice(SAMPLING)
                answer = batch.join(session, ids, max_tokens=tokens, **sampling)
                asked.append((answer, ids, tokens, sampling))
            free += [answer.session for answer in batch.step()]
        for answer, ids, tokens, sampling in asked:
            assert answer.error is None
            assert answer.ids == alone(lone, ids, tokens, **sampling)
            assert answer.text == lone.detokenize(answer.ids)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], family: str
) -> None:
    path = artifact_cache(tiny_checkpoint(family), "--kv-cache-size", "160")
    check(path, 4, 1, threads=2)


@pytest.mark.parametrize("kernel", engine.kernels())
def test_every_kernel(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], kernel: str
) -> None:
    path = artifact_cache(tiny_checkpoint("gemma3"), "--kv-cache-size", "160")
    check(path, 3, 2, kernel=kernel)


@pytest.mark.parametrize("chunk", [1, 2, 7, 32])
@pytest.mark.parametrize("threads", [1, 3])
def test_passes_of_any_length(
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    chunk: int,
    threads: int,
) -> None:
    """Also with fewer places in a pass than sessions."""
    path = artifact_cache(tiny_checkpoint("gemma3"), "--kv-cache-size", "160")
    check(path, 5, chunk, prefill_batch_size=chunk, threads=threads)


def test_logits_are_the_same_bits(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    path = artifact_cache(tiny_checkpoint("qwen3"), "--kv-cache-size", "160")
    with ExitStack() as inside:
        one, two, three = sessions(inside, path, 3)
        assert append([Item(one, [1, 2, 3, 4]), Item(two, [5])]) == [None, None]
        three.prefill([1, 2, 3, 4])
        assert one.logits() == three.logits()
        assert one.embedding() == three.embedding()
        assert append([Item(one, [9]), Item(two, [6, 7], more=True)]) == [None, None]
        three.decode(9)
        assert one.logits() == three.logits()
        with pytest.raises(CallError, match="nothing computed"):
            two.logits()
        assert append([Item(two, [8])]) == [None]
        three.reset_kv_cache()
        three.prefill([5, 6, 7, 8])
        assert two.logits() == three.logits()
        assert two.stats().kv_used == 4


def test_what_is_refused(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    """A refused one is as it was, and the others go on."""
    path = artifact_cache(tiny_checkpoint("llama3"), "--kv-cache-size", "64")
    other = artifact_cache(tiny_checkpoint("qwen3"), "--kv-cache-size", "160")
    with ExitStack() as inside:
        one, two, three = sessions(inside, path, 3)
        strange = inside.enter_context(GemRunContext(other, ignore_memory=True))
        found = append(
            [Item(one, [1]), Item(two, [1] * 65), Item(three, [1 << 20]), Item(strange, [1])]
        )
        assert found[0] is None
        assert isinstance(found[1], ContextFullError)
        assert "reset the session" in str(found[1])
        assert "tokenizer" in str(found[2])
        assert "another artifact" in str(found[3])
        used = [session.stats().kv_used for session in (one, two, three, strange)]
        assert used == [1, 0, 0, 0]
        assert "no ids" in str(append([Item(one, [])])[0])
        with pytest.raises(CallError, match="twice"):
            append([Item(one, [1]), Item(one, [1])])
        with pytest.raises(CallError, match="no session"):
            append([])
        assert room(one) == one.info.chunk


def test_joining_and_leaving(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), "--kv-cache-size", "64")
    with ExitStack() as inside:
        one, two, three = sessions(inside, path, 3)
        batch, seen = Batch(), list[int]()
        full = batch.join(one, [1] * 60, max_tokens=99, temperature=0.0, ignore_stop_ids=True)
        first = batch.join(two, [1, 2], max_tokens=99, temperature=0.0, ignore_stop_ids=True)
        heard = batch.join(
            *(three, [3]),
            max_tokens=99,
            on_token=lambda token: seen.append(token) or len(seen) == 3,
            ignore_stop_ids=True,
        )
        with pytest.raises(BusyError, match="in the batch already"):
            batch.join(two, [1])
        with pytest.raises(CallError, match="deadline_ms"):
            batch.join(two, [1], deadline_ms=5)  # type: ignore[call-arg]
        assert len(batch) == 3
        assert batch.step() == []
        assert len(first.ids) == 1
        batch.leave(first)
        batch.leave(first)
        assert first.finish_reason == "cancelled"
        assert len(batch) == 2
        wrong = batch.join(two, [1] * 64)
        batch.run()
        assert wrong.finish_reason == "error"
        assert isinstance(wrong.error, ContextFullError)
        assert heard.finish_reason == "callback"
        assert heard.ids == seen
        assert len(seen) == 3
        assert full.finish_reason == "context_full"
        assert len(full.ids) == 5
        assert len(batch) == 0
        assert batch.step() == []
