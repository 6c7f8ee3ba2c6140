"""One run of gemctl: where the daemon is, and how answers and errors are shown.

Imports neither click nor typing: they would take longer than the whole of a question and its
answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys

from gemctl.client import ENDED, Client, Refused, socket_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    Show = Callable[[dict[str, Any]], str]

ANSWER_S = 10.0  # of a daemon that is well
STOPPED = "stopped by SIGINT; start it again"
# Options that may stand anywhere in the line -> their value's name, and what they are for.
ANYWHERE = {
    "--socket": ("PATH", "of gemctld"),
    "--json": ("", "print the answer as JSON"),
    "--auto-reset-kv-cache": ("", "from now on empty every model's KV cache that is 95 % full"),
    "--no-auto-reset-kv-cache": ("", "from now on keep it between answers"),
    "--external-temp-sensor": ("SOURCE", "one more sensor for the throttle"),
}


class Session:
    """`changes` are what the options that may stand anywhere ask for: done before the command's own
    question, and not at all where the line turns out to be wrong."""

    def __init__(
        self,
        socket: str,
        json: bool = False,
        auto_reset: bool | int | None = None,
        external: str | None = None,
    ) -> None:
        self.socket = socket
        self.json = json
        self.auto_reset = auto_reset
        self.external = external
        self.changes: list[tuple[str, dict[str, Any]]] = []
        if auto_reset is not None:
            on = auto_reset is not False  # a percentage may be 0
            how = {} if isinstance(auto_reset, bool) else {"percent": auto_reset}
            self.changes.append(("kv.auto_reset", {"on": on, **how}))
        if external is not None:
            self.changes.append(("throttle.set", {"external": [external] if external else []}))

    def client(self, timeout_s: float | None = None) -> Client:
        """A new connection; without a time for the answer it waits while the daemon is well. Raises
        Refused, as everything here that asks."""
        self.apply()
        return Client(self.socket, timeout_s)

    def apply(self) -> None:
        """Ask for the changes, once."""
        while self.changes:
            method, params = self.changes.pop(0)
            for note in self.ask(method, **params).get("external_notes", ()):
                self.say(f"gemctl: external sensor {note}")

    def ask(self, method: str, fd: int | None = None, **params: Any) -> dict[str, Any]:
        """The result of a method; parameters that are None are left out."""
        works = method.startswith("model.") and method not in ("model.list", "model.status")
        with self.client(None if works else ANSWER_S) as client:
            return client.call(method, given(params), None, fd)

    def show(self, found: dict[str, Any], text: Show) -> None:
        """Print an answer, as text or as JSON."""
        self.out(json.dumps(found) if self.json else text(found))

    def out(self, text: str, end: str = "\n") -> None:
        """Onto stdout, at once."""
        import click

        click.echo(text + end, nl=False)

    def say(self, line: str, end: str = "\n") -> None:
        """For people, on stderr; nothing with --json."""
        if not self.json:
            tell(line + end)

    def stream(self, method: str, text: Show, **params: Any) -> None:
        """Print events as they come, however long none comes."""
        with self.client() as client:
            try:
                client.call(method, given(params), lambda event: self.show(event, text))
            except KeyboardInterrupt:
                if params.get("follow"):  # its usual end
                    return
                raise
        if params.get("follow"):
            raise Refused("unreachable", f"connection: {ENDED}")

    def watch(
        self, method: str, part: Show, fd: int | None = None, **params: Any
    ) -> dict[str, Any]:
        """Show the parts of a long action on stderr; its result. Ctrl-C ends it at the daemon's
        too, where it is not too late for that; which of the two, the error says."""
        job = ""

        def hear(event: dict[str, Any]) -> None:
            nonlocal job
            if "job" in event:
                job = event["job"]
            else:
                self.say(part(event))

        with self.client() as client:
            try:
                return client.call(method, given(params), hear, fd)
            except KeyboardInterrupt:
                if not job:
                    raise
                raise client.cancel(job) from None


def tell(text: str) -> None:
    """Onto stderr. One that takes nothing changes nothing, also not the exit code: what it did not
    take goes nowhere, or Python would fail with it at its end."""
    if sys.stderr is None:
        return
    try:
        print(text, end="", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def given(params: dict[str, Any]) -> dict[str, Any]:
    """What has a value."""
    return {key: value for key, value in params.items() if value is not None}


def wants_json(args: Sequence[str]) -> bool:
    """Whether --json stands in a line."""
    words = list(args)
    return "--json" in words[: words.index("--") if "--" in words else len(words)]


def error_text(error: Refused, as_json: bool) -> str:
    """An error as stderr gets it: one sentence, or one object."""
    return json.dumps({"error": error.as_dict()}) if as_json else f"gemctl: {error}"


def take_options(args: Sequence[str]) -> tuple[Session, list[str]]:
    """The session that the line describes, and the line without what describes it.

    Raises Refused where a value is missing.
    """
    rest: list[str] = []
    values: dict[str, str | None] = {"--socket": None, "--external-temp-sensor": None}
    as_json = False
    reset: bool | int | None = None
    words = list(args)
    while words:
        word = words.pop(0)
        if word == "--":
            rest += [word, *words]
            break
        name, equals, value = word.partition("=")
        if name in values:
            if not equals and not words:
                raise Refused("bad_request", f"{name}: its value is missing; see gemctl --help")
            values[name] = value if equals else words.pop(0)
        elif word == "--json":
            as_json = True
        elif name == "--auto-reset-kv-cache":
            reset = percent_of(name, value) if equals else True
        elif word == "--no-auto-reset-kv-cache":
            reset = False
        else:
            rest.append(word)
    if not rest and reset is not None:  # what was changed is shown
        rest = ["stats"]
    elif not rest and values["--external-temp-sensor"] is not None:
        rest = ["throttle"]
    socket = socket_path(values["--socket"])
    return Session(socket, as_json, reset, values["--external-temp-sensor"]), rest


def percent_of(name: str, word: str) -> int:
    """0..100, with or without its sign. Raises Refused."""
    digits = word.removesuffix("%")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 3 and int(digits) <= 100):
        raise Refused("bad_request", f"{name}={word[:40]}: give a percentage from 0 to 100")
    return int(digits)


def end(error: Refused, as_json: bool) -> int:
    """Tell an error; its exit code."""
    from gemctl.codes import EXIT_CODES

    asked = error.code == "cancelled" and not as_json and sys.stderr is not None
    before = "\n" if asked and sys.stderr.isatty() else ""  # behind the terminal's ^C
    tell(f"{before}{error_text(error, as_json)}\n")
    return EXIT_CODES.get(error.code, 8)
