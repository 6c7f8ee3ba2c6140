"""The C interface of libgemrun.so as text: calls, constants, and the layout of every struct.

    python tools/abi.py              print the tree's interface
    python tools/abi.py --write      as the record of a release, csrc/abi.txt
    python tools/abi.py --check      exit 1 where the tree breaks what the record promises

csrc/ABI.md has the rules. Layouts are asked of two compilers, for 64 bits and for 32: this
machine's and Armv7's (which runs nothing: sizes are read from an object's bytes).
"""

from __future__ import annotations

import argparse
import os
import re
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
RECORD = CSRC / "abi.txt"
COMPILERS = (os.environ.get("CC", "cc"), "arm-linux-gnueabihf-gcc")
MARK = b"gemrun-abi:"


@dataclass
class Interface:
    """What a program that was built against a header relies on. Numbers are (64 bits, 32 bits)."""

    abi: int = 0
    calls: dict[str, str] = field(default_factory=dict)  # name -> declaration
    callbacks: dict[str, str] = field(default_factory=dict)
    constants: dict[str, int] = field(default_factory=dict)
    structs: dict[str, tuple[int, int]] = field(default_factory=dict)  # sizes
    fields: dict[str, tuple[int, ...]] = field(default_factory=dict)  # offset, size, twice

    def lines(self) -> list[str]:
        """The record's form."""
        rows = [f"abi {self.abi}"]
        rows += [f"call {name}: {text}" for name, text in sorted(self.calls.items())]
        rows += [f"callback {name}: {text}" for name, text in sorted(self.callbacks.items())]
        rows += [f"constant {name}: {value}" for name, value in sorted(self.constants.items())]
        rows += [f"struct {name}: {_numbers(size)}" for name, size in sorted(self.structs.items())]
        rows += [f"field {name}: {_numbers(place)}" for name, place in self.fields.items()]
        return rows


def _numbers(values: tuple[int, ...]) -> str:
    return " ".join(map(str, values))


def parsed(text: str) -> Interface:
    """The reverse of Interface.lines; lines that begin with # are comments."""
    found = Interface()
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        kind, rest = line.split(" ", 1)
        name, _, value = rest.partition(": ")
        if kind == "abi":
            found.abi = int(rest)
        elif kind in ("call", "callback"):
            (found.calls if kind == "call" else found.callbacks)[name] = value
        elif kind == "constant":
            found.constants[name] = int(value)
        elif kind == "struct":
            first, second = map(int, value.split())
            found.structs[name] = (first, second)
        else:
            found.fields[name] = tuple(map(int, value.split()))
    return found


def header() -> str:
    """gemrun.h without comments and preprocessor lines."""
    text = (CSRC / "gemrun.h").read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return re.sub(r"^#.*$", "", text, flags=re.M)


def _flat(text: str) -> str:
    return " ".join(text.split())


def _fields_of(body: str) -> list[str]:
    """Names that a struct's body declares, arrays included."""
    names = []
    for declaration in body.split(";"):
        for part in _flat(declaration).split(","):
            found = re.search(r"(\w+)\s*(?:\[\w+\])?$", part.strip())
            if found:
                names.append(found[1])
    return names


def read_tree() -> Interface:
    """The interface of csrc/gemrun.h."""
    text = header()
    found = Interface()
    for declaration in re.findall(r"^GEMRUN_API\s+([^;]+);", text, re.M):
        flat = _flat(declaration)
        found.calls[re.search(r"(gemrun_\w+)\(", flat)[1]] = flat  # type: ignore[index]
    for flat in map(_flat, re.findall(r"^typedef\s+([^;{]+\(\*\w+\)[^;]+);", text, re.M)):
        found.callbacks[re.search(r"\(\*(\w+)\)", flat)[1]] = flat  # type: ignore[index]
    structs = {
        name: _fields_of(body)
        for body, name in re.findall(r"^typedef struct \w+ \{(.*?)\} (\w+);", text, re.M | re.S)
    }
    names = [
        name.split("=")[0].strip()
        for body in re.findall(r"enum\s*\w*\s*\{(.*?)\}", text, re.S)
        for name in body.split(",")
    ]
    wide, narrow = (_asked(compiler, names, structs) for compiler in COMPILERS)
    values, at = wide[1 : 1 + len(names)], 1 + len(names)
    found.abi, found.constants = wide[0], dict(zip(names, values, strict=True))
    for name, members in structs.items():
        found.structs[name] = (wide[at], narrow[at])
        at += 1
        for member in members:
            place = (*wide[at : at + 2], *narrow[at : at + 2])
            found.fields[f"{name}.{member}"] = place
            at += 2
    return found


