"""Signatures: keys, signing, what gemcheck and the daemon say of them, and every changed byte."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gemctl.errors import ApiError
from gemctl.store import sign
from gemctl.store.copying import Pace
from gemmake import signing
from gemmake.check import rules
from gemmake.check.cli import main as gemcheck
from gemmake.check.rules import Severity
from gemmake.cli import main as gemmake
from gemmake.errors import GemError, OutputError, UsageError
from gemrun.format import sign as keys_
from gemrun.format import spec
from gemrun.format.codes import Code, FormatError
from gemrun.format.reader import read_artifact
from gemrun.format.sign import PublicKey, SecretKey

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "v1.0"
GOOD = GOLDEN / "tiny-int4.gembin"
SEED = bytes(range(32))
# RFC 8032, section 7.1, test 1.
RFC_SECRET = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
RFC_PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")


def secret_file(folder: Path, seed: bytes = SEED, name: str = "vendor") -> Path:
    """NAME.key in a folder of its own, NAME.pub in folder/keys."""
    (folder / "keys").mkdir(exist_ok=True)
    secret = SecretKey(seed, name)
    path = folder / f"{name}.key"
    path.write_text(secret.line())
    path.chmod(0o600)
    (folder / "keys" / f"{name}.pub").write_text(secret.public().line())
    return path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return secret_file(tmp_path)


@pytest.fixture
def signed(tmp_path: Path, key: Path) -> Path:
    """A signed artifact beside its keys."""
    path = tmp_path / "x.gembin"
    signing.sign(GOOD, key, path)
    return path


@contextmanager
def opened(data: Path | bytes) -> Iterator[int]:
    if isinstance(data, Path):
        descriptor = os.open(data, os.O_RDONLY)
    else:
        descriptor = os.memfd_create("artifact")
        os.write(descriptor, data)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def verdict(data: Path | bytes, keys: Path, policy: sign.Policy = "preferred") -> sign.Verdict:
    with opened(data) as descriptor:
        return sign.check(descriptor, policy, keys)


def gemcheck_line(path: Path, *keys: Path) -> rules.Finding:
    report = rules.check_file(path, keys=[signing.read_public(k) for k in keys])
    return next(f for f in report.findings if f.rule == "signature")


def run(main: Any, *words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


# ---- keys ----
def test_a_key_is_the_one_of_the_standard() -> None:
    assert SecretKey(RFC_SECRET).public().raw == RFC_PUBLIC
    assert PublicKey(RFC_PUBLIC).id == hashlib.sha256(RFC_PUBLIC).digest()[:8]
    assert "9d61" not in repr(SecretKey(RFC_SECRET))


def test_key_files_are_read_as_they_are_written() -> None:
    for comment in ("", "vendor", "two words ü", "x" * 200):
        secret = SecretKey(SEED, comment)
        assert keys_.secret_of(secret.line().encode()) == secret
        assert keys_.public_of(secret.public().line().encode()) == secret.public()
    line = SecretKey(SEED, "v").public().line()
    assert keys_.public_of(line.rstrip("\n").encode()).raw == SecretKey(SEED).public().raw
    assert keys_.public_of(line.replace("\n", "\r\n").encode()).comment == "v"


LINE = SecretKey(SEED, "v").public().line().encode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "does not begin"),
        (b"\n", "does not begin"),
        (b"gembin-ed25519", "not base64"),
        (b"gembin-ed25519 ", "not base64"),
        (b"gembin-ed25519 AAAA v", "holds 3 bytes"),
        (b"gembin-ed25519 " + b"A" * 88 + b" v", "holds 66 bytes"),
        (LINE.replace(b"=", b""), "not base64"),
        (LINE.replace(b"=", b"!"), "not base64"),
        (LINE * 2, "not one line"),
        (LINE.replace(b" v", b"\tv"), "not one line"),
        (LINE.replace(b" v", b" \xff"), "is not text"),
        (LINE.replace(b" v", b" " + b"x" * 1024), "not one line"),
        (LINE.replace(b"ed25519", b"ed25518"), "does not begin"),
        (SecretKey(SEED).line().encode(), "does not begin with gembin-ed25519"),
        (b"untrusted comment: minisign public key\nRWQ", "not one line"),
    ],
)
def test_other_files_are_no_keys(data: bytes, words: str) -> None:
    with pytest.raises(keys_.KeyFault, match=words):
        keys_.public_of(data)


def test_every_cut_of_a_key_is_noticed() -> None:
    for size in range(len(b"gembin-ed25519 ") + 44):
        with pytest.raises(keys_.KeyFault, match=r"."):
            keys_.public_of(LINE[:size])


def test_keygen_writes_a_pair_and_never_over_one(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        done = run(gemmake, "keygen", "--output", tmp_path / "vendor", "--comment", "Plant 7")
    finally:
        os.umask(old)
    assert done.exit_code == 0, done.output
    secret, public = tmp_path / "vendor.key", tmp_path / "vendor.pub"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert signing.read_secret(secret).public() == signing.read_public(public)
    assert signing.read_public(public).comment == "Plant 7"
    assert signing.read_public(public).id.hex() in done.stdout
    before = secret.read_bytes(), public.read_bytes()
    assert run(gemmake, "keygen", "--output", tmp_path / "vendor").exit_code == 7
    secret.rename(tmp_path / "away")
    assert run(gemmake, "keygen", "--output", tmp_path / "vendor").exit_code == 7
    assert not secret.exists()
    assert ((tmp_path / "away").read_bytes(), public.read_bytes()) == before


def test_two_pairs_differ_and_a_failure_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert signing.keygen(tmp_path / "a").raw != signing.keygen(tmp_path / "b").raw
    assert signing.read_public(tmp_path / "a.pub").comment == "a"
    for base, error in (
        (tmp_path / "no" / "c", OutputError),
        (Path(), UsageError),
        (Path("/"), UsageError),
    ):
        with pytest.raises(error):
            signing.keygen(base)
    with pytest.raises(UsageError):
        signing.keygen(tmp_path / "c", "x" * 201)
    assert signing.keygen(tmp_path / "d", "a\nb").comment == r"a\x0ab"
    real = signing._create

    def fail(path: Path, text: str, mode: int) -> None:
        if path.suffix == ".pub":
            raise OutputError("disk: full; free room")
        real(path, text, mode)

    monkeypatch.setattr(signing, "_create", fail)
    with pytest.raises(OutputError):
        signing.keygen(tmp_path / "e")
    assert not list(tmp_path.glob("e.*"))


# ---- signing ----
def test_a_signature_is_the_same_every_time_and_changes_nothing_else(
    tmp_path: Path, key: Path
) -> None:
    made = [tmp_path / f"{number}.gembin" for number in range(2)]
    for path in made:
        signing.sign(GOOD, key, path)
    first, second = (path.read_bytes() for path in made)
    assert first == second
    plain = GOOD.read_bytes()
    assert first[:256] + bytes(256) + first[512:] == plain
    with read_artifact(made[0]) as artifact:
        assert artifact.signature.alg == 1
        assert artifact.signature.key_id == SecretKey(SEED).public().id
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("0.gembin", "1.gembin", "keys", "vendor.key"),
    ]


def test_in_place_the_file_keeps_its_mode_and_a_link_its_place(tmp_path: Path, key: Path) -> None:
    path, link = tmp_path / "x.gembin", tmp_path / "link.gembin"
    path.write_bytes(GOOD.read_bytes())
    path.chmod(0o640)
    link.symlink_to(path)
    done = run(gemmake, "sign", link, "--key", key)
    assert done.exit_code == 0, done.output
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert verdict(path, tmp_path / "keys").kind == "valid"
    again = run(gemmake, "sign", path, "--key", key)
    assert "instead of" not in again.stdout
    other = secret_file(tmp_path, bytes(32), "other")
    again = run(gemmake, "sign", path, "--key", other)
    assert f"instead of key {SecretKey(SEED).public().id.hex()}" in again.stdout


def test_what_cannot_be_signed_is_refused_and_left(tmp_path: Path, key: Path) -> None:
    path, notes = tmp_path / "x.gembin", tmp_path / "notes.txt"
    bad = bytearray(GOOD.read_bytes())
    bad[-300] ^= 1
    path.write_bytes(bad)
    notes.write_text("mine")
    before = sorted((p.name, p.stat().st_mtime_ns) for p in tmp_path.iterdir())
    with pytest.raises(FormatError):
        signing.sign(path, key)
    assert run(gemmake, "sign", path, "--key", key).exit_code == 6
    assert run(gemmake, "sign", GOOD, "--key", key, "--output", notes).exit_code == 7
    assert run(gemmake, "sign", GOOD, "--key", key, "--output", tmp_path).exit_code == 7
    assert (
        run(gemmake, "sign", GOOD, "--key", key, "--output", tmp_path / "no" / "x").exit_code == 7
    )
    assert run(gemmake, "sign", tmp_path / "none", "--key", key).exit_code == 6
    assert run(gemmake, "sign", GOOD, "--key", notes).exit_code == 2
    assert run(gemmake, "sign", GOOD, "--key", tmp_path / "none").exit_code == 2
    assert run(gemmake, "sign", GOOD, "--key", tmp_path).exit_code == 2
    assert run(gemmake, "sign", GOOD, "--key", tmp_path / "keys" / "vendor.pub").exit_code == 2
    assert run(gemmake, "sign", GOOD).exit_code == 2
    assert run(gemmake, "sign").exit_code == 2
    assert sorted((p.name, p.stat().st_mtime_ns) for p in tmp_path.iterdir()) == before


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path, key: Path) -> None:
    for mode in (0o640, 0o604, 0o666):
        key.chmod(mode)
        with pytest.raises(UsageError, match="chmod 600"):
            signing.sign(GOOD, key, tmp_path / "x.gembin")
    key.write_bytes(key.read_bytes()[:40])
    key.chmod(0o600)
    with pytest.raises(UsageError, match="not base64"):
        signing.sign(GOOD, key, tmp_path / "x.gembin")


def test_what_a_kill_left_is_replaced(tmp_path: Path, key: Path) -> None:
    (tmp_path / "x.gembin.partial").write_bytes(GOOD.read_bytes()[:5000])
    signing.sign(GOOD, key, tmp_path / "x.gembin")
    assert not (tmp_path / "x.gembin.partial").exists()
    (tmp_path / "x.gembin.partial").write_bytes(b"mine")
    with pytest.raises(OutputError, match="no unfinished artifact"):
        signing.sign(GOOD, key, tmp_path / "x.gembin")


def test_the_words_disturb_no_compile() -> None:
    page = run(gemmake, "--help").stdout
    assert "gemmake keygen --output NAME" in page
    assert "--quantization" in page
    assert "--comment" not in page
    assert "--comment" in run(gemmake, "keygen", "--help").stdout
    assert run(gemmake, "--model", "keygen").exit_code == 2
    assert "Missing option" in run(gemmake, "--model", "sign").stderr
    words = ("--model", "a", "--target", "b", "--output", "c", "sign")
    assert "unexpected extra argument" in run(gemmake, *words).stderr


# ---- gemcheck ----
def test_gemcheck_says_whose_signature_it_is(tmp_path: Path, signed: Path) -> None:
    public = tmp_path / "keys" / "vendor.pub"
    stranger = secret_file(tmp_path, bytes(32), "stranger").with_suffix(".pub")
    (tmp_path / "keys" / "stranger.pub").rename(stranger)
    assert gemcheck_line(signed).line == (
        f"\u26a0 Model signature: Ed25519 by key {SecretKey(SEED).public().id.hex()}, "
        "not verified (no key given)"
    )
    assert gemcheck_line(signed, public).line == "\u2713 Model signature valid"
    assert gemcheck_line(signed, stranger, public).severity is Severity.OK
    assert gemcheck_line(signed, stranger).severity is Severity.ERROR
    assert gemcheck_line(GOOD).line == "\u26a0 Model signature: none"
    assert gemcheck_line(GOOD, public).line == "\u2717 Model signature: none"
    bad = bytearray(signed.read_bytes())
    bad[spec.SIGNATURE_OFFSET + 20] ^= 1
    (tmp_path / "bad").write_bytes(bad)
    assert gemcheck_line(tmp_path / "bad", public).line.startswith(
        "\u2717 Model signature invalid: "
    )
    done = run(gemcheck, signed, "--key", public)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[0] == "\u2713 Model signature valid"
    assert run(gemcheck, GOOD, "--key", public).exit_code == 1
    done = run(gemcheck, signed, "--key", signed)
    assert done.exit_code == 2
    assert "; name a file made by gemmake keygen" in done.stderr
    assert run(gemcheck, "--diff", signed, GOOD, "--key", public).exit_code == 2


# ---- the daemon ----
EVERY: tuple[sign.Policy, ...] = ("required", "preferred", "off")
TABLE: dict[str, tuple[str, tuple[bool, ...]]] = {
    "signed": ("valid", (True, True, True)),
    "unsigned": ("unsigned", (False, True, True)),
    "stranger": ("unknown_key", (False, True, True)),
    "forged": ("invalid", (False, False, True)),
    "damaged": ("invalid", (False, False, True)),
    "no artifact": ("invalid", (False, False, True)),
    "no cryptography": ("unchecked", (False, True, True)),
}


def without_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("cryptography.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)


@pytest.mark.parametrize("case", TABLE)
@pytest.mark.parametrize("policy", EVERY)
def test_what_each_policy_lets_pass(
    tmp_path: Path,
    signed: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: sign.Policy,
    case: str,
) -> None:
    kind, passes = TABLE[case]
    data = bytearray(signed.read_bytes())
    if case == "unsigned":
        data = bytearray(GOOD.read_bytes())
    elif case == "stranger":
        (tmp_path / "keys" / "vendor.pub").unlink()
    elif case == "forged":
        data[spec.SIGNATURE_OFFSET + 30] ^= 1
    elif case == "damaged":
        data[-300] ^= 1
    elif case == "no artifact":
        data = bytearray(b"GIF89a" * 200)
    elif case == "no cryptography":
        without_cryptography(monkeypatch)
    found = verdict(bytes(data), tmp_path / "keys", policy)
    accepted = passes[EVERY.index(policy)]
    assert found.kind == (kind if policy != "off" else "unchecked")
    assert found.accepted is accepted
    assert found.warning is (accepted and policy != "off" and kind != "valid")
    assert found.sentence.startswith("signature: ")
    assert kind == "valid" or "; " in found.sentence
    assert "\n" not in found.sentence
    if accepted:
        sign.demand(found)
    else:
        with pytest.raises(ApiError) as caught:
            sign.demand(found)
        assert caught.value.code == "refused"
        assert str(caught.value) == found.sentence
    if case == "no cryptography" and policy == "required":
        assert "pip install gembin-toolchain[sign]" in found.sentence
    if case == "signed" and policy == "required":
        assert found.key_id == SecretKey(SEED).public().id.hex()
        assert found.sentence == f"signature: valid, by key {found.key_id} (vendor)"


def flips(image: bytes) -> list[int]:
    """Every byte of header, block and table, and some of each section and of each gap."""
    header = spec.Header.unpack(image)
    end = spec.TABLE_OFFSET + spec.ENTRY_SIZE * header.section_count
    found = list(range(end))
    for at in range(spec.TABLE_OFFSET, end, spec.ENTRY_SIZE):
        entry = spec.Section.unpack(image, at)
        stop = entry.offset + entry.size
        found += [entry.offset, entry.offset + entry.size // 2, stop - 1]
        found += range(entry.offset + 7, stop, max(1, entry.size // 5))
        if end < entry.offset:
            found += [end, entry.offset - 1]
        end = stop
    return sorted({*found, *([end, len(image) - 1] if end < len(image) else [])})


def test_no_byte_of_a_signed_artifact_can_be_changed(tmp_path: Path, signed: Path) -> None:
    """Under both policies that check. A changed key's name gives a signature by nobody known,
    which `preferred` lets pass with a warning, as it does without any signature."""
    image = bytearray(signed.read_bytes())
    block = range(spec.SIGNATURE_OFFSET, spec.TABLE_OFFSET)
    named = range(block.start + 8, block.start + 16)
    tried: dict[str, int] = {}
    descriptor = os.memfd_create("artifact")
    os.write(descriptor, image)
    for at in flips(bytes(image)):
        os.pwrite(descriptor, bytes([image[at] ^ (1 << at % 8)]), at)
        kind = sign.check(descriptor, "required", tmp_path / "keys").kind
        assert kind == ("unknown_key" if at in named else "invalid"), at
        tried[kind] = tried.get(kind, 0) + 1
        os.pwrite(descriptor, image[at : at + 1], at)
    assert sign.check(descriptor, "required", tmp_path / "keys").kind == "valid"
    print(f"bytes flipped: {sum(tried.values())}, {tried}")
    for size in (0, 1, 255, 256, 511, 512, 600, len(image) - 1):
        assert verdict(bytes(image[:size]), tmp_path / "keys").kind == "invalid"
    assert verdict(bytes(image) + bytes(256), tmp_path / "keys").kind == "invalid"
    os.close(descriptor)


def test_a_signature_does_not_fit_another_artifact(tmp_path: Path, signed: Path, key: Path) -> None:
    other = bytearray((GOLDEN / "tiny-q4raw.gembin").read_bytes())
    other[256:512] = signed.read_bytes()[256:512]
    assert verdict(bytes(other), tmp_path / "keys").kind == "invalid"


def test_a_table_that_was_made_to_fit_is_not_believed(tmp_path: Path, signed: Path) -> None:
    """A forger mends every checksum, and the root; only the signature he cannot make."""
    from fuzz.mutate import reseal

    image = bytearray(signed.read_bytes())
    image[-300] ^= 1
    reseal(image)
    found = verdict(bytes(image), tmp_path / "keys")
    assert found.kind == "invalid"
    assert "not for this artifact" in found.sentence


def test_two_signers(tmp_path: Path, signed: Path) -> None:
    other = secret_file(tmp_path, bytes(32), "other")
    keys = tmp_path / "keys"
    assert verdict(signed, keys, "required").sentence.endswith("(vendor)")
    signing.sign(signed, other)
    assert verdict(signed, keys, "required").sentence.endswith("(other)")
    (keys / "other.pub").unlink()
    found = verdict(signed, keys, "required")
    assert found.kind == "unknown_key"
    assert found.key_id == SecretKey(bytes(32)).public().id.hex()
    assert found.key_id in found.sentence
    assert str(keys) in found.sentence


def test_two_keys_of_one_name_are_both_tried(
    tmp_path: Path, signed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two keys are known whose names are equal; here all are."""
    monkeypatch.setattr(PublicKey, "id", property(lambda _self: SecretKey(SEED).public().raw[:8]))
    image = bytearray(signed.read_bytes())
    image[264:272] = SecretKey(SEED).public().raw[:8]
    secret_file(tmp_path, bytes(32), "a-first")
    assert verdict(bytes(image), tmp_path / "keys").kind == "valid"
    (tmp_path / "keys" / "vendor.pub").unlink()
    assert verdict(bytes(image), tmp_path / "keys").kind == "invalid"


