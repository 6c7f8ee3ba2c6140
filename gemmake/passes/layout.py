"""layout: the records of an artifact and the place of every tensor in the weight stream.

Tensors lie in execution order, each on 256 bytes, so that a token reads the weights as one
sequential stream (DESIGN 2.2). Offsets here count from the start of WHOT; `relocated` moves them
to file offsets once the sizes of the sections before it are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gemmake.model import MODEL_LAYER, NORM_ROLES, LayerSpec, Model, ModelSpec, Role, TensorRef
from gemmake.options import CompileOptions, Int4Format, KvType, Quantization
from gemrun.format import sizes, spec

VECTOR_ROLES = NORM_ROLES | {Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS}

#: Order of a layer's tensors in the stream; those that a family lacks are left out.
LAYER_ORDER = (
    Role.ATTN_NORM, Role.Q, Role.K, Role.V, Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS,
    Role.Q_NORM, Role.K_NORM, Role.O, Role.POST_ATTN_NORM,
    Role.FFN_NORM, Role.GATE, Role.DOWN, Role.POST_FFN_NORM,
)  # fmt: skip


@dataclass(frozen=True)
class StreamTensor:
    """A tensor of the artifact and the checkpoint tensors it is made from.

    `sources` holds two for GATE_UP (gate, up), else one. `record.offset` counts from WHOT.
    """

    record: spec.Tensor
    format: spec.Format
    sources: tuple[TensorRef, ...]

    @property
    def label(self) -> str:
        """Names of the sources, for messages and the manifest."""
        return "+".join(s.name for s in self.sources)


@dataclass(frozen=True)
class Stream:
    """The weight stream: tensors in order, their segments, and its size in bytes."""

    tensors: tuple[StreamTensor, ...]
    segments: tuple[spec.Segment, ...]
    size: int

    def relocated(self, start: int) -> tuple[spec.Tensor, ...]:
        """TENS records with file offsets, for a WHOT section at `start`."""
        return tuple(_moved(t.record, start) for t in self.tensors)

    def records(self) -> tuple[spec.Tensor, ...]:
        """TENS records with offsets from the start of WHOT."""
        return tuple(t.record for t in self.tensors)


def _moved(record: spec.Tensor, start: int) -> spec.Tensor:
    second = record.second_offset + start if record.second_offset else 0
    return replace(record, offset=record.offset + start, second_offset=second)


def body_format(options: CompileOptions) -> spec.Format:
    """Storage of the matrices of the layers."""
    if options.quantization is Quantization.NONE:
        return spec.Format.F32
    if options.quantization is Quantization.INT8:
        return spec.Format.Q8
    if options.int4_format is Int4Format.Q4RAW:
        return spec.Format.Q4RAW_F16
    return spec.Format.Q4H


def table_format(options: CompileOptions) -> spec.Format:
    """Storage of embedding and head."""
    none = options.quantization is Quantization.NONE
    return spec.Format.F32 if none else spec.Format.Q8_ROWS


def kv_type(options: CompileOptions) -> spec.KvType:
    """Storage of the KV cache: dense is float32 beside float weights and half beside others."""
    if options.kv_type is KvType.INT8:
        return spec.KvType.INT8
    none = options.quantization is Quantization.NONE
    return spec.KvType.F32 if none else spec.KvType.F16


def plan_stream(model: Model, options: CompileOptions) -> Stream:
    """Place every tensor of a model (norms folded, ties resolved)."""
    placer = _Placer()
    body, table = body_format(options), table_format(options)
    if not model.spec.tied:
        placer.add(Role.EMBED, MODEL_LAYER, table, (model.tensors[MODEL_LAYER, Role.EMBED],), None)
    for index, layer in enumerate(model.spec.layers):
        for role, sources in _layer_sources(model, index):
            format_ = spec.Format.VECTOR if role in VECTOR_ROLES else body
            placer.add(role, index, format_, sources, layer)
    norm = (model.tensors[MODEL_LAYER, Role.FINAL_NORM],)
    placer.add(Role.FINAL_NORM, MODEL_LAYER, spec.Format.VECTOR, norm, None)
    placer.add(Role.HEAD, MODEL_LAYER, table, (model.tensors[MODEL_LAYER, Role.HEAD],), None)
    return Stream(tuple(placer.tensors), tuple(placer.segments), placer.end)


def _layer_sources(model: Model, layer: int) -> Iterator[tuple[Role, tuple[TensorRef, ...]]]:
    for role in LAYER_ORDER:
        ref = model.tensors.get((layer, role))
        if ref is None:
            continue
        if role is Role.GATE:
            yield Role.GATE_UP, (ref, model.tensors[layer, Role.UP])
        else:
            yield role, (ref,)


def _slabs(role: Role, layer: LayerSpec | None) -> int:
    """Heads that a tensor's slabs cover."""
    if layer is None:
        return 0
    if role in (Role.Q, Role.O):
        return layer.heads
    return layer.kv_heads if role in (Role.K, Role.V) else 0


