"""The compile: ordered passes over a frozen state, then one walk over the weights.

    load -> PASSES -> weights (calibrate, quantise, pack per layer) -> test vectors -> rename

Each pass is a pure function from state to state. The weights are not kept: they stream from the
checkpoint through quantisation into the file.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gemmake import __version__, calibration
from gemmake.emit import Emission, Tally, emit_tensor
from gemmake.engine import Engine
from gemmake.errors import OutputError, UsageError
from gemmake.hdf import load_hdf
from gemmake.load import load_checkpoint
from gemmake.model import InputFile
from gemmake.options import CompileOptions, Effort, Quantization
from gemmake.passes import layout, memplan, norms, place, quant, thermal, ties, vectors
from gemmake.passes.budget import Memory, Remedy, check_budget
from gemmake.passes.template import compile_template
from gemmake.passes.tokens import compile_tokenizer
from gemmake.progress import Reporter, Silent
from gemmake.state import State
from gemrun.format import assemble, manifest, memmap, spec, writer

Pass = Callable[[State], State]


def fold_norms(state: State) -> State:
    """Norms become plain effective weights."""
    return replace(state, model=norms.fold_norms(state.model))


def tie(state: State) -> State:
    """A shared table is stored once."""
    return replace(state, model=ties.tie(state.model))


def tokenizer(state: State) -> State:
    """The tokenizer becomes tables."""
    info = state.model.spec
    tokn = compile_tokenizer(state.model.tokenizer, info.vocab_rows, info.generation)
    return replace(state, tokn=tokn)


def chat_template(state: State) -> State:
    """The chat template becomes token lists, or a warning."""
    result = compile_template(
        state.model.tokenizer, state.model.spec.generation, state.model.spec.vocab_rows
    )
    notes = state.notes + ((result.warning,) if result.warning else ())
    return replace(state, tmpl=result.section, notes=notes)


def thermal_policy(state: State) -> State:
    """The throttle temperature, from the option or the target."""
    threshold = state.options.temperature_threshold
    return replace(state, thermal=thermal.policy(state.hdf, threshold))


def place_layers(state: State) -> State:
    """Which engine runs which layer."""
    return replace(state, placements=place.place(state.model.spec, _accelerators(state)))


def lay_out(state: State) -> State:
    """Records and the place of every tensor, the KV rings and the rotary tables."""
    model, options = state.model, state.options
    stream = layout.plan_stream(model, options)
    threads = options.run_threads or place.run_threads(state.hdf)
    conf = layout.plan_conf(model, options, stream, threads)
    tables = [
        (rope.dims // 2, options.context, _rope_bytes(rope, options)) for rope in model.spec.ropes
    ]
    return replace(
        state,
        stream=stream,
        conf=conf,
        layers=layout.plan_layers(model, options, stream, conf),
        ropes=assemble.rope_section(tables),
    )


def plan_memory(state: State) -> State:
    """The arena: buffers that never live together share bytes."""
    wanted = layout.plan_buffers(state.conf, state.layers, state.stream)
    buffers = [
        memplan.Buffer(int(kind), kind.name, size, int(first), int(last))
        for kind, size, first, last in wanted
    ]
    planned = memplan.plan(buffers)
    memplan.verify(planned)
    return replace(state, buffers=planned)


def budget(state: State) -> State:
    """Refuse what the target cannot hold."""
    granted = state.hdf.budget_bytes() or 0
    check_budget(memory_of(state), granted, state.hdf.id, _remedies(state))
    return state


#: The passes before the weights, in order. `--dump-after` takes these names and the two below.
PASSES: tuple[tuple[str, Pass], ...] = (
    ("fold_norms", fold_norms),
    ("tie", tie),
    ("tokenizer", tokenizer),
    ("chat_template", chat_template),
    ("thermal", thermal_policy),
    ("place", place_layers),
    ("layout", lay_out),
    ("plan_memory", plan_memory),
    ("budget", budget),
)
WEIGHT_PASSES = ("quantise", "test_vectors")


@dataclass(frozen=True)
class CompileResult:
    """A finished artifact and what making it took."""

    state: State
    path: Path
    size: int  # bytes
    root_sha256: str
    memory: Memory
    seconds: float
    peak_rss: int  # bytes of this process
    tallies: Mapping[str, Tally]  # by tensor label


def compile_model(options: CompileOptions, reporter: Reporter | None = None) -> CompileResult:
    """Compile a checkpoint into an artifact and its listing. Raises GemError."""
    started = time.monotonic()
    reporter = reporter or Silent()
    check_dumps(options)
    reporter.start("reading the checkpoint", 1)
    state = State(load_checkpoint(options.model, options.config), options, load_hdf(options.target))
    state = run_passes(state)
    _tell_placement(state, reporter)
    written, tallies = _write(state, reporter)
    memory = memory_of(state)
    reporter.info(f"Weights quantised in {len(state.stream.tensors)} tensors")
    return CompileResult(
        state=state,
        path=options.output,
        size=written.size,
        root_sha256=written.root_sha256.hex(),
        memory=memory,
        seconds=time.monotonic() - started,
        peak_rss=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        tallies=tallies,
    )


def check_dumps(options: CompileOptions) -> None:
    """Refuse unknown names in --dump-after before any work is done."""
    known = [name for name, _ in PASSES] + list(WEIGHT_PASSES)
    for name in options.dump_after:
        if name not in known:
            raise UsageError(f"--dump-after {name}: no such pass; use one of {', '.join(known)}")


def run_passes(state: State) -> State:
    """All passes before the weights, dumping where asked."""
    state = replace(state, notes=state.model.notes)
    for name, function in PASSES:
        state = function(state)
        dump(name, state)
    return state


def dump(name: str, state: State, tallies: Mapping[str, Tally] | None = None) -> None:
    """Write OUTPUT.PASS.json when --dump-after names the pass."""
    if name not in state.options.dump_after:
        return
    path = state.options.output.with_name(f"{state.options.output.name}.{name}.json")
    try:
        path.write_text(json.dumps(describe(state, tallies or {}), indent=1, sort_keys=True) + "\n")
    except OSError as error:
        raise OutputError(f"{path.name}: {error.strerror}; check the output folder") from error


def describe(state: State, tallies: Mapping[str, Tally]) -> dict[str, object]:
    """The state as plain data for a dump: what has been decided so far."""
    info = state.model.spec
    return {
        "family": info.family,
        "layers": len(info.layers),
        "tensors": [
            {
                "name": t.label,
                "format": t.format.name,
                "rows": t.record.rows,
                "cols": t.record.cols,
                "offset": t.record.offset,
                "size": t.record.size,
                "report": tallies[t.label].report() if t.label in tallies else {},
            }
            for t in state.stream.tensors
        ],
        "buffers": [
            {
                "name": b.name,
                "offset": b.offset,
                "size": b.size,
                "first_op": b.first_op,
                "last_op": b.last_op,
            }
            for b in state.buffers
        ],
        "placements": [f"{p.layer}: {p.engine} ({p.reason})" for p in state.placements],
        "tokn_bytes": len(state.tokn),
        "tmpl_bytes": len(state.tmpl or b""),
        "notes": list(state.notes),
    }


# ---- the artifact ----
def records_of(state: State, manifest_size: int, tests: int) -> assemble.Records:
    """Everything but the weights' bytes."""
    return assemble.Records(
        conf=state.conf,
        layers=state.layers,
        tensors=state.stream.records(),
        segments=state.stream.segments,
        plans=[
            spec.Plan(
                kind=b.kind, first_op=b.first_op, last_op=b.last_op, offset=b.offset, size=b.size
            )
            for b in sorted(state.buffers, key=lambda b: b.kind)
        ],
        rope=state.ropes,
        tokn=state.tokn,
        tmpl=state.tmpl,
        thermal=state.thermal,
        tests=writer.blank_tests(tests),
        hdf=state.hdf.canonical_json(),
        hdf_sha256=state.hdf.sha256(),
        manifest=manifest_size,
        weights_size=state.stream.size,
        target=state.hdf.id,
        isa=int(ISA.get(state.hdf.target.arch, spec.Isa.ANY)),
        ram_budget=state.hdf.budget_bytes() or 0,
    )


