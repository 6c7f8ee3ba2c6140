"""Candidates and misses of the head in two planes, against the full head, on real text.

    python benchmarks/head.py MODEL.gembin --text PATH [--tokens N] [--margins 6]

Every position of the text counts, in contexts of --window tokens that begin as the model's own.
For the best token and for the best 40: candidates a token, and how many of the full head's best
had no logit. Exit 1 if one is missing at a margin that the engine uses, or if a logit differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path

from gemrun import GemRunContext

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import handbook  # noqa: E402

PIECE = 8000  # characters to tokenize at a time
USED = 6.0  # GR_MARGIN


def token_ids(context: GemRunContext, text: str) -> Iterator[int]:
    """Ids of the text, piece by piece."""
    for at in range(0, len(text), PIECE):
        yield from context.tokenize(text[at : at + PIECE])


def windows(path: Path, text: str, tokens: int, window: int) -> array[int]:
    """Ids of whole windows, as many as `tokens` fill; each begins with the model's first token."""
    made: array[int] = array("i")
    with GemRunContext(path, threads=1) as context:
        bos = [] if context.info.bos_id is None else [context.info.bos_id]
        one: list[int] = list(bos)
        for token in token_ids(context, text):
            one.append(token)
            if len(one) == window:
                made.extend(one)
                one = list(bos)
                if len(made) >= tokens:
                    break
    return made


def build(folder: Path) -> Path:
    """The measuring program, linked with the engine that `make dev` has built."""
    program, library = folder / "head_rates", ROOT / "build" / "dev" / "libgemrun.a"
    source = ROOT / "benchmarks" / "head_rates.c"
    flags = ["-O2", "-std=c11", "-ffp-contract=off", f"-I{ROOT / 'csrc'}"]
    command = ["cc", *flags, str(source), str(library), "-lm", "-pthread", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def main() -> int:
    """Measure, print a line a margin and count, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="file, or the handbook's folder")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--margins", default=str(USED), help="in spreads, with commas")
    given = parser.parse_args()
    is_folder = given.text.is_dir()
    text = handbook.text(given.text) if is_folder else given.text.read_text(encoding="utf-8")
    ids = windows(given.model, text, given.tokens, given.window)
    with tempfile.TemporaryDirectory() as folder:
        command = [build(Path(folder)), given.model, str(given.window), *given.margins.split(",")]
        done = subprocess.run(command, input=ids.tobytes(), stdout=subprocess.PIPE, check=True)
    bad = False
    rows = [line.split() for line in done.stdout.decode().splitlines()]
    count = rows[-1][0]
    for _, margin, best, mean, most, missed, wrong in (row for row in rows if row[0] == count):
        print(
            f"{given.model.name}: {count} tokens, best {best}, margin {margin}: {mean} candidates "
            f"a token, at most {most}; {missed} missed, {wrong} wrong"
        )
        bad |= (float(margin) >= USED and int(missed) > 0) or int(wrong) > 0
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
