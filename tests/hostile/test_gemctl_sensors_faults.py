"""Sensors that lie, hang, vanish or flood. Fake sysfs trees, real FIFOs and threads."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import sysfs
from gemctl.board import sensors as module
from gemctl.board.sensors import Sensors, parse_source
from gemctl.errors import ApiError

WAIT_S = 10.0


@pytest.fixture
def tree(tmp_path: Path) -> sysfs.Sysfs:
    return sysfs.orin_nano(tmp_path / "t")


@pytest.fixture
def opened(tree: sysfs.Sysfs, tmp_path: Path) -> Iterator[Sensors]:
    """Sensors with one external file, tmp_path/ambient."""
    sensors = Sensors(tree.root, external=(f"file:{tmp_path / 'ambient'}",), wait_s=WAIT_S)
    yield sensors
    sensors.close()


BAD_TEXTS = [
    b"", b"\n", b"hot", b"nan", b"inf", b"-inf", b"1_000", b"0x10", b"12 13", b"12,5", b"\0\0\0",
    "٣٥".encode(), b"1e999", b"\xff\xfe", b"9" * 400, b"-", b".", b"+-3", b"5e", b"1" * 13,
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_a_zone_without_a_number_is_unknown(text: bytes, tree: sysfs.Sysfs) -> None:
    (tree.find("tj-thermal") / "temp").write_bytes(text)
    sensors = Sensors(tree.root, zones=("tj-thermal",))
    (reading,) = sensors.sample(0.0)
    assert reading.celsius is None
    assert reading.reason in ("empty", "not a number")


@pytest.mark.parametrize("milli", [-256000, -256, -274000, -200000])
def test_a_gated_zone_is_unknown(milli: int, tree: sysfs.Sysfs) -> None:
    (tree.find("tj-thermal") / "temp").write_text(f"{milli}\n")
    (reading,) = Sensors(tree.root, zones=("tj-thermal",)).sample(0.0)
    assert (reading.celsius, reading.reason) == (None, "gated")


@pytest.mark.parametrize("celsius", [-41.0, -100.0, 150.1, 300.0, 99999.0])
def test_nonsense_is_handed_on_with_a_reason(celsius: float, tree: sysfs.Sysfs) -> None:
    """The throttle has to see it: a sensor that tells nonsense is a fault, not a zone at rest."""
    sensors = Sensors(tree.root)
    tree.heat("tj-thermal", celsius)
    (reading,) = sensors.sample(0.0)
    assert reading.celsius == celsius
    assert reading.reason == f"implausible: {celsius:.1f} C"


def test_nonsense_at_the_start_chooses_another_zone(tree: sysfs.Sysfs) -> None:
    tree.heat("tj-thermal", 999.0)
    names = {reading.name for reading in Sensors(tree.root).sample(0.0)}
    assert names == {"cpu-thermal", "soc0-thermal"}


def test_errors_of_a_zone(tree: sysfs.Sysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    sensors = Sensors(tree.root)
    tree.gate("tj-thermal")
    (reading,) = sensors.sample(0.0)
    assert (reading.celsius, reading.reason) == (None, "EISDIR: Is a directory")
    tree.remove("sys/class/thermal/thermal_zone10/temp")
    (reading,) = sensors.sample(1.0)
    assert reading.reason.startswith("ENOENT")
    # A FIFO that somebody holds open without writing gives EAGAIN, as a gated zone does.
    fifo = tree.find("tj-thermal") / "temp"
    os.mkfifo(fifo)
    holder = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    try:
        (reading,) = sensors.sample(2.0)
        assert (reading.celsius, reading.reason) == (None, "gated: EAGAIN")
    finally:
        os.close(holder)


def test_a_tree_that_vanishes_and_returns(tree: sysfs.Sysfs) -> None:
    sensors = Sensors(tree.root, clock=lambda: 0.0)
    tree.remove("sys/class/thermal")
    assert sensors.sample(0.0)[0].celsius is None
    assert sensors.sample(20.0)[0].celsius is None
    tree.zone(3, "cpu-thermal", 61.0)
    assert sensors.sample(25.0)[0].celsius is None  # it is looked for every ten seconds
    assert sensors.sample(31.0)[0].celsius == 61.0


@pytest.mark.parametrize("kind", ["\x1b[31mcpu", "a" * 100, "", "cpu\nthermal", "\0", "ä"])
def test_strange_types_are_left_out(kind: str, tmp_path: Path) -> None:
    tree = sysfs.Sysfs(tmp_path / "t")
    tree.zone(0, kind, 99.0)
    tree.zone(1, "cpu-thermal", 50.0)
    sensors = Sensors(tree.root)
    assert [reading.celsius for reading in sensors.sample(0.0)] == [50.0]
    assert all(str(row["name"]).isprintable() for row in sensors.states())


def test_thousands_of_zones(tmp_path: Path) -> None:
    tree = sysfs.Sysfs(tmp_path / "t")
    for index in range(600):
        tree.zone(index, "battery", 20.0)
    assert len(Sensors(tree.root).states()) <= module.MAX_ZONES


# External sensors


@pytest.mark.parametrize("text", BAD_TEXTS)
def test_a_file_without_a_number(text: bytes, opened: Sensors, tmp_path: Path) -> None:
    (tmp_path / "ambient").write_bytes(text)
    assert opened.sample(0.0)[1].celsius is None


def test_a_scale_that_is_missing_is_named(opened: Sensors, tmp_path: Path) -> None:
    (tmp_path / "ambient").write_text("31500")
    reading = opened.sample(0.0)[1]
    assert reading.celsius is None
    assert "is a scale missing (:0.001 for thousandths)?" in reading.reason


def test_a_huge_file_is_not_read_whole(opened: Sensors, tmp_path: Path) -> None:
    with (tmp_path / "ambient").open("wb") as stream:
        stream.truncate(1 << 40)  # a terabyte of nothing
    assert opened.sample(0.0)[1].reason == "not a number"


def test_what_is_no_file(opened: Sensors, tmp_path: Path) -> None:
    path = tmp_path / "ambient"
    assert opened.sample(0.0)[1].reason.startswith("ENOENT")
    path.mkdir()
    assert opened.sample(1.0)[1].reason == "no file that holds a number"
    path.rmdir()
    path.symlink_to("ambient")  # a loop
    assert opened.sample(2.0)[1].reason.startswith("ELOOP")
    path.unlink()
    path.symlink_to("/dev/zero")
    assert opened.sample(3.0)[1].celsius is None
    path.unlink()
    path.write_text("30")
    assert opened.sample(4.0)[1].celsius == 30.0


def test_a_fifo_gives_its_last_line_or_nothing(opened: Sensors, tmp_path: Path) -> None:
    path = tmp_path / "ambient"
    os.mkfifo(path)
    assert "gives no data at once" in opened.sample(0.0)[1].reason
    holder = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        assert "gives no data at once" in opened.sample(1.0)[1].reason
        os.write(holder, b"30.5\n31.5\n32.5\n")
        assert opened.sample(2.0)[1].celsius == 32.5
        assert opened.sample(7.0)[1].celsius == 32.5  # nothing new yet
        assert opened.sample(7.1)[1].celsius is None
        os.write(holder, b"33\n")
        assert opened.sample(8.0)[1].celsius == 33.0
    finally:
        os.close(holder)


class Hanging:
    """A source whose read waits, as one on a dead server does."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.reads = 0

    def read(self, now: float) -> tuple[float, float]:
        self.reads += 1
        self.free.wait()
        return 40.0, now


