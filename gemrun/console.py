"""What the commands in Python have in common: how they end when nobody can be told.

    class Gembench(console.Command):     a click command (console.Group: with subcommands)
        unwritten = 8                    its exit code when standard output cannot be written

Output that cannot be written is no success: whatever option printed it, the command ends with one
sentence on stderr and that exit code. A stderr that takes nothing changes no exit code.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, NoReturn, TextIO

import click

CANCELLED = 130  # Ctrl-C


class Unwritten(BaseException):
    """Standard output took no more. Not an Exception: nothing may eat it."""


class _Output:
    """Standard output while a command runs: the first failure is remembered and ends the command.

    `failed` holds the system's word for it; after it the stream leads nowhere, so that whatever
    is still buffered disturbs nobody at the end of the process.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failed = ""

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
        _silence(self._stream)
        raise Unwritten(self.failed) from error


def _silence(stream: TextIO) -> None:
    """Let what the stream still holds go nowhere."""
    with contextlib.suppress(OSError, ValueError):  # a stream in memory has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def say(sentence: str) -> None:
    """One line on stderr, as far as it takes one."""
    try:
        print(sentence, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


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
            say(
                f"{self.name}: standard output: {output.failed}; free room on its disk, or give "
                "it a reader that stays"
            )
            code = code or self.unwritten
        sys.exit(code)

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
                _show(error)
            except click.Abort:
                code = CANCELLED
                say(f"{self.name}: stopped by SIGINT; start it again")
            if output is not None:
                output.flush()
        except Unwritten:
            return 0
        return code


def _show(error: click.ClickException) -> None:
    try:
        error.show()
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


class Command(_Ended, click.Command):
    """A command whose output is written, or that says so."""


class Group(_Ended, click.Group):
    """A group of commands, the same."""