ISA = {
    "x86_64": spec.Isa.X86_64,
    "aarch64": spec.Isa.AARCH64,
    "arm": spec.Isa.ARMV7,
    "riscv64": spec.Isa.RISCV64,
}


def manifest_of(state: State, tallies: Mapping[str, Tally], text: InputFile | None) -> bytes:
    """The manifest. Its size does not depend on the tallies' values."""
    blank = Tally()
    entries = [
        manifest.tensor_entry(
            t.label, t.record, state.stream.segments, tallies.get(t.label, blank).report()
        )
        for t in state.stream.tensors
    ]
    inputs = state.model.inputs + ((text,) if text else ())
    return manifest.encode(
        manifest.build(
            state.conf,
            state.layers,
            entries,
            inputs=[{"name": i.name, "size": i.size, "sha256": i.sha256} for i in inputs],
            licence=state.model.spec.licence,
            notes=state.notes,
            options=state.options.recorded(),
            tools={"gemmake": __version__},
        )
    )


def _write(state: State, reporter: Reporter) -> tuple[writer.Written, dict[str, Tally]]:
    text, text_file = calibration.load_text(state.options) if needs_feedback(state) else ("", None)
    records = records_of(state, len(manifest_of(state, {}, text_file)), vectors.COUNT)
    assembled = assemble.assemble(records)
    tallies: dict[str, Tally] = {}
    try:
        with writer.ArtifactWriter(state.options.output, assembled.header, assembled.parts) as out:
            _write_weights(state, out, tallies, text, reporter)
            dump("quantise", state, tallies)
            out.fill("MANI", manifest_of(state, tallies, text_file))
            out.seal()
            reporter.start("making test vectors", vectors.COUNT)
            out.fill("TEST", _test_vectors(state, Path(out.partial), reporter))
            written = out.finish()
    except writer.WriteError as error:
        raise OutputError(str(error)) from error
    dump("test_vectors", state, tallies)
    memmap.write_memmap(state.options.output)
    return written, tallies


