"""Limits and words of the edges: what the system refuses, what a line may hold, who may connect,
files that are none, a disk that takes nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from gemctl import api, config, server, strict, wording
from gemctl.errors import ApiError, of_system
from gemctl.mqtt import client as mqtt_client
from gemctl.service import Caller
from gemctl.store import durable, state
from gemctl.store.state import ModelState, State, StateFile
from gemctl.store.store import Store

MIB = 1 << 20


# ---- what the system refuses ----


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "no_memory", "unload a model"),
        (MemoryError(), "no_memory", "x: out of memory; unload a model"),
        (OSError(errno.EMFILE, "Too many open files"), "busy", "LimitNOFILE"),
        (OSError(errno.ENFILE, "Too many open files in system"), "busy", "other programs"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "busy", "TasksMax"),
        (OSError(errno.ENOSPC, "No space left on device"), "no_space", "free room"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "no_space", "quota"),
        (OSError(errno.EROFS, "Read-only file system"), "no_space", "mount it writable"),
        (PermissionError(errno.EACCES, "Permission denied"), "failed", "Permission denied; see"),
        (TimeoutError(), "failed", "x: TimeoutError; see gemctl doctor"),
        (OSError("odd"), "failed", "x: odd; see gemctl doctor"),
    ],
)
def test_what_the_system_refuses_has_its_word(
    error: OSError | MemoryError, code: str, words: str
) -> None:
    told = of_system("x", error)
    assert told.code == code
    assert told.message.startswith("x: ")
    assert words in told.message


def test_a_method_tells_it_by_that_word(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    daemon: Any = SimpleNamespace(log=lines.append, attached_named=lambda name: None)

    def call(error: Exception) -> ApiError:
        async def refuse(*_: object) -> dict[str, Any]:
            raise error

        method = api.Method(api.NoParams, refuse, False)
        monkeypatch.setitem(api.METHODS, "stats", method)
        with pytest.raises(ApiError) as told:
            asyncio.run(api.Api(daemon).call("stats", {}, Caller("a test", True)))
        return told.value

    assert call(OSError(errno.EMFILE, "Too many open files")).code == "busy"
    assert call(MemoryError()).code == "no_memory"
    assert call(ValueError("secret")).code == "internal"
    assert "secret" not in call(ValueError("secret")).message
    assert len(lines) == 4


# ---- sentences ----


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    size: int = 1


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    named: dict[str, Inner] = {}
    listed: list[Inner] = []
    maybe: Inner | None = None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"named": {"a": {"size": "1"}}}, "named.a.size: is no whole number"),
        ({"named": {"a": {"sise": 1}}}, "named.a.sise: is unknown; did you mean size?"),
        ({"named": []}, "named: is no object; put it in { }"),
        ({"listed": [{"size": 1.5}]}, "listed.0.size: "),
        ({"maybe": {"x": 1}}, "maybe.x: is unknown; it takes size"),
        ({"named": {"a": {"size": "1"}}, "nmed": {}}, "nmed: is unknown; did you mean named?"),
    ],
)
def test_sentences_on_what_lies_inside(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as wrong:
        Outer.model_validate(given)
    assert wording.first(wrong.value, Outer).startswith(sentence)


def test_a_state_that_cannot_be_is_told_in_our_words() -> None:
    with pytest.raises(ApiError) as told:
        state.with_model(State(), "pilot", priority=10)
    assert told.value.message == "model 'pilot': priority: 10 is out of range; use 0 to 9"
    with pytest.raises(ApiError, match=r"^throttle: duty: 2 is out of range; use more than 0"):
        state.with_throttle(State(), duty=2)
    table = {"schema": 1, "models": {"pilot": {"priority": "high"}}}
    with pytest.raises(ValueError, match=r"models\.pilot\.priority: is no whole number; use 0"):
        state.unpack(json.dumps(table).encode())


# ---- JSON ----


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b'{"a":' * 17 + b"1" + b"}" * 17, "nested deeper than 16"),
        (b"[" * 200_000 + b"]" * 200_000, "nested deeper than 16"),
        (b'{"a":' + b"1" * 21 + b"}", "more than 20 digits"),
        (b'{"a":-' + b"1" * 21 + b"}", "more than 20 digits"),
        (b'{"a":1e309}', "too large"),
        (b'{"a":NaN}', "NaN is no JSON"),
        (b'{"a":1,"a":2}', "the key 'a' stands twice"),
        (b'{"a":\xff}', "utf-8"),
        (b'{"a"', "delimiter"),
    ],
)
def test_json_has_limits(data: bytes, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        strict.loads(data)


def test_json_up_to_its_limits() -> None:
    deepest = b'{"a":' * 16 + b"1" + b"}" * 16
    assert strict.loads(deepest)
    assert strict.loads(b'{"a":-' + b"9" * 20 + b"}") == {"a": -int("9" * 20)}
    assert strict.loads(b'{"a":"[[[[[[[[[[[[[[[[[[[[[[\\"{{{{"}')
    assert strict.loads(b"1.5e308") == 1.5e308


@pytest.mark.parametrize("number", ["\\ud800", "a\\udfff", "x" * 65, ""])
def test_an_id_comes_back_as_it_was(number: str) -> None:
    with pytest.raises(server.Misread) as wrong:
        server.parse_line(f'{{"id":"{number}","method":"stats"}}'.encode())
    assert wrong.value.number == ""
    whole = server.parse_line(b'{"id":"\\ud83d\\ude00","method":"stats"}')
    assert whole["id"] == "\N{GRINNING FACE}"


# ---- who may connect ----


class Full(server.Server):
    """One with connections that are open."""

    def __init__(self, most: int, users: dict[int, int]) -> None:
        settings = config.DaemonConfig(connections=most)
        nothing: Any = None
        super().__init__(nothing, settings, nothing, nothing)
        kept: Any = self._tasks
        for user, count in users.items():
            kept.update({object(): user for _ in range(count)})

    def word(self, uid: int, read: bool = True) -> str:
        refusal = self._refusal(uid, read)
        return "" if refusal is None else refusal.code


def test_no_user_takes_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 990)
    assert Full(64, {1000: 31}).word(1000) == ""
    assert Full(64, {1000: 32}).word(1000) == "busy"
    assert Full(64, {1000: 32}).word(1001) == ""
    crowded = {1000: 30, 1001: 30}
    assert Full(64, crowded).word(1002) == "busy"
    for own in (0, 990):
        assert Full(64, crowded).word(own) == ""
        assert Full(64, {**crowded, own: 3}).word(own) == ""
        assert Full(64, {**crowded, own: 4}).word(own) == "busy"
        assert Full(64, {own: 63}).word(own) == ""
        assert Full(64, {own: 64}).word(own) == "busy"
        assert Full(64, {own: 64}).word(1000) == "busy"
    assert Full(64, {}).word(1000, read=False) == "forbidden"
    assert Full(1, {}).word(1000) == ""


# ---- files that are none ----


def ends(work: Callable[[], Any]) -> Any:
    """Its result; a failed test where it waits for somebody."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except ApiError as error:
            found.append(error.message)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert found, "it waits"
    return found[0]


