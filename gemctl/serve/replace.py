"""Another version for a model that serves: tried beside it, then exchanged in one assignment.

    stage      copied into the store under its digest       refused: nothing has happened
    verify     structure, checksums, signature, board, memory, layout
    prefault   read into the page cache at a bounded rate, never while a prompt is read
    load       its own worker maps it
    test       the stored test vectors, bit for bit
    warm-up    a prompt
    flip       requests go to it from now on; those in flight end where they began
    drain      the old worker has no request left; it waits in standby, or ends
    probation  so many answers or so long: then it is good, else everything goes back

Where both do not fit in memory, `serial` ends the old worker first: requests wait meanwhile, and
the old version comes back if the new one fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import weakref
from dataclasses import dataclass, field
from typing import Any

from gemctl import waiting
from gemctl.board import machine
from gemctl.core import policy
from gemctl.errors import ApiError, of_system
from gemctl.serve import artifact, candidate, hooks
from gemctl.serve.jobs import Job, reason_of
from gemctl.serve.models import DISK_AGAIN_S, Models
from gemctl.serve.phases import Procedure, Tell
from gemctl.serve.slot import OTHER_LAYOUT, Model, Slot, found_bad, other_layout
from gemctl.store.copying import digest_of, source_of
from gemctl.store.state import begin_trial, end_trial, with_model
from gemctl.store.store import Staged

PROBATION_LOOK_S = 0.2
GAP_MOST_S = 2.0  # for the first token behind the flip of who waits for one


@dataclass
class Replacement(Procedure):
    """One replacement on its way: what was asked, and what each phase took."""

    models: Models
    model: Model
    tell: Tell
    allow_layout_change: bool = False
    serial: bool = False
    job: Job = field(default_factory=lambda: Job("", "procedure"))
    fresh: bool = False  # the version came into the store with it
    stopped: Slot | None = None  # ended to make room for the candidate
    started: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)  # ms
    _since: float = 0.0

    @property
    def name(self) -> str:
        return self.model.name

    def begin(self, step: str = "") -> None:
        super().begin(step)
        self.model.gaps.watch()


async def stage(r: Procedure, descriptor: int) -> str:
    """Copy an open file into the store; its digest."""
    models, name = r.models, r.name
    made: list[Staged] = []
    most = models.config.models.size_most_bytes

    def copy() -> None:
        made.append(models.store.stage(name, descriptor, size_most=most, pace=r.pace()))

    try:
        await waiting.in_thread(copy)
        staged = made[0]
        r.fresh = staged.fresh
        more = {"digest": staged.digest, "bytes": staged.size, "method": staged.method}
        await r.phase("stage", "verify", **more)
    except BaseException:
        fresh = [one.digest for one in made if one.fresh]
        await drop_staged(models, name, *fresh)
        raise
    return staged.digest


async def check(r: Procedure, descriptor: int) -> None:
    """A first look, before anything is copied. Raises ApiError("refused")."""
    most = r.models.config.models.size_most_bytes
    await waiting.in_thread(candidate.check, r.name, descriptor, most)


async def _verify(r: Replacement, slot: Slot) -> artifact.Inspected:
    """Everything that can be known without running it. Raises ApiError."""
    models = r.models
    found = await artifact.inspect(
        slot.name, slot.path, models.config.models, models.config.sensors.sysfs_root
    )
    slot.declared, slot.thermal = found.declared, found.thermal
    current = r.model.current
    before = current.declared if current is not None else None
    other = before is not None and before.kv_layout_id != found.declared.kv_layout_id
    if other and not r.allow_layout_change:
        raise other_layout(slot.name)
    warnings = [*found.warnings, *([OTHER_LAYOUT] if other else [])]
    await r.phase("verify", "prefault", signature=found.signature, warnings=warnings)
    return found


def _plan(r: Replacement, slot: Slot) -> policy.ReplacePlan:
    """Beside the old one, or in its place. Raises ApiError("no_memory")."""
    models, current = r.models, r.model.current
    old = current.held if current is not None and current.loaded else None
    read = models.config.models.prefault_mbps
    plan = policy.plan_replace(models.memory(), models.held(), old, slot.held, read)
    if plan.strategy == "refuse":
        raise ApiError("no_memory", plan.sentence)
    if plan.strategy == "serial" and not r.serial:
        raise ApiError("no_memory", f"{plan.sentence}; give --serial to accept that")
    return plan


async def _bring_up(r: Replacement, slot: Slot, prompt: str) -> None:
    """prefault, load, test, warm-up."""
    models = r.models

    def busy() -> bool:
        engine = r.model.current
        return engine is not None and engine.busy and engine.prefilling

    rate = models.config.models.prefault_mbps
    await waiting.in_thread(machine.prefault, slot.path, rate, busy, r.halted)
    await r.phase("prefault", "load")
    await models.start_worker(slot)
    facts = slot.worker.facts if slot.worker is not None else None
    old = r.model.current.worker if r.model.current is not None else None
    before = old.facts.name if old is not None and old.facts is not None else None
    warnings = []
    if facts is not None and before not in (None, facts.name):
        warnings.append(f"another model than before: {facts.name}")
    share = min(models.pace.duty, models.pace.prefill_duty)
    if share < 1:
        what = f"the throttle allows {share * 100:g} % of the time"
        warnings.append(f"{what}: tests and warm-up take longer by as much")
    more: dict[str, Any] = {"warnings": warnings} if warnings else {}
    await r.phase("load", "warmup", open_ms=facts.open_ms if facts is not None else None, **more)
    times = await models.warm(slot, prompt, tests=True)
    await r.phase("warmup", "flip", **{key: round(value, 3) for key, value in times.items()})


async def replace(
    r: Replacement, digest: str, prompt: str | None, probation: bool
) -> dict[str, Any]:
    """The whole of it but staging. Raises ApiError; then the old version serves as before."""
    models, model = r.models, r.model
    slot = model.candidate = models.new_slot(model.name, digest)
    text = models.config.models.warmup_prompt if prompt is None else prompt
    try:
        slot.move("load", "replace")
        await _verify(r, slot)
        plan = _plan(r, slot)
        slot.move("verified", plan.sentence)
        if plan.strategy == "serial":
            await _make_room(r)
        await _bring_up(r, slot, text)
        flip = await _flip(r, slot, probation)
    except (OSError, MemoryError) as error:
        told = of_system(f"{model.name}: {digest[:12]} was not tried", error)
        await _undo(r, slot, told)
        raise told from error
    except BaseException as error:
        await _undo(r, slot, error)
        raise
    await r.phase("flip", "drain", flip_ms=round(flip * 1e3, 3))
    if model.kept is not None:
        old = model.kept
        await _drain(r, old)
    return await _report(r, plan.strategy)


async def _make_room(r: Replacement) -> None:
    """Serial: the old worker ends; its requests wait."""
    old = r.stopped = r.model.current
    r.model.turns.serve(None)
    r.model.current = None
    if old is not None:
        await r.models.drain(old, "serial replacement")
    await r.phase("make_room", "prefault")


async def _undo(r: Replacement, slot: Slot, error: BaseException) -> None:
    """The candidate goes; what had to make room for it comes back."""
    models, model = r.models, r.model
    if model.candidate is slot:
        model.candidate = None
    with contextlib.suppress(ApiError):
        _end_trial(models, slot, good=False)
    await models.stop_worker(slot)
    await drop(r, slot.digest, error)
    with contextlib.suppress(ApiError):
        slot.move("fail", reason_of(error))
    if r.stopped is not None and not models.stopping.is_set():
        await _serve_again(r, r.stopped)
    text = reason_of(error)
    models.hub.publish("replace.failed", model=model.name, digest=slot.digest[:12], text=text)


async def _serve_again(r: Replacement, old: Slot) -> None:
    """What made room serves as before: at once where its worker has not ended yet."""
    if old.loaded and old.state == "draining":
        r.model.current = old
        r.models.activate(old, "the candidate failed")
        return
    await r.models.stop_worker(old)
    await _bring_back(r, old.digest)


async def _bring_back(r: Replacement, digest: str) -> None:
    """What served before serves again, or those who wait are told that nothing does."""
    try:
        await r.models.serve(r.model, digest, "the candidate failed", admit=False)
    except ApiError as error:
        r.model.turns.fail(ApiError("failed", f"{r.model.name}: {error.message}"))


async def _flip(r: Replacement, slot: Slot, probation: bool) -> float:
    """One assignment, seconds; everything that is slow was done before, or is done after."""
    models, model = r.models, r.model
    r.job.settle()
    for left in (model.kept, model.current):  # what is neither serving nor wanted is ended first
        if left is not None and left.state != "serving":
            await models.stop_worker(left)
            model.kept = None if model.kept is left else model.kept
            model.current = None if model.current is left else model.current
    if probation and _may_record(models, model):
        # On the disk before it answers: what takes the board down meanwhile is dropped.
        models.commit(begin_trial(models.state, model.name, slot.digest), urgent=True)
    old = model.current
    started = models.clock()
    if old is not None:
        old.move("drain", "replaced")
    model.current, model.candidate, model.kept = slot, None, old
    model.passed.add(slot.digest)
    models.activate(slot, "flip")
    flip = models.clock() - started
    models.metrics.flip(model.name, flip)
    return flip


def _may_record(models: Models, model: Model) -> bool:
    """One trial at a time is written down: of two nobody could tell which one was it. The other
    one's version is simply not wanted at a start until its probation is over."""
    trial = models.state.trial
    return trial is None or trial.name == model.name


