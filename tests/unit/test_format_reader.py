"""The Python reader: what it gives, its sentences, and that it holds nothing in memory."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz.mutate import reseal
from gemrun.format import assemble, records, sizes, spec, writer
from gemrun.format.codes import Code, FormatError
from gemrun.format.reader import canonical_json, iter_names, read_artifact
from gemrun.format.spec import Role, Tensor
from golden import make, refused

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    make.write(make.build(make.INT4), tmp_path / "a.gembin")
    return tmp_path / "a.gembin"


def test_what_was_written_is_read(path: Path) -> None:
    wanted = make.build(make.INT4).records
    with read_artifact(path) as artifact:
        assert artifact.conf.hidden == 32
        assert artifact.layers == tuple(wanted.layers)
        assert artifact.segments == tuple(wanted.segments)
        assert artifact.plans == tuple(wanted.plans)
        assert artifact.thermal == wanted.thermal
        start = artifact.sections["WHOT"].offset
        assert artifact.tensors[1] == replace(
            wanted.tensors[1], offset=wanted.tensors[1].offset + start
        )
        assert bytes(artifact.section("HDFJ")) == wanted.hdf
        assert artifact.hdf["id"] == "generic-x86-64"
        assert artifact.tokenizer.stop_ids == (make.VOCAB - 1,)
        assert artifact.tokenizer.piece(258) == b"the"
        assert artifact.tokenizer.piece(make.VOCAB - 1) == b"<end>"
        assert artifact.template is not None
        assert artifact.template.slots[3] == (make.VOCAB - 1, b"\nmodel\n")
        names = [name for name, _ in iter_names(artifact)]
        assert names[0] == "t0.attn_norm"
        assert len(names) == len(artifact.tensors)


def test_tensor_bytes_are_those_that_were_written(path: Path) -> None:
    golden = make.build(make.INT4)
    data = b"".join(golden.chunks)
    with read_artifact(path) as artifact:
        start = artifact.sections["WHOT"].offset
        for tensor in artifact.tensors:
            at = tensor.offset - start
            assert bytes(artifact.tensor_data(tensor)) == data[at : at + tensor.size]
        head = artifact.tensors[-1]
        at = head.second_offset - start
        assert bytes(artifact.tensor_second(head)) == data[at:]


def test_an_image_reads_like_its_file(path: Path) -> None:
    raw = path.read_bytes()
    one, two = read_artifact(path), read_artifact(raw, image=True)
    assert one.header == two.header
    assert one.manifest == two.manifest
    with pytest.raises(TypeError):
        read_artifact(memoryview(raw))


def test_levels_of_checking(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-300] ^= 1  # weights
    for verify, code in (("full", Code.WEIGHTS_CRC), ("structure", Code.WEIGHTS_CRC)):
        with pytest.raises(FormatError) as caught:
            read_artifact(raw, verify, image=True)  # type: ignore[arg-type]
        assert caught.value.code == code
    read_artifact(raw, "fast", image=True)


@pytest.mark.parametrize(
    ("base", "code"), [(base, code) for base, codes in refused.BASES.items() for code in codes]
)
def test_each_defect_is_named_by_its_code(base: str, code: str) -> None:
    good = (ROOT / "tests/golden/v1.0" / f"{base}.gembin").read_bytes()
    for what, damage in refused.BASES[base][code].items():
        image = damage(bytearray(good))
        assert image is not None
        with pytest.raises(FormatError) as caught:
            read_artifact(bytes(image), image=True)
        assert caught.value.code.name == code, what
        text = str(caught.value)
        assert ": " in text, text
        assert "; " in text, text
        assert "\n" not in text


def test_every_file_code_has_a_defect() -> None:
    have = {code for codes in refused.BASES.values() for code in codes}
    assert have == {c.name for c in Code} - {"OK", "OPEN"}


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    for target in (tmp_path / "none", tmp_path):
        with pytest.raises(FormatError) as caught:
            read_artifact(target)
        assert caught.value.code == Code.OPEN
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(FormatError) as caught:
        read_artifact(tmp_path / "empty")
    assert caught.value.code == Code.SIZE


def test_paths_that_are_not_utf8(path: Path) -> None:
    odd = os.fsencode(path.parent) + b"/\xff\xfe.gembin"
    Path(os.fsdecode(odd)).write_bytes(path.read_bytes())
    with read_artifact(odd) as artifact:
        assert artifact.conf.layer_count == 2


def test_slabs_may_be_several_records(tmp_path: Path) -> None:
    """Q of two heads as two records, each with its own segments."""
    image = split_query(make.build(make.RAW), tmp_path)
    with read_artifact(image, image=True) as artifact:
        slabs = [(t.slab_first, t.slab_count) for t in artifact.tensors if t.role == Role.Q]
        assert slabs == [(0, 1), (1, 1), (0, 2)]


def split_query(golden: make.Golden, folder: Path) -> bytes:
    old = golden.records
    tensors: list[Tensor] = []
    for tensor in old.tensors:
        if tensor.role == Role.Q and tensor.layer == 0:
            half = replace(tensor, rows=16, rows_padded=16, slab_count=1)
            tensors += [half, replace(half, slab_first=1)]
        else:
            tensors.append(tensor)
    placed, size = assemble.place_tensors(tensors, old.segments)
    layers = [
        replace(la, tens_first=la.tens_first + (i > 0), tens_count=la.tens_count + (i == 0))
        for i, la in enumerate(old.layers)
    ]
    conf = replace(
        old.conf, tens_head=old.conf.tens_head + 1, tens_final_norm=old.conf.tens_final_norm + 1
    )
    from gemrun.format import manifest

    entries = [manifest.tensor_entry(f"t{i}", t, old.segments) for i, t in enumerate(placed)]
    new = replace(
        old,
        conf=conf,
        layers=layers,
        tensors=placed,
        weights_size=size,
        manifest=manifest.encode(manifest.build(conf, layers, entries)),
    )
    chunks = (bytes(size),)
    make.write(make.Golden(new, chunks), folder / "slabs.gembin")
    return (folder / "slabs.gembin").read_bytes()


def test_hdf_must_be_canonical_and_bound(path: Path) -> None:
    golden = make.build(make.INT4)
    whole = json.loads(golden.records.hdf)
    whole["policy"]["reserve_mib"] = 999  # a policy edit keeps the hash
    make.write(with_hdf(golden, canonical_json(whole), golden.records.hdf_sha256), path)
    with read_artifact(path):
        pass
    loose = json.dumps(whole).encode()
    whole["board"] = "another"
    for raw in (loose, canonical_json(whole), b"[]", b"{", b"\xff", b'{"a":NaN}'):
        make.write(with_hdf(golden, raw, golden.records.hdf_sha256), path)
        with pytest.raises(FormatError) as caught:
            read_artifact(path)
        assert caught.value.code == Code.MANIFEST


def with_hdf(golden: make.Golden, raw: bytes, digest: bytes) -> make.Golden:
    return replace(golden, records=replace(golden.records, hdf=raw, hdf_sha256=digest))


def test_deep_json_is_refused_not_a_crash(path: Path) -> None:
    golden = make.build(make.INT4)
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    make.write(with_hdf(golden, deep, hashlib.sha256(deep).digest()), path)
    with pytest.raises(FormatError) as caught:
        read_artifact(path)
    assert caught.value.code == Code.MANIFEST


def test_the_root_is_what_the_text_says(path: Path) -> None:
    raw = path.read_bytes()
    count = int.from_bytes(raw[24:28], "little")
    bare = raw[:152] + bytes(32) + raw[184:252] + bytes(4)
    wanted = hashlib.sha256(b"gembin root 1" + bare + raw[512 : 512 + 128 * count]).digest()
    assert raw[152:184] == wanted
    with read_artifact(path) as artifact:
        assert artifact.header.root_sha256 == wanted


def test_signing_changes_neither_root_nor_acceptance(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    root = raw[152:184]
    raw[256] = 1
    raw[264:336] = bytes(range(72))
    with read_artifact(bytes(raw), image=True) as artifact:
        assert artifact.signature.alg == 1
        assert artifact.signature.key_id == bytes(range(8))
        assert artifact.header.root_sha256 == root


def test_reading_needs_no_memory_for_weights(tmp_path: Path) -> None:
    """A gigabyte of weights is mapped, not read into the heap."""
    code = (
        "import sys, resource\n"
        "from gemrun.format.reader import read_artifact\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (200 << 20, 200 << 20))\n"
        "try:\n"
        "    read_artifact(sys.argv[1])\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, getattr(error, 'code', ''))\n"
    )
    path = tmp_path / "large.gembin"
    make.write(make.build(make.INT4), path)
    raw = bytearray(path.read_bytes())
    whot = refused.find(raw, "WHOT")
    size = 1 << 30
    raw[whot + 16 : whot + 32] = size.to_bytes(8, "little") * 2
    offset = int.from_bytes(raw[whot + 8 : whot + 16], "little")
    raw[32:40] = (offset + size).to_bytes(8, "little")
    path.write_bytes(reseal(raw, sections=False))
    os.truncate(path, offset + size)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.startswith("FormatError"), done.stdout + done.stderr
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0


def test_limits_are_checked_before_counts_are_used() -> None:
    conf = make.build(make.INT4).records.conf
    for name, value in (
        ("layer_count", 257),
        ("vocab_rows", 2**20 + 1),
        ("context", 0),
        ("chunk", 4097),
        ("threads", 9),
        ("kv_type", 3),
        ("flags", 4),
        ("text_limit", sizes.text_limit(conf.context) + 1),
        ("norm_eps", float("nan")),
        ("norm_eps", -0.0),
        ("embed_scale", 0.0),
        ("temperature", 100.1),
        ("top_p", 0.0),
        ("min_p", 1.0),
        ("repetition_penalty", float("inf")),
        ("family", b"a\0b".ljust(16, b"\0")),
        ("reserved", b"\1".ljust(80, b"\0")),
    ):
        with pytest.raises(FormatError) as caught:
            records.check_conf(replace(conf, **{name: value}))
        assert caught.value.code == Code.CONF, name


def test_numbers_at_their_limits_pass() -> None:
    conf = make.build(make.INT4).records.conf
    limits = replace(conf, context=2**20, text_limit=2**24 + 4096, threads=8, chunk=4096, top_k=0)
    records.check_conf(limits)
    records.check_conf(replace(conf, temperature=0.0, top_p=1.0, min_p=0.0))


def test_the_format_needs_only_the_standard_library_and_msgpack() -> None:
    code = (
        "import sys\n"
        "import gemrun.format.reader, gemrun.format.writer, gemrun.format.memmap\n"
        "import gemrun.format.assemble\n"
        "print([m for m in ('numpy', 'torch', 'gemmake', 'cffi', 'click') if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_blank_tests_are_what_a_reader_takes() -> None:
    conf = make.build(make.INT4).records.conf
    blank = spec.TestVector.unpack(writer.blank_tests(1))
    records.check_tests(conf, [blank])
