"""Programs that attach themselves to a real gemctld, in C and in Python: watched, paced, disabled,
replaced, over a daemon's death and their own."""

from __future__ import annotations

import functools
import grp
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from candidates import digest_of
from daemon import OPTIONS, Daemon, settled, wait_for
from gemctl.client import Refused
from gemrun import GemRunContext

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
KINDS = ("c", "python")
PROMPT, TOKENS = "The conveyor", 16  # of both examples


def libraries() -> list[Path]:
    """Those that `make dev` builds."""
    found = [ROOT / "build" / "dev" / f"lib{name}.a" for name in ("gemrun_control", "gemrun")]
    for path in found:
        assert path.exists(), f"{path.relative_to(ROOT)}: not built; run 'make dev'"
    return found


@functools.cache
def answer(path: Path, prompt: str = PROMPT, tokens: int = TOKENS) -> str:
    """What an example prints, from this model."""
    with GemRunContext(path, ignore_memory=True) as context:
        return f"{context.infer(prompt, tokens).text}\n"


@pytest.fixture(scope="module", autouse=True)
def told_apart(versions: tuple[Path, Path]) -> None:
    """No answer is the beginning of the other."""
    lines = [answer(path) for path in versions]
    assert not any(a.startswith(b) for a, b in (lines, lines[::-1]))


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """How to start the examples; the one in C is built as its README says."""
    readme = (EXAMPLES / "embed_c" / "README.md").read_text(encoding="utf-8")
    build = re.search(r"^cc .*attached\.c .*$", readme, re.M)
    assert build is not None
    assert libraries()
    program = tmp_path_factory.mktemp("attached") / "attached"
    line = build[0].replace("build/lib/", "build/dev/").replace("-o attached", f"-o {program}")
    strict = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    subprocess.run([*shlex.split(line), *strict], cwd=ROOT, check=True)
    return {"c": [str(program)], "python": [sys.executable, str(EXAMPLES / "attached.py")]}


