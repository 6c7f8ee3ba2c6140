"""State dicts: pickles that run code, strides, damage (field report O9)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import load_files
import tiny
from gemmake.errors import CheckpointError
from gemmake.load import load_checkpoint, pt, pt_worker
from gemmake.load.pt import read_pt

MakeTiny = Callable[..., Path]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the worker's own code here: importing torch anew takes over a second."""

    def run(path: Path, data: Path, folder: Path) -> dict[str, Any]:
        del folder
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = pt_worker.main([str(path), str(data)])
        report: dict[str, Any] = json.loads(out.getvalue())
        assert (code == 0) == ("error" not in report)
        return report

    monkeypatch.setattr(pt, "_run_worker", run)


class Marker:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.path}",)


class Global:
    """Calls another function of the interpreter when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


def test_reduce_step_does_not_run(tmp_path: Path) -> None:
    """4 forms of a malicious file: zip and legacy torch files, a bare pickle, a value deep inside.
    Each is refused and the marker file does not appear. The marker works where it is let loose."""
    marker = tmp_path / "marker"
    bad = Marker(marker)
    forms = {
        "zip.pt": lambda p: torch.save({"a": torch.zeros(2), "b": bad}, p),
        "legacy.pt": lambda p: torch.save({"b": bad}, p, _use_new_zipfile_serialization=False),
        "bare.pt": lambda p: p.write_bytes(pickle.dumps({"b": bad})),
        "deep.pth": lambda p: torch.save({"model": {"x": [torch.zeros(1), {"y": bad}]}}, p),
    }
    for name, write in forms.items():
        path = tmp_path / name
        write(path)
        with pytest.raises(CheckpointError, match=r"refused|damaged"):
            read_pt(path)
        assert not marker.exists(), name
    torch.load(tmp_path / "zip.pt", weights_only=False)
    assert marker.exists()


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("function", "arguments"),
    [(exec, ("raise SystemExit(0)",)), (eval, ("1",)), (getattr, ("", "join")), (open, ("x", "w"))],
)
def test_other_globals_are_refused(function: Any, arguments: Any, tmp_path: Path) -> None:
    """4 harmless-looking functions; nothing but tensors may be built."""
    torch.save({"a": Global(function, *arguments)}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="refused"):
        read_pt(tmp_path / "m.pt")


def test_no_unsafe_word_in_the_loader(root: Path) -> None:
    """weights_only is True wherever torch.load is called, and no code can turn it off."""
    for path in (root / "gemmake").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert text.count("torch.load(") == text.count("weights_only=True"), path
        assert "weights_only=False" not in text


@pytest.mark.usefixtures("in_process")
def test_strides_and_offsets(tmp_path: Path) -> None:
    """7 views: transposed, sliced, expanded (stride 0), stepped, offset, flipped part, 3-D."""
    base = torch.arange(48, dtype=torch.float32).reshape(6, 8)
    row = torch.arange(4, dtype=torch.float32)
    views = {
        "transposed": base.t(),
        "sliced": base[1:],
        "expanded": row.expand(8, 4),
        "stepped": base[::2, ::3],
        "offset": base.reshape(-1)[5:29].reshape(4, 6),
        "columns": base[:, 2:5],
        "deep": base.reshape(2, 3, 8).permute(2, 0, 1),
    }
    assert not views["transposed"].is_contiguous()
    torch.save(views, tmp_path / "m.pt")
    got = read_pt(tmp_path / "m.pt")
    assert got.keys() == views.keys()
    for name, view in views.items():
        tensor = got[name]
        assert tensor.shape == tuple(view.shape)
        if view.dim() == 2:
            assert np.array_equal(tensor.read(0, tensor.rows), view.numpy()), name


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_views_of_every_type(dtype: torch.dtype, legacy: bool, tmp_path: Path) -> None:
    """3 types by 2 file forms."""
    base = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.save(
        {"w": base.t(), "v": base[2]},
        tmp_path / "m.pt",
        _use_new_zipfile_serialization=not legacy,
    )
    got = read_pt(tmp_path / "m.pt")
    assert np.array_equal(got["w"].read(0, 7), base.t().float().numpy())
    assert np.array_equal(got["v"].read(0, 1)[0], base[2].float().numpy())


def test_a_model_with_views_loads(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    """The same checkpoint with its matrices saved transposed and as slices of larger storages."""
    source = tiny_checkpoint("qwen2")
    wanted = load_checkpoint(source)
    path = tiny.to_pt(source, tmp_path / "model.pth")
    state = {
        name: torch.cat([t, t])[len(t) :] if t.dim() == 1 else t.t().contiguous().t()
        for name, t in load_files.state(source).items()
    }
    assert not state["model.embed_tokens.weight"].is_contiguous()
    torch.save(state, path)
    got = load_checkpoint(path)
    assert got.spec == wanted.spec
    for key, ref in wanted.tensors.items():
        assert np.array_equal(got.tensors[key].read(0, ref.rows), ref.read(0, ref.rows))


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model"])
def test_usual_wrappers(wrapper: str, tmp_path: Path) -> None:
    torch.save({wrapper: {"a": torch.ones(2)}, "epoch": 3}, tmp_path / "m.pt")
    assert list(read_pt(tmp_path / "m.pt")) == ["a"]


def _drop_storage(path: Path) -> None:
    """Take one storage out of the archive."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            if not name.endswith("data/0"):
                archive.writestr(name, data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2000])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing storage": _drop_storage,
    "cut": _cut,
    "empty": lambda p: p.write_bytes(b""),
    "text": lambda p: p.write_text("hello"),
    "zip of nothing": lambda p: zipfile.ZipFile(p, "w").close(),
    "a list": lambda p: torch.save([torch.ones(2)], p),
    "an empty map": lambda p: torch.save({}, p),
    "a number inside": lambda p: torch.save({"a": torch.ones(2), "step": 7}, p),
    "integer keys": lambda p: torch.save({1: torch.ones(2)}, p),
    "float64": lambda p: torch.save({"a": torch.ones(2, dtype=torch.float64)}, p),
    "int8": lambda p: torch.save({"a": torch.ones(2, dtype=torch.int8)}, p),
    "complex": lambda p: torch.save({"a": torch.ones(2, dtype=torch.complex64)}, p),
    "sparse": lambda p: torch.save({"a": torch.ones(2, 2).to_sparse()}, p),
    "meta": lambda p: torch.save({"a": torch.ones(2, 2, device="meta")}, p),
    "expanded to a petabyte": lambda p: torch.save({"a": torch.ones(1).expand(2**24, 2**24)}, p),
    "a whole module": lambda p: torch.save(torch.nn.Linear(2, 2), p),
}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_or_unfit(case: str, tmp_path: Path) -> None:
    """16 files that are no usable state dict: one sentence each, nothing filled with zeros."""
    path = tmp_path / "m.pt"
    torch.save({f"w{i}": torch.ones(500) * i for i in range(3)}, path)
    DAMAGE[case](path)
    with pytest.raises(CheckpointError) as caught:
        read_pt(path)
    assert str(caught.value).startswith("m.pt: ")
    assert "Traceback" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("case", ["missing storage", "cut", "a list", "expanded to a petabyte"])
