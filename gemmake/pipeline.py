"""The compile: ordered passes over a frozen state, then one walk over the weights.

    load -> PASSES -> weights (calibrate, quantise, pack per layer) -> kv_template -> test vectors,
         pinned prompt -> rename

Each pass is a pure function from state to state. The weights are not kept: they stream from the
checkpoint through quantisation into the file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gemmake import calibration, firmware, kvgroups, machine, output, pinning, planning, record
from gemmake.emit import Host, Tally
from gemmake.errors import UsageError
from gemmake.failures import sentences
from gemmake.hdf import load_hdf, with_bsp, with_policy
from gemmake.kvmask.chat import compiled
from gemmake.load import load_checkpoint
from gemmake.model import ModelSpec
from gemmake.options import CompileOptions
from gemmake.passes import norms, place, quant, thermal, ties
from gemmake.passes.budget import Memory
from gemmake.passes.template import compile_template
from gemmake.passes.tokens import compile_tokenizer, tokenizer_notes
from gemmake.progress import Reporter, Silent
from gemmake.report import log_lines
from gemmake.state import State
from gemrun.format import spec

Pass = Callable[[State], State]


def fold_norms(state: State) -> State:
    """Norms become plain effective weights."""
    return replace(state, model=norms.fold_norms(state.model))


def tie(state: State) -> State:
    """A shared table is stored once."""
    return replace(state, model=ties.tie(state.model))


def tokenizer(state: State) -> State:
    """The tokenizer becomes tables."""
    info, source = state.model.spec, state.model.tokenizer
    tokn = compile_tokenizer(source, info.vocab_rows, info.generation)
    return replace(state, tokn=tokn, notes=state.notes + tokenizer_notes(source, info.vocab_rows))


def chat_template(state: State) -> State:
    """The chat template becomes token lists, or a warning."""
    result = compile_template(
        state.model.tokenizer, state.model.spec.generation, state.model.spec.vocab_rows
    )
    notes = state.notes + ((result.warning,) if result.warning else ())
    return replace(state, tmpl=result.section, notes=notes)


def thermal_policy(state: State) -> State:
    """The throttle temperature, from the option or the target, and the ladder above it."""
    threshold, mode = state.options.temperature_threshold, state.options.throttle_mode
    ladder = thermal.ladder(state.hdf, threshold, spec.Mode[mode.name])
    notes = (*state.notes, *thermal.notes(ladder, threshold))
    return replace(state, thermal=thermal.policy(state.hdf, threshold), ladder=ladder, notes=notes)


def place_layers(state: State) -> State:
    """Which engine runs which layer."""
    accelerators = place.accelerators(state.hdf)
    return replace(state, placements=place.place(state.model.spec, accelerators))


def budget(state: State) -> State:
    """Refuse what the target cannot hold; one without a memory table leaves it to the device."""
    return planning.within_budget(state)


#: The passes before the weights, in order. `--dump-after` takes these names and those below.
PASSES: tuple[tuple[str, Pass], ...] = (
    ("fold_norms", fold_norms),
    ("tie", tie),
    ("tokenizer", tokenizer),
    ("chat_template", chat_template),
    ("thermal", thermal_policy),
    ("place", place_layers),
    ("layout", planning.lay_out),
    ("plan_memory", planning.plan_memory),
    ("budget", budget),
)
WEIGHT_PASSES = (
    *("pin_prompt", "kv_groups", "quantise", "kv_template", "kv_values", "test_vectors"),
)


@dataclass(frozen=True)
class CompileResult:
    """A finished artifact and what making it took."""

    state: State
    path: Path
    size: int  # bytes
    root_sha256: str
    memory: Memory
    seconds: float  # wall clock
    cpu_seconds: float  # of this process and its children, user and system
    phases: Mapping[str, float]  # seconds by name; those of the weights overlap
    peak_rss: int  # bytes of this process
    tallies: Mapping[str, Tally]  # by tensor label


def compile_model(options: CompileOptions, reporter: Reporter | None = None) -> CompileResult:
    """Compile a checkpoint into an artifact and its listing. Raises GemError, and only that."""
    with sentences():
        return _compile(options, reporter or Silent())


def _compile(options: CompileOptions, reporter: Reporter) -> CompileResult:
    started = time.monotonic()
    host = Host(options.workers or quant.cpu_threads(), options.baseline)
    check_dumps(options)
    output.check_output(options.output, options.dump_after)
    if options.save_statistics is not None:
        output.replaceable(options.save_statistics, record.MAGIC, "record of statistics")
    pin_text = pinning.text_of(options)
    board = with_bsp(load_hdf(options.target), options.bsp_version)
    hdf = with_policy(board, options.reserve_mib, options.ram_fraction)
    options = firmware.adapted(options, hdf)
    thermal.check(hdf, options.temperature_threshold)
    hdf.mode(options.power_mode)  # an unknown one is refused before anything is read
    reporter.start("reading the checkpoint", 1)
    with host.clock.timed("checkpoint"):
        model = load_checkpoint(options.model, options.config)
    notes = model.notes + context_notes(model.spec, options)
    state = State(model, options, hdf, inputs=model.inputs, notes=notes)
    state = run_passes(with_text(state), host, reporter)
    state = pin_prompt(state, pin_text, host)
    state = kv_groups(state, host, reporter)
    state = statistics(state, host, reporter)
    for line in log_lines(state):
        reporter.info(line)
    state, written, tallies = output.write(state, host, reporter)
    return CompileResult(
        state=state,
        path=options.output,
        size=written.size,
        root_sha256=written.root_sha256.hex(),
        memory=planning.memory_of(state),
        seconds=time.monotonic() - started,
        cpu_seconds=machine.cpu_seconds(),
        phases=host.clock.seconds,
        peak_rss=machine.peak_rss(),
        tallies=tallies,
    )


def context_notes(info: ModelSpec, options: CompileOptions) -> tuple[str, ...]:
    """A sentence where the context goes beyond what the model was trained for."""
    if options.context <= info.trained_context:
        return ()
    return (
        f"--kv-cache-size {options.context} is beyond the {info.trained_context} tokens that the "
        "model was trained for; answers to longer texts may be of no use",
    )


def check_dumps(options: CompileOptions) -> None:
    """Refuse unknown names in --dump-after before any work is done."""
    known = [name for name, _ in PASSES] + list(WEIGHT_PASSES)
    for name in options.dump_after:
        if name not in known:
            raise UsageError(f"--dump-after {name}: no such pass; use one of {', '.join(known)}")


def with_text(state: State) -> State:
    """The calibration text, where something is measured on it; it is an input."""
    options = state.options
    if not (options.feedback or options.measured_kv):
        return state
    chat = None
    if calibration.are_many(options):  # the template before its turn: conversations go through it
        chat = compiled(chat_template(state).tmpl, state.model.spec.vocab_rows)
    text, file = calibration.load_text(options, chat)
    return replace(state, text=text, inputs=(*state.inputs, file))


def pin_prompt(state: State, text: str | None, host: Host) -> State:
    """The ids of a prompt that is pinned; they take room in the artifact."""
    if text is not None:
        state = budget(pinning.decide(state, text, host))
    output.dump("pin_prompt", state)
    return state


def kv_groups(state: State, host: Host, reporter: Reporter) -> State:
    """Groups of an int8 cache by measurement, where there is a calibration text."""
    if state.options.measured_kv:
        groups = kvgroups.choose(state, host, reporter)
        state = planning.plan_memory(planning.lay_out(replace(state, kv_groups=groups)))
        state = budget(state)
    output.dump("kv_groups", state)
    return state


def statistics(state: State, host: Host, reporter: Reporter) -> State:
    """The calibration record, where one is used: it becomes an input, made first if asked for."""
    made, given = state.options.save_statistics, state.options.statistics
    if made is not None:
        from gemmake.torch_forward import make_record

        file = make_record(made, state.inputs[-1], state, host, reporter)
        options = replace(state.options, statistics=made, save_statistics=None)
        state = replace(state, options=options)
    elif given is not None:
        with host.clock.timed("statistics"):
            file = record.identity(given)
    else:
        return state
    return budget(replace(state, inputs=(*state.inputs, file)))


def run_passes(state: State, host: Host, reporter: Reporter) -> State:
    """All passes before the weights, dumping where asked."""
    reporter.start("planning", len(PASSES))
    for name, function in PASSES:
        with host.clock.timed(name):
            state = function(state)
        output.dump(name, state)
        reporter.advance()
    return state
