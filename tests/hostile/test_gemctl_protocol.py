"""The daemon's socket against peers that break its rules: garbage, floods, slow and silent ones.

Each loses its own connection at most. What others get, and what the daemon takes, stays as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
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
from gemctl.api import METHODS
from gemctl.client import Refused

PROMPT = "abc"


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]) -> Path:
    return artifact_cache(tiny_checkpoint("qwen3", seed=0), *OPTIONS)


@pytest.fixture(scope="module")
def daemon(artifact: Path) -> Iterator[Daemon]:
    with Daemon(daemon={"connections": 8}) as made:
        made.replace(artifact, name="pilot")
        settled(made)
        yield made


@pytest.fixture(autouse=True)
def unharmed(daemon: Daemon, artifact: Path) -> Iterator[None]:
    """After every test: it answers, and holds as many descriptors as before."""
    before = descriptors(daemon)
    yield
    assert daemon.ask(PROMPT)["text"] == answer_of(artifact, PROMPT)
    wait_for(lambda: descriptors(daemon) <= before)


def descriptors(daemon: Daemon) -> int:
    return len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))


def connect(daemon: Daemon) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(str(daemon.socket))
    return sock


def replies(sock: socket.socket, count: int = 1) -> list[dict[str, Any]]:
    """So many lines, or those until the end."""
    data = b""
    while data.count(b"\n") < count and (more := sock.recv(1 << 16)):
        data += more
    return [json.loads(line) for line in data.splitlines()]


LINES = {
    "no JSON": b"hello",
    "an array": b"[]",
    "a number": b"17",
    "no id": b'{"method":"stats"}',
    "an empty id": b'{"id":"","method":"stats"}',
    "a long id": b'{"id":"' + b"x" * 65 + b'","method":"stats"}',
    "a number as id": b'{"id":1,"method":"stats"}',
    "no method": b'{"id":"1"}',
    "a method that is none": b'{"id":"1","method":"rm"}',
    "a dunder": b'{"id":"1","method":"__class__"}',
    "another version": b'{"v":2,"id":"1","method":"stats"}',
    "params that are none": b'{"id":"1","method":"stats","params":[]}',
    "an unknown key": b'{"id":"1","method":"stats","x":1}',
    "an unknown parameter": b'{"id":"1","method":"stats","params":{"x":1}}',
    "a key twice": b'{"id":"1","id":"1","method":"stats"}',
    "NaN": b'{"id":"1","method":"throttle.set","params":{"temp_c":NaN}}',
    "Infinity": b'{"id":"1","method":"throttle.set","params":{"temp_c":Infinity}}',
    "1e999": b'{"id":"1","method":"throttle.set","params":{"temp_c":1e999}}',
    "no UTF-8": b'{"id":"1","method":"\xff"}',
    "half a surrogate": b'{"id":"1","method":"generate","params":{"prompt":"\\ud800"}}',
    "NUL in a prompt": b'{"id":"1","method":"generate","params":{"prompt":"a\\u0000b"}}',
    "deep": b'{"id":"1","method":"stats","params":' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    "a path as name": b'{"id":"1","method":"model.load","params":{"name":"../../etc"}}',
    "text for a number": b'{"id":"1","method":"throttle.set","params":{"temp_c":"75"}}',
    "true for a number": b'{"id":"1","method":"throttle.set","params":{"temp_c":true}}',
    "a huge whole number": b'{"id":"1","method":"generate","params":{"prompt":"a","max_tokens":'
    + b"9" * 4000
    + b"}}",
    "a replace without a file": b'{"id":"1","method":"model.replace","params":{"name":"x"}}',
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_a_wrong_line_is_answered_by_an_error(daemon: Daemon, line: bytes) -> None:
    with connect(daemon) as sock:
        sock.sendall(line + b"\n")
        reply = replies(sock)[-1]
        assert reply["error"]["code"] in ("bad_request", "failed"), reply
        assert "Traceback" not in reply["error"]["message"]
        sock.sendall(b'{"id":"2","method":"stats"}\n')  # the connection is still good
        assert "result" in replies(sock)[-1]


def test_random_lines(daemon: Daemon) -> None:
    rng, count = random.Random(5), 3000
    good = b'{"v":1,"id":"1","method":"throttle.get","params":{}}'
    with connect(daemon) as sock:
        for _ in range(count):
            line = bytearray(good)
            for _ in range(1 + rng.getrandbits(2)):
                at = rng.randrange(len(line))
                line[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
            sock.sendall(bytes(line).replace(b"\n", b" ") + b"\n")
            assert len(replies(sock)) == 1
    print(f"{count} damaged lines, as many answers")


def test_a_line_without_end_ends_the_connection(daemon: Daemon) -> None:
    with connect(daemon) as sock:
        sock.sendall(b"x" * 300_000)
        assert replies(sock)[0]["error"]["code"] == "bad_request"
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(10) == b""


def test_peers_that_go_away(daemon: Daemon) -> None:
    """In the middle of a line, of an answer, or with a descriptor on its way."""
    generate = b'{"id":"1","method":"generate","params":{"prompt":"abc","max_tokens":150}}\n'
    for data in (b'{"id":', generate, b'{"id":"1","method":"events.follow"}\n'):
        for _ in range(5):
            with connect(daemon) as sock:
                sock.sendall(data)
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(2)]
    for count in (1, 2):
        with connect(daemon) as sock:
            rights = struct.pack(f"{count}i", *fds[:count])
            sock.sendmsg([b"{"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    for fd in fds:
        os.close(fd)
    wait_for(lambda: _answers(daemon))
    wait_for(lambda: daemon.call("stats")["requests"]["queued"] == 0)


def test_a_descriptor_for_a_method_that_takes_none(daemon: Daemon) -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        assert daemon.call("stats", fd)["v"] == 1
    finally:
        os.close(fd)


def test_many_connections_and_many_requests(daemon: Daemon) -> None:
    socks = [connect(daemon) for _ in range(8)]
    with connect(daemon) as one_more:
        assert replies(one_more)[0]["error"]["code"] == "busy"
    for sock in socks:
        sock.sendall(b'{"id":"f","method":"events.follow"}\n' * 20)
    refused = [reply for sock in socks for reply in replies(sock, 12) if "error" in reply]
    assert len(refused) >= 8
    for sock in socks:
        sock.close()
    wait_for(lambda: _answers(daemon))


def _answers(daemon: Daemon) -> bool:
    try:
        return bool(daemon.call("stats"))
    except Refused:
        return False


def test_a_peer_that_reads_nothing_holds_nobody_up(daemon: Daemon) -> None:
    with connect(daemon) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b'{"id":"1","method":"stats.history"}\n' * 8)
        began = time.monotonic()
        assert daemon.call("stats")["v"] == 1
        assert time.monotonic() - began < 5


AS_NOBODY = """
import os, sys
from gemctl.client import Client, Refused
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for method in sys.argv[2:]:
    try:
        with Client(sys.argv[1], 10) as client:
            client.call(method, {"name": "pilot"} if method.startswith("model.") else {})
            print(method, "done")
    except Refused as error:
        print(method, error.code)
"""


def test_who_is_in_no_group_may_nothing(daemon: Daemon) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    methods = sorted(METHODS)
    daemon.folder.chmod(0o755)
    daemon.socket.chmod(0o666)  # even if the file's mode lets them in
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, str(daemon.socket), *methods],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    said = dict(line.split() for line in done.stdout.splitlines())
    assert said == dict.fromkeys(methods, "forbidden")
    assert daemon.call("model.status", name="pilot")["state"] == "serving"


def test_groups_decide_who_may_write(tmp_path: Path) -> None:
    """By the group database: a member of the read group reads, of the write group does both."""
    from gemctl import server
    from gemctl.config import DaemonConfig

    config = DaemonConfig(read_group="daemon", write_group="bin")
    nobody = 65534
    daemon_gid, bin_gid = 1, 2
    assert server.permissions(0, 0, config) == (True, True)
    assert server.permissions(nobody, daemon_gid, config) == (True, False)
    assert server.permissions(nobody, bin_gid, config) == (True, True)
    assert server.permissions(nobody, nobody, config) == (False, False)
    assert server.permissions(4_000_000, bin_gid, config) == (True, True)  # no name here
