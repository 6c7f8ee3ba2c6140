"""One artifact, equal digests: native, x86-64 without AVX2, two aarch64 cores under emulation.

The program is tests/c/test_fpenv.c, so each run also changes the host's floating-point state.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from reference import build
from reference import formats as fmt
from reference import records as rec
from reference.make_image import Layer, Shape, make

INT8 = Shape(
    (
        Layer(window=8, sandwich=True, qk_norm=True, kv_heads=1, attn_softcap=5.0),
        Layer(silu=True, bias=True, formats={rec.ROLE_DOWN: ((fmt.Q8, 2), (fmt.Q4RAW_F16, 3))}),
    ),
    vocab=300,
    final_softcap=3.0,
)
FLOAT = replace(
    INT8,
    layers=(Layer(default=((fmt.F32_PANELS, 0),)), Layer(default=((fmt.F16_PANELS, 0),))),
    table=fmt.F32_PANELS,
)
SHAPES = {
    "int8": INT8,
    "float": replace(FLOAT, kv_type=rec.KV_F32),
    "half": replace(FLOAT, kv_type=rec.KV_F16),
}
NATIVE = build.Toolchain(("cc",), platform.machine(), ("-pthread",))
X86_CPUS = ("qemu64", "Nehalem", "max")
ARM_CPUS = ("cortex-a53", "max")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("emulation")
    paths = {name: folder / f"{name}.gembin" for name in SHAPES}
    for name, path in paths.items():
        path.write_bytes(make(SHAPES[name], seed=9))
    return paths


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    folder = tmp_path_factory.mktemp("native")
    return build.program(NATIVE, root / "tests/c/test_fpenv.c", root / "csrc", folder)


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.fail(
            f"{name}: not found; install qemu-user-static and gcc-aarch64-linux-gnu", pytrace=False
        )
    return path


def digest(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    assert len(done.stdout.strip()) == 16
    return done.stdout.strip()


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_host_floating_point_state_does_not_matter(
    native: Path, artifacts: dict[str, Path], name: str
) -> None:
    digests = {digest(str(native), str(artifacts[name]), str(n)) for n in (1, 2, 3)}
    assert len(digests) == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with native x86-64")
def test_digest_on_x86_64_cpus_without_avx2(native: Path, artifacts: dict[str, Path]) -> None:
    for name, path in artifacts.items():
        want = digest(str(native), str(path), "2")
        for cpu in X86_CPUS:
            emulator = (tool("qemu-x86_64-static"), "-cpu", cpu)
            assert digest(*emulator, str(native), str(path), "2") == want, (name, cpu)


def test_digest_on_aarch64_cores(
    native: Path, artifacts: dict[str, Path], root: Path, tmp_path: Path
) -> None:
    tool(build.AARCH64.cc[0])
    driver = root / "tests/c/test_fpenv.c"
    program = build.program(build.AARCH64, driver, root / "csrc", tmp_path / "arm")
    for name, path in artifacts.items():
        want = digest(str(native), str(path), "2")
        for cpu in ARM_CPUS:
            emulator = (tool("qemu-aarch64-static"), "-cpu", cpu)
            assert digest(*emulator, str(program), str(path), "2") == want, (name, cpu)
