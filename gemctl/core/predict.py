"""What the temperature will be: a line through the last seconds, and a model fitted on line.

Two predictors, weighed by how well each has done so far:

    line    T + slope * tau * (1 - exp(-H / tau)); slope by least squares over 20 s. It learns of a
            change only as the line bends. Where the ambient temperature is known, what that does
            is taken out of the line and put in by its own: A acts with the lag tau, and with a
            gain of exactly 1, so that nothing has to be learnt.
    model   tau * dT/dt = T_amb + offset + R * P - T, plus the part of R that acts at once. Fitted
            by recursive least squares that forgets slowly (a fan that fails is another R). Needs
            the power; sees a change of the power at once.

Both let the ambient temperature go on as it goes; growing time per token only ever adds to the
prediction. Everything here is a value: `observe` returns the next one.

Times in seconds, temperatures in degrees Celsius, powers in watts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

HORIZON_S = 30.0
SPAN_S = 20.0  # the line goes through so much of the past
BIN_S = 0.5  # samples are averaged over this before the line is laid
AMBIENT_SPAN_S = 120.0
AMBIENT_BIN_S = 5.0
SPAN_LEAST = 0.4  # of the span: below it the line is noise
TAU_S = 90.0  # when nothing is known
RTHETA = 2.5
TAU_RANGE = (5.0, 3600.0)
RTHETA_RANGE = (0.05, 100.0)
OFFSET_MOST_C = 60.0

FIT_S = 10.0  # the model is fitted to means over this
FORGET = 0.98  # of one fit's weight at the next: a memory of 500 s
STILL = 0.02  # C/s: below it, and with a steady power, nothing is learnt
STEADY = 0.05  # of the power
FITS_LEAST = 8  # before the model may speak
SCORES_LEAST = 4  # predictions that have come due before it may speak
SCORE_WEIGHT = 0.1  # of a new error in the running means
MOVED_C = 1.0  # where nothing moves, nothing can be told apart
POWER_HELD = 0.1  # a prediction is judged where the power stayed within this share

CHIP_TAU_S = 4.0  # the chip over its heat sink, with the sensor: usual, and no figure depends on it
STEP_TAU_RANGE = (10.0, 1200.0)  # a step test of six minutes tells no more

TREND_C = 20.0  # added per doubling of the time per token
TREND_MOST_C = 2.0


# The line.


@dataclass(frozen=True)
class Trend:
    """A quantity's last seconds, as means over a bin each, and the line through them."""

    span_s: float = SPAN_S
    bin_s: float = BIN_S
    bins: tuple[tuple[float, float], ...] = ()  # (time, mean), ascending
    opened_s: float = 0.0  # the bin being filled
    time_sum: float = 0.0
    value_sum: float = 0.0
    count: int = 0
    slope: float | None = None  # per second; None = too little seen

    def add(self, now_s: float, value: float) -> Trend:
        """The trend with one more sample. A clock that goes back starts it anew."""
        if self.count and now_s < self.opened_s:
            return Trend(self.span_s, self.bin_s).add(now_s, value)
        if not self.count or now_s - self.opened_s < self.bin_s:
            return Trend(
                self.span_s,
                self.bin_s,
                self.bins,
                self.opened_s if self.count else now_s,
                self.time_sum + now_s,
                self.value_sum + value,
                self.count + 1,
                self.slope,
            )
        closed = (self.time_sum / self.count, self.value_sum / self.count)
        bins = tuple(b for b in (*self.bins, closed) if now_s - b[0] <= self.span_s + self.bin_s)
        slope = line_slope(bins, self.span_s)
        return Trend(self.span_s, self.bin_s, bins, now_s, now_s, value, 1, slope)


def line_slope(points: Sequence[tuple[float, float]], span_s: float = SPAN_S) -> float | None:
    """Slope of the least-squares line, per second; None below four points or 40 % of the span."""
    if len(points) < 4 or points[-1][0] - points[0][0] < SPAN_LEAST * span_s:
        return None
    (first_s, first), count = points[0], len(points)
    times = values = squares = shared = 0.0
    for time, value in points:  # relative to the first, so that large clocks cost no digits
        seconds, change = time - first_s, value - first
        times += seconds
        values += change
        squares += seconds * seconds
        shared += seconds * change
    return (count * shared - times * values) / (count * squares - times * times)


def line_ahead(temp_c: float, slope: float, tau_s: float, horizon_s: float) -> float:
    """Temperature after `horizon_s` where the slope decays with `tau_s`."""
    return temp_c + slope * tau_s * (1.0 - math.exp(-horizon_s / tau_s))


