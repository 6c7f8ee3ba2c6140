"""What an engine may reuse of its cache: only what the same owner left there for that; and how long
tests and a warm-up may work. The engine is a stand-in that keeps what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gemctl.config import Config, WorkerConfig
from gemctl.core import policy
from gemctl.core.slots import Crashes
from gemctl.errors import ApiError
from gemctl.events import EventHub
from gemctl.serve import worker as worker_
from gemctl.serve.models import Models
from gemctl.serve.slot import Slot
from gemctl.serve.worker import Facts, Worker
from gemctl.show.history import History
from gemctl.show.metrics import Metrics
from gemctl.store.state import StateFile
from gemctl.store.store import Store

DONE = {
    "event": "done", "finish": "max_tokens", "prompt_tokens": 4, "generated_tokens": 1,
    "kv_used": 5, "kv_size": 64, "nonfinite_errors": 0, "ttft_ms": 1.0, "prefill_tps": 1.0,
    "decode_tps": 1.0, "decode_max_ms": 1.0, "reused": 0,
}  # fmt: skip


class Engine:
    """A worker that refuses the prompt "bad", and dies at "kill"."""

    def __init__(self) -> None:
        self.owner: str | None = None
        self.told: list[bool] = []
        self.alive = True

    async def generate(
        self, fields: dict[str, Any], most_s: float | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        self.told.append(fields["reuse"])
        if fields["prompt"] == "bad":
            raise ApiError("bad_request", "pilot: longer than the context; shorten it")
        if fields["prompt"] == "kill":
            self.alive = False
            raise ApiError("failed", "pilot: its worker ended")
        yield {"event": "token", "token": 1, "text": "a"}
        yield DONE


class Bench:
    """A model that serves by an Engine."""

    def __init__(self, folder: Path) -> None:
        self.store, state = Store(folder), StateFile(folder)
        parts = (self.store, state, EventHub(), History(), Metrics())
        self.models = Models(Config(), *parts)
        self.model = self.models.add("pilot")
        self.slot = Slot("pilot", "0" * 64, folder / "x", self.models.hub, Crashes())
        self.slot.state = "serving"
        self.engine: Any = Engine()
        self.slot.worker = self.engine
        self.model.current = self.slot
        self.model.turns.serve(self.slot)

    async def ask(self, owner: str, reuse: bool, prompt: str = "abc") -> bool:
        """One request; whether the engine was allowed to reuse."""
        request = policy.Waiting("1", self.models.clock())
        fields = {"prompt": prompt, "reuse": reuse}
        async for _ in self.models.generate(self.model, fields, request, owner):
            pass
        return bool(self.engine.told[-1])


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def test_only_the_same_owner_reuses_and_only_what_was_left_for_it(tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path)
        assert not await bench.ask("a", True)  # nothing is there
        assert await bench.ask("a", True)
        assert not await bench.ask("b", True)  # a's
        assert await bench.ask("b", True)
        assert not await bench.ask("a", True)  # b's, and what a left is gone
        assert not await bench.ask("a", False)
        assert not await bench.ask("a", True)  # the one before left nothing
        assert not await bench.ask("", False)
        assert not await bench.ask("", True)

    run(body())


def test_a_request_that_fails_makes_nobody_the_owner(tmp_path: Path) -> None:
    """The engine refuses it before it empties the cache: what is there is still another one's."""

    async def body() -> None:
        bench = Bench(tmp_path)
        await bench.ask("a", True)
        for _ in range(2):
            with pytest.raises(ApiError, match="longer"):
                await bench.ask("b", True, "bad")
            assert not bench.engine.told[-1]
        assert not await bench.ask("b", True)
        assert await bench.ask("b", True)
        with pytest.raises(ApiError, match="longer"):
            await bench.ask("b", True, "bad")
        assert not await bench.ask("b", True)

    run(body())


def test_a_request_that_is_left_early_makes_nobody_the_owner(tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path)
        await bench.ask("a", True)
        request = policy.Waiting("1", bench.models.clock())
        fields = {"prompt": "abc", "reuse": True}
        events = bench.models.generate(bench.model, fields, request, "a")
        assert (await anext(events))["event"] == "token"
        await events.aclose()  # type: ignore[attr-defined]
        assert not await bench.ask("a", True)

    run(body())


