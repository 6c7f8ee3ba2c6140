"""What the commands in Python have in common: how they end when nobody can be told.

    class Gembench(console.Command):     a click command (console.Group: with subcommands)
        unwritten = 8                    its exit code when standard output cannot be written

Output that cannot be written is no success: whatever option printed it, the command ends with one
sentence on stderr and that exit code. A reader that had enough, as `head`, gets no sentence; the
exit code is the same, because nobody knows whether it had all that it needed. A stderr that takes
nothing changes no exit code.

A word that is no command, and an option that is none, get those that were probably meant, however
old click is. How errors are told may be changed: `tell`, `explain` and `known` are for that.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from typing import Any, NoReturn, TextIO

import click

from gemrun.plain import one_line, plain

CANCELLED = 130  # Ctrl-C
NEAR_MOST = 3  # commands and options that are suggested
NEAR = 0.6  # of difflib's ratio: less is not alike
NEAR_BEST = 0.08  # and so far behind the best one is not meant


class Unwritten(BaseException):
    """Standard output took no more. Not an Exception: nothing may eat it."""


class _Output:
    """Standard output while a command runs: the first failure is remembered and ends the command.

    `failed` holds the system's word for it, `left` says that a reader went away; after it the
    stream leads nowhere, so that whatever is still buffered disturbs nobody at the end of the
    process.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failed = ""
        self.left = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream's; raises Unwritten."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        """As the stream's; raises Unwritten."""
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        self.failed = error.strerror or str(error)
        self.left = isinstance(error, BrokenPipeError)
        _silence(self._stream)
        raise Unwritten(self.failed) from error


def _silence(stream: TextIO) -> None:
    """Let what the stream still holds go nowhere."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def say(sentence: str) -> None:
    """One line on stderr, as far as it takes one; what names bring with them is escaped."""
    if sys.stderr is None:
        return
    try:
        print(plain(sentence), file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def echo(text: str, nl: bool = True) -> None:
    """Text on standard output; what names bring with them is escaped. JSON stays JSON."""
    click.echo(plain(text), nl=nl)


class _Ended:
    """Mixin of Command and Group; see the module's text."""

    unwritten = 8
    name: str | None

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run the command and exit the process; with `standalone_mode` off just run it."""
        run = super().main  # type: ignore[misc]
        if not standalone_mode:
            return run(*args, standalone_mode=False, **extra)
        before = sys.stdout
        output = None if before is None else _Output(before)
        if output is not None:
            sys.stdout = output
        try:
            code = self._code(lambda: run(*args, standalone_mode=False, **extra), output)
        finally:
            sys.stdout = before
        if output is not None and output.failed:
            code = code or self.unwritten
            if not output.left:
                self.tell(code, f"standard output: {output.failed}; free room on its disk")
        sys.exit(code)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The line's options. Every error names the command that it is of."""
        try:
            left: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise
        return left

    def tell(self, code: Any, sentence: str) -> None:
        """Why the command ends: one sentence. `code` is its exit code."""
        say(f"{self.name}: {sentence}")

    def explain(self, error: click.ClickException) -> None:
        """What is wrong with the line."""
        _show(error)

    def known(self, error: Exception) -> int | None:
        """The exit code of an error of the command's own, which has been told; None: a fault."""
        return None

    def _code(self, run: Any, output: _Output | None) -> Any:
        """The exit code of the body; 0 where standard output ended it."""
        try:
            try:
                result = run()
                code: int | str | None = result if isinstance(result, int) else 0
            except SystemExit as stop:
                code = stop.code
            except click.ClickException as error:
                code = error.exit_code
                self.explain(error)
            except click.Abort:
                code = CANCELLED
                self.tell(code, "stopped by SIGINT; start it again")
            except Exception as error:
                code = self.known(error)
                if code is None:
                    raise
            if output is not None:
                output.flush()
        except Unwritten:
            return 0
        return code


def _show(error: click.ClickException) -> None:
    vars(error)["message"] = one_line(error.message)  # as declared it is final
    try:
        error.show()
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


class NoSuchCommand(click.UsageError):
    """A word that is no command of a group. `near`: those that may have been meant."""

    def __init__(self, word: str, near: list[str], ctx: click.Context) -> None:
        super().__init__(f"No such command '{word}'.{did_you_mean(near)}", ctx)
        self.word = word
        self.near = near


def did_you_mean(near: Iterable[str]) -> str:
    """A question behind a sentence; nothing where nothing is near."""
    words = [f"'{word}'" for word in near]
    return f" Did you mean {' or '.join(words)}?" if words else ""


def nearest(word: str, words: Iterable[str]) -> list[str]:
    """Those of `words` that look most like `word`, best first; of "a b" the last part counts."""
    from difflib import SequenceMatcher

    def alike(one: str) -> float:
        parts = {one, one.split()[-1]}
        return max(SequenceMatcher(None, word, part).ratio() for part in parts)

    found = [(alike(one), one) for one in dict.fromkeys(words)]
    least = max(NEAR, max((ratio for ratio, _ in found), default=0.0) - NEAR_BEST)
    near = sorted((pair for pair in found if pair[0] >= least), key=lambda pair: -pair[0])
    return [one for _, one in near[:NEAR_MOST]]


class FileName(click.Path):
    """The type of an option that names a file or folder. An empty name, as of a variable that is
    not set, would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. Raises click.BadParameter for an empty one."""
        if value in ("", b""):
            self.fail("the name is empty; name a file or folder", param, ctx)
        return super().convert(value, param, ctx)


class Command(_Ended, click.Command):
    """A command whose output is written, or that says so."""


class Group(_Ended, click.Group):
    """A group of commands, the same; who mistypes one is told which there are."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the line names. Raises NoSuchCommand."""
        word = args[0]
        asked = not ctx.resilient_parsing and not word.startswith("-")
        if asked and self.get_command(ctx, word) is None:
            raise NoSuchCommand(word, nearest(word, self._words(ctx)), ctx)
        return super().resolve_command(ctx, args)

    def _words(self, ctx: click.Context) -> list[str]:
        """Its commands, and those of the groups below it with their group's name."""
        found: list[str] = []
        for name in self.list_commands(ctx):
            found.append(name)
            below = self.get_command(ctx, name)
            if isinstance(below, click.Group):
                found += [f"{name} {word}" for word in below.list_commands(ctx)]
        return found
