"""The engine as the compiler drives it: hidden states through layers, text to ids, test vectors,
the blocks of a pinned prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from gemmake.model import FloatRows
from gemrun.context import Config, GemRunContext
from gemrun.hooks import Capture, ring_blocks, run_hidden

__all__ = ["Capture", "Engine"]


class Engine:
    """An open artifact. Context manager; memory is not checked, as the host is not the target.

    `baseline` asks for the scalar kernels. Raises GemRunError.
    """

    def __init__(self, image: Path, threads: int, baseline: bool = False) -> None:
        config: Config = {"threads": threads, "ignore_memory": True, "allow_foreign_board": True}
        if baseline:
            config["kernel"] = "scalar"
        self._context = GemRunContext(image, **config)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.close()

    def run_hidden(self, x: FloatRows, chunk: int, capture: Capture | None) -> None:
        """Run the layers over one sequence of hidden states [tokens, hidden], in place."""
        run_hidden(self._context, x, chunk, capture)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without bos, control tokens taken as text."""
        return self._context.tokenize(text)

    def decode(self, ids: Sequence[int]) -> bytes:
        """The exact bytes of ids."""
        return self._context.detokenize_bytes(ids)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a raw prompt, as a run begins with them."""
        return self._context.tokenize(text, bos=True, control=True)

    def blocks_of(self, ids: Sequence[int]) -> bytes:
        """The ring blocks of ids in an empty cache, as a pinned prompt has them."""
        self._context.reset_kv_cache()
        self._context.prefill(ids)
        return ring_blocks(self._context)

    def test_vector(self, prompt: Sequence[int], steps: int) -> tuple[int, list[int]]:
        """Digest of the logits and the greedy ids that follow a prompt."""
        return self._context.test_vector(prompt, steps)
