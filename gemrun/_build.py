"""Builds `gemrun._engine`, the engine (csrc/gr_*.c, gs_*.c) as a cffi API-mode module.

`ffibuilder` describes the module, `emit(path)` writes its C source for CMake, which compiles it.

The declarations are those of the public headers (HEADERS), and the few internal ones (INTERNAL)
that gemmake calls for calibration, test vectors and a pinned prompt; all are read from the headers,
so they cannot drift.
"""

from __future__ import annotations

import re
from pathlib import Path

import cffi

MODULE = "gemrun._engine"
CSRC = Path(__file__).resolve().parent.parent / "csrc"
HEADERS = (
    "gemrun.h",
    "gemrun_control.h",
    "gemrun_session.h",
    "gemrun_batch.h",
    "gemrun_thermal.h",
    "gemrun_board.h",
)

INTERNAL = ("gr_hooks.h", "gs_pin.h", "gs_probe.h", "gs_values.h")

# Internal: float inputs of one layer's products, for calibration; what a KV head keeps
# (gr_internal.h, gembin.h).
CAPTURE = """
typedef void (*gr_capture)(void *user, uint32_t layer, uint32_t stage, const float *x,
                           uint32_t rows, uint32_t cols);
typedef struct gr_watched gr_watched;
typedef void (*gr_watch)(void *user, const gr_watched *w);
typedef struct gb_kv_unit {
    uint32_t sink;
    uint16_t recent, flags;
    uint32_t blocks, first;
} gb_kv_unit;
"""
# Python functions that the engine calls; `user` is a handle of gemrun.context, .handle or .hooks.
CALLBACKS = """
extern "Python" {
    int gemrun_py_text(void *user, int32_t token, const char *text, size_t size);
    int gemrun_py_logits(void *user, uint32_t position, const float *logits, uint32_t count);
    int32_t gemrun_py_run(gemrun_context_t *ctx, const gemrun_request *paced, void *user);
    void gemrun_py_capture(void *user, uint32_t layer, uint32_t stage, const float *x,
                           uint32_t rows, uint32_t cols);
}
"""


def declarations() -> str:
    """What cffi reads: the headers without preprocessor lines and comments."""
    public = [(CSRC / name).read_text(encoding="utf-8") for name in HEADERS]
    internal = [(CSRC / name).read_text(encoding="utf-8") for name in INTERNAL]
    text = "".join(public) + CAPTURE + "".join(internal)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"#ifdef __cplusplus\n.*?#endif\n", "", text, flags=re.S)
    text = re.sub(r"^#.*$", "", text, flags=re.M)
    return text.replace("GEMRUN_API ", "") + CALLBACKS


def _make_builder() -> cffi.FFI:
    builder = cffi.FFI()
    builder.cdef(declarations())
    includes = "".join(f'#include "{name}"\n' for name in (*HEADERS, *INTERNAL))
    builder.set_source(MODULE, includes, py_limited_api=True)
    return builder


ffibuilder = _make_builder()


def emit(path: str | Path) -> None:
    """Write the module's C source to `path`."""
    ffibuilder.emit_c_code(str(path))
