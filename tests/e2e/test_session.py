"""Sessions: equal bits after save and restore in another process, after a fork, beside each other;
memory; what a file must survive, and what is refused; life and threads in Python."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import json
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from gemrun import GemRunContext
from gemrun.errors import (
    ArgumentTypeError,
    ArtifactError,
    BusyError,
    CallError,
    ClosedError,
    ContextFullError,
    GemRunError,
)
from gemrun.format.reader import read_artifact
from gemrun.format.units import with_units

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 320  # ten blocks: windows of the tiny families wrap several times
SIZE = ("--kv-cache-size", str(CONTEXT))
CACHES = {
    "int8": SIZE,
    "f16": (*SIZE, "--kv-cache-type", "dense", "--effort", "fast"),
    "f32": (*SIZE, "--kv-cache-type", "dense", "--quantization", "none"),
}
HEADER, PIECE = 256, 97
Make = Callable[..., Path]

# What a process that restores does: for every line of `job` one digest. It is this file's follow().
OTHER = """
import json, sys
sys.path[:0] = {paths!r}
from test_session import follow
from gemrun import GemRunContext
for line in sys.stdin:
    job = json.loads(line)
    with GemRunContext(job["model"], ignore_memory=True, **job["config"]) as ctx:
        tokens = ctx.restore(job["session"])
        print(json.dumps([tokens, follow(ctx)]), flush=True)
