"""Float32 arithmetic of csrc/NUMERICS.md in NumPy: every operation rounds as the engine's does.

Arrays are float32 unless said; the last axis is the one that is reduced. Nothing here calls a libm
function: NumPy's + - * / and sqrt on float32 are IEEE operations, all else is built from them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]

LANES = 16
ROUND_MAGIC = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer's bits
ROUND_BITS = 0x4B400000
TINY_AMAX = np.float32(2.0**-50)  # F4: below this a group is all zero


class NonFinite(ArithmeticError):
    """NaN or infinity in one of the places of section 9."""


def f32(value: float) -> np.float32:
    """The float32 constant nearest to a decimal literal, as in C with suffix f."""
    rounded: np.float32 = np.float32(value)
    return rounded


# ---- fmaf (F2) ----


def fmaf(x: npt.ArrayLike, y: npt.ArrayLike, z: npt.ArrayLike) -> F32:
    """x * y + z with one rounding to float32.

    The product of two 24-bit significands is exact in float64. The sum is made exact by TwoSum and
    kept to 53 bits rounded to odd, so that the final rounding to 24 bits is the only one.
    """
    product = np.asarray(x, np.float32).astype(np.float64) * np.asarray(y, np.float32)
    addend = np.asarray(z, np.float32).astype(np.float64)
    product, addend = np.broadcast_arrays(product, addend)
    with np.errstate(invalid="ignore", over="ignore"):
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        if np.any(error != 0):
            total = _to_odd(total, error)
        return np.asarray(total, np.float64).astype(np.float32)


def _to_odd(total: F64, error: F64) -> F64:
    """Round `total + error` to odd: an inexact sum with an even significand moves towards the
    error's side by one step of the bits."""
    bits = np.ascontiguousarray(total).view(np.int64)
    inexact = np.isfinite(total) & (error != 0) & ((bits & 1) == 0)
    away = (error > 0) == (total > 0)
    return np.asarray(bits + np.where(inexact, np.where(away, 1, -1), 0)).view(np.float64)


# ---- reductions (R1) ----


def tree16(lanes: F32) -> F32:
    """Sum 16 lanes on the last axis: +8, +4, +2, +1."""
    width = LANES // 2
    while width:
        lanes = lanes[..., :width] + lanes[..., width : 2 * width]
        width //= 2
    return np.asarray(lanes[..., 0])


def dot16(x: F32, y: F32) -> F32:
    """Dot product over the last axis: lane i % 16 by fmaf, ascending, then the tree."""
    x, y = np.broadcast_arrays(x, y)
    size = x.shape[-1]
    lanes = np.zeros((*x.shape[:-1], LANES), np.float32)
    for first in range(0, size, LANES):
        count = min(LANES, size - first)
        part = slice(first, first + count)
        lanes[..., :count] = fmaf(x[..., part], y[..., part], lanes[..., :count])
    return tree16(lanes)


def sum16(x: F32) -> F32:
    """Sum over the last axis: lane i % 16 by plain additions, ascending, then the tree."""
    size = x.shape[-1]
    lanes = np.zeros((*x.shape[:-1], LANES), np.float32)
    for first in range(0, size, LANES):
        count = min(LANES, size - first)
        lanes[..., :count] += x[..., first : first + count]
    return tree16(lanes)


# ---- integers and small floats ----


def bits(x: F32) -> npt.NDArray[np.uint32]:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def finite(x: F32, what: str) -> F32:
    """x as it is; NonFinite where a value has all exponent bits set."""
    if np.any((bits(x) & np.uint32(0x7F800000)) == 0x7F800000):
        raise NonFinite(what)
    return x


def group_amax(x: F32) -> F32:
    """Largest magnitude on the last axis, as an integer maximum of the bits (A1)."""
    top = (bits(x) & np.uint32(0x7FFFFFFF)).max(axis=-1)
    if np.any(top >= 0x7F800000):
        raise NonFinite("NaN or infinity in an activation group")
    return np.asarray(top, np.uint32).view(np.float32)


def nearest(x: F32) -> I32:
    """Round to nearest, ties to even, of |x| < 2^22 by the magic addition (A1)."""
    return (bits(x + ROUND_MAGIC).astype(np.int64) - ROUND_BITS).astype(np.int32)


def quantise_activations(x: F32) -> tuple[I32, F32]:
    """A1: groups on the last axis -> codes in -127..127 and sa."""
    amax = group_amax(x)
    live = amax >= TINY_AMAX
    safe = np.where(live, amax, np.float32(1))
    codes = nearest(x * (f32(127) / safe)[..., None])
    return np.where(live[..., None], codes, 0), np.where(live, safe / f32(127), f32(0))


