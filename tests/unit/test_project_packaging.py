"""Packages for other builds say what the project says: version, licence, files."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

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
