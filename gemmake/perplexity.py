"""Perplexity of an artifact, measured by the engine, and of its checkpoint in float32.

Windows do not overlap and start from the beginning of the text; a model that wants bos gets it as
the first token of every window. On the engine's side the logits of one position exist at a time;
the reference keeps a window's hidden states and makes logits in blocks of positions, so that a
large vocabulary costs no memory. Only the reference imports torch and transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from gemmake.errors import CheckpointError, UsageError
from gemmake.progress import Reporter, Silent

if TYPE_CHECKING:
    from gemrun.context import GemRunContext

Row = npt.NDArray[np.float32]
OnRow = Callable[[int, Row], None]  # position in the window, logits after it
REFERENCE_BLOCK = 32  # positions whose reference logits are made at once


class LogitSource(Protocol):
    """Something that gives logits after every position of a window, from an empty cache."""

    def evaluate(self, ids: Sequence[int], on_row: OnRow) -> None:
        """Call `on_row(position, logits)` for every position, ascending; the array is borrowed."""


@dataclass(frozen=True)
class Score:
    """Sums over the scored tokens of one model."""

    tokens: int
    text_bytes: int  # UTF-8 bytes of the scored tokens
    nll: float  # nats

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nll / math.log(2) / self.text_bytes


@dataclass(frozen=True)
class Comparison:
    """Engine against float32 reference, over the positions that are scored."""

    kl: float  # mean KL divergence of the engine from the reference, nats
    kl_p99: float  # 99th percentile over positions
    top1: float  # share of positions with the same most likely token


@dataclass(frozen=True)
class Result:
    """What one measurement found; `reference` and `comparison` only where they were asked for."""

    windows: int
    length: int
    bos: int | None
    score: Score
    reference: Score | None = None
    comparison: Comparison | None = None


def windows(
    ids: Sequence[int], count: int, length: int, bos: int | None
) -> tuple[tuple[int, ...], ...]:
    """Cut `ids` into `count` windows of `length` tokens, bos included. UsageError if too short."""
    head = () if bos is None else (bos,)
    step = length - len(head)
    if count < 1 or step < 2:
        raise UsageError(f"{count} windows of {length} tokens: too few; use at least 1 of 3")
    if len(ids) < count * step:
        raise UsageError(
            f"text: {len(ids)} tokens, {count} windows of {length} need {count * step}; use a "
            "longer text or fewer windows"
        )
    return tuple((*head, *ids[i * step : (i + 1) * step]) for i in range(count))


class Softmax:
    """The distribution of one row of logits: float32 terms, float64 sums."""

    def __init__(self, row: Row) -> None:
        top = row.max()
        self.row = row
        self._weights = np.exp(row - top)
        self._total = float(self._weights.sum(dtype=np.float64))
        self.log_total = float(top) + math.log(self._total)

    def nll(self, token: int) -> float:
        """Negative log probability of `token`, nats."""
        return self.log_total - float(self.row[token])

    def divergence(self, other: Softmax) -> float:
        """KL(self || other), nats; never below 0."""
        gap = self._weights * (self.row - other.row)
        mean = float(gap.sum(dtype=np.float64)) / self._total
        return max(0.0, mean - (self.log_total - other.log_total))


class EngineSource:
    """An open artifact as a LogitSource."""

    def __init__(self, context: GemRunContext) -> None:
        self._context = context

    def evaluate(self, ids: Sequence[int], on_row: OnRow) -> None:
        """The engine's logits; NonFiniteError and the like come from gemrun."""

        def take(position: int, logits: memoryview[float]) -> None:
            on_row(position, np.asarray(logits))  # no copy

        self._context.reset_kv_cache()
        self._context.eval(ids, take)

    def text_bytes(self, ids: Sequence[int]) -> int:
        """UTF-8 bytes that the tokens stand for."""
        return len(self._context.detokenize_bytes(ids))

    def bos(self) -> int | None:
        """The token that every window starts with, where the model wants one."""
        first = self._context.tokenize("a", bos=True)[:1]
        return first[0] if first == [self._context.info.bos_id] else None

    def tokens(self, text: str, wanted: int) -> list[int]:
        """At least `wanted` ids from the start of `text`, or all there are, without bos."""
        ids: list[int] = []
        for part in pieces(text, 16 * self._context.info.context):
            if len(ids) >= wanted:
                break
            ids += self._context.tokenize(part)
        return ids


