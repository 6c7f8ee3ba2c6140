"""The tokenizer compiler and the engine's encoder on small tokenizers."""

from __future__ import annotations

import copy
import ctypes
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

import tok_corpus
import tok_native
import tok_tiny
from gemmake.errors import CheckpointError
from gemmake.model import Generation, TokenizerSource
from gemmake.passes import split
from gemmake.passes.tokens import compile_tokenizer, tokenizer_notes
from gemrun.format.tokens import TokenFlag

KINDS = ("byte", "nfc", "spm")
PLAIN = Generation(stop_ids=(1,))
E_SCRATCH = -1
E_SIZE, E_VOCAB = 1, 11


def opened(data: dict[str, Any], rows: int = 0, generation: Generation = PLAIN) -> tok_native.Tok:
    """The compiled tokenizer in the engine."""
    rows = rows or tok_tiny.rows_of(data)
    tok = tok_native.Tok(
        tok_native.native(), compile_tokenizer(TokenizerSource(data), rows, generation), rows
    )
    assert tok.status == 0
    return tok


def reference(data: dict[str, Any]) -> Tokenizer:
    """The same in the tokenizers library."""
    return Tokenizer.from_str(json.dumps(data))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_the_library(kind: str) -> None:
    data = tok_tiny.both()[kind]
    tok, ref = opened(data), reference(data)
    specials = [token["content"] for token in data["added_tokens"]]
    for text in tok_corpus.texts(1500, 11, specials):
        assert tok.encode(text, control=True) == ref.encode(text).ids, repr(text)
    ref.encode_special_tokens = True
    for text in tok_corpus.texts(1500, 12, specials):
        assert tok.encode(text) == ref.encode(text).ids, repr(text)


@pytest.mark.parametrize("kind", KINDS)
def test_control_text_in_content_never_becomes_control(kind: str) -> None:
    data = tok_tiny.both()[kind]
    tok = opened(data)
    control = {token["id"] for token in data["added_tokens"] if token["special"]}
    for token in data["added_tokens"]:
        text = f"a{token['content']}{token['content']} b"
        ids = tok.encode(text)
        assert not control & set(ids)
        assert tok.decode(ids) == text.encode()
        if token["special"]:
            assert tok.encode(text, control=True).count(token["id"]) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_spell_the_text(kind: str) -> None:
    tok = opened(tok_tiny.both()[kind])
    for text in ("", "Hello  world\n", "日本語 naïve 👩🏽‍🚀", "\x00\x7f"):
        assert tok.decode(tok.encode(text)) == text.encode()


def test_control_pieces_are_empty_unless_asked() -> None:
    data = tok_tiny.both()["byte"]
    tok = opened(data)
    number = tok_tiny.number_of(data, "<|im_end|>")
    assert (tok.piece(number), tok.piece(number, control=True)) == (b"", b"<|im_end|>")
    assert tok.piece(1 << 20) == b""


@pytest.mark.parametrize("kind", KINDS)
def test_broken_bytes_read_as_replacement_characters(kind: str) -> None:
    data = tok_tiny.both()[kind]
    tok, ref = opened(data), reference(data)
    cases = [b"\xff", b"a\xe2\x9c", b"\xe2\x9c\x85\x85", b"\xf0\x9f\x92", b"\xed\xa0\x80",
             b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\xe2\x28\xa1", b"x\x80y",
             b"\xff" * 300]  # fmt: skip
    for text in cases:
        assert tok.encode(text) == ref.encode(text.decode("utf-8", "replace")).ids, text


@pytest.mark.parametrize("kind", KINDS)
def test_long_runs_fit_the_declared_scratch(kind: str) -> None:
    tok = opened(tok_tiny.both()[kind])
    runs = ("a" * 50000, " " * 50000, "\u0301\u0327" * 20000, "\U0001d160" * 10000, "가" * 10000,
            "\u01d5" * 20000, "ab" * 20000 + "\n")  # fmt: skip
    ref = reference(tok_tiny.both()[kind])
    for text in runs:
        assert tok.encode(text) == ref.encode(text).ids
    assert len(tok.encode(b"\xff" * 50000)) > 0


