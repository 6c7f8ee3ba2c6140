"""The engine for Python: a context runs one artifact.

A context may be used from any thread: calls wait for each other. `cancel()` and `close()` may come
at any time. A running call gives up Python's lock, so that other threads go on. Nothing here needs
more than cffi; logits come as `array('f')`, which numpy reads without a copy.
"""

from __future__ import annotations

import math
import os
import queue
import resource
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, overload

from gemrun import arguments
from gemrun._engine import ffi, lib
from gemrun.errors import (
    BoardWarning,
    BusyError,
    CallError,
    ClosedError,
    MemoryLockWarning,
    error_of,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": text}
LogitsCallback = Callable[[int, "memoryview[float]"], object]

_Items: TypeAlias = "queue.SimpleQueue[str | Tokens | BaseException]"

FINISH_REASONS = (
    *("none", "stop_id", "stop_string", "max_tokens", "context_full"),
    *("cancelled", "deadline", "callback", "error"),
)
MOST_SLID = 1 << 24  # ids of one answer; they are kept
ROLES = {"system": lib.GEMRUN_SYSTEM, "user": lib.GEMRUN_USER, "assistant": lib.GEMRUN_ASSISTANT}


class Config(TypedDict, total=False):
    """How to open; what is left out takes the engine's default (gemrun.h)."""

    kv_cache_size: int  # tokens, 1 to the compiled context, which is the default
    prefill_batch_size: int  # tokens per prefill step, 1 to the compiled number
    threads: int  # 1 to 8
    decode_threads: int  # of one token at a time, 1 to `threads`, which is the default
    balance: int  # threads take work in pieces: 0 where cores differ, 1 never, 2 always
    thread_affinity: int  # bit i: core i may be used, one thread pinned per set bit; 0: none
    weights_check: bool  # compare the weights' checksum too
    allow_foreign_board: bool
    ignore_memory: bool
    lock_memory: bool  # keep all from being paged out; MemoryLockWarning where the limit is too low
    kernel: str
    head: str  # "full"; "two-plane": less is read, equal tokens, top_k to 64; default: greedy only


class Settings(TypedDict, total=False):
    """How to sample and when to stop; what is left out is the artifact's default."""

    temperature: float  # 0: greedy
    top_k: int  # 0: off
    top_p: float
    min_p: float
    repetition_penalty: float  # 1: off
    seed: int
    stop: str | Iterable[str]  # one text, or up to 8, of 1..128 bytes
    banned: Iterable[int]  # token ids
    bias: Mapping[int, float]  # token id -> what is added to its logit
    ignore_stop_ids: bool
    deadline_ms: float  # 0: none
    speculate: int  # tokens guessed ahead from the context, 0..6; the answer is the same
    on_full: str  # at the end of the context: "stop", "mark" the text, or "slide" on (README.md)
    reuse: bool  # what the cache holds of the prompt is not computed again; the answer is the same


@dataclass(frozen=True)
class Stats:
    """Figures of the last run and of the memory (gemrun_stats). Times in ms, sizes in bytes."""

    prompt_tokens: int
    generated_tokens: int
    kv_used: int
    kv_size: int
    finish: str
    ttft_ms: float
    prefill_tps: float
    decode_tps: float
    decode_max_ms: float
    nonfinite_errors: int
    ram_weights: int
    ram_tables: int
    ram_arena: int
    ram_kv: int
    ram_engine: int
    ram_stacks: int
    ram_total: int
    declared_total: int
    locked_bytes: int
    threads: int
    pinned: int
    head_candidates: float  # rows a token that the high plane left; 0: every head was full
    head_candidates_max: float
    drafted: int  # tokens that speculation guessed in the last run ..
    accepted: int  # .. and how many were right
    reused: int  # tokens of the last run's prompt that the cache held
    slides: int  # how often the last run went on in a full context


@dataclass(frozen=True)
class Info:
    """Facts of an artifact (gemrun_info)."""

    name: str
    family: str
    target: str
    kernel: str
    vocab_rows: int
    context: int
    chunk: int
    layers: int
    hidden: int
    threads_planned: int
    has_chat: bool
    stop_ids: tuple[int, ...]
    bos_id: int | None
    kv_type: str
    pinned_prompt: int = 0  # its tokens; 0: none (gemmake --pin-prompt)


@dataclass(frozen=True)
class Region:
    """A mapping of the engine."""

    name: str
    address: int
    size: int


THROTTLE_MODES = ("balanced", "performance", "aggressive", "conservative", "silent")


@dataclass(frozen=True)
class Thermal:
    """What is in force of the artifact's thermal policy (gemrun_thermal_state)."""

    told: bool  # a temperature is known; without one nothing is paced
    mode: str  # one of THROTTLE_MODES, as compiled
    level: int  # rung in force, from 0
    levels: int
    duty: float  # share of the time that steps may take
    threads: int  # at most
    chunk: int  # tokens of a prefill step, at most
    fault: bool  # the sensor is not believed
    celsius: float | None  # the last temperature that a board may have
    engage_c: float | None  # None: the artifact knows no limit
    release_c: float | None


class Tokens(Sequence[int]):
    """What a run made: a sequence of token ids with its text, reason of ending and figures."""

    def __init__(self, ids: Iterable[int], text: str, stats: Stats) -> None:
        self._ids = tuple(ids)
        self.text = text
        self.stats = stats

    @property
    def finish_reason(self) -> str:
        """One of FINISH_REASONS."""
        return self.stats.finish

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self._ids[index]

    def __len__(self) -> int:
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._ids == tuple(other)

    def __hash__(self) -> int:
        return hash(self._ids)

    def __repr__(self) -> str:
        return f"Tokens({list(self._ids)}, text={self.text!r}, finish={self.finish_reason!r})"


@dataclass(frozen=True)
class Snapshot:
    """A place in the cache of a context: what its rings hold, and ids. In this process only."""

    memory: Any = field(repr=False)
    size: int  # bytes
    tokens: int


class _Engine:
    """The engine's pointer, freed with the last reference to this. A session has one to its model,
    whose weights it reads: they stay until both are gone."""

    def __init__(self, pointer: Any, model: _Engine | None = None) -> None:
        self.pointer, self.model, self._pid = pointer, model, os.getpid()

    # When the interpreter ends, the names of this module may be gone before the last engine is.
    def __del__(
        self, getpid: Callable[[], int] = os.getpid, destroy: Any = lib.gemrun_destroy
    ) -> None:
        if self._pid == getpid():  # elsewhere there are no threads of it to end
            destroy(self.pointer)


@dataclass
class _Handle:
    """The engine and who may use it. `engine` is None after close."""

    engine: _Engine | None
    pid: int = field(default_factory=os.getpid)
    calls: threading.Lock = field(default_factory=threading.Lock)  # held during a call
    state: threading.Lock = field(default_factory=threading.Lock)  # held to look at `pointer`
    closing: bool = False
    owner: int = 0  # thread that holds `calls`
    running: object = None  # the _Run in the engine now

    @property
    def pointer(self) -> Any:
        """The engine's pointer; None after close."""
        return None if self.engine is None else self.engine.pointer

    def check_process(self) -> None:
        """Refuse where the threads of the engine are not."""
        if self.pid != os.getpid():
            raise ClosedError(
                lib.GEMRUN_E_STATE, "context: made before a fork; open one in this process"
            )

    def living(self) -> _Engine:
        """The engine; it is not freed as long as it is held."""
        self.check_process()
        with self.state:
            if self.engine is None or self.closing:
                raise ClosedError(lib.GEMRUN_E_STATE, "context: closed; open a new one")
            return self.engine

    def cancel(self) -> None:
        with self.state:
            if self.pointer is not None:
                lib.gemrun_cancel(self.pointer)

    def end(self, run: _Run) -> None:
        """End a run that is in the engine."""
        if self.running is run:
            self.cancel()

    def close(self) -> None:
        """Free the engine; a running call ends at its next token first. Repeats do nothing."""
        if self.pid != os.getpid():
            return  # the threads stayed in the other process: nothing here can be freed
        if self.owner == threading.get_ident():
            raise BusyError(
                lib.GEMRUN_E_BUSY, "context: closed from its own callback; return first"
            )
        self.closing = True
        while not self.calls.acquire(timeout=0.05):
            self.cancel()  # again: a call may just have begun
        try:  # whoever waits for `calls` must get it: a call, or a second close
            with self.state:
                engine, self.engine = self.engine, None
            del engine  # freed here, if no session reads its weights
        finally:
            self.calls.release()


class _Owner(Protocol):
    """Whose runs these are: a context's handle, or that of a GemRunHandle."""

    closing: bool

    def end(self, run: _Run) -> None: ...


@dataclass
class _Run:
    """One generation: what the engine's callbacks need."""

    handle: _Owner
    on_piece: Callable[[str], object] | None = None
    pieces: list[str] = field(default_factory=list)
    failure: BaseException | None = None
    stopped: bool = False

    def stop(self) -> None:
        """End this run, begun or not, and no other."""
        self.stopped = True
        self.handle.end(self)


def _keep_failure(_kind: object, error: BaseException, trace: TracebackType | None) -> None:
    """An interrupt may come before the first line of a callback: it belongs to the run, too."""
    if trace is not None and "user" in trace.tb_frame.f_locals:
        ffi.from_handle(trace.tb_frame.f_locals["user"]).failure = error


@ffi.def_extern(error=1, onerror=_keep_failure)  # type: ignore[untyped-decorator]
def gemrun_py_text(user: Any, token: int, text: Any, size: int) -> int:
    """Take a piece of text; non-zero ends the run."""
    run: _Run = ffi.from_handle(user)
    try:
        piece = ffi.buffer(text, size)[:].decode()
        run.pieces.append(piece)
        if run.on_piece is not None:
            run.on_piece(piece)
        return int(run.stopped or run.handle.closing)
    except BaseException as error:
        run.failure = error
        return 1


@dataclass
class _Eval:
    callback: LogitsCallback
    failure: BaseException | None = None


@ffi.def_extern(error=1, onerror=_keep_failure)  # type: ignore[untyped-decorator]
def gemrun_py_logits(user: Any, position: int, logits: Any, count: int) -> int:
    """Show one position's logits; a true result ends the evaluation."""
    run: _Eval = ffi.from_handle(user)
    try:
        view = memoryview(ffi.buffer(logits, 4 * count)).cast("B").cast("f").toreadonly()
        return int(bool(run.callback(position, view)))
    except BaseException as error:
        run.failure = error
        return 1


@dataclass(frozen=True)
class _Asked:
    """What a run is to do, checked: a prompt or, without one, messages."""

    prompt: str | None
    messages: Sequence[Message] | None
    max_tokens: int
    settings: arguments.Checked


class _Runner(ABC):
    """Text in, text out: what a GemRunContext and a GemRunHandle have in common."""

    _handle: _Owner

    def infer(self, prompt: str, max_tokens: int = 32, **settings: Unpack[Settings]) -> Tokens:
        """Continue a raw prompt, from an empty cache."""
        return self._ask(_checked(prompt, None, max_tokens, settings))

    def stream(self, prompt: str, max_tokens: int = 32, **settings: Unpack[Settings]) -> Stream:
        """The same, piece by piece. Closing the stream ends the run."""
        return Stream(self, _checked(prompt, None, max_tokens, settings))

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int = ...,
        *,
        stream: Literal[False] = ...,
        **settings: Unpack[Settings],
    ) -> Tokens: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int = ...,
        *,
        stream: Literal[True],
        **settings: Unpack[Settings],
    ) -> Stream: ...
    def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int = 256,
        *,
        stream: bool = False,
        **settings: Unpack[Settings],
    ) -> Tokens | Stream:
        """Answer a conversation by the artifact's template. Control tokens in it are plain text."""
        arguments.messages(messages)
        asked = _checked(None, messages, max_tokens, settings)
        return Stream(self, asked) if stream else self._ask(asked)

    def _ask(self, asked: _Asked) -> Tokens:
        """A run to its end."""
        return self._generate(asked, _Run(self._handle))

    @abstractmethod
    def _generate(self, asked: _Asked, run: _Run) -> Tokens:
        """Do it in the engine, on the thread that calls; `run` can end it from another."""


