"""csrc/FORMAT.md against the code: its example, its table of checks, its sections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gemrun.format import sizes, spec
from gemrun.format.codes import Code

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "csrc/FORMAT.md").read_text(encoding="utf-8")
NORMATIVE = TEXT.split("# Commentary")[0]


def test_the_example_is_the_golden_file() -> None:
    image = (ROOT / "tests/golden/v1.0/tiny-q4raw.gembin").read_bytes()
    rows = re.findall(r"^([0-9a-f]{6})  ((?:[0-9a-f]{2} ){15}[0-9a-f]{2})", TEXT, re.M)
    assert len(rows) > 50
    for at, listed in rows:
        offset = int(at, 16)
        assert image[offset : offset + 16] == bytes.fromhex(listed), at


def test_checks_name_every_code_that_a_reader_gives() -> None:
    named = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", NORMATIVE.split("## 3.")[1]))
    missing = {c.name for c in Code} - {"OK", "OPEN"} - named
    assert missing == set()


def test_every_section_has_a_row() -> None:
    for name in spec.SECTIONS:
        assert re.search(rf"^\| {name} \|", NORMATIVE, re.M), name


@pytest.mark.parametrize("kind", spec.Buffer)
def test_every_buffer_has_its_size_and_lifetime(kind: spec.Buffer) -> None:
    row = re.search(rf"^\| {kind.name} \|.*\| (\w+) \| (\w+) \|$", NORMATIVE, re.M)
    assert row, kind.name
    first, last = sizes.LIFETIMES[kind]
    assert row.groups() == (first.name, last.name)


def test_struct_names_of_the_text_exist() -> None:
    header = (ROOT / "csrc/gembin.h").read_text()
    for name in set(re.findall(r"\bgb_[a-z]+\b", NORMATIVE)):
        assert name in header, name
    for name in set(re.findall(r"\bGB_[A-Z0-9_]+\b", NORMATIVE)) - {"GB_MAX_", "GB_KV_"}:
        assert name.rstrip("_") in header, name
