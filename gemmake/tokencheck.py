"""A quick check of a checkpoint's tokenizer and chat template, before it is compiled.

The engine encodes and decodes a text of many scripts, and a conversation is put together by the
compiled chat template. Everything that takes longer is looked at against a deadline. No weight is
read.
"""

from __future__ import annotations

import tempfile
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gemmake import images
from gemmake.emit import Host
from gemmake.engine import Engine
from gemmake.kvmask.chat import compiled, encode
from gemmake.load.generation import TURN_ENDS
from gemmake.state import State
from gemrun.format.tokens import TmplFlag, TokenFlag, Tokenizer, read_tmpl, read_tokn

SECONDS = 180.0  # for one candidate
BATCH = 256  # control tokens that are spelled in one text

#: Own sentences; what a machine is told and tells, in the scripts of its users.
TEXTS: tuple[tuple[str, str], ...] = (
    ("English", "The conveyor stops when the light curtain is interrupted; restart it by hand."),
    ("German", "Der Förderer hält an, größere Teile (≥ 12 mm) fallen auf die Straße."),
    ("French", "L'opérateur vérifie où le capteur a été déplacé : « à côté du moteur »."),
    ("Polish", "Zażółć gęślą jaźń, wyłącz zasilanie i sprawdź łożysko."),
    ("Turkish", "Isıtıcıyı kapatın, ığdırdaki ölçümü İzmir'e gönderin."),
    ("Greek", "Η θερμοκρασία του κινητήρα είναι υψηλή, ελέγξτε τον ανεμιστήρα."),
    ("Russian", "Насос остановлен, давление 3,5 бар, ёмкость пуста."),
    ("Chinese", "机器人停止工作。请检查电机的温度，阀门已经关闭，压力正常。"),
    ("Japanese", "ロボットは停止しました。モーターの温度を確認してください。"),
    ("Korean", "로봇이 멈췄습니다. 모터 온도를 확인하십시오."),
    ("Hindi", "मोटर का तापमान बहुत अधिक है, कृपया पंखे की जाँच करें।"),
    ("Thai", "มอเตอร์ร้อนเกินไป กรุณาตรวจสอบพัดลม"),
    ("Arabic", "توقف الروبوت. يرجى فحص درجة حرارة المحرك."),
    ("Hebrew", "הרובוט נעצר, בדוק את טמפרטורת המנוע."),
    ("code", 'def f(x):\n\tif x != 0:\n        return {"ok": True, "n": x ** 2}  # done\n'),
    ("numbers", "2026-01-31 23:59:59, 1,234.50 kW, -0.001e+12, 0x1F, 100 %, 3/4, $5"),
    ("blanks", "  two  spaces\t\ttabs \r\n\r\n end of lines\n\n\n   "),
    ("symbols", "👩🏽‍🚀 → ✓ ∑ ½ № … “quoted” ‹x› \u200b\u00a0\ufeff \U00020000"),
)
CONVERSATION = (
    ("system", "You answer in one sentence."),
    ("user", "Which valve is open?"),
    ("assistant", "Valve 3 is open."),
    ("user", "Close it, please."),
)


SIGNS = {"good": "✓", "bad": "✗", "open": "?"}


@dataclass(frozen=True)
class Finding:
    """What one check found: good, bad, or open where it could not tell."""

    name: str
    verdict: str
    sentence: str

    @property
    def line(self) -> str:
        """For people."""
        return f"{SIGNS[self.verdict]} {self.name}: {self.sentence}"


def check_text(
    state: State, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic
) -> tuple[Finding, ...]:
    """All checks of a state whose tokenizer and template are compiled; those that the time does not
    suffice for are open."""
    end = clock() + seconds
    tokenizer = read_tokn(memoryview(state.tokn), state.model.spec.vocab_rows)
    longest = max(len(text.encode()) for text in _texts(tokenizer))
    small = images.tokenizer_only(state, 2 * longest + 4096)
    found: list[Finding] = []
    with (
        tempfile.TemporaryDirectory(prefix="gemmake-") as folder,
        images.written(small, Path(folder), Host(1)) as path,
        Engine(path, 1) as engine,
    ):
        checks: tuple[tuple[str, Callable[[], Finding]], ...] = (
            ("round trips", lambda: _round_trips(engine, state, end, clock)),
            ("special tokens", lambda: _special_tokens(engine, tokenizer, end, clock)),
            ("chat template", lambda: _chat_template(engine, state)),
            ("stop tokens", lambda: _stop_tokens(state, tokenizer)),
        )
        for name, check in checks:
            late = Finding(name, "open", f"not checked, {seconds:g} s are over; check it alone")
            found.append(check() if clock() < end else late)
    return tuple(found)


