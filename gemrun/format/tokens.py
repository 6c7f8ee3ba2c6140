"""TOKN and TMPL: structural checks and the facts that tools show, from csrc/TOKENS.md.

Encoding and decoding happen in the engine; here are only the rules that a section has to meet, in
plain loops that are linear in its size, and no allocation by a number that its bytes do not cover.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Literal

from gemrun.format.codes import Code, FormatError
from gemrun.format.spec import Record, field_of, size_of

NONE = 0xFFFFFFFF
MAX_VOCAB = 0x100000
MAX_PIECE = 255
MAX_STOP = 64
MAX_STAGE = 4
MAX_CLASS = 255
MAX_STATE = 0x7FFF
MAX_COUNT = 1 << 24  # entries of any one table
PIECE_BLOCK = 32
MAX_CODE_POINT = 0x10FFFF
CELL_STATE = 0x7FFF
MERGE_RIGHT = 44  # bit of a merge where its right id starts; new id << 24, then the rank
KEY = 32  # bit of a sorted table's entry where its key starts
LOW = 0xFFFFFFFF  # the value below the key
COMP_PAIR = 21  # bit of a composition where both code points start
COMP_TO = 0x1FFFFF
TMPL_MAX_TEXT = 65536
TMPL_MAX_ITEM = 4096
REBUILD = "compile the artifact again"


class Kind(IntEnum):
    """How first symbols are made."""

    SPM = 1
    BYTE = 2


class TokFlag(IntFlag):
    """Bits of TOKN's flags."""

    ADD_BOS = 1
    NFC = 2
    FUSE_UNK = 4
    SPACE = 8


class TokenFlag(IntFlag):
    """Bits of a token's flags."""

    CONTROL = 1
    BYTE = 2
    UNUSED = 4
    ADDED = 8


class Slot(IntEnum):
    """Places of a chat template between the texts of a conversation."""

    FIRST = 0
    SYSTEM = 1
    SYS_USER = 2
    USER_ASST = 3
    ASST_USER = 4
    GENERATE = 5
    USER_END = 6
    ASST_END = 7
    THINK_CUT = 8


class TmplFlag(IntFlag):
    """Bits of TMPL's flags."""

    SYSTEM = 1
    ASST_LAST = 2
    TRIM_SYSTEM = 4
    TRIM_USER = 8
    TRIM_ASST = 16


@dataclass(frozen=True)
class TokenHeader(Record):
    """Start of TOKN; the tables follow in the order of their counts."""

    kind: int = field_of("I")
    flags: int = field_of("I")
    vocab: int = field_of("I")
    bos: int = field_of("I", NONE)
    unk: int = field_of("I", NONE)
    piece_bytes: int = field_of("I")
    n_merge: int = field_of("I")
    n_char: int = field_of("I")
    n_whole: int = field_of("I")
    n_node: int = field_of("I")
    n_stop: int = field_of("I")
    n_stage: int = field_of("I")
    n_class: int = field_of("I")
    n_range: int = field_of("I")
    n_cell: int = field_of("I")
    n_decomp: int = field_of("I")
    n_decomp_cp: int = field_of("I")
    n_comp: int = field_of("I")
    n_ccc: int = field_of("I")
    reserved: tuple[int, ...] = field_of("5I")


@dataclass(frozen=True)
class TemplateHeader(Record):
    """Start of TMPL; items and text follow."""

    flags: int = field_of("I")
    n_item: int = field_of("I")
    text_bytes: int = field_of("I")
    slot: tuple[int, ...] = field_of("10I")
    reserved: tuple[int, ...] = field_of("3I")


