"""Every size of csrc/FORMAT.md section 4, from records alone: tensors, KV cache, arena, totals.

Python integers do not wrap; the C reader has its own checked arithmetic. Bytes unless said.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gemrun.format import spec
from gemrun.format.spec import (
    Buffer,
    Conf,
    Format,
    KvType,
    KvUnit,
    Layer,
    Op,
    Plan,
    Role,
    Segment,
    Tensor,
)

PAGE = 4096
STACK = 256 << 10  # of every thread but the caller's
ENGINE_FIXED = 64 << 10
#: What a process that runs `gemrun` takes beside the total until the engine looks at what is left:
#: program, C library, stack and kernel memory are 420 to 440 KB (x86-64, Linux 6.18, glibc), and
#: every processor that it ran on may hold 64 pages that its group is charged for and nobody uses
#: yet. tests/e2e/test_offload.py measures it again: the peak of a group less what is declared.
PROCESS = 1 << 20
PER_PAGE = 8  # bytes of the page tables
GROUP_UNIT = 64 << 10  # a limit is cut to whole pages, and no page is larger
FLOAT_FORMATS = frozenset({Format.F32, Format.F16})
BODY_FORMATS = frozenset({Format.Q4H, Format.Q4RAW_F16, Format.Q4RAW_BF16, Format.Q8})
TABLE_FORMATS = frozenset({Format.Q8_ROWS, Format.F32, Format.F16})  # embedding and head


def pad(n: int, a: int) -> int:
    """n rounded up to a multiple of a."""
    return (n + a - 1) // a * a


def groups_of(cols: int) -> int:
    """Quantisation groups of `cols` inputs."""
    return pad(cols, spec.GROUP) // spec.GROUP


# ---- tensors ----
def superblock_size(fmt: int, groups: int) -> int:
    """A superblock of 1..8 groups of a body format."""
    if fmt in (Format.Q4H, Format.Q4RAW_F16, Format.Q4RAW_BF16):
        return pad((256 + 32) * groups, spec.LINE)
    if fmt == Format.Q8:
        return pad((512 + 16) * groups, spec.LINE)
    raise ValueError(f"format {fmt} has no superblocks")


def segment_size(fmt: int, groups: int) -> int:
    """A run of groups: full superblocks, then a tight last one."""
    full, rest = divmod(groups, spec.SUPERBLOCK)
    size = full * superblock_size(fmt, spec.SUPERBLOCK)
    return size + (superblock_size(fmt, rest) if rest else 0)


def panel_size(cols: int, segments: Sequence[Segment]) -> int:
    """One panel of 16 rows. A Q8_ROWS panel is that of its data region."""
    fmt = segments[0].format
    if fmt in FLOAT_FORMATS:
        return pad(cols * spec.PANEL * (4 if fmt == Format.F32 else 2), spec.LINE)
    if fmt == Format.Q8_ROWS:
        return spec.LINE + 256 * groups_of(cols)
    return spec.LINE + sum(segment_size(s.format, s.group_count) for s in segments)


def tensor_size(tensor: Tensor, segments: Sequence[Segment]) -> tuple[int, int]:
    """(size, second size) of a tensor with these segments (its own, in order)."""
    if segments[0].format == Format.VECTOR:
        return pad(4 * tensor.cols, spec.LINE), 0
    panels = tensor.parts * (pad(tensor.rows, spec.PANEL) // spec.PANEL)
    second = 256 * groups_of(tensor.cols) if segments[0].format == Format.Q8_ROWS else 0
    return panels * panel_size(tensor.cols, segments), panels * second


def segments_of(tensor: Tensor, segments: Sequence[Segment]) -> Sequence[Segment]:
    """The segments of one tensor."""
    return segments[tensor.seg_first : tensor.seg_first + tensor.seg_count]


# ---- KV cache ----
def kv_element(kv_type: int) -> int:
    """Bytes of one value of K or V, scales apart."""
    return {KvType.F32: 4, KvType.F16: 2, KvType.INT8: 1}[KvType(kv_type)]


def kv_block_size(
    kv_type: int, head_dim: int, group: int, value4: bool = False, key4: bool = False
) -> int:
    """A ring block: 32 tokens of K and V of one kv head; value4, key4: which have 4 bits."""
    codes = head_dim * kv_element(kv_type)
    keys, values = (codes // 2 if narrow else codes for narrow in (key4, value4))
    scales = 2 * (head_dim // group) if kv_type == KvType.INT8 else 0
    return pad(spec.KV_BLOCK * (keys + values + 2 * scales), spec.LINE)


def kv_blocks(context: int, window: int) -> int:
    """Ring blocks of a layer: all positions, or the window and one block that is being filled."""
    every = pad(context, spec.KV_BLOCK) // spec.KV_BLOCK
    if window == 0:
        return every
    return min(pad(window, spec.KV_BLOCK) // spec.KV_BLOCK + 1, every)


def units_of(layer: Layer, units: Sequence[KvUnit]) -> Sequence[KvUnit]:
    """The units of one layer; none where there is no KVMK."""
    return units[layer.unit_first : layer.unit_first + layer.kv_heads] if units else ()


def unit_blocks(layer: Layer, sink: int, recent: int) -> int:
    """Blocks of a KV head's ring: all of the layer's, or a part and one that is being filled."""
    return sink + recent + 1 if recent > 0 else layer.kv_blocks


def kv_layer_blocks(layer: Layer, units: Sequence[KvUnit] = ()) -> int:
    """Blocks of all rings of one layer; `units` are all of KVMK, without them the ring is dense."""
    own = units_of(layer, units)
    return sum(u.blocks for u in own) if own else layer.kv_heads * layer.kv_blocks


def kv_layer_size(kv_type: int, layer: Layer, units: Sequence[KvUnit] = ()) -> int:
    """The rings of one layer, from its kv_blocks or its units. Bytes."""
    own = units_of(layer, units)
    if own:
        return sum(unit.blocks * unit_block_size(kv_type, layer, unit) for unit in own)
    return kv_layer_blocks(layer) * kv_block_size(kv_type, layer.head_dim, layer.kv_group)


def unit_block_size(kv_type: int, layer: Layer, unit: KvUnit) -> int:
    """A ring block of a unit. Bytes."""
    return kv_block_size(kv_type, layer.head_dim, layer.kv_group, unit.value4, unit.key4)


def unit_step(kv_type: int, layer: Layer, lines: bool) -> int:
    """Bytes that a unit's `first` counts: with spec.KV_4BIT (`lines`) a line, else a block."""
    return spec.LINE if lines else kv_block_size(kv_type, layer.head_dim, layer.kv_group)


