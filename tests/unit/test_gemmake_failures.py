"""Every kind of error ends as one sentence with its exit code; stop requests unwind once."""

from __future__ import annotations

import os
import signal

import pytest
from pydantic import BaseModel

from gemmake.errors import ArtifactError, GemError, OutputError, TargetError, UsageError
from gemmake.failures import (
    HostError,
    InternalError,
    Stopped,
    command,
    sentences,
    stoppable,
    translated,
)
from gemmake.passes.quant import HelperError
from gemrun.errors import error_of
from gemrun.format.codes import Code, FormatError
from gemrun.format.writer import WriteError


class Positive(BaseModel):
    cores: int


def invalid() -> Exception:
    try:
        Positive.model_validate({"cores": "ten"})
    except ValueError as error:
        return error
    raise AssertionError


CASES = [
    (WriteError("x: full; free some"), OutputError, 7),
    (FormatError(Code.MAGIC, "no magic", "rebuild"), ArtifactError, 6),
    (MemoryError("scratch"), HostError, 1),
    (error_of(-70, "x: no room; close others"), HostError, 1),
    (error_of(-24, "damaged; copy it again"), ArtifactError, 6),
    (invalid(), TargetError, 4),
    (OSError(28, "No space left on device", b"\xff.bin"), HostError, 1),
    (OSError("odd"), HostError, 1),
    (HelperError("pack: wrong size"), InternalError, 1),
    (ZeroDivisionError("division\nby zero"), InternalError, 1),
]


@pytest.mark.parametrize(("error", "kind", "code"), CASES, ids=lambda c: type(c).__name__)
def test_errors_become_one_sentence(error: Exception, kind: type[GemError], code: int) -> None:
    found = translated(error)
    assert type(found) is kind
    assert found.exit_code == code
    assert "; " in str(found)
    assert len(str(found).splitlines()) == 1


def test_the_body_of_a_command_exits_with_code_and_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exited, command("tool", debug=False):
        raise UsageError("--x: wrong; use --y")
    assert exited.value.code == 2
    assert capsys.readouterr().err == "tool: --x: wrong; use --y\n"


def test_debug_shows_where_it_came_from() -> None:
    with pytest.raises(InternalError) as raised, command("tool", debug=True):
        raise KeyError("inner")
    assert isinstance(raised.value.__cause__, KeyError)


def test_what_is_no_exception_passes_through() -> None:
    with pytest.raises(SystemExit), sentences():
        raise SystemExit(3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_request_unwinds_once_and_later_ones_are_ignored(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    cleaned: list[bool] = []

    def body() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(True)

    with pytest.raises(SystemExit) as exited, command("tool", debug=False):
        body()
    assert exited.value.code == 128 + number
    assert cleaned == [True]
    assert number.name in capsys.readouterr().err
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_stopped_is_no_exception_that_a_handler_could_eat() -> None:
    def careless() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception:
            pytest.fail("swallowed")

    with pytest.raises(Stopped), stoppable():
        careless()
