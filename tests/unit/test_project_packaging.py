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


def test_every_row_has_a_log_that_the_table_links(verify: ModuleType) -> None:
    linked = set(re.findall(r"\(logs/(\S+)\.txt\)", text("README.md")))
    assert linked == set(verify.rows()) == {path.stem for path in verify.LOGS.iterdir()}
    for row in verify.rows():
        lines = text("logs", f"{row}.txt").splitlines()
        assert len(lines) <= 60, row
        assert lines[0] == f"$ python packaging/verify.py {row}"
        assert lines[-1] == "exit 0", row


# Run by hand only: its row says when, and that no log was kept.
WITHOUT_LOG = {"Zephyr"}


def logs_of_the_table() -> dict[str, str]:
    """Rows of the table of packaging/README.md: name, and the cell of the log."""
    table = re.findall(r"^\| (.+) \|$", text("README.md").split("\n\n")[1], re.M)[1:]
    cells = [row.split(" | ") for row in table]
    assert all(len(row) == 5 for row in cells)
    return {re.sub(r"\[(.+)\]\(.+\)", r"\1", row[0]): row[-1] for row in cells}


def test_every_row_of_the_table_has_a_log_that_ends_well() -> None:
    rows = logs_of_the_table()
    assert {name for name, log in rows.items() if log == "none kept"} == WITHOUT_LOG
    for name, log in rows.items():
        link = re.fullmatch(r"\[.+\]\((.+)\)", log)
        assert (link is None) == (name in WITHOUT_LOG), name
        if link:
            path = PACKAGING / link[1]
            assert path.is_file(), name
            last = path.read_text(encoding="utf-8").splitlines()[-1]
            assert path.parent.name != "logs" or last == "exit 0", name


def test_logs_name_no_folder_of_a_machine(verify: ModuleType) -> None:
    for path in verify.LOGS.iterdir():
        found = re.findall(
            r"(?<![\w$}.~/])/(?:home|root|tmp|work|var)/\S*", path.read_text("utf-8")
        )
        assert not found, path.name


def test_logs_are_of_the_pinned_projects(verify: ModuleType) -> None:
    wanted = {name for row in verify.rows() for name in verify.stated(row, "wants")}
    assert wanted == set(verify.pins())
    for row in verify.rows():
        for name in verify.stated(row, "wants"):
            assert f"\n{name} {verify.pins()[name][0]} (" in text("logs", f"{row}.txt")


def test_a_log_is_cut_and_names_no_folder(verify: ModuleType, tmp_path: Path) -> None:
    said = "\n".join(f"\x1b[31mline {n} in {tmp_path}/x of {ROOT}\x1b[0m" for n in range(90))
    lines = verify.clean(said, tmp_path)
    assert lines[0] == ".. 44 lines .."
    assert lines[-1] == "line 89 in $WORK/x of $ROOT"
    assert len(lines) + 13 <= 60
    assert verify.clean("x" * 500, tmp_path) == [f"{'x' * 160} .."]
