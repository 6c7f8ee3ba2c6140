"""Engine against NumPy interpreter, bit for bit, on made-up artifacts of every format and shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemrun.errors import GemRunError
from reference import engine, interp
from reference import formats as fmt
from reference import records as rec
from reference.floatmath import F32, bits
from reference.make_image import Layer, Shape, make

LENGTH = 75  # more than two windows of 8 and two ring blocks of 32
IDS = [int(i) for i in np.random.default_rng(21).integers(0, 190, LENGTH)]


def uniform(kind: int) -> Layer:
    return Layer(default=((kind, 0),))


# A window of 8 has a ring of two blocks, so 75 tokens wrap it; one of 33 has three blocks.
GEMMA = Layer(window=8, sandwich=True, qk_norm=True, kv_heads=1)
PLAIN = Layer(silu=True, bias=True, kv_heads=4)
BODY = ((fmt.Q4H, 1), (fmt.Q8, 1))
WIDE = Layer(
    heads=5, kv_heads=5, head_dim=64, ffn=352, kv_group=64, silu=True,
    formats={
        rec.ROLE_O: ((fmt.Q4H, 3), (fmt.Q8, 2), (fmt.Q4H, 5)),
        rec.ROLE_Q: BODY, rec.ROLE_DOWN: ((fmt.Q8, 9), (fmt.Q4RAW_F16, 2)),
    },
    q_slabs=(2, 3),
)  # fmt: skip
SHAPES = {
    "q4h": Shape((GEMMA, PLAIN)),
    "q4raw-f16": Shape((uniform(fmt.Q4RAW_F16), replace(GEMMA, default=((fmt.Q4RAW_F16, 0),)))),
    "q4raw-bf16": Shape((uniform(fmt.Q4RAW_BF16), PLAIN)),
    "q8": Shape((replace(GEMMA, default=((fmt.Q8, 0),)), uniform(fmt.Q8)), tied=False),
    "f32": Shape((replace(GEMMA, default=((fmt.F32_PANELS, 0),)),), table=fmt.F32_PANELS),
    "f16": Shape((replace(PLAIN, default=((fmt.F16_PANELS, 0),)),), table=fmt.F16_PANELS),
    "mixed": Shape((WIDE, replace(WIDE, window=33)), threads=3),
    "float-parts": Shape((replace(GEMMA, formats={rec.ROLE_Q: ((fmt.F32_PANELS, 0),)}),)),
    "softcaps": Shape((replace(GEMMA, attn_softcap=5.0), PLAIN), final_softcap=3.0),
    "narrow": Shape(
        (Layer(heads=3, kv_heads=1, head_dim=24, ffn=72, kv_group=24),), hidden=72, vocab=77
    ),
    "groups": Shape((replace(PLAIN, head_dim=128, kv_group=32, heads=2, kv_heads=1),)),
    # Scores that saturate the softmax and gates that saturate the activation; values and gated
    # activations that fall below the smallest group.
    "hot": Shape(
        (
            replace(GEMMA, qk_norm=False, gains={rec.ROLE_Q: 30.0, rec.ROLE_GATE_UP: 40.0}),
            replace(PLAIN, gains={rec.ROLE_K: 50.0, rec.ROLE_GATE_UP: 200.0}),
        )
    ),
    "cold": Shape(
        (
            Layer(formats={rec.ROLE_V: ((fmt.F32_PANELS, 0),)}, gains={rec.ROLE_V: 4e-16}),
            Layer(formats={rec.ROLE_GATE_UP: ((fmt.F16_PANELS, 0),)}),
            Layer(
                formats={rec.ROLE_GATE_UP: ((fmt.F32_PANELS, 0),)}, gains={rec.ROLE_GATE_UP: 3e-8}
            ),
        )
    ),
    "embed-scale": Shape((GEMMA,), embed_scale=8.0, tied=False),
}
KV = {"kv-f32": rec.KV_F32, "kv-f16": rec.KV_F16, "kv-int8": rec.KV_INT8}


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], tuple[Path, F32]]:
    """Factory: artifact and the interpreter's logits for IDS, made once a module."""
    folder = tmp_path_factory.mktemp("made")
    done: dict[tuple[str, str], tuple[Path, F32]] = {}

    def get(name: str, kv: str) -> tuple[Path, F32]:
        if (name, kv) not in done:
            shape = replace(SHAPES[name], kv_type=KV[kv], context=96, chunk=96)
            ids = [i % shape.vocab for i in IDS]
            data = make(shape, seed=len(done))
            path = folder / f"{name}-{kv}.gembin"
            path.write_bytes(data)
            done[name, kv] = path, interp.Interpreter(rec.Image(data)).logits(ids)
        return done[name, kv]

    return get


