"""Builds `gemmake._helper`, the C compile-host helper (csrc/gm_*.c), as a cffi API-mode module.

`ffibuilder` describes the module, `emit(path)` writes its C source for CMake, which compiles it.
"""

from __future__ import annotations

from pathlib import Path

import cffi

MODULE = "gemmake._helper"
CSRC = Path(__file__).resolve().parent.parent / "csrc"
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
