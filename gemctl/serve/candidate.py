"""The first look at a candidate, before a byte of it is copied: is it an artifact, and a whole one?

Reads what stands in front (header, signature block, section table: 9 KiB at most) by the caller's
descriptor. What is no artifact is refused here, by what it looks like; what is damaged further
behind is found in the store's copy (artifact.py).
"""

from __future__ import annotations

import codecs
import os
import stat
from pathlib import Path

from gemctl.errors import ApiError
from gemctl.store import durable
from gemctl.store.copying import source_of
from gemrun.format import spec
from gemrun.format.codes import FormatError
from gemrun.format.reader import check_front

FRONT_MOST = spec.TABLE_OFFSET + spec.MAX_SECTIONS * spec.ENTRY_SIZE  # bytes
MAKES = "gemmake --model {model} --target BOARD --output X.gembin"
OF_FILE = "make one of it: " + MAKES.format(model="FILE")
OF_FOLDER = "make one of its folder: " + MAKES.format(model="FOLDER")
OF_ANY = "name one that gemmake made: " + MAKES.format(model="CHECKPOINT")
UNPACK = "unpack it first"
# First bytes -> what such a file is, and what helps.
KINDS: tuple[tuple[bytes, str, str], ...] = (
    (b"GGUF", "a GGUF checkpoint", OF_FILE),
    (b"PK\x03\x04", "a ZIP archive, as .pt checkpoints are", OF_FILE),
    (b"\x80\x02", "a pickle, as old .pt checkpoints are", OF_FILE),
    (b"\x1f\x8b", "a gzip archive", UNPACK),
    (b"\x28\xb5\x2f\xfd", "a zstd archive", UNPACK),
    (b"\xfd7zXZ\x00", "an xz archive", UNPACK),
    (b"BZh", "a bzip2 archive", UNPACK),
    (b"\x7fELF", "a program", OF_ANY),
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the file itself: git lfs pull"),
    (b"<!DOCTYPE", "a web page", "download the file itself"),
    (b"<html", "a web page", "download the file itself"),
)


def check(name: str, descriptor: int, size_most: int) -> None:
    """Raises ApiError("refused") for what is no artifact, is not whole, or is too large; others
    where the file cannot be read."""
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size == 0:
        raise _none(name, "is empty", "copy it again from where it was made, or make one: "
                    + MAKES.format(model="CHECKPOINT"))  # fmt: skip
    size = source_of(descriptor, size_most).st_size
    with durable.explained(Path("candidate")):
        front = os.pread(descriptor, FRONT_MOST, 0)
    if front[: len(spec.MAGIC)] != spec.MAGIC[: len(front)]:
        what, remedy = looks_like(front, size)
        raise _none(name, f"looks like {what}" if what else "", remedy)
    try:
        check_front(front, size)
    except FormatError as error:
        raise ApiError("refused", f"{name}: {error}") from None


def _none(name: str, looks: str, remedy: str) -> ApiError:
    what = f", it {looks}" if looks else ""
    return ApiError("refused", f"{name}: the file is no gembin artifact{what}; {remedy}")


def looks_like(front: bytes, size: int) -> tuple[str, str]:
    """What a file is by its first bytes ("" where that is not known), and what helps."""
    for start, what, remedy in KINDS:
        if front.startswith(start):
            return what, remedy
    if _is_safetensors(front, size):
        return "a safetensors checkpoint", OF_FOLDER
    if front[257:262] == b"ustar":
        return "a tar archive", UNPACK
    if not any(front):
        return "zeros", "copy it again from where it was made"
    return ("text" if _is_text(front) else ""), OF_ANY


def _is_safetensors(front: bytes, size: int) -> bool:
    """The length of a JSON object, and the object's beginning."""
    length = int.from_bytes(front[:8], "little")
    return 2 <= length <= size - 8 and front[8:9] == b"{"


def _is_text(front: bytes) -> bool:
    """UTF-8 without control characters; its last character may be cut off."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(front)
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character.isspace() for character in text)
