"""A model behind a handle, that can be replaced while it is in use (csrc/gemrun_control.h).

Every method may be called from any thread. Requests run one at a time, in the order of their calls;
one keeps the model that it began with. With `attach` gemctld sees and steers the handle.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gemrun import arguments
from gemrun._engine import ffi, lib
from gemrun.context import (
    Config,
    Stats,
    Thermal,
    Tokens,
    _Asked,
    _check,
    _config,
    _Items,
    _keep_failure,
    _Question,
    _Run,
    _Runner,
    _stats_of,
    _thermal_of,
    _work,
)
from gemrun.errors import ClosedError

if TYPE_CHECKING:
    from typing_extensions import Unpack

FULL_DUTY = 1000  # thousandths
MOST_THREADS = 8


@dataclass(frozen=True)
class ReplaceTimes:
    """How long the steps of a replacement took, in ms, and how many test vectors passed."""

    tests: int
    open_ms: float
    test_ms: float
    warmup_ms: float
    flip_ms: float


@dataclass(frozen=True)
class HandleStats:
    """Figures of a handle since it was opened (gemrun_handle_stats)."""

    enabled: bool
    attached: bool  # a daemon is connected
    active: int  # requests inside: 0 or 1
    waiting: int  # requests that wait for their turn
    duty: float  # share of the time that steps may take, 0 to 1
    threads: int  # at most so many; 0: as opened
    requests: int
    failed: int
    replaced: int
    steps: int
    last: Stats | None  # of the last request that did not fail; None before the first


@dataclass
class _Shared:
    """The engine's pointer and who uses it. `pointer` is None after close."""

    pointer: Any
    pid: int = field(default_factory=os.getpid)
    state: threading.Condition = field(default_factory=threading.Condition)  # guards what follows
    users: int = 0  # calls that may still touch the pointer
    closing: bool = False
    running: _Run | None = None  # in the engine now

    @contextmanager
    def call(self) -> Iterator[Any]:
        """The pointer, for one call."""
        if self.pid != os.getpid():
            raise ClosedError(
                lib.GEMRUN_E_STATE, "handle: made before a fork; open one in this process"
            )
        with self.state:
            if self.closing:
                raise ClosedError(lib.GEMRUN_E_STATE, "handle: closed; open a new one")
            self.users += 1
        try:
            yield self.pointer
        finally:
            with self.state:
                self.users -= 1
                self.state.notify_all()

    def begin(self, run: _Run) -> bool:
        """A run's turn has come. False: it is not wanted any more."""
        with self.state:
            wanted = not (run.stopped or self.closing)
            self.running = run if wanted else None
            return wanted

    def end(self, run: _Run | None = None) -> None:
        """End the run in the engine, if it is this one; without one, whichever it is."""
        with self.state:
            if self.pointer is not None and (run is None or self.running is run):
                lib.gemrun_handle_cancel(self.pointer)

    def close(self) -> None:
        """Free the engine; running calls end first. Repeats do nothing."""
        if self.pid != os.getpid():
            return  # the threads stayed in the other process: nothing here can be freed
        with self.state:
            self.closing = True
            while self.users > 0:  # again and again: the next in line may just have begun
                if self.pointer is not None:
                    lib.gemrun_handle_cancel(self.pointer)
                self.state.wait(0.05)
            pointer, self.pointer = self.pointer, None
        if pointer is not None:
            lib.gemrun_handle_close(pointer)


@dataclass
class _Turn:
    """A request that waits for its turn, and afterwards its answer."""

    shared: _Shared
    run: _Run
    asked: _Asked
    unwanted: bool = False  # its turn came when nobody waited any more
    answer: Tokens | None = None
    failure: BaseException | None = None

    def take(self, pointer: Any, paced: Any) -> int:
        """Ask the model, under the handle's pace; a count of tokens, or a negative status."""
        question = _Question(pointer, self.asked)
        c = question.c
        c.on_text, c.on_step, c.user = paced.on_text, paced.on_step, paced.user
        self.unwanted = not self.shared.begin(self.run)
        if self.unwanted:
            return int(lib.GEMRUN_E_STATE)
        try:
            count = question.ask()
        finally:
            with self.shared.state:
                self.shared.running = None
        if count >= 0:
            self.answer = question.answer(count, self.run)
        return count


