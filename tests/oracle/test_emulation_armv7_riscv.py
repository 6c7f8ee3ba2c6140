"""Armv7 and RISC-V under emulation: kernels against the formulas, digests equal to native ones.

Armv7 with NEON and VFPv4 (Cortex-A7, A15) and without VFPv4 (Cortex-A8: plain C, fmaf in
software); RISC-V without vectors and with registers of 128 to 1024 bits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from oracle.test_emulation_digests import INT8, NATIVE, SHAPES
from reference import build
from reference import formats as fmt
from reference import records as rec
from reference.make_image import Layer, make

V = "rv64,v=true,vext_spec=v1.0,vlen="


@dataclass(frozen=True)
class Machine:
    """An emulated processor, what is built for it, and its best kernel."""

    emulator: str
    cpu: str
    toolchain: build.Toolchain
    kernel: str


MACHINES = {
    "a7": Machine("qemu-arm-static", "cortex-a7", build.ARMV7, "neon"),
    "a15": Machine("qemu-arm-static", "cortex-a15", build.ARMV7, "neon"),
    "a8": Machine("qemu-arm-static", "cortex-a8", build.ARMV7, "scalar"),
    "rv64": Machine("qemu-riscv64-static", "rv64", build.RISCV64, "scalar"),
    "rvv128": Machine("qemu-riscv64-static", f"{V}128", build.RISCV64, "rvv"),
    "rvv256": Machine("qemu-riscv64-static", f"{V}256", build.RISCV64, "rvv"),
    "rvv512": Machine("qemu-riscv64-static", f"{V}512", build.RISCV64, "rvv"),
    "rvv1024": Machine("qemu-riscv64-static", f"{V}1024", build.RISCV64, "rvv"),
}
WITHOUT = {"a8": "neon", "rv64": "rvv"}  # what is built in, but these processors cannot run
MIXED = replace(  # every format of weights in one artifact
    INT8,
    layers=(
        Layer(formats={rec.ROLE_DOWN: ((fmt.Q8, 1), (fmt.Q4RAW_BF16, 2), (fmt.Q4H, 2))}),
        Layer(default=((fmt.Q8, 0),), formats={rec.ROLE_DOWN: ((fmt.Q4RAW_F16, 0),)}),
    ),
)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("foreign")
    shapes = {**SHAPES, "mixed": MIXED}
    paths = {name: folder / f"{name}.gembin" for name in shapes}
    for name, path in paths.items():
        path.write_bytes(make(shapes[name], seed=17))
    return paths


@pytest.fixture(scope="module")
def digests(
    artifacts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, root: Path
) -> dict[str, str]:
    """Of the artifacts, on this machine."""
    folder = tmp_path_factory.mktemp("native")
    program = build.program(NATIVE, root / "tests/c/test_fpenv.c", root / "csrc", folder)
    found = {}
    for name, path in artifacts.items():
        done = subprocess.run([program, path, "2"], capture_output=True, text=True, check=True)
        found[name] = done.stdout.strip()
    return found


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, root: Path) -> dict[tuple[str, str], Path]:
    """(processor, name of the C test) -> a static program."""
    built = {}
    for chain in (build.ARMV7, build.RISCV64):
        if shutil.which(chain.cc[0]) is None:
            pytest.fail(f"{chain.cc[0]}: not found; run: make setup as root", pytrace=False)
        folder = tmp_path_factory.mktemp(chain.processor)
        for name in ("test_kern", "test_fpenv"):
            source = root / f"tests/c/{name}.c"
            built[chain.processor, name] = build.program(chain, source, root / "csrc", folder)
    return built


def run(
    programs: dict[tuple[str, str], Path], machine: Machine, name: str, *args: str, kernel: str = ""
) -> subprocess.CompletedProcess[str]:
    """A C test on a machine, the kernel chosen by the environment; empty: the best one."""
    program = programs[machine.toolchain.processor, name]
    command = [machine.emulator, "-cpu", machine.cpu, str(program), *args]
    environment = {**os.environ, "GEMRUN_KERNEL": kernel}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("key", [key for key in MACHINES if key != "a15"])
def test_kernels_give_the_defined_bits(programs: dict[tuple[str, str], Path], key: str) -> None:
    machine = MACHINES[key]
    done = run(programs, machine, "test_kern", "quick", machine.kernel)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("key", sorted(WITHOUT))
def test_a_kernel_that_cannot_run_is_an_error(
    programs: dict[tuple[str, str], Path], artifacts: dict[str, Path], key: str
) -> None:
    for kernel in (WITHOUT[key], f"scalar/{WITHOUT[key]}"):
        done = run(
            programs, MACHINES[key], "test_fpenv", str(artifacts["int8"]), "1", kernel=kernel
        )
        assert done.returncode == 1, done.stderr
        assert "cannot run the wanted kernel (available: scalar)" in done.stderr


@pytest.mark.parametrize("key", sorted(MACHINES))
def test_digests_equal_the_native_ones(
    programs: dict[tuple[str, str], Path],
    artifacts: dict[str, Path],
    digests: dict[str, str],
    key: str,
) -> None:
    few = {"a15": ["int8"], "rvv512": ["int8"], "a8": ["float", "mixed"]}  # a8: fmaf in software
    for name in few.get(key, sorted(artifacts)):
        threads = ("1", "2", "3", "8") if name == "int8" else ("3",)
        for count in threads:
            done = run(programs, MACHINES[key], "test_fpenv", str(artifacts[name]), count)
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip() == digests[name], (name, count)


@pytest.mark.parametrize("key", ["a7", "rvv256"])
def test_digests_of_forced_kernels(
    programs: dict[tuple[str, str], Path],
    artifacts: dict[str, Path],
    digests: dict[str, str],
    key: str,
) -> None:
    best = MACHINES[key].kernel
    for kernel in ("scalar", best, f"scalar/{best}", f"{best}/scalar"):
        path = str(artifacts["mixed"])
        done = run(programs, MACHINES[key], "test_fpenv", path, "2", kernel=kernel)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == digests["mixed"], kernel
