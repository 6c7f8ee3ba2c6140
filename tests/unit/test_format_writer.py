"""The writer: same bytes, whole or not at all, and the checksums that a reader expects."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gemrun.format import assemble, spec, writer
from gemrun.format.reader import read_artifact
from gemrun.format.writer import ArtifactWriter, Part, WriteError
from golden import make

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def golden() -> make.Golden:
    return make.build(make.INT4)


def test_the_same_parts_give_the_same_bytes(golden: make.Golden, tmp_path: Path) -> None:
    one = make.write(golden, tmp_path / "a.gembin")
    (tmp_path / "other").mkdir()
    two = make.write(make.build(make.INT4), tmp_path / "other" / "b.gembin")
    assert (tmp_path / "a.gembin").read_bytes() == (tmp_path / "other/b.gembin").read_bytes()
    assert one.root_sha256 == two.root_sha256
    assert one.size == (tmp_path / "a.gembin").stat().st_size


def test_nothing_of_place_time_or_user_is_inside(golden: make.Golden, tmp_path: Path) -> None:
    make.write(golden, tmp_path / "named-file.gembin")
    raw = (tmp_path / "named-file.gembin").read_bytes()
    for word in (b"named-file", os.fsencode(tmp_path), os.uname().nodename.encode()):
        assert word not in raw


def test_chunks_may_be_cut_anywhere(golden: make.Golden, tmp_path: Path) -> None:
    whole = make.write(golden, tmp_path / "a.gembin")
    data = b"".join(golden.chunks)
    pieces = tuple(data[at : at + 777] for at in range(0, len(data), 777))
    cut = make.write(replace(golden, chunks=pieces), tmp_path / "b.gembin")
    assert cut.root_sha256 == whole.root_sha256


def test_sections_may_come_as_iterators(golden: make.Golden, tmp_path: Path) -> None:
    done = assemble.assemble(golden.records)

    def chunks() -> Iterator[bytes]:
        yield from golden.chunks

    whot = done.parts[-1]
    parts = (*done.parts[:-1], replace(whot, data=chunks()))
    written = writer.write_artifact(tmp_path / "a.gembin", done.header, parts)
    assert written.root_sha256 == make.write(golden, tmp_path / "b.gembin").root_sha256


def test_tests_are_filled_in_over_the_sealed_image(golden: make.Golden, tmp_path: Path) -> None:
    payload = (
        spec.TestVector(
            prompt_count=1,
            step_count=2,
            digest=77,
            prompt=(5,) + (0,) * 399,
            steps=(6, 7) + (0,) * 62,
        ).pack()
        * 2
    )

    def fill(image: Path) -> bytes:
        with read_artifact(image) as artifact:  # already whole
            assert artifact.tests[0].digest == 0
        return payload

    make.write(golden, tmp_path / "a.gembin", fill)
    with read_artifact(tmp_path / "a.gembin") as artifact:
        assert [t.digest for t in artifact.tests] == [77, 77]


def test_fill_tests_reseals_a_file_in_place(golden: make.Golden, tmp_path: Path) -> None:
    path = tmp_path / "a.gembin"
    before = make.write(golden, path).root_sha256
    blank = writer.blank_tests(2)
    changed = blank[:8] + b"\x01" + blank[9:]
    after = writer.fill_tests(path, changed)
    with read_artifact(path) as artifact:
        assert artifact.header.root_sha256 == after != before
        assert artifact.tests[0].digest == 1
    assert writer.fill_tests(path, blank) == before
    with pytest.raises(ValueError, match="reserved"):
        writer.fill_tests(path, blank[:-1])


def test_blank_tests_pass_the_reader() -> None:
    record = spec.TestVector.unpack(writer.blank_tests(1))
    assert (record.prompt_count, record.step_count, record.digest) == (1, 1, 0)


def test_missing_or_extra_bytes_are_the_callers_mistake(
    golden: make.Golden, tmp_path: Path
) -> None:
    size = golden.records.weights_size
    with pytest.raises(ValueError, match="never written"):
        make.write(replace(golden, chunks=golden.chunks[:1]), tmp_path / "a.gembin")
    with pytest.raises(ValueError, match="more than"):
        make.write(replace(golden, chunks=(bytes(size + 1),)), tmp_path / "a.gembin")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_write_leaves_nothing(
    golden: make.Golden, tmp_path: Path, failure: type[BaseException]
) -> None:
    path = tmp_path / "a.gembin"
    path.write_bytes(b"the old one")

    def fill(partial: Path) -> bytes:
        assert partial.exists()
        raise failure

    with pytest.raises(failure):
        make.write(golden, path, fill)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gembin"]
    assert path.read_bytes() == b"the old one"


def test_an_iterator_that_fails_leaves_nothing(golden: make.Golden, tmp_path: Path) -> None:
    done = assemble.assemble(golden.records)

    def chunks() -> Iterator[bytes]:
        yield bytes(100)
        raise OSError(errno.EIO, "the checkpoint went away")

    parts = (*done.parts[:-1], replace(done.parts[-1], data=chunks()))
    with pytest.raises(OSError, match="went away"):
        writer.write_artifact(tmp_path / "a.gembin", done.header, parts)
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_said_before_a_byte_is_written(tmp_path: Path) -> None:
    parts = [Part("WHOT", 1 << 60)]
    with pytest.raises(WriteError, match=r"takes \d+ bytes, \d+ are free; free some space"):
        writer.write_artifact(tmp_path / "a.gembin", spec.Header(), parts)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_with_path_and_bytes(
    golden: make.Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WriteError, match=r"a\.gembin.*No space left on device while writing \d+"):
        make.write(golden, tmp_path / "a.gembin")
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(
    golden: make.Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make.write(golden, tmp_path / "a.gembin")
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:1000], at))
    short = make.write(golden, tmp_path / "b.gembin")
    assert short.root_sha256 == whole.root_sha256
    assert (tmp_path / "a.gembin").read_bytes() == (tmp_path / "b.gembin").read_bytes()


@pytest.mark.parametrize("output", ["/dev/full", "/dev/null"])
def test_a_device_is_no_output(golden: make.Golden, output: str) -> None:
    with pytest.raises(WriteError, match="not a regular file"):
        make.write(golden, Path(output))
    assert not Path(output).is_file()
    assert not Path(output + writer.PARTIAL).exists()


def test_a_missing_folder_is_named(golden: make.Golden, tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="no such folder; create it first"):
        make.write(golden, tmp_path / "nowhere" / "a.gembin")


def test_a_file_size_limit_is_an_error(golden: make.Golden, tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from golden import make\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (70000, 70000))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "make.write(make.build(make.INT4), Path(sys.argv[1]))\n"
    )
    done = _python(code, tmp_path / "a.gembin")
    assert done.returncode == 1
    assert "WriteError" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 70000


def test_two_writers_of_one_output(golden: make.Golden, tmp_path: Path) -> None:
    done = assemble.assemble(golden.records)
    path = tmp_path / "a.gembin"
    refused = pytest.raises(WriteError, match="another compile is writing it")
    with ArtifactWriter(path, done.header, done.parts), refused:
        make.write(golden, path)


@pytest.mark.parametrize("left", [b"", spec.MAGIC + b"\xff" * 200_000])
def test_a_stale_partial_is_no_obstacle(golden: make.Golden, tmp_path: Path, left: bytes) -> None:
    (tmp_path / "a.gembin.partial").write_bytes(left)
    make.write(golden, tmp_path / "a.gembin")
    with read_artifact(tmp_path / "a.gembin"):
        assert not (tmp_path / "a.gembin.partial").exists()


def test_a_partial_that_is_none_of_ours_stays(golden: make.Golden, tmp_path: Path) -> None:
    (tmp_path / "a.gembin.partial").write_bytes(b"mine")
    with pytest.raises(WriteError, match=r"a\.gembin\.partial: exists and is no unfinished"):
        make.write(golden, tmp_path / "a.gembin")
    assert (tmp_path / "a.gembin.partial").read_bytes() == b"mine"


def test_a_partial_is_known_as_ours_from_its_first_byte(
    golden: make.Golden, tmp_path: Path
) -> None:
    """A killed compile may leave it before the header was written."""
    done = assemble.assemble(golden.records)
    with ArtifactWriter(tmp_path / "a.gembin", done.header, done.parts) as out:
        assert Path(out.partial).read_bytes()[: len(spec.MAGIC)] == spec.MAGIC


def test_paths_need_not_be_utf8(golden: make.Golden, tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + "/\u6a21\u578b \u00fc".encode() + b"\xff"
    Path(os.fsdecode(folder)).mkdir()
    path = folder + b"/a.gembin"
    done = assemble.assemble(golden.records)
    with ArtifactWriter(path, done.header, done.parts) as out:
        for chunk in golden.chunks:
            out.write_weights(chunk)
        out.finish()
    with read_artifact(path):
        pass
    with pytest.raises(WriteError, match=r"\\xff"):
        make.write(golden, Path(os.fsdecode(folder + b"/none/a.gembin")))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_compile_leaves_no_whole_file(how: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from dataclasses import replace\n"
        "from golden import make\n"
        "g = make.build(make.INT4)\n"
        "def slow():\n"
        "    for c in g.chunks:\n"
        "        time.sleep(0.02); yield c\n"
        "print('go', flush=True)\n"
        "make.write(replace(g, chunks=slow()), Path(sys.argv[1]))\n"
    )
    for delay in (0.0, 0.1, 0.3):
        path = tmp_path / f"{delay}.gembin"
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        time.sleep(delay)
        process.send_signal(how)
        process.wait(30)
        process.stdout.close()
        assert not path.exists()
        if how is signal.SIGINT:
            assert not Path(f"{path}.partial").exists()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


def _python(code: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=_environment(),
    )
