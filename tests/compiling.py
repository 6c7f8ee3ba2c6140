"""What the tests of gemmake share: compiles in this process or another one, and odd checkpoints."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gemmake.check import rules
from gemmake.errors import BudgetError
from gemmake.options import CompileOptions
from gemmake.pipeline import CompileResult, compile_model
from gemrun.format.reader import read_artifact
from reference import engine
from reference.floatmath import F32

ROOT = Path(__file__).resolve().parent.parent
TARGET = "generic-x86-64"
CONTEXT = 128
IDS = [int(i) for i in np.random.default_rng(5).integers(3, 480, 96)]


def compiled(model: Path, output: Path, **options: Any) -> CompileResult:
    """Compile in this process, for a context of 128 tokens unless the options say otherwise."""
    chosen = {"target": TARGET, "context": CONTEXT, **options}
    return compile_model(CompileOptions(model=model, output=output, **chosen))


def command(model: Path | str, output: Path | str, *options: str) -> list[str]:
    """The command line of a compile."""
    arguments = ["--model", str(model), "--output", str(output), "--kv-cache-size", str(CONTEXT)]
    if "--target" not in options:
        arguments += ["--target", TARGET]
    return [sys.executable, "-m", "gemmake.cli", *arguments, *options]


def gemmake(
    model: Path | str,
    output: Path | str,
    *options: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run(
        command(model, output, *options),
        env=environment(env),
        cwd=cwd,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
    )


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process' environment with changes; the tree is importable from any folder."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **(changes or {})}


def default_signals() -> None:
    """For a child: a runner in the background may have left SIGINT ignored; it is to be seen."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def section(path: Path, name: str) -> bytes:
    """The bytes of one section."""
    with read_artifact(path) as artifact:
        entry = artifact.sections[name]
    data = path.read_bytes()
    return data[entry.offset : entry.offset + entry.size]


def told(stderr: str) -> str:
    """What a command said on stderr, without the progress that a slow machine sees."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not re.search(r", about \d+ (s|min) left$", line))


def problems(path: Path) -> list[str]:
    """What gemcheck, replay included, finds wrong."""
    report = rules.check_file(str(path), rules.replay)
    return [f.line for f in report.findings if f.severity is rules.Severity.ERROR]


def board(folder: Path, mib: int, more: str = "") -> str:
    """A board with so much memory, all of which a model may have; `more`: of its description."""
    path = folder / f"board-{mib}.toml"
    path.write_text(
        'hdf_version = "1.0"\nid = "some-board"\nboard = "some-board"\n'
        'inherits = ["generic-x86-64"]\n'
        f"[memory]\nsize_mib = {mib}\nvisible_mib = {mib}\n"
        f"[policy]\nram_fraction = 1.0\nreserve_mib = 0\nthreads = 1\n{more}",
        encoding="utf-8",
    )
    return str(path)


def logits(path: Path, ids: list[int] = IDS) -> F32:
    """Logits after every id."""
    with engine.opened(path, threads=2) as opened:
        return opened.evaluate(ids)


def relative_error(got: F32, want: F32) -> float:
    """Size of the difference as a share of the size of what is wanted."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def resized(folder: Path, target: Path, seed: int = 0, **changes: Any) -> Path:
    """A random checkpoint like that in `folder` with other sizes, made by transformers."""
    import torch
    import transformers

    target.mkdir(parents=True)
    for path in folder.iterdir():
        if path.name.startswith(("tokenizer", "chat_template", "generation_config")):
            (target / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(settings))
    config = transformers.AutoConfig.from_pretrained(target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if name.endswith(("norm.weight", ".bias")):
                    value.add_(torch.randn(value.shape) * 0.2)
    model.save_pretrained(target)
    return target


def keeps_its_promise(error: BudgetError, path: Path, mib: int) -> None:
    """The command that a refusal ends with makes an artifact of the size that its table names."""
    text = str(error)
    fitting = re.search(r"^  ([0-9.]+) MiB with (--.+): fits$", text, re.M)
    assert fitting
    line = text.splitlines()[-1].strip()
    assert line.endswith(f"--output {path}")
    words = [sys.executable, "-m", "gemmake.cli", *line.split()[1:]]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    with read_artifact(path) as content:
        assert content.header.ram_total <= mib << 20
        assert f"{content.header.ram_total / (1 << 20):.1f}" == fitting[1]
