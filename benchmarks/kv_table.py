"""The KV cache in its kinds, side by side: bytes, and what they cost in quality and time.

    python benchmarks/kv_table.py CHECKPOINT --work FOLDER [--context 2048] [--ratio 0.1]
                                  [--gate default] [--gate top1=0.95,kl=0.01] [--saved 0.25]
                                  [--texts 16] [--recalls 25] [--threads N]

Compiles the checkpoint with a float16 and an int8 cache (--effort fast: all rows have the same
weights, byte for byte), measures what KV heads may keep once, and takes a template for each --gate
as gemmake --kv-gate does. Artifacts and what was measured stay in FOLDER: a run goes on where one
was stopped.

Bytes are those of the plan and, after a run that fills the context, the resident ones of the
engine's mapping. Quality is that of each cache against float16 on the held-out text of
gemmake.kvmask: mean KL, equal best tokens, perplexity, at positions behind the 128th. Recall is the
share of right tokens, and of wholly right answers, in recall texts of a seed of no mix. The cache's
hit rate is over 50 short commands behind a preamble (commands.py). First tokens of a prompt that
fills three quarters of the context, by turns, medians. --saved takes templates of another size
than a gate does, in the same order of heads; the tightest --kv-gate that they pass stands with all
of them: their quality against int8 on the same text.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import commands
import numpy as np

from gemmake.cli import GATES
from gemmake.emit import Host
from gemmake.hdf import load_hdf
from gemmake.kvmask import heldout, mix
from gemmake.kvmask.budgets import budgets_for
from gemmake.kvmask.choose import saved_blocks, template_of
from gemmake.kvmask.gates import SUMS, Passage, compare, logits_of
from gemmake.kvmask.losses import F64
from gemmake.kvmask.quality import Quality
from gemmake.kvmask.stage import decide, reading, task_of, texts_of
from gemmake.kvmask.template import measure, ordered
from gemmake.kvmask.window import Measure
from gemmake.load import load_checkpoint
from gemmake.options import CompileOptions, Effort, KvGate, KvType
from gemmake.passes import quant
from gemmake.passes.layout import kv_bytes
from gemmake.pipeline import compile_model, run_passes
from gemmake.progress import Reporter, shown
from gemmake.state import State
from gemrun import GemRunContext, machine
from gemrun.format import spec
from gemrun.format.reader import read_artifact
from gemrun.format.units import with_units

TARGET = f"generic-{'aarch64' if platform.machine() in ('aarch64', 'arm64') else 'x86-64'}"
SEED = 1_000_000_009  # of no mix
RECALLS = 25  # five of each form
FROM = 128  # tokens; what the smallest budget keeps
PIECE = 32  # tokens that all contexts take by turns
ROUNDS = 5  # of first tokens
COMMANDS, PREAMBLE, ANSWERED = 50, 300, 8


@dataclass(frozen=True)
class Row:
    """A kind of cache. No path: what the plan says is all there is."""

    name: str
    gate: str
    planned: int  # bytes
    path: Path | None = None
    saved: float | None = None  # of the blocks, by a template


@dataclass(frozen=True)
class Cost:
    """Against float16."""

    kl: float
    top1: float
    perplexity: float
    right: float  # share of the tokens of answers
    whole: int  # answers without a wrong token
    gate: str  # the tightest --kv-gate that it passes, against int8


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for artifacts")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--ratio", type=float, default=0.1, help="of 10,000 calibration windows")
    parser.add_argument("--gate", action="append", help="as --kv-gate, or default; may be repeated")
    parser.add_argument(
        "--saved",
        action="append",
        type=float,
        default=[],
        help="a template that saves this share of the cache's blocks, not judged; may be repeated",
    )
    parser.add_argument(
        "--texts", type=int, default=heldout.COUNT, help="held-out texts of quality"
    )
    parser.add_argument("--recalls", type=int, default=RECALLS, help="recall texts")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    options = CompileOptions(
        given.model, TARGET, given.work / "sparse.gembin",
        kv_type=KvType.DYNAMIC_SPARSE, context=given.context, effort=Effort.FAST,
        sample_ratio=given.ratio,
    )  # fmt: skip
    with shown("kv_table", verbose=True) as reporter:
        gates = given.gate or ([] if given.saved else ["default"])
        rows, state = make(options, gates, given.saved, reporter)
        texts, asked = read(state, rows, given.texts, given.recalls)
    paths = [row.path for row in rows if row.path is not None]
    costs = dict(zip(paths, judge(paths, texts, asked, given.threads), strict=True))
    hits = {path: hit_rate(path, given.threads) for path in paths}
    resident = {path: resident_kv(path) for path in paths}
    first = dict(
        zip(paths, first_tokens(paths, given.context * 3 // 4, given.threads), strict=True)
    )
    print(
        f"{given.model.name}, {given.context} tokens, {given.threads} threads, "
        f"{machine.cpu_name()}; {asked_of(texts)} tokens of answers "
        f"in {len(texts)} held-out texts, {asked_of(asked)} in {len(asked)} recall texts; "
        f"--prefill-sample-ratio {given.ratio}"
    )
    print(
        "| cache | --kv-gate | planned | resident | of float16 | KL | equal best token | "
        "perplexity | recall: tokens, answers | cache hits | first token, of float16 |"
    )
    print("|---" * 11 + "|")
    for row in rows:
        by = row.gate if row.path is None or row.saved is None else costs[row.path].gate
        name = row.name if row.saved is None else f"{row.name}, {row.saved:.1%} of the blocks saved"
        cells = [name, f"{row.gate} {by}".strip() if by != row.gate else by, f"{row.planned:,}"]
        share = f"{row.planned / rows[0].planned - 1:+.1%}"
        if row.path is None:
            print("| " + " | ".join([*cells, "", share, *[""] * 6]) + " |")
            continue
        cost = costs[row.path]
        cells += [f"{resident[row.path]:,}", share, f"{cost.kl:.4f}", f"{cost.top1:.2%}"]
        cells += [f"{cost.perplexity:+.2%}", f"{cost.right:.1%}, {cost.whole} of {len(asked)}"]
        cells += [f"{hits[row.path]:.1%}", f"{first[row.path] / first[paths[0]]:.2f}"]
        print("| " + " | ".join(cells) + " |")
    return 0


# ---- artifacts ----
def make(
    options: CompileOptions, gates: Sequence[str], shares: Sequence[float], reporter: Reporter
) -> tuple[list[Row], State]:
    """The artifacts of all rows; and the state of the one with an int8 cache."""
    half = compiled(options, KvType.DENSE, reporter)
    int8 = compiled(options, KvType.INT8, reporter)
    host = Host(quant.cpu_threads(), False)
    model = load_checkpoint(options.model)
    state = run_passes(State(model, options, load_hdf(TARGET)), host, reporter)
    bare = [replace(layer, window=0) for layer in state.layers]
    windows = any(layer.window for layer in state.layers)
    all_positions = kv_bytes(state.conf, bare, spec.KvType.F16)
    rows = [Row("float16, the model's windows", "", planned(half), half)]
    if windows:
        rows.insert(0, Row("float16, all positions", "", all_positions))
    else:
        rows[0] = replace(rows[0], name="float16; the model has no windows")
    rows.append(Row("int8", "", planned(int8), int8))
    for number, text in enumerate(gates):
        gate = gate_of(text)
        gated = replace(state, options=replace(options, kv_gate=gate))
        decided = decide(gated, int8, host, reporter)
        path = options.output.with_name(f"template{number}.gembin")
        with_units(int8, path, decided.keeps, kv_mask=decided.kv_mask)
        mask = decided.kv_mask or {}
        said = ",".join(f"{name}={value:g}" for name, value in asdict(gate).items())
        rows.append(
            Row(
                f"int8, {mask['partial']} of {mask['units']} KV heads keep a part",
                said, planned(path), path, mask.get("saved", 0.0),
            )
        )  # fmt: skip
    for share in shares:
        keeps, saved, partial = template(state, int8, host, share, reporter)
        path = options.output.with_name(f"saved{share:g}.gembin")
        with_units(int8, path, keeps)
        name = f"int8, {partial} of {len(keeps)} KV heads keep a part"
        rows.append(Row(name, "", planned(path), path, saved))
    return rows, state


def template(
    state: State, image: Path, host: Host, share: float, reporter: Reporter
) -> tuple[list[tuple[int, int]], float, int]:
    """What heads keep so that a share of all blocks is saved, or as many as can be; that share;
    how many heads keep a part."""
    windows, held_out = texts_of(state, image)
    task = task_of(state, image, host, windows, held_out)
    losses = measure(task, budgets_for(task.context), windows, reporter, {})
    steps = ordered(task, losses)
    heads = [layer.kv_heads for layer in state.layers]
    total = sum(count * blocks for count, blocks in zip(heads, task.blocks, strict=True))
    count = next((n for n in range(len(steps)) if saved_blocks(steps[:n]) >= share * total), None)
    taken = steps[:count]
    found = template_of(taken, heads)
    keeps = [(budget.sink, budget.recent) for row in found.units for budget in row]
    return keeps, saved_blocks(taken) / total, found.partial


def compiled(options: CompileOptions, kind: KvType, reporter: Reporter) -> Path:
    """An artifact with a cache of a kind, made once."""
    path = options.output.with_name(f"{kind.value}.gembin")
    if not path.exists():
        compile_model(replace(options, kv_type=kind, output=path), reporter)
    return path


def gate_of(text: str) -> KvGate:
    """A gate as it is typed."""
    if text == "default":
        return KvGate()
    parts = (part.partition("=") for part in text.split(","))
    try:
        return KvGate(**{name: float(value) for name, _, value in parts})
    except (TypeError, ValueError):
        sys.exit(f"kv_table: {text} is no gate; use default, or {GATES} or some of them")


def planned(path: Path) -> int:
    """Bytes of the cache, as the header declares them."""
    with read_artifact(path) as artifact:
        return artifact.header.ram_kv


def resident_kv(path: Path) -> int:
    """Resident bytes of the cache after a run that fills the context, in a process of its own."""
    script = Path(__file__).with_name("memory.py")
    command = [sys.executable, str(script), str(path), "--threads", "1", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    parts = json.loads(done.stdout)["parts"]
    return next(int(part["resident"]) for part in parts if part["name"] == "kv")


# ---- quality ----
def read(
    state: State, rows: Sequence[Row], count: int, recalls: int
) -> tuple[list[Passage], list[Passage]]:
    """Held-out texts, and recall texts of a seed of no mix."""
    path = next(row.path for row in rows if row.path is not None)
    with reading(state, path) as reader:
        how = Measure(reader.ids, reader.render)
        places = (at for at in range(mix.WINDOWS) if mix.place(at).kind == "recall")
        windows = (mix.window(SEED, at, state.options.context, how) for at in places)
        recall = islice((w for w in windows if w.answer_at is not None), recalls)
        asked = [reader.passage(w) for w in recall]
        held_out = heldout.windows(state.options.context, reader.ids, reader.render, count)
        return [reader.passage(w) for w in held_out], asked


def asked_of(texts: Sequence[Passage]) -> int:
    """Tokens of all answers."""
    return sum(len(text.ids) - text.answer for text in texts if text.answer is not None)


def judge(
    paths: Sequence[Path], texts: Sequence[Passage], asked: Sequence[Passage], threads: int
) -> list[Cost]:
    """Each cache against the first, over the same tokens side by side."""
    with ExitStack() as stack:
        contexts = [
            stack.enter_context(GemRunContext(path, threads=threads, head="full")) for path in paths
        ]
        sums = np.zeros((2, len(paths), len(SUMS)))  # against float16, against int8
        count = 0
        for text in texts:
            count += beside(contexts, text, FROM, sums)
        found = [answers(context, asked) for context in contexts]
    costs = []
    answered = max(asked_of(texts), 1)
    for half, int8, (right, whole) in zip(*sums, found, strict=True):
        against = quality(half, count, answered)
        gate = tightest(quality(int8, count, answered))
        costs.append(
            Cost(against.kl, against.top1, against.perplexity, right / asked_of(asked), whole, gate)
        )
    return costs


def quality(sums: F64, count: int, answers: int) -> Quality:
    """The figures of SUMS over so many tokens, and so many of answers."""
    kl, top1, nll, nll_less, right, dense = sums.tolist()
    rise = math.expm1((nll_less - nll) / count)
    return Quality(kl / count, top1 / count, rise, count, answers, int(right), int(dense))


def tightest(found: Quality) -> str:
    """Gates that just let it through."""
    gates = {
        "kl": math.ceil(found.kl * 1e4) / 1e4,
        "top1": math.floor(found.top1 * 1e3) / 1e3,
        "perplexity": max(0.0, math.ceil(found.perplexity * 1e4) / 1e4),
        "recall": max(0.0, math.ceil(found.forgotten * 1e3) / 1e3),
    }
    return ",".join(f"{name}={value:g}" for name, value in gates.items())


def beside(
    contexts: Sequence[GemRunContext],
    text: Passage,
    from_token: int,
    sums: F64,
) -> int:
    """Add a text's SUMS of every context to its rows, against the first and against the second
    context; the tokens that counted."""
    ids, count = text.ids, 0
    for context in contexts:
        context.reset_kv_cache()
        context.prefill(ids[:from_token])
    for first in range(from_token, len(ids) - 1, PIECE):
        piece = ids[first : first + PIECE]
        nexts = np.asarray(ids[first + 1 : first + 1 + len(piece)])
        wanted = text.asked(first + 1, len(nexts))
        half = logits_of(contexts[0], piece)[: len(nexts)]
        int8 = logits_of(contexts[1], piece)[: len(nexts)]
        for at, context in enumerate(contexts):
            less = logits_of(context, piece)[: len(nexts)] if at > 1 else (half, int8)[at]
            sums[0, at] += compare(half, less, nexts, wanted)
            sums[1, at] += compare(int8, less, nexts, wanted)
        count += len(nexts)
    return count


def answers(context: GemRunContext, texts: Sequence[Passage]) -> tuple[int, int]:
    """Right tokens of the answers, and answers without a wrong one."""
    right = whole = 0
    for text in texts:
        assert text.answer is not None
        context.reset_kv_cache()
        context.prefill(text.ids[: text.answer - 1])
        best = logits_of(context, text.ids[text.answer - 1 : -1]).argmax(1)
        good = best == np.asarray(text.ids[text.answer :])
        right += int(good.sum())
        whole += bool(good.all())
    return right, whole


# ---- time ----
def hit_rate(path: Path, threads: int) -> float:
    """Share of the prompts' tokens that the cache held, over short commands behind a preamble."""
    with GemRunContext(path, threads=threads) as context:
        texts = commands.prompts(context, PREAMBLE, COMMANDS)
        return commands.serve(context, path, texts, ANSWERED, reuse=True).hit_rate


def first_tokens(paths: Sequence[Path], tokens: int, threads: int) -> list[float]:
    """Seconds to the first token of a prompt of so many, by turns; medians."""
    with ExitStack() as stack:
        contexts = [stack.enter_context(GemRunContext(path, threads=threads)) for path in paths]
        ids = contexts[0].tokenize(commands.preamble(contexts[0], tokens), bos=True)[:tokens]
        took: list[list[float]] = [[] for _ in paths]
        for number in range(ROUNDS + 1):
            for at, context in enumerate(contexts):
                context.reset_kv_cache()
                begin = time.monotonic()
                context.prefill(ids)
                context.sample(temperature=0.0)
                if number:  # the first one warms
                    took[at].append(time.monotonic() - begin)
    return [statistics.median(times) for times in took]


if __name__ == "__main__":
    sys.exit(main())
