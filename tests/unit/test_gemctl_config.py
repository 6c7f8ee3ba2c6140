"""The configuration file: what its schema says of every key, and what is said of mistakes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemctl import config, config_words
from gemctl.config import Config, MqttConfig
from gemctl.errors import ApiError

SCHEMA: dict[str, Any] = Config.model_json_schema()
TABLES = {name: entry["$ref"].rpartition("/")[2] for name, entry in SCHEMA["properties"].items()}


def keys() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key with its entry in the schema; null, which means absent, left out."""
    for table, name in TABLES.items():
        for key, entry in SCHEMA["$defs"][name]["properties"].items():
            some = [one for one in entry.get("anyOf", []) if one["type"] != "null"]
            yield f"{table}.{key}", {**entry, **(some[0] if some else {})}


EVERY = dict(keys())


def has_range(entry: dict[str, Any]) -> bool:
    if entry["type"] == "boolean" or "enum" in entry or entry.get("format") == "path":
        return True
    if entry["type"] in ("integer", "number"):
        return bool({"minimum", "exclusiveMinimum"} & entry.keys()) and "maximum" in entry
    if entry["type"] == "array":
        return "maxItems" in entry and has_range(entry["items"])
    return bool({"maxLength", "pattern"} & entry.keys())


@pytest.mark.parametrize("key", EVERY)
def test_every_key_is_described(key: str) -> None:
    """Description, default, range; a number has a unit."""
    entry = EVERY[key]
    assert len(entry.get("description", "")) > 8, "no description"
    assert "default" in entry, "no default"
    assert has_range(entry), "no range"
    if entry["type"] in ("integer", "number"):
        assert entry.get("unit"), "no unit"
        suffix = {"_s": "s", "_c": "C", "_bytes": "bytes", "_mbps": "MB/s", "_c_per_w": "C/W"}
        ends = [unit for end, unit in suffix.items() if key.endswith(end)]
        assert entry["unit"] in ends or not ends, "its name says another unit"


def test_every_table_is_described() -> None:
    assert len(EVERY) > 50
    for table, name in TABLES.items():
        assert len(SCHEMA["properties"][table]["description"]) > 8
        about = SCHEMA["$defs"][name]
        assert "required" not in about
        assert about["additionalProperties"] is False
        assert ("A change needs a restart." in about["description"]) == (table in config.FIXED)


def said(text: str) -> str:
    with pytest.raises(ApiError) as caught:
        config.parse(text, Path("c.toml"))
    assert caught.value.code == "bad_request"
    assert "Value error" not in caught.value.message
    assert "Input should" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[throttle]\n\ntemp = 75\n", "3: throttle.temp: unknown key; did you mean temp_c?"),
        ("[throtle]\n", "1: throtle: unknown key; did you mean throttle?"),
        ("port = 1883\n", "1: port: unknown key; it belongs into the table [mqtt]"),
        ("[models]\ntemp_c = 7\n",
         "2: models.temp_c: unknown key; it belongs into the table [throttle]"),
        ("zzz = 1\n", "1: zzz: unknown key; leave it out; all keys: gemctl config schema"),
        ("[models]\nkeep = 40\n",
         "2: models.keep: 40 is out of range; give a whole number from 1 to 16 versions"),
        ("[models]\nkeep = true\n",
         "2: models.keep: true is no whole number; give a whole number from 1 to 16 versions"),
        ("models.keep = 0.5\n",
         "1: models.keep: 0.5 is no whole number; give a whole number from 1 to 16 versions"),
        ("[mqtt]\nport = '1883'\n",
         '2: mqtt.port: "1883" is no whole number; give a whole number from 1 to 65535'),
        ("mqtt = {write = 1}\n", "1: mqtt.write: 1 is no truth value; give true or false"),
        ("[worker]\n# hang_s\nhang_s = 0\n",
         "3: worker.hang_s: 0 is out of range; give a number above 0, at most 86400 s"),
        ("[worker]\nhang_s = nan\n",
         "2: worker.hang_s: NaN is no number; give a number above 0, at most 86400 s"),
        ("[throttle]\ntemp_c = '75'\n",
         '2: throttle.temp_c: "75" is no number; give a number from -40 to 150 C'),
        ("[throttle]\nmode = 'fast'\n",
         '2: throttle.mode: "fast" cannot be used; give one of "performance", "balanced", '
         '"aggressive", "conservative", "silent", "off"'),
        ("[daemon]\nsocket = 4\n", "2: daemon.socket: 4 is no text; give a path in quotes"),
        ("[mqtt]\ngroups = ['a', 'b c']\n",
         '2: mqtt.groups: "b c" cannot be used; give 1 to 64 letters, digits, _ and -'),
        ("[hooks]\nprobation_good = 'x'\n",
         '2: hooks.probation_good: "x" is no list; give a list of at most 64 texts, such as '
         '["a", "b"]'),
        ("[models]\nwarmup_prompt = '" + "x" * 5000 + "'\n",
         "2: models.warmup_prompt: 5000 are too many; give a text in quotes of at most 4096 "
         "characters"),
        ("mqtt = 5\n", "1: mqtt: 5 is no table; write [mqtt], and its keys below"),
        ("[mqtt]\nport = 1\n\nhost = 'far'\n",
         "4: mqtt.host: far is another machine and TLS is off; set tls = true or ca_file, or "
         "insecure = true on a network that you trust"),
        ("[mqtt]\ndevice = 'reply'\n",
         "2: mqtt.device: reply is a word of the topics; choose another name"),
        ("[mqtt]\nport =\n", "2: no TOML: invalid value (column 7); mend that line"),
        ("a = 1\na = 2\n", "2: no TOML: a key or table stands twice; leave one of them out"),
    ],
)  # fmt: skip
def test_sentences(text: str, sentence: str) -> None:
    assert said(text) == f"c.toml:{sentence}"


