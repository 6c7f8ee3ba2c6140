"""What no value of the configuration can be, beyond its type and range: texts, paths, addresses.

A path that is not there yet is no mistake: a password, a key or the engine may come later, and
`gemctl doctor` tells of it. What is there has to be of the right kind. Nothing is opened.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic_core import PydanticCustomError

from gemctl.strict import CONTROL

SOCKET_MOST = 107  # bytes of a Unix socket's path
PATH_MOST, NAME_MOST = 4095, 255  # bytes of a path, and of a name in it
SHOWN_MOST = 160  # characters of a value: most paths are shown whole
_NAME = re.compile(r"[^\W_](?:[\w-]{0,61}[^\W_])?")  # of a host, between two dots


def wrong(value: object, what: str, **more: Any) -> PydanticCustomError:
    """A mistake: the value, what is wrong with it, and what to do. `more`: `key`, where it is
    another one than the value's."""
    text = {"shown": shown(value), "what": what, **more}
    return PydanticCustomError("gemctl", "{shown} {what}", text)


def shown(value: object) -> str:
    """A value in quotes, its beginning where it is long."""
    text = json.dumps(str(value), ensure_ascii=False)
    return text if len(text) <= SHOWN_MOST else f"{text[: SHOWN_MOST - 3]}..."


# ---- texts ----


def plain(text: str) -> str:
    """Text of one line, without NUL and other control characters."""
    if CONTROL.search(text):
        raise wrong(text, "holds a control character; leave it out")
    return text


def prompt(text: str) -> str:
    """Text that the engine can take: lines, but no NUL."""
    if "\0" in text:
        raise wrong(text, "holds a NUL character; leave it out")
    return text


def given(text: str) -> str:
    """A word that is not empty."""
    if not text.strip():
        raise wrong(text, "is an empty text; write a word, or leave it out")
    return plain(text)


def host(text: str) -> str:
    """Name or address of a host; empty: none."""
    plain(text)
    if not text or _is_address(text):
        return text
    if "://" in text or "/" in text:
        raise wrong(text, "is no host; write its name or address alone, without mqtt:// and path")
    if re.fullmatch(r"[^:]*:\d+", text):
        raise wrong(text, "is a host with a port; put the number into port")
    names = text.removesuffix(".").split(".")
    if len(text) > 253 or not all(_NAME.fullmatch(name.replace("_", "a")) for name in names):
        raise wrong(text, "is no name and no address of a host; write it as ping takes it")
    if re.fullmatch(r"[0-9.]+", text):
        raise wrong(text, "is no address; write four numbers from 0 to 255, or a name")
    return text


def is_loopback(text: str) -> bool:
    """Whether an address is this machine's own, which nobody else reaches."""
    return _is_address(text) and ipaddress.ip_address(text).is_loopback


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# ---- paths ----


def absolute(path: Path) -> Path:
    """A path that means the same wherever a program is started."""
    text = str(path)
    if CONTROL.search(text):
        raise wrong(text, "holds a control character; name another path")
    if text == ".":
        raise wrong("", "is no path; write one that begins with /")
    if not path.is_absolute():
        raise wrong(text, "is relative; write it from / on")
    size = len(os.fsencode(path))
    if size > PATH_MOST or any(len(os.fsencode(name)) > NAME_MOST for name in path.parts):
        limits = f"{PATH_MOST} bytes, or a name in it than {NAME_MOST}"
        raise wrong(text, f"is longer than {limits}; use a shorter one")
    return path


def _mode(path: Path) -> int | None:
    """Kind and rights of what is there; None: nothing, or nobody may look."""
    try:
        return path.stat().st_mode
    except OSError:
        return None


def _of_kind(path: Path, is_kind: Callable[[int], bool], kind: str) -> Path:
    mode = _mode(absolute(path))
    if mode is not None and not is_kind(mode):
        raise wrong(path, f"is no {kind}; name one")
    return path


def folder(path: Path) -> Path:
    """A folder, or nothing yet."""
    return _of_kind(path, stat.S_ISDIR, "folder")


def file(path: Path) -> Path:
    """A regular file, or nothing yet: of a pipe or a device nobody would see an end."""
    return _of_kind(path, stat.S_ISREG, "regular file")


def socket(path: Path) -> Path:
    """A Unix socket, or nothing yet, whose path its address has room for."""
    if path.is_absolute() and len(os.fsencode(path)) > SOCKET_MOST:
        what = f"its path is longer than {SOCKET_MOST} bytes; use a shorter one"
        raise PydanticCustomError("gemctl", "{what}", {"what": what})
    return _of_kind(path, stat.S_ISSOCK, "socket")


def program(word: str) -> str:
    """A command: a name that is looked up on the path, or an absolute path of a program."""
    given(word)
    if "/" not in word:
        return word
    path = absolute(Path(word))
    mode = _mode(path)
    if mode is not None and not (stat.S_ISREG(mode) and os.access(path, os.X_OK)):
        raise wrong(word, "is no program that can be run; name one, or chmod +x it")
    return word


def command(words: tuple[str, ...]) -> tuple[str, ...]:
    """A program and its arguments; none: nothing is run."""
    for word in words:
        if not word.strip():
            raise wrong(word, "is an empty word; leave it out")
        if "\0" in word:
            raise wrong(word, "holds a NUL character; leave it out")
    if words:
        program(words[0])
    return words
