"""Errors that cross the socket: a stable word, one sentence, and whether to try again.

The command's exit code follows from the word (EXIT_CODES): scripts test that, never the sentence.
"""

from __future__ import annotations

import errno
from typing import Literal

from gemctl.codes import BY_CALLER, EXIT_CODES, RETRYABLE

__all__ = ["BY_CALLER", "EXIT_CODES", "OUT_OF", "RETRYABLE", "ApiError", "Code", "of_system"]

Code = Literal[
    "bad_request",  # not understood: a field is missing, of another type, out of range
    "forbidden",  # the caller may not do this
    "not_found",  # no such model, version or request
    "conflict",  # the slot's state does not allow it now
    "busy",  # the queue is full, or the daemon is paused; try later
    "no_memory",  # it does not fit beside what runs
    "refused",  # the candidate failed a check: damaged, other board, signature, test vectors
    "layout",  # another KV size or layout, and --allow-layout-change was not given
    "timeout",  # the deadline has passed
    "failed",  # it was tried and failed: the worker ended, the run reported an error
    "no_space",  # the store's disk is full or read-only
    "cancelled",  # ended by a cancel, a drain or a shutdown
    "internal",  # a fault of the daemon
]


class ApiError(Exception):
    """What a caller is told. Text: `<object>: <what is wrong>; <what to do>`."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message

    @property
    def retryable(self) -> bool:
        """True where the same request may succeed later."""
        return self.code in RETRYABLE

    def as_dict(self) -> dict[str, object]:
        """The `error` object of a reply."""
        return {"code": self.code, "message": self.message, "retryable": self.retryable}


# What the system is short of -> the word, and what helps.
_SHORT: dict[int, tuple[Code, str]] = {
    errno.ENOMEM: ("no_memory", "unload a model, or give the daemon more memory"),
    errno.EMFILE: ("busy", "raise the daemon's limit of open files (LimitNOFILE)"),
    errno.ENFILE: ("busy", "close files of other programs"),
    errno.EAGAIN: ("busy", "raise the daemon's limit of processes (TasksMax)"),
    errno.ENOSPC: ("no_space", "free room on its disk"),
    errno.EDQUOT: ("no_space", "free room on its disk, or raise its quota"),
    errno.EROFS: ("no_space", "mount it writable"),
}
# Of those, what is missing to the daemon itself: no file and no disk is to blame.
OUT_OF = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN})


def of_system(what: str, error: OSError | MemoryError) -> ApiError:
    """What the system refused, in its own word; `what` could not be done."""
    if isinstance(error, MemoryError):
        number, reason = errno.ENOMEM, "out of memory"
    else:
        number, reason = error.errno or 0, error.strerror or str(error) or type(error).__name__
    code, remedy = _SHORT.get(number, ("failed", "see gemctl doctor"))
    return ApiError(code, f"{what}: {reason}; {remedy}")