# ---- the keys folder ----
def test_a_missing_or_odd_keys_folder_trusts_nobody(tmp_path: Path, signed: Path) -> None:
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "none", tmp_path / "file"):
        found = verdict(signed, folder, "required")
        assert (found.kind, found.accepted) == ("unknown_key", False)
        assert str(folder) in found.sentence


def test_damaged_key_files_are_named_and_the_others_used(tmp_path: Path, signed: Path) -> None:
    keys = tmp_path / "keys"
    line = (keys / "vendor.pub").read_bytes()
    (keys / "cut.pub").write_bytes(line[:30])
    (keys / "empty.pub").touch()
    (keys / "long.pub").write_bytes(line * 1000)
    (keys / "folder.pub").mkdir()
    (keys / "broken.pub").symlink_to("nowhere")
    os.mkfifo(keys / "pipe.pub")
    (keys / "open.pub").write_bytes(line)
    (keys / "open.pub").chmod(0o666)
    (keys / "vendor.key").write_text(SecretKey(SEED).line())  # has no business here, and no effect
    loaded = sign.load_keys(keys)
    assert [key.comment for key in loaded.keys] == ["vendor"]
    assert len(loaded.warnings) == 7
    assert any(
        "open.pub: everybody may write it; this key is not used" in w for w in loaded.warnings
    )
    assert verdict(signed, keys, "required").kind == "valid"
    (keys / "vendor.pub").unlink()
    found = verdict(signed, keys, "required")
    assert found.kind == "unknown_key"
    assert "cut.pub" in found.sentence


