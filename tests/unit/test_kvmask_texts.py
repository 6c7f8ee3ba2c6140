"""The user's own texts as calibration: what is read, what is refused, how it is cut and split."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gemmake.calibration import load_text
from gemmake.errors import GemError, UsageError
from gemmake.kvmask import texts
from gemmake.kvmask.chat import Chat, encode
from gemmake.kvmask.texts import Text, own, read
from gemmake.kvmask.window import Measure, Messages
from gemmake.options import CompileOptions, KvType
from gemmake.passes.template import Layout

CONTEXT = 1024
WORDS = ("pump", "tank", "valve", "meter", "robot", "lamp", "river", "stone", "paper", "green")


def split(text: str) -> list[int]:
    """A tokenizer that is easy to follow: a word or a mark is a token."""
    return [0] * len(re.findall(r"\w+|[^\w\s]", text))


def prose(words: int, seed: int = 0) -> str:
    """Sentences of eight words, paragraphs of five sentences."""
    rng = random.Random(seed)
    lines = []
    for number in range(words // 8):
        line = " ".join(rng.choice(WORDS) for _ in range(8))
        lines.append(line.capitalize() + "." + ("\n\n" if number % 5 == 4 else " "))
    return "".join(lines)


def file(folder: Path, name: str, content: str | bytes) -> Path:
    """A file with a content."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def jsonl(folder: Path, *values: object, name: str = "own.jsonl") -> Path:
    """A JSONL file of values."""
    return file(folder, name, "\n".join(json.dumps(value) for value in values) + "\n")


def chat(*pairs: tuple[str, str]) -> dict[str, object]:
    """An object with messages."""
    return {"messages": [{"role": role, "content": text} for role, text in pairs]}


# ---- what is read ----
def test_plain_text_and_markdown(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "README"):
        assert read(file(tmp_path, name, "One.\r\nTwo.\n")) == [Text("One.\nTwo.")]
    assert read(file(tmp_path, "mark.txt", b"\xef\xbb\xbfOne.")) == [Text("One.")]


