"""Cycles per group of the AArch64 products, from the compiled loops: no such core is here.

    python benchmarks/mca.py

Compiles the kernels as the tests do, takes the loop over groups of one token and the code of a
tile of four, counts their cycles by llvm-mca (LLVM 19), and turns them into what a board reads and
multiplies. Prints the tables of arm_cores.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from mca_armv7_riscv import ROOT, count_of, instructions_of, loops_of, mca

from reference import build

MACS = 512  # of a group: 16 rows x 32 inputs
BYTES = {"q4h": 288, "q8": 528}


@dataclass(frozen=True)
class Kernel:
    """A file of csrc, and how its code is found: opcodes of the loop of one token by format, the
    function of a tile of some tokens."""

    source: str
    one: dict[str, dict[str, int]]
    tile: str
    tokens: int


NEON = Kernel(
    "gr_kern_neon.c",
    {"q4h": {"smlal": 28, "smlsl": 2, "ucvtf": 4}, "q8": {"smlal": 16, "sli": 16, "ucvtf": 4}},
    "nibbles2",
    2,
)
DOT = Kernel(
    "gr_kern_dot.c",
    {"q4h": {"sdot": 32, "smlsl": 2, "ucvtf": 4}, "q8": {"sdot": 32, "sli": 16, "ucvtf": 4}},
    "tile4",
    4,
)
MMLA = Kernel("gr_kern_mmla.c", {}, "tile4", 4)


@dataclass(frozen=True)
class Core:
    """A core: its kernel, and the model of LLVM that stands for it."""

    name: str
    kernel: Kernel
    model: str


A35 = Core("Cortex-A35", NEON, "cortex-a35")
A53 = Core("Cortex-A53", NEON, "cortex-a53")
A72 = Core("Cortex-A72", NEON, "cortex-a72")
A55 = Core("Cortex-A55", DOT, "cortex-a55")
A76 = Core("Cortex-A76", DOT, "neoverse-n1")
A78 = Core("Cortex-A78", DOT, "neoverse-n1")
A510 = Core("Cortex-A510", DOT, "cortex-a510")
A710 = Core("Cortex-A710", DOT, "neoverse-n2")
CORES = (A35, A53, A72, A55, A76, A78, A510, A710)
# Boards: core, GHz, cores, peak GB/s of the memory.
BOARDS: tuple[tuple[str, Core, float, int, float], ...] = (
    ("STM32MP257", A35, 1.5, 2, 9.6),
    ("i.MX8M Mini", A53, 1.8, 4, 12.0),
    ("Raspberry Pi 4", A72, 1.5, 4, 12.8),
    ("RK3566", A55, 1.8, 4, 8.5),
    ("RK3588, small cores", A55, 1.8, 4, 33.8),
    ("RK3588, big cores", A76, 2.4, 4, 33.8),
    ("Raspberry Pi 5", A76, 2.4, 4, 17.1),
    ("Orin Nano 4GB, 10 W", A78, 1.51, 6, 34.1),
    ("Orin Nano 8GB, 15 W", A78, 1.51, 6, 68.3),
    ("AGX Orin 64GB", A78, 2.2, 12, 204.8),
)


def one_token(kernel: Kernel, form: str) -> tuple[str, ...]:
    """The shortest loop that has the opcodes of the format so often."""
    code, labels = instructions_of(build.AARCH64, kernel.source, ROOT / "csrc" / kernel.source)
    fits = [
        span
        for span in loops_of(code, labels)
        if all(count_of(code, span, op) == n for op, n in kernel.one[form].items())
    ]
    first, last = min(fits, key=lambda span: span[1] - span[0])
    return tuple(code[first:last])


def tile(kernel: Kernel) -> tuple[str, ...]:
    """A function without branches."""
    code, labels = instructions_of(build.AARCH64, kernel.source, ROOT / "csrc" / kernel.source)
    first = labels[kernel.tile]
    last = code.index("ret", first)
    if any(re.match(r"b\s|b[.a-z]{2,3}\s+\.|[ct]bn?z", line) for line in code[first:last]):
        raise LookupError(f"{kernel.source}: {kernel.tile} branches")
    return tuple(code[first:last])


def cycles(code: tuple[str, ...], core: Core) -> float:
    return mca("aarch64", core.model, "+dotprod,+i8mm")(code)


def loops() -> Iterator[str]:
    """Cycles per group, and MAC per cycle, of every core."""
    yield "| core | model | product | instructions | cycles | MAC/cycle |"
    yield "|---|---|---|---|---|---|"
    for core in CORES:
        for form in core.kernel.one:
            code = one_token(core.kernel, form)
            count = cycles(code, core)
            yield (
                f"| {core.name} | {core.model} | {form}, one token | {len(code)} | {count:.0f} | "
                f"{MACS / count:.1f} |"
            )
        for kernel in (core.kernel, MMLA) if core in (A510, A710) else (core.kernel,):
            code = tile(kernel)
            name = f"{kernel.tokens} tokens, {'SMMLA, ' if kernel is MMLA else ''}each"
            count = cycles(code, core) / kernel.tokens
            yield (
                f"| {core.name} | {core.model} | {name} | {len(code) / kernel.tokens:.0f} | "
                f"{count:.0f} | {MACS / count:.1f} |"
            )


def boards() -> Iterator[str]:
    """What the cores of a board could read if memory never made them wait, against its memory."""
    yield (
        "| board | cores | q4h, a core | q4h, all | q8, all | peak of the memory | "
        "threads to the peak | prefill, all |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for board, core, ghz, count, peak in BOARDS:
        read = {
            form: size / cycles(one_token(core.kernel, form), core) * ghz
            for form, size in BYTES.items()
        }
        threads = ceil(peak / read["q4h"])
        done = MACS * core.kernel.tokens / cycles(tile(core.kernel), core) * ghz * count
        yield (
            f"| {board} | {count} x {core.name}, {ghz} GHz | {read['q4h']:.1f} GB/s | "
            f"{read['q4h'] * count:.1f} GB/s | {read['q8'] * count:.1f} GB/s | {peak} GB/s | "
            f"{threads if threads <= count else 'not reached'} | {done:.0f} GMAC/s |"
        )


def main() -> None:
    for line in loops():
        print(line)
    print()
    for line in boards():
        print(line)


if __name__ == "__main__":
    main()
