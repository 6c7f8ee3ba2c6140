"""Token ids without a row in the vocabulary, in every table that holds one (CVE-2025-49847 and
its kin): an embedding row or a text piece would be read outside of its table.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from attacks.attacklib import Attempt, Code, edited, report, section

HEAD = 96  # bytes of TOKN's header


def tables(good: bytes) -> dict[str, int]:
    """Offsets of the tables inside TOKN that hold ids."""
    at = section(good, "TOKN")[0]
    head = struct.unpack_from("<24I", good, at)
    vocab, merges, nodes, stop = head[2], head[6], head[9], head[10]
    assert stop == 1
    place = {"merges": HEAD}
    steps = [8 * merges, 4 * (vocab + 1), 4 * -(-vocab // 32), vocab, vocab, head[5]]
    position = HEAD
    for size in steps:
        position += -(-size // 8) * 8
    place["byte_id"] = position
    place["nodes"] = position + 1024
    place["stop"] = position + 1024 + 8 * nodes + -(-(nodes - 1) // 8) * 8
    return place


def attack(good: bytes) -> Iterator[Attempt]:
    """Tokenizer, template and test vectors."""
    place, vocab = tables(good), struct.unpack_from("<I", good, section(good, "TOKN")[0] + 8)[0]
    for value in (vocab, 2**20, 2**31, 2**32 - 2):
        for what, at in (("bos", 12), ("unk", 16), ("byte token", place["byte_id"])):
            image = edited(good, "TOKN", at, "I", value)
            yield Attempt(f"{what} {value}", image, Code.TOKN)
        image = edited(good, "TOKN", place["stop"], "I", value)
        yield Attempt(f"stop id {value}", image, Code.TOKN)
        image = edited(good, "TOKN", place["nodes"] + 12, "I", value)
        yield Attempt(f"added token {value}", image, Code.TOKN)
        yield Attempt(f"template token {value}", edited(good, "TMPL", 64, "I", value), Code.TMPL)
        yield Attempt(f"prompt id {value}", edited(good, "TEST", 16, "I", value), Code.TEST)
        yield Attempt(f"step id {value}", edited(good, "TEST", 1616, "I", value), Code.TEST)
    for right, new in ((vocab, 1), (2**20 - 1, 1), (1, vocab), (1, 2**20 - 1)):
        image = edited(good, "TOKN", place["merges"], "Q", right << 44 | new << 24)
        yield Attempt(f"merge with {right} into {new}", image, Code.TOKN)
    image = edited(good, "TOKN", place["merges"], "Q", 1 << 44 | (vocab - 1) << 24)
    yield Attempt("a merge that grows into a control token", image, Code.TOKN)


if __name__ == "__main__":
    report(attack)
