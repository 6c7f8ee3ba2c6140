"""The daemon's methods: who may call them, what they take, what they return (PROTOCOL.md).

Parameters are checked here, once for every front end: types, ranges, no unknown names.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from gemctl import wording
from gemctl.config import Celsius, Mode
from gemctl.core import policy
from gemctl.errors import ApiError, of_system
from gemctl.events import EventHub
from gemctl.serve import handover, replace
from gemctl.serve.jobs import Job
from gemctl.serve.models import Model, Models
from gemctl.service import Caller, Emit
from gemctl.store import sign
from gemctl.store.store import check_name

if TYPE_CHECKING:
    from gemctl.daemon import Daemon
    from gemctl.serve.attached import Attached

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]


def _plain(text: str) -> str:
    """Text that the engine can take: UTF-8, and no NUL in it."""
    if "\0" in text:
        raise ValueError("a NUL character; leave it out")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair; send UTF-8") from None
    return text


Text = Annotated[str, Field(max_length=200_000), AfterValidator(_plain)]
Prompt = Annotated[str, Field(max_length=4096), AfterValidator(_plain)]
Source = Annotated[str, Field(max_length=256)]
Stop = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_plain)]
Token = Annotated[int, Field(ge=0, lt=1 << 32)]
# Parameters that an audit event tells, and those that it tells where they are set.
AUDITED = (
    *("name", "digest", "mode", "temp_c", "duty", "for_s", "external", "pinned", "priority"),
    *("on", "percent"),
)
AUDITED_FLAGS = ("reset", "allow_layout_change", "serial")
CLASSES = {"high": 0, "normal": 1, "low": 2}
CLEAN_S = 20.0  # for what a job that was cancelled has to put away
# Methods that a program that attached itself does not take, as it loads and asks its model itself.
NOT_ATTACHED = frozenset(
    {
        *("model.load", "model.unload", "model.pin", "model.priority", "model.switch"),
        *("model.remove", "generate"),
    }
)


# Methods that need a program or would take its name, while it is away.
NOT_ABSENT = frozenset(
    {
        *(NOT_ATTACHED - {"model.remove"}),
        *("model.replace", "model.enable", "model.disable", "model.rollback", "stats"),
    }
)


class Params(BaseModel):
    """Parameters of a method."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class NoParams(Params):
    """A method that takes none."""


class NameParams(Params):
    name: Name


class MaybeName(Params):
    name: Name | None = None


class PinParams(Params):
    name: Name
    pinned: bool = True


class LoadParams(Params):
    name: Name
    digest: Digest | None = None


class EnableParams(Params):
    name: Name | None = None
    warmup_prompt: Prompt | None = None


class ReplaceParams(Params):
    name: Name | None = None
    digest: Digest | None = None
    allow_layout_change: bool = False
    serial: bool = False
    warmup_prompt: Prompt | None = None


class ThrottleParams(Params):
    mode: Mode | None = None
    temp_c: Celsius | None = None
    duty: Annotated[float, Field(gt=0, le=1)] | None = None
    for_s: Annotated[float, Field(gt=0, le=7 * 86400)] | None = None
    external: Annotated[list[Source], Field(max_length=8)] | None = None
    reset: bool = False

    @model_validator(mode="after")
    def _lasting(self) -> ThrottleParams:
        if self.for_s is None:
            return self
        if self.reset:
            raise ValueError("reset and for_s exclude each other; send two requests")
        if (self.mode, self.temp_c, self.duty, self.external) == (None,) * 4:
            raise ValueError("for_s alone changes nothing; give mode, temp_c, duty or external")
        return self


class PriorityParams(Params):
    name: Name
    priority: Annotated[int, Field(ge=0, le=9)]


class SwitchParams(Params):
    name: Name


class AutoResetParams(Params):
    on: bool
    percent: Annotated[int, Field(ge=0, le=100)] | None = None


