"""Calibration: what the layers see, from the engine's own forward over a small text.

Layer by layer: the layer runs in float32 over the hidden states, the inputs of its products are
summed into Hessians, its weights are quantised against them, and the quantised layer makes the
hidden states of the next one. Hessians are made, used and dropped; nothing comes from torch or
BLAS, so the bytes follow from checkpoint and text alone (NUMERICS C1).
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np

from gemmake.emit import Emission, Tally, emit_tensor
from gemmake.engine import Capture, Engine
from gemmake.errors import CheckpointError, UsageError
from gemmake.model import MODEL_LAYER, FloatRows, InputFile, Model, Role, TensorRef, TokenizerSource
from gemmake.options import CompileOptions, KvType, Quantization
from gemmake.passes import layout, quant
from gemmake.passes.layout import StreamTensor
from gemmake.passes.tokens import compile_tokenizer
from gemmake.progress import Reporter
from gemmake.state import State
from gemrun.format import assemble, spec, writer

WINDOW = 512  # tokens of one forward
WINDOWS = 24
CHUNK = 128  # tokens of a prefill step; a multiple of 32, so that sums do not depend on it
TABLE_ROWS = 32  # vocabulary of the one-layer images

#: Which product's inputs a matrix multiplies: the step at which the engine shows them.
STEP_OF_ROLE: Mapping[int, spec.Op] = {
    Role.Q: spec.Op.QKV,
    Role.K: spec.Op.QKV,
    Role.V: spec.Op.QKV,
    Role.O: spec.Op.O,
    Role.GATE_UP: spec.Op.GATE_UP,
    Role.DOWN: spec.Op.DOWN,
}


def load_text(options: CompileOptions) -> tuple[str, InputFile]:
    """The calibration text and its identity. Raises UsageError for an unreadable file."""
    if options.calibration is None:
        name = "calibration.txt"
        data = (resources.files("gemmake") / "data" / name).read_bytes()
    else:
        name = options.calibration.name
        try:
            data = options.calibration.read_bytes()
        except OSError as error:
            raise UsageError(f"--calibration {name}: {error.strerror}; name a text file") from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--calibration {name}: not UTF-8 at byte {error.start}; convert the file"
        ) from error
    if not text.strip():
        raise UsageError(f"--calibration {name}: no text in it; name a text file")
    return text, InputFile(name, len(data), hashlib.sha256(data).hexdigest())


class Calibrator:
    """Hands out error feedback for the tensors of the stream, in their order.

    Call `feedback` when a tensor begins and `keep` with its bytes; the layers advance by
    themselves. Holds the hidden states (float32 [tokens, hidden]) and one layer's Hessians.
    """

    def __init__(self, state: State, text: str, threads: int, reporter: Reporter) -> None:
        self._state = state
        self._threads = threads
        self._layer = -1
        self._feedback: dict[spec.Op, quant.Feedback] = {}
        self._bytes = bytearray()
        self._folder = tempfile.TemporaryDirectory(prefix="gemmake-")
        reporter.start("reading calibration text", 1)
        ids, self._window = self._encode(text)
        self._hidden = _embed(state, ids)

    def feedback(self, tensor: StreamTensor) -> quant.Feedback | None:
        """Error feedback for a tensor; None where it is not an int4 matrix of a layer."""
        layer = tensor.record.layer
        if layer >= 0 and layer != self._layer:
            self._finish_layer()
            self._layer = layer
            self._feedback = self._measure(layer)
        step = STEP_OF_ROLE.get(tensor.record.role)
        return self._feedback[step] if step is not None else None

    def keep(self, tensor: StreamTensor, chunk: bytes) -> None:
        """Remember the packed bytes of the current layer, gaps included."""
        if tensor.record.layer != self._layer:
            return
        start = self._state.stream.of_layer(self._layer)[0].record.offset
        gap = tensor.record.offset - start - len(self._bytes)
        if gap > 0:
            self._bytes += bytes(gap)
        self._bytes += chunk

    def _finish_layer(self) -> None:
        """Make the next layer's hidden states with the weights as they were stored."""
        if self._layer < 0:
            return
        options = replace(self._state.options, context=self._window, chunk=CHUNK)
        image = self._image(self._layer, options, bytes(self._bytes))
        self._run(image, None)
        self._bytes.clear()

    def _measure(self, layer: int) -> dict[spec.Op, quant.Feedback]:
        options = replace(
            self._state.options,
            quantization=Quantization.NONE,
            kv_type=KvType.DENSE,
            context=self._window,
            chunk=CHUNK,
        )
        image = self._image(layer, options, None)
        hessians: dict[int, quant.F64] = {}

        def capture(_layer: int, step: int, x: FloatRows) -> None:
            if step not in hessians:
                hessians[step] = quant.new_hessian(x.shape[1])
            quant.hessian_add(hessians[step], x, threads=self._threads)

        keep = self._hidden.copy()
        self._run(image, capture)
        self._hidden = keep
        result = {}
        for step in sorted(hessians):
            result[spec.Op(step)] = quant.gptq_prepare(hessians.pop(step), threads=self._threads)
        return result

    def _run(self, image: Path, capture: Capture | None) -> None:
        """Run a one-layer image over all windows; the hidden states change in place."""
        with Engine(image, min(self._threads, spec.MAX_THREADS)) as engine:
            for first in range(0, len(self._hidden), self._window):
                engine.run_hidden(self._hidden[first : first + self._window], CHUNK, capture)

    def _image(self, layer: int, options: CompileOptions, weights: bytes | None) -> Path:
        state = _one_layer(self._state, layer, options)
        path = Path(self._folder.name) / "layer.gembin"
        _write_image(state, path, weights, self._threads)
        return path

    def _encode(self, text: str) -> tuple[list[int], int]:
        """Token ids of whole windows, and the window: each starts with bos where raw text does."""
        state = _tokenizer_only(self._state, len(text.encode()))
        path = Path(self._folder.name) / "tokenizer.gembin"
        _write_image(state, path, None, self._threads)
        with Engine(path, 1) as engine:
            ids = engine.encode(text)
        generation = self._state.model.spec.generation
        bos = [generation.bos_id] if generation.add_bos and generation.bos_id is not None else []
        window = min(WINDOW, self._state.model.spec.trained_context) // 32 * 32
        step = window - len(bos)
        if len(ids) < step:
            raise CheckpointError(
                f"calibration text: {len(ids)} tokens, at least {step} are needed; "
                "give a longer text with --calibration"
            )
        count = min(WINDOWS, len(ids) // step)
        windows = [bos + ids[i * step : (i + 1) * step] for i in range(count)]
        return [token for one in windows for token in one], window


def _embed(state: State, ids: list[int]) -> FloatRows:
    """Hidden states that the engine would start from: stored embedding rows, scaled."""
    model = state.model
    key = (MODEL_LAYER, Role.HEAD if model.spec.tied else Role.EMBED)
    source = model.tensors[key]
    unique = sorted(set(ids))
    rows = np.concatenate([source.read(i, 1) for i in unique])
    if layout.table_format(state.options) is spec.Format.Q8_ROWS:
        rows = quant.dequantise(quant.search_q8_rows(rows))
    place = {token: i for i, token in enumerate(unique)}
    picked = rows[[place[token] for token in ids]]
    return np.ascontiguousarray(picked * np.float32(model.spec.embed_scale), dtype=np.float32)


# ---- small images ----
def _zeros(role: Role, rows: int, cols: int) -> TensorRef:
    def read(_first: int, count: int) -> FloatRows:
        return np.zeros((count, cols), np.float32)

    return TensorRef(role, MODEL_LAYER, role.name.lower(), rows, cols, "F32", read)


def _tables(rows: int, hidden: int) -> dict[tuple[int, Role], TensorRef]:
    return {
        (MODEL_LAYER, Role.FINAL_NORM): _zeros(Role.FINAL_NORM, 1, hidden),
        (MODEL_LAYER, Role.HEAD): _zeros(Role.HEAD, rows, hidden),
    }


def _one_layer(state: State, layer: int, options: CompileOptions) -> State:
    """The state of a model with only this layer, and tables of zeros."""
    model = state.model
    chosen = replace(model.spec.layers[layer], rope=0)
    info = replace(
        model.spec,
        layers=(chosen,),
        ropes=(model.spec.ropes[model.spec.layers[layer].rope],),
        vocab_rows=TABLE_ROWS,
        tied=True,
        final_softcap=None,
        generation=replace(model.spec.generation, stop_ids=(), bos_id=None, add_bos=False),
    )
    tensors = {
        (0, role): replace(ref, layer=0)
        for (index, role), ref in model.tensors.items()
        if index == layer
    }
    tensors.update(_tables(TABLE_ROWS, info.hidden))
    small = Model(info, tensors, _TINY_TOKENIZER)
    return _planned(
        replace(
            state,
            model=small,
            options=options,
            tokn=compile_tokenizer(_TINY_TOKENIZER, TABLE_ROWS, info.generation),
        )
    )


def _tokenizer_only(state: State, text_bytes: int) -> State:
    """The state of a model that can do nothing but encode text: one tiny layer of zeros.

    Its context is chosen so that the tokenizer's scratch is planned for the text.
    """
    info = state.model.spec
    hidden, layer = (
        32,
        replace(
            info.layers[0],
            heads=1,
            kv_heads=1,
            head_dim=32,
            ffn=32,
            rope=0,
            qk_norm=False,
            qkv_bias=False,
        ),
    )
    rope = replace(info.ropes[0], dims=32, kind="default")
    small = replace(info, hidden=hidden, layers=(layer,), ropes=(rope,), tied=True)
    roles = {
        Role.ATTN_NORM: 1,
        Role.Q: 32,
        Role.K: 32,
        Role.V: 32,
        Role.O: 32,
        Role.FFN_NORM: 1,
        Role.POST_ATTN_NORM: 1,
        Role.POST_FFN_NORM: 1,
        Role.GATE: 32,
        Role.UP: 32,
        Role.DOWN: 32,
    }
    if layer.block == 0:
        del roles[Role.POST_ATTN_NORM], roles[Role.POST_FFN_NORM]
    tensors = {
        (0, role): replace(_zeros(role, rows, hidden), layer=0) for role, rows in roles.items()
    }
    tensors.update(_tables(info.vocab_rows, hidden))
    options = replace(state.options, context=_context_for(text_bytes), chunk=1)
    model = replace(state.model, spec=small, tensors=tensors)
    return _planned(replace(state, model=model, options=options))


def _context_for(text_bytes: int) -> int:
    context = max(64, text_bytes // 16 + 1)  # sizes.text_limit grows by 16 bytes a position
    if context > spec.MAX_CONTEXT:
        raise UsageError(
            f"--calibration: the text has {text_bytes} bytes, at most "
            f"{16 * spec.MAX_CONTEXT} are used; cut it"
        )
    return context


def _planned(state: State) -> State:
    """Layout and memory plan of a small image; no budget, no template."""
    from gemmake.pipeline import lay_out, plan_memory

    return plan_memory(lay_out(replace(state, tmpl=None)))


def _write_image(state: State, path: Path, layer_bytes: bytes | None, threads: int) -> None:
    """Write a small artifact; `layer_bytes` are the packed tensors of its only layer, if made."""
    from gemmake.pipeline import manifest_of, records_of

    text = manifest_of(state, {}, None)
    assembled = assemble.assemble(replace(records_of(state, 0, 1), manifest=text))
    emission = Emission(None, threads)
    with writer.ArtifactWriter(path, assembled.header, assembled.parts) as out:
        position = 0
        for tensor in state.stream.tensors:
            out.write_weights(bytes(tensor.record.offset - position))
            position = tensor.end
            if layer_bytes is not None and tensor.record.layer == 0:
                start = tensor.record.offset
                out.write_weights(layer_bytes[start : tensor.end])
                continue
            for chunk in emit_tensor(tensor, emission, Tally(), lambda _count: None):
                out.write_weights(chunk)
        out.finish()


_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
#: A vocabulary for images that are never given text.
_TINY_TOKENIZER = TokenizerSource(
    {
        "model": {"type": "BPE", "vocab": {chr(97 + i): i for i in range(26)}, "merges": []},
        "pre_tokenizer": _BYTE_LEVEL,
        "decoder": _BYTE_LEVEL,
        "added_tokens": [],
    }
)
