"""How noisy the gradient is: measured from the lanes of a step, smoothed over many, with an interval.

Note [Two squares, two unknowns]
Lane v holds b_v samples and the mean gradient g_v of them; N = Σ b_v, V is the number of lanes with b_v > 0. Samples
are drawn independently around the true gradient G₀ with covariance Σ, so E|g_v|² = |G₀|² + tr(Σ)/b_v. Weighted by
b_v/N, the lanes have the mean square S = Σ (b_v/N)|g_v|², and their weighted mean is the step's gradient
G = Σ (b_v/N) g_v:

    E[S]    = |G₀|² + Σ (b_v/N)·tr(Σ)/b_v  = |G₀|² + V·tr(Σ)/N
    E[|G|²] = |G₀|² + Σ (b_v/N)²·tr(Σ)/b_v = |G₀|² + tr(Σ)/N

Two linear equations; solved for the unknowns they give two estimates without bias:

    tr(Σ) = N/(V−1)·(S − |G|²)        |G₀|² = (V·|G|² − S)/(V−1)

For even lanes this is appendix A.1 of McCandlish et al. 2018 with B_small = N/V and B_big = N.

Note [Ratio of averages]
The noise scale B_simple = tr(Σ)/|G₀|² of a single step is useless: its denominator is often near zero or negative. The
mean of ratios is biased, and need not even exist. The ratio of the two averages is nearly unbiased, so each of the two
is averaged by itself, and one estimate may well be negative.

Note [Interval]
The averages m_G and m_V have an empirical covariance C (of the measurements, divided by how many equally weighted ones
the average is worth). A ratio R is believable if m_V − R·m_G, whose mean is 0 at the true R, is within Z of its own
standard deviations of 0: (m_V − R·m_G)² ≤ Z²·(C_VV − 2R·C_GV + R²·C_GG). This quadratic in R is solved for its two
ends (Fieller). Where the delta method is good the two agree. Where |G₀|² may as well be 0 this one has no upper
end, as is true, and the delta method still gives one. A |G₀|² that moves during the window counts as scatter, so the
interval errs on the wide side.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Real

from lockstep.errors import BadArgument

LEAST_COUNT = 20
WIDEST = 4.0
Z = 2.0  # standard deviations: about 95 of 100 intervals hold the truth


@dataclass(frozen=True)
class StepSquares:
    """All lanes' squares in a step and that of their weighted mean; lanes are weighted by their samples or tokens."""

    weights: Mapping[int, float]
    lanes: Mapping[int, float]
    whole: float


@dataclass(frozen=True)
class Measured:
    """One step's estimates of |G₀|² and of tr(Σ), the variance of a single sample. Each may be negative by chance."""

    gradient_square: float
    variance: float


def measure(lane_squares: Mapping[int, float], weights: Mapping[int, float], whole_square: float) -> Measured:
    """The estimates of one step, from |g_v|² of every lane, its weight b_v and |G|² of the weighted mean.

    See Note [Two squares, two unknowns]. The variance is that of one unit of weight: a sample, or a token where lanes
    are weighted by tokens. Lanes of weight 0 do not count. Squares that are NaN or infinite give a measurement that is
    not finite, which NoiseScale leaves out.
    """
    present = _present(weights)
    unknown = sorted(set(lane_squares) ^ set(weights))
    if unknown:
        raise BadArgument(f"lanes {unknown} have a weight or a square, not both: give both for the same lanes")
    num_lanes, total = len(present), math.fsum(present.values())
    whole = _square("the square of the whole gradient", whole_square)
    mean = sum(weight / total * _square(f"the square of lane {v}", lane_squares[v]) for v, weight in present.items())
    return Measured((num_lanes * whole - mean) / (num_lanes - 1), total / (num_lanes - 1) * (mean - whole))


