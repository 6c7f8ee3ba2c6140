"""Weights, configurations and budgets that break compilers: each ends in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import compiling
from gemmake.errors import BudgetError, CheckpointError, GemError, TargetError, UsageError
from gemmake.options import Effort, Int4Format, KvType, Quantization
from gemrun.format.reader import read_artifact

Arrays = dict[str, Any]
DOWN = "model.layers.1.mlp.down_proj.weight"


def changed(folder: Path, target: Path, change: Callable[[Arrays], None]) -> Path:
    """A copy of the checkpoint with other weights."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture
def llama(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama3")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [DOWN, "model.layers.0.input_layernorm.weight"])
def test_a_weight_that_is_not_finite_stops_the_compile_with_its_place(
    llama: Path, tmp_path: Path, name: str, value: float
) -> None:
    def change(tensors: Arrays) -> None:
        tensors[name][..., 5] = value

    model = changed(llama, tmp_path / "model", change)
    with pytest.raises(CheckpointError, match=r"5\]") as error:
        compiling.compiled(model, tmp_path / "x.gembin")
    assert name in str(error.value)
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"effort": Effort.FAST},
        {"int4_format": Int4Format.Q4RAW},
        {"quantization": Quantization.INT8},
    ],
    ids=["full", "fast", "q4raw", "int8"],
)
def test_zero_and_tiny_groups_are_stored_as_zero_and_counted(
    llama: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    def change(tensors: Arrays) -> None:
        tensors[DOWN][3] = 0.0  # a row
        tensors[DOWN][4, 32:64] = 0.0  # a group
        tensors[DOWN][5, :32] = 1e-9  # small beside its row
        tensors["model.layers.0.mlp.gate_proj.weight"][:] = 0.0  # a matrix
        tensors["model.embed_tokens.weight"][7] = 0.0

    model = changed(llama, tmp_path / "model", change)
    path = tmp_path / "x.gembin"
    result = compiling.compiled(model, path, **options)
    width = load_file(model / "model.safetensors")[DOWN].shape[1]
    assert result.tallies[DOWN].zero_groups >= width // 32 + 1
    assert result.tallies["model.embed_tokens.weight"].zero_groups == 1
    assert np.isfinite(compiling.logits(path)).all()
    assert compiling.problems(path) == []


def test_a_weight_beyond_half_precision_is_stored_or_refused_by_name(
    llama: Path, tmp_path: Path
) -> None:
    def change(tensors: Arrays) -> None:
        tensors[DOWN][0, 0] = 7e6  # a 16-bit scale of q4raw would be infinite

    model = changed(llama, tmp_path / "model", change)
    for way in ({"quantization": Quantization.NONE}, {"effort": Effort.FAST}):
        compiling.compiled(model, tmp_path / "x.gembin", **way)
        assert compiling.problems(tmp_path / "x.gembin") == []
    with pytest.raises(CheckpointError, match=DOWN):
        compiling.compiled(model, tmp_path / "y.gembin", int4_format=Int4Format.Q4RAW)
    assert not list(tmp_path.glob("y.gembin*"))


def test_a_residual_stream_beyond_half_precision_stays_finite(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    def change(tensors: Arrays) -> None:
        for name, values in tensors.items():
            if name.endswith("post_feedforward_layernorm.weight"):
                values *= 4000

    model = changed(tiny_checkpoint("gemma3"), tmp_path / "model", change)
    for kv in KvType:
        path = tmp_path / f"{kv.value}.gembin"
        compiling.compiled(model, path, kv_type=kv)
        assert np.isfinite(compiling.logits(path)).all()


@pytest.mark.parametrize("cap", [0.0, -1.0, "NaN"])
@pytest.mark.parametrize("key", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_soft_cap_of_no_sense_is_refused(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, key: str, cap: object
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("gemma2"), model)
    config = json.loads((model / "config.json").read_text()) | {key: cap}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=key):
        compiling.compiled(model, tmp_path / "x.gembin")


def test_soft_caps_change_the_logits(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    found = []
    for cap in (None, 0.5, 5.0):
        model = tmp_path / f"model-{cap}"
        shutil.copytree(tiny_checkpoint("gemma2"), model)
        config = json.loads((model / "config.json").read_text())
        config["attn_logit_softcapping"] = cap
        (model / "config.json").write_text(json.dumps(config))
        path = tmp_path / f"{cap}.gembin"
        compiling.compiled(model, path, effort=Effort.FAST)
        found.append(compiling.logits(path).tobytes())
    assert len(set(found)) == 3


# ---- texts, targets, names ----
@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "no text"), (b" \n", "no text"), (b"\xff\xfe", "not UTF-8"), (b"short", "at least")],
)
def test_calibration_texts_that_cannot_serve(
    llama: Path, tmp_path: Path, data: bytes, words: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(data)
    with pytest.raises(GemError, match=words):
        compiling.compiled(llama, tmp_path / "x.gembin", calibration=text)
    assert not list(tmp_path.glob("x.gembin*"))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"target": "no-such-board"}, TargetError, "no-such-board"),
        ({"dump_after": ("nothing",)}, UsageError, "no such pass"),
        ({"calibration": Path("/no/such")}, UsageError, "--calibration such"),
    ],
)
def test_names_that_lead_nowhere(
    llama: Path, tmp_path: Path, options: dict[str, Any], error: type[GemError], words: str
) -> None:
    with pytest.raises(error, match=words):
        compiling.compiled(llama, tmp_path / "x.gembin", **options)
    assert list(tmp_path.iterdir()) == []


