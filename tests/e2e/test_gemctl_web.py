"""The status page and the figures over real sockets; the page in a real browser, headless.

The browser is driven through its debugging pipe: what it draws, what its console says, and every
request that it makes. Figures come from a stand-in for the daemon's service.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gemctl.errors import ApiError
from gemctl.events import EventHub
from gemctl.service import Caller, Emit
from gemctl.show import web
from gemctl.show.history import History
from gemctl.show.metrics import Metrics, Prometheus
from gemctl.show.web import MAX_CONNECTIONS, MAX_HEAD, StatusServer, content_policy, parse_listen

PATIENCE_S = 60.0
# The page refreshes ten times as often here as it says.
QUICKER = "const later = setTimeout; setTimeout = (f, ms) => later(f, ms === 2000 ? 200 : ms);"
MARKUP = '<img src="x" onerror="document.title=1">'


class Figures:
    """Stands for the daemon; its methods must never be called from the page."""

    def __init__(self) -> None:
        self.value: dict[str, Any] = {
            "ttft_ms": 378.2, "throughput_tps": 12.34, "kv_cache_used": 212, "temp_c": 68.4,
            "v": 1, "ts": 1.0, "model": "gemma", "digest": "ab", "state": "serving",
            "throttle": {
                "mode": "balanced", "level": 2, "duty": 0.74, "reason": "68.4 C, threshold 75 C",
                "threshold_c": 75.0, "predicted_c": 74.6,
            },
            "power_w": 9.83, "energy_per_token_j": 0.797,
            "requests": {"active": 1, "queued": 3, "done": 1203, "failed": 2}, "swap": {},
            "kv_cache_size": 1024, "kv_cache_used_bytes": 1, "kv_cache_hit_ratio": None,
            "ttft_p50_ms": 371.0, "ttft_p95_ms": 442.0,
        }  # fmt: skip

    def stats(self) -> dict[str, Any]:
        return self.value

    async def call(
        self,
        method: str,
        params: Mapping[str, Any],
        caller: Caller,
        emit: Emit | None = None,
    ) -> dict[str, Any]:
        raise AssertionError(f"{method} was called: the page is to read only")


def an_hour() -> History:
    """Plausible figures, with a gap of two minutes."""
    history = History()
    for second in range(3600):
        level = second // 400 % 4
        gap = 2000 < second < 2120
        celsius = 50 + 20 * (1 - math.exp(-second / 700)) + 3 * math.sin(second / 190)
        history.add(
            1000.0 + second,
            {
                "temp_c": None if gap else celsius,
                "predicted_c": None if gap else celsius + 2,
                "threshold_c": 75.0,
                "throughput_tps": None if gap else 14.0 - 2 * level,
                "throttle_level": level,
                "duty": 1 - 0.13 * level,
            },
        )
    return history


class Site:
    """A server in a thread of its own, with the loop that it needs."""

    def __init__(self, listen: str = "127.0.0.1:0", metrics: Metrics | None = None) -> None:
        self.figures, self.history, self.hub = Figures(), an_hour(), EventHub()
        self.hub.publish("slot.state", model="gemma", cause="load")
        self.metrics = metrics or Prometheus()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.server: StatusServer | None = None
        self.port = 0
        self.start(listen)

    def run(self, work: Awaitable[Any]) -> Any:
        async def waited() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(waited(), self.loop).result(PATIENCE_S)

    def start(self, listen: str) -> None:
        self.server = StatusServer(self.figures, self.history, self.hub, self.metrics)
        self.run(self.server.start(listen))
        self.port = self.server.port

    def stop(self) -> None:
        assert self.server is not None
        self.run(self.server.close())

    def close(self) -> None:
        self.stop()
        self.run(self._end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(PATIENCE_S)
        self.loop.close()

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


def connect(place: int | Path) -> socket.socket:
    if isinstance(place, Path):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(PATIENCE_S)
        link.connect(str(place))
        return link
    return socket.create_connection(("127.0.0.1", place), PATIENCE_S)


def exchange(place: int | Path, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of the answer to raw bytes."""
    with connect(place) as link, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        link.sendall(raw)
        return answer(link)
    raise AssertionError("no answer")


