"""Builds the engine for other machines: libraries, command and headers, by CMake.

    for recipe in recipes(Request(...)):
        built = build(recipe, output, say)

Without a compiler of yours it is zig's (`ziglang`), which brings glibc 2.28 and musl for every
processor; CROSS_COMPILE and TARGET_ARCH in the environment choose another, as they do for a kernel.
What is built depends on sources, compiler and options alone: two builds give the same bytes.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gemmake import __version__, elf
from gemmake.amalgamate import Say, check_folder, foreign, into
from gemmake.errors import TargetError, UsageError
from gemmake.failures import HostError, Stopped
from gemmake.hdf import list_targets, load_hdf

GLIBC = "2.28"
LIBCS = ("glibc", "musl")
TRIPLES: Mapping[str, tuple[str, str]] = {  # of glibc, of musl
    "x86_64": (f"x86_64-linux-gnu.{GLIBC}", "x86_64-linux-musl"),
    "aarch64": (f"aarch64-linux-gnu.{GLIBC}", "aarch64-linux-musl"),
    "armv7": (f"arm-linux-gnueabihf.{GLIBC}", "arm-linux-musleabihf"),
    "riscv64": (f"riscv64-linux-gnu.{GLIBC}", "riscv64-linux-musl"),
}
WASM = "wasm32"
WASM_TRIPLE = "wasm32-wasi"
# Floating-point vectors of M55 flush what is near zero, which changes bits: integer vectors only.
BARE: Mapping[str, str] = {
    "cortex-m3": "-mcpu=cortex-m3 -mthumb",
    "cortex-m7": "-mcpu=cortex-m7 -mthumb -mfloat-abi=hard",
    "cortex-m55": "-mcpu=cortex-m55+nomve.fp -mthumb -mfloat-abi=hard",
}
OWN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
BARE_PREFIX = "arm-none-eabi-"
ALIASES: Mapping[str, str] = {  # what kernels, Debian and users call them
    "amd64": "x86_64", "x86": "x86_64", "x86-64": "x86_64",
    "arm64": "aarch64", "arm": "armv7", "armhf": "armv7", "armv7l": "armv7",
    "riscv": "riscv64", "wasm": WASM, WASM_TRIPLE: WASM,
}  # fmt: skip
KNOWN = (*TRIPLES, WASM, *BARE)
LIBRARIES = ("gemrun_static", "gemrun_minimal")
SYSTEM = ("gemrun_control", "gemrun_cli")  # what needs Linux
UNWANTED = ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS", "MAKEFLAGS", "DESTDIR", "CMAKE_TOOLCHAIN_FILE")


@dataclass(frozen=True)
class Request:
    """What is wanted. No target: all of TRIPLES, or the one that the environment names."""

    targets: Sequence[str] = ()
    libcs: Sequence[str] = LIBCS
    plain_kernels: bool = False
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass(frozen=True)
class Recipe:
    """One build: its folder below the output, what CMake is told, what is made."""

    name: str
    toolchain: str  # in cmake/
    settings: Mapping[str, str]
    libraries: Sequence[str]
    command: bool  # the gemrun command
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Built:
    """Files of one build, by their path below its folder."""

    name: str
    folder: Path
    bytes: Mapping[str, int]
    code: int  # code and constants of the shared library; 0 without one


def recipes(request: Request) -> tuple[Recipe, ...]:
    """The builds that a request comes to. Raises TargetError and UsageError."""
    prefix = request.environment.get("CROSS_COMPILE", "")
    arch = request.environment.get("TARGET_ARCH", "")
    targets = list(request.targets) or ([arch] if arch else [])
    if prefix and not targets:
        raise UsageError(
            f"CROSS_COMPILE={prefix}: for which processor is not said; "
            "set TARGET_ARCH or give --target"
        )
    found: dict[str, Recipe] = {}
    for target in targets or TRIPLES:
        name = machine_of(target)
        for recipe in _recipes_of(name, prefix, request):
            found.setdefault(recipe.name, recipe)
    return tuple(found.values())


def machine_of(target: str) -> str:
    """A name of KNOWN for a board, a processor, or another word for one."""
    name = ALIASES.get(target, target)
    if name in KNOWN:
        return name
    boards = list_targets()
    if target not in boards and not target.endswith(".toml"):
        raise TargetError(
            f"{target}: neither a board nor a processor; processors: {', '.join(KNOWN)}; "
            "for boards run: gemmake hdf list"
        )
    board = load_hdf(target).target
    if board.os == "bare":
        if board.mcpu is None or board.mcpu not in BARE:
            raise TargetError(
                f"{target}: no build for {board.mcpu or 'its core'}; "
                f"build csrc/gemrun_one.c with -DGR_PORT_BARE, or name one of {', '.join(BARE)}"
            )
        return board.mcpu
    return ALIASES.get(board.arch, board.arch)


def _recipes_of(name: str, prefix: str, request: Request) -> list[Recipe]:
    plain = {"GEM_BASE_ONLY": "ON"} if request.plain_kernels else {}
    kept = {k: v for k, v in request.environment.items() if prefix or k not in UNWANTED}
    for unset in ("CC", "CMAKE_TOOLCHAIN_FILE", "DESTDIR"):
        kept.pop(unset, None)
    if name in BARE:
        settings = {"GEM_PREFIX": prefix or BARE_PREFIX, "GEM_PROCESSOR": "arm"}
        settings |= {"GEM_PORT": "bare", "GEM_CPU": BARE[name]}
        return [Recipe(name, "gcc.cmake", settings, LIBRARIES, False, kept)]
    if name == WASM:
        settings = {"GEM_ZIG": str(zig()), "GEM_TRIPLE": WASM_TRIPLE}
        return [Recipe(WASM_TRIPLE, "zig.cmake", settings, LIBRARIES, False, kept)]
    shared = (*LIBRARIES, "gemrun_shared", *SYSTEM)
    if prefix:
        settings = {"GEM_PREFIX": prefix, "GEM_PROCESSOR": name, **plain}
        own = Path(prefix).name.rstrip("-")  # the folder's name: never a way out of --output
        folder = own if OWN_NAME.fullmatch(own) else name
        return [Recipe(folder, "gcc.cmake", settings, shared, True, kept)]
    made = []
    for libc in request.libcs:
        triple = TRIPLES[name][LIBCS.index(libc)]
        settings = {"GEM_ZIG": str(zig()), "GEM_TRIPLE": triple, **plain}
        libraries = shared if libc == "glibc" else (*LIBRARIES, *SYSTEM)
        folder = triple.removesuffix(f".{GLIBC}")
        made.append(Recipe(folder, "zig.cmake", settings, libraries, True, kept))
    return made


def _has_compiler(prefix: str) -> None:
    """Raises HostError where no PREFIXgcc can be run."""
    if shutil.which(f"{prefix}gcc") is None:
        package = f"gcc-{Path(prefix).name.rstrip('-')}"
        raise HostError(
            f"{prefix}gcc: no such compiler; install it (Debian: {package}), or set CROSS_COMPILE "
            "to what its name begins with"
        )


def zig() -> Path:
    """The compiler of the `ziglang` package."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise HostError(
            "ziglang: not installed, and CROSS_COMPILE names no compiler; "
            "run: pip install 'gembin-toolchain[cross]'"
        )
    return Path(spec.submodule_search_locations[0]) / "zig"


