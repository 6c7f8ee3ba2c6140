"""Compiles a chat template to the TMPL section: what stands between the messages (csrc/TOKENS.md).

The template is rendered in a sandbox with marker words as messages; the text around the markers
becomes slots of control tokens and literal text. The slots are then checked: further conversations
with odd contents, put together from them, must equal the template's own rendering. A template that
does not come out this way means "no chat mode" and a sentence that says why, never a wrong guess.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gemmake.model import Generation, TokenizerSource
from gemmake.passes.tokens import Added, added_tokens, aligned
from gemmake.sandbox import Conversation, Message, Rendered, render
from gemrun.format.tokens import NONE, TMPL_MAX_ITEM, TMPL_MAX_TEXT, Slot, TmplFlag

ROLE_TRIM = {
    "system": TmplFlag.TRIM_SYSTEM,
    "user": TmplFlag.TRIM_USER,
    "assistant": TmplFlag.TRIM_ASST,
}
THINK_END = "</think>"

# Marker words: nothing a template would trim, split or look for.
MARKS = {"s": "GmkSystemMark", "u": "GmkUserMark", "a": "GmkAnswerMark", "v": "GmkLaterMark"}
ROLES = {"s": "system", "u": "user", "a": "assistant", "v": "user", "b": "assistant"}

ODD = (
    "Hello, who are you?", "", "  leading and trailing \n", "\n\nlines\n\n\nbetween\n\n",
    "{{ messages }} {% if x %} {# no #}", "日本語 naïve cafe\u0301 👩🏽‍🚀\u200d",
    "\ttab\\n 'q' \"q\" <b>&amp;",
    "role: user\nuser\nassistant", "1 2  3   4", "\u3000wide\xa0",
)  # fmt: skip
# Answers that hold thinking, whole and broken.
THOUGHTS = (
    f"<think>\nhm\n{THINK_END}\n\nYes.", f"{THINK_END}no", f"a{THINK_END}b{THINK_END}\n", "<think>",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Slots as text, and flags."""

    flags: int
    slots: tuple[str, ...]  # by Slot


@dataclass(frozen=True)
class TemplateResult:
    """The TMPL section, or None; and a sentence for the user when something is missing."""

    section: bytes | None
    warning: str = ""
    flags: int = 0


class Unsupported(Exception):
    """Why a template cannot be represented."""


def talk(shape: str, prompt: bool, contents: Mapping[str, str] = MARKS) -> Conversation:
    """A conversation such as "suav": one message per letter."""
    messages = tuple({"role": ROLES[key], "content": contents[key]} for key in shape)
    return Conversation(messages=messages, prompt=prompt)


def cut(rendered: Rendered, shape: str, what: str) -> list[str]:
    """The texts around the markers of a conversation. Raises Unsupported."""
    if rendered.error:
        raise Unsupported(f"{what} does not render ({rendered.error})")
    rest, parts = rendered.text, []
    for key in shape:
        if rest.count(MARKS[key]) != 1:
            raise Unsupported(f"{what} does not show every message exactly once")
        before, _, rest = rest.partition(MARKS[key])
        parts.append(before)
    return [*parts, rest]


def trims(role: str, plain: Rendered, padded: Rendered, mark: str, pad: tuple[str, str]) -> int:
    """The trim flag of a role, from a marker with blanks around it. Raises Unsupported."""
    if padded.text == plain.text:
        return ROLE_TRIM[role]
    if padded.error or padded.text != plain.text.replace(mark, pad[0] + mark + pad[1]):
        raise Unsupported(f"the text of the role {role} is changed in an unknown way")
    return 0


PAD = ("\u3000 \n ", " \t\n\xa0")


def padded(shape: str, key: str) -> Conversation:
    """A conversation whose message `key` has blanks around it."""
    return talk(shape, True, {**MARKS, key: PAD[0] + MARKS[key] + PAD[1]})


PROBES: dict[str, Conversation] = {
    "u": talk("u", False),
    "u+": talk("u", True),
    "ua": talk("ua", False),
    "uav+": talk("uav", True),
    "su+": talk("su", True),
    "su": talk("su", False),
    "trim u": padded("u", "u"),
    "trim a": padded("uav", "a"),
    "trim s": padded("su", "s"),
    "think": talk("uav", True, {**MARKS, "a": f"<think>\nx\n{THINK_END}\n\n{MARKS['a']}"}),
}


