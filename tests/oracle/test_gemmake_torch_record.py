"""Statistics by torch: the same layers as the engine's, and bytes that follow from the record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import compiling
import tiny
from gemmake import calibration, images
from gemmake.emit import Host
from gemmake.engine import Engine
from gemmake.hdf import load_hdf
from gemmake.load import load_checkpoint
from gemmake.options import CompileOptions
from gemmake.passes import quant
from gemmake.pipeline import run_passes, with_text
from gemmake.progress import Silent
from gemmake.state import State
from gemmake.torch_forward import Layer
from gemrun.format import manifest

TOLERANCE = 1e-4  # of the largest value
Sums = dict[int, "quant.F64"]


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_torch_and_the_engine_run_the_same_layers(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """Every layer from the engine's own inputs: outputs and Hessians of a window."""
    folder, host = tiny_checkpoint(family), Host(2)
    options = CompileOptions(folder, "generic-x86-64", tmp_path / "x.gembin")
    model = load_checkpoint(folder)
    bare = State(model, options, load_hdf("generic-x86-64"), inputs=model.inputs)
    state = run_passes(with_text(bare), host, Silent())
    hidden, window = calibration.begin(state, host, tmp_path)
    x = hidden[:window].copy()
    for index in range(len(state.layers)):
        seen: dict[int, quant.F64] = {}
        with torch.inference_mode():
            sums: Sums = {}

            def see(step: int, inputs: torch.Tensor, sums: Sums = sums) -> None:
                sums[int(step)] = (inputs.T @ inputs).double().numpy()

            wanted = Layer(state, index, window).run(torch.from_numpy(x.copy()), see).numpy()

        def capture(_layer: int, step: int, inputs: quant.F32, seen: Sums = seen) -> None:
            total = seen.setdefault(step, quant.new_hessian(inputs.shape[1]))
            quant.hessian_add(total, inputs, threads=1)

        small = images.one_layer(state, index, calibration.in_float(state, window))
        with images.written(small, tmp_path, host) as path, Engine(path, 2) as engine:
            engine.run_hidden(x, calibration.CHUNK, capture)
        assert np.abs(x - wanted).max() <= TOLERANCE * np.abs(wanted).max()
        assert sorted(seen) == sorted(sums)
        for step, total in seen.items():
            gap = np.abs(np.tril(total) - np.tril(sums[step])).max()
            assert gap <= TOLERANCE * np.abs(sums[step]).max()


def test_a_record_is_a_named_input_and_decides_the_bytes(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder, record = tiny_checkpoint("gemma2"), tmp_path / "r.stat"
    made, used = tmp_path / "made.gembin", tmp_path / "used.gembin"
    compiling.compiled(folder, made, save_statistics=record)
    for workers in (1, 3):
        compiling.compiled(folder, used, statistics=record, workers=workers)
        assert compiling.sha256(used) == compiling.sha256(made)
    assert compiling.problems(used) == []
    inputs = manifest.decode(compiling.section(used, "MANI"))["inputs"]
    (entry,) = [i for i in inputs if i["name"] == "r.stat"]
    assert entry["sha256"] == compiling.sha256(record)
    base = tmp_path / "baseline.gembin"
    compiling.compiled(folder, base, statistics=record, baseline=True)
    assert compiling.sha256(base) == compiling.sha256(made)


def test_a_record_is_as_good_as_the_engines_own_statistics(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    from gemmake.options import Quantization

    folder = tiny_checkpoint("smollm2")
    paths = {name: tmp_path / f"{name}.gembin" for name in ("none", "engine", "torch")}
    compiling.compiled(folder, paths["none"], quantization=Quantization.NONE)
    compiling.compiled(folder, paths["engine"])
    compiling.compiled(folder, paths["torch"], save_statistics=tmp_path / "r.stat")
    logits = {name: compiling.logits(path) for name, path in paths.items()}
    errors = [compiling.relative_error(logits[n], logits["none"]) for n in ("engine", "torch")]
    assert errors[1] < 1.2 * errors[0], errors


def test_a_record_never_replaces_another_kind_of_file(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    options = ("--save-statistics", str(notes))
    done = compiling.gemmake(tiny_checkpoint("gemma2"), tmp_path / "x.gembin", *options)
    assert done.returncode == 7
    assert "is no record of statistics" in done.stderr
    assert notes.read_text() == "mine"
    assert not list(tmp_path.glob("x.gembin*"))
