"""From a state to records, sizes and the manifest: everything of an artifact but its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from gemmake import __version__, firmware
from gemmake.emit import Tally
from gemmake.hdf import MIB, with_policy
from gemmake.kvmask.budgets import budgets_for
from gemmake.model import RopeSpec
from gemmake.options import (
    CHUNK,
    CONTEXT,
    CompileOptions,
    KvType,
    Offload,
    Profile,
    Quantization,
)
from gemmake.passes import layout, memplan, offload, place, quant, vectors
from gemmake.passes.budget import Memory, Remedy, check_budget
from gemmake.state import State
from gemrun.format import assemble, manifest, pins, spec, writer

LEAST_CONTEXT = 128  # tokens; the smallest context that is proposed to fit a budget
CONTEXT_STEP = 128  # tokens that proposed contexts, and those for an input, are multiples of
SMALL_CHUNK = 32  # tokens of a prefill step, likewise

ISA = {
    "x86_64": spec.Isa.X86_64,
    "aarch64": spec.Isa.AARCH64,
    "arm": spec.Isa.ARMV7,
    "riscv64": spec.Isa.RISCV64,
}


def lay_out(state: State) -> State:
    """Records and the place of every tensor, the KV rings and the rotary tables."""
    model, options = state.model, state.options
    stream = layout.plan_stream(model, options)
    threads = options.run_threads or place.run_threads(state.hdf)
    conf = layout.plan_conf(model, options, stream, threads)
    tables = [
        (rope.dims // 2, options.context, _rope_bytes(rope, options.context))
        for rope in model.spec.ropes
    ]
    return replace(
        state,
        stream=stream,
        cold=offload.records(conf, stream, _extent(stream, options)),
        conf=conf,
        layers=layout.plan_layers(model, options, stream, conf, state.kv_groups),
        ropes=assemble.rope_section(tables),
    )


def _extent(stream: layout.Stream, options: CompileOptions) -> offload.Extent:
    return offload.extent_of(options.offloaded, offload.layers_of(stream))


def _rope_bytes(rope: RopeSpec, positions: int) -> bytes:
    return quant.rope_table(rope, positions).astype("<f4").tobytes()


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


def placed(state: State) -> tuple[tuple[spec.Layer, ...], tuple[spec.KvUnit, ...]]:
    """Layers with their rings, and units, as far as they are decided."""
    return assemble.place_units(state.conf, state.layers, state.keeps, state.value4, state.key4)


def records_of(
    state: State, manifest_part: bytes | int, tests: int = vectors.COUNT
) -> assemble.Records:
    """Everything but the weights' bytes; `manifest_part` is the manifest or its size, `tests` the
    test vectors that room is reserved for."""
    layers, units = placed(state)
    return assemble.Records(
        conf=state.conf,
        layers=layers,
        units=units,
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
        ladder=state.ladder,
        tests=writer.blank_tests(tests),
        hdf=state.hdf.canonical_json(),
        hdf_sha256=state.hdf.sha256(),
        manifest=manifest_part,
        weights_size=state.stream.size,
        target=state.hdf.id,
        isa=int(ISA.get(state.hdf.target.arch, spec.Isa.ANY)),
        ram_budget=state.hdf.budget_bytes(),
        pin=pins.blank(state.conf, layers, units, state.pinned.ids) if state.pinned else b"",
        cold=state.cold,
    )


def pin_size(state: State) -> int:
    """Bytes of the section with the pinned prompt, 0 without one."""
    return len(records_of(state, 0).pin)


def manifest_of(state: State, tallies: Mapping[str, Tally]) -> bytes:
    """The manifest. Its size does not depend on the tallies' values."""
    blank = Tally()
    layers, units = placed(state)
    entries = [
        manifest.tensor_entry(
            t.label, t.record, state.stream.segments, tallies.get(t.label, blank).report()
        )
        for t in state.stream.tensors
    ]
    return manifest.encode(
        manifest.build(
            state.conf,
            layers,
            entries,
            inputs=[{"name": i.name, "size": i.size, "sha256": i.sha256} for i in state.inputs],
            licence=state.model.spec.licence,
            notes=state.notes,
            options=state.options.recorded()
            | {"target": state.hdf.id}
            | (state.pinned.option if state.pinned else {}),
            units=units,
            kv_mask=state.kv_mask,
            kv_values=state.kv_values,
            kv_keys=state.kv_keys,
            tools={"gemmake": __version__},
        )
    )


