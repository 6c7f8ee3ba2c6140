"""Our engine and its peers side by side, in one run: make bench.

    python benchmarks/peers.py [--models A,B] [--peers A,B] [--repeats 5] [--output FILE.md] ...

Builds llama.cpp and ik_llama.cpp once (peer_build.py), makes the same weights for each engine
(peer_models.py), measures in turns, and prints a table of medians (peer_report.py). Every
measurement is a process of its own; a repeat takes all engines of a model one after another, the
next repeat begins with the next engine. Figures are kept in the cache as they come, so that
`--render` shows them again. The machine should do nothing else: it says so where it does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peer_build
import peer_models
import peer_own
import peer_report
from otherwork import OtherWork
from peer_build import Peer, PeerError

from gemrun import machine
from gemrun.context import Config
from gemrun.format.files import uncache
from gemrun.progress import Progress

HERE = Path(__file__).resolve().parent
TIME_LIMIT_S = 900  # of one measurement
WARM_RUNS = 2  # before open, first token and peak
PASSES = 15  # of the streaming loop, for each of its two forms
SHOWN_FLAGS = (
    *("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512vbmi", "avx512_bf16"),
    *("amx_int8", "asimd", "asimddp", "i8mm", "sve"),
)


@dataclass(frozen=True)
class Engine:
    """An engine with a model in its form."""

    name: str
    label: str
    file: Path
    bytes: int  # weights a token touches
    settings: tuple[str, ...] = ()  # ours: KEY=VALUE
    peer: Peer | None = None  # None: ours
    prefill: tuple[str, ...] = ()  # llama-bench's further options, which may differ by figure
    decode: tuple[str, ...] = ()


@dataclass
class Run:
    """What is asked for, and the figures so far."""

    given: argparse.Namespace
    record: dict[str, Any]
    progress: Progress = field(default_factory=lambda: Progress(sys.stderr, tool="peers"))

    def add(self, model: str, engine: Engine, figure: str, values: Sequence[float]) -> None:
        """Keep a figure's further values, and the whole record on disk."""
        samples = self.record["models"][model]["samples"].setdefault(engine.name, {})
        samples.setdefault(figure, []).extend(values)
        keep(self.record)

    def depth(self, model: str, engine: Engine, depth: int, values: Sequence[float]) -> None:
        """The same of decode behind so many tokens."""
        depths = self.record["models"][model]["depths"].setdefault(engine.label, {})
        depths.setdefault(str(depth), []).extend(values)
        keep(self.record)


def kept() -> Path:
    """Where the figures of the last run lie."""
    return peer_build.folder() / "figures.json"


def keep(record: dict[str, Any]) -> None:
    """Write the record; a break loses at most one measurement."""
    part = kept().with_suffix(".part")
    part.write_text(json.dumps(record, indent=1), encoding="utf-8")
    part.rename(kept())


# ---- one measurement each ----
def call(*command: object) -> str:
    """Output of a command; PeerError if it fails."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"{words[0]}: took more than {TIME_LIMIT_S} s; use --models") from None
    if done.returncode:
        tail = (done.stderr or done.stdout).strip().splitlines()[-2:] or ["no message"]
        raise PeerError(f"{' '.join(words[:4])}: failed ({' / '.join(tail)}); run it by hand")
    return done.stdout


def own(engine: Engine, what: str, *options: object) -> Any:
    """One measurement of ours, in its own process."""
    settings = [word for text in engine.settings for word in ("--set", text)]
    command = [sys.executable, HERE / "peer_own.py", engine.file, what, *settings]
    return peer_report.last_json(call(*command, *options))


def llama_bench(engine: Engine, *options: object) -> list[tuple[str, int, list[float]]]:
    """Figures of one call of a peer's llama-bench."""
    assert engine.peer is not None
    command = [engine.peer.bin / "llama-bench", "-m", engine.file, "-o", "json"]
    return peer_report.parse_bench(call(*command, *options))


