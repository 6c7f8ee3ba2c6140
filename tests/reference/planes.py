"""The head in two planes, NUMERICS.md section 6.1, in NumPy: candidates and what is computed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reference import floatmath as fm
from reference.floatmath import F32, I32, f32
from reference.formats import PANEL, Activations, Matrix

SPREAD = f32(float.fromhex("0x1.270682p+2"))
STEPS = 12
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Screened:
    """What a request for the best `keep` tokens needs."""

    candidates: int  # rows that reach the bar by their first bound
    computed: Bools  # [rows]: of a panel that is computed in full


def _plane(matrix: Matrix, codes: I32, sa: F32, asum: I32, high: bool, groups: list[int]) -> F32:
    """acc of one plane's nibbles alone, around 8, over some groups in that order: [R]."""
    acc = np.zeros(matrix.groups[0].codes.shape[0], np.float32)
    for g in groups:
        nibbles = matrix.groups[g].codes >> 4 if high else matrix.groups[g].codes & 15
        exact = 16 * (nibbles @ codes[g]) - 128 * asum[g]
        acc = fm.fmaf(exact.astype(np.float32), sa[g], acc)
    return acc


def _order(z: F32, count: int) -> npt.NDArray[np.int64]:
    """Rows by z descending, then ascending."""
    return np.lexsort((np.arange(len(z)), -z.astype(np.float64)))[:count]


def screen(matrix: Matrix, hidden: F32, keep: int, margin: float, usable: Bools) -> Screened:
    """hidden: the final norm's output; usable [rows]: rows of tokens with a piece."""
    assert matrix.supers is not None
    x = Activations(hidden[None, :])
    codes, sa, asum = (part[0] for part in x.quantised())
    supers, rows = matrix.supers, matrix.rows
    spread = f32(margin) * SPREAD
    energy = (sa * sa) * (codes * codes).sum(axis=1).astype(np.float32)
    left = centre = f32(0)
    for g in range(len(sa)):
        left = left + energy[g]
        centre = fm.fmaf(sa[g], f32(asum[g]), centre)[()]
    least, reach = left / f32(16), spread * np.sqrt(left)
    every = list(range(len(sa)))
    z = supers * _plane(matrix, codes, sa, asum, True, every)
    z = z + supers * (f32(7.5) * centre)
    bound = z + np.abs(supers) * reach
    exact = matrix.product(x)[0, 0]
    pool = _order(np.where(usable, z[:rows], -np.inf), 16 if keep < 8 else 2 * keep)
    bar = np.sort(exact[pool])[::-1][keep - 1]
    reaching = bound >= bar
    z = bound - np.abs(supers) * reach
    candidates = int(reaching[:rows].sum())
    alive = reaching.reshape(-1, PANEL).any(axis=1)
    for _ in range(STEPS):
        g = int(np.argmax(energy))
        left = left - energy[g]
        energy[g] = 0
        if not left > least:
            break
        y = _plane(matrix, codes, sa, asum, False, [g])
        z = z + supers * (f32(0.0625) * y + (f32(0.5) * sa[g]) * f32(asum[g]))
        reaching = z + np.abs(supers) * (spread * np.sqrt(left)) >= bar
        alive &= reaching.reshape(-1, PANEL).any(axis=1)
    return Screened(candidates, np.repeat(alive, PANEL)[:rows])
