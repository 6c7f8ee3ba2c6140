"""The step of a compile that decides what KV heads keep, on the finished weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gemmake.emit import Host
from gemmake.kvmask.budgets import BLOCK, FULL, budgets_for
from gemmake.kvmask.chat import compiled
from gemmake.kvmask.gates import Passage
from gemmake.kvmask.reader import Reader
from gemmake.kvmask.saved import SUFFIX, Saved
from gemmake.kvmask.template import Found, Point, Task, find
from gemmake.kvmask.window import Window
from gemmake.progress import Reporter
from gemmake.state import State
from gemrun.context import Config, GemRunContext
from gemrun.format import sizes, spec

SEED = 0  # of the built-in texts
DIGITS = 6  # of figures in the manifest


def decide(state: State, image: Path, host: Host, reporter: Reporter) -> State:
    """The state with what every KV head keeps. `image` is the artifact of it in which all keep
    everything. What was measured stays in the file of losses, which is of no use once the artifact
    is written."""
    if not budgets_for(state.options.context) or all(la.window for la in state.layers):
        return replace(state, kv_mask=_nothing(state), notes=(*state.notes, _why_nothing(state)))
    windows, held_out = texts_of(state, image)
    task = task_of(state, image, host, windows, held_out)
    with host.clock.timed("kv template"):
        found = find(task, windows, held_out, reporter)
    keeps = tuple((b.sink, b.recent) for row in found.template.units for b in row)
    if not found.template.partial:
        keeps = ()
    return replace(state, keeps=keeps, kv_mask=entry(state, found))


def task_of(
    state: State,
    image: Path,
    host: Host,
    windows: Sequence[Sequence[int]],
    held_out: Sequence[Passage],
) -> Task:
    """What a template is looked for in."""
    return Task(
        image=image,
        model=state.model,
        context=state.options.context,
        blocks=tuple(sizes.kv_blocks(state.options.context, la.window) for la in state.layers),
        threads=min(host.threads, spec.MAX_THREADS),
        baseline=host.baseline,
        gate=state.options.kv_gate,
        seconds=None if state.options.kv_minutes is None else 60 * state.options.kv_minutes,
        saved=Saved(losses_path(state.options.output), _key(image, windows, held_out)),
    )


def losses_path(output: Path) -> Path:
    """Where losses are kept on the way."""
    return output.with_name(output.name + SUFFIX)


def texts_of(state: State, image: Path) -> tuple[list[list[int]], list[Passage]]:
    """Token ids of the windows, and the held-out texts; none longer than the context."""
    from gemmake.kvmask import heldout, texts  # big tables of words

    options = state.options
    with reading(state, image) as reader:
        windows: Iterable[Window]
        held_out: Iterable[Window]
        how = (options.context, reader.ids, reader.render)
        if options.calibration is None:
            windows = texts.windows(options.sample_ratio, SEED, *how)
            held_out = heldout.windows(*how)
        else:
            own = texts.own(options.calibration, options.sample_ratio, *how)
            windows, held_out = own.windows, own.held_out
        return [reader.ids(w.text) for w in windows], [reader.passage(w) for w in held_out]


@contextmanager
def reading(state: State, image: Path) -> Iterator[Reader]:
    """Texts as the device reads them: by the tokenizer and the chat template of an artifact."""
    config = Config(threads=1, ignore_memory=True, allow_foreign_board=True)
    chat = compiled(state.tmpl, state.model.spec.vocab_rows)
    with GemRunContext(image, **config) as context:
        yield Reader(context.tokenize, chat, state.options.context)


def _key(
    image: Path, windows: Sequence[Sequence[int]], held_out: Sequence[Passage]
) -> dict[str, object]:
    """What losses and looks belong to: they are of no use for anything else."""
    with image.open("rb") as file:
        root = spec.Header.unpack(file.read(spec.HEADER_SIZE)).root_sha256
    judged = [
        [*text.ids, len(text.ids) if text.answer is None else text.answer] for text in held_out
    ]
    return {"root": root.hex(), "windows": _digest(windows), "held_out": _digest(judged)}


def _digest(rows: Sequence[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for ids in rows:
        digest.update(len(ids).to_bytes(4, "little"))
        digest.update(b"".join(i.to_bytes(4, "little") for i in ids))
    return digest.hexdigest()


# ---- what is written about it ----
def entry(state: State, found: Found) -> dict[str, Any]:
    """The manifest's kv_mask."""
    units = [budget for row in found.template.units for budget in row]
    return {
        "covered": round(found.covered, DIGITS),
        "units": len(units),
        "partial": found.template.partial,
        "heads": sum(la.heads for la in state.layers),
        "partial_heads": sum(
            la.heads // la.kv_heads * sum(budget != FULL for budget in row)
            for la, row in zip(state.layers, found.template.units, strict=True)
        ),
        "windows": found.windows,
        "tokens": found.tokens,
        "budgets": [budget.tokens for budget in found.budgets],
        "gate": asdict(found.gate),
        "saved": round(found.point.saved, DIGITS),
        "quality": quality_of(found.point),
        "curve": [[p.steps, round(p.saved, DIGITS), *quality_of(p).values()] for p in found.curve],
        "chat_template": state.tmpl is not None,
        "kept_mass": [[round(share, 3) for share in row] for row in found.kept_mass],
    }


def quality_of(point: Point) -> dict[str, float | int]:
    """The fields of a Quality, in their order."""
    figures = asdict(point.quality).items()
    return {name: round(f, DIGITS) if isinstance(f, float) else f for name, f in figures}


def _nothing(state: State) -> dict[str, Any]:
    """kv_mask where no head may keep less: the architecture's windows are all there is."""
    units = sum(la.kv_heads for la in state.layers)
    heads = sum(la.heads for la in state.layers)
    return {"covered": 0.0, "units": units, "partial": 0, "heads": heads, "partial_heads": 0}


def _why_nothing(state: State) -> str:
    if all(la.window for la in state.layers):
        return "--kv-cache-type dynamic-sparse: every layer has a window of its own; nothing to add"
    least = (4 + 2) * BLOCK
    return (
        f"--kv-cache-type dynamic-sparse: a context of {state.options.context} tokens is too short "
        f"to keep less; it begins at {least}"
    )
