"""gemctl, the operator's command. What it has to import decides how long it takes: this little.

Questions that scripts ask often are answered by quick.py, words for a shell's completion by
completing.py, everything else by cli_commands.py.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

COMPLETE = "_GEMCTL_COMPLETE"  # set by the script of `gemctl completion`


def main(args: Sequence[str] | None = None, prog_name: str = "gemctl") -> None:
    """Run the command and exit the process."""
    words = list(sys.argv[1:] if args is None else args)
    try:
        _run(words, prog_name)
    except KeyboardInterrupt:  # while modules are imported
        from gemctl import session
        from gemctl.client import Refused

        stopped = Refused("cancelled", session.STOPPED)
        sys.exit(session.end(stopped, session.wants_json(words)))


def _run(words: list[str], prog_name: str) -> None:
    if COMPLETE in os.environ:
        from gemctl import completing

        sys.exit(completing.answer(os.environ[COMPLETE]))
    from gemctl import quick

    code = quick.answer(words)
    if code is not None:
        sys.exit(code)
    from gemctl.cli_commands import main as commands

    commands(words, prog_name=prog_name)


if __name__ == "__main__":
    main()
