"""Reading the small files of a compile whole, up to a limit."""

from __future__ import annotations

import os
from pathlib import Path

from gemrun.format.files import open_regular

__all__ = ["open_regular", "read_small"]


def read_small(path: Path, limit: int) -> bytes | None:
    """The whole of a regular file; None when it is larger than `limit` bytes. OSError."""
    with os.fdopen(open_regular(path), "rb") as stream:
        data = stream.read(limit + 1)
    return data if len(data) <= limit else None
