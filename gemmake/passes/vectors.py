"""test_vectors: prompts and greedy answers that a new port proves itself with.

The engine itself makes them over the finished image; room is reserved before planning. The
prompts are ids spread over the vocabulary by a fixed rule, so that they need no tokenizer and
touch many rows: one short, one longer than a prefill chunk, one as long as fits.
"""

from __future__ import annotations

from pathlib import Path

from gemmake.progress import Reporter
from gemrun.format import spec

COUNT = 3
STEPS = 16
LENGTHS = (7, 150, spec.TEST_PROMPT)


def prompts(context: int, rows: int, unusable: frozenset[int]) -> list[list[int]]:
    """Prompt ids of each vector: a full-period walk over the rows, unusable ids left out."""
    room = max(1, context - STEPS)
    return [
        _walk(min(length, room), rows, unusable, start)
        for start, length in enumerate(LENGTHS[:COUNT])
    ]


def _walk(length: int, rows: int, unusable: frozenset[int], start: int) -> list[int]:
    ids: list[int] = []
    value = start
    while len(ids) < length:
        value = (value * 1103515245 + 12345) % (1 << 31)
        candidate = (value >> 8) % rows
        if candidate not in unusable:
            ids.append(candidate)
    return ids


def make(image: Path, count: int, reporter: Reporter) -> bytes:
    """TEST records for a sealed image, by running it."""
    from gemrun import GemRunContext

    out = b""
    with GemRunContext(image, threads=1, ignore_memory=True) as engine:
        info = engine.info
        steps = max(1, min(STEPS, info.context - 1))
        for prompt in prompts(info.context, info.vocab_rows, frozenset())[:count]:
            digest, ids = engine.test_vector(prompt, steps)
            out += spec.TestVector(
                prompt_count=len(prompt),
                step_count=len(ids),
                digest=digest,
                prompt=_padded(prompt, spec.TEST_PROMPT),
                steps=_padded(ids, spec.TEST_STEPS),
            ).pack()
            reporter.advance()
    return out


def _padded(ids: list[int], size: int) -> tuple[int, ...]:
    return tuple(ids) + (0,) * (size - len(ids))
