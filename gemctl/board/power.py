"""Power of the machine, and what its processor allows: rails, clusters, who else sets clocks.

    power = Power(root, roles={"VDD_IN": "total"})
    power.sample(now)        watts per rail and in all, energy since the start
    clusters(root)           cores that share a clock, with their limits; the fastest first
    findings(root)           programs and states that work against the throttle, for `doctor`

A rail that is no total is never added to one. Where no rail is known to be the total, the total is
unknown: a sum of parts leaves out what has no sensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gemctl.board.sensors import folders, read_number, read_short, read_word

MAX_WATTS = 2000.0  # above: a counter that began anew, not a load
LONGEST_GAP_S = 10.0  # between two samples whose energy is still taken as known
PERIOD_S = 0.5  # rails are read twice a second, however often `sample` is called
TOTAL_LABELS = ("VDD_IN", "POM_5V_IN")
RPI_FLAGS = {
    0: "undervoltage",
    1: "capped",
    2: "throttled",
    3: "soft_limit",
}  # bits; +16: since boot


@dataclass(frozen=True)
class PowerReading:
    """Watts, and joules since the first sample; None: unknown. Time on the caller's clock."""

    at_s: float
    power_w: float | None  # of the whole board, or of the processor where only that is known
    energy_j: float | None  # its integral; gaps above LONGEST_GAP_S are left out
    rails: Mapping[str, float | None]


@dataclass(frozen=True)
class _Product:
    """INA3221 by its voltage and current: millivolts times milliamperes."""

    volts: Path
    amperes: Path
    counts = False

    def read(self) -> float | None:
        volts, amperes = read_number(self.volts), read_number(self.amperes)
        return None if volts is None or amperes is None else volts * amperes / 1e6


@dataclass(frozen=True)
class _Scaled:
    """A file with power in a fixed unit."""

    path: Path
    scale: float
    counts = False

    def read(self) -> float | None:
        value = read_number(self.path)
        return None if value is None else value * self.scale


@dataclass(frozen=True)
class _Counter:
    """An energy counter in microjoules that begins anew above its range. `read` gives joules."""

    path: Path
    range_j: float | None
    counts = True

    def read(self) -> float | None:
        value = read_number(self.path)
        return None if value is None else value / 1e6


_Source = _Product | _Scaled | _Counter


@dataclass
class _Rail:
    """One supply. `rank`: 0 is a total for sure; higher ones only where nothing better is there."""

    name: str
    source: _Source
    rank: int | None = None  # None: a part
    joules: float | None = None
    watts: float | None = None
    step_j: float | None = None  # since the last sample

    def take(self, seconds: float | None) -> None:
        """Read it; `seconds` since the last sample, None at the first."""
        value = self.source.read()
        if isinstance(self.source, _Counter):
            self._count(value, self.source.range_j, seconds)
            return
        before, self.step_j = self.watts, None
        self.watts = None if value is None else max(0.0, value)  # a shunt reads a little below 0
        if self.watts is not None and before is not None and seconds is not None:
            self.step_j = (self.watts + before) / 2 * seconds

    def _count(self, joules: float | None, range_j: float | None, seconds: float | None) -> None:
        before, self.joules = self.joules, joules
        self.watts = self.step_j = None
        if joules is None or before is None or not seconds:
            return
        step = joules - before
        if step < 0 and range_j is not None:
            step += range_j
        if 0 <= step <= MAX_WATTS * seconds:
            self.step_j, self.watts = step, step / seconds


def _skipped(label: str) -> bool:
    return label.upper() in ("", "NC") or label.lower().startswith("sum")


def _ina3221(folder: Path) -> Iterable[_Rail]:
    """The hwmon driver: three channels; what is above them are shunts and their sum."""
    for channel in (1, 2, 3):
        label = read_word(folder / f"in{channel}_label")
        if not _skipped(label) and read_number(folder / f"in{channel}_enable") != 0:
            yield _Rail(
                label,
                _Product(folder / f"in{channel}_input", folder / f"curr{channel}_input"),
            )


def _ina3221x(root: Path) -> Iterable[_Rail]:
    """The driver of JetPack 4: an IIO device, milliwatts."""
    for folder in folders(root / "sys/bus/i2c/drivers/ina3221x", "*/iio:device*"):
        for channel in (0, 1, 2):
            label = read_word(folder / f"rail_name_{channel}")
            if not _skipped(label):
                yield _Rail(label, _Scaled(folder / f"in_power{channel}_input", 1e-3))


