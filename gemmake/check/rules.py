"""The rules that gemcheck holds an artifact against: one class each.

A rule has an id, a hint for mending, and `check(subject)`, which gives a finding: one line of
text and how bad it is. Reading the file comes first; a file that cannot be read has one finding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import numpy as np

from gemmake.check import masks, pinned, weights
from gemmake.check.judged import judged
from gemmake.errors import TargetError
from gemmake.figures import mib
from gemmake.hdf import Hdf
from gemmake.passes import memplan, thermal
from gemmake.progress import Reporter, Silent
from gemmake.signing import read_public
from gemrun.format import cold, manifest, pins, sign, sizes, spec
from gemrun.format.codes import Code, FormatError
from gemrun.format.reader import Artifact, read_artifact
from gemrun.format.sign import PublicKey
from gemrun.format.spec import Buffer, Format, KvType, UnitFlag
from gemrun.format.writer import show

FATAL = 6  # exit code for a file that is damaged or was refused
BLANK_DIGEST = 0  # of a TEST record that was reserved and never filled
COVERED_LEAST = 0.9  # share of heads that a sparse mask is expected to cover
DENSE = {
    KvType.F32: "dense float32 KV cache",
    KvType.F16: "dense float16 KV cache",
    KvType.INT8: "int8 KV cache over all positions",
}


class Severity(Enum):
    """How bad a finding is; the value is its mark."""

    OK = "\u2713"
    WARNING = "\u26a0"
    ERROR = "\u2717"


@dataclass(frozen=True)
class Finding:
    """What a rule found. `text` is one line without its mark."""

    rule: str
    severity: Severity
    text: str
    hint: str = ""
    details: tuple[str, ...] = ()  # lines for --verbose

    @property
    def line(self) -> str:
        """The line as it is printed."""
        return f"{self.severity.value} {self.text}"


@dataclass(frozen=True)
class Subject:
    """What the rules look at."""

    artifact: Artifact
    hdf: Hdf
    path: str
    run: Replay | None = None
    keys: Sequence[PublicKey] = ()  # of which one has to have signed


#: Replays the test vectors of a file; gives an error sentence or "".
Replay = Callable[[Subject], str]


class Rule:
    """Base of the rules."""

    id = ""
    hint = ""

    def check(self, subject: Subject) -> Finding | None:
        """The finding, or None where there is nothing to say."""
        raise NotImplementedError

    def ok(self, text: str) -> Finding:
        """All is well."""
        return Finding(self.id, Severity.OK, text)

    def warn(self, text: str) -> Finding:
        """Worth knowing; does not fail the check."""
        return Finding(self.id, Severity.WARNING, text, self.hint)

    def fail(self, text: str) -> Finding:
        """The artifact must not be shipped."""
        return Finding(self.id, Severity.ERROR, text, self.hint)


class Integrity(Rule):
    """Structure and every checksum: the reader has checked them, or the file was refused."""

    id = "integrity"
    hint = "copy the file again, or compile it again"

    def check(self, subject: Subject) -> Finding:
        """Says what was verified."""
        h = subject.artifact.header
        return self.ok(
            f"Structure and checksums: {len(subject.artifact.sections)} sections, "
            f"{h.file_size} bytes, root {h.root_sha256.hex()[:16]}"
        )


class SignatureRule(Rule):
    """The signature block, held against the keys that were given."""

    id = "signature"
    hint = "sign the artifact with gemmake sign; without --key an unsigned one passes"

    def check(self, subject: Subject) -> Finding:
        """Without keys nothing can fail: unsigned is a warning, and a signature is named.

        With keys the artifact has to be signed by one of them.
        """
        block, found = subject.artifact.signature, self.fail if subject.keys else self.warn
        if block.alg == 0:
            return found("Model signature: none")
        named = f"Ed25519 by key {block.key_id.hex()}"
        if not subject.keys:
            return self.warn(f"Model signature: {named}, not verified (no key given)")
        keys = [key for key in subject.keys if key.id == block.key_id]
        if not keys:
            return self.fail(f"Model signature: {named}, which is none of those given")
        try:
            root = subject.artifact.header.root_sha256  # the reader has recomputed it
            valid = any(sign.matches(key, block, root) for key in keys)
        except sign.Unavailable as error:
            return Finding(self.id, Severity.ERROR, f"Model signature: {error}")
        if valid:
            return self.ok("Model signature valid")
        text = f"Model signature invalid: {named}, but not over this artifact"
        return Finding(self.id, Severity.ERROR, text, "get the artifact again from its signer")


class Layout(Rule):
    """The memory plan and totals, recomputed from the records and the stored board."""

    id = "layout"
    hint = "compile again for this target"

    def check(self, subject: Subject) -> Finding:
        """The first disagreement, or that there is none."""
        problem = next(_layout_problems(subject.artifact, subject.hdf), None)
        if problem:
            return self.fail(f"Memory layout inconsistent with target HDF: {problem}")
        return self.ok("Memory layout consistent with target HDF")


def _layout_problems(artifact: Artifact, hdf: Hdf) -> Iterator[str]:
    header = artifact.header
    target = spec.field_text(header.target)
    if target != hdf.id:
        yield f"header names {target}, the stored HDF is {hdf.id}"
    buffers = [
        memplan.Buffer(p.kind, Buffer(p.kind).name, p.size, p.first_op, p.last_op, p.offset)
        for p in artifact.plans
    ]
    try:
        memplan.verify(buffers)
    except ValueError as error:
        yield str(error)
    naive = memplan.arena_size(memplan.naive(buffers))
    if header.ram_arena > sizes.pad(naive, sizes.PAGE):
        yield f"arena of {header.ram_arena} bytes, {naive} without sharing"
    budget = hdf.budget_bytes()
    if header.ram_budget != budget:
        yield f"budget of {header.ram_budget} bytes in the header, {budget} by the HDF"
    if budget and header.ram_total > budget:
        yield f"needs {header.ram_total} bytes, the target grants {budget}"
    ram = header.ram_arena + header.ram_kv + header.ram_engine
    if hdf.bare and hdf.memory is not None and ram > hdf.ram_bytes():
        yield f"needs {ram} bytes of RAM, the target grants {hdf.ram_bytes()}"
    features = sizes.features_of(artifact.conf, artifact.segments, artifact.units)
    if header.required_features != features:
        yield f"features {header.required_features:#x}, the records need {features:#x}"
    yield from _cold_problems(artifact)


def _cold_problems(artifact: Artifact) -> Iterator[str]:
    """Weights that do not stay in memory, against what the header counts of them."""
    problem = cold.problem(artifact.cold, artifact.tensors)
    if problem:
        yield f"section COLD: {problem}"
        return
    weights = artifact.sections["WHOT"]
    held = cold.resident(artifact.conf, artifact.tensors, artifact.cold, weights.size)
    if weights.mem_size != held:
        yield f"{weights.mem_size} bytes of weights in memory, the records say {held}"


class Support(Rule):
    """The board support package that the artifact was built for."""

    id = "bsp"

    def check(self, subject: Subject) -> Finding | None:
        """Its version, where one is stated; what a device has only the device can tell."""
        version = subject.hdf.bsp_version
        if version is None:
            return None
        return self.ok(
            f"Board support package: built for {version} (gemrun --doctor compares the device's)"
        )


class Offload(Rule):
    """Weights that do not stay in memory."""

    id = "offload"

    def check(self, subject: Subject) -> Finding | None:
        """How many there are, where there are any; the layout says whether that is right."""
        artifact = subject.artifact
        if not artifact.cold or cold.problem(artifact.cold, artifact.tensors):
            return None
        planes = list(cold.planes(artifact.cold, artifact.tensors))
        rows = sum(plane.size for plane in planes if plane.by is spec.ColdBy.ROWS)
        weights = artifact.sections["WHOT"]
        return self.ok(
            f"Weights: {mib(weights.mem_size)} of {mib(weights.size)} are in memory at once; "
            f"{mib(cold.streamed(artifact.cold, artifact.tensors))} are read from storage for "
            f"every token, {mib(rows)} by rows"
        )


class Quantisation(Rule):
    """Scales, zero points, codes and padding of every tensor."""

    id = "quantization"
    hint = "compile again; the bytes did not come from gemmake"

    def check(self, subject: Subject) -> Finding:
        """The first tensors that break a bound."""
        name = _width(subject.artifact)
        found = list(weights.problems(subject.artifact))
        if found:
            first = f"{found[0].tensor} {found[0].text}"
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            return self.fail(f"Quantization parameters out of {name} bounds: {first}{more}")
        if name == "float":
            return self.ok("Quantization parameters: none (float weights, all finite)")
        return self.ok(f"Quantization parameters within {name} bounds")


def _width(artifact: Artifact) -> str:
    """What the bodies of the layers are stored as."""
    formats = {s.format for s in artifact.segments}
    if formats & {Format.Q4H, Format.Q4RAW_F16, Format.Q4RAW_BF16}:
        return "int4"
    return "int8" if formats & {Format.Q8, Format.Q8_ROWS} else "float"


class Mask(Rule):
    """Coverage of the sparse KV mask: heads whose budget was decided on enough samples."""

    id = "mask"
    hint = "compile with a higher --prefill-sample-ratio, or with --kv-cache-type int8"

    def check(self, subject: Subject) -> Finding:
        """What the compile recorded; how many heads keep a part where it recorded nothing."""
        artifact = subject.artifact
        told, partial = artifact.manifest.get(manifest.KV_MASK), masks.partial(artifact)
        if told is None and partial:
            text = (
                f"Dynamic sparse mask: {partial} of {len(artifact.units)} KV heads keep a part, "
                "nothing is recorded about how that was decided"
            )
            hint = "compile with --kv-cache-type dynamic-sparse, which measures and records it"
            return Finding(self.id, Severity.WARNING, text, hint)
        if not partial and (told is None or told["covered"] == 0):
            return self.ok(
                f"Dynamic sparse mask: not used ({DENSE[KvType(artifact.conf.kv_type)]})"
            )
        covered = float(told["covered"]) if told else 0.0
        found = self.ok if covered > COVERED_LEAST else self.warn
        return found(
            f"Dynamic sparse mask covers {covered:.1%} of attention heads "
            f"(expected >{COVERED_LEAST:.0%})"
        )


class Cache(Rule):
    """What the mask saves of the KV cache."""

    id = "kv-cache"

    def check(self, subject: Subject) -> Finding | None:
        """Against the same cache in which every head keeps all of its layer's window."""
        artifact = subject.artifact
        if not artifact.units:
            return None
        size = sizes.rings_size(artifact.conf, artifact.layers, artifact.units)
        dense = sizes.rings_size(artifact.conf, artifact.layers)
        rows = list(masks.table(artifact))
        narrow = [
            (name, count, masks.wide(artifact, flag))
            for name, count, flag in (
                ("values", masks.value4(artifact), UnitFlag.VALUE4),
                ("keys", masks.key4(artifact), UnitFlag.KEY4),
            )
            if count
        ]
        beside = "where heads keep all in 8 bits" if narrow else "without the mask"
        text = (
            f"KV cache of {artifact.conf.context} tokens: {mib(size)}, {1 - size / dense:.1%} "
            f"below {mib(dense)} {beside}; {masks.partial(artifact)} of "
            f"{len(artifact.units)} KV heads keep a part"
        )
        for name, count, wide in narrow:
            text += f"; {name} of {count} have 4 bits"
            rows += [f"{name} of 8 bits, heads by layer: {wide}"] if wide else []
        return replace(self.ok(text), details=tuple(rows))


