"""A model that is told the temperature: in Python, by a sensor of the command, beside a daemon."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon import Daemon, wait_for
from gemmake.options import ThrottleMode
from gemrun import GemRunContext, GemRunHandle
from gemrun.errors import CallError

OPTIONS = ("--quantization", "int8", "--effort", "fast", "--kv-cache-size", "128")
MODES = [mode.value for mode in ThrottleMode]
TARGET = ("--target", "jetson-orin-nano", "--temperature-threshold", "75")
PROMPT, TOKENS = "The conveyor stops when the light", 24
SETTINGS = {"temperature": 0.0, "ignore_stop_ids": True}


@pytest.fixture(scope="module")
def compiled(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> Callable[[str], Path]:
    """A tiny model compiled with a throttle mode."""
    return lambda mode: artifact_cache(
        tiny_checkpoint("llama3"), *OPTIONS, *TARGET, "--throttle-mode", mode
    )


def opened(path: Path, threads: int = 2) -> GemRunContext:
    return GemRunContext(path, threads=threads, ignore_memory=True, allow_foreign_board=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threads", [1, 2])
def test_answers_are_the_same_at_any_temperature(
    compiled: Callable[[str], Path], mode: str, threads: int
) -> None:
    with opened(compiled(mode), threads) as ctx:
        wanted = ctx.infer(PROMPT, TOKENS, **SETTINGS)
        logits = ctx.logits()
        ended, random_, told = threading.Event(), random.Random(5), itertools.count()

        def tell() -> None:
            while not ended.is_set():
                ctx.set_temperature(random_.uniform(-60, 170))
                next(told)
                time.sleep(0.001)

        teller = threading.Thread(target=tell)
        teller.start()
        try:
            while next(told) < 100:
                assert ctx.infer(PROMPT, TOKENS, **SETTINGS) == wanted
                assert ctx.logits() == logits
        finally:
            ended.set()
            teller.join()
        ctx.set_temperature(1000.0)
        state = ctx.thermal()
        assert state.told
        assert state.fault
        assert state.duty <= 0.5
        assert state.mode == mode
        assert ctx.run_tests() > 0


def test_heat_takes_time_and_threads(compiled: Callable[[str], Path]) -> None:
    with opened(compiled("balanced")) as ctx:
        assert ctx.thermal().duty == 1.0
        ctx.set_temperature(74.0)
        assert (ctx.thermal().level, ctx.thermal().threads) == (0, 2)
        ctx.set_temperature(76.0)
        assert (ctx.thermal().level, ctx.thermal().duty) == (1, 0.8)
        for wrong in ("hot", None, float("nan"), True):
            with pytest.raises(CallError, match="celsius"):
                ctx.set_temperature(wrong)  # type: ignore[arg-type]


# ---- the command ----


def run(cli: Path, path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [cli, path, "--prompt", PROMPT, "--max-tokens", str(TOKENS), "--temperature", "0"]
    return subprocess.run(
        [*command, "--ignore-eos", "--allow-foreign-board", *options],
        capture_output=True, text=True, errors="replace", check=False, timeout=60,
    )  # fmt: skip


def put(path: Path, text: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
    return path


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with every kind of sensor."""
    root = tmp_path / "board"
    for number, kind, milli in ((0, "gpu-thermal", 40000), (3, "tj-thermal", 51200)):
        put(root / f"sys/class/thermal/thermal_zone{number}/type", kind)
        put(root / f"sys/class/thermal/thermal_zone{number}/temp", milli)
    put(root / "sys/class/hwmon/hwmon1/name", "lm75")
    put(root / "sys/class/hwmon/hwmon1/temp1_input", 52000)
    put(root / "sys/class/hwmon/hwmon4/name", "lm75")
    put(root / "sys/class/hwmon/hwmon4/temp1_input", 53400)  # the hotter one counts
    put(root / "sys/bus/iio/devices/iio:device0/name", "ads1015")
    put(root / "sys/bus/iio/devices/iio:device0/voltage0_raw", 500)
    put(root / "sys/bus/iio/devices/iio:device0/voltage0_offset", 46)
    put(root / "sys/bus/iio/devices/iio:device0/voltage0_scale", 100)
    put(root / "box", "0.0541")
    monkeypatch.setenv("GEMRUN_ROOT", str(root))
    return root