def _end_trial(models: Models, slot: Slot, good: bool) -> None:
    """Forget a version's trial, where there is one; a good version is wanted from now on."""
    trial, state = models.state.trial, models.state
    if trial is not None and (trial.name, trial.digest) == (slot.name, slot.digest):
        state = end_trial(state, good)
    if good:
        state = with_model(state, slot.name, digest=slot.digest)
    if state != models.state:
        models.commit(state)


async def _drain(r: Replacement, old: Slot) -> None:
    """Wait for the old one's request; keep it warm for a rollback where memory allows."""
    models = r.models
    await waiting.ended(old.idle, models.config.models.drain_s)
    if old.busy:  # longer than allowed: its request fails, and may be sent again
        await models.stop_worker(old)
        old.move("drained", "drain timeout")
        r.model.kept = None
    elif old.state == "draining" and old.loaded:
        old.move("retain", "kept for a rollback")
    await r.phase("drain")


async def _report(r: Replacement, strategy: str) -> dict[str, Any]:
    total = r.total_ms()
    await r.model.gaps.settle(GAP_MOST_S)
    gap = r.model.gaps.end()
    if gap is not None:
        r.models.metrics.token_gap(r.model.name, gap)
    swap = {
        "strategy": strategy,
        "phases_ms": dict(r.phases),
        "flip_ms": r.phases["flip"],
        "max_token_gap_ms": None if gap is None else round(gap * 1e3, 3),
        "total_ms": total,
        "digest": r.model.current.digest if r.model.current is not None else None,
    }
    r.model.swap = swap
    r.models.hub.publish("replace.done", model=r.model.name, **swap)
    return swap


