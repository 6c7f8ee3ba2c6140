"""Options: ranges, and what goes together."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from gemmake.cli import main
from gemmake.errors import UsageError
from gemmake.options import (
    COMMAND,
    CompileOptions,
    KvGate,
    KvKeys,
    KvType,
    Offload,
    Profile,
    Quantization,
    ThrottleMode,
    asked,
)

BASE = ["--model", "m", "--target", "generic-x86-64", "--output", "o.gembin"]


@pytest.mark.parametrize(
    ("field", "value", "option"),
    [
        ("context", 1, "--kv-cache-size"),
        ("context", (1 << 20) + 1, "--kv-cache-size"),
        ("chunk", 0, "--prefill-chunk"),
        ("chunk", 4097, "--prefill-chunk"),
        ("run_threads", 0, "--run-threads"),
        ("run_threads", 9, "--run-threads"),
        ("temperature_threshold", 29.0, "--temperature-threshold"),
        ("temperature_threshold", float("nan"), "--temperature-threshold"),
        ("temperature_threshold", 126.0, "--temperature-threshold"),
        ("reserve_mib", -1, "--reserve"),
        ("ram_fraction", 0.0, "--ram-fraction"),
        ("ram_fraction", 1.01, "--ram-fraction"),
        ("sample_ratio", 0.0, "--prefill-sample-ratio"),
        ("sample_ratio", 1.01, "--prefill-sample-ratio"),
        ("kv_minutes", 0.0, "--kv-minutes"),
        ("kv_gate", KvGate(kl=-1), "--kv-gate kl"),
        ("kv_gate", KvGate(top1=1.1), "--kv-gate top1"),
        ("kv_gate", KvGate(perplexity=float("nan")), "--kv-gate perplexity"),
        ("kv_gate", KvGate(recall=-0.01), "--kv-gate recall"),
    ],
)
def test_numbers_out_of_range_are_refused_with_the_range(
    field: str, value: float | KvGate, option: str
) -> None:
    with pytest.raises(UsageError, match=option):
        CompileOptions(Path("m"), "generic-x86-64", Path("o"), **{field: value})  # type: ignore[arg-type]


def test_recorded_options_hold_no_path_and_no_worker_count() -> None:
    options = CompileOptions(Path("/secret/m"), "t", Path("/secret/o"), workers=7)
    text = repr(options.recorded())
    assert "secret" not in text
    assert "workers" not in text


def test_a_missing_model_is_one_line_with_exit_code_3() -> None:
    result = CliRunner().invoke(main, ["--model", "no-such", *BASE[2:]])
    assert result.exit_code == 3
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("gemmake: ")


@pytest.mark.parametrize("text", ["kl", "kl=", "kl=x", "speed=3", "kl=0.1,,top1=1", "=1", ","])
def test_a_gate_that_is_none_is_refused_with_the_form(text: str) -> None:
    line = [*BASE, "--kv-cache-type", "dynamic-sparse", "--kv-gate", text]
    result = CliRunner().invoke(main, line)
    assert result.exit_code == 2
    assert "use kl=0.005,top1=0.97,perplexity=0.005,recall=0.01" in " ".join(result.stderr.split())


def test_a_profile_brings_what_the_command_does_not_name() -> None:
    files = {"model": Path("m"), "target": "t", "output": Path("o")}
    lite = asked(Profile.LITE, **files)
    assert (lite.context, lite.chunk, lite.offloaded) == (512, 32, Offload.ROWS)
    named = asked(Profile.LITE, 1024, 64, offload=Offload.NONE, **files)
    assert (named.context, named.chunk, named.offloaded) == (1024, 64, Offload.NONE)
    usual = asked(Profile.STANDARD, **files)
    assert (usual.context, usual.chunk, usual.offloaded) == (1024, 128, Offload.NONE)
    with pytest.raises(UsageError, match="use --kv-cache-type int8"):
        asked(Profile.LITE, kv_type=KvType.DENSE, **files)


def test_options_that_are_as_usual_leave_no_trace_in_the_manifest() -> None:
    files = {"model": Path("m"), "target": "t", "output": Path("o")}
    usual = asked(Profile.STANDARD, **files).recorded()
    for name in ("profile", "offload", "reserve_mib", "ram_fraction"):
        assert name not in usual
    told = asked(
        Profile.LITE, offload=Offload.FFN, reserve_mib=0, ram_fraction=0.9, **files
    ).recorded()
    assert told["profile"] == "lite"
    assert told["offload"] == "ffn"
    assert told["reserve_mib"] == 0
    assert told["ram_fraction"] == 0.9


def test_the_command_of_options_gives_them_again() -> None:
    options = asked(
        Profile.LITE,
        None,
        16,
        model=Path("a folder/m.gguf"),
        target="meter-256mb",
        output=Path("o.gembin"),
        quantization=Quantization.INT8,
        kv_gate=KvGate(kl=0.1),
        kv_keys=KvKeys.INT4,
        pin_prompt="it's",
        pin_system=True,
        reserve_mib=10,
        throttle_mode=ThrottleMode.SILENT,
    )
    words = shlex.split(options.command())
    assert words[:3] == ["gemmake", "--model", "a folder/m.gguf"]
    assert "--kv-cache-size" not in words
    with main.make_context("gemmake", words[1:]) as context:
        given = {k: v for k, v in context.params.items() if k not in ("debug", "bsp_version")}
    assert asked(**given) == options
    silent = {"workers", "baseline", "dump_after", "verbose"}  # change nothing of the artifact
    assert {f.name for f in fields(CompileOptions)} == {name for _, name in COMMAND} | silent
