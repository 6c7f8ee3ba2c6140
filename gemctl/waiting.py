"""Waiting with an end.

asyncio.wait_for of Python 3.10 and 3.11 loses a cancellation that comes in the step in which what
it waits for is done; a task that was told to end then goes on. This one does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float | None, what: Awaitable[T]) -> T:
    """The result of `what`. After so many seconds it is cancelled, and TimeoutError raised."""
    task = asyncio.ensure_future(what)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    if not done:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise TimeoutError
    return task.result()


async def ended(event: asyncio.Event, seconds: float) -> bool:
    """Whether an event was set in time."""
    try:
        await within(seconds, event.wait())
    except TimeoutError:
        return False
    return True


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """As asyncio.to_thread, but a cancellation waits until the thread has ended: nothing that it
    works on is taken away under it. Who cancels tells it to stop, by means of its own."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # nobody is there to be told
        raise