def test_every_form_of_a_line(tmp_path: Path) -> None:
    talk: Messages = (("user", "Hi"), ("assistant", "Hello"))
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    found = read(
        jsonl(
            tmp_path,
            chat(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello")),
            {"conversations": shared},
            {"prompt": "Say something.", "other": 1},
            {"text": "Just this."},
        )
    )
    assert found == [
        Text(messages=(("system", "Be brief."), *talk)),
        Text(messages=talk),
        Text(messages=(("user", "Say something."),)),
        Text("Just this."),
    ]


def test_messages_of_one_role_become_one(tmp_path: Path) -> None:
    path = jsonl(tmp_path, chat(("user", "Hi"), ("user", "There?"), ("assistant", "Yes")))
    assert read(path) == [Text(messages=(("user", "Hi\n\nThere?"), ("assistant", "Yes")))]


def test_lines_end_with_a_line_feed_only(tmp_path: Path) -> None:
    """JSON may hold other separators as they are; empty lines are left out."""
    line = '{"text": "one\u2028two\u0085three"}'
    assert (
        read(file(tmp_path, "own.jsonl", f"{line}\r\n\n{line}"))
        == [Text("one\u2028two\u0085three")] * 2
    )


def test_a_folder_in_order_of_names(tmp_path: Path) -> None:
    file(tmp_path, "b/two.md", "Two.")
    file(tmp_path, "a.txt", "One.")
    file(tmp_path, "c.NDJSON", '{"text": "Three."}')
    file(tmp_path, ".hidden/x.txt", "Hidden.")
    file(tmp_path, ".y.txt", "Hidden.")
    file(tmp_path, "image.png", b"\x89PNG\0")
    file(tmp_path, "empty.txt", "\n")
    assert [text.text for text in read(tmp_path)] == ["One.", "Two.", "Three."]


# ---- what is refused ----
BAD_LINES = {
    "{": "not JSON \\(.*\\); write one object a line",
    '{"text": "a"} {"text": "b"}': "not JSON \\(Extra data\\); write one object a line",
    "[" * 100_000: "not JSON \\(too large or too deep\\); write one object a line",
    "9" * 5000: "not JSON \\(too large or too deep\\); write one object a line|not an object",
    '["a"]': 'not an object; write {"messages"',
    '{"txt": "a"}': "none of the known keys; write",
    '{"text": 3}': "text is not a text; write it as a string",
    '{"text": ""}': "text is empty or has a zero byte; leave the line out",
    '{"text": "a\\u0000"}': "text is empty or has a zero byte; leave the line out",
    '{"text": "\\ud800"}': "text has half a character \\(a lone surrogate\\); repair it",
    '{"prompt": null}': "prompt is not a text; write it as a string",
    '{"messages": []}': "messages is not a list of messages; write",
    '{"messages": {"role": "user"}}': "messages is not a list of messages; write",
    '{"messages": ["a"]}': 'message 1 lacks "role" or "content"; write both',
    '{"messages": [{"role": "user"}]}': 'message 1 lacks "role" or "content"; write both',
    '{"conversations": [{"from": "human", "content": "a"}]}': 'message 1 lacks "from" or "value"',
    '{"messages": [{"role": "tool", "content": "a"}]}': "message 1 is by 'tool'; roles are system,",
    '{"messages": [{"role": ["user"], "content": "a"}]}': "message 1 is by \\['user'\\]; roles are",
    '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}': "message 1 is not a text",
    '{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}': (
        "message 2 is a system message; put it first or leave it out"
    ),
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:60])
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    path = file(tmp_path, "own.jsonl", f'{{"text": "good"}}\n\n{line}\n')
    with pytest.raises(UsageError, match=f"--calibration own.jsonl, line 3: {BAD_LINES[line]}"):
        read(path)


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "latin.txt": (b"good\nbad \xe9\n", "latin.txt, line 2: not UTF-8 at byte 9; convert the file"),
    "zero.txt": (b"good\n\nbad\0", "zero.txt, line 3: a zero byte; name a file with text"),
    "empty.txt": (b"\n \n", "empty.txt: no text in it; name a file with text"),
    "empty.jsonl": (b"\n\n", "empty.jsonl: no text in it; name a file with text"),
    "own.json": (b"[]", "own.json: one JSON document is not read; write one object a line"),
    "short.txt": (b"Only this.", "short.txt: 0 windows of text, at least 5 are needed; give more"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(name: str, tmp_path: Path) -> None:
    content, reason = BAD_FILES[name]
    with pytest.raises(GemError, match=f"--calibration {reason}"):
        own(file(tmp_path, name, content), 0.1, CONTEXT, split)


def test_a_bad_file_of_a_folder_is_named_with_its_folder(tmp_path: Path) -> None:
    file(tmp_path, "sub/own.jsonl", '{"text": 1}')
    with pytest.raises(UsageError, match=r"--calibration sub/own\.jsonl, line 1: text is not"):
        read(tmp_path)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.txt: No such file or directory; name a text file"):
        read(tmp_path / "none.txt")
    file(tmp_path, "folder/a.pdf", b"%PDF")
    with pytest.raises(UsageError, match=r"folder: no \.txt, \.md, \.jsonl, \.ndjson in this"):
        read(tmp_path / "folder")


def test_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file(tmp_path, "a.txt", "x" * 700_000)
    file(tmp_path, "b.txt", "x" * 700_000)
    monkeypatch.setattr(texts, "MAX_BYTES", 1 << 20)
    with pytest.raises(UsageError, match=r"b\.txt: more than 1 MiB in all; give less text"):
        read(tmp_path)
    monkeypatch.setattr(texts, "MAX_FILES", 1)
    with pytest.raises(UsageError, match="2 files, at most 1; join some"):
        read(tmp_path)


# ---- windows ----
def lengths(found: texts.Own) -> list[int]:
    return [len(split(window.text)) for window in (*found.windows, *found.held_out)]


def test_a_long_text_is_cut_into_windows_of_the_lengths_of_the_mix(tmp_path: Path) -> None:
    path = file(tmp_path, "long.txt", prose(60_000))
    found = own(path, 1.0, CONTEXT, split)
    counts = lengths(found)
    assert max(counts) < CONTEXT
    assert sum(count > 512 for count in counts) >= 0.5 * len(counts)
    assert sum(counts) == len(split(path.read_text()))
    assert all(w.text.endswith(".") for w in found.windows), "cut inside of a sentence"


def test_every_fifth_window_is_held_out(tmp_path: Path) -> None:
    path = file(tmp_path, "long.txt", prose(60_000))
    found = own(path, 1.0, CONTEXT, split)
    whole = list(texts.pack(read(path), Measure(split), CONTEXT))
    assert found.held_out == tuple(whole[4::5])
    assert len(found.windows) + len(found.held_out) == len(whole)
    assert not set(found.windows) & set(found.held_out)


def test_a_ratio_takes_windows_from_all_of_the_text(tmp_path: Path) -> None:
    path = file(tmp_path, "long.txt", prose(60_000))
    few = own(path, 0.002, CONTEXT, split)
    assert (len(few.windows), len(few.held_out)) == (20, 5)
    whole = list(texts.pack(read(path), Measure(split), CONTEXT))
    places = sorted(whole.index(window) for window in (*few.windows, *few.held_out))
    assert places[0] == 0
    assert places[-1] >= 0.9 * len(whole)
    assert own(path, 0.002, CONTEXT, split) == few


def test_short_texts_are_joined(tmp_path: Path) -> None:
    path = jsonl(tmp_path, *({"text": prose(40, seed)} for seed in range(400)))
    counts = lengths(own(path, 1.0, CONTEXT, split))
    assert sum(count > 512 for count in counts) >= 0.4 * len(counts)


def test_short_conversations_are_joined_as_one(tmp_path: Path) -> None:
    talks = [chat(("user", prose(40, n)), ("assistant", prose(60, -n))) for n in range(1, 200)]
    found = own(jsonl(tmp_path, *talks), 1.0, CONTEXT, split)
    assert sum(count > 512 for count in lengths(found)) >= 0.4 * len(lengths(found))
    first = found.windows[0].text
    assert first.startswith("User: ")
    assert first.count("\n\nUser: ") == first.count("\n\nAssistant: ") - 1


def test_prompts_and_other_system_messages_are_not_joined_into_a_conversation() -> None:
    prompts = [Text(messages=(("user", prose(80, seed)),)) for seed in range(3)]
    assert len(list(texts.pack(prompts, Measure(split), CONTEXT))) == 3
    rules = [
        Text(messages=(("system", f"Rule {n}."), ("user", prose(80)), ("assistant", prose(80))))
        for n in range(3)
    ]
    assert len(list(texts.pack(rules, Measure(split), CONTEXT))) == 3
    assert len(list(texts.pack([rules[0], rules[0]], Measure(split), CONTEXT))) == 1


def test_a_long_conversation_is_cut_between_turns() -> None:
    turns = [(role, prose(160, n)) for n in range(20) for role in ("user", "assistant")]
    talk = Text(messages=(("system", "Be brief."), *turns))
    found = list(texts.pack([talk], Measure(split), CONTEXT))
    assert len(found) > 5
    for window in found:
        assert window.text.startswith("System: Be brief.\n\nUser: ")
        assert len(split(window.text)) < CONTEXT
    assert len(list(texts.pack([talk], Measure(split), 16_000))) > 1, "longer than WHOLE"


def test_a_conversation_that_fits_stays_whole() -> None:
    turns = [(role, prose(160, n)) for n in range(5) for role in ("user", "assistant")]
    talk = Text(messages=tuple(turns))
    assert len(list(texts.pack([talk], Measure(split), 4096))) == 1


def test_one_message_that_is_too_long_is_cut_as_text() -> None:
    talk = Text(messages=(("user", prose(5000)), ("assistant", "Yes.")))
    found = list(texts.pack([talk], Measure(split), CONTEXT))
    assert all(len(split(window.text)) < CONTEXT for window in found)
    assert sum(len(split(window.text)) for window in found) >= 5000


@pytest.mark.parametrize(
    "text", ["x" * 30_000, "漢字。" * 8000, "\n" * 50 + "a b " * 9000, "。" * 9000]
)
def test_text_without_breaks_is_cut_somewhere(text: str) -> None:
    def bytewise(text: str) -> list[int]:
        return list(text.encode())

    found = [window.text for window in texts.pack([Text(text)], Measure(bytewise), 512)]
    assert all(0 < len(part.encode()) < 512 for part in found)
    assert "".join("".join(found).split()) == "".join(text.split())


def test_windows_too_short_for_anything_are_left_out() -> None:
    assert not list(texts.pack([Text("Yes."), Text("No.")], Measure(split), CONTEXT))


def test_conversations_go_through_the_template(tmp_path: Path) -> None:
    def render(messages: Messages) -> str | None:
        return "".join(f"<{role}>{text}" for role, text in messages)

    talks = [chat(("user", prose(400, n)), ("assistant", prose(60, -n))) for n in range(1, 30)]
    found = own(jsonl(tmp_path, *talks), 1.0, CONTEXT, split, render)
    for window in (*found.windows, *found.held_out):
        assert window.text.startswith("<user>")
        assert window.messages is not None
        assert window.text[window.answer_at :] == window.messages[-1][1]


def test_answers_of_the_user_are_the_last_ones(tmp_path: Path) -> None:
    """Plain text, questions without answer and answers that a template changes have none."""
    talk = chat(("user", prose(300)), ("assistant", " " + prose(30) + ". "))
    asks = {"prompt": prose(400, 1)}
    path = jsonl(tmp_path, *[talk, asks, {"text": prose(600, 2)}] * 5)
    found = [*own(path, 1.0, CONTEXT, split).windows]
    assert {w.answer_at is not None for w in found if w.messages is None} == {False}
    talks = [w for w in found if w.messages is not None and w.messages[-1][0] == "assistant"]
    assert talks
    changed = own(path, 1.0, CONTEXT, split, lambda said: "".join(t.upper() for _, t in said))
    assert all(w.answer_at is None for w in changed.windows)


@pytest.mark.parametrize("tokens_of", [split, None])
def test_the_same_text_gives_the_same_windows(
    tokens_of: Callable[[str], list[int]] | None, tmp_path: Path
) -> None:
    path = file(tmp_path, "long.txt", prose(20_000))
    assert own(path, 0.1, CONTEXT, tokens_of) == own(path, 0.1, CONTEXT, tokens_of)


def test_built_in_windows_come_from_here_too() -> None:
    assert len(list(texts.windows(0.001, 0, CONTEXT))) == 10


def test_weights_see_conversations_through_the_template_too(tmp_path: Path) -> None:
    talk = chat(("user", "Which code?"), ("assistant", "It is 4711."))
    path = jsonl(tmp_path, talk, {"text": "Plain."}, talk)
    layout = Layout(0, ("\0001\0", "", "", "\0002\0", "\0002\0", "\0002\0", "", "", ""))
    options = CompileOptions(
        Path("m"), "t", Path("o"), kv_type=KvType.DYNAMIC_SPARSE, calibration=path
    )
    said = "\0001\0Which code?\0002\0It is 4711."
    text, file = load_text(options, Chat(layout))
    assert text == f"{said}\n\nPlain.\n\n{said}"
    assert encode(said, lambda part: [len(part)]) == [1, 11, 2, 11]
    assert file.sha256 != load_text(options)[1].sha256
    assert "User: Which code?" in load_text(options)[0]
