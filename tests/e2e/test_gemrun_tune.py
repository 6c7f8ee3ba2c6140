"""gemrun --tune: measures, keeps the result for this machine, and changes no answer."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "golden/v1.0"


@pytest.fixture
def model() -> Path:
    return sorted(GOLDEN.glob("*.gembin"))[0]


def gemrun(
    cli: Path, *arguments: object, file: object, code: int = 0
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GEMRUN_TUNE": str(file)}
    command = [cli, *map(str, arguments), "--ignore-memory"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def test_tune_measures_and_keeps(gemrun_cli: Path, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "tune"
    before = gemrun(gemrun_cli, model, "--info", "--threads", 2, file=file)
    assert f"gemrun {model} --tune" in before.stdout
    done = gemrun(gemrun_cli, model, "--tune", "--threads", 2, file=file)
    assert "threads  ms/token  tokens/s" in done.stdout
    assert "  enough\n" in done.stdout
    assert f"kept in {file}: " in done.stdout
    values = dict(line.split(" ", 1) for line in file.read_text().splitlines())
    assert values["threads"] == "2"
    assert values["decode_threads"] in ("1", "2")
    assert values["balance"] in ("1", "2")
    assert [p.name for p in file.parent.iterdir()] == ["tune"]
    after = gemrun(gemrun_cli, model, "--info", "--threads", 2, file=file)
    assert f"tuned      {values['decode_threads']} of 2 threads decode" in after.stdout


def test_answers_do_not_depend_on_it(gemrun_cli: Path, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "tune"
    gemrun(gemrun_cli, model, "--tune", "--threads", 2, file=file)
    machine = file.read_text().splitlines()[0]
    answers = set()
    for decode, balance in ((1, 1), (1, 2), (2, 1), (2, 2)):
        file.write_text(f"{machine}\nthreads 2\ndecode_threads {decode}\nbalance {balance}\n")
        done = gemrun(gemrun_cli, model, "--prompt", "a b", "--tokens", "--threads", 2, file=file)
        answers.add(done.stdout)
    assert len(answers) == 1


@pytest.mark.parametrize(
    "text",
    [
        "machine another, 64 cores\nthreads 2\ndecode_threads 1\nbalance 1\n",
        "threads 2\ndecode_threads 3\nbalance 1\n",
        "threads 2\ndecode_threads 0\nbalance 1\n",
        "threads 2\ndecode_threads 1\nbalance 7\n",
        "threads x\n" + 5000 * "y" + "\n\0\n",
        "",
    ],
)
def test_what_is_not_of_this_machine_is_ignored(
    gemrun_cli: Path, model: Path, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "tune"
    gemrun(gemrun_cli, model, "--tune", "--threads", 2, file=file)
    machine = file.read_text().splitlines()[0]
    file.write_text(text if text.startswith("machine") else f"{machine}\n{text}")
    done = gemrun(gemrun_cli, model, "--info", "--threads", 2, file=file)
    assert "tuned      no; " in done.stdout


def test_no_place_to_keep_it(gemrun_cli: Path, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = gemrun(gemrun_cli, model, "--tune", "--threads", 2, file=file / "tune", code=6)
    assert done.stderr.startswith(f"gemrun: --tune: {file}/tune cannot be written (Not a directory")


def test_one_thread_leaves_nothing_to_choose(gemrun_cli: Path, model: Path, tmp_path: Path) -> None:
    """What was found for several is left as it is, and holds."""
    file = tmp_path / "tune"
    gemrun(gemrun_cli, model, "--tune", "--threads", 2, file=file)
    before = file.read_text()
    done = gemrun(gemrun_cli, model, "--tune", "--threads", 1, file=file)
    assert done.stdout.splitlines()[-1] == (
        "nothing is kept: with 1 thread there is nothing to choose; leave --threads out to find "
        "how many pay"
    )
    assert file.read_text() == before
    told = gemrun(gemrun_cli, model, "--info", "--threads", 1, file=file).stdout
    assert "\ntuned      no: with 1 thread there is nothing to choose\n" in told
    machine = before.splitlines()[0]
    file.write_text(f"{machine}\nthreads 1\ndecode_threads 1\nbalance 1\n")
    told = gemrun(gemrun_cli, model, "--info", "--threads", 2, file=file).stdout
    assert "\ntuned      no; gemrun" in told
