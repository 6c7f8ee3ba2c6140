"""The command's line, texts and exit codes, without a daemon."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gemctl import asking
from gemctl.cli import main
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
        ("--no-auto-reset-kv-cache", ["throttle"], False, False, None),
        ("generate -- --json", ["generate", "--", "--json"], False, None, None),
    ],
)  # fmt: skip
def test_options_may_stand_anywhere(
    line: str, rest: list[str], json_: bool, reset: bool | None, external: str | None
) -> None:
    session, found = asking.take_options(line.split())
    assert (found, session.json) == (rest, json_)
    assert (session.auto_reset, session.external) == (reset, external)


def test_no_daemon_is_one_sentence_and_code_3(tmp_path: Path) -> None:
    for words in (["stats"], ["model", "--disable"], ["generate", "x"], ["switch-model", "a"]):
        done = CliRunner().invoke(main, ["--socket", str(tmp_path / "none"), *words])
        assert done.exit_code == 3, done.output
        assert "start gemctld" in done.output
        assert "Traceback" not in done.output


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
    assert asking.seconds_of(text) == seconds


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


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str) -> None:
    script = CliRunner().invoke(main, ["completion", shell]).output
    assert "_GEMCTL_COMPLETE" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script.encode(), check=True)


def test_completion_offers_the_commands() -> None:
    environment = {**os.environ, "_GEMCTL_COMPLETE": "bash_complete", "COMP_WORDS": "gemctl mo",
                   "COMP_CWORD": "1", "PYTHONPATH": str(ROOT)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "from gemctl.cli import main; main(prog_name='gemctl')"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "plain,model" in done.stdout


def test_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys, gemctl.cli; heavy = ('pydantic', 'asyncio', 'aiomqtt', 'gemctl.config'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import gemctl.cli"], cwd=ROOT, check=True)
    print(f"import of the command: {(time.monotonic() - began) * 1e3:.0f} ms")


def test_texts_for_people() -> None:
    text = render.stats(STATS)
    assert "101.2 tokens/s" in text
    assert "in 30 s 74.2 C" in text
    history = {"step_s": 10, "series": {"temp_c": [50.0, None, 60.0], "empty": [None]}}
    assert "▁ █" in render.history(history)
    assert "nothing yet" in render.history({"step_s": 10, "series": {}})
    checks = [{"level": "bad", "name": "worker", "text": "not found"}]
    assert "✗ worker" in render.doctor({"checks": checks})
    screen = top.picture(STATS, history, ["an event"], 60)
    assert max(len(line) for line in screen.split("\n")) <= 60
    assert "temperature" in screen


@pytest.mark.parametrize("value", [None, 0, 1.25])
def test_unknown_figures_are_dashes(value: float | None) -> None:
    assert render.number(value, "ms") == {None: "-", 0: "0 ms", 1.25: "1.2 ms"}[value]
