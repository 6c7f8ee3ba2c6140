"""Models without weights: published shapes, configs alone, checkpoints read by their headers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny
from gemmake.errors import CheckpointError
from gemmake.load import load_checkpoint, load_headers, shapes, source
from gemmake.model import MODEL_LAYER, Model, Role

MakeTiny = Callable[..., Path]


def weights(model: Model) -> int:
    """Weights of a model, without the head of a tied one."""
    return sum(ref.rows * ref.cols for ref in model.tensors.values())


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_shape_has_as_many_weights_as_was_published(name: str) -> None:
    assert weights(shapes.shape_model(name)) == shapes.SHAPES[name].weights


def test_every_class_is_stood_for_by_shapes() -> None:
    every = [shape for found in shapes.CLASSES.values() for shape in found]
    assert every == list(shapes.SHAPES)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_config_alone_gives_the_sizes_of_the_checkpoint(
    tiny_checkpoint: MakeTiny, family: str
) -> None:
    folder = tiny_checkpoint(family)
    whole, config = load_checkpoint(folder), shapes.config_model(folder / "config.json")
    assert {key: (t.rows, t.cols) for key, t in config.tensors.items()} == {
        key: (t.rows, t.cols) for key, t in whole.tensors.items()
    }
    wanted = replace(
        whole.spec, name=config.spec.name, generation=config.spec.generation, licence=""
    )
    assert config.spec == wanted
    assert len(shapes.stand_in(config)) == shapes.TOKENIZER_ROW * tiny.VOCAB


def test_a_config_without_a_vocabulary_is_refused(
    tmp_path: Path, tiny_checkpoint: MakeTiny
) -> None:
    config = json.loads((tiny_checkpoint("llama3") / "config.json").read_text())
    del config["vocab_size"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="no vocab_size; add it"):
        shapes.config_model(path)


def test_weights_of_a_shape_cannot_be_read() -> None:
    model = shapes.shape_model("gemma-3-1b")
    with pytest.raises(CheckpointError, match="gemma-3-1b: has no weights"):
        model.tensors[MODEL_LAYER, Role.EMBED].read(0, 1)


# ---- headers ----
def same_but_for_hashes(headers: Model, whole: Model) -> bool:
    """Sizes, tokenizer, notes, and inputs by name and size."""
    inputs = tuple(replace(file, sha256="0" * 64) for file in whole.inputs)
    return (
        headers.spec == whole.spec
        and headers.tokenizer == whole.tokenizer
        and headers.notes == whole.notes
        and headers.inputs == inputs
        and headers.tensors == whole.tensors
    )


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a weight or a whole file was read")

    monkeypatch.setattr(source.RawTensor, "read", refuse)
    monkeypatch.setattr(sys.modules["gemmake.load.bind"], "_same", refuse)
    monkeypatch.setattr("gemmake.load.hash_file", refuse)


@pytest.mark.parametrize("form", ["folder", "shards", "pt"])
def test_headers_give_the_same_model_without_a_weight(
    tiny_checkpoint: MakeTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    path = tiny_checkpoint("gemma3")
    if form == "shards":
        path = tiny.to_shards(path, tmp_path / "shards")
    elif form == "pt":
        path = tiny.to_pt(path, tmp_path / "pt" / "model.pt")
    whole = load_checkpoint(path)
    no_reading(monkeypatch)
    headers = load_headers(path)
    assert same_but_for_hashes(headers, whole)
    if form == "pt":
        with pytest.raises(AssertionError):
            headers.tensors[0, Role.Q].read(0, 1)


def test_headers_of_a_gguf_file(smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_checkpoint(smollm2_gguf)
    no_reading(monkeypatch)
    assert same_but_for_hashes(load_headers(smollm2_gguf), whole)


def test_two_tables_are_one_where_the_config_says_so(
    tiny_checkpoint: MakeTiny, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_checkpoint("qwen3")
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_headers(tmp_path).spec.tied
    assert load_headers(tmp_path).notes == load_checkpoint(tmp_path).notes
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert not load_headers(tmp_path).spec.tied  # the larger plan, as nothing was compared
    assert load_checkpoint(tmp_path).spec.tied


def test_a_worker_that_lists_writes_nothing(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    from gemmake.load.pt import read_pt

    path = tiny.to_pt(tiny_checkpoint("llama3"), tmp_path / "model.pt")
    before = sorted(tmp_path.iterdir())
    listed, whole = read_pt(path, headers=True), read_pt(path)
    assert sorted(tmp_path.iterdir()) == before
    assert {n: (t.shape, t.dtype) for n, t in listed.items()} == {
        n: (t.shape, t.dtype) for n, t in whole.items()
    }
    assert all(math.prod(t.shape) for t in listed.values())
    with pytest.raises(CheckpointError, match="only its headers were read"):
        next(iter(listed.values())).read(0, 1)
