"""Words of gemctl's line and parameters of the daemon's methods: what is taken, and the sentences
on what is not."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from gemctl import asking, kinds, server, wording
from gemctl.api import METHODS, Api, EnableParams, GenerateParams, ThrottleParams
from gemctl.cli_commands import main
from gemctl.client import Refused
from gemctl.core import policy, throttle
from gemctl.errors import ApiError
from gemctl.kinds import Digest, Number, Word
from gemctl.service import Caller
from gemctl.show import render
from gemrun import console


def told(*words: str) -> Result:
    """A line for which no daemon is needed."""
    return CliRunner().invoke(main, ["--socket", "/nowhere", *words])


# ---- the line ----


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Number(0, 1, above=True, share=True), "50%", 0.5),
        (Number(0, 1, above=True, share=True), "0.5", 0.5),
        (Number(0, 1, above=True, share=True), "100 %", 1.0),
        (Number(-40, 150, "C", "°C"), "75C", 75.0),
        (Number(-40, 150, "C", "°C"), "75 °C", 75.0),
        (Number(-40, 150, "C", "°C"), "-5.5c", -5.5),
        (Number(0, 100, "%"), "5%", 5.0),
        (Number(1, 86400, "s"), "600s", 600.0),
        (Number(1, whole=True), "+7", 7),
        (Number(0, (1 << 64) - 1, whole=True), "18446744073709551615", (1 << 64) - 1),
        (Number(0, 100), "1e1", 10.0),
    ],
)
def test_numbers(kind: Number, text: str, value: float) -> None:
    found = kind.convert(text, None, None)
    assert (found, type(found)) == (value, type(value))


def test_digests_and_words() -> None:
    assert Digest().convert("SHA256:ABCDEF01", None, None) == "abcdef01"
    assert Word(["a", "b"]).convert("b", None, None) == "b"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("topp", "topp: no such command; did you mean gemctl top?"),
        ("switch a", "switch: no such command; did you mean gemctl model switch?"),
        ("list", "list: no such command; did you mean gemctl model list?"),
        ("replase x", "replase: no such command; did you mean gemctl model replace?"),
        ("xyzzy", "xyzzy: no such command; see gemctl --help"),
        ("model lisst", "model: lisst: no such command; did you mean gemctl model list?"),
        ("fleet rolout", "fleet: rolout: no such command; did you mean gemctl fleet rollout?"),
        ("stats --histroy", "stats: --histroy: no such option; did you mean --history?"),
        ("stats --jsn", "stats: --jsn: no such option; did you mean --json?"),
        ("--jsn stats", "--jsn: no such option; did you mean --json?"),
        ("model --replce x", "model: --replce: no such option; did you mean --replace?"),
        ("stats -z", "stats: -z: no such option; see gemctl stats --help"),
        ("info now", "info: now: too many words; usage: gemctl info [OPTIONS]"),
        ("throttle 75", "throttle: 75: too many words; did you mean --temp 75?"),
        ("throttle 75C", "throttle: 75C: too many words; did you mean --temp 75C?"),
        ("throttle silent", "throttle: silent: too many words; did you mean --mode silent?"),
        ("throttle 10m", "throttle: 10m: too many words; did you mean --for 10m?"),
        ("throttle 0.5",
         "throttle: 0.5: too many words; did you mean --temp 0.5 or --duty 0.5?"),
        ("throttle 75 80",
         "throttle: 75 80: too many words; usage: gemctl throttle [OPTIONS]"),
        ("model pin", "model pin: NAME is missing; usage: gemctl model pin [OPTIONS] NAME"),
        ("fleet rollout --name a",
         "fleet rollout: --digest is missing; see gemctl fleet rollout --help"),
        ("throttle --temp 500", "throttle: --temp: 500 is out of range; use -40 to 150"),
        ("throttle --temp 75F", "throttle: --temp: 75F is no number; use -40 to 150"),
        ("throttle --temp nan", "throttle: --temp: nan is no number; use -40 to 150"),
        ("throttle --duty 50",
         "throttle: --duty: 50 is out of range; use more than 0, up to 1, or up to 100%"),
        ("throttle --mode balanct",
         "throttle: --mode: balanct is none of performance, balanced, aggressive, conservative, "
         "silent, off; did you mean balanced?"),
        ("throttle --for 5m",
         "throttle: --for alone changes nothing; give it with --temp, --mode or --duty"),
        ("throttle --reset --temp 70 --for 5m",
         "throttle: --reset and --for exclude each other; reset first, then --for"),
        ("model --disable a",
         "model: a: no such command; did you mean gemctl model disable a?"),
        ("model --enable a", "model: a: no such command; did you mean gemctl model enable a?"),
        ("model replace --digest abcdef12 --name=",
         "model replace: --name: the name is empty; name a model, see gemctl model list"),
        ("generate x --model=",
         "generate: --model: the name is empty; name a model, see gemctl model list"),
        ("throttle --for soon", "throttle: --for: soon is no time; use 90s, 10m or 2h"),
        ("throttle --temp 70 --for 0s",
         "throttle: --for: 0s is out of range; use more than 0s, up to 7d"),
        ("throttle --temp 70 --for 8d",
         "throttle: --for: 8d is out of range; use more than 0s, up to 7d"),
        ("generate x --stop=",
         "generate: --stop: the text is empty; give at least one character"),
        (f"generate x --stop={'a' * 129}",
         "generate: --stop: 129 characters; give 128 at most"),
        (f"generate x{' --stop=a' * 9}",
         "generate: --stop: is given 9 times; give it 8 times at most"),
        (f"generate x{' --ban=1' * 257}",
         "generate: --ban: is given 257 times; give it 256 times at most"),
        (f"model enable a --warmup-prompt={'a' * 4097}",
         "model enable: --warmup-prompt: 4097 characters; give 4096 at most"),
        ("stats --seconds 1.5", "stats: --seconds: 1.5 is no whole number; use 1 to 3600"),
        ("generate x --seed -1",
         "generate: --seed: -1 is out of range; use 0 to 18446744073709551615"),
        ("generate x --min-p 1", "generate: --min-p: 1 is out of range; use 0 to less than 1"),
        ("top --interval 0", "top: --interval: 0 is out of range; use 0.2 to 60"),
        ("model priority a 10", "model priority: 10 is out of range; use 0 to 9"),
        ("model load a --digest zz",
         "model load: --digest: zz is no digest; use its first 8 digits (0-9 a-f) or more"),
        ("model replace", "model replace: give one of FILE and --digest"),
        ("model replace /nowhere",
         "model replace: /nowhere: no such file; name one that is there"),
        ("model --replace /", "model: --replace: / is a folder; name a file in it"),
        ("model stage /dev/null --name a",
         "model stage: /dev/null is no regular file; write it to one first"),
        ("model --serial",
         "model: --serial alone changes nothing; give it with --disable, --enable or --replace "
         "FILE"),
        ("model --name a list",
         "model: --name stands before the command list and does nothing there; put it behind, see "
         "gemctl model list --help"),
        ("completion csh", "completion: csh is none of bash, zsh, fish; did you mean zsh?"),
        ("generate",
         'generate: no prompt; give it in quotes: gemctl generate "Where is dock 4?"'),
        ("generate - x", "generate: - reads the prompt from stdin; give it alone"),
        ("fleet status --site a/b", 'fleet: --site: "a/b" cannot be used; give '
         "1 to 64 letters, digits, _ and -"),
    ],
)  # fmt: skip
def test_sentences_on_the_line(line: str, sentence: str) -> None:
    done = told(*line.split())
    assert (done.exit_code, done.output) == (2, f"gemctl: {sentence}\n")
    done = told("--json", *line.split())
    error = json.loads(done.output)["error"]
    assert (done.exit_code, error["code"], error["message"]) == (2, "bad_request", sentence)


def test_the_lines_limits_are_the_methods() -> None:
    """What the line lets through the daemon does not refuse in words of its own."""
    found = GenerateParams.model_json_schema()
    stop, banned = found["properties"]["stop"], found["properties"]["banned"]["anyOf"][0]
    assert (stop["items"]["minLength"], stop["items"]["maxLength"]) == (1, kinds.MOST_STOP)
    assert (stop["maxItems"], banned["maxItems"]) == (8, 256)
    assert found["properties"]["prompt"]["anyOf"][0]["maxLength"] == kinds.MOST_TEXT
    warmup = EnableParams.model_json_schema()["properties"]["warmup_prompt"]
    assert warmup["anyOf"][0]["maxLength"] == kinds.MOST_PROMPT
    for_s = ThrottleParams.model_json_schema()["properties"]["for_s"]["anyOf"][0]
    assert (for_s["exclusiveMinimum"], for_s["maximum"]) == (0, kinds.MOST_FOR_S)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\0b", "the prompt: a NUL character; leave it out"),
        ("a" * 200_001, "the prompt: 200001 characters; give 200000 at most"),
    ],
)
def test_a_prompt_that_no_engine_takes(text: str, said: str) -> None:
    done = CliRunner().invoke(main, ["--socket", "/nowhere", "generate", "-"], input=text)
    assert (done.exit_code, done.stderr) == (2, f"gemctl: generate: {said}\n")


def test_help_is_no_error() -> None:
    for words in (["--help"], ["model", "-h"], ["model", "replace", "-h"], ["throttle", "--help"]):
        done = told(*words)
        assert (done.exit_code, "Usage: gemctl" in done.stdout) == (0, True)


def groups(command: click.Command, *path: str) -> list[tuple[str, ...]]:
    """The words of a group and of all groups below it."""
    if not isinstance(command, click.Group):
        return []
    return [path, *(found for name, below in command.commands.items()
                    for found in groups(below, *path, name))]  # fmt: skip


@pytest.mark.parametrize("words", groups(main), ids=" ".join)
def test_a_group_by_itself_is_no_success(words: tuple[str, ...]) -> None:
    """A script's variable that is empty does not pass for done. People get the help."""
    done = told(*words)
    usage = " ".join(("Usage: gemctl", *words, "[OPTIONS]"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(usage)
    assert "Commands:" in done.stderr
    done = told("--json", *words)
    error = json.loads(done.stderr)["error"]
    place, path = "".join(f"{word}: " for word in words), " ".join(("gemctl", *words))
    assert (done.exit_code, done.stdout, error["code"]) == (2, "", "bad_request")
    assert error["message"] == f"{place}no command; see {path} --help"


def test_near_words() -> None:
    words = ["stats", "model", "model list", "model load", "fleet status"]
    assert console.nearest("list", words) == ["model list"]
    assert console.nearest("status", words) == ["fleet status"]
    assert console.nearest("stat", ["stats", "state", "other"]) == ["stats", "state"]
    assert console.nearest("xyzzy", words) == []
    assert console.did_you_mean(["a", "b"]) == " Did you mean 'a' or 'b'?"


# ---- prompts ----


class Terminal(io.StringIO):
    """A stdin that somebody types into."""

    def isatty(self) -> bool:
        return True


def prompt(*words: str) -> str:
    return asking.prompt_of(words)


def test_prompts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert prompt("Where is dock 4?") == "Where is dock 4?"
    assert prompt("Where", "is", "dock", "4?") == "Where is dock 4?"
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert prompt("-") == "from a pipe\n"
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stdin", Terminal("typed"))
    assert prompt("-") == "typed"
    assert "Ctrl-D" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("",), ("  ",), ("\n\n",), ("-",), (), ("pilot", "two words")])
