"""Where installed commands begin: Ctrl-C while Python still imports them is told as any other.

    [project.scripts]
    gembench = "gemrun.starting:gembench"

It imports nothing of its own, so that there is next to no time before it.
"""

from __future__ import annotations

import sys

CANCELLED = 130


def started(tool: str, module: str) -> None:
    """Run `main` of a command's module and exit the process."""
    try:
        __import__(module)
        sys.modules[module].main()
    except KeyboardInterrupt:  # while modules are imported
        if sys.stderr is not None:
            print(f"{tool}: stopped by SIGINT; start it again", file=sys.stderr)
        sys.exit(CANCELLED)


def gembench() -> None:
    """The command."""
    started("gembench", "gemrun.cli_bench")