def derive(found: Mapping[str, Rendered]) -> Layout:
    """The layout that the probes show. Raises Unsupported."""
    slots = [""] * len(Slot)
    flags = 0
    slots[Slot.FIRST], slots[Slot.USER_END] = cut(found["u"], "u", "one user message")
    _, slots[Slot.GENERATE] = cut(found["u+"], "u", "one user message")
    _, slots[Slot.USER_ASST], slots[Slot.ASST_USER], _ = cut(
        found["uav+"], "uav", "a conversation of three messages"
    )
    flags |= trims("user", found["u+"], found["trim u"], MARKS["u"], PAD)
    flags |= trims("assistant", found["uav+"], found["trim a"], MARKS["a"], PAD)
    if not found["su+"].error and not found["su"].error:
        flags |= TmplFlag.SYSTEM | trims("system", found["su+"], found["trim s"], MARKS["s"], PAD)
        slots[Slot.SYSTEM], slots[Slot.SYS_USER], _ = cut(
            found["su+"], "su", "a conversation with a system message"
        )
    if not found["ua"].error:
        flags |= TmplFlag.ASST_LAST
        *_, slots[Slot.ASST_END] = cut(found["ua"], "ua", "a conversation that ends with an answer")
    if not found["think"].error and found["think"].text == found["uav+"].text:
        slots[Slot.THINK_CUT] = THINK_END
    return Layout(flags=flags, slots=tuple(slots))


def shown(layout: Layout, message: Message) -> str:
    """What a message contributes, as the engine does it."""
    text, role, mark = message["content"], message["role"], layout.slots[Slot.THINK_CUT]
    if role == "assistant" and mark and mark in text:
        text = text.rpartition(mark)[2].lstrip("\n")
    return text.strip() if layout.flags & ROLE_TRIM[role] else text


def assemble(layout: Layout, conversation: Conversation) -> str:
    """The text that the slots give for a conversation: the model of gr_chat_encode."""
    out, before = "", ""
    for message in conversation.messages:
        role = message["role"]
        if not before:
            slot = Slot.SYSTEM if role == "system" else Slot.FIRST
        elif before == "system":
            slot = Slot.SYS_USER
        else:
            slot = Slot.ASST_USER if role == "user" else Slot.USER_ASST
        out += layout.slots[slot] + shown(layout, message)
        before = role
    if before == "assistant":
        return out + layout.slots[Slot.ASST_END]
    return out + layout.slots[Slot.GENERATE if conversation.prompt else Slot.USER_END]


def trials(layout: Layout) -> list[Conversation]:
    """Conversations with odd contents to compare, of the shapes that the flags allow."""
    flags = layout.flags
    shapes = [("u", False), ("u", True), ("uau", True), ("uauau", True)]
    if flags & TmplFlag.SYSTEM:
        shapes += [("su", True), ("su", False), ("suau", True), ("suauau", True)]
    if flags & TmplFlag.ASST_LAST:
        shapes += [("ua", False), ("uaua", False)] + (
            [("suaua", False)] if flags & TmplFlag.SYSTEM else []
        )
    out, at = [], 0
    for shape, prompt in shapes:
        for start in range(len(ODD)):
            messages = []
            for key in shape:
                content = ODD[(start + at) % len(ODD)]
                messages.append({"role": ROLES[key], "content": content})
                at += 3
            out.append(Conversation(messages=tuple(messages), prompt=prompt))
    if layout.slots[Slot.THINK_CUT]:
        for answer in THOUGHTS:
            out.append(talk("uav", True, {**MARKS, "a": answer}))
    return out


def relevant(conversation: Conversation, flag: int) -> bool:
    """Does this conversation need a flag?"""
    if flag == TmplFlag.SYSTEM:
        return conversation.messages[0]["role"] == "system"
    return conversation.messages[-1]["role"] == "assistant"


def verified(layout: Layout, template: str, variables: Mapping[str, str]) -> Layout:
    """The layout with only the flags whose conversations come out right. Raises Unsupported."""
    conversations = trials(layout)
    texts = render(template, variables, conversations)
    wrong = [
        conversation
        for conversation, text in zip(conversations, texts, strict=True)
        if text.error or text.text != assemble(layout, conversation)
    ]
    for flag in (TmplFlag.ASST_LAST, TmplFlag.SYSTEM):
        if any(relevant(conversation, flag) for conversation in wrong):
            layout = replace(layout, flags=layout.flags & ~flag)
            wrong = [conversation for conversation in wrong if not relevant(conversation, flag)]
    if wrong:
        roles = ", ".join(message["role"] for message in wrong[0].messages)
        raise Unsupported(f"a conversation of {roles} does not come out as the template renders it")
    return layout


def text_of(source: TokenizerSource, number: int | None) -> str:
    """The spelling of a token id, "" if there is none."""
    for token in source.tokenizer_json.get("added_tokens") or []:
        if token["id"] == number:
            return str(token["content"])
    for text, other in source.tokenizer_json["model"]["vocab"].items():
        if other == number:
            return str(text)
    return ""