class MaskQuality(Rule):
    """What the mask costs, as the compile measured it."""

    id = "kv-quality"
    hint = "compile again: gemmake takes no mask that does not pass its gates"

    def check(self, subject: Subject) -> Finding | None:
        """The recorded figures against the recorded gates; what else was judged, with --verbose."""
        artifact = subject.artifact
        told = judged(artifact.manifest.get(manifest.KV_MASK))
        if told is None or not masks.partial(artifact):
            return None
        found = self.ok if told.passed else self.warn
        text = f"KV mask on held-out text: {told.text}"
        finding = found(text if told.passed else f"{text}; beyond the recorded gates")
        return replace(finding, details=tuple(told.table()))


class Temperature(Rule):
    """The throttle threshold against what the board allows for continuous load."""

    id = "temperature"
    hint = "compile with --throttle-mode aggressive, or a lower --temperature-threshold"
    heeded = "the artifact's throttle mode begins at the limit already; the threshold is above it"
    late = "the kernel throttles first; compile with a lower --temperature-threshold"

    def check(self, subject: Subject) -> Finding:
        """A threshold above the continuous limit is a warning, unless the target's policy has it.

        The policy names both temperatures: its own board keeps to them, and nobody chose wrongly.
        """
        stored = subject.artifact.thermal
        threshold, limit = stored.threshold_c, stored.device_max_c
        if threshold == 0:
            return self.ok("Temperature threshold not set (the kernel's trips apply)")
        text = f"Temperature threshold {threshold:g}\u00b0C"
        if limit == 0:
            passive = subject.hdf.passive_c
            if passive is not None and threshold >= passive:
                text += f" is not below the kernel's passive trip ({passive:g}\u00b0C)"
                return replace(self.warn(text), hint=self.late)
            return self.ok(f"{text} (the target states no limit for continuous load)")
        if threshold <= limit:
            return self.ok(f"{text} within device spec for continuous load (max {limit:g}\u00b0C)")
        if _is_policy(subject):
            return self.ok(f"{text} (policy of the target; continuous limit {limit:g}\u00b0C)")
        text += f" exceeds device spec for continuous load (max {limit:g}\u00b0C)"
        ladder = subject.artifact.ladder
        if ladder is not None and 0 < ladder.engage_c <= limit:
            return replace(self.warn(f"{text}; the ladder begins below it"), hint=self.heeded)
        return self.warn(f"{text} \u2014 recommend --throttle-mode aggressive")


