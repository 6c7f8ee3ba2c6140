"""GemRunContext on made-up artifacts: results, streams, settings, errors, life and threads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemrun import GemRunContext, Tokens
from gemrun.errors import (
    ArtifactError,
    BusyError,
    CallError,
    ClosedError,
    ContextFullError,
    GemRunError,
    MachineError,
    NoChatError,
    PromptError,
    RunError,
    error_of,
)
from reference import make_image

SHAPE = make_image.Shape(layers=(make_image.Layer(), make_image.Layer(window=32)), context=512)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up model of two layers, 512 tokens of context."""
    file = tmp_path_factory.mktemp("context") / "made.gembin"
    file.write_bytes(make_image.make(SHAPE, seed=3))
    return file


@pytest.fixture
def ctx(path: Path) -> GemRunContext:
    """An open context; tests that need it closed do so."""
    return GemRunContext(path, threads=2, ignore_memory=True)


def test_infer_gives_a_sequence_with_text_and_figures(ctx: GemRunContext) -> None:
    tokens = ctx.infer("hello", max_tokens=12, temperature=0, ignore_stop_ids=True)
    assert isinstance(tokens, Tokens)
    assert len(tokens) == 12
    assert list(tokens) == [tokens[i] for i in range(12)]
    assert tokens[2:4] == tuple(tokens)[2:4]
    assert tokens.text == ctx.detokenize(tokens)
    assert tokens.finish_reason == "max_tokens"
    assert tokens.stats.prompt_tokens == 5
    assert tokens.stats.generated_tokens == 12
    assert tokens.stats.ttft_ms > 0
    assert tokens == ctx.infer("hello", max_tokens=12, temperature=0, ignore_stop_ids=True)


def test_prefill_sample_decode_equals_infer(ctx: GemRunContext) -> None:
    wanted = ctx.infer("hello", 20, temperature=2.0, seed=5, ignore_stop_ids=True)
    ctx.reset_kv_cache()
    ctx.prefill(ctx.tokenize("hello"))
    found = []
    for _ in range(20):
        found.append(ctx.sample(temperature=2.0, seed=5))
        ctx.decode(found[-1])
    assert found == list(wanted)


def test_stream_gives_the_same_text_in_pieces(ctx: GemRunContext) -> None:
    whole = ctx.infer("hello", 30, temperature=0, ignore_stop_ids=True)
    stream = ctx.stream("hello", 30, temperature=0, ignore_stop_ids=True)
    pieces = list(stream)
    assert "".join(pieces) == whole.text
    assert all(pieces)
    assert stream.tokens == whole
    assert list(stream) == []


def test_closing_a_stream_ends_the_run(ctx: GemRunContext) -> None:
    with ctx.stream("hello", 400, temperature=0, ignore_stop_ids=True) as stream:
        next(stream)
    assert ctx.stats().generated_tokens < 400
    dropped = ctx.stream("hello", 400, temperature=0, ignore_stop_ids=True)
    next(dropped)
    del dropped
    assert len(ctx.infer("again", 3, ignore_stop_ids=True)) == 3


def test_stop_strings_end_the_text_before_them(ctx: GemRunContext) -> None:
    bias = {ord("a"): 1e6}
    assert ctx.infer("x", 6, bias=bias).text == "aaaaaa"
    stopped = ctx.infer("x", 6, bias=bias, stop=["aaa"])
    assert (stopped.text, stopped.finish_reason, len(stopped)) == ("", "stop_string", 3)
    held = ctx.infer("x", 6, bias=bias, stop=["aaab", "ab"])
    assert (held.text, held.finish_reason) == ("aaaaaa", "max_tokens")


def test_banned_tokens_do_not_appear(ctx: GemRunContext) -> None:
    usual = ctx.infer("hello", 5, temperature=0, ignore_stop_ids=True)
    other = ctx.infer("hello", 40, temperature=0, ignore_stop_ids=True, banned=[usual[0]])
    assert usual[0] not in other


def test_full_context_is_a_reason_to_end(ctx: GemRunContext) -> None:
    tokens = ctx.infer("hello", 10_000, temperature=0, ignore_stop_ids=True)
    assert tokens.finish_reason == "context_full"
    assert tokens.stats.kv_used == 512
    assert len(tokens) == 512 - 5 + 1


