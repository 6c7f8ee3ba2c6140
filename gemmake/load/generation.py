"""Tokenizer facts that belong to the model: stop ids, bos, ids against vocabulary rows, name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gemmake.errors import CheckpointError
from gemmake.load.source import LIMIT, damaged, display, name_list
from gemmake.model import Generation, TokenizerSource

TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>")
# Placeholders of images and sounds. Text-only checkpoints ship the tokenizer of their multimodal
# siblings, where these ids lie just past the embedding of the text model.
MEDIA_TOKENS = ("<image_soft_token>", "<audio_soft_token>")
_NAME_CHARS = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME = 64


@dataclass(frozen=True)
class Vocabulary:
    """Token text -> id of a tokenizer.json, base pieces and added tokens merged by id."""

    base: Mapping[str, int]
    added: Mapping[str, int]

    def id_of(self, token: str) -> int | None:
        """The id of a token, added ones first."""
        found = self.added.get(token)
        return self.base.get(token) if found is None else found

    def ids(self) -> set[int]:
        return set(self.base.values()) | set(self.added.values())


def vocabulary(tokenizer_json: Mapping[str, Any], where: str) -> Vocabulary:
    """The ids of a parsed tokenizer.json; CheckpointError when its parts have the wrong type."""
    model = tokenizer_json.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        kind = model.get("type") if isinstance(model, dict) else None
        raise CheckpointError(
            f"{where}: holds no BPE vocabulary (model type {display(repr(kind))}); "
            "only BPE tokenizers are supported"
        )
    base = model["vocab"]
    added: dict[str, Any] = {}
    entries = tokenizer_json.get("added_tokens") or []
    for entry in entries if isinstance(entries, list) else [None]:
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise damaged(f"{where}: added_tokens is malformed")
        added[entry["content"]] = entry.get("id")
    for token, token_id in [*base.items(), *added.items()]:
        if not _is_id(token_id):
            raise CheckpointError(
                f"{where}: token {display(token)} has id {display(repr(token_id))}, "
                "no token id; the tokenizer is damaged"
            )
    return Vocabulary(base, added)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LIMIT


def fit_to_rows(
    tokenizer: TokenizerSource, rows: int, where: str
) -> tuple[TokenizerSource, tuple[str, ...]]:
    """The tokenizer without media tokens beyond the embedding, and notes about unused rows.

    CheckpointError when any other token has an id >= rows.
    """
    vocab = vocabulary(tokenizer.tokenizer_json, where)
    beyond = {t: i for t, i in [*vocab.base.items(), *vocab.added.items()] if i >= rows}
    dropped = {t for t in beyond if t in MEDIA_TOKENS and t not in vocab.base}
    wrong = set(beyond) - dropped
    if wrong:
        shown = name_list(f"{token} = {beyond[token]}" for token in wrong)
        raise CheckpointError(
            f"{where}: the embedding has {rows} rows, but the tokenizer has ids beyond: {shown}; "
            "the tokenizer belongs to another model"
        )
    notes = []
    if dropped:
        tokens = tokenizer.tokenizer_json["added_tokens"]
        kept = [entry for entry in tokens if entry["content"] not in dropped]
        tokenizer = replace(
            tokenizer, tokenizer_json={**tokenizer.tokenizer_json, "added_tokens": kept}
        )
        notes.append(f"token {name_list(dropped)} has no row in the embedding and was dropped")
    unused = sorted(set(range(rows)) - vocab.ids())
    if unused:
        notes.append(f"{len(unused)} embedding rows have no token ({_ranges(unused)})")
    return tokenizer, tuple(notes)


def _ranges(ids: list[int]) -> str:
    """Ascending ids as text: 3, 500..511."""
    parts: list[list[int]] = []
    for value in ids:
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    shown = [str(a) if a == b else f"{a}..{b}" for a, b in parts[:8]]
    return ", ".join(shown) + (", .." if len(parts) > 8 else "")


def token_text(value: Any) -> str | None:
    """A token of tokenizer_config.json, written as a string or as a map with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _id_list(value: Any, where: str) -> list[int]:
    """Token ids of a config field: null, an int or a list of ints."""
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    for entry in values:
        if not _is_id(entry):
            raise damaged(
                f"{where} is {display(repr(entry))}, a token id or a list of ids is expected"
            )
    return values


