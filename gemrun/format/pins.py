"""PINP, the pinned prompt: its ids, and the ring blocks of their keys and values (FORMAT.md 2.12).

size(conf, layers, units, tokens)           bytes of the section
section(ids, blocks) / blank(..)            its bytes; zeros where the engine fills in the blocks
read(conf, layers, units, data) -> Pin      FormatError(PINP) for what breaks a rule
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemrun.format import sizes, spec
from gemrun.format.codes import Code, FormatError
from gemrun.format.spec import Conf, KvUnit, Layer

NAME = "PINP"
OPTION = "pin_prompt"  # of the manifest's options, there exactly with the section
REBUILD = "compile the artifact again"


@dataclass(frozen=True)
class Pinned:
    """A prompt that a compile pins: its ids, and what the manifest says about it."""

    ids: tuple[int, ...]
    told: Mapping[str, Any] = field(default_factory=dict)

    @property
    def option(self) -> dict[str, Any]:
        """The entry of the manifest's options."""
        return {OPTION: {**self.told, "tokens": len(self.ids)}}


@dataclass(frozen=True)
class Ring:
    """The first `used` blocks of a KV head's ring, `size` bytes each, from byte `at` on."""

    layer: int
    head: int
    at: int  # from the start of the section
    used: int
    size: int


@dataclass(frozen=True)
class Pin:
    """A checked section. The blocks stay in the mapped file."""

    ids: tuple[int, ...]
    rings: tuple[Ring, ...]


def ids_end(tokens: int) -> int:
    """Where the blocks begin."""
    return spec.size_of(spec.Pin) + sizes.pad(4 * tokens, spec.LINE)


def rings(
    conf: Conf, layers: Sequence[Layer], units: Sequence[KvUnit], tokens: int
) -> Iterator[Ring]:
    """The rings of all KV heads, in order of layers, then heads."""
    at, every = ids_end(tokens), sizes.pad(tokens, spec.KV_BLOCK) // spec.KV_BLOCK
    for index, layer in enumerate(layers):
        dense = sizes.kv_block_size(conf.kv_type, layer.head_dim, layer.kv_group)
        own = sizes.units_of(layer, units)
        for head in range(layer.kv_heads):
            used = min(own[head].blocks if own else layer.kv_blocks, every)
            size = sizes.unit_block_size(conf.kv_type, layer, own[head]) if own else dense
            yield Ring(index, head, at, used, size)
            at += used * size


def size(conf: Conf, layers: Sequence[Layer], units: Sequence[KvUnit], tokens: int) -> int:
    """Bytes of the section."""
    return ids_end(tokens) + sum(r.used * r.size for r in rings(conf, layers, units, tokens))


def section(ids: Sequence[int], blocks: bytes) -> bytes:
    """The section from ids and the blocks that the engine gives for them."""
    head = spec.Pin(tokens=len(ids)).pack() + struct.pack(f"<{len(ids)}I", *ids)
    return head.ljust(ids_end(len(ids)), b"\0") + blocks


def blank(
    conf: Conf, layers: Sequence[Layer], units: Sequence[KvUnit], ids: Sequence[int]
) -> bytes:
    """A section of the right size that breaks no rule, until the engine has made the blocks."""
    return section(ids, b"").ljust(size(conf, layers, units, len(ids)), b"\0")


def read(conf: Conf, layers: Sequence[Layer], units: Sequence[KvUnit], data: memoryview) -> Pin:
    """FORMAT.md 2.12."""
    least = spec.size_of(spec.Pin)
    if len(data) < least:
        raise _wrong(f"{len(data)} bytes, at least {least} are needed")
    head = spec.Pin.unpack(data, 0)
    if not 1 <= head.tokens < conf.context:
        raise _wrong(f"{head.tokens} tokens in a context of {conf.context}")
    if any(head.reserved):
        raise _wrong("reserved is not zero")
    wanted = size(conf, layers, units, head.tokens)
    if len(data) != wanted:
        raise _wrong(f"{len(data)} bytes, {head.tokens} tokens take {wanted}")
    end = least + 4 * head.tokens
    if any(data[end : ids_end(head.tokens)]):
        raise _wrong("bytes behind the ids are not zero")
    ids = struct.unpack_from(f"<{head.tokens}I", data, least)
    if max(ids) >= conf.vocab_rows:
        raise _wrong(f"a token id is not below {conf.vocab_rows}")
    return Pin(ids, tuple(rings(conf, layers, units, head.tokens)))


def _wrong(what: str) -> FormatError:
    return FormatError(Code.PINP, f"section {NAME}: {what}", REBUILD)
