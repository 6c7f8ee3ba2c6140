"""What a word of the line may be: numbers with their units, names that the daemon knows, files.

Their sentences are ours, whatever click's are: what is wrong with the word, and what may stand
there. `usage` puts the mistakes that click finds by itself into such a sentence too.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import click

from gemctl.session import ANYWHERE
from gemrun import console

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

    Choice = click.Choice[str]
    Kind = click.ParamType[Any]
else:
    Choice, Kind = click.Choice, click.ParamType  # no generics in click 8.1

MOST_FOR_S = 7 * 86400.0  # of --for
MOST_TEXT, MOST_PROMPT, MOST_STOP = 200_000, 4096, 128  # characters
MOST_TOKENS, MOST_SEED, MOST_ID = 1 << 20, (1 << 64) - 1, (1 << 32) - 1
SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Number(Kind):
    """A number from `least` to `most`, with one of `units` behind it or none.

    `above`: more than `least`, `below`: less than `most`; `whole`: no fraction; `share`: 50% is
    0.5.
    """

    name = "number"

    def __init__(
        self,
        least: float,
        most: float = math.inf,
        *units: str,
        above: bool = False,
        below: bool = False,
        whole: bool = False,
        share: bool = False,
    ) -> None:
        self.name = "N" if whole else "X"
        self.least, self.most = least, most
        self.above, self.below, self.whole, self.share = above, below, whole, share
        self.units = sorted((*units, *(["%"] if share else [])), key=len, reverse=True)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float | int:
        """The number in a word."""
        if isinstance(value, (int, float)):
            return value  # a default
        number = self._read(str(value))
        if number is None:
            what = "whole number" if self.whole else "number"
            self.fail(f"{value} is no {what}; use {self.range()}", param, ctx)
        low = number <= self.least if self.above else number < self.least
        high = number >= self.most if self.below else number > self.most
        if low or high:
            self.fail(f"{value} is out of range; use {self.range()}", param, ctx)
        return number

    def _read(self, text: str) -> float | int | None:
        digits = text.strip()
        unit = next((u for u in self.units if digits.lower().endswith(u.lower())), "")
        digits = digits[: len(digits) - len(unit)].rstrip()
        if not re.fullmatch(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?", digits, re.ASCII | re.IGNORECASE):
            return None
        try:
            number = int(digits) if self.whole else float(digits)
        except ValueError:
            return None
        return number / 100.0 if unit == "%" and self.share else number

    def range(self) -> str:
        """What may stand there."""
        least, most = str(self.least), str(self.most)
        if math.isinf(self.most):
            return f"more than {least}" if self.above else f"{least} or more"
        low = f"more than {least}, up to" if self.above else f"{least} to"
        high = f"less than {most}" if self.below else most
        return f"{low} {high}{', or up to 100%' if self.share else ''}"


class Span(Kind):
    """A time such as 90s, 10m, 2h or 1d, in seconds; more than none, `most_s` at most."""

    name = "TIME"

    def __init__(self, most_s: float = MOST_FOR_S) -> None:
        self.most_s = most_s

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Seconds."""
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([smhd])", str(value), re.ASCII)
        if match is None:
            self.fail(f"{value} is no time; use 90s, 10m or 2h", param, ctx)
        seconds = float(match[1]) * SECONDS[match[2]]
        if not 0 < seconds <= self.most_s:
            most = f"{self.most_s / SECONDS['d']:g}d"
            self.fail(f"{value} is out of range; use more than 0s, up to {most}", param, ctx)
        return seconds


class Text(Kind):
    """A text that an engine can take: so long at most, no NUL, UTF-8; `empty` where it may be."""

    name = "TEXT"

    def __init__(self, most: int, empty: bool = True) -> None:
        self.most, self.empty = most, empty

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As it is."""
        text = str(value)
        if not text and not self.empty:
            self.fail("the text is empty; give at least one character", param, ctx)
        fault = text_fault(text, self.most)
        if fault:
            self.fail(fault, param, ctx)
        return text


def text_fault(text: str, most: int) -> str:
    """Why no engine can take a text, and what to do; empty where it can."""
    if len(text) > most:
        return f"{len(text)} characters; give {most} at most"
    if "\0" in text:
        return "a NUL character; leave it out"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # what the shell gave was none
        return "no UTF-8; convert it with iconv"
    return ""


class Word(Choice):
    """One of a few words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word itself."""
        words = [str(word) for word in self.choices]
        if value not in words:
            near = console.nearest(str(value), words)[:1]
            remedy = f"did you mean {near[0]}?" if near else "use one of them"
            self.fail(f"{value} is none of {', '.join(words)}; {remedy}", param, ctx)
        return str(value)


class File(click.Path):
    """A file that is there and can be read; an artifact is no pipe and no device."""

    name = "FILE"

    def __init__(self, artifact: bool = False) -> None:
        super().__init__(dir_okay=False)
        self.artifact = artifact

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str:
        """Its path."""
        from pathlib import Path

        path = Path(value)
        if path.is_dir():
            self.fail(f"{path} is a folder; name a file in it", param, ctx)
        if not path.exists():
            self.fail(f"{path}: no such file; name one that is there", param, ctx)
        if self.artifact and not path.is_file():
            self.fail(f"{path} is no regular file; write it to one first", param, ctx)
        if not os.access(path, os.R_OK):
            self.fail(f"{path} cannot be read; look at its permissions", param, ctx)
        return str(path)


def at_most(count: int) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback: an option may stand so often."""

    def check(ctx: click.Context, param: click.Parameter, values: Any) -> Any:
        if len(values) > count:
            what = f"is given {len(values)} times; give it {count} times at most"
            raise click.BadParameter(what, ctx, param)
        return values

    return check