def probe(run: Run, model: str, engine: Engine, prompt: int, steps: int) -> Any:
    """Open, first token and peak, each by a program in C; None for a peer without our probe. All
    have the context that our artifact plans memory for."""
    context, threads = peer_models.CONTEXTS[model], max(run.given.threads)
    program = engine.peer.probe if engine.peer else peer_build.build_own_probe()
    if program is None:
        return None
    command = (program, engine.file, threads, context)
    for _ in range(WARM_RUNS):  # a system may drop what was not read for a while
        call(*command, 0, *peer_own.prompt_ids(peer_own.SHORT))
    return peer_report.last_json(call(*command, steps, *peer_own.prompt_ids(prompt)))


def measure_rates(run: Run, model: str, engine: Engine) -> None:
    """Decode and prefill at every thread count."""
    counts = run.given.threads
    if engine.peer is None:
        found = own(engine, "rates", "--threads", ",".join(map(str, counts)))
        run.record["models"][model]["engines"][engine.name]["kernel"] = found["kernel"]
        for count in counts:
            for kind in ("prefill", "decode"):
                run.add(model, engine, f"{kind} {count}", [found[str(count)][kind]])
        return
    same = engine.prefill == engine.decode
    for count in counts:
        wanted = [(peer_own.PREFILL, peer_own.DECODE, engine.decode)]
        if not same:
            wanted = [(peer_own.PREFILL, 0, engine.prefill), (0, peer_own.DECODE, engine.decode)]
        for prompt, steps, more in wanted:
            options = ("-t", count, "-p", prompt, "-n", steps, "-r", 1, *more)
            for figure, _, rates in llama_bench(engine, *options):
                run.add(model, engine, figure, rates)


def measure_read(run: Run, model: str, engine: Engine) -> None:
    """Read bandwidth over the bytes of this engine."""
    stream = peer_build.build_stream()
    for count in run.given.threads:
        rate = peer_report.parse_stream(call(stream, engine.bytes, count, PASSES))
        run.add(model, engine, f"read {count}", [rate])


def measure_first(run: Run, model: str, engine: Engine) -> None:
    """Open and first token, page cache warm."""
    found = probe(run, model, engine, peer_own.SHORT, 0)
    for figure in ("open", "first") if found else ():
        run.add(model, engine, figure, [found[f"{figure}_ms"]])


def measure_peak(run: Run, model: str, engine: Engine) -> None:
    """Peak memory of 512 tokens in and 128 out."""
    found = probe(run, model, engine, peer_own.PREFILL, peer_own.DECODE)
    if found:
        run.add(model, engine, "peak", [found["peak_kib"]])


def measure_depths(run: Run, model: str, engine: Engine) -> None:
    """Decode speed over the tokens in the cache, for ours and llama.cpp."""
    wanted, threads = run.given.depths, max(run.given.threads)
    text = ",".join(map(str, wanted))
    if engine.peer is None:
        for depth, rates in own(engine, "depths", "--threads", threads, "--depths", text).items():
            run.depth(model, engine, int(depth), rates)
    elif engine.peer.name.startswith("llama.cpp") and "Q4_0" in engine.name:
        options = ("-t", threads, "-p", 0, "-n", peer_own.STEPS, "-d", text, "-r", peer_own.RUNS)
        for _, depth, rates in llama_bench(engine, *options):
            run.depth(model, engine, depth, rates)


FIGURES: dict[str, Callable[[Run, str, Engine], None]] = {
    "read": measure_read,
    "rates": measure_rates,
    "first": measure_first,
    "peak": measure_peak,
    "depths": measure_depths,
}
REPEATED = (measure_read, measure_rates, measure_first)


# ---- what there is to measure ----
def engines_of(
    model: peer_models.Model, given: argparse.Namespace, peers: dict[str, Peer]
) -> Iterator[Engine]:
    """Ours in every variant, then every peer in every form."""
    artifact = peer_models.artifact(model, given.fresh)
    with artifact.open("rb") as file:
        uncache(file.fileno())  # read in again as after a start of the machine: in huge pages
    for name, settings in given.own:
        size = peer_models.artifact_bytes(artifact, two_plane="head=two-plane" in settings)
        yield Engine(name, name, artifact, size, settings)
    for peer in peers.values():
        for form in given.forms if peer.name == "llama.cpp" else ["Q4_0"]:
            file = peer_models.gguf(model, form, given.quantize)
            name = f"{peer.name} {form}"
            engine = Engine(name, name, file, peer_models.gguf_bytes(file), (), peer)
            yield repacked(engine) if peer.name == "ik_llama.cpp" else engine


