"""A worker: one process of `gemrun --serve`, started, watched and ended.

The process is never trusted: it may refuse the artifact, crash, hang or write garbage, and only
its own requests fail. It shares the page cache with its successor, so that a restart is warm. It
ends by itself when the daemon's end of its socket closes, however the daemon ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gemctl import waiting
from gemctl.config import WorkerConfig
from gemctl.errors import ApiError, of_system
from gemctl.serve.channel import Channel, error_of

OOM_SCORE = 500  # the kernel takes a worker before the daemon
KILL_AFTER_S = 2.0
LOST_S = 5.0  # beyond hang_s: a heartbeat that works has ended the worker by then
WORK_MOST_S = 86400.0  # of tests or a warm-up, whatever the pace
WHOLE_MOST = 1 << 53  # of a count or a size; more is no engine's
LOOK_S = 0.5  # between two looks at the time that they have worked
T = TypeVar("T")


def find_program(name: str) -> str | None:
    """The engine's command: on the path, or beside this Python as pip installs it."""
    beside = Path(sys.executable).parent / name
    return shutil.which(name) or (str(beside) if os.access(beside, os.X_OK) else None)


@dataclass(frozen=True)
class Facts:
    """What a worker said when it was ready. Sizes in tokens and bytes, times in milliseconds."""

    pid: int
    name: str
    target: str
    kernel: str
    version: str
    context: int
    kv_size: int
    kv_type: int
    has_chat: bool
    threads: int
    ram_total: int
    ram_kv: int
    open_ms: float
    locked_bytes: int = 0
    unlocked_bytes: int = 0  # of what could be locked, whether or not that was asked for

    @classmethod
    def of(cls, event: dict[str, Any]) -> Facts:
        """From a `ready` event. Raises ValueError where that is no engine's."""
        later = dict.fromkeys(_LATER, 0)  # not of an older engine
        found = {key: {**later, **event}.get(key) for key in cls.__dataclass_fields__}
        for key, kind in cls.__annotations__.items():
            if not _IS[kind](found[key]):
                raise ValueError(f"{key}: {found[key]!r:.40}")
        if found["kv_size"] == 0:
            raise ValueError("kv_size: 0")
        return cls(**found)  # type: ignore[arg-type]


def _is_real(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < WHOLE_MOST


# Kind of a fact -> whether a value is one.
_IS: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and 0 <= value < WHOLE_MOST,
    "float": _is_real,
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
}
_COUNTS = ("prompt_tokens", "generated_tokens", "kv_used", "kv_size", "nonfinite_errors")
_TIMES = ("ttft_ms", "prefill_tps", "decode_tps", "decode_max_ms")
_LATER = ("locked_bytes", "unlocked_bytes")
_MISSING = frozenset({errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR})


def checked(event: dict[str, Any]) -> dict[str, Any]:
    """An event of a run, as an engine makes it. Raises KeyError, TypeError or ValueError."""
    if event["event"] == "token":
        if type(event["token"]) is not int or type(event["text"]) is not str:
            raise TypeError("token")
        return event
    if event["event"] != "done" or type(event["finish"]) is not str:
        raise ValueError("event")
    later = {key: event.get(key, 0) for key in ("reused", "reset")}  # not of an older engine
    for key, value in {**{key: event[key] for key in _COUNTS}, **later}.items():
        if type(value) is not int or value < 0:
            raise ValueError(key)
    for key in _TIMES:
        if not 0 <= float(event[key]) < 1e12:
            raise ValueError(key)
    return event


@dataclass
class Pulse:
    """Heartbeat of a worker: the last answer, and the last sign of progress."""

    answered: float
    moved: float
    steps: int = -1
    busy: bool = False

    def take(self, event: dict[str, Any], now: float) -> None:
        """A pong: progress is a step more, or no work, or a sleep that was ordered."""
        self.answered = now
        self.busy = bool(event["busy"])
        if not self.busy or event["asleep"] or event["steps"] != self.steps:
            self.moved = now
        self.steps = event["steps"]


