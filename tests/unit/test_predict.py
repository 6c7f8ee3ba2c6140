"""Predictions: the core table against the benchmark's tables, the arithmetic, what is not known."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gemmake import predictions
from gemmake.errors import UsageError
from gemmake.hdf import Hdf, list_targets, load_hdf
from gemmake.options import Storage
from gemmake.passes import predict
from gemmake.passes.cores import CORES, UNPACK, Core, Most
from gemmake.passes.predict import Keep, Machine, Matrices, Range, Work

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "Cortex-A35": "cortex-a35",
    "Cortex-A53": "cortex-a53",
    "Cortex-A55": "cortex-a55",
    "Cortex-A72": "cortex-a72",
    "Cortex-A76": "cortex-a76",
    "Cortex-A78": "cortex-a78ae",
}
SLOW = Core(100, 100, 200, 50)
WORK = Work(
    layers=Matrices(size=8_000, narrow=10, wide=2, floats=0),
    head=Matrices(size=2_000, narrow=0, wide=4, floats=0),
    keeps=(Keep(0, 10.0, 512), Keep(64, 5.0, 1024)),
    chunk=16,
    load_size=12_000,
)
MACHINE = Machine("m", 1, ((SLOW, 1e6),), Range(1e6, 2e6), Range(1e6, 4e6), ("bandwidth",))


def table(name: str, cells: int) -> list[list[str]]:
    lines = (ROOT / "benchmarks" / name).read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return [row for row in rows if len(row) == cells]


def test_cycles_are_those_of_the_benchmark() -> None:
    found: dict[tuple[str, str], int] = {}
    instructions: dict[str, int] = {}
    for core, _, product, count, cycles, _ in table("arm_cores.md", 6):
        if core in NAMES and not product.startswith("4 tokens, SMMLA"):
            found[NAMES[core], product] = int(cycles)
            if product == "q4h, one token":
                instructions[NAMES[core]] = int(count)
    for uarch in NAMES.values():
        core = CORES["aarch64", uarch]
        tiles = [n for (name, what), n in found.items() if name == uarch and "tokens, each" in what]
        assert core.q4 == found[uarch, "q4h, one token"]
        assert core.instructions == instructions[uarch]
        assert core.q8 == found[uarch, "q8, one token"]
        assert tiles == [core.tile]


def test_cycles_of_armv7_and_riscv_are_those_of_the_benchmark() -> None:
    found = {
        (core.split(",")[0], product): (int(count), int(cycles))
        for core, product, count, cycles, *_ in table("armv7_riscv_cores.md", 7)
        if cycles.isdigit()
    }
    for key, name in (
        (("arm", "cortex-a7"), "Cortex-A7"),
        (("riscv64", "spacemit-x60"), "SpacemiT X60"),
    ):
        assert (CORES[key].instructions, CORES[key].q4) == found[name, "GEMV"]
        assert CORES[key].tile == found[name, "GEMM"][1]


def test_a_core_without_a_count_for_8_bits_takes_half_as_long_again() -> None:
    assert Core(200, 100, 0, 50).one(True) == 150.0
    assert Core(200, 100, 180, 50).one(True) == 180.0
    assert Core(200, 100, 180, 50).each(True) == 50 + UNPACK / 2
    assert Core(200, 100, 180, 50, bytes_twice=True).each(True) == 100 + UNPACK / 2


def test_cache_and_attention_follow_the_limits() -> None:
    assert WORK.cache(10) == 150.0
    assert WORK.cache(100) == 1_000.0 + 64 * 5.0
    assert WORK.attention(0, 1) == 1 + 2
    assert WORK.attention(99, 100) == 100 + 64 * 2
    pieces = [WORK.attention(i, i + 1) for i in range(200)]
    assert WORK.attention(0, 200) == sum(pieces)


def test_decode_takes_the_slower_of_reading_and_multiplying() -> None:
    time = predict.decode(WORK, MACHINE, 0)
    assert time is not None
    cycles = 10 * 100 + 2 * 200 + 4 * 200 + 3 * 200
    low, high = cycles / 1e6 / 0.85, cycles / 1e6 / 0.6
    assert time.seconds == Range(max(10_000 / 2e6, low), max(10_000 / 1e6, high))
    assert time.limit == "memory"
    fast = replace(MACHINE, bandwidth=Range(1e9, 2e9))
    quick = predict.decode(WORK, fast, 0)
    assert quick is not None
    assert (quick.limit, quick.seconds.low) == ("arithmetic", pytest.approx(low))


def test_what_is_streamed_takes_the_time_of_storage() -> None:
    streams = replace(WORK, streamed=6_000, streamed_head=1_000)
    token = predict.decode(streams, replace(MACHINE, storage=Range(1e5, 2e5)), 0)
    assert token is not None
    assert (token.limit, token.seconds) == ("storage", Range(6_000 / 2e5, 6_000 / 1e5))
    prompt = predict.prefill(streams, replace(MACHINE, storage=Range(1e4, 2e4)), 33)  # three steps
    assert prompt is not None
    assert prompt.seconds == Range(16_000 / 2e4, 16_000 / 1e4)
    fast = predict.decode(streams, replace(MACHINE, storage=Range(1e9, 2e9)), 0)
    assert fast == predict.decode(WORK, MACHINE, 0)
    alone = predict.decode(streams, replace(MACHINE, cores=(), bandwidth=None), 0)
    assert alone is not None  # storage is a bound where nothing else is known
    assert (alone.limit, alone.seconds) == ("storage", Range(6_000 / 4e6, math.inf))


def test_threads_add_up_also_where_their_cores_differ() -> None:
    one = predict.decode(WORK, replace(MACHINE, bandwidth=Range(1e12, 1e12)), 0)
    cores = ((SLOW, 1e6), (Core(100, 50, 100, 25), 1e6))
    both = predict.decode(WORK, replace(MACHINE, bandwidth=Range(1e12, 1e12), cores=cores), 0)
    assert one is not None
    assert both is not None
    assert both.seconds.high == pytest.approx(one.seconds.high / 3)


def test_prefill_reads_the_layers_once_a_step_and_the_head_once() -> None:
    only = replace(MACHINE, cores=())
    for tokens, steps in ((1, 1), (16, 1), (17, 2), (33, 3)):
        time = predict.prefill(WORK, only, tokens)
        assert time is not None
        ends = [min(16 * (i + 1), tokens) for i in range(steps)]
        size = steps * 8_000 + 2_000 + sum(WORK.cache(end) for end in ends)
        assert time.seconds == Range(size / 2e6, math.inf)
        assert time.limit == "memory"


def test_prefill_multiplies_each_token_and_the_head_once() -> None:
    time = predict.prefill(WORK, replace(MACHINE, bandwidth=Range(1e12, 1e12)), 8)
    assert time is not None
    body = 10 * (50 + UNPACK) + 2 * (50 + UNPACK)
    cycles = 8 * body + WORK.attention(0, 8) * 200 + 4 * 200
    assert time.seconds.high == pytest.approx(cycles / 1e6 / 0.6)


def test_what_is_not_known_has_no_most() -> None:
    blind = replace(MACHINE, bandwidth=None, cores=())
    assert predict.decode(WORK, blind, 0) is None
    assert predict.predict(WORK, blind, 0, 8).first_token(cold=False) is None
    arithmetic = predict.decode(WORK, replace(MACHINE, bandwidth=None), 0)
    assert arithmetic is not None
    assert (arithmetic.seconds.high, arithmetic.limit) == (math.inf, "arithmetic")
    floats = replace(WORK, layers=replace(WORK.layers, floats=1))
    memory = predict.decode(floats, MACHINE, 0)
    assert memory is not None
    assert (memory.seconds, memory.limit) == (Range(0.005, math.inf), "memory")
    assert predict.predict(floats, MACHINE, 0, 8).assumed == ("bandwidth", predict.FLOATS)
    assert predict.predict(WORK, MACHINE, 0, 8).assumed == ("bandwidth",)


def test_what_was_not_counted_takes_what_the_fastest_core_would() -> None:
    bounded = replace(MACHINE, cores=(), ceiling=Most(512_000, 64_000))
    time = predict.prefill(WORK, bounded, 8)
    assert time is not None
    groups = 8 * 12 + 4 + WORK.attention(0, 8)
    assert time.seconds == Range(pytest.approx(groups / 1000), math.inf)  # 1000 groups a second
    assert time.limit == "arithmetic"
    floats = replace(WORK, layers=Matrices(8_000, 0, 0, 12), head=Matrices(2_000, 0, 0, 4))
    slow = predict.prefill(floats, replace(bounded, cores=MACHINE.cores), 8)
    assert slow is not None
    seconds = (8 * 12 + 4) / 125 + WORK.attention(0, 8) / 1000
    assert slow.seconds == Range(pytest.approx(seconds), math.inf)
    decode = predict.decode(WORK, replace(bounded, bandwidth=None), 0)
    assert decode is None  # the ceiling alone says nothing of decode, which memory limits


def test_no_counted_loop_is_above_the_ceiling() -> None:
    for name in list_targets():
        hdf = load_hdf(name)
        for mode in hdf.power_mode or (None,):
            found = predict.machine_of(hdf, mode, 8)
            if found.ceiling is None or not found.cores or hdf.target.os == "bare":
                continue
            for wide in (False, True):
                rate = sum(512 * hertz / core.each(wide) for core, hertz in found.cores)
                assert rate < found.ceiling.integers


def test_memory_alone_says_nothing_of_prompts() -> None:
    alone = predict.predict(WORK, replace(MACHINE, cores=()), 0, 8)
    assert alone.prefill is not None
    assert predictions.prompt_time(alone) is None
    for known in ({"cores": MACHINE.cores}, {"cores": (), "ceiling": Most(1000, 1000)}):
        told = predict.predict(WORK, replace(MACHINE, **known), 0, 8)  # type: ignore[arg-type]
        assert predictions.prompt_time(told) == told.prefill
    streams = replace(WORK, streamed=6_000, streamed_head=1_000)
    slow = predict.predict(streams, replace(MACHINE, cores=(), storage=Range(1e4, 2e4)), 0, 8)
    assert predictions.prompt_time(slow) == slow.prefill


def test_every_kind_of_storage_has_a_rate() -> None:
    assert [kind.value for kind in Storage] == list(predict.STORAGE)


def test_loading_and_the_first_token_add_up() -> None:
    found = predict.predict(WORK, MACHINE, 0, 8)
    assert found.cold == Range(12_000 / 4e6, 12_000 / 1e6)
    assert found.warm == predict.MAPPING.inverse(12_000)
    cold, warm = found.first_token(cold=True), found.first_token(cold=False)
    assert found.prefill is not None
    assert cold == found.prefill.seconds.plus(found.cold)
    assert warm == found.prefill.seconds.plus(found.warm)


# ---- boards ----
def machine(name: str, mode: str | None = None, storage: str = "", threads: int = 6) -> Machine:
    hdf = load_hdf(name)
    return predict.machine_of(hdf, hdf.mode(mode), threads, storage)


def test_bandwidth_and_clock_are_those_of_the_mode() -> None:
    default, slow = machine("jetson-orin-nano"), machine("jetson-orin-nano", "15W")
    assert (default.mode, slow.mode) == ("25W", "15W")
    assert default.bandwidth is not None
    assert default.bandwidth.low == pytest.approx(102.4e9 * 0.6 * 0.8)
    assert default.bandwidth.high == pytest.approx(102.4e9 * 0.8 * 0.9)
    assert slow.bandwidth is not None
    assert slow.bandwidth.high == pytest.approx(68.3e9 * 0.72)
    assert {hertz for _, hertz in default.cores} == {1344e6}
    assert {hertz for _, hertz in slow.cores} == {1497.6e6}


def test_cores_that_a_mode_takes_offline_run_no_thread() -> None:
    low = machine("jetson-orin-nano-classic", "7W")
    assert (low.threads, len(low.cores)) == (4, 4)


def test_fast_cores_come_first() -> None:
    found = machine("rk3588-8gb", threads=6)
    assert [hertz for _, hertz in found.cores] == [2400e6] * 4 + [1800e6] * 2
    assert found.cores[0][0] == CORES["aarch64", "cortex-a76"]


def test_what_is_unverified_or_missing_is_said() -> None:
    pi = " | ".join(machine("raspberry-pi-4", threads=4).assumed)
    assert "12.8 GB/s at the peak (unverified)" in pi
    assert "1800 MHz (unverified)" in pi
    nano = " | ".join(machine("jetson-orin-nano").assumed)
    assert "102.4 GB/s at the peak:" in nano
    assert "1344 MHz:" in nano
    assert "share with the GPU" in nano
    generic = machine("generic-aarch64")
    assert generic.bandwidth is None
    assert generic.cores == ()
    assert generic.assumed[0].startswith("memory bandwidth of generic-aarch64 is not in its")
    assert any("products of the cores of generic-aarch64 were not" in a for a in generic.assumed)
    assert any(
        "the clock of cortex-a53 of meter-256mb is not in its description" in one
        for one in machine("meter-256mb").assumed
    )
    gracemont = machine("intel-n100")
    assert gracemont.cores == ()
    assert any(
        "products of gracemont of intel-n100 were not counted:" in a for a in gracemont.assumed
    )
    assert any("a Cortex-A72 stands for it" in a for a in machine("jetson-xavier-nx").assumed)


def with_source(hdf: Hdf, kind: str) -> Hdf:
    tables = hdf.model_dump(mode="json", exclude_none=True)
    tables["source"] = [{"field": "power_mode", "ref": "x", "kind": kind, "verified": True}]
    tables["storage"] = {"kind": "nvme", "seq_read_mbps": 2000.0}
    return Hdf.model_validate_json(json.dumps(tables))


def test_a_measured_bandwidth_is_what_reading_reaches() -> None:
    hdf = with_source(load_hdf("raspberry-pi-5"), "measured")
    found = predict.machine_of(hdf, hdf.default_mode, 4)
    assert found.bandwidth is not None
    assert found.bandwidth.low == pytest.approx(17.1e9 * 0.8)
    assert found.bandwidth.high == pytest.approx(17.1e9 * 0.9)
    assert found.storage == Range(1600e6, 2000e6)


def test_storage_is_the_boards_or_the_one_that_is_named() -> None:
    assert machine("raspberry-pi-5").storage == Range(150e6, 300e6)
    assert machine("raspberry-pi-5", storage="nvme").storage == Range(800e6, 3000e6)
    assert "emmc with 150 to 300 MB/s" in machine("raspberry-pi-5").assumed[-1]


@pytest.mark.parametrize(
    ("board", "name", "words"),
    [
        ("jetson-orin-nano", "99W", "use one of 15W, 25W (default), MAXN_SUPER"),
        ("generic-x86-64", "15W", "it has none, leave the option out"),
    ],
)
def test_an_unknown_power_mode_is_refused_with_those_that_exist(
    board: str, name: str, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load_hdf(board).mode(name)
    assert words in str(caught.value)
    assert load_hdf(board).mode(None) == load_hdf(board).default_mode


def test_the_narrowest_source_counts() -> None:
    hdf = load_hdf("jetson-orin-nano")
    wide, narrow = (
        hdf.origin("power_mode[25W].gpu_max_mhz"),
        hdf.origin("power_mode[15W].gpu_max_mhz"),
    )
    assert wide is not None
    assert narrow is not None
    assert (wide.verified, narrow.verified) == (True, False)
    assert hdf.origin("storage.seq_read_mbps") is None


# ---- words ----
@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (Range(0.0123, 0.0456), "12 to 46 ms"),
        (Range(0.2, 1.5), "0.20 to 1.5 s"),
        (Range(12.0, 123.4), "12 to 123 s"),
        (Range(0.005, math.inf), "at least 5.0 ms"),
        (Range(2.0, 2.0), "2.0 s"),
    ],
)
def test_durations(seconds: Range, text: str) -> None:
    assert predictions.duration(seconds) == text


def test_rates() -> None:
    assert predictions.span(Range(0.1, 0.2).inverse()) == "5.0 to 10"
    assert predictions.span(Range(0.001, math.inf).inverse()) == "at most 1,000"
    assert predictions.span(Range(0.09999, math.inf).inverse()) == "at most 11"
    assert predictions.duration(Range(0.01299, math.inf)) == "at least 12 ms"
    assert re.fullmatch(r"[\d,]+", predictions.figure(1234.6))