def drift(slope: float, tau_s: float, horizon_s: float) -> float:
    """What an ambient temperature that goes on changing adds within `horizon_s`."""
    return slope * (horizon_s - tau_s * (1.0 - math.exp(-horizon_s / tau_s)))


def trend_c(step_time_trend: float | None) -> float:
    """Degrees added for a time per token that grew by this share (0.1 = 10 %) at equal settings.

    Steps that take longer by themselves tell of heat that the sensor does not show: the board's
    firmware caps clocks, or another load warms the same chip. Shorter steps prove nothing.
    """
    if step_time_trend is None or not step_time_trend > 0.0:
        return 0.0
    return min(TREND_MOST_C, TREND_C * step_time_trend)


# The model.

Row = tuple[float, float, float, float]
Matrix = tuple[Row, Row, Row, Row]
SCALES: Row = (30.0, 10.0, 1.0, 1.0)  # of the regressors, so that all are of order 1


@dataclass(frozen=True)
class Fit:
    """The model's parameters and what the recursive fit carries along."""

    theta: Row  # of the scaled regressors: 1/tau, R/tau, offset/tau, R that acts at once
    spread: Matrix  # inverse information
    count: int = 0

    @property
    def tau_s(self) -> float:
        """Time constant."""
        return SCALES[0] / self.theta[0]

    @property
    def rtheta(self) -> float:
        """Degrees per watt at rest, all of it."""
        return self.theta[1] * SCALES[0] / (SCALES[1] * self.theta[0])

    @property
    def offset_c(self) -> float:
        """What other sources of heat, or a wrong ambient temperature, add at rest."""
        return self.theta[2] * self.tau_s

    def rest_c(self, ambient_c: float, power_w: float) -> float:
        """Temperature at rest at this power."""
        return ambient_c + self.offset_c + self.rtheta * power_w


def new_fit(rtheta: float | None = None, tau_s: float | None = None) -> Fit:
    """A fit that starts from a measurement, which it then trusts more, or from a guess."""
    tau = tau_s or TAU_S
    first = (SCALES[0] / tau, SCALES[1] * (rtheta or RTHETA) / tau, 0.0, 0.0)
    known = rtheta is not None and tau_s is not None
    share = 0.3 if known else 1.0
    doubt = tuple((share * s) ** 2 for s in (first[0], first[1], 0.1, 1.0))
    rows = [[0.0] * 4 for _ in range(4)]
    for index, value in enumerate(doubt):
        rows[index][index] = value / _NOISE
    return Fit(first, _matrix(rows))


_NOISE = 0.02**2  # variance of dT/dt that the fit expects, (C/s)^2
_SPREAD_MOST = 1e6


def _matrix(rows: Sequence[Sequence[float]]) -> Matrix:
    a, b, c, d = (_row(row) for row in rows)
    return a, b, c, d


def _row(values: Sequence[float]) -> Row:
    a, b, c, d = values
    return a, b, c, d


def update_fit(fit: Fit, regressors: Row, rate: float) -> Fit:
    """One step of recursive least squares; `rate` is dT/dt. Parameters stay in sane ranges."""
    x = [value / scale for value, scale in zip(regressors, SCALES, strict=True)]
    px = [math.fsum(p * v for p, v in zip(row, x, strict=True)) for row in fit.spread]
    gain_below = FORGET + math.fsum(v * p for v, p in zip(x, px, strict=True))
    error = rate - math.fsum(t * v for t, v in zip(fit.theta, x, strict=True))
    theta = [t + p / gain_below * error for t, p in zip(fit.theta, px, strict=True)]
    size = math.fsum(fit.spread[i][i] for i in range(4))
    # Without news the spread would grow without bound, and the next noise would move everything.
    forget = FORGET if size < _SPREAD_MOST else 1.0
    spread = [
        [(fit.spread[i][j] - px[i] * px[j] / gain_below) / forget for j in range(4)]
        for i in range(4)
    ]
    if not all(math.isfinite(value) for value in (*theta, *(v for row in spread for v in row))):
        return fit
    return Fit(_sane(theta), _matrix(spread), fit.count + 1)


def _sane(theta: Sequence[float]) -> Row:
    inverse = _clamp(theta[0] / SCALES[0], 1.0 / TAU_RANGE[1], 1.0 / TAU_RANGE[0])
    gain = _clamp(theta[1] / SCALES[1] / inverse, *RTHETA_RANGE) * inverse
    offset = _clamp(theta[2] / inverse, -OFFSET_MOST_C, OFFSET_MOST_C) * inverse
    at_once = _clamp(theta[3], 0.0, gain / inverse)
    return inverse * SCALES[0], gain * SCALES[1], offset, at_once