def repacked(engine: Engine) -> Engine:
    """ik_llama.cpp repacks weights at run time or not: whichever is faster here, by figure."""
    tries = {}
    for choice in (("-rtr", "0"), ("-rtr", "1")):
        options = ("-t", os.cpu_count() or 1, "-p", 256, "-n", 32, "-r", 2, *choice)
        for figure, _, rates in llama_bench(engine, *options):
            tries[figure.split()[0], choice] = max(rates)
    best = {
        kind: max((rate, choice) for (name, choice), rate in tries.items() if name == kind)[1]
        for kind in ("prefill", "decode")
    }
    return Engine(
        *(engine.name, engine.label, engine.file, engine.bytes, (), engine.peer),
        prefill=best["prefill"],
        decode=best["decode"],
    )


def in_turns(engines: Sequence[Engine], repeat: int) -> list[Engine]:
    """The engines in the order of a repeat: each begins once."""
    at = repeat % len(engines)
    return [*engines[at:], *engines[:at]]


def measure(run: Run, model: str, engines: Sequence[Engine]) -> None:
    """Everything of one model."""
    steps: list[tuple[Callable[[Run, str, Engine], None], Engine]] = []
    wanted = [FIGURES[name] for name in run.given.figures]
    for repeat in range(run.given.repeats):
        for engine in in_turns(engines, repeat):
            steps += [(what, engine) for what in wanted if what in REPEATED]
    deep = peer_models.CONTEXTS[model] > max(run.given.depths, default=1 << 30)
    for what in wanted:
        if what not in REPEATED and (deep or what is not measure_depths):
            steps += [(what, engine) for engine in engines]
    start = time.monotonic()
    for done, (what, engine) in enumerate(steps):
        phase = run.record["models"][model]["title"]
        run.progress.update(phase, done, len(steps))
        what(run, model, engine)
    run.progress.clear()
    print(f"peers: {model}: {time.monotonic() - start:.0f} s", file=sys.stderr)


# ---- the machine and the tools, in words ----
def facts() -> dict[str, str]:
    """The machine."""
    flags = peer_build.cpu_flags()
    compiler = peer_build.run([*peer_build.compiler(), "--version"], "cc", "install a C compiler")
    return {
        "processor": f"{machine.cpu_name()}, {machine.cores()} cores",
        "vector extensions": " ".join(flag for flag in SHOWN_FLAGS if flag in flags) or "unknown",
        "system": f"{platform.system()} {platform.release()}, {compiler.splitlines()[0]}",
    }


def asked(given: argparse.Namespace, peers: dict[str, Peer]) -> list[str]:
    """What each tool does for a figure."""
    both = f"prefill {peer_own.PREFILL} into an empty cache, then decode {peer_own.DECODE}"
    lines = [
        f"ours: {both} greedy tokens behind a prompt of one word, sampling included, int8 KV; "
        f"limited to {peer_own.CONTEXT} tokens of context (`peer_own.py`)",
        "reading: `stream.c`, the better of a plain and a prefetching loop over huge pages, median "
        f"of {PASSES} passes",
        "open, first token, peak: programs in C, `own_probe.c` and `peer_probe.c`, with the same "
        "ids, and the context that our artifact is compiled for ("
        f"{', '.join(f'{peer_models.CONTEXTS[name]:,}' for name in given.models)} tokens) on all "
        f"sides; page cache warm; peak after {peer_own.PREFILL} + {peer_own.DECODE} "
        f"tokens at {max(given.threads)} threads",
    ]
    for peer in peers.values():
        flags = " ".join(peer.flags)
        lines.append(
            f"{peer.name}: `llama-bench -p {peer_own.PREFILL} -n {peer_own.DECODE} -r 1`, random "
            f"ids, no sampling, f16 KV; {peer.label}, {flags}"
        )
    lines += [f"{name}: {' '.join(settings)}" for name, settings in given.own if settings]
    return lines


def describe(run: Run, model: peer_models.Model, engines: Sequence[Engine]) -> None:
    """Begin the record of a model."""
    run.record["models"][model.name] = {
        "title": model.title,
        "engines": {
            engine.name: {"label": engine.label, "bytes": engine.bytes, "own": engine.peer is None}
            for engine in engines
        },
        "samples": {},
        "depths": {},
    }
    for engine in engines:
        if engine.prefill or engine.decode:
            run.record["notes"].append(
                f"{model.title}, {engine.name}: prefill with {' '.join(engine.prefill)}, decode "
                f"with {' '.join(engine.decode)}, the faster of both"
            )