def test_the_number_of_keys_is_bounded(tmp_path: Path) -> None:
    for number in range(sign.KEYS_MOST + 5):
        (tmp_path / f"{number:04}.pub").write_bytes(LINE)
    loaded = sign.load_keys(tmp_path)
    assert len(loaded.keys) == sign.KEYS_MOST
    assert "261 keys" in loaded.warnings[0]


# ---- work ----
def test_checking_can_be_stopped_and_takes_little_memory(tmp_path: Path, signed: Path) -> None:
    told: list[tuple[int, int]] = []
    pace = Pace(cancelled=lambda: bool(told), progress=lambda *both: told.append(both))
    with opened(signed) as descriptor, pytest.raises(ApiError) as caught:
        sign.check(descriptor, "required", tmp_path / "keys", pace)
    assert caught.value.code == "cancelled"
    with opened(signed) as descriptor:
        pace = Pace(progress=lambda *both: told.append(both))
        sign.check(descriptor, "required", tmp_path / "keys", pace)
    assert told[-1][0] <= told[-1][1] == signed.stat().st_size


def test_a_file_that_cannot_be_read_is_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ApiError) as caught:
        sign.check(12345, "required", tmp_path)
    assert caught.value.code == "failed"


def test_nothing_is_loaded_before_it_is_needed(tmp_path: Path, signed: Path) -> None:
    """Neither by the import nor for an artifact that nobody known has signed."""
    script = (
        "import os, sys; from pathlib import Path; from gemctl.store import sign\n"
        "folder = Path(sys.argv[2])\n"
        "for policy in ('off', 'preferred', 'required'):\n"
        "    sign.check(os.open(sys.argv[1], os.O_RDONLY), policy, folder / 'none')\n"
        "heavy = {'cryptography', 'numpy', 'cffi', 'gemmake', 'gemrun.context'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "found = sign.check(os.open(sys.argv[1], os.O_RDONLY), 'required', folder / 'keys')\n"
        "assert found.kind == 'valid', found\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(signed), str(tmp_path)],
        check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip


def test_without_the_package_the_commands_say_which_one(
    tmp_path: Path, key: Path, signed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_cryptography(monkeypatch)
    for work in (
        lambda: signing.keygen(tmp_path / "new"),
        lambda: signing.sign(GOOD, key, tmp_path / "y.gembin"),
    ):
        with pytest.raises(GemError, match=r"pip install gembin-toolchain\[sign\]"):
            work()
    assert not list(tmp_path.glob("new.*"))
    assert not (tmp_path / "y.gembin").exists()
    found = gemcheck_line(signed, tmp_path / "keys" / "vendor.pub")
    assert found.severity is Severity.ERROR
    assert "pip install" in found.line


# ---- from a checkpoint to tokens ----
def test_compiled_signed_checked_and_run(
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    gemrun_cli: Path,
    tmp_path: Path,
    key: Path,
) -> None:
    options = ("--quantization", "int4", "--effort", "fast", "--kv-cache-size", "128")
    plain = artifact_cache(tiny_checkpoint("gemma3"), *options)
    path, public = tmp_path / "x.gembin", tmp_path / "keys" / "vendor.pub"
    done = run(gemmake, "sign", plain, "--key", key, "--output", path)
    assert done.exit_code == 0, done.output
    done = run(gemcheck, path, "--key", public, "--run")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("\u2713 Model signature valid\n")
    assert verdict(path, tmp_path / "keys", "required").kind == "valid"
    answers = []
    for artifact in (plain, path):
        words = [gemrun_cli, artifact, "--prompt", "ab", "--max-tokens", "8"]
        ran = subprocess.run(words, capture_output=True, check=False)
        assert ran.returncode == 0, ran.stderr
        answers.append(ran.stdout)
    assert answers[0] == answers[1] != b""


def test_both_readers_take_any_signature_and_refuse_a_malformed_block(signed: Path) -> None:
    """The engine's reader is compared with this one in tests/hostile/test_format_readers.py."""
    image = bytearray(signed.read_bytes())
    image[256 + 20] ^= 1
    read_artifact(memoryview(image), image=True).close()
    image[256 + 100] = 1
    with pytest.raises(FormatError) as caught:
        read_artifact(memoryview(image), image=True)
    assert caught.value.code is Code.SIGNATURE
