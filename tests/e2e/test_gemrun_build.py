"""The engine's other ways to be built: one file, cffi's source, ThreadSanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gemrun import _build

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
KERNELS = "gr_kern_ref.c"  # compiled once per instruction set
HEADERS = [
    *("gemrun.h", "gemrun_batch.h", "gemrun_board.h", "gemrun_control.h", "gemrun_session.h"),
    "gemrun_thermal.h",
]
CC = os.environ.get("CC", "cc")
STRICT = ("-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")


def compile_with(*arguments: str | Path) -> None:
    command = [CC, *STRICT, "-ffp-contract=off", f"-I{CSRC}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_every_file_is_in_every_list() -> None:
    kernels = {p.name for p in CSRC.glob("gr_kern_*.c")} - {KERNELS}
    files = {p.name for p in CSRC.glob("gr_*.c")} - kernels
    one = set(re.findall(r'#include "(gr_\w+\.c)"', (CSRC / "gemrun_one.c").read_text()))
    assert one == files


def test_one_file_is_the_whole_engine(tmp_path: Path) -> None:
    main = tmp_path / "main.c"
    main.write_text(
        '#include "gemrun.h"\n#include <stdio.h>\n'
        "int main(int n, char **v)\n{\n"
        "    gemrun_context_t *c = gemrun_init(n > 1 ? v[1] : 0);\n"
        "    puts(c ? gemrun_version() : gemrun_last_error());\n"
        "    gemrun_destroy(c);\n    return 0;\n}\n"
    )
    program = tmp_path / "one"
    compile_with(CSRC / "gemrun_one.c", main, "-o", program, "-pthread")
    done = subprocess.run([program, "/none"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("/none: cannot be opened (No such file or directory)")


@pytest.mark.parametrize("header", HEADERS)
def test_header_is_fit_for_cpp(header: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "use.cc"
    source.write_text(
        f'#include "{header}"\nint main() {{ return gemrun_version() == nullptr; }}\n'
    )
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    subprocess.run([*command, "-c", source, "-o", tmp_path / "use.o"], check=True)


@pytest.mark.parametrize("header", HEADERS)
def test_module_declares_the_whole_header(header: str, tmp_path: Path) -> None:
    _build.emit(tmp_path / "engine.c")
    text = (tmp_path / "engine.c").read_text()
    names = re.findall(r"^GEMRUN_API[^;(]*?(gemrun_\w+)\(", (CSRC / header).read_text(), re.M)
    assert names
    for name in names:
        assert f"{name}(" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_api", "test_batch", "test_handle", "test_session"])
def test_threads_do_not_race(name: str, tmp_path: Path) -> None:
    """The C tests of the interface under ThreadSanitizer: no report ends them."""
    sources = [p for p in CSRC.glob("gr_*.c") if not p.name.startswith(("gr_kern_", "gr_min_"))]
    sources += CSRC.glob("gs_*.c") if name != "test_api" else ()
    program = tmp_path / name
    flags = ("-fsanitize=thread", "-g", "-DGR_BASE_ONLY", "-DGR_KERN_SUFFIX=base", "-pthread")
    test = ROOT / "tests" / "c" / f"{name}.c"
    compile_with(*flags, *sources, CSRC / KERNELS, test, "-o", program, "-lm")
    done = subprocess.run(
        [program], capture_output=True, text=True, check=False, timeout=300, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, f"{name}: ok\n"), done.stderr
