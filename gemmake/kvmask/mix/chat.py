"""Conversations of several turns: help, explanations, cases, letters, plans.

Every form refers back: a value that the user gave is compared later, a list is changed and shown
again, a letter is rewritten, earlier answers are quoted and summed up.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gemmake.kvmask.grammar import Words, bind, deck, expand, say, topics
from gemmake.kvmask.window import Draft, Messages

Turn = tuple[str, ...]  # texts that belong together: user, assistant, user, assistant, ..

TOPICS = "topics.txt"
SCENES = "scenes.txt"
CONCEPTS = "concepts.txt"
_END = re.compile(r"(?<=[.!?]) ")


def subjects() -> tuple[str, ...]:
    """Names of the subjects that texts can be about."""
    return tuple(name for name, topic in topics(TOPICS).items() if topic.sentences)


def words_of(rng: random.Random, file: str, name: str) -> Words:
    """Words of one section for one text."""
    return bind(rng, topics(file)[name], topics(TOPICS)["common"])


def first_sentence(text: str) -> str:
    """The text up to its first full stop."""
    return _END.split(text, maxsplit=1)[0]


def numbered(items: Sequence[str]) -> str:
    """A list with numbers, one a line."""
    return "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))


def lower(text: str) -> str:
    """The text as it stands inside a sentence."""
    return text if text.startswith("I ") else text[:1].lower() + text[1:]


def system_prompt(rng: random.Random) -> str:
    """What the assistant is told before the conversation."""
    words = words_of(rng, SCENES, "system")
    return say(rng, rng.choice(topics(SCENES)["system"].sentences), words)


def help_turns(rng: random.Random) -> Iterator[Turn]:
    """Questions about one subject after the other."""
    for name in deck(rng, subjects()):
        yield from _subject_turns(rng, name)


def _subject_turns(rng: random.Random, name: str) -> Iterator[Turn]:
    """All questions about a subject, with details, doubts and a summary now and then."""
    topic, words = topics(TOPICS)[name], words_of(rng, TOPICS, name)
    more, details = topics(TOPICS)["insights"].words, deck(rng, topic.sentences)
    said: list[str] = []
    for pair in rng.sample(topic.exchanges, len(topic.exchanges)):
        question, answer = (say(rng, text, words) for text in pair)
        if not said or rng.random() < 0.3:
            question = f"{say(rng, rng.choice(more['open']), words)} {question}"
        extra = [say(rng, next(details), words) for _ in range(rng.randint(0, 2))]
        yield question, " ".join([answer, *extra])
        said.append(first_sentence(answer))
        if rng.random() < 0.5:
            at = rng.randrange(len(more["follow"]))
            yield say(rng, more["follow"][at], words), say(rng, more["reply"][at], words)
        if rng.random() < 0.25:
            yield _quoted(rng, rng.choice(said))
    if rng.random() < 0.6:
        yield say(rng, rng.choice(more["sum"]), words), numbered(said)


def _quoted(rng: random.Random, quote: str) -> Turn:
    """A doubt about something said before."""
    questions = (
        f'You said: "{quote}" Is that certain?',
        f'I did not understand this: "{quote}"',
        f'Just to be sure, you wrote "{quote}"?',
    )
    answers = (
        f"Yes. {quote} I have it from the log.",
        f"In other words: {lower(quote)} There is nothing to add to that.",
        f"That is what I meant. {quote}",
    )
    return rng.choice(questions), rng.choice(answers)


def explain_turns(rng: random.Random) -> Iterator[Turn]:
    """One concept after the other, with a question about each and looks back."""
    seen: list[tuple[str, str]] = []
    for name in deck(rng, tuple(topics(CONCEPTS))):
        topic, words = topics(CONCEPTS)[name], words_of(rng, CONCEPTS, name)
        facts = [say(rng, fact, words) for fact in topic.sentences]
        kept = sorted(rng.sample(range(len(facts)), rng.randint(3, len(facts))))
        yield _asked(rng, name), " ".join(facts[i] for i in kept)
        for question, answer in topic.exchanges:
            yield say(rng, question, words), say(rng, answer, words)
        if rng.random() < 0.3:
            yield "Say it in one sentence, please.", facts[kept[0]]
        if seen and rng.random() < 0.4:
            before, fact = rng.choice(seen)
            yield f"What was {before} again?", f"We had that before. {fact}"
        seen.append((name, facts[kept[0]]))


def _asked(rng: random.Random, name: str) -> str:
    """A request to explain something."""
    texts = (
        f"What is {name}?",
        f"Please explain {name}.",
        f"I keep hearing about {name}. What is that?",
        f"{name[0].upper()}{name[1:]}: what is it?",
        f"Explain {name} to [a child|me|a new colleague], please.",
        f"Do you know {name}? I have to [talk|write] about it on {{day}}.",
    )
    return say(rng, rng.choice(texts), topics(TOPICS)["common"].words)


def case_turns(rng: random.Random) -> Iterator[Turn]:
    """Faults of machines: a complaint, one value, a judgement, and a note of all of it."""
    scene = topics(SCENES)["case"]
    while True:
        words = words_of(rng, SCENES, "case")
        what, good, bad, unit = expand(rng, rng.choice(words["what"]), words).split(" = ")
        known = {"what": what, "good": good, "bad": bad, "unit": unit}
        for name in ("symptom", "thing", "cure"):
            known[name] = expand(rng, rng.choice(words[name]), words)
        now: Words = {**words, **{name: (text,) for name, text in known.items()}}
        parts = ("ask", "tell", "judge", "done", "close")
        ask, tell, judge, done, close = (say(rng, rng.choice(now[part]), now) for part in parts)
        yield say(rng, rng.choice(scene.sentences), now), ask, tell, judge, done, close


def letter_turns(rng: random.Random) -> Iterator[Turn]:
    """Letters that are written, then changed."""
    while True:
        name = rng.choice(subjects())
        topic, scene = topics(TOPICS)[name], topics(SCENES)["letter"]
        words: Words = {**scene.words, **words_of(rng, TOPICS, name)}
        cards = deck(rng, topic.sentences)
        facts = [say(rng, next(cards), words) for _ in range(rng.randint(3, 5))]
        hello, bye = (say(rng, rng.choice(words[part]), words) for part in ("hello", "bye"))

        now = {**words, "facts": (" ".join(facts),)}
        yield say(rng, rng.choice(scene.sentences), now), _letter(hello, " ".join(facts), bye)
        for change in rng.sample(("add", "change", "order", "list"), rng.randint(1, 4)):
            new = say(rng, next(cards), words)
            facts = {
                "add": [*facts, new],
                "change": facts[:2],
                "order": facts[::-1],
                "list": facts,
            }[change]
            text = numbered(facts) if change == "list" else " ".join(facts)
            asked = say(rng, rng.choice(words[change]), {**words, "new": (new,)})
            yield asked, _letter(hello, text, bye)


def _letter(hello: str, text: str, bye: str) -> str:
    return f"{hello}\n\n{text}\n\n{bye}"


@dataclass(frozen=True)
class Share:
    """What one person brings to an event."""

    count: int
    what: str
    who: str

    def words(self) -> dict[str, tuple[str, ...]]:
        """The words that sentences about it need."""
        return {"n": (str(self.count),), "what": (self.what,), "who": (self.who,)}


def plan_turns(rng: random.Random) -> Iterator[Turn]:
    """Lists of who brings what, changed again and again and asked for."""
    while True:
        words = words_of(rng, SCENES, "plan")
        event = expand(rng, rng.choice(words["event"]), words)
        people = [words[name][0] for name in ("person", "other", "third")]
        items = rng.sample(words["item"], rng.randint(4, 7))
        shares = [Share(rng.randint(2, 60), item, rng.choice(people)) for item in items]
        listed = [f"{share.count} {share.what}" for share in shares]
        now: Words = {
            **words,
            "event": (event,),
            "list": (f"{', '.join(listed[:-1])} and {listed[-1]}",),
        }
        request = say(rng, rng.choice(topics(SCENES)["plan"].sentences), now)
        yield request, f"{say(rng, rng.choice(now['give']), now)}\n{_listing(shares)}"
        for _ in range(rng.randint(2, 5)):
            at = rng.randrange(len(shares))
            turn, shares[at] = _plan_step(rng, now, shares[at], people)
            yield turn
        yield say(rng, rng.choice(now["final"]), now), _listing(shares)


def _listing(shares: Sequence[Share]) -> str:
    return "\n".join(f"- {share.count} {share.what}: {share.who}" for share in shares)


def _plan_step(
    rng: random.Random, words: Words, share: Share, people: Sequence[str]
) -> tuple[Turn, Share]:
    """A question about a share or a change of it, and the share afterwards."""
    step = rng.choice(("question", "change", "more"))
    if step == "question":
        now = {**words, **share.words()}
        return (
            say(rng, rng.choice(now["question"]), now),
            say(rng, rng.choice(now["answer"]), now),
        ), share
    if step == "change":
        to = rng.choice([name for name in people if name != share.who])
        new = replace(share, who=to)
        asked = {**words, **share.words(), "to": (to,)}
    else:
        new = replace(share, count=share.count + rng.randint(1, 30))
        asked = {**words, **new.words(), "old": (str(share.count),)}
    now = {**words, **new.words()}
    answer = f"All right. {say(rng, rng.choice(now['answer']), now)}"
    return (say(rng, rng.choice(asked[step]), asked), answer), new


FORMS: tuple[Callable[[random.Random], Iterator[Turn]], ...] = (
    help_turns,
    case_turns,
    explain_turns,
    letter_turns,
    plan_turns,
)


def conversation(turns: Iterator[Turn], chars: int, system: str = "") -> Messages:
    """As many turns as come nearest to a number of characters, at least one."""
    messages: list[tuple[str, str]] = [("system", system)] if system else []
    size = len(system)
    for turn in turns:
        more = sum(map(len, turn))
        if len(messages) > 1 and size + more // 2 > chars:
            break
        roles = ("user", "assistant") * (len(turn) // 2)
        messages += zip(roles, turn, strict=True)
        size += more
    return tuple(messages)


def draft(rng: random.Random, chars: int, number: int) -> Draft:
    """Conversation `number` of the mix."""
    system = system_prompt(rng) if rng.random() < 0.5 else ""
    turns = FORMS[number % len(FORMS)](rng)
    return Draft(messages=conversation(turns, chars, system))
