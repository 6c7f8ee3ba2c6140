"""Runs damaged artifacts through both readers until the time is up; stops at a disagreement.

    cd tests; python -m fuzz.run [SECONDS] [RANDOM_SEED]        (60 seconds by default)

Seeds are the golden artifacts. A file on which the readers disagree, or that made the engine crash
(it is written before it is opened), stays in build/fuzz for tests/golden to take over.
"""

from __future__ import annotations

import collections
import random
import sys
import time
from pathlib import Path

from fuzz.mutate import mutations
from gemrun.format.codes import Code, FormatError
from gemrun.format.reader import read_artifact
from hostile.format_engine import EngineReader

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """The number of disagreements."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    number = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns()
    rng, engine, counts = random.Random(number), EngineReader(), collections.Counter[str]()
    folder = ROOT / "build" / "fuzz"
    folder.mkdir(parents=True, exist_ok=True)
    seeds = [path.read_bytes() for path in sorted((ROOT / "tests/golden/v1.0").glob("*.gembin"))]
    print(f"random seed {number}, {len(seeds)} seed files, {seconds:g} seconds")
    last, end = folder / "last.gembin", time.monotonic() + seconds
    while time.monotonic() < end:
        for image in mutations(rng.choice(seeds), 100, rng):
            last.write_bytes(image)
            try:
                read_artifact(image, "structure", image=True)
                ours = Code.OK
            except FormatError as error:
                ours = error.code
            theirs = engine.status(image)
            counts[ours.name] += 1
            if ours != theirs:
                kept = last.rename(folder / f"disagree-{ours.name}-{theirs}.gembin")
                print(f"{kept}: Python says {ours.name}, the engine {theirs}")
                return 1
    print(f"{sum(counts.values())} files, readers agree: {dict(counts.most_common())}")
    last.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
