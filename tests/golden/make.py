"""Makes the golden artifacts: tiny models from hand-made records, by gemrun.format.writer alone.

    cd tests; python -m golden.make FOLDER    (writes v1.0/*.gembin and refused/*.gembin there)

Weights are random bytes of a fixed seed, tables are computed with + - * / alone, so the files are
the same on every machine. The committed ones are kept for ever: a reader of format 1 must go on to
accept, or refuse with the same code, each of them. `refused/<CODE>-<what>.gembin` names its code.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gemrun.format import assemble, manifest, pins, sizes, spec, writer
from gemrun.format.spec import (
    Conf,
    ConfFlag,
    Format,
    KvType,
    Layer,
    LayerFlag,
    Plan,
    Role,
    Segment,
    Tensor,
    Thermal,
)

VOCAB = 264
HIDDEN = 32


@dataclass(frozen=True)
class Kind:
    """What distinguishes the golden models."""

    name: str
    kv: KvType
    table: Format
    body: Format
    tied: bool
    sandwich: bool
    second: Format | None = None  # format of the second group of DOWN
    ffn: int = 64
    context: int = 64
    kv_heads: int = 1
    keeps: tuple[assemble.Keep, ...] = ()  # of every KV head, where one keeps a part
    value4: tuple[bool, ...] = ()  # of every KV head, where the values of one have 4 bits
    key4: tuple[bool, ...] = ()  # the same of keys
    prompt: int = 40  # ids of the second test vector
    pin: tuple[int, ...] = ()  # ids of a pinned prompt


INT4 = Kind("tiny-int4", KvType.INT8, Format.Q8_ROWS, Format.Q4H, True, True, Format.Q8)
FLOAT = Kind("tiny-f16", KvType.F32, Format.Q8_ROWS, Format.F16, True, False, ffn=16)
RAW = Kind("tiny-q4raw", KvType.F16, Format.Q8_ROWS, Format.Q4RAW_BF16, False, False, ffn=32)
# The second layer has a head that keeps 64 tokens, and one that keeps everything.
MASKED = Kind(
    "tiny-kvmask", KvType.INT8, Format.Q8_ROWS, Format.Q4H, True, False,
    context=160, kv_heads=2, keeps=((0, 0), (0, 0), (1, 1), (0, 0)), prompt=140,
)  # fmt: skip
# A prompt of 100 tokens is pinned: the window's ring of two blocks has gone on over its beginning.
PIN_TEXT = (
    "Conveyor seven halts as soon as a sensor on bay four reports a box; call dock two, "
    "and go on soon. "
)
PINNED = Kind(
    "tiny-pinned", KvType.INT8, Format.Q8_ROWS, Format.Q4H, True, False,
    context=160, kv_heads=2, prompt=140, pin=(VOCAB - 2, *PIN_TEXT.encode()),
)  # fmt: skip
# Values of 4 bits beside those of 8: in a window, and in a head that keeps a part.
VALUE4 = replace(
    MASKED, name="tiny-value4", kv_heads=2, value4=(False, True, True, False), prompt=141
)
# Keys of 4 bits: in a window, in a head that keeps a part with its values, and beside values alone.
KEY4 = replace(
    MASKED, name="tiny-key4", kv_heads=2, prompt=142,
    value4=(False, False, True, True), key4=(False, True, True, False),
)  # fmt: skip
KINDS = (INT4, FLOAT, RAW, MASKED, PINNED, VALUE4, KEY4)


@dataclass(frozen=True)
class Golden:
    """A model before its weights: records, and what draws the bytes of each tensor."""

    records: assemble.Records
    chunks: tuple[bytes, ...]  # WHOT, in order, gaps included


# ---- weights ----
def supers(rng: random.Random, rows: int, first: int, scale: float) -> bytes:
    """16 super-scales from row `first` on; padded rows have 0."""
    values = [scale * (0.5 + rng.getrandbits(8) / 256) for _ in range(16)]
    return struct.pack("<16f", *(v if first + i < rows else 0.0 for i, v in enumerate(values)))


def code_group(rng: random.Random, rows: int, first: int) -> bytes:
    """The 256 code bytes of one group; padded rows have codes 0."""
    raw = bytearray(rng.randbytes(256))
    for at in range(256):
        if first + at % 64 // 4 >= rows:
            raw[at] = 0
    return bytes(raw)


def superblock(rng: random.Random, fmt: int, groups: int, rows: int, first: int) -> bytes:
    """One superblock of a body format."""
    planes = 2 if fmt == Format.Q8 else 1
    out = b"".join(code_group(rng, rows, first) for _ in range(groups * planes))
    if fmt in (Format.Q4RAW_F16, Format.Q4RAW_BF16):
        one = b"\x80\x3d" if fmt == Format.Q4RAW_BF16 else b"\x00\x2c"  # 2^-4
        out += one * 16 * groups
    else:
        out += bytes(1 + b % 255 for b in rng.randbytes(16 * groups))
        if fmt == Format.Q4H:
            out += bytes(112 + b % 32 for b in rng.randbytes(16 * groups))
    return out.ljust(sizes.pad(len(out), spec.LINE), b"\0")


def panel(rng: random.Random, tensor: Tensor, own: list[Segment], first: int) -> bytes:
    """One panel of 16 rows of a matrix, Q8_ROWS apart."""
    fmt = own[0].format
    if fmt in (Format.F32, Format.F16):
        real = [first + i < tensor.rows for i in range(16)]
        values = [
            (rng.getrandbits(8) / 256 - 0.5) * 2 if real[i % 16] else 0.0
            for i in range(16 * tensor.cols)
        ]
        raw = struct.pack(f"<{len(values)}{'f' if fmt == Format.F32 else 'e'}", *values)
        return raw.ljust(sizes.pad(len(raw), spec.LINE), b"\0")
    if fmt in (Format.Q4RAW_F16, Format.Q4RAW_BF16):
        out = struct.pack("<16f", *(0.0625 * (first + i < tensor.rows) for i in range(16)))
    else:
        out = supers(rng, tensor.rows, first, 2.0**-16)
    for segment in own:
        left = segment.group_count
        while left:
            count = min(left, spec.SUPERBLOCK)
            out += superblock(rng, segment.format, count, tensor.rows, first)
            left -= count
    return out


def tensor_bytes(rng: random.Random, tensor: Tensor, own: list[Segment]) -> tuple[bytes, bytes]:
    """Data and second plane of a tensor."""
    fmt = own[0].format
    if fmt == Format.VECTOR:
        bias = tensor.role in (Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS)
        post = tensor.role in (Role.POST_ATTN_NORM, Role.POST_FFN_NORM)
        base, unit = (-0.5 if bias else 0.5), (4 if post else 1)
        values = [unit * (rng.getrandbits(8) / 256 + base) for _ in range(tensor.cols)]
        raw = struct.pack(f"<{len(values)}f", *values)
        return raw.ljust(sizes.pad(len(raw), spec.LINE), b"\0"), b""
    firsts = [f for f in range(0, tensor.rows_padded, 16) for _ in range(tensor.parts)]
    if fmt != Format.Q8_ROWS:
        return b"".join(panel(rng, tensor, own, f) for f in firsts), b""
    groups = sizes.groups_of(tensor.cols)
    high, low = b"", b""
    for first in firsts:
        high += supers(rng, tensor.rows, first, 2.0**-9)
        high += b"".join(code_group(rng, tensor.rows, first) for _ in range(groups))
        low += b"".join(code_group(rng, tensor.rows, first) for _ in range(groups))
    return high, low


# ---- records ----
def layer_record(kind: Kind, index: int) -> Layer:
    """The first layer has a window, the second sees everything."""
    flags = LayerFlag.QK_NORM | LayerFlag.ATTN_SOFTCAP if kind.sandwich else LayerFlag.QKV_BIAS
    return Layer(
        flags=int(flags),
        heads=2,
        kv_heads=kind.kv_heads,
        head_dim=16,
        ffn=kind.ffn,
        rope=index if kind.sandwich else 0,
        window=16 if index == 0 else 0,
        block=int(spec.Block.SANDWICH if kind.sandwich else spec.Block.PRE),
        act=int(spec.Act.GELU_TANH if kind.sandwich else spec.Act.SILU),
        score_scale=0.25,
        attn_softcap=50.0 if kind.sandwich else 0.0,
        kv_group=16 if kind.kv == KvType.INT8 else 0,
    )


class Stream:
    """Collects TENS and SEGM in execution order."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.segments: list[Segment] = []

    def add(
        self, role: Role, layer: int, rows: int, cols: int, *formats: tuple[int, int], slab: int = 0
    ) -> None:
        """Append a tensor; `formats` are (format, groups)."""
        vector = formats[0][0] == Format.VECTOR
        first, group = len(self.segments), 0
        for fmt, count in formats:
            self.segments.append(Segment(format=fmt, first_group=group, group_count=count))
            group += count
        self.tensors.append(
            Tensor(
                role=int(role),
                layer=layer,
                seg_first=first,
                seg_count=len(formats),
                rows=rows,
                cols=cols,
                rows_padded=1 if vector else sizes.pad(rows, 16),
                cols_padded=cols if vector else sizes.pad(cols, 32),
                slab_count=slab,
                parts=2 if role == Role.GATE_UP else 1,
            )
        )

    def vector(self, role: Role, layer: int, cols: int) -> None:
        """Append a norm or bias."""
        self.add(role, layer, 1, cols, (Format.VECTOR, sizes.groups_of(cols)))

    def matrix(
        self, role: Role, layer: int, rows: int, cols: int, fmt: Format, slab: int = 0
    ) -> None:
        """Append a matrix of one format."""
        self.add(role, layer, rows, cols, (fmt, sizes.groups_of(cols)), slab=slab)


