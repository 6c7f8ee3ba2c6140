"""PROTOCOL.md names every method, parameter, error and event that there is, and no other method;
README.md names commands, options and exit codes that there are, and no others."""

from __future__ import annotations

import re
from pathlib import Path

import click

from gemctl.api import METHODS
from gemctl.cli_commands import main
from gemctl.errors import EXIT_CODES
from gemctl.session import ANYWHERE

PACKAGE = Path(__file__).resolve().parents[2] / "gemctl"
TEXT = (PACKAGE / "PROTOCOL.md").read_text(encoding="utf-8")
README = (PACKAGE / "README.md").read_text(encoding="utf-8")


def rows() -> dict[str, str]:
    """Method -> its row of the tables."""
    found = re.findall(r"^\| `([a-z_.]+)` \|(.*)$", TEXT, re.M)
    return dict(found)


def test_methods_and_parameters() -> None:
    assert set(rows()) == set(METHODS)
    for name, method in METHODS.items():
        for parameter in method.params.model_fields:
            assert f"`{parameter}`" in rows()[name], f"{name}: {parameter} is not described"


def test_read_and_write() -> None:
    reading = TEXT.split("### Read methods")[1].split("### Write methods")[0]
    for name, method in METHODS.items():
        assert (f"| `{name}` |" in reading) == (not method.write), name


def test_errors() -> None:
    found = dict(re.findall(r"^\| (\w+) \| .* \| (\d+) \|$", TEXT, re.M))
    assert {name: int(code) for name, code in found.items()} == EXIT_CODES


def test_events() -> None:
    listed = TEXT.split("### Events")[1].split("## The engine's channel")[0]
    source = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    published = set(re.findall(r'publish\(\s*"([a-z_.]+)"', source))
    missing = {kind for kind in published if f"`{kind}`" not in listed}
    assert not missing


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that a line names, and the words behind it."""
    found: click.Command = main
    while words and isinstance(found, click.Group) and words[0] in found.commands:
        found, words = found.commands[words[0]], words[1:]
    return found, words


def test_commands_of_the_readme() -> None:
    table = README.split("| command | does |")[1].split("| exit code |")[0]
    lines = re.findall(r"`([a-z][^`]*)`", table)
    assert len(lines) > 30
    named = {command_of(re.findall(r"[^\s\[\]]+", line))[0] for line in lines}
    for line in lines:
        found, rest = command_of(re.findall(r"[^\s\[\]]+", line))
        assert found is not main, f"{line}: no such command"
        known = {option for param in found.params for option in param.opts} | {*ANYWHERE, "--help"}
        unknown = [word for word in rest if word.startswith("--") and word not in known]
        assert not unknown, f"{line}: {unknown}"
    every = [main, *(one for one in main.commands.values() if isinstance(one, click.Group))]
    leaves = {c for g in every for c in g.commands.values() if not isinstance(c, click.Group)}
    assert not [leaf.name for leaf in leaves - named], "not in the README"


def test_exit_codes_of_the_readme() -> None:
    table = README.split("| exit code | means |")[1].split("\n\n")[0]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.M)} == {
        0,
        *EXIT_CODES.values(),
    }