@ffi.def_extern(error=-1, onerror=_keep_failure)  # type: ignore[untyped-decorator]
def gemrun_py_run(pointer: Any, paced: Any, user: Any) -> int:
    """The model is this request's alone until this returns."""
    turn: _Turn = ffi.from_handle(user)
    return turn.take(pointer, paced)


class GemRunHandle(_Runner):
    """An open artifact that can be replaced, disabled, paced and watched while it is in use.

    `path` is the .gembin; the keywords are those of GemRunContext, and hold for its successors,
    too. Raises what GemRunContext raises, and a CallError for a request while the model is
    disabled. The engine runs in a thread of its own, so that an interrupt ends a request that a
    pace holds. Use it in a `with` block, or call close().
    """

    _handle: _Shared

    def __init__(self, path: str | os.PathLike[str], **config: Unpack[Config]) -> None:
        c_path = arguments.path("path", path)
        c_config, _keep = _config("GemRunHandle", config)
        out = ffi.new("gemrun_handle_t **")
        _check(lib.gemrun_handle_open(out, c_path, c_config))
        self._handle = _Shared(out[0])
        self._finalizer = weakref.finalize(self, self._handle.close)

    # ---- life ----
    def close(self) -> None:
        """Detach and free everything; a running request ends first, a replacement is waited for.
        Further calls do nothing."""
        self._handle.close()
        self._finalizer.detach()

    def __enter__(self) -> GemRunHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cancel(self) -> None:
        """End the running generation at its next token, also one that a pace holds."""
        self._handle.end()

    def set_temperature(self, celsius: float) -> None:
        """Tell the chip's temperature as often as it is read: requests keep to the artifact's
        thermal policy. While a daemon is attached, its pace takes the place of that."""
        value = arguments.real("celsius", celsius)
        with self._handle.call() as pointer:
            _check(lib.gemrun_handle_set_temperature(pointer, value))

    def thermal(self) -> Thermal:
        """What is in force now."""
        c = ffi.new("gemrun_thermal_state *", {"size": ffi.sizeof("gemrun_thermal_state")})
        with self._handle.call() as pointer:
            _check(lib.gemrun_handle_get_thermal(pointer, c))
        return _thermal_of(c)

    # ---- one request ----
    def _ask(self, asked: _Asked) -> Tokens:
        """A run to its end, on a thread that an interrupt of this one can stop."""
        items: _Items = queue.SimpleQueue()
        run = _Run(self._handle)
        try:
            threading.Thread(target=_work, args=(self, asked, run, items), daemon=True).start()
            found = items.get()
        except BaseException:
            run.stop()
            raise
        if isinstance(found, Tokens):
            return found
        assert isinstance(found, BaseException)
        raise found

    def _generate(self, asked: _Asked, run: _Run) -> Tokens:
        turn = _Turn(self._handle, run, asked)
        c_run, c_turn = ffi.new_handle(run), ffi.new_handle(turn)
        ours = ffi.new("gemrun_request *")
        ours.size = ffi.sizeof("gemrun_request")
        ours.on_text, ours.user = lib.gemrun_py_text, c_run
        with self._handle.call() as pointer:
            count = lib.gemrun_handle_run(pointer, ours, lib.gemrun_py_run, c_turn)
            failure = run.failure or turn.failure
            if failure is not None:
                raise failure
            if turn.unwanted:
                raise ClosedError(
                    lib.GEMRUN_E_STATE, "request: ended, or its handle closed, before its turn"
                )
            _check(count)
        assert turn.answer is not None
        return turn.answer

    # ---- replace, pace, watch ----
    def replace(
        self,
        path: str | os.PathLike[str],
        *,
        warmup_prompt: str | None = None,
        allow_layout_change: bool = False,
        check_weights: bool = False,
    ) -> ReplaceTimes:
        """Put another artifact in the place of the model in use.

        It is opened, its stored test vectors are replayed, and one token is generated for
        `warmup_prompt`, all beside the model in use; then new requests go to it, and the old one
        is freed after its last request. Where anything fails, the model in use stays. Raises
        ArtifactError, TestVectorError, NotEnoughMemoryError; a CallError where its context or KV
        type differs, unless that is allowed. `check_weights`: the weights' checksum, too.
        """
        prompt = _c_text("warmup_prompt", warmup_prompt)
        options = ffi.new("gemrun_replacement *", {"size": ffi.sizeof("gemrun_replacement")})
        options.warmup_prompt = prompt
        options.allow_layout_change = arguments.switch("allow_layout_change", allow_layout_change)
        options.check_weights = arguments.switch("check_weights", check_weights)
        times = ffi.new("gemrun_replace_times *", {"size": ffi.sizeof("gemrun_replace_times")})
        c_path = arguments.path("path", path)
        with self._handle.call() as pointer:
            _check(lib.gemrun_replace(pointer, c_path, options, times))
        return _times_of(times)

    def rollback(self, warmup_prompt: str | None = None) -> ReplaceTimes:
        """Back to the model before the newest replacement, opened again from its file; there is one
        step back. Its tests are not replayed, its layout may differ. CallError: there is none."""
        prompt = _c_text("warmup_prompt", warmup_prompt)
        times = ffi.new("gemrun_replace_times *", {"size": ffi.sizeof("gemrun_replace_times")})
        with self._handle.call() as pointer:
            _check(lib.gemrun_rollback(pointer, prompt, times))
        return _times_of(times)

    def disable(self) -> None:
        """Free the model's memory after its last request; requests are refused until `enable`."""
        with self._handle.call() as pointer:
            _check(lib.gemrun_handle_disable(pointer))

    def enable(self, warmup_prompt: str | None = None) -> None:
        """Open the model again, the newest one; generate one token for `warmup_prompt`."""
        prompt = _c_text("warmup_prompt", warmup_prompt)
        with self._handle.call() as pointer:
            _check(lib.gemrun_handle_enable(pointer, prompt))

    def pace(
        self,
        duty: float = 1.0,
        threads: int = 0,
        *,
        prefill_duty: float | None = None,
        prefill_threads: int | None = None,
    ) -> None:
        """Let steps take at most `duty` (0 to 1) of the time, on at most `threads` (0: as opened).

        For prompts the two of `prefill_` hold, or the same ones. Duty 0 holds a request until it
        is raised, or the request cancelled. Takes effect at once. A daemon's pace holds beside
        this one, the lower of both.
        """
        prefill_duty = duty if prefill_duty is None else prefill_duty
        prefill_threads = threads if prefill_threads is None else prefill_threads
        numbers = (
            _thousandths("duty", duty),
            arguments.integer("threads", threads, 0, MOST_THREADS),
            _thousandths("prefill_duty", prefill_duty),
            arguments.integer("prefill_threads", prefill_threads, 0, MOST_THREADS),
        )
        with self._handle.call() as pointer:
            _check(lib.gemrun_handle_pace(pointer, *numbers))

    def stats(self) -> HandleStats:
        """Figures since it was opened, and of the last request. Waits for nothing."""
        c = ffi.new("gemrun_handle_stats *", {"size": ffi.sizeof("gemrun_handle_stats")})
        with self._handle.call() as pointer:
            _check(lib.gemrun_handle_get_stats(pointer, c))
        values = {name: getattr(c, name) for name in HandleStats.__annotations__}
        values["enabled"], values["attached"] = bool(c.enabled), bool(c.attached)
        values["duty"] = c.duty / FULL_DUTY
        values["last"] = _stats_of(c.last) if c.last.size else None
        return HandleStats(**values)

    def attach(self, socket: str | os.PathLike[str], name: str) -> None:
        """Let gemctld at `socket` see and steer this handle under `name`.

        The daemon need not be there: a thread in the engine finds it, also after a restart, and no
        request waits for it. Names have 1 to 64 of a-z, 0-9, '.', '_' and '-'.
        """
        c_socket, c_name = arguments.path("socket", socket), arguments.text("name", name)
        with self._handle.call() as pointer:
            _check(lib.gemrun_attach(pointer, c_socket, c_name))

    def detach(self) -> None:
        """Leave the daemon; its pace ends. Repeats do nothing."""
        with self._handle.call() as pointer:
            lib.gemrun_detach(pointer)


def _times_of(c: Any) -> ReplaceTimes:
    return ReplaceTimes(**{name: getattr(c, name) for name in ReplaceTimes.__annotations__})


def _c_text(name: str, value: str | None) -> Any:
    return ffi.NULL if value is None else ffi.new("char[]", arguments.text(name, value))


def _thousandths(name: str, value: float) -> int:
    """A duty as the engine takes it; the least above 0 stays above 0."""
    share = arguments.real(name, value, "0 to 1")
    if not 0 <= share <= 1:
        arguments.wrong_value(name, value, "0 to 1")
    return max(round(share * FULL_DUTY), int(share > 0))
