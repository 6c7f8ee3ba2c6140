"""gemctl: the operator's command. Parses, asks the daemon, shows; no decision is taken here.

Imports nothing heavy: an answer takes less than 150 ms, start included. --socket, --json,
--auto-reset-kv-cache and --external-temp-sensor may stand anywhere in the line.
"""

from __future__ import annotations

import os
from typing import Any

import click

from gemctl import asking
from gemctl.asking import Session
from gemctl.show import render
from gemrun import console

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
pass_session = click.make_pass_decorator(Session)


class Gemctl(console.Group):
    """Takes the options that may stand anywhere out of the line before click sees it."""

    unwritten = 8

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.obj, rest = asking.take_options(args)
        return super().parse_args(ctx, rest)


class Asked(console.Group):
    """A group that is also a command: without a subcommand its options act."""

    unwritten = 8


@click.group("gemctl", cls=Gemctl, context_settings=CONTEXT, epilog=render.EXIT_CODES)
@click.version_option("0.1.0", prog_name="gemctl")
@pass_session
def main(session: Session) -> None:
    """Run, watch and replace the language models of this device.

    \b
    Anywhere in the line:
      --socket PATH                   of gemctld (default: $GEMCTL_SOCKET, /run/gemctl/gemctl.sock)
      --json                          print the answer as JSON
      --auto-reset-kv-cache           empty the KV cache after every answer (--no-.. ends that)
      --external-temp-sensor SOURCE   hwmon:NAME/temp1, iio:NAME/CHANNEL, file:PATH[:SCALE],
                                      mqtt:TOPIC; only ever makes the throttle stricter
    """
    session.apply()


# ---- figures ----


@main.command()
@click.option("--history", is_flag=True, help="the last hour instead of now")
@click.option("--seconds", type=click.IntRange(1, 3600), default=3600, show_default=True)
@click.option("--step", "step_s", type=click.IntRange(1, 600), default=60, show_default=True)
@pass_session
def stats(session: Session, history: bool, seconds: int, step_s: int) -> None:
    """Figures of now, or of the last hour."""
    if history:
        found = session.ask("stats.history", seconds=seconds, step_s=step_s)
        session.show(found, render.history)
    else:
        session.show(session.ask("stats"), render.stats)


@main.command()
@click.option("--follow", is_flag=True, help="wait for more")
@click.option("--after", type=click.IntRange(0), help="number of the last event that is known")
@pass_session
def events(session: Session, follow: bool, after: int | None) -> None:
    """What happened, newest last."""
    session.stream("events.follow", render.event, follow=follow, after=after)


@main.command()
@click.option("--interval", type=click.FloatRange(0.2, 60), default=1.0, show_default=True)
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
    found = session.ask("doctor")
    session.show(found, render.doctor)
    if any(check["level"] == "bad" for check in found["checks"]):
        raise SystemExit(8)


@main.command()
@click.option("--output", type=click.Path(dir_okay=False), default="gemctl-bundle.json")
@pass_session
def bundle(session: Session, output: str) -> None:
    """Write what support needs to a file: versions, doctor, events; no prompts, no passwords."""
    asking.write_bundle(session.ask("bundle"), output)
    session.say(f"wrote {output}; look through it before you send it")


@main.command()
@pass_session
def info(session: Session) -> None:
    """About the daemon."""
    session.show(session.ask("daemon.info"), render.pairs)


# ---- models ----


@main.group(cls=Asked, invoke_without_command=True, context_settings=CONTEXT)
@click.option("--disable", is_flag=True, help="free the model's memory, also over a restart")
@click.option("--enable", is_flag=True, help="load it again")
@click.option("--replace", "file", type=click.Path(exists=True, dir_okay=False), metavar="FILE")
@click.option("--digest", help="with --name: replace by a version of the store")
@click.option("--name", help="the model (default: the active one)")
@click.option("--warmup-prompt", metavar="TEXT", help="with --enable or --replace")
@click.option("--allow-layout-change", is_flag=True, help="another kv_cache_size or layout is fine")
@click.option("--serial", is_flag=True, help="end the old one first where both do not fit")
@click.pass_context
def model(ctx: click.Context, /, **given: Any) -> None:
    """Disable, enable or replace a model; or one of the commands below."""
    if ctx.invoked_subcommand is None:
        asking.change_model(ctx.obj, ctx.get_help, **given)


@model.command("list")
@pass_session
def model_list(session: Session) -> None:
    """All models of this device."""
    session.show(session.ask("model.list"), render.models)


@model.command("status")
@click.argument("name", required=False)
@pass_session
def model_status(session: Session, name: str | None) -> None:
    """One model: versions, worker, the newest replacement."""
    session.show(session.ask("model.status", name=name), render.model)


@model.command("stage")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--name", required=True, help="the model")
@pass_session
def model_stage(session: Session, file: str, name: str) -> None:
    """Copy a version into the store and check it; a replace by its --digest comes later."""
    asking.stage(session, file, name)