def _warn_unlocked(name: str, locked: int, wanted: int) -> None:
    """Tell of memory that was to be locked and is not."""
    if locked >= wanted:
        return
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    what = f"{name}: {locked} of {wanted} bytes are locked"
    if limit != resource.RLIM_INFINITY and limit < wanted:
        what += (
            f", RLIMIT_MEMLOCK is {limit} bytes; raise it with ulimit -l unlimited, or "
            "LimitMEMLOCK= in a unit"
        )
    else:
        what += ", the system refuses more; free memory, or leave lock_memory or ignore_memory out"
    warnings.warn(what, MemoryLockWarning, stacklevel=3)


class GemRunContext(_Runner):
    """An open artifact.

    `path` is the .gembin; the keywords are those of Config. Raises ArtifactError for a damaged or
    foreign file, NotEnoughMemoryError where memory is short, CallError for a wrong setting.
    Use it in a `with` block, or call close().
    """

    _handle: _Handle

    def __init__(self, path: str | os.PathLike[str], **config: Unpack[Config]) -> None:
        c_path = arguments.path("path", path)
        c_config, _keep = _config("GemRunContext", config)
        out = ffi.new("gemrun_context_t **")
        _opened(lib.gemrun_open(out, c_path, c_config), c_path)
        engine = _Engine(out[0])
        if not c_config.allow_foreign_board:
            _check_board(engine.pointer, c_path)
        if not c_config.ignore_memory:
            _check(lib.gemrun_stream(engine.pointer))
        self._begin(engine)
        if config.get("lock_memory"):
            wanted = int(lib.gemrun_lockable(engine.pointer))
            _warn_unlocked(self.info.name, self.stats().locked_bytes, wanted)

    def _begin(self, engine: _Engine) -> None:
        self._handle = _Handle(engine)
        self._finalizer = weakref.finalize(self, self._handle.close)
        self.info = _info(engine.pointer)

    # ---- life ----
    def close(self) -> None:
        """Free everything; a running call ends first. Further calls do nothing. Where sessions are
        open, this context's memory and the weights are freed with the last of them."""
        self._handle.close()
        self._finalizer.detach()

    def __enter__(self) -> GemRunContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cancel(self) -> None:
        """End the running generation at its next token. From any thread."""
        self._handle.cancel()

    def _generate(self, asked: _Asked, run: _Run) -> Tokens:
        handle = ffi.new_handle(run)
        with _Call(self._handle) as pointer:
            question = _Question(pointer, asked)
            question.c.on_text = lib.gemrun_py_text
            question.c.user = handle
            question.pace()
            if run.stopped:
                return Tokens((), "", _stats(pointer))
            self._handle.running = run
            count = question.ask()
            self._handle.running = None
            if run.failure is not None:
                raise run.failure
            return question.answer(_check(count), run)

    # ---- tokens ----
    def tokenize(self, text: str, *, bos: bool = False, control: bool = False) -> list[int]:
        """Ids of a text. `bos`: begin as the model asks; `control`: written-out control tokens
        become ids (never for text from outside)."""
        if not isinstance(text, str):
            arguments.wrong_type("text", text, "a str")
        data = text.encode("utf-8", "surrogatepass")
        capacity = 3 * len(data) + 16
        ids = ffi.new("int32_t[]", capacity)
        flags = arguments.switch("bos", bos) | arguments.switch("control", control) << 1
        with _Call(self._handle) as pointer:
            count = _check(lib.gemrun_tokenize(pointer, data, len(data), flags, ids, capacity))
        return list(ids[0:count])

    def detokenize(self, ids: Iterable[int], *, control: bool = False) -> str:
        """Text of ids; broken characters become U+FFFD. `control`: show control tokens."""
        return self._detokenize(ids, arguments.switch("control", control) << 1).decode()

    def detokenize_bytes(self, ids: Iterable[int], *, control: bool = False) -> bytes:
        """The exact bytes of ids."""
        return self._detokenize(ids, 1 | arguments.switch("control", control) << 1)

    def _detokenize(self, ids: Iterable[int], flags: int) -> bytes:
        c_ids = ffi.new("int32_t[]", arguments.ids("ids", ids))
        capacity = 768 * len(c_ids) + 8  # at most 255 bytes a token, threefold where broken
        text = ffi.new("char[]", capacity)
        with _Call(self._handle) as pointer:
            size = _check(lib.gemrun_detokenize(pointer, c_ids, len(c_ids), flags, text, capacity))
        return bytes(ffi.buffer(text, size))

    def prefill(self, ids: Iterable[int]) -> int:
        """Append ids to the cache. Returns the tokens now in it."""
        c_ids = ffi.new("int32_t[]", arguments.ids("ids", ids))
        with _Call(self._handle) as pointer:
            return _check(lib.gemrun_prefill(pointer, c_ids, len(c_ids)))

    def decode(self, token: int) -> int:
        """Append one id to the cache. Returns the tokens now in it."""
        return self.prefill((arguments.integer("token", token, 0, arguments.INT32_MAX),))

    def sample(self, **settings: Unpack[Settings]) -> int:
        """Pick the next id from the logits of the last prefill or decode."""
        checked = arguments.settings(settings, Settings.__annotations__)
        with _Call(self._handle) as pointer:
            return _check(lib.gemrun_sample(pointer, _Request(pointer, 1, checked).c))

    def eval(self, ids: Iterable[int], callback: LogitsCallback) -> int:
        """Append ids; `callback(position, logits)` sees the logits after every one of them. The
        view is valid during the call; a true result ends the evaluation. Returns the tokens in the
        cache."""
        if not callable(callback):
            arguments.wrong_type("callback", callback, "a function of position and logits")
        run = _Eval(callback)
        handle = ffi.new_handle(run)
        c_ids = ffi.new("int32_t[]", arguments.ids("ids", ids))
        with _Call(self._handle) as pointer:
            count = lib.gemrun_eval(pointer, c_ids, len(c_ids), lib.gemrun_py_logits, handle)
            if run.failure is not None:
                raise run.failure
            return _check(count)

    def logits(self) -> array[float]:
        """A copy of the logits after the last token: float32 [vocab rows]."""
        return self._floats(lib.gemrun_logits, "logits")

    def embedding(self) -> array[float]:
        """A copy of the final norm's output for the last token: float32 [hidden]."""
        return self._floats(lib.gemrun_embedding, "embedding")

    def _floats(self, function: Any, what: str) -> array[float]:
        count = ffi.new("uint32_t *")
        with _Call(self._handle) as pointer:
            values = function(pointer, count)
            if values == ffi.NULL:
                raise error_of(lib.GEMRUN_E_STATE, f"{what}: nothing computed; call prefill first")
            return array("f", bytes(ffi.buffer(values, 4 * count[0])))

    def reset_kv_cache(self) -> None:
        """Forget all tokens."""
        with _Call(self._handle) as pointer:
            lib.gemrun_reset_kv_cache(pointer)

    # ---- sessions ----
    def session(self, **config: Unpack[Config]) -> GemRunContext:
        """Another context over the same mapped weights, with a cache and threads of its own: as
        many as here unless given. It is opened beside whatever runs here, and closed by itself."""
        c_config, _keep = _config("session", config)
        engine = self._handle.living()
        out = ffi.new("gemrun_context_t **")
        _check(lib.gemrun_session_open(out, engine.pointer, c_config))
        other = GemRunContext.__new__(GemRunContext)
        other._begin(_Engine(out[0], engine.model or engine))
        return other

    def session_memory(self, threads: int | None = None) -> int:
        """Bytes that a session takes with so many threads: with as many as here by default."""
        count = 0 if threads is None else arguments.integer("threads", threads, 1, 8)
        engine = self._handle.living()
        return _check(lib.gemrun_session_memory(engine.pointer, count))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what is in the context to a file: tokens, cache, random state. The file is whole or
        not there; only its owner can read it."""
        c_path = arguments.path("path", path)
        with _Call(self._handle) as pointer:
            _check(lib.gemrun_session_save(pointer, c_path))

    def restore(self, path: str | os.PathLike[str]) -> int:
        """Go on from a saved file of the same artifact: every answer is what it would have been.
        Returns the tokens in the cache. A refused file leaves the context as it was."""
        c_path = arguments.path("path", path)
        with _Call(self._handle) as pointer:
            return _check(lib.gemrun_session_restore(pointer, c_path))

    def fork_from(self, other: GemRunContext) -> None:
        """Take over what is in another context of the same artifact, which stays as it is."""
        if not isinstance(other, GemRunContext):
            arguments.wrong_type("other", other, "a GemRunContext")
        if other is self:
            raise CallError(
                lib.GEMRUN_E_ARGUMENT, "other: is this context itself; give another one"
            )
        both = sorted((self._handle, other._handle), key=id)  # always in one order: no deadlock
        with _Call(both[0]), _Call(both[1]):
            _check(lib.gemrun_session_fork(self._handle.pointer, other._handle.pointer))

    def snapshot(self) -> Snapshot:
        """This place in the cache, to come back to with `go_back`: for a preamble before requests
        with `reuse`, where windows or a sparse cache would have forgotten it."""
        with _Call(self._handle) as pointer:
            size = _check(lib.gemrun_snapshot_size(pointer))
            memory = ffi.new("uint64_t[]", -(-size // 8))
            _check(lib.gemrun_snapshot_take(pointer, memory, size))
            return Snapshot(memory, size, _stats(pointer).kv_used)

    def go_back(self, snapshot: Snapshot) -> int:
        """Return to a snapshot whose tokens the cache still begins with: CallError if not, and then
        nothing has changed. Returns the tokens in the cache."""
        if not isinstance(snapshot, Snapshot):
            arguments.wrong_type("snapshot", snapshot, "what snapshot() returned")
        with _Call(self._handle) as pointer:
            return _check(lib.gemrun_snapshot_back(pointer, snapshot.memory, snapshot.size))

    # ---- temperature ----
    def set_temperature(self, celsius: float) -> None:
        """Tell the chip's temperature as often as it is read, from any thread, also during a run:
        `infer`, `stream` and `chat` keep to the artifact's thermal policy from then on. No answer
        depends on it, only the time that one takes."""
        value = arguments.real("celsius", celsius)
        engine = self._handle.living()
        _check(lib.gemrun_set_temperature(engine.pointer, value))

    def thermal(self) -> Thermal:
        """What is in force now; waits for a running call."""
        c = ffi.new("gemrun_thermal_state *", {"size": ffi.sizeof("gemrun_thermal_state")})
        with _Call(self._handle) as pointer:
            _check(lib.gemrun_get_thermal(pointer, c))
        return _thermal_of(c)

    # ---- facts ----
    def stats(self) -> Stats:
        """Figures of the last run and of the memory. In a session's `ram_total` the weights and
        tables count, which are its model's."""
        with _Call(self._handle) as pointer:
            return _stats(pointer)

    def regions(self) -> list[Region]:
        """The engine's mappings, to compare with what the system counts."""
        with _Call(self._handle) as pointer:
            count = lib.gemrun_regions(pointer, ffi.NULL, 0)
            c_regions = ffi.new("gemrun_region[]", count)
            lib.gemrun_regions(pointer, c_regions, count)
            return [
                Region(ffi.string(r.name).decode(), int(ffi.cast("uintptr_t", r.address)), r.bytes)
                for r in c_regions
            ]

    def run_tests(self) -> int:
        """Replay the stored test vectors. Returns how many passed; TestVectorError if one fails."""
        with _Call(self._handle) as pointer:
            return _check(lib.gemrun_run_tests(pointer))

    def test_vector(self, prompt: Sequence[int], steps: int) -> tuple[int, list[int]]:
        """Make a test vector, for gemmake: the digest of the logits and the greedy ids."""
        steps = arguments.integer("steps", steps, 0, self.info.context)
        out, digest = ffi.new("uint32_t[]", steps), ffi.new("uint64_t *")
        c_prompt = ffi.new("uint32_t[]", arguments.ids("prompt", prompt))
        with _Call(self._handle) as pointer:
            count = len(c_prompt)
            _check(lib.gemrun_internal_digest(pointer, c_prompt, count, out, steps, digest))
        return int(digest[0]), list(out)


