"""layout: the records of an artifact and the place of every tensor in the weight stream.

Tensors lie in execution order, each on 256 bytes, so that a token reads the weights as one
sequential stream (DESIGN 2.2). Offsets here count from the start of WHOT.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gemmake.model import MODEL_LAYER, NORM_ROLES, LayerSpec, Model, Role, TensorRef
from gemmake.options import CompileOptions, Int4Format, KvType, Quantization
from gemrun.format import assemble, sizes, spec

VECTOR_ROLES = NORM_ROLES | {Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS}

#: Order of a layer's tensors in the stream; those that a family lacks are left out.
LAYER_ORDER = (
    Role.ATTN_NORM, Role.Q, Role.K, Role.V, Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS,
    Role.Q_NORM, Role.K_NORM, Role.O, Role.POST_ATTN_NORM,
    Role.FFN_NORM, Role.GATE, Role.DOWN, Role.POST_FFN_NORM,
)  # fmt: skip

#: Of a layer's weights, up to which int4 keeps the value projection in 8 bits: 0.15 bits a weight.
MAX_VALUE_SHARE = 0.04


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

    @property
    def end(self) -> int:
        """First byte after the tensor, from the start of WHOT."""
        record = self.record
        second = record.second_offset + record.second_size
        return max(record.offset + record.size, second)


@dataclass(frozen=True)
class Stream:
    """The weight stream: tensors in order, their segments, and its size in bytes."""

    tensors: tuple[StreamTensor, ...]
    segments: tuple[spec.Segment, ...]
    size: int

    def records(self) -> tuple[spec.Tensor, ...]:
        """TENS records with offsets from the start of WHOT."""
        return tuple(t.record for t in self.tensors)

    def of_layer(self, layer: int) -> tuple[StreamTensor, ...]:
        """The tensors of one layer, in order."""
        return tuple(t for t in self.tensors if t.record.layer == layer)

    def index_of(self, role: Role) -> int:
        """Index of the model-wide tensor with this role; the head's for a tied embedding."""
        roles = [t.record.role for t in self.tensors]
        return roles.index(role) if role in roles else roles.index(Role.HEAD)


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
    if options.kv_type is not KvType.DENSE:
        return spec.KvType.INT8
    none = options.quantization is Quantization.NONE
    return spec.KvType.F32 if none else spec.KvType.F16


def plan_stream(model: Model, options: CompileOptions) -> Stream:
    """Place every tensor of a model (norms folded, ties resolved)."""
    wanted = list(_execution_order(model, options))
    segments = tuple(_segment(format_, sources[0].cols) for _, _, format_, sources in wanted)
    records = [
        _record(model, role, layer, format_, sources[0], index)
        for index, (role, layer, format_, sources) in enumerate(wanted)
    ]
    placed, size = assemble.place_tensors(records, segments)
    tensors = tuple(
        StreamTensor(record, format_, sources)
        for record, (_, _, format_, sources) in zip(placed, wanted, strict=True)
    )
    return Stream(tensors, segments, size)


_Wanted = tuple[Role, int, spec.Format, tuple[TensorRef, ...]]


def _execution_order(model: Model, options: CompileOptions) -> Iterator[_Wanted]:
    body, table = body_format(options), table_format(options)
    vector = spec.Format.VECTOR
    if not model.spec.tied:
        yield Role.EMBED, MODEL_LAYER, table, (model.tensors[MODEL_LAYER, Role.EMBED],)
    for index in range(len(model.spec.layers)):
        for role, sources in _layer_sources(model, index):
            wide = role is Role.V and body is spec.Format.Q4H and _values_are_few(model, index)
            format_ = vector if role in VECTOR_ROLES else spec.Format.Q8 if wide else body
            yield role, index, format_, sources
    norm = (model.tensors[MODEL_LAYER, Role.FINAL_NORM],)
    yield Role.FINAL_NORM, MODEL_LAYER, vector, norm
    yield Role.HEAD, MODEL_LAYER, table, (model.tensors[MODEL_LAYER, Role.HEAD],)


def _values_are_few(model: Model, layer: int) -> bool:
    """Whether the value projection is a small part of a layer (grouped heads).

    Every head of a group reads its values, so their error counts several times: Gemma 3 270M loses
    1.3 % less perplexity with them in 8 bits, which are 0.6 % more bytes.
    """
    weights = {
        role: ref.rows * ref.cols
        for (index, role), ref in model.tensors.items()
        if index == layer and role not in VECTOR_ROLES
    }
    return weights[Role.V] <= MAX_VALUE_SHARE * sum(weights.values())


def _layer_sources(model: Model, layer: int) -> Iterator[tuple[Role, tuple[TensorRef, ...]]]:
    for role in LAYER_ORDER:
        ref = model.tensors.get((layer, role))
        if ref is None:
            continue
        if role is Role.GATE:
            yield Role.GATE_UP, (ref, model.tensors[layer, Role.UP])
        else:
            yield role, (ref,)


def _segment(format_: spec.Format, cols: int) -> spec.Segment:
    return spec.Segment(format=int(format_), first_group=0, group_count=sizes.groups_of(cols))