def test_logits_embedding_and_eval(ctx: GemRunContext) -> None:
    with pytest.raises(CallError, match="prefill first"):
        ctx.logits()
    ctx.prefill([1, 2, 3])
    logits, embedding = ctx.logits(), ctx.embedding()
    assert isinstance(logits, array)
    assert (len(logits), len(embedding)) == (SHAPE.vocab, SHAPE.hidden)
    ctx.reset_kv_cache()
    rows: list[tuple[int, array[float]]] = []
    assert ctx.eval([1, 2, 3], lambda p, row: rows.append((p, array("f", row)))) == 3
    assert [p for p, _ in rows] == [0, 1, 2]
    assert rows[2][1] == logits


def test_text_and_tokens(ctx: GemRunContext) -> None:
    ids = ctx.tokenize("hé")
    assert ctx.detokenize(ids) == ctx.detokenize_bytes(ids).decode(errors="replace")
    assert ctx.tokenize("") == []
    with pytest.raises(CallError, match=r"token id: 200 is out of range; use 0 to 199"):
        ctx.detokenize([SHAPE.vocab])


def test_facts(ctx: GemRunContext, path: Path) -> None:
    info, stats = ctx.info, ctx.stats()
    assert (info.vocab_rows, info.context, info.layers) == (SHAPE.vocab, 512, 2)
    assert (info.stop_ids, info.bos_id, info.has_chat) == ((SHAPE.vocab - 1,), None, False)
    assert stats.ram_total == stats.declared_total
    parts = (stats.ram_weights, stats.ram_tables, stats.ram_arena, stats.ram_kv, stats.ram_engine)
    assert sum(parts) + stats.ram_stacks == stats.ram_total
    regions = {r.name: r.size for r in ctx.regions()}
    assert regions["weights+tables"] == path.stat().st_size
    assert regions["arena"] == stats.ram_arena


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"temperature": -1}, CallError),
        ({"top_p": 0}, CallError),
        ({"banned": [10_000]}, CallError),
        ({"banned": [-1]}, CallError),
        ({"seed": 2**64}, CallError),
        ({"stop": [""]}, CallError),
        ({"stop": ["a\0b"]}, CallError),
        ({"stop": ["x"] * 9}, CallError),
        ({"bias": {1: float("inf")}}, CallError),
        ({"temprature": 1}, TypeError),
    ],
)
def test_wrong_settings(
    ctx: GemRunContext, settings: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        ctx.infer("hello", **settings)  # type: ignore[arg-type]


def test_wrong_prompts(ctx: GemRunContext) -> None:
    with pytest.raises(PromptError, match="600 tokens, room for 512"):
        ctx.infer("x" * 600)
    for empty in (lambda: ctx.infer(""), lambda: list(ctx.stream(""))):
        with pytest.raises(PromptError, match="prompt is empty; give it some text") as caught:
            empty()
        assert "longer" not in str(caught.value)
    with pytest.raises(PromptError, match="bytes"):
        ctx.infer("x" * 100_000)
    with pytest.raises(CallError, match="NUL"):
        ctx.infer("a\0b")
    with pytest.raises(NoChatError):
        ctx.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ContextFullError):
        ctx.prefill([1] * 513)


def test_wrong_files_and_configs(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="No such file") as caught:
        GemRunContext(tmp_path / "none.gembin")
    assert caught.value.code == -20
    short = tmp_path / "short.gembin"
    short.write_bytes(path.read_bytes()[:-256])
    with pytest.raises(ArtifactError, match="cut short"):
        GemRunContext(short)
    with pytest.raises(CallError, match="513 tokens, room for 512"):
        GemRunContext(path, kv_cache_size=513)
    with pytest.raises(CallError, match=r"available: scalar.*"):
        GemRunContext(path, kernel="abacus")
    with pytest.raises(TypeError, match=r"unknown setting 'treads'; did you mean 'threads'\?"):
        GemRunContext(path, treads=2)  # type: ignore[call-arg]


