"""The gembench command: parse, call, render."""

from __future__ import annotations

import sys
import warnings
from typing import NoReturn

import click

from gemrun import __version__, console
from gemrun.bench import Options, exit_code, measure
from gemrun.bench_report import Lines, as_json
from gemrun.errors import BoardWarning, GemRunError
from gemrun.plain import one_line
from gemrun.progress import Progress


def _fail(text: str, code: int) -> NoReturn:
    """One sentence on stderr, exit code by class."""
    console.say(f"gembench: {one_line(text)}")
    raise click.exceptions.Exit(code)


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: str | None = None,
) -> None:
    """As warnings.showwarning, in the command's own words."""
    console.say(f"gembench: warning: {one_line(str(message))}")


def _depths(
    _ctx: click.Context, _param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    if value is None or value == "none":
        return None if value is None else ()
    parts = value.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise click.BadParameter(f"{value!r} is no list of tokens; give 0,256,512 or none")
    return tuple(int(part) for part in parts)


@click.command("gembench", cls=console.Command, context_settings={"max_content_width": 100})
@click.option(
    "--model", required=True, type=console.FileName(path_type=str), help="Artifact: a .gembin."
)
@click.option("--prompt", required=True, help="Text to continue from an empty cache.")
@click.option("--iterations", type=click.IntRange(1), default=10, show_default=True)
@click.option("--warmup", type=click.IntRange(0), default=3, show_default=True)
@click.option(
    "--max-tokens",
    type=click.IntRange(2),
    default=None,
    help="Tokens of an iteration; all are made, whatever the model says.  [default: 64, or what "
    "the context has room for]",
)
@click.option(
    "--threads", type=click.IntRange(1, 8), default=None, help="Default: what the machine grants."
)
@click.option("--kernel", default=None, help="Force a kernel: scalar, avx2.")
@click.option(
    "--head",
    type=click.Choice(["full", "two-plane"]),
    default=None,
    help="Two planes read less of the head for equal tokens.  [default: two-plane where greedy]",
)
@click.option(
    "--speculate",
    type=click.IntRange(0, 6),
    default=0,
    help="Tokens guessed ahead from the context: same tokens, fewer steps.  [default: 0]",
)
@click.option(
    "--kv-cache-size",
    type=click.IntRange(1),
    default=None,
    help="Tokens of context to use, at most the compiled N, which is the default; memory stays as "
    "compiled.",
)
@click.option(
    "--depths",
    callback=_depths,
    default=None,
    metavar="N,N,..",
    help="Tokens in the cache at which speed is measured, or none.  [default: 0, 1/4, 1/2 and 3/4 "
    "of the context, as far as a minute allows]",
)
@click.option("--chat", is_flag=True, help="The prompt is a user's message: use the template.")
@click.option(
    "--allow-foreign-board", is_flag=True, help="Measure it although built for another known board."
)
@click.option("--json", "as_object", is_flag=True, help="Print one JSON object instead of lines.")
@click.option("--debug", is_flag=True, help="Show a traceback on failure.")
@click.version_option(__version__, prog_name="gembench")
def main(as_object: bool, debug: bool, **options: object) -> None:
    """Measure time to first token, speed, latency, memory and energy of an artifact.

    Runs are greedy. Times are of the monotonic clock. Exit: 0 done, 2 usage, 4 board, 5 memory,
    6 file, 8 run failed or output not written, 130 cancelled.
    """
    if hasattr(sys.stdout, "reconfigure"):  # a terminal without UTF-8 gets "?" for the signs
        sys.stdout.reconfigure(errors="replace")
    lines = Lines(None if as_object else click.echo, Progress(sys.stderr, tool="gembench"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", BoardWarning)
            warnings.showwarning = _warn
            report = measure(Options(**options), lines)  # type: ignore[arg-type]
    except (GemRunError, OSError) as error:
        if debug:
            raise
        _fail(str(error), exit_code(error))
    except KeyboardInterrupt:
        _fail("run: cancelled; start it again for figures", 130)
    click.echo(as_json(report)) if as_object else lines.report(report)


if __name__ == "__main__":
    main()
