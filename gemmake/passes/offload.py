"""offload: weights that do not stay in memory (csrc/FORMAT.md, COLD), and what that costs.

Rows of an embedding and the low plane of a head are read one by one; streamed matrices are read
from storage for every token, ahead of the steps that use them. Feed-forward blocks are streamed
first: they are most of a layer, and in one piece. Tensors lie in the order of their use, so that
storage is read forwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gemmake.figures import mib
from gemmake.options import Offload
from gemmake.passes.layout import Stream
from gemrun.format import cold, spec
from gemrun.format.spec import Cold, ColdBy, Role

FFN = (Role.GATE_UP, Role.DOWN)
ATTENTION = (Role.Q, Role.K, Role.V, Role.O)
LITTLE = 0.03  # of all weights; who saves less is told so


@dataclass(frozen=True)
class Extent:
    """What is cold: rows of embedding and head; of so many layers, the last ones, feed-forward
    blocks and attention; the plane of the head that is read for every token."""

    rows: bool = False
    ffn: int = 0
    head: bool = False
    attention: int = 0


def extent_of(level: Offload, layers: int) -> Extent:
    """What is cold at a level."""
    ffn = layers if level in (Offload.FFN, Offload.ALL) else 0
    rest = level is Offload.ALL
    rows = level not in (Offload.NONE, Offload.AUTO)
    return Extent(rows, ffn, rest, layers if rest else 0)


def layers_of(stream: Stream) -> int:
    """How many layers there are."""
    return 1 + max(tensor.record.layer for tensor in stream.tensors)


def records(conf: spec.Conf, stream: Stream, extent: Extent) -> tuple[Cold, ...]:
    """The planes that are cold; none where as much would be in memory at once."""
    found = _named(stream, extent)
    gained = cold.resident(conf, stream.records(), found, stream.size) < stream.size
    return found if gained else ()


def _named(stream: Stream, extent: Extent) -> tuple[Cold, ...]:
    """The planes that an extent names, whether anything is gained or not."""
    layers = layers_of(stream)
    return tuple(
        Cold(tensor=index, plane=plane, by=int(by))
        for index, tensor in enumerate(stream.records())
        for plane, by in _planes(tensor, extent, layers)
    )


def _planes(tensor: spec.Tensor, extent: Extent, layers: int) -> Iterator[tuple[int, ColdBy]]:
    """(plane, how it is read) of a tensor."""
    role, from_end = Role(tensor.role), layers - tensor.layer
    if role is Role.EMBED and extent.rows:
        yield 0, ColdBy.ROWS
    if role is Role.HEAD and extent.head:
        yield 0, ColdBy.STREAM
    if role in (Role.EMBED, Role.HEAD) and tensor.second_size and extent.rows:
        yield 1, ColdBy.ROWS
    if (role in FFN and from_end <= extent.ffn) or (
        role in ATTENTION and from_end <= extent.attention
    ):
        yield 0, ColdBy.STREAM


def choices(conf: spec.Conf, stream: Stream, level: Offload) -> Iterator[tuple[Cold, ...]]:
    """What `--offload auto` may take, from what costs least to what costs most; `level`: at least.

    The head is read once for a prompt, feed-forward blocks and attention once for every chunk.
    """
    layers = layers_of(stream)
    extents = [
        extent_of(level, layers),
        Extent(rows=True),
        *(Extent(True, blocks) for blocks in range(1, layers + 1)),
        *(Extent(True, layers, True, blocks) for blocks in range(layers + 1)),
    ]
    for extent in extents:
        yield records(conf, stream, extent)


@dataclass(frozen=True)
class Cost:
    """What cold weights cost. Bytes."""

    size: int  # of all weights
    held: int  # in memory at once
    rows: int  # of planes that are read by rows
    low: int  # of that the head's
    streamed: int  # read from storage for every token
    head: int  # of that the head, which prompts read once

    def tokens_per_second(self, megabytes_per_second: float) -> float | None:
        """The limit that storage sets; None where nothing is streamed."""
        return 1e6 * megabytes_per_second / self.streamed if self.streamed else None


def cost(conf: spec.Conf, stream: Stream, found: tuple[Cold, ...]) -> Cost:
    """What these records cost."""
    tensors = stream.records()
    planes = list(cold.planes(found, tensors))
    rows = [p for p in planes if p.by is ColdBy.ROWS]
    return Cost(
        size=stream.size,
        held=cold.resident(conf, tensors, found, stream.size),
        rows=sum(p.size for p in rows),
        low=sum(p.size for p in rows if p.tensor.role == Role.HEAD),
        streamed=cold.streamed(found, tensors),
        head=sum(p.size for p in planes if p.by is ColdBy.STREAM and p.tensor.layer < 0),
    )


def lines(found: Cost, storage: tuple[str, float] | None, chunk: int) -> list[str]:
    """What cold weights cost, in words; `storage`: its kind and MB/s."""
    told = [
        f"offload: {mib(found.held, 1)} of {mib(found.size, 1)} of weights are in memory at once; "
        f"{mib(found.rows, 1)} of embedding and head are read by rows, "
        f"{mib(found.streamed, 1)} are read from storage for every token"
    ]
    rate = found.tokens_per_second(storage[1]) if storage else None
    if storage and rate is not None:
        kind, megabytes = storage
        prompt = found.streamed - found.head
        prompts = f", and for prompts {1e6 * megabytes * chunk / prompt:.3g}" if prompt else ""
        told.append(
            f"offload: {kind} at {megabytes:g} MB/s allows {rate:.2g} tokens per second{prompts}"
        )
    elif found.streamed:
        told.append(
            "offload: the target does not describe its storage: tokens per second are its MB/s / "
            f"{found.streamed / 1e6:.1f}"
        )
    if found.low:
        told.append(
            "offload: sampling without top-k, or with more than the best 64, reads "
            f"{mib(found.low, 1)} for every token besides"
        )
    return told


def little(conf: spec.Conf, stream: Stream, found: tuple[Cold, ...], level: Offload) -> list[str]:
    """A line where a level that was asked for saves next to nothing: how much, and why."""
    saved = stream.size - cold.resident(conf, stream.records(), found, stream.size)
    if saved >= LITTLE * stream.size:
        return []
    told = f"{level.value} saves {mib(saved, 1)} of {mib(stream.size, 1)} of weights"
    if not saved:
        told = f"all weights stay in memory, as {level.value} saves nothing"
    return [f"offload: {told}: {_why(conf, stream, level)}"]


def _why(conf: spec.Conf, stream: Stream, level: Offload) -> str:
    """Why a level saves next to nothing."""
    if level is not Offload.ROWS:
        return "what is read from storage needs as much room on its way"
    named = _named(stream, extent_of(level, layers_of(stream)))
    planes = list(cold.planes(named, stream.records()))
    if not planes:
        return "the embedding is the head too, of which a token needs all; --offload all saves more"
    room = sum(cold.room(plane, conf) for plane in planes)
    size = sum(plane.size for plane in planes)
    return (
        f"{mib(size, 1)} could be read by rows, but {mib(room, 1)} of room are kept for rows "
        f"of a prefill step of {conf.chunk} and of the head, with {conf.threads} threads; "
        "--offload ffn saves more"
    )
