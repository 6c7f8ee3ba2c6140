"""Errors that gemmake and gemcheck report, each with its exit code.

GemError                    base: one sentence, exit code by class
+-- UsageError          2   an option is wrong or not supported
+-- CheckpointError     3   the checkpoint is unreadable, incomplete or unsupported
+-- TargetError         4   the hardware description is wrong
+-- BudgetError         5   the compiled model does not fit the target
+-- ArtifactError       6   an artifact is damaged or was refused
+-- OutputError         7   the result could not be written
"""

from __future__ import annotations


class GemError(Exception):
    """Base of all reported errors: `<object>: <what is wrong>; <what to do>`."""

    exit_code = 1


class UsageError(GemError):
    """An option is wrong or not supported yet."""

    exit_code = 2


class CheckpointError(GemError):
    """The checkpoint cannot be read, is incomplete, or asks for something unsupported."""

    exit_code = 3


class TargetError(GemError):
    """The hardware description file is missing, malformed or contradicts itself."""

    exit_code = 4


class BudgetError(GemError):
    """The compiled model needs more memory than the target grants."""

    exit_code = 5


class ArtifactError(GemError):
    """An artifact is damaged, unreadable or was refused."""

    exit_code = 6


class OutputError(GemError):
    """The artifact could not be written."""

    exit_code = 7
