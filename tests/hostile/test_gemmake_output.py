"""The result is whole or not there: bad outputs, full disks, signals at any moment, odd paths."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import compiling
import tiny

FAST = ("--effort", "fast")


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One sentence on stderr with these words, no traceback, this exit code."""
    assert done.returncode == code, done.stderr
    lines = compiling.told(done.stderr).strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("gemmake: ")
    assert "; " in lines[0]
    for word in words:
        assert word in lines[0]
    assert "SUCCESS" not in done.stdout


@pytest.mark.parametrize("case", ["folder", "missing", "file", "device", "checkpoint"])
def test_outputs_that_cannot_be_are_refused_before_any_work(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    model = tiny_checkpoint("llama3")
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    shutil.copyfile(model / "model.safetensors", tmp_path / "model.safetensors")
    output, words = {
        "folder": (tmp_path, "is a folder"),
        "missing": (tmp_path / "no" / "x.gembin", "no such folder"),
        "file": (notes, "is no artifact"),
        "device": (Path("/dev/full"), "not a regular file"),
        "checkpoint": (tmp_path / "model.safetensors", "is no artifact"),
    }[case]
    before = sorted((p, p.stat().st_size) for p in tmp_path.iterdir())
    refused(compiling.gemmake(model, output, *FAST), 7, words)
    assert sorted((p, p.stat().st_size) for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        (".partial", "no unfinished artifact"),
        (".memmap", "no listing of an artifact"),
        (".memmap.partial", "no listing of an artifact"),
        (".layout.json", "no dump of a pass"),
        (".layout.json.partial", "no dump of a pass"),
    ],
)
def test_what_gemmake_did_not_write_is_not_replaced(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, suffix: str, words: str
) -> None:
    """Neither in a good compile nor by the clean-up of a failing one."""
    model, mine = tiny_checkpoint("llama3"), tmp_path / f"x.gembin{suffix}"
    mine.write_text("mine\n")
    options = (*FAST, "--dump-after", "layout")
    refused(compiling.gemmake(model, tmp_path / "x.gembin", *options), 7, words, mine.name)
    assert [p.name for p in tmp_path.iterdir()] == [mine.name]
    assert mine.read_text() == "mine\n"


