"""Loaders: a checkpoint on disk becomes a frozen `Model`; they know nothing of targets.

    load_checkpoint(path) -> Model

`path` is a Hugging Face folder, a .safetensors file, a .pt / .pth state dict or a .gguf file. Each
form has its own reader of tensors and config; `bind` and `generation` then do the rest for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gemmake.errors import CheckpointError, UsageError
from gemmake.load.bind import Bound, bind
from gemmake.load.config import parse_config
from gemmake.load.families import ArchConfig, layer_specs
from gemmake.load.folder import SideFiles, read_side_files, read_weights
from gemmake.load.generation import clean_name, fit_to_rows, generation
from gemmake.load.names import canonical_hf
from gemmake.load.safetensors import read_safetensors
from gemmake.load.source import RawTensor, base_name, hash_file, name_list
from gemmake.model import Model, ModelSpec, TokenizerSource

__all__ = ["load_checkpoint"]


def load_checkpoint(path: Path, config: Path | None = None) -> Model:
    """Load the checkpoint at `path`.

    `config` replaces the config.json beside the weights; a GGUF file takes none. Tensors stream
    from the files, which must stay where they are while the `Model` is used. CheckpointError says
    what is unreadable, incomplete or unsupported; UsageError that `config` cannot be used.
    """
    path = Path(path)
    if config is not None and not config.is_file():
        raise UsageError(f"--config {base_name(config)}: not found; name a config.json")
    if path.is_dir():
        tensors, files = read_weights(path)
        return _from_hf(tensors, files, read_side_files(path, config))
    if not path.is_file():
        raise CheckpointError(f"{base_name(path)}: not found; name a checkpoint file or folder")
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return _from_hf(read_safetensors(path), [path], read_side_files(path.parent, config))
    if suffix in (".pt", ".pth"):
        from gemmake.load.pt import read_pt

        side = read_side_files(path.parent, config)
        return _from_hf(read_pt(path), [path], side)
    if suffix == ".gguf":
        if config is not None:
            raise UsageError("--config: a GGUF file carries its own config; leave the option out")
        return _from_gguf(path)
    raise CheckpointError(
        f"{base_name(path)}: not a checkpoint that gemmake knows; expected a Hugging Face folder, "
        ".safetensors, .pt, .pth or .gguf"
    )


def _from_hf(tensors: Mapping[str, RawTensor], files: list[Path], side: SideFiles) -> Model:
    """A model from tensors with Hugging Face names and the files beside them."""
    arch = parse_config(side.config, side.config_name)
    mapped, dropped = canonical_hf(tensors, multimodal=arch.multimodal)
    where = base_name(files[0]) if len(files) == 1 else "checkpoint"
    bound = bind(
        arch,
        {short: tensors[name] for short, name in mapped.items()},
        norm_offset=1.0 if arch.family.stored_minus_one else 0.0,
        where=where,
    )
    configs = [(side.config_name, side.config)]
    if isinstance(side.config.get("text_config"), dict):
        configs.append((f"{side.config_name}: text_config", side.config["text_config"]))
    configs.append(("generation_config.json", side.generation))
    notes = arch.notes + (_dropped_note(dropped) if dropped else ())
    given_name = side.config.get("_name_or_path") or side.config.get("name_or_path") or ""
    return _assemble(
        arch,
        bound,
        side.tokenizer,
        configs,
        tokenizer_file="tokenizer.json",
        files=files + side.used,
        name=str(given_name).replace("\\", "/").rstrip("/").rpartition("/")[2],
        licence="",
        notes=notes,
    )


def _from_gguf(path: Path) -> Model:
    from gemmake.load.gguf import read_gguf

    loaded = read_gguf(path)
    bound = bind(
        loaded.arch, loaded.tensors, norm_offset=0.0, where=base_name(path), adapt=loaded.adapt
    )
    return _assemble(
        loaded.arch,
        bound,
        loaded.tokenizer,
        [(base_name(path), loaded.token_ids)],
        tokenizer_file=base_name(path),
        files=[path],
        name=loaded.name,
        licence=loaded.licence,
        notes=loaded.arch.notes,
    )


def _assemble(
    arch: ArchConfig,
    bound: Bound,
    tokenizer: TokenizerSource,
    configs: list[tuple[str, Mapping[str, Any]]],
    *,
    tokenizer_file: str,
    files: list[Path],
    name: str,
    licence: str,
    notes: tuple[str, ...],
) -> Model:
    """Put the parts together; what needs the number of embedding rows happens here."""
    tokenizer, row_notes = fit_to_rows(tokenizer, bound.vocab_rows, tokenizer_file)
    turns, turn_notes = generation(configs, tokenizer, bound.vocab_rows, tokenizer_file)
    layers, ropes = layer_specs(arch)
    scale = float(np.float32(np.sqrt(arch.hidden))) if arch.family.scaled_embedding else 1.0
    spec = ModelSpec(
        family=arch.family.name,
        name=clean_name(name) or _default_name(arch, bound),
        hidden=arch.hidden,
        vocab_rows=bound.vocab_rows,
        trained_context=arch.context,
        norm_eps=arch.norm_eps,
        embed_scale=scale,
        tied=bound.tied,
        layers=layers,
        ropes=ropes,
        generation=turns,
        final_softcap=arch.final_softcap,
        licence=licence,
    )
    inputs = sorted((hash_file(file) for file in files), key=lambda f: f.name)
    all_notes = notes + bound.notes + row_notes + turn_notes
    return Model(spec, bound.tensors, tokenizer, tuple(inputs), all_notes)


def _default_name(arch: ArchConfig, bound: Bound) -> str:
    """Family and parameter count. Not the folder's name: that would put a path into the artifact,
    and a copy of the checkpoint elsewhere would no longer compile to the same bytes."""
    count = sum(ref.rows * ref.cols for ref in bound.tensors.values())
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= limit:
            return f"{arch.family.name}-{count / limit:.3g}{unit}"
    return f"{arch.family.name}-{count}"


def _dropped_note(dropped: tuple[str, ...]) -> tuple[str, ...]:
    return (f"{len(dropped)} tensors are not part of the text model: {name_list(dropped)}",)