def bfloat16_up(x: F32) -> F32:
    """The smallest bfloat16 that is not below x >= 0."""
    raw = bits(x)
    return np.asarray((raw + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def quantise_kv(x: F32, group: int) -> tuple[I32, F32]:
    """K1: [.., n] -> codes [.., n / group, group] and bfloat16 scales [.., n / group]."""
    groups = x.reshape(*x.shape[:-1], -1, group)
    amax = group_amax(groups)
    live = amax >= TINY_AMAX
    safe: F32 = np.where(live, amax, f32(1))
    scale = bfloat16_up(np.divide(safe, f32(127), dtype=np.float32))
    codes = nearest(groups * (f32(1) / scale)[..., None])
    return np.where(live[..., None], codes, 0), np.where(live, scale, f32(0))


def levels4(codes: I32) -> I32:
    """Section 7: int8 codes to the nearest of 15 levels, 17 apart."""
    level = (codes + 127) // 17
    return 17 * level - 119


def rotate(x: F32, query: bool) -> F32:
    """Section 7: every block of the largest power of two that divides the width, by sums and
    differences of pairs at a distance of 1, 2, 4, ..; a query then over the block's width."""
    width = x.shape[-1]
    block = width & -width
    y, h = x, 1
    while h < block:
        pairs = y.reshape(*x.shape[:-1], width // (2 * h), 2, h)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([a + b, a - b], axis=-2)
        h *= 2
    y = y.reshape(x.shape)
    return y * f32(1 / block) if query else y


# ---- norms, RoPE ----


def rmsnorm(x: F32, weight: F32, eps: np.float32) -> F32:
    """r = 1 / sqrt(ss / n + eps); y = (x * r) * w."""
    size = np.float32(x.shape[-1])
    squares = finite(dot16(x, x), "sum of squares of a norm")
    r = f32(1) / np.sqrt(squares / size + eps)
    y: F32 = (x * r[..., None]) * weight
    return y


def rope(x: F32, cos: F32, sin: F32) -> F32:
    """Pairs (i, i + d / 2) of the last axis; cos and sin broadcast to [.., d / 2]. No fmaf."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([(a * cos) - (b * sin), (b * cos) + (a * sin)], axis=-1)


# ---- functions (section 2) ----

LOG2E = f32(float.fromhex("0x1.715476p+0"))
LN2_HIGH = f32(float.fromhex("0x1.62e400p-1"))
LN2_LOW = f32(float.fromhex("0x1.7f7d1cp-20"))
EXP = [
    f32(float.fromhex(c))
    for c in (
        "0x1.6a4748p-10", "0x1.1239a2p-7", "0x1.5558b6p-5", "0x1.555492p-3", "0x1.fffffcp-2",
        "0x1p0", "0x1p0",
    )
]  # fmt: skip
TANH = [
    f32(float.fromhex(c))
    for c in (
        "-0x1.750ce2p-8", "0x1.51f8cep-6", "-0x1.b835a4p-5", "0x1.1106f6p-3", "-0x1.555532p-2",
    )
]  # fmt: skip
GELU_OUTER, GELU_CUBE = f32(float.fromhex("0x1.988454p-1")), f32(float.fromhex("0x1.6e4e26p-5"))


def horner(coefficients: list[np.float32], x: F32) -> F32:
    """Highest power first, one fmaf a step."""
    p = np.full(x.shape, coefficients[0], np.float32)
    for c in coefficients[1:]:
        p = fmaf(p, x, c)
    return p


def expf(x: npt.ArrayLike) -> F32:
    """exp: +0 below -87, exp(88) above 88, within 1 ulp between. NaN stays NaN."""
    x = np.asarray(x, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        c = np.where(x > f32(88), f32(88), x)
        t = c * LOG2E + ROUND_MAGIC
        n = t - ROUND_MAGIC
        r = fmaf(n, -LN2_HIGH, c)
        r = fmaf(n, -LN2_LOW, r)
        p = horner(EXP, r)
        moved = bits(p) + ((bits(t) - np.uint32(ROUND_BITS)) << np.uint32(23))
    y = np.asarray(moved, np.uint32).view(np.float32)
    y = np.where(x < f32(-87), f32(0), y)
    return np.where(np.isnan(x), x, y).reshape(x.shape)


def tanhf(x: npt.ArrayLike) -> F32:
    x = np.asarray(x, np.float32)
    a = np.abs(x)
    with np.errstate(invalid="ignore", over="ignore"):
        z = x * x
        small = fmaf(x * z, horner(TANH, z), x)
        t = expf(f32(-2) * a)
        large = np.copysign((f32(1) - t) / (f32(1) + t), x)
    return np.where(a < f32(0.625), small, large)


def sigmoid(x: F32) -> F32:
    e = expf(-np.abs(x))
    d = f32(1) + e
    y: F32 = np.where(x >= 0, f32(1) / d, e / d)
    return y


def silu(x: F32) -> F32:
    y: F32 = x * sigmoid(x)
    return y


def gelu_tanh(x: F32) -> F32:
    c = (x * x) * x
    u = GELU_OUTER * (x + GELU_CUBE * c)
    y: F32 = (f32(0.5) * x) * (f32(1) + tanhf(u))
    return y


def softcap(z: F32, c: np.float32) -> F32:
    y: F32 = c * tanhf(z / c)
    return y


def softmax_parts(scores: F32, visible: npt.NDArray[np.bool_]) -> tuple[F32, F32]:
    """Scores [T, heads, keys] and [T, keys], or [T, heads, keys] where heads see different keys,
    -> e (0 where hidden) and the sums [T, heads].

    A hidden key adds +0 to a sum that is never -0, so it does not show.
    """
    seen = visible if visible.ndim == 3 else visible[:, None]
    top = np.where(seen, scores, f32(-np.inf)).max(axis=-1)
    e = np.where(seen, expf(np.where(seen, scores - top[..., None], f32(0))), f32(0))
    return e, sum16(e)