def test_a_worker_that_takes_over_has_no_owner(tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path)
        await bench.ask("a", True)
        bench.slot.worker = bench.engine = fresh = Engine()  # type: ignore[assignment]
        assert not await bench.ask("a", True)
        assert fresh.owner == "a"

    run(body())


def test_nobody_waits_for_a_model_that_was_given_up_meanwhile(tmp_path: Path) -> None:
    async def body() -> None:
        bench = Bench(tmp_path)
        bench.slot.state = "faulted"
        with pytest.raises(ApiError, match="gemctl model clear pilot, then gemctl model load"):
            await bench.ask("a", False)
        bench.slot.state = "serving"

        async def die() -> None:
            with pytest.raises(ApiError, match="its worker ended"):
                await bench.ask("a", False, "kill")

        asked = asyncio.create_task(die())
        await asyncio.sleep(0)
        bench.slot.state = "faulted"
        await asked
        assert len(bench.engine.told) == 1

    run(body())


def test_versions_in_use_are_a_model_s_own(tmp_path: Path) -> None:
    """Two models may have the same version: a copy each."""
    bench = Bench(tmp_path)
    bench.models.want("spare", digest="1" * 64)
    assert bench.models.in_use() == {("pilot", "0" * 64), ("spare", "1" * 64)}


# ---- how long a worker may work ----


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    """One whose clock goes a second with every look."""
    monkeypatch.setattr(worker_, "LOOK_S", 0.001)
    seconds = iter(range(1_000_000))
    path = Path("/x/" + "ab" * 32 + ".gembin")
    return Worker("pilot", path, WorkerConfig(), lambda: next(seconds))


def test_a_worker_that_neither_lives_nor_ends_is_lost(tmp_path: Path) -> None:
    """The watchdog is not fed then: what its heartbeat should have ended is still there."""
    now = 100.0
    made = Worker("pilot", tmp_path / "x", WorkerConfig(hang_s=20.0), lambda: now)
    assert not made.lost  # not spawned
    made._process, made._pulse = Any, worker_.Pulse(answered=100.0, moved=100.0)  # type: ignore
    now = 124.0
    assert not made.lost  # its heartbeat is about to end it
    now = 126.0
    assert made.lost
    made._pulse.answered = 125.0
    assert made.lost  # it answers, and does not get on
    made._testing = True  # tests are steps that nobody counts
    assert not made.lost
    made._testing = False
    made.ended.set()
    assert not made.lost


@pytest.mark.parametrize(("share", "least"), [(1.0, 10), (0.5, 20), (0.05, 200)])
def test_what_the_pace_makes_it_sleep_does_not_count(
    worker: Worker, share: float, least: int
) -> None:
    async def body() -> None:
        worker.share = share
        never = asyncio.get_running_loop().create_future()
        with pytest.raises(ApiError) as late:
            await worker._at_work(never, 10.0, "warm-up")
        assert late.value.code == "timeout"
        what = "pilot: its warm-up took more than 10 s of work; raise worker.start_timeout_s"
        assert late.value.message == what
        assert never.cancelled()
        looks = int(worker.clock()) / 2
        assert least - 1 <= looks <= least + 1

    run(body())


def test_work_that_ends_or_fails_is_told(worker: Worker) -> None:
    async def body() -> None:
        async def good() -> int:
            return 3

        async def bad() -> int:
            raise ApiError("refused", "a test vector gave another answer")

        assert await worker._at_work(good(), 10.0, "tests") == 3
        with pytest.raises(ApiError, match="another answer"):
            await worker._at_work(bad(), 10.0, "tests")

    run(body())


def test_an_engine_s_words_have_the_model_s_name(worker: Worker) -> None:
    """Not that of its artifact, and not the store's path."""
    facts = dict.fromkeys(Facts.__dataclass_fields__, 0)
    worker.facts = Facts(**{**facts, "name": "tiny-qwen3"})  # type: ignore[arg-type]
    words = {
        "tiny-qwen3: the prompt has 9 tokens": "pilot: the prompt has 9 tokens",
        f"{worker.path}: cut short": "pilot abababababab: cut short",
        "another: left alone": "another: left alone",
    }
    for said, told in words.items():
        assert worker._named(ApiError("refused", said)).message == told
        assert worker._named(ApiError("refused", said)).code == "refused"
