"""Programs that link the engine and let the daemon see and steer it (gemrun_control.h).

Their requests are their own. The daemon reads their figures, sets their pace, and disables, enables
or replaces their model (handover.py); it never ends their process. What they tell is not trusted:
a figure that is none counts as 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemctl import waiting
from gemctl.errors import ApiError
from gemctl.serve.channel import Channel, error_of
from gemctl.serve.slot import Pace, other_layout
from gemctl.serve.worker import WHOLE_MOST, Facts

if TYPE_CHECKING:
    from gemctl.serve.handover import Trial
    from gemctl.serve.models import Models

ANSWER_S = 60.0  # a replacement opens, tests and warms before it answers
STATS_S = 1.0
SILENT_S = 5.0  # without an answer to `stats`
DIGEST = re.compile(r"[0-9a-f]{64}")
# Facts that a program tells with its figures too.
OF_THE_MODEL = (
    *("name", "target", "kernel", "context", "kv_size", "kv_type", "has_chat", "ram_kv"),
    *("locked_bytes", "unlocked_bytes"),
)


def _whole(event: dict[str, Any], key: str) -> int:
    """A count that a program told; 0 where it told none, or nonsense."""
    value = event.get(key)
    return value if type(value) is int and 0 <= value < WHOLE_MOST else 0


def real(event: dict[str, Any], key: str) -> float | None:
    """A measured figure that a program told; None where it told none, or nonsense."""
    value = event.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    return None


class Attached:
    """One program. `figures` is its newest `stats` event, `swap` its newest replacement."""

    def __init__(self, name: str, pid: int, models: Models) -> None:
        self.name = name
        self.pid = pid
        self.busy = ""  # the procedure that changes it now
        self.facts: Facts | None = None
        self.figures: dict[str, Any] = {}
        self.swap: dict[str, Any] = {}
        self.trial: Trial | None = None
        self.not_kept = ""  # why a version that has passed its probation is not the good one yet
        self.channel = Channel(name, "its program has ended; start it and try again")
        self.task: asyncio.Task[None] | None = None
        self._models = models
        self._ready: dict[str, Any] = {}
        self._heard = models.clock()  # its newest answer
        self._watched = (0, 0, 0)  # requests, failed and tokens where the daemon began to count

    async def run(self, pace: Pace) -> None:
        """Follow its figures until it is gone. The channel is open."""
        ready = await waiting.within(ANSWER_S, self.channel.ready)
        if ready["event"] == "error":
            raise error_of(ready)
        with contextlib.suppress(ValueError):
            self.facts = Facts.of(ready)
        self._ready = ready
        self.pace(pace)
        await self.look()
        self._watched = self._counts()
        self._models.hub.publish("program.attached", model=self.name, pid=self.pid)
        self._models.on_attached(self)
        while not self.channel.closed.is_set():
            await waiting.ended(self.channel.closed, STATS_S)
            await self.look()
        self._models.hub.publish("program.gone", model=self.name, pid=self.pid)

    # ---- figures ----

    async def look(self) -> None:
        """Ask for its figures now; those of before stay where it does not answer."""
        with contextlib.suppress(ApiError):
            found = await self.channel.request("stats", ANSWER_S)
            self._heard = self._models.clock()
            before, first = self._counts(), not self.figures
            self.figures = found
            self._learn(found)
            if not first:
                self._tell_metrics(before)

    def _learn(self, figures: dict[str, Any]) -> None:
        """What its model is now: another one after a replacement. Nonsense changes nothing, and
        an engine of before that tells less tells what it knows."""
        told = {key: figures[key] for key in OF_THE_MODEL if key in figures}
        memory = _whole(figures, "ram_total")  # 0 while the model is disabled
        with contextlib.suppress(ValueError):
            self.facts = Facts.of(
                {**self._ready, **told, **({"ram_total": memory} if memory else {})}
            )

    def _counts(self) -> tuple[int, int, int]:
        f = self.figures
        return _whole(f, "requests"), _whole(f, "failed"), _whole(f, "tokens")

    def _tell_metrics(self, before: tuple[int, int, int]) -> None:
        """What it has done since the last look. Of several requests the newest is known whole."""
        more = [max(0, now - then) for now, then in zip(self._counts(), before, strict=True)]
        requests, failed, tokens = more
        metrics, ttft = self._models.metrics, real(self.figures, "ttft_ms")
        if requests > failed and ttft is not None:
            metrics.ttft(self.name, ttft / 1e3)
            self._models.history.ttft(self._models.clock(), ttft, self.name)
        metrics.tokens(self.name, tokens)
        metrics.request(self.name, "ok", max(0, requests - failed))
        metrics.request(self.name, "failed", min(failed, requests))
        metrics.queue_length(self.name, self.waiting)
        if self.enabled:
            metrics.kv_cache(self.name, self.kv_used, _whole(self.figures, "kv_size"))
            metrics.model_info(self.name, self.digest or "own file")

    @property
    def tokens(self) -> int:
        """Made since the daemon watches it."""
        return max(0, _whole(self.figures, "tokens") - self._watched[2])

    @property
    def step_ms(self) -> float | None:
        """Time per token of its newest request."""
        speed = real(self.figures, "decode_tps")
        return 1e3 / speed if speed else None

    @property
    def requests(self) -> int:
        """Since its handle was opened, those that failed among them."""
        return _whole(self.figures, "requests")

    @property
    def faults(self) -> int:
        """Requests that failed by no mistake of their caller."""
        return _whole(self.figures, "faults")

    @property
    def waiting(self) -> int:
        return _whole(self.figures, "waiting")

    @property
    def kv_used(self) -> int:
        return _whole(self.figures, "kv_used")

    @property
    def enabled(self) -> bool:
        found = self.figures.get("enabled", self._ready.get("enabled", False))
        return found is True

    @property
    def digest(self) -> str | None:
        """The version of the store that it uses; None: a file of its own."""
        found = self.figures.get("digest")
        return found if isinstance(found, str) and DIGEST.fullmatch(found) else None

    @property
    def way_back(self) -> bool:
        """Whether it can go back to the model before by itself."""
        return self.figures.get("way_back") is True

    @property
    def silent(self) -> bool:
        """It has not answered for a while: what is known of it is old."""
        return self._models.clock() - self._heard > SILENT_S

    @property
    def state(self) -> str:
        if self.silent:
            return "not answering"
        return "serving" if self.enabled else "disabled" if self._ready else "loading"

    def _memory(self) -> int:
        """Bytes of its model: of the newest one, which its figures know a second later."""
        known = _whole(self.figures, "ram_total") or _whole(self._ready, "ram_total")
        return known if self.enabled else 0

    def brief(self) -> dict[str, Any]:
        """A line of `model.list`."""
        left = self.trial.left(self) if self.trial is not None else None
        return {
            "name": self.name,
            "active": False,
            "attached": True,
            "pid": self.pid,
            "state": self.state,
            "digest": self.digest,
            "pinned": False,
            "priority": 1,
            "memory_bytes": self._memory(),
            "versions": len(self._models.stored(self.name).present),
            "probation_left_s": left[0] if left is not None else None,
            "probation_left_requests": left[1] if left is not None else None,
            "not_kept": self.not_kept,
            "figures": {k: v for k, v in self.figures.items() if k not in ("event", "id")},
        }

    def status(self) -> dict[str, Any]:
        """What `model.status` has beside that; the worker is its own process."""
        requests, failed, _ = self._counts()
        return {
            "busy": self.busy,
            "on_probation": self.trial is not None,
            "queued": self.waiting,
            "worker": {**vars(self.facts), "pid": self.pid} if self.facts is not None else None,
            "crashes": 0,
            "kv_auto_reset_percent": None,
            "swap": self.swap,
            "requests": {"done": max(0, requests - failed), "failed": failed},
        }

    def stats(self) -> dict[str, Any]:
        """Its part of `stats`."""
        requests, failed, _ = self._counts()
        f, size = self.figures, _whole(self.figures, "kv_size")
        p50, p95 = self._models.history.ttft_percentiles(self._models.clock(), self.name)
        used = self.kv_used if self.enabled else 0
        per_token = self.facts.ram_kv / self.facts.kv_size if self.facts and size else 0.0
        return {
            "ttft_ms": real(f, "ttft_ms"),
            "throughput_tps": real(f, "decode_tps"),
            "kv_cache_used": used,
            "model": self.name,
            "digest": self.digest,
            "state": self.state,
            "requests": {
                "active": _whole(f, "active"),
                "queued": self.waiting,
                "done": max(0, requests - failed),
                "failed": failed,
            },
            "swap": self.swap,
            "kv_cache_size": size or (self.facts.kv_size if self.facts else None),
            "kv_cache_used_bytes": round(used * per_token),
            "kv_cache_hit_ratio": share(f.get("reused"), f.get("prompt_tokens")),
            "ttft_p50_ms": p50,
            "ttft_p95_ms": p95,
            "kv_auto_reset_percent": None,
        }

    # ---- what it is told ----

    def pace(self, pace: Pace) -> None:
        """Set its pace without waiting: a program that hangs must not hold the throttle."""
        with contextlib.suppress(ApiError):  # one that is gone needs none
            self.channel.send("pace", **vars(pace))

    async def disable(self) -> dict[str, Any]:
        """Free its model's memory after its last request."""
        started, freed = self._models.clock(), self._memory()
        with self._models.changing(self, "a disable"):
            await self._order("disable")
            self.figures["enabled"] = False
        return {"model": self.name, "attached": True, "freed_bytes": freed, **self._took(started)}

    async def enable(self, prompt: str | None) -> dict[str, Any]:
        """Open its model again."""
        more: dict[str, Any] = {} if prompt is None else {"warmup_prompt": prompt}
        started = self._models.clock()
        with self._models.changing(self, "an enable"):
            await self._order("enable", **more)
            self.figures["enabled"] = True
        return {"model": self.name, "attached": True, **self._took(started)}

    async def _order(self, op: str, **fields: Any) -> None:
        """Let it do something. What takes too long may still be done: the error says so."""
        try:
            await self.channel.request(op, ANSWER_S, **fields)
        except ApiError as error:
            text = error.message
            if error.code == "timeout":
                what = f"no answer to {op} within {ANSWER_S:g} s, it may still do it"
                text = f"{what}; see gemctl model status {self.name}"
            own = text.startswith(f"{self.name}: ")
            raise ApiError(error.code, text if own else f"{self.name}: {text}") from None

    def _took(self, started: float) -> dict[str, float]:
        return {"ms": (self._models.clock() - started) * 1e3}

    async def open(
        self, file: int, path: Path, digest: str, prompt: str, allow_layout_change: bool
    ) -> dict[str, Any]:
        """Let it try a version of the store, and answer with it; what that took. The version comes
        as an open file, because its user need not be able to read the store; the path is for
        programs of before that. Raises ApiError in our words."""
        try:
            return await self.channel.request(
                "replace",
                ANSWER_S,
                file,
                path=str(path),
                digest=digest,
                warmup_prompt=prompt or None,
                allow_layout_change=int(allow_layout_change),
            )
        except ApiError as error:
            raise ApiError(error.code, self._named(error, path)) from None

    def _named(self, error: ApiError, path: Path) -> str:
        """The program's sentence, in the words of who asked here."""
        if error.code == "layout":
            return other_layout(self.name).message
        return re.sub(rf"/proc/self/fd/\d+|{re.escape(str(path))}", self.name, error.message)

    async def back(self) -> None:
        """Let it go back to the model before. Raises ApiError where it cannot."""
        await self._order("rollback")
        await self.look()


def share(part: Any, whole: Any) -> float | None:
    """How much of a prompt the cache held already."""
    known = type(part) is int and type(whole) is int and 0 <= part <= whole and whole > 0
    return round(part / whole, 3) if known else None
