"""Temperatures of the machine: thermal zones, hwmon chips, IIO channels, files, MQTT topics.

    sensors = Sensors(root, zones=(), external=("hwmon:lm75/temp1",))
    sensors.sample(now)      every reading; call it ten times a second
    sensors.trips()          the kernel's own limits, which beat those of the HDF
    sensors.states()         what there is and what is used, for `gemctl doctor`

A zone is found by its `type`, because the kernel's numbers change from boot to boot. Where no zone
is named, the first of FAMILIES that gives a temperature is used. A reading without a value says
why. Nothing here waits: zones are files of the kernel, and whatever an operator names (a file may
lie on a dead server, a slow chip may take a second) is read in a thread of its own.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gemctl.core.throttle import STALE_S
from gemctl.errors import ApiError

LOWEST_C, HIGHEST_C = -40.0, 150.0  # outside: no temperature of a board
SOC_PERIOD_S = 0.5  # zones are read twice a second, however often `sample` is called
TRIPS_S = 2.0  # the kernel's limits are read no more often
RESCAN_S = 10.0  # between two searches for zones while none gives a temperature
MAX_EXTERNAL = 16
GAPS = 8  # times between values of an external sensor that are remembered
MAX_ZONES = 256
KNOWN_MOST = 16  # names in a sentence
MAX_BYTES = 256  # of a sensor's file
MAX_PAYLOAD = 1024  # of an MQTT message
NO_ANSWER = "no answer yet"
NO_ZONE = "no thermal zone of the processor gives a temperature"
OFF = "MQTT is off: set mqtt.host, and restart gemctld"
PAYLOAD_KEYS = ("celsius", "temp_c", "temperature", "value")
NUMBER = re.compile(r"[+-]?(\d{1,12}(\.\d{0,12})?|\.\d{1,12})([eE][+-]?\d{1,2})?", re.ASCII)
MISTYPED = re.compile(r"([-+.0-9][^/]*)?")  # a factor that is none, not the end of a file's name
ZONE_FOLDER = re.compile(r"thermal_zone(\d{1,4})", re.ASCII)

# Zone types in lower case, with "-" for "_" and without "-thermal" at the end; hwmon chips by name.
# Zones of one family are used together: the hottest counts.
FAMILIES: tuple[re.Pattern[str], ...] = (
    re.compile(r"tj"),  # Jetson: the hottest place of the chip
    re.compile(
        r"cpu.*|mtktscpu|tcpu(-pci)?|x86-pkg-temp|b0d4|bigcore\d*|littlecore\d*|cluster\d*"
        r"|soc(-?max|\d*)|package"
    ),
    re.compile(r"hwmon:(coretemp|k10temp|zenpower|cpu-thermal)"),
    re.compile(r"gpu.*"),
    re.compile(r"acpitz"),
)


@dataclass(frozen=True)
class Reading:
    """One sensor, once. Times are seconds of the caller's clock."""

    name: str  # zone type, "hwmon:CHIP", or the external sensor as it was named
    celsius: float | None  # None: unknown. A zone's nonsense is handed on, with a reason
    at_s: float  # when it was measured, as far as that is known
    external: bool
    reason: str  # why the value is missing or not to be believed; empty for a good one


@dataclass(frozen=True)
class Trips:
    """Limits that the kernel enforces, in degrees; None where it states none."""

    passive_c: float | None = None
    hot_c: float | None = None
    critical_c: float | None = None

    def over(self, other: Trips) -> Trips:
        """These limits, and the other's where these are unknown."""
        mine = (self.passive_c, self.hot_c, self.critical_c)
        theirs = (other.passive_c, other.hot_c, other.critical_c)
        return Trips(*(a if a is not None else b for a, b in zip(mine, theirs, strict=True)))


class NoValue(Exception):
    """A sensor gives no temperature now; the text says why."""