def source_dir() -> Path:
    """Folder of CMakeLists.txt and csrc: inside the package, or the source tree."""
    package = Path(__file__).resolve().parent
    installed = package / "engine_source"
    return installed if installed.is_dir() else package.parent


def build(recipe: Recipe, output: Path, say: Say = lambda _: None) -> Built:
    """Build into output/NAME, which is replaced as a whole; a failure leaves its log beside it, a
    stop leaves nothing."""
    if prefix := recipe.settings.get("GEM_PREFIX"):
        _has_compiler(prefix)
    final, log = output / recipe.name, output / f"{recipe.name}.log"
    check_folder(output)
    _refuse_foreign(final)
    say(f"{recipe.name}: building")
    with into(output, say), tempfile.TemporaryDirectory(prefix=".engine-", dir=output) as scratch:
        work, made = Path(scratch) / "build", Path(scratch) / "made"
        log.unlink(missing_ok=True)  # a link would be followed
        try:
            with log.open("w", encoding="utf-8") as text:
                for step in _steps(recipe, work, made):
                    _run(step, recipe, text.fileno(), log)
        except Stopped:
            log.unlink()
            raise
        (made / "engine.json").write_text(_listing(recipe, made), encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        made.rename(final)
    log.unlink()
    sizes = {name: (final / name).stat().st_size for name in _files(final)}
    shared = next(final.glob("lib*/libgemrun.so.*"), None)
    return Built(recipe.name, final, sizes, elf.code_bytes(shared) if shared else 0)


def _refuse_foreign(folder: Path) -> None:
    if not folder.is_dir():
        if folder.exists() or folder.is_symlink():
            raise foreign(folder)
    elif any(folder.iterdir()) and not (folder / "engine.json").is_file():
        raise foreign(folder)


def _steps(recipe: Recipe, work: Path, made: Path) -> list[list[str]]:
    source, cmake = source_dir(), tool("cmake")
    settings = [f"-D{name}={value}" for name, value in recipe.settings.items()]
    settings.append(f"-DCMAKE_TOOLCHAIN_FILE={source / 'cmake' / recipe.toolchain}")
    settings += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DCMAKE_INSTALL_LIBDIR=lib"]
    install = [cmake, "--install", str(work), "--prefix", str(made), "--component"]
    return [
        [cmake, "-S", str(source), "-B", str(work), "-G", "Ninja", *settings],
        [cmake, "--build", str(work), "--target", *recipe.libraries],
        [*install, "library"],
        *([[*install, "cli"]] if recipe.command else []),
    ]


def _run(step: list[str], recipe: Recipe, log: int, path: Path) -> None:
    try:
        done = subprocess.run(
            step, stdout=log, stderr=subprocess.STDOUT, env=dict(recipe.environment), check=False
        )
    except OSError as error:
        raise HostError(f"{step[0]}: {error.strerror}; install it") from None
    if done.returncode:
        hint = "" if recipe.toolchain == "zig.cmake" else (
            "; a compiler without vector intrinsics builds with --plain-kernels"
        )  # fmt: skip
        raise HostError(f"{recipe.name}: the build failed; see {path}{hint}")


def tool(name: str) -> str:
    """A program of this environment, or of the path."""
    own = Path(sys.executable).parent / name
    found = str(own) if own.is_file() else shutil.which(name)
    if found is None:
        raise HostError(f"{name}: not found; run: pip install 'gembin-toolchain[cross]'")
    return found


def _files(folder: Path) -> list[str]:
    paths = (p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    return sorted(str(path.relative_to(folder)) for path in paths)


def _listing(recipe: Recipe, folder: Path) -> str:
    """What was built and from what, without a word on this machine."""
    files = {
        name: {
            "bytes": (folder / name).stat().st_size,
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        }
        for name in _files(folder)
    }
    told = {k: v for k, v in recipe.settings.items() if k != "GEM_ZIG"}
    facts = {"version": __version__, "target": recipe.name, "settings": told, "files": files}
    return json.dumps(facts, indent=1, sort_keys=True) + "\n"


def table(built: Sequence[Built]) -> str:
    """Sizes per target: bytes of each file, and of code and constants in the shared library."""
    rows: list[tuple[str, ...]] = [
        ("target", "libgemrun.so", "of it code", "libgemrun.a", "minimal .a", "gemrun")
    ]
    for one in built:
        sizes = {Path(name).name.split(".so")[0]: n for name, n in one.bytes.items()}
        named = ("libgemrun", "libgemrun.a", "libgemrun_minimal.a", "gemrun")
        shared, *others = (str(sizes.get(name, "-")) for name in named)
        rows.append((one.name, shared, str(one.code or "-"), *others))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
