"""gemctl-powerd: the root helper that caps clocks for gemctld, and nothing else.

    gemctl-powerd --socket /run/gemctl-powerd/powerd.sock --group gemctl

JSON lines on a Unix socket; one request a line, one answer a line:

    {"id":1,"verb":"cap_cpu","khz":1200000}         all clusters, each within its own range;
                                                    with "policy":4 only that one
    {"id":2,"verb":"cap_gpu","hz":612000000}
    {"id":3,"verb":"nvpmodel","mode":1}             Jetson; stays, and is never done unasked
    {"id":4,"verb":"restore"}                       ends the caller's caps
    {"id":5,"verb":"status"}                        what is capped, and what the machine allows
    -> {"id":1,"ok":true,"result":{..}} or {"id":1,"ok":false,"error":"<sentence>"}

A caller names no path: files and ranges come from the machine. A cap only ever lowers a clock. It
ends with its connection, LEASE_S after the connection's last message, and with this process; what
was there before stands in `saved.json` beside the socket before the first write, so that the next
start mends what a crash left behind. Nothing but the standard library and peers.py: this process
stays small.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import grp
import json
import os
import pwd
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemctl.peers import groups_of, peer_of

LEASE_S = 30.0
MAX_LINE = 4096
MAX_CLIENTS = 4
BURST, PER_S = 20.0, 10.0  # messages of a connection
MAX_REFUSED = 100  # messages above the rate, then the connection ends
RETRY_S = 5.0  # between two attempts to undo what could not be undone
NVPMODEL_S = 20.0
NUMBER = re.compile(r"\d{1,15}", re.ASCII)
VERBS: dict[str, dict[str, bool]] = {  # field -> is it needed
    "cap_cpu": {"khz": True, "policy": False},
    "cap_gpu": {"hz": True},
    "nvpmodel": {"mode": True},
    "restore": {},
    "status": {},
}
GPU_PLACES = (  # Jetson: JetPack 6 first
    "sys/devices/platform/17000000.gpu/devfreq_dev",
    "sys/devices/17000000.ga10b/devfreq/17000000.ga10b",
    "sys/devices/17000000.gv11b/devfreq/17000000.gv11b",
)


class Refused(Exception):
    """The caller is told so; the text is one sentence."""


def say(text: str) -> None:
    """One line for the journal, as far as there is one."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def read_number(path: Path) -> int | None:
    """The whole number in a small file; None where there is none."""
    try:
        with path.open("rb") as stream:
            text = stream.read(64).decode("ascii", "replace").strip()
    except OSError:
        return None
    return int(text) if NUMBER.fullmatch(text) else None


def write_number(path: Path, value: int) -> None:
    """Raises OSError. Never makes a file."""
    flags = os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags)
    try:
        os.write(descriptor, f"{value}\n".encode())
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Knob:
    """One clock: the file of its upper limit, and the range that the machine states."""

    key: str  # "cpu:policy0", "gpu"
    limit: Path
    floor: Path  # the lower limit that is set now
    low: int
    high: int
    unit: str


def cpu_knobs(root: Path) -> dict[str, Knob]:
    """Clusters by key, as they are now: those without a core online have none."""
    found = {}
    for folder in sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*")):
        low, high = (read_number(folder / f"cpuinfo_{end}_freq") for end in ("min", "max"))
        if re.fullmatch(r"policy\d{1,4}", folder.name) and low and high and low <= high:
            limit, floor = folder / "scaling_max_freq", folder / "scaling_min_freq"
            key = f"cpu:{folder.name}"
            found[key] = Knob(key, limit, floor, low, high, "kHz")
    return found


def _gpu_folder(root: Path) -> Path | None:
    for place in GPU_PLACES:
        if (root / place / "max_freq").is_file():
            return root / place
    for folder in sorted((root / "sys/class/devfreq").glob("*")):
        if re.search(r"gpu|ga10b|gv11b|gp10b|mali|panthor", folder.name, re.IGNORECASE):
            return folder
    return None


