"""PROTOCOL.md names every method, parameter, error and event that there is, and no other method."""

from __future__ import annotations

import re
from pathlib import Path

from gemctl.api import METHODS
from gemctl.errors import EXIT_CODES

PACKAGE = Path(__file__).resolve().parents[2] / "gemctl"
TEXT = (PACKAGE / "PROTOCOL.md").read_text(encoding="utf-8")


def rows() -> dict[str, str]:
    """Method -> its row of the tables."""
    found = re.findall(r"^\| `([a-z_.]+)` \|(.*)$", TEXT, re.M)
    return dict(found)


def test_methods_and_parameters() -> None:
    assert set(rows()) == set(METHODS)
    for name, method in METHODS.items():
        for parameter in method.params.model_fields:
            assert f"`{parameter}`" in rows()[name], f"{name}: {parameter} is not described"


def test_read_and_write() -> None:
    reading = TEXT.split("### Read methods")[1].split("### Write methods")[0]
    for name, method in METHODS.items():
        assert (f"| `{name}` |" in reading) == (not method.write), name


def test_errors() -> None:
    found = dict(re.findall(r"^\| (\w+) \| .* \| (\d+) \|$", TEXT, re.M))
    assert {name: int(code) for name, code in found.items()} == EXIT_CODES


def test_events() -> None:
    listed = TEXT.split("### Events")[1].split("## The engine's channel")[0]
    source = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    published = set(re.findall(r'publish\(\s*"([a-z_.]+)"', source))
    missing = {kind for kind in published if f"`{kind}`" not in listed}
    assert not missing
