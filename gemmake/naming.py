"""The name of an artifact that nobody named: MODEL-TARGET[-BSP].gembin."""

from __future__ import annotations

import re
from pathlib import Path

from gemmake.hdf import load_hdf, with_bsp

CHECKPOINTS = (".safetensors", ".gguf", ".pth", ".pt")


def default_output(model: Path, target: str, bsp: str | None) -> Path:
    """The artifact's name, in the current folder.

    MODEL is the name of the checkpoint's folder or file, TARGET that of the board or its file, BSP
    the version of the board support package, where it is given or the board's description has it.
    """
    board = target.removesuffix(".toml").rsplit("/", 1)[-1]
    version = with_bsp(load_hdf(target), bsp).bsp_version
    parts = [_model(model), board, *([version] if version else [])]
    return Path("-".join(parts) + ".gembin")


def _model(model: Path) -> str:
    """A folder's or file's name as part of a file's name; `.` has that of its folder."""
    name = model.name or model.resolve().name
    for suffix in CHECKPOINTS:
        name = name.removesuffix(suffix)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.") or "model"
