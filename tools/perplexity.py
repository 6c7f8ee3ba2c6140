"""Perplexity of an artifact, and of its checkpoint in float32 beside it.

    python tools/perplexity.py model.gembin --text TEXT
    python tools/perplexity.py model.gembin --text TEXT --reference transformers --model CHECKPOINT

TEXT is a UTF-8 file, or a folder of the Debian handbook's HTML pages, as `python tools/fetch.py
handbook-en` fetches and names it (tools/handbook.py). The reference needs the environment of
`make dev` or `make test`; an artifact alone needs only that of `make demo`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import click

import handbook
from gemmake import perplexity
from gemmake.errors import GemError, OutputError, UsageError
from gemmake.progress import shown
from gemrun import console
from gemrun.errors import GemRunError


def read_text(path: Path) -> str:
    """The text of a file, or of a folder with the handbook's pages."""
    if path.is_dir():
        return handbook.text(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name}: {error}; name a UTF-8 text file") from error


def as_json(result: perplexity.Result) -> str:
    """One line with the figures of the lines for people, and the sums they come from."""
    data = dataclasses.asdict(result)
    for name, score in (("score", result.score), ("reference", result.reference)):
        if score is not None:
            data[name]["perplexity"] = score.perplexity
            data[name]["bits_per_byte"] = score.bits_per_byte
    return json.dumps(data)


class Perplexity(console.Command):
    """The command, with exit codes as gemmake has them."""

    unwritten = OutputError.exit_code


@click.command("perplexity", cls=Perplexity, context_settings={"max_content_width": 100})
@click.argument("artifact", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--text",
    "text_path",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="UTF-8 file, or the folder of the handbook's pages.",
)
@click.option("--windows", default=8, show_default=True, help="Windows from the start of the text.")
@click.option("--length", default=1024, show_default=True, help="Tokens of a window, bos included.")
@click.option("--reference", type=click.Choice(["transformers"]), help="Measure --model beside it.")
@click.option("--model", type=click.Path(exists=True, path_type=Path), help="The checkpoint.")
@click.option("--threads", type=click.IntRange(1, 8), help="Threads; default: those of the engine.")
@click.option("--json", "json_output", is_flag=True, help="Print one JSON line.")
def main(
    artifact: Path,
    text_path: Path,
    windows: int,
    length: int,
    reference: str | None,
    model: Path | None,
    threads: int | None,
    json_output: bool,
) -> None:
    """Perplexity of ARTIFACT, measured by the engine."""
    if (reference is None) != (model is None):
        raise click.UsageError("--reference and --model belong together; give both or none")
    try:
        text = read_text(text_path)
        with shown("perplexity") as reporter:
            result = perplexity.run(artifact, text, windows, length, model, threads, reporter)
    except (GemError, GemRunError) as error:
        console.say(f"perplexity: {error}")
        sys.exit(getattr(error, "exit_code", 1))
    click.echo(as_json(result) if json_output else "\n".join(perplexity.render(result)))


if __name__ == "__main__":
    main()
