"""Every attack script: refused by both readers with the code it names, and by gemcheck."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from attacks.attacklib import good, outcome
from gemmake.check.rules import check_file
from gemrun.format.codes import Code
from hostile.format_engine import EngineReader

ATTACKS = Path(__file__).resolve().parents[1] / "attacks"
SCRIPTS = sorted(p.stem for p in ATTACKS.glob("*.py") if p.stem != "attacklib")
PYTHON_ONLY = {Code.SHA256, Code.ROOT, Code.MANIFEST}


@pytest.fixture(scope="module")
def engine() -> EngineReader:
    return EngineReader()


@pytest.mark.parametrize("script", SCRIPTS)
def test_attack_is_refused(engine: EngineReader, script: str, tmp_path: Path) -> None:
    attempts = list(importlib.import_module(f"attacks.{script}").attack(good()))
    assert attempts
    for attempt in attempts:
        assert outcome(attempt.image) == attempt.code, attempt.what
        wanted = 0 if attempt.code in PYTHON_ONLY else attempt.code
        assert engine.status(attempt.image) == wanted, attempt.what
    (tmp_path / "last").write_bytes(attempts[-1].image)
    assert check_file(tmp_path / "last").exit_code == 6
    print(f"\n{script}: {len(attempts)} attempts refused")


def test_every_script_is_explained() -> None:
    text = (ATTACKS / "README.md").read_text()
    assert [s for s in SCRIPTS if f"| {s} |" not in text] == []
