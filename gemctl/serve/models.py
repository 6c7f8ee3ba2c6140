"""The models of this device: what is loaded, who answers, and what happens when a worker ends.

One writer: everything here runs on the daemon's event loop, and every change of a slot's state goes
through `Slot.move`, which asks the table first and tells everybody afterwards. A model has a slot
that serves, and beside it at most one that comes (replace.py) and one that is kept for a rollback.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from gemctl import waiting
from gemctl.board import machine
from gemctl.config import Config
from gemctl.core import policy, slots
from gemctl.errors import BY_CALLER, ApiError
from gemctl.events import EventHub
from gemctl.serve import artifact, jobs
from gemctl.serve.attached import Attached
from gemctl.serve.jobs import Job, reason_of
from gemctl.serve.pacing import Pacing
from gemctl.serve.slot import UNAVAILABLE, Model, Pace, Slot, found_bad, unavailable
from gemctl.serve.turns import Turns
from gemctl.serve.worker import Worker
from gemctl.show.history import History
from gemctl.show.metrics import Metrics
from gemctl.store.state import PROGRAMS_MOST, State, StateFile, with_model, without_model
from gemctl.store.store import Store, Versions, check_name

__all__ = ["Model", "Models", "Pace"]
OVERTIME_S = 10.0  # an engine that has not ended so long after a deadline never will
DISK_AGAIN_S = 2.0  # until a disk that took no mark of a version is asked again
RETRIES = 1  # of a request whose worker ended under it
R = TypeVar("R")


class Models:
    """All models. Made once; `stop` ends every worker."""

    def __init__(
        self,
        config: Config,
        store: Store,
        state: StateFile,
        hub: EventHub,
        history: History,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.store = store
        self.state_file = state
        self.hub = hub
        self.history = history
        self.metrics = metrics
        self.clock = clock
        self.on_trial: Callable[[Model, Slot], None] = lambda model, slot: None
        self.on_phase: Callable[[], None] = lambda: None  # a prompt begins, or has been read
        self.models: dict[str, Model] = {}
        self.pacing = Pacing(self.models, clock)
        self.programs: dict[str, Attached] = {}  # that attached themselves, by their names
        self.on_attached: Callable[[Attached], None] = lambda _program: None
        self.max_new_tokens: int | None = None
        found = state.load()
        self.state, self.state_warnings = found.state, found.warnings
        self.known = list(self.state.programs)  # names of programs that attached, the newest last
        self._later: set[asyncio.Task[None]] = set()  # marks that the disk has not taken yet
        self.jobs: dict[str, Job] = {}
        self.stopping = threading.Event()  # for what works in a thread

    # ---- names ----

    @property
    def active(self) -> str | None:
        """The model that answers when no name is given."""
        return self.state.active

    def model(self, name: str) -> Model:
        """A model by name, made where it has versions in the store. Raises not_found."""
        check_name(name)
        if name not in self.models:
            if not self.is_absent(name) and not self.store.versions(name).present:
                raise ApiError("not_found", f"{name}: no such model; see gemctl model list")
            self.add(name)
        return self.models[name]

    def program_came(self, name: str) -> None:
        """A program has attached: its name stays its own while it is away, over a restart too."""
        if name not in self.known:
            self.known = [*self.known, name][-PROGRAMS_MOST:]
            with contextlib.suppress(ApiError):  # until the next start then
                self.save(programs=tuple(self.known))

    def is_absent(self, name: str) -> bool:
        """The name of a program that is not attached now."""
        model = self.models.get(name)
        taken = name in self.programs or (model is not None and bool(model.slots()))
        return name in self.known and not taken

    def refuse_absent(self, name: str) -> None:
        """Nobody takes a program's name while it is away: it could not attach any more. Raises
        ApiError."""
        if self.is_absent(name):
            what = f"{name}: is the name of a program that is not attached now"
            remedy = f"start it and try again, or give its name free: gemctl model remove {name}"
            raise ApiError("conflict", f"{what}; {remedy}")

    def _program_forgotten(self, name: str) -> None:
        """Its name is free."""
        if name in self.known:
            left = tuple(one for one in self.known if one != name)
            self.save(programs=left)
            self.known = list(left)

    async def mark_bad(
        self, name: str, digest: str, why: str, then: Callable[[], None] = lambda: None
    ) -> None:
        """A version is never taken again. Where the disk does not take that it is told, and tried
        until it does; `then` belongs to it, and may raise ApiError too."""
        try:
            await asyncio.to_thread(self.store.mark_bad, name, digest, why)
            then()
        except ApiError as error:
            self.hub.publish("probation.failed", model=name, text=error.message)
            task = asyncio.create_task(self._mark_later(name, digest, why, then))
            self._later.add(task)
            task.add_done_callback(self._later.discard)

    async def _mark_later(self, name: str, digest: str, why: str, then: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(DISK_AGAIN_S)
            if digest not in {bad for bad, _ in self.stored(name).bad}:
                return  # forgiven, or removed, meanwhile
            with contextlib.suppress(ApiError):
                await asyncio.to_thread(self.store.mark_bad, name, digest, why)
                then()
                return

    def add(self, name: str) -> Model:
        """A model that may not have a version yet. Raises ApiError for what is no name."""
        check_name(name)
        if name not in self.models:
            turns = Turns(name, self.config.models.queue, self.clock)
            wanted = self.state.models.get(name)
            priority = wanted.priority if wanted is not None else 1
            self.models[name] = Model(name, turns, priority=priority)
        return self.models[name]

    def named(self, name: str | None) -> Model:
        """A model by name, or the active one."""
        chosen = name or self.active
        if chosen is None:
            raise ApiError("not_found", f"no model is active; name one, or {self._first_remedy()}")
        return self.model(chosen)

    def _first_remedy(self) -> str:
        """What to type so that a model answers where none is active."""
        theirs = {*self.programs, *self.known}
        names = [name for name in self.store.names() if name not in theirs]
        if not names and self.programs:
            some = ", ".join(list(self.programs)[:3])
            return f"name one of the attached programs: {some}"
        good = [name for name in names if self.loadable(name)]
        if good:
            return f"gemctl switch-model {good[0] if len(good) == 1 else 'NAME'}"
        staged = [name for name in names if self.untried(name)]
        return self.remedy(staged[0]) if staged else "gemctl model replace FILE"

    def loadable(self, name: str) -> bool:
        """Whether a load by name alone finds a version: a good one, or one on probation."""
        return self.on_trial_digest(name) is not None or self.stored(name).current is not None

    def on_trial_digest(self, name: str) -> str | None:
        """The version of a model whose probation is written down."""
        trial = self.state.trial
        return trial.digest if trial is not None and trial.name == name else None

    def stored(self, name: str) -> Versions:
        """What the store has of a model; nothing where it does not know the name."""
        try:
            return self.store.versions(name)
        except ApiError as error:
            if error.code != "not_found":
                raise
            return Versions(name, None, None, (), (), ())

    def untried(self, name: str) -> list[str]:
        """Versions that were staged and have not been tried."""
        found, model = self.stored(name), self.models.get(name)
        judged = {*found.good, *(digest for digest, _ in found.bad), self.on_trial_digest(name)}
        judged |= model.passed if model is not None else set()
        return [version.digest for version in found.present if version.digest not in judged]

    def remedy(self, name: str) -> str:
        """What to type so that a model without a good version gets one."""
        left = self.untried(name)
        if not left:
            return f"gemctl model replace FILE --name {name}"
        digest = left[0][:12] if len(left) == 1 else "DIGEST"
        return f"gemctl model replace --name {name} --digest {digest}"

    def save(self, **changes: Any) -> None:
        """Change the wanted state and keep it. Raises ApiError where the disk takes nothing."""
        self.commit(self.state.model_copy(update=changes))

    def commit(self, state: State, urgent: bool = False) -> None:
        """Write a wanted state, and only then act by it. Raises ApiError; nothing has changed then.

        On the event loop, a few milliseconds: two writers of one file would lose a change.
        """
        self.state_file.save(state, urgent=urgent)
        self.state = state

    def want(self, name: str, **changes: Any) -> None:
        """Change what is wanted of a model, and keep it."""
        self.commit(with_model(self.state, name, **changes))

    def forget(self, name: str) -> None:
        """Drop what was wanted of a model."""
        self.commit(without_model(self.state, name))

    @contextlib.contextmanager
    def _kept(self, name: str, done: str) -> Iterator[None]:
        """What has been done holds also where it cannot be written down: the error says so."""
        try:
            yield
        except ApiError as error:
            what = f"{name}: {done}, but only until the daemon's next start"
            raise ApiError(error.code, f"{what}: {error.message}") from None

    def loaded(self, name: str) -> None:
        """A model was loaded by hand: it is wanted from now on, and answers where none does."""
        with self._kept(name, "is loaded"):
            self.want(name, enabled=True)
            if self.active is None:
                self.save(active=name)

    async def procedure(self, job: Job, work: Coroutine[Any, Any, R]) -> R:
        """Carry out a job. Where who asked goes away it ends early, or, past its point of no
        return, goes on to its end. Raises ApiError, "cancelled" among them."""
        if self.stopping.is_set():
            work.close()
            job.close()
            raise jobs.stopped()
        job.task = task = asyncio.create_task(job.carry_out(work))
        self.jobs[job.number] = job
        task.add_done_callback(lambda _: self._job_ended(job, work))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # before its first step
                raise job.refusal() from None
            if not task.done() and not job.cancel(jobs.GONE):
                raise job.too_late() from None
            raise

    def _job_ended(self, job: Job, work: Coroutine[Any, Any, Any]) -> None:
        del self.jobs[job.number]
        work.close()  # where it never began
        job.close()
        if job.task is not None and not job.task.cancelled():
            job.task.exception()  # it was told to who asked, or nobody is there to be told

    def job_of(self, name: str) -> Job | None:
        """The job that changes a model now."""
        return next((job for job in self.jobs.values() if job.model == name), None)

    @contextlib.contextmanager
    def changing(self, model: Model | Attached, what: str) -> Iterator[None]:
        """One procedure at a time changes a model."""
        if model.busy:
            raise ApiError("busy", f"{model.name}: {model.busy} is under way; wait for its end")
        model.busy = what
        try:
            yield
        finally:
            model.busy = ""

    # ---- memory ----

    def all_slots(self) -> list[Slot]:
        """Of every model."""
        return [slot for model in self.models.values() for slot in model.slots()]

    def in_use(self) -> set[tuple[str, str]]:
        """Versions that must not be deleted, each a model's name and a digest: loaded, on
        probation, or wanted at the next start. Two models may have the same digest, each a copy of
        its own."""
        wanted = {(name, m.digest) for name, m in self.state.models.items() if m.digest}
        trial = self.state.trial
        held = {(slot.name, slot.digest) for slot in self.all_slots()}
        theirs = {(p.name, p.digest) for p in self.programs.values() if p.digest is not None}
        tried = {(trial.name, trial.digest)} if trial is not None else set()
        return held | wanted | theirs | tried

    def lost(self) -> list[Slot]:
        """Those with a worker that neither lives nor ends."""
        return [slot for slot in self.all_slots() if slot.worker is not None and slot.worker.lost]

    def held(self) -> list[policy.Held]:
        """What is loaded."""
        loaded = [s.held for s in self.all_slots() if s.loaded and s.declared is not None]
        return [dataclasses.replace(one, pinned=self.pinned(one.name)) for one in loaded]

    def pinned(self, name: str) -> bool:
        """Whether nobody may unload a model."""
        wanted = self.state.models.get(name)
        return wanted is not None and wanted.pinned

    def memory(self) -> policy.Memory:
        """Of the machine, with the operator's limit."""
        most = self.config.models.memory_most_bytes
        return machine.memory(self.config.sensors.sysfs_root, most)

    # ---- start and end of a worker ----

    def new_slot(self, name: str, digest: str) -> Slot:
        """A slot for a version of the store."""
        w = self.config.worker
        crashes = slots.Crashes(
            most=w.crashes, window_s=w.crash_window_s, first_s=w.backoff_s, most_s=w.backoff_most_s
        )
        return Slot(name, digest, self.store.path(name, digest), self.hub, crashes)

    async def start_worker(self, slot: Slot) -> None:
        """loading -> warming: spawn it. Raises ApiError."""
        worker = Worker(slot.name, slot.path, self.config.worker, self.clock)
        slot.worker = worker
        try:
            await worker.start()
        except BaseException:
            slot.worker = None
            await worker.stop(grace_s=0)
            raise
        slot.move("loaded", "worker is ready")
        if slot.watch is None:
            slot.watch = asyncio.create_task(self._watch(slot))

    async def stop_worker(self, slot: Slot) -> None:
        """End its worker, whatever it does; the memory is free when this returns."""
        watch, slot.watch = slot.watch, None
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()  # first: it may be starting a worker again
            await asyncio.gather(watch, return_exceptions=True)
        worker, slot.worker = slot.worker, None
        if worker is not None:
            await worker.stop()

    async def warm(self, slot: Slot, prompt: str, tests: bool) -> dict[str, Any]:
        """warming -> standby: the stored tests and a prompt; how long each took, in ms.

        Both keep the throttle's pace, and follow it where it changes: they heat as much as
        requests do, whether a load, an enable, a restart or a replacement asks for them. None
        waits for ever: heat never takes all of the time, and what they work has a limit.
        """
        worker = slot.worker
        if worker is None:
            raise ApiError("failed", f"{slot.name}: its worker is gone; try again")
        slot.told = self.pace
        await worker.pace(**vars(slot.told))
        times: dict[str, Any] = {}
        most_s = self.config.worker.start_timeout_s
        if tests:
            started = self.clock()
            times["tests"] = await worker.test(most_s)
            times["test_ms"] = (self.clock() - started) * 1e3
        if prompt:
            started = self.clock()
            await worker.warm_up(prompt, most_s)
            times["warmup_ms"] = (self.clock() - started) * 1e3
        slot.move("warmed", "warm-up passed")
        return times

    async def _watch(self, slot: Slot) -> None:
        """For a slot's life: a worker that ends by itself is started again, or given up."""
        while slot.worker is not None:
            worker = slot.worker
            await worker.ended.wait()
            if worker.stopping or slot.worker is not worker:
                return
            slot.worker = None
            what = worker.epitaph()
            self.hub.publish(
                "worker.exit",
                model=slot.name,
                digest=slot.digest[:12],
                code=worker.exit_code,
                text=what,
            )
            slot.crashes = slot.crashes.add(self.clock())
            if self.models[slot.name].candidate is slot:
                return  # its replacement fails, and cleans up
            await self._restart(slot, what)

    async def _restart(self, slot: Slot, why: str) -> None:
        """Until it serves as before, or was given up. Nobody who waits is turned away meanwhile."""
        served = slot.state == "serving"
        if served:
            self.models[slot.name].turns.serve(None)
        slot.move("crash", why)
        while slot.state == "loading":
            if slot.crashes.is_faulted(self.clock()):
                slot.move("give_up", f"{len(slot.crashes.times_s)} crashes")
                self.give_up(slot)
                return
            await asyncio.sleep(slot.crashes.next_delay(self.clock()))
            slot.move("restart", "after a crash")
            self.hub.publish("worker.restart", model=slot.name, digest=slot.digest[:12])
            self.metrics.worker_restart(slot.name)
            try:
                await self.start_worker(slot)
                await self.warm(slot, self.config.models.warmup_prompt, tests=False)
            except Exception as error:  # whatever it was: the next attempt, or the end of them
                worker, slot.worker = slot.worker, None
                if worker is not None:
                    await worker.stop(grace_s=0)
                slot.crashes = slot.crashes.add(self.clock())
                with contextlib.suppress(ApiError):  # out of warming; in loading it is already
                    slot.move("crash", str(error))
        if served and slot.state == "standby" and self.models[slot.name].current is slot:
            self.activate(slot, "back after a crash")

    def give_up(self, slot: Slot) -> None:
        """A slot is faulted: nobody waits for it any longer."""
        model = self.models[slot.name]
        if model.current is slot:
            model.turns.serve(None)
            model.turns.fail(unavailable(slot.name, "faulted"))
        self.hub.publish("slot.faulted", model=slot.name, digest=slot.digest[:12])

    def activate(self, slot: Slot, cause: str) -> None:
        """standby -> serving: requests go there from now on. This is the flip."""
        slot.move("activate", cause)
        self.models[slot.name].turns.serve(slot)
        self.metrics.model_info(slot.name, slot.digest)

    # ---- verbs ----

    async def load(self, name: str, digest: str | None = None, prompt: str | None = None) -> Model:
        """Load a model's version and let it answer to its name. A loaded one is left alone."""
        model = self.model(name)
        with self.changing(model, "a load"):
            if model.current is None or model.current.state == "empty":
                await self._load(model, digest, prompt)
            elif digest not in (None, model.current.digest):
                raise ApiError(
                    "conflict",
                    f"{name}: another version serves; gemctl model replace --name {name} "
                    f"--digest {str(digest)[:12]}",
                )
            elif model.current.state == "standby":
                self.activate(model.current, "load")
            elif model.current.state != "serving":
                raise unavailable(name, model.current.state)
        return model

    async def _load(self, model: Model, digest: str | None, prompt: str | None) -> None:
        versions, on_trial = self.store.versions(model.name), self.on_trial_digest(model.name)
        wanted = digest or on_trial or versions.current
        if wanted is None:
            untried = self.untried(model.name)
            what = "no version of it has been tried" if untried else "no good version"
            raise ApiError("not_found", f"{model.name}: {what}; {self.remedy(model.name)}")
        if wanted in {bad for bad, _ in versions.bad}:
            raise found_bad(model.name, wanted)
        proven = wanted in versions.good
        if not proven and wanted not in (on_trial, *model.passed):
            raise ApiError(
                "refused",
                f"{model.name}: {wanted[:12]} has not been tried; gemctl model replace --name "
                f"{model.name} --digest {wanted[:12]}",
            )
        slot = await self.serve(model, wanted, "load", prompt)
        if not proven:
            self.on_trial(model, slot)

    async def serve(
        self,
        model: Model,
        digest: str,
        cause: str,
        prompt: str | None = None,
        *,
        admit: bool = True,
    ) -> Slot:
        """empty -> serving, for a version of the store that was tried before.

        Without `admit` its memory is not asked for: it had it a moment ago. Raises ApiError; the
        model is then empty.
        """
        slot = self.new_slot(model.name, digest)
        slot.declared, slot.thermal = artifact.declared(slot.path), artifact.thermal(slot.path)
        slot.move("load", cause)
        if admit:
            await self.admit(slot)
        slot.move("verified", "header read")
        model.current = slot
        try:
            await self.start_worker(slot)
            text = self.config.models.warmup_prompt if prompt is None else prompt
            await self.warm(slot, text, tests=False)
        except BaseException as error:
            model.current = None
            await self.stop_worker(slot)
            with contextlib.suppress(ApiError):
                slot.move("fail", reason_of(error))
            raise
        self.activate(slot, cause)
        return slot

    async def admit(self, slot: Slot) -> None:
        """Refuse what does not fit beside what is loaded. Raises ApiError("no_memory")."""
        answer = policy.admit(self.memory(), self.held(), slot.held)
        if not answer.fits:
            raise ApiError("no_memory", answer.sentence)

    async def unload(self, name: str) -> None:
        """Drain a model and free its memory; it stays in the store."""
        model = self.model(name)
        if self.pinned(name):
            raise ApiError("conflict", f"{name}: is pinned; gemctl model pin {name} --off first")
        with self.changing(model, "an unload"):
            await self.end_probation(model)
            await self.retire(model, "unload")
            model.turns.fail(ApiError("cancelled", f"{name}: was unloaded; load it again"))
        with self._kept(name, "is unloaded"):
            if self.active == name:
                self.save(active=None)
            self.want(name, enabled=False)

    async def end_probation(self, model: Model) -> None:
        """Stop watching a version; who calls it decides what becomes of it."""
        if model.probation is not None:
            model.probation.cancel()
            await asyncio.gather(model.probation, return_exceptions=True)
            model.probation = None

    async def retire(self, model: Model, cause: str) -> None:
        """End every slot of a model: no new turns, those in flight end or are cut off."""
        model.turns.serve(None)
        for slot in model.slots():
            await self.drain(slot, cause)
        model.current = model.candidate = model.kept = None
        self.metrics.unloaded(model.name)

    async def drain(self, slot: Slot, cause: str) -> float:
        """Wait for what is in flight, then end the worker; seconds that it took."""
        started = self.clock()
        if slot.state in ("serving", "standby"):
            slot.move("drain", cause)
        await waiting.ended(slot.idle, self.config.models.drain_s)
        await self.stop_worker(slot)
        if slot.state == "draining":
            slot.move("drained", cause)
        elif slot.state in ("staging", "verifying", "loading", "warming", "standby"):
            slot.move("unload", cause)
        return self.clock() - started

    async def disable(self, name: str | None) -> dict[str, Any]:
        """Free a model's memory until it is enabled, also over a restart."""
        model = self.named(name)
        with self.changing(model, "a disable"):
            await self.end_probation(model)
            started = self.clock()
            freed = sum(held.size for held in self.held() if held.name == model.name)
            digest = model.current.digest if model.current is not None else None
            thermal = model.current.thermal if model.current is not None else None
            await self.retire(model, "disable")
            if digest is not None:
                slot = self.new_slot(model.name, digest)
                slot.thermal = thermal or slot.thermal
                slot.move("disable", "disable")
                model.current = slot
            model.turns.fail(unavailable(model.name, "disabled"))  # nobody enables it by himself
            with self._kept(model.name, "is disabled"):
                self.want(model.name, enabled=False)
        return {"model": model.name, "freed_bytes": freed, "ms": (self.clock() - started) * 1e3}

    async def enable(self, name: str | None, prompt: str | None) -> dict[str, Any]:
        """Load a disabled model again and warm it up; how long it took, in ms."""
        model = self.named(name)
        started = self.clock()
        with self.changing(model, "an enable"):
            state = model.current.state if model.current is not None else "empty"
            digest = model.current.digest if model.current is not None else None
            if state == "serving":
                return {"model": model.name, "ms": 0.0}
            if state not in ("disabled", "empty"):
                raise unavailable(model.name, state)
            before, model.current = model.current, None
            try:
                await self._load(model, digest, prompt)
            except BaseException:
                model.current = model.current or before  # it stays disabled
                raise
            with self._kept(model.name, "is enabled"):
                self.want(model.name, enabled=True)
        return {"model": model.name, "ms": (self.clock() - started) * 1e3}

    async def switch(self, name: str) -> dict[str, Any]:
        """Let another model be the active one, loaded first where it is not. Times in ms."""
        started = self.clock()
        model = self.model(name)
        state = model.current.state if model.current is not None else "empty"
        resident = state == "serving"
        if state == "disabled":
            await self.enable(name, None)
        elif not resident:
            await self.load(name)
            self.want(name, enabled=True)
        before = self.active
        self.save(active=name)
        took = (self.clock() - started) * 1e3
        self.hub.publish("model.switched", model=name, before=before, ms=round(took, 3))
        return {"model": name, "before": before, "resident": resident, "ms": took}

    async def clear(self, name: str) -> None:
        """A faulted model may be loaded again, and its bad versions may be tried again."""
        bad = self.store.versions(name).bad if name in self.store.names() else ()
        model = self.models.get(name) if bad else self.model(name)  # a name may have no version
        slot = model.current if model is not None else None
        faulted = slot is not None and slot.state == "faulted"
        if not bad and not faulted:
            raise ApiError("conflict", f"{name}: no fault and no bad version; nothing to do")
        for digest, _ in bad:
            await asyncio.to_thread(self.store.forgive, name, digest)
        if model is not None and slot is not None and faulted:
            slot.move("clear", "clear")
            model.current = None

    async def remove(self, name: str, digest: str | None) -> None:
        """Delete a version that nobody uses, or a model that is not loaded, from the store."""
        model = self.model(name)
        with self.changing(model, "a removal"):
            if digest is not None:
                how = policy.unloading(name, self.pinned(name))
                await asyncio.to_thread(self.store.remove, name, digest, self.in_use(), how)
                return
            if any(slot.loaded for slot in model.slots()):
                remedy = policy.unloading(name, self.pinned(name))
                raise ApiError("conflict", f"{name}: is loaded; {remedy} first")
            if not self.is_absent(name) or name in self.store.names():
                await asyncio.to_thread(
                    self.store.forget, name
                )  # first: the state may need the room
            self._program_forgotten(name)
            self.models.pop(name, None)
            self.metrics.forget_model(name)
            if name in self.state.models or self.active == name:
                self.forget(name)

    def pin(self, name: str, pinned: bool) -> None:
        """A pinned model is never unloaded, by nobody."""
        self.model(name)
        self.want(name, pinned=pinned)

    @property
    def pace(self) -> Pace:
        """What the throttle allows."""
        return self.pacing.pace

    async def set_pace(self, pace: Pace) -> None:
        """Tell every worker, and the programs that attached."""
        self.pacing.pace = pace
        for program in self.programs.values():
            program.pace(pace)
        await self.pacing.tell_all()

    # ---- what the throttle asks and does ----

    def thermal(self) -> artifact.Thermal:
        """Policy of the active model's artifact, as far as one is loaded."""
        slot = self.serving()
        return slot.thermal if slot is not None else artifact.Thermal()

    def serving(self) -> Slot | None:
        """The current version of the active model."""
        model = self.models.get(self.active or "")
        return model.current if model is not None else None

    def _workers(self) -> list[Worker]:
        found = [slot.worker for slot in self.all_slots()]
        return [worker for worker in found if worker is not None and worker.alive]

    def threads(self) -> int:
        """Most threads that an engine was opened with; 0 without any."""
        facts = [w.facts for w in self._workers()] + [p.facts for p in self.programs.values()]
        return max((one.threads for one in facts if one is not None), default=0)

    def pids(self) -> list[int]:
        """Of the workers."""
        return [worker.pid for worker in self._workers()]

    def prefilling(self) -> bool:
        """Whether somebody waits for a first token."""
        return any(slot.prefilling for slot in self.all_slots())

    def working(self) -> bool:
        """Whether an answer is made, or a version is loaded and tried."""
        trying = ("staging", "verifying", "loading", "warming")
        return any(slot.busy or slot.state in trying for slot in self.all_slots())

    def step_ms(self) -> float | None:
        """Time per token of the active model, smoothed; else that of a program that attached."""
        model = self.models.get(self.active or "")
        theirs = (program.step_ms for program in self.programs.values())
        ours = model.figures.step_ms if model is not None else None
        return ours if ours is not None else next((ms for ms in theirs if ms is not None), None)

    def tokens(self) -> int:
        """Made since the start, by all models, those of programs that attached among them."""
        theirs = sum(program.tokens for program in self.programs.values())
        return theirs + sum(model.figures.tokens for model in self.models.values())

    def shed(self, paused: bool, least_class: int | None, max_new_tokens: int | None) -> None:
        """Turn work away: all of it, what is less urgent, or long answers."""
        self.max_new_tokens = max_new_tokens
        for model in self.models.values():
            model.turns.least_class = least_class
            if model.turns.paused != paused:
                model.turns.pause(paused)

    async def burn(self) -> None:
        """Work for a thermal calibration."""
        model = self.named(None)
        request = policy.Waiting("calibrate", self.clock(), model.priority, 2)
        fields = {"prompt": "1 2 3 4", "max_tokens": 64, "ignore_stop_ids": True}
        async for _ in self.generate(model, fields, request):
            pass

    # ---- requests ----

    async def generate(
        self, model: Model, fields: dict[str, Any], request: policy.Waiting, owner: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        """`token` events, then `done`. Raises ApiError. `owner`: who asks; with `reuse` the engine
        keeps the beginning of a prompt that the same owner left there, and nobody else's: the time
        of an answer would tell what others asked.

        A worker that ends under a request costs nothing but time: the same version gives the same
        tokens again, and those that were sent already are not sent twice.
        """
        if self._given_up(model):
            raise self._unavailable(model)
        sent = 0
        digest = ""
        for attempt in range(RETRIES + 1):
            async with model.turns.turn(request) as engine:
                assert isinstance(engine, Slot)
                if sent and engine.digest != digest:
                    raise ApiError(
                        "failed", f"{model.name}: replaced under this request; ask again"
                    )
                digest = engine.digest
                self.pacing.turns_changed()
                try:
                    async for event in self._run(engine, fields, sent, request.deadline_s, owner):
                        sent += event["event"] == "token"
                        yield event
                    return
                except ApiError as error:
                    if self.stopping.is_set():  # nothing is wrong with the model
                        raise jobs.stopped() from None
                    died = error.code == "failed" and not (engine.worker and engine.worker.alive)
                    engine.failures += error.code == "failed"  # the caller's mistakes are not its
                    if not died or attempt == RETRIES or self._given_up(model):
                        model.figures.failed += error.code not in BY_CALLER
                        self.metrics.request(model.name, error.code)
                        raise
                finally:
                    asyncio.get_running_loop().call_soon(self.pacing.turns_changed)

    def _unavailable(self, model: Model) -> ApiError:
        """Why a model that nobody loads does not answer, and what to type."""
        state = model.current.state if model.current is not None else "empty"
        if state == "empty" and not self.loadable(model.name) and self.untried(model.name):
            return ApiError("conflict", f"{model.name}: is not loaded; {self.remedy(model.name)}")
        return unavailable(model.name, state)

    def _given_up(self, model: Model) -> bool:
        """Whether nobody is about to load it: then nobody waits for it either."""
        state = model.current.state if model.current is not None else "empty"
        return not model.busy and state in UNAVAILABLE

    async def _run(
        self, slot: Slot, fields: dict[str, Any], skip: int, deadline_s: float | None, owner: str
    ) -> AsyncIterator[dict[str, Any]]:
        worker, reuse = slot.worker, bool(fields.get("reuse"))
        if worker is None:
            raise ApiError("failed", f"{slot.name}: its worker is gone; send the request again")
        if "messages" in fields and worker.facts is not None and not worker.facts.has_chat:
            what = f"{slot.name}: has no chat template"
            raise ApiError("bad_request", f"{what}; send a prompt: gemctl generate --raw")
        fields = {**fields, "reuse": reuse and worker.owner == owner}
        worker.owner = None  # what fails may leave in the cache what was there before
        if self.max_new_tokens is not None:
            most = min(fields.get("max_tokens", self.max_new_tokens), self.max_new_tokens)
            fields = {**fields, "max_tokens": most}
        left = None if deadline_s is None else max(0.001, deadline_s - self.clock())
        if left is not None:
            fields = {**fields, "deadline_ms": max(1, round(left * 1e3))}
        events = worker.generate(fields, None if left is None else left + OVERTIME_S)
        seen = 0
        slot.prefilling = True
        self.on_phase()
        try:
            async for event in events:
                if slot.prefilling:
                    slot.prefilling = False
                    self.on_phase()
                if event["event"] == "token":
                    seen += 1
                    if seen <= skip:
                        continue
                else:
                    worker.owner = owner if reuse else None
                    self._count(slot, event)
                yield event
        finally:
            slot.prefilling = False
            await events.aclose()  # type: ignore[attr-defined]

    def _count(self, slot: Slot, done: dict[str, Any]) -> None:
        figures = self.models[slot.name].figures
        figures.done += 1
        figures.tokens += done["generated_tokens"]
        figures.last = done
        slot.answers += 1
        slot.failures += done["nonfinite_errors"] > 0
        if done["decode_tps"]:
            step = 1e3 / done["decode_tps"]
            figures.step_ms = (
                step if figures.step_ms is None else 0.8 * figures.step_ms + 0.2 * step
            )
        self.history.ttft(self.clock(), done["ttft_ms"], slot.name)
        self.metrics.ttft(slot.name, done["ttft_ms"] / 1e3)
        self.metrics.tokens(slot.name, done["generated_tokens"])
        self.metrics.request(slot.name, "ok")
        self.metrics.kv_cache(slot.name, done["kv_used"], done["kv_size"])

    # ---- the end ----

    async def stop(self) -> None:
        """End every worker at once; requests in flight fail, and may be sent again."""
        self.stopping.set()
        for model in self.models.values():
            model.turns.serve(None)
            model.turns.close(jobs.stopped())
        under_way = list(self.jobs.values())
        for job in under_way:
            job.cut(jobs.ENDS)
        tasks = [job.task for job in under_way if job.task is not None]
        for later in self._later:
            later.cancel()
        await asyncio.gather(*tasks, *self._later, return_exceptions=True)
        for model in self.models.values():
            await self.end_probation(model)
            model.turns.serve(None)
            model.turns.close(jobs.stopped())
            for slot in model.slots():
                await self.stop_worker(slot)
