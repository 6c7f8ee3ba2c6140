"""Who made a candidate: the signature of an artifact, held against the keys that are trusted here.

    verdict = check(fd, config.models.signature, config.models.keys_dir)
    demand(verdict)                     ApiError("refused") where the policy does not let it pass

Trusted are the keys of all `*.pub` files of the keys folder, as `gemmake keygen` writes them
(gemrun/format/sign.py says how). A file that others may write is not used.

| found         | required | preferred | off       |
|---------------|----------|-----------|-----------|
| valid         | passes   | passes    | unchecked |
| unsigned      | refused  | passes    | unchecked |
| unknown_key   | refused  | passes    | unchecked |
| invalid       | refused  | refused   | unchecked |
| unchecked     | refused  | passes    | passes    |

`preferred` protects against damage and mistakes, not against somebody who takes the signature off:
that is what `required` is for. Verifying needs the extra [sign]; without it nothing is checked, and
`required` lets nothing pass. Structure and checksums of what is not signed are checked elsewhere.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gemctl.errors import ApiError
from gemctl.store import durable
from gemctl.store.copying import Pace, hash_range
from gemrun.format import sign, spec
from gemrun.format.sign import PublicKey
from gemrun.format.spec import Header, Section, Signature
from gemrun.format.writer import root_of

Policy = Literal["required", "preferred", "off"]
Kind = Literal["valid", "unsigned", "unknown_key", "invalid", "unchecked"]
KEYS_MOST = 256  # files looked at
SUFFIX = ".pub"
PASSES: dict[Policy, frozenset[Kind]] = {
    "required": frozenset({"valid"}),
    "preferred": frozenset({"valid", "unsigned", "unknown_key", "unchecked"}),
    "off": frozenset({"unchecked"}),
}


@dataclass(frozen=True)
class Verdict:
    """What was found. `key_id`: 16 hexadecimal digits, empty without a signature."""

    kind: Kind
    accepted: bool  # by the policy
    key_id: str
    sentence: str
    warning: bool = False  # it passes, and nobody vouches for it


@dataclass(frozen=True)
class Keys:
    """The keys of a folder, and what was wrong with files of it."""

    folder: Path
    keys: tuple[PublicKey, ...] = ()
    warnings: tuple[str, ...] = ()


class _Invalid(Exception):
    """The signature does not hold for this file. Text: why."""


def check(descriptor: int, policy: Policy, keys_dir: Path, pace: Pace | None = None) -> Verdict:
    """Verify the signature of an open artifact by the keys of a folder. Reads all of it where it
    is signed by one of them. ApiError: failed where it cannot be read, cancelled by `pace`.
    """
    if policy == "off":
        what = "not checked; set models.signature to required to have it checked"
        return Verdict("unchecked", True, "", f"signature: {what}")
    key_id = ""
    try:
        with durable.explained(Path("candidate")):
            header, block, table = _front(descriptor)
            key_id = block.key_id.hex() if block.alg else ""
            kind, sentence = _judge(descriptor, header, block, table, keys_dir, pace or Pace())
    except _Invalid as error:
        remedy = "get the artifact again from who signed it"
        kind, sentence = "invalid", f"signature: invalid, {error}; {remedy}"
    except sign.Unavailable as error:
        kind, sentence = "unchecked", str(error)
    accepted = kind in PASSES[policy]
    return Verdict(kind, accepted, key_id, sentence, accepted and kind != "valid")


def demand(verdict: Verdict) -> None:
    """ApiError("refused") where the policy does not let a candidate pass."""
    if not verdict.accepted:
        raise ApiError("refused", verdict.sentence)


def load_keys(folder: Path) -> Keys:
    """The trusted keys of a folder; none where it is missing. Never raises for what is in it."""
    keys: list[PublicKey] = []
    warnings: list[str] = []
    try:
        names = sorted(path.name for path in folder.iterdir() if path.suffix == SUFFIX)
    except OSError as error:
        return Keys(
            folder, (), (f"{folder}: {error.strerror}; create it and put .pub files there",)
        )
    if len(names) > KEYS_MOST:
        warnings.append(f"{folder}: {len(names)} keys, {KEYS_MOST} are used; remove some")
    for name in names[:KEYS_MOST]:
        try:
            keys.append(_read_key(folder / name))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            warnings.append(f"{folder / name}: {reason}; this key is not used")
    return Keys(folder, tuple(keys), tuple(warnings))


def _read_key(path: Path) -> PublicKey:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise sign.KeyFault("is not a regular file")
        if found.st_mode & stat.S_IWOTH:
            raise sign.KeyFault("everybody may write it")
        return sign.public_of(os.read(descriptor, sign.FILE_MOST + 1))
    finally:
        os.close(descriptor)


# ---- the artifact ----
def _front(descriptor: int) -> tuple[Header, Signature, bytes]:
    """Header, signature block and packed table. _Invalid for what is no artifact."""
    front = os.pread(descriptor, spec.TABLE_OFFSET, 0)
    if len(front) < spec.TABLE_OFFSET or not front.startswith(spec.MAGIC):
        raise _Invalid("the file is no artifact")
    header = Header.unpack(front)
    block = Signature.unpack(front, spec.SIGNATURE_OFFSET)
    if block.alg > sign.ED25519 or any(block.pad) or any(block.reserved):
        raise _Invalid("its block is malformed")
    if block.alg == 0 and (any(block.key_id) or any(block.signature)):
        raise _Invalid("its block is malformed")
    if not 1 <= header.section_count <= spec.MAX_SECTIONS:
        raise _Invalid("the header was changed")
    table = os.pread(descriptor, spec.ENTRY_SIZE * header.section_count, spec.TABLE_OFFSET)
    if len(table) != spec.ENTRY_SIZE * header.section_count:
        raise _Invalid("the file is cut short")
    return header, block, table


def _judge(
    descriptor: int, header: Header, block: Signature, table: bytes, keys_dir: Path, pace: Pace
) -> tuple[Kind, str]:
    if block.alg == 0:
        return "unsigned", "signature: none; sign the artifact with gemmake sign"
    trusted = load_keys(keys_dir)
    keys = [key for key in trusted.keys if key.id == block.key_id]
    name = block.key_id.hex()
    if not keys:
        more = f" ({'; '.join(trusted.warnings)})" if trusted.warnings else ""
        what = f"key {name} is not in {keys_dir}{more}; put its .pub file there to trust it"
        return "unknown_key", f"signature: {what}"
    root = root_of(header, table)
    if root != header.root_sha256 or zlib.crc32(header.pack()[:252]) != header.header_crc32:
        raise _Invalid("header or section table were changed")
    signer = next((key for key in keys if sign.matches(key, block, root)), None)
    if signer is None:
        raise _Invalid(f"it is not by key {name}, or not for this artifact")
    _check_content(descriptor, header, table, pace)
    comment = f" ({signer.comment})" if signer.comment else ""
    return "valid", f"signature: valid, by key {name}{comment}"


def _check_content(descriptor: int, header: Header, table: bytes, pace: Pace) -> None:
    """Every byte behind the table is what the signed table says: sections by hash, gaps zero."""
    size = os.fstat(descriptor).st_size
    if header.file_size != size:
        raise _Invalid(f"the file has {size} bytes, {header.file_size} were signed")
    pace.start(size)
    at = spec.TABLE_OFFSET + len(table)
    for entry in _entries(table):
        name = entry.name[:4].decode("ascii", "replace")
        if not at <= entry.offset <= entry.offset + entry.size <= size:
            raise _Invalid(f"section {name} has no place in the file")
        _check_gap(descriptor, at, entry.offset)
        if hash_range(descriptor, entry.offset, entry.size, pace).digest() != entry.sha256:
            raise _Invalid(f"section {name} was changed")
        at = entry.offset + entry.size
    _check_gap(descriptor, at, size)


def _entries(table: bytes) -> Iterator[Section]:
    for at in range(0, len(table), spec.ENTRY_SIZE):
        yield Section.unpack(table, at)


def _check_gap(descriptor: int, start: int, stop: int) -> None:
    if stop - start >= spec.WEIGHT_ALIGN or any(os.pread(descriptor, stop - start, start)):
        raise _Invalid(f"bytes {start}..{stop} between sections were changed")
