"""A window of calibration text: what it is, how it is rendered, how it is made to fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemmake.errors import UsageError

Messages = tuple[tuple[str, str], ...]  # (role, content); roles: system, user, assistant
TokensOf = Callable[[str], Sequence[int]]  # ids of a text, as the model reads it
Render = Callable[[Messages], "str | None"]  # None: the template takes no such conversation

KEPT = 256  # tokens that a head of the default class keeps
BEYOND = 2 * KEPT  # a window that is longer shows what such a head would lose
TRIES = 8
SLACK = 60  # tokens that a length may miss its aim by
FEWEST_CHARS = 40.0
LEAST = 192  # tokens; shorter contexts hold no window that is worth measuring

_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}
_GUESS = re.compile(r"[A-Z][a-z]{0,3}|[a-z]{1,7}| +(?=[A-Za-z])|[^\sA-Za-z]|\s+")


@dataclass(frozen=True)
class Window:
    """A text of a kind. `messages`: what it was rendered from. `answer_at`: where in `text` the
    answer begins that only something far back in the text gives."""

    kind: str
    text: str
    messages: Messages | None
    answer_at: int | None


@dataclass(frozen=True)
class Draft:
    """A text before it is rendered: plain or a conversation, and the answer that ends it."""

    text: str = ""
    messages: Messages | None = None
    answer: str = ""


@dataclass(frozen=True)
class Measure:
    """How texts are counted and rendered: by the model's own tokenizer and template, if given."""

    tokens_of: TokensOf | None = None
    render: Render | None = None

    def count(self, text: str) -> int:
        """Tokens of a text; without a tokenizer a guess, as a small vocabulary would have it."""
        if self.tokens_of is not None:
            return len(self.tokens_of(text))
        words = sum(not part.isspace() or "\n" in part for part in _GUESS.findall(text))
        return words + (len(text.encode()) - len(text)) * 3 // 5  # letters of other scripts

    def room(self, most_tokens: int) -> int:
        """The largest count that is surely within a limit."""
        if self.tokens_of is None:
            return most_tokens * 5 // 7  # a guess has to keep away from it
        return most_tokens - 1  # one that cuts at the limit must not hide what is too long


def check_limit(most_tokens: int) -> None:
    """Refuse a limit too small for any window. Raises UsageError."""
    if most_tokens < LEAST:
        raise UsageError(
            f"--kv-cache-size: {most_tokens} tokens are too few to calibrate a sparse KV cache; "
            f"give at least {LEAST}, or another --kv-cache-type"
        )


def plain(messages: Messages) -> str:
    """A conversation as "User: .. Assistant: .."."""
    return "\n\n".join(f"{_NAMES[role]}: {content}" for role, content in messages)


def merged(messages: Messages) -> Messages:
    """The system message put in front of the first question, for templates that have none."""
    (_, system), (role, first), *rest = messages
    return ((role, f"{system}\n\n{first}"), *rest)


def rendered(messages: Messages, render: Render | None) -> str:
    """A conversation through the template, or as plain text where that does not take it."""
    text = render(messages) if render is not None else None
    if text is None and render is not None and len(messages) > 1 and messages[0][0] == "system":
        text = render(merged(messages))
    return plain(messages) if text is None else text


def finish(kind: str, draft: Draft, render: Render | None) -> Window:
    """The window of a draft."""
    if draft.messages is None:
        return Window(kind, draft.text, None, _answer_at(draft.text, draft.answer))
    text = rendered(draft.messages, render)
    if draft.answer and draft.answer not in text:  # the template changed it
        text = plain(draft.messages)
    return Window(kind, text, draft.messages, _answer_at(text, draft.answer))


def _answer_at(text: str, answer: str) -> int | None:
    return text.rindex(answer) if answer else None


def fitted(
    kind: str,
    build: Callable[[int], Draft],
    aim: int,
    rate: float,
    most_tokens: int,
    measure: Measure,
) -> Window:
    """A window of about `aim` tokens and never more than `most_tokens`.

    `build` makes a text of about a number of characters, `rate` are those of a token to begin
    with. It is made again with other numbers until the length is right; else the nearest counts.
    """
    most, chars = measure.room(most_tokens), aim * rate
    best, missed = None, 0
    for _ in range(TRIES):
        found = finish(kind, build(int(chars)), measure.render)
        count = measure.count(found.text)
        if count <= most and (best is None or abs(count - aim) < missed):
            best, missed = found, abs(count - aim)
        if count <= most and _good(count, aim):
            return found
        chars = max(FEWEST_CHARS, chars * min(2.0, max(0.4, aim / max(1, count))))
    return best or _shortened(found, most, measure)


def _good(count: int, aim: int) -> bool:
    """Is a length near enough to its aim, and on the right side of BEYOND?"""
    near = abs(count - aim) <= max(SLACK, aim // 10)
    return near and (count > BEYOND) == (aim > BEYOND)


def _shortened(found: Window, most: int, measure: Measure) -> Window:
    """The beginning of a window that does not fit in any other way; its answer is lost."""
    text = found.text
    while text and measure.count(text) > most:
        text = text[: len(text) * 4 // 5]
    return Window(found.kind, text, None, None)
