"""The engine under test, with everything that may not show in a result as an argument: kernel,
threads, chunk, context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gemrun._engine import ffi, lib
from gemrun.context import GemRunContext
from reference.floatmath import F32


class Engine:
    """One open artifact; logits as arrays."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.context = GemRunContext(path, **{"ignore_memory": True, **config})

    def evaluate(self, ids: Sequence[int]) -> F32:
        """Append ids; logits after every one of them: [len(ids), vocab rows]."""
        rows: list[F32] = []

        def take(position: int, logits: Any) -> None:
            rows.append(np.array(logits, np.float32))

        self.context.eval(ids, take)
        return np.stack(rows)

    def prefill(self, ids: Sequence[int]) -> F32:
        """Append ids; logits after the last one."""
        self.context.prefill(ids)
        return np.array(self.context.logits(), np.float32)

    def decode(self, token: int) -> F32:
        return self.prefill([token])

    def reset(self) -> None:
        self.context.reset_kv_cache()

    def greedy(self, prompt: Sequence[int], steps: int) -> list[int]:
        """Ids of greedy decoding by the engine's own sampler, from an empty cache."""
        self.reset()
        self.context.prefill(prompt)
        out = []
        for _ in range(steps):
            out.append(self.context.sample(temperature=0.0, repetition_penalty=1.0))
            self.context.decode(out[-1])
        return out


@contextmanager
def opened(path: Path, **config: Any) -> Iterator[Engine]:
    engine = Engine(path, **config)
    try:
        yield engine
    finally:
        engine.context.close()


def kernels() -> list[str]:
    """Names of the kernels that this machine runs."""
    names = []
    while (name := lib.gr_kernels_at(len(names))) != ffi.NULL:
        names.append(ffi.string(name).decode())
    return names
