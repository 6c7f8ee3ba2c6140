"""The table of the classes of models is what its program makes of the boards and the planner."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gemmake.passes.predict import Range

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def model_classes() -> Iterator[ModuleType]:
    """benchmarks/model_classes.py."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("model_classes")
    finally:
        sys.path.remove(str(FOLDER))


def test_the_committed_table_is_current(model_classes: ModuleType) -> None:
    assert (FOLDER / "model_classes.md").read_text("utf-8") == model_classes.document()


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (Range(0.1, 0.3), "pass"),
        (Range(0.3, 0.38), "pass"),
        (Range(0.3, 0.39), "open"),
        (Range(0.39, 0.5), "fail"),
        (Range(0.1, float("inf")), "open"),
    ],
)
def test_verdicts(model_classes: ModuleType, found: Range, wanted: str) -> None:
    assert model_classes.verdict(found, 0.38) == wanted
