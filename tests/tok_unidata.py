"""Writes gemmake/passes/unidata.py: the Unicode tables that the tokenizers library works with.

    python tests/tok_unidata.py > gemmake/passes/unidata.py

The classes are read off the library, character by character, so that the compiled splitters agree
with it whatever Unicode version this Python knows; the normal form C data start from `unicodedata`
and keep only what the library applies. tests/oracle/test_tok_unidata.py compares the result again.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from tokenizers import Regex, normalizers, pre_tokenizers

POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
NFC, NFD = normalizers.NFC(), normalizers.NFD()
MARK_LOW, MARK_HIGH = "\u0334", "\u0345"  # combining classes 1 and 240
CLASSES = {"L": r"\p{L}", "M": r"\p{M}", "N": r"\p{N}", "S": r"\s"}


def regex_class(pattern: str) -> list[int]:
    """Code points that the library's regular expressions count to a class."""
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    found: list[int] = []
    for first in range(0, len(POINTS), 4096):
        chunk = POINTS[first : first + 4096]
        kept: set[int] = set()
        for _, (begin, end) in split.pre_tokenize_str("".join(map(chr, chunk))):
            kept.update(range(begin, end))
        found += [c for i, c in enumerate(chunk) if i not in kept]
    return found


def digit_class() -> list[int]:
    """Code points that the Digits pre-tokenizer isolates."""
    text = "".join("a" + chr(c) for c in POINTS)
    parts = pre_tokenizers.Digits(True).pre_tokenize_str(text)
    return sorted(ord(part) for part, (begin, end) in parts if end - begin == 1 and part != "a")


def combining_class(c: int) -> int:
    """The canonical combining class that the library's NFC uses: 0 where it knows none."""
    value = unicodedata.combining(chr(c))
    if value == 0 or value in (1, 240):
        return value
    moved = NFC.normalize_str("q" + MARK_HIGH + chr(c)) if value < 240 else ""
    return value if moved == "q" + chr(c) + MARK_HIGH else 0


def compositions() -> list[tuple[int, int, int]]:
    """(first, second, composed) for every pair that the library composes, without Hangul."""
    found = []
    for c in POINTS:
        parts = unicodedata.decomposition(chr(c)).split()
        if len(parts) != 2 or parts[0].startswith("<"):
            continue
        first, second = (int(part, 16) for part in parts)
        if NFC.normalize_str(chr(first) + chr(second)) == chr(c):
            found.append((first, second, c))
    return sorted(found)


def decompositions() -> list[tuple[int, ...]]:
    """(composed, parts..) for every complete canonical decomposition, without Hangul."""
    found = []
    for c in POINTS:
        parts = NFD.normalize_str(chr(c))
        if parts != chr(c) and not 0xAC00 <= c < 0xAC00 + 11172:
            found.append((c, *map(ord, parts)))
    return found


def ranges(points: Iterable[int]) -> list[tuple[int, int]]:
    """Inclusive ranges of ascending code points."""
    out: list[tuple[int, int]] = []
    for c in points:
        if out and out[-1][1] == c - 1:
            out[-1] = (out[-1][0], c)
        else:
            out.append((c, c))
    return out


def literal(name: str, comment: str, words: Iterable[str]) -> str:
    """A module constant: words joined by blanks, wrapped."""
    lines, line = [], ""
    for word in words:
        if len(line) + 1 + len(word) > 92:
            lines.append(line)
            line = ""
        line += (" " if line else "") + word
    lines.append(line)
    if len(lines) == 1:
        return f'# {comment}\n{name} = "{line}"\n'
    body = "\n".join(f'    "{text} "' for text in lines)
    return f"# {comment}\n{name} = (\n{body}\n)\n"


def spell(pairs: list[tuple[int, int]]) -> Iterable[str]:
    """Ranges as words: first, or first-last, in hexadecimal."""
    return (f"{a:x}" if a == b else f"{a:x}-{b:x}" for a, b in pairs)


def main() -> None:
    """Prints the module."""
    print('"""Unicode tables of the tokenizers library; written by tests/tok_unidata.py."""\n')
    print("from __future__ import annotations\n")
    for name, pattern in CLASSES.items():
        print(literal(name, f"ranges of {pattern}", spell(ranges(regex_class(pattern)))))
    print(literal("DIGIT", "ranges of the Digits pre-tokenizer", spell(ranges(digit_class()))))
    classes = {c: combining_class(c) for c in POINTS}
    words = []
    for value in sorted(set(classes.values()) - {0}):
        words += [f"{value}:", *spell(ranges(c for c in POINTS if classes[c] == value))]
    print(literal("CCC", "combining class: its ranges", words))
    joined = (",".join(f"{c:x}" for c in row) for row in compositions())
    print(literal("COMPOSE", "canonical compositions: first,second,composed", joined))
    joined = (",".join(f"{c:x}" for c in row) for row in decompositions())
    print(literal("DECOMPOSE", "complete canonical decompositions: composed,parts", joined), end="")


if __name__ == "__main__":
    main()
