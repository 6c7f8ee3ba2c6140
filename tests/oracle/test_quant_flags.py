"""The helper's results do not depend on how it was compiled."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "5f1d5f60e02bc0ed"  # of csrc/gm_*.c as they are; a change of the search changes artifacts


def built(compiler: str, flags: list[str], folder: Path) -> str:
    """Output of tests/c/test_gm.c with these flags."""
    program = folder / ("test_gm" + "".join(flags))
    sources = [str(p) for p in sorted((ROOT / "csrc").glob("gm_*.c"))]
    command = [compiler, "-std=c11", "-ffp-contract=off", "-pthread", *flags, f"-I{ROOT}/csrc"]
    command += [str(ROOT / "tests/c/test_gm.c"), *sources, "-o", str(program), "-lm"]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.parametrize("compiler", [c for c in ("gcc", "clang") if shutil.which(c)])
def test_digest_is_the_same_for_all_flags(compiler: str, tmp_path: Path) -> None:
    for flags in (["-O0"], ["-O3"]):
        assert built(compiler, flags, tmp_path) == f"test_gm: ok, digest {DIGEST}"
