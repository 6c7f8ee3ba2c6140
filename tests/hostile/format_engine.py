"""The engine's reader for the hostile tests: bytes in, status out."""

from __future__ import annotations

import mmap

import pytest


class EngineReader:
    """Opens images through gemrun_open_mem, with the CRC of the weights, and forgets them."""

    def __init__(self) -> None:
        try:
            from gemrun._engine import ffi, lib
        except ImportError as error:
            pytest.fail(f"gemrun._engine: {error}; run 'make dev'", pytrace=False)
        self.ffi, self.lib = ffi, lib
        self.config = ffi.new("gemrun_config *", lib.gemrun_config_default())
        self.config.threads = 1
        self.config.weights_check = lib.GEMRUN_WEIGHTS_FULL
        self.config.allow_foreign_board = 1
        self.config.ignore_memory = 1

    def status(self, image: bytes) -> int:
        """What the engine says about an image."""
        size = max(1, len(image))
        room = mmap.mmap(-1, size)  # on a page, and not longer than the image needs
        room[: len(image)] = image
        out = self.ffi.new("gemrun_context_t **")
        data = self.ffi.from_buffer(room)
        code = int(self.lib.gemrun_open_mem(out, data, len(image), self.ffi.NULL, 0, self.config))
        if code == 0:
            self.lib.gemrun_destroy(out[0])
        self.ffi.release(data)
        room.close()
        return code