class Implausible(NoValue):
    """It gives one that no board has."""

    def __init__(self, celsius: float, hint: str) -> None:
        super().__init__(f"implausible: {celsius:.1f} C{hint}")
        self.celsius = celsius


class Source(Protocol):
    """Where an external sensor's value comes from."""

    def read(self, now: float) -> tuple[float, float]:
        """(degrees, when measured). Raises NoValue or OSError. May take long."""
        ...


def read_short(path: str | Path, limit: int = MAX_BYTES) -> str:
    """Text at the start of a small file. Never waits for a writer. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, limit).decode("ascii", "replace").strip()
    finally:
        os.close(descriptor)


def read_number(path: str | Path) -> float | None:
    """The number in a small file; None where there is none."""
    try:
        text = read_short(path)
    except OSError:
        return None
    return float(text) if NUMBER.fullmatch(text) else None


def read_word(path: str | Path) -> str:
    """A short printable word in a small file, or ''."""
    try:
        text = read_short(path)
    except OSError:
        return ""
    return text if len(text) <= 64 and text.isprintable() else ""


def folders(parent: Path, pattern: str) -> list[Path]:
    """Sub-folders by pattern, in the order of their numbers; none where the parent is missing."""

    def key(path: Path) -> tuple[list[int], str]:
        return [int(digits) for digits in re.findall(r"\d+", path.name)], path.name

    try:
        return sorted(parent.glob(pattern), key=key)[:MAX_ZONES]
    except OSError:
        return []


def _number(text: str) -> float:
    if not text:
        raise NoValue("empty")
    if not NUMBER.fullmatch(text):
        raise NoValue("not a number")
    return float(text)


def _plausible(celsius: float, hint: str = "") -> float:
    if celsius <= -200:  # what a driver reports for a zone without power
        raise NoValue("gated")
    if not LOWEST_C <= celsius <= HIGHEST_C:
        raise Implausible(celsius, hint)
    return celsius


def _failure(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "error")
    gated = error.errno in (errno.EAGAIN, errno.EINVAL, errno.ENODATA, errno.EIO)
    return f"gated: {name}" if gated else f"{name}: {error.strerror or error}"


def _milli(path: Path) -> float:
    value = _number(read_short(path))
    if value == -256:  # some drivers mean degrees here
        raise NoValue("gated")
    return _plausible(value / 1000)


# Sensors of the chip


@dataclass(frozen=True)
class _Zone:
    """A thermal zone. Its type is read each time: numbers are given anew when a driver returns."""

    name: str
    kind: str
    folder: Path

    def read(self) -> float:
        if read_word(self.folder / "type") != self.kind:
            raise NoValue("gone")
        return _milli(self.folder / "temp")

    def trips(self) -> Trips:
        found: dict[str, float] = {}
        for path in folders(self.folder, "trip_point_*_type"):
            kind = read_word(path)
            milli = read_number(path.with_name(path.name.replace("_type", "_temp")))
            # Below 40 C: thresholds that a program may set and nobody has.
            if milli is not None and 40_000 <= milli <= HIGHEST_C * 1000:
                found[kind] = min(milli / 1000, found.get(kind, HIGHEST_C))
        return Trips(found.get("passive"), found.get("hot"), found.get("critical"))


@dataclass(frozen=True)
class _Chip:
    """A processor's hwmon chip: its hottest channel."""

    name: str
    kind: str
    folder: Path

    def _channels(self) -> list[Path]:
        every = folders(self.folder, "temp*_input")[:8]
        whole = ("package", "tctl", "tdie")
        named = [
            path
            for path in every
            if read_word(path.with_name(path.name.replace("_input", "_label")))
            .lower()
            .startswith(whole)
        ]
        return named or every

    def read(self) -> float:
        if read_word(self.folder / "name") != self.kind:
            raise NoValue("gone")
        channels = self._channels()
        if not channels:
            raise NoValue("no channel")
        return max(_milli(path) for path in channels)

    def trips(self) -> Trips:
        limits = [read_number(p) for p in folders(self.folder, "temp*_crit")[:8]]
        known = [milli / 1000 for milli in limits if milli is not None]
        return Trips(critical_c=min([c for c in known if 40 <= c <= HIGHEST_C], default=None))


