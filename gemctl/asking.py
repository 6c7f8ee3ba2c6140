"""What gemctl's commands do between the line and the daemon: one session, questions, answers.

Heavy modules (pydantic for the configuration, MQTT for the fleet) are imported by the commands that
need them, never at the top.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from gemctl.client import Client, Refused, socket_path
from gemctl.errors import EXIT_CODES

Show = Callable[[dict[str, Any]], str]
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
TIMEOUT_S = 600.0  # a replacement of a large model on a slow disk


@dataclass
class Session:
    """One run of the command: where the daemon is, and how answers are shown."""

    socket: str
    json: bool = False
    auto_reset: bool | None = None
    external: str | None = None

    def client(self) -> Client:
        """A new connection."""
        try:
            return Client(self.socket, TIMEOUT_S)
        except Refused as error:
            fail(error)

    def ask(self, method: str, fd: int | None = None, **params: Any) -> dict[str, Any]:
        """The result of a method; parameters that are None are left out."""
        given = {key: value for key, value in params.items() if value is not None}
        with self.client() as client:
            try:
                return client.call(method, given, None, fd)
            except Refused as error:
                fail(error)

    def apply(self) -> None:
        """The options that may stand anywhere, before the command itself."""
        if self.auto_reset is not None:
            self.ask("kv.auto_reset", on=self.auto_reset)
        if self.external is not None:
            self.ask("throttle.set", external=[self.external] if self.external else [])

    def show(self, found: dict[str, Any], text: Show) -> None:
        """Print an answer, as text or as JSON."""
        click.echo(json.dumps(found) if self.json else text(found))

    def say(self, line: str) -> None:
        """A line for people, on stderr."""
        click.echo(line, err=True)

    def stream(self, method: str, text: Show, **params: Any) -> None:
        """Print events as they come."""
        given = {key: value for key, value in params.items() if value is not None}
        with self.client() as client:
            try:
                client.call(method, given, lambda event: self.show(event, text))
            except Refused as error:
                fail(error)
            except KeyboardInterrupt:  # the usual end of following
                return

    def watch(
        self, method: str, part: Show, text: Show, fd: int | None = None, **params: Any
    ) -> None:
        """Show the parts of a long action on stderr, then its result."""
        given = {key: value for key, value in params.items() if value is not None}
        with self.client() as client:
            try:
                found = client.call(
                    method, given, None if self.json else lambda e: self.say(part(e)), fd
                )
            except Refused as error:
                fail(error)
        self.show(found, text)


def fail(error: Refused) -> NoReturn:
    """One sentence on stderr, and the exit code of its word."""
    click.echo(f"gemctl: {error}", err=True)
    raise SystemExit(EXIT_CODES.get(error.code, 8))


def wrong(sentence: str) -> NoReturn:
    """A line that cannot be understood."""
    fail(Refused("bad_request", sentence))


def take_options(args: Sequence[str]) -> tuple[Session, list[str]]:
    """The session that the line describes, and the line without what describes it."""
    rest: list[str] = []
    values: dict[str, str | None] = {"--socket": None, "--external-temp-sensor": None}
    flags = {"--json": False}
    reset: bool | None = None
    words = list(args)
    while words:
        word = words.pop(0)
        if word == "--":
            rest += [word, *words]
            break
        name, equals, value = word.partition("=")
        if name in values:
            if not equals and not words:
                wrong(f"{name}: its value is missing; see gemctl --help")
            values[name] = value if equals else words.pop(0)
        elif word in flags:
            flags[word] = True
        elif word in ("--auto-reset-kv-cache", "--no-auto-reset-kv-cache"):
            reset = not word.startswith("--no")
        else:
            rest.append(word)
    if not rest and (reset is not None or values["--external-temp-sensor"] is not None):
        rest = ["throttle"]  # what was changed is shown
    session = Session(
        socket_path(values["--socket"]), flags["--json"], reset, values["--external-temp-sensor"]
    )
    return session, rest


def seconds_of(text: str | None) -> float | None:
    """Seconds of a time such as 90s, 10m, 2h."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        wrong(f"--for: {text}: is no time; use 90s, 10m or 2h")
    return float(match[1]) * UNITS[match[2]]


def change_model(
    session: Session,
    get_help: Callable[[], str],
    disable: bool,
    enable: bool,
    file: str | None,
    digest: str | None,
    name: str | None,
    warmup_prompt: str | None,
    allow_layout_change: bool,
    serial: bool,
) -> None:
    """gemctl model --disable | --enable | --replace FILE."""
    from gemctl.show import render

    replacing = file is not None or digest is not None
    if disable + enable + replacing > 1:
        wrong("model: --disable, --enable and --replace exclude each other; give one of them")
    if disable:
        session.show(session.ask("model.disable", name=name), render.disabled)
    elif enable:
        found = session.ask("model.enable", name=name, warmup_prompt=warmup_prompt)
        session.show(found, render.done("ready"))
    elif replacing:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC) if file is not None else None
        session.watch(
            "model.replace",
            render.phase,
            render.replaced,
            fd,
            name=name or (name_of(session, file) if file is not None else None),
            digest=digest,
            warmup_prompt=warmup_prompt,
            allow_layout_change=allow_layout_change,
            serial=serial,
        )
    else:
        click.echo(get_help())


def stage(session: Session, file: str, name: str) -> None:
    """gemctl model stage FILE."""
    from gemctl.show import render

    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    session.watch("model.stage", render.phase, render.staged, fd, name=name)


