"""Hardware description files: what a board is, as gemmake and gemcheck need to know it.

An HDF is TOML (`hdf/README.md` lists every field). It may inherit from base files; the resolved
description is checked against the schema below: unknown keys are refused, every quantity carries
its unit in its name, and what is unknown is absent. `Hdf.canonical_json` is the one byte form that
an artifact stores. Its hash leaves out the `policy` table: an operator may edit that, and artifacts
stay valid.

    load_hdf(target) = validate(resolve(target)), raises TargetError
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema

from gemmake.errors import TargetError, UsageError
from gemmake.files import read_small
from gemmake.options import LEAST_FRACTION
from gemrun.plain import one_line
from gemrun.toml_lines import has, line_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA_MAJOR = 1
MAX_DEPTH = 4  # files in a chain of inheritance, the board's own included
MAX_FILES = 32  # that one description is made of
MAX_BYTES = 1 << 17  # of one file
MAX_POINTS = 32  # operating points of a cluster
MAX_NESTING = 8  # tables and lists in one another
NAME_BYTES = 16  # room for a target's name in the artifact's header
BSP_PATTERN = r"^[0-9A-Za-z][0-9A-Za-z._+-]{0,31}$"  # version of a board support package
MIB = 1 << 20
NAME = re.compile(r"[a-z0-9][a-z0-9._-]*\Z")
MERGE_KEYS = ("id", "label", "field")  # arrays of tables merge by the first that an entry has

FEATURES: Mapping[str, tuple[str, ...]] = {  # LLVM's spelling
    "aarch64": ("neon", "dotprod", "fp16", "i8mm", "bf16", "sve", "sve2"),
    "arm": ("neon", "vfp4", "mve"),
    "riscv64": ("v", "zvfh", "zba", "zbb", "zbc", "zbs"),
    "x86_64": (
        *("sse2", "sse4.2", "avx2", "fma", "f16c", "avxvnni"),
        *("avx512f", "avx512bw", "avx512vl", "avx512vnni", "amx-int8"),
    ),
}

# Instruction sets that a core certainly lacks, by its name in `mcpu`.
V8_0 = ("dotprod", "fp16", "i8mm", "bf16", "sve", "sve2")
V8_2 = ("i8mm", "bf16", "sve", "sve2")
LACKING: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("cortex-a35", "cortex-a53", "cortex-a72"), V8_0),
    **dict.fromkeys(("cortex-a55", "cortex-a76", "cortex-a78ae"), V8_2),
    "carmel": ("dotprod", *V8_2),
    "gracemont": ("avx512f", "avx512bw", "avx512vl", "avx512vnni", "amx-int8"),
    "sifive-u74": ("v", "zvfh"),
    "cortex-m55": ("neon", "vfp4"),
    "cortex-m7": ("neon", "vfp4", "mve"),
}

# Bounds that no board reaches: what is beyond is a slip of units.
Positive = Annotated[int, Field(gt=0, le=1 << 24)]  # 16 TiB in MiB
Count = Annotated[int, Field(ge=0, le=1 << 20)]
Quantity = Annotated[float, Field(ge=1e-3, le=1e6)]  # MHz, MB/s, GB/s, W, K/W, s
Celsius = Annotated[float, Field(ge=-40.0, le=150.0)]
Volts = Annotated[float, Field(ge=0.2, le=2.0)]  # of a core, or relative to the highest
Text = Annotated[str, Field(min_length=1, max_length=200)]


class _Table(BaseModel):
    """A table of an HDF: immutable, no unknown keys, no conversion between types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Target(_Table):
    """What code the board runs. `baseline_features` are always there; `features` are advice."""

    arch: Literal["aarch64", "arm", "riscv64", "x86_64"]
    os: Literal["linux", "bare"] = "linux"
    mcpu: Text | None = None
    features: tuple[Text, ...] = ()
    baseline_features: tuple[Text, ...] = ()

    @model_validator(mode="after")
    def _known(self) -> Target:
        for feature in (*self.features, *self.baseline_features):
            if feature not in FEATURES[self.arch]:
                known = ", ".join(FEATURES[self.arch])
                raise ValueError(f"unknown feature '{feature}' of {self.arch}; one of {known}")
        return self


