"""The evaluation text: the paragraphs of the Debian Administrator's Handbook, English edition.

Normalisation: pages in the order of their file names; every `<div class="para">`, nested elements
included; runs of white space become one space; empty paragraphs are dropped; paragraphs are joined
by one line feed.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path


class _Paragraphs(HTMLParser):
    """Collects the text of each outermost `<div class="para">`."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self._pieces: list[str] = []
        self._depth = 0  # open div elements, counted from the paragraph's own

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "div" and (self._depth or ("class", "para") in attrs):
            self._depth += 1

    def handle_endtag(self, tag: str) -> None:
        if tag != "div" or not self._depth:
            return
        self._depth -= 1
        if not self._depth:
            self.found.append(" ".join("".join(self._pieces).split()))
            self._pieces.clear()

    def handle_data(self, data: str) -> None:
        if self._depth:
            self._pieces.append(data)


def paragraphs(folder: Path) -> list[str]:
    """The non-empty paragraphs of all pages in a folder, in order."""
    result: list[str] = []
    for page in sorted(folder.glob("*.html")):
        parser = _Paragraphs()
        parser.feed(page.read_text(encoding="utf-8"))
        parser.close()
        result += [text for text in parser.found if text]
    return result


def text(folder: Path) -> str:
    """The whole text."""
    return "\n".join(paragraphs(folder))