def test_damage_through_the_subprocess(case: str, tmp_path: Path) -> None:
    """4 of them as a user meets them."""
    path = tmp_path / "m.pt"
    torch.save({f"w{i}": torch.ones(500) * i for i in range(3)}, path)
    DAMAGE[case](path)
    with pytest.raises(CheckpointError, match=r"^m\.pt: "):
        read_pt(path)


def test_worker_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without a report, whatever the reason, is an error with its last words."""
    (tmp_path / "m.pt").write_bytes(b"x")
    monkeypatch.setattr(pt, "_WORKER", "gemmake.load.absent_module")
    with pytest.raises(CheckpointError, match="absent_module"):
        read_pt(tmp_path / "m.pt")


def test_damage_count() -> None:
    assert len(DAMAGE) == 16


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary file is gone while the tensors still read."""
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    torch.save({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path / "m.pt")
    got = read_pt(tmp_path / "m.pt")
    assert list((tmp_path / "tmp").iterdir()) == []
    assert got["a"].read(1, 1).tolist() == [[3.0, 4.0, 5.0]]


def test_modules_of_the_current_folder_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch.py beside the checkpoint is not run."""
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    torch.save({"a": torch.ones(2)}, tmp_path / "m.pt")
    monkeypatch.chdir(tmp_path)
    assert list(read_pt(tmp_path / "m.pt")) == ["a"]


def test_missing_config(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    path = tiny.to_pt(tiny_checkpoint("gemma1"), tmp_path / "m.pt")
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="--config"):
        load_checkpoint(path)
    model = load_checkpoint(path, tiny_checkpoint("gemma1") / "config.json")
    assert model.spec.family == "gemma1"
