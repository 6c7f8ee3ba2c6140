"""tools/perplexity.py on tiny artifacts: figures, agreement with the reference, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TEXT = "The valve is open. The motor runs at 71 degrees, and the controller reports it.\n" * 20
OPTIONS = ("--quantization", "none", "--kv-cache-type", "dense", "--kv-cache-size", "128")


def run(root: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / "perplexity.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.parametrize("family", ["gemma2", "qwen2"])
def test_float_artifact_has_the_perplexity_of_its_checkpoint(
    root: Path,
    text: Path,
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    family: str,
) -> None:
    folder = tiny_checkpoint(family)
    sizes = ("--windows", 3, "--length", 100, "--threads", 1)
    reference = ("--reference", "transformers", "--model", folder)
    artifact = artifact_cache(folder, *OPTIONS)
    done = run(root, artifact, "--text", text, *sizes, *reference, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["bos"] == (2 if family == "gemma2" else None)
    assert result["score"]["tokens"] == 3 * 99
    assert result["score"]["perplexity"] == pytest.approx(
        result["reference"]["perplexity"], rel=1e-4
    )
    assert result["comparison"]["kl"] < 1e-6
    assert result["comparison"]["top1"] == 1
    lines = run(root, artifact, "--text", text, *sizes)
    assert lines.returncode == 0
    perplexity = f"{result['score']['perplexity']:.4f}"
    assert f"artifact:  perplexity {perplexity}," in lines.stdout


def test_refusals_are_sentences(
    root: Path,
    text: Path,
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
) -> None:
    folder = tiny_checkpoint("qwen2")
    artifact = artifact_cache(folder, *OPTIONS)
    short = run(root, artifact, "--text", text, "--windows", 500, "--length", 100)
    assert short.returncode == 2
    assert "use a longer text or fewer windows" in short.stderr
    long = run(root, artifact, "--text", text, "--length", 200)
    assert long.returncode == 1
    assert long.stderr.startswith("perplexity: ")
    half = run(root, artifact, "--text", text, "--model", folder)
    assert half.returncode == 2
    for done in (short, long, half):
        assert "Traceback" not in done.stderr
