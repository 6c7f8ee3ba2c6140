"""What a compile was asked to do: one frozen record, checked once."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from gemmake.errors import UsageError
from gemrun.format.writer import show


class Quantization(str, Enum):
    """Weights of the layers: 4 bits, 8 bits, or float32 as they are."""

    INT4 = "int4"
    INT8 = "int8"
    NONE = "none"


class KvType(str, Enum):
    """KV cache: float (f32 with float weights, else f16); int8 with group scales; int8 where heads
    that lose little by it keep a part of the context (measured, see gemmake/kvmask)."""

    DENSE = "dense"
    INT8 = "int8"
    DYNAMIC_SPARSE = "dynamic-sparse"


class KvValues(str, Enum):
    """Values of an int8 KV cache: all in 8 bits, or in 4 where a head loses little by it (measured,
    see gemmake/kvmask)."""

    INT8 = "int8"
    INT4 = "int4"


class KvKeys(str, Enum):
    """Keys of an int8 KV cache, likewise; 4 bits cost more in keys than in values."""

    INT8 = "int8"
    INT4 = "int4"


class Effort(str, Enum):
    """full: error feedback for int4 codes and measured groups of the int8 KV cache, over a text;
    fast: search of bounds and the usual groups."""

    FULL = "full"
    FAST = "fast"


class ThrottleMode(str, Enum):
    """What an engine that is told the temperature does: rungs from the threshold up; with
    performance from the kernel's trip, aggressive from the board's continuous limit and two at a
    time, conservative with half the time and threads from the start, silent less and from 10 °C
    below."""

    BALANCED = "balanced"
    PERFORMANCE = "performance"
    AGGRESSIVE = "aggressive"
    CONSERVATIVE = "conservative"
    SILENT = "silent"


class Int4Format(str, Enum):
    """q4h: 8-bit scale and fractional zero point; q4raw: 16-bit scale, zero point 8, which imports
    such lattices exactly."""

    Q4H = "q4h"
    Q4RAW = "q4raw"


class Profile(str, Enum):
    """lite: for devices of 256 MB: a short context and prefill step unless they are named, an int8
    KV cache, and of head and embedding the high plane in memory, the low one read by rows."""

    STANDARD = "standard"
    LITE = "lite"


class Offload(str, Enum):
    """Weights that do not stay in memory: rows: embedding and low plane of the head, read by rows;
    ffn: these, and feed-forward blocks, streamed for every token; all: every matrix; auto: no more
    than the budget asks for, where the target's storage is described."""

    AUTO = "auto"
    NONE = "none"
    ROWS = "rows"
    FFN = "ffn"
    ALL = "all"


class Storage(str, Enum):
    """Kind of storage that loading and weights that do not stay in memory are predicted for."""

    SD = "sd"
    EMMC = "emmc"
    USB = "usb"
    SATA = "sata"
    NVME = "nvme"


#: Tokens of context and of a prefill step where the command names none.
CONTEXT = {Profile.STANDARD: 1024, Profile.LITE: 512}
CHUNK = {Profile.STANDARD: 128, Profile.LITE: 32}

MEMORY_LAYOUT = "compile-time-deterministic"
MIN_CONTEXT = 2  # a prompt and an answer, one token each
MAX_CONTEXT = 1 << 20
MAX_THREADS = 8
MAX_WORKERS = 64
MAX_CHUNK = 4096
MAX_RESERVE = 1 << 20  # MiB
LEAST_FRACTION = 0.01  # of the memory; also of a description's policy


@dataclass(frozen=True)
class KvGate:
    """What a sparse cache may cost on held-out text, against the same weights with a full one."""

    kl: float = 0.005  # mean Kullback-Leibler divergence, nats a token
    top1: float = 0.97  # share of tokens with the same best next token
    perplexity: float = 0.005  # relative rise
    recall: float = (
        0.01  # share of the tokens of recalled answers that it may get wrong in addition
    )


