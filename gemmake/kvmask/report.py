"""What a compile tells about its KV cache: what heads keep, what it saves, what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gemmake.figures import mib
from gemmake.kvmask.quality import Quality, words
from gemmake.passes.layout import kv_bytes
from gemmake.state import State
from gemrun.format import assemble, spec


def mask_lines(state: State) -> Iterator[str]:
    """Lines of --verbose, once it is decided."""
    mask = state.kv_mask
    heads = sum(layer.heads for layer in state.layers)
    if mask is None:
        kind = state.options.kv_type.value
        yield (
            f"Dynamic sparse mask generated for 0/{heads} attention heads "
            f"(--kv-cache-type {kind} keeps all tokens of every head)"
        )
        return
    yield f"Dynamic sparse mask generated for {mask['partial_heads']}/{heads} attention heads"
    if "windows" in mask:
        chats = "by the chat template" if mask["chat_template"] else "as plain text"
        yield (
            f"KV heads measured on {mask['windows']} windows, {mask['tokens']} tokens, "
            f"conversations {chats}; judged on {mask['quality']['tokens']} held-out tokens"
        )
        for steps, saved, *figures in mask["curve"]:
            said = words(Quality(*figures))
            yield f"  {steps:>5} steps: {saved:6.1%} of the cache's blocks saved, {said}"


def kv_lines(state: State) -> list[str]:
    """The closing lines of a sparse cache: bytes in four stages, and what it costs."""
    mask = state.kv_mask
    if mask is None:
        return []
    layers, _ = assemble.place_units(state.conf, state.layers, state.keeps)  # in 8 bits
    whole = [replace(layer, window=0) for layer in state.layers]
    half, int8 = spec.KvType.F16, spec.KvType.INT8
    stages = (
        ("float16, all positions", kv_bytes(state.conf, whole, half)),
        ("float16, the model's windows", kv_bytes(state.conf, state.layers, half)),
        ("int8, the model's windows", kv_bytes(state.conf, state.layers, int8)),
        ("int8, what heads keep", sum(layer.kv_size for layer in layers)),
    )
    first = stages[0][1]
    lines = [f"KV cache of {state.conf.context} tokens:"]
    lines += [f"  {n:<30}{mib(b):>14}{b / first - 1:>+8.1%}" for n, b in stages]
    lines.append(f"  {_cost(mask)}")
    return lines


def _cost(mask: Mapping[str, Any]) -> str:
    if not mask["partial"]:
        return "no head keeps less: nothing passed the gates, or there was nothing to measure"
    return (
        f"{mask['partial']} of {mask['units']} KV heads keep a part; on held-out text, against the "
        f"same weights with all of it: {words(Quality(**mask['quality']))}"
    )