# ---- memory ----
def memory_of(state: State) -> Memory:
    """What a run takes, from the finished plan."""
    assembled = assemble.assemble(records_of(state, len(manifest_of(state, {}))))
    ram = assembled.totals
    parts = (ram.weights, ram.tables, ram.arena, ram.kv, ram.engine, ram.stacks)
    return Memory(*parts, in_flash=state.hdf.bare)


def within_budget(state: State, decided: bool = False) -> State:
    """The state, with as few weights in memory as the target asks for and `--offload auto` allows.
    BudgetError where the target cannot hold it; until it is decided what KV heads keep, where it
    could not at best.
    """
    memory = memory_of(state if decided else least(state))
    firmware.check_flash(memory, state.hdf, state.options.quantization)
    granted = state.hdf.ram_bytes()
    if state.hdf.memory is None or memory.ram <= granted:
        return state
    if not decided:
        for smaller in _offloaded(state):
            if memory_of(least(smaller)).ram <= granted:
                return smaller
    check_budget(memory, granted, state.hdf.id, remedies(state), state.options.share())
    return state


def _offloaded(state: State) -> Iterator[State]:
    """The state with ever more weights out of memory, where gemmake is to choose and knows what
    that costs: the target's storage is described."""
    if state.options.offload is Offload.AUTO and state.hdf.storage is not None:
        for cold in offload.choices(state.conf, state.stream, state.options.offloaded):
            yield replace(state, cold=cold)


def offload_lines(state: State) -> list[str]:
    """What weights cost that do not stay in memory, if there are any or were to be, and whether
    what was asked for saves anything."""
    level = state.options.offloaded
    asked = level is not Offload.NONE
    little = offload.little(state.conf, state.stream, state.cold, level) if asked else []
    if not state.cold:
        return little
    storage = state.hdf.storage
    told = (storage.kind, storage.seq_read_mbps) if storage else None
    cost = offload.cost(state.conf, state.stream, state.cold)
    return offload.lines(cost, told, state.conf.chunk) + little


def least(state: State) -> State:
    """The state as it will be at best: with a sparse cache that is not decided yet, every head that
    may keep a part keeps the smallest one; likewise values and keys that may have 4 bits have them.
    """
    able = tuple(layer.head_dim % 16 == 0 for layer in state.layers for _ in range(layer.kv_heads))
    if "values" in state.options.narrow:
        state = replace(state, value4=able)
    if "keys" in state.options.narrow:
        state = replace(state, key4=able)
    found = budgets_for(state.options.context) if state.options.sparse else ()
    if not found:
        return state
    small = (found[0].sink, found[0].recent)
    keeps = [
        assemble.EVERYTHING if layer.window else small
        for layer in state.layers
        for _ in range(layer.kv_heads)
    ]
    return replace(state, keeps=tuple(keeps))


def remedies(state: State) -> list[Remedy]:
    """Options that lower the total, the least loss first; each alone, then all together; then a
    larger share of the memory, where the caller chose it."""
    steps = list(_steps(state))
    found = [_remedy(state, name, changed) for name, changed in steps]
    names = {name.split()[0]: name for name, _ in steps}
    if len(names) > 1:
        everything = _everything(state)
        if "--kv-cache-size" in names:
            names["--kv-cache-size"] = f"--kv-cache-size {everything.context}"
        found.append(_remedy(state, " ".join(names.values()), everything))
    return found + list(_share(state))


def _share(state: State) -> Iterator[Remedy]:
    """The largest reserve and the smallest share of the memory by which it fits as it is, where the
    caller's own choice of these is what keeps it out."""
    options, hdf = state.options, state.hdf
    if hdf.memory is None or not options.share():
        return
    total, visible = _total(state, options), hdf.memory.visible_mib
    wanted = math.ceil(total / MIB)
    if wanted > visible:
        return
    changed = options
    if options.reserve_mib is not None:
        changed = replace(changed, reserve_mib=min(options.reserve_mib, visible - wanted))
    if options.ram_fraction is not None:
        share = max(options.ram_fraction, share_of(wanted, visible))
        changed = replace(changed, ram_fraction=share)
    grants = with_policy(hdf, changed.reserve_mib, changed.ram_fraction).ram_bytes()
    if grants >= total:
        name, command = changed.share(options), changed.command()
        yield Remedy(name, total, command, options.context, grants=grants)