def name_of(session: Session, file: str) -> str | None:
    """For the first model of a device: a name made of the file's, where none is active."""
    if session.ask("stats")["model"] is not None:
        return None
    stem = re.sub(r"[^a-z0-9._-]+", "-", Path(file).stem.lower()).strip("-._")[:64]
    return stem or "model"


def generate(
    session: Session,
    prompt: str,
    name: str | None,
    chat: bool,
    system: str | None,
    stop: tuple[str, ...],
    **given: Any,
) -> None:
    """gemctl generate: the text as it comes; with --json one object at the end."""
    text = sys.stdin.read() if prompt == "-" else prompt
    params: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if stop:
        params["stop"] = list(stop)
    if name is not None:
        params["model"] = name
    messages = [{"role": "system", "text": system}] if system is not None else []
    if chat or system is not None:
        params["messages"] = [*messages, {"role": "user", "text": text}]
    else:
        params["prompt"] = text

    def show(event: dict[str, Any]) -> None:
        if not session.json and "text" in event:
            click.echo(event["text"], nl=False)

    with session.client() as client:
        try:
            found = client.call("generate", {**params, "stream": not session.json}, show)
        except Refused as error:
            fail(error)
    click.echo(json.dumps(found) if session.json else "")


def throttle(
    session: Session,
    lasting: str | None,
    reset: bool,
    **given: Any,
) -> None:
    """gemctl throttle."""
    from gemctl.show import render

    changes = {key: value for key, value in given.items() if value is not None}
    for_s = seconds_of(lasting)
    if for_s is not None:
        changes["for_s"] = for_s
    if reset:
        changes["reset"] = True
    found = session.ask("throttle.set", **changes) if changes else session.ask("throttle.get")
    session.show(found, render.throttle)


def write_bundle(found: dict[str, Any], output: str) -> None:
    """Readable by people: it is looked through before it is sent."""
    try:
        Path(output).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        wrong(f"{output}: {error.strerror}; name another file with --output")


def check_config(path: str) -> dict[str, Any]:
    """Read a configuration file as the daemon would."""
    from gemctl import config
    from gemctl.errors import ApiError

    try:
        config.load(Path(path))
    except ApiError as error:
        wrong(error.message)
    return {"path": path, "good": True}


def config_schema() -> str:
    """JSON schema of the configuration file."""
    from gemctl.config import Config

    return json.dumps(Config.model_json_schema(), indent=1)


def completion_script(main: click.Command, shell: str) -> str:
    """Click's script for a shell."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is None:
        wrong(f"{shell}: no completion for it; use bash or zsh")
    return found(main, {}, "gemctl", "_GEMCTL_COMPLETE").source()


# ---- many devices ----


def fleet_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every fleet command: the broker and the devices."""
    options = [
        click.option("--host", default="localhost", show_default=True, help="of the broker"),
        click.option("--port", type=click.IntRange(1, 65535), default=1883, show_default=True),
        click.option("--username", default=""),
        click.option("--password-file", type=click.Path(path_type=Path)),
        click.option("--ca-file", type=click.Path(path_type=Path), help="TLS"),
        click.option("--insecure", is_flag=True, help="plain text to another machine is fine"),
        click.option("--site", default="site", show_default=True),
        click.option("--group", help="only devices of this group"),
    ]
    return functools.reduce(lambda made, option: option(made), reversed(options), command)


def broker(
    host: str,
    port: int,
    username: str,
    password_file: Path | None,
    ca_file: Path | None,
    insecure: bool,
    site: str,
) -> Any:
    """The broker of a fleet command, checked as the daemon's is."""
    from pydantic import ValidationError

    from gemctl.config import MqttConfig

    try:
        return MqttConfig(
            host=host,
            port=port,
            username=username,
            password_file=password_file,
            ca_file=ca_file,
            insecure=insecure,
            site=site,
        )
    except ValidationError as error:
        wrong(str(error.errors(include_url=False)[0]["msg"]).removeprefix("Value error, "))


def fleet_status(session: Session, /, group: str | None, **given: Any) -> None:
    """gemctl fleet status."""
    import asyncio
    import dataclasses

    from gemctl import fleet
    from gemctl.errors import ApiError
    from gemctl.show import render

    try:
        found = asyncio.run(fleet.status(broker(**given), group or ""))
    except ApiError as error:
        fail(Refused(error.code, error.message))
    session.show({"devices": [dataclasses.asdict(one) for one in found]}, render.devices)


def fleet_rollout(
    session: Session,
    /,
    name: str,
    digest: str,
    percent: float,
    then: tuple[float, ...],
    max_bad: int,
    timeout_s: float,
    group: str | None,
    **given: Any,
) -> None:
    """gemctl fleet rollout; exit code 8 where it halted."""
    import asyncio
    import dataclasses

    from gemctl import fleet
    from gemctl.errors import ApiError
    from gemctl.show import render

    options = fleet.RolloutOptions(
        broker=broker(**given),
        name=name,
        digest=digest,
        percents=(percent, *then),
        group=group or "",
        max_bad=max_bad,
        timeout_s=timeout_s,
    )
    try:
        result = asyncio.run(
            fleet.rollout(options, lambda p: session.say(render.progress(dataclasses.asdict(p))))
        )
    except ApiError as error:
        fail(Refused(error.code, error.message))
    session.show(dataclasses.asdict(result), render.rollout)
    if not result.rows:
        raise SystemExit(EXIT_CODES["not_found"])
    if result.action == "halt":
        raise SystemExit(EXIT_CODES["failed"])
