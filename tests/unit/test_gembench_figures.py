"""gembench's figures, rendering, progress and what it asks the machine, without an engine."""

from __future__ import annotations

import ast
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemrun import bench, bench_report, machine, memory
from gemrun.context import Info, Region, Stats
from gemrun.errors import CallError, error_of
from gemrun.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
INFO = Info(
    *("probe", "llama", "generic-x86-64", "avx2", 512, 128, 32, 2, 64, 4, True, (2,), 1, "int8")
)
DEPTHS = (bench.Depth(0, 12.0), bench.Depth(32, 11.0, 99.5), bench.Depth(96, None, None, "x"))
PAGE = os.sysconf("SC_PAGE_SIZE")


def stats(**values: int) -> Stats:
    zeros: dict[str, Any] = dict.fromkeys(Stats.__annotations__, 0)
    return Stats(**{**zeros, "finish": "max_tokens", "threads": 2, "kv_size": 128, **values})


def footprint(resident: int = 1000 * PAGE, swapped: int = 0) -> memory.Footprint:
    part = memory.Part("arena", 1, 1000 * PAGE, resident, swapped)
    return memory.Footprint(2, (part,), resident, 2000 * PAGE)


def report(**changes: object) -> bench.Report:
    runs = [(378.0, 12.1), (381.2, 12.5), (381.4, 12.3)]
    base = bench.Report(
        cpu="Probe CPU",
        cores=2,
        info=INFO,
        stats=stats(),
        open_ms=12.5,
        iterations=tuple(bench.Iteration(t, s, 30.0, 11, 64) for t, s in runs),
        steps_ms=tuple(float(i) for i in range(1, 201)),
        text="hi",
        depths=DEPTHS,
        footprint=footprint(),
        energy=None,
        power_reason="no sensor",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


# ---- figures ----
def test_deviation_is_the_sample_one() -> None:
    mean, deviation = bench.mean_and_deviation([2, 4, 4, 4, 5, 5, 7, 9])
    assert mean == 5
    assert deviation == pytest.approx((32 / 7) ** 0.5)
    assert bench.mean_and_deviation([3.5]) == (3.5, 0.0)


@pytest.mark.parametrize(
    ("count", "share", "rank"), [(100, 0.99, 99), (101, 0.99, 100), (1, 0.99, 1), (4, 0.5, 2)]
)
def test_percentile_is_the_nearest_rank(count: int, share: float, rank: int) -> None:
    values = [float(i) for i in range(count, 0, -1)]
    assert bench.percentile(values, share) == rank


@pytest.mark.parametrize(
    ("asked", "context", "depths"),
    [
        (None, 1024, [0, 256, 512, 768]),
        (None, 64, [0, 16, 32, 48]),
        (None, 32, [0, 8, 16]),
        (None, 1, [0]),
        ((), 1024, []),
        ((300, 0, 300), 1024, [0, 300]),
    ],
)
def test_depths(asked: tuple[int, ...] | None, context: int, depths: list[int]) -> None:
    assert bench._plan_depths(asked, context) == depths


def test_a_depth_without_room_is_refused() -> None:
    with pytest.raises(CallError, match=r"--depths: 1009 tokens .* give at most 1008"):
        bench._plan_depths((1009,), 1024)


@pytest.mark.parametrize(
    ("asked", "room", "planned"),
    [(None, 1000, 64), (None, 63, 63), (None, 2, 2), (2, 2, 2), (1000, 1000, 1000)],
)
def test_tokens_of_an_iteration(asked: int | None, room: int, planned: int) -> None:
    assert bench._plan_tokens(asked, room, 1024) == planned


def test_more_tokens_than_there_is_room_are_refused() -> None:
    with pytest.raises(CallError, match=r"--max-tokens: 2000 tokens .* of 25 .* at most 1000"):
        bench._plan_tokens(2000, 1000, 1024)
    with pytest.raises(CallError, match="prompt: 1024 tokens leave room for 1 in a context"):
        bench._plan_tokens(None, 1, 1024)


TAIL = [(-72, 4), (-80, 8), (-90, 8)]


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [(-1, 2), (-3, 2), (-5, 2), (-7, 5), (-10, 2), (-20, 6), (-45, 6), (-70, 5), (-71, 5), *TAIL],
)
def test_exit_codes_are_those_of_gemrun(code: int, exit_code: int) -> None:
    assert bench.exit_code(error_of(code, "x: y; z")) == exit_code


