"""The built-in calibration mix: kinds, lengths, variety, recall; and the held-out windows."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gemmake import calibration
from gemmake.errors import UsageError
from gemmake.kvmask import heldout
from gemmake.kvmask.grammar import topics
from gemmake.kvmask.mix import ROUND, WINDOWS, place, windows
from gemmake.kvmask.window import (
    BEYOND,
    KEPT,
    LEAST,
    Draft,
    Measure,
    Messages,
    Window,
    finish,
    merged,
    plain,
)
from gemmake.load import load_checkpoint

CONTEXT = 1024
SHARES = {
    "chat": 0.25, "code": 0.15, "json": 0.10, "multilingual": 0.10, "reasoning": 0.15,
    "recall": 0.25,
}  # fmt: skip
#: Of all windows of seed 0 for a context of 4096 tokens, counted without a tokenizer.
DIGEST = "9c02365a628911192e01173bc7758a06ca64263f75de8a4b84befe13ebb6af28"
SENTENCE_END = re.compile(r"(?<=[.!?。！？।؟])\s*|\n+")

Encode = Callable[[str], Sequence[int]]


def encoder(tokenizer: Tokenizer) -> Encode:
    """Ids of a text, without what the tokenizer would put around it."""
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> Tokenizer:
    """SmolLM2's tokenizer: a small vocabulary, English only."""
    source = load_checkpoint(smollm2_gguf).tokenizer
    assert source is not None
    return Tokenizer.from_str(json.dumps(source.tokenizer_json))


@pytest.fixture(scope="module")
def everything() -> list[Window]:
    """The whole mix of seed 0, counted without a tokenizer."""
    return list(windows(1.0, 0, 4096))


@pytest.fixture(scope="module")
def thousand(smollm2: Tokenizer) -> list[Window]:
    """The windows that a compile takes by default, for SmolLM2 and a context of 1024."""
    return list(windows(0.1, 0, CONTEXT, encoder(smollm2)))


# ---- shares and order ----
def test_kinds_have_their_shares_at_every_ratio() -> None:
    found: Counter[str] = Counter()
    for index in range(WINDOWS):
        found[place(index).kind] += 1
        if index + 1 >= WINDOWS // 20:
            for kind, share in SHARES.items():
                assert abs(found[kind] / (index + 1) - share) <= 0.02, (index, kind)


def test_windows_are_numbered_within_their_kind() -> None:
    numbers = defaultdict(list)
    for index in range(10 * len(ROUND)):
        where = place(index)
        numbers[where.kind].append(where.number)
    assert all(found == list(range(len(found))) for found in numbers.values())


def test_a_smaller_ratio_is_the_beginning_of_a_larger_one() -> None:
    assert list(windows(0.002, 3, CONTEXT)) == list(windows(0.005, 3, CONTEXT))[:20]


# ---- determinism ----
def test_mix_is_the_stated_one(everything: list[Window]) -> None:
    digest = hashlib.sha256()
    for window in everything:
        digest.update(repr((window.kind, window.text, window.messages, window.answer_at)).encode())
    assert len(everything) == WINDOWS
    assert digest.hexdigest() == DIGEST


def test_another_seed_is_another_text() -> None:
    ours, others = list(windows(0.01, 0, CONTEXT)), list(windows(0.01, 1, CONTEXT))
    assert [one.kind for one in ours] == [one.kind for one in others]
    assert not {one.text for one in ours} & {one.text for one in others}


# ---- lengths ----
def test_lengths_with_a_real_tokenizer(thousand: list[Window], smollm2: Tokenizer) -> None:
    counts = [len(encoder(smollm2)(window.text)) for window in thousand]
    assert max(counts) < CONTEXT
    assert sum(count > BEYOND for count in counts) >= 0.4 * len(counts)
    assert 480 <= sum(counts) / len(counts) <= 620


