"""A disk that takes nothing when a version has passed its probation, against a real gemctld."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from candidates import digest_of
from daemon import Daemon, settled, wait_for
from gemctl.client import Refused
from gemctl.store.store import MARKS
from played import Played

PATIENT = {"probation_s": 2.0, "probation_requests": 100}


class Disk:
    """A file system in memory that can be filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.filler = folder / "filler"

    def fill(self) -> None:
        """Until it takes nothing."""
        free = os.statvfs(self.folder)
        self.filler.write_bytes(bytes(free.f_bavail * free.f_bsize))

    def make_room(self) -> None:
        self.filler.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def daemon(disk: Disk, versions: tuple[Path, Path]) -> Iterator[Daemon]:
    """The first version is good, the second one has passed on a full disk."""
    with Daemon(daemon={"state": str(disk.folder / "state")}, models=PATIENT) as made:
        made.replace(versions[0], name="pilot")
        settled(made)
        made.replace(versions[1], name="pilot")
        disk.fill()
        wait_for(lambda: made.call("model.status", name="pilot")["not_kept"])
        yield made
        made.stop()


def test_what_has_passed_is_kept_once_there_is_room(daemon: Daemon, disk: Disk) -> None:
    status = daemon.call("model.status", name="pilot")
    new = status["digest"]
    assert status["state"] == "serving"
    assert status["current"] != new, "not the good one yet"
    assert "No space left" in status["not_kept"]
    shown = daemon.gemctl("model", "status")
    assert "on probation: passed, not kept yet" in shown
    assert "not kept  until the disk takes it" in shown
    disk.make_room()
    kept = settled(daemon)
    assert (kept["current"], kept["not_kept"]) == (new, "")
    assert kept["previous"] == status["current"]
    assert len(daemon.events("probation.failed")) == 1, "told once"
    assert len(daemon.events("probation.good")) == 2
    daemon.stop()
    daemon.start()
    assert wait_for(lambda: daemon.call("model.list")["models"][0]["digest"]) == new


def test_it_can_be_rolled_back_before(daemon: Daemon, disk: Disk) -> None:
    good = daemon.call("model.status", name="pilot")["current"]
    disk.make_room()
    rolled = daemon.call("model.rollback", name="pilot")
    assert rolled["digest"] == good
    status = settled(daemon)
    assert (status["digest"], status["not_kept"]) == (good, "")
    assert [bad["reason"] for bad in status["bad"]] == ["rolled back by hand"]


def test_waiting_ends_and_a_replacement_is_told_why(daemon: Daemon) -> None:
    status = daemon.call("model.status", name="pilot")
    by_digest = ("model", "replace", "--name", "pilot", "--digest")
    said = daemon.gemctl(*by_digest, status["digest"], "--wait", code=8)
    assert "passed, but that could not be written down" in said
    assert "free room on its disk" in said
    said = daemon.gemctl(*by_digest, status["current"], code=9)
    assert "is not kept yet" in said


@pytest.fixture
def kept(disk: Disk, versions: tuple[Path, Path]) -> Iterator[Daemon]:
    """Both versions are good, the second one serves, and the disk is full."""
    with Daemon(daemon={"state": str(disk.folder / "state")}, models=PATIENT) as made:
        for path in versions:
            made.replace(path, name="pilot")
            settled(made)
        disk.fill()
        yield made
        made.stop()


def test_a_rollback_that_the_disk_does_not_take_is_told(kept: Daemon, disk: Disk) -> None:
    """The version before answers at once, which lasts as soon as there is room."""
    before = kept.call("model.status", name="pilot")
    said = kept.gemctl("model", "rollback", "pilot")
    assert "not kept until the disk takes it" in said
    status = kept.call("model.status", name="pilot")
    assert (status["digest"], status["current"]) == (before["previous"], before["current"])
    assert "No space left" in status["not_kept"]
    disk.make_room()
    status = settled(kept)
    assert (status["digest"], status["current"]) == (before["previous"],) * 2
    kept.stop(signal.SIGKILL)
    kept.start()
    assert wait_for(lambda: kept.call("model.list")["models"][0]["digest"]) == before["previous"], (
        "a restart undoes it"
    )


def bad(daemon: Daemon, name: str) -> list[str]:
    return [found["digest"] for found in daemon.call("model.status", name=name)["bad"]]


def test_what_was_rolled_back_on_a_full_disk_is_not_taken_again(
    daemon: Daemon, disk: Disk, versions: tuple[Path, Path]
) -> None:
    """Neither before the disk has taken that it is bad, nor after a restart behind that."""
    digest = digest_of(versions[1])
    daemon.gemctl("model", "rollback", "pilot")
    assert bad(daemon, "pilot") == [digest]
    assert wait_for(lambda: daemon.events("probation.failed"))
    disk.make_room()
    with pytest.raises(Refused, match="was found bad before") as caught:
        daemon.replace(versions[1], name="pilot")
    assert caught.value.code == "refused"
    marks = disk.folder / "state" / "models" / "pilot" / MARKS
    wait_for(lambda: digest in marks.read_text())
    daemon.stop()
    daemon.start()
    assert bad(daemon, "pilot") == [digest]


def test_a_program_s_next_probation_is_its_own(disk: Disk, versions: tuple[Path, Path]) -> None:
    """What the disk did not take of a version before it says nothing of it."""
    store = {"state": str(disk.folder / "state")}
    with Daemon(daemon=store, models=PATIENT) as daemon, Played(daemon):
        wait_for(lambda: daemon.events("program.attached"))

        def status() -> dict[str, Any]:
            return daemon.call("model.status", name="line-3")

        daemon.replace(versions[0], name="line-3")
        disk.fill()
        wait_for(lambda: status()["not_kept"])
        assert daemon.call("model.list")["models"][0]["not_kept"]
        assert "passed, not kept yet" in daemon.gemctl("model", "list")
        daemon.call("model.rollback", name="line-3")
        assert (status()["not_kept"], bad(daemon, "line-3")) == ("", [digest_of(versions[0])])
        disk.make_room()
        daemon.replace(versions[1], name="line-3")
        found = status()
        assert (found["on_probation"], found["not_kept"]) == (True, "")
        wait_for(lambda: daemon.events("probation.good"))
        assert status()["current"] == digest_of(versions[1])
        wait_for(lambda: not status()["on_probation"])