# ---- probation ----


@dataclass(frozen=True)
class Ends:
    """When a probation is over, if no fault comes first: whichever is reached earlier."""

    until: float  # of the models' clock
    answers: int


_ends: weakref.WeakKeyDictionary[Slot, Ends] = weakref.WeakKeyDictionary()


def _begin(r: Replacement, slot: Slot) -> None:
    limits = r.models.config.models
    until = r.models.clock() + limits.probation_s
    _ends[slot] = Ends(until, max(limits.probation_requests, 1))
    r.model.probation = asyncio.create_task(_probation(r, slot))


def probation_left(models: Models, model: Model) -> tuple[float, int] | None:
    """Seconds and answers until the version that serves has passed; None without a probation."""
    ends = _ends.get(model.current) if model.current is not None else None
    if model.probation is None or model.current is None or ends is None:
        return None
    seconds = max(0.0, ends.until - models.clock())
    return round(seconds, 1), max(0, ends.answers - model.current.answers)


async def watch_probation(r: Replacement, slot: Slot) -> str:
    """Until enough answers or time without a fault, or a fault: which one, or nothing."""
    models, ends = r.models, _ends[slot]
    while models.clock() < ends.until and slot.answers < ends.answers:
        fault = _fault_of(slot)
        if fault:
            return fault
        await asyncio.sleep(PROBATION_LOOK_S)
    return _fault_of(slot)