class ThermalLadder(Rule):
    """What an engine that is told the temperature does, against the target and the options."""

    id = "ladder"
    hint = "compile again"

    def check(self, subject: Subject) -> Finding | None:
        """Its beginning must be what options and target say; artifacts from before have none."""
        ladder, options = subject.artifact.ladder, subject.artifact.manifest["options"]
        if ladder is None:
            return None
        mode = spec.Mode(ladder.mode)
        text = f"Throttle mode {mode.name.lower()}: {ladder.rung_count} rungs"
        wanted = thermal.ladder(subject.hdf, options.get("temperature_threshold"), mode)
        told = options.get("throttle_mode", spec.Mode.BALANCED.name.lower())
        if told != mode.name.lower() or np.float32(wanted.engage_c) != np.float32(ladder.engage_c):
            return self.warn(
                f"{text} from {ladder.engage_c:g}\u00b0C, the options say {told} and "
                f"{wanted.engage_c:g}\u00b0C"
            )
        if ladder.engage_c == 0:
            return self.ok(f"{text}, no limit is known (the kernel's trips apply)")
        return self.ok(
            f"{text} from {ladder.engage_c:g}\u00b0C, down again at {ladder.release_c:g}\u00b0C"
        )


def _is_policy(subject: Subject) -> bool:
    """Whether the threshold is what the stored HDF says and no option of the compile named one."""
    asked = subject.artifact.manifest["options"].get("temperature_threshold")
    policy = subject.hdf.throttle_c
    if asked is not None or policy is None:
        return False
    return bool(np.float32(policy) == np.float32(subject.artifact.thermal.threshold_c))


