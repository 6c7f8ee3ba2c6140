"""On-disk records, enums and limits of `.gembin` 1.0, as csrc/gembin.h declares them.

A test compiles a probe over the header and compares every size, offset and number. Records are
frozen dataclasses; `pack` gives their bytes, `unpack` reads the known part of a possibly longer
record. No field is interpreted here: rules are in reader.py, sizes in sizes.py.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, fields
from enum import IntEnum, IntFlag
from typing import Any, TypeVar

MAGIC = b"\x8bGEM\r\n\x1a\n"
BYTE_ORDER = 0x01020304
MAJOR = 1
MINOR = 0
ENGINE_ABI = 3

ALIGN = 256  # every section and every tensor
WEIGHT_ALIGN = 65536  # WHOT
LINE = 64  # supers, superblocks, arena buffers, KV blocks
PANEL = 16  # rows of a panel
HIDDEN_ROWS = 8  # of HIDDEN: an output, and the tokens of a speculative step
GROUP = 32  # inputs of a quantisation group
SUPERBLOCK = 8  # groups of a full superblock
UNIT = 32  # output rows of a unit of work
KV_BLOCK = 32  # tokens of a KV ring block
MAX_SECTIONS = 64
MAX_LAYERS = 256
MAX_TENSORS = 65536
MAX_SEGMENTS = 65536
MAX_PLAN = 64
MAX_ROPES = 4
MAX_VOCAB = 1 << 20
MAX_CONTEXT = 1 << 20
MAX_CHUNK = 4096
MAX_HIDDEN = 65536
MAX_FFN = 1 << 20
MAX_HEADS = 1024
MAX_UNITS = MAX_LAYERS * MAX_HEADS  # records of KVMK
MAX_HEAD_DIM = 512
MAX_THREADS = 8
MAX_TESTS = 64
MAX_RUNGS = 8
MAX_RUNG_MS = 600_000  # a time of the ladder
MAX_CELSIUS = 150.0  # a temperature of the ladder
TEST_PROMPT = 400
TEST_STEPS = 64
MAX_MANIFEST = 16 << 20

HEADER_SIZE = 256
SIGNATURE_OFFSET = 256
TABLE_OFFSET = 512
ENTRY_SIZE = 128

# Section types, in file order.
SECTIONS = (
    "CONF",
    "LAYR",
    "KVMK",
    "TENS",
    "SEGM",
    "PLAN",
    "TOKN",
    "TMPL",
    "ROPE",
    "THRM",
    "TEST",
    "PINP",
    "COLD",
    "HDFJ",
    "MANI",
    "WHOT",
)
OPTIONAL_SECTIONS = frozenset({"TMPL", "PINP", "COLD"})
MASK_SECTION = "KVMK"  # there exactly with Feature.KV_MASK or KV_4BIT


def fourcc(name: str) -> int:
    """The section type that four letters stand for."""
    return int.from_bytes(name.encode("ascii"), "little")


class SectionFlag(IntFlag):
    """Bits of a section entry's flags."""

    REQUIRED = 1
    HOT = 2
    COLD = 4
    SECRET = 8


class Feature(IntFlag):
    """Bits of required_features."""

    DENSE = 1
    Q4H = 2
    Q4RAW = 4
    Q8 = 8
    FLOAT = 16
    KV_INT8 = 32
    KV_FLOAT = 64
    KV_MASK = 128
    KV_VALUE4 = 256
    KV_KEY4 = 512


REQ_KNOWN = 0x3FF
KV_4BIT = Feature.KV_VALUE4 | Feature.KV_KEY4  # a unit's flags, eight bits up


class Isa(IntEnum):
    """Advice: the instruction set an artifact was made for."""

    ANY = 0
    X86_64 = 1
    AARCH64 = 2
    ARMV7 = 3
    RISCV64 = 4


class Format(IntEnum):
    """Format of a segment."""

    F32 = 1
    F16 = 2
    Q4H = 3
    Q4RAW_F16 = 4
    Q4RAW_BF16 = 5
    Q8 = 6
    Q8_ROWS = 7
    VECTOR = 8


class Role(IntEnum):
    """What a tensor is for."""

    EMBED = 1
    HEAD = 2
    FINAL_NORM = 3
    ATTN_NORM = 10
    Q = 11
    K = 12
    V = 13
    O = 14  # noqa: E741  the field's own name
    Q_BIAS = 15
    K_BIAS = 16
    V_BIAS = 17
    Q_NORM = 18
    K_NORM = 19
    POST_ATTN_NORM = 20
    FFN_NORM = 21
    POST_FFN_NORM = 22
    GATE_UP = 25
    DOWN = 26