class Stream(Iterator[str]):
    """Text of a running generation, piece by piece; pieces are whole characters.

    A worker thread runs the engine; close(), leaving a `with` block or dropping the stream ends
    the run. After the last piece `tokens` holds the result.
    """

    def __init__(self, runner: _Runner, asked: _Asked) -> None:
        self.tokens: Tokens | None = None
        self._ended = False
        self._items: _Items = queue.SimpleQueue()
        self._run = _Run(runner._handle, self._items.put)
        # The worker knows the run, not the stream: dropping the stream must end it.
        given = (runner, asked, self._run, self._items)
        self._worker = threading.Thread(target=_work, args=given, daemon=True)
        self._finalizer = weakref.finalize(self, self._run.stop)  # an interrupt may come in start
        self._worker.start()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._ended:
            item = self._items.get()
            if isinstance(item, str):
                if item:
                    return item
                continue
            self._ended = True
            self._worker.join()
            if isinstance(item, BaseException):
                raise item
            self.tokens = item
        raise StopIteration

    def close(self) -> None:
        """End the run and wait until the engine has stopped."""
        self._run.stop()
        self._worker.join()
        self._ended = True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _work(runner: _Runner, asked: _Asked, run: _Run, items: _Items) -> None:
    """Body of a stream's thread: pieces, then the result or what went wrong."""
    try:
        items.put(runner._generate(asked, run))
    except BaseException as error:
        items.put(error)


