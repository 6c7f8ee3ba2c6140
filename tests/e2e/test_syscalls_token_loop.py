"""Between two tokens: no system call but futex and the clock, and no allocation.

Twice over: strace lists the calls of a run, and a seccomp filter, installed behind the first token
of another, would end the process at any call that is not allowed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "build" / "dev" / "libgemrun.a"
DRIVER = Path(__file__).with_name("token_loop.c")
TOKENS = 40
CORES = min(2, len(os.sched_getaffinity(0)))
ALLOWED = {"futex", "clock_gettime"}
CASES = [
    (1, "greedy"),
    (1, "all"),
    (2, "all"),
    (4, "greedy"),
    (2, "steps"),
    (1, "pinned"),
    (CORES, "pinned"),
]
SKIPPED = 77  # exit code of the driver where the system refuses filters


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not LIBRARY.exists():
        pytest.fail("libgemrun.a: not built; run 'make dev'", pytrace=False)
    target = tmp_path_factory.mktemp("token-loop") / "token_loop"
    flags = ("-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fno-builtin")
    command = ["cc", *flags, f"-I{ROOT / 'csrc'}", DRIVER, LIBRARY, "-pthread", "-o", target]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]) -> Path:
    options = ("--quantization", "int4", "--effort", "fast", "--kv-cache-size", "128")
    return artifact_cache(tiny_checkpoint("gemma3"), *options)


def check_output(text: str) -> None:
    """All tokens were made, and nothing was allocated between the first and the last."""
    lines = text.splitlines()
    assert lines[:TOKENS] == [f"token {i}" for i in range(1, TOKENS + 1)], text
    assert lines[TOKENS:] == [f"made {TOKENS}", "allocations 0"]


def between_markers(log: str) -> list[str]:
    """Names of the calls behind the first token's marker, up to the last one's."""
    lines = log.splitlines()
    first = next(i for i, line in enumerate(lines) if re.search(r'write\(1, "token 1\\n"', line))
    last = next(i for i, line in enumerate(lines) if f'write(1, "token {TOKENS}\\n"' in line)
    # "1234 futex(0x7f.., .."; a line "1234 <... futex resumed>" ends a call that is listed already
    names = [re.match(r"\d+\s+(\S*?)\(", line) for line in lines[first + 1 : last]]
    return [found[1] for found in names if found]


def test_the_log_reader_sees_every_call() -> None:
    log = """\
10 openat(AT_FDCWD, "x", O_RDONLY) = 3
10 write(1, "token 1\\n", 8) = 8
10 futex(0x7f00, FUTEX_WAKE_PRIVATE, 8) = 1
11 <... futex resumed>) = 0
11 mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, 3, 0 <unfinished ...>
11 <... mmap resumed>) = 0x7f
10 write(1, "token 40\\n", 9) = 9
10 exit_group(0) = ?
"""
    assert between_markers(log) == ["futex", "mmap"]


def run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def traced(command: Sequence[str | Path], log: Path) -> tuple[str, list[str]]:
    """What the driver printed, and the calls between its first and its last token."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.fail("strace: not installed; install the package strace", pytrace=False)
    done = run([strace, "-f", "-qq", "-e", "trace=all", "-e", "signal=none", "-o", log, *command])
    if "Operation not permitted" in done.stderr:
        pytest.skip("this system does not let a process be traced; the sealed runs stand")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, between_markers(log.read_text(encoding="utf-8", errors="replace"))


def sealed(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    done = run(command)
    if done.returncode == SKIPPED:
        pytest.skip(f"this system refuses seccomp filters; strace stands ({done.stdout.strip()})")
    return done


@pytest.mark.parametrize(("threads", "mode"), CASES)
def test_strace_lists_nothing_else(
    driver: Path, artifact: Path, tmp_path: Path, threads: int, mode: str
) -> None:
    command = [driver, artifact, str(threads), str(TOKENS), mode, "trace"]
    text, calls = traced(command, tmp_path / "strace.log")
    check_output(text)
    assert calls.count("write") == TOKENS - 2  # the driver's own, first and last not counted
    assert set(calls) - {"write"} <= ALLOWED, sorted(set(calls))


@pytest.mark.parametrize(("threads", "mode"), CASES)
def test_a_sealed_process_goes_on(driver: Path, artifact: Path, threads: int, mode: str) -> None:
    done = sealed([driver, artifact, str(threads), str(TOKENS), mode, "sealed"])
    assert done.returncode == 0, f"ended by signal or code {done.returncode}\n{done.stdout}"
    check_output(done.stdout)


def test_a_leak_is_noticed(driver: Path, artifact: Path, tmp_path: Path) -> None:
    """One allocation and one harmless call in the callback: all three ways see it."""
    command = [driver, artifact, "2", str(TOKENS), "leak"]
    done = sealed([*command, "sealed"])
    assert done.returncode == -signal.SIGSYS
    assert done.stdout.splitlines()[-1] == "token 3"
    text, calls = traced([*command, "trace"], tmp_path / "strace.log")
    assert "getppid" in calls
    assert text.splitlines()[-1] == "allocations 2"
