"""The classes of 1, 2 and 4 billion weights: which models stand for them, and what each board does.

    python benchmarks/model_classes.py > benchmarks/model_classes.md

Nothing is measured: memory is what the compiler plans for the published shapes, speed is what
gemmake predicts from the descriptions of the boards. The limits are those that the classes are
given: 1.1, 2.3 and 4.8 GB of memory, a first token within 380 and 800 ms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gemmake import advise, planning, predictions
from gemmake.hdf import MIB, Hdf, PowerMode, list_targets, load_hdf
from gemmake.load.shapes import CLASSES, SHAPES, shape_model
from gemmake.passes import place, predict
from gemmake.passes.predict import Range
from gemmake.state import State

GB = 1_000_000_000
LIMITS = {"1B": 1.1, "2B": 2.3, "4B": 4.8}  # GB of memory
FIRST_TOKEN = (0.380, 0.800)  # seconds
PROMPT = 32  # tokens of the prompt that the first token answers
INPUT, ANSWER = 768, 256  # a context of 1,024
CONTEXTS = (1024, 4096)
FASTEST = "nvme"  # storage
REFERENCE = "jetson-orin-nano"  # memory is stated for it; others differ by stacks of threads

HEADER = f"""# Classes of models

`python benchmarks/model_classes.py > benchmarks/model_classes.md` makes this file; a test holds it
current. **Nothing here was measured**: memory is what the compiler plans, speed is predicted
(gemmake/passes/predict.py) from the descriptions of the boards (hdf/README.md). The shapes are
those of the published configs, compiled as `int4` with an `int8` KV cache.

## Memory

Two published models stand for each class. Bytes of a run on {REFERENCE} (6 threads), the
tables of the tokenizer taken at their usual size; a KV cache of measured groups takes at most what
stands behind "to".

| class | model | weights | context 1,024 | context 4,096 | limit | |
|---|---|---|---|---|---|---|"""

SPEED = f"""
## Speed

Tokens/s with {INPUT} tokens in a context of {INPUT + ANSWER}; then the time from the start of the
process to the first token of a prompt of {PROMPT}, the file being in the page cache, and what that
means for 380 and for 800 ms: pass where the slow end of the range holds, fail where the fast end
does not, open where only a run on the board can tell. "no room": more than the board's budget
grants. "at most", "at least": the board's cores have not been counted, so that memory and the most
that any core of its kind multiplies were looked at, or the clock of a mode that limits power is not
described, so that the highest was taken; such figures are bounds, and will not be reached.
`*` is a board's default mode.
"""

LOAD = f"""
## Load

Reading the file from storage comes before that, where it is not in the page cache. By kind of
storage (general knowledge, not measured), and with the fastest of them the first token of a prompt
of {PROMPT} on {REFERENCE}, as above:
"""


@dataclass(frozen=True)
class Plan:
    """A shape as the compiler plans it for a board."""

    state: State
    most: int  # bytes, with the finest groups of the KV cache


def plan(shape: str, hdf: Hdf, target: str, context: int = INPUT + ANSWER) -> Plan:
    """As gemmake advise does it."""
    wish = advise.Wish(target, longest_input=context - ANSWER, answer=ANSWER)
    options = advise.options_of(wish, None)
    base = advise.base_of(shape_model(shape), False, options, hdf)
    state = advise.planned(base, options)
    return Plan(state, planning.memory_of(advise.finest(state)).total)


def verdict(found: Range, limit: float) -> str:
    """pass, fail or open."""
    if found.high <= limit:
        return "pass"
    return "fail" if found.low > limit else "open"


def memory_rows() -> Iterator[str]:
    """One for each model that stands for a class."""
    hdf = load_hdf(REFERENCE)
    for name, shapes in CLASSES.items():
        for shape in shapes:
            plans = [plan(shape, hdf, REFERENCE, context) for context in CONTEXTS]
            cells = []
            for one in plans:
                least, most = planning.memory_of(one.state).total / GB, one.most / GB
                ends = dict.fromkeys((f"{least:.2f}", f"{most:.2f}"))
                cells.append(f"{' to '.join(ends)} GB")
            judged = ["pass" if one.most <= LIMITS[name] * GB else "fail" for one in plans]
            yield (
                f"| {name} | {shape} | {SHAPES[shape].weights:,} | {' | '.join(cells)} | "
                f"{LIMITS[name]} GB | {', '.join(judged)} |"
            )


def boards() -> Iterator[tuple[str, Hdf]]:
    """Those with a system whose memory and bandwidth are known."""
    for name in list_targets():
        hdf = load_hdf(name)
        mode = hdf.default_mode
        if hdf.target.os == "linux" and hdf.memory and mode and mode.mem_peak_gbps:
            yield name, hdf


def speed_rows() -> Iterator[str]:
    """One for each power mode of each board."""
    for name, hdf in boards():
        plans = {shape: plan(shape, hdf, name) for shape in SHAPES}
        works = {shape: predictions.work_of(one.state) for shape, one in plans.items()}
        for mode in hdf.power_mode:
            cells = [cell(plans[s], works[s], hdf, mode) for s in SHAPES]
            star = "*" if mode.default else ""
            yield f"| {name} | {mode.id}{star} | {' | '.join(cells)} |"


def cell(one: Plan, work: predict.Work, hdf: Hdf, mode: PowerMode) -> str:
    """Tokens/s, first token, and the two verdicts."""
    if one.most > hdf.budget_bytes():
        return f"no room: {one.most / MIB:,.0f} of {hdf.budget_bytes() / MIB:,.0f} MiB"
    machine = predict.machine_of(hdf, mode, place.run_threads(hdf))
    found = predict.predict(work, machine, INPUT, PROMPT)
    first = found.first_token(cold=False)
    if found.decode is None or first is None:
        return "-"
    judged = ", ".join(verdict(first, limit) for limit in FIRST_TOKEN)
    rate = predictions.span(found.decode.seconds.inverse())
    return f"{rate}/s; {predictions.duration(first)}: {judged}"


def load_rows() -> Iterator[str]:
    """One for each shape."""
    hdf = load_hdf(REFERENCE)
    for shape in SHAPES:
        work = predictions.work_of(plan(shape, hdf, REFERENCE).state)
        cells = [_load(work, rate) for rate in predict.STORAGE.values()]
        cells.append(_cold(work, hdf))
        yield f"| {shape} | {work.load_size / GB:.2f} GB | {' | '.join(cells)} |"


def _cold(work: predict.Work, hdf: Hdf) -> str:
    """The first token from the fastest storage, and the verdicts."""
    machine = predict.machine_of(hdf, hdf.default_mode, place.run_threads(hdf), FASTEST)
    first = predict.predict(work, machine, INPUT, PROMPT).first_token(cold=True)
    if first is None:
        return "-"
    judged = ", ".join(verdict(first, limit) for limit in FIRST_TOKEN)
    return f"{predictions.duration(first)}: {judged}"


def _load(work: predict.Work, rate: Range) -> str:
    seconds = Range(rate.low * predict.MB, rate.high * predict.MB).inverse(work.load_size)
    return predictions.duration(seconds)


def _head(cells: Mapping[str, object] | list[str]) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"
    yield f"|{'---|' * len(cells)}"


def document() -> str:
    """The whole file."""
    lines = [HEADER, *memory_rows(), SPEED]
    lines += [*_head(["board", "mode", *SHAPES]), *speed_rows(), LOAD]
    lines += [*_head(["model", "file", *predict.STORAGE, f"first token, {FASTEST}"]), *load_rows()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(document(), end="")