class _Call:
    """Holds the context for one call; gives the engine's pointer."""

    def __init__(self, handle: _Handle) -> None:
        self._handle = handle

    def __enter__(self) -> Any:
        handle = self._handle
        handle.check_process()
        if handle.owner == threading.get_ident():
            raise BusyError(
                lib.GEMRUN_E_BUSY, "context: called from its own callback; return first"
            )
        handle.calls.acquire()
        if handle.closing:
            handle.calls.release()
            raise ClosedError(lib.GEMRUN_E_STATE, "context: closed; open a new one")
        handle.owner = threading.get_ident()
        return handle.pointer

    def __exit__(self, *_: object) -> None:
        self._handle.owner = 0
        self._handle.calls.release()


class _Request:
    """A gemrun_request and the memory that it points to, as long as this lives."""

    def __init__(self, pointer: Any, max_tokens: int, settings: arguments.Checked) -> None:
        self._keep: list[Any] = []
        self.c = c = ffi.new("gemrun_request *", lib.gemrun_request_default(pointer))
        c.max_tokens = max_tokens
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            if name in settings:
                setattr(c, name, settings[name])
        if "seed" in settings:
            c.seed_set, c.seed = 1, settings["seed"]
        c.speculate = settings.get("speculate", 0)
        c.reuse = settings.get("reuse", 0)
        c.on_full = settings.get("on_full", 0)
        c.ignore_stop_ids = settings.get("ignore_stop_ids", 0)
        c.deadline_ns = math.ceil(settings.get("deadline_ms", 0) * 1e6)  # 0 would be none
        c.banned, c.banned_count = self._array("uint32_t[]", settings.get("banned", ()))
        bias = settings.get("bias", {})
        c.bias_ids, c.bias_count = self._array("uint32_t[]", bias.keys())
        c.bias_values, _ = self._array("float[]", bias.values())
        stops = [ffi.new("char[]", text) for text in settings.get("stop", ())]
        self._keep += stops
        c.stop_strings, c.stop_string_count = self._array("char *[]", stops)

    def _array(self, kind: str, values: Iterable[Any]) -> tuple[Any, int]:
        items = list(values)
        memory = ffi.new(kind, items)
        self._keep.append(memory)
        return memory, len(items)


