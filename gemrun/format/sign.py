"""Signatures of artifacts: keys, their files, and the signature block of csrc/FORMAT.md, 2.2.

    gembin-ed25519 <base64 of the 32 bytes> <comment>           NAME.pub, one line
    gembin-ed25519-secret <base64 of the 32 bytes> <comment>    NAME.key, one line, mode 0600

A key's id is the first 8 bytes of the SHA-256 of its 32 public bytes: it says which key to try and
proves nothing. What is signed is a tag and the root, and the root fixes every byte of the file but
the signature block and the header's own CRC. Ed25519 gives the same signature every time.

Signing and verifying need the package `cryptography`, asked for when it is first used:
`Unavailable` where it is missing. Keys are read without it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass

from gemrun import extras
from gemrun.format.spec import Signature

TAG = b"gembin sig 1"
ED25519 = 1  # alg
WORD, SECRET_WORD = "gembin-ed25519", "gembin-ed25519-secret"
ED25519_MODULE = "cryptography.hazmat.primitives.asymmetric.ed25519"
KEY_BYTES = 32
FILE_MOST = 1024  # bytes of a key's file
COMMENT_MOST = 200  # characters


class Unavailable(ImportError):
    """The package that does the mathematics is not installed, or broken; the text says which."""


def _demand_cryptography() -> None:
    """Unavailable, where it cannot be used."""
    reason = extras.problem(ED25519_MODULE, "cryptography", "sign", "pip install")
    if reason is not None:
        raise Unavailable(f"signature: {reason}")


class KeyFault(ValueError):
    """A key's file is not one. Text: what is wrong."""


@dataclass(frozen=True)
class PublicKey:
    """A key to verify with. `comment` is free text of its file."""

    raw: bytes
    comment: str = ""

    @property
    def id(self) -> bytes:
        """The 8 bytes that the signature block names the key by."""
        return hashlib.sha256(self.raw).digest()[:8]

    def line(self) -> str:
        """The text of its file."""
        return _line(WORD, self.raw, self.comment)


@dataclass(frozen=True, repr=False)
class SecretKey:
    """A key to sign with."""

    seed: bytes
    comment: str = ""

    def public(self) -> PublicKey:
        """The key that verifies. Unavailable."""
        _demand_cryptography()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.from_private_bytes(self.seed)
        return PublicKey(key.public_key().public_bytes_raw(), self.comment)

    def sign(self, root: bytes) -> Signature:
        """The signature block for a root. Unavailable."""
        _demand_cryptography()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        made = Ed25519PrivateKey.from_private_bytes(self.seed).sign(TAG + root)
        return Signature(alg=ED25519, key_id=self.public().id, signature=made)

    def line(self) -> str:
        """The text of its file."""
        return _line(SECRET_WORD, self.seed, self.comment)


def public_of(data: bytes) -> PublicKey:
    """The key in the bytes of a NAME.pub. KeyFault."""
    return PublicKey(*_fields(data, WORD))


def secret_of(data: bytes) -> SecretKey:
    """The key in the bytes of a NAME.key. KeyFault."""
    return SecretKey(*_fields(data, SECRET_WORD))


def matches(key: PublicKey, block: Signature, root: bytes) -> bool:
    """Whether the block holds this key's signature of the root. Unavailable."""
    _demand_cryptography()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key.raw).verify(block.signature, TAG + root)
    except InvalidSignature:
        return False
    return True


def _line(word: str, raw: bytes, comment: str) -> str:
    return " ".join(filter(None, (word, base64.b64encode(raw).decode(), comment))) + "\n"


def _fields(data: bytes, word: str) -> tuple[bytes, str]:
    try:
        text = data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise KeyFault("is not text") from None
    if len(data) > FILE_MOST or not text.isprintable():
        raise KeyFault("is not one line of text")
    found, _, rest = text.partition(" ")
    if found != word:
        raise KeyFault(f"does not begin with {word}")
    coded, _, comment = rest.strip().partition(" ")
    try:
        raw = base64.b64decode(coded, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if not raw or base64.b64encode(raw).decode() != coded:
        raise KeyFault("its second word is not base64")
    if len(raw) != KEY_BYTES:
        raise KeyFault(f"holds {len(raw)} bytes, a key has {KEY_BYTES}")
    return raw, comment.strip()[:COMMENT_MOST]
