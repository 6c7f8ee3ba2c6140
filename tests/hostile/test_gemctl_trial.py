"""What a trial by an attacker of the socket and the store, and by a new user, has found: each is
one test with what is right, against a real gemctld."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon import OPTIONS, ROOT, Daemon, answer_of, settled, wait_for
from gemctl.api import NOT_ATTACHED
from gemctl.client import Refused
from gemctl.server import LINE_MOST

PROMPT = "abc"


@pytest.fixture
def daemon(versions: tuple[Path, Path]) -> Iterator[Daemon]:
    """The first version is good."""
    with Daemon() as made:
        made.replace(versions[0], name="pilot")
        settled(made)
        yield made


def refusal(daemon: Daemon, method: str, fd: int | None = None, **params: Any) -> Refused:
    with pytest.raises(Refused) as error:
        daemon.call(method, fd, **params)
    return error.value


def connect(daemon: Daemon) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
    sock.connect(str(daemon.socket))
    return sock


def reply(sock: socket.socket) -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n") and (more := sock.recv(1 << 16)):
        data += more
    found: dict[str, Any] = json.loads(data)
    return found


# ---- a program that attached itself ----


class Engine:
    """A program that attaches itself under a name, and answers nothing."""

    def __init__(self, daemon: Daemon, name: str) -> None:
        self.sock = connect(daemon)
        line = {"id": "1", "method": "attach", "params": {"name": name}}
        self.sock.sendall(json.dumps(line).encode() + b"\n")
        self.welcome = reply(self.sock)
        body = json.dumps({"event": "ready", "id": 0, "enabled": True, "ram_total": 1}).encode()
        if "result" in self.welcome:
            self.sock.sendall(struct.pack("<I", len(body)) + body)
            wait_for(lambda: name in daemon.call("daemon.info")["attached"])

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


def test_a_program_takes_no_method_of_a_model(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    more = {
        "model.pin": {"pinned": True}, "model.priority": {"priority": 2},
        "generate": {"prompt": PROMPT, "model": "line-3"},
    }  # fmt: skip
    with Engine(daemon, "line-3"):
        for method in sorted(NOT_ATTACHED):
            params = {"name": "line-3", **more.get(method, {})}
            if method == "generate":
                del params["name"]
            error = refusal(daemon, method, **params)
            assert error.code == "conflict", method
            assert str(error).startswith("line-3: is an attached program; ")
        state = json.loads((daemon.folder / "state/state.json").read_text(encoding="utf-8"))
        assert set(state["models"]) == {"pilot"}
        with Engine(daemon, "pilot") as second:
            assert second.welcome["error"]["code"] == "conflict"
        with Engine(daemon, "line-3") as second:
            assert "is attached" in second.welcome["error"]["message"]
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


def test_what_is_staged_for_a_program_is_no_model(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    """Neither before it attaches itself nor behind."""

    def rows() -> list[tuple[str, bool]]:
        found = daemon.call("model.list")["models"]
        return [(row["name"], bool(row.get("attached"))) for row in found]

    with versions[1].open("rb") as stream:
        daemon.call("model.stage", stream.fileno(), name="line-3")
    with Engine(daemon, "line-3"):
        assert rows() == [("pilot", False), ("line-3", True)]
        with versions[0].open("rb") as stream:
            daemon.call("model.stage", stream.fileno(), name="line-3")
        assert rows() == [("pilot", False), ("line-3", True)]
        assert refusal(daemon, "model.load", name="line-3").code == "conflict"


# ---- the store ----


def cut(data: bytes, _other: bytes) -> bytes:
    return data[:5000]


def flipped(data: bytes, _other: bytes) -> bytes:
    """A bit of the weights: the header is good."""
    at = 3 * len(data) // 4
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def swapped(_data: bytes, other: bytes) -> bytes:
    """Another artifact, good in itself."""
    return other


@pytest.mark.parametrize("damage", [cut, flipped, swapped])
def test_a_damaged_version_gives_way_to_the_good_one_before_it(
    daemon: Daemon, versions: tuple[Path, Path], damage: Callable[[bytes, bytes], bytes]
) -> None:
    first = daemon.call("model.status", name="pilot")["digest"]
    second = daemon.replace(versions[1], name="pilot")["digest"]
    assert settled(daemon)["current"] == second
    daemon.stop()
    path = daemon.folder / "state/models/pilot" / f"{second}.gembin"
    path.chmod(0o644)
    path.write_bytes(damage(path.read_bytes(), versions[0].read_bytes()))
    daemon.start()
    wait_for(lambda: daemon.call("model.status", name="pilot")["state"] == "serving")
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)
    assert daemon.call("model.status", name="pilot")["digest"] == first
    told = [one["text"] for one in daemon.call("doctor")["checks"] if one["name"] == "daemon"]
    assert len(told) == 1
    assert told[0].startswith(f"pilot: {second[:12]} was not loaded: ")
    assert told[0].endswith(f"{first[:12]} serves instead, stage the other one again")
    assert daemon.replace(versions[1], name="pilot")["digest"] == second  # over the damaged one
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[1], PROMPT)


def test_where_no_version_is_good_the_reason_is_told(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    digest = daemon.call("model.status", name="pilot")["digest"]
    daemon.stop()
    path = daemon.folder / "state/models/pilot" / f"{digest}.gembin"
    path.chmod(0o644)
    path.write_bytes(b"GEMB")
    daemon.start()
    wait_for(lambda: "pilot: was not loaded: " in daemon.log.read_text(encoding="utf-8"))
    assert refusal(daemon, "generate", prompt=PROMPT).code == "conflict"
    daemon.replace(versions[0], name="pilot")
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


def test_a_model_is_removed_with_all_that_is_known_of_it(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    """Also where another one has the same version, and where a version was bad."""
    daemon.replace(versions[0], name="spare")
    settled(daemon, "spare")
    bad = daemon.replace(versions[1], name="spare")["digest"]
    daemon.call("model.rollback", name="spare")
    error = refusal(daemon, "model.remove", name="spare")
    assert (error.code, str(error)) == (
        "conflict", "spare: is loaded; gemctl model unload spare first",
    )  # fmt: skip
    daemon.call("model.unload", name="spare")
    daemon.call("model.remove", name="spare")
    assert [row["name"] for row in daemon.call("model.list")["models"]] == ["pilot"]
    assert not (daemon.folder / "state/models/spare").exists()
    assert refusal(daemon, "model.status", name="spare").code == "not_found"
    assert daemon.replace(versions[1], name="spare")["digest"] == bad  # nothing is held against it
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


def test_a_bad_first_version_leaves_a_name_that_can_be_cleared(
    versions: tuple[Path, Path],
) -> None:
    with Daemon(models={"probation_s": 60.0, "probation_requests": 1000}) as daemon:
        digest = daemon.replace(versions[0], name="pilot")["digest"]
        os.kill(daemon.workers()[0], signal.SIGKILL)
        wait_for(lambda: daemon.events("probation.bad"))
        wait_for(lambda: not daemon.workers())
        assert "bad" in str(refusal(daemon, "model.load", name="pilot", digest=digest))
        assert "cleared" in daemon.gemctl("model", "clear", "pilot")
        assert refusal(daemon, "model.clear", name="pilot").code == "conflict"
        daemon.replace(versions[0], name="pilot")
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


def test_a_staging_that_is_refused_leaves_nothing_and_is_no_mark(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    """The key may come later."""
    with Daemon(models={"signature": "required", "keys_dir": str(tmp_path)}) as daemon:
        with versions[0].open("rb") as stream:
            error = refusal(daemon, "model.stage", stream.fileno(), name="pilot")
        assert error.code == "refused"
        assert daemon.call("model.list")["models"] == []
        wait_for(lambda: not list((daemon.folder / "state/models").iterdir()))
        text = daemon.config.read_text(encoding="utf-8").replace('"required"', '"off"')
        daemon.config.write_text(text, encoding="utf-8")
        daemon.call("config.reload")
        with versions[0].open("rb") as stream:
            digest = daemon.call("model.stage", stream.fileno(), name="pilot")["digest"]
        daemon.call("model.replace", name="pilot", digest=digest)
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


# ---- a disk that takes nothing ----


@contextlib.contextmanager
def no_disk(daemon: Daemon) -> Iterator[Path]:
    """A folder in the place of state.json: nothing can be renamed to it."""
    path = daemon.folder / "state/state.json"
    kept = path.read_bytes()
    path.unlink()
    path.mkdir()
    try:
        yield path
    finally:
        path.rmdir()
        path.write_bytes(kept)


def test_a_throttle_that_cannot_be_written_holds_and_says_so(daemon: Daemon) -> None:
    with no_disk(daemon) as path:
        found = daemon.call("throttle.set", mode="conservative", duty=0.25)
        assert (found["mode"], found["duty"]) == ("conservative", 0.25)
        assert str(path) in found["not_kept"]
        text = daemon.gemctl("throttle")
        assert "not kept" in text
        assert "until the disk takes it, it ends with the daemon: " in text
    wait_for(lambda: daemon.call("throttle.get")["not_kept"] == "")  # it was tried again
    daemon.stop(signal.SIGKILL)
    daemon.start()
    found = daemon.call("throttle.get")
    assert (found["mode"], found["duty"], found["not_kept"]) == ("conservative", 0.25, "")


def test_a_model_without_a_chat_template_says_what_to_type(
    daemon: Daemon,
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """A mistake of the line: no request has failed, and a probation goes on."""
    folder = tmp_path / "plain"
    shutil.copytree(tiny_checkpoint("qwen3"), folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    daemon.replace(artifact_cache(folder, *OPTIONS), name="plain")
    said = daemon.gemctl("generate", "x", "--model", "plain", code=2)
    assert said.endswith("plain: has no chat template; send a prompt: gemctl generate --raw\n")
    daemon.gemctl("generate", "x", "--model", "plain", "--raw", "--max-tokens", "2")
    status = settled(daemon, "plain")
    assert status["current"] == status["digest"], "its probation was passed"


def test_what_asks_for_a_while_says_what(daemon: Daemon) -> None:
    """Neither for_s alone nor beside reset, which lasts."""
    for params in ({"for_s": 600}, {"for_s": 600, "reset": True, "temp_c": 70}):
        error = refusal(daemon, "throttle.set", **params)
        assert error.code == "bad_request"
        assert "for_s" in str(error)
    assert daemon.call("throttle.get")["until"] is None


def test_the_audit_tells_what_was_changed(daemon: Daemon, tmp_path: Path) -> None:
    source = f"file:{tmp_path / 'temp'}"
    daemon.call("throttle.set", mode="performance", external=[source])
    daemon.call("throttle.set", reset=True)
    daemon.call("kv.auto_reset", on=True, percent=90)
    told = [
        {key: value for key, value in event.items() if key not in ("seq", "ts", "kind", "caller")}
        for event in daemon.events("audit")[-3:]
    ]
    assert told == [
        {"method": "throttle.set", "mode": "performance", "external": [source]},
        {"method": "throttle.set", "reset": True},
        {"method": "kv.auto_reset", "on": True, "percent": 90},
    ]


def test_what_was_done_and_cannot_be_written_is_told(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    with no_disk(daemon):
        for word in ("disable", "enable", "unload"):
            said = str(refusal(daemon, f"model.{word}", name="pilot"))
            done = f"pilot: is {word.removesuffix('e').removesuffix('d')}"
            assert said.startswith(done)
            assert "ed, but only until the daemon's next start: " in said
        assert not daemon.workers()
    daemon.stop(signal.SIGKILL)
    daemon.start()
    wait_for(lambda: daemon.call("model.status", name="pilot")["state"] == "serving")
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


# ---- the socket ----


def test_a_line_may_have_so_many_bytes(daemon: Daemon) -> None:
    for size, good in ((LINE_MOST, True), (LINE_MOST + 1, False)):
        head, tail = b'{"id":"1","method":"stats","params":{}', b"}"
        line = head + b" " * (size - len(head) - len(tail)) + tail
        with connect(daemon) as sock:
            sock.sendall(line + b"\n")
            said = reply(sock)
            assert ("result" in said) == good, said
            if not good:
                assert said["id"] == ""
                assert said["error"]["message"] == "request: over 262144 bytes; shorten it"
                with contextlib.suppress(ConnectionResetError):
                    assert sock.recv(10) == b""


@pytest.mark.parametrize("count", [2, 3, 40])
@pytest.mark.parametrize("method", ["stats", "model.replace"])
def test_one_descriptor_a_line(daemon: Daemon, count: int, method: str) -> None:
    files = Path(f"/proc/{daemon.pid}/fd")
    before = len(list(files.iterdir()))
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
    try:
        with connect(daemon) as sock:
            line = {"id": "1", "method": method, "params": {}}
            socket.send_fds(sock, [json.dumps(line).encode() + b"\n"], fds)
            said = reply(sock)
            assert said["error"]["message"] == "request: more than 1 descriptor; send one"
            assert sock.recv(10) == b""
    finally:
        for fd in fds:
            os.close(fd)
    wait_for(lambda: len(list(files.iterdir())) <= before)


@pytest.mark.parametrize(
    "line",
    [
        b'{"id":"\\ud800","method":"stats"}',
        b'{"id":"1","method":"throttle.set","params":{"temp_c":' + b"9" * 400 + b"}}",
        b'{"id":"1","method":"generate","params":{"prompt":"a","seed":' + b"1" * 400 + b"}}",
        b'{"v":' + b"9" * 5000 + b',"id":"1","method":"stats"}',
        b'{"id":"1","method":"stats","params":' + b'{"a":' * 16 + b"1" + b"}" * 17,
    ],
)
def test_lines_that_python_reads_and_we_do_not(daemon: Daemon, line: bytes) -> None:
    with connect(daemon) as sock:
        sock.sendall(line + b"\n")
        said = reply(sock)
        assert (said["id"], said["error"]["code"]) == ("", "bad_request")
        sock.sendall(b'{"id":"2","method":"stats"}\n')
        assert "result" in reply(sock)


AS_NOBODY = """
import os, socket, sys, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
socks, said = [], b""
for _ in range(int(sys.argv[2])):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[1])
    sock.settimeout(0.5)
    try:
        said = sock.recv(4096) or said
    except TimeoutError:
        socks.append(sock)
