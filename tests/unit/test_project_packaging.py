"""Packages for other builds say what the project says: version, licence, files."""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import gemmake

ROOT = Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "packaging"
RECIPES = PACKAGING / "yocto" / "meta-gemrun" / "recipes-gemrun" / "gemrun"


def text(*parts: str) -> str:
    return PACKAGING.joinpath(*parts).read_text(encoding="utf-8")


def test_one_version() -> None:
    version = gemmake.__version__
    assert text("debian", "changelog").startswith(f"gemrun ({version}-1) ")
    assert f"\nGEMRUN_VERSION = {version}\n" in text("buildroot", "package", "gemrun", "gemrun.mk")
    assert [path.name for path in RECIPES.iterdir()] == [f"gemrun_{version}.bb"]


def test_licence_of_the_recipe() -> None:
    recipe = next(RECIPES.glob("*.bb")).read_text(encoding="utf-8")
    licence = hashlib.md5((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert f"md5={licence}" in recipe


def test_soname_of_the_packages() -> None:
    number = re.search(r"GEMRUN_ABI_VERSION (\d+)", (ROOT / "csrc/gemrun.h").read_text())
    assert number
    assert f"Package: libgemrun{number[1]}\n" in text("debian", "control")
    assert text("debian", f"libgemrun{number[1]}.install").endswith(f"libgemrun.so.{number[1]}\n")


def test_options_that_packages_set_exist() -> None:
    known = set(
        re.findall(r"^(?:option\(|set\()(GEM_\w+)", (ROOT / "CMakeLists.txt").read_text(), re.M)
    )
    used: set[str] = set()
    for path in PACKAGING.rglob("*"):
        if path.is_file():
            used |= set(re.findall(r"-D(GEM_\w+)", path.read_text(encoding="utf-8")))
    assert used
    assert used <= known


def test_model_class_knows_the_first_bytes() -> None:
    first = (ROOT / "tests/golden/v1.0/tiny-int4.gembin").read_bytes()[:4]
    assert f"!= {first.hex()} ]" in text("yocto", "meta-gemrun", "classes", "gembin-model.bbclass")


def test_zephyr_module_names_files_that_exist() -> None:
    module = (ROOT / "zephyr" / "module.yml").read_text(encoding="utf-8")
    for name in ("zephyr/Kconfig", "examples/zephyr"):
        assert name in module
        assert (ROOT / name).exists()
    sources = re.findall(r"\.\./(csrc/\S+?\.c)\b", (ROOT / "zephyr/CMakeLists.txt").read_text())
    assert sources
    assert all((ROOT / name).is_file() for name in sources)


@pytest.fixture(scope="module")
def verify() -> Iterator[ModuleType]:
    """packaging/verify.py."""
    sys.path.insert(0, str(PACKAGING))
    try:
        yield importlib.import_module("verify")
    finally:
        sys.path.remove(str(PACKAGING))


# They need a project of others, which somebody brings: their logs begin with what was typed.
BY_HAND = {"buildroot", "freertos", "yocto", "zephyr"}


def test_every_log_is_linked_and_says_how_it_was_made(verify: ModuleType) -> None:
    linked = set(re.findall(r"\(logs/(\S+)\.txt\)", text("README.md")))
    assert linked == {*verify.rows(), *BY_HAND} == {path.stem for path in verify.LOGS.iterdir()}
    for row in linked:
        lines = text("logs", f"{row}.txt").splitlines()
        assert len(lines) <= 60, row
        assert lines[-1] == "exit 0", row
        if row in BY_HAND:
            assert lines[0].startswith("by hand"), row
            assert lines[1].startswith("$ "), row
        else:
            assert lines[0] == f"$ python packaging/verify.py {row}"


def test_every_row_of_the_table_links_a_log() -> None:
    table = re.findall(r"^\| (.+) \|$", text("README.md").split("\n\n")[1], re.M)[1:]
    assert table
    for row in table:
        cells = row.split(" | ")
        assert len(cells) == 5, row
        link = re.fullmatch(r"\[.+\]\((.+)\)", cells[-1])
        assert link, row
        assert (PACKAGING / link[1]).is_file(), row
        name = (PACKAGING / link[1]).stem
        assert (", by hand" in cells[2]) == (name in BY_HAND), row


def test_logs_name_no_folder_of_a_machine(verify: ModuleType) -> None:
    for path in verify.LOGS.iterdir():
        found = re.findall(
            r"(?<![\w$}.~/])/(?:home|root|tmp|work|var)/\S*", path.read_text("utf-8")
        )
        assert not found, path.name


def test_a_log_is_cut_and_names_no_folder(verify: ModuleType, tmp_path: Path) -> None:
    said = "\n".join(f"\x1b[31mline {n} in {tmp_path}/x of {ROOT}\x1b[0m" for n in range(90))
    lines = verify.clean(said, tmp_path)
    assert lines[0] == ".. 44 lines .."
    assert lines[-1] == "line 89 in $WORK/x of $ROOT"
    assert len(lines) + 13 <= 60
    assert verify.clean("x" * 500, tmp_path) == [f"{'x' * 160} .."]
