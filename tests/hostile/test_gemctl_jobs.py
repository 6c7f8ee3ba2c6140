"""What changes a model can be ended: by Ctrl-C, by going away, by `cancel` of somebody else, by the
daemon's end. Nothing of it remains then, and what served before serves on.

The real daemon and engine. A large file that takes no room (candidates.inflated) makes a copy long,
a low `models.prefault_mbps` the step behind it, an engine that hangs a load.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from candidates import Wrapped, digest_of, inflated
from daemon import Daemon, answer_of, settled, wait_for
from gemctl.client import Refused
from gemctl.serve.artifact import declared

PROMPT = "abc"
LARGE = 2 << 30  # bytes of a copy that is never finished
SLOW_MBPS = 0.05


@pytest.fixture
def large(versions: tuple[Path, Path], tmp_path: Path) -> Path:
    path = tmp_path / "large.gembin"
    inflated(versions[1], path, LARGE)
    return path


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as made:
        yield made


def serving(daemon: Daemon, path: Path) -> str:
    """Let a version be the good one of `pilot`; its digest."""
    daemon.replace(path, name="pilot")
    return str(settled(daemon)["digest"])


def slow_reading(daemon: Daemon) -> None:
    """From now on a candidate is brought into memory as from a very slow disk."""
    text = daemon.config.read_text(encoding="utf-8")
    daemon.config.write_text(
        text.replace("[models]\n", f"[models]\nprefault_mbps = {SLOW_MBPS}\n"), encoding="utf-8"
    )
    daemon.call("config.reload")


def begun(daemon: Daemon, method: str, fd: int | None = None, **params: Any) -> socket.socket:
    """Send a request on a connection of its own."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    sock.connect(str(daemon.socket))
    line = json.dumps({"id": "1", "method": method, "params": params}).encode() + b"\n"
    if fd is None:
        sock.sendall(line)
    else:
        socket.send_fds(sock, [line], [fd])
    return sock


def asked(daemon: Daemon, path: Path, method: str = "model.stage", **more: Any) -> socket.socket:
    """The same with a file."""
    with path.open("rb") as stream:
        return begun(daemon, method, stream.fileno(), name="pilot", **more)


def first_token(sock: socket.socket) -> None:
    """Wait until a streamed answer has begun."""
    data = b""
    while b'"token"' not in data:
        more = sock.recv(1 << 16)
        assert more, data
        data += more


def last_reply(sock: socket.socket) -> dict[str, Any]:
    """The result or error; events before it are left out."""
    data = b""
    while more := sock.recv(1 << 16):
        data += more
        lines = data.split(b"\n")[:-1]
        replies = [json.loads(line) for line in lines]
        ends = [reply for reply in replies if "event" not in reply]
        if ends:
            return ends[0]
    raise AssertionError(f"no last reply: {data!r}")


def row(daemon: Daemon) -> dict[str, Any]:
    """`pilot` in the list; nothing where it is not there."""
    rows = daemon.call("model.list")["models"]
    return next((one for one in rows if one["name"] == "pilot"), {})


def job(daemon: Daemon, step: str = "") -> dict[str, Any] | None:
    """What changes `pilot` now; with `step` only in that one."""
    found: dict[str, Any] | None = row(daemon).get("job")
    return found if found and step in ("", found["step"]) else None


def copying(daemon: Daemon) -> dict[str, Any]:
    """Wait until a part of a file has been copied."""
    return wait_for(lambda: (j := job(daemon, "stage")) and j["bytes_done"] and j)


def is_clean(daemon: Daemon) -> bool:
    """No job, no name, no folder, no file that is open and has no name."""
    descriptors = Path(f"/proc/{daemon.pid}/fd").iterdir()
    links = []
    for entry in descriptors:
        with contextlib.suppress(OSError):
            links.append(str(entry.readlink()))
    folder = daemon.folder / "state/models"
    return (
        daemon.call("model.list")["models"] == []
        and not list(folder.iterdir())
        and not [link for link in links if "gembin" in link or str(folder) + "/" in link]
    )


