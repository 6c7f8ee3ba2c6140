"""What gemctl's commands do between the line and the daemon.

Heavy modules (pydantic for the configuration, MQTT for the fleet) are imported by the commands that
need them, never at the top. Everything here raises Refused, which the command tells and turns into
its exit code.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import click

from gemctl import kinds
from gemctl.client import Refused
from gemctl.codes import EXIT_CODES
from gemctl.session import Session, given
from gemctl.show import render
from gemrun import console

WAIT_LOOK_S = 0.25  # between two looks at a probation
WAIT_TELL_S = 10.0  # between two lines about it, where stderr is no terminal
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)  # of a disk
Values = dict[str, Any]


def wrong(sentence: str) -> NoReturn:
    """A line that cannot be understood."""
    raise Refused("bad_request", sentence)


# ---- models ----


def change_model(
    session: Session,
    disable: bool,
    enable: bool,
    name: str | None,
    warmup_prompt: str | None,
    **replacing: Any,
) -> None:
    """gemctl model --disable | --enable | --replace FILE."""
    replaces = replacing["file"] is not None or replacing["digest"] is not None
    if disable + enable + replaces > 1:
        wrong("model: --disable, --enable and --replace exclude each other; give one of them")
    if not replaces:
        loose = ["--" + key.replace("_", "-") for key, value in replacing.items() if value]
        loose += ["--warmup-prompt"] if warmup_prompt is not None and not enable else []
        loose += ["--name"] if name is not None and not enable and not disable else []
        if loose:
            what = "--disable, --enable or --replace FILE"
            wrong(f"model: {loose[0]} alone changes nothing; give it with {what}")
    if disable:
        disable_model(session, name)
    elif enable:
        enable_model(session, name, warmup_prompt)
    else:
        replace_model(session, name=name, warmup_prompt=warmup_prompt, **replacing)


def refuse_loose(ctx: click.Context) -> None:
    """Options of `gemctl model` itself that stand before one of its commands do nothing there."""
    for param in ctx.command.params:
        source = ctx.get_parameter_source(param.name or "")
        if source is click.core.ParameterSource.COMMANDLINE:
            option, word = param.opts[-1], ctx.invoked_subcommand
            wrong(
                f"model: {option} stands before the command {word} and does nothing there; put it "
                f"behind, see gemctl model {word} --help"
            )


def disable_model(session: Session, name: str | None) -> None:
    """gemctl model disable."""
    session.show(session.ask("model.disable", name=name), render.disabled)


def enable_model(session: Session, name: str | None, warmup_prompt: str | None) -> None:
    """gemctl model enable."""
    found = session.ask("model.enable", name=name, warmup_prompt=warmup_prompt)
    session.show(found, render.done("ready"))


def replace_model(
    session: Session,
    file: str | None,
    digest: str | None,
    name: str | None,
    wait: bool,
    **more: Any,
) -> None:
    """gemctl model replace FILE, or a version of the store by its digest."""
    if (file is None) == (digest is None):
        wrong("model replace: give one of FILE and --digest")
    fd = None if file is None else open_file(file)
    name = name or (None if file is None else name_of(session, file))
    found = session.watch("model.replace", render.phase, fd, name=name, digest=digest, **more)
    finish(session, found, render.replaced, wait)


def roll_back(session: Session, name: str | None, wait: bool) -> None:
    """gemctl model rollback."""
    found = session.watch("model.rollback", render.phase, name=name)
    finish(session, found, render.rolled_back, wait)


def open_file(file: str) -> int:
    """A descriptor, which the daemon is given."""
    try:
        return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        wrong(f"{file}: {error.strerror}; name a file that can be read")


def stage(session: Session, file: str, name: str) -> None:
    """gemctl model stage FILE."""
    found = session.watch("model.stage", render.phase, open_file(file), name=name)
    session.show(found, render.staged)


def name_of(session: Session, file: str) -> str | None:
    """For the first model of a device: a name made of the file's, where none is active."""
    if session.ask("stats")["model"] is not None:
        return None
    from pathlib import Path

    return re.sub(r"[^a-z0-9._-]+", "-", Path(file).stem.lower()).strip("-._")[:64] or "model"


