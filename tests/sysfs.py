"""Fake trees of /sys and /proc, for tests: no board, only files that look like one's.

    tree = sysfs.orin_nano(tmp_path)      also rk3588, pi5, x86
    tree.heat("tj-thermal", 71.5)         set a zone's temperature
    Sensors(tree.root)

Files hold what the kernel's own would; nothing reacts to writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path


class Sysfs:
    """A tree below `root`, filled by its methods."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("class/thermal", "class/hwmon", "devices/system/cpu"):
            (root / "sys" / folder).mkdir(parents=True)
        (root / "proc").mkdir()

    def put(self, place: str, value: object) -> Path:
        """Write a file of the tree."""
        path = self.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n", encoding="utf-8")
        return path

    def get(self, place: str) -> str:
        """A file's text."""
        return (self.root / place).read_text("utf-8").strip()

    # Temperatures

    def zone(
        self,
        index: int,
        kind: str,
        celsius: float,
        trips: Sequence[tuple[str, float]] = (),
    ) -> Path:
        """A thermal zone; trips are (kind, degrees)."""
        folder = f"sys/class/thermal/thermal_zone{index}"
        self.put(f"{folder}/type", kind)
        for number, (name, at) in enumerate(trips):
            self.put(f"{folder}/trip_point_{number}_type", name)
            self.put(f"{folder}/trip_point_{number}_temp", round(at * 1000))
        return self.put(f"{folder}/temp", round(celsius * 1000)).parent

    def find(self, kind: str) -> Path:
        """Folder of the first zone of a type."""
        every = sorted((self.root / "sys/class/thermal").glob("thermal_zone*"))
        return next(path for path in every if (path / "type").read_text().strip() == kind)

    def heat(self, kind: str, celsius: float) -> None:
        """Set a zone's temperature."""
        (self.find(kind) / "temp").write_text(f"{round(celsius * 1000)}\n")

    def gate(self, kind: str) -> None:
        """Take a zone's power: reading it fails from now on."""
        path = self.find(kind) / "temp"
        path.unlink()
        path.mkdir()  # EISDIR, as near as a plain tree gets to the kernel's errors

    def cooling(self, index: int, kind: str, state: int) -> None:
        """A cooling device; `state` above 0: the kernel throttles."""
        self.put(f"sys/class/thermal/cooling_device{index}/type", kind)
        self.put(f"sys/class/thermal/cooling_device{index}/cur_state", state)

    def hwmon(self, index: int, name: str, files: Mapping[str, object]) -> Path:
        """A hwmon chip."""
        return self._device(f"sys/class/hwmon/hwmon{index}", name, files)

    def iio(self, index: int, name: str, files: Mapping[str, object]) -> Path:
        """An IIO device."""
        return self._device(f"sys/bus/iio/devices/iio:device{index}", name, files)

    def _device(self, folder: str, name: str, files: Mapping[str, object]) -> Path:
        for file, value in files.items():
            self.put(f"{folder}/{file}", value)
        return self.put(f"{folder}/name", name).parent

    # Power

    def ina3221(self, index: int, rails: Sequence[tuple[str, int, int]]) -> Path:
        """Channels as (label, millivolts, milliamperes), and the sum that the driver adds."""
        files: dict[str, object] = {"in7_label": "sum of shunt voltages", "in7_input": 5}
        files["curr4_input"] = 9999
        for number, (label, volts, amperes) in enumerate(rails, 1):
            files[f"in{number}_label"] = label
            files[f"in{number}_input"] = volts
            files[f"curr{number}_input"] = amperes
        return self.hwmon(index, "ina3221", files)

    def rapl(self, place: str, name: str, joules: float, range_j: float = 262143.0) -> None:
        """An energy counter such as "0" or "0:1"."""
        folder = f"sys/class/powercap/intel-rapl:{place}"
        self.put(f"{folder}/name", name)
        self.put(f"{folder}/energy_uj", round(joules * 1e6))
        self.put(f"{folder}/max_energy_range_uj", round(range_j * 1e6))

    # The processor

    def policy(
        self,
        number: int,
        cores: str,
        low_khz: int,
        high_khz: int,
        limit_khz: int | None = None,
        capacity: int | None = None,
    ) -> str:
        """A cpufreq policy; returns its folder's place in the tree."""
        folder = f"sys/devices/system/cpu/cpufreq/policy{number}"
        values = {
            "affected_cpus": cores, "related_cpus": cores, "scaling_governor": "schedutil",
            "cpuinfo_min_freq": low_khz, "cpuinfo_max_freq": high_khz,
            "scaling_min_freq": low_khz, "scaling_max_freq": limit_khz or high_khz,
            "scaling_cur_freq": low_khz,
        }  # fmt: skip
        for name, value in values.items():
            self.put(f"{folder}/{name}", value)
        if capacity is not None:
            for core in cores.split():
                self.put(f"sys/devices/system/cpu/cpu{core}/cpu_capacity", capacity)
        return folder

    def online(self, cores: str) -> None:
        """The list of running cores, such as "0-5"."""
        self.put("sys/devices/system/cpu/online", cores)

    def gpu(self, steps: Sequence[int], limit: int | None = None) -> str:
        """Jetson's GPU, in hertz; returns its folder's place in the tree."""
        folder = "sys/devices/platform/17000000.gpu/devfreq_dev"
        self.put(f"{folder}/available_frequencies", " ".join(map(str, steps)))
        self.put(f"{folder}/min_freq", min(steps))
        self.put(f"{folder}/max_freq", limit or max(steps))
        return folder

    def process(self, number: int, name: str) -> None:
        """A running program."""
        self.put(f"proc/{number}/comm", name[:15])

    def remove(self, place: str) -> None:
        """Take a file or folder away."""
        path = self.root / place
        shutil.rmtree(path) if path.is_dir() else path.unlink()


