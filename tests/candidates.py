"""Candidates that a daemon has to refuse, by kind.

damaged(data, "cut", rng)       bytes that are no artifact any more
wrong_vector(data, rng)         sound by every checksum, but a stored answer is another
forged("borrowed", ..)          signatures that do not hold
inflated(path, target, size)    sound in front, and so large that its copy takes a while
Wrapped(folder)                 an engine that fails for the versions that a test names
hdf(folder, "gate-1", arch)     a board of one's own, to compile for
"""

from __future__ import annotations

import hashlib
import platform
import random
from dataclasses import replace
from pathlib import Path

from daemon import ROOT, gemrun_path
from fuzz.mutate import find, reseal, section_range
from gemrun.format.reader import read_artifact
from gemrun.format.spec import (
    ENTRY_SIZE,
    HEADER_SIZE,
    TABLE_OFFSET,
    Header,
    Section,
    TestVector,
    fourcc,
    size_of,
)
from gemrun.format.writer import seal_header

DAMAGED = ("cut", "longer", "bit", "zeros", "noise", "empty", "head")
WORKERS = ("crash", "exit", "hang", "garbage")
FORGED = ("unsigned", "stranger", "changed", "borrowed", "bent")
BLOCK = slice(256, 512)  # of the signature
ARCH = "aarch64" if platform.machine().lower() in ("aarch64", "arm64") else "x86_64"
OTHER_ARCH = "x86_64" if ARCH == "aarch64" else "aarch64"
WRAPPER = """#!/bin/sh
for kind in {kinds}; do
  if grep -q "$(basename "$1" .gembin)" "{folder}/$kind" 2>/dev/null; then
    case $kind in
      crash) kill -9 $$ ;;
      exit) exit 3 ;;
      hang) exec sleep 1000 ;;
      garbage) exec sh -c 'printf "\\377\\377\\377\\377garbage" >&'"$3"'; sleep 1000' ;;
    esac
  fi
done
exec {program} "$@"
"""


class Wrapped:
    """A gemrun that misbehaves for the digests in files named by the kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "gemrun-wrapped"
        text = WRAPPER.format(kinds=" ".join(WORKERS), folder=folder, program=gemrun_path())
        self.path.write_text(text, encoding="utf-8")
        self.path.chmod(0o755)

    def misbehave(self, kind: str, path: Path) -> None:
        """From now on, for this version."""
        with (self.folder / kind).open("a", encoding="utf-8") as stream:
            stream.write(f"{digest_of(path)}\n")

    def behave(self) -> None:
        """For every version."""
        for kind in WORKERS:
            (self.folder / kind).unlink(missing_ok=True)


def digest_of(path: Path) -> str:
    """The store's name of a version."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def damaged(data: bytes, kind: str, rng: random.Random) -> bytes:
    """A file of a kind in DAMAGED."""
    at = rng.randrange(len(data))
    if kind == "cut":
        return data[:at]
    if kind == "longer":
        return data + rng.randbytes(1 + at % 5000)
    if kind == "bit":
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == "zeros":
        return data[:at] + bytes(min(4096, len(data) - at)) + data[at + 4096 :]
    if kind == "noise":
        return rng.randbytes(len(data))
    return b"" if kind == "empty" else data[: 256 + at % 512]


def wrong_vector(path: Path, bit: int = 0) -> bytes:
    """The artifact with a bit of its first test vector's digest turned, and all checksums right."""
    with read_artifact(path) as artifact:
        vector = replace(artifact.tests[0], digest=artifact.tests[0].digest ^ 1 << bit)
    image = bytearray(path.read_bytes())
    start, _ = section_range(image, find(image, "TEST")) or (0, 0)
    image[start : start + size_of(TestVector)] = vector.pack()
    return bytes(reseal(image))


def forged(kind: str, plain: bytes, signed: bytes, other: bytes, rng: random.Random) -> bytes:
    """An artifact of a kind in FORGED but "stranger"; `other` is another one's signed file."""
    image = bytearray(plain if kind == "unsigned" else signed)
    if kind == "borrowed":
        image[BLOCK] = other[BLOCK]
    if kind == "bent":
        image[BLOCK.start + 16 + rng.randrange(64)] ^= 1 << rng.randrange(8)
    if kind == "changed":
        start, size = section_range(image, find(image, "WHOT")) or (0, 0)
        image[start + rng.randrange(size)] ^= 1 << rng.randrange(8)
        reseal(image)
    return bytes(image)


def hdf(folder: Path, board: str, arch: str) -> Path:
    """A description of a board that is not generic; its name in a device tree is acme,BOARD."""
    generic = f"generic-{arch.replace('_', '-')}"
    text = (ROOT / "hdf" / f"{generic}.toml").read_text(encoding="utf-8")
    text = text.replace(f'id = "{generic}"', f'id = "{board}"\ncompatible = ["acme,{board}"]')
    path = folder / f"{board}-{arch}.toml"
    path.write_text(text.replace(f'board = "{generic}"', f'board = "{board}"'), encoding="utf-8")
    return path


def inflated(path: Path, target: Path, size: int) -> None:
    """An artifact whose weights have `size` more bytes, all zero and none on the disk: by its
    header and section table sound, and copied as slowly as a large one."""
    image = path.read_bytes()
    header = Header.unpack(image)
    end = TABLE_OFFSET + ENTRY_SIZE * header.section_count
    table = bytearray(image[TABLE_OFFSET:end])
    last = len(table) - ENTRY_SIZE
    weights = Section.unpack(table, last)
    assert weights.type == fourcc("WHOT")
    whole = weights.size + size
    table[last:] = replace(weights, size=whole, mem_size=whole).pack()
    sealed = seal_header(replace(header, file_size=header.file_size + size), bytes(table))
    with target.open("wb") as stream:
        stream.write(sealed.pack() + image[HEADER_SIZE:TABLE_OFFSET] + table + image[end:])
        stream.truncate(header.file_size + size)
