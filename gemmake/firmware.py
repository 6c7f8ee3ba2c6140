"""Boards without a system: what the minimal engine reads, and what an artifact takes there.

Firmware uses the artifact where it lies in flash, with one thread; RAM holds what
`gemrun_memory_needed` tells: engine, arena and KV cache. CONTRIBUTING.md says what a minimal build
(GR_MINIMAL) lacks; it is refused here, before anything is read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gemmake.errors import BudgetError, UsageError
from gemmake.figures import mib
from gemmake.hdf import MIB, Hdf, load_hdf
from gemmake.options import CHUNK, CompileOptions, KvType, Offload, Profile, Quantization
from gemmake.passes.budget import Memory

STEP = CHUNK[Profile.LITE]  # tokens of a prefill step; a minimal engine makes no longer one


def usual(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a command: for firmware those that name nothing else are of the lite
    profile."""
    return options | {"profile": Profile.LITE} if load_hdf(options["target"]).bare else options


def adapted(options: CompileOptions, hdf: Hdf) -> CompileOptions:
    """The options as this board takes them; those of a board with a system as they are. Raises
    UsageError for what a minimal engine does not read."""
    if not hdf.bare:
        return options
    for wrong, option, instead in _refused(options):
        if wrong:
            raise UsageError(
                f"{option}: firmware for {hdf.id} runs the minimal engine, which does not read "
                f"that; use {instead}"
            )
    return replace(
        options, profile=Profile.LITE, offload=Offload.NONE, chunk=min(options.chunk, STEP)
    )


def _refused(options: CompileOptions) -> tuple[tuple[bool, str, str], ...]:
    threads = options.run_threads
    level = options.offload
    return (
        (options.quantization is Quantization.NONE, "--quantization none", "int4 or int8"),
        (options.kv_type is not KvType.INT8, f"--kv-cache-type {options.kv_type.value}", "int8"),
        (bool(options.narrow), f"--kv-{''.join(options.narrow[:1])} int4", "int8"),
        (threads not in (None, 1), f"--run-threads {threads}", "1"),
        (
            level not in (Offload.AUTO, Offload.NONE),
            f"--offload {level.value}",
            "none: weights are read where they lie in flash",
        ),
    )


def check_flash(memory: Memory, hdf: Hdf, quantization: Quantization) -> None:
    """Refuse an artifact that is larger than the flash of the board, where that is described."""
    size = hdf.storage.size_mib if hdf.bare and hdf.storage is not None else None
    if size is not None and memory.flash > size * MIB:
        int4 = "" if quantization is Quantization.INT4 else "--quantization int4 or "
        raise BudgetError(
            f"{hdf.id}: the artifact takes {mib(memory.flash, 1)} of flash and the board has "
            f"{size} MiB; use {int4}a smaller model"
        )
