"""gemctld with its real workers: answers, replacement, rollback, switching, crashes, restarts."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon import Daemon, answer_of, settled, wait_for
from gemctl.client import Refused

PROMPT = "abc"
SLOW = 0.005  # of the time: a tiny model's token takes 40 microseconds


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as made:
        yield made


def test_answers_are_the_engines(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    report = daemon.replace(versions[0], name="pilot")
    assert set(report["phases_ms"]) == {"stage", "verify", "prefault", "load", "warmup", "flip"}
    for prompt in (PROMPT, 'quotes " and \\ and \n lines', "ünïcödé 😀", "x" * 100):
        parts: list[str] = []
        with daemon.client() as client:
            fields = {"prompt": prompt, "max_tokens": 12, "temperature": 0.0}
            found = client.call(
                "generate",
                {**fields, "ignore_stop_ids": True},
                lambda event, parts=parts: parts.append(event.get("text", "")),
            )
        assert found["text"] == "".join(parts) == answer_of(versions[0], prompt, 12)
        assert found["generated_tokens"] == 12


def test_stats_begin_as_promised(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    daemon.replace(versions[0], name="pilot")
    used = daemon.ask(PROMPT)["kv_used"]
    text = daemon.gemctl("stats", "--json")
    assert text.startswith('{"ttft_ms": ')
    assert list(json.loads(text))[:4] == ["ttft_ms", "throughput_tps", "kv_cache_used", "temp_c"]
    assert json.loads(text)["kv_cache_used"] == used > 0
    daemon.gemctl("--auto-reset-kv-cache=0")
    daemon.ask(PROMPT)
    assert json.loads(daemon.gemctl("--json", "stats"))["kv_cache_used"] == 0


def test_replace_keeps_what_serves_and_rolls_back_by_hand(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    one, two = (answer_of(path, PROMPT) for path in versions)
    daemon.replace(versions[0], name="pilot")
    first = settled(daemon)["digest"]
    assert daemon.ask(PROMPT)["text"] == one
    daemon.replace(versions[1], name="pilot")
    assert daemon.ask(PROMPT)["text"] == two
    status = settled(daemon)
    assert status["current"] == status["digest"] != first
    assert status["previous"] == first
    assert len(daemon.workers()) == 1
    text = daemon.gemctl("model", "rollback")
    assert "answers now" in text or "done" in text
    assert daemon.ask(PROMPT)["text"] == one
    assert settled(daemon)["current"] == first


def test_a_candidate_that_dies_on_probation_is_rolled_back(
    versions: tuple[Path, Path],
) -> None:
    one, two = (answer_of(path, PROMPT) for path in versions)
    with Daemon(models={"probation_s": 60.0, "probation_requests": 1000}) as daemon:
        daemon.replace(versions[0], name="pilot")
        daemon.call("model.unload", name="pilot")  # its probation is not over, and stays so
        daemon.call("model.load", name="pilot")
        assert daemon.call("model.status", name="pilot")["on_probation"]
    with Daemon() as daemon:
        daemon.replace(versions[0], name="pilot")
        good = settled(daemon)["digest"]
        daemon.config.write_text(
            daemon.config.read_text().replace("probation_s = 1.0", "probation_s = 60.0"),
            encoding="utf-8",
        )
        daemon.gemctl("config", "reload")
        daemon.replace(versions[1], name="pilot")
        assert daemon.ask(PROMPT)["text"] == two
        status = daemon.call("model.status", name="pilot")
        os.kill(status["worker"]["pid"], signal.SIGKILL)
        wait_for(lambda: daemon.events("probation.bad"))
        assert daemon.ask(PROMPT)["text"] == one
        status = daemon.call("model.status", name="pilot")
        assert status["digest"] == status["current"] == good
        with pytest.raises(Refused, match="bad"):  # it is not taken again
            daemon.replace(versions[1], name="pilot")
        assert daemon.ask(PROMPT)["text"] == one


def test_requests_survive_their_worker(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    """kill -9 in the middle of an answer: the caller sees the whole answer, once."""
    daemon.replace(versions[0], name="pilot")
    whole = answer_of(versions[0], PROMPT, 150)
    settled(daemon)
    daemon.call("throttle.set", duty=SLOW)  # slow enough to be hit
    for _ in range(2):
        parts: list[str] = []
        pid = wait_for(daemon.workers)[0]

        def hear(event: dict[str, Any], parts: list[str] = parts, pid: int = pid) -> None:
            parts.append(event.get("text", ""))
            if len(parts) == 40:
                os.kill(pid, signal.SIGKILL)
                daemon.call("throttle.set", duty=1.0)

        daemon.call("throttle.set", duty=SLOW)
        with daemon.client() as client:
            fields = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0.0}
            found = client.call("generate", {**fields, "ignore_stop_ids": True}, hear)
        assert found["text"] == "".join(parts) == whole
    assert len(daemon.events("worker.restart")) == 2
    assert len(daemon.workers()) == 1


def test_a_worker_that_crashes_too_often_is_faulted(versions: tuple[Path, Path]) -> None:
    with Daemon(worker={"crashes": 2, "backoff_s": 0.02}) as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        for _ in range(2):
            wait_for(lambda: daemon.call("model.status", name="pilot")["state"] == "serving")
            for pid in daemon.workers():
                os.kill(pid, signal.SIGKILL)
            wait_for(lambda: daemon.call("model.status", name="pilot")["state"] != "serving")
        wait_for(lambda: daemon.call("model.status", name="pilot")["state"] == "faulted")
        with pytest.raises(Refused) as refused:
            daemon.ask(PROMPT, deadline_ms=500)
        assert refused.value.code in ("timeout", "failed", "conflict")
        daemon.gemctl("model", "clear", "pilot")
        daemon.gemctl("model", "load", "pilot")
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


def test_a_worker_that_hangs_is_replaced(versions: tuple[Path, Path]) -> None:
    """SIGSTOP: it neither answers nor ends."""
    with Daemon(worker={"hang_s": 1.0, "heartbeat_s": 0.1, "backoff_s": 0.02}) as daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        os.kill(daemon.workers()[0], signal.SIGSTOP)
        assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)
        assert "hung" in daemon.events("worker.exit")[0]["text"]


def test_the_watchdog_is_fed_while_all_is_well(
    versions: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a worker that hangs is ended by its heartbeat."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "n"))
        systemd.settimeout(20)
        with Daemon(worker={"hang_s": 1.0, "heartbeat_s": 0.1, "backoff_s": 0.02}) as daemon:
            assert systemd.recv(4096).startswith(b"READY=1")
            daemon.replace(versions[0], name="pilot")
            os.kill(daemon.workers()[0], signal.SIGSTOP)
            fed = 0
            while fed < 4:
                fed += systemd.recv(4096) == b"WATCHDOG=1"
            assert daemon.events("worker.exit")
            daemon.stop()
            while systemd.recv(4096) != b"STOPPING=1":
                pass


def test_switch_disable_enable(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    one, two = (answer_of(path, PROMPT) for path in versions)
    daemon.gemctl("model", "--replace", versions[0], "--name", "small")
    daemon.gemctl("model", "--replace", versions[1], "--name", "large")
    assert daemon.ask(PROMPT)["text"] == one
    daemon.gemctl("switch-model", "large")
    assert daemon.ask(PROMPT)["text"] == two
    assert daemon.ask(PROMPT, model="small")["text"] == one
    assert len(daemon.workers()) == 2
    before = daemon.workers()
    daemon.gemctl("model", "--disable")
    assert len(daemon.workers()) == 1
    assert set(daemon.workers()) < set(before)
    with pytest.raises(Refused):
        daemon.ask(PROMPT, deadline_ms=300)
    daemon.gemctl("model", "--enable", "--warmup-prompt", "Hello")
    assert daemon.ask(PROMPT)["text"] == two
    daemon.gemctl("model", "unload", "small")
    daemon.gemctl("switch-model", "small")  # loads it again
    assert daemon.ask(PROMPT)["text"] == one
    daemon.gemctl("switch-model", "nobody", code=6)


def test_state_survives_restarts_and_kills(versions: tuple[Path, Path]) -> None:
    daemon = Daemon()
    with daemon:
        daemon.replace(versions[0], name="pilot")
        settled(daemon)
        daemon.replace(versions[1], name="spare")
        settled(daemon, "spare")
        daemon.call("model.disable", name="spare")
        daemon.call("throttle.set", mode="conservative")
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
            workers = daemon.workers()
            daemon.stop(number)
            wait_for(lambda workers=workers: not any(_alive(pid) for pid in workers))
            daemon.start()
            wait_for(lambda: daemon.call("model.status", name="pilot")["state"] == "serving")
            assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)
            assert daemon.call("model.status", name="spare")["state"] == "disabled"
            assert daemon.call("throttle.get")["mode"] == "conservative"
            assert daemon.call("stats")["model"] == "pilot"


def test_starts_in_order_are_no_boot_loop(versions: tuple[Path, Path]) -> None:
    """A version stays on probation over any number of them; three that end by a kill drop it."""

    def start() -> dict[str, Any]:
        daemon.start()
        wait_for(lambda: daemon.call("model.status", name="pilot")["state"] == "serving")
        return daemon.call("model.status", name="pilot")

    daemon = Daemon(models={"probation_s": 900.0, "probation_requests": 100000})
    with daemon:
        daemon.replace(versions[0], name="pilot")
        daemon.call("model.disable", name="pilot")  # its probation goes on later
        daemon.call("model.enable", name="pilot")
        for _ in range(3):
            assert daemon.stop() == 0
            assert start()["on_probation"]
        daemon.stop(signal.SIGKILL)
        assert start()["on_probation"]
        daemon.stop(signal.SIGKILL)
        daemon.start()
        dropped = wait_for(lambda: daemon.events("probation.bad"))
        assert [event["text"] for event in dropped] == ["boot loop"]


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_nothing_is_lost_or_mixed_while_versions_change(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    """4 clients ask on, six replacements under them: every answer is one version's, whole."""
    wanted = {answer_of(path, PROMPT, 16) for path in versions}
    daemon.replace(versions[0], name="pilot")
    settled(daemon)
    stop = threading.Event()
    answers: list[str] = []
    faults: list[BaseException] = []

    def ask() -> None:
        with daemon.client() as client:
            while not stop.is_set():
                fields = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0.0}
                try:
                    found = client.call("generate", {**fields, "ignore_stop_ids": True})
                    answers.append(found["text"])
                except BaseException as error:
                    faults.append(error)
                    return

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    for turn in range(6):
        daemon.replace(versions[(turn + 1) % 2], name="pilot")
        settled(daemon)
    stop.set()
    for client in clients:
        client.join()
    assert not faults
    assert set(answers) == wanted
    print(f"{len(answers)} answers over 6 replacements: none lost, none mixed")
    assert len(daemon.workers()) == 1
    assert daemon.call("stats")["requests"]["failed"] == 0


