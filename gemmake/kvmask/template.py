"""The template of a sparse cache: measure, order, flip the cheapest heads until a gate closes.

    losses over the calibration windows -> steps -> the largest template that passes the gates

Everything is measured with the engine on the finished weights and the int8 cache. The template
that is taken was itself judged; how quality falls with what is saved is kept as a curve.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmake.kvmask.budgets import FULL, Budget, budgets_for
from gemmake.kvmask.choose import Step, Template, all_steps, saved_blocks, template_of
from gemmake.kvmask.gates import Judge, Passage
from gemmake.kvmask.losses import Losses, Meter
from gemmake.kvmask.quality import Quality, holds
from gemmake.kvmask.saved import Looks, Saved
from gemmake.model import Model
from gemmake.options import KvGate
from gemmake.progress import Reporter
from gemrun.context import Config, GemRunContext

ENOUGH = 1000  # looked-at tokens of which a budget hides something, to decide on it
STORE_EVERY = 25  # windows
FINE = 64  # the search ends within this part of all steps


@dataclass(frozen=True)
class Point:
    """One judged template."""

    steps: int
    saved: float  # share of the blocks of all heads
    quality: Quality


@dataclass(frozen=True)
class Found:
    """A template and how it was found."""

    template: Template
    budgets: tuple[Budget, ...]
    gate: KvGate
    windows: int
    tokens: int  # of the windows
    covered: float  # share of heads whose budget was decided on enough samples and judged
    point: Point  # of the template
    curve: tuple[Point, ...]  # every template that was judged, the least saving first
    kept_mass: tuple[tuple[float, ...], ...]  # [layers][kv heads] of attention, in 95 % of tokens


@dataclass(frozen=True)
class Task:
    """What a template is looked for in."""

    image: Path  # an artifact whose heads keep everything
    model: Model
    context: int  # tokens
    blocks: tuple[int, ...]  # of a layer's heads that keep everything
    threads: int
    baseline: bool
    gate: KvGate
    seconds: float | None  # for measuring; None: all windows
    saved: Saved


def find(
    task: Task,
    windows: Sequence[Sequence[int]],
    held_out: Sequence[Passage],
    reporter: Reporter,
) -> Found:
    """The largest template that passes the gates. windows: token ids."""
    budgets = budgets_for(task.context)
    looks: Looks = {}
    losses = measure(task, budgets, windows, reporter, looks)
    steps = ordered(task, losses)
    heads = [layer.kv_heads for layer in task.model.spec.layers]
    total = sum(h * b for h, b in zip(heads, task.blocks, strict=True))
    from_token = budgets[0].tokens if budgets else 0

    def points(judge: Judge) -> list[Point]:
        def look(count: int) -> Point:
            if count in looks:  # before the compile was stopped
                reporter.advance(tokens)
            else:
                template = template_of(steps[:count], heads)
                looks[count] = judge.judge(template, held_out, from_token, reporter.advance)
                task.saved.store(losses, looks)
            return Point(count, saved_blocks(steps[:count]) / total, looks[count])

        return search(len(steps), look, task.gate)

    tokens = sum(len(text.ids) for text in held_out)
    reporter.start("judging what heads may keep", tokens * rounds(len(steps)))
    with Judge(task.image, task.threads, task.baseline, task.blocks) as judge:
        judged = points(judge) if steps and held_out else []
    return _found(task, losses, steps, heads, judged)


def ordered(task: Task, losses: Losses) -> list[Step]:
    """The steps of all heads, the cheapest a saved block first; to budgets of which there are
    enough samples."""
    usable = [i for i, samples in enumerate(losses.seen) if samples >= ENOUGH]
    budgets = [losses.budgets[i] for i in usable]
    return all_steps(losses.shares()[usable], budgets, _full_blocks(task))


def measure(
    task: Task,
    budgets: Sequence[Budget],
    windows: Sequence[Sequence[int]],
    reporter: Reporter,
    looks: Looks,
) -> Losses:
    """Losses over the windows, as many as there is time for, going on where a run was stopped;
    then looks at templates of the same losses may be known, too."""
    reporter.start("measuring what heads may lose", sum(map(len, windows)))
    config: Config = {
        "threads": task.threads,
        "ignore_memory": True,
        "allow_foreign_board": True,
    }
    if task.baseline:
        config["kernel"] = "scalar"
    until = None if task.seconds is None else time.monotonic() + task.seconds
    with GemRunContext(task.image, **config) as context:
        meter = Meter(context, task.model, budgets)
        if not budgets:
            return meter.losses
        task.saved.load(meter.losses, looks)
        reporter.advance(sum(map(len, windows[: meter.losses.windows])))
        for first in range(meter.losses.windows, len(windows), STORE_EVERY):
            if until is not None and time.monotonic() > until:
                break
            looks.clear()  # of other losses
            some = windows[first : first + STORE_EVERY]
            meter.run(_told(some, reporter.advance))
            task.saved.store(meter.losses)
    return meter.losses


def _told(
    windows: Iterable[Sequence[int]], advance: Callable[[int], None]
) -> Iterable[Sequence[int]]:
    for ids in windows:
        yield ids
        advance(len(ids))


def rounds(steps: int) -> int:
    """How many templates a search judges at most, everything partial included."""
    return 1 + max(1, min(steps, FINE)).bit_length()


def search(steps: int, look: Callable[[int], Point], gate: KvGate) -> list[Point]:
    """Bisection for the most steps that pass; quality is taken to fall as more is saved. Ends
    within a FINE part of all steps."""
    found = [look(steps)]
    if holds(gate, found[0].quality):
        return found
    passes, fails = 0, steps
    while fails - passes > max(1, steps // FINE):
        middle = (passes + fails) // 2
        found.append(look(middle))
        if holds(gate, found[-1].quality):
            passes = middle
        else:
            fails = middle
    return found


def _full_blocks(task: Task) -> list[int | None]:
    """Blocks of a layer's heads; None where they have a window of their own."""
    return [
        None if layer.window else blocks
        for layer, blocks in zip(task.model.spec.layers, task.blocks, strict=True)
    ]


def _found(
    task: Task,
    losses: Losses,
    steps: Sequence[Step],
    heads: Sequence[int],
    judged: Sequence[Point],
) -> Found:
    none = Point(0, 0.0, Quality(0.0, 1.0, 0.0, 0))
    passed = [p for p in judged if holds(task.gate, p.quality)]
    best = max(passed, key=lambda p: p.steps, default=none)
    template = template_of(steps[: best.steps], heads)
    eligible = sum(layer.kv_heads for layer in task.model.spec.layers if not layer.window)
    decided = len({step.unit for step in steps}) if judged else 0
    return Found(
        template=template,
        budgets=losses.budgets,
        gate=task.gate,
        windows=losses.windows,
        tokens=losses.tokens,
        covered=decided / eligible if eligible else 0.0,
        point=best,
        curve=tuple(sorted([none, *judged], key=lambda p: p.steps)),
        kept_mass=_kept_mass(losses, template),
    )


def _kept_mass(losses: Losses, template: Template) -> tuple[tuple[float, ...], ...]:
    """Attention that is kept in 95 % of the tokens, by head; 1 where everything is."""
    kept = losses.kept_mass(0.95)
    return tuple(
        tuple(
            1.0 if budget == FULL else float(kept[losses.budgets.index(budget), layer, head])
            for head, budget in enumerate(row)
        )
        for layer, row in enumerate(template.units)
    )
