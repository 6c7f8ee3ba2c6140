"""The store of artifacts: what it takes, what it keeps, what it says."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gemctl.errors import ApiError
from gemctl.store import copying, durable, store
from gemctl.store.copying import Pace
from gemctl.store.store import Store, Versions

ROOT = Path(__file__).resolve().parents[2]
MOST = 1 << 30


def content(seed: int, size: int = 5000) -> bytes:
    return random.Random(seed).randbytes(size)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "state") as opened:
        yield opened


@pytest.fixture
def put(box: Store, tmp_path: Path) -> Callable[..., str]:
    """Stages bytes made from a seed; gives the digest."""

    def stage(seed: int, name: str = "m", size: int = 5000) -> str:
        source = tmp_path / f"source-{seed}"
        source.write_bytes(content(seed, size))
        with source.open("rb") as stream:
            return box.stage(name, stream.fileno(), size_most=MOST).digest

    return stage


def listed(box: Store, name: str = "m") -> list[str]:
    return sorted(path.name for path in (box.root / name).iterdir())


@contextmanager
def refused(code: str, *words: str) -> Iterator[None]:
    """An ApiError of this code whose sentence has these words and a remedy."""
    with pytest.raises(ApiError) as caught:
        yield
    assert caught.value.code == code
    for word in (*words, "; "):
        assert word in str(caught.value)


def digests(found: Versions) -> list[str]:
    return [version.digest for version in found.present]


def descriptors() -> list[str]:
    """Open descriptors of this process, the one that lists them included."""
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


# ---- staging ----
def test_a_staged_version_lies_under_its_digest(box: Store, tmp_path: Path) -> None:
    data = content(1, 3 * copying.PIECE + 17)
    (tmp_path / "x").write_bytes(data)
    told: list[tuple[int, int]] = []
    pace = Pace(progress=lambda done, total: told.append((done, total)))
    with (tmp_path / "x").open("rb") as stream:
        stream.seek(1000)
        staged = box.stage("m", stream.fileno(), size_most=MOST, pace=pace)
        assert stream.tell() == 1000
    assert (staged.digest, staged.size, staged.fresh) == (digest_of(data), len(data), True)
    path = box.path("m", staged.digest)
    assert path == tmp_path / "state" / "models" / "m" / f"{staged.digest}.gembin"
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o7777 == 0o444
    assert listed(box) == [path.name]
    assert told[0] == (0, len(data))
    assert told[-1] == (len(data), len(data))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    descriptor = box.open("m", staged.digest)
    assert os.pread(descriptor, 8, 0) == data[:8]
    with pytest.raises(OSError, match="descriptor"):
        os.write(descriptor, b"x")
    os.close(descriptor)


def test_staging_the_same_again_changes_nothing(box: Store, put: Callable[..., str]) -> None:
    first = box.path("m", put(1)).stat()
    source = box.path("m", digest_of(content(1)))
    with source.open("rb") as stream:
        again = box.stage("m", stream.fileno(), size_most=MOST)
    assert not again.fresh
    after = source.stat()
    assert (after.st_ino, after.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)


@pytest.mark.parametrize("harm", ["flipped", "cut", "longer"])
def test_staging_mends_a_damaged_version(box: Store, put: Callable[..., str], harm: str) -> None:
    digest = put(1)
    path, data = box.path("m", digest), bytearray(content(1))
    path.chmod(0o600)
    if harm == "flipped":
        data[100] ^= 1
    path.write_bytes({"cut": data[:-1], "longer": data + b"x"}.get(harm, bytes(data)))
    with refused("refused", "damaged"):
        box.verify("m", digest)
    assert put(1) == digest
    assert box.verify("m", digest) == 5000
    assert path.stat().st_mode & 0o777 == 0o444


WAYS = {
    "reflink": "reflink",
    "kernel": "kernel copy",
    "plain": "copy",
    "no copy_file_range": "copy",
    "fails midway": "copy",
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_copying_gives_the_same(
    box: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, named: bool
) -> None:
    """A reflink is played by a copy at once, as no file system here is sure to have it."""
    data = content(2, copying.PIECE + 77)
    (tmp_path / "x").write_bytes(data)
    calls = 0

    def clone(target: int, _request: int, source: int) -> int:
        if way != "reflink":
            raise OSError(errno.EOPNOTSUPP, "no")
        return os.pwrite(target, os.pread(source, len(data), 0), 0)

    def kernel_copy(*arguments: int) -> int:
        nonlocal calls
        calls += 1
        if way == "plain" or (way == "fails midway" and calls == 2):
            raise OSError(errno.EXDEV, "no")
        return real(*arguments)

    real = os.copy_file_range
    monkeypatch.setattr(copying.fcntl, "ioctl", clone)
    monkeypatch.setattr(copying.os, "copy_file_range", kernel_copy)
    if way == "no copy_file_range":
        monkeypatch.delattr(copying.os, "copy_file_range")
    box.named_partials = named
    with (tmp_path / "x").open("rb") as stream:
        staged = box.stage("m", stream.fileno(), size_most=MOST)
    assert staged.method == WAYS[way]
    assert staged.digest == digest_of(data)
    assert box.verify("m", staged.digest) == len(data)
    assert listed(box) == [f"{staged.digest}.gembin"]


def test_short_reads_and_writes_are_gone_on_with(
    box: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content(3, 10_000)
    (tmp_path / "x").write_bytes(data)
    real_read, real_write = os.preadv, os.pwrite
    monkeypatch.delattr(copying.os, "copy_file_range")
    monkeypatch.setattr(
        copying.os, "preadv", lambda fd, views, at: real_read(fd, [views[0][:777]], at)
    )
    monkeypatch.setattr(copying.os, "pwrite", lambda fd, view, at: real_write(fd, view[:100], at))
    with (tmp_path / "x").open("rb") as stream:
        assert box.stage("m", stream.fileno(), size_most=MOST).digest == digest_of(data)


def test_what_is_no_candidate_is_refused(box: Store, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "big").write_bytes(bytes(1001))
    os.mkfifo(tmp_path / "pipe")
    read = os.O_RDONLY | os.O_NONBLOCK
    for name, flags, code, word in (
        ("empty", read, "refused", "is empty"),
        ("big", read, "refused", "1001 bytes, the store takes 1000"),
        ("pipe", read, "refused", "not a regular file"),
        (".", read, "refused", "not a regular file"),
        ("big", os.O_WRONLY, "bad_request", "not open for reading"),
        ("big", os.O_PATH, "bad_request", "not open for reading"),
    ):
        descriptor = os.open(tmp_path / name, flags)
        with refused(code, word):
            box.stage("m", descriptor, size_most=1000)
        os.close(descriptor)
    with refused("failed", "Bad file descriptor"):
        box.stage("m", 12345, size_most=1000)
    assert box.names() == ()


@pytest.mark.parametrize("change", ["written", "longer", "shorter"])
@pytest.mark.parametrize("plain", [False, True])
def test_a_candidate_that_changes_is_refused(
    box: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, plain: bool
) -> None:
    path = tmp_path / "x"
    path.write_bytes(content(4, 3 * copying.PIECE))
    os.utime(path, (1, 1))
    if plain:
        monkeypatch.delattr(copying.os, "copy_file_range")

    def meddle(done: int, _total: int) -> None:
        if done == copying.PIECE:
            with path.open("r+b") as stream:
                if change == "written":
                    stream.write(b"x")
                else:
                    stream.truncate((2 if change == "shorter" else 4) * copying.PIECE)

    with path.open("rb") as stream, refused("refused", "changed while it was copied"):
        box.stage("m", stream.fileno(), size_most=MOST, pace=Pace(progress=meddle))
    assert listed(box) == []


def test_a_stop_is_heard_between_two_steps(box: Store, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(content(4, 3 * copying.PIECE))
    seen: list[int] = []
    pace = Pace(
        cancelled=lambda: seen[-1:] == [copying.PIECE],
        progress=lambda done, _total: seen.append(done),
    )
    before = descriptors()
    with path.open("rb") as stream, refused("cancelled"):
        box.stage("m", stream.fileno(), size_most=MOST, pace=pace)
    assert seen == [0, copying.PIECE]
    assert listed(box) == []
    assert descriptors() == before


def test_the_rate_is_kept_to(box: Store, tmp_path: Path) -> None:
    """By an own clock: 1 MB at 100 kB/s takes ten seconds, in steps of a tenth."""
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    (tmp_path / "x").write_bytes(content(5, 1_000_000))
    pace = Pace(100_000.0, clock=lambda: now[0], sleep=sleep)
    with (tmp_path / "x").open("rb") as stream:
        box.stage("m", stream.fileno(), size_most=MOST, pace=pace)
    assert now[0] - 100.0 == pytest.approx(10.0, abs=0.01)
    assert max(slept) <= 0.1 + 1e-9


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """64 MiB through a process whose heap may grow by 16."""
    (tmp_path / "x").write_bytes(b"ab" * (32 << 20))
    script = (
        "import os, resource, sys; from pathlib import Path; from gemctl.store import copying\n"
        "from gemctl.store.store import Store\n"
        "if len(sys.argv) > 3: del os.copy_file_range\n"
        "box = Store(Path(sys.argv[1])); fd = os.open(sys.argv[2], os.O_RDONLY)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * os.sysconf('SC_PAGESIZE')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20),) * 2)\n"
        "print(box.stage('m', fd, size_most=1 << 30).method)\n"
    )
    for more in ((), ("plain",)):
        words = ["-c", script, str(tmp_path / f"state{len(more)}"), str(tmp_path / "x"), *more]
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout in ("reflink\n", "kernel copy\n", "copy\n")


# ---- names, digests and places ----
BAD_NAMES = ("", ".", "..", "a/b", "A", "a..b", "-a", "a" * 65, "a\n", "ä", "a\0", "../m", "/etc")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_odd_names_are_refused_everywhere(box: Store, tmp_path: Path, name: str) -> None:
    digest = "0" * 64
    (tmp_path / "x").write_bytes(b"x")
    with (tmp_path / "x").open("rb") as stream, refused("bad_request", "not a name"):
        box.stage(name, stream.fileno(), size_most=MOST)
    for call in (box.versions, lambda n: box.open(n, digest), lambda n: box.mark_good(n, digest)):
        with refused("bad_request", "not a name"):
            call(name)


@pytest.mark.parametrize("digest", ["", "0" * 63, "0" * 65, "A" * 64, "0" * 63 + "\n", "../x"])
def test_odd_digests_are_refused_everywhere(
    box: Store, put: Callable[..., str], digest: str
) -> None:
    put(1)
    for call in (box.open, box.path, box.mark_good, box.mark_bad, box.remove, box.forgive):
        with refused("bad_request", "not a SHA-256"):
            call("m", digest)


def test_what_is_not_there_is_said(box: Store, put: Callable[..., str]) -> None:
    absent = "1" * 64
    with refused("not_found", "gemctl model list"):
        box.versions("m")
    with refused("not_found"):
        box.open("m", absent)
    put(1)
    for call in (box.open, box.path, box.verify, box.mark_good, box.remove):
        with refused("not_found", "111111111111", "stage"):
            call("m", absent)


@pytest.mark.parametrize("kernel", [True, False])
def test_no_link_is_followed_and_no_pipe_waited_for(
    box: Store,
    put: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernel: bool,
) -> None:
    if not kernel:
        monkeypatch.setattr(durable, "_openat2", lambda _folder, _place: None)
    good, outside = put(1), tmp_path / "outside"
    outside.write_bytes(b"secret")
    link, pipe, folder = "2" * 64, "3" * 64, "4" * 64
    (box.root / "m" / f"{link}.gembin").symlink_to(outside)
    os.mkfifo(box.root / "m" / f"{pipe}.gembin")
    (box.root / "m" / f"{folder}.gembin").mkdir()
    (box.root / "away").symlink_to(box.root / "m")
    os.close(box.open("m", good))
    for digest in (link, pipe, folder):
        with pytest.raises(ApiError):
            box.open("m", digest)
    with pytest.raises(ApiError):
        box.open("away", good)
    with refused("not_found"):
        box.versions("away")
    assert digests(box.versions("m")) == [good]
    for place in ("../x", "m/../../x", "/etc/passwd", "m//x", "m/./x"):
        with pytest.raises(OSError, match=r"."):
            durable.open_beneath(box._models, place)


def test_both_ways_of_opening_give_the_same_error(box: Store) -> None:
    assert durable._openat2(box._models, ".") is not None, "this kernel has openat2"
    for way in (durable._openat2, durable._walk):
        with pytest.raises(FileNotFoundError):
            way(box._models, "m/x")


# ---- good and bad ----
def test_current_and_previous_follow_what_was_found_good(
    box: Store, put: Callable[..., str]
) -> None:
    a, b, c = put(1), put(2), put(3)
    found = box.versions("m")
    assert (found.current, found.previous, found.good) == (None, None, ())
    box.mark_good("m", a)
    assert box.versions("m").current == a
    box.mark_good("m", b)
    found = box.versions("m")
    assert (found.current, found.previous) == (b, a)
    assert (box.root / "m" / "current").readlink() == Path(f"{b}.gembin")
    assert (box.root / "m" / "previous").readlink() == Path(f"{a}.gembin")
    box.mark_good("m", c)
    box.mark_good("m", b)  # the way back
    found = box.versions("m")
    assert (found.current, found.previous, found.good) == (b, c, (b, c, a))


def test_marking_the_current_one_again_writes_nothing(box: Store, put: Callable[..., str]) -> None:
    box.mark_good("m", put(1))
    before = {p.name: p.lstat().st_ino for p in (box.root / "m").iterdir()}
    box.mark_good("m", put(1))
    assert {p.name: p.lstat().st_ino for p in (box.root / "m").iterdir()} == before


def test_a_bad_version_is_remembered_and_refused(box: Store, put: Callable[..., str]) -> None:
    a, b = put(1), put(2)
    box.mark_good("m", a)
    box.mark_bad("m", b, "no answer\nfor 10 s; ä")
    with refused("refused", "found bad before (no answer", "gemctl model clear m"):
        put(2)
    assert box.collect().versions == (("m", b),)
    with refused("refused", "found bad before"):
        put(2)
    with Store(box.root.parent) as again:
        assert [digest for digest, _ in again.versions("m").bad] == [b]
    box.forgive("m", b)
    assert put(2) == b
    assert put(2, "other") == b  # known bad as one model's only


def test_a_bad_current_version_gives_way_to_the_previous(
    box: Store, put: Callable[..., str]
) -> None:
    a, b, c = put(1), put(2), put(3)
    for digest in (a, b, c):
        box.mark_good("m", digest)
    box.mark_bad("m", c)
    found = box.versions("m")
    assert (found.current, found.previous) == (b, a)
    box.mark_bad("m", b)
    found = box.versions("m")
    assert (found.current, found.previous) == (a, None)
    assert not (box.root / "m" / "previous").is_symlink()
    box.mark_bad("m", a)
    assert box.versions("m").current is None
    box.mark_good("m", a)  # somebody knows better
    assert box.versions("m").current == a
    assert a not in dict(box.versions("m").bad)


def test_what_is_remembered_is_bounded(box: Store, put: Callable[..., str]) -> None:
    put(1)
    for number in range(store.BAD_MOST + 10):
        box.mark_bad("m", f"{number:064x}", "x" * 1000)
    found = box.versions("m")
    assert len(found.bad) == store.BAD_MOST
    assert found.bad[-1][0] == f"{store.BAD_MOST + 9:064x}"
    assert (box.root / "m" / store.MARKS).stat().st_size <= store.MARKS_BYTES


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[]", b"null", b"7", b'{"schema": 2, "good": [], "bad": []}', b"\xff"),
        *(b'{"schema": 1, "good": ["x"], "bad": []}', b'{"schema": 1, "good": 5, "bad": []}'),
        *(b'{"schema": 1, "good": [], "bad": [["0"]]}', b"[" * 100_000, b" " * (1 << 20)),
        b'{"schema": 1, "good": [], "bad": [], "more": 1}',
    ],
)
def test_damaged_marks_leave_what_the_links_say(
    box: Store, put: Callable[..., str], data: bytes
) -> None:
    a, b = put(1), put(2)
    box.mark_good("m", a)
    box.mark_good("m", b)
    (box.root / "m" / store.MARKS).write_bytes(data)
    found = box.versions("m")
    assert (found.current, found.previous) == (b, a)
    assert "marks.json" in found.warning
    put(3)
    with Store(box.root.parent) as fresh:  # it does not know whether that one was good
        assert fresh.collect() == store.Collected()
    box.mark_good("m", b)
    assert box.versions("m").warning == ""
    box.mark_good("m", a)
    found = box.versions("m")
    assert (found.current, found.previous, found.warning) == (a, b, "")


def test_links_that_lead_elsewhere_are_not_believed(box: Store, put: Callable[..., str]) -> None:
    a, b = put(1), put(2)
    box.mark_good("m", a)
    box.mark_good("m", b)
    link = box.root / "m" / "current"
    for target in ("/etc/passwd", f"../other/{b}.gembin", "0" * 64 + ".gembin", "x"):
        link.unlink()
        link.symlink_to(target)
        assert box.versions("m").current == a
    link.unlink()
    link.write_text("no link")
    assert box.versions("m").current == a
    box.mark_good("m", b)
    assert link.is_symlink()


# ---- removing ----
def test_collect_keeps_what_is_good_or_used(box: Store, put: Callable[..., str]) -> None:
    known = [put(seed) for seed in range(6)]
    for digest in known[:5]:
        box.mark_good("m", digest)
    sizes = {version.digest: version.size for version in box.versions("m").present}
    gone = box.collect(in_use={("m", known[0])}, keep=3)
    assert {d for _, d in gone.versions} == {known[1]}  # 5 was staged here and not judged
    assert gone.size == sizes[known[1]]
    with Store(box.root.parent) as fresh:  # after a restart nobody stands up for it
        gone = fresh.collect(in_use={("m", known[0])}, keep=2)
        assert {d for _, d in gone.versions} == {known[2], known[5]}
        found = fresh.versions("m")
        assert set(digests(found)) == {known[0], known[3], known[4]}
        assert (found.current, found.previous) == (known[4], known[3])
        gone = fresh.collect(keep=1)
        assert {d for _, d in gone.versions} == {known[0], known[3]}
        assert (fresh.versions("m").current, fresh.versions("m").previous) == (known[4], None)
        assert fresh.collect(keep=1) == store.Collected()


def test_a_version_that_nobody_will_judge_is_released(box: Store, put: Callable[..., str]) -> None:
    digest = put(1)
    assert box.collect().versions == ()
    box.release("m", digest)
    box.release("m", digest)
    box.release("none", digest)
    assert box.collect().versions == (("m", digest),)
    assert box.names() == ()


def test_marks_that_cannot_be_read_now_are_not_written_over(
    box: Store, put: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the system may pass; what the file says must not be lost by it."""
    a, b = put(1), put(2)
    box.mark_good("m", a)
    box.mark_bad("m", b)

    def fail(*_unused: object) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(store.durable, "read_small", fail)
    assert box.versions("m").current == a
    assert "Too many" in box.versions("m").warning
    for change in (lambda: box.mark_good("m", a), lambda: box.mark_bad("m", b), lambda: put(2)):
        with refused("busy", "Too many open files; raise the daemon's limit"):
            change()
    assert box.collect(keep=1) == store.Collected()
    monkeypatch.undo()
    assert dict(box.versions("m").bad) == {b: ""}


