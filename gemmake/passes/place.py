"""place: which engine runs which layer, and why. The log is part of what a user sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemmake.hdf import Hdf
from gemmake.model import Act, LayerSpec, ModelSpec
from gemrun.format import spec as records

UNKNOWN_CORES = 4  # threads planned for a target that does not say how many cores it has


@dataclass(frozen=True)
class Placement:
    """Where a layer runs."""

    layer: int
    engine: str  # "CPU": the only engine of this version
    reason: str


@dataclass(frozen=True)
class Accelerators:
    """What the target offers beside its CPU, from the hardware description."""

    nvdla: int = 0
    other: tuple[str, ...] = ()  # kinds, e.g. "cuda"


def accelerators(hdf: Hdf) -> Accelerators:
    """The target's accelerators."""
    kinds = tuple(unit.kind for unit in hdf.accelerator if unit.kind != "nvdla")
    return Accelerators(hdf.accelerators("nvdla"), kinds)


def place(spec: ModelSpec, offered: Accelerators) -> tuple[Placement, ...]:
    """Put every layer on the CPU and say why no other engine took it."""
    reason = _reason(offered)
    return tuple(Placement(i, "CPU", reason) for i in range(len(spec.layers)))


def _reason(offered: Accelerators) -> str:
    if offered.nvdla:
        return "NVDLA runs convolutions through TensorRT only"
    if offered.other:
        return f"{offered.other[0]} offload is not part of this version"
    return "no accelerator on this target"


def placement_lines(
    spec: ModelSpec,
    placements: Sequence[Placement],
    offered: Accelerators,
    target: str,
    weight_bytes: Sequence[int],
) -> list[str]:
    """One line per layer, then the NVDLA summary."""
    lines = [
        f"[{p.engine}] layer {p.layer}: {_what(spec.layers[p.layer])}, "
        f"{weight_bytes[p.layer] / 1e6:.2f} MB of weights ({p.reason})"
        for p in placements
    ]
    count = len(spec.layers)
    short = target.removeprefix("jetson-")
    why = f"{short} has none" if not offered.nvdla else placements[0].reason
    lines.append(f"[NVDLA] Offloaded 0/{count} layers to NVDLA engine ({why})")
    return lines


def _what(layer: LayerSpec) -> str:
    span = f"window {layer.window}" if layer.window else "full attention"
    act = "GeGLU" if layer.act is Act.GELU_TANH else "SwiGLU"
    heads = f"{layer.heads}/{layer.kv_heads} heads of {layer.head_dim}"
    return f"{span}, {heads}, {act} {layer.ffn}"


def run_threads(hdf: Hdf) -> int:
    """Threads that the memory total is stated for: the policy's, or the target's fastest cores."""
    if hdf.policy.threads != "auto":
        return min(int(hdf.policy.threads), records.MAX_THREADS)
    fast = [len(c.cores or ()) for c in hdf.cpu.cluster if c.kind != "little"]
    return max(1, min(sum(fast) or UNKNOWN_CORES, records.MAX_THREADS))
