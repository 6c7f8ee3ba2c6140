"""gemmake hdf probe: drafts from fake trees of /sys and /proc, and the reading loop."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import sysfs
from gemmake import hdf, hdf_probe
from gemmake._helper import ffi, lib
from gemmake.errors import TargetError

A76 = "fp asimd evtstrm aes fphp asimdhp cpuid asimddp"


def fill(tree: sysfs.Sysfs, kib: int, features: str = A76, word: str = "Features") -> None:
    tree.put("proc/meminfo", f"MemTotal:       {kib} kB\nMemFree:   1 kB")
    tree.put("proc/cpuinfo", f"processor\t: 0\n{word}\t: {features}\n")


def cache(tree: sysfs.Sysfs, core: int, index: int, level: str, size: str, shared: str) -> None:
    folder = f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
    number, kind = level[0], level[1:]
    for name, value in (("level", number), ("type", kind), ("size", size)):
        tree.put(f"{folder}/{name}", value)
    tree.put(f"{folder}/shared_cpu_list", shared)
    tree.put(f"{folder}/coherency_line_size", 64)


def drafted(tree: sysfs.Sysfs, tmp_path: Path, machine: str = "aarch64") -> hdf.Hdf:
    text = hdf_probe.draft(tree.root, machine, "probed", None, lambda _size, _threads: 41.26)
    path = tmp_path / "draft.toml"
    path.write_text(text, encoding="utf-8")
    board = hdf.load_hdf(path)
    assert board.unsourced() == ()
    assert board.default_mode is not None
    assert board.default_mode.mem_peak_gbps == 41.3
    return board


def test_orin_nano(tmp_path: Path) -> None:
    tree = sysfs.orin_nano(tmp_path / "root")
    fill(tree, 7336 * 1024)
    for core in range(6):
        cache(tree, core, 0, "1Data", "64K", str(core))
        cache(tree, core, 1, "1Instruction", "64K", str(core))
        cache(tree, core, 2, "2Unified", "256K", str(core))
        cache(tree, core, 3, "3Unified", "2048K", "0-3" if core < 4 else "4-5")
    board = drafted(tree, tmp_path)
    assert board.compatible == ("nvidia,p3767-0005", "nvidia,tegra234")
    assert (board.target.baseline_features, board.target.features) == (
        ("neon",),
        ("dotprod", "fp16"),
    )
    assert [cluster.cores for cluster in board.cpu.cluster] == [(0, 1, 2, 3), (4, 5)]
    shipped = hdf.load_hdf("jetson-orin-nano").cpu.cluster
    for found, known in zip(board.cpu.cluster, shipped, strict=True):
        for name in ("l1d_kib", "l1i_kib", "l2_kib", "l2_shared_by", "l3_kib", "l3_shared_by"):
            assert getattr(found, name) == getattr(known, name)
    assert board.cpu.cluster[0].max_freq_mhz == 1510.4
    assert board.memory is not None
    assert (board.memory.visible_mib, board.memory.size_mib) == (7336, 8192)
    assert board.thermal is not None
    assert (board.thermal.hw_passive_c, board.thermal.hw_critical_c) == (95.0, 104.5)
    assert "tj-thermal" in board.thermal.zones
    assert board.unverified() == ("memory.size_mib",)


def test_rk3588_has_little_cores(tmp_path: Path) -> None:
    tree = sysfs.rk3588(tmp_path / "root")
    fill(tree, 8_000_000)
    board = drafted(tree, tmp_path)
    assert [(c.cores, c.kind) for c in board.cpu.cluster] == [
        ((0, 1, 2, 3), "little"),
        ((4, 5), "big"),
        ((6, 7), "big"),
    ]


def test_x86_joins_cores_with_a_policy_each(tmp_path: Path) -> None:
    tree = sysfs.x86(tmp_path / "root")
    fill(tree, 8_000_000, "fpu sse2 sse4_2 avx2 fma f16c avx_vnni", "flags")
    board = drafted(tree, tmp_path, "x86_64")
    assert [(c.cores, c.kind) for c in board.cpu.cluster] == [
        ((0, 1), "big"),
        ((2, 3, 4, 5), "little"),
    ]
    assert board.target.features == ("sse4.2", "avx2", "fma", "f16c", "avxvnni")


@pytest.mark.parametrize(
    ("isa", "features"),
    [
        ("rv64imafdcv_zicbom_zba_zbb_zbc_zbs_zvfh", ("v", "zvfh", "zba", "zbb", "zbc", "zbs")),
        ("rv64imafdc_zba_zbb", ("zba", "zbb")),
    ],
)
def test_riscv(tmp_path: Path, isa: str, features: tuple[str, ...]) -> None:
    tree = sysfs.Sysfs(tmp_path / "root")
    fill(tree, 4_000_000, isa, "isa")
    assert drafted(tree, tmp_path, "riscv64").target.features == features


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    text = hdf_probe.draft(tmp_path, "x86_64", "probed", None, None)
    (tmp_path / "draft.toml").write_text(text)
    board = hdf.load_hdf(tmp_path / "draft.toml")
    assert (board.memory, board.thermal, board.power_mode) == (None, None, ())
    assert board.budget_bytes() == 0


def test_what_was_not_told_is_said(tmp_path: Path) -> None:
    text = hdf_probe.draft(tmp_path, "x86_64", "probed", None, None)
    assert text.splitlines()[1] == (
        "# The machine does not tell: cores (one is assumed), clocks, caches, instruction sets, "
        "memory, trips, bandwidth."
    )
    (tmp_path / "draft.toml").write_text(text)
    assert hdf.load_hdf(tmp_path / "draft.toml").unverified() == ("cpu.cluster",)
    tree = sysfs.orin_nano(tmp_path / "root")
    fill(tree, 7336 * 1024)
    cache(tree, 0, 0, "1Data", "64K", "0")
    whole = hdf_probe.draft(tree.root, "aarch64", "probed", None, lambda _size, _threads: 41.0)
    assert "does not tell" not in whole


READ = ("proc/meminfo", "proc/cpuinfo", "proc/device-tree/compatible")
CPU = "sys/devices/system/cpu"


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    for name in (*READ, f"{CPU}/online", f"{CPU}/cpu0/cpu_capacity"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "a pipe":
            os.mkfifo(path)
        elif kind == "a device":
            path.symlink_to("/dev/zero")
        else:
            path.mkdir()
    text = hdf_probe.draft(tmp_path, "aarch64", "probed", None, None)
    assert "does not tell: cores (one is assumed), clocks, caches, instruction sets, memory" in text


def test_a_root_that_is_no_folder_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, told in (("pipe", "is a pipe, not a folder"), ("none", "no such folder")):
        with pytest.raises(TargetError, match=f"--root .*{name}: {told}; name the one that sys"):
            hdf_probe.draft(tmp_path / name, "x86_64", "probed", None, None)


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    tree = sysfs.rk3588(tmp_path / "root")
    tree.put("proc/meminfo", "MemTotal: many kB")
    tree.put("proc/device-tree/compatible", 'a"b\0\n\0ok,board\0')
    tree.put("sys/class/thermal/thermal_zone0/type", "\x01\x02")
    tree.put("sys/class/thermal/thermal_zone1/trip_point_0_temp", 10**15)
    tree.put("sys/devices/system/cpu/online", "0-999999")
    cache(tree, 0, 0, "1Data", "huge", "0")
    board = drafted(tree, tmp_path)
    assert board.memory is None
    assert "ok,board" in board.compatible
    assert sum(len(c.cores or ()) for c in board.cpu.cluster) <= hdf_probe.CORES_MOST


def test_contradictions_and_wrong_words_are_refused(tmp_path: Path) -> None:
    tree = sysfs.pi5(tmp_path / "root")
    for core in range(4):
        cache(tree, core, 2, "2Unified", "512K", str(core))
        cache(tree, core, 3, "3Unified", "256K", "0-3")
    with pytest.raises(TargetError, match="l3_kib 256 is smaller than l2_kib 512"):
        hdf_probe.draft(tree.root, "aarch64", "probed", None, None)
    with pytest.raises(TargetError, match="no engine for this machine"):
        hdf_probe.draft(tmp_path, "mips", "probed", None, None)
    with pytest.raises(TargetError, match="probed: id: "):
        hdf_probe.draft(tmp_path, "x86_64", "No Name", None, None)
    with pytest.raises(TargetError, match="over half of 1024 MiB; use 256"):
        hdf_probe.draft(tmp_path, "x86_64", "probed", 1000, None)


def test_the_loop_reads_every_word() -> None:
    words = np.random.default_rng(5).integers(0, 1 << 63, 8 + 32 * 64, dtype=np.uint64)
    skip = -words.ctypes.data % 64 // 8
    part = words[skip : skip + 32 * 64]
    total = ffi.new("uint64_t *")
    data = ffi.cast("uint8_t *", part.ctypes.data)
    assert lib.gm_read_lines(data, part.nbytes, total) == 0
    assert total[0] == int(part.sum(dtype=np.uint64))
    assert lib.gm_read_lines(data, 0, total) == 0
    assert total[0] == 0
    assert lib.gm_read_lines(data, 255, total) == lib.gm_read_lines(data + 8, 256, total) == -1
    assert lib.gm_read_lines(ffi.NULL, 256, total) == -1


def test_bandwidth_is_plausible() -> None:
    threads = len(os.sched_getaffinity(0))
    assert 0.05 < hdf_probe.bandwidth(8 << 20, min(threads, 4), 3) < 5000.0
