"""gemmake advise and --power-mode by the real command."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import compiling

ROOT = Path(__file__).resolve().parents[2]
FAST = ("--effort", "fast")
NANO = ("--target", "jetson-orin-nano")


def advise(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gemmake.cli", "advise", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_a_table_of_what_fits_and_why_the_rest_does_not(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_checkpoint("gemma3")
    options = ("--longest-input", "128", "--answer", "64", "--leave-free", "4500", "--check")
    done = advise(model, "4B", *NANO, *options)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("jetson-orin-nano in mode 25W: 2836 MiB for a model;")
    rows = {line.split()[0]: line for line in lines[3:6]}
    assert list(rows) == [model.name, "gemma-3-4b", "qwen3-4b"]
    assert rows[model.name].endswith("fits")
    assert f"{model.name}: ✓ round trips: 18 texts came back byte for byte" in done.stdout
    assert any(line.startswith("assumed: memory has 102.4 GB/s") for line in lines)
    command = shlex.split(lines[-1].removeprefix("Next: gemmake "))
    assert command[-2:] == ["--output", "X.gembin"]
    made = subprocess.run(
        [sys.executable, "-m", "gemmake.cli", *command[:-1], str(tmp_path / "x.gembin")],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr


def test_nothing_that_fits_is_exit_5_and_json_is_json() -> None:
    done = advise("gemma-3-4b", "--target", "meter-256mb", "--json")
    assert done.returncode == 5
    (row,) = json.loads(done.stdout)["candidates"]
    assert row["verdict"] == "no"
    assert row["memory_bytes"] > 2_000_000_000
    assert done.stderr.startswith("gemmake: meter-256mb: no candidate does what is asked; ")


def test_what_is_only_open_is_exit_0() -> None:
    done = advise("gemma-3-1b", "--target", "intel-n100", "--speed", "20")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  open: speed\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("Next: gemmake --model MODEL ")


def test_the_exit_codes_are_those_of_help_and_readme() -> None:
    told = " ".join(advise("--help").stdout.split())
    assert "Exit: 0 where a candidate fits, or is open" in told
    assert "5 where none does" in told
    readme = (ROOT / "gemmake/README.md").read_text("utf-8")
    assert "| exit | of advise |" in readme


def test_wrong_words_end_in_one_sentence() -> None:
    for words, code, told in (
        (("no-such", *NANO), 2, "no such file or folder"),
        (("1B", "--target", "no-board"), 4, "unknown target"),
        (("1B", *NANO, "--power-mode", "9W"), 2, "use one of 15W, 25W (default), MAXN_SUPER"),
        (("1B", "--target", "cortex-m7"), 5, "no candidate does what is asked; missed is memory"),
        (("1B", *NANO, "--speed", "-1"), 2, "--speed: -1.0 tokens/s"),
    ):
        done = advise(*words)
        assert done.returncode == code
        assert told in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_power_mode_and_storage_change_the_prediction_and_no_byte(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model, texts = tiny_checkpoint("llama3"), []
    for mode, storage in (("15W", "sd"), ("MAXN_SUPER", "nvme")):
        output = tmp_path / mode / "x.gembin"
        output.parent.mkdir()
        words = (*FAST, *NANO, "--power-mode", mode, "--storage", storage, "--verbose")
        done = compiling.gemmake(model, output, *words)
        assert done.returncode == 0
        assert f"predicted for jetson-orin-nano in mode {mode}, 6 threads: " in done.stdout
        assert "predicted first token of a prompt of 32, loading included: " in done.stdout
        texts.append(done.stdout)
    first, second = (tmp_path / mode / "x.gembin" for mode in ("15W", "MAXN_SUPER"))
    assert compiling.sha256(first) == compiling.sha256(second)
    assert "INFO: [predict] memory has 68.3 GB/s at the peak: " in texts[0]
    assert "INFO: [predict] memory has 102.4 GB/s at the peak: " in texts[1]
    assert "INFO: [predict] storage is sd with 40 to 90 MB/s" in texts[0]
    assert "INFO: [predict] storage is nvme with 800 to 3000 MB/s" in texts[1]
    assert "INFO: [CPU] attention in 4 layers: 8 KV heads (GPU: needs the [jetson] " in texts[0]


def test_an_unknown_power_mode_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    done = compiling.gemmake("no-such", tmp_path / "x.gembin", *NANO, "--power-mode", "9W")
    assert done.returncode == 2
    assert "--power-mode 9W: no power mode of jetson-orin-nano; use one of" in done.stderr


def test_a_board_without_figures_gets_no_prediction(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    done = compiling.gemmake(tiny_checkpoint("llama3"), tmp_path / "x.gembin", *FAST)
    assert done.returncode == 0
    assert (
        "speed: not predicted, as memory bandwidth of generic-x86-64 is not in its" in done.stdout
    )
