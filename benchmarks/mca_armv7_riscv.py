"""Cycles per group of the Armv7 and RISC-V products, from the compiled loops: no such core is here.

    python benchmarks/mca_armv7_riscv.py

Compiles the kernels as the tests do, finds the loops over groups in the assembly, and counts their
cycles: by llvm-mca (LLVM 19) where it has a model, by issue slots and occupied units for the
Cortex-A7 and the SpacemiT X60, which have none there. Prints the table of armv7_riscv_cores.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from reference import build  # noqa: E402

ARMV7, RVV = "gr_kern_armv7.c", "gr_kern_rvv.c"
BYTES, MACS = 288, 512  # of a q4h group: 16 rows x 32 inputs


@dataclass(frozen=True)
class Work:
    """What a group of 16 rows takes: straight code, and pieces of it that run several times."""

    pieces: tuple[tuple[int, tuple[str, ...]], ...]
    tokens: int

    def instructions(self) -> float:
        return sum(times * len(code) for times, code in self.pieces) / self.tokens

    def cycles(self, count: Callable[[tuple[str, ...]], float]) -> float:
        return sum(times * count(code) for times, code in self.pieces) / self.tokens


def instructions_of(
    toolchain: build.Toolchain, kernels: str, source: Path
) -> tuple[list[str], dict[str, int]]:
    """Assembly of a file, with the flags of a kernel object: instructions, and where labels are."""
    csrc = ROOT / "csrc"
    jobs = build.kernel_objects(csrc, toolchain.processor)
    flags = next(flags for path, _, flags in jobs if path.name == kernels)
    command = [*toolchain.cc, *build.FLAGS, *flags, f"-I{csrc}", "-S", "-o-", str(source)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        line = re.sub(r"(\s@ |#\s).*", "", line).strip()
        label = re.match(r"([.\w$]+):", line)
        if label:
            labels[label[1]] = len(code)
        elif line and not line.startswith((".", "@", "#")):
            code.append(line)
    return code, labels


def loops_of(code: list[str], labels: dict[str, int]) -> list[tuple[int, int]]:
    """First and last + 1 of everything that a branch back repeats."""
    found = set()
    for i, line in enumerate(code):
        target = re.match(r"b(?!l\b)\w*\s+(?:.*[,\s])?([.\w]+)$", line)
        if target and labels.get(target[1], i + 1) <= i:
            found.add((labels[target[1]], i + 1))
    return sorted(found)


def count_of(code: list[str], span: tuple[int, int], opcode: str) -> int:
    return sum(line.split()[0] == opcode for line in code[span[0] : span[1]])


def flat(code: list[str], loops: list[tuple[int, int]], wanted: dict[str, int]) -> Work:
    """The shortest loop that has these opcodes so often: a group of one token."""
    fits = [s for s in loops if all(count_of(code, s, o) == n for o, n in wanted.items())]
    span = min(fits, key=lambda s: s[1] - s[0])
    return Work(((1, tuple(code[span[0] : span[1]])),), 1)


def nested(
    code: list[str],
    loops: list[tuple[int, int]],
    wanted: dict[str, int],
    times: dict[str, int],
    tokens: int,
) -> Work:
    """The shortest loop that has these opcodes so often, with one loop for each opcode of `times`
    inside, which runs so many times."""
    for span in sorted(loops, key=lambda s: s[1] - s[0]):
        inner = [s for s in loops if span[0] <= s[0] and s[1] <= span[1] and s != span]
        fits = all(count_of(code, span, opcode) == n for opcode, n in wanted.items())
        if fits and len(inner) == len(times):
            pieces, rest, at = [], [], span[0]
            for first, last in inner:
                opcode = next(o for o in times if count_of(code, (first, last), o))
                pieces.append((times[opcode], tuple(code[first:last])))
                rest += code[at:first]
                at = last
            return Work(((1, tuple(rest + code[at : span[1]])), *pieces), tokens)
    raise LookupError(f"no loop with {wanted}")


def mca(triple: str, cpu: str, features: str) -> Callable[[tuple[str, ...]], float]:
    def count(code: tuple[str, ...]) -> float:
        command = ["llvm-mca-19", f"-mtriple={triple}", f"-mcpu={cpu}", f"-mattr={features}"]
        done = subprocess.run(
            [*command, "--iterations=100"],
            input="\n".join(code) + "\n",
            capture_output=True,
            text=True,
            check=True,
        )
        found = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
        assert found is not None, done.stdout
        return int(found[1]) / 100

    return count


def cortex_a7(code: tuple[str, ...]) -> float:
    """One NEON instruction at a time, 64 bits wide: two cycles if a register has 128. Others of the
    core go beside it, one each."""
    neon = [line for line in code if line.startswith("v")]
    wide = sum(bool(re.search(r"\bq\d", line)) or line.startswith("vld1.8") for line in neon)
    return max(len(neon) + wide, len(code) / 2)


FIRST_CLASS = ("vadd", "vsub", "vrsub", "vmul", "vmacc", "vwmul", "vwmacc", "vwadd", "vmax")


def spacemit_x60(code: tuple[str, ...], segment: float = 4.0) -> float:
    """Units occupied, in the ratios that LLVM's later model of this core records as measured: sums
    and products a register of 256 bits a cycle, logic, shifts, moves and width changes half of one,
    counted by the wider operand. Floats and loads have units of their own; two issue slots. A
    segment load of a line takes `segment` cycles: 4 is the width of the path, 64 one an element."""
    lmul, integer, floats, loads = 1.0, 0.0, 0.0, 0.0
    for line in code:
        op = line.split()[0]
        setting = re.search(r"\bm(f?)([1248]),", line) if op == "vsetvli" else None
        if setting:
            lmul = 1 / int(setting[2]) if setting[1] else float(setting[2])
        if not op.startswith("v") or op == "vsetvli":
            continue
        width = lmul * 2 if op.startswith(("vw", "vn")) else lmul
        if op.startswith("vlseg"):
            loads += segment
        elif op.startswith(("vle", "vse")):
            loads += max(1.0, 2 * lmul)
        elif op.startswith("vf"):
            floats += max(1.0, lmul)
        else:
            integer += max(1.0, width if op.startswith(FIRST_CLASS) else 2 * width)
    return max(integer, floats, loads, len(code) / 2)


def row(core: str, kernel: str, work: Work, cycles: float, ghz: float) -> str:
    read = BYTES / cycles * ghz
    return (
        f"| {core} | {kernel} | {work.instructions():.0f} | {cycles:.0f} | {MACS / cycles:.1f} | "
        f"{MACS / cycles * ghz:.1f} | {read:.1f} |"
    )


def main() -> None:
    code, labels = instructions_of(build.ARMV7, ARMV7, ROOT / "csrc" / ARMV7)
    loops = loops_of(code, labels)
    arm1 = flat(code, loops, {"vmlal.s8": 64, "vsubl.u8": 2, "bl": 0})
    arm2 = nested(
        code, loops, {"vmlal.s8": 32, "vsubl.u8": 2, "bl": 0}, {"vmlal.s8": 4, "vsubl.u8": 2}, 2
    )
    code, labels = instructions_of(build.RISCV64, RVV, ROOT / "csrc" / RVV)
    loops = loops_of(code, labels)
    rvv1 = flat(code, loops, {"vwmacc.vv": 7, "vrsub.vx": 1})
    rvv4 = nested(code, loops, {"vwmacc.vx": 36, "vrsub.vx": 1}, {"vwmacc.vx": 4}, 4)
    arm_mca = mca("thumbv7-linux-gnueabihf", "cortex-a9", "+neon,+vfp4")
    x280 = mca("riscv64", "sifive-x280", "+v")
    print("| core | product | instructions | cycles | MAC/cycle | GMAC/s | GB/s read |")
    print("|---|---|---|---|---|---|---|")
    for name, arm, rvv in (("GEMV", arm1, rvv1), ("GEMM", arm2, rvv4)):
        print(row("Cortex-A7, 1.2 GHz (slots)", name, arm, arm.cycles(cortex_a7), 1.2))
        print(row("Cortex-A9 NEON, 1.2 GHz (mca)", name, arm, arm.cycles(arm_mca), 1.2))
        print(row("SpacemiT X60, 1.6 GHz (units)", name, rvv, rvv.cycles(spacemit_x60), 1.6))
        print(row("SiFive X280, 1.6 GHz (mca)", name, rvv, rvv.cycles(x280), 1.6))
    source = ROOT / "benchmarks/rvv_dots.c"
    code, labels = instructions_of(build.RISCV64, RVV, source)
    print("\n| dots, one token | instructions | X60 (units) | slow segments | X280 (mca) |")
    print("|---|---|---|---|---|")
    for name in ("as_it_lies", "segments", "halves"):
        whole = tuple(code[labels[name] : code.index("ret", labels[name])])
        fast, slow = spacemit_x60(whole), spacemit_x60(whole, 64.0)
        print(f"| {name} | {len(whole)} | {fast:.0f} | {slow:.0f} | {x280(whole):.0f} |")


if __name__ == "__main__":
    main()
