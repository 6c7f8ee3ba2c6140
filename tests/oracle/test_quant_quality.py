"""The helper against outside measures: an exhaustive search, gguf's quantisers, mpmath."""

from __future__ import annotations

import gguf
import mpmath
import numpy as np
import numpy.typing as npt
import pytest

from gemmake.model import RopeSpec
from gemmake.passes import quant
from gemmake.passes.quant import Format

F32 = npt.NDArray[np.float32]


def relative_error(w: F32, stored: quant.Q4hRows | quant.Q8Rows | quant.Q4rawRows) -> float:
    error, power = quant.error_sums(w, quant.dequantise(stored))
    return float(error.sum() / power.sum())


def requantised(w: F32, kind: gguf.GGMLQuantizationType) -> F32:
    """What a GGUF file of this type would hold."""
    out = gguf.quants.dequantize(gguf.quants.quantize(w, kind), kind)
    return np.ascontiguousarray(out, np.float32)


def gaussian(rows: int, cols: int) -> F32:
    return np.random.default_rng(5).standard_normal((rows, cols)).astype(np.float32)


def exhaustive(w: F32) -> float:
    """Relative error of the best pair of bounds out of 51 x 51 with refitted step and zero."""
    groups = w.reshape(-1, 32).astype(np.float64)
    lo, hi = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
    best = np.full(len(groups), np.inf)
    for a in np.linspace(0.5, 1.1, 51):
        for b in np.linspace(0.5, 1.1, 51):
            step = (hi * b - lo * a) / 15
            codes = np.clip(np.rint((groups - (lo * a)[:, None]) / step[:, None]), 0, 15)
            mean_c, mean_w = codes.mean(1), groups.mean(1)
            dc, dw = codes - mean_c[:, None], groups - mean_w[:, None]
            cov = (dc * dw).sum(1)
            best = np.minimum(best, (dw * dw).sum(1) - cov * cov / (dc * dc).sum(1))
    return float(best.sum() / (groups * groups).sum())


def test_search_is_close_to_an_exhaustive_one() -> None:
    """Measured: 1.4 % above it before the grid of scale8 and zp, 1.7 % after."""
    w = gaussian(32, 512)
    assert relative_error(w, quant.search_rows(w)) <= 1.03 * exhaustive(w)


def test_search_beats_the_gguf_four_bit_types() -> None:
    w = gaussian(64, 512)
    own = relative_error(w, quant.search_rows(w))
    for kind in (gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1):
        theirs = requantised(w, kind)
        error, power = quant.error_sums(w, theirs)
        assert own < 0.85 * float(error.sum() / power.sum())


def test_importance_lowers_the_weighted_error() -> None:
    w = gaussian(32, 256)
    importance = np.exp(1.5 * np.random.default_rng(2).standard_normal(256)).astype(np.float32)
    plain, weighted = quant.search_rows(w), quant.search_rows(w, importance)
    errors = [
        quant.error_sums(w, quant.dequantise(r), importance)[0].sum() for r in (plain, weighted)
    ]
    assert errors[1] < 0.85 * errors[0]


def test_asymmetric_lattice_is_recovered() -> None:
    """Q4_1 weights: every code is found again; what is left is the grid of scale8 and zp."""
    w = requantised(gaussian(64, 512), gguf.GGMLQuantizationType.Q4_1)
    stored = quant.search_rows(w)
    assert relative_error(w, stored) < 1e-4
    for row, codes in zip(w, stored.codes, strict=True):
        for g in range(16):
            levels = np.unique(row[32 * g : 32 * g + 32], return_inverse=True)[1]
            found = codes[32 * g : 32 * g + 32].astype(int)
            assert len(np.unique(found)) == len(np.unique(levels))


def test_symmetric_lattice_is_recovered() -> None:
    w = requantised(gaussian(64, 512), gguf.GGMLQuantizationType.Q4_0)
    assert relative_error(w, quant.search_rows(w)) < 1e-4


