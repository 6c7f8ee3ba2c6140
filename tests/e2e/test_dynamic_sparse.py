"""gemmake --kv-cache-type dynamic-sparse, as a user types it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compiling import compiled
from gemmake.kvmask.gates import Judge
from gemmake.options import Effort, KvGate, KvType
from gemrun import GemRunContext
from gemrun.format.reader import read_artifact
from gemrun.format.units import keeps_of

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 512
#: A hundred windows, and gates that a model of random weights passes in part.
OPTIONS = (
    *("--kv-cache-type", "dynamic-sparse", "--kv-cache-size", str(CONTEXT)),
    *("--prefill-sample-ratio", "0.01", "--kv-gate", "kl=0.02,top1=0.5", "--effort", "fast"),
)


def gemmake(model: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gemmake.cli", "--model", str(model), *OPTIONS, *options]
    command += ["--target", "generic-x86-64", "--output", str(output), "--verbose"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def mask_of(path: Path) -> dict[str, Any]:
    with read_artifact(path) as artifact:
        mask: dict[str, Any] = artifact.manifest["kv_mask"]
        return mask


@pytest.fixture
def sparse(tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]) -> Path:
    return artifact_cache(tiny_checkpoint("llama3"), *OPTIONS)


def test_what_is_kept_passes_the_gates_and_saves_what_it_says(sparse: Path) -> None:
    mask = mask_of(sparse)
    assert mask["windows"] == 100
    assert mask["covered"] == 1.0
    assert 0 < mask["partial"] <= mask["units"]
    assert mask["quality"]["kl"] <= 0.02
    assert mask["quality"]["top1"] >= 0.5
    assert mask["quality"]["perplexity"] <= 0.005
    assert mask["quality"]["tokens"] > 1000
    assert mask["quality"]["answers"] > 100
    assert (
        mask["quality"]["right_dense"] - mask["quality"]["right"]
        <= 0.01 * mask["quality"]["answers"]
    )
    assert mask["gate"]["recall"] == 0.01
    assert mask["chat_template"] is True
    steps = [point[0] for point in mask["curve"]]
    saved = [point[1] for point in mask["curve"]]
    assert steps == sorted(set(steps))
    assert saved == sorted(saved)
    assert mask["saved"] in saved
    with read_artifact(sparse) as artifact:
        partial = [keep for keep in keeps_of(artifact) if keep != (0, 0)]
        assert len(partial) == mask["partial"]
        full = sum(layer.kv_heads * layer.kv_blocks for layer in artifact.layers)
        kept = sum(unit.blocks for unit in artifact.units)
        assert 1 - kept / full == pytest.approx(mask["saved"], abs=1e-5)
        assert all(0 <= share <= 1 for row in mask["kept_mass"] for share in row)


def test_bytes_do_not_depend_on_threads_or_a_stop(
    sparse: Path, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Once with one worker, and once stopped while heads were measured."""
    output = tmp_path / "one.gembin"
    done = gemmake(tiny_checkpoint("llama3"), output, "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert output.read_bytes() == sparse.read_bytes()
    losses = tmp_path / "two.gembin.losses"
    command = [sys.executable, "-m", "gemmake.cli", "--model", str(tiny_checkpoint("llama3"))]
    command += [*OPTIONS, "--target", "generic-x86-64", "--output", str(tmp_path / "two.gembin")]
    stopped = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not losses.exists() and stopped.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    if stopped.poll() is None:
        os.kill(stopped.pid, signal.SIGTERM)
    stopped.communicate()
    if stopped.returncode != 0:  # else it was faster than the signal
        assert stopped.returncode == 143
        assert sorted(p.name for p in tmp_path.glob("two*")) == [losses.name]
    done = gemmake(tiny_checkpoint("llama3"), tmp_path / "two.gembin")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "two.gembin").read_bytes() == sparse.read_bytes()
    left = sorted(p.name for p in tmp_path.glob("two*"))
    assert left == ["two.gembin", "two.gembin.memmap"]


class Stopped(BaseException):
    """As by a signal."""