def _fault_of(slot: Slot) -> str:
    if slot.crashes.times_s:
        return "its worker ended"
    if slot.state != "serving":
        return f"it is {slot.state}"
    return "its answers failed" if slot.failures else ""


async def keep(r: Replacement, slot: Slot) -> None:
    """Probation passed: it is the good version."""
    models, model = r.models, r.model
    await _take_as_good(r, slot)
    models.hub.publish("probation.good", model=model.name, digest=slot.digest)
    await hooks.run(models.config.hooks, "good", model.name, slot.digest, models.hub)


async def _take_as_good(r: Replacement, slot: Slot) -> None:
    """It is the current version from now on, over a restart too."""
    models, model = r.models, r.model
    old, model.kept = model.kept, None
    try:
        await asyncio.to_thread(models.store.mark_good, model.name, slot.digest)
        _end_trial(models, slot, good=True)
    finally:
        if old is not None:
            await models.drain(old, "probation passed")
    in_use, count = models.in_use(), models.config.models.keep
    await asyncio.to_thread(models.store.collect, in_use, count)


async def roll_back(r: Replacement, slot: Slot, why: str) -> None:
    """The old version answers again; this one is never taken again."""
    models, model = r.models, r.model
    old, model.kept = model.kept, None
    model.passed.discard(slot.digest)
    model.turns.serve(None)
    if old is not None and old.loaded and old.state in ("standby", "draining"):
        model.current = old
        models.activate(old, f"rollback: {why}")
    elif old is not None:
        await models.stop_worker(old)
    await _retire(models, slot, why)
    await models.mark_bad(slot.name, slot.digest, why, lambda: _end_trial(models, slot, good=False))
    if model.current in (slot, None):
        model.current = None
        await _load_good(r)
    models.hub.publish("probation.bad", model=model.name, digest=slot.digest, text=why)
    await hooks.run(models.config.hooks, "bad", model.name, slot.digest, models.hub)


async def _load_good(r: Replacement) -> None:
    """The store's good version, where there is one."""
    good = r.models.store.versions(r.model.name).current
    if good is not None:
        await _bring_back(r, good)


async def _retire(models: Models, slot: Slot, why: str) -> None:
    if slot.state == "serving":
        slot.move("drain", why)
        await waiting.ended(slot.idle, models.config.models.drain_s)
    await models.stop_worker(slot)
    with contextlib.suppress(ApiError):
        slot.move("drained" if slot.state == "draining" else "fail", why)


# ---- what the API calls ----


async def stage_only(
    models: Models, model: Model, descriptor: int, tell: Tell, job: Job
) -> dict[str, Any]:
    """Copy an open file into the store and check it, for a later replace by its digest.

    A refusal leaves nothing behind, and is no mark against the file: a key, a board's name or
    another setting may be what was wrong. Its layout is the replacement's question.
    """
    with models.changing(model, "a staging"):
        r = Replacement(models, model, tell, allow_layout_change=True, job=job)
        r.begin("stage")
        await r.announce()
        await check(r, descriptor)
        digest = await stage(r, descriptor)
        slot = models.new_slot(model.name, digest)
        try:
            await _verify(r, slot)
        except BaseException as error:
            await drop(r, digest, error)
            raise
    return {"model": model.name, "digest": digest, "phases_ms": r.phases}


async def drop(r: Procedure, digest: str, error: BaseException) -> None:
    """What the procedure brought into the store goes; of what was there before only a version that
    was found bad does."""
    its_fault = isinstance(error, ApiError) and error.code in ("refused", "failed")
    if r.fresh or its_fault:
        await drop_staged(r.models, r.name, digest)