def test_prompts_that_are_none(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(Refused) as refused:
        prompt(*words)
    assert refused.value.code == "bad_request"
    assert "; " in str(refused.value)


def test_a_stdin_that_is_no_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\xff\xfe")
    with path.open(encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        with pytest.raises(Refused, match="no UTF-8"):
            prompt("-")


# ---- parameters of methods ----

WRONG: list[Any] = [
    *(None, "x", "Foo Bar", "", True, -1, 0, 1.5, 1e9, 10**30, "\0", "x" * 300_000),
    *([], [1], [""], {}, {"a": 1}, [-1], [1] * 300, ["x"] * 300),
    *([{"role": "user"}], [{"role": "x", "text": "y"}], [{"role": "user", "text": "y", "z": 1}]),
]
PYTHON = ("should", "Input", "Value error", "valid", "str", "bool", "dict", "None", "instance", "'")


def refusal(method: str, params: dict[str, Any]) -> str:
    """What a daemon says to parameters that it does not take."""
    daemon: Any = SimpleNamespace(hub=None, models=None, config=None)
    with pytest.raises(ApiError) as refused:
        asyncio.run(Api(daemon).call(method, params, Caller("a test", True)))
    assert refused.value.code == "bad_request"
    return refused.value.message


def is_taken(method: str, params: dict[str, Any]) -> bool:
    try:
        METHODS[method].params.model_validate(params)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("method", METHODS)
def test_every_sentence_on_a_parameter_is_ours(method: str) -> None:
    fields = METHODS[method].params.model_fields
    good = {"name": "a", "prompt": "a", "id": "a", "on": True, "priority": 1}
    least = {key: value for key, value in good.items() if key in fields}
    if method == "generate":
        del least["priority"]
    cases = [{**least, key: value} for key in fields for value in WRONG]
    cases += [{**least, "nothing": 1}]
    cases += [{k: v for k, v in least.items() if k != key} for key in least]
    sentences = {refusal(method, case) for case in cases if not is_taken(method, case)}
    assert sentences
    for sentence in sentences:
        what, remedy = sentence.split("; ", 1) if "; " in sentence else (sentence, "give")
        assert what.startswith(f"{method}: "), sentence
        assert remedy, sentence
        assert len(sentence) < 400, sentence
        assert not [word for word in PYTHON if word in sentence.split()], sentence


@pytest.mark.parametrize(
    ("method", "params", "sentence"),
    [
        ("model.pin", {"nme": "a"}, "nme: is unknown; did you mean name?"),
        ("model.pin", {}, "name: is missing; give it"),
        ("model.load", {"name": "A"}, "name: A is no name; use a-z, 0-9 and . _ - (a letter or "
         "digit first), at most 64 characters"),
        ("model.priority", {"name": "a", "priority": 10},
         "priority: 10 is out of range; use 0 to 9"),
        ("model.priority", {"name": "a", "priority": "1"},
         "priority: is no whole number; use 0 to 9, without quotes"),
        ("throttle.set", {"duty": 0}, "duty: 0 is out of range; use more than 0, up to 1"),
        ("throttle.set", {"temp_c": "75"}, "temp_c: is no number; use -40 to 150, without quotes"),
        ("throttle.set", {"mode": "wild"}, "mode: wild is none of performance, balanced, "
         "aggressive, conservative, silent, off; use one of them"),
        ("generate", {"prompt": "a", "min_p": 1}, "min_p: 1 is out of range; use 0 to less than 1"),
        ("generate", {"prompt": "a", "banned": [1, -1]},
         "banned.1: -1 is out of range; use 0 to less than 4294967296"),
        ("generate", {"messages": [{"role": "user", "txt": "a"}]},
         "messages.0.txt: is unknown; did you mean text?"),
        ("generate", {}, "params: give one of prompt and messages"),
        ("doctor", {"x": 1}, "x: is unknown; leave it out"),
        ("kv.auto_reset", {"on": 1}, "on: is neither true nor false; give one of them, without "
         "quotes"),
        ("model.switch", {"name": ["a"]}, "name: is no text; put it in quotes"),
        ("events.follow", {"after": -1}, "after: -1 is out of range; use 0 or more"),
    ],
)  # fmt: skip
def test_sentences_on_parameters(method: str, params: dict[str, Any], sentence: str) -> None:
    assert refusal(method, params) == f"{method}: {sentence}"


def test_methods_that_are_none() -> None:
    assert refusal("model.lst", {}) == "model.lst: no such method; did you mean model.list?"
    assert refusal("rm", {}) == "rm: no such method; PROTOCOL.md has all of them"


def test_a_prompt_is_never_shown() -> None:
    secret = "what nobody else may read \0"
    for params in ({"prompt": secret}, {"prompt": "a", "stop": [secret]}):
        assert "nobody" not in refusal("generate", params)
    assert wording.shown("x" * 41) == wording.shown(["a"]) == ""


@pytest.mark.parametrize(
    ("line", "sentence", "number"),
    [
        (b'{"id":"7","method":"stats","parms":{}}',
         "request: 'parms' is unknown; did you mean params?", "7"),
        (b'{"id":"7","method":"stats","x":1}',
         "request: 'x' is unknown; it takes v, id, method, params", "7"),
        (b'{"id":7,"method":"stats"}',
         "request: 'id' is no text of 1 to 64 printable characters; set it", ""),
        (b'{"method":"stats"}',
         "request: 'id' is no text of 1 to 64 printable characters; set it", ""),
        (b'{"id":"7"}', "request: 'method' is no text; name one of PROTOCOL.md", "7"),
        (b'{"id":"7","method":"stats","params":[]}',
         "request: 'params' is no object; leave it out, or give one", "7"),
        (b'{"v":2,"id":"7","method":"stats"}', "request: version 2; this daemon speaks 1", "7"),
        (b'{"id":"7","id":"8"}',
         "request: no JSON: the key 'id' stands twice; send one object a line", ""),
        (b'{"id":', "request: no JSON: expecting value at character 7; send one object a line", ""),
        (b"\xff", "request: no JSON: no UTF-8 at byte 1; send one object a line", ""),
        (b"[" * 200_000,
         "request: no JSON: nested deeper than 16; send one object a line", ""),
        (b"[]", "request: no object; see PROTOCOL.md", ""),
    ],
)  # fmt: skip
def test_requests_that_are_none(line: bytes, sentence: str, number: str) -> None:
    with pytest.raises(ApiError) as refused:
        server.parse_line(line)
    assert refused.value.message == sentence
    assert getattr(refused.value, "number", "") == number


# ---- what is shown ----


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (throttle.Settings(temp_c=75.0, hw_passive_c=95.0), ""),
        (throttle.Settings(hw_passive_c=95.0), ""),
        (throttle.Settings(temp_c=75.0), ""),
        (throttle.Settings(temp_c=94.0, hw_passive_c=95.0),
         "94 C was asked for, but the limit here is 90 C, 5 C below the kernel's own"),
        (throttle.Settings("aggressive", temp_c=85.0, hw_passive_c=95.0, continuous_c=80.0),
         "85 C was asked for, but the limit here is 80 C, the board's for continuous load"),
        (throttle.Settings("silent", temp_c=75.0),
         "75 C was asked for, but the mode silent takes 10 C off"),
        (throttle.Settings("silent", temp_c=99.0, hw_passive_c=95.0),
         "99 C was asked for, but the limit here is 90 C, 5 C below the kernel's own and the mode "
         "silent takes 10 C off"),
        (throttle.Settings("off", temp_c=75.0),
         "75 C is kept, but the mode off watches nothing"),
        (throttle.Settings("performance", temp_c=75.0, hw_passive_c=95.0),
         "75 C is kept, but the mode performance leaves it to the kernel's own limit"),
    ],
)  # fmt: skip
def test_why_a_threshold_is_another(settings: throttle.Settings, words: str) -> None:
    assert policy.threshold_note(settings) == words
    lowered = throttle.threshold(settings)
    assert bool(words) == (settings.temp_c is not None and lowered != settings.temp_c)


