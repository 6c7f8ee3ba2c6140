"""What is wanted over a restart: round trips, damage, trials, and how little is written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemctl.errors import ApiError
from gemctl.store import durable, state
from gemctl.store.state import Brief, Load, ModelState, State, StateFile, ThrottleState, Trial

A, B = "a" * 64, "b" * 64
FULL = State(
    active="pilot",
    models={
        "pilot": ModelState(digest=A, pinned=True, priority=0),
        "text": ModelState(enabled=False),
        "small": ModelState(priority=0),
    },
    throttle=ThrottleState(mode="silent", temp_c=71.5, duty=0.5, external=("mqtt:plant/ä",)),
    brief=Brief(policy=ThrottleState(mode="off"), for_s=600.0, until=1.8e9),
    auto_reset_kv_cache=True,
    trial=Trial(name="pilot", digest=B, tries_left=2),
)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[StateFile]:
    opened = StateFile(tmp_path)
    yield opened
    opened.close()


def reopened(folder: Path) -> state.Loaded:
    again = StateFile(folder)
    try:
        return again.load()
    finally:
        again.close()


# ---- content ----
def test_what_is_saved_is_loaded(file: StateFile) -> None:
    assert file.load() == state.Loaded(State())
    assert file.save(FULL) is True
    assert file.load() == state.Loaded(FULL)
    assert reopened(file.root) == state.Loaded(FULL)
    table = json.loads((file.root / "state.json").read_text())
    assert table["schema"] == 1
    assert table["trial"] == {"name": "pilot", "digest": B, "tries_left": 2}
    assert sorted(p.name for p in file.root.iterdir()) == ["state.json"]


def test_the_content_before_stays_beside_it(file: StateFile) -> None:
    file.save(FULL)
    file.save(State())
    assert state.unpack((file.root / state.PREVIOUS).read_bytes()) == FULL
    file.save(State(active="x"))
    assert state.unpack((file.root / state.PREVIOUS).read_bytes()) == State()
    assert sorted(p.name for p in file.root.iterdir()) == ["state.json", "state.json.previous"]


def test_a_state_without_checksum_may_be_prepared_by_hand(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"schema": 1, "models": {"m": {"priority": 2}}}')
    found = reopened(tmp_path)
    assert found.warnings == ()
    assert found.state.models == {"m": ModelState(priority=2)}


def test_what_is_wanted_for_a_while() -> None:
    """An older daemon reads a file without one; a clock that went back lengthens nothing."""
    assert FULL.brief is not None
    assert b"brief" in state.pack(FULL)
    assert b"brief" not in state.pack(FULL.model_copy(update={"brief": None}))
    assert FULL.brief.left(1.8e9 - 60) == 60
    assert FULL.brief.left(1.8e9 + 1) < 0
    assert FULL.brief.left(0.0) == 600


WRONG: list[dict[str, Any]] = [
    {"schema": 2},
    {"schema": "1"},
    {},
    {"schema": 1, "more": 1},
    {"schema": 1, "active": "A"},
    {"schema": 1, "active": "../x"},
    {"schema": 1, "models": {"m": {"enabled": 1}}},
    {"schema": 1, "models": {"m": {"digest": "00"}}},
    {"schema": 1, "models": {"m": {"priority": 10}}},
    {"schema": 1, "models": {"M": {}}},
    {"schema": 1, "models": {f"m{i}": {} for i in range(65)}},
    {"schema": 1, "throttle": {"mode": "warp"}},
    {"schema": 1, "throttle": {"temp_c": 1000}},
    {"schema": 1, "throttle": {"duty": 0}},
    {"schema": 1, "throttle": {"duty": float("nan")}},
    {"schema": 1, "brief": {"policy": {}, "for_s": 0, "until": 1}},
    {"schema": 1, "brief": {"for_s": 9, "until": 1}},
    {"schema": 1, "trial": {"name": "m", "digest": A, "tries_left": -1}},
    {"schema": 1, "trial": {"name": "m"}},
    {"schema": 1, "crc32": "00000000"},
    {"schema": 1, "crc32": 0},
]


@pytest.mark.parametrize("table", WRONG, ids=lambda t: json.dumps(t)[:60])
def test_other_content_is_refused(table: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        state.unpack(json.dumps(table).encode())


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_garbage_is_a_value_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        state.unpack(data)


def test_nested_and_long_garbage_is_refused(tmp_path: Path) -> None:
    for data in (b"[" * 100_000, b'{"a":' * 50_000, b" " * (state.MAX_BYTES + 1), b"\xff\xfe{"):
        (tmp_path / "state.json").write_bytes(data)
        found = reopened(tmp_path)
        assert found.state == State()
        assert len(found.warnings) == 2


# ---- damage ----
def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    """Each bit of each byte: the state is the same, or the file is refused. Never another state."""
    data = state.pack(FULL)
    for at in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[at] ^= 1 << bit
            with contextlib.suppress(ValueError):
                assert state.unpack(bytes(bad)) == FULL, (at, bit)


def test_every_cut_is_noticed() -> None:
    data = state.pack(FULL)
    for size in range(len(data) - 1):  # the last byte is a line's end
        with pytest.raises(ValueError, match=r"."):
            state.unpack(data[:size])


@pytest.mark.parametrize("kind", ["garbage", "empty", "newer", "folder", "pipe", "link"])
def test_a_damaged_file_gives_way_to_the_previous_one(tmp_path: Path, kind: str) -> None:
    first = StateFile(tmp_path)
    first.save(FULL)
    first.save(State(active="x"))
    path = tmp_path / "state.json"
    path.unlink()
    {
        "garbage": lambda: path.write_bytes(b"{garbage"),
        "empty": lambda: path.write_bytes(b""),
        "newer": lambda: path.write_text('{"schema": 9}'),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "link": lambda: path.symlink_to("/etc/hostname"),
    }[kind]()
    found = reopened(tmp_path)
    assert found.state == FULL
    assert len(found.warnings) == 2
    assert "is put aside as state.json.damaged" in found.warnings[0]
    assert "state.json.previous: is used instead" in found.warnings[1]
    assert sorted(p.name for p in tmp_path.iterdir()) == [state.DAMAGED, state.PREVIOUS]
    again = StateFile(tmp_path)
    assert again.load() == state.Loaded(FULL)  # said once
    assert again.save(FULL) is True
    assert reopened(tmp_path) == state.Loaded(FULL)


def test_one_damaged_file_is_kept_and_the_previous_one_spared(tmp_path: Path) -> None:
    StateFile(tmp_path).save(FULL)
    (tmp_path / "state.json").rename(tmp_path / state.PREVIOUS)
    for number in range(3):
        (tmp_path / "state.json").write_bytes(b"bad %d" % number)
        assert reopened(tmp_path).state == FULL
    assert (tmp_path / state.DAMAGED).read_bytes() == b"bad 2"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("failures", [1, 2, 1000])
def test_a_file_that_cannot_be_read_now_is_no_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """An error that passes is not seen. One that stays does not cost the file."""
    with StateFile(tmp_path) as file:
        file.save(State(active="x"))
        file.save(FULL)
    left, real = [failures], durable.read_small

    def read(folder: int, name: str, most: int) -> bytes | None:
        if name == state.STATE and left[0]:
            left[0] -= 1
            raise OSError(24, "Too many open files")
        return real(folder, name, most)

    monkeypatch.setattr(durable, "read_small", read)
    file = StateFile(tmp_path)
    found = file.load()
    if failures < 3:
        assert found == state.Loaded(FULL)
        return
    assert found.state == State(active="x")
    assert "Too many open files; it is put aside" in found.warnings[0]
    assert state.unpack((tmp_path / "state.json").read_bytes()) == FULL
    file.save(State(active="y"))
    assert state.unpack((tmp_path / state.DAMAGED).read_bytes()) == FULL
    assert state.unpack((tmp_path / state.PREVIOUS).read_bytes()) == State(active="x")
    monkeypatch.undo()
    assert reopened(tmp_path) == state.Loaded(State(active="y"))


def test_without_anything_whole_the_defaults_are_used(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(b"bad")
    found = reopened(tmp_path)
    assert found.state == State()
    assert "is missing; the defaults" in found.warnings[1]
    (tmp_path / "state.json").write_bytes(b"bad")
    (tmp_path / state.PREVIOUS).write_bytes(b"worse")
    found = reopened(tmp_path)
    assert found.state == State()
    assert "no JSON; the defaults" in found.warnings[1]


def test_a_write_cut_off_between_its_two_renames_loses_nothing(tmp_path: Path) -> None:
    StateFile(tmp_path).save(FULL)
    (tmp_path / "state.json").rename(tmp_path / state.PREVIOUS)
    (tmp_path / ".state.json.new").write_bytes(b"half")
    assert reopened(tmp_path) == state.Loaded(FULL)
    again = StateFile(tmp_path)
    again.load()
    again.save(State())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state.json", "state.json.previous"]


def test_a_state_that_somebody_took_away_is_told(tmp_path: Path) -> None:
    """The one before it lacks the last change."""
    with StateFile(tmp_path) as file:
        file.save(FULL)
        file.save(State(active="x"))
    (tmp_path / "state.json").unlink()
    found = reopened(tmp_path)
    assert found.state == FULL
    path = tmp_path / "state.json"
    told = f"{path}: is missing; state.json.previous is used instead; check what is wanted"
    assert found.warnings == (told,)


def test_a_second_rename_that_cannot_be_taken_back_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second rename on the disk takes none: what was wanted is still there and nobody took
    it away, so nobody is told so; the next write leaves no trace."""
    rename, count = os.rename, 0

    def failing(*names: Any, **folders: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(*names, **folders)

    with StateFile(tmp_path) as file:
        file.save(FULL)
        monkeypatch.setattr(os, "rename", failing)
        with pytest.raises(ApiError):
            file.save(State(), urgent=True)
        monkeypatch.undo()
    assert reopened(tmp_path) == state.Loaded(FULL)
    with StateFile(tmp_path) as again:
        again.load()
        again.save(State())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state.json", "state.json.previous"]


def test_a_second_rename_that_fails_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def rename(old: str, new: str, **more: int) -> None:
        if old == ".state.json.new":
            raise OSError(errno.ENOSPC, "no space")
        real(old, new, **more)

    with StateFile(tmp_path) as file:
        file.save(FULL)
        monkeypatch.setattr(os, "rename", rename)
        with pytest.raises(ApiError):
            file.save(State(active="x"), insist=True)
        monkeypatch.setattr(os, "rename", real)
        assert [one.name for one in tmp_path.iterdir()] == ["state.json"]
        assert reopened(tmp_path) == state.Loaded(FULL)


# ---- changes ----
def test_changes_make_new_states() -> None:
    changed = state.with_model(FULL, "text", enabled=True, priority=3)
    assert changed.models["text"] == ModelState(priority=3)
    assert FULL.models["text"] == ModelState(enabled=False)
    assert state.with_model(FULL, "new").models["new"] == ModelState()
    gone = state.without_model(FULL, "pilot")
    assert (gone.active, gone.trial) == (None, None)
    assert sorted(gone.models) == ["small", "text"]
    assert state.without_model(FULL, "no") == FULL
    assert state.with_throttle(FULL, mode=None, duty=0.25).throttle.duty == 0.25
    with pytest.raises(ValueError, match="frozen"):
        FULL.active = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        lambda: state.with_model(FULL, "text", priority=10),
        lambda: state.with_model(FULL, "text", colour="red"),
        lambda: state.with_model(FULL, "../x"),
        lambda: state.with_model(FULL, "text", digest="00"),
        lambda: state.with_throttle(FULL, temp_c=float("nan")),
        lambda: state.with_throttle(FULL, mode="warp"),
        lambda: state.begin_trial(FULL, "m", "00"),
        lambda: state.begin_trial(FULL, "m", A, tries=99),
    ],
)
def test_a_change_out_of_range_is_a_bad_request(change: Any) -> None:
    with pytest.raises(ApiError) as caught:
        change()
    assert caught.value.code == "bad_request"
    assert "; " in str(caught.value)


