"""Fixtures shared by all tests: real models, tokenizers and texts, tiny checkpoints, artifacts.

Nothing here touches the network. Real data comes from the cache that `make fetch` fills; a missing
item fails the test with a sentence. Fixtures that make files share them between the workers of one
run through a lock, and the tests treat those files as read-only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fetch
import handbook

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a lock beside the folder, so that one worker makes what the others wait for."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def item(name: str) -> Path:
    """Folder of a fetched item, or a failed test that says how to get it."""
    folder = fetch.item_dir(name)
    entry = fetch.table()[name]
    wanted = [folder / file["path"] for file in entry.get("files", [])]
    if not folder.is_dir() or not all(path.is_file() for path in wanted):
        pytest.fail(f"{name}: not in {fetch.cache_dir()}; run 'make fetch'", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's folder."""
    return ROOT


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, a GGUF file."""
    return item("smollm2-135m") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M, pretrained, a GGUF file."""
    return item("gemma3-270m") / "gemma-3-270m-q4_k_m.gguf"


@pytest.fixture(scope="session")
def tokenizer_gemma3() -> Path:
    """Folder with Gemma 3's tokenizer.json and tokenizer_config.json."""
    return item("tokenizer-gemma3")


@pytest.fixture(scope="session")
def tokenizer_qwen3() -> Path:
    """Folder with Qwen3's tokenizer.json and tokenizer_config.json."""
    return item("tokenizer-qwen3")


@pytest.fixture(scope="session")
def tokenizer_llama3() -> Path:
    """Folder with Llama 3.1's tokenizer.json and tokenizer_config.json."""
    return item("tokenizer-llama3")


@pytest.fixture(scope="session")
def handbook_en() -> str:
    """The evaluation text; see tools/handbook.py for its normalisation."""
    return handbook.text(item("handbook-en"))


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all workers of this run share; removed with pytest's temporary files."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def tiny_checkpoint(run_dir: Path) -> Callable[..., Path]:
    """Factory: `tiny_checkpoint("gemma3", seed=0)` is a random checkpoint's folder."""

    def make(family: str, seed: int = 0) -> Path:
        final = run_dir / "tiny" / f"{family}-{seed}"
        with locked(final):
            if not final.is_dir():
                import tiny

                scratch = final.with_name(f".{final.name}")
                shutil.rmtree(scratch, ignore_errors=True)
                tiny.build(family, scratch, seed=seed)
                scratch.rename(final)
        return final

    return make


@pytest.fixture(scope="session")
def artifact_cache(run_dir: Path) -> Callable[..., Path]:
    """Factory: `artifact_cache(model, "--quantization", "int4", ..)` compiles once a run.

    Returns the .gembin; its .memmap and a .log with gemmake's output lie beside it. The target is
    generic-x86-64 unless the options name one.
    """

    def make(model: Path, *options: str) -> Path:
        arguments = ["--model", str(model), *options]
        if "--target" not in options:
            arguments += ["--target", "generic-x86-64"]
        key = "_".join(part.lstrip("-").replace("/", "+") for part in options) or "default"
        final = run_dir / "artifacts" / f"{model.parent.name}+{model.name}+{key}"
        with locked(final):
            if not final.is_dir():
                scratch = final.with_name(f".{final.name}")
                shutil.rmtree(scratch, ignore_errors=True)
                scratch.mkdir(parents=True)
                output = scratch / "model.gembin"
                command = [sys.executable, "-m", "gemmake.cli", *arguments, "--output", str(output)]
                done = subprocess.run(
                    command, capture_output=True, text=True, check=False, cwd=ROOT
                )
                (scratch / "model.log").write_text(done.stdout + done.stderr, encoding="utf-8")
                assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
                scratch.rename(final)
        return final / "model.gembin"

    return make


@pytest.fixture(scope="session")
def versions(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> tuple[Path, Path]:
    """Two versions of one model: same shape, other weights, other answers."""
    from daemon import OPTIONS, answer_of

    first, second = (artifact_cache(tiny_checkpoint("qwen3", seed=s), *OPTIONS) for s in (0, 1))
    assert answer_of(first, "abc") != answer_of(second, "abc")
    return first, second


@pytest.fixture(scope="session")
def gemrun_cli() -> Path:
    """The native gemrun command as `make dev` builds it."""
    path = ROOT / "build" / "dev" / "gemrun"
    if not os.access(path, os.X_OK):
        pytest.fail("gemrun: the command is not built; run 'make dev'", pytrace=False)
    return path


@pytest.fixture(scope="session")
def worker_id(request: pytest.FixtureRequest) -> str:
    """pytest-xdist's worker name, or "master" without it."""
    return getattr(request.config, "workerinput", {}).get("workerid", "master")
