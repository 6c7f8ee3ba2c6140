"""What a compile recorded about the quality of a sparse mask; the manifest may hold anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeInt, ValidationError

from gemmake.kvmask.quality import Quality, holds, words
from gemmake.options import KvGate


class _Figures(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    kl: FiniteFloat
    top1: FiniteFloat
    perplexity: FiniteFloat
    tokens: NonNegativeInt
    answers: NonNegativeInt = 0
    right: NonNegativeInt = 0
    right_dense: NonNegativeInt = 0


class _Gate(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)

    kl: FiniteFloat
    top1: FiniteFloat
    perplexity: FiniteFloat
    recall: FiniteFloat = KvGate.recall


class Judged(BaseModel):
    """The part of kv_mask that says how the mask was judged."""

    model_config = ConfigDict(frozen=True, strict=True)

    quality: _Figures
    gate: _Gate
    curve: list[list[FiniteFloat]] = []

    @property
    def found(self) -> Quality:
        """On held-out text, against the same weights with all of the cache."""
        return Quality(**self.quality.model_dump())

    @property
    def passed(self) -> bool:
        """Whether the gates that are recorded with it let it through."""
        return holds(KvGate(**self.gate.model_dump()), self.found)

    @property
    def text(self) -> str:
        """In one line."""
        return words(self.found)

    def table(self) -> Iterator[str]:
        """A heading and a line for every template that the compile judged."""
        if not self.curve:
            return
        yield "cache's blocks saved, and what it costs:"
        for row in self.curve:
            if 6 <= len(row) <= 9:
                yield f"{row[1]:>6.1%}  {words(_quality(row))}"


def _quality(row: list[float]) -> Quality:
    _, _, kl, top1, perplexity, *counts = row
    return Quality(kl, top1, perplexity, *map(int, counts))


def judged(mask: Any) -> Judged | None:
    """Of a manifest's kv_mask; None where nothing, or nothing of this form, is recorded."""
    try:
        return Judged.model_validate(mask)
    except ValidationError:
        return None
