"""At the end of the context: stop, mark, or slide on; each says so, and none is silent."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from gemrun import GemRunContext
from gemrun.errors import CallError, PromptError

CONTEXT, BLOCK = 160, 32
PROMPT = "abcdefgh" * 9


@pytest.fixture(params=tiny.FAMILIES)
def path(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
) -> Path:
    options = ("--kv-cache-size", str(CONTEXT))
    return artifact_cache(tiny_checkpoint(request.param), *options)


def test_a_run_stops_and_says_so(path: Path) -> None:
    with GemRunContext(path, ignore_memory=True) as context:
        plain = context.infer(PROMPT, 999, temperature=0.0, ignore_stop_ids=True)
        marked = context.infer(PROMPT, 999, temperature=0.0, ignore_stop_ids=True, on_full="mark")
        assert plain.stats.finish == marked.stats.finish == "context_full"
        assert plain.stats.kv_used == CONTEXT
        assert list(marked) == list(plain)
        assert marked.text == plain.text + "[TRUNCATED]"
        settings = {"temperature": 0.0, "ignore_stop_ids": True, "on_full": "mark"}
        pieces = list(context.stream(PROMPT, 999, **settings))
        assert "".join(pieces) == marked.text
        short = context.infer(PROMPT, 5, temperature=0.0, ignore_stop_ids=True, on_full="mark")
        assert "[TRUNCATED]" not in short.text
        with pytest.raises(PromptError):
            context.infer(PROMPT * 9, 5, on_full="slide")
        with pytest.raises(CallError, match="max_tokens"):
            context.infer(PROMPT, 1 << 25, on_full="slide")


@pytest.mark.parametrize("speculate", [0, 4])
def test_sliding_is_a_run_of_what_is_kept(path: Path, speculate: int) -> None:
    """The ids are those of a run by hand: the first block, the newest half, and on."""
    count = 260
    settings = {"temperature": 0.0, "ignore_stop_ids": True, "speculate": speculate}
    with GemRunContext(path, ignore_memory=True) as context:
        slid = context.infer(PROMPT, count, on_full="slide", **settings)
        assert slid.stats.finish == "max_tokens"
        assert slid.stats.slides >= 2
        cache = context.tokenize(PROMPT, bos=True)
        wanted: list[int] = []
        context.reset_kv_cache()
        context.prefill(cache)
        slides = 0
        while True:
            wanted.append(context.sample(temperature=0.0))
            if len(wanted) == count:
                break
            if len(cache) == CONTEXT:
                cache = cache[:BLOCK] + cache[-CONTEXT // 2 :]
                context.reset_kv_cache()
                context.prefill(cache)
                slides += 1
            context.decode(wanted[-1])
            cache.append(wanted[-1])
        assert list(slid) == wanted
        assert slid.stats.slides == slides


def test_a_context_of_few_blocks_does_not_slide(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), "--kv-cache-size", "128")
    with GemRunContext(path, ignore_memory=True) as context:
        answer = context.infer("abc", 999, temperature=0.0, ignore_stop_ids=True, on_full="slide")
        assert answer.stats.finish == "context_full"
        assert answer.stats.slides == 0


def test_options(
    tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path], gemrun_cli: Path
) -> None:
    path = artifact_cache(tiny_checkpoint("llama3"), "--kv-cache-size", str(CONTEXT))
    command = [gemrun_cli, path, "--prompt", PROMPT, "--max-tokens", "200", "--temperature", "0"]
    command += ["--ignore-eos", "--json", "--on-full"]
    shown = {}
    for name in ("stop", "mark", "slide"):
        done = subprocess.run([*command, name], capture_output=True, text=True, check=True)
        shown[name] = json.loads(done.stdout)
    assert shown["mark"]["text"] == shown["stop"]["text"] + "[TRUNCATED]"
    assert shown["stop"]["finish"] == "context_full"
    assert len(shown["slide"]["tokens"]) == 200
    wrong = subprocess.run([*command, "halt"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "gemrun: --on-full: halt is unknown; use stop mark or slide" in wrong.stderr
    with (
        GemRunContext(path, ignore_memory=True) as context,
        pytest.raises(CallError, match="on_full: 'halt' is out of range; use 'stop' or 'mark' or"),
    ):
        context.infer("abc", 3, on_full="halt")