def add_layer(stream: Stream, kind: Kind, index: int, layer: Layer) -> None:
    """A layer's tensors in execution order."""
    q, kv = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
    stream.vector(Role.ATTN_NORM, index, HIDDEN)
    stream.matrix(Role.Q, index, q, HIDDEN, kind.body, layer.heads)
    stream.matrix(Role.K, index, kv, HIDDEN, kind.body, layer.kv_heads)
    stream.matrix(Role.V, index, kv, HIDDEN, kind.body, layer.kv_heads)
    if layer.flags & LayerFlag.QKV_BIAS:
        stream.vector(Role.Q_BIAS, index, q)
        stream.vector(Role.K_BIAS, index, kv)
        stream.vector(Role.V_BIAS, index, kv)
    if layer.flags & LayerFlag.QK_NORM:
        stream.vector(Role.Q_NORM, index, layer.head_dim)
        stream.vector(Role.K_NORM, index, layer.head_dim)
    stream.matrix(Role.O, index, HIDDEN, q, kind.body, layer.heads)
    if kind.sandwich:
        stream.vector(Role.POST_ATTN_NORM, index, HIDDEN)
    stream.vector(Role.FFN_NORM, index, HIDDEN)
    stream.matrix(Role.GATE_UP, index, layer.ffn, HIDDEN, kind.body)
    if kind.second is not None:
        stream.add(Role.DOWN, index, HIDDEN, layer.ffn, (kind.body, 1), (kind.second, 1))
    else:
        stream.matrix(Role.DOWN, index, HIDDEN, layer.ffn, kind.body)
    if kind.sandwich:
        stream.vector(Role.POST_FFN_NORM, index, HIDDEN)


