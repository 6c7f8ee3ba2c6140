"""The device side: the engine's Python class and the artifact format.

    from gemrun import GemRunContext
    with GemRunContext("model.gembin") as ctx:
        print(ctx.infer("Hello", max_tokens=32).text)

The names below are loaded when they are first used, so that gemrun.format needs no engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemrun.batch import Answer, Batch
    from gemrun.context import GemRunContext, Info, Region, Snapshot, Stats, Stream, Thermal, Tokens
    from gemrun.errors import BoardWarning, GemRunError, MemoryLockWarning
    from gemrun.handle import GemRunHandle, HandleStats, ReplaceTimes

__version__ = "0.1.0"
_PLACES = {
    **dict.fromkeys(("GemRunHandle", "HandleStats", "ReplaceTimes"), "handle"),
    **dict.fromkeys(("Answer", "Batch"), "batch"),
    **dict.fromkeys(("BoardWarning", "GemRunError", "MemoryLockWarning"), "errors"),
}
__all__ = [
    "Answer",
    "Batch",
    "BoardWarning",
    "GemRunContext",
    "GemRunError",
    "GemRunHandle",
    "HandleStats",
    "Info",
    "MemoryLockWarning",
    "Region",
    "ReplaceTimes",
    "Snapshot",
    "Stats",
    "Stream",
    "Thermal",
    "Tokens",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gemrun' has no attribute {name!r}")
    return getattr(import_module(f"gemrun.{_PLACES.get(name, 'context')}"), name)
