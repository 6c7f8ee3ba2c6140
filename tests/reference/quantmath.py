"""Slow NumPy definitions of the compile-host helper: search, error feedback, Hessian, layout.

They follow csrc/gm_*.c operation by operation in float32, so that results can be compared bit for
bit; rows are the vector axis here, as they are lanes there. The layout is defined a second time
from the text of csrc/FORMAT.md, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

ONE = np.float32(1)
MAGIC = np.float32(12582912.0)
BIG = np.float32(3e38)
Z_MAX = np.float32(15.9375)
SIXTEENTH = np.float32(0.0625)
SUPER_MIN = np.float32(2.0**-40)
AMAX_MIN = np.float32(2.0**-100)
Q_MIN = np.float32(2.0**-14)
PULLS = tuple(np.float32(p) for p in (1.07, 1.02, 0.96, 0.9, 0.83, 0.75))
SEARCH_LEVELS = np.float32(252)
GPTQ_LEVELS = np.float32(208)
Q8 = 6  # format number of a q8 group; anything else is q4h


@dataclass(frozen=True)
class Fit:
    """Step, zero point and error of each row's group, float32 [rows]."""

    step: F32
    z: F32
    err: F32


@dataclass(frozen=True)
class Grid:
    """The stored form: scale8, zero point in sixteenths, error, float32 [rows]."""

    scale: F32
    zp: F32
    err: F32


@dataclass(frozen=True)
class Stored:
    """Quantised rows as arrays of the helper's shapes."""

    codes: U8  # [rows, padded]
    scales: U8  # [rows, groups]
    zps: U8  # [rows, groups]
    supers: F32  # [rows]


def _keep(mask: Bools, x: F32) -> F32:
    return np.where(mask, x, np.float32(0)).astype(np.float32)


def _full(x: F32, value: np.float32) -> F32:
    return np.full_like(x, value)


def _whole(x: F32, lo: float, hi: float) -> F32:
    x = np.where(x < np.float32(hi), x, np.float32(hi))
    x = np.where(x > np.float32(lo), x, np.float32(lo)).astype(np.float32)
    return (x + MAGIC) - MAGIC


def _code15(t: F32) -> F32:
    u = np.float32(15) - t
    u = np.float32(15) - _keep(u > 0, u)
    u = _keep(u > 0, u)
    return (u + MAGIC) - MAGIC


def _code127(t: F32) -> F32:
    return _whole(t, -127.0, 127.0)


