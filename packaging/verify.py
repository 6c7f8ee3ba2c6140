"""Builds and runs the engine in other people's builds, and keeps a log of each.

    python packaging/verify.py [--log] ROW..      rows: the names in packaging/verify

A row is a shell script there, for what needs no project of others but a compiler: those rows are
run by hand. Its first comments name programs, `# tool: COMMAND`, whose first line of output is the
version in the log. --log writes packaging/logs/ROW.txt, at most 60 lines, with this machine's
folders left out. Exit 1 if a row fails.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "packaging" / "verify"
LOGS = ROOT / "packaging" / "logs"
LAST, WIDTH = 46, 160  # lines of a script's output that a log keeps, and how much of each
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def rows() -> list[str]:
    """Names of the rows that can be run."""
    return sorted(path.stem for path in SCRIPTS.glob("*.sh"))


def tools(row: str) -> list[str]:
    """Commands that tell a version, of a script's comments."""
    text = (SCRIPTS / f"{row}.sh").read_text(encoding="utf-8")
    return re.findall(r"^# tool: (.+)$", text, re.M)


def output(command: list[str] | str, **more: str) -> tuple[int, str]:
    """Exit code and all that a command says."""
    done = subprocess.run(
        command, shell=isinstance(command, str), stdout=subprocess.PIPE, check=False,
        stderr=subprocess.STDOUT, text=True, errors="replace", env={**os.environ, **more},
    )  # fmt: skip
    return done.returncode, done.stdout


def system() -> str:
    """What this machine runs, without its name."""
    return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {platform.machine()}"


def facts(row: str, work: Path) -> Iterator[str]:
    """The head of a log."""
    yield f"$ python packaging/verify.py {row}"
    yield f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}, {system()}"
    for command in tools(row):
        code, said = output(command, **told(work))
        if code:
            sys.exit(f"verify: {row}: {command}: {said.strip()}; install it")
        yield next(line for line in said.splitlines() if line.strip())


def clean(text: str, work: Path) -> list[str]:
    """The last lines of a script, without colours and this machine's folders."""
    for folder, word in ((work, "$WORK"), (ROOT, "$ROOT"), (Path.home(), "~")):
        text = text.replace(str(folder), word)
    lines = [COLOUR.sub("", line).rstrip() for line in text.replace("\r", "\n").splitlines()]
    kept = [line if len(line) <= WIDTH else f"{line[:WIDTH]} .." for line in lines if line]
    left_out = len(kept) - LAST
    return kept if left_out <= 0 else [f".. {left_out} lines ..", *kept[-LAST:]]


def told(work: Path) -> dict[str, str]:
    """What every script finds in its environment."""
    return {"ROOT": str(ROOT), "WORK": str(work), "PYTHON": sys.executable}


def verify(row: str, work: Path, keep: bool) -> bool:
    """Runs a row and prints its log; True if it passed."""
    head = list(facts(row, work))
    code, said = output(["sh", "-eu", str(SCRIPTS / f"{row}.sh")], **told(work))
    text = "\n".join([*head, "", *clean(said, work), f"exit {code}"]) + "\n"
    print(text, flush=True)
    if keep and code == 0:
        (LOGS / f"{row}.txt").write_text(text, encoding="utf-8")
    return code == 0


def main() -> None:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description="build the engine in other people's builds")
    parser.add_argument("--log", action="store_true", help="write packaging/logs/ROW.txt")
    parser.add_argument("rows", nargs="+", metavar="ROW", choices=rows(), help=", ".join(rows()))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gem-verify-") as folder:
        passed = [verify(row, Path(folder), given.log) for row in given.rows]
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
