"""The gemmake command: parse, call, render."""

from __future__ import annotations

from pathlib import Path

import click

from gemmake import __version__
from gemmake.errors import GemError
from gemmake.options import (
    MEMORY_LAYOUT,
    REFUSED,
    CompileOptions,
    Effort,
    Int4Format,
    KvType,
    Quantization,
)
from gemmake.progress import terminal
from gemmake.report import render_result


class HouseError(click.ClickException):
    """A GemError as click shows it: one line, exit code by class."""

    def __init__(self, error: GemError) -> None:
        super().__init__(f"gemmake: {error}")
        self.exit_code = error.exit_code

    def show(self, file: object = None) -> None:
        """Print the sentence on stderr."""
        click.echo(self.message, err=True)


def _refuse(name: str) -> click.decorators.FC:  # type: ignore[type-arg]
    def callback(_ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
        if value is not None:
            raise click.UsageError(f"{name}: not supported; {REFUSED[name]}")

    return click.option(name, callback=callback, expose_value=False, hidden=True)


def _kv_type(_ctx: click.Context, _param: click.Parameter, value: str) -> KvType:
    if value == "dynamic-sparse":
        key = "--kv-cache-type dynamic-sparse"
        raise click.UsageError(f"{key}: not supported; {REFUSED[key]}")
    return KvType(value)


@click.command(context_settings={"max_content_width": 100})
@click.option(
    "--model",
    required=True,
    type=click.Path(path_type=Path),
    help="Checkpoint: Hugging Face folder, .safetensors, .pt, .pth or .gguf.",
)
@click.option("--target", required=True, help="Board: a name in hdf/, or a path to a .toml file.")
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Artifact to write; a .memmap listing is written beside it.",
)
@click.option(
    "--quantization",
    type=click.Choice([q.value for q in Quantization]),
    default="int4",
    show_default=True,
    help="Weights of the body.",
)
@click.option(
    "--kv-cache-type",
    callback=_kv_type,
    default="int8",
    show_default=True,
    type=click.Choice(["dense", "int8", "dynamic-sparse"]),
    help="KV cache.",
)
@click.option(
    "--kv-cache-size",
    "context",
    type=int,
    default=1024,
    show_default=True,
    help="Tokens the context holds; fixes memory.",
)
@click.option(
    "--prefill-chunk",
    "chunk",
    type=int,
    default=128,
    show_default=True,
    help="Tokens of one prefill step; fixes scratch memory.",
)
@click.option(
    "--run-threads",
    type=int,
    default=None,
    help="Threads that the memory total is stated for (default: from the target).",
)
@click.option(
    "--memory-layout",
    type=click.Choice([MEMORY_LAYOUT]),
    default=MEMORY_LAYOUT,
    show_default=True,
    help="How memory is laid out.",
)
@click.option(
    "--temperature-threshold",
    type=float,
    default=None,
    help="°C at which throttling starts; stored in the artifact.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    default=None,
    help="config.json for a .pt or .pth without one beside it.",
)
@click.option(
    "--effort",
    type=click.Choice([e.value for e in Effort]),
    default="full",
    show_default=True,
    help="int4: bounds search only, or with error feedback.",
)
@click.option(
    "--int4-format",
    type=click.Choice([f.value for f in Int4Format]),
    default="q4h",
    show_default=True,
    help="q4raw imports 4-bit lattices with zero point 8 exactly.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    default=None,
    help="UTF-8 text for error feedback instead of the one that ships with gemmake.",
)
@click.option(
    "--dump-after",
    multiple=True,
    metavar="PASS",
    help="Write the state after a pass to OUTPUT.PASS.json; may be repeated.",
)
@click.option("--workers", type=int, default=0, help="Compile threads (default: all cores).")
@click.option("--verbose", is_flag=True, help="Tell what is done and where layers are placed.")
@click.option("--debug", is_flag=True, help="Show a traceback on failure.")
@_refuse("--throttle-mode")
@_refuse("--profile")
@_refuse("--prefill-sample-ratio")
@click.version_option(__version__, prog_name="gemmake")
def main(
    debug: bool,
    memory_layout: str,
    quantization: str,
    effort: str,
    int4_format: str,
    kv_cache_type: KvType,
    **options: object,
) -> None:
    """Compile a checkpoint and a hardware description into one .gembin artifact."""
    del memory_layout  # one layout exists; the choice is checked by its type
    from gemmake.pipeline import compile_model

    try:
        request = CompileOptions(
            quantization=Quantization(quantization),
            effort=Effort(effort),
            int4_format=Int4Format(int4_format),
            kv_type=kv_cache_type,
            **options,  # type: ignore[arg-type]
        )
        with terminal(request.verbose) as reporter:
            result = compile_model(request, reporter)
    except GemError as error:
        if debug:
            raise
        raise HouseError(error) from None
    except KeyboardInterrupt:
        raise click.Abort() from None
    click.echo(render_result(result))


if __name__ == "__main__":
    main()
