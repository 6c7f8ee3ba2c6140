"""The C core: includes, undefined symbols, exported names, size, lines, shape of the functions.

Figures are of the library that `make dev` builds. They are printed, so that a run shows them (-rA).
"""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "dev"
ALL_C = sorted(CSRC.glob("*.[ch]"))
PORTS = sorted(CSRC.glob("gr_port_*.c"))
SIMD = sorted(p for p in CSRC.glob("gr_kern_*.c") if p.stem != "gr_kern_ref")
KERNELS = sorted(CSRC.glob("gr_kern_*.c"))  # the plain ones are a processor's like the others
LANES = [*sorted(CSRC.glob("gr_lanes_*.h")), CSRC / "gr_min_mve.h"]
CORE = sorted(set(CSRC.glob("gr_*.c")) - set(PORTS) - set(SIMD))
CORE_HEADERS = sorted(CSRC.glob("gr_*.h"))
MINIMAL_ONLY = sorted(CSRC.glob("gr_min_*.c"))
FULL = sorted(set(CORE) - set(MINIMAL_ONLY) - set(KERNELS))

MAX_BYTES = 120 * 1024  # text and read-only data of the whole engine
MAX_LINES = 5000
MAX_LINES_MINIMAL = 2300
MAX_HEADER_LINES = 250
LIBC = {"memcpy", "memset", "memmove", "memcmp", "strlen", "sqrtf", "sqrt"}
# Inserted by the toolchain, not called by the source.
RUNTIME = {"_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail"}
# string.h, and what a compiler without an operating system brings.
INCLUDES = {"string.h", "stdint.h", "stddef.h", "stdbool.h", "stdatomic.h", "limits.h", "float.h"}


