"""Windows as token ids: what the model sees of them."""

from __future__ import annotations

from typing import Protocol

from gemmake.kvmask.chat import MARK, Chat, encode
from gemmake.kvmask.gates import Passage
from gemmake.kvmask.window import Render, Window
from gemrun.format import sizes


class Tokenize(Protocol):
    """Ids of a text; with `bos` it begins as the model asks."""

    def __call__(self, text: str, *, bos: bool = False) -> list[int]: ...


class Reader:
    """By a tokenizer and a chat template, for a context of so many tokens."""

    def __init__(self, tokenize: Tokenize, chat: Chat | None, most: int) -> None:
        self._tokenize, self._chat, self._most = tokenize, chat, most
        self.render: Render | None = None if chat is None else chat.render

    def ids(self, text: str) -> list[int]:
        """At most as many as fit; of a longer text the beginning has more than that."""
        begin = text[: sizes.text_limit(self._most) // 4]  # bytes of a character
        if MARK in begin:  # a conversation, with the model's first token where it has one
            return encode(begin, self._tokenize)[: self._most]
        return self._tokenize(begin, bos=True)[: self._most]

    def passage(self, window: Window) -> Passage:
        """A window; its answer begins with the first token that is another without it."""
        ids = self.ids(window.text)
        if window.answer_at is None:
            return Passage(ids)
        before = self.ids(window.text[: window.answer_at])
        differ = (at for at, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b)
        return Passage(ids, next(differ, min(len(before), len(ids))))