@dataclass(frozen=True)
class CompileOptions:
    """Everything that decides the bytes of an artifact, and where it goes.

    `context` is the compiled KV cache size in tokens, `chunk` the tokens of a prefill step,
    `run_threads` the thread count that the memory total is stated for (None: from the target).
    `workers` (0: all cores), `baseline` (no instruction sets above the build's own, scalar engine),
    `power_mode`, `storage` and everything about output never change a byte.
    """

    model: Path
    target: str
    output: Path
    bsp_version: str | None = None  # of the board support package; None: the target's
    quantization: Quantization = Quantization.INT4
    kv_type: KvType = KvType.INT8
    kv_values: KvValues = KvValues.INT8
    kv_keys: KvKeys = KvKeys.INT8
    context: int = 1024
    chunk: int = 128
    profile: Profile = Profile.STANDARD
    offload: Offload = Offload.AUTO
    reserve_mib: int | None = None  # left to everything else; None: the target's policy
    ram_fraction: float | None = None  # of memory that a model may take; None: likewise
    run_threads: int | None = None
    temperature_threshold: float | None = None
    throttle_mode: ThrottleMode = ThrottleMode.BALANCED
    power_mode: str | None = None  # that speed is predicted for; None: the target's default
    storage: Storage | None = None  # likewise; None: the target's, else the usual kind
    config: Path | None = None
    effort: Effort = Effort.FULL
    int4_format: Int4Format = Int4Format.Q4H
    calibration: Path | None = None
    sample_ratio: float = 0.1  # of 10,000 windows, where KV heads are measured
    kv_gate: KvGate = KvGate()
    kv_minutes: float | None = None  # for measuring a sparse cache, at most; None: all windows
    pin_prompt: str | None = None  # a text whose keys and values are stored; : that of a file
    pin_system: bool = False  # it is a system message, not the beginning of raw prompts
    statistics: Path | None = None  # a calibration record to use (record.py)
    save_statistics: Path | None = None  # one to make with torch, and to use
    dump_after: tuple[str, ...] = ()
    verbose: bool = False
    workers: int = 0
    baseline: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers out of their ranges. Raises UsageError."""
        _within("--kv-cache-size", self.context, MIN_CONTEXT, MAX_CONTEXT, "tokens")
        _within("--prefill-chunk", self.chunk, 1, MAX_CHUNK, "tokens")
        _within("--workers", self.workers, 0, MAX_WORKERS, "threads")
        check_share("--reserve", self.reserve_mib, self.ram_fraction)
        if self.profile is Profile.LITE and self.kv_type is KvType.DENSE:
            raise UsageError(
                "--profile lite: has a KV cache of 8 bits; use --kv-cache-type int8 or "
                "dynamic-sparse"
            )
        for option, given in (
            ("--statistics", self.statistics),
            ("--save-statistics", self.save_statistics),
        ):
            if given is not None and not self.feedback:
                raise UsageError(
                    f"{option}: serves error feedback, which this compile does not use; "
                    "use it with --quantization int4 --int4-format q4h --effort full"
                )
        if self.pin_system and self.pin_prompt is None:
            raise UsageError("--pin-system: says what --pin-prompt is; give that too")
        if self.statistics is not None and self.save_statistics is not None:
            raise UsageError("--save-statistics: uses what it makes; leave --statistics out")
        for part in self.narrow if self.kv_type is KvType.DENSE else ():
            raise UsageError(
                f"--kv-{part} int4: the cache of --kv-cache-type dense has no {part} in int8; "
                "use it with int8 or dynamic-sparse"
            )
        _within("--prefill-sample-ratio", self.sample_ratio, 0.001, 1, "of the windows")
        _within("--kv-gate kl", self.kv_gate.kl, 0, 10, "nats")
        _within("--kv-gate top1", self.kv_gate.top1, 0, 1, "of the tokens")
        _within("--kv-gate perplexity", self.kv_gate.perplexity, 0, 10, "times")
        _within("--kv-gate recall", self.kv_gate.recall, 0, 1, "of the answers")
        if self.kv_minutes is not None:
            _within("--kv-minutes", self.kv_minutes, 0.1, 10_000, "minutes")
        if self.run_threads is not None:
            _within("--run-threads", self.run_threads, 1, MAX_THREADS, "threads")
        if self.temperature_threshold is not None:
            _within("--temperature-threshold", self.temperature_threshold, 30, 125, "°C")

    @property
    def feedback(self) -> bool:
        """Whether codes are found with error feedback over the calibration text."""
        q4h = self.int4_format is Int4Format.Q4H
        return self.effort is Effort.FULL and self.quantization is Quantization.INT4 and q4h

    @property
    def measured_kv(self) -> bool:
        """Whether groups of the KV cache are chosen by measurement over the calibration text."""
        return self.effort is Effort.FULL and self.kv_type is not KvType.DENSE

    @property
    def sparse(self) -> bool:
        """Whether KV heads may keep a part of the context."""
        return self.kv_type is KvType.DYNAMIC_SPARSE

    @property
    def narrow(self) -> tuple[str, ...]:
        """What of KV heads may have 4 bits: "values", "keys"."""
        values = ("values",) if self.kv_values is KvValues.INT4 else ()
        return values + (("keys",) if self.kv_keys is KvKeys.INT4 else ())

    @property
    def offloaded(self) -> Offload:
        """What does not stay in memory whatever the budget is."""
        if self.offload is not Offload.AUTO:
            return self.offload
        return Offload.ROWS if self.profile is Profile.LITE else Offload.NONE

    @property
    def judged(self) -> bool:
        """Whether something about KV heads is decided on the finished weights."""
        return self.sparse or bool(self.narrow)

    def recorded(self) -> dict[str, object]:
        """The options that decide bytes, for the manifest: no paths, no thread counts.

        The target, the calibration text and a pinned prompt stand there by their own names and
        hashes.
        """
        judged: dict[str, object] = {
            "kv_gate": asdict(self.kv_gate),
            "kv_minutes": self.kv_minutes,
            "prefill_sample_ratio": self.sample_ratio,
        }
        narrow: dict[str, object] = {f"kv_{part}": "int4" for part in self.narrow}
        memory: dict[str, object] = {
            "profile": self.profile.value,
            "offload": self.offload.value,
            "reserve_mib": self.reserve_mib,
            "ram_fraction": self.ram_fraction,
        }
        usual: dict[str, object] = {
            "profile": Profile.STANDARD.value, "offload": Offload.AUTO.value
        }  # fmt: skip
        return (
            (judged if self.judged else {})
            | narrow
            | {k: v for k, v in memory.items() if v not in (None, usual.get(k))}
            | {
                "chunk": self.chunk,
                "context": self.context,
                "effort": self.effort.value,
                "int4_format": self.int4_format.value,
                "kv_cache_type": self.kv_type.value,
                "memory_layout": MEMORY_LAYOUT,
                "quantization": self.quantization.value,
                "run_threads": self.run_threads,
                "temperature_threshold": self.temperature_threshold,
                "throttle_mode": self.throttle_mode.value,
            }
        )

    def share(self, but: CompileOptions | None = None) -> str:
        """The options by which the caller chose the budget; `but`: those that are not alike there.
        Empty where it is the target's."""
        named = (("--reserve", self.reserve_mib), ("--ram-fraction", self.ram_fraction))
        others = (but.reserve_mib, but.ram_fraction) if but is not None else (None, None)
        pairs = zip(named, others, strict=True)
        return " ".join(f"{name} {value:g}" for (name, value), other in pairs
                        if value is not None and value != other)  # fmt: skip

    def command(self) -> str:
        """The command of these options, to copy: what is not as usual."""
        usual = asked(self.profile, model=self.model, target=self.target, output=self.output)
        usual = replace(usual, profile=Profile.STANDARD)
        words = ["gemmake"]
        for option, field in COMMAND:
            value = getattr(self, field)
            if field in ("model", "target", "output") or value != getattr(usual, field):
                words += [option] if value is True else [option, _word(value)]
        return shlex.join(words)


