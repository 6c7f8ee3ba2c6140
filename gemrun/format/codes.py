"""Codes of a refused artifact: the numbers of `gemrun_status` in csrc/gemrun.h.

FormatError                 ValueError: a code, the object, and one sentence
"""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Why a file was refused. Values equal those of the engine and never change."""

    OK = 0
    OPEN = -20
    MAGIC = -21
    BYTE_ORDER = -22
    VERSION = -23
    HEADER_CRC = -24
    HEADER = -25
    SIZE = -26
    FEATURE = -27
    ABI = -28
    TABLE_CRC = -29
    TABLE = -30
    GAP = -31
    SIGNATURE = -32
    MISSING = -33
    SECTION_CRC = -34
    CONF = -35
    LAYR = -36
    SEGM = -37
    TENS = -38
    PLAN = -39
    ROPE = -40
    TOKN = -41
    TMPL = -42
    THRM = -43
    TEST = -44
    RAM = -45
    WEIGHTS_CRC = -46
    ROOT = -47
    SHA256 = -48
    MANIFEST = -49
    KVMK = -50
    PINP = -51


class FormatError(ValueError):
    """A file breaks a rule of csrc/FORMAT.md. Text: `<object>: <what is wrong>; <what to do>`."""

    def __init__(self, code: Code, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.code = code