def pieces(text: str, limit: int) -> Iterator[str]:
    """Parts of at most `limit` bytes, for the engine's planned text size.

    Cut in front of a single space between two letters: there every tokenizer starts a token.
    """
    data = text.encode("utf-8")
    at = 0
    while at < len(data):
        end = len(data)
        if end - at > limit:
            part = data[at : at + limit]
            cuts = [m.start() + 1 for m in re.finditer(rb"[A-Za-z] (?=[A-Za-z])", part)]
            if not cuts:
                raise UsageError(f"text: {limit} bytes without a space between letters; use prose")
            end = at + cuts[-1]
        yield data[at:end].decode("utf-8")
        at = end


def run(
    artifact: Path,
    text: str,
    count: int = 8,
    length: int = 1024,
    checkpoint: Path | None = None,
    threads: int | None = None,
    reporter: Reporter | None = None,
) -> Result:
    """Measure an artifact on the first `count` windows of `text`, and `checkpoint` beside it."""
    from gemrun.context import Config, GemRunContext

    reporter = reporter or Silent()
    config: Config = {"kv_cache_size": length, "allow_foreign_board": True}
    if threads is not None:
        config["threads"] = threads
    with GemRunContext(artifact, **config) as context:
        source = EngineSource(context)
        bos = source.bos()
        cut = windows(source.tokens(text, count * length), count, length, bos)
        reference = Reference(checkpoint, threads or 1) if checkpoint else None
        return measure(source, cut, bos, source.text_bytes, reference, reporter)


def render(result: Result) -> list[str]:
    """Lines for people."""
    bos = "without bos" if result.bos is None else f"bos {result.bos} first"
    score = result.score
    lines = [
        f"{result.windows} windows of {result.length} tokens, {bos}: {score.tokens} tokens scored, "
        f"{score.text_bytes} bytes",
        f"artifact:  perplexity {score.perplexity:.4f}, {score.bits_per_byte:.4f} bits per byte",
    ]
    if result.reference is not None and result.comparison is not None:
        base, both = result.reference, result.comparison
        change = 100 * (score.perplexity / base.perplexity - 1)
        lines += [
            f"reference: perplexity {base.perplexity:.4f}, {base.bits_per_byte:.4f} bits per byte",
            f"change {change:+.3f} %, mean KL {both.kl:.5f} nats (99th percentile "
            f"{both.kl_p99:.4f}), same most likely token {100 * both.top1:.2f} %",
        ]
    return lines


