"""Windows, sums and the float32 reference of gemmake.perplexity."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import tiny
from gemmake import perplexity
from gemmake.errors import CheckpointError, UsageError


class Table:
    """A LogitSource whose logits depend on the token alone: row t of a matrix."""

    def __init__(self, rows: perplexity.Row) -> None:
        self.rows = rows
        self.seen: list[list[int]] = []

    def evaluate(self, ids: Sequence[int], on_row: perplexity.OnRow) -> None:
        self.seen.append(list(ids))
        for position, token in enumerate(ids):
            on_row(position, self.rows[token])


def table(size: int = 50) -> Table:
    rng = np.random.default_rng(1)
    return Table((8 * rng.standard_normal((size, size))).astype(np.float32))


def test_windows_do_not_overlap_and_start_with_bos() -> None:
    cut = perplexity.windows(list(range(10, 30)), 3, 6, bos=2)
    assert cut == ((2, 10, 11, 12, 13, 14), (2, 15, 16, 17, 18, 19), (2, 20, 21, 22, 23, 24))
    assert perplexity.windows([5, 6, 7, 8], 1, 4, bos=None) == ((5, 6, 7, 8),)


@pytest.mark.parametrize(("count", "length", "bos"), [(3, 8, None), (0, 8, None), (1, 2, 1)])
def test_text_that_is_too_short_is_refused(count: int, length: int, bos: int | None) -> None:
    with pytest.raises(UsageError, match=r"tokens.*; use"):
        perplexity.windows(list(range(20)), count, length, bos)


def test_perplexity_is_that_of_a_softmax_in_float64() -> None:
    source = table()
    ids = [int(i) for i in np.random.default_rng(2).integers(0, 50, 80)]
    cut = perplexity.windows(ids, 2, 40, None)
    result = perplexity.measure(source, cut, None, text_bytes=lambda part: 3 * len(part))
    nll = 0.0
    for window in cut:
        for here, after in itertools.pairwise(window):
            row = source.rows[here].astype(np.float64)
            nll += math.log(np.exp(row).sum()) - row[after]
    assert result.score.tokens == 2 * 39
    assert result.score.nll == pytest.approx(nll, rel=1e-6)
    assert result.score.perplexity == pytest.approx(math.exp(nll / 78), rel=1e-6)
    assert result.score.bits_per_byte == pytest.approx(nll / math.log(2) / (3 * 78), rel=1e-6)
    assert source.seen == [list(w) for w in cut]


def test_divergence_is_zero_for_shifted_and_exact_for_other_logits() -> None:
    rng = np.random.default_rng(3)
    p, q = (rng.standard_normal(400).astype(np.float32) for _ in range(2))
    one, other = perplexity.Softmax(p), perplexity.Softmax(q)
    assert one.divergence(one) == 0
    assert one.divergence(perplexity.Softmax(p + np.float32(1))) < 1e-6
    sp, sq = (np.exp(r.astype(np.float64)) / np.exp(r.astype(np.float64)).sum() for r in (p, q))
    assert one.divergence(other) == pytest.approx(float(sp @ np.log(sp / sq)), rel=1e-5)


@pytest.mark.parametrize("family", ["gemma2", "smollm2"])
def test_reference_rows_are_those_of_transformers(
    tiny_checkpoint: Callable[..., Path], family: str
) -> None:
    import torch

    folder = tiny_checkpoint(family)
    reference = perplexity.Reference(folder)
    ids = [int(i) for i in np.random.default_rng(4).integers(3, 480, 75)]
    with torch.inference_mode():
        want = tiny.reference(folder)(torch.tensor([ids])).logits[0].numpy()
    rows: list[perplexity.Row] = []
    reference.evaluate(ids, lambda position, row: rows.append(row.copy()))
    assert np.abs(np.stack(rows) - want).max() <= 1e-5 * np.abs(want).max()


def test_comparison_with_itself_finds_nothing(tiny_checkpoint: Callable[..., Path]) -> None:
    reference = perplexity.Reference(tiny_checkpoint("qwen3"))
    ids = [int(i) for i in np.random.default_rng(5).integers(3, 480, 64)]
    cut = perplexity.windows(ids, 2, 32, None)
    result = perplexity.measure(reference, cut, None, lambda part: len(part), reference)
    assert result.comparison is not None
    assert result.comparison.kl < 1e-9
    assert result.comparison.top1 == 1
    assert result.reference is not None
    assert result.reference.nll == result.score.nll


def test_state_dict_is_read_like_the_folder(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_checkpoint("gemma3")
    ids = list(range(5, 30))
    rows = []
    for path in (folder, tiny.to_pt(folder, tmp_path / "m.pt")):
        row = perplexity.Reference(path).window(ids)
        rows.append(np.stack([row(position).copy() for position in range(len(ids))]))
    assert np.array_equal(rows[0], rows[1])


def test_checkpoint_of_another_size_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    reference = perplexity.Reference(tiny_checkpoint("qwen3"))
    cut = perplexity.windows(list(range(40)), 1, 30, None)
    with pytest.raises(CheckpointError, match="512 logits, the artifact has 50"):
        perplexity.measure(table(), cut, None, lambda part: len(part), reference)


def test_pieces_are_cut_where_no_token_spans() -> None:
    text = "one two\nthree four\n\nfive six seven eight nine\nten"
    parts = list(perplexity.pieces(text, 20))
    assert parts == ["one two\nthree", " four\n\nfive six", " seven eight", " nine\nten"]
    with pytest.raises(UsageError, match="without a space"):
        list(perplexity.pieces("x" * 50, 20))
    euro = "\u20aca b" * 100
    assert "".join(perplexity.pieces(euro, 21)) == euro


def test_pieces_give_the_tokens_of_the_whole_text(
    smollm2_gguf: Path, gemma3_gguf: Path, handbook_en: str
) -> None:
    """Cutting may not change an id: checked on the evaluation text with both real tokenizers."""
    from tokenizers import Tokenizer

    from gemmake.load import load_checkpoint

    text = handbook_en[:120_000]
    for path in (smollm2_gguf, gemma3_gguf):
        source = load_checkpoint(path).tokenizer.tokenizer_json
        tokenizer = Tokenizer.from_str(json.dumps(source))

        def ids(part: str, tokenizer: Tokenizer = tokenizer) -> list[int]:
            return list(tokenizer.encode(part, add_special_tokens=False).ids)

        cut = [i for part in perplexity.pieces(text, 16 * 1024) for i in ids(part)]
        assert cut == ids(text)
