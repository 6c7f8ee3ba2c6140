"""WebAssembly: the engine for wasm32-wasi with vectors under Node gives the native bits."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import locked
from gemmake import crossbuild
from oracle.test_emulation_digests import NATIVE, SHAPES
from reference import build
from reference.make_image import make

pytestmark = [pytest.mark.cross, pytest.mark.timeout(1800)]  # compiles WASI's C library
ROOT = Path(__file__).resolve().parents[2]
GOLDEN = sorted((ROOT / "tests" / "golden" / "v1.0").glob("*.gembin"))


@pytest.fixture(scope="module")
def engine(run_dir: Path) -> Path:
    """Built once a run, whichever worker asks first."""
    (recipe,) = crossbuild.recipes(crossbuild.Request(["wasm32"]))
    output = run_dir / "engine-builds"
    with locked(output / recipe.name):
        if not (output / recipe.name).is_dir():
            crossbuild.build(recipe, output)
    return output / recipe.name


def program(engine: Path, source: Path, folder: Path) -> Path:
    made = folder / f"{source.stem}.wasm"
    command = [crossbuild.zig(), "cc", "-target", "wasm32-wasi", "-O1", "-s", source]
    command += [f"-I{ROOT / 'csrc'}", engine / "lib" / "libgemrun.a", "-o", made]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


def under_node(*command: Path | str) -> str:
    if shutil.which("node") is None:
        pytest.fail("node: not found; run: make setup as root", pytrace=False)
    runner = ROOT / "examples" / "wasm" / "run.mjs"
    environment = {k: v for k, v in os.environ.items() if k != "GEMRUN_KERNEL"}
    done = subprocess.run(
        ["node", "--no-warnings", str(runner), *map(str, command)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_digests_equal_the_native_ones(engine: Path, tmp_path: Path) -> None:
    driver = ROOT / "tests" / "c" / "test_fpenv.c"
    native = build.program(NATIVE, driver, ROOT / "csrc", tmp_path / "native")
    foreign = program(engine, driver, tmp_path)
    for name, shape in SHAPES.items():
        path = tmp_path / f"{name}.gembin"
        path.write_bytes(make(shape, seed=9))
        done = subprocess.run([native, path, "2"], capture_output=True, text=True, check=True)
        assert under_node(foreign, path, "1") == done.stdout, name


def test_test_vectors_pass(engine: Path, tmp_path: Path) -> None:
    ask = program(engine, ROOT / "examples" / "embed_c" / "ask.c", tmp_path)
    for path in GOLDEN:
        assert "test vectors passed" in under_node(ask, path)


def test_it_has_vector_instructions(engine: Path, tmp_path: Path) -> None:
    """i32x4.dot_i16x8_s, f32x4.mul and their like begin with 0xFD; so does much else: many."""
    ask = program(engine, ROOT / "examples" / "embed_c" / "ask.c", tmp_path)
    assert ask.read_bytes()[:4] == b"\0asm"
    assert ask.read_bytes().count(b"\xfd") > 500
