"""Store and state survive whatever cuts them off: kills, failing calls, full and read-only disks.

There is a kill before every system call that finds something changed, and each fails once with
each error; store_faults.py does that and checks what is left. GEM_SOAK=1 leaves out nothing, tries
errors that stay, and works on the disk of the test's own folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemctl.errors import ApiError
from gemctl.store import state
from gemctl.store.state import State, StateFile
from gemctl.store.store import Store

DRIVER = Path(__file__).with_name("store_faults.py")
ROOT = Path(__file__).resolve().parents[2]
SOAK = bool(os.environ.get("GEM_SOAK"))
SHM = Path("/dev/shm")
OPERATIONS = (
    *("open", "stage-first", "stage-next", "stage-again", "stage-mend", "stage-named"),
    *("stage-plain", "mark-good", "mark-bad", "collect", "remove"),
    *("state-first", "state-next", "state-spoiled", "state-boot"),
)


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of syncs of a disk would take minutes."""
    if SOAK or not os.access(SHM, os.W_OK):
        yield tmp_path / "work"
        return
    folder = SHM / f"gemctl-faults-{os.getpid()}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def driven(work: Path, kind: str, operation: str) -> dict[str, Any]:
    """What the driver tells; skips where processes cannot be traced."""
    if shutil.which("strace") is None:
        pytest.fail("strace: not installed; install the package strace", pytrace=False)
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(work), kind, operation],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    if "skip" in told:
        pytest.skip(f"this system does not let a process be traced: {told['skip']}")
    return told


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_kill_or_an_error_anywhere_leaves_a_whole_store(work: Path, operation: str) -> None:
    told = driven(work, "faults", operation)
    tried = told["tried"]
    print(f"{operation}: kill points: {tried['kill']}, error points: {tried['errors']}")
    assert told["wrong"] == []
    assert tried["kill"] >= 5
    assert tried["errors"] >= 20
    assert told["outcomes"]["-9"] == tried["kill"]


# ---- the order of calls, on which a power loss depends ----
def descriptor(line: str) -> str:
    """The descriptor that a call works on, or gave."""
    if line.startswith("openat"):
        return line.rpartition("= ")[2].split()[0]
    return re.findall(r"\((\d+)", line)[0]


def at(calls: list[str], pattern: str, after: int = -1) -> int:
    """Where the first call that fits lies behind a place."""
    for number in range(after + 1, len(calls)):
        if re.match(pattern, calls[number]):
            return number
    raise AssertionError(f"no {pattern} behind {after} in\n" + "\n".join(calls))


def test_a_version_is_synced_before_it_is_named_and_its_folder_behind(work: Path) -> None:
    calls = driven(work, "trace", "stage-next")["calls"]
    opened = at(calls, r"openat\(.*O_TMPFILE")
    target = descriptor(calls[opened])
    folder = re.findall(r"openat\((\d+), \"\.\"", calls[opened])[0]
    writes = rf"copy_file_range\(\d+, [^,]+, {target},|pwrite64\({target},|write\({target},"
    last = max(i for i, line in enumerate(calls) if re.match(writes, line))
    mode = at(calls, rf"fchmod\({target}, 0444\)", last)
    synced = at(calls, rf"fsync\({target}\) += 0", mode)
    named = at(calls, rf"linkat\(.*/proc/self/fd/{target}\", {folder},", synced)
    at(calls, rf"fsync\({folder}\) += 0", named)


def test_a_passing_name_is_given_up_after_the_sync(work: Path) -> None:
    calls = driven(work, "trace", "stage-named")["calls"]
    target = descriptor(calls[at(calls, r"openat\(.*\.partial\.")])
    synced = at(calls, rf"fsync\({target}\) += 0")
    named = at(calls, r"rename(at2?)?\(.*\.partial\.", synced)
    at(calls, r"fsync\(", named)


