"""What a caller may give: types and ranges of arguments, checked before the engine sees them.

A wrong type is an ArgumentTypeError (a TypeError), a wrong value a CallError (a ValueError). Both
name the argument, what was given and what is allowed. What only the artifact knows, as the size of
its vocabulary, is left to the engine.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from gemrun.errors import ArgumentTypeError, CallError

Checked: TypeAlias = dict[str, Any]  # settings as the engine takes them; stop: a list of bytes

E_ARGUMENT = -1  # gemrun_status
ROLES = ("system", "user", "assistant")
INT32_MAX, UINT64_MAX = 2**31 - 1, 2**64 - 1
MAX_LIST, MAX_STOPS, MAX_STOP_BYTES, MAX_DRAFT = 4096, 8, 128, 6
MAX_DEADLINE_MS = 1e12

# Least and most.
CONFIG_RANGES = {
    "kv_cache_size": (1, INT32_MAX),
    "prefill_batch_size": (1, INT32_MAX),
    "threads": (1, 8),
    "decode_threads": (1, 8),
    "balance": (0, 2),
    "thread_affinity": (0, UINT64_MAX),
}
ON_FULL = {"stop": 0, "mark": 1, "slide": 2}  # at the end of the context: GEMRUN_FULL_*
HEADS = {"full": 1, "two-plane": 2}  # gemrun_head
SWITCHES = ("weights_check", "allow_foreign_board", "ignore_memory", "lock_memory")
INTEGER_SETTINGS = {
    "top_k": (0, INT32_MAX),
    "seed": (0, UINT64_MAX),
    "speculate": (0, MAX_DRAFT),
}
# The range in words, and whether a value is in it.
REAL_SETTINGS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("0 to 100", lambda v: 0 <= v <= 100),
    "top_p": ("more than 0, up to 1", lambda v: 0 < v <= 1),
    "min_p": ("0 to less than 1", lambda v: 0 <= v < 1),
    "repetition_penalty": ("more than 0, up to 100", lambda v: 0 < v <= 100),
    "deadline_ms": (f"0 to {MAX_DEADLINE_MS:.0f}", lambda v: 0 <= v <= MAX_DEADLINE_MS),
}


def wrong_type(name: str, value: object, allowed: str) -> NoReturn:
    """Refuse a value of a wrong type."""
    kind = type(value).__name__
    raise ArgumentTypeError(E_ARGUMENT, f"{name}: {_shown(value)} is of type {kind}; use {allowed}")


def wrong_value(name: str, value: object, allowed: str) -> NoReturn:
    """Refuse a value out of its range."""
    raise CallError(E_ARGUMENT, f"{name}: {_shown(value)} is out of range; use {allowed}")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python writes out
        text = "a huge number"
    return text if len(text) <= 80 else f"{text[:77]}..."


def integer(name: str, value: object, least: int, most: int) -> int:
    """A whole number, numpy's too, in a range."""
    allowed = f"{least} to {most}"
    if isinstance(value, bool):
        wrong_type(name, value, allowed)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        wrong_type(name, value, allowed)
    if not least <= number <= most:
        wrong_value(name, number, allowed)
    return number


def real(name: str, value: object, allowed: str = "a finite number") -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        wrong_type(name, value, allowed)
    try:
        number = float(value)
    except OverflowError:  # a whole number or a fraction beyond all floats
        wrong_value(name, value, allowed)
    if not math.isfinite(number):
        wrong_value(name, value, allowed)
    return number


def text(name: str, value: object) -> bytes:
    """The bytes of a text without NUL."""
    if not isinstance(value, str):
        wrong_type(name, value, "a str")
    if "\0" in value:
        raise CallError(E_ARGUMENT, f"{name}: holds a NUL character; remove it")
    return value.encode("utf-8", "surrogatepass")


def path(name: str, value: object) -> bytes:
    """The bytes of a path."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        wrong_type(name, value, "a str or a Path")
    try:
        encoded = os.fsencode(value)
    except UnicodeEncodeError:
        raise CallError(
            E_ARGUMENT, f"{name}: {_shown(value)} is no name of a file; use one"
        ) from None
    if b"\0" in encoded:
        raise CallError(E_ARGUMENT, f"{name}: {_shown(value)} holds a NUL character; remove it")
    return encoded


def ids(name: str, values: object) -> list[int]:
    """Token ids."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        wrong_type(name, values, "a sequence of token ids")
    return [integer(name, value, 0, INT32_MAX) for value in values]


