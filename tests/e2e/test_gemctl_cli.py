"""gemctl as somebody types it, against the real daemon and engine: first steps, other words for
the same, waiting for a probation, prompts, errors for people and for programs."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon import ROOT, Daemon, answer_of, gemrun_path, settled, wait_for
from sysfs import Sysfs

PROMPT = "abc"
LONG: dict[str, Any] = {"probation_s": 600.0, "probation_requests": 100_000}


@pytest.fixture(scope="module")
def daemon(versions: tuple[Path, Path]) -> Iterator[Daemon]:
    """One daemon for what changes nothing for others; `pilot` serves the first version."""
    with Daemon(models={"probation_s": 0.3}) as made:
        made.replace(versions[0], name="pilot")
        settled(made)
        yield made


def typed(
    daemon: Daemon, *words: str | Path, code: int = 0, **more: Any
) -> subprocess.CompletedProcess[str]:
    """A line, its streams apart. `code`: its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "gemctl.cli", *map(str, words)],
        env=daemon.environment(), capture_output=True, text=True, timeout=120, check=False, **more,
    )  # fmt: skip
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def started(daemon: Daemon, *words: str | Path) -> subprocess.Popen[str]:
    """A line that takes its time."""
    return subprocess.Popen(
        [sys.executable, "-m", "gemctl.cli", *map(str, words)],
        env=daemon.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def on_probation(daemon: Daemon) -> bool:
    return bool(daemon.call("model.status", name="pilot")["on_probation"])


# ---- other words for the same ----


def test_words_do_what_options_do(versions: tuple[Path, Path]) -> None:
    one, two = (answer_of(path, PROMPT) for path in versions)
    with Daemon() as daemon:
        typed(daemon, "model", "replace", versions[0], "--name", "small")
        typed(daemon, "model", "--replace", versions[1], "--name", "large")
        assert daemon.ask(PROMPT)["text"] == one
        done = typed(daemon, "model", "switch", "large")
        assert "large: answers now" in done.stdout
        assert daemon.ask(PROMPT)["text"] == two
        typed(daemon, "model", "disable")
        assert daemon.call("model.status", name="large")["state"] == "disabled"
        typed(daemon, "model", "enable", "--warmup-prompt", "Hello")
        assert daemon.ask(PROMPT)["text"] == two
        typed(daemon, "model", "disable", "small")
        assert daemon.call("model.status", name="small")["state"] == "disabled"
        typed(daemon, "model", "enable", "small")
        assert daemon.ask(PROMPT, model="small")["text"] == one
        typed(daemon, "switch-model", "small")
        assert daemon.call("stats")["model"] == "small"
        typed(daemon, "model", "switch", "nobody", code=6)


def test_the_first_model_takes_the_files_name(versions: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "My Model v2.gembin"
    path.symlink_to(versions[0])
    with Daemon() as daemon:
        assert "my-model-v2" in typed(daemon, "model", "replace", path).stdout
        assert "my-model-v2" in typed(daemon, "model", "list").stdout


# ---- replacing, and the probation ----


def test_what_serves_already_is_no_failure(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    digest = settled(daemon)["digest"]
    before = daemon.workers()
    for line in (
        ["model", "replace", versions[0]],
        ["model", "--replace", versions[0]],
        ["model", "replace", "--digest", digest[:12]],
        ["model", "replace", versions[0], "--wait"],
    ):
        done = typed(daemon, *line)
        assert f"pilot {digest[:12]}: serves already" in done.stdout
    assert "passed its probation" in done.stdout
    answer = json.loads(typed(daemon, "--json", "model", "replace", versions[0]).stdout)
    assert (answer["already"], answer["digest"]) == (True, digest)
    assert daemon.workers() == before


def test_what_is_on_probation_is_told_with_its_time(versions: tuple[Path, Path]) -> None:
    with Daemon(models=LONG) as daemon:
        typed(daemon, "model", "replace", versions[0], "--name", "pilot")
        again = typed(daemon, "model", "replace", versions[0])
        assert "serves already" in again.stdout
        other = typed(daemon, "model", "replace", versions[1], code=9)
        told = r"another version is on probation for (600|5\d\d) s, or 100000 more answers"
        assert re.search(told, other.stderr)
        daemon.ask(PROMPT)
        for words in (["model", "list"], ["model", "status"]):
            shown = typed(daemon, *words).stdout
            assert "on probation" in shown
            assert re.search(r"[89] min \d", shown)
            assert "99999 more answers" in shown
        status = daemon.call("model.status", name="pilot")
        assert 500 < status["probation_left_s"] < 600
        assert status["probation_left_requests"] == 99_999
        row = daemon.call("model.list")["models"][0]
        assert row["probation_left_requests"] == 99_999


def test_waiting_until_it_has_passed(versions: tuple[Path, Path]) -> None:
    with Daemon(models={"probation_s": 600.0, "probation_requests": 3}) as daemon:
        waits = started(daemon, "model", "--replace", versions[0], "--name", "pilot", "--wait")
        wait_for(lambda: daemon.events("replace.done"))
        time.sleep(1)
        assert waits.poll() is None  # it waits
        for _ in range(3):
            daemon.ask(PROMPT)
        out, err = waits.communicate(timeout=60)
        assert waits.returncode == 0, err
        assert "answers now" in out
        assert "passed its probation" in out.splitlines()[-1]
        assert "s left, or 3 more answers" in err
        assert daemon.call("model.status", name="pilot")["current"] is not None
        for _ in range(3):
            daemon.ask(PROMPT)
        waits = started(daemon, "model", "replace", versions[1], "--wait", "--json")
        wait_for(lambda: len(daemon.events("replace.done")) == 2)
        for _ in range(3):
            daemon.ask(PROMPT)
        out, err = waits.communicate(timeout=60)
        assert (waits.returncode, err) == (0, "")
        assert json.loads(out)["probation"] == "passed"
        back = typed(daemon, "model", "rollback", "--wait").stdout
        assert "the version before answers now" in back
        assert not on_probation(daemon)
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


@pytest.mark.parametrize("as_json", [False, True])
def test_waiting_for_one_that_is_rolled_back(versions: tuple[Path, Path], as_json: bool) -> None:
    with Daemon() as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        daemon.config.write_text(
            daemon.config.read_text().replace("probation_s = 1.0", "probation_s = 60.0"), "utf-8"
        )
        daemon.gemctl("config", "reload")
        more = ["--json"] if as_json else []
        waits = started(daemon, "model", "replace", versions[1], "--wait", *more)
        wait_for(lambda: on_probation(daemon))
        os.kill(daemon.call("model.status", name="pilot")["worker"]["pid"], signal.SIGKILL)
        out, err = waits.communicate(timeout=60)
        assert waits.returncode == 8, err
        assert "was rolled back: its worker ended" in err
        if as_json:
            assert out == ""
            assert json.loads(err)["error"]["code"] == "failed"
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


def test_ctrl_c_ends_the_waiting_and_not_the_probation(versions: tuple[Path, Path]) -> None:
    with Daemon(models=LONG) as daemon:
        waits = started(daemon, "model", "replace", versions[0], "--name", "pilot", "--wait")
        wait_for(lambda: daemon.events("replace.done"))
        time.sleep(1)
        waits.send_signal(signal.SIGINT)
        out, err = waits.communicate(timeout=30)
        assert waits.returncode == 130
        assert "its probation goes on without you; see gemctl model status pilot" in err
        assert "Traceback" not in out + err
        assert on_probation(daemon)


def test_the_time_left_on_a_terminal(versions: tuple[Path, Path]) -> None:
    with Daemon(models={"probation_s": 1.5, "probation_requests": 100}) as daemon:
        text = on_a_terminal(daemon, "model", "replace", str(versions[0]), "--wait")
        assert "\r  probation  1 s left, or 100 more answers" in text
        assert "\r  probation  0 s left, or 100 more answers" in text
        assert "passed its probation" in text


def on_a_terminal(daemon: Daemon, *words: str, keys: bytes = b"") -> str:
    """What a line shows to somebody who sits there, and types `keys`."""
    above, below = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "gemctl.cli", *words],
        env=daemon.environment(), stdin=below, stdout=below, stderr=below,
    )  # fmt: skip
    os.close(below)
    shown = b""
    try:
        while piece := os.read(above, 4096):
            shown += piece
            if keys and b"Ctrl-D" in shown:
                os.write(above, keys)
                keys = b""
    except OSError:  # the other end is closed: it has ended
        pass
    finally:
        os.close(above)
    assert process.wait(60) == 0, shown
    return shown.decode()


# ---- prompts ----


def test_prompts_of_every_kind(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    greedy = ("--raw", "--temperature", "0", "--max-tokens", "8", "--ignore-eos")
    whole = answer_of(versions[0], "two words")
    assert typed(daemon, "generate", "two words", *greedy).stdout == f"{whole}\n"
    assert typed(daemon, "generate", "two", "words", *greedy).stdout == f"{whole}\n"
    assert typed(daemon, "generate", "-", *greedy, input="two words").stdout == f"{whole}\n"
    assert typed(daemon, "generate", *greedy, "--", "two", "words").stdout == f"{whole}\n"
    found = json.loads(typed(daemon, "generate", "two words", "--json", *greedy).stdout)
    assert (found["text"], found["generated_tokens"]) == (whole, 8)
    for words, said in (
        ([""], "the prompt is empty; ask something"),
        (["-"], "stdin was empty"),
        ([], "no prompt; give it in quotes"),
        (["pilot", "two words"], "or use --model NAME"),
    ):
        assert said in typed(daemon, "generate", *words, code=2, input="").stderr


def test_a_prompt_from_the_terminal(daemon: Daemon) -> None:
    text = on_a_terminal(daemon, "generate", "-", "--raw", "--max-tokens", "2", keys=b"abc\n\x04")
    assert "reading the prompt from the terminal; Ctrl-D" in text


SAMPLING = {
    "greedy": ["--temperature", "0"],
    "seed": ["--temperature", "2", "--seed", "7"],
    "top-k": ["--temperature", "2", "--seed", "7", "--top-k", "3"],
    "top-p": ["--temperature", "2", "--seed", "7", "--top-p", "0.2"],
    "min-p": ["--temperature", "2", "--seed", "7", "--min-p", "0.9"],
    "penalty": ["--temperature", "0", "--repetition-penalty", "5"],
    "speculation": ["--temperature", "0", "--speculate", "4"],
    "a stop": ["--temperature", "0", "--stop", "e"],
}


@pytest.mark.parametrize("options", SAMPLING.values(), ids=SAMPLING.keys())
def test_sampling_is_the_engines(
    daemon: Daemon, versions: tuple[Path, Path], options: list[str]
) -> None:
    common = ["--max-tokens", "24", "--ignore-eos", *options]
    engine = subprocess.run(
        [gemrun_path(), str(versions[0]), "--prompt", PROMPT, "--json", *common],
        capture_output=True, check=True,
    )  # fmt: skip
    ours = json.loads(typed(daemon, "generate", PROMPT, "--raw", "--json", *common).stdout)
    assert ours["text"] == json.loads(engine.stdout)["text"]


def test_tokens_that_are_banned(daemon: Daemon) -> None:
    """What the model says first is banned again and again: it never comes."""
    banned: list[int] = []
    for _ in range(4):
        seen: list[int] = []
        with daemon.client() as client:
            client.call(
                "generate",
                {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.0, "ignore_stop_ids": True,
                 "banned": banned},
                lambda event, seen=seen: seen.append(event["token"]) if "token" in event else None,
            )  # fmt: skip
        assert not set(seen) & set(banned)
        banned.append(seen[0])
    words = [word for token in banned for word in ("--ban", str(token))]
    line = ["generate", PROMPT, "--raw", "--temperature", "0", "--max-tokens", "6", "--json"]
    ours = json.loads(typed(daemon, *line, "--ignore-eos", *words).stdout)
    assert ours["text"] == daemon.ask(PROMPT, 6, banned=banned)["text"]
    refused = typed(daemon, "generate", PROMPT, "--ban", "4000000000", code=2).stderr
    assert "out of range" in refused


# ---- the throttle ----


def test_shares_and_degrees(versions: tuple[Path, Path]) -> None:
    daemon = Daemon()
    tree = Sysfs(daemon.folder / "machine")
    tree.zone(0, "x86_pkg_temp", 50.0, [("passive", 80.0), ("critical", 100.0)])
    text = daemon.config.read_text(encoding="utf-8")
    root = str(daemon.folder / "root")
    daemon.config.write_text(text.replace(root, str(tree.root)), encoding="utf-8")
    tree.put("proc/meminfo", Path("/proc/meminfo").read_text(encoding="utf-8"))
    with daemon:
        shown = typed(daemon, "throttle", "--duty", "50%", "--temp", "70C", "--json").stdout
        found = json.loads(shown)
        assert (found["asked_c"], found["threshold_c"], found["threshold_note"]) == (70.0, 70.0, "")
        assert found["duty"] <= 0.5
        shown = typed(daemon, "throttle", "--temp", "90").stdout
        assert "75.0 C; 90 C was asked for, but the limit here is 75 C, 5 C below" in shown
        assert "90 C was asked for" in typed(daemon, "throttle").stdout
        typed(daemon, "throttle", "--reset")
        assert daemon.call("throttle.get")["asked_c"] is None


# ---- errors, for people and for programs ----


def test_errors_are_one_sentence_or_one_object(daemon: Daemon) -> None:
    for words, code, word in (
        (["model", "switch", "nobody"], 6, "not_found"),
        (["model", "load", "A B"], 2, "bad_request"),
        (["model", "load", "pilot", "--digest", "ffffffff"], 6, "not_found"),
        (["model", "clear", "pilot"], 10, "conflict"),
        (["generate", "x", "--model", "nobody"], 6, "not_found"),
        (["xyzzy"], 2, "bad_request"),
        (["stats", "--histori"], 2, "bad_request"),
    ):
        people = typed(daemon, *words, code=code)
        assert people.stdout == ""
        assert people.stderr.startswith("gemctl: ")
        assert people.stderr.count("\n") == 1
        programs = typed(daemon, "--json", *words, code=code)
        assert programs.stdout == ""
        error = json.loads(programs.stderr)["error"]
        assert set(error) == {"code", "message", "retryable"}
        assert error["code"] == word
        assert people.stderr == f"gemctl: {error['message']}\n"


def test_a_wrong_line_changes_nothing(daemon: Daemon) -> None:
    before = len(daemon.events("audit"))
    typed(daemon, "--auto-reset-kv-cache", "generat", "x", code=2)
    typed(daemon, "throttle", "--temp", "hot", "--auto-reset-kv-cache", code=2)
    assert len(daemon.events("audit")) == before
    typed(daemon, "--auto-reset-kv-cache", "config", "check", daemon.config)
    typed(daemon, "stats", "--no-auto-reset-kv-cache")
    assert [event["method"] for event in daemon.events("audit")[before:]] == ["kv.auto_reset"] * 2


def test_answers_to_lines_that_are_none_have_their_id(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(daemon.socket))
        stream = sock.makefile("rwb")
        for line, number in (
            (b'{"id":"a","method":"stats","parms":{}}', "a"),
            (b'{"id":"b","method":17}', "b"),
            (b'{"id":17,"method":"stats"}', ""),
            (b"nonsense", ""),
        ):
            stream.write(line + b"\n")
            stream.flush()
            reply = json.loads(stream.readline())
            assert (reply["id"], reply["error"]["code"]) == (number, "bad_request")


def test_output_that_cannot_be_written(daemon: Daemon) -> None:
    """The quick answers too."""
    for words in ("stats", "stats --json", "model status", "doctor"):
        line = f"{sys.executable} -m gemctl.cli {words}"
        done = subprocess.run(
            ["sh", "-c", f"{line} > /dev/full"],
            env=daemon.environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr.count("No space left on device")) == (8, 1)
        done = subprocess.run(
            ["sh", "-c", f"{line} >&-"],
            env=daemon.environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")


def test_a_place_where_no_gemctld_is(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(4)

        def answer() -> None:
            for _ in range(2):
                peer, _ = other.accept()
                with peer:
                    peer.recv(1000)
                    peer.sendall(b"220 mail.example ESMTP\n")

        thread = threading.Thread(target=answer)
        thread.start()
        for words in (["stats"], ["doctor"]):
            done = typed(daemon, "--socket", path, *words, code=8)
            assert "no gemctld answers there" in done.stderr
        thread.join()


# ---- files and figures ----


def test_a_bundle_says_where_it_is(daemon: Daemon, tmp_path: Path) -> None:
    done = typed(daemon, "bundle", cwd=tmp_path)
    assert done.stdout.startswith(f"wrote {tmp_path}/gemctl-bundle.json; look through it")
    found = json.loads((tmp_path / "gemctl-bundle.json").read_text(encoding="utf-8"))
    assert found["info"]
    row = found["artifacts"][0]
    assert row["engine"]["pid"] in daemon.workers()
    assert row["hdf"]["id"].startswith("generic-")
    assert len(row["hdf_sha256"]) == 64
    answer = json.loads(typed(daemon, "bundle", "--json", "--output", tmp_path / "b").stdout)
    assert answer == {"path": f"{tmp_path}/b"}
    refused = typed(daemon, "bundle", "--output", tmp_path / "no" / "b", code=2)
    assert "name another file with --output" in refused.stderr


def test_a_bundle_waits_for_no_reader(daemon: Daemon, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused = typed(daemon, "bundle", "--output", tmp_path / "pipe", code=2)
    assert "is no regular file; name another one" in refused.stderr
    assert json.loads(typed(daemon, "bundle", "--output", "-").stdout)["info"]


def test_figures(daemon: Daemon) -> None:
    wait_for(lambda: "tokens" in typed(daemon, "stats", "--history").stdout)
    header = typed(daemon, "stats", "--history").stdout.splitlines()[0]
    assert header.split()[:2] == ["series", "unit"]
    shown = typed(daemon, "info").stdout
    assert f"process {daemon.pid}" in shown
    assert "MiB" in shown


def test_completion_knows_the_models(daemon: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "gemctl"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m gemctl.cli "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    bash = (
        'eval "$(gemctl completion bash)"; COMP_WORDS=(gemctl model load ""); COMP_CWORD=3; '
        'COMPREPLY=(); _gemctl_completion gemctl; echo "${COMPREPLY[@]}"'
    )
    environment = daemon.environment()
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", bash], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert (done.stdout, done.stderr) == ("pilot\n", "")
