"""The throttle at work: sensors in, the controller of core/throttle.py, workers and clocks out.

A tick reads the sensors, asks the controller and carries out what changed; nothing here decides.
With an external sensor there are ten ticks a second, so that its reading is acted upon within
200 ms; else two, which is as often as the processor's own sensors are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gemctl import waiting
from gemctl.board import power as power_
from gemctl.board.powerd_client import PowerdClient
from gemctl.board.sensors import NO_ANSWER, Reading, Sensors
from gemctl.config import Config
from gemctl.core import predict
from gemctl.core import throttle as core
from gemctl.core.silicon import Curve, curve_of
from gemctl.errors import ApiError
from gemctl.events import EventHub
from gemctl.serve import artifact
from gemctl.serve.hot import Unloading
from gemctl.serve.models import Models, Pace
from gemctl.show.metrics import Metrics
from gemctl.store.state import Brief, State, ThrottleState, with_throttle

FAST_S, SLOW_S = 0.1, 0.5
ENERGY_S = 60.0  # window of the energy per token
TREND_MEMORY = 0.01  # weight of the newest time per token in the long mean
REST_S, LOAD_S = 60.0, 300.0  # of `calibrate thermal`
FIRST_LOOKS, FIRST_LOOK_S = 25, 0.02  # at the first value of an external sensor
BLIND = "no sensor and no threshold: nothing is watched"
KEEP_S = 120.0  # what is asked for a shorter while ends with the daemon: no flash is worn for it


class Throttle:
    """Runs for the daemon's life; `set` and `describe` are its methods for callers."""

    def __init__(
        self,
        config: Config,
        models: Models,
        hub: EventHub,
        metrics: Metrics,
        sensors: Sensors,
        power: power_.Power,
        powerd: PowerdClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.models = models
        self.hub = hub
        self.metrics = metrics
        self.sensors = sensors
        self.power = power
        self.powerd = powerd
        self.clock = clock
        self.unloading = Unloading(models)
        self.decision: core.Decision | None = None
        self.reading: power_.PowerReading | None = None
        self.tick_ms = 0.0
        self._brief = self._kept_brief()  # with its end, on our clock
        self._specs: tuple[str, ...] = tuple(config.sensors.external)
        self._state = core.start(self.settings())
        self._clusters = power_.clusters(config.sensors.sysfs_root)
        self._wake = asyncio.Event()
        self._faults: frozenset[str] = frozenset()
        self._cap: tuple[float | None, float | None] = (None, None)
        self._slow = False
        self._reasons: dict[str, str] = {}  # why a sensor gives no value
        self._energy: deque[tuple[float, float, int]] = deque()  # (time, joules, tokens)
        self._long_step: float | None = None
        self._known_curve: tuple[str, Curve] = ("", ())  # of which version
        self._tokens = 0  # made up to the last tick
        self.attached: Callable[[], bool] = lambda: False  # whether programs work elsewhere

    # ---- what is wanted ----

    def _kept_brief(self) -> tuple[ThrottleState, float] | None:
        """What was asked for a while before the daemon's start, if that is not over."""
        brief = self.models.state.brief
        left = brief.left(time.time()) if brief is not None else 0.0
        return (brief.policy, self.clock() + left) if brief is not None and left > 0 else None

    @property
    def wanted(self) -> ThrottleState:
        """What callers asked for; for a while something else, where that was asked for."""
        kept = self.models.state.throttle
        if self._brief is None or self.clock() >= self._brief[1]:
            return kept
        over = self._brief[0].model_dump(exclude_none=True)
        return kept.model_copy(update=over)

    @property
    def mode(self) -> str:
        return self.wanted.mode or self.config.throttle.mode

    def settings(self) -> core.Settings:
        """Configuration, artifact, board and the callers' last word."""
        wanted, fixed = self.wanted, self.config.throttle
        policy = self.models.thermal()
        chosen = (wanted.temp_c, fixed.temp_c, policy.threshold_c)
        return core.Settings(
            mode=wanted.mode or fixed.mode,
            temp_c=next((value for value in chosen if value is not None), None),
            hysteresis_c=fixed.hysteresis_c,
            horizon_s=fixed.horizon_s,
            hw_passive_c=self.sensors.trips().passive_c,
            continuous_c=policy.continuous_c,
            rtheta_c_per_w=fixed.rtheta_c_per_w,
            tau_s=fixed.tau_s,
            allow_unload=fixed.allow_unload,
        )

    def actuators(self) -> core.Actuators:
        """What this machine can do now: cores come and go."""
        cores = power_.online_cpus(self.config.sensors.sysfs_root) or range(os.cpu_count() or 1)
        threads = self.models.threads() or min(8, len(cores))
        fastest = self._clusters[0] if self._clusters else None
        capped = self.powerd.present and fastest is not None
        return core.Actuators(
            threads=threads,
            freq_min_khz=fastest.hw_min_khz if capped and fastest else None,
            freq_max_khz=fastest.hw_max_khz if capped and fastest else None,
            clusters=tuple(cluster.name for cluster in self._clusters),
            curve=self._curve(),
        )

    def _curve(self) -> Curve:
        """Volts of the fastest cores, from the description in the active version's file."""
        slot = self.models.serving()
        digest = slot.digest if slot is not None else ""
        if slot is not None and self._known_curve[0] != digest:
            curve: Curve = ()
            cores = self._clusters[0].cores if self._clusters else ()
            with contextlib.suppress(ApiError):  # a damaged version: whoever runs it, says so
                curve = curve_of(artifact.board(slot.path)[1], cores)
            self._known_curve = digest, curve
        return self._known_curve[1] if slot is not None else ()

    def _volts(self) -> dict[str, Any]:
        """Where the volts behind a cap come from, and what the cap in force leaves of the dynamic
        power."""
        actuators, d = self.actuators(), self.decision
        cap = d.freq_cap_fraction if d is not None else None
        left = None
        if cap is not None and actuators.can_cap:
            left = round(actuators.silicon.dynamic_factor(cap), 3)
        return {"volts": "description" if actuators.curve else "assumed", "cap_power": left}

    async def set(
        self,
        mode: str | None,
        temp_c: float | None,
        duty: float | None,
        for_s: float | None,
        external: list[str] | None,
        reset: bool,
    ) -> dict[str, Any]:
        """Change the policy; it is kept over a restart. Raises ApiError.

        Where the disk takes nothing it holds all the same: heat does not wait for a disk.
        `not_kept` says why it would end with the daemon, until the disk takes it. What is asked for
        a while lies over what is kept; the next change takes it away. It outlasts a restart too,
        where it is asked for KEEP_S or longer.
        """
        given = {"mode": mode, "temp_c": temp_c, "duty": duty}
        changes: dict[str, Any] = {key: v for key, v in given.items() if v is not None}
        if external is not None:
            self.sensors.demand([spec for spec in external if spec not in self._specs])
            self.sensors.set_external([*self.config.sensors.external, *external])  # or ApiError
            self._take((*self.config.sensors.external, *external))
            changes["external"] = tuple(external)
        self._brief = None
        if for_s is not None:
            self._brief = (ThrottleState(**changes), self.clock() + for_s)
            self._keep_brief(self._brief[0], for_s)
        else:
            self._keep(changes, reset)
        if external:
            await self._first_values()
        await self.tick()
        self._wake.set()
        return self.describe()

    async def _first_values(self) -> None:
        """Give what is read in a thread the time for its first answer."""
        for _ in range(FIRST_LOOKS):
            if not any(reason == NO_ANSWER for _, reason in self.sensors.silent()):
                return
            await asyncio.sleep(FIRST_LOOK_S)

    def _keep_brief(self, policy: ThrottleState, for_s: float) -> None:
        """Write it down, or that the one before it is over."""
        until = round(time.time() + for_s, 3)
        brief = Brief(policy=policy, for_s=for_s, until=until) if for_s >= KEEP_S else None
        self._write(self.models.state.model_copy(update={"brief": brief}))

    def _keep(self, changes: dict[str, Any], reset: bool) -> None:
        state = self.models.state.model_copy(update={"brief": None})
        if reset:
            state = state.model_copy(update={"throttle": ThrottleState()})
        self._write(with_throttle(state, **changes))

    def _write(self, state: State) -> None:
        self.models.state = state
        with contextlib.suppress(ApiError):
            self.models.state_file.save(state, insist=True)

    def describe(self) -> dict[str, Any]:
        """What is wanted and what is done."""
        settings, d = self.settings(), self.decision
        return {
            "mode": settings.mode,
            "threshold_c": core.threshold(settings),
            "level": d.level if d else 0,
            "rung": core.LADDER[d.level].name if d else core.LADDER[0].name,
            "duty": self.models.pace.duty,
            "threads": d.threads if d else None,
            "cap": d.freq_cap_fraction if d else None,
            **self._volts(),
            "reason": d.reason if d else "",
            "temp_c": d.temp_c if d else None,
            "predicted_c": round(d.predicted_c, 2) if d and d.predicted_c is not None else None,
            "paused": d.paused if d else False,
            "faults": [[n, self._reasons.get(n, why)] for n, why in d.sensor_faults] if d else [],
            "powerd": self.powerd.present,
            "external": list(self.wanted.external or self.config.sensors.external),
            "external_notes": [
                f"{name}: {self._reasons[name]}; the throttle is careful until it gives a value"
                for name in self._specs
                if name in self._reasons
            ],
            "until": self._until(),
            "not_kept": self.models.state_file.problem,
        }

    # ---- the loop ----

    async def run(self) -> None:
        """Tick until cancelled. A fault of one tick is told, and the next one comes."""
        await self.powerd.status()  # connect, where there is a helper
        try:
            while True:
                await self._next()
        finally:
            await self.unloading.close()

    async def _next(self) -> None:
        try:
            await self.tick()
        except Exception as error:  # the next tick has to come, whatever this one met
            self.hub.publish("throttle.fault", text=f"{type(error).__name__}: {error}")
        fast = bool(self.config.sensors.external or self.wanted.external)
        await waiting.ended(self._wake, FAST_S if fast else SLOW_S)
        self._wake.clear()

    async def tick(self) -> None:
        """Read, decide, act."""
        now = self.clock()
        self._use_external()
        readings = self._readings(now)
        self.reading = self.power.sample(now)
        inputs = core.Inputs(
            now_s=now,
            readings=[
                core.Reading(r.name, r.celsius, max(0.0, now - r.at_s), r.external)
                for r in readings
            ],
            power_w=self.reading.power_w,
            ambient_c=self.config.throttle.ambient_c,
            step_time_trend=self._trend(),
            busy=self._busy(),
        )
        before = self.decision
        in_force = self._in_force()
        self._state, decided = core.tick(self._state, inputs, self.actuators(), in_force)
        blind = in_force.mode == "off" != self.mode
        self.decision = dataclasses.replace(decided, reason=BLIND) if blind else decided
        self._reasons = {r.name: r.reason for r in readings if r.reason}
        well = frozenset(r.name for r in readings if r.celsius is not None and not r.reason)
        self._tell(before, self.decision, well)
        await self._act(self.decision)
        self.metrics.temperatures({r.name: r.celsius for r in readings})
        self.metrics.power(dict(self.reading.rails))
        self.metrics.throttle(self.decision.level, self.decision.duty, self.decision.threshold_c)
        self.tick_ms = (self.clock() - now) * 1e3

    def _until(self) -> float | None:
        """When what was asked for a while ends, in seconds since 1970."""
        left = self._brief[1] - self.clock() if self._brief is not None else 0.0
        return time.time() + left if left > 0 else None

    def _readings(self, now: float) -> list[Reading]:
        """All readings. Where the chip has no sensor of its own, the external ones take its place:
        then they are all that is known."""
        readings = self.sensors.sample(now)
        outside = [r for r in readings if r.external]
        if outside and not self.sensors.own:
            return [dataclasses.replace(r, external=False) for r in outside]
        return readings

    def _in_force(self) -> core.Settings:
        """The settings of a tick: without any sensor and without a threshold there is nothing to
        watch, and only the modes that slow down by themselves do."""
        settings = self.settings()
        blind = not self.sensors.any and core.threshold(settings) is None
        quiet = settings.mode in ("conservative", "silent")
        return dataclasses.replace(settings, mode="off") if blind and not quiet else settings

    def _use_external(self) -> None:
        """The sensors that are wanted now; those that were wanted for a while go with its end."""
        specs = (*self.config.sensors.external, *(self.wanted.external or ()))
        if specs != self._specs:
            with contextlib.suppress(ApiError):
                self.sensors.set_external(specs)
            self._take(specs)

    def _take(self, specs: tuple[str, ...]) -> None:
        """Other external sensors: those that were taken away on purpose have no fault."""
        self._faults -= frozenset(self._specs) - frozenset(specs)
        self._specs = specs

    def _trend(self) -> float | None:
        """Growth of the time per token over its long mean, while nothing of ours slows it."""
        step = self.models.step_ms()
        if step is None or self.models.pace != Pace():
            return None
        before = self._long_step
        self._long_step = step if before is None else before + TREND_MEMORY * (step - before)
        return step / self._long_step - 1.0

    def _busy(self) -> bool | None:
        """Whether there is work now, or was since the last tick; None: programs that attached have
        requests of their own."""
        before, self._tokens = self._tokens, self.models.tokens()
        if self.models.working() or self._tokens != before:
            return True
        return None if self.attached() else False

    def _tell(self, before: core.Decision | None, now: core.Decision, well: frozenset[str]) -> None:
        """Events of a tick. A sensor whose fault is gone because it is gone is not well."""
        faults = frozenset(name for name, _ in now.sensor_faults)
        for name, why in now.sensor_faults:
            if name not in self._faults:
                reason = self._reasons.get(name, why)
                self.hub.publish("sensor.fault", sensor=name, reason=reason)
        for name in (self._faults - faults) & well:
            self.hub.publish("sensor.ok", sensor=name)
        self._faults = faults | (self._faults - well)
        changed = before is None or before.level != now.level
        if changed and not (before is None and now.level == 0):
            self.hub.publish(
                "throttle.level",
                level=now.level,
                rung=core.LADDER[now.level].name,
                duty=round(now.duty, 3),
                reason=now.reason,
                temp_c=now.temp_c,
            )

    # ---- acting ----

    async def _act(self, d: core.Decision) -> None:
        opened = self.models.threads()
        most = self.wanted.duty or 1.0  # the operator's limit holds at once; heat's is slewed
        pace = Pace(
            min(round(d.duty, 3), most),
            0 if not opened or d.threads >= opened else d.threads,
            min(round(d.prefill_duty, 3), most),
            0 if not opened or d.prefill_threads >= opened else d.prefill_threads,
        )
        if pace != self.models.pace:
            await self.models.set_pace(pace)
        self.models.shed(
            paused=d.paused,
            least_class=1 if d.reject_low_priority else None,
            max_new_tokens=d.max_new_tokens,
        )
        self._place(d.cluster)
        await self._clock(d)
        self.unloading.tick(d.unload)

    def _place(self, cluster: str | None) -> None:
        """Move the workers' threads to a cluster's cores, or let them run everywhere again."""
        found = next((c for c in self._clusters if c.name == cluster), None)
        if (found is not None) == self._slow and not self._slow:
            return
        self._slow = found is not None
        everywhere = power_.online_cpus(self.config.sensors.sysfs_root)
        cores = found.cores if found is not None else everywhere
        for pid in self.models.pids():
            for task in _tasks_of(pid):
                with contextlib.suppress(OSError, ValueError):
                    os.sched_setaffinity(task, cores)

    async def _clock(self, d: core.Decision) -> None:
        """Cap the clock, milder while a prompt is read where the mode allows that."""
        prefilling = self.models.prefilling()
        fraction = d.prefill_cap_fraction if prefilling else d.freq_cap_fraction
        fastest = self._clusters[0] if self._clusters else None
        wanted = (fraction, None)
        if wanted == self._cap or fastest is None or fastest.hw_max_khz is None:
            return
        try:
            if fraction is None:
                await self.powerd.restore()
            else:
                await self._cap_all(fraction)
            self._cap = wanted
        except ApiError as error:
            self.hub.publish("powerd.refused", text=error.message)
            self._cap = wanted

    async def _cap_all(self, fraction: float) -> None:
        """The same share of every cluster's own clock."""
        for number, cluster in enumerate(self._clusters):
            policy = cluster.name.removeprefix("policy")
            if cluster.hw_max_khz is not None and policy.isdigit():
                await self.powerd.cap_cpu(round(cluster.hw_max_khz * fraction), int(policy))
            elif number == 0 and cluster.hw_max_khz is not None:
                await self.powerd.cap_cpu(round(cluster.hw_max_khz * fraction))

    def phase_changed(self) -> None:
        """A prompt begins or has been read: the clock's cap may differ."""
        d = self.decision
        if d is not None and d.prefill_cap_fraction != d.freq_cap_fraction:
            self._wake.set()

    # ---- figures ----

    def energy_per_token(self) -> float | None:
        """Joules a token over the last minute; None where power or tokens are not known."""
        joules = self.reading.energy_j if self.reading is not None else None
        if joules is None:
            return None
        now, tokens = self.clock(), self.models.tokens()
        self._energy.append((now, joules, tokens))
        while len(self._energy) > 2 and self._energy[0][0] < now - ENERGY_S:
            self._energy.popleft()
        _, first, count = self._energy[0]
        return (joules - first) / (tokens - count) if tokens > count else None

    async def calibrate(self, tell: Callable[[dict[str, Any]], Awaitable[None]]) -> dict[str, Any]:
        """Thermal resistance and time constant by a step test: a minute at rest, five at work.

        Raises ApiError where power or temperature is not known, or the test cannot tell.
        """
        reading = self.reading
        if reading is None or reading.power_w is None:
            what = "calibrate: no power rail is known, and its watts are the half of the test"
            raise ApiError("conflict", f"{what}; set throttle.rtheta_c_per_w and throttle.tau_s")
        samples: list[tuple[float, float, float]] = []
        started = self.clock()
        load = asyncio.create_task(self._load_after(REST_S))
        try:
            while (now := self.clock() - started) < REST_S + LOAD_S:
                d, reading = self.decision, self.reading
                if d is None or d.temp_c is None or reading is None or reading.power_w is None:
                    raise ApiError("failed", "calibrate: a sensor stopped; see gemctl doctor")
                samples.append((now, d.temp_c, reading.power_w))
                left = round(REST_S + LOAD_S - now)
                await tell({"left_s": left, "temp_c": d.temp_c, "power_w": reading.power_w})
                await asyncio.sleep(1.0)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
        try:
            fit = predict.fit_step_response(samples)
        except ValueError as error:
            raise ApiError("failed", f"calibrate: {error}") from None
        return {
            "rtheta_c_per_w": fit.rtheta_c_per_w,
            "tau_s": fit.tau_s,
            "samples": len(samples),
            "volts": self._volts()["volts"],
        }

    async def _load_after(self, rest_s: float) -> None:
        await asyncio.sleep(rest_s)
        while True:
            await self.models.burn()


def _tasks_of(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
