"""gemrun/format/spec.py and codes.py against the C headers, through a compiled probe."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from enum import IntEnum
from pathlib import Path

import pytest

from gemrun.format import codes, spec

ROOT = Path(__file__).resolve().parents[2]
RECORDS = {
    "gb_header": spec.Header,
    "gb_signature": spec.Signature,
    "gb_section": spec.Section,
    "gb_conf": spec.Conf,
    "gb_layer": spec.Layer,
    "gb_kv_unit": spec.KvUnit,
    "gb_segment": spec.Segment,
    "gb_tensor": spec.Tensor,
    "gb_plan": spec.Plan,
    "gb_rope": spec.Rope,
    "gb_thermal": spec.Thermal,
    "gb_rung": spec.Rung,
    "gb_ladder": spec.Ladder,
    "gb_test": spec.TestVector,
    "gb_pin": spec.Pin,
    "gb_cold": spec.Cold,
}
ENUMS: dict[str, type[IntEnum]] = {
    "GB_SECF_": spec.SectionFlag,  # type: ignore[dict-item]
    "GB_REQ_": spec.Feature,  # type: ignore[dict-item]
    "GB_ISA_": spec.Isa,
    "GB_FMT_": spec.Format,
    "GB_ROLE_": spec.Role,
    "GB_BLOCK_": spec.Block,
    "GB_ACT_": spec.Act,
    "GB_LAYERF_": spec.LayerFlag,  # type: ignore[dict-item]
    "GB_CONFF_": spec.ConfFlag,  # type: ignore[dict-item]
    "GB_KV_": spec.KvType,
    "GB_BUF_": spec.Buffer,
    "GB_OP_": spec.Op,
    "GB_MODE_": spec.Mode,
    "GB_COLD_": spec.ColdBy,
}
LIMITS = """
    ALIGN WEIGHT_ALIGN LINE PANEL GROUP SUPERBLOCK UNIT KV_BLOCK MAX_SECTIONS MAX_LAYERS
    MAX_TENSORS MAX_SEGMENTS MAX_PLAN MAX_ROPES MAX_VOCAB MAX_CONTEXT MAX_CHUNK MAX_HIDDEN
    MAX_FFN MAX_HEADS MAX_HEAD_DIM MAX_THREADS MAX_TESTS MAX_RUNGS TEST_PROMPT TEST_STEPS
    MAX_MANIFEST BYTE_ORDER MAJOR MINOR ENGINE_ABI REQ_KNOWN
""".split()  # noqa: SIM905


def c_fields(header: str, name: str) -> list[str]:
    """Names of a struct's fields, in order."""
    body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", header, re.S)
    assert body, name
    text = re.sub(r"/\*.*?\*/", "", body.group(1), flags=re.S)
    names = []
    for statement in text.split(";"):
        words = statement.split(None, 1)
        if len(words) == 2:
            names += [re.sub(r"\[.*?\]", "", n).strip() for n in words[1].split(",")]
    return names


@pytest.fixture(scope="module")
def header() -> str:
    return (ROOT / "csrc/gembin.h").read_text()


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory, header: str) -> dict[str, int]:
    """What the compiler says about every struct, field and constant."""
    if shutil.which("gcc") is None:
        pytest.fail("gcc is needed to compile the probe; install it")
    lines = []
    for name in RECORDS:
        lines.append(f'P("{name}", sizeof({name}));')
        for f in c_fields(header, name):
            lines.append(f'P("{name}.{f}", offsetof({name}, {f}));')
            lines.append(f'P("{name}.{f}#", sizeof((({name} *)0)->{f}));')
    constants = set(re.findall(r"\bGB_[A-Z0-9_]+(?= = )", header)) | {f"GB_{n}" for n in LIMITS}
    lines += [f'P("{c}", {c});' for c in sorted(constants)]
    lines += [f'P("SEC_{s}", GB_SEC_{s});' for s in spec.SECTIONS]
    folder = tmp_path_factory.mktemp("probe")
    source = folder / "probe.c"
    source.write_text(
        '#include <stdio.h>\n#include "gembin.h"\n'
        '#define P(n, v) printf("%s %llu\\n", n, (unsigned long long)(v))\n'
        "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    subprocess.run(
        ["gcc", "-std=c11", f"-I{ROOT / 'csrc'}", str(source), "-o", str(folder / "probe")],
        check=True,
    )
    text = subprocess.run([folder / "probe"], check=True, capture_output=True, text=True).stdout
    return {line.split()[0]: int(line.split()[1]) for line in text.splitlines()}


@pytest.mark.parametrize("name", RECORDS)
def test_records_match_the_header(name: str, probe: dict[str, int], header: str) -> None:
    record = RECORDS[name]
    assert spec.size_of(record) == probe[name]
    assert [f for f, _, _ in spec.layout(record)] == c_fields(header, name)
    at = 0
    for field, code, _ in spec.layout(record):
        assert probe[f"{name}.{field}"] == at
        assert probe[f"{name}.{field}#"] == struct.calcsize("<" + code)
        at += struct.calcsize("<" + code)


@pytest.mark.parametrize("prefix", ENUMS)
def test_enums_match_the_header(prefix: str, probe: dict[str, int]) -> None:
    ours = {prefix + member.name: member.value for member in ENUMS[prefix]}
    theirs = {k: v for k, v in probe.items() if k.startswith(prefix)}
    theirs.pop("GB_REQ_KNOWN", None)
    assert theirs.pop("GB_REQ_KV_4BIT", spec.KV_4BIT) == spec.KV_4BIT
    theirs.pop("GB_KV_BLOCK", None)
    assert ours == theirs


def test_limits_and_section_types(probe: dict[str, int], header: str) -> None:
    for name in LIMITS:
        assert getattr(spec, name) == probe[f"GB_{name}"], name
    for name in spec.SECTIONS:
        assert spec.fourcc(name) == probe[f"SEC_{name}"]
    assert set(re.findall(r"define GB_SEC_([A-Z]{4}) ", header)) == set(spec.SECTIONS)
    assert sum(spec.Feature) == spec.REQ_KNOWN


def test_magic_is_the_headers(header: str) -> None:
    text = re.search(r'#define GB_MAGIC "(.*?)"', header)
    assert text
    assert text.group(1).encode().decode("unicode_escape").encode("latin-1") == spec.MAGIC


def test_codes_are_those_of_the_engine() -> None:
    text = (ROOT / "csrc/gemrun.h").read_text()
    engine = {k: int(v) for k, v in re.findall(r"GEMRUN_(?:E_)?([A-Z0-9_]+) = (-?\d+)", text)}
    for code in codes.Code:
        assert engine[code.name] == code.value
    file_codes = {name for name, value in engine.items() if -69 <= value <= -20}
    assert file_codes == {c.name for c in codes.Code} - {"OK"}


def test_pack_and_unpack_keep_every_field() -> None:
    for record in RECORDS.values():
        raw = bytes((i * 37 + 11) % 120 for i in range(spec.size_of(record)))
        assert record.unpack(raw).pack() == raw
        assert record.unpack(raw + b"grown", 0).pack() == raw


def test_text_fields_are_cut_at_a_character() -> None:
    assert spec.text_field("abc", 8) == b"abc\0\0\0\0\0"
    assert spec.text_field("aaaaaaa\u00e9", 8) == b"aaaaaaa\0"
    assert spec.field_text(b"abc\0\0") == "abc"
