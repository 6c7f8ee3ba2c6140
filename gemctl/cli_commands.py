"""gemctl's commands and options. Parses, asks the daemon, shows; no decision is taken here.

--socket, --json, --auto-reset-kv-cache and --external-temp-sensor may stand anywhere in the line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from gemctl import asking, kinds
from gemctl.client import Refused
from gemctl.kinds import MOST_ID, MOST_SEED, MOST_STOP, MOST_TEXT, MOST_TOKENS, Number
from gemctl.session import STOPPED, Session, end, take_options, wants_json
from gemctl.show import render
from gemrun import console

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
pass_session = click.make_pass_decorator(Session)


class Asked(console.Group):
    """A group of gemctl's."""

    command_class = console.Command
    unwritten = 8

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The line's options. Raises NoCommand where nothing stands behind the group."""
        if not args and not ctx.resilient_parsing:
            raise kinds.NoCommand(ctx)
        return super().parse_args(ctx, args)


class Gemctl(Asked):
    """Takes the options that may stand anywhere out of the line before click sees it, and tells
    every error in one sentence, or one object with --json."""

    group_class = Asked
    _json = False

    def main(self, args: Any = None, *more: Any, **extra: Any) -> Any:
        """Run the command; see console.py."""
        self._json = wants_json(args or ())
        return super().main(args, *more, **extra)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The line without what may stand anywhere."""
        if ctx.obj is None:
            ctx.obj, args = take_options(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """The command; click would tell of Ctrl-C by an empty line first."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Refused("cancelled", STOPPED) from None

    def tell(self, code: Any, sentence: str) -> None:
        """An error that is none of the daemon's."""
        end(Refused("cancelled" if code == console.CANCELLED else "failed", sentence), self._json)

    def explain(self, error: click.ClickException) -> None:
        """What is wrong with the line."""
        if isinstance(error, kinds.NoCommand) and not self._json:
            super().explain(error)
        else:
            end(Refused("bad_request", kinds.usage(error)), self._json)

    def known(self, error: Exception) -> int | None:
        """Refusals of the daemon, and ours."""
        return end(error, self._json) if isinstance(error, Refused) else None


def name_option(text: str = "the model (default: the active one)") -> Callable[..., Any]:
    """--name, which the shell completes."""
    return click.option("--name", type=kinds.ModelName(), help=text)


def wait_option(command: Any) -> Any:
    """--wait, of everything that begins a probation."""
    text = "for the end of the probation: exit code 0 passed, 8 rolled back"
    return click.option("--wait", is_flag=True, help=text)(command)


def warmup_option(command: Any) -> Any:
    """--warmup-prompt, of everything that loads a version."""
    text, kind = "asked before it answers anybody", kinds.Text(kinds.MOST_PROMPT)
    return click.option("--warmup-prompt", type=kind, help=text)(command)


def replace_options(command: Any) -> Any:
    """Options of a replacement."""
    options: list[Callable[[Any], Any]] = [
        click.option(
            "--digest", type=kinds.Digest(), help="a version of the store instead of a file"
        ),
        name_option(),
        warmup_option,
        click.option(
            "--allow-layout-change", is_flag=True, help="another kv_cache_size or layout is fine"
        ),
        click.option("--serial", is_flag=True, help="end the old one first where both do not fit"),
        wait_option,
    ]
    return functools.reduce(lambda made, option: option(made), reversed(options), command)


NAME = click.argument("name", type=kinds.ModelName())
MAYBE_NAME = click.argument("name", type=kinds.ModelName(), required=False)


@click.group("gemctl", cls=Gemctl, context_settings=CONTEXT, epilog=render.EXIT_CODES)
@click.version_option("0.1.0", prog_name="gemctl")
def main() -> None:
    """Run, watch and replace the language models of this device.

    \b
    First steps:
      gemctl model replace FILE.gembin    the first model, or a better version of it
      gemctl generate "Where is dock 4?"
      gemctl stats

    \b
    Anywhere in the line:
      --socket PATH                   of gemctld (default: $GEMCTL_SOCKET, /run/gemctl/gemctl.sock)
      --json                          print the answer as JSON, and errors too (on stderr)
      --auto-reset-kv-cache[=PERCENT] a setting of all models, not of one request, and kept: empty
                                      the KV cache behind every answer that leaves it so full
                                      (95; 0: behind every one); --no-auto-reset-kv-cache ends
                                      that, gemctl stats shows it
      --external-temp-sensor SOURCE   hwmon:NAME/temp1, iio:NAME/CHANNEL, file:PATH[:SCALE],
                                      mqtt:TOPIC; only ever makes the throttle stricter; "" takes
                                      it away again
    """


