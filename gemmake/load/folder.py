"""Hugging Face folders, single .safetensors files and the files that stand beside a .pt file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemmake.errors import CheckpointError
from gemmake.load.safetensors import read_safetensors
from gemmake.load.source import (
    RawTensor,
    base_name,
    damaged,
    display,
    name_list,
    read_bytes,
    read_json,
    there_is,
)
from gemmake.model import TokenizerSource

INDEX = "model.safetensors.index.json"
CONFIG_LIMIT = 16 << 20  # bytes
_INDEX_LIMIT = 64 << 20
_TOKENIZER_LIMIT = 256 << 20
_TEMPLATE_LIMIT = 1 << 20
_SHARD = re.compile(r"^(.*)-([0-9]{5})-of-([0-9]{5})\.safetensors$")


@dataclass
class SideFiles:
    """The parsed small files of a checkpoint, and the paths of all files that were used."""

    config: Mapping[str, Any]
    config_name: str
    tokenizer: TokenizerSource
    generation: Mapping[str, Any]
    used: list[Path] = field(default_factory=list)


def read_side_files(folder: Path, config: Path | None) -> SideFiles:
    """config.json (or the file given by --config), tokenizer and generation files of a folder."""
    used = []
    config_path = config if config is not None else inside(folder, "config.json")
    if not there_is(config_path):
        raise CheckpointError(
            f"{base_name(config_path)}: not found beside the weights; "
            "put it there or name one with --config"
        )
    used.append(config_path)
    tokenizer_path = inside(folder, "tokenizer.json")
    if not there_is(tokenizer_path):
        raise CheckpointError(
            "tokenizer.json: not found beside the weights; download it with the checkpoint, or "
            "make one by loading the tokenizer with transformers and saving it again"
        )
    used.append(tokenizer_path)
    optional = {}
    for name in ("tokenizer_config.json", "generation_config.json"):
        path = inside(folder, name)
        there = there_is(path)
        optional[name] = read_json(path, CONFIG_LIMIT) if there else {}
        used += [path] if there else []
    template = _template(folder, optional["tokenizer_config.json"], used)
    tokenizer = TokenizerSource(
        tokenizer_json=read_json(tokenizer_path, _TOKENIZER_LIMIT),
        config=optional["tokenizer_config.json"],
        chat_template=template,
    )
    return SideFiles(
        config=read_json(config_path, CONFIG_LIMIT),
        config_name=base_name(config_path),
        tokenizer=tokenizer,
        generation=optional["generation_config.json"],
        used=used,
    )


def _template(folder: Path, config: Mapping[str, Any], used: list[Path]) -> str | None:
    """chat_template.jinja, else the template in tokenizer_config.json (the one named default)."""
    path = inside(folder, "chat_template.jinja")
    if there_is(path):
        used.append(path)
        try:
            return read_bytes(path, _TEMPLATE_LIMIT).decode("utf-8")
        except UnicodeDecodeError as error:
            raise damaged(f"{path.name}: is not valid UTF-8 ({error.reason})") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}
        template = named.get("default", next(iter(named.values()), None))
    return template if isinstance(template, str) and template else None


def inside(folder: Path, name: str) -> Path:
    """`name` in `folder`: a plain base name that stays inside after resolving links.

    The one exception is the layout of a download cache, where the entries of
    `snapshots/<revision>/` are links into the sibling `blobs/`.
    """
    plain = "/" not in name and name not in ("", ".", "..")
    if not plain or "\\" in name or not name.isprintable():
        raise CheckpointError(
            f"{display(name)}: is not a plain file name; the index must name files of its folder"
        )
    path = folder / name
    parent = Path(os.path.realpath(path)).parent
    home = Path(os.path.realpath(folder))
    cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if parent not in (home, cache):
        raise CheckpointError(
            f"{display(name)}: is a link out of its folder; copy the file into the folder"
        )
    return path


def read_weights(folder: Path) -> tuple[dict[str, RawTensor], list[Path]]:
    """All tensors of a folder and the files that hold them. Index and shards must agree."""
    present = sorted(p.name for p in folder.iterdir() if p.name.endswith(".safetensors"))
    index_path = inside(folder, INDEX)
    if there_is(index_path):
        weight_map = _weight_map(index_path)
        names = sorted(set(weight_map.values()))
    else:
        weight_map = None
        names = _unindexed(folder, present)
    paths = [inside(folder, name) for name in names]
    absent = [path.name for path in paths if not there_is(path)]
    if absent:
        raise CheckpointError(
            f"{INDEX}: {name_list(absent)} not found; download the missing shards"
        )
    stray = set(present) - set(names)
    if stray:
        raise CheckpointError(
            f"{name_list(stray)}: not part of the checkpoint; remove it from the folder"
        )
    tensors = _read_shards(paths, weight_map)
    return tensors, paths + ([index_path] if weight_map is not None else [])


def _weight_map(path: Path) -> Mapping[str, str]:
    index = read_json(path, _INDEX_LIMIT)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path.name}: holds no weight_map; download it again")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise damaged(f"{path.name}: {display(name)} names no file")
        if not file.endswith(".safetensors"):
            raise damaged(f"{path.name}: {display(file)} is not a .safetensors file")
    return weight_map


def _unindexed(folder: Path, present: list[str]) -> list[str]:
    """The weight files of a folder without an index: one file, or a complete set of shards."""
    if len(present) == 1 and not _SHARD.match(present[0]):
        return present
    if "model.safetensors" in present:
        return ["model.safetensors"]  # the others are reported as strays
    matches = [m for m in map(_SHARD.match, present) if m]
    if matches:
        stem, total = matches[0][1], int(matches[0][3])
        wanted = [f"{stem}-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
        missing = set(wanted) - set(present)
        if missing:
            raise CheckpointError(
                f"{name_list(missing)}: not found beside the other shards; download it"
            )
        return wanted
    if not present:
        raise CheckpointError(
            f"{base_name(folder)}: holds no .safetensors file; name a .gguf or .pt file directly"
        )
    raise CheckpointError(
        f"{name_list(present)}: several weight files and no {INDEX}; keep one or add the index"
    )


def _read_shards(paths: list[Path], weight_map: Mapping[str, str] | None) -> dict[str, RawTensor]:
    """The tensors of all shards, checked against the index in both directions."""
    tensors: dict[str, RawTensor] = {}
    for path in paths:
        for name, tensor in read_safetensors(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"{path.name}: tensor {display(name)} is also in {tensors[name].file}; "
                    "the checkpoint is damaged"
                )
            if weight_map is not None and weight_map.get(name) != path.name:
                claimed = weight_map.get(name)
                said = f"the index puts it in {display(claimed)}" if claimed else "not in the index"
                raise CheckpointError(
                    f"{path.name}: tensor {display(name)}: {said}; download index and shards again"
                )
            tensors[name] = tensor
    absent = set(weight_map or ()) - set(tensors)
    if absent:
        raise CheckpointError(
            f"{INDEX}: names tensors that no shard holds: {name_list(absent)}; "
            "download index and shards again"
        )
    return tensors
