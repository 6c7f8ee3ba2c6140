"""Offsets that lead out of the file or of the arena (O4; CVE-2026-7482: memory of the process
leaks, or is overwritten, through a tensor or buffer that lies elsewhere).
"""

from __future__ import annotations

from collections.abc import Iterator

from attacks.attacklib import Attempt, Code, edited, entry_edited, header_edited, report, section

FAR = (2**63, 2**64 - 256, 2**40, 0)


def attack(good: bytes) -> Iterator[Attempt]:
    """Tensors, sections, RoPE tables, rings, buffers."""
    whot, size = section(good, "WHOT")
    for value in (*FAR, whot + size, whot - 256):
        image = edited(good, "TENS", 96 + 48, "Q", value)
        yield Attempt(f"tensor at {value:#x}", image, Code.TENS)
    head = 96 * 25
    for value in (*FAR, whot):
        image = edited(good, "TENS", head + 64, "Q", value)
        yield Attempt(f"low plane at {value:#x}", image, Code.TENS)
    for value in FAR:
        image = entry_edited(good, "TOKN", 8, "Q", value)
        yield Attempt(f"section at {value:#x}", image, Code.TABLE)
        image = edited(good, "ROPE", 8, "Q", value)
        yield Attempt(f"RoPE table at {value:#x}", image, Code.ROPE)
    for value in (2**63, 2**64 - 64, 2**40):
        image = edited(good, "PLAN", 16, "Q", value)
        yield Attempt(f"buffer at {value:#x}", image, Code.PLAN)
    image = edited(good, "LAYR", 56, "Q", 2**40)
    yield Attempt("KV ring at 1 TiB", image, Code.LAYR)
    image = header_edited(good, 72, "Q", 4096)
    yield Attempt("arena declared smaller than its buffers", image, Code.RAM)
    image = header_edited(good, 80, "Q", 4096)
    yield Attempt("KV declared smaller than its rings", image, Code.RAM)


if __name__ == "__main__":
    report(attack)
