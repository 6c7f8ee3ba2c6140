"""Another version for a program that attached itself, which tries it, and is watched with it.

    stage, verify, prefault   as for the daemon's own models (replace.py)
    load, warmup, flip        by the program: opened beside its model in use, its test vectors
                              replayed, warmed up, exchanged between two requests
    probation                 so many of the program's own requests or so long without a fault:
                              then it is good, else the program goes back to the model before

A program that ends meanwhile opens its own file at its next start: then nobody knows whether the
version was good, and it may be handed over again.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

from gemctl import waiting
from gemctl.board import machine
from gemctl.errors import ApiError
from gemctl.serve import artifact, hooks
from gemctl.serve.attached import Attached, real
from gemctl.serve.jobs import Job, reason_of
from gemctl.serve.models import DISK_AGAIN_S, Models
from gemctl.serve.phases import Procedure, Tell
from gemctl.serve.replace import (
    PROBATION_LOOK_S,
    check,
    check_stored,
    drop,
    drop_staged,
    how_long,
    stage,
)

UNKNOWN_END = ("timeout", "failed")  # nobody knows which model the program has open then


@dataclass
class Handover(Procedure):
    """One on its way."""

    models: Models
    program: Attached
    tell: Tell
    job: Job
    fresh: bool = False
    started: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)  # ms
    _since: float = 0.0

    @property
    def name(self) -> str:
        return self.program.name


@dataclass(eq=False)
class Trial:
    """A probation: `until` of the models' clock or so many answers, if no fault comes first."""

    digest: str
    until: float
    answers: int
    requests: int  # of the program, at its begin
    faults: int
    clock: Any  # of the models
    fault: str = ""  # known before it began
    task: asyncio.Task[None] | None = None

    def left(self, program: Attached) -> tuple[float, int]:
        """Seconds and answers until it is over."""
        given = program.requests - self.requests
        return round(max(0.0, self.until - self.clock()), 1), max(0, self.answers - given)


async def replace(
    h: Handover, digest: str | None, prompt: str | None, allow_layout_change: bool
) -> dict[str, Any]:
    """By the job's open file, or by a version of the store. Raises ApiError; the program then
    goes on with what it has."""
    models, program = h.models, h.program
    with models.changing(program, "a replacement"):
        h.begin("verify" if digest else "stage")
        await h.announce()
        if digest is None:
            await check(h, h.job.descriptor)
        if program.trial is not None:
            raise _on_probation(program)
        if digest is None:
            digest = await stage(h, h.job.descriptor)
        if program.digest == digest and program.enabled:
            models.store.release(program.name, digest)
            return _report(h, "none", digest, already=True)
        report = await _hand_over(h, digest, prompt, allow_layout_change)
        begin_probation(models, program, digest)
    return report


async def _hand_over(
    h: Handover, digest: str, prompt: str | None, allow_layout_change: bool
) -> dict[str, Any]:
    try:
        check_stored(h.models, h.name, digest)
        await _prepare(h, digest)
        h.job.settle()  # the program does the rest, whoever listens
        await _open(h, digest, prompt, allow_layout_change)
    except BaseException as error:
        if not (isinstance(error, ApiError) and error.code in UNKNOWN_END and h.job.settled):
            await drop(h, digest, error)
        text = reason_of(error)
        h.models.hub.publish("replace.failed", model=h.name, digest=digest[:12], text=text)
        raise
    report = _report(h, "attached", digest)
    h.program.swap = report
    h.models.hub.publish("replace.done", model=h.name, **report)
    await h.program.look()
    return report


async def _prepare(h: Handover, digest: str) -> None:
    """Verify it, and read it into the page cache, which is the program's too."""
    models = h.models
    path, config = models.store.path(h.name, digest), models.config
    found = await artifact.inspect(h.name, path, config.models, config.sensors.sysfs_root)
    told = {"signature": found.signature, "warnings": list(found.warnings)}
    await h.phase("verify", "prefault", **told)
    rate = config.models.prefault_mbps
    await waiting.in_thread(machine.prefault, path, rate, lambda: False, h.halted)
    await h.phase("prefault", "hand over")


