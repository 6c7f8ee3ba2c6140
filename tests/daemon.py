"""A real gemctld for tests: its own folder and socket, the built gemrun, ended whatever happens.

with Daemon() as daemon:
    daemon.gemctl("model", "--replace", artifact, "--name", "pilot")
    daemon.call("stats")
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from gemctl.client import Client, Refused

ROOT = Path(__file__).resolve().parents[1]
START_S = 60.0
# How the tests' models are compiled; the fixture `versions` is two of them.
OPTIONS = ("--quantization", "int4", "--kv-cache-size", "192", "--effort", "fast")


def wait_for(what: Callable[[], Any], seconds: float = 90.0) -> Any:
    """The first true value of `what`; an AssertionError when none came in time."""
    until = time.monotonic() + seconds
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < until, f"nothing within {seconds:g} s"
        time.sleep(0.02)


def gemrun_path() -> str:
    """The gemrun command that make dev has installed beside this Python."""
    found = shutil.which("gemrun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    assert found, "gemrun is not installed; run 'make dev'"
    return found


def toml(tables: dict[str, dict[str, Any]]) -> str:
    """A configuration file's text."""
    lines: list[str] = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


class Daemon:
    """One gemctld. Tables override the configuration: Daemon(models={"queue": 4})."""

    def __init__(self, **tables: dict[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gemctl-"))  # short: a socket's path is
        self.socket = self.folder / "s"
        self.config = self.folder / "c.toml"
        self.log = self.folder / "log"
        base: dict[str, dict[str, Any]] = {
            "daemon": {"socket": str(self.socket), "state": str(self.folder / "state")},
            "worker": {"program": gemrun_path(), "backoff_s": 0.05},
            "models": {"probation_s": 1.0, "probation_requests": 3, "drain_s": 10.0},
            "sensors": {"sysfs_root": str(self.fake_root())},
        }
        for name, table in tables.items():
            base[name] = {**base.get(name, {}), **table}
        self.config.write_text(toml(base), encoding="utf-8")
        self.process: subprocess.Popen[bytes] | None = None
        self.program: tuple[str, ...] = ("-m", "gemctl.daemon")
        self.prefix: tuple[str, ...] = ()  # a command that becomes it, such as prlimit

    def fake_root(self) -> Path:
        """A machine without sensors, and with this one's memory (a stand-in for sysfs)."""
        root = self.folder / "root"
        (root / "proc").mkdir(parents=True, exist_ok=True)
        shutil.copy("/proc/meminfo", root / "proc/meminfo")
        return root

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), "GEMCTL_SOCKET": str(self.socket)}

    def start(self) -> Daemon:
        """Start it and wait until it answers."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, *self.program, "--config", str(self.config)],
                stdout=log,
                stderr=log,
                env=self.environment(),
            )
        wait_for(self.answers, START_S)
        return self

    def answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text(encoding="utf-8")
        with contextlib.suppress(Refused):
            return bool(self.call("daemon.info"))
        return False

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal; its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def __enter__(self) -> Daemon:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if kind is not None:
            sys.stderr.write(self.log.read_text(encoding="utf-8")[-4000:])
        shutil.rmtree(self.folder, ignore_errors=True)

    def client(self) -> Client:
        return Client(str(self.socket), 60)

    def call(self, method: str, fd: int | None = None, **params: Any) -> dict[str, Any]:
        """One call on a connection of its own. Raises Refused."""
        with self.client() as client:
            return client.call(method, params, None, fd)

    def ask(self, prompt: str, tokens: int = 8, **more: Any) -> dict[str, Any]:
        """A greedy answer."""
        fields = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "stream": False}
        return self.call("generate", **{**fields, "ignore_stop_ids": True, **more})

    def replace(self, path: Path, **params: Any) -> dict[str, Any]:
        """model.replace with an open file."""
        fd = os.open(path, os.O_RDONLY)
        try:
            return self.call("model.replace", fd, **params)
        finally:
            os.close(fd)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """What happened so far."""
        seen: list[dict[str, Any]] = []
        with self.client() as client:
            client.call("events.follow", {"follow": False}, seen.append)
        return [event for event in seen if event["kind"].startswith(kind)]

    def gemctl(self, *words: str | Path, code: int = 0) -> str:
        """The command as a user types it; what it printed. `code`: its exit code."""
        done = subprocess.run(
            [sys.executable, "-m", "gemctl.cli", *map(str, words)],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def workers(self) -> list[int]:
        """Process ids of its workers."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                command = (entry / "cmdline").read_bytes()
                if int(fields[1]) == self.pid and b"--serve" in command:
                    found.append(int(entry.name))
        return found


def settled(daemon: Daemon, name: str = "pilot") -> dict[str, Any]:
    """Status of a model whose probation is over."""
    return wait_for(
        lambda: (s := daemon.call("model.status", name=name)) and not s["on_probation"] and s
    )


def answer_of(path: Path, prompt: str, tokens: int = 8) -> str:
    """What the engine itself answers, greedily."""
    command = [gemrun_path(), str(path), "--prompt", prompt, "--temperature", "0", "--json"]
    command += ["--max-tokens", str(tokens), "--ignore-eos"]
    done = subprocess.run(command, capture_output=True, check=True)
    return str(json.loads(done.stdout)["text"])