def _record(
    model: Model, role: Role, layer: int, format_: spec.Format, source: TensorRef, segment: int
) -> spec.Tensor:
    vector = format_ is spec.Format.VECTOR
    rows = 1 if vector else source.rows
    return spec.Tensor(
        role=int(role),
        layer=layer,
        seg_first=segment,
        seg_count=1,
        rows=rows,
        cols=source.cols,
        rows_padded=rows if vector else sizes.pad(rows, spec.PANEL),
        cols_padded=source.cols if vector else sizes.pad(source.cols, spec.GROUP),
        slab_count=_slabs(role, model.spec.layers[layer]) if layer >= 0 else 0,
        parts=2 if role is Role.GATE_UP else 1,
    )


def _slabs(role: Role, layer: LayerSpec) -> int:
    """Heads that a tensor's slabs cover."""
    if role in (Role.Q, Role.O):
        return layer.heads
    return layer.kv_heads if role in (Role.K, Role.V) else 0


def plan_conf(model: Model, options: CompileOptions, stream: Stream, threads: int) -> spec.Conf:
    """The CONF record."""
    info, generation = model.spec, model.spec.generation
    flags = spec.ConfFlag.TIED if info.tied else spec.ConfFlag(0)
    if info.final_softcap is not None:
        flags |= spec.ConfFlag.FINAL_SOFTCAP
    return spec.Conf(
        layer_count=len(info.layers),
        hidden=info.hidden,
        vocab_rows=info.vocab_rows,
        rope_count=len(info.ropes),
        context=options.context,
        trained_context=info.trained_context,
        chunk=min(options.chunk, options.context),
        threads=threads,
        kv_type=int(kv_type(options)),
        flags=int(flags),
        tens_embed=stream.index_of(Role.EMBED),
        tens_head=stream.index_of(Role.HEAD),
        tens_final_norm=stream.index_of(Role.FINAL_NORM),
        norm_eps=info.norm_eps,
        embed_scale=info.embed_scale,
        final_softcap=info.final_softcap or 0.0,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        text_limit=sizes.text_limit(options.context),
        family=spec.text_field(info.family, 16),
        name=spec.text_field(info.name, 64),
    )


def plan_layers(
    model: Model,
    options: CompileOptions,
    stream: Stream,
    conf: spec.Conf,
    kv_groups: Sequence[int] = (),
) -> tuple[spec.Layer, ...]:
    """LAYR records: sizes, KV ring of each layer, and its run of tensors.

    `kv_groups` are the layers' groups of an int8 cache; without them each layer's usual one.
    """
    groups = list(kv_groups) or [kv_group(layer) for layer in model.spec.layers]
    if kv_type(options) is not spec.KvType.INT8:
        groups = [0] * len(groups)
    bare = [
        _layer(layer, i, stream, group)
        for i, (layer, group) in enumerate(zip(model.spec.layers, groups, strict=True))
    ]
    return assemble.place_kv(conf, bare)


def kv_bytes(conf: spec.Conf, layers: Sequence[spec.Layer], kind: spec.KvType) -> int:
    """Bytes of the rings if every head kept all of its layer's window, in another type."""
    conf = replace(conf, kv_type=int(kind))
    grouped = kind is spec.KvType.INT8
    bare = [replace(la, kv_group=la.kv_group if grouped else 0) for la in layers]
    return sum(layer.kv_size for layer in assemble.place_kv(conf, bare))


def _layer(layer: LayerSpec, index: int, stream: Stream, group: int) -> spec.Layer:
    own = [i for i, t in enumerate(stream.tensors) if t.record.layer == index]
    flags = spec.LayerFlag(0)
    flags |= spec.LayerFlag.QK_NORM if layer.qk_norm else spec.LayerFlag(0)
    flags |= spec.LayerFlag.QKV_BIAS if layer.qkv_bias else spec.LayerFlag(0)
    capped = layer.attn_softcap is not None
    flags |= spec.LayerFlag.ATTN_SOFTCAP if capped else spec.LayerFlag(0)
    return spec.Layer(
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
        kv_group=group,
        tens_first=own[0],
        tens_count=len(own),
    )


def kv_candidates(layer: LayerSpec) -> tuple[int, ...]:
    """Groups that an int8 cache may have: inputs that share a scale (NUMERICS K1), ascending."""
    return tuple(g for g in sorted({32, 64, layer.head_dim}) if layer.head_dim % g == 0)


def kv_group(layer: LayerSpec) -> int:
    """The group where nothing was measured: biased keys need small ones."""
    allowed = kv_candidates(layer)
    return 64 if 64 in allowed and not layer.qkv_bias else allowed[0]


def weight_bytes(stream: Stream, layers: int) -> list[int]:
    """Bytes of weights of each layer."""
    totals = [0] * layers
    for tensor in stream.tensors:
        if tensor.record.layer >= 0:
            totals[tensor.record.layer] += tensor.record.size
    return totals


def plan_buffers(
    conf: spec.Conf, layers: Sequence[spec.Layer], stream: Stream
) -> tuple[tuple[spec.Buffer, int, spec.Op, spec.Op], ...]:
    """(kind, bytes, first step, last step) of every arena buffer."""
    wanted = sizes.buffer_sizes(conf, layers, stream.records(), stream.segments)
    wanted[spec.Buffer.HIDDEN] = sizes.rows_size(conf)
    return tuple((kind, size, *sizes.LIFETIMES[kind]) for kind, size in wanted.items())
