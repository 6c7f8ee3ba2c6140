"""Advice: memory from the compiler's planner, verdicts, remedies, candidates, checks of texts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import compiling
from gemmake import advise, advise_report, predictions, tokencheck
from gemmake.advise import Fit, Quality, Row, Wish
from gemmake.errors import TargetError, UsageError
from gemmake.hdf import MIB, load_hdf
from gemmake.options import CompileOptions, Effort, KvType, Quantization, Storage
from gemmake.passes import predict
from gemrun.format.reader import read_artifact

MakeTiny = Callable[..., Path]
NANO = "jetson-orin-nano"


HDF = Path(__file__).resolve().parents[2] / "hdf"


def wish(**changes: object) -> Wish:
    """A small task on an Orin Nano."""
    asked = Wish(NANO, longest_input=64, answer=64, effort=Effort.FAST)
    return replace(asked, **changes)  # type: ignore[arg-type]


def row(model: Path | str, **changes: object) -> Row:
    (found,) = advise.advise([str(model)], wish(**changes)).rows
    return found


def declared(output: Path) -> int:
    with read_artifact(output) as artifact:
        total: int = artifact.header.ram_total
    return total


@pytest.mark.parametrize("family", ["gemma3", "llama3", "qwen3"])
@pytest.mark.parametrize("quality", Quality)
def test_memory_is_what_the_compiled_artifact_declares(
    tiny_checkpoint: MakeTiny, tmp_path: Path, family: str, quality: Quality
) -> None:
    model, output = tiny_checkpoint(family), tmp_path / "x.gembin"
    quantization, kv_type = advise.FORMS[quality]
    compiling.compiled(
        model, output, target=NANO, context=128, effort=Effort.FAST,
        quantization=quantization, kv_type=kv_type,
    )  # fmt: skip
    found = row(model, quality=quality)
    assert found.memory is not None
    assert found.memory.total == found.most == declared(output)
    assert found.prediction is not None
    assert found.prediction.cold.low * found.prediction.machine.storage.high == pytest.approx(
        output.stat().st_size
    )


def test_measured_groups_stay_within_what_is_said(
    tiny_checkpoint: MakeTiny, tmp_path: Path
) -> None:
    model, output = tiny_checkpoint("qwen2"), tmp_path / "x.gembin"
    compiling.compiled(model, output, target=NANO, context=128)
    found = row(model, effort=Effort.FULL)
    assert found.memory is not None
    assert found.memory.total <= declared(output) <= found.most


def test_memory_of_smollm2_is_what_the_compiled_artifact_declares(
    smollm2_gguf: Path, artifact_cache: Callable[..., Path]
) -> None:
    output = artifact_cache(smollm2_gguf, "--effort", "fast")
    found = row(smollm2_gguf, target="generic-x86-64", longest_input=768, answer=256)
    assert found.memory is not None
    assert found.memory.total == declared(output)
    assert found.fit is Fit.YES


# ---- verdicts ----
def test_what_is_not_asked_for_is_no_reason(tiny_checkpoint: MakeTiny) -> None:
    found = row(tiny_checkpoint("llama3"))
    assert (found.fit, found.reasons, found.remedies) == (Fit.YES, (), ())


def test_a_context_beyond_training_names_the_longest_input(tiny_checkpoint: MakeTiny) -> None:
    found = row(tiny_checkpoint("llama3"), longest_input=256, answer=64)
    assert found.fit is Fit.NO
    assert found.reasons == ("trained for 256 tokens, 384 are wanted",)
    assert found.remedies == ("--longest-input 192",)
    assert row(tiny_checkpoint("llama3"), longest_input=192, answer=64).fit is Fit.YES


def test_memory_over_budget_names_the_option_that_fits() -> None:
    most, usual = row("gemma-3-1b", quality=Quality.HIGH).most, row("gemma-3-1b").most
    left = math.ceil(usual / MIB)
    found = row("gemma-3-1b", quality=Quality.HIGH, leave_free=7336 - left)
    assert found.fit is Fit.NO
    assert found.reasons == (f"takes {math.ceil(most / MIB)} MiB of the {left} MiB granted",)
    assert found.remedies == (f"gemmake --quantization int4: {left} MiB",)


def test_memory_just_over_budget_keeps_every_bit_of_the_weights() -> None:
    left = row("gemma-3-1b", quality=Quality.HIGH).most // MIB - 50
    found = row("gemma-3-1b", quality=Quality.HIGH, leave_free=7336 - left)
    option, mib, unit = found.remedies[0].rsplit(" ", 2)
    assert (option, unit) == ("gemmake --offload rows:", "MiB")
    assert int(mib) <= left


def test_a_smaller_context_as_a_remedy_says_how_long_inputs_may_be() -> None:
    size = {"longest_input": 7936, "answer": 256}
    half = row("qwen3-4b", longest_input=3840, answer=256).most
    left = math.ceil(half / MIB) + 1
    found = row("qwen3-4b", **size, leave_free=7336 - left)
    assert found.remedies == (
        f"gemmake --kv-cache-size 4096: {math.ceil(half / MIB)} MiB, for inputs of 3840 tokens",
    )
    asked = {"longest_input": 3840, "answer": 256, "leave_free": 7336 - left}
    assert row("qwen3-4b", **asked).fit is Fit.YES


def test_memory_without_a_remedy_asks_for_a_smaller_model_or_a_larger_share() -> None:
    found = row("qwen3-4b", target="meter-256mb", leave_free=200)
    assert found.fit is Fit.NO
    assert found.remedies == ("a smaller model",)
    found = row("gemma-3-4b", target="raspberry-pi-4", ram_fraction=0.02)
    remedy, option, fraction = found.remedies[0].rsplit(" ", 2)
    assert (remedy, option) == ("a smaller model, or", "--ram-fraction")
    for share, fit in ((float(fraction), Fit.YES), (float(fraction) - 0.01, Fit.NO)):
        assert row("gemma-3-4b", target="raspberry-pi-4", ram_fraction=share).fit is fit


def test_speed_is_judged_by_the_ends_of_the_range() -> None:
    rate = decode_rate("gemma-3-1b")
    for speed, fit in ((rate.low - 0.1, Fit.YES), (rate.high - 0.1, Fit.OPEN), (1e4, Fit.NO)):
        found = row("gemma-3-1b", speed=speed)
        assert found.fit is fit
        assert bool(found.reasons) is (fit is not Fit.YES)
    assert row("gemma-3-1b", speed=1e4).remedies[0].startswith("--power-mode MAXN_SUPER: ")


def test_a_mode_whose_clock_is_not_described_promises_nothing(tmp_path: Path) -> None:
    """15 W on an AGX Orin hold cores and clock far below the highest. In a description that does
    not say how far only the most is known."""
    text = (HDF / "jetson-agx-orin-64gb.toml").read_text(encoding="utf-8")
    said = "cores_online = 4\ntdp_w = 15\ncpu_max_mhz = 1113.6\n"
    assert text.count(said) == 1
    board = str(tmp_path / "agx.toml")
    Path(board).write_text(text.replace(said, "tdp_w = 15\n"), encoding="utf-8")
    rates = []
    for mode in ("MAXN", "15W"):
        found = row("gemma-3-1b", target=board, power_mode=mode).prediction
        assert found is not None
        assert found.decode is not None
        rates.append(found.decode.seconds.inverse())
    assert rates[0].low > 0
    assert rates[1].low == 0
    slow = rates[0].low / 2
    assert row("gemma-3-1b", target=board, power_mode="MAXN", speed=slow).fit is Fit.YES
    assert row("gemma-3-1b", target=board, power_mode="15W", speed=slow).fit is Fit.OPEN


def decode_rate(shape: str) -> predict.Range:
    found = row(shape).prediction
    assert found is not None
    assert found.decode is not None
    return found.decode.seconds.inverse()


def test_latency_names_the_longest_input_that_meets_it() -> None:
    found = row("gemma-3-1b", longest_input=768, answer=64, latency_ms=800)
    assert found.fit is Fit.NO
    assert found.reasons[0].startswith("first token of 768 tokens after ")
    option, tokens, *_ = found.remedies[0].split()
    assert option == "--longest-input"
    assert row("gemma-3-1b", longest_input=int(tokens), answer=64, latency_ms=800).fit is Fit.YES
    longer = row("gemma-3-1b", longest_input=int(tokens) + 1, answer=64, latency_ms=800)
    assert longer.fit is not Fit.YES


def test_what_is_not_predicted_leaves_the_answer_open(tiny_checkpoint: MakeTiny) -> None:
    found = row(tiny_checkpoint("llama3"), target="generic-aarch64", speed=1.0, latency_ms=1e5)
    assert found.fit is Fit.OPEN
    assert all("memory bandwidth of generic-aarch64" in reason for reason in found.reasons)


def test_a_checkpoint_that_cannot_be_compiled_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUFxxxx")
    found = advise.advise([str(tmp_path), "gemma-3-1b"], wish())
    assert [one.fit for one in found.rows] == [Fit.NO, Fit.YES]
    assert found.rows[0].reasons[0].startswith("cannot be compiled: bad.gguf: ")
    assert advise.nothing_fits(found) is None
    assert advise.nothing_fits(replace(found, rows=found.rows[:1])) is not None


def test_all_that_is_missed_is_named() -> None:
    asked = {"longest_input": 60_000, "speed": 1e4, "latency_ms": 1.0, "leave_free": 7300}
    found = advise.advise(["gemma-3-1b"], wish(**asked))
    (one,) = found.rows
    assert one.unmet == tuple(what for what in advise.WISHES if what != "flash")
    assert [reason.split()[0] for reason in one.reasons] == ["trained", "takes", *one_of_each(one)]
    assert all(text.endswith(" alone") for text in one.remedies)
    text = "\n".join(advise_report.lines(found))
    assert "  no: context, memory, speed, first token\n" in text
    assert json.loads(advise_report.as_json(found))["candidates"][0]["unmet"] == list(one.unmet)
    failure = advise.nothing_fits(found)
    assert "; missed is context, memory, speed, first token: the rows" in str(failure)


def test_flash_is_not_memory() -> None:
    """A board without a system has both, and either may be too small."""
    found = row("gemma-3-1b", target="cortex-m55")
    assert found.unmet == ("flash",)
    assert " of flash and the board has 128 MiB" in found.reasons[0]
    assert found.remedies == ("a smaller model",)
    other = row("gemma-3-1b", target="cortex-m55", quality="high")
    assert other.remedies[0] == "--quantization int4 or a smaller model"
    assert row("gemma-3-1b", target="cortex-m55", leave_free=30).unmet == ("flash", "memory")


def one_of_each(found: Row) -> list[str]:
    """How the reasons of speed and first token begin."""
    assert found.prediction is not None
    assert found.prediction.decode is not None
    rate = predictions.tokens_a_second(found.prediction.decode)
    return [rate.split()[0], "first"]


def test_what_is_open_stands_beside_what_is_missed() -> None:
    asked = wish(target="meter-256mb", speed=1e4, latency_ms=1.0, longest_input=60_000)
    found = advise.advise(["gemma-3-1b"], asked)
    (one,) = found.rows
    assert (one.unmet, one.undecided) == (("context", "memory"), ("speed", "first token"))
    assert "  no: context, memory; open: speed, first token" in "\n".join(
        advise_report.lines(found)
    )


def test_the_storage_that_is_assumed_stands_in_the_command() -> None:
    one = row("gemma-3-1b", target="raspberry-pi-5", storage=Storage.SD)
    assert one.options is not None
    assert "--storage sd" in one.options.command()
    assert "--storage" not in row("gemma-3-1b").options.command()  # type: ignore[union-attr]
    slow, usual = row("gemma-3-1b", storage=Storage.SD), row("gemma-3-1b")
    assert slow.prediction is not None
    assert usual.prediction is not None
    assert slow.prediction.cold.low > usual.prediction.cold.low


@pytest.mark.parametrize(
    ("given", "id_"), [(NANO, NANO), ("jetson-agx-orin-64gb", "agx-orin-64gb")]
)
def test_a_target_is_told_as_it_was_given_and_by_its_id(given: str, id_: str) -> None:
    found = advise.advise(["gemma-3-1b"], wish(target=given))
    told = json.loads(advise_report.as_json(found))
    assert (told["target"], told["target_given"]) == (id_, given)
    head = next(advise_report.lines(found))
    assert head.startswith(f"{id_} in mode" if given == id_ else f"{id_} ({given}) in mode")


# ---- what is asked ----
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"longest_input": 0}, "--longest-input: 0 tokens"),
        ({"answer": -1}, "--answer: -1 tokens"),
        ({"speed": float("nan")}, "--speed: nan"),
        ({"latency_ms": 0.0}, "--latency-ms: 0.0 ms"),
        ({"leave_free": -1}, "--leave-free: -1 MiB"),
        ({"ram_fraction": 1.5}, "--ram-fraction: 1.5 of the memory"),
        ({"longest_input": 1 << 20}, "use 1048576 at most"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        wish(**changes)
    assert words in str(caught.value)


def test_contexts_are_rounded_up() -> None:
    assert wish(longest_input=64, answer=64).context == 128
    assert wish(longest_input=65, answer=64).context == 256


def test_memory_is_left_to_others_as_a_compile_with_reserve_leaves_it() -> None:
    hdf = load_hdf(NANO)
    for changes, budget in (
        ({}, hdf.budget_bytes()),
        ({"leave_free": 1}, hdf.budget_bytes()),  # the share of the memory is less
        ({"leave_free": 7000}, 336 * MIB),
        ({"leave_free": 1, "ram_fraction": 1.0}, 7335 * MIB),
    ):
        asked = wish(**changes)
        options = advise.options_of(asked, None)
        assert advise.board(asked).budget_bytes() == budget
        assert (options.reserve_mib, options.ram_fraction) == (
            asked.leave_free,
            asked.ram_fraction,
        )
    with pytest.raises(UsageError, match=r"--reserve: 7336 MiB of the 7336 MiB .*leave less"):
        advise.board(wish(leave_free=7336))
    with pytest.raises(TargetError, match="does not state its memory"):
        advise.board(wish(target="generic-x86-64", leave_free=7000))


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"leave_free": 7336}, r"--reserve: 7336 MiB .*leave less: --reserve (\d+) lets gemma"),
        (
            {"leave_free": 9999, "ram_fraction": 0.1},
            r"--reserve (\d+) --ram-fraction (0\.\d+) lets gemma",
        ),
    ],
)  # fmt: skip
def test_a_reserve_that_leaves_nothing_is_told_what_would_let_a_model_in(
    own: dict[str, float], told: str
) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        advise.advise(["qwen3-4b", "gemma-3-1b"], wish(**own))
    found = re.search(told, str(caught.value))
    assert found
    better = dict(zip(("leave_free", "ram_fraction"), map(float, found.groups()), strict=False))
    better["leave_free"] = int(better["leave_free"])
    assert row("gemma-3-1b", **better).fit is Fit.YES
    assert row("gemma-3-1b", **{**better, "leave_free": better["leave_free"] + 1}).fit is Fit.NO


def test_a_reserve_that_is_too_large_is_told_with_one_that_fits() -> None:
    found = row("gemma-3-1b", leave_free=7300)
    told, reserve = found.remedies[0].rsplit(" ", 1)
    assert told == "a smaller model, or --reserve"
    assert row("gemma-3-1b", leave_free=int(reserve)).fit is Fit.YES


def test_qualities_are_the_forms_of_a_compile() -> None:
    for quality, (quantization, kv_type) in advise.FORMS.items():
        options = advise.options_of(wish(quality=quality), None)
        assert isinstance(options, CompileOptions)
        assert (options.quantization, options.kv_type) == (quantization, kv_type)
    assert advise.FORMS[Quality.USUAL] == (Quantization.INT4, KvType.INT8)


def test_candidates_are_found_in_folders(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama3")
    (tmp_path / "b").symlink_to(model)
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("x")
    names = [one.name for one in advise.candidates([str(tmp_path), str(model), "2B"])]
    assert names == ["a.gguf", "b", model.name, "qwen3-1.7b", "gemma-2-2b"]
    above = tmp_path.parent / f"{tmp_path.name}-above"
    (above / "c").mkdir(parents=True)
    (above / "c" / "x.gguf").write_bytes(b"")
    assert [one.name for one in advise.candidates([str(above)])] == ["x.gguf"]
    only = tmp_path / "only"
    only.mkdir()
    with pytest.raises(UsageError, match="no checkpoint in it"):
        list(advise.candidates([str(only)]))
    (only / "config.json").write_bytes((model / "config.json").read_bytes())
    assert [one.name for one in advise.candidates([str(only)])] == ["only"]
    assert row(only).memory is not None
    with pytest.raises(UsageError, match=r"no such file or folder; .*gemma-3-1b"):
        list(advise.candidates(["gemma-3-2b"]))


# ---- words ----
def test_the_table_and_the_json_say_the_same(tiny_checkpoint: MakeTiny) -> None:
    asked = wish(longest_input=128, answer=64, speed=1e6, latency_ms=1e5)
    found = advise.advise([str(tiny_checkpoint("llama3")), "gemma-3-1b"], asked)
    text = "\n".join(advise_report.lines(found))
    told = json.loads(advise_report.as_json(found))
    assert f"{NANO} in mode 25W: 4768 MiB for a model" in text
    assert "wanted: 1e+06 tokens/s, the first token within 100000 ms, with 128 tokens" in text
    assert (told["target"], told["power_mode"], told["context"]) == (NANO, "25W", 256)
    assert told["granted_bytes"] == 4768 * MIB
    for one, shown in zip(found.rows, told["candidates"], strict=True):
        assert shown["model"] == one.name
        assert shown["verdict"] == one.fit.value == "no"
        assert one.prediction is not None
        assert one.prediction.decode is not None
        rate = one.prediction.decode.seconds.inverse()
        assert shown["decode_tokens_per_s"] == [round(rate.low, 3), round(rate.high, 3)]
        assert one.prediction.prefill is not None
        prefill = one.prediction.prefill.seconds.inverse(128)
        assert shown["prefill_tokens_per_s"] == [round(prefill.low, 3), round(prefill.high, 3)]
        assert f"{predictions.span(prefill)}  " in text
        assert one.options is not None
        assert shown["command"] == one.options.command()
        assert f"{predictions.span(rate)}  " in text
        assert all(f"{one.name}: {reason}" in text for reason in one.reasons)
        assert shown["reasons"] == list(one.reasons)
    assert "Next:" not in text
    assert "nothing here was measured on the board" in text


def test_names_of_files_send_nothing_to_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "a\x1b[31m\nb.gguf").write_bytes(b"GGUFxx")
    lines = list(advise_report.lines(advise.advise([str(tmp_path)], wish())))
    assert all(line.isprintable() for line in lines)
    assert any(line.startswith("a\\x1b[31m\\x0ab.gguf  ") for line in lines)


# ---- tokenizer and template ----
def findings(model: Path) -> dict[str, tokencheck.Finding]:
    return {one.name: one for one in row(model, check=True).check}


@pytest.mark.parametrize("family", ["gemma3", "llama3", "smollm2", "qwen3"])
def test_good_tokenizers_pass(tiny_checkpoint: MakeTiny, family: str) -> None:
    found = findings(tiny_checkpoint(family))
    assert list(found) == ["round trips", "special tokens", "chat template", "stop tokens"]
    assert {one.verdict for one in found.values()} == {"good"}
    assert "18 texts came back byte for byte" in found["round trips"].sentence
    assert "of system, user and assistant renders" in found["chat template"].sentence


def changed(model: Path, folder: Path, file: str, change: Callable[[dict], None]) -> Path:  # type: ignore[type-arg]
    folder.mkdir(exist_ok=True)
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    content = json.loads((folder / file).read_text("utf-8"))
    change(content)
    (folder / file).write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_text_that_the_vocabulary_lacks_is_found(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    def drop(tokenizer: dict) -> None:  # type: ignore[type-arg]
        tokenizer["model"]["byte_fallback"] = False

    found = findings(changed(tiny_checkpoint("gemma3"), tmp_path / "x", "tokenizer.json", drop))
    assert found["round trips"].verdict == "bad"
    assert "Thai" in found["round trips"].sentence


def test_a_model_that_cannot_stop_is_found(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    model = changed(
        tiny_checkpoint("qwen3"), tmp_path / "x", "tokenizer_config.json",
        lambda config: config.update(eos_token=None, chat_template=None),
    )  # fmt: skip
    for file in ("config.json", "generation_config.json"):
        model = changed(model, tmp_path / file, file, lambda config: config.pop("eos_token_id"))
    found = findings(model)
    assert (found["stop tokens"].verdict, found["chat template"].verdict) == ("bad", "open")
    assert "the checkpoint has none" in found["chat template"].sentence


def test_a_template_that_fails_is_found(tiny_checkpoint: MakeTiny, tmp_path: Path) -> None:
    model = changed(
        tiny_checkpoint("qwen3"), tmp_path / "x", "tokenizer_config.json",
        lambda config: config.update(chat_template="{{ raise_exception('no') }}"),
    )  # fmt: skip
    found = findings(model)
    assert found["chat template"].verdict == "bad"
    assert "does not render" in found["chat template"].sentence


def test_a_check_ends_in_time(tiny_checkpoint: MakeTiny) -> None:
    options = advise.options_of(wish(), tiny_checkpoint("llama3"))
    model, text = advise.load(advise.Candidate("x", tiny_checkpoint("llama3")))
    state = advise.planned(advise.base_of(model, text, options, load_hdf(NANO)), options)
    ticks = iter(range(100))
    found = tokencheck.check_text(state, 3, lambda: float(next(ticks)))
    assert [one.verdict for one in found] == ["open"] * 4
    assert "1 of 18 texts checked in time" in found[0].sentence
    assert found[3].sentence == "not checked, 3 s are over; check it alone"


def test_a_shape_has_nothing_to_check() -> None:
    (finding,) = row("gemma-3-1b", check=True).check
    assert (finding.verdict, finding.line) == (
        "open",
        "? tokenizer: a shape has none; name a checkpoint",
    )