def asked(
    profile: Profile, context: int | None = None, chunk: int | None = None, **others: Any
) -> CompileOptions:
    """Options whose context and prefill step are the profile's where none is named."""
    context = CONTEXT[profile] if context is None else context
    chunk = CHUNK[profile] if chunk is None else chunk
    return CompileOptions(profile=profile, context=context, chunk=chunk, **others)


#: The options that `CompileOptions.command` repeats, and their fields.
COMMAND = (
    ("--model", "model"), ("--config", "config"), ("--target", "target"),
    ("--bsp-version", "bsp_version"),
    ("--profile", "profile"), ("--quantization", "quantization"),
    ("--int4-format", "int4_format"), ("--effort", "effort"),
    ("--kv-cache-type", "kv_type"), ("--kv-values", "kv_values"), ("--kv-keys", "kv_keys"),
    ("--kv-cache-size", "context"), ("--prefill-chunk", "chunk"), ("--run-threads", "run_threads"),
    ("--offload", "offload"),
    ("--reserve", "reserve_mib"), ("--ram-fraction", "ram_fraction"),
    ("--temperature-threshold", "temperature_threshold"), ("--throttle-mode", "throttle_mode"),
    ("--power-mode", "power_mode"), ("--storage", "storage"),
    ("--calibration", "calibration"),
    ("--prefill-sample-ratio", "sample_ratio"), ("--kv-minutes", "kv_minutes"),
    ("--kv-gate", "kv_gate"), ("--statistics", "statistics"), ("--pin-prompt", "pin_prompt"),
    ("--pin-system", "pin_system"), ("--save-statistics", "save_statistics"),
    ("--output", "output"),
)  # fmt: skip


def _word(value: object) -> str:
    if isinstance(value, KvGate):
        return ",".join(f"{name}={number}" for name, number in asdict(value).items())
    return show(str(value.value if isinstance(value, Enum) else value))


def check_share(option: str, reserve_mib: int | None, ram_fraction: float | None) -> None:
    """Refuse a budget of the caller's own that is out of range; `option` sets what is reserved.
    Raises UsageError."""
    if reserve_mib is not None:
        _within(option, reserve_mib, 0, MAX_RESERVE, "MiB")
    if ram_fraction is not None:
        _within("--ram-fraction", ram_fraction, LEAST_FRACTION, 1, "of the memory")


def _within(option: str, value: float, low: float, high: float, unit: str) -> None:
    if not low <= value <= high:
        raise UsageError(f"{option}: {value} {unit} is out of range; use {low} to {high} {unit}")