class HistoryParams(Params):
    seconds: Annotated[int, Field(ge=1, le=3600)] = 3600
    step_s: Annotated[int, Field(ge=1, le=600)] = 10


class FollowParams(Params):
    after: Annotated[int, Field(ge=0)] | None = None
    follow: bool = True


class CancelParams(Params):
    id: Annotated[str, Field(max_length=64)]


class Message(Params):
    role: Literal["system", "user", "assistant"]
    text: Text


class GenerateParams(Params):
    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=64)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = 256
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 20)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    stop: Annotated[list[Stop], Field(max_length=8)] = []
    banned: Annotated[list[Token], Field(max_length=256)] | None = None
    ignore_stop_ids: bool = False
    speculate: Annotated[int, Field(ge=0, le=6)] | None = None
    reuse: bool = False
    on_full: Literal["stop", "mark", "slide"] = "stop"
    deadline_ms: Annotated[int, Field(ge=1, le=86_400_000)] | None = None
    priority: Literal["high", "normal", "low"] = "normal"
    stream: bool = True

    @model_validator(mode="after")
    def _one_prompt(self) -> GenerateParams:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give one of prompt and messages")
        return self

    def fields(self) -> dict[str, Any]:
        """What the engine is told: only what was given."""
        kept = ("prompt", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
        more = ("repetition_penalty", "ignore_stop_ids", "speculate", "stop", "banned")
        made = {key: getattr(self, key) for key in (*kept, *more, "reuse", "on_full")}
        if self.messages is not None:
            made["messages"] = [{"role": m.role, "text": m.text} for m in self.messages]
        return {key: value for key, value in made.items() if value is not None}


@dataclass
class Call:
    """One call on its way."""

    caller: Caller
    emit: Emit | None

    async def tell(self, event: dict[str, Any]) -> None:
        """A part of a stream."""
        if self.emit is not None:
            await self.emit(event)


@dataclass(frozen=True)
class Method:
    """`write`: it changes something, or costs time of the engine."""

    params: type[Params]
    run: Callable[[Any, Any, Call], Awaitable[dict[str, Any]]]
    write: bool
    audit: bool = True


def _audited(params: Params) -> dict[str, Any]:
    """What an audit event tells of a call's parameters."""
    given = params.model_dump(exclude_unset=True, exclude_none=True)
    flags = {key: True for key in AUDITED_FLAGS if given.get(key)}
    return {**{key: given[key] for key in AUDITED if key in given}, **flags}


class Api:
    """The Service of this daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._running: dict[str, asyncio.Task[Any]] = {}

    @property
    def models(self) -> Models:
        return self._daemon.models

    @property
    def hub(self) -> EventHub:
        return self._daemon.hub

    def stats(self) -> dict[str, Any]:
        return self._daemon.stats()

    async def call(
        self,
        method: str,
        params: Mapping[str, Any],
        caller: Caller,
        emit: Emit | None = None,
    ) -> dict[str, Any]:
        known = METHODS.get(method)
        if known is None:
            remedy = wording.remedy(method, METHODS, "PROTOCOL.md has all of them")
            raise ApiError("bad_request", f"{method[:64]}: no such method; {remedy}")
        if known.write and not caller.may_write:
            group = f"the group {self._daemon.config.daemon.write_group}"
            raise ApiError("forbidden", f"{method}: {caller.name} may only read; join {group}")
        try:
            checked = known.params.model_validate(dict(params))
        except ValidationError as error:
            sentence = wording.first(error, known.params)
            raise ApiError("bad_request", f"{method}: {sentence}") from None
        name = getattr(checked, "name", getattr(checked, "model", None))
        self._refuse_attached(method, name)
        if name is not None and method in NOT_ABSENT:
            self.models.refuse_absent(name)
        if known.write and known.audit:
            self.hub.publish("audit", caller=caller.name, method=method, **_audited(checked))
        try:
            return await known.run(self, checked, Call(caller, emit))
        except (ApiError, asyncio.CancelledError):
            raise
        except (OSError, MemoryError) as error:
            self._daemon.log(f"{method}: {type(error).__name__}: {error}")
            raise of_system(method, error) from error
        except Exception as error:
            self._daemon.log(f"{method}: {type(error).__name__}: {error}")
            raise ApiError("internal", f"{method}: a fault of the daemon; see its log") from error

    def _refuse_attached(self, method: str, name: str | None) -> None:
        """A program that attached itself loads and asks its model by itself."""
        if method in NOT_ATTACHED and self._daemon.attached_named(name) is not None:
            what = f"{name}: is an attached program"
            remedy = (
                f"it takes disable, enable, stage, replace, rollback; gemctl model status {name}"
            )
            if method == "model.remove":
                remedy = f"remove versions once its process has ended; gemctl model status {name}"
            raise ApiError("conflict", f"{what}; {remedy}")

    # ---- models ----

    def _digest(self, name: str, given: str | None) -> str | None:
        """A whole digest from its beginning."""
        if given is None:
            return None
        found = [
            v.digest for v in self.models.store.versions(name).present if v.digest.startswith(given)
        ]
        if len(found) != 1:
            what = "no version" if not found else f"{len(found)} versions"
            raise ApiError("not_found", f"{name}: {what} {given}; see gemctl model status {name}")
        return found[0]

    async def model_list(self, p: NoParams, call: Call) -> dict[str, Any]:
        attached = self._daemon.attached_list()
        theirs = {row["name"] for row in attached}  # what was staged for them is no model of ours
        known = {*self.models.store.names(), *self.models.models, *self.models.known} - theirs
        ours = [name for name in known if self._is_model(name)]
        rows = [self._brief(name) for name in sorted(ours)] + attached
        return {"models": [{**row, "job": self._job(row["name"])} for row in rows]}

    def _job(self, name: str) -> dict[str, Any] | None:
        """What changes a model now, and how far it is."""
        job = self.models.job_of(name)
        return job.as_dict() if job is not None else None

    def _is_model(self, name: str) -> bool:
        """Not a name of which no more is known than that a version was bad."""
        models = self.models
        model = models.models.get(name)
        if (
            name in models.state.models
            or models.is_absent(name)
            or (model is not None and (model.slots() or model.busy))
        ):
            return True
        return name in models.store.names() and bool(models.store.versions(name).present)

    def _brief(self, name: str) -> dict[str, Any]:
        models = self.models
        model = models.models.get(name)
        wanted = models.state.models.get(name)
        slot = model.current if model is not None else None
        facts = slot.worker.facts if slot is not None and slot.worker is not None else None
        stored = name in models.store.names()
        versions = models.store.versions(name) if stored else None
        current = versions.current if versions is not None else None
        left = replace.probation_left(models, model) if model is not None else None
        return {
            "name": name,
            "active": models.active == name,
            "state": self._state(name),
            "digest": slot.digest if slot is not None else current,
            "pinned": wanted.pinned if wanted is not None else False,
            "priority": model.priority if model is not None else 1,
            "memory_bytes": facts.ram_total if facts is not None else 0,
            "versions": len(versions.present) if versions is not None else 0,
            "probation_left_s": left[0] if left is not None else None,
            "probation_left_requests": left[1] if left is not None else None,
            "not_kept": model.not_kept if model is not None else "",
        }

    def _state(self, name: str) -> str:
        if self.models.is_absent(name):
            return "not attached"
        model = self.models.models.get(name)
        return model.state if model is not None else "empty"

    async def model_status(self, p: MaybeName, call: Call) -> dict[str, Any]:
        program = self._daemon.attached_named(p.name)
        if program is not None:
            mine = {**program.brief(), "job": self._job(program.name), **program.status()}
            return {**mine, **self._stored(program.name)}
        model = self.models.named(p.name)
        slot = model.current
        worker = slot.worker if slot is not None else None
        return {
            **self._brief(model.name),
            "job": self._job(model.name),
            "busy": model.busy,
            "on_probation": model.probation is not None,
            "queued": len(model.turns),
            "worker": dataclasses.asdict(worker.facts) if worker and worker.facts else None,
            "crashes": len(slot.crashes.times_s) if slot is not None else 0,
            "kv_auto_reset_percent": self._daemon.auto_reset,
            "swap": model.swap,
            "requests": {"done": model.figures.done, "failed": model.figures.failed},
            **self._stored(model.name),
        }

    def _stored(self, name: str) -> dict[str, Any]:
        """What the store has of a model."""
        versions = self.models.stored(name)
        return {
            "current": versions.current,
            "previous": versions.previous,
            "present": [{"digest": v.digest, "bytes": v.size} for v in versions.present],
            "bad": [{"digest": digest, "reason": why} for digest, why in versions.bad],
        }

    async def model_load(self, p: LoadParams, call: Call) -> dict[str, Any]:
        started = time.monotonic()
        self.models.model(p.name)
        digest = self._digest(p.name, p.digest)
        await self.models.procedure(Job(p.name, "load"), self._load(p.name, digest))
        return {"model": p.name, "ms": (time.monotonic() - started) * 1e3}

    async def _load(self, name: str, digest: str | None) -> None:
        if digest not in (None, self.models.store.versions(name).current):
            await asyncio.to_thread(self._demand_signature, name, str(digest))
        await self.models.load(name, digest)
        self.models.loaded(name)

    def _demand_signature(self, name: str, digest: str) -> None:
        """Another version than the current one is held to signatures, as a replacement is."""
        config = self._daemon.config.models
        descriptor = self.models.store.open(name, digest)
        try:
            sign.demand(sign.check(descriptor, config.signature, config.keys_dir))
        finally:
            os.close(descriptor)

    async def model_unload(self, p: NameParams, call: Call) -> dict[str, Any]:
        started = time.monotonic()
        await self.models.procedure(self._at_once(p.name, "unload"), self.models.unload(p.name))
        return {"model": p.name, "ms": (time.monotonic() - started) * 1e3}

    def _at_once(self, name: str | None, what: str) -> Job:
        """A job that cannot be taken back once it has begun."""
        return Job(name or self.models.active or "", what, settled=True)

    async def model_pin(self, p: PinParams, call: Call) -> dict[str, Any]:
        self.models.pin(p.name, p.pinned)
        return {"model": p.name, "pinned": p.pinned}

    async def model_priority(self, p: PriorityParams, call: Call) -> dict[str, Any]:
        model = self.models.model(p.name)
        self.models.want(p.name, priority=p.priority)
        model.priority = p.priority
        return {"model": p.name, "priority": p.priority}

    async def model_clear(self, p: NameParams, call: Call) -> dict[str, Any]:
        await self.models.clear(p.name)
        model = self.models.models.get(p.name)
        return {"model": p.name, "state": model.state if model is not None else None}

    async def model_disable(self, p: MaybeName, call: Call) -> dict[str, Any]:
        attached = self._daemon.attached_named(p.name)
        if attached is not None:
            job = self._at_once(attached.name, "disable")
            return await self.models.procedure(job, attached.disable())
        job = self._at_once(p.name, "disable")
        return await self.models.procedure(job, self.models.disable(p.name))

    async def model_enable(self, p: EnableParams, call: Call) -> dict[str, Any]:
        attached = self._daemon.attached_named(p.name)
        if attached is not None:
            job = self._at_once(attached.name, "enable")
            return await self.models.procedure(job, attached.enable(p.warmup_prompt))
        job = Job(p.name or self.models.active or "", "enable")
        return await self.models.procedure(job, self.models.enable(p.name, p.warmup_prompt))

    async def model_switch(self, p: SwitchParams, call: Call) -> dict[str, Any]:
        return await self.models.procedure(Job(p.name, "switch"), self.models.switch(p.name))

    async def model_replace(self, p: ReplaceParams, call: Call) -> dict[str, Any]:
        fds = call.caller.fds
        if len(fds) > 1 or bool(fds) == (p.digest is not None):
            raise ApiError("bad_request", "model.replace: give one of a file and a digest")
        attached = self._daemon.attached_named(p.name)
        if attached is not None:
            return await self._replace_attached(attached, p, call)
        name = p.name or self.models.active
        if name is None:
            raise ApiError("not_found", "no model is active; name one")
        check_name(name)
        digest = None if fds else self._digest(name, p.digest)
        job = Job(name, "replacement", descriptor=os.dup(fds[0]) if fds else -1)
        return await self.models.procedure(job, self._replace(job, digest, p, call))

    async def _replace(
        self, job: Job, digest: str | None, p: ReplaceParams, call: Call
    ) -> dict[str, Any]:
        model = self.models.add(job.model)
        try:
            report = await replace.run(
                self.models,
                model,
                job.descriptor if digest is None else digest,
                call.tell,
                job,
                allow_layout_change=p.allow_layout_change,
                serial=p.serial,
                prompt=p.warmup_prompt,
            )
            return {"model": job.model, "already": False, **report}
        finally:
            self._drop_empty(model)

    async def model_stage(self, p: NameParams, call: Call) -> dict[str, Any]:
        if len(call.caller.fds) != 1:
            raise ApiError("bad_request", "model.stage: give one file")
        job = Job(check_name(p.name), "staging", descriptor=os.dup(call.caller.fds[0]))
        return await self.models.procedure(job, self._stage(job, call))

    async def _stage(self, job: Job, call: Call) -> dict[str, Any]:
        model = self.models.add(job.model)
        try:
            return await replace.stage_only(self.models, model, job.descriptor, call.tell, job)
        finally:
            self._drop_empty(model)

    def _drop_empty(self, model: Model) -> None:
        """A name that was made for a first version that was refused, or for one that an attached
        program will take, is no model."""
        stored = self._is_model(model.name)
        attached = self._daemon.attached_named(model.name) is not None
        if not model.slots() and (attached or not stored):
            self.models.models.pop(model.name, None)

    async def _replace_attached(
        self, program: Attached, p: ReplaceParams, call: Call
    ) -> dict[str, Any]:
        fds = call.caller.fds
        digest = None if fds else self._digest(program.name, p.digest)
        descriptor = os.dup(fds[0]) if fds else -1
        job = Job(program.name, "replacement", descriptor=descriptor)
        h = handover.Handover(self.models, program, call.tell, job)
        work = handover.replace(h, digest, p.warmup_prompt, p.allow_layout_change)
        return {"model": program.name, "already": False, **await self.models.procedure(job, work)}

    async def model_remove(self, p: LoadParams, call: Call) -> dict[str, Any]:
        digest = self._digest(p.name, p.digest)
        job = self._at_once(p.name, "removal")
        await self.models.procedure(job, self.models.remove(p.name, digest))
        return {"model": p.name, "digest": digest}

    async def model_rollback(self, p: MaybeName, call: Call) -> dict[str, Any]:
        program = self._daemon.attached_named(p.name)
        if program is not None:
            job = Job(program.name, "rollback")
            h = handover.Handover(self.models, program, call.tell, job)
            return await self.models.procedure(job, handover.rollback(h))
        model = self.models.named(p.name)
        job = Job(model.name, "rollback")
        return await self.models.procedure(
            job, replace.rollback(self.models, model, call.tell, job)
        )

    # ---- requests ----

    async def generate(self, p: GenerateParams, call: Call) -> dict[str, Any]:
        model = self.models.named(p.model)
        number = secrets.token_hex(8)
        task = asyncio.current_task()
        assert task is not None
        self._running[number] = task
        try:
            await call.tell({"request": number, "model": model.name})
            return await self._generate(p, model, number, call)
        except asyncio.CancelledError:
            if self._running.get(number) is not None:
                raise
            raise ApiError("cancelled", f"request {number}: was cancelled; ask again") from None
        finally:
            self._running.pop(number, None)

    async def _generate(
        self, p: GenerateParams, model: Model, number: str, call: Call
    ) -> dict[str, Any]:
        now = self.models.clock()
        limits = self._daemon.config.models
        allowed = limits.request_timeout_s if p.deadline_ms is None else p.deadline_ms / 1e3
        waiting = policy.Waiting(number, now, model.priority, CLASSES[p.priority], now + allowed)
        self._admit(model, waiting, p)
        fields = p.fields()
        fields.setdefault("speculate", limits.speculate)
        if self._daemon.auto_reset is not None:
            fields["reset"] = self._daemon.auto_reset
        pieces: list[str] = []
        done: dict[str, Any] = {}
        owner = call.caller.name if call.caller.source == "unix" else call.caller.source
        events = self.models.generate(model, fields, waiting, owner)
        with model.gaps.request() as got_token:
            async with _closing(events):
                async for event in events:
                    if event["event"] == "done":
                        done = event
                        continue
                    got_token()
                    pieces.append(event["text"])
                    if p.stream:
                        await call.tell({"token": event["token"], "text": event["text"]})
        if done.get("reset"):
            used, size = done["kv_used"], done["kv_size"]
            self.hub.publish("kv.reset", model=model.name, used=used, size=size)
        done = {key: value for key, value in done.items() if key not in ("event", "id", "reset")}
        if self._daemon.config.daemon.log_prompts:
            asked = p.prompt if p.messages is None else [m.text for m in p.messages]
            self.hub.publish("request.text", model=model.name, asked=asked, text="".join(pieces))
        return {"request": number, "model": model.name, "text": "".join(pieces), **done}

    def _admit(self, model: Model, waiting: policy.Waiting, p: GenerateParams) -> None:
        """A deadline that cannot be kept is refused now, not missed later."""
        if p.deadline_ms is None:
            return
        last, step = model.figures.last, model.figures.step_ms
        if not last or not step:
            return
        per_turn = last["ttft_ms"] / 1e3 + last["generated_tokens"] * step / 1e3
        ahead = (len(model.turns) + (model.current is not None and model.current.busy)) * per_turn
        why = policy.admit_request(
            waiting, self.models.clock(), ahead, last["ttft_ms"] / 1e3, 1, 1e3 / step
        )
        if why:
            raise ApiError("timeout", why)

    async def cancel(self, p: CancelParams, call: Call) -> dict[str, Any]:
        job = self.models.jobs.get(p.id)
        if job is not None:
            return await self._cancel_job(job)
        task = self._running.pop(p.id, None)
        if task is None:
            raise ApiError("not_found", f"{p.id}: no such request or job runs; nothing to do")
        task.cancel()
        return {"request": p.id}

    async def _cancel_job(self, job: Job) -> dict[str, Any]:
        """The answer comes when it has cleaned up, so that another one may begin."""
        if not job.cancel():
            raise job.too_late()
        if job.task is not None:
            await asyncio.wait({job.task}, timeout=CLEAN_S)
        return {"request": job.number, "model": job.model}

    async def kv_auto_reset(self, p: AutoResetParams, call: Call) -> dict[str, Any]:
        self.models.save(auto_reset_kv_cache=p.on, auto_reset_percent=p.percent)
        return {"auto_reset_kv_cache": p.on, "percent": self._daemon.auto_reset}

    # ---- the daemon ----

    async def read_stats(self, p: MaybeName, call: Call) -> dict[str, Any]:
        return self._daemon.stats(p.name)

    async def stats_history(self, p: HistoryParams, call: Call) -> dict[str, Any]:
        return self._daemon.history.query(p.seconds, p.step_s)

    async def events_follow(self, p: FollowParams, call: Call) -> dict[str, Any]:
        with self.hub.follow() as events:
            recent, last = self.hub.recent(p.after or 0), self.hub.last
            for event in recent:
                await call.tell(event.as_dict())
            if p.follow:
                async for event in events:
                    if event.seq > last:
                        await call.tell(event.as_dict())
                        last = event.seq
        return {"last": last}

    async def throttle_get(self, p: NoParams, call: Call) -> dict[str, Any]:
        return self._throttle()

    async def throttle_set(self, p: ThrottleParams, call: Call) -> dict[str, Any]:
        await self._daemon.throttle.set(**p.model_dump())
        return self._throttle()

    def _throttle(self) -> dict[str, Any]:
        """The throttle, and why its threshold is another than the one that was asked for."""
        settings = self._daemon.throttle.settings()
        note = policy.threshold_note(settings)
        found = self._daemon.throttle.describe()
        return {**found, "asked_c": settings.temp_c, "threshold_note": note}

    async def calibrate_thermal(self, p: NoParams, call: Call) -> dict[str, Any]:
        return await self._daemon.throttle.calibrate(call.tell)

    async def daemon_info(self, p: NoParams, call: Call) -> dict[str, Any]:
        return self._daemon.info()

    async def config_reload(self, p: NoParams, call: Call) -> dict[str, Any]:
        return await self._daemon.reload()

    async def doctor(self, p: NoParams, call: Call) -> dict[str, Any]:
        return {"checks": self._daemon.doctor()}

    async def bundle(self, p: NoParams, call: Call) -> dict[str, Any]:
        return self._daemon.bundle()


@contextlib.asynccontextmanager
async def _closing(events: AsyncIterator[Any]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await events.aclose()  # type: ignore[attr-defined]


METHODS: dict[str, Method] = {
    "stats": Method(MaybeName, Api.read_stats, False),
    "stats.history": Method(HistoryParams, Api.stats_history, False),
    "events.follow": Method(FollowParams, Api.events_follow, False),
    "model.list": Method(NoParams, Api.model_list, False),
    "model.status": Method(MaybeName, Api.model_status, False),
    "throttle.get": Method(NoParams, Api.throttle_get, False),
    "daemon.info": Method(NoParams, Api.daemon_info, False),
    "doctor": Method(NoParams, Api.doctor, False),
    "model.load": Method(LoadParams, Api.model_load, True),
    "model.unload": Method(NameParams, Api.model_unload, True),
    "model.pin": Method(PinParams, Api.model_pin, True),
    "model.priority": Method(PriorityParams, Api.model_priority, True),
    "model.clear": Method(NameParams, Api.model_clear, True),
    "model.rollback": Method(MaybeName, Api.model_rollback, True),
    "model.disable": Method(MaybeName, Api.model_disable, True),
    "model.enable": Method(EnableParams, Api.model_enable, True),
    "model.switch": Method(SwitchParams, Api.model_switch, True),
    "model.remove": Method(LoadParams, Api.model_remove, True),
    "model.stage": Method(NameParams, Api.model_stage, True),
    "model.replace": Method(ReplaceParams, Api.model_replace, True),
    "throttle.set": Method(ThrottleParams, Api.throttle_set, True),
    "calibrate.thermal": Method(NoParams, Api.calibrate_thermal, True),
    "generate": Method(GenerateParams, Api.generate, True, audit=False),
    "cancel": Method(CancelParams, Api.cancel, True),
    "kv.auto_reset": Method(AutoResetParams, Api.kv_auto_reset, True),
    "config.reload": Method(NoParams, Api.config_reload, True),
    "bundle": Method(NoParams, Api.bundle, True),
}
