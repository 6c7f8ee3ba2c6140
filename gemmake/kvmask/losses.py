"""What every KV head would lose if it kept less: measured with the engine, window by window.

A head's loss at a budget is the squared change of what its query heads add to the residual stream
(the output matrix included), as a share of what the layer's attention adds. Raw attention mass is
reported beside it, but not what heads are ranked by (RazorAttention and KVzip rank by output, too).
Sums run over windows in their order, so that they depend on neither threads nor chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gemmake.kvmask.budgets import Budget
from gemmake.model import Model, Role
from gemrun.context import GemRunContext
from gemrun.hooks import Probe

F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]
I64: TypeAlias = npt.NDArray[np.int64]

EVERY = 16  # one token in so many is looked at
BINS = 1000  # of the hidden share of attention, 0 to 1


@dataclass
class Losses:
    """Sums over all looked-at tokens: [layers], [budgets, layers, kv heads], and a histogram of the
    hidden share [budgets, layers, kv heads, BINS], of tokens of which something is hidden."""

    budgets: tuple[Budget, ...]
    added: F64
    lost: F64
    hidden: I64
    windows: int = 0
    tokens: int = 0
    seen: I64 = field(default_factory=lambda: np.zeros(0, np.int64))  # [budgets] samples that count

    def shares(self) -> F64:
        """[budgets, layers, kv heads]: lost, as a share of what the layer's attention adds."""
        added = np.where(self.added > 0, self.added, 1.0)
        shares: F64 = self.lost / added[None, :, None]
        return shares

    def kept_mass(self, share: float) -> F64:
        """[budgets, layers, kv heads]: the attention that is kept in `share` of the tokens."""
        counts = self.hidden.cumsum(-1)
        enough = counts >= share * counts[..., -1:]
        kept: F64 = 1.0 - (enough.argmax(-1) + 1) / BINS
        return kept


def grams(model: Model) -> F32:
    """[layers, heads, dim, dim]: every head's part of the output matrix times itself."""
    layers = model.spec.layers
    most, dim = max(la.heads for la in layers), max(la.head_dim for la in layers)
    out = np.zeros((len(layers), most, dim, dim), np.float32)
    for index, layer in enumerate(layers):
        ref = model.tensors[index, Role.O]
        weights = ref.read(0, ref.rows).astype(np.float64)
        for head in range(layer.heads):
            part = weights[:, head * layer.head_dim : (head + 1) * layer.head_dim]
            out[index, head, : layer.head_dim, : layer.head_dim] = part.T @ part
    return out


class Meter:
    """Runs windows of token ids through an open artifact and adds up its losses."""

    def __init__(
        self, context: GemRunContext, model: Model, budgets: Sequence[Budget], every: int = EVERY
    ) -> None:
        self._context, self._every = context, every
        self._share = [la.heads // la.kv_heads for la in model.spec.layers]
        self._kv_heads = [la.kv_heads for la in model.spec.layers]
        self._gram = np.ascontiguousarray(grams(model))
        shape = (len(budgets), len(self._share), max(self._kv_heads))
        self.losses = Losses(
            tuple(budgets),
            np.zeros(shape[1]),
            np.zeros(shape),
            np.zeros((*shape, BINS), np.int64),
            seen=np.zeros(len(budgets), np.int64),
        )

    def run(self, windows: Iterable[Sequence[int]]) -> None:
        """Add windows; each begins with an empty cache."""
        units = [(b.sink, b.recent) for b in self.losses.budgets]
        with Probe(self._context, units, self._gram, self._every) as probe:
            for ids in windows:
                self._context.reset_kv_cache()
                self._context.prefill(list(ids))
                samples = len(ids) // self._every
                self._add(probe.figures()[:samples].astype(np.float64))
                self.losses.windows += 1
                self.losses.tokens += len(ids)
        self._context.reset_kv_cache()

    def _add(self, figures: F64) -> None:
        """figures [samples, layers, heads, 1 + 2 * budgets] of one window."""
        losses, count = self.losses, len(self.losses.budgets)
        positions = (np.arange(len(figures)) + 1) * self._every  # plus one
        for b, budget in enumerate(losses.budgets):
            losses.seen[b] += int((positions > budget.tokens).sum())
        losses.added += figures[..., 0].sum((0, 2))
        for layer, (share, kv_heads) in enumerate(zip(self._share, self._kv_heads, strict=True)):
            mine = figures[:, layer, : share * kv_heads]
            mine = mine.reshape(len(figures), kv_heads, share, -1)
            losses.lost[:, layer, :kv_heads] += mine[..., 1 : 1 + count].sum((0, 2)).T
            for b, budget in enumerate(losses.budgets):
                self._count(b, layer, mine[positions > budget.tokens, :, :, 1 + count + b])

    def _count(self, budget: int, layer: int, hidden: F64) -> None:
        """hidden [samples, kv heads, query heads] into the histogram."""
        bins = np.clip((hidden * BINS).astype(np.int64), 0, BINS - 1)
        for head in range(hidden.shape[1]):
            counts = np.bincount(bins[:, head].ravel(), minlength=BINS)
            self.losses.hidden[budget, layer, head] += counts