@pytest.mark.parametrize("name", ["tokenizer_qwen3", "tokenizer_llama3", "tokenizer_gemma3"])
def test_lengths_with_other_tokenizers(name: str, request: pytest.FixtureRequest) -> None:
    encode = encoder(Tokenizer.from_file(str(request.getfixturevalue(name) / "tokenizer.json")))
    counts = [len(encode(window.text)) for window in windows(0.05, 0, CONTEXT, encode)]
    assert max(counts) < CONTEXT
    assert sum(count > BEYOND for count in counts) >= 0.4 * len(counts)
    assert 480 <= sum(counts) / len(counts) <= 620


@pytest.mark.parametrize("context", [LEAST, 320, 4096])
def test_no_window_is_longer_than_the_context(context: int, smollm2: Tokenizer) -> None:
    encode = encoder(smollm2)
    found = list(windows(0.02, 0, context, encode))
    assert all(0 < len(encode(window.text)) < context for window in found)
    assert all(window.answer_at for window in found if window.kind == "recall")


def test_a_guess_keeps_away_from_the_limit(smollm2: Tokenizer) -> None:
    found = [len(encoder(smollm2)(window.text)) for window in windows(0.05, 0, CONTEXT)]
    assert max(found) <= CONTEXT


def test_a_long_context_has_windows_for_larger_classes(smollm2: Tokenizer) -> None:
    encode = encoder(smollm2)
    counts = [len(encode(window.text)) for window in windows(0.1, 0, 4096, encode)]
    assert sum(count > 1400 for count in counts) >= 10


def test_a_tokenizer_that_cuts_hides_nothing(smollm2: Tokenizer) -> None:
    """Whoever counts up to the context only gets windows that are whole."""
    encode = encoder(smollm2)
    found = windows(0.05, 0, 700, lambda text: encode(text)[:700])
    assert all(len(encode(window.text)) < 700 for window in found)


def test_long_windows_have_many_characters(thousand: list[Window]) -> None:
    recall = [window.text for window in thousand if window.kind == "recall"]
    assert sum(len(text) >= 2400 for text in recall) >= 0.4 * len(recall)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01, float("nan")])
def test_a_ratio_out_of_range_is_refused(ratio: float) -> None:
    with pytest.raises(UsageError, match=r"--prefill-sample-ratio: .* give 0\.1 for 1000 windows"):
        windows(ratio, 0, CONTEXT)


def test_a_context_too_short_is_refused() -> None:
    with pytest.raises(UsageError, match="--kv-cache-size: 191 tokens are too few"):
        windows(0.1, 0, LEAST - 1)


# ---- variety ----
def sentences(found: Sequence[Window]) -> Iterator[str]:
    for window in found:
        yield from (part.strip() for part in SENTENCE_END.split(window.text) if part.strip())


def test_no_window_equals_another(everything: list[Window]) -> None:
    assert len({window.text for window in everything}) == WINDOWS


def test_windows_begin_differently(everything: list[Window]) -> None:
    assert len({window.text[:40] for window in everything[:1000]}) >= 900
    assert len({window.text[:40] for window in everything}) >= 7000


def test_sentences_are_many(everything: list[Window]) -> None:
    assert len(set(sentences(everything[:1000]))) >= 20_000
    assert len(set(sentences(everything))) >= 150_000


def test_every_language_is_there(everything: list[Window]) -> None:
    few = " ".join(window.text for window in everything[:500] if window.kind == "multilingual")
    for name, language in topics("languages.txt").items():
        words = language.words["machine"]
        assert any(word.lower() in few.lower() for word in words), name


def test_languages_say_the_same() -> None:
    """Sentence i has the same slots in all of them, and every word has a counterpart."""
    english, *others = topics("languages.txt").values()
    assert len(others) == 13
    for other in others:
        assert len(other.sentences) == len(english.sentences)
        assert len(other.exchanges) == len(english.exchanges)
        for slot, words in english.words.items():
            assert len(other.words[slot]) == len(words), (other.name, slot)
        for ours, theirs in zip(english.sentences, other.sentences, strict=True):
            slots = [sorted(re.findall(r"\{\w+\}", text)) for text in (ours, theirs)]
            assert slots[0] == slots[1], (other.name, theirs)


