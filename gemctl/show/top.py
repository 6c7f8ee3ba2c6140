"""gemctl top: one picture a second, drawn over the last one; q or Ctrl-C ends it."""

from __future__ import annotations

import functools
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from gemctl.client import Client
from gemctl.session import Session
from gemctl.show import render

CLEAR, HOME, HIDE, SHOW = "\x1b[2J", "\x1b[H", "\x1b[?25l", "\x1b[?25h"
SERIES = (  # of the history, its name and unit, and where the figures of now have it
    ("temp_c", "temperature", "C", ("temp_c",)),
    ("throughput_tps", "throughput", "tokens/s", ("throughput_tps",)),
    ("throttle_level", "throttle level", "", ("throttle", "level")),
    ("duty", "duty", "", ("throttle", "duty")),
    ("power_w", "power", "W", ("power_w",)),
)


def picture(stats: dict[str, Any], history: dict[str, Any], events: list[str], width: int) -> str:
    """The whole screen as text, no line wider than `width`."""
    lines = [render.stats(stats), ""]
    room = max(10, width - 40)
    lines.append(f"{'':<15}{'now':>18}  {render.blocks(history)}")
    for key, name, unit, place in SERIES:
        values = history["series"].get(key, [])[-room:]
        known = [value for value in values if value is not None]
        if known:
            spark = render.sparkline(values, min(known), max(known))
            now = functools.reduce(dict.__getitem__, place, stats)
            lines.append(f"{name:<15}{render.number(now, unit):>18}  {spark}")
    lines += ["", *events[-6:]]
    return "\n".join(line[:width] for text in lines for line in text.split("\n"))


def _typed() -> bool:
    """Whether somebody can press keys."""
    return sys.stdin is not None and sys.stdin.isatty()


@contextmanager
def _keys() -> Iterator[None]:
    """Single keys, without an echo, where stdin is a terminal."""
    if not _typed():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quits(wait_s: float) -> bool:
    """Wait; true where somebody pressed q, or the terminal is gone."""
    ready, _, _ = select.select([sys.stdin] if _typed() else [], [], [], wait_s)
    return bool(ready) and sys.stdin.read(1) in ("q", "Q", "\x03", "\x04", "")


def _ask(client: Client) -> dict[str, Any]:
    """All that a picture shows."""
    seen: list[dict[str, Any]] = []
    client.call("events.follow", {"follow": False}, seen.append)
    history = client.call("stats.history", {"seconds": 600, "step_s": 10})
    return {"stats": client.call("stats"), "history": history, "events": seen}


def _draw(client: Client, width: int) -> str:
    found = _ask(client)
    seen = [render.event(event) for event in found["events"]]
    return picture(found["stats"], found["history"], seen, width)


def _lines(session: Session, client: Client, interval: float, once: bool) -> None:
    """An object a line, for programs."""
    while True:
        session.show(_ask(client), str)
        if once:
            return
        time.sleep(interval)


def run(session: Session, interval: float, once: bool) -> None:
    """Draw until q, Ctrl-C or the daemon's end."""
    if session.json:
        with session.client() as client:
            _lines(session, client, interval, once)
        return
    with session.client() as client, _keys():
        try:
            if once:
                click.echo(_draw(client, shutil.get_terminal_size().columns))
                return
            click.echo(HIDE + CLEAR, nl=False)
            while True:
                width = shutil.get_terminal_size().columns
                body = _draw(client, width).replace("\n", "\x1b[K\n")
                click.echo(f"{HOME}{body}\x1b[K\x1b[J", nl=False)
                if _quits(interval):
                    return
        except KeyboardInterrupt:
            if once:
                raise
            return
        finally:
            if not once:
                click.echo(SHOW)
