"""gemmake hdf by the real command, and what damaged descriptions are answered with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import compiling
from gemmake import hdf
from gemmake.options import Effort
from gemrun.format.reader import read_artifact

ROOT = Path(__file__).resolve().parents[2]


def gemmake(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gemmake.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def said(*words: str | Path) -> str:
    done = gemmake(*words)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_list_has_a_line_for_each_board() -> None:
    lines = said("hdf", "list").splitlines()
    assert [line.split()[0] for line in lines] == ["BOARD", *hdf.list_targets()]
    nano = next(line for line in lines if line.startswith("jetson-orin-nano "))
    assert "dotprod fp16" in nano
    assert "8192 MiB   102.4  15W 25W* MAXN_SUPER" in nano
    assert nano.endswith("  2 fields")
    assert lines[0].endswith("  UNVERIFIED")
    assert next(line for line in lines if line.startswith("cortex-m55 ")).endswith("  none")
    assert next(line for line in lines if line.startswith("generic-armv7 ")).endswith("  1 field")


def test_show_names_the_file_and_line_of_each_value() -> None:
    shown = said("hdf", "show", "jetson-orin-nano")
    assert "# sha256 without policy: c3aa14e32057095317b4" in shown
    lines = (hdf.data_dir() / "jetson-orin-nano.toml").read_text("utf-8").splitlines()
    line = lines.index("size_mib = 8192") + 1
    assert f"memory.size_mib = 8192  # jetson-orin-nano.toml:{line}\n" in shown
    assert 'accelerator[gpu].sm = "8.7"  # tegra234.toml:19\n' in shown
    assert 'cpu.cluster[c0].kind = "uniform"  # default\n' in shown
    assert "unverified" in next(row for row in shown.splitlines() if row.startswith("target.mcpu"))


def test_show_json_is_the_stored_form() -> None:
    stored = hdf.load_hdf("rk3588-8gb").canonical_json().decode()
    assert said("hdf", "show", "rk3588-8gb", "--json") == stored + "\n"


def test_check_of_all_and_of_one() -> None:
    assert said("hdf", "check").startswith(f"SUCCESS: {len(hdf.list_targets())} descriptions")
    assert said("hdf", "check", "rk3566").startswith("SUCCESS: rk3566 checked")


def test_check_tells_all_that_are_wrong(tmp_path: Path) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text('inherits = ["rk3566"]\n[memory]\nsise_mib = 5\n')
    two.write_text('inherits = ["rk3566"]\n[isp]\nmax_freq_mhz = 400\n')
    done = gemmake("hdf", "check", one, two, "rk3566")
    assert done.returncode == 4
    assert done.stdout.splitlines() == [
        f"WRONG: {one}: memory.sise_mib: unknown key; did you mean size_mib? (line 3)",
        f"WRONG: {two}: isp.max_freq_mhz has no source; add a [[source]] whose field covers it",
    ]
    assert done.stderr == "gemmake: 2 of 3 descriptions are wrong; correct them\n"


def test_diff() -> None:
    lines = said("hdf", "diff", "rk3588-8gb", "rk3588-16gb").splitlines()
    assert lines == [
        '- id = "rk3588-8gb"',
        '+ id = "rk3588-16gb"',
        "- memory.size_mib = 8192",
        "+ memory.size_mib = 16384",
        "- memory.visible_mib = 7168",
        "+ memory.visible_mib = 14336",
        "3 values differ",
    ]
    assert said("hdf", "diff", "rk3566", "rk3566") == "they are alike\n"


def test_schema() -> None:
    assert json.loads(said("hdf", "schema")) == hdf.export_schema()


def test_a_mistyped_word_is_told_what_was_meant() -> None:
    done = gemmake("hdf", "chck")
    assert done.returncode == 2
    assert "Did you mean 'check'?" in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "use"),
    [
        ("--quantization", "none", "int4 or int8"),
        ("--kv-cache-type", "dynamic-sparse", "int8"),
        ("--kv-values", "int4", "int8"),
        ("--run-threads", "2", "1"),
        ("--offload", "rows", "none: weights are read where they lie in flash"),
    ],
)
def test_what_a_minimal_engine_does_not_read_is_refused_before_the_checkpoint_is(
    tmp_path: Path, option: str, value: str, use: str
) -> None:
    output, board = tmp_path / "x.gembin", ("--target", "cortex-m55")
    done = gemmake("--model", tmp_path / "none", *board, option, value, "--output", output)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"gemmake: {option} {value}: firmware for cortex-m55 runs the minimal engine, which does "
        f"not read that; use {use}\n"
    )
    assert not output.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('inherits = ["rk3566"\n', "not valid TOML"),
        ('inherits = ["rk3566"]\n[memory\n', "line 2"),
        ('inherits = ["rk3566"]\n[memory]\nsize_gb = 4\n', "memory.size_gb: unknown key"),
        ('inherits = ["rk3566"]\n[memory]\nsize_mib = "4 GB"\n', "(line 3)"),
        ('inherits = ["rk3566"]\n[memory]\nsize_mib = 999999999999999999999\n', "(line 3)"),
        ('inherits = ["rk3566"]\n[memory]\nsize_mib = 1e400\n', "plain numbers and text (line 3)"),
        (
            'inherits = ["rk3566"]\n[[power_mode]]\nid = "fixed"\n\nmem_peak_gbps = -1.0\n',
            "power_mode[fixed].mem_peak_gbps: input should be greater than or equal to 0.001, "
            "not -1.0; correct the value (line 5)",
        ),
        (
            'inherits = ["rk3588-8gb"]\n[[power_mode]]\nid = "fixed"\nmem_peak_gbps = 44.0\n',
            "bus_bits / 8 * mem_mtps = 33.8; correct the one that is wrong (line 4)",
        ),
        ('inherits = ["own"]\n', "remove the circle"),
        ("x = " + "[" * 3000 + "]" * 3000, "nested"),
        (".".join(["a"] * 3000) + " = 1", "nested"),
    ],
)
def test_damaged_descriptions_are_answered_in_one_sentence(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text, encoding="utf-8")
    done = gemmake("--model", tmp_path, "--target", path, "--output", tmp_path / "x.gembin")
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


def test_a_mistake_in_a_base_names_the_base(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('inherits = ["rk3566"]\n[memory]\nbus_bits = 0\n')
    (tmp_path / "own.toml").write_text('inherits = ["base"]\n')
    done = gemmake("hdf", "show", tmp_path / "own.toml")
    assert done.returncode == 4
    assert "memory.bus_bits" in done.stderr
    assert "(base.toml line 3)" in done.stderr


def test_probe_drafts_a_description_that_passes(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(said("hdf", "probe", "--id", "own", "--mib", "16"), encoding="utf-8")
    board = hdf.load_hdf(path)
    assert board.default_mode is not None
    assert board.default_mode.mem_peak_gbps
    assert said("hdf", "check", path).startswith("SUCCESS")


@pytest.mark.parametrize(
    "target",
    ["generic-armv7", "spacemit-k1", "meter-256mb", "jetson-orin-nx-16gb", "agx-orin-32gb"],
)
def test_new_boards_compile_and_pass_gemcheck(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, target: str
) -> None:
    path = tmp_path / "x.gembin"
    compiling.compiled(tiny_checkpoint("llama3"), path, target=target, effort=Effort.FAST)
    board = hdf.load_hdf(target)
    with read_artifact(path) as artifact:
        assert artifact.header.target.rstrip(b"\0").decode() == board.id
        assert artifact.header.hdf_sha256 == board.sha256()
        assert artifact.header.ram_budget == board.budget_bytes()
    assert compiling.problems(path) == []
