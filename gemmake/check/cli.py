"""The gemcheck command: parse, call, render."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable
from functools import partial

import click

from gemmake import __version__
from gemmake.check import diff, inspect, render, rules
from gemmake.errors import GemError, OutputError
from gemmake.progress import shown
from gemrun import console
from gemrun.format.writer import show
from gemrun.plain import one_line

FILE = console.FileName(path_type=str)


class DefaultGroup(console.Group):
    """A group whose first word may be left out: then it is `check`. Its help is one page."""

    unwritten = OutputError.exit_code

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default command first unless a command or the group's help is asked for."""
        if args and args[0] not in {*self.commands, "--help", "--version"}:
            refuse_mistaken_word(args[0], ctx)
            args = ["check", *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Every command with its options, instead of the commands' names alone."""
        for name, command in self.commands.items():
            inner = click.Context(command, info_name=name, parent=ctx)
            records = (p.get_help_record(inner) for p in command.get_params(inner))
            rows = [r for r in records if r is not None and r[0] != "--help"]
            with formatter.section(f"{name}: {command.get_short_help_str(80).rstrip('.')}"):
                formatter.write_dl(rows)


#: What people type for a command -> what there is.
WORDS = {
    "check": "gemcheck FILE",
    "verify": "gemcheck FILE",
    "inspect": "gemcheck inspect FILE",
    "diff": "gemcheck --diff A B",
    "run": "gemcheck --run FILE",
    "json": "gemcheck --json FILE",
    "help": "gemcheck --help",
    "version": "gemcheck --version",
}


def refuse_mistaken_word(word: str, ctx: click.Context | None = None) -> None:
    """UsageError for a word where a file is due, if it is no file but nearly a command."""
    if os.path.lexists(word) or not word.isalpha():
        return
    close = difflib.get_close_matches(word.lower(), WORDS, 1, 0.7)
    if close:
        known = word in main.commands  # reached only behind an option
        what = "is a command and comes first" if known else "unknown command, and no such file"
        raise click.UsageError(f"{show(word)}: {what}; did you mean {WORDS[close[0]]!r}?", ctx)


@click.group("gemcheck", cls=DefaultGroup, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="gemcheck")
def main() -> None:
    """\b
    Verify a .gembin artifact, compare two, or show what is inside.
    gemcheck FILE [--run] [--json]      the checks; 0 passed, 1 a rule failed, 6 refused
    gemcheck --diff A B                 what differs; 0 nothing, 1 something
    gemcheck inspect FILE               header, sections, layers, tensors; all: 7 output not written
    """
    render.allow_any_terminal()


@main.command()
@click.argument("files", nargs=-1, type=FILE)
@click.option("--run", is_flag=True, help="Replay test vectors and a pinned prompt in the engine.")
@click.option("--key", "keys", multiple=True, type=FILE, help="NAME.pub; one has to have signed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per file.")
@click.option("--diff", "pair", nargs=2, type=FILE, help="Say what differs between two artifacts.")
@click.option("--verbose", is_flag=True, help="Hints for warnings too, and what KV heads keep.")
@click.option("--debug", is_flag=True, help="Show a traceback on failure.")
def check(
    files: tuple[str, ...],
    run: bool,
    keys: tuple[str, ...],
    as_json: bool,
    pair: tuple[str, str] | None,
    verbose: bool,
    debug: bool,
) -> None:
    """Verify artifacts (the default command, its name may be left out)."""
    if pair:
        if files or run or keys or as_json:
            raise click.UsageError("--diff takes two artifacts, and no --run, --json or others")
        sys.exit(_guarded(debug, lambda: diff.print_difference(*pair, console.echo)))
    if not files:
        raise click.UsageError("name an artifact; gemcheck --help lists what else there is")
    refuse_mistaken_word(files[0])
    as_words = render.as_json if as_json else partial(render.as_text, verbose=verbose)
    with shown("gemcheck") as reporter:
        replay = partial(rules.replay, reporter=reporter) if run else None
        code = _guarded(debug, lambda: rules.report_on(files, replay, as_words, console.echo, keys))
    sys.exit(code)


@main.command("inspect")
@click.argument("file", type=FILE)
@click.option("--tensor", "name", help="Show one tensor.")
@click.option("--debug", is_flag=True, help="Show a traceback on failure.")
def inspect_command(file: str, name: str | None, debug: bool) -> None:
    """Show what is inside an artifact."""
    sys.exit(_guarded(debug, lambda: inspect.print_artifact(file, name)))


def _guarded(debug: bool, body: Callable[[], int]) -> int:
    """Run a command body; what is wrong becomes one sentence."""
    try:
        return body()
    except GemError as error:
        if debug:
            raise
        console.say(f"gemcheck: {one_line(str(error))}")
        return error.exit_code


if __name__ == "__main__":
    main()
