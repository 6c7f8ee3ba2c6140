"""Figures for Prometheus, in its text format.

    metrics = Prometheus()         needs the extra [metrics]; raises ApiError without it
    metrics.tokens("lm", 5)
    metrics.text()                 what GET /metrics answers

`Metrics` has the same methods and does nothing: the daemon uses it where the endpoint is off, and
then never imports prometheus_client. Labels are model names, zones, rails and fixed words; a model
that is unloaded loses its series, and no more than MAX_MODELS and MAX_SENSORS ever have any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from gemctl.errors import ApiError, Code
from gemrun import extras

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_MODELS = 64
MAX_SENSORS = 64
MAX_KINDS = 64
OUTCOMES = ("ok", *get_args(Code))  # else the word of the error
TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0)
FLIP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 5.0)


class Metrics:
    """Takes figures and forgets them."""

    def ttft(self, model: str, seconds: float) -> None:
        """A first token came."""

    def tokens(self, model: str, count: int) -> None:
        """Tokens were made."""

    def request(self, model: str, outcome: str, count: int = 1) -> None:
        """Requests ended: "ok", or their error's code; any other word counts as "failed"."""

    def kv_cache(self, model: str, used: int, size: int) -> None:
        """Tokens in the cache, and its size in tokens; size 0: unknown."""

    def model_info(self, model: str, digest: str) -> None:
        """A model serves with this version."""

    def unloaded(self, model: str) -> None:
        """A model is not in memory: what it is and holds now has no series, its counts stay."""

    def forget_model(self, model: str) -> None:
        """A model is gone: its series end."""

    def worker_restart(self, model: str) -> None:
        """A worker was started again after its end."""

    def queue_length(self, model: str, length: int) -> None:
        """Requests that wait."""

    def flip(self, model: str, seconds: float) -> None:
        """A model was swapped; how long requests had no target."""

    def token_gap(self, model: str, seconds: float) -> None:
        """A model was swapped; how long somebody who asked it got no token."""

    def temperatures(self, zones: Mapping[str, float | None]) -> None:
        """Degrees by sensor; one that is unknown or gone has no series."""

    def power(self, rails: Mapping[str, float | None]) -> None:
        """Watts by rail; the same."""

    def throttle(self, level: int, duty: float, threshold_c: float | None) -> None:
        """Level, 0 for none; share of time in which the engine may compute; threshold."""

    def event(self, kind: str) -> None:
        """An event was published."""

    def text(self) -> bytes | None:
        """The text format; None where there are no figures."""
        return None