def rope_table(pairs: int, positions: int) -> bytes:
    """Angles position * 2^-pair, by Taylor sums: no libm, so the same bytes everywhere."""
    out = b""
    for position in range(positions):
        angles = [position * 2.0**-i for i in range(pairs)]
        out += struct.pack(f"<{pairs}f", *(wave(a, 0) for a in angles))
        out += struct.pack(f"<{pairs}f", *(wave(a, 1) for a in angles))
    return out


def wave(angle: float, odd: int) -> float:
    """cos (odd 0) or sin (odd 1)."""
    x = math.fmod(angle, 6.283185307179586)
    term, total = (x if odd else 1.0), 0.0
    for n in range(odd, 60, 2):
        total += term
        term = -term * x * x / ((n + 1) * (n + 2))
    return max(-1.0, min(1.0, total))


def plans_of(conf: Conf, layers: list[Layer], stream: Stream) -> list[Plan]:
    """No sharing: one buffer after the other."""
    at, out = 0, []
    wanted = sizes.buffer_sizes(conf, layers, stream.tensors, stream.segments)
    for buffer, size in wanted.items():
        first, last = sizes.LIFETIMES[buffer]
        out.append(Plan(kind=buffer, first_op=first, last_op=last, offset=at, size=size))
        at += size
    return out