class _Question:
    """A request of settings with its prompt or messages; `c` is the engine's form of it."""

    def __init__(self, pointer: Any, asked: _Asked) -> None:
        self._pointer, self._asked = pointer, asked
        self._request = _Request(pointer, asked.max_tokens, asked.settings)
        self.c = self._request.c
        room = self.c.max_tokens
        if self.c.on_full != lib.GEMRUN_FULL_SLIDE:
            room = min(room, _c_info(pointer).context)
        elif room > MOST_SLID:
            arguments.wrong_value("max_tokens", room, f"at most {MOST_SLID} with on_full='slide'")
        self._ids = ffi.new("int32_t[]", room)

    def pace(self) -> None:
        """Keep to the artifact's thermal policy, should a temperature be told."""
        self._pacer = ffi.new("gemrun_pacer *")
        self.c[0] = lib.gemrun_paced(self._pointer, self._pacer, self.c)

    def ask(self) -> int:
        """Run it; the number of tokens, or a negative status."""
        if self._asked.messages is None:
            prompt = arguments.text("prompt", self._asked.prompt)
            count = lib.gemrun_generate(self._pointer, prompt, self.c, self._ids)
        else:
            c_messages, keep = _messages(self._asked.messages)
            count = lib.gemrun_chat(self._pointer, c_messages, len(keep), self.c, self._ids)
        return int(count)

    def answer(self, count: int, run: _Run) -> Tokens:
        """What it made."""
        return Tokens(self._ids[0:count], "".join(run.pieces), _stats(self._pointer))


