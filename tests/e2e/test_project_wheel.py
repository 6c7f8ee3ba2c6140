"""The wheel holds what a user needs, and a device runs it with its four packages alone."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEVICE = (
    *("cffi", "pycparser", "click", "msgpack", "pydantic", "pydantic_core", "annotated-types"),
    *("typing_extensions", "typing-inspection"),
)
SCRIPT = """
import sys
import gemrun
from gemrun.format import spec
from gemmake import hdf
import gemrun._engine
assert hdf.load_hdf("jetson-orin-nano").board == "orin-nano"
assert "site" not in sys.modules
for heavy in ("numpy", "torch", "tokenizers", "safetensors", "rich"):
    assert heavy not in sys.modules, heavy
    try:
        __import__(heavy)
    except ImportError:
        continue
    raise AssertionError(f"{heavy} can be imported: the test proves nothing")
print(gemrun.GemRunContext.__name__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-build-isolation", "--no-deps", "--quiet", "--no-cache-dir"]
    options += ["--config-settings", f"build-dir={folder / 'build'}", "--wheel-dir", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def device(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Import paths of a device: the unpacked wheel and links to the packages it may have."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    packages = tmp_path_factory.mktemp("packages")
    for name in DEVICE:
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or () if ".." not in file.parts}:
            link = packages / top
            if not link.exists():
                link.symlink_to(Path(str(installed.locate_file(top))))
    return [unpacked, packages]


def test_wheel_holds_what_is_needed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for needed in (
        "gemrun/_engine.abi3.so",
        "gemmake/_helper.abi3.so",
        "gemmake/data/calibration.txt",
        "gemmake/hdf_data/jetson-orin-nano.toml",
        "gemmake/hdf_data/soc/tegra234.toml",
        "gemmake/py.typed",
        "gemmake/engine_source/CMakeLists.txt",
        "gemmake/engine_source/cmake/zig.cmake",
        "gemmake/engine_source/csrc/kernels.list",
        "gembin_toolchain-0.1.0.data/scripts/gemrun",
        "gembin_toolchain-0.1.0.dist-info/licenses/LICENSE",
    ):
        assert needed in names, f"{needed} is missing"
    strange = [n for n in names if n.startswith(("tests/", "csrc/", "tools/")) or "_build.py" in n]
    assert not strange
    assert "-cp310-abi3-" in wheel.name


def test_device_needs_no_compile_host_packages(device: list[Path]) -> None:
    code = f"import sys\nsys.path[:0] = {[str(path) for path in device]!r}\n{SCRIPT}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "GemRunContext"
