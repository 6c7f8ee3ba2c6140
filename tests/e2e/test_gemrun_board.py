"""Artifacts and the boards that they were built for, on fake device trees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from candidates import hdf
from gemctl.serve.artifact import declared
from gemctl.serve.inspect import board_problem
from gemmake.hdf import load_hdf
from gemrun import GemRunContext, GemRunHandle
from gemrun._engine import ffi, lib
from gemrun.errors import BoardWarning, ForeignBoardError
from gemrun.format import sizes

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("--quantization", "int8", "--effort", "fast", "--kv-cache-size", "128")
PI5, PI4 = ("raspberrypi,5-model-b", "brcm,bcm2712"), ("raspberrypi,4-model-b", "brcm,bcm2711")
NANO = ("nvidia,p3768-0000+p3767-0005", "nvidia,p3767-0005", "nvidia,tegra234")
STRANGE = ("acme,gate-2", "acme,gate")
REFUSED = (
    "HDF version mismatch: built for {target}, this is {here}; rebuild with --target {here}, "
    "or add --allow-foreign-board (allow_foreign_board)"
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this machine one whose device tree has these names; none: it has no tree."""

    def make(*names: str) -> None:
        root = tmp_path / "machine"
        tree = root / "proc" / "device-tree"
        tree.mkdir(parents=True, exist_ok=True)
        (tree / "compatible").unlink(missing_ok=True)
        if names:
            (tree / "compatible").write_bytes(b"".join(n.encode() + b"\0" for n in names))
        monkeypatch.setenv("GEMRUN_ROOT", str(root))

    return make


