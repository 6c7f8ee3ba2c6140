"""gemrun on files that wait, steer the terminal, are damaged or have long names.

Trees of fake /proc and /sys files, golden artifacts with changed bytes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

import sysfs
from attacks.attacklib import header_edited, section
from fuzz.mutate import reseal
from gemctl.serve.inspect import boards_of
from gemmake.check.rules import check_file
from gemrun import GemRunContext, GemRunHandle
from gemrun.errors import ArtifactError, GemRunError
from reference import make_image

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "v1.0" / "tiny-int4.gembin"
ASK = ("--prompt", "a", "--max-tokens", "1", "--ignore-memory", "--threads", "1")
FILES = {
    "proc/device-tree/compatible": "x", "proc/device-tree/model": "x", "proc/meminfo": "x",
    "proc/swaps": "x", "proc/self/cgroup": "0::/g", "proc/self/limits": "x",
    "proc/self/status": "x", "proc/self/smaps": "x", "etc/nv_tegra_release": "x",
    "etc/os-release": "x", "sys/class/dmi/id/product_name": "x",
    "sys/module/zswap/parameters/enabled": "x", "sys/kernel/mm/transparent_hugepage/enabled": "x",
    "sys/class/devfreq/dmc/cur_freq": "x", "sys/class/devfreq/dmc/max_freq": "x",
    "sys/fs/cgroup/g/memory.max": "x", "sys/fs/cgroup/g/memory.current": "x",
    "sys/fs/cgroup/g/memory.stat": "x", "sys/fs/cgroup/memory.max": "x",
}  # fmt: skip


def gemrun(
    cli: Path, *words: object, root: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **more} | ({"GEMRUN_ROOT": str(root)} if root else {})
    command = [str(cli), *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    told = (text.decode("utf-8", "surrogateescape") for text in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(command, done.returncode, *told)


def made(path: Path, hdf: bytes = b"{}", **shape: int) -> Path:
    """A made-up artifact."""
    what = make_image.Shape(layers=(make_image.Layer(),), **shape)  # type: ignore[arg-type]
    path.write_bytes(make_image.make(what, seed=3, hdf=hdf))
    return path


# ---- files that wait ----


def pipes(root: Path) -> int:
    """Put a pipe that nobody writes to in the place of every file below the root."""
    found = [path for path in root.rglob("*") if path.is_file()]
    for path in found:
        path.unlink()
        os.mkfifo(path)
    return len(found)


def test_a_tree_of_pipes_keeps_nobody_waiting(gemrun_cli: Path, tmp_path: Path) -> None:
    tree = sysfs.orin_nano(tmp_path / "board")
    for place, text in FILES.items():
        tree.put(place, text)
    assert pipes(tree.root) > 60
    board = made(tmp_path / "made.gembin", hdf=b'{"compatible":["acme,gate"]}')
    for words in (("--doctor",), ("--doctor", GOLDEN), (GOLDEN, *ASK), (board, *ASK)):
        done = gemrun(gemrun_cli, *words, root=tree.root)
        assert done.returncode in (0, 1), done.stderr
    for source in ("zone:tj-thermal", "hwmon:ina3221/temp1", f"file:{tree.root}/proc/meminfo"):
        done = gemrun(gemrun_cli, GOLDEN, *ASK, "--sensor", source, root=tree.root)
        assert done.returncode == 2
        assert f"gemrun: --sensor: {source} gives no temperature" in done.stderr
    assert boards_of(tree.root) == []


def test_a_pipe_of_tunings_is_no_tuning(gemrun_cli: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tune")
    done = gemrun(
        gemrun_cli, GOLDEN, "--info", "--threads", "2", "--ignore-memory",
        GEMRUN_TUNE=str(tmp_path / "tune"),
    )  # fmt: skip
    assert done.returncode == 0
    assert "\ntuned      no; " in done.stdout


# ---- what could steer a terminal ----
STEERS = "\x1b]0;owned\x07\x9b31m\r\x08\x7f\u202e\u2066"


def is_plain(text: str) -> bool:
    steering = r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\udc80-\udcff]"
    return re.search(steering, text) is None


def test_nothing_that_others_wrote_steers_the_terminal(gemrun_cli: Path, tmp_path: Path) -> None:
    tree = sysfs.orin_nano(tmp_path / "board")
    for path in [path for path in tree.root.rglob("*") if path.is_file()]:
        kept = path.read_text()
        number = kept.strip().lstrip("-").isdigit()
        path.write_bytes(kept.encode() if number else (STEERS + kept).encode() + b"\xff\xc2")
    for place in (
        "proc/device-tree/model", "etc/os-release", "proc/swaps",
        "sys/devices/system/cpu/isolated",
    ):  # fmt: skip
        tree.put(place, f"1{STEERS} partition 99999 0 0")
    tree.put("sys/devices/system/cpu/online", f"0{STEERS}")
    tree.put("sys/devices/system/cpu/present", "0-5")
    path = made(tmp_path / "made.gembin", hdf=json.dumps({"compatible": ["a"]}).encode())
    image = bytearray(header_edited(path.read_bytes(), 184, "5s", b"a\x1b[2J"))
    at = section(image, "CONF")[0] + 112
    image[at : at + 6] = b"\x1b[31mX"
    path.write_bytes(reseal(image))
    shown = []
    for words in (("--doctor",), ("--doctor", "--json"), ("--doctor", path), (path, "--info"),
                  (path, *ASK), (path, *ASK, "--sensor", f"zone:{STEERS}"),
                  (tmp_path / STEERS, *ASK), (path, f"--{STEERS}"), ("--doctor", tmp_path / STEERS),
                  (path, "--head", STEERS), (path, *ASK, "--kernel", STEERS),
                  (path, *ASK, "--session", tmp_path / "no" / STEERS)):  # fmt: skip
        done = gemrun(gemrun_cli, *words, "--ignore-memory", root=tree.root)
        shown.append(done.stdout + done.stderr)
        assert is_plain(done.stdout), words
        assert is_plain(done.stderr), words
    assert r"schedutil\x0a\xff\xc2: after a rest" in shown[0]
    assert (
        r"board       1\x1b]0;owned\x07\xc2\x9b31m\x0d\x08\x7f\xe2\x80\xae\xe2\x81\xa6 part"
        in shown[0]
    )
    assert r"model      \x1b[31mX" in shown[3]
    assert r"for a\x1b[2J" in shown[3]


def test_other_alphabets_are_shown_as_they_are(gemrun_cli: Path, tmp_path: Path) -> None:
    name = "Größe-模型-модель-🙂.gembin"
    done = gemrun(gemrun_cli, tmp_path / name, *ASK)
    assert f"Model load failed: {tmp_path}/{name}: cannot be opened" in done.stderr


def test_a_board_s_name_is_clean_in_python_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = sysfs.Sysfs(tmp_path / "board")
    tree.put("proc/device-tree/compatible", f"{STEERS}board\0")
    monkeypatch.setenv("GEMRUN_ROOT", str(tree.root))
    path = made(tmp_path / "made.gembin", hdf=json.dumps({"compatible": ["a"]}).encode())
    image = header_edited(path.read_bytes(), 184, "16s", b"acme")
    path.write_bytes(image)
    with pytest.warns(UserWarning, match="this is [?]+") as seen:
        GemRunContext(path, ignore_memory=True).close()
    assert is_plain(str(seen[0].message))


# ---- damage ----


@pytest.mark.parametrize("at", [0, 512, -600])
def test_damaged_weights_are_the_file_s_fault(gemrun_cli: Path, tmp_path: Path, at: int) -> None:
    """Where the test vectors go wrong, the engine looks at the checksum before it blames itself."""
    image = bytearray(GOLDEN.read_bytes())
    start, size = section(image, "WHOT")
    place = start + at if at >= 0 else start + size + at
    for i in range(place, place + 64):
        image[i] ^= 0xFF
    path = tmp_path / "damaged.gembin"
    path.write_bytes(image)
    said = r"the weights' checksum disagrees \(wanted 0x\w+, found 0x\w+\); copy the file again"
    done = gemrun(gemrun_cli, path, "--run-tests", "--ignore-memory")
    assert done.returncode == 6
    assert re.search(said, done.stderr)
    done = gemrun(gemrun_cli, "--doctor", path, "--ignore-memory")
    assert done.returncode == 1
    assert re.search(f"bad     digests     .*{said}", done.stdout)
    with (
        GemRunContext(path, ignore_memory=True) as context,
        pytest.raises(ArtifactError, match=said),
    ):
        context.run_tests()
    with GemRunHandle(GOLDEN, ignore_memory=True) as handle:
        with pytest.raises(GemRunError, match=said):
            handle.replace(path)
        assert handle.infer("a", max_tokens=1)


def test_another_answer_from_whole_weights_is_the_machine_s(
    gemrun_cli: Path, tmp_path: Path
) -> None:
    image = bytearray(GOLDEN.read_bytes())
    image[section(image, "TEST")[0] + 8] ^= 1  # of a digest
    path = tmp_path / "other.gembin"
    path.write_bytes(reseal(image))
    done = gemrun(gemrun_cli, path, "--run-tests", "--ignore-memory")
    assert done.returncode == 8
    assert "a stored test vector gave another answer, from whole weights" in done.stderr
    assert "; do not use this machine or build, and report it" in done.stderr


@pytest.mark.parametrize(
    "hdf",
    [
        b"", b"x", b"[]", b'{"compatible":', b'{"compatible":"a"}', b'{"compatible":[1]}',
        b'{"id":"a","id":"b"}', b'{"id":"\xff"}', b'{"bsp_version":1}', b"{}{}", b"\0",
    ],
)  # fmt: skip
@pytest.mark.parametrize("target", ["generic-x", "acme"])
def test_a_malformed_description_is_refused(
    gemrun_cli: Path, tmp_path: Path, hdf: bytes, target: str
) -> None:
    path = made(tmp_path / "made.gembin", hdf=hdf)
    path.write_bytes(header_edited(path.read_bytes(), 184, "16s", target.encode()))
    done = gemrun(gemrun_cli, path, *ASK)
    assert done.returncode == 6
    assert done.stderr.startswith(
        f"Model load failed: {path}: section HDFJ, the hardware description, is malformed ("
    )
    assert done.stderr.endswith("); rebuild the file\n")
    done = gemrun(gemrun_cli, "--doctor", path)
    assert done.returncode == 1
    assert f"bad     artifact    {path}: section HDFJ" in done.stdout
    assert check_file(path).exit_code == 6
    for opened in (GemRunContext, GemRunHandle):
        with pytest.raises(ArtifactError, match="section HDFJ") as refused:
            opened(path, ignore_memory=True)
        assert refused.value.code == -49


def test_a_description_too_large_to_look_through_is_no_damage(
    gemrun_cli: Path, tmp_path: Path
) -> None:
    """Whose is it is not known then, which is a warning."""
    path = made(tmp_path / "made.gembin", hdf=json.dumps({"x": list(range(600))}).encode())
    path.write_bytes(header_edited(path.read_bytes(), 184, "16s", b"acme"))
    done = gemrun(gemrun_cli, path, *ASK)
    assert done.returncode == 0
    assert "gemrun: warning: " in done.stderr


# ---- long names ----


@pytest.mark.parametrize("size", [300, 1000, 3000])
def test_paths_are_told_whole(gemrun_cli: Path, tmp_path: Path, size: int) -> None:
    folder = tmp_path
    while len(str(folder)) < size:
        folder = folder / ("folder-" * 20)
    path = folder / "last.gembin"
    told = f"{path}: cannot be opened (No such file or directory); check the path"
    assert f"Model load failed: {told}" in gemrun(gemrun_cli, path, *ASK).stderr
    assert f"bad     artifact    {told}" in gemrun(gemrun_cli, "--doctor", path).stdout
    assert f"gemrun: --tune: {told}" in gemrun(gemrun_cli, path, "--tune").stderr
    for opened in (GemRunContext, GemRunHandle):
        with pytest.raises(ArtifactError, match=re.escape(told)):
            opened(path)
    sensor = f"file:{path}"
    done = gemrun(gemrun_cli, GOLDEN, *ASK, "--sensor", sensor)
    assert f"--sensor: {sensor} " in done.stderr
    assert done.stderr.endswith("or zone:TYPE\n")


def test_a_path_without_end_keeps_its_ends_and_the_reason(gemrun_cli: Path, tmp_path: Path) -> None:
    path = f"{tmp_path}/{'a/' * 20000}last.gembin"
    done = gemrun(gemrun_cli, path, *ASK)
    assert done.returncode == 6
    assert done.stderr.startswith(f"Model load failed: {tmp_path}/a/a/a/")
    assert "..." in done.stderr
    assert "/a/last.gembin: cannot be opened (File name too long); check" in done.stderr


# ---- nouns ----


def test_one_is_no_plural(gemrun_cli: Path, tmp_path: Path) -> None:
    """Whatever counts one of its things."""
    path = made(tmp_path / "made.gembin", threads=1)
    tree = sysfs.Sysfs(tmp_path / "board")
    tree.online("0")
    tree.put("sys/devices/system/cpu/present", "0")
    tree.put("sys/devices/system/cpu/isolated", "0")
    session = tmp_path / "session"
    told = [
        gemrun(gemrun_cli, *words, "--ignore-memory", root=tree.root)
        for words in (
            (path, "--info"), (path, "--tune"), (path, *ASK, "--ignore-eos"), ("--doctor", path),
            (path, *ASK[2:], "--prompt", "b", "--session", session, "--ignore-eos"),
            (GOLDEN, *ASK[2:], "--prompt", "b", "--kv-cache-size", "1"),
            ("--doctor", GOLDEN, "--threads", "1"), (GOLDEN, "--threads", "2", "--run-tests"),
        )
    ]  # fmt: skip
    text = "\n".join(done.stdout + done.stderr for done in told)
    things = "tokens|threads|layers|cores|bytes|turns|test vectors|checks|warnings|are"
    plural = rf"(?<![\d.,])1 (?:{things})\b"
    assert re.findall(plural, text) == []
    for part in ("1 thread, ", "1 layer, ", "1 token (", "core 0", "1 of 1 is online"):
        assert part in text, text
