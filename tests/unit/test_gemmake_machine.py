"""What a control group leaves a compile: version 1 and 2, a limit of one above, none."""

from __future__ import annotations

from pathlib import Path

import pytest

import sysfs
from gemmake.machine import group_note

MIB = 1 << 20


@pytest.fixture
def tree(tmp_path: Path) -> sysfs.Sysfs:
    return sysfs.Sysfs(tmp_path)


def test_no_limit_is_no_note(tree: sysfs.Sysfs) -> None:
    assert group_note(tree.root) == ""
    tree.put("proc/self/cgroup", "0::/a/b")
    tree.put("sys/fs/cgroup/a/b/memory.max", "max")
    assert group_note(tree.root) == ""
    tree.put("sys/fs/cgroup/a/memory.max", 2 << 30)
    assert group_note(tree.root) == ""


def test_a_limit_above_counts_and_page_cache_gives_way(tree: sysfs.Sysfs) -> None:
    tree.put("proc/self/cgroup", "0::/a/b")
    tree.put("sys/fs/cgroup/a/memory.max", 200 * MIB)
    tree.put("sys/fs/cgroup/a/memory.current", 150 * MIB)
    tree.put("sys/fs/cgroup/a/memory.stat", f"anon 7\nfile {100 * MIB}\n")
    assert group_note(tree.root).startswith("the control group leaves 150 MiB, and the system ends")
    tree.put("sys/fs/cgroup/a/b/memory.max", 90 * MIB)
    assert group_note(tree.root).startswith("the control group leaves 90 MiB, ")
    tree.put("sys/fs/cgroup/a/b/memory.current", 900 * MIB)
    assert group_note(tree.root).startswith("the control group leaves 0 MiB, ")


def test_version_1(tree: sysfs.Sysfs) -> None:
    tree.put("proc/self/cgroup", "9:cpu,cpuacct:/c\n4:memory:/m\n1:name=systemd:/s")
    tree.put("sys/fs/cgroup/memory/c/memory.limit_in_bytes", 5)
    tree.put("sys/fs/cgroup/memory/m/memory.limit_in_bytes", 300 * MIB)
    tree.put("sys/fs/cgroup/memory/m/memory.usage_in_bytes", 100 * MIB)
    tree.put("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    assert group_note(tree.root).startswith("the control group leaves 200 MiB, ")


@pytest.mark.parametrize("text", ["", "0", "::", "0::../../..", "\u00b2:memory:/x"])
def test_what_makes_no_sense_is_no_limit(tree: sysfs.Sysfs, text: str) -> None:
    tree.put("proc/self/cgroup", text)
    tree.put("sys/fs/cgroup/memory.max", "\u00b2")
    assert group_note(tree.root) == ""
