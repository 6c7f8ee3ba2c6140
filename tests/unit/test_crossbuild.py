"""What `gemmake engine` builds for a board, a processor or a compiler of one's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from gemmake import amalgamate, crossbuild
from gemmake.crossbuild import Request, machine_of, recipes
from gemmake.errors import TargetError, UsageError
from gemmake.failures import HostError

PLAIN: dict[str, str] = {"PATH": "/usr/bin"}


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossbuild, "zig", lambda: Path("/zig"))


@pytest.mark.parametrize(
    ("target", "machine"),
    [
        ("jetson-orin-nano", "aarch64"), ("raspberry-pi-4", "aarch64"), ("generic-armv7", "armv7"),
        ("spacemit-k1", "riscv64"), ("intel-n100", "x86_64"), ("cortex-m55", "cortex-m55"),
        ("cortex-m7", "cortex-m7"), ("arm64", "aarch64"), ("armhf", "armv7"), ("riscv", "riscv64"),
        ("amd64", "x86_64"), ("wasm", "wasm32"),
    ],
)  # fmt: skip
def test_boards_and_processors(target: str, machine: str) -> None:
    assert machine_of(target) == machine


def test_every_shipped_board_has_an_engine() -> None:
    for board in crossbuild.list_targets():
        assert machine_of(board) in crossbuild.KNOWN


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(TargetError, match="z80: neither a board nor a processor; processors: x86"):
        machine_of("z80")


def test_default_is_every_processor_with_both_libraries() -> None:
    names = [one.name for one in recipes(Request(environment=PLAIN))]
    assert names == [
        "x86_64-linux-gnu", "x86_64-linux-musl", "aarch64-linux-gnu", "aarch64-linux-musl",
        "arm-linux-gnueabihf", "arm-linux-musleabihf", "riscv64-linux-gnu", "riscv64-linux-musl",
    ]  # fmt: skip


def test_boards_of_one_processor_are_one_build() -> None:
    wanted = Request(["raspberry-pi-4", "jetson-orin-nano", "aarch64"], ["glibc"], False, PLAIN)
    (one,) = recipes(wanted)
    assert one.settings == {"GEM_ZIG": "/zig", "GEM_TRIPLE": "aarch64-linux-gnu.2.28"}


def test_flags_of_the_environment_do_not_reach_our_compiler() -> None:
    given = {**PLAIN, "CFLAGS": "-O0", "LDFLAGS": "-lfoo", "CC": "tcc", "DESTDIR": "/x"}
    (one,) = recipes(Request(["aarch64"], ["musl"], False, given))
    assert one.environment == PLAIN


def test_a_compiler_of_ones_own() -> None:
    given = {**PLAIN, "CROSS_COMPILE": "/tools/bin/aarch64-poky-linux-", "TARGET_ARCH": "arm64"}
    (one,) = recipes(Request(environment={**given, "CFLAGS": "-mtune=cortex-a76"}))
    assert one.name == "aarch64-poky-linux"
    assert one.toolchain == "gcc.cmake"
    assert one.settings == {
        "GEM_PREFIX": "/tools/bin/aarch64-poky-linux-",
        "GEM_PROCESSOR": "aarch64",
    }
    assert one.environment["CFLAGS"] == "-mtune=cortex-a76"


@pytest.mark.parametrize("prefix", ["../", "/tools/bin/sub/..", "/", "./", "a\nb-", "-", "..-"])
def test_the_folder_of_a_build_lies_in_the_output(prefix: str) -> None:
    (one,) = recipes(
        Request(environment={**PLAIN, "CROSS_COMPILE": prefix, "TARGET_ARCH": "arm64"})
    )
    assert one.name in ("aarch64", "sub")


def test_a_compiler_that_is_not_there_is_named(tmp_path: Path) -> None:
    given = {**PLAIN, "CROSS_COMPILE": "no-such-", "TARGET_ARCH": "arm64"}
    (one,) = recipes(Request(environment=given))
    with pytest.raises(
        HostError, match=r"no-such-gcc: no such compiler; .*\(Debian: gcc-no-such\)"
    ):
        crossbuild.build(one, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_compiler_for_nobody_knows_what() -> None:
    with pytest.raises(UsageError, match="set TARGET_ARCH or give --target"):
        recipes(Request(environment={**PLAIN, "CROSS_COMPILE": "arm-none-eabi-"}))


def test_firmware_is_built_without_a_system() -> None:
    (one,) = recipes(Request(["cortex-m55"], environment=PLAIN))
    assert one.settings["GEM_PORT"] == "bare"
    assert one.settings["GEM_PREFIX"] == "arm-none-eabi-"
    assert "nomve.fp" in one.settings["GEM_CPU"]  # its float vectors flush denormal numbers
    assert not one.command


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (one,) = recipes(Request(["aarch64"], ["glibc"], False, PLAIN))
    (tmp_path / one.name).mkdir()
    (tmp_path / one.name / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="holds something that gemmake did not build"):
        crossbuild.build(one, tmp_path)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(crossbuild.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HostError, match=r"pip install 'gembin-toolchain\[cross\]'"):
        crossbuild.zig()


def test_the_engine_as_one_file_writes_over_nobody_elses(tmp_path: Path) -> None:
    header = tmp_path / "gemrun.h"
    header.write_text("mine\n")
    with pytest.raises(UsageError, match="did not build; choose another"):
        amalgamate.write(crossbuild.source_dir(), tmp_path)
    assert header.read_text() == "mine\n"
    header.unlink()
    names = amalgamate.write(crossbuild.source_dir(), tmp_path)
    assert amalgamate.write(crossbuild.source_dir(), tmp_path) == names  # its own are replaced


def test_the_log_of_a_build_follows_no_link(tmp_path: Path) -> None:
    """A build that fails leaves its log, and what a link of that name led to as it was."""
    tools, other, output = tmp_path / "tc", tmp_path / "other", tmp_path / "out"
    tools.mkdir()
    output.mkdir()
    other.write_text("mine\n")
    (tools / "x-gcc").symlink_to("/bin/false")
    (output / "x.log").symlink_to(other)
    given = {**PLAIN, "CROSS_COMPILE": f"{tools}/x-", "TARGET_ARCH": "x86_64"}
    (one,) = recipes(Request(environment=given))
    with pytest.raises(HostError, match="the build failed; see"):
        crossbuild.build(one, output)
    assert other.read_text() == "mine\n"
    assert "CMake" in (output / "x.log").read_text()


@pytest.mark.parametrize("below", ["", "x", "x/y"])
@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_an_output_that_is_no_folder_is_named(tmp_path: Path, below: str, kind: str) -> None:
    """And whatever it is stays what it is."""
    there = tmp_path / "there"
    there.write_text("mine") if kind == "file" else os.mkfifo(there)
    before = there.lstat()
    (recipe,) = recipes(Request(["aarch64"], ["musl"], False, PLAIN))
    for make in (
        lambda: crossbuild.build(recipe, there / below),
        lambda: amalgamate.write(crossbuild.source_dir(), there / below),
    ):
        with pytest.raises(UsageError, match=f"{there}: is not a folder; choose another --output"):
            make()
    assert there.lstat() == before
    assert list(tmp_path.iterdir()) == [there]


def test_a_pipe_in_the_place_of_a_build_is_somebody_else_s(tmp_path: Path) -> None:
    (recipe,) = recipes(Request(["aarch64"], ["musl"], False, PLAIN))
    os.mkfifo(tmp_path / recipe.name)
    with pytest.raises(UsageError, match="holds something that gemmake did not build"):
        crossbuild.build(recipe, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [recipe.name]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_told_as_one_of_a_build_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    """The compiler of one's own is a script that says that it runs, and waits."""
    ready = tmp_path / "ready"
    compiler = tmp_path / "slow-gcc"
    compiler.write_text(f"#!/bin/sh\n: > {ready}\nexec sleep 60\n")
    compiler.chmod(0o755)
    environment = {
        **os.environ, "CROSS_COMPILE": f"{tmp_path}/slow-", "TARGET_ARCH": "aarch64",
        "PYTHONPATH": str(crossbuild.source_dir()),
    }  # fmt: skip
    output = tmp_path / "engine"
    command = [sys.executable, "-m", "gemmake.cli", "engine", "--output", str(output)]
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        while not ready.exists() and process.poll() is None:
            time.sleep(0.02)
        os.killpg(process.pid, number)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert told.splitlines()[-1] == (
        f"gemmake: stopped by {number.name}; a build that was not done left nothing; start it again"
    )
    assert list(output.iterdir()) == []