def _texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Everything that will be encoded at once."""
    yield from (text for _, text in TEXTS)
    yield from (text for _, text in _spelled(tokenizer))


def _round_trips(engine: Engine, state: State, end: float, clock: Callable[[], float]) -> Finding:
    """Ids of a text back to the text; in the form that the tokenizer's normaliser gives it."""
    lost, tokens, characters, done = [], 0, 0, 0
    normal = any(part.get("type") == "NFC" for part in _parts(state.model.tokenizer.tokenizer_json))
    for name, text in TEXTS:
        if clock() >= end:
            break
        ids = engine.encode(text)
        wanted = unicodedata.normalize("NFC", text) if normal else text
        if engine.decode(ids) != wanted.encode():
            lost.append(name)
        tokens, characters, done = tokens + len(ids), characters + len(text), done + 1
    if lost:
        return Finding(
            "round trips",
            "bad",
            f"{', '.join(lost)} came back changed; such text will not reach the model whole",
        )
    if done < len(TEXTS):
        return Finding("round trips", "open", f"{done} of {len(TEXTS)} texts checked in time")
    return Finding(
        "round trips",
        "good",
        f"{done} texts came back byte for byte, {characters / tokens:.1f} characters a token",
    )


def _parts(tokenizer: object) -> list[dict[str, object]]:
    """The parts of a tokenizer.json's normaliser."""
    found = tokenizer.get("normalizer") if isinstance(tokenizer, dict) else None
    if not isinstance(found, dict):
        return []
    inner = found.get("normalizers")
    return [part for part in inner if isinstance(part, dict)] if inner else [found]


def _spelled(tokenizer: Tokenizer) -> Iterator[tuple[set[int], str]]:
    """Control tokens written out, some in each text: (their ids, the text)."""
    every = [
        number
        for number, flags in enumerate(tokenizer.flags)
        if flags & TokenFlag.CONTROL and tokenizer.piece(number)
    ]
    for first in range(0, len(every), BATCH):
        some = every[first : first + BATCH]
        spelled = [tokenizer.piece(number).decode("utf-8", "replace") for number in some]
        yield set(some), " ".join(spelled)


def _special_tokens(
    engine: Engine, tokenizer: Tokenizer, end: float, clock: Callable[[], float]
) -> Finding:
    """No text that a user writes may become a control token."""
    count = 0
    for ids, text in _spelled(tokenizer):
        if clock() >= end:
            return Finding("special tokens", "open", f"{count} checked in time")
        made = ids & set(engine.encode(text))
        if made:
            piece = tokenizer.piece(min(made)).decode("utf-8", "replace")
            return Finding("special tokens", "bad", f"a user who writes {piece} ends up with one")
        count += len(ids)
    return Finding("special tokens", "good", f"none of {count} can be written by a user")


def _chat_template(engine: Engine, state: State) -> Finding:
    """A conversation of system, user and assistant, as the device puts it together."""
    if state.tmpl is None:
        reason = next((note for note in state.notes if note.startswith("chat template: ")), "")
        has = state.model.tokenizer.chat_template is not None
        return Finding(
            "chat template", "bad" if has else "open", reason.removeprefix("chat template: ")
        )
    rows = state.model.spec.vocab_rows
    flags = read_tmpl(memoryview(state.tmpl), rows).header.flags
    system = bool(flags & TmplFlag.SYSTEM)
    said = CONVERSATION if system else CONVERSATION[1:]
    chat = compiled(state.tmpl, rows)
    text = chat.render(said) if chat is not None else None
    if text is None:
        return Finding("chat template", "bad", "a conversation does not render; use another model")
    lost = [content for _, content in said if content not in text]
    if lost:
        return Finding("chat template", "bad", f"the message {lost[0]!r} is not in what it renders")
    count = len(encode(text, engine.encode))
    roles = "system, user and assistant" if system else "user and assistant (no system messages)"
    return Finding("chat template", "good", f"a conversation of {roles} renders, {count} tokens")


def _stop_tokens(state: State, tokenizer: Tokenizer) -> Finding:
    """An answer must be able to end."""
    stops: Sequence[int] = state.model.spec.generation.stop_ids
    if not stops:
        return Finding("stop tokens", "bad", "no file names one; answers end at their limit only")
    names = [tokenizer.piece(number).decode("utf-8", "replace") for number in stops]
    template = state.model.tokenizer.chat_template or ""
    missing = [end for end in TURN_ENDS if end in template and end not in names]
    if state.tmpl is not None and missing:
        return Finding(
            "stop tokens", "bad", f"{missing[0]} ends a turn and is none; name it as eos_token_id"
        )
    return Finding("stop tokens", "good", ", ".join(names))
