"""KV heads that keep a part: engine against NumPy interpreter, bit for bit (NUMERICS section 7).

The interpreter has no rings: what a head shows depends on positions alone. Contexts are long enough
that every ring wraps several times.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gemrun.errors import NonFiniteError
from reference import engine, interp
from reference import formats as fmt
from reference import records as rec
from reference.floatmath import F32, bits
from reference.make_image import Layer, Shape, make

BLOCK, LENGTH, CONTEXT = 32, 300, 320
IDS = [int(i) for i in np.random.default_rng(51).integers(0, 190, 600)]
FULL = (0, 0)
PLAIN = Layer(silu=True, bias=True, ffn=64)
WINDOWED = Layer(window=40, sandwich=True, qk_norm=True, kv_heads=1, ffn=64)
KV = {"kv-f32": rec.KV_F32, "kv-f16": rec.KV_F16, "kv-int8": rec.KV_INT8}
NARROW = replace(PLAIN, head_dim=16, kv_group=16)
SHAPES = {
    # Full and partial heads in a layer, next to a layer with a window.
    "mixed": Shape((replace(PLAIN, units=((1, 1), FULL)), WINDOWED)),
    "sinks": Shape((replace(PLAIN, kv_heads=4, units=((2, 1), FULL, (1, 3), (2, 4))),)),
    # Four query heads share a KV head; a layer where all heads keep everything.
    "grouped": Shape((replace(PLAIN, heads=8, units=((1, 1), (1, 2))), replace(PLAIN, heads=2))),
    # Two and four heads fill a group of inputs of O: heads of different units go together.
    "thin": Shape(
        (
            replace(NARROW, kv_heads=4, units=((1, 1), FULL, FULL, (2, 1))),
            replace(NARROW, heads=2, units=((1, 1), (1, 2))),
        )
    ),
    "thinner": Shape(
        (replace(PLAIN, head_dim=8, kv_group=8, kv_heads=4, units=((1, 1), (1, 3), FULL, (2, 1))),)
    ),
    "softcap": Shape((replace(WINDOWED, window=0, attn_softcap=5.0, units=((1, 1),)), WINDOWED)),
}


def shape_of(name: str, kv: str) -> Shape:
    return replace(SHAPES[name], kv_type=KV[kv], context=CONTEXT, chunk=CONTEXT)


def dense(shape: Shape) -> Shape:
    return replace(shape, layers=tuple(replace(la, units=()) for la in shape.layers))


def ends(shape: Shape) -> list[int]:
    """Positions from which on something is hidden, ascending."""
    units = [u for la in shape.layers for u in la.units if u != FULL]
    return sorted({BLOCK * (sink + recent) for sink, recent in units})


Made = Callable[[str, str], tuple[Path, F32]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Factory: artifact and the interpreter's logits for IDS, made once a module."""
    folder = tmp_path_factory.mktemp("units")
    done: dict[tuple[str, str], tuple[Path, F32]] = {}

    def get(name: str, kv: str) -> tuple[Path, F32]:
        if (name, kv) not in done:
            data = make(shape_of(name, kv), seed=len(name))
            path = folder / f"{name}-{kv}.gembin"
            path.write_bytes(data)
            done[name, kv] = path, interp.Interpreter(rec.Image(data)).logits(IDS[:LENGTH])
        return done[name, kv]

    return get


def assert_same(got: F32, want: F32, what: object = "") -> None:
    assert got.shape == want.shape
    wrong = np.argwhere(bits(got) != bits(want))
    assert wrong.size == 0, (
        f"{what}: {len(wrong)} of {got.size} logits differ, first at position, row "
        f"{wrong[0].tolist()}; largest difference {np.abs(got - want).max()}"
    )


@pytest.mark.parametrize("kernel", engine.kernels())
@pytest.mark.parametrize("kv", sorted(KV))
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_logits_equal_the_interpreter(made: Made, name: str, kv: str, kernel: str) -> None:
    path, want = made(name, kv)
    for threads, chunk in ((1, CONTEXT), (2, 7), (3, 32), (8, 1)):
        with engine.opened(path, kernel=kernel, threads=threads, prefill_batch_size=chunk) as e:
            assert_same(e.evaluate(IDS[:LENGTH]), want, (threads, chunk))


@pytest.mark.parametrize("kernel", engine.kernels())
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("chunk", [1, 7, 32, CONTEXT])
def test_logits_do_not_depend_on_threads_or_chunks(
    made: Made, kernel: str, threads: int, chunk: int
) -> None:
    """Prefill, single tokens and prefill again, from an empty cache twice."""
    for name in ("mixed", "thin"):
        path, want = made(name, "kv-int8")
        with engine.opened(path, kernel=kernel, threads=threads, prefill_batch_size=chunk) as e:
            assert_same(e.prefill(IDS[:140])[None], want[139:140])
            rows = [e.decode(token) for token in IDS[140:143]]
            assert_same(np.stack(rows), want[140:143])
            assert_same(e.evaluate(IDS[143:LENGTH]), want[143:])
            e.reset()
            assert_same(e.prefill(IDS[:LENGTH])[None], want[-1:])


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_positions_at_every_boundary(made: Made, name: str) -> None:
    """A prompt ends just before, at and behind each place where a head begins to hide a block."""
    path, want = made(name, "kv-int8")
    edges = {e + BLOCK * n + d for e in ends(SHAPES[name]) for n in (0, 1, 2) for d in (-1, 0, 1)}
    for chunk in (CONTEXT, 32):
        with engine.opened(path, threads=2, prefill_batch_size=chunk) as e:
            for end in sorted(edges):
                e.reset()
                assert_same(e.prefill(IDS[:end])[None], want[end - 1 : end], end)
                rows = [e.decode(token) for token in IDS[end : end + 3]]
                assert_same(np.stack(rows), want[end : end + 3], end)


