"""A Python program with a model in it, which gemctld may watch, pace, disable and replace.

    python attached.py MODEL.gembin [SOCKET NAME]

Asks the model the same thing again and again and prints the answers, until SIGINT or SIGTERM. The
loop knows nothing of replacements: a request keeps the model that it began with.
"""

from __future__ import annotations

import signal
import sys
import time

from gemrun import GemRunHandle
from gemrun.errors import CallError

E_STATE = -12  # disabled


def ask(handle: GemRunHandle) -> None:
    """One answer; none while the model is disabled."""
    try:
        print(handle.infer("The conveyor", max_tokens=16).text, flush=True)
    except CallError as error:
        if error.code != E_STATE:
            raise


def main(path: str, *daemon: str) -> None:
    """Ask until a signal comes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with GemRunHandle(path) as handle:
        if daemon:
            socket, name = daemon
            handle.attach(socket, name)
        try:
            while True:
                ask(handle)
                time.sleep(0.02)
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    if len(sys.argv) not in (2, 4):
        sys.exit("usage: attached.py MODEL.gembin [SOCKET NAME]")
    main(*sys.argv[1:])
