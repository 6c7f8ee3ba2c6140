"""gemmake hdf: the hardware descriptions, shown, checked, compared and drafted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import click

from gemmake.errors import OutputError, TargetError
from gemmake.failures import command
from gemrun import console
from gemrun.plain import one_line

DEBUG = click.option("--debug", is_flag=True, help="Show a traceback on failure.")


class Hdf(console.Group):
    """The group; output that cannot be written has the exit code of any other result."""

    unwritten = OutputError.exit_code


@click.group("gemmake hdf", cls=Hdf)
def hdf() -> None:
    """Hardware descriptions: what gemmake knows of a board. BOARD is a name or a .toml."""


@hdf.command("list", cls=console.Command)
@DEBUG
def list_boards(debug: bool) -> None:
    """A table of the boards.

    MODES: * is the default. UNVERIFIED: how many fields hold a value that nobody has checked
    against its source; hdf show BOARD marks them.
    """
    with command("gemmake", debug):
        from gemmake.hdf import list_targets

        head = ("BOARD", "CORES", "INSTRUCTION SETS", "MEMORY", "GB/s", "MODES", "UNVERIFIED")
        rows: list[tuple[str, ...]] = [head]
        rows += [_row(name) for name in list_targets()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            console.echo("  ".join(cells).rstrip())


def _row(name: str) -> tuple[str, ...]:
    from gemmake.hdf import load_hdf

    board = load_hdf(name)
    target, memory, mode = board.target, board.memory, board.default_mode
    cores = sum(len(cluster.cores or ()) for cluster in board.cpu.cluster)
    sets = [*target.baseline_features, *target.features]
    return (
        name,
        str(cores or "-"),
        " ".join([target.arch, *(one for one in sets if one not in ("neon", "sse2"))]),
        "-" if memory is None else f"{memory.size_mib} MiB",
        f"{mode.mem_peak_gbps:g}" if mode and mode.mem_peak_gbps else "-",
        " ".join(f"{one.id}{'*' if one.default else ''}" for one in board.power_mode) or "-",
        _fields(len(board.unverified())),
    )


def _fields(count: int) -> str:
    return "none" if count == 0 else f"{count} field{'s' if count > 1 else ''}"


@hdf.command("show", cls=console.Command)
@click.argument("board")
@click.option("--json", "as_json", is_flag=True, help="The stored form, without origins.")
@DEBUG
def show_board(board: str, as_json: bool, debug: bool) -> None:
    """The description with its bases merged, and where each value comes from."""
    with command("gemmake", debug):
        from gemmake import hdf as schema

        loaded = schema.load_hdf(board)
        if as_json:
            console.echo(loaded.canonical_json().decode("utf-8"))
            return
        files = schema.files_of(board)
        console.echo(f"# sha256 without policy: {loaded.sha256().hex()}")
        for keys, place, value in leaves(json.loads(loaded.canonical_json())):
            found = schema.origin_of(files, keys)
            source = loaded.origin(place)  # the narrowest: a table may be read, its rest not
            doubt = source is not None and not source.verified
            text = json.dumps(value, ensure_ascii=False)
            told = f"{_origin(found)}{', unverified' if doubt else ''}"
            console.echo(f"{one_line(place)} = {text}  # {told}")


def _origin(found: Any) -> str:
    from gemmake.hdf import show

    if found is None:
        return "default"
    return show(found.path.name) + ("" if found.line is None else f":{found.line}")


def leaves(
    value: Any, keys: tuple[str, ...] = (), place: str = ""
) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """Values of a description as (keys, place, value), in the order of their keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*keys, key), f"{place}.{key}" if place else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for entry in value:
            name = str(entry.get("id", entry.get("label", "")))
            yield from leaves(entry, (*keys, name), f"{place}[{name}]")
    else:
        yield keys, place, value


@hdf.command("check", cls=console.Command)
@click.argument("boards", nargs=-1, metavar="[BOARD]...")
@DEBUG
def check(boards: Sequence[str], debug: bool) -> None:
    """Check descriptions; without a BOARD all that ship. Exit 4 where one is wrong."""
    with command("gemmake", debug):
        from gemmake.hdf import list_targets, show

        wrong = [problem for name in boards or list_targets() if (problem := _problem(name))]
        for problem in wrong:
            console.echo(f"WRONG: {one_line(problem)}")
        count = len(boards or list_targets())
        if wrong:
            which = "it" if len(wrong) == 1 else "them"
            raise TargetError(f"{len(wrong)} of {count} descriptions are wrong; correct {which}")
        told = show(boards[0]) if len(boards) == 1 else f"{count} descriptions"
        console.echo(f"SUCCESS: {told} checked; every number has a source")


def _problem(name: str) -> str | None:
    from gemmake.hdf import load_hdf, show

    try:
        bare = load_hdf(name).unsourced()
    except TargetError as error:
        return str(error)
    if bare:
        return f"{show(name)}: {bare[0]} has no source; add a [[source]] whose field covers it"
    return None


@hdf.command("diff", cls=console.Command)
@click.argument("first")
@click.argument("second")
@DEBUG
def diff(first: str, second: str, debug: bool) -> None:
    """What differs between two descriptions: `-` of the first, `+` of the second."""
    with command("gemmake", debug):
        from gemmake.hdf import load_hdf

        one, two = (
            {place: value for _, place, value in leaves(json.loads(load_hdf(b).canonical_json()))}
            for b in (first, second)
        )
        differ = [place for place in {**one, **two} if one.get(place) != two.get(place)]
        for place in sorted(differ):
            for sign, values in (("-", one), ("+", two)):
                if place in values:
                    text = json.dumps(values[place], ensure_ascii=False)
                    console.echo(f"{sign} {one_line(place)} = {text}")
        console.echo(f"{len(differ)} values differ" if differ else "they are alike")


@hdf.command("schema", cls=console.Command)
@DEBUG
def schema(debug: bool) -> None:
    """The JSON Schema of a description, for editors."""
    with command("gemmake", debug):
        from gemmake.hdf import export_schema

        console.echo(json.dumps(export_schema(), indent=2, sort_keys=True))


@hdf.command("probe", cls=console.Command)
@click.option("--id", "name", default="probed", show_default=True, help="The description's id.")
@click.option(
    "--mib",
    type=click.IntRange(1, 65536),
    default=None,
    help="MiB that are read to measure the bandwidth (default: twice the last cache, 256 or more).",
)
@click.option("--no-bandwidth", is_flag=True, help="Measure nothing.")
@click.option("--root", default="/", help="Where sys and proc lie.", show_default=True)
@click.option("--machine", default=None, help="What uname -m prints there (default: here).")
@DEBUG
def probe(
    name: str, mib: int | None, no_bandwidth: bool, root: str, machine: str | None, debug: bool
) -> None:
    """Draft a description of this machine, on standard output."""
    with command("gemmake", debug):
        from pathlib import Path

        from gemmake import hdf_probe

        measure = None if no_bandwidth else hdf_probe.bandwidth
        kind = machine or hdf_probe.machine()
        console.echo(hdf_probe.draft(Path(root), kind, name, mib, measure), nl=False)
