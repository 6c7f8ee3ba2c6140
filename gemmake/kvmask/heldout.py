"""Text that a template is judged by: other subjects, names and forms than those of the mix.

Long reports with a summary, talks about cooking and travel that ask at the end for what was said at
the start, tables, logs, and those parts of the compiler's plain text that the weights were not
calibrated on.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import accumulate, pairwise

from gemmake import calibration
from gemmake.kvmask.grammar import Words, bind, expand, say, topics
from gemmake.kvmask.window import (
    Draft,
    Measure,
    Render,
    TokensOf,
    Window,
    check_limit,
    fitted,
)

FILE = "heldout.txt"
COUNT = 16
LONGEST = 1536  # tokens
SEED = 1_000_000_007  # of no mix
ROWS = 3  # of a table that are asked for
REPORTS = ("bridge", "turbine", "laboratory")
CHAPTERS = ("introduction", "method", "results", "discussion")
MARGIN = 48  # tokens around what the weights have seen; token counts of parts do not add up exactly
RATES: Mapping[str, float] = {
    "report": 4.3, "cooking": 4.3, "travel": 4.3, "table": 2.4, "log": 2.4, "plain": 3.5,
}  # fmt: skip
#: The kinds in turn; sixteen windows hold each of them two times or more.
KINDS = ("report", "cooking", "plain", "travel", "table", "report", "log", "travel", "cooking")


def words_of(rng: random.Random, name: str) -> Words:
    """Words of a section for one text."""
    return bind(rng, topics(FILE)[name], topics(FILE)["common"])


def sayings(rng: random.Random, words: Words, names: Sequence[str]) -> list[str]:
    """All the sentences of some slots."""
    return [say(rng, text, words) for name in names for text in words[name]]


def asked(rng: random.Random, words: Words, names: Sequence[str]) -> tuple[str, str]:
    """The questions of some slots, in random order, and their answers."""
    pairs = [words[name][0].split(" => ") for name in rng.sample(names, len(names))]
    questions, answers = (
        [say(rng, text, words) for text in part] for part in zip(*pairs, strict=True)
    )
    return " ".join(questions), " ".join(answers)


def report(rng: random.Random, chars: int, number: int) -> Draft:
    """A report in chapters; its summary says again what the first chapter said."""
    words = words_of(rng, REPORTS[number % len(REPORTS)])
    question, answer = asked(rng, words, ("question", "question2"))
    title = f"{say(rng, words['title'][0], words)}\n{say(rng, '{firm}', words)}"
    summary = f"5 Summary\n\n{' '.join(sayings(rng, words, ['summary']))}"
    end = f"Question: {question}\nAnswer: {answer}"
    size, parts = len(summary) + len(end) + 60, [title]
    for place, chapter in enumerate(CHAPTERS, 1):
        texts = sayings(rng, words, [chapter])
        if place > 1:
            texts = rng.sample(texts, max(1, min(len(texts), (chars - size) // 400)))
        parts.append(f"{place} {chapter.capitalize()}\n\n{' '.join(texts)}")
    rest = chars - size - sum(map(len, parts))
    if rest > 0:
        parts.append(f"Appendix: readings of the day\n\n{_rows(rng, words, rest)}")
    return Draft(text="\n\n".join([*parts, summary, end]), answer=answer)


def _rows(rng: random.Random, words: Words, chars: int) -> str:
    """Lines of a protocol: point, time, value, who read it."""
    people = [words[name][0] for name in ("person", "other", "third")]
    lines, size, minute = [], 0, rng.randint(400, 600)
    while size < chars:
        minute += rng.randint(1, 9)
        value = rng.randint(100, 999) / 100
        at = f"{minute // 60}:{minute % 60:02d}"
        lines.append(f"point {rng.randint(1, 40)}, {at}, {value:.2f}, {rng.choice(people)}")
        size += len(lines[-1]) + 1
    return "\n".join(lines)


def talk(rng: random.Random, chars: int, name: str) -> Draft:
    """A dialogue with detours to the other subject; its last question goes back to the start."""
    other = "travel" if name == "cooking" else "cooking"
    words, strange = words_of(rng, name), words_of(rng, other)
    (first, *own), (_, *others) = topics(FILE)[name].sentences, topics(FILE)[other].sentences
    cards = [*((words, card) for card in rng.sample(own, len(own)))]
    cards += [(strange, card) for card in rng.sample(others, len(others))]
    question, answer = asked(rng, words, ("last", "last2"))
    size = len(question) + len(answer)
    messages: list[tuple[str, str]] = []
    for known, card in [(words, first), *cards]:
        user, assistant = (say(rng, text, known) for text in card.split(" => "))
        if messages and size + (len(user) + len(assistant)) // 2 > chars:
            break
        messages += [("user", user), ("assistant", assistant)]
        size += len(user) + len(assistant)
    messages += [("user", question), ("assistant", answer)]
    return Draft(messages=tuple(messages), answer=answer)


def table(rng: random.Random, chars: int) -> Draft:
    """A table with a sum in every row, and questions about rows far up."""
    words = words_of(rng, "tables")
    names, total = rng.sample(words["boat"], len(words["boat"])), 0
    lines = [
        rng.choice(words["head"]),
        "",
        "| name | points | total | remark |",
        "|---|---|---|---|",
    ]
    facts: list[tuple[str, int, str]] = []
    while len(facts) < 3 or sum(map(len, lines)) < chars - 160:
        round_, place = divmod(len(facts), len(names))
        name = names[place] + (f" {round_ + 1}" if round_ else "")
        points, remark = rng.randint(1, 99), rng.choice(words["remark"])
        total += points
        facts.append((name, points, remark))
        lines.append(f"| {name} | {points} | {total} | {remark} |")
    early = facts[: max(1, len(facts) // 3)]
    chosen = rng.sample(early, min(ROWS, len(early)))
    answer = "\n".join(f"{name}: {points} points, {remark}." for name, points, remark in chosen)
    question = f"How many points have {', '.join(name for name, _, _ in chosen)}, with what remark?"
    return Draft(text="\n".join([*lines, "", question, answer]), answer=answer)


def log(rng: random.Random, chars: int) -> Draft:
    """Lines of a log; what is opened under a number goes on and ends under it."""
    words = words_of(rng, "log")
    hosts = [expand(rng, rng.choice(words["host"]), words) for _ in range(3)]
    running: list[tuple[str, int]] = []  # numbers, and what they are
    lines, size, second = [], 0, rng.randint(20_000, 50_000)
    while size < chars:
        second += rng.randint(0, 40)
        kind = rng.choice(("start", "middle", "end", "alone") if running else ("start", "alone"))
        if kind == "start":
            running.append((f"{rng.randint(0x10000, 0xFFFFF):x}", rng.randrange(len(words[kind]))))
        number, form = running[-1] if kind == "start" else rng.choice(running or [("", 0)])
        if kind == "end":
            running.remove((number, form))
        template = words[kind][form] if kind in ("start", "end") else rng.choice(words[kind])
        text = expand(rng, template, {**words, "id": (number,)})
        at = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
        lines.append(f"{at} {rng.choice(hosts)} {rng.choice(words['unit'])}: {text}")
        size += len(lines[-1]) + 1
    return Draft(text="\n".join(lines))


def unseen(text: str, measure: Measure) -> list[str]:
    """Paragraphs of the compiler's text that no window of the weights' calibration touches."""
    parts = text.split("\n\n")
    empty = measure.count("")  # a token that begins every text
    ends = list(accumulate(measure.count(f"{part}\n\n") - empty for part in parts))
    count, step = calibration.WINDOWS, calibration.WINDOW
    spare = max(0, ends[-1] - step)
    starts = [i * spare // (count - 1) for i in range(count)]

    def seen(begin: int, end: int) -> bool:
        return any(begin < at + step + MARGIN and at - MARGIN < end for at in starts)

    places = pairwise([0, *ends])
    return [part for part, place in zip(parts, places, strict=True) if not seen(*place)]


def plain(parts: Sequence[str], chars: int, number: int) -> Draft:
    """Some of the unseen paragraphs, others for every number."""
    begin = number * 7 % len(parts)
    out: list[str] = []
    for part in [*parts[begin:], *parts[:begin]]:
        if out and sum(map(len, out)) + len(part) // 2 > chars:
            break
        out.append(part)
    return Draft(text="\n\n".join(out))


def windows(
    most_tokens: int,
    tokens_of: TokensOf | None = None,
    render: Render | None = None,
    count: int = COUNT,
) -> list[Window]:
    """Held-out windows of up to LONGEST tokens and never more than `most_tokens`. UsageError."""
    check_limit(most_tokens)
    measure = Measure(tokens_of, render)
    text = (resources.files("gemmake") / "data" / "calibration.txt").read_text(encoding="utf-8")
    parts = unseen(text, measure)
    most = min(LONGEST, most_tokens)
    return [_window(index, parts, most, measure) for index in range(count)]


def _window(index: int, parts: Sequence[str], most: int, measure: Measure) -> Window:
    """Held-out window `index`, of up to a number of tokens; every third is shorter."""
    kind = KINDS[index % len(KINDS)]

    def build(chars: int) -> Draft:
        rng = random.Random(SEED + index)
        if kind == "report":
            return report(rng, chars, index)
        if kind == "plain":
            return plain(parts, chars, index)
        if kind in ("cooking", "travel"):
            return talk(rng, chars, kind)
        return table(rng, chars) if kind == "table" else log(rng, chars)

    aim = measure.room(most) * (19 if index % 3 else 13) // 20
    return fitted(kind, build, aim, RATES[kind], most, measure)


def texts(most_tokens: int, tokens_of: TokensOf | None = None) -> list[str]:
    """The texts of the held-out windows, conversations as plain text."""
    return [window.text for window in windows(most_tokens, tokens_of)]
