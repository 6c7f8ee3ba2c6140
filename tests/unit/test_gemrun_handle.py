"""GemRunHandle on made-up artifacts: answers, replacement, pace, life, threads, attachment."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import frames
import gemrun
from gemrun import GemRunContext, GemRunHandle, HandleStats, ReplaceTimes, Tokens
from gemrun.errors import (
    ArtifactError,
    CallError,
    ClosedError,
    NoChatError,
    PromptError,
    TestVectorError,
)
from reference import make_image
from reference import records as rec

SHAPE = make_image.Shape(layers=(make_image.Layer(), make_image.Layer(window=32)), context=256)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_stop_ids": True}


def with_test(shape: make_image.Shape, seed: int, file: Path, off: int = 0) -> bytes:
    """An artifact with a test vector that holds, or is off."""

    def fill(image: bytes) -> Any:
        file.write_bytes(image)
        record = np.zeros((), rec.TEST)
        record["prompt_count"], record["step_count"] = 3, 4
        record["prompt"][:3] = [1, 2, 3]
        with GemRunContext(file, ignore_memory=True) as context:
            digest, steps = context.test_vector([1, 2, 3], 4)
        record["digest"], record["steps"][:4] = digest + off, steps
        return record

    return make_image.make(shape, seed, fill)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two versions of a model; others: of another context, of another shape in the same context,
    cut short, with a wrong test vector."""
    folder = tmp_path_factory.mktemp("handle")
    scratch = folder / "scratch"
    made = {
        "a": with_test(SHAPE, 3, scratch),
        "b": with_test(SHAPE, 4, scratch),
        "long": with_test(replace(SHAPE, context=320), 3, scratch),
        "deep": with_test(replace(SHAPE, layers=(*SHAPE.layers, make_image.Layer())), 3, scratch),
        "wrong": with_test(SHAPE, 3, scratch, off=1),
    }
    made["cut"] = made["a"][:-256]
    for name, data in made.items():
        (folder / f"{name}.gembin").write_bytes(data)
    return {name: folder / f"{name}.gembin" for name in made}


