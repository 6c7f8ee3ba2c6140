"""Constant work (D5): a decode step takes as many instructions whatever the tokens are.

Counted under valgrind, from token id to logits, with one thread and the full head: plain kernels
and those for AVX2 (valgrind knows no AVX-512).
"""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from reference import engine

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build" / "dev" / "libgemrun.a"
DRIVER = Path(__file__).with_name("constant_work.c")
SEEDS = (1, 2, 3, 4)
COUNT = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not LIBRARY.exists():
        pytest.fail("libgemrun.a: not built; run 'make dev'", pytrace=False)
    target = tmp_path_factory.mktemp("constant-work") / "constant_work"
    flags = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror")
    command = ["cc", *flags, f"-I{ROOT / 'csrc'}", DRIVER, LIBRARY, "-pthread", "-lm", "-o", target]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def instructions(driver: Path, model: Path, kernel: str, seed: int, steps: int) -> int:
    """Of all steps together. Two runs are equal step by step if they are at every length."""
    command = [*COUNT, "--toggle-collect=gr_forward", driver, model, kernel, str(seed), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found, done.stderr
    return int(found[1])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="valgrind's kernels are those of x86-64")
@pytest.mark.parametrize("family", ["gemma3", "llama3"])
@pytest.mark.parametrize("kernel", ["scalar", "avx2"])
def test_tokens_do_not_show_in_the_count(
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    driver: Path,
    family: str,
    kernel: str,
) -> None:
    if kernel not in engine.kernels():
        pytest.skip(f"this processor has no {kernel}")
    assert family in tiny.FAMILIES
    options = ("--quantization", "int4", "--kv-cache-size", "128")
    path = artifact_cache(tiny_checkpoint(family), *options)
    for steps in (1, 2, 12):
        counts = {seed: instructions(driver, path, kernel, seed, steps) for seed in SEEDS}
        assert len(set(counts.values())) == 1, (steps, counts)
        assert counts[1] > 10_000 * steps


def test_what_goes_against_it_is_refused(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], gemrun_cli: Path
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), "--kv-cache-size", "128")
    command = [gemrun_cli, path, "--prompt", "a", "--max-tokens", "4"]
    plain = subprocess.run(command, capture_output=True, text=True, check=False)
    done = subprocess.run([*command, "--constant-work"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout == plain.stdout
    assert "with 1 thread\n" in done.stderr
    for option, value in (("--threads", "2"), ("--head", "two-plane"), ("--speculate", "3")):
        done = subprocess.run(
            [*command, "--constant-work", option, value], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert f"gemrun: {option}: not with --constant-work" in done.stderr
