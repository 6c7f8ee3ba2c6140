"""The texts that a template is measured on: the built-in mix, or the user's own.

A user gives a file or a folder: plain text, or JSONL with one object a line: {"messages": [{"role",
"content"}]}, {"conversations": [{"from", "value"}]}, {"prompt": ..} or {"text": ..}. They take the
place of the mix. What is too long for a window is cut, what is short is joined with what follows:
most windows are to be longer than what a head would keep. Every fifth one is held out to judge by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from gemmake.errors import UsageError
from gemmake.files import read_small
from gemmake.hdf import show
from gemmake.kvmask.mix import windows, windows_of
from gemmake.kvmask.window import (
    Measure,
    Messages,
    Render,
    TokensOf,
    Window,
    check_limit,
    rendered,
)

__all__ = ["Own", "Text", "own", "read", "windows"]

OPTION = "--calibration"
LINES = (".jsonl", ".ndjson")
IN_FOLDERS = (".txt", ".md", *LINES)
MAX_BYTES = 16 << 20  # of all files together
MAX_FILES = 10_000
HELD_OUT_EVERY = 5
LONGEST = 1100  # tokens, of a part of a longer text
WHOLE = 2600  # tokens, of a conversation that is not cut
LENGTHS = (90, 35, 70, 35, 70)  # percent of the longest: about the lengths of the mix
KIND = "own"  # of windows
LEAST_TOKENS = 16  # what is shorter says nothing about a cache
FORMS = '{"messages": [..]}, {"conversations": [..]}, {"prompt": ".."} or {"text": ".."}'

ROLES: Mapping[object, str] = {
    "system": "system", "user": "user", "assistant": "assistant",
    "human": "user", "gpt": "assistant", "model": "assistant",
}  # fmt: skip
#: Where a text may be cut, the best places first.
BREAKS = tuple(map(re.compile, (r"\n[ \t]*\n", r"\n", r"(?<=[.!?;])\s|(?<=[。！？।])", r"\s")))


@dataclass(frozen=True)
class Text:
    """A text of the user: plain, or a conversation."""

    text: str = ""
    messages: Messages | None = None


@dataclass(frozen=True)
class Own:
    """The user's texts in windows: those to measure on, and those to judge by."""

    windows: tuple[Window, ...]
    held_out: tuple[Window, ...]


