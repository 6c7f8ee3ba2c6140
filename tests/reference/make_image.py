"""A random artifact of any shape, written from csrc/FORMAT.md with struct and NumPy alone.

It is not a model: weights are random bytes of every format, so that a difference in unpacking or in
an order of operations shows. It also gives the readers files that gemmake did not write.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from reference import formats as fmt
from reference import records as rec
from reference.formats import pad

Formats = Sequence[tuple[int, int]]  # (format, groups); groups 0: all of them
MAGIC = b"\x8bGEM\r\n\x1a\n"
OPS = {"TOK": 0, "EMBED": 1, "QKV": 2, "ATTN": 3, "O": 4, "GATE_UP": 5, "DOWN": 6, "HEAD": 7}
SAMPLE = 8
FLOATS = (fmt.F32_PANELS, fmt.F16_PANELS)
FEATURE = {
    fmt.Q4H: 2, fmt.Q4RAW_F16: 4, fmt.Q4RAW_BF16: 4, fmt.Q8: 8, fmt.Q8_ROWS: 8,
    fmt.F32_PANELS: 16, fmt.F16_PANELS: 16,
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer of a made-up model. `formats` names matrices by role; others take `default`."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 160
    window: int = 0
    rope: int = 0
    sandwich: bool = False
    silu: bool = False
    attn_softcap: float = 0.0
    qk_norm: bool = False
    bias: bool = False
    kv_group: int = 32
    q_slabs: tuple[int, ...] = ()  # heads of each Q record; empty: one record
    units: tuple[tuple[int, int], ...] = ()  # (sink, recent) of each KV head; empty: keep all
    value4: tuple[bool, ...] = ()  # values of each KV head have 4 bits; empty: none
    key4: tuple[bool, ...] = ()  # keys likewise
    default: Formats = ((fmt.Q4H, 0),)
    formats: Mapping[int, Formats] = field(default_factory=dict)
    gains: Mapping[int, float] = field(default_factory=dict)  # by role: factor of super-scales


@dataclass(frozen=True)
class Shape:
    """A made-up model."""

    layers: tuple[Layer, ...]
    hidden: int = 64
    vocab: int = 200
    context: int = 64
    chunk: int = 16
    threads: int = 2
    kv_type: int = rec.KV_INT8
    tied: bool = True
    table: int = fmt.Q8_ROWS  # format of embedding and head
    final_softcap: float = 0.0
    embed_scale: float = 1.0
    norm_eps: float = 1e-6


@dataclass
class Tensor:
    """A TENS record before it has a place."""

    role: int
    layer: int
    rows: int
    cols: int
    segments: list[tuple[int, int]]  # (format, groups), groups filled in
    data: bytes
    second: bytes = b""
    parts: int = 1
    slab: tuple[int, int] = (0, 0)


Real = npt.NDArray[np.bool_]  # [panels, 16]: rows that are not padding


class Maker:
    """Draws the numbers of an artifact; one instance makes one."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self._gain = 1.0  # of the matrix that is being made
        self.rng = np.random.default_rng(seed)

    # ---- matrices ----

    def _bytes(self, *size: int) -> npt.NDArray[np.uint8]:
        return self.rng.integers(0, 256, size, dtype=np.uint8)

    def _supers(self, real: Real, cols: int, unit: float) -> npt.NDArray[np.uint8]:
        """16 super-scales a panel such that outputs have a size near 1."""
        values = self.rng.uniform(0.5, 1.5, real.shape) * self._gain / (unit * np.sqrt(cols))
        scales: npt.NDArray[np.uint8] = (values * real).astype("<f4").view(np.uint8)
        return scales

    def _codes(self, real: Real, planes: int, inputs: range) -> npt.NDArray[np.uint8]:
        """[panels, 256 * planes a group]; `inputs` are the group's first and the matrix' end."""
        count = len(inputs)
        lines = self._bytes(real.shape[0], count, planes, 4, 16, 4)
        lines *= real[:, None, None, None, :, None].astype(np.uint8)
        at = np.arange(4)[:, None, None] * 4 + np.arange(4)  # input of a low nibble [line, 1, k]
        for group, first in enumerate(inputs):
            left = inputs.stop - first
            keep = (at < left) * 15 + (at + 16 < left) * 240
            lines[:, group] &= keep.astype(np.uint8)
        return lines.reshape(real.shape[0], -1)

    def _superblock(self, kind: int, real: Real, inputs: range) -> list[npt.NDArray[np.uint8]]:
        panels, count = real.shape[0], len(inputs)
        codes = self._codes(real, 2 if kind == fmt.Q8 else 1, inputs)
        if kind in (fmt.Q4RAW_F16, fmt.Q4RAW_BF16):
            scale = self.rng.uniform(0.02, 0.06, (panels, 16 * count)).astype(np.float32)
            if kind == fmt.Q4RAW_F16:
                meta = scale.astype("<f2").view(np.uint8)
            else:
                meta = (scale.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
            parts = [codes, meta]
        else:
            parts = [codes, self._bytes(panels, 16 * count)]
            if kind == fmt.Q4H:
                parts.append(self._bytes(panels, 16 * count))
        size = sum(p.shape[1] for p in parts)
        parts.append(np.zeros((panels, pad(size, 64) - size), np.uint8))
        return parts

    def _matrix(self, rows: int, cols: int, want: Formats, parts: int) -> tuple[Any, bytes, bytes]:
        """Segments, data and second plane of a matrix."""
        panels = parts * pad(rows, 16) // 16
        groups = pad(cols, 32) // 32
        real = np.arange(pad(rows, 16)).reshape(-1, 16) < rows
        real = np.repeat(real, parts, axis=0)  # [panels, 16]
        kinds = [(kind, count or groups) for kind, count in want]
        kind = kinds[0][0]
        if kind in FLOATS:
            values = self.rng.standard_normal((panels, cols, 16)) * self._gain / np.sqrt(cols)
            values = (values * real[:, None]).reshape(panels, -1)
            raw = values.astype("<f4" if kind == fmt.F32_PANELS else "<f2").view(np.uint8)
            tail = np.zeros((panels, pad(raw.shape[1], 64) - raw.shape[1]), np.uint8)
            return kinds, np.concatenate([raw, tail], axis=1).tobytes(), b""
        if kind == fmt.Q8_ROWS:
            inputs = range(0, cols, 32)
            high = [self._supers(real, cols, 74.0), self._codes(real, 1, inputs)]
            low = self._codes(real, 1, inputs)
            return kinds, np.concatenate(high, axis=1).tobytes(), low.tobytes()
        raw_only = kind in (fmt.Q4RAW_F16, fmt.Q4RAW_BF16)
        pieces = [self._supers(real, cols, 128.0 * 74.0)]
        if raw_only:
            pieces = [(real / 16).astype("<f4").view(np.uint8)]
        at = 0  # groups so far
        for segment, total in kinds:
            for first in range(at, at + total, 8):
                last = min(first + 8, at + total)
                inputs = range(32 * first, min(32 * last, cols), 32)
                pieces += self._superblock(segment, real, inputs)
            at += total
        return kinds, np.concatenate(pieces, axis=1).tobytes(), b""

    def matrix(
        self,
        role: int,
        layer: int,
        rows: int,
        cols: int,
        want: Formats,
        parts: int = 1,
        slab: tuple[int, int] = (0, 0),
    ) -> Tensor:
        self._gain = self.shape.layers[layer].gains.get(role, 1.0) if layer >= 0 else 1.0
        kinds, data, second = self._matrix(rows, cols, want, parts)
        return Tensor(role, layer, rows, cols, kinds, data, second, parts, slab)

    def vector(self, role: int, layer: int, size: int, centre: float = 1.0) -> Tensor:
        values = (centre + 0.3 * self.rng.standard_normal(size)).astype("<f4").tobytes()
        data = values + bytes(pad(len(values), 64) - len(values))
        groups = pad(size, 32) // 32
        return Tensor(role, layer, 1, size, [(fmt.VECTOR, groups)], data)

    def layer(self, index: int, spec: Layer) -> list[Tensor]:
        """A layer's records in execution order."""
        hidden, dim = self.shape.hidden, spec.head_dim
        rows, kv_rows = spec.heads * dim, spec.kv_heads * dim

        def want(role: int) -> Formats:
            return spec.formats.get(role, spec.default)

        out = [self.vector(rec.ROLE_ATTN_NORM, index, hidden)]
        first = 0
        for count in spec.q_slabs or (spec.heads,):
            slab = (first, count)
            kinds = want(rec.ROLE_Q)
            out.append(self.matrix(rec.ROLE_Q, index, count * dim, hidden, kinds, slab=slab))
            first += count
        for role in (rec.ROLE_K, rec.ROLE_V):
            kinds = want(role)
            slab = (0, spec.kv_heads)
            out.append(self.matrix(role, index, kv_rows, hidden, kinds, slab=slab))
        if spec.bias:
            out.append(self.vector(rec.ROLE_Q_BIAS, index, rows, 0.0))
            out.append(self.vector(rec.ROLE_K_BIAS, index, kv_rows, 0.0))
            out.append(self.vector(rec.ROLE_V_BIAS, index, kv_rows, 0.0))
        if spec.qk_norm:
            out += [self.vector(role, index, dim) for role in (rec.ROLE_Q_NORM, rec.ROLE_K_NORM)]
        slab = (0, spec.heads)
        out.append(self.matrix(rec.ROLE_O, index, hidden, rows, want(rec.ROLE_O), slab=slab))
        if spec.sandwich:
            out.append(self.vector(rec.ROLE_POST_ATTN_NORM, index, hidden))
        out.append(self.vector(rec.ROLE_FFN_NORM, index, hidden))
        gate_up = want(rec.ROLE_GATE_UP)
        out.append(self.matrix(rec.ROLE_GATE_UP, index, spec.ffn, hidden, gate_up, parts=2))
        out.append(self.matrix(rec.ROLE_DOWN, index, hidden, spec.ffn, want(rec.ROLE_DOWN)))
        if spec.sandwich:
            out.append(self.vector(rec.ROLE_POST_FFN_NORM, index, hidden))
        return out

    def tensors(self) -> list[Tensor]:
        shape = self.shape
        table = ((shape.table, 0),)
        size = (shape.vocab, shape.hidden)
        out = [] if shape.tied else [self.matrix(rec.ROLE_EMBED, -1, *size, table)]
        for index, spec in enumerate(shape.layers):
            out += self.layer(index, spec)
        out.append(self.vector(rec.ROLE_FINAL_NORM, -1, shape.hidden))
        out.append(self.matrix(rec.ROLE_HEAD, -1, *size, table))
        return out


# ---- the tokenizer ----


def byte_tokenizer(vocab: int) -> bytes:
    """A TOKN section without merges: id i is byte i, the last id is a stop and control token."""
    none = 0xFFFFFFFF
    stop = vocab - 1
    ids = np.arange(vocab)
    plain = (ids < 256) & (ids < stop)
    length = plain.astype(np.uint8)
    flags = np.where(ids == stop, 1, np.where(plain, 0, 4)).astype(np.uint8)
    pieces = bytes(range(int(plain.sum())))
    blocks = np.array([length[:i].sum() for i in range(0, vocab, 32)], "<u4")
    byte_id = np.where(np.arange(256) < len(pieces), np.arange(256), none).astype("<u4")
    kind, counts = 2, {"n_node": 1, "n_stop": 1}
    names = [
        "merge",
        "char",
        "whole",
        "node",
        "stop",
        "stage",
        "class",
        "range",
        "cell",
        "decomp",
        "decomp_cp",
        "comp",
        "ccc",
    ]
    head = [kind, 0, vocab, none, none, len(pieces)] + [counts.get(f"n_{n}", 0) for n in names]
    tables = [
        np.array(head + [0] * 5, "<u4").tobytes(),
        np.zeros(vocab + 1, "<u4").tobytes(),  # no merges of any left id
        blocks.tobytes(),
        length.tobytes(),
        flags.tobytes(),
        pieces,
        byte_id.tobytes(),
        np.array([0, none], "<u4").tobytes(),  # the root of the trie of added tokens
        np.array([stop], "<u4").tobytes(),
    ]
    return b"".join(t + bytes(pad(len(t), 8) - len(t)) for t in tables)


# ---- records ----


def _record(dtype: np.dtype[Any], **values: Any) -> Any:
    row = np.zeros((), dtype)
    for name, value in values.items():
        row[name] = value
    return row


def _text(value: str, size: int) -> bytes:
    return value.encode("ascii").ljust(size, b"\0")


def place(tensors: Sequence[Tensor], start: int) -> tuple[Any, Any, bytes]:
    """TENS and SEGM records and the bytes of WHOT, which starts at `start`."""
    rows: list[Any] = []
    segments: list[Any] = []
    data = bytearray()

    def put(piece: bytes) -> int:
        data.extend(bytes(pad(len(data), 256) - len(data)))
        data.extend(piece)
        return start + len(data) - len(piece)

    for t in tensors:
        vector = t.segments[0][0] == fmt.VECTOR
        first = len(segments)
        group = 0
        for kind, count in t.segments:
            row = _record(rec.SEGMENT, format=kind, first_group=group, group_count=count)
            segments.append(row)
            group += count
        offset = put(t.data)
        second = put(t.second) if t.second else 0
        rows.append(
            _record(
                rec.TENSOR, role=t.role, layer=t.layer, seg_first=first, seg_count=len(t.segments),
                rows=t.rows, cols=t.cols, rows_padded=1 if vector else pad(t.rows, 16),
                cols_padded=t.cols if vector else pad(t.cols, 32), slab_first=t.slab[0],
                slab_count=t.slab[1], parts=t.parts, offset=offset, size=len(t.data),
                second_offset=second, second_size=len(t.second),
            )
        )  # fmt: skip
    return np.array(rows, rec.TENSOR), np.array(segments, rec.SEGMENT), bytes(data)


def _kv_block(kv_type: int, spec: Layer, flags: int = 0) -> int:
    if flags:
        halves = 4 - flags.bit_count()
        return 32 * (halves * spec.head_dim // 2 + 4 * (spec.head_dim // spec.kv_group))
    if kv_type == rec.KV_INT8:
        return pad(64 * (spec.head_dim + 2 * (spec.head_dim // spec.kv_group)), 64)
    return pad(64 * spec.head_dim * (4 if kv_type == rec.KV_F32 else 2), 64)


def _blocks(shape: Shape, spec: Layer) -> int:
    every = pad(shape.context, 32) // 32
    return min(pad(spec.window, 32) // 32 + 1, every) if spec.window else every


def _units(shape: Shape) -> Any:
    """KVMK: there as soon as a layer names units. With codes of 4 bits `first` counts lines."""
    rows = []
    lines = any(any(spec.value4 + spec.key4) for spec in shape.layers)
    masked = lines or any(spec.units for spec in shape.layers)
    for spec in shape.layers if masked else ():
        first = 0
        keeps = spec.units or ((0, 0),) * spec.kv_heads
        none = (False,) * spec.kv_heads
        for (sink, recent), value4, key4 in zip(
            keeps, spec.value4 or none, spec.key4 or none, strict=True
        ):
            blocks, flags = sink + recent + 1 if recent else _blocks(shape, spec), value4 + 2 * key4
            unit = {"sink": sink, "recent": recent, "flags": flags, "blocks": blocks}
            rows.append(_record(rec.UNIT, first=first, **unit))
            first += blocks * _kv_block(shape.kv_type, spec, flags) // 64 if lines else blocks
    return np.array(rows, rec.UNIT)


def _layers(shape: Shape, tensors: Sequence[Tensor]) -> Any:
    rows, offset, units, count = [], 0, _units(shape), 0
    for index, spec in enumerate(shape.layers):
        tens = [i for i, t in enumerate(tensors) if t.layer == index]
        blocks = _blocks(shape, spec)
        size = spec.kv_heads * blocks * _kv_block(shape.kv_type, spec)
        if len(units):
            own = units[count : count + spec.kv_heads]
            size = sum(
                int(u["blocks"]) * _kv_block(shape.kv_type, spec, int(u["flags"])) for u in own
            )
        flags = rec.LAYERF_QK_NORM * spec.qk_norm | rec.LAYERF_QKV_BIAS * spec.bias
        flags |= rec.LAYERF_ATTN_SOFTCAP * bool(spec.attn_softcap)
        rows.append(
            _record(
                rec.LAYER, flags=flags, heads=spec.heads, kv_heads=spec.kv_heads,
                head_dim=spec.head_dim, ffn=spec.ffn, rope=spec.rope, window=spec.window,
                block=int(spec.sandwich), act=int(spec.silu), score_scale=spec.head_dim**-0.5,
                attn_softcap=spec.attn_softcap, kv_source=index,
                kv_group=spec.kv_group if shape.kv_type == rec.KV_INT8 else 0,
                kv_offset=offset, kv_size=size, kv_blocks=blocks, tens_first=tens[0],
                tens_count=len(tens), unit_first=count if len(units) else 0,
            )
        )  # fmt: skip
        offset += size
        count += spec.kv_heads
    return np.array(rows, rec.LAYER)


def _act_size(chunk: int, width: int, consumers: Sequence[Tensor]) -> int:
    kinds = {kind in FLOATS for t in consumers for kind, _ in t.segments}
    size = 0
    if False in kinds:
        groups = pad(width, 32) // 32
        size += pad(chunk * pad(width, 32), 64) + 2 * pad(4 * chunk * groups, 64)
    return size + (pad(4 * chunk * width, 64) if True in kinds else 0)


def _kv_scratch(shape: Shape, spec: Layer) -> int:
    wide = spec.kv_heads * spec.head_dim
    if shape.kv_type == rec.KV_INT8:
        scales = 2 * shape.chunk * (wide // spec.kv_group)
        return 2 * pad(shape.chunk * wide, 64) + 2 * pad(scales, 64)
    return 2 * pad((4 if shape.kv_type == rec.KV_F32 else 2) * shape.chunk * wide, 64)


def _plan(shape: Shape, tensors: Sequence[Tensor]) -> Any:
    """Every buffer has a place of its own: correct, and larger than gemmake's plan."""
    chunk, context = shape.chunk, shape.context
    vocab32 = pad(shape.vocab, 32)
    widest = max(s.heads * s.head_dim for s in shape.layers)
    ffn = max(s.ffn for s in shape.layers)

    def of(*roles: int) -> list[Tensor]:
        return [t for t in tensors if t.role in roles]

    xn = of(rec.ROLE_Q, rec.ROLE_K, rec.ROLE_V, rec.ROLE_GATE_UP, rec.ROLE_HEAD)
    q = 4 * chunk * widest
    if shape.kv_type == rec.KV_INT8:
        scales = max(s.heads * s.head_dim // s.kv_group for s in shape.layers)
        q = pad(chunk * widest, 64) + pad(4 * chunk * scales, 64)
    wide, last = (OPS["TOK"], SAMPLE), (SAMPLE, SAMPLE)
    buffers: list[tuple[int, tuple[int, int]]] = [
        (4 * chunk * shape.hidden, (1, 7)),
        (_act_size(chunk, shape.hidden, xn), (1, 7)),
        (q, (2, 3)),
        (max(_kv_scratch(shape, s) for s in shape.layers), (2, 3)),
        (_act_size(chunk, widest, of(rec.ROLE_O)), (3, 4)),
        (8 * 4 * context, (3, 3)),
        (4 * chunk * shape.hidden, (4, 6)),
        (_act_size(chunk, ffn, of(rec.ROLE_DOWN)), (5, 6)),
        (4 * vocab32, wide),
        (4 * vocab32, last),
        (vocab32 // 8, last),
        (4 * context, wide),
        (4 * (context + 1), wide),
        (32 * (16 * context + 4096) + 65536, (0, 0)),
        (4 * shape.hidden, wide),
    ]
    rows, offset = [], 0
    for index, (size, (first, final)) in enumerate(buffers):
        size = pad(size, 64)
        where = {"kind": index + 1, "first_op": first, "last_op": final, "offset": offset}
        rows.append(_record(rec.PLAN, size=size, **where))
        offset += size
    return np.array(rows, rec.PLAN)


def _ropes(shape: Shape) -> tuple[bytes, int]:
    """One table for every `rope` index in use; angles need not be a model's."""
    dims = {spec.rope: spec.head_dim for spec in shape.layers}
    records, tables = [], []
    end = pad(len(dims) * rec.ROPE.itemsize, 64)
    for index in sorted(dims):
        pairs = dims[index] // 2
        angle = np.arange(shape.context)[:, None] * (50.0 + 50 * index) ** (
            -np.arange(pairs) / pairs
        )
        table = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype("<f4").tobytes()
        records.append(_record(rec.ROPE, pairs=pairs, positions=shape.context, offset=end))
        tables.append(table + bytes(pad(len(table), 64) - len(table)))
        end += len(tables[-1])
    head = np.array(records, rec.ROPE).tobytes()
    head += bytes(pad(len(head), 64) - len(head))
    return head + b"".join(tables), len(dims)


def _conf(shape: Shape, tensors: Sequence[Tensor], ropes: int) -> Any:
    roles = [t.role for t in tensors]
    flags = rec.CONFF_TIED * shape.tied | rec.CONFF_FINAL_SOFTCAP * bool(shape.final_softcap)
    head = roles.index(rec.ROLE_HEAD)
    return _record(
        rec.CONF, layer_count=len(shape.layers), hidden=shape.hidden, vocab_rows=shape.vocab,
        rope_count=ropes, context=shape.context, trained_context=shape.context, chunk=shape.chunk,
        threads=shape.threads, kv_type=shape.kv_type, flags=flags,
        tens_embed=head if shape.tied else 0, tens_head=head,
        tens_final_norm=roles.index(rec.ROLE_FINAL_NORM), norm_eps=shape.norm_eps,
        embed_scale=shape.embed_scale, final_softcap=shape.final_softcap, temperature=0.3,
        top_p=0.85, repetition_penalty=1.0, top_k=64, text_limit=16 * shape.context + 4096,
        family=_text("made", 16), name=_text("made-up", 64),
    )  # fmt: skip


def _kv_layout_id(shape: Shape, layers: Any, units: Any) -> int:
    words = [shape.kv_type, shape.context, len(layers)]
    for row in layers:
        words += [int(row[k]) for k in ("kv_heads", "head_dim", "kv_group", "kv_blocks", "window")]
    for row in units:
        words += [int(row["sink"]), int(row["recent"]) + 65536 * int(row["flags"])]
    return zlib.crc32(np.array(words, "<u4").tobytes())


def _features(shape: Shape, tensors: Sequence[Tensor]) -> int:
    bits = 1 | (32 if shape.kv_type == rec.KV_INT8 else 64)
    value4 = any(any(spec.value4) for spec in shape.layers)
    key4 = any(any(spec.key4) for spec in shape.layers)
    bits |= 128 if value4 or key4 or any(spec.units for spec in shape.layers) else 0
    bits |= 256 * value4 | 512 * key4
    for t in tensors:
        for kind, _ in t.segments:
            bits |= FEATURE.get(kind, 0)
    return bits


def _ram(shape: Shape, counts: Sequence[int], sizes: Mapping[str, int]) -> dict[str, int]:
    """Memory figures (FORMAT.md 4.5). `counts`: layers, tensors, segments, plans, units."""
    weights = pad(sizes["whot"], 4096)
    engine = 65536 + sum(a * b for a, b in zip((128, 96, 16, 48, 16), counts, strict=True))
    ram = {
        "ram_weights": weights,
        "ram_arena": pad(sizes["arena"], 4096),
        "ram_kv": pad(sizes["kv"], 4096),
        "ram_tables": pad(sizes["file"], 4096) - weights,
        "ram_engine": pad(engine, 4096),
        "ram_stacks": (shape.threads - 1) * 262144,
    }
    return {**ram, "ram_total": sum(ram.values())}


ARRAYS = {
    "CONF": rec.CONF, "LAYR": rec.LAYER, "KVMK": rec.UNIT, "TENS": rec.TENSOR, "SEGM": rec.SEGMENT,
    "PLAN": rec.PLAN, "THRM": rec.THERMAL, "TEST": rec.TEST,
}  # fmt: skip


def _table(bodies: Sequence[tuple[str, bytes]]) -> tuple[Any, int]:
    """Section entries, each with its place, and the size of the file."""
    entries, at = [], 512 + 128 * len(bodies)
    for name, body in bodies:
        at = pad(at, 65536 if name == "WHOT" else 256)
        step = ARRAYS[name].itemsize if name in ARRAYS else 0
        flags = 0 if name == "TMPL" else 3 if name == "WHOT" else 1
        entries.append(
            _record(
                rec.SECTION, type=int.from_bytes(name.encode(), "little"), flags=flags, offset=at,
                size=len(body), mem_size=len(body), record_size=step,
                crc32=zlib.crc32(body), record_count=len(body) // step if step else 0,
                sha256=sha256(body).digest(), name=_text(name, 16),
            )
        )  # fmt: skip
        at += len(body)
    return np.array(entries, rec.SECTION), pad(at, 256)


def _seal(header: Any, table: Any) -> bytes:
    """Header with root and CRCs: what stands before the signature block."""
    header["table_crc32"] = zlib.crc32(table.tobytes())
    header["root_sha256"] = bytes(32)
    header["header_crc32"] = 0
    root = sha256(b"gembin root 1" + header.tobytes() + table.tobytes()).digest()
    header["root_sha256"] = root
    header["header_crc32"] = zlib.crc32(header.tobytes()[:252])
    return bytes(header.tobytes())


def make(
    shape: Shape, seed: int, fill: Callable[[bytes], Any] | None = None, hdf: bytes = b"{}"
) -> bytes:
    """The bytes of an artifact for the board of `hdf`. `fill` gets the finished image with an empty
    test vector and returns the record that replaces it (None: it stays as it is)."""
    tensors = Maker(shape, seed).tensors()
    ropes, rope_count = _ropes(shape)
    plan, layers, units = _plan(shape, tensors), _layers(shape, tensors), _units(shape)
    test = _record(rec.TEST, prompt_count=1, step_count=1)
    tens, segm, whot = place(tensors, 0)
    fixed = {
        "CONF": _conf(shape, tensors, rope_count).tobytes(), "LAYR": layers.tobytes(),
        **({"KVMK": units.tobytes()} if len(units) else {}),
        "TENS": tens.tobytes(), "SEGM": segm.tobytes(), "PLAN": plan.tobytes(),
        "TOKN": byte_tokenizer(shape.vocab),
        "ROPE": ropes, "THRM": _record(rec.THERMAL).tobytes(), "TEST": test.tobytes(),
        "HDFJ": hdf, "MANI": b"\x80", "WHOT": whot,
    }  # fmt: skip
    start = int(_table(list(fixed.items()))[0][-1]["offset"])
    tens["offset"] += start
    tens["second_offset"] += np.where(tens["second_size"] > 0, start, 0).astype("<u8")
    fixed["TENS"] = tens.tobytes()
    sizes = {
        "whot": len(whot),
        "arena": int((plan["offset"] + plan["size"]).max()),
        "kv": int(layers["kv_size"].sum()),
    }
    facts = {
        "required_features": _features(shape, tensors),
        "kv_layout_id": _kv_layout_id(shape, layers, units),
    }
    counts = (len(layers), len(tens), len(segm), len(plan), len(units))
    image = _assemble(shape, fixed, counts, sizes, facts)
    if fill is not None:
        fixed["TEST"] = fill(image).tobytes()
        image = _assemble(shape, fixed, counts, sizes, facts)
    return image


def _assemble(
    shape: Shape,
    bodies: Mapping[str, bytes],
    counts: Sequence[int],
    sizes: Mapping[str, int],
    facts: Mapping[str, int],
) -> bytes:
    table, size = _table(list(bodies.items()))
    header = _record(
        rec.HEADER, magic=MAGIC, byte_order=0x01020304, major=1, header_size=256, entry_size=128,
        section_count=len(table), align=256, file_size=size, table_offset=512, engine_abi_min=1,
        target=_text("generic-x86-64", 16), hdf_sha256=sha256(b"{}").digest(), **facts,
        **_ram(shape, counts, {**sizes, "file": size}),
    )  # fmt: skip
    out = bytearray(size)
    out[:256] = _seal(header, table)
    out[512 : 512 + table.nbytes] = table.tobytes()
    for entry, body in zip(table, bodies.values(), strict=True):
        first = int(entry["offset"])
        out[first : first + len(body)] = body
    return bytes(out)
