"""Inputs that are no files, never end, or hold numbers no model has: refused in one sentence."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from gemmake.errors import CheckpointError, GemError, TargetError, UsageError
from gemmake.files import read_small
from gemmake.hdf import load_hdf
from gemmake.load import load_checkpoint
from gemrun.format.codes import Code, FormatError
from gemrun.format.files import open_regular
from gemrun.format.reader import read_artifact

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
