"""Split automata find the same parts as the library's regular expressions."""

from __future__ import annotations

import random
from bisect import bisect_right

import pytest
from tokenizers import Regex, pre_tokenizers

import tok_corpus
import tok_tiny
from gemmake.passes import split

PATTERNS = (
    tok_tiny.LLAMA3,
    split.GPT2,
    r"\p{N}",
    r"a|ab|abc",
    r"abc|ab|a",
    r"(?:ab)+c|a+|b",
    r"a{2,3}b{0,2}|c{2}",
    r"(a|b)*c|a",
    r"[^\s]+\s(?!\S)|x",
    r"a(?!b)c?|ab",
    r"\s+(?!\S)|[a-c\]]+",
    r"[\p{L}\p{M}]+|[^\p{L}\p{M}\s]+",
    r"(?i:k|'s|Ab)+",
    r"\S+(?!\s)|\P{L}",
)


def parts(splitter: split.Splitter, text: str) -> list[str]:
    """The parts of a text by the rules of TOKENS.md, 1.3 step 4, for one stage."""
    stage, columns = splitter.stages[0], splitter.classes + 1
    firsts = [first for first, _ in splitter.ranges]

    def match(at: int) -> int:
        state, best, begin = 1, 0, at
        while state:
            number = splitter.classes
            if at < len(text):
                number = splitter.ranges[bisect_right(firsts, ord(text[at])) - 1][1]
            cell = stage.cells[state * columns + number]
            best = at - begin if cell & split.MATCH_BIT else best
            state = cell & ~split.MATCH_BIT if at < len(text) else 0
            at += 1
        return best

    out, at, gap = [], 0, 0
    while at < len(text):
        length = match(at)
        if length == 0:
            at += 1
            continue
        out += [text[gap:at], text[at : at + length]]
        at = gap = at + length
    return [part for part in [*out, text[gap:]] if part]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_parts_equal_the_library(pattern: str) -> None:
    splitter = split.compile_stages([split.parse(pattern)])
    library = pre_tokenizers.Split(Regex(pattern), "isolated")
    rng = random.Random(pattern)
    texts = tok_corpus.texts(300, 21)
    texts += [
        "".join(rng.choices("aAbcx's \n\t1k\u212a\u017f", k=rng.randrange(12))) for _ in range(2000)
    ]
    for text in texts:
        assert parts(splitter, text) == [part for part, _ in library.pre_tokenize_str(text)], text


@pytest.mark.parametrize("individual", [True, False])
def test_digits_equal_the_library(individual: bool) -> None:
    splitter = split.compile_stages([split.digits(individual)])
    library = pre_tokenizers.Digits(individual)
    for text in (*tok_corpus.texts(500, 3), "a1½ⅷ٢٠x99", "\U00011de3\U00016ff4"):
        assert parts(splitter, text) == [part for part, _ in library.pre_tokenize_str(text)], text


def test_set_algebra() -> None:
    some = split.union(((5, 9), (20, 30)), ((8, 12),))
    assert some == ((5, 12), (20, 30))
    assert split.union(some, split.complement(some)) == ((0, split.LAST),)
    assert split.complement(()) == ((0, split.LAST),)
