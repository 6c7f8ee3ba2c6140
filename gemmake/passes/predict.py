"""predict: how fast an artifact will run on a board, from its records and the board's description.

A token takes as long as the slowest of reading what it needs (all weights, and the keys and values
of the context), of multiplying, and of what comes from storage where weights do not stay in memory
(passes/offload.py). Every figure is a range, because what a board reaches of its
peaks is not known before it is measured; the assumptions behind it are named. Seconds and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gemmake.hdf import Cluster, Hdf, PowerMode, Source
from gemmake.model import MODEL_LAYER, Role
from gemmake.passes.cores import CORES, GROUP_MACS, Core, Most, most_a_cycle
from gemmake.passes.layout import Stream, StreamTensor
from gemmake.passes.offload import Cost
from gemrun.format import sizes, spec

GB = 1e9
MB = 1e6


@dataclass(frozen=True)
class Range:
    """From the least to the most. A time whose most is not known ends at infinity."""

    low: float
    high: float

    def inverse(self, amount: float = 1.0) -> Range:
        """`amount` over each end: times become rates."""
        return Range(amount / self.high if self.high < math.inf else 0.0, amount / self.low)

    def plus(self, other: Range) -> Range:
        """One after the other."""
        return Range(self.low + other.low, self.high + other.high)


# What is reached of a peak. The first is general knowledge; the second is about what decode reaches
# of plain reading on x86-64 (benchmarks/RESULTS.md); the third, of the counted products, an
# estimate: no core that was counted was at hand.
READING = Range(0.6, 0.8)
STREAMING = Range(0.8, 0.9)
MULTIPLYING = Range(0.6, 0.85)
#: A file in the page cache is opened at this rate: 20 GB/s on a server's core, slow ones guessed.
MAPPING = Range(3.0 * GB, 20.0 * GB)
#: Sequential reading by kind of storage, MB/s, where a description has none: general knowledge.
STORAGE: Mapping[str, Range] = {
    "sd": Range(40, 90),
    "emmc": Range(150, 300),
    "usb": Range(250, 350),
    "sata": Range(400, 500),
    "nvme": Range(800, 3000),
}
USUAL_STORAGE = "emmc"


# ---- what is to be done ----
@dataclass(frozen=True)
class Matrices:
    """Some tensors: their bytes, and groups of 512 products by width of their codes."""

    size: int
    narrow: int  # 4 bits
    wide: int  # 8 bits
    floats: int


@dataclass(frozen=True)
class Keep:
    """What attention reads and multiplies for each token that is seen, of heads that see alike."""

    limit: int  # tokens that are seen at most, 0 = all
    size: float  # bytes of a token
    macs: int  # products of a token


@dataclass(frozen=True)
class Work:
    """What a run of an artifact asks for."""

    layers: Matrices
    head: Matrices
    keeps: tuple[Keep, ...]
    chunk: int  # tokens of a prefill step
    load_size: int  # bytes of the file that are in memory afterwards
    streamed: int = 0  # bytes from storage for every token
    streamed_head: int = 0  # of that the head, which a prompt reads once

    def cache(self, depth: int) -> float:
        """Bytes of keys and values that a token behind `depth` others reads."""
        return sum(k.size * (min(depth, k.limit) if k.limit else depth) for k in self.keeps)

    def attention(self, first: int, last: int) -> float:
        """Groups of products of attention for tokens first .. last - 1 of a context."""
        macs = sum(k.macs * (_seen(last, k.limit) - _seen(first, k.limit)) for k in self.keeps)
        return macs / GROUP_MACS


def _seen(tokens: int, limit: int) -> int:
    """What the first `tokens` tokens see in all, themselves included."""
    growing = min(tokens, limit) if limit else tokens
    return growing * (growing + 1) // 2 + (tokens - growing) * growing


def work_of(
    conf: spec.Conf,
    layers: Sequence[spec.Layer],
    units: Sequence[spec.KvUnit],
    stream: Stream,
    file_size: int,
    cost: Cost | None = None,
) -> Work:
    """The work of an artifact with these records; of an embedding beside the head a token reads but
    a row. `cost`: of weights that do not stay in memory."""
    body = [t for t in stream.tensors if t.record.layer != MODEL_LAYER]
    head = [t for t in stream.tensors if t.record.layer == MODEL_LAYER]
    return Work(
        layers=_matrices(body),
        head=_matrices(t for t in head if t.record.role != Role.EMBED),
        keeps=tuple(_keeps(conf, layers, units)),
        chunk=conf.chunk,
        load_size=file_size - (cost.size - cost.held if cost is not None else 0),
        streamed=cost.streamed if cost is not None else 0,
        streamed_head=cost.head if cost is not None else 0,
    )


def _matrices(tensors: Iterable[StreamTensor]) -> Matrices:
    size, narrow, wide, floats = 0, 0, 0, 0
    for tensor in tensors:
        record, form = tensor.record, tensor.format
        size += record.size + record.second_size
        if form is spec.Format.VECTOR:
            continue
        groups = record.parts * (record.rows_padded // spec.PANEL)
        groups *= record.cols_padded // spec.GROUP
        if form in sizes.FLOAT_FORMATS:
            floats += groups
        elif form in (spec.Format.Q8, spec.Format.Q8_ROWS):
            wide += groups
        else:
            narrow += groups
    return Matrices(size, narrow, wide, floats)


def _keeps(
    conf: spec.Conf, layers: Sequence[spec.Layer], units: Sequence[spec.KvUnit]
) -> Iterable[Keep]:
    """One for each limit that occurs."""
    found: dict[int, Keep] = {}
    for layer in layers:
        macs = 2 * layer.heads // layer.kv_heads * layer.head_dim
        own: Sequence[spec.KvUnit | None] = sizes.units_of(layer, units)
        for unit in own or [None] * layer.kv_heads:
            limit, narrow = layer.window, (False, False)
            if unit is not None:
                limit = unit.blocks * spec.KV_BLOCK if unit.partial else layer.window
                narrow = (unit.value4, unit.key4)
            block = sizes.kv_block_size(conf.kv_type, layer.head_dim, layer.kv_group, *narrow)
            before = found.get(limit, Keep(limit, 0.0, 0))
            size = before.size + block / spec.KV_BLOCK
            found[limit] = Keep(limit, size, before.macs + macs)
    return found.values()


# ---- what it is done with ----
@dataclass(frozen=True)
class Machine:
    """A board in a power mode, as far as it is known."""

    mode: str  # "" = it has none
    threads: int
    cores: tuple[tuple[Core, float], ...]  # and their clock in Hz, of each thread; empty: not known
    bandwidth: Range | None  # bytes/s that the engine gets
    storage: Range  # bytes/s
    assumed: tuple[str, ...]
    clocked: bool = True  # the clocks of `cores` are those of the mode, not only the highest
    ceiling: Most | None = None  # products/s that all threads stay below; None: not known
    uncounted: str = ""  # why what arithmetic allows is not known


def machine_of(hdf: Hdf, mode: PowerMode | None, threads: int, storage: str = "") -> Machine:
    """The board in a mode. `storage`: a kind that is assumed where the description has none."""
    online = mode.cores_online if mode is not None else None
    threads = min(threads, online or threads)
    ceiling = _ceiling(hdf, mode, threads)
    cores, multiplying = _cores(hdf, mode, threads)
    bandwidth, reading = _bandwidth(hdf, mode)
    speed, loading = _storage(hdf, storage)
    shared = hdf.memory is not None and hdf.memory.unified
    loads = () if hdf.bare else (loading,)
    return Machine(
        mode=mode.id if mode is not None else "",
        threads=threads,
        cores=cores,
        bandwidth=bandwidth,
        storage=speed,
        clocked=_clocked(mode),
        ceiling=ceiling,
        uncounted="" if cores else multiplying,
        assumed=(reading, *((_SHARED,) if shared and bandwidth else ()), multiplying, *loads),
    )


FLOATS = "products of float32 weights were not counted: what arithmetic allows is not known"
_SHARED = "the CPUs may not get all of a bus that they share with the GPU"
_REACHED = (
    f"{READING.low * 100:.0f} to {READING.high * 100:.0f} % of the peak can be read (general "
    f"knowledge), {STREAMING.low * 100:.0f} to {STREAMING.high * 100:.0f} % of that by the engine "
    "(about what it reaches on x86-64)"
)


def _bandwidth(hdf: Hdf, mode: PowerMode | None) -> tuple[Range | None, str]:
    if hdf.bare:
        return _flash(hdf)
    peak = mode.mem_peak_gbps if mode is not None else None
    if mode is None or peak is None:
        return None, (
            f"memory bandwidth of {hdf.id} is not in its description, so that what it allows is "
            "not known; gemmake hdf probe measures it"
        )
    origin = hdf.origin(f"power_mode[{mode.id}].mem_peak_gbps")
    if origin is not None and origin.kind == "measured":
        low, high = peak * STREAMING.low, peak * STREAMING.high
        said = f"reads {peak:g} GB/s, measured, of which the engine gets 80 to 90 %"
    else:
        low, high = peak * READING.low * STREAMING.low, peak * READING.high * STREAMING.high
        said = f"memory has {peak:g} GB/s at the peak{_doubt(origin)}: {_REACHED}"
    return Range(low * GB, high * GB), said


def _flash(hdf: Hdf) -> tuple[Range | None, str]:
    """Firmware reads weights where they lie."""
    if hdf.storage is None:
        return None, (
            f"weights are read from flash, whose size and rate the description of {hdf.id} has not"
        )
    rate = hdf.storage.seq_read_mbps
    doubt = _doubt(hdf.origin("storage.seq_read_mbps"))
    told = f"weights are read from flash, at most {rate:g} MB/s{doubt}: {_REACHED}"
    low, high = (rate * MB * r * s for r, s in zip(
        (READING.low, READING.high), (STREAMING.low, STREAMING.high), strict=True
    ))  # fmt: skip
    return Range(low, high), told


def _doubt(origin: Source | None) -> str:
    return "" if origin is not None and origin.verified else " (unverified)"


def _cores(
    hdf: Hdf, mode: PowerMode | None, threads: int
) -> tuple[tuple[tuple[Core, float], ...], str]:
    """A core for each thread, the fast ones first."""
    clusters = _fast_first(hdf)
    found: list[tuple[Core, float]] = []
    for cluster in clusters:
        core = CORES.get((hdf.target.arch, cluster.uarch or ""))
        clock = _clock(cluster, mode)
        if core is None or clock is None or cluster.cores is None:
            kind = cluster.uarch or "the cores"
            whose = kind if kind == hdf.id else f"{kind} of {hdf.id}"
            missing = f"products of {whose} were not counted" if core is None else (
                f"the clock of {whose} is not in its description"
            )  # fmt: skip
            return (), f"{missing}: what arithmetic allows is not known"
        found += [(core, clock * 1e6)] * len(cluster.cores)
        if len(found) >= threads:
            break
    found = found[:threads]
    return tuple(found), _counted(hdf, mode, clusters[0], found)


def _fast_first(hdf: Hdf) -> list[Cluster]:
    return sorted(hdf.cpu.cluster, key=lambda c: (c.kind == "little", -(c.max_freq_mhz or 0)))


def _ceiling(hdf: Hdf, mode: PowerMode | None, threads: int) -> Most | None:
    """Products/s that no loop exceeds; None where clocks are not known."""
    clocks: list[float] = []
    for cluster in _fast_first(hdf):
        clock = _clock(cluster, mode)
        if clock is None or cluster.cores is None:
            return None
        clocks += [clock * 1e6] * len(cluster.cores)
    one = most_a_cycle(hdf.target.arch, {*hdf.target.features, *hdf.target.baseline_features})
    hertz = int(sum(sorted(clocks, reverse=True)[:threads]))
    return Most(one.integers * hertz, one.floats * hertz)


def _clock(cluster: Cluster, mode: PowerMode | None) -> float | None:
    """MHz of a cluster in a mode."""
    known = [cluster.max_freq_mhz, mode.cpu_max_mhz if mode is not None else None]
    return min((mhz for mhz in known if mhz is not None), default=None)


def _clocked(mode: PowerMode | None) -> bool:
    """Whether the clock is known: a limit of power holds it somewhere below the highest."""
    return mode is None or mode.tdp_w is None or mode.cpu_max_mhz is not None


def _counted(
    hdf: Hdf, mode: PowerMode | None, cluster: Cluster, found: Sequence[tuple[Core, float]]
) -> str:
    core, hertz = found[0]
    capped = mode is not None and mode.cpu_max_mhz is not None
    place = f"power_mode[{mode.id}].cpu_max_mhz" if capped and mode is not None else ""
    origin = hdf.origin(place or f"cpu.cluster[{cluster.id}].max_freq_mhz")
    note = f"; {core.note}" if core.note else ""
    if mode is not None and not _clocked(mode):
        note += f"; how far {mode.tdp_w:g} W hold clock and cores below that is not described"
    return (
        f"{len(found)} threads on {cluster.uarch} at {hertz / 1e6:g} MHz{_doubt(origin)}: cycles "
        f"counted from the compiled loops, of whose rate {MULTIPLYING.low * 100:.0f} to "
        f"{MULTIPLYING.high * 100:.0f} % are reached (an estimate){note}"
    )


def _storage(hdf: Hdf, kind: str) -> tuple[Range, str]:
    if hdf.storage is not None and not kind:
        rate = hdf.storage.seq_read_mbps
        return Range(0.8 * rate * MB, rate * MB), f"storage reads {rate:g} MB/s"
    chosen = kind or USUAL_STORAGE
    rate_of = STORAGE[chosen]
    told = f"storage is {chosen} with {rate_of.low:g} to {rate_of.high:g} MB/s (general knowledge)"
    return Range(rate_of.low * MB, rate_of.high * MB), told


# ---- how long it takes ----
@dataclass(frozen=True)
class Time:
    """Seconds, and what they are spent on: memory, arithmetic, or storage."""

    seconds: Range
    limit: str


def decode(work: Work, machine: Machine, depth: int) -> Time | None:
    """A token behind `depth` others; None where neither bandwidth nor cores are known."""
    size = work.layers.size + work.head.size + work.cache(depth)
    attention = work.attention(depth, depth + 1)

    def cycles(core: Core) -> float:
        return _one(work.layers, core) + _one(work.head, core) + attention * core.one(True)

    least = _least(work, machine, 1.0, attention) if machine.bandwidth else 0.0
    return _slowest(machine, size, None if _floats(work) else cycles, work.streamed, least)


def prefill(work: Work, machine: Machine, tokens: int) -> Time | None:
    """A prompt of `tokens` tokens up to the logits of the last."""
    steps = range(work.chunk, tokens + work.chunk, work.chunk)
    size = float(len(steps) * work.layers.size + work.head.size)
    streamed = len(steps) * (work.streamed - work.streamed_head) + work.streamed_head
    size += sum(work.cache(min(end, tokens)) for end in steps)
    attention = work.attention(0, tokens)

    def cycles(core: Core) -> float:
        body = work.layers.narrow * core.each(False) + work.layers.wide * core.each(True)
        return tokens * body + attention * core.one(True) + _one(work.head, core)

    least = _least(work, machine, tokens, attention)
    return _slowest(machine, size, None if _floats(work) else cycles, streamed, least)


def _least(work: Work, machine: Machine, tokens: float, attention: float) -> float:
    """Seconds that products of so many tokens, and of the head for one, take at least; 0 where that
    is not known. A loop of ours is far from it, but memory is further where tokens share a read."""
    if machine.ceiling is None:
        return 0.0
    body, head, most = work.layers, work.head, machine.ceiling
    integers = tokens * (body.narrow + body.wide) + head.narrow + head.wide + attention
    floats = tokens * body.floats + head.floats
    return GROUP_MACS * (integers / most.integers + floats / most.floats)


def _one(matrices: Matrices, core: Core) -> float:
    """Cycles of one token."""
    return matrices.narrow * core.one(False) + matrices.wide * core.one(True)


def _floats(work: Work) -> bool:
    """Products of float weights were not counted."""
    return work.layers.floats + work.head.floats > 0


def _slowest(
    machine: Machine,
    size: float,
    cycles: Callable[[Core], float] | None,
    streamed: int,
    least: float,
) -> Time | None:
    """The slowest of three: reading `size` bytes of memory, multiplying, reading `streamed` bytes
    of storage. Where memory or arithmetic is not known, there is no most; of multiplying then the
    `least` counts."""
    known: dict[str, Range] = {}
    if machine.bandwidth:
        known["memory"] = machine.bandwidth.inverse(size)
    if machine.cores and cycles is not None:
        rate = sum(hertz / cycles(core) for core, hertz in machine.cores)
        known["arithmetic"] = Range(MULTIPLYING.low * rate, MULTIPLYING.high * rate).inverse()
    all_known = len(known) == 2 and machine.clocked
    if "arithmetic" not in known and least:
        known["arithmetic"] = Range(least, least)
    if streamed:
        known["storage"] = machine.storage.inverse(streamed)
    if not known:
        return None
    limit = max(known, key=lambda name: known[name].low + known[name].high)
    most = max(one.high for one in known.values()) if all_known else math.inf
    return Time(Range(max(one.low for one in known.values()), most), limit)


def load_cold(work: Work, machine: Machine) -> Range:
    """Reading what stays in memory from storage."""
    return machine.storage.inverse(work.load_size)


def load_warm(work: Work) -> Range:
    """Opening a file that is in the page cache."""
    return MAPPING.inverse(work.load_size)


@dataclass(frozen=True)
class Prediction:
    """What a board in a power mode is expected to do with an artifact."""

    machine: Machine
    depth: int  # tokens in the context in decode
    prompt: int  # tokens of the prompt
    decode: Time | None  # a token
    prefill: Time | None  # the prompt, the model being open
    cold: Range  # loading from storage
    warm: Range  # loading from the page cache
    assumed: tuple[str, ...]

    def first_token(self, cold: bool) -> Range | None:
        """From the start of the process to the first token."""
        if self.prefill is None:
            return None
        return self.prefill.seconds.plus(self.cold if cold else self.warm)


def predict(work: Work, machine: Machine, depth: int, prompt: int) -> Prediction:
    """Everything that is predicted of a board in a power mode."""
    return Prediction(
        machine=machine,
        depth=depth,
        prompt=prompt,
        decode=decode(work, machine, depth),
        prefill=prefill(work, machine, prompt),
        cold=load_cold(work, machine),
        warm=load_warm(work),
        assumed=(*machine.assumed, *((FLOATS,) if _floats(work) else ())),
    )