# ---- command line ----
def _own(text: str) -> tuple[str, tuple[str, ...]]:
    name, _, settings = text.partition(":")
    return name, tuple(part for part in settings.split(",") if part)


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in _names(text)]


def own_variants() -> list[tuple[str, tuple[str, ...]]]:
    """What of ours is measured where nobody says: both heads, if this engine has two."""
    if "head" in Config.__annotations__:
        return [("full head", ("head=full",)), ("two-plane head", ("head=two-plane",))]
    return [("ours", ())]


def parser() -> argparse.ArgumentParser:
    """The options."""
    one = argparse.ArgumentParser(description="our engine and its peers side by side")
    one.add_argument("--models", type=_names, default=list(peer_models.MODELS), metavar="A,B")
    one.add_argument("--peers", type=_names, metavar="A,B", help="all that fit this CPU")
    one.add_argument("--forms", type=_names, default=list(peer_models.FORMS), metavar="A,B")
    one.add_argument("--repeats", type=int, default=5)
    one.add_argument("--threads", type=_numbers, default=[1, 2], metavar="1,2")
    one.add_argument("--depths", type=_numbers, default=[0, 1024, 4096, 8192], metavar="0,1024")
    one.add_argument("--figures", type=_names, default=list(FIGURES), metavar="A,B")
    one.add_argument("--own", type=_own, action="append", metavar="NAME:KEY=VALUE,..")
    one.add_argument("--bin", action="append", default=[], metavar="PEER=FOLDER")
    one.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="of the builds")
    one.add_argument("--fresh", action="store_true", help="compile our artifacts again")
    one.add_argument("--prepare", action="store_true", help="build and convert, measure nothing")
    one.add_argument("--render", type=Path, metavar="FIGURES.json", help="show kept figures")
    one.add_argument("--output", type=Path, metavar="FILE.md", help="write the text there, too")
    return one


def prepare(given: argparse.Namespace) -> dict[str, Peer]:
    """The peers, built; PeerError for a name that there is not."""
    known = peer_build.available(peer_build.cpu_flags())
    given.peers = known if given.peers is None else given.peers
    given.own = given.own or own_variants()
    choices = (
        (given.peers, known),
        (given.models, list(peer_models.MODELS)),
        (given.figures, list(FIGURES)),
    )
    for names, there in choices:
        for name in names:
            if name not in there:
                raise PeerError(f"{name}: unknown here; one of {', '.join(there)}")
    places = {name: Path(place) for name, _, place in (text.partition("=") for text in given.bin)}
    needed = dict.fromkeys([*given.peers, "llama.cpp"]) if given.peers else {}  # it quantises
    built = peer_build.build_all(needed, places, given.jobs)
    if built:
        given.quantize = built["llama.cpp"].bin / "llama-quantize"
    return {name: built[name] for name in given.peers}


def benchmark(given: argparse.Namespace) -> dict[str, Any]:
    """Build, convert, measure; the record."""
    peers = prepare(given)
    models = [peer_models.MODELS[name] for name in given.models]
    for model in models:  # before anything is measured: both take long and warm the page cache
        peer_models.artifact(model, given.fresh)
        for form in given.forms if given.peers else ():
            peer_models.gguf(model, form, given.quantize)
    given.fresh = False
    record = {"machine": facts(), "asked": asked(given, peers), "notes": [], "models": {}}
    run = Run(given, record)
    if given.prepare:
        return record
    others = OtherWork()
    for model in models:
        engines = list(engines_of(model, given, peers))
        describe(run, model, engines)
        measure(run, model.name, engines)
        run.record["machine"]["meanwhile"] = others.text()
    keep(run.record)
    return run.record


def main() -> int:
    """Command line; see the module's text."""
    given = parser().parse_args()
    try:
        if given.render:
            record = json.loads(given.render.read_text(encoding="utf-8"))
        else:
            record = benchmark(given)
    except PeerError as error:
        sys.exit(f"peers: {error}")
    text = peer_report.render(record)
    print(text)
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
