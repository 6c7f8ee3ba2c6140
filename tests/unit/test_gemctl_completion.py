"""Completion of gemctl's line: with bash and zsh themselves, by the protocol of fish and zsh, and
what a daemon that knows models, is slow, or is not there makes of it."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from daemon import wait_for
from gemctl import completing
from gemctl.session import ANYWHERE

ROOT = Path(__file__).resolve().parents[2]
FIRST, SECOND = "ab12" * 16, "cd34" * 16
ANSWERS = {
    "model.list": {
        "models": [
            {"name": "pilot", "state": "serving", "active": True},
            {"name": "commands", "state": "disabled", "active": False},
        ]
    },
    "model.status": {"present": [{"digest": FIRST}, {"digest": SECOND}], "current": FIRST,
                     "previous": None},
}  # fmt: skip


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of something that answers as a daemon with two models."""
    path = tmp_path_factory.mktemp("s") / "s"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(8)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = server.accept()
                with peer, peer.makefile("rwb") as stream:
                    request = json.loads(stream.readline())
                    reply = {"v": 1, "id": "1", "result": ANSWERS[request["method"]]}
                    stream.write(json.dumps(reply).encode() + b"\n")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield path
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(5)


def offered(line: str, place: Path | None = None) -> list[str]:
    """What may stand at the end of a line; its last word is the incomplete one."""
    words = line.split(" ")
    socket_words = [] if place is None else ["--socket", str(place)]
    found = completing.completions([*socket_words, *words[:-1]], words[-1])
    return [str(item.value) for item in found]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mo", ["model"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("model ro", ["rollback"]),
        ("model load ", ["pilot", "commands"]),
        ("model switch c", ["commands"]),
        ("switch-model p", ["pilot"]),
        ("model status ", ["pilot", "commands"]),
        ("model enable --warmup-prompt x c", ["commands"]),
        ("--json model status p", ["pilot"]),
        ("model --json status p", ["pilot"]),
        ("model --disable --name ", ["pilot", "commands"]),
        ("generate --model ", ["pilot", "commands"]),
        ("generate --model=c", ["--model=commands"]),
        ("generate a prompt --model p", ["pilot"]),
        ("model remove pilot --digest ", [FIRST[:12], SECOND[:12]]),
        ("model load pilot --digest cd", [SECOND[:12]]),
        ("model --name pilot --digest ", [FIRST[:12], SECOND[:12]]),
        ("model replace --digest cd34cd34cd34c", [SECOND[:13]]),
        ("throttle --mode co", ["conservative"]),
        ("stats --js", ["--json"]),
        ("model status --so", ["--socket"]),
        ("model --auto", ["--auto-reset-kv-cache"]),
        ("generate x --no", ["--no-auto-reset-kv-cache"]),
        ("--external-temp-sensor h", ["hwmon:"]),
        ("stats --external-temp-sensor=m", ["--external-temp-sensor=mqtt:"]),
        ("--external-temp-sensor hwmon:x/temp1 model status p", ["pilot"]),
        ("generate -- --js", []),
    ],
)
def test_what_may_stand_there(place: Path, line: str, words: list[str]) -> None:
    assert offered(line, place) == words


def test_options_anywhere_are_offered_in_every_command() -> None:
    for line in ("--", "stats --", "model --", "model load x --", "fleet rollout --"):
        assert set(ANYWHERE) <= set(offered(line)), line


def test_files_are_left_to_the_shell(place: Path) -> None:
    for words in (["model", "replace"], ["model", "--replace"], ["--socket"], ["config", "check"]):
        assert [item.type for item in completing.completions(words, "/tm")] == ["file"]


def test_no_daemon_and_a_silent_one_offer_nothing_and_hold_nobody_up(tmp_path: Path) -> None:
    assert offered("model load ", tmp_path / "none") == []
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen(1)
        began = time.monotonic()
        assert offered("model load ", path) == []
        assert offered("model remove x --digest ", path) == []
        took = time.monotonic() - began
    print(f"two questions to a daemon that does not answer: {took * 1e3:.0f} ms")
    assert took < 2


@pytest.mark.parametrize(
    ("words", "together", "cut"),
    [
        (["generate", "--model", "=", "pi"], ["generate", "--model=pi"], 8),
        (["generate", "--model", "="], ["generate", "--model="], 8),
        (["--socket", "=", "/s", "model", "st"], ["--socket=/s", "model", "st"], 0),
        (["--external-temp-sensor", "hwmon", ":", "x/temp1", ""],
         ["--external-temp-sensor", "hwmon:x/temp1", ""], 0),
        (["stats", "--js"], ["stats", "--js"], 0),
    ],
)  # fmt: skip
def test_words_that_bash_takes_apart(words: list[str], together: list[str], cut: int) -> None:
    args, incomplete, found = completing.joined(words[:-1], words[-1])
    assert ([*args, incomplete], found) == (together, cut)


# ---- the shells ----


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """A folder with the gemctl command."""
    script = tmp_path / "bin" / "gemctl"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m gemctl.cli "$@"\n')
    script.chmod(0o755)
    return script.parent


def run(command: Path, words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    path = f"{command}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        words, env={**os.environ, "PATH": path, **more}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(command: Path, shell: str) -> None:
    done = run(command, ["gemctl", "completion", shell])
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_GEMCTL_COMPLETE={shell}_complete" in done.stdout
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=done.stdout, text=True, check=True)


