"""One artifact's logits on every instruction set: natively and by emulators of other processors.

    python benchmarks/digests.py MODEL.gembin [--tokens 20] [--output FILE.md]

Here every kernel, 1, 2, 3 and 8 threads, chunks of 1, 7, 32 and 512 (tests/c/digests.c); under
qemu-user the best kernels of each core, 2 threads. The digest is FNV-1a over the float32 logits
after every token. Exit 1 if one differs. Wants the cross compilers of `make test`.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from gemrun import machine  # noqa: E402
from reference import build  # noqa: E402


@dataclass(frozen=True)
class Core:
    """A processor under emulation."""

    name: str
    toolchain: build.Toolchain
    emulator: tuple[str, ...]


CORES = (
    Core("x86-64 without AVX", build.X86_STATIC, ("qemu-x86_64-static", "-cpu", "Nehalem")),
    Core("Cortex-A72 (NEON)", build.AARCH64, ("qemu-aarch64-static", "-cpu", "cortex-a72")),
    Core("Cortex-A76 (SDOT)", build.AARCH64, ("qemu-aarch64-static", "-cpu", "cortex-a76")),
    Core("Armv9 (SMMLA)", build.AARCH64, ("qemu-aarch64-static", "-cpu", "max,sve=off")),
    Core("Cortex-A15 (Armv7 NEON)", build.ARMV7, ("qemu-arm-static", "-cpu", "cortex-a15")),
    Core(
        "RV64, vectors of 256 bits",
        build.RISCV64,
        ("qemu-riscv64-static", "-cpu", "rv64,v=true,vlen=256,vext_spec=v1.0"),
    ),
)


def run(*command: object) -> str:
    """The output of `digests`; the process ends with its message where it fails."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"digests: {command[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def main() -> None:
    """Run everything and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    content = hashlib.sha256(given.model.read_bytes()).hexdigest()
    lines = [
        f"`python benchmarks/digests.py {given.model.name} --tokens {given.tokens}`, artifact of "
        f"SHA-256 {content[:16]}..",
        "",
        "| processor | kernels | digest of the logits | seconds |",
        "|---|---|---|---|",
    ]
    digests = set()

    def add(name: str, start: float, found: str, kernels: str) -> None:
        digests.add(found)
        lines.append(f"| {name} | {kernels} | {found} | {time.monotonic() - start:.0f} |")
        print(lines[-1], flush=True)

    with tempfile.TemporaryDirectory() as folder:
        driver, csrc = ROOT / "tests/c/digests.c", ROOT / "csrc"
        start = time.monotonic()
        native = build.program(build.NATIVE_X86, driver, csrc, Path(folder) / "native")
        found, *kernels = run(native, given.model, given.tokens).split()
        what = f"{', '.join(kernels)}; 1, 2, 3, 8 threads; chunks of 1, 7, 32, 512"
        add(f"{machine.cpu_name()}, native", start, found, what)
        for core in CORES:
            start = time.monotonic()
            program = build.program(
                core.toolchain, driver, csrc, Path(folder) / core.toolchain.processor
            )
            best = run(*core.emulator, program, given.model, given.tokens, "").split()[0]
            add(f"{core.name}, {core.emulator[0]}", start, best, "the best there")
    text = "\n".join(lines) + "\n"
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    sys.exit(0 if len(digests) == 1 else 1)


if __name__ == "__main__":
    main()