"""


def opened(path: Path, **config: Any) -> GemRunContext:
    return GemRunContext(path, ignore_memory=True, **config)


def state(ctx: GemRunContext) -> str:
    """What can be seen of a context without changing it."""
    digest = hashlib.sha256(str(ctx.stats().kv_used).encode())
    with contextlib.suppress(CallError):  # no logits
        digest.update(ctx.logits().tobytes() + ctx.embedding().tobytes())
    return digest.hexdigest()


def follow(ctx: GemRunContext, steps: int = 12) -> str:
    """A digest of what follows: ids that the random state draws, their logits, and chunks to the
    end of the context."""
    digest, size, rows = hashlib.sha256(), ctx.stats().kv_size, ctx.info.vocab_rows
    if ctx.stats().kv_used == 0:
        ctx.prefill([1, 2, 3])
    for _ in range(min(steps, size - ctx.stats().kv_used)):
        token = ctx.sample(temperature=1.5, top_k=0, top_p=1.0, seed=11)
        ctx.decode(token)
        digest.update(f"{token} {state(ctx)}".encode())
    while (used := ctx.stats().kv_used) < size:
        ctx.prefill([(used * 7 + 13 * i) % (rows // 2) for i in range(min(40, size - used))])
        digest.update(state(ctx).encode())
    return digest.hexdigest()


def fill(ctx: GemRunContext, tokens: int, seed: int = 5) -> None:
    """Random ids, and some draws so that the random state has gone on."""
    rng = random.Random(seed)
    ctx.reset_kv_cache()
    ctx.prefill([rng.randrange(3, ctx.info.vocab_rows // 2) for _ in range(tokens)])
    for _ in range(3 if tokens else 0):
        ctx.sample(temperature=1.5, top_k=0, top_p=1.0, seed=11)


def sparse(path: Path, target: Path) -> Path:
    """The artifact with heads that keep a part."""
    with read_artifact(path) as artifact:
        windows = [layer.window for layer in artifact.layers for _ in range(layer.kv_heads)]
    keeps = [
        (0, 0) if window else ((1, 1), (0, 0), (2, 2))[i % 3] for i, window in enumerate(windows)
    ]
    if not any(keep != (0, 0) for keep in keeps):
        pytest.fail("no head keeps a part")
    return Path(with_units(path, target, keeps).path)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Make, artifact_cache: Make) -> Path:
    return artifact_cache(tiny_checkpoint("gemma3"), *CACHES["int8"])


@pytest.fixture
def ctx(model: Path) -> Iterator[GemRunContext]:
    with opened(model, threads=2) as context:
        yield context


# ---- equal bits ----
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_what_follows_is_the_same(
    tiny_checkpoint: Make, artifact_cache: Make, tmp_path: Path, family: str
) -> None:
    """Every kind of cache: restored in another process and forked here, with other threads, chunks
    and kernels, against going on in the original."""
    paths = {
        kind: artifact_cache(tiny_checkpoint(family), *options) for kind, options in CACHES.items()
    }
    paths["sparse"] = sparse(paths["int8"], tmp_path / "sparse.gembin")
    jobs, wanted = [], []
    for kind, path in paths.items():
        with (
            opened(path, threads=2) as ctx,
            ctx.session(threads=1, prefill_batch_size=7, kernel="scalar") as fork,
        ):
            assert {"int8": "int8", "sparse": "int8"}.get(kind, kind) == ctx.info.kv_type
            for tokens in (0, 1, 33, 130, CONTEXT - 1, CONTEXT):
                fill(ctx, tokens)
                fill(fork, 50, seed=9)  # whatever was there before
                session = tmp_path / f"{kind}-{tokens}"
                ctx.save(session)
                fork.fork_from(ctx)
                assert state(fork) == state(ctx)
                wanted.append([tokens, follow(ctx)])
                assert follow(fork) == wanted[-1][1]
                for config in (
                    {"threads": 3, "prefill_batch_size": 5},
                    {"threads": 1, "kernel": "scalar", "head": "two-plane"},
                ):
                    job = {"model": str(path), "session": str(session), "config": config}
                    jobs.append((json.dumps(job), wanted[-1]))
    code = OTHER.format(paths=[str(Path(__file__).parent), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="\n".join(line for line, _ in jobs), capture_output=True, text=True, check=False,
        cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [want for _, want in jobs]


def test_sessions_on_threads_give_what_they_give_alone(ctx: GemRunContext, tmp_path: Path) -> None:
    """Runs, saves, restores and forks, at the same time on one model."""
    count = 4
    sessions = [ctx, *(ctx.session(threads=1 + i % 2) for i in range(count - 1))]
    wanted: list[list[str]] = []
    found: list[list[str]] = [[] for _ in sessions]

    def work(index: int, out: list[str]) -> None:
        own = sessions[index]
        for turn in range(3):
            fill(own, 20 + 31 * index + turn, seed=index)
            own.save(tmp_path / f"{index}")
            out.append(own.infer(f"abc {index}", 12, temperature=0.9, seed=turn).text)
            own.restore(tmp_path / f"{index}")
            out.append(follow(own))

    for index in range(count):
        wanted.append([])
        work(index, wanted[-1])
    threads = [threading.Thread(target=work, args=(index, found[index])) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == wanted
    assert len({row[1] for row in found}) == count
    for session in sessions[1:]:
        session.close()


def test_forks_in_both_directions_at_once_do_not_wait_for_ever(ctx: GemRunContext) -> None:
    with ctx.session(threads=1) as other:
        fill(ctx, 20)
        fill(other, 40)
        threads = [
            threading.Thread(target=lambda a=a, b=b: [a.fork_from(b) for _ in range(200)])
            for a, b in ((ctx, other), (other, ctx))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        assert state(ctx) == state(other)


# ---- memory ----
def test_memory_is_that_of_the_regions_and_weights_count_once(
    ctx: GemRunContext, model: Path
) -> None:
    own = {region.name: region.size for region in ctx.regions() if region.name != "stacks"}
    assert own["weights+tables"] >= model.stat().st_size
    for threads in range(1, 9):
        with ctx.session(threads=threads) as session:
            names = [region.name for region in session.regions()]
            assert "weights+tables" not in names
            assert names.count("stacks") == threads - 1
            assert sum(r.size for r in session.regions()) == ctx.session_memory(threads)
            stats = session.stats()
            assert ctx.session_memory(threads) == (
                stats.ram_arena + stats.ram_kv + stats.ram_engine + stats.ram_stacks
            )
    assert ctx.session_memory() == ctx.session_memory(2)
    with ctx.session() as first, first.session() as second:
        assert second.stats().threads == 2
        assert second.session_memory() == ctx.session_memory()
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        assert maps.count(str(model)) == 1
    with pytest.raises(CallError, match="threads: 9 is out of range"):
        ctx.session_memory(9)


# ---- what is refused ----
def refused(ctx: GemRunContext, path: Path | str) -> GemRunError:
    """The error of a file that is refused and changes nothing."""
    before = state(ctx)
    with pytest.raises(GemRunError) as caught:
        ctx.restore(path)
    assert state(ctx) == before
    assert str(path) in str(caught.value)
    assert ";" in str(caught.value)
    return caught.value


def test_cut_files(ctx: GemRunContext, tmp_path: Path) -> None:
    fill(ctx, 40)
    ctx.save(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    fill(ctx, 11)
    for size in (*range(0, len(data), PIECE), len(data) - 1):
        (tmp_path / "cut").write_bytes(data[:size])
        error = refused(ctx, tmp_path / "cut")
        assert isinstance(error, ArtifactError)
        assert "cut short" in str(error)
    (tmp_path / "cut").write_bytes(data + b"\0")
    assert "longer than it should be" in str(refused(ctx, tmp_path / "cut"))
    assert ctx.restore(tmp_path / "whole") == 40


def test_flipped_bits(ctx: GemRunContext, tmp_path: Path) -> None:
    """Every bit of the header, and one in 97 bytes of the rest."""
    fill(ctx, 40)
    ctx.save(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    fill(ctx, 11)
    bits = [*range(8 * HEADER), *range(8 * HEADER, 8 * len(data), 8 * PIECE + 1)]
    for bit in bits:
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "bit").write_bytes(damaged)
        assert isinstance(refused(ctx, tmp_path / "bit"), ArtifactError), bit


def test_another_model_and_another_size(
    tiny_checkpoint: Make, artifact_cache: Make, model: Path, ctx: GemRunContext, tmp_path: Path
) -> None:
    fill(ctx, 40)
    ctx.save(tmp_path / "s")
    others = {
        "another model": artifact_cache(tiny_checkpoint("llama3"), *CACHES["int8"]),
        "another build": sparse(model, tmp_path / "sparse.gembin"),
    }
    for what, path in others.items():
        with opened(path) as other:
            assert f"saved from {what}" in str(refused(other, tmp_path / "s"))
            with pytest.raises(ArtifactError, match="not of one artifact"):
                other.fork_from(ctx)
    with opened(model, kv_cache_size=39) as less:
        error = refused(less, tmp_path / "s")
        assert isinstance(error, ContextFullError)
        assert "40 tokens, longer than this context's kv_cache_size of 39" in str(error)
        with pytest.raises(ContextFullError):
            less.fork_from(ctx)
    with opened(model, kv_cache_size=40) as just:
        assert just.restore(tmp_path / "s") == 40
        assert state(just) == state(ctx)


def test_places_that_are_no_files(ctx: GemRunContext, tmp_path: Path) -> None:
    fill(ctx, 20)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "text").write_text("hello, hello, hello")
    (tmp_path / "file").write_text("x")
    for name in ("pipe", "folder", "loop", "text", "none", "file/below"):
        refused(ctx, tmp_path / name)
    for path in ("/dev/zero", "/dev/null"):
        refused(ctx, path)
    for name in ("pipe", "folder", "none/below", "file/below"):
        with pytest.raises(ArtifactError, match=name):
            ctx.save(tmp_path / name)
    with pytest.raises(ArtifactError, match="path: is empty; name a file"):
        ctx.save("")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert (tmp_path / "file").read_text() == "x"
    names = {"pipe", "folder", "loop", "text", "file"}
    assert {p.name for p in tmp_path.iterdir()} == names  # nothing was left lying about


def test_a_link_is_read_through_and_written_over(ctx: GemRunContext, tmp_path: Path) -> None:
    fill(ctx, 20)
    ctx.save(tmp_path / "target")
    kept = (tmp_path / "target").read_bytes()
    (tmp_path / "link").symlink_to("target")
    assert ctx.restore(tmp_path / "link") == 20
    fill(ctx, 30)
    ctx.save(tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == kept
    assert ctx.restore(tmp_path / "link") == 30
    assert stat.S_IMODE((tmp_path / "link").stat().st_mode) == 0o600


AS_NOBODY = """
import os, sys
from gemrun import GemRunContext
from gemrun.errors import ArtifactError
with GemRunContext(sys.argv[1], threads=1, ignore_memory=True) as ctx:
    ctx.prefill([5, 6, 7])
    if os.geteuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
    try:
        ctx.save(sys.argv[2])
    except ArtifactError as error:
        print(error)