async def _open(h: Handover, digest: str, prompt: str | None, allow_layout_change: bool) -> None:
    """The program's part of it, whose times it tells."""
    store, text = h.models.store, h.models.config.models.warmup_prompt if prompt is None else prompt
    file = store.open(h.name, digest)
    try:
        told = await h.program.open(
            file, store.path(h.name, digest), digest, text, allow_layout_change
        )
    finally:
        os.close(file)
    open_ms, test_ms, warmup_ms, flip_ms = (
        real(told, key) or 0.0 for key in ("open_ms", "test_ms", "warmup_ms", "flip_ms")
    )
    await h.note("load", open_ms)
    tests = told.get("tests")
    times = {"test_ms": round(test_ms, 3), "warmup_ms": round(warmup_ms, 3)}
    await h.note("warmup", test_ms + warmup_ms, tests=tests, **times)
    await h.note("flip", flip_ms)
    h.models.metrics.flip(h.name, flip_ms / 1e3)


def _report(h: Handover, strategy: str, digest: str, already: bool = False) -> dict[str, Any]:
    return {
        **({"already": True} if already else {}),
        "strategy": strategy,
        "phases_ms": dict(h.phases),
        "flip_ms": h.phases.get("flip", 0.0),
        "total_ms": h.total_ms(),
        "digest": digest,
    }


# ---- probation ----


def _on_probation(program: Attached) -> ApiError:
    """It ends by itself: who comes later is served."""
    what = f"{program.name}: another version is on probation"
    if program.not_kept:
        what = f"{program.name}: the version that serves is not kept yet: {program.not_kept}"
    elif program.trial is not None:
        what += how_long(*program.trial.left(program))
    how = f"wait for its end, or gemctl model rollback {program.name}"
    return ApiError("busy", f"{what}; {how}")


def begin_probation(
    models: Models, program: Attached, digest: str, fault: str = "", *, passed: bool = False
) -> None:
    """Watch a program with a version. `fault`: one that is known already; `passed`: only the disk
    has not taken that yet."""
    limits, clock = models.config.models, models.clock
    answers = max(limits.probation_requests, 1)
    counts = (program.requests, program.faults)
    until = clock() + (0 if passed else limits.probation_s)
    trial = Trial(digest, until, answers, *counts, clock, fault)
    program.trial = trial
    trial.task = asyncio.create_task(_probation(models, program, trial))


def resume(models: Models, program: Attached) -> None:
    """It has come back, to another daemon perhaps: a version of the store that was not judged is
    on probation, one that was found bad is taken back."""
    digest, found = program.digest, models.stored(program.name)
    if digest is None or program.trial is not None or digest == found.current:
        return
    if digest in found.good:  # what it went back to, where the disk had not taken that
        begin_probation(models, program, digest, passed=True)
    elif digest in {bad for bad, _ in found.bad}:
        begin_probation(models, program, digest, fault="was found bad before")
    elif digest in {version.digest for version in found.present}:
        begin_probation(models, program, digest)


async def _probation(models: Models, program: Attached, trial: Trial) -> None:
    """Watch, then judge. What has passed stays on probation until the disk has taken that."""
    try:
        fault = await _watched(models, program, trial)
        judged = False
        while not judged and not program.channel.closed.is_set():
            judged = await _judged(models, program, trial, fault)
            await asyncio.sleep(0 if judged else DISK_AGAIN_S)
        if not judged:
            text = f"{program.name} ended before its end; hand the version over again"
            models.hub.publish("probation.failed", model=program.name, text=text)
    finally:
        if program.trial is trial:
            program.trial, program.not_kept = None, ""


async def _watched(models: Models, program: Attached, trial: Trial) -> str:
    """Until enough answers or time without a fault, or a fault: which one, or nothing. While its
    model is disabled or the program does not answer no time passes."""
    seconds, answers = trial.left(program)
    while not trial.fault and seconds and answers and not program.channel.closed.is_set():
        if program.faults > trial.faults:
            return "its answers failed"
        await asyncio.sleep(PROBATION_LOOK_S)
        trial.until += 0.0 if program.enabled and not program.silent else PROBATION_LOOK_S
        seconds, answers = trial.left(program)
    return trial.fault or ("its answers failed" if program.faults > trial.faults else "")


