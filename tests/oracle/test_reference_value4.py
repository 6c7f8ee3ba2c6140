"""KV heads with values or keys of 4 bits: engine against NumPy interpreter, bit for bit (NUMERICS
7).

The interpreter knows no packing and no rings: a code is one of 15 levels as soon as it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reference import engine, interp
from reference import records as rec
from reference.floatmath import F32, bits, rotate
from reference.make_image import Layer, Shape, make

LENGTH, CONTEXT = 300, 320
IDS = [int(i) for i in np.random.default_rng(52).integers(0, 190, 700)]
FULL = (0, 0)
PLAIN = Layer(silu=True, bias=True, ffn=64, value4=(True, True))
WINDOWED = Layer(
    window=40, sandwich=True, qk_norm=True, kv_heads=2, ffn=64, attn_softcap=5.0,
    value4=(False, True),
)  # fmt: skip
NARROW = replace(PLAIN, head_dim=16, kv_group=16)
SHAPES = {
    "all": Shape((PLAIN, replace(WINDOWED, value4=(True, True)))),
    # 8 bits before and behind 4 bits in a ring, next to a layer without any.
    "mixed": Shape(
        (replace(PLAIN, kv_heads=4, value4=(False, True, True, False)), replace(PLAIN, value4=()))
    ),
    "windows": Shape((WINDOWED, replace(WINDOWED, value4=(True, False)))),
    "sparse": Shape(
        (
            replace(
                PLAIN,
                kv_heads=4,
                units=((2, 1), FULL, (1, 3), (1, 1)),
                value4=(True, True, False, True),
            ),
            WINDOWED,
        )
    ),
    # Four query heads share a KV head.
    "grouped": Shape((replace(PLAIN, heads=8, units=((1, 1), FULL)), replace(PLAIN, heads=2))),
    # Two and eight heads fill a group of inputs of O.
    "thin": Shape((replace(NARROW, kv_heads=4, value4=(True, False, True, True)),)),
    # Heads of 8 values cannot have 4 bits; they stand beside a layer whose heads do.
    "thinnest": Shape(
        (replace(PLAIN, head_dim=8, kv_group=8, heads=8, value4=()), replace(PLAIN, rope=1))
    ),
    # Halves of 24, 40, 48 and 64 values.
    "odd": Shape(
        (
            replace(PLAIN, head_dim=48, kv_group=48, heads=4),
            replace(PLAIN, head_dim=80, kv_group=80, heads=2, rope=1),
        )
    ),
    "wide": Shape(
        (
            replace(PLAIN, head_dim=96, kv_group=32, heads=2, rope=0),
            replace(PLAIN, head_dim=128, kv_group=64, heads=2, rope=1),
        )
    ),
    # Keys: alone, and beside values in every mix; queries of a pair share a KV head.
    "keys": Shape(
        (
            replace(PLAIN, kv_heads=4, value4=(), key4=(False, True, True, False)),
            replace(PLAIN, kv_heads=4, value4=(False, False, True, True), key4=(False, True) * 2),
        )
    ),
    "keys_grouped": Shape(
        (replace(PLAIN, heads=8, value4=(), key4=(True, False)), replace(PLAIN, value4=()))
    ),
    "keys_windows": Shape(
        (
            replace(WINDOWED, key4=(True, True)),
            replace(WINDOWED, value4=(), key4=(False, True)),
            replace(PLAIN, units=((2, 1), FULL), key4=(True, True)),
        )
    ),
    # Rotated are blocks of 16, of 32, and whole heads.
    "keys_odd": Shape(
        (
            replace(PLAIN, head_dim=48, kv_group=48, heads=4, key4=(True, True)),
            replace(PLAIN, head_dim=96, kv_group=32, heads=2, rope=1, value4=(), key4=(True, True)),
            replace(PLAIN, head_dim=128, kv_group=64, heads=2, rope=2, key4=(True, False)),
        )
    ),
}


def shape_of(name: str) -> Shape:
    return replace(SHAPES[name], context=CONTEXT, chunk=CONTEXT)


def in_8_bits(shape: Shape) -> Shape:
    return replace(shape, layers=tuple(replace(la, value4=(), key4=()) for la in shape.layers))


Made = Callable[[str], tuple[Path, F32]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Factory: artifact and the interpreter's logits for IDS, made once a module."""
    folder = tmp_path_factory.mktemp("value4")
    done: dict[str, tuple[Path, F32]] = {}

    def get(name: str) -> tuple[Path, F32]:
        if name not in done:
            data = make(shape_of(name), seed=len(name))
            path = folder / f"{name}.gembin"
            path.write_bytes(data)
            done[name] = path, interp.Interpreter(rec.Image(data)).logits(IDS[:LENGTH])
        return done[name]

    return get


def assert_same(got: F32, want: F32, what: object = "") -> None:
    assert got.shape == want.shape
    wrong = np.argwhere(bits(got) != bits(want))
    assert wrong.size == 0, (
        f"{what}: {len(wrong)} of {got.size} logits differ, first at position, row "
        f"{wrong[0].tolist()}; largest difference {np.abs(got - want).max()}"
    )


