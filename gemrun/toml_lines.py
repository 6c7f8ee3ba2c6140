"""Where a key of a TOML file stands, for messages: tomllib keeps no lines.

line_of(text, ["models", "keep"])             the line of keep below [models]
line_of(text, ["power_mode", "25W", "id"])    in an array of tables: by id, label or field
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LINES_MOST = 64  # places of a key that are looked at
VALUE_MOST = 1000  # lines of one value
READ_MOST = 8 << 20  # characters that are parsed in all: a message may do without a line
NAMED_BY = ("id", "label", "field")


def line_of(text: str, keys: Sequence[str]) -> int | None:
    """The line where a key begins, from 1; None where that is not to be found.

    It is the one with which the beginning of the file is TOML that has the key.
    """
    lines, turns = text.split("\n"), iter(range(max(2, READ_MOST // max(1, len(text)))))
    places = [n for n, line in enumerate(lines, 1) if keys and keys[-1] in line]
    for number in places[:LINES_MOST]:
        before = _parsed(lines[: number - 1], turns)
        if before is not None and not has(before, keys) and _begins(lines, number, keys, turns):
            return number
    return None


def has(found: Any, keys: Sequence[str]) -> bool:
    """Whether a parsed file has a key."""
    for name in keys:
        if isinstance(found, list):
            found = next((entry for entry in found if _called(entry, name)), None)
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return False
    return found is not None


def _called(entry: Any, name: str) -> bool:
    return isinstance(entry, dict) and any(entry.get(key) == name for key in NAMED_BY)


def _begins(lines: Sequence[str], number: int, keys: Sequence[str], turns: Iterator[int]) -> bool:
    for end in range(number, min(len(lines), number + VALUE_MOST) + 1):
        found = _parsed(lines[:end], turns)
        if found is not None:
            return has(found, keys)
    return False


def _parsed(lines: Sequence[str], turns: Iterator[int]) -> Mapping[str, Any] | None:
    """The beginning of a file; None where it is no TOML, or no turn is left to parse it."""
    if next(turns, None) is None:
        return None
    loads: Callable[[str], Mapping[str, Any]] = tomllib.loads
    try:
        return loads("\n".join(lines))
    except (ValueError, RecursionError):
        return None