@pytest.mark.parametrize(
    ("source", "celsius"),
    [
        ("zone:tj-thermal", 51.2),
        ("hwmon:lm75/temp1", 53.4),
        ("iio:ads1015/voltage0", 54.6),
        ("file:{board}/box:1000", 54.1),
    ],
)
def test_sensors(
    gemrun_cli: Path, compiled: Callable[[str], Path], board: Path, source: str, celsius: float
) -> None:
    path = compiled("balanced")
    plain = json.loads(run(gemrun_cli, path, "--json").stdout)
    assert "temp_c" not in plain
    done = run(gemrun_cli, path, "--json", "--sensor", source.format(board=board))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["temp_c"], told["throttle_level"], told["throttle_fault"]) == (celsius, 0, False)
    assert told["tokens"] == plain["tokens"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("zone:nowhere", "zone:nowhere gives no temperature (No such file or directory)"),
        ("hwmon:lm75/temp2", "gives no temperature"),
        ("file:{board}/missing", "gives no temperature (No such file or directory)"),
        ("file:{board}", "gives no temperature (Invalid argument)"),
        ("mqtt:hall/temperature", "mqtt:hall/temperature is no sensor"),
        ("hwmon:lm75", "hwmon:lm75 is no sensor"),
        ("zone:", "zone: is no sensor"),
        ("", " is no sensor"),
    ],
)
def test_a_sensor_that_is_none_is_refused(
    gemrun_cli: Path, compiled: Callable[[str], Path], board: Path, source: str, problem: str
) -> None:
    done = run(gemrun_cli, compiled("balanced"), "--sensor", source.format(board=board))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("gemrun: --sensor: ")
    assert problem in done.stderr
    assert done.stderr.endswith("; name file:PATH[:SCALE], hwmon:NAME/tempN, iio:NAME/CHANNEL or "
                                "zone:TYPE\n")  # fmt: skip


def test_thousandths_of_a_degree_are_told_from_degrees(
    gemrun_cli: Path, compiled: Callable[[str], Path], board: Path
) -> None:
    put(board / "milli", 54100)
    done = run(gemrun_cli, compiled("balanced"), "--sensor", f"file:{board}/milli")
    assert done.returncode == 2
    assert "/milli gives 54100, which is no temperature in degrees" in done.stderr
    remedy = done.stderr.strip().rsplit(" ", 1)[1].replace("PATH", f"{board}/milli")
    done = run(gemrun_cli, compiled("balanced"), "--json", "--sensor", remedy)
    assert json.loads(done.stdout)["temp_c"] == 54.1


def test_a_hot_board_slows_the_command_down(
    gemrun_cli: Path, compiled: Callable[[str], Path], board: Path
) -> None:
    put(board / "sys/class/thermal/thermal_zone3/temp", 90000)
    path = compiled("balanced")
    done = run(gemrun_cli, path, "--sensor", "zone:tj-thermal")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("90.0 C: rung 1 of 7, 80 % of the time, ")
    assert done.stdout == run(gemrun_cli, path).stdout


def test_a_sensor_is_not_for_a_worker(gemrun_cli: Path, compiled: Callable[[str], Path]) -> None:
    done = run(gemrun_cli, compiled("balanced"), "--sensor", "zone:x", "--serve", "3")
    assert done.returncode == 2
    assert done.stderr.startswith("gemrun: --sensor: is not for --serve")


# ---- beside a daemon ----


def test_a_daemon_s_pace_takes_the_place_of_the_ladder(
    versions: tuple[Path, Path],
) -> None:
    with Daemon() as daemon, GemRunHandle(versions[0], ignore_memory=True) as handle:
        wanted = handle.infer(PROMPT, 8, **SETTINGS)
        for celsius in (50.0, 200.0):  # a jump that nobody believes
            handle.set_temperature(celsius)
        assert handle.thermal().fault
        assert handle.stats().duty == 0.5
        handle.attach(daemon.socket, "agv")
        wait_for(lambda: handle.stats().attached)
        handle.set_temperature(50.0)
        assert handle.thermal().duty == 1.0
        assert handle.infer(PROMPT, 8, **SETTINGS) == wanted
        handle.detach()
        handle.set_temperature(200.0)
        assert handle.stats().duty == 0.5
        assert handle.infer(PROMPT, 8, **SETTINGS) == wanted
