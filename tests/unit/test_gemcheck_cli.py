"""The gemcheck command: exit codes, streams, JSON, --diff and inspect."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fuzz.mutate import find, reseal, section_range
from gemmake.check.cli import main
from gemmake.check.diff import MOST_ONE_SIDED
from gemrun.format import manifest, spec
from gemrun.format.units import with_units
from golden import make

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
    assert result.stdout.startswith(f"\u2717 Artifact refused: {BAD}: section LAYR: CRC ")
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
    page = run("--help").stdout
    assert "gemcheck FILE" in page
    for command in main.commands.values():
        for parameter in command.params:
            assert all(name in page for name in parameter.opts if name.startswith("--")), parameter
    assert "\ninspect: Show what is inside an artifact:\n" in page
    assert len(page.splitlines()) <= 24
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
    verbose = run("--verbose", GOOD)
    assert verbose.exit_code == 0
    for hint in (
        "lower --temperature-threshold",
        "with --throttle-mode aggressive",
        "gemmake sign",
    ):
        assert hint in verbose.stdout, hint
        assert hint not in run(GOOD).stdout, hint


def test_verbose_shows_what_heads_keep() -> None:
    path = GOLDEN / "v1.0/tiny-kvmask.gembin"
    heading = "layer  blocks kept"
    assert heading in run("--verbose", path).stdout
    assert heading not in run(path).stdout
    found = json.loads(run("--json", path).stdout)["findings"]
    assert heading in next(f for f in found if f["rule"] == "kv-cache")["details"][0]
    assert "32+32 tokens" in run("inspect", path).stdout


def test_diff_names_the_heads_that_keep_something_else(tmp_path: Path) -> None:
    path = GOLDEN / "v1.0/tiny-kvmask.gembin"
    with_units(path, tmp_path / "b", [(0, 0), (0, 0), (2, 1), (0, 0)])
    shown = run("--diff", path, tmp_path / "b").stdout
    assert "layer 1: KV head 0 keeps: 32+32 tokens | 64+32 tokens\n" in shown
    assert "section KVMK: content differs (64 bytes)\n" in shown
    with_units(path, tmp_path / "c", [])
    shown = run("--diff", path, tmp_path / "c").stdout
    assert "layer 1: KV head 0 keeps: 32+32 tokens | all\n" in shown
    assert "KV head 1" not in shown
    assert "section KVMK: only in the first\n" in shown


def test_diff_of_equal_files() -> None:
    result = run("--diff", GOOD, GOOD)
    assert (result.exit_code, result.stdout) == (0, "same content\n")


def flipped(path: Path, section: str, position: str) -> bytes:
    """A file with one bit of a section turned over, its checksums left as they were."""
    raw = bytearray(path.read_bytes())
    place = section_range(raw, find(raw, section))
    assert place is not None
    at = {"first": 0, "middle": place[1] // 2, "last": place[1] - 1}[position]
    raw[place[0] + at] ^= 1
    return bytes(raw)


@pytest.mark.parametrize("position", ["first", "middle", "last"])
@pytest.mark.parametrize("section", ["WHOT", "MANI", "HDFJ", "TEST", "TOKN"])
def test_no_digest_is_trusted_before_it_is_checked(
    tmp_path: Path, section: str, position: str
) -> None:
    """The stored root of the damaged file is that of the good one."""
    bad = tmp_path / "bad.gembin"
    bad.write_bytes(flipped(GOOD, section, position))
    for arguments in (("--diff", GOOD, bad), ("--diff", bad, GOOD), ("inspect", bad)):
        result = run(*arguments)
        assert result.exit_code == 6, arguments
        assert result.stdout == ""
        assert result.stderr.startswith(f"gemcheck: {bad}: section {section}: CRC ")


def test_right_crcs_do_not_make_up_for_a_wrong_sha256(tmp_path: Path) -> None:
    """CRC, table and header are made to fit; the section's SHA-256 and so the root are kept."""
    raw = bytearray(flipped(GOOD, "WHOT", "middle"))
    entry = find(raw, "WHOT")
    start, size = section_range(raw, entry) or (0, 0)
    crc = spec.Section.unpack(bytes(raw[entry : entry + spec.ENTRY_SIZE]))
    packed = replace(crc, crc32=zlib.crc32(raw[start : start + size])).pack()
    raw[entry : entry + spec.ENTRY_SIZE] = packed
    header = spec.Header.unpack(bytes(raw[:256]))
    table = bytes(raw[512 : 512 + spec.ENTRY_SIZE * header.section_count])
    header = replace(header, table_crc32=zlib.crc32(table), header_crc32=0)
    raw[:256] = replace(header, header_crc32=zlib.crc32(header.pack()[:252])).pack()
    bad = tmp_path / "bad.gembin"
    bad.write_bytes(raw)
    for arguments in (("--diff", GOOD, bad), ("inspect", bad)):
        result = run(*arguments)
        assert result.exit_code == 6, arguments
        assert "section WHOT: SHA-256 differs" in result.stderr


