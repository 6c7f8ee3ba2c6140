"""Losses on the way, in a file beside the output: a compile that was stopped goes on from there.

File: 8 bytes "gemloss1", u32 size of the header, header (msgpack: what it belongs to, windows,
tokens, looks: steps and figures of every template that was judged), then added, lost, hidden and
seen as little-endian 64-bit numbers. It goes when the artifact is written.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import numpy as np

from gemmake.files import read_small
from gemmake.kvmask.losses import F64, I64, Losses
from gemmake.kvmask.quality import Quality
from gemrun.format.writer import whole

MAGIC = b"gemloss1"
SUFFIX = ".losses"
MOST = 1 << 28  # bytes

Looks = dict[int, Quality]  # by steps of the template


@dataclass(frozen=True)
class Saved:
    """Where losses are kept, and what they belong to: artifact, texts, budgets."""

    path: Path
    key: Mapping[str, object]

    def store(self, losses: Losses, looks: Mapping[int, Quality] | None = None) -> None:
        """Write them, whole or not at all. OSError."""
        header = msgpack.packb(
            {
                "key": dict(self.key),
                "windows": losses.windows,
                "tokens": losses.tokens,
                "looks": [[steps, *astuple(q)] for steps, q in (looks or {}).items()],
            }
        )
        with whole(self.path) as partial, partial.open("wb") as file:
            file.write(MAGIC + struct.pack("<I", len(header)) + header)
            for array in _arrays(losses):
                file.write(array.astype(array.dtype.newbyteorder("<")).tobytes())

    def load(self, losses: Losses, looks: Looks | None = None) -> bool:
        """Take what is there into empty losses and looks, if it belongs to the same; whether it
        did."""
        try:
            data = read_small(self.path, MOST)
        except OSError:
            return False
        if data is None or data[:8] != MAGIC:
            return False
        try:
            size = struct.unpack_from("<I", data, 8)[0]
            header = msgpack.unpackb(data[12 : 12 + size])
            if header["key"] != dict(self.key):
                return False
            at = 12 + size
            for array in _arrays(losses):
                found = np.frombuffer(data, array.dtype.newbyteorder("<"), array.size, at)
                array[...] = found.reshape(array.shape)
                at += array.nbytes
            judged = {int(steps): _quality(*figures) for steps, *figures in header["looks"]}
            losses.windows, losses.tokens = int(header["windows"]), int(header["tokens"])
            if looks is not None:
                looks.update(judged)
        except (ValueError, KeyError, TypeError, struct.error, msgpack.UnpackException):
            for array in _arrays(losses):
                array[...] = 0
            return False
        return True


def _quality(*figures: float) -> Quality:
    kl, top1, perplexity, *counts = figures
    return Quality(float(kl), float(top1), float(perplexity), *map(int, counts))


def _arrays(losses: Losses) -> tuple[F64, F64, I64, I64]:
    return losses.added, losses.lost, losses.hidden, losses.seen