@main.result_callback()
@pass_session
def finish(session: Session, _result: object) -> None:
    """What may stand anywhere is done also where the command itself asked nothing."""
    session.apply()


# ---- figures ----


@main.command()
@MAYBE_NAME
@click.option("--history", is_flag=True, help="the last hour instead of now")
@click.option(
    "--seconds", type=Number(1, 3600, "s", whole=True), help="so far back  [default: 3600]"
)
@click.option("--step", "step_s", type=Number(1, 600, "s", whole=True),
              help="seconds that one figure is for  [default: 10]")  # fmt: skip
@pass_session
def stats(
    session: Session, name: str | None, history: bool, seconds: int | None, step_s: int | None
) -> None:
    """Figures of now, of the active model or of NAME, or of the last hour."""
    if history and name is not None:
        asking.wrong("stats: --history is of the whole device; leave the name out")
    if history:
        session.show(session.ask("stats.history", seconds=seconds, step_s=step_s), render.history)
    elif seconds or step_s:
        asking.wrong("stats: --seconds and --step are of --history; give that too")
    else:
        text = render.stats if name is None else functools.partial(render.stats, whose="")
        session.show(session.ask("stats", name=name), text)


@main.command()
@click.option("--follow", is_flag=True, help="wait for more")
@click.option("--after", type=Number(0, whole=True), help="number of the last event that is known")
@pass_session
def events(session: Session, follow: bool, after: int | None) -> None:
    """What happened, newest last."""
    session.stream("events.follow", render.event, follow=follow, after=after)


@main.command()
@click.option("--interval", type=Number(0.2, 60, "s"), default=1.0, show_default=True,
              help="seconds between two pictures")  # fmt: skip
@click.option("--once", is_flag=True, help="one picture, then end")
@pass_session
def top(session: Session, interval: float, once: bool) -> None:
    """A live view: temperature, tokens per second, throttle level."""
    from gemctl.show import top as top_

    top_.run(session, interval, once)


@main.command()
@pass_session
def doctor(session: Session) -> None:
    """Check this device: sensors, power, helper, store, broker."""
    asking.doctor(session)


@main.command()
@click.option("--output", type=click.Path(dir_okay=False, allow_dash=True),
              default="gemctl-bundle.json", show_default=True, metavar="FILE",
              help="- for stdout")  # fmt: skip
@pass_session
def bundle(session: Session, output: str) -> None:
    """A file for support: doctor, events, figures; no prompts."""
    asking.bundle(session, output)


@main.command()
@pass_session
def info(session: Session) -> None:
    """About the daemon."""
    session.show(session.ask("daemon.info"), render.info)


# ---- models ----


@main.group(invoke_without_command=True, context_settings=CONTEXT)
@click.option("--disable", is_flag=True, help="free the model's memory, also over a restart")
@click.option("--enable", is_flag=True, help="load it again")
@click.option(
    "--replace", "file", type=kinds.File(artifact=True), help="another version, tried first"
)
@replace_options
@click.pass_context
def model(ctx: click.Context, /, **given: Any) -> None:
    """List, replace, disable or switch models."""
    if ctx.invoked_subcommand is not None:
        asking.refuse_loose(ctx)
    elif all(value in (None, False) for value in given.values()):  # gemctl model --
        raise kinds.NoCommand(ctx)
    else:
        asking.change_model(ctx.obj, **given)


@model.command("list")
@pass_session
def model_list(session: Session) -> None:
    """All models of this device."""
    session.show(session.ask("model.list"), render.models)


@model.command("status")
@MAYBE_NAME
@pass_session
def model_status(session: Session, name: str | None) -> None:
    """One model: versions, worker, what is left of a probation."""
    session.show(session.ask("model.status", name=name), render.model)


@model.command("replace")
@click.argument("file", type=kinds.File(artifact=True), required=False)
@replace_options
@pass_session
def model_replace(session: Session, /, **given: Any) -> None:
    """Another version for a model, tried first.

    It answers only after its tests, and goes back by itself if it fails on probation.
    """
    asking.replace_model(session, **given)


@model.command("stage")
@click.argument("file", type=kinds.File(artifact=True))
@click.option("--name", type=kinds.ModelName(), required=True, help="the model")
@pass_session
def model_stage(session: Session, file: str, name: str) -> None:
    """Copy a version into the store, for a replace later."""
    asking.stage(session, file, name)


@model.command("enable")
@MAYBE_NAME
@warmup_option
@pass_session
def model_enable(session: Session, name: str | None, warmup_prompt: str | None) -> None:
    """Load a disabled model again."""
    asking.enable_model(session, name, warmup_prompt)


