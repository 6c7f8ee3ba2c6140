"""Long recall: what is asked at the end stands far back, where a small window no longer reaches.

Needles in a text, lists with keys and values, instructions that count at the end, passages that are
repeated, facts told in a conversation. Between the fact and its question lies text about something
else; the fact stands in the first half.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gemmake.kvmask.grammar import Words, bind, deck, expand, say, topics
from gemmake.kvmask.mix import code
from gemmake.kvmask.mix.chat import TOPICS, conversation, help_turns, numbered, subjects, words_of
from gemmake.kvmask.window import Draft, Messages

FILE = "recall.txt"


@dataclass(frozen=True)
class Fact:
    """Something said early, the question for it, and the answer."""

    told: str
    question: str
    answer: str


def fact(rng: random.Random, name: str, at: int) -> Fact:
    """Fact number `at` of a section, with words of its own."""
    topic = topics(FILE)[name]
    words = bind(rng, topic, topics(TOPICS)["common"])
    texts = (topic.sentences[at], *topic.exchanges[at])
    return Fact(*(say(rng, text, words) for text in texts))


def some_facts(rng: random.Random, name: str, count: int) -> list[Fact]:
    """Different facts of a section."""
    places = rng.sample(range(len(topics(FILE)[name].sentences)), count)
    return [fact(rng, name, at) for at in places]


def paragraphs(rng: random.Random) -> Iterator[str]:
    """Paragraphs without end, about one subject after the other."""
    for name in deck(rng, subjects()):
        topic, words = topics(TOPICS)[name], words_of(rng, TOPICS, name)
        sentences = [
            say(rng, text, words) for text in rng.sample(topic.sentences, len(topic.sentences))
        ]
        sentences[0] = f"{say(rng, rng.choice(words['title']), words)}. {sentences[0]}"
        while sentences:
            size = rng.randint(3, 5)
            yield " ".join(sentences[:size])
            sentences = sentences[size:]


def filler(rng: random.Random, chars: int) -> list[str]:
    """Paragraphs of about a number of characters, at least a sentence."""
    out: list[str] = []
    size = 0
    for text in paragraphs(rng):
        if out and size + len(text) // 2 > chars:
            break
        out.append(text if out else shortened(text, max(chars, 60)))
        size += len(text)
    return out


def shortened(text: str, chars: int) -> str:
    """As many lines, or sentences of a single line, as have at most that many characters."""
    between = "\n" if "\n" in text else ". "
    if len(text) <= chars:
        return text
    at = text.rfind(between, 0, chars)
    at = at if at > 0 else text.find(between)
    return text[:at].rstrip() + between.strip() if at > 0 else text


def dressed(rng: random.Random, text: str, question: str, answer: str, chat: bool) -> Draft:
    """A text and a question at its end: as a message, or plain."""
    if chat:
        order = rng.choice(("{0}\n\n{1}", "Read this text.\n\n{0}\n\nNow answer: {1}"))
        asked = order.format(text, question)
        return Draft(messages=(("user", asked), ("assistant", answer)), answer=answer)
    return Draft(text=f"{text}\n\nQuestion: {question}\nAnswer: {answer}", answer=answer)


def needle(rng: random.Random, chars: int, chat: bool) -> Draft:
    """One to four facts hidden in a text; one from its first half is asked for."""
    facts = some_facts(rng, "needle", rng.randint(1, 4))[: max(1, chars // 500)]
    asked = facts[0]
    parts = filler(rng, chars - sum(len(one.told) for one in facts) - 150)
    early = rng.randint(1, max(1, len(parts) // 2))
    hidden = [(early, asked), *((rng.randint(1, len(parts)), one) for one in facts[1:])]
    for place, one in hidden:
        parts[place - 1] = _hidden(rng, parts[place - 1], one.told)
    return dressed(rng, "\n\n".join(parts), asked.question, asked.answer, chat)


def _hidden(rng: random.Random, paragraph: str, told: str) -> str:
    """The paragraph with a sentence put between two of its sentences."""
    sentences = paragraph.split(". ")
    place = rng.randint(1, len(sentences))
    if place == len(sentences):
        return f"{paragraph} {told}"
    return ". ".join([*sentences[:place], told + " " + sentences[place], *sentences[place + 1 :]])


def entries(rng: random.Random, count: int) -> dict[str, str]:
    """Keys and values of one style."""
    words = topics(TOPICS)["common"].words
    keys = rng.choice(
        (
            "{first} {family}",
            "{A}{A}-{100-989}",
            "{town} {2-98}",
            "reg_{10-98}{a}",
            "{colour} {first}",
        )
    )
    value = rng.choice(
        ("{1000-9899}", "{A}{10-98}{A}", "{2-98}.{10-98}", "{date}", "{first} {2-98}")
    )
    letters: Words = {**words, "A": tuple("BCDFGHKLMPRTWX"), "a": tuple("abcdefgh")}
    out: dict[str, str] = {}
    while len(out) < count:
        out.setdefault(expand(rng, keys, letters), expand(rng, value, letters))
    return out


STYLES: Sequence[tuple[str, str]] = (
    *(("{0}: {1}", "\n"), ("{0} = {1}", "\n"), ("| {0} | {1} |", "\n"), ("- {0} -> {1}", "\n")),
    *(("{0};{1}", "\n"), ("{0} has {1}", ". "), ('"{0}": "{1}"', ",\n")),
)


def lookup(rng: random.Random, chars: int, chat: bool) -> Draft:
    """A list of keys and values, then questions for some keys of its first half."""
    style, between = rng.choice(STYLES)
    found = entries(rng, max(4, chars // 24))
    lines, size = [], 160
    for key, value in found.items():
        lines.append(style.format(key, value))
        size += len(lines[-1]) + len(between)
        if size > chars and len(lines) > 3:
            break
    keys = list(found)[: len(lines)]
    asked = rng.sample(
        keys[: max(2, len(keys) // 2)], min(rng.randint(1, 4), max(1, len(keys) // 4))
    )
    words = words_of(rng, FILE, "list")
    title, question = (say(rng, rng.choice(words[part]), words) for part in ("title", "ask"))
    text = f"{title}\n{between.join(lines)}"
    answer = "\n".join(f"{key}: {found[key]}" for key in asked)
    return dressed(rng, text, f"{question} {', '.join(asked)}.", answer, chat)


def instruction(rng: random.Random, chars: int, chat: bool) -> Draft:
    """A rule at the start, a long conversation or text, and a case for the rule at the end."""
    rule = fact(rng, "rule", rng.randrange(len(topics(FILE)["rule"].sentences)))
    room = chars - sum(len(text) for text in (rule.told, rule.question, rule.answer))
    if not chat:
        text = "\n\n".join([f"Instruction: {rule.told}", *filler(rng, room - 60)])
        return dressed(rng, text, rule.question, rule.answer, False)
    between = conversation(help_turns(rng), room)
    if rng.random() < 0.5:
        start: Messages = (("system", rule.told),)
    else:
        asked = rng.choice(("Remember this: {}", "{} Keep to that, please.", "One rule first. {}"))
        agreed = rng.choice(("I will keep to it.", "Understood.", "All right, I will do that."))
        start = (("user", asked.format(rule.told)), ("assistant", agreed))
    end = (("user", rule.question), ("assistant", rule.answer))
    return Draft(messages=(*start, *between, *end), answer=rule.answer)


def passage(rng: random.Random) -> tuple[str, str]:
    """A name and a text worth repeating: prose, a list, a piece of a program, a table."""
    kind, number = rng.choice(("passage", "list", "program", "table")), rng.randint(2, 98)
    if kind == "passage":
        return f"passage {number}", next(paragraphs(rng))
    if kind == "list":
        facts = some_facts(rng, "needle", rng.randint(3, 5))
        return f"list {number}", numbered([one.told for one in facts])
    if kind == "program":
        parts = code.write(rng, rng.choice(code.languages()), 200)
        return f"program {number}", max((part.text for part in parts), key=len)
    rows = [f"{key} | {value}" for key, value in entries(rng, rng.randint(5, 12)).items()]
    return f"table {number}", "\n".join(rows)


def copy(rng: random.Random, chars: int, chat: bool) -> Draft:
    """A passage, other text, and the passage again, word for word."""
    name, text = passage(rng)
    text = shortened(text, chars // 4)
    rest = filler(rng, chars - 2 * len(text) - 120)
    told = f"{name.capitalize()}:\n{text}\nEnd of {name}."
    question = rng.choice(
        (
            f"Repeat {name} word for word.",
            f"Write {name} again, exactly as above.",
            f"What does {name} say?",
        )
    )
    return dressed(
        rng, "\n\n".join([rest[0][: rest[0].find(".") + 1], told, *rest]), question, text, chat
    )


def conversation_facts(rng: random.Random, chars: int, chat: bool) -> Draft:
    """Facts that a user tells on the way; at the end one or more are asked for."""
    facts = some_facts(rng, "told", rng.randint(2, 5))[: max(1, chars // 300)]
    asked = facts[: rng.randint(1, min(3, len(facts)))]
    size = sum(len(one.told) + len(one.answer) for one in facts)
    between = list(conversation(help_turns(rng), chars - size))
    early = range(0, max(2, len(between) // 2), 2)
    for number, one in enumerate(facts):
        place = early[number % len(early)]
        role, text = between[place]
        between[place] = (role, f"{text} {one.told}")
    answer = " ".join(one.answer for one in asked)
    question = " ".join(one.question for one in asked)
    messages = (*between, ("user", question), ("assistant", answer))
    return Draft(messages=messages, answer=answer)


FORMS: Sequence[Callable[[random.Random, int, bool], Draft]] = (
    *(needle, lookup, instruction, copy, conversation_facts),
)


def draft(rng: random.Random, chars: int, number: int) -> Draft:
    """Recall `number` of the mix: each form in turn, in a conversation or plain."""
    return FORMS[number % len(FORMS)](rng, chars, number // len(FORMS) % 5 < 3)
