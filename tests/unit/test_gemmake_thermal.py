"""The thermal pass: thresholds and ladders of every mode and board, and what the readers accept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import compiling
from gemmake.errors import UsageError
from gemmake.hdf import Hdf, load_hdf
from gemmake.passes import thermal
from gemrun import GemRunContext, GemRunError
from gemrun.format import assemble, records, spec
from gemrun.format.codes import FormatError
from gemrun.format.reader import read_artifact
from gemrun.format.spec import Ladder, Mode, Rung
from golden import make

BOARDS = sorted(p.stem for p in (Path(__file__).resolve().parents[2] / "hdf").glob("*.toml"))


def used(ladder: Ladder) -> tuple[Rung, ...]:
    return ladder.steps()[: ladder.rung_count]


@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("threshold", [None, 30.0, 75.0, 125.0])
def test_every_ladder_keeps_the_rules(board: str, mode: Mode, threshold: float | None) -> None:
    ladder = thermal.ladder(load_hdf(board), threshold, mode)
    records.check_ladder(Ladder.unpack(ladder.pack()))
    assert ladder.mode == mode
    fault = used(ladder)[ladder.fault]
    assert fault.duty <= 500
    assert fault.threads <= 500
    assert used(ladder)[-1].duty <= 80


@pytest.mark.parametrize(
    ("mode", "threshold", "engage"),
    [
        (Mode.BALANCED, None, 80.0),  # the policy's: below 95 - 10
        (Mode.BALANCED, 75.0, 75.0),
        (Mode.BALANCED, 94.0, 90.0),  # 5 below the kernel's trip
        (Mode.PERFORMANCE, 75.0, 95.0),
        (Mode.AGGRESSIVE, None, 70.0),
        (Mode.AGGRESSIVE, 75.0, 70.0),  # DESIGN, section 5
        (Mode.AGGRESSIVE, 65.0, 65.0),
        (Mode.CONSERVATIVE, 75.0, 75.0),
        (Mode.SILENT, 75.0, 65.0),
    ],
)
def test_thresholds_of_a_jetson(mode: Mode, threshold: float | None, engage: float) -> None:
    ladder = thermal.ladder(load_hdf("jetson-orin-nano"), threshold, mode)
    assert (ladder.engage_c, ladder.release_c) == (engage, engage - 5.0)
    assert ladder.rise == (2 if mode is Mode.AGGRESSIVE else 1)


def test_a_ladder_that_begins_below_the_threshold_asked_for_is_told() -> None:
    board = load_hdf("jetson-orin-nano")
    for threshold, told in ((94.0, ["begins at 90 \u00b0C"]), (80.0, []), (None, [])):
        ladder = thermal.ladder(board, threshold, Mode.BALANCED)
        notes = thermal.notes(ladder, threshold)
        assert len(notes) == len(told)
        assert all(words in note for words, note in zip(told, notes, strict=True))


@pytest.mark.parametrize(
    ("board", "least", "told"),
    [
        ("jetson-orin-nano", 95.0, r"orin-nano throttles at 95 .C by itself; use 90 .C or less"),
        ("jetson-agx-orin-64gb", 99.0, r"agx-orin-64gb throttles at 99 .C by itself; use 94 .C"),
    ],
)
def test_a_threshold_that_the_kernel_comes_before_is_refused(
    board: str, least: float, told: str
) -> None:
    hdf = load_hdf(board)
    for threshold in (least, least + 0.5, 125.0):
        with pytest.raises(UsageError, match=f"--temperature-threshold {threshold:g}: .*{told}"):
            thermal.check(hdf, threshold)
    for below in (least - 0.5, 30.0, None):
        thermal.check(hdf, below)


def test_a_board_without_a_trip_takes_every_threshold() -> None:
    thermal.check(load_hdf("generic-aarch64"), 125.0)


def test_a_threshold_is_judged_before_the_checkpoint_is_read(tmp_path: Path) -> None:
    options = {"target": "jetson-orin-nano", "temperature_threshold": 95.0}
    with pytest.raises(UsageError, match="throttles at 95"):
        compiling.compiled(tmp_path / "none", tmp_path / "x.gembin", **options)


def test_the_policy_is_bounded_by_the_kernels_trip() -> None:
    board = load_hdf("jetson-orin-nano")
    assert board.thermal is not None
    cooler = board.model_copy(
        update={"thermal": board.thermal.model_copy(update={"hw_passive_c": 85.0})}
    )
    assert thermal.ladder(cooler, None, Mode.BALANCED).engage_c == 75.0  # 85 - 10


def test_without_a_limit_the_ladder_is_never_gone_up() -> None:
    for mode in Mode:
        ladder = thermal.ladder(load_hdf("generic-x86-64"), None, mode)
        assert (ladder.engage_c, ladder.release_c) == (0.0, 0.0)


def test_what_holds_while_nothing_is_hot() -> None:
    board = load_hdf("jetson-orin-nano")
    first = {mode: used(thermal.ladder(board, None, mode))[0] for mode in Mode}
    full = Rung(duty=1000, threads=1000, chunk=1000)
    assert first == {
        Mode.BALANCED: full,
        Mode.PERFORMANCE: full,
        Mode.AGGRESSIVE: full,
        Mode.CONSERVATIVE: Rung(duty=500, threads=500, chunk=500),
        Mode.SILENT: Rung(duty=700, threads=500, chunk=500),
    }


def measured(resistance: float) -> Hdf:
    """An Orin Nano (25 W) whose thermal resistance was measured."""
    board = load_hdf("jetson-orin-nano")
    assert board.thermal is not None
    update: dict[str, Any] = {"rtheta_c_per_w": resistance}
    return board.model_copy(update={"thermal": board.thermal.model_copy(update=update)})


@pytest.mark.parametrize(
    ("resistance", "share", "duty"),
    [
        (2.4, (75 - 25) / (2.4 * 25), 833),  # the power that can be sustained, over the TDP
        (4.0, 0.5, 500),
        (0.5, 4.0, 950),  # more than there is: a first step all the same
        (100.0, 0.02, 100),
    ],
)
def test_the_board_s_power_decides_the_first_step(
    resistance: float, share: float, duty: int
) -> None:
    board = measured(resistance)
    assert thermal.sustained(board, 75.0) == pytest.approx(share)
    ladder = thermal.ladder(board, 75.0, Mode.BALANCED)
    assert used(ladder)[1].duty == duty
    records.check_ladder(ladder)


CHANGES: list[dict[str, Any]] = [
    {"mode": 5},
    {"rung_count": 0},
    {"rung_count": 9},
    {"rung_count": 7},
    {"engage_c": 0.0},
    {"release_c": 0.0},
    {"release_c": 75.0},
    {"engage_c": 150.5},
    {"engage_c": float("nan")},
    {"release_c": float("-inf")},
    {"engage_c": -0.0, "release_c": 0.0},
    {"rise": 0},
    {"rise": 9},
    {"fault": 8},
    {"engage_ms": 0},
    {"release_ms": 600_001},
    {"stale_ms": 99},
    {"reserved": bytes(27) + b"\1"},
    *(
        {"rungs": (index, rung)}
        for index, rung in (
            (0, Rung(duty=1001, threads=1000, chunk=1000)),
            (1, Rung(duty=0, threads=1000, chunk=1000)),
            (2, Rung(duty=801, threads=1000, chunk=1000)),
            (3, Rung(duty=500, threads=0, chunk=500)),
            (5, Rung(duty=350, threads=501, chunk=500)),
            (6, Rung(duty=200, threads=500, chunk=501)),
            (7, Rung(duty=80, threads=500, chunk=250, reserved=1)),
        )
    ),
]


def balanced() -> Ladder:
    return thermal.ladder(load_hdf("jetson-orin-nano"), 75.0, Mode.BALANCED)


def changed(change: dict[str, Any]) -> Ladder:
    ladder = balanced()
    if "rungs" not in change:
        return replace(ladder, **change)
    index, rung = change["rungs"]
    steps = list(ladder.steps())
    steps[index] = rung
    return replace(ladder, rungs=b"".join(step.pack() for step in steps))


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Ladder | None], Path]:
    """Write a golden artifact with a ladder."""

    def write(ladder: Ladder | None) -> Path:
        golden = make.build(make.INT4)
        path = tmp_path / "ladder.gembin"
        made = replace(golden, records=replace(golden.records, ladder=ladder))
        make.write(made, path)
        return path

    return write


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: "-".join(c))
def test_both_readers_refuse_the_same_ladders(
    change: dict[str, Any], written: Callable[[Ladder | None], Path]
) -> None:
    path = written(changed(change))
    with pytest.raises(FormatError) as refused:
        read_artifact(path)
    assert refused.value.code == -43
    with read_artifact(path, "structure"):
        pass  # what the engine checks
    with GemRunContext(path, ignore_memory=True) as ctx:
        with pytest.raises(GemRunError, match="compile the artifact again") as told:
            ctx.set_temperature(50.0)
        assert told.value.code == -43


def test_a_ladder_comes_back_as_it_was_written(
    written: Callable[[Ladder | None], Path],
) -> None:
    with read_artifact(written(balanced())) as artifact:
        assert artifact.ladder == Ladder.unpack(balanced().pack())
        assert artifact.sections["THRM"].record_size == 192
        size = artifact.header.file_size
    with read_artifact(written(None)) as artifact:
        assert artifact.ladder is None
        assert artifact.sections["THRM"].record_size == spec.size_of(spec.Thermal)
        assert artifact.header.file_size == size  # it takes no room
    assert assemble.Records.__dataclass_fields__["ladder"].default is None


@pytest.mark.parametrize("mode", Mode)
def test_the_engine_takes_every_mode(mode: Mode, written: Callable[[Ladder | None], Path]) -> None:
    ladder = thermal.ladder(load_hdf("jetson-orin-nano"), 75.0, mode)
    with GemRunContext(written(ladder), threads=2, ignore_memory=True) as ctx:
        assert not ctx.thermal().told
        ctx.set_temperature(50.0)
        state = ctx.thermal()
        assert (state.mode, state.level, state.levels) == (mode.name.lower(), 0, ladder.rung_count)
        assert state.duty == used(ladder)[0].duty / 1000
        assert (state.engage_c, state.release_c) == (ladder.engage_c, ladder.release_c)
        ctx.set_temperature(ladder.engage_c + 1)
        assert ctx.thermal().level == (2 if mode is Mode.AGGRESSIVE else 1) or state.celsius == 50
