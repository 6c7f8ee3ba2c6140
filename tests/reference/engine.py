"""The engine under test, called through its C interface with everything that may not show in a
result as an argument: kernel, threads, chunk, context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from reference.floatmath import F32


class EngineError(RuntimeError):
    """A negative status; `code` is its number."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class Engine:
    """One open artifact."""

    def __init__(self, path: Path, **config: Any) -> None:
        module = import_module("gemrun._engine")
        self._ffi, self._lib = module.ffi, module.lib
        settings = self._ffi.new("gemrun_config *", self._lib.gemrun_config_default())
        settings.ignore_memory = 1
        kernel = config.pop("kernel", None)
        name = self._ffi.NULL if kernel is None else self._ffi.new("char[]", kernel.encode())
        settings.kernel = name
        for field, value in config.items():
            setattr(settings, field, value)
        out = self._ffi.new("gemrun_context_t **")
        self._check(self._lib.gemrun_open(out, str(path).encode(), settings))
        self._ctx = out[0]

    def _check(self, status: int) -> int:
        if status < 0:
            raise EngineError(status, self._ffi.string(self._lib.gemrun_last_error()).decode())
        return status

    def close(self) -> None:
        self._lib.gemrun_destroy(self._ctx)
        self._ctx = self._ffi.NULL

    def reset(self) -> None:
        self._lib.gemrun_reset_kv_cache(self._ctx)

    def _copy(self, pointer: Any, count: int) -> F32:
        values: F32 = np.frombuffer(self._ffi.buffer(pointer, 4 * count), np.float32).copy()
        return values

    def evaluate(self, ids: Sequence[int]) -> F32:
        """Append ids; logits after every one of them: [len(ids), vocab rows]."""
        rows: list[F32] = []

        @self._ffi.callback("int(void *, uint32_t, const float *, uint32_t)")  # type: ignore[untyped-decorator]
        def take(user: Any, position: int, logits: Any, count: int) -> int:
            rows.append(self._copy(logits, count))
            return 0

        wanted = np.asarray(ids, np.int32)
        pointer = self._ffi.from_buffer("int32_t[]", wanted)
        self._check(self._lib.gemrun_eval(self._ctx, pointer, len(ids), take, self._ffi.NULL))
        return np.stack(rows)

    def prefill(self, ids: Sequence[int]) -> F32:
        """Append ids; logits after the last one."""
        pointer = self._ffi.from_buffer("int32_t[]", np.asarray(ids, np.int32))
        self._check(self._lib.gemrun_prefill(self._ctx, pointer, len(ids)))
        return self.logits()

    def decode(self, token: int) -> F32:
        self._check(self._lib.gemrun_decode(self._ctx, token))
        return self.logits()

    def logits(self) -> F32:
        count = self._ffi.new("uint32_t *")
        pointer = self._lib.gemrun_logits(self._ctx, count)
        return self._copy(pointer, count[0])

    def greedy(self, prompt: Sequence[int], steps: int) -> list[int]:
        """Ids of greedy decoding by the engine's own sampler, from an empty cache."""
        self.reset()
        self.prefill(prompt)
        request = self._ffi.new("gemrun_request *", self._lib.gemrun_request_default(self._ctx))
        request.temperature = 0
        request.repetition_penalty = 1
        out = []
        for _ in range(steps):
            out.append(self._check(self._lib.gemrun_sample(self._ctx, request)))
            self._check(self._lib.gemrun_decode(self._ctx, out[-1]))
        return out

    def run_tests(self) -> int:
        return self._check(self._lib.gemrun_run_tests(self._ctx))


@contextmanager
def opened(path: Path, **config: Any) -> Iterator[Engine]:
    engine = Engine(path, **config)
    try:
        yield engine
    finally:
        engine.close()


def kernels() -> list[str]:
    """Names of the kernels that this machine runs."""
    cpu = Path("/proc/cpuinfo").read_text().split()
    return ["scalar", "avx2"] if "avx2" in cpu and "fma" in cpu else ["scalar"]