def _clamp(value: float, low: float, high: float) -> float:
    return min(high, max(low, value))


# Both together.

_AMBIENT = Trend(AMBIENT_SPAN_S, AMBIENT_BIN_S)


@dataclass(frozen=True)
class Pending:
    """Predictions that wait for their time, and the power under which they were made."""

    due_s: float
    from_c: float
    model_c: float
    line_c: float
    power_w: float


class Means(NamedTuple):
    """Of one window."""

    time_s: float  # the middle of it
    temp_c: float
    power_w: float
    chip_w: float


@dataclass(frozen=True)
class Window:
    """Sums over the present FIT_S, and the means of the one before."""

    opened_s: float = 0.0
    temp_sum: float = 0.0
    power_sum: float = 0.0
    chip_sum: float = 0.0  # of the power as the chip has come to feel it
    count: int = 0
    before: Means | None = None


@dataclass(frozen=True)
class Predictor:
    """Everything that was learnt. `ahead` is the prediction, `observe` the next predictor."""

    fit: Fit = field(default_factory=new_fit)
    line: Trend = Trend()
    ambient_line: Trend = _AMBIENT
    lagged_c: float = 0.0  # ambient temperature as it has come through to the chip
    seen_s: float | None = None  # last observation
    window: Window = Window()
    pending: tuple[Pending, ...] = ()
    model_error: float = 0.0  # running mean of squared errors, C^2
    line_error: float = 0.0
    scores: int = 0
    ambient_c: float | None = None
    lowest_c: float = math.inf  # that was read so far
    power_w: float | None = None  # mean over the last FIT_S
    chip_w: float | None = None  # as the chip has come to feel it
    tau_known: float | None = None  # from a calibration
    rtheta_known: float | None = None

    @property
    def confidence(self) -> float:
        """Weight of the model against the line, 0..1, by their squared errors so far."""
        if self.fit.count < FITS_LEAST or self.scores < SCORES_LEAST or self.power_w is None:
            return 0.0
        return self.line_error / (self.line_error + self.model_error + 1e-9)

    @property
    def tau_s(self) -> float:
        """The best time constant known."""
        if self.confidence >= 0.5:
            return self.fit.tau_s
        return self.tau_known or TAU_S

    @property
    def rtheta(self) -> float | None:
        """The best thermal resistance known, C/W; None = none."""
        return self.fit.rtheta if self.confidence >= 0.5 else self.rtheta_known

    @property
    def slope(self) -> float:
        """C/s now; 0 while too little is seen."""
        return (self.line.slope or 0.0) + self._to_come / self._line_tau

    @property
    def _line_tau(self) -> float:
        return self.tau_known or TAU_S

    @property
    def _to_come(self) -> float:
        """Degrees by which the ambient temperature will still move the chip's."""
        return 0.0 if self.ambient_c is None else self.ambient_c - self.lagged_c

    def ahead(
        self, temp_c: float, horizon_s: float = HORIZON_S, step_time_trend: float | None = None
    ) -> float:
        """Temperature in `horizon_s`, if the power stays as it is."""
        line = self.line_ahead(temp_c, horizon_s)
        weight = self.confidence
        model = self._model_ahead(temp_c, horizon_s) if weight > 0.0 else line
        mixed = weight * model + (1.0 - weight) * line
        return max(mixed, self._floor(temp_c, horizon_s)) + trend_c(step_time_trend)

    def _floor(self, temp_c: float, horizon_s: float) -> float:
        """What nothing cools down below: the air, as it goes on; where that is not known, the
        lowest that was read."""
        if self.ambient_c is None:
            return min(temp_c, self.lowest_c)
        going = min(0.0, (self.ambient_line.slope or 0.0) * horizon_s)
        return min(temp_c, self.ambient_c + going)

    def observe(
        self,
        now_s: float,
        temp_c: float,
        power_w: float | None = None,
        ambient_c: float | None = None,
    ) -> Predictor:
        """The predictor after one more reading."""
        following = self._surround(now_s, ambient_c)
        own = temp_c - following.lagged_c if following.ambient_c is not None else temp_c
        lowest = min(self.lowest_c, temp_c)
        line = following.line.add(now_s, own)
        following = replace(following, line=line, seen_s=now_s, lowest_c=lowest)
        if power_w is None:
            return replace(following, window=Window(), power_w=None, chip_w=None, pending=())
        seconds = 0.0 if self.seen_s is None else max(0.0, now_s - self.seen_s)
        return _fill(following, now_s, seconds, temp_c, power_w)

    def _surround(self, now_s: float, ambient_c: float | None) -> Predictor:
        """The predictor after the ambient temperature's last value; None keeps the one before."""
        known = self.ambient_c if ambient_c is None else ambient_c
        if known is None:
            return self
        if self.ambient_c is None or self.seen_s is None:  # the line so far is of something else
            fresh = replace(self, line=Trend(), ambient_line=_AMBIENT)
            return replace(fresh, ambient_c=known, lagged_c=known)
        seconds = max(0.0, now_s - self.seen_s)
        share = 1.0 - math.exp(-seconds / self._line_tau)
        return replace(
            self,
            ambient_c=known,
            lagged_c=self.lagged_c + share * (known - self.lagged_c),
            ambient_line=self.ambient_line.add(now_s, known),
        )

    def line_ahead(self, temp_c: float, horizon_s: float) -> float:
        """What the line alone predicts."""
        tau = self._line_tau
        own = line_ahead(temp_c, self.line.slope or 0.0, tau, horizon_s)
        coming = self._to_come * (1.0 - math.exp(-horizon_s / tau))
        return own + coming + self._drift(tau, horizon_s)

    def _model_ahead(self, temp_c: float, horizon_s: float) -> float:
        tau = self.fit.tau_s
        rest = self.fit.rest_c(_base(self), self.power_w or 0.0)
        reached = rest + (temp_c - rest) * math.exp(-horizon_s / tau)
        return reached + self._drift(tau, horizon_s)

    def _drift(self, tau_s: float, horizon_s: float) -> float:
        return drift(self.ambient_line.slope or 0.0, tau_s, horizon_s)


