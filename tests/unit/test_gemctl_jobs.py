"""Jobs, threads that are waited for, the first look at a file, and what is shown of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemctl import waiting
from gemctl.errors import ApiError
from gemctl.events import EventHub
from gemctl.serve import candidate
from gemctl.serve.jobs import Job
from gemctl.show import render
from gemrun.format.reader import check_front, read_artifact
from gemrun.format.spec import MAGIC

GOLDEN = sorted((Path(__file__).resolve().parents[1] / "golden").glob("v1.0/*.gembin"))


async def cancelled(work: Callable[[], None], stop: threading.Event) -> None:
    """Cancel a task whose thread is at work, and wait for its end."""
    task = asyncio.ensure_future(waiting.in_thread(work))
    await asyncio.sleep(0.05)
    stop.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_cancellation_waits_for_its_thread() -> None:
    stop, seen = threading.Event(), list[str]()

    def work() -> None:
        stop.wait(10)
        time.sleep(0.1)
        seen.append("thread")

    async def run() -> None:
        await cancelled(work, stop)
        seen.append("task")

    asyncio.run(run())  # whose end waits for all threads
    assert seen == ["thread", "task"]


def test_a_thread_that_fails_under_a_cancellation_is_still_a_cancellation() -> None:
    stop = threading.Event()

    def work() -> None:
        stop.wait(10)
        raise ApiError("cancelled", "stopped")

    asyncio.run(cancelled(work, stop))


def test_results_and_errors_of_a_thread() -> None:
    assert asyncio.run(waiting.in_thread(lambda a, b: a + b, 3, 4)) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(waiting.in_thread(lambda: 1 // 0))


async def begun(job: Job, seconds: float = 30.0) -> None:
    job.task = asyncio.ensure_future(job.carry_out(asyncio.sleep(seconds)))
    await asyncio.sleep(0)


def test_a_job_ends_once_and_up_to_its_point_of_no_return() -> None:
    async def run() -> None:
        job = Job("pilot", "staging")
        await begun(job)
        assert job.as_dict()["can_cancel"]
        assert job.cancel("who asked for it is gone")
        assert not job.as_dict()["can_cancel"]
        assert job.stop.is_set()
        assert job.cancel("another reason")  # it changes nothing any more
        assert job.task is not None
        with pytest.raises(ApiError) as error:
            await job.task
        assert error.value.code == "cancelled"
        assert error.value.message == (
            "pilot: the staging was cancelled, who asked for it is gone; start it again"
        )
        with pytest.raises(asyncio.CancelledError):
            job.settle()
        late = Job("pilot", "replacement")
        await begun(late)
        late.settle()
        assert not late.cancel()
        assert not late.stop.is_set()
        late.cut("gemctld stops")  # the daemon's end asks nobody
        assert late.task is not None
        with pytest.raises(ApiError, match="gemctld stops"):
            await late.task

    asyncio.run(run())


def test_followers_of_a_hub_that_is_closed_get_everything_and_end() -> None:
    async def follow(hub: EventHub) -> list[int]:
        with hub.follow() as events:
            return [event.seq async for event in events]

    async def run() -> None:
        hub = EventHub()
        task = asyncio.ensure_future(follow(hub))
        await asyncio.sleep(0)
        for _ in range(300):  # more than a follower may lag behind
            hub.publish("a")
        hub.close()
        hub.publish("b")
        seen = await task
        assert seen[-1] == 300
        assert hub.last == 301
        assert await follow(hub) == []

    asyncio.run(run())


# ---- the first look ----


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_front_of_an_artifact_is_enough(path: Path, tmp_path: Path) -> None:
    """For every good file; and for what is wrong in front the reader has the same code."""
    data = path.read_bytes()
    front = data[: candidate.FRONT_MOST]
    assert check_front(front, len(data)).file_size == len(data)
    with path.open("rb") as stream:
        candidate.check("pilot", stream.fileno(), len(data))
    for at in range(0, 512 + 128 * 16, 23):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        codes = []
        for attempt in (
            lambda image: check_front(bytes(image[: candidate.FRONT_MOST]), len(image)),
            lambda image: read_artifact(bytes(image), "structure", image=True),
        ):
            try:
                attempt(damaged)
                codes.append(None)
            except ValueError as error:
                codes.append(error.code)  # type: ignore[attr-defined]
        if codes[0] is not None:
            assert codes[0] == codes[1], at


@pytest.mark.parametrize("size", [1, 7, 8, 100, 511, 512, 1000])
def test_a_front_that_is_cut_is_refused(size: int, tmp_path: Path) -> None:
    path = tmp_path / "cut"
    path.write_bytes(GOLDEN[0].read_bytes()[:size])
    with path.open("rb") as stream, pytest.raises(ApiError) as error:
        candidate.check("pilot", stream.fileno(), 1 << 30)
    assert error.value.code == "refused"
    assert error.value.message.startswith(f"pilot: file: {size} bytes, ")


@pytest.mark.parametrize(
    ("front", "what"),
    [
        (b"GGUF\x03", "a GGUF checkpoint"),
        (b"PK\x03\x04abc", "a ZIP archive, as .pt checkpoints are"),
        (b"\x80\x02}q\x00", "a pickle, as old .pt checkpoints are"),
        (b"\x10\0\0\0\0\0\0\0{\"a\":{}}", "a safetensors checkpoint"),
        (b"\x10\0\0\0\0\0\0\x7f{\"a\":{}}", ""),  # longer than the file
        (b"\x1f\x8b\x08", "a gzip archive"),
        (bytes(100) + b"x" + bytes(156) + b"ustar\x0000", "a tar archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"),
        ("für Rolf\n".encode(), "text"),
        ("für".encode()[:-1] + b"\xc3", "text"),  # cut in the middle of a letter
        (b"\xff\xfe\x00\x01", ""),
        (bytes(64), "zeros"),
    ],
)  # fmt: skip
def test_what_a_file_looks_like(front: bytes, what: str) -> None:
    found, remedy = candidate.looks_like(front, 1000)
    assert found == what
    assert remedy


def test_the_magic_looks_like_nothing_else() -> None:
    assert candidate.looks_like(MAGIC, 1000)[0] == ""


# ---- what is shown ----


def status(current: str | None, previous: str | None, tried: str | None) -> dict[str, Any]:
    digest = tried or current
    return {"digest": digest, "current": current, "previous": previous,
            "on_probation": tried is not None}  # fmt: skip


@pytest.mark.parametrize(
    ("found", "marks"),
    [
        (status("a", "b", None), {"a": "current", "b": "previous", "c": ""}),
        (status("a", None, None), {"a": "current", "b": ""}),
        (status("a", "b", "c"),
         {"a": "serves again if the probation fails", "b": "", "c": "on probation"}),
        (status(None, None, "c"), {"c": "on probation", "a": ""}),
        (status("a", "b", "a"),
         {"a": "on probation", "b": "serves again if the probation fails"}),
        ({**status("a", "b", None), "attached": True}, {"a": "current", "b": "previous"}),
        ({**status("a", "b", None), "attached": True, "digest": None},
         {"a": "the newest good one, not in use", "b": ""}),
    ],
)  # fmt: skip
def test_what_a_version_is_to_its_model(found: dict[str, Any], marks: dict[str, str]) -> None:
    assert {digest: render.mark(found, digest) for digest in marks} == marks


def test_how_far_a_job_is() -> None:
    job = Job("pilot", "staging", clock=lambda: 100.0)
    job.since = 30.0
    assert render.job(job.as_dict()) == "staging, for 1 min 10 s"
    job.begin("stage")
    job.progress(3 << 20, 7 << 20)
    assert render.job(job.as_dict()) == "staging, stage 3 MiB of 7 MiB, for 1 min 10 s"
    job.begin("verify")
    assert render.job(job.as_dict()) == "staging, verify, for 1 min 10 s"
