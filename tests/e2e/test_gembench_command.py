"""gembench on a tiny artifact: the literal lines, JSON, failures, and a device without numpy."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "v1.0" / "tiny-int4.gembin"
PROMPT = "The conveyor stops when"
# A device has four packages: these imports must fail there and are not needed.
ON_A_DEVICE = """
import sys
for name in ("numpy", "gemmake", "torch", "rich", "msgpack", "tokenizers"):
    sys.modules[name] = None
from gemrun.cli_bench import main
main()
"""


def gembench(*arguments: str | Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", "gemrun.cli_bench"]
    command = [sys.executable, *start, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint: Callable[..., Path], artifact_cache: Callable[..., Path]) -> Path:
    options = ("--quantization", "int4", "--effort", "fast", "--kv-cache-size", "128")
    return artifact_cache(tiny_checkpoint("smollm2"), *options)


def test_lines_and_their_order(artifact: Path) -> None:
    done = gembench("--model", artifact, "--prompt", PROMPT, "--iterations", 3, "--warmup", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    number = r"\d+\.\d"
    wanted = [
        r"machine: .+; kernel [\w-]+, \d threads",
        r"Warmup completed \(2 iterations\)",
        r"Running 3 iterations\.\.\.",
        *(rf"Iteration {i}: TTFT=\d+ms, Throughput={number} tps" for i in (1, 2, 3)),
        rf"Average TTFT: {number}ms ± {number}ms",
        rf"Average Throughput: {number} tps ± {number} tps",
        rf"prefill: \d+ tokens, {number} tps ± {number} tps",
        r"decode: 64 tokens, .* p99 .* ms, max .* ms \(189 measured\)",
        *(rf"depth {depth}: {number} tps.*" for depth in (0, 32, 64, 96)),
        r"memory: .* MB resident of .* MB declared for \d threads \(.*",
        r"power: .*",
    ]
    lines = iter(done.stdout.splitlines())
    for pattern in wanted:
        assert any(re.fullmatch(pattern, line) for line in lines), f"{pattern}\n{done.stdout}"
    assert "WARNING" not in done.stdout


def test_json_on_a_device_without_the_compiler(artifact: Path) -> None:
    options = ("--iterations", 2, "--warmup", 0, "--max-tokens", 8, "--depths", "16,0", "--json")
    prompt = ("--prompt", PROMPT, "--threads", 2, "--kernel", "scalar", "--kv-cache-size", 64)
    done = gembench("--model", artifact, *prompt, *options, code=ON_A_DEVICE)
    assert done.returncode == 0, done.stdout + done.stderr
    value = json.loads(done.stdout)
    assert list(value)[:3] == ["ttft_ms", "throughput_tps", "kv_cache_used"]
    assert (value["threads"], value["model"]["kernel"], value["kv_cache_size"]) == (2, "scalar", 64)
    assert [depth["depth"] for depth in value["depths"]] == [0, 16]
    assert all(run["generated_tokens"] == 8 for run in value["iterations"])
    assert value["memory"]["problem"] is None
    assert value["memory"]["resident"] == sum(p["resident"] for p in value["memory"]["parts"])


def test_every_iteration_starts_from_an_empty_cache(artifact: Path) -> None:
    """The text after many runs is that of the first."""
    texts = set()
    for iterations, warmup in ((1, 0), (4, 2)):
        counts = ("--iterations", iterations, "--warmup", warmup, "--depths", "none")
        done = gembench("--model", artifact, "--prompt", PROMPT, *counts, "--json")
        value = json.loads(done.stdout)
        texts.add((value["text"], value["kv_cache_used"]))
    assert len(texts) == 1


def test_chat(artifact: Path) -> None:
    options = ("--iterations", 1, "--warmup", 0, "--depths", "none", "--json")
    raw = json.loads(gembench("--model", artifact, "--prompt", PROMPT, *options).stdout)
    chat = json.loads(gembench("--model", artifact, "--prompt", PROMPT, *options, "--chat").stdout)
    tokens = [value["iterations"][0]["prompt_tokens"] for value in (raw, chat)]
    assert tokens[1] > tokens[0]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("--model", "nowhere.gembin"), 6, r"gembench: nowhere.gembin: .*; .*"),
        (("--model", ROOT / "LICENSE"), 6, r"gembench: .*LICENSE: not a .gembin file; .*"),
        (("--model", GOLDEN, "--kv-cache-size", 4096), 5, r"gembench: .*\(4096 tokens, .*; .*"),
        (("--model", GOLDEN, "--kernel", "abacus"), 2, r"gembench: .*kernel.*; .*"),
        (("--model", GOLDEN, "--depths", "0,60"), 2, r"gembench: --depths: 60 tokens .*; .*"),
        (("--model", GOLDEN, "--prompt", "a" * 500), 2, r"gembench: .* room for 64\); .*"),
        (("--model", GOLDEN, "--prompt", "a" * 63), 2, r"gembench: prompt: 64 tokens leave .*"),
        (
            ("--model", GOLDEN, "--max-tokens", 2000),
            2,
            r"gembench: --max-tokens: 2000 tokens have no room behind a prompt of 2 in a context "
            r"of 64; give at most 63",
        ),
        (
            ("--model", GOLDEN, "--max-tokens", 64, "--kv-cache-size", 32),
            2,
            r"gembench: --max-tokens: 64 .*; give at most 31",
        ),
        (("--model", GOLDEN, "--depths", "deep"), 2, r"(?s).*give 0,256,512 or none.*"),
        (("--model", GOLDEN, "--iterations", 0), 2, r"(?s).*--iterations.*"),
        (("--model", GOLDEN, "--threads", 9), 2, r"(?s).*--threads.*"),
    ],
)
def test_failures(arguments: tuple[str | Path, ...], code: int, sentence: str) -> None:
    prompt = () if "--prompt" in arguments else ("--prompt", "x")
    done = gembench(*arguments, *prompt, "--warmup", 0)
    assert done.returncode == code, done.stderr
    assert re.fullmatch(sentence, done.stderr.strip()), done.stderr
    assert "Traceback" not in done.stderr
    assert "Average" not in done.stdout


def test_interrupted() -> None:
    """Ctrl-C ends the run at its next token, with one sentence."""
    command = [sys.executable, "-m", "gemrun.cli_bench", "--model", str(GOLDEN), "--prompt", "x"]
    options = ["--iterations", "100000", "--warmup", "0", "--max-tokens", "8"]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("Iteration 2:") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "gembench: run: cancelled; start it again for figures"
    assert "Traceback" not in errors


def test_help_names_every_option() -> None:
    text = gembench("--help").stdout
    for option in ("model", "prompt", "iterations", "warmup", "max-tokens", "threads", "kernel"):
        assert f"--{option} " in text
    for option in ("kv-cache-size", "depths", "chat", "json", "help"):
        assert f"--{option} " in text