def test_collect_removes_what_was_left_and_nothing_else(
    box: Store, put: Callable[..., str], tmp_path: Path
) -> None:
    box.mark_good("m", put(1))
    folder = box.root / "m"
    (folder / f"{copying.PARTIAL}0011").write_bytes(b"half")
    (folder / ".current.new").symlink_to("x")
    (folder / ".marks.json.new").write_bytes(b"half")
    (folder / "notes.txt").write_bytes(b"mine")
    (box.root / "empty").mkdir()
    (box.root / "Lost+Found").mkdir()
    (box.root / "file").write_bytes(b"mine")
    live = os.open(folder / f"{copying.PARTIAL}live", os.O_CREAT | os.O_RDWR)
    fcntl.flock(live, fcntl.LOCK_EX)
    before = listed(box)
    assert box.collect().others == 4
    assert set(before) - set(listed(box)) == {
        *(f"{copying.PARTIAL}0011", ".current.new", ".marks.json.new"),
    }
    assert sorted(p.name for p in box.root.iterdir()) == ["Lost+Found", "file", "m"]
    os.close(live)
    assert box.collect().others == 1
    assert box.names() == ("m",)


def test_a_digest_is_in_use_of_the_model_that_has_it(box: Store, put: Callable[..., str]) -> None:
    """The same file under another name is a copy of its own, and goes."""
    digest = put(1)
    assert put(1, name="n") == digest
    box.release("m", digest)
    box.release("n", digest)
    assert box.collect(in_use={("m", digest)}).versions == (("n", digest),)


