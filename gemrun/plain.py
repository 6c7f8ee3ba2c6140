"""Text from outside, such as names of files, made fit for a terminal: nothing in it is obeyed.

plain(text)       control characters and those that turn the direction of writing are escaped;
                  line breaks and tabs stay
one_line(text)    the same, and these are escaped too
"""

from __future__ import annotations

KEPT = "\n\t"
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_TURNS = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
# From 0x7f on the escape is that of JSON too: there nothing below is left to escape.
_ESCAPES = {c: f"\\x{c:02x}" if c < 0x20 else f"\\u{c:04x}" for c in (*_CONTROLS, *_TURNS)}
_PLAIN = {c: text for c, text in _ESCAPES.items() if chr(c) not in KEPT}


def plain(text: str) -> str:
    """The text for a terminal."""
    return text.translate(_PLAIN)


def one_line(text: str) -> str:
    """The text for a place in a line."""
    return text.translate(_ESCAPES)
