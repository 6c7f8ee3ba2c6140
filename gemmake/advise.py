"""Which of some models fits a board and a task, at which quantisation and context, and why not.

    advise(names, wish) -> Advice          the rows of `gemmake advise`

A candidate is a checkpoint of which only headers are read, a config.json, or the name of a
published shape (load/shapes.py). Memory comes from the compiler's own planner, speed from
passes/predict.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from gemmake import firmware, pipeline, planning, predictions
from gemmake.errors import BudgetError, GemError, UsageError
from gemmake.failures import InternalError, sentences
from gemmake.files import standing
from gemmake.hdf import MIB, Hdf, PowerMode, load_hdf, show, with_policy
from gemmake.load import load_headers, shapes
from gemmake.load.source import display
from gemmake.model import Model
from gemmake.options import (
    MAX_CONTEXT,
    CompileOptions,
    Effort,
    KvType,
    Quantization,
    Storage,
    check_share,
)
from gemmake.passes import predict
from gemmake.passes.budget import Memory, Remedy
from gemmake.state import State
from gemmake.tokencheck import SECONDS, Finding, check_text

LEAST_INPUT = 16  # tokens; a shorter input is no remedy
CONTEXT, SPEED, FIRST_TOKEN = "context", "speed", "first token"  # what is asked
FLASH, MEMORY = "flash", "memory"  # what the board has
WISHES = (CONTEXT, FLASH, MEMORY, SPEED, FIRST_TOKEN)
SUFFIXES = (".gguf", ".safetensors", ".pt", ".pth")


class Quality(str, Enum):
    """What may be lost: usual: int4 with an int8 cache; high: int8; exact: float32."""

    USUAL = "usual"
    HIGH = "high"
    EXACT = "exact"


FORMS = {
    Quality.USUAL: (Quantization.INT4, KvType.INT8),
    Quality.HIGH: (Quantization.INT8, KvType.INT8),
    Quality.EXACT: (Quantization.NONE, KvType.DENSE),
}


class Fit(str, Enum):
    """Whether a candidate does what is asked; open: only a run on the board can tell."""

    YES = "fits"
    OPEN = "open"
    NO = "no"


@dataclass(frozen=True)
class Wish:
    """What is asked of a model on a board."""

    target: str
    longest_input: int = 768  # tokens
    answer: int = 256  # tokens
    leave_free: int | None = None  # MiB for everything else; None: the board's policy
    ram_fraction: float | None = None  # of memory that a model may take; None: likewise
    latency_ms: float | None = None  # to the first token of the longest input, the model being open
    speed: float | None = None  # tokens/s behind the longest input
    quality: Quality = Quality.USUAL
    power_mode: str | None = None
    storage: Storage | None = None  # to assume; None: the board's, else the usual one
    effort: Effort = Effort.FULL
    check: bool = False  # tokenizer and chat template of each candidate

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense. Raises UsageError."""
        for option, value, unit in (
            ("--longest-input", self.longest_input, "tokens"),
            ("--answer", self.answer, "tokens"),
            ("--latency-ms", self.latency_ms, "ms"),
            ("--speed", self.speed, "tokens/s"),
        ):
            if value is not None and not 0 < value <= MAX_CONTEXT:
                raise UsageError(
                    f"{option}: {value} {unit} is out of range; use a number above 0, at most "
                    f"{MAX_CONTEXT}"
                )
        check_share("--leave-free", self.leave_free, self.ram_fraction)
        if self.context > MAX_CONTEXT:
            raise UsageError(
                f"--longest-input: with the answer {self.context} tokens; use {MAX_CONTEXT} at most"
            )

    @property
    def context(self) -> int:
        """Tokens of a context that holds input and answer."""
        step = planning.CONTEXT_STEP
        return -(-(self.longest_input + self.answer) // step) * step


@dataclass(frozen=True)
class Candidate:
    """A model that is looked at: a name for people, and where it is."""

    name: str
    path: Path | None  # None: a published shape


@dataclass(frozen=True)
class Row:
    """What is to be said of one candidate."""

    name: str
    fit: Fit
    options: CompileOptions | None = None
    memory: Memory | None = None
    most: int = 0  # bytes: the total where measuring chooses the finest groups of the KV cache
    group_limit: int = 0  # bytes that a control group has to allow for `most`; 0: there is none
    prediction: predict.Prediction | None = None  # prompt and depth: the longest input
    unmet: tuple[str, ...] = ()  # of what is asked: what it does not do
    undecided: tuple[str, ...] = ()  # likewise: what only a run on the board can tell
    reasons: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()  # what it costs that gemmake leaves weights in storage
    notes: tuple[str, ...] = ()
    check: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Advice:
    """The answer: what was asked of which board, and a row for each candidate."""

    wish: Wish
    hdf: Hdf
    mode: PowerMode | None
    granted: int  # bytes; 0 = not known, the device decides
    rows: tuple[Row, ...] = ()


def advise(names: Sequence[str], wish: Wish) -> Advice:
    """Look at every candidate. Raises GemError for a board or an option that is wrong; a candidate
    that cannot be read is a row that says so."""
    hdf = _described(wish)
    mode = hdf.mode(wish.power_mode)
    empty = Advice(wish, hdf, mode, hdf.ram_bytes())
    looked = list(candidates(names))
    if hdf.memory is not None and not empty.granted:
        raise _nothing_left(hdf, _lets_in(looked, wish))
    return replace(empty, rows=tuple(_row(one, empty) for one in looked))


def board(wish: Wish) -> Hdf:
    """The target with the budget that is asked for. Raises TargetError, and UsageError where it
    leaves nothing for a model."""
    hdf = _described(wish)
    if hdf.memory is not None and hdf.ram_bytes() == 0:
        raise _nothing_left(hdf)
    return hdf


def _described(wish: Wish) -> Hdf:
    return with_policy(load_hdf(wish.target), wish.leave_free, wish.ram_fraction)


def _nothing_left(hdf: Hdf, better: str = "") -> UsageError:
    """Of a budget of nothing: which option makes it so, and what would do."""
    policy, visible = hdf.policy, hdf.memory.visible_mib if hdf.memory else 0
    if policy.reserve_mib < visible:
        return UsageError(
            f"--ram-fraction: {policy.ram_fraction:g} of the {visible} MiB that {hdf.id} has is "
            f"less than 1 MiB; use a larger share{better}"
        )
    return UsageError(
        f"--reserve: {policy.reserve_mib} MiB of the {visible} MiB that {hdf.id} has; "
        f"leave less{better}"
    )


def _lets_in(looked: Sequence[Candidate], wish: Wish) -> str:
    """The largest reserve and the smallest share that let the smallest candidate in, if any do."""
    whole = replace(
        wish,
        leave_free=None if wish.leave_free is None else 0,
        ram_fraction=None if wish.ram_fraction is None else 1.0,
        check=False,
    )
    hdf = _described(whole)
    empty = Advice(whole, hdf, hdf.mode(wish.power_mode), hdf.ram_bytes())
    sizes = [(row.most, row.name) for row in (_row(one, empty) for one in looked) if row.most]
    fitting = [pair for pair in sizes if pair[0] <= empty.granted]
    if not fitting or hdf.memory is None:
        return ", or name a smaller model" if sizes else ""
    most, name = min(fitting)
    wanted, visible = math.ceil(most / MIB), hdf.memory.visible_mib
    words = [f"--reserve {visible - wanted}"] if wish.leave_free is not None else []
    if wish.ram_fraction is not None:
        words.append(f"--ram-fraction {planning.share_of(wanted, visible):g}")
    return f": {' '.join(words)} lets {name} in"


# ---- candidates ----
def candidates(names: Sequence[str]) -> Iterator[Candidate]:
    """Every model that the names stand for: files, folders, folders of them, shapes, classes."""
    for name in names:
        if not name:
            raise UsageError("MODEL: is empty; name a checkpoint, a folder or a config.json")
        path = Path(name)
        if path.is_dir() and not _is_checkpoint(path):
            yield from _inside(path)
        elif standing(path):
            yield Candidate(_label(path), path)
        elif name in shapes.SHAPES:
            yield Candidate(name, None)
        elif name in shapes.CLASSES:
            yield from (Candidate(one, None) for one in shapes.CLASSES[name])
        else:
            known = ", ".join((*shapes.SHAPES, *shapes.CLASSES))
            raise UsageError(
                f"{show(name)}: no such file or folder; name a checkpoint, a folder, a config.json "
                f"or one of {known}"
            )


def _is_checkpoint(folder: Path) -> bool:
    return any(path.suffix == ".safetensors" for path in folder.iterdir())


def _inside(folder: Path) -> Iterator[Candidate]:
    """The checkpoints in a folder and in the folders in it, by name."""
    found = list(_checkpoints(folder, 1))
    if not found and (folder / "config.json").is_file():
        found = [folder / "config.json"]
    if not found:
        raise UsageError(
            f"{show(folder)}: no checkpoint in it; name a folder with .gguf, .safetensors or .pt "
            "files"
        )
    for path in found:
        yield Candidate(_label(folder if path.name == "config.json" else path), path)


def _checkpoints(folder: Path, deeper: int) -> Iterator[Path]:
    """Files and folders that are a checkpoint, in so many levels of folders below, too."""
    for path in sorted(folder.iterdir()):
        if (path.is_file() and path.suffix.lower() in SUFFIXES) or (
            path.is_dir() and _is_checkpoint(path)
        ):
            yield path
        elif path.is_dir() and deeper:
            yield from _checkpoints(path, deeper - 1)


def _label(path: Path) -> str:
    return display(show(path.absolute().name))


def load(candidate: Candidate) -> tuple[Model, bool]:
    """The model as far as planning needs it, and whether it has a tokenizer. CheckpointError."""
    path = candidate.path
    if path is None:
        return shapes.shape_model(candidate.name), False
    if path.is_file() and path.suffix.lower() == ".json":
        return shapes.config_model(path), False
    return load_headers(path), True


# ---- planning ----
def base_of(model: Model, text: bool, options: CompileOptions, hdf: Hdf) -> State:
    """What is the same at every quantisation and context: norms, ties, tokenizer, placement."""
    state = State(model, options, hdf)
    for name, function in pipeline.PASSES:
        if name == "layout":
            break
        if text or name not in ("tokenizer", "chat_template"):
            state = function(state)
    return state if text else replace(state, tokn=shapes.stand_in(model))


def planned(base: State, options: CompileOptions) -> State:
    """The plan of a compile with these options, as the compiler makes it."""
    info = base.model.spec
    notes = (*base.model.notes, *pipeline.context_notes(info, options), *base.notes)
    state = replace(base, options=options, inputs=base.model.inputs, notes=notes)
    return planning.plan_memory(planning.lay_out(pipeline.with_text(state)))


def fitted(state: State) -> State | None:
    """The state with what gemmake by itself leaves in storage to keep to the budget; None where
    that is not enough."""
    try:
        return planning.within_budget(state)
    except BudgetError:
        return None


def finest(state: State) -> State:
    """The plan with the finest groups of the KV cache that measuring may choose: the largest."""
    if not state.options.measured_kv:
        return state
    groups = planning.finest_groups(state)
    return planning.plan_memory(planning.lay_out(replace(state, kv_groups=groups)))


def options_of(wish: Wish, path: Path | None) -> CompileOptions:
    """The options of the compile that is advised."""
    quantization, kv_type = FORMS[wish.quality]
    return CompileOptions(
        model=path or Path("MODEL"),
        target=wish.target,
        output=Path("X.gembin"),
        quantization=quantization,
        kv_type=kv_type,
        context=wish.context,
        reserve_mib=wish.leave_free,
        ram_fraction=wish.ram_fraction,
        power_mode=wish.power_mode,
        storage=wish.storage,
        effort=wish.effort,
    )


# ---- judging ----
def _row(candidate: Candidate, advice: Advice) -> Row:
    """One candidate, whatever is wrong with it. Raises InternalError for a fault of the tool."""
    try:
        with sentences():
            return _judged(candidate, advice)
    except InternalError:
        raise
    except GemError as error:
        return Row(candidate.name, Fit.NO, reasons=(f"cannot be compiled: {error}",))


def _judged(candidate: Candidate, advice: Advice) -> Row:
    wish = advice.wish
    model, text = load(candidate)
    options = options_of(wish, candidate.path if text else None)
    options = firmware.adapted(options, advice.hdf)
    base = base_of(model, text, options, advice.hdf)
    plain = planned(base, options)
    plain_largest = finest(plain)
    largest = fitted(plain_largest)
    state = (fitted(plain) if largest else None) or plain
    work, machine = predictions.work_of(state), _machine(advice, options)
    found = predict.predict(work, machine, wish.longest_input, wish.longest_input)
    most = planning.memory_of(largest or plain_largest)
    flash = Verdict() if largest else _flash(plain_largest, advice)
    in_ram = largest is not None or (flash.fit is Fit.NO and most.ram <= advice.granted)
    verdicts = {
        CONTEXT: _trained(model, wish),
        FLASH: flash,
        MEMORY: Verdict() if in_ram else _memory(plain_largest, advice),
        SPEED: _speed(work, found, advice, options),
        FIRST_TOKEN: _latency(work, found, advice),
    }
    said = {what: verdict for what, verdict in verdicts.items() if verdict.fit is not Fit.YES}
    unmet = tuple(what for what, verdict in said.items() if verdict.fit is Fit.NO)
    return Row(
        name=candidate.name,
        fit=Fit.NO if unmet else Fit.OPEN if said else Fit.YES,
        unmet=unmet,
        undecided=tuple(what for what in said if what not in unmet),
        options=options,
        memory=planning.memory_of(state),
        most=most.ram,
        group_limit=0 if advice.hdf.bare else most.group_limit,
        prediction=found,
        reasons=tuple(verdict.reason for verdict in said.values()),
        remedies=tuple(_nearest(said)),
        offload=tuple(planning.offload_lines(state)) if state.cold else (),
        notes=state.notes,
        check=_checked(state, text) if wish.check else (),
    )


def _nearest(said: Mapping[str, Verdict]) -> Iterator[str]:
    """What comes nearest; where several things are missed, which of them it helps."""
    for what, verdict in said.items():
        if verdict.remedy:
            alone = f", for the {what} alone" if len(said) > 1 else ""
            yield f"{verdict.remedy}{alone}"


def _checked(state: State, text: bool) -> tuple[Finding, ...]:
    if not text:
        return (Finding("tokenizer", "open", "a shape has none; name a checkpoint"),)
    return check_text(state, SECONDS)


def _machine(advice: Advice, options: CompileOptions) -> predict.Machine:
    return predictions.machine_of(advice.hdf, options)


@dataclass(frozen=True)
class Verdict:
    """Of one thing that is asked: whether it is met, why not, and what comes nearest."""

    fit: Fit = Fit.YES
    reason: str = ""
    remedy: str = ""


def _trained(model: Model, wish: Wish) -> Verdict:
    trained = model.spec.trained_context
    if wish.context <= trained:
        return Verdict()
    room = trained - wish.answer
    remedy = f"--longest-input {room}" if room >= LEAST_INPUT else ""
    return Verdict(Fit.NO, f"trained for {trained} tokens, {wish.context} are wanted", remedy)


def _flash(largest: State, advice: Advice) -> Verdict:
    """Of a plan for a board that has no system: its weights stay there."""
    try:
        firmware.check_flash(planning.memory_of(largest), advice.hdf, largest.options.quantization)
    except BudgetError as error:
        reason, _, remedy = str(error).partition(": ")[2].rpartition("; use ")
        return Verdict(Fit.NO, reason, remedy)
    return Verdict()


def _memory(largest: State, advice: Advice) -> Verdict:
    """Of a plan that is over the budget."""
    granted, most = advice.granted, planning.memory_of(largest).ram
    reason = f"takes {math.ceil(most / MIB)} MiB of the {granted // MIB} MiB granted"
    told = planning.remedies(largest)
    fitting = [
        one
        for one in told
        if not one.grants
        and one.over(granted) <= 0
        and one.context - advice.wish.answer >= LEAST_INPUT
    ]
    if not fitting:
        grown = next((f", or {one.option}" for one in told if one.grants), "")
        return Verdict(Fit.NO, reason, f"a smaller model{grown or _share(advice.hdf, most)}")
    best = min(fitting, key=lambda one: (one.streams, -min(one.context, advice.wish.context)))
    return Verdict(Fit.NO, reason, _told(best, advice.wish))


def _told(remedy: Remedy, wish: Wish) -> str:
    """An option, the total that it leads to, and what is lost by it."""
    longest = remedy.context - wish.answer
    lost = [f"for inputs of {longest} tokens"] if longest < wish.longest_input else []
    lost += ["weights read from storage for every token"] if remedy.streams else []
    return ", ".join([f"gemmake {remedy.option}: {math.ceil(remedy.total / MIB)} MiB", *lost])


def _share(hdf: Hdf, most: int) -> str:
    """The share of the board's memory that would hold it, where that leaves what is reserved."""
    if hdf.memory is None:
        return ""
    total, wanted = hdf.memory.visible_mib, math.ceil(most / MIB)
    fraction = planning.share_of(wanted, total) if wanted <= total else 1.0
    fits = with_policy(hdf, None, fraction).ram_bytes() >= most
    return f", or --ram-fraction {fraction:g}" if fits else ""


def _speed(
    work: predict.Work, found: predict.Prediction, advice: Advice, options: CompileOptions
) -> Verdict:
    wanted = advice.wish.speed
    if wanted is None:
        return Verdict()
    if found.decode is None:
        return Verdict(Fit.OPEN, f"speed is not known: {found.machine.assumed[0]}")
    rate = found.decode.seconds.inverse()
    if rate.low >= wanted:
        return Verdict()
    fit = Fit.OPEN if rate.high >= wanted else Fit.NO
    told = predictions.tokens_a_second(found.decode)
    reason = f"{told} predicted of {wanted:g} wanted, limited by {found.decode.limit}"
    return Verdict(fit, reason, _other_mode(work, found, advice, options))


def _other_mode(
    work: predict.Work, found: predict.Prediction, advice: Advice, options: CompileOptions
) -> str:
    """The power mode in which decode is fastest, where that is another one."""
    best, text = found.decode.seconds.high if found.decode else 0.0, ""
    for mode in advice.hdf.power_mode:
        machine = _machine(advice, replace(options, power_mode=mode.id))
        time = predict.decode(work, machine, advice.wish.longest_input)
        if time is not None and time.seconds.high < best:
            best = time.seconds.high
            text = f"--power-mode {mode.id}: {predictions.tokens_a_second(time)}"
            if time.seconds.inverse().high < (advice.wish.speed or 0.0):
                text += ", which is not enough either"
    return text


def _latency(work: predict.Work, found: predict.Prediction, advice: Advice) -> Verdict:
    wish, machine = advice.wish, found.machine
    if wish.latency_ms is None:
        return Verdict()
    wanted = wish.latency_ms / 1e3
    if found.prefill is None:
        return Verdict(Fit.OPEN, f"the first token is not predicted: {machine.assumed[0]}")
    seconds = found.prefill.seconds
    if predictions.prompt_time(found) is None and seconds.low <= wanted:
        return Verdict(Fit.OPEN, f"the first token is not predicted: {machine.uncounted}")
    if seconds.high <= wanted:
        return Verdict()
    fit = Fit.OPEN if seconds.low <= wanted else Fit.NO
    told = predictions.duration(seconds)
    reason = (
        f"first token of {wish.longest_input} tokens after {told}, {wish.latency_ms:g} ms wanted, "
        f"limited by {found.prefill.limit}"
    )
    shorter = longest_within(work, machine, wish.longest_input, wanted)
    remedy = f"--longest-input {shorter} meets it" if shorter >= LEAST_INPUT else ""
    return Verdict(fit, reason, remedy)


def longest_within(work: predict.Work, machine: predict.Machine, most: int, seconds: float) -> int:
    """The longest prompt, of up to `most` tokens, whose first token comes in time at worst."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        time = predict.prefill(work, machine, middle)
        if time is not None and time.seconds.high <= seconds:
            low = middle
        else:
            high = middle - 1
    return low


def nothing_fits(advice: Advice) -> BudgetError | None:
    """The error to end with where no candidate does what is asked."""
    if any(row.fit is not Fit.NO for row in advice.rows):
        return None
    missed = [what for what in WISHES if any(what in row.unmet for row in advice.rows)]
    told = f"missed is {', '.join(missed)}: " if missed else ""
    return BudgetError(
        f"{advice.hdf.id}: no candidate does what is asked; {told}the rows above say what comes "
        "nearest"
    )