def test_remove_spares_what_is_used_or_current(box: Store, put: Callable[..., str]) -> None:
    a, b = put(1), put(2)
    box.mark_good("m", a)
    box.mark_good("m", b)
    with refused("conflict", "in use"):
        box.remove("m", a, in_use={("m", a)})
    with refused("conflict", "current"):
        box.remove("m", b)
    box.remove("m", a)
    found = box.versions("m")
    assert (found.current, found.previous, digests(found)) == (b, None, [b])
    with refused("not_found"):
        box.remove("m", a)


def test_what_the_disk_does_not_take_is_bad_all_the_same(
    box: Store, put: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the process lives, also where nothing else is left of the model."""
    a, b = put(1), put(2)
    box.mark_good("m", a)

    def full(*_unused: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store.durable, "write_file", full)
        for digest in (a, b):
            with refused("no_space", "No space left"):
                box.mark_bad("m", digest, "it failed")
        found = box.versions("m")
        assert (found.current, found.good) == (None, ())
        assert dict(found.bad) == {a: "it failed", b: "it failed"}
    box.release("m", b)
    box.collect()
    assert digests(box.versions("m")) == [a]  # a good one once, on the disk still
    with refused("refused", "was found bad before (it failed)"):
        put(1)
    box.mark_bad("m", a, "it failed")
    box.forgive("m", b)
    with Store(box.root.parent) as again:
        assert dict(again.versions("m").bad) == {a: "it failed"}
    assert put(2) == b


# ---- threads and processes ----
@pytest.mark.parametrize("named", [False, True])
def test_a_collection_during_a_staging_takes_nothing_of_it(
    box: Store, tmp_path: Path, named: bool
) -> None:
    """Neither by this store, nor by another one of the same folder, as a second process has it."""
    (tmp_path / "x").write_bytes(content(6, 2 * copying.PIECE))
    (box.root / "m").mkdir()
    (box.root / "m" / "notes.txt").touch()  # else the other one would remove the empty folder
    box.named_partials = named
    with Store(box.root.parent) as other, (tmp_path / "x").open("rb") as stream:

        def collect(_done: int, _total: int) -> None:
            assert other.collect() == box.collect() == store.Collected()

        pace = Pace(progress=collect)
        digest = box.stage("m", stream.fileno(), size_most=MOST, pace=pace).digest
    assert box.verify("m", digest) == 2 * copying.PIECE


def test_many_threads_stage_the_same_and_others(box: Store, tmp_path: Path) -> None:
    for seed in range(3):
        (tmp_path / f"{seed}").write_bytes(content(seed, 200_000))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for _ in range(5):
                with (tmp_path / f"{seed}").open("rb") as stream:
                    staged = box.stage("m", stream.fileno(), size_most=MOST)
                box.mark_good("m", staged.digest)
                box.versions("m")
                box.collect(keep=3)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n % 3,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    found = box.versions("m")
    assert len(found.present) == 3
    assert all(box.verify("m", d) for d in digests(found))
    assert found.current in digests(found)


def test_listings_of_one_descriptor_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Descriptors that are copies of each other share their position in a folder."""
    for number in range(2000):
        (tmp_path / f"{number}").touch()
    folder = os.open(tmp_path, os.O_RDONLY)
    counts: list[int] = []

    def work() -> None:
        counts.extend(len(durable.listing(folder)) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(folder)
    assert counts == [2000] * 80


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    before = descriptors()
    (tmp_path / "x").write_bytes(content(1))
    with Store(tmp_path / "deep" / "state") as box:
        box.close()
        box.close()
    with Store(tmp_path / "deep" / "state") as box, (tmp_path / "x").open("rb") as stream:
        digest = box.stage("m", stream.fileno(), size_most=MOST).digest
        box.mark_good("m", digest)
        box.verify("m", digest)
        with pytest.raises(ApiError):
            box.stage("m", stream.fileno(), size_most=10)
        with pytest.raises(ApiError):
            box.open("m", "0" * 64)
        box.mark_bad("m", digest)
        box.collect()
    assert descriptors() == before


def test_the_store_is_light(tmp_path: Path) -> None:
    """It loads none of the heavy packages: the daemon has to stay small."""
    script = (
        "import sys, gemctl.store\n"
        "heavy = {'pydantic', 'cryptography', 'numpy', 'asyncio', 'click'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
