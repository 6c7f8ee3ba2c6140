"""Small artifacts that the compiler makes for itself: one layer alone, or a tokenizer alone.

The engine opens them like any other; they exist while a `with` block runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from gemmake.emit import Host, Tally, emit
from gemmake.errors import OutputError, UsageError
from gemmake.model import MODEL_LAYER, Block, FloatRows, Model, Role, TensorRef, TokenizerSource
from gemmake.options import CompileOptions, Offload, Profile
from gemmake.passes.tokens import compile_tokenizer
from gemmake.planning import lay_out, manifest_of, plan_memory, records_of
from gemmake.state import State
from gemrun.format import assemble, spec, writer

TABLE_ROWS = 32  # vocabulary of the one-layer images

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


def one_layer(state: State, layer: int, options: CompileOptions, kv_group: int = 0) -> State:
    """The state of a model with only this layer, and tables of zeros.

    `kv_group` replaces the layer's group of an int8 cache where it is not 0.
    """
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
    tokn = compile_tokenizer(_TINY_TOKENIZER, TABLE_ROWS, info.generation)
    groups = (kv_group,) if kv_group else state.kv_groups[layer : layer + 1]
    small = Model(info, tensors, _TINY_TOKENIZER)
    return _planned(replace(state, model=small, options=options, tokn=tokn, kv_groups=groups))


def tokenizer_only(state: State, text_bytes: int) -> State:
    """The state of a model that can do nothing but encode text: one tiny layer of zeros.

    Its context is chosen so that the tokenizer's scratch is planned for the text. Raises
    UsageError for a text beyond the largest context.
    """
    info = state.model.spec
    layer = replace(
        info.layers[0],
        heads=1,
        kv_heads=1,
        head_dim=32,
        ffn=32,
        rope=0,
        block=Block.PRE,
        qk_norm=False,
        qkv_bias=False,
    )
    rope = replace(info.ropes[0], dims=32, kind="default")
    small = replace(info, hidden=32, layers=(layer,), ropes=(rope,), tied=True)
    matrices = (Role.Q, Role.K, Role.V, Role.O, Role.GATE, Role.UP, Role.DOWN)
    rows = dict.fromkeys(matrices, 32) | {Role.ATTN_NORM: 1, Role.FFN_NORM: 1}
    tensors = {(0, role): replace(_zeros(role, n, 32), layer=0) for role, n in rows.items()}
    tensors.update(_tables(info.vocab_rows, 32))
    options = replace(state.options, context=_context_for(text_bytes), chunk=1)
    return _planned(
        replace(
            state,
            model=replace(state.model, spec=small, tensors=tensors),
            options=options,
            kv_groups=(),
        )
    )


@contextlib.contextmanager
def written(
    state: State, folder: Path, host: Host, layer_bytes: bytes | None = None
) -> Iterator[Path]:
    """Write a small artifact for the length of the block; yields its path.

    `layer_bytes` are the packed tensors of its only layer where they exist already. Raises
    OutputError when the work folder has no room.
    """
    text = manifest_of(state, {})
    assembled = assemble.assemble(records_of(state, text, tests=1))
    try:
        with writer.ArtifactWriter(
            folder / "image.gembin", assembled.header, assembled.parts
        ) as out:
            _write_weights(state, out, host, layer_bytes)
            out.seal()
            yield Path(out.partial)
    except writer.WriteError as error:
        raise OutputError(f"work folder: {error}; set TMPDIR to a folder with more room") from error


def _write_weights(
    state: State, out: writer.ArtifactWriter, host: Host, layer_bytes: bytes | None
) -> None:
    position = 0
    given = [t for t in state.stream.tensors if layer_bytes is not None and t.record.layer == 0]
    if layer_bytes is not None:
        out.write_weights(layer_bytes)
        position = given[-1].end
    tensors = [t for t in state.stream.tensors if t not in given]
    tallies = {tensor.label: Tally() for tensor in tensors}
    for chunk in emit(tensors, lambda _tensor: None, host, tallies):
        start = chunk.tensor.record.offset
        if position < start:
            out.write_weights(bytes(start - position))
        position = max(position, start) + len(chunk.data)
        out.write_weights(chunk.data)


def _planned(state: State) -> State:
    """Layout and memory plan of a small image, all of whose weights stay in memory; no budget,
    template, pinned prompt or provenance."""
    options = replace(state.options, profile=Profile.STANDARD, offload=Offload.NONE)
    return plan_memory(
        lay_out(
            replace(state, options=options, tmpl=None, notes=(), inputs=(), text="", pinned=None)
        )
    )


def _context_for(text_bytes: int) -> int:
    context = max(64, text_bytes // 16 + 1)  # sizes.text_limit grows by 16 bytes a position
    if context > spec.MAX_CONTEXT:
        raise UsageError(
            f"--calibration: the text has {text_bytes} bytes, at most "
            f"{16 * spec.MAX_CONTEXT} are used; cut it"
        )
    return context


def _zeros(role: Role, rows: int, cols: int) -> TensorRef:
    def read(_first: int, count: int) -> FloatRows:
        return np.zeros((count, cols), np.float32)

    return TensorRef(role, MODEL_LAYER, role.name.lower(), rows, cols, "F32", read)


def _tables(rows: int, hidden: int) -> dict[tuple[int, Role], TensorRef]:
    return {
        (MODEL_LAYER, Role.FINAL_NORM): _zeros(Role.FINAL_NORM, 1, hidden),
        (MODEL_LAYER, Role.HEAD): _zeros(Role.HEAD, rows, hidden),
    }