@dataclass(frozen=True)
class _Missing:
    """A zone that the configuration names and the machine does not have."""

    name: str
    known: tuple[str, ...]

    def read(self) -> float:
        raise NoValue(f"no thermal zone of this type; there are: {', '.join(self.known) or 'none'}")

    def trips(self) -> Trips:
        return Trips()


_Soc = _Zone | _Chip | _Missing


def family(kind: str) -> int | None:
    """Place of a zone type or of "hwmon:CHIP" in FAMILIES; None: not of the processor."""
    plain = re.sub(r"[-_]?therm(al)?(?=$|\d)", "", kind.lower()).replace("_", "-")
    for place, pattern in enumerate(FAMILIES):
        if pattern.fullmatch(plain) or pattern.fullmatch(kind.lower().replace("_", "-")):
            return place
    return None


def _named(kinds: Iterable[tuple[str, Path]]) -> list[tuple[str, str, Path]]:
    """(name, kind, folder): the second zone of a type is called TYPE.2."""
    seen: dict[str, int] = {}
    found = []
    for kind, folder in kinds:
        seen[kind] = seen.get(kind, 0) + 1
        found.append((kind if seen[kind] == 1 else f"{kind}.{seen[kind]}", kind, folder))
    return found


def _zones(root: Path) -> list[_Zone]:
    every = folders(root / "sys/class/thermal", "thermal_zone*")
    kinds = [(read_word(p / "type"), p) for p in every if ZONE_FOLDER.fullmatch(p.name)]
    return [_Zone(*parts) for parts in _named((kind, p) for kind, p in kinds if kind)]


def _chips(root: Path) -> list[_Chip]:
    every = folders(root / "sys/class/hwmon", "hwmon*")
    kinds = [(read_word(p / "name"), p) for p in every]
    known = [(kind, p) for kind, p in kinds if family(f"hwmon:{kind}") is not None]
    return [_Chip(f"hwmon:{name}", kind, p) for name, kind, p in _named(known)]


def _try(sensor: _Soc) -> tuple[float | None, str]:
    try:
        return sensor.read(), ""
    except Implausible as error:
        return error.celsius, str(error)
    except NoValue as error:
        return None, str(error)
    except OSError as error:
        return None, _failure(error)


def _choose(found: Sequence[_Zone | _Chip], kept: int | None) -> int | None:
    """The first family of which a member gives a temperature. While the one that was used before
    (`kept`) is there, none behind it takes its place: a fault of the hottest sensor would be the
    cooler one's word that all is well."""
    there = kept if kept in [_place(sensor) for sensor in found] else None
    for place in range(len(FAMILIES) if there is None else there):
        if any(not _try(sensor)[1] for sensor in found if _place(sensor) == place):
            return place
    return there


def _place(sensor: _Zone | _Chip) -> int | None:
    return family(f"hwmon:{sensor.kind}" if isinstance(sensor, _Chip) else sensor.kind)


# External sensors


