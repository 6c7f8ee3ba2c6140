"""Compiles the split patterns of byte-level tokenizers to automata over code point classes.

A pattern is a regular expression as `tokenizer.json` writes it. It is parsed to an ordered program
(a thread list in priority order, as a backtracking matcher would try the alternatives) and turned
into a deterministic automaton that looks one character ahead: a cell says whether a match may end
before the character and where the character leads. Look-ahead of one class, `(?!\\S)`, is decided
with that same character. What the parser does not know is refused by name, never approximated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from gemmake.errors import CheckpointError
from gemmake.passes import unidata

LAST = 0x10FFFF
MAX_STATES = 0x7FFF
MAX_PROGRAM = 4096
MATCH_BIT = 0x8000

CodeSet = tuple[tuple[int, int], ...]  # ascending inclusive ranges

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Letters whose case folding has a third member, and letter pairs that fold with a single character.
FOLDS = {"s": "\u017f", "k": "\u212a"}
FOLD_PAIRS = ("ss", "st", "ff", "fi", "fl")


@dataclass(frozen=True)
class Automaton:
    """cells[state * (classes + 1) + class]; bit 15 = match before it, low bits = next state."""

    states: int
    cells: tuple[int, ...]


@dataclass(frozen=True)
class Splitter:
    """Chained automata over shared classes. `ranges` holds (first code point, class)."""

    ranges: tuple[tuple[int, int], ...]
    classes: int
    stages: tuple[Automaton, ...]


@dataclass
class Program:
    """Thread program. Ops: ("set", set index), ("not", set index), ("fork", a, b), ("jump", a)."""

    ops: list[tuple[str, int, int]] = field(default_factory=list)
    sets: list[CodeSet] = field(default_factory=list)

    def add(self, op: str, a: int = 0, b: int = 0) -> int:
        """Appends an instruction; returns its index."""
        if len(self.ops) >= MAX_PROGRAM:
            raise CheckpointError("tokenizer: split pattern is too large; it is not supported")
        self.ops.append((op, a, b))
        return len(self.ops) - 1

    def index(self, codes: CodeSet) -> int:
        """Index of a set."""
        if codes not in self.sets:
            self.sets.append(codes)
        return self.sets.index(codes)


def parse_ranges(text: str) -> CodeSet:
    """Ranges of `unidata`."""
    out = []
    for word in text.split():
        first, _, last = word.partition("-")
        out.append((int(first, 16), int(last or first, 16)))
    return tuple(out)


def union(*sets: CodeSet) -> CodeSet:
    """Union of sets."""
    out: list[tuple[int, int]] = []
    for low, high in sorted(pair for codes in sets for pair in codes):
        if out and low <= out[-1][1] + 1:
            out[-1] = (out[-1][0], max(high, out[-1][1]))
        else:
            out.append((low, high))
    return tuple(out)


def complement(codes: CodeSet) -> CodeSet:
    """Everything else."""
    out, at = [], 0
    for low, high in codes:
        if at < low:
            out.append((at, low - 1))
        at = high + 1
    if at <= LAST:
        out.append((at, LAST))
    return tuple(out)


PROPERTIES = {
    "L": parse_ranges(unidata.L),
    "M": parse_ranges(unidata.M),
    "N": parse_ranges(unidata.N),
}
SPACE = parse_ranges(unidata.S)
DIGIT = parse_ranges(unidata.DIGIT)
ESCAPES = {"r": "\r", "n": "\n", "t": "\t", "f": "\f", "v": "\v"}


class Parser:
    """Recursive descent over the supported syntax, straight into a `Program`."""

    def __init__(self, pattern: str, program: Program) -> None:
        self.pattern = pattern
        self.program = program
        self.at = 0
        self.fold = False
        self.depth = 0

    def refuse(self, what: str) -> CheckpointError:
        """The error for something unknown at the current place."""
        return CheckpointError(
            f"tokenizer: split pattern {self.pattern!r} has {what} at {self.at}; "
            "this syntax is not supported"
        )

    def peek(self, text: str) -> bool:
        """Does the rest start with `text`?"""
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        """Consumes `text` if it is next."""
        found = self.peek(text)
        self.at += len(text) if found else 0
        return found

    def alternatives(self) -> None:
        """a|b|c: earlier alternatives have priority."""
        self.depth += 1
        if self.depth > 16:
            raise self.refuse("groups nested too deeply")
        exits, program = [], self.program
        while True:
            fork = program.add("fork", len(program.ops) + 1)
            self.sequence()
            if not self.take("|"):
                program.ops[fork] = ("jump", fork + 1, 0)
                break
            exits.append(program.add("jump"))
            program.ops[fork] = ("fork", fork + 1, len(program.ops))
        for exit_ in exits:
            program.ops[exit_] = ("jump", len(program.ops), 0)
        self.depth -= 1

    def sequence(self) -> None:
        """Atoms with their repeats."""
        while self.at < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            first = self.at
            start = len(self.program.ops)
            self.atom()
            if not self.repeat(start, first) and self.fold:
                self.check_folds(first)

    def check_folds(self, first: int) -> None:
        """Refuses letter pairs that case folding maps to one character."""
        if self.pattern[first : first + 2].lower() in FOLD_PAIRS:
            raise self.refuse("a letter pair with a ligature under (?i:")

    def atom(self) -> None:
        """A group, a look-ahead, a class, a character."""
        program = self.program
        if self.take("(?!"):
            program.add("not", program.index(self.single()))
            self.close()
        elif self.take("(?i:"):
            outer, self.fold = self.fold, True
            self.alternatives()
            self.fold = outer
            self.close()
        elif self.take("(?:") or (self.peek("(") and not self.peek("(?") and self.take("(")):
            self.alternatives()
            self.close()
        else:
            program.add("set", program.index(self.single()))

    def close(self) -> None:
        """The end of a group."""
        if not self.take(")"):
            raise self.refuse("an unclosed group")

    def single(self) -> CodeSet:
        """What matches one character."""
        if self.take("["):
            return self.bracket()
        if self.take("\\"):
            return self.escape()
        char = self.pattern[self.at : self.at + 1]
        if not char or char in "(){}*+?|]^$.":
            raise self.refuse(f"{char or 'the end'!r}")
        self.at += 1
        return self.character(char)

    def character(self, char: str) -> CodeSet:
        """One character, or all of its cases."""
        if self.fold and char.isalpha():
            if not char.isascii():
                raise self.refuse("a letter beyond ASCII under (?i:")
            cases = char.lower() + char.upper() + FOLDS.get(char.lower(), "")
            return union(*(((ord(c), ord(c)),) for c in cases))
        return ((ord(char), ord(char)),)

    def escape(self) -> CodeSet:
        """After a backslash."""
        char = self.pattern[self.at : self.at + 1]
        self.at += 1
        if char in ("p", "P"):
            name = self.pattern[self.at : self.at + 3]
            if len(name) == 3 and name[0] + name[2] == "{}" and name[1] in PROPERTIES:
                self.at += 3
                codes = PROPERTIES[name[1]]
                return codes if char == "p" else complement(codes)
            raise self.refuse(f"the property \\{char}{name}")
        if char == "s":
            return SPACE
        if char == "S":
            return complement(SPACE)
        if char in ESCAPES:
            char = ESCAPES[char]
        elif not char or char.isalnum():
            raise self.refuse(f"the escape \\{char}")
        return ((ord(char), ord(char)),)

    def bracket(self) -> CodeSet:
        """[..] or [^..]; ranges between plain characters."""
        negate = self.take("^")
        parts: list[CodeSet] = []
        while not self.take("]"):
            if self.at >= len(self.pattern) or self.peek("[") or self.peek("&&"):
                raise self.refuse("an unclosed or nested class")
            if self.take("\\"):
                part = self.escape()
            else:
                part = self.character(self.pattern[self.at])
                self.at += 1
            if self.peek("-") and not self.peek("-]"):
                self.at += 1
                last = self.escape() if self.take("\\") else self.single()
                if len(part) != 1 or len(last) != 1 or part[0][0] > last[0][1] or self.fold:
                    raise self.refuse("a range that is not from one character to another")
                part = ((part[0][0], last[0][1]),)
            parts.append(part)
        codes = union(*parts)
        return complement(codes) if negate else codes

    def bounds(self) -> tuple[int, int | None] | None:
        """The repeat that follows, as (least, most or None)."""
        for sign, pair in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                return pair
        if not self.take("{"):
            return None
        end = self.pattern.find("}", self.at)
        low, comma, high = self.pattern[self.at : end].partition(",")
        if end < 0 or not low.isdigit() or (comma and high and not high.isdigit()):
            raise self.refuse("a malformed repeat")
        self.at = end + 1
        least = int(low)
        most = least if not comma else (int(high) if high else None)
        if least > 64 or (most is not None and (most > 64 or most < least)):
            raise self.refuse("a repeat out of bounds")
        return least, most

    def repeat(self, start: int, first: int) -> bool:
        """Repeats the atom compiled from `start`, whose text starts at `first`."""
        end_of_atom = self.at
        found = self.bounds()
        if found is None:
            return False
        if self.peek("+") or self.peek("?") or self.peek("*") or self.peek("{"):
            raise self.refuse("a possessive, lazy or double repeat")
        resume = self.at
        least, most = found
        del self.program.ops[start:]

        def again() -> None:
            self.at = first
            self.atom()
            if self.at != end_of_atom:
                raise self.refuse("a repeat of an unclear atom")

        for _ in range(least):
            again()
        program = self.program
        if most is None:
            fork = program.add("fork")
            again()
            program.add("jump", fork)
            program.ops[fork] = ("fork", fork + 1, len(program.ops))
        forks = []
        for _ in range((most or least) - least if most is not None else 0):
            forks.append(program.add("fork"))
            again()
        for fork in forks:
            program.ops[fork] = ("fork", fork + 1, len(program.ops))
        self.at = resume
        return True


def parse(pattern: str) -> Program:
    """Program of a pattern. Raises CheckpointError for syntax that is not supported."""
    program = Program()
    parser = Parser(pattern, program)
    parser.alternatives()
    if parser.at != len(pattern):
        raise parser.refuse("an unmatched )")
    program.add("match")
    return program


def digits(individual: bool) -> Program:
    """The Digits pre-tokenizer: every digit alone, or runs of digits."""
    program = Program()
    one = program.add("set", program.index(DIGIT))
    if not individual:
        program.add("fork", one, 2)
    program.add("match")
    return program


def partition(programs: Sequence[Program]) -> tuple[tuple[int, int], ...]:
    """Classes of code points that no set of the programs tells apart, as (first, class)."""
    sets = [codes for program in programs for codes in program.sets]
    borders = sorted({0} | {b for codes in sets for low, high in codes for b in (low, high + 1)})
    starts = [[low for low, _ in codes] for codes in sets]
    seen: dict[tuple[bool, ...], int] = {}
    out: list[tuple[int, int]] = []
    for border in borders:
        if border > LAST:
            continue
        key = []
        for codes, lows in zip(sets, starts, strict=True):
            i = bisect_right(lows, border) - 1
            key.append(i >= 0 and border <= codes[i][1])
        number = seen.setdefault(tuple(key), len(seen))
        if not out or out[-1][1] != number:
            out.append((border, number))
    return tuple(out)


def members(codes: CodeSet, ranges: Sequence[tuple[int, int]]) -> frozenset[int]:
    """Classes that lie inside a set, by one code point each: no set tells a class apart."""
    points = {number: first for first, number in ranges}
    return frozenset(
        number
        for number, point in points.items()
        if any(low <= point <= high for low, high in codes)
    )


def closure(
    program: Program, threads: Sequence[int], inside: Sequence[frozenset[int]], number: int
) -> tuple[list[int], bool]:
    """Threads after one character of class `number` (-1 = end of text), and whether a match ends
    before it. A match cuts the threads of lower priority."""
    stepped: list[int] = []
    seen: set[int] = set()
    stack = list(reversed(threads))
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        op, a, b = program.ops[at]
        if op == "match":
            return stepped, True
        if op == "jump":
            stack.append(a)
        elif op == "fork":
            stack += [b, a]
        elif op == "not":
            if number not in inside[a]:
                stack.append(at + 1)
        elif number in inside[a] and at + 1 not in stepped:
            stepped.append(at + 1)
    return stepped, False


def automaton(program: Program, ranges: Sequence[tuple[int, int]], classes: int) -> Automaton:
    """The deterministic form. State 0 is dead, 1 the start."""
    inside = [members(codes, ranges) for codes in program.sets]
    states: dict[tuple[int, ...], int] = {(): 0, (0,): 1}
    order: list[tuple[int, ...]] = [(), (0,)]
    cells: list[int] = [0] * (classes + 1)
    at = 1
    while at < len(order):
        for number in (*range(classes), -1):
            stepped, match = closure(program, order[at], inside, number)
            key = tuple(stepped)
            if key not in states:
                states[key] = len(order)
                order.append(key)
                if len(order) > MAX_STATES:
                    raise CheckpointError(
                        "tokenizer: split pattern needs too many states; it is not supported"
                    )
            cells.append(states[key] | (MATCH_BIT if match else 0))
        at += 1
    return Automaton(states=len(order), cells=tuple(cells))


def compile_stages(programs: Sequence[Program]) -> Splitter:
    """Automata of chained split stages, in order."""
    if not programs:
        return Splitter(ranges=(), classes=0, stages=())
    ranges = partition(programs)
    classes = 1 + max(number for _, number in ranges)
    if classes > 255:
        raise CheckpointError("tokenizer: split patterns need over 255 classes; not supported")
    stages = tuple(automaton(program, ranges, classes) for program in programs)
    return Splitter(ranges=ranges, classes=classes, stages=stages)
