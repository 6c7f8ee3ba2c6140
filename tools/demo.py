"""make demo: fetch a small model, compile it, check the artifact and ask it a question.

    python tools/demo.py [--model smollm2-135m|gemma3-270m] [--bench | --check]

It shows each command before it runs it, so that the same can be done by hand. --check only
says whether the model and this machine are known; it needs no environment.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Demo:
    """A model of requirements/data.toml and what it is asked."""

    file: str
    ask: tuple[str, ...]


DEMOS = {
    "smollm2-135m": Demo(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("--chat", "--prompt", "What is the capital of France?", "--temperature", "0"),
    ),
    # A pretrained model without a chat template: it continues a text.
    "gemma3-270m": Demo(
        "gemma-3-270m-q4_k_m.gguf",
        ("--prompt", "Photosynthesis is", "--temperature", "0", "--max-tokens", "40"),
    ),
}
BENCH_PROMPT = "The controller reports the temperature of the motor every second, because"
TARGETS = {"x86_64": "generic-x86-64", "aarch64": "generic-aarch64"}


def run(*command: str) -> None:
    """Shows and runs one command of the environment; ends the demo if it fails."""
    print(f"\n$ {shlex.join(command)}", flush=True)
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
    started = time.monotonic()
    code = subprocess.call([str(BIN / command[0]), *command[1:]], env=dict(os.environ, PATH=path))
    if code:
        sys.exit(f"demo: {command[0]}: failed with exit code {code}; see its message above")
    print(f"  ({time.monotonic() - started:.1f} s)", flush=True)


def check(name: str, machine: str) -> str:
    """The target of this machine; ends the demo if it or the model is none that there is."""
    if name not in DEMOS:
        near = get_close_matches(name.lower(), DEMOS, 1, 0.3)
        remedy = f"did you mean MODEL={near[0]}?" if near else "set MODEL to one of them"
        sys.exit(f"demo: MODEL={name}: unknown, there are {' and '.join(sorted(DEMOS))}; {remedy}")
    if machine not in TARGETS:
        sys.exit(f"demo: {machine}: no generic target; run gemmake with a .toml of your board")
    return TARGETS[machine]


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="compile and ask a small model")
    parser.add_argument("--model", default="smollm2-135m", help=" or ".join(sorted(DEMOS)))
    parser.add_argument("--bench", action="store_true", help="measure instead of asking")
    parser.add_argument("--check", action="store_true", help="check model and machine, and end")
    arguments = parser.parse_args()
    name = arguments.model
    target = check(name, platform.machine())
    if arguments.check:
        return 0
    import fetch  # needs the environment under Python 3.10

    demo = DEMOS[name]
    print(f"demo: fetching {name}, or verifying what is there", flush=True)
    try:
        model = fetch.ensure(name) / demo.file
    except fetch.FetchError as error:
        sys.exit(f"demo: {error}")
    artifact = fetch.cache_dir() / "artifacts" / f"{name}-{target}.gembin"
    artifact.parent.mkdir(parents=True, exist_ok=True)
    options = ("--target", target, "--quantization", "int4", "--verbose")
    run("gemmake", "--model", str(model), *options, "--output", str(artifact))
    run("gemcheck", str(artifact))
    if arguments.bench:
        prompt = ("--prompt", BENCH_PROMPT, "--iterations", "10", "--warmup", "3")
        run("gembench", "--model", str(artifact), *prompt)
        return 0
    run("gemrun", str(artifact), *demo.ask)
    sizes = model.stat().st_size / 1e6, artifact.stat().st_size / 1e6
    print(f"\ncheckpoint {sizes[0]:.1f} MB, artifact {sizes[1]:.1f} MB: {artifact}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
