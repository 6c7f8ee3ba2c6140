"""gemrun_tokenize at every capacity: all ids or the capacity that they need, nothing beyond."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gemrun import GemRunContext
from gemrun._engine import ffi, lib

BEYOND = -7


@pytest.mark.parametrize("family", ["gemma3", "llama3"])
def test_every_capacity(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], family: str
) -> None:
    path = artifact_cache(tiny_checkpoint(family), "--kv-cache-size", "128")
    with GemRunContext(path) as context:
        pointer = context._handle.pointer
        bos = context.detokenize([context.info.bos_id], control=True)
        assert bos
        for text in ("", "hello there", f"{bos}hello", bos, f"{bos}{bos}"):
            data = text.encode()
            for flags in range(4):
                want = context.tokenize(text, bos=bool(flags & 1), control=bool(flags & 2))
                assert want[:2] != [context.info.bos_id] * 2 or text == f"{bos}{bos}"
                for capacity in range(len(want) + 3):
                    ids = ffi.new("int32_t[]", [BEYOND] * (len(want) + 4))
                    made = lib.gemrun_tokenize(pointer, data, len(data), flags, ids, capacity)
                    assert ids[capacity] == BEYOND
                    if capacity >= len(want):
                        assert list(ids[0:made]) == want, (text, flags, capacity)
                        continue
                    assert made < 0
                    said = ffi.string(lib.gemrun_last_error()).decode()
                    assert re.search(rf"capacity: {capacity} .*at least {len(want)}$", said), said
