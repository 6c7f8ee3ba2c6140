"""Calibration: what the layers see, from the engine's own forward over a small text.

Layer by layer: the layer runs in float32 over the hidden states, the inputs of its products are
summed into Hessians, its weights are quantised against them, and the quantised layer makes the
hidden states of the next one. Hessians are made, used and dropped; nothing comes from torch or
BLAS, so the bytes follow from checkpoint and text alone (NUMERICS C1).
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from types import TracebackType

import numpy as np

from gemmake import images
from gemmake.emit import Chunk, Host
from gemmake.engine import Capture, Engine
from gemmake.errors import CheckpointError, UsageError
from gemmake.files import read_small
from gemmake.hdf import show
from gemmake.kvmask.chat import Chat, encode
from gemmake.model import MODEL_LAYER, FloatRows, InputFile, Role
from gemmake.options import CompileOptions, KvKeys, KvType, KvValues, Profile, Quantization
from gemmake.passes import layout, quant
from gemmake.passes.layout import StreamTensor
from gemmake.progress import Reporter
from gemmake.state import State
from gemrun.format import spec

MAX_TEXT = 16 << 20  # bytes
WINDOW = 512  # tokens of one forward
WINDOWS = 24  # spread over the text, so that all of its kinds count
CHUNK = 128  # tokens of a prefill step; a multiple of 32, so that sums do not depend on it

#: Work of a weight in one window of 512 tokens, in units of its search: for the progress bar.
MEASURE_UNITS = 2  # forward in float32, and Hessians
FORWARD_UNITS = 1  # forward with the stored weights

#: Which product's inputs a matrix multiplies: the step at which the engine shows them.
STEP_OF_ROLE: Mapping[int, spec.Op] = {
    Role.Q: spec.Op.QKV,
    Role.K: spec.Op.QKV,
    Role.V: spec.Op.QKV,
    Role.O: spec.Op.O,
    Role.GATE_UP: spec.Op.GATE_UP,
    Role.DOWN: spec.Op.DOWN,
}


def load_text(options: CompileOptions, chat: Chat | None = None) -> tuple[str, InputFile]:
    """The calibration text and its identity; of conversations in the model's template. Raises
    UsageError for an unreadable file."""
    if options.calibration is not None and are_many(options):
        name, data = show(options.calibration.name), _joined(options.calibration, chat)
    elif options.calibration is None:
        name = "calibration.txt"
        data = (resources.files("gemmake") / "data" / name).read_bytes()
    else:
        name = show(options.calibration.name)
        try:
            read = read_small(options.calibration, MAX_TEXT)
        except OSError as error:
            raise UsageError(f"--calibration {name}: {error.strerror}; name a text file") from error
        if read is None:
            raise UsageError(f"--calibration {name}: larger than {MAX_TEXT} bytes; cut it")
        data = read
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--calibration {name}: not UTF-8 at byte {error.start}; convert the file"
        ) from error
    if not text.strip():
        raise UsageError(f"--calibration {name}: no text in it; name a text file")
    return text, InputFile(name, len(data), hashlib.sha256(data).hexdigest())


def are_many(options: CompileOptions) -> bool:
    """Whether the user gave texts one by one, which only a sparse cache takes."""
    path = options.calibration
    many = path is not None and (path.is_dir() or path.suffix.lower() in (".jsonl", ".ndjson"))
    return many and options.sparse


def _joined(path: Path, chat: Chat | None) -> bytes:
    """All of the user's texts behind each other, up to MAX_TEXT bytes."""
    from gemmake.kvmask import texts, window  # big tables of words

    render = None if chat is None else chat.render
    found = [
        one.text if one.messages is None else window.rendered(one.messages, render)
        for one in texts.read(path)
    ]
    joined = "\n\n".join(found)
    return joined.encode()[:MAX_TEXT].decode("utf-8", "ignore").encode()  # no half of a character