def answer(link: socket.socket) -> tuple[int, dict[str, str], bytes]:
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := link.recv(65536):
            got += chunk
    head, _, body = got.partition(b"\r\n\r\n")
    first, *rest = head.decode("ascii").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in rest)
    assert int(headers["content-length"]) == len(body)
    return int(first.split()[1]), headers, body


def get(place: int | Path, path: str, host: str = "localhost") -> tuple[int, dict[str, str], bytes]:
    return exchange(place, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())


# Answers


def test_figures_history_events(site: Site) -> None:
    status, headers, body = get(site.port, "/stats.json")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert body.startswith(b'{"ttft_ms":378.2,"throughput_tps":12.34,"kv_cache_used":212,"temp_c"')
    assert json.loads(body) == site.figures.value
    past = json.loads(get(site.port, "/history.json")[2])
    assert (past["seconds"], past["step_s"], len(past["t"])) == (3600, 10, 360)
    past = json.loads(get(site.port, "/history.json?seconds=60&step_s=1")[2])
    assert past["t"] == list(range(-59, 1))
    for n in range(300):
        site.run(_publish(site.hub, n))
    events = json.loads(get(site.port, "/events.json")[2])
    assert len(events["events"]) == web.EVENTS
    assert events["last"] == 301
    assert json.loads(get(site.port, "/events.json?after=300")[2])["events"] == [
        site.hub.recent(300)[0].as_dict()
    ]


async def _publish(hub: EventHub, number: int) -> None:
    hub.publish("throttle.level", level=number)


def test_metrics_and_their_absence(site: Site) -> None:
    site.metrics.tokens("lm", 7)
    status, headers, body = get(site.port, "/metrics")
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert b'gemctl_tokens_total{model="lm"} 7.0' in body
    off = Site(metrics=Metrics())
    status, _, body = get(off.port, "/metrics")
    off.close()
    assert (status, body[:13]) == (503, b"metrics: off;")


def test_headers_of_every_answer(site: Site) -> None:
    for path in ("/", "/stats.json", "/metrics", "/nowhere"):
        headers = get(site.port, path)[1]
        assert headers["connection"] == "close"
        assert headers["cache-control"] == "no-store"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers


def test_the_policy_names_the_page_s_own_parts() -> None:
    page = b"<style>a{}</style><script>1</script>"
    policy = content_policy(page)
    assert "script-src 'sha256-a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s='" in policy
    assert content_policy(b"").count("'none'") == 6


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"PUT /stats.json HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n Host: localhost\r\n\r\n", 400),
        (b"GET http://localhost/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /../page.html HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET //stats.json HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /history.json?seconds=x HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /history.json?seconds=-1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /history.json?" + b"a=1&" * 20 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 9000, 431),
    ],
)
def test_other_requests(raw: bytes, status: int, site: Site) -> None:
    got, _, body = exchange(site.port, raw)
    assert got == status
    assert re.fullmatch(rb"[^\n]+; [^\n]+\n", body)
    assert get(site.port, "/")[0] == 200


@pytest.mark.parametrize(
    ("hosts", "allowed"),
    [
        (["localhost"], True), (["LOCALHOST:9464"], True), (["127.0.0.1:8080"], True),
        (["[::1]:9464"], True), (["127.1.2.3"], True),
        (["attacker.example"], False), (["127.0.0.1.attacker.example"], False),
        (["localhost.attacker.example"], False), (["localhost:80@attacker.example"], False),
        (["10.0.0.7"], False), ([""], False), ([], False), (["localhost", "localhost"], False),
        (["0.0.0.0"], False), (["[::]"], False), (["localhost:"], False),
    ],
)  # fmt: skip
def test_names_of_other_sites_are_refused(hosts: list[str], allowed: bool, site: Site) -> None:
    lines = "".join(f"Host: {host}\r\n" for host in hosts)
    status = exchange(site.port, f"GET /stats.json HTTP/1.1\r\n{lines}\r\n".encode())[0]
    assert status == (200 if allowed else 403)


