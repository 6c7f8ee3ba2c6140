"""A pinned prompt costs no prefill and changes no answer: gemmake --pin-prompt, as a user types it.

Every answer is compared with that of the same artifact without it, ids and logits.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tiny
from fuzz.mutate import find, reseal, section_range
from gemmake.check.rules import check_file, replay
from gemmake.figures import mib
from gemrun import GemRunContext, GemRunHandle
from gemrun.errors import ArtifactError, GemRunError
from gemrun.format import assemble, pins
from gemrun.format.reader import read_artifact
from gemrun.format.units import rewritten
from gemrun.hooks import ring_blocks

ROOT = Path(__file__).resolve().parents[2]
CONTEXT = 320
SIZE = ("--kv-cache-size", str(CONTEXT), "--effort", "fast")
TEXT = "The conveyor in aisle 7 stops when the light curtain is cut; bay 12 reports 71.5 degrees."
ENDINGS = (
    *(
        "",
        " ",
        "\n",
        " Why?",
        "s",
        "'s motor",
        ".",
        " 1",
        "12",
        "\nWhat is the pressure?",
        "é",
        "机器",
    ),
    *(" If the door is open, the robot is stopped." * 2, "\u0301", "   \n"),
)
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_stop_ids": True}
Compile = Callable[..., Path]


@pytest.fixture
def compile_(tiny_checkpoint: Compile, artifact_cache: Compile) -> Compile:
    def make(family: str, *options: str) -> Path:
        return artifact_cache(tiny_checkpoint(family), *SIZE, *options)

    return make


def pinned_again(
    source: Path, target: Path, ids: Sequence[int], keeps: Sequence[assemble.Keep] = ()
) -> Path:
    """The artifact with these ids pinned, by the tools that gemmake has."""
    with rewritten(source, target, keeps, pinned=pins.Pinned(tuple(ids))) as out:
        with GemRunContext(Path(out.partial), ignore_memory=True) as engine:
            engine.prefill(ids)
            blocks = ring_blocks(engine)
        out.fill(pins.NAME, pins.section(ids, blocks))
        out.finish()
    return target


def tokens_of(path: Path) -> int:
    with read_artifact(path) as artifact:
        assert artifact.pin is not None
        return len(artifact.pin.ids)


@contextmanager
def both(plain: Path, pinned: Path, **config: Any) -> Iterator[tuple[GemRunContext, GemRunContext]]:
    """The artifact without a pinned prompt, by default settings, and the one with it."""
    with (
        GemRunContext(plain, ignore_memory=True) as one,
        GemRunContext(pinned, ignore_memory=True, **config) as other,
    ):
        yield one, other


def same(one: GemRunContext, other: GemRunContext, text: str, count: int = 6, **more: Any) -> int:
    """Compare answers to a text; the tokens that were not computed."""
    reuse = more.pop("reuse", False)
    wanted = one.infer(text, count, **{**GREEDY, **more})
    found = other.infer(text, count, **{**GREEDY, **more, "reuse": reuse})
    assert list(found) == list(wanted), text
    assert found.text == wanted.text
    assert found.stats.prompt_tokens == wanted.stats.prompt_tokens
    assert found.stats.kv_used == wanted.stats.kv_used
    assert found.stats.reused < found.stats.prompt_tokens
    if not more.keys() & {"repetition_penalty", "bias"}:  # which change them in place
        assert other.logits() == one.logits()
    return found.stats.reused


@pytest.mark.parametrize("kv", ["int8", "dense"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_answers_are_those_without_it(compile_: Compile, family: str, kv: str) -> None:
    """All families, cache types and windows; whatever follows; chunks and threads."""
    options = ("--kv-cache-type", kv)
    plain = compile_(family, *options)
    pinned = compile_(family, *options, "--pin-prompt", TEXT)
    tokens = tokens_of(pinned)
    for config in ({}, {"threads": 1, "prefill_batch_size": 7}, {"threads": 3}):
        with both(plain, pinned, **config) as (one, other):
            assert one.info.pinned_prompt == 0
            assert other.info.pinned_prompt == tokens
            assert other.run_tests() == one.run_tests()
            for ending in ENDINGS:
                ids = len(one.tokenize(TEXT + ending, bos=True, control=True))
                assert same(one, other, TEXT + ending) == min(tokens, ids - 1)
            for text in (TEXT[:40], TEXT[:-1], "x" + TEXT, "Why?", TEXT[:60] + "#" + TEXT[60:]):
                same(one, other, text)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.9, "top_k": 20, "seed": 3},
        {"repetition_penalty": 1.3},
        {"speculate": 4},
        {"stop": "e", "on_full": "mark"},
        {"bias": {40: 2.0}, "banned": [50, 51]},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_settings_see_the_same(compile_: Compile, family: str, settings: dict[str, Any]) -> None:
    with both(compile_(family), compile_(family, "--pin-prompt", TEXT)) as (one, other):
        for ending in ENDINGS[:6]:
            assert same(one, other, TEXT + ending, 30, **settings) > 20


@pytest.mark.parametrize("keep", [None, (1, 1), (1, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("family", ["gemma2", "gemma3_rope8", "llama3", "smollm2"])
def test_rings_of_every_kind_and_prompts_of_every_length(
    compile_: Compile, tmp_path: Path, family: str, keep: tuple[int, int] | None
) -> None:
    """Sparse caches and windows, whose rings have gone on: a part of the pinned ids is used where
    nothing is gone that it sees."""
    source = compile_(family)
    with read_artifact(source) as artifact:
        windows = [la.window for la in artifact.layers for _ in range(la.kv_heads)]
    keeps = [] if keep is None else [(0, 0) if window else keep for window in windows]
    rng = random.Random(family)
    text = "".join(rng.choice("abcdefgh ") for _ in range(280))
    plain = pinned_again(source, tmp_path / "plain", [5], keeps)  # of another text
    with GemRunContext(plain, ignore_memory=True) as engine:
        ids = engine.tokenize(text, bos=True)
    used = 0
    for tokens in (1, 31, 32, 33, 64, 100, 129, len(ids) - 3):
        pinned = pinned_again(source, tmp_path / str(tokens), ids[:tokens], keeps)
        assert finding(pinned, run=True).endswith("the same bytes")
        with both(plain, pinned, prefill_batch_size=13) as (one, other):
            for cut in (280, 200, 130, 65, 33, 20, 2, tokens, tokens + 1):
                reused = same(one, other, text[:cut] + "zq", 3)
                assert reused <= tokens
                used += reused
            whole = same(one, other, text, 3)
            assert whole == tokens
    assert used > 0


def test_only_what_follows_is_computed(compile_: Compile) -> None:
    """Prefilled tokens, not time; a reset keeps it."""
    pinned = compile_("llama3", "--pin-prompt", TEXT)
    tokens = tokens_of(pinned)
    with GemRunContext(pinned, ignore_memory=True) as context:
        for _ in range(3):
            found = context.infer(TEXT + " Why?", 2, **GREEDY)
            assert found.stats.reused == tokens
            assert found.stats.prompt_tokens - tokens <= 8
            context.reset_kv_cache()
        assert context.infer("Why?", 2, **GREEDY).stats.reused <= 1
        context.reset_kv_cache()
        context.prefill(context.tokenize(TEXT, bos=True))  # steps compute what they are given
        assert context.stats().kv_used >= tokens


def test_with_reuse_the_longer_of_both_counts(compile_: Compile) -> None:
    plain, pinned = compile_("gemma3"), compile_("gemma3", "--pin-prompt", TEXT)
    tokens = tokens_of(pinned)
    longer = TEXT + " What is the temperature of the motor?"
    with both(plain, pinned) as (one, other):
        assert same(one, other, longer, 2, reuse=True) == tokens
        assert same(one, other, longer + " And now?", 2, reuse=True) > tokens
        assert same(one, other, "abc", 2, reuse=True) <= 1
        assert same(one, other, longer, 2, reuse=True) == tokens
        assert same(one, other, longer, 40, reuse=True) > tokens
        assert same(one, other, TEXT + "s", 2, reuse=True) == tokens


@pytest.mark.parametrize("seed", range(4))
def test_prompts_by_turns(compile_: Compile, seed: int) -> None:
    """The cache after a pinned prompt is one that reuse and drafts go on from."""
    family = ("gemma3", "gemma2", "llama3", "qwen2")[seed]
    rng, used = random.Random(seed), 0
    with both(compile_(family), compile_(family, "--pin-prompt", TEXT)) as (one, other):
        for _ in range(30):
            text = TEXT[: rng.choice((10, 60, 85, 88, 89))] + rng.choice(ENDINGS) * rng.choice(
                (1, 3)
            )
            reuse, draft = rng.random() < 0.6, rng.choice((0, 4))
            used += same(one, other, text, rng.choice((1, 3, 30)), reuse=reuse, speculate=draft)
            if rng.random() < 0.2:
                other.reset_kv_cache()
    assert used > 0


def test_a_smaller_context_than_what_is_pinned(compile_: Compile) -> None:
    """Prompts that fit in it use the part that they begin with."""
    plain, pinned = compile_("llama3"), compile_("llama3", "--pin-prompt", TEXT)
    small = tokens_of(pinned) // 2
    with (
        GemRunContext(plain, ignore_memory=True, kv_cache_size=small) as one,
        GemRunContext(pinned, ignore_memory=True, kv_cache_size=small) as other,
    ):
        assert same(one, other, TEXT[:20], 4) > 0
        assert same(one, other, TEXT[:20], 200) > 0
        assert same(one, other, "Why?", 4) <= 1


def test_a_context_that_slides_on(compile_: Compile) -> None:
    with both(compile_("gemma3"), compile_("gemma3", "--pin-prompt", TEXT)) as (one, other):
        same(one, other, TEXT + " Go on.", 500, on_full="slide", speculate=3)
        assert other.stats().slides > 0


def test_sessions_go_on_from_it(compile_: Compile, tmp_path: Path) -> None:
    plain, pinned = compile_("gemma3"), compile_("gemma3", "--pin-prompt", TEXT)
    with both(plain, pinned) as (one, other), other.session() as third:
        same(one, other, TEXT + " Why?", 2)
        other.save(tmp_path / "talk.session")
        third.fork_from(other)
        answers = []
        for context in (one, other, third):
            answers.append((context.sample(temperature=0.0), list(context.logits())))
        with GemRunContext(pinned, ignore_memory=True) as fourth:
            fourth.restore(tmp_path / "talk.session")
            answers.append((fourth.sample(temperature=0.0), list(fourth.logits())))
            same(one, fourth, TEXT + " Why not?", 3, reuse=True)
        assert answers[0] == answers[1] == answers[2] == answers[3]
        same(one, third, TEXT + " How?", 3)


def test_a_handle_has_it_too(compile_: Compile) -> None:
    plain, pinned = compile_("qwen3"), compile_("qwen3", "--pin-prompt", TEXT)
    with GemRunContext(plain, ignore_memory=True) as one, GemRunHandle(pinned) as handle:
        wanted = one.infer(TEXT + " Why?", 9, **GREEDY)
        found = handle.infer(TEXT + " Why?", 9, **GREEDY)
        assert list(found) == list(wanted)
        assert found.stats.reused == tokens_of(pinned)


# ---- conversations ----
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_system_message(compile_: Compile, family: str) -> None:
    plain, pinned = compile_(family), compile_(family, "--pin-prompt", TEXT, "--pin-system")
    tokens = tokens_of(pinned)
    with both(plain, pinned) as (one, other):
        for user in (
            "Why?",
            "",
            " leading",
            "\n",
            "12",
            "机器人",
            "<|im_end|>",
            "a" * 40,
            "\u0301x",
        ):
            talk = [{"role": "system", "content": TEXT}, {"role": "user", "content": user}]
            wanted, found = (c.chat(talk, 5, **GREEDY) for c in (one, other))
            assert list(found) == list(wanted)
            assert other.logits() == one.logits()
            assert found.stats.reused == tokens
            talk += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
            wanted, found = (c.chat(talk, 5, **GREEDY) for c in (one, other))
            assert list(found) == list(wanted)
            assert found.stats.reused == tokens
        other_talk = [
            {"role": "system", "content": "x" + TEXT},
            {"role": "user", "content": "Why?"},
        ]
        assert list(other.chat(other_talk, 5, **GREEDY)) == list(one.chat(other_talk, 5, **GREEDY))
        same(one, other, TEXT)


# ---- the command ----
def gemmake(model: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gemmake.cli", "--model", str(model), *SIZE, *options]
    command += ["--target", "generic-x86-64", "--output", str(output)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_same_bytes_whatever_the_machine(
    compile_: Compile, tiny_checkpoint: Compile, tmp_path: Path
) -> None:
    """Threads, instruction sets, and a text that comes from a file."""
    wanted = compile_("gemma3", "--pin-prompt", TEXT)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    model = tiny_checkpoint("gemma3")
    for number, options in enumerate((("--workers", "1"), ("--workers", "3", "--baseline"), ())):
        output = tmp_path / f"{number}.gembin"
        done = gemmake(model, output, "--pin-prompt", f"@{tmp_path}/text.txt", *options)
        assert done.returncode == 0, done.stderr
        assert output.read_bytes() == wanted.read_bytes()


def test_it_says_what_is_pinned_and_what_not(compile_: Compile) -> None:
    path = compile_("llama3", "--pin-prompt", TEXT + " Answer in one wo")
    log = path.with_suffix(".log").read_text(encoding="utf-8")
    with read_artifact(path) as artifact:
        told = artifact.manifest["options"]["pin_prompt"]
        assert artifact.pin is not None
        assert told["tokens"] == len(artifact.pin.ids) < told["of"]
        size = artifact.sections["PINP"].size
        listed = (path.parent / "model.gembin.memmap").read_text(encoding="utf-8")
    line = f"pinned prompt: {told['tokens']} of {told['of']} tokens of the text, {mib(size)}"
    assert f"{line}; the last {told['of'] - told['tokens']} depend on what follows\n" in log
    assert "section  PINP" in listed
    with read_artifact(compile_("llama3")) as plain:
        assert "pin_prompt" not in plain.manifest["options"]


def test_the_rest_of_an_artifact_is_as_without_it(compile_: Compile) -> None:
    plain, pinned = compile_("qwen3"), compile_("qwen3", "--pin-prompt", TEXT)
    with read_artifact(plain) as one, read_artifact(pinned) as other:
        assert list(other.sections) == [
            *list(one.sections)[: list(one.sections).index("HDFJ")], "PINP", "HDFJ", "MANI", "WHOT",
        ]  # fmt: skip
        for name in one.sections:
            if name not in ("MANI", "TENS"):  # which has places in the file
                assert one.section(name) == other.section(name), name
        added = other.header.ram_total - one.header.ram_total
        assert added == other.header.ram_tables - one.header.ram_tables > 0
        assert added == pytest.approx(other.sections["PINP"].size, abs=1 << 16)


def test_a_sparse_cache(tiny_checkpoint: Compile, artifact_cache: Compile) -> None:
    options = (
        *("--kv-cache-type", "dynamic-sparse", "--kv-cache-size", "512", "--effort", "fast"),
        *("--prefill-sample-ratio", "0.01", "--kv-gate", "kl=0.02,top1=0.5"),
    )
    model = tiny_checkpoint("llama3")
    plain = artifact_cache(model, *options)
    pinned = artifact_cache(model, *options, "--pin-prompt", TEXT)
    with read_artifact(plain) as one, read_artifact(pinned) as other:
        assert one.units == other.units
        assert one.manifest["kv_mask"] == other.manifest["kv_mask"]
        assert sum(unit.partial for unit in other.units) > 0
    assert check_file(pinned, replay).exit_code == 0
    tokens = tokens_of(pinned)
    with both(plain, pinned) as (one, other):
        for ending in ENDINGS:
            assert same(one, other, TEXT + ending, 4) >= tokens - 1
        assert same(one, other, TEXT + " and the next one." * 9, 90) == tokens


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--pin-prompt", ""), "no text in it"),
        (("--pin-prompt", "@no-such-file"), "No such file or directory; name a text file"),
        (("--pin-prompt", "pyproject.toml"), "is a file; --pin-prompt @FILE reads one"),
        (("--pin-prompt", "@tests"), "name a text file"),
        (("--pin-prompt", "abc " * 400), "leave no room for a question and an answer in a context"),
        (("--pin-prompt", "abcd" * 4000), "longer than the"),
        (("--pin-system",), "--pin-system: says what --pin-prompt is; give that too"),
    ],
)
def test_what_cannot_be_pinned_is_refused(
    tiny_checkpoint: Compile, tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    done = gemmake(tiny_checkpoint("llama3"), tmp_path / "a.gembin", *options)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_place_for_a_system_message(
    tiny_checkpoint: Compile, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_checkpoint("smollm2").iterdir():
        if path.name != "chat_template.jinja":
            (model / path.name).write_bytes(path.read_bytes())
    done = gemmake(model, tmp_path / "a.gembin", "--pin-prompt", TEXT, "--pin-system")
    assert done.returncode == 2
    assert "--pin-system: the model has no chat template; pin a raw text without it" in done.stderr


# ---- gemcheck ----
def damaged(path: Path, target: Path, at: int, flip: int) -> Path:
    """A copy with a byte of PINP changed, everything sealed again."""
    raw = bytearray(path.read_bytes())
    place = section_range(raw, find(raw, "PINP"))
    assert place is not None
    raw[place[0] + at] ^= flip
    target.write_bytes(reseal(raw))
    return target


def finding(path: Path, run: bool) -> str:
    report = check_file(path, replay if run else None)
    return next(f.line for f in report.findings if f.rule == "pinned-prompt")


@pytest.mark.parametrize("kv", ["int8", "dense"])
def test_gemcheck_computes_it_again(compile_: Compile, tmp_path: Path, kv: str) -> None:
    path = compile_("gemma3", "--kv-cache-type", kv, "--pin-prompt", TEXT)
    with read_artifact(path) as artifact:
        assert artifact.pin is not None
        tokens, first, last = len(artifact.pin.ids), artifact.pin.rings[0], artifact.pin.rings[-1]
        kind, layer = artifact.conf.kv_type, artifact.layers[0]
    assert tokens % 32
    assert f"Pinned prompt: {tokens} tokens, " in finding(path, run=False)
    assert finding(path, run=True).endswith(", computed again: the same bytes")
    other = damaged(path, tmp_path / "a", first.at + 5, 1)
    assert "\u2713" in finding(other, run=False)
    assert "its keys and values are others" in finding(other, run=True)
    row = layer.head_dim * (1 if kind == 2 else 2)
    end = damaged(path, tmp_path / "b", last.at + (last.used * last.size - 1), 0x40)
    assert "a row behind the last token is not zero" in finding(end, run=False)
    raw = path.read_bytes()
    with read_artifact(path) as artifact:
        at = artifact.sections["PINP"].offset + first.at + row
    value = raw[at] if kind == 2 else raw[at + 1]
    wanted = 0x80 if kind == 2 else value | 0x7C
    bad = damaged(path, tmp_path / "c", first.at + row + (kind != 2), value ^ wanted)
    assert "layer 0, KV head 0: a value is no finite number" in finding(bad, run=False)
    assert check_file(bad).exit_code == 1


def test_a_wrong_value_is_an_error_not_an_answer(compile_: Compile, tmp_path: Path) -> None:
    """What an engine cannot compute with ends the run by its code."""
    path = compile_("llama3", "--kv-cache-type", "dense", "--pin-prompt", TEXT)
    with read_artifact(path) as artifact:
        assert artifact.pin is not None
        at = artifact.pin.rings[-1].at + 5 * 2 * artifact.layers[-1].head_dim  # row 5
        place = artifact.sections["PINP"].offset
    flip = path.read_bytes()[place + at + 1] ^ 0x7E  # not a number
    bad = damaged(path, tmp_path / "a", at + 1, flip)
    with GemRunContext(bad, ignore_memory=True) as context:
        with pytest.raises(GemRunError, match="NaN or infinity"):
            context.infer(TEXT + " Why?", 3, **GREEDY)
        assert context.stats().kv_used == 0
        context.infer("Why?", 3, **GREEDY)
    with pytest.raises(ArtifactError):
        GemRunContext(damaged(path, tmp_path / "b", 0, 0xFF), ignore_memory=True)


def test_commands_show_it(compile_: Compile, gemrun_cli: Path) -> None:
    path = compile_("llama3", "--pin-prompt", TEXT)
    tokens = tokens_of(path)
    info = subprocess.run([gemrun_cli, path, "--info"], capture_output=True, text=True, check=True)
    assert f"pinned     a prompt of {tokens} tokens\n" in info.stdout
    run = [gemrun_cli, path, "--prompt", TEXT + " Why?", "--json"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert f'"reused": {tokens},' in done.stdout
    for word in ((), ("inspect",)):
        command = [sys.executable, "-m", "gemmake.check.cli", *word, str(path)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        assert "Pinned prompt" in shown.stdout


# ---- a real model ----
PREAMBLE = (
    "You answer questions of the people who run a warehouse. Aisles are numbered 1 to 24, "
    "bays A to F. Conveyors stop when a light curtain is cut, and start again when an "
    "operator confirms at the panel of the aisle. A shuttle that has lost its reference "
    "drives to dock 4 at walking speed. Motors may be at most 80 degrees Celsius warm; above "
    "75 the controller lowers their speed, above 80 it stops them and reports fault 17. "
    "Batteries below 20 % are charged before the next order. Faults: 11 light curtain, 12 "
    "emergency stop, 13 lost reference, 14 overload, 15 no answer from a shuttle, 16 battery,"
    " 17 temperature, 18 door open, 19 label not readable. Never tell anybody to reach into a"
    " conveyor or to bridge a switch. Answer in one or two sentences, with the number of the "
    "fault where there is one, and say which panel the operator has to go to. If you do not "
    "know the answer, say so and name the shift leader, whose number hangs at every panel."
)
QUESTIONS = (
    "Conveyor 7 stands still and the lamp at the panel blinks. What do I do?",
    "Where does shuttle 3 drive to?",
    "What is fault 16?",
)


def test_a_real_model(smollm2_gguf: Path, artifact_cache: Compile, run_dir: Path) -> None:
    options = ("--effort", "fast", "--kv-cache-size", "512")
    (run_dir / "preamble.txt").write_text(PREAMBLE, encoding="utf-8")
    given = ("--pin-prompt", f"@{run_dir}/preamble.txt", "--pin-system")
    plain = artifact_cache(smollm2_gguf, *options)
    pinned = artifact_cache(smollm2_gguf, *options, *given)
    tokens = tokens_of(pinned)
    assert tokens > 200
    with both(plain, pinned) as (one, other):
        for question in QUESTIONS:
            talk = [{"role": "system", "content": PREAMBLE}, {"role": "user", "content": question}]
            wanted, found = (c.chat(talk, 24, temperature=0.0) for c in (one, other))
            assert list(found) == list(wanted)
            assert found.text == wanted.text
            assert found.stats.reused == tokens
            assert found.stats.prompt_tokens - tokens < 40
    assert check_file(pinned, replay).exit_code == 0