class Cluster(_Table):
    """Cores that share a clock. `l2_shared_by` and `l3_shared_by` count cores."""

    id: Text
    cores: tuple[Count, ...] | None = None  # the kernel's numbers; absent = unknown
    kind: Literal["uniform", "big", "little"] = "uniform"
    uarch: Text | None = None
    max_freq_mhz: Quantity | None = None
    opp_mhz: tuple[Quantity, ...] | None = None  # operating points, ascending
    opp_volts: tuple[Volts, ...] | None = None  # their voltages; only the ratios count
    l1d_kib: Positive | None = None
    l1i_kib: Positive | None = None
    l2_kib: Positive | None = None
    l2_shared_by: Positive | None = None
    l3_kib: Positive | None = None
    l3_shared_by: Positive | None = None
    line_bytes: Positive | None = None

    @model_validator(mode="after")
    def _caches_grow(self) -> Cluster:
        if self.l2_kib and self.l3_kib and self.l3_kib < self.l2_kib:
            raise ValueError(f"l3_kib {self.l3_kib} is smaller than l2_kib {self.l2_kib}")
        return self

    @model_validator(mode="after")
    def _points_ascend(self) -> Cluster:
        clocks, volts = self.opp_mhz or (), self.opp_volts or ()
        if self.opp_mhz is None and self.opp_volts is None:
            return self
        if len(clocks) != len(volts) or not 2 <= len(clocks) <= MAX_POINTS:
            raise ValueError(
                f"opp_mhz has {len(clocks)} entries, opp_volts {len(volts)}; "
                f"list 2 to {MAX_POINTS} of each"
            )
        if any(a >= b for a, b in pairwise(clocks)):
            raise ValueError("opp_mhz does not ascend; sort the operating points")
        if any(a > b for a, b in pairwise(volts)):
            raise ValueError("opp_volts falls as the clock rises; correct the one that is wrong")
        if self.max_freq_mhz and self.max_freq_mhz > clocks[-1]:
            raise ValueError(
                f"opp_mhz ends at {clocks[-1]:g}, max_freq_mhz is {self.max_freq_mhz:g}; "
                "add the highest point"
            )
        return self


class Cpu(_Table):
    """The CPU clusters."""

    cluster: tuple[Cluster, ...]


class Memory(_Table):
    """Main memory. `visible_mib` is what the kernel reports as its total."""

    kind: Text | None = None
    size_mib: Positive
    visible_mib: Positive
    bus_bits: Positive | None = None
    system_cache_kib: Positive | None = None
    unified: bool = False  # CPU and accelerator share it

    @model_validator(mode="after")
    def _visible_fits(self) -> Memory:
        if self.visible_mib > self.size_mib:
            raise ValueError(f"visible_mib {self.visible_mib} exceeds size_mib {self.size_mib}")
        return self


class Accelerator(_Table):
    """An accelerator; `count = 0` states that the board has none of this kind."""

    id: Text
    kind: Literal["cuda", "nvdla", "npu"]
    count: Count
    sm: Text | None = None
    cores: Positive | None = None
    l2_kib: Positive | None = None
    sram_kib: Positive | None = None
    max_freq_mhz: Quantity | None = None


class Isp(_Table):
    """The image signal processor, which takes memory bandwidth from a model when it runs."""

    max_freq_mhz: Quantity


class Thermal(_Table):
    """Zones by their kernel `type`, and the trips of the kernel, which always win at run time: both
    or none, where nobody read them."""

    zones: tuple[Text, ...] = ()
    hw_passive_c: Celsius | None = None
    hw_critical_c: Celsius | None = None
    rtheta_c_per_w: Quantity | None = None  # measured, or absent
    tau_s: Quantity | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Thermal:
        passive, critical = self.hw_passive_c, self.hw_critical_c
        if (passive is None) != (critical is None):
            raise ValueError("hw_passive_c and hw_critical_c stand together; add the other one")
        if passive is not None and critical is not None and passive > critical:
            raise ValueError(f"hw_passive_c {passive} exceeds hw_critical_c {critical}")
        return self


class PowerRail(_Table):
    """A measured supply; rails with another role than `total` are never added to the total."""

    label: Text
    driver: Text
    role: Literal["total", "part"]