def test_marks_are_on_the_disk_before_the_links_change(work: Path) -> None:
    calls = driven(work, "trace", "mark-good")["calls"]
    marks = at(calls, r"rename(at2?)?\(.*marks\.json")
    before = calls[:marks]
    assert any(line.startswith("fsync(") for line in before)
    first = at(calls, r"fsync\(", marks)
    link = at(calls, r"symlinkat\(", first)
    previous = at(calls, r"rename(at2?)?\(.*\.previous\.new", link)
    current = at(calls, r"rename(at2?)?\(.*\.current\.new", previous)
    at(calls, r"fsync\(", current)


@pytest.mark.parametrize("operation", ["state-first", "state-next", "state-boot"])
def test_a_state_is_synced_before_it_is_named_and_its_folder_behind(
    work: Path, operation: str
) -> None:
    calls = driven(work, "trace", operation)["calls"]
    opened = at(calls, r"openat\(.*\.state\.json\.new")
    target = descriptor(calls[opened])
    written = at(calls, rf"write\({target},", opened)
    synced = at(calls, rf"fsync\({target}\) += 0", written)
    kept = synced
    if operation != "state-first":
        kept = at(calls, r"rename(at2?)?\(.*state\.json\.previous", synced)
    named = at(calls, r"rename(at2?)?\(.*\.state\.json\.new", kept)
    at(calls, r"fsync\(", named)


# ---- disks that are full or read-only ----
DATA = bytes(range(256)) * 1200  # 300 KiB


def candidate(folder: Path, number: int) -> Path:
    path = folder / f"candidate-{number}"
    path.write_bytes(bytes([number]) + DATA)
    return path


def stage(box: Store, source: Path) -> str:
    with source.open("rb") as stream:
        return box.stage("m", stream.fileno(), size_most=1 << 30).digest


def check(folder: Path, current: str, present: int) -> None:
    """The store is readable and whole, and nothing of a failure is left."""
    with Store(folder) as box:
        found = box.versions("m")
        assert found.current == current
        assert len(found.present) == present
        for version in found.present:
            box.verify("m", version.digest)
    for path in (folder / "models" / "m").iterdir():
        assert re.fullmatch(r"[0-9a-f]{64}\.gembin|current|previous|marks\.json", path.name), path


def mounted(folder: Path, *words: str) -> bool:
    command = ["mount", *words, str(folder)]
    return os.geteuid() == 0 and not subprocess.run(command, capture_output=True).returncode


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mounted(folder, "-t", "tmpfs", "-o", "size=1m", "tmpfs"):
        pytest.skip("a file system can be mounted by root only; the size limit's test stands")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def refused_for_space(error: ApiError, wanted: int) -> None:
    assert error.code == "no_space"
    assert re.search(rf"{wanted} bytes wanted, \d+ free; ", str(error)), error


def test_a_full_disk_is_named_with_both_sizes_and_goes_on_serving(
    disk: Path, tmp_path: Path
) -> None:
    wanted = len(DATA) + 1
    with Store(disk) as box, StateFile(disk) as file:
        file.save(state.with_model(State(), "m"))
        first = stage(box, candidate(tmp_path, 1))
        box.mark_good("m", first)
        second = stage(box, candidate(tmp_path, 2))
        box.mark_good("m", second)
        third = candidate(tmp_path, 3)
        fourth = candidate(tmp_path, 4)
        stage(box, third)
        with pytest.raises(ApiError) as caught:
            stage(box, fourth)
        refused_for_space(caught.value, wanted)
        check(disk, second, 3)
        (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * 4096))
        with pytest.raises(ApiError) as caught:
            file.save(state.with_throttle(State(), temp_c=60.0))
        assert caught.value.code == "no_space"
        with pytest.raises(ApiError) as caught:
            box.mark_good("m", first)
        assert caught.value.code == "no_space"
        check(disk, second, 3)
        (disk / "filler").unlink()
        box.mark_bad("m", hashlib.sha256(third.read_bytes()).hexdigest())
        box.collect()
        stage(box, fourth)
        check(disk, second, 3)
        box.mark_good("m", first)
        assert file.load().state == state.with_model(State(), "m")
    assert sorted(p.name for p in disk.iterdir()) == ["models", "state.json"]


