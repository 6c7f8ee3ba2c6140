"""An installed engine, as other projects find it: CMake, pkg-config, one file, C++.

Each way builds examples/embed_c and replays the test vectors of a golden artifact.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gemmake import amalgamate
from gemmake.crossbuild import tool

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "embed_c"
ARTIFACT = ROOT / "tests" / "golden" / "v1.0" / "tiny-int4.gembin"
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror"]
PASSED = "ask: 2 test vectors passed\n"


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False,
        env=environment or None,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `cmake --install build/dev` makes, moved afterwards: a package names no folder."""
    folder = tmp_path_factory.mktemp("install")
    run(tool("cmake"), "--install", ROOT / "build/dev", "--component", "library",
        "--prefix", folder / "first")  # fmt: skip
    return (folder / "first").rename(folder / "moved")


def library_folder(prefix: Path) -> Path:
    return next(prefix.rglob("libgemrun.a")).parent


def test_package_names_no_folder_of_this_machine(prefix: Path) -> None:
    for path in [*prefix.rglob("*.cmake"), *prefix.rglob("*.pc")]:
        text = path.read_text(encoding="utf-8")
        assert str(ROOT) not in text, path.name
        assert "/usr/lib" not in text, path.name
        assert str(prefix.parent) not in text, path.name


def test_debian_packages_take_every_file(tmp_path: Path) -> None:
    """dh_missing ends the whole build for a file that no package installs."""
    for component in ("library", "cli"):
        run(tool("cmake"), "--install", ROOT / "build/dev", "--component", component,
            "--prefix", tmp_path / "usr")  # fmt: skip
    lists = (ROOT / "packaging" / "debian").glob("*.install")
    taken = [line for path in lists for line in path.read_text(encoding="utf-8").splitlines()]
    triple = ["usr/lib/*/", "usr/lib/"]  # build/dev has no folder of the processor
    found = {path for one in taken for path in tmp_path.glob(one.replace(*triple))}
    files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert len(files) > 5
    for path in files:
        assert found & {path, *path.parents}, path.relative_to(tmp_path)


def test_cmake_finds_it(prefix: Path, tmp_path: Path) -> None:
    run(tool("cmake"), "-S", EXAMPLE, "-B", tmp_path, "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DCMAKE_PREFIX_PATH={prefix}",
        f"-DCMAKE_C_FLAGS={' '.join(STRICT)}", f"-DCMAKE_CXX_FLAGS={' '.join(STRICT)}")  # fmt: skip
    run(tool("cmake"), "--build", tmp_path)
    for program in ("ask", "ask_static", "ask_cpp"):
        assert run(tmp_path / program, ARTIFACT) == PASSED
    assert "libgemrun.so.1" in run("readelf", "-d", tmp_path / "ask")
    assert "libgemrun" not in run("readelf", "-d", tmp_path / "ask_static")
    assert (tmp_path / "attached").exists()


@pytest.mark.parametrize("static", [False, True])
def test_pkg_config_finds_it(prefix: Path, tmp_path: Path, static: bool) -> None:
    folder = library_folder(prefix)
    environment = {"PKG_CONFIG_PATH": str(folder / "pkgconfig"), "PATH": "/usr/bin:/bin"}
    asked = ["pkg-config", "--cflags", "--libs", *(["--static"] if static else []), "gemrun"]
    flags = run(*asked, **environment).split()
    assert run("pkg-config", "--modversion", "gemrun", **environment) == "0.1.0\n"
    if static:
        flags = [f"{folder}/libgemrun.a" if flag == "-lgemrun" else flag for flag in flags]
    run("cc", *STRICT, EXAMPLE / "ask.c", *flags, f"-Wl,-rpath,{folder}", "-o", tmp_path / "ask")
    assert run(tmp_path / "ask", ARTIFACT) == PASSED


def readme_line(*words: str) -> str:
    """The line of the example's README that has all the words."""
    lines = (EXAMPLE / "README.md").read_text(encoding="utf-8").splitlines()
    (line,) = (one for one in lines if one.startswith("cc ") and all(w in one for w in words))
    return line