@pytest.fixture
def handle(files: dict[str, Path]) -> Iterator[GemRunHandle]:
    with GemRunHandle(files["a"], threads=2, ignore_memory=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def answers(files: dict[str, Path]) -> dict[str, Tokens]:
    """What both versions say to "hello"."""
    found = {}
    for name in ("a", "b"):
        with GemRunContext(files[name], ignore_memory=True) as context:
            found[name] = context.infer("hello", 12, **GREEDY)
    assert found["a"] != found["b"]
    return found


def until(what: Callable[[], object]) -> None:
    """Wait for a state; the run's own limit ends a test whose state never comes."""
    while not what():
        time.sleep(0.002)


@contextmanager
def asking(handle: GemRunHandle) -> Iterator[ThreadPoolExecutor]:
    """Threads for requests; none stays held, whatever fails meanwhile."""
    with ThreadPoolExecutor() as pool:
        try:
            yield pool
        finally:
            with suppress(ClosedError):
                handle.pace()


def mappings(path: Path) -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(str(path))


@pytest.mark.parametrize(
    "settings",
    [
        GREEDY,
        {"temperature": 2.0, "seed": 7, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
        {"bias": {ord("a"): 1e6}, "stop": "aaa"},
        {"repetition_penalty": 1.3, "banned": [5, 6], "ignore_stop_ids": True, "speculate": 3},
        {},
    ],
)
def test_answers_are_those_of_a_context(files: dict[str, Path], settings: dict[str, Any]) -> None:
    with (
        GemRunContext(files["a"], ignore_memory=True) as context,
        GemRunHandle(files["a"], ignore_memory=True) as handle,
    ):
        wanted = context.infer("hello", 20, **settings)
        found = handle.infer("hello", 20, **settings)
        stream = handle.stream("hello", 20, **settings)
        assert "".join(stream) == wanted.text
    for tokens in (found, stream.tokens):
        assert isinstance(tokens, Tokens)
        assert (tokens, tokens.text) == (wanted, wanted.text)
        assert tokens.finish_reason == wanted.finish_reason
        assert tokens.stats.generated_tokens == wanted.stats.generated_tokens


def test_closing_a_stream_ends_the_run(handle: GemRunHandle) -> None:
    with handle.stream("hello", 250, **GREEDY) as stream:
        next(stream)
    last = handle.stats().last
    assert last is not None
    assert last.generated_tokens < 250
    dropped = handle.stream("hello", 250, **GREEDY)
    next(dropped)
    del dropped
    assert len(handle.infer("again", 3, **GREEDY)) == 3


WRONG: list[tuple[str, Callable[[Any], object]]] = [
    ("prompt: 5 is of type int; use a str", lambda h: h.infer(5)),
    ("prompt: b'x' is of type bytes; use a str", lambda h: h.stream(b"x")),
    ("max_tokens: 0 is out of range; use 1 to", lambda h: h.infer("x", 0)),
    ("messages: [] is out of range; use a list", lambda h: h.chat([])),
    (
        "unknown setting 'temprature'; did you mean 'temperature'?",
        lambda h: h.infer("x", temprature=1),
    ),
    ("banned: 200 is out of range; use 0 to 199", lambda h: h.infer("x", banned=[200])),
    ("duty: 1.5 is out of range; use 0 to 1", lambda h: h.pace(1.5)),
    ("duty: -0.1 is out of range; use 0 to 1", lambda h: h.pace(-0.1)),
    ("duty: 'all' is of type str; use 0 to 1", lambda h: h.pace("all")),
    ("prefill_duty: nan is out of range; use 0 to 1", lambda h: h.pace(prefill_duty=float("nan"))),
    ("threads: 9 is out of range; use 0 to 8", lambda h: h.pace(1, 9)),
    ("prefill_threads: 1.5 is of type float; use 0 to 8", lambda h: h.pace(prefill_threads=1.5)),
    ("path: 5 is of type int; use a str or a Path", lambda h: h.replace(5)),
    ("warmup_prompt: 5 is of type int; use a str", lambda h: h.replace("x", warmup_prompt=5)),
    ("allow_layout_change: 2 is of type int", lambda h: h.replace("x", allow_layout_change=2)),
    ("check_weights: 'y' is of type str", lambda h: h.replace("x", check_weights="y")),
    ("warmup_prompt: holds a NUL character", lambda h: h.enable("a\0")),
    ("socket: 5 is of type int; use a str or a Path", lambda h: h.attach(5, "a")),
    ("name: None is of type NoneType; use a str", lambda h: h.attach("/s", None)),
    ("a name has 1 to 64 of a-z, 0-9", lambda h: h.attach("/s", "A")),
    ("over 107 bytes; shorten it", lambda h: h.attach("/" + "s" * 107, "a")),
]


@pytest.mark.parametrize(("sentence", "call"), WRONG, ids=[s for s, _ in WRONG])
def test_wrong_arguments(
    handle: GemRunHandle, sentence: str, call: Callable[[Any], object]
) -> None:
    with pytest.raises(CallError, match=re.escape(sentence)):
        call(handle)
    assert len(handle.infer("hello", 2, **GREEDY)) == 2


def test_wrong_requests_and_files(handle: GemRunHandle, files: dict[str, Path]) -> None:
    with pytest.raises(PromptError, match="600 tokens, room for 256"):
        handle.infer("x" * 600)
    with pytest.raises(PromptError, match="prompt is empty"):
        list(handle.stream(""))
    with pytest.raises(NoChatError):
        handle.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(NoChatError):
        list(handle.chat([{"role": "user", "content": "hi"}], stream=True))
    assert handle.stats().failed == 4
    with pytest.raises(ArtifactError, match="No such file"):
        GemRunHandle(files["a"].with_name("none"))
    with pytest.raises(ArtifactError, match="cut short"):
        GemRunHandle(files["cut"])
    with pytest.raises(CallError, match="threads: 9 is out of range; use 1 to 8"):
        GemRunHandle(files["a"], threads=9)
    with pytest.raises(TypeError, match=r"GemRunHandle: unknown setting 'treads'; did you mean"):
        GemRunHandle(files["a"], treads=2)  # type: ignore[call-arg]
    with pytest.raises(CallError, match=r"available: scalar.*"):
        GemRunHandle(files["a"], kernel="abacus")


def test_replace(files: dict[str, Path], answers: dict[str, Tokens]) -> None:
    """With a kernel forced, whose name must outlive the call that opened."""
    with GemRunHandle(files["a"], ignore_memory=True, kernel="scalar") as handle:
        assert handle.infer("hello", 12, **GREEDY) == answers["a"]
        times = handle.replace(files["b"], warmup_prompt="warm", check_weights=True)
        assert isinstance(times, ReplaceTimes)
        assert times.tests == 1
        assert min(times.open_ms, times.test_ms, times.warmup_ms, times.flip_ms) >= 0
        assert handle.infer("hello", 12, **GREEDY) == answers["b"]
        assert (mappings(files["a"]), mappings(files["b"])) == (0, 1)
        assert handle.stats().replaced == 1
        back = handle.rollback(warmup_prompt="warm")
        assert (back.tests, back.open_ms >= 0) == (0, True)
        assert handle.infer("hello", 12, **GREEDY) == answers["a"]
        assert (mappings(files["a"]), mappings(files["b"])) == (1, 0)
        with pytest.raises(CallError, match="no model before this one") as caught:
            handle.rollback()
        assert caught.value.code == -12
    assert mappings(files["a"]) == 0


def test_what_is_refused_leaves_the_model(
    handle: GemRunHandle, files: dict[str, Path], answers: dict[str, Tokens]
) -> None:
    with pytest.raises(ArtifactError, match="cut short"):
        handle.replace(files["cut"])
    with pytest.raises(ArtifactError, match="No such file"):
        handle.replace(files["a"].with_name("none"))
    with pytest.raises(TestVectorError, match="gave another answer"):
        handle.replace(files["wrong"])
    with pytest.raises(PromptError, match="tokens, room for"):
        handle.replace(files["b"], warmup_prompt="x" * 600)
    for other in ("long", "deep"):
        with pytest.raises(CallError, match="context, KV type or shape differs") as caught:
            handle.replace(files[other])
        assert caught.value.code == -7
    assert handle.infer("hello", 12, **GREEDY) == answers["a"]
    assert handle.stats().replaced == 0
    handle.replace(files["deep"], allow_layout_change=True)
    handle.replace(files["long"], allow_layout_change=True)
    assert len(handle.infer("x" * 300, 1, **GREEDY)) == 1


def test_a_stream_keeps_its_model(
    handle: GemRunHandle, files: dict[str, Path], answers: dict[str, Tokens]
) -> None:
    handle.pace(0, prefill_duty=1)
    stream = handle.stream("hello", 12, **GREEDY)
    first = next(stream)
    handle.replace(files["b"])
    assert mappings(files["a"]) == 1
    with asking(handle) as pool:
        later = pool.submit(handle.infer, "hello", 12, **GREEDY)
        until(lambda: handle.stats().waiting == 1)
        handle.pace()
        assert first + "".join(stream) == answers["a"].text
        assert later.result() == answers["b"]
    assert mappings(files["a"]) == 0


def test_replace_under_load(
    handle: GemRunHandle, files: dict[str, Path], answers: dict[str, Tokens]
) -> None:
    def ask(_: int) -> Tokens:
        return handle.infer("hello", 12, **GREEDY)

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, number) for number in range(120)]
        for number in range(20):
            handle.replace(files["ba"[number % 2]])
        for future in asked:
            assert future.result() in (answers["a"], answers["b"])
    stats = handle.stats()
    assert (stats.requests, stats.failed, stats.replaced) == (120, 0, 20)


