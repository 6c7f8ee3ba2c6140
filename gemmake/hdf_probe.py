"""A draft of a hardware description from the running machine: gemmake hdf probe.

Reads /sys and /proc below `root` without rights of root, and measures the memory's bandwidth by
plain reading. What the machine does not tell is left out; a draft passes all checks.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gemmake.errors import TargetError
from gemmake.files import FOLDER, open_regular, standing
from gemmake.hdf import FEATURES, Hdf, first_problem, show

READ_MOST = 1 << 16  # bytes of a file of /sys or /proc
CORES_MOST = 4096
LITTLE = 0.8  # of the fastest clock; slower cores are little ones
ARCH = {
    "aarch64": "aarch64",
    "x86_64": "x86_64",
    "riscv64": "riscv64",
    "armv7l": "arm",
    "armv8l": "arm",
}
FLAGS = {  # the kernel's word -> LLVM's, where they differ
    "asimd": "neon", "asimddp": "dotprod", "asimdhp": "fp16", "vfpv4": "vfp4", "sse4_2": "sse4.2",
    "avx_vnni": "avxvnni", "avx512_vnni": "avx512vnni", "amx_int8": "amx-int8",
}  # fmt: skip
ALWAYS = {"aarch64": "neon", "x86_64": "sse2"}
Tables = dict[str, Any]
Measure = Callable[[int, int], float]  # (bytes, threads) -> GB/s


def draft(root: Path, machine: str, name: str, mib: int | None, measure: Measure | None) -> str:
    """The description as TOML. Raises TargetError where the machine's files make none."""
    arch = ARCH.get(machine)
    if arch is None:
        raise TargetError(f"{machine}: no engine for this machine; known: {', '.join(ARCH)}")
    if (found := standing(root)) != FOLDER:
        what = f"is {found}, not a folder" if found else "no such folder"
        raise TargetError(f"--root {show(root)}: {what}; name the one that sys and proc lie in")
    tables: Tables = {"hdf_version": "1.0", "id": name, "board": name}
    tables["compatible"] = _compatible(root)
    tables["target"] = _target(root, arch)
    tables["cpu"] = {"cluster": clusters(root)}
    tables["memory"] = _memory(root)
    tables["thermal"] = _thermal(root)
    cores = sum(len(c["cores"]) for c in tables["cpu"]["cluster"])
    mib = _read_mib(tables, mib)
    if measure is not None:
        gbps = round(measure(mib << 20, max(1, min(cores, 64))), 1)
        tables["power_mode"] = [
            {"id": "probed", "cores_online": cores, "mem_peak_gbps": gbps, "default": True}
        ]
    tables = {key: value for key, value in tables.items() if value}
    tables["source"] = list(_sources(tables, mib, bool(_online(root))))
    try:
        Hdf.model_validate_json(json.dumps(tables))
    except ValidationError as error:
        problem, _ = first_problem(error, tables)
        raise TargetError(f"probed: {problem}; correct it, or write the file by hand") from None
    return _toml(tables, list(_untold(root, tables)))


def _untold(root: Path, tables: Tables) -> Iterator[str]:
    """What the machine does not tell, in words."""
    if not _online(root):
        yield "cores (one is assumed)"
    parts = [("max_freq_mhz", "clocks"), ("l1d_kib", "caches")]
    for key, word in parts:
        if not any(key in cluster for cluster in tables["cpu"]["cluster"]):
            yield word
    if "features" not in tables["target"]:
        yield "instruction sets"
    for table, word in (("memory", "memory"), ("thermal", "trips"), ("power_mode", "bandwidth")):
        if table not in tables:
            yield word


