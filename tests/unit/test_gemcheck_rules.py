"""Every rule of gemcheck: what it says when all is well, and when it is not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fuzz.mutate import find, reseal, section_range
from gemmake.check import rules
from gemmake.check.rules import Severity, Subject, check_file
from gemmake.hdf import load_hdf
from gemmake.passes import thermal
from gemrun.format import manifest, units
from gemrun.format.codes import Code
from gemrun.format.pins import Pinned
from gemrun.format.reader import canonical_json, read_artifact
from gemrun.format.spec import Mode, Thermal
from golden import make, refused

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def line(report: rules.Report, rule: str) -> str:
    return next(f.line for f in report.findings if f.rule == rule)


def severity(report: rules.Report, rule: str) -> Severity:
    return next(f.severity for f in report.findings if f.rule == rule)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[make.Golden], Path]:
    """Writes a golden model with filled-in test vectors."""
    stored = (GOLDEN / "v1.0/tiny-int4.gembin").read_bytes()
    place = section_range(stored, find(stored, "TEST"))
    assert place is not None
    tests = stored[place[0] : place[0] + place[1]]

    def make_file(golden: make.Golden) -> Path:
        path = tmp_path / "model.gembin"
        make.write(replace(golden, records=replace(golden.records, tests=tests)), path)
        return path

    return make_file


def changed(golden: make.Golden, **fields: object) -> make.Golden:
    return replace(golden, records=replace(golden.records, **fields))


def test_a_good_file_has_the_five_lines_in_order() -> None:
    report = check_file(GOLDEN / "v1.0/tiny-int4.gembin")
    assert report.exit_code == 0
    five = [f.line for f in report.findings if f.rule in FIVE]
    assert five == [
        "\u26a0 Model signature: none",
        "\u2713 Memory layout consistent with target HDF",
        "\u2713 Quantization parameters within int4 bounds",
        "\u2713 Dynamic sparse mask: not used (int8 KV cache over all positions)",
        "\u26a0 Temperature threshold 75\u00b0C exceeds device spec for continuous load "
        "(max 70\u00b0C) \u2014 recommend --throttle-mode aggressive",
    ]


FIVE = ("signature", "layout", "quantization", "mask", "temperature")


@pytest.mark.parametrize(
    ("threshold", "limit", "mark", "text"),
    [
        (
            70.0,
            70.0,
            Severity.OK,
            "70\u00b0C within device spec for continuous load (max 70\u00b0C)",
        ),
        (70.5, 70.0, Severity.WARNING, "70.5\u00b0C exceeds device spec"),
        (75.0, 0.0, Severity.OK, "states no limit"),
        (0.0, 70.0, Severity.OK, "not set"),
    ],
)
def test_temperature(
    write: Callable[[make.Golden], Path], threshold: float, limit: float, mark: Severity, text: str
) -> None:
    stored = Thermal(threshold_c=threshold, device_max_c=limit)
    report = check_file(write(changed(make.build(make.INT4), thermal=stored)))
    assert severity(report, "temperature") is mark
    assert text in line(report, "temperature")
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("trip", "mark", "text"),
    [
        (95.0, Severity.WARNING, "95\u00b0C is not below the kernel's passive trip (95\u00b0C)"),
        (95.1, Severity.OK, "95\u00b0C (the target states no limit for continuous load)"),
        (None, Severity.OK, "states no limit"),
    ],
)
def test_a_threshold_that_the_kernel_never_lets_it_reach(
    write: Callable[[make.Golden], Path], trip: float | None, mark: Severity, text: str
) -> None:
    """Of a board without a limit for continuous load, too."""
    trips = None if trip is None else {"zones": [], "hw_passive_c": trip, "hw_critical_c": 110.0}
    golden = hdf_with(make.build(make.INT4), thermal=trips)
    stored = Thermal(threshold_c=95.0)
    report = check_file(write(changed(golden, thermal=stored)))
    assert severity(report, "temperature") is mark
    assert text in line(report, "temperature")
    assert report.exit_code == 0


@pytest.mark.parametrize(
    ("asked", "policy", "mark"),
    [
        (None, 80.1, Severity.OK),  # nobody chose: what the board's own policy says
        (80.1, 80.1, Severity.WARNING),  # chosen, though it is the policy's value
        (None, 79.0, Severity.WARNING),  # not the policy's value: somebody chose it
        (None, None, Severity.WARNING),
    ],
)
def test_a_threshold_of_the_targets_policy_is_no_fault(
    write: Callable[[make.Golden], Path], asked: float | None, policy: float | None, mark: Severity
) -> None:
    golden = make.build(make.INT4)
    table = json.loads(golden.records.hdf)
    named = {} if policy is None else {"throttle_temp_c": policy, "target_temp_c": 70.0}
    golden = hdf_with(golden, policy={**table["policy"], **named})
    told = manifest.decode(golden.records.manifest)
    told["options"]["temperature_threshold"] = asked
    stored = Thermal(threshold_c=80.1, device_max_c=70.0)
    report = check_file(write(changed(golden, manifest=manifest.encode(told), thermal=stored)))
    assert report.exit_code == 0
    assert severity(report, "temperature") is mark
    if mark is Severity.OK:
        assert line(report, "temperature") == (
            "\u2713 Temperature threshold 80.1\u00b0C "
            "(policy of the target; continuous limit 70\u00b0C)"
        )
        return
    assert line(report, "temperature") == (
        "\u26a0 Temperature threshold 80.1\u00b0C exceeds device spec for continuous load "
        "(max 70\u00b0C) \u2014 recommend --throttle-mode aggressive"
    )
    hint = next(f.hint for f in report.findings if f.rule == "temperature")
    assert "with --throttle-mode aggressive" in hint
    assert "lower --temperature-threshold" in hint


def laddered(mode: Mode, engage: float, told: str | None = None) -> make.Golden:
    """A golden model with a ladder, compiled with a threshold of 75 and the mode that was told."""
    golden = make.build(make.INT4)
    options = manifest.decode(golden.records.manifest)
    options["options"] |= {"temperature_threshold": 75.0}
    options["options"] |= {"throttle_mode": told} if told else {}
    ladder = thermal.ladder(load_hdf("jetson-orin-nano"), 75.0, mode)
    ladder = replace(ladder, engage_c=engage, release_c=max(0.0, engage - 5.0))
    return changed(golden, manifest=manifest.encode(options), ladder=ladder)


@pytest.mark.parametrize(
    ("mode", "engage", "told", "text"),
    [
        (Mode.BALANCED, 75.0, None, "\u2713 Throttle mode balanced: 8 rungs from 75\u00b0C, down"),
        (Mode.SILENT, 65.0, "silent", "\u2713 Throttle mode silent: 6 rungs from 65\u00b0C, down"),
        (
            Mode.PERFORMANCE,
            0.0,
            "performance",
            "\u2713 Throttle mode performance: 8 rungs, no limit",
        ),
        (
            Mode.BALANCED,
            75.0,
            "silent",
            "\u26a0 Throttle mode balanced: 8 rungs from 75\u00b0C, the",
        ),
        (Mode.BALANCED, 80.0, None, "the options say balanced and 75\u00b0C"),
    ],
)
def test_a_ladder_begins_where_target_and_options_say(
    write: Callable[[make.Golden], Path], mode: Mode, engage: float, told: str | None, text: str
) -> None:
    report = check_file(write(laddered(mode, engage, told)))
    assert text in line(report, "ladder")
    assert report.exit_code == 0


def test_an_artifact_from_before_has_no_ladder() -> None:
    report = check_file(GOLDEN / "v1.0/tiny-int4.gembin")
    assert all(f.rule != "ladder" for f in report.findings)


def test_a_ladder_that_begins_at_the_limit_is_not_recommended_again(
    write: Callable[[make.Golden], Path],
) -> None:
    report = check_file(write(laddered(Mode.AGGRESSIVE, 70.0, "aggressive")))
    finding = next(f for f in report.findings if f.rule == "temperature")
    assert finding.severity is Severity.WARNING
    assert "begins at the limit already" in finding.hint
    assert "recommend" not in finding.text


def test_unsigned_is_no_failure() -> None:
    report = check_file(GOLDEN / "v1.0/tiny-int4.gembin")
    finding = report.findings[0]
    assert (finding.rule, finding.severity) == ("signature", Severity.WARNING)
    assert "gemmake sign" in finding.hint
    assert report.exit_code == 0


def test_other_kinds_of_weights_and_caches() -> None:
    half = check_file(GOLDEN / "v1.0/tiny-f16.gembin")
    assert line(half, "mask") == "\u2713 Dynamic sparse mask: not used (dense float32 KV cache)"
    assert line(half, "quantization") == "\u2713 Quantization parameters within int8 bounds"
    assert severity(half, "chat") is Severity.WARNING
    raw = check_file(GOLDEN / "v1.0/tiny-q4raw.gembin")
    assert line(raw, "mask") == "\u2713 Dynamic sparse mask: not used (dense float16 KV cache)"
    assert line(raw, "quantization") == "\u2713 Quantization parameters within int4 bounds"


def masked(**told: object) -> make.Golden:
    golden = make.build(make.MASKED)
    entries = manifest.decode(golden.records.manifest) | ({"kv_mask": told} if told else {})
    return changed(golden, manifest=manifest.encode(entries))


@pytest.mark.parametrize(
    ("covered", "mark", "text"),
    [(0.923, Severity.OK, "92.3%"), (1.0, Severity.OK, "100.0%"), (0.9, Severity.WARNING, "90.0%")],
)
def test_coverage_of_the_mask(tmp_path: Path, covered: float, mark: Severity, text: str) -> None:
    make.write(masked(covered=covered, units=4, partial=1), tmp_path / "a")
    report = check_file(tmp_path / "a")
    assert report.exit_code == 1  # the test vectors are blank
    wanted = f"Dynamic sparse mask covers {text} of attention heads (expected >90%)"
    assert line(report, "mask") == f"{mark.value} {wanted}"


def test_a_mask_of_which_nothing_is_recorded() -> None:
    report = check_file(GOLDEN / "v1.0/tiny-kvmask.gembin")
    assert report.exit_code == 0
    assert severity(report, "mask") is Severity.WARNING
    assert "1 of 4 KV heads keep a part, nothing is recorded" in line(report, "mask")
    assert "features" not in line(report, "layout")
    found = next(f for f in report.findings if f.rule == "kv-cache")
    assert found.line == (
        "\u2713 KV cache of 160 tokens: 0.01 MiB, 14.3% below 0.02 MiB without the mask; "
        "1 of 4 KV heads keep a part"
    )
    assert [" ".join(row.split()) for row in found.details[1:]] == [
        "0 4 of 4 100.0% 2 x all, in a window of 16 tokens",
        "1 8 of 10 80.0% 1+1, all",
    ]


QUALITY = {
    "kl": 0.0024, "top1": 0.971, "perplexity": -0.0003, "tokens": 9000,
    "answers": 200, "right": 121, "right_dense": 123,
}  # fmt: skip
GATE = {"kl": 0.005, "top1": 0.97, "perplexity": 0.005, "recall": 0.01}
CURVE = [[0, 0.0, 0.0, 1.0, 0.0, 0, 0, 0, 0], [7, 0.117, *QUALITY.values()]]


def test_quality_of_the_mask(tmp_path: Path) -> None:
    """As recorded, against the recorded gates."""
    told = {"covered": 1.0, "units": 4, "partial": 1, "quality": QUALITY, "curve": CURVE}
    for gate, mark, more in (
        (GATE, Severity.OK, ""),
        ({**GATE, "recall": 0.009}, Severity.WARNING, "; beyond the recorded gates"),
        ({**GATE, "kl": 0.002}, Severity.WARNING, "; beyond the recorded gates"),
    ):
        make.write(masked(**told, gate=gate), tmp_path / "a")
        report = check_file(tmp_path / "a")
        assert line(report, "kv-quality") == (
            f"{mark.value} KV mask on held-out text: KL 0.00240, equal best token 97.10%, "
            f"perplexity -0.03%, recall 60.5% (dense 61.5%) of 200 tokens{more}"
        )
    details = next(f for f in report.findings if f.rule == "kv-quality").details
    assert [" ".join(row.split())[:24] for row in details[1:]] == [
        "0.0% KL 0.00000, equal b",
        "11.7% KL 0.00240, equal ",
    ]


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"quality": QUALITY},
        {"quality": QUALITY, "gate": 3},
        {"quality": {**QUALITY, "right": -1}, "gate": GATE},
        {"quality": {**QUALITY, "kl": float("nan")}, "gate": GATE},
        {"quality": {**QUALITY, "kl": "0"}, "gate": GATE},
        {"quality": QUALITY, "gate": GATE, "curve": [["x"]]},
        {"quality": QUALITY, "gate": GATE, "curve": [[float("inf")] * 9]},
    ],
)
def test_quality_of_another_form_is_not_shown(tmp_path: Path, told: dict[str, object]) -> None:
    make.write(masked(covered=1.0, units=4, partial=1, **told), tmp_path / "a")
    report = check_file(tmp_path / "a")
    assert not any(f.rule == "kv-quality" for f in report.findings)
    make.write(masked(covered=1.0, units=4, partial=1, quality={"kl": 0.1, "top1": 0.9,
               "perplexity": 0.1, "tokens": 5}, gate={"kl": 1, "top1": 0, "perplexity": 1},
               curve=[[], [1.0] * 30]), tmp_path / "b")  # fmt: skip
    assert "KL 0.10000" in line(check_file(tmp_path / "b"), "kv-quality")


def test_values_of_4_bits_are_counted_and_those_of_8_listed() -> None:
    report = check_file(GOLDEN / "v1.0/tiny-value4.gembin")
    assert report.exit_code == 0
    assert "features" not in line(report, "layout")
    found = next(f for f in report.findings if f.rule == "kv-cache")
    assert found.line.endswith(
        "where heads keep all in 8 bits; 1 of 4 KV heads keep a part; values of 2 have 4 bits"
    )
    assert [" ".join(row.split()) for row in found.details[1:]] == [
        "0 4 of 4 100.0% all, all v4, in a window of 16 tokens",
        "1 8 of 10 80.0% 1+1 v4, all",
        "values of 8 bits, heads by layer: 0: 0; 1: 1",
    ]


def test_keys_of_4_bits_are_counted_and_those_of_8_listed() -> None:
    report = check_file(GOLDEN / "v1.0/tiny-key4.gembin")
    assert report.exit_code == 0
    found = next(f for f in report.findings if f.rule == "kv-cache")
    assert found.line.endswith(
        "1 of 4 KV heads keep a part; values of 2 have 4 bits; keys of 2 have 4 bits"
    )
    assert found.details[0].endswith("or all; k4: keys of 4 bits; v4: values of 4 bits")
    assert [" ".join(row.split()) for row in found.details[1:]] == [
        "0 4 of 4 100.0% all, all k4, in a window of 16 tokens",
        "1 8 of 10 80.0% 1+1 k4 v4, all v4",
        "values of 8 bits, heads by layer: 0: 0 1",
        "keys of 8 bits, heads by layer: 0: 0; 1: 1",
    ]


@pytest.mark.parametrize("kind", [make.VALUE4, make.KEY4], ids=lambda kind: kind.name)
def test_a_pinned_prompt_in_4_bits(tmp_path: Path, kind: make.Kind) -> None:
    """Levels of 0 to 14, two a byte, and scales behind them; 15 is none."""
    source, ids = GOLDEN / f"v1.0/{kind.name}.gembin", make.PINNED.pin
    bits = {"value4": kind.value4, "key4": kind.key4}
    with units.rewritten(source, tmp_path / "a", kind.keeps, **bits, pinned=Pinned(ids)) as out:
        out.fill("TEST", bytes(read_artifact(source).section("TEST")))
        out.seal()
        blocks = make.run_pin(Path(out.partial), ids)
        out.fill("PINP", blocks)
        out.finish()
    report = check_file(tmp_path / "a")
    assert severity(report, "pinned-prompt") is Severity.OK
    with read_artifact(tmp_path / "a") as artifact:
        assert artifact.pin is not None
        at = artifact.pin.rings[2].at + 5 * 8  # a row of 16 keys or values in 8 bytes
        at += 0 if artifact.units[2].key4 else 32 * (16 + 2)
    for bits_of_15 in (0x0F, 0xF0):
        wrong = blocks[:at] + bytes([blocks[at] | bits_of_15]) + blocks[at + 1 :]
        with units.rewritten(source, tmp_path / "b", kind.keeps, **bits, pinned=Pinned(ids)) as out:
            out.fill("PINP", wrong)
            out.finish()
        assert "layer 1, KV head 0: a value is no finite number" in line(
            check_file(tmp_path / "b"), "pinned-prompt"
        )


def test_a_mask_that_masks_nothing(write: Callable[[make.Golden], Path]) -> None:
    """Decided, and every head keeps everything: there is no KVMK."""
    golden = make.build(make.INT4)
    for covered, text in ((0.0, "not used (int8 KV cache"), (0.95, "covers 95.0% of attention")):
        mask = {"covered": covered, "units": 2, "partial": 0}
        entries = manifest.decode(golden.records.manifest) | {"kv_mask": mask}
        report = check_file(write(changed(golden, manifest=manifest.encode(entries))))
        assert text in line(report, "mask")
        assert severity(report, "mask") is Severity.OK
        assert report.exit_code == 0
        assert not any(f.rule == "kv-cache" for f in report.findings)


def test_a_signed_file_names_its_key(tmp_path: Path) -> None:
    raw = bytearray((GOLDEN / "v1.0/tiny-int4.gembin").read_bytes())
    raw[256] = 1
    raw[264:272] = bytes(range(8))
    (tmp_path / "a").write_bytes(raw)
    report = check_file(tmp_path / "a")
    assert "Ed25519 by key 0001020304050607, not verified" in line(report, "signature")


def hdf_with(golden: make.Golden, **tables: object) -> make.Golden:
    table = {**json.loads(golden.records.hdf), **tables}
    bound = {k: v for k, v in table.items() if k != "policy"}
    digest = hashlib.sha256(canonical_json(bound)).digest()
    return changed(golden, hdf=canonical_json(table), hdf_sha256=digest)


def test_the_layout_is_held_against_the_stored_board(write: Callable[[make.Golden], Path]) -> None:
    golden = make.build(make.INT4)
    report = check_file(write(changed(golden, target="another-board")))
    assert "header names another-board, the stored HDF is generic-x86-64" in line(report, "layout")
    assert report.exit_code == 1
    small = hdf_with(golden, memory={"size_mib": 2048, "unified": False, "visible_mib": 2000})
    report = check_file(write(small))
    assert "budget of 0 bytes in the header" in line(report, "layout")
    report = check_file(write(changed(golden, ram_budget=1000)))
    assert "budget of 1000 bytes in the header, 0 by the HDF" in line(report, "layout")


def test_a_plan_that_wastes_memory_is_found(write: Callable[[make.Golden], Path]) -> None:
    golden = make.build(make.INT4)
    plans = list(golden.records.plans)
    plans[-1] = replace(plans[-1], offset=plans[-1].offset + (1 << 20))
    report = check_file(write(changed(golden, plans=plans)))
    assert "without sharing" in line(report, "layout")


def test_feature_bits_must_be_those_that_are_needed(tmp_path: Path) -> None:
    raw = bytearray((GOLDEN / "v1.0/tiny-int4.gembin").read_bytes())
    raw[48] |= 0x40
    (tmp_path / "a").write_bytes(reseal(raw, sections=False))
    report = check_file(tmp_path / "a")
    assert "features 0x6b, the records need 0x2b" in line(report, "layout")


def test_damaged_weights_with_right_checksums(tmp_path: Path) -> None:
    raw = bytearray((GOLDEN / "v1.0/tiny-int4.gembin").read_bytes())
    place = section_range(raw, find(raw, "WHOT"))
    assert place is not None
    raw[place[0] + 256 + 2] = raw[place[0] + 256 + 3] = 0xFF
    (tmp_path / "a").write_bytes(reseal(raw))
    report = check_file(tmp_path / "a")
    assert report.exit_code == 1
    assert line(report, "quantization").startswith(
        "\u2717 Quantization parameters out of int4 bounds: t1.q has a super-scale"
    )


def test_rope_tables(write: Callable[[make.Golden], Path]) -> None:
    golden = make.build(make.INT4)
    for bad in (b"\0\0\x80\x3f", b"\0\0\xc0\x7f", b"\x01\0\x80\x3f"):
        rope = golden.records.rope[:100] + bad + golden.records.rope[104:]
        report = check_file(write(changed(golden, rope=rope)))
        wanted = Severity.OK if bad == b"\0\0\x80\x3f" else Severity.ERROR
        assert severity(report, "rope") is wanted


def test_stop_ids_are_shown() -> None:
    report = check_file(GOLDEN / "v1.0/tiny-int4.gembin")
    assert line(report, "stop-ids") == f"\u2713 Stop ids: {make.VOCAB - 1} '<end>'"


def test_test_vectors_that_were_never_made(tmp_path: Path) -> None:
    make.write(make.build(make.INT4), tmp_path / "a")
    report = check_file(tmp_path / "a")
    assert "2 of 2 were never filled in" in line(report, "test-vectors")
    assert report.exit_code == 1


def test_replaying_is_asked_for() -> None:
    path = GOLDEN / "v1.0/tiny-int4.gembin"
    seen: list[str] = []

    def good(subject: Subject) -> str:
        seen.append(subject.path)
        return ""

    report = check_file(path, good)
    assert seen == [str(path)]
    assert "2 of 2 replayed, same answer" in line(report, "test-vectors")
    report = check_file(path, lambda _subject: "the answer differs")
    assert line(report, "test-vectors") == "\u2717 Test vectors: the answer differs"
    assert report.exit_code == 1


@pytest.mark.parametrize("name", sorted(p.name for p in (GOLDEN / "refused").glob("*.gembin")))
def test_refused_files_have_one_finding_and_exit_6(name: str) -> None:
    report = check_file(GOLDEN / "refused" / name)
    assert report.exit_code == 6
    assert len(report.findings) == 1
    assert Code(report.code).name == name.split("-")[0]
    assert report.findings[0].severity is Severity.ERROR
    assert report.findings[0].hint


def test_every_rule_has_an_id_and_says_how_to_mend() -> None:
    ids = [rule.id for rule in rules.RULES]
    assert len(set(ids)) == len(ids)
    text = (Path(rules.__file__).parent / "README.md").read_text()
    for rule in rules.RULES:
        assert rule.__doc__
        assert f"| {rule.id} |" in text
    assert [i for i in ids if i in FIVE] == list(FIVE)


def test_golden_makers_agree_with_the_committed_files(tmp_path: Path) -> None:
    for kind in make.KINDS:
        path = GOLDEN / "v1.0" / f"{kind.name}.gembin"
        stored = path.read_bytes()
        place = section_range(stored, find(stored, "TEST"))
        assert place is not None
        tests = stored[place[0] : place[0] + place[1]]
        pin = partial(make.run_pin, ids=kind.pin) if kind.pin else None
        make.write(make.build(kind, tests), tmp_path / "a", pin=pin)
        assert (tmp_path / "a").read_bytes() == stored, kind.name
        assert len(stored) < 100 * 1024
    made = refused.damaged(GOLDEN / "v1.0")
    for name, image in made.items():
        assert (GOLDEN / "refused" / name).read_bytes() == image, name


def test_a_hardware_description_that_breaks_its_schema(
    write: Callable[[make.Golden], Path],
) -> None:
    report = check_file(write(hdf_with(make.build(make.INT4), board=7)))
    assert report.exit_code == 6
    assert Code(report.code) is Code.MANIFEST
