"""The pinned prompt: which ids are pinned, and the blocks that the engine computes for them.

A prompt is pinned so far as its ids are the same whatever follows: the last ones may merge with
what comes behind the text, which is found by encoding it with many continuations. Nothing rests on
that but how much is saved: the engine compares ids, and computes what is not equal.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gemmake import images
from gemmake.emit import Host
from gemmake.engine import Engine
from gemmake.errors import UsageError
from gemmake.figures import mib
from gemmake.files import read_small
from gemmake.hdf import show
from gemmake.options import CompileOptions
from gemmake.planning import pin_size
from gemmake.state import State
from gemrun.format import sizes, spec, tokens
from gemrun.format.pins import NAME, Pinned, section
from gemrun.format.tokens import Slot, Template, TmplFlag

Encode = Callable[[str], list[int]]

#: What may follow a text: every printable ASCII character, and what joins with what stands before:
#: words, contractions, numbers, blanks and line ends, marks that combine, letters of other scripts.
TAILS = (
    "",
    *(chr(code) for code in range(0x20, 0x7F)),
    *("\n", "\n\n", "\n \n", "\r\n", "\t", "  ", "   ", " a", " A", " the", "the", "ing", "ed "),
    *("'s", "'S", "'ll", "'t", " '", '."', ".\n", ", and", "12", "123", "1234", "0.5", "://", "=="),
    *("é", "ß", "ñ", "ж", "я", "中", "文", "。", "、", "한", "あ", "ん", "ا", "ن", "क", "\u094d"),
    *("\u0301", "\u0327", "\u0323\u0302", "\u1161", "\u11a8", "\u200d", "\ufe0f", "🙂", "🏽"),
    *("\xa0", "\u2009", "\u3000", "\u2581", "…", "”", "’s"),
)


def decide(state: State, text: str, host: Host) -> State:
    """The state with the ids that are pinned of a text. Needs the tables of the tokenizer."""
    options = state.options
    with host.clock.timed("pinned prompt"):
        found = pinned(state, text, host)
    ids, every = len(found.ids), found.told["of"]
    if ids == 0:
        raise UsageError(
            "--pin-prompt: no token of it is sure before more follows; use a longer one"
        )
    if every + 2 > options.context:
        raise UsageError(
            f"--pin-prompt: {every} tokens leave no room for a question and an answer in a context "
            f"of {options.context}; shorten it, or raise --kv-cache-size"
        )
    return replace(state, pinned=found)


def text_of(options: CompileOptions) -> str | None:
    """The text, or that of the file behind an @; None: nothing is to be pinned. UsageError."""
    given = options.pin_prompt
    if given is None:
        return None
    limit = sizes.text_limit(options.context)
    if given.startswith("@"):
        text = _read(Path(given[1:]), limit)
    elif _is_file(given):
        raise UsageError(f"--pin-prompt {show(given)}: is a file; --pin-prompt @FILE reads one")
    else:
        text = given
    if not text or "\0" in text:
        what = "a NUL character" if text else "no text"
        raise UsageError(f"--pin-prompt: {what} in it; give a plain text")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise UsageError(
            f"--pin-prompt: not UTF-8 at character {error.start}; correct it"
        ) from error
    if size > limit:
        raise UsageError(
            f"--pin-prompt: longer than the {limit} bytes that a context of {options.context} "
            "tokens takes; shorten it, or raise --kv-cache-size"
        )
    return text


def _is_file(given: str) -> bool:
    try:
        return Path(given).is_file()
    except (OSError, ValueError):  # far too long for a name, or no name at all
        return False


def _read(path: Path, limit: int) -> str:
    try:
        data = read_small(path, limit)
    except OSError as error:
        raise UsageError(
            f"--pin-prompt @{show(path)}: {error.strerror}; name a text file"
        ) from error
    if data is None:
        raise UsageError(
            f"--pin-prompt @{show(path)}: larger than {limit} bytes, more than the context takes; "
            "shorten it, or raise --kv-cache-size"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--pin-prompt @{show(path)}: not UTF-8 at byte {error.start}; convert the file"
        ) from error


# ---- ids ----
def pinned(state: State, text: str, host: Host) -> Pinned:
    """What is sure of a prompt that begins with the text, or of a conversation whose system message
    it is. UsageError."""
    tokenizer = tokens.read_tokn(memoryview(state.tokn), state.conf.vocab_rows)
    template = _template(state) if state.options.pin_system else None
    most = min(len(text.encode()) + tokens.TMPL_MAX_TEXT, 16 * (spec.MAX_CONTEXT - 1))
    small = images.tokenizer_only(state, most)
    with (
        tempfile.TemporaryDirectory(prefix="gemmake-") as name,
        images.written(small, Path(name), host) as path,
        Engine(path, 1, host.baseline) as engine,
    ):
        if template is None:
            every = engine.encode_prompt(text)
            rows = [engine.encode_prompt(text + tail) for tail in tails(tokenizer, text)]
        else:
            every = begin_of_chat(template, engine.encode, text)
            rows = [begin_of_chat(template, engine.encode, text, tail) for tail in TAILS]
    told = {
        "of": len(every),
        "role": "text" if template is None else "system",
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    return Pinned(tuple(same_beginning([every, *rows])), told)


def _template(state: State) -> Template:
    """The chat template. UsageError where there is none, or none for a system message."""
    if state.tmpl is None:
        raise UsageError("--pin-system: the model has no chat template; pin a raw text without it")
    template = tokens.read_tmpl(memoryview(state.tmpl), state.conf.vocab_rows)
    if not template.header.flags & TmplFlag.SYSTEM:
        raise UsageError(
            "--pin-system: the model's chat template has no place for a system message; "
            "pin a raw text without it"
        )
    return template


def same_beginning(rows: Iterable[Sequence[int]]) -> list[int]:
    """The ids that all rows begin with."""
    found: list[int] | None = None
    for row in rows:
        if found is None:
            found = list(row)
        equal = 0
        while equal < min(len(found), len(row)) and found[equal] == row[equal]:
            equal += 1
        del found[equal:]
    return found or []


def tails(tokenizer: tokens.Tokenizer, text: str) -> Iterator[str]:
    """What may follow a raw text: TAILS, and the rests of added tokens that it may have begun."""
    yield from TAILS
    end = text.encode()
    for token, flags in enumerate(tokenizer.flags):
        if not flags & tokens.TokenFlag.ADDED:
            continue
        piece = tokenizer.piece(token)
        for size in range(1, len(piece)):
            if end.endswith(piece[:size]):
                yield piece[size:].decode("utf-8", "ignore")


def begin_of_chat(template: Template, encode: Encode, system: str, user: str = "") -> list[int]:
    """Ids of a conversation up to the end of the first user's text (csrc/TOKENS.md 2.3)."""
    flags = template.header.flags
    system = system.strip() if flags & TmplFlag.TRIM_SYSTEM else system
    user = user.strip() if flags & TmplFlag.TRIM_USER else user
    slots = template.slots
    items = [*slots[Slot.SYSTEM], system.encode(), *slots[Slot.SYS_USER], user.encode()]
    ids: list[int] = []
    run = b""  # texts between two control tokens are encoded together
    for item in items:
        if isinstance(item, bytes):
            run += item
        else:
            ids += [*encode(run.decode()), item]
            run = b""
    return ids + encode(run.decode())


# ---- blocks ----
def fill(state: State, engine: Engine) -> dict[str, bytes]:
    """The section as the engine makes it over the sealed image; nothing where nothing is pinned."""
    if state.pinned is None:
        return {}
    return {NAME: section(state.pinned.ids, engine.blocks_of(state.pinned.ids))}


def lines_of(state: State) -> Iterator[str]:
    """What is pinned, for people."""
    if state.pinned is None:
        return
    told, ids = state.pinned.told, len(state.pinned.ids)
    kind = "a conversation with this system message" if told["role"] == "system" else "the text"
    rest = told["of"] - ids
    why = f"; the last {rest} depend on what follows" if rest else ""
    size = mib(pin_size(state))
    yield f"pinned prompt: {ids} of {told['of']} tokens of {kind}, {size}{why}"
