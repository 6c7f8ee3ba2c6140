"""GGUF version 3: an own bounded parser, the config that the metadata describes, the tensors.

Every count and length is held against the bytes left in the file before anything is allocated.
Decided where readers differ: `general.alignment` must be a u32, a multiple of 8 from 8 to 1 MiB (24
is accepted: the format asks for no power of two); dimensions are 1 to 4 and never 0; arrays of
arrays are refused; a key or a tensor name may occur once.

Conversion facts: norms of Gemma already hold 1 + w; rows of q and k are permuted for the
architecture `llama` only; layer pattern and local rope base of Gemma are implied by the
architecture; Llama 3's rotary scaling lies in the tensor `rope_freqs.weight`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gemmake.errors import CheckpointError
from gemmake.load.bind import permuted_rows
from gemmake.load.config import MAX_LAYERS, MAX_SIZE, check_positive, check_size
from gemmake.load.families import FAMILIES, ArchConfig, LayerShape, Wanted
from gemmake.load.names import canonical_gguf
from gemmake.load.source import (
    Bytes,
    RawTensor,
    SourceFile,
    checked_add,
    checked_mul,
    checked_product,
    damaged,
    display,
    item_size,
    name_list,
    plain_tensor,
)
from gemmake.model import Block, FloatRows, Role, RopeSpec, TokenizerSource

_MAGIC = b"GGUF"
_VERSION = 3
_MIN_KEY_BYTES = 13  # key length, type, one byte of value
_MIN_INFO_BYTES = 32  # name length, dimension count, one dimension, type, offset
_MAX_ALIGNMENT = 1 << 20
_MAX_NAME = 1 << 16

_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _I32, _F32 = 4, 5, 6
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_NUMPY = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
# type number -> (name, values in a block, bytes of a block)
_TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_ARCHITECTURES = {
    "gemma": "gemma1",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
# Keys after "<architecture>." that are read, or that change nothing.
_READ_KEYS = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_count",
    "expert_used_count",
}
_GEMMA_KEYS = {
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope.freq_base_swa",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count_swa",
}
_PATTERN = {"gemma2": 2, "gemma3": 6}
# Layer counts of the 27B models, whose query scale is hidden / heads instead of the head dimension.
_WIDE_SCALE = {"gemma2": 46, "gemma3": 62}
_ROPE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Field:
    """A metadata value with its type, which is checked before use."""

    kind: int
    element: int | None  # of an array
    value: Any


@dataclass(frozen=True)
class GgufModel:
    """What a GGUF file says, tensors by canonical name."""

    arch: ArchConfig
    tensors: Mapping[str, RawTensor]
    tokenizer: TokenizerSource
    token_ids: Mapping[str, Any]  # bos, eos and pad in the form of a config.json
    name: str
    licence: str

    def adapt(self, raw: RawTensor, wanted: Wanted) -> RawTensor:
        """Rows in the order of Hugging Face."""
        if self.arch.family.name == "llama" and wanted.role in (Role.Q, Role.K):
            return permuted_rows(raw, self.arch.layers[wanted.layer].head_dim)
        return raw


class _Cursor:
    """Reads forward and never past the end of the file."""

    def __init__(self, file: BinaryIO, size: int, name: str) -> None:
        self._file, self.size, self.name = file, size, name
        self.position = 0

    @property
    def left(self) -> int:
        return self.size - self.position

    def take(self, count: int, what: str) -> bytes:
        if count < 0 or count > self.left:
            raise CheckpointError(
                f"{self.name}: {display(what)} needs {count} bytes, {self.left} bytes are left of "
                f"{self.size}; the file is cut short or damaged"
            )
        data = self._file.read(count)
        if len(data) != count:
            raise damaged(f"{self.name}: became shorter while it was read")
        self.position += count
        return data

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def text(self, what: str, *, limit: int | None = None, strict: bool = True) -> str:
        length = self.number("<Q", what)
        if limit is not None and length > limit:
            raise damaged(f"{self.name}: {display(what)} is {length} bytes long")
        data = self.take(length, what)
        try:
            return data.decode("utf-8", "strict" if strict else "replace")
        except UnicodeDecodeError as error:
            raise damaged(
                f"{self.name}: {display(what)} is not valid UTF-8 ({error.reason})"
            ) from error


def read_gguf(path: Path) -> GgufModel:
    """Parse a GGUF file completely; CheckpointError names what is wrong with it."""
    source = SourceFile(path)
    with path.open("rb", buffering=1 << 16) as file:
        cursor = _Cursor(file, source.size, source.name)
        tensor_count, key_count = _preamble(cursor)
        fields = _metadata(cursor, key_count)
        tensors = _tensor_infos(cursor, tensor_count, _alignment(fields, source.name), source)
    meta = _Meta(fields, source.name)
    if meta.get("split.count", (2, 4), 0) > 1:
        raise CheckpointError(f"{source.name}: is one part of a split model; merge the parts first")
    arch = meta.arch(tensors)
    tensors.pop("rope_freqs.weight", None)
    mapped = canonical_gguf(tensors, sandwich=arch.family.block is Block.SANDWICH)
    return GgufModel(
        arch=arch,
        tensors={short: tensors[name] for short, name in mapped.items()},
        tokenizer=meta.tokenizer(),
        token_ids=meta.token_ids(),
        name=str(meta.get("general.name", (_STRING,), "")),
        licence=str(meta.get("general.license", (_STRING,), "")),
    )


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    """Magic, version and the two counts, bounded by what the file could hold."""
    if cursor.take(4, "the magic") != _MAGIC:
        raise damaged(f"{cursor.name}: is not a GGUF file")
    version = cursor.number("<I", "the version")
    if version != _VERSION:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = f"GGUF version {version}"
        if 0 < swapped < 256:
            what = f"a big-endian GGUF file of version {swapped}"
        raise CheckpointError(f"{cursor.name}: is {what}; convert it to little-endian version 3")
    tensor_count = cursor.number("<Q", "the tensor count")
    key_count = cursor.number("<Q", "the key count")
    for what, count, least in (
        ("tensors", tensor_count, _MIN_INFO_BYTES),
        ("keys", key_count, _MIN_KEY_BYTES),
    ):
        if count > cursor.left // least:
            raise damaged(
                f"{cursor.name}: claims {count} {what}, too many for a file of {cursor.size} bytes"
            )
    return tensor_count, key_count


def _metadata(cursor: _Cursor, count: int) -> dict[str, Field]:
    fields: dict[str, Field] = {}
    for index in range(count):
        key = cursor.text(f"key {index}", limit=_MAX_NAME)
        if key in fields:
            raise damaged(f"{cursor.name}: the key {display(key)} occurs twice")
        kind = cursor.number("<I", key)
        fields[key] = _value(cursor, kind, key)
    return fields


def _value(cursor: _Cursor, kind: int, key: str) -> Field:
    strict = key.startswith("tokenizer.")
    if kind == _STRING:
        return Field(kind, None, cursor.text(key, strict=strict))
    if kind == _ARRAY:
        element = cursor.number("<I", key)
        return Field(kind, element, _array(cursor, element, key, strict=strict))
    if kind not in _SCALARS:
        raise damaged(f"{cursor.name}: {display(key)} has unknown type {kind}")
    return Field(kind, None, cursor.number(_SCALARS[kind], key))


def _array(cursor: _Cursor, element: int, key: str, *, strict: bool) -> list[Any]:
    count = cursor.number("<Q", key)
    if element == _STRING:
        if count > cursor.left // 8:
            raise CheckpointError(
                f"{cursor.name}: {display(key)} claims {count} strings, {cursor.left} bytes are "
                "left; the file is damaged"
            )
        return [cursor.text(key, strict=strict) for _ in range(count)]
    if element not in _NUMPY:
        what = "arrays of arrays" if element == _ARRAY else f"unknown type {element}"
        raise CheckpointError(f"{cursor.name}: {display(key)} holds {what}; not supported")
    form = np.dtype(_NUMPY[element])
    size = checked_mul(count, form.itemsize, f"{cursor.name}: {display(key)}")
    values: list[Any] = np.frombuffer(cursor.take(size, key), form).tolist()
    return values


def _alignment(fields: Mapping[str, Field], name: str) -> int:
    field = fields.get("general.alignment")
    if field is None:
        return 32
    if field.kind != _U32:
        raise damaged(f"{name}: general.alignment is not stored as u32")
    value: int = field.value
    if value % 8 or not 8 <= value <= _MAX_ALIGNMENT:
        raise CheckpointError(
            f"{name}: general.alignment is {value}; a multiple of 8 from 8 to "
            f"{_MAX_ALIGNMENT} is expected"
        )
    return value


def _tensor_infos(
    cursor: _Cursor, count: int, alignment: int, source: SourceFile
) -> dict[str, RawTensor]:
    """All tensors by name, every one of them inside the file and apart from the others."""
    infos: dict[str, tuple[list[int], int, int]] = {}
    for index in range(count):
        name = cursor.text(f"the name of tensor {index}", limit=_MAX_NAME)
        where = f"{source.name}: tensor {display(name)}"
        if name in infos:
            raise damaged(f"{where}: occurs twice")
        dimensions = cursor.number("<I", name)
        if not 1 <= dimensions <= 4:
            raise damaged(f"{where}: has {dimensions} dimensions, 1 to 4 are allowed")
        shape = [cursor.number("<Q", name) for _ in range(dimensions)]
        kind = cursor.number("<I", name)
        infos[name] = (shape, kind, cursor.number("<Q", name))
    start = -(-cursor.position // alignment) * alignment
    tensors, spans = {}, []
    for name, (shape, kind, offset) in infos.items():
        where = f"{source.name}: tensor {display(name)}"
        size = _tensor_bytes(shape, kind, where)
        if offset % alignment:
            raise damaged(f"{where}: offset {offset} is no multiple of {alignment}")
        begin = checked_add(start, offset, where)
        end = checked_add(begin, size, where)
        if end > source.size:
            raise CheckpointError(
                f"{where}: needs bytes up to {end}, the file has {source.size} bytes; "
                "download it again"
            )
        spans.append((begin, end, name))
        tensors[name] = _tensor(source, name, shape, kind, begin)
    _check_apart(spans, source.name)
    return tensors


def _tensor_bytes(shape: list[int], kind: int, where: str) -> int:
    if kind not in _TENSOR_TYPES:
        known = ", ".join(name for name, _, _ in _TENSOR_TYPES.values())
        raise CheckpointError(f"{where}: type {kind} is not supported; supported: {known}")
    if 0 in shape:
        raise CheckpointError(f"{where}: has a dimension of 0; the file is damaged")
    name, block, size = _TENSOR_TYPES[kind]
    values = checked_product(shape, where)
    if shape[0] % block:
        raise damaged(
            f"{where}: a row of {shape[0]} values is no multiple of {block} as {name} asks"
        )
    return checked_mul(values // block, size, where)


def _check_apart(spans: list[tuple[int, int, str]], file: str) -> None:
    position, before = 0, ""
    for begin, end, name in sorted(spans):
        if begin < position:
            raise CheckpointError(
                f"{file}: tensors {display(before)} and {display(name)} overlap; "
                "the file is damaged"
            )
        position, before = end, name


def _tensor(source: SourceFile, name: str, shape: list[int], kind: int, offset: int) -> RawTensor:
    """A tensor with its dimensions in the usual order: the file has the fastest one first."""
    dtype, block, size = _TENSOR_TYPES[kind]
    usual = shape[::-1]
    if item_size(dtype) is not None:
        return plain_tensor(source, name, usual, dtype, offset)
    cols = usual[-1]
    row_bytes = cols // block * size

    def rows_of(first: int, count: int) -> FloatRows:
        data = source.read(offset + first * row_bytes, count * row_bytes)
        return _dequantize(data.reshape(count, row_bytes), dtype, cols)

    return RawTensor(name, tuple(usual), dtype, source.name, rows_of)


def _dequantize(data: Bytes, dtype: str, cols: int) -> FloatRows:
    """Blocks as float32 [rows, cols]: one product and at most one difference per value in IEEE
    float32, the same on every machine."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # a damaged scale gives NaN, which the caller reports
        values = dequantize(data, GGMLQuantizationType[dtype])
    return np.ascontiguousarray(values, dtype=np.float32).reshape(data.shape[0], cols)


