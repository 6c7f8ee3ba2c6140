"""Every failure becomes one sentence and an exit code; a stop request cleans up and says so.

    with command("gemmake", debug):     the body of a command; exits the process on any failure
        with sentences():               errors of every kind, in and out of our code, as GemError
            ...

Exit codes: those of GemError's classes (errors.py), 1 for a lack of memory and for faults of the
tool itself, 130 after Ctrl-C, 143 after SIGTERM. This module imports nothing heavy, so that a
command is under its protection as early as can be.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from gemmake.errors import ArtifactError, BudgetError, GemError, OutputError, TargetError
from gemrun import console
from gemrun.plain import one_line

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HostError(GemError):
    """The machine that compiles ran out of something, or an input could not be read."""


class InternalError(GemError):
    """A fault of the tool itself."""


class Stopped(BaseException):
    """The user or the system asked the command to stop. Not an Exception: nothing may eat it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@contextlib.contextmanager
def command(tool: str, debug: bool, stopped: str = "start it again") -> Iterator[None]:
    """Run the body of a command. Failures print `<tool>: <sentence>` and exit; with `debug` they
    are raised. SIGINT and SIGTERM unwind the body once, so that it removes what it has begun;
    `stopped` says what that leaves."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # no encoding may turn a message into a failure
            stream.reconfigure(errors="backslashreplace")
    try:
        with stoppable(), sentences():
            yield
    except Stopped as stop:
        _leave(tool, f"stopped by {stop}; {stopped}", stop.exit_code)
    except GemError as error:
        if debug:
            raise
        table = isinstance(error, BudgetError)  # the one that has lines of its own
        _leave(tool, str(error) if table else one_line(str(error)), error.exit_code)


def _leave(tool: str, sentence: str, code: int) -> NoReturn:
    console.say(f"{tool}: {sentence}")
    sys.exit(code)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise Stopped(number)


def past_stopping() -> None:
    """The output is being put in place: a signal that comes from now on is too late to change what
    the command says, and is ignored. Nothing happens outside a command."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _stop:
            signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM raise Stopped once; further ones are ignored while the body cleans up."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, _stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Turn errors of libraries, of the system and of our own lower layers into GemError."""
    try:
        yield
    except GemError:
        raise
    except Exception as error:
        raise translated(error) from error


def translated(error: Exception) -> GemError:
    """The GemError that says what another error means to a user."""
    from pydantic import ValidationError

    from gemrun.errors import GemRunError, MachineError
    from gemrun.format.codes import FormatError
    from gemrun.format.writer import WriteError

    if isinstance(error, WriteError):
        return OutputError(str(error))
    if isinstance(error, FormatError):
        return ArtifactError(str(error))
    if isinstance(error, MemoryError):
        return _memory(str(error))
    if isinstance(error, MachineError):
        return _memory(f"engine: {error}")
    if isinstance(error, GemRunError):
        return ArtifactError(f"engine: {error} (status {error.code})")
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return TargetError(f"{error.title}: {place}: {first['msg']}; correct the value")
    if isinstance(error, OSError):
        return _system(error)
    return InternalError(
        f"internal fault: {type(error).__name__}: {' '.join(str(error).split())}; "
        "run again with --debug and report the traceback"
    )


def _memory(what: str) -> HostError:
    return HostError(
        f"host: out of memory{': ' if what else ''}{what}; "
        "close other programs, use fewer --workers or a machine with more memory"
    )


def _system(error: OSError) -> HostError:
    names = [n for n in (error.filename, error.filename2) if isinstance(n, str | bytes)]
    where = os.fsencode(names[0]).decode("utf-8", "backslashreplace") if names else "host"
    reason = error.strerror or str(error)
    return HostError(f"{where}: {reason}; check the path, its permissions and the free space")
