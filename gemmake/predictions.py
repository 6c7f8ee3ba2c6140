"""Speed that is expected of a compile on its board, for people: the lines of gemmake's report."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gemmake.figures import at_least, at_most, figure
from gemmake.hdf import Hdf
from gemmake.options import CompileOptions
from gemmake.passes import offload, place, predict
from gemmake.passes.predict import Prediction, Range, Time
from gemmake.planning import manifest_of, placed, records_of
from gemmake.state import State
from gemrun.format import assemble

SHORT_PROMPT = 32  # tokens of a command: the first token is predicted for it
LONG_PROMPT = 512  # tokens of a prompt that prefill's speed is predicted for, where they fit


def work_of(state: State) -> predict.Work:
    """The work of a planned artifact."""
    layers, units = placed(state)
    size = assemble.assemble(records_of(state, len(manifest_of(state, {})))).file_size
    cost = offload.cost(state.conf, state.stream, state.cold) if state.cold else None
    return predict.work_of(state.conf, layers, units, state.stream, size, cost)


def machine_of(hdf: Hdf, options: CompileOptions) -> predict.Machine:
    """The target in the power mode and with the storage that were asked for. Raises UsageError for
    an unknown mode."""
    threads = options.run_threads or place.run_threads(hdf)
    storage = options.storage.value if options.storage is not None else ""
    return predict.machine_of(hdf, hdf.mode(options.power_mode), threads, storage)


def prompt_time(found: Prediction) -> Time | None:
    """The time of the prompt, where something bounds it that can be near: memory alone is read once
    for a whole step, so that what it allows is a hundred times what arithmetic does."""
    machine, time = found.machine, found.prefill
    near = machine.cores or machine.ceiling or (time is not None and time.limit == "storage")
    return time if near else None


def report_lines(state: State) -> Iterator[str]:
    """The lines of a compile's end: decode with half of the context in use, prompts, loading; one
    where nothing is known."""
    work, context = work_of(state), state.options.context
    machine = machine_of(state.hdf, state.options)
    prompt, long = min(SHORT_PROMPT, context - 1), min(LONG_PROMPT, context // 2)
    found = predict.predict(work, machine, context // 2, prompt)
    whole = prompt_time(predict.predict(work, machine, 0, long))
    if found.decode is None:
        yield f"speed: not predicted, as {machine.assumed[0]}"
        return
    mode = f" in mode {machine.mode}" if machine.mode else ""
    yield (
        f"predicted for {state.hdf.id}{mode}, {machine.threads} threads: "
        f"{tokens_a_second(found.decode)} with {found.depth} tokens in the context, limited by "
        f"{found.decode.limit}"
    )
    if whole is None:
        yield f"prefill: not predicted, as {machine.uncounted}"
    else:
        yield (
            f"predicted prefill: {tokens_a_second(whole, long)} over {long} tokens, limited by "
            f"{whole.limit}"
        )
    if not state.hdf.bare:  # firmware loads nothing
        yield from _loading(found)


def _loading(found: Prediction) -> Iterator[str]:
    yield (
        f"predicted load: {duration(found.cold)} from storage, {duration(found.warm)} from the "
        "page cache"
    )
    cold, warm = found.first_token(cold=True), found.first_token(cold=False)
    if cold is not None and warm is not None and prompt_time(found) is not None:
        yield (
            f"predicted first token of a prompt of {found.prompt}, loading included: "
            f"{duration(cold)} from storage, {duration(warm)} from the page cache"
        )


def log_lines(state: State) -> Iterator[str]:
    """What --verbose adds: the assumptions behind the figures."""
    machine = machine_of(state.hdf, state.options)
    for sentence in predict.predict(work_of(state), machine, 0, 1).assumed:
        yield f"[predict] {sentence}"
    yield (
        "[predict] the whole head is computed, as sampling wants it (greedy runs read half of it); "
        "nothing of this was measured on the board"
    )


def tokens_a_second(time: Time, tokens: int = 1) -> str:
    """10 to 14 tokens/s; at most 14 tokens/s."""
    return f"{span(time.seconds.inverse(tokens))} tokens/s"


def span(found: Range) -> str:
    """Both ends, or the one that is known, which then is a bound."""
    if found.low == 0.0:
        return f"at most {at_most(found.high)}"
    if found.high == math.inf:
        return f"at least {at_least(found.low)}"
    low, high = figure(found.low), figure(found.high)
    return low if low == high else f"{low} to {high}"


def duration(seconds: Range) -> str:
    """120 to 300 ms, or in seconds where a second is reached."""
    most = seconds.low if seconds.high == math.inf else seconds.high
    if most >= 1.0:
        return f"{span(seconds)} s"
    return f"{span(Range(seconds.low * 1e3, seconds.high * 1e3))} ms"
