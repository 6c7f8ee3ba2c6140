"""GGUF vocabularies in the form of tokenizer.json."""

from __future__ import annotations

from typing import Any

import pytest

import tok_native
from gemmake.errors import CheckpointError
from gemmake.load.tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    tokenizer_json_from_gguf,
)
from gemmake.model import Generation, TokenizerSource
from gemmake.passes.tokens import ALPHABET, compile_tokenizer


def score_based() -> dict[str, Any]:
    """A small vocabulary with scores."""
    rows = [("<pad>", CONTROL, -1000.0), ("<bos>", CONTROL, -1000.0), ("<unk>", CONTROL, -1000.0)]
    rows += [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in range(256)]
    rows += [
        ("\n", USER_DEFINED, -1000.0),
        ("  ", USER_DEFINED, -1000.0),
        ("    ", USER_DEFINED, -1000.0),
    ]
    words = ("ab", "abc", "bc", "\u2581a", "a", "b", "c", "\u2581")
    rows += [(text, NORMAL, -float(i)) for i, text in enumerate(words)]
    tokens, types, scores = (list(column) for column in zip(*rows, strict=True))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
    }


def byte_level() -> dict[str, Any]:
    """A small vocabulary with merges."""
    tokens = [*ALPHABET, "ab", "abc", "<|end|>", "[PAD1]"]
    count = len(ALPHABET)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (count + 2) + [CONTROL, UNUSED],
        "tokenizer.ggml.merges": ["a b", "ab c"],
    }


def engine(metadata: dict[str, Any]) -> tuple[tok_native.Tok, dict[str, int]]:
    """The engine's tokenizer, and ids by text."""
    data = tokenizer_json_from_gguf(metadata)
    rows = len(metadata["tokenizer.ggml.tokens"])
    section = compile_tokenizer(TokenizerSource(data), rows, Generation(stop_ids=()))
    tok = tok_native.Tok(tok_native.native(), section, rows)
    assert tok.status == 0
    return tok, {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}


def test_scores_become_merges_best_first() -> None:
    data = tokenizer_json_from_gguf(score_based())
    assert data["model"]["merges"] == [
        ["\u2581\u2581", "\u2581\u2581"],
        ["\u2581", "\u2581"],
        ["a", "b"],
        ["ab", "c"],
        ["a", "bc"],
        ["b", "c"],
        ["\u2581", "a"],
    ]


def test_score_based_text() -> None:
    tok, ids = engine(score_based())
    assert tok.encode("abc a\n") == [ids["abc"], ids["\u2581a"], ids["\n"]]
    assert tok.encode("    x") == [ids["    "], ids["<0x78>"]]
    assert tok.decode(tok.encode("  é")) == "  é".encode()


def test_byte_level_text_and_filler_rows() -> None:
    tok, ids = engine(byte_level())
    assert tok.encode("abc<|end|>", control=True) == [ids["abc"], ids["<|end|>"]]
    assert ids["<|end|>"] not in tok.encode("<|end|>")
    assert tok.encode("[PAD1]") == [ids[char] for char in "[PAD1]"]
    assert tok.lib.gr_tok_flags(tok.handle, ids["[PAD1]"]) & 4


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe", "llama3", "llama-v3"])
def test_known_splits_compile(pre: str) -> None:
    tok, ids = engine({**byte_level(), "tokenizer.ggml.pre": pre})
    assert tok.encode("abc") == [ids["abc"]]


BAD: dict[str, tuple[str, Any, str]] = {
    "model": ("tokenizer.ggml.model", "bert", "bert"),
    "no model": ("tokenizer.ggml.model", None, "None"),
    "pre": ("tokenizer.ggml.pre", "klingon", "klingon"),
    "tokens": ("tokenizer.ggml.tokens", 5, "not a list"),
    "token kinds": ("tokenizer.ggml.tokens", ["a", 5], "other than text"),
    "types": ("tokenizer.ggml.token_type", [1, 1], "2 entries"),
    "no types": ("tokenizer.ggml.token_type", None, "absent"),
    "merges": ("tokenizer.ggml.merges", None, "not a list"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata_is_named(case: str) -> None:
    key, value, word = BAD[case]
    with pytest.raises(CheckpointError, match=word):
        tokenizer_json_from_gguf({**byte_level(), key: value})


def test_bad_scores_and_prefix_are_named() -> None:
    good = score_based()
    for key, value, word in (
        ("tokenizer.ggml.scores", [1.0], "1 entries"),
        ("tokenizer.ggml.add_space_prefix", True, "space before the text"),
        ("tokenizer.ggml.unknown_token_id", 10**6, "unknown_token_id"),
    ):
        with pytest.raises(CheckpointError, match=word):
            tokenizer_json_from_gguf({**good, key: value})


def test_a_repeated_token_and_a_broken_merge_are_named() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"][len(ALPHABET)] = "a"
    with pytest.raises(CheckpointError, match="has the ids"):
        tokenizer_json_from_gguf(metadata)
    with pytest.raises(CheckpointError, match="merge"):
        engine({**byte_level(), "tokenizer.ggml.merges": ["ab"]})