def test_what_gemmake_wrote_is_replaced(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Also what a kill leaves at any moment: nothing yet, or the beginning."""
    output, options = tmp_path / "x.gembin", (*FAST, "--dump-after", "layout")
    assert compiling.gemmake(tiny_checkpoint("llama3"), output, *options).returncode == 0
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert sorted(before) == ["x.gembin", "x.gembin.layout.json", "x.gembin.memmap"]
    Path(f"{output}.partial").write_bytes(before["x.gembin"][:8] + bytes(5000))
    Path(f"{output}.memmap.partial").write_bytes(b"")
    Path(f"{output}.layout.json.partial").write_bytes(before["x.gembin.layout.json"][:100])
    assert compiling.gemmake(tiny_checkpoint("llama3"), output, *options).returncode == 0
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_an_artifact_is_replaced_and_survives_a_failure(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    output = tmp_path / "x.gembin"
    first = compiling.gemmake(tiny_checkpoint("llama3"), output, *FAST)
    assert first.returncode == 0, first.stderr
    old = compiling.sha256(output)
    refused(compiling.gemmake(tiny_checkpoint("llama3"), output, "--calibration", "no-such"), 2)
    assert compiling.sha256(output) == old
    assert compiling.gemmake(tiny_checkpoint("qwen3"), output, *FAST).returncode == 0
    assert compiling.sha256(output) != old


def limited(size: int) -> Callable[[], None]:
    """Files of this process may have `size` bytes at most."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


@pytest.mark.parametrize("size", [0, 1 << 12, 200_000])
def test_a_file_size_limit_ends_in_one_sentence(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, size: int
) -> None:
    done = subprocess.run(
        compiling.command(tiny_checkpoint("llama3"), tmp_path / "x.gembin", *FAST),
        env=compiling.environment({"PYTHONDONTWRITEBYTECODE": "1"}),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limited(size),
    )
    refused(done, 7, "x.gembin", "bytes")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def gemmake(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gemmake.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_engine_on_a_full_disk_leaves_nothing(small_disk: Path) -> None:
    done = gemmake("engine", "--single-file", "--output", small_disk / "engine")
    refused(done, 7, str(small_disk / "engine"), "No space left on device", "another --output")
    assert list(small_disk.iterdir()) == []


def test_a_folder_that_is_read_only_is_named(
    tiny_checkpoint: Callable[..., Path], small_disk: Path, tmp_path: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    done = compiling.gemmake(tiny_checkpoint("llama3"), small_disk / "x.gembin", *FAST)
    refused(done, 7, f"{small_disk}: not writable; choose another folder")
    for words, told in (
        (("engine", "--single-file", "--output", small_disk / "e"), f"{small_disk}/e: Read-only"),
        (("engine", "--single-file", "--output", small_disk), f"{small_disk}: Read-only"),
        (("keygen", "--output", small_disk / "k"), f"{small_disk}/k.key: Read-only"),
    ):
        refused(gemmake(*words), 7, told)
    assert list(small_disk.iterdir()) == []


def test_a_full_disk_is_named_with_both_sizes(
    tiny_checkpoint: Callable[..., Path], small_disk: Path
) -> None:
    done = compiling.gemmake(tiny_checkpoint("llama3"), small_disk / "x.gembin", *FAST)
    refused(done, 7, "bytes", "are free", str(small_disk))
    assert list(small_disk.iterdir()) == []


def test_a_full_work_folder_is_named_with_its_remedy(
    tiny_checkpoint: Callable[..., Path], small_disk: Path, tmp_path: Path
) -> None:
    output = tmp_path / "x.gembin"
    env = {"TMPDIR": str(small_disk)}
    refused(compiling.gemmake(tiny_checkpoint("llama3"), output, env=env), 7, "TMPDIR")
    assert not list(small_disk.iterdir())
    assert not list(tmp_path.glob("x.gembin*"))


# ---- signals ----
MOMENTS = 5  # of each signal


@pytest.fixture(scope="module")
def duration(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> float:
    """Seconds of an undisturbed compile."""
    started = time.monotonic()
    output = tmp_path_factory.mktemp("duration") / "x.gembin"
    assert compiling.gemmake(tiny_checkpoint("gemma3"), output).returncode == 0
    return time.monotonic() - started


@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_at_any_moment_leaves_no_artifact(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    duration: float,
    number: signal.Signals,
    moment: int,
) -> None:
    output, work = tmp_path / "x.gembin", tmp_path / "work"
    work.mkdir()
    rng = random.Random(1000 * number + moment)
    process = subprocess.Popen(
        compiling.command(tiny_checkpoint("gemma3"), output),
        env=compiling.environment({"TMPDIR": str(work)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=compiling.default_signals,
    )
    time.sleep(rng.uniform(0.2, 1.0) * duration)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    left = sorted(p.name for p in tmp_path.iterdir())
    if process.returncode == 0:  # it had finished
        assert left == ["work", "x.gembin", "x.gembin.memmap"]
        return
    if process.returncode < 0 and "x.gembin" in left:  # it came behind the last rename
        assert compiling.problems(output) == []
        return
    assert "x.gembin" not in left
    assert "x.gembin.memmap" not in left
    assert "SUCCESS" not in stdout
    if number is not signal.SIGKILL:
        if process.returncode > 0:  # else it came before the command was set up
            assert process.returncode == 128 + number or "KeyboardInterrupt" in stderr
        assert left == ["work"]
        assert list(work.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_weights_are_written_is_told_in_one_sentence(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, number: signal.Signals
) -> None:
    output = tmp_path / "x.gembin"
    process = subprocess.Popen(
        compiling.command(tiny_checkpoint("gemma3"), output),
        env=compiling.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=compiling.default_signals,
    )
    while not Path(f"{output}.partial").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert compiling.told(stderr) == f"gemmake: stopped by {number.name}; no artifact was written\n"
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_leaves_behind_does_not_disturb_the_next_compile(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    output, other = tmp_path / "x.gembin", tmp_path / "y.gembin"
    process = subprocess.Popen(
        compiling.command(tiny_checkpoint("gemma3"), output),
        env=compiling.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not Path(f"{output}.partial").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert compiling.gemmake(tiny_checkpoint("gemma3"), output, *FAST).returncode == 0
    assert compiling.gemmake(tiny_checkpoint("gemma3"), other, *FAST).returncode == 0
    assert compiling.sha256(output) == compiling.sha256(other)
    assert not list(tmp_path.glob("*.partial"))


# ---- paths ----
ODD = os.fsdecode("模型 ü".encode() + b"\xff\n.d")


@pytest.mark.parametrize("locale", ["utf-8", "C"])
@pytest.mark.parametrize("form", ["folder", "pt"])
def test_paths_are_bytes_from_end_to_end(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, form: str, locale: str
) -> None:
    home = tmp_path / ODD
    shutil.copytree(tiny_checkpoint("qwen2"), home)
    text = home / os.fsdecode(b"text\xfe.txt")
    text.write_text("The motor is warm, and the gateway is ready. " * 40)
    hdf = home / os.fsdecode(b"board\xfd.toml")
    hdf.write_text('inherits = ["generic-x86-64"]\nid = "odd"\n')
    model = home
    if form == "pt":
        plain = tiny.to_pt(tiny_checkpoint("qwen2"), tmp_path / "pt" / "w.pt")
        model = plain.rename(home / os.fsdecode(b"w\xe4.pt"))
        (home / "model.safetensors").unlink()
    output = home / os.fsdecode(b"out\xff.gembin")
    options = ("--calibration", str(text), "--target", str(hdf), "--dump-after", "layout")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    env = ascii_only if locale == "C" else {}
    done = compiling.gemmake(model, output, *options, "--verbose", env=env)
    assert done.returncode == 0, done.stderr
    names = {os.fsencode(p.name) for p in home.iterdir() if b"gembin" in os.fsencode(p.name)}
    assert names == {
        b"out\xff.gembin",
        b"out\xff.gembin.memmap",
        b"out\xff.gembin.layout.json",
    }
    assert compiling.problems(output) == []
    listing = Path(f"{output}.memmap").read_text(encoding="utf-8")
    assert listing.splitlines()[0].startswith("total footprint")
