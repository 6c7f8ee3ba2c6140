"""The .memmap listing: the total first, then everything, same text for the same artifact."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemrun.format import memmap
from gemrun.format.reader import Artifact, read_artifact
from gemrun.format.spec import Buffer
from gemrun.format.writer import WriteError
from golden import make


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make.write(make.build(make.INT4), tmp_path / "a.gembin")
    return tmp_path / "a.gembin"


@pytest.fixture
def artifact(path: Path) -> Artifact:
    return read_artifact(path)


def test_the_first_five_lines_hold_the_total_and_its_parts(artifact: Artifact) -> None:
    head = memmap.render(artifact).splitlines()[:5]
    header = artifact.header
    assert head[0].startswith(f"total footprint  {header.ram_total} bytes")
    text = "\n".join(head)
    parts = ("weights", "tables", "arena", "kv", "engine", "stacks")
    for part in parts:
        assert f"{getattr(header, f'ram_{part}')} bytes" in text
    assert header.ram_total == sum(getattr(header, f"ram_{part}") for part in parts)


def test_everything_is_listed_with_its_place(artifact: Artifact) -> None:
    lines = memmap.render(artifact).splitlines()
    assert lines[5] == ""
    assert lines[6].split()[:5] == ["what", "name", "offset", "size", "align"]
    rows = [line.split() for line in lines[7:]]
    kinds = [row[0] for row in rows]
    assert kinds.count("section") == len(artifact.sections)
    assert kinds.count("tensor") == len(artifact.tensors)
    assert kinds.count("plane") == sum(1 for t in artifact.tensors if t.second_size)
    assert kinds.count("buffer") == len(Buffer)
    assert kinds.count("ring") == len(artifact.layers)
    tensors = [row for row in rows if row[0] == "tensor"]
    assert [int(row[2], 16) for row in tensors] == [t.offset for t in artifact.tensors]
    assert [int(row[3]) for row in tensors] == [t.size for t in artifact.tensors]
    assert {row[4] for row in tensors} == {"256"}
    assert all(len(row) >= 8 for row in rows)


def test_heads_that_keep_a_part_have_a_line_each(tmp_path: Path) -> None:
    make.write(make.build(make.MASKED), tmp_path / "a.gembin")
    with read_artifact(tmp_path / "a.gembin") as artifact:
        rows = [line.split() for line in memmap.render(artifact).splitlines()]
        units = [row for row in rows if row and row[0] == "unit"]
        assert [row[2] for row in units] == ["0.0", "0.1", "1.0", "1.1"]
        ends = [int(row[3], 16) + int(row[4]) for row in units]
        assert [int(row[3], 16) for row in units] == [0, *ends[:-1]]
        assert ends[-1] == sum(layer.kv_size for layer in artifact.layers)
        assert "layer 1 head 0 keeps 32+32 tokens" in " ".join(units[2])
        assert "layer 1 head 1 keeps all" in " ".join(units[3])


def test_a_tied_table_is_used_first_and_last(artifact: Artifact) -> None:
    head = next(line for line in memmap.render(artifact).splitlines() if ".head" in line)
    assert head.split()[-2:] == ["EMBED", "HEAD"]


def test_the_listing_lies_beside_and_is_deterministic(path: Path) -> None:
    with memmap.beside(path, path) as name:
        assert not name.exists()
    assert name == Path(f"{path}.memmap")
    first = name.read_bytes()
    assert first.startswith(memmap.BEGIN.encode())
    with memmap.beside(path, path):
        pass
    assert name.read_bytes() == first
    assert str(path).encode() not in first
    assert sorted(p.name for p in path.parent.iterdir()) == ["a.gembin", "a.gembin.memmap"]


def test_a_listing_that_cannot_be_written_is_an_error(path: Path) -> None:
    Path(f"{path}.memmap").mkdir()
    wrong = pytest.raises(WriteError, match=r"a\.gembin\.memmap: .* while writing \d+ bytes")
    with wrong, memmap.beside(path, path):
        pass
    assert not Path(f"{path}.memmap.partial").exists()


@pytest.mark.parametrize(("size", "text"), [(1, "1 MB"), (2_284_000_000, "2284 MB")])
def test_megabytes_are_decimal_and_rounded_up(size: int, text: str) -> None:
    assert memmap.megabytes(size) == text
