"""Varied texts for tokenizer tests."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence

# First and last code points of blocks that behave differently.
BLOCKS = (
    (0x20, 0x7E), (0xA0, 0x17F), (0x180, 0x24F), (0x2B0, 0x36F), (0x370, 0x3FF), (0x400, 0x52F),
    (0x531, 0x5F4), (0x600, 0x6FF), (0x710, 0x7FF), (0x898, 0x8FF), (0x900, 0x97F),
    (0x980, 0x9FF), (0xA00, 0xAFF), (0xB80, 0xBFF), (0xC3C, 0xC7F), (0xD00, 0xD7F),
    (0xE00, 0xE7F), (0xE80, 0xEFF), (0xF00, 0xFFF), (0x1000, 0x109F), (0x10A0, 0x11FF),
    (0x1200, 0x137F), (0x1680, 0x16FF), (0x1780, 0x17FF), (0x1E00, 0x1FFF), (0x2000, 0x206F),
    (0x2070, 0x218B), (0x2190, 0x27BF), (0x2C00, 0x2DFF), (0x3000, 0x30FF), (0x3100, 0x33FF),
    (0x4E00, 0x9FFF), (0xA640, 0xA7FF), (0xAC00, 0xD7A3), (0xF900, 0xFAFF), (0xFB00, 0xFDFF),
    (0xFE00, 0xFFFD), (0x10000, 0x1034F), (0x10D40, 0x10D69), (0x11080, 0x11147),
    (0x11930, 0x11945), (0x11DE0, 0x11DF0), (0x16FF0, 0x16FFF), (0x1D15E, 0x1D1C0),
    (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF), (0xE0000, 0xE007F),
)  # fmt: skip

PHRASES = (
    "The quick brown fox jumps over the lazy dog. ", "I'll don't we've they'RE it'S I'D 'tis 'ſ ",
    "Das Wetter in München ist schön, 23,5 °C. ", "Ça coûte 12 345,67 € — peut-être. ",
    "机器学习模型在边缘设备上运行。", "東京は日本の首都です。", "서울은 한국의 수도입니다. ",
    "Москва — столица России. ", "القاهرة هي عاصمة مصر ٢٠٢٤ ", "दिल्ली भारत की राजधानी है। ",
    "กรุงเทพมหานคร ", "שלום עולם ", "👨‍👩‍👧‍👦 🏳️‍🌈 👩🏽‍🚀 ", "①②③ ½ ⅷ x² 㐂 ", "ﷺ ﬁﬂ ﬆ Ǆ ß ",
    "for (int i = 0; i < n; ++i) {\n\tx[i] += y->z;\n}\n",
    "def f(x):\n    return x**2  # comment\n\n\n",
    "<table><tr><td>1</td></tr></table>", "https://example.org/a?b=c&d=%20#e ",
    "\r\n\r\n", "　全角　",
    "a\u0301\u0327e\u0323\u0302 ", "\u1e9b\u0323 \u212b \u2126 \u0344 \u0958 \ufb2c ",
    "가각힣 \u1100\u1161\u11a8 ",
    "{\"key\": [1, 22, 333, 4444, 55555]}", "'''\"\"\"```---===***", "\u2581\u2581x\u2581",
    "�\ufeff\u200b\u200d",
    "\x00\x01\x1b[31m\x7f\x85\xa0", "$100 £20 ¥3000 ₹5", "AbCdEfGHIjkl",
    "supercalifragilisticexpialidocious ",
)  # fmt: skip

BLANKS = (
    " ",
    "  ",
    "   ",
    " " * 33,
    "\n",
    "\n\n",
    "\n" * 35,
    "\t",
    "\t\t",
    "\r\n",
    "\u3000",
    "\xa0",
    " \n ",
)


def piece(rng: random.Random, specials: Sequence[str]) -> str:
    """One random element."""
    kind = rng.randrange(10)
    if kind < 2:
        return rng.choice(PHRASES)
    if kind == 2:
        return rng.choice(BLANKS)
    if kind == 3:
        return "".join(rng.choice("0123456789") for _ in range(rng.randrange(1, 12)))
    if kind == 4 and specials:
        special = rng.choice(specials)
        return special if rng.random() < 0.7 else special[: rng.randrange(len(special) + 1)]
    if kind == 5:
        text = rng.choice(PHRASES)
        begin = rng.randrange(len(text))
        return text[begin : begin + rng.randrange(1, 12)]
    if kind == 6:
        return chr(rng.randrange(0x20, 0x7F)) * rng.randrange(1, 9)
    low, high = rng.choice(BLOCKS)
    text = "".join(chr(rng.randrange(low, high + 1)) for _ in range(rng.randrange(1, 8)))
    form = rng.randrange(4)
    if form == 0:
        return unicodedata.normalize("NFD", text)
    return unicodedata.normalize("NFC", text) if form == 1 else text


def text(rng: random.Random, specials: Sequence[str] = ()) -> str:
    """A text of a few elements."""
    return "".join(piece(rng, specials) for _ in range(rng.randrange(1, 9)))


def broken(rng: random.Random) -> bytes:
    """Bytes that are mostly not UTF-8."""
    data = bytearray(text(rng).encode("utf-8"))
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data) + 1)
        if rng.random() < 0.5:
            data[at:at] = bytes([rng.randrange(0x80, 0x100) for _ in range(rng.randrange(1, 4))])
        else:
            del data[at : at + rng.randrange(1, 4)]
    return bytes(data)


def texts(count: int, seed: int, specials: Sequence[str] = ()) -> list[str]:
    """`count` texts, the same for the same seed."""
    rng = random.Random(seed)
    return ["", *PHRASES, *BLANKS, *specials, *(text(rng, specials) for _ in range(count))]
