"""How steady the engine is, alone and beside other work, and what helps.

    python benchmarks/neighbours.py MODEL.gembin [--beside alone,stream,serial,both]
        [--settings plain,affinity,nice,affinity+nice,weights] [--runs 30] [--tokens 64]
        [--rounds 2] [--minutes M] [--output FILE.md]

stream  a process that reads 256 MiB of memory again and again on one core (stream.c)
serial  a controller and a device that exchange 8 bytes on a serial line every 10 ms (serial.c)

affinity  the engine on all cores but the last, as many threads; the neighbours on the last
nice      the engine as it is, the stream at 19, the serial line at -10 where that is permitted
weights   control groups: stream 10, engine 100, serial 1000 where control groups can be made

A run is a prompt of 12 ids in an empty cache and so many greedy tokens. Times are of the monotonic
clock around prefill and sampling, and around each further token. `--minutes` runs until then, for
the tails: `--beside alone --settings plain --minutes 60` is an hour's worth of tokens.

After every run comes a loop of additions, as long as a first token, without memory (steady.c): its
deviation is the machine's own, below which no program gets.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peer_build
import peer_own
import peer_report
from otherwork import OtherWork

from gemrun import machine
from gemrun.bench import percentile
from gemrun.progress import Progress

HERE = Path(__file__).resolve().parent
BESIDE = {"alone": (), "stream": ("stream",), "serial": ("serial",), "both": ("stream", "serial")}
SETTINGS = ("plain", "affinity", "nice", "affinity+nice", "weights")
NICENESS = {"engine": 0, "stream": 19, "serial": -10}
WEIGHTS = {"engine": 100, "stream": 10, "serial": 1000}
STREAM_BYTES = 256 << 20
SERIAL_LIMIT_S = 3600
GROUPS = Path("/sys/fs/cgroup")
WARM_RUNS = 2


class NeighbourError(Exception):
    """A measurement cannot be made: `neighbours: <object>: <what is wrong>; <what to do>`."""


@dataclass
class Result:
    """Samples of one combination; times in ms, of the serial line in microseconds."""

    first: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    loops: list[float] = field(default_factory=list)
    serial: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """Where and how a process runs."""

    cores: frozenset[int]
    niceness: int = 0
    group: Path | None = None

    def enter(self) -> None:
        """Called in the new process, before it becomes the program."""
        os.sched_setaffinity(0, self.cores)
        if self.niceness:
            os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
        if self.group is not None:
            (self.group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


# ---- places ----
def places(setting: str, cores: frozenset[int], groups: Mapping[str, Path]) -> dict[str, Place]:
    """The place of the engine and of each neighbour."""
    split = "affinity" in setting and len(cores) > 1
    last = frozenset({max(cores)})
    return {
        name: Place(
            (cores - last if name == "engine" else last) if split else cores,
            NICENESS[name] if "nice" in setting else 0,
            groups[name] if setting == "weights" else None,
        )
        for name in NICENESS
    }


def may_be_nice() -> bool:
    """True if a process may be given a negative niceness."""
    command = [sys.executable, "-c", "import os; os.setpriority(os.PRIO_PROCESS, 0, -10)"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def make_groups() -> dict[str, Path]:
    """A control group for each part, of version 2 or 1; none where that is not permitted."""
    unified = (GROUPS / "cgroup.controllers").exists()
    made: dict[str, Path] = {}
    try:
        for name, weight in WEIGHTS.items():
            path = (GROUPS if unified else GROUPS / "cpu") / f"gembin-{os.getpid()}-{name}"
            path.mkdir()
            made[name] = path
            file, value = (
                ("cpu.weight", weight) if unified else ("cpu.shares", 1024 * weight // 100)
            )
            (path / file).write_text(str(value), encoding="ascii")
    except OSError:
        remove_groups(made)
        return {}
    return made


def remove_groups(groups: Mapping[str, Path]) -> None:
    """Remove the groups; their processes have ended."""
    for path in groups.values():
        with contextlib.suppress(OSError):
            path.rmdir()


# ---- processes ----
def build(name: str) -> Path:
    """One of our small C programs, compiled for this machine."""
    if name == "stream":
        return peer_build.build_stream()
    out, code = peer_build.folder() / name, HERE / f"{name}.c"
    if not out.is_file() or out.stat().st_mtime <= code.stat().st_mtime:
        out.parent.mkdir(parents=True, exist_ok=True)
        kind = ("-shared", "-fPIC") if name == "steady" else ()
        command = [*peer_build.compiler(), "-O2", *kind, str(code), "-o", str(out)]
        peer_build.run(command, code.name, "see its message")
    return out


def command_of(name: str) -> list[str]:
    """How a neighbour is started."""
    if name == "stream":
        return [str(build(name)), str(STREAM_BYTES), "1", "0"]
    return [str(build(name)), str(SERIAL_LIMIT_S)]


@contextlib.contextmanager
def neighbours(names: Sequence[str], where: Mapping[str, Place], out: Result) -> Iterator[None]:
    """The neighbours run inside the block; the serial line's figures come at its end."""
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        for name in names:
            running[name] = subprocess.Popen(
                command_of(name), stdout=subprocess.PIPE, text=True, preexec_fn=where[name].enter
            )
        time.sleep(1.0 if names else 0.0)
        yield
    finally:
        for name, child in running.items():
            child.send_signal(signal.SIGTERM)
            text, _ = child.communicate()
            if name == "serial" and child.returncode == 0:
                out.serial.append(json.loads(text))