@dataclass(frozen=True)
class Noise:
    """The noise scale after `step`, from `count` measurements; batches are in the unit of the lanes' weights.

    `effective` is how many equally weighted measurements the smoothed values are worth. `low` and `high` enclose the
    noise scale in about 95 of 100 cases; `high` is infinite where the gradient cannot be distinguished from its noise.
    """

    step: int
    batch: float
    count: int
    left_out: int
    effective: float
    gradient_square: float
    variance: float
    low: float
    high: float
    preconditioned: bool

    @property
    def simple(self) -> float:
        """B_simple = tr(Σ)/|G₀|²; infinite where the smoothed |G₀|² is not positive."""
        return max(self.variance, 0.0) / self.gradient_square if self.gradient_square > 0 else math.inf

    @property
    def critical_batch(self) -> float:
        """The batch at which half of the samples' worth is lost to averaging; estimated by B_simple."""
        return self.simple

    @property
    def sure(self) -> bool:
        """Whether there are enough measurements, and their interval is narrow enough, to act on."""
        return self.count >= LEAST_COUNT and self.low > 0 and self.high <= WIDEST * self.low < math.inf


@dataclass(frozen=True)
class _Moments:
    """Weighted means, and sums of squared deviations, of the pairs measured so far; the newest has weight 1.

    Means are of what was measured, from the first on: weights are divided by their own sum, so nothing is biased to 0.
    """

    weight: float = 0.0
    weight_squares: float = 0.0
    gradient_square: float = 0.0
    variance: float = 0.0
    scatter_gg: float = 0.0
    scatter_gv: float = 0.0
    scatter_vv: float = 0.0

    @property
    def effective(self) -> float:
        return self.weight**2 / self.weight_squares if self.weight_squares else 0.0

    def followed_by(self, new: Measured, decay: float) -> "_Moments":
        old = decay * self.weight
        g, v = new.gradient_square - self.gradient_square, new.variance - self.variance
        part = 1 / (old + 1)
        return _Moments(
            weight=old + 1,
            weight_squares=decay**2 * self.weight_squares + 1,
            gradient_square=self.gradient_square + part * g,
            variance=self.variance + part * v,
            scatter_gg=decay * self.scatter_gg + old * part * g * g,
            scatter_gv=decay * self.scatter_gv + old * part * g * v,
            scatter_vv=decay * self.scatter_vv + old * part * v * v,
        )

    def covariance_of_means(self) -> tuple[float, float, float]:
        """The variances and covariance of the two means: the unbiased covariance over the effective count."""
        per_scatter = 1 / (self.weight * (self.effective - 1))
        return self.scatter_gg * per_scatter, self.scatter_gv * per_scatter, self.scatter_vv * per_scatter


