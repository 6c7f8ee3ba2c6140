"""The rules of csrc/FORMAT.md sections 2.3 to 2.10 on unpacked records.

Each check raises FormatError with the code of its section. Second stage (rule F): every cross
reference is checked here, once, before anybody uses a record.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from gemrun.format import sizes, spec
from gemrun.format.codes import Code, FormatError
from gemrun.format.spec import (
    Block,
    Buffer,
    Conf,
    ConfFlag,
    Format,
    KvType,
    KvUnit,
    Ladder,
    Layer,
    LayerFlag,
    Plan,
    Role,
    Rope,
    Section,
    Segment,
    Tensor,
    TestVector,
    Thermal,
)

MAX_FLOAT = 0x7F7FFFFF  # bits of the largest finite float32
REBUILD = "compile the artifact again"
VECTOR_ROLES = frozenset(
    {
        Role.FINAL_NORM,
        Role.ATTN_NORM,
        Role.Q_BIAS,
        Role.K_BIAS,
        Role.V_BIAS,
        Role.Q_NORM,
        Role.K_NORM,
        Role.POST_ATTN_NORM,
        Role.FFN_NORM,
        Role.POST_FFN_NORM,
    }
)


def is_text(raw: bytes) -> bool:
    """A NUL-padded text field: after the first NUL all bytes are NUL."""
    return not any(raw[len(raw.split(b"\0", 1)[0]) :])


def bits(value: float) -> int:
    """The bits of a float32 field. Python keeps NaN a NaN, which is all that matters here."""
    word: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return word


class _Record:
    """One record under check: says which one is wrong, and with what code."""

    def __init__(self, code: Code, what: str) -> None:
        self.code, self.what = code, what

    def fail(self, text: str) -> FormatError:
        """The error to raise."""
        return FormatError(self.code, f"{self.what}: {text}", REBUILD)

    def between(self, name: str, value: int, least: int, most: int) -> None:
        """An integer within its limits."""
        if not least <= value <= most:
            raise self.fail(f"{name} is {value}, {least} to {most} is allowed")

    def equal(self, name: str, value: object, wanted: object) -> None:
        """A field that has only one right value."""
        if value != wanted:
            raise self.fail(f"{name} is {value}, not {wanted}")

    def zero(self, **fields: bytes | int) -> None:
        """Reserved fields."""
        for name, value in fields.items():
            if any(value) if isinstance(value, bytes) else value != 0:
                raise self.fail(f"{name} is not zero")

    def number(self, name: str, value: float, least: int, most: int = MAX_FLOAT) -> None:
        """A float by its bits: least 0 is "not negative", least 1 is "positive"."""
        if not least <= bits(value) <= most:
            raise self.fail(f"{name} is {value}")

    def optional(self, name: str, value: float, present: bool) -> None:
        """A positive float with a flag, the bit pattern 0 without it."""
        if present:
            self.number(name, value, 1)
        elif bits(value) != 0:
            raise self.fail(f"{name} is {value} without its flag")


def check_conf(conf: Conf) -> None:
    """FORMAT.md 2.3."""
    r = _Record(Code.CONF, "section CONF")
    r.between("layer_count", conf.layer_count, 1, spec.MAX_LAYERS)
    r.between("hidden", conf.hidden, 1, spec.MAX_HIDDEN)
    r.between("vocab_rows", conf.vocab_rows, 1, spec.MAX_VOCAB)
    r.between("rope_count", conf.rope_count, 1, spec.MAX_ROPES)
    r.between("context", conf.context, 1, spec.MAX_CONTEXT)
    r.between("trained_context", conf.trained_context, 1, spec.MAX_CONTEXT)
    r.between("chunk", conf.chunk, 1, spec.MAX_CHUNK)
    r.between("threads", conf.threads, 1, spec.MAX_THREADS)
    r.between("kv_type", conf.kv_type, KvType.F32, KvType.INT8)
    r.between("flags", conf.flags, 0, int(ConfFlag.TIED | ConfFlag.FINAL_SOFTCAP))
    r.equal("act_mode", conf.act_mode, 0)
    r.number("norm_eps", conf.norm_eps, 0)
    r.number("embed_scale", conf.embed_scale, 1)
    capped = bool(conf.flags & ConfFlag.FINAL_SOFTCAP)
    r.optional("final_softcap", conf.final_softcap, capped)
    r.number("temperature", conf.temperature, 0, bits(100.0))
    r.number("top_p", conf.top_p, 1, bits(1.0))
    r.number("min_p", conf.min_p, 0, bits(1.0) - 1)
    r.number("repetition_penalty", conf.repetition_penalty, 1, bits(100.0))
    r.between("top_k", conf.top_k, 0, spec.MAX_VOCAB)
    r.equal("text_limit", conf.text_limit, sizes.text_limit(conf.context))
    r.zero(reserved0=conf.reserved0, reserved=conf.reserved)
    if not is_text(conf.family) or not is_text(conf.name):
        raise r.fail("family or name is not NUL-padded")


def check_layer_count(conf: Conf, layers: Sequence[Layer]) -> None:
    """LAYR has as many records as CONF says."""
    if len(layers) != conf.layer_count:
        what = f"section LAYR: {len(layers)} records for {conf.layer_count} layers"
        raise FormatError(Code.LAYR, what, REBUILD)


def check_layers(
    conf: Conf, layers: Sequence[Layer], units: Sequence[KvUnit] = (), features: int = 0
) -> None:
    """FORMAT.md 2.4, layer after layer: its fields, its units, the size of its rings.

    The tensors of a layer are checked with TENS. `units` are all of KVMK, empty where it is not
    there; `features`: those that are required.
    """
    at, count = 0, 0
    for index, layer in enumerate(layers):
        r = _Record(Code.LAYR, f"layer {index}")
        _layer_sizes(r, conf, layer)
        r.equal("kv_source", layer.kv_source, index)
        r.equal("kv_blocks", layer.kv_blocks, sizes.kv_blocks(conf.context, layer.window))
        r.equal("kv_offset", layer.kv_offset, at)
        r.equal("unit_first", layer.unit_first, count if units else 0)
        count += layer.kv_heads
        if units:
            check_units(conf, index, layer, units, features)
        r.equal("kv_size", layer.kv_size, sizes.kv_layer_size(conf.kv_type, layer, units))
        at += layer.kv_size
    if units:
        _Record(Code.KVMK, "section KVMK").equal("record count", len(units), count)


def check_units(
    conf: Conf, index: int, layer: Layer, units: Sequence[KvUnit], features: int
) -> None:
    """The units of layer `index`, whose other fields are right."""
    own = sizes.units_of(layer, units)
    if len(own) < layer.kv_heads:
        what = f"section KVMK: {len(units)} records, layer {index} has more KV heads"
        raise FormatError(Code.KVMK, what, REBUILD)
    narrow = int(features & spec.KV_4BIT)
    first, step = 0, sizes.unit_step(conf.kv_type, layer, bool(narrow))
    if conf.kv_type != KvType.INT8 or layer.head_dim % 16:
        narrow = 0
    for head, unit in enumerate(own):
        r = _Record(Code.KVMK, f"layer {index}, KV head {head}")
        r.between("recent", unit.recent, 0, layer.kv_blocks)
        if unit.partial:
            r.equal("window of a head that keeps a part", layer.window, 0)
            r.between("sink", unit.sink, 1, layer.kv_blocks)
            r.between("sink + recent + 1", unit.sink + unit.recent + 1, 3, layer.kv_blocks - 1)
        else:
            r.equal("sink of a head that keeps all", unit.sink, 0)
        r.equal("blocks", unit.blocks, sizes.unit_blocks(layer, unit.sink, unit.recent))
        r.equal("first", unit.first, first)
        r.equal("flags", unit.flags, unit.flags & (narrow >> 8))
        first += unit.blocks * sizes.unit_block_size(conf.kv_type, layer, unit) // step


def _layer_sizes(r: _Record, conf: Conf, layer: Layer) -> None:
    r.equal("kind", layer.kind, spec.LAYER_DENSE)
    r.between("flags", layer.flags, 0, int(sum(LayerFlag)))
    r.between("heads", layer.heads, 1, spec.MAX_HEADS)
    r.between("kv_heads", layer.kv_heads, 1, layer.heads)
    r.equal("heads modulo kv_heads", layer.heads % layer.kv_heads, 0)
    r.between("head_dim", layer.head_dim, 2, spec.MAX_HEAD_DIM)
    r.equal("head_dim modulo 2", layer.head_dim % 2, 0)
    r.between("ffn", layer.ffn, 1, spec.MAX_FFN)
    r.between("rope", layer.rope, 0, conf.rope_count - 1)
    r.between("window", layer.window, 0, spec.MAX_CONTEXT)
    r.between("block", layer.block, Block.PRE, Block.SANDWICH)
    r.between("act", layer.act, spec.Act.GELU_TANH, spec.Act.SILU)
    r.number("score_scale", layer.score_scale, 1)
    r.optional("attn_softcap", layer.attn_softcap, bool(layer.flags & LayerFlag.ATTN_SOFTCAP))
    r.equal("sparsity_z", bits(layer.sparsity_z), 0)
    r.zero(reserved=layer.reserved)
    if conf.kv_type != KvType.INT8:
        r.equal("kv_group", layer.kv_group, 0)
    elif layer.kv_group not in (32, 64, layer.head_dim) or layer.head_dim % layer.kv_group:
        raise r.fail(f"kv_group is {layer.kv_group} for a head_dim of {layer.head_dim}")


def check_segments(segments: Sequence[Segment]) -> None:
    """FORMAT.md 2.5."""
    for index, segment in enumerate(segments):
        r = _Record(Code.SEGM, f"segment {index}")
        r.between("format", segment.format, Format.F32, Format.VECTOR)
        r.between("first_group", segment.first_group, 0, 65536)
        r.between("group_count", segment.group_count, 1, 65536)
        r.zero(reserved=segment.reserved)


# ---- TENS ----
class _Wanted:
    """What the next record in execution order has to be."""

    def __init__(self, role: Role, layer: int, rows: int, cols: int, heads: int = 0) -> None:
        self.role, self.layer, self.rows, self.cols = role, layer, rows, cols
        self.heads = heads  # heads a slab role has to cover; O: of its columns


def _wanted_layer(conf: Conf, index: int, layer: Layer) -> list[_Wanted]:
    q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    bias = bool(layer.flags & LayerFlag.QKV_BIAS)
    norm = bool(layer.flags & LayerFlag.QK_NORM)
    post = layer.block == Block.SANDWICH
    rows = [
        (True, Role.ATTN_NORM, 1, conf.hidden, 0),
        (True, Role.Q, q, conf.hidden, layer.heads),
        (True, Role.K, kv, conf.hidden, layer.kv_heads),
        (True, Role.V, kv, conf.hidden, layer.kv_heads),
        (bias, Role.Q_BIAS, 1, q, 0),
        (bias, Role.K_BIAS, 1, kv, 0),
        (bias, Role.V_BIAS, 1, kv, 0),
        (norm, Role.Q_NORM, 1, layer.head_dim, 0),
        (norm, Role.K_NORM, 1, layer.head_dim, 0),
        (True, Role.O, conf.hidden, q, layer.heads),
        (post, Role.POST_ATTN_NORM, 1, conf.hidden, 0),
        (True, Role.FFN_NORM, 1, conf.hidden, 0),
        (True, Role.GATE_UP, layer.ffn, conf.hidden, 0),
        (True, Role.DOWN, conf.hidden, layer.ffn, 0),
        (post, Role.POST_FFN_NORM, 1, conf.hidden, 0),
    ]
    return [_Wanted(role, index, r, c, heads) for there, role, r, c, heads in rows if there]


class _Walk:
    """Through TENS in execution order, and with it through the bytes of WHOT."""

    def __init__(self, tensors: Sequence[Tensor], segments: Sequence[Segment], whot: Section):
        self.tensors, self.segments = tensors, segments
        self.index = 0
        self.at, self.end = whot.offset, whot.offset + whot.size
        self.gaps: list[tuple[int, int]] = []

    def region(self, r: _Record, offset: int, size: int) -> None:
        """The next run of bytes has to start on 256 right behind the last one."""
        r.equal("offset", offset, sizes.pad(self.at, spec.ALIGN))
        if offset + size > self.end:
            raise r.fail(f"ends at {offset + size}, WHOT at {self.end}")
        self.gaps.append((self.at, offset))
        self.at = offset + size

    def take(self, wanted: _Wanted) -> int:
        """Check one role's record or records; returns the index of the first."""
        first, covered = self.index, 0
        while True:
            if self.index >= len(self.tensors):
                what = f"section TENS: no {wanted.role.name} of layer {wanted.layer}"
                raise FormatError(Code.TENS, what, REBUILD)
            tensor = self.tensors[self.index]
            label = f"tensor {self.index} ({wanted.role.name} of layer {wanted.layer})"
            r = _Record(Code.TENS, label)
            rows = _check_slab(r, tensor, wanted, covered)
            _check_shape(r, tensor, wanted, rows)
            self.region(r, tensor.offset, tensor.size)
            _check_storage(r, tensor, self.segments)
            if tensor.second_size:
                self.region(r, tensor.second_offset, tensor.second_size)
            else:
                r.zero(second_offset=tensor.second_offset)
            self.index += 1
            covered += tensor.slab_count
            if wanted.role not in (Role.Q, Role.K, Role.V) or covered == wanted.heads:
                return first