def tokenizer() -> bytes:
    """Bytes 0..255, three merges, an unused row, and two control tokens at the end."""
    none = 0xFFFFFFFF
    merged = [b"th", b"in", b"the"]
    pieces = [bytes([b]) for b in range(256)] + merged
    pieces += [b""] * (VOCAB - 2 - len(pieces)) + [b"<bos>", b"<end>"]
    flags = bytes(9 if i >= VOCAB - 2 else 0 if piece else 4 for i, piece in enumerate(pieces))
    rules = [(ord("t"), ord("h"), 256), (ord("i"), ord("n"), 257), (256, ord("e"), 258)]
    ranked = sorted((a, b << 44 | new << 24 | rank) for rank, (a, b, new) in enumerate(rules))
    starts = [sum(left < i for left, _ in ranked) for i in range(VOCAB + 1)]
    lengths = [len(p) for p in pieces]
    blocks = [sum(lengths[:i]) for i in range(0, VOCAB, 32)]
    nodes, edges = trie({pieces[i]: i for i in (VOCAB - 2, VOCAB - 1)})
    head = [2, 1, VOCAB, VOCAB - 2, none, sum(lengths), len(rules), 0, 0, len(nodes) // 2, 1]
    tables = [
        struct.pack("<24I", *head, *[0] * 13),
        struct.pack(f"<{len(ranked)}Q", *(entry for _, entry in ranked)),
        words(starts),
        words(blocks),
        bytes(lengths),
        flags,
        b"".join(pieces),
        words(list(range(256))),
        words(nodes),
        edges,
        words([VOCAB - 1]),
    ]
    return b"".join(t.ljust(sizes.pad(len(t), 8), b"\0") for t in tables)


def words(values: list[int]) -> bytes:
    """Numbers as u32."""
    return struct.pack(f"<{len(values)}I", *values)


def trie(entries: dict[bytes, int]) -> tuple[list[int], bytes]:
    """Breadth-first nodes (first edge, id) and edges of a trie."""
    none = 0xFFFFFFFF
    level, nodes, edges = [b""], [], b""
    while level:
        below: list[bytes] = []
        for prefix in level:
            nodes += [len(edges), entries.get(prefix, none)]
            n = len(prefix)
            nexts = sorted({key[n] for key in entries if key.startswith(prefix) and len(key) > n})
            edges += bytes(nexts)
            below += [prefix + bytes([byte]) for byte in nexts]
        level = below
    return nodes, edges


def template() -> bytes:
    """Users and assistants alternate, with line ends between; the first turn starts with bos."""
    none = 0xFFFFFFFF
    bos, end = VOCAB - 2, VOCAB - 1
    slots: list[list[int | bytes]] = [
        [bos, b"user\n"],
        [],
        [],
        [end, b"\nmodel\n"],
        [end, b"\nuser\n"],
        [end, b"\nmodel\n"],
        [end, b"\n"],
        [end, b"\n"],
        [],
    ]
    items, text, starts = b"", b"", [0]
    for slot in slots:
        for item in slot:
            literal = isinstance(item, bytes)
            items += struct.pack("<II", none if literal else item, len(item) if literal else 0)
            text += item if isinstance(item, bytes) else b""
        starts.append(len(items) // 8)
    head = struct.pack("<3I10I3I", 30, len(items) // 8, len(text), *starts, 0, 0, 0)
    return head + items + text.ljust(sizes.pad(len(text), 8), b"\0")


def hdf() -> tuple[bytes, bytes]:
    """A small hardware description in canonical form, and its hash without the policy."""
    table = {
        "board": "generic-x86-64",
        "cpu": {"cluster": [{"id": "c0", "kind": "uniform", "line_bytes": 64}]},
        "hdf_version": "1.0",
        "id": "generic-x86-64",
        "policy": {
            "hysteresis_c": 5.0,
            "ram_fraction": 0.65,
            "reserve_mib": 256,
            "threads": "auto",
        },
        "target": {"arch": "x86_64", "os": "linux"},
    }
    whole = json.dumps(table, sort_keys=True, separators=(",", ":")).encode()
    table.pop("policy")
    bound = json.dumps(table, sort_keys=True, separators=(",", ":")).encode()
    return whole, hashlib.sha256(bound).digest()


def conf_of(kind: Kind, stream: Stream) -> Conf:
    """CONF; indices of the model's own tensors are looked up in the stream."""
    roles = [t.role for t in stream.tensors]
    head = roles.index(Role.HEAD)
    flags = ConfFlag.FINAL_SOFTCAP if kind.sandwich else ConfFlag(0)
    return Conf(
        layer_count=2,
        hidden=HIDDEN,
        vocab_rows=VOCAB,
        rope_count=2 if kind.sandwich else 1,
        context=kind.context,
        trained_context=128,
        chunk=16,
        threads=2,
        kv_type=int(kind.kv),
        flags=int(flags | (ConfFlag.TIED if kind.tied else ConfFlag(0))),
        tens_embed=head if kind.tied else 0,
        tens_head=head,
        tens_final_norm=roles.index(Role.FINAL_NORM),
        norm_eps=1e-6,
        embed_scale=5.65685415 if kind.sandwich else 1.0,
        final_softcap=30.0 if kind.sandwich else 0.0,
        text_limit=sizes.text_limit(kind.context),
        family=spec.text_field("gemma3" if kind.sandwich else "qwen2", 16),
        name=spec.text_field(kind.name, 64),
    )


def build(kind: Kind, tests: bytes | None = None) -> Golden:
    """All of a golden model; `tests` are its TEST records, blank ones by default."""
    stream = Stream()
    if not kind.tied:
        stream.matrix(Role.EMBED, -1, VOCAB, HIDDEN, kind.table)
    layers = [layer_record(kind, i) for i in range(2)]
    for index, layer in enumerate(layers):
        first = len(stream.tensors)
        add_layer(stream, kind, index, layer)
        count = len(stream.tensors) - first
        layers[index] = replace(layer, tens_first=first, tens_count=count)
    stream.vector(Role.FINAL_NORM, -1, HIDDEN)
    stream.matrix(Role.HEAD, -1, VOCAB, HIDDEN, kind.table)
    conf = conf_of(kind, stream)
    placed, size = assemble.place_tensors(stream.tensors, stream.segments)
    placed_layers, units = assemble.place_units(conf, layers, kind.keeps, kind.value4, kind.key4)
    rings = list(placed_layers)
    table = (8, kind.context, rope_table(8, kind.context))
    canonical, digest = hdf()
    entries = [
        manifest.tensor_entry(f"t{i}.{Role(t.role).name.lower()}", t, stream.segments)
        for i, t in enumerate(placed)
    ]
    records = assemble.Records(
        conf=conf,
        layers=rings,
        tensors=placed,
        segments=stream.segments,
        plans=plans_of(conf, rings, stream),
        rope=assemble.rope_section([table] * conf.rope_count),
        tokn=tokenizer(),
        tmpl=template() if kind.sandwich else None,
        thermal=Thermal(threshold_c=75.0, hysteresis_c=5.0, device_max_c=70.0),
        tests=tests if tests is not None else writer.blank_tests(2),
        hdf=canonical,
        hdf_sha256=digest,
        manifest=manifest.encode(
            manifest.build(
                conf,
                rings,
                entries,
                licence="Apache-2.0",
                tools={"golden": "1"},
                units=units,
                options=pins.Pinned(kind.pin).option if kind.pin else {},
            )
        ),
        weights_size=size,
        target="generic-x86-64",
        isa=int(spec.Isa.X86_64),
        units=units,
        pin=pins.blank(conf, rings, units, kind.pin) if kind.pin else b"",
    )
    return Golden(records, tuple(weights(placed, stream.segments, kind.name)))


def weights(placed: tuple[Tensor, ...], segments: list[Segment], seed: str) -> list[bytes]:
    """WHOT as chunks: every tensor behind the zeros that bring it to its place."""
    rng, at, out = random.Random(seed), 0, []
    for tensor in placed:
        own = list(sizes.segments_of(tensor, segments))
        for offset, data in zip(
            (tensor.offset, tensor.second_offset), tensor_bytes(rng, tensor, own), strict=True
        ):
            if data:
                out += [bytes(offset - at), data]
                at = offset + len(data)
    return out


def write(
    golden: Golden,
    path: Path,
    fill: Callable[[Path], bytes] | None = None,
    pin: Callable[[Path], bytes] | None = None,
) -> writer.Written:
    """Write a golden model; `fill` makes the TEST records from the sealed file, `pin` PINP."""
    done = assemble.assemble(golden.records)
    with writer.ArtifactWriter(path, done.header, done.parts) as out:
        for chunk in golden.chunks:
            out.write_weights(chunk)
        if fill is not None:
            out.seal()
            out.fill("TEST", fill(Path(out.partial)))
        if pin is not None:
            out.seal()
            out.fill(pins.NAME, pin(Path(out.partial)))
        return out.finish()


def run_tests(image: Path, prompt: int = 40) -> bytes:
    """TEST records as the engine makes them; the second has a prompt of so many ids."""
    from gemrun import GemRunContext

    out = b""
    with GemRunContext(image, threads=1, ignore_memory=True) as engine:
        for given in ([VOCAB - 2, 116, 104, 101], list(range(prompt))):
            digest, ids = engine.test_vector(given, 8)
            out += spec.TestVector(
                prompt_count=len(given),
                step_count=len(ids),
                digest=digest,
                prompt=tuple(given) + (0,) * (spec.TEST_PROMPT - len(given)),
                steps=tuple(ids) + (0,) * (spec.TEST_STEPS - len(ids)),
            ).pack()
    return out


def run_pin(image: Path, ids: tuple[int, ...]) -> bytes:
    """PINP as the engine makes it."""
    from gemrun import GemRunContext
    from gemrun.hooks import ring_blocks

    with GemRunContext(image, threads=1, ignore_memory=True) as engine:
        engine.prefill(ids)
        return pins.section(ids, ring_blocks(engine))


def main() -> None:
    """Write all golden files below the folder that is named."""
    from golden.refused import write_refused

    folder = Path(sys.argv[1])
    good = folder / "v1.0"
    good.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        fill = partial(run_tests, prompt=kind.prompt)
        pin = partial(run_pin, ids=kind.pin) if kind.pin else None
        write(build(kind), good / f"{kind.name}.gembin", fill, pin)
    write_refused(good, folder / "refused")


if __name__ == "__main__":
    main()
