"""gemmake advise: which models fit a board and a task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from gemmake.errors import OutputError
from gemmake.failures import command
from gemmake.options import Storage
from gemrun import console

storage_option = click.option(
    "--storage",
    type=click.Choice([kind.value for kind in Storage]),
    callback=lambda _ctx, _param, value: None if value is None else Storage(value),
    default=None,
    help="Kind of storage that speed is predicted for (default: the board's, else emmc); changes "
    "no byte.",
)


class Advise(console.Command):
    """The command; output that cannot be written has the exit code of any other result."""

    unwritten = OutputError.exit_code


@click.command("gemmake advise", cls=Advise, context_settings={"max_content_width": 100})
@click.argument("models", nargs=-1, required=True, metavar="MODEL|FOLDER...")
@click.option("--target", required=True, help="Board: a name in hdf/, or a path to a .toml file.")
@click.option(
    "--longest-input",
    type=int,
    default=768,
    show_default=True,
    help="Tokens of the longest input; speed and latency are predicted for it.",
)
@click.option(
    "--answer", type=int, default=256, show_default=True, help="Tokens of an answer, at most."
)
@click.option(
    "--leave-free",
    "--reserve",
    "leave_free",
    type=int,
    default=None,
    metavar="MIB",
    help="Memory left to everything else (default: from the target); gemmake calls it --reserve.",
)
@click.option(
    "--ram-fraction",
    type=float,
    default=None,
    help="Share of the memory that a model may take (default: from the target).",
)
@click.option(
    "--latency-ms",
    type=float,
    default=None,
    help="Milliseconds to the first token of the longest input, at most, the model being open.",
)
@click.option("--speed", type=float, default=None, help="Tokens/s of the answer, at least.")
@click.option(
    "--quality",
    type=click.Choice(["usual", "high", "exact"]),
    default="usual",
    show_default=True,
    help="usual: int4 weights (perplexity +0.9 % on SmolLM2 135M, +4.3 % on Gemma 3 270M); "
    "high: int8; exact: float32, and a float32 cache.",
)
@click.option("--power-mode", default=None, help="Power mode of the board (default: the board's).")
@storage_option
@click.option(
    "--effort",
    type=click.Choice(["full", "fast"]),
    default="full",
    show_default=True,
    help="Of the compile that is planned.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Check tokenizer and chat template of each: at most three minutes a model.",
)
@click.option("--json", "as_json", is_flag=True, help="The answer as JSON.")
@click.option("--debug", is_flag=True, help="Show a traceback on failure.")
def advise(models: Sequence[str], as_json: bool, debug: bool, **wish: Any) -> None:
    """Which models fit a board, at which quantisation and context, how fast, and why not the rest.

    MODEL: a checkpoint, of which only headers are read, a config.json, a published shape such as
    gemma-3-1b, or a class: 1B, 2B, 4B. FOLDER: all checkpoints in it. Memory is what the compiler
    plans; speed is predicted, not measured.

    Exit: 0 where a candidate fits, or is open: only a run on the board can tell; 5 where none does;
    else as gemmake: 1 the host failed, 2 usage, 4 target, 7 output, 130 Ctrl-C, 143 SIGTERM.
    """
    with command("gemmake", debug):
        from gemmake import advise as advice
        from gemmake import advise_report
        from gemmake.options import Effort

        quality, effort = advice.Quality(wish.pop("quality")), Effort(wish.pop("effort"))
        given = advice.Wish(quality=quality, effort=effort, **wish)
        found = advice.advise(models, given)
        for line in [advise_report.as_json(found)] if as_json else advise_report.lines(found):
            console.echo(line)
        if (failure := advice.nothing_fits(found)) is not None:
            raise failure
