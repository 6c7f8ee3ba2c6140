"""The questions that scripts ask every second, answered without click, in half of the time.

Lines as they stand in LINES, and no others; where anything is out of the ordinary the whole command
takes the line, as if this module did not exist.
"""

from __future__ import annotations

import json
import os
import sys

from gemctl import session
from gemctl.client import Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# Words of a line -> the method, and the function of show/render.py for its result.
LINES = {
    ("stats",): ("stats", "stats"),
    ("info",): ("daemon.info", "info"),
    ("throttle",): ("throttle.get", "throttle"),
    ("model", "list"): ("model.list", "models"),
    ("model", "status"): ("model.status", "model"),
}


def answer(args: Sequence[str]) -> int | None:
    """The exit code of a line; None where the whole command has to take it."""
    as_json = session.wants_json(args)
    try:
        asked, words = session.take_options(args)
        line = LINES.get(tuple(words))
        if line is None or asked.changes or not _plain_output():
            return None
        found = asked.ask(line[0])
        text = json.dumps(found) if asked.json else _text(found, line[1])
    except Refused as error:
        return session.end(error, as_json)
    except KeyboardInterrupt:
        return session.end(Refused("cancelled", session.STOPPED), as_json)
    return _write(text)


def _text(found: dict[str, Any], name: str) -> str:
    from gemctl.show import render

    text: str = getattr(render, name)(found)
    return text


def _plain_output() -> bool:
    """Whether stdout is open, and takes UTF-8."""
    return sys.stdout is not None and sys.stdout.encoding.lower() in ("utf-8", "utf8")


def _write(text: str) -> int | None:
    """Past Python's buffer: what cannot be written is not half written later."""
    left = memoryview(f"{text}\n".encode("utf-8", "backslashreplace"))
    try:
        while left:
            left = left[os.write(sys.stdout.fileno(), left) :]
    except (OSError, ValueError):
        return None  # the whole command has the words for that
    return 0
