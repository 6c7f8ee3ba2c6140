"""Inputs that are no files, never end, or hold numbers no model has: refused in one sentence."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import tiny
from gemmake import advise
from gemmake.errors import CheckpointError, GemError, TargetError, UsageError
from gemmake.files import read_small, standing
from gemmake.hdf import load_hdf
from gemmake.load import load_checkpoint, load_headers
from gemrun.format.codes import Code, FormatError
from gemrun.format.files import open_regular
from gemrun.format.reader import read_artifact

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60  # far above what a refusal takes; a hang is the fault that is looked for


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    return path


def test_a_pipe_is_no_regular_file(pipe: Path) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(pipe)


@pytest.mark.parametrize("path", ["pipe", "/dev/zero", "/dev/null", "."])
def test_an_artifact_that_is_no_regular_file_is_refused(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError) as failure:
        read_artifact(tmp_path / path)
    assert failure.value.code is Code.OPEN


def test_small_files_have_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    assert read_small(path, 5) == b"12345"
    assert read_small(path, 4) is None


@pytest.mark.parametrize("name", ["pipe.gguf", "pipe.pt", "pipe.safetensors"])
def test_a_checkpoint_that_is_a_pipe_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises(GemError):
        load_checkpoint(path)


def put(path: Path, kind: str) -> None:
    """Something that is no file, at a path."""
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as made, tempfile.TemporaryDirectory() as short:
            made.bind(f"{short}/s")  # the length of such a name is limited
            Path(f"{short}/s").rename(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a link that leads to itself":
        path.symlink_to(path)
    elif kind == "a link that leads to nothing":
        path.symlink_to(path.parent / "none")
    else:
        path.mkdir()


ODD = (
    *("a pipe", "a socket", "a device"),
    *("a link that leads to itself", "a link that leads to nothing"),
)


@pytest.mark.parametrize("kind", ODD)
def test_what_stands_in_the_place_of_a_checkpoint_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.gguf"
    put(path, kind)
    assert standing(path) == kind
    for load in (load_checkpoint, load_headers):
        with pytest.raises(CheckpointError, match=rf"^x\.gguf: is {kind}; name a checkpoint file"):
            load(path)
    with pytest.raises(UsageError, match=rf"^--config x\.gguf: is {kind}; name a config\.json"):
        load_checkpoint(tmp_path / "none.gguf", path)
    (row,) = advise.advise([str(path)], advise.Wish("jetson-orin-nano")).rows
    assert row.reasons == (
        f"cannot be compiled: x.gguf: is {kind}; name a checkpoint file or folder",
    )


def test_nothing_at_all_is_not_found(tmp_path: Path) -> None:
    for name in ("x.gguf", "\0"):
        assert standing(tmp_path / name) == ""
        with pytest.raises(CheckpointError, match="not found; name a checkpoint file or folder"):
            load_checkpoint(tmp_path / name)


@pytest.mark.parametrize("kind", [*ODD, "a folder"])
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
        *("chat_template.jinja", "model.safetensors", "model.safetensors.index.json"),
    ],
)
def test_no_part_of_a_checkpoint_is_passed_over(tmp_path: Path, name: str, kind: str) -> None:
    """A template that is a broken link is no model without a template."""
    folder = tiny.build("smollm2", tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    put(folder / name, kind)
    told = f"{name}: is {kind}, not a file; put the file in its place|{name}: is a link out of its"
    with pytest.raises(CheckpointError, match=told):
        load_headers(folder)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model", "", "--target", "rk3566"), "'--model': the name is empty; name a file"),
        (("--model", "m", "--target", "rk3566", "--output", ""), "'--output': the name is empty"),
        (("--model", "m", "--target", "rk3566", "--config", ""), "'--config': the name is empty"),
        (("--model", "m", "--target", ""), "target: is empty; name a board (gemmake hdf list)"),
        (("advise", "--target", "rk3566", ""), "MODEL: is empty; name a checkpoint, a folder"),
        (("hdf", "show", ""), "target: is empty; name a board"),
        (("engine", "--output", ""), "'--output': the name is empty"),
        (("sign", "", "--key", "k"), "'ARTIFACT': the name is empty"),
    ],
)
def test_an_empty_name_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "gemmake.cli", *words],
        capture_output=True, text=True, timeout=SECONDS, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode in (2, 4)
    assert told in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_target_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    os.mkfifo(path)
    with pytest.raises(TargetError, match="not a regular file"):
        load_hdf(path)


@pytest.mark.parametrize("text", ["/dev/zero", "/dev/random"])
def test_a_calibration_text_without_end_takes_no_memory(text: str) -> None:
    code = (
        "from pathlib import Path\n"
        "from gemmake import calibration\n"
        "from gemmake.errors import UsageError\n"
        "from gemmake.options import CompileOptions\n"
        f"options = CompileOptions(Path('m'), 't', Path('o'), calibration=Path({text!r}))\n"
        "try:\n    calibration.load_text(options)\n"
        "except UsageError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)),
    )
    assert "not a regular file" in done.stdout, done.stderr


def test_a_calibration_text_has_a_limit(tmp_path: Path) -> None:
    from gemmake import calibration
    from gemmake.options import CompileOptions

    path = tmp_path / "long.txt"
    with path.open("wb") as file:
        file.truncate(calibration.MAX_TEXT + 1)
    with pytest.raises(UsageError, match="larger than"):
        calibration.load_text(CompileOptions(Path("m"), "t", Path("o"), calibration=path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", 1.0),
        ("rope_theta", 1e300),
        ("rope_theta", 1e-300),
        ("rms_norm_eps", 1e308),
        ("rms_norm_eps", 1.5),
    ],
)
def test_numbers_that_no_model_has_are_refused_by_name(
    tmp_path: Path, field: str, value: float
) -> None:
    folder = tiny.build("smollm2", tmp_path / "m")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config[field] = value
    if field == "rope_theta":
        config.pop("rope_parameters", None)
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=field):
        load_checkpoint(folder)


def test_a_window_beyond_the_format_is_refused(tmp_path: Path) -> None:
    folder = tiny.build("gemma3", tmp_path / "m")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["sliding_window"] = 10**9
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="sliding_window"):
        load_checkpoint(folder)
