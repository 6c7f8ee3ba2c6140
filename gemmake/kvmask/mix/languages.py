"""Fourteen languages: reports, questions about a text, translations, the same in three languages.

The sentences stand in words/languages.txt and mean the same in every language, as do the words of
their slots; so one choice of sentence, words and numbers is said in several languages.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from gemmake.kvmask.grammar import Topic, deck, expand, topics
from gemmake.kvmask.mix.chat import Turn, conversation
from gemmake.kvmask.window import Draft

FILE = "languages.txt"
WITHOUT_BLANKS = ("Chinese", "Japanese")
CHOSEN = ("man", "woman", "machine", "in_city", "day", "food", "food2")


@dataclass(frozen=True)
class Facts:
    """What a sentence is about, in no language: places in the lists of words, and numbers."""

    places: Mapping[str, int]
    numbers: Mapping[str, str]


def facts(rng: random.Random) -> Facts:
    """Words and numbers; the numbers are such that every language counts them in one way."""
    english = topics(FILE)["English"].words
    places = {slot: rng.randrange(len(english[slot])) for slot in CHOSEN if slot in english}
    places["food2"] = (places["food"] + rng.randint(1, 7)) % 8
    numbers = {
        "hour": str(rng.randint(7, 19)),
        "min": str(rng.randint(10, 59)),
        "room": str(rng.randint(101, 989)),
        "n": str(rng.randint(5, 9)),
        "pct": str(5 * rng.randint(3, 19)),
        "deg": str(5 * rng.randint(3, 17)),
    }
    return Facts(places, numbers)


def said(language: Topic, template: str, about: Facts) -> str:
    """A sentence of a language."""
    words = {slot: (text,) for slot, text in about.numbers.items()}
    for slot, place in about.places.items():
        words[slot] = (language.words["food" if slot == "food2" else slot][place],)
    text = expand(random.Random(0), template, words)  # nothing is left to chance
    first = "İ" if language.name == "Turkish" and text[:1] == "i" else text[:1].upper()
    return first + text[1:]


def glue(language: Topic) -> str:
    """What stands between two sentences."""
    return "" if language.name in WITHOUT_BLANKS else " "


def report(rng: random.Random, language: Topic, chars: int) -> str:
    """Paragraphs of sentences under a title."""
    _, _, title, message = language.words["labels"]
    out = [f"{rng.choice((title, message))} {rng.randint(11, 999)}"]
    sentences = (said(language, card, facts(rng)) for card in deck(rng, language.sentences))
    while len(out) == 1 or sum(map(len, out)) < chars - 60:
        out.append(glue(language).join(islice(sentences, rng.randint(2, 5))))
    return "\n\n".join(out)


def question_turns(rng: random.Random, language: Topic, chars: int) -> Iterator[Turn]:
    """Texts that hold answers, each with questions, one of them twice."""
    size = sum(map(len, language.sentences)) // len(language.sentences)  # scripts differ a lot
    count = max(2, min(len(language.exchanges), chars // (5 * size)))
    while True:
        pairs = [(pair, facts(rng)) for pair in rng.sample(language.exchanges, count)]
        told = [said(language, answer, about) for (_, answer), about in pairs]
        others = rng.sample(language.sentences, count)
        told += [said(language, sentence, facts(rng)) for sentence in others]
        asked = rng.sample(pairs, count)
        texts = [
            text for (pair, about) in [*asked, asked[0]] for text in _said(language, pair, about)
        ]
        texts[0] = f"{glue(language).join(rng.sample(told, len(told)))}\n\n{texts[0]}"
        yield tuple(texts)


def _said(language: Topic, texts: Sequence[str], about: Facts) -> list[str]:
    return [said(language, text, about) for text in texts]


def translation_turns(rng: random.Random, language: Topic) -> Iterator[Turn]:
    """Sentences into a language and back into English."""
    english = topics(FILE)["English"]
    order = deck(rng, [str(i) for i in range(len(english.sentences))])
    while True:
        places, about = list(islice(order, rng.randint(1, 3))), facts(rng)
        ours = " ".join(said(english, english.sentences[int(i)], about) for i in places)
        theirs = glue(language).join(
            said(language, language.sentences[int(i)], about) for i in places
        )
        if rng.random() < 0.6:
            yield f"[{language.name}] {ours}", theirs
        else:
            yield f"[English] {theirs}", ours


def _task(rng: random.Random, name: str) -> str:
    """What a translator is told."""
    return rng.choice(
        (
            f"{name} and English: translate into the language in brackets.",
            f"English or {name}, as the brackets say: translate what follows them.",
            f"You know {name}. Each message begins with the language that is wanted.",
            f"Translations for a {name} customer. Keep numbers and names as they are.",
        )
    )


def parallel(rng: random.Random, language: Topic, chars: int) -> str:
    """The same sentences in three languages, one below the other."""
    names = [name for name in topics(FILE) if name != language.name]
    chosen = [language, *(topics(FILE)[name] for name in rng.sample(names, 2))]
    out: list[str] = []
    places = deck(rng, [str(i) for i in range(len(language.sentences))])
    while not out or sum(map(len, out)) < chars - 60:
        card, about = int(next(places)), facts(rng)
        lines = [f"{one.name}: {said(one, one.sentences[card], about)}" for one in chosen]
        out.append("\n".join(lines))
    return "\n\n".join(out)


def draft(rng: random.Random, chars: int, number: int) -> Draft:
    """Text `number` of this kind: all languages in turn, then the next form."""
    names = tuple(topics(FILE))
    language = topics(FILE)[names[number % len(names)]]
    form = (number // len(names) + number) % 4
    if form == 0:
        return Draft(text=report(rng, language, chars))
    if form == 1:
        return Draft(messages=conversation(question_turns(rng, language, chars), chars))
    if form == 2 and language.name != "English":
        turns = translation_turns(rng, language)
        return Draft(messages=conversation(turns, chars, _task(rng, language.name)))
    return Draft(text=parallel(rng, language, chars))