@dataclass
class Worker:
    """Start with `start`; afterwards `facts` is set. `ended` is set when the process is gone."""

    name: str
    path: Path
    config: WorkerConfig
    clock: Callable[[], float] = time.monotonic
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    facts: Facts | None = None
    exit_code: int | None = None  # negative: the signal that ended it
    hung: bool = False
    stopping: bool = False
    last_words: str = ""  # of its stderr
    share: float = 1.0  # of the time that it may work, as it was told
    owner: str | None = None  # who may reuse what its cache holds; None: nobody
    _process: asyncio.subprocess.Process | None = None
    _channel: Channel | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _pulse: Pulse | None = None
    _testing: bool = False

    def _command(self, descriptor: int) -> list[str]:
        program = find_program(self.config.program) or self.config.program
        command = [program, str(self.path), "--serve", str(descriptor)]
        if self.config.threads:
            command += ["--threads", str(self.config.threads)]
        if self.config.prefill_batch_size:
            command += ["--prefill-batch-size", str(self.config.prefill_batch_size)]
        if self.config.lock_memory:
            command.append("--lock-memory")
        return command

    async def start(self) -> Facts:
        """Spawn it and wait until it is ready. Raises ApiError; nothing is left behind then."""
        try:
            await self._spawn()
            self.facts = await self._await_ready()
        except BaseException as error:
            await self.stop(grace_s=0)
            if isinstance(error, (OSError, KeyError, TypeError, ValueError, TimeoutError)):
                odd = "it said what makes no sense"
                said = error.strerror if isinstance(error, OSError) else odd
                what = f"its worker did not start ({said or 'no answer'}); see worker.program"
                raise ApiError("failed", f"{self.name}: {what}") from None
            raise
        now = self.clock()
        self._pulse = Pulse(now, now)
        assert self._channel is not None
        self._channel.on_event = self._take
        self._tasks.append(asyncio.create_task(self._beat()))
        return self.facts

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(self.name)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError):
                raise self._not_spawned(error) from None
            raise
        finally:
            theirs.close()
        self._tasks.append(asyncio.create_task(self._wait()))  # before anything can be cancelled
        self._tasks.append(asyncio.create_task(self._listen()))
        with contextlib.suppress(OSError):  # it may be gone already
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text(f"{OOM_SCORE}")
        await self._channel.open(ours)

    def _not_spawned(self, error: OSError) -> ApiError:
        """The program's fault, or that the system has no room for one more process."""
        if error.errno not in _MISSING:
            return of_system(f"{self.name}: its worker did not start", error)
        reason = f"{self.config.program}: {error.strerror}; set worker.program"
        return ApiError("failed", reason)

    def _named(self, error: ApiError) -> ApiError:
        """An engine's words with our name of the model, for the one that its artifact has and for
        the file in the store."""
        words, theirs = error.message, self.facts.name if self.facts is not None else ""
        if theirs and words.startswith(f"{theirs}: "):
            words = f"{self.name}: {words[len(theirs) + 2 :]}"
        words = words.replace(str(self.path), f"{self.name} {self.path.stem[:12]}")
        return ApiError(error.code, words)

    async def _await_ready(self) -> Facts:
        assert self._channel is not None
        timeout = self.config.start_timeout_s
        try:
            event = await waiting.within(timeout, asyncio.shield(self._channel.ready))
        except TimeoutError:
            reason = f"{self.name}: its worker was not ready within {timeout:g} s; see the log"
            raise ApiError("timeout", reason) from None
        except asyncio.CancelledError:
            if not self._channel.closed.is_set():
                raise
            await waiting.ended(self.ended, KILL_AFTER_S)
            raise ApiError("failed", self.epitaph()) from None
        if event["event"] == "error":
            raise self._named(error_of(event))
        try:
            return Facts.of(event)
        except ValueError as error:
            what = f"{self.name}: its worker is ready with what no engine says ({error})"
            raise ApiError("failed", f"{what}; see worker.program") from None

    def epitaph(self) -> str:
        """One sentence on how it ended."""
        code = self.exit_code
        how = (
            "hung and was killed"
            if self.hung
            else f"was ended by signal {-code}"
            if code is not None and code < 0
            else f"ended with code {code}"
        )
        words = f" ({self.last_words})" if self.last_words else ""
        return f"{self.name}: its worker {how}{words}; see gemctl events"

    async def _wait(self) -> None:
        assert self._process is not None
        assert self._channel is not None
        self.exit_code = await self._process.wait()
        await self._channel.close()
        self.ended.set()

    async def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):  # a line without end
            async for line in self._process.stderr:
                self.last_words = line.decode("utf-8", "replace").strip()[:300]

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "pong" and self._pulse is not None:
            self._pulse.take(event, self.clock())

    async def _beat(self) -> None:
        """Ping, and kill what does not answer or does not get on."""
        assert self._channel is not None
        assert self._pulse is not None
        while not self.ended.is_set():
            if self._silent_s(self._pulse) > self.config.hang_s:
                self.hung = True
                self.kill()
                return
            with contextlib.suppress(ApiError):
                self._channel.send("ping", n=int(self.clock() * 1000))
            await asyncio.sleep(self.config.heartbeat_s)

    def _silent_s(self, pulse: Pulse) -> float:
        """Seconds without an answer, or without a step of its work."""
        now = self.clock()
        moved = now if self._testing else pulse.moved  # tests are steps that nobody counts
        return now - min(pulse.answered, moved)

    @property
    def lost(self) -> bool:
        """Silent for longer than its heartbeat lets it live: the heartbeat itself has failed, or
        the kernel cannot end the process."""
        if self._pulse is None or self._process is None or self.ended.is_set():
            return False
        return self._silent_s(self._pulse) > self.config.hang_s + LOST_S

    @property
    def alive(self) -> bool:
        """True from ready to the end."""
        return self.facts is not None and not self.ended.is_set() and not self.stopping

    @property
    def pid(self) -> int:
        """0 before it was spawned."""
        return self._process.pid if self._process is not None else 0

    def _open_channel(self) -> Channel:
        if self._channel is None or not self.alive:
            raise ApiError("failed", f"{self.name}: its worker is gone; send the request again")
        return self._channel

    async def generate(
        self, fields: dict[str, Any], most_s: float | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """`token` events, then `done`. Raises ApiError. Left early, the run is cancelled.

        A worker that is not done after `most_s`, or says what no engine says, is ended: its next
        answer would be as good.
        """
        events = self._open_channel().stream("generate", **fields)
        until = None if most_s is None else self.clock() + most_s
        try:
            while True:
                left = None if until is None else until - self.clock()
                event = await waiting.within(left, anext(events, None))
                if event is None:
                    return
                yield checked(event)
        except (TimeoutError, TypeError, ValueError, KeyError) as error:
            self.kill()
            what = "did not end" if isinstance(error, TimeoutError) else "said what makes no sense"
            raise ApiError("failed", f"{self.name}: its worker {what}; see the log") from None
        except ApiError as error:
            if (
                error.code == "failed"
                and self._channel is not None
                and self._channel.closed.is_set()
            ):
                await waiting.ended(self.ended, KILL_AFTER_S)
                raise ApiError("failed", self.epitaph()) from None
            raise self._named(error) from None
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    async def pace(
        self, duty: float, threads: int, prefill_duty: float, prefill_threads: int
    ) -> None:
        """Duty 0..1 of the time for tokens and for prompts; threads 0: as opened."""
        self.share = min(duty, prefill_duty)
        await self._open_channel().request(
            "pace",
            self.config.hang_s,
            duty=duty,
            threads=threads,
            prefill_duty=prefill_duty,
            prefill_threads=prefill_threads,
        )

    async def test(self, timeout_s: float) -> int:
        """Replay the stored test vectors; how many passed. Raises ApiError: refused, timeout."""
        self._testing = True
        try:
            asked = self._open_channel().request("test", WORK_MOST_S)
            return int((await self._at_work(asked, timeout_s, "tests"))["passed"])
        except ApiError as error:
            raise self._named(error) from None
        finally:
            self._testing = False
            if self._pulse is not None:
                self._pulse.moved = self.clock()

    async def warm_up(self, prompt: str, timeout_s: float) -> None:
        """Answer a prompt by one token, and forget it. Raises ApiError, "timeout" among them."""

        async def answer() -> None:
            async for _ in self.generate({"prompt": prompt, "max_tokens": 1}, WORK_MOST_S):
                pass

        await self._at_work(answer(), timeout_s, "warm-up")
        await self.reset()

    async def _at_work(self, what: Awaitable[T], timeout_s: float, name: str) -> T:
        """The result of `what`, which may work for so long: what the pace makes it sleep does not
        count. A worker that does not go on is its heartbeat's business."""
        task, left = asyncio.ensure_future(what), timeout_s
        try:
            while not task.done() and left > 0:
                began, share = self.clock(), self.share
                await asyncio.wait({task}, timeout=LOOK_S)
                left -= (self.clock() - began) * share
            if not task.done():
                what_took = f"{self.name}: its {name} took more than {timeout_s:g} s of work"
                raise ApiError("timeout", f"{what_took}; raise worker.start_timeout_s")
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def reset(self) -> None:
        """Empty the KV cache."""
        await self._open_channel().request("reset", self.config.hang_s)

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def stop(self, grace_s: float = KILL_AFTER_S) -> None:
        """Close its socket, wait for its end, kill it after the grace. Idempotent."""
        self.stopping = True
        if self._channel is not None:
            await self._channel.close()
        if self._process is not None and not self.ended.is_set():
            await waiting.ended(self.ended, grace_s)
            self.kill()
            await self.ended.wait()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
