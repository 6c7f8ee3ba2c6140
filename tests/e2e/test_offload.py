"""Weights that do not all stay in memory: same bits, no more memory than declared, refused below.

The models are tiny ones made wider, so that their matrices are many pages.
"""

from __future__ import annotations

import os
import random
import re
import resource
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import compiling
import groups
from fuzz.mutate import find, reseal, section_range
from gemmake import figures, report
from gemmake.advise import Fit, Wish, advise
from gemmake.errors import BudgetError
from gemmake.options import Effort, Offload, Profile, Quantization
from gemrun.context import GemRunContext
from gemrun.errors import GemRunError
from gemrun.format import cold, sizes, units
from gemrun.format.reader import read_artifact
from gemrun.format.sizes import GROUP_UNIT
from gemrun.format.spec import ColdBy, SectionFlag
from gemrun.handle import GemRunHandle
from gemrun.memory import measure
from locking import limited, unprivileged

#: Tiny families made wider: a tied table and a sandwich block, two tables and biases; `tall` has so
#: many tokens that reading rows of its table leaves some of it out of memory.
WIDE = {"hidden_size": 256, "intermediate_size": 2048, "vocab_size": 8192, "num_hidden_layers": 4}
SLIDING = ["full_attention", "sliding_attention"]
SIZES: dict[str, tuple[str, dict[str, object]]] = {
    "gemma3": ("gemma3", WIDE | {"layer_types": SLIDING * 2}),
    "qwen2": ("qwen2", WIDE | {"tie_word_embeddings": False}),
    "tall": (
        "gemma3",
        WIDE | {"vocab_size": 131072, "num_hidden_layers": 2, "layer_types": SLIDING},
    ),
}
MIB = 1 << 20
STREAMED = (Offload.FFN, Offload.ALL)
LEVELS = {
    "gemma3": (Offload.NONE, *STREAMED),
    "qwen2": (Offload.NONE, *STREAMED),
    "tall": (Offload.NONE, Offload.ROWS, *STREAMED),
}
CASES = [
    ("gemma3", Offload.FFN),
    ("gemma3", Offload.ALL),
    ("qwen2", Offload.FFN),
    ("qwen2", Offload.ALL),
    ("tall", Offload.ROWS),
    ("tall", Offload.ALL),
]
#: From the best 64, which a head in two planes screens, and from all.
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 8, "seed": 3, "ignore_stop_ids": True},
    {"max_tokens": 4, "seed": 3, "top_k": 0, "ignore_stop_ids": True},
)
Made = Callable[[str, Offload], Path]


