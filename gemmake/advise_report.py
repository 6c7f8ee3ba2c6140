"""What gemmake advise says: a table for people, the same as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from gemmake import predictions
from gemmake.advise import Advice, Fit, Row
from gemmake.hdf import MIB, show
from gemmake.load.source import display
from gemmake.passes.predict import Range, Time

HEAD = (
    *("MODEL", "WEIGHTS", "CACHE", "CONTEXT", "MEMORY", "TOKENS/S", "PREFILL/S", "FIRST TOKEN"),
    *("LOAD", "VERDICT"),
)
NOTHING = "-"


def lines(advice: Advice) -> Iterator[str]:
    """What was asked, the table, why not, the checks, and what the figures rest on. Names of files
    may hold anything: no control character of theirs reaches a terminal."""
    for line in _lines(advice):
        yield display(line, len(line))


def _lines(advice: Advice) -> Iterator[str]:
    yield from _asked(advice)
    yield ""
    table = [HEAD, *(_cells(row) for row in advice.rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEAD))]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
    for one in advice.rows:
        yield from _why(one)
    yield ""
    yield from _assumed(advice)


def _asked(advice: Advice) -> Iterator[str]:
    wish, hdf = advice.wish, advice.hdf
    mode = f" in mode {advice.mode.id}" if advice.mode is not None else ""
    granted = f"{advice.granted / MIB:.0f} MiB for a model" if advice.granted else (
        "memory that the device decides about"
    )  # fmt: skip
    given = f" ({show(wish.target)})" if wish.target != hdf.id else ""
    yield (
        f"{hdf.id}{given}{mode}: {granted}; inputs of {wish.longest_input} tokens and answers of "
        f"{wish.answer}, a context of {wish.context}"
    )
    wanted = [f"{wish.speed:g} tokens/s"] if wish.speed is not None else []
    if wish.latency_ms is not None:
        wanted.append(f"the first token within {wish.latency_ms:g} ms")
    if wanted:
        yield f"wanted: {', '.join(wanted)}, with {wish.longest_input} tokens, the model being open"


def _cells(row: Row) -> tuple[str, ...]:
    if row.options is None or row.memory is None or row.prediction is None:
        return (row.name, *(NOTHING for _ in HEAD[2:]), _verdict(row))
    found, options = row.prediction, row.options
    first = predictions.prompt_time(found)
    return (
        row.name,
        options.quantization.value,
        options.kv_type.value,
        str(options.context),
        _memory(row),
        predictions.span(found.decode.seconds.inverse()) if found.decode else NOTHING,
        predictions.span(first.seconds.inverse(found.prompt)) if first else NOTHING,
        predictions.duration(first.seconds) if first else NOTHING,
        NOTHING if row.memory.in_flash else predictions.duration(found.cold),
        _verdict(row),
    )


def _verdict(row: Row) -> str:
    """fits; open: speed; no: memory, speed; open: first token."""
    parts = [("no", row.unmet), ("open", row.undecided)]
    said = [f"{fit}: {', '.join(what)}" for fit, what in parts if what]
    return "; ".join(said) or row.fit.value


def _memory(row: Row) -> str:
    """In MiB, rounded up; two figures where groups of the cache are measured and matter."""
    least = math.ceil((row.memory.ram if row.memory else 0) / MIB)
    most = math.ceil(row.most / MIB)
    return f"{least} MiB" if least == most else f"{least} to {most} MiB"


def _why(row: Row) -> Iterator[str]:
    for reason in row.reasons:
        yield f"{row.name}: {reason}"
    for remedy in row.remedies:
        yield f"{row.name}: nearest: {remedy}"
    if row.fit is not Fit.NO and row.group_limit:
        yield f"{row.name}: limit for a control group: {row.group_limit} bytes (memory.max)"
    for line in row.offload:
        yield f"{row.name}: {line}"
    for finding in row.check:
        yield f"{row.name}: {finding.line}"


def _assumed(advice: Advice) -> Iterator[str]:
    """The same for all rows: the board's."""
    told = [row.prediction.assumed for row in advice.rows if row.prediction is not None]
    for sentence in told[0] if told else ():
        yield f"assumed: {sentence}"
    if told:
        yield (
            "assumed: the whole head is computed; nothing here was measured on the board. FIRST "
            "TOKEN: of the longest input, the model being open; LOAD: from storage"
        )
    for fit in (Fit.YES, Fit.OPEN):
        found = [row.options for row in advice.rows if row.fit is fit and row.options is not None]
        if found:
            yield f"Next: {found[0].command()}"
            return


# ---- JSON ----
def as_json(advice: Advice) -> str:
    """The same for programs. Times in seconds, sizes in bytes; null: not known."""
    wish = advice.wish
    told = {
        "target": advice.hdf.id,
        "target_given": wish.target,
        "power_mode": advice.mode.id if advice.mode is not None else None,
        "granted_bytes": advice.granted or None,
        "context": wish.context,
        "longest_input": wish.longest_input,
        "answer": wish.answer,
        "wanted": {"latency_ms": wish.latency_ms, "tokens_per_s": wish.speed},
        "quality": wish.quality.value,
        "candidates": [_row(row) for row in advice.rows],
    }
    return json.dumps(told, indent=1, ensure_ascii=False)


def _row(row: Row) -> dict[str, Any]:
    found, options = row.prediction, row.options
    return {
        "model": row.name,
        "verdict": row.fit.value,
        "quantization": options.quantization.value if options else None,
        "kv_cache_type": options.kv_type.value if options else None,
        "command": options.command() if options else None,
        "memory_bytes": row.memory.ram if row.memory else None,
        "memory_most_bytes": row.most or None,
        "flash_bytes": row.memory.flash or None if row.memory else None,
        "control_group_bytes": row.group_limit or None,
        "decode_tokens_per_s": _rate(found.decode) if found else None,
        "prefill_tokens_per_s": _rate(found.prefill, found.prompt) if found else None,
        "decode_limit": found.decode.limit if found and found.decode else None,
        "first_token_s": _ends(found.prefill.seconds) if found and found.prefill else None,
        "load_s": _ends(found.cold) if found else None,
        "load_cached_s": _ends(found.warm) if found else None,
        "unmet": list(row.unmet),
        "undecided": list(row.undecided),
        "reasons": list(row.reasons),
        "remedies": list(row.remedies),
        "offload": list(row.offload),
        "notes": list(row.notes),
        "assumed": list(found.assumed) if found else [],
        "check": [
            {"name": one.name, "verdict": one.verdict, "sentence": one.sentence}
            for one in row.check
        ],
    }


def _rate(time: Time | None, tokens: int = 1) -> list[float | None] | None:
    """Least and most; a least of 0 is not known."""
    if time is None:
        return None
    rate = time.seconds.inverse(tokens)
    return [round(rate.low, 3) or None, round(rate.high, 3)]


def _ends(found: Range) -> list[float | None]:
    return [round(found.low, 6), None if found.high == math.inf else round(found.high, 6)]