def test_disable_and_enable(
    handle: GemRunHandle, files: dict[str, Path], answers: dict[str, Tokens]
) -> None:
    handle.disable()
    assert mappings(files["a"]) == 0
    assert not handle.stats().enabled
    for ask in (handle.infer, lambda *a: list(handle.stream(*a))):
        with pytest.raises(CallError, match="disabled, or the handle closes; enable it") as caught:
            ask("hello", 12)
        assert caught.value.code == -12
    handle.enable("warm")
    assert handle.infer("hello", 12, **GREEDY) == answers["a"]
    handle.disable()
    with pytest.raises(PromptError, match="tokens, room for"):
        handle.enable("x" * 600)
    handle.replace(files["b"])
    assert handle.infer("hello", 12, **GREEDY) == answers["b"]


def test_pace_holds_and_cancel_ends(handle: GemRunHandle, answers: dict[str, Tokens]) -> None:
    handle.pace(0)
    with asking(handle) as pool:
        held = pool.submit(handle.infer, "hello", 12, **GREEDY)
        until(lambda: handle.stats().steps == 1)
        later = pool.submit(handle.infer, "hello", 12, **GREEDY)
        until(lambda: handle.stats().waiting == 1)
        handle.cancel()  # the one inside, not the one that waits
        assert (tuple(held.result()), held.result().finish_reason) == ((), "cancelled")
        handle.pace(1e-9, 1, prefill_duty=0.5, prefill_threads=2)
        stats = handle.stats()
        assert (stats.duty, stats.threads) == (0.001, 1)
        handle.pace()
        assert later.result() == answers["a"]
    assert (handle.stats().duty, handle.stats().threads) == (1, 0)


