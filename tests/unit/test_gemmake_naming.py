"""The default name of an artifact, and what file(1) says of one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from gemmake.cli import main
from gemmake.errors import TargetError, UsageError
from gemmake.naming import default_output
from gemmake.options import CompileOptions

ROOT = Path(__file__).resolve().parents[2]
MAGIC = ROOT / "csrc" / "gembin.magic"
GOLDEN = ROOT / "tests" / "golden" / "v1.0"


@pytest.mark.parametrize(
    ("model", "target", "bsp", "name"),
    [
        ("gemma", "jetson-orin-nano", "35.4.1", "gemma-jetson-orin-nano-35.4.1.gembin"),
        ("a/b/gemma.pt", "jetson-orin-nano", None, "gemma-jetson-orin-nano.gembin"),
        ("smol.Q4_1.gguf", "rk3588-8gb", None, "smol.Q4_1-rk3588-8gb.gembin"),
        ("m.safetensors", "raspberry-pi-5", None, "m-raspberry-pi-5.gembin"),
        ("odd name (1)/", "generic-aarch64", None, "odd-name-1-generic-aarch64.gembin"),
    ],
)
def test_default_names(model: str, target: str, bsp: str | None, name: str) -> None:
    assert default_output(Path(model), target, bsp) == Path(name)


def test_the_current_folder_has_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gemma").mkdir()
    monkeypatch.chdir(tmp_path / "gemma")
    assert default_output(Path(), "generic-aarch64", None).name.startswith("gemma-generic")


def test_the_board_s_description_may_have_the_version(tmp_path: Path) -> None:
    path = tmp_path / "agv.toml"
    text = (ROOT / "hdf" / "jetson-orin-nano.toml").read_text()
    path.write_text('bsp_version = "36.4"\n' + text)
    assert default_output(Path("m"), str(path), None) == Path("m-agv-36.4.gembin")
    assert default_output(Path("m"), str(path), "35.4.1") == Path("m-agv-35.4.1.gembin")


@pytest.mark.parametrize("bsp", ["", "a/b", "..", " 1", "x" * 33])
def test_a_version_that_is_no_name_is_refused(bsp: str) -> None:
    with pytest.raises(UsageError, match="--bsp-version"):
        default_output(Path("m"), "generic-aarch64", bsp)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ((), "gemma-jetson-orin-nano.gembin"),
        (("--bsp-version", "35.4.1"), "gemma-jetson-orin-nano-35.4.1.gembin"),
        (("--output", "x.gembin"), "x.gembin"),
    ],
)
def test_the_command_takes_the_name(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], name: str
) -> None:
    seen: list[Path] = []

    def compile_model(request: CompileOptions, _reporter: object) -> None:
        seen.append(request.output)
        raise UsageError("enough")

    monkeypatch.setattr("gemmake.pipeline.compile_model", compile_model)
    line = ["--model", "a/gemma", "--target", "jetson-orin-nano", *options]
    assert CliRunner().invoke(main, line).exit_code == 2
    assert seen == [Path(name)]


@pytest.mark.parametrize("named", [(), ("--output", "x.gembin")])
def test_a_version_is_stored_whatever_the_name(
    monkeypatch: pytest.MonkeyPatch, named: tuple[str, ...]
) -> None:
    seen: list[str | None] = []

    def compile_model(request: CompileOptions, _reporter: object) -> None:
        seen.append(request.bsp_version)
        raise UsageError("enough")

    monkeypatch.setattr("gemmake.pipeline.compile_model", compile_model)
    line = ["--model", "m", "--target", "jetson-orin-nano", *named, "--bsp-version", "35.4.1"]
    assert CliRunner().invoke(main, line).exit_code == 2
    assert seen == ["35.4.1"]


def test_a_wrong_version_beside_a_name_is_refused(tmp_path: Path) -> None:
    line = ["--model", "m", "--target", "jetson-orin-nano", "--output", str(tmp_path / "x.gembin")]
    result = CliRunner().invoke(main, [*line, "--bsp-version", "a/b"])
    assert result.exit_code == 2
    assert "--bsp-version: a/b is no version; use letters, digits, '.' and '-'" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_board_is_refused() -> None:
    with pytest.raises(TargetError):
        default_output(Path("m"), "no-such-board", None)


def told(*paths: Path) -> list[str]:
    done = subprocess.run(
        ["file", "-b", "-m", MAGIC, *paths], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_file_names_version_target_and_model() -> None:
    paths = sorted(GOLDEN.glob("*.gembin"))
    assert paths
    for path, text in zip(paths, told(*paths), strict=True):
        size = path.stat().st_size
        assert text.startswith("gembin model, version 1.0, for generic-x86-64 (x86-64), "), text
        assert text.endswith(f", {size} bytes")


def test_a_target_of_sixteen_letters_is_not_too_long(tmp_path: Path) -> None:
    image = bytearray((GOLDEN / "tiny-int4.gembin").read_bytes())
    image[184:200], image[104] = b"jetson-orin-nano", 2
    path = tmp_path / "x.gembin"
    path.write_bytes(image)
    (text,) = told(path)
    assert "version 1.0, for jetson-orin-nano (aarch64), " in text


def test_file_says_nothing_of_others(tmp_path: Path) -> None:
    path = tmp_path / "x.gembin"
    path.write_bytes(b"\x8bGEN\r\n\x1a\n" + bytes(600))
    assert told(path) == ["data"]