def weighting(importance: F32 | None, cols: int) -> tuple[F32, F32]:
    """Importance per padded column, 1 at most in a group, and its sums per group."""
    groups = -(-cols // 32)
    q = np.zeros((groups, 32), np.float32)
    given = np.ones(cols, np.float32) if importance is None else importance
    for g in range(groups):
        own = given[32 * g : min(cols, 32 * g + 32)]
        top = own.max()
        scaled = own / top if importance is not None and top > 0 else np.ones_like(own)
        q[g, : own.size] = np.maximum(scaled, Q_MIN)
    sums = np.zeros(groups, np.float32)
    for j in range(32):
        sums = sums + q[:, j]
    return q, sums


def _try_fit(w: F32, q: F32, sq: np.float32, step: F32, z: F32, best: Fit) -> Fit:
    """w [32, rows]."""
    inv = ONE / step
    rr, r1, rc, c1, cc = (np.zeros_like(step) for _ in range(5))
    for j in range(32):
        t = w[j] * inv + z
        c = _code15(t)
        r = t - c
        qr, qc = r * q[j], c * q[j]
        rr = rr + qr * r
        r1 = r1 + qr
        rc = rc + qr * c
        c1 = c1 + qc
        cc = cc + qc * c
    mean_c, mean_r = c1 / sq, r1 / sq
    var, cov = cc - c1 * mean_c, rc - r1 * mean_c
    spread = var > np.float32(1e-6) * sq
    beta = _keep(spread, cov / np.where(spread, var, ONE))
    err = rr - r1 * mean_r - beta * cov
    grow = ONE + beta
    z2 = ((z - mean_r) + beta * mean_c) / grow
    fits = (grow > np.float32(0.25)) & (z2 >= 0) & (z2 <= Z_MAX)
    err = np.where(fits, err, rr)
    err = _keep(err > 0, err) * (step * step)
    better = err < best.err
    step = np.where(fits, step * grow, step)
    return Fit(
        np.where(better, step, best.step),
        np.where(better, np.where(fits, z2, z), best.z),
        np.where(better, err, best.err),
    )


def best_fit(w: F32, q: F32, sq: np.float32) -> Fit:
    """The search of one group, w [32, rows] with a largest magnitude of 1 in every row."""
    lo, hi = np.minimum(w.min(axis=0), 0) + np.float32(0), np.maximum(w.max(axis=0), 0)
    span = np.where(hi - lo > 0, hi - lo, ONE)
    fifteen = np.float32(15)
    best = Fit(span / fifteen, -lo * (fifteen / span), _full(lo, BIG))
    for a in PULLS:
        for b in PULLS:
            low, high = lo * a, hi * b
            width = np.where(high - low > 0, high - low, ONE)
            best = _try_fit(w, q, sq, width / fifteen, -low * (fifteen / width), best)
    for n in range(8, 16):
        step = span / np.float32(n)
        best = _try_fit(w, q, sq, step, -lo / step, best)
    for _ in range(3):
        best = _try_fit(w, q, sq, best.step, best.z, best)
    return best


def _error_at(w: F32, q: F32, inv: F32, z: F32) -> tuple[F32, F32]:
    rr, r1 = np.zeros_like(inv), np.zeros_like(inv)
    for j in range(32):
        t = w[j] * inv + z
        r = t - _code15(t)
        qr = r * q[j]
        rr = rr + qr * r
        r1 = r1 + qr
    return rr, r1


def _try_grid(w: F32, q: F32, unit: F32, scale: F32, zp: F32, best: Grid) -> Grid:
    step = scale * unit
    err = _error_at(w, q, ONE / step, zp * SIXTEENTH)[0] * (step * step)
    better = err < best.err
    return Grid(
        np.where(better, scale, best.scale),
        np.where(better, zp, best.zp),
        np.where(better, err, best.err),
    )


def _drop_useless(w: F32, q: F32, best: Grid) -> Grid:
    none = np.zeros_like(best.err)
    for j in range(32):
        none = none + (w[j] * q[j]) * w[j]
    used = best.err < none
    return replace(best, scale=_keep(used, best.scale), zp=_keep(used, best.zp))


def snap(w: F32, q: F32, sq: np.float32, unit: F32, fit: Fit) -> Grid:
    """The nearest good grid point of a q4h group."""
    zero = np.zeros_like(unit)
    best = Grid(zero, zero, _full(unit, BIG))
    nearest = _whole(fit.step / unit, 1, 255)
    for d in (-1, 0, 1):
        scale = _whole(nearest + np.float32(d), 1, 255)
        drift = _error_at(w, q, ONE / (scale * unit), fit.z)[1]
        zp = _whole((fit.z - drift / sq) * np.float32(16), 0, 255)
        best = _try_grid(w, q, unit, scale, zp, best)
    center, scale = best.zp, best.scale
    for d in (-1, 1):
        best = _try_grid(w, q, unit, scale, _whole(center + np.float32(d), 0, 255), best)
    return _drop_useless(w, q, best)


def snap_q8(w: F32, q: F32, unit: F32) -> Grid:
    """The grid point of a q8 group."""
    zero = np.zeros_like(unit)
    best = Grid(zero, zero, _full(unit, BIG))
    nearest = _whole((ONE / np.float32(127)) / unit, 1, 255)
    for d in (-1, 0, 1):
        scale = _whole(nearest + np.float32(d), 1, 255)
        step = scale * unit
        inv, rr = ONE / step, np.zeros_like(unit)
        for j in range(32):
            t = w[j] * inv
            r = t - _code127(t)
            rr = rr + (r * q[j]) * r
        rr = rr * (step * step)
        better = rr < best.err
        best = Grid(np.where(better, scale, best.scale), zero, np.where(better, rr, best.err))
    return _drop_useless(w, q, best)


def _scaled(w: F32) -> tuple[F32, F32, F32]:
    """w [32, rows] over its largest magnitude, that magnitude, and the same with 1 for 0."""
    amax = np.abs(w).max(axis=0)
    amax = _keep(amax >= AMAX_MIN, amax)
    used = amax > 0
    measure = np.where(used, amax, ONE)
    return w * _keep(used, ONE / measure), amax, measure


def _padded(weights: F32) -> F32:
    """Weights [rows, cols] as [groups, 32, rows], zero in padded columns."""
    rows, cols = weights.shape
    groups = -(-cols // 32)
    full = np.zeros((rows, groups * 32), np.float32)
    full[:, :cols] = weights
    return np.ascontiguousarray(full.reshape(rows, groups, 32).transpose(1, 2, 0))


def _first_pass(
    tiles: F32, q: F32, sq: F32, formats: U8, levels: np.float32
) -> tuple[list[Fit | None], F32]:
    fits: list[Fit | None] = []
    need = np.zeros(tiles.shape[2], np.float32)
    for g, tile in enumerate(tiles):
        w, amax, measure = _scaled(tile)
        fit = None if formats[g] == Q8 else best_fit(w, q[g], sq[g])
        wanted = amax / np.float32(127)
        if fit is not None:
            wanted = _keep(amax > 0, (fit.step * measure) * SIXTEENTH)
        need = np.maximum(need, wanted)
        fits.append(fit)
    supers = need / levels
    return fits, _keep(supers >= SUPER_MIN, supers)


def _place(
    w: F32, q: F32, sq: np.float32, measure: F32, supers: F32, fit: Fit | None
) -> tuple[Grid, F32]:
    alive = supers > 0
    unit = np.where(alive, supers, ONE) / measure
    grid = snap_q8(w, q, unit) if fit is None else snap(w, q, sq, unit * np.float32(16), fit)
    return replace(grid, scale=_keep(alive, grid.scale), zp=_keep(alive, grid.zp)), unit


def _empty(rows: int, cols: int) -> Stored:
    groups = -(-cols // 32)
    return Stored(
        np.zeros((rows, groups * 32), np.uint8),
        np.zeros((rows, groups), np.uint8),
        np.zeros((rows, groups), np.uint8),
        np.zeros(rows, np.float32),
    )


def _store(out: Stored, g: int, grid: Grid, codes: F32, cols: int, q8: bool) -> None:
    """codes [32, rows]."""
    out.scales[:, g] = grid.scale.astype(np.uint8)
    out.zps[:, g] = grid.zp.astype(np.uint8)
    real = min(cols - 32 * g, 32)
    shifted = codes[:real] + np.float32(128 if q8 else 0)
    out.codes[:, 32 * g : 32 * g + real] = shifted.T.astype(np.uint8)


def search_rows(weights: F32, importance: F32 | None = None, formats: U8 | None = None) -> Stored:
    """gm_search_rows."""
    rows, cols = weights.shape
    tiles = _padded(weights)
    kinds = np.full(tiles.shape[0], 3, np.uint8) if formats is None else formats
    q, sq = weighting(importance, cols)
    out = _empty(rows, cols)
    with np.errstate(all="ignore"):
        fits, supers = _first_pass(tiles, q, sq, kinds, SEARCH_LEVELS)
        out.supers[:] = supers
        for g, tile in enumerate(tiles):
            w, _, measure = _scaled(tile)
            q8 = bool(kinds[g] == Q8)
            grid, unit = _place(w, q[g], sq[g], measure, supers, fits[g])
            used = grid.scale > 0
            step = grid.scale * (unit if q8 else unit * np.float32(16))
            inv = _keep(used, ONE / np.where(used, step, ONE))
            t = w * inv + grid.zp * SIXTEENTH
            _store(out, g, grid, _code127(t) if q8 else _code15(t), cols, q8)
    return out


def hessian(x: F32) -> F64:
    """gm_hessian_add on an empty Hessian: blocks of 32 tokens in float32, then float64."""
    total = np.zeros((x.shape[1], x.shape[1]))
    for first in range(0, x.shape[0], 32):
        part = np.zeros((x.shape[1], x.shape[1]), np.float32)
        for row in x[first : first + 32]:
            part = part + row[:, None] * row[None, :]
        total += part
    return np.tril(total)


def factorise(lower: F64, damping: float) -> tuple[F64, F32]:
    """gm_gptq_prepare: N (lower) with H + damping = N^T N, rows from the last; and its diag^2."""
    h = lower.copy()
    n = h.shape[0]
    total = 0.0
    for i in range(n):
        total += h[i, i]
    add = damping * (total / n)
    add = add if add > 0 else 1.0
    h[np.arange(n), np.arange(n)] += add
    for k in range(n - 1, -1, -1):
        root = np.sqrt(max(h[k, k], add))
        h[k, k] = root
        h[k, :k] /= root
        for i in range(k):
            h[i, : i + 1] -= h[k, i] * h[k, : i + 1]
    pivots = h.diagonal().copy()
    return np.tril(h), (pivots * pivots).astype(np.float32)


def settling_order(diagonal: F64) -> list[int]:
    """Columns by falling diagonal, in groups by falling sum; a short last group stays last."""
    groups = [list(range(g, min(g + 32, len(diagonal)))) for g in range(0, len(diagonal), 32)]
    short = [groups.pop()] if len(diagonal) % 32 else []
    sums = [0.0] * len(groups)
    for g, columns in enumerate(groups):
        for c in columns:
            sums[g] += diagonal[c]
    ranked = [groups[g] for g in sorted(range(len(groups)), key=lambda g: -sums[g])]
    return [c for group in ranked + short for c in sorted(group, key=lambda c: -diagonal[c])]


def gptq(weights: F32, lower: F64, damping: float, formats: U8 | None = None) -> Stored:
    """Error feedback of a Hessian's lower triangle, in the order of `settling_order`."""
    order = np.array(settling_order(lower.diagonal()))
    groups = order[::32] // 32
    full = lower + np.tril(lower, -1).T
    factor, diag = factorise(np.tril(full[np.ix_(order, order)]), damping)
    kinds = None if formats is None else formats[groups]
    made = gptq_rows(weights[:, order], factor, diag, kinds)
    out = _empty(*weights.shape)
    out.supers[:] = made.supers
    out.codes[:, order] = made.codes[:, : len(order)]
    out.scales[:, groups], out.zps[:, groups] = made.scales, made.zps
    return out


def gptq_rows(weights: F32, factor: F64, diag: F32, formats: U8 | None = None) -> Stored:
    """gm_gptq_rows with the factor of `factorise`."""
    rows, cols = weights.shape
    tiles = _padded(weights)
    kinds = np.full(tiles.shape[0], 3, np.uint8) if formats is None else formats
    q, sq = weighting(diag, cols)
    out = _empty(rows, cols)
    feed = np.zeros((tiles.shape[0] * 32, tiles.shape[0] * 32), np.float32)  # [i, k]
    for k in range(cols):
        feed[:k, k] = (factor[k, :k] / factor[k, k]).astype(np.float32)
    errors = np.zeros((tiles.shape[0] * 32, rows), np.float32)
    with np.errstate(all="ignore"):
        _, supers = _first_pass(tiles, q, sq, kinds, GPTQ_LEVELS)
        out.supers[:] = supers
        for g, tile in enumerate(tiles):
            base, q8 = 32 * g, bool(kinds[g] == Q8)
            fed = np.zeros_like(tile)
            for i in range(base):
                fed = fed + errors[i][None, :] * feed[i, base : base + 32, None]
            w, _, measure = _scaled(tile + fed)
            fit = None if q8 else best_fit(w, q[g], sq[g])
            grid, _ = _place(w, q[g], sq[g], measure, supers, fit)
            inside = feed[base : base + 32, base : base + 32]
            best = _round_group(tile, fed, inside, q[g], supers, grid, q8)
            if not q8:
                best = _round_near(tile, fed, inside, q[g], supers, best)
            errors[base : base + 32] = best.errors
            _store(out, g, best.grid, best.codes, cols, q8)
    return out


@dataclass(frozen=True)
class Rounded:
    """A group rounded at a grid point: codes and errors [32, rows], loss in grid.err [rows]."""

    grid: Grid
    codes: F32
    errors: F32


def _round_near(w: F32, fed: F32, feed: F32, q: F32, supers: F32, best: Rounded) -> Rounded:
    """The best of six scales and then four zero points near a grid point."""
    start = best.grid
    for factor in (0.94, 0.96, 0.98, 1.02, 1.04, 1.06):
        moved = replace(start, scale=start.scale * np.float32(factor))
        best = _try_rounding(w, fed, feed, q, supers, moved, best)
    start = best.grid
    for shift in (-4, -2, 2, 4):
        moved = replace(start, zp=start.zp + np.float32(shift))
        best = _try_rounding(w, fed, feed, q, supers, moved, best)
    return best


def _try_rounding(
    w: F32, fed: F32, feed: F32, q: F32, supers: F32, moved: Grid, best: Rounded
) -> Rounded:
    used = best.grid.scale > 0
    scale, zp = _whole(moved.scale, 1, 255), _whole(moved.zp, 0, 255)
    grid = Grid(_keep(used, scale), _keep(used, zp), moved.err)
    other = _round_group(w, fed, feed, q, supers, grid, False)
    better = other.grid.err < best.grid.err
    return Rounded(
        Grid(
            np.where(better, other.grid.scale, best.grid.scale),
            np.where(better, other.grid.zp, best.grid.zp),
            np.where(better, other.grid.err, best.grid.err),
        ),
        np.where(better, other.codes, best.codes),
        np.where(better, other.errors, best.errors),
    )


def _round_group(w: F32, fed: F32, feed: F32, q: F32, supers: F32, grid: Grid, q8: bool) -> Rounded:
    """Columns of a group in turn, and what it loses."""
    used = grid.scale > 0
    step = grid.scale * (supers if q8 else supers * np.float32(16))
    inv = _keep(used, ONE / np.where(used, step, ONE))
    total, codes, errors = fed.copy(), np.zeros_like(w), np.zeros_like(w)
    loss = np.zeros_like(grid.scale)
    for j in range(32):
        want = w[j] + total[j]
        t = want * inv + grid.zp * SIXTEENTH
        codes[j] = _code127(t) if q8 else _code15(t)
        number = codes[j] if q8 else codes[j] * np.float32(16) - grid.zp
        value = supers * (grid.scale * number)
        miss = want - value
        errors[j] = w[j] - value
        loss = loss + (miss * q[j]) * miss
        for k in range(j + 1, 32):
            total[k] = total[k] + errors[j] * feed[j, k]
    return Rounded(replace(grid, err=loss), codes, errors)


# ---- layout, from csrc/FORMAT.md section 4 ----


def _line_up(data: bytes) -> bytes:
    return data + bytes(-len(data) % 64)


def _plane(nibbles: U8) -> bytes:
    """Nibbles [16 rows, 32 inputs] of one group -> 256 bytes."""
    out = bytearray(256)
    for i in range(4):
        for row in range(16):
            for k in range(4):
                low, high = nibbles[row, 4 * i + k], nibbles[row, 16 + 4 * i + k]
                out[64 * i + 4 * row + k] = int(low) | int(high) << 4
    return bytes(out)


def _sixteen(values: npt.NDArray[np.generic], panel: int) -> npt.NDArray[np.generic]:
    own = values[16 * panel : 16 * panel + 16]
    out = np.zeros((16, *own.shape[1:]), own.dtype)
    out[: own.shape[0]] = own
    return out


def pack_panel(stored: Stored, panel: int, segments: list[tuple[int, int]]) -> bytes:
    """One panel of body rows; segments are (format, groups)."""
    codes = _sixteen(stored.codes, panel).astype(np.uint8)
    scales, zps = _sixteen(stored.scales, panel), _sixteen(stored.zps, panel)
    out = _sixteen(stored.supers, panel).astype("<f4").tobytes()
    group = 0
    for fmt, total in segments:
        for first in range(0, total, 8):
            count = min(8, total - first)
            block, tail, points = b"", b"", b""
            for g in range(group, group + count):
                own = codes[:, 32 * g : 32 * g + 32]
                if fmt == Q8:
                    block += _plane(own >> 4) + _plane(own & 15)
                else:
                    block += _plane(own)
                    points += zps[:, g].tobytes()
                tail += scales[:, g].tobytes()
            out += _line_up(block + tail + points)
            group += count
    return out


def pack_q8_rows(codes: U8, supers: F32) -> tuple[bytes, bytes]:
    """High and low region."""
    high, low = b"", b""
    for panel in range(-(-codes.shape[0] // 16)):
        own = _sixteen(codes, panel).astype(np.uint8)
        high += _sixteen(supers, panel).astype("<f4").tobytes()
        for g in range(codes.shape[1] // 32):
            high += _plane(own[:, 32 * g : 32 * g + 32] >> 4)
            low += _plane(own[:, 32 * g : 32 * g + 32] & 15)
    return high, low


def pack_q4raw(codes: U8, scales: npt.NDArray[np.uint16]) -> bytes:
    """Panels with super 1/16 in real rows."""
    out = b""
    rows, groups = scales.shape
    for panel in range(-(-rows // 16)):
        own, marks = _sixteen(codes, panel).astype(np.uint8), _sixteen(scales, panel)
        supers = np.zeros(16, "<f4")
        supers[: min(16, rows - 16 * panel)] = 1 / 16
        out += supers.tobytes()
        for first in range(0, groups, 8):
            span = range(first, min(groups, first + 8))
            block = b"".join(_plane(own[:, 32 * g : 32 * g + 32]) for g in span)
            block += b"".join(marks[:, g].astype("<u2").tobytes() for g in span)
            out += _line_up(block)
    return out


def pack_float(weights: F32, kind: str) -> bytes:
    """`kind` is '<f4' or '<f2'."""
    out = b""
    for panel in range(-(-weights.shape[0] // 16)):
        out += _line_up(np.ascontiguousarray(_sixteen(weights, panel).T).astype(kind).tobytes())
    return out