def one(given: argparse.Namespace, beside: str, where: Mapping[str, Place], out: Result) -> None:
    """One process of the engine beside its neighbours; its samples are added to the result."""
    threads = min(given.threads, len(where["engine"].cores))
    command = [sys.executable, __file__, str(given.model), "--child", "--threads", str(threads)]
    command += ["--runs", str(given.runs), "--tokens", str(given.tokens)]
    command += ["--minutes", str(given.minutes)]
    command += [word for text in given.set for word in ("--set", text)]
    if len(where["engine"].cores) < machine.cores():
        mask = sum(1 << core for core in where["engine"].cores)
        command += ["--set", f"thread_affinity={mask}"]
    with neighbours(BESIDE[beside], where, out):
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            preexec_fn=where["engine"].enter,
        )
    if done.returncode:
        raise NeighbourError(f"{given.model}: the run failed ({done.returncode}); see above")
    found = json.loads(done.stdout)
    out.first.extend(found["first"])
    out.steps.extend(found["steps"])
    out.loops.extend(found["loops"])


def plain_loop() -> Callable[[float], float]:
    """A function that adds numbers for about so many ms, and tells how long it took."""
    additions = ctypes.CDLL(str(build("steady"))).additions
    additions.argtypes, additions.restype = [ctypes.c_uint64], ctypes.c_uint64
    count = 10_000_000

    def loop(wanted: float) -> float:
        begin = time.monotonic_ns()
        additions(int(count * wanted / whole))
        return 1e-6 * (time.monotonic_ns() - begin)

    whole = 1.0
    whole = min(loop(1.0) for _ in range(5))
    return loop


def child(given: argparse.Namespace) -> dict[str, list[float]]:
    """The engine's part, in this process; times in ms."""
    ids = peer_own.prompt_ids(peer_own.SHORT)
    size = peer_own.SHORT + given.tokens + 1
    loop, wanted = plain_loop(), 0.0
    first: list[float] = []
    steps: list[float] = []
    loops: list[float] = []
    config = peer_own.config_of(given.set)
    end = time.monotonic() + 60 * given.minutes
    with peer_own.opened(given.model, config, given.threads, size) as context:
        gc.disable()
        runs = 0
        while runs < WARM_RUNS + given.runs or time.monotonic() < end:
            context.reset_kv_cache()
            stamps = [time.monotonic_ns()]
            context.prefill(ids)
            token = context.sample(temperature=0.0)
            stamps.append(time.monotonic_ns())
            for _ in range(given.tokens):
                context.decode(token)
                token = context.sample(temperature=0.0)
                stamps.append(time.monotonic_ns())
            times = [1e-6 * (b - a) for a, b in itertools.pairwise(stamps)]
            runs += 1
            if runs <= WARM_RUNS:
                wanted = times[0]
                continue
            first.append(times[0])
            steps.extend(times[1:])
            loops.append(loop(wanted))
    return {"first": first, "steps": steps, "loops": loops}


# ---- text ----
HEAD = (
    *("beside", "setting", "first token, ms", "its deviation", "a plain loop's deviation"),
    *(
        "tokens",
        "token, median ms",
        "p95",
        "p99",
        "p99.9",
        "max",
        "serial: woke late, p99 / max, ms",
        "answer, p99 / max, ms",
        "missed",
    ),
)


def row(beside: str, setting: str, result: Result) -> list[str]:
    """The figures of one combination, as cells of a table with HEAD."""
    mean = statistics.fmean(result.first)
    shares = (0.5, 0.95, 0.99, 0.999, 1.0)
    steps = [f"{percentile(result.steps, share):.2f}" for share in shares]
    return [
        *(beside, setting, f"{mean:.1f}", deviation(result.first), deviation(result.loops)),
        *(f"{len(result.steps):,}", *steps),
        *serial_cells(result.serial),
    ]