def test_nothing_of_the_grammar_is_left_over(everything: list[Window]) -> None:
    for window in everything:
        if window.kind not in ("code", "json", "recall"):  # these have braces of their own
            assert not re.search(r"[{}]", window.text), window.text
        assert not re.search(r"@\w+@|«\w+\||\{\d+-\d+\}", window.text), window.text


# ---- reasoning ----
def test_sums_are_right(everything: list[Window]) -> None:
    """Every simple equation of the traces holds."""
    seen = 0
    for window in everything[:2000]:
        if window.kind == "reasoning":
            for a, sign, b, c in re.findall(
                r"(?<![*x\d.+] )\b(\d+) ([+-]) (\d+) = (-?\d+)\b(?!\.\d)", window.text
            ):
                assert int(a) + (int(b) if sign == "+" else -int(b)) == int(c), (a, sign, b, c)
                seen += 1
    assert seen > 800


# ---- recall ----
def distance(window: Window, encode: Encode) -> int:
    """Tokens from where a telling word of the answer first stands to the answer; 0: nowhere."""
    assert window.answer_at is not None
    before, answer = window.text[: window.answer_at], window.text[window.answer_at :]
    words = re.findall(r"\w{4,}|\w*\d\w*", answer)
    found = [re.search(rf"\b{re.escape(word)}\b", before) for word in words]
    places = [place.start() for place in found if place]
    return len(encode(before[min(places) :])) if places else 0


def test_only_recall_windows_have_an_answer(thousand: list[Window]) -> None:
    assert all((window.answer_at is not None) == (window.kind == "recall") for window in thousand)


def test_answers_end_the_text_and_stand_early_in_it(
    thousand: list[Window], smollm2: Tokenizer
) -> None:
    recall = [window for window in thousand if window.kind == "recall"]
    for window in recall:
        assert window.answer_at is not None
        assert 0 < len(window.text) - window.answer_at < len(window.text) // 2
        assert distance(window, encoder(smollm2)) > KEPT, window.text
        if window.messages is not None:
            assert window.text[window.answer_at :] == window.messages[-1][1]


def test_a_question_stands_before_the_answer(thousand: list[Window]) -> None:
    for window in thousand:
        if window.kind == "recall" and window.messages is None:
            assert window.text[: window.answer_at].endswith("\nAnswer: ")
            assert "\n\nQuestion: " in window.text
        elif window.kind == "recall":
            assert window.messages is not None
            assert [role for role, _ in window.messages[-2:]] == ["user", "assistant"]


def test_passages_are_repeated_word_for_word(thousand: list[Window]) -> None:
    copies = [window for window in thousand if "\nEnd of " in window.text]
    assert len(copies) >= 40
    for window in copies:
        assert window.answer_at is not None
        assert window.text.index(window.text[window.answer_at :]) < window.answer_at - 900


# ---- conversations and templates ----
def test_conversations_take_turns(thousand: list[Window]) -> None:
    for window in thousand:
        if window.messages is not None:
            roles = [role for role, _ in window.messages if role != "system"]
            assert roles == ["user", "assistant"] * (len(roles) // 2)
            assert "system" not in [role for role, _ in window.messages[1:]]
            assert all(content == content.strip() for _, content in window.messages)


def chatml(messages: Messages) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)


def test_a_template_renders_conversations(smollm2: Tokenizer) -> None:
    encode = encoder(smollm2)
    found = list(windows(0.02, 0, CONTEXT, encode, chatml))
    chats = [window for window in found if window.messages is not None]
    assert len(chats) > len(found) // 2
    for window in chats:
        assert window.messages is not None
        assert window.text == chatml(window.messages)
        assert len(encode(window.text)) < CONTEXT
        if window.answer_at is not None:
            assert window.text[window.answer_at :].startswith(window.messages[-1][1])
    assert all("<|im_start|>" not in window.text for window in found if window.messages is None)


