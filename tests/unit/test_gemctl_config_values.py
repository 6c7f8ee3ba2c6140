"""Values that no configuration can mean: each is refused with file, line, key and remedy."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from gemctl import config, config_checks, config_words
from gemctl.cli_commands import main
from gemctl.config import Config, MqttConfig
from gemctl.errors import ApiError

NUL = "\\u0000"
PATHS = (
    *("daemon.socket", "daemon.state", "models.keys_dir", "sensors.sysfs_root"),
    *("sensors.powerd_socket", "mqtt.password_file", "mqtt.ca_file", "mqtt.cert_file"),
    "mqtt.key_file",
)
FOLDERS = ("daemon.state", "models.keys_dir", "sensors.sysfs_root")
SOCKETS = ("daemon.socket", "sensors.powerd_socket")
FILES = ("mqtt.password_file", "mqtt.ca_file", "mqtt.cert_file", "mqtt.key_file")
TEXTS = (
    *("daemon.read_group", "daemon.write_group", "worker.program", "models.warmup_prompt"),
    *("mqtt.host", "mqtt.site", "mqtt.device", "mqtt.username", "metrics.listen"),
)
LISTS = ("sensors.zones", "sensors.external", "mqtt.groups")
COMMANDS = ("hooks.probation_good", "hooks.probation_bad")


def said(key: str, value: str) -> str:
    """What is said of a value (in TOML) of a key that stands in line 3."""
    table, _, name = key.partition(".")
    more = 'tls = true\nusername = "m1"\ncert_file = "/none"\n' if table == "mqtt" else ""
    if name == "cert_file":
        more = more.replace('cert_file = "/none"\n', "")
    more = more.replace('username = "m1"\n', "") if name == "username" else more
    text = f"# a comment\n[{table}]\n{name} = {value}\n{more}"
    with pytest.raises(ApiError) as caught:
        config.parse(text, Path("c.toml"))
    message = caught.value.message
    assert caught.value.code == "bad_request"
    assert message.startswith(f"c.toml:3: {key}: "), message
    assert "; " in message
    assert "\n" not in message
    assert "\0" not in message
    return message


def test_every_key_is_one_of_these() -> None:
    """Whoever adds a text, a path or a list decides here what it may be."""
    known = {*PATHS, *TEXTS, *LISTS, *COMMANDS}
    schema = Config.model_json_schema()
    found = set()
    for table, entry in schema["properties"].items():
        properties = schema["$defs"][entry["$ref"].rpartition("/")[2]]["properties"]
        for name, one in properties.items():
            some = next(kind for kind in one.get("anyOf", [one]) if kind.get("type") != "null")
            if some["type"] in ("string", "array") and "enum" not in some:
                found.add(f"{table}.{name}")
    assert found == known
    assert set(PATHS) == {*FOLDERS, *SOCKETS, *FILES}


@pytest.mark.parametrize("key", PATHS)
def test_paths(key: str, tmp_path: Path) -> None:
    assert "is relative; write it from / on" in said(key, '"state"')
    assert "is relative; write it from / on" in said(key, '"./a/b"')
    assert '"" is no path; write one that begins with /' in said(key, '""')
    assert "control character" in said(key, f'"/a{NUL}b"')
    assert "control character" in said(key, '"/a\\nb"')
    deep = "/" + "/".join(["x" * 200] * 30)
    long = "longer than 107 bytes" if key in SOCKETS else "longer than 4095 bytes"
    assert long in said(key, f'"{deep}"')
    plain, folder = tmp_path / "plain", tmp_path / "folder"
    plain.write_text("", encoding="utf-8")
    folder.mkdir()
    wrong = folder if key in FILES else plain
    kind = "folder" if key in FOLDERS else "regular file" if key in FILES else "socket"
    assert f"is no {kind}; name one" in said(key, f'"{wrong}"')


@pytest.mark.parametrize("key", FILES)
@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device_is_no_file(key: str, path: str) -> None:
    assert f'"{path}" is no regular file; name one' in said(key, f'"{path}"')


@pytest.mark.parametrize("key", TEXTS)
def test_texts(key: str) -> None:
    message = said(key, f'"a{NUL}b"')
    assert any(word in message for word in ("NUL", "control character", "cannot be used")), message
    if key != "models.warmup_prompt":
        assert said(key, '"a\\nb"')


@pytest.mark.parametrize("key", LISTS)
def test_lists(key: str) -> None:
    assert said(key, '[""]')
    assert said(key, f'["a{NUL}b"]')


@pytest.mark.parametrize("key", COMMANDS)
def test_commands(key: str) -> None:
    assert '"" is an empty word; leave it out' in said(key, '[""]')
    assert '" " is an empty word; leave it out' in said(key, '["logger", " "]')
    assert "NUL character" in said(key, f'["logger", "a{NUL}"]')
    assert '"bin/x" is relative' in said(key, '["bin/x"]')
    assert "is no program that can be run; name one, or chmod +x it" in said(key, '["/etc/passwd"]')
    found = config.parse('[hooks]\nprobation_bad = ["logger", "-t", "x\\ny"]\n', Path("c.toml"))
    assert found.hooks.probation_bad == ("logger", "-t", "x\ny")


def test_the_engine_s_program() -> None:
    assert said("worker.program", '""').endswith(
        '"" is an empty text; write a word, or leave it out'
    )
    assert "is relative" in said("worker.program", '"bin/gemrun"')
    for place in ("/etc/passwd", "/etc", "/dev/null"):
        assert "is no program that can be run" in said("worker.program", f'"{place}"')
    for good in ("gemrun", "/bin/sh", "/opt/not/there/yet"):
        found = config.parse(f'[worker]\nprogram = "{good}"\n', Path("c.toml"))
        assert found.worker.program == good


@pytest.mark.parametrize(
    ("host", "what"),
    [
        ("mqtt://broker", "is no host; write its name or address alone"),
        ("broker/x", "is no host; write its name or address alone"),
        ("broker:1883", "is a host with a port; put the number into port"),
        ("a b", "is no name and no address of a host"),
        ("-a", "is no name and no address of a host"),
        ("a..b", "is no name and no address of a host"),
        ("256.1.1.1", "is no address; write four numbers from 0 to 255"),
        ("10.0.1", "is no address; write four numbers from 0 to 255"),
    ],
)
def test_hosts(host: str, what: str) -> None:
    assert what in said("mqtt.host", f'"{host}"')


@pytest.mark.parametrize(
    "host",
    ["", "localhost", "broker.plant.example", "broker-2", "my_box", "10.0.0.7", "::1", "fe80::1",
     "büro.example", "broker.example."],
)  # fmt: skip
def test_hosts_that_there_may_be(host: str) -> None:
    assert MqttConfig(host=host, insecure=True).host == host


def test_only_this_machine_goes_without_tls() -> None:
    for host in ("localhost", "127.0.0.1", "127.8.0.1", "::1"):
        assert MqttConfig(host=host).host == host
    for host in ("127.example.com", "127-0.example"):
        with pytest.raises(ValueError, match="TLS is off"):
            MqttConfig(host=host)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[worker]\nhang_s = 1\n",
         '2: worker.hang_s: "1" is no more than heartbeat_s (1); give more'),
        ("[worker]\n\nheartbeat_s = 30\n",
         '3: worker.heartbeat_s: "20" is no more than heartbeat_s (30); give more'),
        ("[worker]\nbackoff_s = 31\n",
         '2: worker.backoff_s: "30" is less than backoff_s (31); give more'),
        ("[mqtt]\ncert_file = '/a'\n",
         '2: mqtt.cert_file: "/a" means TLS, which is off; set tls = true or ca_file'),
        ("[mqtt]\ntls = true\nkey_file = '/a'\n",
         '3: mqtt.key_file: "/a" is the key of no certificate; set cert_file'),
        ("[mqtt]\npassword_file = '/a'\n",
         '2: mqtt.password_file: "/a" is the password of nobody; set username'),
        ("[daemon]\nsocket = '/a'\nstate = '/a'\n",
         '2: daemon.socket: "/a" is daemon.state already; use another path'),
        ("[daemon]\nstate = '/run/gemctl/./gemctl.sock'\n",
         '2: daemon.state: "/run/gemctl/gemctl.sock" is daemon.socket already; use another path'),
        ("[sensors]\npowerd_socket = '/a'\n[metrics]\nlisten = 'unix:/a'\n",
         '4: metrics.listen: "/a" is sensors.powerd_socket already; use another path'),
        ("[metrics]\nlisten = 'unix:/etc/passwd'\n",
         '2: metrics.listen: "/etc/passwd" is no socket; name one'),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(text: str, sentence: str) -> None:
    with pytest.raises(ApiError) as caught:
        config.parse(text, Path("c.toml"))
    assert caught.value.message == f"c.toml:{sentence}"


def test_what_is_not_there_yet_is_no_mistake() -> None:
    text = "[daemon]\nstate = '/none/s'\nsocket = '/none/x'\n[models]\nkeys_dir = '/none/k'\n"
    text += "[mqtt]\nusername = 'a'\npassword_file = '/none/p'\n"
    assert config.parse(text, Path("c.toml")).daemon.state == Path("/none/s")


def test_the_fleet_s_options_get_the_same_sentences() -> None:
    with pytest.raises(ValueError, match="password") as caught:
        MqttConfig(password_file=Path("/a"))
    assert config_words.of_options(caught.value, MqttConfig) == (  # type: ignore[arg-type]
        '--password-file: "/a" is the password of nobody; give --username'
    )


def test_a_path_of_the_fleet_s_line_may_be_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemctl import asking

    monkeypatch.chdir(tmp_path)
    Path("p").write_text("x", encoding="utf-8")
    found = asking.broker(host="localhost", username="a", password_file="p", ca_file=None)
    assert found.password_file == tmp_path / "p"


@pytest.mark.parametrize("writer", [False, True])
def test_a_pipe_is_refused_at_once(tmp_path: Path, writer: bool) -> None:
    """With nobody at its other end, and with somebody who writes nothing."""
    pipe = tmp_path / "c.toml"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR) if writer else -1
    found = []

    def check() -> None:
        found.append(CliRunner().invoke(main, ["config", "check", str(pipe)]))

    thread = threading.Thread(target=check, daemon=True)
    thread.start()
    thread.join(30)
    if writer:
        os.close(held)
    assert found, "it waits"
    assert found[0].exit_code == 2
    assert f"{pipe}: is no regular file; name a file that can be read" in found[0].output


def test_words_of_a_value_are_cut() -> None:
    error = config_checks.wrong("x" * 500, "is wrong; mend it")
    assert len(error.message()) < 200
