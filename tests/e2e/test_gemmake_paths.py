"""Every way through the compiler on tiny checkpoints: compiles, passes gemcheck, and answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compiling
import tiny
from gemmake.options import Effort, Int4Format, KvType, Quantization
from gemrun.context import GemRunContext

WAYS: dict[str, dict[str, Any]] = {
    "none": {"quantization": Quantization.NONE},
    "int8": {"quantization": Quantization.INT8},
    "q4h-full": {"effort": Effort.FULL},
    "q4h-fast": {"effort": Effort.FAST},
    "q4raw": {"int4_format": Int4Format.Q4RAW},
}
#: Size of the logits' error against float32 weights, as a share of their own size. Random weights
#: are the hardest case; measured: 0.02..0.06, 0.11..0.38, 0.11..0.36, 0.13..0.43.
BOUNDS = {"int8": 0.1, "q4h-full": 0.6, "q4h-fast": 0.6, "q4raw": 0.8}


@pytest.mark.parametrize("kv", list(KvType))
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_format_compiles_checks_and_answers(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str, kv: KvType
) -> None:
    folder = tiny_checkpoint(family)
    found = {}
    for way, options in WAYS.items():
        path = tmp_path / f"{way}.gembin"
        result = compiling.compiled(folder, path, kv_type=kv, **options)
        assert result.size == path.stat().st_size
        assert compiling.problems(path) == []
        assert Path(f"{path}.memmap").is_file()
        with GemRunContext(path, ignore_memory=True) as context:
            assert len(context.infer("The motor", max_tokens=4, ignore_stop_ids=True)) == 4
        found[way] = compiling.logits(path)
        assert np.isfinite(found[way]).all()
    errors = {way: compiling.relative_error(found[way], found["none"]) for way in BOUNDS}
    assert all(errors[way] < bound for way, bound in BOUNDS.items()), errors
    assert errors["int8"] < min(errors["q4h-full"], errors["q4h-fast"], errors["q4raw"]), errors
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        f"{way}.gembin{suffix}" for way in WAYS for suffix in ("", ".memmap")
    )


@pytest.mark.parametrize("family", ["gemma3", "qwen2"])
def test_a_pt_file_and_shards_give_the_same_weights(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """Inputs differ in name and hash, so the manifest may; the weights and tables may not."""
    folder = tiny_checkpoint(family)
    sources = {
        "folder": folder,
        "shards": tiny.to_shards(folder, tmp_path / "shards"),
        "pt": tiny.to_pt(folder, tmp_path / "pt" / "model.pt"),
    }
    sections = []
    for name, source in sources.items():
        path = tmp_path / f"{name}.gembin"
        compiling.compiled(source, path)
        sections.append([compiling.section(path, s) for s in ("CONF", "TOKN", "WHOT", "TEST")])
    assert sections[0] == sections[1] == sections[2]


def test_the_jetson_target_compiles_and_is_named_in_the_header(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from gemmake.hdf import load_hdf
    from gemrun.format.reader import read_artifact

    path = tmp_path / "jetson.gembin"
    compiling.compiled(
        tiny_checkpoint("gemma3"), path, target="jetson-orin-nano", effort=Effort.FAST
    )
    hdf = load_hdf("jetson-orin-nano")
    with read_artifact(path) as artifact:
        header = artifact.header
        assert header.hdf_sha256 == hdf.sha256()
        assert header.target.rstrip(b"\0") == b"jetson-orin-nano"
        assert header.ram_budget == hdf.budget_bytes() > header.ram_total
        assert artifact.thermal.threshold_c == 80.0
    assert compiling.problems(path) == []