class Tables(Rule):
    """RoPE tables: finite, and cosines and sines."""

    id = "rope"
    hint = "compile again"

    def check(self, subject: Subject) -> Finding:
        """Looks at every value."""
        artifact = subject.artifact
        data = np.frombuffer(artifact.section("ROPE"), np.uint8)
        for index, rope in enumerate(artifact.ropes):
            end = rope.offset + 8 * rope.pairs * rope.positions
            values = data[rope.offset : end].view("<f4")
            if not (np.abs(values) <= 1).all():  # false for NaN too
                return self.fail(f"RoPE table {index} has a value outside -1..1")
        return self.ok(f"RoPE tables: {len(artifact.ropes)}, all values within -1..1")


class StopIds(Rule):
    """The ids that end an answer."""

    id = "stop-ids"
    hint = "name the end-of-turn token in generation_config.json and compile again"

    def check(self, subject: Subject) -> Finding:
        """Lists them, since a missing one shows only as endless answers."""
        tokenizer = subject.artifact.tokenizer
        if not tokenizer.stop_ids:
            return self.warn("Stop ids: none, answers end only at their length limit")
        names = [
            f"{i} {tokenizer.piece(i).decode('utf-8', 'backslashreplace')!r}"
            for i in tokenizer.stop_ids
        ]
        return self.ok(f"Stop ids: {', '.join(names)}")


