"""The engine's inline float functions against the reference, bit for bit, on every build."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reference import floatmath as fm

FLAGS = ["-std=c11", "-O2", "-ffp-contract=off", "-fPIC", "-shared"]
BUILDS: dict[str, list[str]] = {"baseline": []}
if platform.machine() == "x86_64":
    BUILDS["avx2"] = ["-O3", "-mavx2", "-mfma"]
COUNT = 200_000

SHIM = """
#include "gr_internal.h"
#include "gr_kern.h"
#define MAP(name, call) \\
    void name(const float *x, float *y, uint32_t n) \\
    { for (uint32_t i = 0; i < n; i++) y[i] = call; }
MAP(t_exp, gr_exp(x[i]))
MAP(t_tanh, gr_tanh(x[i]))
MAP(t_silu, gr_silu(x[i]))
MAP(t_gelu, gr_gelu(x[i]))
MAP(t_cap, gr_cap(x[i], 30.0f))
MAP(t_sqrt, gr_sqrtf(x[i]))
MAP(t_half, gr_half(gr_to_half(x[i])))
void t_fmaf(const float *x, const float *y, const float *z, float *r, uint32_t n)
{ for (uint32_t i = 0; i < n; i++) r[i] = gr_fmaf(x[i], y[i], z[i]); }
void t_soft(const float *x, const float *y, const float *z, float *r, uint32_t n)
{ for (uint32_t i = 0; i < n; i++) r[i] = gr_fmaf_soft(x[i], y[i], z[i]); }
"""


@pytest.fixture(scope="module", params=sorted(BUILDS))
def library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, root: Path
) -> ctypes.CDLL:
    """gr_math.c and the functions of gr_kern.h as a shared object."""
    if request.param == "avx2":
        cpu = Path("/proc/cpuinfo").read_text()
        if " avx2 " not in cpu or " fma " not in cpu:
            pytest.skip("this CPU has no AVX2 with FMA")
    folder = tmp_path_factory.mktemp("math")
    source, target = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    csrc = root / "csrc"
    command = ["cc", *FLAGS, *BUILDS[request.param], f"-I{csrc}", str(source)]
    subprocess.run([*command, str(csrc / "gr_math.c"), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def call(library: ctypes.CDLL, name: str, *inputs: fm.F32) -> fm.F32:
    arrays = [np.ascontiguousarray(x, np.float32) for x in inputs]
    result = np.empty_like(arrays[0])
    pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in (*arrays, result)]
    getattr(library, name)(*pointers, ctypes.c_uint32(result.size))
    return result


def assert_same(got: fm.F32, want: fm.F32, *inputs: fm.F32) -> None:
    """Equal bits; any NaN equals any other."""
    differ = (fm.bits(got) != fm.bits(want)) & ~(np.isnan(got) & np.isnan(want))
    where = np.flatnonzero(differ)[:5]
    assert where.size == 0, [(x[where], got[where], want[where]) for x in inputs]


def arguments() -> fm.F32:
    """Every magnitude, both signs, more where the functions bend, and the special values."""
    rng = np.random.default_rng(11)
    anything = rng.integers(0, 2**32, COUNT, dtype=np.uint32).view(np.float32)
    near = rng.uniform(-100, 100, COUNT).astype(np.float32)
    small = (rng.choice([-1, 1], COUNT) * 2.0 ** rng.uniform(-30, 3, COUNT)).astype(np.float32)
    edges = np.array([0, -0.0, 0.625, -0.625, 87, -87, 88, 89, np.inf, -np.inf, np.nan], np.float32)
    steps = [np.nextafter(edges, np.float32(d)) for d in (-np.inf, np.inf)]
    anything = anything[~np.isnan(anything)]  # arithmetic makes the one NaN that stands in `edges`
    every: fm.F32 = np.concatenate([anything, near, small, edges, *steps]).astype(np.float32)
    return every


CASES: dict[str, Callable[[fm.F32], fm.F32]] = {
    "t_exp": fm.expf,
    "t_tanh": fm.tanhf,
    "t_silu": fm.silu,
    "t_gelu": fm.gelu_tanh,
    "t_cap": lambda x: fm.softcap(x, np.float32(30)),
    "t_sqrt": np.sqrt,
    "t_half": lambda x: x.astype(np.float16).astype(np.float32),
}


@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_function_of_the_engine_equals_the_reference(library: ctypes.CDLL, name: str) -> None:
    x = arguments()
    if name in ("t_silu", "t_gelu"):
        x = x[np.isfinite(x) & (np.abs(x) < 1e12)]  # activations; cubes beyond that are not finite
    assert_same(call(library, name, x), CASES[name](x), x)


def hard_cases() -> tuple[fm.F32, fm.F32, fm.F32]:
    """Random magnitudes, cancellation and sums that lie next to a tie."""
    rng = np.random.default_rng(12)

    def draw(low: int, high: int) -> fm.F32:
        significand = rng.integers(2**23, 2**24, COUNT) * 2.0**-23 * rng.choice([-1, 1], COUNT)
        values: fm.F32 = (significand * 2.0 ** rng.integers(low, high, COUNT)).astype(np.float32)
        return values

    a = rng.integers(1, 2**8, COUNT)
    sign = rng.choice([-1.0, 1.0], COUNT)
    tie_x = (sign * 2.0**-24 * (1 + a * 2.0**-23)).astype(np.float32)
    tie_y = (1 - a * 2.0**-23).astype(np.float32)
    x, y = draw(-20, 20), draw(-20, 20)
    xs = [draw(-10, 10), x, tie_x, draw(-126, 127)]
    ys = [draw(-10, 10), y, tie_y, draw(-126, 127)]
    zs = [draw(-10, 10), -(x * y), draw(0, 1), draw(-126, 127)]
    return np.concatenate(xs), np.concatenate(ys), np.concatenate(zs)


@pytest.mark.parametrize("name", ["t_fmaf", "t_soft"])
def test_fmaf_of_the_engine_equals_the_reference(library: ctypes.CDLL, name: str) -> None:
    x, y, z = hard_cases()
    with np.errstate(all="ignore"):
        assert_same(call(library, name, x, y, z), fm.fmaf(x, y, z), x, y, z)
