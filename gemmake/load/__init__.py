"""Loaders: a checkpoint on disk becomes a frozen `Model`; they know nothing of targets.

    load_checkpoint(path) -> Model
    load_headers(path) -> Model          the same without reading a weight

`path` is a Hugging Face folder, a .safetensors file, a .pt / .pth state dict or a .gguf file. Each
form has its own reader of tensors and config; `bind` and `generation` then do the rest for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemmake.errors import CheckpointError, UsageError
from gemmake.files import FILE, FOLDER, standing
from gemmake.load.bind import Bound, bind
from gemmake.load.config import parse_config
from gemmake.load.families import ArchConfig, model_spec
from gemmake.load.folder import SideFiles, read_side_files, read_weights
from gemmake.load.generation import clean_name, fit_to_rows, generation
from gemmake.load.names import canonical_hf
from gemmake.load.safetensors import read_safetensors
from gemmake.load.source import RawTensor, base_name, hash_file, name_list, unhashed
from gemmake.model import Model, TokenizerSource

__all__ = ["load_checkpoint", "load_headers"]


def load_checkpoint(path: Path, config: Path | None = None) -> Model:
    """Load the checkpoint at `path`.

    `config` replaces the config.json beside the weights; a GGUF file takes none. Tensors stream
    from the files, which must stay where they are while the `Model` is used. CheckpointError says
    what is unreadable, incomplete or unsupported; UsageError that `config` cannot be used.
    """
    return _load(Path(path), config, headers=False)


def load_headers(path: Path, config: Path | None = None) -> Model:
    """The `Model` of a checkpoint for planning: as load_checkpoint, but no weight is read.

    Inputs have no hashes, and of two tables with the config's word that they are one it is taken to
    be true. Raises the same errors.
    """
    return _load(Path(path), config, headers=True)


def _load(path: Path, config: Path | None, headers: bool) -> Model:
    if config is not None and (found := standing(config)) != FILE:
        what = f"is {found}" if found else "not found"
        raise UsageError(f"--config {base_name(config)}: {what}; name a config.json")
    found = standing(path)
    if found == FOLDER:
        tensors, files = read_weights(path)
        return _from_hf(tensors, files, read_side_files(path, config), headers)
    if found != FILE:
        what = f"is {found}" if found else "not found"
        raise CheckpointError(f"{base_name(path)}: {what}; name a checkpoint file or folder")
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        side = read_side_files(path.parent, config)
        return _from_hf(read_safetensors(path), [path], side, headers)
    if suffix in (".pt", ".pth"):
        from gemmake.load.pt import read_pt

        side = read_side_files(path.parent, config)
        return _from_hf(read_pt(path, headers), [path], side, headers)
    if suffix == ".gguf":
        if config is not None:
            raise UsageError("--config: a GGUF file carries its own config; leave the option out")
        return _from_gguf(path, headers)
    raise CheckpointError(
        f"{base_name(path)}: not a checkpoint that gemmake knows; expected a Hugging Face folder, "
        ".safetensors, .pt, .pth or .gguf"
    )


def _from_hf(
    tensors: Mapping[str, RawTensor], files: list[Path], side: SideFiles, headers: bool
) -> Model:
    """A model from tensors with Hugging Face names and the files beside them."""
    arch = parse_config(side.config, side.config_name)
    mapped, dropped = canonical_hf(tensors, multimodal=arch.multimodal)
    where = base_name(files[0]) if len(files) == 1 else "checkpoint"
    bound = bind(
        arch,
        {short: tensors[name] for short, name in mapped.items()},
        norm_offset=1.0 if arch.family.stored_minus_one else 0.0,
        where=where,
        compare=not headers,
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
        headers=headers,
    )


def _from_gguf(path: Path, headers: bool) -> Model:
    from gemmake.load.gguf import read_gguf

    loaded = read_gguf(path)
    bound = bind(
        loaded.arch,
        loaded.tensors,
        norm_offset=0.0,
        where=base_name(path),
        adapt=loaded.adapt,
        compare=not headers,
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
        headers=headers,
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
    headers: bool,
) -> Model:
    """Put the parts together; what needs the number of embedding rows happens here."""
    tokenizer, row_notes = fit_to_rows(tokenizer, bound.vocab_rows, tokenizer_file)
    turns, turn_notes = generation(configs, tokenizer, bound.vocab_rows, tokenizer_file)
    name = clean_name(name) or _default_name(arch, bound)
    spec = model_spec(arch, bound.vocab_rows, bound.tied, turns, name, licence)
    identify = unhashed if headers else hash_file
    inputs = sorted((identify(file) for file in files), key=lambda f: f.name)
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
