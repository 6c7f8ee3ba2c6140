"""What is wrong with a configuration file, in sentences: file, line, key, mistake, remedy.

/etc/gemctl/gemctl.toml:12: models.keep: 40 is out of range; give a whole number from 1 to 16
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from gemrun.toml_lines import line_of

SHOWN = 8  # mistakes at once
OTHERS = "all keys: gemctl config schema"
# Of a name's pattern; and of what tomllib says where a key or a table stands twice.
NAMES = {
    r"^[A-Za-z0-9_-]{1,64}$": "1 to 64 letters, digits, _ and -",
    r"^[A-Za-z0-9_-]{0,64}$": "up to 64 letters, digits, _ and -",
}
# What helps in a file -> in a command's line.
REMEDIES = {
    "set tls = true or ca_file, or insecure = true": "give --ca-file, or --insecure",
    "set username": "give --username",
}
TWICE = ("Cannot overwrite", "Cannot declare", "Cannot mutate")
KINDS = {
    "integer": "whole number",
    "number": "number",
    "boolean": "truth value",
    "array": "list",
    "object": "table",
}
Table = Mapping[str, Any]


def of_syntax(place: str, error: ValueError) -> str:
    """The sentence for a file that is no TOML."""
    what, _, where = str(error).rpartition(" (at ")
    match = re.fullmatch(r"line (\d+), column (\d+)\)", where)
    if match is not None:
        place = f"{place}:{match[1]}"
    if what.startswith(TWICE):
        return f"{place}: no TOML: a key or table stands twice; leave one of them out"
    if match is None:  # at the end of the file
        return f"{place}: no TOML: {_lower(what)}; mend its end"
    return f"{place}: no TOML: {_lower(what)} (column {match[2]}); mend that line"


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def of_values(place: str, text: str, error: ValidationError, model: type[BaseModel]) -> str:
    """A line for each mistake in a file that is TOML."""
    schema = model.model_json_schema()
    found = error.errors(include_url=False)
    placed = [(line_of(text, _keys(one)), one) for one in found[:SHOWN]]
    placed.sort(key=lambda pair: pair[0] or 0)
    lines = [_located(place, line, one, schema) for line, one in placed]
    if len(found) > SHOWN:
        lines.append(f"{place}: {len(found) - SHOWN} more; mend these first")
    return "\n".join(lines)


def of_options(error: ValidationError, model: type[BaseModel]) -> str:
    """The first mistake, where values are options of a command: --ca-file for ca_file."""
    one = error.errors(include_url=False)[0]
    keys, what = _keys(one), _what(one, model.model_json_schema())
    for in_file, in_line in REMEDIES.items():
        what = what.replace(in_file, in_line)
    return f"--{'-'.join(keys).replace('_', '-')}: {what}"


def _located(place: str, line: int | None, one: Any, schema: Table) -> str:
    where = place if line is None else f"{place}:{line}"
    return f"{where}: {'.'.join(_keys(one)) or 'file'}: {_what(one, schema)}"


def _keys(one: Any) -> list[str]:
    """Names on the way to a mistake; the number of an entry in a list is none."""
    more = one.get("ctx", {}).get("key") if one["type"] == "gemctl" else None
    return [part for part in one["loc"] if isinstance(part, str)] + (
        more.split(".") if more else []
    )


def _what(one: Any, schema: Table) -> str:
    """Mistake and remedy."""
    keys = _keys(one)
    if one["type"] == "gemctl":
        return str(one["msg"])
    if one["type"] == "extra_forbidden":
        return f"unknown key; {_meant(keys, schema)}"
    wanted = _entry(schema, keys)
    if wanted.get("properties") is not None:
        return f"{_shown(one['input'])} is no table; write [{'.'.join(keys)}], and its keys below"
    entry = isinstance(one["loc"][-1], int)
    wanted = _plain(wanted.get("items", wanted), schema) if entry else wanted
    return f"{_mistake(one, wanted)}; give {_allowed(wanted)}"


def _mistake(one: Any, wanted: Table) -> str:
    kind, value = str(one["type"]), _shown(one["input"])
    if kind.startswith(("greater_than", "less_than")):
        return f"{value} is out of range"
    if kind in ("string_too_long", "too_long"):
        return f"{len(one['input'])} are too many"
    if kind in ("literal_error", "string_pattern_mismatch"):
        return f"{value} cannot be used"
    return f"{value} is no {KINDS.get(str(wanted.get('type')), 'text')}"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _meant(keys: Sequence[str], schema: Table) -> str:
    """What an unknown key may have been meant to be."""
    tables, wrong = keys[:-1], keys[-1]
    beside = list(_entry(schema, tables).get("properties", {}))
    near = difflib.get_close_matches(wrong, beside, 1)
    if near:
        return f"did you mean {near[0]}?"
    homes = [name for name in schema["properties"] if wrong in _below(schema, name)]
    if homes:
        return f"it belongs into the table [{homes[0]}]"
    return f"leave it out; {OTHERS}"


def _below(schema: Table, name: str) -> Table:
    properties: Table = _entry(schema, [name]).get("properties", {})
    return properties


def _entry(schema: Table, keys: Sequence[str]) -> Table:
    """What the schema says of a key; empty where it knows none."""
    found: Table = schema
    for name in keys:
        found = _plain(found.get("properties", {}).get(name, {}), schema)
    return found


def _plain(found: Table, schema: Table) -> Table:
    """An entry with what it refers to, and without the null that stands for "absent"."""
    some = [one for one in found.get("anyOf", []) if one.get("type") != "null"]
    if some:
        found = {**found, **some[0]}
    if "$ref" in found:
        found = {**schema["$defs"][found["$ref"].rpartition("/")[2]], **found}
    return found


def _allowed(wanted: Table) -> str:
    """What a key takes, in words."""
    kind, most = wanted.get("type"), wanted.get("maxLength")
    if "enum" in wanted:
        return f"one of {', '.join(json.dumps(word) for word in wanted['enum'])}"
    if kind in ("integer", "number"):
        unit = wanted.get("unit", "")
        return f"a {KINDS[kind]} {_range(wanted)}" + (f" {unit}" if unit != "port" else "")
    if kind == "boolean":
        return "true or false"
    if kind == "array":
        return f'a list of at most {wanted.get("maxItems")} texts, such as ["a", "b"]'
    if wanted.get("format") == "path":
        return "a path in quotes"
    if wanted.get("pattern") in NAMES:
        return NAMES[wanted["pattern"]]
    return "a text in quotes" + (f" of at most {most} characters" if most else "")


def _range(wanted: Table) -> str:
    low, most = wanted.get("minimum"), wanted.get("maximum")
    if low is None:
        return f"above {wanted.get('exclusiveMinimum')}, at most {most:.20g}"
    return f"from {low:.20g} to {most:.20g}"
