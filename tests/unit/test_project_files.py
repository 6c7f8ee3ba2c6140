"""The project's own files: versions in one place, nothing of one machine, the front page."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = {
    canonicalize_name(name): version
    for name, _, version in (
        line.partition("==")
        for line in (ROOT / "requirements" / "lock.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    )
}
# Folders of machines, and hosts of registries; written in pieces, so that this file passes itself.
MACHINE = ["/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/op" + "t/wheels", "/Use" + "rs/"]
HOSTS = [
    *("pypi." + "org", "pythonhosted." + "org", "registry.npm" + "js", "npmjs." + "org"),
    *("deb." + "debian.org", "download.py" + "torch", "hugging" + "face.co", "file" + "://"),
]
PIN = re.compile(r"\b[A-Za-z][A-Za-z0-9._-]*==\d+[\d.]*")


def tracked() -> list[Path]:
    """Files under version control, or all of the tree where there is none."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    if listing.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listing.stdout.decode().split("\0") if name]
    return [path for path in (ROOT / name for name in names) if path.is_file()]


def texts() -> list[tuple[str, str]]:
    """(name, text) of every tracked file that is text."""
    found = []
    for path in tracked():
        data = path.read_bytes()
        if b"\0" not in data[:4096]:
            found.append((str(path.relative_to(ROOT)), data.decode("utf-8", "replace")))
    return found


def test_no_path_or_host_of_a_machine() -> None:
    for name, text in texts():
        recipe = name.endswith(".bb")  # Yocto's word for the recipe's own folder
        for word in (*MACHINE, *(HOSTS[:-1] if recipe else HOSTS)):
            assert word not in text, f"{name}: contains '{word}'"


def requirements() -> list[Requirement]:
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(text) for group in groups for text in group]


def test_lock_lies_inside_the_ranges() -> None:
    for need in requirements():
        name = canonicalize_name(need.name)
        if name in ("gembin-toolchain", "torch"):
            continue
        assert name in LOCK, f"{name}: not in requirements/lock.txt"
        assert need.specifier.contains(LOCK[name]), f"{need}: the lock has {LOCK[name]}"


def test_torch_is_exact_and_in_one_place() -> None:
    torch = [need for need in requirements() if need.name == "torch"]
    assert [str(need.specifier) for need in torch] == ["==2.13.0"]
    assert "torch" not in LOCK


def test_versions_stand_in_one_place() -> None:
    for name, text in texts():
        if name == "requirements/lock.txt" or name.startswith("tests/"):
            continue
        pins = [pin for pin in PIN.findall(text) if not pin.startswith("torch=" + "=")]
        assert not pins, f"{name}: pins {pins[0]}; versions stand in requirements/"
    for name, text in texts():
        if name != "pyproject.toml":
            assert "torch=" + "=" not in text, f"{name}: PyTorch's version stands in pyproject.toml"


def test_device_installs_four_packages() -> None:
    names = {Requirement(text).name for text in PROJECT["project"]["dependencies"]}
    assert names - {"tomli"} == {"cffi", "click", "msgpack", "pydantic"}


def test_versions_of_the_project_agree() -> None:
    version = PROJECT["project"]["version"]
    header = (ROOT / "csrc" / "gemrun.h").read_text(encoding="utf-8")
    assert f'#define GEMRUN_VERSION "{version}"' in header
    import gemmake

    assert gemmake.__version__ == version


def test_readme_has_exactly_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```sh\n(.*?)```", text, re.S)
    assert block, "README.md: no shell block"
    commands = [line.split("#")[0].strip() for line in block[1].splitlines() if line.strip()]
    assert commands == ["make demo", "make test"]


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run is not executable"
    assert script.read_text(encoding="utf-8").rstrip().endswith("exec make test")


def test_licence_is_apache() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_calibration_text_is_the_stated_one() -> None:
    data = (ROOT / "gemmake" / "data" / "calibration.txt").read_bytes()
    assert 64_000 <= len(data) <= 128_000
    data.decode("utf-8")
    assert data.endswith(b".\n")
    assert b"\t" not in data
    assert b"\r" not in data


def test_calibration_text_is_not_the_evaluation_text(handbook_en: str) -> None:
    """No run of eight words is in both."""
    text = (ROOT / "gemmake" / "data" / "calibration.txt").read_text(encoding="utf-8")
    words, other = text.lower().split(), handbook_en.lower().split()
    runs = {tuple(other[i : i + 8]) for i in range(len(other) - 7)}
    common = [" ".join(words[i : i + 8]) for i in range(len(words) - 7)]
    shared = [run for run in common if tuple(run.split()) in runs]
    assert not shared, f"shared with the handbook: {shared[:3]}"


def test_handbook_is_the_measured_text(handbook_en: str) -> None:
    assert len(handbook_en) == 950_512
    assert handbook_en.count("\n\n") + 1 == 2843
    assert handbook_en.startswith("This book is available under the terms of two licenses")
