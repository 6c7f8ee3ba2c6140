"""Builds `gemmake._helper`, the C compile-host helper (csrc/gm_*.c), as a cffi API-mode module.

`ffibuilder` describes the module, `emit(path)` writes its C source for CMake, and
`python -m gemmake._build --inplace` compiles it beside this file for work in the source tree.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import cffi

MODULE = "gemmake._helper"
PACKAGE = Path(__file__).resolve().parent
CSRC = PACKAGE.parent / "csrc"
SOURCES = (
    "gm_run.c",
    "gm_search.c",
    "gm_kern_base.c",
    "gm_kern_avx2.c",
    "gm_q4raw.c",
    "gm_pack.c",
    "gm_dequant.c",
    "gm_float.c",
    "gm_rope.c",
)
# No fused multiply-add and no fast-math: both would make results depend on the machine.
FLAGS = ("-std=c11", "-O2", "-ffp-contract=off", "-pthread")
BEGIN, END = "/* cffi: begin */", "/* cffi: end */"


def declarations(header: str) -> str:
    """The part of gm_helper.h between the cffi lines, with shifted constants written out."""
    text = header.split(BEGIN, 1)[1].split(END, 1)[0]
    return text.replace("1 << 20", str(1 << 20))


def _make_builder() -> cffi.FFI:
    builder = cffi.FFI()
    builder.cdef(declarations((CSRC / "gm_helper.h").read_text(encoding="utf-8")))
    builder.set_source(MODULE, '#include "gm_helper.h"\n', py_limited_api=True)
    return builder


ffibuilder = _make_builder()


def emit(path: str | Path) -> None:
    """Write the module's C source to `path`."""
    ffibuilder.emit_c_code(str(path))


def build_inplace() -> Path:
    """Compile gemmake/_helper.abi3.so with the compiler named by CC (default gcc)."""
    target = PACKAGE / "_helper.abi3.so"
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "_helper.c"
        emit(source)
        partial = Path(scratch) / target.name
        command = [os.environ.get("CC", "gcc"), *FLAGS, "-shared", "-fPIC", f"-I{CSRC}"]
        command += [f"-I{sysconfig.get_paths()['include']}", str(source)]
        command += [str(CSRC / name) for name in SOURCES] + ["-o", str(partial), "-lm"]
        subprocess.run(command, check=True)
        # Replacing the name keeps a running process on the old file.
        staged = target.with_suffix(".new")
        staged.write_bytes(partial.read_bytes())
        staged.chmod(0o755)
        staged.replace(target)
    return target


def main(arguments: list[str]) -> int:
    """`--inplace` compiles in the tree; a path writes the C source there."""
    if arguments == ["--inplace"]:
        build_inplace()
        return 0
    if len(arguments) == 1 and not arguments[0].startswith("-"):
        emit(arguments[0])
        return 0
    sys.stderr.write("gemmake._build: usage: python -m gemmake._build --inplace | OUTPUT.c\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
