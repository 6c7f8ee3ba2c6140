"""Values that are not finite fail the token and leave the cache as it was (NUMERICS section 9)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gemrun.errors import NonFiniteError
from reference import engine, interp
from reference import floatmath as fm
from reference import formats as fmt
from reference import records as rec
from reference.make_image import Layer, Shape, make

BAD, CONTEXT = 5, 96
GOOD = [int(i) for i in np.random.default_rng(41).integers(6, 190, 90)]
LAYER = Layer(window=8, sandwich=True, kv_heads=1)
F32 = ((fmt.F32_PANELS, 0),)
GATES = {rec.ROLE_GATE_UP: F32}
# One embedding row is out of range; the others are fine.
ROWS = {
    "norm overflows": (1e30, Shape((LAYER, LAYER))),
    "infinity": (np.inf, Shape((LAYER,))),
    "not a number": (np.nan, Shape((LAYER,))),
}
# Weights that overflow for every token, in the places where it is looked for.
ALWAYS = {
    "activation group": Shape((Layer(formats=GATES, gains={rec.ROLE_GATE_UP: 1e25}),)),
    "value of a float cache": Shape(
        (replace(LAYER, default=F32, gains={rec.ROLE_V: 3e38}),), kv_type=rec.KV_F32
    ),
    "value of a half cache": Shape(
        (replace(LAYER, default=F32, gains={rec.ROLE_V: 1e6}),), kv_type=rec.KV_F16
    ),
    "value of an int8 cache": Shape((replace(LAYER, default=F32, gains={rec.ROLE_V: 3e38}),)),
    "query": Shape((replace(LAYER, default=F32, gains={rec.ROLE_Q: 3e38}),), kv_type=rec.KV_F16),
}


def poisoned(value: float, shape: Shape) -> bytes:
    """An artifact whose embedding row BAD holds `value` (open does not check the weights' CRC)."""
    shape = replace(shape, tied=False, table=fmt.F32_PANELS, context=CONTEXT, chunk=32)
    data = bytearray(make(shape, 2))
    image = rec.Image(bytes(data))
    table = image.tensors[int(image.conf["tens_embed"])]
    for column in range(shape.hidden):
        struct.pack_into("<f", data, int(table["offset"]) + 4 * (16 * column + BAD), value)
    return bytes(data)


def logits(data: bytes, ids: Sequence[int]) -> fm.F32:
    with np.errstate(all="ignore"):
        return interp.Interpreter(rec.Image(data)).logits(ids)


@pytest.mark.parametrize("kernel", engine.kernels())
@pytest.mark.parametrize("name", sorted(ROWS))
def test_bad_token_leaves_the_cache_as_it_was(tmp_path: Path, name: str, kernel: str) -> None:
    data = poisoned(*ROWS[name])
    with pytest.raises(fm.NonFinite):
        logits(data, [*GOOD[:3], BAD])
    path = tmp_path / "poisoned.gembin"
    path.write_bytes(data)
    want = logits(data, GOOD)
    for used, tail in ((0, 4), (10, 0), (10, 20), (70, 20)):  # the last pushes out of a window
        with engine.opened(path, kernel=kernel, threads=2) as e:
            if used:
                e.context.prefill(GOOD[:used])
            for _ in range(2):
                with pytest.raises(NonFiniteError):
                    e.prefill([*GOOD[used : used + tail], BAD])
                assert e.context.stats().kv_used == used
            got = e.evaluate(GOOD[used:])
            assert np.array_equal(fm.bits(got), fm.bits(want[used:])), (used, tail)


@pytest.mark.parametrize("kernel", engine.kernels())
@pytest.mark.parametrize("name", sorted(ALWAYS))
def test_overflow_is_an_error_not_an_answer(tmp_path: Path, name: str, kernel: str) -> None:
    data = make(ALWAYS[name], 3)
    with pytest.raises(fm.NonFinite):
        logits(data, GOOD[:4])
    path = tmp_path / "overflow.gembin"
    path.write_bytes(data)
    with engine.opened(path, kernel=kernel) as e:
        with pytest.raises(NonFiniteError):
            e.prefill(GOOD[:4])
        assert e.context.stats().kv_used == 0
