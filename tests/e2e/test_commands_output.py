"""Standard output and stderr that take nothing: one sentence, the documented exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOOD = str(ROOT / "tests/golden/v1.0/tiny-int4.gembin")
GEMMAKE, GEMCHECK = ("-m", "gemmake.cli"), ("-m", "gemmake.check.cli")
GEMBENCH, PERPLEXITY = ("-m", "gemrun.cli_bench"), ("tools/perplexity.py",)
BENCH = ("--model", GOOD, "--prompt", "ab", "--iterations", "2", "--depths", "none")
TOOLS = {GEMMAKE: ("gemmake", 7), GEMCHECK: ("gemcheck", 7), GEMBENCH: ("gembench", 8)}
HDF = [(GEMMAKE, "hdf", *words) for words in (
    ("--help",), ("list",), ("show", "rk3566"), ("check",), ("diff", "rk3566", "meter-256mb"),
    ("schema",), ("probe", "--no-bandwidth"),
)]  # fmt: skip
CASES = [
    (GEMMAKE, "--help"), (GEMMAKE, "--version"), (GEMMAKE, "engine", "--help"),
    (GEMMAKE, "advise", "--help"), (GEMMAKE, "advise", "1B", "--target", "rk3566"),
    (GEMCHECK, "--help"), (GEMCHECK, "--version"), (GEMCHECK, "inspect", "--help"),
    (GEMCHECK, GOOD), (GEMCHECK, "--json", GOOD), (GEMCHECK, "--run", GOOD),
    (GEMCHECK, "inspect", GOOD), (GEMCHECK, "--diff", GOOD, GOOD),
    (GEMBENCH, "--help"), (GEMBENCH, "--version"), (GEMBENCH, *BENCH), (GEMBENCH, *BENCH, "--json"),
    (PERPLEXITY, "--help"), *HDF,
]  # fmt: skip
IDS = [" ".join(Path(word).name for word in (case[0][-1], *case[1:])) for case in CASES]


def told_by(case: tuple[object, ...]) -> tuple[str, int]:
    """The command's name in its messages, and its exit code where output is not written."""
    name, code = TOOLS.get(case[0], ("perplexity", 7))  # type: ignore[call-overload]
    return f"{name} {case[1]}" if case[1] in ("hdf", "advise", "engine") else name, code


def run(case: tuple[object, ...], where: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """A command with a shell's redirection."""
    tool, *arguments = case
    command = [sys.executable, *tool, *map(str, arguments)]  # type: ignore[misc]
    return subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {where}', *command],
        cwd=ROOT,
        env=dict(os.environ, **env),
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("buffering", ["", "1"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_full_disk_behind_stdout(case: tuple[object, ...], buffering: str) -> None:
    name, code = told_by(case)
    done = run(case, ">/dev/full", PYTHONUNBUFFERED=buffering)
    assert done.returncode == code
    assert done.stderr.decode() == (
        f"{name}: standard output: No space left on device; free room on its disk\n"
    )


@pytest.mark.parametrize("buffering", ["", "1"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_reader_that_is_gone_gets_no_sentence(case: tuple[object, ...], buffering: str) -> None:
    """As behind `| head`; the exit code says that not all was written."""
    _, code = told_by(case)
    read, write = os.pipe()
    os.close(read)
    tool, *arguments = case
    done = subprocess.run(
        [sys.executable, *tool, *map(str, arguments)],  # type: ignore[misc]
        cwd=ROOT, env=dict(os.environ, PYTHONUNBUFFERED=buffering), stdout=write,
        stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (code, b"")


@pytest.mark.parametrize("where", [">&-", "2>/dev/full", "2>&-"])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_stream_that_was_never_open_changes_nothing(case: tuple[object, ...], where: str) -> None:
    done = run(case, where)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("tool", [GEMMAKE, GEMCHECK, GEMBENCH, PERPLEXITY])
@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-"])
def test_a_usage_error_keeps_its_code_without_stderr(tool: tuple[str, ...], where: str) -> None:
    assert run((tool, "--no-such-option"), where).returncode == 2


def test_a_failure_keeps_its_code_without_stderr(tmp_path: Path) -> None:
    (tmp_path / "x.gembin").write_bytes(b"no artifact")
    bad = str(tmp_path / "x.gembin")
    for where in ("2>/dev/full", "2>&-"):
        assert run((GEMBENCH, "--model", bad, "--prompt", "a"), where).returncode == 6
        assert run((GEMCHECK, bad), where).returncode == 6
        words = ("--model", bad, "--target", "generic-x86-64", "--output", f"{bad}.out")
        assert run((GEMMAKE, *words), where).returncode == 3