def test_a_sensor_that_hangs_stops_nobody(
    tree: sysfs.Sysfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = Hanging()
    monkeypatch.setattr(module, "parse_source", lambda spec, root: hanging)
    sensors = Sensors(tree.root, external=("file:/dead/server",), max_age_s=5.0, wait_s=0.001)
    threads = threading.active_count()
    for tick in range(300):
        inside, outside = sensors.sample(tick / 10)
        assert inside.celsius == 51.2
        assert outside.celsius is None
        assert "no answer" in outside.reason
    deadline = time.monotonic() + 30
    while not hanging.reads and time.monotonic() < deadline:  # its thread may not have run yet
        time.sleep(0.001)
    assert hanging.reads == 1, "a second read was started while the first one hung"
    assert threading.active_count() == threads + 1
    reader = sensors._readers["file:/dead/server"]
    assert reader.ask(30.0) is False, "the next sample would wait for it"
    hanging.free.set()
    assert reader._done.wait(WAIT_S)
    late = sensors.sample(30.0)[1]  # the late answer is as old as its question; a new one is asked
    assert late.celsius in (None, 40.0)
    assert reader._done.wait(WAIT_S)
    assert sensors.sample(30.1)[1].celsius == 40.0
    sensors.close()


def test_topics_need_no_thread(tree: sysfs.Sysfs) -> None:
    before = threading.active_count()
    sensors = Sensors(tree.root, external=("mqtt:a", "mqtt:b"))
    sensors.sample(0.0)
    assert threading.active_count() == before
    sensors.close()


def test_closing_ends_the_threads(tree: sysfs.Sysfs, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    names = tuple(f"file:{tmp_path}/{n}" for n in range(8))
    sensors = Sensors(tree.root, external=names, wait_s=WAIT_S)
    sensors.sample(0.0)
    started = set(threading.enumerate()) - before
    assert len(started) == 8
    sensors.close()
    for thread in started:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_nothing_stays_open(tree: sysfs.Sysfs, tmp_path: Path) -> None:
    path = tmp_path / "ambient"
    sensors = Sensors(tree.root, external=(f"file:{path}", "hwmon:x/temp1"), wait_s=WAIT_S)
    sensors.sample(0.0)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for tick in range(50):
        path.write_text(str(tick)) if tick % 3 else path.unlink(missing_ok=True)
        sensors.sample(float(tick))
        sensors.states()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    sensors.close()


MQTT = Sensors(Path("/nonexistent"), external=("mqtt:a",))


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.one_of(st.binary(max_size=64), st.text(max_size=64).map(lambda text: text.encode())))
@example(b"{" * 1000)
@example(b'{"celsius":' + b"[" * 900)
@example(b'{"celsius": true}')
@example(b'{"celsius": NaN}')
@example(b'{"celsius": 1e400}')
@example(b'{"celsius": "31"}')
@example(b'{"value": 999999999999999999999999}')
@example(b"9" * 1025)
@example(b"\xf0\x9f\x94\xa5")
def test_no_payload_gives_an_impossible_value(payload: bytes) -> None:
    MQTT.feed("a", b"20")
    MQTT.feed("a", payload)
    reading = MQTT.sample(MQTT._clock())[1]
    if reading.celsius is None:
        assert reading.reason
    else:
        assert -40.0 <= reading.celsius <= 150.0


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(
        st.text(max_size=80),
        st.builds(
            "{}:{}".format,
            st.sampled_from(["hwmon", "iio", "file", "mqtt", "FILE", ""]),
            st.text(max_size=60),
        ),
    )
)
def test_any_name_is_taken_or_refused(spec: str) -> None:
    try:
        source = parse_source(spec, Path("/nonexistent"))
    except ApiError as error:
        json.dumps(error.as_dict())
    else:
        assert spec.split(":")[0] in ("hwmon", "iio", "file", "mqtt")
        assert source is not None
