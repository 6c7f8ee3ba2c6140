"""The Unicode tables equal what the tokenizers library does, for every code point."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from tokenizers import normalizers

import tok_native
import tok_tiny
import tok_unidata
from gemmake.model import Generation, TokenizerSource
from gemmake.passes import split, unidata
from gemmake.passes.tokens import compile_tokenizer


def points(text: str) -> list[int]:
    """Code points of a table, without surrogates, which no text holds."""
    ranges = split.parse_ranges(text)
    return [c for a, b in ranges for c in range(a, b + 1) if not 0xD800 <= c <= 0xDFFF]


def test_the_module_is_what_the_script_writes(root: Path) -> None:
    """The script reads every class off the library; a newer Python's tables change nothing."""
    done = subprocess.run(
        [sys.executable, str(root / "tests" / "tok_unidata.py")], capture_output=True, check=True
    )
    assert done.stdout == (root / "gemmake" / "passes" / "unidata.py").read_bytes()


def test_normal_form_equals_the_library() -> None:
    """Through the engine: a vocabulary of bytes alone shows the normalised text."""
    data = tok_tiny.byte_level(nfc=True)
    data["model"]["merges"] = []
    rows = tok_tiny.rows_of(data)
    section = compile_tokenizer(TokenizerSource(data), rows, Generation(stop_ids=()))
    tok = tok_native.Tok(tok_native.native(), section, rows)
    nfc = normalizers.NFC()
    rng = random.Random(9)
    marks = [c for c in points(unidata.M) if c < 0x20000]
    texts = ["".join(map(chr, tok_unidata.POINTS[i : i + 512])) for i in range(0, 0x30000, 512)]
    for c in points(unidata.L)[::7]:
        texts.append(chr(c) + "".join(chr(rng.choice(marks)) for _ in range(rng.randrange(1, 5))))
    for _ in range(20000):
        texts.append("".join(chr(rng.choice(marks)) for _ in range(rng.randrange(2, 7))))
    for row in unidata.COMPOSE.split():
        first, second, _ = (chr(int(word, 16)) for word in row.split(","))
        texts += [first + second, first + "\u0334" + second, first + "\u0345" + second]
    table = {i: tok.piece(i) for i in range(rows)}
    for text in texts:
        want = nfc.normalize_str(text).encode()
        assert b"".join(table[i] for i in tok.encode(text)) == want, ascii(text)


def test_hangul_is_composed_by_arithmetic() -> None:
    nfd = normalizers.NFD()
    data = tok_tiny.both()["nfc"]
    rows = tok_tiny.rows_of(data)
    tok = tok_native.Tok(
        tok_native.native(),
        compile_tokenizer(TokenizerSource(data), rows, Generation(stop_ids=())),
        rows,
    )
    text = "".join(map(chr, range(0xAC00, 0xD7A4, 13)))
    assert tok.decode(tok.encode(nfd.normalize_str(text))).decode() == text