@dataclass(frozen=True)
class Tokenizer:
    """A checked TOKN section. Pieces stay in the mapped file."""

    header: TokenHeader
    stop_ids: tuple[int, ...]
    lengths: memoryview
    flags: memoryview
    blocks: memoryview
    pieces: memoryview

    def piece(self, token: int) -> bytes:
        """The bytes of a token, as stored. IndexError for an id without a row."""
        at = self.blocks[token // PIECE_BLOCK]
        at += sum(self.lengths[token - token % PIECE_BLOCK : token])
        return bytes(self.pieces[at : at + self.lengths[token]])


@dataclass(frozen=True)
class Template:
    """A checked TMPL section: the items of every slot."""

    header: TemplateHeader
    slots: tuple[tuple[int | bytes, ...], ...]  # a token id, or literal text


NumberKind = Literal["B", "H", "I", "Q"]


class _Tables:
    """Hands out the tables behind a header: each on 8 bytes, zeros between, no rest."""

    def __init__(self, data: memoryview, code: Code) -> None:
        self.data, self.code, self.at = data, code, 0

    def fail(self, what: str) -> FormatError:
        """The error to raise."""
        return FormatError(self.code, f"section {self.code.name}: {what}", REBUILD)

    def take(self, count: int, kind: NumberKind) -> memoryview:
        """A table of `count` little-endian numbers of a struct kind (B, H, I, Q)."""
        end = self.at + count * struct.calcsize(kind)
        padded = (end + 7) // 8 * 8
        if padded > len(self.data):
            raise self.fail(f"a table ends at {padded} of {len(self.data)}")
        if any(self.data[end:padded]):
            raise self.fail("bytes between tables are not zero")
        part = self.data[self.at : end]
        self.at = padded
        return _numbers(part, kind)

    def done(self) -> None:
        """Everything was handed out."""
        if self.at != len(self.data):
            raise self.fail(f"{len(self.data) - self.at} bytes after the last table")


_NATIVE_LITTLE = struct.pack("=H", 1) == b"\1\0"


def _numbers(part: memoryview, kind: NumberKind) -> memoryview:
    """A view as numbers; only a big-endian host, or an odd place, needs a copy."""
    if kind == "B":
        return part
    if _NATIVE_LITTLE:
        return memoryview(part).cast("B").cast(kind)
    values = struct.unpack(f"<{len(part) // struct.calcsize(kind)}{kind}", part)
    return memoryview(struct.pack(f"={len(values)}{kind}", *values)).cast(kind)


def read_tokn(data: memoryview, vocab_rows: int) -> Tokenizer:
    """Check a TOKN section. FormatError(TOKN) names what is wrong."""
    t = _Tables(data, Code.TOKN)
    if len(data) < size_of(TokenHeader):
        raise t.fail(f"{len(data)} bytes, too short")
    h = TokenHeader.unpack(data)
    _check_header(t, h, vocab_rows)
    t.take(size_of(TokenHeader), "B")
    merges, firsts = t.take(h.n_merge, "Q"), t.take(h.vocab + 1, "I")
    blocks = t.take((h.vocab + PIECE_BLOCK - 1) // PIECE_BLOCK, "I")
    lengths, flags = t.take(h.vocab, "B"), t.take(h.vocab, "B")
    pieces, byte_ids = t.take(h.piece_bytes, "B"), t.take(256, "I")
    chars, whole = t.take(h.n_char, "Q"), t.take(h.n_whole, "I")
    nodes, edges = t.take(2 * h.n_node, "I"), t.take(h.n_node - 1, "B")
    stop, ranges = t.take(h.n_stop, "I"), t.take(h.n_range, "Q")
    stages, cells = t.take(2 * h.n_stage, "I"), t.take(h.n_cell, "H")
    decomp, points = t.take(h.n_decomp, "Q"), t.take(h.n_decomp_cp, "I")
    comp, ccc = t.take(h.n_comp, "Q"), t.take(h.n_ccc, "Q")
    t.done()
    _check_pieces(t, h, blocks, lengths, flags)
    ids = _Ids(t, h.vocab, flags)
    _check_merges(t, h, merges, firsts, ids)
    _check_ids(t, h, ids, byte_ids, chars, whole, stop)
    _check_trie(t, h.n_node, nodes, edges, ids)
    _check_split(t, h, ranges, stages, cells)
    _check_nfc(t, h, decomp, points, comp, ccc)
    return Tokenizer(h, tuple(stop), lengths, flags, blocks, pieces)


def _check_header(t: _Tables, h: TokenHeader, vocab_rows: int) -> None:
    counts = (
        h.n_merge,
        h.n_char,
        h.n_whole,
        h.n_node,
        h.n_range,
        h.n_cell,
        h.n_decomp,
        h.n_decomp_cp,
        h.n_comp,
        h.n_ccc,
    )
    if max(counts) >= MAX_COUNT:
        raise t.fail(f"a table of {max(counts)} entries")
    if h.kind not in (Kind.SPM, Kind.BYTE) or h.flags & ~int(sum(TokFlag)) or any(h.reserved):
        raise t.fail("unknown kind or flags, or a reserved field that is set")
    if not 1 <= h.vocab <= MAX_VOCAB or h.vocab != vocab_rows:
        raise t.fail(f"{h.vocab} tokens for {vocab_rows} vocabulary rows")
    if h.n_stop > MAX_STOP or h.n_stage > MAX_STAGE or h.n_class > MAX_CLASS or h.n_node == 0:
        raise t.fail("too many stop ids, stages or classes, or no trie")


class _Ids:
    """Which ids may stand where."""

    def __init__(self, t: _Tables, vocab: int, flags: memoryview) -> None:
        self.t = t
        self.used = bytes(not f & TokenFlag.UNUSED for f in flags)
        bad = TokenFlag.UNUSED | TokenFlag.CONTROL
        self.plain = bytes(not f & bad for f in flags)
        self.vocab = vocab

    def need_used(self, token: int, what: str) -> None:
        """The id is a row with a token."""
        if token >= self.vocab or not self.used[token]:
            raise self.t.fail(f"{what} {token} is not a token")

    def need_plain(self, token: int, what: str) -> None:
        """The id is a token that text may become."""
        if token >= self.vocab or not self.plain[token]:
            raise self.t.fail(f"{what} {token} is not a token of plain text")


def _check_pieces(
    t: _Tables, h: TokenHeader, blocks: memoryview, lengths: memoryview, flags: memoryview
) -> None:
    at = 0
    for index, block in enumerate(blocks):
        if block != at:
            raise t.fail(f"pieces of block {index} start at {block}, not at {at}")
        at += sum(lengths[PIECE_BLOCK * index : PIECE_BLOCK * (index + 1)])
    if at != h.piece_bytes:
        raise t.fail(f"pieces have {at} bytes, not {h.piece_bytes}")
    known = int(sum(TokenFlag))
    for token, (flag, length) in enumerate(zip(flags, lengths, strict=True)):
        if flag & ~known or (flag & TokenFlag.UNUSED and length):
            raise t.fail(f"token {token} has flags {flag:#x} and {length} bytes")


def _check_merges(
    t: _Tables, h: TokenHeader, merges: memoryview, firsts: memoryview, ids: _Ids
) -> None:
    if firsts[0] != 0 or firsts[h.vocab] != h.n_merge or not _ascending(firsts, equal=True):
        raise t.fail("the index of merges does not ascend from 0 to their count")
    vocab, used, plain = h.vocab, ids.used, ids.plain
    starts = set(firsts)
    last = -1
    for index, entry in enumerate(merges):
        right, made = entry >> MERGE_RIGHT, entry >> 24 & 0xFFFFF
        if index in starts:
            last = -1
        if right >= vocab or made >= vocab or not used[right] or not plain[made]:
            raise t.fail(f"merge {index} names {right} and {made}, which do not fit")
        if right <= last or entry & 0xFFFFFF >= h.n_merge:
            raise t.fail(f"merge {index} is out of order")
        last = right


def _ascending(values: Iterable[int], equal: bool = False) -> bool:
    """Whether values ascend; equal neighbours only where that is allowed."""
    last = -1
    for value in values:
        if value < last or (value == last and not equal):
            return False
        last = value
    return True


def _check_ids(
    t: _Tables,
    h: TokenHeader,
    ids: _Ids,
    byte_ids: memoryview,
    chars: memoryview,
    whole: memoryview,
    stop: memoryview,
) -> None:
    for name, token in (("bos", h.bos), ("unk", h.unk)):
        if token != NONE:
            ids.need_used(token, name)
    if h.flags & TokFlag.ADD_BOS and h.bos == NONE:
        raise t.fail("prompts start with bos, but there is none")
    for token in byte_ids:
        if token != NONE:
            ids.need_plain(token, "byte token")
    for entry in chars:
        ids.need_plain(entry & LOW, "character token")
    for token in whole:
        ids.need_plain(token, "whole-word token")
    for token in stop:
        ids.need_used(token, "stop id")
    if not _ascending(entry >> KEY for entry in chars) or not _ascending(stop):
        raise t.fail("characters or stop ids do not ascend")


def _check_trie(t: _Tables, count: int, nodes: memoryview, edges: memoryview, ids: _Ids) -> None:
    """Edge k leads to node k + 1; an edge never leads back, so every walk ends."""
    firsts = [*nodes[0::2], count - 1]
    if firsts[0] != 0:
        raise t.fail("the trie does not start at its first edge")
    for index, token in enumerate(nodes[1::2]):
        first, end = firsts[index], firsts[index + 1]
        if first > end or end > count - 1 or (first < end and first < index):
            raise t.fail(f"edges of trie node {index} are out of place")
        if token != NONE:
            if index == 0:
                raise t.fail("a token of no bytes")
            ids.need_used(token, "added token")
        if not _ascending(edges[first:end]):
            raise t.fail(f"edges of trie node {index} do not ascend")


def _check_ranges(t: _Tables, ranges: memoryview, values: int, what: str) -> None:
    """Entries "from this code point on, this value": the first at 0, ascending."""
    if len(ranges) == 0 or ranges[0] >> KEY != 0:
        raise t.fail(f"{what} do not start at 0")
    if not _ascending(entry >> KEY for entry in ranges):
        raise t.fail(f"{what} do not ascend")
    if any(entry & LOW >= values for entry in ranges):
        raise t.fail(f"a value of {what} is not below {values}")


def _check_split(
    t: _Tables, h: TokenHeader, ranges: memoryview, stages: memoryview, cells: memoryview
) -> None:
    if h.n_stage:
        _check_ranges(t, ranges, h.n_class, "classes")
    at = 0
    for index in range(h.n_stage):
        states, first = stages[2 * index], stages[2 * index + 1]
        if first != at or not 2 <= states <= MAX_STATE:
            raise t.fail(f"stage {index} has {states} states from cell {first}")
        at += states * (h.n_class + 1)
        if at > h.n_cell:
            raise t.fail(f"stage {index} ends at cell {at} of {h.n_cell}")
        if any(cell & CELL_STATE >= states for cell in cells[first:at]):
            raise t.fail(f"stage {index} leads to a state it does not have")
    if at != h.n_cell:
        raise t.fail(f"{h.n_cell} cells, the stages take {at}")


def _check_nfc(
    t: _Tables,
    h: TokenHeader,
    decomp: memoryview,
    points: memoryview,
    comp: memoryview,
    ccc: memoryview,
) -> None:
    if not h.flags & TokFlag.NFC:
        if len(decomp) or len(points) or len(comp) or len(ccc):
            raise t.fail("normal form tables without their flag")
        return
    _check_ranges(t, ccc, 256, "combining classes")
    firsts = [0, *(entry & LOW for entry in decomp[1:]), h.n_decomp_cp]
    if h.n_decomp and (decomp[0] & LOW or not _ascending(firsts)):
        raise t.fail("a decomposition is empty or out of place")
    if not _ascending(entry >> KEY for entry in decomp):
        raise t.fail("decompositions do not ascend")
    if any(point > MAX_CODE_POINT for point in points):
        raise t.fail("a decomposition beyond the last code point")
    if not _ascending(entry >> COMP_PAIR for entry in comp):
        raise t.fail("compositions do not ascend")
    if any(entry & COMP_TO > MAX_CODE_POINT for entry in comp):
        raise t.fail("a composition beyond the last code point")


def read_tmpl(data: memoryview, vocab_rows: int) -> Template:
    """Check a TMPL section. FormatError(TMPL) names what is wrong."""
    t = _Tables(data, Code.TMPL)
    if len(data) < size_of(TemplateHeader):
        raise t.fail(f"{len(data)} bytes, too short")
    h = TemplateHeader.unpack(data)
    if h.n_item > TMPL_MAX_ITEM or h.text_bytes > TMPL_MAX_TEXT:
        raise t.fail(f"{h.n_item} items and {h.text_bytes} bytes of text")
    if h.flags & ~int(sum(TmplFlag)) or any(h.reserved):
        raise t.fail("unknown flags, or a reserved field that is set")
    t.take(size_of(TemplateHeader), "B")
    items, text = t.take(2 * h.n_item, "I"), t.take(h.text_bytes, "B")
    t.done()
    if h.slot[0] != 0 or h.slot[-1] != h.n_item or not _ascending(h.slot, equal=True):
        raise t.fail("slots do not ascend from 0 to the count of items")
    if h.n_item - h.slot[Slot.THINK_CUT] > 1:
        raise t.fail("more than one text that ends a thought")
    parts: list[int | bytes] = []
    at = 0
    for token, size in zip(items[0::2], items[1::2], strict=True):
        if token == NONE:
            if at + size > h.text_bytes:
                raise t.fail(f"a text of {size} bytes at {at} of {h.text_bytes}")
            parts.append(bytes(text[at : at + size]))
        elif token >= vocab_rows or size != 0:
            raise t.fail(f"token {token} with {size} bytes of text")
        else:
            parts.append(token)
        at += size
    if at != h.text_bytes:
        raise t.fail(f"items have {at} bytes of text, not {h.text_bytes}")
    slots = tuple(tuple(parts[h.slot[s] : h.slot[s + 1]]) for s in Slot)
    return Template(h, slots)
