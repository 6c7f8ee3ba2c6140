"""Conversations as the device reads them: put together by the artifact's own chat template.

The template's tables (TMPL) say which tokens and texts stand between the messages, as on the device
(csrc/TOKENS.md 2.3). Its control tokens are ids there, and nothing that a message spells becomes
one. So a rendered text has for each of them its number between two zero bytes, which no message may
hold, and `encode` makes ids of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemmake.kvmask.window import Messages
from gemmake.passes.template import Layout, assemble
from gemmake.sandbox import Conversation
from gemrun.format.tokens import Slot, TmplFlag, read_tmpl

MARK = "\0"  # around the number of a control token

Tokenize = Callable[[str], list[int]]  # ids of a text, without one that begins it


@dataclass(frozen=True)
class Chat:
    """A compiled chat template."""

    layout: Layout  # control tokens of its texts as numbers between marks

    def render(self, messages: Messages) -> str | None:
        """A conversation up to where the assistant is to answer or has answered; None where the
        device would refuse it."""
        if not _allowed(messages, bool(self.layout.flags & TmplFlag.SYSTEM)):
            return None
        said = tuple({"role": role, "content": content} for role, content in messages)
        return assemble(self.layout, Conversation(said, prompt=True))


def compiled(section: bytes | None, vocab_rows: int) -> Chat | None:
    """The template of a TMPL section; None without one."""
    if section is None:
        return None
    found = read_tmpl(memoryview(section), vocab_rows)
    slots = [_text(items) for items in found.slots]
    slots[Slot.ASST_END] = ""  # a text ends with its last answer, as a run does
    return Chat(Layout(found.header.flags, tuple(slots)))


def encode(text: str, tokenize: Tokenize) -> list[int]:
    """Ids of a rendered text; of a token that is cut off there is nothing."""
    parts = text.split(MARK)  # text, number, text, .., text
    whole = len(parts) - 1 + len(parts) % 2
    ids: list[int] = []
    for at, part in enumerate(parts[:whole]):
        if at % 2:
            ids.append(int(part))
        elif part:
            ids += tokenize(part)
    return ids


def _text(items: Sequence[int | bytes]) -> str:
    return "".join(
        f"{MARK}{item}{MARK}" if isinstance(item, int) else item.decode() for item in items
    )


def _allowed(messages: Messages, system: bool) -> bool:
    """A system message if the template takes one, then user and assistant by turns."""
    roles = [role for role, _ in messages]
    if roles and roles[0] == "system":
        if not system:
            return False
        del roles[0]
    return bool(roles) and all(
        role == ("assistant" if at % 2 else "user") for at, role in enumerate(roles)
    )