# ---- boots and trials ----
def test_the_active_model_is_loaded_first_and_the_disabled_not() -> None:
    plan = state.boot(state.end_trial(FULL, good=False))
    assert plan.loads == (Load("pilot", A), Load("small", None))
    assert plan.dropped is None


def test_a_version_that_reboots_the_board_is_dropped_at_the_third_boot(tmp_path: Path) -> None:
    wanted = state.with_model(State(active="m"), "m", digest=A)
    first = StateFile(tmp_path)
    first.load()
    first.save(state.begin_trial(wanted, "m", B), urgent=True)
    loaded = []
    for _ in range(2):
        plan = StateFile(tmp_path).boot()  # the board then reboots: nothing is closed
        loaded.append(plan.loads)
        assert plan.dropped is None
    assert loaded == [(Load("m", B, trial=True),)] * 2
    plan = StateFile(tmp_path).boot()
    assert plan.loads == (Load("m", A),)
    assert plan.dropped == Trial(name="m", digest=B, tries_left=0)
    assert StateFile(tmp_path).boot() == state.Boot(wanted, (Load("m", A),))


def test_an_end_in_order_takes_no_try() -> None:
    """Whoever updates the daemon three times does not lose a version by that."""
    begun = state.begin_trial(state.with_model(State(), "m", digest=A), "m", B)
    assert state.give_back(begun) == begun
    once = state.boot(begun).state
    assert once.trial == Trial(name="m", digest=B, tries_left=1)
    assert state.give_back(once) == begun
    assert state.give_back(state.boot(once).state) == once  # one for one: a crash stays counted
    assert state.give_back(State()) == State()