"""


def test_a_folder_that_may_not_be_written(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    (folder / "s").write_text("before")
    folder.chmod(0o555)
    try:
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, str(model), str(folder / "s")],
            capture_output=True, text=True, check=True, cwd=ROOT,
        )  # fmt: skip
    finally:
        folder.chmod(0o755)
    assert re_permission(done.stdout, folder / "s"), done.stdout + done.stderr
    assert [p.name for p in folder.iterdir()] == ["s"]
    assert (folder / "s").read_text() == "before"


def re_permission(text: str, path: Path) -> bool:
    return text.startswith(f"{path}: cannot be written (Permission denied); check the path and its")


FULL = """
import resource, signal, sys
from gemrun import GemRunContext
from gemrun.errors import ArtifactError
with GemRunContext(sys.argv[1], threads=1, ignore_memory=True) as ctx:
    ctx.prefill([5] * 40)
    for size in range(0, int(sys.argv[3]), 4099):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        try:
            ctx.save(sys.argv[2])
            print("saved")
        except ArtifactError as error:
            print(error)
"""


def test_a_full_disk_leaves_the_old_file(ctx: GemRunContext, model: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: writes stop in the middle."""
    fill(ctx, 60)
    ctx.save(tmp_path / "s")
    kept = (tmp_path / "s").read_bytes()
    fill(ctx, 40)
    ctx.save(tmp_path / "less")
    size = (tmp_path / "less").stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(model), str(tmp_path / "s"), str(size)],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    wanted = f"{tmp_path / 's'}: cannot be written ({os.strerror(errno.EFBIG)}); free some room, or"
    assert len(lines) == len(range(0, size, 4099)) > 3
    assert all(line.startswith(wanted) for line in lines), lines
    assert (tmp_path / "s").read_bytes() == kept
    assert {p.name for p in tmp_path.iterdir()} == {"s", "less"}
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 0


