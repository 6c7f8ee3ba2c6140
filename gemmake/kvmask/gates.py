"""The gates: how far a template's answers are from those of the cache that keeps everything.

Both run over the same held-out text with the same weights and int8 cache, side by side, a piece at
a time. Looked at are positions of which something is hidden: beyond what the smallest budget keeps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from gemmake.kvmask.budgets import FULL
from gemmake.kvmask.choose import Template
from gemmake.kvmask.quality import Quality
from gemrun.context import Config, GemRunContext
from gemrun.hooks import see_less

PIECE = 32  # tokens that both caches take by turns
#: Of `compare`: KL(full || less), equal best tokens, negative log likelihood of the next ids,
#: ids of answers that are the best token of less, and of full.
SUMS = ("kl", "top1", "nll", "nll_less", "right", "right_dense")


@dataclass(frozen=True)
class Passage:
    """Token ids of a text, and which of them is the first of the answer that ends it."""

    ids: Sequence[int]
    answer: int | None = None  # None: it ends with none

    def asked(self, first: int, count: int) -> npt.NDArray[np.bool_]:
        """Which of so many ids from `first` on belong to the answer."""
        answer = len(self.ids) if self.answer is None else self.answer
        return np.arange(first, first + count) >= answer


class Judge:
    """Two contexts of one artifact: one keeps everything, the other what a template says."""

    def __init__(self, image: Path, threads: int, baseline: bool, blocks: Sequence[int]) -> None:
        config: Config = {
            "threads": threads,
            "ignore_memory": True,
            "allow_foreign_board": True,
            "head": "full",
        }
        if baseline:
            config["kernel"] = "scalar"
        self._full = GemRunContext(image, **config)
        self._less = GemRunContext(image, **config)
        self._blocks = blocks  # of a layer's heads that keep everything
        self._kept: object = None

    def __enter__(self) -> Judge:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._full.close()
        self._less.close()

    def judge(
        self,
        template: Template,
        texts: Sequence[Passage],
        from_token: int,
        advance: Callable[[int], None] = lambda _tokens: None,
    ) -> Quality:
        """Over texts, each from an empty cache; positions below from_token are read and not looked
        at."""
        self._kept = see_less(self._less, self._records(template))
        sums = np.zeros(len(SUMS))
        count = answers = 0
        for text in texts:
            ids = text.ids
            self._full.reset_kv_cache()
            self._less.reset_kv_cache()
            for first in range(0, len(ids) - 1, PIECE):
                piece = list(ids[first : first + PIECE])
                if first + len(piece) <= from_token:
                    self._full.prefill(piece)
                    self._less.prefill(piece)
                    continue
                nexts = np.asarray(ids[first + 1 : first + 1 + len(piece)])
                full, less = logits_of(self._full, piece), logits_of(self._less, piece)
                asked = text.asked(first + 1, len(nexts))
                sums += compare(full[: len(nexts)], less[: len(nexts)], nexts, asked)
                count += len(nexts)
                answers += int(asked.sum())
            advance(len(ids))
        kl, top1, all_nll, less_nll, _, _ = (sums / max(count, 1)).tolist()
        rise = float(np.expm1(less_nll - all_nll))
        return Quality(kl, top1, rise, count, answers, right=int(sums[4]), right_dense=int(sums[5]))

    def _records(self, template: Template) -> list[tuple[int, ...]]:
        return [
            (budget.sink, budget.recent, blocks, head * blocks)
            if budget != FULL
            else (0, 0, blocks, head * blocks)
            for row, blocks in zip(template.units, self._blocks, strict=True)
            for head, budget in enumerate(row)
        ]


def logits_of(context: GemRunContext, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Append ids; the logits after each of them [ids, vocabulary]."""
    found: list[npt.NDArray[np.float32]] = []
    context.eval(ids, lambda _position, logits: found.append(np.array(logits, np.float32)))
    return np.stack(found)


def compare(
    full: npt.NDArray[np.float32],
    less: npt.NDArray[np.float32],
    nexts: npt.NDArray[np.int64],
    asked: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float64]:
    """SUMS over tokens. Logits [tokens, vocabulary]; the next ids, and which of them are of an
    answer. A token at a time: its logits stay in the cache."""
    sums = np.zeros(len(SUMS))
    for z, y, token, answers in zip(full, less, nexts, asked, strict=True):
        e, norm = _exponentials(z)
        _, norm_less = _exponentials(y)
        apart = float((e * (z - y)).sum(dtype=np.float64)) / float(e.sum(dtype=np.float64))
        best, best_less = z.argmax(), y.argmax()
        sums += (
            apart - norm + norm_less,
            best == best_less,
            norm - float(z[token]),
            norm_less - float(y[token]),
            answers and best_less == token,
            answers and best == token,
        )
    return sums


def _exponentials(z: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], float]:
    """exp(z) up to a factor, and the logarithm of their sum."""
    most = z.max()
    e: npt.NDArray[np.float32] = np.exp(z - most)
    return e, float(most) + math.log(float(e.sum(dtype=np.float64)))