@model.command("disable")
@MAYBE_NAME
@pass_session
def model_disable(session: Session, name: str | None) -> None:
    """Free a model's memory, also over a restart."""
    asking.disable_model(session, name)


@model.command("switch")
@NAME
@pass_session
def model_switch(session: Session, name: str) -> None:
    """Let another model answer when none is named."""
    session.show(session.ask("model.switch", name=name), render.switched)


@model.command("load")
@NAME
@click.option("--digest", type=kinds.Digest(), help="of a version of the store")
@pass_session
def model_load(session: Session, name: str, digest: str | None) -> None:
    """Load a model of the store."""
    session.show(session.ask("model.load", name=name, digest=digest), render.done("loaded"))


@model.command("unload")
@NAME
@pass_session
def model_unload(session: Session, name: str) -> None:
    """Free its memory; it stays in the store."""
    session.show(session.ask("model.unload", name=name), render.done("unloaded"))


@model.command("remove")
@NAME
@click.option("--digest", type=kinds.Digest(), help="one version only")
@pass_session
def model_remove(session: Session, name: str, digest: str | None) -> None:
    """Delete a model, or one version, from the store."""
    session.show(session.ask("model.remove", name=name, digest=digest), render.done("removed"))


@model.command("pin")
@NAME
@click.option("--off", is_flag=True, help="unpin")
@pass_session
def model_pin(session: Session, name: str, off: bool) -> None:
    """A pinned model is never unloaded."""
    found = session.ask("model.pin", name=name, pinned=not off)
    session.show(found, render.done("unpinned" if off else "pinned"))


@model.command("priority")
@NAME
@click.argument("priority", type=Number(0, 9, whole=True))
@pass_session
def model_priority(session: Session, name: str, priority: int) -> None:
    """Class of a model's requests, 0 to 9; 0 goes first."""
    found = session.ask("model.priority", name=name, priority=priority)
    session.show(found, render.done(f"priority {priority}"))


@model.command("rollback")
@MAYBE_NAME
@wait_option
@pass_session
def model_rollback(session: Session, name: str | None, wait: bool) -> None:
    """Back to the version before."""
    asking.roll_back(session, name, wait)


@model.command("cancel")
@MAYBE_NAME
@pass_session
def model_cancel(session: Session, name: str | None) -> None:
    """End what changes a model now: a staging, a replacement, a load."""
    asking.cancel(session, name)


@model.command("clear")
@NAME
@pass_session
def model_clear(session: Session, name: str) -> None:
    """Let a faulted model, or its bad versions, try again."""
    session.show(session.ask("model.clear", name=name), render.cleared)


@main.command("switch-model")
@NAME
@pass_session
def switch_model(session: Session, name: str) -> None:
    """The same as gemctl model switch."""
    session.show(session.ask("model.switch", name=name), render.switched)


@main.command(context_settings=CONTEXT)
@click.argument("prompt", nargs=-1)
@click.option("--model", type=kinds.ModelName(), help="the model (default: the active one)")
@click.option("--chat/--raw", default=True, show_default=True, help="use its chat template")
@click.option("--system", type=kinds.Text(MOST_TEXT), help="system message")
@click.option(
    "--max-tokens",
    type=Number(1, MOST_TOKENS, whole=True),
    default=256,
    show_default=True,
    help="end after N tokens",
)
@click.option("--temperature", type=Number(0, 100), help="0 always takes the most likely token")
@click.option(
    "--top-k", type=Number(0, MOST_TOKENS, whole=True), help="best N tokens only; 0 is off"
)
@click.option(
    "--top-p", type=Number(0, 1, above=True), help="best tokens that hold X of the weight"
)
@click.option(
    "--min-p", type=Number(0, 1, below=True), help="tokens at least X times as likely as the best"
)
@click.option("--repetition-penalty", type=Number(0, 100, above=True), help="1 is off")
@click.option("--seed", type=Number(0, MOST_SEED, whole=True), help="of the random numbers")
@click.option("--stop", multiple=True, type=kinds.Text(MOST_STOP, empty=False),
              callback=kinds.at_most(8), help="end before this text; up to 8 times")  # fmt: skip
@click.option("--ban", multiple=True, type=Number(0, MOST_ID, whole=True), metavar="ID",
              callback=kinds.at_most(256), help="never this token; up to 256 times")  # fmt: skip
@click.option("--ignore-eos", is_flag=True, help="go on past the end of the answer")
@click.option("--speculate", type=Number(0, 6, whole=True),
              help="guess up to N tokens ahead: same answer, fewer steps")  # fmt: skip