TALK: Messages = (("system", "Be brief."), ("user", "Which code?"), ("assistant", "It is 4711."))


def test_a_template_without_system_messages_gets_them_in_the_question() -> None:
    def render(messages: Messages) -> str | None:
        return None if messages[0][0] == "system" else chatml(messages)

    window = finish("chat", Draft(messages=TALK), render)
    assert window.text == chatml(merged(TALK))
    assert "Be brief.\n\nWhich code?" in window.text


def test_a_template_that_takes_nothing_leaves_plain_text() -> None:
    window = finish("recall", Draft(messages=TALK, answer="It is 4711."), lambda _: None)
    assert window.text == plain(TALK)
    assert window.text[window.answer_at :] == "It is 4711."


def test_a_template_that_changes_the_answer_is_not_used() -> None:
    draft = Draft(messages=TALK, answer="It is 4711.")
    window = finish("recall", draft, lambda messages: chatml(messages).replace("4711", "4"))
    assert window.text == plain(TALK)


# ---- held out ----
@pytest.fixture(scope="module")
def held_out(smollm2: Tokenizer) -> list[Window]:
    return heldout.windows(2048, encoder(smollm2))


def test_held_out_windows_are_long_and_of_all_kinds(
    held_out: list[Window], smollm2: Tokenizer
) -> None:
    counts = [len(encoder(smollm2)(window.text)) for window in held_out]
    assert len(held_out) == heldout.COUNT == 16
    assert max(counts) <= heldout.LONGEST
    assert min(counts) > BEYOND
    assert set(Counter(window.kind for window in held_out)) == set(heldout.KINDS)
    assert len({window.text for window in held_out}) == len(held_out)


def test_held_out_answers_stand_early(held_out: list[Window], smollm2: Tokenizer) -> None:
    asked = [window for window in held_out if window.answer_at is not None]
    assert len(asked) == 12
    assert all(distance(window, encoder(smollm2)) > BEYOND for window in asked)


def test_held_out_text_follows_the_context(smollm2: Tokenizer) -> None:
    encode = encoder(smollm2)
    for context in (LEAST, CONTEXT):
        assert all(len(encode(text)) < context for text in heldout.texts(context, encode))
    assert heldout.texts(CONTEXT) == heldout.texts(CONTEXT)
    assert len(heldout.windows(CONTEXT, encode, count=40)) == 40


def test_held_out_text_is_another_than_the_mix(
    held_out: list[Window], thousand: list[Window]
) -> None:
    ours = {text for text in sentences(thousand) if len(text) > 30}
    assert not ours & {text for text in sentences(held_out) if len(text) > 30}
    texts = " ".join(window.text for window in thousand)
    names = topics("heldout.txt")["common"].words
    assert not [name for name in (*names["first"], *names["family"]) if f" {name} " in texts]


def test_plain_text_is_what_the_weights_have_not_seen(smollm2: Tokenizer) -> None:
    """By the exact places of tokens, where the compiler only adds up paragraphs."""
    text = (resources.files("gemmake") / "data" / "calibration.txt").read_text(encoding="utf-8")
    encoded = smollm2.encode(text, add_special_tokens=False)
    windows_seen = calibration.cut(list(range(len(encoded.ids))), calibration.WINDOW, [])
    seen = [(encoded.offsets[ids[0]][0], encoded.offsets[ids[-1]][1]) for ids in windows_seen]
    parts = heldout.unseen(text, Measure(encoder(smollm2)))
    assert sum(map(len, parts)) > 40_000
    for part in parts:
        begin = text.index(part)
        assert all(begin + len(part) <= low or high <= begin for low, high in seen), part
    assert all(low[1] <= high[0] for low, high in pairwise(seen))
