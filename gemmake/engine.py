"""The engine as the compiler drives it: hidden states through layers, text to ids, test vectors.

Uses the engine's internal entry points (csrc/gr_hooks.h), which firmware never sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from gemmake.errors import ArtifactError
from gemmake.model import FloatRows
from gemrun._engine import ffi, lib

#: Called with (layer, step, x): the float inputs [rows, cols] of a product, valid in the call.
Capture = Callable[[int, int, FloatRows], None]
_CAPTURE_TYPE = "void(void *, uint32_t, uint32_t, const float *, uint32_t, uint32_t)"


class Engine:
    """An open artifact. Context manager; memory is not checked, the host is not the target."""

    def __init__(self, image: Path, threads: int) -> None:
        config = ffi.new("gemrun_config *", lib.gemrun_config_default())
        config.threads = threads
        config.ignore_memory = 1
        out = ffi.new("gemrun_context_t **")
        status = lib.gemrun_open(out, bytes(image), config)
        if status != 0:
            raise ArtifactError(f"{image.name}: {_last_error()} (status {status})")
        self._ctx = out[0]

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lib.gemrun_destroy(self._ctx)
        self._ctx = ffi.NULL

    def run_hidden(self, x: FloatRows, chunk: int, capture: Capture | None) -> None:
        """Run the layers over one sequence of hidden states [tokens, hidden], in place."""
        lib.gemrun_reset_kv_cache(self._ctx)
        failures: list[BaseException] = []
        hook = _hook(capture, failures) if capture else ffi.NULL
        for first in range(0, len(x), chunk):
            part = x[first : first + chunk]
            pointer = ffi.cast("float *", part.ctypes.data)
            status = lib.gemrun_internal_hidden(self._ctx, pointer, len(part), hook, ffi.NULL)
            if failures:
                raise failures[0]
            self._check(status)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without bos, control tokens taken as text."""
        raw = text.encode("utf-8")
        ids = ffi.new("int32_t[]", len(raw) + 16)
        count = self._check(lib.gemrun_tokenize(self._ctx, raw, len(raw), 0, ids, len(ids)))
        return list(ids[0:count])

    def test_vector(self, prompt: Sequence[int], steps: int) -> tuple[int, list[int]]:
        """Digest of the logits and the greedy ids that follow a prompt."""
        ids = ffi.new("uint32_t[]", list(prompt))
        out, digest = ffi.new("uint32_t[]", steps), ffi.new("uint64_t *")
        self._check(lib.gemrun_internal_digest(self._ctx, ids, len(prompt), out, steps, digest))
        return int(digest[0]), list(out[0:steps])

    def usable_context(self) -> tuple[int, int]:
        """(compiled context, vocabulary rows)."""
        info = ffi.new("gemrun_info *", {"size": ffi.sizeof("gemrun_info")})
        self._check(lib.gemrun_get_info(self._ctx, info))
        return int(info.context), int(info.vocab_rows)

    def _check(self, status: int) -> int:
        if status < 0:
            raise ArtifactError(f"engine: {_last_error()} (status {status})")
        return status


def _hook(capture: Capture, failures: list[BaseException]) -> Any:
    def called(_user: Any, layer: int, step: int, x: Any, rows: int, cols: int) -> None:
        try:
            buffer = ffi.buffer(x, 4 * rows * cols)
            capture(layer, step, np.frombuffer(buffer, np.float32).reshape(rows, cols))
        except BaseException as error:  # must not unwind through C; raised after the call
            failures.append(error)

    return ffi.callback(_CAPTURE_TYPE, called)


def _last_error() -> str:
    text: bytes = ffi.string(lib.gemrun_last_error())
    return text.decode("utf-8", "replace")