def _config(kind: str, config: Config) -> tuple[Any, Any]:
    """The engine's form of a configuration, and what keeps its text alive."""
    arguments.known(kind, config, Config.__annotations__)
    c = ffi.new("gemrun_config *", lib.gemrun_config_default())
    kernel = config.get("kernel")
    name = ffi.NULL if kernel is None else ffi.new("char[]", arguments.text("kernel", kernel))
    c.kernel = name
    for key, value in config.items():
        if key != "kernel":
            setattr(c, key, arguments.config_value(key, value))
    return c, name


def _check(status: int) -> int:
    if status < 0:
        raise error_of(status, ffi.string(lib.gemrun_last_error()).decode("utf-8", "replace"))
    return int(status)


def _opened(status: int, path: bytes) -> None:
    """As _check, of an open: where memory is short it says whose."""
    if status >= 0:
        return
    sentence = ffi.string(lib.gemrun_last_error()).decode("utf-8", "replace")
    more = ffi.new("char[256]")
    lib.gemrun_explain_memory(status, path, ffi.NULL, more, 256)
    raise error_of(status, sentence + ffi.string(more).decode("utf-8", "replace"))


def _check_board(pointer: Any, path: bytes) -> None:
    """Raises ForeignBoardError on another known board; a BoardWarning on one that is not known."""
    found = _check(lib.gemrun_check_board(pointer, path, ffi.NULL))
    if found > 0:
        sentence = ffi.string(lib.gemrun_last_error()).decode("utf-8", "replace")
        warnings.warn(sentence, BoardWarning, stacklevel=3)


