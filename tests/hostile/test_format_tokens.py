"""Damaged TOKN and TMPL sections: the engine's code and the Python reader decide alike.

Real tables: small trained tokenizers with byte fallback, with split automata, and with normal form
C, whose many counts, indices and orders a golden artifact's few entries would not exercise.
"""

from __future__ import annotations

import collections
import random
import struct
from typing import Any

import pytest

import tok_native
import tok_tiny
from gemmake.model import Generation, TokenizerSource
from gemmake.passes.tokens import compile_tokenizer
from gemrun.format import spec, tokens
from gemrun.format.codes import Code, FormatError
from golden import make

HEADER = spec.size_of(tokens.TokenHeader)
VALUES = (0, 1, 2, 31, 32, 254, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0xFFFFF, 0x10FFFF, 0x110000)
EDGES = (2**24 - 1, 2**24, 2**31, 2**32 - 2, 2**32 - 1)


def sources() -> dict[str, dict[str, Any]]:
    return {
        "bytes": tok_tiny.byte_level(),
        "nfc": tok_tiny.byte_level(nfc=True),
        "spm": tok_tiny.score_based(),
    }


@pytest.fixture(scope="module")
def sections() -> dict[str, tuple[bytes, int]]:
    out = {}
    for name, data in sources().items():
        rows = tok_tiny.rows_of(data) + 3
        generation = Generation(stop_ids=(rows - 5, rows - 4))
        out[name] = compile_tokenizer(TokenizerSource(data), rows, generation), rows
    return out


def accepts(section: bytes, rows: int) -> bool:
    try:
        tokens.read_tokn(memoryview(section), rows)
    except FormatError as error:
        if error.code is not Code.TOKN:
            raise
        return False
    return True


def engine_accepts(section: bytes, rows: int) -> bool:
    return tok_native.Tok(tok_native.native(), section, rows).status == 0


def damaged(section: bytes, rng: random.Random) -> bytes:
    """A small change, most often in the header or at a place where tables meet."""
    raw = bytearray(section)
    kind = rng.randrange(5)
    limit = HEADER if kind == 0 else len(raw)
    if kind == 4:
        cut = rng.randrange(len(raw))
        return bytes(raw[:cut]) if rng.random() < 0.5 else bytes(raw) + bytes(rng.randrange(17))
    width = rng.choice((1, 2, 4, 8))
    at = rng.randrange(limit // width) * width
    old = int.from_bytes(raw[at : at + width], "little")
    how = rng.randrange(4)
    if how == 0:
        value = old ^ 1 << rng.randrange(8 * width)
    elif how == 1:
        value = old + rng.choice((-1, 1))
    else:
        value = rng.choice(VALUES + EDGES)
    raw[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(raw)


@pytest.mark.parametrize("name", ["bytes", "nfc", "spm"])
def test_good_sections_pass(name: str, sections: dict[str, tuple[bytes, int]]) -> None:
    section, rows = sections[name]
    assert engine_accepts(section, rows)
    found = tokens.read_tokn(memoryview(section), rows)
    assert found.stop_ids == (rows - 5, rows - 4)
    tok = tok_native.Tok(tok_native.native(), section, rows)
    for token in range(rows):
        assert found.piece(token) == tok.piece(token, control=True)
    assert not accepts(section, rows + 1)
    assert not engine_accepts(section, rows + 1)


@pytest.mark.parametrize("name", ["bytes", "nfc", "spm"])
def test_random_damage(name: str, sections: dict[str, tuple[bytes, int]]) -> None:
    section, rows = sections[name]
    rng, counts = random.Random(name), collections.Counter[bool]()
    for index in range(1500):
        bad = damaged(section, rng)
        ours, theirs = accepts(bad, rows), engine_accepts(bad, rows)
        assert ours == theirs, f"case {index}: Python {ours}, engine {theirs}"
        counts[ours] += 1
    print(f"\nTOKN {name}: {sum(counts.values())} cases, {counts[False]} refused")
    assert counts[False] > 300


@pytest.mark.parametrize("name", ["bytes", "nfc", "spm"])
def test_every_header_field_at_its_extremes(
    name: str, sections: dict[str, tuple[bytes, int]]
) -> None:
    section, rows = sections[name]
    for at in range(0, HEADER, 4):
        for value in VALUES + EDGES:
            raw = bytearray(section)
            struct.pack_into("<I", raw, at, value)
            assert accepts(bytes(raw), rows) == engine_accepts(bytes(raw), rows), (at, value)


def test_every_truncation(sections: dict[str, tuple[bytes, int]]) -> None:
    section, rows = sections["spm"]
    for size in range(0, len(section), 7):
        assert not accepts(section[:size], rows)
        assert not engine_accepts(section[:size], rows)


def template_accepts(section: bytes) -> bool:
    try:
        tokens.read_tmpl(memoryview(section), make.VOCAB)
    except FormatError as error:
        if error.code is not Code.TMPL:
            raise
        return False
    return True


def test_damaged_templates() -> None:
    good, rng, refused = make.template(), random.Random(9), 0
    for index in range(3000):
        bad = damaged(good, rng) if index else good
        chat = tok_native.Chat(tok_native.native(), bad, make.VOCAB)
        assert template_accepts(bad) == (chat.status == 0), index
        refused += chat.status != 0
    print(f"\nTMPL: 3000 cases, {refused} refused")
    assert 500 < refused < 3000