# ---- a probation ----


def finish(session: Session, found: Values, text: Callable[[Values], str], wait: bool) -> None:
    """Show what was done; with `wait` after the end of its probation."""
    if not wait:
        session.show(found, text)
        return
    if not session.json:
        session.show(found, text)
    status = wait_for_probation(session, found["model"], found["digest"])
    if session.json:
        session.show({**found, "probation": "passed"}, text)
    else:
        session.show(status, render.passed)


def wait_for_probation(session: Session, model: str, digest: str) -> Values:
    """The model's status once a version has passed. Raises Refused where it was rolled back."""
    ticker = Ticker(session)
    try:
        while (found := session.ask("model.status", name=model))["on_probation"]:
            if found.get("not_kept"):  # it has passed; how long its disk is full nobody knows
                break
            ticker.tell(render.probation(found))
            time.sleep(WAIT_LOOK_S)
    except KeyboardInterrupt:
        what = f"{model}: its probation goes on without you"
        raise Refused("cancelled", f"{what}; see gemctl model status {model}") from None
    finally:
        ticker.end()
    why = failure_of(found, digest)
    if why is not None:
        raise why
    return found


def failure_of(status: Values, digest: str) -> Refused | None:
    """Why a version has not passed its probation; None where it has."""
    name, short = status["name"], digest[:12]
    reasons = [bad["reason"] for bad in status["bad"] if bad["digest"] == digest]
    if reasons:
        what = f"{name}: {short} was rolled back: {reasons[0]}"
        return Refused("failed", f"{what}; see gemctl events")
    if status["digest"] != digest and status["state"] == "empty":
        what = f"{name}: {short} was not judged: what ran it has ended"
        return Refused("failed", f"{what}; start that and give the version again")
    if status["digest"] != digest:
        return Refused("failed", f"{name}: {short} serves no longer; see gemctl events")
    if status["current"] == digest:
        return None
    if status["state"] != "serving":
        what = f"{name}: is {status['state']}, its probation is not over"
        return Refused("conflict", f"{what}; it goes on when {short} serves again")
    what = f"{name}: {short} passed, but that could not be written down"
    why = status.get("not_kept")
    return Refused("failed", f"{what}: {why}" if why else f"{what}; see gemctl doctor")