def gpu_knob(root: Path) -> dict[str, Knob]:
    """The GPU's clock, where its frequencies are stated."""
    folder = _gpu_folder(root)
    if folder is None:
        return {}
    try:
        words = (folder / "available_frequencies").read_text("ascii").split()
    except (OSError, UnicodeDecodeError):
        return {}
    steps = [int(word) for word in words if NUMBER.fullmatch(word)]
    if not steps:
        return {}
    limit, floor = folder / "max_freq", folder / "min_freq"
    return {"gpu": Knob("gpu", limit, floor, min(steps), max(steps), "Hz")}


def modes(root: Path) -> dict[int, str]:
    """nvpmodel's power modes, by id."""
    try:
        text = (root / "etc/nvpmodel.conf").read_text("utf-8", "replace")[:262144]
    except OSError:
        return {}
    pairs = re.findall(r"<\s*POWER_MODEL\s+ID=(\d{1,3})\s+NAME=([\w.-]{1,40})\s*>", text)
    return {int(number): name for number, name in pairs}


def kernel_throttles(root: Path) -> bool:
    """Does the kernel itself hold a processor's clock down now?"""
    for folder in (root / "sys/class/thermal").glob("cooling_device*"):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            kind = (folder / "type").read_text("ascii")
            clock = re.match(r"(thermal-)?(cpufreq|devfreq)|Processor|cpu", kind)
            if clock and read_number(folder / "cur_state"):
                return True
    return False