def _read_mib(tables: Tables, wanted: int | None) -> int:
    """How much is read: twice the last cache, at least 256 MiB, at most a quarter of the memory."""
    visible = tables["memory"].get("visible_mib", 1024)
    if wanted is not None and wanted > visible // 2:
        raise TargetError(f"--mib {wanted}: over half of {visible} MiB; use {visible // 4}")
    last = [one.get("l3_kib", one.get("l2_kib", 0)) for one in tables["cpu"]["cluster"]]
    return wanted or max(1, min(max(256, sum(last) // 512), visible // 4))


def _text(path: Path) -> str:
    """The beginning of a file; nothing of what is no file, or cannot be read."""
    try:
        with os.fdopen(open_regular(path), "rb") as stream:
            return stream.read(READ_MOST).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _whole(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?[0-9]{1,12}", text) else None


def _cores(text: str) -> list[int]:
    """0-3,6 or "0 1 2 3" as numbers."""
    found: set[int] = set()
    for low, high in re.findall(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text):
        found.update(range(int(low), min(int(high or low), CORES_MOST) + 1))
    return sorted(core for core in found if core < CORES_MOST)


def _compatible(root: Path) -> list[str]:
    names = _text(root / "proc/device-tree/compatible").split("\0")
    return [name for name in names if re.fullmatch(r"[\x21-\x7e]{1,200}", name)]


def _target(root: Path, arch: str) -> Tables:
    rows = re.findall(r"(?m)^(Features|flags|isa)\s*:\s*(.*)$", _text(root / "proc/cpuinfo"))
    words = set(re.split(r"[\s_]+" if arch == "riscv64" else r"\s+", rows[0][1])) if rows else set()
    if arch == "riscv64" and any(re.fullmatch(r"rv64[a-z]*v[a-z]*", word) for word in words):
        words.add("v")
    have = {FLAGS.get(word, word) for word in words} | {ALWAYS.get(arch, "")}
    features = [feature for feature in FEATURES[arch] if feature in have]
    always = [feature for feature in features if feature == ALWAYS.get(arch)]
    found: Tables = {"arch": arch, "baseline_features": always}
    found["features"] = [feature for feature in features if feature not in always]
    return {key: value for key, value in found.items() if value}


def _online(root: Path) -> list[int]:
    return _cores(_text(root / "sys/devices/system/cpu/online"))


def clusters(root: Path) -> list[Tables]:
    """Cores with the same clock, capacity, caches and frequency policy, in the order of numbers."""
    cpu = root / "sys/devices/system/cpu"
    online = _online(root) or [0]
    policy = _policies(cpu)
    groups: dict[str, Tables] = {}
    for core in online:
        facts = _caches(cpu / f"cpu{core}/cache")
        number, clock = policy.get(core, (-1, None))
        if clock:
            facts["max_freq_mhz"] = round(clock / 1000, 1)
        capacity = _whole(cpu / f"cpu{core}/cpu_capacity")
        key = json.dumps([facts, capacity, number])
        groups.setdefault(key, {"capacity": capacity, "cores": [], **facts})["cores"].append(core)
    return [_cluster(n, group, list(groups.values())) for n, group in enumerate(groups.values())]


def _cluster(number: int, group: Tables, every: list[Tables]) -> Tables:
    speed = "capacity" if all(one["capacity"] for one in every) else "max_freq_mhz"
    speeds = [one.get(speed) or 0 for one in every]
    little = [value < LITTLE * max(speeds) for value in speeds]
    made: Tables = {"id": f"c{number}", "cores": group["cores"]}
    if any(little):
        made["kind"] = "little" if little[number] else "big"
    return {
        **made,
        **{key: value for key, value in group.items() if key not in ("capacity", "cores")},
    }


def _policies(cpu: Path) -> dict[int, tuple[int, int | None]]:
    """Core -> (its policy's number, highest clock in kHz); -1 where each core has its own."""
    found: dict[int, tuple[int, int | None]] = {}
    for folder in sorted((cpu / "cpufreq").glob("policy*")):
        cores = _cores(_text(folder / "related_cpus") or _text(folder / "affected_cpus"))
        own = min(cores) if len(cores) > 1 else -1
        for core in cores:
            found[core] = (own, _whole(folder / "cpuinfo_max_freq"))
    return found


def _caches(folder: Path) -> Tables:
    found: Tables = {}
    for index in sorted(folder.glob("index*")):
        level, kind = _text(index / "level"), _text(index / "type")
        size = re.fullmatch(r"([0-9]{1,9})K", _text(index / "size"))
        name = {"1Data": "l1d", "1Instruction": "l1i", "2Unified": "l2", "3Unified": "l3"}.get(
            level + kind
        )
        if name is None or size is None or int(size[1]) == 0:
            continue
        found[f"{name}_kib"] = int(size[1])
        sharers = len(_cores(_text(index / "shared_cpu_list")))
        if name in ("l2", "l3") and sharers:
            found[f"{name}_shared_by"] = sharers
        if line := _whole(index / "coherency_line_size"):
            found["line_bytes"] = line
    return found


def _memory(root: Path) -> Tables:
    match = re.search(r"(?m)^MemTotal:\s+([0-9]{1,15}) kB", _text(root / "proc/meminfo"))
    visible = int(match[1]) // 1024 if match else 0
    if visible == 0:
        return {}
    step = 1024 if visible > 1024 else 64
    return {"size_mib": -(-visible // step) * step, "visible_mib": visible}


def _thermal(root: Path) -> Tables:
    zones: list[str] = []
    trips: dict[str, list[float]] = {"passive": [], "critical": []}
    for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        kind = _text(zone / "type")
        if not re.fullmatch(r"[\x20-\x7e]{1,64}", kind):
            continue
        zones.append(kind)
        for trip in zone.glob("trip_point_*_type"):
            at = _whole(zone / trip.name.replace("_type", "_temp"))
            if (word := _text(trip)) in trips and at is not None and 0 < at <= 150_000:
                trips[word].append(at / 1000)
    if not trips["passive"] or not trips["critical"]:
        return {}
    low, high = min(trips["passive"]), min(trips["critical"])
    return {"zones": sorted(set(zones)), "hw_passive_c": low, "hw_critical_c": max(low, high)}


def _sources(tables: Mapping[str, Any], mib: int, online: bool) -> Iterator[Tables]:
    counted = ("/sys/devices/system/cpu", "measured", True)
    refs = {
        "cpu.cluster": counted if online else ("no cores were told", "assumption", False),
        "memory.size_mib": ("visible_mib rounded up", "assumption", False),
        "memory.visible_mib": ("MemTotal of /proc/meminfo", "measured", True),
        "thermal": ("trips of /sys/class/thermal", "measured", True),
        "power_mode": (f"reading {mib} MiB on all cores: less than the peak", "measured", True),
    }
    for field, (ref, kind, sure) in refs.items():
        if field.split(".")[0] in tables:
            yield {"field": field, "ref": ref, "kind": kind, "verified": sure}


def _toml(tables: Tables, untold: list[str]) -> str:
    lines = ["# Draft of gemmake hdf probe. Give it the board's name, and add what is known."]
    lines += [f"# The machine does not tell: {', '.join(untold)}."] if untold else []
    lines += [f"{key} = {_value(value)}" for key, value in tables.items() if not _is_table(value)]
    for key, value in tables.items():
        heads = [(f"[{key}]", value)] if isinstance(value, dict) else []
        if key == "cpu":
            heads = [("[[cpu.cluster]]", cluster) for cluster in value["cluster"]]
        elif _is_table(value) and isinstance(value, list):
            heads = [(f"[[{key}]]", entry) for entry in value]
        for head, entry in heads:
            lines += ["", head, *(f"{name} = {_value(inner)}" for name, inner in entry.items())]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and isinstance(value[0], dict))


def _value(value: Any) -> str:
    return json.dumps(value)  # texts are ASCII without control characters, as the readers see to


def bandwidth(size: int, threads: int, passes: int = 9) -> float:
    """GB/s of plain reading: the median of the passes; a pass takes as long as its slowest thread.

    Each thread reads its own part, all of it in every pass, by the loop of benchmarks/stream.c.
    """
    import numpy as np

    from gemmake._helper import ffi, lib

    each = size // threads // 256 * 256
    data = np.empty(each * threads + 64, dtype=np.uint8)
    for at in range(0, data.size, 1 << 20):  # different pages, none the system's page of zeros
        data[at : at + (1 << 20)] = (at >> 20) % 251 + 1
    start = data.ctypes.data + -data.ctypes.data % 64
    barrier = threading.Barrier(threads)
    seconds: list[float] = []

    def work(number: int) -> None:
        part, total = ffi.cast("uint8_t *", start + number * each), ffi.new("uint64_t *")
        for _ in range(passes):
            barrier.wait()
            begun = time.perf_counter()
            lib.gm_read_lines(part, each, total)
            barrier.wait()
            if number == 0:
                seconds.append(time.perf_counter() - begun)

    helpers = [threading.Thread(target=work, args=(n,)) for n in range(1, threads)]
    for helper in helpers:
        helper.start()
    work(0)
    for helper in helpers:
        helper.join()
    return each * threads / statistics.median(seconds) * 1e-9


def machine() -> str:
    """This machine's name as uname prints it."""
    return os.uname().machine
