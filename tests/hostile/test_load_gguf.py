"""Damaged GGUF files (field reports O1, O2, O3, O4, O6, O14)."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import load_files
from gemmake.errors import CheckpointError
from gemmake.load import load_checkpoint
from gemmake.load.gguf import read_gguf
from gemmake.model import Role
from load_files import gguf_array, gguf_bytes, gguf_string, gguf_value

ARCH = ("general.architecture", gguf_value(8, "llama"))
TENSOR = ("a", (4,), 0, 0)
MAX64 = 2**63 - 1


def with_alignment(value: bytes) -> bytes:
    return gguf_bytes([("general.alignment", value)], [TENSOR], bytes(64), alignment=8)


def nested(depth: int) -> bytes:
    """An array of arrays of .. `depth` levels."""
    return struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQB", 0, 1, 7)


def one_tensor(shape: tuple[int, ...], kind: int = 0, offset: int = 0, data: int = 64) -> bytes:
    return gguf_bytes([ARCH], [("a", shape, kind, offset)], bytes(data))


BROKEN: dict[str, tuple[bytes, str]] = {
    # O1: products and counts that wrap
    "ne (2^63-1, 2)": (one_tensor((MAX64, 2)), r"beyond 2\^63"),
    "ne (2^42, 2^22)": (one_tensor((2**42, 2**22)), r"beyond 2\^63"),
    "ne 2^64-1": (one_tensor((2**64 - 1,)), r"beyond 2\^63"),
    "ne (2^32, 2^32)": (one_tensor((2**32, 2**32)), r"beyond 2\^63"),
    "ne (2^62)": (one_tensor((2**62,)), r"beyond 2\^63"),
    "ne 4 dimensions": (one_tensor((2**16,) * 4), r"beyond 2\^63"),
    "2^60 tensors": (gguf_bytes([ARCH], tensor_count=2**60), "claims"),
    "2^64-1 tensors": (gguf_bytes([ARCH], tensor_count=2**64 - 1), "claims"),
    "2^60 keys": (gguf_bytes([ARCH], key_count=2**60), "claims"),
    "2^64-1 keys": (gguf_bytes([ARCH], key_count=2**64 - 1), "claims"),
    "offset 2^63": (one_tensor((4,), offset=2**63), r"beyond 2\^63"),
    "offset 2^64-32": (one_tensor((4,), offset=2**64 - 32), r"beyond 2\^63"),
    "offset past the end": (one_tensor((4,), offset=64), "needs bytes"),
    "offset not aligned": (one_tensor((4,), offset=8), "multiple of 32"),
    # O2: alignment and zero dimensions
    "alignment 0": (with_alignment(gguf_value(4, 0)), "alignment"),
    "alignment 1": (with_alignment(gguf_value(4, 1)), "alignment"),
    "alignment 3": (with_alignment(gguf_value(4, 3)), "alignment"),
    "alignment 12": (with_alignment(gguf_value(4, 12)), "alignment"),
    "alignment 2^31": (with_alignment(gguf_value(4, 2**31)), "alignment"),
    "alignment 2 MiB": (with_alignment(gguf_value(4, 2 << 20)), "alignment"),
    "alignment as i32": (with_alignment(gguf_value(5, 32)), "u32"),
    "alignment as string": (with_alignment(gguf_value(8, "32")), "u32"),
    "alignment as u64": (with_alignment(gguf_value(10, 32)), "u32"),
    "dimension 0": (one_tensor((0,)), "dimension of 0"),
    "dimension 0 and 2^63": (one_tensor((MAX64, 0)), "dimension of 0"),
    "no dimension": (one_tensor(()), "0 dimensions|claims"),
    "5 dimensions": (one_tensor((1, 1, 1, 1, 1)), "5 dimensions"),
    "2^32-1 dimensions": (
        gguf_bytes([ARCH], tensor_count=1)
        + gguf_string("a")
        + struct.pack("<I", 2**32 - 1)
        + bytes(99),
        "dimensions",
    ),
    # O3: arrays and strings
    "string of 2^40": (
        gguf_bytes([("a", struct.pack("<IQ", 8, 2**40))], data=bytes(1024)),
        "needs 1099511627776 bytes",
    ),
    "key of 2^40": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**40) + bytes(1024),
        "long",
    ),
    "key of 1 MB": (gguf_bytes([("k" * 1_000_000, gguf_value(4, 1))]), "long"),
    "array of 2^60 u8": (gguf_bytes([("a", gguf_array(0, [], count=2**60))]), "needs"),
    "array of 2^62 u64": (gguf_bytes([("a", gguf_array(10, [], count=2**62))]), r"beyond 2\^63"),
    "array of 2^60 strings": (gguf_bytes([("a", gguf_array(8, [], count=2**60))]), "claims"),
    "array of one string too many": (
        gguf_bytes([("a", gguf_array(8, ["x"], count=2))], alignment=1),
        "needs|claims",
    ),
    "nested 1 deep": (gguf_bytes([("a", nested(1))]), "arrays of arrays"),
    "nested 10,000 deep": (gguf_bytes([("a", nested(10_000))]), "arrays of arrays"),
    "array of type 99": (gguf_bytes([("a", struct.pack("<IIQ", 9, 99, 1))]), "unknown type 99"),
    "value of type 99": (gguf_bytes([("a", struct.pack("<I", 99))]), "unknown type 99"),
    "key not UTF-8": (
        gguf_bytes([])[:16] + struct.pack("<Q", 1) + gguf_string(b"\xff\xfe") + gguf_value(4, 1),
        "UTF-8",
    ),
    "token not UTF-8": (
        gguf_bytes([("tokenizer.ggml.tokens", gguf_array(8, [b"\xff"]))]),
        "UTF-8",
    ),
    "key twice": (gguf_bytes([ARCH, ARCH]), "twice"),
    "tensor twice": (gguf_bytes([ARCH], [TENSOR, ("a", (4,), 0, 32)], bytes(64)), "twice"),
    "tensors overlap": (
        gguf_bytes([ARCH], [("a", (16,), 0, 0), ("b", (4,), 0, 32)], bytes(64)),
        "overlap",
    ),
    "type 99": (one_tensor((32,), kind=99), "type 99"),
    "type 4, removed": (one_tensor((32,), kind=4), "type 4"),
    "row of half a block": (one_tensor((48,), kind=8), "multiple of 32"),
    "K row of 32": (one_tensor((32,), kind=14, data=512), "multiple of 256"),
    # O4, O6
    "magic": (gguf_bytes([ARCH], magic=b"GGJT"), "not a GGUF"),
    "empty": (b"", "needs 4 bytes"),
    "version 1": (gguf_bytes([ARCH], version=1), "version 1"),
    "version 2": (gguf_bytes([ARCH], version=2), "version 2"),
    "version 4": (gguf_bytes([ARCH], version=4), "version 4"),
    "version swapped": (gguf_bytes([ARCH], version=3 << 24), "big-endian"),
    "data one byte short": (one_tensor((16,), data=63), "needs bytes"),
    "architecture missing": (gguf_bytes([]), "architecture"),
    "architecture a number": (gguf_bytes([("general.architecture", gguf_value(4, 1))]), "type"),
    "architecture unknown": (gguf_bytes([("general.architecture", gguf_value(8, "rwkv"))]), "rwkv"),
    "config missing": (gguf_bytes([ARCH]), "llama"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file(case: str, tmp_path: Path) -> None:
    """59 files, most under 200 bytes: each ends in a CheckpointError that names the cause."""
    data, words = BROKEN[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_gguf(path)
    assert str(caught.value).startswith("m.gguf")


def test_broken_count() -> None:
    assert len(BROKEN) == 59


def test_memory_stays_small(tmp_path: Path) -> None:
    """All 59 files in one process: named errors, no signal, under 64 MiB resident."""
    for number, (data, _) in enumerate(BROKEN.values()):
        (tmp_path / f"{number}.gguf").write_bytes(data)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from gemmake.errors import CheckpointError\n"
        "from gemmake.load import load_checkpoint\n"
        "refused = 0\n"
        "for path in sorted(Path(sys.argv[1]).glob('*.gguf')):\n"
        "    try:\n"
        "        load_checkpoint(path)\n"
        "    except CheckpointError:\n"
        "        refused += 1\n"
        "status = Path('/proc/self/status').read_text().splitlines()\n"
        "peak = next(x for x in status if x.startswith('VmHWM')).split()[1]\n"
        "print(refused, peak)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    refused, peak = map(int, done.stdout.split())
    assert refused == len(BROKEN)
    assert peak < 64 * 1024


@pytest.mark.parametrize("alignment", [8, 24, 32, 64, 4096])
def test_alignments_that_are_accepted(alignment: int, tmp_path: Path) -> None:
    """Multiples of 8, also 24: the file gets as far as its architecture's keys."""
    path = tmp_path / "m.gguf"
    keys = [("general.alignment", gguf_value(4, alignment)), ARCH]
    path.write_bytes(gguf_bytes(keys, [TENSOR], bytes(16), alignment=alignment))
    with pytest.raises(CheckpointError, match=r"llama\..* is missing|rms_epsilon missing"):
        read_gguf(path)