class Caps:
    """Limits of clocks: what was there, what is wanted, what is written.

    `baseline` is each limit as it was without us. While the kernel throttles, its file shows less
    than what was set; then the value of an earlier look is kept.
    """

    def __init__(self, root: Path, saved: Path) -> None:
        self._root, self._saved_path = root, saved
        self.saved: dict[str, int] = {}  # originals of what is capped now, as in the file
        self._written: dict[str, int] = {}
        self._baseline: dict[str, int] = {}
        self.broken: set[str] = set()  # could not be undone yet
        self.recover()
        self.look()

    def knobs(self) -> dict[str, Knob]:
        """Every clock that can be capped now."""
        return {**cpu_knobs(self._root), **gpu_knob(self._root)}

    def look(self) -> None:
        """Take over limits as they stand, where nothing of ours is in force."""
        hot = kernel_throttles(self._root)
        for key, knob in self.knobs().items():
            value = read_number(knob.limit)
            if value is None or key in self.saved:
                continue
            if not hot or value > self._baseline.get(key, 0):
                self._baseline[key] = value

    def apply(self, wanted: dict[str, int], who: str) -> None:
        """Make these the caps in force; others end. Raises Refused at the first that fails."""
        knobs = self.knobs()
        for key in [key for key in self.saved if key not in wanted]:
            self.restore(key, who)
        for key, value in wanted.items():
            if key in knobs:
                self._cap(knobs[key], value, who)

    def _cap(self, knob: Knob, value: int, who: str) -> None:
        original = self.saved.get(knob.key)
        if original is None:
            self.look()
            original = self._baseline.get(knob.key)
        if original is None:
            raise Refused(f"{knob.key}: its limit cannot be read; see {knob.limit}")
        value = min(value, original)
        if value == self._written.get(knob.key) and value == read_number(knob.limit):
            return
        if knob.key not in self.saved:
            self.saved[knob.key] = original
            self._save()
        self._write(knob, value, who, original)
        self._written[knob.key] = read_number(knob.limit) or value
        self.broken.discard(knob.key)

    def _write(self, knob: Knob, value: int, who: str, original: int) -> None:
        try:
            write_number(knob.limit, value)
        except OSError as error:
            text = f"{knob.key}: {value} {knob.unit} was not taken: {error.strerror}"
            raise Refused(f"{text}; see dmesg") from None
        say(f"audit: {who}: {knob.key} at most {value} {knob.unit} (was {original})")

    def restore(self, key: str, who: str, crashed: bool = False) -> bool:
        """Undo one cap. False if that has to be tried again."""
        original = self.saved[key]
        knob = self.knobs().get(key)
        if knob is None:
            if key not in self.broken:
                say(f"{key}: not there now; its limit is restored when it returns")
            self.broken.add(key)
            return False
        current = read_number(knob.limit)
        written = None if crashed else self._written.get(key)
        foreign = written is not None and current is not None and current != written
        if foreign and not kernel_throttles(self._root):
            say(f"audit: {who}: {key} left at {current} {knob.unit}: somebody else has set it")
            self._baseline.pop(key, None)
        else:
            try:
                write_number(knob.limit, original)
            except OSError as error:
                if key not in self.broken:
                    say(f"{key}: not restored: {error.strerror}; trying again")
                self.broken.add(key)
                return False
            say(f"audit: {who}: {key} restored to {original} {knob.unit}")
            self._baseline[key] = original
        self._forget(key)
        return True

    def _forget(self, key: str) -> None:
        del self.saved[key]
        self._written.pop(key, None)
        self.broken.discard(key)
        try:
            self._save()
        except Refused as error:  # the clocks come first
            say(str(error))

    def recover(self) -> None:
        """Undo what an earlier process that was killed has left."""
        try:
            with self._saved_path.open("rb") as stream:
                old = json.loads(stream.read(65536))
            pairs = dict(old["limits"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            say(f"{self._saved_path}: damaged; limits stay as they are, set them by hand")
            return
        for key, value in pairs.items():
            plain = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if plain and re.fullmatch(r"gpu|cpu:policy\d{1,4}", key):
                self.saved[key] = value
        for key in list(self.saved):
            self.restore(key, "start after a crash", crashed=True)

    def retry(self) -> None:
        """Try again what could not be undone."""
        for key in list(self.broken):
            self.restore(key, "retry", crashed=True)

    def _save(self) -> None:
        """The file holds what is capped; without caps there is none. Raises Refused."""
        try:
            if not self.saved:
                self._saved_path.unlink(missing_ok=True)
                return
            scratch = self._saved_path.with_suffix(".tmp")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(scratch, flags, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as stream:
                json.dump({"limits": self.saved}, stream)
            scratch.replace(self._saved_path)
        except OSError as error:
            text = f"{self._saved_path}: {error.strerror}; without it nothing is capped"
            raise Refused(text) from None


@dataclass
class Client:
    """A connection, its caps and its limits."""

    link: socket.socket
    who: str
    heard_s: float
    caps: dict[str, int] = field(default_factory=dict)
    pending: bytearray = field(default_factory=bytearray)
    tokens: float = BURST
    refused: int = 0


def decode(line: bytes) -> tuple[int | str | None, dict[str, Any]]:
    """(id, the rest) of a request. Raises Refused."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise Refused("request: no JSON; send one object a line") from None
    if not isinstance(request, dict):
        raise Refused("request: no object; send one object a line")
    number = request.pop("id", None)
    if isinstance(number, bool) or not isinstance(number, (int, str, type(None))):
        raise Refused("id: neither a number nor a text; send one of these")
    if len(str(number)) > 64:
        raise Refused("id: more than 64 characters; send a shorter one")
    return number, request


def check(request: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """(verb, fields) of a request. Raises Refused."""
    verb = request.pop("verb", None)
    known = VERBS.get(verb) if isinstance(verb, str) else None
    if known is None:
        raise Refused(f"verb: unknown; use one of {', '.join(VERBS)}")
    for name, value in request.items():
        if name not in known:
            raise Refused(f"{verb}: an unknown field; it takes {', '.join(known) or 'none'}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 10**12:
            raise Refused(f"{verb}: {name} is no whole number; send 0 to 10^12")
    missing = [name for name, needed in known.items() if needed and name not in request]
    if missing:
        raise Refused(f"{verb}: {missing[0]} is missing; send it")
    return str(verb), request


class Helper:
    """Clients and their caps. `clock` in seconds. For one thread."""

    def __init__(
        self, root: Path, saved: Path, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root, self._clock = root, clock
        self.caps = Caps(root, saved)
        self.clients: dict[int, Client] = {}
        self._retry_s = 0.0

    def wanted(self) -> dict[str, int]:
        """The lowest cap of any client, for each clock."""
        lowest: dict[str, int] = {}
        for client in self.clients.values():
            for key, value in client.caps.items():
                lowest[key] = min(value, lowest.get(key, value))
        return lowest

    def answer(self, client: Client, line: bytes) -> dict[str, Any]:
        """Do what a line says."""
        number: int | str | None = None
        allowed = self._spend(client)
        try:
            number, request = decode(line)
            if not allowed:
                raise Refused(f"request: more than {PER_S:g} a second; wait")
            verb, fields = check(request)
            client.heard_s = self._clock()
            result = getattr(self, f"_do_{verb}")(client, fields)
        except Refused as error:
            return {"id": number, "ok": False, "error": str(error)}
        return {"id": number, "ok": True, "result": result}

    def _spend(self, client: Client) -> bool:
        """Take one message off the connection's allowance, if there is one left."""
        if client.tokens < 1:
            client.refused += 1
            return False
        client.tokens -= 1
        return True

    def refill(self, seconds: float) -> None:
        """Time has passed."""
        for client in self.clients.values():
            client.tokens = min(BURST, client.tokens + seconds * PER_S)

    def _do_cap_cpu(self, client: Client, fields: dict[str, int]) -> dict[str, Any]:
        knobs = cpu_knobs(self._root)
        if "policy" in fields:
            name = f"cpu:policy{fields['policy']}"
            if name not in knobs:
                raise Refused(f"{name}: there is none; there are: {', '.join(knobs) or 'none'}")
            knobs = {name: knobs[name]}
        return self._cap(client, knobs, fields["khz"])

    def _do_cap_gpu(self, client: Client, fields: dict[str, int]) -> dict[str, Any]:
        return self._cap(client, gpu_knob(self._root), fields["hz"])

    def _cap(self, client: Client, knobs: dict[str, Knob], value: int) -> dict[str, Any]:
        if not knobs:
            raise Refused("clock: this machine has none that can be capped; leave it")
        low = min(knob.low for knob in knobs.values())
        high = max(knob.high for knob in knobs.values())
        if not low <= value <= high:
            name = next(iter(knobs)) if len(knobs) == 1 else "cpu"
            text = f"{name}: {value} {next(iter(knobs.values())).unit} is out of range"
            raise Refused(f"{text}; send {low} to {high}")
        # Of several clusters each is capped within its own range.
        wanted = {key: max(knob.low, min(knob.high, value)) for key, knob in knobs.items()}
        for key, knob in knobs.items():
            self._check(knob, wanted[key])
        before = dict(client.caps)
        client.caps |= wanted
        try:
            self.caps.apply(self.wanted(), client.who)
        except Refused:
            client.caps = before
            with contextlib.suppress(Refused):
                self.caps.apply(self.wanted(), client.who)
            raise
        return {"caps": self.wanted()}

    def _check(self, knob: Knob, value: int) -> None:
        """Is there room above the lower limit that is set?"""
        floor = read_number(knob.floor)
        if floor is not None and floor > value:
            text = f"{knob.key}: its lower limit is {floor} {knob.unit}"
            raise Refused(f"{text}; lower that first (jetson_clocks --restore)")

    def _do_nvpmodel(self, client: Client, fields: dict[str, int]) -> dict[str, Any]:
        known, mode = modes(self._root), fields["mode"]
        if mode not in known:
            text = ", ".join(f"{n} ({name})" for n, name in known.items()) or "none"
            raise Refused(f"nvpmodel: mode {mode} is unknown; there are: {text}")
        for other in self.clients.values():
            other.caps.clear()  # the mode brings limits of its own
        self.caps.apply({}, client.who)
        program = str(self._root / "usr/sbin/nvpmodel")
        try:
            done = subprocess.run(
                [program, "-m", str(mode)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                timeout=NVPMODEL_S, check=False, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Refused(f"nvpmodel: {error}; run it by hand") from None
        if done.returncode:
            raise Refused(
                f"nvpmodel: exit code {done.returncode}; run it by hand, it may need a reboot"
            )
        say(f"audit: {client.who}: nvpmodel {mode} ({known[mode]})")
        self.caps.look()
        return {"mode": mode, "name": known[mode]}

    def _do_restore(self, client: Client, fields: dict[str, int]) -> dict[str, Any]:
        client.caps.clear()
        self.caps.apply(self.wanted(), client.who)
        return {"caps": self.wanted()}

    def _do_status(self, client: Client, fields: dict[str, int]) -> dict[str, Any]:
        clocks = {
            key: {
                "low": knob.low,
                "high": knob.high,
                "unit": knob.unit,
                "limit": read_number(knob.limit),
                "original": self.caps.saved.get(key),
            }
            for key, knob in self.caps.knobs().items()
        }
        return {
            "caps": self.wanted(),
            "clocks": clocks,
            "modes": {str(number): name for number, name in modes(self._root).items()},
            "lease_s": LEASE_S,
            "unrestored": sorted(self.caps.broken),
        }

    def drop(self, descriptor: int, why: str) -> None:
        """A connection has ended: its caps end."""
        client = self.clients.pop(descriptor, None)
        if client is not None and client.caps:
            self._end(client, why)

    def _end(self, client: Client, why: str) -> None:
        client.caps.clear()
        try:
            self.caps.apply(self.wanted(), f"{client.who}, {why}")
        except Refused as error:  # another client's cap
            say(str(error))

    def tick(self) -> float:
        """End what has run out. Seconds until this is needed again."""
        now = self._clock()
        for client in self.clients.values():
            if client.caps and now - client.heard_s >= LEASE_S:
                self._end(client, f"silent for {LEASE_S:g} s")
        if self.caps.broken and now >= self._retry_s:
            self._retry_s = now + RETRY_S
            self.caps.retry()
        return 1.0 if self.caps.saved else 3600.0

    def close(self) -> None:
        """Undo every cap."""
        for client in self.clients.values():
            client.caps.clear()
        self.caps.apply({}, "stop")


# Sockets


def peer(link: socket.socket) -> tuple[int, int, set[int]]:
    """(process, user, groups) of the other end, as the kernel knows them."""
    process, user, group = peer_of(link)
    return process, user, {group, *(groups_of(link) or ())}


class Server:
    """The socket and its connections."""

    def __init__(self, helper: Helper, listener: socket.socket, group: int, user: int) -> None:
        self._helper, self._listener = helper, listener
        self._group, self._user = group, user
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._refused: deque[socket.socket] = deque()
        self._ending = False

    def watch(self, wake: socket.socket) -> None:
        """End when this becomes readable: a signal has come."""
        self._selector.register(wake, selectors.EVENT_READ, self._end)

    def _end(self, link: socket.socket) -> None:
        self._ending = True

    def run(self) -> None:
        """Serve until the end."""
        before = time.monotonic()
        while not self._ending:
            wait = self._helper.tick()
            for key, _ in self._selector.select(wait):
                now = time.monotonic()
                self._helper.refill(now - before)
                before = now
                key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        try:
            link, _ = listener.accept()
        except OSError:
            return
        link.setblocking(False)
        process, user, groups = peer(link)
        if user not in (0, self._user) and self._group not in groups:
            say(f"audit: uid {user} pid {process}: refused, not in the group")
            self._refuse(link, "caller: not in the group; add it, or use --user")
        elif len(self._helper.clients) >= MAX_CLIENTS:
            self._refuse(link, f"connections: {MAX_CLIENTS} are open; close one")
        else:
            client = Client(link, f"uid {user} pid {process}", time.monotonic())
            self._helper.clients[link.fileno()] = client
            self._selector.register(link, selectors.EVENT_READ, self._read)

    def _refuse(self, link: socket.socket, sentence: str) -> None:
        """Say why; its request may still come, and must find no closed door before it reads."""
        with contextlib.suppress(OSError):
            link.send(json.dumps({"id": None, "ok": False, "error": sentence}).encode() + b"\n")
            link.shutdown(socket.SHUT_WR)
        self._refused.append(link)
        if len(self._refused) > MAX_CLIENTS:
            self._refused.popleft().close()

    def _read(self, link: socket.socket) -> None:
        client = self._helper.clients[link.fileno()]
        try:
            chunk = link.recv(MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._close(link, "its connection has ended")
            return
        client.pending += chunk
        while b"\n" in client.pending:
            line, _, rest = client.pending.partition(b"\n")
            client.pending = rest
            if not self._reply(client, self._helper.answer(client, bytes(line))):
                return
        if len(client.pending) > MAX_LINE:
            sentence = f"request: more than {MAX_LINE} bytes without an end; send shorter lines"
            if self._reply(client, {"id": None, "ok": False, "error": sentence}):
                self._close(link, "its line was too long")

    def _reply(self, client: Client, reply: dict[str, Any]) -> bool:
        """False if the connection has ended: nobody reads, or it asks without end."""
        raw = json.dumps(reply, separators=(",", ":")).encode() + b"\n"
        try:
            sent = client.link.send(raw)
        except OSError:
            sent = 0
        if sent < len(raw) or client.refused > MAX_REFUSED:
            self._close(client.link, "it does not read, or asks too often")
            return False
        return True

    def _close(self, link: socket.socket, why: str) -> None:
        self._selector.unregister(link)
        self._helper.drop(link.fileno(), why)
        link.close()

    def close(self) -> None:
        """Undo everything, then let go of the connections."""
        self._helper.close()
        for link in (*(client.link for client in self._helper.clients.values()), *self._refused):
            link.close()
        self._listener.close()
        self._selector.close()


def _number_of(name: str, look: Callable[[str], int]) -> int:
    if NUMBER.fullmatch(name):
        return int(name)
    try:
        return look(name)
    except KeyError:
        raise Refused(f"{name}: no such group or user; make it, or name another") from None


def listen(path: Path, group: int) -> socket.socket:
    """The listening socket, for the group. Raises Refused."""
    try:
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        if path.stat().st_gid != group:  # under systemd it is the process's group already
            os.chown(path, -1, group)
        path.chmod(0o660)
        listener.listen(MAX_CLIENTS)
        listener.setblocking(False)
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}; name another with --socket") from None
    return listener


def _alone(folder: Path) -> int:
    """A lock for as long as this process lives. Raises Refused."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused(f"{folder}: another gemctl-powerd runs; stop it first") from None
    except OSError as error:
        raise Refused(f"{folder}: {error.strerror}; make the folder, owned by root") from None
    return descriptor


def serve(path: Path, root: Path, group: int, user: int) -> None:
    """Run until SIGTERM or SIGINT. Raises Refused."""
    lock = _alone(path.parent)
    wake, alarm = socket.socketpair()
    alarm.setblocking(False)
    signal.set_wakeup_fd(alarm.fileno())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    helper = Helper(root, path.parent / "saved.json")
    server = Server(helper, listen(path, group), group, user)
    server.watch(wake)
    say(f"ready: {path}")
    try:
        server.run()
    finally:
        server.close()
        path.unlink(missing_ok=True)
        os.close(lock)


def main(arguments: list[str] | None = None) -> int:
    """Entry point. 0: ended by a signal; 1: could not start."""
    parser = argparse.ArgumentParser(
        prog="gemctl-powerd", description="caps clocks for gemctld; everything is undone at its end"
    )
    parser.add_argument("--socket", type=Path, default=Path("/run/gemctl-powerd/powerd.sock"))
    parser.add_argument("--sysfs-root", type=Path, default=Path("/"), help="put before /sys, /etc")
    parser.add_argument("--group", default="gemctl", help="whose members may ask")
    parser.add_argument("--user", default="0", help="who may ask besides root")
    options = parser.parse_args(arguments)
    try:
        group = _number_of(options.group, lambda name: grp.getgrnam(name).gr_gid)
        user = _number_of(options.user, lambda name: pwd.getpwnam(name).pw_uid)
        serve(options.socket, options.sysfs_root, group, user)
    except Refused as error:
        say(f"gemctl-powerd: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
