"""Temperatures, from fake sysfs trees: which zones, which trips, external sensors, their age."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sysfs
from gemctl.board.sensors import TRIPS_S, Reading, Sensors, Trips, family, parse_source
from gemctl.errors import ApiError

WAIT_S = 10.0  # for an external sensor's thread: long, so that no test depends on speed


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock) -> Iterator[Callable[..., Sensors]]:
    """Sensors that are closed at the end."""
    made: list[Sensors] = []

    def build(tree: sysfs.Sysfs, **options: object) -> Sensors:
        sensors = Sensors(tree.root, clock=clock, wait_s=WAIT_S, **options)  # type: ignore[arg-type]
        made.append(sensors)
        return sensors

    yield build
    for sensors in made:
        sensors.close()


def values(readings: list[Reading]) -> dict[str, float | None]:
    return {reading.name: reading.celsius for reading in readings}


@pytest.mark.parametrize(
    ("board", "expected"),
    [
        (sysfs.orin_nano, {"tj-thermal": 51.2}),
        (
            sysfs.rk3588,
            {"soc-thermal": 41.0, "bigcore0-thermal": 44.5, "bigcore2-thermal": 45.0}
            | {"littlecore-thermal": 42.0},
        ),
        (sysfs.pi5, {"cpu-thermal": 55.4}),
        (sysfs.x86, {"x86_pkg_temp": 63.0}),
    ],
)
def test_zones_are_chosen_by_type(
    board: Callable[[Path], sysfs.Sysfs],
    expected: dict[str, float],
    tmp_path: Path,
    make: Callable[..., Sensors],
) -> None:
    assert values(make(board(tmp_path / "t")).sample(100.0)) == expected


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (7, 5, 3), (100, 20, 3)])
def test_the_kernels_numbers_do_not_matter(
    order: tuple[int, int, int], tmp_path: Path, make: Callable[..., Sensors]
) -> None:
    tree = sysfs.Sysfs(tmp_path / "t")
    for index, (kind, celsius) in zip(
        order, [("gpu-thermal", 90.0), ("cpu-thermal", 60.0), ("pmic", 100.0)], strict=True
    ):
        tree.zone(index, kind, celsius)
    assert values(make(tree).sample(0.0)) == {"cpu-thermal": 60.0}


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("tj-thermal", 0), ("cpu-thermal", 1), ("CPU-therm", 1), ("cpu_thermal", 1), ("cpu0-0", 1),
        ("soc-thermal", 1), ("soc0-thermal", 1), ("SOC-therm", 1), ("package-thermal", 1),
        ("cluster1-thermal", 1), ("x86_pkg_temp", 1), ("TCPU_PCI", 1), ("B0D4", 1),
        ("hwmon:k10temp", 2), ("gpu-thermal", 3), ("GPU-therm", 3), ("acpitz", 4),
        ("PMIC-Die", None), ("thermal-fan-est", None), ("iwlwifi_1", None), ("battery", None),
        ("center-thermal", None), ("INT3400 Thermal", None), ("cv0-thermal", None), ("nvme", None),
        ("", None),
    ],
)  # fmt: skip
def test_families(kind: str, place: int | None) -> None:
    assert family(kind) == place


def test_without_a_better_zone_the_chips_come_before_acpi(
    tmp_path: Path, make: Callable[..., Sensors]
) -> None:
    tree = sysfs.x86(tmp_path / "t")
    tree.remove("sys/class/thermal/thermal_zone8")
    assert values(make(tree).sample(0.0)) == {"hwmon:coretemp": 63.0}
    tree.remove("sys/class/hwmon/hwmon4")
    assert values(make(tree).sample(0.0)) == {"acpitz": 27.8}


def test_a_chip_without_a_whole_reads_its_hottest_core(
    tmp_path: Path, make: Callable[..., Sensors]
) -> None:
    tree = sysfs.Sysfs(tmp_path / "t")
    tree.hwmon(0, "coretemp", {"temp2_input": 50000, "temp3_input": 58000, "temp3_crit": 99000})
    sensors = make(tree)
    assert values(sensors.sample(0.0)) == {"hwmon:coretemp": 58.0}
    assert sensors.trips() == Trips(critical_c=99.0)


def test_named_zones_are_used_and_missing_ones_reported(
    tmp_path: Path, make: Callable[..., Sensors]
) -> None:
    tree = sysfs.rk3588(tmp_path / "t")
    sensors = make(tree, zones=("center-thermal", "tj-thermal"))
    centre, missing = sensors.sample(0.0)
    assert (centre.name, centre.celsius, centre.reason) == ("center-thermal", 70.0, "")
    assert missing.name == "tj-thermal"
    assert missing.celsius is None
    assert "bigcore0-thermal, bigcore2-thermal" in missing.reason


def test_two_zones_of_one_type_are_both_read(tmp_path: Path, make: Callable[..., Sensors]) -> None:
    tree = sysfs.Sysfs(tmp_path / "t")
    tree.zone(3, "x86_pkg_temp", 50.0)
    tree.zone(11, "x86_pkg_temp", 70.0)
    assert values(make(tree).sample(0.0)) == {"x86_pkg_temp": 50.0, "x86_pkg_temp.2": 70.0}


def test_without_any_zone_one_reading_says_so(tmp_path: Path, make: Callable[..., Sensors]) -> None:
    tree = sysfs.Sysfs(tmp_path / "t")
    tree.zone(0, "battery", 30.0)
    (reading,) = make(tree).sample(0.0)
    assert reading.celsius is None
    assert "no thermal zone" in reading.reason
    nothing = Sensors(tmp_path / "nothing")
    (reading,) = nothing.sample(0.0)
    assert reading.celsius is None
    assert not nothing.any
    assert make(tree, external=("mqtt:a",)).any


def test_trips_are_read_at_run_time(
    tmp_path: Path, make: Callable[..., Sensors], clock: Clock
) -> None:
    tree = sysfs.orin_nano(tmp_path / "t")
    sensors = make(tree)
    assert sensors.trips() == Trips(95.0, 99.0, 104.5)
    (tree.find("cpu-thermal") / "trip_point_0_temp").write_text("88000\n")
    assert sensors.trips().passive_c == 95.0
    clock.now += TRIPS_S
    assert sensors.trips().passive_c == 88.0


def test_trips_of_the_cpu_count_where_only_it_has_some(
    tmp_path: Path, make: Callable[..., Sensors]
) -> None:
    """Mainline has no trips on tj-thermal; those of a battery or of wireless are not ours."""
    tree = sysfs.Sysfs(tmp_path / "t")
    tree.zone(0, "tj-thermal", 50.0)
    tree.zone(1, "cpu-thermal", 50.0, [("passive", 95.0), ("active", 50.0)])
    tree.zone(2, "battery", 30.0, [("passive", 45.0), ("critical", 60.0)])
    assert make(tree).trips() == Trips(passive_c=95.0)


def test_trips_that_nobody_set_are_none(tmp_path: Path, make: Callable[..., Sensors]) -> None:
    assert make(sysfs.x86(tmp_path / "t")).trips() == Trips(critical_c=100.0)


def test_trips_beat_the_description() -> None:
    described = Trips(95.0, 99.0, 104.5)
    assert Trips(passive_c=85.0).over(described) == Trips(85.0, 99.0, 104.5)
    assert Trips().over(described) == described
    assert described.over(Trips(70.0, 70.0, 70.0)) == described


def test_zones_twice_a_second_external_ones_each_time(
    tmp_path: Path, make: Callable[..., Sensors]
) -> None:
    tree = sysfs.orin_nano(tmp_path / "t")
    tree.hwmon(5, "lm75", {"temp1_input": 30000})
    sensors = make(tree, external=("hwmon:lm75/temp1",))
    for tick in range(20):
        now = 100.0 + tick / 10
        tree.heat("tj-thermal", 50.0 + tick)
        tree.put("sys/class/hwmon/hwmon5/temp1_input", 30000 + tick * 1000)
        inside, outside = sensors.sample(now)
        assert outside.celsius == 30.0 + tick
        assert outside.at_s == now
        assert outside.external
        assert inside.at_s == 100.0 + tick // 5 / 2
        assert inside.celsius == 50.0 + tick // 5 * 5


def test_a_zone_whose_number_was_given_to_another_is_gone(
    tmp_path: Path, make: Callable[..., Sensors], clock: Clock
) -> None:
    tree = sysfs.orin_nano(tmp_path / "t")
    sensors = make(tree)
    tree.put("sys/class/thermal/thermal_zone10/type", "battery")
    (reading,) = sensors.sample(100.0)
    assert (reading.celsius, reading.reason) == (None, "gone")
    # Ten seconds later it is looked for again, and the processor's other zones are found.
    assert set(values(sensors.sample(111.0))) == {"cpu-thermal", "soc0-thermal"}


@pytest.mark.parametrize("text", ["", "garbage", "999999999"])
def test_a_fault_of_the_hottest_sensor_is_no_cooler_one_s_word(
    tmp_path: Path, make: Callable[..., Sensors], text: str
) -> None:
    """Nothing takes its place while it is there, however long it gives nothing; then it is back."""
    tree = sysfs.orin_nano(tmp_path / "t")
    sensors = make(tree)
    tree.put("sys/class/thermal/thermal_zone10/temp", text)
    for second in range(100, 200, 3):
        (reading,) = sensors.sample(float(second))
        assert (reading.name, bool(reading.reason)) == ("tj-thermal", True)
    tree.put("sys/class/thermal/thermal_zone10/temp", "96000")
    assert values(sensors.sample(201.0)) == {"tj-thermal": 96.0}


def test_a_better_sensor_that_gave_nothing_at_the_start(
    tmp_path: Path, make: Callable[..., Sensors]
) -> None:
    """Its driver may still have been loading; it is looked at again, and used from then on."""
    tree = sysfs.orin_nano(tmp_path / "t")
    tree.put("sys/class/thermal/thermal_zone10/temp", "")
    sensors = make(tree)
    assert "tj-thermal" not in values(sensors.sample(101.0))
    tree.put("sys/class/thermal/thermal_zone10/temp", "52000")
    assert values(sensors.sample(120.0)) == {"tj-thermal": 52.0}


def test_states_list_what_is_there(tmp_path: Path, make: Callable[..., Sensors]) -> None:
    tree = sysfs.orin_nano(tmp_path / "t")
    states = make(tree, external=("mqtt:plant/ambient",)).states()
    rows = {row["name"]: row for row in states}
    assert rows["tj-thermal"] == {
        "name": "tj-thermal", "external": False, "used": True, "celsius": 51.2, "reason": "",
        "passive_c": 95.0, "critical_c": 104.5,
    }  # fmt: skip
    assert rows["cpu-thermal"]["used"] is False
    assert rows["cv0-thermal"]["reason"] == "gated"
    assert rows["mqtt:plant/ambient"]["reason"] == "nothing received"


# External sensors


def test_hwmon_takes_the_hottest_chip_of_the_name(
    tmp_path: Path, make: Callable[..., Sensors]
) -> None:
    tree = sysfs.orin_nano(tmp_path / "t")
    tree.hwmon(4, "lm75", {"temp1_input": 31250})
    tree.hwmon(7, "lm75", {"temp1_input": 33500})
    sensors = make(tree, external=("hwmon:lm75/temp1", "hwmon:sht3x/temp1"))
    found, missing = sensors.sample(0.0)[1:]
    assert (found.name, found.celsius) == ("hwmon:lm75/temp1", 33.5)
    assert (missing.celsius, missing.reason) == (None, "no chip called sht3x")


@pytest.mark.parametrize("channel", ["temp", "in_temp"])
@pytest.mark.parametrize(
    ("files", "celsius"),
    [
        ({"in_temp_raw": 2500, "in_temp_scale": 10}, 25.0),
        ({"in_temp_raw": 500, "in_temp_offset": -100, "in_temp_scale": "62.5"}, 25.0),
        ({"in_temp_input": 25000}, 25.0),
        ({"in_temp_raw": 25000}, 25.0),
    ],
)
def test_iio(
    channel: str,
    files: dict[str, object],
    celsius: float,
    tmp_path: Path,
    make: Callable[..., Sensors],
) -> None:
    tree = sysfs.orin_nano(tmp_path / "t")
    tree.iio(2, "tmp006", files)
    sensors = make(tree, external=(f"iio:tmp006/{channel}",))
    assert sensors.sample(0.0)[1].celsius == celsius


@pytest.mark.parametrize(
    ("text", "scale", "celsius"),
    [("31.5", "", 31.5), ("31500", ":0.001", 31.5), ("-4\n", "", -4.0), ("3.15e1", ":1", 31.5)],
)
def test_files(
    text: str, scale: str, celsius: float, tmp_path: Path, make: Callable[..., Sensors]
) -> None:
    path = tmp_path / "a:b"  # a colon in the path is no scale
    path.write_text(text)
    sensors = make(sysfs.orin_nano(tmp_path / "t"), external=(f"file:{path}{scale}",))
    assert sensors.sample(0.0)[1].celsius == celsius


def test_a_file_that_nobody_writes_is_old(tmp_path: Path, make: Callable[..., Sensors]) -> None:
    path = tmp_path / "ambient"
    path.write_text("31.0")
    sensors = make(sysfs.orin_nano(tmp_path / "t"), external=(f"file:{path}",), max_age_s=5.0)
    assert sensors.sample(100.0)[1].celsius == 31.0
    assert sensors.sample(105.0)[1] == Reading(f"file:{path}", 31.0, 100.0, True, "")
    old = sensors.sample(105.1)[1]
    assert (old.celsius, old.reason) == (None, "old: 5.1 s, allowed 5 s")
    # The same text again, in another file: somebody is alive.
    (tmp_path / "next").write_text("31.0")
    (tmp_path / "next").rename(path)
    assert sensors.sample(106.0)[1].celsius == 31.0
    # A clock that was set back changes nothing.
    os.utime(path, (1, 1))
    assert sensors.sample(107.0)[1].at_s == 107.0
    assert sensors.sample(112.1)[1].celsius is None


def test_a_file_that_was_old_before_the_first_look_is_old(
    tmp_path: Path, make: Callable[..., Sensors]
) -> None:
    path = tmp_path / "ambient"
    path.write_text("31.0")
    written = time.time() - 600
    os.utime(path, (written, written))
    sensors = make(sysfs.orin_nano(tmp_path / "t"), external=(f"file:{path}",), max_age_s=5.0)
    assert sensors.sample(1000.0)[1].reason.startswith("old: 600.0 s")
    path.write_text("32.0")
    assert sensors.sample(1001.0)[1].celsius == 32.0


def test_topics_without_a_broker_say_so(tmp_path: Path, make: Callable[..., Sensors]) -> None:
    sensors = make(sysfs.orin_nano(tmp_path / "t"), external=("mqtt:a",), mqtt=False)
    assert "MQTT is off: set mqtt.host" in sensors.sample(1.0)[1].reason
    assert "MQTT is off" in str(sensors.states()[-1]["reason"])


def test_a_board_whose_zones_are_gone_had_them(
    tmp_path: Path, make: Callable[..., Sensors], clock: Clock
) -> None:
    """An external sensor does not take their place: that is for boards that never had any."""
    path = tmp_path / "ambient"
    path.write_text("31.0")
    tree = sysfs.orin_nano(tmp_path / "t")
    sensors = make(tree, external=(f"file:{path}",))
    assert sensors.own
    shutil.rmtree(tmp_path / "t")
    for now in (200.0, 220.0, 240.0):
        clock.now = now
        own = sensors.sample(now)[0]
        assert (own.celsius, own.external, bool(own.reason)) == (None, False, True)
    assert sensors.own
    assert [row["name"] for row in sensors.states() if not row["external"]] == ["soc"]


def test_files_of_the_kernel_are_never_old(tmp_path: Path, make: Callable[..., Sensors]) -> None:
    tree = sysfs.orin_nano(tmp_path / "t")
    path = tree.put("sys/class/thermal/thermal_zone5/temp", 40000)
    sensors = make(tree, external=(f"file:{path}:0.001",))
    for now in (0.0, 100.0, 10000.0):
        assert sensors.sample(now)[1].celsius == 40.0


@pytest.mark.parametrize(
    ("payload", "celsius"),
    [
        (b"31.5", 31.5), (b" 31 \n", 31.0), (b'{"celsius": 31.5, "n": 1}', 31.5),
        (b'{"temp_c": 31}', 31.0), (b'{"temperature": 3.15e1}', 31.5), (b'{"value": -4.0}', -4.0),
    ],
)  # fmt: skip
def test_topics(
    payload: bytes, celsius: float, tmp_path: Path, make: Callable[..., Sensors]
) -> None:
    sensors = make(sysfs.orin_nano(tmp_path / "t"), external=("mqtt:plant/a",))
    assert sensors.topics == ("plant/a",)
    sensors.feed("plant/b", b"99")
    assert sensors.sample(100.0)[1].celsius is None
    sensors.feed("plant/a", payload)
    assert sensors.sample(100.0)[1].celsius == celsius


def test_a_topic_has_an_age(tmp_path: Path, make: Callable[..., Sensors], clock: Clock) -> None:
    sensors = make(sysfs.orin_nano(tmp_path / "t"), external=("mqtt:a",), max_age_s=5.0)
    sensors.feed("a", b"30", age_s=2.0)
    reading = sensors.sample(100.0)[1]
    assert (reading.celsius, reading.at_s) == (30.0, 98.0)
    assert sensors.sample(103.0)[1].celsius == 30.0
    assert sensors.sample(103.1)[1].reason == "old: 5.1 s, allowed 5 s"
    clock.now = 104.0
    sensors.feed("a", b"31", age_s=-50.0)  # from a clock ahead of ours: not older than now
    assert sensors.sample(104.0)[1].at_s == 104.0
    sensors.feed("a", b"32", age_s=6.0)
    assert sensors.sample(104.0)[1].celsius is None


def rhythm(sensors: Sensors) -> float | None:
    """Of the external sensor, as doctor is told."""
    every = sensors.states()[-1]["every_s"]
    assert every is None or isinstance(every, float)
    return every


def test_how_often_a_sensor_is_written(
    tmp_path: Path, make: Callable[..., Sensors], clock: Clock
) -> None:
    """Known also while the newest value is fresh; forgotten after some good times."""
    path = tmp_path / "cabinet"
    sensors = make(sysfs.orin_nano(tmp_path / "t"), external=(f"file:{path}",))
    assert rhythm(sensors) is None  # there is no file
    for number in range(4):
        path.write_text(f"{30 + number}\n")
        os.utime(path, ns=(number, number))
        assert sensors.sample(clock.now)[1].celsius == 30.0 + number
        clock.now += 7.5
    sensors.sample(clock.now)
    assert rhythm(sensors) == 7.5
    for number in range(4, 14):
        os.utime(path, ns=(number, number))  # the same value, written again
        sensors.sample(clock.now)
        clock.now += 1.0
    assert rhythm(sensors) == 1.0
    clock.now += 30.0
    assert rhythm(sensors) == 31.0  # nobody writes any more


def test_how_often_a_topic_is_published(
    tmp_path: Path, make: Callable[..., Sensors], clock: Clock
) -> None:
    sensors = make(sysfs.orin_nano(tmp_path / "t"), external=("mqtt:a",), max_age_s=60.0)
    assert sensors.fresh_s == 5.0  # the throttle's own limit
    for _ in range(3):
        sensors.feed("a", b"30")
        sensors.sample(clock.now)
        clock.now += 6.0
    assert rhythm(sensors) == 6.0
    sensors.set_external(("mqtt:b",))
    sensors.set_external(("mqtt:a",))
    assert rhythm(sensors) is None
    assert make(sysfs.orin_nano(tmp_path / "u"), max_age_s=2.0).fresh_s == 2.0


def test_external_sensors_can_be_changed(tmp_path: Path, make: Callable[..., Sensors]) -> None:
    tree = sysfs.orin_nano(tmp_path / "t")
    tree.hwmon(5, "lm75", {"temp1_input": 30000})
    sensors = make(tree, external=("mqtt:a",))
    sensors.feed("a", b"30")
    sensors.set_external(("mqtt:a", "hwmon:lm75/temp1"))
    assert list(values(sensors.sample(100.0)).values()) == [51.2, 30.0, 30.0]
    with pytest.raises(ApiError):
        sensors.set_external(("hwmon:lm75/temp1", "nonsense"))
    assert len(sensors.sample(100.0)) == 3
    sensors.set_external(())
    assert len(sensors.sample(100.0)) == 1
    assert sensors.topics == ()


@pytest.mark.parametrize(
    "spec",
    [
        "", "lm75", "hwmon:lm75", "hwmon:lm75/in1", "hwmon:../../x/temp1", "hwmon:a/temp1/b",
        "iio:x", "iio:../x/temp", "iio:a/b/c", "file:", "file:relative", "file:/a/../b",
        "file:/a:0", "file:/a:1e12", "file:/a:0,001", "file:/a:0.o01", "file:/a:",
        "file:/a:-", "file:/a:.",
        "mqtt:", "mqtt:a/#", "mqtt:+/a", "mqtt:$SYS/x", "http://x",
        "mqtt:" + "a" * 300, "file:/a\nb", "file:/a\0b", "x" * 600, "hwmon:lm75/temp1234",
    ],
)  # fmt: skip
def test_wrong_names_are_refused_in_one_sentence(spec: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_source(spec)
    assert caught.value.code == "bad_request"
    assert caught.value.message.startswith("external sensor '")
    assert "; " in caught.value.message


def test_a_name_with_a_colon(tmp_path: Path) -> None:
    """In a folder's name as it is; in the file's own with a factor behind it."""
    for folder, name, factor in (
        ("0000:00", "temp", ""),
        ("b", "c:d", ""),
        ("b", "c:1d", ":1"),
        ("b", "c:1d", ":2"),
    ):
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("30\n")
        celsius, _ = parse_source(f"file:{path}{factor}").read(0.0)
        assert celsius == (60.0 if factor == ":2" else 30.0)


def test_limits_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ApiError, match="17, allowed 16"):
        Sensors(tmp_path, external=tuple(f"mqtt:{n}" for n in range(17)))
    for age in (0.0, -1.0, 1e6):
        with pytest.raises(ApiError, match="external_max_age_s"):
            Sensors(tmp_path, max_age_s=age)


def test_a_sample_opens_few_files(
    tmp_path: Path, make: Callable[..., Sensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a sample costs, as a count: two files a zone, none between zone times."""
    tree = sysfs.rk3588(tmp_path / "t")
    sensors = make(tree)
    opened: list[object] = []
    real = os.open

    def count(path: object, *rest: object) -> int:
        opened.append(path)
        return real(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", count)
    sensors.sample(100.0)
    assert len(opened) == 8
    sensors.sample(100.1)
    assert len(opened) == 8
