"""The budget of a board: what is over it is refused, before weights are read, with what fits."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import compiling
from gemmake.errors import BudgetError
from gemmake.options import Effort, KvType, Offload, Quantization
from gemrun.format.reader import read_artifact

MIB = 1 << 20
OVER = {"context": 32768, "kv_type": KvType.DENSE, "quantization": Quantization.INT8}


def test_what_is_over_budget_is_told_and_the_command_to_copy_fits(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A table of what takes what, what every option leads to, and a command that works."""
    target, path = compiling.board(tmp_path, 12), tmp_path / "o.gembin"
    with pytest.raises(BudgetError) as caught:
        compiling.compiled(
            tiny_checkpoint("qwen2"), path, target=target, effort=Effort.FAST, **OVER
        )
    text = str(caught.value)
    assert re.match(r"some-board: needs [0-9.]+ MiB but the target grants 12.0 MiB; use --", text)
    shares = [int(n) for n in re.findall(r"^  (?!total)\S[^:\n]* MiB +(\d+)%$", text, re.M)]
    assert len(shares) == 6
    assert abs(sum(shares) - 100) <= 3
    for option in ("--prefill-chunk 32", "--kv-cache-type int8", "--kv-cache-size"):
        assert re.search(f"with {option}[ 0-9]*:", text)
    compiling.keeps_its_promise(caught.value, path, 12)


def test_the_longest_context_that_fits_is_proposed(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """To a step of 128 tokens: the next one is refused."""
    model, path = tiny_checkpoint("qwen2"), tmp_path / "o.gembin"
    options = {"target": compiling.board(tmp_path, 4), "effort": Effort.FAST}
    with pytest.raises(BudgetError) as caught:
        compiling.compiled(model, path, context=32768, **options)
    found = re.search(r"with --kv-cache-size (\d+): fits$", str(caught.value), re.M)
    assert found
    context = int(found[1])
    assert context % 128 == 0
    assert 128 < context < 32768
    compiling.compiled(model, path, context=context, **options)
    with pytest.raises(BudgetError):
        compiling.compiled(model, path, context=context + 128, **options)


@pytest.mark.parametrize(
    "own",
    [{"reserve_mib": 224}, {"ram_fraction": 0.01}, {"reserve_mib": 999, "ram_fraction": 0.01}],
)
@pytest.mark.parametrize("effort", Effort)
def test_a_budget_of_ones_own_that_is_too_small_is_named_with_one_that_fits(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    own: dict[str, Any],
    effort: Effort,
) -> None:
    """A compile with it works; with a larger reserve it does not."""
    model, path = tiny_checkpoint("qwen2"), tmp_path / "o.gembin"
    options = {"target": "meter-256mb", "effort": effort, "offload": Offload.NONE, "context": 65536}
    with pytest.raises(BudgetError) as caught:
        compiling.compiled(model, path, **options, **own)
    head, *rows = str(caught.value).splitlines()
    words = {"reserve_mib": "--reserve", "ram_fraction": "--ram-fraction"}
    given = " ".join(f"{words[name]} {value}" for name, value in own.items())
    assert re.search(rf"the target grants [0-9.]+ MiB with {given}; use --", head)
    shape = " ".join(f"{words[name]} ([0-9.]+)" for name in own)
    (found,) = filter(None, (re.search(f"with {shape}: fits$", one) for one in rows))
    better = {name: type(own[name])(n) for name, n in zip(own, found.groups(), strict=True)}
    compiling.compiled(model, path, **options, **better)
    if "reserve_mib" in own and effort is Effort.FAST:
        better["reserve_mib"] += 1
        with pytest.raises(BudgetError):
            compiling.compiled(model, path, **options, **better)


def test_a_budget_of_ones_own_is_kept_and_stored(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    model, path, target = tiny_checkpoint("qwen2"), tmp_path / "o.gembin", "meter-256mb"
    options = {"target": target, "effort": Effort.FAST}
    with pytest.raises(BudgetError, match=r"meter-256mb: .* the target grants 0\.0 MiB"):
        compiling.compiled(model, path, reserve_mib=224, **options)
    compiling.compiled(model, path, reserve_mib=100, ram_fraction=0.9, **options)
    with read_artifact(path) as content:
        assert content.header.ram_budget == 124 * MIB
        assert content.hdf["policy"]["reserve_mib"] == 100
        assert content.hdf["policy"]["ram_fraction"] == 0.9
        assert content.manifest["options"]["ram_fraction"] == 0.9
    assert compiling.problems(path) == []
