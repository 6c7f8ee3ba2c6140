"""gemctld: puts the parts together, starts what was wanted, and ends in order.

    gemctld [--config FILE]

One event loop owns everything. Nothing here imports the engine: workers are processes. Order of a
start: state and store, sockets, READY, then the models, so that a model that takes the board down
can still be told to stop before it is loaded at the next start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import os
import platform
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from gemctl import config as config_
from gemctl import mqtt, server, waiting
from gemctl.api import Api
from gemctl.board import power as power_
from gemctl.board.powerd_client import PowerdClient
from gemctl.board.sensors import Sensors
from gemctl.board.throttling import Throttle
from gemctl.core import slots
from gemctl.errors import ApiError
from gemctl.events import EventHub
from gemctl.mqtt.signed import SignedOnly
from gemctl.notify import given_socket, notify, watchdog_s
from gemctl.serve import artifact, handover, replace
from gemctl.serve.attached import Attached, share
from gemctl.serve.models import Model, Models
from gemctl.serve.slot import Slot, unavailable
from gemctl.serve.worker import find_program
from gemctl.service import Service
from gemctl.show import metrics as metrics_
from gemctl.show import render, web
from gemctl.show.history import History
from gemctl.store import lost as lost_
from gemctl.store import sign
from gemctl.store.durable import explained
from gemctl.store.state import Boot, Load, StateFile, give_back
from gemctl.store.store import Store, check_name

VERSION = "0.1.0"
LOG_KEPT = 500
EVERY_S = 1.0  # history, flash and watchdog
STOP_S = 10.0
GOODBYE_S = 2.0
DESCRIPTORS_SPARE = 16  # a replacement and a few connections
REFUSED_S, REFUSED_MOST = 10.0, 64  # a program that may not attach tries every two seconds
ROOM_LEAST, ROOM_GOOD = 1 << 20, 1 << 30  # bytes on the disk of the state folder


class Daemon:
    """The daemon's parts. `run` serves until `stop` is set."""

    def __init__(self, config: config_.Config, path: Path | None = None) -> None:
        self.config = config
        self.path = path
        self.stop = asyncio.Event()
        self.started = time.time()
        self.hub = EventHub()
        self.history = History()
        self.lines: deque[str] = deque(maxlen=LOG_KEPT)
        self.metrics = metrics_.Prometheus() if config.metrics.listen else metrics_.Metrics()
        with explained(config.daemon.state):
            config.daemon.state.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._lock = _lock(config.daemon.state)
        self.store = Store(config.daemon.state)
        self.state_file = StateFile(config.daemon.state)
        self.models = Models(
            config, self.store, self.state_file, self.hub, self.history, self.metrics
        )
        root = config.sensors.sysfs_root
        self.sensors = Sensors(
            root,
            config.sensors.zones,
            config.sensors.external,
            config.sensors.external_max_age_s,
            mqtt=bool(config.mqtt.host),
        )
        self.sensors.on_topics = self._retap
        self.power = power_.Power(root)
        self.powerd = PowerdClient(config.sensors.powerd_socket)
        self.throttle = Throttle(
            config, self.models, self.hub, self.metrics, self.sensors, self.power, self.powerd
        )
        self.models.on_trial = functools.partial(replace.begin_probation, self.models)
        self.models.on_phase = self.throttle.phase_changed
        self.api = Api(self)
        self.models.on_attached = functools.partial(handover.resume, self.models)
        self.throttle.attached = lambda: bool(self.models.programs)
        self.bridge: Any = None
        self.bridge_ended = asyncio.Event()
        self.warnings: list[str] = []
        self.refused: dict[str, tuple[float, str]] = {}  # programs: when and why, newest last
        self.place = str(config.daemon.socket)  # where it listens in fact
        self.activated = False  # its socket is systemd's
        self.reloading: asyncio.Future[None] | None = None
        self.lost = lost_.Lost(config.daemon.state)

    def log(self, line: str) -> None:
        """To stderr, where the journal takes it, and to the ring that a bundle holds."""
        self.lines.append(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {line}")
        print(f"gemctld: {line}", file=sys.stderr, flush=True)

    def warn(self, line: str) -> None:
        """A line that doctor repeats."""
        self.warnings.append(line)
        self.log(line)

    # ---- life ----

    async def run(self) -> None:
        """Serve until stopped. Raises ApiError where it cannot listen."""
        missing = not (self.config.daemon.state / "state.json").exists()
        boot = await asyncio.to_thread(self.state_file.boot)
        self.models.state = boot.state
        for line in dict.fromkeys((*self.models.state_warnings, *boot.warnings)):
            self.warn(line)
        await asyncio.to_thread(self._find_lost, missing)
        given = given_socket()
        self.activated = given is not None
        sock = server.listen(self.config.daemon) if given is None else given
        self.place = str(sock.getsockname())
        doors = server.Doors(self._may_attach, self.attach)
        front = server.Server(sock, self.config.daemon, self.api, doors)
        front.on_short = lambda error: self.log(error.message)
        jobs: list[Coroutine[Any, Any, None]] = [
            front.run(),
            self.throttle.run(),
            self._every_second(),
            self._follow(),
        ]
        extras: list[Coroutine[Any, Any, None]] = []  # the daemon goes on without them
        if self.config.metrics.listen:
            extras.append(
                web.serve(
                    self.config.metrics.listen,
                    self.api,
                    self.history,
                    self.hub,
                    self.metrics,
                    self.stop,
                )
            )
        if self.config.mqtt.host:
            extras.append(self._mqtt())
        tasks = [asyncio.create_task(self._guard(job)) for job in jobs]
        tasks += [asyncio.create_task(self._guard(job, optional=True)) for job in extras]
        notify("READY=1", "STATUS=listening")
        self.log(f"listens on {self.place}{', given by systemd' if self.activated else ''}")
        loading = asyncio.create_task(self._boot(boot))
        await self.stop.wait()
        notify("STOPPING=1")
        await self._end(front, [loading, *tasks])

    def _find_lost(self, missing: bool) -> None:
        """Tell of a state.json that was lost; the first start of all writes one."""
        folder, state = self.config.daemon.state, self.models.state
        self.lost = lost_.find(folder, self.store, state, missing)
        line = self.lost.sentence(state)
        if line:
            self.log(line)
        elif missing:
            with contextlib.suppress(ApiError):  # a disk that takes nothing is told elsewhere
                self.state_file.save(state)

    async def _guard(self, job: Coroutine[Any, Any, None], optional: bool = False) -> None:
        """A part that ends by itself is told, and the daemon with it: systemd starts it again."""
        try:
            await job
        except asyncio.CancelledError:
            raise
        except Exception as error:
            known = isinstance(error, ApiError)
            self.warn(str(error) if known else f"{type(error).__name__}: {error}")
        if not optional:
            self.stop.set()

    async def _end(self, front: server.Server, tasks: list[asyncio.Task[None]]) -> None:
        front.turn_away()
        with contextlib.suppress(TimeoutError, ApiError):
            await waiting.within(STOP_S, self.models.stop())
            self._give_back()
        self.hub.close()  # who follows events gets the number of the last one
        await front.goodbye()
        for program in list(self.models.programs.values()):
            await program.channel.close()
        if self.bridge is not None:  # it ends by itself: its last word is "offline"
            await waiting.ended(self.bridge_ended, GOODBYE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.powerd.close()
        with contextlib.suppress(ApiError):
            self.state_file.flush(force=True)
        self.sensors.close()
        self.state_file.close()
        self.store.close()
        if not self.activated:  # systemd's own stays: who comes now is answered by the next daemon
            with contextlib.suppress(OSError):
                self.config.daemon.socket.unlink()
        os.close(self._lock)  # last: from here on another daemon may make the same socket
        self.log("ended")

    def _give_back(self) -> None:
        """A version on probation has not taken this daemon down. Raises ApiError where the disk
        takes nothing: then the try is gone."""
        kept = give_back(self.models.state)
        if kept != self.models.state:
            self.models.commit(kept, urgent=True)

    async def _boot(self, boot: Boot) -> None:
        """Load what was wanted, the active model first."""
        if boot.dropped is not None:
            name, digest = boot.dropped.name, boot.dropped.digest
            self.warn(f"{name}: {digest[:12]} was on probation at too many starts; dropped")
            await self.models.mark_bad(name, digest, "not kept over several starts")
            self.hub.publish("probation.bad", model=name, digest=digest, text="boot loop")
        await asyncio.to_thread(self._tidy)
        for load in boot.loads:
            try:
                if load.trial and load.digest is not None:
                    await replace.resume_trial(self.models, load.name, load.digest)
                else:
                    await self._load(load)
            except ApiError as error:
                self.warn(f"{load.name}: was not loaded: {error.message}")
            except Exception as error:  # whatever is wrong with one, the others are loaded
                self.warn(f"{load.name}: was not loaded: {type(error).__name__}: {error}")
        self._place_disabled()

    async def _load(self, load: Load) -> None:
        """What was wanted; where it is gone or damaged, the good version before it, and a line
        that says so. Raises ApiError where none of them loads."""
        found = self.store.versions(load.name)
        wanted = load.digest or found.current
        present = {version.digest for version in found.present}
        why: ApiError | None = None
        for digest in dict.fromkeys((wanted, *found.good)):
            if digest not in present:
                continue
            try:
                await asyncio.to_thread(self.store.verify, load.name, digest)
                await self.models.load(load.name, digest)
            except ApiError as error:
                if error.code not in ("refused", "failed"):
                    raise
                why = why or error
                continue
            if digest != wanted:
                reason = why.message if why is not None else "its file is gone"
                what = f"{load.name}: {(wanted or '')[:12]} was not loaded: {reason}"
                self.warn(f"{what}; {digest[:12]} serves instead, stage the other one again")
            return
        if why is not None:
            raise why
        await self.models.load(load.name)  # which says what is missing

    def _tidy(self) -> None:
        """What was left half done goes; versions stay, staged ones too, until they are judged."""
        for name in self.store.names():
            found = self.store.versions(name)
            judged = {*found.good, *(digest for digest, _ in found.bad)}
            for version in found.present:
                if version.digest not in judged:
                    self.store.hold(name, version.digest)
        with contextlib.suppress(ApiError):
            self.store.collect(self.models.in_use(), self.config.models.keep)

    def _present(self, name: str, digest: str | None) -> str | None:
        """The wanted version if it is there, else the store's current one."""
        there = {v.digest for v in self.store.versions(name).present}
        return digest if digest in there else None

    def _place_disabled(self) -> None:
        """Models that were disabled are known as such."""
        for name, wanted in self.models.state.models.items():
            trial = self.models.state.trial
            tried = trial.digest if trial is not None and trial.name == name else None
            stored = name in self.store.names()
            current = self.store.versions(name).current if stored else None
            digest = self._present(name, tried or wanted.digest) or current if stored else None
            if wanted.enabled or digest is None:
                continue
            model = self.models.add(name)
            if model.current is None:
                slot = self.models.new_slot(name, digest)
                slot.move("disable", "disabled before the start")
                model.current = slot

    def _taps(self) -> dict[str, Callable[[bytes], None]]:
        """Topics of sensors, and who takes what comes."""
        return {topic: functools.partial(self.sensors.feed, topic) for topic in self.sensors.topics}

    def _retap(self) -> None:
        """Other sensors are named."""
        if self.bridge is not None:
            self.bridge.listen(self._taps())

    async def _mqtt(self) -> None:
        service: Service = self.api
        if self.config.mqtt.require_signed:
            service = SignedOnly(service, self.models, lambda n: self.attached_named(n) is not None)
        self.bridge = mqtt.make_bridge(self.config.mqtt, service, self.hub, taps=self._taps())
        try:
            await self.bridge.run(self.stop)
        finally:
            self.bridge_ended.set()

    async def _follow(self) -> None:
        """Every event is counted, and logged where a person will want to know of it."""
        with self.hub.follow() as events:
            async for event in events:
                self.metrics.event(event.kind)
                fields = " ".join(f"{key}={value}" for key, value in event.fields.items())
                self.lines.append(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {event.kind} {fields}")
                if event.kind in LOGGED:
                    print(f"gemctld: {event.kind} {fields}", file=sys.stderr, flush=True)

    async def _every_second(self) -> None:
        feed = watchdog_s()
        fed, told = time.monotonic(), "listening"
        while True:
            await asyncio.sleep(EVERY_S)
            now = time.monotonic()
            self._note(now)
            with contextlib.suppress(ApiError):
                self.state_file.flush()
            for model in self.models.models.values():
                self.metrics.queue_length(model.name, len(model.turns))
            if feed is not None and now - fed >= min(feed, 10.0) and not self.models.lost():
                notify("WATCHDOG=1")
                fed = now
            status = self.models.active or "no model"
            if status != told:
                notify(f"STATUS={status}")
                told = status

    def _note(self, now: float) -> None:
        d = self.throttle.decision
        model = self.models.models.get(self.models.active or "")
        last = model.figures.last if model is not None else {}
        reading = self.throttle.reading
        self.history.add(
            now,
            {
                "temp_c": d.temp_c if d else None,
                "predicted_c": d.predicted_c if d else None,
                "threshold_c": d.threshold_c if d else None,
                "throttle_level": float(d.level) if d else None,
                "duty": self.models.pace.duty,
                "throughput_tps": last.get("decode_tps") if model and model.current else None,
                "tokens": float(self.models.tokens()),
                "power_w": reading.power_w if reading else None,
                "queued": float(sum(len(m.turns) for m in self.models.models.values())),
            },
        )

    # ---- programs that attach ----

    def _may_attach(self, name: str) -> None:
        """As check_attach. The program tries again and again and prints nothing: who looks for it
        is told here, once by an event and by doctor as long as it tries."""
        try:
            self.check_attach(name)
        except ApiError as error:
            now, before = time.monotonic(), self.refused.pop(name[:64], (0.0, ""))
            if error.message != before[1] or now - before[0] > REFUSED_S:
                self.hub.publish("program.refused", name=name[:64], text=error.message)
            self.refused[name[:64]] = (now, error.message)
            while len(self.refused) > REFUSED_MOST:
                del self.refused[next(iter(self.refused))]
            raise
        self.refused.pop(name, None)

    def check_attach(self, name: str) -> None:
        """Whether a program may attach under a name. Raises ApiError: bad_request, conflict, busy.

        The first of a name stays: two of one name would push each other out for ever.
        """
        check_name(name)
        programs = self.models.programs
        first, model = programs.get(name), self.models.models.get(name)
        wanted = self.models.state.models.get(name)
        if (model is not None and (model.slots() or model.busy)) or (wanted and wanted.enabled):
            raise ApiError("conflict", f"attach: {name} is a model of the daemon; use another name")
        if first is not None and not first.channel.closed.is_set():
            reason = f"attach: {name} is attached (process {first.pid}); use another name"
            raise ApiError("conflict", reason)
        if len(programs) >= self.config.daemon.connections:
            reason = f"attach: {len(programs)} programs are attached; raise daemon.connections"
            raise ApiError("busy", reason)

    async def attach(self, name: str, pid: int, sock: socket.socket) -> None:
        """A program of ours is at the other end. Returns at once; the rest is a task."""
        try:
            self.check_attach(name)  # again: another one may have come meanwhile
        except ApiError:
            sock.close()
            return
        program = self.models.programs[name] = Attached(name, pid, self.models)
        self.models.models.pop(name, None)  # versions that were staged for it, and nothing else
        self.models.program_came(name)
        await program.channel.open(sock)
        program.task = asyncio.create_task(self._serve_program(program))

    async def _serve_program(self, program: Attached) -> None:
        try:
            await program.run(self.models.pace)
        except (ApiError, TimeoutError, asyncio.CancelledError) as error:
            self.log(f"{program.name}: attached program ended: {error or type(error).__name__}")
        finally:
            await program.channel.close()
            if self.models.programs.get(program.name) is program:
                del self.models.programs[program.name]
                self.metrics.forget_model(program.name)

    def attached_named(self, name: str | None) -> Attached | None:
        """A program by its name."""
        return self.models.programs.get(name or "")

    def attached_list(self) -> list[dict[str, Any]]:
        """For `model.list`."""
        return [program.brief() for program in self.models.programs.values()]

    # ---- what is told ----

    @property
    def auto_reset(self) -> int | None:
        """Of every model: the percentage in use from which on an answer empties its KV cache;
        None: none does."""
        config, state = self.config.models, self.models.state
        wanted, percent = state.auto_reset_kv_cache, state.auto_reset_percent
        if not (config.auto_reset_kv_cache if wanted is None else wanted):
            return None
        return config.auto_reset_percent if percent is None else percent

    def stats(self, name: str | None = None) -> dict[str, Any]:
        """`gemctl stats --json`: the order of the keys is part of the interface. Raises ApiError
        for a name that nobody has."""
        program = self.attached_named(name)
        mine = program.stats() if program is not None else self._stats_of(name)
        d, reading = self.throttle.decision, self.throttle.reading
        throttle = self.throttle.describe()
        return {
            **{key: mine.pop(key) for key in ("ttft_ms", "throughput_tps", "kv_cache_used")},
            "temp_c": d.temp_c if d else None,
            "v": 1,
            "ts": round(time.time(), 3),
            **{key: mine.pop(key) for key in ("model", "digest", "state")},
            "throttle": {
                key: throttle[key]
                for key in ("mode", "level", "duty", "reason", "threshold_c", "predicted_c")
            },
            "power_w": reading.power_w if reading else None,
            "energy_per_token_j": self.throttle.energy_per_token(),
            **mine,
        }

    def _stats_of(self, name: str | None) -> dict[str, Any]:
        """A model's part of `stats`; without a name that of the active one, and the requests of
        all."""
        model = self.models.models.get(self.models.active or "")
        model = self.models.model(name) if name is not None else model
        slot = model.current if model is not None else None
        last = model.figures.last if model is not None else {}
        facts = slot.worker.facts if slot is not None and slot.worker is not None else None
        p50, p95 = self.history.ttft_percentiles(time.monotonic(), name or self.models.active or "")
        used = 0 if last.get("reset") or facts is None else last.get("kv_used", 0)
        per_token = facts.ram_kv / facts.kv_size if facts is not None else 0.0
        asked = list(self.models.models.values()) if name is None else [model]
        return {
            "ttft_ms": last.get("ttft_ms"),
            "throughput_tps": last.get("decode_tps"),
            "kv_cache_used": used,
            "model": self.models.active if name is None else name,
            "digest": slot.digest if slot is not None else None,
            "state": model.state if model is not None else "empty",
            "requests": {
                "active": sum(slot.busy for m in asked if m for slot in m.slots()),
                "queued": sum(len(m.turns) for m in asked if m),
                "done": sum(m.figures.done for m in asked if m),
                "failed": sum(m.figures.failed for m in asked if m),
            },
            "swap": model.swap if model is not None else {},
            "kv_cache_size": facts.kv_size if facts is not None else None,
            "kv_cache_used_bytes": round(used * per_token),
            "kv_cache_hit_ratio": share(last.get("reused"), last.get("prompt_tokens")),
            "ttft_p50_ms": p50,
            "ttft_p95_ms": p95,
            "kv_auto_reset_percent": self.auto_reset,
        }

    def info(self) -> dict[str, Any]:
        """`daemon.info`."""
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "uptime_s": round(time.time() - self.started, 1),
            "config": str(self.path) if self.path else None,
            "socket": self.place,
            "state": str(self.config.daemon.state),
            "state_bytes_written": self.state_file.bytes_written,
            "rss_bytes": _rss(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "tick_ms": round(self.throttle.tick_ms, 3),
            "mqtt": self.bridge.info() if self.bridge is not None else None,
            "attached": sorted(self.models.programs),
        }

    def doctor(self) -> list[dict[str, Any]]:
        """Checks with a word (ok, warn, bad) and a sentence each."""
        checks = [_check("warn", "daemon", line) for line in self.warnings]
        if line := self.lost.sentence(self.models.state):
            checks.append(_check("bad", "state", line))
        since = time.monotonic() - REFUSED_S
        checks += [
            _check("warn", "attach", why) for when, why in self.refused.values() if when > since
        ]
        program = find_program(self.config.worker.program)
        checks.append(
            _check("ok", "worker", f"{program} is there")
            if program
            else _check(
                "bad", "worker", f"{self.config.worker.program}: not found; set worker.program"
            )
        )
        checks += [self._check_sensor(row) for row in self.sensors.states() if row["used"]]
        if not self.sensors.any:
            what = "none; name one with --external-temp-sensor, or gemctl throttle --mode off"
            checks.append(_check("warn", "sensors", what))
        rails = self.power.states()
        what = f"{len(rails)} rails" if rails else "no power rail; power_w stays unknown"
        checks.append(_check("ok" if rails else "warn", "power", what))
        checks += [
            _check("warn", found.name, found.sentence)
            for found in power_.findings(self.config.sensors.sysfs_root)
        ]
        helper = "connected" if self.powerd.present else "absent: pacing only, no clock caps"
        checks.append(_check("ok" if self.powerd.present else "warn", "gemctl-powerd", helper))
        checks.append(_check_store(self.config.daemon.state))
        checks += _check_descriptors()
        checks.append(self._check_memory())
        for one in self.models.programs.values():
            if one.silent:
                what = f"{one.name}: does not answer; continue or end its process {one.pid}"
                checks.append(_check("warn", "program", what))
        for name, model in self.models.models.items():
            if model.state == "faulted":
                checks.append(_check("bad", "model", unavailable(name, "faulted").message))
            checks += self._check_locked(model)
        if self.bridge is not None:
            info = self.bridge.info()
            what = "connected" if info["connected"] else str(info["reason"])
            what += render.refusals(info["commands"])
            checks.append(_check("ok" if info["connected"] else "warn", "mqtt", what))
        return checks + self._check_keys()

    def _wants_keys(self) -> bool:
        config = self.config
        by_command = bool(config.mqtt.host) and config.mqtt.require_signed
        return by_command or config.models.signature == "required"

    def _check_sensor(self, row: dict[str, Any]) -> dict[str, Any]:
        """A sensor that is written too seldom is told even while its value is fresh."""
        name, every, most = f"sensor {row['name']}", row.get("every_s"), self.sensors.fresh_s
        unknown = row["celsius"] is None or row["reason"]
        if unknown and not str(row["reason"]).startswith("old"):
            return _check("warn", name, f"{row['reason']}; the throttle is careful")
        if every is not None and every > most:
            what = (
                f"up to {every:.0f} s without a new value, and after {most:g} s it counts as none"
            )
            remedy = "let it be written once a second, also where it does not change"
            return _check("warn", name, f"{what}; {remedy}")
        return _check("ok", name, f"{row['celsius']} C")

    def _check_keys(self) -> list[dict[str, Any]]:
        """Without a key nothing is taken that has to be signed; what lies there and is no key is
        told wherever keys are used."""
        wanted = self._wants_keys()
        config = self.config.models
        if not wanted and (config.signature == "off" or not config.keys_dir.exists()):
            return []
        found = sign.load_keys(config.keys_dir)
        if found.warnings:
            return [_check("warn", "keys", "; ".join(found.warnings))]
        if not found.keys and not wanted:
            return []
        if not found.keys:
            required = config.signature == "required"
            rule = "models.signature is required" if required else "mqtt.require_signed is on"
            what = f"no .pub file in {found.folder}, and {rule}; put one there"
            return [_check("warn", "keys", what)]
        plural = "s" if len(found.keys) > 1 else ""
        return [_check("ok", "keys", f"{len(found.keys)} key{plural} in {found.folder}")]

    def _check_locked(self, model: Model) -> list[dict[str, Any]]:
        """Workers that were to lock their memory and could not."""
        if not self.config.worker.lock_memory:
            return []
        facts = [slot.worker.facts for slot in model.slots() if slot.worker is not None]
        short = [one for one in facts if one is not None and one.unlocked_bytes]
        remedy = "raise LimitMEMLOCK of the unit, or set worker.lock_memory to false"
        lines = [
            f"{model.name}: {one.unlocked_bytes >> 20} MiB are not locked; {remedy}"
            for one in short
        ]
        return [_check("warn", "memlock", line) for line in lines]

    def _check_memory(self) -> dict[str, Any]:
        try:
            memory = self.models.memory()
        except (OSError, ValueError, KeyError) as error:
            return _check("bad", "memory", f"not known: {error}; see sensors.sysfs_root")
        held = sum(model.size for model in self.models.held())
        what = f"{held >> 20} MiB of {memory.ceiling >> 20} MiB for models are taken"
        return _check("ok" if held <= memory.ceiling else "bad", "memory", what)

    def bundle(self) -> dict[str, Any]:
        """For support: everything but prompts, answers and passwords."""
        return {
            "info": self.info(),
            "stats": self.stats(),
            "throttle": self.throttle.describe(),
            "doctor": self.doctor(),
            "config": self.config.model_dump(mode="json"),
            "wanted": self.models.state.model_dump(mode="json"),
            "events": [event.as_dict() for event in self.hub.recent()],
            "history": self.history.query(3600, 10),
            "log": list(self.lines),
            "slots": slots.table_text().splitlines(),
            "artifacts": [self._artifact(slot) for slot in self.models.all_slots()],
        }

    def _artifact(self, slot: Slot) -> dict[str, Any]:
        """A version that is loaded: its engine, and the board description in its file."""
        facts = slot.worker.facts if slot.worker is not None else None
        row: dict[str, Any] = {"model": slot.name, "digest": slot.digest, "state": slot.state}
        row["engine"] = dataclasses.asdict(facts) if facts is not None else None
        try:
            row["hdf_sha256"], row["hdf"] = artifact.board(slot.path)
        except ApiError as error:
            row["problem"] = error.message
        return row

    async def reload(self) -> dict[str, Any]:
        """Read the configuration again; what needs a restart keeps its old value."""
        new = config_.load(self.path)
        kept = config_.restart_needed(self.config, new)
        merged = new.model_copy(update={t: getattr(self.config, t) for t in config_.FIXED})
        self.config = self.models.config = self.throttle.config = merged
        for model in self.models.models.values():
            model.turns.most = merged.models.queue
        self.hub.publish("config.reloaded", restart_needed=kept)
        return {"restart_needed": kept}


LOGGED = frozenset(
    {
        *("worker.exit", "worker.restart", "slot.faulted", "replace.done", "replace.failed"),
        *("throttle.unload", "program.refused"),
        *("probation.good", "probation.bad", "throttle.level", "sensor.fault", "sensor.ok"),
        *("mqtt.connected", "mqtt.lost", "audit", "config.reloaded", "hook", "model.switched"),
    }
)


def _lock(folder: Path) -> int:
    """A descriptor that holds the state folder. Raises ApiError where another daemon does."""
    with explained(folder):
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(place)
        reason = f"{folder}: another gemctld works here; stop it, or set daemon.state"
        raise ApiError("conflict", reason) from None
    return place


def _check(level: str, name: str, text: str) -> dict[str, Any]:
    return {"level": level, "name": name, "text": text}


def _check_store(folder: Path) -> dict[str, Any]:
    """Whether what changes can be kept, and whether there is room for another version."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    room = f"{free >> 20} MiB free in {folder}"
    if found.f_flag & os.ST_RDONLY:
        return _check("bad", "store", f"{folder} is read-only; mount it writable")
    if free < ROOM_LEAST:
        what = f"{room}: nothing can be kept over a restart; free room on its disk"
        return _check("bad", "store", what)
    return _check("ok" if free > ROOM_GOOD else "warn", "store", room)


def _check_descriptors() -> list[dict[str, Any]]:
    """A daemon that has hardly any left takes no connection and starts no worker."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        taken = sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:  # it needs one itself
        taken = limit
    if limit - taken >= DESCRIPTORS_SPARE:
        return []
    what = f"{min(taken, limit)} of {limit} are open; raise the daemon's limit of open files"
    return [_check("warn", "descriptors", f"{what} (LimitNOFILE)")]


def _rss() -> int:
    """Resident memory of this process, in bytes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


async def serve(config: config_.Config, path: Path | None) -> int:
    """Run a daemon until SIGTERM or SIGINT; its exit code."""
    loop = asyncio.get_running_loop()
    daemon = Daemon(config, path)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.stop.set)

    def reload() -> None:
        daemon.reloading = asyncio.ensure_future(_reload(daemon))

    loop.add_signal_handler(signal.SIGHUP, reload)
    await daemon.run()
    return 0


async def _reload(daemon: Daemon) -> None:
    try:
        await daemon.reload()
    except ApiError as error:
        daemon.log(f"{error.message} (the configuration stays as it was)")


def main() -> None:
    """The gemctld command."""
    parser = argparse.ArgumentParser(
        prog="gemctld",
        description="Loads, paces, replaces and watches the language models of this device.",
    )
    parser.add_argument("--config", type=Path, help="TOML file; /etc/gemctl/gemctl.toml if there")
    parser.add_argument("--check", action="store_true", help="check the file, and end")
    parser.add_argument("--version", action="version", version=f"gemctld {VERSION}")
    given = parser.parse_args()
    usual = Path("/etc/gemctl/gemctl.toml")
    path = given.config or (usual if usual.exists() else None)
    try:
        config = config_.load(path)
        if given.check:
            print(f"gemctld: {path or 'defaults'}: good")
            sys.exit(0)
        sys.exit(asyncio.run(serve(config, path)))
    except ApiError as error:
        print(f"gemctld: {error.message}", file=sys.stderr)
        sys.exit(2 if error.code == "bad_request" else 8)


if __name__ == "__main__":
    main()