def tool(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


def built(name: str) -> Path:
    path = BUILD / name
    assert path.exists(), f"{path.relative_to(ROOT)}: not built; run 'make dev'"
    return path


def objects(sources: list[Path]) -> list[str]:
    """Object files of the sources, every instruction set included."""
    stems = {f"{path.name}.o" for path in sources}
    found = [str(p) for p in (BUILD / "CMakeFiles").rglob("*.o") if p.name in stems]
    assert found, "no object files; run 'make dev'"
    return found


@pytest.mark.parametrize("path", [*CORE, *CORE_HEADERS, *SIMD], ids=lambda p: p.name)
def test_core_includes_no_operating_system(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"^\s*#\s*include\s*<([^>]+)>", text, re.M):
        simd = path in (*SIMD, *LANES) and re.fullmatch(
            r"(immintrin|arm_neon|arm_acle|arm_mve|riscv_vector)\.h", name
        )
        assert name in INCLUDES or simd, f"{path.name} includes <{name}>; only a port may"


def test_core_needs_five_functions_of_libc() -> None:
    defined: set[str] = set()
    undefined: set[str] = set()
    for path in objects([*CORE, *SIMD]):
        for line in tool("nm", path).splitlines():
            kind, name = line.split()[-2:]
            (undefined if kind == "U" else defined).add(name)
    port = {n for n in undefined - defined if n.startswith(("gr_port_", "gr_"))}
    outside = undefined - defined - port - LIBC - RUNTIME
    assert not outside, f"the core calls {', '.join(sorted(outside))}; only a port may"
    ported = {
        line.split()[-1]
        for path in objects(PORTS)
        for line in tool("nm", "--defined-only", path).splitlines()
    }
    assert port <= ported, f"no port defines {', '.join(sorted(port - ported))}"


def test_core_keeps_no_state() -> None:
    """Nothing is global but constants; a constant with pointers lies in .data.rel.ro."""
    for path in objects([*CORE, *SIMD]):
        for row in tool("nm", "--format=sysv", "--defined-only", path).splitlines():
            cells = [cell.strip() for cell in row.split("|")]
            if len(cells) != 7:
                continue
            writable = re.match(r"\.(data|bss|tdata|tbss)(?!\.rel\.ro)|\*COM\*", cells[6])
            assert not writable, f"{Path(path).name}: {cells[0]} in {cells[6]} is global state"


def test_shared_library_exports_the_public_names_only() -> None:
    listing = tool("nm", "--dynamic", "--defined-only", str(built("libgemrun.so")))
    symbols = {line.split()[-1] for line in listing.splitlines()}
    names = {name.removesuffix("@@GEMRUN_1") for name in symbols - {"GEMRUN_1"}}
    strange = sorted(name for name in names if not name.startswith("gemrun_"))
    assert not strange, f"exported: {', '.join(strange)}"
    header = (CSRC / "gemrun.h").read_text(encoding="utf-8")
    declared = set(re.findall(r"^GEMRUN_API[^;(]*?(gemrun_\w+)\(", header, re.M))
    assert declared, "no GEMRUN_API declaration found in gemrun.h"
    assert names == declared, f"differ from gemrun.h: {sorted(names ^ declared)}"


def test_engine_size(record_property: pytest.RecordProperty) -> None:
    """Code and read-only data of the whole library, every kernel of this machine included."""
    rows = tool("size", "-A", "-d", str(built("libgemrun.so"))).splitlines()
    sizes = {row.split()[0]: int(row.split()[1]) for row in rows if row.startswith(".")}
    kept = {name: sizes.get(name, 0) for name in (".text", ".rodata", ".data.rel.ro", ".eh_frame")}
    total = sum(kept.values())
    print(f"engine: {total} bytes {kept} of {MAX_BYTES}")
    record_property("engine_bytes", total)
    assert total <= MAX_BYTES


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has such halves")
def test_kernels_leave_no_upper_halves() -> None:
    """With them in use, code without AVX took 150 ns more after every call."""
    names = [path for path in SIMD if "avx" in path.name or "lanes" in path.name]
    kernels = 0
    for path in objects(names):
        text = tool("objdump", "-d", "--no-show-raw-insn", path)
        for name, body in re.findall(r"<(k_\w+)>:\n(.*?)(?=\n\n|\Z)", text, re.S):
            used = re.search(r"%[yz]mm", body)
            assert not used or "vzeroupper" in body, f"{path}: {name}"
            kernels += 1
    assert kernels > 2 * 16


def minimal_sources() -> list[Path]:
    """The core's files in a GR_MINIMAL build, as gemrun_one.c includes them."""
    text = (CSRC / "gemrun_one.c").read_text(encoding="utf-8")
    text = re.sub(r"^#else$.*?^#endif$", "", text, flags=re.M | re.S)
    names = re.findall(r'^#include "(gr_\w+\.c)"', text, re.M)
    return [CSRC / name for name in names if not name.startswith("gr_port_")]


def code_lines(path: Path) -> int:
    """Lines with code: neither blank nor comment, and not left out by GR_MINIMAL."""
    text = re.sub(r"^#ifndef GR_MINIMAL$.*?^#endif[^\n]*$", "", path.read_text(), flags=re.M | re.S)
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    return sum(bool(line.strip()) for line in text.splitlines())


def all_code_lines(path: Path) -> int:
    """Lines with code: neither blank nor comment."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(encoding="utf-8"), flags=re.S)
    return sum(bool(line.strip()) for line in text.splitlines())


def test_core_lines(record_property: pytest.RecordProperty) -> None:
    lines = {p.name: all_code_lines(p) for p in FULL}
    raw = sum(len(p.read_text(encoding="utf-8").splitlines()) for p in FULL)
    print(f"core: {sum(lines.values())} lines of code, {raw} with comments and blanks: {lines}")
    print(f"the minimal build's own files besides: {sum(map(all_code_lines, MINIMAL_ONLY))}")
    print(f"kernels besides: { {p.name: all_code_lines(p) for p in KERNELS} }")
    record_property("core_lines", sum(lines.values()))
    assert sum(lines.values()) <= MAX_LINES


def test_core_lines_of_the_minimal_build(record_property: pytest.RecordProperty) -> None:
    lines = {p.name: code_lines(p) for p in minimal_sources()}
    assert set(MINIMAL_ONLY) <= set(minimal_sources()) < set(CORE)
    total = sum(lines.values())
    print(f"core, GR_MINIMAL: {total} lines of code of {MAX_LINES_MINIMAL}: {lines}")
    record_property("core_lines_minimal", total)
    assert total <= MAX_LINES_MINIMAL


def test_documents_state_one_size_and_one_count() -> None:
    """What this file prints stands in several places: they change together."""

    def stated(name: str, form: str) -> str:
        found = re.findall(form, (ROOT / name).read_text(encoding="utf-8"))
        assert len(found) == 1, f"{name}: {form}: {found}"
        return str(found[0])

    results = "benchmarks/RESULTS.md"
    size = stated(results, r"x86-64 library, all its kernels \| ([\d,]+) bytes")
    assert stated("packaging/README.md", r"gcc's build on x86-64 \(([\d,]+) bytes\)") == size
    lines = stated(results, r"lines of code of the core, .* left out \| ([\d,]+) \|")
    assert stated("README.md", r"the whole engine's count of ([\d,]+) ") == lines
    assert int(size.replace(",", "")) <= MAX_BYTES
    assert int(lines.replace(",", "")) <= MAX_LINES


def test_public_header_is_short() -> None:
    text = (CSRC / "gemrun.h").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_HEADER_LINES


def functions(text: str) -> list[tuple[int, str, int]]:
    """(line, name, lines) of each function body: from `{` in column 0 or at a definition's end."""
    found: list[tuple[int, str, int]] = []
    start, name, opened = 0, "", 0
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        head = re.match(r"[A-Za-z_].*?\b(\w+)\s*\(", line)
        if head and not line.startswith(("#", "typedef", "struct", "enum")) and ";" not in line:
            start, name = number, head[1]
        elif line.endswith(");") and opened < start:
            start = 0  # a declaration over several lines
        opened = number if line.startswith("{") else opened
        if line.startswith("}") and start:
            found.append((start, name, number - start + 1))
            start = 0
    return found


@pytest.mark.parametrize("path", ALL_C, ids=lambda p: p.name)
def test_c_functions_stay_short(path: Path) -> None:
    for line, name, length in functions(path.read_text(encoding="utf-8")):
        if name == "gr_forward":
            continue  # reads like the paper, in one piece
        assert length <= 60, f"{path.name}:{line}: {name} has {length} lines"


@pytest.mark.parametrize("path", ALL_C, ids=lambda p: p.name)
def test_c_form(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("/* "), f"{path.name}: the first comment says what the file is"
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= 100, f"{path.name}:{number}: {len(line)} columns"
        assert "\t" not in line, f"{path.name}:{number}: tab"
        assert line == line.rstrip(), f"{path.name}:{number}: blanks at the end"