def test_scratch_and_capacity_are_checked() -> None:
    tok = opened(tok_tiny.both()["nfc"])
    text = "naïve " * 50
    raw = text.encode()
    full = tok.encode(text)
    ids = (ctypes.c_uint32 * len(full))()

    def encode(cap: int, scratch_bytes: int) -> int:
        scratch = (ctypes.c_uint64 * (scratch_bytes // 8 + 1))()
        found: int = tok.lib.gr_tok_encode(
            tok.handle, raw, ctypes.c_size_t(len(raw)), ctypes.c_bool(False), ids,
            ctypes.c_size_t(cap), scratch, ctypes.c_size_t(scratch_bytes),
        )  # fmt: skip
        return found

    enough = 32 * len(raw) + 256
    assert encode(len(full), enough) == len(full)
    for cap in (len(full) - 1, 7, 0):  # counted all the same; nothing is written behind cap
        ids[:] = [0xFFFFFFFF] * len(full)
        assert encode(cap, enough) == len(full)
        assert list(ids) == full[:cap] + [0xFFFFFFFF] * (len(full) - cap)
    for size in (0, 8, 100, len(raw), 3 * len(raw), 4 * len(raw)):
        assert encode(len(full), size) == E_SCRATCH


def test_same_bytes_twice_and_in_any_key_order() -> None:
    data = tok_tiny.both()["nfc"]
    mixed = copy.deepcopy(data)
    mixed["model"]["vocab"] = dict(reversed(list(data["model"]["vocab"].items())))
    mixed["added_tokens"] = list(reversed(data["added_tokens"]))
    rows = tok_tiny.rows_of(data)
    sections = {compile_tokenizer(TokenizerSource(d), rows, PLAIN) for d in (data, data, mixed)}
    assert len(sections) == 1


def test_rows_without_a_token_are_masked_and_lost_tokens_named() -> None:
    data = copy.deepcopy(tok_tiny.both()["byte"])
    last = tok_tiny.rows_of(data)
    data["added_tokens"].append(tok_tiny.added("<image>", last + 7, True))
    rows = last + 5
    tok = opened(data, rows)
    flags = [tok.lib.gr_tok_flags(tok.handle, ctypes.c_uint32(i)) & 0xFF for i in range(rows + 2)]
    assert flags[last:] == [TokenFlag.UNUSED] * 7
    assert flags[tok_tiny.number_of(data, "<|end|>")] & TokenFlag.CONTROL
    notes = tokenizer_notes(TokenizerSource(data), rows)
    assert len(notes) == 1
    assert "'<image>'" in notes[0]
    assert str(rows) in notes[0]


def test_a_vocabulary_over_the_rows_is_refused() -> None:
    data = tok_tiny.both()["byte"]
    with pytest.raises(CheckpointError, match="model has 300 rows"):
        compile_tokenizer(TokenizerSource(data), 300, PLAIN)


def test_stop_and_bos_must_be_tokens() -> None:
    source = TokenizerSource(tok_tiny.both()["byte"])
    rows = tok_tiny.rows_of(tok_tiny.both()["byte"]) + 1
    for generation in (
        Generation(stop_ids=(rows - 1,)),
        Generation(stop_ids=(rows,)),
        Generation(stop_ids=(), bos_id=-1),
    ):
        with pytest.raises(CheckpointError, match="is not a token of the model"):
            compile_tokenizer(source, rows, generation)
    with pytest.raises(CheckpointError, match="add_bos"):
        compile_tokenizer(source, rows, Generation(stop_ids=(), add_bos=True))


def test_opening_checks_size_rows_and_alignment() -> None:
    data = tok_tiny.both()["spm"]
    rows = tok_tiny.rows_of(data)
    section = compile_tokenizer(TokenizerSource(data), rows, PLAIN)
    lib = tok_native.native()
    assert tok_native.Tok(lib, section, rows + 1).status == E_VOCAB
    assert tok_native.Tok(lib, section[:-8], rows).status != 0
    assert tok_native.Tok(lib, section + bytes(8), rows).status == E_SIZE
    assert tok_native.Tok(lib, b"", rows).status == E_SIZE
    kind = struct.unpack_from("<I", section)[0]
    assert kind == 1


def change(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Sets an entry named by a dotted path."""

    def apply(data: dict[str, Any]) -> None:
        *folders, name = path.split(".")
        at: Any = data
        for folder in folders:
            at = at[int(folder)] if folder.isdigit() else at[folder]
        at[name] = value

    return apply


REFUSALS: dict[str, tuple[str, object, str]] = {
    "model kind": ("model.type", "Unigram", "Unigram"),
    "unknown option": ("model.frobnicate", 1, "frobnicate"),
    "dropout": ("model.dropout", 0.5, "dropout"),
    "prefix": ("model.continuing_subword_prefix", "##", "continuing_subword_prefix"),
    "normalizer": ("normalizer", {"type": "NFKC"}, "NFKC"),
    "prepend": ("normalizer", {"type": "Prepend", "prepend": "_"}, "Prepend"),
    "pre-tokenizer": ("pre_tokenizer", {"type": "Metaspace"}, "Metaspace"),
    "decoder": ("decoder", {"type": "WordPiece"}, "WordPiece"),
    "post-processor": ("post_processor", {"type": "BertProcessing"}, "BertProcessing"),
    "lstrip": ("added_tokens.0.lstrip", True, "lstrip"),
    "single word": ("added_tokens.1.single_word", True, "single_word"),
    "mixed": ("added_tokens.1.normalized", True, "normalized"),
    "id": ("added_tokens.1.id", "7", "added token"),
    "merge": ("model.merges", ["a b c"], "merge"),
    "merge of strangers": ("model.merges", [["q\u1234", "x"]], "not in the vocabulary"),
    "vocabulary": ("model.vocab", [], "vocabulary"),
    "lookbehind": (
        "pre_tokenizer",
        {"type": "Split", "pattern": {"Regex": r"(?<=a)b"}, "behavior": "Isolated"},
        "pattern",
    ),
    "removing split": (
        "pre_tokenizer",
        {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Removed"},
        "Removed",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_supported_is_refused_by_name(case: str) -> None:
    path, value, word = REFUSALS[case]
    data = copy.deepcopy(tok_tiny.both()["byte"])
    change(path, value)(data)
    with pytest.raises(CheckpointError, match=word.replace("(", r"\(")):
        compile_tokenizer(TokenizerSource(data), tok_tiny.rows_of(tok_tiny.both()["byte"]), PLAIN)


@pytest.mark.parametrize(
    "pattern",
    [r"a++", r"a*?", r"(?<!a)b", r"(?=a)b", r"(a)\1", r"\p{Lu}", r"\w", r"[a[b]]", r"a{99}", r"(a",
     r"a)", r".", r"^a", r"(?i:ß)", r"(?i:st)", r"a**", r"[z-a]", r"\pL"],
)  # fmt: skip
def test_unknown_pattern_syntax_is_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="split pattern"):
        split.parse(pattern)


def test_a_merge_into_a_control_token_is_left_out() -> None:
    data = copy.deepcopy(tok_tiny.both()["spm"])
    vocab = data["model"]["vocab"]
    vocab["ab<"] = len(vocab) + 100
    data["added_tokens"].append(tok_tiny.added("ab<", vocab["ab<"], True))
    vocab["ab"] = vocab.get("ab", vocab["ab<"] + 1)
    vocab.setdefault("<", vocab["ab<"] + 2)
    data["model"]["merges"] += [["a", "b"], ["ab", "<"]]
    tok = opened(data, vocab["ab<"] + 3)
    assert tok.encode("ab<", control=True) == [vocab["ab<"]]
    assert vocab["ab<"] not in tok.encode("ab<")


def test_whole_words_win_over_merges() -> None:
    data = copy.deepcopy(tok_tiny.both()["byte"])
    data["model"]["ignore_merges"] = True
    vocab = data["model"]["vocab"]
    vocab["zqzq"] = tok_tiny.rows_of(data)
    tok, ref = opened(data), reference(data)
    for text in ("zqzq", "zqzqz", " zqzq", "zqzq zqzq"):
        assert tok.encode(text) == ref.encode(text).ids
    assert tok.encode("zqzq") == [vocab["zqzq"]]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_stream_releases_only_whole_characters(size: int) -> None:
    text = "👨‍👩‍👧‍👦 é日本".encode()
    broken = (b"\xe2\x9c\x85\x85", b"\xf0\x9f", b"\xff\xfe" + text + b"\xe2\x82")
    for data in (text, *broken):
        stream = tok_native.Stream(tok_native.native())
        out = b""
        for at in range(0, len(data), size):
            part = stream.push(data[at : at + size])
            assert part.decode("utf-8") is not None
            out += part
        out += stream.flush()
        assert out.decode("utf-8") == data.decode("utf-8", "replace")
        assert stream.flush() == b""