ORIN_TRIPS = (("passive", 95.0), ("hot", 99.0), ("critical", 104.5), ("active", 50.0))


def orin_nano(root: Path) -> Sysfs:
    """Jetson Orin Nano under JetPack 6."""
    tree = Sysfs(root)
    tree.zone(0, "cpu-thermal", 50.1, ORIN_TRIPS)
    tree.zone(1, "gpu-thermal", 48.0)
    tree.zone(2, "cv0-thermal", 0.0)
    tree.put("sys/class/thermal/thermal_zone2/temp", -256000)  # without power
    tree.zone(5, "soc0-thermal", 49.5)
    tree.zone(10, "tj-thermal", 51.2, ORIN_TRIPS)
    tree.ina3221(1, [("VDD_IN", 5000, 1960), ("VDD_CPU_GPU_CV", 5000, 600), ("VDD_SOC", 5000, 300)])
    tree.policy(0, "0 1 2 3", 115200, 1510400, capacity=1024)
    tree.policy(4, "4 5", 115200, 1510400, capacity=1024)
    tree.online("0-5")
    tree.gpu([306000000, 408000000, 510000000, 612000000, 624750000])
    tree.put("proc/device-tree/compatible", "nvidia,p3767-0005\0nvidia,tegra234\0")
    modes = "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=7W >"
    tree.put("etc/nvpmodel.conf", modes)
    return tree


def rk3588(root: Path) -> Sysfs:
    """A board with RK3588 and a mainline kernel."""
    tree = Sysfs(root)
    trips = (("passive", 85.0), ("critical", 115.0))
    for index, (kind, celsius) in enumerate(
        [("soc-thermal", 41.0), ("bigcore0-thermal", 44.5), ("bigcore2-thermal", 45.0),
         ("littlecore-thermal", 42.0), ("center-thermal", 70.0), ("npu-thermal", 80.0)]
    ):  # fmt: skip
        tree.zone(index, kind, celsius, trips)
    tree.policy(0, "0 1 2 3", 408000, 1800000, capacity=530)
    tree.policy(4, "4 5", 408000, 2256000, capacity=1024)
    tree.policy(6, "6 7", 408000, 2304000, capacity=1024)
    tree.online("0-7")
    return tree


def pi5(root: Path) -> Sysfs:
    """Raspberry Pi 5."""
    tree = Sysfs(root)
    tree.zone(0, "cpu-thermal", 55.4, [("critical", 110.0), ("active", 50.0)])
    tree.hwmon(0, "cpu_thermal", {"temp1_input": 55400})
    tree.hwmon(1, "rpi_volt", {"in0_lcrit_alarm": 0})
    tree.put("sys/devices/platform/soc/soc:firmware/get_throttled", "0")
    tree.policy(0, "0 1 2 3", 1500000, 2400000)
    tree.online("0-3")
    return tree


def x86(root: Path) -> Sysfs:
    """A laptop with large and small cores, its own policy for each."""
    tree = Sysfs(root)
    tree.zone(0, "INT3400 Thermal", 20.0)
    tree.zone(3, "acpitz", 27.8, [("critical", 119.0)])
    tree.zone(8, "x86_pkg_temp", 63.0, [("passive", 0.0), ("passive", -274.0)])
    tree.zone(9, "iwlwifi_1", 58.0)
    tree.hwmon(
        4,
        "coretemp",
        {
            "temp1_label": "Package id 0", "temp1_input": 63000, "temp1_crit": 100000,
            "temp2_label": "Core 0", "temp2_input": 61000, "temp2_crit": 100000,
        },
    )  # fmt: skip
    tree.rapl("0", "package-0", 1000.0)
    tree.rapl("0:0", "core", 600.0)
    for core in range(6):
        tree.policy(core, str(core), 400000, 4700000 if core < 2 else 3500000)
    tree.put("sys/devices/cpu_core/cpus", "0-1")
    tree.put("sys/devices/cpu_atom/cpus", "2-5")
    tree.online("0-5")
    return tree