def test_the_try_is_on_the_disk_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StateFile(tmp_path).save(state.begin_trial(State(), "m", B))
    order: list[str] = []
    real = os.fsync
    monkeypatch.setattr(durable.os, "fsync", lambda fd: (order.append("fsync"), real(fd))[1])
    file = StateFile(tmp_path)
    order.append(f"boot {file.boot().state.trial}")
    assert order[:-1] == ["fsync", "fsync"]
    assert state.unpack((tmp_path / "state.json").read_bytes()).trial == Trial(
        name="m", digest=B, tries_left=1
    )


def test_a_good_trial_is_what_is_wanted_from_then_on() -> None:
    begun = state.begin_trial(state.with_model(State(), "m", digest=A), "m", B)
    assert begun.models["m"].digest == A
    good = state.end_trial(begun, good=True)
    assert (good.models["m"].digest, good.trial) == (B, None)
    bad = state.end_trial(begun, good=False)
    assert (bad.models["m"].digest, bad.trial) == (A, None)
    assert state.end_trial(bad, good=True) == bad


def test_the_trial_of_a_disabled_model_waits() -> None:
    begun = state.begin_trial(state.with_model(State(), "m", enabled=False), "m", B)
    plan = state.boot(begun)
    assert plan.loads == ()
    assert plan.state == begun