class Block(IntEnum):
    """Where a layer's norms sit."""

    PRE = 0
    SANDWICH = 1


class Act(IntEnum):
    """Activation of the gated feed-forward."""

    GELU_TANH = 0
    SILU = 1


LAYER_DENSE = 0


class LayerFlag(IntFlag):
    """Bits of a layer's flags."""

    QK_NORM = 1
    QKV_BIAS = 2
    ATTN_SOFTCAP = 4


class ConfFlag(IntFlag):
    """Bits of CONF's flags."""

    TIED = 1
    FINAL_SOFTCAP = 2


class KvType(IntEnum):
    """What the KV cache holds."""

    F32 = 0
    F16 = 1
    INT8 = 2


class UnitFlag(IntFlag):
    """Bits of a unit's flags."""

    VALUE4 = 1
    KEY4 = 2


class ColdBy(IntEnum):
    """How weights are read that do not stay in memory."""

    STREAM = 0
    ROWS = 1


class Buffer(IntEnum):
    """Arena buffers."""

    X = 1
    XN = 2
    Q = 3
    KV = 4
    ATT = 5
    SCORES = 6
    Y = 7
    H = 8
    LOGITS = 9
    CAND = 10
    SEEN = 11
    IDS = 12
    PROMPT = 13
    TOK = 14
    HIDDEN = 15


class Op(IntEnum):
    """The steps between which a buffer lives."""

    TOK = 0
    EMBED = 1
    QKV = 2
    ATTN = 3
    O = 4  # noqa: E741
    GATE_UP = 5
    DOWN = 6
    HEAD = 7
    SAMPLE = 8


R = TypeVar("R", bound="Record")


class Record:
    """Base of the on-disk records: fields in order, each with a struct code in its metadata."""

    def pack(self) -> bytes:
        """The record's bytes."""
        out: list[Any] = []
        for name, code, _ in layout(type(self)):
            value = getattr(self, name)
            if is_array(code):
                out.extend(value)
            else:
                out.append(value)
        return _struct_of(type(self)).pack(*out)

    @classmethod
    def unpack(cls: type[R], data: bytes | memoryview, offset: int = 0) -> R:
        """Read a record at `offset`; bytes beyond the known ones are not looked at."""
        flat = _struct_of(cls).unpack_from(data, offset)
        values: list[Any] = []
        at = 0
        for _, code, count in layout(cls):
            if is_array(code):
                values.append(flat[at : at + count])
                at += count
            else:
                values.append(flat[at])
                at += 1
        return cls(*values)


def is_array(code: str) -> bool:
    """Whether a struct code stands for several numbers ("400I") and not for text ("16s")."""
    return len(code) > 1 and not code.endswith("s")


Layout = tuple[tuple[str, str, int], ...]
_LAYOUTS: dict[type[Any], tuple[Layout, struct.Struct]] = {}  # derived once per record class


def layout(record: type[Any]) -> Layout:
    """(field name, struct code, count of values) of a record, in file order."""
    return _derived(record)[0]


def _derived(record: type[Any]) -> tuple[Layout, struct.Struct]:
    if record not in _LAYOUTS:
        codes = [(item.name, str(item.metadata["code"])) for item in fields(record)]
        rows = tuple((n, c, int(c[:-1]) if is_array(c) else 1) for n, c in codes)
        _LAYOUTS[record] = rows, struct.Struct("<" + "".join(c for _, c in codes))
    return _LAYOUTS[record]


def _struct_of(record: type[Any]) -> struct.Struct:
    return _derived(record)[1]


def size_of(record: type[Record]) -> int:
    """Bytes of a record in version 1.0."""
    return _struct_of(record).size


def field_of(code: str, default: Any = 0) -> Any:
    if is_array(code) and default == 0:
        default = (0,) * int(code[:-1])
    if code.endswith("s") and default == 0:
        default = bytes(int(code[:-1]))
    if code == "f" and default == 0:
        default = 0.0
    return field(default=default, metadata={"code": code})