class Storage(_Table):
    """Where artifacts lie."""

    kind: Literal["nvme", "sata", "emmc", "sd", "usb", "flash"]
    seq_read_mbps: Quantity
    size_mib: Positive | None = None


class PowerMode(_Table):
    """Clocks and peak memory bandwidth (decimal GB/s) of one power mode."""

    id: Text
    nvpmodel_id: Count | None = None
    cores_online: Positive | None = None
    tdp_w: Quantity | None = None  # absent = not capped
    cpu_max_mhz: Quantity | None = None
    gpu_max_mhz: Quantity | None = None
    mem_mtps: Quantity | None = None  # million transfers per second
    mem_peak_gbps: Quantity | None = None
    default: bool = False


class Policy(_Table):
    """Choices of the operator; not part of the hash."""

    target_temp_c: Celsius | None = None  # for continuous load
    throttle_temp_c: Celsius | None = None
    hysteresis_c: Annotated[float, Field(ge=3.0, le=30.0)] = 5.0
    ram_fraction: Annotated[float, Field(ge=LEAST_FRACTION, le=1.0)] = 0.65
    reserve_mib: Count = 256  # left to everything else
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = "auto"

    @model_validator(mode="after")
    def _ordered(self) -> Policy:
        target, throttle = self.target_temp_c, self.throttle_temp_c
        if target is not None and throttle is not None and target > throttle:
            raise ValueError(f"target_temp_c {target} exceeds throttle_temp_c {throttle}")
        return self


class Source(_Table):
    """Where the values at and below `field` come from; `verified` = somebody read it there."""

    field: Text
    ref: Text
    kind: Literal["device-tree", "nvpmodel", "data-sheet", "measured", "calculated", "assumption"]
    verified: bool