def test_stats(handle: GemRunHandle) -> None:
    fresh = handle.stats()
    assert fresh == HandleStats(True, False, 0, 0, 1.0, 0, 0, 0, 0, 0, None)
    handle.infer("hello", 12, **GREEDY)
    last = handle.stats().last
    assert last is not None
    assert (last.prompt_tokens, last.generated_tokens, last.finish) == (5, 12, "max_tokens")
    assert handle.stats().steps == 12  # the prompt, and eleven tokens that are fed back


INTERRUPT = """
import os, signal, sys, threading
from gemrun import GemRunHandle
signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner may have it ignored
h = GemRunHandle(sys.argv[1], threads=1, ignore_memory=True)
h.pace(0)
def later(wanted):
    while (s := h.stats()).active != 1 or s.waiting != wanted:
        pass
    os.kill(os.getpid(), signal.SIGINT)
for ask in (h.infer, lambda p: list(h.stream(p))):
    threading.Thread(target=later, args=(0,)).start()
    try:
        ask("hello")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    while h.stats().active:
        pass
held = threading.Thread(target=h.infer, args=("hello",))
held.start()
threading.Thread(target=later, args=(1,)).start()
try:
    h.infer("hello")
except KeyboardInterrupt:
    print("interrupted while it waited", flush=True)
h.pace()
held.join()
print(len(h.infer("hello", 3, temperature=0, ignore_stop_ids=True)))
"""