BASH = """
eval "$(gemctl completion bash)"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_gemctl_completion gemctl
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["gemctl", "mo"], ["model"]),
        (["gemctl", "model", "load", ""], ["pilot", "commands"]),
        (["gemctl", "generate", "--model", "=", "pi"], ["pilot"]),
        (["gemctl", "generate", "--model", "="], ["pilot", "commands"]),
        (["gemctl", "generate", '"two words"', "--model", "c"], ["commands"]),
        (["gemctl", "model", "remove", "pilot", "--digest", "ab"], [FIRST[:12]]),
        (["gemctl", "--json", "stats", "--his"], ["--history"]),
        (["gemctl", "--external-temp-sensor", "hwmon", ":", "x", "model", "status", "p"],
         ["pilot"]),
        (["gemctl", "--external-temp-sensor", "mq"], ["mqtt:"]),
        (["gemctl", "--socket", "=", "/nowhere", "model", "load", ""], [""]),
    ],
)  # fmt: skip
def test_bash_itself(command: Path, place: Path, words: list[str], found: list[str]) -> None:
    done = run(command, ["bash", "-c", BASH, "bash", *words], GEMCTL_SOCKET=str(place))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == found


ZSH = """
PS1='> '; autoload -Uz compinit; compinit -u -D
eval "$(gemctl completion zsh)"
tell() { print -r -- "$BUFFER" >> "$TOLD"; BUFFER= }
zle -N tell; bindkey '^X' tell; unset zle_bracketed_paste
print ready >> "$TOLD"
"""


def typed_in_zsh(command: Path, place: Path, folder: Path, line: str) -> str:
    """What a line has become behind a tab, as zsh's own editor holds it."""
    program = shutil.which("zsh")
    if program is None:
        pytest.fail("zsh: not installed; run 'make test', or apt-get install zsh", pytrace=False)
    told, script = folder / "told", folder / "script"
    script.write_text(ZSH, encoding="utf-8")
    told.write_text("", encoding="utf-8")
    environment = {
        **os.environ,
        "PATH": f"{command}{os.pathsep}{os.environ['PATH']}",
        "TERM": "xterm", "TOLD": str(told), "GEMCTL_SOCKET": str(place),
    }  # fmt: skip
    above, below = pty.openpty()
    with subprocess.Popen(
        [program, "-f", "-i"], env=environment, stdin=below, stdout=below, stderr=below,
        start_new_session=True, cwd=folder,
    ) as shell:  # fmt: skip
        os.close(below)
        drain = threading.Thread(target=drained, args=(above,), daemon=True)
        drain.start()
        try:
            os.write(above, f". {script}\r".encode())
            wait_for(lambda: "ready" in told.read_text(encoding="utf-8"))
            os.write(above, f"{line}\t\x18".encode())
            return str(wait_for(lambda: told.read_text(encoding="utf-8").splitlines()[1:])[0])
        finally:
            shell.kill()


def drained(terminal: int) -> None:
    """Read what is shown, so that nobody waits to show more."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 4096):
            pass
    os.close(terminal)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("gemctl mo", "gemctl model "),
        ("gemctl model ro", "gemctl model rollback "),
        ("gemctl model load p", "gemctl model load pilot "),
        ("gemctl --json stats --his", "gemctl --json stats --history "),
        ("gemctl generate 'two words' --model c", "gemctl generate 'two words' --model commands "),
        (
            "gemctl model remove pilot --digest ab",
            f"gemctl model remove pilot --digest {FIRST[:12]} ",
        ),
        ("gemctl model replace scr", "gemctl model replace script "),
        ("gemctl --socket /nowhere model load p", "gemctl --socket /nowhere model load p"),
    ],
)
def test_zsh_itself(command: Path, place: Path, tmp_path: Path, line: str, found: str) -> None:
    assert typed_in_zsh(command, place, tmp_path, line) == found


@pytest.mark.parametrize(
    ("shell", "more", "found"),
    [
        ("zsh", {"COMP_WORDS": "gemctl model load ", "COMP_CWORD": "3"},
         "plain\npilot\nserving, active\nplain\ncommands\ndisabled\n"),
        ("zsh", {"COMP_WORDS": "gemctl generate --model=c", "COMP_CWORD": "2"},
         "plain\n--model=commands\ndisabled\n"),
        ("fish", {"COMP_WORDS": "gemctl model load ", "COMP_CWORD": ""},
         "plain,pilot\tserving; active\nplain,commands\tdisabled\n"),
        ("fish", {"COMP_WORDS": "gemctl stats --js", "COMP_CWORD": "--js"},
         "plain,--json\tprint the answer as JSON\n"),
    ],
)  # fmt: skip
def test_the_protocol_of_the_others(
    command: Path, place: Path, shell: str, more: dict[str, str], found: str
) -> None:
    done = run(
        command, ["gemctl"], GEMCTL_SOCKET=str(place), _GEMCTL_COMPLETE=f"{shell}_complete", **more
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", found)


def test_a_shell_that_is_none(command: Path) -> None:
    assert run(command, ["gemctl"], _GEMCTL_COMPLETE="csh_complete").returncode == 1
