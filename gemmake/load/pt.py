""".pt and .pth state dicts. The pickle is opened in a subprocess that loads weights only.

The worker writes plain row-major data to a temporary file, from which this process streams. The
file is unlinked as soon as it is open, so that nothing is left behind however the compile ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gemmake.errors import CheckpointError
from gemmake.load.source import (
    RawTensor,
    SourceFile,
    base_name,
    checked_product,
    item_size,
    plain_tensor,
)
from gemmake.model import FloatRows

_WORKER = "gemmake.load.pt_worker"
HEADERS = "-"  # in place of the worker's output file: nothing is written


def read_pt(path: Path, headers: bool = False) -> dict[str, RawTensor]:
    """The tensors of a state dict by name; with `headers` only their names, types and shapes.
    CheckpointError when it is refused or damaged."""
    name = base_name(path)
    with tempfile.TemporaryDirectory(prefix="gemmake-pt-") as folder:
        data = Path(HEADERS) if headers else Path(folder) / "tensors"
        report = _run_worker(path, data, Path(folder))
        if "error" in report:
            raise CheckpointError(f"{name}: {report['error']}")
        if headers:
            return {entry["name"]: _header(entry, name) for entry in report["tensors"]}
        source = SourceFile(data)
    source.name = name
    tensors = {}
    for entry in report["tensors"]:
        shape, offset = tuple(entry["shape"]), entry["offset"]
        size = checked_product(shape, name) * (item_size(entry["dtype"]) or 0)
        if offset + size > source.size:
            raise CheckpointError(f"{name}: the worker wrote too little; is the disk full?")
        tensors[entry["name"]] = plain_tensor(source, entry["name"], shape, entry["dtype"], offset)
    return tensors


def _header(entry: dict[str, Any], file: str) -> RawTensor:
    """A tensor that cannot be read."""

    def rows_of(_first: int, _count: int) -> FloatRows:
        raise CheckpointError(f"{file}: only its headers were read; compile it to read the weights")

    return RawTensor(entry["name"], tuple(entry["shape"]), entry["dtype"], file, rows_of)


def _run_worker(path: Path, data: Path, folder: Path) -> dict[str, Any]:
    """Start the worker with this interpreter and import path, away from the current folder.

    It gets a link with a plain name, because PyTorch wants paths in UTF-8.
    """
    link = folder / "checkpoint"
    link.symlink_to(path.absolute())
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(p).absolute()) for p in sys.path)
    command = [sys.executable, "-m", _WORKER, link.name, str(data)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    try:
        report = json.loads(done.stdout.decode("utf-8").strip().splitlines()[-1])
    except (ValueError, IndexError):
        report = None
    if isinstance(report, dict) and ("error" in report or done.returncode == 0):
        return report
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    reason = lines[-1][:200] if lines else "no message"
    if done.returncode < 0:
        reason = f"signal {-done.returncode}, perhaps out of memory"
    raise CheckpointError(
        f"{base_name(path)}: the process that reads it ended with {done.returncode} ({reason}); "
        "convert the checkpoint to safetensors"
    )
