"""Compiles the checkpoint's tokenizer to the TOKN section (csrc/TOKENS.md).

The source is the reference's own `tokenizer.json`, part by part: normaliser, pre-tokenizer, model,
decoder and post-processor. Every option must be one that the engine reproduces exactly; any other
is refused by name, because an approximate tokenizer is a wrong model that looks right.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gemmake.errors import CheckpointError
from gemmake.model import Generation, TokenizerSource
from gemmake.passes import split, unidata
from gemrun.format.tokens import (
    MAX_PIECE,
    MAX_STOP,
    MAX_VOCAB,
    NONE,
    PIECE_BLOCK,
    Kind,
    TokenFlag,
    TokFlag,
)

MARK = "\u2581"

JsonMap = Mapping[str, Any]
Merge = tuple[int, int, int]  # left, right, new; its rank is its place
Pair = tuple[int, int]


def byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level vocabularies write bytes with."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


ALPHABET = byte_alphabet()


def refuse(part: str, value: object) -> CheckpointError:
    """The error for a part of tokenizer.json that the engine cannot reproduce."""
    text = repr(value)
    text = text if len(text) <= 160 else text[:157] + "..."
    return CheckpointError(
        f"tokenizer.json: {part} {text} is not supported; "
        "use a checkpoint with a supported byte pair tokenizer"
    )


@dataclass(frozen=True)
class Added:
    """An added token."""

    text: str
    id: int
    control: bool


@dataclass(frozen=True)
class Plan:
    """What the parts of tokenizer.json ask for."""

    kind: int
    flags: int
    stages: tuple[split.Program, ...]
    whole: bool  # ignore_merges
    byte_fallback: bool
    unk: int | None


def expect_keys(part: str, value: JsonMap, known: Iterable[str]) -> None:
    """Refuses keys that nobody here reads."""
    unknown = sorted(set(value) - set(known) - {"type"})
    if unknown:
        raise refuse(f"{part} option", unknown[0])


def flatten(part: JsonMap | None, key: str) -> list[JsonMap]:
    """The members of a Sequence, of nested ones too; a single part; or nothing."""
    todo, out = [part] if part else [], []
    while todo:
        item = todo.pop(0)
        if not isinstance(item, Mapping):
            raise refuse(key, item)
        if item.get("type") == "Sequence":
            members = item.get(key)
            if not isinstance(members, list):
                raise refuse(f"sequence without {key}", dict(item))
            todo = [*members, *todo]
        else:
            out.append(item)
    return out


def check_shape(tokenizer: JsonMap) -> None:
    """The types that everything below counts on. Raises CheckpointError naming the first misfit."""
    model = tokenizer.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("vocab"), Mapping):
        raise refuse("model", "without a vocabulary")
    if not isinstance(model.get("merges") or [], list):
        raise refuse("model option merges", type(model["merges"]).__name__)
    for text, number in model["vocab"].items():
        if type(number) is not int or not isinstance(text, str):
            raise refuse("vocabulary entry", {text: number})
    for token in tokenizer.get("added_tokens") or []:
        fits = isinstance(token, Mapping) and isinstance(token.get("content"), str)
        if not fits or type(token.get("id")) is not int or token["id"] < 0:
            raise refuse("added token", token)


def plan_normalizer(tokenizer: JsonMap) -> int:
    """Flags of the normaliser."""
    flags = 0
    for part in flatten(tokenizer.get("normalizer"), "normalizers"):
        if part.get("type") == "NFC":
            flags |= TokFlag.NFC
        elif part == {"type": "Replace", "pattern": {"String": " "}, "content": MARK}:
            flags |= TokFlag.SPACE
        else:
            raise refuse("normalizer", dict(part))
    return flags


def plan_splits(tokenizer: JsonMap, flags: int) -> tuple[tuple[split.Program, ...], bool]:
    """Split stages of the pre-tokenizer, and whether it ends in bytes."""
    stages: list[split.Program] = []
    bytes_ = False
    for part in flatten(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        kind, pattern = part.get("type"), part.get("pattern")
        if bytes_:
            raise refuse("pre_tokenizer after ByteLevel", dict(part))
        if kind == "Split" and pattern == {"String": " "} and flags & TokFlag.SPACE:
            continue  # no blank is left after the normaliser, so it never splits
        if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
            if not isinstance(pattern, Mapping) or not isinstance(pattern.get("Regex"), str):
                raise refuse("pre_tokenizer", dict(part))
            stages.append(split.parse(pattern["Regex"]))
        elif kind == "Digits":
            stages.append(split.digits(bool(part.get("individual_digits"))))
        elif kind == "ByteLevel" and not part.get("add_prefix_space"):
            if part.get("use_regex", True):
                stages.append(split.parse(split.GPT2))
            bytes_ = True
        else:
            raise refuse("pre_tokenizer", dict(part))
    if len(stages) > 4:
        raise refuse("pre_tokenizer with more than 4 stages", len(stages))
    return tuple(stages), bytes_


def check_decoder(tokenizer: JsonMap, kind: int) -> None:
    """The decoder must be the inverse that the engine applies."""
    parts = [dict(part) for part in flatten(tokenizer.get("decoder"), "decoders")]
    if kind == Kind.BYTE:
        good = len(parts) == 1 and parts[0].get("type") == "ByteLevel"
    else:
        good = parts == [
            {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
    if not good:
        raise refuse("decoder", parts)


def check_post_processor(tokenizer: JsonMap) -> None:
    """It may put tokens before the text (bos), nothing behind it."""
    for part in flatten(tokenizer.get("post_processor"), "processors"):
        if part.get("type") == "ByteLevel":
            continue
        if part.get("type") != "TemplateProcessing":
            raise refuse("post_processor", dict(part))
        single = part.get("single") or []
        fits = isinstance(single, list) and 1 <= len(single) <= 2
        if not fits or "Sequence" not in single[-1]:
            raise refuse("post_processor template", single)


MODEL_KEYS = {
    "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
    "byte_fallback", "ignore_merges", "vocab", "merges",
}  # fmt: skip


def plan_model(tokenizer: JsonMap) -> Plan:
    """Reads all parts. Raises CheckpointError naming the first one that is not supported."""
    model = tokenizer.get("model")
    if not isinstance(model, Mapping) or model.get("type", "BPE") != "BPE":
        raise refuse("model", model.get("type") if isinstance(model, Mapping) else model)
    expect_keys("model", model, MODEL_KEYS)
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise refuse(f"model option {key}", model[key])
    flags = plan_normalizer(tokenizer)
    stages, bytes_ = plan_splits(tokenizer, flags)
    kind = Kind.BYTE if bytes_ else Kind.SPM
    fallback = bool(model.get("byte_fallback"))
    if kind == Kind.SPM and (stages or model.get("ignore_merges") or flags & TokFlag.NFC):
        raise refuse("pre_tokenizer without ByteLevel", tokenizer.get("pre_tokenizer"))
    if kind == Kind.BYTE and (fallback or flags & TokFlag.SPACE):
        raise refuse("byte_fallback or normalizer with ByteLevel", tokenizer.get("normalizer"))
    check_decoder(tokenizer, kind)
    check_post_processor(tokenizer)
    unk = model.get("unk_token")
    if unk is not None and (not isinstance(unk, str) or unk not in model["vocab"]):
        raise refuse("model option unk_token outside the vocabulary", unk)
    return Plan(
        kind=kind,
        flags=flags | (TokFlag.FUSE_UNK if model.get("fuse_unk") else 0),
        stages=stages,
        whole=bool(model.get("ignore_merges")),
        byte_fallback=fallback,
        unk=None if unk is None else model["vocab"][unk],
    )


def added_tokens(tokenizer: JsonMap) -> list[Added]:
    """All added tokens. Raises CheckpointError for options that the engine does not honour."""
    vocab = tokenizer["model"]["vocab"]
    plain = not flatten(tokenizer.get("normalizer"), "normalizers")
    out = []
    for token in tokenizer.get("added_tokens") or []:
        text, number = token["content"], token["id"]
        for key in ("single_word", "lstrip", "rstrip"):
            if token.get(key):
                raise refuse(f"added token option {key} of", text)
        if token.get("normalized") and not plain:
            raise refuse("added token option normalized of", text)
        if vocab.get(text, number) != number:
            raise CheckpointError(
                f"tokenizer.json: added token {text!r} has id {number} but the vocabulary says "
                f"{vocab[text]}; repair the tokenizer"
            )
        if text:
            out.append(Added(text=text, id=number, control=bool(token.get("special"))))
    if len({bool(token.get("normalized")) for token in tokenizer.get("added_tokens") or []}) > 1:
        raise refuse("added tokens with different options", "normalized")
    return out


def tokenizer_notes(source: TokenizerSource, vocab_rows: int) -> tuple[str, ...]:
    """Sentences about added tokens that the model has no row for, and that are left out."""
    lost = [token for token in added_tokens(source.tokenizer_json) if token.id >= vocab_rows]
    return tuple(
        f"tokenizer: added token {token.text!r} has id {token.id} but the model has {vocab_rows} "
        "rows; it is left out"
        for token in lost
    )


def piece_bytes(text: str, kind: int, is_byte: bool) -> bytes:
    """What a token decodes to."""
    if is_byte:
        return bytes([int(text[3:5], 16)])
    if kind == Kind.BYTE:
        codes = [ALPHABET.get(char) for char in text]
        if None not in codes:
            return bytes(code for code in codes if code is not None)
        return text.encode("utf-8")
    return text.replace(MARK, " ").encode("utf-8")


def read_merges(model: JsonMap) -> list[Merge]:
    """Merges as ids. A merge named twice counts where it stands last, as in the reference."""
    vocab, out = model["vocab"], []
    for merge in model.get("merges") or []:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(pair, list) or [type(part) for part in pair] != [str, str]:
            raise refuse("merge", merge)
        left, right = pair
        try:
            out.append((vocab[left], vocab[right], vocab[left + right]))
        except KeyError as error:
            raise CheckpointError(
                f"tokenizer.json: merge {left!r} {right!r} needs {error.args[0]!r}, which is not "
                "in the vocabulary; repair the tokenizer"
            ) from None
    return out


def pack_merges(merges: Sequence[Merge], control: set[int], rows: int) -> tuple[array[int], bytes]:
    """First entry per left id [rows + 1], and the packed entries."""
    if len(merges) >= 1 << 24:
        raise refuse("model with too many merges", len(merges))
    entries: dict[tuple[int, int], int] = {}
    for rank, (left, right, new) in enumerate(merges):
        if new not in control:  # content must never grow into a control token
            entries[left, right] = right << 44 | new << 24 | rank
    ranks = sorted(entry & 0xFFFFFF for entry in entries.values())
    dense = {rank: place for place, rank in enumerate(ranks)}
    counts = array("I", bytes(4 * (rows + 1)))
    packed = array("Q")
    for left, right in sorted(entries):
        entry = entries[left, right]
        packed.append(entry >> 24 << 24 | dense[entry & 0xFFFFFF])
        counts[left + 1] += 1
    for i in range(rows):
        counts[i + 1] += counts[i]
    return counts, little(packed)


def little(values: array[int]) -> bytes:
    """Bytes of an array in little-endian order."""
    if struct.pack("=H", 1) != struct.pack("<H", 1):
        values = values[:]
        values.byteswap()
    return values.tobytes()


def u32(values: Iterable[int]) -> bytes:
    """Bytes of u32 values."""
    return little(array("I", values))


def u64(pairs: Iterable[Pair]) -> bytes:
    """Bytes of entries with a key in the high half."""
    return little(array("Q", (key << 32 | value for key, value in pairs)))


def merge_symbols(symbols: list[int], ranks: Mapping[Pair, Pair]) -> list[int]:
    """Merges the symbols of one word: lowest rank first, leftmost among equals."""
    while len(symbols) > 1:
        found = [(ranks[pair][0], i) for i, pair in enumerate(pairwise(symbols)) if pair in ranks]
        if not found:
            break
        _, i = min(found)
        symbols[i : i + 2] = [ranks[symbols[i], symbols[i + 1]][1]]
    return symbols


def whole_words(
    words: Mapping[int, bytes], byte_ids: Sequence[int], merges: Sequence[Merge]
) -> list[int]:
    """Tokens that merging their bytes does not lead to, ascending by bytes.

    With `ignore_merges` the reference looks a word up before it merges; only these make a
    difference.
    """
    ranks = {(left, right): (rank, new) for rank, (left, right, new) in enumerate(merges)}
    out = []
    for number, word in words.items():
        symbols = [byte_ids[byte] for byte in word if byte_ids[byte] != NONE]
        if word and merge_symbols(symbols, ranks) != [number]:
            out.append(number)
    return sorted(out, key=lambda number: words[number])


def build_trie(tokens: Iterable[tuple[bytes, int]]) -> tuple[bytes, bytes, int]:
    """Nodes, edge bytes and node count of the trie, breadth first."""
    children: list[dict[int, int]] = [{}]
    ids = [NONE]
    for text, number in sorted(tokens):
        node = 0
        for byte in text:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                ids.append(NONE)
            node = children[node][byte]
        ids[node] = number
    queue, nodes, edges = [0], array("I"), bytearray()
    for node in queue:  # grows while it is walked
        nodes.extend((len(edges), ids[node]))
        for byte, child in sorted(children[node].items()):
            edges.append(byte)
            queue.append(child)
    return little(nodes), bytes(edges), len(queue)


def nfc_tables() -> tuple[list[bytes], list[int]]:
    """decomp, decomp_cp, comp, ccc and their counts."""
    decomp: list[Pair] = []
    points = array("I")
    for row in unidata.DECOMPOSE.split():
        cp, *parts = (int(word, 16) for word in row.split(","))
        decomp.append((cp, len(points)))
        points.extend(parts)
    comp = array("Q")
    for row in unidata.COMPOSE.split():
        first, second, composed = (int(word, 16) for word in row.split(","))
        comp.append(first << 42 | second << 21 | composed)
    classes: list[tuple[int, int, int]] = []
    value = 0
    for word in unidata.CCC.split():
        if word.endswith(":"):
            value = int(word[:-1])
        else:
            classes += [(low, high, value) for low, high in split.parse_ranges(word)]
    steps: list[Pair] = [(0, 0)]
    for low, high, value in sorted(classes):
        if steps[-1][0] == low:
            steps.pop()
        steps += [(low, value), (high + 1, 0)]
    tables = [u64(decomp), little(points), little(comp), u64(steps)]
    return tables, [len(decomp), len(points), len(comp), len(steps)]


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the TOKN section: pieces and flags by id, and the first symbols."""

    pieces: tuple[bytes, ...]
    flags: bytes
    byte_ids: tuple[int, ...]  # [256]
    chars: tuple[tuple[int, int], ...]  # (code point, id), ascending
    control: frozenset[int]


