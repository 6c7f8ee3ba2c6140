"""Measure an artifact: time to first token, throughput, latency, depths of context, memory, energy.

Every interval is taken on the monotonic clock. Every iteration starts from an empty cache, is
greedy, and runs to its last token whatever the model says, so that all of them do the same work.

    measure(options, tell) -> Report      GemRunError and OSError come from opening and running
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gemrun import machine, memory
from gemrun.context import Config, GemRunContext, Info, Stats, Tokens, _Asked, _Run
from gemrun.errors import CallError, GemRunError

E_ARGUMENT = -1  # gemrun_status
E_CONTEXT, E_OPEN, E_MEMORY, E_BOARD, E_TEST_FAILED = -7, -20, -70, -72, -80
MAX_TOKENS = 64  # where the context has room for them
DEPTH_STEPS = 16  # tokens that are timed at each depth
DEPTH_BUDGET_S = 60.0  # what the depths chosen by default may take; asked-for ones take their time
NS_PER_MS = 1e6


@dataclass(frozen=True)
class Options:
    """What to measure. None: the artifact's or the engine's default."""

    model: str
    prompt: str
    iterations: int = 10
    warmup: int = 3
    max_tokens: int | None = None  # None: MAX_TOKENS, or what the context has room for
    threads: int | None = None
    kernel: str | None = None
    head: str | None = None  # full or two-plane
    speculate: int = 0  # tokens guessed ahead
    kv_cache_size: int | None = None
    depths: tuple[int, ...] | None = None  # None: 0, 1/4, 1/2 and 3/4 of the context; (): none
    chat: bool = False
    allow_foreign_board: bool = False


@dataclass(frozen=True)
class Iteration:
    """One run from an empty cache. Rates in tokens per second."""

    ttft_ms: float
    throughput_tps: float  # of the tokens behind the first
    prefill_tps: float
    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True)
class Depth:
    """Speed with `depth` tokens in the cache; decode_tps None: not measured, `note` says why."""

    depth: int
    decode_tps: float | None
    fill_tps: float | None = None  # of the prompt tokens that led there, if there were any
    note: str = ""


@dataclass(frozen=True)
class Energy:
    """Energy of the processor packages over the measured iterations."""

    joules: float
    seconds: float
    tokens: int  # generated


@dataclass(frozen=True)
class Report:
    """Everything that was measured."""

    cpu: str
    cores: int
    info: Info
    stats: Stats  # after the last iteration: memory, threads, context in use
    open_ms: float
    iterations: tuple[Iteration, ...]
    steps_ms: tuple[float, ...]  # every decode step of every iteration, in ms
    text: str  # of the last iteration
    depths: tuple[Depth, ...]
    footprint: memory.Footprint | None
    energy: Energy | None
    power_reason: str  # why there is no energy


class Listener(Protocol):
    """Learns what happens while it happens."""

    def opened(self, cpu: str, info: Info, stats: Stats) -> None:
        """The artifact is open."""

    def warmed_up(self, count: int) -> None:
        """The warm-up is over."""

    def starting(self, count: int) -> None:
        """The iterations begin."""

    def iteration(self, number: int, result: Iteration) -> None:
        """One more iteration is done."""

    def progress(self, phase: str, done: int, total: int) -> None:
        """`done` of `total` units of equal size of this phase are done."""


def measure(options: Options, listener: Listener) -> Report:
    """Open the artifact, run everything that was asked for, close it."""
    settings: Config = {}
    if options.threads:
        settings["threads"] = options.threads
    if options.kv_cache_size:
        settings["kv_cache_size"] = options.kv_cache_size
    if options.kernel:
        settings["kernel"] = options.kernel
    if options.head:
        settings["head"] = options.head
    if options.allow_foreign_board:
        settings["allow_foreign_board"] = True
    before = time.monotonic_ns()
    with GemRunContext(options.model, **settings) as context:
        open_ms = (time.monotonic_ns() - before) / NS_PER_MS
        stats = context.stats()
        depths = _plan_depths(options.depths, stats.kv_size)
        room = stats.kv_size - _prompt_tokens(context, options) + 1
        options = replace(options, max_tokens=_plan_tokens(options.max_tokens, room, stats.kv_size))
        listener.opened(machine.cpu_name(), context.info, stats)
        return _measure(context, options, depths, open_ms, listener)


def _measure(
    context: GemRunContext,
    options: Options,
    depths: Sequence[int],
    open_ms: float,
    listener: Listener,
) -> Report:
    for done in range(options.warmup):
        _warm_up(context, options, done, listener)
    listener.warmed_up(options.warmup)
    listener.starting(options.iterations)
    meter = machine.EnergyMeter()
    iterations: list[Iteration] = []
    steps: list[float] = []
    text, joules, seconds = "", 0.0, 0.0
    for number in range(1, options.iterations + 1):
        counters, start = meter.read(), time.monotonic_ns()
        tokens, times = _run(context, options)
        seconds += (time.monotonic_ns() - start) * 1e-9
        joules += meter.joules(counters, meter.read()) or 0.0
        iterations.append(_iteration(tokens.stats))
        steps += times
        text = tokens.text
        listener.iteration(number, iterations[-1])
        listener.progress("iterations", number, options.iterations)
    tokens_made = sum(item.generated_tokens for item in iterations)
    results = _measure_depths(context, options, depths, iterations[-1], listener)
    last = tokens.stats
    return Report(
        cpu=machine.cpu_name(),
        cores=machine.cores(),
        info=context.info,
        stats=replace(
            context.stats(),
            head_candidates=last.head_candidates,
            head_candidates_max=last.head_candidates_max,
            drafted=last.drafted,
            accepted=last.accepted,
        ),
        open_ms=open_ms,
        iterations=tuple(iterations),
        steps_ms=tuple(steps),
        text=text,
        depths=results,
        footprint=_footprint(context, options.model),
        energy=None if meter.reason else Energy(joules, seconds, tokens_made),
        power_reason=meter.reason,
    )


def _footprint(context: GemRunContext, path: str) -> memory.Footprint | None:
    try:
        return memory.measure(context, path)
    except OSError:
        return None


# ---- iterations ----
def _prompt_tokens(context: GemRunContext, options: Options) -> int:
    """How many tokens the prompt makes. PromptError for one that does not fit or is empty."""
    messages = [{"role": "user", "content": options.prompt}]
    one = context.chat(messages, 1) if options.chat else context.infer(options.prompt, 1)
    return one.stats.prompt_tokens


def _plan_tokens(asked: int | None, room: int, context: int) -> int:
    """Tokens of an iteration: what was asked for, or as many as fit. CallError without room."""
    if room < 2:
        raise CallError(
            E_ARGUMENT,
            f"prompt: {context - room + 1} tokens leave room for {room} in a context of {context}; "
            "a shorter prompt or a larger --kv-cache-size is needed",
        )
    if asked is not None and asked > room:
        raise CallError(
            E_ARGUMENT,
            f"--max-tokens: {asked} tokens have no room behind a prompt of {context - room + 1} in "
            f"a context of {context}; give at most {room}",
        )
    return min(MAX_TOKENS, room) if asked is None else asked


def _warm_up(context: GemRunContext, options: Options, done: int, listener: Listener) -> None:
    """One run that nobody times: it may tell of every token."""
    made, most = itertools.count(1), options.max_tokens or MAX_TOKENS

    def tell(_: str) -> None:
        number = min(next(made), most)
        listener.progress("warmup, tokens", done * most + number, options.warmup * most)

    _run(context, options, tell)


def _run(
    context: GemRunContext, options: Options, tell: Callable[[str], object] | None = None
) -> tuple[Tokens, list[float]]:
    """One generation from an empty cache, and the time of each of its decode steps in ms."""
    times: list[int] = []
    run = _Run(context._handle, tell or (lambda _: times.append(time.monotonic_ns())))
    messages = [{"role": "user", "content": options.prompt}] if options.chat else None
    settings = {"temperature": 0.0, "ignore_stop_ids": True, "speculate": options.speculate}
    prompt = None if messages else options.prompt
    asked = _Asked(prompt, messages, options.max_tokens or MAX_TOKENS, settings)
    tokens = context._generate(asked, run)
    made = len(tokens)
    # One piece a token, and perhaps one of held-back bytes at the end.
    return tokens, [(b - a) / NS_PER_MS for a, b in itertools.pairwise(times[:made])]


def _iteration(stats: Stats) -> Iteration:
    return Iteration(
        ttft_ms=stats.ttft_ms,
        throughput_tps=stats.decode_tps,
        prefill_tps=stats.prefill_tps,
        prompt_tokens=stats.prompt_tokens,
        generated_tokens=stats.generated_tokens,
    )


# ---- depths of the context ----
def _plan_depths(asked: tuple[int, ...] | None, context: int) -> list[int]:
    """The depths to measure, ascending. CallError for one that leaves no room."""
    room = context - min(DEPTH_STEPS, context - 1)
    if asked is None:
        quarters = (0, context // 4, context // 2, 3 * context // 4)
        return sorted({depth for depth in quarters if depth <= room})
    for depth in asked:
        if depth > room:
            raise CallError(
                E_ARGUMENT,
                f"--depths: {depth} tokens leave no room for {context - room} more in a context "
                f"of {context}; give at most {room}",
            )
    return sorted(set(asked))


def _measure_depths(
    context: GemRunContext,
    options: Options,
    depths: Sequence[int],
    known: Iteration,
    listener: Listener,
) -> tuple[Depth, ...]:
    """Fill the cache from depth to depth with the prompt's ids and time tokens at each."""
    if not depths:
        return ()
    ids = context.tokenize(options.prompt, bos=True) or [0]
    steps = min(DEPTH_STEPS, context.stats().kv_size - 1)
    results: list[Depth] = []
    start = time.monotonic_ns()
    context.reset_kv_cache()
    for number, depth in enumerate(depths):
        spent = (time.monotonic_ns() - start) * 1e-9
        used = context.stats().kv_used
        expected = (depth - used) / known.prefill_tps + steps / known.throughput_tps
        if options.depths is None and spent + expected > DEPTH_BUDGET_S:
            note = f"would take about {expected:.0f} s; ask for it with --depths"
            results.append(Depth(depth, None, note=note))
            continue
        results.append(_measure_depth(context, ids, depth, steps, listener))
        listener.progress("depths", number + 1, len(depths))
    context.reset_kv_cache()
    return tuple(results)