def test_context_is_the_compiled_one_unless_lowered(tmp_path: Path) -> None:
    file = tmp_path / "long.gembin"
    file.write_bytes(make_image.make(replace(SHAPE, context=1500), seed=4))
    with GemRunContext(file, ignore_memory=True) as long:
        assert long.stats().kv_size == 1500
        assert long.infer("x" * 1200, 1, ignore_stop_ids=True).stats.prompt_tokens == 1200
    with GemRunContext(file, ignore_memory=True, kv_cache_size=1024) as short:
        assert short.stats().ram_total == long_total(file)
        remedy = r"raise --kv-cache-size \(kv_cache_size\) from 1024 to at most the compiled 1500$"
        with pytest.raises(PromptError, match=r"1200 tokens, room for 1024\); .*" + remedy):
            short.infer("x" * 1200)
        with pytest.raises(ContextFullError, match=remedy):
            short.prefill([1] * 1025)
        with pytest.raises(PromptError, match=r"compile with a larger --kv-cache-size$"):
            short.infer("x" * 1501)


def long_total(file: Path) -> int:
    with GemRunContext(file, ignore_memory=True) as ctx:
        return ctx.stats().ram_total


NAN = float("nan")
RUN_MESSAGES = [{"role": "user", "content": "hi"}]
WRONG_TYPES: list[tuple[str, Callable[[Any], object]]] = [
    ("prompt: 5 is of type int; use a str", lambda c: c.infer(5)),
    ("prompt: None is of type NoneType; use a str", lambda c: c.infer(None)),
    ("prompt: b'x' is of type bytes; use a str", lambda c: c.stream(b"x")),
    ("max_tokens: 'x' is of type str; use 1 to 2147483647", lambda c: c.infer("x", "x")),
    ("max_tokens: 1.5 is of type float; use 1 to", lambda c: c.infer("x", 1.5)),
    ("max_tokens: True is of type bool; use 1 to", lambda c: c.infer("x", True)),
    ("messages: 'hi' is of type str; use a list of messages", lambda c: c.chat("hi")),
    ("messages: None is of type NoneType; use a list", lambda c: c.chat(None)),
    ("messages: {'role': 'user'} is of type dict; use a list", lambda c: c.chat({"role": "user"})),
    ("messages[0]: 'hi' is of type str; use {", lambda c: c.chat(["hi"], stream=True)),
    ("messages[0] content: 5 is of type int", lambda c: c.chat([{"role": "user", "content": 5}])),
    ("temperature: 'hot' is of type str; use 0 to 100", lambda c: c.infer("x", temperature="hot")),
    ("top_k: 1.5 is of type float; use 0 to", lambda c: c.sample(top_k=1.5)),
    ("seed: None is of type NoneType; use 0 to", lambda c: c.infer("x", seed=None)),
    ("stop: b'END' is of type bytes; use a text, or a list", lambda c: c.infer("x", stop=b"END")),
    ("bos: nan is of type float; use True or False", lambda c: c.tokenize("x", bos=NAN)),
    ("control: 'no' is of type str; use True", lambda c: c.detokenize([1], control="no")),
    (
        "ignore_stop_ids: array([1, 2]) is of type ndarray; use True",
        lambda c: c.infer("x", ignore_stop_ids=np.array([1, 2])),
    ),
    ("stop: 5 is of type int; use a str", lambda c: c.infer("x", stop=[5])),
    ("banned: 5 is of type int; use a sequence", lambda c: c.infer("x", banned=5)),
    ("bias: [1] is of type list; use a mapping", lambda c: c.infer("x", bias=[1])),
    ("bias[1]: 'a' is of type str; use a finite", lambda c: c.infer("x", bias={1: "a"})),
    (
        "ignore_stop_ids: 'no' is of type str; use True",
        lambda c: c.infer("x", ignore_stop_ids="no"),
    ),
    ("text: 5 is of type int; use a str", lambda c: c.tokenize(5)),
    ("ids: 'abc' is of type str; use a sequence", lambda c: c.detokenize("abc")),
    ("ids: 1.5 is of type float; use 0 to", lambda c: c.prefill([1.5])),
    ("token: 'a' is of type str; use 0 to", lambda c: c.decode("a")),
    ("callback: 5 is of type int; use a function", lambda c: c.eval([1], 5)),
    (
        "unknown setting 'temprature'; did you mean 'temperature'?",
        lambda c: c.infer("x", temprature=1),
    ),
]
WRONG_VALUES: list[tuple[str, Callable[[Any], object]]] = [
    ("max_tokens: 0 is out of range; use 1 to 2147483647", lambda c: c.infer("x", 0)),
    ("max_tokens: -1 is out of range; use 1 to", lambda c: c.stream("x", -1)),
    ("max_tokens: 2147483648 is out of range", lambda c: c.infer("x", 2**31)),
    ("messages: [] is out of range; use a list of messages", lambda c: c.chat([])),
    (
        "messages[1] role: 'bot' is out of range; use system, user, assistant",
        lambda c: c.chat([*RUN_MESSAGES, {"role": "bot", "content": "x"}]),
    ),
    (
        "messages[0]: {'role': 'user'} has no 'content'; add it",
        lambda c: c.chat([{"role": "user"}]),
    ),
    ("temperature: -1 is out of range; use 0 to 100", lambda c: c.infer("x", temperature=-1)),
    ("temperature: nan is out of range", lambda c: c.infer("x", temperature=float("nan"))),
    ("top_k: -1 is out of range; use 0 to", lambda c: c.infer("x", top_k=-1)),
    ("top_p: 0 is out of range; use more than 0, up to 1", lambda c: c.infer("x", top_p=0)),
    ("min_p: 1 is out of range; use 0 to less than 1", lambda c: c.sample(min_p=1)),
    ("seed: 18446744073709551616 is out of range", lambda c: c.infer("x", seed=2**64)),
    ("deadline_ms: -1 is out of range; use 0 to", lambda c: c.infer("x", deadline_ms=-1)),
    ("stop: '' is out of range; use 1 to 128 bytes", lambda c: c.infer("x", stop=[""])),
    ("stop: 9 texts are too many; use 0 to 8", lambda c: c.infer("x", stop=["a"] * 9)),
    ("banned: 4097 ids are too many; use 0 to 4096", lambda c: c.infer("x", banned=[1] * 4097)),
    ("banned: 200 is out of range; use 0 to 199", lambda c: c.infer("x", banned=[200])),
    ("bias_ids: 200 is out of range; use 0 to 199", lambda c: c.infer("x", bias={200: 1.0})),
    ("temperature: 1000000", lambda c: c.infer("x", temperature=10**400)),
    ("top_p: a huge number is out of range", lambda c: c.infer("x", top_p=10**5000)),
    ("top_k: a huge number is out of range", lambda c: c.infer("x", top_k=10**5000)),
    ("deadline_ms: inf is out of range", lambda c: c.infer("x", deadline_ms=float("inf"))),
    ("bias[1]: nan is out of range; use a finite", lambda c: c.infer("x", bias={1: NAN})),
    ("bias_values: number 0 is not usable; use finite", lambda c: c.infer("x", bias={1: 1e300})),
    ("bias: -1 is out of range; use 0 to", lambda c: c.infer("x", bias={-1: 1.0})),
    ("ids: 18446744073709551616 is out of range", lambda c: c.prefill([2**64])),
    ("steps: -1 is out of range; use 0 to 512", lambda c: c.test_vector([1], -1)),
    ("stop: holds a NUL character; remove it", lambda c: c.infer("x", stop="a\0b")),
    ("token: -1 is out of range; use 0 to", lambda c: c.decode(-1)),
    ("token id: 200 is out of range; use 0 to 199", lambda c: c.prefill([200])),
]


