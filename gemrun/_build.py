"""Builds `gemrun._engine`, the engine (csrc/gr_*.c) as a cffi API-mode module.

`ffibuilder` describes the module, `emit(path)` writes its C source for CMake, and
`python -m gemrun._build --inplace` compiles it beside this file for work in the source tree.

The declarations are those of gemrun.h, and the few internal ones of gr_hooks.h that gemmake's
calibration and test vectors call; both are read from the headers, so they cannot drift.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import cffi

MODULE = "gemrun._engine"
PACKAGE = Path(__file__).resolve().parent
CSRC = PACKAGE.parent / "csrc"
KERNELS = "gr_kern_ref.c"  # compiled once per instruction set
# The order of operations is the contract: nothing may be fused or reordered.
FLAGS = ("-std=c11", "-O2", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread")

# Internal: float inputs of one layer's products, for calibration (gr_internal.h).
CAPTURE = """
typedef void (*gr_capture)(void *user, uint32_t layer, uint32_t stage, const float *x,
                           uint32_t rows, uint32_t cols);
"""
# Python functions that the engine calls; `user` is a handle of gemrun.context or gemrun.hooks.
CALLBACKS = """
extern "Python" {
    int gemrun_py_text(void *user, int32_t token, const char *text, size_t size);
    int gemrun_py_logits(void *user, uint32_t position, const float *logits, uint32_t count);
    void gemrun_py_capture(void *user, uint32_t layer, uint32_t stage, const float *x,
                           uint32_t rows, uint32_t cols);
}
"""


def sources() -> list[str]:
    """The engine's files, kernels aside."""
    return sorted(p.name for p in CSRC.glob("gr_*.c") if not p.name.startswith("gr_kern"))


def declarations() -> str:
    """What cffi reads: both headers without preprocessor lines and comments."""
    text = (CSRC / "gemrun.h").read_text(encoding="utf-8") + CAPTURE
    text += (CSRC / "gr_hooks.h").read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"#ifdef __cplusplus\n.*?#endif\n", "", text, flags=re.S)
    text = re.sub(r"^#.*$", "", text, flags=re.M)
    return text.replace("GEMRUN_API ", "") + CALLBACKS


def _make_builder() -> cffi.FFI:
    builder = cffi.FFI()
    builder.cdef(declarations())
    builder.set_source(MODULE, '#include "gemrun.h"\n#include "gr_hooks.h"\n', py_limited_api=True)
    return builder


ffibuilder = _make_builder()


def emit(path: str | Path) -> None:
    """Write the module's C source to `path`."""
    ffibuilder.emit_c_code(str(path))


def _compile(scratch: Path, source: Path, suffix: str, *flags: str) -> Path:
    target = scratch / f"{source.stem}{suffix}.o"
    command = [os.environ.get("CC", "gcc"), *FLAGS, *flags, f"-I{CSRC}"]
    command += ["-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def build_inplace() -> Path:
    """Compile gemrun/_engine.abi3.so with the compiler named by CC (default gcc)."""
    target = PACKAGE / "_engine.abi3.so"
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        emit(scratch / "_engine.c")
        python = f"-I{sysconfig.get_paths()['include']}"
        parts = [_compile(scratch, scratch / "_engine.c", "", python, "-w")]
        parts += [_compile(scratch, CSRC / source, "") for source in sources()]
        parts.append(_compile(scratch, CSRC / KERNELS, "_base", "-DGR_KERN_SUFFIX=base"))
        if platform.machine() in ("x86_64", "AMD64"):
            wide = ("-DGR_KERN_SUFFIX=avx2", "-mavx2", "-mfma", "-O3")
            parts.append(_compile(scratch, CSRC / KERNELS, "_avx2", *wide))
        partial = scratch / target.name
        link = [os.environ.get("CC", "gcc"), "-shared", "-pthread", "-o", str(partial)]
        subprocess.run([*link, *map(str, parts), "-lm"], check=True)
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
    sys.stderr.write("gemrun._build: usage: python -m gemrun._build --inplace | OUTPUT.c\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
