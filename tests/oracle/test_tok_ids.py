"""Ids of real tokenizers equal the tokenizers library on 10,000 varied texts per family."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import tok_corpus
import tok_native
from gemmake import sandbox
from gemmake.load.gguf import read_gguf
from gemmake.model import Generation, TokenizerSource
from gemmake.passes.template import compile_template
from gemmake.passes.tokens import compile_tokenizer, tokenizer_notes

TEXTS = 10000
BROKEN = 1500
FIXTURES = {
    "gemma3": ("tokenizer_gemma3", 262144, Generation((1, 106), 2, 0, add_bos=True)),
    "gemma3-gguf": ("gemma3_gguf", 262144, Generation((1,), 2, 0, add_bos=True)),
    "qwen3": ("tokenizer_qwen3", 151936, Generation((151643, 151645))),
    "llama3": ("tokenizer_llama3", 128256, Generation((128001, 128009), 128000, add_bos=True)),
    "smollm2-gguf": ("smollm2_gguf", 49152, Generation((2,), 1, 2)),
}


@dataclass(frozen=True)
class Family:
    """A tokenizer in all three forms: source, engine, library."""

    name: str
    rows: int
    source: TokenizerSource
    generation: Generation
    tok: tok_native.Tok
    library: Tokenizer


def load(path: Path) -> TokenizerSource:
    """From a GGUF file, or a folder with tokenizer.json."""
    if path.is_file():
        return read_gguf(path).tokenizer
    data, config = (
        json.loads((path / name).read_text(encoding="utf-8"))
        for name in ("tokenizer.json", "tokenizer_config.json")
    )
    return TokenizerSource(data, config, config.get("chat_template"))


@pytest.fixture(scope="module", params=FIXTURES)
def family(request: pytest.FixtureRequest) -> Family:
    """One family after the other, so that only one big vocabulary is held at a time."""
    fixture, rows, generation = FIXTURES[request.param]
    source = load(request.getfixturevalue(fixture))
    tok = tok_native.Tok(tok_native.native(), compile_tokenizer(source, rows, generation), rows)
    assert tok.status == 0
    library = Tokenizer.from_str(json.dumps(source.tokenizer_json))
    return Family(request.param, rows, source, generation, tok, library)


def specials(family: Family) -> list[str]:
    """Texts of added tokens that the model has rows for: the first, the last, all control."""
    tokens = [t for t in family.source.tokenizer_json["added_tokens"] if t["id"] < family.rows]
    control = [token["content"] for token in tokens if token["special"]]
    return [token["content"] for token in (*tokens[:40], *tokens[-20:])] + control[:40]


def compare(family: Family, texts: list[str], control: bool, encode: Callable[[str], Any]) -> None:
    """Engine against library, text by text."""
    family.library.encode_special_tokens = not control
    expected = family.library.encode_batch(texts, add_special_tokens=False)
    for text, want in zip(texts, expected, strict=True):
        assert encode(text) == want.ids, repr(text)


def test_texts(family: Family) -> None:
    texts = tok_corpus.texts(TEXTS, 2024, specials(family))
    compare(family, texts, True, lambda text: family.tok.encode(text, control=True))
    compare(family, texts[: TEXTS // 2], False, family.tok.encode)


def test_broken_bytes(family: Family) -> None:
    rng = random.Random(77)
    data = [tok_corpus.broken(rng) for _ in range(BROKEN)]
    texts = [part.decode("utf-8", "replace") for part in data]
    family.library.encode_special_tokens = True
    expected = family.library.encode_batch(texts, add_special_tokens=False)
    for part, want in zip(data, expected, strict=True):
        assert family.tok.encode(part) == want.ids, part


def test_long_runs(family: Family) -> None:
    runs = ["a" * 100000, " " * 20000, "ab \n" * 20000, "\u0301\u0327" * 20000, "日" * 30000,
            "0" * 20000, "\U0001f468\u200d" * 8000]  # fmt: skip
    compare(family, runs, False, family.tok.encode)


def test_decoding(family: Family) -> None:
    texts = tok_corpus.texts(1500, 5, specials(family))
    family.library.encode_special_tokens = False
    for found in family.library.encode_batch(texts, add_special_tokens=False):
        want = family.library.decode(found.ids, skip_special_tokens=True)
        assert family.tok.decode(found.ids).decode("utf-8", "replace") == want


def test_every_control_text_stays_text_in_content(family: Family) -> None:
    tokens = family.source.tokenizer_json["added_tokens"]
    control = {token["id"] for token in tokens if token["special"]}
    for token in tokens[:2000]:
        ids = family.tok.encode(f"x{token['content']}\n")
        assert not control & set(ids)
        assert family.tok.decode(ids).decode("utf-8").replace("\u2581", " ") == (
            f"x{token['content']}\n".replace("\u2581", " ")
        )


def test_tokens_without_a_row_are_named(family: Family) -> None:
    notes = tokenizer_notes(family.source, family.rows)
    assert len(notes) == (1 if family.name == "gemma3" else 0)


def test_chat_equals_the_rendered_template(family: Family) -> None:
    result = compile_template(family.source, family.generation, family.rows)
    if not family.source.chat_template:
        assert result.section is None
        return
    assert result.section is not None, result.warning
    chat = tok_native.Chat(tok_native.native(), result.section, family.rows)
    assert chat.status == 0
    talks = [
        [("user", "Hello, who are you?")],
        [("system", "Be brief.\n"), ("user", "\n\n 1+1? ")],
        [("user", "café"), ("assistant", " 2\n"), ("user", "\n日本語")],
        [("system", "S"), ("user", "a"), ("assistant", "<think>\nx\n</think>\n\nb"), ("user", "c")],
    ]
    conversations = [
        sandbox.Conversation(tuple({"role": r, "content": c} for r, c in talk), prompt=True)
        for talk in talks
    ]
    variables = {
        key: value
        for key, value in family.source.config.items()
        if key.endswith("_token") and isinstance(value, str)
    }
    texts = sandbox.render(family.source.chat_template, variables, conversations)
    family.library.encode_special_tokens = False
    for talk, text in zip(talks, texts, strict=True):
        want = family.library.encode(text.text, add_special_tokens=False).ids
        ids = chat.encode(family.tok, talk)
        assert ids == want, talk
        if family.generation.add_bos:
            assert ids.count(family.generation.bos_id) == 1


def test_gguf_scores_give_the_published_merges(tokenizer_gemma3: Path, gemma3_gguf: Path) -> None:
    published, derived = load(tokenizer_gemma3), load(gemma3_gguf)
    models = [source.tokenizer_json["model"] for source in (published, derived)]
    assert models[0]["vocab"] == models[1]["vocab"]
    assert [tuple(m) for m in models[0]["merges"]] == [tuple(m) for m in models[1]["merges"]]
