"""cores: how fast a core multiplies, as far as that was counted (benchmarks/arm_cores.md and
armv7_riscv_cores.md). Cycles are for one group of the weights: 16 rows x 32 inputs, 512 products.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

GROUP_MACS = 512  # products of a group
UNPACK = 12  # instructions a token of prefill for unpacking a group, which sixteen tokens share


@dataclass(frozen=True)
class Core:
    """Cycles of one core for a group. `q8` is 0 where only the 4-bit product was counted.

    `bytes_twice`: a tile of prefill takes a group of 8 bits in two products. `note` says which core
    was counted in place of this one.
    """

    instructions: int  # of the product of one token, 4 bits
    q4: int  # one token, 4 bits
    q8: int  # one token, 8 bits
    tile: int  # each of some tokens of prefill, 4 bits, unpacked already
    bytes_twice: bool = False
    note: str = ""

    def one(self, wide: bool) -> float:
        """Cycles of a group for one token; `wide`: of 8 bits."""
        return float((self.q8 or 1.5 * self.q4) if wide else self.q4)

    def each(self, wide: bool) -> float:
        """Cycles of a group for each token of a prefill step. Unpacking goes at the pace of the
        product of one token."""
        product = self.tile * (2 if wide and self.bytes_twice else 1)
        return product + UNPACK * self.q4 / self.instructions


A53 = Core(181, 200, 306, 227, bytes_twice=True)
A72 = Core(181, 85, 105, 84, bytes_twice=True)
A76 = Core(136, 54, 67, 35)
A7 = Core(287, 370, 0, 314, bytes_twice=True)

#: By (instruction set, core) of a hardware description.
CORES: Mapping[tuple[str, str], Core] = {
    ("aarch64", "cortex-a35"): A53,
    ("aarch64", "cortex-a53"): A53,
    ("aarch64", "cortex-a55"): Core(136, 138, 204, 100),
    ("aarch64", "cortex-a72"): A72,
    ("aarch64", "cortex-a76"): A76,
    ("aarch64", "cortex-a78ae"): A76,
    ("aarch64", "carmel"): replace(A72, note="carmel was not counted, a Cortex-A72 stands for it"),
    ("arm", "cortex-a7"): A7,
    ("arm", "cortex-a53"): replace(A7, note="counted for a Cortex-A7, which is no faster"),
    ("riscv64", "spacemit-x60"): Core(92, 137, 0, 55),
}


@dataclass(frozen=True)
class Most:
    """Products of a cycle that no core of a kind gets beyond."""

    integers: int
    floats: int


#: By instruction set, the first whose feature a board has ("" = any): lanes of its widest products,
#: in as many pipes as the widest cores of the kind have (general knowledge).
MOST: Mapping[str, tuple[tuple[str, Most], ...]] = {
    "aarch64": (
        ("i8mm", Most(4 * 32, 4 * 4)),
        ("dotprod", Most(4 * 16, 4 * 4)),
        ("", Most(2 * 8, 2 * 4)),  # up to Cortex-A73
    ),
    "arm": (
        ("mve", Most(8, 4)),  # Helium of Cortex-M55: half a vector a cycle
        ("neon", Most(2 * 8, 2 * 4)),
        ("", Most(2, 2)),  # Cortex-M7: a pair of 16 bits in one multiplier
    ),
    "riscv64": (("v", Most(2 * 64, 2 * 16)), ("", Most(2, 2))),
    "x86_64": (
        ("avx512f", Most(2 * 64, 2 * 16)),
        ("avx2", Most(2 * 32, 2 * 8)),
        ("", Most(2 * 16, 2 * 4)),
    ),
}


def most_a_cycle(arch: str, features: Collection[str]) -> Most:
    """What no core with these features gets beyond."""
    return next(most for feature, most in MOST[arch] if not feature or feature in features)
