"""Same checkpoint, description, options and version: the same bytes, whatever the host is like."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import compiling

FAMILIES = ("gemma3", "qwen2")
EFFORTS = ("full", "fast")
#: Error feedback over one window, where the scalar engine runs it: the bytes are full GPTQ's.
SHORT_TEXT = "The motor is warm. The valve is closed, and the gateway is ready. " * 20
SLOW_CPU = "Nehalem"  # no AVX, no FMA: products are fused in software


@pytest.fixture(scope="module")
def usual(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], str]:
    """SHA-256 of a plain compile of (family, effort)."""
    folder = tmp_path_factory.mktemp("usual")
    done: dict[tuple[str, str], str] = {}

    def make(family: str, effort: str) -> str:
        if (family, effort) not in done:
            path = folder / f"{family}-{effort}.gembin"
            run(tiny_checkpoint(family), path, "--effort", effort)
            done[family, effort] = compiling.sha256(path)
        return done[family, effort]

    return make


def run(
    model: Path, output: Path, *options: str, env: Mapping[str, str] | None = None, **more: Path
) -> None:
    done = compiling.gemmake(model, output, *options, env=env, **more)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_user_folder_time_locale_and_thread_count(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    usual: Callable[[str, str], str],
    family: str,
    effort: str,
) -> None:
    """Everything at once; a difference is found by leaving things out."""
    copy = tmp_path / "another name" / "checkpoint"
    copy.mkdir(parents=True)
    for path in sorted(tiny_checkpoint(family).iterdir(), reverse=True):
        shutil.copyfile(path, copy / path.name)
        os.utime(copy / path.name, (86400, 86400))
    work = tmp_path / "elsewhere"
    work.mkdir()
    changes = {
        "PYTHONHASHSEED": "4711",
        "TZ": "Pacific/Kiritimati",
        "LANG": "tr_TR.UTF-8",
        "LC_ALL": "C",
        "HOME": str(work),
        "USER": "somebody",
        "TMPDIR": str(work),
        "SOURCE_DATE_EPOCH": "1",
        "OMP_NUM_THREADS": "1",
    }
    before = os.umask(0o077)
    try:
        options = ("--effort", effort, "--workers", "8", "--verbose", "--dump-after", "layout")
        run(copy, Path("other.gembin"), *options, env=changes, cwd=work)
    finally:
        os.umask(before)
    assert compiling.sha256(work / "other.gembin") == usual(family, effort)
    listing = (work / "other.gembin.memmap").read_text()
    assert str(tmp_path) not in listing


@pytest.mark.parametrize("workers", ["1", "2", "3"])
def test_thread_counts(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    usual: Callable[[str, str], str],
    workers: str,
) -> None:
    path = tmp_path / "w.gembin"
    run(tiny_checkpoint("gemma3"), path, "--workers", workers, env={"PYTHONHASHSEED": workers})
    assert compiling.sha256(path) == usual("gemma3", "full")


def without_cpu_features() -> dict[str, str]:
    """An environment in which NumPy, the C library and our own code use the baseline alone."""
    from numpy._core import _multiarray_umath as core

    features = [f for f in core.__cpu_dispatch__ if core.__cpu_features__.get(f)]
    return {
        "NPY_DISABLE_CPU_FEATURES": " ".join(features),
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-AVX,-FMA,-AVX512F,-ERMS,-BMI2",
        "OPENBLAS_CORETYPE": SLOW_CPU,
        "GEMMAKE_BASELINE": "1",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_cpu_features_switched_off(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    text = tmp_path / "short.txt"
    text.write_text(SHORT_TEXT)
    found = []
    for name, env in (("usual", {}), ("base", without_cpu_features())):
        path = tmp_path / f"{name}.gembin"
        run(tiny_checkpoint(family), path, "--calibration", str(text), env=env)
        found.append(compiling.sha256(path))
    assert found[0] == found[1]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates an x86-64 core")
@pytest.mark.slow
def test_an_emulated_core_without_avx_gives_the_same_bytes(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The whole compiler under emulation, error feedback over a short text included."""
    emulator = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.fail("qemu-x86_64-static: not found; install qemu-user-static", pytrace=False)
    text = tmp_path / "short.txt"
    text.write_text(SHORT_TEXT)
    native, emulated = tmp_path / "native.gembin", tmp_path / "emulated.gembin"
    model = tiny_checkpoint("llama3")
    options = ("--calibration", str(text), "--workers", "1")
    run(model, native, *options)
    path = [entry for entry in sys.path if entry.endswith("site-packages")]
    env = compiling.environment(
        {
            "OPENBLAS_CORETYPE": SLOW_CPU,
            "PYTHONPATH": os.pathsep.join([str(compiling.ROOT), *path]),
        }
    )
    command = compiling.command(model, emulated, *options)
    command[:1] = [emulator, "-cpu", SLOW_CPU, os.path.realpath(sys.executable)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert compiling.sha256(emulated) == compiling.sha256(native)


def test_a_pass_writes_the_same_dump_twice(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from gemmake.pipeline import PASSES, WEIGHT_PASSES

    names = [name for name, _ in PASSES] + list(WEIGHT_PASSES)
    texts = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "x.gembin"
        compiling.compiled(tiny_checkpoint("gemma2"), path, dump_after=tuple(names))
        texts.append([path.with_name(f"x.gembin.{n}.json").read_text() for n in names])
    assert texts[0] == texts[1]
    dumps = {name: json.loads(text) for name, text in zip(names, texts[0], strict=True)}
    assert {s["norm_offset"] for s in dumps["fold_norms"]["sources"].values()} == {0.0}
    assert "-1 head" in dumps["tie"]["sources"]
    assert dumps["thermal"]["tokn_bytes"] > 0 == dumps["tie"]["tokn_bytes"]
    assert not dumps["place"]["tensors"]
    assert not dumps["layout"]["buffers"]
    assert dumps["budget"]["buffers"] == dumps["plan_memory"]["buffers"] != []
    assert all(t["report"] for t in dumps["quantise"]["tensors"])