def _test_vectors(state: State, image: Path, reporter: Reporter) -> bytes:
    """TEST, made by the engine over the sealed image."""
    info = state.model.spec
    made = []
    threads = min(state.options.workers or quant.cpu_threads(), spec.MAX_THREADS)
    with Engine(image, threads) as engine:
        for prompt in vectors.prompts(state.options.context, info.vocab_rows):
            digest, ids = engine.test_vector(prompt, vectors.steps(state.options.context))
            made.append((prompt, digest, ids))
            reporter.advance()
    return vectors.pack(made)


def needs_feedback(state: State) -> bool:
    """Whether codes are found with error feedback over calibration text."""
    options = state.options
    int4 = options.quantization is Quantization.INT4
    q4h = layout.body_format(options) is spec.Format.Q4H
    return int4 and q4h and options.effort is Effort.FULL


def _write_weights(
    state: State,
    out: writer.ArtifactWriter,
    tallies: dict[str, Tally],
    text: str,
    reporter: Reporter,
) -> None:
    threads = state.options.workers or quant.cpu_threads()
    calibrator = calibration.Calibrator(state, text, threads, reporter) if text else None
    reporter.start(
        "compiling", sum(s.rows * s.cols for t in state.stream.tensors for s in t.sources)
    )
    position = 0
    for tensor in state.stream.tensors:
        out.write_weights(bytes(tensor.record.offset - position))
        feedback = calibrator.feedback(tensor) if calibrator else None
        tally = tallies.setdefault(tensor.label, Tally())
        emission = Emission(feedback, threads)
        for chunk in emit_tensor(tensor, emission, tally, reporter.advance):
            out.write_weights(chunk)
            if calibrator:
                calibrator.keep(tensor, chunk)
        position = tensor.end


# ---- memory ----
def memory_of(state: State) -> Memory:
    """What a run takes, from the finished plan."""
    assembled = assemble.assemble(records_of(state, len(manifest_of(state, {}, None)), 1))
    ram = assembled.totals
    return Memory(ram.weights, ram.tables, ram.arena, ram.kv, ram.engine, ram.stacks)


def _remedies(state: State) -> list[Remedy]:
    """Options that lower the total, cheapest loss first."""
    options = state.options
    tries: list[tuple[str, CompileOptions]] = []
    context = options.context // 2
    while context >= 128:
        tries.append((f"--kv-cache-size {context}", replace(options, context=context)))
        context //= 2
    if options.quantization is not Quantization.INT4:
        tries.insert(0, ("--quantization int4", replace(options, quantization=Quantization.INT4)))
    if options.chunk > 32:
        tries.append(("--prefill-chunk 32", replace(options, chunk=32)))
    return [
        Remedy(name, memory_of(plan_memory(lay_out(replace(state, options=changed)))).total)
        for name, changed in tries
    ]


def _rope_bytes(rope: object, options: CompileOptions) -> bytes:
    return quant.rope_table(rope, options.context).astype("<f4").tobytes()  # type: ignore[arg-type]


def _accelerators(state: State) -> place.Accelerators:
    kinds = tuple(unit.kind for unit in state.hdf.accelerator if unit.kind != "nvdla")
    return place.Accelerators(state.hdf.accelerators("nvdla"), kinds)


def _tell_placement(state: State, reporter: Reporter) -> None:
    lines = place.placement_lines(
        state.model.spec,
        state.placements,
        _accelerators(state),
        state.hdf.board,
        layout.weight_bytes(state.stream, len(state.layers)),
    )
    for line in (*lines, *state.notes):
        reporter.info(line)
