"""The built-in calibration mix of the sparse KV cache: 10,000 windows, made from a seed.

Window i follows from the seed, i and the limit alone, so any number of them from the first on is
a mix: kinds come in a fixed round of twenty. Lengths are spread evenly inside every kind. A window
is made for a number of characters, counted in tokens, and made again until it has the length that
it is to have.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gemmake.errors import UsageError
from gemmake.kvmask.mix import chat, code, languages, reasoning, recall, tools
from gemmake.kvmask.window import (
    BEYOND,
    Draft,
    Measure,
    Render,
    TokensOf,
    Window,
    check_limit,
    fitted,
)

WINDOWS = 10_000

#: Every twenty windows hold each kind as often as its share says: 25, 15, 10, 10, 15, 25 percent.
ROUND = (
    *("recall", "chat", "code", "reasoning", "recall", "chat", "json", "multilingual"),
    *("recall", "chat", "code", "reasoning", "recall", "chat"),
    *("json", "multilingual", "recall", "chat", "code", "reasoning"),
)

Builder = Callable[[random.Random, int, int], Draft]  # rng, characters, number within the kind

BUILDERS: Mapping[str, Builder] = {
    "chat": chat.draft,
    "code": code.draft,
    "json": tools.draft,
    "multilingual": languages.draft,
    "reasoning": reasoning.draft,
    "recall": recall.draft,
}

#: Characters of a token to begin with; the windows are made again if they come out otherwise.
RATES: Mapping[str, float] = {
    "chat": 4.3,
    "code": 3.0,
    "json": 2.3,
    "multilingual": 2.3,
    "reasoning": 3.0,
    "recall": 3.9,
}
LONG_SHARE: Mapping[str, float] = {"recall": 1.0}
OTHER_LONG_SHARE = 0.27  # with recall 45 percent of all windows are longer than BEYOND
LONG = (BEYOND + 64, 1000)  # tokens
SHORT = (200, 470)
LONGEST = (1100, 2600)  # where the context allows it: larger classes have something to lose too
LONGEST_EVERY = 11  # of the recall windows; no divisor of their forms, so each has long ones
GOLDEN = (610, 987)  # steps of this size spread over a range evenly, wherever one stops


@dataclass(frozen=True)
class Place:
    """A window's place in the mix: its number, its kind and its number within the kind."""

    index: int
    kind: str
    number: int


def place(index: int) -> Place:
    """The place of a window."""
    rounds, at = divmod(index, len(ROUND))
    kind = ROUND[at]
    return Place(index, kind, rounds * ROUND.count(kind) + ROUND[:at].count(kind))


def wanted(where: Place, most_tokens: int) -> int:
    """The length that a window is to have, in tokens."""
    step, steps = GOLDEN
    share = where.number * step % steps / steps
    long = LONG_SHARE.get(where.kind, OTHER_LONG_SHARE)
    if where.kind == "recall" and where.number % LONGEST_EVERY == LONGEST_EVERY - 1:
        low, high = LONGEST
    elif share < long:
        low, high, share = *LONG, share / long
    else:
        low, high, share = *SHORT, (share - long) / (1 - long)
    most = most_tokens * 24 // 25  # some room, so that few have to be made again
    return int(min(low, most) + share * (min(high, most) - min(low, most)))


def windows_of(ratio: float) -> int:
    """How many windows a ratio asks for, at least one. Raises UsageError."""
    if not 0 < ratio <= 1:
        raise UsageError(
            f"--prefill-sample-ratio: {ratio} is not above 0 and at most 1; give 0.1 for "
            f"{WINDOWS // 10} windows"
        )
    return max(1, round(ratio * WINDOWS))


def windows(
    ratio: float,
    seed: int,
    most_tokens: int,
    tokens_of: TokensOf | None = None,
    render: Render | None = None,
) -> Iterator[Window]:
    """The first `ratio` of the mix, one window after the other, none longer than `most_tokens`.

    `tokens_of` gives the ids of a rendered text, all that the model sees; without it their number
    is guessed. `render` gives a conversation in the model's template, or None where
    the template has no form for it. Raises UsageError.
    """
    count = windows_of(ratio)
    check_limit(most_tokens)
    measure = Measure(tokens_of, render)
    return (window(seed, index, most_tokens, measure) for index in range(count))


def window(seed: int, index: int, most_tokens: int, measure: Measure) -> Window:
    """Window `index` of the mix of a seed."""
    where = place(index)

    def build(chars: int) -> Draft:
        rng = random.Random(seed * 1_000_003 + index)
        return BUILDERS[where.kind](rng, chars, where.number)

    aim = wanted(where, measure.room(most_tokens))
    return fitted(where.kind, build, aim, RATES[where.kind], most_tokens, measure)
