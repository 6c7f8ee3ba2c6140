"""Which ids of a prompt are pinned, and the section that holds them."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gemmake.errors import UsageError
from gemmake.options import CompileOptions
from gemmake.pinning import begin_of_chat, same_beginning, tails, text_of
from gemrun.format import assemble, manifest, pins, sizes, spec, units
from gemrun.format.codes import Code, FormatError
from gemrun.format.reader import read_artifact
from gemrun.format.tokens import Slot, Template, TemplateHeader, TmplFlag
from golden import make

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "v1.0"
PATH = GOLDEN / "tiny-pinned.gembin"


def asked(text: str, **more: Any) -> CompileOptions:
    return CompileOptions(Path("m"), "generic-x86-64", Path("o"), pin_prompt=text, **more)


# ---- which ids ----
def test_what_all_begin_with() -> None:
    assert same_beginning([[1, 2, 3], [1, 2, 4], [1, 2]]) == [1, 2]
    assert same_beginning([[1, 2, 3]]) == [1, 2, 3]
    assert same_beginning([[1], [2]]) == []
    assert same_beginning([]) == []


def test_rests_of_control_tokens_may_follow() -> None:
    """A raw text may have begun one."""
    with read_artifact(PATH) as artifact:
        more = set(tails(artifact.tokenizer, "a<b")) - set(tails(artifact.tokenizer, "ab"))
        assert {"os>"} <= more  # <bos>
        assert "nd>" in set(tails(artifact.tokenizer, "a<e"))
        assert "" in set(tails(artifact.tokenizer, ""))


def chat_of(
    flags: int, system: tuple[int | bytes, ...], between: tuple[int | bytes, ...]
) -> Template:
    slots: list[tuple[int | bytes, ...]] = [()] * len(Slot)
    slots[Slot.SYSTEM], slots[Slot.SYS_USER] = system, between
    return Template(TemplateHeader(flags, 0, 0, (0,) * 10, (0,) * 3), tuple(slots))


def letters(text: str) -> list[int]:
    """One id a run of equal letters, so that neighbours merge."""
    return [ord(m[0][0]) for m in re.finditer(r"(.)\1*", text, re.S)]


def test_texts_between_control_tokens_are_encoded_together() -> None:
    template = chat_of(TmplFlag.SYSTEM, (1000, b"s\n"), (1001, b"\n", 1002, b"u\n"))
    ids = begin_of_chat(template, letters, "\nab", "\nhello")
    assert ids == [1000, *letters("s\n\nab"), 1001, *letters("\n"), 1002, *letters("u\n\nhello")]
    assert begin_of_chat(template, letters, "")[:3] == [1000, ord("s"), ord("\n")]
    plain = chat_of(TmplFlag.SYSTEM, (), (b"|",))
    assert begin_of_chat(plain, letters, "ab", "c") == letters("ab|c")


def test_messages_are_trimmed_as_the_template_says() -> None:
    slots = ((1000,), (1001,))
    both = chat_of(TmplFlag.SYSTEM | TmplFlag.TRIM_SYSTEM | TmplFlag.TRIM_USER, *slots)
    assert begin_of_chat(both, letters, " a\u3000", "\tb ") == [1000, ord("a"), 1001, ord("b")]
    none = chat_of(TmplFlag.SYSTEM, *slots)
    assert begin_of_chat(none, letters, " a", " b")[1:3] == [ord(" "), ord("a")]


# ---- the text ----
def test_texts_and_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("Größe\r\n".encode())
    assert text_of(asked("abc\n")) == "abc\n"
    assert text_of(asked(f"@{path}")) == "Größe\r\n"
    assert text_of(replace(asked("x"), pin_prompt=None)) is None


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no text"),
        (b"a\0b", "a NUL character"),
        (b"\xff", "not UTF-8 at byte 0"),
        (b"a" * (sizes.text_limit(1024) + 1), "larger than 20480 bytes"),
    ],
)
def test_files_that_cannot_be_pinned(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(UsageError, match=says):
        text_of(asked(f"@{tmp_path}/a"))


def test_texts_that_cannot_be_pinned(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    for text, says in (
        ("\udc80", "not UTF-8"),
        ("a" * 20481, "longer"),
        (f"{tmp_path}/a", "@FILE"),
    ):
        with pytest.raises(UsageError, match=says):
            text_of(asked(text))
    with pytest.raises(UsageError, match="--pin-system"):
        replace(asked("x"), pin_prompt=None, pin_system=True)


# ---- the section ----
def test_blocks_follow_from_rings_and_tokens() -> None:
    records = make.build(make.PINNED).records
    conf, layers = records.conf, records.layers
    block = sizes.kv_block_size(conf.kv_type, 16, 16)
    for tokens, used in ((1, 4), (32, 4), (33, 8), (64, 8), (65, 10), (128, 12), (159, 14)):
        found = list(pins.rings(conf, layers, (), tokens))
        assert [(r.layer, r.head) for r in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert sum(r.used for r in found) == used
        assert found[0].at == 64 + sizes.pad(4 * tokens, 64)
        assert [b.at - a.at for a, b in pairwise(found)] == [r.used * block for r in found[:-1]]
        assert pins.size(conf, layers, (), tokens) == found[-1].at + found[-1].used * block
    masked, kept = assemble.place_units(conf, layers, ((0, 0), (0, 0), (1, 1), (0, 0)))
    assert [r.used for r in pins.rings(conf, masked, kept, 159)] == [2, 2, 3, 5]


def test_a_blank_section_breaks_no_rule() -> None:
    records = make.build(make.PINNED).records
    data = pins.blank(records.conf, records.layers, (), [5, 6, 7])
    pin = pins.read(records.conf, records.layers, (), memoryview(data))
    assert pin.ids == (5, 6, 7)
    assert pins.section(pin.ids, data[pins.ids_end(3) :]) == data


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d[:63], "63 bytes, at least 64"),
        (lambda d: b"\0" + d[1:], "0 tokens in a context of 160"),
        (lambda d: b"\xa0" + d[1:], "160 tokens in a context of 160"),
        (lambda d: d[:63] + b"\1" + d[64:], "reserved is not zero"),
        (lambda d: d[:-1], "3 tokens take"),
        (lambda d: d + bytes(64), "3 tokens take"),
        (lambda d: d[:127] + b"\1" + d[128:], "bytes behind the ids are not zero"),
        (lambda d: d[:68] + b"\x08\1" + d[70:], "a token id is not below 264"),
    ],
)
def test_what_the_format_refuses(change: Any, says: str) -> None:
    records = make.build(make.PINNED).records
    data = change(pins.blank(records.conf, records.layers, (), [5, 6, 7]))
    with pytest.raises(FormatError, match=re.escape(says)) as caught:
        pins.read(records.conf, records.layers, (), memoryview(data))
    assert caught.value.code == Code.PINP
    assert str(caught.value).startswith("section PINP: ")


def test_the_golden_file_has_it() -> None:
    assert len(make.PIN_TEXT) == 99
    with read_artifact(PATH) as artifact:
        assert artifact.pin is not None
        assert artifact.pin.ids == make.PINNED.pin
        assert artifact.manifest["options"] == {"pin_prompt": {"tokens": 100}}
        entry = artifact.sections["PINP"]
        assert entry.flags == 0
        assert entry.record_size == 0
        assert not artifact.header.required_features & spec.Feature.KV_MASK


@pytest.mark.parametrize(
    ("told", "tokens"),
    [
        ({}, 3),
        ({"pin_prompt": {"tokens": 3}}, None),
        ({"pin_prompt": {"tokens": 2}}, 3),
        ({"pin_prompt": {}}, 3),
        ({"pin_prompt": 3}, 3),
    ],
)
def test_the_manifest_agrees(told: dict[str, Any], tokens: int | None) -> None:
    with pytest.raises(FormatError, match=r"manifest: options\.pin_prompt") as caught:
        manifest.check_pin({"options": told}, tokens)
    assert caught.value.code == Code.MANIFEST
    manifest.check_pin({"options": {}}, None)
    manifest.check_pin({"options": {"pin_prompt": {"tokens": 3, "role": "text"}}}, 3)


def test_other_units_leave_it_out(tmp_path: Path) -> None:
    """Its keys and values belong to what heads saw."""
    units.with_units(PATH, tmp_path / "a", ((0, 0), (0, 0), (1, 1), (0, 0)))
    with read_artifact(tmp_path / "a") as artifact:
        assert artifact.pin is None
        assert artifact.manifest["options"] == {}
    ids = make.PINNED.pin
    with units.rewritten(PATH, tmp_path / "b", (), pinned=pins.Pinned(ids)) as out:
        out.fill("TEST", bytes(read_artifact(PATH).section("TEST")))
        out.seal()
        out.fill("PINP", make.run_pin(Path(out.partial), ids))
        out.finish()
    assert (tmp_path / "b").read_bytes() == PATH.read_bytes()
