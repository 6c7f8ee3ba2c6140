"""The compile-host helper against its slow NumPy definition, bit for bit, and against itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from gemmake.passes import quant
from gemmake.passes.quant import Format, Segment
from reference import quantmath as slow

F32 = npt.NDArray[np.float32]
BASELINE = 1  # flag: the kernels without AVX2
WAYS = [(1, BASELINE), (2, 0), (3, BASELINE), (8, 0)]  # threads, flags; compared with (1, 0)
MIXED = (Segment(Format.Q4H, 1), Segment(Format.Q8, 2), Segment(Format.Q4H, 1))


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def heavy(rows: int, cols: int, seed: int = 0) -> F32:
    """Weights with heavy tails and rows of unequal norm."""
    r = rng(seed)
    norms = np.exp(r.standard_normal((rows, 1)))
    return (r.standard_t(4, (rows, cols)) * norms * 0.02).astype(np.float32)


def correlated(tokens: int, cols: int, seed: int = 1) -> F32:
    """Activations whose columns are correlated and of unequal power."""
    r = rng(seed)
    mix = r.standard_normal((cols, cols)) / np.sqrt(cols) + np.eye(cols)
    x = r.standard_normal((tokens, cols)) @ mix
    return (x * np.exp(0.7 * r.standard_normal(cols))).astype(np.float32)


def same(a: quant.Q4hRows, b: quant.Q4hRows | slow.Stored) -> None:
    for name in ("supers", "scales", "zps", "codes"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


def test_search_equals_slow_definition() -> None:
    w = heavy(21, 100)
    importance = np.exp(rng(3).standard_normal(100)).astype(np.float32)
    same(quant.search_rows(w), slow.search_rows(w))
    same(quant.search_rows(w, importance), slow.search_rows(w, importance))


def test_search_of_mixed_formats_equals_slow_definition() -> None:
    w = heavy(9, 128, 5)
    kinds = np.array([3, 6, 6, 3], np.uint8)
    same(quant.search_rows(w, segments=MIXED), slow.search_rows(w, None, kinds))


def test_gptq_equals_slow_definition() -> None:
    w, x = heavy(37, 100, 7), correlated(70, 100)
    lower = slow.hessian(x)
    feedback = quant.gptq_prepare(lower)
    same(quant.gptq_rows(w, feedback), slow.gptq(w, lower, quant.DAMPING))
    kinds = np.array([3, 6, 6, 3], np.uint8)
    same(quant.gptq_rows(w, feedback, MIXED), slow.gptq(w, lower, quant.DAMPING, kinds))


@pytest.mark.parametrize("cols", [1, 31, 32, 33, 64, 333])
def test_columns_settle_by_group_the_strongest_first(cols: int) -> None:
    diagonal = rng(cols).integers(1, 50, cols).astype(np.float64)  # with ties
    order = quant.settling_order(diagonal)
    assert order.tolist() == slow.settling_order(diagonal)
    assert sorted(order) == list(range(cols))
    for first in range(0, cols, 32):
        assert len(set(order[first : first + 32] // 32)) == 1


@pytest.mark.parametrize(("tokens", "cols"), [(1, 1), (33, 5), (70, 100), (64, 261)])
def test_hessian_equals_token_order(tokens: int, cols: int) -> None:
    x = correlated(tokens, cols)
    wanted = slow.hessian(x)
    for threads, flags in [(1, 0), *WAYS]:
        h = quant.new_hessian(cols)
        quant.hessian_add(h, x, threads=threads, flags=flags)
        np.testing.assert_array_equal(np.tril(h), wanted)


def test_hessian_in_calls_of_32_tokens_is_the_same() -> None:
    x = correlated(160, 70)
    whole, parts = quant.new_hessian(70), quant.new_hessian(70)
    quant.hessian_add(whole, x)
    for first in (0, 32, 96):
        quant.hessian_add(parts, x[first : {0: 32, 32: 96, 96: 160}[first]])
    np.testing.assert_array_equal(np.tril(whole), np.tril(parts))


def search(threads: int, flags: int) -> quant.Q4hRows:
    return quant.search_rows(heavy(67, 333), threads=threads, flags=flags)


def search_mixed(threads: int, flags: int) -> quant.Q4hRows:
    return quant.search_rows(heavy(67, 128), segments=MIXED, threads=threads, flags=flags)


def gptq(threads: int, flags: int) -> quant.Q4hRows:
    h = quant.new_hessian(333)
    quant.hessian_add(h, correlated(400, 333), threads=threads, flags=flags)
    feedback = quant.gptq_prepare(h, threads=threads, flags=flags)
    return quant.gptq_rows(heavy(150, 333), feedback, threads=threads, flags=flags)


@pytest.mark.parametrize("make", [search, search_mixed, gptq])
def test_threads_and_instruction_sets_agree(make: Callable[[int, int], quant.Q4hRows]) -> None:
    wanted = make(1, 0)
    for threads, flags in WAYS:
        same(make(threads, flags), wanted)


def test_q8_threads_and_instruction_sets_agree() -> None:
    w = heavy(53, 301)
    wanted = quant.search_q8_rows(w, threads=1)
    for threads, flags in WAYS:
        got = quant.search_q8_rows(w, threads=threads, flags=flags)
        np.testing.assert_array_equal(got.codes, wanted.codes)
        np.testing.assert_array_equal(got.supers, wanted.supers)


def test_blocks_of_rows_equal_the_whole() -> None:
    w = heavy(64, 96)
    whole = quant.search_rows(w)
    for first in (0, 16, 48):
        part = quant.search_rows(w[first : first + 16])
        np.testing.assert_array_equal(part.codes, whole.codes[first : first + 16])
        np.testing.assert_array_equal(part.supers, whole.supers[first : first + 16])


# ---- what must hold for any weights ----


@pytest.mark.parametrize("cols", [1, 31, 32, 33, 4304])
def test_width_need_not_divide_by_32(cols: int) -> None:
    w = heavy(5, cols, cols)
    out = quant.search_rows(w)
    assert out.codes.shape == (5, -(-cols // 32) * 32)
    assert out.codes.max() <= 15
    assert not out.codes[:, cols:].any()
    error, power = quant.error_sums(w, quant.dequantise(out))
    assert (error <= 0.015 * power).all()


def test_zero_row_zero_group_tiny_group() -> None:
    w = heavy(4, 128)
    w[1] = 0
    w[2, 32:64] = 0
    w[3, 64:96] = 1e-9 * np.sign(w[3, 64:96])
    for out in (quant.search_rows(w), _gptq_of(w)):
        stored = quant.dequantise(out)
        assert np.isfinite(stored).all()
        assert out.supers[1] == 0
        assert not stored[1].any()
        assert not stored[2, 32:64].any()
        assert out.scales[2, 1] == 0
        assert not out.codes[2, 32:64].any()
        assert out.zps[2, 1] == 0
        assert np.abs(stored[3, 64:96]).max() <= 1e-4 * np.abs(w[3]).max()
        assert out.zero_groups >= 5


def _gptq_of(w: F32) -> quant.Q4hRows:
    """Without correlations no error moves, so zero groups stay zero."""
    return quant.gptq_rows(w, quant.gptq_prepare(np.eye(w.shape[1])))


def test_tiny_rows_have_super_zero_or_at_least_2_to_minus_40() -> None:
    scales = np.float32(2.0) ** -np.arange(10, 150, dtype=np.float32)
    w = heavy(140, 64) * scales[:, None].astype(np.float32)
    out = quant.search_rows(w)
    assert ((out.supers == 0) | (out.supers >= 2.0**-40)).all()
    assert (out.supers == 0).any()
    assert not quant.dequantise(out)[out.supers == 0].any()
    assert not out.codes[out.supers == 0].any()
    rows = quant.search_q8_rows(w)
    assert ((rows.supers == 0) | (rows.supers >= 2.0**-40)).all()
    assert (rows.codes[rows.supers == 0] == 128).all()


def test_large_and_one_sided_weights() -> None:
    for w in (heavy(3, 64) * 1e30, np.abs(heavy(3, 64)), -np.abs(heavy(3, 64))):
        error, power = quant.error_sums(w, quant.dequantise(quant.search_rows(w)))
        assert (error <= 0.01 * power).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_weight_is_named(value: float) -> None:
    w = heavy(20, 40)
    w[17, 33] = value
    feedback = quant.gptq_prepare(np.eye(40))
    for call in (
        quant.search_rows,
        quant.search_q8_rows,
        quant.search_q4raw,
        lambda w: quant.gptq_rows(w, feedback),
        lambda w: quant.pack_float(w, Format.F32),
    ):
        with pytest.raises(quant.NonFiniteWeight, match="row 17, column 33") as caught:
            call(w)
        assert (caught.value.row, caught.value.col) == (17, 33)


def test_wrong_arguments_are_refused() -> None:
    w = heavy(4, 64)
    for call in (
        lambda: quant.search_rows(w[0]),
        lambda: quant.search_rows(w, np.ones(63, np.float32)),
        lambda: quant.search_rows(w, -np.ones(64, np.float32)),
        lambda: quant.search_rows(w, threads=65),
        lambda: quant.search_rows(w, flags=2),
        lambda: quant.search_rows(w, segments=(Segment(Format.Q4H, 1),)),
        lambda: quant.search_rows(w, segments=(Segment(Format.Q4H, 1), Segment(Format.Q4H, 1))),
        lambda: quant.search_rows(w, segments=(Segment(Format.F32, 2),)),
        lambda: quant.search_q4raw(w, fmt=Format.Q4H),
        lambda: quant.gptq_prepare(np.eye(4), damping=0.0),
        lambda: quant.gptq_rows(w, quant.gptq_prepare(np.eye(32))),
        lambda: quant.hessian_add(np.eye(32), w),
        lambda: quant.pack_float(np.full((1, 1), 70000.0, np.float32), Format.F16),
    ):
        with pytest.raises(quant.HelperError):
            call()


def test_hessian_refuses_nan() -> None:
    h = quant.new_hessian(4)
    with pytest.raises(quant.HelperError, match="NaN"):
        quant.hessian_add(h, np.full((1, 4), np.nan, np.float32))
    with pytest.raises(quant.HelperError, match="NaN"):
        quant.gptq_prepare(np.full((4, 4), np.nan))


def test_dead_columns_do_not_disturb_the_others() -> None:
    """Columns that calibration never touched: no NaN, no feedback, ordinary rounding."""
    x = correlated(300, 96)
    x[:, [3, 40, 41]] = 0
    w = heavy(16, 96)
    h = quant.new_hessian(96)
    quant.hessian_add(h, x)
    feedback = quant.gptq_prepare(h)
    assert (feedback.diag > 0).all()
    stored = quant.dequantise(quant.gptq_rows(w, feedback))
    error, power = quant.error_sums(w[:, [3, 40, 41]], stored[:, [3, 40, 41]])
    assert error.sum() <= 0.05 * power.sum()
    all_dead = quant.gptq_prepare(quant.new_hessian(96))
    np.testing.assert_array_equal(all_dead.diag, np.ones(96, np.float32))