def test_a_pipe_is_no_configuration_for_the_daemon(tmp_path: Path) -> None:
    pipe = tmp_path / "c.toml"
    os.mkfifo(pipe)
    said = ends(lambda: config.load(pipe))
    assert said == f"{pipe}: is no regular file; name a file that can be read"
    assert ends(lambda: config.load(tmp_path)).startswith(f"{tmp_path}: Is a directory; ")


def test_a_pipe_is_no_password_and_no_key(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    said = ends(lambda: mqtt_client._password(pipe))
    assert said.startswith(f"mqtt.password_file: {pipe}: is no regular file; ")
    good = tmp_path / "good"
    good.write_text("word\r\nmore\n", encoding="utf-8")
    assert mqtt_client._password(good) == "word"
    for name in ("ca_file", "cert_file"):  # what was one when the configuration was read
        found = config.MqttConfig.model_construct(host="b", tls=True, **{name: pipe})
        assert "is no regular file" in ends(lambda found=found: mqtt_client._tls(found))


def test_a_file_is_read_so_far_and_through_links(tmp_path: Path) -> None:
    (tmp_path / "long").write_bytes(b"x" * 100_000)
    (tmp_path / "link").symlink_to("long")
    assert durable.read_plain(tmp_path / "link", 70_000) == b"x" * 70_000
    words = {Path("/dev/zero"): "no regular file", tmp_path: "directory", tmp_path / "x": "No such"}
    for path, what in words.items():
        with pytest.raises(OSError, match=what):
            durable.read_plain(path, 10)


# ---- the configuration ----


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f'[daemon]\nsocket = "/{"x" * 107}"\n', "its path is longer than 107 bytes"),
        ('[metrics]\nlisten = "0.0.0.0:9464"\n', "other machines could reach it"),
        ('[metrics]\nlisten = "nonsense"\n', "not an address and a port; use 127.0.0.1:PORT"),
        (f'[metrics]\nlisten = "unix:/{"x" * 107}"\n', "no absolute path of at most 107 bytes"),
        ('[sensors]\nexternal = ["cpu"]\n', "write hwmon:, iio:, file: or mqtt:"),
        ('[sensors]\nexternal = ["file:relative"]\n', "not an absolute path"),
    ],
)
def test_what_the_daemon_would_refuse_is_a_mistake_in_the_file(text: str, words: str) -> None:
    with pytest.raises(ApiError) as wrong:
        config.parse(text, Path("c.toml"))
    assert wrong.value.message.startswith("c.toml:2: ")
    assert words in wrong.value.message