@pytest.fixture(scope="module")
def built(
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """An artifact for a target; `acme` is a board that hdf/ does not have."""

    def make(target: str) -> Path:
        if target == "acme":
            target = str(hdf(tmp_path_factory.mktemp("hdf"), "gate-2", "aarch64"))
        return artifact_cache(tiny_checkpoint("llama3"), *OPTIONS, "--target", target)

    return make


def gemrun(cli: Path, path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [cli, path, "--prompt", "a", "--max-tokens", "2", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("target", "names", "verdict"),
    [
        ("raspberry-pi-5", PI5, "fits"),
        ("raspberry-pi-5", PI4, "raspberry-pi-4"),
        ("raspberry-pi-5", NANO, "jetson-orin-nano"),
        ("raspberry-pi-5", STRANGE, "acme,gate-2"),
        ("raspberry-pi-5", (), "a machine without a device tree"),
        ("generic-aarch64", PI4, "fits"),
        ("generic-aarch64", (), "fits"),
        ("jetson-orin-nano", NANO, "fits"),
        ("intel-n100", STRANGE, "fits"),  # no device tree names it: it cannot be told ..
        ("intel-n100", (), "fits"),
        ("intel-n100", PI4, "raspberry-pi-4"),  # .. but by its processor
        ("acme", STRANGE, "fits"),
    ],
)
def test_the_command(
    gemrun_cli: Path,
    built: Callable[[str], Path],
    machine: Callable[..., None],
    target: str,
    names: tuple[str, ...],
    verdict: str,
) -> None:
    machine(*names)
    path = built(target)
    done = gemrun(gemrun_cli, path)
    if verdict == "fits":
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
    elif verdict in ("raspberry-pi-4", "jetson-orin-nano"):
        assert done.returncode == 4
        assert done.stdout == ""
        said = REFUSED.format(target=target, here=verdict)
        assert done.stderr == f"Model load failed: {path}: {said}\n"
        assert gemrun(gemrun_cli, path, "--allow-foreign-board").returncode == 0
    else:
        assert done.returncode == 0, done.stderr
        wanted = f"gemrun: warning: {path}: built for {target}, and this is {verdict}, which no "
        assert done.stderr.startswith(wanted)


def test_a_board_of_one_s_own_is_refused_on_a_known_one(
    gemrun_cli: Path, built: Callable[[str], Path], machine: Callable[..., None]
) -> None:
    machine(*PI4)
    done = gemrun(gemrun_cli, built("acme"))
    assert done.returncode == 4
    assert "HDF version mismatch: built for gate-2, this is raspberry-pi-4; " in done.stderr


@pytest.mark.parametrize("kind", [GemRunContext, GemRunHandle])
def test_python(
    kind: type[GemRunContext] | type[GemRunHandle],
    built: Callable[[str], Path],
    machine: Callable[..., None],
) -> None:
    path = built("raspberry-pi-5")
    machine(*PI5)
    with kind(path, ignore_memory=True) as model:
        wanted = model.infer("a", 3, temperature=0)
    machine(*PI4)
    with pytest.raises(ForeignBoardError, match="this is raspberry-pi-4; rebuild") as refused:
        kind(path, ignore_memory=True)
    assert refused.value.code == -72
    with kind(path, ignore_memory=True, allow_foreign_board=True) as model:
        assert model.infer("a", 3, temperature=0) == wanted


def test_python_warns_of_a_machine_that_is_not_known(
    built: Callable[[str], Path], machine: Callable[..., None]
) -> None:
    machine(*STRANGE)
    with pytest.warns(BoardWarning, match="built for raspberry-pi-5, and this is acme,gate-2"):
        GemRunContext(built("raspberry-pi-5"), ignore_memory=True).close()


def test_the_table_of_boards_is_that_of_hdf() -> None:
    command = [sys.executable, "tools/boards.py", "--check"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 0, "names of boards: not what hdf/ says; run python tools/boards.py"
    for path in (ROOT / "hdf").glob("*.toml"):
        for name in load_hdf(path).compatible:
            assert f'{{"{name}", ' in (ROOT / "csrc" / "gs_boards.h").read_text()


# ---- memory ----


def explained(status: int, root: Path, path: Path | None = None) -> str:
    out = ffi.new("char[256]")
    name = ffi.NULL if path is None else ffi.new("char[]", os.fsencode(path))
    assert lib.gemrun_explain_memory(status, name, os.fsencode(root), out, 256) == len(
        ffi.string(out)
    )
    return str(ffi.string(out).decode())


def test_short_memory_names_whose_it_is(tmp_path: Path, built: Callable[[str], Path]) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 1000 kB\n")
    assert explained(-70, tmp_path) == (
        " (page cache that gives way counts as available: dropping it does not help)"
    )
    (tmp_path / "proc/self/cgroup").write_text("0::/small\n")
    group = tmp_path / "sys/fs/cgroup/small"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("500000\n")
    (group / "memory.current").write_text("100000\n")
    (group / "memory.stat").write_text("inactive_file 30000\nactive_file 20000\n")
    assert explained(-70, tmp_path) == (" (the control group leaves 450000 bytes: raise its limit)")
    path = built("generic-aarch64")
    limit = sizes.group_limit(declared(path).ram_total)
    told = f" (the control group leaves 450000 bytes: raise its limit to {limit})"
    assert explained(-70, tmp_path, path) == told
    assert explained(-43, tmp_path) == ""


def test_a_refused_mapping_names_the_limits(gemrun_cli: Path, built: Callable[[str], Path]) -> None:
    path = built("generic-aarch64")
    limits = range(3000, 8000, 250)  # KiB
    takes = declared(path).ram_total
    said = []
    for limit in limits:
        line = f"ulimit -v {limit}; exec '{gemrun_cli}' '{path}' --prompt x --json"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
        if done.returncode == 5 and "the system refused" in done.stderr:
            said.append((limit, done.stderr))
    assert said
    for limit, text in said:
        assert text.startswith(f"Model load failed: Memory layout mismatch: {path}: ")
        found = f" (a run takes {takes}, limit of address space {1024 * limit}"
        assert found in text
        assert text.endswith(" bytes)\n")


def test_a_context_above_the_compiled_one_has_both_numbers(
    gemrun_cli: Path, built: Callable[[str], Path]
) -> None:
    done = gemrun(gemrun_cli, built("generic-aarch64"), "--kv-cache-size", "129")
    assert done.returncode == 5
    assert done.stderr.startswith("Model load failed: Memory layout mismatch: ")
    assert "(129 tokens, room for 128); ask for less, or compile with a larger" in done.stderr


def test_gembench(built: Callable[[str], Path], machine: Callable[..., None]) -> None:
    def bench(*options: str) -> subprocess.CompletedProcess[str]:
        path = str(built("raspberry-pi-5"))
        command = ["--model", path, "--prompt", "a", "--iterations", "1", "--warmup", "0"]
        return subprocess.run(
            [sys.executable, "-m", "gemrun.cli_bench", *command, "--depths", "none", *options],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip

    machine(*STRANGE)
    done = bench()
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("gembench: warning: ")
    assert "built for raspberry-pi-5, and this is acme,gate-2" in done.stderr
    machine(*PI4)
    done = bench()
    assert done.returncode == 4
    assert "HDF version mismatch: built for raspberry-pi-5, this is raspberry-pi-4; " in done.stderr
    assert bench("--allow-foreign-board").returncode == 0


@pytest.mark.parametrize(
    ("boards", "said"),
    [
        (PI5, ""),
        ((), ""),
        (PI4, "this is raspberry-pi-4; rebuild with --target raspberry-pi-4, or set models."),
        (STRANGE, "this is acme,gate-2; rebuild with the right --target, or set models."),
    ],
)
def test_the_daemon_names_the_board(boards: tuple[str, ...], said: str) -> None:
    hdf = {"id": "raspberry-pi-5", "compatible": list(PI5), "target": {"arch": "aarch64"}}
    problem = board_problem(hdf, list(boards), "aarch64")
    assert said in problem
    assert problem.startswith("HDF version mismatch: built for raspberry-pi-5, " if said else "")
    assert bool(problem) is bool(said)
