"""One program, one artifact, every build of the engine: digests by target and what they weigh.

    python benchmarks/targets.py [--engine DIR] [--output FILE.md]

Kernels of x86-64 that neither this machine nor an emulator has keep the row of the committed table,
which says so; its digest is held against the new ones like any other.

The program is examples/bare_metal/main.c: it replays the test vectors and prints a digest of all
logits and of eight greedy answers. Builds with a system are those of `gemmake engine`, made in DIR
where they are not there; boards without one are built from one file. Exit 1 if a digest differs.
Wants the emulators and compilers of `make test`.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gemmake import crossbuild, elf

ROOT = Path(__file__).resolve().parents[1]
BARE = ROOT / "examples" / "bare_metal"
MODEL = ROOT / "tests" / "golden" / "v1.0" / "tiny-int4.gembin"
TABLE = ROOT / "benchmarks" / "targets.md"
EARLIER = "a machine that has it, earlier"
DIGEST = re.compile(r"^digest: ([0-9a-f]+)$", re.M)
X86, A64 = "qemu-x86_64-static", "qemu-aarch64-static"
A32, RV64 = "qemu-arm-static", "qemu-riscv64-static"
VECTORS = "rv64,v=true,vlen=256,vext_spec=v1.0"
CORES = {  # (kernels, instructions, emulator, its processor)
    "x86_64": (
        ("scalar", "SSE2", X86, "Nehalem"),
        ("avx2", "AVX2, FMA", X86, "max"),
    ),
    "aarch64": (
        ("neon", "NEON", A64, "cortex-a53"),
        ("dotprod", "NEON, SDOT", A64, "cortex-a76"),
        ("i8mm", "NEON, SMMLA", A64, "max,sve=off"),
    ),
    "armv7": (
        ("scalar", "VFPv3", A32, "cortex-a9"),
        ("neon", "NEON, VFPv4", A32, "cortex-a15"),
    ),
    "riscv64": (
        ("scalar", "RV64GC", RV64, "rv64,v=false"),
        ("rvv", "RVV 1.0, 256 bits", RV64, VECTORS),
    ),
}
NATIVE = (("avx-vnni", "AVX-VNNI"), ("avx512-vnni", "AVX-512 VNNI"))
BOARDS = {
    "an385": ("cortex-m3", "Armv7-M, floats in software", "qemu-system-arm -M mps2-an385"),
    "an500": ("cortex-m7", "Armv7E-M, FPv5", "qemu-system-arm -M mps2-an500"),
    "an547": ("cortex-m55", "Armv8.1-M, Helium", "qemu-system-arm -M mps3-an547"),
    "virt": ("riscv64, no system", "RV64GC", "qemu-system-riscv64 -M virt"),
}


@dataclass(frozen=True)
class Result:
    """One run: what the table says of it."""

    target: str
    instructions: str
    kernels: str
    ran_by: str
    digest: str


def run(command: list[object], **more: str) -> str:
    """Output of a program; this one ends with its message where it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        env={**os.environ, **more},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"targets: {' '.join(words)}: {done.stdout.strip()}")
    return done.stdout


def digest(text: str) -> str:
    found = DIGEST.search(text)
    if found is None:
        sys.exit(f"targets: no digest in: {text.strip()}")
    return found.group(1)


def engines(folder: Path) -> dict[str, crossbuild.Recipe]:
    """Every build that a system runs, by its name; made where it is missing."""
    targets = [*crossbuild.TRIPLES, crossbuild.WASM]
    found = {recipe.name: recipe for recipe in crossbuild.recipes(crossbuild.Request(targets))}
    for name, recipe in found.items():
        if not (folder / name / "engine.json").is_file():
            print(f"building {name}", file=sys.stderr)
            crossbuild.build(recipe, folder)
    return found


def program(recipe: crossbuild.Recipe, engine: Path, scratch: Path) -> Path:
    """The program with the static library of a build."""
    made = scratch / (f"{recipe.name}.wasm" if crossbuild.WASM in recipe.name else recipe.name)
    command: list[object] = [crossbuild.zig(), "cc", "-target", recipe.settings["GEM_TRIPLE"]]
    command += ["-O1", "-s", f'-DMODEL_PATH="{MODEL}"', f"-I{engine / recipe.name / 'include'}"]
    command += [BARE / "main.c", BARE / "host.c", BARE / "model.S"]
    command += [engine / recipe.name / "lib" / "libgemrun.a", "-o", made]
    run([*command, *([] if crossbuild.WASM in recipe.name else ["-lm", "-pthread"])])
    return made


def sysroot(emulator: str) -> str:
    """Debian's C library for programs with glibc."""
    folder = {A64: "aarch64-linux-gnu", A32: "arm-linux-gnueabihf", RV64: "riscv64-linux-gnu"}
    return f"/usr/{folder[emulator]}" if emulator in folder else "/"