def _checked(
    prompt: str | None,
    messages: Sequence[Message] | None,
    max_tokens: int,
    settings: Settings,
) -> _Asked:
    """Refuse wrong arguments of a run where it was asked for, a stream's too. Gives the settings
    as they were found, whatever becomes of the caller's."""
    if messages is None:
        arguments.text("prompt", prompt)
    else:
        arguments.messages(messages)
    arguments.integer("max_tokens", max_tokens, 1, arguments.INT32_MAX)
    found = arguments.settings(settings, Settings.__annotations__)
    return _Asked(prompt, messages, max_tokens, found)


def _messages(messages: Sequence[Message]) -> tuple[Any, list[Any]]:
    """The engine's form of a conversation, and what keeps its texts alive."""
    checked = arguments.messages(messages)
    c_messages, keep = ffi.new("gemrun_message[]", len(checked)), []
    for c_message, (role, content) in zip(c_messages, checked, strict=True):
        keep.append(ffi.new("char[]", content))
        c_message.role, c_message.text = ROLES[role], keep[-1]
    return c_messages, keep


def _stats(pointer: Any) -> Stats:
    c = ffi.new("gemrun_stats *")
    c.size = ffi.sizeof("gemrun_stats")
    _check(lib.gemrun_get_stats(pointer, c))
    return _stats_of(c)