@pytest.mark.parametrize(
    ("listen", "place"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)), ("[::1]:0", ("::1", 0)),
        ("localhost:80", ("127.0.0.1", 80)), ("127.9.9.9:1", ("127.9.9.9", 1)),
        ("unix:/run/gemctl/metrics.sock", Path("/run/gemctl/metrics.sock")),
    ],
)  # fmt: skip
def test_places(listen: str, place: object) -> None:
    assert parse_listen(listen) == place


@pytest.mark.parametrize(
    "listen",
    ["0.0.0.0:80", "[::]:80", "192.168.1.5:80", "10.0.0.1:80", "[fe80::1]:80", "board:80", ":80",
     "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:x", "unix:relative", "unix:/" + "a" * 200,
     "unix:/a\0b", "[::ffff:10.0.0.1]:80", "1.2.3:80", "999.0.0.1:80"],
)  # fmt: skip
def test_places_that_others_reach_are_refused(listen: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_listen(listen)
    assert caught.value.code == "bad_request"
    assert caught.value.message.endswith("; use 127.0.0.1:PORT, [::1]:PORT or unix:/PATH")


def test_a_place_that_is_taken(site: Site) -> None:
    with pytest.raises(ApiError, match="choose another place") as caught:
        Site(f"127.0.0.1:{site.port}")
    assert caught.value.code == "failed"


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()  # what a crash leaves
    made = Site(f"unix:{path}")
    assert path.stat().st_mode & 0o777 == 0o660
    assert get(path, "/stats.json")[0] == 200
    assert get(path, "/stats.json", "attacker.example")[0] == 403
    made.close()
    assert not path.exists()
    path.write_text("precious")
    with pytest.raises(ApiError, match="something else is there"):
        Site(f"unix:{path}")
    assert path.read_text() == "precious"


def test_serve_ends_when_told(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"

    async def run() -> None:
        stop = asyncio.Event()
        work = asyncio.create_task(
            web.serve(f"unix:{path}", Figures(), History(), EventHub(), Metrics(), stop)
        )
        while not path.exists():
            await asyncio.sleep(0.01)
        stop.set()
        await work
        assert not path.exists()

    asyncio.run(run())


# Callers that misbehave


def test_slow_and_silent_callers_are_let_go(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "TIMEOUT_S", 0.3)
    silent, slow = connect(site.port), connect(site.port)
    slow.sendall(b"GET / HT")
    for link in (silent, slow):
        with link:
            status, _, body = answer(link)
            assert status == 408
            assert body.startswith(b"request: not whole after 0.3 s")


def test_callers_that_leave(site: Site) -> None:
    for raw in (b"", b"GET", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        for _ in range(20):
            with connect(site.port) as link:
                link.sendall(raw)
                linger = struct.pack("ii", 1, 0)  # a reset instead of a goodbye
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    _until(lambda: get(site.port, "/")[0] == 200, "no room again")
    _until(lambda: site.server is not None and site.server._open == 0, "connections stay open")


def test_a_caller_that_never_reads(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "TIMEOUT_S", 0.3)
    site.figures.value = {"x": "y" * 20_000_000}
    with connect(site.port) as link:
        link.sendall(b"GET /stats.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        _until(lambda: site.server is not None and site.server._open == 1, "not begun")
        _until(lambda: site.server is not None and site.server._open == 0, "it is waited for")


def test_at_most_32_connections(site: Site) -> None:
    held = [connect(site.port) for _ in range(MAX_CONNECTIONS)]
    _until(
        lambda: site.server is not None and site.server._open == MAX_CONNECTIONS, "not connected"
    )
    status, _, body = get(site.port, "/")
    assert status == 503
    assert body.startswith(b"connections: 32 are open;")
    for link in held:
        link.close()
    _until(lambda: get(site.port, "/")[0] == 200, "no room again")


def test_figures_that_cannot_be_shown(site: Site) -> None:
    site.figures.value = {"x": math.nan}
    assert get(site.port, "/stats.json")[0] == 500
    site.figures.value = {"x": object()}
    assert get(site.port, "/stats.json")[0] == 500
    assert get(site.port, "/")[0] == 200


def test_exactly_the_limit(site: Site) -> None:
    start = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "
    fits = start + b"a" * (MAX_HEAD - len(start) - 4) + b"\r\n\r\n"
    assert len(fits) == MAX_HEAD
    assert exchange(site.port, fits)[0] == 200
    assert exchange(site.port, fits.replace(b"X: ", b"X: aaaaa"))[0] == 431


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


# The page's text


def test_the_page_has_no_other_sources() -> None:
    page = web.PAGE.read_text("utf-8")
    assert page.count("http") == 1  # the name of SVG, which nobody fetches
    assert "http://www.w3.org/2000/svg" in page
    for word in (
        *("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "style=", "src="),
        *("@import", "url(", "onclick", "XMLHttpRequest", "localStorage"),
    ):
        assert word not in page, word
    assert "EVERY_MS = 2000" in page
    assert '<link rel="icon" href="data:,">' in page  # else a browser asks for /favicon.ico
    assert page.count("<script>") == page.count("<style>") == 1
    assert len(page) < 24_000


# The browser


class Browser:
    """Chromium without a window, spoken to through file descriptors 3 and 4."""

    def __init__(self, profile: Path) -> None:
        program = shutil.which("chromium")
        if program is None:
            pytest.fail("chromium: not installed; run 'make test', or apt-get install chromium")
        down_read, self._down = os.pipe()
        self._up, up_write = os.pipe()

        def place() -> None:
            high = [os.dup(down_read), os.dup(up_write)]
            for number, descriptor in enumerate(high, 3):
                os.dup2(descriptor, number)

        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--remote-debugging-pipe", "--disable-dev-shm-usage", "--disable-extensions",
             "--disable-background-networking", "--disable-component-update",
             f"--user-data-dir={profile}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            preexec_fn=place, pass_fds=(3, 4, down_read, up_write), start_new_session=True,
        )  # fmt: skip
        os.close(down_read)
        os.close(up_write)
        self._pending = b""
        self._number = 0
        self._session = ""
        self.console: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=QUICKER)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol; events that come before its answer are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._down, json.dumps(message).encode() + b"\0")
        while True:
            got = self._receive()
            if got.get("id") == self._number:
                assert "error" not in got, got
                result: dict[str, Any] = got["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            chunk = os.read(self._up, 1 << 20)
            assert chunk, "the browser has ended"
            self._pending += chunk
        raw, _, self._pending = self._pending.partition(b"\0")
        got: dict[str, Any] = json.loads(raw)
        self._note(got.get("method", ""), got.get("params", {}))
        return got

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled":
            self.console.append(str(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.console.append(str(params["entry"]["text"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, expression: str) -> None:
        _until(lambda: bool(self.value(expression)), f"never true: {expression}")

    def look(self, width: int, height: int, scheme: str, url: str) -> None:
        """Open the page in a window of a size, light or dark, and wait for its first figures."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.call("Page.navigate", url=url)
        self.until("document.querySelectorAll('.plot > svg .curve').length === 6")

    def picture(self) -> bytes:
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._session = ""
            self.call("Browser.close")
        try:
            self.process.wait(PATIENCE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            os.close(self._down)
            os.close(self._up)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture
def page(site: Site, browser: Browser) -> Iterator[Browser]:
    """The page at 800x480, dark, with nothing noted yet."""
    browser.console.clear()
    browser.requests.clear()
    browser.look(800, 480, "dark", f"http://127.0.0.1:{site.port}/")
    yield browser
    browser.call("Page.navigate", url="about:blank")


def pixels(png: bytes) -> tuple[int, int, bytes]:
    """(width, height, RGB bytes) of an 8-bit PNG without interlacing."""
    place, data, width, height, kind = 8, b"", 0, 0, 0
    while place < len(png):
        size, name = struct.unpack(">I4s", png[place : place + 8])
        body = png[place + 8 : place + 8 + size]
        if name == b"IHDR":
            width, height, depth, kind = struct.unpack(">IIBB", body[:10])
            assert (depth, kind) in ((8, 2), (8, 6))
        elif name == b"IDAT":
            data += body
        place += 12 + size
    step = 3 if kind == 2 else 4
    raw, before, rows = zlib.decompress(data), bytes(width * step), []
    for row in range(height):
        start = row * (width * step + 1)
        before = _unfiltered(raw[start], raw[start + 1 : start + 1 + width * step], before, step)
        rows.append(before if step == 3 else _without_alpha(before))
    return width, height, b"".join(rows)


def _without_alpha(row: bytes) -> bytes:
    kept = bytearray(len(row) // 4 * 3)
    for channel in range(3):
        kept[channel::3] = row[channel::4]
    return bytes(kept)


def _unfiltered(kind: int, row: bytes, above: bytes, step: int) -> bytes:
    out = bytearray(row)
    for i in range(len(out)):
        left = out[i - step] if i >= step else 0
        up, corner = above[i], above[i - step] if i >= step else 0
        near = min((left, up, corner), key=lambda v: abs(left + up - corner - v))
        out[i] = (out[i] + (0, left, up, (left + up) // 2, near)[kind]) & 255
    return bytes(out)


def points(path: str) -> list[tuple[float, float]]:
    """Corners of a path of M, L, H and V."""
    x = y = 0.0
    found = []
    for letter, numbers in re.findall(r"([MLHVhZ])([-\d.,]*)", path):
        if letter in "ML":
            x, y = map(float, numbers.split(","))
        elif letter == "H":
            x = float(numbers)
        elif letter == "V":
            y = float(numbers)
        if letter in "MLHV":
            found.append((x, y))
    return found


def test_plots_are_drawn(page: Browser, site: Site) -> None:
    curves = page.value(
        "Object.fromEntries([...document.querySelectorAll('.plot > svg .curve')]"
        ".map(c => [c.classList[1], c.getAttribute('d')]))"
    )
    assert set(curves) == {"limit", "ahead", "temp", "speed", "level", "duty"}
    temperature = points(curves["temp"])
    assert len(temperature) > 300
    xs = [x for x, _ in temperature]
    assert xs == sorted(xs)
    assert max(xs) - min(xs) > 350
    assert curves["temp"].count("M") == 2, "the gap of two minutes is not one"
    # The curve is the history, from the axis' lowest to its highest figure.
    past = site.history.query(3600, 10)["series"]["temp_c"]
    known = [value for value in past if value is not None]
    ys = [y for _, y in temperature]
    span = (max(known) - min(known)) / (max(ys) - min(ys))
    for (_, y), value in zip(temperature, known, strict=True):
        assert value == pytest.approx(max(known) - (y - min(ys)) * span, abs=0.2)
    assert len({y for _, y in points(curves["limit"])}) == 1
    assert len({y for _, y in points(curves["level"])}) >= 4


def test_plots_are_seen(page: Browser) -> None:
    """Each curve's colour is really on the screen, in its own plot."""
    width, height, data = pixels(page.picture())
    assert (width, height) == (800, 480)
    boxes = page.value(
        "[...document.querySelectorAll('.plot > svg')].map(s => s.getBoundingClientRect().toJSON())"
    )
    for name, plot in (("temp", 0), ("limit", 0), ("ahead", 0), ("speed", 1), ("level", 2),
                       ("duty", 2)):  # fmt: skip
        colour = page.value(
            f"getComputedStyle(document.querySelector('.plot > svg .{name}')).stroke"
        )
        wanted = bytes(map(int, re.findall(r"\d+", colour)))
        box = boxes[plot]
        found = sum(
            data[(y * width + x) * 3 : (y * width + x) * 3 + 3] == wanted
            for y in range(int(box["top"]), int(box["bottom"]))
            for x in range(int(box["left"]), int(box["right"]))
        )
        assert found > 60, f"{name}: {found} pixels"


def test_nothing_but_its_own_server(page: Browser, site: Site) -> None:
    page.until("document.querySelectorAll('#list li').length === 1")
    asked = len(page.requests)
    _until(lambda: bool(page.value("1")) and len(page.requests) >= asked + 3, "no refresh")
    assert page.console == []
    base = f"http://127.0.0.1:{site.port}/"
    own = [url for url in page.requests if url.startswith(base)]
    assert [url for url in page.requests if url not in own] in ([], ["data:,"])
    names = {url[len(base) :].split("?")[0] for url in own}
    assert names == {"", "stats.json", "history.json", "events.json"}


def test_figures_are_shown_and_refreshed(page: Browser, site: Site) -> None:
    text = page.value("document.body.innerText")
    for part in ("gemma", "● serving", "balanced: 68.4 C, threshold 75 C", "68.4", "threshold 75",
                 "12.3", "tokens/s", "378", "p95 442 ms", "duty 74 %", "9.8", "0.80 J/token",
                 "3 waiting", "cache 212/1024", "slot.state"):  # fmt: skip
        assert part in text, part
    site.figures.value = {
        **site.figures.value, "temp_c": None, "power_w": None, "state": "faulted", "model": None,
    }  # fmt: skip
    page.until("document.querySelector('#state').textContent === '▲ faulted'")
    text = page.value("document.body.innerText")
    assert "no model" in text
    assert "null" not in text
    assert "undefined" not in text
    assert "NaN" not in text
    assert page.value("document.querySelector('#figures b').textContent") == "–"


def test_texts_of_data_are_no_markup(page: Browser, site: Site) -> None:
    site.figures.value = {
        **site.figures.value, "model": MARKUP, "state": MARKUP,
        "throttle": {"reason": MARKUP, "mode": MARKUP, "level": MARKUP, "duty": MARKUP},
    }  # fmt: skip
    site.loop.call_soon_threadsafe(lambda: site.hub.publish(MARKUP, **{MARKUP: [MARKUP]}))
    page.until("document.querySelector('#list').textContent.includes('<img')")
    page.until("document.querySelector('#model').textContent.includes('<img')")
    assert page.value("document.querySelectorAll('img').length") == 0
    assert page.console == []


def test_a_daemon_that_goes_and_comes(page: Browser, site: Site) -> None:
    for _ in range(5):
        site.run(_publish(site.hub, 1))
    page.until("document.querySelectorAll('#list li').length === 6")
    port = site.port
    site.stop()
    page.until("document.querySelector('#link').textContent.startsWith('no answer from gemctld')")
    assert page.value("document.body.className") == "stale"
    site.hub = EventHub()
    site.hub.publish("daemon.start")
    site.start(f"127.0.0.1:{port}")
    page.until("document.body.className === ''")
    page.until("document.querySelector('#list').textContent.includes('daemon.start')")


def test_events_are_bounded(page: Browser, site: Site) -> None:
    for number in range(150):
        site.run(_publish(site.hub, number))
    page.until("document.querySelector('#list small').textContent === 'level 149'")
    assert page.value("document.querySelectorAll('#list li').length") == 60


def cut_off(browser: Browser) -> list[str]:
    """Texts that are wider than their place."""
    found: list[str] = browser.value(
        "[...document.querySelectorAll('#figures dd, #figures dt, figcaption, header *')]"
        ".filter(e => e.scrollWidth > e.clientWidth && e.clientWidth).map(e => e.textContent)"
    )
    return found


@pytest.mark.parametrize(
    ("width", "height", "scrolls"),
    [(800, 480, False), (1024, 600, False), (1920, 1080, False), (360, 740, True)],
)
def test_it_fits_the_window(
    width: int, height: int, scrolls: bool, site: Site, browser: Browser
) -> None:
    browser.look(width, height, "light", f"http://127.0.0.1:{site.port}/")
    page = browser.value("(e => [e.scrollWidth, e.scrollHeight])(document.documentElement)")
    assert page[0] <= width
    assert (page[1] > height) is scrolls
    assert cut_off(browser) == []
    heights = browser.value(
        "[...document.querySelectorAll('.plot > svg')].map(s => s.clientHeight)"
    )
    assert min(heights) > 60


def test_a_time_is_pointed_at(page: Browser) -> None:
    box = page.value("document.querySelector('.plot > svg').getBoundingClientRect().toJSON()")
    x, y = box["left"] + box["width"] / 2, box["top"] + box["height"] / 2
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    page.until("document.querySelectorAll('.cursor').length === 3")
    text = page.value("document.querySelector('figcaption').innerText").split()
    assert text[2:4] == ["threshold", "75.0"]
    assert float(text[text.index("measured") + 1]) > 50
    times = page.value("[...document.querySelectorAll('text.at')].map(t => t.textContent)")
    assert times[0] == times[1] == times[2]
    assert re.fullmatch(r"−(2\d|3\d)\.\d min", times[0])
    assert cut_off(page) == []
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
    page.until("document.querySelectorAll('.cursor').length === 0")
    page.value("document.querySelectorAll('.plot > svg')[2].focus()")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft", code="ArrowLeft")
    page.until("document.querySelectorAll('text.at')[2]?.textContent === '−0.0 min'")


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_readable(scheme: str, site: Site, browser: Browser) -> None:
    """WCAG: 4.5 for text, 3 for what is drawn."""
    browser.look(800, 480, scheme, f"http://127.0.0.1:{site.port}/")
    browser.until("document.querySelectorAll('#list li').length === 1")
    style = "getComputedStyle(document.querySelector('{}')).{}"
    panel = browser.value(style.format(".plot", "backgroundColor"))
    back = browser.value(style.format("body", "backgroundColor"))
    assert (luminance(panel) > 0.5) is (scheme == "light")
    for place in (
        "#figures dt",
        "#figures b",
        "dd.note",
        "#list small",
        "#list time",
        "figcaption b",
    ):
        assert contrast(browser.value(style.format(place, "color")), panel) >= 4.5, place
    for place in ("#model", "#state", "#reason", "#link"):
        assert contrast(browser.value(style.format(place, "color")), back) >= 4.5, place
    for name in ("temp", "ahead", "limit", "speed", "level", "duty"):
        assert contrast(browser.value(style.format(f".curve.{name}", "stroke")), panel) >= 3, name
    for place in (".plot text", ".plot text.now"):
        assert contrast(browser.value(style.format(place, "fill")), panel) >= 4.5, place


def test_plots_speak(page: Browser) -> None:
    """For those who do not see them."""
    labels = page.value("[...document.querySelectorAll('.plot > svg')].map(s => s.ariaLabel)")
    assert re.fullmatch(
        r"Temperature, °C, last hour: threshold 75\.0, predicted [\d.]+, measured [\d.]+ now; "
        r"highest [\d.]+",
        labels[0],
    )
    assert labels[1].startswith("Throughput, tokens/s, last hour: generated ")
    assert labels[2].startswith("Throttle, last hour: level 0, duty 100 % now")


def test_without_any_figures_it_still_stands(site: Site, browser: Browser) -> None:
    site.history = History()
    site.figures.value = {}
    assert site.server is not None
    site.server._history = site.history
    browser.console.clear()
    browser.look(800, 480, "light", f"http://127.0.0.1:{site.port}/")
    assert "no model" in browser.value("document.body.innerText")
    assert browser.console == []
