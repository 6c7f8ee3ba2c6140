"""The table of every build: what this machine cannot run keeps its row, and its digest counts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def targets() -> Iterator[ModuleType]:
    """benchmarks/targets.py."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("targets")
    finally:
        sys.path.remove(str(FOLDER))


def rows(targets: ModuleType) -> list[list[str]]:
    text = targets.TABLE.read_text("utf-8")
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line] for line in lines if len(line) == 5]
    return [row for row in found if row[0] != "build"]


def test_an_earlier_row_comes_back_as_it_was(targets: ModuleType) -> None:
    kept = [row for row in rows(targets) if row[3] == targets.EARLIER]
    for row in kept:
        found = targets.earlier(targets.TABLE.read_text("utf-8"), row[0], row[2])
        assert targets.table([found])[-1] == f"| {' | '.join(row)} |"
    assert targets.earlier("no table", "x86_64-linux-gnu", "avx-vnni") is None


def test_the_committed_table_has_every_kernel_and_one_digest(targets: ModuleType) -> None:
    found = rows(targets)
    assert len({row[4] for row in found}) == 1
    for name in ("x86_64-linux-gnu", "x86_64-linux-musl"):
        kernels = {row[2] for row in found if row[0] == name}
        assert {kind for kind, *_ in targets.CORES["x86_64"]} | dict(
            targets.NATIVE
        ).keys() == kernels
