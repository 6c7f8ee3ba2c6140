"""test_vectors: prompts and greedy answers that a new port proves itself with.

The engine itself makes them over the finished image; room is reserved before planning. The
prompts are ids spread over the vocabulary by a fixed rule, so that they need no tokenizer and
touch many rows: one short, one longer than a prefill chunk, one as long as fits.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemrun.format import spec

COUNT = 3
STEPS = 16
LENGTHS = (7, 150, spec.TEST_PROMPT)


def steps(context: int) -> int:
    """Greedy steps of a vector: as many as a context of this size leaves room for."""
    return min(STEPS, max(1, context - 1))


def prompts(context: int, rows: int) -> list[list[int]]:
    """Prompt ids of each vector: a pseudo-random walk over the vocabulary rows."""
    room = max(1, context - steps(context))
    return [_walk(min(length, room), rows, start) for start, length in enumerate(LENGTHS)]


def _walk(length: int, rows: int, start: int) -> list[int]:
    ids, value = [], start
    for _ in range(length):
        value = (value * 1103515245 + 12345) % (1 << 31)
        ids.append((value >> 8) % rows)
    return ids


def pack(vectors: Sequence[tuple[list[int], int, list[int]]]) -> bytes:
    """TEST records from (prompt, digest, greedy ids)."""
    return b"".join(
        spec.TestVector(
            prompt_count=len(prompt),
            step_count=len(ids),
            digest=digest,
            prompt=_padded(prompt, spec.TEST_PROMPT),
            steps=_padded(ids, spec.TEST_STEPS),
        ).pack()
        for prompt, digest, ids in vectors
    )


def _padded(ids: list[int], size: int) -> tuple[int, ...]:
    return tuple(ids) + (0,) * (size - len(ids))
