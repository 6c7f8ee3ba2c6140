"""gr_sample.c against a sampler that sorts everything, on logits with many ties."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from reference import build, sampler
from reference.floatmath import F32
from reference.sampler import Settings

# The sampler and its needs.
CORE = (
    "sample",
    "adjust",
    "math",
    "tok",
    "tok_open",
    "tok_check",
    "open",
    "size",
    "crc",
    "chat",
    "pin",
    "kv",
    "kv_fill",
)

SHIM = """
#include "gr_internal.h"
int32_t t_sample(float *logits, uint32_t rows, const uint8_t *flags, uint32_t *context,
                 uint32_t used, uint32_t *scratch, const float *set, uint32_t top_k,
                 const uint32_t *banned, uint32_t banned_count, const uint32_t *bias_ids,
                 const float *bias, uint32_t bias_count, gr_rng *rng)
{
    static gr_engine e;
    struct gb_tokn tokn = {0};
    gemrun_request q = {0};
    uint32_t id = 0;
    tokn.vocab = rows;
    e.v.tok.h = &tokn;
    e.v.tok.flags = flags;
    e.v.conf.vocab_rows = rows;
    e.pos = used;
    e.buf[GB_BUF_LOGITS] = (uint8_t *)logits;
    e.buf[GB_BUF_IDS] = (uint8_t *)context;
    e.buf[GB_BUF_CAND] = (uint8_t *)scratch;
    e.buf[GB_BUF_SEEN] = (uint8_t *)(scratch + rows);
    q.temperature = set[0], q.top_p = set[1], q.min_p = set[2], q.repetition_penalty = set[3];
    q.top_k = top_k;
    q.banned = banned, q.banned_count = banned_count;
    q.bias_ids = bias_ids, q.bias_values = bias, q.bias_count = bias_count;
    gemrun_status st = gr_sample(&e, &q, rng, &id);
    return st < 0 ? (int32_t)st : (int32_t)id;
}
void t_seed(gr_rng *rng, uint64_t seed) { gr_rng_seed(rng, seed); }
"""
DEFAULT = Settings()
SETTINGS = {
    "default": DEFAULT,
    "greedy": Settings(temperature=0),
    "all": Settings(temperature=1.0, top_k=0, top_p=1.0),
    "hot": Settings(temperature=100.0, top_k=0, top_p=0.99),
    "cold": Settings(temperature=0.01),
    "top-k-1": Settings(temperature=2.0, top_k=1, top_p=1.0),
    "top-k-above-rows": Settings(temperature=2.0, top_k=5000, top_p=0.5),
    "min-p": Settings(temperature=1.5, top_k=0, top_p=1.0, min_p=0.2),
    "both": Settings(temperature=1.5, top_k=30, top_p=0.7, min_p=0.05),
    "penalty": replace(DEFAULT, temperature=1.0, repetition_penalty=1.7),
    "reward": replace(DEFAULT, temperature=1.0, repetition_penalty=0.6),
    "banned": replace(DEFAULT, banned=(0, 3, 5, 40)),
    "bias": replace(DEFAULT, temperature=1.0, bias={1: 4.0, 7: -3.5, 20: 0.25}),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, root: Path) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("sampler")
    source, target, csrc = folder / "shim.c", folder / "shim.so", root / "csrc"
    source.write_text(SHIM)
    core = [str(csrc / f"gr_{name}.c") for name in CORE]
    flags = [*build.FLAGS, "-DGR_BASE_ONLY", "-fPIC", "-shared", f"-I{csrc}"]
    command = ["cc", *flags, str(source), *core, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


class Native:
    """gr_sample with one generator."""

    def __init__(self, library: ctypes.CDLL, seed: int) -> None:
        self.library = library
        self.rng = np.zeros(2, np.uint64)
        library.t_seed(self._pointer(self.rng), ctypes.c_uint64(seed))

    @staticmethod
    def _pointer(array: npt.NDArray[Any]) -> ctypes.c_void_p:
        return array.ctypes.data_as(ctypes.c_void_p)

    def sample(
        self, logits: F32, settings: Settings, context: Sequence[int], flags: Sequence[int]
    ) -> int:
        rows = logits.size
        work = logits.copy()
        scratch = np.zeros(rows + rows // 32 + 1, np.uint32)
        numbers = np.array(
            [settings.temperature, settings.top_p, settings.min_p, settings.repetition_penalty],
            np.float32,
        )
        used = np.array(context, np.uint32)
        banned = np.array(settings.banned, np.uint32)
        ids = np.array(list(settings.bias), np.uint32)
        values = np.array(list(settings.bias.values()), np.float32)
        kinds = np.array(flags, np.uint8)
        p, u = self._pointer, ctypes.c_uint32
        return int(
            self.library.t_sample(
                p(work), u(rows), p(kinds), p(used), u(used.size), p(scratch), p(numbers),
                u(settings.top_k), p(banned), u(banned.size), p(ids), p(values), u(ids.size),
                p(self.rng),
            )
        )  # fmt: skip


def draw_logits(rng: np.random.Generator, rows: int) -> F32:
    """Coarse steps, so that many rows are equal; sometimes one far above the rest."""
    spread = rng.choice([0.5, 3.0, 20.0])
    logits = np.round(rng.standard_normal(rows) * spread * 4) / 4
    if rng.random() < 0.2:
        logits[rng.integers(rows)] += 40
    row: F32 = logits.astype(np.float32)
    return row


@pytest.mark.parametrize("name", sorted(SETTINGS))
@pytest.mark.parametrize("rows", [41, 512, 3000])
def test_choice_equals_that_of_the_sorting_sampler(
    library: ctypes.CDLL, name: str, rows: int
) -> None:
    rng = np.random.default_rng(rows)
    native, random = Native(library, 12345), sampler.Pcg32(12345)
    flags = np.where(rng.random(rows) < 0.1, sampler.TOKEN_UNUSED, 0).astype(np.uint8)
    flags[:10] = 0
    unused = {int(i) for i in np.flatnonzero(flags & sampler.TOKEN_UNUSED)}
    for step in range(60):
        logits = draw_logits(rng, rows)
        context = rng.integers(0, rows, step).tolist()
        want = sampler.sample(logits, SETTINGS[name], random, context, unused)
        got = native.sample(logits, SETTINGS[name], context, flags.tolist())
        assert got == want, step
    if name != "greedy":
        assert int(native.rng[0]) == random.state, "one draw a token"


def test_generator_is_pcg32() -> None:
    """The first words of the default stream for seed 42, by the definition in 64-bit integers."""
    state, inc = 0, sampler.STREAM
    state = (state * sampler.MULTIPLIER + inc) & sampler.MASK
    state = (state + 42) & sampler.MASK
    state = (state * sampler.MULTIPLIER + inc) & sampler.MASK
    assert sampler.Pcg32(42).state == state


def test_greedy_tie_goes_to_the_lowest_id(library: ctypes.CDLL) -> None:
    logits = np.zeros(64, np.float32)
    logits[[9, 20, 63]] = 2
    native = Native(library, 1)
    assert native.sample(logits, SETTINGS["greedy"], [], [0] * 64) == 9
    assert native.sample(logits, SETTINGS["top-k-1"], [], [0] * 64) == 9