@dataclass(frozen=True)
class Header(Record):
    """The first 256 bytes. The writer sets sizes, table position and checksums."""

    magic: bytes = field_of("8s", MAGIC)
    byte_order: int = field_of("I", BYTE_ORDER)
    major: int = field_of("H", MAJOR)
    minor: int = field_of("H", MINOR)
    header_size: int = field_of("I", HEADER_SIZE)
    entry_size: int = field_of("I", ENTRY_SIZE)
    section_count: int = field_of("I")
    align: int = field_of("I", ALIGN)
    file_size: int = field_of("Q")
    table_offset: int = field_of("Q", TABLE_OFFSET)
    required_features: int = field_of("Q")
    optional_features: int = field_of("Q")
    ram_weights: int = field_of("Q")
    ram_arena: int = field_of("Q")
    ram_kv: int = field_of("Q")
    ram_total: int = field_of("Q")
    ram_budget: int = field_of("Q")
    isa: int = field_of("I")
    isa_features: int = field_of("I")
    engine_abi_min: int = field_of("I", ENGINE_ABI)
    kv_layout_id: int = field_of("I")
    hdf_sha256: bytes = field_of("32s")
    root_sha256: bytes = field_of("32s")
    target: bytes = field_of("16s")
    ram_tables: int = field_of("Q")
    ram_engine: int = field_of("Q")
    ram_stacks: int = field_of("Q")
    reserved: bytes = field_of("24s")
    table_crc32: int = field_of("I")
    header_crc32: int = field_of("I")


@dataclass(frozen=True)
class Signature(Record):
    """The signature block, outside the root."""

    alg: int = field_of("H")  # 0 none, 1 Ed25519
    pad: bytes = field_of("6s")
    key_id: bytes = field_of("8s")
    signature: bytes = field_of("64s")
    reserved: bytes = field_of("176s")


@dataclass(frozen=True)
class Section(Record):
    """An entry of the section table."""

    type: int = field_of("I")
    flags: int = field_of("I")
    offset: int = field_of("Q")
    size: int = field_of("Q")
    mem_size: int = field_of("Q")
    record_size: int = field_of("I")
    crc32: int = field_of("I")
    record_count: int = field_of("Q")
    reserved0: bytes = field_of("16s")
    sha256: bytes = field_of("32s")
    name: bytes = field_of("16s")
    reserved1: bytes = field_of("16s")


@dataclass(frozen=True)
class Conf(Record):
    """Constants of the model."""

    layer_count: int = field_of("I")
    hidden: int = field_of("I")
    vocab_rows: int = field_of("I")
    rope_count: int = field_of("I")
    context: int = field_of("I")
    trained_context: int = field_of("I")
    chunk: int = field_of("I")
    threads: int = field_of("I")
    kv_type: int = field_of("I")
    flags: int = field_of("I")
    tens_embed: int = field_of("I")
    tens_head: int = field_of("I")
    tens_final_norm: int = field_of("I")
    act_mode: int = field_of("I")
    norm_eps: float = field_of("f")
    embed_scale: float = field_of("f", 1.0)
    final_softcap: float = field_of("f")
    temperature: float = field_of("f", 0.3)
    top_p: float = field_of("f", 0.85)
    min_p: float = field_of("f")
    repetition_penalty: float = field_of("f", 1.0)
    top_k: int = field_of("I", 64)
    text_limit: int = field_of("I")
    reserved0: int = field_of("I")
    family: bytes = field_of("16s")
    name: bytes = field_of("64s")
    reserved: bytes = field_of("80s")


@dataclass(frozen=True)
class Layer(Record):
    """A layer in execution order."""

    kind: int = field_of("I")
    flags: int = field_of("I")
    heads: int = field_of("I")
    kv_heads: int = field_of("I")
    head_dim: int = field_of("I")
    ffn: int = field_of("I")
    rope: int = field_of("I")
    window: int = field_of("I")
    block: int = field_of("I")
    act: int = field_of("I")
    score_scale: float = field_of("f")
    attn_softcap: float = field_of("f")
    kv_source: int = field_of("I")
    kv_group: int = field_of("I")
    kv_offset: int = field_of("Q")
    kv_size: int = field_of("Q")
    kv_blocks: int = field_of("I")
    tens_first: int = field_of("I")
    tens_count: int = field_of("I")
    sparsity_z: float = field_of("f")
    unit_first: int = field_of("I")
    reserved: bytes = field_of("36s")


@dataclass(frozen=True)
class KvUnit(Record):
    """What a KV head of a layer keeps, in blocks of 32 tokens; recent 0: all of the window."""

    sink: int = field_of("I")
    recent: int = field_of("H")
    flags: int = field_of("H")
    blocks: int = field_of("I")
    first: int = field_of("I")  # in blocks, with KV_4BIT in lines of 64 bytes

    @property
    def partial(self) -> bool:
        """Whether some positions leave the cache."""
        return self.recent > 0

    @property
    def value4(self) -> bool:
        """Whether its values have 4 bits."""
        return bool(self.flags & UnitFlag.VALUE4)

    @property
    def key4(self) -> bool:
        """Whether its keys have 4 bits."""
        return bool(self.flags & UnitFlag.KEY4)