@pytest.fixture
def good(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return load_files.to_gguf(tiny_checkpoint("smollm2"), tmp_path / "good.gguf")


@pytest.fixture
def sentencepiece(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return load_files.to_gguf(tiny_checkpoint("gemma1"), tmp_path / "sp.gguf")


def replace_key(path: Path, key: str, value: bytes) -> Path:
    """Swap the value of a metadata key for another one, keeping the alignment of the data."""
    import gguf

    reader = gguf.GGUFReader(path)
    field = reader.fields[key]
    size = sum(part.nbytes for part in field.parts)
    data = path.read_bytes()
    infos_end = max(
        t.field.offset + sum(part.nbytes for part in t.field.parts) for t in reader.tensors
    )
    head = data[: field.offset] + gguf_string(key) + value + data[field.offset + size : infos_end]
    path.write_bytes(head + bytes(-len(head) % 32) + data[reader.data_offset :])
    return path


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("tokenizer.ggml.scores", gguf_array(0, [1] * 512), "element type"),
        ("tokenizer.ggml.scores", gguf_array(12, [1.0] * 512), "element type"),
        ("tokenizer.ggml.scores", gguf_array(6, [1.0] * 511), "511 entries"),
        ("tokenizer.ggml.scores", gguf_value(6, 1.0), "element type"),
        ("tokenizer.ggml.token_type", gguf_array(6, [1.0] * 512), "element type"),
        ("tokenizer.ggml.token_type", gguf_array(5, [1]), "1 entries"),
        ("tokenizer.ggml.tokens", gguf_array(4, [1] * 512), "element type"),
        ("tokenizer.ggml.model", gguf_value(8, "t5"), "t5"),
        ("tokenizer.ggml.model", gguf_value(4, 1), "type"),
        ("tokenizer.ggml.bos_token_id", gguf_value(8, "2"), "type"),
        ("tokenizer.ggml.bos_token_id", gguf_value(4, 512), "bos id 512"),
        ("tokenizer.ggml.eos_token_id", gguf_value(4, 99999), "eos id 99999"),
        ("tokenizer.chat_template", gguf_value(4, 1), "type"),
        ("gemma.block_count", gguf_value(4, 0), "block_count"),
        ("gemma.block_count", gguf_value(4, 2**31), "block_count"),
        ("gemma.block_count", gguf_value(4, 5), "9 missing"),
        ("gemma.block_count", gguf_value(4, 3), "not part"),
        ("gemma.block_count", gguf_value(6, 4.0), "type"),
        ("gemma.attention.head_count", gguf_value(4, 0), "head_count"),
        ("gemma.attention.head_count", gguf_array(4, [4, 4, 4]), "3 entries"),
        ("gemma.attention.head_count", gguf_array(4, [4, 4, 0, 4]), "head_count"),
        ("gemma.attention.head_count_kv", gguf_value(4, 3), "divide"),
        ("gemma.embedding_length", gguf_value(4, 32), "misshapen"),
        ("gemma.attention.layer_norm_rms_epsilon", gguf_value(6, -1.0), "epsilon"),
    ],
)
def test_metadata_of_the_wrong_kind(key: str, value: bytes, word: str, sentencepiece: Path) -> None:
    """24 values of the wrong type, length or size in an otherwise good file."""
    with pytest.raises(CheckpointError, match=word):
        load_checkpoint(replace_key(sentencepiece, key, value))