def _hwmon(root: Path) -> Iterable[_Rail]:
    for folder in folders(root / "sys/class/hwmon", "hwmon*"):
        chip = read_word(folder / "name")
        if chip == "ina3221":
            yield from _ina3221(folder)
            continue
        files = {path.name.split("_")[0]: path for path in folders(folder, "power*_average")}
        files |= {path.name.split("_")[0]: path for path in folders(folder, "power*_input")}
        for channel, path in sorted(files.items()):
            label = read_word(folder / f"{channel}_label") or channel
            if chip and not _skipped(label):
                rank = 1 if chip == "power_meter" else None  # ACPI's meter: the whole machine
                yield _Rail(f"{chip}:{label}", _Scaled(path, 1e-6), rank)


def _rapl(root: Path) -> Iterable[_Rail]:
    """Counters of x86. The package's parts are inside it; the memory is beside it."""
    for folder in folders(root / "sys/class/powercap", "intel-rapl:*"):
        name = read_word(folder / "name")
        depth = folder.name.count(":")
        most = read_number(folder / "max_energy_range_uj")
        beside = depth == 1 or name == "dram"
        rank = (2 if name == "psys" else 3) if beside else None
        if name:
            counter = _Counter(folder / "energy_uj", None if most is None else most / 1e6)
            number = "" if depth == 1 else f"-{folder.name.split(':')[1]}"
            yield _Rail(f"rapl:{name}{number}", counter, rank)


class Power:
    """All supplies. For one thread. A rail over I2C takes about a millisecond.

    `roles`: what an HDF says of a label ("total" or "part"); without it VDD_IN and POM_5V_IN are
    totals, then ACPI's power meter, then the x86 counters: of the platform, or else of packages
    and memory together.
    """

    def __init__(self, root: Path = Path("/"), roles: Mapping[str, str] | None = None) -> None:
        self._rails = _unique([*_hwmon(root), *_ina3221x(root), *_rapl(root)])
        for rail in self._rails:
            role = (roles or {}).get(rail.name)
            if role is not None:
                rail.rank = 0 if role == "total" else None
            elif rail.name in TOTAL_LABELS:
                rail.rank = 0
        self._at_s: float | None = None
        self._last: PowerReading | None = None
        self._energy_j: float | None = None

    def sample(self, now: float) -> PowerReading:
        """All rails, read every PERIOD_S. Counters give no power at the first sample."""
        seconds = None if self._at_s is None else now - self._at_s
        if self._last is not None and seconds is not None and seconds < PERIOD_S * 0.9:
            return self._last
        for rail in self._rails:
            rail.take(seconds)
        self._at_s = now
        totals = self._totals()
        if seconds is not None and seconds <= LONGEST_GAP_S:
            self._add(totals)
        rails = {rail.name: rail.watts for rail in self._rails}
        self._last = PowerReading(now, _sum(r.watts for r in totals), self._energy_j, rails)
        return self._last

    def _totals(self) -> list[_Rail]:
        """Rails that make up the total: of the best rank that is known."""
        for rank in (0, 1, 2, 3):
            members = [rail for rail in self._rails if rail.rank == rank]
            if members and all(rail.watts is not None for rail in members):
                return members
        return []

    def _add(self, totals: Iterable[_Rail]) -> None:
        step = _sum(rail.step_j for rail in totals)
        if step is not None:
            self._energy_j = (self._energy_j or 0.0) + step

    def states(self) -> list[dict[str, object]]:
        """Every rail as plain JSON values, from the last sample."""
        used = {rail.name for rail in self._totals()}
        return [
            {"name": rail.name, "power_w": rail.watts, "total": rail.name in used}
            for rail in self._rails
        ]


def _sum(values: Iterable[float | None]) -> float | None:
    """The sum; None if there is nothing to add or something is unknown."""
    total, any_ = 0.0, False
    for value in values:
        if value is None:
            return None
        total, any_ = total + value, True
    return total if any_ else None


def _unique(rails: Iterable[_Rail]) -> list[_Rail]:
    """The second rail of a name is called NAME.2."""
    seen: dict[str, int] = {}
    found = []
    for rail in rails:
        seen[rail.name] = seen.get(rail.name, 0) + 1
        if seen[rail.name] > 1:
            rail.name = f"{rail.name}.{seen[rail.name]}"
        found.append(rail)
    return found


