"""Candidates of every faulty kind: each is refused by its word, and what serves is not disturbed.

The engine's failures that no file can cause (it crashes, hangs, never gets ready) come from a
wrapper around the real gemrun, which misbehaves for the digests that a test names.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon import OPTIONS, Daemon, answer_of, gemrun_path, settled
from fuzz.mutate import find, reseal, section_range
from gemctl.client import Refused
from gemctl.serve.artifact import declared
from gemrun.format.reader import read_artifact
from gemrun.format.spec import TestVector, size_of

PROMPT = "abc"
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
KINDS = ("crash", "exit", "hang", "garbage")


class Wrapped:
    """A gemrun that misbehaves for the digests in files named by the kind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "gemrun-wrapped"
        text = WRAPPER.format(kinds=" ".join(KINDS), folder=folder, program=gemrun_path())
        self.path.write_text(text, encoding="utf-8")
        self.path.chmod(0o755)

    def misbehave(self, kind: str, digest: str) -> None:
        with (self.folder / kind).open("a", encoding="utf-8") as stream:
            stream.write(digest + "\n")


@pytest.fixture(scope="module")
def larger(tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]) -> Path:
    """Another context length: another layout."""
    options = [*OPTIONS]
    options[3] = "128"
    return artifact_cache(tiny_checkpoint("qwen3", seed=1), *options)


def digest_of(path: Path) -> str:
    """The store's name of a version."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def serving(versions: tuple[Path, Path], **tables: dict[str, Any]) -> Iterator[Daemon]:
    with Daemon(**tables) as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        yield daemon


class Asking:
    """A client that never stops asking; every answer must be the good version's."""

    def __init__(self, daemon: Daemon, wanted: str) -> None:
        self.daemon, self.wanted = daemon, wanted
        self.answers = 0
        self.wrong: list[object] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                text = self.daemon.ask(PROMPT)["text"]
            except Refused as error:
                text = error
            self.answers += 1
            if text != self.wanted:
                self.wrong.append(text)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def damaged(data: bytes, kind: str, rng: random.Random) -> bytes:
    """A file of a faulty kind."""
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