def test_mistakes_of_the_caller_are_no_failed_requests(
    daemon: Daemon, versions: tuple[Path, Path]
) -> None:
    daemon.replace(versions[0], name="pilot")
    settled(daemon)
    wrong: tuple[dict[str, Any], ...] = (
        {"prompt": "x" * 5000},  # longer than the context
        {"prompt": PROMPT, "banned": [(1 << 32) - 1]},  # no such token
        {"prompt": PROMPT, "model": "nobody"},
        {"prompt": ""},
    )
    for params in wrong:
        with pytest.raises(Refused) as caught:
            daemon.call("generate", **params)
        assert caught.value.code in ("bad_request", "not_found"), params
    assert daemon.call("stats")["requests"] == {"active": 0, "queued": 0, "done": 0, "failed": 0}
    assert daemon.call("model.status", name="pilot")["requests"]["failed"] == 0


def test_another_version_is_held_to_signatures_however_it_comes(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    """The current one serves on, also after a disable: nothing new is trusted by that."""
    with Daemon(models={"keys_dir": str(tmp_path)}) as daemon:
        daemon.replace(versions[0], name="pilot")
        old = settled(daemon)["digest"]
        daemon.replace(versions[1], name="pilot")
        new = settled(daemon)["digest"]
        text = daemon.config.read_text(encoding="utf-8")
        text = text.replace("[models]", '[models]\nsignature = "required"')
        daemon.config.write_text(text, encoding="utf-8")
        daemon.call("config.reload")
        daemon.call("model.disable", name="pilot")
        daemon.call("model.enable", name="pilot")
        assert daemon.call("stats")["digest"] == new
        with pytest.raises(Refused, match="signature: none"):
            daemon.call("model.rollback", name="pilot")
        daemon.call("model.unload", name="pilot")
        with pytest.raises(Refused, match="signature: none"):
            daemon.call("model.load", name="pilot", digest=old)
        daemon.call("model.load", name="pilot")


def test_doctor_tells_of_a_key_that_is_none(tmp_path: Path) -> None:
    """Where signatures are preferred too: what it has signed counts as signed by nobody known."""
    keys = tmp_path / "keys"
    with Daemon(models={"keys_dir": str(keys), "signature": "preferred"}) as daemon:

        def told() -> list[str]:
            checks = daemon.call("doctor")["checks"]
            return [one["text"] for one in checks if one["name"] == "keys"]

        assert told() == []
        keys.mkdir()
        assert told() == []
        (keys / "vendor.pub").write_text("junk")
        assert "this key is not used" in told()[0]


def test_deadlines_are_kept_while_others_wait(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    daemon.replace(versions[0], name="pilot")
    settled(daemon)
    daemon.call("throttle.set", duty=SLOW)
    order: list[str] = []

    def ask(priority: str) -> None:
        daemon.ask(PROMPT, 100, priority=priority)
        order.append(priority)

    threads = [threading.Thread(target=ask, args=("normal",))]
    threads[0].start()
    wait_for(lambda: daemon.call("stats")["requests"]["active"] == 1)
    for priority in ("low", "normal", "high"):
        threads.append(threading.Thread(target=ask, args=(priority,)))
        threads[-1].start()
        queued = len(threads) - 1
        wait_for(lambda queued=queued: daemon.call("stats")["requests"]["queued"] == queued)
    with pytest.raises(Refused) as late:
        daemon.ask(PROMPT, deadline_ms=50)
    assert late.value.code == "timeout"
    daemon.call("throttle.set", duty=1.0)
    for thread in threads:
        thread.join()
    assert sorted(order) == ["high", "low", "normal", "normal"]  # test_gemctl_turns.py: their order


def test_a_cancelled_request_frees_its_engine(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    daemon.replace(versions[0], name="pilot")
    settled(daemon)
    daemon.call("throttle.set", duty=SLOW)

    def cancel(event: dict[str, Any]) -> None:
        if "request" in event:
            daemon.call("cancel", id=event["request"])

    with daemon.client() as client, pytest.raises(Refused) as ended:
        client.call("generate", {"prompt": PROMPT, "max_tokens": 100}, cancel)
    assert ended.value.code == "cancelled"
    daemon.call("throttle.set", duty=1.0)
    assert daemon.ask(PROMPT)["text"] == answer_of(versions[0], PROMPT)


def test_the_duty_is_kept(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    """The worker's processor time falls with the duty; benchmarks/duty.py has the figures."""
    daemon.replace(versions[0], name="pilot")
    settled(daemon)

    def share(duty: float) -> float:
        daemon.call("throttle.set", duty=duty)
        pid = daemon.workers()[0]
        before, began = _cpu(pid), time.monotonic()
        while time.monotonic() < began + 3:
            daemon.ask(PROMPT, 150)
        return (_cpu(pid) - before) / (time.monotonic() - began)

    full, slow = share(1.0), share(0.02)
    print(f"processor time of the worker: {full:.3f} s a second at duty 1, {slow:.3f} at 0.02")
    assert slow < 0.5 * full


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_urgent_model_holds_the_others_back(daemon: Daemon, versions: tuple[Path, Path]) -> None:
    """While a request of the small model runs, the large one makes no token; then it goes on."""
    daemon.replace(versions[0], name="commands")
    daemon.replace(versions[1], name="text")
    settled(daemon, "commands")
    settled(daemon, "text")
    daemon.gemctl("model", "priority", "commands", "0")
    daemon.gemctl("model", "priority", "text", "5")
    whole = answer_of(versions[1], PROMPT, 150)
    daemon.call("throttle.set", duty=SLOW)
    times: list[float] = []
    found: list[str] = []

    def ask() -> None:
        with daemon.client() as client:
            fields = {"model": "text", "prompt": PROMPT, "max_tokens": 150, "temperature": 0.0}
            answer = client.call(
                "generate",
                {**fields, "ignore_stop_ids": True},
                lambda event: times.append(time.monotonic()),
            )
            found.append(answer["text"])

    large = threading.Thread(target=ask)
    large.start()
    wait_for(lambda: len(times) > 10)
    began = time.monotonic()
    daemon.ask(PROMPT, 20, model="commands")
    ended = time.monotonic()
    daemon.call("throttle.set", duty=1.0)
    large.join()
    inside = sum(began + 0.2 < when < min(ended, began + 9) for when in times)
    print(f"{len(times)} tokens of the large model, {inside} while the small one answered")
    assert inside <= 1
    assert found == [whole]