# The processor


@dataclass(frozen=True)
class Cluster:
    """Cores that share a clock; frequencies in kHz, None: unknown."""

    name: str  # "policy0", or "cpu0" where there is no cpufreq
    cores: tuple[int, ...]  # online ones, by the kernel's numbers
    capacity: int | None  # 1024: the fastest core of the machine
    hw_min_khz: int | None
    hw_max_khz: int | None
    min_khz: int | None  # what is allowed now
    max_khz: int | None
    now_khz: int | None
    governor: str


def parse_cpus(text: str) -> tuple[int, ...]:
    """Numbers of a kernel list such as "0-3,6"; () if it is none."""
    cores: list[int] = []
    for part in re.split(r"[,\s]+", text.strip()):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part, re.ASCII)
        if not match:
            return ()
        cores += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(sorted(set(cores)))


def online_cpus(root: Path = Path("/")) -> tuple[int, ...]:
    """Cores that run; low power modes take some away. () where the kernel does not say."""
    return _cpus(root / "sys/devices/system/cpu/online")


def _cpus(path: Path) -> tuple[int, ...]:
    try:
        return parse_cpus(read_short(path, 4096))
    except OSError:
        return ()


def _whole(path: Path) -> int | None:
    value = read_number(path)
    return None if value is None else int(value)


def clusters(root: Path = Path("/")) -> tuple[Cluster, ...]:
    """Clusters with a core online, the fastest first.

    Policies of one core each (x86) count as one cluster where capacity and limits are alike.
    """
    cpu = root / "sys/devices/system/cpu"
    online = set(online_cpus(root))
    policies = [_policy(cpu, folder) for folder in folders(cpu / "cpufreq", "policy*")]
    found = [policy for policy in policies if policy.cores]
    if not found:
        found = [
            _alone(cpu, cores)
            for cores in _by(online, lambda c: _whole(cpu / f"cpu{c}/cpu_capacity"))
        ]
    return tuple(sorted(_merged(found, root), key=_slowness))


def _slowness(cluster: Cluster) -> tuple[int, int, int]:
    return -(cluster.capacity or 0), -(cluster.hw_max_khz or 0), cluster.cores[0]


def _by(cores: Iterable[int], key: Callable[[int], int | None]) -> list[tuple[int, ...]]:
    groups: dict[int | None, list[int]] = {}
    for core in sorted(cores):
        groups.setdefault(key(core), []).append(core)
    return [tuple(members) for members in groups.values()]


def _policy(cpu: Path, folder: Path) -> Cluster:
    cores = _cpus(folder / "affected_cpus")
    return Cluster(
        name=folder.name,
        cores=cores,
        capacity=_whole(cpu / f"cpu{cores[0]}/cpu_capacity") if cores else None,
        hw_min_khz=_whole(folder / "cpuinfo_min_freq"),
        hw_max_khz=_whole(folder / "cpuinfo_max_freq"),
        min_khz=_whole(folder / "scaling_min_freq"),
        max_khz=_whole(folder / "scaling_max_freq"),
        now_khz=_whole(folder / "scaling_cur_freq"),
        governor=read_word(folder / "scaling_governor"),
    )


def _alone(cpu: Path, cores: tuple[int, ...]) -> Cluster:
    capacity = _whole(cpu / f"cpu{cores[0]}/cpu_capacity")
    return Cluster(f"cpu{cores[0]}", cores, capacity, None, None, None, None, None, "")


def _merged(found: list[Cluster], root: Path) -> list[Cluster]:
    """Policies of single cores joined by kind; hybrid processors list their small cores apart."""
    small = set(_cpus(root / "sys/devices/cpu_atom/cpus"))
    kept = [cluster for cluster in found if len(cluster.cores) > 1]
    groups: dict[object, list[Cluster]] = {}
    for cluster in found:
        if len(cluster.cores) == 1:
            kind = (cluster.capacity, cluster.hw_min_khz, cluster.cores[0] in small)
            groups.setdefault(kind, []).append(cluster)
    for members in groups.values():
        first = members[0]
        cores = tuple(sorted(core for member in members for core in member.cores))
        kept.append(
            Cluster(
                name=first.name,
                cores=cores,
                capacity=first.capacity,
                hw_min_khz=first.hw_min_khz,
                hw_max_khz=_most(member.hw_max_khz for member in members),
                min_khz=first.min_khz,
                max_khz=_most(member.max_khz for member in members),
                now_khz=_most(member.now_khz for member in members),
                governor=first.governor,
            )
        )
    return kept


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


