"""Installed commands, stopped while Python still imports them: no traceback.

The signal comes from a module that is imported early and sends it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = re.findall(
    r'^(gem(?:make|check|bench|ctl)) = "([\w.]+):(\w+)"$',
    (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
    re.M,
)
STOPS = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


def run(module: str, name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As the script of an installed command; modules in `folder` come before all others."""
    script = f"import sys; from {module} import {name}; sys.exit({name}())"
    return subprocess.run(
        [sys.executable, "-c", script, "--version"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize("early", ["click", "msgpack"])
@pytest.mark.parametrize(("tool", "module", "name"), COMMANDS)
def test_ctrl_c_while_modules_are_imported(
    tool: str, module: str, name: str, early: str, tmp_path: Path
) -> None:
    assert run(module, name, tmp_path).returncode == 0
    (tmp_path / f"{early}.py").write_text(STOPS)
    done = run(module, name, tmp_path)
    if "SIGINT" not in done.stderr and done.returncode == 0:
        pytest.skip(f"{tool} --version does not import {early}")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == f"{tool}: stopped by SIGINT; start it again\n"


def test_all_commands_are_here() -> None:
    assert [tool for tool, _, _ in COMMANDS] == ["gemmake", "gemcheck", "gembench", "gemctl"]
