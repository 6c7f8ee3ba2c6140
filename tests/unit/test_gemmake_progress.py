"""Progress where nobody watches a terminal: lines of a log, with the time left."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import compiling
from gemmake.progress import Log, Terminal, shown
from gemrun import progress


class Full(io.StringIO):
    """A stream that takes nothing."""

    def write(self, text: str) -> int:
        """As a full disk."""
        raise OSError(28, "No space left on device")


def log(stream: io.StringIO) -> tuple[Log, list[float]]:
    """A log with a clock of its own."""
    now = [50.0]
    return Log(progress.Progress(stream, lambda: now[0], tool="gemmake"), verbose=False), now


def test_a_log_has_the_share_and_the_time_left_now_and_then() -> None:
    stream = io.StringIO()
    reporter, now = log(stream)
    reporter.start("compiling", 1000)
    for layer in range(1, 5):
        reporter.rename(f"layer {layer} of 4")
        for _ in range(25):
            now[0] += 1
            reporter.advance(10)
    assert stream.getvalue().splitlines() == [
        "gemmake: layer 1 of 4: 10 %, about 90 s left",
        "gemmake: layer 1 of 4: 20 %, about 80 s left",
        "gemmake: layer 2 of 4: 30 %, about 70 s left",
        "gemmake: layer 2 of 4: 40 %, about 60 s left",
        "gemmake: layer 2 of 4: 50 %, about 50 s left",
        "gemmake: layer 3 of 4: 60 %, about 40 s left",
        "gemmake: layer 3 of 4: 70 %, about 30 s left",
        "gemmake: layer 4 of 4: 80 %, about 20 s left",
        "gemmake: layer 4 of 4: 90 %, about 10 s left",
    ]


def test_short_work_stays_quiet_and_long_work_is_told_in_minutes() -> None:
    stream = io.StringIO()
    reporter, now = log(stream)
    for _ in range(3):  # short phases one after another
        reporter.start("reading", 2)
        now[0] += 0.6
        reporter.advance()
        reporter.advance()
    assert stream.getvalue() == ""
    now[0] += 15
    reporter.start("compiling", 1000)
    now[0] += 3
    reporter.advance()
    assert stream.getvalue() == "gemmake: compiling: 0 %, about 50 min left\n"


def test_a_log_that_takes_nothing_stops_no_work() -> None:
    reporter, now = log(Full())
    reporter.start("compiling", 10)
    for _ in range(5):
        now[0] += 20
        reporter.advance()


def test_a_terminal_gets_a_bar_and_a_file_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, kind in ((Tty(), Terminal), (io.StringIO(), Log), (None, Log)):
        monkeypatch.setattr(sys, "stderr", stream)
        with shown("gemmake") as reporter:
            assert isinstance(reporter, kind)


def test_every_command_shows_it(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With nothing counting as short, each command that works long writes lines on stderr."""
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    monkeypatch.setattr(progress, "EVERY_S", {True: 0.0, False: 0.0})
    import perplexity
    from gemmake.check.cli import main as gemcheck
    from gemmake.cli import main as gemmake
    from gemrun.cli_bench import main as gembench

    output, text = str(tmp_path / "x.gembin"), tmp_path / "t.txt"
    text.write_text("The motor is warm and the gateway is ready. " * 40)
    compile_words = ["--model", str(tiny_checkpoint("llama3")), "--target", compiling.TARGET]
    bench = ["--model", output, "--prompt", "ab", "--iterations", "3", "--depths", "none"]
    for name, main, words in (
        ("gemmake", gemmake, [*compile_words, "--output", output, "--kv-cache-size", "256"]),
        ("gemcheck", gemcheck, ["--run", output]),
        ("gembench", gembench, bench),
        ("perplexity", perplexity.main, [output, "--text", str(text), "--windows", "2",
                                         "--length", "32"]),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            main(words)
        error = capsys.readouterr().err
        assert ended.value.code == 0, error
        assert error.startswith(f"{name}: "), name
        assert all(line.endswith(" left") for line in error.splitlines()), error
