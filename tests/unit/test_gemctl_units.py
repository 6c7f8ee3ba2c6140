"""Units, users and directories, by systemd's own tools; it need not run. Nothing is installed."""

from __future__ import annotations

import configparser
import grp
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import sysfs
from gemctl.config import Config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

UNITS = Path(__file__).resolve().parents[2] / "gemctl" / "units"
NAMES = ("gemctld", "gemctl-powerd")
FILES = ("gemctld.service", "gemctl-powerd.service", "gemctl.socket")
PATIENCE_S = 60.0


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name}: not installed; run 'make test', or apt-get install systemd")
    return found


def unit(name: str, kind: str = "service") -> dict[str, list[str]]:
    """All keys of a unit, each with its values."""
    found: dict[str, list[str]] = {}
    for line in (UNITS / f"{name}.{kind}").read_text("utf-8").splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
    return found


def run(*command: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, timeout=PATIENCE_S
    )


@pytest.fixture(scope="module")
def analyze() -> str:
    return tool("systemd-analyze")


@pytest.mark.parametrize("names", [*([name] for name in FILES[:2]), FILES])
def test_units_are_understood(names: Sequence[str], analyze: str, tmp_path: Path) -> None:
    """No unknown key, no unknown value; the commands are another machine's, so /bin/true is.

    The socket is checked beside the service that it is for; each service also alone.
    """
    for name in names:
        text = (UNITS / name).read_text("utf-8")
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.M)
        (tmp_path / name).write_text(text)
    done = run(analyze, "verify", "--man=no", *(str(tmp_path / name) for name in names))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_check_finds_what_is_wrong(analyze: str, tmp_path: Path) -> None:
    copy = tmp_path / "bad.service"
    copy.write_text("[Service]\nExecStart=/bin/true\nWatchdogSek=30\nTimeoutStopSec=x\n")
    done = run(analyze, "verify", "--man=no", str(copy))
    assert "Unknown key 'WatchdogSek'" in done.stderr
    assert "Failed to parse" in done.stderr


@pytest.mark.parametrize(("name", "most"), [("gemctld", 2.0), ("gemctl-powerd", 1.3)])
def test_exposure_is_low(name: str, most: float, analyze: str) -> None:
    """Of 10; a unit without any of this has 9.2 to 9.6."""
    path = str(UNITS / f"{name}.service")
    done = run(analyze, "security", "--offline=true", "--no-pager", path)
    match = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert match, done.stdout + done.stderr
    assert float(match[1]) <= most


def test_keys_newer_than_debian_12_are_not_used() -> None:
    """systemd 252 there; these came later."""
    later = {
        "notify-reload", "RestartSteps", "RestartMaxDelaySec", "MemoryZSwapMax", "OpenFile",
        "SurviveFinalKillSignal", "DelegateSubgroup", "RestartMode", "ImportCredential",
        "PrivatePIDs", "ProtectHostname=private", "MemoryPressureWatch",
    }  # fmt: skip
    for name in FILES:
        text = (UNITS / name).read_text("utf-8")
        assert not [word for word in later if word in text]


def test_the_daemon_s_unit() -> None:
    found = unit("gemctld")
    one = {key: values[0] for key, values in found.items() if len(values) == 1}
    assert one["Type"] == "notify"
    assert one["WatchdogSec"] == "30"
    assert one["Restart"] == "on-failure"
    assert one["User"] == "gemctl"
    assert one["OOMPolicy"] == "continue", "a worker killed for memory would end the daemon"
    assert one["KillMode"] == "mixed"
    assert one["ProtectSystem"] == "strict"
    for key in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "ProtectKernelTunables",
                "MemoryDenyWriteExecute", "RestrictNamespaces", "LockPersonality"):  # fmt: skip
        assert one[key] == "yes", key
    assert one["CapabilityBoundingSet"] == ""
    # Its directories are the configuration's.
    config = Config()
    assert config.daemon.socket.parent == Path("/run") / one["RuntimeDirectory"]
    assert config.daemon.state == Path("/var/lib") / one["StateDirectory"]
    assert config.models.keys_dir.parent == Path("/etc") / one["ConfigurationDirectory"]
    assert float(one["TimeoutStopSec"]) > config.models.drain_s