class Chat(Rule):
    """The chat template."""

    id = "chat"
    hint = "compile a checkpoint that has a chat template, if conversations are wanted"

    def check(self, subject: Subject) -> Finding:
        """Base models have none; that is no fault."""
        template = subject.artifact.template
        if template is None:
            return self.warn("Chat template: none, plain prompts only")
        return self.ok(f"Chat template: {template.header.n_item} items")


class Vectors(Rule):
    """The stored test vectors are there and were filled in."""

    id = "test-vectors"
    hint = "compile again to the end"

    def check(self, subject: Subject) -> Finding:
        """Replays them where that was asked for."""
        tests = subject.artifact.tests
        blank = sum(1 for t in tests if t.digest == BLANK_DIGEST)
        if blank:
            return self.fail(f"Test vectors: {blank} of {len(tests)} were never filled in")
        if subject.run is None:
            tokens = sum(t.prompt_count + t.step_count for t in tests)
            return self.ok(f"Test vectors: {len(tests)} stored, {tokens} tokens (--run replays)")
        problem = subject.run(subject)
        if problem:
            return self.fail(f"Test vectors: {problem}")
        return self.ok(f"Test vectors: {len(tests)} of {len(tests)} replayed, same answer")


class Pinned(Rule):
    """The keys and values of a pinned prompt: numbers that can be; with --run, the right ones."""

    id = "pinned-prompt"
    hint = "compile again; the bytes did not come from gemmake"

    def check(self, subject: Subject) -> Finding | None:
        """Computes them again where the test vectors are replayed, too."""
        pin = subject.artifact.pin
        if pin is None:
            return None
        problem = pinned.problem(subject.artifact)
        if not problem and subject.run is not None:
            problem = pinned.replay(subject.artifact, subject.path)
        if problem:
            return self.fail(f"Pinned prompt: {problem}")
        size = subject.artifact.sections[pins.NAME].size
        how = "" if subject.run is None else ", computed again: the same bytes"
        return self.ok(f"Pinned prompt: {len(pin.ids)} tokens, {mib(size)}{how}")


RULES: tuple[Rule, ...] = (
    SignatureRule(),
    Integrity(),
    Layout(),
    Support(),
    Offload(),
    Quantisation(),
    Mask(),
    Cache(),
    MaskQuality(),
    Temperature(),
    ThermalLadder(),
    Tables(),
    StopIds(),
    Chat(),
    Vectors(),
    Pinned(),
)


