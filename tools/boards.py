"""Write what a device tree calls the boards of hdf/: csrc/gs_boards.h for gemrun_check_board, and
gemctl/board/known.py for the daemon.

    python tools/boards.py            writes them
    python tools/boards.py --check    ends with 1 if they are not what hdf/ says
"""

from __future__ import annotations

import sys
from pathlib import Path

from gemmake.hdf import Hdf, load_hdf

ROOT = Path(__file__).resolve().parent.parent
ISA = {
    "x86_64": "GB_ISA_X86_64",
    "aarch64": "GB_ISA_AARCH64",
    "arm": "GB_ISA_ARMV7",
    "riscv64": "GB_ISA_RISCV64",
}
C_HEAD = """\
/* gs_boards.h: names of a device tree and the board that each stands for, of hdf/. Made by
 * tools/boards.py; do not change it by hand. */
#ifndef GS_BOARDS_H
#define GS_BOARDS_H

#include "gembin.h"

static const struct {
    const char *compatible, *id;
    unsigned isa;
} gs_boards[] = {
"""
PYTHON_HEAD = '''\
"""Names of a device tree, and the board (id, arch) that each stands for, of hdf/. Made by
tools/boards.py; do not change it by hand."""

from __future__ import annotations

BOARDS: dict[str, tuple[str, str]] = {
'''


def table() -> dict[str, Hdf]:
    """Name -> board; where several boards have it, the one that is called as its file."""
    found: dict[str, Hdf] = {}
    for path in sorted((ROOT / "hdf").glob("*.toml")):
        board = load_hdf(path)
        for name in board.compatible:
            if name not in found or board.id == path.stem:
                found[name] = board
    return dict(sorted(found.items()))


def files() -> dict[Path, str]:
    """Both files as hdf/ says them."""
    boards = table().items()
    c = "".join(f'    {{"{n}", "{b.id}", {ISA[b.target.arch]}}},\n' for n, b in boards)
    python = "".join(f'    "{n}": ("{b.id}", "{b.target.arch}"),\n' for n, b in boards)
    return {
        ROOT / "csrc" / "gs_boards.h": f"{C_HEAD}{c}}};\n\n#endif\n",
        ROOT / "gemctl" / "board" / "known.py": f"{PYTHON_HEAD}{python}}}\n",
    }


def main() -> int:
    """Write or compare."""
    if "--check" in sys.argv[1:]:
        return int(any(path.read_text(encoding="utf-8") != text for path, text in files().items()))
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
