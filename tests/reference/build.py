"""Builds a C program on the engine's sources, for this machine or, statically, for another one."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FLAGS = ("-std=c11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
AVX2 = ("-mavx2", "-mfma", "-O3")


@dataclass(frozen=True)
class Toolchain:
    """A compiler and what its targets need; `avx2` builds the second set of kernels."""

    cc: str = "cc"
    avx2: bool = False
    link: tuple[str, ...] = ("-pthread",)


NATIVE_X86 = Toolchain(avx2=True)
AARCH64 = Toolchain("aarch64-linux-gnu-gcc", link=("-static", "-pthread"))
X86_STATIC = Toolchain(avx2=True, link=("-static", "-pthread"))


def _compile(toolchain: Toolchain, source: Path, target: Path, extra: Sequence[str]) -> None:
    command = [toolchain.cc, *FLAGS, *extra, "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def program(toolchain: Toolchain, main: Path, csrc: Path, folder: Path) -> Path:
    """Compile `main` with the engine of `csrc` into folder/name."""
    folder.mkdir(parents=True, exist_ok=True)
    include: tuple[str, ...] = (f"-I{csrc}",)
    core = [p for p in sorted(csrc.glob("gr_*.c")) if not p.name.startswith("gr_kern_")]
    jobs = [(path, path.stem, include) for path in (*core, main)]
    kernels = csrc / "gr_kern_ref.c"
    jobs.append((kernels, "kern_base", (*include, "-DGR_KERN_SUFFIX=base")))
    if toolchain.avx2:
        jobs.append((kernels, "kern_avx2", (*include, "-DGR_KERN_SUFFIX=avx2", *AVX2)))
    objects = []
    for source, name, extra in jobs:
        objects.append(folder / f"{name}.o")
        _compile(toolchain, source, objects[-1], extra)
    target = folder / main.stem
    command = [toolchain.cc, *map(str, objects), *toolchain.link, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return target
