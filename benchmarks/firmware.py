"""What the minimal engine executes on emulated Cortex-M boards: instructions a prefill and a token.

    python benchmarks/firmware.py [MODEL.gembin ..] [--output FILE.md]

Instructions, not cycles: the emulator's clock goes on by a nanosecond with each of them
(`-icount shift=0`) and firmware.c reads the core's timer. A vector instruction of Cortex-M55 takes
two cycles or more, one of its loops' ends none. Models: the golden artifact and a random one of 4.7
million weights in layers, 256 wide (`--no-larger` leaves that out), and those that are named.
Wants arm-none-eabi-gcc and qemu-system-arm; the larger model torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BARE = ROOT / "examples" / "bare_metal"
GOLDEN = ROOT / "tests" / "golden" / "v1.0" / "tiny-int4.gembin"
M55 = "CPU=-mcpu=cortex-m55{} -mthumb -mfloat-abi=hard"
LARGER = {  # beside what tests/tiny.py says of its Llama
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024,
}  # fmt: skip
FIGURE = re.compile(r"^(decode|prefill): (\d+)$", re.M)


@dataclass(frozen=True)
class Build:
    """A board and how the engine is compiled for it."""

    board: str
    megahertz: int  # of its timer
    words: str
    flags: str  # behind -O2
    make: tuple[str, ...] = ()


BUILDS = (
    Build("an385", 25, "Cortex-M3, floats in software", ""),
    Build("an500", 25, "Cortex-M7", ""),
    Build("an547", 32, "Cortex-M55 without Helium", "", (M55.format("+nomve"),)),
    Build("an547", 32, "Cortex-M55, plain C, vectors as the compiler finds them", "-DGR_MIN_PLAIN"),
    Build("an547", 32, ".. with -O3", "-O3 -DGR_MIN_PLAIN"),
    Build("an547", 32, "Cortex-M55, `gr_min_mve.h`", ""),
    Build("an547", 32, ".. with -O3", "-O3"),
)


def run(command: list[str]) -> str:
    """Output of a program; this one ends with its message where it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"firmware: {' '.join(command)}: {done.stdout.strip()}")
    return done.stdout


def counted(build: Build, model: Path, scratch: Path) -> dict[str, int]:
    """Instructions by name, and the bytes of the program without the model."""
    command = ["make", "-s", "-B", "-C", str(BARE), f"BOARD={build.board}", f"MODEL={model}"]
    command += [f"OUT={scratch}", f"CSRC={ROOT / 'csrc'}", f"MAIN={ROOT / 'benchmarks/firmware.c'}"]
    command += [f"CFLAGS=-O2 {build.flags} -DMHZ={build.megahertz}", *build.make]
    said = run([*command, "QEMU_FLAGS=-icount shift=0", "run"])
    found = {name: int(value) for name, value in FIGURE.findall(said)}
    text = run(["size", str(scratch / f"{build.board}.elf")]).splitlines()[1].split()
    return found | {"bytes": int(text[0]) - model.stat().st_size}


def larger(folder: Path) -> Path:
    """An artifact of a random Llama with the shape of LARGER."""
    sys.path.insert(0, str(ROOT / "tests"))
    import torch
    import transformers

    import tiny

    tiny.build("smollm2", folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | LARGER
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(folder)
    artifact = folder / "larger.gembin"
    command = [sys.executable, "-m", "gemmake.cli", "--model", str(folder), "--output"]
    command += [str(artifact), "--target", "generic-x86-64", "--kv-cache-size", "128"]
    run(command)
    return artifact


def table(model: Path, scratch: Path) -> list[str]:
    """One model on every board."""
    lines = [
        f"`{model.name}`, {model.stat().st_size:,} bytes:",
        "",
        "| build | prefill of 24, instructions | a token behind it | code and constants |",
        "|---|---|---|---|",
    ]
    for build in BUILDS:
        found = counted(build, model, scratch)
        figures = f"{found['prefill']:,} | {found['decode']:,} | {found['bytes']:,}"
        lines.append(f"| {build.words} | {figures} |")
        print(lines[-1], file=sys.stderr)
    return lines


def main() -> None:
    """Count and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--no-larger", action="store_true")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        models = [GOLDEN, *([] if given.no_larger else [larger(scratch / "larger")])]
        models += [path.resolve() for path in given.models]
        lines = [line for model in models for line in ("", *table(model, scratch))]
    text = "\n".join(lines[1:]) + "\n"
    print(text, end="")
    if given.output:
        given.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
