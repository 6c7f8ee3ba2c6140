"""The offline bundle: what it holds, that damage is seen, that it installs without an index.

Packages other than the project's own are left out here: `make bundle` fetches them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
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


def other_wheel(folder: Path, name: str, version: str, *needs: str) -> Path:
    """A wheel of somebody else's that holds nothing."""
    folder.mkdir(exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    facts = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{info}/METADATA", facts + "".join(f"Requires-Dist: {n}\n" for n in needs)
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def settings_of_pip(elsewhere: Path) -> dict[str, str]:
    """Environment and settings that name another folder of packages."""
    file = elsewhere.parent / "pip.conf"
    file.write_text(f"[global]\nfind-links = {elsewhere}\n")
    return {"PIP_CONFIG_FILE": str(file), "PIP_FIND_LINKS": str(elsewhere)}


def test_given_wheels_are_all_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = other_wheel(tmp_path / "wheels", "one", "1.0", "two")
    other_wheel(tmp_path / "given", "two", "1.0")
    newer = other_wheel(tmp_path / "elsewhere", "two", "2.0")
    for name, value in settings_of_pip(newer.parent).items():
        monkeypatch.setenv(name, value)
    bundle.packages(wheel, "", tmp_path / "given")
    assert {path.name[:7] for path in wheel.parent.iterdir()} == {"one-1.0", "two-1.0"}


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
    newer = other_wheel(tmp_path / "elsewhere", "gembin_toolchain", "9.0")
    environment = {**os.environ, "PYTHON": sys.executable, **settings_of_pip(newer.parent)}
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


def bundled(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(bundle.__file__)), *map(str, words)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_what_cannot_be_built_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    done = bundled("--output", tmp_path / "dist", "--target", "z80")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("bundle: ")
    assert len(done.stderr.splitlines()) == 1
    assert list((tmp_path / "dist").iterdir()) == []


def test_an_output_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = bundled("--output", tmp_path / "file", "--no-engines")
    assert done.returncode == 1
    assert done.stderr == f"bundle: {tmp_path}/file: File exists; choose another --output\n"


def test_a_failure_keeps_the_older_bundle_and_stops_no_later_one(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def project_wheel(wheels: Path, _scratch: Path) -> Path:
        return Path(shutil.copy(next((made / "wheels").glob("gembin*.whl")), wheels))

    monkeypatch.setattr(bundle, "project_wheel", project_wheel)
    monkeypatch.setattr(bundle, "source_archive", lambda folder: folder.mkdir())
    monkeypatch.setattr(bundle, "packages", lambda *_: None)
    first = bundle.make(tmp_path / "dist", "", [], None, tmp_path / "one")
    before = (first / bundle.SUMS).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(bundle, "packages", refuse)
        with pytest.raises(bundle.BundleError):
            bundle.make(tmp_path / "dist", "", [], None, tmp_path / "two")
    assert [path.name for path in (tmp_path / "dist").iterdir()] == [first.name]
    assert (first / bundle.SUMS).read_bytes() == before
    assert bundle.make(tmp_path / "dist", "", [], None, tmp_path / "three") == first


def refuse(*_: object) -> None:
    raise bundle.BundleError("packages of the lock: no network")