class ModelName(Kind):
    """The name of a model; the daemon knows which there are."""

    name = "NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As it is: whether it is known is the daemon's answer. An empty one is a mistake, such as
        a variable that is not set, and never the active model."""
        if not str(value):
            self.fail("the name is empty; name a model, see gemctl model list", param, ctx)
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Models of the daemon."""
        from gemctl import completing

        return completing.models(ctx, incomplete)


class Digest(Kind):
    """The beginning of a version's digest."""

    name = "DIGEST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """In small letters."""
        digest = str(value).lower().removeprefix("sha256:")
        if not re.fullmatch(r"[0-9a-f]{8,64}", digest, re.ASCII):
            self.fail(f"{value} is no digest; use its first 8 digits (0-9 a-f) or more", param, ctx)
        return digest

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Versions of the model that the line names, or of the active one."""
        from gemctl import completing

        return completing.digests(ctx, incomplete)


# ---- mistakes that click finds ----


class NoCommand(click.UsageError):
    """A group by itself: its help is shown on stderr, but nothing was done, and that is no success.
    A script's variable that is empty ends so. What click does of itself differs by its version."""

    def __init__(self, ctx: click.Context) -> None:
        super().__init__("no command", ctx)

    def show(self, file: Any = None) -> None:
        """The group's help."""
        click.echo(self.ctx.get_help() if self.ctx is not None else self.message, file, err=True)


def usage(error: click.ClickException) -> str:
    """A mistake in the line as `<place>: <what is wrong>; <what to do>`."""
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    param = error.param if isinstance(error, click.BadParameter) else None
    extra = re.match(r"Got unexpected extra arguments? \((.*)\)", error.message)
    if isinstance(error, console.NoSuchCommand):
        near = _meant(error, ctx)
        what = f"{error.word}: no such command; {_remedy(ctx, near)}"
    elif isinstance(error, click.NoSuchOption):
        what = f"{error.option_name}: no such option; {_remedy(ctx, _options(error, ctx))}"
    elif isinstance(error, click.MissingParameter) and param is not None:
        option = isinstance(param, click.Option)
        remedy = _remedy(ctx, []) if option else f"usage: {_usage(ctx)}"
        what = f"{_shown(param)} is missing; {remedy}"
    elif param is not None:
        what = f"{_shown(param)}: " if isinstance(param, click.Option) else ""
        what += error.message
        if ";" not in what:  # click's own sentence
            what = f"{what.rstrip('.')}; {_remedy(ctx, [])}"
    elif isinstance(error, click.BadOptionUsage) and "requires an argument" in error.message:
        what = f"{error.option_name}: its value is missing; {_remedy(ctx, [])}"
    elif extra:
        meant = _values_of(extra[1], ctx)
        remedy = _remedy(ctx, meant) if meant else f"usage: {_usage(ctx)}"
        what = f"{extra[1]}: too many words; {remedy}"
    else:
        what = f"{error.message.rstrip('.')}; {_remedy(ctx, [])}"
    place = _path(ctx).partition(" ")[2]
    return f"{place}: {what}" if place else what


def _meant(error: console.NoSuchCommand, ctx: click.Context | None) -> list[str]:
    """What a word that is no command was meant for: of `model --disable NAME` the name."""
    given = ctx.params if ctx is not None else {}
    verb = next((verb for verb in ("disable", "enable") if given.get(verb)), None)
    if verb is not None and not error.near:
        return [f"{_path(ctx)} {verb} {error.word}"]
    return [f"{_path(ctx)} {word}" for word in error.near]


def _values_of(words: str, ctx: click.Context | None) -> list[str]:
    """Options whose value a word can be that stands without one: of `throttle 75` --temp 75."""
    if ctx is None or " " in words:
        return []
    options = [p for p in ctx.command.get_params(ctx) if isinstance(p, click.Option)]
    kinds = [o for o in options if isinstance(o.type, (Number, Span, Word)) and not o.hidden]
    found = [f"{o.opts[0]} {words}" for o in kinds if _takes(o, words, ctx)]
    return found if len(found) <= 2 else []  # any more are no hint


def _takes(option: click.Option, word: str, ctx: click.Context) -> bool:
    try:
        option.type.convert(word, option, ctx)
    except click.ClickException:
        return False
    return True


def _path(ctx: click.Context | None) -> str:
    return ctx.command_path if ctx is not None else "gemctl"


def _remedy(ctx: click.Context | None, near: list[str]) -> str:
    return f"did you mean {' or '.join(near)}?" if near else f"see {_path(ctx)} --help"


def _options(error: click.NoSuchOption, ctx: click.Context | None) -> list[str]:
    """Options that look like one that is none."""
    own = [] if ctx is None else [o for p in ctx.command.get_params(ctx) for o in p.opts]
    every = [option for option in (*own, *ANYWHERE) if option.startswith("--")]
    return console.nearest(error.option_name, every) if len(error.option_name) > 2 else []


def _shown(param: click.Parameter) -> str:
    """An option or argument as it is typed."""
    option = isinstance(param, click.Option)
    return max(param.opts, key=len) if option else param.human_readable_name


def _usage(ctx: click.Context | None) -> str:
    return " ".join(ctx.get_usage().removeprefix("Usage: ").split()) if ctx else "gemctl --help"