def test_what_cannot_be_placed_has_no_line() -> None:
    assert said('[mqtt]\n"po\\u0072t" = 0\n').startswith("c.toml: mqtt.port: 0 is out of range")
    assert said("a = 1\nb = '''\n").startswith("c.toml: no TOML: ")
    assert said("a = 1\nb = '''\n").endswith("; mend its end")
    assert said("[" * 20_000)


def test_every_mistake_has_its_line_and_they_ascend() -> None:
    text = "[mqtt]\nport = 0\nwrite = 2\n[models]\nkeep = 99\n[mqt]\n"
    lines = said(text).split("\n")
    assert [line.split(": ")[0] for line in lines] == [f"c.toml:{n}" for n in (2, 3, 5, 6)]
    many = said("".join(f"x{n} = 1\n" for n in range(20))).split("\n")
    assert len(many) == 9
    assert many[-1] == "c.toml: 12 more; mend these first"


def test_a_line_is_not_found_inside_of_a_value() -> None:
    text = '[models]\nwarmup_prompt = """\nkeep = 1\n[mqtt]\nport = 3\n"""\n# keep = 2\nkeep = 99\n'
    assert said(text).startswith("c.toml:8: models.keep: 99")
    text = '[mqtt]\ngroups = [ # port = 1\n  "a",\n  "b c", # groups = 2\n]\n"port" = 0\n'
    assert [line[:8] for line in said(text).split("\n")] == ["c.toml:2", "c.toml:6"]


def test_lines_of_random_files() -> None:
    """A wrong key is put anywhere into a good file; the line is always the right one."""
    chance = random.Random(7)
    good = {"daemon": "connections = 3", "models": "keep = 3", "mqtt": "port = 5\nwrite = true",
            "throttle": 'mode = "silent" # [mqtt]\ntemp_c = 3'}  # fmt: skip
    for _ in range(200):
        tables = chance.sample(sorted(good), 3)
        lines: list[str] = []
        for table in tables:
            lines += [f"[{table}]", *good[table].split("\n"), *[""] * chance.randrange(3)]
        at = chance.randrange(1, len(lines) + 1)
        lines.insert(at, "port_ = 1")
        assert said("\n".join(lines)).startswith(f"c.toml:{at + 1}: ")


def test_a_large_file_is_answered_soon() -> None:
    text = "".join(f"[t{n}]\nport = 1\n" for n in range(8000))
    began = time.monotonic()
    assert len(said(text).split("\n")) == 9
    assert time.monotonic() - began < 20


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"[throttle]\nmode = 'caf\xe9'\n")
    with pytest.raises(ApiError, match=r"c.toml:2: not UTF-8; save it as UTF-8"):
        config.load(path)
    path.write_bytes(b"#" * (config.MAX_BYTES + 1))
    with pytest.raises(ApiError, match=r"c.toml: more than 262144 bytes; shorten it"):
        config.load(path)
    with pytest.raises(ApiError, match=r"none: No such file or directory; name a file"):
        config.load(tmp_path / "none")
    path.write_text("[throttle]\ntemp_c = 75\n[models]\nprefault_mbps = 400\n", encoding="utf-8")
    found = config.load(path)
    assert (found.throttle.temp_c, found.models.prefault_mbps) == (75.0, 400.0)


def test_options_of_a_command_get_the_same_sentences() -> None:
    with pytest.raises(ValueError, match="another machine") as caught:
        MqttConfig(host="far.example")
    assert config_words.of_options(caught.value, MqttConfig) == (  # type: ignore[arg-type]
        "--host: far.example is another machine and TLS is off; give --ca-file, or --insecure on "
        "a network that you trust"
    )
    with pytest.raises(ValueError, match="pattern") as caught:
        MqttConfig(site="a/b")
    assert (
        config_words.of_options(caught.value, MqttConfig)  # type: ignore[arg-type]
        == '--site: "a/b" cannot be used; give 1 to 64 letters, digits, _ and -'
    )


def test_what_needs_a_restart() -> None:
    old = Config()
    new = config.parse("[mqtt]\nrequire_signed = true\n[throttle]\ntemp_c = 70\n", Path("x"))
    assert config.restart_needed(old, new) == ["mqtt.require_signed"]
