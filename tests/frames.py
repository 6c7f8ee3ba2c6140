"""Frames of the engine's channel: four bytes of length, little-endian, and one JSON object."""

from __future__ import annotations

import json
from typing import Any, BinaryIO


def pack(frame: dict[str, Any]) -> bytes:
    body = json.dumps(frame).encode()
    return len(body).to_bytes(4, "little") + body


def read(stream: BinaryIO) -> dict[str, Any]:
    """The next one. Raises EOFError where there is none."""
    head = stream.read(4)
    if not head:
        raise EOFError
    found: dict[str, Any] = json.loads(stream.read(int.from_bytes(head, "little")))
    return found