def template_variables(source: TokenizerSource, generation: Generation) -> dict[str, str]:
    """Special tokens by name, as templates use them. Raises Unsupported for one that is unknown."""
    out: dict[str, str] = {}
    for key, value in source.config.items():
        value = value.get("content") if isinstance(value, Mapping) else value
        if key.endswith("_token") and isinstance(value, str):
            out[key] = value
    if "bos_token" not in out and generation.bos_id is not None:
        out["bos_token"] = text_of(source, generation.bos_id)
    if "eos_token" not in out and len(generation.stop_ids) == 1:
        out["eos_token"] = text_of(source, generation.stop_ids[0])
    for key in ("bos_token", "eos_token"):
        if key in (source.chat_template or "") and key not in out:
            raise Unsupported(f"it uses {key}, which the checkpoint does not name")
    return out


Items = list[tuple[int, bytes]]  # token id and b"", or NONE and text


def split_items(text: str, control: Sequence[Added]) -> Items:
    """Literal text and control tokens: leftmost, and the longest where several start."""
    out: Items = []
    longest_first = sorted(control, key=lambda token: -len(token.text))
    at, begin = 0, 0
    while at < len(text):
        token = next((t for t in longest_first if text.startswith(t.text, at)), None)
        if token is None:
            at += 1
            continue
        if begin < at:
            out.append((NONE, text[begin:at].encode("utf-8")))
        out.append((token.id, b""))
        at = begin = at + len(token.text)
    if begin < at:
        out.append((NONE, text[begin:at].encode("utf-8")))
    return out


def with_bos(items: Items, generation: Generation) -> Items:
    """The slot that starts a conversation: exactly one bos if the model wants one."""
    bos = generation.bos_id
    if [token for token, _ in items[:2]] == [bos, bos]:
        raise Unsupported("it starts a conversation with bos twice")
    if generation.add_bos and bos is not None and (not items or items[0][0] != bos):
        return [(bos, b""), *items]
    return items


def build_items(
    layout: Layout, source: TokenizerSource, generation: Generation, vocab_rows: int
) -> list[Items]:
    """Items of every slot. Raises Unsupported."""
    control = [token for token in added_tokens(source.tokenizer_json) if token.control]
    unused = []
    if not layout.flags & TmplFlag.SYSTEM:
        unused += [Slot.SYSTEM, Slot.SYS_USER]
    if not layout.flags & TmplFlag.ASST_LAST:
        unused.append(Slot.ASST_END)
    slots = []
    for slot in Slot:
        text = "" if slot in unused else layout.slots[slot]
        items = [(NONE, text.encode())] if text and slot == Slot.THINK_CUT else None
        items = split_items(text, control) if items is None else items
        if slot == Slot.FIRST or (slot == Slot.SYSTEM and layout.flags & TmplFlag.SYSTEM):
            items = with_bos(items, generation)
        slots.append(items)
    for token, _ in (item for items in slots for item in items):
        if token != NONE and token >= vocab_rows:
            raise Unsupported(f"it uses token {token}, but the model has {vocab_rows} rows")
    return slots


def pack(flags: int, slots: Iterable[Items]) -> bytes:
    """The TMPL section. Raises Unsupported when it is over its limits."""
    starts, items, text = [0], [], b""
    for slot in slots:
        for token, part in slot:
            items.append(struct.pack("<2I", token, len(part)))
            text += part
        starts.append(len(items))
    if len(items) > TMPL_MAX_ITEM or len(text) > TMPL_MAX_TEXT:
        raise Unsupported(f"it has {len(items)} parts and {len(text)} bytes of text, too many")
    header = struct.pack("<3I10I3I", flags, len(items), len(text), *starts, 0, 0, 0)
    return aligned(header) + aligned(b"".join(items)) + aligned(text)


def compile_template(
    source: TokenizerSource, generation: Generation, vocab_rows: int
) -> TemplateResult:
    """The TMPL section, or None with the reason. Never raises for what the template does."""
    template = source.chat_template
    if not template:
        return TemplateResult(
            section=None,
            warning="chat template: the checkpoint has none; the artifact has no chat mode, "
            "prompts are taken as they are",
        )
    try:
        variables = template_variables(source, generation)
        found = dict(zip(PROBES, render(template, variables, tuple(PROBES.values())), strict=True))
        derived = derive(found)
        layout = verified(derived, template, variables)
        section = pack(layout.flags, build_items(layout, source, generation, vocab_rows))
    except Unsupported as error:
        return TemplateResult(
            section=None,
            warning=f"chat template: {error}; the artifact has no chat mode, prompts are taken as "
            "they are",
        )
    warning = ""
    if derived.flags & TmplFlag.SYSTEM and not layout.flags & TmplFlag.SYSTEM:
        warning = (
            "chat template: system messages are treated in a way that cannot be compiled; "
            "the artifact takes none"
        )
    return TemplateResult(section=section, warning=warning, flags=layout.flags)
