"""The minimal engine without a system, on emulated boards: the digest of a host, bit for bit.

Cortex-M3 has no floating-point unit, M7 has one, M55 has vectors of integers besides; RISC-V 64
runs without a C library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import compiling
from gemmake.check.rules import check_file
from gemmake.errors import BudgetError
from gemmake.options import Effort
from gemrun.format.reader import read_artifact
from gemrun.format.spec import field_text

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "bare_metal"
GOLDEN = ROOT / "tests" / "golden" / "v1.0"
BOARDS = {
    "an385": ("arm-none-eabi-gcc", "qemu-system-arm"),
    "an500": ("arm-none-eabi-gcc", "qemu-system-arm"),
    "an547": ("arm-none-eabi-gcc", "qemu-system-arm"),
    "virt": ("riscv64-linux-gnu-gcc", "qemu-system-riscv64"),
}
ARTIFACTS = ("tiny-int4", "tiny-pinned")
M55_FLAGS = (  # what a system such as Zephyr compiles for the core with, by its options
    "cortex-m55+nomve -mfloat-abi=hard",
    "cortex-m55+nomve -mfloat-abi=softfp",
    "cortex-m55+nodsp -mfloat-abi=hard",
    "cortex-m55+nomve+nofp -mfloat-abi=soft",
    "cortex-m55+nomve.fp -mfloat-abi=softfp",
    "cortex-m33 -mfloat-abi=hard",  # code for another core
)


def run(board: str, artifact: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "-s", "-C", str(EXAMPLE), f"BOARD={board}", f"MODEL={artifact}"]
    command += [f"OUT={folder}", f"CSRC={ROOT / 'csrc'}", *more, "run"]
    return subprocess.run(  # text by semihosting is the emulator's stderr
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        timeout=300,
    )  # fmt: skip


def said(board: str, artifact: Path, folder: Path, *more: str) -> str:
    done = run(board, artifact, folder, *more)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a host prints, for each artifact."""
    folder = tmp_path_factory.mktemp("host")
    return {name: said("host", GOLDEN / f"{name}.gembin", folder / name) for name in ARTIFACTS}


@pytest.mark.parametrize("name", ARTIFACTS)
@pytest.mark.parametrize("board", sorted(BOARDS))
def test_a_board_prints_the_digest_of_the_host(
    board: str, name: str, wanted: dict[str, str], tmp_path: Path
) -> None:
    for tool in BOARDS[board]:
        if shutil.which(tool) is None:
            pytest.fail(f"{tool}: not found; run: make setup as root", pytrace=False)
    assert re.search(r"^digest: [0-9a-f]{10,16}$", wanted[name], re.M), wanted[name]
    text = said(board, GOLDEN / f"{name}.gembin", tmp_path)
    facts = re.compile(r"^(?:artifact|test vectors passed|digest): .*$", re.M)
    assert facts.findall(text) == facts.findall(wanted[name])
    size = subprocess.run(["size", str(tmp_path / f"{board}.elf")], capture_output=True, text=True)
    print(f"{board}, {name}: {text}{size.stdout}")


def test_another_model_is_built_in_whatever_its_age(wanted: dict[str, str], tmp_path: Path) -> None:
    """An older file, and other bytes under the same name; other flags are built again too."""
    path = tmp_path / "model.gembin"
    for name in ARTIFACTS:
        path.write_bytes((GOLDEN / f"{name}.gembin").read_bytes())
        os.utime(path, (1e9, 1e9))
        assert said("host", path, tmp_path) == wanted[name]
    program = tmp_path / "host.elf"
    for flags, again in (("-O2", False), ("-O1", True), ("-O1", False)):
        before = program.stat().st_mtime_ns
        assert said("host", path, tmp_path, f"CFLAGS={flags}") == wanted[ARTIFACTS[-1]]
        assert (program.stat().st_mtime_ns != before) == again


