"""make demo says at once what it does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import demo


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("gemma", "did you mean MODEL=gemma3-270m?"),
        ("SmolLM2", "did you mean MODEL=smollm2-135m?"),
        ("qqq", "set MODEL to one of them"),
        ("", "set MODEL to one of them"),
        ('it\'s $(x) "y"', "set MODEL to one of them"),
    ],
)
def test_an_unknown_model_is_named_before_any_work(root: Path, name: str, remedy: str) -> None:
    done = subprocess.run(
        ["make", "--silent", "demo", f"PYTHON={sys.executable}", "VENV=build/no-such"],
        cwd=root,
        env=dict(os.environ, MODEL=name),
        capture_output=True,
        text=True,
        check=False,
    )
    known = " and ".join(sorted(demo.DEMOS))
    assert (
        done.stderr.splitlines()[0] == f"demo: MODEL={name}: unknown, there are {known}; {remedy}"
    )
    assert (done.stdout, done.returncode) == ("", 2)
    assert not (root / "build" / "no-such").exists()


@pytest.mark.parametrize("name", sorted(demo.DEMOS))
def test_every_model_of_the_demo_is_known(name: str) -> None:
    assert demo.check(name, "x86_64") == "generic-x86-64"
    with pytest.raises(SystemExit, match="sparc: no generic target"):
        demo.check(name, "sparc")