class _Meta:
    """Metadata with typed access."""

    def __init__(self, fields: Mapping[str, Field], file: str) -> None:
        self.fields, self.file = fields, file

    def get(self, key: str, kinds: tuple[int, ...], default: Any) -> Any:
        """A scalar of one of the allowed types."""
        field = self.fields.get(key)
        if field is None:
            return default
        if field.kind not in kinds:
            raise damaged(f"{self.file}: {key} has type {field.kind}, not as expected")
        return field.value

    def array(self, key: str, elements: tuple[int, ...], count: int | None = None) -> list[Any]:
        """An array of one of the allowed element types and, where given, of a given length."""
        field = self.fields.get(key)
        if field is None:
            raise CheckpointError(f"{self.file}: {key} is missing; convert the model again")
        if field.kind != _ARRAY or field.element not in elements:
            raise damaged(f"{self.file}: {key} does not have the expected element type")
        values: list[Any] = field.value
        if count is not None and len(values) != count:
            raise damaged(f"{self.file}: {key} has {len(values)} entries, not {count}")
        return values

    def size(self, key: str, default: int | None = None, limit: int = MAX_SIZE) -> int:
        value = self.get(key, (2, 4, 5, 10, 11), default)
        if value is None:
            raise CheckpointError(f"{self.file}: {key} is missing; convert the model again")
        return check_size(value, limit, f"{self.file}: {key}")

    def sizes(self, key: str, count: int, default: int | None, limit: int) -> list[int]:
        """One size for every layer, or an array with one per layer."""
        field = self.fields.get(key)
        if field is None or field.kind != _ARRAY:
            return [self.size(key, default, limit)] * count
        values = self.array(key, (_U32, _I32), count)
        return [check_size(v, limit, f"{self.file}: {key}") for v in values]

    def positive(self, key: str, default: float | None) -> float | None:
        value = self.get(key, (_F32, 12), None)
        return default if value is None else check_positive(value, f"{self.file}: {key}")

    def arch(self, tensors: Mapping[str, RawTensor]) -> ArchConfig:
        """The config that the metadata, and Llama's `rope_freqs.weight`, describe."""
        prefix = self.get("general.architecture", (_STRING,), None)
        if prefix not in _ARCHITECTURES:
            known = ", ".join(sorted(_ARCHITECTURES))
            raise CheckpointError(
                f"{self.file}: general.architecture {display(repr(prefix))} is not supported; "
                f"supported: {known}"
            )
        family = FAMILIES[_ARCHITECTURES[prefix]]
        self._check_keys(prefix, family.name)
        eps = self.positive(f"{prefix}.attention.layer_norm_rms_epsilon", None)
        if eps is None:
            raise damaged(f"{self.file}: {prefix}.attention.layer_norm_rms_epsilon missing")
        vocab = f"{prefix}.vocab_size"
        caps = 50.0 if family.name == "gemma2" else None, 30.0 if family.name == "gemma2" else None
        capped = self.positive(f"{prefix}.attn_logit_softcapping", caps[0])
        return ArchConfig(
            family=family,
            hidden=self.size(f"{prefix}.embedding_length"),
            context=self.size(f"{prefix}.context_length", limit=1 << 30),
            norm_eps=eps,
            layers=self._layers(prefix, family.name, tensors),
            vocab=self.size(vocab) if vocab in self.fields else None,
            attn_softcap=capped if family.name == "gemma2" else None,
            final_softcap=self.positive(f"{prefix}.final_logit_softcapping", caps[1]),
        )

    def _check_keys(self, prefix: str, family: str) -> None:
        """Refuse keys of the architecture that may change the result and are not known."""
        known = _READ_KEYS | (_GEMMA_KEYS if family in _PATTERN else set())
        own = {k[len(prefix) + 1 :] for k in self.fields if k.startswith(prefix + ".")}
        if own - known:
            raise CheckpointError(
                f"{self.file}: {name_list(f'{prefix}.{k}' for k in own - known)} is not known for "
                f"{family} and may change the result; it is not supported"
            )
        if self.get(f"{prefix}.expert_count", (_U32,), 0):
            raise CheckpointError(f"{self.file}: {prefix}.expert_count is not 0; not supported")

    def _layers(
        self, prefix: str, family: str, tensors: Mapping[str, RawTensor]
    ) -> tuple[LayerShape, ...]:
        count = self.size(f"{prefix}.block_count", limit=MAX_LAYERS)
        hidden = self.size(f"{prefix}.embedding_length")
        heads = self.sizes(f"{prefix}.attention.head_count", count, None, 4096)
        kv_key = f"{prefix}.attention.head_count_kv"
        kv = self.sizes(kv_key, count, heads[0], 4096) if kv_key in self.fields else heads
        ffn = self.sizes(f"{prefix}.feed_forward_length", count, None, MAX_SIZE)
        full = self._full_layers(prefix, family, count)
        hd = self._head_dim(prefix, hidden, heads[0])
        ropes = {kind: self._rope(prefix, family, hd, tensors, full=kind) for kind in set(full)}
        scale_of = hidden / heads[0] if _WIDE_SCALE.get(family) == count else float(hd)
        window = 0
        if not all(full):
            default = 4096 if family == "gemma2" else None
            window = self.size(f"{prefix}.attention.sliding_window", default, limit=1 << 30)
        for index in range(count):
            if heads[index] % kv[index]:
                raise damaged(
                    f"{self.file}: {kv[index]} kv heads do not divide {heads[index]} heads "
                    f"(layer {index})"
                )
        return tuple(
            LayerShape(
                heads=heads[i],
                kv_heads=kv[i],
                head_dim=hd,
                ffn=ffn[i],
                window=0 if full[i] else window,
                rope=ropes[full[i]],
                score_scale=scale_of**-0.5,
            )
            for i in range(count)
        )

    def _head_dim(self, prefix: str, hidden: int, heads: int) -> int:
        """The head dimension; every way of stating it must agree."""
        key = f"{prefix}.attention.key_length"
        if key not in self.fields and hidden % heads:
            raise CheckpointError(f"{self.file}: {key} is missing; {heads} heads and {hidden}")
        hd = self.size(key, hidden // heads, limit=4096)
        for other in (
            "attention.value_length",
            "rope.dimension_count",
            "attention.key_length_swa",
            "attention.value_length_swa",
            "rope.dimension_count_swa",
        ):
            if self.size(f"{prefix}.{other}", hd) != hd:
                raise CheckpointError(
                    f"{self.file}: {prefix}.{other} differs from the head dimension {hd}; "
                    "not supported"
                )
        if hd % 2:
            raise CheckpointError(f"{self.file}: head dimension {hd} is odd; not supported")
        return hd

    def _full_layers(self, prefix: str, family: str, count: int) -> list[bool]:
        """Which layers see all keys; the pattern is implied unless the file states one."""
        if family not in _PATTERN:
            return [True] * count
        key = f"{prefix}.attention.sliding_window_pattern"
        field = self.fields.get(key)
        if field is not None and field.kind == _ARRAY:
            return [not sliding for sliding in self.array(key, (_BOOL,), count)]
        pattern = self.size(key, _PATTERN[family], limit=MAX_LAYERS)
        return [(i + 1) % pattern == 0 for i in range(count)]

    def _rope(
        self, prefix: str, family: str, dims: int, tensors: Mapping[str, RawTensor], *, full: bool
    ) -> RopeSpec:
        two = family == "gemma3"
        if two and not full:
            theta = self.positive(f"{prefix}.rope.freq_base_swa", 10_000.0)
            return RopeSpec(theta=theta or 0.0, dims=dims)
        theta = self.positive(f"{prefix}.rope.freq_base", 1_000_000.0 if two else 10_000.0) or 0.0
        kind = self.get(f"{prefix}.rope.scaling.type", (_STRING,), "none")
        if kind not in ("none", "linear"):
            raise CheckpointError(
                f"{self.file}: {prefix}.rope.scaling.type {display(repr(kind))} is not supported; "
                "none and linear are"
            )
        factor = self.positive(f"{prefix}.rope.scaling.factor", 1.0) or 1.0
        freqs = tensors.get("rope_freqs.weight")
        if freqs is not None:
            if kind != "none":
                raise damaged(f"{self.file}: rope_freqs.weight besides {kind} scaling")
            return llama3_rope(freqs, theta, dims)
        if kind == "linear" and factor != 1.0:
            return RopeSpec(theta=theta, dims=dims, kind="linear", factor=factor)
        return RopeSpec(theta=theta, dims=dims)

    def token_ids(self) -> dict[str, Any]:
        """Special token ids under the names of config.json; eos joins every end token."""

        def one(name: str) -> int | None:
            value: int | None = self.get(f"tokenizer.ggml.{name}_token_id", (_U32, _I32), None)
            return None if value in (-1, 2**32 - 1) else value

        ends = [one(name) for name in ("eos", "eot", "eom")]
        return {
            "bos_token_id": one("bos"),
            "eos_token_id": [e for e in ends if e is not None],
            "pad_token_id": one("padding"),
        }

    def tokenizer(self) -> TokenizerSource:
        """The vocabulary in the form of a tokenizer.json, after its arrays were checked."""
        from gemmake.load.tokenizer import tokenizer_json_from_gguf

        model = self.get("tokenizer.ggml.model", (_STRING,), None)
        tokens = self.array("tokenizer.ggml.tokens", (_STRING,))
        if model == "llama":
            self.array("tokenizer.ggml.scores", (_F32,), len(tokens))
        elif model == "gpt2":
            self.array("tokenizer.ggml.merges", (_STRING,))
        else:
            raise CheckpointError(
                f"{self.file}: tokenizer.ggml.model {display(repr(model))} is not supported; "
                "llama and gpt2 are"
            )
        if "tokenizer.ggml.token_type" in self.fields:
            self.array("tokenizer.ggml.token_type", (_I32, _U32), len(tokens))
        values = {key: field.value for key, field in self.fields.items()}
        config: dict[str, Any] = {"add_bos_token": self._add_bos(model)}
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("pad_token", "padding"),
            ("unk_token", "unknown"),
        ):
            index = self.get(f"tokenizer.ggml.{key}_token_id", (_U32, _I32), None)
            if index is not None and 0 <= index < len(tokens):
                config[name] = tokens[index]
        template = self.get("tokenizer.chat_template", (_STRING,), None)
        return TokenizerSource(tokenizer_json_from_gguf(values), config, template)

    def _add_bos(self, model: str) -> bool:
        """The stored flag; without one, score vocabularies and Llama 3 start with bos."""
        pre = self.get("tokenizer.ggml.pre", (_STRING,), "")
        default = model == "llama" or pre in ("llama3", "llama-v3", "llama-bpe")
        return bool(self.get("tokenizer.ggml.add_bos_token", (_BOOL,), default))


