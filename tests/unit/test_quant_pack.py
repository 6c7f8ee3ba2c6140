"""Layout r16k4: packed bytes against a direct NumPy definition, sizes, and unpacking."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from gemmake.passes import quant
from gemmake.passes.quant import Format, Segment
from reference import quantmath as slow

SHAPES = [(1, 1), (16, 32), (17, 33), (40, 300), (3, 4304)]
MIXED = (Segment(Format.Q4H, 9), Segment(Format.Q8, 1), Segment(Format.Q4H, 2))


def weights(rows: int, cols: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)


def direct(rows: quant.Q4hRows) -> bytes:
    stored = slow.Stored(rows.codes, rows.scales, rows.zps, rows.supers)
    segments = [(int(s.format), s.count) for s in rows.segments]
    panels = range(-(-rows.rows // 16))
    return b"".join(slow.pack_panel(stored, p, segments) for p in panels)


def equal_rows(a: quant.Q4hRows, b: quant.Q4hRows) -> None:
    for name in ("codes", "scales", "zps", "supers"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("fmt", [Format.Q4H, Format.Q8])
def test_body_bytes(rows: int, cols: int, fmt: Format) -> None:
    stored = quant.search_rows(weights(rows, cols), segments=quant.whole(cols, fmt))
    data = quant.pack_rows(stored)
    assert data.tobytes() == direct(stored)
    assert data.size == quant.panels_of(rows) * quant.panel_bytes(fmt, cols)
    equal_rows(quant.unpack_rows(data, rows, cols, stored.segments), stored)


def test_mixed_segments() -> None:
    stored = quant.search_rows(weights(20, 384), segments=MIXED)
    data = quant.pack_rows(stored)
    assert data.tobytes() == direct(stored)
    full, one, eight_bit, two = 2304, 320, 576, 576
    assert quant.panel_bytes(Format.Q4H, 384, MIXED) == 64 + full + one + eight_bit + two
    equal_rows(quant.unpack_rows(data, 20, 384, MIXED), stored)


def test_nominal_sizes() -> None:
    assert quant.panel_bytes(Format.Q4H, 256) == 64 + 2304
    assert quant.panel_bytes(Format.Q4H, 576) == 64 + 2 * 2304 + 576
    assert quant.panel_bytes(Format.Q4RAW_F16, 32) == 64 + 320
    assert quant.panel_bytes(Format.Q8_ROWS, 640) == 64 + 20 * 256
    assert quant.panel_bytes(Format.F32, 33) == 33 * 64
    assert quant.panel_bytes(Format.F16, 33) == 34 * 32


def test_gate_and_up_alternate() -> None:
    gate, up = (quant.search_rows(weights(40, 96, seed)) for seed in (1, 2))
    panel = quant.panel_bytes(Format.Q4H, 96)
    both = quant.pack_gate_up(gate, up).reshape(3, 2, panel)
    assert both[:, 0].tobytes() == quant.pack_rows(gate).tobytes()
    assert both[:, 1].tobytes() == quant.pack_rows(up).tobytes()
    with pytest.raises(quant.HelperError):
        quant.pack_gate_up(gate, quant.search_rows(weights(40, 64)))


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_q8_rows_bytes(rows: int, cols: int) -> None:
    stored = quant.search_q8_rows(weights(rows, cols))
    high, low = quant.pack_q8_rows(stored)
    assert (high.tobytes(), low.tobytes()) == slow.pack_q8_rows(stored.codes, stored.supers)
    back = quant.unpack_q8_rows(high, low, rows, cols)
    np.testing.assert_array_equal(back.codes, stored.codes)
    np.testing.assert_array_equal(back.supers, stored.supers)


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("fmt", [Format.Q4RAW_F16, Format.Q4RAW_BF16])
def test_q4raw_bytes(rows: int, cols: int, fmt: Format) -> None:
    stored = quant.search_q4raw(weights(rows, cols), fmt=fmt)
    data = quant.pack_q4raw(stored)
    assert data.tobytes() == slow.pack_q4raw(stored.codes, stored.scales)
    back = quant.unpack_q4raw(data, rows, cols, fmt)
    np.testing.assert_array_equal(back.codes, stored.codes)
    np.testing.assert_array_equal(back.scales, stored.scales)
    both = quant.pack_q4raw(stored, stored).reshape(-1, 2, quant.panel_bytes(fmt, cols))
    assert both[:, 1].tobytes() == data.tobytes()


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize(("fmt", "kind"), [(Format.F32, "<f4"), (Format.F16, "<f2")])
def test_float_bytes(rows: int, cols: int, fmt: Format, kind: str) -> None:
    w = weights(rows, cols)
    data = quant.pack_float(w, fmt)
    assert data.tobytes() == slow.pack_float(w, kind)
    both = quant.pack_float(w, fmt, w).reshape(-1, 2, quant.panel_bytes(fmt, cols))
    assert both[:, 0].tobytes() == data.tobytes()


def test_half_rounding_of_all_kinds_of_floats() -> None:
    """Ties, subnormals and the edge of the range, as NumPy's own IEEE conversion has them."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    near = np.arange(0x33000000 - 64, 0x33000000 + 64, dtype=np.uint32)
    halves = np.arange(0, 0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[:-1] + halves[1:]) / 2
    values = np.concatenate([bits.view(np.float32), near.view(np.float32), halves, ties, -ties])
    values = values[np.abs(values) < 65520].astype(np.float32)
    packed = quant.pack_float(values[:, None], Format.F16).view(np.float16)
    got = packed.reshape(-1, 32)[:, :16].ravel()[: values.size]  # 64 bytes a panel
    np.testing.assert_array_equal(got.view(np.uint16), values.astype(np.float16).view(np.uint16))


def test_codes_out_of_range_are_refused() -> None:
    stored = quant.search_rows(weights(16, 40))
    for at, value in (((3, 5), 16), ((0, 40), 1)):
        codes = stored.codes.copy()
        codes[at] = value
        bad = quant.Q4hRows(40, codes, stored.scales, stored.zps, stored.supers, stored.segments)
        with pytest.raises(quant.HelperError, match="does not fit"):
            quant.pack_rows(bad)