def messages(values: object) -> list[tuple[str, bytes]]:
    """Role and text of every message of a conversation."""
    form = 'a list of messages, as [{"role": "user", "content": "Hello"}]'
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        wrong_type("messages", values, form)
    if not values:
        wrong_value("messages", values, form)
    return [_message(f"messages[{i}]", value) for i, value in enumerate(values)]


def _message(name: str, value: object) -> tuple[str, bytes]:
    if not isinstance(value, Mapping):
        wrong_type(name, value, '{"role": "user", "content": "Hello"}')
    for key in ("role", "content"):
        if key not in value:
            raise CallError(E_ARGUMENT, f"{name}: {_shown(dict(value))} has no {key!r}; add it")
    role = value["role"]
    if not isinstance(role, str):
        wrong_type(f"{name} role", role, ", ".join(ROLES))
    if role not in ROLES:
        wrong_value(f"{name} role", role, ", ".join(ROLES))
    return role, text(f"{name} content", value["content"])


def known(kind: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse names that are none of the allowed ones, with the nearest of those."""
    choices = sorted(allowed)
    for name in sorted(set(names) - set(choices)):
        near = difflib.get_close_matches(name, choices, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(choices)}"
        raise ArgumentTypeError(E_ARGUMENT, f"{kind}: unknown setting {name!r}; {hint}")


def config_value(name: str, value: object) -> int:
    """A setting of gemrun_config but the kernel."""
    if name in CONFIG_RANGES:
        return integer(name, value, *CONFIG_RANGES[name])
    if name == "head":
        return head(value)
    return switch(name, value)


def head(value: object) -> int:
    """How the head is computed, by its name."""
    return _word("head", value, HEADS)


def _word(name: str, value: object, words: Mapping[str, int]) -> int:
    allowed = " or ".join(map(repr, words))
    if not isinstance(value, str):
        wrong_type(name, value, allowed)
    if value not in words:
        wrong_value(name, value, allowed)
    return words[value]


def switch(name: str, value: object) -> int:
    """True or False, or their numbers."""
    try:
        good = bool(value in (0, 1))
    except (TypeError, ValueError):  # an array, say
        good = False
    if not good:
        wrong_type(name, value, "True or False")
    return int(bool(value))


def settings(given: Mapping[str, object], allowed: Iterable[str]) -> Checked:
    """The settings of a request; refuses unknown ones, wrong types and values out of range."""
    known("settings", given, allowed)
    return {name: _setting(name, value) for name, value in given.items()}


def _setting(name: str, value: object) -> Any:
    if name in INTEGER_SETTINGS:
        return integer(name, value, *INTEGER_SETTINGS[name])
    if name in REAL_SETTINGS:
        words, good = REAL_SETTINGS[name]
        number = real(name, value, words)
        if not good(number):
            wrong_value(name, value, words)
        return number
    if name in ("ignore_stop_ids", "reuse"):
        return switch(name, value)
    if name == "on_full":
        return _word(name, value, ON_FULL)
    if name == "banned":
        banned = ids("banned", value)
        _at_most("banned", len(banned), MAX_LIST, "ids")
        return banned
    return _bias(value) if name == "bias" else _stop(value)


def _at_most(name: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise CallError(E_ARGUMENT, f"{name}: {count} {what} are too many; use 0 to {most}")


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        wrong_type("bias", value, "a mapping of token ids to numbers")
    _at_most("bias", len(value), MAX_LIST, "ids")
    items = list(value.items())
    pushes = [real(f"bias[{_shown(token)}]", push) for token, push in items]
    return dict(zip(ids("bias", [token for token, _ in items]), pushes, strict=True))


def _stop(value: object) -> list[bytes]:
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        wrong_type("stop", value, 'a text, or a list of texts, as ["END"]')
    # A str is one text: its letters are never meant.
    texts = [text("stop", item) for item in ([value] if isinstance(value, str) else value)]
    _at_most("stop", len(texts), MAX_STOPS, "texts")
    for item in texts:
        if not 1 <= len(item) <= MAX_STOP_BYTES:
            wrong_value("stop", item.decode(errors="replace"), f"1 to {MAX_STOP_BYTES} bytes")
    return texts
