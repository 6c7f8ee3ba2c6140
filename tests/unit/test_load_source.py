"""Checked arithmetic, bounded JSON and exact conversion of plain floats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gemmake.errors import CheckpointError
from gemmake.load.source import (
    SourceFile,
    checked_add,
    checked_mul,
    checked_product,
    display,
    name_list,
    plain_to_float,
    read_bytes,
)

TOP = 2**63 - 1


def test_checked_arithmetic_at_the_limit() -> None:
    assert checked_mul(TOP, 1, "x") == TOP
    assert checked_mul(TOP, 0, "x") == 0
    assert checked_add(TOP - 1, 1, "x") == TOP
    assert checked_product([], "x") == 1
    for wrong in (
        lambda: checked_mul(2**32, 2**31, "x"),
        lambda: checked_mul(-1, 1, "x"),
        lambda: checked_add(TOP, 1, "x"),
        lambda: checked_add(1, -1, "x"),
        lambda: checked_product([2**21] * 3, "x"),
        lambda: checked_product([2**62, 4, 0], "x"),
    ):
        with pytest.raises(CheckpointError, match=r"x: .* beyond 2"):
            wrong()


def test_every_half_value_converts_exactly() -> None:
    """All 65,536 patterns of F16 and BF16, subnormals and signed zeros among them."""
    import torch

    patterns = np.arange(65536, dtype=np.uint16)
    for dtype, kind in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        got = plain_to_float(patterns.view(np.uint8), dtype)
        wanted = torch.from_numpy(patterns.view(np.int16).copy()).view(kind).float().numpy()
        same = (got.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(got) & np.isnan(wanted))
        assert same.all()


def test_reads_past_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    source = SourceFile(path)
    assert source.read(8, 2).tobytes() == b"89"
    for offset, count in ((9, 2), (11, 0), (-1, 1), (0, -1), (0, 2**62)):
        with pytest.raises(CheckpointError, match="10 bytes"):
            source.read(offset, count)


def test_small_file_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"x" * 11)
    assert len(read_bytes(path, 11)) == 11
    with pytest.raises(CheckpointError, match="larger than 10 bytes"):
        read_bytes(path, 10)


def test_names_in_messages() -> None:
    assert display("a\n\x1b[31m") == "a\\x0a\\x1b[31m"
    assert len(display("x" * 10_000)) < 130
    assert name_list(f"n{i}" for i in range(12)).endswith("n5 and 4 more")
