"""An offline bundle: everything that a build host without a network installs, and devices run.

    python tools/bundle.py --output dist [--extras compile,sign] [--target aarch64]...

    gembin-toolchain-VERSION/
      wheels/        the project and every package it needs here, at the versions of the lock
      sources/       the project as source
      engine/        the engine for each target: libraries, command, headers
      hdf/           the hardware descriptions
      install.sh     checks SHA256SUMS, then installs into a new environment without any index
      SHA256SUMS     of all files

The wheels fit the machine and the Python that made the bundle. Packages come from the index that
pip is configured for; with --wheels DIR from that folder and nowhere else.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gemmake.errors import GemError

if TYPE_CHECKING:
    from gemmake.crossbuild import Recipe

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock.txt"
NAME = "gembin-toolchain"
SUMS = "SHA256SUMS"
INSTALL = """#!/bin/sh
# install.sh DIR: gemmake, gemcheck, gemrun, gembench and gemctl into a new environment DIR, from
# the files of this bundle alone.
set -e
if [ $# -ne 1 ]; then
  echo "usage: install.sh DIR" >&2
  exit 2
fi
case "$1" in /*) to="$1" ;; *) to="$PWD/$1" ;; esac
cd "$(dirname "$0")"
sha256sum --quiet --check SHA256SUMS
${PYTHON:-python3} -m venv "$to"
# Whatever the caller's settings of pip and PYTHONPATH say.
PIP_CONFIG_FILE=/dev/null "$to/bin/python" -I -m pip --isolated install --quiet \\
  --disable-pip-version-check --no-index --find-links wheels "@WHAT@"
echo "installed; next: $to/bin/gemmake --help"
"""


class BundleError(Exception):
    """The bundle cannot be made; the text says what to do."""


def run(command: Sequence[str], what: str, **more: str) -> None:
    """Runs a command, with more in its environment, and shows its output only if it fails."""
    print(f"bundle: {what}", flush=True)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        env={**os.environ, **more},
    )  # fmt: skip
    if done.returncode:
        sys.stderr.buffer.write(done.stdout)
        raise BundleError(f"{what}: failed with exit code {done.returncode}; see the output above")


def project_wheel(wheels: Path, scratch: Path) -> Path:
    """The project's own wheel."""
    options = ["--no-build-isolation", "--no-deps", "--quiet", "--wheel-dir", str(wheels)]
    options += ["--config-settings", f"build-dir={scratch / 'wheel'}"]
    run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], "the project's wheel")
    return next(wheels.glob(f"{NAME.replace('-', '_')}-*.whl"))


def source_archive(folder: Path) -> None:
    """The project as source, by the build backend."""
    folder.mkdir()
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    print("bundle: the sources", flush=True)
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=ROOT, capture_output=True, check=False
    )
    if done.returncode:
        raise BundleError(f"the sources: {done.stderr.decode(errors='replace').strip()[-400:]}")


def packages(wheel: Path, extras: str, given: Path | None) -> None:
    """Wheels of what the project needs, beside its own."""
    pip, more = [sys.executable, "-m", "pip"], {}
    options = ["--constraint", str(LOCK), "--dest", str(wheel.parent)]
    if given is not None:  # pip's settings may name other folders
        pip, more = [*pip, "--isolated"], {"PIP_CONFIG_FILE": os.devnull}
        options += ["--no-index", "--find-links", str(given)]
    what = f"{wheel}[{extras}]" if extras else str(wheel)
    command = [*pip, "download", "--quiet", "--only-binary=:all:", *options, what]
    run(command, "packages of the lock", **more)


def recipes(targets: Sequence[str]) -> list[Recipe]:
    """How the engine is built for each target. Raises GemError where this machine cannot."""
    from gemmake import crossbuild

    found = crossbuild.recipes(crossbuild.Request(targets)) if targets else []
    for name in ("cmake", "ninja") if found else ():
        crossbuild.tool(name)
    return list(found)


def engines(folder: Path, todo: Iterable[Recipe]) -> None:
    """The engine for each target."""
    from gemmake import crossbuild

    def say(text: str) -> None:
        print(f"bundle: engine: {text}", flush=True)

    for recipe in todo:
        crossbuild.build(recipe, folder, say)


def write_sums(folder: Path) -> list[str]:
    """SHA256SUMS over all files, in the form of sha256sum; returns the names."""
    names = sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name != SUMS
    )
    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    return names


def make(
    output: Path, extras: str, targets: Sequence[str], given: Path | None, scratch: Path
) -> Path:
    """Make the bundle's folder; when it is whole it replaces an older one of the same version."""
    todo = recipes(targets)  # what cannot be built is refused before anything is fetched
    wheels = scratch / "wheels"
    wheels.mkdir(parents=True)
    wheel = project_wheel(wheels, scratch)
    version = wheel.name.split("-")[1]
    final, folder = output / f"{NAME}-{version}", scratch / "bundle"
    if final.exists() and not (final / SUMS).is_file():
        raise BundleError(f"{final}: is no bundle; choose another --output")
    folder.mkdir()
    packages(wheel, extras, given)
    shutil.move(wheels, folder / "wheels")
    source_archive(folder / "sources")
    if todo:
        engines(folder / "engine", todo)
    shutil.copytree(ROOT / "hdf", folder / "hdf")
    for name in ("README.md", "LICENSE", "requirements/lock.txt"):
        shutil.copy(ROOT / name, folder / Path(name).name)
    what = f"{NAME}[{extras}]" if extras else NAME
    (folder / "install.sh").write_text(INSTALL.replace("@WHAT@", what), encoding="utf-8")
    (folder / "install.sh").chmod(0o755)
    write_sums(folder)
    shutil.rmtree(final, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    shutil.move(folder, final)
    return final


def main() -> int:
    """Command line; see the module's text."""
    import tempfile

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--extras", default="compile,metrics,mqtt,sign")
    parser.add_argument("--target", action="append", dest="targets", help="default: all Linux ones")
    parser.add_argument("--no-engines", action="store_true")
    parser.add_argument("--wheels", type=Path, default=None)
    given = parser.parse_args()
    every = ["x86_64", "aarch64", "armv7", "riscv64"]
    targets = [] if given.no_engines else given.targets or every
    try:
        given.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".bundle-", dir=given.output) as scratch:
            folder = make(given.output, given.extras, targets, given.wheels, Path(scratch))
            archive = shutil.make_archive(str(folder), "tar", folder.parent, folder.name)
    except (BundleError, GemError) as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = error.filename or given.output
        print(f"bundle: {where}: {error.strerror}; choose another --output", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bundle: stopped by SIGINT; start it again", file=sys.stderr)
        return 130
    size = Path(archive).stat().st_size / 1e6
    print(f"bundle: {archive}: {size:.0f} MB; unpack it there and run install.sh DIR")
    return 0


if __name__ == "__main__":
    sys.exit(main())