# What works against the throttle


@dataclass(frozen=True)
class Finding:
    """Something that `doctor` warns of. `sentence`: `<object>: <what is wrong>; <what to do>`."""

    name: str
    sentence: str


@dataclass(frozen=True)
class Supply:
    """What the Raspberry Pi's firmware says of its supply; `*_seen`: since the boot."""

    undervoltage: bool
    capped: bool
    throttled: bool
    soft_limit: bool
    undervoltage_seen: bool
    capped_seen: bool
    throttled_seen: bool
    soft_limit_seen: bool


_RIVALS = {  # the kernel keeps 15 characters of a program's name
    "thermald": "it caps clocks by its own rules; stop it with systemctl disable --now thermald",
    "tuned": "it sets a clock profile; choose one that sets none, or stop it",
    "power-profiles-": "it sets clock limits; leave it on 'balanced'",
    "tlp": "it sets clock limits; take CPU_SCALING_* out of its configuration",
    "auto-cpufreq": "it sets clock limits; stop it",
}
_FULL_NAMES = {"power-profiles-": "power-profiles-daemon"}


def supply(root: Path = Path("/")) -> Supply | None:
    """The Raspberry Pi's flags; None on other machines or where they cannot be read."""
    try:
        text = read_short(root / "sys/devices/platform/soc/soc:firmware/get_throttled")
    except OSError:
        return None
    if not re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text):
        return None
    bits = int(text, 16)
    now = {name: bool(bits >> bit & 1) for bit, name in RPI_FLAGS.items()}
    seen = {f"{name}_seen": bool(bits >> (bit + 16) & 1) for bit, name in RPI_FLAGS.items()}
    return Supply(**now, **seen)


def running(root: Path = Path("/")) -> frozenset[str]:
    """Names of the programs that run, as the kernel keeps them."""
    return frozenset(read_word(path / "comm") for path in (root / "proc").glob("[0-9]*"))


def findings(root: Path = Path("/")) -> list[Finding]:
    """Everything found, the supply first."""
    found = [*_supply_findings(root), *_pinned(root)]
    names = running(root)
    for name, sentence in _RIVALS.items():
        if name in names:
            full = _FULL_NAMES.get(name, name)
            found.append(Finding(full, f"{full}: it runs beside gemctl, and {sentence}"))
    return found


def _supply_findings(root: Path) -> Iterable[Finding]:
    flags = supply(root)
    alarms = [
        folder
        for folder in folders(root / "sys/class/hwmon", "hwmon*")
        if read_word(folder / "name") == "rpi_volt"
    ]
    low = any(read_number(folder / "in0_lcrit_alarm") == 1 for folder in alarms)
    if low or (flags is not None and flags.undervoltage):
        text = "the supply's voltage is too low now; use a stronger supply or a shorter cable"
        yield Finding("undervoltage", f"undervoltage: {text}")
    elif flags is not None and flags.undervoltage_seen:
        text = "the supply's voltage was too low since the boot; use a stronger supply"
        yield Finding("undervoltage", f"undervoltage: {text}")
    if flags is not None and (flags.throttled or flags.soft_limit or flags.capped):
        text = "the firmware holds the clock down now; cool the board or mend its supply"
        yield Finding("firmware", f"firmware: {text}")


def _pinned(root: Path) -> Iterable[Finding]:
    """Clocks whose lower limit is their upper one: jetson_clocks, or the like."""
    known = [
        c for c in clusters(root) if c.min_khz and c.hw_max_khz and c.hw_min_khz != c.hw_max_khz
    ]
    pinned = [c for c in known if c.min_khz == c.max_khz and c.max_khz != c.hw_min_khz]
    if not known or len(pinned) < len(known):
        return
    try:
        tegra = "nvidia,tegra" in read_short(root / "proc/device-tree/compatible", 1024)
    except OSError:
        tegra = False
    name = "jetson_clocks" if tegra else "clocks"
    remedy = "run 'jetson_clocks --restore'" if tegra else "lower scaling_min_freq"
    most = max(cluster.max_khz or 0 for cluster in pinned) / 1000
    text = f"{name}: they are pinned to {most:.0f} MHz and frequency caps do nothing; {remedy}"
    yield Finding(name, text)
