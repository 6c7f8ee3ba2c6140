"""The offline bundle: what it holds, that damage is seen, that it installs without an index.

Packages other than the project's own are left out here: `make bundle` fetches them.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bundle


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "packages", lambda *_: None)
        return bundle.make(folder / "dist", "", [], None, folder / "scratch")


def test_every_file_is_listed_with_its_sum(made: Path) -> None:
    lines = (made / bundle.SUMS).read_text(encoding="utf-8").splitlines()
    listed = dict(reversed(line.split("  ", 1)) for line in lines)  # type: ignore[misc]
    files = {str(p.relative_to(made)) for p in made.rglob("*") if p.is_file()}
    assert set(listed) == files - {bundle.SUMS}
    for name, digest in listed.items():
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest
    for pattern in (
        r"wheels/gembin_toolchain-.*\.whl", r"sources/gembin_toolchain-.*\.tar\.gz",
        r"hdf/soc/tegra234\.toml", r"hdf/raspberry-pi-4\.toml", r"lock\.txt", r"install\.sh",
        r"LICENSE",
    ):  # fmt: skip
        assert any(re.fullmatch(pattern, name) for name in files), pattern


def test_damage_stops_the_installation(made: Path, tmp_path: Path) -> None:
    path = made / "lock.txt"
    before = path.read_bytes()
    path.write_bytes(before + b"\n")
    try:
        done = subprocess.run(
            [made / "install.sh", tmp_path / "env"], capture_output=True, text=True, check=False
        )
    finally:
        path.write_bytes(before)
    assert done.returncode != 0
    assert "lock.txt: FAILED" in done.stdout + done.stderr
    assert not (tmp_path / "env").exists()


def test_it_installs_without_an_index(made: Path, tmp_path: Path) -> None:
    script = made / "install.sh"
    text = script.read_text(encoding="utf-8")
    assert "--no-index" in text
    # The packages it needs are those of this environment, which a bundle would hold as wheels.
    text = text.replace("-m venv", "-m venv --system-site-packages").replace(
        "--no-index", "--no-index --no-deps --ignore-installed"
    )
    copy = made.parent / "install-here.sh"
    copy.write_text(text.replace('cd "$(dirname "$0")"', f'cd "{made}"'), encoding="utf-8")
    environment = {**os.environ, "PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        ["sh", copy, tmp_path / "env"], capture_output=True, text=True, check=False,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    code = "import gemmake.hdf as h; print(h.data_dir(), len(h.list_targets()))"
    packages = [path for path in sys.path if path.endswith("-packages")]
    where = subprocess.run(
        [tmp_path / "env" / "bin" / "python", "-c", code],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        env={"PYTHONPATH": os.pathsep.join(packages), "PATH": os.environ["PATH"]},
    ).stdout  # fmt: skip
    assert re.search(r"hdf_data \d\d", where), where
    version = subprocess.run(
        [tmp_path / "env" / "bin" / "gemrun", "--version"], capture_output=True, text=True
    )
    assert "0.1.0" in version.stdout