# ---- budgets ----
def board(folder: Path, visible: int, reserve: int = 1) -> str:
    """A small board's description; returns its path."""
    path = folder / "small.toml"
    path.write_text(
        f"""inherits = ["generic-x86-64"]
id = "small-board"
board = "small"
[memory]
size_mib = 64
visible_mib = {visible}
[policy]
ram_fraction = 1.0
reserve_mib = {reserve}
[[source]]
field = "memory"
ref = "made up for a test"
kind = "assumption"
verified = false
"""
    )
    return str(path)


def test_over_budget_is_refused_with_a_table_and_with_what_would_fit(
    llama: Path, tmp_path: Path
) -> None:
    options = {"context": 16384, "kv_type": KvType.DENSE, "effort": Effort.FAST}
    target = board(tmp_path, 8)
    with pytest.raises(BudgetError) as caught:
        compiling.compiled(llama, tmp_path / "x.gembin", target=target, **options)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("small-board: needs ")
    assert "grants 7.0 MiB" in lines[0]
    assert [line.split()[0] for line in lines[1:8]] == [
        *("weights", "tables", "arena", "KV", "engine", "thread", "total"),
    ]
    fitting = [line for line in lines[8:] if line.endswith(": fits")]
    assert fitting
    assert not list(tmp_path.glob("x.gembin*"))
    name, value = fitting[0].split(" with ")[1].removesuffix(": fits").split()[:2]
    assert name == "--kv-cache-size"
    result = compiling.compiled(
        llama, tmp_path / "x.gembin", target=target, **{**options, "context": int(value)}
    )
    assert f"{result.memory.total / (1 << 20):.1f} MiB" in fitting[0]
    assert result.memory.total <= 7 << 20


def test_a_board_that_grants_nothing_refuses_everything(llama: Path, tmp_path: Path) -> None:
    target = board(tmp_path, 16, reserve=64)
    with pytest.raises(BudgetError, match=r"grants 0\.0 MiB; no option makes it fit"):
        compiling.compiled(llama, tmp_path / "x.gembin", target=target)


def test_the_declared_totals_are_those_of_the_header_and_the_listing(
    llama: Path, tmp_path: Path
) -> None:
    totals = []
    for context in (128, 256):
        path = tmp_path / f"{context}.gembin"
        target = board(tmp_path, 64)
        result = compiling.compiled(llama, path, target=target, context=context)
        with read_artifact(path) as artifact:
            header, layers = artifact.header, artifact.layers
            assert header.ram_budget == 63 << 20
            assert header.target.rstrip(b"\0") == b"small-board"
        memory = result.memory
        assert (header.ram_total, header.ram_kv, header.ram_tables) == (
            *(memory.total, memory.kv, memory.tables),
        )
        listing = Path(f"{path}.memmap").read_text().splitlines()
        assert f" {memory.total} bytes" in listing[0]
        assert all(line.split()[0] for line in listing[:5])
        # int8: codes and one bfloat16 scale a group, for K and V of every position
        group = layers[0].kv_group
        token = sum(2 * la.kv_heads * (la.head_dim + 2 * (la.head_dim // group)) for la in layers)
        assert memory.kv == -(-token * context // 4096) * 4096
        totals.append(memory.total)
    assert totals[0] < totals[1]