def test_diff_sees_the_signature_block_that_no_root_covers(tmp_path: Path) -> None:
    raw = bytearray(GOOD.read_bytes())
    raw[256] = 1
    raw[264:272] = bytes(range(8))
    (tmp_path / "signed.gembin").write_bytes(raw)
    result = run("--diff", GOOD, tmp_path / "signed.gembin")
    assert result.exit_code == 1
    assert "signature: alg: 0 | 1" in result.stdout
    assert "same content" not in result.stdout


def test_diff_takes_no_more_files_and_no_other_mode() -> None:
    for more in (GOOD, "--run", "--json"):
        result = run("--diff", GOOD, OTHER, more)
        assert result.exit_code == 2
        assert "--diff takes two artifacts" in result.stderr


def with_manifest(tmp_path: Path, name: str, **fields: object) -> Path:
    golden = make.build(make.INT4)
    table = {**manifest.decode(golden.records.manifest), **fields}
    records = replace(golden.records, manifest=manifest.encode(table))
    make.write(replace(golden, records=records), tmp_path / name)
    return tmp_path / name


def test_diff_shortens_lists_of_what_one_file_has(tmp_path: Path) -> None:
    inputs = [{"name": f"part{i}", "size": i, "sha256": "00"} for i in range(20)]
    one = with_manifest(tmp_path, "a.gembin", inputs=inputs, notes=["kept", "left"])
    other = [{**inputs[0], "size": 7}]
    two = with_manifest(tmp_path, "b.gembin", inputs=other, notes=["kept", "right"])
    result = run("--diff", one, two)
    lines = result.stdout.splitlines()
    assert "input part0: size: 0 | 7" in lines
    listed = [line for line in lines if line.startswith("input part") and "first" in line]
    assert len(listed) == MOST_ONE_SIDED
    assert "input ... and 11 more only in the first" in lines
    assert "notes: left: only in the first" in lines
    assert "notes: right: only in the second" in lines


def test_diff_counts_tensors_that_one_file_has() -> None:
    result = run("--diff", GOOD, GOLDEN / "v1.0/tiny-f16.gembin")
    lines = result.stdout.splitlines()
    assert "tensors: 18 of 32 differ, 8 only in the first, 6 only in the second" in lines
    assert sum(line.endswith("only in the first") for line in lines) == 8 + 1  # and TMPL


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
    roles = [line for line in result.stdout.splitlines() if " role " in line]
    assert len(roles) == 1
    assert roles[0].split()[3] == "q"


def test_inspect_shows_no_number_where_there_is_a_name() -> None:
    """Enumerations of the records stand in the tables under their names."""
    rows = [line.split() for line in run("inspect", GOOD).stdout.splitlines()]
    assert ["\u2502", "kv_type", "\u2502", "int8", "\u2502"] in rows


