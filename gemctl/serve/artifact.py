"""What the daemon knows of an artifact: its header here, everything else from a process of its own.

A candidate may be anything. `inspect` reads all of it (structure, checksums, board, signature) in a
child, so that neither its size nor what it does to a reader becomes the daemon's; `declared` reads
256 bytes of a version that has passed.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gemctl import waiting
from gemctl.config import ModelsConfig
from gemctl.errors import OUT_OF, ApiError, of_system
from gemrun.format import spec
from gemrun.format.codes import Code, FormatError
from gemrun.format.spec import ENTRY_SIZE, HEADER_SIZE, MAGIC, Header, Section, fourcc

INSPECT_S = 600.0  # a large file on a slow disk
ANSWER_MOST = 1 << 16  # bytes
UNREADABLE = (OSError, FormatError, ValueError, struct.error)  # of a header or a record


@dataclass(frozen=True)
class Declared:
    """What the header promises. Sizes in bytes."""

    ram_total: int
    ram_weights: int  # of that, mapped from the file
    kv_layout_id: int  # equal for equal context, KV type and shape
    target: str


@dataclass(frozen=True)
class Thermal:
    """The thermal policy in an artifact, in C; None: it says nothing."""

    threshold_c: float | None = None
    continuous_c: float | None = None  # the board's limit for continuous load


@dataclass(frozen=True)
class Inspected:
    """A candidate that may be loaded."""

    declared: Declared
    context: int  # tokens
    tests: int  # stored test vectors
    thermal: Thermal
    signature: str  # a sentence
    warnings: tuple[str, ...] = ()


def declared(path: Path) -> Declared:
    """The header's figures. Raises ApiError("refused")."""
    try:
        with path.open("rb") as stream:
            head = stream.read(HEADER_SIZE)
            size = os.fstat(stream.fileno()).st_size
        if not head.startswith(MAGIC):
            raise FormatError(Code.MAGIC, "no header of an artifact")
        header = Header.unpack(head)
        if header.file_size != size:
            what = f"it has {size} bytes, its header says {header.file_size}"
            raise FormatError(Code.SIZE, what)
    except UNREADABLE as error:
        raise _damaged(path, error) from None
    return Declared(
        header.ram_total,
        header.ram_weights,
        header.kv_layout_id,
        header.target.rstrip(b"\0").decode("ascii", "replace"),
    )


def thermal(path: Path) -> Thermal:
    """The thermal policy of a version that has passed its checks. Raises ApiError("refused") where
    it was damaged since."""
    try:
        return _thermal(path)
    except UNREADABLE as error:
        raise _damaged(path, error) from None


def board(path: Path) -> tuple[str, Any]:
    """The hash of the board description that a version was compiled for, and the description.
    Raises ApiError("refused") where it was damaged since."""
    try:
        with path.open("rb") as stream:
            header = Header.unpack(stream.read(HEADER_SIZE))
            text = _section(stream, header, "HDFJ", spec.MAX_MANIFEST)
        return header.hdf_sha256.hex(), json.loads(text or "null")
    except (*UNREADABLE, RecursionError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ApiError:
    """A version of the store that is not what it was, in our words and not in Python's."""
    reason = "it is cut short"
    if isinstance(error, OSError) and error.errno in OUT_OF:
        return of_system(f"version {path.stem[:12]}", error)
    if isinstance(error, OSError):
        reason = error.strerror or "it cannot be read"
    elif isinstance(error, FormatError):
        reason = str(error)
    return ApiError("refused", f"version {path.stem[:12]}: damaged: {reason}; stage it again")


def _thermal(path: Path) -> Thermal:
    with path.open("rb") as stream:
        header = Header.unpack(stream.read(HEADER_SIZE))
        record = _section(stream, header, "THRM", spec.MAX_MANIFEST)
    if not record:
        return Thermal()
    policy = spec.Thermal.unpack(record)
    return Thermal(policy.threshold_c or None, policy.device_max_c or None)


def _section(stream: BinaryIO, header: Header, kind: str, most: int) -> bytes:
    """The bytes of a section; none where there is no such one. Raises FormatError."""
    stream.seek(header.table_offset)
    table = stream.read(header.section_count * ENTRY_SIZE)
    for at in range(0, len(table), ENTRY_SIZE):
        entry = Section.unpack(table, at)
        if entry.type == fourcc(kind):
            if entry.size > most:
                raise FormatError(Code.SIZE, f"section {kind}: {entry.size} bytes")
            stream.seek(entry.offset)
            return stream.read(entry.size)
    return b""


def _result(name: str, answer: dict[str, Any]) -> Inspected:
    if "error" in answer:
        raise ApiError("refused", f"{name}: {answer['error']}")
    facts = dict(answer)
    return Inspected(
        declared=Declared(**facts.pop("declared")),
        thermal=Thermal(**facts.pop("thermal")),
        warnings=tuple(facts.pop("warnings")),
        **facts,
    )


async def inspect(name: str, path: Path, config: ModelsConfig, root: Path) -> Inspected:
    """Read a whole candidate. Raises ApiError: refused, timeout. `root`: sensors.sysfs_root."""
    options = {
        "path": str(path),
        "signature": config.signature,
        "keys_dir": str(config.keys_dir),
        "allow_foreign_board": config.allow_foreign_board,
        "root": str(root),
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gemctl.serve.inspect", json.dumps(options)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)},
    )
    try:
        output, _ = await waiting.within(INSPECT_S, process.communicate())
    except TimeoutError:
        reason = f"{name}: not read within {INSPECT_S:g} s; check the disk"
        raise ApiError("timeout", reason) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        answer = json.loads(output[:ANSWER_MOST])
    except ValueError:
        reason = f"{name}: its reader ended with code {process.returncode}; check the file"
        raise ApiError("refused", reason) from None
    return _result(name, answer)
