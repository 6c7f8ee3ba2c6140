"""gemmake engine: the engine's libraries and command for other machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from gemmake.errors import OutputError
from gemmake.failures import command
from gemrun import console


class Engine(console.Command):
    """A command; output that cannot be written has the exit code of any other result."""

    unwritten = OutputError.exit_code


@click.command("gemmake engine", cls=Engine, context_settings={"max_content_width": 100})
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="BOARD|ARCH",
    help="A board (gemmake hdf list) or a processor: x86_64, aarch64, armv7, riscv64, wasm32, "
    "cortex-m3, cortex-m7, cortex-m55. May be repeated; default: the first four.",
)
@click.option(
    "--libc",
    "libcs",
    multiple=True,
    type=click.Choice(["glibc", "musl"]),
    help="glibc: 2.28 and later; musl: linked statically. Default: both.",
)
@click.option(
    "--output",
    type=console.FileName(path_type=Path),
    default=Path("engine"),
    show_default=True,
    help="Folder; a folder per build is made in it.",
)
@click.option("--plain-kernels", is_flag=True, help="For a compiler without vector intrinsics.")
@click.option("--single-file", is_flag=True, help="Only gemrun.c and gemrun.h: the engine as one.")
@click.option("--debug", is_flag=True, help="Show a traceback on failure.")
def engine(
    targets: Sequence[str],
    libcs: Sequence[str],
    output: Path,
    plain_kernels: bool,
    single_file: bool,
    debug: bool,
) -> None:
    """Build the engine for other machines: libraries, headers, the gemrun command.

    Compiles with zig (pip install 'gembin-toolchain[cross]'); Cortex-M with arm-none-eabi-gcc.
    CROSS_COMPILE=aarch64-linux-gnu- with TARGET_ARCH=aarch64 in the environment use a compiler of
    your own. Two builds give the same bytes; engine.json in each folder lists them.
    """
    with command("gemmake", debug, "a build that was not done left nothing; start it again"):
        from gemmake import amalgamate, crossbuild

        if single_file:
            made = amalgamate.write(crossbuild.source_dir(), output, console.say)
            console.echo("\n".join(made))
            return
        request = crossbuild.Request(targets, libcs or crossbuild.LIBCS, plain_kernels)
        todo = crossbuild.recipes(request)
        built = [crossbuild.build(one, output, console.say) for one in todo]
        console.echo(crossbuild.table(built))