def test_a_second_build_into_one_folder_waits_and_says_so(tmp_path: Path) -> None:
    """Two at once had one log and one scratch folder; the compiler is a script that says that it
    runs, and waits to be let go."""
    ready, go, output = tmp_path / "ready", tmp_path / "go", tmp_path / "engine"
    compiler = tmp_path / "slow-gcc"
    compiler.write_text(f"#!/bin/sh\n: > {ready}\nuntil [ -e {go} ]; do sleep 0.1; done\nexit 1\n")
    compiler.chmod(0o755)
    environment = {
        **os.environ, "CROSS_COMPILE": f"{tmp_path}/slow-", "TARGET_ARCH": "aarch64",
        "PYTHONPATH": str(crossbuild.source_dir()),
    }  # fmt: skip
    command = [sys.executable, "-m", "gemmake.cli", "engine", "--output", str(output)]
    begin = partial(subprocess.Popen, command, env=environment, stderr=subprocess.PIPE, text=True)
    first = begin()
    while not ready.exists() and first.poll() is None:
        time.sleep(0.02)
    second = begin()
    assert second.stderr is not None
    told = [second.stderr.readline() for _ in range(2)]
    assert told[0] == "slow: building\n"
    assert told[1] == f"{output}: another gemmake engine builds into it; waiting for its end\n"
    go.touch()
    for process in (first, second):  # such a compiler fails, and each is told of its own failure
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1
        assert f"the build failed; see {output}/slow.log" in err
        assert "No such file" not in err