def test_a_mounted_disk_that_is_full(ctx: GemRunContext, tmp_path: Path) -> None:
    """It has room for the old file and all of the new one but a page."""
    folder, page = tmp_path / "disk", os.sysconf("SC_PAGESIZE")
    folder.mkdir()
    fill(ctx, CONTEXT)
    ctx.save(tmp_path / "full")
    with ctx.session() as less:
        fill(less, 3)
        less.save(tmp_path / "less")
    kept = (tmp_path / "less").read_bytes()
    pages = sum(-(-(tmp_path / name).stat().st_size // page) for name in ("full", "less"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={(pages - 1) * page}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        (folder / "s").write_bytes(kept)
        with pytest.raises(ArtifactError, match=r"No space left on device\); free some room"):
            ctx.save(folder / "s")
        assert [p.name for p in folder.iterdir()] == ["s"]
        assert (folder / "s").read_bytes() == kept
        assert ctx.restore(folder / "s") == 3
    finally:
        subprocess.run(["umount", str(folder)], check=False)


SAVER = """
import sys
from gemrun import GemRunContext
with GemRunContext(sys.argv[1], threads=1, ignore_memory=True) as ctx:
    sizes = (30, 200)
    sessions = []
    for size in sizes:
        session = ctx.session()
        session.prefill([5 + i % 50 for i in range(size)])
        sessions.append(session)
    print("ready", flush=True)
    while True:
        for session in sessions:
            session.save(sys.argv[2])
"""


def test_a_kill_leaves_a_whole_file(ctx: GemRunContext, model: Path, tmp_path: Path) -> None:
    """SIGKILL at random times while two states are saved by turns."""
    rng, seen, path = random.Random(4), set(), tmp_path / "s"
    for _ in range(12):
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(model), str(path)],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert saver.stdout is not None
        assert saver.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.03)
        saver.send_signal(signal.SIGKILL)
        saver.wait()
        saver.stdout.close()
        seen.add(ctx.restore(path))
    assert seen <= {30, 200}
    left = [p for p in tmp_path.iterdir() if p != path]
    assert all(p.name.startswith("s.") and p.name.endswith(".partial") for p in left)
    for partial in left:  # what a killed one was at is no session, or a whole one
        if partial.stat().st_size and partial.read_bytes()[:8] != bytes(8):
            assert ctx.restore(partial) in (30, 200)
        else:
            refused(ctx, partial)


# ---- life ----
def test_closing_in_any_order(model: Path) -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)):
        first = opened(model, threads=2)
        second = first.session()
        contexts = [first, second, second.session()]
        fill(contexts[2], 20)
        wanted = state(contexts[2])
        for index in order:
            contexts[index].close()
            for other in contexts:
                if other is not contexts[index] and other._handle.engine is not None:
                    other.infer("abc", 3)
        fill_again = opened(model)
        fill(fill_again, 20)
        assert state(fill_again) == wanted
        fill_again.close()
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        assert str(model) not in maps  # the weights are free with the last of them