class _Placer:
    """Appends tensors to the stream. The only mutable helper, local to `plan_stream`."""

    def __init__(self) -> None:
        self.tensors: list[StreamTensor] = []
        self.segments: list[spec.Segment] = []
        self.end = 0

    def add(
        self,
        role: Role,
        layer: int,
        format_: spec.Format,
        sources: tuple[TensorRef, ...],
        layer_spec: LayerSpec | None,
    ) -> None:
        """Place one tensor after the last one."""
        rows, cols = sources[0].rows, sources[0].cols
        vector = format_ is spec.Format.VECTOR
        groups = 0 if vector else sizes.groups_of(cols)
        segment = spec.Segment(format=format_, first_group=0, group_count=groups)
        record = spec.Tensor(
            role=int(role),
            layer=layer,
            seg_first=len(self.segments),
            seg_count=1,
            rows=1 if vector else rows,
            cols=cols,
            rows_padded=1 if vector else sizes.pad(rows, spec.PANEL),
            cols_padded=cols if vector else sizes.pad(cols, spec.GROUP),
            slab_count=_slabs(role, layer_spec),
            parts=2 if role is Role.GATE_UP else 1,
        )
        size, second = sizes.tensor_size(record, [segment])
        offset = sizes.pad(self.end, spec.ALIGN)
        second_offset = sizes.pad(offset + size, spec.ALIGN) if second else 0
        self.end = second_offset + second if second else offset + size
        placed = replace(
            record, offset=offset, size=size, second_offset=second_offset, second_size=second
        )
        self.segments.append(segment)
        self.tensors.append(StreamTensor(placed, format_, sources))


def plan_layers(
    model_spec: ModelSpec, options: CompileOptions, stream: Stream
) -> tuple[spec.Layer, ...]:
    """LAYR records: sizes, KV ring of each layer, and its run of tensors."""
    kind = kv_type(options)
    offset = 0
    layers = []
    for index, layer in enumerate(model_spec.layers):
        record = _layer_record(layer, index, kind, options.context, stream, offset)
        offset += record.kv_size
        layers.append(record)
    return tuple(layers)


def _layer_record(
    layer: LayerSpec, index: int, kind: spec.KvType, context: int, stream: Stream, offset: int
) -> spec.Layer:
    own = [i for i, t in enumerate(stream.tensors) if t.record.layer == index]
    flags = spec.LayerFlag(0)
    flags |= spec.LayerFlag.QK_NORM if layer.qk_norm else spec.LayerFlag(0)
    flags |= spec.LayerFlag.QKV_BIAS if layer.qkv_bias else spec.LayerFlag(0)
    capped = layer.attn_softcap is not None
    flags |= spec.LayerFlag.ATTN_SOFTCAP if capped else spec.LayerFlag(0)
    record = spec.Layer(
        kind=spec.LAYER_DENSE,
        flags=int(flags),
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        ffn=layer.ffn,
        rope=layer.rope,
        window=layer.window,
        block=int(layer.block),
        act=int(layer.act),
        score_scale=layer.score_scale,
        attn_softcap=layer.attn_softcap or 0.0,
        kv_source=index,
        kv_group=kv_group(layer) if kind is spec.KvType.INT8 else 0,
        kv_offset=offset,
        kv_blocks=sizes.kv_blocks(context, layer.window),
        tens_first=own[0],
        tens_count=len(own),
    )
    return replace(record, kv_size=sizes.kv_layer_size(kind, record))


def kv_group(layer: LayerSpec) -> int:
    """Inputs that share a scale of the int8 cache: biased keys need small groups (NUMERICS K1)."""
    wanted = (32, 64) if layer.qkv_bias else (64, 32)
    for group in wanted:
        if layer.head_dim % group == 0:
            return group
    return layer.head_dim


def weight_bytes(stream: Stream, layers: Sequence[spec.Layer]) -> list[int]:
    """Bytes of weights of each layer."""
    totals = [0] * len(layers)
    for tensor in stream.tensors:
        if tensor.record.layer >= 0:
            totals[tensor.record.layer] += tensor.record.size
    return totals