def test_damaged_files_are_refused_and_disturb_nobody(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    seed, count = 11, int(os.environ.get("GEM_CANDIDATES", "40"))
    rng = random.Random(seed)
    data = versions[1].read_bytes()
    kinds = ("cut", "longer", "bit", "zeros", "noise", "empty", "head")
    wanted = answer_of(versions[0], PROMPT)
    refused: dict[str, int] = {}
    with serving(versions) as daemon, Asking(daemon, wanted) as asking:
        before = daemon.call("model.status", name="pilot")["digest"]
        for number in range(count):
            path = tmp_path / "candidate"
            made = damaged(data, kinds[number % len(kinds)], rng)
            if made == data:
                continue
            path.write_bytes(made)
            with pytest.raises(Refused) as error:
                daemon.replace(path, name="pilot")
            assert error.value.code in ("refused", "layout", "no_memory"), str(error.value)
            refused[error.value.code] = refused.get(error.value.code, 0) + 1
        assert daemon.call("model.status", name="pilot")["digest"] == before
        assert len(daemon.workers()) == 1
        versions_left = daemon.call("model.status", name="pilot")["versions"]
    print(f"{count} damaged candidates (seed {seed}): {refused}; {asking.answers} answers beside")
    assert not asking.wrong
    assert asking.answers > 0
    assert versions_left <= 2 + count  # they wait for the collection after the next good one


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_misbehaves_costs_only_itself(
    kind: str, versions: tuple[Path, Path], tmp_path: Path
) -> None:
    wrapped = Wrapped(tmp_path)
    wanted = answer_of(versions[0], PROMPT)
    worker = {"program": str(wrapped.path), "start_timeout_s": 1.5}
    with serving(versions, worker=worker) as daemon:
        wrapped.misbehave(kind, digest_of(versions[1]))
        with Asking(daemon, wanted) as asking, pytest.raises(Refused) as error:
            daemon.replace(versions[1], name="pilot")
        assert error.value.code in ("failed", "timeout"), str(error.value)
        assert len(daemon.workers()) == 1
        assert not asking.wrong
        assert daemon.ask(PROMPT)["text"] == wanted
        assert daemon.events("replace.failed")


def test_a_candidate_with_wrong_answers_is_refused(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    """Sound by every checksum, but a stored test vector says otherwise."""
    with read_artifact(versions[1]) as artifact:
        vector = replace(artifact.tests[0], digest=artifact.tests[0].digest ^ 1)
    image = bytearray(versions[1].read_bytes())
    start, _ = section_range(image, find(image, "TEST")) or (0, 0)
    image[start : start + size_of(TestVector)] = vector.pack()
    path = tmp_path / "wrong.gembin"
    path.write_bytes(reseal(image))
    wanted = answer_of(versions[0], PROMPT)
    with serving(versions) as daemon, Asking(daemon, wanted) as asking:
        with pytest.raises(Refused) as error:
            daemon.replace(path, name="pilot")
        assert error.value.code == "refused", str(error.value)
        assert not asking.wrong


def test_layout_memory_and_what_is_no_file(
    versions: tuple[Path, Path], larger: Path, tmp_path: Path
) -> None:
    size = answer_memory(versions[0])
    models = {"memory_most_bytes": size + size // 2, "probation_s": 0.2}
    with serving(versions, models=models) as daemon:
        wanted = answer_of(versions[0], PROMPT)
        with pytest.raises(Refused) as error:
            daemon.replace(larger, name="pilot")
        assert error.value.code == "layout"
        assert "--allow-layout-change" in str(error.value)
        with pytest.raises(Refused) as error:  # both do not fit
            daemon.replace(versions[1], name="pilot")
        assert error.value.code == "no_memory"
        assert "--serial" in str(error.value)
        fifo, folder = tmp_path / "fifo", tmp_path / "folder"
        os.mkfifo(fifo)
        folder.mkdir()
        for place in (fifo, folder, Path("/dev/zero")):
            with pytest.raises(Refused) as error:
                replace_by(daemon, place)
            assert error.value.code == "refused", f"{place}: {error.value}"
        assert daemon.ask(PROMPT)["text"] == wanted
        assert "serial" in daemon.gemctl("model", "--replace", versions[1], "--serial")
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[1], PROMPT)
        settled(daemon)
        text = daemon.gemctl("model", "--replace", larger, "--serial", "--allow-layout-change")
        assert "answers now" in text


def replace_by(daemon: Daemon, place: Path) -> None:
    """As a caller that checks nothing."""
    fd = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    try:
        daemon.call("model.replace", fd, name="pilot")
    finally:
        os.close(fd)


def answer_memory(path: Path) -> int:
    return declared(path).ram_total


def one_at_a_time(versions: tuple[Path, Path], wrapped: Wrapped) -> dict[str, dict[str, Any]]:
    """A configuration whose memory does not hold both."""
    size = answer_memory(versions[0])
    return {
        "models": {"memory_most_bytes": size + size // 2, "probation_s": 0.2},
        "worker": {"program": str(wrapped.path), "start_timeout_s": 1.5},
    }


def test_a_serial_replacement_that_fails_brings_the_old_one_back(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    wrapped = Wrapped(tmp_path)
    wanted = answer_of(versions[0], PROMPT)
    with serving(versions, **one_at_a_time(versions, wrapped)) as daemon:
        wrapped.misbehave("crash", digest_of(versions[1]))
        with Asking(daemon, wanted) as asking, pytest.raises(Refused):
            daemon.replace(versions[1], name="pilot", serial=True)
        assert not asking.wrong  # they waited
        assert daemon.ask(PROMPT)["text"] == wanted
        assert len(daemon.workers()) == 1


def test_where_the_old_one_does_not_come_back_either_a_load_helps(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    wrapped = Wrapped(tmp_path)
    with serving(versions, **one_at_a_time(versions, wrapped)) as daemon:
        for path in versions:
            wrapped.misbehave("exit", digest_of(path))
        with pytest.raises(Refused):
            daemon.replace(versions[1], name="pilot", serial=True)
        with pytest.raises(Refused, match="gemctl model load pilot"):
            daemon.ask(PROMPT)
        assert not daemon.workers()
        (tmp_path / "exit").unlink()
        daemon.gemctl("model", "load", "pilot")
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


def test_a_file_larger_than_allowed_is_refused(versions: tuple[Path, Path], tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    with huge.open("wb") as stream:
        stream.truncate(1 << 35)
    with serving(versions, models={"size_most_bytes": 1 << 30}) as daemon:
        with pytest.raises(Refused) as error:
            daemon.replace(huge, name="pilot")
        assert error.value.code == "refused"
        mode = stat.S_IMODE((daemon.folder / "state").stat().st_mode)
        assert mode & 0o007 == 0
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)