@pytest.mark.parametrize(
    ("wanted", "close"),
    [
        ("nothing like it", ""),
        ("t1.p", " (close: t1.q, t"),
        ("GATE", " (close: t9.gate_up, t21.gate_up)"),
        ("", ""),
    ],
)
def test_a_tensor_that_is_not_there(wanted: str, close: str) -> None:
    missing = run("inspect", GOOD, "--tensor", wanted)
    assert missing.exit_code == 2
    start = f"gemcheck: tensor {wanted}: not in this artifact{close}"
    assert missing.stderr.startswith(start), missing.stderr
    assert missing.stderr.endswith(f"; gemcheck inspect {GOOD} lists them\n")
    assert len(missing.stderr) < 200 + len(str(GOOD))


def test_fused_tensors_answer_to_each_of_their_names(tmp_path: Path) -> None:
    listed = manifest.decode(make.build(make.INT4).records.manifest)["tensors"]
    for index, name in ((9, "l.0.gate+l.0.up"), (1, "l.0.qkv"), (2, "l.0.qkv")):
        listed[index]["name"] = name
    path = with_manifest(tmp_path, "a.gembin", tensors=listed)
    for wanted in ("l.0.gate", "l.0.up", "l.0.gate+l.0.up"):
        result = run("inspect", path, "--tensor", wanted)
        assert result.exit_code == 0, wanted
        assert "Tensor 9 " in result.stdout
        assert " l.0.gate+l.0.up " in result.stdout
    split = run("inspect", path, "--tensor", "l.0.qkv").stdout
    assert "Tensor 1 " in split
    assert "Tensor 2 " in split
    assert run("inspect", path, "--tensor", "l.0.gate+").exit_code == 2


@pytest.mark.parametrize("name", ["nofile", "a file; with a semicolon", "README.md"])
def test_refusals_name_the_file_exactly_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if name.endswith(".md"):
        Path(name).write_text("# words, no artifact\n")
    for arguments in ((name,), ("inspect", name), ("--diff", GOOD, name)):
        result = run(*arguments)
        assert result.exit_code == 6, arguments
        assert result.output.count(name) == 1, result.output
    several = run(name, GOOD)
    assert several.exit_code == 6
    assert several.stdout.count(name) == 1, several.stdout
    found = json.loads(run("--json", name).stdout)
    assert found["file"] == name
    assert name not in found["findings"][0]["text"]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("inspekt", "a.gembin"), "gemcheck inspect FILE"),
        (("inspekt", "a.gembin", "--tensor", "x"), "gemcheck inspect FILE"),
        (("--json", "inspect", "a.gembin"), "gemcheck inspect FILE"),
        (("chek", "a.gembin"), "gemcheck FILE"),
        (("diff", "a", "b"), "gemcheck --diff A B"),
        (("help",), "gemcheck --help"),
    ],
)
def test_words_that_are_nearly_commands(arguments: tuple[str, ...], meant: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert f"did you mean '{meant}'?" in result.stderr
    assert result.stdout == ""


def test_files_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is there is a file, whatever it is called, and so is what looks like a path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inspekt").write_bytes(GOOD.read_bytes())
    assert run("inspekt").exit_code == 0
    assert run("inspekt.gembin").exit_code == 6
    assert run("./inspect").exit_code == 6
    assert run("gemma").exit_code == 6


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


@pytest.mark.parametrize(
    "arguments", [[GOOD], ["inspect", GOOD], ["--diff", GOOD, OTHER], ["--json", GOOD]]
)
def test_a_full_disk_behind_standard_output_is_no_success(arguments: list[str | Path]) -> None:
    command = [sys.executable, "-m", "gemmake.check.cli", *map(str, arguments)]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 7
    assert done.stderr.decode().startswith("gemcheck: standard output: No space left")
    assert b"Traceback" not in done.stderr