def test_the_longest_paths_that_a_socket_can_have() -> None:
    path = "/" + "x" * 106
    found = config.parse(f'[daemon]\nsocket = "{path}"\n', Path("c.toml"))
    assert len(os.fsencode(found.daemon.socket)) == config.SOCKET_MOST
    assert config.parse_listen(f"unix:{path}") == Path(path)
    found = config.parse('[metrics]\nlisten = "[::1]:0"\n', Path("c.toml"))
    assert config.parse_listen(found.metrics.listen) == ("::1", 0)


def test_large_limits_are_told_to_the_digit() -> None:
    with pytest.raises(ApiError, match=f"from 0 to {1 << 50}"):
        config.parse(f"[models]\nmemory_most_bytes = {1 << 51}\n", Path("c.toml"))


# ---- a disk that takes nothing ----


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """While its entry is true, no file can be written."""
    switch, write = [True], durable.write_file

    def refuse(*given: Any, **more: Any) -> None:
        if switch[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*given, **more)

    monkeypatch.setattr(durable, "write_file", refuse)
    return switch


def test_what_is_insisted_on_is_written_when_the_disk_takes_it(
    tmp_path: Path, full: list[bool]
) -> None:
    wanted = State(models={"a": ModelState(priority=3)})
    with StateFile(tmp_path, lambda: 0.0) as file:
        assert file.problem == ""
        with pytest.raises(ApiError):
            file.save(wanted)
        assert (file.waiting, file.problem) == (False, "")
        with pytest.raises(ApiError):
            file.save(wanted, insist=True)
        assert file.waiting
        assert "No space left" in file.problem
        other = State(models={"b": ModelState()})
        with pytest.raises(ApiError):
            file.save(other)  # it does not take the place of what waits
        full[0] = False
        assert file.flush()
        assert (file.waiting, file.problem) == (False, "")
    again = StateFile(tmp_path)
    assert again.load().state == wanted
    again.close()


def test_a_model_is_forgotten_without_room_for_a_byte(tmp_path: Path, full: list[bool]) -> None:
    with Store(tmp_path) as store:
        full[0] = False
        digests = []
        for number in range(3):
            path = tmp_path / f"{number}"
            path.write_bytes(bytes([number]) * 5000)
            with path.open("rb") as stream:
                digests.append(store.stage("pilot", stream.fileno(), size_most=MIB).digest)
        store.mark_good("pilot", digests[0])
        store.mark_good("pilot", digests[1])
        store.mark_bad("pilot", "f" * 64, "wrong answers")
        full[0] = True
        store.forget("pilot")
        assert store.names() == ()
        assert not (tmp_path / "models" / "pilot").exists()
        with pytest.raises(ApiError) as gone:
            store.forget("pilot")
        assert gone.value.code == "not_found"
