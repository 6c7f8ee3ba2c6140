"""Names and values from outside are printed, never obeyed: no control character is sent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemrun.plain import one_line, plain

ROOT = Path(__file__).resolve().parents[2]
ODD = "a\x1b[31m\n\r\u202eb\x9b2J\x7f"
SHOWN = r"a\x1b[31m\x0a\x0d\u202eb\u009b2J\u007f"
MODULES = {
    "gemmake": "gemmake.cli",
    "gemcheck": "gemmake.check.cli",
    "gembench": "gemrun.cli_bench",
}


def ran(tool: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    call = f"import sys; from {MODULES[tool]} import main; sys.argv[0] = {tool!r}; main()"
    done = subprocess.run(
        [sys.executable, "-c", call, *words],
        capture_output=True, text=True, timeout=120, check=False, cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    for stream in (done.stdout, done.stderr):
        assert plain(stream) == stream
    return done


def test_what_is_escaped() -> None:
    assert one_line(ODD) == SHOWN
    assert plain("a\nb\tc\x1b") == "a\nb\tc\\x1b"
    kept = "zo\u00eb \u65e5\u672c \U0001f600 \u00a0"
    assert one_line(kept) == plain(kept) == kept
    text = json.dumps({"name": ODD}, ensure_ascii=False)
    assert json.loads(plain(text)) == {"name": ODD}


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("gemmake", ("--model", ODD, "--target", "rk3566")),
        ("gemmake", ("--model", f"{ODD}.gguf", "--target", "rk3566", "--config", ODD)),
        ("gemmake", ("--model", "m", "--target", ODD)),
        ("gemmake", ("--model", "m", "--target", f"{ODD}.toml")),
        ("gemmake", ("--model", "m", "--target", "rk3566", "--output", f"{ODD}/x.gembin")),
        ("gemmake", ("--model", "m", "--target", "rk3566", "--power-mode", ODD)),
        ("gemmake", ("--model", "m", "--target", "rk3566", "--bsp-version", ODD)),
        ("gemmake", ("--model", "m", "--target", "rk3566", "--quantization", ODD)),
        ("gemmake", ("--model", "m", "--target", "rk3566", "--kv-gate", ODD)),
        ("gemmake", (f"--{ODD}",)),
        ("gemmake", ("advise", "--target", "rk3566", ODD)),
        ("gemmake", ("hdf", "show", ODD)),
        ("gemmake", ("hdf", "probe", "--no-bandwidth", "--root", ODD)),
        ("gemmake", ("hdf", ODD)),
        ("gemmake", ("sign", ODD, "--key", ODD)),
        ("gemcheck", (ODD,)),
        ("gemcheck", ("--json", ODD)),
        ("gemcheck", (f"--{ODD}",)),
        ("gembench", ("--model", ODD, "--prompt", "x")),
    ],
)
def test_a_name_on_the_line_is_shown_escaped(
    tmp_path: Path, tool: str, words: tuple[str, ...]
) -> None:
    done = ran(tool, *words, cwd=tmp_path)
    assert done.returncode != 0
    assert r"\x1b[31m" in done.stdout + done.stderr or r"\u001b[31m" in done.stdout
    if done.stderr.startswith(f"{tool}: "):
        assert len(done.stderr.splitlines()) == 1


def test_names_in_a_description_are_shown_escaped(tmp_path: Path) -> None:
    board = tmp_path / f"{ODD}.toml"
    name = json.dumps(ODD)
    text = f'inherits = ["rk3566"]\nid = "odd"\n[[cpu.cluster]]\nid = {name}\ncores = [9]\n'
    board.write_text(text, encoding="utf-8")
    done = ran("gemmake", "hdf", "show", str(board), cwd=tmp_path)
    assert done.returncode == 0
    assert f"cpu.cluster[{SHOWN}].cores = [9]  # {SHOWN}.toml:5\n" in done.stdout
    done = ran("gemmake", "hdf", "diff", "rk3566", str(board), cwd=tmp_path)
    assert f"+ cpu.cluster[{SHOWN}].cores = [9]\n" in done.stdout
    board.write_text(f"{text}{name} = 1\n", encoding="utf-8")
    done = ran("gemmake", "hdf", "check", str(board), cwd=tmp_path)
    assert done.returncode == 4
    (line,) = done.stdout.splitlines()
    assert f".toml: cpu.cluster[{SHOWN}].{SHOWN}: unknown key" in line
