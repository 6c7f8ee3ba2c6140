"""tie: store a shared embedding and head once."""

from __future__ import annotations

from dataclasses import replace

from gemmake.model import MODEL_LAYER, Model, Role


def tie(model: Model) -> Model:
    """Drop the separate embedding of a tied model; its rows stand at the head's place.

    The loader has already decided whether the two are one (equal, or only one of them present).
    """
    if not model.spec.tied:
        return model
    tensors = dict(model.tensors)
    embed = tensors.pop((MODEL_LAYER, Role.EMBED), None)
    if embed is not None:
        tensors[MODEL_LAYER, Role.HEAD] = replace(embed, role=Role.HEAD)
    return replace(model, tensors=tensors)