def is_byte_token(text: str, plan: Plan) -> bool:
    """<0x00> .. <0xFF> of a vocabulary with byte fallback."""
    return (
        plan.byte_fallback
        and len(text) == 6
        and text.startswith("<0x")
        and text.endswith(">")
        and all(char in "0123456789ABCDEF" for char in text[3:5])
    )


def build_vocabulary(
    vocab: Mapping[str, int], added: Sequence[Added], plan: Plan, rows: int
) -> Vocabulary:
    """Pieces, flags and first symbols. Raises CheckpointError for ids or sizes out of bounds."""
    pieces: list[bytes] = [b""] * rows
    flags = bytearray([TokenFlag.UNUSED]) * rows
    byte_ids, chars = [NONE] * 256, {}
    control = frozenset(token.id for token in added if token.control)
    for text, number in vocab.items():
        if not 0 <= number < rows:
            raise CheckpointError(
                f"tokenizer.json: token {text!r} has id {number} but the model has {rows} rows; "
                "use the tokenizer of this checkpoint"
            )
        if not flags[number] & TokenFlag.UNUSED:
            raise CheckpointError(
                f"tokenizer.json: id {number} belongs to two tokens; repair the tokenizer"
            )
        is_byte = is_byte_token(text, plan)
        pieces[number] = piece_bytes(text, plan.kind, is_byte)
        flags[number] = TokenFlag.BYTE if is_byte else 0
        if number in control:
            continue
        if is_byte or (plan.kind == Kind.BYTE and len(text) == 1 and text in ALPHABET):
            byte_ids[pieces[number][0]] = number
        elif plan.kind == Kind.SPM and len(text) == 1:
            chars[ord(text)] = number
    names = {number: text for text, number in vocab.items()}
    for token in added:
        if names.setdefault(token.id, token.text) != token.text:
            raise CheckpointError(
                f"tokenizer.json: added token {token.text!r} has the id {token.id} of "
                f"{names[token.id]!r}; repair the tokenizer"
            )
        pieces[token.id] = piece_bytes(token.text, plan.kind, False)
        flags[token.id] = (
            flags[token.id] & TokenFlag.BYTE
            | TokenFlag.ADDED
            | (TokenFlag.CONTROL if token.control else 0)
        )
    for number, piece in enumerate(pieces):
        if len(piece) > MAX_PIECE:
            raise CheckpointError(
                f"tokenizer.json: token {number} has {len(piece)} bytes, at most {MAX_PIECE} are "
                "supported; use another tokenizer"
            )
    if plan.byte_fallback and NONE in byte_ids:
        raise refuse("byte_fallback without the token for byte", byte_ids.index(NONE))
    return Vocabulary(
        pieces=tuple(pieces),
        flags=bytes(flags),
        byte_ids=tuple(byte_ids),
        chars=tuple(sorted(chars.items())),
        control=control,
    )


