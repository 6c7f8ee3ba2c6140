"""Which heads keep less, in the order in which it costs least. Pure: losses in, steps out.

Every head walks down the lower hull of its losses over what it keeps, so that a step that saves a
block never costs less than one behind it. The steps of all heads are sorted by what they cost a
saved block; the first n steps are a template, for any n, and more steps never keep more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemmake.kvmask.budgets import FULL, Budget

Unit = tuple[int, int]  # (layer, kv head)


@dataclass(frozen=True)
class Step:
    """A head goes from what it kept to a smaller budget."""

    unit: Unit
    budget: Budget
    saved: int  # blocks
    cost: float  # share of the layer's output lost by it, squared


@dataclass(frozen=True)
class Template:
    """What every KV head keeps: [layers][kv heads]; FULL is everything."""

    units: tuple[tuple[Budget, ...], ...]

    @property
    def partial(self) -> int:
        """Heads that keep a part."""
        return sum(budget is not FULL and budget != FULL for row in self.units for budget in row)


def blocks_of(budget: Budget, full: int) -> int:
    """Ring blocks of a head: of a partial one with the block that is being filled."""
    return full if budget == FULL else budget.sink + budget.recent + 1


def steps_of(
    unit: Unit, budgets: Sequence[Budget], costs: Sequence[float], full: int
) -> list[Step]:
    """The steps of one head along the lower hull, the cheapest a block first."""
    points = [(full, 0.0, FULL)]
    ordered = sorted(zip(budgets, costs, strict=True), key=lambda p: -p[0].tokens)
    points += [(blocks_of(budget, full), float(cost), budget) for budget, cost in ordered]
    steps, at = [], 0
    while at + 1 < len(points):
        rates = [
            ((cost - points[at][1]) / (points[at][0] - blocks), -index, index)
            for index, (blocks, cost, _) in enumerate(points)
            if index > at and blocks < points[at][0]
        ]
        if not rates:
            break
        _, _, best = min(rates)  # of equal ones the smallest budget
        saved, cost = points[at][0] - points[best][0], points[best][1] - points[at][1]
        steps.append(Step(unit, points[best][2], saved, cost))
        at = best
    return steps


def all_steps(
    shares: npt.NDArray[np.float64], budgets: Sequence[Budget], full: Sequence[int | None]
) -> list[Step]:
    """Steps of all heads, the cheapest a saved block first. shares [budgets, layers, kv heads];
    full: blocks of a layer's heads, None where they may not keep less (a window of its own)."""
    found = []
    for layer, blocks in enumerate(full):
        if blocks is None:
            continue
        for head in range(shares.shape[2]):
            costs = shares[:, layer, head]
            if not np.isnan(costs).any():
                found += steps_of((layer, head), budgets, costs.tolist(), blocks)
    order = sorted(range(len(found)), key=lambda i: (found[i].cost / found[i].saved, i))
    return [found[i] for i in order]


def template_of(steps: Sequence[Step], heads: Sequence[int]) -> Template:
    """What is kept after these steps; heads: KV heads of each layer."""
    units = [[FULL] * count for count in heads]
    for step in steps:
        units[step.unit[0]][step.unit[1]] = step.budget
    return Template(tuple(tuple(row) for row in units))


def saved_blocks(steps: Sequence[Step]) -> int:
    """Blocks that the steps save together."""
    return sum(step.saved for step in steps)