@model.command("load")
@click.argument("name")
@click.option("--digest", help="a version of the store, its first 8 digits or more")
@pass_session
def model_load(session: Session, name: str, digest: str | None) -> None:
    """Load a model of the store."""
    session.show(session.ask("model.load", name=name, digest=digest), render.done("loaded"))


@model.command("unload")
@click.argument("name")
@pass_session
def model_unload(session: Session, name: str) -> None:
    """End a model after its last request; it stays in the store."""
    session.show(session.ask("model.unload", name=name), render.done("unloaded"))


@model.command("remove")
@click.argument("name")
@click.option("--digest", help="one version only, its first 8 digits or more")
@pass_session
def model_remove(session: Session, name: str, digest: str | None) -> None:
    """Delete a model that is not loaded, or one version, from the store."""
    session.show(session.ask("model.remove", name=name, digest=digest), render.done("removed"))


@model.command("pin")
@click.argument("name")
@click.option("--off", is_flag=True, help="unpin")
@pass_session
def model_pin(session: Session, name: str, off: bool) -> None:
    """A pinned model is never unloaded."""
    found = session.ask("model.pin", name=name, pinned=not off)
    session.show(found, render.done("unpinned" if off else "pinned"))


@model.command("priority")
@click.argument("name")
@click.argument("priority", type=click.IntRange(0, 9))
@pass_session
def model_priority(session: Session, name: str, priority: int) -> None:
    """Class of a model's requests; 0 goes first."""
    found = session.ask("model.priority", name=name, priority=priority)
    session.show(found, render.done(f"priority {priority}"))


@model.command("rollback")
@click.argument("name", required=False)
@pass_session
def model_rollback(session: Session, name: str | None) -> None:
    """Back to the version before."""
    session.watch("model.rollback", render.phase, render.replaced, name=name)


@model.command("clear")
@click.argument("name")
@pass_session
def model_clear(session: Session, name: str) -> None:
    """A faulted model may be loaded again, and its bad versions tried again."""
    session.show(session.ask("model.clear", name=name), render.done("cleared"))


@main.command("switch-model")
@click.argument("name")
@pass_session
def switch_model(session: Session, name: str) -> None:
    """Let another model answer, loaded first where it is not."""
    session.show(session.ask("model.switch", name=name), render.switched)


@main.command(context_settings=CONTEXT)
@click.argument("prompt")
@click.option("--model", "name", help="the model (default: the active one)")
@click.option("--chat/--raw", default=True, show_default=True, help="use its chat template")
@click.option("--system", help="system message")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--temperature", type=click.FloatRange(0, 100))
@click.option("--seed", type=click.IntRange(0))
@click.option("--stop", multiple=True, help="end before this text; up to 8 times")
@click.option("--deadline-ms", type=click.IntRange(1))
@click.option("--priority", type=click.Choice(["high", "normal", "low"]), default="normal")
@pass_session
def generate(session: Session, /, **given: Any) -> None:
    """Ask a model; - reads the prompt from stdin."""
    asking.generate(session, **given)


# ---- throttle ----


@main.command()
@click.option("--temp", "temp_c", type=click.FloatRange(-40, 150), help="threshold in C")
@click.option(
    "--mode",
    type=click.Choice(["performance", "balanced", "aggressive", "conservative", "silent", "off"]),
)
@click.option("--duty", type=click.FloatRange(0.01, 1), help="at most this share of the time")
@click.option("--for", "lasting", metavar="TIME", help="90s, 10m or 2h; then as before")
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
    session.watch("calibrate.thermal", render.calibrating, render.calibrated)


# ---- the daemon's files ----


@main.group()
def config() -> None:
    """The configuration file."""


@config.command("check")
@click.argument("path", type=click.Path(dir_okay=False), default="/etc/gemctl/gemctl.toml")
@pass_session
def config_check(session: Session, path: str) -> None:
    """Is a file good? Needs no daemon."""
    session.show(asking.check_config(path), render.checked)


@config.command("schema")
def config_schema() -> None:
    """Print the JSON schema of the file, for editors."""
    click.echo(asking.config_schema())


@config.command("reload")
@pass_session
def config_reload(session: Session) -> None:
    """Let the daemon read its file again."""
    session.show(session.ask("config.reload"), render.reloaded)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell: eval "$(gemctl completion bash)"."""
    click.echo(asking.completion_script(main, shell))


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
@click.option("--digest", required=True, help="version that is staged on the devices")
@click.option("--percent", type=click.FloatRange(0, 100), required=True, help="the first stage")
@click.option("--then", type=click.FloatRange(0, 100), multiple=True, help="the next; repeatable")
@click.option("--max-bad", type=click.IntRange(0), default=0, show_default=True)
@click.option("--timeout", "timeout_s", type=click.FloatRange(1), default=600.0, show_default=True)
@pass_session
def fleet_rollout(session: Session, /, **given: Any) -> None:
    """Replace a model stage by stage; halts by itself where devices roll back."""
    asking.fleet_rollout(session, **given)


if __name__ == "__main__":
    main(prog_name=os.environ.get("GEMCTL_NAME", "gemctl"))
