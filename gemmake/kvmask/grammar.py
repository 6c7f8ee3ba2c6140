"""Makes sentences from templates: the small grammar that the generated texts are written in.

A template has slots and choices. `{name}` is one of the words of that name, or the one word that a
text has fixed for it; `{3-90}` is a number between both, with the decimals of the first and, if it
begins with 0, its width; `[a|b]` is a or b. Slots and choices may stand inside each other.

A file of subjects has one section each:

    == name             section
    word = a | b | c    words of a slot
    fix: word word      slots that keep their word through a text
    > template          a sentence
    ? template          a question, and
    ! template          its answer, on the next line
    # remark
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

Words = Mapping[str, Sequence[str]]

_PART = re.compile(r"\{([^{}\[\]]+)\}|\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:\.(\d+))?-(\d+)(?:\.(\d+))?\Z")
_ARTICLE = re.compile(r"\b(a|^A) (?=[aeio](?!ne\b|nce\b|u[rcp])|u[np](?!i))")


@dataclass(frozen=True)
class Topic:
    """A subject: its words, the slots that a text fixes, sentences, questions with answers."""

    name: str
    words: Words
    fixed: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()
    exchanges: tuple[tuple[str, str], ...] = ()


@dataclass
class _Section:
    """A topic while its lines are read."""

    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    sentences: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Take one line."""
        mark, rest = line[0], line[1:].strip()
        lists = {">": self.sentences, "?": self.questions, "!": self.answers}
        if mark in lists:
            lists[mark].append(rest)
        elif line.startswith("fix:"):
            self.fixed = tuple(line[4:].split())
        else:
            name, _, words = line.partition("=")
            self.words[name.strip()] = tuple(word.strip() for word in words.split(" | "))

    def topic(self, name: str) -> Topic:
        """The topic that the lines make."""
        pairs = tuple(zip(self.questions, self.answers, strict=True))
        return Topic(name, self.words, self.fixed, tuple(self.sentences), pairs)


def own_text(name: str) -> str:
    """A text file of the folder `words`."""
    folder = resources.files("gemmake") / "kvmask" / "words"
    return (folder / name).read_text(encoding="utf-8")


@cache
def topics(file: str) -> Mapping[str, Topic]:
    """The sections of a file of subjects, by name."""
    sections: dict[str, _Section] = {}
    section = _Section()
    for line in own_text(file).splitlines():
        if line.startswith("== "):
            section = sections.setdefault(line[3:].strip(), _Section())
        elif line and not line.startswith("#"):
            section.add(line)
    return {name: found.topic(name) for name, found in sections.items()}


def number(rng: random.Random, low: str, part: str | None, high: str, rest: str | None) -> str:
    """A random number of the range of a slot, written as the range is."""
    if part is None:
        width = len(low) if low.startswith("0") else 0
        return str(rng.randint(int(low), int(high))).zfill(width)
    scale = 10 ** len(part)
    value = rng.randint(int(low + part), int(high + (rest or "").ljust(len(part), "0")))
    return f"{value // scale}.{value % scale:0{len(part)}d}"


def _pick(rng: random.Random, slot: str, words: Words) -> str:
    """The text of a slot."""
    if found := _RANGE.match(slot):
        return number(rng, *found.groups())
    return rng.choice(words[slot])


def expand(rng: random.Random, template: str, words: Words) -> str:
    """The template with every slot and choice filled in."""
    while found := _PART.search(template):
        slot, options = found.groups()
        part = _pick(rng, slot, words) if options is None else rng.choice(options.split("|"))
        template = template[: found.start()] + part + template[found.end() :]
    return template


def say(rng: random.Random, template: str, words: Words) -> str:
    """An English sentence: the template filled in, a capital first, `an` where it belongs."""
    text = _ARTICLE.sub(r"\1n ", expand(rng, template, words))
    return text[:1].upper() + text[1:]


def bind(rng: random.Random, topic: Topic, common: Topic) -> Words:
    """Words for one text: people who are not the same, and one word for every fixed slot."""
    words: dict[str, Sequence[str]] = {**common.words, **topic.words}
    names = ("person", "other", "third")
    for name, chosen in zip(names, rng.sample(words["first"], len(names)), strict=True):
        words[name] = (chosen,)
    for name in topic.fixed:
        if name not in names:
            words[name] = (expand(rng, rng.choice(words[name]), words),)
    return words


def deck(rng: random.Random, cards: Sequence[str]) -> Iterator[str]:
    """All cards in random order, again and again: nothing returns before the rest was seen."""
    while True:
        yield from rng.sample(cards, len(cards))
