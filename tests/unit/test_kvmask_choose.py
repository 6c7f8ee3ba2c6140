"""Steps, templates, the search and the gates of a sparse KV cache: pure parts."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from gemmake.kvmask.budgets import FULL, SIZES, Budget, budgets_for
from gemmake.kvmask.choose import all_steps, blocks_of, saved_blocks, steps_of, template_of
from gemmake.kvmask.gates import SUMS, Passage, compare
from gemmake.kvmask.losses import BINS, Losses
from gemmake.kvmask.quality import Quality, holds, words
from gemmake.kvmask.saved import MAGIC, Looks, Saved
from gemmake.kvmask.template import Point, rounds, search
from gemmake.options import KvGate

SMALL, MIDDLE = Budget(1, 3), Budget(1, 7)


def test_budgets_save_at_least_a_block() -> None:
    assert [b.tokens for b in budgets_for(8192)] == [32 * s for s in SIZES]
    assert [b.tokens for b in budgets_for(2048)] == [128, 256, 512, 1024]
    assert [b.tokens for b in budgets_for(1024)] == [128, 256, 512]
    assert budgets_for(160) == ()
    assert [b.tokens for b in budgets_for(192)] == [128]
    for context in range(2, 9000, 7):
        full = -(-context // 32)
        assert all(blocks_of(b, full) < full for b in budgets_for(context))


def test_steps_follow_the_lower_hull() -> None:
    (step,) = steps_of((0, 1), [SMALL, MIDDLE], [0.1, 0.09], 32)  # the middle is not worth it
    assert (step.budget, step.saved, step.cost) == (SMALL, 27, 0.1)
    first, second = steps_of((0, 0), [SMALL, MIDDLE], [0.5, 0.01], 32)
    assert (first.budget, first.saved) == (MIDDLE, 23)
    assert (second.budget, second.saved) == (SMALL, 4)
    assert second.cost == pytest.approx(0.49)
    (free,) = steps_of((0, 0), [SMALL, MIDDLE], [0.0, 0.0], 32)
    assert free.budget == SMALL


def random_shares(seed: int) -> np.ndarray:  # type: ignore[type-arg]
    rng = np.random.default_rng(seed)
    falling = np.sort(rng.random((3, 6, 4)), axis=0)[::-1]  # a larger budget never loses more
    return np.ascontiguousarray(falling)


@pytest.mark.parametrize("seed", range(20))
def test_more_steps_never_keep_more(seed: int) -> None:
    budgets = budgets_for(1024)
    full: list[int | None] = [32, 32, None, 32, 32, 32]
    steps = all_steps(random_shares(seed), budgets, full)
    rates = [step.cost / step.saved for step in steps]
    assert rates == sorted(rates)
    before = template_of([], [4] * 6)
    assert before.partial == 0
    for count in range(1, len(steps) + 1):
        now = template_of(steps[:count], [4] * 6)
        for row, then in zip(now.units, before.units, strict=True):
            for a, b in zip(row, then, strict=True):
                assert blocks_of(a, 32) <= blocks_of(b, 32)
        kept = sum(blocks_of(b, 32) for row in now.units for b in row)
        assert saved_blocks(steps[:count]) == 6 * 4 * 32 - kept
        assert now.units[2] == (FULL,) * 4  # a window of its own
        before = now


def quality(kl: float) -> Quality:
    return Quality(kl, 1.0, 0.0, 1000)


@pytest.mark.parametrize("passing", [0, 1, 5, 37, 100, 262, 263])
def test_the_search_finds_the_last_that_passes(passing: int) -> None:
    looked: list[int] = []

    def look(count: int) -> Point:
        looked.append(count)
        return Point(count, count / 263, quality(0.0 if count <= passing else 1.0))

    found = search(263, look, KvGate())
    good = max((p.steps for p in found if holds(KvGate(), p.quality)), default=0)
    assert passing - max(1, 263 // 64) <= good <= passing
    assert len(looked) == len(set(looked)) <= rounds(263)


def test_every_gate_closes() -> None:
    gate = KvGate(kl=0.005, top1=0.97, perplexity=0.005, recall=0.01)
    assert holds(gate, Quality(0.005, 0.97, 0.005, 1))
    assert holds(gate, Quality(0.0, 1.0, -0.5, 1))
    for bad in (Quality(0.0051, 1, 0, 1), Quality(0, 0.969, 0, 1), Quality(0, 1, 0.0051, 1)):
        assert not holds(gate, bad)
    assert not holds(gate, Quality(float("nan"), 1, 0, 1))
    for lost in range(5):  # of 300 tokens of answers; three are one point
        assert holds(gate, Quality(0, 1, 0, 900, 300, 123 - lost, 123)) == (lost <= 3)
    assert holds(gate, Quality(0, 1, 0, 900, 300, 150, 123)), "more right than before"
    assert holds(KvGate(recall=1.0), Quality(0, 1, 0, 900, 300, 0, 300))
    assert not holds(KvGate(recall=0.0), Quality(0, 1, 0, 900, 300, 299, 300))


def test_recall_is_told_where_there_are_answers() -> None:
    assert "recall" not in words(Quality(0.001, 0.99, 0.001, 900))
    found = words(Quality(0.00123, 0.991, 0.0012, 900, 200, 121, 123))
    assert found == (
        "KL 0.00123, equal best token 99.10%, perplexity +0.12%, recall 60.5% (dense 61.5%) of 200 "
        "tokens"
    )


def test_comparison_is_that_of_float64() -> None:
    rng = np.random.default_rng(3)
    full = rng.normal(size=(7, 50)).astype(np.float32) * 4
    less = full + rng.normal(size=full.shape).astype(np.float32)
    nexts = rng.integers(0, 50, 7)
    p, q = (np.exp(z.astype(np.float64)) for z in (full, less))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    rows = np.arange(7)
    wanted = [
        (p * np.log(p / q)).sum(),
        (p.argmax(1) == q.argmax(1)).sum(),
        -np.log(p[rows, nexts]).sum(),
        -np.log(q[rows, nexts]).sum(),
    ]
    none, every = np.zeros(7, bool), np.ones(7, bool)
    assert compare(full, less, nexts, none)[:4] == pytest.approx(wanted, rel=1e-4)
    assert compare(full, full, nexts, none)[:2].tolist() == [0.0, 7.0]
    assert len(compare(full, less, nexts, none)) == len(SUMS)
    nexts[2:5] = less[2:5].argmax(1)
    nexts[5] = full[5].argmax()
    for asked in (none, every, np.arange(7) >= 4):
        right = [int((z.argmax(1) == nexts)[asked].sum()) for z in (less, full)]
        assert compare(full, less, nexts, asked)[4:].tolist() == right
    assert right[0] >= 1


def test_which_tokens_are_an_answer() -> None:
    text = Passage(list(range(50)), 40)
    assert text.asked(33, 32).tolist() == [at >= 40 for at in range(33, 65)]
    assert not Passage(list(range(50))).asked(33, 17).any()


def losses(seed: int | None = None) -> Losses:
    budgets = budgets_for(1024)
    made = Losses(
        budgets,
        np.zeros(2),
        np.zeros((3, 2, 2)),
        np.zeros((3, 2, 2, BINS), np.int64),
        seen=np.zeros(3, np.int64),
    )
    if seen_seed := seed:
        rng = np.random.default_rng(seen_seed)
        made.added[:] = rng.random(2)
        made.lost[:] = rng.random((3, 2, 2))
        made.hidden[:] = rng.integers(0, 9, made.hidden.shape)
        made.seen[:] = [3, 4, 5]
        made.windows, made.tokens = 25, 12345
    return made


def test_losses_on_the_way_come_back_for_the_same_work_only(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "x.losses", {"root": "00", "windows": "11"})
    made, back = losses(7), losses()
    assert not saved.load(back)
    saved.store(made)
    assert saved.load(back)
    for a, b in ((made.added, back.added), (made.lost, back.lost), (made.hidden, back.hidden)):
        assert np.array_equal(a, b)
    assert (back.windows, back.tokens, back.seen.tolist()) == (25, 12345, [3, 4, 5])
    assert not Saved(saved.path, {"root": "01", "windows": "11"}).load(losses())
    looks: Looks = {}
    assert saved.load(losses(), looks)
    assert not looks
    judged = {7: Quality(0.1, 0.9, -0.01, 5000, 200, 120, 121), 3: Quality(0.0, 1.0, 0.0, 5000)}
    saved.store(made, judged)
    assert saved.load(back, looks)
    assert looks == judged


def test_damaged_losses_are_measured_again(tmp_path: Path) -> None:
    saved = Saved(tmp_path / "x.losses", {"root": "00"})
    saved.store(losses(7))
    good = saved.path.read_bytes()
    rng = random.Random(5)
    for _ in range(200):
        data = bytearray(good)
        at = rng.randrange(0, 60)
        data[at] ^= 1 << rng.randrange(8)
        cut = rng.choice([len(data), at, len(data) - 3])
        saved.path.write_bytes(bytes(data[:cut]))
        back = losses()
        if not saved.load(back):
            assert back.windows == 0
            assert not back.lost.any()
            assert not back.hidden.any()
    saved.path.write_bytes(MAGIC)
    assert not saved.load(losses())


def test_kept_mass_is_of_the_tokens_that_lose_most() -> None:
    made = losses()
    made.hidden[..., 0] = 96  # of 100 tokens 96 lose nothing to speak of
    made.hidden[..., BINS // 2] = 4
    assert made.kept_mass(0.95) == pytest.approx(np.full((3, 2, 2), 0.999))
    assert made.kept_mass(0.99) == pytest.approx(np.full((3, 2, 2), 0.499))
