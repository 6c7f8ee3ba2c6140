"""Power and the processor's limits, from fake sysfs trees."""

from __future__ import annotations

from pathlib import Path

import pytest

import sysfs
from gemctl.board.power import (
    Cluster,
    Power,
    clusters,
    findings,
    online_cpus,
    parse_cpus,
    running,
    supply,
)


@pytest.fixture
def empty(tmp_path: Path) -> sysfs.Sysfs:
    return sysfs.Sysfs(tmp_path / "t")


def test_jetson_total_is_not_the_sum(tmp_path: Path) -> None:
    power = Power(sysfs.orin_nano(tmp_path / "t").root)
    reading = power.sample(0.0)
    assert reading.power_w == pytest.approx(9.8)
    assert reading.rails == pytest.approx({"VDD_IN": 9.8, "VDD_CPU_GPU_CV": 3.0, "VDD_SOC": 1.5})
    assert reading.energy_j is None


def test_sums_and_unconnected_channels_are_no_rails(empty: sysfs.Sysfs) -> None:
    empty.ina3221(0, [("VDD_IN", 5000, 1000), ("NC", 0, 0), ("sum of shunts", 1, 1)])
    empty.ina3221(1, [("VDD_GPU_SOC", 5000, 200), ("nc", 9, 9), ("VIN_SYS_5V0", 5000, 100)])
    empty.put("sys/class/hwmon/hwmon1/in3_enable", 0)
    assert set(Power(empty.root).sample(0.0).rails) == {"VDD_IN", "VDD_GPU_SOC"}


def test_parts_alone_give_no_total(empty: sysfs.Sysfs) -> None:
    empty.ina3221(0, [("VDD_GPU_SOC", 5000, 1000), ("VDD_CPU_CV", 5000, 1000)])
    reading = Power(empty.root).sample(0.0)
    assert reading.power_w is None
    assert reading.rails == {"VDD_GPU_SOC": 5.0, "VDD_CPU_CV": 5.0}


def test_the_boards_description_decides(empty: sysfs.Sysfs) -> None:
    empty.ina3221(0, [("VDD_IN", 5000, 1000), ("VDD_ALL", 5000, 3000)])
    roles = {"VDD_IN": "part", "VDD_ALL": "total"}
    assert Power(empty.root, roles).sample(0.0).power_w == 15.0


def test_a_total_that_is_half_unknown_is_none_at_all(empty: sysfs.Sysfs) -> None:
    """Of two inputs one is broken: what measures the whole machine otherwise takes over."""
    empty.ina3221(0, [("IN_A", 5000, 1000), ("IN_B", 5000, 3000)])
    empty.hwmon(1, "power_meter", {"power1_average": 21000000})
    power = Power(empty.root, {"IN_A": "total", "IN_B": "total"})
    assert power.sample(0.0).power_w == 20.0
    empty.put("sys/class/hwmon/hwmon0/in1_input", "")
    assert power.sample(1.0).power_w == 21.0


def test_jetpack_4_names(empty: sysfs.Sysfs) -> None:
    folder = "sys/bus/i2c/drivers/ina3221x/1-0040/iio:device0"
    for channel, (label, milli) in enumerate([("POM_5V_IN", 4200), ("NC", 7), ("POM_5V_CPU", 900)]):
        empty.put(f"{folder}/rail_name_{channel}", label)
        empty.put(f"{folder}/in_power{channel}_input", milli)
    reading = Power(empty.root).sample(0.0)
    assert reading.power_w == pytest.approx(4.2)
    assert set(reading.rails) == {"POM_5V_IN", "POM_5V_CPU"}


def test_other_chips_are_parts_acpis_meter_is_all(empty: sysfs.Sysfs) -> None:
    empty.hwmon(0, "ina226", {"power1_input": 2500000, "power1_label": "VDD_5V"})
    empty.hwmon(1, "amdgpu", {"power1_average": 7000000})
    reading = Power(empty.root).sample(0.0)
    assert reading.rails == {"ina226:VDD_5V": 2.5, "amdgpu:power1": 7.0}
    assert reading.power_w is None
    empty.hwmon(2, "power_meter", {"power1_average": 42000000})
    assert Power(empty.root).sample(0.0).power_w == 42.0