@pytest.fixture(scope="module")
def wide(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Wider checkpoints of the tiny families."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            base, changes = SIZES[family]
            target = tmp_path_factory.mktemp(family) / "wide"
            made[family] = compiling.resized(tiny_checkpoint(base), target, **changes)
        return made[family]

    return make


@pytest.fixture(scope="module")
def artifact(wide: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Made:
    made: dict[tuple[str, Offload], Path] = {}

    def make(family: str, level: Offload) -> Path:
        if (family, level) not in made:
            path = tmp_path_factory.mktemp("offload") / f"{family}-{level.value}.gembin"
            compiling.compiled(
                wide(family), path, offload=level, effort=Effort.FAST, chunk=32, run_threads=2
            )
            made[family, level] = path
        return made[family, level]

    return make


@pytest.mark.parametrize("family", SIZES)
def test_the_weights_and_the_test_vectors_are_those_of_the_resident_artifact(
    artifact: Made, family: str
) -> None:
    wanted = [compiling.section(artifact(family, Offload.NONE), n) for n in ("WHOT", "TEST")]
    held = []
    for level in LEVELS[family]:
        path = artifact(family, level)
        assert [compiling.section(path, n) for n in ("WHOT", "TEST")] == wanted
        assert compiling.problems(path) == []
        with read_artifact(path) as content:
            weights = content.sections["WHOT"]
            away = bool(weights.flags & SectionFlag.COLD)
            assert away == bool(content.cold) == (level is not Offload.NONE)
            assert content.header.engine_abi_min == (3 if away else 2)
            assert (weights.mem_size < weights.size) == away
            held.append(weights.mem_size)
            by_rows = sum(r.by == ColdBy.ROWS for r in content.cold)
            assert by_rows == (0 if not away else 3 if family == "qwen2" else 1)
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == len(held)


def test_rows_that_would_save_nothing_stay(wide: Callable[[str], Path], tmp_path: Path) -> None:
    made = {}
    for level in (Offload.NONE, Offload.ROWS):
        path = tmp_path / f"{level.value}.gembin"
        result = compiling.compiled(wide("gemma3"), path, offload=level, effort=Effort.FAST)
        with read_artifact(path) as content:
            assert content.cold == ()
            made[level] = content.header.ram_total
        told = "all weights stay in memory" in report.render_result(result)
        assert told == (level is Offload.ROWS)
    assert made[Offload.NONE] == made[Offload.ROWS]


@pytest.mark.parametrize(("family", "level"), CASES)
def test_streamed_runs_give_the_same_bits(artifact: Made, family: str, level: Offload) -> None:
    """Whatever the threads, chunks and kernels, greedy and sampled, whole head or screened."""
    ids = compiling.IDS[:40]
    with GemRunContext(artifact(family, Offload.NONE), threads=1) as context:
        digest = context.test_vector(ids, 4)
        wanted = [context.infer("The motor", **sampling) for sampling in SAMPLINGS]
    for threads, chunk, kernel in ((1, 32, "scalar"), (3, 7, None), (2, 32, None)):
        config = {"threads": threads, "prefill_batch_size": chunk}
        named = {} if kernel is None else {"kernel": kernel}
        with GemRunContext(artifact(family, level), **config, **named) as context:  # type: ignore[arg-type]
            assert context.test_vector(ids, 4) == digest
            assert [context.infer("The motor", **sampling) for sampling in SAMPLINGS] == wanted


def test_sessions_share_what_passes_through(artifact: Made) -> None:
    with GemRunContext(artifact("gemma3", Offload.NONE)) as context:
        wanted = context.infer("The motor", max_tokens=8, temperature=0, ignore_stop_ids=True)
    with GemRunContext(artifact("gemma3", Offload.ALL)) as model, model.session() as session:
        for each in (session, model, session):
            got = each.infer("The motor", max_tokens=8, temperature=0, ignore_stop_ids=True)
            assert got == wanted


@pytest.mark.parametrize(("family", "level"), [*CASES, ("gemma3", Offload.NONE)])
def test_no_more_is_in_memory_than_declared(artifact: Made, family: str, level: Offload) -> None:
    path = artifact(family, level)
    with GemRunContext(path, threads=2) as context:
        for step in range(3):
            context.prefill(compiling.IDS[: 20 + step])
            context.decode(context.sample(temperature=0))
            found = measure(context, path)
            assert found.problem is None
            assert found.passing == (level is not Offload.NONE)
            context.reset_kv_cache()


def test_the_peak_of_a_process_is_what_the_declaration_says(
    artifact: Made, gemrun_cli: Path
) -> None:
    """The high-water mark of whole processes: what they take less is what is declared less."""
    peaks, declared = [], []
    for level in (Offload.NONE, Offload.ALL):
        path = artifact("tall", level)
        with read_artifact(path) as content:
            declared.append(content.header.ram_total)
        peaks.append(_peak([gemrun_cli, path, "--run-tests", "--threads", "2"]))
    saved = declared[0] - declared[1]
    assert saved > 8 * MIB
    assert peaks[0] - peaks[1] >= 0.9 * saved


def _peak(command: Sequence[str | Path]) -> int:
    """Bytes that a command had in memory at most."""
    code = (
        "import resource, subprocess, sys; "
        "done = subprocess.run(sys.argv[1:], capture_output=True); "
        "print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, *command], capture_output=True, text=True, check=True
    )
    status, peak = done.stdout.split()
    assert status == "0"
    return int(peak) * 1024


def test_memory_ignored_means_nothing_is_given_back(artifact: Made) -> None:
    """As the compiler opens it: what was read once stays, as there is room."""
    path = artifact("gemma3", Offload.ALL)
    with GemRunContext(path, threads=1, ignore_memory=True) as context:
        context.infer("The motor", max_tokens=4, top_k=0, seed=1, ignore_stop_ids=True)
        whole = measure(context, path)
    with GemRunContext(path, threads=1) as context:
        context.infer("The motor", max_tokens=4, top_k=0, seed=1, ignore_stop_ids=True)
        streamed = measure(context, path)
    assert whole.resident - streamed.resident > MIB


def test_new_units_keep_what_is_cold(artifact: Made, tmp_path: Path) -> None:
    source = artifact("gemma3", Offload.FFN)
    with read_artifact(source) as content:
        keeps = [(0, 0)] * sum(layer.kv_heads for layer in content.layers)
        before, held = content.cold, content.sections["WHOT"].mem_size
    units.with_units(source, tmp_path / "again.gembin", keeps)
    with read_artifact(tmp_path / "again.gembin") as content:
        assert content.cold == before
        assert content.sections["WHOT"].mem_size == held
        assert cold.problem(content.cold, content.tensors) == ""


def test_the_listing_and_gemcheck_say_what_passes_through(artifact: Made) -> None:
    path = artifact("gemma3", Offload.FFN)
    listing = Path(f"{path}.memmap").read_text(encoding="utf-8")
    assert re.search(r"bytes of weights at once of \d+ and", listing.splitlines()[1])
    assert listing.count("gate_up, streamed") == 4
    assert listing.count("head, by rows") == 1
    done = subprocess.run(
        [sys.executable, "-m", "gemmake.check.cli", path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"Weights: \S+ MiB of \S+ MiB are in memory at once; \S+ MiB are", done.stdout)


# ---- memory that is locked ----
LOCKING = """
import sys, warnings
from gemrun import GemRunContext
warnings.simplefilter("error")
with GemRunContext(sys.argv[1], lock_memory=True, **eval(sys.argv[2])) as ctx:
    print(ctx.stats().locked_bytes)
"""


def _kept(path: Path) -> int:
    """Bytes that are to be locked: all but the cold pages and the stacks."""
    with read_artifact(path) as content:
        h = content.header
        away = sum(plane.pages for plane in cold.planes(content.cold, content.tensors))
        return h.file_size - away + h.ram_arena + h.ram_kv + h.ram_engine


@pytest.mark.parametrize("level", [Offload.NONE, Offload.ALL])
def test_what_passes_through_is_not_to_be_locked(
    artifact: Made, gemrun_cli: Path, level: Offload
) -> None:
    """The limit counts for what is kept: it is enough, or both figures are told."""
    path = artifact("tall", level)
    kept = _kept(path)
    enough = -(-kept // 1024) + 256
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if resource.RLIM_INFINITY != most < enough * 1024:
        pytest.skip(f"no more than {most} bytes may be locked here, {kept} are needed")
    run = ["--threads", "1", "--prompt", "a", "--max-tokens", "1", "--lock-memory", "--json"]

    def locked(kib: int, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            unprivileged(gemrun_cli, path, *run, *more), capture_output=True, text=True,
            check=True, preexec_fn=limited(kib),
        )  # fmt: skip

    done = locked(enough)
    assert done.stderr == ""
    assert f'"locked_bytes": {kept}, ' in done.stdout
    done = locked(64)
    mb, limit = f"{kept * 1e-6:.1f}", f"{65536e-6:.1f}"
    told = rf"warning: \d+\.\d of {mb} MB are locked, RLIMIT_MEMLOCK is {limit} MB; raise it"
    assert re.search(told, done.stderr)
    done = locked(enough, "--ignore-memory")
    told = f"of {mb} MB are locked, --ignore-memory keeps no weights that pass through; leave it"
    assert (told in done.stderr) == (level is not Offload.NONE)
    command = unprivileged(sys.executable, "-c", LOCKING, path, "{'threads': 1}")
    done = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=limited(enough), cwd=compiling.ROOT
    )
    assert (done.stdout, done.stderr) == (f"{kept}\n", "")
    done = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=limited(64), cwd=compiling.ROOT
    )
    assert f" of {kept} bytes are locked, RLIMIT_MEMLOCK is 65536 bytes; raise it" in done.stderr


# ---- damage ----
@pytest.mark.parametrize("level", [Offload.NONE, Offload.FFN])
@pytest.mark.parametrize("change", [-4096, 4096, -(1 << 62)])
def test_a_forged_size_of_what_is_held_is_refused(
    artifact: Made, gemrun_cli: Path, tmp_path: Path, level: Offload, change: int
) -> None:
    """Every total agrees with it, and the records of COLD do not; without those all is held."""
    image = bytearray(artifact("gemma3", level).read_bytes())
    entry = find(image, "WHOT")
    flags, size, held = *struct.unpack_from("<I", image, entry + 4), *_sizes(image, entry)
    forged = max(held + change, 0)
    if forged > size:
        pytest.skip("the table refuses it: no more is held than there is")
    struct.pack_into("<I", image, entry + 4, flags | SectionFlag.COLD)
    struct.pack_into("<Q", image, entry + 24, forged)
    less = _up(held) - _up(forged)
    for at in (64, 88):  # ram_weights, ram_total
        struct.pack_into("<Q", image, at, struct.unpack_from("<Q", image, at)[0] - less)
    path = tmp_path / "forged.gembin"
    path.write_bytes(reseal(image, sections=False))
    assert any("bytes of weights in memory" in line for line in compiling.problems(path))
    told = (
        "the memory figures disagree with the records "
        f"(wanted {held} bytes, found {forged} byte{'s' * (forged != 1)}); rebuild the file"
    )
    done = subprocess.run([gemrun_cli, path, "--info"], capture_output=True, text=True)
    assert done.returncode == 6
    assert done.stderr.startswith("Model load failed: Memory layout mismatch: ")
    assert told in done.stderr
    done = subprocess.run([gemrun_cli, "--doctor", path], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"bad     artifact    {path}: {told}\n" in done.stdout
    for opened in (GemRunContext, GemRunHandle):
        with pytest.raises(GemRunError, match="the memory figures disagree"):
            opened(path)


def _sizes(image: bytearray, entry: int) -> tuple[int, int]:
    size, held = struct.unpack_from("<QQ", image, entry + 16)
    return int(size), int(held)


def _up(size: int) -> int:
    return -(-size // 4096) * 4096


def _with_records(source: Path, target: Path, raw: bytes) -> Path:
    """The artifact with other bytes in COLD, sealed again."""
    image = bytearray(source.read_bytes())
    place = section_range(image, find(image, "COLD"))
    assert place is not None
    assert place[1] == len(raw)
    image[place[0] : place[0] + place[1]] = raw
    target.write_bytes(reseal(image))
    return target


@pytest.mark.parametrize(
    ("at", "value"), [(0, 999), (4, 2), (8, 2), (12, 1), (8, int(ColdBy.ROWS)), (16, 0)]
)
def test_records_that_name_what_cannot_be_cold_are_refused_by_who_follows_them(
    artifact: Made, tmp_path: Path, at: int, value: int
) -> None:
    """A number changed: tensor, plane, `by`, reserved; rows of a block; the order."""
    source = artifact("gemma3", Offload.FFN)
    raw = bytearray(compiling.section(source, "COLD"))
    skip = 16 if at != 16 else 0  # the first record is the table's low plane
    struct.pack_into("<I", raw, skip + at, value)
    path = _with_records(source, tmp_path / "damaged.gembin", bytes(raw))
    with read_artifact(path) as content:
        assert cold.problem(content.cold, content.tensors)
    assert any("section COLD" in line for line in compiling.problems(path))
    with pytest.raises(GemRunError, match="section COLD names what cannot be cold"):
        GemRunContext(path)
    wanted = GemRunContext(source).test_vector(compiling.IDS[:4], 1)
    assert GemRunContext(path, ignore_memory=True).test_vector(compiling.IDS[:4], 1) == wanted


def test_random_damage_of_the_records_is_refused_or_changes_nothing(
    artifact: Made, tmp_path: Path
) -> None:
    source, rng = artifact("gemma3", Offload.ALL), random.Random(5)
    good = compiling.section(source, "COLD")
    wanted = GemRunContext(source).test_vector(compiling.IDS[:8], 1)
    opened = 0
    for case in range(60):
        raw = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            raw[4 * rng.randrange(len(raw) // 4)] = rng.choice((0, 1, 2, rng.randrange(256)))
        path = _with_records(source, tmp_path / f"{case % 2}.gembin", bytes(raw))
        with read_artifact(path) as content:
            right = not cold.problem(content.cold, content.tensors)
        if not right:
            with pytest.raises(GemRunError, match="section COLD"):
                GemRunContext(path)
            continue
        with GemRunContext(path) as context:
            assert context.test_vector(compiling.IDS[:8], 1) == wanted
        opened += 1
    assert 0 < opened < 60


# ---- the budget of a board ----
STORAGE = '[storage]\nkind = "emmc"\nseq_read_mbps = 100\n'


def test_auto_streams_no_more_than_the_budget_asks_for(
    wide: Callable[[str], Path], tmp_path: Path
) -> None:
    found = {}
    for mib in (64, 5, 4):
        path = tmp_path / f"{mib}.gembin"
        target = compiling.board(tmp_path, mib, STORAGE)
        compiling.compiled(wide("gemma3"), path, target=target, effort=Effort.FAST, chunk=16)
        with read_artifact(path) as content:
            assert content.header.ram_total <= mib * MIB
            found[mib] = cold.streamed(content.cold, content.tensors)
            assert mib < 64 or not content.cold
        assert compiling.problems(path) == []
    assert 0 == found[64] < found[5] < found[4]


@pytest.mark.parametrize("mib", [5, 4])
def test_advise_plans_what_auto_streams(
    wide: Callable[[str], Path], tmp_path: Path, mib: int
) -> None:
    """A model that gemmake fits into the budget by itself fits, and what that costs is told."""
    target, path = compiling.board(tmp_path, mib, STORAGE), tmp_path / "x.gembin"
    asked = Wish(target, longest_input=64, answer=64, effort=Effort.FAST)
    (row,) = advise([str(wide("gemma3"))], asked).rows
    assert (row.fit, row.reasons, row.remedies) == (Fit.YES, (), ())
    compiling.compiled(wide("gemma3"), path, target=target, effort=Effort.FAST, context=128)
    with read_artifact(path) as content:
        assert row.memory is not None
        assert row.memory.total == row.most == content.header.ram_total
        streamed = cold.streamed(content.cold, content.tensors)
    assert f"{figures.mib(streamed, 1)} are read from storage for every token" in row.offload[0]
    assert row.prediction is not None
    assert row.prediction.decode is not None
    assert row.prediction.decode.limit == "storage"


def test_without_a_description_of_storage_the_choice_is_the_users(
    wide: Callable[[str], Path], tmp_path: Path
) -> None:
    """A table of what takes what, what every option leads to, and a command that works."""
    target, path = compiling.board(tmp_path, 5), tmp_path / "o.gembin"
    with pytest.raises(BudgetError) as caught:
        compiling.compiled(wide("gemma3"), path, target=target, effort=Effort.FAST)
    text = str(caught.value)
    for option in ("--offload rows", "--offload ffn", "--offload all", "--profile lite"):
        assert f"with {option}:" in text
    compiling.keeps_its_promise(caught.value, path, 5)


def test_the_lite_profile(wide: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "lite.gembin"
    command = [
        *(sys.executable, "-m", "gemmake.cli", "--model", str(wide("tall")), "--output", path),
        *("--target", "meter-256mb", "--profile", "lite", "--effort", "fast"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=compiling.ROOT)
    assert done.returncode == 0, done.stderr
    assert "offload: " in done.stdout
    with read_artifact(path) as content:
        assert (content.conf.context, content.conf.chunk) == (512, 32)
        assert [r.by for r in content.cold] == [ColdBy.ROWS]
        assert content.manifest["options"]["profile"] == Profile.LITE.value
    assert compiling.problems(path) == []


def test_a_full_search_goes_with_the_lite_profile(
    wide: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whose own runs over the text have a cache in float, and all weights in memory."""
    found = []
    for profile in Profile:
        path = tmp_path / f"{profile.value}.gembin"
        compiling.compiled(
            wide("gemma3"), path, profile=profile, effort=Effort.FULL, context=64, chunk=16
        )
        found.append(compiling.section(path, "WHOT"))
    assert found[0] == found[1]


def test_float_weights_can_be_streamed_too(wide: Callable[[str], Path], tmp_path: Path) -> None:
    made = []
    for level in (Offload.NONE, Offload.ALL):
        path = tmp_path / f"{level.value}.gembin"
        compiling.compiled(
            wide("qwen2"), path, quantization=Quantization.NONE, offload=level, chunk=16
        )
        with GemRunContext(path) as context:
            made.append(context.test_vector(compiling.IDS[:40], 4))
            assert measure(context, path).problem is None
    assert made[0] == made[1]


# ---- a group with a memory limit ----
#: Pages that the kernel charges to a group at once, for a processor that may not use them yet.
CHARGED = 64


@pytest.fixture
def one_processor() -> Iterator[None]:
    """What is started runs on one processor: others hold no charged pages of its group."""
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usual)})
    yield
    os.sched_setaffinity(0, usual)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("level", [Offload.NONE, Offload.ALL])
def test_the_limit_for_a_control_group_works_and_less_is_refused(
    wide: Callable[[str], Path], tmp_path: Path, gemrun_cli: Path, level: Offload, threads: int
) -> None:
    """The figure that a compile tells, as it stands. The total is so large that 2 % of it are more
    than what the process takes."""
    with groups.memory_group() as group:
        if group is None:
            pytest.skip("no control group with a memory limit can be made here")
    path = tmp_path / "x.gembin"
    options = {"effort": Effort.FAST, "run_threads": threads, "context": 98304}
    result = compiling.compiled(wide("gemma3"), path, offload=level, **options)
    limit = result.memory.group_limit
    assert f"limit for a control group: {limit} bytes (memory.max" in report.render_result(result)
    assert result.memory.total == _total(path) < limit
    assert limit % resource.getpagesize() == 0
    command = [gemrun_cli, path, "--run-tests", "--threads", str(threads)]
    for _ in range(3):
        groups.drop(path)
        with groups.memory_group(limit) as group:
            assert group is not None
            done = group.run(command)
            assert (done.returncode, group.killed) == (0, 0), done.stderr
            doctor = group.run([gemrun_cli, "--doctor", path, "--threads", str(threads)])
            assert "bytes are available" not in doctor.stdout
    with groups.memory_group(limit * 98 // 100 // GROUP_UNIT * GROUP_UNIT) as group:
        assert group is not None
        done = group.run(command)
        assert (done.returncode, group.killed) == (5, 0)
        assert "Memory layout mismatch" in done.stderr
        assert f"raise its limit to {limit})" in done.stderr


@pytest.mark.usefixtures("one_processor")
def test_a_process_takes_no_more_beside_than_is_predicted(
    wide: Callable[[str], Path], tmp_path: Path, gemrun_cli: Path
) -> None:
    """Its peak in a group without limit, less what it declares; of another processor the kernel may
    hold as many charged pages again."""
    with groups.memory_group() as group:
        if group is None:
            pytest.skip("no control group with a memory limit can be made here")
    path = tmp_path / "small.gembin"
    options = {"effort": Effort.FAST, "run_threads": 1}
    compiling.compiled(wide("gemma3"), path, context=2048, **options)
    found = [_beside(gemrun_cli, path) for _ in range(3)]
    predicted = sizes.process_size(_total(path))
    print(f"\nbeside the total: {found}, predicted {predicted}")
    assert 0 < max(found) + CHARGED * resource.getpagesize() <= predicted


def _beside(command: Path, path: Path) -> int:
    groups.drop(path)
    with groups.memory_group() as group:
        assert group is not None
        done = group.run([command, path, "--run-tests", "--threads", "1"])
        assert done.returncode == 0
        return group.peak - _total(path)


def _total(path: Path) -> int:
    with read_artifact(path) as content:
        return int(content.header.ram_total)