async def _judged(models: Models, program: Attached, trial: Trial, fault: str) -> bool:
    """Whether it is over; nobody else changes the model while it is judged."""
    while program.busy:
        await asyncio.sleep(PROBATION_LOOK_S)
    with models.changing(program, "the end of a probation"):
        if fault:
            await roll_back(models, program, trial.digest, fault)
            return True
        try:
            await _keep(models, program.name, trial.digest)
        except ApiError as error:
            if not program.not_kept:  # once; the status goes on telling it
                text = error.message
                models.hub.publish("probation.failed", model=program.name, text=text)
            program.not_kept = error.message
            return False
    return True


async def _keep(models: Models, name: str, digest: str) -> None:
    await _take_as_good(models, name, digest)
    models.hub.publish("probation.good", model=name, digest=digest)
    await hooks.run(models.config.hooks, "good", name, digest, models.hub)


async def _take_as_good(models: Models, name: str, digest: str) -> None:
    await asyncio.to_thread(models.store.mark_good, name, digest)
    in_use, count = models.in_use(), models.config.models.keep
    await asyncio.to_thread(models.store.collect, in_use, count)


async def roll_back(models: Models, program: Attached, digest: str, why: str) -> None:
    """The program goes back to the model before; this version is never taken again."""
    name = program.name
    try:
        await _go_back(models, program, digest)
    except ApiError as error:
        why = f"{why}, and the program did not go back: {error.message}"
    await models.mark_bad(name, digest, why)
    await drop_staged(models, name, digest)
    models.hub.publish("probation.bad", model=name, digest=digest, text=why)
    await hooks.run(models.config.hooks, "bad", name, digest, models.hub)


async def _go_back(models: Models, program: Attached, digest: str) -> None:
    """By itself, or else with the store's good version."""
    try:
        await program.back()
    except ApiError:
        good = models.stored(program.name).current
        if good in (None, digest) or program.channel.closed.is_set():
            raise
        await _open(_nobodys(models, program), str(good), None, allow_layout_change=True)
        await program.look()


def _nobodys(models: Models, program: Attached) -> Handover:
    """One that nobody asked for."""

    async def tell(event: dict[str, Any]) -> None:
        """Nobody listens."""

    return Handover(models, program, tell, Job(program.name, "rollback"))


async def end_probation(program: Attached) -> None:
    """Stop watching; who calls it decides what becomes of the version."""
    trial, program.trial, program.not_kept = program.trial, None, ""
    if trial is not None and trial.task is not None:
        trial.task.cancel()
        await asyncio.gather(trial.task, return_exceptions=True)


async def rollback(h: Handover) -> dict[str, Any]:
    """Back to the version before, asked for by hand."""
    models, program = h.models, h.program
    with models.changing(program, "a rollback"):
        h.begin("verify")
        await h.announce()
        if program.trial is not None:
            digest = program.trial.digest
            h.job.settle()
            await end_probation(program)
            await roll_back(models, program, digest, "rolled back by hand")
            await h.phase("flip")
            return {"model": h.name, "digest": program.digest, "phases_ms": h.phases}
        found = models.stored(h.name)
        if program.digest is not None and program.digest == found.current and found.previous:
            report = await _hand_over(h, found.previous, None, allow_layout_change=True)
            try:
                await _take_as_good(models, h.name, found.previous)
            except ApiError as error:
                begin_probation(models, program, found.previous, passed=True)
                report = {**report, "not_kept": error.message}
            return {"model": h.name, **report}
        if not program.way_back:
            raise _no_way_back(program)
        h.job.settle()
        await program.back()
        await h.phase("flip")
    return {"model": h.name, "digest": program.digest, "phases_ms": h.phases}


def _no_way_back(program: Attached) -> ApiError:
    how = f"gemctl model replace FILE --name {program.name}"
    return ApiError("not_found", f"{program.name}: no version before this one; {how}")
