"""The gemrun command: what it prints and how it exits, on a made-up artifact."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from gemrun import GemRunContext
from reference import make_image

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
        (["--threads", "9"], 2, "--threads: a value that is not allowed"),
        (["--kernel", "abacus"], 2, "cannot run the wanted kernel"),
        (["--temperature", "x"], 2, "--temperature: a value"),
        (["--temperature", "-1"], 2, "sampling setting"),
        (["--chat"], 2, "no chat template"),
        (["--wrong"], 2, "--wrong: unknown option"),
        (["--seed"], 2, "--seed: its value is missing"),
        (["another.gembin"], 2, "a second file"),
        (["--ban", "100000"], 2, "outside the vocabulary"),
    ],
)
def test_failures(gemrun_cli: Path, path: Path, arguments: list[str], code: int, part: str) -> None:
    done = call(gemrun_cli, path, "--prompt", "hello", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert part in done.stderr
    assert ";" in done.stderr


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
        f"Model load failed: Memory layout mismatch: {cut}: the file is cut short or too long "
        f"(wanted {size} bytes, found 4096 bytes); copy it again\n",
    )
    (tmp_path / "text.gembin").write_text("hello")
    assert call(gemrun_cli, tmp_path / "text.gembin", "--info").returncode == 6
    assert call(gemrun_cli).returncode == 2
    assert call(gemrun_cli, path).returncode == 2


def test_help_and_version(gemrun_cli: Path) -> None:
    assert call(gemrun_cli, "--version").stdout.startswith("gemrun 0.")
    text = call(gemrun_cli, "--help").stdout
    assert "--chat" in text
    assert all(len(line) <= 100 for line in text.splitlines())


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