STATUS: dict[str, Any] = {
    "name": "pilot", "digest": "ab" * 32, "current": "ab" * 32, "state": "serving", "bad": [],
    "on_probation": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        ({}, None, ""),
        ({"bad": [{"digest": "ab" * 32, "reason": "its worker ended"}], "digest": None}, "failed",
         "was rolled back: its worker ended; see gemctl events"),
        ({"digest": "cd" * 32}, "failed", "serves no longer"),
        ({"digest": None}, "failed", "serves no longer"),
        ({"current": None, "state": "disabled"}, "conflict", "its probation is not over"),
        ({"current": None}, "failed", "could not be written down"),
    ],
)  # fmt: skip
def test_how_a_probation_ends(status: dict[str, Any], code: str | None, words: str) -> None:
    found = asking.failure_of({**STATUS, **status}, "ab" * 32)
    assert (found.code if found is not None else None) == code
    assert words in str(found)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min"),
     (90_000, "1 d 1 h")],
)  # fmt: skip
def test_times_for_people(count: float, text: str) -> None:
    assert render.seconds(count) == text


def test_what_is_left_of_a_probation() -> None:
    left = {"probation_left_s": 41.7, "probation_left_requests": 17}
    assert render.probation(left) == "  probation  41 s left, or 17 more answers"
    assert render.left({"probation_left_s": None}) == "about to end"
    row = {"name": "pilot", "state": "serving", "active": True, "pinned": False, "digest": None,
           "memory_bytes": 0, "versions": 1, "priority": 1}  # fmt: skip
    assert "on probation, 41 s left" in render.models({"models": [{**row, **left}]})
    assert "probation" not in render.models({"models": [row]})


def test_history_has_units() -> None:
    series = {"temp_c": [50.0], "throughput_tps": [9.5], "power_w": [3.0]}
    lines = render.history({"step_s": 60, "series": series}).splitlines()
    assert lines[0].split()[:5] == ["series", "unit", "least", "most", "newest"]
    assert [line.split()[1] for line in lines[1:]] == ["C", "tokens/s", "W"]


def test_sizes() -> None:
    sizes = [render.mib(size) for size in (0, None, 94_208, 3 << 20)]
    assert sizes == ["-", "-", "92 KiB", "3 MiB"]
