"""`gemmake engine`: libraries and command for other machines, run under emulation.

The first build with a C library compiles that library, and zig keeps it in its cache: glibc's stubs
take seconds, musl more than a minute of two cores. Each build replays the test vectors of the
golden artifacts: the command, which holds the static library, and a small program with the shared
one. The glibc builds run with Debian's C libraries.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import locked
from gemmake import crossbuild, elf

# A test may wait for two C libraries, its own and one that the other worker's zig compiles.
pytestmark = [pytest.mark.cross, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
GOLDEN = sorted((ROOT / "tests" / "golden" / "v1.0").glob("*.gembin"))

UNWINDING = (".eh_frame", ".eh_frame_hdr", ".ARM.exidx", ".ARM.extab")
ZIG_LIMIT = 132 << 10  # of code and constants: a tenth above gcc's limit


@dataclass(frozen=True)
class Machine:
    """How a build is run, and the best kernel there."""

    emulator: str
    cpu: str
    libraries: str  # Debian's, for programs with glibc
    kernel: str


MACHINES = {
    "x86_64": Machine("qemu-x86_64-static", "max", "/", "avx2"),
    "aarch64": Machine("qemu-aarch64-static", "max,sve=off", "/usr/aarch64-linux-gnu", "i8mm"),
    "armv7": Machine("qemu-arm-static", "cortex-a15", "/usr/arm-linux-gnueabihf", "neon"),
    "riscv64": Machine(
        "qemu-riscv64-static",
        "rv64,v=true,vlen=256,vext_spec=v1.0",
        "/usr/riscv64-linux-gnu",
        "rvv",
    ),
}
FOLDERS = {
    (arch, libc): triple.removesuffix(f".{crossbuild.GLIBC}")
    for arch, triples in crossbuild.TRIPLES.items()
    for libc, triple in zip(crossbuild.LIBCS, triples, strict=True)
}


@pytest.fixture(scope="module")
def output(run_dir: Path) -> Path:
    return run_dir / "engine-builds"


def built(output: Path, arch: str, libc: str) -> Path:
    """The folder of a build, made once a run by the command itself."""
    folder = output / FOLDERS[arch, libc]
    with locked(folder):
        if not folder.is_dir():
            command = [sys.executable, "-m", "gemmake.cli", "engine", "--output", str(output)]
            command += ["--target", arch, "--libc", libc]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
            log = Path(f"{folder}.log")
            assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
            assert folder.name in done.stdout
    return folder


def emulated(arch: str, *arguments: str | Path, kernel: str = "") -> str:
    machine = MACHINES[arch]
    if shutil.which(machine.emulator) is None:
        pytest.fail(f"{machine.emulator}: not found; run: make setup as root", pytrace=False)
    environment = {k: v for k, v in os.environ.items() if k != "GEMRUN_KERNEL"}
    environment |= {"GEMRUN_KERNEL": kernel} if kernel else {}
    command = [machine.emulator, "-cpu", machine.cpu, "-L", machine.libraries, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


# Two to three minutes of a core for each C library: one in `make test`, all in `make cross`.
def marks(arch: str, libc: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.musl] if libc == "musl" and arch != "x86_64" else []


@pytest.mark.parametrize(
    ("arch", "libc"), [pytest.param(*key, marks=marks(*key)) for key in sorted(FOLDERS)]
)
def test_test_vectors_pass_under_emulation(output: Path, arch: str, libc: str) -> None:
    command = built(output, arch, libc) / "bin" / "gemrun"
    for path in GOLDEN:
        for kernel in ("", "scalar"):
            said = emulated(arch, command, path, "--run-tests", kernel=kernel)
            assert "passed" in said, said
    assert MACHINES[arch].kernel in emulated(arch, command, GOLDEN[0], "--info")


@pytest.mark.parametrize("arch", sorted(MACHINES))
def test_shared_library_runs_and_needs_no_newer_glibc(
    output: Path, arch: str, tmp_path: Path
) -> None:
    folder = built(output, arch, "glibc")
    library = folder / "lib" / "libgemrun.so.1"
    for path in (library, folder / "bin" / "gemrun"):
        numbers = {
            tuple(map(int, name.removeprefix("GLIBC_").split(".")))
            for name in elf.needed_versions(path)
            if name.startswith("GLIBC_")
        }
        assert numbers, f"{path.name}: needs no version: nothing is proven"
        assert max(numbers) <= (2, 28), f"{path.name}: {max(numbers)}"
    program = tmp_path / "ask"
    triple = crossbuild.TRIPLES[arch][0]
    compile_ = [str(crossbuild.zig()), "cc", "-target", triple, "-O1"]
    compile_ += [str(ROOT / "examples/embed_c/ask.c"), f"-I{folder / 'include'}"]
    compile_ += [f"-L{library.parent}", "-lgemrun", f"-Wl,-rpath,{library.parent}"]
    subprocess.run([*compile_, "-o", str(program)], check=True)
    assert "2 test vectors passed" in emulated(arch, program, GOLDEN[1])


@pytest.mark.parametrize("arch", sorted(MACHINES))
def test_the_library_is_built_for_size(output: Path, arch: str) -> None:
    """No tables for unwinding, and not far from what gcc makes on x86-64, which has 120 KiB."""
    library = built(output, arch, "glibc") / "lib" / "libgemrun.so.1"
    size = {section.name: section.size for section in elf.sections(library.read_bytes())}
    assert sum(size.get(name, 0) for name in UNWINDING) < 1024, size
    code = elf.code_bytes(library)
    print(f"{arch}: {code:,} bytes of code and constants")
    assert code < ZIG_LIMIT


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=marks(arch, "musl")) for arch in sorted(MACHINES)]
)
def test_static_command_needs_no_library(output: Path, arch: str) -> None:
    command = built(output, arch, "musl") / "bin" / "gemrun"
    names = [section.name for section in elf.sections(command.read_bytes())]
    assert ".interp" not in names


def test_two_builds_give_the_same_bytes(
    output: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From another copy of the sources, in another folder."""
    first = json.loads((built(output, "aarch64", "glibc") / "engine.json").read_text())
    copy = tmp_path / "copy of the tree"
    for name in ("csrc", "cmake"):
        shutil.copytree(ROOT / name, copy / name)
    for name in ("CMakeLists.txt", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    recipe = crossbuild.recipes(crossbuild.Request(["aarch64"], ["glibc"]))[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crossbuild, "source_dir", lambda: copy)
        again = crossbuild.build(recipe, tmp_path / "again")
    assert json.loads((again.folder / "engine.json").read_text()) == first
    assert {"lib/libgemrun.a", "lib/libgemrun.so.1", "bin/gemrun"} <= set(first["files"])
    for name in first["files"]:  # no folder of this machine
        content = (again.folder / name).read_bytes()
        assert str(tmp_path).encode() not in content, name
        assert str(Path.home()).encode() not in content, name
