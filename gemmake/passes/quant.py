"""Quantisation, packing and RoPE tables in NumPy terms: a thin, typed layer over the C helper.

Nothing here opens a file. Every number that decides a stored byte is made by `gemmake._helper`
(csrc/gm_*.c) in a fixed order, so results are equal for any thread count and machine. Shapes:
weights are float32 [rows, cols]; "padded" is cols rounded up to 32, "groups" is padded / 32;
`importance` is float32 [cols], at least 0, in any unit (None: all columns count alike).

    Q4hRows       body rows in q4h and, by group, q8            search_rows, gptq_rows
    Q8Rows        embedding and head, one scale a row           search_q8_rows
    Q4rawRows     a 16-bit scale a group, zero point 8          search_q4raw
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gemmake._helper import ffi, lib
from gemmake.errors import CheckpointError
from gemmake.model import RopeSpec
from gemrun.format import sizes, spec
from gemrun.format.sizes import groups_of
from gemrun.format.spec import GROUP, LINE, PANEL, Format

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]

DAMPING = 0.05  # of the mean diagonal of a Hessian


@dataclass(frozen=True)
class Segment:
    """A run of `count` groups of one format (Q4H or Q8) in every row of a tensor."""

    format: Format
    count: int


@dataclass(frozen=True)
class Q4hRows:
    """Body rows. A q4h group means `super * scale * (16 * code - zp)`, a q8 group
    `super * scale * (code - 128)`; scale 0 marks an all-zero group. Padded columns hold code 0."""

    cols: int
    codes: U8  # [rows, padded]
    scales: U8  # [rows, groups]
    zps: U8  # [rows, groups], sixteenths of a step
    supers: F32  # [rows]
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.codes.shape[0])

    @property
    def zero_groups(self) -> int:
        """Groups that are stored as all zero, for the report."""
        return int(np.count_nonzero(self.scales == 0))


@dataclass(frozen=True)
class Q8Rows:
    """Rows with one scale each: value = super * (code - 128). Padded columns hold code 0."""

    cols: int
    codes: U8  # [rows, padded]
    supers: F32  # [rows]


@dataclass(frozen=True)
class Q4rawRows:
    """Rows of groups `scale * (code - 8)`; scales are the bits of half or bfloat16 numbers."""

    cols: int
    codes: U8  # [rows, padded]
    scales: U16  # [rows, groups]
    format: Format  # Q4RAW_F16 or Q4RAW_BF16
    exact_groups: int  # groups that were reproduced bit for bit


@dataclass(frozen=True)
class Feedback:
    """A factorised Hessian, ready for `gptq_rows` on every matrix with these inputs.

    Columns are settled in an order of their own: `order[i]` is the i-th one. `panels` and `diag`
    are in that order.
    """

    cols: int
    order: I64  # [cols], a permutation that keeps the columns of a group together
    panels: F32
    diag: F32  # [cols], importance of a column once the earlier ones are settled


class NonFiniteWeight(CheckpointError):
    """A weight is NaN or infinite; `row` and `col` say where in the block that was given."""

    def __init__(self, row: int, col: int, value: float) -> None:
        super().__init__(
            f"weights: row {row}, column {col} is {value}; repair or replace the checkpoint"
        )
        self.row = row
        self.col = col


class HelperError(ValueError):
    """The helper refused its arguments; the message names the status."""


_STATUS = {
    -1: "an argument is missing, zero or unknown",
    -2: "a buffer has the wrong size",
    -3: "a size is above the helper's limits",
    -4: "not enough memory for scratch",
    -5: "a thread could not be started",
    -6: "an input is NaN or infinite",
    -7: "a value does not fit the format",
}


def cpu_threads() -> int:
    """Threads that this process may run on, 1..64; results never depend on it."""
    return int(lib.gm_cpu_count())


def _check(status: int, what: str) -> None:
    if status == -4:
        raise MemoryError(f"{what}: not enough memory for scratch")
    if status != 0:
        raise HelperError(f"{what}: {_STATUS.get(status, 'unknown')} (status {status})")


def _check_weights(status: int, what: str, weights: F32) -> None:
    """As `_check`, but a NaN or infinity is reported with its place."""
    if status == -6:
        at = int(lib.gm_find_nonfinite(_ptr("float *", weights), weights.size))
        if at >= 0:
            row, col = divmod(at, weights.shape[1])
            raise NonFiniteWeight(row, col, float(weights[row, col]))
    _check(status, what)


def _ptr(kind: str, array: npt.NDArray[Any] | None) -> Any:
    return ffi.NULL if array is None else ffi.cast(kind, array.ctypes.data)


def _matrix(values: npt.ArrayLike) -> F32:
    array = np.ascontiguousarray(values, dtype=np.float32)
    if array.ndim != 2 or array.size == 0:
        raise HelperError(f"weights: shape {array.shape} is not a matrix; give [rows, cols]")
    return array


def _vector(values: npt.ArrayLike | None, cols: int) -> F32 | None:
    if values is None:
        return None
    array = np.ascontiguousarray(values, dtype=np.float32)
    if array.shape != (cols,):
        raise HelperError(f"importance: shape {array.shape}; give one value for {cols} columns")
    return array


def whole(cols: int, fmt: Format = Format.Q4H) -> tuple[Segment, ...]:
    """Segments of a tensor with a single format."""
    return (Segment(fmt, groups_of(cols)),)


def _by_group(segments: Sequence[Segment], cols: int) -> U8:
    if any(a.format == b.format for a, b in pairwise(segments)):
        raise HelperError("segments: neighbours have one format; merge them")
    listed = [np.full(s.count, int(s.format), np.uint8) for s in segments]
    formats: U8 = np.concatenate(listed) if listed else np.zeros(0, np.uint8)
    if formats.size != groups_of(cols):
        raise HelperError(
            f"segments: {formats.size} groups listed; {cols} columns have {groups_of(cols)}"
        )
    return formats


def panel_bytes(fmt: Format, cols: int, segments: Sequence[Segment] = ()) -> int:
    """Bytes of one 16-row panel (Q8_ROWS: of the high region; the low one has 64 less).

    `segments` is needed for bodies (Q4H, Q8) only and defaults to one segment of `fmt`.
    """
    runs = segments or whole(cols, fmt)
    return sizes.panel_size(cols, [spec.Segment(int(s.format), group_count=s.count) for s in runs])


def panels_of(rows: int) -> int:
    """Panels of 16 rows."""
    return -(-rows // PANEL)


# ---- search ----


def _empty_rows(rows: int, cols: int, segments: Sequence[Segment] | None) -> Q4hRows:
    groups = groups_of(cols)
    return Q4hRows(
        cols=cols,
        codes=np.zeros((rows, groups * GROUP), np.uint8),
        scales=np.zeros((rows, groups), np.uint8),
        zps=np.zeros((rows, groups), np.uint8),
        supers=np.zeros(rows, np.float32),
        segments=tuple(segments) if segments else whole(cols),
    )


def _struct(rows: Q4hRows) -> Any:
    return ffi.new(
        "gm_rows *",
        {
            "rows": rows.rows,
            "cols": rows.cols,
            "codes": _ptr("uint8_t *", rows.codes),
            "scales": _ptr("uint8_t *", rows.scales),
            "zps": _ptr("uint8_t *", rows.zps),
            "supers": _ptr("float *", rows.supers),
        },
    )


def search_rows(
    weights: npt.ArrayLike,
    importance: npt.ArrayLike | None = None,
    segments: Sequence[Segment] | None = None,
    *,
    threads: int | None = None,
    flags: int = 0,
) -> Q4hRows:
    """Quantise body rows by search alone. `segments` (default all Q4H) names q8 groups.

    Raises NonFiniteWeight, HelperError. `flags` is 0 except in tests.
    """
    w = _matrix(weights)
    out = _empty_rows(w.shape[0], w.shape[1], segments)
    formats = _by_group(out.segments, out.cols)
    status = lib.gm_search_rows(
        _ptr("float *", w),
        _ptr("float *", _keep := _vector(importance, out.cols)),
        _ptr("uint8_t *", formats),
        _struct(out),
        threads or cpu_threads(),
        flags,
    )
    _check_weights(status, "search_rows", w)
    return out


def search_q8_rows(
    weights: npt.ArrayLike,
    importance: npt.ArrayLike | None = None,
    *,
    threads: int | None = None,
    flags: int = 0,
) -> Q8Rows:
    """Quantise embedding or head rows to 8 bits with one scale a row."""
    w = _matrix(weights)
    rows, cols = w.shape
    codes = np.zeros((rows, groups_of(cols) * GROUP), np.uint8)
    supers = np.zeros(rows, np.float32)
    status = lib.gm_search_q8_rows(
        _ptr("float *", w),
        _ptr("float *", _keep := _vector(importance, cols)),
        rows,
        cols,
        _ptr("uint8_t *", codes),
        _ptr("float *", supers),
        threads or cpu_threads(),
        flags,
    )
    _check_weights(status, "search_q8_rows", w)
    return Q8Rows(cols, codes, supers)


def search_q4raw(
    weights: npt.ArrayLike,
    importance: npt.ArrayLike | None = None,
    *,
    fmt: Format = Format.Q4RAW_F16,
    threads: int | None = None,
) -> Q4rawRows:
    """Quantise to `scale * (-8..7)`: exactly where the weights lie on such a lattice with scales
    of this format, else with the best scale of a short search."""
    w = _matrix(weights)
    rows, cols = w.shape
    codes = np.zeros((rows, groups_of(cols) * GROUP), np.uint8)
    scales = np.zeros((rows, groups_of(cols)), np.uint16)
    exact = np.zeros(rows, np.uint32)
    status = lib.gm_search_q4raw(
        _ptr("float *", w),
        _ptr("float *", _keep := _vector(importance, cols)),
        rows,
        cols,
        int(fmt),
        _ptr("uint8_t *", codes),
        _ptr("uint16_t *", scales),
        _ptr("uint32_t *", exact),
        threads or cpu_threads(),
    )
    _check_weights(status, "search_q4raw", w)
    return Q4rawRows(cols, codes, scales, fmt, int(exact.sum(dtype=np.uint64)))


# ---- error feedback ----


def new_hessian(cols: int) -> F64:
    """An empty Hessian [cols, cols]. Only the lower triangle is ever touched, so that half of the
    square takes memory: 4 * cols^2 bytes (8192 columns: 268 MB)."""
    return np.zeros((cols, cols), np.float64)


def hessian_add(
    hessian: F64, x: npt.ArrayLike, *, threads: int | None = None, flags: int = 0
) -> None:
    """Add the activations x [tokens, cols] to the Hessian, in place.

    The result depends on how the tokens are cut into calls (each call sums blocks of 32 tokens in
    float32, then in float64): give a multiple of 32 tokens per call to be free of that.
    """
    a = _matrix(x)
    if hessian.shape != (a.shape[1], a.shape[1]) or not hessian.flags.c_contiguous:
        raise HelperError(f"hessian: shape {hessian.shape}; {a.shape[1]} columns were given")
    status = lib.gm_hessian_add(
        _ptr("double *", hessian),
        _ptr("float *", a),
        a.shape[0],
        a.shape[1],
        threads or cpu_threads(),
        flags,
    )
    _check(status, "hessian_add")


def gptq_prepare(
    hessian: F64, *, damping: float = DAMPING, threads: int | None = None, flags: int = 0
) -> Feedback:
    """Factorise a Hessian, of which a copy is made. `damping` is a share of its mean diagonal."""
    cols = int(hessian.shape[0])
    if hessian.shape != (cols, cols) or not hessian.flags.c_contiguous:
        raise HelperError(f"hessian: shape {hessian.shape} is not square and contiguous")
    order = settling_order(np.diagonal(hessian))
    hessian = _in_order(hessian, order)
    size = int(lib.gm_feedback_floats(cols))
    out = Feedback(cols, order, np.zeros(size, np.float32), np.zeros(cols, np.float32))
    status = lib.gm_gptq_prepare(
        _ptr("double *", hessian), damping, _feedback(out), threads or cpu_threads(), flags
    )
    _check(status, "gptq_prepare")
    return out


def settling_order(diagonal: F64) -> I64:
    """Columns in the order in which they are rounded: by group, the strongest first.

    Errors are made up for by later columns, so that those which see the largest inputs come first
    and the least important ones carry what is left. Groups are ranked by the sum of their
    diagonal, columns of a group by their own; ties keep their places. A last group that is not
    full stays last, where the helper expects it.
    """
    full = diagonal.size // GROUP
    blocks = diagonal[: full * GROUP].reshape(full, GROUP)
    sums = np.zeros(full)
    for j in range(GROUP):  # one by one: np.sum does not promise an order
        sums += blocks[:, j]
    groups = np.argsort(-sums, kind="stable")
    inside = np.argsort(-blocks[groups], axis=1, kind="stable")
    rest = full * GROUP + np.argsort(-diagonal[full * GROUP :], kind="stable")
    order: I64 = np.concatenate(((groups[:, None] * GROUP + inside).ravel(), rest)).astype(np.int64)
    return order


def _in_order(hessian: F64, order: I64) -> F64:
    """The lower triangle of a Hessian whose columns have changed places."""
    out = new_hessian(order.size)
    for i, at in enumerate(order):
        before = order[: i + 1]
        above = before > at
        out[i, : i + 1] = hessian[at, before]
        out[i, : i + 1][above] = hessian[before[above], at]
    return out


def _back(values: U8, order: I64) -> None:
    """Put columns that were made in an order to their own places."""
    values[:, order] = values.copy()


def _feedback(feedback: Feedback) -> Any:
    return ffi.new(
        "gm_feedback *",
        {
            "cols": feedback.cols,
            "panels": _ptr("float *", feedback.panels),
            "diag": _ptr("float *", feedback.diag),
        },
    )


def gptq_rows(
    weights: npt.ArrayLike,
    feedback: Feedback,
    segments: Sequence[Segment] | None = None,
    *,
    threads: int | None = None,
    flags: int = 0,
) -> Q4hRows:
    """Quantise body rows with error feedback. Rows are independent: a matrix may come in blocks,
    and q, k, v or gate, up share one `Feedback`."""
    w = _matrix(weights)
    out = _empty_rows(w.shape[0], w.shape[1], segments)
    formats = _by_group(out.segments, out.cols)
    if feedback.cols != out.cols:
        raise HelperError(f"gptq_rows: {out.cols} columns; the feedback has {feedback.cols}")
    groups = feedback.order[::GROUP] // GROUP
    status = lib.gm_gptq_rows(
        _ptr("float *", _moved := np.ascontiguousarray(w[:, feedback.order])),
        _feedback(feedback),
        _ptr("uint8_t *", _kinds := np.ascontiguousarray(formats[groups])),
        _struct(out),
        threads or cpu_threads(),
        flags,
    )
    _check_weights(status, "gptq_rows", w)
    _back(out.codes[:, : out.cols], feedback.order)
    _back(out.scales, groups)
    _back(out.zps, groups)
    return out


# ---- back to float, and errors ----


def dequantise(rows: Q4hRows | Q8Rows | Q4rawRows) -> F32:
    """What the stored rows mean, float32 [rows, cols]."""
    count = int(rows.codes.shape[0])
    out = np.empty((count, rows.cols), np.float32)
    to = _ptr("float *", out)
    if isinstance(rows, Q4hRows):
        formats = _by_group(rows.segments, rows.cols)
        status = lib.gm_dequant_rows(_struct(rows), _ptr("uint8_t *", formats), to)
    elif isinstance(rows, Q8Rows):
        codes, supers = _ptr("uint8_t *", rows.codes), _ptr("float *", rows.supers)
        status = lib.gm_dequant_q8_rows(codes, supers, count, rows.cols, to)
    else:
        codes, scales = _ptr("uint8_t *", rows.codes), _ptr("uint16_t *", rows.scales)
        status = lib.gm_dequant_q4raw(codes, scales, count, rows.cols, int(rows.format), to)
    _check(status, "dequantise")
    return out


def error_sums(
    weights: npt.ArrayLike, stored: npt.ArrayLike, importance: npt.ArrayLike | None = None
) -> tuple[F64, F64]:
    """Per row, in float64 and in column order: sum of q * (w - s)^2 and sum of q * w^2."""
    a, b = _matrix(weights), _matrix(stored)
    if a.shape != b.shape:
        raise HelperError(f"error_sums: shapes {a.shape} and {b.shape} differ")
    error, power = np.zeros(a.shape[0]), np.zeros(a.shape[0])
    status = lib.gm_error_sums(
        _ptr("float *", a),
        _ptr("float *", b),
        _ptr("float *", _keep := _vector(importance, a.shape[1])),
        a.shape[0],
        a.shape[1],
        _ptr("double *", error),
        _ptr("double *", power),
    )
    _check(status, "error_sums")
    return error, power


# ---- packing ----


def _panels(rows: int, panel: int) -> U8:
    return np.zeros(panels_of(rows) * panel, np.uint8)


def _tail(rows: int, panel: int, stride: int) -> int:
    return (panels_of(rows) - 1) * stride + panel


def pack_rows(rows: Q4hRows) -> U8:
    """Panels of body rows in layout r16k4. Blocks of 16 n rows packed one after another give the
    same bytes as the whole matrix."""
    panel = panel_bytes(Format.Q4H, rows.cols, rows.segments)
    out = _panels(rows.rows, panel)
    _pack_into(rows, out, 0, panel)
    return out


def _pack_into(rows: Q4hRows, out: U8, offset: int, stride: int) -> None:
    panel = panel_bytes(Format.Q4H, rows.cols, rows.segments)
    formats = _by_group(rows.segments, rows.cols)
    status = lib.gm_pack_rows(
        _struct(rows),
        _ptr("uint8_t *", formats),
        _ptr("uint8_t *", out[offset:]),
        stride,
        _tail(rows.rows, panel, stride),
    )
    _check(status, "pack_rows")


def pack_gate_up(gate: Q4hRows, up: Q4hRows) -> U8:
    """Panels of gate and up, alternating; both have the same shape and segments."""
    if gate.codes.shape != up.codes.shape or gate.segments != up.segments:
        raise HelperError("gate_up: gate and up differ in shape or segments")
    panel = panel_bytes(Format.Q4H, gate.cols, gate.segments)
    out = _panels(gate.rows, 2 * panel)
    _pack_into(gate, out, 0, 2 * panel)
    _pack_into(up, out, panel, 2 * panel)
    return out


def unpack_rows(data: U8, rows: int, cols: int, segments: Sequence[Segment] = ()) -> Q4hRows:
    """The reverse of `pack_rows`."""
    out = _empty_rows(rows, cols, segments)
    panel = panel_bytes(Format.Q4H, cols, out.segments)
    if data.size != panels_of(rows) * panel:
        raise HelperError(f"panels: {data.size} bytes; {panels_of(rows) * panel} are wanted")
    formats = _by_group(out.segments, cols)
    packed = np.ascontiguousarray(data)
    status = lib.gm_unpack_rows(
        _ptr("uint8_t *", packed), panel, data.size, _ptr("uint8_t *", formats), _struct(out)
    )
    _check(status, "unpack_rows")
    return out


def pack_q8_rows(rows: Q8Rows) -> tuple[U8, U8]:
    """The high and the low region, without the gap that puts the latter on 256 bytes."""
    count = int(rows.codes.shape[0])
    panel = panel_bytes(Format.Q8_ROWS, rows.cols)
    high, low = _panels(count, panel), _panels(count, panel - LINE)
    status = lib.gm_pack_q8_rows(
        _ptr("uint8_t *", rows.codes),
        _ptr("float *", rows.supers),
        count,
        rows.cols,
        _ptr("uint8_t *", high),
        high.size,
        _ptr("uint8_t *", low),
        low.size,
    )
    _check(status, "pack_q8_rows")
    return high, low


def unpack_q8_rows(high: U8, low: U8, rows: int, cols: int) -> Q8Rows:
    """The reverse of `pack_q8_rows`."""
    out = Q8Rows(
        cols, np.zeros((rows, groups_of(cols) * GROUP), np.uint8), np.zeros(rows, np.float32)
    )
    first, second = np.ascontiguousarray(high), np.ascontiguousarray(low)
    status = lib.gm_unpack_q8_rows(
        _ptr("uint8_t *", first),
        high.size,
        _ptr("uint8_t *", second),
        low.size,
        rows,
        cols,
        _ptr("uint8_t *", out.codes),
        _ptr("float *", out.supers),
    )
    _check(status, "unpack_q8_rows")
    return out


def pack_q4raw(rows: Q4rawRows, up: Q4rawRows | None = None) -> U8:
    """Panels of q4raw rows; with `up`, panels of both alternate (GATE_UP)."""
    parts = [rows] if up is None else [rows, up]
    count = int(rows.codes.shape[0])
    if any(p.codes.shape != rows.codes.shape or p.format != rows.format for p in parts):
        raise HelperError("gate_up: gate and up differ in shape or format")
    panel = panel_bytes(rows.format, rows.cols)
    stride = panel * len(parts)
    out = _panels(count, stride)
    for i, part in enumerate(parts):
        status = lib.gm_pack_q4raw(
            _ptr("uint8_t *", part.codes),
            _ptr("uint16_t *", part.scales),
            count,
            part.cols,
            _ptr("uint8_t *", out[i * panel :]),
            stride,
            _tail(count, panel, stride),
        )
        _check(status, "pack_q4raw")
    return out


def unpack_q4raw(data: U8, rows: int, cols: int, fmt: Format) -> Q4rawRows:
    """The reverse of `pack_q4raw` (exact_groups is not stored and comes back as 0)."""
    out = Q4rawRows(
        cols,
        np.zeros((rows, groups_of(cols) * GROUP), np.uint8),
        np.zeros((rows, groups_of(cols)), np.uint16),
        fmt,
        0,
    )
    packed = np.ascontiguousarray(data)
    status = lib.gm_unpack_q4raw(
        _ptr("uint8_t *", packed),
        panel_bytes(fmt, cols),
        data.size,
        rows,
        cols,
        _ptr("uint8_t *", out.codes),
        _ptr("uint16_t *", out.scales),
    )
    _check(status, "unpack_q4raw")
    return out


def pack_float(weights: npt.ArrayLike, fmt: Format, up: npt.ArrayLike | None = None) -> U8:
    """Panels of F32 or F16 weights, 16 rows for each input in turn; with `up`, panels of both
    alternate. A weight beyond 65504 in F16 raises HelperError."""
    parts = [_matrix(weights)] + ([] if up is None else [_matrix(up)])
    rows, cols = parts[0].shape
    if any(p.shape != (rows, cols) for p in parts):
        raise HelperError("gate_up: gate and up differ in shape")
    panel = panel_bytes(fmt, cols)
    stride = panel * len(parts)
    out = _panels(rows, stride)
    for i, part in enumerate(parts):
        status = lib.gm_pack_float(
            _ptr("float *", part),
            rows,
            cols,
            int(fmt),
            _ptr("uint8_t *", out[i * panel :]),
            stride,
            _tail(rows, panel, stride),
        )
        _check_weights(status, "pack_float", part)
    return out


# ---- RoPE ----

_ROPE_KINDS = {"default": 0, "linear": 1, "llama3": 2}


def rope_freqs(rope: RopeSpec) -> F64:
    """Angle per position of each pair, float64 [dims / 2]."""
    if rope.kind not in _ROPE_KINDS:
        raise HelperError(f"rope: kind {rope.kind!r} is unknown; known: default, linear, llama3")
    out = np.zeros(rope.dims // 2, np.float64)
    status = lib.gm_rope_freqs(
        rope.theta,
        rope.dims,
        _ROPE_KINDS[rope.kind],
        rope.factor,
        rope.low_freq_factor,
        rope.high_freq_factor,
        float(rope.original_context),
        _ptr("double *", out),
    )
    _check(status, "rope_freqs")
    return out


def rope_table(rope: RopeSpec, positions: int, *, threads: int | None = None) -> F32:
    """Table float32 [positions, dims]: cos of all pairs, then sin of all pairs."""
    freqs = rope_freqs(rope)
    out = np.zeros((positions, 2 * freqs.size), np.float32)
    status = lib.gm_rope_table(
        _ptr("double *", freqs),
        freqs.size,
        positions,
        _ptr("float *", out),
        threads or cpu_threads(),
    )
    _check(status, "rope_table")
    return out