@pytest.mark.parametrize(("sentence", "call"), WRONG_TYPES, ids=[s for s, _ in WRONG_TYPES])
def test_wrong_types(ctx: GemRunContext, sentence: str, call: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError) as caught:
        call(ctx)
    assert isinstance(caught.value, CallError)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("sentence", "call"), WRONG_VALUES, ids=[s for s, _ in WRONG_VALUES])
def test_wrong_values(ctx: GemRunContext, sentence: str, call: Callable[[Any], object]) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        call(ctx)
    assert isinstance(caught.value, CallError)
    assert not isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"threads": 0}, "threads: 0 is out of range; use 1 to 8"),
        ({"threads": -1}, "threads: -1 is out of range; use 1 to 8"),
        ({"threads": 9}, "threads: 9 is out of range; use 1 to 8"),
        ({"threads": "2"}, "threads: '2' is of type str; use 1 to 8"),
        ({"kv_cache_size": 0}, "kv_cache_size: 0 is out of range; use 1 to"),
        ({"prefill_batch_size": 0}, "prefill_batch_size: 0 is out of range; use 1 to"),
        ({"prefill_batch_size": 500}, "prefill_batch_size: 500 is out of range; use 1 to 16"),
        ({"thread_affinity": -1}, "thread_affinity: -1 is out of range; use 0 to"),
        (
            {"thread_affinity": 2**63},
            "thread_affinity: 0x8000000000000000 is out of range; use bits",
        ),
        ({"lock_memory": 2}, "lock_memory: 2 is of type int; use True or False"),
        ({"kernel": 5}, "kernel: 5 is of type int; use a str"),
    ],
)
def test_wrong_configs(path: Path, config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CallError, match=re.escape(sentence)):
        GemRunContext(path, **config)


