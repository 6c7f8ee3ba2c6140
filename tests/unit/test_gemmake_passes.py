"""The small passes: norms, ties, placement, budget, thermal policy, vectors, remedies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gemmake import kvgroups
from gemmake.errors import BudgetError
from gemmake.hdf import load_hdf
from gemmake.model import (
    MODEL_LAYER,
    Act,
    Block,
    Generation,
    LayerSpec,
    Model,
    ModelSpec,
    Role,
    RopeSpec,
    TensorRef,
    TokenizerSource,
)
from gemmake.passes import layout, norms, place, thermal, ties, vectors
from gemmake.passes.budget import Memory, Remedy, check_budget
from gemrun.format import spec

LAYER = LayerSpec(4, 2, 64, 96, 0, 0, Block.PRE, Act.SILU, 0.125)
MODEL = ModelSpec(
    *("llama", "small", 64, 100, 256, 1e-5, 1.0, True),
    layers=(LAYER, replace(LAYER, window=32, act=Act.GELU_TANH)),
    ropes=(RopeSpec(10000.0, 64),),
    generation=Generation(()),
)
MEMORY = Memory(weights=10 << 20, tables=1 << 20, arena=2 << 20, kv=3 << 20, engine=4096, stacks=0)


def ref(role: Role, offset: float = 0.0, layer: int = MODEL_LAYER) -> TensorRef:
    def read(first: int, count: int) -> np.ndarray:
        return np.full((count, 4), 0.5, np.float32) + np.float32(first)

    return TensorRef(role, layer, role.name, 3, 4, "F32", read, offset)


def model(*refs: TensorRef) -> Model:
    tensors = {(r.layer, r.role): r for r in refs}
    return Model(MODEL, tensors, TokenizerSource({}))


def test_folded_norms_read_with_their_offset_and_the_rest_is_left_alone() -> None:
    before = model(ref(Role.FINAL_NORM, 1.0), ref(Role.HEAD))
    after = norms.fold_norms(before)
    norm = after.tensors[MODEL_LAYER, Role.FINAL_NORM]
    assert norm.norm_offset == 0.0
    assert norm.read(1, 2).tolist() == [[2.5] * 4] * 2
    assert norm.read(1, 2).dtype == np.float32
    assert after.tensors[MODEL_LAYER, Role.HEAD] is before.tensors[MODEL_LAYER, Role.HEAD]
    assert norms.fold_norms(after) == after


@pytest.mark.parametrize("held", [(Role.EMBED,), (Role.HEAD,), (Role.EMBED, Role.HEAD)])
def test_a_tied_table_stands_at_the_heads_place_alone(held: tuple[Role, ...]) -> None:
    after = ties.tie(model(*(ref(role) for role in held)))
    assert list(after.tensors) == [(MODEL_LAYER, Role.HEAD)]
    assert after.tensors[MODEL_LAYER, Role.HEAD].role is Role.HEAD


def test_untied_tables_stay_two() -> None:
    two = model(ref(Role.EMBED), ref(Role.HEAD))
    two = replace(two, spec=replace(MODEL, tied=False))
    assert ties.tie(two) is two


def test_placement_lines_are_one_a_layer_and_the_summary_last() -> None:
    hdf = load_hdf("jetson-orin-nano")
    offered = place.accelerators(hdf)
    placements = place.place(MODEL, offered)
    lines = place.placement_lines(MODEL, placements, offered, hdf.board, [1_000_000, 2_000_000])
    parts = "(norms, attention, FFN; GPU needs the [jetson] backend)"
    assert lines == [
        f"[CPU] layer 0: full attention, 4/2 heads of 64, SwiGLU 96, 0.95 MiB of weights {parts}",
        f"[CPU] layer 1: window 32, 4/2 heads of 64, GeGLU 96, 1.91 MiB of weights {parts}",
        "[NVDLA] Offloaded 0/2 layers to NVDLA engine (orin-nano has none)",
    ]


def test_a_board_with_nvdla_says_why_it_takes_no_layer() -> None:
    offered = place.Accelerators(nvdla=2)
    lines = place.placement_lines(MODEL, place.place(MODEL, offered), offered, "orin-nx", [0, 0])
    assert lines[-1] == (
        "[NVDLA] Offloaded 0/2 layers to NVDLA engine (NVDLA runs convolutions through TensorRT "
        "only)"
    )


def test_every_part_of_every_layer_is_placed_once() -> None:
    placed = place.place(MODEL, place.Accelerators())
    wanted = [(MODEL_LAYER, "embedding")]
    wanted += [(layer, op) for layer in (0, 1) for op in ("norms", "attention", "FFN")]
    assert [(p.layer, p.op) for p in placed] == [*wanted, (MODEL_LAYER, "head")]
    assert {p.engine for p in placed} == {"CPU"}
    assert {p.reason for p in placed} == {"no accelerator on this target"}


def reasons(board: str) -> dict[str, str]:
    placed = place.place(MODEL, place.accelerators(load_hdf(board)))
    return {p.op: p.reason for p in placed}


def test_why_no_other_engine_takes_a_part_depends_on_the_part() -> None:
    jetson = "needs the [jetson] backend, which is not part of this version"
    assert set(reasons("jetson-orin-nano").values()) == {f"GPU: {jetson}"}
    both = reasons("jetson-orin-nx-16gb")
    assert all(reason.startswith(f"GPU: {jetson}, NVDLA: ") for reason in both.values())
    assert both["attention"].endswith("grow with every token, a compiled convolution does not")
    assert both["FFN"].endswith("no codes with a scale for 32 inputs")
    npu = reasons("rk3588-8gb")
    assert npu["FFN"].startswith("NPU: the vendor's SDK takes int8 graphs")
    assert set(reasons("raspberry-pi-5").values()) == {"no accelerator on this target"}


def test_the_parts_are_told_one_by_one_with_the_engines_that_took_none() -> None:
    offered = place.accelerators(load_hdf("jetson-orin-nx-16gb"))
    lines = list(place.op_lines(MODEL, place.place(MODEL, offered), offered))
    begins = (
        "[CPU] embedding: a row of 64 for each token, of 100 (GPU: ",
        "[CPU] norms in 2 layers: 5 of 64 (GPU: ",
        "[CPU] attention in 2 layers: 4 KV heads (GPU: ",
        "[CPU] FFN in 2 layers: GeGLU 96, SwiGLU 96 (GPU: ",
        "[CPU] head: 100 rows of 64, those of the embedding (GPU: ",
        "[GPU] 8 parts left to the CPU: needs the [jetson] backend",
    )
    assert len(lines) == len(begins)
    for line, begin in zip(lines, begins, strict=True):
        assert line.startswith(begin)
    assert not any("NVDLA] " in line for line in lines)


@pytest.mark.parametrize("target", ["generic-x86-64", "generic-aarch64", "jetson-orin-nano"])
def test_run_threads_are_within_the_engines_limit(target: str) -> None:
    assert 1 <= place.run_threads(load_hdf(target)) <= spec.MAX_THREADS


def test_budget_that_fits_says_nothing() -> None:
    check_budget(MEMORY, MEMORY.total, "board", ())


def test_budget_refusal_tells_what_every_option_leads_to_and_a_command_that_fits() -> None:
    tries = [
        Remedy("--a 1", MEMORY.total - (1 << 20), "gemmake .. --a 1"),
        Remedy("--b 2", 5 << 20, "gemmake .. --b 2"),
        Remedy("--c 3", 1 << 20, "gemmake .. --c 3"),
    ]
    with pytest.raises(BudgetError) as caught:
        check_budget(MEMORY, 6 << 20, "board", tries)
    lines = str(caught.value).splitlines()
    assert lines[0] == "board: needs 16.0 MiB but the target grants 6.0 MiB; use --b 2"
    assert lines[1].split() == ["weights", "10.0", "MiB", "62%"]
    assert lines[7].split() == ["total", "16.0", "MiB", "100%"]
    assert lines[8:] == [
        "  5.0 MiB with --b 2: fits",
        "  1.0 MiB with --c 3: fits",
        "  15.0 MiB with --a 1: 9.0 MiB too much",
        "  gemmake .. --b 2",
    ]


def test_budget_without_a_remedy_says_so() -> None:
    with pytest.raises(BudgetError, match="no option makes it fit") as caught:
        check_budget(MEMORY, 1 << 20, "board", [Remedy("--a", 2 << 20)])
    assert str(caught.value).endswith("2.0 MiB with --a: 1.0 MiB too much")


@pytest.mark.parametrize(
    ("target", "threshold", "wanted"),
    [
        ("jetson-orin-nano", None, 80.0),
        ("jetson-orin-nano", 75.0, 75.0),
        ("generic-x86-64", None, 0.0),
        ("generic-x86-64", 60.0, 60.0),
    ],
)
def test_thermal_policy(target: str, threshold: float | None, wanted: float) -> None:
    hdf = load_hdf(target)
    policy = thermal.policy(hdf, threshold)
    assert policy.threshold_c == wanted
    assert policy.device_max_c == (hdf.policy.target_temp_c or 0.0)


@pytest.mark.parametrize("context", [2, 3, 16, 17, 128, 1024])
@pytest.mark.parametrize("rows", [1, 300, 128256])
def test_test_prompts_fit_the_context_and_the_vocabulary(context: int, rows: int) -> None:
    steps, prompts = vectors.steps(context), vectors.prompts(context, rows)
    assert len(prompts) == vectors.COUNT
    for prompt in prompts:
        assert 1 <= len(prompt) <= spec.TEST_PROMPT
        assert len(prompt) + steps <= context
        assert all(0 <= token < rows for token in prompt)
    packed = vectors.pack([(prompt, 5, [1] * steps) for prompt in prompts])
    assert len(packed) == vectors.COUNT * spec.size_of(spec.TestVector)


@pytest.mark.parametrize(
    ("head_dim", "biased", "group"),
    [(64, False, 64), (64, True, 32), (96, False, 32), (24, False, 24), (256, True, 32)],
)
def test_kv_groups_divide_the_head(head_dim: int, biased: bool, group: int) -> None:
    layer = replace(LAYER, head_dim=head_dim, qkv_bias=biased)
    assert layout.kv_group(layer) == group


@pytest.mark.parametrize(
    ("errors", "group"),
    [
        ({32: 1e-6, 64: 5e-5, 256: 9e-5}, 256),
        ({32: 1e-6, 64: 5e-5, 256: 2e-4}, 64),
        ({32: 3e-4, 64: 2e-3}, 32),
        ({32: 0.0, 64: 0.0}, 64),
        ({24: 0.0}, 24),
        ({32: 5e-4, 64: 5e-4}, 64),
    ],
)
def test_the_largest_kv_group_below_the_limit_is_taken(
    errors: dict[int, float], group: int
) -> None:
    assert kvgroups.pick(errors) == group
