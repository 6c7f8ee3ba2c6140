"""What is wanted, kept over a restart: `state.json`, written seldom and never half.

    file = StateFile(Path("/var/lib/gemctl"))
    found = file.boot()            what to load now; a trial's try is written off before that
    file.save(state)               unchanged: nothing is written; too often: it waits (flush)

Written to a new file, synced, renamed; the content before stays as `state.json.previous`. A file
that is damaged (its checksum differs, it is no JSON, a field is wrong) or of another schema is put
aside as `state.json.damaged`, one at most, and the previous one is used, else the defaults; both
with a warning, and so where somebody took state.json away. One that the system does not let us read
stays until the next write. What happened, and what is loaded now, is not in here.

Flash: at most BURST + a day / INTERVAL_S writes a day, whatever clients do, and two for a trial,
one more at an end in order that comes meanwhile. A usual day has twenty of them, of about 600
bytes each. With its own blocks ext4 writes about 20 KB to the device for each: 0.4 MB on a usual
day, 58 MB on the worst.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemctl import wording
from gemctl.config import Celsius, Mode
from gemctl.errors import ApiError
from gemctl.store import durable
from gemctl.store.durable import explained

STATE, PREVIOUS, DAMAGED = "state.json", "state.json.previous", "state.json.damaged"
MAX_BYTES = 256 << 10
MODELS_MOST = 64
PROGRAMS_MOST = 64  # names remembered, the newest
TRIES = 2  # boots that a trial is loaded at; it is dropped at the one behind
BURST = 32  # writes at once, before they have to wait
INTERVAL_S = 30.0  # between writes from then on

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Part(BaseModel):
    """A table of the file: immutable, no unknown keys, no conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelState(Part):
    """What is wanted of a model. An enabled one is loaded when the daemon starts."""

    enabled: bool = True
    pinned: bool = False  # nobody unloads it to make room
    digest: Digest | None = None  # None: the store's current version
    priority: Annotated[int, Field(ge=0, le=9)] = 1  # 0 goes first


class ThrottleState(Part):
    """What was asked of the throttle; None: as the configuration says."""

    mode: Mode | None = None
    temp_c: Celsius | None = None
    duty: Annotated[float, Field(gt=0, le=1)] | None = None  # at most, share of the time
    external: tuple[Annotated[str, Field(max_length=256)], ...] | None = None


class Brief(Part):
    """A policy that was asked for a while, and lies over the kept one until its end."""

    policy: ThrottleState
    for_s: Annotated[float, Field(gt=0, le=7 * 86400)]
    until: Annotated[float, Field(ge=0)]  # seconds since 1970, by a clock that may be wrong

    def left(self, now: float) -> float:
        """Seconds of it that are left; where the clock went back, no more than were asked for."""
        return min(self.until - now, self.for_s)


class Trial(Part):
    """A version on probation. `tries_left`: boots that may still load it."""

    name: Name
    digest: Digest
    tries_left: Annotated[int, Field(ge=0, le=9)] = TRIES


class State(Part):
    """All that is wanted."""

    version: Literal[1] = Field(default=1, alias="schema")
    active: Name | None = None
    models: Annotated[dict[Name, ModelState], Field(max_length=MODELS_MOST)] = {}
    throttle: ThrottleState = ThrottleState()
    brief: Brief | None = None
    auto_reset_kv_cache: bool | None = None  # None: as the configuration says; likewise ..
    auto_reset_percent: Annotated[int, Field(ge=0, le=100)] | None = None
    trial: Trial | None = None
    programs: Annotated[tuple[Name, ...], Field(max_length=PROGRAMS_MOST)] = ()  # that attached


_PARTS: tuple[type[Part], ...] = (ModelState, ThrottleState, Trial, State)


# ---- bytes ----
def pack(state: State) -> bytes:
    """The file's bytes: one JSON object with a checksum over its other keys."""
    table = state.model_dump(mode="json", by_alias=True)
    for key in ("brief", "programs"):  # a daemon that does not know it can read the file
        if not table[key]:
            del table[key]
    table["crc32"] = _sum_of(table)
    return (json.dumps(table, indent=1, sort_keys=True) + "\n").encode("ascii")


def unpack(data: bytes) -> State:
    """The state of a file's bytes. ValueError with a word on what is wrong.

    Without `crc32`, as somebody writes it who prepares an image, nothing is compared.
    """
    try:
        table = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except ValueError:
        raise ValueError("no JSON") from None
    if not isinstance(table, dict):
        raise ValueError("no JSON object")
    stored = table.pop("crc32", None)
    if stored is not None and stored != _sum_of(table):
        raise ValueError("its checksum differs")
    if table.get("schema") != 1:
        raise ValueError(f"schema {str(table.get('schema'))[:20]}, known is 1")
    try:
        return State.model_validate_json(json.dumps(table))
    except ValidationError as error:
        raise ValueError(wording.first(error, State)) from None


def _sum_of(table: dict[str, Any]) -> str:
    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return f"{zlib.crc32(text.encode('ascii')):08x}"