def new_predictor(rtheta: float | None = None, tau_s: float | None = None) -> Predictor:
    """A predictor; with the results of `calibrate thermal` where they are known."""
    return Predictor(fit=new_fit(rtheta, tau_s), tau_known=tau_s, rtheta_known=rtheta)


def _base(predictor: Predictor) -> float:
    """Ambient temperature; without one 25 C, and the fitted offset makes up for it."""
    return 25.0 if predictor.ambient_c is None else predictor.ambient_c


def _fill(
    predictor: Predictor, now_s: float, seconds: float, temp_c: float, power_w: float
) -> Predictor:
    """Adds to the window; closes it after FIT_S."""
    window = predictor.window
    if window.count and now_s < window.opened_s:
        window = Window()
    felt = power_w if predictor.chip_w is None else predictor.chip_w
    felt += (power_w - felt) * (1.0 - math.exp(-seconds / CHIP_TAU_S))
    if not window.count or now_s - window.opened_s < FIT_S:
        filled = Window(
            window.opened_s if window.count else now_s,
            window.temp_sum + temp_c,
            window.power_sum + power_w,
            window.chip_sum + felt,
            window.count + 1,
            window.before,
        )
        known = predictor.power_w if predictor.power_w is not None else power_w
        return replace(predictor, window=filled, power_w=known, chip_w=felt)
    sums = (window.temp_sum, window.power_sum, window.chip_sum)
    middle = (window.opened_s + now_s) / 2.0
    means = Means(middle, *(total / window.count for total in sums))
    closed = Window(now_s, temp_c, power_w, felt, 1, means)
    learnt = replace(predictor, window=closed, power_w=means.power_w, chip_w=felt)
    if window.before is None or middle - window.before.time_s > 3.0 * FIT_S:
        return replace(learnt, pending=())
    return _score(_learn(learnt, window.before, means), now_s, means)


def _learn(predictor: Predictor, before: Means, means: Means) -> Predictor:
    seconds = means.time_s - before.time_s
    still = abs(predictor.slope or 0.0) < STILL
    if still and abs(means.power_w - before.power_w) < STEADY * max(means.power_w, before.power_w):
        return predictor  # nothing to learn: noise would move what nothing holds
    regressors = (
        _base(predictor) - (means.temp_c + before.temp_c) / 2.0,
        (means.power_w + before.power_w) / 2.0,
        1.0,
        (means.chip_w - before.chip_w) / seconds,
    )
    rate = (means.temp_c - before.temp_c) / seconds
    return replace(predictor, fit=update_fit(predictor.fit, regressors, rate))