class _Tally:
    """Takes the engine's rows of one window after another, and asks the reference for its own."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.tokens = 0
        self.nll = 0.0
        self.reference_nll = 0.0
        self.kl: list[float] = []
        self.same = 0

    def window(self, ids: Sequence[int], source: LogitSource, reference: Reference | None) -> None:
        """Score ids[1:]; the logits after the last token have no next one to predict."""
        rows = None if reference is None else reference.window(ids)

        def on_row(position: int, row: Row) -> None:
            if position + 1 < len(ids):
                wanted = ids[position + 1]
                own = Softmax(row)
                self.tokens += 1
                self.nll += own.nll(wanted)
                if rows is not None:
                    self._compare(rows(position), own, wanted)
            self.reporter.advance()

        source.evaluate(ids, on_row)

    def _compare(self, reference: Row, own: Softmax, wanted: int) -> None:
        if reference.shape != own.row.shape:
            raise CheckpointError(
                f"checkpoint: {reference.size} logits, the artifact has {own.row.size}; use the "
                "checkpoint that the artifact was compiled from"
            )
        other = Softmax(reference)
        self.reference_nll += other.nll(wanted)
        self.kl.append(other.divergence(own))
        self.same += int(reference.argmax() == own.row.argmax())


def measure(
    source: LogitSource,
    cut: Sequence[Sequence[int]],
    bos: int | None,
    text_bytes: Callable[[Sequence[int]], int],
    reference: Reference | None = None,
    reporter: Reporter | None = None,
) -> Result:
    """Run all windows. `text_bytes` gives the UTF-8 bytes of ids."""
    reporter = reporter or Silent()
    reporter.start("windows of text", sum(len(w) for w in cut))
    tally = _Tally(reporter)
    for ids in cut:
        tally.window(ids, source, reference)
    size = sum(text_bytes(list(ids[1:])) for ids in cut)
    result = Result(len(cut), len(cut[0]), bos, Score(tally.tokens, size, tally.nll))
    if reference is None:
        return result
    comparison = Comparison(
        kl=float(np.mean(tally.kl)),
        kl_p99=float(np.percentile(tally.kl, 99)),
        top1=tally.same / tally.tokens,
    )
    score = Score(tally.tokens, size, tally.reference_nll)
    return Result(len(cut), len(cut[0]), bos, result.score, score, comparison)


class Reference:
    """The checkpoint in float32 through transformers, eager attention."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        import torch

        torch.set_num_threads(threads)
        self._model = _load_reference(path)
        config = self._model.config.get_text_config()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._head = self._model.get_output_embeddings()

    def window(self, ids: Sequence[int]) -> Callable[[int], Row]:
        """Logits after each position of a window, made in blocks on demand, ascending."""
        import torch

        with torch.inference_mode():
            hidden = self._model.model(torch.tensor([list(ids)])).last_hidden_state[0]
        block: dict[int, Row] = {}

        def row(position: int) -> Row:
            first = position - position % REFERENCE_BLOCK
            if first not in block:
                block.clear()
                block[first] = self._logits(hidden[first : first + REFERENCE_BLOCK])
            logits: Row = block[first][position - first]
            return logits

        return row

    def evaluate(self, ids: Sequence[int], on_row: OnRow) -> None:
        """The reference as a LogitSource, to measure the checkpoint alone."""
        row = self.window(ids)
        for position in range(len(ids)):
            on_row(position, row(position))

    def _logits(self, hidden: Any) -> Row:
        import torch

        with torch.inference_mode():
            logits = self._head(hidden)
            if self._softcap is not None:
                logits = torch.tanh(logits / self._softcap) * self._softcap
            rows: Row = logits.numpy()
        return rows


def _load_reference(path: Path) -> Any:
    """A transformers model from a folder, .safetensors, .gguf, .pt or .pth; CheckpointError if some
    weights are missing from the file (transformers would go on with random ones)."""
    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    suffix = path.suffix.lower()
    if suffix in (".pt", ".pth"):
        return _load_state_dict(path, transformers)
    options: dict[str, Any] = {"gguf_file": path.name} if suffix == ".gguf" else {}
    folder = path if path.is_dir() else path.parent
    import torch

    with redirect_stderr(StringIO()):  # its own progress bars
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
            **options,
        )
    _refuse_missing(path, info["missing_keys"])
    return model.eval()


def _load_state_dict(path: Path, transformers: Any) -> Any:
    import torch

    config = transformers.AutoConfig.from_pretrained(path.parent)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    missing = model.load_state_dict(state, strict=False).missing_keys
    tied = ["lm_head.weight"] if config.get_text_config().tie_word_embeddings else []
    _refuse_missing(path, [name for name in missing if name not in tied])
    return model.eval()


def _refuse_missing(path: Path, missing: Sequence[str]) -> None:
    if missing:
        raise CheckpointError(
            f"{path.name}: transformers finds no weights for {min(missing)} ({len(missing)} in "
            "all); use the checkpoint that the artifact was compiled from"
        )