def share_of(wanted: int, visible: int) -> float:
    """The smallest share, in hundredths, of so many MiB that holds what is wanted."""
    shares = (hundredths / 100 for hundredths in range(1, 101))
    return next((share for share in shares if math.floor(visible * share) >= wanted), 1.0)


def _remedy(state: State, name: str, options: CompileOptions) -> Remedy:
    streams = options.offloaded in (Offload.FFN, Offload.ALL)
    return Remedy(name, _total(state, options), options.command(), options.context, streams)


def _steps(state: State) -> Iterator[tuple[str, CompileOptions]]:
    """Options that lower the total, each with the others as they are: the prefill step, the KV
    cache, what of the head stays in memory, the weights, the profile, the context, the storage. Of
    firmware, whose weights are in flash, the context."""
    options = state.options
    if state.hdf.bare:
        if (context := _longest(state, options)) < options.context:
            yield f"--kv-cache-size {context}", replace(options, context=context)
        return
    if options.chunk > SMALL_CHUNK:
        yield f"--prefill-chunk {SMALL_CHUNK}", replace(options, chunk=SMALL_CHUNK)
    if options.kv_type is KvType.DENSE:
        yield "--kv-cache-type int8", replace(options, kv_type=KvType.INT8)
    if options.offloaded is Offload.NONE:
        yield "--offload rows", replace(options, offload=Offload.ROWS)
    if options.quantization is not Quantization.INT4:
        yield "--quantization int4", replace(options, quantization=Quantization.INT4)
    if options.profile is Profile.STANDARD:
        yield "--profile lite", _lite(state)
    if (context := _longest(state, options)) < options.context:
        yield f"--kv-cache-size {context}", replace(options, context=context)
    for level in (Offload.FFN, Offload.ALL):
        if options.offload is not Offload.ALL and options.offload is not level:
            yield f"--offload {level.value}", replace(options, offload=level)


def _lite(state: State) -> CompileOptions:
    """The options with the lite profile, where nothing is named that it sets."""
    options = state.options
    return replace(
        options,
        profile=Profile.LITE,
        context=max(min(options.context, CONTEXT[Profile.LITE]), _shortest(state)),
        chunk=min(options.chunk, CHUNK[Profile.LITE]),
        kv_type=KvType.INT8 if options.kv_type is KvType.DENSE else options.kv_type,
    )


def _shortest(state: State) -> int:
    """The smallest context to propose: a pinned prompt has to fit."""
    least = SMALL_CHUNK if state.hdf.bare else LEAST_CONTEXT
    return max(least, len(state.pinned.ids) + 2 if state.pinned else 0)


def _longest(state: State, options: CompileOptions) -> int:
    """The longest context in steps of 128 tokens (firmware: 32) that fits the budget with these
    options, else the shortest to propose; that of the options, where it is not longer."""
    step = SMALL_CHUNK if state.hdf.bare else CONTEXT_STEP
    granted = state.hdf.ram_bytes()
    low = -(-_shortest(state) // step)  # steps, and `high` is known to be too long
    high = -(-options.context // step) + 1
    while high - low > 1:
        middle = (low + high) // 2
        context = min(options.context, middle * step)
        if _total(state, replace(options, context=context)) <= granted:
            low = middle
        else:
            high = middle
    return min(options.context, low * step)


def _everything(state: State) -> CompileOptions:
    """All steps together: the lite profile, all weights from storage, and of the context what then
    fits."""
    options = replace(
        _lite(state),
        chunk=min(state.options.chunk, SMALL_CHUNK),
        quantization=Quantization.INT4,
        offload=Offload.ALL,
    )
    return replace(options, context=_longest(state, options))


def _total(state: State, options: CompileOptions) -> int:
    """The RAM with other options, where KV heads would keep as little as they may, and groups of
    the cache that are to be measured are the finest. Bytes."""
    changed = replace(state, options=options, keeps=(), value4=(), key4=())
    if options.measured_kv and not state.kv_groups:
        changed = replace(changed, kv_groups=finest_groups(changed))
    return memory_of(least(plan_memory(lay_out(changed)))).ram


def finest_groups(state: State) -> tuple[int, ...]:
    """The finest groups of the KV cache that measuring may choose: the largest cache."""
    return tuple(min(layout.kv_candidates(layer)) for layer in state.model.spec.layers)
