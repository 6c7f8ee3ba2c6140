"""Writing the result: the artifact and its listing whole or not at all, and dumps of the state."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

from gemmake import pinning
from gemmake.calibration import Calibrator, layer_weights
from gemmake.emit import Chunk, FeedbackOf, Host, Tally, emit
from gemmake.engine import Engine
from gemmake.errors import OutputError
from gemmake.failures import past_stopping
from gemmake.hdf import show
from gemmake.kvmask import saved, values
from gemmake.kvmask.report import mask_lines
from gemmake.kvmask.stage import decide, losses_path
from gemmake.passes import vectors
from gemmake.passes.layout import StreamTensor
from gemmake.planning import manifest_of, records_of, within_budget
from gemmake.progress import Reporter
from gemmake.record import Record
from gemmake.state import State
from gemrun.format import assemble, memmap, spec, units, writer

Tallies = dict[str, Tally]
DUMP_BEGIN = '{\n "buffers": '  # by which a dump is known


def check_output(path: Path, dumps: Iterable[str] = ()) -> None:
    """Refuse an output that cannot be written, or where it or what is written beside it would
    replace a file of another kind. OutputError."""
    replaceable(path, spec.MAGIC, "artifact")
    final = os.path.realpath(path)
    listing = memmap.BEGIN.encode()
    replaceable(Path(final + writer.PARTIAL), spec.MAGIC, "unfinished artifact")
    replaceable(
        Path(f"{dense_path(Path(final))}{writer.PARTIAL}"), spec.MAGIC, "unfinished artifact"
    )
    replaceable(losses_path(Path(final)), saved.MAGIC, "file of losses")
    replaceable(Path(final + memmap.SUFFIX), listing, "listing of an artifact")
    replaceable(Path(final + memmap.SUFFIX + writer.PARTIAL), listing, "listing of an artifact")
    for name in dumps:
        dumped = _dump_path(path, name)
        for each in (dumped, dumped.with_name(dumped.name + writer.PARTIAL)):
            replaceable(each, DUMP_BEGIN.encode(), "dump of a pass")


def replaceable(path: Path, magic: bytes, what: str) -> None:
    """Refuse a path that no file can be written to, or where a file of another kind lies."""
    label, folder = show(path), path.absolute().parent
    if path.is_dir() or path.name in ("", ".", ".."):
        raise OutputError(f"{label}: is a folder; name a file in it")
    if not folder.is_dir():
        raise OutputError(f"{show(folder)}: no such folder; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"{show(folder)}: not writable; choose another folder")
    if not path.exists():
        return
    if not path.is_file():
        raise OutputError(f"{label}: is not a regular file; name another output")
    with path.open("rb") as file:
        begin = file.read(len(magic))
    if begin not in (b"", magic):
        raise OutputError(f"{label}: exists and is no {what}; move it away, or name another output")


def write(state: State, host: Host, reporter: Reporter) -> tuple[State, writer.Written, Tallies]:
    """Write artifact and listing; the state may know more behind it. Raises GemError or WriteError;
    then neither has changed."""
    options = state.options
    first = replace(state, pinned=None) if options.judged else state  # pinned when it is decided
    assembled = assemble.assemble(records_of(first, len(manifest_of(first, {}))))
    tallies = {t.label: Tally() for t in state.stream.tensors}
    path = dense_path(options.output) if options.judged else options.output
    with writer.ArtifactWriter(path, assembled.header, assembled.parts) as out:
        _write_weights(state, out, tallies, host, reporter)
        dump("quantise", state, tallies)
        out.fill("MANI", manifest_of(first, tallies))
        out.seal()
        image = Path(out.partial)
        if options.sparse:
            state = decide(state, image, host, reporter)
        dump("kv_template", state, tallies)
        if options.narrow:
            state = values.decide(state, image, host, reporter)
        dump("kv_values", state, tallies)
        if not options.judged:
            return state, _finish(state, out, tallies, host, reporter), tallies
        for line in (*mask_lines(state), *values.log_lines(state)):
            reporter.info(line)
        written = _write_again(state, Path(out.partial), tallies, host, reporter)
        losses_path(options.output).unlink(missing_ok=True)
    return state, written, tallies


def dense_path(output: Path) -> Path:
    """Where the artifact is written before it is known what KV heads keep, and in how many bits; it
    never loses its .partial."""
    return output.with_name(output.name + ".dense")


def _write_again(
    state: State, dense: Path, tallies: Tallies, host: Host, reporter: Reporter
) -> writer.Written:
    """The artifact at `dense` with what heads keep: same weights."""
    within_budget(state, decided=True)
    target, keeps = state.options.output, state.keeps
    again = units.rewritten(
        dense, target, keeps,
        value4=state.value4, key4=state.key4, kv_mask=state.kv_mask, kv_values=state.kv_values,
        kv_keys=state.kv_keys, notes=state.notes, pinned=state.pinned,
    )  # fmt: skip
    with again as out:
        return _finish(state, out, tallies, host, reporter)


def _finish(
    state: State, out: writer.ArtifactWriter, tallies: Tallies, host: Host, reporter: Reporter
) -> writer.Written:
    """What the engine makes over the sealed image, then the final name."""
    reporter.start("making test vectors", vectors.COUNT)
    with host.clock.timed("test vectors"):
        for name, payload in _made(state, Path(out.partial), host, reporter).items():
            out.fill(name, payload)
        out.seal()
    dump("test_vectors", state, tallies)
    beside = memmap.beside(Path(out.partial), Path(out.path))
    with beside, host.clock.timed("finish"):
        return out.finish(past_stopping)


def _made(state: State, image: Path, host: Host, reporter: Reporter) -> dict[str, bytes]:
    """TEST and PINP, made by the engine over the sealed image."""
    info = state.model.spec
    made = []
    with Engine(image, min(host.threads, spec.MAX_THREADS), host.baseline) as engine:
        for prompt in vectors.prompts(state.options.context, info.vocab_rows):
            digest, ids = engine.test_vector(prompt, vectors.steps(state.options.context))
            made.append((prompt, digest, ids))
            reporter.advance()
        return {"TEST": vectors.pack(made), **pinning.fill(state, engine)}


# ---- weights ----
def _write_weights(
    state: State, out: writer.ArtifactWriter, tallies: Tallies, host: Host, reporter: Reporter
) -> None:
    tensors = state.stream.tensors
    weights = sum(s.rows * s.cols for t in tensors for s in t.sources)
    if not state.options.feedback:
        reporter.start("compiling", weights)
        _Sink(out, host, reporter).take(tensors, _no_feedback, tallies)
        return
    with _calibrator(state, host, reporter) as calibrator:
        layers = len(state.layers)
        body = sum(layer_weights(state, layer) for layer in range(layers))
        reporter.start("compiling", weights + calibrator.units * body)
        sink = _Sink(out, host, reporter, calibrator)
        for layer, group in groupby(tensors, key=lambda t: t.record.layer):
            if layer >= 0:
                reporter.rename(f"layer {layer + 1} of {layers}")
                calibrator.prepare(layer)
            sink.take(tuple(group), calibrator.feedback, tallies)


def _calibrator(state: State, host: Host, reporter: Reporter) -> Calibrator | Record:
    if state.options.statistics is not None:
        return Record(state.options.statistics, state, host)
    return Calibrator(state, host, reporter)


def _no_feedback(_tensor: StreamTensor) -> None:
    return None


class _Sink:
    """Where chunks go: the file, the progress bar, and the calibrator."""

    def __init__(
        self,
        out: writer.ArtifactWriter,
        host: Host,
        reporter: Reporter,
        calibrator: Calibrator | Record | None = None,
    ) -> None:
        self._out = out
        self._host = host
        self._reporter = reporter
        self._calibrator = calibrator
        self._position = 0  # in the weight stream

    def take(
        self, tensors: tuple[StreamTensor, ...], feedback: FeedbackOf, tallies: Tallies
    ) -> None:
        """Emit the tensors and write them where they belong."""
        with contextlib.closing(emit(tensors, feedback, self._host, tallies)) as chunks:
            for chunk in chunks:
                with self._host.clock.timed("write"):
                    self._write(chunk)
                self._reporter.advance(chunk.weights)
                if self._calibrator:
                    self._calibrator.keep(chunk)

    def _write(self, chunk: Chunk) -> None:
        start = chunk.tensor.record.offset
        if self._position < start:
            self._out.write_weights(bytes(start - self._position))
        self._position = max(self._position, start) + len(chunk.data)
        self._out.write_weights(chunk.data)


# ---- dumps ----
def dump(name: str, state: State, tallies: Mapping[str, Tally] | None = None) -> None:
    """Write OUTPUT.PASS.json when --dump-after names the pass. Raises OutputError."""
    if name not in state.options.dump_after:
        return
    path = _dump_path(state.options.output, name)
    text = json.dumps(describe(state, tallies or {}), indent=1, sort_keys=True) + "\n"
    try:
        with writer.whole(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{show(path)}: {error.strerror}; check the output folder") from error


def _dump_path(output: Path, name: str) -> Path:
    return output.with_name(f"{output.name}.{name}.json")


def describe(state: State, tallies: Mapping[str, Tally]) -> dict[str, object]:
    """The state as plain data for a dump: what has been decided so far."""
    info = state.model.spec
    return {
        "family": info.family,
        "layers": [asdict(layer) for layer in info.layers],
        "tied": info.tied,
        "sources": {
            f"{layer} {role.name.lower()}": {"name": ref.name, "norm_offset": ref.norm_offset}
            for (layer, role), ref in state.model.tensors.items()
        },
        "options": state.options.recorded(),
        "inputs": [asdict(file) for file in state.inputs],
        "target": state.hdf.id,
        "thermal": {
            "threshold_c": state.thermal.threshold_c,
            "hysteresis_c": state.thermal.hysteresis_c,
            "device_max_c": state.thermal.device_max_c,
            "throttle_mode": state.options.throttle_mode.value,
            "engage_c": state.ladder.engage_c if state.ladder else 0.0,
        },
        "tensors": [_tensor(t, tallies) for t in state.stream.tensors],
        "buffers": [asdict(buffer) for buffer in state.buffers],
        "rings": [
            {"offset": r.kv_offset, "size": r.kv_size, "group": r.kv_group} for r in state.layers
        ],
        "placements": [f"{p.layer} {p.op}: {p.engine} ({p.reason})" for p in state.placements],
        "tokn_bytes": len(state.tokn),
        "tmpl_bytes": len(state.tmpl or b""),
        "rope_bytes": len(state.ropes),
        "pinned_ids": list(state.pinned.ids) if state.pinned else [],
        "notes": list(state.notes),
    }


def _tensor(tensor: StreamTensor, tallies: Mapping[str, Tally]) -> dict[str, object]:
    record = tensor.record
    tally = tallies.get(tensor.label)
    return {
        "name": tensor.label,
        "format": tensor.format.name,
        "rows": record.rows,
        "cols": record.cols,
        "offset": record.offset,
        "size": record.size,
        "report": tally.report() if tally else {},
    }
