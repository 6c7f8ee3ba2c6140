"""Turns a GGUF vocabulary into the form of a `tokenizer.json`, so that one compiler serves both.

Two kinds exist: "llama" (scores and byte fallback, as Gemma has it) and "gpt2" (byte level, with
merges in the file and the split pattern named by `tokenizer.ggml.pre`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gemmake.errors import CheckpointError

MARK = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# The splits of the published tokenizers that carry these names.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def isolated(pattern: str) -> list[dict[str, Any]]:
    """Split by a pattern, then bytes."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return [{**split, "invert": False}, {**BYTE_LEVEL, "use_regex": False}]


SPLITS: dict[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}, {**BYTE_LEVEL, "use_regex": True}],
    "gpt-2": [{**BYTE_LEVEL, "use_regex": True}],
    "qwen2": isolated(QWEN2),
    "llama-bpe": isolated(LLAMA3),
    "llama3": isolated(LLAMA3),
    "llama-v3": isolated(LLAMA3),
}
NORMALIZERS: dict[str, dict[str, Any]] = {"qwen2": {"type": "NFC"}}
IGNORE_MERGES = {"llama-bpe", "llama3", "llama-v3"}


def strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    """A metadata array of strings. Raises CheckpointError when it is absent or something else."""
    values = metadata.get(key)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise CheckpointError(f"GGUF: {key} is not a list; use a file with a complete tokenizer")
    if not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"GGUF: {key} holds something other than text; repair the file")
    return list(values)


def numbers(metadata: Mapping[str, Any], key: str, count: int) -> list[float]:
    """A metadata array of `count` numbers."""
    values = metadata.get(key)
    if values is None or isinstance(values, str | bytes) or len(values) != count:
        found = "absent" if values is None else f"{len(values)} entries"
        raise CheckpointError(
            f"GGUF: {key} should have {count} numbers, found {found}; repair the file"
        )
    return [float(value) for value in values]


def added_tokens(tokens: Sequence[str], types: Sequence[float]) -> list[dict[str, Any]]:
    """Control tokens as special ones, user-defined tokens as plain ones."""
    options = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": token, **options, "special": kind == CONTROL}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]


def vocabulary(tokens: Sequence[str], types: Sequence[float]) -> dict[str, int]:
    """Text to id, without the rows that only fill the embedding. Raises CheckpointError for a text
    that two ids share."""
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if types[number] != UNUSED and vocab.setdefault(token, number) != number:
            raise CheckpointError(
                f"GGUF: token {token!r} has the ids {vocab[token]} and {number}; repair the file"
            )
    return vocab


def score_merges(
    tokens: Sequence[str], types: Sequence[float], scores: Sequence[float]
) -> list[list[str]]:
    """Merges that the scores imply: every split of a token into two tokens, best score first, then
    the longer left part. User-defined tokens score 0 in the original model; GGUF writers put a
    filler there, so 0 is used."""
    vocab = vocabulary(tokens, types)
    found = []
    for token, number in vocab.items():
        score = 0.0 if types[number] in (USER_DEFINED, CONTROL) else scores[number]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-score, -cut, cut - len(token), number, left, right))
    found.sort(key=lambda row: row[:3])
    return [[left, right] for *_, left, right in found]


def llama_tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Scores and byte fallback."""
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        raise CheckpointError(
            "GGUF: the tokenizer adds a space before the text; only vocabularies without it "
            "(Gemma) are supported"
        )
    tokens = strings(metadata, "tokenizer.ggml.tokens")
    scores = numbers(metadata, "tokenizer.ggml.scores", len(tokens))
    types = numbers(metadata, "tokenizer.ggml.token_type", len(tokens))
    tokens = [MARK * len(t) if t and not t.strip(" ") else t for t in tokens]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is not None and not 0 <= unknown < len(tokens):
        raise CheckpointError(
            f"GGUF: tokenizer.ggml.unknown_token_id is {unknown} of {len(tokens)} tokens; "
            "repair the file"
        )
    return {
        "version": "1.0",
        "added_tokens": added_tokens(tokens, types),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": MARK},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary(tokens, types),
            "merges": score_merges(tokens, types, scores),
        },
    }


def gpt2_tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Byte level with merges."""
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in SPLITS:
        raise CheckpointError(
            f"GGUF: tokenizer.ggml.pre {pre!r} is not supported; known are {', '.join(SPLITS)}"
        )
    tokens = strings(metadata, "tokenizer.ggml.tokens")
    types = numbers(metadata, "tokenizer.ggml.token_type", len(tokens))
    return {
        "version": "1.0",
        "added_tokens": added_tokens(tokens, types),
        "normalizer": NORMALIZERS.get(pre),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[pre]},
        "post_processor": None,
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in IGNORE_MERGES,
            "vocab": vocabulary(tokens, types),
            "merges": [merge.split(" ", 1) for merge in strings(metadata, "tokenizer.ggml.merges")],
        },
    }


def tokenizer_json_from_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizer.json` form of a GGUF vocabulary.

    `metadata` maps GGUF keys to Python values (text, numbers, lists). Raises CheckpointError for
    kinds, splits or arrays that are missing or not supported.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "llama":
        return llama_tokenizer(metadata)
    if kind == "gpt2":
        return gpt2_tokenizer(metadata)
    raise CheckpointError(
        f"GGUF: tokenizer.ggml.model {kind!r} is not supported; known are llama and gpt2"
    )