def children(daemon: Daemon) -> list[int]:
    """Processes of the daemon, whatever they have become."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[1]) == daemon.pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def typed(daemon: Daemon, *words: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gemctl.cli", *map(str, words)],
        env=daemon.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


# ---- a copy ----


def test_a_copy_ends_where_the_asker_goes_away(
    daemon: Daemon, large: Path, versions: tuple[Path, Path]
) -> None:
    for method in ("model.stage", "model.replace"):
        with asked(daemon, large, method):
            found = copying(daemon)
            assert found["what"] == ("staging" if method == "model.stage" else "replacement")
            assert 0 < found["bytes_done"] < found["bytes"] == large.stat().st_size
            assert found["can_cancel"]
        wait_for(lambda: is_clean(daemon))
    serving(daemon, versions[0])
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("words", [("stage",), ("--replace",)], ids=["stage", "replace"])
def test_a_copy_ends_with_its_command(
    daemon: Daemon, large: Path, words: tuple[str, ...], number: signal.Signals
) -> None:
    command = typed(daemon, "model", *words, large, "--name", "pilot")
    copying(daemon)
    command.send_signal(number)
    _, err = command.communicate(timeout=60)
    wait_for(lambda: is_clean(daemon))
    if number == signal.SIGINT:
        what = "staging" if words == ("stage",) else "replacement"
        assert command.returncode == 130
        wanted = f"pilot: the {what} was cancelled, as somebody asked; start it again"
        assert err == f"gemctl: {wanted}\n"
    assert daemon.call("daemon.info")["pid"] == daemon.pid


def test_somebody_else_ends_a_copy(daemon: Daemon, large: Path) -> None:
    with asked(daemon, large) as sock:
        copying(daemon)
        shown = daemon.gemctl("model", "status", "pilot")
        assert "under way" in shown
        assert "staging, stage " in shown
        assert "gemctl model cancel ends it" in shown
        assert "staging, stage " in daemon.gemctl("model", "list")
        assert "pilot: staging cancelled" in daemon.gemctl("model", "cancel")
        assert is_clean(daemon)  # at once
        error = last_reply(sock)["error"]
        assert (error["code"], error["retryable"]) == ("cancelled", True)
    assert "see gemctl model list" in daemon.gemctl("model", "cancel", code=10)
    daemon.gemctl("model", "cancel", "pilot", code=6)


def test_cancel_by_its_number(daemon: Daemon, large: Path) -> None:
    with asked(daemon, large) as sock:
        number = copying(daemon)["id"]
        assert daemon.call("cancel", id=number) == {"request": number, "model": "pilot"}
        assert last_reply(sock)["error"]["code"] == "cancelled"
    with pytest.raises(Refused) as error:
        daemon.call("cancel", id=number)
    assert error.value.code == "not_found"


def test_the_first_event_names_the_job(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    seen: list[dict[str, Any]] = []
    with versions[0].open("rb") as stream, daemon.client() as client:
        client.call("model.stage", {"name": "pilot"}, seen.append, stream.fileno())
    assert [event["phase"] for event in seen] == ["begin", "stage", "verify"]
    assert len(seen[0]["job"]) == 16
    assert job(daemon) is None


def test_one_job_at_a_time(daemon: Daemon, large: Path, versions: tuple[Path, Path]) -> None:
    with asked(daemon, large):
        copying(daemon)
        with pytest.raises(Refused, match="a staging is under way; wait for its end") as error:
            daemon.replace(versions[0], name="pilot")
        assert error.value.code == "busy"
        daemon.gemctl("model", "stage", versions[0], "--name", "pilot", code=9)
    wait_for(lambda: is_clean(daemon))


def test_the_daemons_end_ends_a_copy(daemon: Daemon, large: Path) -> None:
    with asked(daemon, large) as sock:
        copying(daemon)
        began = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began < 8
        error = last_reply(sock)["error"]
        assert error["code"] == "cancelled"
        assert error["message"].startswith("pilot: the staging was cancelled, gemctld stops")
    assert not list((daemon.folder / "state/models").iterdir())


# ---- behind the copy ----


def test_a_replacement_that_is_stopped_leaves_the_old_version(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    good = serving(daemon, versions[0])
    slow_reading(daemon)
    command = typed(daemon, "model", "replace", versions[1])
    wait_for(lambda: job(daemon, "prefault"))
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=60)
    assert command.returncode == 130
    assert "the replacement was cancelled" in err
    status = daemon.call("model.status", name="pilot")
    assert (status["digest"], status["busy"], status["job"]) == (good, "", None)
    assert [one["digest"] for one in status["present"]] == [good]
    assert status["bad"] == []  # it was not found bad
    assert daemon.events("replace.failed")[-1]["text"] == "cancelled"
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


def test_a_staged_version_outlives_its_replacement(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    """Who stages by hand does not want to do it again."""
    good = serving(daemon, versions[0])
    with versions[1].open("rb") as stream:
        digest = daemon.call("model.stage", stream.fileno(), name="pilot")["digest"]
    slow_reading(daemon)
    with begun(daemon, "model.replace", name="pilot", digest=digest):
        wait_for(lambda: job(daemon, "prefault"))
    wait_for(lambda: job(daemon) is None)
    present = daemon.call("model.status", name="pilot")["present"]
    assert {one["digest"] for one in present} == {good, digest}


def test_what_made_room_comes_back(versions: tuple[Path, Path]) -> None:
    size = declared(versions[0]).ram_total
    with Daemon(models={"memory_most_bytes": size + size // 2, "probation_s": 0.2}) as daemon:
        good = serving(daemon, versions[0])
        slow_reading(daemon)
        with asked(daemon, versions[1], "model.replace", serial=True):
            wait_for(lambda: job(daemon, "prefault") and not daemon.workers())
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)  # it waits
        assert daemon.call("model.status", name="pilot")["digest"] == good
        assert len(daemon.workers()) == 1


def test_what_is_about_to_make_room_stays(versions: tuple[Path, Path]) -> None:
    """Its request has not ended yet: it serves on, and the request ends as if nothing was."""
    size = declared(versions[0]).ram_total
    models = {"memory_most_bytes": size + size // 2, "probation_s": 0.2}
    with Daemon(models=models, worker={"hang_s": 300.0}) as daemon:
        serving(daemon, versions[0])
        (worker,) = daemon.workers()
        fields = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0.0, "ignore_stop_ids": True}
        os.kill(worker, signal.SIGSTOP)  # or the request might end meanwhile
        with begun(daemon, "generate", **fields, stream=False) as answer:
            wait_for(lambda: daemon.call("stats")["requests"]["active"])
            with asked(daemon, versions[1], "model.replace", serial=True):
                wait_for(lambda: row(daemon)["state"] == "loading")
            wait_for(lambda: job(daemon) is None)
            os.kill(worker, signal.SIGCONT)
            assert last_reply(answer)["result"]["text"] == answer_of(versions[0], PROMPT, 60)
        assert daemon.workers() == [worker]
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


def test_behind_the_flip_it_is_too_late(versions: tuple[Path, Path]) -> None:
    """A request of before holds up the drain; the new version answers already."""
    with Daemon(worker={"hang_s": 300.0}) as daemon:  # nobody minds that it is stopped
        serving(daemon, versions[0])
        (worker,) = daemon.workers()
        daemon.call("throttle.set", duty=0.02)
        fields = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0.0, "ignore_stop_ids": True}
        with begun(daemon, "generate", **fields, stream=True) as answer:
            first_token(answer)  # its prompt is read: what comes now does not wait for that
            os.kill(worker, signal.SIGSTOP)  # or the request might end meanwhile
            daemon.call("throttle.set", duty=1.0)
            command = typed(daemon, "model", "replace", versions[1])
            found = wait_for(lambda: job(daemon, "drain"))
            assert not found["can_cancel"]
            with pytest.raises(Refused, match="past the point where it can be cancelled") as error:
                daemon.call("cancel", id=found["id"])
            assert error.value.code == "conflict"
            command.send_signal(signal.SIGINT)
            _, err = command.communicate(timeout=60)
            assert command.returncode == 130
            assert "past the point where it can be cancelled; wait for its end" in err
            os.kill(worker, signal.SIGCONT)
        wait_for(lambda: job(daemon) is None)
        assert daemon.call("model.status", name="pilot")["digest"] == digest_of(versions[1])
        assert settled(daemon)["current"] == digest_of(versions[1])


@pytest.mark.parametrize("word", ["load", "enable", "switch"])
def test_a_load_that_is_stopped(word: str, versions: tuple[Path, Path], tmp_path: Path) -> None:
    wrapped = Wrapped(tmp_path)
    worker = {"program": str(wrapped.path), "start_timeout_s": 60.0}
    with Daemon(worker=worker, models={"probation_s": 0.2}) as daemon:
        serving(daemon, versions[0])
        daemon.call("model.disable" if word == "enable" else "model.unload", name="pilot")
        state = row(daemon)["state"]
        wrapped.misbehave("hang", versions[0])
        command = typed(daemon, "model", word, "pilot")
        assert wait_for(lambda: job(daemon))["what"] == word
        wait_for(lambda: children(daemon))
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
        assert (command.returncode, err) == (130, "gemctl: stopped by SIGINT; start it again\n")
        wait_for(lambda: job(daemon) is None and not children(daemon))
        assert row(daemon)["state"] == state
        wrapped.behave()
        daemon.gemctl("model", word, "pilot")
        assert daemon.ask(PROMPT, model="pilot")["text"] == answer_of(versions[0], PROMPT)


def test_who_goes_away_at_any_moment_leaves_nothing(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    rng, count = random.Random(3), 60
    good = serving(daemon, versions[0])
    files = Path(f"/proc/{daemon.pid}/fd")
    before = len(list(files.iterdir()))
    for number in range(count):
        method = ("model.stage", "model.replace", "model.rollback")[number % 3]
        if method == "model.rollback":
            sock = begun(daemon, method, name="pilot")
        else:
            sock = asked(daemon, versions[1], method)
        time.sleep(rng.random() * 0.4)
        sock.close()
        wait_for(lambda: job(daemon) is None)
        status = daemon.call("model.status", name="pilot")
        assert status["state"] == "serving"
        if status["digest"] != good:  # it was past its point of no return
            daemon.call("model.rollback", name="pilot")
            daemon.call("model.clear", name="pilot")
        assert daemon.call("model.status", name="pilot")["digest"] == good
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)
    assert len(daemon.workers()) == 1
    wait_for(lambda: len(list(files.iterdir())) <= before)
    print(f"{count} askers that went away")


# ---- what is copied at all ----


def safetensors() -> bytes:
    head = b'{"__metadata__":{}}'
    return len(head).to_bytes(8, "little") + head + bytes(64)


NONE = {
    "a GGUF checkpoint; make one of it: gemmake --model FILE": b"GGUF\x03\0\0\0" + bytes(600),
    "a ZIP archive, as .pt checkpoints are; make one of it": b"PK\x03\x04" + bytes(600),
    "a safetensors checkpoint; make one of its folder": safetensors(),
    "text; name one that gemmake made: gemmake --model CHECKPOINT": b"# a note\n" * 100,
    "a Git LFS pointer; fetch the file itself: git lfs pull": b"version https://git-lfs.github.com",
    "a web page; download the file itself": b"<!DOCTYPE html><html></html>",
    "a program; name one": b"\x7fELF" + bytes(range(256)) * 4,
    "zeros; copy it again": bytes(5000),
}


@pytest.mark.parametrize("sentence", NONE)
def test_what_is_no_artifact_is_named(daemon: Daemon, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "candidate"
    path.write_bytes(NONE[sentence])
    for words in (("stage",), ("--replace",)):
        said = daemon.gemctl("model", *words, path, "--name", "pilot", code=4)
        assert said.startswith(
            f"gemctl: pilot: the file is no gembin artifact, it looks like {sentence}"
        )
        assert said.count("\n") == 1
        assert "signature" not in said
    assert is_clean(daemon)


def test_other_files_that_are_none(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "candidate"
    for data, sentence in (
        (b"", "the file is no gembin artifact, it is empty; copy it again"),
        (bytes(range(256)) * 9, "the file is no gembin artifact; name one that gemmake made"),
        (b"\x8bGEM", "file: 4 bytes, a header needs 512; copy the file again"),
    ):
        path.write_bytes(data)
        said = daemon.gemctl("model", "stage", path, "--name", "pilot", code=4)
        assert said.startswith(f"gemctl: pilot: {sentence}"), said
    assert is_clean(daemon)


def test_nothing_of_it_is_copied(
    daemon: Daemon, versions: tuple[Path, Path], large: Path, tmp_path: Path
) -> None:
    """Files of terabytes: read, they would take hours."""
    other, cut, grown = (tmp_path / name for name in ("other", "cut", "grown"))
    other.write_bytes(b"GGUF\x03\0\0\0")
    cut.write_bytes(head(large))
    grown.write_bytes(versions[1].read_bytes())
    os.truncate(other, 60 << 30)
    os.truncate(grown, 50 << 30)
    whole = large.stat().st_size
    os.truncate(cut, whole - 256)
    serving(daemon, versions[0])
    daemon.replace(versions[1], name="pilot")  # on probation: a file is compared with it
    began = time.monotonic()
    for path, sentence in (
        (other, "no gembin artifact, it looks like a GGUF checkpoint"),
        (cut, f"file: {whole - 256} bytes, its header says {whole}; copy the file again"),
        (grown, f"file: {50 << 30} bytes, its header says {versions[1].stat().st_size}; copy"),
    ):
        for method in ("model.stage", "model.replace"):
            with pytest.raises(Refused, match=sentence) as error, path.open("rb") as stream:
                daemon.call(method, stream.fileno(), name="pilot")
            assert error.value.code == "refused"
    assert time.monotonic() - began < 20


def head(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(9000)


# ---- what to type next ----


def test_behind_a_staging_the_next_line_is_named(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    with versions[0].open("rb") as stream:
        digest = daemon.call("model.stage", stream.fileno(), name="pilot")["digest"]
    line = f"gemctl model replace --name pilot --digest {digest[:12]}"
    for words, code in (
        (("switch-model", "pilot"), 6),
        (("model", "load", "pilot"), 6),
        (("model", "enable", "pilot"), 6),
        (("generate", "x", "--model", "pilot"), 10),
        (("generate", "x"), 6),
    ):
        said = daemon.gemctl(*words, code=code)
        assert said.rstrip().endswith(line), said
    daemon.gemctl(*line.split()[1:])
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)
    settled(daemon)
    daemon.call("model.unload", name="pilot")
    with pytest.raises(Refused, match="name one, or gemctl switch-model pilot"):
        daemon.ask(PROMPT)
    daemon.gemctl("switch-model", "pilot")


def test_on_probation_waiting_helps_and_so_does_what_is_advised(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    third = tmp_path / "third.gembin"
    signed(versions[0], third)
    long = {"probation_s": 600.0, "probation_requests": 2}
    with Daemon(models=long) as daemon:
        daemon.replace(versions[0], name="pilot")
        daemon.ask(PROMPT)
        said = daemon.gemctl("model", "replace", versions[1], code=9)
        assert "another version is on probation for 600 s, or 1 more answer; wait" in said
        advice = said.rstrip().rpartition(", or ")[2]
        assert advice == "gemctl model disable pilot"  # a first version has none before it
        said = daemon.gemctl("model", "rollback", code=6)
        assert "no version before this one; gemctl model disable pilot, then" in said
        daemon.gemctl(*advice.split()[1:])
        daemon.replace(versions[1], name="pilot")
        for _ in range(2):
            daemon.ask(PROMPT)
        good = settled(daemon)["digest"]
        daemon.replace(third, name="pilot")
        error = json.loads(daemon.gemctl("--json", "model", "replace", versions[0], code=9))
        assert error["error"]["retryable"] is True
        advice = error["error"]["message"].rpartition(", or ")[2]
        assert advice == "gemctl model rollback pilot"
        shown = daemon.gemctl("model", "status", "pilot")
        assert f"{good[:12]} 2" in shown
        assert "serves again if the probation fails" in shown
        assert "previous" not in shown
        daemon.gemctl(*advice.split()[1:])
        assert daemon.call("model.status", name="pilot")["digest"] == good
        assert daemon.replace(versions[0], name="pilot")["already"] is False


def signed(source: Path, target: Path) -> None:
    """The same artifact with a signature: another digest."""
    from gemmake import signing

    signing.keygen(target.with_suffix(""))
    signing.sign(source, target.with_suffix(".key"), target)


def test_one_wording_for_a_name_that_nobody_has(daemon: Daemon) -> None:
    params: dict[str, dict[str, Any]] = {
        "generate": {"model": "nobody", "prompt": "x"},
        "model.remove": {"name": "nobody"},
        "model.replace": {"name": "nobody", "digest": "12345678"},
        "model.pin": {"name": "nobody"},
    }
    every = ("load", "unload", "switch", "status", "clear", "enable", "disable", "rollback")
    params |= {f"model.{word}": {"name": "nobody"} for word in every}
    for method, fields in params.items():
        with pytest.raises(Refused) as error:
            daemon.call(method, **fields)
        found = (error.value.code, str(error.value))
        assert found == ("not_found", "nobody: no such model; see gemctl model list"), method


def test_a_version_cut_short_is_told_in_our_words(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    """While it is disabled, so that nobody reads it all."""
    digest = serving(daemon, versions[0])
    daemon.call("model.disable", name="pilot")
    path = daemon.folder / "state/models/pilot" / f"{digest}.gembin"
    path.chmod(0o644)
    whole = path.read_bytes()
    for size in (0, 5, 100, 300, 520):
        path.write_bytes(whole[:size])
        said = daemon.gemctl("model", "enable", "pilot", code=4)
        assert "unpack" not in said
        assert "buffer" not in said
        assert said.startswith(f"gemctl: version {digest[:12]}: damaged: "), said
        assert said.rstrip().endswith("stage it again")
        assert daemon.call("model.status", name="pilot")["state"] == "disabled"
    path.write_bytes(whole)
    daemon.gemctl("model", "enable", "pilot")