def test_an_interrupt_ends_a_request_that_is_held(files: dict[str, Path]) -> None:
    command = [sys.executable, "-c", INTERRUPT, str(files["a"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    wanted = "interrupted\ninterrupted\ninterrupted while it waited\n3\n"
    assert (done.returncode, done.stderr, done.stdout) == (0, "", wanted)


def test_close_ends_who_is_inside_and_refuses_who_waits(files: dict[str, Path]) -> None:
    handle = GemRunHandle(files["a"], ignore_memory=True)
    handle.pace(0)
    with asking(handle) as pool:
        asked = [pool.submit(handle.infer, "hello", 12, **GREEDY) for _ in range(5)]
        until(lambda: handle.stats().waiting == 4)
        handle.close()
        ended = [future.exception() for future in asked]
    assert ended.count(None) == 1
    assert sum(isinstance(error, ClosedError) for error in ended) == 4
    assert mappings(files["a"]) == 0


def test_a_closed_handle_says_so(files: dict[str, Path]) -> None:
    handle = GemRunHandle(files["a"], ignore_memory=True)
    handle.close()
    handle.close()
    handle.cancel()
    calls: list[Callable[[], object]] = [
        lambda: handle.infer("x"),
        lambda: list(handle.stream("x")),
        lambda: handle.replace(files["b"]),
        handle.disable,
        handle.enable,
        handle.pace,
        handle.stats,
        lambda: handle.attach("/none", "a"),
        handle.detach,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="handle: closed; open a new one"):
            call()


def test_a_dropped_handle_frees_its_model(files: dict[str, Path]) -> None:
    handle = GemRunHandle(files["a"], ignore_memory=True)
    handle.attach("/none", "dropped")
    assert mappings(files["a"]) == 1
    del handle
    gc.collect()
    assert mappings(files["a"]) == 0


FORK = """
import os, sys
from gemrun import GemRunHandle
from gemrun.errors import ClosedError
h = GemRunHandle(sys.argv[1], ignore_memory=True)
if (pid := os.fork()) == 0:
    try:
        h.infer("x")
    except ClosedError as error:
        os.write(1, f"{error}\\n".encode())
    h.close()
    os._exit(0)
os.waitpid(pid, 0)
print(len(h.infer("x", 2, ignore_stop_ids=True)))
"""


def test_after_a_fork(files: dict[str, Path]) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(files["a"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "handle: made before a fork; open one in this process\n2\n", done.stderr


class Peer:
    """The daemon's end of an attachment."""

    def __init__(self, door: socket.socket) -> None:
        self.socket, _ = door.accept()
        self.stream = self.socket.makefile("rwb")
        line = json.loads(self.stream.readline())
        assert line == {"v": 1, "id": "1", "method": "attach", "params": {"name": "pilot"}}
        self.stream.write(b'{"v":1,"id":"1","result":{}}\n')
        self.stream.flush()
        self.ready = self.hear()

    def hear(self) -> dict[str, Any]:
        event = frames.read(self.stream)
        assert isinstance(event, dict)
        return event

    def ask(self, **fields: Any) -> dict[str, Any]:
        self.stream.write(frames.pack(fields))
        self.stream.flush()
        return self.hear()

    def close(self) -> None:
        self.stream.close()
        self.socket.close()


def test_attach(handle: GemRunHandle, files: dict[str, Path], answers: dict[str, Tokens]) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
        place = Path(folder) / "s"
        handle.attach(place, "pilot")  # before there is a daemon
        with pytest.raises(CallError, match="attached already; detach first"):
            handle.attach(place, "pilot")
        door.bind(str(place))
        door.listen()
        for _ in range(2):  # it comes back by itself
            peer = Peer(door)
            assert peer.ready["event"] == "ready"
            assert (peer.ready["pid"], peer.ready["context"]) == (os.getpid(), 256)
            assert handle.stats().attached
            assert peer.ask(op="pace", id=1, duty=0.25, threads=1)["event"] == "pace"
            assert (handle.stats().duty, handle.stats().threads) == (0.25, 1)
            peer.close()
        peer = Peer(door)
        assert peer.ask(op="replace", id=2, path=str(files["b"]))["event"] == "replaced"
        assert handle.infer("hello", 12, **GREEDY) == answers["b"]
        assert peer.ask(op="disable", id=3)["event"] == "disabled"
        with pytest.raises(CallError, match="disabled"):
            handle.infer("hello", 12)
        assert peer.ask(op="enable", id=4)["event"] == "enabled"
        figures = peer.ask(op="stats", id=5)
        assert (figures["requests"], figures["generated_tokens"]) == (1, 12)
        handle.detach()
        handle.detach()
        stats = handle.stats()
        assert (stats.attached, stats.duty, stats.threads) == (False, 1, 0)
        peer.close()


def test_names_come_when_they_are_used() -> None:
    code = "import gemrun, sys; assert 'gemrun._engine' not in sys.modules; gemrun.GemRunHandle"
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in gemrun.__all__:
        assert getattr(gemrun, name).__name__ == name


def test_many_threads_do_everything(files: dict[str, Path], answers: dict[str, Tokens]) -> None:
    """Whole answers are right, others are the beginning of one, and it all ends."""
    handle = GemRunHandle(files["a"], threads=2, ignore_memory=True)
    stop = threading.Event()

    def ask() -> int:
        whole = 0
        while not stop.is_set() or whole == 0:
            try:
                tokens = handle.infer("hello", 12, **GREEDY)
            except CallError as error:
                assert error.code == -12, error  # noqa: PT017 - the sentence does not matter
                continue
            assert any(tuple(tokens) == answers[v][: len(tokens)] for v in "ab")
            whole += len(tokens) == 12
        return whole

    with asking(handle) as pool:
        asked = [pool.submit(ask) for _ in range(3)]
        for number in range(40):
            handle.pace(number % 2, number % 3, prefill_duty=1)
            handle.replace(files["ab"[number % 2]])
            handle.cancel()
            if number % 5 == 0:
                handle.disable()
                handle.enable()
            handle.attach("/none", "busy")
            handle.detach()
        handle.pace()
        stop.set()
        assert all(future.result() > 0 for future in asked)
    handle.close()
    assert mappings(files["a"]) + mappings(files["b"]) == 0


def test_a_version_compiled_for_shorter_steps_takes_its_own() -> None:
    """A handle's prefill step is a wish: versions behind it are compiled for different ones."""
    path = Path(__file__).parents[1] / "golden" / "v1.0" / "tiny-int4.gembin"
    with pytest.raises(CallError, match="prefill_batch_size"):
        GemRunContext(path, prefill_batch_size=64, ignore_memory=True)
    with GemRunHandle(path, prefill_batch_size=64, ignore_memory=True) as handle:
        assert len(handle.infer("abc", 3, ignore_stop_ids=True)) == 3
    with pytest.raises(CallError, match="threads"):
        GemRunHandle(path, prefill_batch_size=64, threads=9, ignore_memory=True)