def test_a_wrong_path() -> None:
    with pytest.raises(TypeError, match="path: 5 is of type int; use a str or a Path"):
        GemRunContext(5)  # type: ignore[arg-type]
    for name in ("made\0.gembin", Path("made\0.gembin")):
        with pytest.raises(CallError, match="holds a NUL character; remove it"):
            GemRunContext(name)
    with pytest.raises(CallError, match="is no name of a file; use one"):
        GemRunContext("\ud800")


def test_a_short_deadline_is_one(ctx: GemRunContext) -> None:
    tokens = ctx.infer("hello", 400, deadline_ms=1e-7, ignore_stop_ids=True)
    assert tokens.finish_reason == "deadline"
    assert ctx.infer("hello", 4, deadline_ms=0, ignore_stop_ids=True).finish_reason == "max_tokens"


def test_a_text_is_one_stop(ctx: GemRunContext) -> None:
    bias = {ord("a"): 1e6}
    assert ctx.infer("x", 6, bias=bias, stop="aab").finish_reason == "max_tokens"
    assert ctx.infer("x", 6, bias=bias, stop="aa").finish_reason == "stop_string"


def test_settings_are_read_once(ctx: GemRunContext) -> None:
    usual = ctx.infer("x", 1, temperature=0, ignore_stop_ids=True)
    other = ctx.infer("x", 1, temperature=0, ignore_stop_ids=True, banned=iter(usual))
    assert usual[0] != other[0]
    stopped = ctx.infer("x", 6, bias={ord("a"): 1e6}, stop=iter(["aa"]))
    assert stopped.finish_reason == "stop_string"