@dataclass(frozen=True)
class Segment(Record):
    """A run of groups of one format."""

    format: int = field_of("I")
    first_group: int = field_of("I")
    group_count: int = field_of("I")
    reserved: int = field_of("I")


@dataclass(frozen=True)
class Tensor(Record):
    """A tensor's place in WHOT; offsets count from the start of the file."""

    role: int = field_of("I")
    layer: int = field_of("i")
    seg_first: int = field_of("I")
    seg_count: int = field_of("I")
    rows: int = field_of("I")
    cols: int = field_of("I")
    rows_padded: int = field_of("I")
    cols_padded: int = field_of("I")
    slab_first: int = field_of("I")
    slab_count: int = field_of("I")
    parts: int = field_of("I", 1)
    reserved0: int = field_of("I")
    offset: int = field_of("Q")
    size: int = field_of("Q")
    second_offset: int = field_of("Q")
    second_size: int = field_of("Q")
    reserved: bytes = field_of("16s")


@dataclass(frozen=True)
class Plan(Record):
    """An arena buffer."""

    kind: int = field_of("I")
    first_op: int = field_of("I")
    last_op: int = field_of("I")
    reserved0: int = field_of("I")
    offset: int = field_of("Q")
    size: int = field_of("Q")
    reserved: bytes = field_of("16s")


@dataclass(frozen=True)
class Rope(Record):
    """A rotary table; `offset` counts from the start of the ROPE section."""

    pairs: int = field_of("I")
    positions: int = field_of("I")
    offset: int = field_of("Q")


@dataclass(frozen=True)
class Thermal(Record):
    """The thermal policy."""

    threshold_c: float = field_of("f")
    hysteresis_c: float = field_of("f")
    device_max_c: float = field_of("f")
    mode: int = field_of("I")
    reserved: bytes = field_of("48s")


class Mode(IntEnum):
    """How a ladder was made: throttle modes."""

    BALANCED = 0
    PERFORMANCE = 1
    AGGRESSIVE = 2
    CONSERVATIVE = 3
    SILENT = 4


@dataclass(frozen=True)
class Rung(Record):
    """A step of the ladder: thousandths of the time, the threads and the chunk as opened."""

    duty: int = field_of("H")
    threads: int = field_of("H")
    chunk: int = field_of("H")
    reserved: int = field_of("H")


@dataclass(frozen=True)
class Ladder(Record):
    """What a program that is told the temperature does; behind Thermal in the record of THRM."""

    mode: int = field_of("I")
    rung_count: int = field_of("I")
    engage_c: float = field_of("f")
    release_c: float = field_of("f")
    rise: int = field_of("I")
    fault: int = field_of("I")
    engage_ms: int = field_of("I")
    release_ms: int = field_of("I")
    stale_ms: int = field_of("I")
    rungs: bytes = field_of("64s")
    reserved: bytes = field_of("28s")

    def steps(self) -> tuple[Rung, ...]:
        """All eight rungs, those that are not used as well."""
        size = size_of(Rung)
        return tuple(Rung.unpack(self.rungs, size * i) for i in range(MAX_RUNGS))


@dataclass(frozen=True)
class TestVector(Record):
    """A prompt, the greedy tokens that follow, and the digest of their logits."""

    __test__ = False  # not a pytest class

    prompt_count: int = field_of("I")
    step_count: int = field_of("I")
    digest: int = field_of("Q")
    prompt: tuple[int, ...] = field_of("400I")
    steps: tuple[int, ...] = field_of("64I")
    reserved: bytes = field_of("176s")


@dataclass(frozen=True)
class Pin(Record):
    """The head of PINP, before the ids and the ring blocks of a pinned prompt."""

    tokens: int = field_of("I")
    reserved: bytes = field_of("60s")


@dataclass(frozen=True)
class Cold(Record):
    """A plane of a tensor that does not stay in memory."""

    tensor: int = field_of("I")
    plane: int = field_of("I")  # 0: its data, 1: its second plane
    by: int = field_of("I")
    reserved: int = field_of("I")


# What the sections that are arrays hold.
ARRAYS: dict[str, type[Record]] = {
    "CONF": Conf,
    "LAYR": Layer,
    "KVMK": KvUnit,
    "TENS": Tensor,
    "SEGM": Segment,
    "PLAN": Plan,
    "THRM": Thermal,
    "TEST": TestVector,
    "COLD": Cold,
}


def text_field(value: str, size: int) -> bytes:
    """A NUL-padded text field of `size` bytes; longer text is cut at a character."""
    raw = value.encode("utf-8")[:size]
    return raw.decode("utf-8", "ignore").encode("utf-8").ljust(size, b"\0")


def field_text(raw: bytes) -> str:
    """The text of a NUL-padded field."""
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")