def emulated(recipe: crossbuild.Recipe, path: Path) -> Iterator[Result]:
    """A build on every core under emulation; x86_64 on this one as well."""
    arch = next(
        a for a, names in crossbuild.TRIPLES.items() if recipe.settings["GEM_TRIPLE"] in names
    )
    for kernels, words, emulator, cpu in CORES[arch]:
        command: list[object] = [emulator, "-cpu", cpu, "-L", sysroot(emulator), path]
        said = run(command, GEMRUN_KERNEL=kernels)
        ran_by = f"{emulator.removesuffix('-static')} -cpu {cpu.split(',')[0]}"
        yield Result(recipe.name, words, kernels, ran_by, digest(said))
    if arch == platform.machine() == "x86_64":
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").replace("_", "-").split()
        for kernels, words in NATIVE:
            if kernels in flags:
                said = run([path], GEMRUN_KERNEL=kernels)
                yield Result(recipe.name, words, kernels, "this machine", digest(said))
            elif before := earlier(TABLE.read_text(encoding="utf-8"), recipe.name, kernels):
                yield before


def earlier(text: str, target: str, kernels: str) -> Result | None:
    """The row of an earlier table, for what cannot be run here."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and (cells[0], cells[2]) == (target, kernels):
            return Result(*cells[:3], EARLIER, cells[4])
    return None


def results(folder: Path, scratch: Path) -> Iterator[Result]:
    """Everything, in the order of the table."""
    for recipe in engines(folder).values():
        path = program(recipe, folder, scratch)
        if crossbuild.WASM in recipe.name:
            runner = ROOT / "examples" / "wasm" / "run.mjs"
            said = run(["node", "--no-warnings", runner, path], GEMRUN_KERNEL="")
            version = run(["node", "--version"]).strip()
            yield Result(recipe.name, "SIMD128", "scalar", f"node {version}", digest(said))
        else:
            yield from emulated(recipe, path)
    for board, (name, words, ran_by) in BOARDS.items():
        command: list[object] = ["make", "-s", "-C", BARE, f"BOARD={board}", f"MODEL={MODEL}"]
        said = run([*command, f"OUT={scratch / board}", f"CSRC={ROOT / 'csrc'}", "run"])
        kernels = "minimal, Helium" if "Helium" in words else "minimal"
        yield Result(f"{name} (bare)", words, kernels, ran_by, digest(said))


def table(rows: list[Result]) -> list[str]:
    lines = ["| build | instructions | kernels | run by | digest |", "|---|---|---|---|---|"]
    lines += [
        f"| {r.target} | {r.instructions} | {r.kernels} | {r.ran_by} | {r.digest} |" for r in rows
    ]
    return lines


def sizes(folder: Path, names: list[str], scratch: Path) -> list[str]:
    """Bytes of each build; of a board, the program's code and constants without the model."""
    lines = [
        "| build | `libgemrun.so` | of it code | `libgemrun.a` | `libgemrun_minimal.a` | `gemrun` |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for name in names:
        files = {
            path.name.split(".so")[0]: f"{path.stat().st_size:,}"
            for path in (folder / name).rglob("*")
            if path.is_file() and not path.is_symlink()
        }
        shared = folder / name / "lib" / "libgemrun.so.1"
        files["code"] = f"{elf.code_bytes(shared):,}" if shared.is_file() else ""
        kinds = ("libgemrun", "code", "libgemrun.a", "libgemrun_minimal.a", "gemrun")
        lines.append(f"| {name} | {' | '.join(files.get(kind, '') for kind in kinds)} |")
    model = MODEL.stat().st_size
    lines += [
        "",
        "| board | code and constants of the whole program, without the model |",
        "|---|---|",
    ]
    for board, (name, _, _) in BOARDS.items():
        text = run(["size", scratch / board / f"{board}.elf"]).splitlines()[1].split()
        lines.append(f"| {name} ({board}) | {int(text[0]) - model:,} |")
    return lines


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", type=Path, default=ROOT / "build" / "engine")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    lines = [
        "# Every build of the engine",
        "",
        f"`python benchmarks/targets.py`: the test vectors of `tests/golden/v1.0/{MODEL.name}`, 24",
        "tokens and eight answers by `examples/bare_metal/main.c`; the digest is of all logits.",
        f'A row of "{EARLIER}" stays from the table before: neither the machine',
        "nor an emulator had these kernels; its digest has to equal the others all the same.",
    ]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        rows = list(results(given.engine.resolve(), scratch))
        lines += ["", *table(rows), "", "Bytes of each file:", ""]
        names = list(dict.fromkeys(row.target for row in rows if "bare" not in row.target))
        lines += sizes(given.engine.resolve(), names, scratch)
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    sys.exit(0 if len({row.digest for row in rows}) == 1 else 1)


if __name__ == "__main__":
    main()