INTERRUPT = """
import os, signal, sys, threading, time
from gemrun import GemRunContext
c = GemRunContext(sys.argv[1], threads=1, ignore_memory=True)
def later():
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
for _ in range(15):
    threading.Thread(target=later).start()
    try:
        while True:
            c.infer("hello", 400, ignore_stop_ids=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


def test_an_interrupt_is_never_lost(path: Path) -> None:
    """Wherever it comes, in a callback's first line too."""
    command = [sys.executable, "-c", INTERRUPT, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "interrupted\n" * 15


def test_codes_become_classes() -> None:
    tree = {-1: CallError, -2: BusyError, -38: ArtifactError, -71: MachineError, -85: RunError}
    for code, kind in tree.items():
        error = error_of(code, "x: y; z")
        assert type(error) is kind
        assert isinstance(error, GemRunError)
        assert error.code == code


def test_a_callbacks_exception_comes_out(ctx: GemRunContext) -> None:
    def fail(_position: int, _row: memoryview) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        ctx.eval([1, 2], fail)  # type: ignore[arg-type]
    assert len(ctx.infer("hello", 2, ignore_stop_ids=True)) == 2


def test_a_callback_may_not_call_the_context(ctx: GemRunContext) -> None:
    ctx.reset_kv_cache()
    with pytest.raises(BusyError):
        ctx.eval([1, 2], lambda _p, _row: ctx.tokenize("x"))
    with pytest.raises(BusyError):
        ctx.eval([1, 2], lambda _p, _row: ctx.close())
    assert ctx.stats().kv_used >= 0


def test_lower_context(path: Path) -> None:
    with GemRunContext(path, kv_cache_size=8, threads=1) as small:
        assert small.infer("hello", 100, temperature=0, ignore_stop_ids=True).stats.kv_size == 8
        assert small.stats().kv_used == 8


def test_close_is_final_and_may_be_repeated(ctx: GemRunContext) -> None:
    stream = ctx.stream("hello", 400, temperature=0, ignore_stop_ids=True)
    next(stream)
    ctx.close()
    ctx.close()
    for _ in stream:  # ends, one way or the other
        pass
    for call in (lambda: ctx.infer("x"), ctx.stats, ctx.reset_kv_cache, lambda: ctx.tokenize("x")):
        with pytest.raises(ClosedError):
            call()
    ctx.cancel()


def test_cancel_from_another_thread(ctx: GemRunContext) -> None:
    timer = threading.Timer(0.01, ctx.cancel)
    timer.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (
            ctx.infer("hello", 500, temperature=0, ignore_stop_ids=True).finish_reason
            == "cancelled"
        ):
            break
        timer = threading.Timer(0.01, ctx.cancel)
        timer.start()
    else:
        pytest.fail("no run was cancelled in a minute")
    timer.cancel()


def test_many_threads_get_right_answers(path: Path) -> None:
    with GemRunContext(path, threads=2, ignore_memory=True) as shared:
        wanted = {p: list(shared.infer(p, 4, temperature=0)) for p in ("one", "two", "six")}
        wrong: list[str] = []

        def ask() -> None:
            for i in range(17):
                prompt = ("one", "two", "six")[i % 3]
                if list(shared.infer(prompt, 4, temperature=0)) != wanted[prompt]:
                    wrong.append(prompt)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_close_in_the_middle_of_other_threads(path: Path) -> None:
    shared = GemRunContext(path, threads=2, ignore_memory=True)
    ended: list[BaseException] = []

    def ask() -> None:
        try:
            while True:
                shared.infer("hello", 50, temperature=0, ignore_stop_ids=True)
        except BaseException as error:
            ended.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    shared.close()
    for thread in threads:
        thread.join()
    assert [type(e) for e in ended] == [ClosedError] * 4


CLOSERS = """
import sys, threading
from gemrun import GemRunContext
from gemrun.errors import ClosedError
def ask(c):
    try:
        while True:
            c.infer("hello", 50, temperature=0, ignore_stop_ids=True)
    except ClosedError:
        pass
for _ in range(30):
    c = GemRunContext(sys.argv[1], threads=1, ignore_memory=True)
    threads = [threading.Thread(target=ask, args=(c,)) for _ in range(4)]
    threads += [threading.Thread(target=c.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    c.close()
"""


def test_many_may_close_at_once(path: Path) -> None:
    # In a process of its own: threads that wait for ever would keep this one from ending.
    subprocess.run([sys.executable, "-c", CLOSERS, str(path)], timeout=60, check=True)


def test_a_forked_child_is_refused(ctx: GemRunContext) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ctx.infer("hello", 2)
        except ClosedError as error:
            code = 0 if "fork" in str(error) else 2
        ctx.close()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert len(ctx.infer("hello", 2, ignore_stop_ids=True)) == 2


EXITS = {
    "live stream": "s = c.stream('hello', 400, ignore_stop_ids=True); next(s)",
    "stream in a list": "a = [c.stream('x', 400, ignore_stop_ids=True)]; next(a[0]); next(a[0])",
    "never closed": "c.infer('hello', 2)",
    "in a cycle": "a = [c]; a.append(a); c.infer('hello', 1)",
}


@pytest.mark.parametrize("body", EXITS.values(), ids=EXITS.keys())
def test_the_interpreter_ends_cleanly(path: Path, body: str) -> None:
    code = f"from gemrun import GemRunContext\nc = GemRunContext({str(path)!r}, threads=2)\n"
    done = subprocess.run(
        [sys.executable, "-c", code + body],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_needs_no_numpy(path: Path) -> None:
    code = (
        "import sys\nsys.modules['numpy'] = None\nfrom gemrun import GemRunContext\n"
        f"with GemRunContext({str(path)!r}) as c:\n"
        "    c.infer('hello', 2); c.prefill([1]); c.logits()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
