"""Builds a C program on the engine's sources, for this machine or, statically, for another one."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FLAGS = ("-std=c11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True)
class Toolchain:
    """A compiler, the processor it builds for (a name in kernels.list), and what linking needs."""

    cc: tuple[str, ...]
    processor: str
    link: tuple[str, ...] = ("-static", "-pthread")


NATIVE_X86 = Toolchain(("cc",), "x86_64", ("-pthread",))
X86_STATIC = Toolchain(("cc",), "x86_64")
AARCH64 = Toolchain(("aarch64-linux-gnu-gcc",), "aarch64")
ARMV7 = Toolchain(("arm-linux-gnueabihf-gcc",), "armv7")
# Debian's gcc knows no vector intrinsics: its libraries and linker, clang's compiler. That reports
# loops that it does not unroll as errors.
RISCV64 = Toolchain(("clang-19", "--target=riscv64-linux-gnu", "-Wno-pass-failed"), "riscv64")


def kernel_objects(csrc: Path, processor: str) -> list[tuple[Path, str, tuple[str, ...]]]:
    """(source, object name, flags) of every object with kernels of a processor."""
    jobs = []
    for line in (csrc / "kernels.list").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            wanted, source, suffix, *flags = line.split()
            if wanted in ("any", processor):
                name = f"{source[:-2]}_{suffix}"
                jobs.append((csrc / source, name, (f"-DGR_KERN_SUFFIX={suffix}", *flags)))
    return jobs


def _compile(toolchain: Toolchain, source: Path, target: Path, extra: Sequence[str]) -> None:
    command = [*toolchain.cc, *FLAGS, *extra, "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def program(toolchain: Toolchain, main: Path, csrc: Path, folder: Path) -> Path:
    """Compile `main` with the engine of `csrc` into folder/name; objects there are used again."""
    folder.mkdir(parents=True, exist_ok=True)
    include: tuple[str, ...] = (f"-I{csrc}",)
    other = ("gr_kern_", "gr_min_")
    core = [p for p in sorted(csrc.glob("gr_*.c")) if not p.name.startswith(other)]
    jobs = [(path, path.stem, include) for path in (*core, main)]
    for source, name, flags in kernel_objects(csrc, toolchain.processor):
        jobs.append((source, name, (*include, *flags)))
    objects = []
    for source, name, extra in jobs:
        objects.append(folder / f"{name}.o")
        if not objects[-1].exists():
            _compile(toolchain, source, objects[-1], extra)
    target = folder / main.stem
    command = [*toolchain.cc, *map(str, objects), *toolchain.link, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return target