def test_space_that_goes_while_copying_is_told_too(disk: Path, tmp_path: Path) -> None:
    """Somebody else fills the disk behind the first look at what is free."""
    from gemctl.store.copying import Pace

    with Store(disk) as box:
        first = stage(box, candidate(tmp_path, 1))
        box.mark_good("m", first)
        big = tmp_path / "big"
        big.write_bytes(DATA * 2)
        pace = Pace(1e9, progress=lambda done, _total: done or fill(disk))
        with big.open("rb") as stream, pytest.raises(ApiError) as caught:
            box.stage("m", stream.fileno(), size_most=1 << 30, pace=pace)
        refused_for_space(caught.value, 2 * len(DATA))
    check(disk, first, 1)


def fill(disk: Path) -> None:
    free = os.statvfs(disk).f_bavail * 4096
    (disk / "filler").write_bytes(bytes(free - 200_000))


def test_a_read_only_disk_is_read_and_every_change_refused(disk: Path, tmp_path: Path) -> None:
    wanted = state.begin_trial(state.with_model(State(), "m", digest="a" * 64), "m", "b" * 64)
    with Store(disk) as box, StateFile(disk) as file:
        file.save(wanted)
        first = stage(box, candidate(tmp_path, 1))
        box.mark_good("m", first)
    if not mounted(disk, "-o", "remount,ro"):
        pytest.skip("this system does not remount read-only")
    with Store(disk) as box, StateFile(disk) as file:
        with pytest.raises(ApiError, match=r"Read-only .* \d+ bytes wanted; mount it"):
            stage(box, candidate(tmp_path, 2))
        for change in (
            lambda: box.mark_bad("m", first),
            lambda: box.remove("m", "0" * 64),
            lambda: file.save(State()),
        ):
            with pytest.raises(ApiError) as caught:
                change()
            assert caught.value.code in ("no_space", "not_found")
        assert box.collect().versions == ()
        plan = file.boot()
        assert plan.loads == (state.Load("m", "a" * 64),)  # the trial could not be written off
        assert "read-only" in plan.warnings[0].lower()
        check(disk, first, 1)
    with pytest.raises(ApiError) as caught:
        Store(disk / "other")
    assert caught.value.code == "no_space"


@pytest.mark.parametrize("size", [0, 4096, 100_000])
def test_a_file_size_limit_is_like_a_full_disk(tmp_path: Path, size: int) -> None:
    """In another process, as the limit cannot be lifted again; needs no root."""
    with Store(tmp_path) as box:
        first = stage(box, candidate(tmp_path, 1))
        box.mark_good("m", first)
    source = candidate(tmp_path, 2)
    script = (
        "import sys; from pathlib import Path; from gemctl.store.store import Store\n"
        "from gemctl.errors import ApiError\n"
        "with Store(Path(sys.argv[1])) as box, open(sys.argv[2], 'rb') as source:\n"
        "    try: box.stage('m', source.fileno(), size_most=1 << 30)\n"
        "    except ApiError as error: print(error.code, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(source)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no_space ")
    assert f"{len(DATA) + 1} bytes wanted" in done.stdout
    check(tmp_path, first, 1)


# ---- file systems that share blocks ----
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_a_candidate_on_the_same_disk_is_not_copied(tmp_path: Path, kind: str) -> None:
    maker = shutil.which(f"mkfs.{kind}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if maker is None:
        pytest.skip(f"mkfs.{kind}: not installed; a reflink is played in the unit tests")
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as stream:
        stream.truncate(400 << 20)
    subprocess.run([maker, "-q", str(image)], check=True, capture_output=True)
    if not mounted(folder, "-o", "loop", str(image)):
        pytest.skip(f"{kind}: cannot be mounted here; a reflink is played in the unit tests")
    try:
        source = candidate(folder, 1)
        with Store(folder / "state") as box, source.open("rb") as stream:
            staged = box.stage("m", stream.fileno(), size_most=1 << 30)
            assert staged.method == "reflink"
            assert staged.digest == hashlib.sha256(source.read_bytes()).hexdigest()
            with source.open("r+b") as writer:
                writer.write(b"changed")
            assert box.verify("m", staged.digest) == len(DATA) + 1
    finally:
        subprocess.run(["umount", str(folder)], check=True)