def _measure_depth(
    context: GemRunContext, ids: Sequence[int], depth: int, steps: int, listener: Listener
) -> Depth:
    """Fill up to `depth` tokens, then time `steps` greedy ones. The cache may hold some already,
    even a few more than `depth` where depths lie close together: then it is filled anew."""
    if context.stats().kv_used > depth:
        context.reset_kv_cache()
    used, chunk = context.stats().kv_used, context.info.chunk
    wanted, fill_ns = depth - used, 0
    for at in range(used, depth, chunk):
        part = [ids[i % len(ids)] for i in range(at, min(at + chunk, depth))]
        before = time.monotonic_ns()
        context.prefill(part)
        fill_ns += time.monotonic_ns() - before
        listener.progress(f"filling to {depth} tokens", at + len(part) - used, wanted)
    token = ids[depth % len(ids)]
    before = time.monotonic_ns()
    for _ in range(steps):
        context.decode(token)
        token = context.sample(temperature=0.0)
    decode_ns = time.monotonic_ns() - before
    fill_tps = wanted * 1e9 / max(fill_ns, 1) if wanted > 0 else None
    return Depth(depth, steps * 1e9 / max(decode_ns, 1), fill_tps)


# ---- figures ----
def exit_code(error: GemRunError | OSError) -> int:
    """The exit code of a failure, by class, as the gemrun command has them."""
    code = error.code if isinstance(error, GemRunError) else E_OPEN
    if code > E_OPEN:
        return 5 if code == E_CONTEXT else 2
    if code > E_MEMORY:
        return 6
    if code == E_BOARD:
        return 4
    return 5 if code > E_TEST_FAILED else 8


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the latter is 0 for one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0..1] of the values do not exceed."""
    ordered = sorted(values)
    rank = -(-len(ordered) * share // 1)
    return ordered[max(int(rank), 1) - 1]


def summary(report: Report, figure: Callable[[Iteration], float]) -> tuple[float, float]:
    """Mean and deviation of one figure over the iterations."""
    return mean_and_deviation([figure(item) for item in report.iterations])
