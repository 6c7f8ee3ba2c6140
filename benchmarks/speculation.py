"""What speculation by prompt lookup is worth: tokens per second by how far it guesses ahead.

    python benchmarks/speculation.py MODEL.gembin [--tokens 120] [--threads 1]

Greedy, best of three; the ids are compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gemrun import GemRunContext, machine

PROMPTS = {
    "code": "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):"
    "\n    return",
    "JSON": '{"id": 1, "name": "pump", "state": "on"}, {"id": 2, "name": "valve", "state": "off"}, '
    '{"id": 3, "name":',
    "repetition": "Open valve 4, then wait. " * 6,
    "prose": "The history of the steam engine began when",
}
AHEAD = (0, 2, 4, 6)
REPEATS = 3


def main() -> None:
    """Measure and print a table; exit 1 if an answer changes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    equal = True
    print(f"{machine.cpu_name()}, {given.threads} threads; {given.model.name}")
    print("| | " + " | ".join(f"{n} ahead" if n else "off" for n in AHEAD) + " |")
    print("|---" * (len(AHEAD) + 1) + "|")
    with GemRunContext(given.model, threads=given.threads) as context:
        for name, prompt in PROMPTS.items():
            cells, want = [], None
            for ahead in AHEAD:
                runs = [
                    context.infer(
                        prompt, given.tokens, temperature=0.0, ignore_stop_ids=True, speculate=ahead
                    )
                    for _ in range(REPEATS)
                ]
                want = want or list(runs[0])
                equal &= all(list(run) == want for run in runs)
                best = max(run.stats.decode_tps for run in runs)
                stats = runs[0].stats
                share = f" ({stats.accepted}/{stats.drafted})" if ahead else ""
                cells.append(f"{best:.0f}{share}")
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