@pytest.mark.parametrize("language", KINDS)
def test_the_readme_runs(language: str, versions: tuple[Path, Path], tmp_path: Path) -> None:
    """The examples of gemrun/README.md, as they stand; no daemon is there."""
    text = (ROOT / "gemrun" / "README.md").read_text(encoding="utf-8")
    section = text.split("## Swap a model inside your program")[1]
    block = re.search(rf"```{language}\n(.*?)```", section, re.S)
    assert block is not None
    for name, path in zip(("model.gembin", "better.gembin"), versions, strict=True):
        shutil.copy(path, tmp_path / name)
    command = [sys.executable, "-c", block[1]]
    if language == "c":
        (tmp_path / "main.c").write_text(block[1], encoding="utf-8")
        build = ["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", "main.c"]
        libraries_ = [*map(str, libraries()), "-pthread", "-lm"]
        subprocess.run([*build, *libraries_, "-o", "main"], cwd=tmp_path, check=True)
        command = ["./main"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    wanted = rb"\d+ tokens\n"
    if language == "python":
        said = [answer(path, "Hello", 8).encode() for path in versions]
        wanted = re.escape(said[0]) + re.escape(said[1])
    assert re.fullmatch(wanted, done.stdout, re.S)


class Program:
    """An example at work; what it prints is read all the time."""

    def __init__(self, command: list[str], model: Path, *daemon: str | Path) -> None:
        self._process = subprocess.Popen(
            [*command, str(model), *map(str, daemon)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._printed = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), 65536):
            self._printed += data

    @property
    def pid(self) -> int:
        return self._process.pid

    def versions(self, paths: tuple[Path, ...]) -> str:
        """The versions that answered, as "aaab". Nothing but whole answers was printed, but for
        the newest one."""
        lines = [answer(path).encode() for path in paths]
        text, made = bytes(self._printed), ""
        while text:
            found = [name for name, line in zip("ab", lines, strict=True) if text.startswith(line)]
            if not found:
                assert any(line.startswith(text) for line in lines), text
                break
            made += found[0]
            text = text[len(lines["ab".index(found[0])]) :]
        return made

    def more(self, paths: tuple[Path, ...], wanted: str) -> None:
        """Wait for new answers, of these versions only."""
        before = len(self.versions(paths))
        wait_for(lambda: len(self.versions(paths)) >= before + 3)
        assert set(self.versions(paths)[before:]) <= set(wanted)

    def mapped(self, part: str) -> int:
        maps = Path(f"/proc/{self.pid}/maps").read_text(encoding="utf-8")
        return sum(part in line for line in maps.splitlines())

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Its exit code, and what it said on stderr."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        self._reader.join(20)
        assert self._process.stderr is not None
        return self._process.wait(20), self._process.stderr.read().decode()

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        _, said = self.end()
        if kind is not None:
            sys.stderr.write(said)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as made:
        yield made


def listed(daemon: Daemon, name: str = "line-3") -> dict[str, Any] | None:
    """The program's line of model.list, if it is attached."""
    rows = daemon.call("model.list")["models"]
    found = [row for row in rows if row["name"] == name and row.get("attached")]
    assert len(found) <= 1
    return found[0] if found else None


def wait_until_attached(daemon: Daemon, times: int) -> None:
    """Wait until programs have told what they are so many times; listed they are before that."""
    wait_for(lambda: len(daemon.events("program.attached")) == times)


def figures(daemon: Daemon) -> dict[str, Any]:
    row = listed(daemon)
    return row["figures"] if row is not None else {}


@pytest.mark.parametrize("kind", KINDS)
def test_disable_enable_replace(
    kind: str, daemon: Daemon, commands: dict[str, list[str]], versions: tuple[Path, Path]
) -> None:
    first, second = versions
    with Program(commands[kind], first, daemon.socket, "line-3") as program:
        row = wait_for(lambda: (r := listed(daemon)) and r["state"] == "serving" and r)
        assert row["pid"] == program.pid
        program.more(versions, "a")
        assert "attached program" in daemon.gemctl("model", "list")
        wait_for(lambda: figures(daemon).get("requests", 0) > 0)

        daemon.gemctl("model", "--disable", "--name", "line-3")
        wait_for(lambda: program.mapped(".gembin") == 0)
        row = wait_for(lambda: (r := listed(daemon)) and r["state"] == "disabled" and r)
        assert row["memory_bytes"] == 0
        last = wait_for(lambda: (f := figures(daemon)) and f["active"] == f["ram_total"] == 0 and f)
        before = len(program.versions(versions))
        daemon.gemctl("model", "list")  # takes some time
        assert len(program.versions(versions)) <= before + 1  # one may still have been written
        assert figures(daemon)["requests"] == last["requests"]

        daemon.gemctl("model", "--enable", "--name", "line-3", "--warmup-prompt", "warm")
        program.more(versions, "a")

        daemon.gemctl("model", "--replace", second, "--name", "line-3")
        wait_for(lambda: program.versions(versions)[-1] == "b")
        assert re.fullmatch("a+b+", program.versions(versions))
        wait_for(lambda: program.mapped(".gembin") == 1 and program.mapped(str(first)) == 0)
        program.more(versions, "b")
        assert daemon.call("daemon.info")["attached"] == ["line-3"]
        assert program.end() == (0, "")
        wait_for(lambda: listed(daemon) is None)


def shown(daemon: Daemon, *words: str) -> dict[str, Any]:
    """A command's answer as JSON."""
    found: dict[str, Any] = json.loads(daemon.gemctl(*words, "--json"))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_its_figures_are_those_of_a_model(
    kind: str, commands: dict[str, list[str]], versions: tuple[Path, Path], tmp_path: Path
) -> None:
    """Status, statistics and Prometheus know it as they know the daemon's own models."""
    door = tmp_path / "m"
    with (
        Daemon(metrics={"listen": f"unix:{door}"}) as daemon,
        Program(commands[kind], versions[0], daemon.socket, "line-3") as program,
    ):
        wait_until_attached(daemon, 1)
        daemon.replace(versions[1], name="own")
        assert daemon.ask("abc")["generated_tokens"] == 8
        own, theirs = (
            daemon.call("model.status", name="own"),
            lambda: shown(daemon, "model", "status", "line-3"),
        )
        assert own.keys() <= theirs().keys()
        first = wait_for(lambda: (s := theirs()) and s["requests"]["done"] > 2 and s)
        assert (first["worker"]["pid"], first["state"]) == (program.pid, "serving")
        assert first["memory_bytes"] == first["worker"]["ram_total"] > 0
        assert wait_for(lambda: theirs()["requests"]["done"] > first["requests"]["done"])
        assert "(attached program)" in daemon.gemctl("model", "status", "line-3")

        s = shown(daemon, "stats", "line-3")
        assert list(s) == list(shown(daemon, "stats"))
        assert (s["model"], s["state"]) == ("line-3", "serving")
        assert s["ttft_ms"] > 0 < s["throughput_tps"]
        assert 0 < s["kv_cache_used"] <= s["kv_cache_size"] == 192
        assert s["kv_cache_used_bytes"] > 0
        assert s["requests"]["done"] > 2
        assert wait_for(lambda: shown(daemon, "stats", "line-3")["ttft_p50_ms"])
        assert "line-3 (serving)" in daemon.gemctl("stats", "line-3")
        assert shown(daemon, "stats", "own")["requests"]["done"] == 1
        assert shown(daemon, "stats")["model"] == "own"
        assert "no such model" in daemon.gemctl("stats", "line-4", code=6)
        assert "leave the name out" in daemon.gemctl("stats", "line-3", "--history", code=2)

        def series(name: str, outcome: str = "") -> float:
            labels = f'model="line-3"{outcome}'
            found = re.search(rf"^{name}{{{labels}}} (\S+)$", metrics_of(door), re.M)
            return float(found[1]) if found else 0.0

        wait_for(lambda: series("gemctl_requests_total", ',outcome="ok"') > 2)
        assert series("gemctl_tokens_total") >= TOKENS
        assert series("gemctl_ttft_seconds_count") > 0
        assert 0 < series("gemctl_kv_cache_used_ratio") < 1
        assert 'gemctl_model_info{digest="own file",name="line-3"} 1' in metrics_of(door)
        assert program.end() == (0, "")
        wait_for(lambda: "line-3" not in metrics_of(door))
        assert 'name="own"' in metrics_of(door)


def metrics_of(door: Path) -> str:
    """What Prometheus is told."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(str(door))
        asked.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b"".join(iter(lambda: asked.recv(65536), b"")).decode()


PHASES = ["stage", "verify", "prefault", "load", "warmup", "flip"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_is_on_probation(
    kind: str, commands: dict[str, list[str]], versions: tuple[Path, Path]
) -> None:
    """Phases, probation, rollback: as of the daemon's own models."""
    first, second = versions
    with (
        Daemon(models={"probation_s": 600.0, "probation_requests": 3}) as daemon,
        Program(commands[kind], first, daemon.socket, "line-3") as program,
    ):
        wait_until_attached(daemon, 1)
        said = daemon.gemctl("model", "rollback", "line-3", code=6)
        assert "no version before this one" in said
        said = daemon.gemctl("model", "--replace", second, "--name", "line-3", "--wait")
        told = [line.split()[0] for line in said.splitlines() if line.startswith("  ")]
        assert [name for name in told if name != "probation"] == PHASES
        assert "test vectors passed" in said
        assert "passed its probation" in said
        status = shown(daemon, "model", "status", "line-3")
        digest = digest_of(second)
        assert (status["digest"], status["current"], status["previous"]) == (digest, digest, None)
        assert list(status["swap"]["phases_ms"]) == PHASES
        assert status["swap"]["total_ms"] >= status["swap"]["flip_ms"] > 0
        assert not status["on_probation"]
        assert [e["digest"] for e in daemon.events("probation.good")] == [digest]
        assert daemon.replace(second, name="line-3")["already"]
        wait_for(lambda: program.versions(versions)[-1] == "b")
        program.more(versions, "b")

        daemon.gemctl("model", "rollback", "line-3")  # to its own file
        wait_for(lambda: program.versions(versions)[-1] == "a")
        program.more(versions, "a")
        assert shown(daemon, "model", "status", "line-3")["digest"] is None
        found = daemon.call("model.replace", name="line-3", digest=digest[:12])
        assert (found["strategy"], found["digest"]) == ("attached", digest)
        wait_for(lambda: not daemon.call("model.status", name="line-3")["on_probation"])
        wait_for(lambda: program.versions(versions)[-1] == "b")
        program.more(versions, "b")
        assert program.end() == (0, "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_probation_is_ended_by_hand(
    kind: str, commands: dict[str, list[str]], versions: tuple[Path, Path]
) -> None:
    """The program goes back, over the daemon's death too, and the version is not taken again."""
    first, second = versions
    with (
        Daemon(models={"probation_s": 600.0, "probation_requests": 100000}) as daemon,
        Program(commands[kind], first, daemon.socket, "line-3") as program,
    ):
        wait_until_attached(daemon, 1)
        daemon.replace(second, name="line-3")
        status = daemon.call("model.status", name="line-3")
        assert status["on_probation"]
        assert 0 < status["probation_left_s"] <= 600
        with pytest.raises(Refused, match="is on probation for") as caught:
            daemon.replace(first, name="line-3")
        assert caught.value.code == "busy"
        daemon.stop(signal.SIGKILL)
        daemon.start()
        found = wait_for(lambda: listed(daemon) and daemon.call("model.status", name="line-3"))
        wait_for(lambda: daemon.call("model.status", name="line-3")["on_probation"])
        assert found["previous"] is None
        program.more(versions, "b")
        daemon.gemctl("model", "rollback", "line-3")
        wait_for(lambda: program.versions(versions)[-1] == "a")
        program.more(versions, "a")
        status = daemon.call("model.status", name="line-3")
        assert (status["digest"], status["on_probation"]) == (None, False)
        assert [bad["reason"] for bad in status["bad"]] == ["rolled back by hand"]
        assert status["present"] == []
        with pytest.raises(Refused, match="bad") as caught:
            daemon.replace(second, name="line-3")
        assert caught.value.code == "refused"
        assert program.end() == (0, "")


OTHER, GROUP = 65534, "daemon"  # a user that is nobody's, and a group that every system has


@pytest.mark.skipif(os.getuid() != 0, reason="another user is root's to be")
def test_a_program_of_another_user_needs_no_look_into_the_store(
    commands: dict[str, list[str]], versions: tuple[Path, Path]
) -> None:
    """The version comes as an open file: by its path that user could not open it."""
    groups = {"read_group": GROUP, "write_group": GROUP}
    with Daemon(daemon=groups) as daemon, tempfile.TemporaryDirectory() as name:
        daemon.folder.chmod(0o711)
        public = Path(name)
        public.chmod(0o755)
        program, model = public / "attached", public / "first.gembin"
        shutil.copy(commands["c"][0], program)
        shutil.copy(versions[0], model)
        model.chmod(0o644)
        gid = str(grp.getgrnam(GROUP).gr_gid)
        as_other = ["setpriv", "--reuid", str(OTHER), "--regid", gid, "--clear-groups"]
        with Program([*as_other, str(program)], model, daemon.socket, "line-3") as other:
            wait_for(lambda: listed(daemon))
            other.more(versions, "a")
            daemon.gemctl("model", "--replace", versions[1], "--name", "line-3")
            wait_for(lambda: other.versions(versions)[-1] == "b")
            stored = next((daemon.folder / "state").rglob("*.gembin"))
            assert (daemon.folder / "state").stat().st_mode & 0o007 == 0
            tried = subprocess.run([*as_other, "cat", stored], capture_output=True, check=False)
            assert tried.returncode != 0
            assert b"Permission denied" in tried.stderr
            wait_for(lambda: not daemon.call("model.status", name="line-3")["on_probation"])
            # it is opened again from where it is
            daemon.gemctl("model", "--disable", "--name", "line-3")
            wait_for(lambda: other.mapped(".gembin") == 0)
            daemon.gemctl("model", "--enable", "--name", "line-3")
            other.more(versions, "b")
            with pytest.raises(Refused) as caught:
                daemon.replace(Path(__file__), name="line-3")
            assert caught.value.code == "refused"
            other.more(versions, "b")
            assert other.end() == (0, "")


def test_a_program_s_own_words_name_the_version(
    daemon: Daemon,
    commands: dict[str, list[str]],
    versions: tuple[Path, Path],
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
) -> None:
    """Not the descriptor that it came by, nor a file of the store; that one goes."""
    short = artifact_cache(
        tiny_checkpoint("qwen3", seed=1), *OPTIONS[:2], "--kv-cache-size", "64", "--effort", "fast"
    )
    with Program(commands["c"], versions[0], daemon.socket, "line-3"):
        wait_for(lambda: listed(daemon))
        with pytest.raises(Refused) as caught:
            daemon.replace(short, name="line-3")
        assert str(caught.value) == (
            "line-3: another context, KV type or shape than the version that serves; compile it "
            "alike, or give --allow-layout-change"
        )
        kept = list((daemon.folder / "state" / "models" / "line-3").glob("*.gembin"))
        assert not kept, "what the program refused stays in the store"


def test_what_is_refused_leaves_the_program(
    daemon: Daemon,
    commands: dict[str, list[str]],
    versions: tuple[Path, Path],
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    tmp_path: Path,
) -> None:
    short = artifact_cache(
        tiny_checkpoint("qwen3", seed=1), *OPTIONS[:2], "--kv-cache-size", "64", "--effort", "fast"
    )
    cut = tmp_path / "cut.gembin"
    cut.write_bytes(versions[1].read_bytes()[:-4096])
    with Program(commands["c"], versions[0], daemon.socket, "line-3") as program:
        wait_for(lambda: listed(daemon))
        program.more(versions, "a")
        with pytest.raises(Refused, match="line-3") as caught:
            daemon.replace(cut, name="line-3")
        assert caught.value.code == "refused"
        with pytest.raises(Refused, match="give --allow-layout-change") as caught:
            daemon.replace(short, name="line-3")
        assert caught.value.code == "layout"
        program.more(versions, "a")
        daemon.replace(versions[1], name="line-3")
        wait_for(lambda: program.versions(versions)[-1] == "b")
        settled(daemon, "line-3")
        daemon.replace(short, name="line-3", allow_layout_change=True)
        found = daemon.call("model.status", name="line-3")
        worker = found["worker"]
        assert (worker["context"], worker["kv_size"]) == (64, 64)
        assert worker["ram_total"] == found["memory_bytes"]
        assert program.end() == (0, "")


@pytest.mark.parametrize("kind", KINDS)
def test_the_throttle_paces_it(
    kind: str, commands: dict[str, list[str]], versions: tuple[Path, Path]
) -> None:
    with (
        Daemon(throttle={"mode": "off"}) as daemon,  # only what is ordered counts
        Program(commands[kind], versions[0], daemon.socket, "line-3") as program,
    ):
        wait_for(lambda: listed(daemon))
        assert wait_for(lambda: figures(daemon))["duty"] == 1
        daemon.gemctl("throttle", "--duty", "0.05")
        wait_for(lambda: figures(daemon)["duty"] == 0.05)
        program.more(versions, "a")
        daemon.stop(signal.SIGKILL)
        daemon.start()
        wait_for(lambda: figures(daemon).get("duty") == 0.05)  # it is the operator's wish
        daemon.gemctl("throttle", "--reset")
        wait_for(lambda: figures(daemon)["duty"] == 1)
        assert program.end() == (0, "")


@pytest.mark.parametrize("kind", KINDS)
def test_the_daemon_dies_and_comes_back(
    kind: str, commands: dict[str, list[str]], versions: tuple[Path, Path]
) -> None:
    daemon = Daemon()
    with Program(commands[kind], versions[0], daemon.socket, "line-3") as program:
        program.more(versions, "a")  # before there is a daemon
        with daemon:
            wait_for(lambda: listed(daemon))
            daemon.stop(signal.SIGKILL)
            program.more(versions, "a")
            daemon.start()
            assert wait_for(lambda: listed(daemon))["pid"] == program.pid
            daemon.replace(versions[1], name="line-3")
            wait_for(lambda: program.versions(versions)[-1] == "b")
            assert daemon.stop() == 0
            program.more(versions, "b")
            daemon.start()
            assert wait_for(lambda: listed(daemon))["pid"] == program.pid
            program.more(versions, "b")
            assert program.end() == (0, "")


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_dies(
    kind: str, daemon: Daemon, commands: dict[str, list[str]], versions: tuple[Path, Path]
) -> None:
    for times in (1, 2):
        with Program(commands[kind], versions[0], daemon.socket, "line-3") as program:
            wait_until_attached(daemon, times)
            program.end(signal.SIGKILL)
            wait_for(lambda: listed(daemon) is None)
        with pytest.raises(Refused):
            daemon.call("model.disable", name="line-3")
    gone = daemon.events("program.gone")
    assert [event["model"] for event in gone] == ["line-3", "line-3"]


def test_the_first_of_a_name_stays(
    daemon: Daemon, commands: dict[str, list[str]], versions: tuple[Path, Path]
) -> None:
    """A second one is refused as long as the first is there, and both go on."""
    with Program(commands["c"], versions[0], daemon.socket, "line-3") as first:
        wait_for(lambda: listed(daemon))
        with Program(commands["c"], versions[0], daemon.socket, "line-3") as second:
            second.more(versions, "a")
            first.more(versions, "a")
            row = listed(daemon)
            assert row is not None
            assert row["pid"] == first.pid
            told = wait_for(lambda: daemon.events("program.refused"))
            assert [event["name"] for event in told] == ["line-3"]
            assert "is attached (process" in daemon.gemctl("doctor")
            assert first.end() == (0, "")
            wait_for(lambda: (r := listed(daemon)) and r["pid"] == second.pid)
            assert second.end() == (0, "")