class _Files:
    """hwmon:NAME/tempN and iio:NAME/CHANNEL: the hottest of the chips of that name."""

    def __init__(self, parent: Path, pattern: str, chip: str, channel: str) -> None:
        self._parent, self._pattern = parent, pattern
        self._chip, self._channel = chip, channel

    def there(self) -> bool:
        """Whether a chip of the name has the channel. Its value is not read: that may take long."""
        return (self._chip, self._channel) in self._every()

    def known(self) -> list[str]:
        """All that there are, as NAME/CHANNEL."""
        return list(dict.fromkeys(f"{chip}/{channel}" for chip, channel in self._every()))

    def _every(self) -> list[tuple[str, str]]:
        found = []
        for folder in folders(self._parent, self._pattern):
            chip, names = read_word(folder / "name"), []
            for pattern in ("temp*_input", "in_temp*_input", "in_temp*_raw"):
                names += [path.name.rpartition("_")[0] for path in folders(folder, pattern)]
            found += [(chip, name) for name in names if chip]
        return found

    def read(self, now: float) -> tuple[float, float]:
        every = folders(self._parent, self._pattern)
        chips = [folder for folder in every if read_word(folder / "name") == self._chip]
        if not chips:
            raise NoValue(f"no chip called {self._chip}")
        return max(self._value(folder) for folder in chips), now

    def _value(self, folder: Path) -> float:
        whole = folder / f"{self._channel}_input"
        if whole.exists():
            return _milli(whole)
        raw = _number(read_short(folder / f"{self._channel}_raw"))
        offset = read_number(folder / f"{self._channel}_offset") or 0.0
        scale = read_number(folder / f"{self._channel}_scale")
        return _plausible((raw + offset) * (1.0 if scale is None else scale) / 1000)


class _File:
    """file:PATH[:SCALE]. What nobody writes any more is old, whatever it says.

    The age counts from the last change that was seen here (the file's time of change, or another
    file in its place), not from a clock that may be set; only of the first read it is what the
    clock says: else every restart would make an old value new. Files of the kernel are always new.
    """

    def __init__(self, path: Path, scale: float, virtual: Path) -> None:
        self._path, self._scale = path, scale
        self._virtual = [_device(place) for place in (Path("/sys"), Path("/proc"))]
        self._fresh = any(path.is_relative_to(virtual / name) for name in ("sys", "proc"))
        self._mark: tuple[int, ...] = ()
        self._first = True  # nobody has looked yet
        self._at = 0.0
        self._celsius = 0.0

    def read(self, now: float) -> tuple[float, float]:
        first, self._first = self._first, False
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path, flags)
        except FileNotFoundError as error:
            _, colon, tail = self._path.name.partition(":")
            meant = f"; ':{tail}' is no factor, and was taken for a part of its name"
            raise NoValue(_failure(error) + (meant if colon else "")) from None
        try:
            state = os.fstat(descriptor)
            if stat.S_ISDIR(state.st_mode) or stat.S_ISBLK(state.st_mode):
                raise NoValue("no file that holds a number")
            if not stat.S_ISREG(state.st_mode):
                return self._flow(descriptor, now)
            text = os.read(descriptor, MAX_BYTES).decode("ascii", "replace").strip()
        finally:
            os.close(descriptor)
        mark = (state.st_ino, state.st_mtime_ns, state.st_size)
        kernels = self._fresh or state.st_dev in self._virtual
        if mark != self._mark or kernels:
            self._mark, self._at = mark, now
            if first and not kernels:
                self._at -= _age(state)
        return self._scaled(text), self._at

    def _flow(self, descriptor: int, now: float) -> tuple[float, float]:
        """A FIFO or device: the last whole line, if there is one right now."""
        try:
            raw = os.read(descriptor, 4096)
        except BlockingIOError:
            raw = b""
        lines = [line for line in raw.decode("ascii", "replace").split("\n") if line.strip()]
        if lines:
            self._celsius, self._at = self._scaled(lines[-1].strip()), now
            self._mark = (1,)
        if not self._mark:
            raise NoValue("a FIFO or device that gives no data at once")
        return self._celsius, self._at

    def _scaled(self, text: str) -> float:
        hint = "; is a scale missing (:0.001 for thousandths)?" if self._scale == 1 else ""
        celsius = _number(text) * self._scale
        if self._scale != 1 and celsius < LOWEST_C:  # no driver's word for a zone without power
            raise Implausible(celsius, hint)
        return _plausible(celsius, hint)


