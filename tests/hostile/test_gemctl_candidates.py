"""Candidates of every faulty kind: each is refused by its word, and what serves is not disturbed.

The engine's failures that no file can cause (it crashes, hangs, never gets ready) come from a
wrapper around the real gemrun, which misbehaves for the digests that a test names.
GEM_CANDIDATES=N: so many damaged files, and a twentieth of that of every other kind; -rP shows how
many of each were refused by which word.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from candidates import (
    ARCH,
    DAMAGED,
    FORGED,
    OTHER_ARCH,
    WORKERS,
    Wrapped,
    damaged,
    digest_of,
    forged,
    hdf,
    wrong_vector,
)
from daemon import OPTIONS, Daemon, answer_of, settled, wait_for
from gemctl.client import Refused
from gemctl.serve.artifact import declared
from gemctl.store import state
from gemctl.store.state import StateFile
from gemmake import signing

PROMPT = "abc"
SEED = 11
COUNT = int(os.environ.get("GEM_CANDIDATES", "40"))  # of damaged files
EACH = max(1, COUNT // 20)  # of every other kind
# By what word each kind is refused.
FAULTS = {
    "vectors": {"refused"},
    "board": {"refused"},
    "instructions": {"refused"},
    "layout": {"layout"},
    "memory": {"no_memory"},
    "crash": {"failed"},
    "exit": {"failed"},
    "hang": {"timeout"},
    "garbage": {"failed", "timeout"},
}
STALE = ("gone", "spent", "cut", "crash", "known")  # trials that are of no use at a start


@pytest.fixture(scope="module")
def larger(tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]) -> Path:
    """Another context length: another layout."""
    options = [*OPTIONS]
    options[3] = "128"
    return artifact_cache(tiny_checkpoint("qwen3", seed=1), *options)


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


def refusal(daemon: Daemon, path: Path, **params: Any) -> str:
    """The word by which a candidate is refused."""
    with pytest.raises(Refused) as error:
        daemon.replace(path, name="pilot", **params)
    return str(error.value.code)


def said(counts: Counter[tuple[str, str]]) -> str:
    """Counts for a person: `cut 6 refused, ..`."""
    return ", ".join(f"{kind} {n} {code}" for (kind, code), n in sorted(counts.items()))


def test_damaged_files_are_refused_and_disturb_nobody(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    data = versions[1].read_bytes()
    counts: Counter[tuple[str, str]] = Counter()
    with serving(versions) as daemon, Asking(daemon, answer_of(versions[0], PROMPT)) as asking:
        before = daemon.call("model.status", name="pilot")["digest"]
        for number in range(COUNT):
            path, kind = tmp_path / "candidate", DAMAGED[number % len(DAMAGED)]
            made = damaged(data, kind, rng)
            if made == data:
                continue
            path.write_bytes(made)
            code = refusal(daemon, path)
            assert code in ("refused", "layout", "no_memory"), kind
            counts[kind, code] += 1
        assert daemon.call("model.status", name="pilot")["digest"] == before
        assert len(daemon.workers()) == 1
        versions_left = daemon.call("model.status", name="pilot")["versions"]
    print(f"damaged (seed {SEED}): {said(counts)}; {asking.answers} answers beside")
    assert not asking.wrong
    assert asking.answers > 0
    assert versions_left <= 2 + COUNT  # they wait for the collection after the next good one


@pytest.fixture(scope="module")
def faulty(
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    larger: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """Sound artifacts that are wrong for this machine, by kind; this machine is acme,gate-2."""
    model, boards = tiny_checkpoint("qwen3", seed=1), tmp_path_factory.mktemp("boards")
    targets = {"board": ("gate-1", ARCH), "instructions": ("gate-2", OTHER_ARCH)}
    made = {
        kind: artifact_cache(model, *OPTIONS, "--target", str(hdf(boards, *target)))
        for kind, target in targets.items()
    }
    return {
        **made,
        "layout": larger,
        "memory": artifact_cache(model, "--quantization", "int8", *OPTIONS[2:]),
    }


def gate_2(root: Path) -> Path:
    """What this machine says of itself (a stand-in for /proc and /sys)."""
    tree = root / "proc" / "device-tree"
    tree.mkdir(parents=True)
    (tree / "compatible").write_bytes(b"acme,gate-2\0acme,gate\0")
    shutil.copy("/proc/meminfo", root / "proc" / "meminfo")
    return root


def test_every_other_fault_is_refused_by_its_word(
    versions: tuple[Path, Path], faulty: dict[str, Path], tmp_path: Path
) -> None:
    wrapped = Wrapped(tmp_path)
    size, more = (declared(path).ram_total for path in (versions[1], faulty["memory"]))
    assert size < more
    tables: dict[str, dict[str, Any]] = {
        "models": {"memory_most_bytes": size + (size + more) // 2, "probation_s": 0.2},
        "worker": {"program": str(wrapped.path), "start_timeout_s": 2.0},
        "sensors": {"sysfs_root": str(gate_2(tmp_path / "root"))},
    }
    counts: Counter[tuple[str, str]] = Counter()
    with serving(versions, **tables) as daemon:
        with Asking(daemon, answer_of(versions[0], PROMPT)) as asking:
            for kind, number in ((k, n) for n in range(EACH) for k in FAULTS):
                path = faulty.get(kind, versions[1])
                if kind == "vectors":
                    path = tmp_path / "candidate"
                    path.write_bytes(wrong_vector(versions[1], number % 64))
                if kind in WORKERS:
                    wrapped.misbehave(kind, path)
                code = refusal(daemon, path)
                wrapped.behave()
                assert code in FAULTS[kind], kind
                counts[kind, code] += 1
            assert len(daemon.workers()) == 1
        assert not asking.wrong
        texts = [event["text"] for event in daemon.events("replace.failed")]
        assert any("built for gate-1, this is acme,gate-2" in text for text in texts)
        assert any(f"built for gate-2 ({OTHER_ARCH}), this is {ARCH}" in text for text in texts)
        daemon.replace(versions[1], name="pilot")  # the way is free for a good one
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[1], PROMPT)
    print(f"faults: {said(counts)}; {asking.answers} answers beside")


def test_what_the_board_refuses_is_sound_otherwise(
    versions: tuple[Path, Path], faulty: dict[str, Path], tmp_path: Path
) -> None:
    models = {"allow_foreign_board": True, "probation_s": 0.2}
    sensors = {"sysfs_root": str(gate_2(tmp_path / "root"))}
    with serving(versions, models=models, sensors=sensors) as daemon:
        for kind in ("board", "instructions"):
            daemon.replace(faulty[kind], name="pilot")
            settled(daemon)
            assert daemon.ask(PROMPT)["text"] == answer_of(versions[1], PROMPT)


def test_forged_signatures_are_refused_where_one_is_required(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    keys, path = tmp_path / "keys", tmp_path / "candidate"
    keys.mkdir()
    for name in ("vendor", "stranger"):
        signing.keygen(tmp_path / name)
    shutil.copy(tmp_path / "vendor.pub", keys)
    first, second = tmp_path / "first.gembin", tmp_path / "second.gembin"
    for plain, signed in zip(versions, (first, second), strict=True):
        signing.sign(plain, tmp_path / "vendor.key", signed)
    signing.sign(versions[1], tmp_path / "stranger.key", tmp_path / "stranger.gembin")
    parts = [file.read_bytes() for file in (versions[1], second, first)]
    counts: Counter[tuple[str, str]] = Counter()
    models = {"signature": "required", "keys_dir": str(keys), "probation_s": 0.2}
    with serving((first, second), models=models) as daemon:
        with Asking(daemon, answer_of(versions[0], PROMPT)) as asking:
            for kind in FORGED * EACH:
                strange = (tmp_path / "stranger.gembin").read_bytes()
                path.write_bytes(strange if kind == "stranger" else forged(kind, *parts, rng))
                code = refusal(daemon, path)
                assert code == "refused", kind
                counts[kind, code] += 1
        assert not asking.wrong
        assert all("signature" in e["text"] for e in daemon.events("replace.failed"))
        daemon.replace(second, name="pilot")  # the way is free for a good one
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[1], PROMPT)
    print(f"signatures: {said(counts)}; {asking.answers} answers beside")


def test_a_stale_trial_gives_way_to_the_good_version(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    """A start finds a probation of a version that is gone, that was loaded at too many starts, is
    cut short, crashes, or was found bad."""
    wrapped = Wrapped(tmp_path)
    good, tried = (digest_of(path) for path in versions)
    counts: Counter[tuple[str, str]] = Counter()
    with serving(versions, worker={"program": str(wrapped.path)}) as daemon:
        stored = daemon.folder / "state" / "models" / "pilot" / f"{tried}.gembin"
        for kind in STALE * EACH:
            with contextlib.suppress(Refused):  # nothing is bad yet
                daemon.call("model.clear", name="pilot")
            stage(daemon, versions[1])
            assert stored.is_file()
            if kind == "known":
                take_back(daemon, versions[1])
            daemon.stop()
            prepare(kind, stored, wrapped, versions[1])
            begin_trial(daemon, tried, tries=0 if kind == "spent" else state.TRIES)
            daemon.start()
            wait_for(lambda: daemon.call("model.status", name="pilot")["state"] == "serving")
            found = settled(daemon)
            assert found["digest"] == good, kind
            assert daemon.events("probation.bad"), kind
            assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)
            with StateFile(daemon.folder / "state") as file:
                assert file.load().state.trial is None, kind
            wrapped.behave()
            counts[kind, "dropped"] += 1
    print(f"stale trials: {said(counts)}")


def stage(daemon: Daemon, path: Path) -> None:
    """Into the store, not tried."""
    with path.open("rb") as file:
        daemon.call("model.stage", file.fileno(), name="pilot")


def take_back(daemon: Daemon, path: Path) -> None:
    """Let a version be found bad: an operator goes back in its probation."""
    daemon.replace(path, name="pilot")
    daemon.call("model.rollback", name="pilot")


def prepare(kind: str, stored: Path, wrapped: Wrapped, path: Path) -> None:
    """What became of a version while no daemon ran."""
    if kind == "gone":
        stored.unlink()
    if kind == "cut":
        os.truncate(stored, stored.stat().st_size // 2)
    if kind == "crash":
        wrapped.misbehave("crash", path)


def begin_trial(daemon: Daemon, digest: str, tries: int) -> None:
    """As a daemon that was killed in a probation leaves it."""
    with StateFile(daemon.folder / "state") as file:
        file.save(state.begin_trial(file.load().state, "pilot", digest, tries), urgent=True)


@pytest.mark.parametrize("kind", WORKERS)
def test_a_worker_that_misbehaves_costs_only_itself(
    kind: str, versions: tuple[Path, Path], tmp_path: Path
) -> None:
    wrapped = Wrapped(tmp_path)
    wanted = answer_of(versions[0], PROMPT)
    worker = {"program": str(wrapped.path), "start_timeout_s": 1.5}
    with serving(versions, worker=worker) as daemon:
        wrapped.misbehave(kind, versions[1])
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
    path = tmp_path / "wrong.gembin"
    path.write_bytes(wrong_vector(versions[1]))
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
        wrapped.misbehave("crash", versions[1])
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
            wrapped.misbehave("exit", path)
        with pytest.raises(Refused):
            daemon.replace(versions[1], name="pilot", serial=True)
        with pytest.raises(Refused, match="gemctl model load pilot"):
            daemon.ask(PROMPT)
        assert not daemon.workers()
        wrapped.behave()
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