def own(
    path: Path,
    ratio: float,
    most_tokens: int,
    tokens_of: TokensOf | None = None,
    render: Render | None = None,
) -> Own:
    """The windows of a file or folder, as many as the mix would have, spread over all of it.

    Raises UsageError for what cannot be read and for too little text.
    """
    count = windows_of(ratio)
    check_limit(most_tokens)
    found = list(pack(read(path), Measure(tokens_of, render), most_tokens))
    if len(found) < HELD_OUT_EVERY:
        raise UsageError(
            f"{OPTION} {show(path.name)}: {len(found)} windows of text, at least {HELD_OUT_EVERY} "
            "are needed; give more text, or leave the option out for the built-in one"
        )
    chosen = spread(found, max(HELD_OUT_EVERY, count * HELD_OUT_EVERY // (HELD_OUT_EVERY - 1)))
    last = HELD_OUT_EVERY - 1
    return Own(
        tuple(window for i, window in enumerate(chosen) if i % HELD_OUT_EVERY != last),
        tuple(window for i, window in enumerate(chosen) if i % HELD_OUT_EVERY == last),
    )


def spread(items: Sequence[Window], count: int) -> list[Window]:
    """At most `count` items, evenly spread."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


# ---- reading ----
def read(path: Path) -> list[Text]:
    """All texts of a file, or of the files of a folder in order of their names. UsageError."""
    files = _files(path) if path.is_dir() else [path]
    out: list[Text] = []
    room = MAX_BYTES
    for file in files:
        name = show(str(file.relative_to(path)) if file != path else file.name)
        data = _data(file, name, room)
        room -= len(data)
        text = _decoded(data, name)
        if file.suffix.lower() in LINES:
            out += _lines(text, name)
        elif text.strip():
            out.append(Text(text.strip("\n")))
    if not out:
        raise UsageError(f"{OPTION} {show(path.name)}: no text in it; name a file with text")
    return out


def _files(folder: Path) -> list[Path]:
    """The texts of a folder, hidden ones left out."""
    files = []
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix.lower() in IN_FOLDERS and path.is_file() and not hidden:
            files.append(path)
    if not files:
        raise UsageError(
            f"{OPTION} {show(folder.name)}: no {', '.join(IN_FOLDERS)} in this folder; "
            "name a folder with texts, or one file"
        )
    if len(files) > MAX_FILES:
        raise UsageError(
            f"{OPTION} {show(folder.name)}: {len(files)} files, at most {MAX_FILES}; join some"
        )
    return files


def _data(file: Path, name: str, room: int) -> bytes:
    """The bytes of a file."""
    if file.suffix.lower() == ".json":
        raise UsageError(
            f"{OPTION} {name}: one JSON document is not read; write one object a line "
            "and name it .jsonl"
        )
    try:
        data = read_small(file, room)
    except OSError as error:
        raise UsageError(
            f"{OPTION} {name}: {error.strerror}; name a text file, a JSONL file or a folder"
        ) from error
    if data is None:
        raise UsageError(f"{OPTION} {name}: more than {MAX_BYTES >> 20} MiB in all; give less text")
    return data


def _decoded(data: bytes, name: str) -> str:
    """The text of a file. A mark of the byte order is left out, line ends are those of Unix."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{OPTION} {name}, line {line}: not UTF-8 at byte {error.start}; convert the file"
        ) from error
    if (at := text.find("\0")) >= 0:
        line = text.count("\n", 0, at) + 1
        raise UsageError(f"{OPTION} {name}, line {line}: a zero byte; name a file with text")
    return text.replace("\r\n", "\n")


def _lines(text: str, name: str) -> Iterator[Text]:
    """The texts of a JSONL file. Lines end with a line feed and with nothing else."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield _parsed(line)
            except _BadLine as error:
                raise UsageError(f"{OPTION} {name}, line {number}: {error}") from error


class _BadLine(Exception):
    """What is wrong with a line, and what to do."""


def _parsed(line: str) -> Text:
    """The text of a line. Raises _BadLine."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too large or too deep"
        raise _BadLine(f"not JSON ({reason}); write one object a line") from error
    if not isinstance(value, dict):
        raise _BadLine(f"not an object; write {FORMS}")
    if "messages" in value:
        return Text(messages=_conversation(value["messages"], "messages", "role", "content"))
    if "conversations" in value:
        return Text(
            messages=_conversation(value["conversations"], "conversations", "from", "value")
        )
    if "prompt" in value:
        return Text(messages=(("user", _string(value["prompt"], "prompt")),))
    if "text" in value:
        return Text(_string(value["text"], "text"))
    raise _BadLine(f"none of the known keys; write {FORMS}")


def _string(value: object, what: str) -> str:
    """A text that says something."""
    if not isinstance(value, str):
        raise _BadLine(f"{what} is not a text; write it as a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _BadLine(f"{what} has half a character (a lone surrogate); repair it") from error
    if not value.strip() or "\0" in value:
        raise _BadLine(f"{what} is empty or has a zero byte; leave the line out")
    return value


def _conversation(value: object, key: str, role_key: str, text_key: str) -> Messages:
    """A conversation; messages of one role that follow each other become one."""
    if not isinstance(value, list) or not value:
        raise _BadLine(f"{key} is not a list of messages; write {FORMS}")
    out: list[tuple[str, str]] = []
    for place, message in enumerate(value, 1):
        what = f"message {place}"
        if not isinstance(message, dict) or not {role_key, text_key} <= message.keys():
            raise _BadLine(f'{what} lacks "{role_key}" or "{text_key}"; write both')
        name = message[role_key]
        if not isinstance(name, str) or name not in ROLES:
            raise _BadLine(f"{what} is by {name!r}; roles are system, user and assistant")
        role, text = ROLES[name], _string(message[text_key], what)
        if role == "system" and out:
            raise _BadLine(f"{what} is a system message; put it first or leave it out")
        if out and out[-1][0] == role:
            text = f"{out.pop()[1]}\n\n{text}"
        out.append((role, text))
    return tuple(out)


# ---- windows ----
@dataclass(frozen=True)
class _Piece:
    """A part of the texts that fits into a window, and its tokens."""

    content: Text
    tokens: int


def pack(texts: Sequence[Text], measure: Measure, most_tokens: int) -> Iterator[Window]:
    """Windows in the order of the texts: short ones are joined up to the length in turn."""
    most = measure.room(most_tokens)
    lengths = cycle(min(LONGEST, most) * percent // 100 for percent in LENGTHS)
    held: _Piece | None = None
    wanted = next(lengths)
    for piece in _pieces(texts, measure, most):
        both = _joined(held, piece) if held is not None else None
        if both is not None and both.tokens <= wanted:
            held = both
            continue
        if held is not None:
            yield from _shown(held, measure)
            wanted = next(lengths)
        held = piece
    if held is not None:
        yield from _shown(held, measure)


def _shown(piece: _Piece, measure: Measure) -> Iterator[Window]:
    """The window, unless it is too short to be worth anything. Of a conversation the last answer
    is what has to be right."""
    if piece.tokens < LEAST_TOKENS:
        return
    messages, text = piece.content.messages, _text(piece.content, measure)
    answer = messages[-1][1].strip() if messages and messages[-1][0] == "assistant" else ""
    shown = text.rstrip()
    ends = bool(answer) and shown.endswith(answer)  # a template may change it
    yield Window(KIND, text, messages, len(shown) - len(answer) if ends else None)


def _text(content: Text, measure: Measure) -> str:
    return rendered(content.messages, measure.render) if content.messages else content.text


def _joined(first: _Piece, second: _Piece) -> _Piece | None:
    """Both as one text or one conversation; None where they do not go together."""
    a, b, tokens = first.content, second.content, first.tokens + second.tokens + 2
    if not a.messages and not b.messages:
        return _Piece(Text(f"{a.text}\n\n{b.text}"), tokens)
    if not a.messages or not b.messages:
        return None
    (system, rest), (other, more) = _split_system(a.messages), _split_system(b.messages)
    if system != other or not rest or not more or rest[-1][0] == more[0][0]:
        return None
    return _Piece(Text(messages=(*system, *rest, *more)), tokens)


def _split_system(messages: Messages) -> tuple[Messages, Messages]:
    """The system message, if there is one, and the others."""
    count = 1 if messages[0][0] == "system" else 0
    return messages[:count], messages[count:]


def _pieces(texts: Sequence[Text], measure: Measure, most: int) -> Iterator[_Piece]:
    """The texts, those that are too long for a window in parts."""
    longest = min(LONGEST, most)
    for content in texts:
        tokens = measure.count(_text(content, measure))
        turns = list(_turns(content.messages)) if content.messages else []
        if tokens <= (min(WHOLE, most) if turns else longest):
            yield _Piece(content, tokens)
        elif len(turns) > 1:
            yield from _pieces(turns, measure, longest)
        else:
            yield from _slices(_text(content, Measure()), measure, longest)


def _turns(messages: Messages) -> Iterator[Text]:
    """A conversation in parts: a question with its answer, each with the system message."""
    system, rest = _split_system(messages)
    turn: list[tuple[str, str]] = []
    for message in rest:
        if turn and message[0] == "user":
            yield Text(messages=(*system, *turn))
            turn = []
        turn.append(message)
    if turn:
        yield Text(messages=(*system, *turn))


def _slices(text: str, measure: Measure, longest: int) -> Iterator[_Piece]:
    """A long text in parts of the lengths in turn, cut where it has a break."""
    rate, at = 4.0, 0  # characters of a token, as the last part had them
    lengths = cycle(longest * percent // 100 for percent in LENGTHS)
    while at < len(text):
        wanted = next(lengths)
        end = _cut(text, at, at + max(1, int(wanted * rate)))
        tokens = measure.count(text[at:end])
        while tokens > longest and end > at + 1:
            end = _cut(text, at, max(at + 1, at + (end - at) * longest * 9 // (tokens * 10)))
            tokens = measure.count(text[at:end])
        if part := text[at:end].strip():
            yield _Piece(Text(part), tokens)
        rate, at = min(8.0, max(0.2, (end - at) / max(1, tokens))), end


def _cut(text: str, begin: int, end: int) -> int:
    """The best place to cut in the last third before `end`."""
    if end >= len(text):
        return len(text)
    low = end - (end - begin) // 3
    for pattern in BREAKS:
        places = [found.end() for found in pattern.finditer(text, low, end)]
        if places and places[-1] > begin:
            return places[-1]
    return end
