"""gemrun --doctor on fake trees of /proc, /sys and /etc, and memory that is locked.

A tree stands for a board; nothing in it reacts.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sysfs
from daemon import OPTIONS, Daemon, settled
from gemctl.board.power import online_cpus
from gemmake.check.rules import check_file
from gemrun import GemRunContext, MemoryLockWarning
from gemrun.format import sizes
from locking import limited, locks_without_limit, unprivileged
from reference import make_image

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    *("board", "bsp", "cores", "isolated", "governor", "clock", "ddr", "swap", "zram", "zswap"),
    *("memory", "memlock", "page-size", "huge-pages", "temperature"),
)
CPU = "sys/devices/system/cpu"
EMC = "sys/kernel/debug/bpmp/debug/clk/emc"
SWAPS = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority"
LIMITS = "Limit                     Soft Limit           Hard Limit           Units\n"
TEGRA = "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64"


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]) -> Path:
    """A tiny model for Orin Nano."""
    return artifact_cache(
        tiny_checkpoint("qwen3", seed=0), *OPTIONS, "--target", "jetson-orin-nano"
    )


@pytest.fixture
def tree(tmp_path: Path) -> sysfs.Sysfs:
    """An Orin Nano that is ready for work."""
    made = sysfs.orin_nano(tmp_path / "board")
    made.put("proc/device-tree/model", "NVIDIA Jetson Orin Nano Developer Kit\0")
    made.put("etc/nv_tegra_release", TEGRA)
    made.put(f"{CPU}/present", "0-5")
    made.put(f"{CPU}/isolated", "")
    for policy in (0, 4):
        made.put(f"{CPU}/cpufreq/policy{policy}/scaling_governor", "performance")
    made.put(f"{EMC}/rate", 2133000000)
    made.put(f"{EMC}/max_rate", 3199000000)
    made.put("proc/swaps", SWAPS)
    made.put("sys/module/zswap/parameters/enabled", "N")
    made.put("proc/meminfo", "MemTotal: 7511700 kB\nMemAvailable: 6000000 kB")
    made.put("proc/self/limits", limits("unlimited"))
    made.put("proc/self/status", "Name:\tgemrun\nCapEff:\t0000000000000000")
    made.put("proc/self/smaps", "0-1 r-xp 0 0 0\nSize: 4 kB\nKernelPageSize:        4 kB")
    made.put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
    return made


def limits(locked: str) -> str:
    return f"{LIMITS}Max locked memory         {locked:<20} {locked:<20} bytes\n"


def run(
    cli: Path, tree: sysfs.Sysfs, *words: str | Path, code: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in (cli, "--doctor", *words)],
        env={**os.environ, "GEMRUN_ROOT": str(tree.root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stderr == ""
    return done


def lines(
    cli: Path, tree: sysfs.Sysfs, *words: str | Path, code: int = 0
) -> dict[str, tuple[str, str]]:
    """Name -> level and text."""
    found = json.loads(run(cli, tree, "--json", *words, code=code).stdout)
    checks: list[dict[str, Any]] = found["checks"]
    assert found["bad"] == sum(one["level"] == "bad" for one in checks)
    assert found["warnings"] == sum(one["level"] == "warn" for one in checks)
    assert (found["bad"] > 0) == (code == 1)
    for one in checks:
        assert one["level"] in ("ok", "unknown", "warn", "bad")
        if one["level"] in ("warn", "bad"):
            assert "; " in one["text"], one
    return {one["name"]: (one["level"], one["text"]) for one in checks}


def test_a_board_that_is_ready(gemrun_cli: Path, tree: sysfs.Sysfs, artifact: Path) -> None:
    found = lines(gemrun_cli, tree)
    assert tuple(found) == NAMES
    assert {level for level, _ in found.values()} == {"ok"}, found
    assert found["board"][1] == "NVIDIA Jetson Orin Nano Developer Kit (nvidia,p3767-0005)"
    assert found["bsp"][1] == "L4T 36.4.3"
    assert found["ddr"][1] == "4266 MT/s now, at most 6398"
    found = lines(gemrun_cli, tree, artifact)
    assert tuple(found) == ("artifact", *NAMES, "digests")
    levels = {name: level for name, (level, _) in found.items()}
    assert set(levels.values()) == {"ok"}, found
    assert "for jetson-orin-nano" in found["artifact"][1]
    assert found["board"][1].endswith(", which the artifact was made for")
    assert re.match(r"\d+ test vectors give the stored logits, bit for bit", found["digests"][1])
    text = run(gemrun_cli, tree, artifact).stdout
    assert text.endswith(f"{len(found)} checks, 0 warnings, 0 bad\n")
    assert len(text.splitlines()) == len(found) + 1


def test_the_document_has_these_lines(gemrun_cli: Path, tree: sysfs.Sysfs, artifact: Path) -> None:
    text = (ROOT / "hdf" / "BRINGUP.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z-]+)` \|", text, re.M)
    assert rows == list(lines(gemrun_cli, tree, artifact))


def test_what_is_wrong_with_a_board(gemrun_cli: Path, tree: sysfs.Sysfs, artifact: Path) -> None:
    """Each line at its worst that is no refusal."""
    tree.online("0-3")
    tree.put(f"{CPU}/isolated", "1-3")
    tree.put(f"{CPU}/cpufreq/policy4/scaling_governor", "schedutil")
    tree.put(f"{CPU}/cpufreq/policy4/scaling_max_freq", 729600)
    tree.put(f"{EMC}/max_rate", 2133000000)
    swaps = "/dev/zram0 partition 1048576 0 5\n/dev/zram1 partition 1048576 0 5\n"
    tree.put("proc/swaps", f"{SWAPS}\n{swaps}/swapfile file 4194304 0 -2")
    tree.put("sys/module/zswap/parameters/enabled", "Y")
    tree.put("proc/self/limits", limits("65536"))
    tree.put("proc/self/smaps", "0-1 r-xp 0 0 0\nKernelPageSize:       64 kB")
    tree.put("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]")
    tree.heat("tj-thermal", 86.0)
    found = lines(gemrun_cli, tree, artifact)
    wanted = {
        "cores": ("warn", f"4 of 6 are online (0-3); echo 1 > /{CPU}/cpu4/online"),
        "governor": ("warn", f"schedutil: after a rest the first tokens come late; echo "
                             f"performance > /{CPU}/cpufreq/policy4/scaling_governor"),
        "clock": ("warn", "capped at 730 of 1344 MHz; on a Jetson choose another power mode"),
        "ddr": ("warn", "at most 4266 MT/s, and mode 25W of the artifact's board has 6398"),
        "swap": ("warn", "4096 MiB on /swapfile: a model that was paged out answers late"),
        "zram": ("warn", "2048 MiB: it takes memory and cores"),
        "zswap": ("warn", "on: what is swapped takes cores; echo N > /sys/module/zswap"),
        "memlock": ("warn", "0.1 MiB may be locked, --lock-memory wants "),
        "page-size": ("ok", "64 KiB: mappings end on these, so a run may take 780 KiB more"),
        "huge-pages": ("warn", "never: a token takes up to an eighth longer; echo madvise >"),
        "temperature": ("warn", "tj-thermal has 86.0 C before any load; mend the cooling"),
    }  # fmt: skip
    for name, (level, text) in wanted.items():
        assert (found[name][0], found[name][1][: len(text)]) == (level, text), found[name]
    assert found["isolated"][0] == "warn"
    assert "leaves 1 for the" in found["isolated"][1]
    assert found["isolated"][1].endswith("with --affinity 0xe")


def test_threads_of_the_line_are_those_that_count(
    gemrun_cli: Path, tree: sysfs.Sysfs, artifact: Path
) -> None:
    tree.online("0")
    tree.put(f"{CPU}/present", "0")
    text = lines(gemrun_cli, tree, artifact)["cores"][1]
    told = "1 is online and the artifact is planned for [2-8] threads; "
    assert re.match(f"{told}compile it with --run-threads 1", text)
    assert lines(gemrun_cli, tree, artifact, "--threads", "1")["cores"][0] == "ok"


def test_isolated_cores_name_their_mask(gemrun_cli: Path, tree: sysfs.Sysfs) -> None:
    tree.put(f"{CPU}/isolated", "4-5")
    found = lines(gemrun_cli, tree)["isolated"]
    assert found == ("ok", "cores 4-5: only --affinity 0x30 uses them")
    tree.put(f"{CPU}/online", "0-4")
    level, text = lines(gemrun_cli, tree)["isolated"]
    assert (level, text[:46]) == ("warn", "cores 4-5, and core 5 of them is off: nothing ")
    tree.put(f"{CPU}/isolated", "5")
    assert lines(gemrun_cli, tree)["isolated"][1].startswith("core 5, and core 5 of them is off")


@pytest.mark.parametrize("text", ["", "x", "3-0", "0-3,", "0-3 5", "0-99999", "-1"])
def test_lists_of_cores_that_are_none(gemrun_cli: Path, tree: sysfs.Sysfs, text: str) -> None:
    for name in ("online", "isolated"):
        tree.put(f"{CPU}/{name}", text)
    found = lines(gemrun_cli, tree)
    assert found["cores"] == ("unknown", "the system does not tell which are online")
    assert found["isolated"][0] == ("unknown" if text else "ok")


def test_another_board_names_its_target(
    gemrun_cli: Path, tree: sysfs.Sysfs, artifact: Path
) -> None:
    for names, target in (
        ("raspberrypi,5-model-b\0brcm,bcm2712\0", "raspberry-pi-5"),
        ("seeed,reterminal\0raspberrypi,4-model-b\0", "raspberry-pi-4"),
        ("acme,board\0", "FILE.toml (gemmake hdf probe drafts one)"),
    ):
        tree.put("proc/device-tree/compatible", names)
        level, text = lines(gemrun_cli, tree, artifact, code=1)["board"]
        assert level == "bad"
        assert text.endswith(f"; compile it with gemmake --target {target}")


def test_zones_without_a_temperature(gemrun_cli: Path, tmp_path: Path) -> None:
    tree = sysfs.Sysfs(tmp_path / "board")
    zone = "sys/class/thermal/thermal_zone"
    for number, text in ((0, "hot"), (1, "999999999"), (2, "")):
        tree.put(f"{zone}{number}/type", "cpu-thermal")
        tree.put(f"{zone}{number}/temp", text)
    level, told = lines(gemrun_cli, tree)["temperature"]
    assert (level, told[:50]) == ("unknown", "3 thermal zones, and none gives a temperature; gem")
    tree.put(f"{zone}3/type", "outdoors")
    tree.put(f"{zone}3/temp", "-12500")
    assert lines(gemrun_cli, tree)["temperature"] == ("ok", "outdoors has -12.5 C")


def test_what_is_bad(gemrun_cli: Path, tree: sysfs.Sysfs, artifact: Path, tmp_path: Path) -> None:
    tree.put("proc/device-tree/compatible", "raspberrypi,5-model-b\0brcm,bcm2712\0")
    tree.put("proc/meminfo", "MemTotal: 7511700 kB\nMemAvailable: 100 kB")
    tree.heat("tj-thermal", 95.5)
    found = lines(gemrun_cli, tree, artifact, code=1)
    assert found["board"][0] == found["memory"][0] == found["temperature"][0] == "bad"
    assert "the artifact was made for nvidia,p3767-0003; compile it" in found["board"][1]
    assert found["memory"][1].startswith("102400 bytes are available, the artifact takes ")
    assert "from 95 C on the system slows down; mend the cooling" in found["temperature"][1]
    assert found["digests"] == ("unknown", "not compared: memory is short")

    damaged = tmp_path / "damaged.gembin"
    image = bytearray(artifact.read_bytes())
    image[300] ^= 1
    damaged.write_bytes(image)
    for path in (damaged, tmp_path / "none", Path("/dev/zero"), tmp_path):
        found = lines(gemrun_cli, tree, path, code=1)
        assert found["artifact"][0] == "bad"
        assert str(path) in found["artifact"][1]
        assert "digests" not in found


def test_memory_names_the_control_group_whose_limit_applies(
    gemrun_cli: Path, tree: sysfs.Sysfs, artifact: Path
) -> None:
    tree.put("proc/meminfo", "MemTotal: 7511700 kB\nMemAvailable: 7000000 kB")
    tree.put("proc/self/cgroup", "0::/unit")
    tree.put("sys/fs/cgroup/unit/memory.max", 100_000)
    tree.put("sys/fs/cgroup/unit/memory.current", 20_000)
    level, told = lines(gemrun_cli, tree, artifact, code=1)["memory"]
    assert level == "bad"
    begin = "80000 bytes are available in the control group, the artifact takes "
    assert told.startswith(begin)
    takes = int(told.removeprefix(begin).split(":")[0])
    limit = sizes.group_limit(takes)
    more = f"raise its limit to {limit} (memory.max; MemoryMax= of a unit), or compile"
    assert f"are missing; {more}" in told
    tree.put("sys/fs/cgroup/unit/memory.max", 1 << 30)
    assert re.match("1024 MiB are available in the control group, the artifact", told_of(
        gemrun_cli, tree, artifact))  # fmt: skip
    tree.put("proc/meminfo", "MemTotal: 7511700 kB\nMemAvailable: 500000 kB")
    assert told_of(gemrun_cli, tree, artifact).startswith("488 MiB are available, the artifact")


def told_of(gemrun_cli: Path, tree: sysfs.Sysfs, artifact: Path) -> str:
    level, told = lines(gemrun_cli, tree, artifact)["memory"]
    assert level == "ok"
    return told


@pytest.mark.parametrize(
    ("release", "wanted", "level", "part"),
    [
        (TEGRA, "36.4.3", "ok", "L4T 36.4.3, which the artifact was made for"),
        (TEGRA, "35.4.1", "bad", "HDF version mismatch: L4T 36.4.3, and the artifact was made for "
                                 "35.4.1; flash that one"),
        (TEGRA, "", "ok", "L4T 36.4.3"),
        ("# R35 (release), REVISION: 4.1, GCID: 1", "35.4.1", "ok", "L4T 35.4.1, which"),
        ("", "35.4.1", "unknown", "it does not tell whether it is support package 35.4.1"),
        ("nonsense", "", "ok", "Debian 12"),
    ],
)  # fmt: skip
def test_board_support_package(
    release: str,
    wanted: str,
    level: str,
    part: str,
    gemrun_cli: Path,
    tree: sysfs.Sysfs,
    tmp_path: Path,
) -> None:
    tree.put("etc/nv_tegra_release", release)
    tree.put("etc/os-release", 'ID=debian\nPRETTY_NAME="Debian 12"\nVERSION_ID=12')
    path = tmp_path / "made.gembin"
    hdf = json.dumps({"bsp_version": wanted} if wanted else {}).encode()
    shape = make_image.Shape(layers=(make_image.Layer(),))
    path.write_bytes(make_image.make(shape, seed=3, hdf=hdf))
    found = lines(gemrun_cli, tree, path, code=1)  # its test vector was left empty
    assert found["digests"][0] == "bad"
    assert "a stored test vector gave another answer" in found["digests"][1]
    assert found["bsp"][0] == level
    assert part in found["bsp"][1]


@pytest.mark.parametrize(
    ("version", "level", "part"),
    [
        ("36.4.3", "ok", "L4T 36.4.3, which the artifact was made for"),
        ("35.4.1", "bad", "HDF version mismatch: L4T 36.4.3, and the artifact was made for 35.4.1"),
    ],
)
def test_the_version_that_was_compiled_for(
    version: str,
    level: str,
    part: str,
    gemrun_cli: Path,
    tree: sysfs.Sysfs,
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
) -> None:
    """From the option, through the artifact, to those who look at it."""
    words = (*OPTIONS, "--target", "jetson-orin-nano", "--bsp-version", version)
    path = artifact_cache(tiny_checkpoint("qwen3", seed=0), *words)
    found = lines(gemrun_cli, tree, path, code=int(level == "bad"))["bsp"]
    assert found[0] == level
    assert found[1].startswith(part)
    done = subprocess.run(
        [gemrun_cli, path, "--info", "--allow-foreign-board"], capture_output=True, text=True
    )
    assert f", for jetson-orin-nano, support package {version}\n" in done.stdout
    report = check_file(path)
    assert report.exit_code == 0
    told = [one.text for one in report.findings if one.rule == "bsp"]
    assert told == [
        f"Board support package: built for {version} (gemrun --doctor compares the device's)"
    ]


def test_a_system_that_tells_nothing(gemrun_cli: Path, tmp_path: Path) -> None:
    """Nothing is guessed, and nothing that is not told is a fault."""
    empty = sysfs.Sysfs(tmp_path / "empty")
    found = lines(gemrun_cli, empty)
    levels = {name: level for name, (level, _) in found.items()}
    assert set(levels) == set(NAMES)
    assert {name for name, level in levels.items() if level != "unknown"} == {
        *("board", "bsp", "zswap"),
    }


@pytest.mark.parametrize("board", [sysfs.rk3588, sysfs.pi5, sysfs.x86])
def test_other_boards(
    board: Callable[[Path], sysfs.Sysfs], gemrun_cli: Path, tmp_path: Path
) -> None:
    tree = board(tmp_path / "root")
    tree.put("sys/class/devfreq/dmc/cur_freq", 528000000)
    tree.put("sys/class/devfreq/dmc/max_freq", 2112000000)
    found = lines(gemrun_cli, tree)
    assert found["ddr"] == ("ok", "1056 MT/s now, at most 4224")
    assert found["governor"][0] == "warn"
    assert found["temperature"][0] in ("ok", "warn")
    count = len(online_cpus(tree.root))
    assert found["cores"] == ("ok", f"{count} of {count} are online")


def test_files_that_are_none(gemrun_cli: Path, tree: sysfs.Sysfs) -> None:
    """Garbage, a folder, a pipe and long lines in place of the system's files."""
    tree.put("proc/swaps", "x" * 100_000)
    tree.put("proc/self/limits", "Max locked memory")
    tree.put("proc/self/smaps", "KernelPageSize:")
    tree.put("etc/nv_tegra_release", '# R"\\\x01\xff (release)')
    tree.put(f"{CPU}/online", "99999999999999999999-1,,x")
    tree.put(f"{CPU}/cpufreq/policy0/scaling_max_freq", "18446744073709551615")
    tree.gate("tj-thermal")
    os.mkfifo(tree.root / f"{EMC}/pipe")
    (tree.root / f"{EMC}/pipe").replace(tree.root / f"{EMC}/rate")
    found = lines(gemrun_cli, tree)
    assert found["ddr"][0] == "unknown"
    assert found["memlock"][0] == found["page-size"][0] == "unknown"
    assert found["swap"] == ("ok", "none")


