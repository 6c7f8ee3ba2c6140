"""The engine's float functions: their stated error bounds, and the coefficients in NUMERICS.md."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import mpmath  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import pytest

F32 = npt.NDArray[np.float32]
SHIM = """
#include "gr_internal.h"
#include "gr_kern.h"
float f_exp(float x) { return gr_expf(x); }
float f_tanh(float x) { return gr_tanhf(x); }
float f_silu(float x) { return gr_silu(x); }
float f_gelu(float x) { return gr_gelu(x); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, root: Path) -> ctypes.CDLL:
    """gr_math.c and the inline functions of gr_kern.h as a shared object."""
    folder = tmp_path_factory.mktemp("bounds")
    source, target = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    command = ["cc", "-std=c11", "-O2", "-ffp-contract=off", "-fPIC", "-shared"]
    inputs = [f"-I{root / 'csrc'}", str(source), str(root / "csrc" / "gr_math.c")]
    subprocess.run([*command, *inputs, "-o", str(target)], check=True)
    loaded = ctypes.CDLL(str(target))
    for name in ("f_exp", "f_tanh", "f_silu", "f_gelu"):
        getattr(loaded, name).argtypes = [ctypes.c_float]
        getattr(loaded, name).restype = ctypes.c_float
    return loaded


def sample(low: float, high: float, count: int = 1500) -> F32:
    """Uniform arguments and small ones of both signs."""
    rng = np.random.default_rng(3)
    near = rng.choice([-1, 1], count) * 2.0 ** rng.uniform(-40, 2, count)
    both = np.concatenate([rng.uniform(low, high, count), near, [low, high, 0.0, 0.625]])
    inside: F32 = both[(both >= low) & (both <= high)].astype(np.float32)
    return inside


def ulp(x: mpmath.mpf) -> mpmath.mpf:
    """The unit in the last place of the binary32 numbers around x."""
    if x == 0:
        return mpmath.mpf(2) ** -149
    return mpmath.mpf(2) ** (max(int(mpmath.floor(mpmath.log(abs(x), 2))), -126) - 23)


def silu(x: mpmath.mpf) -> mpmath.mpf:
    return x / (1 + mpmath.exp(-x))


def gelu(x: mpmath.mpf) -> mpmath.mpf:
    inner = mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)
    return x / 2 * (1 + mpmath.tanh(inner))


@pytest.mark.parametrize(
    ("name", "true", "low", "high", "bound"),
    [
        ("f_exp", mpmath.exp, -87.0, 88.0, 1.0),
        ("f_tanh", mpmath.tanh, -12.0, 12.0, 1.75),
        ("f_silu", silu, -80.0, 88.0, 3.5),  # a sigmoid within 2.75 ulp and one rounding
    ],
)
def test_error_is_within_the_stated_units(
    library: ctypes.CDLL,
    name: str,
    true: Callable[[mpmath.mpf], mpmath.mpf],
    low: float,
    high: float,
    bound: float,
) -> None:
    function = getattr(library, name)
    with mpmath.workdps(40):
        for x in sample(low, high):
            exact = true(mpmath.mpf(float(x)))
            error = abs(mpmath.mpf(function(x)) - exact) / ulp(exact)
            assert error <= bound, (float(x), float(error))


def test_gelu_is_within_its_bound(library: ctypes.CDLL) -> None:
    with mpmath.workdps(40):
        for x in sample(-20.0, 20.0):
            error = abs(mpmath.mpf(library.f_gelu(x)) - gelu(mpmath.mpf(float(x))))
            assert error <= 2e-7 * abs(float(x)), float(x)


def test_exp_at_its_ends(library: ctypes.CDLL) -> None:
    below = float(np.nextafter(np.float32(-87), np.float32(-88)))
    assert library.f_exp(below) == 0.0
    assert library.f_exp(-87.0) > 2.0**-126
    assert library.f_exp(float("inf")) == library.f_exp(88.0) < float("inf")
    assert library.f_exp(float("-inf")) == 0.0
    assert np.isnan(library.f_exp(float("nan")))
    assert library.f_exp(0.0) == 1.0


def test_numerics_text_has_the_coefficients_of_the_code(root: Path) -> None:
    """Every hexadecimal constant of the functions stands in NUMERICS.md, and no other does."""
    text = (root / "csrc" / "NUMERICS.md").read_text()
    code = (root / "csrc" / "gr_kern.h").read_text()
    functions = code[code.index("/* ---- functions") :]
    in_code = {float.fromhex(x) for x in re.findall(r"-?0x1\.[0-9a-f]+p[+-]\d+", functions)}
    section = text[text.index("## 2.") : text.index("## 3.")]
    in_text = {float.fromhex(x) for x in re.findall(r"-?0x1\.[0-9a-f]+p[+-]\d+", section)}
    assert in_code == in_text
