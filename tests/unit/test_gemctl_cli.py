"""The command's line, texts and exit codes, without a daemon."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gemctl import kinds, session
from gemctl.cli_commands import main
from gemctl.show import render, top

ROOT = Path(__file__).resolve().parents[2]
STATS: dict[str, Any] = {
    "ttft_ms": 12.5,
    "throughput_tps": 101.25,
    "kv_cache_used": 7,
    "temp_c": 61.0,
    "v": 1,
    "ts": 0.0,
    "model": "pilot",
    "digest": "ab" * 32,
    "state": "serving",
    "throttle": {
        "mode": "balanced",
        "level": 1,
        "duty": 0.75,
        "reason": "hot",
        "threshold_c": 75.0,
        "predicted_c": 74.2,
    },
    "power_w": None,
    "energy_per_token_j": None,
    "requests": {"active": 1, "queued": 0, "done": 5, "failed": 0},
    "swap": {},
    "kv_cache_size": 1024,
    "kv_cache_used_bytes": 1,
    "kv_cache_hit_ratio": None,
    "ttft_p50_ms": 12.0,
    "ttft_p95_ms": 20.0,
}


@pytest.mark.parametrize(
    ("line", "rest", "json_", "reset", "external"),
    [
        ("stats --json", ["stats"], True, None, None),
        ("--json stats", ["stats"], True, None, None),
        ("model --disable --auto-reset-kv-cache", ["model", "--disable"], False, True, None),
        ("throttle --temp 75 --external-temp-sensor file:/t:0.001", ["throttle", "--temp", "75"],
         False, None, "file:/t:0.001"),
        ("--external-temp-sensor=hwmon:k/temp1 stats", ["stats"], False, None, "hwmon:k/temp1"),
        ("--no-auto-reset-kv-cache", ["stats"], False, False, None),
        ("--auto-reset-kv-cache=0 stats", ["stats"], False, 0, None),
        ("stats --auto-reset-kv-cache=90%", ["stats"], False, 90, None),
        ("generate -- --json", ["generate", "--", "--json"], False, None, None),
    ],
)  # fmt: skip
def test_options_may_stand_anywhere(
    line: str, rest: list[str], json_: bool, reset: bool | int | None, external: str | None
) -> None:
    taken, found = session.take_options(line.split())
    assert (found, taken.json) == (rest, json_)
    assert (taken.auto_reset, taken.external) == (reset, external)
    assert type(taken.auto_reset) is type(reset)  # 0 is a percentage
    assert session.wants_json(line.split()) == json_


def test_no_daemon_is_one_sentence_and_code_3(tmp_path: Path) -> None:
    for words in (["stats"], ["model", "--disable"], ["generate", "x"], ["switch-model", "a"]):
        done = CliRunner().invoke(main, ["--socket", str(tmp_path / "none"), *words])
        assert done.exit_code == 3, done.output
        assert "start gemctld" in done.output
        assert "Traceback" not in done.output
        done = CliRunner().invoke(main, ["--json", "--socket", str(tmp_path / "none"), *words])
        error = json.loads(done.output)["error"]
        assert (done.exit_code, error["code"], error["retryable"]) == (3, "unreachable", False)


@pytest.mark.parametrize(
    "words",
    [
        ["model", "--disable", "--enable"],
        ["throttle", "--for", "soon"],
        ["throttle", "--temp", "500"],
        ["throttle", "--mode", "wild"],
        ["--socket"],
        ["nothing"],
        ["model", "--replace", "/nowhere"],
        ["fleet", "status", "--host", "far.example"],
    ],
)
def test_a_wrong_line_is_code_2(words: list[str]) -> None:
    assert CliRunner().invoke(main, words).exit_code == 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172800)]
)
def test_times(text: str, seconds: float) -> None:
    assert kinds.Span().convert(text, None, None) == seconds


def test_configuration_is_checked_without_a_daemon(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    for text, code, words in (
        ("[throttle]\ntemp_c = 75\n", 0, "good"),
        ("[throttle]\ntemp = 75\n", 2, "throttle.temp"),
        ("[mqtt]\nhost = 'far.example'\n", 2, "TLS is off"),
        ("[throttle\n", 2, "no TOML"),
    ):
        path.write_text(text, encoding="utf-8")
        done = CliRunner().invoke(main, ["config", "check", str(path)])
        assert (done.exit_code, words in done.output) == (code, True), done.output
    schema = json.loads(CliRunner().invoke(main, ["config", "schema"]).output)
    assert "throttle" in schema["properties"]


STARTS = """
import sys
from gemctl.cli import main
before = set(sys.modules)
try:
    main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(code, *sorted(sys.modules))