def deviation(samples: Sequence[float]) -> str:
    """The sample standard deviation, of the mean."""
    if len(samples) < 2:
        return peer_report.NONE
    return f"{100 * statistics.stdev(samples) / statistics.fmean(samples):.1f} %"


def serial_cells(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of several rounds the worst p99 and maximum, and the share of missed periods."""
    if not rounds:
        return [peer_report.NONE] * 3
    cells = [
        " / ".join(f"{max(r[part][key] for r in rounds) / 1000:.2f}" for key in ("p99", "max"))
        for part in ("wake", "answer")
    ]
    missed, exchanges = (sum(r[key] for r in rounds) for key in ("missed", "exchanges"))
    return [*cells, f"{missed} of {exchanges}"]


def render(
    head: Sequence[str], results: Mapping[tuple[str, str], Result], notes: Sequence[str]
) -> str:
    """The whole text."""
    rows = [row(*key, result) for key, result in results.items() if result.first]
    lines = ["# Beside other work", "", *(f"- {line}" for line in (*head, *notes)), ""]
    return "\n".join([*lines, *peer_report.table(HEAD, rows)]) + "\n"


# ---- command line ----
def measure(
    given: argparse.Namespace, groups: Mapping[str, Path], notes: list[str]
) -> dict[tuple[str, str], Result]:
    """All combinations, in rounds."""
    cores = frozenset(os.sched_getaffinity(0))
    left_out = "" if groups else "weights"
    if left_out in given.settings:
        notes.append("weights: not measured, control groups cannot be made here")
    if not may_be_nice():
        NICENESS["serial"] = 0
        notes.append("niceness below 0 is not permitted here: the serial line runs at 0")
    wanted = [
        (beside, setting)
        for beside in given.beside
        for setting in given.settings
        if setting != left_out
    ]
    results = {key: Result() for key in wanted}
    others = OtherWork()
    progress = Progress(sys.stderr, tool="neighbours")
    for turn in range(given.rounds):
        for number, (beside, setting) in enumerate(wanted):
            done = turn * len(wanted) + number
            progress.update(f"{beside}, {setting}", done, given.rounds * len(wanted))
            one(given, beside, places(setting, cores, groups), results[beside, setting])
    progress.clear()
    notes.append(f"meanwhile {others.text()}")
    return results


def _names(known: Sequence[str], what: str, text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise NeighbourError(f"{what} {name}: unknown; some of {','.join(known)}")
    return names


def facts(given: argparse.Namespace) -> list[str]:
    """The machine and what was run."""
    return [
        f"processor: {machine.cpu_name()}, {machine.cores()} cores",
        f"{given.model.name}: {given.rounds} x {given.runs} runs of {peer_own.SHORT} ids and "
        f"{given.tokens} greedy tokens, {given.threads} threads (fewer where cores are kept free)"
        + (f", at least {given.minutes:g} minutes each" if given.minutes else ""),
    ]


def parser() -> argparse.ArgumentParser:
    """The options."""
    one_ = argparse.ArgumentParser(description="steadiness, alone and beside other work")
    one_.add_argument("model", type=Path)
    one_.add_argument("--beside", default=",".join(BESIDE))
    one_.add_argument("--settings", default=",".join(SETTINGS))
    one_.add_argument("--runs", type=int, default=30)
    one_.add_argument("--tokens", type=int, default=64)
    one_.add_argument("--rounds", type=int, default=2)
    one_.add_argument("--minutes", type=float, default=0.0, help="at least so long each")
    one_.add_argument("--threads", type=int, default=min(8, machine.cores()))
    one_.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    one_.add_argument("--output", type=Path, metavar="FILE.md")
    one_.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return one_


def main() -> int:
    """Command line; see the module's text."""
    given = parser().parse_args()
    if given.child:
        print(json.dumps(child(given)))
        return 0
    try:
        given.beside = _names(list(BESIDE), "--beside", given.beside)
        given.settings = _names(SETTINGS, "--settings", given.settings)
        head, notes = facts(given), list[str]()
        groups = make_groups()
        try:
            text = render(head, measure(given, groups, notes), notes)
        finally:
            remove_groups(groups)
    except (NeighbourError, peer_build.PeerError) as error:
        sys.exit(f"neighbours: {error}")
    print(text)
    if given.output:
        given.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