def test_a_file_that_vanishes_is_a_file_error() -> None:
    assert bench.exit_code(FileNotFoundError("x")) == 6


def test_only_the_monotonic_clock() -> None:
    """Boards without a clock chip jump when they first hear the time."""
    used: set[str] = set()
    for name in ("bench", "bench_report", "cli_bench", "machine", "memory", "progress"):
        tree = ast.parse((ROOT / "gemrun" / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            assert not (isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"))
            if isinstance(node, ast.Import):
                assert not {alias.name for alias in node.names} & {"datetime", "timeit"}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used |= {node.attr} if node.value.id == "time" else set()
    assert used == {"monotonic", "monotonic_ns"}


# ---- text ----
def test_literal_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = bench_report.Lines(print, Progress(io.StringIO()))
    lines.opened("Probe CPU", INFO, stats(ram_total=2_284_000_000))
    lines.warmed_up(3)
    lines.starting(10)
    lines.iteration(1, report().iterations[0])
    lines.report(report())
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "machine: Probe CPU; kernel avx2, 2 threads"
    assert out[2].startswith("memory plan: 2284.00 MB: weights ")
    assert out[3:6] == [
        "Warmup completed (3 iterations)",
        "Running 10 iterations...",
        "Iteration 1: TTFT=378ms, Throughput=12.1 tps",
    ]
    assert out[6:8] == [
        "Average TTFT: 380.2ms ± 1.9ms",
        "Average Throughput: 12.3 tps ± 0.2 tps",
    ]
    assert out[8:13] == [
        "prefill: 11 tokens, 30.0 tps ± 0.0 tps",
        "decode: 64 tokens, per token median 100.00 ms, p99 198.00 ms, max 200.00 ms "
        "(200 measured)",
        "depth 0: 12.0 tps",
        "depth 32: 11.0 tps, filled at 99.5 tps",
        "depth 96: not measured; x",
    ]
    assert out[-1] == "power: not measured (no sensor)"


def test_energy_line() -> None:
    lines = bench_report.render(report(energy=bench.Energy(100.0, 8.0, 400), power_reason=""))
    assert lines[-1].startswith("power: 12.50 W, 0.250 J a token ")


def test_memory_that_cannot_be_read() -> None:
    text = "\n".join(bench_report.render(report(footprint=None)))
    assert "memory: not measured" in text
    assert json.loads(bench_report.as_json(report(footprint=None)))["memory"] is None


def test_json_has_every_figure() -> None:
    value = json.loads(bench_report.as_json(report()))
    assert list(value)[:3] == ["ttft_ms", "throughput_tps", "kv_cache_used"]
    assert value["ttft_ms"] == pytest.approx(380.2)
    assert value["kv_cache_used"] == 74
    assert (value["decode_ms_median"], value["decode_ms_p99"], value["decode_ms_max"]) == (
        *(100.0, 198.0),
        200.0,
    )
    assert value["memory"]["declared"] == value["memory"]["resident"] == 1000 * PAGE
    assert value["cpu"] == "Probe CPU"
    assert value["depths"][2]["decode_tps"] is None


# ---- progress ----
class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_says_what_is_left_and_goes_away() -> None:
    now = [100.0]
    stream = Terminal()
    progress = Progress(stream, lambda: now[0])
    for done in (1, 2, 3):
        now[0] += 5
        progress.update("iterations", done, 3)
    assert stream.getvalue() == (
        "\riterations: 1 of 3, about 10 s left\riterations: 2 of 3, about 5 s left "
    )
    progress.clear()
    assert stream.getvalue().endswith(f"\r{' ' * 35}\r")


def test_short_work_shows_no_progress() -> None:
    now = [0.0]
    stream = Terminal()
    progress = Progress(stream, lambda: now[0])
    for done in (1, 2, 3):
        now[0] += 0.6
        progress.update("iterations", done, 3)
    assert stream.getvalue() == ""


def test_a_log_gets_a_line_now_and_then() -> None:
    now = [0.0]
    stream = io.StringIO()
    progress = Progress(stream, lambda: now[0])
    for done in range(1, 26):
        now[0] += 1
        progress.update("iterations", done, 25)
    assert stream.getvalue() == (
        "iterations: 10 of 25, about 15 s left\niterations: 20 of 25, about 5 s left\n"
    )


# ---- machine ----
@pytest.mark.parametrize(
    ("cpuinfo", "board", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC 9B45\nmodel\t\t: 2\n", "", "AMD EPYC 9B45"),
        ("processor: 0\nHardware\t: BCM2711\n", "", "BCM2711"),
        ("processor: 0\nCPU part: 0xd42\n", "Orin Nano\0", "Orin Nano"),
    ],
)
def test_cpu_name(tmp_path: Path, cpuinfo: str, board: str, name: str) -> None:
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/cpuinfo").write_text(cpuinfo)
    (tmp_path / "proc/device-tree/model").write_text(board)
    assert machine.cpu_name(tmp_path) == name


def test_cpu_name_is_never_empty(tmp_path: Path) -> None:
    assert machine.cpu_name(tmp_path)


def zone(root: Path, number: str, name: str, energy: int) -> Path:
    folder = root / "sys/class/powercap" / f"intel-rapl:{number}"
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    (folder / "max_energy_range_uj").write_text("999999\n")
    return folder


def test_energy_adds_packages_and_survives_a_wrap(tmp_path: Path) -> None:
    first = zone(tmp_path, "0", "package-0", 900_000)
    zone(tmp_path, "0:0", "core", 5)
    second = zone(tmp_path, "1", "package-1", 100)
    meter = machine.EnergyMeter(tmp_path)
    before = meter.read()
    assert before == [900_000, 100]
    (first / "energy_uj").write_text("50000\n")
    (second / "energy_uj").write_text("250100\n")
    assert meter.joules(before, meter.read()) == pytest.approx(0.4)
    assert meter.reason == ""


def test_no_sensor(tmp_path: Path) -> None:
    meter = machine.EnergyMeter(tmp_path)
    assert meter.reason == "no sensor"
    assert meter.joules(meter.read(), meter.read()) is None


def test_a_sensor_that_only_root_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = zone(tmp_path, "0", "package-0", 1) / "energy_uj"
    read = Path.read_text

    def refuse(path: Path, **options: Any) -> str:
        if path == counter:
            raise PermissionError(13, "Permission denied")
        return read(path, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert machine.EnergyMeter(tmp_path).reason == "sensor not readable by this user"


# ---- memory ----
SMAPS = """\
7f0000000000-7f0000004000 r--p 00000000 fe:00 530 /data/model file.gembin
Size:                 16 kB
Rss:                  12 kB
Pss:                   3 kB
Swap:                  4 kB
VmFlags: rd mr mw me sd
7f0000004000-7f0000008000 rw-p 00000000 00:00 0
Rss:                  16 kB
Swap:                  0 kB
VmFlags: rd wr mr mw me ac sd
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
Rss:                   0 kB
"""


def test_smaps_entries() -> None:
    entries = memory.parse_smaps(SMAPS)
    assert [(e.end - e.start, e.rss, e.swap) for e in entries] == [
        *((16384, 12288, 4096), (16384, 16384, 0)),
        (4096, 0, 0),
    ]


def test_rss_of_entries_that_hold_regions_alone() -> None:
    entries = memory.parse_smaps(SMAPS)
    at = 0x7F0000000000
    whole = [Region("a", at, 16384), Region("b", at + 16384, 8192), Region("c", at + 24576, 8192)]
    if PAGE == 4096:
        assert memory.joint_rss(entries, whole) == 28672
        assert memory.joint_rss(entries, whole[:1]) == 12288
        assert memory.joint_rss(entries, whole[:2]) is None  # half an entry


@pytest.mark.parametrize(
    ("change", "swapped", "problem"),
    [
        (0, 0, None),
        (16, 0, None),
        (17, 0, f"{17 * PAGE} bytes above the declaration"),
        (-10, 0, None),
        (-11, 0, f"{11 * PAGE} bytes below the declaration"),
        (-11, 9 * PAGE, f"{11 * PAGE} bytes below the declaration, {9 * PAGE} bytes paged out"),
    ],
)
def test_the_promise_has_two_sides(change: int, swapped: int, problem: str | None) -> None:
    if PAGE == 4096:
        assert footprint((1000 + change) * PAGE, swapped).problem == problem
    lines = bench_report.render(report(footprint=footprint((1000 + change) * PAGE, swapped)))
    assert any("WARNING" in line for line in lines) == (problem is not None)
    assert re.search(r"memory: .* resident of .* declared for 2 threads", "\n".join(lines))
