"""Programs: records, functions that use their fields, and a last piece that calls what came before.

The pieces stand in words/code.txt, one set for each of eight languages; the names of a program are
made here. A program is shown as a file, or asked for and talked about in a conversation.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from gemmake.kvmask.grammar import deck, own_text
from gemmake.kvmask.mix.chat import Turn, conversation
from gemmake.kvmask.window import Draft

THINGS = (
    *("pump", "valve", "tank", "meter", "robot", "axis", "pallet", "drive", "filter", "furnace"),
    *("cart", "order", "parcel", "room", "bus", "plant", "member", "gate", "lift", "panel"),
    *("boat", "crane", "mixer", "oven", "station", "ticket", "probe", "motor", "trailer", "shelf"),
)
ACTS = (
    *("reading", "sample", "event", "report", "record", "check", "test", "run", "visit"),
    *("alarm", "state", "measure"),
)
FIELDS = (
    *("pressure bar", "current ampere", "speed rpm", "level metre", "weight kilogram"),
    *("length millimetre", "voltage volt", "power watt", "flow litre", "torque newtonmetre"),
    *("humidity percent", "angle degree", "force newton", "depth metre", "noise decibel"),
    *("delay second", "load percent", "volume litre", "distance metre", "rate hertz"),
    *("wear micrometre", "price euro", "width millimetre", "age hour", "charge percent"),
)
KEYS = ("station", "zone", "site", "owner", "tag", "hall", "team", "port", "shift", "branch")
PURPOSE = {  # what a piece is for, in words
    "parse": "reading from text", "mean": "the mean of @a@", "over": "what is over the limit",
    "worst": "the highest @b@", "count": "a count by @key@", "smooth": "a moving mean of @b@",
    "report": "a table", "group": "groups by @key@", "clamp": "limits for @b@",
    "add": "adding one", "find": "finding one by its @key@", "print": "printing them",
    "show": "a text of all", "watch": "a watch on the limit", "new": "making one",
    "sort": "sorting by @b@", "check": "a check of one", "scale": "scaling of @b@",
    "insert": "a few examples", "last": "the newest of every @key@",
    "compare": "a comparison with the mean", "clean": "removing old ones",
    "list": "a list of the files", "keep": "keeping the newest only", "send": "sending a file",
    "alarm": "an alarm with a delay", "state": "a machine of states",
}  # fmt: skip
OUTER = ("head", "record", "main")
_CHOICE = re.compile(r"«([^«»]*)»")
_NAME = re.compile(r"@(\w+)@")


@dataclass(frozen=True)
class Piece:
    """A part of a program, and how the last part calls it."""

    name: str
    call: str
    body: str

    def uses(self, field: str) -> bool:
        """Does the name of a field stand in it?"""
        return f"@{field}@" in self.body or f"@{field.upper()}@" in self.body


@dataclass(frozen=True)
class Language:
    """A programming language and its pieces by name; head, record and main among them."""

    name: str
    ending: str
    remark: str
    pieces: Mapping[str, Piece]


@cache
def languages() -> tuple[Language, ...]:
    """The languages of words/code.txt."""
    _, *blocks = re.split(r"^== ", own_text("code.txt"), flags=re.MULTILINE)
    return tuple(_language(block) for block in blocks)


def _language(block: str) -> Language:
    head, *parts = re.split(r"^-- ", block, flags=re.MULTILINE)
    name, ending, remark = head.strip().split(" | ")
    pieces = {}
    for part in parts:
        title, _, body = part.partition("\n")
        piece, _, call = title.partition(" | ")
        pieces[piece] = Piece(piece, call, body.strip("\n"))
    return Language(name, ending, remark, pieces)


def camel(*words: str) -> str:
    """Words as one, a capital at the start of each."""
    return "".join(word.capitalize() for word in words)


def new_names(rng: random.Random) -> dict[str, str]:
    """All names of one entity in all spellings."""
    thing, act, key = rng.choice(THINGS), rng.choice(ACTS), rng.choice(KEYS)
    (a, a_unit), (b, b_unit) = (field.split() for field in rng.sample(FIELDS, 2))
    snake, pascal, var = f"{thing}_{act}", camel(thing, act), thing + camel(act)
    return {
        "thing": thing, "type": snake, "types": f"{snake}s", "Type": pascal, "Types": f"{pascal}s",
        "var": var, "vars": f"{var}s", "TYPES": f"{snake}s".upper(), "words": f"{thing} {act}",
        "key": key, "Key": key.capitalize(), "a": a, "A": a.capitalize(), "aunit": a_unit,
        "b": b, "B": b.capitalize(), "bunit": b_unit,
        "ALIMIT": f"{a}_limit".upper(), "BWIDTH": f"{b}_width".upper(),
        "max": str(rng.randint(12, 240)), "n": str(rng.randint(3, 11)),
        "calls": "@calls@",  # stays until the last part
        "big": str(rng.choice((16, 30, 48, 64, 90, 128, 200, 365))), "n1": str(rng.randint(1, 9)),
    }  # fmt: skip


def fill(rng: random.Random, text: str, names: Mapping[str, str]) -> str:
    """The text with names and choices put in."""
    text = _CHOICE.sub(lambda found: rng.choice(found[1].split("|")), text)
    return _NAME.sub(lambda found: names[found[1]], text)


@dataclass(frozen=True)
class Part:
    """A piece with its names put in."""

    piece: Piece
    names: Mapping[str, str]
    text: str


def made(rng: random.Random, piece: Piece, names: Mapping[str, str]) -> Part:
    """A piece of the program of these names."""
    return Part(piece, names, fill(rng, piece.body, names))


def write(rng: random.Random, language: Language, chars: int) -> list[Part]:
    """A program of about a number of characters: entities with their functions, then main."""
    names, main = new_names(rng), language.pieces["main"]
    parts = [made(rng, language.pieces["head"], names)]
    room = chars - len(main.body)
    while len(parts) == 1 or size(parts) < room - 200:
        entity = names if len(parts) == 1 else new_names(rng)
        parts += _entity(rng, language, entity, room - size(parts))
    if not main.call:
        parts.append(_ended(rng, made(rng, main, names), parts))
    return parts


def size(parts: Sequence[Part]) -> int:
    """Characters of the program."""
    return sum(len(part.text) + 2 for part in parts)


def _entity(
    rng: random.Random, language: Language, names: Mapping[str, str], room: int
) -> list[Part]:
    """A record and as many of its functions as there is room for, at least one."""
    pieces = language.pieces
    main = pieces["main"]
    functions = [name for name in pieces if name not in OUTER]
    needs = main.call.split()
    first = needs or functions[:1]  # what makes the records, so that the others have some
    others = [name for name in functions if name not in first]
    parts = [made(rng, pieces["record"], names)]
    for name in (*first, *rng.sample(others, len(others))):
        part = made(rng, pieces[name], names)
        if len(parts) > 1 and size(parts) + len(part.text) // 2 > room:
            break
        parts.append(part)
    if needs and len(parts) > len(needs):
        parts.append(_ended(rng, made(rng, main, names), parts))
    return parts


def _ended(rng: random.Random, main: Part, parts: Sequence[Part]) -> Part:
    """The last part with its calls, indented as the word is that stands for them."""
    found = re.search(r"^([ \t]*)@calls@", main.text, re.MULTILINE)
    if found is None:
        return main
    calls = [fill(rng, part.piece.call, part.names) for part in parts if part.piece.call]
    lines = f"\n{found[1]}".join(calls)
    text = main.text[: found.start()] + found[1] + lines + main.text[found.end() :]
    return replace(main, text=text)


def joined(language: Language, parts: Sequence[Part]) -> str:
    """The program as text."""
    return ("\n\n\n" if language.name == "Python" else "\n\n").join(part.text for part in parts)


def what(part: Part) -> str:
    """What a part is for, in words."""
    return fill(random.Random(0), PURPOSE[part.piece.name], part.names)


def turns(rng: random.Random, language: Language, chars: int) -> Iterator[Turn]:
    """A program that is asked for, then questions about it and a change."""
    parts = write(rng, language, chars * 2 // 3)
    names = parts[0].names
    functions = [part for part in parts if part.piece.name not in OUTER]
    wishes = ", ".join(dict.fromkeys(what(part) for part in functions))
    yield _request(rng, language, names, wishes), fenced(language, joined(language, parts))
    for card in deck(rng, ("again", "limit", "uses", "rename")):
        part = rng.choice(functions)
        if card == "again":
            yield f"Show me only {what(part)} again.", fenced(language, part.text)
        elif card == "limit":
            yield _limit(rng, names)
        elif card == "uses":
            field = rng.choice("ab")
            users = [what(one) for one in functions if one.names is names and one.piece.uses(field)]
            listed = ", ".join(dict.fromkeys(users)) or "only the record"
            yield f"Which parts use {names[field]}?", f"{names[field].capitalize()}: {listed}."
        else:
            yield _renamed(rng, language, part)


def _request(rng: random.Random, language: Language, names: Mapping[str, str], wishes: str) -> str:
    """The user asks for a program."""
    kind = f"{names['words']}s with {names['a']} ({names['aunit']}) and {names['b']}"
    return rng.choice(
        (
            f"Write a {language.name} program for {kind}. It needs {wishes}.",
            f"I have {kind} for each {names['key']}. Please write {language.name} for {wishes}.",
            f"{language.name}, please: {kind}. What I need is {wishes}.",
            f"For the {names['thing']} team: {kind}, in {language.name}. Include {wishes}.",
        )
    )


def _limit(rng: random.Random, names: Mapping[str, str]) -> Turn:
    question = rng.choice(
        (
            f"What is the limit of {names['a']}, and in which unit?",
            f"From which {names['a']} on is it too high?",
            f"Which value did you take as the limit for {names['a']}?",
        )
    )
    return question, f"The limit of {names['a']} is {names['max']} {names['aunit']}."


def _renamed(rng: random.Random, language: Language, part: Part) -> Turn:
    """A part with another name for a field: a copy with a change."""
    new = rng.choice([field.split()[0] for field in FIELDS])
    names = {**part.names, "a": new, "A": new.capitalize(), "ALIMIT": f"{new}_limit".upper()}
    text = fill(rng, _CHOICE.sub(lambda found: found[1].split("|")[0], part.piece.body), names)
    return (
        f"Call it {new} instead of {part.names['a']} in {what(part)}.",
        fenced(language, text),
    )


def fenced(language: Language, text: str) -> str:
    """Code as it stands in an answer."""
    return f"```{language.ending}\n{text}\n```"


def draft(rng: random.Random, chars: int, number: int) -> Draft:
    """Program `number` of the mix: two files, then one in a conversation."""
    language = languages()[number % len(languages())]
    if number % 3 == 2:
        return Draft(messages=conversation(turns(rng, language, chars), chars))
    parts = write(rng, language, chars)
    title = f"{parts[0].names['types']}.{language.ending}"
    return Draft(text=f"{language.remark} {title}\n{joined(language, parts)}\n")
