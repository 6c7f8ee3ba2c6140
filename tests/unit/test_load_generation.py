"""Stop ids, bos, token ids against embedding rows, templates (field reports O12, O21, O24, O27)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import load_files
import tiny
from gemmake.errors import CheckpointError
from gemmake.load import load_checkpoint
from gemmake.load.generation import clean_name, fit_to_rows, generation
from gemmake.model import TokenizerSource


def tokenizer(
    base: int = 8,
    added: tuple[tuple[str, int], ...] = (),
    *,
    config: dict[str, Any] | None = None,
    template: str | None = None,
    post: dict[str, Any] | None = None,
) -> TokenizerSource:
    return TokenizerSource(
        {
            "model": {"type": "BPE", "vocab": {f"t{i}": i for i in range(base)}, "merges": []},
            "added_tokens": [{"content": text, "id": token_id} for text, token_id in added],
            "post_processor": post,
        },
        config or {},
        template,
    )


def test_tiny_families(tiny_checkpoint: Callable[..., Path]) -> None:
    """Stop ids, bos id and add_bos of every family: 8 cases."""
    wanted = {
        "gemma1": ((1, 6), 2, True),
        "gemma2": ((1, 6), 2, True),
        "gemma3": ((1, 6), 2, True),
        "gemma3_rope8": ((1, 6), 2, True),
        "llama3": ((508, 511), 507, True),
        "smollm2": ((2,), 1, False),
        "qwen2": ((493, 495), None, False),
        "qwen3": ((493, 495), None, False),
    }
    assert set(wanted) == set(tiny.FAMILIES)
    for family, expected in wanted.items():
        made = load_checkpoint(tiny_checkpoint(family)).spec.generation
        assert (made.stop_ids, made.bos_id, made.add_bos) == expected


@pytest.mark.parametrize(
    ("config", "gen", "expected"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": [2, 3]}, (1, 2, 3)),
        ({"eos_token_id": [3, 1]}, {"eos_token_id": 2}, (1, 2, 3)),
        ({"eos_token_id": 1}, {}, (1,)),
        ({}, {"eos_token_id": [2, 2]}, (2,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
    ],
)
def test_stop_ids_are_the_union(
    config: dict[str, Any], gen: dict[str, Any], expected: tuple[int, ...]
) -> None:
    made, notes = generation([("a", config), ("b", gen)], tokenizer(), 8, "t")
    assert made.stop_ids == expected
    assert bool(notes) == (not expected)


def test_overriding_temperature_keeps_the_stop_set() -> None:
    base, _ = generation([("a", {"eos_token_id": [1, 2]})], tokenizer(), 8, "t")
    warm, _ = generation(
        [("a", {"eos_token_id": [1, 2]}), ("b", {"temperature": 0.9})], tokenizer(), 8, "t"
    )
    assert warm == base


def test_turn_end_joins_only_when_the_template_uses_it() -> None:
    added = (("<end_of_turn>", 6), ("<|im_end|>", 7))
    made, _ = generation([], tokenizer(added=added, template="x<|im_end|>"), 8, "t")
    assert made.stop_ids == (7,)
    made, _ = generation([], tokenizer(added=added), 8, "t")
    assert made.stop_ids == ()


@pytest.mark.parametrize("eos", ["t3", {"content": "t3"}])
def test_tokenizer_eos_joins(eos: object) -> None:
    made, _ = generation([("a", {"eos_token_id": 1})], tokenizer(config={"eos_token": eos}), 8, "t")
    assert made.stop_ids == (1, 3)


POST = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "t2", "type_id": 0}}, {"Sequence": {"id": "A"}}],
    "special_tokens": {"t2": {"id": "t2", "ids": [2], "tokens": ["t2"]}},
}


@pytest.mark.parametrize(
    ("flag", "post", "expected"),
    [
        (True, None, (True, 5)),
        (True, POST, (True, 2)),
        (False, None, (False, 5)),
        (False, POST, (False, 5)),
        (None, None, (False, 5)),
        (None, POST, (True, 2)),
        (None, {"type": "Sequence", "processors": [{"type": "ByteLevel"}, POST]}, (True, 2)),
        (None, {"type": "ByteLevel"}, (False, 5)),
    ],
)
def test_bos_has_one_source(
    flag: bool | None, post: dict[str, Any] | None, expected: tuple[bool, int]
) -> None:
    """8 cases: flag of tokenizer_config on, off, absent; post-processor with and without bos."""
    config = {"bos_token": "t5"} | ({} if flag is None else {"add_bos_token": flag})
    made, notes = generation(
        [("a", {"eos_token_id": 1})], tokenizer(config=config, post=post), 8, "t"
    )
    assert (made.add_bos, made.bos_id) == expected
    assert bool(notes) == (flag is False and post is not None)


def test_bos_wanted_but_unknown() -> None:
    with pytest.raises(CheckpointError, match="bos"):
        generation([], tokenizer(config={"add_bos_token": True}), 8, "t")


@pytest.mark.parametrize("value", [-1, "2", True, 1.0, [1, None]])
def test_eos_that_is_no_id(value: object) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id"):
        generation([("config.json", {"eos_token_id": value})], tokenizer(), 8, "t")


def test_eos_beyond_the_rows() -> None:
    with pytest.raises(CheckpointError, match="eos id 8"):
        generation([("a", {"eos_token_id": 8})], tokenizer(), 8, "t")


def test_rows_tokens_and_config_disagree() -> None:
    """264 rows, 256 base tokens, added {0, 1, 260}: merged by id, unused rows named (O12)."""
    source = tokenizer(256, (("t0", 0), ("t1", 1), ("<x>", 260)))
    fitted, notes = fit_to_rows(source, 264, "tokenizer.json")
    assert fitted == source
    assert notes == ("7 embedding rows have no token (256..259, 261..263)",)


def test_token_id_beyond_the_rows_is_refused() -> None:
    with pytest.raises(CheckpointError, match="<x> = 264"):
        fit_to_rows(tokenizer(256, (("<x>", 264),)), 264, "tokenizer.json")


def test_media_token_beyond_the_rows_is_dropped() -> None:
    """Text-only Gemma 3 ships `<image_soft_token>` one past its embedding."""
    fitted, notes = fit_to_rows(tokenizer(8, (("<image_soft_token>", 8),)), 8, "tokenizer.json")
    assert fitted.tokenizer_json["added_tokens"] == []
    assert "<image_soft_token>" in notes[0]


def test_gemma3_tokenizer_fits_its_text_model(tokenizer_gemma3: Path) -> None:
    raw = json.loads((tokenizer_gemma3 / "tokenizer.json").read_text(encoding="utf-8"))
    fitted, notes = fit_to_rows(TokenizerSource(raw), 262144, "tokenizer.json")
    assert len(fitted.tokenizer_json["added_tokens"]) == len(raw["added_tokens"]) - 1
    assert len(notes) == 1


def test_config_claims_other_rows(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = load_files.copy(tiny_checkpoint("qwen2"), tmp_path / "m")
    load_files.edit_json(folder / "config.json", vocab_size=505)
    model = load_checkpoint(folder)
    assert model.spec.vocab_rows == 512
    assert any("505" in note for note in model.notes)


def test_template_sources(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A .jinja file wins over the field; a list gives its `default`; none gives None."""
    folder = load_files.copy(tiny_checkpoint("qwen2"), tmp_path / "m")
    side = folder / "tokenizer_config.json"
    field = json.loads(side.read_text())["chat_template"]
    assert load_checkpoint(folder).tokenizer.chat_template == field
    (folder / "chat_template.jinja").write_text("from file")
    assert load_checkpoint(folder).tokenizer.chat_template == "from file"
    (folder / "chat_template.jinja").unlink()
    listed = [{"name": "tool", "template": "A"}, {"name": "default", "template": "B"}]
    load_files.edit_json(side, chat_template=listed)
    assert load_checkpoint(folder).tokenizer.chat_template == "B"
    load_files.edit_json(side, chat_template=None)
    assert load_checkpoint(folder).tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ("Gemma 3 270m", "Gemma-3-270m"),
        ("../../etc", "etc"),
        ("模型", ""),
        ("a\n\x1b[31mb", "a-31mb"),
        ("x" * 99, "x" * 64),
    ],
)
def test_clean_name(text: str, clean: str) -> None:
    assert clean_name(text) == clean