def test_a_trial_whose_try_cannot_be_written_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = state.with_model(State(active="m"), "m", digest=A)
    StateFile(tmp_path).save(state.begin_trial(wanted, "m", B))

    def full(*_unused: object, **_more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "write_file", full)
    file = StateFile(tmp_path)
    plan = file.boot()
    assert plan.loads == (Load("m", A),)
    assert plan.state.trial == Trial(name="m", digest=B, tries_left=2)
    assert "not loaded" in plan.warnings[0]
    assert not file.waiting
    monkeypatch.undo()
    assert StateFile(tmp_path).boot().loads == (Load("m", B, trial=True),)


# ---- how much is written ----
def test_an_unchanged_state_is_not_written(file: StateFile) -> None:
    file.save(FULL)
    before = (file.root / "state.json").stat()
    for _ in range(100):
        assert file.save(FULL) is False
    assert (file.writes, file.bytes_written) == (1, before.st_size)
    assert (file.root / "state.json").stat().st_ino == before.st_ino
    again = StateFile(file.root)
    again.load()
    assert again.save(FULL) is False
    assert again.writes == 0


def test_a_usual_day_writes_some_kilobytes(tmp_path: Path) -> None:
    """One swap with its probation, four switches, a dozen changes of the throttle, a reboot; and
    a caller that saves what it has every ten seconds."""
    now = [0.0]
    file = StateFile(tmp_path, clock=lambda: now[0])
    today = FULL.model_copy(update={"trial": None})
    file.save(today)
    start, start_writes = file.bytes_written, file.writes
    rng = random.Random(5)
    changes = [
        *(lambda s: state.begin_trial(s, "pilot", B), lambda s: state.end_trial(s, good=True)),
        *[lambda s, n=n: s.model_copy(update={"active": n}) for n in ("text", "pilot") * 2],
        *[lambda s, t=60.0 + t: state.with_throttle(s, temp_c=t) for t in range(12)],
        *(lambda s: state.begin_trial(s, "small", A), lambda s: state.boot(s).state),
    ]
    times = sorted(rng.uniform(0, 86_000) for _ in changes)
    for second in range(0, 86_400, 10):
        now[0] = float(second)
        while times and times[0] <= second:
            times.pop(0)
            today = changes.pop(0)(today)
        file.save(today)
        file.flush()
    written, writes = file.bytes_written - start, file.writes - start_writes
    print(f"a usual day: {writes} writes, {written} bytes")
    assert writes == 20
    assert written < 20_000
    assert reopened(tmp_path).state == today