@pytest.mark.parametrize("kernel", engine.kernels())
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_logits_equal_the_interpreter(made: Made, name: str, kernel: str) -> None:
    path, want = made(name)
    for threads, chunk in ((1, CONTEXT), (2, 7), (3, 32), (8, 1)):
        with engine.opened(path, kernel=kernel, threads=threads, prefill_batch_size=chunk) as e:
            assert_same(e.evaluate(IDS[:LENGTH]), want, (threads, chunk))


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("chunk", [1, 7, 31, 32, 33, CONTEXT])
def test_logits_do_not_depend_on_threads_or_chunks(made: Made, threads: int, chunk: int) -> None:
    """Prefill, single tokens and prefill again, from an empty cache twice."""
    for name in ("sparse", "windows", "keys_windows"):
        path, want = made(name)
        with engine.opened(path, threads=threads, prefill_batch_size=chunk) as e:
            assert_same(e.prefill(IDS[:140])[None], want[139:140])
            rows = [e.decode(token) for token in IDS[140:143]]
            assert_same(np.stack(rows), want[140:143])
            assert_same(e.evaluate(IDS[143:LENGTH]), want[143:])
            e.reset()
            assert_same(e.prefill(IDS[:LENGTH])[None], want[-1:])


@pytest.mark.parametrize(
    "name", ["all", "mixed", "windows", "sparse", "thin", "keys", "keys_windows"]
)
def test_positions_at_every_boundary_of_a_ring(made: Made, name: str) -> None:
    """A prompt ends just before, at and behind every block; windows of 40 and parts wrap."""
    path, want = made(name)
    with engine.opened(path, threads=2) as e:
        for end in sorted({32 * n + d for n in range(1, 9) for d in (-1, 0, 1)}):
            e.reset()
            assert_same(e.prefill(IDS[:end])[None], want[end - 1 : end], end)
            rows = [e.decode(token) for token in IDS[end : end + 3]]
            assert_same(np.stack(rows), want[end : end + 3], end)


def test_long_chunks(tmp_path: Path) -> None:
    """Chunks of 512 tokens, eight times a ring, in one step and beside one another."""
    layer = Layer(
        heads=2, head_dim=16, kv_group=16, ffn=32, units=((1, 1), FULL), value4=(True, True),
        key4=(True, False),
    )  # fmt: skip
    shape = Shape((layer,), hidden=32, context=640, chunk=512)
    data = make(shape, 3)
    (tmp_path / "a.gembin").write_bytes(data)
    want = interp.Interpreter(rec.Image(data)).logits(IDS[:600])
    for threads, first in ((1, 512), (2, 88), (3, 1), (8, 599)):
        with engine.opened(tmp_path / "a.gembin", threads=threads) as e:
            assert_same(e.evaluate(IDS[:first]), want[:first], (threads, first))
            assert_same(e.evaluate(IDS[first:600]), want[first:], (threads, first))


@pytest.mark.parametrize("name", ["mixed", "keys_grouped"])
def test_a_chunk_reads_its_own_positions_in_4_bits(made: Made, tmp_path: Path, name: str) -> None:
    """Values from the first position on; the first one has one key only, whatever its bits."""
    _, want = made(name)
    (tmp_path / "8.gembin").write_bytes(make(in_8_bits(shape_of(name)), seed=len(name)))
    with engine.opened(tmp_path / "8.gembin") as e:
        found = bits(e.evaluate(IDS[:2])) != bits(want[:2])
    assert found[0].any() == (name == "mixed")
    assert found[1].any()


def test_rotated_queries_and_keys_have_the_same_products() -> None:
    """By the matrix of signs, block by block: H q / n times H k."""
    random = np.random.default_rng(3)
    for width, block in ((64, 64), (96, 32), (48, 16), (16, 16), (256, 256)):
        signs = np.array([[1.0]])
        while len(signs) < block:
            signs = np.kron(np.array([[1, 1], [1, -1]]), signs)
        q, k = (random.standard_normal((5, width)).astype(np.float32) for _ in range(2))
        turned, keys = rotate(q, True), rotate(k, False)
        wanted = (k.reshape(5, -1, block).astype(float) @ signs).reshape(5, width)
        assert np.abs(keys - wanted).max() < 1e-4
        products = (turned.astype(float) * keys).sum(1)
        assert np.abs(products - (q.astype(float) * k).sum(1)).max() < 1e-4


@pytest.mark.parametrize(("value4", "key4"), [((), (True, True)), ((True, True), (True, True))])
def test_keys_of_4_bits_have_half_the_bytes(
    tmp_path: Path, value4: tuple[bool, ...], key4: tuple[bool, ...]
) -> None:
    layer = replace(PLAIN, head_dim=64, kv_group=64, heads=2, value4=value4)
    sizes = []
    for keys in ((), key4):
        data = make(Shape((replace(layer, key4=keys),), context=2048), 1)
        (tmp_path / "a.gembin").write_bytes(data)
        engine.Engine(tmp_path / "a.gembin").context.close()  # it counts the same
        sizes.append(sum(int(la["kv_size"]) for la in rec.Image(data).layers))
    assert sizes[0] - sizes[1] == 2 * 2048 * 64 // 2


def test_the_declared_cache_is_smaller_by_half_the_values(tmp_path: Path) -> None:
    """Keys and scales stay."""
    layer = replace(PLAIN, head_dim=64, kv_group=64, heads=2)
    sizes = []
    for value4 in ((), (True, True)):
        shape = Shape((replace(layer, value4=value4),), context=2048)
        data = make(shape, 1)
        (tmp_path / "a.gembin").write_bytes(data)
        engine.Engine(tmp_path / "a.gembin").context.close()  # it counts the same
        sizes.append(sum(int(la["kv_size"]) for la in rec.Image(data).layers))
    assert sizes[0] - sizes[1] == 2 * 2048 * 64 // 2
