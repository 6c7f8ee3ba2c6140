"""Small but real tokenizers, trained on the test phrases, as tokenizer.json dictionaries."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import tok_corpus

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ("<|end|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<think>", "</think>")


def added(text: str, number: int, special: bool) -> dict[str, Any]:
    """An entry of added_tokens."""
    options = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **options, "special": special}


def parsed(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer.json of a tokenizer."""
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    return found


def append(data: dict[str, Any], control: tuple[str, ...], plain: tuple[str, ...]) -> None:
    """Adds tokens behind the vocabulary."""
    count = len(data["model"]["vocab"])
    texts = [(text, True) for text in control] + [(text, False) for text in plain]
    for i, (text, special) in enumerate(texts):
        data["added_tokens"].append(added(text, count + i, special))


def byte_level(size: int = 700, nfc: bool = False) -> dict[str, Any]:
    """Byte level, split like Llama 3; ids behind the vocabulary: CONTROL, then PLAIN."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(tok_corpus.PHRASES, trainer)
    data = parsed(tokenizer)
    append(data, CONTROL, PLAIN)
    return data


def score_based(size: int = 400) -> dict[str, Any]:
    """Characters with byte fallback, as Gemma: <pad> <eos> <bos> <unk>, bytes, then the rest."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, special_tokens=[])
    tokenizer.train_from_iterator(tok_corpus.PHRASES[:8], trainer)
    trained = parsed(tokenizer)["model"]
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learnt = sorted(trained["vocab"], key=lambda text: trained["vocab"][text])
    vocab = {text: number for number, text in enumerate([*names, *learnt])}
    tokenizer = Tokenizer(
        models.BPE(
            vocab, [tuple(m) for m in trained["merges"]],
            unk_token="<unk>", fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    data = parsed(tokenizer)
    data["added_tokens"] = [added(text, i, True) for i, text in enumerate(names[:4])]
    append(data, ("<start_of_turn>", "<end_of_turn>"), ("\n\n",))
    return data


@lru_cache(maxsize=1)
def both() -> dict[str, dict[str, Any]]:
    """The two kinds, and the byte level one with normal form C."""
    return {"byte": byte_level(), "nfc": byte_level(nfc=True), "spm": score_based()}


def rows_of(data: dict[str, Any]) -> int:
    """Rows that hold all ids."""
    ids = [*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"])]
    return max(ids) + 1


def number_of(data: dict[str, Any], text: str) -> int:
    """Id of an added token."""
    return next(token["id"] for token in data["added_tokens"] if token["content"] == text)
