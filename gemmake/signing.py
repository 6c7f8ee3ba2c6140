"""`gemmake keygen` and `gemmake sign`: make a pair of keys, and put a signature into an artifact.

    keygen(Path("vendor"))                     vendor.key (0600) and vendor.pub
    sign(Path("x.gembin"), Path("vendor.key"))

Signing changes the 256 bytes of the signature block and nothing else, and gives the same bytes
every time. A damaged artifact is refused: a signature says that the whole of it is meant.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from gemmake.errors import OutputError, UsageError
from gemmake.failures import past_stopping
from gemmake.files import open_regular
from gemrun.format import sign as sign_
from gemrun.format import spec, writer
from gemrun.format.files import uncache
from gemrun.format.reader import read_artifact
from gemrun.format.sign import PublicKey, SecretKey
from gemrun.format.writer import show

PRIVATE = 0o600


@dataclass(frozen=True)
class Signed:
    """A signed artifact. `replaced`: the id of the key whose signature was there before."""

    path: Path
    key: PublicKey
    replaced: str = ""

    def line(self) -> str:
        """What the command says."""
        other = self.replaced not in ("", self.key.id.hex())
        before = f", instead of key {self.replaced}" if other else ""
        return f"SUCCESS: {show(str(self.path))} signed by key {self.key.id.hex()}{before}"


# ---- keys ----
def keygen(base: Path, comment: str = "") -> PublicKey:
    """Write BASE.key and BASE.pub; neither may exist. GemError."""
    secret_path, public_path = _beside(base, ".key"), _beside(base, ".pub")
    for path in (secret_path, public_path):
        if os.path.lexists(path):
            raise OutputError(f"{show(str(path))}: exists; name another output, keys are kept")
    secret = SecretKey(secrets.token_bytes(sign_.KEY_BYTES), _checked(comment or base.name))
    try:
        public = secret.public()
    except sign_.Unavailable as error:
        raise UsageError(str(error)) from None
    _create(secret_path, secret.line(), PRIVATE)
    try:
        _create(public_path, public.line(), 0o644)
    except BaseException:
        secret_path.unlink()
        raise
    return public


def _beside(base: Path, suffix: str) -> Path:
    if base.name in ("", ".", ".."):
        raise UsageError(f"--output {show(str(base))}: names no file; give a name for the keys")
    return base.with_name(base.name + suffix)


def _checked(comment: str) -> str:
    """A comment as it can stand in a key's file; what cannot be printed becomes a question mark."""
    plain = "".join(c if c.isprintable() else "?" for c in show(comment))
    if len(plain) > sign_.COMMENT_MOST:
        raise UsageError(f"--comment: {len(plain)} characters; at most {sign_.COMMENT_MOST}")
    return plain


def _create(path: Path, text: str, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        raise _unwritten(path, error) from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(text.encode())
            stream.flush()
            os.fsync(descriptor)
    except OSError as error:
        path.unlink()
        raise _unwritten(path, error) from error
    except BaseException:
        path.unlink()
        raise


def _unwritten(path: Path, error: OSError) -> OutputError:
    reason = error.strerror or str(error)
    return OutputError(f"{show(str(path))}: {reason}; check the folder and its free space")


def read_secret(path: Path) -> SecretKey:
    """The key in a NAME.key that nobody else can read. UsageError."""
    data, mode = _read_key(path)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        what = f"others may read it (mode {stat.S_IMODE(mode):04o}); chmod 600 it"
        raise UsageError(f"{show(str(path))}: {what}")
    try:
        return sign_.secret_of(data)
    except sign_.KeyFault as error:
        raise UsageError(
            f"{show(str(path))}: {error}; name a file made by gemmake keygen"
        ) from None


def read_public(path: Path) -> PublicKey:
    """The key in a NAME.pub. UsageError."""
    data, _ = _read_key(path)
    try:
        return sign_.public_of(data)
    except sign_.KeyFault as error:
        raise UsageError(
            f"{show(str(path))}: {error}; name a file made by gemmake keygen"
        ) from None


def _no_key(path: Path, error: sign_.KeyFault) -> UsageError:
    return UsageError(f"{show(str(path))}: {error}; name a file made by gemmake keygen")


def _read_key(path: Path) -> tuple[bytes, int]:
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            return stream.read(sign_.FILE_MOST + 1), os.fstat(stream.fileno()).st_mode
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{show(str(path))}: {reason}; name a key's file") from None


# ---- artifacts ----
def sign(artifact: Path, key: Path, output: Path | None = None) -> Signed:
    """Sign an artifact, in its place or as `output`; whole or not at all. GemError, FormatError."""
    from gemmake.output import replaceable

    secret = read_secret(key)
    target = Path(os.path.realpath(artifact if output is None else output))
    replaceable(target, spec.MAGIC, "artifact")
    partial = target.with_name(target.name + writer.PARTIAL)
    replaceable(partial, spec.MAGIC, "unfinished artifact")
    with read_artifact(artifact) as found:  # nothing damaged is signed
        before, root = found.signature, found.header.root_sha256
    try:
        block = secret.sign(root)
        public = secret.public()
    except sign_.Unavailable as error:
        raise UsageError(str(error)) from None
    try:
        _write(artifact, target, partial, block.pack(), root)
    except OSError as error:
        raise _unwritten(target, error) from error
    replaced = before.key_id.hex() if before.alg else ""
    return Signed(target, public, replaced)


def _write(artifact: Path, target: Path, partial: Path, block: bytes, root: bytes) -> None:
    partial.unlink(missing_ok=True)
    try:
        with os.fdopen(open_regular(artifact), "rb") as source, partial.open("xb") as made:
            shutil.copyfileobj(source, made, 1 << 20)
            made.flush()
            writer.write_all(made.fileno(), spec.SIGNATURE_OFFSET, block)
            if target.exists():
                os.fchmod(made.fileno(), stat.S_IMODE(target.stat().st_mode))
            os.fsync(made.fileno())
        with read_artifact(partial) as copied:  # the source may have changed meanwhile
            if copied.header.root_sha256 != root:
                raise OutputError(f"{show(str(artifact))}: changed while it was signed; try again")
        with partial.open("rb") as signed:
            uncache(signed.fileno())
        past_stopping()
        partial.replace(target)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
