"""The minimal engine: the same numbers and the same refusals as the full one, and nothing misread.

Three builds of it: the library that `make dev` makes, one file for a bare compiler, and that file
for this processor's AVX2. They are driven through shared libraries with a shim.
"""

from __future__ import annotations

import collections
import ctypes
import mmap
import os
import random
import re
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz.mutate import entries, find, mutations, reseal, section_range
from gemrun.format import spec
from gemrun.format.codes import Code
from hostile.format_engine import EngineReader

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
LIBRARY = ROOT / "build" / "dev" / "libgemrun_minimal.a"
GOLDEN = ROOT / "tests" / "golden"
SHIM = Path(__file__).with_name("minimal_shim.c")
CC = os.environ.get("CC", "cc")
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
ONE = ("-DGR_MINIMAL", "-DGR_BASE_ONLY", str(CSRC / "gemrun_one.c"))
BUILDS = {
    "library": ("-O2", str(LIBRARY)),
    "one-file": ("-O2", *ONE),
    "one-file-avx2": ("-O3", "-mavx2", "-mfma", *ONE),
}
MISSING = {  # of gemrun.h
    *("gemrun_infer", "gemrun_generate", "gemrun_chat", "gemrun_cancel", "gemrun_tokenize"),
    *("gemrun_detokenize", "gemrun_get_info", "gemrun_regions", "gemrun_status_text"),
    "gemrun_version",
}
FEATURE_FLOAT = 0x10 | 0x40  # float matrices, float KV cache
FEATURE_MASK = 0x80  # KV heads that keep a part
KV_TYPE = 32  # offset in CONF
KERNEL, THREADS = -10, -8  # gemrun.h
UNREAD = {
    Code.THRM,
    Code.TMPL,
    Code.TOKN,
    Code.PINP,
}  # sections that it reads in part, or not at all
FAMILIES = {
    "gemma2": ("--quantization", "int4"),
    "gemma3": ("--quantization", "int4"),
    "qwen2": ("--quantization", "int4", "--int4-format", "q4raw"),
    "llama3": ("--quantization", "int8"),
}
COMMON = ("--effort", "fast", "--kv-cache-type", "int8", "--kv-cache-size", "128")


def has_avx2() -> bool:
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return {"avx2", "fma"} <= set(flags.split())