def _check_slab(r: _Record, tensor: Tensor, wanted: _Wanted, covered: int) -> int:
    """Rows that this record has to have."""
    if wanted.role not in (Role.Q, Role.K, Role.V):
        r.equal("slab_first", tensor.slab_first, 0)
        r.equal("slab_count", tensor.slab_count, wanted.heads)
        return wanted.rows
    r.equal("slab_first", tensor.slab_first, covered)
    r.between("slab_count", tensor.slab_count, 1, wanted.heads - covered)
    rows = tensor.slab_count * (wanted.rows // wanted.heads)
    if tensor.slab_count != wanted.heads:
        r.equal("rows of a slab modulo 16", rows % spec.PANEL, 0)
    return rows


def _check_shape(r: _Record, tensor: Tensor, wanted: _Wanted, rows: int) -> None:
    vector = wanted.role in VECTOR_ROLES
    r.equal("role", tensor.role, wanted.role)
    r.equal("layer", tensor.layer, wanted.layer)
    r.equal("rows", tensor.rows, rows)
    r.equal("cols", tensor.cols, wanted.cols)
    r.equal("rows_padded", tensor.rows_padded, 1 if vector else sizes.pad(rows, spec.PANEL))
    cols = wanted.cols
    r.equal("cols_padded", tensor.cols_padded, cols if vector else sizes.pad(cols, spec.GROUP))
    r.equal("parts", tensor.parts, 2 if wanted.role == Role.GATE_UP else 1)
    r.zero(reserved0=tensor.reserved0, reserved=tensor.reserved)


def _check_storage(r: _Record, tensor: Tensor, segments: Sequence[Segment]) -> None:
    r.between("seg_count", tensor.seg_count, 1, len(segments))
    r.between("seg_first", tensor.seg_first, 0, len(segments) - tensor.seg_count)
    r.between("seg_count", tensor.seg_count, 1, max(1, tensor.size // spec.GROUP))
    own = sizes.segments_of(tensor, segments)
    group = 0
    for segment in own:
        r.equal("first_group of a segment", segment.first_group, group)
        group += segment.group_count
    r.equal("groups of all segments", group, sizes.groups_of(tensor.cols))
    first = own[0].format
    if tensor.role in VECTOR_ROLES:
        fits = first == Format.VECTOR and len(own) == 1
    elif tensor.role in (Role.EMBED, Role.HEAD):
        fits = first in sizes.TABLE_FORMATS and len(own) == 1
    elif first in sizes.FLOAT_FORMATS:
        fits = len(own) == 1
    else:
        fits = all(s.format in sizes.BODY_FORMATS for s in own)
    if not fits:
        raise r.fail(f"cannot be stored in format {first} with {len(own)} segments")
    size, second = sizes.tensor_size(tensor, own)
    r.equal("size", tensor.size, size)
    r.equal("second_size", tensor.second_size, second)


def check_tensors(
    conf: Conf,
    layers: Sequence[Layer],
    segments: Sequence[Segment],
    tensors: Sequence[Tensor],
    whot: Section,
) -> list[tuple[int, int]]:
    """FORMAT.md 2.6. Returns the gaps of WHOT, whose bytes have to be zero."""
    walk = _Walk(tensors, segments, whot)
    table = conf.vocab_rows, conf.hidden
    r = _Record(Code.TENS, "section TENS")
    tied = bool(conf.flags & ConfFlag.TIED)
    embed = -1 if tied else walk.take(_Wanted(Role.EMBED, -1, *table))
    for index, layer in enumerate(layers):
        first = walk.index
        for wanted in _wanted_layer(conf, index, layer):
            walk.take(wanted)
        r.equal(f"tens_first of layer {index}", layer.tens_first, first)
        r.equal(f"tens_count of layer {index}", layer.tens_count, walk.index - first)
    norm = walk.take(_Wanted(Role.FINAL_NORM, -1, 1, conf.hidden))
    head = walk.take(_Wanted(Role.HEAD, -1, *table))
    r.equal("record count", len(tensors), walk.index)
    r.equal("tens_embed", conf.tens_embed, head if tied else embed)
    r.equal("tens_head", conf.tens_head, head)
    r.equal("tens_final_norm", conf.tens_final_norm, norm)
    r.between("bytes after the last tensor", walk.end - walk.at, 0, spec.ALIGN - 1)
    return [*walk.gaps, (walk.at, walk.end)]


# ---- PLAN, ROPE, THRM, TEST ----
def check_plans(
    conf: Conf,
    layers: Sequence[Layer],
    segments: Sequence[Segment],
    tensors: Sequence[Tensor],
    plans: Sequence[Plan],
) -> None:
    """FORMAT.md 2.7."""
    _Record(Code.PLAN, "section PLAN").equal("record count", len(plans), len(Buffer))
    wanted = sizes.buffer_sizes(conf, layers, tensors, segments)
    for kind, plan in zip(Buffer, plans, strict=True):
        r = _Record(Code.PLAN, f"buffer {kind.name}")
        first, last = sizes.LIFETIMES[kind]
        r.equal("kind", plan.kind, kind)
        r.equal("first_op", plan.first_op, first)
        r.equal("last_op", plan.last_op, last)
        if kind != Buffer.HIDDEN or plan.size != sizes.rows_size(conf):
            r.equal("size", plan.size, wanted[kind])
        r.equal("offset modulo 64", plan.offset % spec.LINE, 0)
        r.between("end", plan.offset + plan.size, 0, 1 << 40)
        r.zero(reserved0=plan.reserved0, reserved=plan.reserved)
    for index, one in enumerate(plans):
        for other in plans[:index]:
            meet = one.first_op <= other.last_op and other.first_op <= one.last_op
            apart = one.offset + one.size <= other.offset or other.offset + other.size <= one.offset
            if meet and not apart:
                pair = f"{Buffer(one.kind).name} and {Buffer(other.kind).name}"
                what = f"section PLAN: buffers {pair} overlap while both live"
                raise FormatError(Code.PLAN, what, REBUILD)


def read_ropes(conf: Conf, layers: Sequence[Layer], data: memoryview) -> tuple[Rope, ...]:
    """FORMAT.md 2.8."""
    r = _Record(Code.ROPE, "section ROPE")
    step = spec.size_of(Rope)
    end = step * conf.rope_count
    if end > len(data):
        raise r.fail(f"{len(data)} bytes for {conf.rope_count} records")
    ropes = tuple(Rope.unpack(data, step * i) for i in range(conf.rope_count))
    for rope in ropes:
        start = sizes.pad(end, spec.LINE)
        r.equal("positions", rope.positions, conf.context)
        r.between("pairs", rope.pairs, 1, spec.MAX_HEAD_DIM // 2)
        r.equal("offset", rope.offset, start)
        stop = start + 8 * rope.pairs * rope.positions
        if stop > len(data):
            raise r.fail(f"a table ends at {stop} of {len(data)}")
        if any(data[end:start]):
            raise r.fail("bytes between tables are not zero")
        end = stop
    if len(data) - end >= spec.LINE or any(data[end:]):
        raise r.fail(f"{len(data) - end} bytes after the last table")
    for index, layer in enumerate(layers):
        r.equal(f"pairs of layer {index}", ropes[layer.rope].pairs, layer.head_dim // 2)
    return ropes


def check_thermal(thermal: Thermal) -> None:
    """FORMAT.md 2.9."""
    r = _Record(Code.THRM, "section THRM")
    r.number("threshold_c", thermal.threshold_c, 0)
    r.number("hysteresis_c", thermal.hysteresis_c, 0)
    r.number("device_max_c", thermal.device_max_c, 0)
    r.equal("mode", thermal.mode, 0)
    r.zero(reserved=thermal.reserved)


def check_ladder(ladder: Ladder) -> None:
    """FORMAT.md 2.9, the ladder."""
    r = _Record(Code.THRM, "section THRM")
    r.between("mode", ladder.mode, 0, max(spec.Mode))
    r.between("rung_count", ladder.rung_count, 1, spec.MAX_RUNGS)
    r.number("engage_c", ladder.engage_c, 0)
    r.number("release_c", ladder.release_c, 0)
    if ladder.engage_c != 0 or ladder.release_c != 0:
        ordered = 0 < ladder.release_c < ladder.engage_c <= spec.MAX_CELSIUS
        if not ordered:
            raise r.fail(f"release_c {ladder.release_c}, engage_c {ladder.engage_c}")
    r.between("rise", ladder.rise, 1, spec.MAX_RUNGS)
    r.between("fault", ladder.fault, 0, ladder.rung_count - 1)
    r.between("engage_ms", ladder.engage_ms, 1, spec.MAX_RUNG_MS)
    r.between("release_ms", ladder.release_ms, 1, spec.MAX_RUNG_MS)
    r.between("stale_ms", ladder.stale_ms, 100, spec.MAX_RUNG_MS)
    r.zero(reserved=ladder.reserved)
    before = spec.Rung(duty=1000, threads=1000, chunk=1000)
    for index, rung in enumerate(ladder.steps()):
        if index >= ladder.rung_count:
            r.equal(f"rung {index}", rung, spec.Rung())
            continue
        r.between(f"rung {index} duty", rung.duty, 1, before.duty)
        r.between(f"rung {index} threads", rung.threads, 1, before.threads)
        r.between(f"rung {index} chunk", rung.chunk, 1, before.chunk)
        r.equal(f"rung {index} reserved", rung.reserved, 0)
        before = rung


def check_tests(conf: Conf, tests: Sequence[TestVector]) -> None:
    """FORMAT.md 2.10."""
    for index, test in enumerate(tests):
        r = _Record(Code.TEST, f"test vector {index}")
        r.between("prompt_count", test.prompt_count, 1, spec.TEST_PROMPT)
        r.between("step_count", test.step_count, 1, spec.TEST_STEPS)
        r.between("tokens", test.prompt_count + test.step_count, 2, conf.context)
        r.zero(reserved=test.reserved)
        for ids, count in ((test.prompt, test.prompt_count), (test.steps, test.step_count)):
            if max(ids[:count]) >= conf.vocab_rows:
                raise r.fail(f"a token id is not below {conf.vocab_rows}")
            if any(ids[count:]):
                raise r.fail("an id beyond the count is not zero")