def _score(predictor: Predictor, now_s: float, means: Means) -> Predictor:
    """Judges predictions that have come due, and makes one more of each kind."""
    model, line, scores = predictor.model_error, predictor.line_error, predictor.scores
    waiting = []
    for made in predictor.pending:
        if abs(means.power_w - made.power_w) > POWER_HELD * max(made.power_w, 0.1):
            continue
        if made.due_s > now_s:
            waiting.append(made)
            continue
        if max(abs(c - made.from_c) for c in (means.temp_c, made.model_c, made.line_c)) < MOVED_C:
            continue
        weight = max(SCORE_WEIGHT, 1.0 / (scores + 1))
        model += weight * ((made.model_c - means.temp_c) ** 2 - model)
        line += weight * ((made.line_c - means.temp_c) ** 2 - line)
        scores += 1
    made = Pending(
        means.time_s + HORIZON_S,
        means.temp_c,
        predictor._model_ahead(means.temp_c, HORIZON_S),
        predictor.line_ahead(means.temp_c, HORIZON_S),
        means.power_w,
    )
    return replace(
        predictor,
        pending=(*waiting, made),
        model_error=model,
        line_error=line,
        scores=scores,
    )


# `calibrate thermal`.


class StepFit(NamedTuple):
    """Result of a step test."""

    rtheta_c_per_w: float
    tau_s: float


def fit_step_response(samples: Sequence[tuple[float, float, float]]) -> StepFit:
    """Thermal resistance and time constant from (time, temperature, power) of a step test.

    The test starts at rest and changes the power at least once; the load need not be constant. For
    every time constant the rest is linear: the temperature against the power as the heat sink sees
    it, late, and as the chip sees it, at once. Raises ValueError with a sentence where the samples
    cannot tell.
    """
    if any(b[0] <= a[0] for a, b in pairwise(samples)):
        raise ValueError("step test: times do not ascend; sort the samples")
    if len(samples) < 20 or samples[-1][0] - samples[0][0] < 60.0:
        raise ValueError("step test: less than 20 samples or 60 s; run it for six minutes")
    powers = [power for _, _, power in samples]
    if max(powers) - min(powers) < 0.5:
        raise ValueError("step test: the power changed by less than 0.5 W; load the machine")
    at_once = _centred(_delayed(samples, CHIP_TAU_S))
    temps = _centred([temp for _, temp, _ in samples])
    low, high = math.log(STEP_TAU_RANGE[0]), math.log(STEP_TAU_RANGE[1])

    def error(log_tau: float) -> float:
        return _plane(_centred(_delayed(samples, math.exp(log_tau))), at_once, temps)[0]

    grid = [low + (high - low) * index / 40 for index in range(41)]
    errors = [error(log_tau) for log_tau in grid]
    best = errors.index(min(errors))
    tau = math.exp(_narrow(error, grid[max(0, best - 1)], grid[min(40, best + 1)]))
    delayed = _centred(_delayed(samples, tau))
    _, sink, chip = _plane(delayed, at_once, temps)
    rise = sink * (max(delayed) - min(delayed)) + chip * (max(at_once) - min(at_once))
    if rise < 2.0 or not RTHETA_RANGE[0] <= sink + chip <= RTHETA_RANGE[1]:
        raise ValueError(
            f"step test: the load raised the temperature by {rise:.1f} C, {sink + chip:.2f} C/W; "
            "begin with a machine at rest and load all of its cores"
        )
    return StepFit(sink + chip, tau)


def _narrow(error: Callable[[float], float], low: float, high: float) -> float:
    """Where the error is least, by golden section."""
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    for _ in range(16):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if error(left) < error(right):
            high = right
        else:
            low = left
    return (low + high) / 2.0


def _delayed(samples: Sequence[tuple[float, float, float]], tau_s: float) -> list[float]:
    """The power behind a lag; at rest before the first sample."""
    seen, delayed = [], samples[0][2]
    before = samples[0][0]
    for time, _, power in samples:
        delayed += (power - delayed) * (1.0 - math.exp(-(time - before) / tau_s))
        before = time
        seen.append(delayed)
    return seen


def _centred(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _plane(x: list[float], y: list[float], z: list[float]) -> tuple[float, float, float]:
    """(sum of squared errors, a, b) of z = a x + b y by least squares; b not below 0."""
    xx, yy, xy = _dot(x, x), _dot(y, y), _dot(x, y)
    xz, yz, zz = _dot(x, z), _dot(y, z), _dot(z, z)
    free = xx * yy - xy * xy
    if xx <= 0.0:
        return zz, 0.0, 0.0
    b = (xx * yz - xy * xz) / free if free > 1e-9 * xx * yy else 0.0
    b = max(0.0, b)
    a = (xz - b * xy) / xx
    return zz - 2.0 * (a * xz + b * yz) + a * a * xx + 2.0 * a * b * xy + b * b * yy, a, b


def _dot(x: list[float], y: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))
