"""The gemcheck command: parse, call, render."""

from __future__ import annotations

import sys
from collections.abc import Callable

import click
from rich.console import Console

from gemmake import __version__
from gemmake.check import diff, inspect, render, rules
from gemmake.errors import ArtifactError, GemError
from gemrun.format.codes import FormatError
from gemrun.format.reader import Artifact, read_artifact
from gemrun.format.writer import show

FILE = click.Path(path_type=str)


class DefaultGroup(click.Group):
    """A group whose first word may be left out: then it is `check`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default command first unless a command or the group's help is asked for."""
        if args and args[0] not in {*self.commands, "--help", "--version"}:
            args = ["check", *args]
        return super().parse_args(ctx, args)


@click.group(cls=DefaultGroup, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="gemcheck")
def main() -> None:
    """Verify a .gembin artifact, compare two, or show what is inside.

    \b
    gemcheck FILE [--run] [--json]      the checks; 0 passed, 1 a rule failed, 6 refused
    gemcheck --diff A B                 what differs; 0 nothing, 1 something
    gemcheck inspect FILE               header, sections, layers, tensors
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal without UTF-8 gets "?" for the marks
            stream.reconfigure(errors="replace")


@main.command()
@click.argument("files", nargs=-1, type=FILE)
@click.option("--run", is_flag=True, help="Replay the stored test vectors in the engine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per file.")
@click.option("--diff", "pair", nargs=2, type=FILE, help="Say what differs between two artifacts.")
@click.option("--verbose", is_flag=True, help="Hints for warnings too.")
@click.option("--debug", is_flag=True, help="Show a traceback on failure.")
def check(
    files: tuple[str, ...],
    run: bool,
    as_json: bool,
    pair: tuple[str, str] | None,
    verbose: bool,
    debug: bool,
) -> None:
    """Verify artifacts (the default command)."""
    if pair:
        sys.exit(_guarded(debug, lambda: _diff(*pair)))
    if not files:
        raise click.UsageError("name an artifact; gemcheck --help lists what else there is")
    replay = rules.replay if run else None
    reports = [rules.check_file(name, replay) for name in files]
    if as_json:
        click.echo(render.as_json(reports))
    else:
        for report in reports:
            if len(reports) > 1:
                click.echo(f"{show(report.path)}:")
            for line in render.lines(report, verbose):
                click.echo(line)
    sys.exit(max(report.exit_code for report in reports))


@main.command("inspect")
@click.argument("file", type=FILE)
@click.option("--tensor", "name", help="Show one tensor.")
@click.option("--debug", is_flag=True, help="Show a traceback on failure.")
def inspect_command(file: str, name: str | None, debug: bool) -> None:
    """Show what is inside an artifact."""
    sys.exit(_guarded(debug, lambda: _inspect(file, name)))


def _guarded(debug: bool, body: Callable[[], int]) -> int:
    """Run a command body; what is wrong becomes one sentence."""
    try:
        return body()
    except GemError as error:
        if debug:
            raise
        click.echo(f"gemcheck: {error}", err=True)
        return error.exit_code


def _open(path: str) -> Artifact:
    try:
        return read_artifact(path, verify="fast")
    except FormatError as error:
        raise ArtifactError(f"{show(path)}: {error}") from error


def _diff(first: str, second: str) -> int:
    with _open(first) as a, _open(second) as b:
        found = list(diff.differences(a, b))
        for line in found:
            click.echo(line)
        click.echo(diff.kv_line(a, b) if found else "same content")
    return 1 if found else 0


def _inspect(path: str, name: str | None) -> int:
    width = None if sys.stdout.isatty() else 160
    with _open(path) as artifact:
        view = inspect.overview(artifact) if name is None else inspect.tensor_view(artifact, name)
        Console(width=width, markup=False).print(view)
    return 0


if __name__ == "__main__":
    main()