@dataclass(frozen=True)
class Report:
    """All findings about one file."""

    path: str
    findings: tuple[Finding, ...]
    exit_code: int  # 0, also with warnings; 1 a rule failed; 6 the file was refused
    root_sha256: str = ""
    size: int = 0  # bytes
    code: int = 0  # of the refusal, see csrc/gemrun.h


def check_file(
    path: str | os.PathLike[str],
    run: Replay | None = None,
    rules: Sequence[Rule] = RULES,
    keys: Sequence[PublicKey] = (),
) -> Report:
    """Hold a file against the rules. Never raises for what is wrong with the file.

    keys: one of them has to have signed it; without any a signature is only named.
    """
    name = os.fspath(path)
    try:
        artifact = read_artifact(name)
    except FormatError as error:
        return _refused(name, error)
    with artifact:
        try:
            hdf = Hdf.model_validate_json(bytes(artifact.section("HDFJ")))
        except (TargetError, ValueError) as error:
            what = f"section HDFJ: {str(error).splitlines()[0]}"
            return _refused(name, FormatError(Code.MANIFEST, what, "compile the artifact again"))
        subject = Subject(artifact, hdf, name, run, keys)
        found = tuple(f for f in (rule.check(subject) for rule in rules) if f is not None)
        failed = any(f.severity is Severity.ERROR for f in found)
        header = artifact.header
        return Report(name, found, int(failed), header.root_sha256.hex(), header.file_size)


READ_RULES = {
    Code.OPEN: "open",
    Code.SECTION_CRC: "crc",
    Code.WEIGHTS_CRC: "crc",
    Code.HEADER_CRC: "crc",
    Code.TABLE_CRC: "crc",
    Code.SHA256: "sha256",
    Code.ROOT: "root",
    Code.MANIFEST: "manifest",
}


def reason(path: str, error: FormatError) -> str:
    """What is wrong with a file, without the file's name: a failed open has it, others do not."""
    return str(error).removeprefix(f"{show(path)}: ")


def _refused(path: str, error: FormatError) -> Report:
    what, _, remedy = reason(path, error).partition("; ")
    finding = Finding(READ_RULES.get(error.code, "structure"), Severity.ERROR, what, remedy)
    return Report(path, (finding,), FATAL, code=int(error.code))


def replay(subject: Subject, reporter: Reporter | None = None) -> str:
    """Replay the stored test vectors in the engine; an error sentence, or "" when all passed."""
    reporter, tests = reporter or Silent(), subject.artifact.tests
    reporter.start("replaying test vectors", sum(t.prompt_count + t.step_count for t in tests))
    try:
        from gemrun import GemRunContext, GemRunError  # the engine is wanted only here
    except ImportError as error:
        return f"not replayed, the engine is not installed ({error})"
    try:
        with GemRunContext(subject.path, ignore_memory=True, allow_foreign_board=True) as engine:
            for number, test in enumerate(tests, 1):
                made = engine.test_vector(test.prompt[: test.prompt_count], test.step_count)
                if made != (test.digest, list(test.steps[: test.step_count])):
                    return (
                        f"number {number} of {len(tests)} gave another answer; do not use this "
                        "machine or build, and report it"
                    )
                reporter.advance(test.prompt_count + test.step_count)
    except GemRunError as error:
        return str(error)
    return ""


def report_on(
    names: Sequence[str],
    run: Replay | None,
    as_words: Callable[[Sequence[Report]], str],
    echo: Callable[[str], None],
    key_files: Sequence[str] = (),
) -> int:
    """Check files and print what was found; the exit code is that of the worst. UsageError."""
    keys = [read_public(Path(name)) for name in key_files]
    reports = [check_file(name, run, keys=keys) for name in names]
    echo(as_words(reports))
    return max(report.exit_code for report in reports)
