"""What gemmake asks of the engine beyond the public interface.

No promises: these functions serve one caller. They need numpy, which only a compile host has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from gemrun._engine import ffi, lib
from gemrun.context import GemRunContext, _Call, _check

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float32]

# (layer, step, inputs float32 [rows, cols]); step is a gb_op: QKV, O, GATE_UP or DOWN. The array
# is valid during the call.
Capture: TypeAlias = "Callable[[int, int, Floats], object]"


class _Listener:
    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.failure: BaseException | None = None


@ffi.def_extern()  # type: ignore[untyped-decorator]
def gemrun_py_capture(user: Any, layer: int, stage: int, x: Any, rows: int, cols: int) -> None:
    """Show the inputs of one layer's products."""
    import numpy as np

    listener: _Listener = ffi.from_handle(user)
    if listener.failure is None:
        try:
            values = np.frombuffer(ffi.buffer(x, 4 * rows * cols), np.float32)
            listener.capture(layer, stage, values.reshape(rows, cols))
        except BaseException as error:  # must not unwind through C; raised after the call
            listener.failure = error


class Probe:
    """What KV heads of an open artifact would lose if they kept less. Context manager.

    `units` are budgets (sink, recent) in blocks; `gram` [layers, heads, dim, dim] float32 is each
    head's part of the output matrix times itself. Of every token whose position plus one is a
    multiple of `every`, `figures` has [samples, layers, heads, 1 + 2 * budgets]: the square of the
    head's own output, of the difference by budget, and the hidden share of the probabilities.
    """

    def __init__(
        self,
        context: GemRunContext,
        units: Sequence[tuple[int, int]],
        gram: Floats,
        every: int,
    ) -> None:
        layers, heads, dim, _ = gram.shape
        self._shape = (layers, heads, 1 + 2 * len(units))
        self._gram = ffi.from_buffer("float[]", gram)
        budgets = ffi.new(
            "gb_kv_unit[]", [{"sink": sink, "recent": recent} for sink, recent in units]
        )
        with _Call(context._handle) as pointer:
            self._probe = lib.gs_probe_new(
                pointer, budgets, len(units), self._gram, layers, heads, dim, every
            )
        if self._probe == ffi.NULL:
            raise MemoryError("probe: no memory for its figures")

    def figures(self) -> Floats:
        """A view of the figures; those of a position are overwritten when it comes again."""
        import numpy as np

        samples = ffi.new("uint32_t *")
        data = lib.gs_probe_figures(self._probe, samples)
        shape = (samples[0], *self._shape)
        size = 4 * samples[0] * self._shape[0] * self._shape[1] * self._shape[2]
        return np.frombuffer(ffi.buffer(data, size), np.float32).reshape(shape)

    def close(self) -> None:
        """Watch no longer; idempotent."""
        probe, self._probe = self._probe, ffi.NULL
        lib.gs_probe_free(probe)

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


class NarrowProbe:
    """What KV heads of an open artifact with an int8 cache would lose if their values or their keys
    had 4 bits. Context manager.

    `gram` and `every` as in Probe; `flags`: what is looked at, of a unit's. Of every token that is
    looked at `figures` has [samples, layers, heads, 3]: the square of the head's own output, of
    what values of 4 bits change in it, and of what keys of 4 bits do.
    """

    def __init__(self, context: GemRunContext, gram: Floats, every: int, flags: int) -> None:
        layers, heads, dim, _ = gram.shape
        self._shape = (layers, heads, 3)
        self._gram = ffi.from_buffer("float[]", gram)
        with _Call(context._handle) as pointer:
            self._probe = lib.gs_values_new(pointer, self._gram, layers, heads, dim, every, flags)
        if self._probe == ffi.NULL:
            raise MemoryError("probe of 4 bits: no memory for its figures, or no int8 cache")

    def figures(self) -> Floats:
        """A view of the figures; those of a position are overwritten when it comes again."""
        import numpy as np

        samples = ffi.new("uint32_t *")
        data = lib.gs_values_figures(self._probe, samples)
        shape = (samples[0], *self._shape)
        return np.frombuffer(ffi.buffer(data, 4 * int(np.prod(shape))), np.float32).reshape(shape)

    def close(self) -> None:
        """Watch no longer; idempotent."""
        probe, self._probe = self._probe, ffi.NULL
        lib.gs_values_free(probe)

    def __enter__(self) -> NarrowProbe:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def see_less(context: GemRunContext, units: Sequence[tuple[int, ...]]) -> object:
    """Let KV heads of an artifact without KVMK see what `units` say, in rings that keep
    everything: (sink, recent, blocks, first) and, if need be, flags; none: all again. `first`
    counts blocks of 8-bit values. Keep what it returns as long as it holds."""
    names = ("sink", "recent", "blocks", "first", "flags")
    array = ffi.new("gb_kv_unit[]", [dict(zip(names, unit, strict=False)) for unit in units])
    with _Call(context._handle) as pointer:
        _check(lib.gemrun_internal_units(pointer, array, len(units)))
    return array


def ring_blocks(context: GemRunContext) -> bytes:
    """The blocks of the tokens in the cache, ring after ring, as section PINP holds them."""
    with _Call(context._handle) as pointer:
        out = ffi.new("uint8_t[]", _check(lib.gs_session_blocks(pointer, ffi.NULL, 0)))
        _check(lib.gs_session_blocks(pointer, out, len(out)))
        return bytes(ffi.buffer(out))


def run_hidden(
    context: GemRunContext, hidden: Floats, chunk: int, capture: Capture | None = None
) -> None:
    """Run hidden states through the layers of an open artifact: no embedding, no head.

    Replaces hidden [tokens, hidden] float32, C-contiguous, by what the last layer gives, as one
    sequence from an empty cache, `chunk` tokens at a time.
    """
    import numpy as np

    if hidden.dtype != np.float32 or not hidden.flags.c_contiguous or hidden.ndim != 2:
        raise ValueError("hidden states: not a contiguous float32 matrix; copy them first")
    listener = _Listener(capture) if capture is not None else None
    handle = ffi.new_handle(listener) if listener else ffi.NULL
    function = lib.gemrun_py_capture if listener else ffi.NULL
    with _Call(context._handle) as pointer:
        lib.gemrun_reset_kv_cache(pointer)
        for first in range(0, len(hidden), chunk):
            rows = hidden[first : first + chunk]
            x = ffi.from_buffer("float[]", rows, require_writable=True)
            status = lib.gemrun_internal_hidden(pointer, x, len(rows), function, handle)
            if listener and listener.failure is not None:
                raise listener.failure
            _check(status)