class Ticker:
    """One line on stderr that changes; a new line now and then where that is no terminal."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._width = 0
        self._told = -WAIT_TELL_S

    def tell(self, line: str) -> None:
        """Show a line in place of the last one."""
        if self._terminal:
            self._session.say(f"\r{line.ljust(self._width)}", end="")
            self._width = len(line)
        elif time.monotonic() - self._told >= WAIT_TELL_S:
            self._session.say(line)
            self._told = time.monotonic()

    def end(self) -> None:
        """Leave the line."""
        if self._width:
            self._session.say("")
            self._width = 0


# ---- generate ----


def prompt_of(words: tuple[str, ...]) -> str:
    """The prompt: several words are joined, - is stdin."""
    if not words:
        wrong('generate: no prompt; give it in quotes: gemctl generate "Where is dock 4?"')
    if len(words) > 1 and "-" in words:
        wrong("generate: - reads the prompt from stdin; give it alone")
    if len(words) > 1 and any(len(word.split()) > 1 for word in words):
        wrong("generate: a prompt in quotes and more words; quote all of it, or use --model NAME")
    text = read_stdin() if words == ("-",) else " ".join(words)
    if not text.strip():
        what = "stdin was empty" if words == ("-",) else "the prompt is empty"
        wrong(f"generate: {what}; ask something")
    fault = kinds.text_fault(text, kinds.MOST_TEXT)
    if fault:
        wrong(f"generate: the prompt: {fault}")
    return text


def read_stdin() -> str:
    """All of stdin; who types is told how it ends."""
    if sys.stdin is None:
        return ""
    if sys.stdin.isatty():
        console.say("reading the prompt from the terminal; Ctrl-D on a line of its own ends it")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        wrong("generate: stdin is no UTF-8; convert it with iconv")
    except OSError as error:
        wrong(f"generate: stdin: {error.strerror}; give the prompt in quotes")


def generate(
    session: Session,
    prompt: tuple[str, ...],
    chat: bool,
    system: str | None,
    stop: tuple[str, ...],
    ban: tuple[int, ...],
    ignore_eos: bool,
    reuse: bool,
    **more: Any,
) -> None:
    """gemctl generate: the text as it comes; with --json one object at the end."""
    text = prompt_of(prompt)
    params = given(more)
    if stop:
        params["stop"] = list(stop)
    if ban:
        params["banned"] = list(ban)
    if ignore_eos:
        params["ignore_stop_ids"] = True
    if reuse:
        params["reuse"] = True
    messages = [{"role": "system", "text": system}] if system is not None else []
    if chat or system is not None:
        params["messages"] = [*messages, {"role": "user", "text": text}]
    else:
        params["prompt"] = text

    def show(event: Values) -> None:
        if not session.json and "text" in event:
            session.out(event["text"], end="")

    with session.client() as client:
        found = client.call("generate", {**params, "stream": not session.json}, show)
    session.show(found, lambda _: "")
    tell_cut(session, found, params["max_tokens"])


def tell_cut(session: Session, found: Values, max_tokens: int) -> None:
    """Say where an answer is shorter than was asked for; Refused where that is no success."""
    count, finish = found["generated_tokens"], found["finish"]
    after = f"after {count} token{'s' if count != 1 else ''}"
    if finish == "deadline":
        what = f"generate: the answer was cut off at its deadline, {after}"
        raise Refused("timeout", f"{what}; give more --deadline-ms, or fewer --max-tokens")
    if finish == "context_full":
        session.say(f"gemctl: generate: the context is full {after}; --on-full slide goes on")
    elif finish == "max_tokens" and count < max_tokens:
        what = f"generate: the throttle has ended the answer {after}"
        session.say(f"gemctl: {what}; see gemctl throttle")


def cancel(session: Session, name: str | None) -> None:
    """gemctl model cancel: what changes a model now ends."""
    rows = session.ask("model.list")["models"]
    jobs = {row["name"]: row["job"] for row in rows if row.get("job")}
    if name is None and len(jobs) > 1:
        wrong(f"model cancel: {', '.join(jobs)} are being changed; name one of them")
    if name is not None and name not in [row["name"] for row in rows]:
        raise Refused("not_found", f"{name}: no such model; see gemctl model list")
    chosen = name if name is not None else next(iter(jobs), None)
    if chosen is None or chosen not in jobs:
        what = "no model is being changed" if name is None else f"{name}: is not being changed"
        raise Refused("conflict", f"{what}; see gemctl model list")
    job = jobs[chosen]
    session.ask("cancel", id=job["id"])
    session.show({"model": chosen, **job}, render.cancelled)


# ---- the throttle ----


def throttle(session: Session, reset: bool, **changes: Any) -> None:
    """gemctl throttle."""
    asked = given(changes)
    if reset:
        asked["reset"] = True
    if reset and "for_s" in asked:
        wrong("throttle: --reset and --for exclude each other; reset first, then --for")
    if list(asked) == ["for_s"]:
        wrong("throttle: --for alone changes nothing; give it with --temp, --mode or --duty")
    found = session.ask("throttle.set", **asked) if asked else session.ask("throttle.get")
    session.show(found, render.throttle)


def calibrate(session: Session) -> None:
    """gemctl calibrate thermal."""
    ticker = Ticker(session)
    try:
        with session.client() as client:
            found = client.call(
                "calibrate.thermal", {}, lambda event: ticker.tell(render.calibrating(event))
            )
    finally:
        ticker.end()
    session.show(found, render.calibrated)


# ---- the daemon's files ----


def bundle(session: Session, output: str) -> None:
    """gemctl bundle: readable by people, who look through it before it is sent."""
    from pathlib import Path

    path = Path(output).absolute()
    if output != "-" and (path.is_fifo() or path.is_socket()):  # who reads it, may never come
        wrong(f"{path}: is no regular file; name another one, or - for stdout, with --output")
    found = session.ask("bundle")
    if output == "-":
        session.out(json.dumps(found, indent=1))
        return
    try:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        if error.errno in NO_ROOM:
            what = f"{path}: {error.strerror}; free room on its disk, or name another file"
            raise Refused("failed", f"{what} with --output") from None
        wrong(f"{path}: {error.strerror}; name another file with --output")
    session.show({"path": str(path)}, render.bundled)


def doctor(session: Session) -> None:
    """gemctl doctor; exit code 8 where something is bad."""
    found = session.ask("doctor")
    session.show(found, render.doctor)
    if any(check["level"] == "bad" for check in found["checks"]):
        raise SystemExit(EXIT_CODES["failed"])


def check_config(path: str) -> Values:
    """Read a configuration file as the daemon would."""
    from pathlib import Path

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


# ---- many devices ----


def fleet_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every fleet command: the broker and the devices."""
    options = [
        click.option("--host", default="localhost", show_default=True, help="of the broker"),
        click.option(
            "--port", type=kinds.Number(1, 65535, whole=True), default=1883, show_default=True
        ),
        click.option("--username", default="", help="at the broker"),
        click.option("--password-file", type=kinds.File(), help="its first line is the password"),
        click.option("--ca-file", type=kinds.File(), help="who signed the broker's key: TLS"),
        click.option("--insecure", is_flag=True, help="plain text to another machine is fine"),
        click.option("--site", default="site", show_default=True, help="first level of the topics"),
        click.option("--group", help="only devices of this group"),
    ]
    return functools.reduce(lambda made, option: option(made), reversed(options), command)


