"""The gemmake command: parse, call, render."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import click

from gemmake import __version__
from gemmake.advise_cli import advise, storage_option
from gemmake.engine_cli import engine
from gemmake.errors import OutputError
from gemmake.failures import command
from gemmake.hdf_cli import hdf
from gemmake.options import (
    MEMORY_LAYOUT,
    Effort,
    Int4Format,
    KvGate,
    KvKeys,
    KvType,
    KvValues,
    Offload,
    Profile,
    Quantization,
    ThrottleMode,
    asked,
)
from gemrun import console
from gemrun.format.writer import show

PATH = console.FileName(path_type=Path)
GATES = ",".join(f"{name}={value}" for name, value in asdict(KvGate()).items())
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _gate(_ctx: click.Context, _param: click.Parameter, value: str | None) -> KvGate:
    """GATES in any order; what is left out keeps its default."""
    given: dict[str, float] = {}
    for part in (value or "").split(",") if value else ():
        name, _, number = part.partition("=")
        try:
            given[name.strip()] = float(number)
            KvGate(**given)
        except (ValueError, TypeError):
            raise click.UsageError(
                f"--kv-gate: {part.strip() or 'nothing'} is no gate; use {GATES} or some of them"
            ) from None
    return KvGate(**given)


def _choice(kind: type[Enum], name: str) -> Decorator:
    """An option whose values are those of an enum; the first is the default."""
    members = [member.value for member in kind]
    return click.option(
        name,
        type=click.Choice(members),
        default=members[0],
        show_default=True,
        callback=lambda _ctx, _param, value: kind(value),
        help=(kind.__doc__ or "").strip(),
    )


class Word(console.Command):
    """A command; output that cannot be written has the exit code of any other result."""

    unwritten = OutputError.exit_code


class Gemmake(Word):
    """The command. A first word of `words` is one of its own, with its own options."""

    words: ClassVar[dict[str, click.Command]] = {}

    def main(self, args: Sequence[str] | None = None, *more: Any, **extra: Any) -> Any:
        """Run the command, or the one that the first word names."""
        given = list(sys.argv[1:] if args is None else args)
        if given and given[0] in self.words:
            word = self.words[given[0]]
            return word.main(given[1:], **{**extra, "prog_name": word.name})
        return super().main(given, *more, **extra)


@click.command("gemmake", cls=Gemmake, context_settings={"max_content_width": 100})
@click.option(
    "--model",
    required=True,
    type=PATH,
    help="Checkpoint: Hugging Face folder, .safetensors, .pt, .pth or .gguf.",
)
@click.option("--target", required=True, help="Board: a name in hdf/, or a path to a .toml file.")
@click.option(
    "--output",
    default=None,
    type=PATH,
    help="Artifact to write; a .memmap listing is written beside it.  "
    "[default: MODEL-TARGET[-BSP].gembin]",
)
@click.option(
    "--bsp-version",
    default=None,
    metavar="BSP",
    help="Version of the board support package, as 35.4.1: stored for gemrun --doctor, and in the "
    "default name.  [default: the target's]",
)
@_choice(Quantization, "--quantization")
@click.option(
    "--kv-cache-type",
    "kv_type",
    callback=lambda _ctx, _param, value: KvType(value),
    default="int8",
    show_default=True,
    type=click.Choice([kind.value for kind in KvType]),
    help="KV cache; dynamic-sparse: int8, and heads that lose little keep a part (measured).",
)
@_choice(KvValues, "--kv-values")
@_choice(KvKeys, "--kv-keys")
@click.option(
    "--prefill-sample-ratio",
    "sample_ratio",
    type=float,
    default=0.1,
    show_default=True,
    help="dynamic-sparse, int4 values, keys: share of 10,000 calibration windows that is measured.",
)
@click.option(
    "--kv-gate",
    "kv_gate",
    callback=_gate,
    default=None,
    metavar="kl=..,top1=..",
    help="dynamic-sparse, int4 values, keys: what it may cost on held-out text.  "
    f"[default: {GATES}]",
)
@click.option(
    "--kv-minutes",
    "kv_minutes",
    type=float,
    default=None,
    help="dynamic-sparse, int4 values, keys: measure no longer than this; the result then depends "
    "on the machine.",
)
@click.option(
    "--kv-cache-size",
    "context",
    type=int,
    default=None,
    help="Tokens the context holds; fixes memory.  [default: 1024; lite: 512]",
)
@click.option(
    "--prefill-chunk",
    "chunk",
    type=int,
    default=None,
    help="Tokens of one prefill step; fixes scratch memory.  [default: 128; lite: 32]",
)
@_choice(Profile, "--profile")
@_choice(Offload, "--offload")
@click.option(
    "--reserve",
    "reserve_mib",
    type=int,
    default=None,
    metavar="MIB",
    help="Memory left to everything else (default: from the target).",
)
@click.option(
    "--ram-fraction",
    type=float,
    default=None,
    help="Share of the memory that a model may take (default: from the target).",
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
    expose_value=False,  # one layout exists
    help="How memory is laid out.",
)
@click.option(
    "--temperature-threshold",
    type=float,
    default=None,
    help="°C at which throttling starts; stored in the artifact.",
)
@_choice(ThrottleMode, "--throttle-mode")
@click.option(
    "--power-mode",
    default=None,
    help="Power mode of the target that speed is predicted for (default: the target's; see "
    "gemmake hdf list); changes no byte.",
)
@storage_option
@click.option(
    "--config",
    type=PATH,
    default=None,
    help="config.json for a .pt or .pth without one beside it.",
)
@_choice(Effort, "--effort")
@_choice(Int4Format, "--int4-format")
@click.option(
    "--calibration",
    type=PATH,
    default=None,
    help="Your own text instead of what ships with gemmake: a UTF-8 file; for dynamic-sparse also "
    "a folder, or JSONL of chats.",
)
@click.option(
    "--pin-prompt",
    default=None,
    metavar="TEXT|@FILE",
    help="Store keys and values of this beginning of prompts: a run need not compute it; same "
    "answers.",
)
@click.option(
    "--pin-system", is_flag=True, help="--pin-prompt is the system message of conversations."
)
@click.option(
    "--save-statistics",
    type=PATH,
    default=None,
    help="Make the statistics of error feedback with torch: faster, kept in this file as an input.",
)
@click.option(
    "--statistics",
    type=PATH,
    default=None,
    help="Use statistics that --save-statistics made: same file, same bytes.",
)
@click.option(
    "--dump-after",
    multiple=True,
    metavar="PASS",
    help="Write the state after a pass to OUTPUT.PASS.json; may be repeated.",
)
@click.option("--workers", type=int, default=0, help="Compile threads (default: all cores).")
@click.option(
    "--baseline",
    is_flag=True,
    envvar="GEMMAKE_BASELINE",
    help="Use no instruction sets above the build's own: slow, same bytes.",
)
@click.option("--verbose", is_flag=True, help="Tell what is done and where layers are placed.")
@click.option("--debug", is_flag=True, help="Show a traceback on failure.")
@click.version_option(__version__, prog_name="gemmake")
def main(debug: bool, **options: Any) -> None:
    """Compile a checkpoint and a hardware description into one .gembin artifact.

    \b
    gemmake keygen --output NAME          make a pair of keys, NAME.key and NAME.pub
    gemmake sign FILE --key NAME.key      sign an artifact
    gemmake hdf --help                    the boards that --target takes: list, show, check
    gemmake advise --target BOARD MODEL.. which models fit a board and a task, and why not
    gemmake engine --help                 the engine for other machines

    A file is replaced only by one of its own kind: an OUTPUT that is no artifact, and an
    OUTPUT.partial, .memmap or .PASS.json that gemmake did not write, end the command before it
    begins. Exit: 0 done, 1 the host failed, 2 usage, 3 checkpoint, 4 target, 5 over budget,
    6 artifact, 7 output, 130 Ctrl-C, 143 SIGTERM.
    """
    with command("gemmake", debug, "no artifact was written"):
        from gemmake import firmware, machine
        from gemmake.naming import default_output
        from gemmake.pipeline import compile_model
        from gemmake.progress import shown
        from gemmake.report import render_result

        if options["output"] is None:
            model, target = options["model"], options["target"]
            options["output"] = default_output(model, target, options["bsp_version"])
        request = asked(**firmware.usual(options))
        machine.warn("gemmake")
        with shown("gemmake", request.verbose) as reporter:
            result = compile_model(request, reporter)
        console.echo(render_result(result))


@click.command("gemmake keygen", cls=Word)
@click.option("--output", "base", required=True, type=PATH, help="NAME of NAME.key and NAME.pub.")
@click.option("--comment", default="", help="Free text in both files (default: the name).")
@click.option("--debug", is_flag=True, help="Show a traceback on failure.")
def keygen(base: Path, comment: str, debug: bool) -> None:
    """Make a pair of keys: NAME.key, which signs and stays secret, and NAME.pub, which verifies.

    Put NAME.pub into the folder of trusted keys of every device (models.keys_dir of gemctl).
    """
    with command("gemmake", debug):
        from gemmake import signing

        key = signing.keygen(base, comment)
        console.echo(f"SUCCESS: key {key.id.hex()} in {show(str(base))}.key and .pub")


@click.command("gemmake sign", cls=Word)
@click.argument("artifact", type=PATH)
@click.option("--key", required=True, type=PATH, help="NAME.key of gemmake keygen.")
@click.option("--output", type=PATH, default=None, help="Artifact to write (default: in place).")
@click.option("--debug", is_flag=True, help="Show a traceback on failure.")
def sign(artifact: Path, key: Path, output: Path | None, debug: bool) -> None:
    """Sign an artifact with Ed25519: same artifact and key, same bytes."""
    with command("gemmake", debug):
        from gemmake import signing

        console.echo(signing.sign(artifact, key, output).line())


Gemmake.words.update(keygen=keygen, sign=sign, hdf=hdf, advise=advise, engine=engine)

if __name__ == "__main__":
    main()