def test_the_weights_stay_while_a_session_is_left(model: Path) -> None:
    """Closed, or collected as garbage: in a cycle, too."""
    ctx = opened(model, threads=2)
    session = ctx.session(threads=1)
    cycle: list[Any] = [ctx]
    cycle.append(cycle)
    wanted = session.infer("abc def", 8, temperature=0.0).text
    del ctx, cycle
    gc.collect()
    assert session.infer("abc def", 8, temperature=0.0).text == wanted
    again = session.session()
    session.close()
    assert again.infer("abc def", 8, temperature=0.0).text == wanted
    del session
    again.close()
    assert str(model) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_calls_on_what_is_closed(ctx: GemRunContext, tmp_path: Path) -> None:
    other = ctx.session()
    other.close()
    other.close()
    for call in (
        lambda: other.save(tmp_path / "s"),
        lambda: other.restore(tmp_path / "s"),
        lambda: other.session(),
        lambda: other.session_memory(),
        lambda: other.fork_from(ctx),
        lambda: ctx.fork_from(other),
    ):
        with pytest.raises(ClosedError):
            call()
    assert len(ctx.infer("abc", 2, ignore_stop_ids=True)) == 2  # nothing is held any more


def test_wrong_arguments(ctx: GemRunContext) -> None:
    with pytest.raises(ArgumentTypeError, match="other: 5 is of type int; use a GemRunContext"):
        ctx.fork_from(5)  # type: ignore[arg-type]
    with pytest.raises(CallError, match="other: is this context itself; give another one"):
        ctx.fork_from(ctx)
    with pytest.raises(ArgumentTypeError, match="session: unknown setting 'thread'"):
        ctx.session(thread=1)  # type: ignore[call-arg]
    with pytest.raises(CallError, match="kv_cache_size"):
        ctx.session(kv_cache_size=CONTEXT + 1)
    with pytest.raises(ArgumentTypeError, match="path"):
        ctx.save(5)  # type: ignore[arg-type]
    with pytest.raises(CallError, match="NUL"):
        ctx.restore("a\0b")


def test_from_a_callback(ctx: GemRunContext, tmp_path: Path) -> None:
    """A running context is busy for itself, and may have one more session."""
    seen: list[str] = []

    def look(_position: int, _logits: object) -> bool:
        with ctx.session(threads=1) as other:
            seen.append(state(other))
            for call in (lambda: ctx.save(tmp_path / "s"), lambda: other.fork_from(ctx)):
                with pytest.raises(BusyError):
                    call()
        return True

    ctx.eval([5, 6, 7], look)
    assert len(seen) == 1


def test_a_forked_process_has_no_sessions(ctx: GemRunContext, tmp_path: Path) -> None:
    session = ctx.session()
    fill(session, 20)
    child = os.fork()
    if child == 0:
        code = 0
        for call in (
            session.session,
            session.session_memory,
            lambda: session.save(tmp_path / "s"),
            lambda: ctx.fork_from(session),
        ):
            try:
                call()
                code = 1
            except ClosedError as error:
                code = code or (0 if "fork" in str(error) else 2)
        session.close()
        del session
        gc.collect()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert len(session.infer("abc", 2, ignore_stop_ids=True)) == 2
    session.close()


EXITS = {
    "never closed": "",
    "model closed": "c.close()",
    "in a cycle": "a = [s, c]; a.append(a); del c, s",
    "in a list": "import builtins; builtins.kept = [s]; del s",
    "forked": "import os\nif os.fork() == 0: sys.exit(0)\nos.wait()",
    "running": (
        "import threading\n"
        "t = threading.Thread(target=s.infer, args=('x', 400), daemon=True); t.start()"
    ),
}


@pytest.mark.parametrize("body", EXITS.values(), ids=EXITS.keys())
def test_the_interpreter_ends_cleanly(model: Path, body: str) -> None:
    code = (
        "import sys\nfrom gemrun import GemRunContext\n"
        f"c = GemRunContext({str(model)!r}, threads=2, ignore_memory=True)\n"
        f"s = c.session(threads=2); s.prefill([5, 6])\n{body}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