def test_energy_is_the_integral(tmp_path: Path) -> None:
    tree = sysfs.orin_nano(tmp_path / "t")
    power = Power(tree.root)
    amperes = "sys/class/hwmon/hwmon1/curr1_input"
    for second, milli in enumerate([2000, 2000, 4000, 4000]):
        tree.put(amperes, milli)
        reading = power.sample(float(second))
    assert reading.energy_j == pytest.approx(10 + 15 + 20)
    # A gap in which nobody looked is not made up.
    assert power.sample(103.0).energy_j == pytest.approx(45)
    assert power.sample(104.0).energy_j == pytest.approx(65)


def test_an_unknown_moment_is_left_out(tmp_path: Path) -> None:
    tree = sysfs.orin_nano(tmp_path / "t")
    power = Power(tree.root)
    power.sample(0.0)
    assert power.sample(1.0).energy_j == pytest.approx(9.8)
    tree.put("sys/class/hwmon/hwmon1/in1_input", "broken")
    reading = power.sample(2.0)
    assert (reading.power_w, reading.rails["VDD_IN"]) == (None, None)
    assert reading.energy_j == pytest.approx(9.8)
    tree.put("sys/class/hwmon/hwmon1/in1_input", 5000)
    power.sample(3.0)
    assert power.sample(4.0).energy_j == pytest.approx(2 * 9.8)


def test_a_shunt_below_zero_counts_as_nothing(empty: sysfs.Sysfs) -> None:
    empty.ina3221(0, [("VDD_IN", 5000, -8)])
    assert Power(empty.root).sample(0.0).power_w == 0.0


def test_counters_of_x86(empty: sysfs.Sysfs) -> None:
    empty.rapl("0", "package-0", 1000.0)
    empty.rapl("0:0", "core", 500.0)
    empty.rapl("0:2", "dram", 200.0)
    power = Power(empty.root)
    first = power.sample(0.0)
    assert (first.power_w, first.energy_j) == (None, None)
    empty.rapl("0", "package-0", 1030.0)
    empty.rapl("0:0", "core", 520.0)
    empty.rapl("0:2", "dram", 204.0)
    reading = power.sample(2.0)
    assert reading.power_w == pytest.approx(17.0)
    assert reading.energy_j == pytest.approx(34.0)
    assert reading.rails == pytest.approx(
        {"rapl:package-0": 15.0, "rapl:core-0": 10.0, "rapl:dram-0": 2.0}
    )


def test_the_platforms_counter_beats_the_packages(empty: sysfs.Sysfs) -> None:
    def at(joules: float) -> None:
        empty.rapl("0", "package-0", joules)
        empty.rapl("1", "package-1", joules)
        empty.rapl("2", "psys", 3 * joules)

    at(100.0)
    power = Power(empty.root)
    power.sample(0.0)
    at(110.0)
    assert power.sample(1.0).power_w == pytest.approx(30.0)
    # Where it cannot be read any more, all packages together are what is left.
    at(120.0)
    empty.remove("sys/class/powercap/intel-rapl:2/energy_uj")
    assert power.sample(2.0).power_w == pytest.approx(20.0)


def test_a_counter_that_wraps(empty: sysfs.Sysfs) -> None:
    empty.rapl("0", "package-0", 262140.0)
    power = Power(empty.root)
    power.sample(0.0)
    empty.rapl("0", "package-0", 7.0)
    reading = power.sample(1.0)
    assert reading.power_w == pytest.approx(10.0)
    assert reading.energy_j == pytest.approx(10.0)


def test_a_counter_that_begins_anew_is_no_load(empty: sysfs.Sysfs) -> None:
    empty.rapl("0", "package-0", 5000.0)
    power = Power(empty.root)
    power.sample(0.0)
    empty.rapl("0", "package-0", 10.0)  # after a suspend
    assert power.sample(1.0).power_w is None
    empty.rapl("0", "package-0", 22.0)
    reading = power.sample(2.0)
    assert (reading.power_w, reading.energy_j) == (pytest.approx(12.0), pytest.approx(12.0))