def ids_of(name: str) -> list[int]:
    return [i % SHAPES[name].vocab for i in IDS]


def assert_same(got: F32, want: F32) -> None:
    assert got.shape == want.shape
    wrong = np.argwhere(bits(got) != bits(want))
    assert wrong.size == 0, (
        f"{len(wrong)} of {got.size} logits differ, first at position, row {wrong[0].tolist()}; "
        f"largest difference {np.abs(got - want).max()}"
    )


@pytest.mark.parametrize("kernel", engine.kernels())
@pytest.mark.parametrize("kv", sorted(KV))
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_logits_equal_the_interpreter(
    made: Callable[[str, str], tuple[Path, F32]], name: str, kv: str, kernel: str
) -> None:
    path, want = made(name, kv)
    for threads, chunk in ((1, 96), (2, 7), (3, 1)):
        with engine.opened(path, kernel=kernel, threads=threads, prefill_batch_size=chunk) as e:
            assert_same(e.evaluate(ids_of(name)), want)


@pytest.mark.parametrize("kernel", engine.kernels())
@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("chunk", [1, 7, 32, 96])
def test_logits_do_not_depend_on_threads_or_chunks(
    made: Callable[[str, str], tuple[Path, F32]], kernel: str, threads: int, chunk: int
) -> None:
    for name, kv in (("mixed", "kv-int8"), ("q4h", "kv-int8"), ("f32", "kv-f32")):
        path, want = made(name, kv)
        ids = ids_of(name)
        with engine.opened(path, kernel=kernel, threads=threads, prefill_batch_size=chunk) as e:
            assert_same(e.prefill(ids[:40])[None], want[39:40])
            rows = [e.decode(token) for token in ids[40:43]]
            assert_same(np.stack(rows), want[40:43])
            assert_same(e.evaluate(ids[43:]), want[43:])
            e.reset()
            assert_same(e.prefill(ids)[None], want[-1:])


def test_stored_vectors_made_by_the_interpreter_pass(tmp_path: Path) -> None:
    prompt, steps = [3, 1, 4, 1, 5], 6

    def fill(data: bytes) -> Any:
        reader = interp.Interpreter(rec.Image(data))
        ids = list(prompt)
        for _ in range(steps):
            ids.append(interp.greedy(reader.logits(ids)[-1]))
        row = np.zeros((), rec.TEST)
        row["prompt_count"], row["step_count"] = len(prompt), steps
        row["prompt"][: len(prompt)] = prompt
        row["steps"][:steps] = ids[len(prompt) :]
        row["digest"] = interp.vector_digest(reader, prompt, ids[len(prompt) :])
        return row

    path = tmp_path / "vectors.gembin"
    path.write_bytes(make(SHAPES["q4h"], 5, fill))
    with engine.opened(path, threads=2) as e:
        assert e.context.run_tests() == 1
        want = rec.Image.load(path).tests[0]
        assert e.greedy(prompt, steps) == want["steps"][:steps].tolist()


def test_shorter_context_gives_the_same_logits(
    made: Callable[[str, str], tuple[Path, F32]],
) -> None:
    path, want = made("softcaps", "kv-int8")
    with engine.opened(path, kv_cache_size=40) as e:
        assert_same(e.evaluate(ids_of("softcaps")[:40]), want[:40])
        with pytest.raises(GemRunError):
            e.decode(1)
