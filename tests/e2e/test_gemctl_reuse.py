"""Reuse of a prompt's beginning and the end of the context, through daemon and command: the same
answer with and without, and nothing of another owner's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker import SITE, Broker
from daemon import ROOT, Daemon, answer_of, settled, wait_for
from gemctl.client import Refused

PREAMBLE = "You are the voice of a vehicle in a hall. " * 2
PROMPTS = [PREAMBLE + end for end in ("Where is dock 4?", "Where is dock 5?", "Stop.", "")]


@pytest.fixture(scope="module")
def daemon(versions: tuple[Path, Path]) -> Iterator[Daemon]:
    with Daemon() as made:
        made.replace(versions[0], name="pilot")
        settled(made)
        yield made


@pytest.fixture(autouse=True)
def empty(daemon: Daemon) -> None:
    """A request without reuse leaves nothing."""
    daemon.ask("x", 1)


def parts(daemon: Daemon, prompt: str, **more: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The pieces of an answer, and its result."""
    seen: list[dict[str, Any]] = []
    fields = {"prompt": prompt, "max_tokens": 12, "temperature": 0.0, "ignore_stop_ids": True}
    with daemon.client() as client:
        found = client.call("generate", {**fields, **more}, seen.append)
    return [event for event in seen if "text" in event], found


def ratio(daemon: Daemon) -> float | None:
    found: float | None = daemon.call("stats")["kv_cache_hit_ratio"]
    return found


@pytest.mark.parametrize("speculate", [0, 4])
def test_answers_are_the_same_with_and_without(
    daemon: Daemon, versions: tuple[Path, Path], speculate: int
) -> None:
    plain = [parts(daemon, prompt, speculate=speculate) for prompt in PROMPTS]
    assert [found["reused"] for _, found in plain] == [0] * len(PROMPTS)
    assert ratio(daemon) == 0.0
    for turn, (prompt, wanted) in enumerate(zip(PROMPTS * 2, plain * 2, strict=True)):
        pieces, found = parts(daemon, prompt, speculate=speculate, reuse=True)
        assert pieces == wanted[0]
        assert found["text"] == answer_of(versions[0], prompt, 12)
        assert found["prompt_tokens"] == wanted[1]["prompt_tokens"]
        assert (found["reused"] > 20) == (turn > 0)
        assert found["reused"] < found["prompt_tokens"]
        assert ratio(daemon) == round(found["reused"] / found["prompt_tokens"], 3)


def test_a_conversation_and_its_sampling_are_the_same(daemon: Daemon) -> None:
    """Random numbers are the request's own."""
    more: dict[str, Any] = {"temperature": 0.9, "seed": 7, "top_k": 20}
    wanted = [parts(daemon, prompt, **more)[1]["text"] for prompt in PROMPTS]
    assert [parts(daemon, p, reuse=True, **more)[1]["text"] for p in PROMPTS] == wanted


def test_what_leaves_nothing(daemon: Daemon) -> None:
    def reused() -> int:
        return int(parts(daemon, PROMPTS[0], reuse=True)[1]["reused"])

    assert (reused() == 0, reused() > 0) == (True, True)
    parts(daemon, PROMPTS[0])
    assert reused() == 0
    with pytest.raises(Refused, match="context"):
        parts(daemon, "a b " * 300, reuse=True)
    assert reused() == 0
    os.kill(daemon.workers()[0], 9)
    assert reused() == 0
    daemon.call("kv.auto_reset", on=True, percent=0)
    try:
        assert (reused() > 0, reused(), reused()) == (True, 0, 0)
    finally:
        daemon.call("kv.auto_reset", on=False)
    daemon.call("model.disable", name="pilot")
    daemon.call("model.enable", name="pilot")
    assert (reused() == 0, reused() > 0) == (True, True)