def test_an_unreadable_counter_is_unknown(empty: sysfs.Sysfs) -> None:
    empty.rapl("0", "package-0", 1.0)
    empty.remove("sys/class/powercap/intel-rapl:0/energy_uj")  # root only, on most machines
    power = Power(empty.root)
    for second in range(3):
        reading = power.sample(float(second))
        assert (reading.power_w, reading.energy_j) == (None, None)


def test_samples_too_close_together_repeat(empty: sysfs.Sysfs) -> None:
    empty.rapl("0", "package-0", 10.0)
    power = Power(empty.root)
    power.sample(0.0)
    empty.rapl("0", "package-0", 20.0)
    reading = power.sample(1.0)
    assert power.sample(1.0) is reading
    assert power.sample(1.4) is reading
    empty.rapl("0", "package-0", 25.0)
    assert power.sample(1.5).power_w == pytest.approx(10.0)


def test_without_sensors_all_is_unknown(tmp_path: Path) -> None:
    reading = Power(tmp_path / "nothing").sample(0.0)
    assert (reading.power_w, reading.energy_j, dict(reading.rails)) == (None, None, {})


def test_states_name_the_total(tmp_path: Path) -> None:
    power = Power(sysfs.orin_nano(tmp_path / "t").root)
    power.sample(0.0)
    rows = {row["name"]: row["total"] for row in power.states()}
    assert rows == {"VDD_IN": True, "VDD_CPU_GPU_CV": False, "VDD_SOC": False}


