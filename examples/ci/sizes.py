"""A table of artifacts in Markdown: board, file, memory of a run, what the board grants.

python sizes.py *.gembin
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gemrun.format.codes import FormatError
from gemrun.format.reader import read_artifact
from gemrun.format.spec import field_text

MB = 1e6


def row(path: Path) -> str:
    """One artifact."""
    with read_artifact(path, "fast") as artifact:
        header, conf = artifact.header, artifact.conf
        budget = f"{header.ram_budget / MB:.1f}" if header.ram_budget else "on the device"
        cells = [
            field_text(header.target),
            path.name,
            f"{header.file_size / MB:.1f}",
            f"{header.ram_total / MB:.1f}",
            budget,
            str(conf.context),
            header.root_sha256.hex()[:16],
        ]
    return f"| {' | '.join(cells)} |"


def main(paths: Sequence[str]) -> int:
    """Print the table, boards in the order of their files' names."""
    if not paths:
        print("sizes.py: no artifact given; name some, as *.gembin", file=sys.stderr)
        return 2
    try:
        rows = [row(Path(path)) for path in sorted(paths)]
    except (FormatError, OSError) as error:
        print(f"sizes.py: {error}", file=sys.stderr)
        return 4
    print("| board | artifact | file, MB | memory of a run, MB | budget, MB | context | root |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