"""
HEAVY = {"pydantic", "asyncio", "aiomqtt", "gemctl.config", "ssl", "subprocess", "pathlib"}
WITH_CLICK = {"click", "inspect", "dataclasses", "datetime", "uuid", "gemctl.cli_commands"}


def imported(*words: str) -> set[str]:
    """Modules that a line brought in, without a daemon."""
    done = subprocess.run(
        [sys.executable, "-IB", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {STARTS}",
         "--socket", "/nowhere", *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    code, *modules = done.stdout.splitlines()[-1].split()
    assert code == "3"
    return set(modules)


def test_the_command_imports_nothing_heavy() -> None:
    """What a script asks every second needs no click, and nothing needs more than click."""
    for words in (["stats"], ["stats", "--json"], ["model", "list"], ["throttle"], ["info"]):
        assert not imported(*words) & (HEAVY | WITH_CLICK), words
    for words in (["stats", "--history"], ["model", "switch", "a"], ["generate", "a"]):
        assert not imported(*words) & HEAVY, words
        assert "click.shell_completion" not in imported(*words)


def processor_time(*command: str) -> float:
    """The least of five runs, in ms."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return used * 1e3

    return min(once() for _ in range(5))


def test_the_time_of_a_question(tmp_path: Path) -> None:
    """Against Python's own start and that of click, which no machine changes."""
    place = ("-m", "gemctl.cli", "--socket", str(tmp_path / "none"))
    empty, click = processor_time("-c", "pass"), processor_time("-c", "import click")
    quick, whole = processor_time(*place, "stats"), processor_time(*place, "stats", "--history")
    print(f"ms: stats {quick:.0f}, with click {whole:.0f}; pass {empty:.0f}, click {click:.0f}")
    assert quick < click
    assert whole < 2.5 * click


def test_texts_for_people() -> None:
    text = render.stats(STATS)
    assert "101.2 tokens/s" in text
    assert "in 30 s 74.2 C" in text
    history = {"step_s": 10, "series": {"temp_c": [50.0, None, 60.0], "empty": [None]}}
    assert "▁ █" in render.history(history)
    assert "means of 10 s, newest right" in render.history(history)
    assert "nothing yet" in render.history({"step_s": 10, "series": {}})
    checks = [{"level": "bad", "name": "worker", "text": "not found"}]
    assert "✗ worker" in render.doctor({"checks": checks})
    screen = top.picture(STATS, history, ["an event"], 60)
    assert max(len(line) for line in screen.split("\n")) <= 60
    assert "temperature" in screen


def test_an_hour_is_drawn_whole_in_one_line() -> None:
    """Of 360 figures each block is the mean of six, the newest whole."""
    values = [float(number // 6) for number in range(360)]
    assert render.blocks_of(values, 6) == [float(number) for number in range(60)]
    assert render.blocks_of([1.0, None, 3.0, None], 2) == [1.0, 3.0]
    shown = render.history({"step_s": 10, "series": {"temp_c": values}})
    assert "means of 60 s, newest right" in shown
    assert sum(shown.count(block) for block in render.BLOCKS) == 60
    assert "of all models" in render.stats(STATS)


def test_top_shows_what_is_now_beside_the_means() -> None:
    """A mean of ten seconds lags by degrees while a board heats up: it is not shown as of now."""
    history = {"step_s": 10, "series": {"temp_c": [50.0, 52.5], "duty": [0.5], "power_w": [9.0]}}
    lines = top.picture(STATS, history, [], 80).split("\n")
    head = next(line for line in lines if "means of 10 s, newest right" in line)
    assert head.split()[0] == "now"
    shown = {line.split()[0]: line.split()[1] for line in lines[lines.index(head) + 1 :] if line}
    assert shown == {"temperature": "61.0", "duty": "0.8", "power": "-"}  # no mean stands in


@pytest.mark.parametrize("value", [None, 0, 1.25])
def test_unknown_figures_are_dashes(value: float | None) -> None:
    assert render.number(value, "ms") == {None: "-", 0: "0 ms", 1.25: "1.2 ms"}[value]
