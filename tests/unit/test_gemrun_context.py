"""GemRunContext on made-up artifacts: results, streams, settings, errors, life and threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path

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
    with pytest.raises(CallError, match="outside the vocabulary"):
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
    with pytest.raises(PromptError):
        ctx.infer("")
    with pytest.raises(PromptError, match="bytes"):
        ctx.infer("x" * 100_000)
    with pytest.raises(CallError, match="NUL"):
        ctx.infer("a\0b")
    with pytest.raises(CallError):
        ctx.infer("hello", 0)
    with pytest.raises(NoChatError):
        ctx.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(CallError, match="no message"):
        ctx.chat([{"role": "robot", "content": "hi"}])
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
    with pytest.raises(CallError):
        GemRunContext(path, kernel="abacus")
    with pytest.raises(TypeError, match="treads"):
        GemRunContext(path, treads=2)  # type: ignore[call-arg]


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
