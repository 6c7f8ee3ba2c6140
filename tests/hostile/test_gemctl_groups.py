"""Who may do what is decided by the groups that a process is in, not by those that the user
database would give its user. Real processes, against a real gemctld."""

from __future__ import annotations

import grp
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon import ROOT, Daemon
from gemctl import server
from gemctl.config import DaemonConfig

NOBODY = 65534
READ, WRITE = "daemon", "bin"  # groups that every Linux has, and nobody of them
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
AS_SOMEBODY = """
import grp, os, sys  # grp: nobody may not read the Python of root
from gemctl.client import Client, Refused
place, uid, gid, groups, *methods = sys.argv[1:]
os.setgroups([int(one) for one in groups.split(",") if one])
os.setgid(int(gid)); os.setuid(int(uid))
for method in methods:
    try:
        with Client(place, 30) as client:
            client.call(method, {"id": "0"} if method == "cancel" else {})
            print(method, "done")
    except Refused as error:
        print(method, error.code, error)
"""


def gid_of(name: str) -> int:
    return grp.getgrnam(name).gr_gid


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(daemon={"read_group": READ, "write_group": WRITE}) as made:
        made.folder.chmod(0o755)
        yield made


def said(daemon: Daemon, uid: int, gid: int, groups: list[int]) -> list[str]:
    """What a process is told that asks for figures, then for a cancel."""
    daemon.socket.chmod(0o666)  # the file's mode is another matter
    done = subprocess.run(
        [sys.executable, "-c", AS_SOMEBODY, str(daemon.socket), str(uid), str(gid),
         ",".join(map(str, groups)), "stats", "cancel"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line.split()[1] for line in done.stdout.splitlines()]


NEITHER, READS = ["forbidden", "forbidden"], ["done", "forbidden"]
WRITES = ["done", "not_found"]  # there is nothing to cancel


def test_the_processes_own_groups_count(daemon: Daemon) -> None:
    """None of these users is a member by the database."""
    read, write = gid_of(READ), gid_of(WRITE)
    assert said(daemon, NOBODY, NOBODY, []) == NEITHER
    assert said(daemon, NOBODY, NOBODY, [read]) == READS
    assert said(daemon, NOBODY, NOBODY, [write]) == WRITES
    assert said(daemon, NOBODY, NOBODY, [4_000_000, write, read]) == WRITES
    assert said(daemon, NOBODY, read, []) == READS
    assert said(daemon, 4_000_000, write, []) == WRITES  # no name here


def test_more_groups_than_python_asks_for(daemon: Daemon) -> None:
    many = list(range(100_000, 101_000))
    assert said(daemon, NOBODY, NOBODY, many) == NEITHER
    assert said(daemon, NOBODY, NOBODY, [*many, gid_of(WRITE)]) == WRITES
    assert said(daemon, NOBODY, NOBODY, [gid_of(READ), *many]) == READS


def test_a_group_that_was_given_up_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The database says that the user is a member; its process is not."""
    config = DaemonConfig(read_group=READ, write_group=WRITE)
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: [gid, gid_of(WRITE)])
    assert server.permissions(NOBODY, NOBODY, config, set()) == (False, False)
    assert server.permissions(NOBODY, NOBODY, config, None) == (True, True)  # an older kernel


def test_a_caller_without_rights_is_told_the_group_that_has_them(daemon: Daemon) -> None:
    daemon.socket.chmod(0o660)
    done = subprocess.run(
        [sys.executable, "-c", AS_SOMEBODY, str(daemon.socket), str(NOBODY), str(NOBODY), "",
         "stats"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    what = f"{daemon.socket}: you may not; use sudo, or join the group {READ} and log in again"
    assert done.stdout == f"stats forbidden {what}\n"


def test_a_socket_of_no_group_names_none(daemon: Daemon, tmp_path: Path) -> None:
    daemon.socket.chmod(0o660)
    os.chown(daemon.socket, -1, 0)
    try:
        done = subprocess.run(
            [sys.executable, "-c", AS_SOMEBODY, str(daemon.socket), str(NOBODY), str(NOBODY), "",
             "stats"],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
    finally:
        os.chown(daemon.socket, -1, gid_of(READ))
    assert done.stdout == f"stats forbidden {daemon.socket}: you may not; use sudo\n"
