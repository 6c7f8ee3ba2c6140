"""JSON as front ends take it: UTF-8, within limits, and nothing that could mean two things."""

from __future__ import annotations

import json
import math
import re
from typing import Any

DEPTH = 16  # of objects and arrays inside each other
DIGITS = 20  # of a whole number
HALF_PAIR = "half of a surrogate pair in an escape; send whole characters in UTF-8"
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # what breaks a line or ends a text

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.S)  # matches at every quote: linear
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def loads(data: bytes) -> Any:
    """A value. ValueError with what is wrong, UnicodeDecodeError and JSONDecodeError among them:
    a key twice, NaN, an infinity or a number that is one, too many digits, too deep."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            parse_int=_whole,
            parse_float=_number,
            parse_constant=_constant,
            object_pairs_hook=_once,
        )
    except RecursionError:
        raise _too_deep() from None
    if _is_deep(data):
        raise _too_deep()
    return value


def has_half_pair(value: Any, data: bytes) -> bool:
    """Whether a text in `value`, which `data` said, is none: escapes make what UTF-8 cannot say."""
    if b"\\u" not in data:
        return False
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _too_deep() -> ValueError:
    return ValueError(f"nested deeper than {DEPTH}")


def _is_deep(data: bytes) -> bool:
    """Brackets, those inside strings aside, are nested deeper than DEPTH."""
    rest = _STRING.sub(b"", data).translate(_BRACKETS, _OTHERS)
    for _ in range(DEPTH):
        rest = rest.replace(b"[]", b"")
    return bool(rest)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key[:64]!a} stands twice")
        made[key] = value
    return made


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > DIGITS:
        raise ValueError(f"a whole number has more than {DIGITS} digits")
    return int(digits)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON")