class Hdf(_Table):
    """A resolved hardware description."""

    hdf_version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+$")]
    id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=NAME_BYTES)]
    board: Text  # short name for messages, e.g. orin-nano
    bsp_version: Annotated[str, Field(pattern=BSP_PATTERN)] | None = None  # as 35.4.1
    compatible: tuple[Text, ...] = ()  # /proc/device-tree/compatible, most specific first
    target: Target
    cpu: Cpu
    memory: Memory | None = None
    accelerator: tuple[Accelerator, ...] = ()
    isp: Isp | None = None
    thermal: Thermal | None = None
    power_rail: tuple[PowerRail, ...] = ()
    storage: Storage | None = None
    power_mode: tuple[PowerMode, ...] = ()
    policy: Policy = Policy()
    source: tuple[Source, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Hdf:
        for problem in _contradictions(self):
            raise ValueError(problem)
        return self

    @property
    def generic(self) -> bool:
        """True for a description that belongs to no board: its artifacts open anywhere."""
        return self.id.startswith("generic-")

    @property
    def default_mode(self) -> PowerMode | None:
        """The power mode that predictions are made for, if the board has modes."""
        return next((mode for mode in self.power_mode if mode.default), None)

    def mode(self, name: str | None) -> PowerMode | None:
        """The power mode of a name, without a name the default one. Raises UsageError."""
        if name is None:
            return self.default_mode
        found = next((mode for mode in self.power_mode if mode.id == name), None)
        if found is None:
            known = ", ".join(f"{m.id}{' (default)' if m.default else ''}" for m in self.power_mode)
            use = f"use one of {known}" if known else "it has none, leave the option out"
            raise UsageError(f"--power-mode {name}: no power mode of {self.id}; {use}")
        return found

    @property
    def arch(self) -> str:
        """The instruction set's name, as in the target table."""
        return self.target.arch

    @property
    def bare(self) -> bool:
        """True for a board without a system: firmware uses the artifact where it lies in flash."""
        return self.target.os == "bare"

    def budget_bytes(self) -> int:
        """The budget of the total that an artifact declares, in bytes; 0 = not known, the device
        decides. Of that total firmware holds only a part in RAM."""
        return 0 if self.bare else self.ram_bytes()

    def ram_bytes(self) -> int:
        """What a model may take of RAM, in bytes (whole MiB); 0 = not known."""
        if self.memory is None:
            return 0
        total = self.memory.visible_mib
        share = math.floor(total * self.policy.ram_fraction)
        return max(0, min(share, total - self.policy.reserve_mib)) * MIB

    @property
    def passive_c(self) -> float | None:
        """The kernel's passive trip, in degrees Celsius; None: nobody read it."""
        return self.thermal.hw_passive_c if self.thermal else None

    @property
    def throttle_c(self) -> float | None:
        """The throttle temperature when the user names none, in degrees Celsius."""
        limits = [self.policy.throttle_temp_c]
        limits.append(None if self.passive_c is None else self.passive_c - 10.0)
        return min((limit for limit in limits if limit is not None), default=None)

    def accelerators(self, kind: str) -> int:
        """How many accelerators of a kind the board has."""
        return sum(unit.count for unit in self.accelerator if unit.kind == kind)

    def canonical_json(self) -> bytes:
        """The stored form: sorted keys, no blanks, sources dropped, UTF-8, policy included."""
        return _canonical(self.model_dump(mode="json", exclude_none=True, exclude={"source"}))

    def sha256(self) -> bytes:
        """The hash that binds an artifact to this description (32 bytes, policy excluded)."""
        return canonical_sha256(self.canonical_json())

    def unverified(self) -> tuple[str, ...]:
        """Fields whose value nobody has checked against its source, ascending."""
        return tuple(sorted(entry.field for entry in self.source if not entry.verified))

    def origin(self, path: str) -> Source | None:
        """The narrowest source that covers a value, such as `power_mode[25W].mem_peak_gbps`."""
        own = [entry for entry in self.source if _covers(entry.field, path)]
        return max(own, key=lambda entry: len(entry.field), default=None)

    def unsourced(self) -> tuple[str, ...]:
        """Numeric fields that no source covers, ascending; policy needs none."""
        tables = self.model_dump(mode="json", exclude_none=True, exclude={"source", "policy"})
        fields = [entry.field for entry in self.source]
        bare = [path for path in _numbers(tables, "") if not any(_covers(f, path) for f in fields)]
        return tuple(sorted(bare))


def load_hdf(target: str | os.PathLike[str]) -> Hdf:
    """The checked description of a board: a shipped name, or a path that ends in .toml.

    Raises TargetError for an unknown name, an unreadable file and every contradiction.
    """
    resolved = resolve(target)
    label = show(target)
    version = resolved.get("hdf_version")
    if isinstance(version, str) and version.split(".")[0] != str(SCHEMA_MAJOR):
        raise TargetError(
            f"{label}: hdf_version is {version}, this tool reads {SCHEMA_MAJOR}.x; "
            "use the tool that matches the file"
        )
    for loc, value in _not_plain(resolved, ()):
        raise TargetError(
            f"{label}: {_place(loc, resolved)}: {str(value)[:60]} is no value of an HDF; "
            f"use plain numbers and text{_line(target, _names(loc, resolved))}"
        )
    try:
        # JSON mode: lists become tuples, while text never becomes a number.
        return Hdf.model_validate_json(_canonical(resolved))
    except ValidationError as error:
        problem, keys = first_problem(error, resolved)
        raise TargetError(f"{label}: {problem}{_line(target, keys)}") from None


def list_targets() -> tuple[str, ...]:
    """Names of the shipped boards, ascending; base files lie in folders and are not boards."""
    return tuple(sorted(path.stem for path in data_dir().glob("*.toml")))


def data_dir() -> Path:
    """Folder of the shipped descriptions: inside the package, or beside it in a source tree."""
    package = Path(__file__).resolve().parent
    installed = package / "hdf_data"
    return installed if installed.is_dir() else package.parent / "hdf"


@dataclass(frozen=True)
class Origin:
    """Where a value is set: the last file, in the order of merging, that has it."""

    path: Path
    line: int | None


def origin_of(files: Sequence[Path], keys: Sequence[str]) -> Origin | None:
    """The file and line that a value comes from; None where no file sets it."""
    for path in reversed(files):
        if has(_read(path), keys):
            return Origin(path, line_of(path.read_text(encoding="utf-8"), keys))
    return None


def files_of(target: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The files that make a description, in the order in which they are merged."""
    found: list[Path] = []
    _resolve_file(find(target), (), found)
    return tuple(found)


def _line(target: str | os.PathLike[str], keys: Sequence[str]) -> str:
    """(line 12) of the board's own file, (tegra234.toml line 12) of a base, or nothing."""
    files = files_of(target)
    found = origin_of(files, keys) if keys else None
    if found is None or found.line is None:
        return ""
    name = "" if found.path == files[-1] else f"{show(found.path.name)} "
    return f" ({name}line {found.line})"


def _wrong(path: Path, key: str, problem: str) -> TargetError:
    """The error for a key of a file that could be read, with its line if it is found."""
    line = line_of(path.read_text(encoding="utf-8"), key.split("."))
    return TargetError(f"{show(path)}: {problem}" + ("" if line is None else f" (line {line})"))


def resolve(target: str | os.PathLike[str]) -> dict[str, Any]:
    """The description with its bases merged, not yet checked against the schema."""
    return _resolve_file(find(target), (), [])


def find(target: str | os.PathLike[str]) -> Path:
    """The file of a target. Raises TargetError for an unknown name."""
    text = os.fspath(target)
    if not text:
        raise TargetError("target: is empty; name a board (gemmake hdf list) or a .toml file")
    if text.endswith(".toml") or os.sep in text:
        return Path(text)
    path = data_dir() / f"{text}.toml"
    if NAME.match(text) and not path.is_file():
        path = _by_id(text) or path
    if not NAME.match(text) or not path.is_file():
        close = difflib.get_close_matches(text, list_targets(), n=1)
        hint = f"did you mean {close[0]}? Known" if close else "known"
        raise TargetError(
            f"{show(text)}: unknown target; {hint} targets: {', '.join(list_targets())}, "
            "or a path to a .toml file"
        )
    return path


def _by_id(name: str) -> Path | None:
    """The shipped file with this id: messages name the id, which may be shorter than the file."""
    for path in sorted(data_dir().glob("*.toml")):
        if _read(path).get("id") == name:
            return path
    return None


def with_policy(hdf: Hdf, reserve_mib: int | None, ram_fraction: float | None) -> Hdf:
    """The description with a budget of the caller's own; `policy` is the operator's to choose.
    TargetError where there is no memory to take a share of."""
    named = {"reserve_mib": reserve_mib, "ram_fraction": ram_fraction}
    given = {name: value for name, value in named.items() if value is not None}
    if not given:
        return hdf
    if hdf.memory is None:
        raise TargetError(
            f"{hdf.id}: does not state its memory, so there is no budget to change with --reserve "
            "or --ram-fraction; leave them out, or use a board: gemmake hdf list"
        )
    return hdf.model_copy(update={"policy": hdf.policy.model_copy(update=given)})


def with_bsp(hdf: Hdf, version: str | None) -> Hdf:
    """The description of a board with another board support package; None: its own. UsageError for
    what is no version."""
    if version is None:
        return hdf
    if not re.fullmatch(BSP_PATTERN, version):
        raise UsageError(
            f"--bsp-version: {version} is no version; use letters, digits, '.' and '-'"
        )
    return hdf.model_copy(update={"bsp_version": version})


def canonical_sha256(stored: bytes) -> bytes:
    """The binding hash of a stored canonical form (32 bytes): its policy is left out first."""
    tables = json.loads(stored)
    tables.pop("policy", None)
    return hashlib.sha256(_canonical(tables)).digest()


def export_schema() -> dict[str, Any]:
    """JSON Schema of an HDF file, for editors. Nothing is required, as a base may bring it."""
    schema = {"$schema": GenerateJsonSchema.schema_dialect, **Hdf.model_json_schema()}
    schema["properties"]["inherits"] = {"type": "array", "items": {"type": "string"}}
    for table in (schema, *schema.get("$defs", {}).values()):
        table.pop("required", None)
    return schema


def show(path: str | os.PathLike[str]) -> str:
    """A path as text that can always be printed: bytes that are not UTF-8 become U+FFFD, control
    characters are escaped."""
    return one_line(os.fsencode(path).decode("utf-8", "replace"))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge: tables by key, arrays of tables by id, label or field, all else replaced.

    Linear in the number of entries; depth is bounded, because TOML tables of an HDF are flat.
    """
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            result[key] = merge(old, value)
        elif _entries(old) and _entries(value):
            result[key] = _merge_entries(old or [], value)
        else:
            result[key] = value
    return result


def _entries(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def _merge_entries(base: list[Any], over: list[Any]) -> list[Any]:
    result: dict[str, Any] = {}
    for entries in (base, over):
        own: set[str] = {""}
        for entry in entries:
            key = next((f"{name}={entry[name]}" for name in MERGE_KEYS if name in entry), "")
            if key in own:  # no name, or twice in one file: it stays, for the schema to refuse
                key = f"#{len(result)}"
            own.add(key)
            result[key] = merge(result.get(key, {}), entry)
    return list(result.values())


def _resolve_file(path: Path, chain: tuple[Path, ...], files: list[Path]) -> dict[str, Any]:
    own = _read(path)
    real = path.resolve()
    for problem in _too_many(real, chain, files):
        raise _wrong(chain[-1], "inherits", f"inherits: {problem}")
    bases = own.pop("inherits", [])
    if not isinstance(bases, list) or not all(isinstance(name, str) for name in bases):
        problem = "inherits is not a list of names; write inherits = [..]"
        raise _wrong(path, "inherits", problem)
    result: dict[str, Any] = {}
    for name in bases:
        result = merge(result, _resolve_file(_base_path(path, name), (*chain, real), files))
    files.append(path)
    for problem in _half_a_memory(result, own):
        raise _wrong(path, "memory.size_mib", problem)
    return merge(result, own)


def _half_a_memory(base: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """What a kernel sees of one size of memory says nothing of another."""
    before, mine = (table.get("memory") for table in (base, own))
    if not (isinstance(before, dict) and isinstance(mine, dict)) or "visible_mib" in mine:
        return
    size, seen = mine.get("size_mib"), before.get("visible_mib")
    if seen is not None and type(size) is int and size != before.get("size_mib", size):
        yield (
            f"memory.visible_mib {seen} is of the base's size; set it too, "
            f"{size * 7 // 8} where no kernel was asked (seven eighths)"
        )


def _too_many(real: Path, chain: tuple[Path, ...], files: Sequence[Path]) -> Iterator[str]:
    """What is wrong with one more file, of which the last one in the chain has the name."""
    if real in chain:
        circle = " -> ".join(show(path.name) for path in (*chain[chain.index(real) :], real))
        yield f"{circle} is a circle; remove the circle"
    if len(chain) >= MAX_DEPTH:
        yield f"more than {MAX_DEPTH} files deep; inherit from fewer"
    if chain and len(files) >= MAX_FILES:
        yield f"more than {MAX_FILES} files in all; inherit from fewer"


def _base_path(path: Path, name: str) -> Path:
    parts = name.split("/")
    if not all(NAME.match(part) for part in parts):
        problem = f"base '{name}' is not a name like soc/tegra234; no dots, no roots"
        raise _wrong(path, "inherits", problem)
    root = data_dir()
    folders = [path.parent, root]
    for folder in folders:
        if (candidate := folder.joinpath(*parts[:-1], f"{parts[-1]}.toml")).is_file():
            return candidate
    raise _wrong(path, "inherits", f"base '{name}' does not exist; put it beside the file")


def _read(path: Path) -> dict[str, Any]:
    label = show(path)
    try:
        data = read_small(path, MAX_BYTES)
    except OSError as error:
        raise TargetError(f"{label}: {error.strerror}; check the path") from None
    if data is None:
        raise TargetError(f"{label}: larger than {MAX_BYTES} bytes; this is no HDF")
    try:
        tables: dict[str, Any] = tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise TargetError(f"{label}: byte {error.start} is not UTF-8; save it as UTF-8") from None
    except ValueError as error:  # of TOML, or a number of more digits than Python reads
        raise TargetError(f"{label}: not valid TOML: {error}; correct that line") from None
    except RecursionError:
        raise TargetError(f"{label}: not valid TOML: nested too deeply; flatten it") from None
    for key, value in tables.items():
        if not _flat({key: value}):
            problem = f"{key}: nested more than {MAX_NESTING} deep; an HDF is flat"
            raise _wrong(path, key, problem)
    return tables


def _flat(tables: Mapping[str, Any]) -> bool:
    level: list[Any] = [tables]
    for _ in range(MAX_NESTING):
        below = [entry.values() if isinstance(entry, dict) else entry for entry in level]
        level = [inner for entry in below for inner in entry if isinstance(inner, (dict, list))]
    return not level


def _canonical(tables: Mapping[str, Any]) -> bytes:
    text = json.dumps(
        tables, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def _contradictions(hdf: Hdf) -> Iterator[str]:
    """Sentences about values that cannot all be true."""
    cores = [core for cluster in hdf.cpu.cluster for core in cluster.cores or ()]
    if len(cores) != len(set(cores)):
        yield "cpu.cluster: a core stands in two clusters; list each core once"
    for kind, names in _named(hdf):
        if len(names) != len(set(names)):
            yield f"{kind}: a name occurs twice; every entry needs its own"
    if hdf.power_mode and sum(mode.default for mode in hdf.power_mode) != 1:
        yield "power_mode: exactly one mode must have default = true"
    if hdf.passive_c is not None and hdf.policy.throttle_temp_c is not None:
        throttle, passive = hdf.policy.throttle_temp_c, hdf.passive_c
        if throttle >= passive:
            yield f"policy.throttle_temp_c {throttle} is not below thermal.hw_passive_c {passive}"
    for mode in hdf.power_mode:
        yield from (f"power_mode {mode.id}: {problem}" for problem in _mode_problems(hdf, mode))
    if hdf.memory and hdf.ram_bytes() == 0:
        yield _no_budget(hdf.policy, hdf.memory.visible_mib)
    yield from _size_of_the_name(hdf)
    yield from _features_of_the_core(hdf)


def _no_budget(policy: Policy, visible: int) -> str:
    if policy.reserve_mib >= visible:
        return (
            f"policy.reserve_mib {policy.reserve_mib} leaves nothing of memory.visible_mib "
            f"{visible}; lower it"
        )
    return (
        f"policy.ram_fraction {policy.ram_fraction:g} of memory.visible_mib {visible} is less than "
        "1 MiB; raise it"
    )


def _mode_problems(hdf: Hdf, mode: PowerMode) -> Iterator[str]:
    cores = [core for cluster in hdf.cpu.cluster for core in cluster.cores or ()]
    if mode.cores_online and cores and mode.cores_online > len(cores):
        yield f"cores_online {mode.cores_online} of {len(cores)} cores; count the board's"
    clocks = [cluster.max_freq_mhz for cluster in hdf.cpu.cluster if cluster.max_freq_mhz]
    if mode.cpu_max_mhz and clocks and mode.cpu_max_mhz > max(clocks):
        yield (
            f"cpu_max_mhz {mode.cpu_max_mhz:g} exceeds max_freq_mhz {max(clocks):g} of the "
            "fastest cluster; correct the one that is wrong"
        )
    gpus = [unit.max_freq_mhz for unit in hdf.accelerator if unit.kind == "cuda"]
    limit = max((clock for clock in gpus if clock), default=None)
    if mode.gpu_max_mhz and limit and mode.gpu_max_mhz > limit:
        yield (
            f"gpu_max_mhz {mode.gpu_max_mhz:g} exceeds max_freq_mhz {limit:g} of the accelerator; "
            "correct the one that is wrong"
        )
    if hdf.memory and hdf.memory.bus_bits and mode.mem_mtps and mode.mem_peak_gbps:
        peak = hdf.memory.bus_bits / 8 * mode.mem_mtps / 1000
        if abs(mode.mem_peak_gbps - peak) > 0.1 * peak:
            yield (
                f"mem_peak_gbps {mode.mem_peak_gbps} is more than 10 % "
                f"from bus_bits / 8 * mem_mtps = {peak:.1f}; correct the one that is wrong"
            )


def _size_of_the_name(hdf: Hdf) -> Iterator[str]:
    """A name such as orin-nx-16gb or meter-256mb states the memory."""
    stated = re.search(r"(?:^|-)(\d{1,5})(gb|mb)(?:-|$)", hdf.id)
    if stated is None or hdf.memory is None:
        return
    wanted = int(stated[1]) * (1024 if stated[2] == "gb" else 1)
    if hdf.memory.size_mib != wanted:
        yield f"memory.size_mib {hdf.memory.size_mib} is not the {wanted} of the name {hdf.id}"


def _features_of_the_core(hdf: Hdf) -> Iterator[str]:
    """Instruction sets that the named core does not have."""
    lacking = LACKING.get(hdf.target.mcpu or "", ())
    for feature in (*hdf.target.features, *hdf.target.baseline_features):
        if feature in lacking:
            yield f"target: {hdf.target.mcpu} has no {feature}; remove it"


def _named(hdf: Hdf) -> Iterator[tuple[str, list[str]]]:
    yield "cpu.cluster", [entry.id for entry in hdf.cpu.cluster]
    yield "accelerator", [entry.id for entry in hdf.accelerator]
    yield "power_mode", [entry.id for entry in hdf.power_mode]
    yield "power_rail", [entry.label for entry in hdf.power_rail]


def _numbers(value: Any, path: str) -> Iterator[str]:
    """Paths of numeric leaves, such as `memory.size_mib` and `cpu.cluster[c0].l1d_kib`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for entry in value:
            name = entry.get("id", entry.get("label", "")) if isinstance(entry, dict) else ""
            yield from _numbers(entry, f"{path}[{name}]" if name else path)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path


def _not_plain(
    value: Any, loc: tuple[int | str, ...]
) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """Places and values that JSON does not have: dates, times, nan and inf."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _not_plain(inner, (*loc, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _not_plain(inner, (*loc, place))
    elif not isinstance(value, (str, int, float)) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        yield loc, value


def _covers(field: str, path: str) -> bool:
    return path == field or path.startswith((f"{field}.", f"{field}["))


def first_problem(
    error: ValidationError, resolved: Mapping[str, Any]
) -> tuple[str, tuple[str, ...]]:
    """One sentence for the first problem that pydantic found, and the keys of its place; for a key
    that is missing, all that are."""
    problems = error.errors(include_url=False)
    # A misspelt key is also a missing one: name the key that stands in the file.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    kind, message = problem["type"], str(problem["msg"])
    keys = _names(problem["loc"], resolved)
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        keys = keys or _named_in(message)
        prefix = f"{_place(problem['loc'], resolved)}: " if problem["loc"] else ""
        return f"{prefix}{message}", keys
    prefix = f"{_place(problem['loc'], resolved)}: "
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(str(problem["loc"][-1]), _all_keys(), n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else "hdf/README.md lists the keys"
        return f"{prefix}unknown key; {hint}", keys
    if kind == "missing":
        absent = [_place(p["loc"], resolved) for p in problems if p["type"] == "missing"]
        them = "it" if len(absent) == 1 else "them"
        told = f"{', '.join(absent)}: missing; add {them}"
        return f"{told} (hdf/README.md lists the keys and their units)", keys
    given = json.dumps(problem["input"], default=str)[:60]
    return f"{prefix}{message[0].lower()}{message[1:]}, not {given}; correct the value", keys


def _names(loc: Sequence[int | str], resolved: Any) -> tuple[str, ...]:
    """A place in names: the number of an entry becomes its id, label or field."""
    names: list[str] = []
    for part in loc:
        if isinstance(part, int):
            resolved = resolved[part] if isinstance(resolved, list) else None
            if not isinstance(resolved, dict):  # an entry of a list of values
                return tuple(names)
            names.append(next((str(resolved[key]) for key in MERGE_KEYS if key in resolved), ""))
        else:
            resolved = resolved.get(part) if isinstance(resolved, dict) else None
            names.append(part)
    return tuple(names)


def _place(loc: Sequence[int | str], resolved: Any) -> str:
    """power_mode[25W].mem_mtps, as sources are written."""
    text = ""
    for count, part in enumerate(loc, 1):
        name = _names(loc[:count], resolved)
        if isinstance(part, int):
            text += f"[{name[-1] if len(name) == count and name[-1] else part}]"
        else:
            text += f".{part}" if text else part
    return text


def _named_in(message: str) -> tuple[str, ...]:
    """The keys that a cross-check's sentence begins with."""
    mode = re.match(r"power_mode (.+?): ([a-z_]+) ", message)
    if mode:
        return ("power_mode", mode[1], mode[2])
    field = re.match(r"([a-z_]+(?:\.[a-z_]+)*)[: ]", message)
    return tuple(field[1].split(".")) if field else ()


def _all_keys() -> list[str]:
    schema = Hdf.model_json_schema()
    tables = (schema, *schema.get("$defs", {}).values())
    return sorted({key for table in tables for key in table.get("properties", {})})