# ---- changes: a new state from an old one ----
def with_model(state: State, name: str, **changes: Any) -> State:
    """Change fields of a model; it is added where it is missing. ApiError("bad_request")."""
    before = state.models.get(name, ModelState())
    try:
        model = ModelState.model_validate({**before.model_dump(), **changes})
        fields = {**_fields(state), "models": {**state.models, name: model}}
        return State.model_validate(fields)
    except ValidationError as error:
        raise _wrong(f"model {name[:80]!r}", error) from None


def without_model(state: State, name: str) -> State:
    """Forget a model, whether it is there or not."""
    models = {key: model for key, model in state.models.items() if key != name}
    active = None if state.active == name else state.active
    trial = None if state.trial is not None and state.trial.name == name else state.trial
    return state.model_copy(update={"models": models, "active": active, "trial": trial})


def with_throttle(state: State, **changes: Any) -> State:
    """Change fields of the throttle's policy. ApiError("bad_request")."""
    try:
        throttle = ThrottleState.model_validate({**state.throttle.model_dump(), **changes})
    except ValidationError as error:
        raise _wrong("throttle", error) from None
    return state.model_copy(update={"throttle": throttle})


def begin_trial(state: State, name: str, digest: str, tries: int = TRIES) -> State:
    """A version goes on probation; save this before it is loaded. ApiError("bad_request")."""
    added = with_model(state, name)
    try:
        trial = Trial(name=name, digest=digest, tries_left=tries)
    except ValidationError as error:
        raise _wrong("trial", error) from None
    return added.model_copy(update={"trial": trial})


def end_trial(state: State, good: bool) -> State:
    """The probation is over; a good version is the one that is wanted from now on."""
    trial = state.trial
    if trial is None:
        return state
    plain = state.model_copy(update={"trial": None})
    return with_model(plain, trial.name, digest=trial.digest) if good else plain


def give_back(state: State) -> State:
    """A daemon that ends in order was not taken down: what its start took off a trial's tries."""
    trial = state.trial
    if trial is None or trial.tries_left >= TRIES:
        return state
    return state.model_copy(
        update={"trial": trial.model_copy(update={"tries_left": trial.tries_left + 1})}
    )


def _fields(state: State) -> dict[str, Any]:
    """Fields by the names that validation takes."""
    found = {name: getattr(state, name) for name in type(state).model_fields}
    found["schema"] = found.pop("version")
    return found


def _wrong(what: str, error: ValidationError) -> ApiError:
    model = next(one for one in _PARTS if one.__name__ == error.title)
    return ApiError("bad_request", f"{what}: {wording.first(error, model)}")


# ---- boot ----
@dataclass(frozen=True)
class Load:
    """A model to load. `digest` None: the store's current version."""

    name: str
    digest: str | None
    trial: bool = False


@dataclass(frozen=True)
class Boot:
    """What a start found and wants: `loads` in order; `dropped`: a trial that used up its tries,
    to be marked bad."""

    state: State
    loads: tuple[Load, ...] = ()
    dropped: Trial | None = None
    warnings: tuple[str, ...] = ()


def boot(state: State) -> Boot:
    """What to load at a start. The state in it has a try written off: save it before loading.

    The active model comes first, then by priority and name. A trial whose tries are used up is
    dropped, and what was wanted before it is loaded. That of a disabled model waits.
    """
    trial, dropped = state.trial, None
    if trial is not None and _is_enabled(state, trial.name):
        if trial.tries_left > 0:
            trial = trial.model_copy(update={"tries_left": trial.tries_left - 1})
        else:
            trial, dropped = None, trial
    state = state.model_copy(update={"trial": trial})
    return Boot(state, _loads(state), dropped)


def _is_enabled(state: State, name: str) -> bool:
    return state.models.get(name, ModelState()).enabled


def _loads(state: State) -> tuple[Load, ...]:
    trial = state.trial
    names = {name for name, model in state.models.items() if model.enabled}
    if trial is not None and _is_enabled(state, trial.name):
        names.add(trial.name)

    def order(name: str) -> tuple[bool, int, str]:
        return name != state.active, state.models.get(name, ModelState()).priority, name

    def load(name: str) -> Load:
        if trial is not None and trial.name == name:
            return Load(name, trial.digest, trial=True)
        return Load(name, state.models[name].digest)

    return tuple(load(name) for name in sorted(names, key=order))


# ---- the file ----
def _reason(problem: Exception) -> str:
    return getattr(problem, "strerror", None) or str(problem)


@dataclass(frozen=True)
class Loaded:
    """What was read. `warnings` is empty where all is well."""

    state: State
    warnings: tuple[str, ...] = ()


