"""Logits to a token id, as the comments of csrc/gr_sample.c say it, by sorting everything.

Order: bias, bans, repetition penalty, rows without a token; then greedy, or temperature, top-k,
softmax, top-p, min-p and one PCG32 draw. Candidates are ordered by logit descending, id ascending.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from reference import floatmath as fm
from reference.floatmath import F32
from reference.formats import pad
from reference.records import Image

MASK = 0xFFFFFFFFFFFFFFFF
MULTIPLIER, STREAM = 6364136223846793005, 0xDA3E39CB94B95BDB
TOKEN_UNUSED = 4


@dataclass(frozen=True)
class Settings:
    """What decides a choice; the defaults are those of DESIGN."""

    temperature: float = 0.3
    top_k: int = 64
    top_p: float = 0.85
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    banned: Sequence[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)


class Pcg32:
    """PCG32 (XSH RR) on its default stream."""

    def __init__(self, seed: int) -> None:
        self.state = ((STREAM + seed) * MULTIPLIER + STREAM) & MASK

    def draw(self) -> int:
        old = self.state
        self.state = (old * MULTIPLIER + STREAM) & MASK
        word = (((old >> 18) ^ old) >> 27) & 0xFFFFFFFF
        turn = old >> 59
        return ((word >> turn) | (word << (-turn & 31))) & 0xFFFFFFFF


def unused_rows(image: Image) -> set[int]:
    """Vocabulary rows without a token, from the flags table of TOKN."""
    tokn = image.section("TOKN")
    head = np.frombuffer(tokn, "<u4", 24)
    vocab, merges = int(head[2]), int(head[6])
    at = 96 + 8 * merges + pad(4 * (vocab + 1), 8) + pad(4 * (-(-vocab // 32)), 8) + pad(vocab, 8)
    flags = np.frombuffer(tokn, np.uint8, vocab, at)
    return {int(i) for i in np.flatnonzero(flags & TOKEN_UNUSED)}


def adjust(logits: F32, settings: Settings, context: Sequence[int], unused: set[int]) -> F32:
    """Bias, bans and penalty; rows that cannot be sampled become -inf."""
    row: F32 = logits.copy()
    for token, value in settings.bias.items():
        row[token] += np.float32(value)
    row[list(settings.banned)] = -np.inf
    penalty = np.float32(settings.repetition_penalty)
    if penalty != 1:
        for token in sorted(set(context)):
            if np.isfinite(row[token]):
                row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    row[sorted(unused)] = -np.inf
    return row


def sample(
    logits: F32, settings: Settings, rng: Pcg32, context: Sequence[int], unused: set[int]
) -> int:
    """One token. `context` holds the ids in the cache; `rng` moves on by one draw, or by none at
    temperature 0."""
    row = adjust(logits, settings, context, unused)
    order = np.lexsort((np.arange(row.size), -row))  # logit descending, id ascending
    order = order[np.isfinite(row[order])]
    if settings.temperature == 0:
        return int(order[0])
    best, temperature = row[order[0]], np.float32(settings.temperature)
    chosen = order[: settings.top_k] if settings.top_k else order
    weight = fm.expf((row - best) / temperature)
    total = 0.0
    for token in sorted(chosen.tolist()):
        total += float(weight[token])
    kept, mass = _cut(chosen.tolist(), weight, total, settings)
    target = rng.draw() / 4294967296.0 * mass
    running = 0.0
    token = kept[0]
    for token in kept:
        running += float(weight[token])
        if running > target:
            break
    return int(token)


def _cut(
    chosen: list[int], weight: F32, total: float, settings: Settings
) -> tuple[list[int], float]:
    """Top-p, then min-p: the candidates that stay and the sum of their weights."""
    top_p, min_p = np.float32(settings.top_p), np.float32(settings.min_p)
    if not (top_p < 1 or min_p > 0):
        return chosen, total
    kept: list[int] = []
    mass = 0.0
    for token in chosen:
        if mass >= float(top_p) * total or (weight[token] < min_p and kept):
            break
        mass += float(weight[token])
        kept.append(token)
    return kept, mass