def check_ids(generation: Generation, flags: bytes, rows: int) -> None:
    """Bos and stop ids must be tokens of the model."""
    named = [("bos", generation.bos_id)] if generation.bos_id is not None else []
    named += [("stop", number) for number in generation.stop_ids]
    for name, number in named:
        if number is None or not 0 <= number < rows or flags[number] & TokenFlag.UNUSED:
            raise CheckpointError(
                f"checkpoint: {name} id {number} is not a token of the model, which has {rows} "
                "rows; correct generation_config.json or config.json"
            )
    if len(generation.stop_ids) > MAX_STOP:
        raise refuse("number of stop ids", len(generation.stop_ids))
    if generation.add_bos and generation.bos_id is None:
        raise CheckpointError("checkpoint: add_bos is set without a bos id; name the bos token")


def aligned(data: bytes) -> bytes:
    """Padded with zeros to 8 bytes."""
    return data + bytes(-len(data) % 8)


def compile_tokenizer(source: TokenizerSource, vocab_rows: int, generation: Generation) -> bytes:
    """The TOKN section. Raises CheckpointError for anything the engine cannot reproduce."""
    if not 0 < vocab_rows <= MAX_VOCAB:
        raise CheckpointError(
            f"checkpoint: the embedding has {vocab_rows} rows, 1 to {MAX_VOCAB} are supported"
        )
    tokenizer = source.tokenizer_json
    check_shape(tokenizer)
    plan = plan_model(tokenizer)
    added = [token for token in added_tokens(tokenizer) if token.id < vocab_rows]
    vocab = build_vocabulary(tokenizer["model"]["vocab"], added, plan, vocab_rows)
    check_ids(generation, vocab.flags, vocab_rows)
    merges = read_merges(tokenizer["model"])
    firsts, entries = pack_merges(merges, set(vocab.control), vocab_rows)
    whole: list[int] = []
    if plan.whole:
        words = {
            number: vocab.pieces[number]
            for text, number in tokenizer["model"]["vocab"].items()
            if not vocab.flags[number] & TokenFlag.ADDED and all(char in ALPHABET for char in text)
        }
        whole = whole_words(words, vocab.byte_ids, merges)
    nodes, edges, node_count = build_trie((token.text.encode("utf-8"), token.id) for token in added)
    splitter = split.compile_stages(plan.stages)
    cells = array("H", (cell for stage in splitter.stages for cell in stage.cells))
    nfc, nfc_counts = nfc_tables() if plan.flags & TokFlag.NFC else ([b""] * 4, [0] * 4)
    lengths = [len(piece) for piece in vocab.pieces]
    header = struct.pack(
        "<24I", plan.kind, plan.flags | (TokFlag.ADD_BOS if generation.add_bos else 0), vocab_rows,
        NONE if generation.bos_id is None else generation.bos_id,
        NONE if plan.unk is None else plan.unk, sum(lengths), len(entries) // 8, len(vocab.chars),
        len(whole), node_count, len(generation.stop_ids), len(splitter.stages), splitter.classes,
        len(splitter.ranges), len(cells), *nfc_counts, 0, 0, 0, 0, 0,
    )  # fmt: skip
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    tables = [
        header, entries, little(firsts), u32(starts[:vocab_rows:PIECE_BLOCK]), bytes(lengths),
        vocab.flags, b"".join(vocab.pieces), u32(vocab.byte_ids),
        u64(vocab.chars), u32(whole), nodes, edges, u32(sorted(generation.stop_ids)),
        u64(splitter.ranges),
        u32(value for pair in stage_table(splitter) for value in pair), little(cells), *nfc,
    ]  # fmt: skip
    return b"".join(aligned(table) for table in tables)


def stage_table(splitter: split.Splitter) -> list[tuple[int, int]]:
    """(states, first cell) of every stage."""
    out, at = [], 0
    for stage in splitter.stages:
        out.append((stage.states, at))
        at += len(stage.cells)
    return out