def _stats_of(c: Any) -> Stats:
    values = {name: getattr(c, name) for name in Stats.__annotations__}
    values["finish"] = FINISH_REASONS[c.finish]
    return Stats(**values)


def _thermal_of(c: Any) -> Thermal:
    return Thermal(
        told=bool(c.told),
        mode=THROTTLE_MODES[c.mode],
        level=c.level,
        levels=c.levels,
        duty=c.duty / 1000,
        threads=c.threads,
        chunk=c.chunk,
        fault=bool(c.fault),
        celsius=c.celsius if c.celsius != 0 else None,
        engage_c=c.engage_c or None,
        release_c=c.release_c or None,
    )


def _c_info(pointer: Any) -> Any:
    c = ffi.new("gemrun_info *")
    c.size = ffi.sizeof("gemrun_info")
    _check(lib.gemrun_get_info(pointer, c))
    return c


def _info(pointer: Any) -> Info:
    c = _c_info(pointer)
    values = {name: getattr(c, name) for name in Info.__annotations__ if name != "stop_ids"}
    for name in ("name", "family", "target", "kernel"):
        values[name] = ffi.string(values[name]).decode("utf-8", "replace")
    values["has_chat"] = bool(c.has_chat)
    values["bos_id"] = None if c.bos_id < 0 else c.bos_id
    values["kv_type"] = ("f32", "f16", "int8")[c.kv_type]
    return Info(stop_ids=tuple(c.stop_ids[i] for i in range(c.stop_id_count)), **values)
