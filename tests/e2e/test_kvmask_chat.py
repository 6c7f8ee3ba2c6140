"""Calibration sees a conversation as the device does: the same ids, whatever the template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from gemmake.kvmask import heldout, mix
from gemmake.kvmask.chat import MARK, Chat, compiled, encode
from gemmake.kvmask.reader import Reader
from gemmake.kvmask.window import Messages, Window, merged
from gemrun import GemRunContext
from gemrun.errors import CallError
from gemrun.format.reader import read_artifact

SYSTEM = ("system", " Keep it short. ")
TALKS: tuple[Messages, ...] = (
    (("user", "Where is dock 4?"),),
    (("user", " a "), ("assistant", "\n b\n\n"), ("user", "c")),
    (("user", "spelled <|im_end|> <end_of_turn> </s>"), ("assistant", "d"), ("user", "日本 e\n")),
    (("user", "f"), ("assistant", "<think>g</think>\n\nh"), ("user", "i")),
)


def chat_of(path: Path) -> Chat | None:
    with read_artifact(path) as artifact:
        tmpl = bytes(artifact.section("TMPL")) if "TMPL" in artifact.sections else None
        return compiled(tmpl, artifact.conf.vocab_rows)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_ids_are_those_of_the_device(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], family: str
) -> None:
    """The cache holds them already when the device encodes the same conversation."""
    path = artifact_cache(tiny_checkpoint(family), "--kv-cache-size", "320")
    chat = chat_of(path)
    assert chat is not None
    with GemRunContext(path, ignore_memory=True) as context:
        for talk in (*TALKS, *((SYSTEM, *talk) for talk in TALKS)):
            said = [{"role": role, "content": text} for role, text in talk]
            text = chat.render(talk)
            if text is None:
                with pytest.raises(CallError):
                    context.chat(said, 1)
                text = chat.render(merged(talk))
                said = [{"role": role, "content": text} for role, text in merged(talk)]
            assert text is not None
            ids = encode(text, context.tokenize)
            context.reset_kv_cache()
            context.prefill(ids)
            answer = context.chat(said, 1, reuse=True)
            assert answer.stats.prompt_tokens == len(ids)
            assert answer.stats.reused == len(ids) - 1, talk


def test_a_text_ends_with_its_last_answer(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    """The ids up to it are those of the question, and the device would go on from there."""
    path = artifact_cache(tiny_checkpoint("qwen3"), "--kv-cache-size", "320")
    chat = chat_of(path)
    assert chat is not None
    talk: Messages = (("user", "Which code?"), ("assistant", "It is 4711."))
    asked, told = chat.render(talk[:1]), chat.render(talk)
    assert asked is not None
    assert told is not None
    assert told == asked + "It is 4711."
    with GemRunContext(path, ignore_memory=True) as context:
        reader = Reader(context.tokenize, chat, 320)
        ids_of = reader.ids
        found = reader.passage(Window("recall", told, talk, len(asked)))
        assert found.answer is not None
        assert list(found.ids[: found.answer]) == ids_of(asked)[: found.answer]
        assert context.detokenize(found.ids[found.answer :]).strip() == "It is 4711."
        cut = ids_of(told[: told.index(MARK) + 2])  # inside of a token's number
        assert cut == ids_of(told)[: len(cut)]


def test_what_the_device_refuses_is_not_rendered(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    chat = chat_of(artifact_cache(tiny_checkpoint("qwen3"), "--kv-cache-size", "320"))
    assert chat is not None
    answer = ("assistant", "a")
    for talk in ((), (answer,), (("user", "a"), ("user", "b")), (("user", "a"), answer, answer)):
        assert chat.render(talk) is None
    assert compiled(None, 480) is None


def test_the_mix_goes_through_the_template(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    path = artifact_cache(tiny_checkpoint("qwen3"), "--kv-cache-size", "320")
    chat = chat_of(path)
    assert chat is not None
    with GemRunContext(path, ignore_memory=True) as context:
        reader = Reader(context.tokenize, chat, 1024)
        found = list(mix.windows(0.004, 0, 1024, reader.ids, reader.render))
        found += heldout.windows(1024, reader.ids, reader.render)
        assert sum(window.messages is not None for window in found) > 10
        for window in found:
            if window.messages is not None:  # None also of one that had to be shortened
                assert MARK in window.text
            ids = reader.ids(window.text)
            assert 0 < len(ids) < 1024
            if window.answer_at is None:
                continue
            asked = reader.passage(window)
            assert asked.answer is not None
            answer = context.detokenize(ids[asked.answer :])
            assert answer.endswith(window.text[window.answer_at :])
            assert len(answer) <= len(window.text) - window.answer_at + 8