class Prometheus(Metrics):
    """Figures in a registry of its own. Raises ApiError("bad_request") without the extra."""

    def __init__(self) -> None:
        reason = extras.problem("prometheus_client", "prometheus-client", "metrics")
        if reason is not None:
            raise ApiError("bad_request", f"metrics: {reason}")
        import prometheus_client as client

        self._latest = client.generate_latest
        self._registry = client.CollectorRegistry(auto_describe=True)
        self._models: set[str] = set()
        self._digests: dict[str, str] = {}
        self._zones: set[str] = set()
        self._rails: set[str] = set()
        self._kinds: set[str] = set()
        self._make_of_models(client)
        self._make_of_machine(client)

    def _make_of_models(self, client: Any) -> None:
        known = {"registry": self._registry}
        model = ["model"]
        self._ttft = client.Histogram(
            "gemctl_ttft_seconds",
            "Time to the first token",
            model,
            buckets=TTFT_BUCKETS,
            **known,
        )
        self._tokens = client.Counter("gemctl_tokens", "Tokens made", model, **known)
        self._requests = client.Counter(
            "gemctl_requests", "Requests ended", ["model", "outcome"], **known
        )
        self._kv = client.Gauge(
            "gemctl_kv_cache_used_ratio", "Used share of the KV cache", model, **known
        )
        self._queue = client.Gauge("gemctl_queue_length", "Requests that wait", model, **known)
        self._restarts = client.Counter(
            "gemctl_worker_restarts", "Workers started again", model, **known
        )
        self._info = client.Gauge(
            "gemctl_model_info", "Models that serve; always 1", ["name", "digest"], **known
        )
        self._flip = client.Histogram(
            "gemctl_swap_flip_seconds",
            "Time without a target at a swap",
            model,
            buckets=FLIP_BUCKETS,
            **known,
        )
        self._gap = client.Histogram(
            "gemctl_swap_max_token_gap_seconds",
            "Longest time without a token for requests at a swap",
            model,
            buckets=FLIP_BUCKETS,
            **known,
        )

    def _make_of_machine(self, client: Any) -> None:
        known = {"registry": self._registry}
        self._temperature = client.Gauge(
            "gemctl_temperature_celsius", "Temperature", ["zone"], **known
        )
        self._power = client.Gauge("gemctl_power_watts", "Power", ["rail"], **known)
        self._level = client.Gauge("gemctl_throttle_level", "Level of the throttle", **known)
        self._duty = client.Gauge(
            "gemctl_throttle_duty_ratio", "Share of time for computing", **known
        )
        self._threshold = client.Gauge(
            "gemctl_throttle_threshold_celsius", "Temperature to stay below", **known
        )
        for unknown in (self._level, self._duty, self._threshold):
            unknown.set(math.nan)
        self._events = client.Counter("gemctl_events", "Events published", ["kind"], **known)

    def _known(self, model: str) -> bool:
        """Is there room for this model's series?"""
        if model not in self._models and len(self._models) >= MAX_MODELS:
            return False
        self._models.add(model)
        return True

    def ttft(self, model: str, seconds: float) -> None:
        if self._known(model):
            self._ttft.labels(model).observe(seconds)

    def tokens(self, model: str, count: int) -> None:
        if count > 0 and self._known(model):
            self._tokens.labels(model).inc(count)

    def request(self, model: str, outcome: str, count: int = 1) -> None:
        if count > 0 and self._known(model):
            self._requests.labels(model, outcome if outcome in OUTCOMES else "failed").inc(count)

    def kv_cache(self, model: str, used: int, size: int) -> None:
        if size > 0 and self._known(model):
            self._kv.labels(model).set(used / size)

    def model_info(self, model: str, digest: str) -> None:
        if not self._known(model):
            return
        before = self._digests.get(model)
        if before is not None and before != digest:
            self._info.remove(model, before)
        self._digests[model] = digest
        self._info.labels(model, digest).set(1)

    def unloaded(self, model: str) -> None:
        for family in (self._kv, self._queue):
            _remove(family, model)
        digest = self._digests.pop(model, None)
        if digest is not None:
            _remove(self._info, model, digest)

    def forget_model(self, model: str) -> None:
        if model not in self._models:
            return
        self._models.discard(model)
        self.unloaded(model)
        for family in (self._ttft, self._tokens, self._restarts, self._flip, self._gap):
            _remove(family, model)
        for outcome in OUTCOMES:
            _remove(self._requests, model, outcome)

    def worker_restart(self, model: str) -> None:
        if self._known(model):
            self._restarts.labels(model).inc()

    def queue_length(self, model: str, length: int) -> None:
        if self._known(model):
            self._queue.labels(model).set(length)

    def flip(self, model: str, seconds: float) -> None:
        if self._known(model):
            self._flip.labels(model).observe(seconds)

    def token_gap(self, model: str, seconds: float) -> None:
        if self._known(model):
            self._gap.labels(model).observe(seconds)

    def temperatures(self, zones: Mapping[str, float | None]) -> None:
        self._zones = _gauges(self._temperature, self._zones, zones)

    def power(self, rails: Mapping[str, float | None]) -> None:
        self._rails = _gauges(self._power, self._rails, rails)

    def throttle(self, level: int, duty: float, threshold_c: float | None) -> None:
        self._level.set(level)
        self._duty.set(duty)
        self._threshold.set(math.nan if threshold_c is None else threshold_c)

    def event(self, kind: str) -> None:
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind = "other"
        self._kinds.add(kind)
        self._events.labels(kind).inc()

    def text(self) -> bytes:
        """The text format, version 0.0.4."""
        raw: bytes = self._latest(self._registry)
        return raw


def _remove(family: Any, *labels: str) -> None:
    """End a series, if there is one."""
    try:
        family.remove(*labels)
    except KeyError:
        return


def _gauges(family: Any, before: set[str], values: Mapping[str, float | None]) -> set[str]:
    """Set what is known, end the rest; returns the labels that now have a series."""
    known = {name: value for name, value in values.items() if value is not None}
    kept = dict(list(known.items())[:MAX_SENSORS])
    for name in before - set(kept):
        _remove(family, name)
    for name, value in kept.items():
        family.labels(name).set(value)
    return set(kept)
