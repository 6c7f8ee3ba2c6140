"""Calibration records: written whole, read back, refused when damaged or of another checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gemmake import record
from gemmake.emit import Host
from gemmake.errors import CheckpointError, GemError, UsageError
from gemmake.hdf import load_hdf
from gemmake.load import load_checkpoint
from gemmake.options import CompileOptions, Effort, Quantization
from gemmake.passes import quant
from gemmake.pipeline import run_passes
from gemmake.progress import Silent
from gemmake.state import State
from gemrun.format import spec


@pytest.fixture(scope="module")
def state(tiny_checkpoint: Callable[..., Path]) -> State:
    """A planned compile of a tiny Llama."""
    folder = tiny_checkpoint("llama3")
    options = CompileOptions(folder, "generic-x86-64", Path("x.gembin"), context=64)
    model = load_checkpoint(folder)
    bare = State(model, options, load_hdf("generic-x86-64"), inputs=model.inputs)
    return run_passes(bare, Host(1), Silent())


def hessians(state: State) -> list[dict[spec.Op, quant.F64]]:
    rng = np.random.default_rng(3)
    out = []
    for layer in record.columns_of(state):
        made = {}
        for step, cols in layer.items():
            x = rng.standard_normal((64, cols))
            made[spec.Op(step)] = np.tril(x.T @ x)
        out.append(made)
    return out


@pytest.fixture
def written(state: State, tmp_path: Path) -> Path:
    path = tmp_path / "r.stat"
    header = record.Header(record.checkpoint_of(state), "ab", 64, record.columns_of(state))
    made = record.write(path, header, iter(hessians(state)), lambda: None)
    assert made == record.identity(path)
    assert [p.name for p in tmp_path.iterdir()] == ["r.stat"]
    return path


def test_feedback_is_that_of_the_hessians(state: State, written: Path) -> None:
    wanted = hessians(state)
    with record.Record(written, state, Host(2)) as opened:
        for layer, made in enumerate(wanted):
            opened.prepare(layer)
            for tensor in state.stream.of_layer(layer):
                step = record.STEP_OF_ROLE.get(tensor.record.role)
                found = opened.feedback(tensor)
                if step is None:
                    assert found is None
                    continue
                assert found is not None
                rounded = made[step].astype(np.float32).astype(np.float64)
                exact = quant.gptq_prepare(rounded, threads=1)
                assert (found.diag == exact.diag).all()
                assert (found.panels == exact.panels).all()
    assert opened.feedback(state.stream.of_layer(0)[1]) is None


def refused(state: State, path: Path, words: str) -> None:
    def run() -> None:
        with record.Record(path, state, Host(1)) as opened:
            for layer in range(len(state.layers)):
                opened.prepare(layer)

    with pytest.raises(CheckpointError, match=words):
        run()


@pytest.mark.parametrize("size", [0, 4, 8, 11, 40, -1, -4096])
def test_cut_records_are_refused(state: State, written: Path, size: int) -> None:
    data = written.read_bytes()
    written.write_bytes(data[:size])
    refused(state, written, "ends early|is no record|are wanted|unreadable")


def test_longer_records_are_refused(state: State, written: Path) -> None:
    written.write_bytes(written.read_bytes() + b"\0")
    refused(state, written, "are wanted")


@pytest.mark.parametrize(
    ("at", "value", "words"),
    [
        (0, b"x", "is no record"),
        (8, b"\xff\xff\xff\xff", "has a header of"),
        (12, b"\xc1", "unreadable header"),
        (-4, b"\0\0\xc0\x7f", "NaN"),
    ],
)
def test_damaged_records_are_refused(
    state: State, written: Path, at: int, value: bytes, words: str
) -> None:
    data = bytearray(written.read_bytes())
    start = at % len(data)
    data[start : start + len(value)] = value
    written.write_bytes(data)
    refused(state, written, words)


def test_records_of_another_checkpoint_or_shape_are_refused(state: State, tmp_path: Path) -> None:
    columns = record.columns_of(state)
    for header, words in (
        (record.Header(("00",), "", 1, columns), "another checkpoint"),
        (record.Header(record.checkpoint_of(state), "", 1, columns[1:]), "other sizes"),
    ):
        path = tmp_path / "other.stat"
        record.write(path, header, iter(hessians(state)), lambda: None)
        refused(state, path, words)


@pytest.mark.parametrize("name", ["no-such", "."])
def test_what_is_no_file_is_refused(state: State, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--statistics"):
        record.identity(tmp_path / name)


@pytest.mark.parametrize("option", ["statistics", "save_statistics"])
@pytest.mark.parametrize(
    "other", [{"effort": Effort.FAST}, {"quantization": Quantization.INT8}], ids=["fast", "int8"]
)
def test_records_serve_error_feedback_only(option: str, other: dict[str, object]) -> None:
    with pytest.raises(GemError, match="serves error feedback"):
        CompileOptions(Path("m"), "t", Path("o"), **{option: Path("r"), **other})  # type: ignore[arg-type]
