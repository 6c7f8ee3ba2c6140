"""The gemcheck command: exit codes, streams, JSON, --diff and inspect."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fuzz.mutate import find, reseal, section_range
from gemmake.check.cli import main

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
GOOD = GOLDEN / "v1.0/tiny-int4.gembin"
OTHER = GOLDEN / "v1.0/tiny-q4raw.gembin"
BAD = GOLDEN / "refused/SECTION_CRC-layer.gembin"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_a_good_file_exits_0_with_warnings_on_stdout() -> None:
    result = run(GOOD)
    assert result.exit_code == 0
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "\u26a0 Model signature: none"
    assert len(lines) == 10


def test_a_damaged_file_exits_6_with_one_sentence() -> None:
    result = run(BAD)
    assert result.exit_code == 6
    assert result.stdout.startswith("\u2717 Artifact refused: section LAYR: CRC ")
    assert result.stdout.count("\n") == 1


def test_several_files_take_the_worst_exit_code() -> None:
    result = run(GOOD, BAD, OTHER)
    assert result.exit_code == 6
    assert result.stdout.count(".gembin:\n") == 3


def test_no_file_and_unknown_options_are_usage_errors() -> None:
    assert run().exit_code == 2
    assert run("--verbose").exit_code == 2
    result = run("--nonsense", GOOD)
    assert result.exit_code == 2
    assert "--nonsense" in result.stderr


def test_help_and_version() -> None:
    assert "gemcheck FILE" in run("--help").stdout
    assert run("--version").stdout.startswith("gemcheck")
    assert "--tensor" in run("inspect", "--help").stdout


def test_json_of_one_and_of_several() -> None:
    one = json.loads(run("--json", GOOD).stdout)
    assert one["ok"] is True
    assert one["exit_code"] == one["code"] == 0
    assert one["size"] == GOOD.stat().st_size
    assert len(one["root_sha256"]) == 64
    assert {f["severity"] for f in one["findings"]} == {"ok", "warning"}
    assert set(one["findings"][0]) == {"rule", "severity", "text", "hint"}
    several = json.loads(run("--json", GOOD, BAD).stdout)
    assert [r["code"] for r in several] == [0, -34]
    assert several[1]["findings"][0]["rule"] == "crc"


def test_verbose_adds_hints_to_warnings() -> None:
    assert "  lower the threshold" in run("--verbose", GOOD).stdout
    assert "  lower the threshold" not in run(GOOD).stdout


def test_diff_of_equal_files() -> None:
    result = run("--diff", GOOD, GOOD)
    assert (result.exit_code, result.stdout) == (0, "same content\n")


def test_diff_names_what_differs() -> None:
    result = run("--diff", GOOD, OTHER)
    assert result.exit_code == 1
    for part in (
        "constants: kv_type: 2 | 1",
        "constants: name: tiny-int4 | tiny-q4raw",
        "section TMPL: only in the first",
        "section WHOT: content differs (",
        "layer 0: ffn: 64 | 32",
        "tensor t0.embed: only in the second",
        "KV layout of tiny-int4 and tiny-q4raw: different",
    ):
        assert part in result.stdout, part
    assert "root_sha256" not in result.stdout


def test_diff_counts_bytes_of_a_tensor(tmp_path: Path) -> None:
    raw = bytearray(GOOD.read_bytes())
    place = section_range(raw, find(raw, "WHOT"))
    assert place is not None
    for at in (0, 4, 8):
        raw[place[0] + 256 + 64 + at] ^= 0x11
    (tmp_path / "b.gembin").write_bytes(reseal(raw))
    result = run("--diff", GOOD, tmp_path / "b.gembin")
    assert result.exit_code == 1
    assert "tensor t1.q: 3 of 768 bytes differ" in result.stdout
    assert "tensors: 1 of 26 differ" in result.stdout
    assert "different" not in result.stdout


def test_diff_of_a_damaged_file_says_which(tmp_path: Path) -> None:
    result = run("--diff", GOOD, BAD)
    assert result.exit_code == 6
    assert result.stderr.startswith(f"gemcheck: {BAD}: section LAYR: CRC ")


def test_inspect_lists_everything() -> None:
    result = run("inspect", GOOD)
    assert result.exit_code == 0
    for part in ("generic-x86-64", "TOKN", "t9.gate_up", "q4h:1+q8:1", "gelu_tanh", "int8"):
        assert part in result.stdout, part


def test_inspect_one_tensor() -> None:
    result = run("inspect", GOOD, "--tensor", "t1.q")
    assert result.exit_code == 0
    assert "bits per weight" in result.stdout
    missing = run("inspect", GOOD, "--tensor", "nothing")
    assert missing.exit_code == 6
    assert missing.stderr.startswith("gemcheck: tensor nothing: not in this artifact; it has t0")


def test_debug_shows_where_it_failed() -> None:
    result = run("inspect", BAD, "--debug")
    assert result.exit_code == 1
    assert result.exception is not None
    assert run("inspect", BAD).exit_code == 6


@pytest.mark.parametrize(("encoding", "mark"), [("ascii", b"\xe2\x9a\xa0"), ("latin-1", b"?")])
def test_terminals_without_utf8_are_no_crash(encoding: str, mark: bytes) -> None:
    """click takes an ASCII stream for a wrong setting and writes UTF-8; others get "?"."""
    done = subprocess.run(
        [sys.executable, "-m", "gemmake.check.cli", str(GOOD)],
        capture_output=True,
        check=False,
        env={"PYTHONIOENCODING": encoding, "PATH": ""},
        cwd=GOLDEN.parents[1],
    )
    assert done.returncode == 0
    assert done.stdout.startswith(mark + b" Model signature: none")


def test_files_whose_names_are_not_utf8(tmp_path: Path) -> None:
    name = bytes(tmp_path) + b"/\xff.gembin"
    with open(name, "wb") as stream:  # noqa: PTH123  a path of bytes
        stream.write(BAD.read_bytes())
    done = subprocess.run(
        [sys.executable, "-m", "gemmake.check.cli", "--json", name],
        capture_output=True,
        check=False,
        cwd=GOLDEN.parents[1],
    )
    assert done.returncode == 6, done.stderr
    assert json.loads(done.stdout)["code"] == -34
