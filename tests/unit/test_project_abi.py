"""The shared library's interface against the record of the last release (csrc/ABI.md)."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path

import pytest

import abi

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tree() -> abi.Interface:
    return abi.read_tree()


@pytest.fixture(scope="module")
def record() -> abi.Interface:
    return abi.parsed(abi.RECORD.read_text(encoding="utf-8"))


def test_the_tree_keeps_what_the_last_release_promised(
    tree: abi.Interface, record: abi.Interface
) -> None:
    assert record.calls
    assert record.fields["gemrun_config.size"] == (0, 4, 0, 4)
    assert abi.broken(record, tree) == []


def test_the_library_exports_the_recorded_calls(record: abi.Interface) -> None:
    library = ROOT / "build" / "dev" / "libgemrun.so"
    assert library.exists(), "not built; run 'make dev'"
    listing = subprocess.run(
        ["nm", "--dynamic", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1] for line in listing.splitlines()}
    assert {f"{name}@@GEMRUN_{record.abi}" for name in record.calls} <= exported
    assert f"GEMRUN_{record.abi}" in (ROOT / "csrc" / "gemrun.map").read_text(encoding="utf-8")
    headers = subprocess.run(
        ["readelf", "--dynamic", "--wide", library], capture_output=True, text=True, check=True
    ).stdout
    assert f"soname: [libgemrun.so.{record.abi}]" in headers


def test_the_record_reads_as_it_was_written(tree: abi.Interface) -> None:
    assert abi.parsed("\n".join(tree.lines())) == tree


def changed(tree: abi.Interface, **parts: dict[str, object]) -> abi.Interface:
    new = copy.deepcopy(tree)
    for part, values in parts.items():
        getattr(new, part).update(values)
    return new


def test_additions_break_nothing(tree: abi.Interface) -> None:
    offset, size, *narrow = tree.fields["gemrun_config.reserved"]
    new = changed(
        tree,
        calls={"gemrun_new": "int gemrun_new(void)"},
        constants={"GEMRUN_E_NEW": -91},
        structs={"gemrun_stats": tuple(n + 8 for n in tree.structs["gemrun_stats"])},
        fields={
            "gemrun_config.reserved": (offset + 4, size - 4, narrow[0] + 4, narrow[1] - 4),
            "gemrun_config.new": (offset, 4, narrow[0], 4),
        },
    )
    assert abi.broken(tree, new) == []


def test_every_kind_of_break_is_seen(tree: abi.Interface) -> None:
    place = tree.fields["gemrun_config.threads"]
    cases: list[dict[str, dict[str, object]]] = [
        {"calls": {"gemrun_decode": "int32_t gemrun_decode(gemrun_context_t *ctx)"}},
        {"callbacks": {"gemrun_step_fn": "int (*gemrun_step_fn)(void *user)"}},
        {"constants": {"GEMRUN_E_BUSY": -3}},
        {"fields": {"gemrun_config.threads": (place[0] + 4, *place[1:])}},
        {"fields": {"gemrun_config.threads": (*place[:3], 8)}},
        {"structs": {"gemrun_stats": (8, 8)}},
    ]
    for case in cases:
        assert len(abi.broken(tree, changed(tree, **case))) == 1, case
    gone = copy.deepcopy(tree)
    del gone.calls["gemrun_decode"]
    assert abi.broken(tree, gone) == ["gemrun_decode: gone"]
    gone.abi += 1
    assert abi.broken(tree, gone) == []
