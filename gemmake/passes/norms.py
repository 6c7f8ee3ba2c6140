"""fold_norms: norms stored as w with an effective weight of 1 + w become plain weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gemmake.model import FloatRows, Model, TensorRef


def fold_norms(model: Model) -> Model:
    """Replace every tensor that has a norm offset by one that reads with the offset added."""
    return replace(model, tensors={key: _folded(ref) for key, ref in model.tensors.items()})


def _folded(ref: TensorRef) -> TensorRef:
    if ref.norm_offset == 0.0:
        return ref
    offset = np.float32(ref.norm_offset)

    def read(first: int, count: int) -> FloatRows:
        effective: FloatRows = ref.read(first, count) + offset
        return effective

    return replace(ref, read=read, norm_offset=0.0)