@pytest.mark.parametrize("fmt", [Format.Q4RAW_F16, Format.Q4RAW_BF16])
def test_q4raw_imports_a_lattice_bit_for_bit(fmt: Format) -> None:
    r = np.random.default_rng(3)
    codes = r.integers(-8, 8, (48, 320)).astype(np.float32)
    codes[5, :32] = np.arange(32) % 3  # a group that never reaches -8
    scales = (r.standard_normal((48, 10)) * 0.05).astype(np.float32)
    if fmt == Format.Q4RAW_F16:
        scales = scales.astype(np.float16).astype(np.float32)
    else:
        scales = (scales.view(np.uint32) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    w = (codes.reshape(48, 10, 32) * scales[:, :, None]).reshape(48, 320)
    stored = quant.search_q4raw(w, fmt=fmt)
    assert stored.exact_groups == 480
    np.testing.assert_array_equal(quant.dequantise(stored), w)


def test_q4raw_imports_gguf_q4_0_bit_for_bit() -> None:
    w = requantised(gaussian(64, 512), gguf.GGMLQuantizationType.Q4_0)
    stored = quant.search_q4raw(w)
    assert stored.exact_groups == 64 * 16
    np.testing.assert_array_equal(quant.dequantise(stored), w)


def test_q4raw_of_other_weights_beats_q4_0() -> None:
    w = gaussian(64, 512)
    stored = quant.search_q4raw(w)
    error, power = quant.error_sums(w, requantised(w, gguf.GGMLQuantizationType.Q4_0))
    assert relative_error(w, stored) < 0.95 * float(error.sum() / power.sum())


def test_q8_formats() -> None:
    w = gaussian(64, 512)
    plain = np.rint(w / (np.abs(w).max(1, keepdims=True) / 127))
    simple = plain.astype(np.float32) * (np.abs(w).max(1, keepdims=True) / 127)
    error, power = quant.error_sums(w, simple.astype(np.float32))
    assert relative_error(w, quant.search_q8_rows(w)) <= float(error.sum() / power.sum())
    body = quant.search_rows(w, segments=quant.whole(512, Format.Q8))
    assert relative_error(w, body) < 5e-5


def test_error_feedback_lowers_the_output_error() -> None:
    """H-weighted error on correlated inputs: half of that of the diagonal-weighted search."""
    r = np.random.default_rng(11)
    cols = 256
    x = r.standard_normal((2048, cols)) @ (r.standard_normal((cols, cols)) / 16 + np.eye(cols))
    x = (x * np.exp(0.7 * r.standard_normal(cols))).astype(np.float32)
    w = (r.standard_t(6, (96, cols)) * 0.02).astype(np.float32)
    h = quant.new_hessian(cols)
    quant.hessian_add(h, x)
    power = h.diagonal().astype(np.float32)
    searched = quant.dequantise(quant.search_rows(w, power))
    fed = quant.dequantise(quant.gptq_rows(w, quant.gptq_prepare(h)))
    before, after = (float(((x @ (w - s).T) ** 2).sum()) for s in (searched, fed))
    assert after < 0.7 * before


def test_factor_equals_numpy_cholesky() -> None:
    x = np.random.default_rng(1).standard_normal((400, 130)).astype(np.float32)
    h = quant.new_hessian(130)
    quant.hessian_add(h, x)
    full = np.tril(h) + np.tril(h, -1).T
    full += np.eye(130) * (quant.DAMPING * np.mean(full.diagonal()))
    feedback = quant.gptq_prepare(h)
    full = full[np.ix_(feedback.order, feedback.order)]
    upper = np.linalg.cholesky(full[::-1, ::-1])[::-1, ::-1]
    diag = feedback.diag
    np.testing.assert_allclose(diag, upper.diagonal() ** 2, rtol=1e-6)


# ---- RoPE ----


def exact_freq(rope: RopeSpec, i: int) -> mpmath.mpf:
    """architectures' formulas at 160 bits."""
    f = mpmath.mpf(rope.theta) ** (-mpmath.mpf(2 * i) / rope.dims)
    wave = 2 * mpmath.pi / f
    if rope.kind == "linear":
        return f / rope.factor
    if rope.kind == "llama3":
        if wave > rope.original_context / mpmath.mpf(rope.low_freq_factor):
            return f / rope.factor
        if wave >= rope.original_context / mpmath.mpf(rope.high_freq_factor):
            span = rope.high_freq_factor - rope.low_freq_factor
            s = (rope.original_context / wave - rope.low_freq_factor) / span
            return (1 - s) * f / rope.factor + s * f
    return f


@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec(10000.0, 64),
        RopeSpec(1000000.0, 256),
        RopeSpec(1000000.0, 256, "linear", 8.0),
        RopeSpec(500000.0, 64, "llama3", 32.0, 1.0, 4.0, 8192),
    ],
    ids=["smol", "gemma", "linear", "llama3"],
)
def test_rope_table_against_mpmath(rope: RopeSpec) -> None:
    """Never off by more than one unit in the last place, and hardly ever by that."""
    table = quant.rope_table(rope, 8192)
    np.testing.assert_array_equal(table, quant.rope_table(rope, 8192, threads=1))
    half, off, seen = rope.dims // 2, 0, 0
    with mpmath.workprec(160):
        for i in range(0, half, 5):
            f = exact_freq(rope, i)
            for p in [*range(0, 8192, 257), 1, 8191]:
                pair = (mpmath.cos(p * f), table[p, i]), (mpmath.sin(p * f), table[p, half + i])
                for exact, got in pair:
                    wanted = np.float32(float(exact))
                    assert abs(float(wanted) - float(got)) <= np.spacing(np.abs(wanted))
                    off += int(wanted != got)
                    seen += 1
    assert off <= seen / 1000


def test_sin_cos_exp_log_against_mpmath() -> None:
    r = np.random.default_rng(0)
    cases = [
        (quant.lib.gm_sin, mpmath.sin, r.uniform(-(2.0**20), 2.0**20, 500), 2),
        (quant.lib.gm_cos, mpmath.cos, r.uniform(-(2.0**20), 2.0**20, 500), 2),
        (quant.lib.gm_sin, mpmath.sin, r.uniform(-1, 1, 500), 1),
        (quant.lib.gm_exp, mpmath.exp, r.uniform(-30, 2, 500), 1),
        (quant.lib.gm_log, mpmath.log, np.exp(r.uniform(-30, 42, 500)), 1),
    ]
    with mpmath.workprec(160):
        for own, exact, points, units in cases:
            for x in points:
                wanted = exact(mpmath.mpf(float(x)))
                assert abs(own(float(x)) - wanted) <= units * np.spacing(abs(float(wanted)))


def test_rope_refuses_nonsense() -> None:
    for rope in (
        RopeSpec(10000.0, 63),
        RopeSpec(1.0, 64),
        RopeSpec(10000.0, 64, "yarn"),
        RopeSpec(10000.0, 64, "linear", 0.0),
        RopeSpec(10000.0, 64, "llama3", 8.0, 4.0, 1.0, 8192),
    ):
        with pytest.raises(quant.HelperError):
            quant.rope_freqs(rope)
