"""The CI examples: their YAML, and the commands of their jobs on a tiny model."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemmake.hdf import load_hdf

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ci"
OPTIONS = "--quantization int8 --kv-cache-size 128 --effort fast"
COMMANDS = {"gemmake": "gemmake.cli", "gemcheck": "gemmake.check.cli"}


def loaded(name: str) -> dict[str, Any]:
    table = yaml.safe_load((EXAMPLE / name).read_text(encoding="utf-8"))
    assert isinstance(table, dict)
    return table


def github() -> tuple[list[str], list[str], list[str]]:
    """(boards, commands of a board's job, commands of the table's)."""
    jobs = loaded("github-actions.yml")["jobs"]
    assert jobs["table"]["needs"] == "compile"
    boards = jobs["compile"]["strategy"]["matrix"]["board"]
    runs = [[s["run"] for s in jobs[j]["steps"] if "run" in s] for j in ("compile", "table")]
    return boards, *runs


def gitlab() -> tuple[list[str], list[str], list[str]]:
    """The same of the other file."""
    table = loaded("gitlab-ci.yml")
    (matrix,) = table["compile"]["parallel"]["matrix"]
    assert [table[j]["stage"] for j in ("compile", "table")] == table["stages"]
    runs = [table[j]["before_script"] + table[j]["script"] for j in ("compile", "table")]
    return matrix["BOARD"], *runs


@pytest.fixture
def shell(tmp_path: Path) -> Callable[[str, dict[str, str]], str]:
    """Run a job's command in a folder with sizes.py; what it prints."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, module in COMMANDS.items():
        (tools / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        (tools / name).chmod(0o755)
    (tools / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tools / "python").chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(EXAMPLE / "sizes.py", work)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    root = str(EXAMPLE.parents[1])

    def run(command: str, variables: dict[str, str]) -> str:
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", command],
            cwd=work, env={**os.environ, "PATH": path, "PYTHONPATH": root, **variables},
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    return run


def test_both_files_build_the_same_for_boards_that_there_are() -> None:
    boards, jobs, _ = github()
    assert (boards, [c for c in jobs if "pip" not in c]) == (
        gitlab()[0],
        [c for c in gitlab()[1] if "pip" not in c],
    )
    assert len(boards) == len(set(boards)) >= 4
    for board in boards:
        assert load_hdf(board).board


@pytest.mark.parametrize("jobs", [github, gitlab])
def test_the_jobs_of_a_tiny_model(
    jobs: Callable[[], tuple[list[str], list[str], list[str]]],
    tiny_checkpoint: Callable[..., Path],
    shell: Callable[[str, dict[str, str]], str],
) -> None:
    boards, compile_job, table_job = jobs()
    model = tiny_checkpoint("llama3")
    common = {"MODEL": str(model), "OPTIONS": OPTIONS}
    for board in boards[:2]:
        told = [shell(c, {**common, "BOARD": board}) for c in compile_job if "pip" not in c]
        assert "SUCCESS: Deterministic memory layout verified." in told[0]
        assert "replayed, same answer" in told[1]
    (sizes,) = [shell(c, common) for c in table_job if "pip" not in c]
    rows = [line for line in sizes.splitlines() if ".gembin" in line]
    assert [row.split(" | ")[1] for row in rows] == [
        f"{model.name}-{board}.gembin" for board in sorted(boards[:2])
    ]
    assert all(re.search(r"\| [0-9a-f]{16} \|$", row) for row in rows)


def test_what_is_installed_can_compile() -> None:
    tables = (loaded("github-actions.yml")["env"], loaded("gitlab-ci.yml")["variables"])
    assert {table["GEMBIN"] for table in tables} == {"./toolchain[compile]"}
    assert len({table["OPTIONS"] for table in tables}) == 1
    text = (EXAMPLE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r"^compile = \[[^]]*\"tokenizers", text, re.M)