class StateFile:
    """`state.json` in a folder. For one thread; `clock` in seconds, from anywhere."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Open the folder, making it if it is missing. ApiError."""
        self.root = root
        self._clock = clock
        self._written: bytes | None = None  # what state.json holds, where that is known
        self._waiting: bytes | None = None
        self._problem = ""
        self._unread = False
        self._budget, self._filled = float(BURST), clock()
        self._count, self._bytes = 0, 0
        with explained(root):
            self._folder = durable.make_folder(root)

    def close(self) -> None:
        """Write what waits and give the descriptor back. ApiError where it could not be written."""
        if self._folder < 0:
            return
        try:
            self.flush(force=True)
        finally:
            os.close(self._folder)
            self._folder = -1

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    @property
    def writes(self) -> int:
        """Times the file was written by this object."""
        return self._count

    @property
    def bytes_written(self) -> int:
        """Bytes of content written by this object; the file system's own are not in it."""
        return self._bytes

    @property
    def waiting(self) -> bool:
        """Whether a state was saved that is not on the disk yet."""
        return self._waiting is not None

    @property
    def problem(self) -> str:
        """Why what waits could not be written when that was tried last; empty where nothing is."""
        return self._problem if self._waiting is not None else ""

    def load(self) -> Loaded:
        """Read the state; never raises for what is in the files."""
        self._waiting = self._written = None
        state, problem = self._read(STATE)
        self._unread = isinstance(problem, OSError)
        if state is not None:
            self._written = pack(state)
            return Loaded(state)
        if problem is None:  # none yet, or cut off between the two renames of a write
            before, _ = self._read(PREVIOUS)
            if before is None or self._is_cut_off():
                return Loaded(before or State())
            use = f"{PREVIOUS} is used instead; check what is wanted"
            return Loaded(before, (f"{self.root / STATE}: is missing; {use}",))
        aside = "it is put aside as state.json.damaged"
        if self._unread:
            aside += " at the next write"
        else:
            with contextlib.suppress(OSError):
                os.rename(STATE, DAMAGED, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        before, worse = self._read(PREVIOUS)
        use = "is used instead; check what is wanted"
        if before is None:
            what = "is missing" if worse is None else _reason(worse)
            use = f"{what}; the defaults are used instead"
        told = (f"{self.root / STATE}: {_reason(problem)}; {aside}",)
        return Loaded(before or State(), (*told, f"{self.root / PREVIOUS}: {use}"))

    def _is_cut_off(self) -> bool:
        """Whether a write that did not end took state.json away, or it was told: damaged."""
        return any((self.root / name).exists() for name in (f".{STATE}{durable.NEW}", DAMAGED))

    def _read(self, name: str) -> tuple[State | None, Exception | None]:
        """The state in a file, or what is wrong with it; neither where there is no file."""
        for tries_left in (2, 1, 0):
            try:
                data = durable.read_small(self._folder, name, MAX_BYTES)
                return (None if data is None else unpack(data)), None
            except ValueError as error:
                return None, error
            except OSError as error:
                if not tries_left:
                    return None, error
        raise AssertionError

    def boot(self) -> Boot:
        """Load, write a trial's try off, and say what to load.

        Where that cannot be written, the trial is not loaded at this start: it might end the next
        one too, for ever. Raises nothing for a disk that is full or read-only.
        """
        found = self.load()
        plan = boot(found.state)
        warnings = found.warnings
        if plan.state != found.state:
            try:
                self.save(plan.state, urgent=True)
            except ApiError as error:
                warnings += (f"{error.message} (a version on probation is not loaded)",)
                loads = _loads(plan.state.model_copy(update={"trial": None}))
                return Boot(found.state, loads, plan.dropped, warnings)
        return Boot(plan.state, plan.loads, plan.dropped, warnings)

    def save(self, state: State, *, urgent: bool = False, insist: bool = False) -> bool:
        """Write a state that differs from the one in the file; True where it was written.

        After many writes in a short time it waits for `flush`, unless it is urgent: what has to be
        on the disk before the next step, as a trial's tries. ApiError: no_space, failed; the file
        then holds the state that it held. `insist`: it waits for `flush` then.
        """
        data = pack(state)
        if len(data) > MAX_BYTES:
            what = f"{len(data)} bytes, the limit is {MAX_BYTES}; remove models"
            raise ApiError("bad_request", f"{self.root / STATE}: {what}")
        before = self._waiting
        self._waiting = None if data == self._written else data
        try:
            return self.flush(force=urgent)
        except ApiError:
            self._waiting = self._waiting if insist else before
            raise

    def flush(self, *, force: bool = False) -> bool:
        """Write what waits, if its time has come or with `force`; True where it did. ApiError."""
        now = self._clock()
        filled = self._budget + (now - self._filled) / INTERVAL_S
        self._budget, self._filled = min(float(BURST), filled), now
        data = self._waiting
        if data is None or (self._budget < 1.0 and not force):
            return False
        self._budget -= 1.0
        self._bytes += len(data)
        self._count += 1
        keep = PREVIOUS if self._written is not None else ""
        if self._unread:  # there is a file, and what it holds is not known
            keep = DAMAGED
        try:
            with explained(self.root / STATE, len(data)):
                durable.write_file(self._folder, STATE, data, keep)
        except ApiError as error:
            state, _ = self._read(STATE)
            self._written, self._problem = None if state is None else pack(state), error.message
            raise
        self._written, self._waiting, self._unread, self._problem = data, None, False, ""
        return True