def llama3_rope(freqs: RawTensor, theta: float, dims: int) -> RopeSpec:
    """The llama3 scaling whose divisors `rope_freqs.weight` holds, one per rotary pair.

    The divisor is 1 for short waves, the factor for long ones, and between them it gives away the
    original context. CheckpointError when no llama3 scaling with the usual bounds 1 and 4 fits.
    """
    if freqs.shape != (dims // 2,):
        raise damaged(
            f"{freqs.file}: rope_freqs.weight is {list(freqs.shape)}, expected [{dims // 2}]"
        )
    divisors = [float(v) for v in freqs.read(0, 1)[0]]
    if all(v == 1.0 for v in divisors):
        return RopeSpec(theta=theta, dims=dims)
    waves = [2.0 * math.pi * theta ** (2.0 * i / dims) for i in range(dims // 2)]
    factor = max(divisors)
    originals = [
        wave * (3.0 * (1.0 / d - 1.0 / factor) / (1.0 - 1.0 / factor) + 1.0)
        for wave, d in zip(waves, divisors, strict=True)
        if 1.0 < d < factor
    ]
    original = round(sum(originals) / len(originals)) if originals else 8192
    spec = RopeSpec(theta, dims, "llama3", factor, 1.0, 4.0, original)
    for wave, divisor in zip(waves, divisors, strict=True):
        if abs(_llama3_divisor(spec, wave) - divisor) > _ROPE_TOLERANCE * divisor:
            raise CheckpointError(
                f"{freqs.file}: rope_freqs.weight is no llama3 scaling; this model's rotary "
                "scaling is not supported"
            )
    return spec


def _llama3_divisor(spec: RopeSpec, wave: float) -> float:
    low, high = spec.low_freq_factor, spec.high_freq_factor
    if wave < spec.original_context / high:
        return 1.0
    if wave > spec.original_context / low:
        return spec.factor
    smooth = (spec.original_context / wave - low) / (high - low)
    return 1.0 / ((1.0 - smooth) / spec.factor + smooth)
