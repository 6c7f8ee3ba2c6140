"""What the engine does to the system: memory as declared, no system call between two tokens."""

from __future__ import annotations

import collections
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from gemrun import GemRunContext
from gemrun.errors import NotEnoughMemoryError
from reference import make_image
from reference import records as rec

SHAPE = make_image.Shape(
    layers=tuple(make_image.Layer(ffn=512) for _ in range(4)), hidden=256, context=512, vocab=3000
)
PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up model of a few megabytes."""
    file = tmp_path_factory.mktemp("system") / "made.gembin"
    file.write_bytes(make_image.make(SHAPE, seed=6))
    return file


def resident(address: int, size: int) -> int:
    """Bytes of a range that are in memory, from the process's own page map."""
    first, last = address // PAGE, -(-(address + size) // PAGE)
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        entries = os.pread(pages.fileno(), 8 * (last - first), 8 * first)
    present = sum(entry >> 63 for (entry,) in struct.iter_unpack("<Q", entries))
    return present * PAGE


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_is_as_declared(path: Path, threads: int) -> None:
    with GemRunContext(path, threads=threads) as ctx:
        opened = {r.address: resident(r.address, r.size) for r in ctx.regions()}
        ctx.infer("x" * 100, 10_000, temperature=0.9, ignore_stop_ids=True)
        assert ctx.stats().kv_used == SHAPE.context
        regions, stats = ctx.regions(), ctx.stats()
        used = {r.address: resident(r.address, r.size) for r in regions}
    assert used == opened, "memory was touched for the first time during a run"
    total = sum(used.values())
    assert total <= stats.ram_total + 64 * 1024 * len(regions)
    assert total >= 0.99 * stats.ram_total
    if threads == SHAPE.threads:
        assert stats.ram_total == stats.declared_total


def calls(command: Path, path: Path, tokens: int, log: Path) -> collections.Counter[str]:
    """System calls of a whole run by name, futex aside."""
    arguments = ["--prompt", "hello", "--json", "--ignore-eos", "--max-tokens", str(tokens)]
    subprocess.run(
        ["strace", "-f", "-qq", "-o", str(log), str(command), str(path), *arguments],
        check=True,
        capture_output=True,
        timeout=120,
    )
    names = re.findall(r"^\d+ +(\w+)\(", log.read_text(errors="replace"), re.M)
    return collections.Counter(name for name in names if name != "futex")


def test_no_system_call_between_tokens(gemrun_cli: Path, path: Path, tmp_path: Path) -> None:
    assert shutil.which("strace"), "strace is not installed; requirements/system.txt has it"
    few = calls(gemrun_cli, path, 4, tmp_path / "few")
    many = calls(gemrun_cli, path, 60, tmp_path / "many")
    assert many == few


def test_short_memory_refuses(gemrun_cli: Path, path: Path) -> None:
    """Under every limit of the address space: it runs, or refuses with a sentence; no signal."""
    seen = set()
    for limit in range(3000, 8000, 250):  # KiB
        done = subprocess.run(
            ["sh", "-c", f"ulimit -v {limit}; exec '{gemrun_cli}' '{path}' --prompt x --json"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        seen.add(done.returncode)
        if done.returncode == 5:
            assert done.stderr.startswith("Model load failed: Memory layout mismatch: ")
    assert {0, 5} <= seen <= {0, 5, 127}  # 127: not even libc could be loaded


PLAN = r"weights (\d+), tables (\d+), arena (\d+), KV (\d+), engine (\d+), stacks (\d+)"


def test_a_refusal_for_memory_lists_the_plan(gemrun_cli: Path, tmp_path: Path) -> None:
    """A model of half a terabyte, nearly all of it cache, which takes no room in the file."""
    layer = make_image.Layer(heads=64, kv_heads=64)
    huge = make_image.Shape((layer,) * 128, hidden=32, context=1 << 18, kv_type=rec.KV_F32)
    file = tmp_path / "huge.gembin"
    file.write_bytes(make_image.make(huge, seed=1))
    if os.sysconf("SC_PHYS_PAGES") * PAGE > 500e9:
        pytest.skip("this machine has room for the model")
    done = subprocess.run(
        [gemrun_cli, file, "--info", "--threads", "2"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith(
        f"Model load failed: Memory layout mismatch: {file}: less memory is available than the "
    )
    assert done.stderr.count("\n") == 1
    found = re.search(rf"\(wanted (\d+) bytes.*: {PLAN}, total (\d+) with 2 threads\)", done.stderr)
    assert found is not None, done.stderr
    wanted, *parts, total = map(int, found.groups())
    assert wanted == total == sum(parts) > 500e9
    assert parts[5] == 256 * 1024
    with pytest.raises(NotEnoughMemoryError, match=PLAN):
        GemRunContext(file, threads=2)


def test_affinity_is_read_back_and_restored(path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))[:2]
    mask = sum(1 << core for core in allowed if core < 64)
    with GemRunContext(path, threads=len(allowed), thread_affinity=mask) as ctx:
        ctx.infer("hello", 3)
        assert ctx.stats().pinned == ctx.stats().threads == len(allowed)
    assert sorted(os.sched_getaffinity(0))[:2] == allowed
