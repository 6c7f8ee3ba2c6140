"""The command's own words: literal lines, their order, what --verbose adds, options by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import compiling
from gemrun.format.reader import read_artifact

FAST = ("--effort", "fast")


def test_the_lines_of_a_verbose_compile(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    output = tmp_path / "x.gembin"
    options = ("--target", "jetson-orin-nano", "--temperature-threshold", "75", "--verbose")
    done = compiling.gemmake(tiny_checkpoint("gemma3"), output, *FAST, *options)
    assert done.returncode == 0
    assert compiling.told(done.stderr) == ""
    lines = done.stdout.splitlines()
    with read_artifact(output) as artifact:
        layers, total = len(artifact.layers), artifact.header.ram_total
        heads = sum(layer.heads for layer in artifact.layers)
        assert artifact.thermal.threshold_c == 75.0
    placed = [line for line in lines if re.match(r"INFO: \[CPU\] layer \d+: ", line)]
    summary = f"INFO: [NVDLA] Offloaded 0/{layers} layers to NVDLA engine (orin-nano has none)"
    assert lines[: layers + 1] == [*placed, summary]
    sparse = f"INFO: Dynamic sparse mask generated for 0/{heads} attention heads"
    assert lines[layers + 1].startswith(sparse)
    megabytes = -(-total // 1_000_000)
    assert lines[-2] == (
        f"SUCCESS: Deterministic memory layout verified. Total footprint: {megabytes}MB"
    )
    assert any(re.fullmatch(rf"  total +\d+\.\d\d MiB, {total} bytes", line) for line in lines)
    decimal = [line for line in lines if re.search(r"\d ?MB\b(?!/s)", line)]
    assert decimal == [lines[-2]]  # the one line whose words are fixed
    assert lines[-1] == f"Next: gemcheck {output}"
    text = "\n".join(lines)
    for words in ("peak memory of the compile", "of CPU", "search", "tensors in q4h", "note: "):
        assert words in text
    table = {line.split()[0] for line in lines if line.startswith("  ")}
    assert table == {"weights", "tables", "arena", "KV", "engine", "thread", "total", "the"}


def test_a_quiet_compile_says_the_result_and_no_more(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    done = compiling.gemmake(tiny_checkpoint("llama3"), tmp_path / "x.gembin", *FAST)
    assert done.returncode == 0
    assert compiling.told(done.stderr) == ""
    assert "INFO" not in done.stdout
    assert "SUCCESS" in done.stdout


def test_the_listing_begins_with_the_declared_total(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    output = tmp_path / "x.gembin"
    assert compiling.gemmake(tiny_checkpoint("qwen3"), output, *FAST).returncode == 0
    head = Path(f"{output}.memmap").read_text().splitlines()[:5]
    with read_artifact(output) as artifact:
        header = artifact.header
    wanted = (
        header.ram_weights,
        *(header.ram_tables, header.ram_arena, header.ram_kv, header.ram_engine),
        header.ram_stacks,
    )
    assert f"{header.ram_total} bytes" in head[0]
    found = [int(n) for line in head[1:] for n in re.findall(r"(\d+) bytes", line)]
    assert found == list(wanted)
    assert sum(found) == header.ram_total


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--kv-cache-size", "0"), 2, "--kv-cache-size: 0 tokens is out of range"),
        (("--kv-cache-size", "1048577"), 2, "use 2 to 1048576 tokens"),
        (("--workers", "65"), 2, "--workers"),
        (("--target", "jetson-orin-nan"), 4, "did you mean jetson-orin-nano"),
        (("--dump-after", "pack"), 2, "no such pass; use one of fold_norms, tie,"),
        (("--config", "no-such.json"), 2, "--config no-such.json"),
    ],
)
def test_wrong_options_end_in_one_sentence(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    options: tuple[str, ...],
    code: int,
    words: str,
) -> None:
    done = compiling.gemmake(tiny_checkpoint("llama3"), tmp_path / "x.gembin", *options)
    assert done.returncode == code
    assert len(compiling.told(done.stderr).splitlines()) == 1
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_a_traceback_and_only_debug(tmp_path: Path) -> None:
    plain = compiling.gemmake("no-such", tmp_path / "x.gembin")
    assert (plain.returncode, plain.stderr.count("\n")) == (3, 1)
    debug = compiling.gemmake("no-such", tmp_path / "x.gembin", "--debug")
    assert "Traceback" in debug.stderr
    assert "CheckpointError" in debug.stderr


def test_a_context_beyond_the_trained_one_is_noted(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    options = ("--kv-cache-size", "300")
    done = compiling.gemmake(tiny_checkpoint("llama3"), tmp_path / "x.gembin", *FAST, *options)
    assert done.returncode == 0
    assert "--kv-cache-size 300 is beyond the 256 tokens" in done.stdout
