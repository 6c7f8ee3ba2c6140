"""Runs damaged artifacts through both readers, in this process; stops at a disagreement.

    cd tests; python -m fuzz.run COUNT [RANDOM_SEED]

Seeds are the golden artifacts. A file on which the readers disagree, or that ended the process (it
is written before it is read), stays in build/fuzz for tests/golden to take over.
"""

from __future__ import annotations

import collections
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fuzz.mutate import mutations
from gemrun.format.codes import Code, FormatError
from gemrun.format.reader import read_artifact
from gemrun.progress import Progress
from hostile.format_engine import EngineReader

ROOT = Path(__file__).resolve().parents[2]
PART = 100  # images of one seed file in a row


def python_code(image: bytes) -> Code:
    """What the Python reader says about an image."""
    try:
        read_artifact(image, "structure", image=True)
    except FormatError as error:
        return error.code
    return Code.OK


def images(count: int, rng: random.Random) -> Iterator[bytes]:
    """`count` damaged copies of the golden artifacts."""
    seeds = [path.read_bytes() for path in sorted((ROOT / "tests/golden/v1.0").glob("*.gembin"))]
    for done in range(0, count, PART):
        yield from mutations(rng.choice(seeds), min(PART, count - done), rng)


def main() -> int:
    """1 at a disagreement."""
    if len(sys.argv) not in (2, 3) or not all(word.isdecimal() for word in sys.argv[1:]):
        print("usage: python -m fuzz.run COUNT [RANDOM_SEED]", file=sys.stderr)
        return 2
    count = int(sys.argv[1])
    number = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns()
    engine, counts = EngineReader(), collections.Counter[str]()
    progress, started = Progress(sys.stderr, tool="fuzz"), time.monotonic()
    folder = ROOT / "build" / "fuzz"
    folder.mkdir(parents=True, exist_ok=True)
    last = folder / "last.gembin"
    with last.open("wb", buffering=0) as kept:
        for done, image in enumerate(images(count, random.Random(number)), 1):
            os.ftruncate(kept.fileno(), len(image))
            os.pwrite(kept.fileno(), image, 0)
            ours, theirs = python_code(image), engine.status(image)
            counts[ours.name] += 1
            if ours != theirs:
                found = last.rename(folder / f"disagree-{ours.name}-{theirs}.gembin")
                print(f"fuzz: {found}: Python says {ours.name}, the engine {theirs}; seed {number}")
                return 1
            progress.update("images", done, count)
    last.unlink()
    rate = count / (time.monotonic() - started)
    print(f"fuzz: {count} images, both readers agree; {rate:.0f} images/s, seed {number}")
    print(dict(counts.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