def test_the_helper_s_unit() -> None:
    found = unit("gemctl-powerd")
    one = {key: values[0] for key, values in found.items() if len(values) == 1}
    assert one["ProtectKernelTunables"] == "no", "it could write nothing"
    assert "User" not in found
    assert one["CapabilityBoundingSet"] == ""
    assert one["RuntimeDirectoryPreserve"] == "yes", "what a crash left could not be mended"
    assert one["StartLimitIntervalSec"] == "0"
    assert one["RestrictAddressFamilies"] == "AF_UNIX"
    socket_folder = Config().sensors.powerd_socket.parent
    assert socket_folder == Path("/run") / one["RuntimeDirectory"]
    # Who may only read must not slow the machine: the group is the writers', and the daemon is one.
    group = one["Group"]
    assert group == Config().daemon.write_group
    assert f"--group {group}" in one["ExecStart"]
    assert unit("gemctld")["SupplementaryGroups"] == [group]


def test_the_socket_s_unit() -> None:
    """It is the configuration's socket, in a directory that a stop of the daemon leaves alone."""
    found = unit("gemctl", "socket")
    assert all(len(values) == 1 for values in found.values()), "the daemon takes one socket"
    one = {key: values[0] for key, values in found.items()}
    config = Config().daemon
    assert one["ListenStream"] == str(config.socket)
    assert one["SocketGroup"] == config.read_group
    assert one["SocketMode"] == "0660"
    assert one["Service"] == "gemctld.service"
    service = unit("gemctld")
    assert service["RuntimeDirectoryPreserve"] == ["yes"], "the socket would go with the daemon"
    assert "Sockets" not in service, "the daemon starts without the socket too"
    assert "Requires" not in service


def test_commands_are_the_project_s() -> None:
    scripts = (UNITS.parents[1] / "pyproject.toml").read_text("utf-8")
    for name in NAMES:
        assert f"\n{name} = " in scripts
        assert unit(name)["ExecStart"][0].split()[0] == f"/usr/bin/{name}"


@pytest.mark.skipif(os.getuid() != 0, reason="users and owners are root's to make")
def test_users_and_directories(tmp_path: Path) -> None:
    for kind in ("sysusers", "tmpfiles"):
        folder = tmp_path / "usr" / "lib" / f"{kind}.d"
        folder.mkdir(parents=True)
        shutil.copy(UNITS / f"{kind}.d" / "gemctl.conf", folder)
    (tmp_path / "etc").mkdir()
    for command in (
        [tool("systemd-sysusers"), f"--root={tmp_path}", "gemctl.conf"],
        [tool("systemd-tmpfiles"), f"--root={tmp_path}", "--create", "gemctl.conf"],
    ):
        done = run(*command)
        assert done.returncode == 0, done.stderr
    passwd = (tmp_path / "etc/passwd").read_text().strip().split(":")
    assert passwd[0] == "gemctl"
    assert passwd[6].endswith("nologin")
    lines = (tmp_path / "etc/group").read_text().splitlines()
    groups = {line.split(":")[0]: line.split(":") for line in lines}
    assert groups["gemctl-admin"][3] == "gemctl"
    user, group, admin = int(passwd[2]), int(groups["gemctl"][2]), int(groups["gemctl-admin"][2])
    for place, mode, owner, of in (
        ("etc/gemctl", 0o755, 0, 0), ("etc/gemctl/keys.d", 0o755, 0, 0),
        ("var/lib/gemctl", 0o750, user, group), ("run/gemctl", 0o755, user, group),
        ("run/gemctl-powerd", 0o755, 0, admin),
    ):  # fmt: skip
        state = (tmp_path / place).stat()
        assert (state.st_mode & 0o7777, state.st_uid, state.st_gid) == (mode, owner, of), place