@pytest.mark.parametrize("kv", sorted(KV))
def test_long_chunks(tmp_path: Path, kv: str) -> None:
    """Chunks of 512 tokens, eight times a ring, in one step and beside one another."""
    layer = Layer(heads=2, head_dim=16, kv_group=16, ffn=32, units=((1, 1), FULL))
    shape = Shape((layer,), hidden=32, context=640, chunk=512, kv_type=KV[kv])
    data = make(shape, 3)
    (tmp_path / "a.gembin").write_bytes(data)
    want = interp.Interpreter(rec.Image(data)).logits(IDS)
    for threads, first in ((1, 512), (2, 88), (3, 1), (8, 599)):
        with engine.opened(tmp_path / "a.gembin", threads=threads) as e:
            assert_same(e.evaluate(IDS[:first]), want[:first], (threads, first))
            assert_same(e.evaluate(IDS[first:]), want[first:], (threads, first))


@pytest.mark.parametrize("kv", sorted(KV))
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_where_nothing_is_hidden_the_result_is_the_dense_one(
    made: Made, tmp_path: Path, name: str, kv: str
) -> None:
    path, want = made(name, kv)
    shape = shape_of(name, kv)
    (tmp_path / "dense.gembin").write_bytes(make(dense(shape), seed=len(name)))
    first = ends(shape)[0]
    with engine.opened(tmp_path / "dense.gembin", threads=2) as e:
        full = e.evaluate(IDS[:LENGTH])
    assert_same(full[:first], want[:first])
    assert (bits(full[first]) != bits(want[first])).any()  # and from there on it is another
    for size in (first, first - 1, first // 2):  # a context that is too short to hide anything
        with engine.opened(path, threads=2, kv_cache_size=size) as e:
            assert_same(e.evaluate(IDS[:size]), full[:size], size)


def test_units_that_all_keep_everything_change_nothing(made: Made, tmp_path: Path) -> None:
    """KVMK may say so; a writer would leave it out."""
    shape = shape_of("mixed", "kv-int8")
    full = tuple(replace(la, units=(FULL,) * la.kv_heads) for la in shape.layers)
    rows = []
    for number, layers in enumerate((full, dense(shape).layers)):
        path = tmp_path / f"{number}.gembin"
        path.write_bytes(make(replace(shape, layers=layers), seed=5))
        with engine.opened(path, threads=2) as e:
            rows.append(e.evaluate(IDS[:LENGTH]))
    assert_same(*rows)


# ---- values that are not finite ----
BAD = 5
GOOD = [6 + i % 180 for i in IDS[:LENGTH]]


def poisoned(shape: Shape, value: float) -> bytes:
    """An artifact whose embedding row BAD holds `value` (open does not check the weights' CRC)."""
    shape = replace(shape, tied=False, table=fmt.F32_PANELS)
    data = bytearray(make(shape, 2))
    image = rec.Image(bytes(data))
    table = image.tensors[int(image.conf["tens_embed"])]
    for column in range(shape.hidden):
        struct.pack_into("<f", data, int(table["offset"]) + 4 * (16 * column + BAD), value)
    return bytes(data)


def fails(e: engine.Engine, ids: Sequence[int]) -> None:
    used = e.context.stats().kv_used
    for _ in range(2):
        with pytest.raises(NonFiniteError):
            e.prefill(ids)
        assert e.context.stats().kv_used == used


@pytest.mark.parametrize("value", [1e30, np.inf, np.nan])
@pytest.mark.parametrize("name", ["mixed", "sinks", "thin"])
def test_bad_token_leaves_the_cache_as_it_was(tmp_path: Path, name: str, value: float) -> None:
    """Also where the failed step has written over what rings held: tails longer than a ring."""
    data = poisoned(shape_of(name, "kv-int8"), value)
    path = tmp_path / "poisoned.gembin"
    path.write_bytes(data)
    with np.errstate(all="ignore"):
        want = interp.Interpreter(rec.Image(data)).logits(GOOD)
    for used, tail in ((0, 100), (20, 90), (64, 20), (150, 0), (150, 10), (150, 140), (97, 200)):
        with engine.opened(path, threads=2) as e:
            if used:
                e.context.prefill(GOOD[:used])
            fails(e, [*GOOD[used : used + tail], BAD])
            assert_same(e.evaluate(GOOD[used:]), want[used:], (used, tail))
