"""AArch64 under emulation: every kernel of every core against the formulas and native digests.

The cores: NEON alone (Cortex-A53, A72), with SDOT (A76, Neoverse N1), with SMMLA (`max`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from oracle.test_emulation_digests import FLOAT, INT8, NATIVE
from reference import build
from reference import formats as fmt
from reference import records as rec
from reference.make_image import Layer, make

CORES = {
    "cortex-a53": ("scalar", "neon"),
    "cortex-a72": ("scalar", "neon"),
    "cortex-a76": ("scalar", "neon", "dotprod"),
    "neoverse-n1": ("scalar", "neon", "dotprod"),
    "max": ("scalar", "neon", "dotprod", "i8mm"),
    "max,sve=off": ("scalar", "neon", "dotprod", "i8mm"),
}
ALL = CORES["max"]
MIXED = replace(  # every format of weights that has integer kernels
    INT8,
    layers=(
        Layer(formats={rec.ROLE_DOWN: ((fmt.Q8, 1), (fmt.Q4RAW_BF16, 2), (fmt.Q4H, 2))}),
        Layer(default=((fmt.Q8, 0),), formats={rec.ROLE_DOWN: ((fmt.Q4RAW_F16, 0),)}),
    ),
)
SHAPES = {
    "mixed": replace(MIXED, context=544, chunk=512, threads=8),
    "half": replace(FLOAT, kv_type=rec.KV_F16),
}
SOME, MANY = "40", "530"  # tokens; the latter are more than the largest chunk


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("aarch64")
    paths = {name: folder / f"{name}.gembin" for name in SHAPES}
    for name, path in paths.items():
        path.write_bytes(make(SHAPES[name], seed=23))
    return paths


def built(chain: build.Toolchain, root: Path, folder: Path) -> dict[str, Path]:
    names = ("digests", "test_kern")
    return {
        name: build.program(chain, root / f"tests/c/{name}.c", root / "csrc", folder)
        for name in names
    }


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, root: Path) -> dict[str, Path]:
    for name in (build.AARCH64.cc[0], "qemu-aarch64-static"):
        if shutil.which(name) is None:
            pytest.fail(f"{name}: not found; run: make setup as root", pytrace=False)
    return built(build.AARCH64, root, tmp_path_factory.mktemp("arm"))


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    return built(NATIVE, root, tmp_path_factory.mktemp("native"))["digests"]


def run(*command: Path | str, kernel: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GEMRUN_KERNEL": kernel}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def on(core: str) -> tuple[str, str, str]:
    return "qemu-aarch64-static", "-cpu", core


def digest(*command: Path | str, kernel: str = "") -> list[str]:
    """Of all runs of the program, which must agree; then the kernels that it ran."""
    done = run(*command, kernel=kernel)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("core", sorted(CORES))
def test_kernels_give_the_defined_bits(programs: dict[str, Path], core: str) -> None:
    for kernel in CORES[core][1:]:
        done = run(*on(core), programs["test_kern"], "quick", kernel)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("core", ["cortex-a53", "cortex-a76", "max"])
def test_digests_of_all_kernels_threads_and_chunks(
    programs: dict[str, Path], native: Path, artifacts: dict[str, Path], core: str
) -> None:
    want = digest(native, artifacts["mixed"], SOME)[0]
    got = digest(*on(core), programs["digests"], artifacts["mixed"], SOME)
    assert got == [want, *CORES[core]]


@pytest.mark.parametrize("core", ["cortex-a72", "neoverse-n1", "max,sve=off"])
def test_digests_of_a_whole_chunk(
    programs: dict[str, Path], native: Path, artifacts: dict[str, Path], core: str
) -> None:
    best = CORES[core][-1]
    want = digest(native, artifacts["mixed"], MANY, "scalar")
    for kernel in (best, f"neon/{best}"):
        path = artifacts["mixed"]
        assert digest(*on(core), programs["digests"], path, MANY, kernel) == want


def test_digests_of_float_weights(
    programs: dict[str, Path], native: Path, artifacts: dict[str, Path]
) -> None:
    want = digest(native, artifacts["half"], SOME, "scalar")
    for kernel in ("scalar", "neon"):
        assert digest(*on("max"), programs["digests"], artifacts["half"], SOME, kernel) == want


@pytest.mark.parametrize("core", ["cortex-a53", "cortex-a76"])
def test_a_kernel_that_a_core_lacks_is_an_error(
    programs: dict[str, Path], artifacts: dict[str, Path], core: str
) -> None:
    available = ", ".join(CORES[core])
    for kernel in set(ALL) - set(CORES[core]):
        for name in (kernel, f"neon/{kernel}", f"{kernel}/neon"):
            done = run(*on(core), programs["digests"], artifacts["half"], SOME, name)
            by_name = run(*on(core), programs["digests"], artifacts["half"], SOME, kernel=name)
            for refused in (done, by_name):
                assert refused.returncode == 1, refused.stderr  # no signal
                assert f"cannot run the wanted kernel (available: {available})" in refused.stderr
