"""The gates: how far a template's answers are from those of the cache that keeps everything.

Both run over the same held-out text with the same weights and int8 cache, side by side, a piece at
a time. Looked at are positions of which something is hidden: beyond what the smallest budget keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from gemmake.kvmask.budgets import FULL
from gemmake.kvmask.choose import Template
from gemmake.options import KvGate
from gemrun.context import Config, GemRunContext
from gemrun.hooks import see_less

PIECE = 32  # tokens that both caches take by turns


@dataclass(frozen=True)
class Quality:
    """Against the cache that keeps everything."""

    kl: float
    top1: float
    perplexity: float  # relative rise; negative where it fell
    tokens: int  # looked at


def holds(gate: KvGate, found: Quality) -> bool:
    """Whether a template passes."""
    return found.kl <= gate.kl and found.top1 >= gate.top1 and found.perplexity <= gate.perplexity


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
        texts: Sequence[Sequence[int]],
        from_token: int,
        advance: Callable[[int], None] = lambda _tokens: None,
    ) -> Quality:
        """Over texts of token ids, each from an empty cache; positions below from_token are read
        and not looked at."""
        self._kept = see_less(self._less, self._records(template))
        sums = np.zeros(4)  # kl, equal best, nll of all, nll of less
        count = 0
        for ids in texts:
            self._full.reset_kv_cache()
            self._less.reset_kv_cache()
            for first in range(0, len(ids) - 1, PIECE):
                piece = list(ids[first : first + PIECE])
                if first + len(piece) <= from_token:
                    self._full.prefill(piece)
                    self._less.prefill(piece)
                    continue
                nexts = np.asarray(ids[first + 1 : first + 1 + len(piece)])
                full, less = self._logits(self._full, piece), self._logits(self._less, piece)
                sums += compare(full[: len(nexts)], less[: len(nexts)], nexts)
                count += len(nexts)
            advance(len(ids))
        kl, top1, all_nll, less_nll = (sums / max(count, 1)).tolist()
        return Quality(kl, top1, float(np.expm1(less_nll - all_nll)), count)

    def _records(self, template: Template) -> list[tuple[int, ...]]:
        return [
            (budget.sink, budget.recent, blocks, head * blocks)
            if budget != FULL
            else (0, 0, blocks, head * blocks)
            for row, blocks in zip(template.units, self._blocks, strict=True)
            for head, budget in enumerate(row)
        ]

    @staticmethod
    def _logits(context: GemRunContext, ids: list[int]) -> npt.NDArray[np.float32]:
        found: list[npt.NDArray[np.float32]] = []
        context.eval(ids, lambda _position, logits: found.append(np.array(logits, np.float32)))
        return np.stack(found)


def compare(
    full: npt.NDArray[np.float32], less: npt.NDArray[np.float32], nexts: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Sums over tokens of KL(full || less), equal best tokens, and both negative log likelihoods
    of the next ids. Logits [tokens, vocabulary]."""
    p, q = _log_softmax(full), _log_softmax(less)
    rows = np.arange(len(nexts))
    return np.array(
        [
            float((np.exp(p) * (p - q)).sum(dtype=np.float64)),
            float((full.argmax(1) == less.argmax(1)).sum()),
            -float(p[rows, nexts].sum(dtype=np.float64)),
            -float(q[rows, nexts].sum(dtype=np.float64)),
        ]
    )


def _log_softmax(z: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    shifted = z - z.max(1, keepdims=True)
    out: npt.NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return out
