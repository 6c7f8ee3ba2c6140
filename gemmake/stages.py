"""Stages that overlap, and where the time goes.

`ahead` runs an iterator in a thread of its own, so that reading, searching and writing work on
different blocks at the same time. Items keep their order, so nothing about the result depends on
it. `Clock` adds up seconds by name; with overlapping stages their sum may exceed the wall clock.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
POLL = 0.05  # seconds between two looks at a full queue, to see whether the reader has gone


class Clock:
    """Seconds by name. Each name is written by one thread at a time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def each(self, name: str, source: Iterator[T]) -> Iterator[T]:
        """The items of `source`; the seconds that making them takes are added to `name`."""
        while True:
            with self.timed(name):
                item = next(source, _END)
            if isinstance(item, _End):
                return
            yield item


class _End:
    """Marks the end of a queue, with the error that ended it."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


_END = _End(None)


def ahead(source: Generator[T, None, None]) -> Generator[T, None, None]:
    """The items of `source`, made by a thread that works at most two items ahead.

    An error of `source` is raised here. Closing this generator closes `source` too, after the
    item in the making.
    """
    box: queue.Queue[Any] = queue.Queue(1)
    gone = threading.Event()
    thread = threading.Thread(target=_produce, args=(source, box, gone), daemon=True)
    thread.start()
    try:
        while not isinstance(item := box.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        gone.set()
        thread.join()


def _produce(
    source: Generator[T, None, None], box: queue.Queue[Any], gone: threading.Event
) -> None:
    end = _END
    try:
        with contextlib.closing(source):
            for item in source:
                if not _put(box, item, gone):
                    return
    except BaseException as error:  # handed to the other side
        end = _End(error)
    _put(box, end, gone)


def _put(box: queue.Queue[Any], item: object, gone: threading.Event) -> bool:
    """Wait for room; False when nobody will take it any more."""
    while not gone.is_set():
        with contextlib.suppress(queue.Full):
            box.put(item, timeout=POLL)
            return True
    return False