def _asked(compiler: str, names: list[str], structs: dict[str, list[str]]) -> list[int]:
    """GEMRUN_ABI_VERSION, constants, sizes and places, read from the bytes of an object file."""
    wanted = ["GEMRUN_ABI_VERSION", *names]
    for name, members in structs.items():
        wanted.append(f"sizeof({name})")
        for member in members:
            wanted += [f"offsetof({name}, {member})", f"sizeof((({name} *)0)->{member})"]
    values = ",\n    ".join(f"(int32_t)({value})" for value in wanted)
    source = (
        '#include "gemrun.h"\n'
        f"const struct {{ char mark[{len(MARK) + 1}]; int32_t values[{len(wanted)}]; }}\n"
        "answer = {\n"
        f'    "{MARK.decode()}", {{\n    {values}}}}};\n'
    )
    with tempfile.TemporaryDirectory() as folder:
        path, made = Path(folder) / "ask.c", Path(folder) / "ask.o"
        path.write_text(source, encoding="utf-8")
        command = [compiler, "-std=c11", f"-I{CSRC}", "-c", str(path), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"abi: {compiler}: {done.stderr.strip() or 'failed'}")
        data = made.read_bytes()
    return list(struct.unpack_from(f"<{len(wanted)}i", data, data.index(MARK) + len(MARK) + 1))


def broken(old: Interface, new: Interface) -> list[str]:
    """What a program built against `old` would stumble over; empty within one ABI version."""
    if new.abi != old.abi:
        return []  # another soname; the old library stays beside the new one
    gone = {*old.calls, *old.callbacks} - {*new.calls, *new.callbacks}
    wrong = [f"{name}: gone" for name in sorted(gone)]
    both = [(old.calls, new.calls), (old.callbacks, new.callbacks)]
    for before, now in both:
        wrong += [
            f"{name}: was '{text}', is '{now[name]}'"
            for name, text in before.items()
            if name in now and now[name] != text
        ]
    for name, value in old.constants.items():
        if new.constants.get(name) != value:
            wrong.append(f"{name}: was {value}, is {new.constants.get(name, 'gone')}")
    for name, place in old.fields.items():
        now_at = new.fields.get(name)
        if now_at != place and not _reserved_shrank(name, place, now_at):
            wrong.append(f"{name}: was at {place}, is at {now_at or 'nothing'}")
    for name, sizes in old.structs.items():
        now_size = new.structs.get(name, (0, 0))
        if any(is_now < was for is_now, was in zip(now_size, sizes, strict=True)):
            wrong.append(f"{name}: had {sizes} bytes, has {now_size}")
    return wrong


def _reserved_shrank(name: str, was: tuple[int, ...], now: tuple[int, ...] | None) -> bool:
    """New fields may take the front of what was reserved."""
    if not name.endswith(".reserved") or now is None:
        return name.endswith(".reserved")
    ends = ((was[0] + was[1], now[0] + now[1]), (was[2] + was[3], now[2] + now[3]))
    return all(after == before for before, after in ends)


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    tree = read_tree()
    if given.check:
        wrong = broken(parsed(RECORD.read_text(encoding="utf-8")), tree)
        print("\n".join(wrong) or "abi: as promised")
        return 1 if wrong else 0
    source = (CSRC / "gemrun.h").read_text(encoding="utf-8")
    version = re.search(r'GEMRUN_VERSION "(.*)"', source)
    head = [
        f"# The interface of libgemrun.so.1 at release {version[1] if version else ''}; ABI.md.",
        "# Written by tools/abi.py. struct: bytes; field: offset, bytes; for 64 bits, then for 32.",
    ]
    text = "\n".join([*head, *tree.lines()]) + "\n"
    if given.write:
        RECORD.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