def test_a_storm_of_changes_is_written_seldom_and_the_last_one_stays(tmp_path: Path) -> None:
    now = [0.0]
    file = StateFile(tmp_path, clock=lambda: now[0])
    saved = []
    for step in range(3600):
        now[0] = float(step)
        saved.append(file.save(state.with_throttle(FULL, temp_c=40.0 + step % 50)))
    most = state.BURST + 3600 / state.INTERVAL_S
    assert saved[: state.BURST] == [True] * state.BURST
    assert sum(saved) == file.writes <= most + 1
    a_day = (state.BURST + 86_400 / state.INTERVAL_S) * len(state.pack(FULL))
    print(f"a storm: {file.writes} writes in an hour, at most {a_day / 1e6:.1f} MB a day")
    assert a_day < 3e6
    assert file.waiting
    assert file.flush() is False
    now[0] += state.INTERVAL_S
    assert file.flush() is True
    assert reopened(tmp_path).state.throttle.temp_c == 40.0 + 3599 % 50


def test_what_is_urgent_does_not_wait_and_what_waits_is_written_at_the_end(tmp_path: Path) -> None:
    file = StateFile(tmp_path, clock=lambda: 0.0)
    for step in range(state.BURST):
        assert file.save(state.with_throttle(State(), temp_c=float(step)))
    assert file.save(state.with_throttle(State(), temp_c=99.0)) is False
    assert file.waiting
    assert file.save(state.begin_trial(State(), "m", B), urgent=True) is True
    assert not file.waiting
    assert file.save(FULL) is False
    file.close()
    file.close()
    assert reopened(tmp_path).state == FULL


def test_a_change_that_is_taken_back_is_not_written(tmp_path: Path) -> None:
    file = StateFile(tmp_path, clock=lambda: 0.0)
    for step in range(state.BURST):
        file.save(state.with_throttle(State(), temp_c=float(step)))
    last = state.with_throttle(State(), temp_c=float(state.BURST - 1))
    file.save(FULL)
    assert file.waiting
    file.save(last)
    assert not file.waiting


def test_a_failed_write_is_told_and_the_old_state_stays(
    file: StateFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.save(FULL)

    def fail(*_unused: object, **_more: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(durable.os, "fsync", fail)
    with pytest.raises(ApiError) as caught:
        file.save(State())
    assert caught.value.code == "failed"
    monkeypatch.undo()
    assert not file.waiting
    assert sorted(p.name for p in file.root.iterdir()) == ["state.json"]
    assert reopened(file.root).state == FULL
    assert file.save(FULL) is False
    assert file.save(State()) is True
    assert state.unpack((file.root / state.PREVIOUS).read_bytes()) == FULL