def _age(state: os.stat_result) -> float:
    """Whole seconds since a file was written, as some disks keep no more; of the future: 0."""
    return max(0.0, (time.time() - state.st_mtime) // 1)


def _device(path: Path) -> int:
    try:
        return path.stat().st_dev
    except OSError:
        return -1


class _Topic:
    """mqtt:TOPIC: whatever came last."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self._last: tuple[float | None, float, str] = (None, 0.0, "nothing received")

    def put(self, payload: bytes, at_s: float) -> None:
        try:
            self._last = (_plausible(_payload(payload)), at_s, "")
        except NoValue as error:
            self._last = (None, at_s, str(error))

    def read(self, now: float) -> tuple[float, float]:
        celsius, at_s, reason = self._last
        if celsius is None:
            raise NoValue(reason)
        return celsius, at_s


def _payload(payload: bytes) -> float:
    """A number, or a JSON object with one under a key of PAYLOAD_KEYS."""
    if len(payload) > MAX_PAYLOAD:
        raise NoValue(f"a message of more than {MAX_PAYLOAD} bytes")
    text = payload.decode("utf-8", "replace").strip()
    if not text.startswith("{"):
        return _number(text)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise NoValue("a message that is neither a number nor JSON") from None
    for key in PAYLOAD_KEYS:
        number = value.get(key)
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            return _number(repr(number))
    raise NoValue(f"a message without any of {', '.join(PAYLOAD_KEYS)}")


class _Reader:
    """Reads one source in a thread, so that one that hangs costs a thread and not the daemon."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._wanted = threading.Event()
        self._done = threading.Event()
        self._ended = False
        self._now = 0.0  # of the read under way
        self._latest: tuple[float | None, float, str] = (None, 0.0, NO_ANSWER)
        self._thread: threading.Thread | None = None

    def ask(self, now: float) -> bool:
        """Start a read; False if the last one is still under way."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sensor", daemon=True)
            self._done.set()
            self._thread.start()
        if not self._done.is_set():
            return False
        self._done.clear()
        self._now = now
        self._wanted.set()
        return True

    def answer(self, wait_s: float) -> tuple[float | None, float, str]:
        """The last value: (degrees, when, reason)."""
        if wait_s > 0:
            self._done.wait(wait_s)
        celsius, at_s, reason = self._latest
        if self._done.is_set():
            return celsius, at_s, reason
        return celsius, at_s, reason or "no answer"

    def close(self) -> None:
        """End the thread, now or when its read returns."""
        self._ended = True
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._ended:
                return
            now = self._now
            try:
                celsius, at_s = self._source.read(now)
                self._latest = (celsius, at_s, "")
            except NoValue as error:
                self._latest = (None, now, str(error))
            except OSError as error:
                self._latest = (None, now, _failure(error))
            self._done.set()


@dataclass
class _Rhythm:
    """How often a source gets a new value: the times between its newest ones."""

    at_s: float | None = None
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS))

    def see(self, at_s: float) -> None:
        """A value of this time was read."""
        if self.at_s is not None and at_s > self.at_s:
            self.gaps.append(at_s - self.at_s)
        self.at_s = at_s

    def slowest(self, now: float) -> float | None:
        """The longest of them, the one that goes on counted; None where there is none yet."""
        waiting = [] if self.at_s is None else [now - self.at_s]
        return max((*self.gaps, *waiting), default=None)


def _bad(spec: str, what: str, remedy: str) -> ApiError:
    return ApiError("bad_request", f"external sensor '{spec[:200]}': {what}; {remedy}")


def parse_source(spec: str, root: Path = Path("/")) -> Source:
    """The source of `hwmon:NAME/tempN`, `iio:NAME/CHANNEL`, `file:PATH[:SCALE]`, `mqtt:TOPIC`.

    Raises ApiError("bad_request").
    """
    scheme, colon, rest = spec.partition(":")
    if not colon or len(spec) > 512 or not spec.isprintable():
        raise _bad(spec, "not understood", "write hwmon:, iio:, file: or mqtt: before its name")
    if scheme == "hwmon":
        match = re.fullmatch(r"([A-Za-z0-9_.-]{1,64})/(temp\d{1,3})", rest, re.ASCII)
        if not match:
            raise _bad(spec, "not a chip and a channel", "write hwmon:NAME/temp1")
        return _Files(root / "sys/class/hwmon", "hwmon*", match[1], match[2])
    if scheme == "iio":
        match = re.fullmatch(r"([A-Za-z0-9_.,@-]{1,64})/(?:in_)?(\w{1,64})", rest, re.ASCII)
        if not match:
            raise _bad(spec, "not a device and a channel", "write iio:NAME/temp")
        return _Files(root / "sys/bus/iio/devices", "iio:device*", match[1], f"in_{match[2]}")
    if scheme == "file":
        return _parse_file(spec, rest, root)
    if scheme == "mqtt":
        if not rest or len(rest.encode()) > 256 or set("#+") & set(rest) or rest[0] == "$":
            raise _bad(spec, "not a topic", "name one topic without wildcards")
        return _Topic(rest)
    raise _bad(spec, f"'{scheme}:' is unknown", "use hwmon:, iio:, file: or mqtt:")


def _parse_file(spec: str, rest: str, root: Path) -> Source:
    path, colon, tail = rest.rpartition(":")
    scale = 1.0
    if colon and NUMBER.fullmatch(tail):
        scale = float(tail)
    elif colon and MISTYPED.fullmatch(tail):
        remedy = "give a factor, such as :0.001, or :1 behind a name that ends like that"
        raise _bad(spec, f"scale '{tail[:80]}' is no number", remedy)
    else:
        path = rest
    if not path.startswith("/") or ".." in Path(path).parts:
        raise _bad(spec, "not an absolute path", "write the path from / on, without ..")
    if not 1e-9 <= abs(scale) <= 1e9:
        raise _bad(spec, f"scale {tail} is out of range", "give a factor, such as :0.001")
    return _File(Path(path), scale, root)


class Sensors:
    """All temperatures. For one thread; `sample` takes about a millisecond.

    `zones`: thermal zone types to use; none named: chosen by FAMILIES. `external`: see
    `parse_source`; raises ApiError("bad_request"). `max_age_s`: an external value that is older
    counts as unknown. `wait_s`: how long `sample` may wait for answers of external sensors; what
    comes later is there at the next call. `mqtt`: whether there is a broker.
    """

    def __init__(
        self,
        root: Path = Path("/"),
        zones: Sequence[str] = (),
        external: Sequence[str] = (),
        max_age_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        wait_s: float = 0.001,
        mqtt: bool = True,
    ) -> None:
        if not 0 < max_age_s <= 86400:
            raise ApiError("bad_request", f"external_max_age_s: {max_age_s:g}; give 0.1 to 86400 s")
        self._root, self._wanted = root, tuple(zones)
        self._max_age_s, self._clock, self._wait_s = max_age_s, clock, wait_s
        self._mqtt = mqtt
        self.on_topics: Callable[[], None] = lambda: None  # other ones are to be subscribed to
        self._sources: dict[str, Source] = {}
        self._readers: dict[str, _Reader] = {}
        self._rhythms: dict[str, _Rhythm] = {}
        self._found: list[_Zone | _Chip] = []
        self._had = False  # a zone or chip was there once: without it nothing is well
        self._family: int | None = None  # the place in FAMILIES of what is used
        self._better = False  # one of a family before it is there, and gave no value
        self._used: list[_Soc] = []
        self._soc: list[Reading] = []
        self._soc_at: float | None = None
        self._scanned_at = 0.0
        self._trips: tuple[float, Trips] | None = None  # (when read, what)
        self.set_external(external)
        self.scan(clock())

    def scan(self, now: float) -> None:
        """Look for zones and chips again."""
        self._scanned_at, self._soc_at, self._trips = now, None, None
        self._found = [*_zones(self._root), *_chips(self._root)]
        self._had = self._had or bool(self._found)
        if not self._wanted:
            self._family = _choose(self._found, self._family)
            places = [(sensor, _place(sensor)) for sensor in self._found]
            known = [(sensor, place) for sensor, place in places if place is not None]
            self._used = [sensor for sensor, place in known if place == self._family]
            self._better = any(place < (self._family or 0) for _, place in known)
            return
        zones = [sensor for sensor in self._found if isinstance(sensor, _Zone)]
        kinds = tuple(sorted({zone.kind for zone in zones}))
        self._used = [zone for zone in zones if zone.kind in self._wanted]
        self._used += [_Missing(name, kinds) for name in self._wanted if name not in kinds]

    def set_external(self, specs: Sequence[str]) -> None:
        """Use these external sensors from now on. Raises ApiError and keeps the old ones."""
        if len(specs) > MAX_EXTERNAL:
            text = f"external sensors: {len(specs)}, allowed {MAX_EXTERNAL}; name fewer"
            raise ApiError("bad_request", text)
        old = self._sources
        new = {spec: old.get(spec) or parse_source(spec, self._root) for spec in specs}
        for spec in [spec for spec in self._readers if spec not in new]:
            self._readers.pop(spec).close()
        for spec, source in new.items():
            if not isinstance(source, _Topic):
                self._readers.setdefault(spec, _Reader(source))
        before, self._sources = self.topics, new
        self._rhythms = {spec: self._rhythms.get(spec, _Rhythm()) for spec in new}
        if self.topics != before:
            self.on_topics()

    def demand(self, specs: Sequence[str]) -> None:
        """Refuse chips and devices that this machine has not: nobody plugs them in while it waits.
        What somebody else writes, a file or a topic, may come later. Raises ApiError."""
        for spec in specs:
            source = self._sources.get(spec) or parse_source(spec, self._root)
            if not isinstance(source, _Files) or source.there():
                continue
            kind = spec.partition(":")[0]
            known = ", ".join(f"{kind}:{name}" for name in source.known()[:KNOWN_MOST])
            remedy = f"there are: {known}" if known else "there is none, use file: or mqtt:"
            raise _bad(spec, "this machine has no such sensor", remedy)

    def silent(self) -> list[tuple[str, str]]:
        """External sensors that have given no value yet, each with the reason."""
        now = self._clock()
        return [(r.name, r.reason) for r in self._read_external(now) if r.celsius is None]

    @property
    def any(self) -> bool:
        """Is there a zone or chip, or was there one, or was a sensor named?"""
        return bool(self.own or self._sources)

    @property
    def own(self) -> bool:
        """Has the machine a zone or chip of its own, had it one, or was one named?"""
        return bool(self._had or self._wanted)

    @property
    def topics(self) -> tuple[str, ...]:
        """MQTT topics to subscribe to."""
        return tuple(s.topic for s in self._sources.values() if isinstance(s, _Topic))

    def feed(self, topic: str, payload: bytes, age_s: float = 0.0) -> None:
        """A message has come; `age_s`: how old its value already is. Other topics are ignored."""
        at_s = self._clock() - max(0.0, age_s)
        for source in self._sources.values():
            if isinstance(source, _Topic) and source.topic == topic:
                source.put(payload, at_s)

    def sample(self, now: float) -> list[Reading]:
        """All readings. Zones are read every SOC_PERIOD_S and repeated between, with their time."""
        if self._soc_at is None or now - self._soc_at >= SOC_PERIOD_S * 0.9:
            self._read_soc(now)
        return [*self._soc, *self._read_external(now)]

    def _read_soc(self, now: float) -> None:
        self._soc = self._soc_readings(now)
        wanting = self._better or all(r.reason for r in self._soc)
        if wanting and now - self._scanned_at >= RESCAN_S:
            self.scan(now)
            self._soc = self._soc_readings(now)
        self._soc_at = now

    def _soc_readings(self, now: float) -> list[Reading]:
        if not self._used:
            return [Reading("soc", None, now, False, NO_ZONE)]
        tried = [(sensor.name, *_try(sensor)) for sensor in self._used]
        return [Reading(name, celsius, now, False, reason) for name, celsius, reason in tried]

    def _read_external(self, now: float) -> list[Reading]:
        asked = {spec for spec, reader in self._readers.items() if reader.ask(now)}
        until = time.monotonic() + self._wait_s
        readings = []
        for spec, source in self._sources.items():
            if isinstance(source, _Topic):
                celsius, at_s, reason = _value(source, now) if self._mqtt else (None, now, OFF)
            else:
                left = until - time.monotonic() if spec in asked else 0.0
                celsius, at_s, reason = self._readers[spec].answer(left)
            readings.append(self._fresh(spec, celsius, at_s, reason, now))
        return readings

    def _fresh(
        self, spec: str, celsius: float | None, at_s: float, reason: str, now: float
    ) -> Reading:
        age = now - at_s
        if celsius is None:
            return Reading(spec, None, now, True, reason)
        self._rhythms[spec].see(at_s)
        if age > self._max_age_s:
            why = f"{reason or 'old'}: {age:.1f} s, allowed {self._max_age_s:g} s"
            return Reading(spec, None, at_s, True, why)
        return Reading(spec, celsius, at_s, True, "")

    def trips(self) -> Trips:
        """The strictest limits of the processor's zones, as they are now; they beat the HDF's."""
        now = self._clock()
        if self._trips is None or now - self._trips[0] >= TRIPS_S:
            self._trips = (now, self._read_trips())
        return self._trips[1]

    def _read_trips(self) -> Trips:
        every: list[_Soc] = [*self._used, *(s for s in self._found if _place(s) in (0, 1, 2))]
        found = [sensor.trips() for sensor in dict.fromkeys(every)]

        def least(values: Iterable[float | None]) -> float | None:
            return min((value for value in values if value is not None), default=None)

        return Trips(
            least(trip.passive_c for trip in found),
            least(trip.hot_c for trip in found),
            least(trip.critical_c for trip in found),
        )

    def states(self) -> list[dict[str, object]]:
        """Every sensor as plain JSON values, read now: name, used, celsius, reason, trips; of an
        external one `every_s`, the longest of the last times between two values."""
        now = self._clock()
        every: list[_Soc] = [*self._found, *(s for s in self._used if isinstance(s, _Missing))]
        rows: list[dict[str, object]] = []
        for sensor in every:
            celsius, reason = _try(sensor)
            trips = sensor.trips()
            row = {"name": sensor.name, "external": False, "used": sensor in self._used}
            row |= {"celsius": celsius, "reason": reason, "passive_c": trips.passive_c}
            rows.append({**row, "critical_c": trips.critical_c})
        if self._had and not self._found and not self._wanted:
            gone = {"name": "soc", "external": False, "used": True, "celsius": None}
            rows.append({**gone, "reason": NO_ZONE, "passive_c": None, "critical_c": None})
        for reading in self._read_external(now):
            row = {"name": reading.name, "external": True, "used": True}
            row |= {"celsius": reading.celsius, "reason": reading.reason}
            rows.append({**row, "every_s": self._rhythms[reading.name].slowest(now)})
        return rows

    @property
    def fresh_s(self) -> float:
        """An external value that is older counts as unknown, here or in the throttle."""
        return min(self._max_age_s, STALE_S)

    def close(self) -> None:
        """End the threads."""
        for reader in self._readers.values():
            reader.close()
        self._readers, self._sources = {}, {}


def _value(source: _Topic, now: float) -> tuple[float | None, float, str]:
    try:
        celsius, at_s = source.read(now)
    except NoValue as error:
        return None, now, str(error)
    return celsius, at_s, ""