def test_this_machine(gemrun_cli: Path, artifact: Path) -> None:
    """Without a tree it is this one; whatever it finds, every line is told."""
    done = subprocess.run(
        [gemrun_cli, "--doctor", "--json"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode in (0, 1)
    assert tuple(one["name"] for one in json.loads(done.stdout)["checks"]) == NAMES


# ---- memory that is locked ----


NOT_LOCKED = r"warning: (\d+\.\d) of (\d+\.\d) MB are locked, RLIMIT_MEMLOCK is 0\.1 MB; raise it"


def test_a_limit_that_is_too_low_is_named(gemrun_cli: Path, artifact: Path) -> None:
    words = ("--prompt", "abc", "--max-tokens", "3", "--temperature", "0", "--ignore-eos", "--json")
    command = unprivileged(gemrun_cli, artifact, "--allow-foreign-board", *words)
    done = subprocess.run(
        [*command, "--lock-memory"], capture_output=True, text=True, check=False,
        timeout=60, preexec_fn=limited(64),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.search(NOT_LOCKED, done.stderr)
    assert found is not None, done.stderr
    assert done.stderr.startswith("gemrun: --lock-memory: ")
    result = json.loads(done.stdout)
    assert result["locked_bytes"] < 64 * 1024
    plain = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert plain.stderr == ""
    assert json.loads(plain.stdout)["tokens"] == result["tokens"]
    assert json.loads(plain.stdout)["locked_bytes"] == 0


def test_what_is_locked_is_told(gemrun_cli: Path, artifact: Path) -> None:
    with GemRunContext(artifact, ignore_memory=True) as ctx:
        stats = ctx.stats()
    wanted = stats.ram_total - stats.ram_stacks
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if limit != resource.RLIM_INFINITY and limit < wanted and not locks_without_limit():
        pytest.skip(f"{limit} bytes may be locked here, {wanted} are needed")
    words = ["--prompt", "abc", "--max-tokens", "3", "--lock-memory", "--allow-foreign-board"]
    done = subprocess.run(
        [gemrun_cli, artifact, *words, "--json"], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert wanted - 4096 < json.loads(done.stdout)["locked_bytes"] <= wanted
    done = subprocess.run([gemrun_cli, artifact, *words], capture_output=True, check=True)
    assert re.search(rb"with \d threads, \d+\.\d MB of it locked\n$", done.stderr)


PYTHON = """
import sys, warnings
from gemrun import GemRunContext, MemoryLockWarning
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    with GemRunContext(sys.argv[1], lock_memory=True, ignore_memory=True,
                       allow_foreign_board=True) as ctx:
        print(ctx.stats().locked_bytes, [one.category.__name__ for one in seen])
        print(seen[0].message if seen else "")
"""


def test_python_warns(artifact: Path) -> None:
    import sys

    assert issubclass(MemoryLockWarning, RuntimeWarning)
    done = subprocess.run(
        unprivileged(sys.executable, "-c", PYTHON, artifact), capture_output=True, text=True,
        check=False, timeout=60, preexec_fn=limited(64), cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.endswith(" ['MemoryLockWarning']")
    assert "bytes are locked, RLIMIT_MEMLOCK is 65536 bytes; raise it" in second


def test_the_daemon_s_workers(versions: tuple[Path, Path]) -> None:
    """worker.lock_memory reaches the engine; what could not be locked is in doctor."""
    with Daemon(worker={"lock_memory": True}) as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        worker = daemon.call("model.status", name="pilot")["worker"]
        warned = [one for one in daemon.call("doctor")["checks"] if one["name"] == "memlock"]
        print(worker)
        assert bool(warned) == (worker["unlocked_bytes"] > 0)
        assert worker["locked_bytes"] > 0 or warned
    with Daemon() as daemon:
        daemon.replace(versions[0], name="pilot")
        worker = daemon.call("model.status", name="pilot")["worker"]
        assert worker["locked_bytes"] == 0 < worker["unlocked_bytes"]
        assert not [one for one in daemon.call("doctor")["checks"] if one["name"] == "memlock"]
