"""The comparison with other engines: what it reads from their tools and what it writes.

Nothing is built or timed here.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", autouse=True)
def _folder() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


def load(name: str) -> Any:
    return importlib.import_module(name)


def samples(decode: list[float], **more: list[float]) -> dict[str, list[float]]:
    return {"decode 1": decode, "prefill 1": [100.0], "read 1": [10.0], **more}


RECORD: dict[str, Any] = {
    "machine": {"processor": "Probe CPU"},
    "notes": ["a note"],
    "asked": ["ours: a thing"],
    "models": {
        "probe": {
            "title": "Probe 1M",
            "engines": {
                "ours": {"label": "ours", "bytes": 100_000_000, "own": True},
                "other": {"label": "other Q4_0", "bytes": 50_000_000, "own": False},
            },
            "samples": {
                "ours": samples([80.0, 90.0, 85.0], open=[20.0], first=[40.0], peak=[102400.0]),
                "other": samples([40.0]),
            },
            "depths": {"ours": {"0": [100.0], "4096": [80.0, 90.0, 85.0]}, "other": {"0": [50.0]}},
        }
    },
}


# ---- reading ----
def test_llama_bench_gives_figures_by_kind_threads_and_depth() -> None:
    rows = [
        {"n_prompt": 512, "n_gen": 0, "n_threads": 2, "avg_ts": 9.0, "samples_ts": [8.0, 10.0]},
        {"n_prompt": 0, "n_gen": 32, "n_threads": 2, "n_depth": 1024, "avg_ts": 5.5},
        {"n_prompt": 0, "n_gen": 32, "n_threads": "1,1", "avg_ts": "4.5"},
    ]
    assert load("peer_report").parse_bench(json.dumps(rows)) == [
        ("prefill 2", 0, [8.0, 10.0]),
        ("decode 2", 1024, [5.5]),
        ("decode 1", 0, [4.5]),
    ]


def test_the_better_streaming_loop_counts() -> None:
    assert load("peer_report").parse_stream('{"plain": 9.5, "prefetch": 11.25}') == 11.25


def test_only_the_last_line_is_json() -> None:
    assert load("peer_report").last_json('load: something\n{"open_ms": 1.5}\n') == {"open_ms": 1.5}


@pytest.mark.parametrize(
    ("line", "step"),
    [("[12/345] Building C object", (12, 345)), ("-- Configuring", None), ("[x/2]", None)],
)
def test_progress_of_a_build(line: str, step: tuple[int, int] | None) -> None:
    assert load("peer_build").ninja_step(line) == step


# ---- the peers' builds ----
def test_a_peer_gets_the_vector_extensions_of_this_processor_and_no_amx() -> None:
    build = load("peer_build")
    cpu = build.cpu_flags("flags\t\t: fpu avx2 fma f16c bmi2 avx512bw avx512_vnni amx_int8\n")
    flags = build.vector_flags(cpu)
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AVX512=ON", "-DGGML_AVX512_VNNI=ON"} <= set(flags)
    assert {"-DGGML_AVX512_BF16=OFF", "-DGGML_AVX_VNNI=OFF", "-DGGML_AVX2=ON"} <= set(flags)
    assert not any("AMX" in flag for flag in flags)
    assert "llama.cpp-amx" in build.available(cpu)
    assert "llama.cpp-amx" not in build.available(cpu - {"amx_int8"})


def test_another_architecture_chooses_for_itself() -> None:
    build = load("peer_build")
    assert build.vector_flags(build.cpu_flags("Features : asimd asimddp\n")) == (
        "-DGGML_NATIVE=ON",
    )


# ---- the random model as GGUF ----
def test_names_of_a_llama_checkpoint() -> None:
    models, made = load("peer_models"), load("make_llama1b")
    names = [models.gguf_name(name) for name, _ in made.shapes(2)]
    assert len(set(names)) == len(names) == 2 + 2 * 9
    assert {"token_embd.weight", "output_norm.weight", "blk.1.attn_output.weight"} <= set(names)


def test_rows_of_q_are_ordered_as_pairs() -> None:
    values = np.arange(8, dtype=np.uint16).reshape(8, 1)
    ordered = load("peer_models").permuted(values, heads=2)
    assert ordered.ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_slow_rotations_are_divided_and_fast_ones_are_not() -> None:
    factors = load("peer_models").rope_factors(load("make_llama1b").CONFIG)
    assert factors.shape == (32,)
    assert (factors[0], factors[-1]) == (1.0, 32.0)
    assert (np.diff(factors) >= 0).all()


# ---- the text ----
def test_the_text_has_medians_shares_and_ratios() -> None:
    text = load("peer_report").render(RECORD)
    lines = text.splitlines()
    assert "- processor: Probe CPU" in lines
    assert "- a note" in lines
    assert "| weights a token touches, MB | 100 | 50 |" in lines
    assert "| decode of 128, 1 thread, tokens/s | 85 ± 6 % | 40 |" in lines
    assert "| of the read bandwidth, 1 thread | 85 % | 20 % |" in lines
    assert "| open, ms | 20 | - |" in lines
    assert "| peak memory, MiB | 100 | - |" in lines
    assert "| ours / other Q4_0 | 2.12 | 1.00 | - | - | - |" in lines
    assert "| ours | 100 (100 %) | 85 (85 %) |" in lines
    assert "| other | 50 (100 %) | - |" in lines


def test_every_row_of_a_table_is_as_wide_as_its_head() -> None:
    widths: set[int] = set()
    for line in load("peer_report").render(RECORD).splitlines():
        widths = widths | {line.count("|")} if line.startswith("|") else set()
        assert len(widths) <= 1


def test_engines_take_turns_at_the_beginning() -> None:
    turns = [load("peers").in_turns("abc", repeat) for repeat in range(4)]
    assert ["".join(turn) for turn in turns] == ["abc", "bca", "cab", "abc"]


def test_ids_are_the_same_for_everyone_and_in_every_vocabulary() -> None:
    ids = load("peer_own").prompt_ids(8192)
    assert len(set(ids)) == len(ids)
    assert 5 <= min(ids) <= max(ids) < 32000


def test_settings_of_a_context() -> None:
    own = load("peer_own")
    assert own.config_of(["threads=2", "kernel=scalar"]) == {"threads": 2, "kernel": "scalar"}
    with pytest.raises(ValueError, match="--set speed=9: no such setting"):
        own.config_of(["speed=9"])


# ---- beside other work ----
def test_a_line_of_the_neighbours_table() -> None:
    neighbours = load("neighbours")
    steps = [float(i) for i in range(1, 101)]
    result = neighbours.Result([10.0, 12.0], steps, [10.0, 10.1])
    cells = neighbours.row("alone", "plain", result)
    assert cells[:5] == ["alone", "plain", "11.0", "12.9 %", "0.7 %"]
    assert cells[5:11] == ["100", "50.00", "95.00", "99.00", "100.00", "100.00"]
    assert cells[11:] == ["-", "-", "-"]
    assert neighbours.deviation([10.0]) == "-"
    assert len(cells) == len(neighbours.HEAD)


def test_the_worst_round_of_the_serial_line_counts() -> None:
    rounds = [
        {
            "wake": {"p99": 100.0 * n, "max": 2000.0},
            "answer": {"p99": 50.0, "max": 90.0 * n},
            "missed": n,
            "exchanges": 100,
        }
        for n in (1, 3)
    ]
    cells = load("neighbours").serial_cells(rounds)
    assert cells == ["0.30 / 2.00", "0.05 / 0.27", "4 of 200"]


def test_with_affinity_the_neighbours_get_the_last_core() -> None:
    neighbours = load("neighbours")
    cores = frozenset({0, 1, 2})
    split = neighbours.places("affinity+nice", cores, {})
    assert (split["engine"].cores, split["stream"].cores) == ({0, 1}, {2})
    assert (split["engine"].niceness, split["stream"].niceness) == (0, 19)
    alone = neighbours.places("affinity", frozenset({0}), {})
    assert alone["engine"].cores == alone["serial"].cores == {0}


def test_busy_and_stolen_time_of_all_cores() -> None:
    text = "cpu  100 20 30 5000 40 5 6 70 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
    assert load("otherwork").busy_and_stolen(text, 100) == (1.61, 0.7)


def test_others_are_told_apart_from_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    otherwork = load("otherwork")
    watch = otherwork.OtherWork(clock=0.0, counted=(10.0, 1.0), mine=2.0)
    monkeypatch.setattr(otherwork.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(otherwork, "_mine", lambda: 12.0)
    for now, text in (
        ((21.0, 2.0), "others used 0.01 cores, the hypervisor took 0.01"),
        ((70.0, 1.0), "**busy: others used 0.50 cores, the hypervisor took 0.00; "),
    ):
        monkeypatch.setattr(otherwork, "_now", lambda value=now: value)
        assert watch.text().startswith(text)
