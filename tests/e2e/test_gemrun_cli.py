"""The gemrun command: what it prints and how it exits, on a made-up artifact."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gemrun import GemRunContext
from reference import make_image

REFUSED = Path(__file__).resolve().parents[1] / "golden" / "refused"
REAL = ("--temperature", "--top-p", "--min-p", "--repetition-penalty")
SHAPE = make_image.Shape(layers=(make_image.Layer(),), context=2048)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up model of one layer, 2048 tokens of context."""
    file = tmp_path_factory.mktemp("cli") / "made.gembin"
    file.write_bytes(make_image.make(SHAPE, seed=5))
    return file


def call(
    command: Path, *arguments: str | Path, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run it; `stdin` is what it reads."""
    return subprocess.run(
        [str(a) for a in (command, *arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
        check=False,
    )


def test_prompt_streams_text_and_prints_figures(gemrun_cli: Path, path: Path) -> None:
    options = ("--max-tokens", "9", "--temperature", "0", "--ignore-eos")
    done = call(gemrun_cli, path, "--prompt", "hello", *options)
    assert done.returncode == 0
    assert done.stderr.startswith("9 tokens (max_tokens), first after ")
    assert "prompt 5 tokens" in done.stderr
    assert re.search(r"memory \d+\.\d MB with \d threads$", done.stderr)
    with GemRunContext(path, ignore_memory=True) as ctx:
        wanted = ctx.infer("hello", 9, temperature=0, ignore_stop_ids=True)
    # universal newlines: the model may make any control character
    assert done.stdout == wanted.text.replace("\r\n", "\n").replace("\r", "\n") + "\n"
    ids = call(gemrun_cli, path, "--prompt", "-", *options, "--tokens", stdin="hello")
    assert [int(i) for i in ids.stdout.split()] == list(wanted)


def test_json(gemrun_cli: Path, path: Path) -> None:
    options = ("--max-tokens", "20", "--temperature", "0", "--ignore-eos", "--threads", "1")
    done = call(gemrun_cli, path, "--prompt", 'a "b"\n', "--json", *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result)[:3] == ["ttft_ms", "throughput_tps", "kv_cache_used"]
    assert result["generated_tokens"] == len(result["tokens"]) == 20
    assert (result["finish"], result["threads"]) == ("max_tokens", 1)
    with GemRunContext(path, threads=1, ignore_memory=True) as ctx:
        wanted = ctx.infer('a "b"\n', 20, temperature=0, ignore_stop_ids=True)
    assert result["tokens"] == list(wanted)
    assert result["text"] == wanted.text


def test_sampling_options_reach_the_engine(gemrun_cli: Path, path: Path) -> None:
    options = ["--temperature", "3", "--seed", "9", "--top-k", "50", "--top-p", "0.9"]
    options += ["--min-p", "0.01", "--repetition-penalty", "1.2", "--ban", "5"]
    options += ["--max-tokens", "15", "--json", "--ignore-eos"]
    result = json.loads(call(gemrun_cli, path, "--prompt", "hello", *options).stdout)
    with GemRunContext(path, ignore_memory=True) as ctx:
        wanted = ctx.infer(
            "hello", 15, temperature=3, seed=9, top_k=50, top_p=0.9, min_p=0.01,
            repetition_penalty=1.2, banned=[5], ignore_stop_ids=True,
        )  # fmt: skip
    assert result["tokens"] == list(wanted)


def test_info(gemrun_cli: Path, path: Path) -> None:
    done = call(gemrun_cli, path, "--info")
    assert done.returncode == 0
    for part in (
        "made-up (made), for generic-x86-64",
        "2048 tokens compiled",
        "kernel",
        "declared",
    ):
        assert part in done.stdout


def test_checks(gemrun_cli: Path, path: Path, tmp_path: Path) -> None:
    assert call(gemrun_cli, path, "--check-weights").returncode == 0
    wrong = call(gemrun_cli, path, "--run-tests")  # its test vector was left empty
    assert wrong.returncode == 8
    assert "a stored test vector gave another answer" in wrong.stderr
    image = bytearray(path.read_bytes())
    image[-300] ^= 1
    damaged = tmp_path / "damaged.gembin"
    damaged.write_bytes(image)
    done = call(gemrun_cli, damaged, "--check-weights")
    assert done.returncode == 6
    assert done.stderr.startswith("Model load failed: ")
    assert "weights' checksum" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--kv-cache-size", "2049"], 5, "2049 tokens, room for 2048"),
        (["--kernel", "neon"], 2, "gemrun: --kernel: neon: this processor cannot run"),
        (["--kernel", "neon"], 2, "(available: scalar"),
        (["--chat"], 2, "gemrun: --chat: {path} has no chat template; use --prompt alone, or an"),
        (["--system", "x"], 2, "gemrun: --system: {path} has no chat template; "),
        (["--interactive"], 2, "gemrun: --interactive: {path} has no chat template; "),
        (["--wrong"], 2, "gemrun: --wrong: unknown option; see gemrun --help"),
        (
            ["--temprature=1"],
            2,
            "gemrun: --temprature: unknown option; did you mean --temperature?",
        ),
        (["--max-token", "1"], 2, "--max-token: unknown option; did you mean --max-tokens?"),
        (["--repetition", "1"], 2, "did you mean --repetition-penalty?"),
        (["-x"], 2, "gemrun: -x: unknown option; see gemrun --help"),
        (["--json=1"], 2, "--json: takes no value; "),
        (["--seed"], 2, "--seed: its value is missing"),
        (["another.gembin"], 2, "a second file"),
        (["--prompt", ""], 2, "the prompt is empty; give it some text"),
        (["--prompt="], 2, "the prompt is empty; give it some text"),
        (["--stop", ""], 2, "--stop: an empty text is too short or too long; use 1 to 128 bytes"),
        (["--stop", "a"] * 9, 2, "--stop: given more than 8 times"),
    ],
)
def test_failures(gemrun_cli: Path, path: Path, arguments: list[str], code: int, part: str) -> None:
    done = call(gemrun_cli, path, "--prompt", "hello", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert part.format(path=path) in done.stderr
    assert ";" in done.stderr


RANGES = {
    "--max-tokens": (("0", "-1", "1048577", "99999999999999999999"), "1 to 1048576"),
    "--temperature": (("-1", "101", "nan", "inf"), "0 to 100"),
    "--top-k": (("-1", "1048577"), "0 to 1048576"),
    "--top-p": (("0", "1.1", "nan", "-0"), "more than 0, up to 1"),
    "--min-p": (("1", "-0.1"), "0 to less than 1"),
    "--repetition-penalty": (("0", "101"), "more than 0, up to 100"),
    "--seed": (("-1", "18446744073709551616"), "0 to 18446744073709551615"),
    "--ban": (("200", "100000"), "0 to 199"),
    "--deadline-ms": (("0",), "1 to 18446744073709"),
    "--threads": (("0", "9"), "1 to 8"),
    "--decode-threads": (("0", "9"), "1 to 8"),
    "--speculate": (("7", "-1"), "0 to 6"),
    "--balance": (("-1", "3"), "0 to 2"),
    "--serve": (("2", "1048577"), "3 to 1048576"),
    "--affinity": (("0", "0x10000000000000000"), "0x1 to 0xffffffffffffffff"),
    "--kv-cache-size": (("0",), "1 to 4294967295"),
    "--prefill-batch-size": (("0",), "1 to 4294967295"),
}


@pytest.mark.parametrize("option", RANGES)
def test_ranges_are_named(gemrun_cli: Path, path: Path, option: str) -> None:
    values, allowed = RANGES[option]
    for value in values:
        done = call(gemrun_cli, path, "--prompt", "hello", option, value)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"gemrun: {option}: {value} is out of range; use {allowed}\n"
    done = call(gemrun_cli, path, "--prompt", "hello", f"{option}=hot")
    kind = "number" if option in REAL else "whole number"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"gemrun: {option}: hot is no {kind}; use ")


TEXTS = ("TEXT", "NAME", "FILE", "SOURCE")


def test_every_option_with_a_number_has_a_range(gemrun_cli: Path, path: Path) -> None:
    listed = re.findall(r"^  (--[a-z-]+) ([A-Z]+) ", call(gemrun_cli, "--help").stdout, re.M)
    assert {name for name, value in listed if value not in TEXTS} == set(RANGES)


def test_ranges_of_the_artifact(gemrun_cli: Path, path: Path) -> None:
    done = call(gemrun_cli, path, "--prompt", "x", "--prefill-batch-size", "500")
    assert (done.returncode, done.stderr) == (
        2,
        f"gemrun: --prefill-batch-size: 500 is out of range; use 1 to {SHAPE.chunk}\n",
    )
    done = call(gemrun_cli, path, "--prompt", "x", "--affinity", "0x8000000000000000")
    assert done.returncode == 2
    assert re.fullmatch(
        r"gemrun: --affinity: 0x8000000000000000 is out of range; use bits of 0x[0-9a-f]+, .*\n",
        done.stderr,
    )
    done = call(gemrun_cli, path, "--prompt", "x", "--affinity", "0x1", "--threads", "2")
    assert done.returncode == 2
    assert done.stderr.startswith("gemrun: --threads: 2 is out of range; use 1 to 1, the bits of")


def test_numbers_are_decimal_or_hexadecimal(gemrun_cli: Path, path: Path) -> None:
    for value, count in (("010", 10), ("0xb", 11)):
        options = (f"--max-tokens={value}", "--ignore-eos", "--temperature=0", "--json")
        done = call(gemrun_cli, path, "--prompt=hello", *options)
        assert json.loads(done.stdout)["generated_tokens"] == count


def test_context_is_the_compiled_one_unless_lowered(gemrun_cli: Path, path: Path) -> None:
    prompt = ("--prompt", "x" * 1100, "--max-tokens", "1", "--json")
    assert json.loads(call(gemrun_cli, path, *prompt).stdout)["kv_cache_size"] == 2048
    done = call(gemrun_cli, path, *prompt, "--kv-cache-size", "1024")
    assert done.returncode == 2
    assert "(1100 tokens, room for 1024); shorten it, or raise --kv-cache-size" in done.stderr
    assert done.stderr.endswith(" from 1024 to at most the compiled 2048\n")
    done = call(gemrun_cli, path, "--prompt", "x" * 2100)
    assert done.stderr.endswith("; shorten it, or compile with a larger --kv-cache-size\n")


def test_load_failures(gemrun_cli: Path, path: Path, tmp_path: Path) -> None:
    done = call(gemrun_cli, tmp_path / "no.gembin", "--info")
    assert (done.returncode, done.stderr) == (
        6,
        f"Model load failed: {tmp_path}/no.gembin: cannot be opened (No such file or directory); "
        "check the path and its permissions\n",
    )
    cut = tmp_path / "cut.gembin"
    size = path.stat().st_size
    cut.write_bytes(path.read_bytes()[:4096])
    done = call(gemrun_cli, cut, "--info")
    assert (done.returncode, done.stderr) == (
        6,
        f"Model load failed: {cut}: the file is cut short or too long "
        f"(wanted {size} bytes, found 4096 bytes); copy it again\n",
    )
    (tmp_path / "text.gembin").write_text("hello")
    assert call(gemrun_cli, tmp_path / "text.gembin", "--info").returncode == 6
    assert call(gemrun_cli).returncode == 2
    done = call(gemrun_cli, path)
    assert (done.returncode, done.stderr) == (
        2,
        f"gemrun: {path}: nothing to do; try --prompt TEXT, --interactive or --info\n",
    )


MEMORY = {"CONTEXT", "RAM", "PLAN", "MEMORY", "MAP", "ABI"}


def test_memory_layout_is_said_of_memory_only(gemrun_cli: Path) -> None:
    """Every refused golden file, by the code that its name begins with."""
    seen = set()
    for file in sorted(REFUSED.glob("*.gembin")):
        name = file.name.partition("-")[0]
        done = call(gemrun_cli, file, "--check-weights", "--ignore-memory")
        if done.returncode != 0:
            seen.add(name)
            start = "Memory layout mismatch: " if name in MEMORY else ""
            assert done.stderr.startswith(f"Model load failed: {start}{file}: "), name
    assert {"SIZE", "TABLE", "TENS"} <= seen
    assert seen & MEMORY


def test_help_and_version(gemrun_cli: Path) -> None:
    assert call(gemrun_cli, "--version").stdout.startswith("gemrun 0.")
    text = call(gemrun_cli, "--help").stdout
    assert call(gemrun_cli, "-h").stdout == text
    for part in ("--chat", "(the model's default, or 0.3)", "or 64)", "or 0.85)"):
        assert part in text
    assert "tokens of context to use, at most the compiled N; memory stays as compiled" in text
    assert all(len(line) <= 100 for line in text.splitlines())


RAISED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
/* The signal comes as soon as it can be caught: before the run has begun. */
int sigaction(int number, const struct sigaction *act, struct sigaction *old)
{
    int (*real)(int, const struct sigaction *, struct sigaction *);
    *(void **)&real = dlsym(RTLD_NEXT, "sigaction");
    int result = real(number, act, old);
    if (number == SIGINT && act && act->sa_handler != SIG_DFL) {
        raise(SIGINT);
    }
    return result;
}
"""


def test_an_early_interrupt_is_not_lost(gemrun_cli: Path, path: Path, tmp_path: Path) -> None:
    source, shim = tmp_path / "raised.c", tmp_path / "raised.so"
    source.write_text(RAISED)
    build = ["gcc", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"]
    subprocess.run(build, check=True)
    arguments = [gemrun_cli, path, "--prompt", "hello", "--ignore-eos", "--max-tokens", "1000"]
    done = subprocess.run(
        arguments, env={"LD_PRELOAD": str(shim)}, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 130, done.stderr
    assert b"1 token (cancelled)" in done.stderr


SHORT = ("--max-tokens", "4", "--ignore-eos")
OUTPUTS: list[list[str]] = [
    ["MODEL", "--prompt", "hello", *SHORT],
    ["MODEL", "--prompt", "hello", "--tokens", *SHORT],
    ["MODEL", "--prompt", "hello", "--json", *SHORT],
    ["MODEL", "--info"],
    ["--version"],
    ["--help"],
]


@pytest.mark.parametrize("arguments", OUTPUTS, ids=" ".join)
@pytest.mark.parametrize("sink", ["/dev/full", "&-", "gone"])
def test_what_cannot_be_written_is_no_success(
    gemrun_cli: Path, path: Path, arguments: list[str], sink: str
) -> None:
    words = [str(path) if a == "MODEL" else a for a in arguments]
    to = "" if sink == "gone" else f">{sink}"
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            ["sh", "-c", f'trap \'\' PIPE; exec "$0" "$@" {to}', str(gemrun_cli), *words],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write)
    assert done.returncode == 8
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("gemrun: stdout: the output could not be written in full; ")


def test_what_prints_nothing_needs_no_stdout(gemrun_cli: Path, path: Path) -> None:
    command = ["sh", "-c", 'exec "$0" "$@" >&-', str(gemrun_cli), str(path), "--check-weights"]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


PEAK = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024, code)
"""


@pytest.mark.parametrize("start", ["nothing", "artifact"])
def test_a_large_wrong_file_is_not_read(
    gemrun_cli: Path, path: Path, tmp_path: Path, start: str
) -> None:
    file = tmp_path / "sparse.gembin"
    file.write_bytes(path.read_bytes() if start == "artifact" else b"")
    os.truncate(file, 400 << 20)
    done = call(Path(sys.executable), "-c", PEAK, gemrun_cli, file, "--info")
    peak, code = (int(word) for word in done.stdout.split())
    assert code == 6
    assert ("cut short or too long" if start == "artifact" else "not a .gembin") in done.stderr
    assert peak < 200  # MiB, of 400


def test_an_interrupt_ends_the_run(gemrun_cli: Path, path: Path) -> None:
    arguments = [str(gemrun_cli), str(path), "--prompt", "hello", "--tokens"]
    arguments += ["--max-tokens", "2000", "--ignore-eos", "--threads", "2"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # it is generating
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130)  # 0: it was done before the signal came
    assert (b"(cancelled)" in err) == (process.returncode == 130)