def post_processor_bos(tokenizer_json: Mapping[str, Any]) -> int | None:
    """The id that a TemplateProcessing post-processor puts before the text, if it does."""
    processor = tokenizer_json.get("post_processor")
    queue = [processor] if isinstance(processor, dict) else []
    for entry in queue:
        nested = entry.get("processors")
        if entry.get("type") == "Sequence" and isinstance(nested, list):
            queue.extend(e for e in nested if isinstance(e, dict) and e.get("type") != "Sequence")
        if entry.get("type") != "TemplateProcessing":
            continue
        try:
            token = entry["single"][0]["SpecialToken"]["id"]
            ids = entry["special_tokens"][token]["ids"]
        except (KeyError, IndexError, TypeError):
            continue
        if isinstance(ids, list) and len(ids) == 1 and _is_id(ids[0]):
            found: int = ids[0]
            return found
    return None


def generation(
    configs: Iterable[tuple[str, Mapping[str, Any]]],
    tokenizer: TokenizerSource,
    rows: int,
    where: str,
) -> tuple[Generation, tuple[str, ...]]:
    """Stop ids (the union of every source), bos and pad of a model, and notes.

    `configs`: (file name, parsed JSON) of config.json, its text_config and generation_config.json,
    in order of precedence. Sampling defaults are gemmake's own, not the checkpoint's.
    """
    configs = list(configs)
    vocab = vocabulary(tokenizer.tokenizer_json, where)
    stops: set[int] = set()
    for file, config in configs:
        stops.update(_id_list(config.get("eos_token_id"), f"{file}: field eos_token_id"))
    for token in _own_stops(tokenizer, vocab):
        stops.add(token)
    notes: list[str] = []
    if not stops:
        notes.append("no file names an end-of-text token; replies end at the token limit only")
    add_bos, bos = _bos(configs, tokenizer, vocab, where, notes)
    pad = _first_id(configs, "pad_token_id")
    named = [("eos", stop) for stop in sorted(stops)] + ([("bos", bos)] if bos is not None else [])
    for what, value in named:
        if value >= rows:
            raise CheckpointError(
                f"{where}: {what} id {value} is beyond the {rows} rows of the embedding; "
                "the config belongs to another model"
            )
    pad = pad if pad is not None and pad < rows else None
    result = Generation(tuple(sorted(stops)), bos_id=bos, pad_id=pad, add_bos=add_bos)
    return result, tuple(notes)


def _own_stops(tokenizer: TokenizerSource, vocab: Vocabulary) -> list[int]:
    """The tokenizer's eos and the turn end of its template."""
    found = []
    eos = token_text(tokenizer.config.get("eos_token"))
    if eos is not None and (eos_id := vocab.id_of(eos)) is not None:
        found.append(eos_id)
    template = tokenizer.chat_template or ""
    for token in TURN_ENDS:
        if token in template and token in vocab.added:
            found.append(vocab.added[token])
    return found


def _first_id(configs: Iterable[tuple[str, Mapping[str, Any]]], field: str) -> int | None:
    for _, config in configs:
        value = config.get(field)
        if isinstance(value, int) and _is_id(value):
            return value
    return None


def _bos(
    configs: list[tuple[str, Mapping[str, Any]]],
    tokenizer: TokenizerSource,
    vocab: Vocabulary,
    where: str,
    notes: list[str],
) -> tuple[bool, int | None]:
    """(raw prompts start with bos, its id). The flag of tokenizer_config.json decides; without one
    the post-processor of tokenizer.json does."""
    flag = tokenizer.config.get("add_bos_token")
    template_bos = post_processor_bos(tokenizer.tokenizer_json)
    add_bos = flag if isinstance(flag, bool) else template_bos is not None
    if flag is False and template_bos is not None:
        notes.append(
            "tokenizer_config.json says add_bos_token false while tokenizer.json adds one; "
            "raw prompts start without bos"
        )
    own = token_text(tokenizer.config.get("bos_token"))
    bos = template_bos if add_bos else None
    if bos is None and own is not None:
        bos = vocab.id_of(own)
    if bos is None:
        bos = _first_id(configs, "bos_token_id")
    if add_bos and bos is None:
        raise CheckpointError(
            f"{where}: add_bos_token is set, but no file names the bos token; "
            "add bos_token to tokenizer_config.json"
        )
    return add_bos, bos


def clean_name(text: str) -> str:
    """A short name of [A-Za-z0-9._-] that does not begin with a dot, or an empty string."""
    return _NAME_CHARS.sub("-", text).strip("-.")[:_MAX_NAME].rstrip("-.")