def test_the_shared_library_is_found_again_as_the_readme_builds_it(
    prefix: Path, tmp_path: Path
) -> None:
    line = readme_line("--libs gemrun").replace("-o ask", f"-o {tmp_path}/ask")
    done = subprocess.run(
        line, shell=True, capture_output=True, text=True, check=False, cwd=ROOT,
        env={"PKG_CONFIG_PATH": str(library_folder(prefix) / "pkgconfig"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert run(tmp_path / "ask", ARTIFACT, LC_ALL="C") == PASSED
    assert "libgemrun.so.1" in run("readelf", "-d", tmp_path / "ask")


def test_the_minimal_engine_runs_as_the_readme_builds_it(single: Path, tmp_path: Path) -> None:
    line = readme_line("-DGR_MINIMAL").split("#")[0].replace("-o ask", f"-o {tmp_path}/ask")
    line = line.replace("-Ione", f"-I{single}").replace("one/gemrun.c", f"{single}/gemrun.c")
    words = line.split()
    done = subprocess.run([*words, *STRICT], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert run(tmp_path / "ask", ARTIFACT) == PASSED
    assert "gemrun_generate" not in run("nm", tmp_path / "ask")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of gemrun.c, which the command writes."""
    folder = tmp_path_factory.mktemp("single")
    said = run(sys.executable, "-m", "gemmake.cli", "engine", "--single-file", "--output", folder)
    assert said.splitlines()[0] == str(folder / "gemrun.c")
    return folder


def test_one_file_needs_its_header_alone(single: Path, tmp_path: Path) -> None:
    text = (single / "gemrun.c").read_text(encoding="utf-8")
    assert set(re.findall(r'^\s*#\s*include\s+"(.*?)"', text, re.M)) == {"gemrun.h"}
    assert str(ROOT) not in text
    for name in ("gemrun.c", "gemrun.h"):
        shutil.copy(single / name, tmp_path / name)
    shutil.copy(EXAMPLE / "ask.c", tmp_path / "ask.c")
    run("cc", "-std=c11", "-O1", "-ffp-contract=off", *STRICT, f"-I{tmp_path}", tmp_path / "ask.c",
        tmp_path / "gemrun.c", "-pthread", "-o", tmp_path / "ask")  # fmt: skip
    assert run(tmp_path / "ask", ARTIFACT) == PASSED


@pytest.mark.parametrize("defines", [["-DGR_MINIMAL"], ["-DGR_PORT_BARE"],
                                     ["-DGR_MINIMAL", "-DGR_PORT_BARE"]])  # fmt: skip
def test_one_file_of_every_kind_is_the_same_code(
    single: Path, tmp_path: Path, defines: list[str]
) -> None:
    """A header that stands under a condition is there for the others too."""
    listings = []
    for source in (single / "gemrun.c", ROOT / "csrc" / "gemrun_one.c"):
        run("cc", "-std=c11", "-O0", "-ffp-contract=off", *STRICT, *defines, "-c", source,
            "-o", tmp_path / "one.o")  # fmt: skip
        listing = run("nm", "--defined-only", tmp_path / "one.o")
        listings.append(sorted(line.split()[-1] for line in listing.splitlines()))
    assert listings[0] == listings[1]
    assert "gemrun_open_mem" in listings[0]


def test_writing_twice_gives_the_same_bytes() -> None:
    assert amalgamate.text_of(ROOT / "csrc") == amalgamate.text_of(ROOT / "csrc")


CPP = r"""
#include <gemrun.hpp>
#include <cassert>
#include <cstring>
#include <iostream>
#include <utility>

int main(int, char **argv)
{
    try {
        gemrun::Context none("/none.gembin");
        return 1;
    } catch (const gemrun::Error &error) {
        assert(error.code() == GEMRUN_E_OPEN);
        assert(std::strstr(error.what(), "/none.gembin"));
    }
    gemrun::Context first(argv[1]);
    gemrun::Context model = std::move(first);
    assert(!first.get() && model.get());

    auto ids = model.tokenize("abc", 0);
    assert(!ids.empty() && model.detokenize(ids).find("abc") != std::string::npos);
    assert(model.prefill(ids) == static_cast<std::int32_t>(ids.size()));
    gemrun::Request request = model.request();
    request.settings.temperature = 0;
    assert(model.decode(model.sample(request)) == static_cast<std::int32_t>(ids.size()) + 1);
    model.reset();
    assert(model.stats().kv_used == 0 && model.info().vocab_rows > 0);

    request.settings.max_tokens = 4;
    request.settings.ignore_stop_ids = 1;
    std::string seen;
    request.on_text = [&](std::string_view piece) { seen += piece; return true; };
    const std::string answer = model.generate("abc", request);
    assert(answer == seen && answer == model.generate("abc", request));

    int pieces = 0;
    request.on_text = [&](std::string_view) { return ++pieces < 1; };
    model.generate("abc", request);
    assert(pieces == 1);
    request.on_text = [](std::string_view) -> bool { throw std::runtime_error("mine"); };
    try {
        model.generate("abc", request);
        return 1;
    } catch (const std::runtime_error &error) {
        assert(std::string(error.what()) == "mine");
    }
    try {
        model.prefill({-1});
        return 1;
    } catch (const gemrun::Error &error) {
        assert(error.code() < 0);
    }
    std::cout << "ok\n";
}
"""


def test_cpp_owns_converts_errors_and_lets_exceptions_through(prefix: Path, tmp_path: Path) -> None:
    source = tmp_path / "use.cpp"
    source.write_text(CPP)
    run("c++", "-std=c++17", *STRICT, "-fsanitize=address,undefined", "-g",
        f"-I{prefix / 'include'}", source, library_folder(prefix) / "libgemrun.a", "-pthread",
        "-o", tmp_path / "use")  # fmt: skip
    assert run(tmp_path / "use", ARTIFACT) == "ok\n"