def test_every_truncation(good: Path) -> None:
    """A good file cut at 80 places and one byte short: never accepted (O4)."""
    data = good.read_bytes()
    load_checkpoint(good)
    cuts = {*range(0, 400, 10), *range(1000, len(data), len(data) // 40), len(data) - 1}
    assert len(cuts) >= 80
    for cut in sorted(cuts):
        good.write_bytes(data[:cut])
        with pytest.raises(CheckpointError):
            load_checkpoint(good)


def test_random_damage_never_crashes(good: Path) -> None:
    """400 files with bytes of the header overwritten: a named error or a load, nothing else."""
    data = bytearray(good.read_bytes())
    rng = np.random.default_rng(11)
    outcomes = {"refused": 0, "loaded": 0}
    for _ in range(400):
        damaged = data.copy()
        for _ in range(int(rng.integers(1, 4))):
            damaged[int(rng.integers(0, 3000))] = int(rng.integers(0, 256))
        good.write_bytes(damaged)
        try:
            read_gguf(good)
            outcomes["loaded"] += 1
        except CheckpointError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 50


@pytest.mark.parametrize("qtype", ["Q4_0", "Q5_1", "Q8_0"])
def test_non_finite_block_scale(
    qtype: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """An infinite scale in one block: the error has tensor and index (O14)."""
    import gguf

    path = load_files.to_gguf(tiny_checkpoint("qwen2"), tmp_path / "m.gguf", qtype)
    name = "blk.1.ffn_down.weight"
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    row_bytes = tensor.data.shape[1]
    with path.open("r+b") as file:
        file.seek(tensor.data_offset + 9 * row_bytes)
        file.write(np.array([np.inf], np.float16).tobytes())
    ref = load_checkpoint(path).tensors[1, Role.DOWN]
    assert np.isfinite(ref.read(0, 9)).all()
    with pytest.raises(CheckpointError, match=rf"{name}: the weight at \[9, \d+\] is"):
        ref.read(0, ref.rows)


def test_rope_freqs_that_fit_no_scaling(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    import gguf

    path = load_files.to_gguf(tiny_checkpoint("llama3"), tmp_path / "m.gguf")
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "rope_freqs.weight")
    with path.open("r+b") as file:
        file.seek(tensor.data_offset)
        file.write(np.array([2.5], np.float32).tobytes())
    with pytest.raises(CheckpointError, match="rope_freqs"):
        load_checkpoint(path)