@click.option("--reuse", is_flag=True,
              help="keep for the next prompt that begins alike, use what is kept: same answer, "
                   "sooner")  # fmt: skip
@click.option("--on-full", type=kinds.Word(["stop", "mark", "slide"]), default="stop",
              show_default=True,
              help="at the end of the context: stop, mark the text, or slide on")  # fmt: skip
@click.option("--deadline-ms", type=Number(1, 86_400_000, "ms", whole=True),
              help="fail rather than answer later")  # fmt: skip
@click.option("--priority", type=kinds.Word(["high", "normal", "low"]), default="normal",
              show_default=True)  # fmt: skip
@pass_session
def generate(session: Session, /, **given: Any) -> None:
    """Ask a model; - reads the prompt from stdin. What is not given is the model's own default."""
    asking.generate(session, **given)


# ---- throttle ----


@main.command()
@click.option("--temp", "temp_c", type=Number(-40, 150, "C", "°C"), metavar="C",
              help="threshold, as 75 or 75C")  # fmt: skip
@click.option(
    "--mode",
    type=kinds.Word(["performance", "balanced", "aggressive", "conservative", "silent", "off"]),
    help="how it slows down",
)
@click.option("--duty", type=Number(0, 1, above=True, share=True), metavar="SHARE",
              help="at most this share of the time, as 0.5 or 50%")  # fmt: skip
@click.option("--for", "for_s", type=kinds.Span(), help="90s, 10m or 2h; then as before")
@click.option("--reset", is_flag=True, help="back to the configuration")
@pass_session
def throttle(session: Session, /, **given: Any) -> None:
    """Show or change the throttle."""
    asking.throttle(session, **given)


@main.group()
def calibrate() -> None:
    """Measure this device."""


@calibrate.command("thermal")
@pass_session
def calibrate_thermal(session: Session) -> None:
    """Thermal resistance and time constant: a step test of six minutes under full load."""
    asking.calibrate(session)


# ---- the daemon's files ----


@main.group()
def config() -> None:
    """The configuration file."""


@config.command("check")
@click.argument("path", type=click.Path(), default="/etc/gemctl/gemctl.toml")
@pass_session
def config_check(session: Session, path: str) -> None:
    """Is a file good? Needs no daemon."""
    session.show(asking.check_config(path), render.checked)


@config.command("schema")
@pass_session
def config_schema(session: Session) -> None:
    """Print the JSON schema of the file, for editors."""
    session.out(asking.config_schema())


@config.command("reload")
@pass_session
def config_reload(session: Session) -> None:
    """Let the daemon read its file again."""
    session.show(session.ask("config.reload"), render.reloaded)


@main.command()
@click.argument("shell", type=kinds.Word(["bash", "zsh", "fish"]))
@pass_session
def completion(session: Session, shell: str) -> None:
    """Print a shell's completion script.

    \b
    bash   eval "$(gemctl completion bash)"         in ~/.bashrc
    zsh    eval "$(gemctl completion zsh)"          in ~/.zshrc, after compinit
    fish   gemctl completion fish | source          in ~/.config/fish/config.fish
    """
    from gemctl import completing

    session.out(completing.script(shell), end="")


# ---- many devices ----


@main.group()
def fleet() -> None:
    """Many devices on one broker."""


@fleet.command("status")
@asking.fleet_options
@pass_session
def fleet_status(session: Session, /, **given: Any) -> None:
    """The devices of a site or group and their models."""
    asking.fleet_status(session, **given)


@fleet.command("rollout")
@asking.fleet_options
@click.option("--name", required=True, help="the model")
@click.option("--digest", type=kinds.Digest(), required=True,
              help="version that is staged on the devices")  # fmt: skip
@click.option("--percent", type=Number(0, 100, "%"), required=True, help="the first stage")
@click.option("--then", type=Number(0, 100, "%"), multiple=True, help="the next; repeatable")
@click.option("--max-bad", type=Number(0, whole=True), default=0, show_default=True,
              help="devices that may roll back or refuse")  # fmt: skip
@click.option("--timeout", "timeout_s", type=Number(1, 86400, "s"), default=600.0,
              show_default=True, help="silent for so many seconds: lost")  # fmt: skip
@click.option("--skip-unready", is_flag=True,
              help="leave out devices that are offline or have not got the version")  # fmt: skip
@pass_session
def fleet_rollout(session: Session, /, **given: Any) -> None:
    """Replace a model stage by stage; halts by itself where devices roll back or refuse.

    Begins only where all devices that it would reach have the version in their store.
    """
    asking.fleet_rollout(session, **given)