@pytest.fixture(scope="module", params=BUILDS)
def minimal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    if request.param == "one-file-avx2" and not has_avx2():
        pytest.skip("no AVX2 with FMA")
    if not LIBRARY.exists():
        pytest.fail("libgemrun_minimal.a: not built; run 'make dev'", pytrace=False)
    target = tmp_path_factory.mktemp("minimal") / "minimal.so"
    flags = (*STRICT, "-ffp-contract=off", "-fPIC", "-shared", f"-I{CSRC}")
    command = [CC, *flags, str(SHIM), *BUILDS[request.param], "-pthread", "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(target))
    library.t_error.restype = ctypes.c_char_p
    return library


def status(library: ctypes.CDLL, image: bytes) -> int:
    size = max(1, len(image))
    room = mmap.mmap(-1, size)
    room[: len(image)] = image
    data = (ctypes.c_char * size).from_buffer(room)
    code = int(library.t_open(data, ctypes.c_size_t(len(image))))
    del data
    room.close()
    return code


def golden(name: str) -> bytes:
    return (GOLDEN / "v1.0" / f"{name}.gembin").read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_gives_the_stored_digests(
    minimal: ctypes.CDLL,
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    family: str,
) -> None:
    path = artifact_cache(tiny_checkpoint(family), *FAMILIES[family], *COMMON)
    for threads in (1, 2, 3):
        passed = minimal.t_replay(str(path).encode(), threads)
        assert passed >= 1, f"{threads} threads: {minimal.t_error().decode()}"


def test_replay_of_the_golden_artifact(minimal: ctypes.CDLL) -> None:
    path = str(GOLDEN / "v1.0" / "tiny-int4.gembin").encode()
    assert [minimal.t_replay(path, threads) for threads in (1, 2, 3)] == [2, 2, 2]


@pytest.mark.parametrize("settings", [(0.0, 0, 1.0), (1.5, 20, 0.9), (3.0, 0, 0.8), (1.0, 5, 1.0)])
def test_steps_equal_those_of_the_full_engine(
    minimal: ctypes.CDLL,
    tiny_checkpoint: Callable[..., Path],
    artifact_cache: Callable[..., Path],
    settings: tuple[float, int, float],
) -> None:
    """Logits after each of 70 positions, over windows and several steps, and 20 sampled ids."""
    from gemrun._engine import ffi, lib

    path = artifact_cache(tiny_checkpoint("gemma3"), *FAMILIES["gemma3"], *COMMON)
    ids = [random.Random(5).randrange(3, 500) for _ in range(70)]
    made, digest = (ctypes.c_int32 * 20)(), ctypes.c_uint64()
    given = (ctypes.c_int32 * len(ids))(*ids)
    temperature, top_k, top_p = settings
    positions = minimal.t_run(
        str(path).encode(), given, ctypes.c_size_t(len(ids)), ctypes.c_float(temperature),
        top_k, ctypes.c_float(top_p), made, 20, ctypes.byref(digest),
    )  # fmt: skip
    assert positions == len(ids), minimal.t_error().decode()

    out = ffi.new("gemrun_context_t **")
    config = ffi.new("gemrun_config *", lib.gemrun_config_default())
    config.allow_foreign_board = config.ignore_memory = 1
    assert lib.gemrun_open(out, str(path).encode(), config) == 0
    request = ffi.new("gemrun_request *", lib.gemrun_request_default(out[0]))
    request.temperature, request.top_k, request.top_p = settings
    request.seed_set, request.seed = 1, 7
    hashed, wanted = 14695981039346656037, []
    for token in ids:
        assert lib.gemrun_decode(out[0], token) > 0
        count = ffi.new("uint32_t *")
        logits = lib.gemrun_logits(out[0], count)
        for byte in bytes(ffi.buffer(logits, 4 * count[0])):
            hashed = (hashed ^ byte) * 1099511628211 & (2**64 - 1)
    for _ in range(20):
        wanted.append(lib.gemrun_sample(out[0], request))
        assert lib.gemrun_decode(out[0], wanted[-1]) > 0
    lib.gemrun_destroy(out[0])
    assert digest.value == hashed
    assert list(made) == wanted


@pytest.mark.parametrize("name", ["tiny-f16", "tiny-q4raw"])
def test_float_artifacts_are_refused(minimal: ctypes.CDLL, name: str) -> None:
    """By their feature bits; and by their records where those bits are missing."""
    image = bytearray(golden(name))
    assert status(minimal, bytes(image)) == Code.FEATURE
    assert minimal.t_error() == b"gemrun: status -27"
    features = struct.unpack_from("<Q", image, 48)[0]
    assert features & FEATURE_FLOAT
    struct.pack_into("<Q", image, 48, features & ~FEATURE_FLOAT)
    assert status(minimal, bytes(reseal(image))) == Code.CONF
    place = section_range(image, find(image, "CONF"))
    assert place is not None
    struct.pack_into("<I", image, place[0] + KV_TYPE, 2)  # claims int8
    assert status(minimal, bytes(reseal(image))) == Code.LAYR


def test_an_artifact_with_kvmk_is_refused(minimal: ctypes.CDLL) -> None:
    """By its feature bit; and by its section where that bit is missing."""
    image = bytearray(golden("tiny-kvmask"))
    assert status(minimal, bytes(image)) == Code.FEATURE
    features = struct.unpack_from("<Q", image, 48)[0]
    assert features & FEATURE_MASK
    struct.pack_into("<Q", image, 48, features & ~FEATURE_MASK)
    assert status(minimal, bytes(reseal(image))) == Code.MISSING


@pytest.mark.parametrize("name", ["tiny-value4", "tiny-key4"])
def test_an_artifact_with_4_bits_in_its_cache_is_refused(minimal: ctypes.CDLL, name: str) -> None:
    """By its feature bit, also where the bit of KVMK is missing."""
    image = bytearray(golden(name))
    assert status(minimal, bytes(image)) == Code.FEATURE
    features = struct.unpack_from("<Q", image, 48)[0]
    struct.pack_into("<Q", image, 48, features & ~FEATURE_MASK)
    assert status(minimal, bytes(reseal(image))) == Code.FEATURE


def test_a_pinned_prompt_is_left_alone(minimal: ctypes.CDLL) -> None:
    """It computes every prompt: nothing of the section is used, its checksum is compared."""
    image = bytearray(golden("tiny-pinned"))
    assert status(minimal, bytes(image)) == 0
    place = section_range(image, find(image, "PINP"))
    assert place is not None
    image[place[0]] ^= 0xFF
    assert status(minimal, bytes(image)) == Code.SECTION_CRC
    assert status(minimal, bytes(reseal(image))) == 0


def test_settings_that_it_lacks_are_refused(minimal: ctypes.CDLL) -> None:
    path = str(GOLDEN / "v1.0" / "tiny-int4.gembin").encode()
    codes = [minimal.t_refused(path, which) for which in range(6)]
    assert codes[:5] == [KERNEL, THREADS, Code.FEATURE, Code.FEATURE, Code.FEATURE]
    assert codes[5] >= 0


def test_golden_refusals_keep_their_codes(minimal: ctypes.CDLL, engine: EngineReader) -> None:
    for path in sorted((GOLDEN / "refused").glob("*.gembin")):
        image = path.read_bytes()
        full, ours = engine.status(image), status(minimal, image)
        if path.name != "TOKN-vocabulary.gembin" and full in UNREAD:
            assert ours == 0, path.name
        elif ours == Code.FEATURE != full:
            assert full in (Code.KVMK, Code.LAYR, Code.MISSING), path.name
            assert struct.unpack_from("<Q", image, 48)[0] & FEATURE_MASK, path.name
        else:
            assert ours == full, path.name


@pytest.fixture(scope="module")
def engine() -> EngineReader:
    return EngineReader()


def agrees(image: bytes, full: int, ours: int) -> bool:
    """Whether the minimal engine may say `ours` where the full one says `full`."""
    if ours == full:
        return True
    if ours == Code.FEATURE:
        return bool(struct.unpack_from("<Q", image, 48)[0] & (FEATURE_FLOAT | FEATURE_MASK))
    if ours == Code.CONF:
        place = section_range(image, find(image, "CONF"))
        return place is not None and struct.unpack_from("<I", image, place[0] + KV_TYPE)[0] < 2
    later = {0, Code.TEST, Code.TOKN, Code.RAM, Code.WEIGHTS_CRC}
    return full in UNREAD and ours in later


def test_damage_gets_the_code_of_the_full_engine(
    minimal: ctypes.CDLL, engine: EngineReader
) -> None:
    image, rng = golden("tiny-int4"), random.Random(11)
    images = list(mutations(image, 400, random.Random("minimal")))
    images += [image[:length] for length in range(0, len(image), 4096)]
    present = {bytes(image[at : at + 4]).decode() for at in entries(image)}
    for section in (s for s in spec.SECTIONS if s in present):
        place = section_range(image, find(image, section))
        assert place is not None
        for _ in range(60):
            raw = bytearray(image)
            raw[place[0] + rng.randrange(place[1])] ^= 1 << rng.randrange(8)
            images += [bytes(raw), bytes(reseal(raw))]
    counts: collections.Counter[str] = collections.Counter()
    for number, damaged in enumerate(images):
        full, ours = engine.status(damaged), status(minimal, damaged)
        assert agrees(damaged, full, ours), f"{number}: {Code(full).name}, minimal {ours}"
        counts[Code(ours).name] += 1
    print(f"\nminimal engine: {len(images)} damaged images: {dict(counts)}")


def test_what_the_library_has_and_its_size(record_property: pytest.RecordProperty) -> None:
    def run(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    names = set(re.findall(r" T (gemrun_\w+)$", run("nm", str(LIBRARY)), re.M))
    header = (CSRC / "gemrun.h").read_text(encoding="utf-8")
    declared = set(re.findall(r"^GEMRUN_API[^;(]*?(gemrun_\w+)\(", header, re.M))
    assert names == declared - MISSING
    sizes: collections.Counter[str] = collections.Counter()
    for row in run("size", "-A", "-d", str(LIBRARY)).splitlines():
        cells = row.split()
        if len(cells) == 3 and cells[0].startswith((".text", ".rodata", ".data")):
            sizes[cells[0]] += int(cells[1])
    core = sum(sizes.values())
    print(f"\nminimal engine with its port: {core} bytes {dict(sizes)}")
    record_property("minimal_bytes", core)
    assert core < 64 * 1024