def test_the_container_s_example() -> None:
    text = (UNITS / "Containerfile").read_text("utf-8")
    for word in (
        "--read-only",
        "--cap-drop=all",
        "no-new-privileges",
        "/run/gemctl",
        "USER gemctl",
    ):
        assert word in text
    assert 'ENTRYPOINT ["gemctld"]' in text
    wanted = re.search(r"\$\{wheel\}\[([\w,]+)\]", text)
    assert wanted is not None
    project = tomllib.loads((UNITS.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    readme = (UNITS.parent / "README.md").read_text("utf-8")
    everything = re.search(r"gembin-toolchain\[([\w,]+)\]", readme)  # that the daemon has a use for
    assert everything is not None
    assert set(wanted[1].split(",")) == set(everything[1].split(","))
    assert set(wanted[1].split(",")) <= set(project["optional-dependencies"])
    assert "http" not in text


# The helper under what its unit allows, as far as that goes without systemd


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., tuple[subprocess.Popen[bytes], Path]]:
    """Starts the helper behind another command; returns its process and socket."""
    tree = sysfs.orin_nano(tmp_path / "tree")
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    path = folder / "s"

    def start(*before: str, group: int) -> tuple[subprocess.Popen[bytes], Path]:
        os.chown(folder, 0, group)
        command = [*before, sys.executable, "-m", "gemctl.board.powerd", "--socket", str(path)]
        command += ["--sysfs-root", str(tree.root), "--group", str(group)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        end = time.monotonic() + PATIENCE_S
        while not path.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        assert path.exists(), process.communicate()[1].decode()
        return process, path

    return start


def ask(path: Path) -> dict[str, object]:
    """A cap and its end, by a process of its own."""
    code = (
        "import json, socket, sys\n"
        "link = socket.socket(socket.AF_UNIX); link.connect(sys.argv[1])\n"
        "f = link.makefile('rwb')\n"
        'for line in (b\'{"verb":"cap_cpu","khz":1200000}\', b\'{"verb":"restore"}\'):\n'
        "    f.write(line + b'\\n'); f.flush(); reply = f.readline()\n"
        "print(reply.decode())\n"
    )
    done = run(sys.executable, "-c", code, str(path))
    value: dict[str, object] = json.loads(done.stdout)
    return value


@pytest.mark.skipif(os.getuid() != 0, reason="the helper is root's")
def test_the_helper_needs_none_of_root_s_capabilities(
    started: Callable[..., tuple[subprocess.Popen[bytes], Path]],
) -> None:
    group = grp.getgrnam("daemon").gr_gid
    bare = [tool("setpriv"), "--regid", str(group), "--clear-groups", "--no-new-privs"]
    bare += ["--bounding-set=-all", "--inh-caps=-all"]
    process, path = started(*bare, group=group)
    status = Path(f"/proc/{process.pid}/status").read_text()
    assert re.search(r"^CapEff:\s*0+$", status, re.M)
    assert path.stat().st_gid == group
    assert ask(path)["ok"] is True
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=PATIENCE_S)[1].decode()
    assert process.returncode == 0, said
    assert said.count("audit: ") == 4


def allowed_calls(name: str, analyze: str) -> set[str]:
    """What a unit's SystemCallFilter lets through: names of system calls."""
    listed = run(analyze, "syscall-filter", "--no-pager").stdout
    groups: dict[str, set[str]] = {}
    for line in listed.splitlines():
        if line.startswith("@"):
            current = groups.setdefault(line.strip(), set())
        elif line.strip() and not line.strip().startswith("#"):
            current.add(line.strip())

    def whole(word: str) -> set[str]:
        if not word.startswith("@"):
            return {word}
        return set().union(*(whole(part) for part in groups[word]))

    calls: set[str] = set()
    for text in unit(name)["SystemCallFilter"]:
        parts = set().union(*(whole(word) for word in text.lstrip("~").split()))
        calls = calls - parts if text.startswith("~") else calls | parts
    return calls


@pytest.mark.skipif(os.getuid() != 0, reason="the helper is root's")
def test_the_helper_s_system_calls_are_allowed(
    analyze: str, started: Callable[..., tuple[subprocess.Popen[bytes], Path]], tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    process, path = started(tool("strace"), "-f", "-o", str(trace), group=0)
    assert ask(path)["ok"] is True
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    used = set(re.findall(r"^\d+ +(\w+)\(", trace.read_text(), re.M))
    assert {"accept4", "rename", "openat"} <= used
    assert used - allowed_calls("gemctl-powerd", analyze) == set()


def test_filters_let_through_what_is_needed(analyze: str) -> None:
    daemon, helper = (allowed_calls(name, analyze) for name in NAMES)
    assert {"clone3", "execve", "sched_setaffinity", "fchownat", "sendmsg", "openat2"} <= daemon
    for call in ("ptrace", "mount", "reboot", "setuid", "bpf", "init_module", "settimeofday"):
        assert call not in daemon | helper, call
    assert not {"chown", "fchown", "sched_setaffinity"} & helper


def test_units_are_plain_ini() -> None:
    assert {path.name for path in UNITS.glob("*.s*") if path.is_file()} == set(FILES)
    for name in FILES:
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.read(UNITS / name)
        middle = "Socket" if name.endswith(".socket") else "Service"
        assert parser.sections() == ["Unit", middle, "Install"]
