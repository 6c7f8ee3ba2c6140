"""gemrun/format/tokens.py against gb_tokens.h, and what it shows of a tokenizer."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from enum import IntEnum
from pathlib import Path

import pytest

from gemrun.format import spec, tokens
from gemrun.format.codes import Code, FormatError
from golden import make

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "csrc/gb_tokens.h").read_text()
STRUCTS = {"gb_tokn": tokens.TokenHeader, "gb_tmpl": tokens.TemplateHeader}
ENUMS: dict[str, type[IntEnum]] = {
    "GB_TOK_": tokens.Kind,
    "GB_TOKF_": tokens.TokFlag,  # type: ignore[dict-item]
    "GB_TOKEN_": tokens.TokenFlag,  # type: ignore[dict-item]
    "GB_SLOT_": tokens.Slot,
    "GB_TMPLF_": tokens.TmplFlag,  # type: ignore[dict-item]
}
LIMITS = {
    "GB_TOK_NONE": tokens.NONE,
    "GB_TOK_MAX_VOCAB": tokens.MAX_VOCAB,
    "GB_TOK_MAX_STOP": tokens.MAX_STOP,
    "GB_TOK_MAX_STAGE": tokens.MAX_STAGE,
    "GB_TOK_MAX_CLASS": tokens.MAX_CLASS,
    "GB_TOK_MAX_STATE": tokens.MAX_STATE,
    "GB_TOK_BLOCK": tokens.PIECE_BLOCK,
    "GB_TMPL_MAX_TEXT": tokens.TMPL_MAX_TEXT,
    "GB_TMPL_MAX_ITEM": tokens.TMPL_MAX_ITEM,
    "GB_MERGE_RIGHT": tokens.MERGE_RIGHT,
    "GB_KEY": tokens.KEY,
    "GB_COMP_PAIR": tokens.COMP_PAIR,
    "GB_CELL_STATE": tokens.CELL_STATE,
}


def fields_of(name: str) -> list[str]:
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", HEADER, re.S)
    assert body, name
    text = re.sub(r"/\*.*?\*/", "", body.group(1), flags=re.S)
    return re.findall(r"uint32_t (\w+)", text)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    if shutil.which("gcc") is None:
        pytest.fail("gcc is needed to compile the probe; install it")
    names = {*LIMITS, *re.findall(r"^\s+(GB_[A-Z0-9_]+) = ", HEADER, re.M)}
    lines = [f'P("{n}", {n});' for n in sorted(names)]
    for name, record in STRUCTS.items():
        lines.append(f'P("{name}", sizeof(struct {name}));')
        for field, _, _ in spec.layout(record):
            lines.append(f'P("{name}.{field}", offsetof(struct {name}, {field}));')
    folder = tmp_path_factory.mktemp("probe")
    (folder / "probe.c").write_text(
        '#include <stdio.h>\n#include "gb_tokens.h"\n'
        '#define P(n, v) printf("%s %llu\\n", n, (unsigned long long)(v))\n'
        "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    command = ["gcc", "-std=c11", f"-I{ROOT / 'csrc'}", "probe.c", "-o", "probe"]
    subprocess.run(command, check=True, cwd=folder)
    text = subprocess.run([folder / "probe"], check=True, capture_output=True, text=True).stdout
    return {line.split()[0]: int(line.split()[1]) for line in text.splitlines()}


@pytest.mark.parametrize("name", STRUCTS)
def test_headers_match(name: str, probe: dict[str, int]) -> None:
    record = STRUCTS[name]
    assert spec.size_of(record) == probe[name]
    assert [f for f, _, _ in spec.layout(record)] == fields_of(name)
    at = 0
    for field, code, _ in spec.layout(record):
        assert probe[f"{name}.{field}"] == at
        at += struct.calcsize("<" + code)


@pytest.mark.parametrize("prefix", ENUMS)
def test_enums_match(prefix: str, probe: dict[str, int]) -> None:
    ours = {prefix + member.name: member.value for member in ENUMS[prefix]}
    for name, value in ours.items():
        assert probe[name] == value
    total = prefix + "ALL"
    if total in probe:
        assert sum(ours.values()) == probe[total]


def test_limits_match(probe: dict[str, int]) -> None:
    assert {name: probe[name] for name in LIMITS} == LIMITS


def test_pieces_are_found_by_their_block() -> None:
    found = tokens.read_tokn(memoryview(make.tokenizer()), make.VOCAB)
    assert [found.piece(b) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert found.piece(257) == b"in"
    assert found.piece(259) == b""
    with pytest.raises(IndexError):
        found.piece(make.VOCAB + 40)


def test_sections_that_are_too_short() -> None:
    for size in (0, 95):
        with pytest.raises(FormatError) as caught:
            tokens.read_tokn(memoryview(bytes(size)), make.VOCAB)
        assert caught.value.code is Code.TOKN
    with pytest.raises(FormatError) as caught:
        tokens.read_tmpl(memoryview(bytes(63)), make.VOCAB)
    assert caught.value.code is Code.TMPL
