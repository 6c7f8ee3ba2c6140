"""The keys and values of a pinned prompt: numbers that a cache can hold, and the right ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from gemrun.format import pins, sizes, spec
from gemrun.format.reader import Artifact
from gemrun.format.spec import KvType

Words = npt.NDArray[np.uint8] | npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
WORD = {KvType.INT8: "<u1", KvType.F16: "<u2", KvType.F32: "<u4"}


def problem(artifact: Artifact) -> str:
    """What is wrong with the values, the first of it; "" where nothing is."""
    pin = artifact.pin
    assert pin is not None
    data = np.frombuffer(artifact.section(pins.NAME), np.uint8)
    for ring in pin.rings:
        blocks = data[ring.at : ring.at + ring.used * ring.size].reshape(ring.used, ring.size)
        where = f"layer {ring.layer}, KV head {ring.head}"
        for rows, bad in _parts(artifact, ring, blocks):
            if rows[len(pin.ids) :].any():
                return f"{where}: a row behind the last token is not zero"
            if bad.any():
                return f"{where}: a value is no finite number, or out of its range"
    return ""


def _parts(
    artifact: Artifact, ring: pins.Ring, blocks: npt.NDArray[np.uint8]
) -> Iterator[tuple[Words, npt.NDArray[np.bool_]]]:
    """Codes and scales of K, then of V, a row each token, and which of them cannot be."""
    record, kind = artifact.layers[ring.layer], KvType(artifact.conf.kv_type)
    unit = artifact.units_of(ring.layer)[ring.head] if artifact.units else spec.KvUnit()
    whole = spec.KV_BLOCK * record.head_dim * sizes.kv_element(kind)
    scales = spec.KV_BLOCK * 2 * (record.head_dim // record.kv_group) if record.kv_group else 0
    start = 0
    for narrow in (unit.key4, unit.value4):
        codes = whole // 2 if narrow else whole
        words = _rows(blocks[:, start : start + codes], WORD[kind])
        yield words, _no_levels(words) if narrow else _impossible(words, kind)
        start += codes
        if scales:  # bfloat16: finite, not negative
            words = _rows(blocks[:, start : start + scales], "<u2")
            yield words, words >= 0x7F80
        start += scales


def _rows(part: npt.NDArray[np.uint8], word: str) -> Words:
    rows: Words = np.ascontiguousarray(part).view(word).reshape(len(part) * spec.KV_BLOCK, -1)
    return rows


def _impossible(words: Words, kind: KvType) -> npt.NDArray[np.bool_]:
    exponent = {KvType.INT8: 0x80, KvType.F16: 0x7C00, KvType.F32: 0x7F800000}[kind]
    mask = 0xFF if kind is KvType.INT8 else exponent  # of a float whatever the mantissa
    bad: npt.NDArray[np.bool_] = words & mask == exponent
    return bad


def _no_levels(words: Words) -> npt.NDArray[np.bool_]:
    """Two of 4 bits a byte, 0 to 14."""
    bad: npt.NDArray[np.bool_] = (words & 0x0F == 0x0F) | (words & 0xF0 == 0xF0)
    return bad


def replay(artifact: Artifact, path: str) -> str:
    """Compute them again with the engine; an error sentence, or "" where the bytes are the same."""
    try:
        from gemrun import GemRunContext, GemRunError  # the engine is wanted only here
        from gemrun.hooks import ring_blocks
    except ImportError as error:
        return f"not computed again, the engine is not installed ({error})"
    pin = artifact.pin
    assert pin is not None
    try:
        with GemRunContext(path, ignore_memory=True, allow_foreign_board=True) as engine:
            engine.prefill(pin.ids)
            found = ring_blocks(engine)
    except GemRunError as error:
        return str(error)
    stored = artifact.section(pins.NAME)[pins.ids_end(len(pin.ids)) :]
    if stored != found:
        return (
            "computed again, its keys and values are others; do not use this machine or build, "
            "and report it"
        )
    return ""