@pytest.mark.parametrize(
    ("target", "board"),
    [("cortex-m55", "an547"), ("cortex-m7", "an500"), ("generic-armv7", "an547")],
)
def test_a_model_of_one_s_own(
    target: str,
    board: str,
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """The README's way: compiled for the board, or for any."""
    options = ("--target", target, "--effort", "fast", "--kv-cache-size", "64")
    path = artifact_cache(tiny_checkpoint("llama3"), *options)
    host, emulated = (said(name, path, tmp_path / name) for name in ("host", board))
    assert emulated == host
    assert re.search(r"^test vectors passed: [1-9]", host, re.M), host
    with read_artifact(path) as content:
        header, conf = content.header, content.conf
    assert field_text(header.target) == target
    if target == "generic-armv7":
        return
    assert (conf.threads, conf.chunk, conf.context, header.ram_budget) == (1, 32, 64, 0)
    needed = int(re.findall(r"^memory: (\d+) bytes$", host, re.M)[0])
    assert needed == header.ram_engine + header.ram_arena + header.ram_kv
    assert check_file(path).exit_code == 0


@pytest.mark.parametrize(
    ("context", "told"),
    [
        (4096, r"own: needs \d\.\d MiB but the target grants 2\.0 MiB; use --kv-cache-size \d+\n"),
        (1 << 20, r"own: the artifact takes \d+\.\d MiB of flash and the board has 1 MiB; use a s"),
    ],
)
def test_what_a_board_cannot_hold_is_refused(
    context: int, told: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """RAM without the weights; flash with them and the rotary tables."""
    board = tmp_path / "own.toml"
    text = '[storage]\nkind = "flash"\nseq_read_mbps = 100\nsize_mib = 1\n'
    board.write_text(f'inherits = ["cortex-m7"]\nid = "own"\n{text}')
    options = {"target": str(board), "effort": Effort.FAST, "context": context}
    with pytest.raises(BudgetError, match=told):
        compiling.compiled(tiny_checkpoint("llama3"), tmp_path / "x.gembin", **options)


@pytest.mark.parametrize("flags", M55_FLAGS)
def test_helium_may_be_left_to_others(flags: str, wanted: dict[str, str], tmp_path: Path) -> None:
    """Code without vectors on a core that has them: LE faults where FPSCR's LTPSIZE is not 4."""
    cpu = f"CPU=-mthumb -mcpu={flags}"
    text = said("an547", GOLDEN / "tiny-int4.gembin", tmp_path, cpu)
    digest = re.compile(r"^digest: .*$", re.M)
    assert digest.findall(text) == digest.findall(wanted["tiny-int4"])


def test_products_by_helium_equal_plain_ones(tmp_path: Path) -> None:
    """Of random and extreme numbers; artifacts have only some of them."""
    program = ROOT / "tests" / "bare" / "helium.c"
    assert "400 rounds equal" in said(
        "an547", GOLDEN / "tiny-int4.gembin", tmp_path, f"MAIN={program}"
    )


@pytest.mark.parametrize("level", ["-Os", "-O3", "-O2 -DGR_MIN_PLAIN"])
def test_helium_at_every_level_of_the_compiler(
    level: str, wanted: dict[str, str], tmp_path: Path
) -> None:
    text = said("an547", GOLDEN / "tiny-pinned.gembin", tmp_path, f"CFLAGS={level}")
    digest = re.compile(r"^digest: .*$", re.M)
    assert digest.findall(text) == digest.findall(wanted["tiny-pinned"])


def test_instructions_are_counted_and_helium_takes_fewer(tmp_path: Path) -> None:
    """What benchmarks/firmware.py counts: the same numbers each time, as nothing is timed."""
    more = [f"MAIN={ROOT / 'benchmarks' / 'firmware.c'}", "QEMU_FLAGS=-icount shift=0"]
    counts = [
        int(re.findall(r"decode: (\d+)", said("an547", GOLDEN / "tiny-int4.gembin", to, *m))[0])
        for to, m in (
            (tmp_path / "plain", [*more, "CFLAGS=-O2 -DMHZ=32 -DGR_MIN_PLAIN"]),
            (tmp_path / "helium", [*more, "CFLAGS=-O2 -DMHZ=32"]),
        )
    ]
    assert 0 < 2 * counts[1] < counts[0]


def test_a_damaged_artifact_is_refused_on_a_board(tmp_path: Path) -> None:
    image = bytearray((GOLDEN / "tiny-int4.gembin").read_bytes())
    image[-5] ^= 1  # in the weights, whose checksum it compares
    path = tmp_path / "damaged.gembin"
    path.write_bytes(image)
    done = run("an385", path, tmp_path)
    assert done.returncode != 0
    assert "open: gemrun: status -46" in done.stdout
    float_ = run("an385", GOLDEN / "tiny-f16.gembin", tmp_path / "float")
    assert "gemrun: status -27" in float_.stdout


def test_the_port_calls_no_system() -> None:
    """What its objects leave open is the C library's five functions and the compiler's own."""
    source = (ROOT / "csrc" / "gr_port_bare.c").read_text(encoding="utf-8")
    shared = (ROOT / "csrc" / "gr_port_single.h").read_text(encoding="utf-8")
    assert not re.findall(r"#include <(?!stdint|stddef|stdbool|string)", source + shared)