print(len(socks), said.decode(), flush=True)
sys.stdin.read()
"""


def test_one_user_keeps_nobody_else_out() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    import grp

    group = grp.getgrgid(65534).gr_name
    with Daemon(daemon={"connections": 12, "read_group": group}) as daemon:
        daemon.folder.chmod(0o755)
        daemon.socket.chmod(0o666)
        flood = subprocess.Popen(
            [sys.executable, "-c", AS_NOBODY, str(daemon.socket), "8"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert flood.stdout is not None
        count, said = flood.stdout.readline().split(" ", 1)
        assert int(count) == 6
        assert json.loads(said)["error"]["message"].startswith("6 connections of uid 65534 are")
        socks = [connect(daemon) for _ in range(5)]  # of root
        assert daemon.call("stats")["v"] == 1
        for sock in socks:
            sock.close()
        flood.communicate("")

        def answers() -> bool:
            with contextlib.suppress(Refused):  # until it has seen that they are gone
                return bool(daemon.call("stats")["v"] == 1)
            return False

        wait_for(answers)


# ---- files that are none ----


def test_a_pipe_as_configuration_ends_the_start(tmp_path: Path) -> None:
    pipe = tmp_path / "c.toml"
    os.mkfifo(pipe)
    for more in ([], ["--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "gemctl.daemon", "--config", str(pipe), *more],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert done.stderr == f"gemctld: {pipe}: is no regular file; name a file that can be read\n"


def test_a_state_folder_that_is_none_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = tmp_path / "c.toml"
    told = f'gemctld: {config}:2: daemon.state: "{tmp_path / "file"}" is no folder; name one\n'
    for place in ("file", "file/below"):
        state, sock = tmp_path / place, tmp_path / "s"
        config.write_text(f'[daemon]\nstate = "{state}"\nsocket = "{sock}"\n', encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "gemctl.daemon", "--config", str(config)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stderr.count("\n") == 1
        if place == "file":  # the configuration's mistake
            assert (done.returncode, done.stderr) == (2, told)
            continue
        assert done.returncode == 8
        assert done.stderr.startswith(f"gemctld: {state}: ")
        assert done.stderr.endswith("; check the disk and the permissions\n")


def test_a_reload_waits_for_no_pipe(daemon: Daemon) -> None:
    kept = daemon.config.read_text(encoding="utf-8")
    daemon.config.unlink()
    os.mkfifo(daemon.config)
    assert refusal(daemon, "config.reload").code == "bad_request"
    assert daemon.ask(PROMPT)
    daemon.config.unlink()
    daemon.config.write_text(kept, encoding="utf-8")
    assert daemon.call("config.reload")["restart_needed"] == []


def test_a_pipe_in_a_folder_of_keys_or_models(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    os.mkfifo(daemon.folder / "state/models/pilot" / f"{'a' * 64}.gembin")
    os.mkfifo(daemon.folder / "state/models/pipe")
    began = time.monotonic()
    assert [row["name"] for row in daemon.call("model.list")["models"]] == ["pilot"]
    daemon.replace(versions[1], name="pilot")
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[1], PROMPT)
    daemon.stop()
    daemon.start()
    wait_for(lambda: daemon.call("model.status", name="pilot")["state"] == "serving")
    assert time.monotonic() - began < 60
