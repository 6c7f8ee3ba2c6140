"""Short commands behind one preamble, as a controller sends them: time to every first token, how
much of the prompts the cache holds, memory after every command.

    python benchmarks/commands.py MODEL.gembin [--commands 50] [--preamble 300] [--tokens 8]
                                               [--threads N]

The same commands run three times: each from an empty cache; with `reuse`, so that what the cache
holds of a prompt is not computed again; and from a session that keeps the preamble, of which the
context takes over a copy before every command (its time counts). Greedy; the answers have to be the
same, and the engine's resident memory after the last command what it was after the first. Exit 1
where they are not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from gemrun import GemRunContext, machine, memory
from gemrun.context import Config

RULES = (
    "You control the vehicles of a warehouse and answer every command with one short line.",
    "A vehicle carries one pallet and has a number from 1 to 20.",
    "Docks have numbers, aisles have letters, and every shelf is named by its aisle and a number.",
    "Never send two vehicles into one aisle, and never past a gate that is closed.",
    "If the battery of a vehicle is below 20 percent, send it to the charger first.",
    "A command that cannot be carried out is answered with the reason.",
    "Loads above 800 kilograms go through gate 2, because the floor of gate 1 is weak.",
    "Report blocked aisles at once, and wait until somebody has released them.",
)
FORMS = (
    "Move pallet {n} to dock {m}.",
    "Where is vehicle {m}?",
    "Send vehicle {m} to shelf C{n}.",
    "Charge vehicle {m}.",
    "Is aisle B free for pallet {n}?",
    "Stop vehicle {m}.",
    "Unload pallet {n} at gate 2.",
)
WITHIN_S, FIRST_MS = 10.0, 800.0  # what is asked of 50 commands, and of every first token


@dataclass(frozen=True)
class Answer:
    """One command. `first_ms`: from the call, what it took to prepare the cache included."""

    first_ms: float
    prompt: int  # tokens
    reused: int  # of them
    ids: tuple[int, ...]
    resident: int  # bytes of the engine's mappings behind it


@dataclass(frozen=True)
class Run:
    """All commands one after another."""

    answers: tuple[Answer, ...]
    seconds: float  # of the commands, without the looks at the memory

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that the cache held."""
        return sum(a.reused for a in self.answers) / sum(a.prompt for a in self.answers)

    @property
    def first_ms(self) -> list[float]:
        """Time to every first token."""
        return [a.first_ms for a in self.answers]

    @property
    def grown(self) -> int:
        """Resident bytes after the last command, less those after the first."""
        return self.answers[-1].resident - self.answers[0].resident


def preamble(context: GemRunContext, tokens: int) -> str:
    """Rules of about so many tokens, the same ones again where they are not enough."""
    text = ""
    for rule in cycle(RULES):
        more = f"{text}{rule}\n"
        if text and len(context.tokenize(more, bos=True)) > tokens:
            return text
        text = more
    raise AssertionError


def commands(count: int) -> list[str]:
    """The commands, no two of them alike."""
    forms = list(islice(cycle(FORMS), count))
    return [
        form.format(n=100 + 7 * at, m=1 + at % 20) + f" ({at})" for at, form in enumerate(forms)
    ]


def prompts(context: GemRunContext, tokens: int, count: int) -> list[str]:
    """What is sent: the preamble with every command behind it."""
    begin = preamble(context, tokens)
    return [f"{begin}\nCommand: {command}\nAnswer:" for command in commands(count)]


def serve(
    context: GemRunContext,
    path: Path,
    texts: Sequence[str],
    tokens: int,
    reuse: bool,
    prepare: Callable[[], object] = lambda: None,
) -> Run:
    """Answer all of them with so many tokens each. `prepare` comes before every one."""
    found, seconds = [], 0.0
    for text in texts:
        begin = time.monotonic()
        prepare()
        prepared = time.monotonic()
        answer = context.infer(text, tokens, temperature=0.0, ignore_stop_ids=True, reuse=reuse)
        seconds += time.monotonic() - begin
        stats = answer.stats
        first = 1e3 * (prepared - begin) + stats.ttft_ms
        resident = memory.measure(context, path).resident
        found.append(Answer(first, stats.prompt_tokens, stats.reused, tuple(answer), resident))
    return Run(tuple(found), seconds)


def three_ways(
    context: GemRunContext, path: Path, tokens: int, count: int, made: int
) -> dict[str, Run]:
    """From an empty cache, with reuse, and from a session that keeps the preamble."""
    texts = prompts(context, tokens, count)
    context.infer(texts[0], made, temperature=0.0, ignore_stop_ids=True)  # warm
    runs = {"empty cache": serve(context, path, texts, made, reuse=False)}
    context.reset_kv_cache()
    runs["reuse"] = serve(context, path, texts, made, reuse=True)
    with context.session(threads=1) as keeper:
        keeper.prefill(keeper.tokenize(preamble(context, tokens), bos=True))
        runs["kept in a session"] = serve(
            context, path, texts, made, True, lambda: context.fork_from(keeper)
        )
    return runs


def wrong(runs: dict[str, Run]) -> list[str]:
    """What must not be: other answers, more memory."""
    ids = [a.ids for a in runs["empty cache"].answers]
    found = [
        f"{name}: other answers"
        for name, run in runs.items()
        if [a.ids for a in run.answers] != ids
    ]
    return found + [f"{name}: {run.grown:+} bytes" for name, run in runs.items() if run.grown]


def table(runs: dict[str, Run]) -> list[str]:
    """Rows of a Markdown table."""
    empty = runs["empty cache"]
    lines = [
        "| | held by the cache | first token: median, most | of the empty cache | 2nd and 3rd "
        "prompt, and their share to compute | all | memory, last less first |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        first, all_empty = run.first_ms, empty.first_ms
        middle = statistics.median(first)
        two = ", ".join(
            f"{first[at] / all_empty[at]:.2f} ({1 - a.reused / a.prompt:.2f})"
            for at, a in enumerate(run.answers[:3])
            if at
        )
        lines.append(
            f"| {name} | {run.hit_rate:.1%} | {middle:.1f}, {max(first):.1f} ms | "
            f"{middle / statistics.median(all_empty):.2f} | {two} | {run.seconds:.2f} s | "
            f"{run.grown:+} bytes |"
        )
    return lines


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="short commands behind one preamble")
    parser.add_argument("model", type=Path)
    parser.add_argument("--commands", type=int, default=50)
    parser.add_argument("--preamble", type=int, default=300, help="tokens, about")
    parser.add_argument("--tokens", type=int, default=8, help="of every answer")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    config: Config = {"threads": given.threads} if given.threads else {}
    with GemRunContext(given.model, **config) as context:
        runs = three_ways(context, given.model, given.preamble, given.commands, given.tokens)
        threads = context.stats().threads
    print(
        f"{given.model.name} on {machine.cpu_name()}, {threads} threads: {given.commands} commands "
        f"behind a preamble, {runs['reuse'].answers[0].prompt} tokens each, {given.tokens} answered"
    )
    print("\n".join(table(runs)))
    slow = {
        name: run
        for name, run in runs.items()
        if run.seconds > WITHIN_S or max(run.first_ms) > FIRST_MS
    }
    print(f"above {WITHIN_S:.0f} s or {FIRST_MS:.0f} ms: {', '.join(slow) or 'none'}")
    problems = wrong(runs)
    print("\n".join(problems) or "same answers, memory constant")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
