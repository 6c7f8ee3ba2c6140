"""Damaged TOKN and TMPL sections are refused, or everything after is memory-safe (sanitizers)."""

from __future__ import annotations

import random
import struct
import subprocess
from pathlib import Path

import pytest

import tok_native
import tok_tiny
from gemmake.model import Generation, TokenizerSource
from gemmake.passes.template import compile_template
from gemmake.passes.tokens import compile_tokenizer

CASES = 3000  # per section
TOKN, TMPL = 0, 1
HEADER = 96
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver with address and undefined-behaviour sanitizers."""
    out = tmp_path_factory.mktemp("driver") / "driver"
    here = Path(__file__).parent
    sources = [here / "tok_driver.c", *(tok_native.CSRC / name for name in tok_native.SOURCES)]
    flags = ["-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = ["gcc", *flags, "-I", str(tok_native.CSRC), "-o", str(out), *map(str, sources)]
    subprocess.run(command, check=True)
    return out


def damage(section: bytes, rng: random.Random) -> bytes:
    """One to four bytes changed, a word set to an extreme, a piece cut out or the end cut off."""
    data = bytearray(section)
    kind = rng.randrange(8)
    if kind == 0:
        return bytes(data[: rng.randrange(len(data) + 1)])
    if kind == 1:
        at = rng.randrange(len(data)) // 8 * 8
        del data[at : at + 8 * rng.randrange(1, 9)]
        return bytes(data)
    if kind < 5:  # the header's words, near their value or far from it
        at = 4 * rng.randrange(min(HEADER, len(data)) // 4)
        old = struct.unpack_from("<I", data, at)[0]
        values = (0, 1, old + 1, old - 1, old * 2, 0x7FFFFFFF, 0xFFFFFFFF, 1 << rng.randrange(32))
        struct.pack_into("<I", data, at, rng.choice(values) & 0xFFFFFFFF)
        return bytes(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data))
        data[at] = rng.choice((0, 0xFF, data[at] ^ 1 << rng.randrange(8), rng.randrange(256)))
    return bytes(data)


@pytest.mark.parametrize("kind", ["byte", "nfc", "spm"])
def test_damaged_sections(kind: str, driver: Path, tmp_path: Path) -> None:
    data = tok_tiny.both()[kind]
    rows = tok_tiny.rows_of(data)
    source = TokenizerSource(data, {}, TEMPLATE)
    generation = Generation(stop_ids=(1,), bos_id=2)
    tokn = compile_tokenizer(source, rows, generation)
    tmpl = compile_template(source, generation, rows).section
    assert tmpl is not None
    rng = random.Random(f"tok {kind}")
    cases = [(TOKN, tokn), (TMPL, tmpl)]
    cases += [(TOKN, damage(tokn, rng)) for _ in range(CASES)]
    cases += [(TMPL, damage(tmpl, rng)) for _ in range(CASES)]
    path = tmp_path / "cases"
    path.write_bytes(b"".join(struct.pack("<2I", k, len(case)) + case for k, case in cases))
    done = subprocess.run(
        [str(driver), str(rows), str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    refused, accepted = map(int, done.stdout.split())
    assert refused + accepted == len(cases)
    assert refused > CASES // 2
    assert accepted >= 2