# The processor


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("0-3,6", (0, 1, 2, 3, 6)), ("0", (0,)), ("0 1 2", (0, 1, 2)), ("2-1", ()), ("", ()),
        ("a", ()), ("0-", ()), ("3,1", (1, 3)), ("-1", ()), ("0-99999", ()),
    ],
)  # fmt: skip
def test_lists_of_cores(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cores


def test_clusters_the_fastest_first(tmp_path: Path) -> None:
    found = clusters(sysfs.rk3588(tmp_path / "t").root)
    assert [(c.name, c.cores, c.capacity) for c in found] == [
        ("policy6", (6, 7), 1024), ("policy4", (4, 5), 1024), ("policy0", (0, 1, 2, 3), 530),
    ]  # fmt: skip
    assert found[0] == Cluster(
        "policy6", (6, 7), 1024, 408000, 2304000, 408000, 2304000, 408000, "schedutil"
    )


def test_cores_that_are_off_are_not_there(tmp_path: Path) -> None:
    """A low power mode takes cores away: the kernel empties the policy, then removes it."""
    tree = sysfs.orin_nano(tmp_path / "t")
    tree.put("sys/devices/system/cpu/cpufreq/policy4/affected_cpus", "")
    tree.online("0-3")
    assert [c.cores for c in clusters(tree.root)] == [(0, 1, 2, 3)]
    tree.remove("sys/devices/system/cpu/cpufreq/policy4")
    assert [c.cores for c in clusters(tree.root)] == [(0, 1, 2, 3)]
    assert online_cpus(tree.root) == (0, 1, 2, 3)


def test_policies_of_single_cores_join_by_kind(tmp_path: Path) -> None:
    found = clusters(sysfs.x86(tmp_path / "t").root)
    assert [(c.cores, c.hw_max_khz) for c in found] == [((0, 1), 4700000), ((2, 3, 4, 5), 3500000)]


def test_without_cpufreq_clocks_are_unknown(empty: sysfs.Sysfs) -> None:
    empty.online("0-3")
    for core, capacity in enumerate([400, 400, 1024, 1024]):
        empty.put(f"sys/devices/system/cpu/cpu{core}/cpu_capacity", capacity)
    found = clusters(empty.root)
    assert [(c.cores, c.capacity, c.hw_max_khz) for c in found] == [
        ((2, 3), 1024, None), ((0, 1), 400, None),
    ]  # fmt: skip
    assert clusters(empty.root / "nothing") == ()


def test_this_machine_is_read_without_error() -> None:
    root = Path("/")
    assert online_cpus(root)
    assert clusters(root)
    Power(root).sample(0.0)
    findings(root)


# What works against the throttle


def test_a_quiet_machine_has_no_findings(tmp_path: Path) -> None:
    for number, board in enumerate([sysfs.orin_nano, sysfs.rk3588, sysfs.pi5, sysfs.x86]):
        assert findings(board(tmp_path / str(number)).root) == []


@pytest.mark.parametrize(
    "name", ["thermald", "tuned", "power-profiles-daemon", "tlp", "auto-cpufreq"]
)
def test_rivals_are_named(name: str, tmp_path: Path) -> None:
    tree = sysfs.x86(tmp_path / "t")
    tree.process(77, name)
    tree.process(78, "bash")
    (finding,) = findings(tree.root)
    assert finding.name == name
    assert finding.sentence.startswith(f"{name}: it runs beside gemctl, and ")
    assert "; " in finding.sentence
    assert running(tree.root) == {name[:15], "bash"}


def test_jetson_clocks_is_seen_by_its_pinned_clocks(tmp_path: Path) -> None:
    tree = sysfs.orin_nano(tmp_path / "t")
    for number in (0, 4):
        tree.put(f"sys/devices/system/cpu/cpufreq/policy{number}/scaling_min_freq", 1510400)
    (finding,) = findings(tree.root)
    assert finding.sentence == (
        "jetson_clocks: they are pinned to 1510 MHz and frequency caps do nothing; "
        "run 'jetson_clocks --restore'"
    )
    tree.put("sys/devices/system/cpu/cpufreq/policy4/scaling_min_freq", 115200)
    assert findings(tree.root) == []


def test_pinned_clocks_elsewhere_have_another_name(tmp_path: Path) -> None:
    tree = sysfs.rk3588(tmp_path / "t")
    for number, top in ((0, 1800000), (4, 2256000), (6, 2304000)):
        tree.put(f"sys/devices/system/cpu/cpufreq/policy{number}/scaling_min_freq", top)
    assert [finding.name for finding in findings(tree.root)] == ["clocks"]


def test_the_lowest_clock_is_not_pinned(tmp_path: Path) -> None:
    tree = sysfs.pi5(tmp_path / "t")
    tree.put("sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq", 1500000)
    assert findings(tree.root) == []


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("0", []), ("1", ["undervoltage"]), ("0x50000", ["undervoltage"]), ("20000", []),
        ("4", ["firmware"]), ("0x50005", ["undervoltage", "firmware"]), ("8", ["firmware"]),
        ("xyz", []), ("", []),
    ],
)  # fmt: skip
def test_raspberry_flags(text: str, names: list[str], tmp_path: Path) -> None:
    tree = sysfs.pi5(tmp_path / "t")
    tree.put("sys/devices/platform/soc/soc:firmware/get_throttled", text)
    assert [finding.name for finding in findings(tree.root)] == names


def test_raspberry_flags_by_name(tmp_path: Path) -> None:
    tree = sysfs.pi5(tmp_path / "t")
    tree.put("sys/devices/platform/soc/soc:firmware/get_throttled", "0x50004")
    flags = supply(tree.root)
    assert flags is not None
    assert (flags.undervoltage, flags.throttled, flags.capped) == (False, True, False)
    assert (flags.undervoltage_seen, flags.throttled_seen) == (True, True)
    assert supply(sysfs.rk3588(tmp_path / "u").root) is None


def test_the_voltage_alarm_is_enough(tmp_path: Path) -> None:
    tree = sysfs.pi5(tmp_path / "t")
    tree.put("sys/class/hwmon/hwmon1/in0_lcrit_alarm", 1)
    (finding,) = findings(tree.root)
    assert "voltage is too low now" in finding.sentence