def test_a_cache_that_is_95_percent_full_is_emptied_behind_an_answer(daemon: Daemon) -> None:
    """Below, exactly, above; never during an answer, and an event tells."""
    size = daemon.call("stats")["kv_cache_size"]
    full = -(-95 * size // 100)
    prompt = "x" * (size // 2)
    tokens = 5 + full - daemon.ask(prompt, 5)["kv_used"]  # of an answer that leaves exactly `full`
    assert daemon.call("stats")["kv_auto_reset_percent"] is None
    assert "auto-reset off" in daemon.gemctl("stats")
    on = "auto-reset on, after an answer that leaves it 95 % full"
    assert on in daemon.gemctl("--auto-reset-kv-cache")  # what was changed is shown
    assert on in daemon.gemctl("model", "status")
    assert daemon.call("stats")["kv_auto_reset_percent"] == 95
    assert daemon.call("model.status")["kv_auto_reset_percent"] == 95
    try:
        for more, left in ((-1, full - 1), (0, 0), (1, 0), (-1, full - 1)):
            before = len(daemon.events("kv.reset"))
            found = daemon.ask(prompt, tokens + more)
            assert (found["kv_used"], found["generated_tokens"]) == (full + more, tokens + more)
            assert daemon.call("stats")["kv_cache_used"] == left
            told = daemon.events("kv.reset")[before:]
            assert [(e["model"], e["used"], e["size"]) for e in told] == (
                [] if left else [("pilot", full + more, size)]
            )
        daemon.gemctl("--auto-reset-kv-cache=50%")
        assert daemon.ask(prompt, 5)["kv_used"] < full
        assert daemon.call("stats")["kv_cache_used"] == 0
        assert "from 0 to 100" in daemon.gemctl("--auto-reset-kv-cache=101", code=2)
    finally:
        daemon.gemctl("--no-auto-reset-kv-cache")
    assert daemon.ask(prompt, tokens)["kv_used"] == full == daemon.call("stats")["kv_cache_used"]


ANOTHER = """
import json, os, sys
from gemctl.client import Client, Refused
os.setgroups([]); os.setgid(65534); os.setuid(65534)
fields = {"max_tokens": 2, "temperature": 0.0, "reuse": True}
for prompt in sys.argv[2:]:
    try:
        with Client(sys.argv[1], 60) as client:
            print(client.call("generate", {"prompt": prompt, **fields})["reused"])
    except Refused as error:
        print(error.code)
"""


def test_another_user_never_reuses(versions: tuple[Path, Path]) -> None:
    """Not even with a request in between that fails before it begins."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    import grp

    group = grp.getgrgid(65534).gr_name
    with Daemon(daemon={"write_group": group}) as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        daemon.folder.chmod(0o755)
        daemon.socket.chmod(0o666)

        def asked(*prompts: str) -> list[str]:
            done = subprocess.run(
                [sys.executable, "-c", ANOTHER, str(daemon.socket), *prompts],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            return done.stdout.split()

        for guess in ([PROMPTS[0]], ["a b " * 300, PROMPTS[0]]):
            parts(daemon, PROMPTS[0], reuse=True)
            assert parts(daemon, PROMPTS[0], reuse=True)[1]["reused"] > 0
            assert asked(*guess)[-1] == "0"
            assert parts(daemon, PROMPTS[0], reuse=True)[1]["reused"] == 0
        assert int(asked(PROMPTS[0], PROMPTS[1])[1]) > 0  # its own


def test_senders_of_the_broker_are_one_owner(versions: tuple[Path, Path], tmp_path: Path) -> None:
    with Broker(tmp_path) as broker:
        table = broker.config("m1").model_dump(mode="json", exclude_defaults=True)
        with Daemon(mqtt=table) as daemon:
            daemon.replace(versions[0], name="pilot")
            settled(daemon)
            wait_for(lambda: daemon.call("daemon.info")["mqtt"]["connected"])

            def asked(number: str, user: str) -> dict[str, Any]:
                body = {
                    "id": number,
                    "params": {"prompt": PROMPTS[0], "max_tokens": 2, "reuse": True},
                }
                done = subprocess.run(
                    ["mosquitto_rr", "-V", "5", "-p", str(broker.port), "-u", user,
                     "-P", f"{user}-password", "-q", "1", "-W", "30",
                     "-t", f"gemctl/v1/{SITE}/m1/cmd/generate",
                     "-e", f"gemctl/v1/{SITE}/reply/{user}", "-m", json.dumps(body)],
                    capture_output=True, text=True, check=True,
                )  # fmt: skip
                found: dict[str, Any] = json.loads(done.stdout)["result"]
                return found

            parts(daemon, PROMPTS[0], reuse=True)
            assert asked("1", "plc")["reused"] == 0  # the socket's user is another owner
            assert asked("2", "fleet")["reused"] > 0
            assert parts(daemon, PROMPTS[0], reuse=True)[1]["reused"] == 0


# ---- the command ----


def test_the_command_reuses(daemon: Daemon) -> None:
    words = ["generate", "--raw", "--reuse", "--max-tokens", "8", "--temperature", "0"]
    wanted = json.loads(daemon.gemctl(*words[:2], *words[3:], "--json", PROMPTS[0]))
    daemon.gemctl(*words, PROMPTS[1])
    found = json.loads(daemon.gemctl(*words, "--json", PROMPTS[0]))
    assert found["text"] == wanted["text"]
    assert found["reused"] > 20
    assert wanted["reused"] == 0


def test_the_end_of_the_context(daemon: Daemon) -> None:
    """192 tokens: room for a slide."""
    wanted = parts(daemon, "abc", max_tokens=400)
    assert wanted[1]["finish"] == "context_full"
    assert parts(daemon, "abc", max_tokens=400, on_full="stop")[0] == wanted[0]
    pieces, found = parts(daemon, "abc", max_tokens=400, on_full="mark")
    assert pieces[: len(wanted[0])] == wanted[0]
    assert pieces[len(wanted[0]) :] == [{"token": -1, "text": "[TRUNCATED]"}]
    assert found["text"] == wanted[1]["text"] + "[TRUNCATED]"
    assert (found["finish"], found["slides"]) == ("context_full", 0)
    pieces, found = parts(daemon, "abc", max_tokens=400, on_full="slide")
    assert pieces[: len(wanted[0])] == wanted[0]
    assert (found["finish"], found["generated_tokens"]) == ("max_tokens", 400)
    assert found["slides"] > 0
    words = ["generate", "--raw", "--max-tokens", "400", "--temperature", "0", "--ignore-eos"]
    told = "gemctl: generate: the context is full after 190 tokens; --on-full slide goes on\n"
    assert daemon.gemctl(*words, "--on-full", "mark", "abc") == (
        f"{wanted[1]['text']}[TRUNCATED]\n{told}"  # the answer, and on stderr why it ends
    )
    slid = json.loads(daemon.gemctl(*words, "--on-full", "slide", "--json", "abc"))
    assert (slid["text"], slid["slides"]) == (found["text"], found["slides"])
    text = daemon.gemctl(*words, "--on-full", "halt", "abc", code=2)
    assert "generate: --on-full: halt is none of stop, mark, slide; use one of them" in text
    with pytest.raises(Refused, match="on_full: halt is none of stop, mark, slide"):
        parts(daemon, "abc", on_full="halt")