class NoiseScale:
    """Smooths the measurements of a run into the noise scale with its interval. See Note [Ratio of averages].

    A measurement counts 1 when it is new and 1/e of that `memory` measurements later. `preconditioned` is the kind of
    squares that it gets; it changes no arithmetic, and is part of the result.
    """

    def __init__(self, *, memory: float = 100, preconditioned: bool = False) -> None:
        self.memory = _memory(memory)
        self.preconditioned = preconditioned
        self.count = 0
        self.left_out = 0
        self.step = -1
        self.batch = 0.0
        self._moments = _Moments()

    def add(self, step: int, batch: float, measured: Measured) -> None:
        """Adds the measurement of a step of `batch` samples; one that is not finite is only counted."""
        self._go_to(step)
        self.batch = positive("batch", batch)
        if _usable(measured):
            self._moments = self._moments.followed_by(measured, 1 - 1 / self.memory)
            self.count += 1
        else:
            self.left_out += 1

    def skip(self, step: int) -> None:
        """Counts a step that has no measurement: skipped, or with fewer than two lanes."""
        self._go_to(step)
        self.left_out += 1

    @property
    def noise(self) -> Noise:
        """The present estimate. Before the first measurement its interval is from 0 to infinity."""
        low, high = _interval(self._moments) if self.count > 1 else (0.0, math.inf)
        return Noise(
            step=self.step,
            batch=self.batch,
            count=self.count,
            left_out=self.left_out,
            effective=self._moments.effective,
            gradient_square=self._moments.gradient_square,
            variance=self._moments.variance,
            low=low,
            high=high,
            preconditioned=self.preconditioned,
        )

    def state_dict(self) -> dict[str, float | int]:
        """All that is kept, as plain numbers that JSON carries exactly."""
        return {**{name: getattr(self, name) for name in _KEPT}, **asdict(self._moments)}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Restores the state, memory included; refuses the state of the other kind of squares."""
        _check_state(state, self.preconditioned)
        for name in _KEPT:
            setattr(self, name, state[name])
        self._moments = _Moments(**{name: float(state[name]) for name in _MOMENTS})

    def _go_to(self, step: int) -> None:
        if not isinstance(step, int) or isinstance(step, bool) or step <= self.step:
            raise BadArgument(f"step must be a whole number above {self.step}, the last one seen, not {step!r}")
        self.step = step


def positive(what: str, value: object) -> float:
    """The value as a float; refuses all but finite numbers above 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise BadArgument(f"{what} must be a number above 0, not {value!r}")
    return float(value)


_KEPT = ("memory", "preconditioned", "count", "left_out", "step", "batch")
_MOMENTS = tuple(field.name for field in fields(_Moments))


def _present(weights: Mapping[int, float]) -> dict[int, float]:
    """The lanes that hold anything, in lane order."""
    present = {v: positive(f"the weight of lane {v}", weights[v]) for v in sorted(weights) if weights[v] != 0}
    if len(present) < 2:
        raise BadArgument(f"noise needs two lanes with samples or more, not {len(present)}: start with lanes=2 or more")
    return present


def _square(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or float(value) < 0:
        raise BadArgument(f"{what} must be a number of 0 or more, not {value!r}")
    return float(value)


def _memory(value: object) -> float:
    memory = positive("memory", value)
    if memory < 2:
        raise BadArgument(f"memory must be 2 measurements or more, not {value!r}: one alone has no interval")
    return memory


def _usable(measured: Measured) -> bool:
    """Finite, and so are its squares, which are summed too: one overflow would spoil every later interval."""
    return abs(measured.gradient_square) < 1e150 and abs(measured.variance) < 1e150


def _interval(moments: _Moments) -> tuple[float, float]:
    """The ends of the believable noise scales, see Note [Interval], within 0 to infinity."""
    gg, gv, vv = (Z**2 * entry for entry in moments.covariance_of_means())
    g, v = moments.gradient_square, moments.variance
    a, b, c = g * g - gg, g * v - gv, v * v - vv  # believable: a·R² − 2b·R + c ≤ 0
    if a > 0 and g < 0:
        return 0.0, math.inf  # a square that is surely negative: the lanes are not independent
    far = b + math.sqrt(max(b * b - a * c, 0.0))
    low = c / far if c > 0 and v > 0 and far > 0 else 0.0
    return low, max(far / a, 0.0) if a > 0 else math.inf


def _check_state(state: Mapping[str, float | int], preconditioned: bool) -> None:
    odd = sorted(set(state) ^ {*_KEPT, *_MOMENTS})
    if odd:
        raise BadArgument(f"this is not the state of a NoiseScale, which has other keys: {', '.join(odd)}")
    bad = [name for name, value in state.items() if not isinstance(value, int | float) or not math.isfinite(value)]
    if bad:
        raise BadArgument(f"the state of a NoiseScale has finite numbers only; not so: {', '.join(bad)}")
    if bool(state["preconditioned"]) is not preconditioned:
        kind = "preconditioned" if state["preconditioned"] else "plain"
        raise BadArgument(f"the state is of {kind} squares: load it into a NoiseScale of the same kind")
