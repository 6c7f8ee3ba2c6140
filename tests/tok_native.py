"""Builds gr_tok*.c and gr_chat.c into a shared library and drives it through ctypes."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"
FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wconversion", "-O2"]
SOURCES = ("gr_tok_open.c", "gr_tok_check.c", "gr_tok.c", "gr_chat.c")
HANDLE_BYTES = 4096  # more than sizeof(gr_tok) and sizeof(gr_chat)


def build(folder: Path) -> ctypes.CDLL:
    """Compiles the library into `folder` and loads it."""
    out = folder / "libtok.so"
    sources = [str(CSRC / name) for name in SOURCES if (CSRC / name).exists()]
    command = ["gcc", *FLAGS, "-ffp-contract=off", "-shared", "-fPIC", "-o", str(out), *sources]
    subprocess.run(command, check=True)
    lib = ctypes.CDLL(str(out))
    lib.gr_tok_encode.restype = ctypes.c_int64
    lib.gr_tok_piece.restype = ctypes.c_size_t
    lib.gr_tok_piece_all.restype = ctypes.c_size_t
    lib.gr_utf8_push.restype = ctypes.c_size_t
    lib.gr_utf8_flush.restype = ctypes.c_size_t
    if hasattr(lib, "gr_chat_encode"):
        lib.gr_chat_encode.restype = ctypes.c_int64
    return lib


@lru_cache(maxsize=1)
def native() -> ctypes.CDLL:
    """The library, built once per process."""
    with tempfile.TemporaryDirectory() as folder:
        return build(Path(folder))


def aligned(data: bytes) -> ctypes.Array[ctypes.c_uint64]:
    """A copy of the bytes on an 8-byte boundary."""
    buffer = (ctypes.c_uint64 * (len(data) // 8 + 1))()
    ctypes.memmove(buffer, data, len(data))
    return buffer


class Tok:
    """A TOKN section opened by the engine's code."""

    def __init__(self, lib: ctypes.CDLL, section: bytes, rows: int) -> None:
        self.lib = lib
        self.memory = aligned(section)
        self.handle = (ctypes.c_uint64 * (HANDLE_BYTES // 8))()
        self.status = lib.gr_tok_open(
            self.memory, ctypes.c_size_t(len(section)), ctypes.c_uint32(rows), self.handle
        )
        self.scratch: ctypes.Array[ctypes.c_uint64] = (ctypes.c_uint64 * 0)()
        self.ids: ctypes.Array[ctypes.c_uint32] = (ctypes.c_uint32 * 0)()

    def encode(self, text: bytes | str, control: bool = False) -> list[int]:
        """Ids of a text; a negative result raises ValueError."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        need = 32 * len(data) + 256
        if len(self.scratch) * 8 < need:
            self.scratch = (ctypes.c_uint64 * (need // 8))()
            self.ids = (ctypes.c_uint32 * (3 * len(data) + 8))()
        count = self.lib.gr_tok_encode(
            self.handle, data, ctypes.c_size_t(len(data)), ctypes.c_bool(control), self.ids,
            ctypes.c_size_t(len(self.ids)), self.scratch, ctypes.c_size_t(need // 8 * 8),
        )  # fmt: skip
        if count < 0:
            raise ValueError(count)
        return self.ids[:count]

    def piece(self, token: int, control: bool = False) -> bytes:
        """Decoded bytes of one token."""
        out = ctypes.create_string_buffer(256)
        call = self.lib.gr_tok_piece_all if control else self.lib.gr_tok_piece
        size = call(self.handle, ctypes.c_uint32(token), out)
        return out.raw[:size]

    def decode(self, ids: Sequence[int]) -> bytes:
        """Bytes of many tokens."""
        return b"".join(self.piece(token) for token in ids)


class Message(ctypes.Structure):
    """gr_message."""

    _fields_ = (("role", ctypes.c_int), ("text", ctypes.c_char_p), ("len", ctypes.c_size_t))


ROLES = ("system", "user", "assistant")


class Chat:
    """A TMPL section opened by the engine's code."""

    def __init__(self, lib: ctypes.CDLL, section: bytes, rows: int) -> None:
        self.lib = lib
        self.memory = aligned(section)
        self.handle = (ctypes.c_uint64 * (HANDLE_BYTES // 8))()
        self.status = lib.gr_chat_open(
            self.memory, ctypes.c_size_t(len(section)), ctypes.c_uint32(rows), self.handle
        )

    def encode(
        self, tok: Tok, messages: Sequence[tuple[str, str]], prompt: bool = True
    ) -> list[int]:
        """Ids of (role, text) messages; a negative result raises ValueError."""
        data = [(ROLES.index(role), text.encode("utf-8")) for role, text in messages]
        array = (Message * len(data))(*(Message(role, text, len(text)) for role, text in data))
        size = sum(len(text) for _, text in data)
        run = size + (len(data) + 1) * len(self.memory)  # at most: all literals around each message
        need = 32 * run + 256 + run // 8 * 8 + 8
        scratch = (ctypes.c_uint64 * (need // 8 + 1))()
        ids = (ctypes.c_uint32 * (3 * need // 32 + 64))()
        count = self.lib.gr_chat_encode(
            self.handle, tok.handle, array, ctypes.c_size_t(len(data)), ctypes.c_bool(prompt), ids,
            ctypes.c_size_t(len(ids)), scratch, ctypes.c_size_t(need),
        )  # fmt: skip
        if count < 0:
            raise ValueError(count)
        return ids[:count]


class Stream:
    """gr_utf8_stream."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self.lib = lib
        self.state = ctypes.create_string_buffer(16)

    def push(self, data: bytes) -> bytes:
        """Characters that are complete now."""
        out = ctypes.create_string_buffer(3 * len(data) + 3)
        count = self.lib.gr_utf8_push(self.state, data, ctypes.c_size_t(len(data)), out)
        return out.raw[:count]

    def flush(self) -> bytes:
        """The rest."""
        out = ctypes.create_string_buffer(4)
        size = self.lib.gr_utf8_flush(self.state, out)
        return out.raw[:size]
