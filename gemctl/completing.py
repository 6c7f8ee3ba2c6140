"""Completion of gemctl's line in bash, zsh and fish: click's scripts, and what click cannot know.

The options that may stand anywhere are completed anywhere, names of models and versions come from
the daemon. No daemon, or one that is slow: nothing, and nobody is told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import click
from click import shell_completion
from click.shell_completion import CompletionItem, ShellComplete

from gemctl.client import Client, Refused
from gemctl.session import ANYWHERE, Session, take_options
from gemctl.show import render

WAIT_S = 0.1  # for the daemon: somebody has pressed a key
SOURCES = ("hwmon:", "iio:", "file:", "mqtt:")
BREAKS = ("=", ":")  # bash makes words of their own of these
Item = CompletionItem
SHELLS: dict[str, type[ShellComplete]] = {
    "bash": shell_completion.BashComplete,
    "zsh": shell_completion.ZshComplete,
    "fish": shell_completion.FishComplete,
}
# Commands of which a program that attached itself takes none.
OWN_ONLY = ("generate", "load", "unload", "pin", "priority", "switch", "switch-model", "remove")


def script(shell: str) -> str:
    """A shell's script."""
    return _made(shell).source()


def answer(instruction: str) -> int:
    """Print what may stand at the cursor, for the shell that asks. The exit code."""
    shell = instruction.partition("_")[0]
    if shell not in SHELLS:
        return 1
    words = _made(shell)
    with contextlib.suppress(Refused):
        args, incomplete = words.get_completion_args()
        cut = 0
        if shell == "bash":
            args, incomplete, cut = joined(args, incomplete)
        for item in completions(args, incomplete):
            item.value = item.value[cut:]
            if shell == "fish" and item.help:  # its script splits at commas
                item.help = item.help.replace(",", ";")
            click.echo(words.format_completion(item))
    return 0


def _made(shell: str) -> ShellComplete:
    from gemctl.cli_commands import main

    return SHELLS[shell](main, {}, "gemctl", "_GEMCTL_COMPLETE")


def joined(args: list[str], incomplete: str) -> tuple[list[str], str, int]:
    """What bash took apart at = and :, put together again; and how much of the last word bash does
    not want to hear again."""
    words: list[str] = []
    glue = False
    cut = 0
    for word in [*args, incomplete]:
        here = bool(words) and word in BREAKS
        if here or glue:
            words[-1] += word
            cut = len(words[-1]) if here else len(words[-1]) - len(word)
        else:
            words.append(word)
            cut = 0
        glue = here
    return words[:-1], words[-1], cut


def completions(args: list[str], incomplete: str) -> list[Item[str]]:
    """What may stand in the place of `incomplete` behind the words `args`."""
    option, equals, value = incomplete.partition("=")
    if option.startswith("--") and equals:
        return [_with(f"{option}=", item) for item in completions([*args, option], value)]
    if args and ANYWHERE.get(args[-1], ("", ""))[0] and "--" not in args:
        return _values_of(args[-1], incomplete)
    session, rest = take_options(args)
    found = _of_click(session, rest, incomplete)
    if incomplete.startswith("-") and "--" not in args:
        found += [
            Item(word, help=text)
            for word, (_, text) in ANYWHERE.items()
            if word.startswith(incomplete)
        ]
    return found


def _with(prefix: str, item: Item[str]) -> Item[str]:
    item.value = prefix + item.value
    return item


def _values_of(option: str, incomplete: str) -> list[Item[str]]:
    if option == "--socket":
        return [Item(incomplete, type="file")]
    return [Item(word) for word in SOURCES if word.startswith(incomplete)]


def _of_click(session: Session, args: list[str], incomplete: str) -> list[Item[str]]:
    from gemctl.cli_commands import main

    words = ShellComplete(main, {"obj": session}, "gemctl", "_GEMCTL_COMPLETE")
    return list(words.get_completions(args, incomplete))


# ---- what the daemon knows ----


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with contextlib.suppress(Refused, OSError, ValueError, KeyError, TypeError):
        yield


def _ask(ctx: click.Context, method: str, **params: Any) -> dict[str, Any]:
    with Client(ctx.find_object(Session).socket, WAIT_S) as client:  # type: ignore[union-attr]
        return client.call(method, params)


def models(ctx: click.Context, incomplete: str) -> list[Item[str]]:
    """Names of models, each with its state."""
    found: list[Item[str]] = []
    with _quietly():
        for model in _ask(ctx, "model.list")["models"]:
            fits = model["name"].startswith(incomplete)
            if fits and not (model.get("attached") and ctx.command.name in OWN_ONLY):
                active = ", active" if model["active"] else ""
                found.append(Item(model["name"], help=f"{model['state']}{active}"))
    return found


def digests(ctx: click.Context, incomplete: str) -> list[Item[str]]:
    """Beginnings of the digests of the model that the line names, or of the active one."""
    found: list[Item[str]] = []
    name = ctx.params.get("name") or next(iter(ctx.args), None)
    with _quietly():
        status = _ask(ctx, "model.status", **({"name": name} if name else {}))
        for version in status["present"]:
            digest = version["digest"]
            marks = render.mark(status, digest)
            if digest.startswith(incomplete):
                short = digest[: max(12, len(incomplete))]
                found.append(Item(short, help=marks or "in the store"))
    return found