async def drop_staged(models: Models, name: str, *digests: str) -> None:
    """Nobody needs files that were refused, nor the folder of a name without any."""
    for digest in digests:
        models.store.release(name, digest)
    with contextlib.suppress(ApiError):
        in_use, count = models.in_use(), models.config.models.keep
        await asyncio.to_thread(models.store.collect, in_use, count)


async def run(
    models: Models,
    model: Model,
    source: int | str,
    tell: Tell,
    job: Job,
    *,
    allow_layout_change: bool = False,
    serial: bool = False,
    prompt: str | None = None,
) -> dict[str, Any]:
    """Replace by an open file (a descriptor) or by a version of the store (its digest).

    Raises ApiError; the version that serves is then untouched.
    """
    with models.changing(model, "a replacement"):
        r = Replacement(models, model, tell, allow_layout_change, serial, job)
        r.begin("stage" if isinstance(source, int) else "verify")
        await r.announce()
        if isinstance(source, int):
            await check(r, source)
        if model.probation is not None and not await _is_tried(r, source):
            raise _on_probation(models, model)
        digest = await stage(r, source) if isinstance(source, int) else source
        if model.current is not None and model.current.digest == digest and model.current.loaded:
            return _already(r, model.current)
        check_stored(models, model.name, digest)
        first = model.current is None
        report = await replace(r, digest, prompt, probation=True)
        slot = model.current
        assert slot is not None
        _begin(r, slot)
        models.want(model.name, enabled=True)
        if models.active is None and first:
            models.save(active=model.name)
    return report


def check_stored(models: Models, name: str, digest: str) -> None:
    """Whether a version is there and may be tried. Raises ApiError."""
    found = models.store.versions(name)
    if digest not in {version.digest for version in found.present}:
        raise ApiError("not_found", f"{name}: no version {digest[:12]}; stage its file")
    if digest in {bad for bad, _ in found.bad}:
        raise found_bad(name, digest)


async def _is_tried(r: Replacement, source: int | str) -> bool:
    """Whether a file or a digest is the version that is on probation now."""
    if isinstance(source, int):
        size = source_of(source, r.models.config.models.size_most_bytes).st_size
        source = await waiting.in_thread(digest_of, source, size, r.pace())
    return r.model.current is not None and r.model.current.digest == source


def _on_probation(models: Models, model: Model) -> ApiError:
    """It ends by itself: who comes later is served."""
    left = probation_left(models, model)
    what = f"{model.name}: another version is on probation"
    if model.not_kept:
        what = f"{model.name}: the version that serves is not kept yet: {model.not_kept}"
    elif left is not None:
        what += how_long(*left)
    word = "rollback" if _before(models, model) is not None else "disable"
    return ApiError("busy", f"{what}; wait for its end, or gemctl model {word} {model.name}")


def how_long(seconds: float, answers: int) -> str:
    """What is left of a probation, for a sentence."""
    more = f", or {answers} more answer{'s' if answers != 1 else ''}" if answers else ""
    return f" for {math.ceil(seconds)} s{more}"


def _before(models: Models, model: Model) -> str | None:
    """The version that a rollback would let answer; None where there is none."""
    found = models.stored(model.name)
    if model.probation is not None and model.current is not None:
        if model.kept is not None:
            return model.kept.digest
        if found.current not in (None, model.current.digest):
            return found.current
    return found.previous


def _already(r: Replacement, slot: Slot) -> dict[str, Any]:
    """The answer where nothing has to be done."""
    r.models.store.release(slot.name, slot.digest)  # it is in use, and was judged or will be
    if slot.state != "serving":
        raise ApiError("busy", f"{slot.name}: this version is {slot.state}; wait for its end")
    return {
        "already": True,
        "strategy": "none",
        "phases_ms": dict(r.phases),
        "flip_ms": 0.0,
        "max_token_gap_ms": None,
        "total_ms": r.total_ms(),
        "digest": slot.digest,
    }


