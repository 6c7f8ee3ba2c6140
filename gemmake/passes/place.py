"""place: which engine runs which part of which layer, and why no other does.

The CPU runs everything in this version. The log says so part by part: embedding, norms, attention,
feed-forward and head differ in what an accelerator could do with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gemmake.figures import mib
from gemmake.hdf import Hdf
from gemmake.model import MODEL_LAYER, Act, Block, LayerSpec, ModelSpec
from gemrun.format import spec as records

UNKNOWN_CORES = 4  # threads planned for a target that does not say how many cores it has

NORMS, ATTENTION, FFN = "norms", "attention", "FFN"
EMBEDDING, HEAD = "embedding", "head"
LAYER_OPS = (NORMS, ATTENTION, FFN)
OPS = (EMBEDDING, *LAYER_OPS, HEAD)

#: How a kind of accelerator is called, in the order in which they are told.
NAMES: Mapping[str, str] = {"cuda": "GPU", "nvdla": "NVDLA", "npu": "NPU"}
#: Why a kind takes nothing at all.
WHY: Mapping[str, str] = {
    "cuda": "needs the [jetson] backend, which is not part of this version",
    "nvdla": "NVDLA runs convolutions through TensorRT only",
    "npu": "needs the vendor's SDK, which this engine does without",
}
_READING = "one token against the whole vocabulary is reading, which the CPU does as fast"
#: .. and why it would not take this part, whatever the backend.
WHY_NOT: Mapping[str, Mapping[str, str]] = {
    "nvdla": {
        EMBEDDING: "a row picked by the token is no convolution",
        NORMS: "a norm over the whole width is no convolution",
        ATTENTION: "keys and values grow with every token, a compiled convolution does not",
        FFN: "its convolutions take int8 and float16, no codes with a scale for 32 inputs",
        HEAD: _READING,
    },
    "npu": {
        EMBEDDING: "a row picked by the token is not worth a graph of the vendor's SDK",
        NORMS: "not without the products around them",
        ATTENTION: "takes graphs of fixed shape through the vendor's SDK, a context grows",
        FFN: "the vendor's SDK takes int8 graphs, no codes with a scale for 32 inputs",
        HEAD: _READING,
    },
}


@dataclass(frozen=True)
class Placement:
    """Where a part of a layer runs, or with MODEL_LAYER a part of the whole model."""

    layer: int
    op: str  # one of OPS
    engine: str  # "CPU": the only engine of this version
    reason: str


@dataclass(frozen=True)
class Accelerators:
    """What the target offers beside its CPU, from the hardware description."""

    nvdla: int = 0
    other: tuple[str, ...] = ()  # kinds, e.g. "cuda"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those that are there."""
        found = (*self.other, *(("nvdla",) if self.nvdla else ()))
        return tuple(kind for kind in NAMES if kind in found)


def accelerators(hdf: Hdf) -> Accelerators:
    """The target's accelerators."""
    kinds = tuple(unit.kind for unit in hdf.accelerator if unit.kind != "nvdla" and unit.count)
    return Accelerators(hdf.accelerators("nvdla"), kinds)


def place(spec: ModelSpec, offered: Accelerators) -> tuple[Placement, ...]:
    """Put every part of every layer on the CPU and say why no other engine took it."""
    wanted = [(MODEL_LAYER, EMBEDDING)]
    wanted += [(index, op) for index in range(len(spec.layers)) for op in LAYER_OPS]
    wanted.append((MODEL_LAYER, HEAD))
    return tuple(Placement(index, op, "CPU", _reason(offered, op)) for index, op in wanted)


def _reason(offered: Accelerators, op: str) -> str:
    """Why none of the accelerators takes a part."""
    if not offered.kinds:
        return "no accelerator on this target"
    return ", ".join(f"{NAMES[kind]}: {why_not(kind, op)}" for kind in offered.kinds)


def why_not(kind: str, op: str) -> str:
    """Why a kind of accelerator does not take a part."""
    return WHY_NOT.get(kind, {}).get(op, WHY[kind])


def placement_lines(
    spec: ModelSpec,
    placements: Sequence[Placement],
    offered: Accelerators,
    target: str,
    weight_bytes: Sequence[int],
) -> list[str]:
    """One line per layer, then the NVDLA summary."""
    lines = [
        f"[{_engine(placements, index)}] layer {index}: {_what(layer)}, "
        f"{mib(weight_bytes[index])} of weights ({', '.join(LAYER_OPS)}; {_short(offered)})"
        for index, layer in enumerate(spec.layers)
    ]
    count = len(spec.layers)
    short = target.removeprefix("jetson-")
    why = WHY["nvdla"] if offered.nvdla else f"{short} has none"
    lines.append(f"[NVDLA] Offloaded 0/{count} layers to NVDLA engine ({why})")
    return lines


def op_lines(
    spec: ModelSpec, placements: Sequence[Placement], offered: Accelerators
) -> Iterator[str]:
    """A line for each part: how often it occurs, where it runs, and why not elsewhere."""
    details = {
        EMBEDDING: f"a row of {spec.hidden} for each token, of {spec.vocab_rows}",
        NORMS: f"{_norms(spec)} of {spec.hidden}",
        ATTENTION: f"{sum(layer.kv_heads for layer in spec.layers)} KV heads",
        FFN: f"{', '.join(sorted({_act(layer) for layer in spec.layers}))}",
        HEAD: f"{spec.vocab_rows} rows of {spec.hidden}"
        + (", those of the embedding" if spec.tied else ""),
    }
    for op in OPS:
        own = [p for p in placements if p.op == op]
        of = "" if own[0].layer == MODEL_LAYER else f" in {len(own)} layers"
        yield f"[{own[0].engine}] {op}{of}: {details[op]} ({own[0].reason})"
    for kind in offered.kinds:
        if kind != "nvdla":
            yield f"[{NAMES[kind]}] {len(placements)} parts left to the CPU: {WHY[kind]}"


def _engine(placements: Sequence[Placement], index: int) -> str:
    engines = {p.engine for p in placements if p.layer == index}
    return "+".join(sorted(engines))


def _short(offered: Accelerators) -> str:
    """What keeps the accelerators from taking a layer, in short."""
    if not offered.kinds:
        return "no accelerator on this target"
    return ", ".join(
        WHY[kind] if kind == "nvdla" else f"{NAMES[kind]} {WHY[kind].split(',')[0]}"
        for kind in offered.kinds
    )


def _norms(spec: ModelSpec) -> int:
    """Norms over the whole width: of the blocks, and the final one."""
    return 1 + sum(4 if layer.block is Block.SANDWICH else 2 for layer in spec.layers)


def _act(layer: LayerSpec) -> str:
    act = "GeGLU" if layer.act is Act.GELU_TANH else "SwiGLU"
    return f"{act} {layer.ffn}"


def _what(layer: LayerSpec) -> str:
    spans = f"window {layer.window}" if layer.window else "full attention"
    heads = f"{layer.heads}/{layer.kv_heads} heads of {layer.head_dim}"
    return f"{spans}, {heads}, {_act(layer)}"


def run_threads(hdf: Hdf) -> int:
    """Threads that the memory total is stated for: the policy's, or the target's fastest cores."""
    if hdf.bare:
        return 1
    if hdf.policy.threads != "auto":
        return min(int(hdf.policy.threads), records.MAX_THREADS)
    fast = [len(c.cores or ()) for c in hdf.cpu.cluster if c.kind != "little"]
    return max(1, min(sum(fast) or UNKNOWN_CORES, records.MAX_THREADS))
