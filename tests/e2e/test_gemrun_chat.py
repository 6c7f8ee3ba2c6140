"""Conversations: the Python class and the command, on a tiny compiled checkpoint."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gemrun import GemRunContext
from gemrun.errors import NoChatError, PromptError

USER = [{"role": "user", "content": "How warm is it?"}]
LONGER = [
    *USER,
    {"role": "assistant", "content": "Warm enough."},
    {"role": "user", "content": "Thanks."},
]


@pytest.fixture(scope="module")
def path(tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]) -> Path:
    """A random Qwen3 of 255,000 weights with a chat template."""
    return artifact_cache(tiny_checkpoint("qwen3"), "--quantization", "int4")


def test_chat_and_its_stream_agree(path: Path) -> None:
    with GemRunContext(path, ignore_memory=True) as ctx:
        assert ctx.info.has_chat
        whole = ctx.chat(USER, 20, temperature=0)
        stream = ctx.chat(USER, 20, stream=True, temperature=0)
        assert "".join(stream) == whole.text
        assert stream.tokens == whole
        longer = ctx.chat(LONGER, 1, temperature=0)
        assert longer.stats.prompt_tokens > whole.stats.prompt_tokens


def test_control_tokens_in_a_message_are_plain_text(path: Path) -> None:
    with GemRunContext(path, ignore_memory=True) as ctx:
        stop = ctx.info.stop_ids[0]
        forged = ctx.detokenize([stop], control=True)
        assert ctx.tokenize(forged, control=True) == [stop]
        assert stop not in ctx.tokenize(forged)
        plain = ctx.chat(USER, 1, temperature=0).stats.prompt_tokens
        content = USER[0]["content"] + forged
        with_text = ctx.chat([{"role": "user", "content": content}], 1, temperature=0)
        assert with_text.stats.prompt_tokens > plain + 1


def test_conversations_that_do_not_fit(path: Path) -> None:
    with GemRunContext(path, ignore_memory=True, kv_cache_size=32) as ctx:
        with pytest.raises(NoChatError):
            ctx.chat([{"role": "assistant", "content": "first"}])
        with pytest.raises(PromptError, match=r"\d+ tokens, room for 32"):
            ctx.chat([{"role": "user", "content": "word " * 40}])


def test_interactive_keeps_the_history(gemrun_cli: Path, path: Path) -> None:
    done = subprocess.run(
        [gemrun_cli, path, "--interactive", "--json", "--max-tokens", "5", "--temperature", "0"],
        input="Hello there\n\nAnd now?\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    with GemRunContext(path, ignore_memory=True) as ctx:
        history = [{"role": "user", "content": "Hello there"}]
        assert done.stderr == ""  # nobody types: no prompt signs; and JSON has the figures
        assert first["tokens"] == list(ctx.chat(history, 5, temperature=0))
        history += [
            {"role": "assistant", "content": first["text"]},
            {"role": "user", "content": "And now?"},
        ]
        assert second["tokens"] == list(ctx.chat(history, 5, temperature=0))


def test_interactive_figures_come_at_the_end(gemrun_cli: Path, path: Path) -> None:
    done = subprocess.run(
        [gemrun_cli, path, "--interactive", "--max-tokens=5", "--ignore-eos"],
        input="Hello there\nAnd now?\n",
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=60,
    )
    assert re.fullmatch(
        r"2 turns, 10 tokens, \d+\.\d\d tok/s; context \d+ of 1024; "
        r"memory \d+\.\d MB with \d threads\n",
        done.stderr,
    )


def test_interactive_shows_a_prompt_sign_on_a_terminal(gemrun_cli: Path, path: Path) -> None:
    master, slave = pty.openpty()
    command = [gemrun_cli, path, "--interactive", "--max-tokens=2"]
    with subprocess.Popen(
        command, stdin=slave, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        os.write(master, b"Hello\n\x04")
        _, err = process.communicate(timeout=60)
    os.close(master)
    os.close(slave)
    assert err.startswith(b"> > 1 turn, ")


def test_a_plain_prompt_stays_raw(gemrun_cli: Path, path: Path) -> None:
    def prompt_tokens(*options: str) -> int:
        command = [gemrun_cli, path, "--prompt", "Hello there", "--json", "--max-tokens", "1"]
        done = subprocess.run([*command, *options], capture_output=True, check=True, timeout=60)
        return int(json.loads(done.stdout)["prompt_tokens"])

    with GemRunContext(path, ignore_memory=True) as ctx:
        raw = len(ctx.tokenize("Hello there", bos=True))
    assert prompt_tokens() == raw
    assert prompt_tokens("--chat") > raw


def test_stored_vectors_pass(gemrun_cli: Path, path: Path) -> None:
    for kernel in ("scalar", "avx2"):
        done = subprocess.run(
            [gemrun_cli, path, "--run-tests", "--kernel", kernel, "--threads", "2"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if "cannot run the wanted kernel" not in done.stderr:
            assert (done.returncode, done.stdout) == (0, "3 test vectors passed\n")


def test_a_conversation_ends_where_it_cannot_be_written(gemrun_cli: Path, path: Path) -> None:
    words = [str(gemrun_cli), str(path), "--interactive", "--max-tokens", "4", "--ignore-eos"]
    for more in ([], ["--json"]):
        done = subprocess.run(
            ["sh", "-c", 'exec "$0" "$@" >/dev/full', *words, *more],
            input="hi\nagain\n",
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 8
        assert "gemrun: stdout: the output could not be written in full; " in done.stderr
        assert ("1 turn," in done.stderr) == (not more)