def begin_probation(models: Models, model: Model, slot: Slot) -> None:
    """A version whose probation was cut short, by an unload or a disable, serves again."""
    r = Replacement(models, model, _nobody)
    r.begin()
    _begin(r, slot)


async def _probation(r: Replacement, slot: Slot) -> None:
    """Watch, then judge. What has passed stays on probation until the disk has taken that: a start
    before it would bring the version before back."""
    model = r.model
    try:
        while not await _judged(r, slot):
            await asyncio.sleep(DISK_AGAIN_S)
    except ApiError as error:
        r.models.hub.publish("probation.failed", model=model.name, text=error.message)
    finally:
        if model.probation is asyncio.current_task():
            model.probation, model.not_kept = None, ""


async def _judged(r: Replacement, slot: Slot) -> bool:
    """Whether a probation is over; nobody else changes the model while it is judged."""
    models, model = r.models, r.model
    fault = await watch_probation(r, slot)
    while model.busy:
        await asyncio.sleep(PROBATION_LOOK_S)
    with models.changing(model, "the end of a probation"):
        if fault:
            await roll_back(r, slot, fault)
            return True
        try:
            await keep(r, slot)
        except ApiError as error:
            if not model.not_kept:  # once; the status goes on telling it
                models.hub.publish("probation.failed", model=model.name, text=error.message)
            model.not_kept = error.message
            return False
    return True


async def resume_trial(models: Models, name: str, digest: str) -> None:
    """At a start: a version that was on probation gets it again, with one try less.

    Where it does not even load, the good version does, and it is dropped at once.
    """
    model = models.add(name)
    try:
        await models.load(name, digest)
    except ApiError as error:
        r = Replacement(models, model, _nobody)
        r.begin()
        with models.changing(model, "a start"):
            trial = models.state.trial
            if trial is not None and trial.name == name:
                models.commit(end_trial(models.state, good=False))
            await models.mark_bad(name, digest, error.message[:200])
            models.hub.publish("probation.bad", model=name, digest=digest, text=error.message)
            await _load_good(r)


async def _nobody(event: dict[str, Any]) -> None:
    """Nobody listens."""


async def rollback(models: Models, model: Model, tell: Tell, job: Job) -> dict[str, Any]:
    """Back to the version before, at once where it is still warm."""
    with models.changing(model, "a rollback"):
        r = Replacement(models, model, tell, allow_layout_change=True, serial=True, job=job)
        r.begin("verify")
        await r.announce()
        good = models.store.versions(model.name).current
        warm = model.kept is not None or good not in (None, model.current and model.current.digest)
        if model.probation is not None and model.current is not None and warm:
            job.settle()
            await models.end_probation(model)
            await roll_back(r, model.current, "rolled back by hand")
            await r.phase("flip")
            digest = model.current.digest if model.current is not None else None
            return {"model": model.name, "digest": digest, "phases_ms": r.phases}
        previous = models.store.versions(model.name).previous
        if previous is None:
            raise _no_way_back(model)
        report = await replace(r, previous, None, probation=False)
        slot = model.current
        assert slot is not None
        try:
            await _take_as_good(r, slot)
        except ApiError as error:
            _keep_later(r, slot, error.message)
            report = {**report, "not_kept": error.message}
        return {"model": model.name, **report}


def _keep_later(r: Replacement, slot: Slot, why: str) -> None:
    """It serves and is good, and the disk took nothing: it is asked again, as after a probation."""
    r.model.not_kept = why
    r.models.hub.publish("probation.failed", model=r.model.name, text=why)
    _ends[slot] = Ends(r.models.clock(), 0)
    r.model.probation = asyncio.create_task(_probation(r, slot))


def _no_way_back(model: Model) -> ApiError:
    """A first version: another one takes its place, where its probation is over or was ended."""
    remedy = "gemctl model replace FILE"
    if model.probation is not None:
        remedy = f"gemctl model disable {model.name}, then {remedy} --name {model.name}"
    return ApiError("not_found", f"{model.name}: no version before this one; {remedy}")