def broker(**options: Any) -> Any:
    """The broker of a fleet command, checked as the daemon's is."""
    from pathlib import Path

    from pydantic import ValidationError

    from gemctl.config import MqttConfig
    from gemctl.config_words import of_options

    files = [key for key in ("password_file", "ca_file") if options.get(key)]
    places = {key: Path(options[key]).absolute() for key in files}
    try:
        return MqttConfig(**{**options, **places})
    except ValidationError as error:
        wrong(f"fleet: {of_options(error, MqttConfig)}")


def fleet_status(session: Session, /, group: str | None, **options: Any) -> None:
    """gemctl fleet status."""
    import asyncio
    import dataclasses

    from gemctl import fleet
    from gemctl.errors import ApiError

    try:
        found = asyncio.run(fleet.status(broker(**options), group or ""))
    except ApiError as error:
        raise Refused(error.code, error.message) from None
    session.show({"devices": [dataclasses.asdict(one) for one in found]}, render.devices)


def fleet_rollout(
    session: Session,
    /,
    percent: float,
    then: tuple[float, ...],
    group: str | None,
    name: str,
    digest: str,
    max_bad: int,
    timeout_s: float,
    skip_unready: bool,
    **options: Any,
) -> None:
    """gemctl fleet rollout; exit code 8 where it halted, 10 where it did not begin."""
    import asyncio
    import dataclasses

    from gemctl import fleet
    from gemctl.errors import ApiError
    from gemctl.fleet import text

    wanted = fleet.RolloutOptions(
        broker=broker(**options),
        name=name,
        digest=digest,
        percents=(percent, *then),
        group=group or "",
        max_bad=max_bad,
        timeout_s=timeout_s,
        skip_unready=skip_unready,
    )
    try:
        result = asyncio.run(
            fleet.rollout(wanted, lambda p: session.say(text.progress(dataclasses.asdict(p))))
        )
    except ApiError as error:
        raise Refused(error.code, error.message) from None
    found = {**dataclasses.asdict(result), "counts": result.counts}
    session.show(found, text.refused if result.action == "refused" else text.rollout)
    if result.action != "done":
        raise SystemExit(EXIT_CODES["conflict" if result.action == "refused" else "failed"])
