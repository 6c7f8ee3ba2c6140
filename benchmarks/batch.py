"""Tokens per second of sessions that share their passes, by how many there are.

    python benchmarks/batch.py MODEL.gembin [--sizes 1,2,4,8] [--tokens 64] [--threads 2]

Greedy, every session with a prompt of its own; the best of three by turns. The tokens are compared
with those of each session alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from gemrun import Answer, Batch, GemRunContext, machine

REPEATS = 3
SUBJECTS = ("pump", "valve", "robot", "meter", "gateway", "crane", "oven", "mixer")


def prompt(index: int) -> str:
    """One of its own for every session."""
    return f"The {SUBJECTS[index % len(SUBJECTS)]} number {index} reports that"


def decode(sessions: list[GemRunContext], tokens: int) -> tuple[float, list[list[int]]]:
    """Tokens per second of all together behind their prompts, and the tokens."""
    batch, answers = Batch(), list[Answer]()
    for index, session in enumerate(sessions):
        session.reset_kv_cache()
        ids = session.tokenize(prompt(index), bos=True)
        session.prefill(ids[:-1])
        answers.append(
            batch.join(session, ids[-1:], max_tokens=tokens, temperature=0.0, ignore_stop_ids=True)
        )
    started = time.monotonic()
    batch.run()
    took = time.monotonic() - started
    return len(sessions) * tokens / took, [answer.ids for answer in answers]


def main() -> None:
    """Measure and print a table; exit 1 if an answer changes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--sizes", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",")]
    with ExitStack() as inside:
        model = inside.enter_context(GemRunContext(given.model, threads=given.threads))
        sessions = [model] + [inside.enter_context(model.session()) for _ in range(max(sizes) - 1)]
        wanted = [_alone(session, index, given.tokens) for index, session in enumerate(sessions)]
        best = dict.fromkeys(sizes, 0.0)
        equal = True
        for _ in range(REPEATS):
            for size in sizes:
                rate, ids = decode(sessions[:size], given.tokens)
                best[size] = max(best[size], rate)
                equal &= ids == wanted[:size]
    print(f"{machine.cpu_name()}, {given.threads} threads; {given.model.name}")
    print("| sessions | tokens/s of all | a session's | all, against one |\n|---|---|---|---|")
    for size in sizes:
        rate, one = best[size], best[sizes[0]] / sizes[0]
        print(f"| {size} | {rate:.0f} | {rate / size:.0f} | {rate / one:.2f} |")
    print("tokens: " + ("those of each session alone" if equal else "DIFFERENT from those alone"))
    sys.exit(0 if equal else 1)


def _alone(session: GemRunContext, index: int, tokens: int) -> list[int]:
    """The same tokens without a batch."""
    answer = session.infer(prompt(index), tokens, temperature=0.0, ignore_stop_ids=True)
    return list(answer)


if __name__ == "__main__":
    main()