def test_a_stop_while_templates_are_judged_keeps_what_was_judged(
    sparse: Path,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[object] = []
    judge = Judge.judge

    def counted(self: Judge, *given: Any) -> Any:
        if stop_at is not None and len(judged) == stop_at:
            raise Stopped
        judged.append(judge(self, *given))
        return judged[-1]

    monkeypatch.setattr(Judge, "judge", counted)
    output = tmp_path / "judged.gembin"
    options: dict[str, Any] = {
        "kv_type": KvType.DYNAMIC_SPARSE, "context": CONTEXT, "sample_ratio": 0.01,
        "kv_gate": KvGate(kl=0.02, top1=0.5), "effort": Effort.FAST,
    }  # fmt: skip
    stop_at: int | None = 2
    with pytest.raises(Stopped):
        compiled(tiny_checkpoint("llama3"), output, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["judged.gembin.losses"]
    stop_at = None
    compiled(tiny_checkpoint("llama3"), output, **options)
    assert len(judged) == len(mask_of(sparse)["curve"]) - 1  # with that of no step
    assert output.read_bytes() == sparse.read_bytes()
    assert not output.with_name("judged.gembin.losses").exists()


def test_recall_is_a_gate(
    sparse: Path,
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where answers get lost nothing is left out, however good the other figures are."""
    judge = Judge.judge

    def forgetful(self: Judge, *given: Any) -> Any:
        found = judge(self, *given)
        return replace(found, right=0, right_dense=found.answers // 50)

    monkeypatch.setattr(Judge, "judge", forgetful)
    kept = []
    for recall in (0.01, 0.02):
        output = tmp_path / "recall.gembin"
        compiled(
            tiny_checkpoint("llama3"), output,
            kv_type=KvType.DYNAMIC_SPARSE, context=CONTEXT, sample_ratio=0.01,
            kv_gate=KvGate(kl=0.02, top1=0.5, recall=recall), effort=Effort.FAST,
        )  # fmt: skip
        kept.append(mask_of(output)["partial"])
    assert kept == [0, mask_of(sparse)["partial"]]


def test_it_tells_what_it_does(sparse: Path) -> None:
    log = sparse.with_suffix(".log").read_text(encoding="utf-8")
    mask = mask_of(sparse)
    assert "KV cache of 512 tokens:" in log
    assert "float16, all positions" in log
    assert f"{mask['partial']} of {mask['units']} KV heads keep a part" in log
    done = subprocess.run(
        [sys.executable, "-m", "gemmake.check.cli", str(sparse)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "Dynamic sparse mask covers 100.0% of attention heads (expected >90%)" in done.stdout
    assert re.search(r"✓ KV mask on held-out text: KL .*, recall .* of \d+ tokens\n", done.stdout)


def test_runs_do_not_depend_on_threads_chunks_or_reuse(sparse: Path) -> None:
    text = "The shuttle in aisle 7 lost its reference. " * 9
    answers = []
    for config in ({"threads": 1}, {"threads": 3}, {"threads": 2, "prefill_batch_size": 7}):
        with GemRunContext(sparse, ignore_memory=True, **config) as context:
            answer = context.infer(text, 60, temperature=0.0, ignore_stop_ids=True)
            again = context.infer(text, 60, temperature=0.0, ignore_stop_ids=True, reuse=True)
            assert list(again) == list(answer)
            answers.append((list(answer), context.logits()))
            assert context.run_tests() > 0
    assert answers[0] == answers[1] == answers[2]


def test_gates_that_nothing_passes_leave_the_dense_cache(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], tmp_path: Path
) -> None:
    output = tmp_path / "none.gembin"
    done = gemmake(tiny_checkpoint("llama3"), output, "--kv-gate", "kl=0,top1=1,perplexity=0")
    assert done.returncode == 0, done.stderr
    assert "no head keeps less" in done.stdout
    assert "conversations by the chat template; judged on" in done.stdout + done.stderr
    with read_artifact(output) as artifact:
        assert not artifact.units
        assert artifact.manifest["kv_mask"]["partial"] == 0
        ram = artifact.header.ram_kv
    dense = artifact_cache(tiny_checkpoint("llama3"), "--kv-cache-size", str(CONTEXT))
    with read_artifact(dense) as artifact:
        assert artifact.header.ram_kv == ram


def test_windows_of_the_model_stay(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    path = artifact_cache(tiny_checkpoint("gemma3"), *OPTIONS)
    with read_artifact(path) as artifact:
        windowed = [i for i, layer in enumerate(artifact.layers) if layer.window]
        assert windowed
        for index in windowed:
            assert all(not unit.partial for unit in artifact.units_of(index))


def test_a_short_context_has_nothing_to_leave_out(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    output = tmp_path / "short.gembin"
    done = gemmake(tiny_checkpoint("llama3"), output, "--kv-cache-size", "128")
    assert done.returncode == 0, done.stderr
    assert "a context of 128 tokens is too short to keep less; it begins at 192" in done.stdout
    assert mask_of(output)["covered"] == 0.0


def test_texts_of_the_user(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A folder of plain text and of chats; what cannot be read names file and line."""
    folder = tmp_path / "texts"
    folder.mkdir()
    line = "Conveyor {} stops when the light curtain of bay {} is cut, and waits for its release. "
    text = "".join(line.format(i, i * 7 % 13) for i in range(1500))
    (folder / "a.txt").write_text(text, encoding="utf-8")
    chats = [
        {"messages": [{"role": "user", "content": f"Which bay is {i}?"},
                      {"role": "assistant", "content": f"Bay {i} is beside bay {i + 1}. " * 9}]}
        for i in range(60)
    ]  # fmt: skip
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
    output = tmp_path / "own.gembin"
    done = gemmake(tiny_checkpoint("llama3"), output, "--calibration", str(folder))
    assert done.returncode == 0, done.stderr
    assert 0 < mask_of(output)["windows"] <= 100
    more = ("--calibration", str(folder), "--prefill-sample-ratio", "0.02", "--effort", "full")
    done = gemmake(tiny_checkpoint("llama3"), output, *more)
    assert done.returncode == 0, done.stderr
    assert mask_of(output)["curve"][-1][6] > 0  # answers: the last ones of conversations
    (folder / "c.jsonl").write_text('{"text": "fine"}\n{"texts": 3}\n', encoding="utf-8")
    done = gemmake(tiny_checkpoint("llama3"), output, "--calibration", str(folder))
    assert done.returncode == 2
    assert "c.jsonl, line 2" in done.stderr
