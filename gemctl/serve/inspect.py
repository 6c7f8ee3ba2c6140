"""Reads a candidate in a process of its own (artifact.py starts it: -m gemctl.serve.inspect JSON).

Prints one JSON object: the facts, or {"error": sentence}.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gemctl.board.known import BOARDS
from gemctl.errors import ApiError
from gemctl.serve.artifact import Declared, Thermal
from gemctl.store import sign
from gemrun.format.codes import FormatError
from gemrun.format.files import open_regular
from gemrun.format.reader import Artifact, read_artifact

ARCHES = {"amd64": "x86_64", "arm64": "aarch64"}
MOST_NAMES = 4096  # bytes of the names of a board


def boards_of(root: Path) -> list[str]:
    """What the device tree says that this machine is; empty on machines without one. No name has
    what could steer a terminal: they go into messages."""
    try:
        with os.fdopen(open_regular(root / "proc/device-tree/compatible"), "rb") as stream:
            data = stream.read(MOST_NAMES)
    except OSError:
        return []
    names = (name.decode("ascii", "replace") for name in data.split(b"\0") if name)
    return ["".join(c if " " <= c <= "~" else "?" for c in name) for name in names]


def board_problem(hdf: dict[str, Any], boards: list[str], arch: str) -> str:
    """Why the artifact is for another board, or "". A generic one is for any.

    Stricter than the engine, which only warns on a machine that no description names: a daemon has
    nobody who would read it.
    """
    wanted, identity = list(hdf.get("compatible", [])), str(hdf.get("id", "?"))
    if identity.startswith("generic-") or not wanted:
        return ""
    built, here = identity, boards[0] if boards else arch
    there = str(hdf.get("target", {}).get("arch", arch))
    if there != arch:
        built, here = f"{identity} ({there})", arch
    elif not boards or set(wanted) & set(boards):
        return ""
    known = next((BOARDS[name][0] for name in boards if name in BOARDS), None)
    target = "with the right --target" if known is None else f"with --target {known}"
    return (
        f"HDF version mismatch: built for {built}, this is {known or here}; rebuild {target}, or "
        "set models.allow_foreign_board"
    )


def _facts(artifact: Artifact, signature: sign.Verdict, warnings: list[str]) -> dict[str, Any]:
    header, thermal = artifact.header, artifact.thermal
    target = header.target.rstrip(b"\0").decode("ascii", "replace")
    made = Declared(header.ram_total, header.ram_weights, header.kv_layout_id, target)
    return {
        "declared": asdict(made),
        "context": artifact.conf.context,
        "tests": len(artifact.tests),
        "thermal": asdict(Thermal(thermal.threshold_c or None, thermal.device_max_c or None)),
        "signature": signature.sentence,
        "warnings": warnings,
    }


def run(options: dict[str, Any]) -> dict[str, Any]:
    """The facts of a file, or what is wrong with it."""
    path = Path(options["path"])
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        verdict = sign.check(descriptor, options["signature"], Path(options["keys_dir"]))
        sign.demand(verdict)
    finally:
        os.close(descriptor)
    warnings = [verdict.sentence] if verdict.warning else []
    with read_artifact(path) as artifact:
        arch = ARCHES.get(platform.machine().lower(), platform.machine())
        problem = board_problem(dict(artifact.hdf), boards_of(Path(options["root"])), arch)
        if problem and not options["allow_foreign_board"]:
            return {"error": problem}
        return _facts(artifact, verdict, warnings + [problem] * bool(problem))


def main() -> None:
    """Print the answer; every expected failure is one."""
    try:
        answer = run(json.loads(sys.argv[1]))
    except ApiError as error:
        answer = {"error": error.message}
    except FormatError as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"error": f"the file cannot be read: {error.strerror}; check the disk"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
