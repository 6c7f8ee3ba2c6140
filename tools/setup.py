"""Prepares the environment of make demo, make dev and make test; needs nothing but Python.

    python3 tools/setup.py --venv .venv demo|dev|test

System packages come from apt-get when this runs as root; otherwise the exact command is printed.
Python packages go into the virtual environment at the versions of requirements/lock.txt. A stamp in
the environment holds the hash of everything that decides its content: a second run does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock.txt"
SYSTEM = ROOT / "requirements" / "system.txt"
BUILD_TOOLS = ["cffi", "cmake", "ninja", "scikit-build-core", "setuptools"]
EXTRAS = {"demo": "compile", "dev": "dev", "test": "dev"}
STAGES = {"demo": {"build"}, "dev": {"build"}, "test": {"build", "test"}}


class SetupError(Exception):
    """The environment cannot be prepared; the text says what to do."""


def present(probe: str) -> bool:
    """True if what a line of requirements/system.txt looks for is here."""
    if probe == "python:venv":
        return importlib.util.find_spec("ensurepip") is not None
    if probe == "python:headers":
        return (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()
    if probe.startswith("/"):
        return Path(probe).exists()
    return shutil.which(probe) is not None


def missing_packages(stages: set[str]) -> list[str]:
    """Debian packages that the stages need and that are not here."""
    rows = [line.split() for line in SYSTEM.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row and not row[0].startswith("#")]
    missing = [package for stage, probe, package in rows if stage in stages and not present(probe)]
    return list(dict.fromkeys(missing))


def run(command: list[str], what: str) -> None:
    """Runs a command quietly and shows its output only if it fails."""
    print(f"setup: {what}", flush=True)
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive", PYTHONNOUSERSITE="1")
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        sys.stderr.buffer.write(done.stdout)
        raise SetupError(f"{what}: failed with exit code {done.returncode}; see the output above")


def system_packages(stages: set[str]) -> None:
    """Installs missing system packages as root, or says how to."""
    packages = missing_packages(stages)
    if not packages:
        return
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(
            f"system packages are missing: {', '.join(packages)}; "
            f"run: sudo apt-get update && sudo {' '.join(install)}"
        )
    run(["apt-get", "--quiet", "update"], "apt-get update")
    run(install, " ".join(install))


def wanted_hash(extra: str) -> str:
    """Hash of everything that decides what the environment contains."""
    digest = hashlib.sha256(f"{extra} {sys.version}".encode())
    for path in (LOCK, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def python_packages(venv: Path, extra: str) -> None:
    """Makes the environment and installs the project in editable form, unless the stamp fits."""
    stamp, python = venv / ".gembin-stamp", venv / "bin" / "python"
    found = stamp.read_text(encoding="utf-8").split() if stamp.is_file() else []
    accepted = {wanted_hash(extra), wanted_hash("dev")}  # dev holds all that compile holds
    if accepted & set(found) and python.exists():
        return
    if not python.exists():
        run([sys.executable, "-m", "venv", str(venv)], f"virtual environment {venv}")
    stamp.unlink(missing_ok=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--constraint", str(LOCK)]
    run([*pip, *BUILD_TOOLS], "build tools")
    project = f"{ROOT}[{extra}]"
    run([*pip, "--no-build-isolation", "--editable", project], f"gembin-toolchain[{extra}]")
    stamp.write_text(wanted_hash(extra) + "\n", encoding="utf-8")


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="prepare the environment")
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("profile", choices=sorted(EXTRAS))
    arguments = parser.parse_args()
    try:
        if sys.version_info < (3, 10):  # noqa: UP036  this runs under whatever python3 is
            raise SetupError("Python 3.10 or later is needed; run: make PYTHON=/path/to/python3.11")
        system_packages(STAGES[arguments.profile])
        python_packages(arguments.venv.absolute(), EXTRAS[arguments.profile])
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