def rings_size(conf: Conf, layers: Iterable[Layer], units: Sequence[KvUnit] = ()) -> int:
    """The rings of all layers; without `units` those in which every head keeps all. Bytes."""
    return sum(kv_layer_size(conf.kv_type, layer, units) for layer in layers)


def kv_size(conf: Conf, layers: Iterable[Layer], units: Sequence[KvUnit] = ()) -> int:
    """The KV cache as the header counts it, in whole pages. Bytes."""
    return pad(rings_size(conf, layers, units), PAGE)


def kv_layout_id(conf: Conf, layers: Sequence[Layer], units: Sequence[KvUnit] = ()) -> int:
    """CRC-32 of everything that decides where a token's K and V lie."""
    words = [conf.kv_type, conf.context, conf.layer_count]
    for layer in layers:
        words += [layer.kv_heads, layer.head_dim, layer.kv_group, layer.kv_blocks, layer.window]
    for unit in units:
        words += [unit.sink, unit.recent | unit.flags << 16]
    return zlib.crc32(struct.pack(f"<{len(words)}I", *words))


# ---- arena ----
LIFETIMES: dict[Buffer, tuple[Op, Op]] = {
    Buffer.X: (Op.EMBED, Op.HEAD),
    Buffer.XN: (Op.EMBED, Op.HEAD),
    Buffer.Q: (Op.QKV, Op.ATTN),
    Buffer.KV: (Op.QKV, Op.ATTN),
    Buffer.ATT: (Op.ATTN, Op.O),
    Buffer.SCORES: (Op.ATTN, Op.ATTN),
    Buffer.Y: (Op.O, Op.DOWN),
    Buffer.H: (Op.GATE_UP, Op.DOWN),
    Buffer.LOGITS: (Op.TOK, Op.SAMPLE),  # read between two calls
    Buffer.CAND: (Op.SAMPLE, Op.SAMPLE),
    Buffer.SEEN: (Op.SAMPLE, Op.SAMPLE),
    Buffer.IDS: (Op.TOK, Op.SAMPLE),
    Buffer.PROMPT: (Op.TOK, Op.SAMPLE),
    Buffer.TOK: (Op.TOK, Op.TOK),
    Buffer.HIDDEN: (Op.TOK, Op.SAMPLE),
}


