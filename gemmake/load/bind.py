"""Raw tensors against the architecture's full list: the `Model`, or every difference by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from gemmake.errors import CheckpointError
from gemmake.load.families import ArchConfig, Wanted, expected_tensors
from gemmake.load.names import HEAD
from gemmake.load.source import RawTensor, display, name_list
from gemmake.model import MODEL_LAYER, FloatRows, Role, TensorRef

READABLE = frozenset(
    ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
)
_COMPARE_ROWS = 4096
Unpermute = Callable[[RawTensor, Wanted], RawTensor]


@dataclass(frozen=True)
class Bound:
    """Tensors in their places. The head is absent when it is the embedding."""

    tensors: Mapping[tuple[int, Role], TensorRef]
    vocab_rows: int
    tied: bool
    notes: tuple[str, ...]


def bind(
    config: ArchConfig,
    raw: Mapping[str, RawTensor],
    *,
    norm_offset: float,
    where: str,
    adapt: Unpermute | None = None,
    compare: bool = True,
) -> Bound:
    """Match `raw` (by canonical name) with the full list of the architecture.

    `norm_offset` is added to norms later (1.0 where files hold w of 1 + w). `adapt` turns a raw
    tensor into the row order of Hugging Face. Without `compare` no weight is read: an embedding and
    a head are one where the config says so. CheckpointError lists everything that is missing, extra
    or misshapen.
    """
    given = dict(raw)
    embed, head, tied, notes = _resolve_ties(config, given, where, compare)
    problems: list[str] = []
    tensors: dict[tuple[int, Role], TensorRef] = {}
    missing = []
    for wanted in _wanted(config, tied=tied):
        source = {Role.EMBED: embed, Role.HEAD: head}.get(wanted.role, given.get(wanted.name))
        given.pop(wanted.name, None)
        if source is None:
            missing.append(wanted.name)
            continue
        problem = _mismatch(source, wanted)
        if problem:
            problems.append(problem)
            continue
        if adapt is not None:
            source = adapt(source, wanted)
        tensors[wanted.layer, wanted.role] = _tensor_ref(source, wanted, norm_offset)
    given.pop(HEAD, None)
    _report(where, missing, [t.name for t in given.values()], problems)
    rows = tensors[MODEL_LAYER, Role.EMBED].rows
    if not tied and tensors[MODEL_LAYER, Role.HEAD].rows != rows:
        raise CheckpointError(
            f"{where}: lm_head has {tensors[MODEL_LAYER, Role.HEAD].rows} rows, "
            f"the embedding {rows}; they must agree"
        )
    if config.vocab is not None and config.vocab != rows:
        notes.append(f"the config says vocab_size {config.vocab}, the embedding has {rows} rows")
    return Bound(tensors, rows, tied, tuple(notes))


def _wanted(config: ArchConfig, *, tied: bool) -> list[Wanted]:
    wanted = list(expected_tensors(config))
    if not tied:
        wanted.append(Wanted(MODEL_LAYER, Role.HEAD, HEAD, (0, config.hidden)))
    return wanted


def _resolve_ties(
    config: ArchConfig, given: Mapping[str, RawTensor], where: str, compare: bool
) -> tuple[RawTensor | None, RawTensor | None, bool, list[str]]:
    """(embedding, head, tied, notes) from the flag and from which of the two exists."""
    embed, head = given.get("embed_tokens.weight"), given.get(HEAD)
    if embed is not None and head is not None:
        one = embed.shape == head.shape
        if one and (_same(embed, head) if compare else config.tied):
            return embed, None, True, ["lm_head.weight equals the embedding; it is stored once"]
        if config.tied:
            return (
                embed,
                head,
                False,
                [
                    "the config ties lm_head.weight to the embedding, but the file holds two "
                    "different tensors; both are kept"
                ],
            )
        return embed, head, False, []
    if head is not None and config.tied:
        note = "the embedding is missing; lm_head.weight, tied by the config, takes its place"
        return head, None, True, [note]
    if embed is not None and head is None and config.tied is False:
        raise CheckpointError(
            f"{where}: lm_head.weight is missing and the config sets tie_word_embeddings to "
            "false; add the tensor or correct the config"
        )
    return embed, head, head is None, []


def _same(a: RawTensor, b: RawTensor) -> bool:
    """Equal values, compared in blocks of rows."""
    for first in range(0, a.rows, _COMPARE_ROWS):
        count = min(_COMPARE_ROWS, a.rows - first)
        if not np.array_equal(a.read(first, count), b.read(first, count)):
            return False
    return True


def _mismatch(source: RawTensor, wanted: Wanted) -> str | None:
    """What is wrong with the shape or type, or None."""
    shape = wanted.shape
    good = len(source.shape) == len(shape) and source.shape[-1] == shape[-1]
    if good and len(shape) == 2:
        good = source.shape[0] == shape[0] if shape[0] else source.shape[0] > 0
    if not good:
        rows = [str(n) if n else "vocabulary" for n in shape]
        return f"{display(source.name)} is {list(source.shape)}, expected [{', '.join(rows)}]"
    if source.dtype not in READABLE:
        return f"{display(source.name)} has type {source.dtype}, convert it to F32, F16 or BF16"
    return None


def _tensor_ref(source: RawTensor, wanted: Wanted, norm_offset: float) -> TensorRef:
    return TensorRef(
        role=wanted.role,
        layer=wanted.layer,
        name=source.name,
        rows=source.rows,
        cols=source.cols,
        dtype=source.dtype,
        read=source.read,
        norm_offset=norm_offset if wanted.is_norm else 0.0,
    )


def _report(where: str, missing: list[str], extra: list[str], problems: list[str]) -> None:
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing ({name_list(missing)})")
    if extra:
        parts.append(f"{len(extra)} not part of the architecture ({name_list(extra)})")
    if problems:
        shown = "; ".join(problems[:8]) + ("; .." if len(problems) > 8 else "")
        parts.append(f"{len(problems)} misshapen ({shown})")
    if parts:
        raise CheckpointError(
            f"{where}: tensors do not match the config: {', '.join(parts)}; "
            "download the checkpoint again or correct its config"
        )


def permuted_rows(raw: RawTensor, head_dim: int) -> RawTensor:
    """Undo GGUF's row order of Llama q and k: its row 2i + j of a head is row j * hd/2 + i here."""
    order = np.arange(head_dim).reshape(head_dim // 2, 2).T.reshape(-1)
    return RawTensor(raw.name, raw.shape, raw.dtype, raw.file, partial(_permuted, raw, order))


def _permuted(raw: RawTensor, order: npt.NDArray[np.int64], first: int, count: int) -> FloatRows:
    hd = len(order)
    start = first - first % hd
    stop = min(raw.rows, -(-(first + count) // hd) * hd)
    block = raw.rows_of(start, stop - start).reshape(-1, hd, raw.cols)[:, order]
    flat = block.reshape(stop - start, raw.cols)
    return np.ascontiguousarray(flat[first - start : first - start + count])
