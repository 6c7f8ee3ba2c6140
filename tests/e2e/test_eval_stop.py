"""An evaluation that its callback ends early leaves the cache and the logits of its last token."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemrun import GemRunContext
from reference import make_image

SHAPE = make_image.Shape(layers=(make_image.Layer(), make_image.Layer(window=32)), context=128)
IDS = [(7 * i + 3) % SHAPE.vocab for i in range(10)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("eval") / "made.gembin"
    file.write_bytes(make_image.make(SHAPE, seed=5))
    return file


@pytest.mark.parametrize("stop_at", [0, 3, 8, 9])
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_after_a_stop_are_those_of_the_last_token(
    path: Path, stop_at: int, threads: int
) -> None:
    with GemRunContext(path, threads=threads) as ctx:
        ctx.prefill(IDS)
        wanted = ctx.logits(), ctx.embedding()
        ctx.reset_kv_cache()
        seen: list[int] = []

        def stop(position: int, _logits: object) -> bool:
            seen.append(position)
            return position == stop_at

        assert ctx.eval(IDS, stop) == len(IDS)
        assert seen == list(range(stop_at + 1))
        assert (ctx.logits(), ctx.embedding()) == wanted