def text_limit(context: int) -> int:
    """Bytes of text that the tokenizer scratch is planned for."""
    return 16 * context + 4096


def act_size(chunk: int, n: int, quantised: bool, floating: bool) -> int:
    """Activations of a chunk, n values a token, in the forms that their consumers read."""
    size = 0
    if quantised:
        line = pad(n, spec.GROUP)
        size += pad(chunk * line, spec.LINE)
        size += 2 * pad(4 * chunk * (line // spec.GROUP), spec.LINE)
    if floating:
        size += pad(4 * chunk * n, spec.LINE)
    return size


@dataclass(frozen=True)
class Forms:
    """Which forms of activations the matrices of some roles read."""

    quantised: bool
    floating: bool


def forms_of(tensors: Iterable[Tensor], segments: Sequence[Segment], roles: set[Role]) -> Forms:
    """The forms that all tensors of these roles read together."""
    kinds = {
        segments_of(t, segments)[0].format in FLOAT_FORMATS for t in tensors if t.role in roles
    }
    return Forms(quantised=False in kinds, floating=True in kinds)


def _query_size(conf: Conf, layers: Sequence[Layer], width: int) -> int:
    if conf.kv_type != KvType.INT8:
        return 4 * conf.chunk * width
    scales = max(la.heads * la.head_dim // la.kv_group for la in layers)
    return pad(conf.chunk * width, spec.LINE) + pad(4 * conf.chunk * scales, spec.LINE)


def _chunk_kv_size(conf: Conf, layer: Layer) -> int:
    rows = conf.chunk * layer.kv_heads
    if conf.kv_type != KvType.INT8:
        return 2 * pad(rows * layer.head_dim * kv_element(conf.kv_type), spec.LINE)
    scales = pad(2 * rows * (layer.head_dim // layer.kv_group), spec.LINE)
    return 2 * pad(rows * layer.head_dim, spec.LINE) + 2 * scales


def buffer_sizes(
    conf: Conf, layers: Sequence[Layer], tensors: Sequence[Tensor], segments: Sequence[Segment]
) -> dict[Buffer, int]:
    """The size of every arena buffer, padded to 64."""
    chunk, context = conf.chunk, conf.context
    vocab = pad(conf.vocab_rows, 32)
    width = max(la.heads * la.head_dim for la in layers)
    ffn = max(la.ffn for la in layers)
    xn = forms_of(tensors, segments, {Role.Q, Role.K, Role.V, Role.GATE_UP, Role.HEAD})
    att = forms_of(tensors, segments, {Role.O})
    down = forms_of(tensors, segments, {Role.DOWN})
    sizes = {
        Buffer.X: 4 * chunk * conf.hidden,
        Buffer.XN: act_size(chunk, conf.hidden, xn.quantised, xn.floating),
        Buffer.Q: _query_size(conf, layers, width),
        Buffer.KV: max(_chunk_kv_size(conf, la) for la in layers),
        Buffer.ATT: act_size(chunk, width, att.quantised, att.floating),
        Buffer.SCORES: spec.MAX_THREADS * 4 * context,
        Buffer.Y: 4 * chunk * conf.hidden,
        Buffer.H: act_size(chunk, ffn, down.quantised, down.floating),
        Buffer.LOGITS: 4 * vocab,
        Buffer.CAND: 4 * vocab,
        Buffer.SEEN: vocab // 8,
        Buffer.IDS: 4 * context,
        Buffer.PROMPT: 4 * (context + 1),
        Buffer.TOK: 32 * text_limit(context) + 65536,
        Buffer.HIDDEN: 4 * conf.hidden,
    }
    return {kind: pad(size, spec.LINE) for kind, size in sizes.items()}


def rows_size(conf: Conf) -> int:
    """The second size of HIDDEN: with rows for the tokens of a speculative step."""
    return pad(4 * spec.HIDDEN_ROWS * conf.hidden, spec.LINE)


def abi_of(conf: Conf, plans: Iterable[Plan], cold: bool = False) -> int:
    """The least engine ABI that reads it: 2 knows the second size of HIDDEN, 3 weights that do not
    all stay in memory."""
    rows = any(p.kind == Buffer.HIDDEN and p.size == rows_size(conf) for p in plans)
    return 3 if cold else 2 if rows else 1


# ---- totals ----
@dataclass(frozen=True)
class Totals:
    """The RAM figures of the header. Bytes."""

    weights: int
    arena: int
    kv: int
    tables: int
    engine: int
    stacks: int

    @property
    def total(self) -> int:
        """Weights resident + arena + KV + tables + engine + stacks."""
        return self.weights + self.arena + self.kv + self.tables + self.engine + self.stacks


def process_size(total: int) -> int:
    """What the process itself takes beside a total: in no total, as it is no work of the engine."""
    return group_limit(total) - total


def group_limit(total: int) -> int:
    """The limit of a control group (memory.max) in which a run with this total opens."""
    return pad(total + PROCESS + total // PAGE * PER_PAGE, GROUP_UNIT)


def engine_size(layers: int, tensors: int, segments: int, plans: int, units: int = 0) -> int:
    """The engine block with its copies of the tables."""
    tables = (
        spec.size_of(Layer) * layers
        + spec.size_of(Tensor) * tensors
        + spec.size_of(Segment) * segments
        + spec.size_of(Plan) * plans
        + spec.size_of(KvUnit) * units
    )
    return pad(ENGINE_FIXED + tables, PAGE)


def totals(
    conf: Conf,
    layers: Sequence[Layer],
    tensor_count: int,
    segment_count: int,
    plans: Sequence[Plan],
    file_size: int,
    weights_size: int,
    units: Sequence[KvUnit] = (),
    weights_held: int | None = None,
) -> Totals:
    """Every RAM figure of the header; `weights_size` is the size of WHOT, `weights_held` its
    mem_size (None: all of it)."""
    weights = pad(weights_size, PAGE)
    return Totals(
        weights=weights if weights_held is None else pad(weights_held, PAGE),
        arena=pad(max((p.offset + p.size for p in plans), default=0), PAGE),
        kv=kv_size(conf, layers, units),
        tables=pad(file_size, PAGE) - weights,
        engine=engine_size(len(layers), tensor_count, segment_count, len(plans), len(units)),
        stacks=(conf.threads - 1) * STACK,
    )


def features_of(conf: Conf, segments: Iterable[Segment], units: Sequence[KvUnit] = ()) -> int:
    """required_features that follow from the records."""
    bits = {
        Format.F32: spec.Feature.FLOAT,
        Format.F16: spec.Feature.FLOAT,
        Format.Q4H: spec.Feature.Q4H,
        Format.Q4RAW_F16: spec.Feature.Q4RAW,
        Format.Q4RAW_BF16: spec.Feature.Q4RAW,
        Format.Q8: spec.Feature.Q8,
        Format.Q8_ROWS: spec.Feature.Q8,
    }
    out = int(spec.Feature.DENSE)
    int8 = conf.kv_type == KvType.INT8
    out |= int(spec.Feature.KV_INT8 if int8 else spec.Feature.KV_FLOAT)
    out |= int(spec.Feature.KV_MASK) if units else 0
    out |= int(spec.Feature.KV_VALUE4) if any(unit.value4 for unit in units) else 0
    out |= int(spec.Feature.KV_KEY4) if any(unit.key4 for unit in units) else 0
    for segment in segments:
        if segment.format in bits:
            out |= int(bits[Format(segment.format)])
    return out
