"""Errors of the engine, one class per kind of remedy; `code` is the number of `gemrun_status`.

GemRunError                     base: code and one sentence
+-- CallError                   the call: an argument or a setting (also a ValueError)
|   +-- ArgumentTypeError       an argument of another type than wanted (also a TypeError)
|   +-- PromptError             the prompt is empty, or longer than what is planned for it
|   +-- ContextFullError        no room left in the context
|   +-- NoChatError             no chat template, or messages that do not fit it
|   +-- BusyError               another thread is inside the context
|   +-- ClosedError             used after close(), or in a process forked after opening
+-- ArtifactError               the file: damaged, foreign or too new
+-- MachineError                the machine: a mapping or thread was refused
|   +-- NotEnoughMemoryError    less memory available than the artifact declares
|   +-- ForeignBoardError       the artifact was built for another board
+-- RunError                    the run
    +-- TestVectorError         a stored test vector gave another answer
    +-- NonFiniteError          NaN or infinity in activations or logits

MemoryLockWarning is no error: `lock_memory` could not lock all of it.
"""

from __future__ import annotations


class GemRunError(Exception):
    """Base of all errors of the engine. Text: `<object>: <what is wrong>; <what to do>`."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class CallError(GemRunError, ValueError):
    """An argument or a setting is out of its range."""


class ArgumentTypeError(CallError, TypeError):
    """An argument or a setting is of another type than wanted."""


class PromptError(CallError):
    """The prompt is empty, or it or a text is longer than what is planned for it."""


class ContextFullError(CallError):
    """No room is left in the context."""


class NoChatError(CallError):
    """The artifact has no chat template, or the messages do not fit it."""


class BusyError(CallError):
    """Another thread is inside the context."""


class ClosedError(CallError):
    """The context was closed, or belongs to the process that this one was forked from."""


class ArtifactError(GemRunError):
    """The file is damaged, no artifact, or too new for this engine."""


class MachineError(GemRunError):
    """The machine refused a mapping or a thread."""


class NotEnoughMemoryError(MachineError):
    """Less memory is available than the artifact declares."""


class ForeignBoardError(MachineError):
    """The artifact was built for another board that is known."""


class BoardWarning(UserWarning):
    """The artifact was built for a board, and this machine is none that is known."""


class RunError(GemRunError):
    """The run itself failed."""


class TestVectorError(RunError):
    """A stored test vector gave another answer: this machine or build cannot be trusted."""

    __test__ = False  # no test case, whatever pytest makes of the name


class NonFiniteError(RunError):
    """NaN or infinity in activations or logits."""


class MemoryLockWarning(RuntimeWarning):
    """Less memory is locked than was asked for: pages may be taken away, and read again."""


_BY_CODE: dict[int, type[GemRunError]] = {
    -2: BusyError,
    -3: PromptError,
    -4: PromptError,
    -5: NoChatError,
    -11: ContextFullError,
    -70: NotEnoughMemoryError,
    -72: ForeignBoardError,
    -80: TestVectorError,
    -90: NonFiniteError,
}


def error_of(code: int, sentence: str) -> GemRunError:
    """The error for a negative status."""
    if code in _BY_CODE:
        return _BY_CODE[code](code, sentence)
    if code > -20:
        return CallError(code, sentence)
    if code > -70:
        return ArtifactError(code, sentence)
    return MachineError(code, sentence) if code > -80 else RunError(code, sentence)