class Calibrator:
    """Makes error feedback for one layer after the other. A context manager: it has a work folder.

    Call `prepare` when a layer begins, `feedback` for its tensors, and `keep` with their bytes.
    Holds the hidden states (float32 [tokens, hidden]) and one layer's feedback.
    """

    def __init__(self, state: State, host: Host, reporter: Reporter) -> None:
        self._state = state
        self._host = host
        self._reporter = reporter
        self._layer = -1
        self._feedback: dict[spec.Op, quant.Feedback] = {}
        self._bytes = bytearray()
        self._folder = tempfile.TemporaryDirectory(prefix="gemmake-")
        self._hidden: FloatRows = np.zeros((0, state.model.spec.hidden), np.float32)
        self._window = 0

    def __enter__(self) -> Calibrator:
        try:
            self._reporter.start("reading the calibration text", 1)
            with self._host.clock.timed("calibrate"):
                folder = Path(self._folder.name)
                self._hidden, self._window = begin(self._state, self._host, folder)
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._folder.cleanup()

    @property
    def units(self) -> int:
        """Work of calibrating a weight of a layer, in units of its search."""
        return self._windows * (MEASURE_UNITS + FORWARD_UNITS)

    def prepare(self, layer: int) -> None:
        """Advance to a layer: finish the one before and measure what this one sees."""
        with self._host.clock.timed("calibrate"):
            if self._layer >= 0:
                self._finish_layer()
            self._layer = layer
            self._feedback = {}  # before the next is made: one layer's at a time
            self._feedback = self._measure(layer)

    def feedback(self, tensor: StreamTensor) -> quant.Feedback | None:
        """Error feedback for a tensor of the layer; None where it is not a matrix of it."""
        if tensor.record.layer != self._layer:
            return None
        step = STEP_OF_ROLE.get(tensor.record.role)
        return self._feedback[step] if step is not None else None

    def keep(self, chunk: Chunk) -> None:
        """Remember the packed bytes of the layer, gaps included."""
        if chunk.tensor.record.layer != self._layer:
            return
        start = self._state.stream.of_layer(self._layer)[0].record.offset
        gap = chunk.tensor.record.offset - start - len(self._bytes)
        if gap > 0:
            self._bytes += bytes(gap)
        self._bytes += chunk.data

    @property
    def _windows(self) -> int:
        return len(self._hidden) // max(1, self._window)

    def _finish_layer(self) -> None:
        """Make the next layer's hidden states with the weights as they were stored."""
        options = replace(self._state.options, context=self._window, chunk=CHUNK)
        self._run(options, bytes(self._bytes), None, FORWARD_UNITS)
        self._bytes.clear()

    def _measure(self, layer: int) -> dict[spec.Op, quant.Feedback]:
        host = self._host
        options = in_float(self._state, self._window)
        hessians: dict[int, quant.F64] = {}

        def capture(_layer: int, step: int, x: FloatRows) -> None:
            if step not in hessians:
                hessians[step] = quant.new_hessian(x.shape[1])
            quant.hessian_add(hessians[step], x, threads=host.threads, flags=host.flags)

        before = self._hidden.copy()
        self._run(options, None, capture, MEASURE_UNITS)
        self._hidden = before
        return {
            spec.Op(step): quant.gptq_prepare(
                hessians.pop(step), threads=host.threads, flags=host.flags
            )
            for step in sorted(hessians)
        }

    def _run(
        self, options: CompileOptions, weights: bytes | None, capture: Capture | None, units: int
    ) -> None:
        """Run the layer over all windows; the hidden states change in place."""
        host, layer = self._host, self._layer
        small = images.one_layer(self._state, layer, options)
        work = units * layer_weights(self._state, layer)
        with (
            images.written(small, Path(self._folder.name), host, weights) as path,
            Engine(path, min(host.threads, spec.MAX_THREADS), host.baseline) as engine,
        ):
            for first in range(0, len(self._hidden), self._window):
                engine.run_hidden(self._hidden[first : first + self._window], CHUNK, capture)
                self._reporter.advance(work)


def begin(state: State, host: Host, folder: Path) -> tuple[FloatRows, int]:
    """The hidden states of all windows of the text [tokens, hidden], and the tokens of a window.

    Each window starts with bos where raw text does. `folder` is a work folder.
    """
    small = images.tokenizer_only(state, len(state.text.encode()))
    with images.written(small, folder, host) as path, Engine(path, 1, host.baseline) as engine:
        many = are_many(state.options)  # conversations among them have marks
        ids = encode(state.text, engine.encode) if many else engine.encode(state.text)
    info = state.model.spec
    turns = info.generation
    bos = [turns.bos_id] if turns.add_bos and turns.bos_id is not None else []
    window = max(spec.KV_BLOCK, min(WINDOW, info.trained_context) // 32 * 32)
    tokens = [token for one in cut(ids, window, bos) for token in one]
    return embed(state, tokens, host), window


def cut(ids: Sequence[int], window: int, bos: list[int]) -> list[list[int]]:
    """Up to WINDOWS windows, evenly spread over the text, each starting with bos.

    Raises CheckpointError for a text shorter than a window.
    """
    step = window - len(bos)
    if len(ids) < step:
        raise CheckpointError(
            f"calibration text: {len(ids)} tokens, at least {step} are needed; "
            "give a longer text with --calibration"
        )
    count = min(WINDOWS, len(ids) // step)
    spare = len(ids) - step
    starts = [i * spare // max(1, count - 1) for i in range(count)]
    return [bos + list(ids[start : start + step]) for start in starts]


def in_float(state: State, window: int) -> CompileOptions:
    """Options of an image that runs the checkpoint's own weights over a window."""
    return replace(
        state.options,
        profile=Profile.STANDARD,
        quantization=Quantization.NONE,
        kv_type=KvType.DENSE,
        kv_values=KvValues.INT8,  # 4 bits are of an int8 cache
        kv_keys=KvKeys.INT8,
        context=window,
        chunk=CHUNK,
        statistics=None,
        save_statistics=None,
    )


def layer_weights(state: State, layer: int) -> int:
    """Weights of a layer in the checkpoint."""
    return sum(s.rows * s.cols for t in state.stream.of_layer(layer) for s in t.sources)


def embed(state: State, ids: Sequence[int], host: Host) -> FloatRows:
    """Hidden states that the engine would start from: stored embedding rows, scaled."""
    model = state.model
    source = model.tensors[MODEL_LAYER, Role.HEAD if model.spec.tied else Role.EMBED]
    unique = sorted(set(ids))
    rows = np.concatenate([source.read(i, 1) for i in unique])
    if layout.table_format(state.options) is spec.Format.Q8_ROWS:
        found = quant.search_q8_rows(rows, threads=host.threads, flags=host.flags)
        rows = quant.dequantise(found)
    place = {token: i for i, token in enumerate(unique)}
    picked = rows[[place[token] for token in ids]]
    return np.ascontiguousarray(picked * np.float32(model.spec.embed_scale), dtype=np.float32)
