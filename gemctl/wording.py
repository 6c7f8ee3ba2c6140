"""What pydantic finds wrong with a parameter, in the project's words.

    sentence(error, GenerateParams.model_json_schema())
    "max_tokens: 0 is out of range; use 1 to 1048576"

Values are shown where they are numbers or short words; never a text that somebody wrote.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

# pydantic's word -> what is wrong, and what to do. {x} is of the error's context.
WORDS = {
    "missing": "is missing; give it",
    "string_type": "is no text; put it in quotes",
    "string_unicode": "is no UTF-8; send UTF-8",
    "string_too_short": "is empty; give at least {min_length} character",
    "string_too_long": "is longer than {max_length} characters; shorten it",
    "int_from_float": "is no whole number; leave the fraction out",
    "bool_type": "is neither true nor false; give one of them, without quotes",
    "list_type": "is no list; put it in [ ]",
    "too_long": "has more than {max_length} entries; give fewer",
    "too_short": "is an empty list; give at least {min_length} entry",
    "model_type": "is no object; put it in {{ }}",
    "dict_type": "is no object; put it in {{ }}",
    "literal_error": "{value} is none of {expected}; use one of them",
}
NO_NUMBER = {
    "int_type": "is no whole number",
    "float_type": "is no number",
    "finite_number": "is no number",
}
BEYOND = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "int_parsing_size")
# Patterns of names -> what they say.
PATTERNS = {
    r"^[a-z0-9][a-z0-9._-]{0,63}$": (
        "is no name; use a-z, 0-9 and . _ - (a letter or digit first), at most 64 characters"
    ),
    r"^[0-9a-f]{8,64}$": "is no digest; use its first 8 digits (0-9 a-f) or more",
}
SHOWN_MOST = 40  # characters of a value


def first(error: ValidationError, model: type[BaseModel]) -> str:
    """The first mistake; a name that is none comes first, for the one that is missing is meant."""
    found = error.errors(include_url=False)
    chosen = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
    return sentence(dict(chosen), model.model_json_schema())


def sentence(error: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """One error of ValidationError.errors(), with the JSON schema of what was read."""
    kind = str(error["type"])
    place = ".".join(str(part)[:64] for part in error["loc"]) or "params"
    return f"{place}: {_what(kind, error, _entries(schema, error['loc'][:-1]))}"


def _what(kind: str, error: Mapping[str, Any], beside: Mapping[str, Any]) -> str:
    context, value = dict(error.get("ctx") or {}), shown(error.get("input"))
    if kind == "extra_forbidden":
        return f"is unknown; {remedy(str(error['loc'][-1]), beside)}"
    if kind == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    if kind == "string_pattern_mismatch":
        pattern = str(context.get("pattern"))
        return f"{value} {PATTERNS.get(pattern, f'does not look like {pattern}; mend it')}".strip()
    wanted = beside.get(str(error["loc"][-1]), {}) if error["loc"] else {}
    if kind in BEYOND:
        return f"{value} is out of range; use {_range(wanted)}".strip()
    if kind in NO_NUMBER:
        return f"{NO_NUMBER[kind]}; use {_range(wanted)}, without quotes"
    words = WORDS.get(kind)
    if words is None:  # of a pydantic that is newer than this table
        return f"{str(error['msg'])[:1].lower()}{str(error['msg'])[1:]}; mend it"
    expected = str(context.get("expected", "")).replace("'", "").replace(" or ", ", ")
    return words.format(**{**context, "expected": expected, "value": value}).strip()


def _entries(schema: Mapping[str, Any], place: Iterable[int | str]) -> Mapping[str, Any]:
    """What stands in the object at a place: parameter -> its schema; "0" for entries of a list."""
    found = dict(schema)
    for part in place:
        found = _plain(dict(_inside(found, part) or {}), schema)
    inside = found.get("items")
    return found.get("properties") or ({} if inside is None else _All(_plain(inside, schema)))


def _inside(found: Mapping[str, Any], part: int | str) -> Any:
    """The schema of an entry: of a list, of an object, or of one whose keys are anybody's."""
    if isinstance(part, int):
        return found.get("items")
    patterns = found.get("patternProperties") or {"": found.get("additionalProperties")}
    named = (found.get("properties") or {}).get(part)
    return named or next((one for one in patterns.values() if isinstance(one, dict)), None)


class _All(dict[str, Any]):
    """A list's entries: each one's schema is the same."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        super().__init__()
        self._entry = entry

    def get(self, key: str, otherwise: Any = None) -> Any:
        """The schema of an entry."""
        return self._entry


def _plain(found: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without the null that stands for "absent", and with what it refers to."""
    some = [one for one in found.get("anyOf", []) if one.get("type") != "null"]
    made = {**found, **(some[0] if some else {})}
    name = str(made.get("$ref", "")).rpartition("/")[2]
    return {**made, **schema["$defs"][name]} if name else made


def _range(wanted: Mapping[str, Any]) -> str:
    """What a number may be."""
    plain = _plain(wanted, {})
    low, high = plain.get("minimum"), plain.get("maximum")
    above, below = plain.get("exclusiveMinimum"), plain.get("exclusiveMaximum")
    least = f"more than {above:.20g}" if low is None and above is not None else f"{low or 0:.20g}"
    if high is None and below is None:
        return f"{least} or more" if above is None else least
    most = f"less than {below}" if high is None else f"{high:.20g}"
    return f"{least}, up to {most}" if above is not None else f"{least} to {most}"


def remedy(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """What to do about a name that is none of the known ones."""
    names = list(known)
    near = difflib.get_close_matches(word[:64], names, 1)
    if near:
        return f"did you mean {near[0]}?"
    return otherwise or (f"it takes {', '.join(names)}" if names else "leave it out")


def shown(value: Any) -> str:
    """A value as it was given, where it is short; nothing where it is not."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = f"{value:.12g}" if isinstance(value, float) else str(value)
    simple = isinstance(value, (int, float, str)) and text.isprintable()
    return text if simple and len(text) <= SHOWN_MOST else ""
